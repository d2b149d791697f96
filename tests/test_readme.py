"""README.md's commands for a text of one's own and its printed method run. All other commands:
tests/house/test_commands.py; what else the texts say: tests/house/test_texts.py."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser

import methods
import ranks
from config import UserError, parse
from lab import sweep
from methods import METHODS
from plain.__main__ import read_config
from ranks import OUR_METHODS, ROOT, Launch, script
from rows import each_row

TEXT = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "RESULTS.md").read_text()
RECIPE = TEXT.split("## Writing a method")[1].split("\n## ")[0]


def commands(text):
    """Lines of the shell blocks, and `commands` in the text."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.S):
        for line in block.splitlines():
            found.append(line.split("#")[0].strip())
    found += re.findall(r"`((?:python|make|torchrun|sh|git|sudo) [^`]*)`", text)
    return [command for command in found if command]


def command_with(part, text=TEXT):
    """The first command that contains it."""
    return next(command for command in commands(text) if part in command)


def read_flags(argv, methods=METHODS):
    return parse(argv, methods)[0]


def test_all_methods_but_zero_one_adam_take_muon():
    for method in OUR_METHODS:
        config = read_flags(["--method", method, "--optimizer", "muon"])
        if method == "zero_one_adam":
            with pytest.raises(UserError, match="AdamW"):
                config.check(replicas=4)
        else:
            config.check(replicas=4)


# ---- commands and flags ----


def test_flags_of_the_slurm_script_are_valid():
    script_text = (ROOT / "plumbing" / "slurm.sh").read_text()
    argv = script_text.split("train.py ")[1].split()
    assert read_flags(argv).tokens_per_step % (8 * 2048) == 0
    launcher = script_text.split(" torchrun ")[-1].split(" train.py ")[0]
    get_args_parser().parse_args([*shlex.split(launcher), "train.py"])  # of this torch


def test_makefile_runs_the_commands_of_the_readme():
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    shown = commands(TEXT)
    for command in command_with("torchrun --standalone"), "python -m pytest":
        assert command in makefile
        assert command in shown
    assert {"make train", "make test"} <= set(shown)


# ---- commands and printed code that run ----


def finished(launch) -> str:
    """What was printed, without a line of error."""
    assert launch.wait() == [0] * len(launch.ranks)
    assert launch.lines("err") == []
    return "\n".join(launch.lines("out"))


def run_python(command, folder, *more) -> str:
    """What `python FILE FLAGS more` prints in this folder."""
    python, path, *words = shlex.split(command)
    assert python == "python"
    special = {0: (script, ROOT / path, folder)}
    return finished(Launch(1, folder / "log", *words, *more, special=special))


def test_commands_for_own_text_run_as_written(tmp_path):
    """data.py, train.py and sample.py as the README has them, on a small book, for a few steps."""
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 400)
    (tmp_path / "more.jsonl").write_text('{"text": "the rain fell in torrents"}\n')
    short = "--max_steps 3 --n_layer 1 --block_size 16 --eval_batches 1 --out_dir out/edit".split()

    prepared = run_python(command_with("python data.py --input"), tmp_path)
    assert "tokens (byte)" in prepared
    trained = run_python(command_with("python train.py --data"), tmp_path, *short)
    assert "done |" in trained
    sampled = run_python(command_with("python sample.py"), tmp_path)
    assert sampled.startswith("def ")


# ---- a method of your own ----


def files_of_the_recipe() -> dict:
    """File -> what README prints of it."""
    found = {}
    for text, printed in re.findall(r"([^`].*?)```python\n(.*?)```", RECIPE, re.S):
        paragraph = text.strip().split("\n\n")[-1]
        file = re.search(r"`([\w/]+\.py)`", paragraph)[1]
        found[file] = printed
    return found


