"""The grid and its collectives; which backend each group uses. all_to_all and
send_receive are in test_methods.py and test_relatives.py."""

import contextlib
import functools
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import mesh as mesh_module
from config import UserError
from mesh import Group, Handle, Mesh, RankLostError, translate_comm_errors
from plumbing import launch, simulate
from ranks import run_ranks

CPU, ORDER = torch.device("cpu"), "NCCL_LAUNCH_ORDER_IMPLICIT"


def odd_numbers(rank):
    """Their sum depends on the order."""
    return torch.randn(40, generator=torch.Generator().manual_seed(rank))


def collectives(shards, backend):
    """Results by group; what was sent; calls; how long the host has waited."""
    mesh, results = Mesh(shards, CPU, 60, lambda ranks, crosses_replicas: backend), {}
    for name, group in (("shard", mesh.shard), ("sync", mesh.sync)):
        n, own = group.size, group.index
        whole = torch.full((3 * n,), -1.0)
        whole[3 * own : 3 * own + 3] = mesh.rank
        mesh.all_gather(whole, group).wait()
        full = torch.arange(3.0 * n) * (mesh.rank + 1)
        part = full if n == 1 else torch.empty(3)
        mesh.reduce_scatter(part, full, group).wait()
        total = torch.tensor([float(mesh.rank)])
        mesh.all_reduce(total, group).wait()
        rows = mesh.gather_rows(torch.tensor([float(mesh.rank), 7.0]), group)
        results[name] = group.size, whole.tolist(), part.tolist(), total.item(), rows.tolist()
    results["all"] = mesh.all_gather_object({"rank": mesh.rank})
    results["sum"] = mesh.sum_over_ranks(odd_numbers(mesh.rank)).tolist()
    launch.shorten_timeout(mesh)
    if backend == "shm":  # with gloo it is torch's
        groups = [group.process_group for group in (mesh.shard, mesh.sync) if group.size > 1]
        expected = [seconds for seconds, n in ((10, shards), (60, mesh.replicas)) if n > 1]
        assert [group.timeout_s for group in groups] == expected
    counted = dict(mesh.sent), dict(mesh.calls), dict(mesh.waited_s)
    with mesh.uncounted():
        mesh.all_reduce(odd_numbers(0), mesh.sync).wait()
    assert counted[0] == mesh.sent and counted[2] == mesh.waited_s
    return results, *counted


def all_meshes():
    cases = [(shards, backend) for shards in (1, 2, 4) for backend in ("gloo", "shm")]
    return [(shards, *collectives(shards, backend)) for shards, backend in cases]


