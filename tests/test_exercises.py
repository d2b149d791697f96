"""Slow: the commands of EXERCISES.md run as written, and its answers are true."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from ranks import ROOT

pytestmark = pytest.mark.slow
TEXT = (ROOT / "EXERCISES.md").read_text()
TASKS = {int(task.split(".")[0]): task for task in re.split(r"\n\*\*(?=\d)", TEXT)[1:]}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": ""}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project, in which all commands have run: task -> what it printed."""
    folder, printed = tmp_path_factory.mktemp("copy") / "project", {}
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "out", "__pycache__"))
    for number, task in TASKS.items():
        commands = re.findall(r"```sh\n(.*?)```", task, re.S)
        printed[number] = "".join(run(folder, line) for block in commands for line in block.splitlines())
    return folder, printed


def run(folder, command, code=0) -> str:
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    command = command.replace("python ", f"{sys.executable} ", 1) if command[0] == "p" else command
    done = subprocess.run(
        command, shell=True, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == code, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def rows(folder, name, event) -> list:
    lines = (folder / "out" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]


def test_answers_are_true(copy):
    folder, printed = copy
    assert "918,912 parameters" in printed[1]
    assert rows(folder, "ex2", "step")[0]["shard_bytes"] == 4_955_148
    losses = [[row["loss"] for row in rows(folder, name, "step")][:3] for name in ("ex3", "ex3b")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert {row["sync_bytes"] for row in rows(folder, "ex3", "sync")} == {3_675_660}
    sick = rows(folder, "ex6", "sync")[1]
    assert sick["weight"][1] < 1e-6 and sick["dropped"] == [0] * 4
    assert sick["pseudo_grad_norm"][1] > 10 * sick["pseudo_grad_norm"][0]
    assert all(row["steps"] == [8, 4] for row in rows(folder, "ex7", "sync"))
    waits = [rows(folder, name, "sync")[1]["wait_link_ms"] for name in ("ex8", "ex8b")]
    assert 450 < waits[0] < 560 and waits[1] < 100
    assert "2 replicas x 1 shards -> 1 x 1" in printed[9]
    plain, outer, neutral = (rows(folder, f"ex11{x}", "end")[0]["val_loss"] for x in ("", "b", "c"))
    assert neutral == pytest.approx(plain, rel=1e-3) and outer > 1.01 * plain


def test_a_wrong_clip_turns_red(copy):
    folder, _ = copy
    text = (folder / "edit.py").read_text()
    wrong = text.replace("return (phi / (norm + 1e-6)).clamp(max=1.0)", "return torch.ones_like(norm)")
    assert wrong != text
    (folder / "edit.py").write_text(wrong)
    run(folder, "python -m pytest -x tests/test_edit.py", code=1)
    (folder / "edit.py").write_text(text)


def test_averaging_in_every_second_round_is_averaging_in_rounds_twice_as_long(copy):
    folder, _ = copy
    (method,) = re.findall(r"```python\n(.*?)```", TASKS[10], re.S)
    (folder / "second.py").write_text(method)
    text = (folder / "train.py").read_text()
    text = text.replace("METHODS = {", 'from second import EverySecond\nMETHODS = {"second": EverySecond, ')
    (folder / "train.py").write_text(text)
    common = "torchrun --standalone --nproc_per_node 2 train.py --device cpu --dtype fp32 --max_steps 48"
    common += " --sync_warmup_steps 0 --log_interval 1 --eval_interval 16 --eval_batches 1 --overwrite"
    run(folder, f"{common} --method second --tau 8 --out_dir out/a")
    run(folder, f"{common} --method post_local_sgd --tau 16 --out_dir out/b")
    for event, key in ("step", "loss"), ("eval", "val_loss"):
        values = [[row[key] for row in rows(folder, name, event)] for name in ("a", "b")]
        assert len(values[0]) > 2 and values[0] == pytest.approx(values[1], rel=1e-6)
