"""Models in files: a model.pt of train.py, or a folder in Hugging Face's Llama format.

    torchrun ... train.py --init_from my_model --data my_corpus   # or --init_from out/edit/model.pt

The package transformers reads such folders, export.py writes them with it. model.py is the Llama
architecture; only names and the fused matrices differ. What model.py does not have is replaced at
loading: heads that share keys and values get copies of their own, a tied output matrix becomes a
copy of the embedding. Anything else (biases, other activations, scaled rotary positions) is
refused. A rank that opens a folder holds the whole model once.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from config import UserError, check_fields, read_number
from model import Llama, ModelConfig, make_layer
from plumbing.text import regular_file
from plumbing.tokenizer import UNKNOWN

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


class AnotherModel(UserError):
    """A model.pt that does not fit model.py. The text is one line."""

    def __init__(self, path, reason: str):
        hint = "open it with the code that trained it"
        super().__init__(
            f"{path} is of another model than the Llama of model.py ({reason}): {hint}"
        )


def check_tensors(source: Source):
    """Raise AnotherModel unless model.py's layers have these tensors."""
    n_layer = source.config.n_layer
    with torch.device("meta"):  # without memory
        embedding, block, head = (make_layer(source.config, l) for l in (0, 1, -1))
    expected = {}
    for l, layer in enumerate([embedding, *[block] * n_layer, head]):
        for name, parameter in layer.named_parameters():
            expected[f"layers.{l}.{name}"] = tuple(parameter.shape)
    found = {name: tuple(tensor.shape) for name, tensor in source.tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise AnotherModel(source.path, f"it lacks {name}")
        if name not in expected:
            raise AnotherModel(source.path, f"it has {name}")
        if found[name] != expected[name]:
            raise AnotherModel(source.path, f"{name} is {found[name]}, not {expected[name]}")


def make_llama(config: ModelConfig, tensors: dict) -> Llama:
    """The model with these parameters, not copied. Raises RuntimeError if a name or a shape
    differs."""
    with torch.device("meta"):  # without memory
        model = Llama(config)
    model.load_state_dict(tensors, assign=True)
    return model


def open_model(path: str) -> Source:
    """A model.pt of train.py, or a folder in Hugging Face's Llama format. Raises UserError, one
    line that names what is missing, damaged or foreign."""
    try:
        if Path(path).is_dir():
            source = open_folder(path)
        else:
            regular_file(Path(path))
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            shape = saved["model_config"]
            for name in shape.keys() - {field.name for field in fields(ModelConfig)}:
                raise AnotherModel(path, f"its config has {name}")
            config = ModelConfig(**shape)
            check_fields("model_config: ", config, {"above": 0})
            source = Source(path, config, saved["tokenizer"], saved["model"])
        check_source(source)
        return source
    except (AnotherModel, ModuleNotFoundError):
        raise
    except Exception as error:  # files of other programs raise many kinds
        reason = " ".join(str(error).split())[:300]
        hint = "name a model.pt of train.py, or a folder of a Llama model"
        kind = type(error).__name__
        raise UserError(f"{path} is not a model ({kind}: {reason}): {hint}") from None


def check_source(source: Source):
    """Raise ValueError or AnotherModel unless a model can compute with what the files hold. Reads
    all tensors."""
    config = source.config
    if config.n_embd % config.n_head or config.n_embd // config.n_head % 2:
        heads = f"{config.n_embd} channels in {config.n_head} heads"
        raise ValueError(f"{heads}: each must have the same even number")
    if config.block_size > 2**20:  # the rotary angles would take gigabytes
        raise ValueError(f"a context of {config.block_size:,} tokens")
    if not isinstance(source.tokenizer, str):
        raise ValueError("its tokenizer is not a text")
    check_tensors(source)
    for name, tensor in source.tensors.items():
        plain = torch.is_tensor(tensor) and tensor.layout == torch.strided
        plain = plain and tensor.device.type == "cpu" and tensor.is_floating_point()
        if not plain or not torch.stack(tensor.aminmax()).isfinite().all():  # makes no copy
            raise ValueError(f"{name} is not a tensor of finite numbers")


def quiet_transformers():
    """The package, without its notes and its progress bar."""
    import transformers  # where it is needed: this takes seconds

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def open_folder(path: str) -> Source:
    for pattern in "*.json", "*.safetensors":
        for file in Path(path).glob(pattern):
            regular_file(file)
    transformers = quiet_transformers()
    theirs = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    kind = theirs.model_type, theirs.hidden_act, theirs.rope_parameters["rope_type"]
    if kind != ("llama", "silu", "default"):
        raise ValueError(f"model, activation and rotary positions are {', '.join(kind)}")
    numbers = theirs.to_dict()
    fields = {ours: read_number(numbers, name, ours) for ours, name in FIELDS.items()}
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
