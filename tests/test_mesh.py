"""The grid and its collectives; which backend each group uses."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import simulate
from mesh import Mesh, RankLostError
from plumbing import launch
from ranks import run_ranks


def collectives(mesh):
    results = {"place": (mesh.replica, mesh.shard_index, mesh.shard.ranks, mesh.sync.ranks)}
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
        results[name] = [whole.tolist(), part.tolist(), total.item(), rows.tolist()]
    total = torch.tensor([float(mesh.rank)])
    mesh.all_reduce(total, mesh.world).wait()
    results["world"] = total.item()
    results["objects"] = mesh.all_gather_object({"rank": mesh.rank})
    return results, dict(mesh.sent), dict(mesh.calls), dict(mesh.waited_s)


def all_meshes():
    cpu = torch.device("cpu")
    make = lambda shards, name: Mesh(shards, cpu, backend=lambda ranks, crosses_replicas: name)
    cases = [(shards, name) for shards in (1, 2, 4) for name in ("gloo", "shm")]
    alone = Mesh(1, cpu, alone=True)
    assert (alone.world_size, alone.rank, alone.sync.size) == (1, 0, 1)
    with pytest.raises(ValueError, match="replicas of 3"):
        Mesh(3, cpu)
    return {case: collectives(make(*case)) for case in cases}


def test_collectives_compute_and_count_what_they_promise():
    for rank, cases in enumerate(run_ranks(4, all_meshes)):
        for (N, _), (results, sent, calls, waited_s) in cases.items():
            i, n = divmod(rank, N)
            row, column = [i * N + k for k in range(N)], [k * N + n for k in range(4 // N)]
            assert results["place"] == (i, n, row, column)
            assert results["world"] == 6.0
            assert results["objects"] == [{"rank": r} for r in range(4)]
            for name, ranks in (("shard", row), ("sync", column)):
                whole, part, total, rows = results[name]
                size, own = len(ranks), ranks.index(rank)
                assert whole == [float(r) for r in ranks for _ in range(3)]
                weight = sum(r + 1 for r in ranks) if size > 1 else rank + 1
                assert part == [weight * float(3 * own + k) for k in range(3)]
                assert total == sum(ranks) and rows == [[float(r), 7.0] for r in ranks]
                # all-gather, reduce-scatter, all-reduce, gather_rows
                promised = (size - 1) / size * (2 * 12 * size + 2 * 4 + 8 * size)
                in_world = 2 * 3 / 4 * 4 if (name == "shard") == (N == 4) else 0
                assert sent[name] == pytest.approx(promised + in_world)
                if size == 1:
                    assert not any(key.startswith(name) for key in calls)
            assert (waited_s["others"] > 0) == (N < 4) and waited_s["link"] == 0


def lose_a_rank():
    mesh = Mesh(2, torch.device("cpu"), 0.2, lambda ranks, crosses_replicas: "shm")
    if mesh.rank == 0:
        with pytest.raises(RankLostError, match="^a neighbour is silent for 0.2 s$"):
            mesh.all_reduce(torch.zeros(3), mesh.shard).wait()


def test_silent_rank_is_a_lost_rank():
    run_ranks(2, lose_a_rank)


@pytest.mark.parametrize(
    "backend, link_mbps, machines, expected",
    [
        ("auto", 0, "aabb", {"ab": "gloo", "aa": "shm", "bb": "shm"}),
        ("auto", 9, "aaaa", {"aa": "shm", "link": "gloo"}),
        ("auto", 0, ["", "", "", ""], {"aa": "gloo"}),  # shm does not run on these machines
        ("shm", 0, "aaaa", {"aa": "shm", "link": "shm"}),
        ("gloo", 0, "aaaa", {"aa": "gloo", "link": "gloo"}),
    ],
)
def test_groups_use_shm_within_a_machine(monkeypatch, backend, link_mbps, machines, expected):
    monkeypatch.setattr(launch, "environment", lambda: (0, 4))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    gather = lambda things, own: things.__setitem__(slice(None), machines)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    config = SimpleNamespace(device="cpu", backend=backend, timeout_s=1.0)
    link = simulate.Config(link_mbps=link_mbps)
    device, choose = launch.open_groups(config, link, None)
    groups = {"ab": ([1, 2], True), "aa": ([0, 1], False), "bb": ([2, 3], False)}
    groups["link"] = ([0, 1], True)
    assert {name: choose(*groups[name]) for name in expected} == expected
    assert device == torch.device("cpu")
