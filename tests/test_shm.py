"""The shm backend computes what gloo computes, in any order of operations, and notices lost
neighbours."""

import os
import random
import resource
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mesh import all_gather_single, reduce_scatter_single
from plumbing import shm
from ranks import context, run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
SIZES = (1, 3, 1000, 5, 70_001, 33)  # elements per rank; slots must grow twice
KINDS = ("all_reduce", "all_gather", "all_gather in place", "reduce_scatter")


def run_operation(kind, group, x, async_op=False):
    """One collective on x, which has a piece per rank. Returns (result, work)."""
    size, rank = dist.get_world_size(), dist.get_rank()
    part = x.chunk(size)[rank]
    if kind == "all_reduce":
        return x, dist.all_reduce(x, group=group, async_op=async_op)
    if kind == "reduce_scatter":
        result = torch.zeros_like(part)
        return result, reduce_scatter_single(result, x, group=group, async_op=async_op)
    result = x if kind == "all_gather in place" else torch.zeros_like(x)
    return result, all_gather_single(result, part, group=group, async_op=async_op)


def compare_with_gloo():
    ours, gloo = (dist.new_group(backend=name) for name in ("shm", "gloo"))
    size, wrong = dist.get_world_size(), []
    generator = torch.Generator().manual_seed(dist.get_rank())
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
    with pytest.raises(NotImplementedError, match="only sums"):
        dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.MAX, group=ours)
    # every rank adds in the same order, so real numbers have the same bits everywhere
    x = torch.randn(999, generator=generator)
    dist.all_reduce(x, group=ours)
    maps = [line for line in open("/proc/self/maps").read().splitlines() if "/memfd:shm" in line]
    same, names = (x.tolist(), shm.machine_id()), []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            names += [name for name in [os.readlink(descriptor)] if "shm" in name]
    return wrong, same, maps, names, overlapping_operations(ours, gloo, in_flight=shm.SLOTS + 3)


def overlapping_operations(ours, gloo, in_flight):
    """Random operations, up to `in_flight` at a time; each rank waits in an order of its own."""
    size, rank = dist.get_world_size(), dist.get_rank()
    plan, order, operations = random.Random(7), random.Random(rank), []
    for number in range(150):
        kind, length = plan.choice(KINDS), plan.randint(1, 30)
        x = (torch.arange(size * length, dtype=torch.float64) + number) * (rank + 1)
        operations.append((kind, x, run_operation(kind, gloo, x.clone())[0]))
    pending, wrong = [], []
    while operations or pending:
        if operations:
            kind, x, expected = operations.pop(0)
            pending.append((kind, expected, *run_operation(kind, ours, x, async_op=True)))
        while len(pending) > (order.randint(0, in_flight) if operations else 0):
            kind, expected, result, work = pending.pop(order.randrange(len(pending)))
            work.wait()
            assert work.is_completed() and work.wait()  # a second time
            if not torch.equal(result, expected):
                wrong.append((len(operations), kind))
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shm_equals_gloo_for_every_operation_size_dtype_and_order_of_waiting(size):
    results = run_ranks(size, compare_with_gloo)
    for wrong, same, maps, descriptors, wrong_in_flight in results:
        assert not wrong and not wrong_in_flight and same == results[0][1] and same[1]
        # Two channels of `size` slots: smaller ones have gone. The memory has no name and no
        # descriptor, so it ends with the last process that maps it.
        assert len(maps) == 2 * size and all(line.endswith("(deleted)") for line in maps)
        assert not descriptors


def test_machines_that_cannot_share_memory_have_no_id(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    assert shm.machine_id() == ""


# ---- lost neighbours ----


LAST = [  # what rank 0 does without rank 1, each in a group of its own; elements per rank
    ("all_reduce", 10),
    ("all_reduce", 1000),  # slots must grow
    ("all_gather", 10),
    ("all_gather", 10),  # with all slots in use: rank 1 has not released them
]


def lose_rank_1(rank, folder, timeout_s, die):
    """Both ranks share slots. Then rank 1 ends, or sleeps. Rank 0 writes its errors to a file."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    groups, errors = [dist.new_group(backend="shm") for _ in LAST], []
    for group in groups:
        for kind in ("all_reduce", "all_gather"):
            run_operation(kind, group, torch.ones(20))
        group.timeout_s = timeout_s
    start = lambda: run_operation("all_gather", groups[-1], torch.ones(20), async_op=True)[1]
    works = [start() for _ in range(shm.SLOTS)]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL) if die else signal.pause()
    [work.wait() for work in works]
    for (kind, elements), group in zip(LAST, groups):
        try:
            run_operation(kind, group, torch.ones(2 * elements))
        except RuntimeError as error:
            errors.append(str(error))
    Path(folder, "errors").write_text("\n".join(errors))
    os._exit(0)  # the default group's destructor would wait for rank 1


@pytest.mark.parametrize(
    "die, timeout_s, message",
    [(True, 60, "a neighbour has died"), (False, 0.2, "a neighbour is silent for 0.2 s")],
)
def test_lost_neighbour_is_noticed(die, timeout_s, message, tmp_path):
    """A dead one before the timeout, a silent one after it."""
    more = (str(tmp_path), timeout_s, die)
    ranks = [context.Process(target=lose_rank_1, args=(rank, *more)) for rank in (0, 1)]
    [process.start() for process in ranks]
    ranks[0].join(40)
    [process.kill() for process in ranks]
    [process.join() for process in ranks]
    assert (tmp_path / "errors").read_text().splitlines() == [message] * len(LAST)
