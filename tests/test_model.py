"""The decoder: each piece against its formula, and what must hold of the whole."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import Block, Llama, ModelConfig, attend, rotary_angles, rotate

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=50)


@pytest.fixture
def model():
    return Llama(CONFIG, seed=1)


def test_block_equals_its_formula_written_out(model):
    torch.manual_seed(0)
    block, x = model.layers[1].double(), torch.randn(1, 5, 16, dtype=torch.float64)
    T, H, D = 5, 2, 8

    def norm(v, gain):
        return v / torch.sqrt((v**2).mean(-1, keepdim=True) + 1e-5) * gain

    h = norm(x, block.attention_norm.weight)[0] @ block.qkv.weight.T  # (T, 3 C)
    q, k, v = h.view(T, 3, H, D).unbind(1)
    angle = torch.tensor([[t * 10000 ** (-2 * i / D) for i in range(D // 2)] for t in range(T)])
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


def test_rotary_scores_depend_on_distance_only():
    angles = rotary_angles(20, 8)
    q, k = torch.randn(8), torch.randn(8)
    turn = lambda x, t: rotate(x, angles[t].cos(), angles[t].sin())
    assert turn(q, 3) @ turn(k, 1) == pytest.approx((turn(q, 17) @ turn(k, 15)).item(), abs=1e-4)


def test_prediction_does_not_see_the_future(model):
    tokens = torch.randint(50, (1, 12))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 50
    assert torch.equal(model(tokens)[0, :7], model(changed)[0, :7])
    assert not torch.equal(model(tokens)[0, 7], model(changed)[0, 7])


def test_loss_is_mean_cross_entropy_and_starts_near_uniform(model):
    tokens, targets = torch.randint(50, (2, 3, 12))
    logits = model(tokens)
    by_hand = -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets), by_hand)
    assert model(tokens, targets).item() == pytest.approx(math.log(50), abs=0.1)


@pytest.mark.parametrize("logits", [1, 250, 10**6])
def test_loss_in_chunks_equals_loss_and_gradients_of_whole_logits(model, monkeypatch, logits):
    monkeypatch.setattr("model.LOGITS", logits)  # rows at a time: 1, 5, all 36
    tokens, targets = torch.randint(50, (2, 3, 12))
    head, x = model.layers[-1], torch.randn(3, 12, 16, requires_grad=True)
    inputs = [x, *head.parameters()]
    whole = F.cross_entropy(head(x).flatten(0, 1), targets.flatten())
    chunked = head(x, targets)
    torch.testing.assert_close(chunked, whole)
    expected = torch.autograd.grad(0.3 * whole, inputs)
    for ours, theirs in zip(torch.autograd.grad(0.3 * chunked, inputs), expected):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert torch.equal(head(x, targets), chunked)


def test_logits_never_exist_whole(model, monkeypatch):
    monkeypatch.setattr("model.LOGITS", 300)
    seen = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in [result] if isinstance(t, torch.Tensor))
            return result

    x = torch.randn(3, 12, 16, requires_grad=True)
    with Sizes():
        model.layers[-1](x, torch.zeros(3, 12, dtype=torch.long)).backward()
    # the output matrix and its gradient, not 36 tokens' logits
    assert max(seen) == 50 * 16 < 36 * 50


def test_attention_by_hand_equals_torchs():
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v), theirs)


def test_bf16_gradients_of_embedding_and_output_are_summed_in_fp32(monkeypatch):
    """8 x 1024 tokens of few kinds: each row of the gradient has some 160 terms. Only the rounding
    of the terms and of the result to 8 bits is left."""
    torch.manual_seed(0)
    tokens = torch.randint(50, (8, 1024))
    embedding = Llama(CONFIG, seed=1).layers[0]
    out = torch.randn(8, 1024, 16).bfloat16()
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        embedding.to(dtype)(tokens).backward(out.to(dtype))
        gradients.append(embedding.weight.grad.double())
        embedding.weight.grad = None
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 0.003

    head, x = Llama(CONFIG, seed=1).layers[-1].bfloat16(), torch.randn(8, 1024, 16).bfloat16()
    for logits in (2**26, 50 * 64):  # whole; 128 chunks
        monkeypatch.setattr("model.LOGITS", logits)
        gradients = []
        for dtype in (torch.bfloat16, torch.float64):
            loss = head.to(dtype)(x.to(dtype), tokens)
            gradients.append(torch.autograd.grad(loss, head.output.weight)[0].double())
        assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 0.01


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
    assert a["layers.1.down.weight"].std() < 0.6 * a["layers.1.gate_up.weight"].std()


def test_model_has_no_biases_and_about_12_c_squared_per_block():
    config = ModelConfig(n_embd=768, n_head=12)
    names = [name for name, _ in Block(config).named_parameters()]
    assert not any("bias" in name for name in names)
    assert sum(p.numel() for p in Block(config).parameters()) == 12 * 768**2 + 2 * 768


def test_bf16_block_equals_fp32_block_to_its_precision(model):
    x = torch.randn(2, 12, 16)
    exact = model.layers[1](x)
    rough = model.layers[1].to(torch.bfloat16)(x.to(torch.bfloat16))
    assert rough.dtype == torch.bfloat16
    assert ((rough.float() - exact).norm() / exact.norm()).item() < 0.02
