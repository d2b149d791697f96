"""The penalty: its equations against numbers worked out by hand, sick replicas, rollback, and what
a sync sends."""

import math
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edit import Detector, clip_factor, outer_nesterov, replica_weights
from config import parse
from ranks import flags, run_training
from reference import simulate

ROUNDS = dict(method="edit", tau=3, sync_warmup_steps=2, max_steps=14)  # four rounds
L = 4  # layers of the tiny model: embedding, 2 blocks, head


# ---- equations ----


def test_weights_equal_softmax_of_minus_norms_worked_out_by_hand():
    norms = torch.tensor([[1.0, 5.0], [2.0, 5.0]])
    none = torch.zeros(2, 2, dtype=torch.bool)
    w = replica_weights(norms, none)
    e = math.exp(-1.0)
    torch.testing.assert_close(w, torch.tensor([[1 / (1 + e), 0.5], [e / (1 + e), 0.5]]))
    assert torch.equal(replica_weights(norms, none, weighted=False), torch.full((2, 2), 0.5))


def test_weights_of_huge_and_non_finite_norms_stay_finite():
    norms = torch.tensor([[1e30], [3e30], [math.nan], [math.inf]])
    flagged = ~norms.isfinite()
    assert replica_weights(norms, flagged).tolist() == [[1.0], [0.0], [0.0], [0.0]]
    assert replica_weights(norms, torch.ones_like(flagged)).tolist() == [[0.0]] * 4


def test_largest_norm_gets_smallest_weight():
    w = replica_weights(torch.tensor([[0.3], [0.1], [0.2]]), torch.zeros(3, 1, dtype=torch.bool))
    assert w.argmin() == 0 and w.argmax() == 1 and w.sum() == pytest.approx(1)


def test_clip_factor_bounds_the_norm():
    assert clip_factor(torch.tensor(5.0), 10.0) == 1
    assert clip_factor(torch.tensor(20.0), 10.0) * 20 == pytest.approx(10)


