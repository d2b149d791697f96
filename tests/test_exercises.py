"""Slow: the commands of EXERCISES.md run as written, and its answers are true."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

import edit
from lab import planner
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
    assert rows(folder, "ex2", "step")[0]["shard_bytes"] == 4_955_148
    alone, shard, edit_shard = re.findall(r"memory  (.*)", printed[3])
    assert "parameters 25.81 GB, gradient 25.81 GB, AdamW 51.63 GB, two" in alone
    assert "parameters 3226.6 MB, gradient 3226.6 MB, AdamW 6453.2 MB, two" in shard
    assert "anchor 3226.6 MB, momentum 3226.6 MB" in edit_shard
    assert all("two whole layers 806.4 MB" in text for text in (alone, shard, edit_shard))
    losses = [[row["loss"] for row in rows(folder, name, "step")][:3] for name in ("ex4", "ex4b")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert {row["sync_bytes"] for row in rows(folder, "ex4", "sync")} == {3_675_660}
    sick = rows(folder, "ex7", "sync")[1]
    assert sick["weight"][1] < 1e-6 and sick["dropped"] == [0] * 4
    assert sick["pseudo_grad_norm"][1] > 10 * sick["pseudo_grad_norm"][0]
    assert "tau 8/4" in printed[9]
    assert all(row["steps"] == [8, 4] for row in rows(folder, "ex9", "sync"))
    waits = [rows(folder, name, "sync")[1]["wait_link_ms"] for name in ("ex10", "ex10b")]
    assert 450 < waits[0] < 560 and waits[1] < 100
    plain, outer, neutral = (rows(folder, f"ex12{x}", "end")[0]["val_loss"] for x in ("", "b", "c"))
    assert neutral == pytest.approx(plain, rel=1e-3) and outer > 1.01 * plain


def test_answers_on_paper_and_on_the_page_are_the_planners():
    large = planner.Model(7e9, 32, 3.0)
    for tau, share in {1: 0.97, 16: 0.70, 128: 0.23}.items():
        assert round(1 - planner.utilization(planner.Schedule(tau), large, 1.0), 2) == share

    model, plans = planner.MORE_MODELS["124m"], planner.schedules(16)
    forward_s = model.step_s / 3 / model.layers
    for c in 0.5, 1.0, 4.0:  # in forwards of a layer
        gbit_per_s = planner.sent_bytes(plans["edit"], model) * 8 / model.layers / (c * forward_s) / 1e9
        busy_s = 16 * model.step_s
        waits = [
            planner.round_seconds(plans[name], model, gbit_per_s) - busy_s for name in ("diloco", "edit")
        ]
        L = model.layers
        expected = [L * c, max(c, L * c - (L - 1))]
        assert waits == pytest.approx([wait * forward_s for wait in expected], rel=1e-6)

    links = [10 ** (k / 10) for k in range(-30, 31)]
    for method, rate in {"minibatch": 6.3, "edit": 4.0, "one_bit_edit": 0.25}.items():
        busy = (g for g in links if planner.utilization(plans[method], model, g) >= 0.95)
        assert next(busy) == pytest.approx(rate, rel=0.01)
    for method, tau in {"edit": 74, "one_bit_edit": 4}.items():
        used = [
            planner.utilization(planner.schedules(t)[method], planner.MORE_MODELS["7b"], 10)
            for t in (tau - 1, tau)
        ]
        assert used[0] < 0.8 <= used[1]
    for norms, weight in ((1.0, 3.0), 0.04), ((10.0, 30.0), 0.0):
        column = torch.tensor([norms[0]] * 3 + [norms[1]])[:, None]
        found = edit.replica_weights(column, torch.zeros_like(column, dtype=torch.bool))
        assert round(found[3].item(), 2) == weight


def test_wrong_weights_turn_red(copy):
    folder, _ = copy
    text = (folder / "edit.py").read_text()
    wrong = text.replace("return weights.masked_fill(flagged, 0.0)", "return torch.zeros_like(norms)")
    assert wrong != text
    (folder / "edit.py").write_text(wrong)
    run(folder, "python -m pytest -x tests/test_edit.py", code=1)
    (folder / "edit.py").write_text(text)


def test_averaging_in_every_second_round_is_averaging_in_rounds_twice_as_long(copy):
    folder, _ = copy
    (method,) = re.findall(r"```python\n(.*?)```", TASKS[11], re.S)
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
