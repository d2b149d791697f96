"""The benchmark runs from end to end, and its figures follow from its times. No test depends on
real times."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import bench
from mesh import Mesh
from ranks import ROOT

SMALL = "--n_layer 1 --n_head 1 --n_embd 16 --block_size 8 --batch_size 1 --dtype fp32".split()
SMALL += "--repeats 1 --steps 1 --tau 2".split()


def run(ranks, *flags):
    command = [sys.executable]
    if ranks > 1:
        command += "-m torch.distributed.run --standalone --nproc_per_node".split()
        command.append(str(ranks))
    done = subprocess.run(
        [*command, "bench.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_ratios_follow_from_the_times():
    # ours is 1.5 times as fast as fsdp2 in the middle turn, and has 0.8 of the bound's speed
    times = {"ours": [10, 20, 40], "fsdp2": [14, 30, 80], "bound": [9, 16, 30]}
    row = bench.speedups(times)
    assert row == {
        "ours_ms": 20, "fsdp2_ms": 30, "bound_ms": 16,
        "over_fsdp2": 1.5, "of_bound": pytest.approx(0.8),
    }  # fmt: skip
    assert bench.speedups({"edit": [20], "bound": [10]})["of_bound"] == 0.5


def test_figures_of_a_row_follow_from_the_times(monkeypatch):
    args, *rest = bench.read_arguments([*SMALL, "--peak_tflops", "2"], 1)
    case = bench.Case(*rest, 257, Mesh(1, torch.device("cpu")))
    monkeypatch.setattr(bench, "alternate", lambda *_: {"ours": [4.0], "plain": [6.0]})
    row = bench.compare(case, args)
    assert (row["ours_ms"], row["over_plain"], row["mesh"]) == (4.0, 1.5, "1x1")
    assert row["tokens_per_s"] == 8 / 0.004
    block = 4 * 16 * 16 + 3 * 16 * 64 + 2 * 16
    flops = 6 * (block + 257 * 16 + 16) + 6 * 1 * 8 * 16  # per token
    assert row["tflops_per_rank"] == pytest.approx(flops * 2000 / 1e12)
    assert row["mfu"] == pytest.approx(row["tflops_per_rank"] / 2)


def test_candidates_take_turns(monkeypatch):
    calls, mesh = [], SimpleNamespace(device=torch.device("cpu"))
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = bench.alternate(mesh, steps, repeats=2, count=1)
    # two steps each to warm up; then one untimed and one timed per turn
    assert "".join(calls) == "abcabc" + "aabbcc" + "bbccaa"
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_parts_run_and_write_what_they_print(tmp_path):
    file = tmp_path / "new" / "bench.json"
    flags = [*SMALL, "--parts", "step,sync,round,memory", "--shards", "2"]
    code, out, err = run(2, *flags, "--link_mbps", "500", "--json", str(file))
    assert (code, err) == (0, "")
    parts = json.loads(file.read_text())["parts"]
    assert set(parts) == {"step", "sync", "round", "memory"} and all(parts.values())
    for part, rows in parts.items():
        assert part in out and all(value is not None for row in rows for value in row.values())
        for name in rows[0]:
            assert name in out
    columns = {"over_fsdp2", "of_bound", "overhead_ms_per_layer", "tokens_per_s"}
    assert columns <= parts["step"][0].keys()
    assert [row["method"] for row in parts["sync"]] == ["edit", "diloco"]
    # N = 1 and M = 2: each rank sends 2 (M-1)/M of 4 bytes per parameter through its 500 Mbit/s
    sent_bits = 8 * 4 * parts["sync"][0]["n_params"]
    for row in parts["sync"]:
        assert row["wire_ms"] > sent_bits / 500e6 * 1e3 * 0.99


def test_one_rank_is_compared_with_a_plain_loop(tmp_path):
    file = tmp_path / "bench.json"
    code, _, err = run(1, *SMALL, "--json", str(file))
    assert (code, err) == (0, "")
    parts = json.loads(file.read_text())["parts"]
    assert set(parts) == {"step", "round", "memory"} and parts["step"][0]["over_plain"] > 0


def test_wrong_flags_are_one_line(tmp_path):
    code, out, err = run(1, "--json", "/proc/nowhere/bench.json")
    assert code == 2 and out == "" and err.count("\n") == 1 and "/proc/nowhere" in err
    for line in (
        "--parts all", "--parts growth", "--shards 3", "--repeats 0", "--steps -1", "--widht 3",
        "--vocab_size 1", "--peak_tflops nan", "--method edit", "--dry_run", "--n_head 5",
    ):  # fmt: skip
        with pytest.raises(bench.UserError) as error:
            bench.read_arguments(line.split(), 1)
        assert "\n" not in str(error.value), line
