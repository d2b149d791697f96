"""The laboratory: interrupted experiments; figures and tables say what the JSON says."""

import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lab.__main__ as lab
from config import UserError, explain, run_command
from lab import merge, planner, plot, rows, runs, timeline
from lab.svg import checksum
from plumbing.checkpoint import list_checkpoints
from ranks import ROOT, context, run_training

RESULTS = sorted(ROOT.glob("lab/results/*.json"))
EARLIER = {"quality", "longer", "frontier_128"}  # their experiments are gone
SHORT = dict(max_steps=300, sync_warmup_steps=150, eval_interval=75, checkpoint_interval=4)
SHORT |= dict(eval_batches=1, n_layer=1, n_embd=16, block_size=8, log_interval=2)


@pytest.fixture(autouse=True)
def small_experiment(monkeypatch):
    monkeypatch.setitem(runs.EXPERIMENTS, "small", SMALL)


def small(seed):
    yield lab.training("minibatch", seed, stages=((1, 40), (2, None)), **SHORT)


SMALL = runs.Experiment(small, ("val_loss",))


def started(folder, found, torchrun=runs.TORCHRUN):
    """A process with `python -m lab small --seeds 1` that has got as far as these files."""
    process = context.Process(target=_command, args=(folder, torchrun))
    process.start()
    while not list(folder.glob(found)):
        assert process.exitcode is None
        time.sleep(0.02)
    return process


def _command(folder, torchrun):
    sys.stderr, sys.argv = open(folder / "err", "w"), "lab small --seeds 1".split()
    runs.EXPERIMENTS["small"] = SMALL
    runs.RUNS = folder
    runs.RESULTS = folder
    runs.TORCHRUN = torchrun
    run_command("lab", runs.main)


