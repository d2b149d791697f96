"""The laboratory: interrupted experiments, rows, tables, pictures, records of runs."""

import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import lab.__main__ as lab
from config import UserError, explain, run_command
from lab import planner, plot, rows, runs, timeline
from lab.svg import checksum
from plumbing.checkpoint import list_checkpoints
from ranks import context, run_training


def json_lines(found) -> str:
    return "\n".join(map(json.dumps, found))


def read_lines(path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- runs and experiments ----

SHORT = {
    "max_steps": 300,
    "sync_warmup_steps": 150,
    "eval_interval": 75,
    "eval_batches": 1,
    "checkpoint_interval": 4,
    "log_interval": 2,
    "n_layer": 1,
    "n_embd": 16,
    "block_size": 8,
}


def small(seed):
    yield lab.training("minibatch", seed, ranks=2, **SHORT)


SMALL = runs.Experiment(small, ("val_loss",))


@pytest.fixture(autouse=True)
def small_experiment(monkeypatch):
    monkeypatch.setitem(runs.EXPERIMENTS, "small", SMALL)


def started(folder, found, torchrun=runs.TORCHRUN):
    """A process with `python -m lab small --seeds 1` that has got as far as these files."""
    process = context.Process(target=_command, args=(folder, torchrun))
    process.start()
    while not list(folder.glob(found)):
        assert process.exitcode is None
        time.sleep(0.02)
    return process


def _command(folder, torchrun):
    sys.stderr = open(folder / "err", "w")
    sys.argv = "lab small --seeds 1".split()
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
    folder = os.open(run.folder, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # until the ranks have ended, too
    os.close(folder)
    assert not run.finished()

    result = tmp_path / "small.json"
    runs.run_experiment(SMALL, [1], result)
    events = read_lines(run.folder / "metrics.jsonl")
    (resumed,) = [row for row in events if row["event"] == "resume"]
    assert 4 <= resumed["step"] < 300
    steps = [row["step"] for row in events if row["event"] == "step"]
    assert steps == [1, *range(2, 301, 2)]
    assert list_checkpoints(run.folder) == []

    (row,) = json.loads(result.read_text())
    assert row["seed"] == 1
    assert row["val_loss"] == events[-1]["val_loss"]
    _, warm, _, end = [row for row in events if row["event"] == "eval"]
    seconds = end["train_s"] - warm["train_s"]
    tokens = end["tokens"] - warm["tokens"]
    assert row["tokens_per_s"] == pytest.approx(tokens / seconds, rel=0.01)  # by its step rows
    assert row["local_bytes"] == end["sync_bytes"] - warm["sync_bytes"]
    assert row["sync_bytes"] == end["sync_bytes"]

    result.unlink()
    runs.run_experiment(SMALL, [1], result)
    assert json.loads(result.read_text()) == [row]
    printed = capsys.readouterr().out.splitlines()
    counts = [line for line in printed if "to do" in line]
    assert counts == ["1 rows, 1 runs to do", "1 rows, 0 runs to do"]


def test_stopped_or_failed_run_ends_the_experiment_with_one_line(tmp_path):
    sleep = "import sys, time; open(sys.argv[-1] + '/began', 'w'); time.sleep(6000)"
    stopped = started(tmp_path, "*/began", [sys.executable, "-c", sleep])
    stopped.terminate()
    stopped.join(300)
    assert stopped.exitcode == 2
    error = "lab: error: interrupted; the same command goes on from here\n"
    assert (tmp_path / "err").read_text() == error

    failed = started(tmp_path, "err", ["false"])
    failed.join(300)
    assert failed.exitcode == 2
    assert "lab: error: a run failed, see" in (tmp_path / "err").read_text()


def two_taus(seed):
    for tau in (4, 8):
        yield lab.training("diloco", seed, tau)
    yield lab.training("diloco", seed, 4, "again")  # the same command as another row


@pytest.fixture
def executed(monkeypatch):
    """(tau, seed) of the runs that are executed; none of them is really made."""
    made = []

    def record(run):
        made.append((run.columns["tau"], run.columns["seed"]))

    monkeypatch.setattr(runs.Run, "execute", record)
    monkeypatch.setattr(runs.Run, "finished", lambda run: False)
    monkeypatch.setattr(runs.Run, "results", lambda run: [{"val_loss": 2.0}])
    return made


def test_rows_of_the_json_file_are_kept_and_not_run_again(tmp_path, executed):
    path = tmp_path / "two.json"
    experiment = runs.Experiment(two_taus, ("val_loss",))
    runs.run_experiment(experiment, [1], path)
    assert executed == [(4, 1), (8, 1)]
    first = json.loads(path.read_text())
    assert [row["variant"] for row in first] == ["", "", "again"]

    executed.clear()
    runs.run_experiment(experiment, [2], path)  # rows of another seed stay
    assert executed == [(4, 2), (8, 2)]
    both = json.loads(path.read_text())
    assert both[:3] == first
    assert [row["seed"] for row in both] == [1, 1, 1, 2, 2, 2]

    executed.clear()
    both[1]["command"] += " --lr 1"  # a row that the experiment no longer makes
    both[3]["val_loss"] = 3.0  # as measured on another machine
    both[5]["val_loss"] = 3.0
    path.write_text(json.dumps(both))
    runs.run_experiment(experiment, [1, 2], path)
    assert executed == [(8, 1)]
    found = json.loads(path.read_text())
    assert [row["command"] for row in found[:3]] == [row["command"] for row in first]
    assert [row["val_loss"] for row in found] == [2.0, 2.0, 2.0, 3.0, 2.0, 3.0]


def test_rows_of_replicas_are_kept_too(tmp_path, executed):
    path = tmp_path / "timeline.json"
    experiment = runs.EXPERIMENTS["timeline"]
    made = experiment.runs([1])[:2]
    earlier = []
    for run in made:
        for replica in (0, 1):
            row = {"replica": replica, "computing": 0.5, "command": run.command()}
            earlier.append(run.columns | row)
    path.write_text(json.dumps([*earlier, earlier[0] | {"command": "gone"}]))
    runs.run_experiment(runs.Experiment(lambda seed: made, ("computing",)), [1], path)
    assert executed == []
    assert json.loads(path.read_text()) == earlier


def test_runs_that_do_not_depend_on_the_seed_are_made_once():
    tune = runs.EXPERIMENTS["tune"]
    assert tune.runs([1, 2, 3]) == tune.runs([1])
    assert len(tune.runs([1])) == 3 * (4 * 2 * 6 + 7)


def started_with(monkeypatch, words):
    """What main() starts."""
    seen = []
    monkeypatch.setattr(runs, "BASE", dict(runs.BASE))
    monkeypatch.setattr(lab, "BASE", runs.BASE)
    monkeypatch.setattr(runs, "run_experiment", lambda *args: seen.append(args))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["lab", *words.split()])
    runs.main()
    return seen[0]


def test_steps_model_and_gpu_change_the_runs_and_the_name_of_the_result(monkeypatch):
    words = "frontier --steps 2000 --model 10m --gpu --seeds 1"
    experiment, seeds, path = started_with(monkeypatch, words)
    assert seeds == [1]
    assert path == runs.RESULTS / "frontier_2000_10m_gpu.json"
    assert runs.experiment_of(path) is experiment
    first, muon, *others = experiment.runs([1])
    assert first.flags["lr"] == 0.0005
    assert "lr" not in muon.flags  # the preset has one
    assert muon.flags["muon_lr"] == 0.01
    assert len(others) == len(lab.POINTS)
    assert {run.flags["max_steps"] for run in (first, muon, *others)} == {2000}
    assert {run.flags["model"] for run in (first, muon, *others)} == {"10m"}
    assert {run.flags["device"] for run in (first, muon, *others)} == {"cuda"}


def test_too_few_steps_are_refused(monkeypatch):
    with pytest.raises(UserError, match="--steps 64: must be at least 65"):
        started_with(monkeypatch, "tau --steps 64")


def test_a_run_has_the_best_outer_step_of_its_tau_length_and_optimizer(monkeypatch, tmp_path):
    def row(tau, setting, loss, method="edit", optimizer="AdamW", variant=""):
        case = {"method": method, "variant": variant, "optimizer": optimizer, "tau": tau}
        return case | {"setting": setting, "val_loss": loss}

    short = [
        row(4, "1.0/0.0", 1.5),
        row(4, "0.7/0.8", 1.6),
        row(16, "0.5/0.8", 1.6),
        row(16, "0.9/0.3", 1.7),
        row(16, "0.1/0.0", 1.0, variant="2 bits"),
        row(16, "0.7/0.5", 1.1, optimizer="Muon"),
    ]
    (tmp_path / "tune.json").write_text(json.dumps(short))
    (tmp_path / "tune_2000.json").write_text(json.dumps([row(16, "0.26/0.8", 1.2)]))
    monkeypatch.setattr(lab, "RESULTS", tmp_path)
    monkeypatch.setattr(runs, "BASE", dict(runs.BASE))
    monkeypatch.setattr(lab, "BASE", runs.BASE)

    def outer_step(*arguments, **more):
        flags = lab.training(*arguments, **more).flags
        return flags.get("outer_lr"), flags.get("outer_momentum")

    assert outer_step("edit", 1, 4) == ("1.0", "0.0")
    assert outer_step("edit", 1, 5) == ("1.0", "0.0")  # the nearest
    assert outer_step("a_edit", 1, 64) == ("0.5", "0.8")
    assert outer_step("edit", 1, 64, optimizer="Muon") == ("0.7", "0.5")
    assert outer_step("edit", 1, 64, outer="0.3/0.4") == ("0.3", "0.4")
    assert outer_step("slowmo", 1, 64) == (None, None)  # its default
    assert outer_step("minibatch", 1) == (None, None)
    runs.BASE["max_steps"] = 2000
    assert outer_step("edit", 1, 4) == ("0.26", "0.8")


RECORD = {
    "step": [100, 420],
    "tokens": [204800, 860160],
    "train_s": [1.0, 9.0],
    "sync_bytes": [700, 9000],
    "val_loss": [3.0, 2.0],
    "steps": [
        {"step": 1, "tokens": 2048, "train_s": 0.5, "sync_bytes": 7, "step_ms": 9000},
        {"step": 90, "tokens": 184320, "train_s": 0.9, "sync_bytes": 630, "step_ms": 900},
        {"step": 110, "tokens": 225280, "train_s": 1.5, "sync_bytes": 720, "step_ms": 100},
        {"step": 200, "tokens": 409600, "train_s": 3.0, "sync_bytes": 900, "step_ms": 200},
        {"step": 420, "tokens": 860160, "train_s": 9.0, "sync_bytes": 9000, "step_ms": 900},
    ],
}


def test_bytes_and_speed_are_those_after_the_warmup(monkeypatch):
    """A step of the warm-up sends 7 bytes."""
    monkeypatch.setattr(runs, "read_run", lambda folder: RECORD)
    expected = {0: (9000, 0.5, 2048), 90: (9000 - 630, 0.9, 184320), 100: (9000 - 700, 1.5, 225280)}
    for warmup, (sent, begin_s, begin_tokens) in expected.items():
        (found,) = runs.Run({}, {"method": "edit", "sync_warmup_steps": warmup}).results()
        assert found["local_bytes"] == sent
        speed = (860160 - begin_tokens) / (9.0 - begin_s)  # from the first row at or after its end
        assert found["tokens_per_s"] == pytest.approx(speed)
        assert found["val_loss"] == 2.0
        assert found["sync_bytes"] == 9000
        assert found["step_ms"] == 200  # the median from the third row on


# ---- rows and tables ----


def test_losses_over_those_of_the_base():
    losses = {("diloco", 1): 2.0, ("edit", 1): 3.0, ("diloco", 2): 4.0, ("edit", 2): 5.0}
    found = []
    for (method, seed), loss in losses.items():
        found.append({"method": method, "seed": seed, "val_loss": loss})
    pairs = rows.with_base(found, ["seed"], method="diloco")
    assert [row for row, _ in pairs] == found
    assert [rows.distance(row, base) for row, base in pairs] == [0, 0.5, 0, 0.25]


def test_a_sick_run_is_compared_with_the_healthy_one_of_its_kind():
    losses = {272: (2.0, 3.0), 448: (1.0, 1.1)}  # by steps: of the healthy and the sick run
    found = []
    for steps, (healthy, sick) in losses.items():
        case = {"method": "x", "seed": 1, "steps": steps}
        found.append(case | {"disturbance": "none", "val_loss": healthy})
        found.append(case | {"disturbance": "sick", "val_loss": sick})
    excess = [row["excess"] for row in lab.over_undisturbed(found)]
    assert excess == pytest.approx([0, 0.5, 0, 0.1])


def result(method, seed, loss, sent=1, optimizer="AdamW") -> dict:
    return {
        "method": method,
        "optimizer": optimizer,
        "seed": seed,
        "val_loss": loss,
        "sync_bytes": sent,
    }


def test_cases_are_compared_over_their_common_seeds():
    found = [result("edit", 1, 2.2), result("edit", 2, 3.3), result("edit", 3, 9.0)]
    found += [result("diloco", seed, loss) for seed, loss in {2: 3.0, 1: 2.0, 4: 5.0}.items()]
    edit = {"method": "edit"}
    diloco = {"method": "diloco"}
    expected = "+10.00% (n = 2, standard error 0.00%, p = 0.500)"
    assert rows.compare(found, edit, diloco) == expected
    assert rows.compare(found, edit | {"seed": 1}, diloco) == "+10.00% (n = 1)"


def test_p_is_the_share_of_signs_that_put_the_mean_as_far_from_0():
    assert rows.sign_flip_p([1.0, 2.0, 3.0]) == 2 / 8
    assert rows.sign_flip_p([1.0, 1.0, 1.0, -1.0]) == 10 / 16
    assert rows.sign_flip_p([0.1] * 8) == 2 / 256


def test_bytes_below_those_of_minibatch():
    found = [
        result("minibatch", 1, 2.0, 90),
        result("edit", 1, 2.0, 9),
        result("minibatch", 2, 2.0, 60),
        result("edit", 2, 2.0, 12),
        result("minibatch", 1, 1.0, 45, "Muon"),
        result("minibatch", 2, 1.0, 45, "Muon"),
    ]
    rows.beside_minibatch(found)
    assert [row["fewer_bytes"] for row in found] == [1, 10, 1, 5, 2, 60 / 45]
    assert found[-1]["over_minibatch"] == -0.5
    assert found[1]["over_muon"] == 1.0


def test_standard_error_is_that_of_the_differences_seed_by_seed():
    found = [
        result("minibatch", 1, 2.0),
        result("minibatch", 1, 1.0, optimizer="Muon"),
        result("edit", 1, 2.2),
        result("minibatch", 2, 1.0),
        result("minibatch", 2, 1.2, optimizer="Muon"),
        result("edit", 2, 1.2),
    ]
    rows.beside_minibatch(found)
    assert rows.table(found, ("over_minibatch", "over_muon")).splitlines() == [
        "| method | optimizer | over mini-batch (standard error) "
        "| over mini-batch, Muon (standard error) | seeds |",
        "| --- | --- | --- | --- | --- |",
        "| mini-batch | AdamW | +0.0% (0.0%) | +41.7% (58.3%) | 2 |",
        "| mini-batch | Muon | -15.0% (35.0%) | +0.0% (0.0%) | 2 |",
        "| EDiT | AdamW | +15.0% (5.0%) | +60.0% (60.0%) | 2 |",
    ]
    *_, alone = rows.table(found[:3], ("over_minibatch",)).splitlines()
    assert alone == "| EDiT | AdamW | +10.0% | 1 |"


# ---- pictures ----

SEEDS = [
    {"method": "edit", "variant": "", "tau": 16, "seed": 1, "x": 16, "val_loss": 2.0},
    {"method": "edit", "variant": "", "tau": 4, "seed": 1, "x": 4, "val_loss": 1.0},
    {"method": "edit", "variant": "", "tau": 16, "seed": 2, "x": 16, "val_loss": 4.0},
    {"method": "edit", "variant": "", "tau": 4, "seed": 2, "x": 4, "val_loss": 1.5},
]


def test_a_line_is_the_mean_over_seeds_between_lowest_and_highest():
    panel = plot.Panel("x", "val_loss", "")
    lines = plot.lines_of(SEEDS, panel)
    assert lines == {("edit", ""): [(4.0, 1.25, 1.0, 1.5), (16.0, 3.0, 2.0, 4.0)]}
    assert plot.lines_of(SEEDS, plot.Panel("x", "val_loss", "", where={"tau": 5})) == {}
    late = plot.lines_of(SEEDS, plot.Panel("x", "val_loss", "", first=5))
    assert late == {("edit", ""): [(16.0, 3.0, 2.0, 4.0)]}
    assert plot.lines_of(SEEDS, plot.Panel("x", "val_loss", "", first=20)) == {}

    curves = []
    for row in (SEEDS[1], SEEDS[3]):
        curves.append(row | {"x": [1, 2], "val_loss": [row["seed"], 2.0]})
    assert plot.lines_of(curves, panel) == {("edit", ""): [(1, 1.5, 1, 2), (2, 2.0, 2.0, 2.0)]}

    own = SEEDS[0] | {"method": "averaging"}  # a method of the reader's own
    assert rows.table([*SEEDS, own], ("val_loss",)).splitlines()[2:] == [
        "| EDiT | 16 | 3.0000 (2.0000 .. 4.0000) | 2 |",
        "| EDiT | 4 | 1.2500 (1.0000 .. 1.5000) | 2 |",
        "| averaging | 16 | 2.0000 | 1 |",
    ]


def test_a_panel_shows_the_mean_and_the_range():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    panel = plot.Panel("x", "val_loss", "")
    lines = plot.lines_of(SEEDS, panel)
    axes = Figure().add_subplot()
    plot.draw_panel(axes, panel, lines)
    (mean,) = axes.get_lines()
    assert mean.get_xydata().tolist() == [[4.0, 1.25], [16.0, 3.0]]
    assert mean.get_label() == "EDiT"
    (ranges,) = axes.collections
    ends = [segment.tolist() for segment in ranges.get_segments()]
    assert ends == [[[4.0, 1.0], [4.0, 1.5]], [[16.0, 2.0], [16.0, 4.0]]]


def test_picture_of_a_frontier_names_eight_cases_and_draws_minibatch_as_a_line():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    lines = {}
    for variant in ("", "Muon"):
        for number, method in enumerate(rows.METHODS):
            lines[method, variant] = [(number + 1, 2.0, 2.0, 2.0)]
    lines["one_bit_edit", "2 bits"] = [(1, 2.0, 2.0, 2.0)]
    lines["zero_one_adam", "rounds that grow"] = [(1, 2.0, 2.0, 2.0)]
    axes = Figure().add_subplot()
    plot.draw_panel(axes, plot.Panel("x", "val_loss", "", frontier=True), lines)
    labels = [line.get_label() for line in axes.get_lines()]
    named = [label for label in labels if not label.startswith("_")]
    assert len(named) == 8
    flat = [line.get_label() for line in axes.get_lines() if len(line.get_xdata()) == 2]
    assert flat == ["mini-batch", "mini-batch, Muon"]


def test_variants_of_a_method_differ_in_their_markers():
    forms = {plot.style_of("edit", f"part {number}", number)[0] for number in range(6)}
    assert len(forms) == 6


def test_a_missing_package_is_named_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        plot.draw([], [], tmp_path / "x.svg")
    assert explain(caught.value) == (2, "this needs a package: pip install matplotlib")

    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (tmp_path / "metrics.jsonl").write_text(json_lines([CONFIG, STEP, EVALUATION]))
    with pytest.raises(ModuleNotFoundError) as caught:
        plot_runs(monkeypatch, "--tensorboard", tmp_path)
    assert explain(caught.value) == (2, "this needs a package: pip install tensorboard")


# ---- records of runs ----

CONFIG = {"event": "config", "method": "edit", "sync_warmup_steps": 4}
STEP = {"event": "step", "step": 4, "sync_bytes": 2, "tokens": 4, "train_s": 1.0, "loss": None}
EVALUATION = {
    "event": "eval",
    "step": 8,
    "sync_bytes": 3,
    "tokens": 8,
    "train_s": 2.0,
    "val_loss": 3.0,
}


def plot_runs(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, words)])
    plot.main()


