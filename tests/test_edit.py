"""The penalty: its equations, rollback; what a sync sends, reads and allocates, and in which order.
Sick replicas are in test_methods.py."""

import contextlib
import functools
import json
import math
import statistics
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import data
import plain.edit
from config import Config
from edit import (
    SCALES_NORMS,
    Penalty,
    PenaltyConfig,
    anomaly_limits,
    clip_factor,
    forget_lost_layers,
    is_anomaly,
    replica_weights,
    update_statistics,
)
from mesh import Mesh
from plain import text_training
from ranks import Launch, method_alone, run_config, run_training, train_all
from rows import each_row
from sick import Sick

ROUNDS = dict(method="edit", tau=3, sync_warmup_steps=2, max_steps=14)  # four rounds
STREAMING = dict(method="streaming_edit", tau=8, sync_warmup_steps=2, fragments=2, max_steps=60)
L = 4  # layers of the tiny model: embedding, 2 blocks, head


# ---- the equations ----


def test_weights_equal_a_softmax_of_negative_norms_worked_out_by_hand():
    norms = torch.tensor([[1.0, 5.0], [2.0, 5.0]])  # (M, L)
    none = torch.zeros(2, 2, dtype=torch.bool)
    e = math.exp(-1.0)
    expected = torch.tensor([[1 / (1 + e), 0.5], [e / (1 + e), 0.5]])
    torch.testing.assert_close(replica_weights(norms, none), expected)

    equal = replica_weights(norms, none, weighted=False)
    assert torch.equal(equal, torch.full((2, 2), 0.5))


def test_flagged_replicas_weigh_nothing_whatever_the_norms():
    norms = torch.tensor([[1e30], [3e30], [math.nan], [math.inf]])
    weights = replica_weights(norms, flagged=~norms.isfinite())
    assert weights.tolist() == [[1.0], [0.0], [0.0], [0.0]]

    everyone = torch.ones(4, 1, dtype=torch.bool)
    weights = replica_weights(norms, flagged=everyone)
    assert weights.tolist() == [[0.0]] * 4


def test_clip_factor_takes_a_norm_above_phi_to_phi():
    small = torch.tensor(5.0)
    large = torch.tensor(20.0)
    assert clip_factor(small, 10.0) == 1
    assert clip_factor(large, 10.0) * large == pytest.approx(10)


def feed(norms, statistics=None, **flags):
    """One layer's norms, one after the other. Returns which are flagged, and the statistics."""
    config = PenaltyConfig(**flags)
    if statistics is None:
        statistics = torch.zeros(3, 1).double()
    flagged = []
    for norm in norms:
        G = torch.tensor([norm]).double()
        limits = anomaly_limits(statistics, config)
        anomaly = is_anomaly(G, limits)
        statistics = update_statistics(statistics, G, ~anomaly, config)
        flagged.append(anomaly.item())
    return flagged, statistics


def test_statistics_are_the_sample_mean_and_deviation_during_warmup_then_exponential():
    early = [1.0, 1.2, 0.9, 1.1, 1.3]
    last = 1.0
    flagged, statistics = feed([*early, last], anomaly_warmup_rounds=5)
    assert flagged == [False] * 6

    sample = torch.tensor(early).double()
    mean = sample.mean() + 0.02 * (last - sample.mean())
    variance = 0.98 * sample.var() + 0.02 * (last - mean) ** 2
    expected = torch.stack([torch.tensor(6.0), mean, variance])
    torch.testing.assert_close(statistics[:, 0], expected)


def test_outlier_is_flagged_and_does_not_blind_the_statistics():
    _, before = feed([1.0, 1.1, 0.9, 1.05] * 3)
    flagged, after = feed([100.0, math.nan, math.inf, 100.0], before)
    assert flagged == [True] * 4
    assert torch.equal(before, after)

    small, _ = feed([0.01], before)
    assert small == [False]
    without_elimination, _ = feed([100.0], before, anomaly_elimination=False)
    assert without_elimination == [False]


