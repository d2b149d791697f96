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

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
SIZES = (1, 3, 5, 33, 1000, 70_001)  # elements per rank
KINDS = ("all_reduce", "all_gather", "all_gather in place", "reduce_scatter", "all_to_all")


def run_operation(kind, group, x, async_op=False):
    """One collective on x, which has a piece per rank. Returns (result, work)."""
    size, rank = dist.get_world_size(), dist.get_rank()
    part = x.chunk(size)[rank]
    if kind == "all_reduce":
        return x, dist.all_reduce(x, group=group, async_op=async_op)
    if kind == "all_to_all":
        result = torch.zeros_like(x)
        return result, dist.all_to_all_single(result, x, group=group, async_op=async_op)
    if kind == "reduce_scatter":
        result = torch.zeros_like(part)
        return result, reduce_scatter_single(result, x, group=group, async_op=async_op)
    result = x if kind == "all_gather in place" else torch.zeros_like(x)
    return result, all_gather_single(result, part, group=group, async_op=async_op)


def random_operations(ours, gloo, in_flight=shm.SLOTS + 3):
    """Up to `in_flight` at a time; each rank waits in an order of its own. Returns what differs."""
    cases, order = [*itertools.product(KINDS, DTYPES, SIZES)] * 2, random.Random(dist.get_rank())
    random.Random(7).shuffle(cases)  # the same order on all ranks
    generator = torch.Generator().manual_seed(dist.get_rank())
    pending, wrong = [], []
    for number, (kind, dtype, length) in enumerate(cases):
        # Sums of small whole numbers are exact in every dtype.
        shape = (dist.get_world_size() * length,)
        x = torch.randint(-30, 30, shape, generator=generator).to(dtype)
        wide = x.clone() if dtype != torch.bfloat16 else x.float()  # gloo lacks some in bf16
        expected = run_operation(kind, gloo, wide)[0].to(dtype)
        pending.append((expected, *run_operation(kind, ours, x, async_op=True), number))
        while len(pending) > (order.randint(0, in_flight) if number < len(cases) - 1 else 0):
            expected, result, work, issued = pending.pop(order.randrange(len(pending)))
            work.wait()
            assert work.wait()  # a second time
            wrong += [] if torch.equal(result, expected) else [cases[issued]]
    return wrong


def compare_with_gloo():
    ours, gloo = (dist.new_group(backend=name) for name in ("shm", "gloo"))
    wrong = random_operations(ours, gloo)
    with pytest.raises(NotImplementedError, match="only sums"):
        dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.MAX, group=ours)
    # every rank adds in the same order, so real numbers have the same bits everywhere
    x = torch.randn(999, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.all_reduce(x, group=ours)
    maps = [line for line in open("/proc/self/maps").read().splitlines() if "/memfd:shm" in line]
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            names += [name for name in [os.readlink(descriptor)] if "shm" in name]
    return wrong, (x.tolist(), shm.machine_id()), maps, names


@pytest.mark.parametrize("size", [2, 3, 4])
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