def test_plot_draws_records_of_runs(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    methods = {"a": "edit", "b": "edit", "d": "diloco"}
    for k, (name, method) in enumerate(methods.items()):
        (tmp_path / name).mkdir()
        record = [CONFIG | {"method": method}, STEP, EVALUATION | {"train_s": k}]
        (tmp_path / name / "metrics.jsonl").write_text(json_lines(record))
    seen = []
    draw = plot.draw

    def draw_and_note(*args):
        seen.append(args)
        draw(*args)

    monkeypatch.setattr(plot, "draw", draw_and_note)
    monkeypatch.chdir(tmp_path)
    plot_runs(monkeypatch, "a", "b", "d", "--out", "x.png")
    svg = Path("x.svg").read_text()
    for text in ("DiLoCo", "EDiT, a", "EDiT, b", "tokens"):
        assert f">{text}<" in svg
    ((found, panels, _),) = seen
    assert plot.lines_of(found, panels[1])["edit", "b"] == [(1, 3.0, 3.0, 3.0)]
    assert [row["sync_bytes"] for row in found] == [[3], [3], [3]]


def test_a_short_run_shows_its_training_loss_round_by_round(monkeypatch, tmp_path):
    """Steps 2 and 4 average gradients. Then two rounds, and one logged step between them, whose
    loss is that of one replica: it is no point. Between the logged steps tokens and bytes grow
    evenly. A replica without a finite loss does not count."""
    pytest.importorskip("matplotlib")
    steps = []
    for step, sent, loss in (2, 20, 5.0), (4, 40, 4.0), (8, 60, 9.0):
        steps.append(STEP | {"step": step, "tokens": 10 * step, "sync_bytes": sent, "loss": loss})
    rounds = []
    for step, losses in (6, [3.0, 2.0]), (8, [None, 1.0]):
        rounds.append({"event": "sync", "step": step, "steps": [2, 2], "loss": losses})
    record = [CONFIG, *steps, *rounds, EVALUATION | {"tokens": 80, "sync_bytes": 60}]
    (tmp_path / "metrics.jsonl").write_text(json_lines(record))
    (found,) = plot.training_losses(rows.read_run(tmp_path))
    assert found["val_loss"] == (5.0, 4.0, 2.5, 1.0)
    assert found["tokens"] == [20, 40, 60, 80]
    assert found["sync_bytes"] == [20, 40, 50, 60]

    out = tmp_path / "x.svg"
    plot_runs(monkeypatch, tmp_path, "--out", out)
    svg = out.read_text()
    assert ">EDiT, training loss<" in svg
    assert ">loss, nats per token<" in svg
    (tmp_path / "metrics.jsonl").write_text(json_lines([*record, *[record[-1]] * 3]))
    plot_runs(monkeypatch, tmp_path, "--out", out)  # four evaluations are a curve
    assert "training loss" not in out.read_text()


NOT_A_RECORD = "metrics.jsonl is not the record of a run"
BROKEN = {  # text of metrics.jsonl -> what the line must say
    json_lines([CONFIG, STEP]): "the run has no evaluation yet",
    json_lines([CONFIG, EVALUATION | {"val_loss": None}]): "validation loss .* finite",
    json_lines([STEP, EVALUATION]): NOT_A_RECORD,
    json_lines([{"event": "config"}, STEP, EVALUATION]): NOT_A_RECORD,
    json_lines([CONFIG, STEP, EVALUATION, 5]): NOT_A_RECORD,
    json_lines([CONFIG, STEP, {"event": "eval"}]): NOT_A_RECORD,
    json_lines([CONFIG, STEP, EVALUATION | {"val_loss": "low"}]): NOT_A_RECORD,
    json_lines([CONFIG, STEP | {"tokens": "many"}, EVALUATION]): NOT_A_RECORD,
    "{": NOT_A_RECORD,
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_broken_records_are_refused_in_one_line(text, monkeypatch, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=BROKEN[text]) as caught:
        plot_runs(monkeypatch, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_run_is_refused_in_one_line(monkeypatch, tmp_path):
    for words in ([], ["--timeline"], ["--tensorboard"]):
        with pytest.raises(FileNotFoundError) as caught:
            plot_runs(monkeypatch, tmp_path, *words)
        line = f"{tmp_path}/metrics.jsonl: No such file or directory"
        assert explain(caught.value) == (2, line)


# ---- timelines ----

SPANS = [("step", k, k + 1.0) for k in range(4)]
DAMAGED = [
    "{",
    "[]",
    json.dumps({"replica": 0, "spans": None}),
    json.dumps({"replica": 0, "spans": [*SPANS, ["step", 9]]}),
    json.dumps({"replica": [], "spans": SPANS}),
]


def write_timeline(folder, rounds, text):
    record = [CONFIG]
    for steps in rounds:
        record.append({"event": "sync", "steps": steps})
    (folder / "metrics.jsonl").write_text(json_lines(record))
    (folder / "timeline-0.json").write_text(text)


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_broken_timelines_are_refused_in_one_line(text, tmp_path):
    write_timeline(tmp_path, [[1]] * 4, text)
    with pytest.raises(UserError, match="timeline-0.json is damaged") as caught:
        timeline.read_timeline(tmp_path)
    assert "\n" not in str(caught.value)


def test_timelines_that_are_short_or_missing_are_refused(tmp_path):
    text = json.dumps({"replica": 0, "spans": SPANS})
    write_timeline(tmp_path, [[1]] * 4, text)
    assert timeline.read_timeline(tmp_path)[0]["computing"] == 1.0
    write_timeline(tmp_path, [[2]] * 2, text)
    with pytest.raises(UserError, match="less than three rounds"):
        timeline.read_timeline(tmp_path)
    (tmp_path / "timeline-0.json").unlink()
    with pytest.raises(UserError, match="no timeline; train with --timeline"):
        timeline.read_timeline(tmp_path)


def recorded_spans(replica) -> list:
    """Four rounds of 2 steps, of 1.5 and 0.5 s. In the second step replica 0 waits 0.3 s for the
    other replica and 0.1 s for the link. In the first and in the last round both wait longer."""
    spans = [("wait for link", 100.5, 100.9), ("wait for link", 106.5, 106.9)]
    for begin in (100 + replica / 4, 102 + replica / 4, 104 + replica / 4, 106 + replica / 4):
        spans.append(("step", begin, begin + 1.5))
        spans.append(("step", begin + 1.5, begin + 2.0))
        if replica == 0:
            spans.append(("wait for others", begin + 1.5, begin + 1.8))
            spans.append(("wait for link", begin + 1.8, begin + 1.9))
            spans.append(("link", begin + 1.4, begin + 1.9))
    return spans


def test_timeline_counts_whole_rounds(tmp_path):
    record = [CONFIG] + [{"event": "sync", "steps": [2, 2]}] * 4
    (tmp_path / "metrics.jsonl").write_text(json_lines(record))
    for replica in (0, 1):
        text = json.dumps({"replica": replica, "spans": recorded_spans(replica)})
        (tmp_path / f"timeline-{replica}.json").write_text(text)
    first, second = timeline.read_timeline(tmp_path)
    assert first["computing"] == pytest.approx(1 - 0.8 / 4.0)  # of rounds 2 and 3
    assert first["step_s"] == pytest.approx(3.2 / 4)
    assert second["computing"] == 1.0
    # round 2 begins at 0
    assert first["spans"]["wait for others"] == [(-0.5, -0.2), (1.5, 1.8), (3.5, 3.8), (5.5, 5.8)]
    assert first["spans"]["step"][1:4] == [(-0.5, 0.0), (0.0, 1.5), (1.5, 2.0)]
    assert first["spans"]["link"][:2] == [(-0.6, -0.1), (1.4, 1.9)]


def test_timeline_of_a_run_is_predicted_and_drawn(tmp_path, corpus_folder, monkeypatch, capsys):
    began = time.time()
    options = {"method": "diloco", "tau": 2, "max_steps": 9, "timeline": True}
    options |= {"sync_warmup_steps": 1, "eval_interval": 100}
    run_training(2, corpus_folder, out_dir=tmp_path, link_mbps=1, dtype="fp32", **options)
    for _, begin, end in json.loads((tmp_path / "timeline-0.json").read_text())["spans"]:
        assert began < begin <= end  # on one scale for all machines
    slow = timeline.read_timeline(tmp_path)
    assert len(slow) == 2
    for row in slow:
        assert 0 < row["computing"] < 1
        assert len(row["spans"]["link"]) >= 4

    capsys.readouterr()
    planner.compare(tmp_path)
    printed = capsys.readouterr().out
    assert re.findall(r"replica (\d): measured .*%, predicted .*%\n", printed) == ["0", "1"]

    fast = tmp_path / "fast"
    run_training(4, corpus_folder, out_dir=fast, **options)  # no link, four replicas
    found = slow + timeline.read_timeline(fast)
    assert len(found) == 6
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.svg"
    plot_runs(monkeypatch, "--timeline", tmp_path, fast, "--out", out)
    svg = out.read_text()
    assert ">DiLoCo, replica 3<" in svg
    assert checksum([row["spans"] for row in found]) in svg

    timeline.draw_overlap(slow, out)
    svg = out.read_text()
    for text in ("DiLoCo", "its link, by layer", "0", "3"):
        assert f">{text}<" in svg
