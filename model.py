"""A Llama-style decoder, written as a list of layers.

Sharded training handles a model one layer at a time, so the model is a list, [embedding, block,
..., block, head], and the whole network is

    x = tokens
    for layer in layers: x = layer(x)          # the last one, the head, returns logits or the loss

    B T C    batch, time (positions), channels        activations (B, T, C)
    H D      heads, channels per head (C = H * D)     queries, keys, values (B, H, T, D)
    F        hidden width of the SwiGLU, about 8/3 C  gate and up (B, T, F)
    V        vocabulary                               logits (B, T, V)

Choices: pre-norm RMSNorm, rotary positions (RoPE), SwiGLU, no biases, an untied output matrix
(tying would join the first and the last layer, which are never gathered at the same time). Layer l
is initialized from (seed, l) alone, so it does not depend on the mesh. Layers may compute in bf16,
but the loss and the embedding's gradient are sums over tokens in fp32.

Source: Llama, arXiv 2302.13971; RoPE, arXiv 2104.09864; SwiGLU, arXiv 2002.05202.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from config import UserError


def widen(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or in fp64 if it is fp64 already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def has_native_bf16(device: str) -> bool:
    """Does it compute in bf16 as fast as in fp32, or faster?"""
    if device == "cpu":
        return torch.cpu.get_capabilities().get("avx512_bf16", False)  # with AMX, too
    cuda = torch.cuda  # without a GPU it is a dry run for another machine
    return not cuda.is_available() or cuda.is_bf16_supported(including_emulation=False)


@dataclass
class ModelConfig:
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128  # longest context, tokens
    vocab_size: int = 257
    n_hidden: int = 0  # F; 0: 8/3 C, up to a multiple of 64
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self):
        self.n_hidden = self.n_hidden or -(-8 * self.n_embd // 3 // 64) * 64


class Embedding(nn.Module):
    backward_needs_weights = False  # the token ids are enough (shard.py)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))

    def forward(self, tokens):  # (B, T) int64
        # The same row gets gradients from many tokens. widen() makes autograd sum them in fp32.
        return F.embedding(tokens, widen(self.weight)).to(self.weight.dtype)  # (B, T, C)


def rotary_angles(positions: int, channels: int, base: float) -> torch.Tensor:
    """angle[t, k] = t * base^(-2k/D), radians, (positions, channels / 2)."""
    cpu = torch.device("cpu")  # on `meta` torch would import its compiler: 0.8 s
    frequency = base ** (-torch.arange(0, channels, 2, device=cpu).float() / channels)
    return torch.outer(torch.arange(positions, device=cpu).float(), frequency)


def rotate(x, cos, sin):
    """Rotate each pair (x[k], x[k + D/2]) by its position's angle; x is (..., T, D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        C = config.n_embd
        hidden = config.n_hidden
        self.n_head = config.n_head
        self.attention_norm = nn.RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        self.mlp_norm = nn.RMSNorm(C, config.norm_eps)
        self.gate_up = nn.Linear(C, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, C, bias=False)
        angles = rotary_angles(config.block_size, C // config.n_head, config.rope_base)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):  # (B, T, C)
        x = x + self.attention(self.attention_norm(x))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)  # (B, T, F) each
        return x + self.down(F.silu(gate) * up)

    def attention(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, D)
        cos = self.cos[:T]  # fp32, and so is the rotation
        sin = self.sin[:T]
        q = rotate(q, cos, sin).to(v.dtype)
        k = rotate(k, cos, sin).to(v.dtype)
        if v.dtype == torch.bfloat16 and x.device.type == "cpu" and T <= 1024:
            y = attend(q, k, v)  # torch's CPU kernel takes up to four times as long in bf16
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


def attend(q, k, v):
    """softmax(q k^T / sqrt(D)) v over the positions up to each one; all (B, H, T, D)."""
    T, D = q.shape[-2:]
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    q, k, values = (z.flatten(0, 1) for z in (q * D**-0.5, k, v))  # (B H, T, D)
    scores = torch.baddbmm(future, q, k.transpose(1, 2))  # (B H, T, T)
    return (scores.softmax(dim=-1) @ values).view(v.shape)


