"""ZeRO-3: sharded equals whole, what is sent, what is alive, what decays."""

import math
from collections import deque
from types import SimpleNamespace

import pytest
import torch

import train
from hf import whole_model
from mesh import Mesh
from model import Llama, ModelConfig
from ranks import run_ranks, run_training
from rows import each_row
from train import make_model

# The embedding has 970 elements: on 4 shards its flat vector is padded.
CONFIG = ModelConfig(n_layer=4, n_head=1, n_embd=10, block_size=8, vocab_size=97)
LAYERS = CONFIG.n_layer + 2
CPU = torch.device("cpu")
FP64 = torch.float64
FP32 = torch.float32
BF16 = torch.bfloat16


def batches(count):
    """(inputs, targets), B, T each."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(97, (2, 2, 8), generator=generator) for _ in range(count)]


# ---- a gradient on four ranks ----


def gradient(shards, dtype=FP64, accum=1, transport="gloo", averaged=True, recompute=False):
    """One step's gradient (gathered), [norm, loss, votes], norm() of the gradient, collectives,
    bytes, padded sizes."""
    mesh = Mesh(shards, CPU, 60, lambda ranks, crosses_replicas: transport)
    model = make_model(CONFIG, mesh, dtype, seed=3, recompute=recompute)
    wide = [model.master, model.grad]
    if shards > 1:
        wide.append(model.grad_buffer)
    assert {vector.dtype for vector in wide} == {torch.promote_types(dtype, FP32)}

    every_batch = batches(mesh.world_size * accum)
    ranks = mesh.world_size if averaged else shards
    loss = 0.0
    for micro in range(accum):
        inputs, targets = every_batch[micro * mesh.world_size + mesh.rank]
        loss += model.forward(inputs, targets) / accum
        last = micro == accum - 1
        model.backward(1 / (ranks * accum), first=micro == 0, sum_replicas=averaged and last)
    vote = float(mesh.rank == 1)
    metrics = model.step_metrics(loss, vote, averaged)
    read = metrics.read()
    assert model.known_metrics() == read
    assert read[:2] == [metrics.norm.item(), metrics.loss.item()]

    calls = dict(mesh.calls)
    sent = dict(mesh.sent)
    norm = model.norm(model.grad).item()
    model.master.copy_(model.grad)  # whole_model() then returns the gathered gradient
    return SimpleNamespace(
        gradient=whole_model(model),
        metrics=read,
        norm=norm,
        calls=calls,
        sent=sent,
        sizes=[layout.padded for layout in model.layouts],
    )


CASES = {
    "replicas": dict(shards=1, accum=2, transport="shm"),
    "grid": dict(shards=2),
    "grid, accum": dict(shards=2, accum=3, transport="shm"),
    "shards": dict(shards=4),
    "shards, accum": dict(shards=4, accum=2, transport="shm"),
    "local": dict(shards=2, averaged=False),
    "fp32": dict(shards=2, accum=2, dtype=FP32),
    "recompute": dict(shards=2, accum=2, dtype=FP32, recompute=True),
    "bf16": dict(shards=2, accum=2, dtype=BF16),
}
IN_FP64 = ["replicas", "grid", "grid, accum", "shards", "shards, accum", "local"]


def whole_elements():
    """most: the elements of the memory in which layers are initialized; sizes: of the layers,
    padded; buffers: how many the model then keeps. Fails if two layers are initialized in different
    memory."""
    initialize = train.initialize
    alive = []  # for each layer: address of a storage -> its elements

    def watched(module, *args):
        elements = {}
        for parameter in module.parameters():
            storage = parameter.untyped_storage()
            elements[storage.data_ptr()] = storage.nbytes() // 4
        alive.append(elements)
        initialize(module, *args)

    train.initialize = watched
    model = make_model(CONFIG, Mesh(4, CPU), FP32)
    train.initialize = initialize
    for elements in alive:
        assert elements.keys() == alive[0].keys()

    buffers = set()
    for layer in model.layers:
        buffers |= {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    return SimpleNamespace(
        most=sum(alive[0].values()),
        sizes=[layout.padded for layout in model.layouts],
        buffers=len(buffers),
    )


def all_cases():
    found = {name: gradient(**case) for name, case in CASES.items()}
    found["memory"] = whole_elements()
    return found


@pytest.fixture(scope="module")
def results():
    """By case, on each of four ranks: what gradient() returns; "memory": whole_elements()."""
    ranks = run_ranks(4, all_cases)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def whole_gradient(own_batches):
    """The model with the gradient of the mean loss of these batches; the loss; the norm."""
    whole = Llama(CONFIG, seed=3).double()
    total = 0.0
    for inputs, targets in own_batches:
        loss = whole(inputs, targets) / len(own_batches)
        loss.backward()
        total += loss.item()
    gradients = [p.grad for p in whole.parameters()]
    return whole, total, torch.nn.utils.get_total_norm(gradients).item()


@each_row("name", IN_FP64)
def test_gradient_and_metrics_equal_the_whole_models(name, results):
    """Of all ranks, or of the replica's ranks in a local step. Rank 1 voted."""
    case = CASES[name]
    ranks = 4 if case.get("averaged", True) else 2
    size = ranks * case.get("accum", 1)
    every_batch = batches(max(4, size))
    for first in range(0, 4, ranks):
        whole, loss, norm = whole_gradient(every_batch[first : first + size])
        votes = float(first == 0)
        for rank in range(first, first + ranks):
            found = results[name][rank]
            assert found.metrics == pytest.approx([norm, loss, votes], rel=1e-12)
            assert found.norm == pytest.approx(norm, rel=1e-12)
            # Replicas with equal vectors get the same bits.
            assert found.norm == results[name][first].norm

            names = whole.state_dict().keys() if rank == 0 else set()
            assert found.gradient.keys() == names
            for key, value in found.gradient.items():
                expected = whole.get_parameter(key).grad.float()
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)