def test_outer_nesterov_equals_torch_sgd():
    torch.manual_seed(0)
    anchor, momentum = torch.randn(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    theirs = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([theirs], lr=0.8, momentum=0.85, nesterov=True)
    for _ in range(4):
        d = torch.randn(7, dtype=torch.float64)
        outer_nesterov(anchor, momentum, d.clone(), 0.8, 0.85, torch.ones((), dtype=torch.float64))
        theirs.grad = d
        sgd.step()
    torch.testing.assert_close(anchor, theirs.detach(), rtol=1e-14, atol=1e-14)


def test_outer_nesterov_with_nobody_alive_changes_no_bit():
    anchor, momentum = torch.randn(7), torch.randn(7)
    before = anchor.clone(), momentum.clone()
    outer_nesterov(anchor, momentum, torch.zeros(7), 0.8, 0.85, torch.zeros(()))
    assert torch.equal(anchor, before[0]) and torch.equal(momentum, before[1])


# ---- the detector ----


def detector(threshold=3.0, ema=0.02, warmup=10):
    return Detector(1, "cpu", torch.float64, threshold, ema, warmup)


def feed(d, *norms):
    return [bool(d.flag(torch.tensor([norm], dtype=torch.float64))) for norm in norms]


def test_statistics_are_the_sample_mean_and_deviation_during_warmup_then_exponential():
    d, samples = detector(warmup=5), [1.0, 1.2, 0.9, 1.1, 1.3]
    assert feed(d, *samples) == [False] * 5
    assert d.mean.item() == pytest.approx(torch.tensor(samples).mean().item())
    assert d.variance.item() == pytest.approx(torch.tensor(samples).var().item())
    mean, variance = d.mean.item(), d.variance.item()
    feed(d, 1.0)
    new = mean + 0.02 * (1.0 - mean)
    assert d.mean.item() == pytest.approx(new)
    assert d.variance.item() == pytest.approx(0.98 * variance + 0.02 * (1.0 - new) ** 2)


def test_constant_norms_read_as_themselves_and_identical_norms_flag_no_noise():
    d = detector()
    assert feed(d, *[1.0] * 12, 1.001, 1.1) == [False] * 14
    assert d.mean.item() == pytest.approx(1.0, abs=0.01)


def test_outlier_is_flagged_and_does_not_blind_the_detector():
    d = detector()
    feed(d, *[1.0, 1.1, 0.9, 1.05] * 3)
    before = d.mean.clone(), d.variance.clone(), d.count.clone()
    assert feed(d, 100.0, math.nan, math.inf, 100.0) == [True] * 4
    assert (d.mean, d.variance, d.count) == before
    assert feed(d, 0.01) == [False]  # a small norm is good news


def test_non_finite_norm_is_flagged_from_the_first_round_and_not_learned():
    d = detector()
    assert feed(d, math.nan, 1.0, math.inf, 1.0) == [True, False, True, False]
    assert d.count.item() == 2 and d.mean.item() == 1.0


def test_no_warmup_rounds_still_takes_two_norms_before_flagging():
    assert feed(detector(warmup=0), 1.0, 5.0, 100.0) == [False, False, True]


# ---- sick replicas in real runs ----


class Spoiler:
    """After inner step `at_step`, replace (or scale) the
    distance to the anchor of one replica's parameters."""

    def __init__(self, value, replica, at_step):
        self.value, self.replica, self.at_step = value, replica, at_step

    def __call__(self, method, model, mesh):
        after_step = method.after_step

        def after_step_and_spoil(step):
            after_step(step)
            if step == self.at_step and mesh.replica in self.replica:
                if math.isfinite(self.value):
                    model.master.copy_(method.anchor + self.value * (model.master - method.anchor))
                else:
                    model.master[-3] = self.value  # one element, of one layer, on one shard

        method.after_step = after_step_and_spoil


@pytest.mark.parametrize("value", [math.nan, math.inf, 100.0], ids=["nan", "inf", "spike"])
@pytest.mark.parametrize("shards", [1, 2])
def test_sick_replica_is_left_out_and_the_others_go_on(value, shards, corpus_folder):
    # after the third of four rounds' last step: the detector has seen two rounds, and one follows
    options = ROUNDS | dict(shards=shards, anomaly_warmup_rounds=2, anomaly_threshold=15.0)
    healthy = run_training(2 * shards, corpus_folder, **options)
    spoiler = Spoiler(value, [1], at_step=10)
    sick = run_training(2 * shards, corpus_folder, tamper=spoiler, **options)
    assert sick.losses[:11] == healthy.losses[:11]
    assert sick.losses[11:] == pytest.approx(healthy.losses[11:], rel=0.05)
    one_layer = not math.isfinite(value)  # a spike is in all of them
    assert [row["dropped"] for row in sick.rows("sync")[2:]] == [[0, 1 if one_layer else L], [0, 0]]
    assert "left out replica 1 in " in sick.printed and "left out" not in healthy.printed
    assert all(value.isfinite().all() for value in sick.model.values())
    ours, theirs = (run.rows("eval")[-1]["val_loss"] for run in (sick, healthy))
    assert ours == pytest.approx(theirs, rel=0.05)
    learned = [rank["method_state"]["detector"]["count"] for rank in sick.ranks]
    assert learned[0] == [4.0] * L
    # as if it had not been
    assert learned[-1] == ([4.0] * (L - 1) + [3.0] if one_layer else [3.0] * L)


def test_replica_that_turns_nan_mid_round_costs_one_round_only(corpus_folder):
    options = ROUNDS | dict(max_steps=20, shards=2)
    sick = run_training(4, corpus_folder, tamper=Spoiler(math.nan, [1], at_step=6), **options)
    drops = {row["step"]: row["dropped"] for row in sick.rows("sync")}
    assert drops == {5: [0, 0], 8: [0, 1], 11: [0, 0], 14: [0, 0], 17: [0, 0], 20: [0, 0]}
    assert [loss is None for loss in sick.losses] == [step == 7 for step in range(20)]


def test_flagged_replica_equals_the_method_on_the_others(corpus, corpus_folder):
    """Three replicas, one of them all NaN at the end
    of the second round, against the fp64 reference."""
    options = ROUNDS | dict(max_steps=14)
    run = run_training(3, corpus_folder, tamper=FillNaN(replica=1, at_step=7), **options)

    def fill_nan(step, replicas):
        sick = replicas[1]
        if step == 7:
            sick.set({name: torch.full_like(p, math.nan) for name, p in sick.x.items()})

    config, method_config, _ = parse(flags(**options))
    f = types.SimpleNamespace(**vars(config), **vars(method_config))
    expected = simulate(f, 3, 1, corpus, tamper=fill_nan)
    assert run.losses == pytest.approx(expected["losses"], rel=1e-9)
    dropped = [row["dropped"] for row in run.rows("sync")]
    assert dropped == [[0, 0, 0], [0, L, 0], [0, 0, 0], [0, 0, 0]]
    assert run.rows("sync")[1]["weight"][1] == 0


class FillNaN:
    def __init__(self, replica, at_step):
        self.replica, self.at_step = replica, at_step

    def __call__(self, method, model, mesh):
        after_step = method.after_step

        def after_step_and_fill(step):
            after_step(step)
            if step == self.at_step and mesh.replica == self.replica:
                model.master.fill_(math.nan)

        method.after_step = after_step_and_fill


@pytest.mark.parametrize("shards", [1, 2])
def test_all_flagged_rolls_back_to_the_anchor_and_leaves_momentum_alone(shards, corpus_folder):
    options = ROUNDS | dict(max_steps=8, shards=shards)  # two rounds, the second spoiled everywhere
    run = run_training(2 * shards, corpus_folder, tamper=Both(math.nan), **options)
    for rank in run.ranks:
        state = rank["method_state"]
        assert torch.equal(rank["master"], state["anchor"])
        assert torch.equal(state["anchor"], state["anchor_before"])
        assert torch.equal(state["momentum"], state["momentum_before"])
    assert run.rows("sync")[-1]["dropped"] == [L, L]


class Both:
    """Make every parameter of every replica `value`
    before the last sync and remember the outer state."""

    def __init__(self, value):
        self.value = value

    def __call__(self, method, model, mesh):
        after_step, state_dict, kept = method.after_step, method.state_dict, {}

        def after_step_and_spoil(step):
            after_step(step)
            if step == 7:
                kept["anchor_before"] = method.anchor.clone()
                kept["momentum_before"] = method.momentum.clone()
                model.master.fill_(self.value)

        method.after_step = after_step_and_spoil
        method.state_dict = lambda: state_dict() | method.outer_vectors | kept


def test_clipped_pseudo_gradient_is_at_most_phi_in_every_layer(corpus_folder):
    phi = 0.02
    options = ROUNDS | dict(shards=2, pseudo_grad_clip=phi, max_steps=5)
    run = run_training(4, corpus_folder, tamper=remember_momentum, **options)
    # after one sync the momentum is dhat itself
    momenta = [rank["method_state"]["momenta"] for rank in run.ranks[:2]]
    squares = [[v.square().sum() for v in vectors] for vectors in momenta]
    for a, b in zip(*squares):  # the two shards
        assert math.sqrt(a + b) == pytest.approx(phi, rel=1e-4)


def remember_momentum(method, model, mesh):
    method.state_dict = lambda: {"momenta": method.momenta}


# ---- what a sync costs ----


@pytest.mark.parametrize("replicas, shards", [(2, 1), (2, 2), (4, 1)])
def test_sync_makes_exactly_the_promised_collectives_and_bytes(replicas, shards, corpus_folder):
    run = run_training(replicas * shards, corpus_folder, shards=shards, tamper=count_sync, **ROUNDS)
    scalar = 8  # fp64 here
    for rank in run.ranks:
        P = rank["master"].numel()
        for calls, sent in rank["method_state"]["syncs"]:
            expected = {"sync all-reduce": L, "sync all-gather": 1}
            if shards > 1:
                expected |= {"shard all-reduce": 1, "shard all-gather": L}  # norms; clip scalars
            assert calls == expected
            M = replicas
            assert sent == pytest.approx(2 * (M - 1) / M * P * scalar + (M - 1) * 2 * L * scalar)
    M, P = replicas, run.ranks[0]["master"].numel()
    promised = 2 * (M - 1) / M * P * scalar + (M - 1) * 2 * L * scalar
    assert run.rows("sync")[0]["sync_bytes"] == pytest.approx(promised)


def around_sync(method, look):
    """Call look(function, *args) instead of each part of a sync:
    start() once, then complete(l) per layer."""
    start, complete = method.start, method.complete
    method.start, method.complete = lambda: look(start), lambda l: look(complete, l)


def count_sync(method, model, mesh):
    """Count the collectives and bytes inside the sync alone;
    the parameters' gathers are the forward's."""
    syncs = []

    def counted(part, *args):
        if not args:
            syncs.append([{}, 0.0])
        calls, sent = mesh.calls.copy(), mesh.sent["sync"]
        part(*args)
        for key, n in (mesh.calls - calls).items():
            syncs[-1][0][key] = syncs[-1][0].get(key, 0) + n
        syncs[-1][1] += mesh.sent["sync"] - sent

    around_sync(method, counted)
    method.state_dict = lambda: {"syncs": syncs}


class HostReads(TorchDispatchMode):
    """Counts what moves a value from the device to the host:
    .item(), bool(tensor), .tolist() of one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
        )
        return function(*args, **(kwargs or {}))


def test_sync_path_reads_nothing_on_the_host(corpus_folder):
    run = run_training(4, corpus_folder, shards=2, tamper=count_host_reads, **ROUNDS)
    for rank in run.ranks:
        assert rank["method_state"] == {"reads": 0, "syncs": 4, "counter works": 1}


def count_host_reads(method, model, mesh):
    seen = {"reads": 0, "syncs": 0}
    with HostReads() as probe:
        torch.ones(1).item()
    seen["counter works"] = probe.count

    def watched(part, *args):
        with HostReads() as reads:
            part(*args)
        seen["reads"] += reads.count
        seen["syncs"] += not args

    around_sync(method, watched)
    method.state_dict = lambda: seen


def test_pseudo_gradient_lives_in_the_parameters_storage(corpus_folder):
    """No buffer of the model's size is made by a sync:
    nothing larger than a few scalars is allocated."""
    run = run_training(2, corpus_folder, tamper=count_allocations, **ROUNDS)
    for rank in run.ranks:
        assert 0 < rank["method_state"]["largest"] <= 4 * L * 2


def count_allocations(method, model, mesh):
    seen = {"largest": 0}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in inputs:
                vectors = model.master, method.anchor, method.momentum
                known = {vector.untyped_storage().data_ptr() for vector in vectors}
                if out.untyped_storage().data_ptr() not in known:
                    seen["largest"] = max(seen["largest"], out.numel())
            return out

    def watched(part, *args):
        with Sizes():
            part(*args)

    around_sync(method, watched)
    method.state_dict = lambda: seen


def test_all_layers_are_on_their_way_before_the_first_is_waited_for(corpus_folder):
    """... and each is waited for only when the forward has computed the layers before it."""
    run = run_training(2, corpus_folder, tamper=watch_order, **ROUNDS | {"max_steps": 6})
    for rank in run.ranks:
        sync = rank["method_state"]["events"]
        expected = ["send"] * L
        for l in range(L):
            expected += [f"wait {l}", f"compute {l}"]
        assert sync[: len(expected)] == expected


def watch_order(method, model, mesh):
    all_reduce, events = mesh.all_reduce, []

    def watched_all_reduce(x, group, **more):
        handle = all_reduce(x, group, **more)
        if group is mesh.sync and any(x is master for master in model.masters):
            events.append("send")
            wait, l = handle.wait, next(l for l, master in enumerate(model.masters) if x is master)
            handle.wait = lambda: (events.append(f"wait {l}"), wait())
        return handle

    for l, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(
            lambda *_, l=l: events.append(f"compute {l}") if "send" in events else None
        )
    mesh.all_reduce, method.state_dict = watched_all_reduce, lambda: {"events": events}