class Head(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.output = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x, targets=None):
        """Logits (B, T, V), or with targets (B, T) the mean loss in nats per token."""
        x = self.norm(x)
        if targets is None:
            return self.output(x)
        logits = self.output(x.flatten(0, 1))  # (B T, V)
        return F.cross_entropy(widen(logits), targets.flatten())


def make_layer(config: ModelConfig, layer: int) -> nn.Module:
    """Layer number `layer` of n_layer + 2 (-1: the last), not initialized."""
    if layer == 0:
        return Embedding(config)
    if 0 < layer <= config.n_layer:
        return Block(config)
    return Head(config)


def mixed_seed(*numbers: int) -> int:
    """One seed for torch's generator, which uses only the low 32 bits of it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def initialize(module: nn.Module, config: ModelConfig, layer: int, seed: int):
    """Set the parameters of layer number `layer`: matrices normal(0, 0.02), the two that write into
    the residual stream smaller by sqrt(2 n_layer) (GPT-2), norm gains 1, biases 0."""
    generator = torch.Generator().manual_seed(mixed_seed(seed, layer))
    for name, parameter in module.named_parameters():
        kind = name.split(".")[-1]
        if parameter.dim() >= 2:
            std = 0.02
            if name in ("out.weight", "down.weight"):  # they write into the residual stream
                std /= math.sqrt(2 * config.n_layer)
            nn.init.normal_(parameter, std=std, generator=generator)
        elif kind == "weight":  # a vector with this name is the gain of a norm
            nn.init.ones_(parameter)
        elif kind == "bias":
            nn.init.zeros_(parameter)
        else:  # a gain, a bias, or something else?
            raise ValueError(f"{name} of layer {layer}: say in model.initialize() how it starts")


class Llama(nn.Module):
    """The whole model on one device. model.pt has its state dict: `layers.<l>.<name>`. seed None:
    the parameters will be loaded."""

    def __init__(self, config: ModelConfig, seed: int | None = None):
        super().__init__()
        self.config = config
        layers = range(config.n_layer + 2)
        self.layers = nn.ModuleList(make_layer(config, layer) for layer in layers)
        if seed is None:
            return
        for layer, module in enumerate(self.layers):
            initialize(module, config, layer, seed)

    def forward(self, tokens, targets=None):
        x = tokens
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x, targets)


# ---- any list of layers, also of your own, as shard.py and plain/replica.py take it ----


def check_layers(layers: list):
    """Raise UserError if a layer cannot be trained as one flat vector of its own."""
    owners = {}  # a parameter's id -> its layer
    for l, layer in enumerate(layers):
        names = dict(layer.named_parameters())
        if not names:
            raise UserError(f"layer {l} has no parameters: make it one nn.Sequential with the next")
        for name, parameter in names.items():
            other = owners.setdefault(id(parameter), l)
            if other != l:
                raise UserError(f"layer {l} shares {name} with layer {other}: give it a copy")
            constant = "make it a buffer, register_buffer(..., persistent=False)"
            if not parameter.is_floating_point():
                raise UserError(f"layer {l}: {name} is {parameter.dtype}, not floats: {constant}")
            if not parameter.requires_grad:
                raise UserError(f"layer {l}: {name} is frozen, and all are trained: {constant}")
        buffers = sorted(layer.state_dict().keys() & dict(layer.named_buffers()).keys())
        if buffers:
            raise UserError(
                f"layer {l} has the buffers {', '.join(buffers)}, which ranks neither share nor "
                "save: use LayerNorm for BatchNorm, or persistent=False for a constant"
            )


def run_layer(layer: nn.Module, l: int, *inputs) -> list:
    """[output] of layer l, or [output, its aux_loss] if its forward has set one. The layer forgets
    it, because it would keep the forward in memory. inputs: x, of the last layer also the targets.
    Raises UserError unless the output is one tensor, and of the last layer the mean loss."""
    x = layer(*inputs)
    name = f"layer {l}, {type(layer).__name__},"
    if not isinstance(x, torch.Tensor):
        raise UserError(f"{name} returns a {type(x).__name__}: it must return one tensor")
    if len(inputs) == 2 and x.dim() > 0:
        raise UserError(f"{name} is the last: it must return the mean loss, not {tuple(x.shape)}")
    outputs = [x]
    if getattr(layer, "aux_loss", None) is not None:
        outputs.append(layer.aux_loss)
        layer.aux_loss = None
    return outputs