@pytest.mark.slow
def test_killed_experiment_resumes_and_repeats_no_finished_run(tmp_path, monkeypatch, capsys):
    command = started(tmp_path, "*/checkpoint-*")
    torchrun = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text()
    command.kill()
    os.kill(int(torchrun), signal.SIGTERM)  # otherwise it trains on to the end
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    (run,) = SMALL.runs([1])
    result = tmp_path / "small.json"
    folder = os.open(run.folder, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # until the ranks have ended, too
    os.close(folder)
    assert not run.finished()
    runs.run_experiment(SMALL, [1], result)
    events = [json.loads(line) for line in open(run.folder / "metrics.jsonl")]
    # The kill, and the stop of one rank at step 40. Two ranks go on.
    resumed = [row for row in events if row["event"] == "resume"]
    assert [row["world_size"] for row in resumed] == [1, 2] and 40 <= resumed[1]["step"] < 150
    assert [row["step"] for row in events if row["event"] == "step"] == [1, *range(2, 301, 2)]
    assert list_checkpoints(run.folder) == []
    (row,) = json.loads(result.read_text())
    assert row["seed"] == 1 and row["val_loss"] == events[-1]["val_loss"]
    assert [line.split("#")[1:] for line in row["command"].splitlines()] == [[" until step 40"], []]
    _, warm, _, end = [row for row in events if row["event"] == "eval"]
    seconds, tokens = end["train_s"] - warm["train_s"], end["tokens"] - warm["tokens"]
    assert row["tokens_per_s"] == pytest.approx(tokens / seconds, rel=0.01)  # by its step rows
    assert row["local_bytes"] == end["sync_bytes"] - warm["sync_bytes"] < row["sync_bytes"]
    runs.run_experiment(SMALL, [1], result)
    assert json.loads(result.read_text()) == [row]
    (run.folder / "model.pt").unlink()
    (run.folder / "checkpoint-00000040").mkdir()
    assert run.reached(40) and not run.reached(41)
    counts = [line for line in capsys.readouterr().out.splitlines() if "to do" in line]
    assert counts == ["1 rows, 1 runs to do", "1 rows, 0 runs to do"]


def test_stopped_or_failed_run_ends_the_experiment_with_one_line(tmp_path):
    sleep = "import sys, time; open(sys.argv[-1] + '/began', 'w'); time.sleep(60)"
    stopped = started(tmp_path, "*/began", [sys.executable, "-c", sleep])
    stopped.terminate()
    stopped.join(20)
    error = "lab: error: interrupted; the same command goes on from here\n"
    assert (stopped.exitcode, (tmp_path / "err").read_text()) == (2, error)
    failed = started(tmp_path, "err", ["false"])
    failed.join(20)
    assert failed.exitcode == 2
    assert "lab: error: a run failed, see" in (tmp_path / "err").read_text()


def test_runs_that_do_not_depend_on_the_seed_are_made_once():
    tune = runs.EXPERIMENTS["tune"]
    assert tune.runs([1, 2, 3]) == tune.runs([1]) and len(tune.runs([1])) == 42


def test_runs_that_time_others_are_made_first_and_once(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(runs.Run, "execute", lambda run: made.append(run.columns["seed"]))
    monkeypatch.setattr(runs.Run, "finished", lambda run: False)
    runs.execute_all(runs.EXPERIMENTS["link"].runs([1, 2]))
    assert [made.count(seed) for seed in (1, 2, None)] == [9, 9, 18]
    assert made[:18] == [None] * 18  # a row needs the run that times it
    assert capsys.readouterr().out.startswith("36 rows, 36 runs to do")


def started_with(monkeypatch, words):
    """What main() starts, and with which BASE."""
    seen = []
    monkeypatch.setattr(runs, "BASE", dict(runs.BASE))
    monkeypatch.setattr(lab, "BASE", runs.BASE)
    monkeypatch.setattr(runs, "run_experiment", lambda *args: seen.append(args))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["lab", *words.split()])
    runs.main()
    return seen[0], runs.BASE


def test_steps_and_model_change_the_runs_and_the_name_of_the_result(monkeypatch):
    args, base = started_with(monkeypatch, "frontier --steps 2000 --model 10m --seeds 1")
    assert args[2] == runs.RESULTS / "frontier_2000_10m.json"
    first, muon, *others = args[0].runs([1])
    assert all(run.flags["max_steps"] == 2000 and run.flags["model"] == "10m" for run in others)
    assert "lr" not in first.flags and muon.flags["lr"] == 0.0045  # the preset's; as said
    assert runs.experiment_of(args[2]) is args[0]


def test_long_runs_have_a_learning_rate_of_their_own(monkeypatch):
    args, _ = started_with(monkeypatch, "frontier --steps 2000")
    rates = {run.flags["lr"] for run in args[0].runs([1]) if run.columns["variant"] == ""}
    assert rates == {0.003}


def test_too_few_steps_are_refused(monkeypatch):
    with pytest.raises(UserError, match="--steps 63: must be at least 64"):
        started_with(monkeypatch, "tau --steps 63")


def test_best_settings_are_those_that_tune_has_found():
    found = {}
    for row in json.loads((ROOT / "lab/results/tune.json").read_text()):
        found.setdefault(row["method"], []).append((row["val_loss"], row["setting"]))
    best = {method: min(settings)[1] for method, settings in found.items()}
    assert lab.BEST == best | {"a_edit": best["edit"]}
    tried = {method: list(settings) for method, settings in lab.SETTINGS.items()}
    assert tried == {method: [name for _, name in pairs] for method, pairs in found.items()}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_figure_table_and_experiment_say_what_the_json_says(path):
    found = json.loads(path.read_text())
    experiment = runs.experiment_of(path)
    if path.stem not in EARLIER:
        made_by = {line for row in found for line in row.get("command", "").splitlines()}
        made = experiment.runs([1, 2, 3])
        assert made_by <= {line for run in made for line in run.commands().splitlines()}

    found = experiment.combine(found)
    assert runs.page(experiment, path, found) == path.with_suffix(".md").read_text()
    panels_lines = [plot.lines_of(found, panel) for panel in experiment.panels]
    if panels_lines:
        svg = path.with_suffix(".svg").read_text()
        assert checksum([list(lines.values()) for lines in panels_lines]) in svg
        styles = plot.styles_of(panels_lines, experiment.panels[0].frontier)
        assert all(f">{style['label']}<" in svg for style in styles.values() if style["label"])


def test_pictures_of_the_timelines_are_drawn_from_their_rows():
    found = json.loads((ROOT / "lab/results/timeline.json").read_text())
    for name, variant in ("timeline", ""), ("overlap", "overlap"):
        shown = [row["spans"] for row in found if row["variant"] == variant]
        assert checksum(shown) in (ROOT / f"lab/results/{name}.svg").read_text()


def test_each_row_of_the_results_stands_in_a_table_of_the_laboratory():
    tables = [path.read_text().splitlines() for path in ROOT.glob("lab/results/**/*.md")]
    known = {line for lines in tables for line in lines}
    lines = (ROOT / "RESULTS.md").read_text().splitlines()
    shown = []
    for line, following in zip(lines, [*lines[1:], ""]):
        if line.startswith("| ") and not line.startswith("| ---"):
            if not following.startswith("| ---"):  # a header
                shown.append(line)
    assert len(shown) > 20 and [line for line in shown if line not in known] == []


def test_a_line_is_the_mean_over_seeds_between_lowest_and_highest():
    pytest.importorskip("matplotlib")
    found = [
        {"method": "edit", "variant": "", "tau": tau, "seed": seed, "x": tau, "val_loss": loss}
        for tau, seed, loss in [(16, 1, 2.0), (4, 1, 1.0), (16, 2, 4.0), (4, 2, 1.5)]
    ]
    panel, shown = plot.Panel("x", "val_loss", ""), []
    lines = plot.lines_of(found, panel)
    assert lines == {("edit", ""): [(4.0, 1.25, 1.0, 1.5), (16.0, 3.0, 2.0, 4.0)]}
    show = lambda *args, **style: shown.append((style.get("label"), *args))
    axes = SimpleNamespace(plot=show, vlines=show, set=lambda **_: 0, grid=lambda **_: 0)
    axes.xaxis = SimpleNamespace(set_major_formatter=lambda _: 0)
    plot.draw_panel(axes, panel, lines, plot.styles_of([lines]))
    assert shown == [
        ("EDiT", (4.0, 16.0), (1.25, 3.0)), (None, (4.0, 16.0), (1.0, 2.0), (1.5, 4.0)),
    ]  # fmt: skip
    assert plot.lines_of(found, plot.Panel("x", "val_loss", "", first=20)) == {}
    assert plot.lines_of(found, plot.Panel("x", "val_loss", "", where={"tau": 5})) == {}
    seeds = [found[1], found[3]]
    curves = [row | {"x": [1, 2], "val_loss": [row["seed"], 2.0]} for row in seeds]
    assert plot.lines_of(curves, panel) == {("edit", ""): [(1, 1.5, 1, 2), (2, 2.0, 2.0, 2.0)]}
    found += [row | {"method": "averaging"} for row in found[:1]]  # a method of the reader's own
    assert rows.table(found, ("val_loss",)).splitlines()[2:] == [
        "| EDiT | 16 | 3.0000 (2.0000 .. 4.0000) | 2 |",
        "| EDiT | 4 | 1.2500 (1.0000 .. 1.5000) | 2 |",
        "| averaging | 16 | 2.0000 | 1 |",
    ]  # fmt: skip


def test_line_of_the_frontier_joins_the_points_that_no_other_beats():
    lines = {
        ("edit", ""): [(1, 4.0, 4.0, 4.0), (3, 2.0, 2.0, 2.0)],
        ("co2", ""): [(2, 4.0, 4.0, 4.0), (4, 1.5, 1.5, 1.5), (5, 1.5, 1.5, 1.5)],
    }
    assert plot.best_points(lines) == [(1, 4.0), (3, 2.0), (4, 1.5)]


def test_picture_of_a_frontier_names_at_most_seven_methods():
    lines = {(method, variant): [] for method in rows.METHODS for variant in ("", "Muon")}
    styles = plot.styles_of([lines], frontier=True)
    named = {method for method, variant in lines if styles[method, variant]["label"]}
    assert named == set(plot.NAMED) and len(named) == 7
    assert all(style["label"] for style in plot.styles_of([lines]).values())


def test_short_runs_give_the_times_and_full_runs_the_losses(monkeypatch):
    curves = dict(step=[100, 420], tokens=[204800, 860160], train_s=[1, 9], sync_bytes=[7, 9])
    first = dict(step=1, tokens=2048, train_s=0.5, sync_bytes=1)
    steps = [first | dict(step_ms=ms) for ms in (9000, 900, 100, 200, 900)]
    steps[1:] = [step | dict(step=100, tokens=204800, train_s=1) for step in steps[1:]]
    monkeypatch.setattr(runs, "read_run", lambda folder: curves | dict(val_loss=[3, 2], steps=steps))
    short = runs.Run({}, dict(method="edit"), ((4, None),))
    full = lambda **more: runs.Run({}, dict(method="edit", sync_warmup_steps=100), ((4, None),), **more)
    row, alone = full(timed_by=short).row(), full().row()
    expected = dict(step_ms=200, tokens_per_s=10240, seconds_curve=[0, 64], local_s=64)
    command = alone["command"] + "\n" + short.commands()
    assert row == alone | expected | dict(command=command) and alone["tokens_per_s"] == 655360 / 8


def test_losses_over_those_of_the_base():
    losses = {("diloco", 1): 2.0, ("edit", 1): 3.0, ("diloco", 2): 4.0, ("edit", 2): 5.0}
    found = [dict(method=m, seed=seed, val_loss=loss) for (m, seed), loss in losses.items()]
    pairs = rows.with_base(found, ["seed"], method="diloco")
    assert [rows.distance(row, base) for row, base in pairs] == [0, 0.5, 0, 0.25]
    assert [row for row, _ in pairs] == found


def test_a_sick_run_is_compared_with_the_healthy_one_of_its_kind():
    found = []
    for steps, aggregate, healthy, sick in (272, None, 2.0, 3.0), (448, None, 1.0, 1.1), (448, "median", 4.0, 5.0):
        case = dict(method="x", seed=1, steps=steps, aggregate=aggregate)
        found.append(case | dict(disturbance="none", val_loss=healthy))
        found.append(case | dict(disturbance="sick", val_loss=sick))
    excess = [row["excess"] for row in lab.over_undisturbed(found)]
    assert excess == pytest.approx([0, 0.5, 0, 0.1, 0, 0.25])


def test_counts_after_a_warmup_go_by_the_last_row_within_it(monkeypatch):
    """A step sends 7 bytes in the warm-up and takes 0.5 s."""
    record = dict(step=[4, 8], sync_bytes=[30, 62], tokens=[40, 80], train_s=[2.5, 4.5])
    record["val_loss"] = [2.0, 1.0]
    names = ("step", "sync_bytes", "tokens", "train_s")
    steps = (1, 7, 10, 0.75), (3, 21, 30, 1.5), (6, 42, 60, 3.0)
    record["steps"] = [dict(zip(names, row)) for row in steps]
    monkeypatch.setattr(runs, "read_run", lambda folder: record)
    expected = {  # warm-up -> bytes, tokens and seconds after it
        0: (62, 80, 4.5),
        1: (62 - 7, 80 - 10, 4.5 - 0.75),
        5: (62 - 35, 80 - 50, 4.5 - 2.5),  # as in the first 3 steps
        6: (62 - 42, 80 - 60, 4.5 - 3.0),
    }
    for warmup, (sent, tokens, seconds) in expected.items():
        after = rows.after_warmup(record, warmup)
        assert (after["sync_bytes"], after["tokens"], after["train_s"]) == (sent, tokens, seconds)
        row = runs.Run({}, {"method": "edit", "sync_warmup_steps": warmup}, ()).row()
        assert (row["local_bytes"], row["tokens_per_s"]) == (sent, tokens / seconds)


def losses_and_bytes(cases):
    """Rows: method, seed, loss, bytes."""
    names = ("method", "seed", "val_loss", "sync_bytes")
    return [dict(zip(names, case)) | {"variant": ""} for case in cases]


def test_bytes_below_those_of_minibatch():
    cases = [("minibatch", 1, 2.0, 90), ("edit", 1, 2.0, 9), ("minibatch", 2, 2.0, 60), ("edit", 2, 2.0, 12)]
    found = losses_and_bytes(cases)
    muon = found[0] | {"variant": "Muon", "val_loss": 1.0, "sync_bytes": 45}  # is no base
    assert [row["fewer_bytes"] for row in rows.beside_minibatch([*found, muon])] == [1, 10, 1, 5, 2]
    assert muon["over_minibatch"] == -0.5


def test_standard_error_is_that_of_the_differences_seed_by_seed():
    cases = [("minibatch", 1, 2.0, 1), ("edit", 1, 2.2, 1), ("minibatch", 2, 1.0, 1), ("edit", 2, 1.2, 1)]
    found = rows.beside_minibatch(losses_and_bytes(cases))
    assert rows.table(found, ("over_minibatch",)).splitlines() == [
        "| method | over mini-batch | standard error | seeds |",
        "| --- | --- | --- | --- |",
        "| mini-batch | +0.0% | 0.00% | 2 |",
        "| EDiT | +15.0% (+10.0% .. +20.0%) | 5.00% | 2 |",
    ]
    assert rows.table(found[:2], ("over_minibatch",)).splitlines()[-1] == "| EDiT | +10.0% |  | 1 |"


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        plot.draw([], [], tmp_path / "x.svg")
    assert explain(caught.value) == (2, "this needs a package: pip install matplotlib")


def test_plot_draws_records_of_runs(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    seen = []
    warm = json.dumps(dict(event="step", step=4, sync_bytes=2, tokens=4, train_s=1)) + "\n"
    for k, (name, method) in enumerate(zip("abd", ("edit", "edit", "diloco"))):
        (tmp_path / name).mkdir()
        config = json.dumps({"event": "config", "sync_warmup_steps": 4, "method": method})
        curve = dict.fromkeys(rows.CURVES, k)
        text = config + "\n" + warm + json.dumps({"event": "eval"} | curve)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    draw = lambda rows, panels, path: seen.append((rows, panels)) or drawn(rows, panels, path)
    drawn = plot.draw
    monkeypatch.setattr(plot, "draw", draw)
    monkeypatch.setattr(sys, "argv", ["plot.py", "a", "b", "d", "--out", "x.png"])
    plot.main()
    texts = ["DiLoCo", "EDiT, a", "EDiT, b", "tokens"]
    assert all(f">{text}<" in Path("x.svg").read_text() for text in texts)
    ((found, panels),) = seen
    assert plot.lines_of(found, panels[1])["edit", "b"] == [(1, 1, 1, 1)]
    assert [row["sync_bytes"] for row in found] == [[0], [1], [2]]


CONFIG = dict(event="config", method="edit", sync_warmup_steps=4)
STEP = dict(event="step", step=4, sync_bytes=2, tokens=4, train_s=1.0, loss=None)
EVALUATION = dict(event="eval", step=8, sync_bytes=3, tokens=8, train_s=2.0, val_loss=3.0)
NOT_A_RECORD, NOT_FINITE = "metrics.jsonl is not the record of a run", "validation loss .* finite"
RECORDS = [  # rows, what the line must say
    ([CONFIG, STEP], "the run has no evaluation yet"),
    ([CONFIG, STEP, EVALUATION | dict(val_loss=None)], NOT_FINITE),
    ([STEP, EVALUATION], NOT_A_RECORD),
    ([dict(event="config"), STEP, EVALUATION], NOT_A_RECORD),
    ([CONFIG, STEP, EVALUATION, 5], NOT_A_RECORD),
    ([CONFIG, STEP | dict(event=[]), EVALUATION], NOT_A_RECORD),
    ([CONFIG, STEP, dict(event="eval")], NOT_A_RECORD),
    ([CONFIG, STEP, EVALUATION | dict(val_loss="x")], NOT_A_RECORD),
    ([CONFIG, STEP, EVALUATION | dict(tokens="x")], NOT_A_RECORD),
    ([CONFIG, STEP | dict(train_s=[]), EVALUATION], NOT_A_RECORD),
    ([CONFIG, STEP | dict(step=None), EVALUATION], NOT_A_RECORD),
]


TEXTS = [("\n".join(map(json.dumps, found)), message) for found, message in RECORDS]
TEXTS += [("{", NOT_A_RECORD), ("[" * 10**5, NOT_A_RECORD)]


@pytest.mark.parametrize("text, message", TEXTS, ids=range(len(TEXTS)))
def test_broken_records_are_refused_in_one_line(text, message, monkeypatch, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text)
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path)])
    with pytest.raises(UserError, match=message) as caught:
        plot.main()
    assert "\n" not in str(caught.value)


