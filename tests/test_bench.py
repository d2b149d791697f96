"""The benchmark runs from end to end. What it measures is for those who read it: no test depends on
times."""

import json
import os
import subprocess
import sys

import pytest

from ranks import ROOT

SMALL = "--n_layer 1 --n_head 1 --n_embd 16 --block_size 8 --batch_size 1".split()
SMALL += "--repeats 1 --steps 1 --tau 2".split()
PARTS = ["--parts", "step,sync,round,memory"]  # growth is many of step, and takes minutes


def bench(ranks, *flags):
    command = [sys.executable]
    if ranks > 1:
        command += "-m torch.distributed.run --standalone --nproc_per_node".split()
        command.append(str(ranks))
    done = subprocess.run(
        [*command, "bench.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_parts_run_and_write_what_they_print(tmp_path):
    file = tmp_path / "bench.json"
    flags = [*SMALL, *PARTS, "--shards", "2", "--dtype", "fp32"]
    code, out, err = bench(2, *flags, "--json", str(file))
    assert (code, err) == (0, "")
    parts = json.loads(file.read_text())["parts"]
    assert set(parts) == {"step", "sync", "round", "memory"} and all(parts.values())
    for part, rows in parts.items():
        assert part in out and all(value is not None for row in rows for value in row.values())
    assert [row["method"] for row in parts["sync"]] == ["edit", "diloco"]


def test_one_rank_is_compared_with_a_plain_loop(tmp_path):
    file = tmp_path / "bench.json"
    code, _, err = bench(1, *SMALL, "--dtype", "fp32", "--json", str(file))
    assert (code, err) == (0, "")
    parts = json.loads(file.read_text())["parts"]
    assert set(parts) == {"step", "round", "memory"} and parts["step"][0]["over_plain"] > 0


@pytest.mark.parametrize(
    "flags", ["--parts all", "--parts growth", "--shards 3", "--repeats 0", "--widht 3"]
)
def test_wrong_flags_are_one_line(flags):
    code, out, err = bench(1, *flags.split())
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and "bench.py: error: " in err
