"""The penalty: its equations against numbers worked out by hand, sick replicas, rollback, and what
a sync sends, reads and allocates."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edit import AnomalyDetector, EDiT, clip_factor, outer_nesterov, replica_weights
from mesh import Mesh
from model import ModelConfig
from ranks import run_training
from reference import all_flags, assert_matches, simulate
from shard import ShardedModel

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


def test_outer_nesterov_without_a_replica_left_changes_no_bit():
    anchor, momentum = torch.randn(7), torch.randn(7)
    before = anchor.clone(), momentum.clone()
    outer_nesterov(anchor, momentum, torch.zeros(7), 0.8, 0.85, torch.zeros(()))
    assert torch.equal(anchor, before[0]) and torch.equal(momentum, before[1])


# ---- the detector ----


def detector(threshold=3.0, ema=0.02, warmup=10):
    return AnomalyDetector(1, "cpu", torch.float64, threshold, ema, warmup)


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


def test_nearly_equal_norms_are_no_anomalies():
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


def test_non_finite_norm_is_flagged_from_the_first_round_and_not_counted():
    d = detector()
    assert feed(d, math.nan, 1.0, math.inf, 1.0) == [True, False, True, False]
    assert d.count.item() == 2 and d.mean.item() == 1.0


def test_no_warmup_rounds_still_takes_two_norms_before_flagging():
    assert feed(detector(warmup=0), 1.0, 5.0, 100.0) == [False, False, True]


# ---- sick replicas in real runs ----


class Sick:
    """After each inner step in `steps` (counted from 0), spoil the parameters of `replicas`, in a
    training (as its tamper) or in the reference. what: "nan" or "inf" in one element of the last
    layer, "all nan", or "spike": 100 times the distance to the anchor."""

    def __init__(self, what, replicas, *steps):
        self.what, self.replicas, self.steps = what, replicas, steps

    def value(self, x, anchor):
        return anchor + 100 * (x - anchor) if self.what == "spike" else x + math.nan

    def __call__(self, method, model, mesh):
        after_step = method.after_step

        def spoil_and_end_step():
            if method.steps in self.steps and mesh.replica in self.replicas:
                if self.what in ("nan", "inf"):
                    if mesh.shard_index == 0:
                        model.masters[-1][0] = float(self.what)
                else:
                    model.master.copy_(self.value(model.master, method.anchor))
            after_step()

        method.after_step = spoil_and_end_step

    def spoil(self, step, replicas, anchor):
        for i in self.replicas if step in self.steps else []:
            x = replicas[i].copy()
            if self.what in ("nan", "inf"):
                x[f"layers.{L - 1}.output.weight"][0, 0] = float(self.what)
            else:
                x = {name: self.value(p, anchor[name]) for name, p in x.items()}
            replicas[i].set(x)


SICK = {  # replicas, shards, what happens after which step, flags, layers dropped at each sync
    "nan": (2, 2, Sick("nan", [1], 10), {}, [[0, 0], [0, 0], [0, 1], [0, 0]]),
    "inf": (2, 1, Sick("inf", [0], 10), {}, [[0, 0], [0, 0], [1, 0], [0, 0]]),
    "spike": (2, 2, Sick("spike", [1], 10), {}, [[0, 0], [0, 0], [0, L], [0, 0]]),
    # the replica's own gradients are NaN in one step, and AdamW's moments must stay finite
    "mid round": (2, 2, Sick("nan", [0], 6), {}, [[0, 0], [1, 0], [0, 0], [0, 0]]),
    "one of three": (3, 1, Sick("all nan", [1], 7), {}, [[0] * 3, [0, L, 0], [0] * 3, [0] * 3]),
    "rollback": (2, 2, Sick("all nan", [0, 1], 7), {}, [[0, 0], [L, L], [0, 0], [0, 0]]),
    "one layer": (2, 1, Sick("nan", [0, 1], 7), {}, [[0, 0], [1, 1], [0, 0], [0, 0]]),
    "no elimination": (
        2, 1, Sick("nan", [1], 4, 10), {"anomaly_elimination": False},
        [[0, 1], [0, 0], [0, 1], [0, 0]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SICK)
def test_sick_replica_is_left_out_and_the_others_equal_the_reference(case, corpus, corpus_folder):
    replicas, shards, sick, more, dropped = SICK[case]
    options = ROUNDS | dict(shards=shards, anomaly_warmup_rounds=2, anomaly_threshold=15.0) | more
    run = run_training(replicas * shards, corpus_folder, tamper=sick, **options)
    expected = simulate(all_flags(**options), replicas, shards, corpus, tamper=sick.spoil)
    assert_matches(run, expected)
    assert [row["dropped"] for row in run.rows("sync")] == dropped
    for i in range(replicas):
        left_out = any(row[i] for row in dropped)
        assert (f"left out replica {i} in " in run.printed) == left_out
    assert all(value.isfinite().all() for value in run.model.values())
    assert all(rank["exp_avg"].isfinite().all() for rank in run.ranks)
    # one sick step; a sick sync does not reach the next step's loss
    assert [loss is None for loss in run.losses] == [
        case == "mid round" and step == 7 for step in range(14)
    ]


@pytest.mark.parametrize("max_steps", [20, 11])
def test_three_rounds_rolled_back_in_a_row_end_the_training(max_steps, corpus_folder):
    """At the end of the next round or, if there is none, at the end of the training."""
    lost = Sick("all nan", [0, 1], 4, 7, 10)
    with pytest.raises(AssertionError, match="UserError: all replicas were left out of the last 3"):
        run_training(2, corpus_folder, tamper=lost, **ROUNDS | dict(max_steps=max_steps))


@pytest.mark.parametrize(
    "sick", [
        Sick("all nan", [0, 1], 4, 7, 13, 16),  # never three in a row
        Sick("all nan", [1], 4, 7, 10, 13, 16, 19),  # the other replica goes on
        Sick("nan", [0, 1], 4, 7, 10, 13, 16, 19),  # the other layers go on
    ],
)  # fmt: skip
def test_training_goes_on_while_any_layer_of_any_replica_is_left(sick, corpus_folder):
    run = run_training(2, corpus_folder, tamper=sick, **ROUNDS | dict(max_steps=20))
    assert len(run.rows("sync")) == 6 and run.rows("end")[0]["exit"] == "done"


# ---- what a sync costs ----


def around_sync(method, look):
    """Call look(function, *args) instead of each part of a sync: end_round() once and, for EDiT,
    complete(l) per layer."""
    for name in {"end_round", "complete"} & set(dir(method)):
        setattr(method, name, lambda *args, part=getattr(method, name): look(part, *args))


@pytest.mark.parametrize("method, replicas, shards", [
    ("edit", 2, 1), ("edit", 2, 2), ("edit", 4, 1), ("a_edit", 2, 2), ("diloco", 2, 2),
])  # fmt: skip
def test_sync_makes_the_promised_collectives_and_bytes(method, replicas, shards, corpus_folder):
    options = ROUNDS | dict(method=method, shards=shards)
    if method == "a_edit":
        options = options | dict(tau_time_s=0.01)
        del options["tau"]
    run = run_training(replicas * shards, corpus_folder, tamper=count_sync, **options)
    M, scalar, penalty = replicas, 8, method != "diloco"  # bytes of fp64
    for rank in run.ranks:
        # pseudo-gradients; norms and flags (DiLoCo: one norm), losses and steps
        promised = 2 * (M - 1) / M * rank["master"].numel() * scalar
        promised += (M - 1) * scalar * (2 * (L + 1) if penalty else 3)
        assert len(rank["watched"]) == len(run.rows("sync")) > 0
        for calls, sent in rank["watched"]:
            expected = {"sync all-reduce": L if penalty else 1, "sync all-gather": 1}
            if shards > 1:  # norms; norms for the clip
                expected |= {"shard all-reduce": 1} | ({"shard all-gather": L} if penalty else {})
            assert calls == expected and sent == pytest.approx(promised, abs=1e-6)
    promised = run.ranks[0]["watched"][0][1]
    assert all(row["sync_bytes"] == pytest.approx(promised) for row in run.rows("sync"))


def count_sync(method, model, mesh):
    """(collectives, bytes over slow links) of each sync; the forward's gathers are not its."""
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
    return syncs


