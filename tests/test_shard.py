"""ZeRO-3: sharded equals whole, what is sent, what is alive, what decays."""

import math

import pytest
import torch

from mesh import Mesh
from model import Llama, ModelConfig
from ranks import run_ranks
from shard import ShardedModel

CONFIG = ModelConfig(n_layer=4, n_head=2, n_embd=12, block_size=8, vocab_size=97)
LAYERS = CONFIG.n_layer + 2


def batches(count):
    generator = torch.Generator().manual_seed(5)
    # (inputs, targets), B, T
    return [torch.randint(97, (2, 2, 8), generator=generator) for _ in range(count)]


def sharded_gradients(shards, dtype, accum=1, recompute=False, compiler=None):
    mesh = Mesh(shards, torch.device("cpu"))
    model = ShardedModel(CONFIG, mesh, dtype, seed=3, recompute=recompute)
    for layer in model.layers if compiler else []:
        layer.compile(backend=compiler)
    for micro in range(accum):
        inputs, targets = batches(mesh.world_size * accum)[micro * mesh.world_size + mesh.rank]
        loss = model.forward(inputs, targets)
        scale, last = 1 / (mesh.world_size * accum), micro == accum - 1
        model.backward(scale, first=micro == 0, average_replicas=last)
    model.master.copy_(model.grad)  # state_dict() then hands out the gathered gradient
    gradient = model.state_dict()
    model.clip_gradient(0.5, loss)
    padded = [layout.padded for layout in model.layouts]
    return gradient, model.news(), dict(mesh.calls), dict(mesh.sent), padded


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("accum", [1, 2])
def test_gradient_equals_whole_model(shards, accum):
    world_size = 4
    ranks = run_ranks(world_size, sharded_gradients, shards, torch.float64, accum)
    gradient, norm_and_loss, *_ = ranks[0]
    whole = Llama(CONFIG, seed=3).double()
    for inputs, targets in batches(world_size * accum):
        (whole(inputs, targets) / (world_size * accum)).backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad.float(), rtol=1e-6, atol=1e-9)
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    assert norm_and_loss[0] == pytest.approx(norm.item(), rel=1e-12)


def test_bf16_compute_keeps_fp32_masters_and_stays_close():
    exact = run_ranks(2, sharded_gradients, 2, torch.float32)[0][0]
    rough = run_ranks(2, sharded_gradients, 2, torch.bfloat16)[0][0]
    for name in exact:
        assert rough[name].dtype == torch.float32
        error = (rough[name] - exact[name]).norm() / exact[name].norm()
        assert 0 < error < 0.05, name  # 8 bits of mantissa, through 6 layers


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
        assert sent["shard"] == (gathered + sum(P) + sum(P)) * 8 / 2 + 4 * 8 and sent["sync"] == 0


def test_recomputing_changes_no_bit_and_no_collective_and_keeps_only_block_inputs():
    usual, again = (
        run_ranks(2, sharded_gradients, 2, torch.float32, 2, recompute)[0]
        for recompute in (False, True)
    )
    assert all(torch.equal(usual[0][name], again[0][name]) for name in usual[0])
    assert usual[1:] == again[1:]  # norm and loss; calls; bytes

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


def test_minibatch_sends_the_gradient_shard_once_over_the_sync_group():
    _, _, calls, sent, P = run_ranks(4, sharded_gradients, 2, torch.float64)[0]
    assert calls["sync all-reduce"] == LAYERS
    assert sent["sync"] == 2 * (2 - 1) / 2 * sum(P) / 2 * 8


def test_one_rank_makes_no_collective_and_no_copy_of_the_parameters():
    mesh = Mesh(1, torch.device("cpu"))
    model = ShardedModel(CONFIG, mesh, torch.float32)
    inputs, targets = batches(1)[0]
    model.forward(inputs, targets)
    model.backward(1.0)
    assert not mesh.calls and model.buffers() == []
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


def initial_state(shards):
    mesh = Mesh(shards, torch.device("cpu"))
    return ShardedModel(CONFIG, mesh, torch.float32, seed=11).state_dict()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_initialisation_does_not_depend_on_the_mesh(shards):
    state, whole = run_ranks(4, initial_state, shards)[0], Llama(CONFIG, seed=11).state_dict()
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def decayed_elements(shards):
    model = ShardedModel(CONFIG, Mesh(shards, torch.device("cpu")), torch.float32, seed=11)
    optimizer = torch.optim.AdamW(model.optimizer_groups(weight_decay=0.5), lr=0.1, fused=True)
    optimizer.step()  # gradients are zero: only the decay acts
    return model.state_dict()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_weight_decay_acts_on_matrices_only(shards):
    state, whole = run_ranks(4, decayed_elements, shards)[0], Llama(CONFIG, seed=11).state_dict()
    for name, before in whole.items():
        torch.testing.assert_close(state[name], before * (0.95 if before.dim() == 2 else 1.0))


def evaluation_leaves_no_trace(shards):
    model = ShardedModel(CONFIG, Mesh(shards, torch.device("cpu")), torch.float32)
    inputs, targets = batches(1)[0]
    losses = [model.forward(inputs, targets, train=train).item() for train in (False, True)]
    return losses, len(model.tape)


def test_evaluation_forward_keeps_no_activations():
    for losses, tape in run_ranks(2, evaluation_leaves_no_trace, 2):
        assert losses[0] == losses[1] and tape == LAYERS


def order_of_events(shards):
    """What a rank does in one step, in order:
    ("gather", l), ("compute", l), ("reduce", l), ("arrived", l)."""
    mesh, events = Mesh(shards, torch.device("cpu")), []
    model = ShardedModel(CONFIG, mesh, torch.float32)
    start_reduce, settle = model._start_reduce, model._settle
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

    def watched_settle(l, *rest):
        events.append(("arrived", l))
        return settle(l, *rest)

    model.start_gather, model._start_reduce = watched_start, watched_reduce
    model._settle = watched_settle
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
        model.clip_gradient(max_norm, torch.zeros(()))
        assert torch.allclose(model.grad, expected, rtol=1e-6, atol=0)
