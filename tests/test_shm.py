"""The shm backend computes what gloo computes, in any order of operations, and notices lost
neighbours."""

import functools
import os
import random
import resource
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mesh import all_gather_single, reduce_scatter_single
from plumbing import shm
from ranks import context, run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
SIZES = (1, 3, 1000, 5, 70_001, 33)  # elements per rank; slots must grow twice


def run_operation(kind, group, x, async_op=False):
    """One collective on x, which has a piece per rank. Returns (result, work)."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if kind == "all_reduce":
        return x, dist.all_reduce(x, group=group, async_op=async_op)
    part = x.chunk(size)[rank]
    if kind == "all_gather":
        result = torch.zeros_like(x)
        return result, all_gather_single(result, part, group=group, async_op=async_op)
    if kind == "all_gather in place":
        for other in range(size):
            x.chunk(size)[other].mul_(other == rank)
        return x, all_gather_single(x, part, group=group, async_op=async_op)
    result = torch.zeros_like(part)
    return result, reduce_scatter_single(result, x, group=group, async_op=async_op)


KINDS = ("all_reduce", "all_gather", "all_gather in place", "reduce_scatter")


def compare_with_gloo():
    ours, gloo = (dist.new_group(backend=name) for name in ("shm", "gloo"))
    size, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    generator = torch.Generator().manual_seed(rank)
    for elements in SIZES:
        for dtype in DTYPES:
            # sums of small whole numbers are exact in every dtype
            x = torch.randint(-30, 30, (size * elements,), generator=generator).to(dtype)
            for kind in KINDS:
                wide = x if dtype != torch.bfloat16 else x.float()  # gloo lacks some in bf16
                result, _ = run_operation(kind, ours, x.clone())
                expected, _ = run_operation(kind, gloo, wide.clone())
                if not torch.equal(result, expected.to(dtype)):
                    wrong.append((elements, dtype, kind))
    dist.barrier(group=ours)
    # every rank adds in the same order, so real numbers have the same bits everywhere
    x = torch.randn(999, generator=generator)
    dist.all_reduce(x, group=ours)
    maps = open("/proc/self/maps").read().splitlines()
    maps = [line for line in maps if "/memfd:shm" in line]
    names = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd/")[:-1]]
    return wrong, x.tolist(), maps, [name for name in names if "shm" in name]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shm_equals_gloo_for_every_operation_size_and_dtype(size):
    before = set(os.listdir("/dev/shm"))
    results = run_ranks(size, compare_with_gloo)
    for wrong, total, maps, descriptors in results:
        assert not wrong
        assert total == results[0][1]
        # Two channels of `size` slots: smaller ones have gone. The memory has no name and no
        # descriptor, so it ends with the last process that maps it.
        assert len(maps) == 2 * size and all(line.endswith("(deleted)") for line in maps)
        assert not descriptors
    assert set(os.listdir("/dev/shm")) <= before


def overlapping_operations(seed, in_flight):
    """Random operations, up to `in_flight` at a time; each rank waits in an order of its own."""
    group, size, rank = dist.new_group(backend="shm"), dist.get_world_size(), dist.get_rank()
    plan, order, wrong, pending = random.Random(seed), random.Random(seed + rank + 1), [], []

    def finish(number, kind, length, result, work):
        work.wait()
        assert work.is_completed() and work.wait()  # a second time
        own = torch.arange(size * length, dtype=torch.float64) + number
        expected = own * sum(range(1, size + 1))  # rank r has contributed (r + 1) * own
        if kind.startswith("all_gather"):
            factor = torch.arange(1, size + 1).repeat_interleave(length)
            expected = own * factor
        elif kind == "reduce_scatter":
            expected = expected.chunk(size)[rank]
        if not torch.equal(result, expected):
            wrong.append((number, kind))

    for number in range(300):
        kind, length = plan.choice(KINDS), plan.randint(1, 30)
        x = (torch.arange(size * length, dtype=torch.float64) + number) * (rank + 1)
        result, work = run_operation(kind, group, x, async_op=True)
        pending.append((number, kind, length, result, work))
        while len(pending) > order.randint(0, in_flight):
            finish(*pending.pop(order.randrange(len(pending))))
    [finish(*operation) for operation in pending]
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_operations_in_flight_are_right_in_any_order_of_waiting(size):
    for wrong in run_ranks(size, overlapping_operations, 7, shm.SLOTS + 3, timeout_s=30):
        assert not wrong


def refused_operations():
    group = dist.new_group(backend="shm")
    with pytest.raises(NotImplementedError, match="only sums"):
        dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.MAX, group=group)
    return dist.get_backend(group), shm.machine_id()


def test_other_reductions_are_refused():
    (name, machine), other = run_ranks(2, refused_operations)
    assert name == "shm" and machine and other == (name, machine)


def test_machines_that_cannot_share_memory_have_no_id(monkeypatch):
    assert shm.machine_id() == shm.machine_id() != ""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    assert shm.machine_id() == ""
    monkeypatch.undo()
    monkeypatch.setattr(shm.platform, "machine", lambda: "aarch64")
    assert shm.machine_id() == ""


# ---- lost neighbours ----


def gather(group, x, async_op=False):
    return all_gather_single(x.new_zeros(2 * len(x)), x, group=group, async_op=async_op)


LAST = {  # what rank 0 does without rank 1
    "reduce": lambda group, x: dist.all_reduce(x, group=group),
    "gather": gather,
    "grow": lambda group, x: dist.all_reduce(torch.zeros(99 * len(x)), group=group),
    "slots": gather,  # rank 1 has not released any of rank 0's slots
}


def lose_rank_1(last, timeout_s, end):
    """Both ranks share slots; then rank 1 ends and rank 0 does `last`. Returns its error."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="shm")
    x = torch.ones(10)
    dist.all_reduce(x, group=group), gather(group, x)
    works = [gather(group, x, async_op=True) for _ in range(shm.SLOTS if last == "slots" else 0)]
    if dist.get_rank() == 1:
        return end()
    [work.wait() for work in works]
    try:
        LAST[last](group, x)
    except RuntimeError as error:
        return str(error)


def die_as_rank_1(rank, folder, last):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    end = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
    message = lose_rank_1(last, 60, end)
    with open(f"{folder}/message", "w") as file:
        file.write(message)
    os._exit(0)  # the default group's destructor would wait for the dead rank


@pytest.mark.parametrize("last", LAST)
def test_dead_neighbour_is_noticed_before_the_timeout(last, tmp_path):
    ranks = [context.Process(target=die_as_rank_1, args=(r, str(tmp_path), last)) for r in (0, 1)]
    [process.start() for process in ranks]
    [process.join(40) for process in ranks]
    [process.kill() for process in ranks]
    assert (tmp_path / "message").read_text() == "a neighbour has died"


def silent_neighbours():
    return [lose_rank_1(last, 0.2, lambda: None) for last in LAST]


def test_silent_neighbour_is_noticed_after_the_timeout():
    messages, _ = run_ranks(2, silent_neighbours)
    assert messages == ["a neighbour is silent for 0.2 s"] * len(LAST)
