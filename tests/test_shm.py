"""The shm backend computes what gloo computes, in any order of operations. That it notices dead
and silent neighbours is in test_launch.py."""

import itertools
import os
import random
import resource
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mesh import all_gather_single, reduce_scatter_single
from plumbing import shm
from ranks import run_ranks
from rows import each_row

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
SIZES = (1, 3, 5, 33, 1000, 70_001)  # elements per rank
KINDS = ("all_reduce", "all_gather", "all_gather in place", "reduce_scatter", "all_to_all")


def run_operation(kind, group, x, async_op=False):
    """One collective on x, which has a piece per rank. Returns (result, work)."""
    options = dict(group=group, async_op=async_op)
    part = x.chunk(dist.get_world_size())[dist.get_rank()]
    if kind == "all_reduce":
        return x, dist.all_reduce(x, **options)
    if kind == "all_to_all":
        result = torch.zeros_like(x)
        return result, dist.all_to_all_single(result, x, **options)
    if kind == "reduce_scatter":
        result = torch.zeros_like(part)
        return result, reduce_scatter_single(result, x, **options)
    result = x if kind == "all_gather in place" else torch.zeros_like(x)
    return result, all_gather_single(result, part, **options)


def random_operations(ours, gloo, in_flight=shm.SLOTS + 3):
    """Up to `in_flight` at a time; each rank waits in an order of its own. Returns what differs."""
    cases = [*itertools.product(KINDS, DTYPES, SIZES)]
    random.Random(7).shuffle(cases)  # the same order on all ranks
    order = random.Random(dist.get_rank())
    generator = torch.Generator().manual_seed(dist.get_rank())
    pending = []
    wrong = []
    for number, case in enumerate(cases):
        kind, dtype, length = case
        # Sums of small whole numbers are exact in every dtype.
        shape = (dist.get_world_size() * length,)
        x = torch.randint(-30, 30, shape, generator=generator).to(dtype)
        wide = x.clone() if dtype != torch.bfloat16 else x.float()  # gloo lacks some in bf16
        expected = run_operation(kind, gloo, wide)[0].to(dtype)
        result, work = run_operation(kind, ours, x, async_op=True)
        pending.append((case, expected, result, work))
        left = 0 if number == len(cases) - 1 else order.randint(0, in_flight)
        while len(pending) > left:
            issued, expected, result, work = pending.pop(order.randrange(len(pending)))
            work.wait()
            assert work.wait()  # a second time
            if not torch.equal(result, expected):
                wrong.append(issued)
    return wrong


def open_files() -> list:
    """Of this process, those of the backend."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            names.append(os.readlink(descriptor))
    return [name for name in names if "shm" in name]


def compare_with_gloo():
    ours = dist.new_group(backend="shm")
    gloo = dist.new_group(backend="gloo")
    wrong = random_operations(ours, gloo)
    with pytest.raises(NotImplementedError, match="only sums"):
        dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.MAX, group=ours)
    # every rank adds in the same order, so real numbers have the same bits everywhere
    x = torch.randn(999, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.all_reduce(x, group=ours)
    maps = [line for line in open("/proc/self/maps").read().splitlines() if "/memfd:shm" in line]
    return wrong, (x.tolist(), shm.machine_id()), maps, open_files()


@each_row("size", [2, 3, 4])
def test_shm_equals_gloo_for_every_operation_size_dtype_and_order_of_waiting(size):
    results = run_ranks(size, compare_with_gloo)
    for wrong, same, maps, descriptors in results:
        assert not wrong and same == results[0][1] and same[1]
        # One file. It has no name, so it ends with the last process that maps it.
        assert len(maps) == 1 and maps[0].endswith("(deleted)")
        assert len(descriptors) == 2  # of the own file and of the mapping


def test_machines_that_cannot_share_memory_have_no_id(monkeypatch):
    for limited in resource.RLIMIT_FSIZE, resource.RLIMIT_AS:
        limit = lambda kind: (4096 if kind == limited else resource.RLIM_INFINITY,) * 2
        monkeypatch.setattr(resource, "getrlimit", limit)
        assert shm.machine_id() == ""


def test_system_without_a_boot_id_trains_over_gloo(monkeypatch):
    """Some sandboxes have no such file."""

    def missing(path, *rest):
        raise FileNotFoundError(path)

    assert shm.machine_id() != ""
    monkeypatch.setattr(shm, "open", missing, raising=False)
    assert shm.machine_id() == ""