def command_with_averaging(argv, rank, world_size, port, folder):
    """As in train.py after the README's changes."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    methods.TABLE["averaging"] = ("Averaging", "averaging", "")
    ranks._command(argv, rank, world_size, port, folder)


def values_in(record, event, key):
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    return [row[key] for row in rows if row["event"] == event]


def test_method_in_the_readme_trains_saves_and_resumes_as_printed(tmp_path, corpus_folder):
    (tmp_path / "averaging.py").write_text(files_of_the_recipe()["averaging.py"])
    special = {rank: (command_with_averaging,) for rank in (0, 1)}

    def train(*argv):
        return finished(Launch(2, tmp_path, *argv, special=special))

    common = ranks.flags(data=corpus_folder, sync_warmup_steps=1, tau=3, max_steps=7)
    checkpoints = "--checkpoint_interval 4 --keep 9".split()
    printed = train(*common, "--method", "averaging", *checkpoints, "--out_dir", "out")
    assert "averaging on 2 ranks" in printed
    assert "then averaging begins" in printed
    plain = "--outer_lr 1 --outer_momentum 0".split()  # DiLoCo with these averages parameters
    train(*common, "--method", "diloco", *plain, "--out_dir", "same")

    shutil.rmtree(tmp_path / "out" / "checkpoint-00000007")
    printed = train("--device", "cpu", "--resume", "out")
    assert "checkpoint-00000004: step 4" in printed
    for event, key in ("sync", "loss"), ("eval", "val_loss"):
        ours = values_in(tmp_path / "out" / "metrics.jsonl", event, key)
        theirs = values_in(tmp_path / "same" / "metrics.jsonl", event, key)
        assert ours
        assert len(ours) == len(theirs)
        for found, expected in zip(ours, theirs):
            assert found == pytest.approx(expected, rel=1e-9)  # each a number or a list


def copy_of_the_project(folder):
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "out", "__pycache__"))


def follow(text, folder):
    """Write what a recipe prints. text: file -> what is printed of it."""
    places = {"methods.py": "TABLE = {\n", "tests/test_methods.py": "# methods of your own\n"}
    for file, printed in text.items():
        path = folder / file
        if file in places:
            before, after = path.read_text().split(places[file])
            printed = before + places[file] + printed + after
        else:
            assert not path.exists()
        path.write_text(printed)


def python_in(folder, command):
    python, *words = shlex.split(command)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_recipe_in_the_readme_compares_both_versions_and_sees_a_change_of_one(tmp_path):
    recipe = files_of_the_recipe()
    assert list(recipe) == [
        "averaging.py", "plain/averaging.py", "methods.py", "tests/test_methods.py"
    ]  # fmt: skip
    compare = command_with("python -m pytest tests/test_methods.py", RECIPE)
    copy = tmp_path / "copy"
    copy_of_the_project(copy)
    follow(recipe, copy)
    done = python_in(copy, compare)
    assert re.search(r"^4 passed", done.stdout, re.M), done.stdout  # 1x1, 1x4, 4x1, 2x2

    path = copy / "plain" / "averaging.py"
    path.write_text(path.read_text().replace("set_all(mean(", "set_all(0.999 * mean("))
    done = python_in(copy, compare)
    assert re.search(r"^4 failed", done.stdout, re.M), done.stdout
    said = "averaging.py and plain/averaging.py differ in loss at step"
    assert done.stdout.count(said) >= 4
    assert "Mismatched elements" not in done.stdout

    # lab.sweep and with it python -m plain know it, too
    short = "--max_steps 4 --sync_warmup_steps 1 --tau 2 --n_layer 1 --n_embd 8 --n_head 1"
    short += " --block_size 16 --eval_batches 1 --lr_warmup_steps 1"
    done = python_in(copy, f"python -m lab.sweep own --method averaging {short} --plain")
    assert done.returncode == 0, done.stderr
    assert "averaging" in done.stdout


def test_method_without_a_plain_version_is_refused_in_one_line(tmp_path, monkeypatch):
    """By python -m plain, and by lab.sweep --plain before the first run."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "averaging.py").write_text(files_of_the_recipe()["averaging.py"])
    monkeypatch.setitem(methods.TABLE, "averaging", ("Averaging", "averaging", ""))
    message = "--method averaging has no plain version: name one in methods.py"
    with pytest.raises(UserError, match=message) as error:
        read_config(["--method", "averaging"])
    assert "\n" not in str(error.value)
    words = "mine --method diloco averaging --max_steps 3 --lr_warmup_steps 1 --plain".split()
    args, axes = sweep.read_command(words)
    with pytest.raises(UserError, match=message):
        sweep.plan(tmp_path / "runs", axes, args.ranks, args.plain)
    assert not (tmp_path / "runs").exists()


WRONG_ROWS = {
    "there is no module no_such_file": ("Averaging", "no_such_file", ""),
    "method has no class Averaging": ("Averaging", "method", ""),
}


@each_row("message", WRONG_ROWS)
def test_wrong_row_in_the_table_of_methods_is_named_in_one_line(message, monkeypatch):
    monkeypatch.setitem(methods.TABLE, "averaging", WRONG_ROWS[message])
    with pytest.raises(UserError, match=f"methods.py: --method averaging: {message}"):
        read_flags(["--method", "averaging"])
    name, module, _ = WRONG_ROWS[message]
    monkeypatch.setitem(methods.TABLE, "averaging", (name, "relatives.qsr", module))
    monkeypatch.setattr("relatives.qsr.Averaging", METHODS["qsr"], raising=False)
    with pytest.raises(UserError, match=f"methods.py: --method averaging: {message}"):
        read_config(["--method", "averaging"])
