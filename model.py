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
    F        hidden width of the SwiGLU               about 8/3 C: a block has 12 C^2 parameters
    V        vocabulary                               logits (B, T, V), with targets a chunk of
                                                      tokens at a time

Choices. Pre-norm RMSNorm, rotary positions (RoPE), SwiGLU, no biases, an output matrix of its own
(untied: tying would chain the first and the last layer together, which are never whole at the same
time). Layer l is initialised from (seed, l) alone, so that neither the mesh nor the order in which
layers are built can change it.

Two layers have a backward of their own. `Linear` puts its weight's gradient where whoever trains it
wants it (`weight.main_grad`), in fp32 without a copy, in bf16 matrix by matrix. The loss computes
gradients chunk by chunk along with the logits, which therefore never exist whole.

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
    # d loss / d weight needs the token ids, not the weight: ZeRO-3 skips this layer's
    # second gather.
    backward_reads_parameters = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))

    def forward(self, tokens):  # (B, T) int64
        return F.embedding(tokens, self.weight)  # (B, T, C)


class LinearInPlace(torch.autograd.Function):
    """y = x W^T for x (..., I), W (O, I). backward adds dW to
    W.main_grad, or overwrites it, as W.adds says."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad_y):
        x, weight = ctx.saved_tensors
        place, adds = ctx.weight.main_grad, ctx.weight.adds
        rows = grad_y.flatten(0, -2).t()  # (O, B T)
        if place.dtype == x.dtype and adds:
            place.addmm_(rows, x.flatten(0, -2))
        elif place.dtype == x.dtype:  # addmm_ with beta=0 would take 5% longer
            torch.mm(rows, x.flatten(0, -2), out=place)
        elif adds:
            place += rows @ x.flatten(0, -2)
        else:
            place.copy_(rows @ x.flatten(0, -2))
        return grad_y @ weight, None


class Linear(nn.Linear):
    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x):
        if not torch.compiler.is_compiling() and hasattr(self.weight, "main_grad"):
            return LinearInPlace.apply(x, self.weight)
        return F.linear(x, self.weight)


def rotary_angles(positions: int, channels: int, base: float = 10000.0) -> torch.Tensor:
    """angle[t, k] = t * base^(-2k/D): fp32 (positions, channels / 2), radians.
    arXiv 2104.09864, eq. 15."""
    frequency = base ** (-torch.arange(0, channels, 2).float() / channels)
    return torch.outer(torch.arange(positions).float(), frequency)


def rotate(x, cos, sin):
    """Turn each pair (x[k], x[k + D/2]) of the last dimension by its position's
    angle; x is (..., T, D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    backward_reads_parameters = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, hidden = config.n_embd, config.n_hidden
        self.n_head = config.n_head
        self.attention_norm = nn.RMSNorm(C, eps=1e-5)
        self.qkv = Linear(C, 3 * C)
        self.out = Linear(C, C)
        self.mlp_norm = nn.RMSNorm(C, eps=1e-5)
        self.gate_up = Linear(C, 2 * hidden)
        self.down = Linear(hidden, C)
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
        cos, sin = self.cos[:T], self.sin[:T]  # fp32, and so is the rotation
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        if v.dtype == torch.bfloat16 and x.device.type == "cpu" and T <= 1024:
            y = attend(q, k, v)  # torch's kernel for CPUs takes up to four times as long in bf16
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


def attend(q, k, v):
    """softmax(q k^T / sqrt(D)) v, each position with itself and
    those before it; all (B, H, T, D)."""
    T, D = q.shape[-2:]
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    q, k, values = (z.flatten(0, 1) for z in (q * D**-0.5, k, v))  # (B H, T, D)
    scores = torch.baddbmm(future, q, k.transpose(1, 2))  # (B H, T, T)
    return (scores.softmax(dim=-1) @ values).view(v.shape)


LOGITS = 2**25  # of one chunk, at most: 128 MiB in fp32


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean over n tokens of -log softmax(x W^T)[target], nats; x (n, C), W (V, C), targets (n,).
    The gradient, (softmax - onehot) / n, needs what the loss needs, so forward keeps d loss / d x
    and d W, not the logits."""

    @staticmethod
    def forward(ctx, x, weight, targets, train: bool):
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        grad_x = torch.empty_like(x) if train else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if train else None
        rows = max(1, LOGITS // len(weight))
        for first in range(0, len(x), rows):
            part, target = x[first : first + rows], targets[first : first + rows, None]
            logits = F.linear(part, weight).to(wide)  # (rows, V)
            log_p = logits.log_softmax(dim=-1)
            loss -= log_p.gather(1, target).sum()
            if train:
                error = log_p.exp_().scatter_add_(1, target, -torch.ones_like(target, dtype=wide))
                error = error.div_(len(x)).to(x.dtype)
                grad_x[first : first + rows] = error @ weight
                grad_weight += error.t() @ part
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype = weight.dtype
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, grad_weight.mul_(grad_loss).to(ctx.dtype), None, None


class Head(nn.Module):
    backward_reads_parameters = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.output = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x, targets=None):
        """Logits (B, T, V), or with targets (B, T) the mean cross-entropy in
        nats per token, at least fp32."""
        x = self.norm(x)
        if targets is None:
            return self.output(x)
        weight, train = self.output.weight, torch.is_grad_enabled()
        return ChunkedCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), train)


def make_layer(config: ModelConfig, layer: int) -> nn.Module:
    """Layer number `layer` of n_layer + 2 (-1: the last), its parameters not initialised."""
    if layer == 0:
        return Embedding(config)
    return Block(config) if 0 < layer <= config.n_layer else Head(config)


def build_layer(config: ModelConfig, layer: int, seed: int) -> nn.Module:
    """Layer number `layer`, initialised from (seed, layer): matrices normal(0, 0.02), the two that
    write into the residual stream smaller by sqrt(2 n_layer) (GPT-2), norm gains 1."""
    module = make_layer(config, layer)
    generator = torch.Generator().manual_seed((seed << 20) + layer)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            residual = name in ("out.weight", "down.weight")
            std = 0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)
    return module


class Llama(nn.Module):
    """The whole model on one device. Its state dict has the names
    that `model.pt` uses: `layers.<l>.<name>`."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        layers = [build_layer(config, layer, seed) for layer in range(config.n_layer + 2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens, targets=None):
        x = tokens
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x, targets)