def test_growing_norms_of_all_replicas_lose_a_layer_once_in_ten_rounds():
    """Norms that grow by 5% a round are soon above a limit that remembers the past."""
    config = PenaltyConfig()
    statistics = torch.zeros(3, 1).double()
    lost_rounds = []
    for round in range(60):
        G = torch.tensor([1.05**round]).double()
        lost = is_anomaly(G, anomaly_limits(statistics, config))  # of one replica: of all
        statistics = update_statistics(statistics, G, ~lost, config)
        statistics = forget_lost_layers(statistics, G, lost)
        lost_rounds += [round] if lost else []
    assert 1 <= len(lost_rounds) <= 4
    assert all(b - a > config.anomaly_warmup_rounds for a, b in zip(lost_rounds, lost_rounds[1:]))


def test_lost_layer_starts_anew_but_for_norms_that_are_not_finite_and_other_layers():
    statistics = torch.tensor([[12.0, 12.0, 12.0], [1.0, 2.0, 3.0], [0.1, 0.2, 0.3]])
    G = torch.tensor([9.0, math.nan, 9.0])
    lost = torch.tensor([True, True, False])
    found = forget_lost_layers(statistics, G, lost)
    assert found[:, 0].tolist() == [0, 0, 0]
    assert torch.equal(found[:, 1:], statistics[:, 1:])


def test_every_flag_of_batches_and_the_inner_optimizer_scales_norms():
    """And what sets the length of a round, and the schedule. A resume cannot change the rest."""
    found = {"tau", "tau_time_s", "max_steps", "block_size"}
    group = ""
    for name, field in Config.__dataclass_fields__.items():
        group = field.metadata["group"] or group
        if group in ("data", "inner optimizer"):
            found.add(name)
    found |= {"delay", "alpha", "fragments"}
    assert SCALES_NORMS == found - {"vocab_size", "optimizer"}


@each_row("replica, count", [(0, 12), (1, 0)])
def test_replica_starts_a_lost_layer_anew_if_its_own_norm_is_finite(replica, count):
    """The norm of replica 0 is not."""
    mesh = SimpleNamespace(replicas=2, replica=replica)
    model = SimpleNamespace(master=torch.zeros(()), layers=[None])
    method = SimpleNamespace(mesh=mesh, model=model, config=PenaltyConfig())
    method.statistics = torch.tensor([[12.0], [1.0], [0.1]])
    norms = torch.tensor([[math.nan], [9.0]])
    Penalty(method).weigh(norms, flagged=torch.ones(2, 1, dtype=torch.bool))
    assert method.statistics[0].item() == count


@pytest.mark.slow
def test_norms_that_grow_after_ten_rounds_cost_few_rounds(tmp_path):
    """On the built-in text, with rounds that begin while the learning rate rises. Before a lost
    layer started anew, 35 of these 100 rounds were rolled back in some layer."""
    argv = "--device cpu --dtype fp32 --n_layer 2 --n_embd 32 --n_head 2 --block_size 32".split()
    argv += "--batch_size 2 --tau 4 --sync_warmup_steps 3 --max_steps 400".split()
    run = Launch(2, tmp_path / "log", *argv, f"--out_dir={tmp_path / 'run'}")
    assert run.wait() == [0, 0]
    rows = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    syncs = [row for row in rows if row["event"] == "sync"]
    assert len(syncs) == 100
    assert sum(bool(row["rolled_back"]) for row in syncs) <= 8


def test_layer_that_all_replicas_lost_is_named_in_the_record(corpus_folder):
    """In the fourth round both replicas move their last layer far away."""
    options = ROUNDS | dict(anomaly_warmup_rounds=2, max_steps=20)
    run = run_training(2, corpus_folder, Moved(), **options)
    rolled_back = [row["rolled_back"] for row in run.rows("sync")]
    assert rolled_back == [[], [], [], [3], [], []]
    assert "dropped 0/0" not in run.printed
    assert "(rolled back: layer 3)" in run.printed


