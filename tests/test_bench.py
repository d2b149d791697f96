"""The benchmark runs from end to end, and its figures follow from its times. No test depends on
real times; wrong flags are in test_cli.py."""

import json
from types import SimpleNamespace

import pytest
import torch

import bench
from mesh import Mesh
from ranks import Launch, run_bench

SMALL = "--n_layer 1 --n_head 1 --n_embd 16 --block_size 8 --batch_size 1 --dtype fp32".split()
SMALL += "--repeats 1 --steps 1 --device cpu".split()


def test_ratios_follow_from_the_times():
    # ours is 1.5 times as fast as fsdp2 in the middle turn, and has 0.8 of the bound's speed
    row = bench.speedups({"ours": [10, 20, 40], "fsdp2": [14, 30, 80], "bound": [9, 16, 30]})
    assert (row.pop("over_fsdp2"), row.pop("of_bound")) == (1.5, pytest.approx(0.8))
    assert row.pop("over_fsdp2_range") == "1.40..2.00" and row.pop("of_bound_range") == "0.75..0.90"
    assert row == {"ours_ms": 20, "fsdp2_ms": 30, "bound_ms": 16}


def test_candidates_take_turns():
    calls, mesh = [], SimpleNamespace(device=torch.device("cpu"))
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = bench.alternate(mesh, steps, SimpleNamespace(repeats=2, steps=1))
    # two steps each to warm up; then one untimed and one timed per turn
    assert "".join(calls) == "abcabc" + "aabbcc" + "bbccaa"
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_one_rank_is_compared_with_a_plain_loop(monkeypatch):
    parts, dtypes, *configs = bench.read_arguments(SMALL, 1)
    assert (parts, dtypes) == (["step", "memory"], ["fp32"])
    case = bench.Case(*configs, Mesh(1, torch.device("cpu")))
    assert case.describe()["mesh"] == "1x1"
    assert all(len(list(bench.PARTS[part](case))) == 1 for part in parts)
    monkeypatch.setattr(bench, "alternate", lambda *_: {"ours": [4.0], "plain": [6.0]})
    (row,) = bench.compare_steps(case)
    assert (row["over_plain"], row["tokens_per_s"]) == (1.5, 8 / 0.004)


def test_parts_run_on_two_ranks_and_write_what_they_print(tmp_path):
    file = tmp_path / "new" / "bench.json"
    more = f"--parts step,sync,memory --shards 2 --link_mbps 500 --json {file}"
    argv = [*SMALL, *more.split()]
    run = Launch(2, tmp_path, *argv, special={rank: (run_bench,) for rank in (0, 1)})
    assert (run.wait(), run.lines("err")) == ([0, 0], [])
    printed = "\n".join(run.lines("out"))
    parts = json.loads(file.read_text())["parts"]
    assert set(parts) == {"step", "sync", "memory"} and all(parts.values())
    for part, rows in parts.items():
        assert all(name in printed for name in [part, *rows[0]])
    assert {"over_fsdp2", "of_bound", "overhead_ms_per_layer"} <= parts["step"][0].keys()
    assert [row["method"] for row in parts["sync"]] == ["edit", "diloco"]
    # N = 1 and M = 2: each rank sends 2 (M-1)/M of 4 bytes per parameter through its 500 Mbit/s
    sent_bits = 8 * 4 * parts["sync"][0]["n_params"]
    for row in parts["sync"]:
        assert row["wire_ms"] > sent_bits / 500e6 * 1e3 * 0.99
