"""ZeRO-3: sharded equals whole, what is sent, what is alive, what decays."""

import math
import re

import pytest
import torch

from mesh import Mesh
from model import Llama, ModelConfig
from ranks import ROOT, run_ranks
from shard import ShardedModel

# The embedding has 970 elements: on 4 shards its flat vector is padded.
CONFIG = ModelConfig(n_layer=4, n_head=1, n_embd=10, block_size=8, vocab_size=97)
LAYERS = CONFIG.n_layer + 2


def batches(count):
    generator = torch.Generator().manual_seed(5)
    # (inputs, targets), B, T
    return [torch.randint(97, (2, 2, 8), generator=generator) for _ in range(count)]


def sharded_gradients(
    shards, dtype, accum=1, recompute=False, compiler=None, transport="gloo", averaged=True
):
    """One step's gradient (gathered), [norm, loss, votes], collectives, bytes, padded sizes."""
    mesh = Mesh(shards, torch.device("cpu"), 60, lambda ranks, crosses_replicas: transport)
    model = ShardedModel(CONFIG, mesh, dtype, seed=3, recompute=recompute)
    for layer in model.layers if compiler else []:
        layer.compile(backend=compiler)
    loss, ranks = 0.0, mesh.world_size if averaged else shards
    for micro in range(accum):
        inputs, targets = batches(mesh.world_size * accum)[micro * mesh.world_size + mesh.rank]
        loss += model.forward(inputs, targets) / accum
        first, last = micro == 0, micro == accum - 1
        model.backward(1 / (ranks * accum), first, average_replicas=averaged and last)
    metrics = model.step_metrics(loss, float(mesh.rank == 1), averaged)
    assert model.known_metrics() == metrics.read() == [
        metrics.norm.item(), metrics.loss.item(), metrics.read()[2]
    ]  # fmt: skip
    model.master.copy_(model.grad)  # state_dict() then hands out the gathered gradient
    padded = [layout.padded for layout in model.layouts]
    gradient = model.state_dict()
    return gradient, metrics.read(), dict(mesh.calls), dict(mesh.sent), padded


@pytest.mark.parametrize("shards, accum, transport", [
    (1, 1, "gloo"), (2, 1, "gloo"), (2, 2, "shm"), (4, 2, "gloo"), (4, 1, "shm"), (1, 2, "shm"),
])  # fmt: skip
def test_gradient_equals_whole_model(shards, accum, transport):
    options = (shards, torch.float64, accum, False, None, transport)
    ranks = run_ranks(4, sharded_gradients, *options)
    whole, total = Llama(CONFIG, seed=3).double(), 0.0
    for inputs, targets in batches(4 * accum):
        loss = whole(inputs, targets) / (4 * accum)
        loss.backward()
        total += loss.item()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(ranks[0][0][name], parameter.grad.float(), rtol=1e-6, atol=1e-9)
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
    for _, metrics, *_ in ranks:  # of all ranks; rank 1 voted
        assert metrics == pytest.approx([norm, total, 1.0], rel=1e-12)


def test_metrics_of_a_local_step_are_the_replicas_own():
    ranks = run_ranks(4, sharded_gradients, 2, torch.float64, 1, False, None, "gloo", False)
    for replica in range(2):
        whole, total = Llama(CONFIG, seed=3).double(), 0.0
        for inputs, targets in batches(4)[2 * replica : 2 * replica + 2]:
            loss = whole(inputs, targets) / 2
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
        expected = [norm, total, 1.0 if replica == 0 else 0.0]
        for _, metrics, _, sent, _ in ranks[2 * replica : 2 * replica + 2]:
            assert metrics == pytest.approx(expected, rel=1e-12) and sent["sync"] == 0


def test_bf16_compute_keeps_fp32_masters_and_stays_close():
    """8 bits of mantissa through 6 layers. For sums over many tokens see test_model.py."""
    exact = run_ranks(2, sharded_gradients, 2, torch.float32)[0][0]
    rough = run_ranks(2, sharded_gradients, 2, torch.bfloat16)[0][0]
    for name in exact:
        assert rough[name].dtype == torch.float32
        error = (rough[name] - exact[name]).norm() / exact[name].norm()
        assert 0 < error < 0.05, name