SPANS = [["step", k, k + 0.5] for k in range(4)]
SPOILED = [[["step", 0.7, None]], [["wait for link", 1.0, None]], [None], ["ab"], [["step", 9]]]
SPOILED = [SPANS + spans for spans in [*SPOILED, [[["step"], 1, 2]]]]
SPOILED += [[["step", k, k] for k in range(4)], None, 5]
TIMELINES = ["[]", "{", "[" * 10**5]
TIMELINES += [json.dumps(dict(replica=0, spans=spans)) for spans in SPOILED]
TIMELINES += [json.dumps(dict(replica=replica, spans=SPANS)) for replica in (1, None, [])]


@pytest.mark.parametrize("text", TIMELINES, ids=range(len(TIMELINES)))
def test_broken_timelines_are_refused_in_one_line(text, tmp_path):
    """Of rounds of one step."""
    record = [CONFIG, *[dict(event="sync", steps=[1])] * 4]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, record)))
    (tmp_path / "timeline-0.json").write_text(json.dumps(dict(replica=0, spans=SPANS)))
    assert timeline.read_timeline(tmp_path)[0]["computing"] == 1.0
    (tmp_path / "timeline-0.json").write_text(text)
    with pytest.raises(UserError, match="its timeline is damaged") as caught:
        timeline.read_timeline(tmp_path)
    assert "\n" not in str(caught.value)


