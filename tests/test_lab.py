"""The laboratory: pictures, records of runs, timelines."""

import csv
import json
import sys
import time
from pathlib import Path

import pytest

from config import UserError, explain
from lab import plot, rows, timeline
from lab.svg import checksum
from ranks import run_training


def json_lines(found) -> str:
    return "\n".join(map(json.dumps, found))


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

    own = SEEDS[0] | {"method": "averaging"}  # a method of the reader's own comes last
    assert list(plot.lines_of([own, *SEEDS], panel)) == [("edit", ""), ("averaging", "")]


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
    json_lines([CONFIG, STEP, EVALUATION, 5]) + "\n": NOT_A_RECORD,
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
    commands = [
        lambda: plot_runs(monkeypatch, tmp_path),
        lambda: plot_runs(monkeypatch, tmp_path, "--tensorboard"),
        lambda: timeline.main([str(tmp_path)]),
    ]
    for command in commands:
        with pytest.raises(FileNotFoundError) as caught:
            command()
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


def test_timeline_of_a_run_is_drawn(tmp_path, corpus_folder):
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

    fast = tmp_path / "fast"
    run_training(4, corpus_folder, out_dir=fast, **options)  # no link, four replicas
    found = slow + timeline.read_timeline(fast)
    assert len(found) == 6
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.svg"
    timeline.main([str(tmp_path), str(fast), "--out", str(out)])
    svg = out.read_text()
    assert ">DiLoCo, replica 3<" in svg
    assert checksum([row["spans"] for row in found]) in svg
    with out.with_suffix(".csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["replica"] for row in written] == ["0", "1", "0", "1", "2", "3"]
    assert float(written[0]["computing"]) == found[0]["computing"]

    timeline.main([str(tmp_path), "--sync", "--out", str(out)])
    svg = out.read_text()
    for text in ("DiLoCo", "its link, by layer", "0", "3"):
        assert f">{text}<" in svg
