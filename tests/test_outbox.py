"""Exchanges through shared memory: right in any rhythm, and a neighbour that is lost is noticed."""

import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import outbox
from mesh import LostRank, Mesh
from ranks import run_ranks


def irregular_traffic(shards, seed):
    """Exchanges of random kind and length, two under
    way at a time, each rank in a rhythm of its own."""
    mesh = Mesh(shards, torch.device("cpu"))
    mesh.share_memory(8 * 4 * 60, 8 * 4 * 60)
    plan, rhythm = random.Random(seed), random.Random(seed + mesh.rank + 1)
    wrong, under_way = [], defaultdict(list)

    def finish(check, handle):
        handle.wait()
        wrong.extend(check())

    groups = [group for group in (mesh.shard, mesh.sync) if group.size > 1]
    for number in range(150):
        group, kind, length = plan.choice(groups), plan.choice("gas"), plan.randint(1, 15)
        if rhythm.random() < 0.1:
            time.sleep(rhythm.random() * 0.005)
        n, total = group.size, sum(group.ranks)
        own = torch.full((length,), mesh.rank + 100.0 * number)
        if kind == "g":
            whole = torch.zeros(n * length)
            whole.view(n, length)[group.index] = own
            expected = torch.tensor(group.ranks).repeat_interleave(length) + 100.0 * number
            handle, got = mesh.all_gather(whole, group), whole
        elif kind == "a":
            handle, got = mesh.all_reduce(own, group), own
            expected = torch.full((length,), total + n * 100.0 * number)
        else:
            got, flat = torch.zeros(length), own.repeat(n)
            handle = mesh.reduce_scatter(got, flat, group)
            expected = torch.full((length,), total + n * 100.0 * number)
            own = flat  # may not go before the handle has been waited for
        check = lambda got=got, expected=expected, keep=own, k=(number, kind): (
            [] if torch.equal(got, expected) else [k]
        )
        queue = under_way[group.name, kind == "g"]
        queue.append((check, handle))
        if len(queue) == outbox.SLOTS:
            finish(*queue.pop(0))
    [finish(*entry) for queue in under_way.values() for entry in queue]
    return wrong, [box.count for group in groups for box in set(group.outboxes.values())]


@pytest.mark.parametrize("shards", [2, 4])
def test_exchanges_are_right_in_any_rhythm(shards):
    for wrong, counts in run_ranks(4, irregular_traffic, shards, 7):
        assert not wrong
        assert len(counts) == (4 if shards == 2 else 2) and min(counts) > 15


def exchange_without(missing):
    mesh = Mesh(2, torch.device("cpu"))
    mesh.share_memory(500, 500)  # for an earlier model, while it worked
    if missing == "memory of rank 1":
        readlink = os.readlink
        elsewhere = f"/proc/{os.getpid()}/" if mesh.rank == 1 else "nowhere"
        os.readlink = lambda path: "another's" if elsewhere in path else readlink(path)
    else:
        outbox.platform.machine = lambda: "aarch64"
    mesh.share_memory(1000, 1000)
    whole = torch.full((4,), -1.0)
    whole.chunk(2)[mesh.rank].fill_(mesh.rank)
    mesh.all_gather(whole, mesh.shard).wait()
    return mesh.shard.outboxes, whole.tolist()


@pytest.mark.parametrize("missing", ["memory of rank 1", "x86"])
def test_ranks_that_cannot_share_memory_use_sockets_all_of_them(missing):
    assert run_ranks(2, exchange_without, missing) == [({}, [0, 0, 1, 1])] * 2


def two_outboxes(process, timeout_s):
    """This process's and that of another one, which says nothing."""
    memories = [torch.zeros(outbox.WORDS + outbox.SLOTS * 64, dtype=torch.uint8) for _ in range(2)]
    pidfds = [os.pidfd_open(os.getpid()), os.pidfd_open(process.pid)]
    return outbox.Outbox(memories, pidfds, 0, 64, timeout_s)


def test_more_exchanges_than_slots_are_refused():
    box, piece = two_outboxes(SimpleNamespace(pid=os.getpid()), timeout_s=60), torch.zeros(4)
    [box.post(piece) for _ in range(outbox.SLOTS)]
    with pytest.raises(AssertionError, match="many=True"):
        box.post(piece)


def test_dead_and_silent_neighbours_are_noticed():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    silent = two_outboxes(process, timeout_s=0.2)
    piece = torch.zeros(4)
    n = silent.post(piece)
    with pytest.raises(RuntimeError, match="silent for 0.2 s"):
        silent.take(n, 1, 0, piece)
    dead = two_outboxes(process, timeout_s=60)
    process.kill()  # a zombie from now on: nobody has asked for its exit code
    began = time.monotonic()
    [dead.took(dead.post(piece)) for _ in range(outbox.SLOTS)]
    with pytest.raises(RuntimeError, match="has died"):
        dead.post(piece)  # has to wait until the neighbour has taken the first
    assert time.monotonic() - began < 1
    process.wait()


def lose_rank_1():
    mesh = Mesh(2, torch.device("cpu"), timeout_s=0.3)
    mesh.share_memory(1000, 1000)
    if mesh.rank == 1:
        return "silent"
    try:
        mesh.all_reduce(torch.zeros(3), mesh.shard).wait()
    except LostRank as lost:
        return str(lost)


def test_lost_neighbours_are_lost_ranks():
    assert run_ranks(2, lose_rank_1) == ["a neighbour is silent for 0.3 s", "silent"]