def test_timeline_counts_whole_rounds_and_draws_what_a_run_has_recorded(tmp_path, monkeypatch):
    """Worked out by hand: rounds of 2 steps, of 1.4 and 0.5 s (and 0.1 s of evaluation); in each the
    second step waits 0.3 s for the other replica and 0.1 s for the link. In the first and in the
    last round the other step waits, too."""
    record = [{"event": "config", "method": "diloco"}]
    record += [{"event": "sync", "steps": [2, 2]} for _ in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, record)))
    for replica in (0, 1):
        spans = []
        for k in (replica / 4 + start for start in (0, 2, 4, 6)):
            spans += [("step", 100.0 + k, 101.4 + k), ("step", 101.4 + k, 101.9 + k)]
            if replica == 0:
                spans += [("wait for others", 101.5 + k, 101.8 + k)]
                spans += [("wait for link", 101.8 + k, 101.9 + k)]
                spans += [("link", 101.4 + k, 101.7 + k), ("link", 101.7 + k, 101.9 + k)]
        spans += [("wait for link", 100.5, 100.9), ("wait for link", 106.5, 106.9)]
        text = json.dumps({"replica": replica, "spans": spans})
        (tmp_path / f"timeline-{replica}.json").write_text(text)
    first, second = timeline.read_timeline(tmp_path)
    assert (first["computing"], second["computing"]) == (pytest.approx(1 - 0.8 / 3.8), 1.0)
    # round 2 begins at 0
    waits = [(-0.5, -0.2), (1.5, 1.8), (3.5, 3.8), (5.5, 5.8)]
    assert first["spans"]["wait for others"] == waits
    assert first["whole_s"] == pytest.approx(3.9)  # rounds 2 and 3, the evaluation between them
    assert first["spans"]["step"][1:4] == [(-0.6, -0.1), (0.0, 1.4), (1.4, 1.9)]
    assert first["spans"]["link"][:3] == [(-0.6, -0.3), (-0.3, -0.1), (1.4, 1.7)]
    sent = [(-0.5, 0.05), (0.6, 0.9), (0.95, 1.1), (1.5, 1.6)]
    assert timeline.transfers({"spans": {"link": sent}}) == sent[1:3]  # of one sync
    text = (tmp_path / "metrics.jsonl").read_text()
    earlier = json.dumps({"event": "sync", "steps": [9, 9]})  # before a resume: no spans of it
    (tmp_path / "metrics.jsonl").write_text(text.replace("\n", f"\n{earlier}\n", 1))
    assert timeline.read_timeline(tmp_path)[0] == first
    (tmp_path / "timeline-1.json").write_text("{")
    with pytest.raises(UserError, match="its timeline is damaged"):
        timeline.read_timeline(tmp_path)
    (tmp_path / "timeline-0.json").unlink()
    (tmp_path / "timeline-1.json").unlink()
    with pytest.raises(UserError, match="no timeline; train with --timeline"):
        timeline.read_timeline(tmp_path)


