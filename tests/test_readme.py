"""README.md, RESULTS.md and relatives/README.md are true: file tree, commands, flags, equation map,
ladder, tables, printed code."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import test_ladder

import data
import export
import lab.__main__  # the experiments
import ranks
import sample
from config import UserError, parse
from lab import bench, plot, runs
from plumbing import simulate
from ranks import ROOT, Launch, script
from train import METHODS

TEXT = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "RESULTS.md").read_text()
RELATIVES = (ROOT / "relatives" / "README.md").read_text()
METHOD = re.search(r"```python\n(.*?)```", TEXT, re.S)[1]
DIAGRAMS = re.findall(r"```text\n(.*?)```", TEXT, re.S)
LADDER = ["minibatch", "post_local_sgd", "diloco", "edit", "a_edit"]


def commands(text):
    """Lines of the shell blocks, and `commands` in the text."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`((?:python|make|torchrun) [^`]*)`", text)
    return [line for line in lines if line]


def read_flags(argv, simulation=simulate.Config):
    return parse(argv, METHODS, simulation)[0]


def test_file_tree_equals_the_folder():
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    paths = [path for path in tracked.stdout.split() if (ROOT / path).exists()]
    here = {path.split("/")[0] + ("/" if "/" in path else "") for path in paths}
    here = {name for name in here if not name.startswith(".")} - {"README.md"}
    tree = next(diagram for diagram in DIAGRAMS if "model.py " in diagram)
    named = [line.split("   ")[0].split(", ") for line in tree.splitlines()]
    assert {name.strip() for names in named for name in names} == here


def test_readme_has_at_most_1150_words():
    assert len(TEXT.split()) <= 1150


def test_flags_of_the_ladder_undo_what_a_method_adds():
    """They are the flags with which tests/test_ladder.py compares a method with the one above."""
    ladder = next(diagram for diagram in DIAGRAMS if "undo:" in diagram)
    shown = [line for line in ladder.splitlines() if "|" not in line]
    assert shown == LADDER
    undo = {
        "post_local_sgd": dict(tau=1, grad_clip=0.0),
        "diloco": test_ladder.PLAIN,
        "edit": test_ladder.OFF,
        "a_edit": dict(virtual_clock=True, tau_time_s=16.0),  # of 16 steps, the default tau
    }
    arrows = re.findall(r"undo: (.*)", ladder)
    assert len(arrows) == len(undo)
    for text, method, flags in zip(arrows, undo, undo.values()):
        words = text.split(",")[0].split()
        assert sum(word.startswith("--") for word in words) == len(flags)
        config = read_flags(["--method", method, *words])
        for name, value in flags.items():
            assert getattr(config, name) == value, (method, name)
    claims = [*test_ladder.CLOSE.values(), *test_ladder.BITWISE.values()]
    compared = [{case[0] for case in cases} for _, _, cases in claims]
    for above, below in zip(LADDER, LADDER[1:]):
        assert any({above, below} <= methods for methods in compared), (above, below)
    assert test_ladder.SGD.items() >= undo["post_local_sgd"].items()
    assert read_flags(["--method", "edit"]).tau == 16


def test_table_of_relatives_has_every_method_and_its_optimizers():
    lines = [line for line in RELATIVES.splitlines() if line.startswith("| `")]  # header, methods
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]
    assert [row[0].split("`")[1] for row in rows] == list(METHODS)
    for method, row in zip(METHODS, rows):
        file, target = re.fullmatch(r"\[(.*)\]\((.*)\)", row[1]).groups()
        optimizers = row[4]
        path = (ROOT / "relatives" / target).resolve()
        assert path.name == file
        assert path == (ROOT / sys.modules[METHODS[method].__module__].__file__).resolve()
        config = read_flags(["--method", method, "--optimizer", "muon"])
        if "Muon" in optimizers:
            config.check(replicas=4)
        else:
            with pytest.raises(UserError, match="AdamW"):
                config.check(replicas=4)


def test_flags_of_the_slurm_script_are_valid():
    argv = (ROOT / "plumbing" / "slurm.sh").read_text().split("train.py ")[1].split()
    assert read_flags(argv).tokens_per_step % (8 * 2048) == 0


@pytest.mark.parametrize("text", [TEXT, RESULTS], ids=["README", "RESULTS"])
def test_every_command_names_real_files_modules_and_flags(text):
    seen = set()
    for command in commands(text):
        words = shlex.split(command)
        modules = re.findall(r"-m (lab[.\w]*)", command)
        scripts = [word for word in words if word.endswith(".py")]
        assert all(importlib.util.find_spec(module) for module in modules), command
        assert all((ROOT / path).exists() for path in scripts), command
        if "train.py" in scripts:
            read_flags(words[words.index("train.py") + 1 :])
        if "lab.bench" in modules:
            read_flags(words[words.index("lab.bench") + 1 :], bench.Flags)
        if modules == ["lab"]:
            assert set(words[3:4]) <= set(runs.EXPERIMENTS), command
        seen.update(scripts + modules)
    expected = {"lab", "lab.bench"}
    if text is TEXT:
        expected = {"data.py", "sample.py", "export.py", "lab", "lab.plot"}
    assert {"train.py", *expected} <= seen


