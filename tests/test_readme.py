"""The README is true: its tree, its commands, its equation map, the length of the shell lines under
make."""

import re
import shlex
import subprocess
import sys

import pytest

import bench
import checkpoint
import data
import sample
from config import parse
from ranks import ROOT

TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S)
    for line in block.splitlines()
]
COMMANDS = [line for line in COMMANDS if line]


def test_file_tree_equals_the_folder():
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    here = {path.split("/")[0] + ("/" if "/" in path else "") for path in tracked.stdout.split()}
    here = {name for name in here if not name.startswith(".")}
    blocks = re.findall(r"```text\n(.*?)```", TEXT, re.S)
    tree = next(block for block in blocks if "model.py " in block)
    assert {line.split()[0] for line in tree.splitlines()} == here


def test_every_command_names_real_files_and_flags():
    names = {path.name for path in ROOT.glob("*.py")}
    seen = set()
    for command in COMMANDS:
        words = shlex.split(command)
        scripts = [word for word in words if word.endswith(".py")]
        assert set(scripts) <= names
        seen.update(scripts)
        if "train.py" in scripts:
            parse(words[words.index("train.py") + 1 :])
    assert {"train.py", "data.py", "sample.py"} <= seen


def test_make_runs_the_lines_that_the_readme_shows():
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    trainings = [command for command in COMMANDS if "torchrun --standalone" in command]
    assert trainings[0] in makefile  # the first one, under make train
    assert "python -m pytest" in COMMANDS and "python -m pytest" in makefile
    assert "make train" in COMMANDS and "make test" in COMMANDS


def test_equation_map_points_at_functions_that_exist():
    rows = re.findall(r"`(\w+\.py):(\w+)`", TEXT)
    assert len(rows) > 10
    for file, function in rows:
        assert f"def {function}(" in (ROOT / file).read_text()


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_flags_in_the_text_exist(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    bench_help = lambda: bench.read_arguments(["--help"])
    train_help = lambda: parse(["--help"])
    for show_help in (train_help, data.main, sample.main, checkpoint.main, bench_help):
        with pytest.raises(SystemExit):
            show_help()
    known = capsys.readouterr().out
    launcher = {
        "--standalone", "--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint",
        "--max-restarts",
    }  # fmt: skip
    for flag in set(re.findall(r"--[a-z][\w-]*", TEXT)) - launcher:
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known), flag


def test_every_collective_carries_a_tag():
    """grep '# \\[s' lists all communication: one tag above each call of the mesh's operations."""
    call = re.compile(r"mesh\.(all_gather|reduce_scatter|all_reduce|gather_rows)\(")
    for path in ROOT.glob("*.py"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if call.search(line) and path.name != "mesh.py":
                above = lines[max(0, number - 2) : number]
                assert any("# [s" in tag for tag in above), (path.name, line)


def test_commands_for_own_text_run_as_written(tmp_path):
    """data.py, train.py and sample.py as the README
    has them, on a small book and for a few steps."""
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 400)
    (tmp_path / "more.jsonl").write_text('{"text": "the rain fell in torrents"}\n')
    short = "--max_steps 3 --n_layer 1 --block_size 16 --eval_batches 1 --out_dir out/edit".split()
    run = []
    for script in ("data.py --input", "train.py --data", "sample.py"):
        command = next(line for line in COMMANDS if script in line and "torchrun" not in line)
        words = [sys.executable, *shlex.split(command)[1:]]
        words += short if "train.py" in script else []
        words[1] = str(ROOT / words[1])
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=90)
        assert (done.returncode, done.stderr) == (0, ""), command
        run.append(done.stdout)
    assert "tokens (byte)" in run[0] and "done |" in run[1] and run[2].startswith("def ")
