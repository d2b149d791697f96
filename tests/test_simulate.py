"""The slow, uneven cluster: delays follow their formulas, and no bit of a result changes."""

from types import SimpleNamespace

import pytest
import torch

import simulate
from plumbing.config import UserError
from ranks import run_training
from simulate import FRAMING, Config, SimulatedLink, Stragglers

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
    slow = Stragglers(Config(slow_replica="1:2.5"), replicas=2, seed=0)
    assert slow.pause_s(0, 1, busy_s=0.2) == pytest.approx(0.3)  # 0.2 + 0.3 = 2.5 * 0.2
    assert slow.pause_s(0, 0, busy_s=0.2) == 0
    mesh = SimpleNamespace(replica=1, device=CPU, waited_s={"others": 3.0, "link": 1.0})
    slow.begin_step(mesh)
    clock.now, mesh.waited_s = 2.0, {"others": 3.5, "link": 2.0}
    slow.end_step(0, mesh)  # of 2 seconds it has waited 1.5 for others
    assert clock.sleeps == [pytest.approx(0.75)]
    for wrong in ("2:2", "0:0.5", "0.5:2", "1", "0:nan", "0:2:1"):
        with pytest.raises(UserError, match=f"--slow_replica {wrong}: "):
            Stragglers(Config(slow_replica=wrong), replicas=2, seed=0)


def test_random_lag_hits_one_replica_with_its_probability_reproducibly():
    def draw(seed):
        lag = Stragglers(Config(random_lag="0.25:0.5"), replicas=4, seed=seed)
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