def test_flags_in_the_text_exist(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    every = ["--help", "all"]
    shown = [lambda: read_flags(every), lambda: read_flags(every, bench.Flags)]
    for show_help in (*shown, data.main, sample.main, export.main, runs.main, plot.main):
        with pytest.raises(SystemExit):
            show_help()
    known = capsys.readouterr().out + "--max-restarts --signal --include"  # torchrun, Slurm, grep
    texts = TEXT + RESULTS + RELATIVES
    text = re.sub(r"(torchrun|srun|#SBATCH) .*?(train\.py|lab|$)", "", texts, flags=re.M)
    for flag in set(re.findall(r"--[a-z][\w-]*", text)):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known), flag


def test_equation_map_names_real_functions():
    rows = re.findall(r"`([\w/]+\.py):(\w+)`", TEXT)
    assert len(rows) > 8
    for file, function in rows:
        assert f"def {function}(" in (ROOT / file).read_text(), (file, function)


@pytest.mark.parametrize(
    "folder, text",
    [(".", TEXT), (".", RESULTS), ("relatives", RELATIVES)],
    ids=["README", "RESULTS", "relatives"],
)
def test_links_lead_to_files(folder, text):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / folder / target).exists(), target


def test_makefile_runs_the_commands_of_the_readme():
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    shown = commands(TEXT)
    train_command = next(line for line in shown if "torchrun --standalone" in line)
    for command in (train_command, "python -m pytest"):
        assert command in makefile
        assert command in shown
    assert {"make train", "make test"} <= set(shown)


def finished(run) -> str:
    """What was printed, without a line of error."""
    assert (run.wait(), run.lines("err")) == ([0] * len(run.ranks), [])
    return "\n".join(run.lines("out"))


def test_commands_for_own_text_run_as_written(tmp_path):
    """data.py, train.py and sample.py as the README has them, on a small book, for a few steps."""
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 400)
    (tmp_path / "more.jsonl").write_text('{"text": "the rain fell in torrents"}\n')
    short = "--max_steps 3 --n_layer 1 --block_size 16 --eval_batches 1 --out_dir out/edit".split()
    printed = []
    for name in ("data.py --input", "train.py --data", "sample.py"):
        command = next(line for line in commands(TEXT) if f"python {name}" in line)
        _, path, *words = shlex.split(command)
        words += short if path == "train.py" else []
        special = {0: (script, ROOT / path, tmp_path)}
        printed.append(finished(Launch(1, tmp_path / "log", *words, special=special)))
    assert "tokens (byte)" in printed[0] and "done |" in printed[1]
    assert printed[2].startswith("def ")


def test_experiments_have_valid_commands():
    for name, experiment in runs.EXPERIMENTS.items():
        found = experiment.runs([1])
        assert found or name == "scale"
        timings = [run.timed_by for run in found if run.timed_by]
        for run in found + timings:
            read_flags(run.command().split("train.py ")[1].split()).check(replicas=4)


def command_with_averaging(argv, rank, world_size, port, folder):
    """As in train.py after the README's two changes."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    METHODS["averaging"] = importlib.import_module("averaging").Averaging
    ranks._command(argv, rank, world_size, port, folder)


def test_method_in_the_readme_trains_saves_and_resumes_as_printed(tmp_path, corpus_folder):
    assert len(METHOD.splitlines()) <= 10
    (tmp_path / "averaging.py").write_text(METHOD)
    assert "METHODS = {" in (ROOT / "train.py").read_text()
    special = {rank: (command_with_averaging,) for rank in (0, 1)}
    run = lambda *argv: finished(Launch(2, tmp_path, *argv, special=special))
    common = ranks.flags(data=corpus_folder, sync_warmup_steps=1, tau=3, max_steps=7)
    options = "--checkpoint_interval 4 --keep 9 --out_dir".split()
    printed = run(*common, "--method", "averaging", *options, "out")
    assert "averaging on 2 ranks" in printed and "then averaging begins" in printed
    plain = "--outer_lr 1 --outer_momentum 0".split()  # DiLoCo with these averages parameters
    run(*common, "--method", "diloco", *plain, "--out_dir", "same")
    shutil.rmtree(tmp_path / "out" / "checkpoint-00000007")
    assert "checkpoint-00000004: step 4" in run("--device", "cpu", "--resume", "out")
    read = lambda name: [json.loads(line) for line in open(tmp_path / name / "metrics.jsonl")]
    ours, theirs = read("out"), read("same")
    for event, key in (("sync", "loss"), ("eval", "val_loss")):
        values = [[row[key] for row in rows if row["event"] == event] for rows in (ours, theirs)]
        assert values[0] == [pytest.approx(value, rel=1e-9) for value in values[1]] and values[0]