class Moved:
    """In its fourth round a replica moves its last layer far away."""

    def __call__(self, method, model, mesh):
        end_round = method.end_round

        def move_and_end():
            if method.rounds == 3:
                model.masters[-1].add_(1.0)
            end_round()

        method.end_round = move_and_end


def test_noise_around_equal_norms_is_never_flagged():
    """sigma has a floor: 5% of the mean."""
    flagged, _ = feed([*[1.0] * 12, 1.001, 1.1])
    assert not any(flagged)


def test_norms_of_zero_are_never_flagged():
    """Of a layer that does not move: its limit is 0, too."""
    flagged, _ = feed([0.0] * 14)
    assert not any(flagged)


def test_warmup_flags_only_non_finite_norms_and_takes_at_least_two():
    flagged, statistics = feed([math.nan, 1.0, math.inf, 1.0])
    count, mean, _ = statistics[:, 0].tolist()
    assert flagged == [True, False, True, False]
    assert count == 2
    assert mean == 1

    flagged, _ = feed([1.0, 5.0, 100.0], anomaly_warmup_rounds=0)
    assert flagged == [False, False, True]


# ---- rollback ----


@each_row(
    "options, sick_steps",
    [
        (ROUNDS | dict(max_steps=20), [4, 7, 10]),  # known at the end of the next round
        (ROUNDS | dict(max_steps=11), [4, 7, 10]),  # there is none: at the end of the training
        (STREAMING, range(3, 60)),
    ],
)
def test_three_rounds_rolled_back_in_a_row_end_the_training(options, sick_steps, corpus_folder):
    sick = Sick(math.nan, [0, 1], *sick_steps)
    with pytest.raises(AssertionError, match="UserError: all replicas were left out of the last 3"):
        run_training(2, corpus_folder, sick, **options)


def spoil(method, model, mesh):
    model.master.fill_(math.nan)


def test_only_a_sync_repairs_a_replica_so_the_warmup_ends_if_it_diverges(corpus_folder):
    with pytest.raises(AssertionError, match="UserError: diverged at step 1: loss nan"):
        run_training(2, corpus_folder, spoil, **ROUNDS)


def test_run_that_one_replica_has_destroyed_says_that_it_is_no_better_than_guessing(corpus_folder):
    """DiLoCo averages what it gets. EDiT leaves it out."""
    options = ROUNDS | dict(max_steps=23, lr=0.05, anomaly_warmup_rounds=2)
    options |= dict(scale_lr="1:12:14:1000")
    cases = [(None, None, options | dict(method=method)) for method in ("diloco", "edit")]
    diloco, edit = train_all(2, corpus_folder, *cases)
    note = "note    no better than guessing, which has a loss of 5.5491"
    assert note in diloco.printed
    assert note not in edit.printed


# ---- what a sync reads, allocates and sends ----


class LargestNew(TorchDispatchMode):
    """Elements of the largest tensor that is none of `known` and no view of them."""

    def __init__(self, *known):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in self.known:
            self.elements = max(self.elements, out.numel())
        return out


def on_meta(replicas=1, shards=1, **options):
    """A method on the meta device, which has no data, so every way to read it on the host raises an
    error; one of so many replicas. Returns it and [what it sends or waits for, ...]."""
    mesh = Mesh(1, torch.device("meta"))
    mesh.replicas = mesh.sync_group.size = replicas
    mesh.shards = mesh.shard_group.size = shards
    events = []
    issued = Counter()

    def issue(operation, *arguments):
        name = f"{arguments[-1].name} {operation}"  # of the group
        event = f"{name} {issued[name]}"
        issued[name] += 1
        events.append(event)
        return SimpleNamespace(wait=lambda: events.append(f"wait: {event}"))

    for name in "all_gather", "reduce_scatter", "all_reduce", "all_to_all":
        setattr(mesh, name, functools.partial(issue, name.replace("_", "-")))
    method = method_alone(mesh, **options)
    return method, events


