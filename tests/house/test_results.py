"""lab/: each experiment makes the runs whose results are kept, and RESULTS.md shows these results."""

import os
import re
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from lab import plot, svg, sweep, table
from ranks import ROOT
from test_readme import RESULTS, TEXT

EXPERIMENTS = sorted(ROOT.glob("lab/experiments/*.sh"))
EXPERIMENTS = [path for path in EXPERIMENTS if path.stem != "two_gpus"]  # it makes no figure
KEPT = sorted(ROOT.glob("lab/results/*.csv"))
NO_RUNS = {"timeline", "overlap"}  # CSV files that are not lab.table's
RELATIVES = (ROOT / "relatives" / "README.md").read_text()


def commands(path, folder) -> list:
    """The words of each command that an experiment starts. None is really started."""
    for name in "python", "torchrun":
        program = folder / name
        lines = ["#!/bin/sh", f'printf "%s\\0" {name} "$@" >> {folder}/seen', f"echo >> {folder}/seen"]
        program.write_text("\n".join(lines) + "\n")
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["sh", str(path)], check=True, env=environment, cwd=folder)
    lines = (folder / "seen").read_text().splitlines()
    return [line.split("\0")[:-1] for line in lines]


def planned(path, folder) -> dict:
    """Name of a sweep -> the flags of its runs."""
    found = defaultdict(list)
    for words in commands(path, folder):
        if words[:3] == ["python", "-m", "lab.sweep"]:
            args, axes = sweep.read_command(words[3:])
            runs, _ = sweep.plan(folder / args.name, axes, args.ranks, args.plain)
            found[args.name] += [run.config for run in runs]
    return found


@pytest.fixture
def without_gpu(monkeypatch):
    """Everything is checked but whether this machine has a GPU."""
    check = sweep.check

    def check_on_cpus(run, load):
        if run.config["device"] != "cuda":
            check(run, load)

    monkeypatch.setattr(sweep, "check", check_on_cpus)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_makes_exactly_the_runs_of_its_results(path, tmp_path, without_gpu):
    for name, configs in planned(path, tmp_path).items():
        kept = ROOT / f"lab/results/{name}.csv"
        if name == "tune" or name in NO_RUNS:
            continue
        runs = table.read_csv(kept)
        names = {flag for run in runs for flag in run.flags} - {"corpus_hash"}
        columns = sorted(names)
        expected = sorted(str((run.values(columns), run.seed)) for run in runs)
        found = set()
        for config in configs:
            flags = table.settings(config)
            found.add(str((tuple(flags.get(flag) for flag in columns), config["seed"])))
        assert sorted(found) == expected


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_files_of_an_experiment_are_kept_and_the_texts_name_it(path, tmp_path):
    assert path.read_text().startswith("# ")
    assert f"sh lab/experiments/{path.name}" in TEXT + RESULTS + RELATIVES
    for words in commands(path, tmp_path):
        assert words[0] == "torchrun" or words[:2] == ["python", "-m"]
        if words[2] == "lab.table":
            table.read_command(words[3:])
        if "--out" in words and path.stem != "tune":
            suffix = "svg" if words[2] == "lab.gain" else "csv"
            assert (ROOT / f"{words[words.index('--out') + 1]}.{suffix}").exists()


def test_results_are_those_of_the_experiments():
    written = "".join(path.read_text() for path in EXPERIMENTS)
    for path in KEPT:
        assert re.search(rf"lab/results/{path.stem}\b", written), path
    pictures = {path.name for path in ROOT.glob("lab/results/*.svg")}
    shown = set(re.findall(r"lab/results/(\w+\.svg)", TEXT + RESULTS + RELATIVES))
    assert shown <= pictures
    assert {path.suffix for path in ROOT.glob("lab/results/*")} <= {".csv", ".svg", ".md"}


@pytest.mark.parametrize("name", ["frontier", "frontier_muon", "own_data", "replicas_edit"])
def test_pictures_of_tables_show_the_kept_runs(name, tmp_path, monkeypatch):
    out = f"lab/results/{name}"
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda rows, panels, path: drawn.append((rows, panels)))
    (path,) = [path for path in EXPERIMENTS if re.search(rf"--out {out}$", path.read_text(), re.M)]
    (words,) = [words for words in commands(path, tmp_path) if words[-1] == out]
    options = words[words.index("--base") : -1]
    table.main([str(ROOT / f"{out}.csv"), *options, str(tmp_path / "out")])
    ((rows, (panel,)),) = drawn
    written = svg.checksum([list(plot.lines_of(rows, panel).values())])
    assert written in (ROOT / f"lab/results/{name}.svg").read_text()


def test_losses_in_the_tables_of_results_are_means_of_kept_runs():
    means = set()
    for path in KEPT:
        if path.stem not in NO_RUNS:
            runs = table.read_csv(path)
            for line in table.find_lines(runs, table.find_columns(runs)[0]).values():
                means.add(f"{statistics.mean(run.loss for run in line):.4f}")
    shown = []
    for line in RESULTS.splitlines():
        if line.startswith("| "):
            shown += re.findall(r"\| (\d\.\d{4})(?= )", line)
    assert len(shown) > 30
    assert set(shown) <= means


def test_distances_in_the_tables_of_results_are_those_of_kept_runs(tmp_path, monkeypatch):
    """As lab.table computes them with the options of the experiments, rounded once."""
    monkeypatch.setattr(plot, "draw", lambda rows, panels, path: None)
    found = set()
    for path in EXPERIMENTS:
        folder = tmp_path / path.stem
        folder.mkdir()
        for words in commands(path, folder):
            if words[2:3] != ["lab.table"]:
                continue
            args = table.read_command(words[3:])
            name = Path(args.out or "none").name
            if name in NO_RUNS or not (ROOT / f"lab/results/{name}.csv").exists():
                continue
            runs = table.read_csv(ROOT / f"lab/results/{name}.csv")
            table.page(runs, args.base, [])
            for line in table.find_lines(runs, table.find_columns(runs)[0]).values():
                over = [100 * run.over for run in line if run.over is not None]
                if len(over) > 1:
                    error = table.standard_error(over)
                    mark = " *" if abs(statistics.mean(over)) >= 2 * error > 0 else ""
                    found.add(f"{statistics.mean(over):+.1f}% +- {error:.1f}%{mark}")
    shown = set()
    for line in RESULTS.splitlines():
        if line.startswith("| "):
            shown |= set(re.findall(r"\| ([+-]\d+\.\d% \+- \d+\.\d%(?: \*)?) (?=\|)", line))
    assert len(shown) > 25
    assert shown <= found, shown - found
