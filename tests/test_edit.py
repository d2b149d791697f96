"""The penalty: its equations, sick replicas, rollback; what a sync sends, reads and allocates."""

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edit import EDiT, PenaltyConfig, anomaly_limits, clip_factor, is_anomaly
from edit import outer_nesterov, replica_weights, update_statistics
from mesh import Handle, Mesh
from model import ModelConfig
from ranks import run_training
from reference import all_flags, assert_matches, simulate
from shard import ShardedModel

ROUNDS = dict(method="edit", tau=3, sync_warmup_steps=2, max_steps=14)  # four rounds
L = 4  # layers of the tiny model: embedding, 2 blocks, head


def test_weights_and_clip_factor_worked_out_by_hand():
    norms, none = torch.tensor([[1.0, 5.0], [2.0, 5.0]]), torch.zeros(2, 2, dtype=torch.bool)
    e = math.exp(-1.0)
    expected = torch.tensor([[1 / (1 + e), 0.5], [e / (1 + e), 0.5]])
    torch.testing.assert_close(replica_weights(norms, none), expected)
    assert torch.equal(replica_weights(norms, none, weighted=False), torch.full((2, 2), 0.5))
    norms = torch.tensor([[1e30], [3e30], [math.nan], [math.inf]])
    assert replica_weights(norms, ~norms.isfinite()).tolist() == [[1.0], [0.0], [0.0], [0.0]]
    assert replica_weights(norms, norms != 0).tolist() == [[0.0]] * 4
    assert clip_factor(torch.tensor(5.0), 10.0) == 1
    assert clip_factor(torch.tensor(20.0), 10.0) * 20 == pytest.approx(10)


def test_outer_nesterov_equals_torch_sgd_and_changes_no_bit_without_a_replica_left():
    torch.manual_seed(0)
    anchor, momentum = torch.randn(7).double(), torch.zeros(7).double()
    theirs = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([theirs], lr=0.8, momentum=0.85, nesterov=True)
    one, zero = torch.ones(()).double(), torch.zeros(()).double()
    for _ in range(4):
        theirs.grad = torch.randn(7).double()
        outer_nesterov(anchor, momentum, theirs.grad.clone(), 0.8, 0.85, one)
        sgd.step()
    torch.testing.assert_close(anchor, theirs.detach(), rtol=1e-14, atol=1e-14)
    before = anchor.clone(), momentum.clone()
    outer_nesterov(anchor, momentum, torch.zeros(7).double(), 0.8, 0.85, zero)
    assert torch.equal(anchor, before[0]) and torch.equal(momentum, before[1])


def feed(norms, statistics=None, **flags):
    """One layer's norms, one after the other. Returns which are flagged, and the statistics."""
    statistics, flagged = torch.zeros(3, 1).double() if statistics is None else statistics, []
    for norm in norms:
        config, G = PenaltyConfig(**flags), torch.tensor([norm]).double()
        flagged.append(is_anomaly(G, anomaly_limits(statistics, config)))
        statistics = update_statistics(statistics, G, ~flagged[-1], config)
    return [bool(flag) for flag in flagged], statistics


def test_statistics_are_the_sample_mean_and_deviation_during_warmup_then_exponential():
    samples = [1.0, 1.2, 0.9, 1.1, 1.3]
    flagged, statistics = feed([*samples, 1.0], anomaly_warmup_rounds=5)
    early = torch.tensor(samples).double()
    mean = early.mean() + 0.02 * (1.0 - early.mean())
    variance = 0.98 * early.var() + 0.02 * (1.0 - mean) ** 2
    assert flagged == [False] * 6
    torch.testing.assert_close(statistics[:, 0], torch.stack([torch.tensor(6.0), mean, variance]))


def test_outlier_is_flagged_and_does_not_blind_the_statistics():
    assert not any(feed([*[1.0] * 12, 1.001, 1.1])[0])  # within the floor of sigma
    _, before = feed([1.0, 1.1, 0.9, 1.05] * 3)
    flagged, after = feed([100.0, math.nan, math.inf, 100.0], before)
    assert flagged == [True] * 4 and torch.equal(before, after)
    assert feed([0.01], before)[0] == [False]  # a small norm is good news
    assert feed([100.0], before, anomaly_elimination=False)[0] == [False]


def test_warmup_flags_only_non_finite_norms_and_takes_at_least_two():
    flagged, statistics = feed([math.nan, 1.0, math.inf, 1.0])
    assert flagged == [True, False, True, False] and statistics[:2, 0].tolist() == [2, 1]
    assert feed([1.0, 5.0, 100.0], anomaly_warmup_rounds=0)[0] == [False, False, True]


class Sick:
    """After each inner step in `steps` (counted from 0), spoil the parameters of `replicas`, in a
    training (as its tamper) or in the reference. what: "nan" or "inf" in one element of the last
    layer, "all nan", "all inf", or "spike": 100 times the distance to the anchor."""

    def __init__(self, what, replicas, *steps):
        self.what, self.replicas, self.steps = what, replicas, steps

    def value(self, x, anchor):
        return anchor + 100 * (x - anchor) if self.what == "spike" else x + float(self.what[4:])

    def __call__(self, method, model, mesh):
        after_step = method.after_step

        def spoil_and_end_step(lr):
            if method.steps in self.steps and mesh.replica in self.replicas:
                if self.what in ("nan", "inf"):
                    if mesh.shard_index == 0:
                        model.masters[-1][0] = float(self.what)
                else:
                    model.master.copy_(self.value(model.master, method.anchor))
            after_step(lr)

        method.after_step = spoil_and_end_step

    def spoil(self, step, replicas, anchor):
        for i in self.replicas if step in self.steps else []:
            x = replicas[i].x
            if self.what in ("nan", "inf"):
                x[replicas[i].layers[-1].start] = float(self.what)
            else:
                x.copy_(self.value(x, anchor))