@each_row("elimination", [True, False])
def test_sync_reads_nothing_on_the_host_and_allocates_only_scalars(elimination):
    """The collectives are those that edit.py promises."""
    method, events = on_meta(method="edit", anomaly_elimination=elimination)
    with LargestNew(method.model.master, method.anchor, method.momentum) as largest:
        method.end_round()
        assert method.model.pre_layer_hook
        method.drain()
    assert method.rounds == 1
    assert method.model.pre_layer_hook is None
    assert 0 < largest.elements <= 3 * L  # d_i lives in the storage of x_i

    sent = [event for event in events if "wait" not in event]
    assert Counter(event[:-2] for event in sent) == {  # without their numbers
        "shard all-reduce": 1,  # squared norms
        "sync all-gather": 1,  # rows with norms and limits
        "sync all-reduce": L,  # pseudo-gradients
        "shard all-gather": L,  # norms for the clip
    }


@each_row("elimination, quantize", [(True, "e3m0"), (False, "none")])
def test_fragment_reads_nothing_on_the_host(elimination, quantize):
    flags = dict(anomaly_elimination=elimination, quantize=quantize, tau=4, fragments=2)
    method, events = on_meta(4, method="streaming_edit", **flags)
    for p in range(2):
        method.send(p)
        method.mean.halfway()
        method.land()
    assert len(method.landings) == 4  # layers
    # Of each fragment of two layers: one operation in each hop.
    sent = [event for event in events if event.startswith("sync")]
    assert sent == [f"sync {hop} {p}" for p in range(2) for hop in ("all-to-all", "all-gather")]


def sync_and_forward(replicas, **options):
    """What a method of two shards does at a round's end and in the next forward."""
    method, events = on_meta(replicas, shards=2, **options)
    layers = method.model.layers

    def note_compute(layer, inputs):
        events.append(f"compute {layers.index(layer)}")

    for layer in layers:
        layer.register_forward_pre_hook(note_compute)
    method.end_round()
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    method.model.forward(tokens, tokens)
    return events


def test_layer_is_waited_for_when_it_is_needed_and_the_layer_after_next_starts_before_it_computes():
    events = sync_and_forward(2, method="edit")
    expected = ["sync all-reduce 0", "sync all-reduce 1"]
    for l in range(L):
        expected.append(f"wait: sync all-reduce {l}")
        expected.append(f"shard all-gather {2 * l}")  # the norm for the clip
        expected.append(f"shard all-gather {2 * l + 1}")  # the layer
        if l + 2 < L:
            expected.append(f"sync all-reduce {l + 2}")
        expected.append(f"compute {l}")
    starts = "sync all-reduce", "wait: sync all-reduce", "shard all-gather", "compute"
    assert [event for event in events if event.startswith(starts)] == expected


def test_start_of_a_mean_and_the_wait_for_one_are_a_stall():
    """Either may take long: shm starts no operation before a slot is free."""
    method, events = on_meta(2, method="edit")
    method.end_round()

    @contextlib.contextmanager
    def stall():
        events.append("stall")
        yield
        events.append("go on")

    method.record.stall = stall
    events.clear()
    for l in range(L):
        method.complete(l)
    state = "go on"
    for event in events:
        if event in ("stall", "go on"):
            state = event
        elif event.startswith(("sync", "wait: sync")):
            assert state == "stall", event
    assert len([event for event in events if event.startswith("sync all-reduce")]) == L - 2


def assert_window(events):
    """At most two sync operations are in flight. At most one of them is when a shard operation is
    issued: with NCCL's launch order a shard operation waits until all but the last have ended. So
    what has not been waited for never holds it up."""
    in_flight = set()
    most = 0
    for event in events:
        if event.startswith("sync"):
            in_flight.add(event)
        elif event.startswith("wait: sync"):
            in_flight.discard(event.removeprefix("wait: "))
        elif event.startswith("shard"):
            assert len(in_flight) <= 1, (event, in_flight)
        most = max(most, len(in_flight))
    assert not in_flight
    return most