def test_bf16_compute_keeps_fp32_masters_and_stays_close(results):
    """8 bits of mantissa through 6 layers. For sums over many tokens see test_model.py."""
    exact = results["fp32"][0].gradient
    rough = results["bf16"][0].gradient
    for name in exact:
        assert rough[name].dtype == FP32
        error = (rough[name] - exact[name]).norm() / exact[name].norm()
        assert 0 < error < 0.05, name


def test_step_in_one_replica_sends_what_shard_py_promises(results):
    for rank in results["shards"]:
        P = rank.sizes
        assert rank.calls == {
            "shard all-gather": 2 * LAYERS - 3,
            "shard reduce-scatter": LAYERS,
            "shard all-reduce": 1,
        }
        # forward: all. backward: the last two are still there, the embedding's needs no parameters.
        gathered = sum(P) + sum(P[1:-2])
        reduced = sum(P)
        metrics = 2 * 3  # an all-reduce sends 3 scalars twice
        assert rank.sent == {"shard": 3 / 4 * (gathered + reduced + metrics) * 8, "sync": 0}


@each_row("name", ["grid", "grid, accum"])
def test_averaged_step_sends_the_gradient_once_over_the_slow_links(name, results):
    for rank in results[name]:
        assert rank.calls["sync all-reduce"] == LAYERS
        assert rank.calls["sync all-gather"] == 1
        gradient = 2 * (2 - 1) / 2 * sum(rank.sizes) / 2  # an all-reduce of each shard
        metrics = (2 - 1) * 2 * 3  # an all-gather of 3 scalars of both shards
        assert rank.sent["sync"] == (gradient + metrics) * 8


def test_local_step_sends_nothing_over_the_slow_links(results):
    for rank in results["local"]:
        assert rank.sent["sync"] == 0


def test_recomputing_changes_no_bit_and_no_collective(results):
    """What it saves is in test_plan.py."""
    usual = results["fp32"][0]
    again = results["recompute"][0]
    for name in usual.gradient:
        assert torch.equal(usual.gradient[name], again.gradient[name])
    for field in "metrics", "norm", "calls", "sent", "sizes":
        assert getattr(usual, field) == getattr(again, field), field


class Dropout:
    """Layer 1 drops half of its outputs while it trains, as a layer of a reader's own may."""

    def __call__(self, method, model, mesh):
        def drop(layer, inputs, y):
            return torch.nn.functional.dropout(y, 0.5, layer.training)

        model.layers[1].register_forward_hook(drop)
        return lambda: len(model.tape)


def test_evaluation_drops_nothing_and_keeps_no_tape(corpus_folder):
    """At a rate of 0 the parameters stay, and so does the loss of each evaluation."""
    options = dict(method="minibatch", lr=0.0, max_steps=4, eval_interval=1)
    run = run_training(1, corpus_folder, Dropout(), **options)
    losses = [row["val_loss"] for row in run.rows("eval")]
    assert losses == [losses[0]] * 4
    assert run.ranks[0]["watched"] == 0


# ---- compiled layers and buffers, on one rank ----


def two_micro_steps(recompute, backend=None, change=None):
    """The model after two micro-steps, in bf16, so that layers are gathered into two buffers in
    turn, also on one rank. backend: of the compiler; change(model) comes first."""
    model = make_model(CONFIG, Mesh(1, CPU), BF16, recompute=recompute)
    if backend:
        for layer in model.layers:
            layer.compile(backend=backend)
    if change:
        change(model)
    for micro, (inputs, targets) in enumerate(batches(2)):
        model.forward(inputs, targets)
        model.backward(0.5, first=micro == 0)
    return model


