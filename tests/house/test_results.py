"""lab/results/: experiments, figures, tables and RESULTS.md say what the JSON files say."""

import json
import re

import pytest

import lab.__main__ as lab
from lab import planner, plot, runs
from lab.svg import checksum
from ranks import ROOT

RESULTS = sorted(ROOT.glob("lab/results/*.json"))
GONE = {  # experiments whose tables stay
    "bits_2000",
    "earlier_frontier",
    "earlier_frontier_128",
    "elastic",
    "longer",
    "merge",
    "quality",
    "rates",
    "rates_2000",
}
EARLIER = {"link", "timeline"}  # made with other flags


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_figure_table_and_experiment_say_what_the_json_says(path, monkeypatch):
    monkeypatch.setattr(runs, "BASE", dict(runs.BASE))
    monkeypatch.setattr(lab, "BASE", runs.BASE)
    if steps := re.search(r"_(\d+)", path.stem):
        runs.BASE.update(max_steps=int(steps[1]), eval_interval=int(steps[1]))
    if "_10m" in path.stem:
        runs.BASE.update(model="10m", batch_size=2)
    if path.stem.endswith("_gpu"):
        runs.BASE.update(device="cuda", backend="shm")
    found = json.loads(path.read_text())
    experiment = runs.experiment_of(path)
    assert (experiment is None) == (path.stem in GONE)
    if experiment is None:
        return
    if path.stem not in EARLIER:
        made = {run.command() for run in experiment.runs(range(1, 10))}
        assert {row["command"] for row in found if "command" in row} <= made

    assert runs.page(experiment, path, found) == path.with_suffix(".md").read_text()
    again = experiment.combine([dict(row) for row in found])
    assert runs.page(experiment, path, again) == path.with_suffix(".md").read_text()
    panels_lines = [plot.lines_of(found, panel) for panel in experiment.panels]
    if panels_lines:
        svg = path.with_suffix(".svg").read_text()
        assert checksum([list(lines.values()) for lines in panels_lines]) in svg
        for panel, lines in zip(experiment.panels, panels_lines):
            for method, variant in lines:
                _, look = plot.style_of(method, variant, 0, panel.frontier)
                if "label" in look:
                    assert f">{look['label']}<" in svg


def test_pictures_of_the_timelines_are_drawn_from_their_rows():
    found = json.loads((ROOT / "lab/results/timeline.json").read_text())
    for name, variant in {"timeline": "", "overlap": "overlap"}.items():
        spans = [row["spans"] for row in found if row["variant"] == variant]
        assert checksum(spans) in (ROOT / f"lab/results/{name}.svg").read_text()


def test_each_row_of_the_results_stands_in_a_table_of_the_laboratory():
    known = set()
    for path in ROOT.glob("lab/results/**/*.md"):
        known.update(path.read_text().splitlines())
    lines = (ROOT / "RESULTS.md").read_text().splitlines()
    shown = []
    for line, following in zip(lines, [*lines[1:], ""]):
        header = following.startswith("| ---")
        if line.startswith("| ") and not line.startswith("| ---") and not header:
            shown.append(line)
    assert len(shown) > 20
    assert [line for line in shown if line not in known] == []


def test_result_of_scale_is_the_planners():
    found = json.loads((ROOT / "lab/results/scale.json").read_text())
    assert planner.rows() == found
