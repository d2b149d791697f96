"""ZeRO-3: sharded equals whole, what is sent, what is alive, what decays."""

import math

import pytest
import torch

import shard
from export import whole_model
from mesh import Mesh
from model import Llama, ModelConfig
from ranks import run_ranks
from shard import ShardedModel

# The embedding has 970 elements: on 4 shards its flat vector is padded.
CONFIG = ModelConfig(n_layer=4, n_head=1, n_embd=10, block_size=8, vocab_size=97)
LAYERS, CPU = CONFIG.n_layer + 2, torch.device("cpu")
FP64, FP32 = torch.float64, torch.float32


def batches(count):
    generator = torch.Generator().manual_seed(5)
    # (inputs, targets), B, T
    return [torch.randint(97, (2, 2, 8), generator=generator) for _ in range(count)]


def gradient(shards, dtype=FP64, accum=1, transport="gloo", averaged=True, recompute=False):
    """One step's gradient (gathered), [norm, loss, votes], collectives, bytes, padded sizes, and
    norm() of the gradient."""
    mesh = Mesh(shards, CPU, 60, lambda ranks, crosses_replicas: transport)
    model = ShardedModel(CONFIG, mesh, dtype, seed=3, recompute=recompute)
    wide = [model.master, model.grad] + ([model.grad_buffer] if shards > 1 else [])
    assert {vector.dtype for vector in wide} == {torch.promote_types(dtype, FP32)}
    loss, ranks = 0.0, mesh.world_size if averaged else shards
    for micro in range(accum):
        inputs, targets = batches(mesh.world_size * accum)[micro * mesh.world_size + mesh.rank]
        loss += model.forward(inputs, targets) / accum
        first, last = micro == 0, micro == accum - 1
        model.backward(1 / (ranks * accum), first, sum_replicas=averaged and last)
    metrics = model.step_metrics(loss, float(mesh.rank == 1), averaged)
    read = metrics.read()
    assert model.known_metrics() == read == [metrics.norm.item(), metrics.loss.item(), read[2]]
    calls, sent, sizes = dict(mesh.calls), dict(mesh.sent), [each.padded for each in model.layouts]
    norm = model.norm(model.grad).item()
    model.master.copy_(model.grad)  # whole_model() then returns the gathered gradient
    return whole_model(model), read, calls, sent, sizes, norm


CASES = {
    "replicas": dict(shards=1, accum=2, transport="shm"),
    "grid": dict(shards=2),
    "grid, accum": dict(shards=2, accum=3, transport="shm"),
    "shards": dict(shards=4),
    "shards, accum": dict(shards=4, accum=2, transport="shm"),
    "local": dict(shards=2, averaged=False),
    "fp32": dict(shards=2, accum=2, dtype=FP32),
    "recompute": dict(shards=2, accum=2, dtype=FP32, recompute=True),
    "bf16": dict(shards=2, accum=2, dtype=torch.bfloat16),
}