def test_timeline_of_a_run_is_predicted_and_drawn(tmp_path, corpus_folder, monkeypatch, capsys):
    began = time.time()
    options = dict(method="diloco", tau=2, sync_warmup_steps=1, max_steps=9, timeline=True)
    run_training(2, corpus_folder, out_dir=tmp_path, link_mbps=1, dtype="fp32", **options)
    spans = json.loads((tmp_path / "timeline-0.json").read_text())["spans"]
    assert all(began < begin <= end for _, begin, end in spans)  # on one scale for all machines
    slow = timeline.read_timeline(tmp_path)
    assert len(slow) == 2 and all(0 < row["computing"] < 1 for row in slow)
    assert all(len(row["spans"]["link"]) >= 4 for row in slow)
    capsys.readouterr()
    planner.compare(tmp_path)
    printed = capsys.readouterr().out
    assert re.findall(r"replica (\d): measured .*%, predicted .*%\n", printed) == ["0", "1"]
    run_training(4, corpus_folder, out_dir=tmp_path / "fast", **options)  # no link, four replicas
    rows_ = slow + timeline.read_timeline(tmp_path / "fast")
    assert len(rows_) == 6
    pytest.importorskip("matplotlib")
    out = str(tmp_path / "x.svg")
    monkeypatch.setattr(sys, "argv", ["plot.py", "--timeline", *map(str, (tmp_path, tmp_path / "fast")), "--out", out])
    plot.main()
    shown = [row["spans"] for row in rows_]
    assert ">DiLoCo, replica 3<" in Path(out).read_text()
    assert checksum(shown) in Path(out).read_text()

    timeline.draw_overlap(slow, out)
    assert all(f">{text}<" in Path(out).read_text() for text in ("DiLoCo, replica 0", "0", "3"))


def keep_apart(method, model, mesh):
    method.__class__ = merge.Apart


def test_replicas_that_train_apart_are_judged_one_by_one_and_together(tmp_path, corpus_folder):
    options = dict(method="post_local_sgd", tau=10**9, sync_warmup_steps=2, max_steps=30, n_layer=1)
    run = run_training(2, corpus_folder, keep_apart, tmp_path, **options)
    found = merge.judge(tmp_path, 1, str(corpus_folder))
    assert found["ensemble"] < found["alone"]  # -log of a mean is below the mean of -logs
    first = tmp_path / "replica-0.pt"
    (tmp_path / "replica-1.pt").write_bytes(first.read_bytes())
    twins = merge.judge(tmp_path, 1, str(corpus_folder))
    assert twins["ensemble"] == pytest.approx(twins["alone"], rel=1e-6)
    own = torch.load(first, weights_only=True)
    assert any((own[name] != value).any() for name, value in run.model.items())  # of the merged
    assert 0 < merge.judge(tmp_path, 1)["ensemble"] < 10  # on the built-in corpus
