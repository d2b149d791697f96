"""Models in files: a run's model.pt, and folders in Hugging Face's Llama format, in and out.

    python hf.py --model out/edit/model.pt --out my_model             # for transformers
    torchrun ... train.py --init_from my_model --data my_corpus       # or a model.pt

model.pt is a dictionary of plain values and tensors, loaded without executing anything in it.
`model`: the state dict of model.Llama, fp32; `model_config`: the fields of ModelConfig;
`tokenizer`: see plumbing/tokenizer.py; `config`: the run's flags.

model.py is the Llama architecture; only names and the fused matrices differ. What model.py does not
have is replaced at loading: heads that share keys and values (GQA) get copies of their own, a tied
output matrix becomes a copy of the embedding. So such a model is larger when it comes back. All
else (biases, other activations, scaled rotary positions) is refused. The package transformers reads
and writes the folders. A rank that opens one holds the whole model once.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from config import Parser, UserError, check_limits, explain, run_command
from model import Llama, ModelConfig
from plumbing.tokenizer import UNKNOWN, JsonTokenizer, to_json

FIELDS = {  # of ModelConfig -> of transformers.LlamaConfig
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size",
    "n_hidden": "intermediate_size", "norm_eps": "rms_norm_eps",
}  # fmt: skip
BLOCK = {  # our matrix or gain of a block -> theirs; several are its rows
    "attention_norm": ["input_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "out": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


# ---- model.pt ----


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
    except (OSError, RuntimeError) as error:  # torch.save raises its own error after an OSError
        unfinished.unlink(missing_ok=True)  # a full disk needs the room
        reason = explain(error)[1]
        raise UserError(f"{path} could not be written: {reason}") from None


def make_llama(config: ModelConfig, tensors: dict) -> Llama:
    """The model with these parameters, not copied. Raises RuntimeError if a name or a shape
    differs."""
    with torch.device("meta"):  # without memory
        model = Llama(config)
    model.load_state_dict(tensors, assign=True)
    return model


# ---- a model to start from ----


@dataclass
class Source:
    """A model in files. tensors: model.Llama's state dict; that of a model.pt is memory-mapped."""

    path: str
    config: ModelConfig
    tokenizer: str  # the argument of make_tokenizer()
    tensors: dict
    notes: str = ""  # what model.py does not have

    def copy_to(self, model):
        """Set the parameters of a shard.ShardedModel. Frees each tensor that is copied."""
        for l, (layout, master) in enumerate(zip(model.layouts, model.masters)):
            whole = master.new_zeros(layout.padded)
            for name, place in layout.cut(whole).items():
                place.copy_(self.tensors.pop(f"layers.{l}.{name}"))
            master.copy_(model.mesh.shard_group.own_piece(whole))

    def is_padded(self, corpus) -> bool:
        """Has the model the corpus's tokens, and some that fill up its vocabulary?"""
        padded = -(-corpus.vocab_size // 64) * 64  # as config.padded_vocabulary() does it
        return corpus.tokenizer == self.tokenizer and self.config.vocab_size == padded

    def check(self, config: ModelConfig, corpus):
        """Raise UserError if the run's model or vocabulary differs. A corpus without a tokenizer
        gets this one."""
        if corpus.tokenizer == UNKNOWN:
            corpus.tokenizer = self.tokenizer
        texts = {name for name in (self.tokenizer, corpus.tokenizer) if "{" in name}
        if len(texts) > 1 or self.config.vocab_size != corpus.vocab_size:
            raise UserError(
                f"--init_from {self.path} has another vocabulary ({self.config.vocab_size} tokens) "
                f"than the corpus ({corpus.vocab_size}): give the --data that it was trained on, "
                "make it with data.py --tokenizer FOLDER, or, if its tokens mean the same, give "
                f"--vocab_size {self.config.vocab_size}"
            )
        shape = replace(self.config, block_size=config.block_size)
        if config != shape:
            hint = "leave out the flags that change it"
            raise UserError(f"--init_from {self.path} has another shape, {shape}: {hint}")


def open_model(path: str) -> Source:
    """A model.pt of train.py, or a folder in Hugging Face's Llama format. Raises UserError, one
    line that names what is missing, damaged or foreign."""
    try:
        if Path(path).is_dir():
            source = open_folder(path)
        else:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            config = ModelConfig(**saved["model_config"])
            source = Source(path, config, saved["tokenizer"], saved["model"])
        make_llama(source.config, source.tensors)  # has it all tensors, of the right shapes?
        return source
    except ModuleNotFoundError:
        raise
    except Exception as error:  # files of other programs raise many kinds
        reason = " ".join(str(error).split())[:300]
        hint = "name a model.pt of train.py, or a folder of a Llama model"
        kind = type(error).__name__
        raise UserError(f"{path} is not a model ({kind}: {reason}): {hint}") from None


# ---- Hugging Face's folders ----


def quiet_transformers():
    """The package, without its notes and its progress bar."""
    import transformers  # where it is needed: this takes seconds

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def their_names(n_layer: int) -> dict:
    """Name in model.Llama's state dict -> names in that of transformers.LlamaForCausalLM."""
    names = {"layers.0.weight": ["model.embed_tokens.weight"]}
    for block in range(n_layer):
        for ours, theirs in BLOCK.items():
            rows = [f"model.layers.{block}.{each}.weight" for each in theirs]
            names[f"layers.{block + 1}.{ours}.weight"] = rows
    names[f"layers.{n_layer + 1}.norm.weight"] = ["model.norm.weight"]
    names[f"layers.{n_layer + 1}.output.weight"] = ["lm_head.weight"]
    return names


def open_folder(path: str) -> Source:
    transformers = quiet_transformers()
    theirs = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    kind = theirs.model_type, theirs.hidden_act, theirs.rope_parameters["rope_type"]
    if kind != ("llama", "silu", "default"):
        raise ValueError(f"model, activation and rotary positions are {', '.join(kind)}")
    fields = {ours: getattr(theirs, name) for ours, name in FIELDS.items()}
    config = ModelConfig(**fields, rope_base=theirs.rope_parameters["rope_theta"])
    model, report = transformers.LlamaForCausalLM.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True
    )
    if any(report.values()):
        raise ValueError(f"its tensors do not fit its config.json: {report}")
    found = model.state_dict()
    del model  # so each tensor is freed when it is copied
    tensors = {}
    for name, rows in their_names(config.n_layer).items():
        parts = [found.pop(each) for each in rows]
        if "qkv" in name:
            parts = [copy_heads(part, config) for part in parts]
        tensors[name] = torch.cat(parts)
    if found:
        raise ValueError(f"{', '.join(found)} have no place in model.py")

    file = Path(path, "tokenizer.json")
    tokenizer = file.read_text(encoding="utf-8") if file.exists() else UNKNOWN
    notes = f"({theirs.num_key_value_heads} heads of keys and values; "
    notes += f"output matrix tied: {theirs.tie_word_embeddings})"
    return Source(path, config, tokenizer, tensors, notes)


def copy_heads(matrix: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The rows of n_head heads, from those of fewer heads that several others share."""
    heads = matrix.unflatten(0, (-1, config.n_embd // config.n_head))  # (heads, D, C)
    return heads.repeat_interleave(config.n_head // len(heads), dim=0).flatten(0, 1)


def write_folder(source: Source, out: str):
    """Write the new folder `out`. Raises UserError if model.py has been changed to another model
    than Llama."""
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

    Path(out).mkdir(parents=True)
    if source.tokenizer != UNKNOWN:
        tokenizer = JsonTokenizer(to_json(source.tokenizer))
        config.eos_token_id = tokenizer.eot_token
        marks = {"eos_token": tokenizer.end_of_text}
        if tokenizer.begin:  # what stood in front of each document in training
            config.bos_token_id = tokenizer.begin[0]
            marks["bos_token"] = tokenizer.tokenizer.id_to_token(config.bos_token_id)
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.tokenizer, **marks)
        theirs.save_pretrained(out)
    with torch.device("meta"):  # the tensors are there already
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(out, state_dict=tensors)


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
    run_command("hf.py", main)
