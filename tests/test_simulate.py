"""The slow, uneven cluster: delays follow their formulas, and no bit of a result changes."""

import time
from types import SimpleNamespace

import pytest
import torch

import simulate
from plumbing.config import UserError
from ranks import run_training
from simulate import FRAMING, Config, SimulatedLink, Stragglers

CPU = torch.device("cpu")


def collective(after_s=0.0):
    """A collective in flight whose wait() takes so long."""
    return SimpleNamespace(wait=lambda: time.sleep(after_s))


@pytest.mark.parametrize(
    "latency_ms, ranks, transfers, first_s, intervals_s",
    [  # transfers: (seconds until all ranks have arrived, bytes, hops); the link carries 1 MB/s
        # half of the rate is this rank's; transfers queue
        (0, 2, [(0, 5_000, 1), (0, 10_000, 1), (0, 0, 1)], 0.01 * FRAMING, [0.02 * FRAMING, 0]),
        (10, 1, [(0, 1_000, 1), (0, 1_000, 6)], 0.011, [0.001 * FRAMING + 0.05]),
        # a transfer begins when the last rank has arrived
        (0, 1, [(0.05, 10_000, 1), (0, 10_000, 1)], 0.06, [0.01 * FRAMING]),
    ],
)
def test_transfers_arrive_when_the_link_allows(latency_ms, ranks, transfers, first_s, intervals_s):
    link = SimulatedLink(Config(link_mbps=8.0, link_latency_ms=latency_ms), ranks, CPU)
    began = time.perf_counter()
    issued = [link.carry(collective(after_s), *rest) for after_s, *rest in transfers]
    for transfer in issued:
        transfer.wait()
        assert time.perf_counter() >= transfer.finish
    finish = [transfer.finish for transfer in issued]
    assert finish[0] - began >= first_s
    assert [b - a for a, b in zip(finish, finish[1:])] == pytest.approx(intervals_s, abs=1e-6)


def test_transfer_blocks_only_in_wait_and_passes_on_errors(monkeypatch):
    link, sleeps = SimulatedLink(Config(link_mbps=8.0), 1, CPU), []
    transfer = link.carry(collective(), 50_000_000, 1)  # 53 s
    transfer.begun.wait()
    assert transfer.link_s == 0
    clock = SimpleNamespace(perf_counter=lambda: transfer.finish - 7, sleep=sleeps.append)
    monkeypatch.setattr(simulate, "time", clock)
    transfer.wait()  # 7 s before it arrives
    assert sleeps == [transfer.link_s] == [pytest.approx(7)]
    with pytest.raises(AttributeError, match="wait"):
        link.carry(None, 10, 1).wait()


def test_slow_replica_takes_f_times_as_long_without_its_waiting(monkeypatch):
    slow = Stragglers(Config(slow_replica="1:2.5"), replicas=2, seed=0)
    assert slow.pause_s(0, 1, busy_s=0.2) == pytest.approx(0.3)  # 0.2 + 0.3 = 2.5 * 0.2
    assert slow.pause_s(0, 0, busy_s=0.2) == 0
    times, pauses = iter([10.0, 12.0]), []
    clock = SimpleNamespace(perf_counter=lambda: next(times), sleep=pauses.append)
    monkeypatch.setattr(simulate, "time", clock)
    mesh = SimpleNamespace(replica=1, device=CPU, waited_s={"others": 3.0, "link": 1.0})
    slow.begin_step(mesh)
    mesh.waited_s = {"others": 3.5, "link": 2.0}
    slow.end_step(0, mesh)  # of 2 seconds it has waited 1.5 for others
    assert pauses == [pytest.approx(0.75)]


def test_random_lag_hits_one_replica_with_its_probability_reproducibly():
    def draw(seed):
        lag = Stragglers(Config(random_lag="0.25:0.5"), replicas=4, seed=seed)
        return [[lag.pause_s(step, replica, 1.0) for replica in range(4)] for step in range(2000)]

    pauses = draw(3)
    assert pauses == draw(3) != draw(4)
    late = [row for row in pauses if any(row)]
    assert all(sorted(row) == [0, 0, 0, 0.5] for row in late)
    assert len(late) / 2000 == pytest.approx(0.25, abs=0.04)
    for i in range(4):
        assert sum(bool(row[i]) for row in late) / len(late) == pytest.approx(0.25, abs=0.07)


def test_wrong_stragglers_are_refused():
    wrong = [("slow_replica", value) for value in ("2:2", "0:0.5", "0.5:2", "1", "a:b", "0:nan")]
    wrong += [("random_lag", value) for value in ("1.5:1", "0.5:-1", "0.5:1:2")]
    for flag, value in wrong:
        with pytest.raises(UserError, match=f"--{flag} {value}"):
            Stragglers(Config(**{flag: value}), replicas=2, seed=0)


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