def meta_sync(method_class, **flags):
    """A method on the meta device after the forward that completes its first sync. There is no
    data, so every way to read it on the host raises an error."""
    mesh = Mesh(1, torch.device("meta"))
    model = ShardedModel(ModelConfig(2, 1, 6, 8, 20), mesh)
    config = method_class.Config(sync_warmup_steps=0, tau=2, **flags)
    method = method_class(model, mesh, config, max_steps=10)
    method.before_step()
    method.forward = lambda: model.forward(*torch.zeros(2, 1, 8, dtype=torch.long, device="meta"))
    method.local_steps, method.loss_sum = 2, torch.zeros((), device="meta")
    method.end_round()
    method.forward()
    return method


def test_sync_reads_nothing_on_the_host():
    for elimination in (True, False):
        method = meta_sync(EDiT, anomaly_elimination=elimination)
        assert method.rounds == 1 and not method.in_flight and len(method.clips) == L
    # One bit is read later, of a sync that has long finished; the test would notice more.
    method.local_steps, method.loss_sum = 2, torch.zeros((), device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        method.end_round()
    x = torch.zeros(2, device="meta")
    for read in (
        lambda: x[0].item(), lambda: bool(x[0]), lambda: x.tolist(), lambda: x.numpy(),
        lambda: x.to("cpu"), lambda: torch.zeros(2).copy_(x),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, NotImplementedError, TypeError), match="meta"):
            read()


