"""The grid and its collectives, gloo's direct exchange against what it must compute."""

import pytest
import torch

from mesh import Mesh
from ranks import run_ranks


def collectives(shards, through):
    mesh = Mesh(shards, torch.device("cpu"))
    # as if gloo could not reach the tensors, which is so on a GPU
    mesh.staged = through == "host copies"
    if through == "shared memory":
        mesh.share_memory(1000, 1000)
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
    # two exchanges in flight between the same ranks do not mix
    a, b = (torch.full((2 * mesh.shard.size,), float(mesh.rank)) for _ in range(2))
    b *= 10
    handles = [mesh.all_gather(a, mesh.shard), mesh.all_gather(b, mesh.shard)]
    [handle.wait() for handle in handles]
    results["two"] = (a.tolist(), b.tolist())
    return results, dict(mesh.sent), dict(mesh.calls)


@pytest.mark.parametrize("through", ["sockets", "host copies", "shared memory"])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_collectives_compute_and_count_what_they_promise(shards, through):
    M, N = 4 // shards, shards
    for rank, (results, sent, calls) in enumerate(run_ranks(4, collectives, shards, through)):
        i, n = divmod(rank, N)
        row, column = [i * N + k for k in range(N)], [k * N + n for k in range(M)]
        assert results["place"] == (i, n, row, column)
        for name, ranks in (("shard", row), ("sync", column)):
            whole, part, total, rows = results[name]
            size, own = len(ranks), ranks.index(rank)
            assert whole == [float(r) for r in ranks for _ in range(3)]
            weight = sum(r + 1 for r in ranks) if size > 1 else rank + 1
            assert part == [weight * float(3 * own + k) for k in range(3)]
            assert total == sum(ranks) and rows == [[float(r), 7.0] for r in ranks]
            extra = 2 * 8 * (size - 1) if name == "shard" else 0  # the two at once
            # all-gather, reduce-scatter, all-reduce, gather_rows
            promised = (size - 1) / size * (2 * 12 * size + 2 * 4 + 8 * size) + extra
            assert sent[name] == pytest.approx(promised)
            if size == 1:
                assert not any(key.startswith(name) for key in calls)  # alone: silent
        two_a, two_b = results["two"]
        assert two_a == [float(r) for r in row for _ in range(2)]
        assert two_b == [10 * x for x in two_a]


def test_uneven_grid_is_refused():
    with pytest.raises(ValueError, match="replicas of 2"):
        Mesh(2, torch.device("cpu"))
