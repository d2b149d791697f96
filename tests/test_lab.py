"""lab.py and plot.py: interrupted experiments; figures and tables say what the JSON says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lab
import plot
from plumbing import runs
from plumbing.config import UserError
from plumbing.rows import over, table, times_and_losses
from plumbing.runs import EXPERIMENTS

HERE = Path(__file__).parent.parent
RESULTS = sorted((HERE / "results").glob("*.json"))
SMALL = """
import sys
from pathlib import Path
import lab
import plumbing.runs

plumbing.runs.RUNS = Path(sys.argv[1], "runs")
plumbing.runs.RESULTS = lab.RESULTS = Path(sys.argv[1], "results")
SMALL = {"max_steps": 400, "eval_interval": 200, "eval_batches": 1, "checkpoint_interval": 2}
SMALL |= {"n_layer": 1, "n_embd": 16, "block_size": 8, "log_interval": 2}


def seeds_of_minibatch(seed, quick):
    return [lab.training("minibatch", seed, stages=((1, None),), **SMALL)]


lab.Experiment(("val_loss",))(seeds_of_minibatch)
sys.argv[1:] = ["seeds_of_minibatch", "--seeds", "1", "2"]
lab.main()
"""


def events(path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_killed_experiment_resumes_and_repeats_no_finished_run(tmp_path):
    command, environment = [sys.executable, "-c", SMALL, str(tmp_path)], os.environ
    first = subprocess.Popen(command, cwd=HERE, env=environment, start_new_session=True)
    deadline = time.time() + 60
    while not list(tmp_path.glob("runs/*/checkpoint-*")) and time.time() < deadline:
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)  # the ranks, too
    first.wait()
    (record,) = tmp_path.glob("runs/*/metrics.jsonl")
    assert events(record)[-1]["event"] != "end"
    again = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "2 runs, 2 to do" in again.stdout, again.stderr
    assert [row["event"] for row in events(record)].count("resume") == 1
    steps = [row["step"] for row in events(record) if row["event"] == "step"]
    assert steps == [1, *range(2, 401, 2)]
    rows = json.loads(Path(tmp_path, "results/seeds_of_minibatch.json").read_text())
    assert [row["seed"] for row in rows] == [1, 2]
    assert rows[0]["val_loss"] == events(record)[-1]["val_loss"] and rows[0]["warmup_steps"] == 128
    assert list(tmp_path.glob("runs/*/checkpoint-*")) == []
    third = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert "2 runs, 0 to do" in third.stdout


def test_runs_that_do_not_depend_on_the_seed_are_made_once():
    of = lambda name, *seeds: EXPERIMENTS[name].all_runs(seeds, False)
    assert of("tune", 1, 2, 3) == of("tune", 1) and len(of("tune", 1)) == 27
    seeds = [run.columns["seed"] for run in of("link", 1, 2)]
    assert [seeds.count(seed) for seed in (1, 2, None)] == [9, 9, 18]


def test_quick_has_short_runs_of_one_seed(monkeypatch):
    seen = []
    monkeypatch.setattr(runs, "run_experiment", lambda *args: seen.append((args, dict(lab.BASE))))
    monkeypatch.setattr(sys, "argv", "lab.py quality --quick --seeds 4 5".split())
    full = dict(lab.BASE)
    try:
        lab.main()
    finally:
        lab.BASE.clear()
        lab.BASE.update(full)
    ((name, seeds, quick, jobs), base), = seen
    assert (name, seeds, quick, jobs) == ("quality", [4], True, 1)
    assert base == full | runs.QUICK


class Axes:
    """Records what a figure would show."""

    def __init__(self):
        self.lines = []

    def plot(self, x, y, **style):
        self.lines.append((style["label"], list(x), list(y)))

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_figure_and_table_say_what_the_json_says(path):
    rows, experiment = json.loads(path.read_text()), EXPERIMENTS[path.stem]
    made_by = {line for row in rows for line in row.get("command", "").splitlines()}
    commands = [run.commands() for run in experiment.all_runs([1, 2, 3], False)]
    assert made_by == {line for lines in commands for line in lines}
    printed = table(experiment.summary(rows), experiment.columns)
    assert printed in Path(HERE, "RESULTS.md").read_text()
    panels_lines = [plot.lines_of(rows, panel) for panel in experiment.panels]
    if panels_lines:  # the committed picture
        svg = path.with_suffix(".svg").read_text()
        assert plot.checksum(panels_lines) in svg
        labels = [style["label"] for style in plot.styles_of(panels_lines).values()]
        assert [label for label in labels if f">{label}<" not in svg] == []
    for panel in experiment.panels:
        axes = Axes()
        lines = plot.lines_of(rows, panel)
        plot.draw_panel(axes, panel, lines, plot.styles_of([lines]))
        shown = [row for row in rows if panel.where.items() <= row.items()]
        in_list = lambda value: value if isinstance(value, list) else [value]
        inside = lambda x: panel.xlim[0] <= x <= panel.xlim[1]
        for label, xs, ys in axes.lines:
            assert xs and all(map(inside, xs)), label
            values = [y for row in shown for y in in_list(row[panel.y])]
            assert min(values) <= min(ys) and max(ys) <= max(values), label
        # A point of one seed is a figure of the JSON itself.
        one_seed = len({row.get("seed") for row in shown}) == 1
        for row in [row for row in shown if one_seed and inside(row[panel.x])]:
            name = plot.METHODS[row["method"]][0]
            points = [zip(x, y) for label, x, y in axes.lines if name in label.split(" = ")]
            assert (row[panel.x], row[panel.y]) in [point for line in points for point in line]


def test_a_line_is_the_mean_over_seeds_between_lowest_and_highest():
    rows = [
        {"method": "edit", "variant": "", "tau": tau, "seed": seed, "x": tau, "val_loss": loss}
        for tau, seed, loss in [(16, 1, 2.0), (4, 1, 1.0), (16, 2, 4.0), (4, 2, 1.5)]
    ]
    lines = plot.lines_of(rows, plot.Panel("x", "val_loss", ""))
    assert lines == {("edit", ""): [(4.0, 1.25, 1.0, 1.5), (16.0, 3.0, 2.0, 4.0)]}
    assert plot.lines_of(rows, plot.Panel("x", "val_loss", "", xlim=(5, 9))) == {}
    curve = lambda row: {"x": [1, 2], "val_loss": [row["seed"], 2.0]}
    curves = [row | curve(row) for row in rows if row["tau"] == 4]
    lines = plot.lines_of(curves, plot.Panel("x", "val_loss", ""))
    assert lines == {("edit", ""): [(1.0, 1.5, 1, 2), (2.0, 2.0, 2.0, 2.0)]}
    rows += [row | {"method": "averaging"} for row in rows[:1]]  # a method of the reader's own
    assert table(rows, ("val_loss",)).splitlines()[2:] == [
        "| EDiT | 16 | 3.0000 (2.0000 .. 4.0000) |", "| EDiT | 4 | 1.2500 (1.0000 .. 1.5000) |",
        "| averaging | 16 | 2.0000 |",
    ]  # fmt: skip


def test_short_runs_give_the_times_and_full_runs_the_losses():
    full = dict(method="edit", variant="", tau=16, seed=1, val_loss=2.0, command="full")
    full["warmup_steps"] = 100
    full |= dict(step_curve=[100, 420], tokens_curve=[100 * 2048, 420 * 2048])
    short = full | dict(seed=None, val_loss=9.0, link_mbps=10, command="short")
    short["step_ms_curve"] = [100, 200, 900]
    other = full | {"method": "a_edit"}  # has no short run
    joined = dict(link_mbps=10, step_ms=200, tokens_per_s=10240, seconds_curve=[0, 64], local_s=64)
    expected = [other, full | joined | {"command": "full\nshort"}]
    assert times_and_losses([full, short, other]) == expected


def test_losses_over_those_of_the_base():
    losses = {("diloco", 1): 2.0, ("edit", 1): 3.0, ("diloco", 2): 4.0, ("edit", 2): 5.0}
    rows = [
        dict(method=method, seed=seed, val_loss=loss, val_loss_curve=[8.0, loss])
        for (method, seed), loss in losses.items()
    ]
    rows = over("more", method="diloco")(rows)
    assert [row["more"] for row in rows] == [0, 0.5, 0, 0.25]
    assert rows[1]["more_curve"] == [0, 0.5]


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot.draw([], [], tmp_path / "x.svg")


def test_plot_draws_records_of_runs(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, method, first in ("a", "edit", 2.5), ("b", "edit", 3.5), ("c", "diloco", 3.0):
        evals = [dict(event="eval", step=step, tokens=9 * step, train_s=step / 2, sync_bytes=step,
                      val_loss=first / step) for step in (1, 2)]  # fmt: skip
        (tmp_path / name).mkdir()
        lines = [json.dumps(row) for row in [dict(event="config", method=method), *evals]]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    folders = [str(tmp_path / name) for name in "abc"]
    out = tmp_path / "x.svg"
    monkeypatch.setattr(sys, "argv", ["plot.py", *folders, "--out", str(out)])
    plot.main()
    texts = ["DiLoCo", *(f"EDiT, {folder}" for folder in folders[:2]), "tokens"]
    assert all(f">{text}<" in out.read_text() for text in texts)
    (tmp_path / "c" / "metrics.jsonl").write_text(lines[0])
    with pytest.raises(UserError, match="c: the run has no evaluation yet"):
        plot.main()
