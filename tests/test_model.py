"""The decoder: each piece against its formula, the whole against transformers', its precision and
its start. All methods, sharded and plain, train this one model: comparing them cannot find an error
in it."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import model
from config import PRESETS, parse
from methods import METHODS
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


def test_gradient_of_the_embedding_adds_up_over_the_tokens_of_each_kind():
    """Token 0 is one like any other."""
    embedding = Llama(CONFIG, seed=1).layers[0].double()
    tokens = torch.tensor([[0, 3, 0], [3, 0, 7]])
    grad_y = torch.randn(2, 3, H * D).double()
    embedding(tokens).backward(grad_y)
    expected = torch.zeros(50, H * D).double()
    for token, row in zip(tokens.flatten(), grad_y.view(-1, H * D)):
        expected[token] += row
    torch.testing.assert_close(embedding.weight.grad, expected)


def in_their_names(tensors, config):
    """Our parameters by name, as transformers' Llama has them: it splits qkv and gate_up."""
    last = config.n_layer + 1
    found = {
        "model.embed_tokens.weight": tensors["layers.0.weight"],
        "model.norm.weight": tensors[f"layers.{last}.norm.weight"],
        "lm_head.weight": tensors[f"layers.{last}.output.weight"],
    }
    for l in range(config.n_layer):
        ours = f"layers.{l + 1}."
        theirs = f"model.layers.{l}."
        qkv = tensors[ours + "qkv.weight"].chunk(3)
        gate_up = tensors[ours + "gate_up.weight"].chunk(2)
        for name, tensor in zip(("q_proj", "k_proj", "v_proj"), qkv):
            found[f"{theirs}self_attn.{name}.weight"] = tensor
        for name, tensor in zip(("gate_proj", "up_proj"), gate_up):
            found[f"{theirs}mlp.{name}.weight"] = tensor
        found[theirs + "self_attn.o_proj.weight"] = tensors[ours + "out.weight"]
        found[theirs + "mlp.down_proj.weight"] = tensors[ours + "down.weight"]
        found[theirs + "input_layernorm.weight"] = tensors[ours + "attention_norm.weight"]
        found[theirs + "post_attention_layernorm.weight"] = tensors[ours + "mlp_norm.weight"]
    return found


