"""Models in files: a model.pt of train.py, or a folder in Hugging Face's Llama format.

    torchrun ... train.py --init_from my_model --data my_corpus   # or --init_from out/edit/model.pt

model.py is the Llama architecture; only names and the fused matrices differ. What model.py does not
have is replaced at loading: heads that share keys and values get copies of their own, a tied output
matrix becomes a copy of the embedding. Anything else (biases, other norms, scaled rotary positions)
is refused. A folder needs the package safetensors. export.py writes such folders.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from config import UserError, read_number
from model import ModelConfig, make_layer
from plumbing.tokenizer import UNKNOWN

FIELDS = {  # of ModelConfig -> of config.json
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size",
    "n_hidden": "intermediate_size", "rope_base": "rope_theta", "norm_eps": "rms_norm_eps",
}  # fmt: skip
FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
TENSORS = {  # our matrix or gain -> theirs; several are its rows
    "embedding": ["model.embed_tokens"], "norm": ["model.norm"], "output": ["lm_head"],
    "attention_norm": ["input_layernorm"], "mlp_norm": ["post_attention_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "out": ["self_attn.o_proj"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}  # fmt: skip


@dataclass
class Source:
    """A model in files. tensors: model.Llama's state dict, memory-mapped where possible."""

    path: str
    config: ModelConfig
    tokenizer: str  # the argument of make_tokenizer()
    tensors: dict
    notes: str = ""  # what was replaced

    def copy_to(self, model):
        """Set the parameters of a shard.ShardedModel."""
        for l, (layout, master) in enumerate(zip(model.layouts, model.masters)):
            whole = master.new_zeros(layout.padded)
            for name, place in layout.cut(whole).items():
                place.copy_(self.tensors.pop(f"layers.{l}.{name}"))
            master.copy_(model.mesh.shard.own_piece(whole))
        model.invalidate_gathered()

    def check(self, config: ModelConfig, corpus):
        """Raise UserError if the run's model or vocabulary differs. A corpus of token files gets
        this tokenizer."""
        if corpus.tokenizer == UNKNOWN:
            corpus.tokenizer = self.tokenizer
        names = {self.tokenizer, corpus.tokenizer} - {UNKNOWN}
        # A named tokenizer may be the same as a tokenizer.json.
        other = len(names) > 1 and len({name[:1] == "{" for name in names}) == 1
        if other or self.config.vocab_size != corpus.vocab_size:
            raise UserError(
                f"--init_from {self.path} has another vocabulary ({self.config.vocab_size} tokens) "
                f"than the corpus ({corpus.vocab_size}): give the --data that it was trained on, "
                "make it with data.py --tokenizer FOLDER, or, if its tokens mean the same, give "
                f"--vocab_size {self.config.vocab_size}"
            )
        theirs = vars(self.config) | {"block_size": config.block_size}
        if other := [f"--{name}" for name, ours in vars(config).items() if theirs[name] != ours]:
            other = " ".join(other)
            raise UserError(f"--init_from {self.path} has another shape: leave out {other}")


def shapes(config: ModelConfig) -> dict:
    """Name in model.Llama's state dict -> shape. Blocks are alike, so one is made, and without its
    rotary angles: those of a long context would take gigabytes."""
    small = replace(config, block_size=1)
    with torch.device("meta"):  # without memory
        embedding, block, head = [make_layer(small, l) for l in (0, 1, -1)]
    found = {}
    for l, layer in enumerate([embedding, *[block] * config.n_layer, head]):
        for name, parameter in layer.named_parameters():
            found[f"layers.{l}.{name}"] = parameter.shape
    return found


def their_names(config: ModelConfig, name: str) -> list:
    """For example of layers.1.qkv.weight."""
    layer, ours = int(name.split(".")[1]), name.split(".")[2]
    block = f"model.layers.{layer - 1}." if 0 < layer <= config.n_layer else ""
    return [f"{block}{each}.weight" for each in TENSORS["embedding" if layer == 0 else ours]]


