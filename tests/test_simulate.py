"""The slow, uneven cluster: delays against their formulas, and no bit of any result changed."""

import time

import pytest
import torch

from config import set_up
from flags import UserError
from ranks import TINY, run_training
from simulate import FRAMING, Config, Stragglers, Wire

CPU = torch.device("cpu")
OUTER = dict(tau=3, sync_warmup_steps=2, max_steps=9, dtype="fp32")


class Done:
    def __init__(self, after_s=0.0):
        self.at = time.perf_counter() + after_s

    def wait(self):
        time.sleep(max(0.0, self.at - time.perf_counter()))


def finish_times(wire, *parcels):
    """Seconds from now at which parcels (works, bytes, hops), all sent at once, have arrived."""
    began = time.perf_counter()
    sent = [wire.carry(*parcel) for parcel in parcels]
    for parcel in sent:
        parcel.wait()
        assert time.perf_counter() >= parcel.finish
    return [parcel.finish - began for parcel in sent]


def test_parcels_queue_behind_one_another_at_the_links_rate():
    wire = Wire(Config(link_mbps=8.0), sharers=2, device=CPU)  # 1 MB/s, half of it this rank's
    a, b, c = finish_times(wire, ([Done()], 5_000, 1), ([Done()], 10_000, 1), ([Done()], 0, 1))
    assert a >= 0.010 * FRAMING
    assert b - a == pytest.approx(0.020 * FRAMING, abs=1e-6)
    assert c - b == pytest.approx(0.0, abs=1e-6)


def test_latency_counts_per_hop_and_does_not_occupy_the_wire():
    wire = Wire(Config(link_mbps=8.0, link_latency_ms=10.0), sharers=1, device=CPU)
    a, b = finish_times(wire, ([Done()], 1_000, 1), ([Done()], 1_000, 6))
    assert a >= 0.011 and b - a == pytest.approx(0.001 * FRAMING + 0.050, abs=1e-6)


def test_transfer_begins_when_the_last_rank_has_arrived():
    wire = Wire(Config(link_mbps=8.0), sharers=1, device=CPU)
    late, behind = finish_times(wire, ([Done(after_s=0.05)], 10_000, 1), ([Done()], 10_000, 1))
    assert late >= 0.06 and behind - late == pytest.approx(0.01 * FRAMING, abs=1e-6)


def test_sender_is_free_while_the_parcel_travels():
    wire = Wire(Config(link_mbps=8.0), sharers=1, device=CPU)
    began = time.perf_counter()
    parcel = wire.carry([Done()], 300_000, 1)  # 0.3 s
    assert time.perf_counter() - began < 0.2
    time.sleep(0.15)
    parcel.wait()
    assert 0 < parcel.link_s < 0.2  # only what was left to wait for


def test_lost_neighbour_is_reported_to_who_waits():
    class Lost:
        def wait(self):
            raise RuntimeError("connection closed by peer")

    parcel = Wire(Config(link_mbps=8.0), 1, CPU).carry([Lost()], 10, 1)
    with pytest.raises(RuntimeError, match="connection closed"):
        parcel.wait()


def test_slow_replica_takes_f_times_as_long():
    slow = Stragglers(Config(slow_replica="1:2.5"), replicas=2, seed=0)
    assert slow.pause_s(0, 1, busy_s=0.2) == pytest.approx(0.3)  # 0.2 + 0.3 = 2.5 * 0.2
    assert slow.pause_s(0, 0, busy_s=0.2) == 0


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


@pytest.mark.parametrize("method", ["minibatch", "diloco", "edit"])
def test_simulation_changes_no_bit_and_shows_in_the_record(method, corpus_folder):
    options = OUTER | dict(method=method, shards=2)
    plain = run_training(4, corpus_folder, **options)
    options |= dict(link_mbps=20, link_latency_ms=2, random_lag="0.5:0.01", slow_replica="0:1.5")
    slow = run_training(4, corpus_folder, **options)
    assert slow.losses == plain.losses
    assert all(torch.equal(slow.model[name], value) for name, value in plain.model.items())
    assert [rank["calls"] for rank in slow.ranks] == [rank["calls"] for rank in plain.ranks]
    for fast, row in zip(plain.rows("sync"), slow.rows("sync")):
        assert fast["wait_link_ms"] == 0 and fast["wait_others_ms"] > 0
        # 4 layers, 2 replicas: an exchange takes a hop, an all-reduce two;
        # the wire delays them by 2 ms each
        assert row["wait_link_ms"] > 2.0 and row["stall_ms"] >= row["wait_link_ms"]


BAD = {
    "replica beyond the mesh": ("--slow_replica", "2:2"),
    "faster than itself": ("--slow_replica", "0:0.5"),
    "half a replica": ("--slow_replica", "0.5:2"),
    "no factor": ("--slow_replica", "1"),
    "words": ("--slow_replica", "a:b"),
    "nan": ("--slow_replica", "0:nan"),
    "probability over 1": ("--random_lag", "1.5:1"),
    "negative pause": ("--random_lag", "0.5:-1"),
    "three numbers": ("--random_lag", "0.5:1:2"),
    "negative rate": ("--link_mbps", "-1"),
    "latency nan": ("--link_latency_ms", "nan"),
}


@pytest.mark.parametrize("flag, value", BAD.values(), ids=BAD)
def test_bad_simulation_flag_is_one_line(flag, value, tmp_path, corpus_folder):
    argv = TINY + ["--data", str(corpus_folder), "--out_dir", str(tmp_path / "out"), flag, value]
    with pytest.raises(UserError, match=flag) as error:
        set_up(argv, 0, 2)
    assert "\n" not in str(error.value)