def all_gradients():
    return {name: gradient(**case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results():
    """What gradient() returns on each of four ranks, by case."""
    ranks = run_ranks(4, all_gradients)
    return {name: [rank[name] for rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", list(CASES)[:6])
def test_gradient_and_metrics_equal_the_whole_models(name, results):
    """Of all ranks, or of the replica's ranks in a local step. Rank 1 voted."""
    case = CASES[name]
    size = 4 * case.get("accum", 1) if case.get("averaged", True) else 2
    for first in range(0, 4, size):
        whole, total = Llama(CONFIG, seed=3).double(), 0.0
        for inputs, targets in batches(max(4, size))[first : first + size]:
            loss = whole(inputs, targets) / size
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
        for rank in range(first, min(4, first + size)):
            state, metrics, *_, of_vector = results[name][rank]
            assert metrics == pytest.approx([norm, total, float(first == 0)], rel=1e-12)
            # Replicas with equal vectors get the same bits.
            assert of_vector == results[name][first][-1] == pytest.approx(norm, rel=1e-12)
            assert state.keys() == (whole.state_dict().keys() if rank == 0 else set())
            for key, value in state.items():
                expected = whole.get_parameter(key).grad.float()
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)


def test_bf16_compute_keeps_fp32_masters_and_stays_close(results):
    """8 bits of mantissa through 6 layers. For sums over many tokens see test_model.py."""
    exact, rough = results["fp32"][0][0], results["bf16"][0][0]
    for name in exact:
        assert rough[name].dtype == FP32
        error = (rough[name] - exact[name]).norm() / exact[name].norm()
        assert 0 < error < 0.05, name


def test_step_sends_what_shard_py_promises(results):
    for _, _, calls, sent, P, _ in results["shards"]:
        # forward: all. backward: the last two are still there, the embedding's needs no parameters.
        gathered = sum(P) + sum(P[1:-2])
        gathers, others = 2 * LAYERS - 3, {"shard reduce-scatter": LAYERS, "shard all-reduce": 1}
        assert calls == {"shard all-gather": gathers} | others
        # all-gathers and reduce-scatters, 3 scalars
        assert sent == {"shard": 3 / 4 * ((gathered + sum(P)) * 8 + 2 * 3 * 8), "sync": 0}
    for _, _, calls, sent, P, _ in results["grid"] + results["grid, accum"]:
        assert calls["sync all-reduce"] == LAYERS and calls["sync all-gather"] == 1
        # all-reduces of the gradient, an all-gather of 3 scalars of both shards
        assert sent["sync"] == 2 * (2 - 1) / 2 * sum(P) / 2 * 8 + (2 - 1) * 2 * 3 * 8
    assert all(sent["sync"] == 0 for _, _, _, sent, *_ in results["local"])


def test_recomputing_changes_no_bit_and_no_collective(results):
    """What it saves is in test_plan.py."""
    usual, again = results["fp32"][0], results["recompute"][0]
    assert all(torch.equal(usual[0][name], again[0][name]) for name in usual[0])
    assert usual[1:] == again[1:]  # metrics; calls; bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_have_the_same_gradients(recompute):
    """In bf16, so that layers are gathered into two buffers in turn, also on one rank."""
    gradients = []
    for compiled in (False, True):
        model = ShardedModel(CONFIG, Mesh(1, CPU), torch.bfloat16, recompute=recompute)
        for layer in model.layers if compiled else []:
            layer.compile(backend="aot_eager")
        for micro, batch in enumerate(batches(2)):
            model.forward(*batch)
            model.backward(0.5, first=micro == 0)
        gradients.append(model.grads)
    for usual, traced in zip(*gradients):
        assert (traced - usual).norm() / usual.norm() < 0.01


def spoil_buffers(model):
    """When a layer's backward is over, fill its buffer with NaN. Layer 1's stays: the forward of
    the next micro-step begins with it."""
    backward_layer = model._backward_layer

    def spoiled(l, grad_x):
        gradients = backward_layer(l, grad_x)
        for k, buffer in enumerate(model.gathered):
            if model.gathered_layer[k] not in (1, l - 1):
                buffer.fill_(math.nan)
        return gradients

    model._backward_layer = spoiled


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_backward_reads_no_layer_but_its_own(backend, recompute):
    """The gradients are the same, bit for bit, if other layers' buffers hold NaN. bf16: as above."""
    gradients = []
    for spoil in (lambda model: None, spoil_buffers):
        model = ShardedModel(CONFIG, Mesh(1, CPU), torch.bfloat16, recompute=recompute)
        for layer in model.layers if backend != "eager" else []:
            layer.compile(backend=backend)
        spoil(model)
        for micro, batch in enumerate(batches(2)):
            model.forward(*batch)
            model.backward(0.5, first=micro == 0)
        gradients.append(model.grad)
    assert torch.equal(*gradients) and gradients[0].norm() > 0


def whole_elements():
    """The elements of whole parameters that existed while each layer was initialized; the model's
    layouts."""
    whole = []

    def watched(module, *args):
        storages = {}
        for parameter in module.parameters():
            storage = parameter.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes() // 4
        whole.append(sum(storages.values()))
        kept.append(storages)
        return initialize(module, *args)

    kept = []
    initialize = shard.initialize
    shard.initialize = watched
    model = ShardedModel(CONFIG, Mesh(4, CPU), FP32)
    assert all(storages.keys() == kept[0].keys() for storages in kept)  # the same memory
    storages = {p.untyped_storage() for layer in model.layers for p in layer.parameters()}
    assert len({storage.data_ptr() for storage in storages}) == 2
    return max(whole), [layout.padded for layout in model.layouts]


def order_of_events():
    """What a rank does in the forward and in the backward with layer l: gather (g), compute (c),
    reduce its gradient (r), wait until that has arrived (a)."""
    model, events = ShardedModel(CONFIG, Mesh(2, CPU), FP32), []

    def note(event, function):
        def noted(l, *rest):
            if event != "g" or 0 <= l < LAYERS and model.gathered_layer[l % 2] != l:
                events.append(f"{event}{l}")
            return function(l, *rest)

        return noted

    for event, name in dict(g="start_gather", r="_start_reduce", a="_finish_reduce").items():
        setattr(model, name, note(event, getattr(model, name)))
    for l, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, l=l: events.append(f"c{l}"))
    model.forward(*batches(1)[0])
    forward = len(events)
    model.backward(1.0)
    return " ".join(events[:forward]), " ".join(events[forward:])


def test_next_layer_is_gathered_before_this_one_computes_and_reduces_overlap():
    """In the backward the previous layer is asked for before this one's gradient is sent, and a
    layer's reduce-scatter is waited for only when the next gradient is ready."""
    for forward, backward in run_ranks(2, order_of_events):
        assert forward == "g0 g1 c0 g2 c1 g3 c2 g4 c3 g5 c4 c5"
        assert backward == "r5 g3 a5 r4 g2 a4 r3 g1 a3 r2 a2 r1 a1 r0 a0"


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e9])
def test_gradient_is_clipped_to_its_norm_and_zeroed_if_that_is_not_finite(max_norm):
    model = ShardedModel(ModelConfig(1, 1, 8, 8, 11), Mesh(1, CPU))
    for value in (1.0, math.nan, math.inf):
        model.grad.fill_(0.5)[3] = value
        expected = model.grad.clone()
        if not math.isfinite(value):
            expected.zero_()
        elif max_norm == 1.0:
            expected /= expected.norm() + 1e-6
        model.step_metrics(torch.zeros(()), 0.0, False)
        model.clip_gradient(max_norm)
        assert torch.allclose(model.grad, expected, rtol=1e-6, atol=0)
