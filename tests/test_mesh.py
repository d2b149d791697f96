"""The grid and its collectives; which backend each group uses."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import simulate
from mesh import Mesh
from plumbing import launch
from ranks import run_ranks

CPU = torch.device("cpu")


def collectives(mesh):
    results = {}
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
    total = torch.tensor([float(mesh.rank)])
    mesh.all_reduce(total, mesh.world).wait()
    results["world"] = total.item(), mesh.all_gather_object({"rank": mesh.rank})
    return results, dict(mesh.sent), dict(mesh.calls), dict(mesh.waited_s)


def all_meshes():
    results = []
    for shards in (1, 2, 4):
        for name in ("gloo", "shm"):
            mesh = Mesh(shards, CPU, 60, lambda ranks, crosses_replicas: name)
            results.append((shards, *collectives(mesh)))
    return results


def test_collectives_compute_and_count_what_they_promise():
    for rank, cases in enumerate(run_ranks(4, all_meshes)):
        for N, results, sent, calls, waited_s in cases:
            assert results["world"] == (6.0, [{"rank": r} for r in range(4)])
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
                in_world = 2 * 3 / 4 * 4 if (name == "shard") == (N == 4) else 0
                assert sent[name] == pytest.approx(promised + in_world)
                assert size > 1 or not any(key.startswith(name) for key in calls)
            assert (waited_s["others"] > 0) == (N < 4) and waited_s["link"] == 0


def overlapping_collectives():
    """(all-to-all, exchange, gather in the background, ledger) on 4x1 and 2x2."""
    results = []
    for shards in (1, 2):
        mesh = Mesh(shards, CPU)
        group, M = mesh.sync, mesh.replicas
        pieces = torch.arange(3 * M, dtype=torch.uint8).view(M, 3) + 20 * mesh.rank
        received, theirs = torch.zeros_like(pieces), torch.zeros(5)
        handle = mesh.all_to_all(received, pieces, group)
        # a second operation in flight; the partner is the neighbour in the group
        other = mesh.exchange(theirs, torch.full((5,), float(mesh.rank)), group.index ^ 1, group)
        handle.wait(), other.wait()
        counts = dict(mesh.sent), dict(mesh.calls)
        with mesh.uncounted():
            mesh.all_reduce(torch.zeros(2), group).wait()
        rows, gather = mesh.gather_in_background(torch.tensor([float(mesh.rank), 7.0]))
        gather.wait()
        assert gather.is_completed() and mesh.sent == counts[0]
        results.append((received.tolist(), theirs.tolist(), rows.tolist(), *counts))
    return results


def test_collectives_of_overlapping_methods_compute_and_count_what_they_promise():
    for rank, cases in enumerate(run_ranks(4, overlapping_collectives)):
        for N, (received, theirs, rows, sent, calls) in zip((1, 2), cases):
            M, index = 4 // N, rank // N
            ranks = range(rank % N, 4, N)  # of the sync group
            assert received == [[20 * r + 3 * index + k for k in range(3)] for r in ranks]
            assert theirs == [float(ranks[index ^ 1])] * 5
            assert rows == [[float(r), 7.0] for r in range(4)]
            assert sent == {"shard": 0, "sync": 3 * (M - 1) + 20}
            assert calls == {"sync all-to-all": 1, "sync exchange": 1}


@pytest.mark.parametrize(
    "backend, link_mbps, overlaps, machines, expected",
    [
        ("auto", 0, False, "aabb", ["shm", "shm", "gloo"]),
        ("auto", 9, False, "aaaa", ["shm", "gloo", "gloo"]),
        ("auto", 0, True, "aaaa", ["shm", "gloo", "gloo"]),
        ("auto", 0, False, [""] * 4, ["gloo"] * 3),  # shm does not run on these machines
        ("shm", 0, False, "aaaa", ["shm"] * 3),
        ("gloo", 0, False, "aaaa", ["gloo"] * 3),
    ],
)
def test_groups_use_shm_within_a_machine(
    monkeypatch, backend, link_mbps, overlaps, machines, expected
):
    monkeypatch.setattr(launch, "environment", lambda: (0, 4))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    gather = lambda things, own: things.__setitem__(slice(None), machines)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    config = SimpleNamespace(device="cpu", backend=backend, timeout_s=1.0)
    simulation = simulate.Config(link_mbps=link_mbps)
    device, choose = launch.open_groups(config, simulation, None, overlaps)
    groups = [([0, 1], False), ([0, 1], True), ([1, 2], True)]  # ranks; crosses replicas?
    assert [choose(*group) for group in groups] == expected and device == CPU
