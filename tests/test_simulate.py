"""The slow, uneven cluster: delays follow their formulas, and no bit of a result changes."""

import time
from types import SimpleNamespace

import pytest
import torch

import simulate
import train
from plumbing import launch
from plumbing.config import UserError
from ranks import TINY, run_training
from simulate import FRAMING, Config, SimulatedLink, Stragglers

CPU = torch.device("cpu")


class Done:
    """A collective that ends `after_s` seconds from now."""

    def __init__(self, after_s=0.0):
        self.at = time.perf_counter() + after_s

    def wait(self):
        time.sleep(max(0.0, self.at - time.perf_counter()))


def finish_times(link, *transfers):
    """Seconds from now at which transfers (work, bytes, hops), all issued at once, arrive."""
    began = time.perf_counter()
    issued = [link.carry(*transfer) for transfer in transfers]
    for transfer in issued:
        transfer.wait()
        assert time.perf_counter() >= transfer.finish
    return [transfer.finish - began for transfer in issued]


def test_transfers_queue_at_the_rate_of_the_link_and_latency_counts_per_hop():
    link = SimulatedLink(Config(link_mbps=8.0), ranks=2, device=CPU)  # 1 MB/s, half is this rank's
    a, b, c = finish_times(link, (Done(), 5_000, 1), (Done(), 10_000, 1), (Done(), 0, 1))
    assert a >= 0.010 * FRAMING
    assert b - a == pytest.approx(0.020 * FRAMING, abs=1e-6)
    assert c - b == pytest.approx(0.0, abs=1e-6)
    link = SimulatedLink(Config(link_mbps=8.0, link_latency_ms=10.0), ranks=1, device=CPU)
    a, b = finish_times(link, (Done(), 1_000, 1), (Done(), 1_000, 6))
    assert a >= 0.011 and b - a == pytest.approx(0.001 * FRAMING + 0.050, abs=1e-6)


def test_transfer_begins_when_the_last_rank_has_arrived():
    link = SimulatedLink(Config(link_mbps=8.0), ranks=1, device=CPU)
    late, behind = finish_times(link, (Done(after_s=0.05), 10_000, 1), (Done(), 10_000, 1))
    assert late >= 0.06 and behind - late == pytest.approx(0.01 * FRAMING, abs=1e-6)


def test_transfer_does_not_block_until_it_is_waited_for():
    transfer = SimulatedLink(Config(link_mbps=8.0), 1, CPU).carry(Done(), 200_000, 1)  # 0.2 s
    transfer.begun.wait()
    left = transfer.finish - time.perf_counter()
    assert left > 0 and transfer.link_s == 0
    time.sleep(left / 2)
    transfer.wait()
    assert 0 < transfer.link_s < 0.6 * left  # only the rest of the way
    assert transfer.finish <= time.perf_counter()


def test_error_of_a_collective_is_raised_by_wait():
    class Lost:
        def wait(self):
            raise RuntimeError("connection closed by peer")

    transfer = SimulatedLink(Config(link_mbps=8.0), 1, CPU).carry(Lost(), 10, 1)
    with pytest.raises(RuntimeError, match="connection closed"):
        transfer.wait()


def test_slow_replica_takes_f_times_as_long_without_its_waiting(monkeypatch):
    slow = Stragglers(Config(slow_replica="1:2.5"), replicas=2, seed=0)
    assert slow.pause_s(0, 1, busy_s=0.2) == pytest.approx(0.3)  # 0.2 + 0.3 = 2.5 * 0.2
    assert slow.pause_s(0, 0, busy_s=0.2) == 0
    times, pauses = iter([10.0, 12.0]), []
    monkeypatch.setattr(simulate.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(simulate.time, "sleep", pauses.append)
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


BAD = {
    "--slow_replica": ("2:2", "0:0.5", "0.5:2", "1", "a:b", "0:nan"),
    "--random_lag": ("1.5:1", "0.5:-1", "0.5:1:2"),
    "--link_mbps": ("-1", "inf"),
    "--link_latency_ms": ("nan", "1e7"),
}


def test_bad_simulation_flag_is_one_line(tmp_path, corpus_folder):
    for flag, values in BAD.items():
        for value in values:
            argv = TINY + ["--data", str(corpus_folder), "--out_dir", str(tmp_path / "out")]
            with pytest.raises(UserError, match=flag) as error:
                launch.set_up([*argv, f"{flag}={value}"], train.METHODS, 0, 2)
            assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