def test_step_gathers_2L_minus_3_layers_and_scatters_L():
    for rank in run_ranks(2, sharded_gradients, 2, torch.float64):
        _, _, calls, sent, P = rank
        # forward: all. backward: the last two are still there, the embedding's needs no parameters.
        gathered = sum(P) + sum(P[1:-2])
        assert calls == {
            "shard all-gather": LAYERS + LAYERS - 3 + LAYERS,  # + state_dict
            "shard reduce-scatter": LAYERS,
            "shard all-reduce": 1,
        }
        # all-gathers, reduce-scatters, state_dict's all-gathers, 3 scalars
        assert sent == {"shard": (gathered + sum(P) + sum(P)) * 8 / 2 + 3 * 8, "sync": 0}


def test_recomputing_changes_no_bit_and_no_collective_and_keeps_only_block_inputs():
    usual, again = (
        run_ranks(2, sharded_gradients, 2, torch.float32, 2, recompute)[0]
        for recompute in (False, True)
    )
    assert all(torch.equal(usual[0][name], again[0][name]) for name in usual[0])
    assert usual[1:] == again[1:]  # metrics; calls; bytes

    def kept(recompute):
        sizes, mesh = {}, Mesh(1, torch.device("cpu"))
        model = ShardedModel(CONFIG, mesh, torch.float32, recompute=recompute)

        def note(tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs, targets = batches(1)[0]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model.forward(inputs, targets)
        sizes.pop(model.master.untyped_storage().data_ptr(), None)
        return sum(sizes.values())

    assert kept(recompute=True) < kept(recompute=False) / 4


def test_compiled_layers_have_the_same_gradients():
    usual = run_ranks(2, sharded_gradients, 2, torch.float32, 2)[0]
    for recompute in (False, True):
        traced = run_ranks(2, sharded_gradients, 2, torch.float32, 2, recompute, "aot_eager")[0]
        for name in usual[0]:
            torch.testing.assert_close(traced[0][name], usual[0][name], rtol=1e-4, atol=1e-7)
        assert traced[2:] == usual[2:]


def test_minibatch_sends_the_gradient_shard_and_three_scalars_over_the_sync_group():
    for accum in (1, 3):
        _, _, calls, sent, P = run_ranks(4, sharded_gradients, 2, torch.float64, accum)[0]
        assert calls["sync all-reduce"] == LAYERS and calls["world all-reduce"] == 1
        assert sent["sync"] == 2 * (2 - 1) / 2 * sum(P) / 2 * 8 + 2 * 3 / 4 * 3 * 8


def test_one_rank_makes_no_collective_and_no_copy_of_the_parameters():
    mesh = Mesh(1, torch.device("cpu"))
    model = ShardedModel(CONFIG, mesh, torch.float32)
    inputs, targets = batches(1)[0]
    model.forward(inputs, targets)
    model.backward(1.0)
    assert not mesh.calls and not model.gathered and model.grad_buffer is None
    parameters = [p for layer in model.layers for p in layer.parameters()]
    storages = {p.untyped_storage().data_ptr() for p in parameters}
    assert storages == {model.master.untyped_storage().data_ptr()}


def alive_elements(shards):
    """Every storage that parameters live in, and the
    most of whole parameters a rank had at any time."""
    import gc

    import shard

    mesh, largest = Mesh(shards, torch.device("cpu")), [0]
    build = shard.build_layer

    def watched(config, layer, seed):
        module = build(config, layer, seed)
        alive = [o for o in gc.get_objects() if isinstance(o, torch.nn.Parameter)]
        largest[0] = max(largest[0], sum(p.numel() for p in alive))
        return module

    shard.build_layer = watched
    model = ShardedModel(CONFIG, mesh, torch.float32)
    for inputs, targets in batches(2):
        model.forward(inputs, targets)
        model.backward(1.0)
    storages = {p.untyped_storage() for layer in model.layers for p in layer.parameters()}
    storages = {s.data_ptr(): s.nbytes() // 4 for s in storages}
    return largest[0], storages, [layout.used for layout in model.layouts], model.master.numel()


def test_at_most_two_layers_are_whole_and_no_rank_builds_the_model():
    for building, storages, sizes, master in run_ranks(4, alive_elements, 4):
        assert building <= max(sizes)  # one layer at a time
        assert len(storages) == 2
        assert sum(storages.values()) <= 2 * (max(sizes) + 8 * 4)  # + padding
        assert master <= sum(sizes) / 4 + 8 * LAYERS  # + padding


def states_and_losses(shards):
    """The initial state; losses of an evaluation and of a training forward, and the tape's length
    after each; the state after one step of AdamW in which only the decay acts."""
    model = ShardedModel(CONFIG, Mesh(shards, torch.device("cpu")), torch.float32, seed=11)
    initial, (inputs, targets) = model.state_dict(), batches(1)[0]
    losses = [
        (model.forward(inputs, targets, train=train).item(), len(model.tape))
        for train in (False, True)
    ]
    model.adamw(weight_decay=0.5, lr=0.1).step()  # gradients are zero
    return initial, losses, model.state_dict()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_initialisation_evaluation_and_weight_decay_do_not_depend_on_the_mesh(shards):
    ranks, whole = run_ranks(4, states_and_losses, shards), Llama(CONFIG, seed=11)
    initial, _, decayed = ranks[0]
    assert initial.keys() == whole.state_dict().keys()
    for name, before in whole.state_dict().items():
        assert torch.equal(initial[name], before)
        factor = 0.95 if before.dim() == 2 else 1.0  # matrices only
        torch.testing.assert_close(decayed[name], before * factor)
    loss = whole(*batches(1)[0]).item()
    for _, ((evaluated, kept), (trained, tape)), _ in ranks:
        assert evaluated == trained == pytest.approx(loss) and (kept, tape) == (0, LAYERS)


def order_of_events(shards):
    """What a rank does in one step, in order:
    ("gather", l), ("compute", l), ("reduce", l), ("arrived", l)."""
    mesh, events = Mesh(shards, torch.device("cpu")), []
    model = ShardedModel(CONFIG, mesh, torch.float32)
    start_reduce, finish_reduce = model._start_reduce, model._finish_reduce
    for l, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, l=l: events.append(("compute", l)))

    def watched_start(l):
        before = mesh.calls["shard all-gather"]
        type(model).start_gather(model, l)
        if mesh.calls["shard all-gather"] > before:
            events.append(("gather", l))

    def watched_reduce(l, *rest):
        events.append(("reduce", l))
        return start_reduce(l, *rest)

    def watched_finish(l, *rest):
        events.append(("arrived", l))
        return finish_reduce(l, *rest)

    model.start_gather, model._start_reduce = watched_start, watched_reduce
    model._finish_reduce = watched_finish
    inputs, targets = batches(1)[0]
    model.forward(inputs, targets)
    forward, events[:] = list(events), []
    model.backward(1.0)
    return forward, list(events)


def test_next_layer_is_gathered_before_this_one_computes_and_reduces_overlap():
    last = LAYERS - 1
    for forward, backward in run_ranks(2, order_of_events, 2):
        expected = [("gather", 0)]
        for l in range(LAYERS):
            expected += [("gather", l + 1)] * (l < last) + [("compute", l)]
        assert forward == expected
        # backward: the previous layer is asked for before this one's gradient is sent,
        # and a layer's reduce-scatter is waited for only when the next gradient is ready
        expected = []
        for l in reversed(range(LAYERS)):
            expected += [("gather", l - 1)] * (0 < l - 1 < last - 1)
            expected += [("arrived", l + 1)] * (l < last) + [("reduce", l)]
        assert backward == expected + [("arrived", 0)]


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e9])
def test_gradient_is_clipped_to_its_norm_and_zeroed_if_that_is_not_finite(max_norm):
    model = ShardedModel(ModelConfig(1, 1, 8, 8, 11), Mesh(1, torch.device("cpu")))
    for value in (1.0, math.nan, math.inf):
        model.grad.fill_(0.5)[3] = value
        expected = model.grad.clone()
        if not math.isfinite(value):
            expected.zero_()
        elif max_norm == 1.0:
            expected /= expected.norm() + 1e-6
        model.step_metrics(torch.zeros(()), 0.0, False)
        model.clip_gradient(model.metrics[-1].norm, max_norm)
        assert torch.allclose(model.grad, expected, rtol=1e-6, atol=0)


def test_every_collective_of_training_carries_a_tag():
    """grep '# \\[s' lists all communication: one tag above each call, but in the two files that
    carry it out."""
    operations = "all_gather|reduce_scatter|all_reduce|gather_rows|all_gather_object|barrier"
    operations += "|broadcast|send|recv|isend|irecv|broadcast_object_list"
    tagged = []
    for path in {*ROOT.glob("*.py"), *ROOT.glob("plumbing/*.py")}:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            call = re.search(rf"\b(mesh|dist)\.({operations})\(", line)
            if call and path.name not in ("mesh.py", "shm.py", "bench.py"):
                above = any("# [s" in comment for comment in lines[max(0, number - 3) : number])
                tagged.append((above, path.name, line))
    assert len(tagged) >= 14 and [call for call in tagged if not call[0]] == []
