"""The decoder: each piece against its formula, its precision and its seeds."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from model import Llama, ModelConfig, attend

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=50)
OTHER = dataclasses.replace(CONFIG, rope_base=500.0, norm_eps=0.1)


def test_block_and_head_equal_their_formulas_written_out():
    torch.manual_seed(0)
    _, block, _, last = Llama(OTHER, seed=1).double().layers
    x, (T, H, D) = torch.randn(1, 5, 16).double(), (5, 2, 8)
    for gain in (block.attention_norm.weight, block.mlp_norm.weight, last.norm.weight):
        gain.data.uniform_(0.5, 2.0)

    def norm(v, gain):
        return v / torch.sqrt((v**2).mean(-1, keepdim=True) + 0.1) * gain

    h = norm(x, block.attention_norm.weight)[0] @ block.qkv.weight.T  # (T, 3 C)
    q, k, v = h.view(T, 3, H, D).unbind(1)
    angle = torch.tensor([[t * 500 ** (-2 * i / D) for i in range(D // 2)] for t in range(T)])
    y = torch.zeros(T, H, D, dtype=torch.float64)
    for head in range(H):
        turned = []
        for z in (q[:, head], k[:, head]):
            pair = torch.complex(z[:, : D // 2], z[:, D // 2 :])
            pair = pair * torch.polar(torch.ones_like(angle), angle)
            turned.append(torch.cat((pair.real, pair.imag), dim=-1))
        for t in range(T):
            scores = torch.stack([turned[0][t] @ turned[1][s] for s in range(t + 1)]) / math.sqrt(D)
            y[t, head] = scores.softmax(0) @ v[: t + 1, head]
    z = x[0] + y.reshape(T, 16) @ block.out.weight.T
    gate, up = (norm(z, block.mlp_norm.weight) @ block.gate_up.weight.T).chunk(2, dim=-1)
    z = z + (gate * torch.sigmoid(gate) * up) @ block.down.weight.T
    torch.testing.assert_close(block(x)[0], z, rtol=1e-5, atol=1e-7)  # the angles are fp32
    logits, targets = norm(x[0], last.norm.weight) @ last.output.weight.T, torch.arange(5)
    torch.testing.assert_close(last(x)[0], logits)
    expected = -logits.log_softmax(dim=-1)[targets, targets].mean()
    torch.testing.assert_close(last(x, targets[None]), expected)


def test_attention_by_hand_equals_torchs():
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v), theirs)


def relative_error_of_bf16(layer, weight, x, *targets):
    """Of the gradient of `weight`, against that in fp64."""
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        x = x.to(dtype) if x.is_floating_point() else x
        y = layer.to(dtype)(x, *targets)
        torch.manual_seed(0)
        grad_y = torch.randn(y.shape).bfloat16().to(dtype)
        gradients.append(torch.autograd.grad(y, weight, grad_y)[0].double())
    return (gradients[0] - gradients[1]).norm() / gradients[1].norm()


def test_bf16_gradients_of_embedding_and_output_are_summed_in_fp32():
    """8 x 1024 tokens of few kinds: each row of the gradient has some 160 terms. Only the rounding
    of the terms and of the result to 8 bits is left."""
    embedding, *_, head = Llama(CONFIG, seed=1).layers
    tokens, x = torch.randint(50, (8, 1024)), torch.randn(8, 1024, 16).bfloat16()
    assert relative_error_of_bf16(embedding, embedding.weight, tokens) < 0.003
    assert relative_error_of_bf16(head.bfloat16(), head.output.weight, x, tokens) < 0.01
    assert head.bfloat16()(x, tokens).dtype == torch.float32  # a mean over 8,192 tokens


def test_initialisation_is_a_function_of_seed_and_layer():
    a, b = (Llama(CONFIG, 1).state_dict() for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    seen = set()
    # 1337 and 5433 have the same low 12 bits, 1 and 2**32 + 1 the same low 32 bits.
    seeds = (0, 1, 2, 3, 1337, 5433, 2**20 + 1, 2**31 - 1, 2**32 + 1)
    for seed in seeds:
        state = Llama(CONFIG, seed).state_dict()
        seen |= {(state[f"layers.{l}.qkv.weight"].sum().item()) for l in (1, 2)}
    assert len(seen) == 2 * len(seeds)
    assert a["layers.1.gate_up.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert a["layers.1.down.weight"].std().item() == pytest.approx(0.01, rel=0.1)  # / sqrt(2 L)
