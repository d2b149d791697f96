"""The slow, uneven, unreliable cluster: what happens is what the flags say, and nothing else."""

from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import data
import simulate
from plumbing.config import UserError
from ranks import run_training, train_all
from simulate import FRAMING, Config, Disturbances, SimulatedLink

CPU = torch.device("cpu")


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
    link = SimulatedLink(Config(link_mbps=8.0, link_latency_ms=latency_ms), ranks, CPU)

    def carry(arrival_s, *rest):
        arrive = lambda: setattr(clock, "now", max(clock.now, arrival_s))
        return link.carry(SimpleNamespace(wait=arrive), *rest)

    issued = [carry(*transfer) for transfer in transfers]
    [transfer.begun.wait() for transfer in issued]
    assert [transfer.finish for transfer in issued] == pytest.approx(expected_s)
    assert clock.sleeps == []  # only wait() blocks
    issued[-1].wait()
    assert clock.sleeps == [issued[-1].link_s] == [pytest.approx(expected_s[-1] - clock.now)]
    with pytest.raises(AttributeError, match="wait"):  # errors of a collective are passed on
        link.carry(None, 10, 1).wait()


def test_slow_replica_takes_f_times_as_long_without_its_waiting(clock):
    slow = Disturbances(Config(slow_replica="1:2.5"), replicas=2, seed=0)
    assert slow.pause_s(0, 1, busy_s=0.2) == pytest.approx(0.3)  # 0.2 + 0.3 = 2.5 * 0.2
    assert slow.pause_s(0, 0, busy_s=0.2) == 0
    mesh = SimpleNamespace(replica=1, device=CPU, waited_s={"others": 3.0, "link": 1.0})
    slow.begin_step(mesh)
    clock.now, mesh.waited_s = 2.0, {"others": 3.5, "link": 2.0}
    slow.end_step(0, mesh)  # of 2 seconds it has waited 1.5 for others
    assert clock.sleeps == [pytest.approx(0.75)]
    for wrong in ("2:2", "0:0.5", "0.5:2", "1", "0:nan", "0:2:1"):
        with pytest.raises(UserError, match=f"--slow_replica {wrong}: "):
            Disturbances(Config(slow_replica=wrong), replicas=2, seed=0)


def test_random_lag_hits_one_replica_with_its_probability_reproducibly():
    def draw(seed):
        lag = Disturbances(Config(random_lag="0.25:0.5"), replicas=4, seed=seed)
        return [[lag.pause_s(step, replica, 1.0) for replica in range(4)] for step in range(2000)]

    pauses = draw(3)
    assert pauses == draw(3) != draw(4)
    assert all(sorted(row) == [0, 0, 0, 0.5] for row in pauses if any(row))
    late = [sum(map(bool, column)) / 2000 for column in zip(*pauses)]
    assert late == pytest.approx([0.25 / 4] * 4, abs=0.02)


@pytest.mark.parametrize("method", ["minibatch", "edit"])
def test_simulation_changes_no_bit_and_shows_in_the_record(method, corpus_folder):
    options = dict(tau=3, sync_warmup_steps=2, max_steps=6, dtype="fp32", method=method, shards=2)
    plain = run_training(4, corpus_folder, **options)
    options |= dict(link_mbps=20, link_latency_ms=2, random_lag="0.5:0.01", slow_replica="0:1.5")
    slow = run_training(4, corpus_folder, **options)
    assert slow.losses == plain.losses
    assert all(torch.equal(slow.model[name], value) for name, value in plain.model.items())
    assert [rank["calls"] for rank in slow.ranks] == [rank["calls"] for rank in plain.ranks]
    for fast, row in zip(plain.rows("sync"), slow.rows("sync")):
        assert fast["wait_link_ms"] == 0
        # one hop of 2 ms for the row of scalars, two for the all-reduces
        assert row["wait_link_ms"] > 2.0 and row["stall_ms"] >= row["wait_link_ms"]


VIRTUAL = dict(sync_warmup_steps=2, max_steps=12, tau=4, tau_time_s=4, virtual_clock=True)
VIRTUAL |= dict(dtype="fp32", slow_replica="1:2", eval_interval=1000)


def test_virtual_seconds_worked_out_by_hand(corpus_folder):
    expected = {  # train_s of each step of replica 0; the first two average gradients
        "minibatch": [2 * step for step in range(1, 13)],
        # a round of 4 steps ends when replica 1 has taken 4, too; the last one has 2
        "edit": [2, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 24],
        # rounds of 4 and 2 steps, no waiting; the last one is shorter: 2 + 3 + 3 + 3 + 1.5 >= 12
        "a_edit": [2, *range(4, 19)],
    }
    cases = [(None, None, VIRTUAL | dict(method=method)) for method in expected]
    for run, seconds in zip(train_all(2, corpus_folder, *cases), expected.values()):
        assert [row["train_s"] for row in run.rows("step")] == seconds
        assert run.rows("end")[0]["train_s"] == run.rows("eval")[0]["train_s"] == seconds[-1]
    assert [row["steps"] for row in run.rows("sync")] == [[4, 2]] * 3 + [[2, 1]]


def test_virtual_rounds_last_as_long_as_their_latest_replica(corpus_folder):
    """With random lag the latest replica changes. Sums of quarters of a second are exact."""
    delays = dict(random_lag="0.75:2.25", slow_replica="1:1.25")
    run = run_training(3, corpus_folder, method="diloco", **VIRTUAL | delays | dict(max_steps=14))
    pauses = Disturbances(Config(**delays), replicas=3, seed=1337)
    seconds = lambda r, steps: sum(1 + pauses.pause_s(step, r, 1.0) for step in steps)
    rounds = [range(1), range(1, 2), range(2, 6), range(6, 10), range(10, 14)]
    latest = [max(range(3), key=lambda r: seconds(r, steps)) for steps in rounds]
    assert len(set(latest)) > 1
    expected = sum(seconds(r, steps) for r, steps in zip(latest, rounds))
    assert run.rows("end")[0]["train_s"] == expected


def watch_steps(method, model, mesh):
    """(learning rate, inputs, targets) of each step of this rank."""
    seen, forward = [], model.forward

    def look(inputs, targets, train=True):
        if train:
            seen.append([inputs.clone(), targets.clone()])
        return forward(inputs, targets, train)

    model.forward = look

    def note_lr(optimizer, *_):
        if isinstance(optimizer, torch.optim.AdamW):  # DiLoCo's outer optimizer is SGD
            seen[-1].insert(0, optimizer.param_groups[0]["lr"])

    hook = register_optimizer_step_pre_hook(note_lr)
    return lambda: hook.remove() or seen


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