@pytest.mark.ecosystem
def test_logits_loss_and_all_gradients_are_those_of_transformers_llama(llama):
    transformers = pytest.importorskip("transformers")
    config = llama.config
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.n_embd, num_attention_heads=config.n_head,
        num_hidden_layers=config.n_layer, intermediate_size=config.n_hidden,
        max_position_embeddings=config.block_size, rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
    )).double()  # fmt: skip
    theirs.load_state_dict(in_their_names(llama.state_dict(), config))

    tokens = torch.randint(config.vocab_size, (3, config.block_size + 1))
    tokens[0, :4] = 0
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    logits = theirs(inputs).logits
    torch.testing.assert_close(llama(inputs), logits, rtol=1e-6, atol=1e-8)  # the angles are fp32

    their_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = llama(inputs, targets)
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-6)
    loss.backward()
    their_loss.backward()
    gradients = {name: parameter.grad for name, parameter in llama.named_parameters()}
    gradients = in_their_names(gradients, config)
    for name, parameter in theirs.named_parameters():
        error = (gradients.pop(name) - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, name
    assert not gradients


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


def test_block_in_bf16_rounds_its_queries_and_keys_once_at_all_1024_positions(monkeypatch):
    """The rotation is in fp32. In bf16 it would round angle, products and sum, too."""
    config = ModelConfig(n_layer=1, n_head=1, n_embd=16, block_size=1024, vocab_size=2)
    block = Llama(config, seed=1).layers[1]
    for parameter in block.parameters():  # as in shard.py, which leaves the buffers as they are
        parameter.data = parameter.data.bfloat16()
    seen = []
    monkeypatch.setattr(model, "attend", lambda q, k, v: seen.extend((q, k)) or attend(q, k, v))
    x = torch.randn(1, 1024, 16).bfloat16()
    with torch.no_grad():
        y = block(x)
        straight = block.qkv(block.attention_norm(x)).double().chunk(3, dim=-1)
    angles = model.rotary_angles(1024, 16, 10000.0).double()
    for found, z in zip(seen, straight):
        exact = model.rotate(z[:, None], angles.cos(), angles.sin())
        assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
    error = (y.double() - block.double()(x.double())).norm() / y.double().norm()
    assert error < 0.005


def test_dry_run_for_a_gpu_on_a_machine_without_one_computes_in_bf16(monkeypatch):
    """Every GPU that has been made for training since 2020 does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model.has_native_bf16("cuda")


# ---- the start ----


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


def test_every_matrix_starts_with_the_promised_deviation_and_every_gain_at_1():
    """GPT-2's: 0.02, and for the two matrices of a block that write into the residual stream
    0.02 / sqrt(2 n_layer)."""
    config = ModelConfig(n_layer=8, n_head=2, n_embd=64, vocab_size=300)
    smaller = 0.02 / math.sqrt(2 * 8)
    deviations = {"layers.0.weight": 0.02, "layers.9.output.weight": 0.02}
    for l in range(1, 9):
        deviations |= {f"layers.{l}.qkv.weight": 0.02, f"layers.{l}.gate_up.weight": 0.02}
        deviations |= {f"layers.{l}.out.weight": smaller, f"layers.{l}.down.weight": smaller}
    for name, value in Llama(config, seed=1).state_dict().items():
        if value.dim() == 1:
            assert (value == 1).all(), name
            continue
        # of 4,096 elements at least: the deviation of a deviation is 1.1%
        assert value.std().item() == pytest.approx(deviations.pop(name), rel=0.05), name
        assert abs(value.mean().item()) < 0.1 * value.std().item(), name
    assert not deviations


# From arXiv 2005.14165, table 2.1: blocks, channels, channels per head, learning rate. (Its model
# of 1.3b has 24 heads of 128 channels. Here 16 of them make up the 2,048 channels.)
TABLE = {
    "124m": (12, 768, 64, 6.0e-4),
    "1b": (24, 2048, 128, 2.0e-4),
    "7b": (32, 4096, 128, 1.2e-4),
}


def test_large_presets_have_the_sizes_and_rates_of_gpt3s_table():
    for name, (layers, channels, head, lr) in TABLE.items():
        preset = PRESETS[name]
        assert preset["n_layer"] == layers, name
        assert preset["n_embd"] == channels, name
        assert preset["n_embd"] / preset["n_head"] == head, name
        assert preset["lr"] == lr, name
        assert preset["sync_warmup_steps"] == 1024, name  # EDiT's paper


# The papers' outer steps (EDiT 2412.07210, DiLoCo 2311.08105, Streaming DiLoCo 2501.18512). Those of
# the relatives after them were tuned here, for one size.
OUTER = {
    "edit": (0.8, 0.85),
    "a_edit": (0.8, 0.85),
    "streaming_edit": (0.8, 0.85),
    "diloco": (0.7, 0.9),
    "robust": (0.7, 0.9),
    "streaming_diloco": (0.4, 0.9),
    "one_bit_edit": (0.9, 0.3),
    "noloco": (0.9, 0.5),
}


def test_large_presets_have_the_outer_steps_of_the_papers():
    for method, (lr, mu) in OUTER.items():
        own = METHODS[method].Config
        for name in PRESETS:
            flags = ["--method", method, "--model", name]
            config = parse(flags, METHODS)[0]
            found = (config.outer_lr, config.outer_momentum)
            small = (own.outer_lr, own.outer_momentum)
            assert found == ((lr, mu) if name in TABLE else small), (method, name)
            assert method != "a_edit" or config.tau_time_s == (50 if name in TABLE else 2), name
        given = parse([*flags, "--outer_momentum", "0.1"], METHODS)[0]
        assert given.outer_momentum == 0.1, method


def test_small_presets_have_nanogpts_shape():
    # nanoGPT's config/train_shakespeare_char.py
    baby = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, lr=1e-3, lr_warmup_steps=100)
    assert baby.items() <= PRESETS["10m"].items()


def test_what_presets_leave_out_is_llamas():
    """Llama 2's base of the rotary positions and eps of norms; 8/3 of the channels in the MLP."""
    config = ModelConfig(n_embd=4096)
    assert (config.rope_base, config.norm_eps) == (10000.0, 1e-5)
    assert config.n_hidden == 10944  # 8/3 x 4096 = 10922.7, up to a multiple of 64
