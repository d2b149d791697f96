"""A Llama-style decoder, written as a list of layers.

The problem. Sharded training handles a model one layer at a time: gather a layer's parameters,
compute, let go. So the model *is* a list here, [embedding, block, ..., block, head], and the whole
network is nothing more than

    x = tokens
    for layer in layers: x = layer(x)          # the last one, the head, ends in logits or the loss

`Llama` below runs that loop on ordinary whole parameters (tests, sampling); `shard.py` runs the
same loop on gathered ones. Nothing in this file knows about distribution.

    symbol   meaning                                  shape of the tensors that carry it
    B T C    batch, time (positions), channels        activations (B, T, C)
    H D      heads, channels per head (C = H * D)     queries, keys, values (B, H, T, D)
    F        hidden width of the SwiGLU               about 8/3 C, so that a block has 12 C^2 parameters
    V        vocabulary                               logits (B, T, V)

Choices. Pre-norm RMSNorm, rotary positions (RoPE), SwiGLU, no biases, an output matrix of its own
(untied: tying would chain the first and the last layer together, which are never whole at the same
time). Layer l is initialised from (seed, l) alone, so that neither the mesh nor the order in which
layers are built can change it.

Source: Llama, arXiv 2302.13971; RoPE, arXiv 2104.09864; SwiGLU, arXiv 2002.05202.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class ModelConfig:
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128  # longest context, tokens
    vocab_size: int = 257

    @property
    def n_hidden(self) -> int:
        """F: 8/3 C, rounded up to a multiple of 64."""
        return -(-8 * self.n_embd // 3 // 64) * 64


class Embedding(nn.Module):
    # d loss / d weight needs the token ids, not the weight: ZeRO-3 skips this layer's second gather.
    backward_reads_parameters = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))

    def forward(self, tokens):  # (B, T) int64
        return F.embedding(tokens, self.weight)  # (B, T, C)


def rotary_angles(positions: int, channels: int, base: float = 10000.0) -> torch.Tensor:
    """angle[t, k] = t * base^(-2k/D): fp32 (positions, channels / 2), radians. arXiv 2104.09864, eq. 15."""
    frequency = base ** (-torch.arange(0, channels, 2).float() / channels)
    return torch.outer(torch.arange(positions).float(), frequency)


def rotate(x, cos, sin):
    """Turn each pair (x[k], x[k + D/2]) of the last dimension by its position's angle; x is (..., T, D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    backward_reads_parameters = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, hidden = config.n_embd, config.n_hidden
        self.n_head = config.n_head
        self.attention_norm = nn.RMSNorm(C, eps=1e-5)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        self.mlp_norm = nn.RMSNorm(C, eps=1e-5)
        self.gate_up = nn.Linear(C, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, C, bias=False)
        angles = rotary_angles(config.block_size, C // config.n_head)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):  # (B, T, C)
        x = x + self.attention(self.attention_norm(x))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)  # (B, T, F) each
        return x + self.down(F.silu(gate) * up)

    def attention(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, D)
        if x.dtype == torch.bfloat16 and x.device.type == "cpu":
            q, k, v = q.float(), k.float(), v.float()  # the CPU kernel is up to 2.5x slower in bf16
        cos, sin = self.cos[:T].to(q.dtype), self.sin[:T].to(q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, C).to(x.dtype))


class Head(nn.Module):
    backward_reads_parameters = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.output = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x, targets=None):
        """Logits (B, T, V), or with targets (B, T) the mean cross-entropy in nats per token, at least fp32."""
        logits = self.output(self.norm(x))
        if targets is None:
            return logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())


def build_layer(config: ModelConfig, layer: int, seed: int) -> nn.Module:
    """Layer number `layer` of n_layer + 2, initialised from (seed, layer): matrices normal(0, 0.02), the
    two that write into the residual stream smaller by sqrt(2 n_layer) (GPT-2), norm gains 1."""
    if layer == 0:
        module = Embedding(config)
    else:
        module = Block(config) if layer <= config.n_layer else Head(config)
    generator = torch.Generator().manual_seed((seed << 20) + layer)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            residual = name in ("out.weight", "down.weight")
            std = 0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)
    return module


class Llama(nn.Module):
    """The whole model on one device. Its state dict has the names that `model.pt` uses: `layers.<l>.<name>`."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            build_layer(config, layer, seed) for layer in range(config.n_layer + 2)
        )

    def forward(self, tokens, targets=None):
        x = tokens
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x, targets)