def test_collectives_compute_and_count_what_they_promise():
    in_rank_order = functools.reduce(torch.add, map(odd_numbers, range(4)))
    found = run_ranks(4, all_meshes)
    for rank, cases in enumerate(found):
        for case, (N, results, sent, calls, waited_s) in enumerate(cases):
            assert results["all"] == [{"rank": r} for r in range(4)]
            assert results["sum"] == found[0][case][1]["sum"]  # to the last bit
            assert results["sum"] == pytest.approx(in_rank_order.tolist(), rel=1e-5)
            assert N != 2 or results["sum"] == in_rank_order.tolist()
            assert {name.split()[0] for name in calls} <= {"shard", "sync"}
            i, n = divmod(rank, N)
            groups = {"shard": [i * N + k for k in range(N)]}
            groups["sync"] = [k * N + n for k in range(4 // N)]
            for name, ranks in groups.items():
                size, own = len(ranks), ranks.index(rank)
                weight = sum(r + 1 for r in ranks) if size > 1 else rank + 1
                assert results[name] == (
                    size,
                    [float(r) for r in ranks for _ in range(3)],
                    [weight * float(3 * own + k) for k in range(3)],
                    sum(ranks),
                    [[float(r), 7.0] for r in ranks],
                )
                # all-gather and reduce-scatter, all-reduce, gather_rows
                promised = (size - 1) / size * (2 * 12 * size + 2 * 4 + 8 * size)
                # sum_over_ranks of 40 numbers: an all-reduce in one group, or two all-gathers
                in_sum = 2 * 3 / 4 * 160 if size == 4 else 0
                if N == 2:
                    in_sum = 160 * dict(shard=1, sync=N)[name]
                assert sent[name] == pytest.approx(promised + in_sum)
                assert size > 1 or not any(key.startswith(name) for key in calls)
            assert (waited_s["others"] > 0) == (N < 4) and waited_s["link"] == 0


def test_waits_for_a_link_and_for_others_are_told_apart_and_own_faults_from_lost_ranks(monkeypatch):
    mesh, now = Mesh(1, CPU, alone=True), [100.0]
    monkeypatch.setattr(mesh_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    work = SimpleNamespace(link_s=0.5, wait=lambda: now.insert(0, now[0] + 0.75))
    mesh.spans = []
    Handle([work], "", mesh).wait()
    assert mesh.waited_s == {"others": 0.25, "link": 0.5}
    # for --timeline
    others, link = ("wait for others", 100.0, 100.25), ("wait for link", 100.25, 100.75)
    assert mesh.spans == [others, link]
    for group in mesh.shard, mesh.sync:  # shm may wait for a free slot when an operation starts
        mesh._start(group, "", work.wait, 0, 1)
    assert mesh.waited_s["others"] == 1.0
    own = torch.OutOfMemoryError, torch.AcceleratorError
    for raised, error in *zip(own, own), (RuntimeError, RankLostError):
        with pytest.raises(error), translate_comm_errors():
            raise raised("x")


def test_link_carries_what_crosses_replicas_with_its_bytes_and_hops(monkeypatch):
    """Four replicas of two shards; 48 bytes."""
    mesh, carried, x = Mesh(1, CPU, alone=True), [], torch.zeros(6, dtype=torch.float64)
    carry = lambda works, sent_bytes, hops: carried.append((sent_bytes, hops))
    mesh.replicas, mesh.link = 4, SimpleNamespace(carry=carry)
    mesh.sync, mesh.shard = Group("sync", [0, 2, 4, 6], 0, None), Group("shard", [0, 1], 0, None)
    for name in "all_reduce", "all_to_all_single", "P2POp", "batch_isend_irecv":
        monkeypatch.setattr(dist, name, lambda *args, **options: None)
    monkeypatch.setattr(mesh_module, "all_gather_single", lambda *args, **options: None)
    mesh.all_reduce(x, mesh.shard)
    mesh.all_reduce(x, mesh.sync)
    mesh.all_gather(x, mesh.sync)
    mesh.all_to_all(x, x, mesh.sync)
    mesh.send_receive(x, x, 1, mesh.sync)
    assert carried == [(72, 6), (36, 3), (36, 3), (48, 1)]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_nccl_takes_few_sms_between_replicas_and_has_no_third_communicator(monkeypatch, backend):
    """Rank 0 of 2 x 2."""
    made, config = [], SimpleNamespace()
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=config))
    if backend == "nccl":  # a CPU build of torch has no such name
        monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    for name, found in dict(is_initialized=True, get_world_size=4, get_rank=0).items():
        monkeypatch.setattr(dist, name, lambda found=found: found)
    monkeypatch.setattr(dist, "new_group", lambda *args: made.append(args))
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **options: None)
    Mesh(2, CPU, 7, lambda ranks, crosses_replicas: backend)
    assert [args[0] for args in made] == [[0, 1], [2, 3], [0, 2], [1, 3]]
    assert all(args[1:3] == (timedelta(seconds=7), backend) for args in made)
    shard, sync = made[0][3], made[2][3]
    assert shard is None and (sync is not None) == (backend == "nccl")
    assert backend == "gloo" or config.max_ctas == 4 and sync._timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    "backend, limits_link, barrier, machines, expected",
    [
        ("auto", False, True, "aabb", ["shm", "shm", "gloo"]),
        ("auto", True, True, "aaaa", ["shm", "gloo", "gloo"]),
        ("auto", False, False, "aaaa", ["shm", "gloo", "gloo"]),
        ("auto", False, True, [""] * 4, ["gloo"] * 3),  # shm does not run on these machines
        ("shm", False, True, "aaaa", ["shm"] * 3),
        ("gloo", False, True, "aaaa", ["gloo"] * 3),
    ],
)
def test_groups_use_shm_within_a_machine(
    monkeypatch, backend, limits_link, barrier, machines, expected
):
    everyone = SimpleNamespace(all_gather_object=lambda own: list(machines))
    monkeypatch.setattr(simulate, "SimulatedLink", lambda *args: SimpleNamespace())
    config = SimpleNamespace(device="cpu", backend=backend, dtype="fp32", dry_run=False, shards=1)
    vars(config).update(timeout_s=1.0, limits_link=limits_link, timeline=False)
    launch.resolve_device(config)
    mesh = launch.make_mesh(config, everyone, barrier)
    groups = [([0, 1], False), ([0, 1], True), ([1, 2], True)]  # ranks; crosses replicas?
    assert [mesh.backend(*group) for group in groups] == expected and mesh.device == CPU


@pytest.mark.parametrize("given", [None, "0"])
def test_nccl_launches_in_the_order_of_issue_by_default(monkeypatch, given):
    """Operations of two communicators in flight may hang otherwise."""
    everyone = Mesh(1, CPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(os, "environ", {} if given is None else {ORDER: given})
    config = SimpleNamespace(device="cuda", backend="gloo", shards=1, timeout_s=1.0)
    vars(config).update(limits_link=False, timeline=False)
    launch.make_mesh(config, everyone)
    assert os.environ.get(ORDER) == given
    config.backend = "nccl"
    launch.make_mesh(config, everyone)
    assert os.environ[ORDER] == (given or "1")


@pytest.mark.parametrize(
    "backend, gpus, local_rank",
    [("auto", 4, 3), ("shm", 2, 3), ("auto", 2, 3), ("auto", 1, 1), ("auto", 1, 0)],
)
def test_ranks_that_share_a_gpu_are_refused_for_nccl(monkeypatch, backend, gpus, local_rank):
    """One of them is, at least. Rank 0 may see only its own GPU, like all others."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    for name, found in dict(device_count=gpus, is_available=True).items():
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    config = SimpleNamespace(device="auto", backend=backend, dtype="fp32", dry_run=False)
    refused = pytest.raises(UserError, match="some ranks share a GPU; lower --nproc_per_node")
    with refused if backend == "auto" and gpus <= local_rank else contextlib.nullcontext():
        launch.resolve_device(config)
    assert config.device == "cuda"