SICK = {  # replicas, shards, what happens after which step, flags, layers dropped at each sync
    "nan": (2, 2, Sick("nan", [1], 10), {}, [[0, 0], [0, 0], [0, 1], [0, 0]]),
    "inf": (2, 1, Sick("inf", [0], 10), {}, [[0, 0], [0, 0], [1, 0], [0, 0]]),
    "spike": (2, 2, Sick("spike", [1], 10), {}, [[0, 0], [0, 0], [0, L], [0, 0]]),
    # the replica's own gradients are NaN in one step, and AdamW's moments must stay finite
    "mid round": (2, 2, Sick("nan", [0], 6), {}, [[0, 0], [1, 0], [0, 0], [0, 0]]),
    # Training goes on while a layer of a replica is left, or if fewer than three rounds in a row
    # are rolled back.
    "one of three": (3, 1, Sick("all nan", [1], 4, 7, 10), {}, [[0, L, 0]] * 3 + [[0, 0, 0]]),
    "rollback": (2, 2, Sick("all nan", [0, 1], 4, 7, 13), {}, [[L, L], [L, L], [0, 0], [L, L]]),
    "one layer": (2, 1, Sick("nan", [0, 1], 4, 7, 10), {}, [[1, 1]] * 3 + [[0, 0]]),
    "off": (2, 1, Sick("nan", [1], 4, 10), {"anomaly_elimination": False}, [[0, 1], [0, 0]] * 2),
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
    sick_steps = [step for step, loss in enumerate(run.losses) if loss is None]
    assert sick_steps == ([7] if case == "mid round" else [])


@pytest.mark.parametrize("max_steps", [20, 11])
def test_three_rounds_rolled_back_in_a_row_end_the_training(max_steps, corpus_folder):
    """At the end of the next round or, if there is none, at the end of the training."""
    lost = Sick("all nan", [0, 1], 4, 7, 10)
    with pytest.raises(AssertionError, match="UserError: all replicas were left out of the last 3"):
        run_training(2, corpus_folder, tamper=lost, **ROUNDS | dict(max_steps=max_steps))


class LargestNew(TorchDispatchMode):
    """Elements of the largest tensor that is none of `known` and no view of them."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.elements = {x.untyped_storage()._cdata for x in known}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in self.known:
            self.elements = max(self.elements, out.numel())
        return out


def edit_before_a_sync(device, **flags):
    """EDiT on one rank at the end of a round of two steps."""
    model = ShardedModel(ModelConfig(2, 1, 6, 8, 20), Mesh(1, torch.device(device)))
    method = EDiT(model, model.mesh, EDiT.Config(sync_warmup_steps=0, **flags), max_steps=10)
    method.before_step()
    method.local_steps, method.loss_sum = 2, torch.zeros((), device=device)
    return method


@pytest.mark.parametrize("elimination", [True, False])
def test_sync_reads_nothing_on_the_host_and_allocates_only_scalars(elimination):
    """On the meta device there is no data, so every way to read it on the host raises an error. The
    collectives are those that edit.py promises."""
    method, calls = edit_before_a_sync("meta", anomaly_elimination=elimination), Counter()
    note = lambda group, operation, *_: calls.update([f"{group.name} {operation}"]) or Handle()
    method.mesh._issue = note
    with LargestNew(method.model.master, method.anchor, method.momentum) as largest:
        method.end_round()
        assert method.in_flight
        method.drain()
    assert method.rounds == 1 and not method.in_flight and len(method.clips) == L
    assert 0 < largest.elements <= 3 * L  # d_i lives in the storage of x_i
    # pseudo-gradients, and rows with norms and limits; norms, and norms for the clip
    expected = {"sync all-reduce": L, "sync all-gather": 1}
    assert calls == expected | {"shard all-reduce": 1, "shard all-gather": L}
    # L numbers are read later, of a sync that has long finished; the test would notice more.
    method.local_steps, x = 2, torch.zeros(2, device="meta")
    for read in (
        method.end_round, x[0].item, lambda: bool(x[0]), x.tolist, x.numpy,
        lambda: x.to("cpu"), lambda: torch.zeros(2).copy_(x),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, NotImplementedError, TypeError), match="meta"):
            read()


def test_sync_of_offloaded_vectors_writes_their_new_values_back(monkeypatch):
    """On a GPU, to() copies what --offload keeps on the host."""
    results = []
    for _ in range(2):
        method = edit_before_a_sync("cpu")
        vectors = method.model.master, method.anchor, method.momentum
        vectors[0].mul_(0.9)
        method.end_round()
        method.drain()
        results.append([vector.clone() for vector in vectors])
        monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, **more: x.clone())
    assert results[0][2].norm() > 0 and all(map(torch.equal, *results))


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
        note = lambda *_, l=l: events.append(f"compute {l}") if events else None
        layer.register_forward_pre_hook(note)
    mesh.all_reduce = watched_all_reduce
    return events
