"""The decoder: each piece against its formula, its precision and its seeds."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from model import Llama, ModelConfig, attend

T = 5
H = 2
D = 8
CONFIG = ModelConfig(n_layer=2, n_head=H, n_embd=H * D, block_size=12, vocab_size=50)
BASE = 500.0  # not the usual constants
EPS = 0.1


# ---- formulas written out ----


@pytest.fixture
def llama():
    """In fp64, with random gains."""
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, rope_base=BASE, norm_eps=EPS)
    model = Llama(config, seed=1).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 2.0)
    return model


def norm(x, gain):
    mean_square = (x**2).mean(-1, keepdim=True)
    return x / torch.sqrt(mean_square + EPS) * gain


def rotated(x):
    """x (T, D): the pair (x[t, i], x[t, i + D/2]), as a complex number, times exp(j angle)."""
    turns = torch.zeros(T, D // 2, dtype=torch.complex128)
    for t in range(T):
        for i in range(D // 2):
            angle = t * BASE ** (-2 * i / D)
            turns[t, i] = complex(math.cos(angle), math.sin(angle))
    pairs = torch.complex(x[:, : D // 2], x[:, D // 2 :]) * turns
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def attention(q, k, v):
    """One head, (T, D) each: one position after the other."""
    q = rotated(q)
    k = rotated(k)
    y = torch.zeros_like(v)
    for t in range(T):
        scores = torch.stack([q[t] @ k[s] for s in range(t + 1)]) / math.sqrt(D)
        y[t] = scores.softmax(0) @ v[: t + 1]
    return y


def test_block_equals_its_formulas_written_out(llama):
    block = llama.layers[1]
    x = torch.randn(1, T, H * D).double()

    h = norm(x[0], block.attention_norm.weight) @ block.qkv.weight.T  # (T, 3 C)
    q, k, v = h.view(T, 3, H, D).unbind(1)
    heads = [attention(q[:, head], k[:, head], v[:, head]) for head in range(H)]
    y = torch.cat(heads, dim=-1)  # (T, C)
    z = x[0] + y @ block.out.weight.T

    h = norm(z, block.mlp_norm.weight) @ block.gate_up.weight.T
    gate, up = h.chunk(2, dim=-1)
    silu = gate * torch.sigmoid(gate)
    z = z + (silu * up) @ block.down.weight.T
    torch.testing.assert_close(block(x)[0], z, rtol=1e-5, atol=1e-7)  # the angles are fp32


def test_head_equals_its_formulas_written_out(llama):
    head = llama.layers[-1]
    x = torch.randn(1, T, H * D).double()
    logits = norm(x[0], head.norm.weight) @ head.output.weight.T
    torch.testing.assert_close(head(x)[0], logits)

    targets = torch.arange(T)
    loss = -logits.log_softmax(dim=-1)[targets, targets].mean()
    torch.testing.assert_close(head(x, targets[None]), loss)


def test_attention_by_hand_equals_torchs():
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v), theirs)


# ---- precision ----


def gradient(layer, weight, dtype, x, *targets):
    if x.is_floating_point():
        x = x.to(dtype)
    y = layer.to(dtype)(x, *targets)
    torch.manual_seed(0)
    grad_y = torch.randn(y.shape).bfloat16().to(dtype)
    return torch.autograd.grad(y, weight, grad_y)[0].double()


def relative_error_of_bf16(layer, weight, x, *targets):
    """Of the gradient of `weight`, against that in fp64."""
    rough = gradient(layer, weight, torch.bfloat16, x, *targets)
    exact = gradient(layer, weight, torch.float64, x, *targets)
    return (rough - exact).norm() / exact.norm()


def test_bf16_gradients_of_embedding_and_output_are_summed_in_fp32():
    """8 x 1024 tokens of few kinds: each row of the gradient has some 160 terms. Only the rounding
    of the terms and of the result to 8 bits is left."""
    embedding, *_, head = Llama(CONFIG, seed=1).layers
    tokens = torch.randint(50, (8, 1024))
    x = torch.randn(8, 1024, 16).bfloat16()
    assert relative_error_of_bf16(embedding, embedding.weight, tokens) < 0.003

    head.bfloat16()
    assert relative_error_of_bf16(head, head.output.weight, x, tokens) < 0.01
    head.bfloat16()
    assert head(x, tokens).dtype == torch.float32  # a mean over 8,192 tokens


# ---- seeds ----


def test_initialisation_is_a_function_of_seed_and_layer():
    state = Llama(CONFIG, 1).state_dict()
    again = Llama(CONFIG, 1).state_dict()
    for name in state:
        assert torch.equal(state[name], again[name]), name

    # 1337 and 5433 have the same low 12 bits, 1 and 2**32 + 1 the same low 32 bits.
    seeds = [0, 1, 2, 3, 1337, 5433, 2**20 + 1, 2**31 - 1, 2**32 + 1]
    seen = set()
    for seed in seeds:
        other = Llama(CONFIG, seed).state_dict()
        for l in 1, 2:
            seen.add(other[f"layers.{l}.qkv.weight"].sum().item())
    assert len(seen) == 2 * len(seeds)


def test_matrices_that_write_into_the_residual_stream_start_smaller_than_others():
    state = Llama(CONFIG, 1).state_dict()
    assert state["layers.1.gate_up.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert state["layers.1.down.weight"].std().item() == pytest.approx(0.01, rel=0.1)  # / sqrt(2 L)
