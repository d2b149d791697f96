"""Models out: a run's model.pt, and from it a folder in Hugging Face's Llama format.

    python export.py --model out/edit/model.pt --out my_model

train.py writes model.pt with save_model(): a dictionary of plain values and tensors, loaded without
executing anything in it. `model`: the state dict of model.Llama, fp32; `model_config`: the fields
of ModelConfig; `tokenizer`: see plumbing/tokenizer.py; `config`: the run's flags.

The package transformers writes the folder. It opens it, and so do --init_from and sample.py.
"""

import os
from pathlib import Path

import torch

from config import Parser, UserError, check_limits, explain, run_command
from plumbing.load_model import FIELDS, Source, open_model, quiet_transformers, their_names
from plumbing.text import new_folder, to_disk
from plumbing.tokenizer import UNKNOWN, JsonTokenizer, to_json


def whole_model(model) -> dict:
    """The parameters of a shard.ShardedModel in fp32 on the CPU of rank 0, gathered layer by layer
    ({} on other ranks). The ranks of replica 0 call it; the names are those of model.Llama."""
    mesh = model.mesh
    state = {}
    for l, (layout, master) in enumerate(zip(model.layouts, model.masters)):
        whole = master.new_empty(layout.padded)
        mesh.shard_group.own_piece(whole).copy_(master)
        # [shard] all-gather, P fp32, once per call and layer
        mesh.all_gather(whole, mesh.shard_group).wait()
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
    write_model(Path(path), saved)


def write_model(path: Path, saved: dict):
    """Write a model.pt, whole or not at all. Raises UserError if it cannot be written."""
    unfinished = Path(f"{path}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed
        unfinished.unlink(missing_ok=True)  # it may be a link to somebody else's file
        with open(unfinished, "xb") as file:
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        to_disk(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save raises its own error after an OSError
        unfinished.unlink(missing_ok=True)  # a full disk needs the room
        reason = explain(error)[1]
        raise UserError(f"{path} could not be written: {reason}") from None


def write_folder(source: Source, out: str):
    """Write the new folder `out`, whole or not at all. Raises UserError, also if model.py has been
    changed to another model than Llama."""
    names = their_names(source.config.n_layer)
    for name in sorted(names.keys() ^ source.tensors.keys()):
        has = "has" if name in source.tensors else "lacks"
        raise UserError(f"{source.path} is of another model than Llama: it {has} {name}")

    transformers = quiet_transformers()
    ours = source.config
    described = {theirs: getattr(ours, name) for name, theirs in FIELDS.items()}
    config = transformers.LlamaConfig(**described, bos_token_id=None, eos_token_id=None)
    config.rope_parameters = {"rope_type": "default", "rope_theta": ours.rope_base}
    tensors = {}
    for name, rows in names.items():
        tensors.update(zip(rows, source.tensors[name].chunk(len(rows))))

    with new_folder(out) as folder:
        if source.tokenizer != UNKNOWN:
            tokenizer = JsonTokenizer(to_json(source.tokenizer))
            config.eos_token_id = tokenizer.eot_token
            names = {"eos_token": tokenizer.end_of_text}
            if tokenizer.begin:  # what stood in front of each document in training
                config.bos_token_id = tokenizer.begin[0]
                names["bos_token"] = tokenizer.tokenizer.id_to_token(config.bos_token_id)
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizer.tokenizer, **names
            ).save_pretrained(folder)
        with torch.device("meta"):  # the tensors are there already
            model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(folder, state_dict=tensors)


def main():
    parser = Parser(description="Write a model of train.py in Hugging Face's Llama format.")
    parser.add_argument("--model", required=True, metavar="FILE", help="a run's model.pt")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder")
    args = parser.parse_args()
    for name, value in vars(args).items():
        check_limits(f"--{name}", value, {})
    write_folder(open_model(args.model), args.out)
    print(f"{args.out}: transformers.AutoModelForCausalLM.from_pretrained({args.out!r})")


if __name__ == "__main__":
    run_command("export.py", main)