@pytest.mark.slow
@each_row("recompute", [False, True])
def test_compiled_layers_have_the_same_gradients(recompute):
    usual = two_micro_steps(recompute)
    compiled = two_micro_steps(recompute, "aot_eager")
    for expected, found in zip(usual.grads, compiled.grads):
        assert (found - expected).norm() / expected.norm() < 0.01


def spoil_buffers(model):
    """When a layer's backward is over, fill its buffer with NaN, also that of layer 1: the next
    forward gathers it again."""
    backward_layer = model._backward_layer

    def spoiled(l, *more):
        gradients = backward_layer(l, *more)
        for buffer, layer in zip(model.gathered, model.gathered_layer):
            if layer != l - 1:
                buffer.fill_(math.nan)
        return gradients

    model._backward_layer = spoiled


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_backward_reads_no_layer_but_its_own(backend, recompute):
    """The gradients are the same, bit for bit, if other layers' buffers hold NaN."""
    usual = two_micro_steps(recompute, backend)
    spoiled = two_micro_steps(recompute, backend, spoil_buffers)
    assert usual.grad.norm() > 0
    assert torch.equal(spoiled.grad, usual.grad)


# ---- what is alive, and when ----


def test_initialisation_holds_one_whole_layer_and_a_model_two(results):
    """The size of the two is in test_plan.py."""
    for rank in results["memory"]:
        assert rank.most == max(rank.sizes)
        assert rank.buffers == 2


def order_of_events():
    """What a rank does in the forward and in the backward with layer l: gather (g), compute (c),
    reduce its gradient (r), wait until that has arrived (a)."""
    model = make_model(CONFIG, Mesh(2, CPU), FP32)
    events = []

    def note(event, name):
        function = getattr(model, name)

        def noted(l, *rest):
            events.append(f"{event}{l}")
            return function(l, *rest)

        setattr(model, name, noted)

    start_gather = model.start_gather

    def note_gather(l):
        exists = 0 <= l < LAYERS
        if exists and model.gathered_layer[l % 2] != l:  # else it does nothing
            events.append(f"g{l}")
        start_gather(l)

    def note_compute(layer, inputs):
        events.append(f"c{model.layers.index(layer)}")

    model.start_gather = note_gather
    note("r", "_start_reduce")
    note("a", "_finish_reduce")
    for layer in model.layers:
        layer.register_forward_pre_hook(note_compute)
    inputs, targets = batches(1)[0]
    model.forward(inputs, targets)
    forward = list(events)
    events.clear()
    model.backward(1.0)
    return " ".join(forward), " ".join(events)


def test_next_layer_is_gathered_before_this_one_computes_and_reduces_overlap():
    """In the backward the previous layer is asked for before this one's gradient is sent, and a
    layer's reduce-scatter is waited for only when the next gradient is ready."""
    for forward, backward in run_ranks(2, order_of_events):
        assert forward == "g0 g1 c0 g2 c1 g3 c2 g4 c3 g5 c4 c5"
        assert backward == "r5 g3 a5 r4 g2 a4 r3 g1 a3 r2 a2 r1 a1 r0 a0"


# ---- the end of a step ----


@each_row("max_norm", [0.0, 1.0, 1e9])
def test_gradient_is_clipped_to_its_norm_and_zeroed_if_that_is_not_finite(max_norm):
    model = make_model(ModelConfig(1, 1, 8, 8, 11), Mesh(1, CPU))
    loss = torch.zeros(())
    for value in (1.0, math.nan, math.inf):
        model.grad.fill_(0.5)
        model.grad[3] = value
        expected = model.grad.clone()
        if not math.isfinite(value):
            expected.zero_()
        elif max_norm == 1.0:
            expected /= expected.norm() + 1e-6

        model.step_metrics(loss, 0.0, False)
        model.clip_gradient(max_norm)
        assert torch.allclose(model.grad, expected, rtol=1e-6, atol=0)


def test_gradient_is_clipped_by_its_own_norm_where_metrics_are_known_a_step_late():
    """As on a GPU."""
    model = make_model(ModelConfig(1, 1, 8, 8, 11), Mesh(1, CPU))
    model.metrics = deque(maxlen=2)
    for value in (0.5, 50.0, 0.5):
        model.grad.fill_(value)
        model.step_metrics(torch.zeros(()), 0.0, False)
        model.clip_gradient(1.0)
        assert model.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
