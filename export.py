"""Models out: a run's model.pt, and from it a folder in Hugging Face's Llama format.

    python export.py --model out/edit/model.pt --out my_model

train.py writes model.pt with save_model(): a dictionary of plain values and tensors, loaded without
executing anything in it. `model`: the state dict of model.Llama, fp32; `model_config`: the fields
of ModelConfig; `tokenizer`: see plumbing/tokenizer.py; `config`: the run's flags.

transformers opens the folder, and so do --init_from and sample.py. It needs the packages
safetensors and, for a tokenizer.json, tokenizers.
"""

import json
import os
from pathlib import Path

import torch

from config import Parser, UserError, explain, run_command
from data import new_folder
from plumbing.load_model import FIELDS, FIXED, Source, open_model, shapes, their_names
from plumbing.tokenizer import UNKNOWN, to_json


def whole_model(model) -> dict:
    """The parameters of a shard.ShardedModel in fp32 on the CPU of rank 0, gathered layer by layer
    ({} on other ranks). The ranks of replica 0 call it; the names are those of model.Llama."""
    mesh = model.mesh
    state = {}
    for l, (layout, master) in enumerate(zip(model.layouts, model.masters)):
        whole = master.new_empty(layout.padded)
        mesh.shard.own_piece(whole).copy_(master)
        # [shard] all-gather, P fp32, once per call and layer
        mesh.all_gather(whole, mesh.shard).wait()
        if mesh.rank == 0:
            for name, value in layout.cut(whole).items():
                state[f"layers.{l}.{name}"] = value.to("cpu", torch.float32, copy=True)
    return state


def save_model(path, model, tokenizer: str, flags: dict):
    """Write a model.pt, whole or not at all. The ranks of replica 0 call it. Raises UserError on
    rank 0 if it cannot be written."""
    weights = whole_model(model)
    if model.mesh.rank != 0:
        return
    saved = {"model": weights, "model_config": vars(model.config)}
    saved |= {"tokenizer": tokenizer, "config": flags}
    unfinished = f"{path}.tmp"
    try:
        with open(unfinished, "wb") as file:
            torch.save(saved, file)
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # torch.save raises its own error after an OSError
        Path(unfinished).unlink(missing_ok=True)  # a full disk needs the room
        reason = explain(error)[1]
        raise UserError(f"{path} could not be written: {reason}") from None


def write_folder(source: Source, out: str):
    """Write the new folder `out`, whole or not at all. Raises UserError."""
    config = source.config
    tensors = {}
    for name in shapes(config):
        theirs = their_names(name)
        for part_name, part in zip(theirs, source.tensors[name].chunk(len(theirs))):
            tensors[part_name] = part
    described = {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()} | FIXED
    described["architectures"] = ["LlamaForCausalLM"]
    described["bos_token_id"] = None
    described["eos_token_id"] = None
    files = {"config.json": described}
    if source.tokenizer != UNKNOWN:
        tokenizer = to_json(source.tokenizer)
        described["eos_token_id"] = tokenizer.eot_token
        files["tokenizer.json"] = json.loads(tokenizer.text)
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.end_of_text,
        }
    with new_folder(out) as folder:
        from safetensors.torch import save_file

        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def main():
    parser = Parser(description="Write a model of train.py in Hugging Face's Llama format.")
    parser.add_argument("--model", required=True, metavar="FILE", help="a run's model.pt")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder")
    args = parser.parse_args()
    write_folder(open_model(args.model), args.out)
    print(f"{args.out}: transformers.AutoModelForCausalLM.from_pretrained({args.out!r})")


if __name__ == "__main__":
    run_command("export.py", main)