@each_row("replicas", [2, 4])
@each_row("name", ["edit", "one_bit_edit"])
def test_two_means_are_in_flight_and_no_shard_operation_waits_for_what_is_not_needed(
    name, replicas
):
    assert assert_window(sync_and_forward(replicas, method=name)) == 2


@each_row("replicas", [2, 4])
@each_row("name", ["streaming_diloco", "streaming_edit"])
def test_one_operation_of_a_fragment_is_in_flight(name, replicas):
    method, events = on_meta(replicas, shards=2, method=name, tau=8, fragments=2, delay=3)
    for p in range(2):
        method.send(p)
        method.mean.halfway()
        method.land()
    assert assert_window(events) == 1


def test_evaluation_between_round_end_and_forward_changes_neither_losses_nor_bytes(corpus_folder):
    options = ROUNDS | dict(shards=2)
    cases = []
    for interval in (1, 10**6):
        cases.append((None, None, options | dict(eval_interval=interval)))
    often, never = train_all(4, corpus_folder, *cases)
    assert often.losses == never.losses
    assert len(often.rows("eval")) > 3
    for one, other in zip(often.ranks, never.ranks):
        assert one["sent"] == other["sent"]


# ---- a penalty of one's own ----


class MedianPenalty(Penalty):
    """Limit: twice the median of the last three unflagged norms. Weights: 1 / norm.
    Statistics (3, L): the last three, newest first; NaN where there is none yet."""

    def new_statistics(self, L):
        return self.method.model.master.new_full((3, L), math.nan)

    def limits(self, statistics):
        return (2 * statistics.median(dim=0).values).nan_to_num(math.inf)

    def update(self, statistics, G, accepted):
        return torch.cat([G[None], statistics[:-1]]).where(accepted, statistics)

    def make_weights(self, norms, flagged):
        weights = (1 / norms).masked_fill(flagged, 0)
        return weights / weights.sum(dim=0).clamp(min=1e-30)


class PlainMedian(plain.edit.EDiT):
    def limit(self, samples):
        return 2 * statistics.median(samples[-3:]) if len(samples) >= 3 else math.inf

    def weights(self, G, flagged):
        w = [0 if flag else 1 / G_i for G_i, flag in zip(G, flagged)]
        return [w_i / max(sum(w), 1e-30) for w_i in w]


def use_median(method, model, mesh):
    method.penalty = MedianPenalty(method)


@each_row("shards", [1, 2])
def test_another_penalty_is_a_subclass_and_equals_its_plain_version(shards, corpus_folder):
    options = dict(method="edit", tau=2, sync_warmup_steps=2, max_steps=20, shards=shards)
    options |= dict(scale_lr="1:13:14:30", batch_size=4 // shards)
    run = run_training(2 * shards, corpus_folder, use_median, **options)
    expected = text_training(run_config(**options), 2, shards, data.load(corpus_folder))
    expected.method.__class__ = PlainMedian
    expected.run()

    (sick,) = [row for row in run.rows("sync") if row["step"] == 14]
    assert sick["dropped"] == [0, L] and sick["weight"] == [1, 0]
    for row, other in zip(run.rows("sync"), expected.rows["sync"], strict=True):
        for name in "pseudo_grad_norm", "weight", "dropped", "loss":
            assert row[name] == pytest.approx(list(other[name]), rel=1e-9), name


def test_detector_of_ones_own_starts_anew_from_its_own_empty_statistics():
    method = method_alone(method="edit")
    method.penalty = MedianPenalty(method)
    method.begin()
    for _ in range(3):
        method.penalty.flag(torch.ones(L).double())
    assert method.statistics.isfinite().all()
    lost = torch.tensor([True, False, False, False])
    method.penalty.weigh(torch.ones(1, L).double(), lost[None])
    assert method.statistics.isnan().all(dim=0).tolist() == lost.tolist()

    assert method.penalty.resume_with({"lr"})
    assert method.statistics.isnan().all()
