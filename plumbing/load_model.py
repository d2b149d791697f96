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
from model import Llama, ModelConfig
from plumbing.tokenizer import UNKNOWN

FIELDS = {  # of ModelConfig -> of config.json
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size",
    "n_hidden": "intermediate_size", "rope_base": "rope_theta", "norm_eps": "rms_norm_eps",
}  # fmt: skip
FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
TENSORS = {  # our matrix or gain -> theirs, of block {}; several are its rows
    "weight": ["model.embed_tokens"], "norm": ["model.norm"], "output": ["lm_head"],
    "attention_norm": ["model.layers.{}.input_layernorm"],
    "qkv": ["model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj"],
    "out": ["model.layers.{}.self_attn.o_proj"],
    "mlp_norm": ["model.layers.{}.post_attention_layernorm"],
    "gate_up": ["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"],
    "down": ["model.layers.{}.mlp.down_proj"],
}  # fmt: skip


@dataclass
class Source:
    """A model in files. tensors: model.Llama's state dict, memory-mapped where possible."""

    path: str
    config: ModelConfig
    tokenizer: str  # the argument of make_tokenizer()
    tensors: dict
    notes: str = ""  # what model.py does not have

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
        kinds = {name[:1] == "{" for name in names}
        # A named tokenizer may be the same as a tokenizer.json, but not as another named one.
        if len(names) > len(kinds) or self.config.vocab_size != corpus.vocab_size:
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


def shapes(config: ModelConfig) -> dict:
    """Name in model.Llama's state dict -> shape."""
    # The rotary angles of a long context would take gigabytes.
    short = replace(config, block_size=1)
    with torch.device("meta"):  # without memory
        model = Llama(short)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def their_names(name: str) -> list:
    """For example of layers.1.qkv.weight, which is in block 0."""
    _, layer, ours = name.split(".")[:3]
    block = int(layer) - 1
    return [each.format(block) + ".weight" for each in TENSORS[ours]]


def open_model(path: str) -> Source:
    """A model.pt of train.py, or a folder in Hugging Face's Llama format. Raises UserError, one
    line that names what is missing, damaged or foreign."""
    try:
        folder = Path(path)
        if folder.is_dir():
            source = open_folder(folder)
        else:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            config = ModelConfig(**saved["model_config"])
            source = Source(path, config, saved["tokenizer"], saved["model"])
        for name, shape in shapes(source.config).items():
            found = source.tensors[name].shape
            if found != shape:
                raise ValueError(f"{name} has shape {tuple(found)}, not {tuple(shape)}")
        return source
    except ModuleNotFoundError:
        raise
    except Exception as error:  # files of other programs raise many kinds
        reason = str(error).split("\n")[0]
        hint = "name a model.pt of train.py, or a folder with config.json and model.safetensors"
        kind = type(error).__name__
        raise UserError(f"{path} is not a model ({kind}: {reason}): {hint}") from None


def open_folder(folder: Path) -> Source:
    theirs = json.loads((folder / "config.json").read_text())
    config, kv_heads = read_config(theirs)
    files = read_tensors(folder)
    copies = config.n_head // kv_heads
    for name in files:
        if ".k_proj." in name or ".v_proj." in name:
            heads = files[name].unflatten(0, (kv_heads, -1))  # (heads, D, C)
            files[name] = heads.repeat_interleave(copies, dim=0).flatten(0, 1)

    tied = theirs.get("tie_word_embeddings", False)
    if tied:
        embedding = files["model.embed_tokens.weight"]
        if not torch.equal(files.setdefault("lm_head.weight", embedding), embedding):
            raise ValueError("tie_word_embeddings is true, but lm_head is not the embedding")

    tensors = {}
    for name in shapes(config):
        parts = [files.pop(each) for each in their_names(name)]
        tensors[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    for name in files:
        if not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"{name} has no place in model.py")

    path = folder / "tokenizer.json"
    tokenizer = path.read_text() if path.exists() else UNKNOWN
    notes = f"({kv_heads} heads of keys and values; output matrix tied: {tied})"
    return Source(str(folder), config, tokenizer, tensors, notes)


def read_tensors(folder: Path) -> dict:
    """Their name -> tensor, from all files of the model."""
    from safetensors.torch import load_file

    names = {"model.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.exists():  # a large model
        names = set(json.loads(index.read_text())["weight_map"].values())
    found = {}
    for name in names:
        found |= load_file(folder / name)
    return found


def read_config(theirs: dict) -> tuple:
    """config.json -> (ModelConfig, heads of keys and values)."""
    defaults = {"rope_theta": 10000.0, "num_key_value_heads": theirs["num_attention_heads"]}
    theirs = defaults | theirs
    for name in "rope_parameters", "rope_scaling":  # transformers prefers the second one
        theirs |= theirs.get(name) or {}

    config = {ours: read_number(theirs, name, ours) for ours, name in FIELDS.items()}
    kv_heads = read_number(theirs, "num_key_value_heads", "n_head")
    fixed = FIXED | {"rope_type": "default", "type": "default", "quantization_config": None}
    fixed["head_dim"] = config["n_embd"] // config["n_head"]
    for name, value in fixed.items():
        found = theirs.get(name, value)
        if found != value:
            raise ValueError(f"config.json has {name} {found}, model.py has {value}")
    return ModelConfig(**config), kv_heads