def open_model(path: str) -> Source:
    """A model.pt of train.py, or a folder in Hugging Face's Llama format. Raises UserError, one
    line that names what is missing, damaged or foreign."""
    try:
        if Path(path).is_dir():
            source = open_folder(Path(path))
        else:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            config = ModelConfig(**saved["model_config"])
            source = Source(path, config, str(saved["tokenizer"]), saved["model"])
        for name, shape in shapes(source.config).items():
            found = source.tensors[name]
            if found.shape != shape or not found.is_floating_point():
                raise ValueError(f"{name} has shape {tuple(found.shape)}, {found.dtype}")
        return source
    except ModuleNotFoundError:
        raise
    except Exception as error:  # files of other programs raise many kinds
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"it has no {error}"
        reason = reason.split("WeightsUnpickler error: ")[-1].split("\n")[0][:150]
        hint = "name a model.pt of train.py, or a folder with config.json and model.safetensors"
        raise UserError(f"{str(path)[:200]} is not a model ({reason}): {hint}") from None


def open_folder(folder: Path) -> Source:
    theirs = json.loads((folder / "config.json").read_text())
    config, kv_heads = read_config(theirs)
    files = read_tensors(folder)
    notes = []

    copies = config.n_head // kv_heads
    if copies > 1:
        notes.append(f"{kv_heads} heads of keys and values are copied to {config.n_head}")
        for name in files:
            if ".k_proj." in name or ".v_proj." in name:
                heads = files[name].unflatten(0, (kv_heads, -1))  # (heads, D, C)
                files[name] = heads.repeat_interleave(copies, dim=0).flatten(0, 1)

    if theirs.get("tie_word_embeddings", False):
        notes.append("the tied output matrix is a copy of the embedding")
        embedding = files["model.embed_tokens.weight"]
        if not torch.equal(files.setdefault("lm_head.weight", embedding), embedding):
            raise ValueError("tie_word_embeddings is true, but lm_head is not the embedding")

    tensors = {}
    for name in shapes(config):
        parts = [files.pop(each) for each in their_names(config, name)]
        tensors[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    for name in sorted(files):
        if not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"{name} has no place in model.py")

    path = folder / "tokenizer.json"
    tokenizer = path.read_text() if path.exists() else UNKNOWN
    return Source(str(folder), config, tokenizer, tensors, "; ".join(notes))


def read_tensors(folder: Path) -> dict:
    """Their name -> tensor, from all files of the model."""
    from safetensors.torch import load_file

    names = {"model.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.exists():  # a large model
        names = set(json.loads(index.read_text())["weight_map"].values())
    found = {}
    for name in sorted(names):
        try:
            found |= load_file(folder / name)
        except Exception as error:  # not all of its errors name the file
            raise ValueError(f"{name}: {error}") from None
    return found


def read_config(theirs: dict) -> tuple:
    """config.json -> (ModelConfig, heads of keys and values)."""
    rope, scaling = theirs.get("rope_parameters"), theirs.get("rope_scaling")
    if rope and scaling and rope != scaling:  # some programs read one of them, some the other
        raise ValueError("config.json has rope_parameters and another rope_scaling")
    rope = rope or scaling or {}
    theirs = {"rope_theta": 10000.0, "rope_type": rope.get("type")} | theirs | rope
    config = {ours: read_number(theirs, name, ours) for ours, name in FIELDS.items()}
    heads = kv_heads = config["n_head"]
    if theirs.get("num_key_value_heads"):
        kv_heads = read_number(theirs, "num_key_value_heads", "n_head")
    if heads % kv_heads:
        raise ValueError(f"config.json has {heads} heads and {kv_heads} heads of keys and values")
    fixed = FIXED | {"rope_type": "default", "head_dim": config["n_embd"] // heads}
    for name, value in (fixed | {"quantization_config": None}).items():
        found = theirs.get(name)
        if found != value and (found is not None or name == "model_type"):
            raise ValueError(f"config.json has {name} {found}, model.py has {value}")
    return ModelConfig(**config), kv_heads
