"""The slow, uneven, unreliable cluster: what happens is what the flags say, and nothing else. That
it changes no bit is in test_checkpoint.py, virtual seconds of runs are in test_methods.py."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import data
import shard
from plumbing import simulate
from plumbing.simulate import FRAMING, Cluster, Disturbances, SimulatedLink, VirtualClock
from ranks import run_training, train_all

CPU = torch.device("cpu")


def config(seed=3, **flags):
    """The simulation's flags, beside those of a run that it reads."""
    return SimpleNamespace(**vars(simulate.Config(**flags)), seed=seed, sync_warmup_steps=0)


@pytest.fixture
def clock(monkeypatch):
    """A clock in place of the real one: only the test changes `now`, and sleeping is noted."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now, sleeps=[])
    clock.sleep = clock.sleeps.append
    monkeypatch.setattr(simulate, "time", clock)
    return clock


@pytest.mark.parametrize(
    "ranks, latency_ms, transfers, expected_s",
    [  # transfers: (when the last rank arrives, bytes, hops); the link carries 1 MB/s
        (2, 0, [(0, 5_000, 1), (0, 10_000, 1), (0, 0, 1)], [0.01 * FRAMING, *[0.03 * FRAMING] * 2]),
        (1, 10, [(0, 1_000, 1), (0, 1_000, 6)], [0.001 * FRAMING + 0.01, 0.002 * FRAMING + 0.06]),
        (1, 0, [(7, 10_000, 1), (0, 10_000, 1)], [7 + 0.01 * FRAMING, 7 + 0.02 * FRAMING]),
    ],
)
def test_transfers_arrive_when_the_link_allows(clock, ranks, latency_ms, transfers, expected_s):
    link = SimulatedLink(config(link_mbps=8.0, link_latency_ms=latency_ms), ranks, CPU)

    def carry(arrival_s, *rest):
        arrive = lambda: setattr(clock, "now", max(clock.now, arrival_s))
        early = SimpleNamespace(wait=lambda: None)
        return link.carry([early, SimpleNamespace(wait=arrive)], *rest)

    busy = []
    link.note = lambda *span: busy.append(span)
    issued = [carry(*transfer) for transfer in transfers]
    [transfer.begun.wait() for transfer in issued]
    assert [transfer.finish for transfer in issued] == pytest.approx(expected_s)
    assert clock.sleeps == []  # only wait() blocks
    seconds = [end - begin for _, begin, end in busy]  # of the link, for --timeline
    assert seconds == pytest.approx([1.0 * FRAMING * ranks * n / 1e6 for _, n, _ in transfers])
    issued[-1].wait()
    assert clock.sleeps == [issued[-1].link_s] == [pytest.approx(expected_s[-1] - clock.now)]
    with pytest.raises(AttributeError, match="wait"):  # errors of a collective are passed on
        link.carry([None], 10, 1).wait()


def test_slow_replica_takes_f_times_as_long_without_its_waiting(clock):
    flags = config(slow_replica="1:2.5")
    slow = Disturbances(flags, replicas=2)
    assert slow.pause_s(0, 1, busy_s=0.2) == pytest.approx(0.3)  # 0.2 + 0.3 = 2.5 * 0.2
    assert slow.pause_s(0, 0, busy_s=0.2) == 0
    waited_s = {"others": 3.0, "link": 1.0}
    mesh = SimpleNamespace(replica=1, replicas=2, device=CPU, waited_s=waited_s)
    cluster = Cluster(flags, mesh, clock)
    cluster.before_step(None, 0)
    clock.now, mesh.waited_s = 2.0, {"others": 3.5, "link": 2.0}
    cluster.before_metrics(0)  # of 2 seconds it has waited 1.5 for others
    assert clock.sleeps == [pytest.approx(0.75)]


def test_random_lag_hits_one_replica_with_its_probability_reproducibly():
    def draw(seed):
        lag = Disturbances(config(seed, random_lag="0.25:0.5"), replicas=4)
        return [[lag.pause_s(step, replica, 1.0) for replica in range(4)] for step in range(2000)]

    pauses = draw(3)
    assert pauses == draw(3) != draw(4)
    assert all(sorted(row) == [0, 0, 0, 0.5] for row in pauses if any(row))
    late = [sum(map(bool, column)) / 2000 for column in zip(*pauses)]
    assert late == pytest.approx([0.25 / 4] * 4, abs=0.02)


def test_virtual_clock_worked_out_by_hand():
    """Replica 1 takes 2 seconds for a step. After a round all go on at the time of the latest."""
    clock = VirtualClock(config(slow_replica="1:2"), SimpleNamespace(replica=0, replicas=2))
    seconds = []
    for steps in [4, 4], [5, 2]:
        [clock.end_step(step) for step in range(steps[0])]
        seconds.append(clock.train_s())
        clock.end_round(steps)
        seconds.append(clock.train_s())
    assert seconds == [4, 8, 13, 13]


def test_virtual_clock_counts_the_lag_of_each_replicas_own_steps():
    flags = config(random_lag="0.5:8")
    lag, clock = Disturbances(flags, 2), VirtualClock(flags, SimpleNamespace(replica=0, replicas=2))
    take_s = lambda r, *steps: sum(1 + lag.pause_s(step, r, 1.0) for step in range(*steps))
    clock.end_round([9, 4])
    first = max(take_s(0, 9), take_s(1, 4))
    clock.end_round([5, 7])
    assert clock.train_s() == first + max(take_s(0, 9, 14), take_s(1, 4, 11))


def test_each_step_kind_and_index_has_draws_of_its_own_and_one_step_may_be_hit():
    disturbances = Disturbances(config(flip="0:5:5"), 1)
    hits = [disturbances.hits(disturbances.flipped, step, 0) for step in range(7)]
    assert hits == [False] * 4 + [True] + [False] * 2
    places = list(itertools.product((0, 1, 2, 3), (4, 5), (0, 1)))
    assert len({disturbances.draw(*place).random() for place in places}) == len(places)


def keep_progress(method, model, mesh):
    """x and a before the sync and the disturbance, and x where the sync begins."""
    seen, after_step, sync = [], method.after_step, method.sync

    def look(*args):
        over = after_step(*args)
        seen.extend([[method.steps, model.master.clone(), method.anchor.clone()]] if over else [])
        return over

    method.after_step = look
    method.sync = lambda: seen[-1].append(model.master.clone()) or sync()
    return seen


@pytest.mark.parametrize("method", ["diloco", "edit", "robust"])
def test_flip_turns_the_progress_of_one_replica_in_its_rounds(method, corpus_folder):
    options = dict(method=method, tau=4, sync_warmup_steps=2, max_steps=18, flip="1:9:14")
    run = run_training(2, corpus_folder, keep_progress, **options)
    for replica, rank in enumerate(run.ranks):
        for step, x, a, synced in rank["watched"]:
            wrong = replica == 1 and step in (10, 14)
            torch.testing.assert_close(synced, 2 * a - x if wrong else x)
            assert (x != a).any()


def watch_steps(method, model, mesh):
    """(learning rate, inputs, targets) of each step of this rank."""
    seen, forward = [], model.forward

    def look(inputs, targets, train=True):
        if train:
            seen.append([inputs.clone(), targets.clone()])
        return forward(inputs, targets, train)

    model.forward = look

    step = shard.AdamW.step
    shard.AdamW.step = lambda self, scale: seen[-1].insert(0, self.lr) or step(self, scale)

    def end():
        shard.AdamW.step = step
        return seen

    return end


def test_disturbances_hit_the_named_replica_and_steps_only(corpus, corpus_folder):
    options = dict(method="diloco", tau=4, sync_warmup_steps=2, max_steps=10, shards=2)
    options |= dict(random_tokens="1:2:4", scale_lr="0:5:6:3.5")
    run, again = train_all(4, corpus_folder, *[(watch_steps, None, options)] * 2)
    lr = [row["lr"] for row in run.rows("step")]  # the schedule's
    for rank, repeated in zip(range(4), again.ranks):
        for step, (rate, *batch) in enumerate(run.ranks[rank]["watched"]):
            scaled = rank < 2 and step + 1 in (5, 6)
            assert rate == (lr[step] * 3.5 if scaled else lr[step])
            theirs = data.train_batch(corpus, 1337, step, 0, rank, 4, 2, 1, 8)
            random = rank >= 2 and step + 1 in (2, 3, 4)
            assert all(torch.equal(a, b) != random for a, b in zip(batch, theirs))
            assert all(map(torch.equal, batch, repeated["watched"][step][1:]))
    random = torch.cat([each for *_, each in run.ranks[2]["watched"][1:4]])
    other = torch.cat([each for *_, each in run.ranks[3]["watched"][1:4]])
    assert random.min() >= 0 and len(random.unique()) > 40 and not torch.equal(random, other)