def test_pseudo_gradient_lives_in_the_parameters_storage(corpus_folder):
    """A sync allocates nothing larger than its rows of scalars."""
    run = run_training(2, corpus_folder, tamper=count_allocations, **ROUNDS)
    for rank in run.ranks:
        assert 0 < rank["watched"]["largest"] <= 2 * 2 * (L + 1)


def count_allocations(method, model, mesh):
    seen = {"largest": 0}
    vectors = model.master, method.anchor, method.momentum
    known = {vector.untyped_storage().data_ptr() for vector in vectors}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                seen["largest"] = max(seen["largest"], out.numel())
            return out

    def watched(part, *args):
        with Sizes():
            part(*args)

    around_sync(method, watched)
    return seen


def test_all_layers_are_sent_before_the_first_wait_and_arrive_in_the_forward(corpus_folder):
    """Each layer is waited for only when the forward has computed the layers before it."""
    run = run_training(2, corpus_folder, tamper=watch_order, **ROUNDS | {"max_steps": 6})
    for rank in run.ranks:
        expected = [f"send {l}" for l in range(L)]
        for l in range(L):
            expected += [f"wait {l}", f"compute {l}"]
        assert rank["watched"][: len(expected)] == expected


def watch_order(method, model, mesh):
    all_reduce, events = mesh.all_reduce, []

    def watched_all_reduce(x, group):
        handle = all_reduce(x, group)
        layers = [l for l, master in enumerate(model.masters) if x is master]
        if group is mesh.sync and layers:
            events.append(f"send {layers[0]}")
            wait = handle.wait
            handle.wait = lambda: (events.append(f"wait {layers[0]}"), wait())
        return handle

    for l, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(
            lambda *_, l=l: events.append(f"compute {l}") if events else None
        )
    mesh.all_reduce = watched_all_reduce
    return events


@pytest.mark.parametrize("method", ["edit", "diloco"])
def test_offloaded_vectors_get_their_new_values_back(method, corpus_folder):
    """On a GPU, what --offload keeps on the host reaches the device as a copy."""
    options = ROUNDS | dict(method=method, shards=2)
    usual = run_training(4, corpus_folder, **options)
    copied = run_training(4, corpus_folder, tamper=copy_offloaded, offload=True, **options)
    assert copied.losses == usual.losses and copied.ranks[0]["watched"]["copies"] > 0
    assert all(torch.equal(copied.model[name], value) for name, value in usual.model.items())


def copy_offloaded(method, model, mesh):
    """`to()` of an offloaded vector, or to its device, makes a copy."""
    counts, to = {"copies": 0}, torch.Tensor.to

    def copy(tensor, *args, **more):
        own = {method.anchor.untyped_storage(), method.momentum.untyped_storage()}
        offloaded = tensor.untyped_storage() in own
        counts["copies"] += offloaded
        return tensor.clone() if offloaded else to(tensor, *args, **more)

    torch.Tensor.to = copy  # in this rank's process only
    return counts
