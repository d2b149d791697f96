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
from collections import defaultdict

import pytest
import test_ladder

import data
import export
import lab.__main__  # the experiments
import ranks
import sample
from config import UserError, parse
from lab import bench, plot, runs
from lab.rows import mean_and_error
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
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.S):
        for line in block.splitlines():
            found.append(line.split("#")[0].strip())
    found += re.findall(r"`((?:python|make|torchrun) [^`]*)`", text)
    return [command for command in found if command]


def command_with(part, text=TEXT):
    """The first command that contains it."""
    return next(command for command in commands(text) if part in command)


def diagram_with(part):
    """The first diagram of the README that contains it."""
    return next(diagram for diagram in DIAGRAMS if part in diagram)


def read_flags(argv, simulation=simulate.Config):
    return parse(argv, METHODS, simulation)[0]


# ---- what the files show ----


def test_file_tree_equals_the_folder():
    listing = ["git", "ls-files", "-co", "--exclude-standard"]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    here = set()
    for path in tracked.stdout.split():
        first, *inside = path.split("/")
        if (ROOT / path).exists() and not first.startswith("."):
            here.add(f"{first}/" if inside else first)

    named = set()
    for line in diagram_with("model.py ").splitlines():
        names = line.split("   ")[0]
        named |= {name.strip() for name in names.split(", ")}
    assert named | {"README.md"} == here


def test_readme_has_at_most_1150_words():
    assert len(TEXT.split()) <= 1150


def test_flags_of_the_ladder_undo_what_a_method_adds():
    """They are the flags with which tests/test_ladder.py compares a method with the one above."""
    ladder = diagram_with("undo:")
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
    for text, method in zip(arrows, undo):
        words = text.split(",")[0].split()
        written = [word for word in words if word.startswith("--")]
        assert len(written) == len(undo[method])
        config = read_flags(["--method", method, *words])
        for name, value in undo[method].items():
            assert getattr(config, name) == value, (method, name)
    assert test_ladder.SGD.items() >= undo["post_local_sgd"].items()
    assert read_flags(["--method", "edit"]).tau == 16


def test_every_step_of_the_ladder_is_a_claim_of_the_ladders_test():
    compared = []  # the methods of each claim
    for _, _, cases in [*test_ladder.CLOSE.values(), *test_ladder.BITWISE.values()]:
        compared.append({case[0] for case in cases})
    for above, below in zip(LADDER, LADDER[1:]):
        assert any({above, below} <= methods for methods in compared), (above, below)


def rows_of_relatives():
    """The table's cells, by row."""
    lines = [line for line in RELATIVES.splitlines() if line.startswith("| `")]
    rows = []
    for line in lines[1:]:  # the first one is the header
        cells = line.split("|")[1:-1]
        rows.append([cell.strip() for cell in cells])
    return rows


def test_table_of_relatives_has_every_method_and_its_file():
    rows = rows_of_relatives()
    assert [row[0].split("`")[1] for row in rows] == list(METHODS)
    for method, row in zip(METHODS, rows):
        file, target = re.fullmatch(r"\[(.*)\]\((.*)\)", row[1]).groups()
        path = (ROOT / "relatives" / target).resolve()
        module = sys.modules[METHODS[method].__module__]
        assert path.name == file
        assert path == (ROOT / module.__file__).resolve()


def test_all_methods_but_zero_one_adam_take_muon():
    assert "`zero_one_adam` takes AdamW only" in RELATIVES
    for method in METHODS:
        config = read_flags(["--method", method, "--optimizer", "muon"])
        if method == "zero_one_adam":
            with pytest.raises(UserError, match="AdamW"):
                config.check(replicas=4)
        else:
            config.check(replicas=4)


def test_losses_and_bytes_of_the_relatives_are_those_of_the_frontier():
    found = defaultdict(list)
    for row in json.loads((ROOT / "lab/results/frontier_2000.json").read_text()):
        optimizer = "Muon" if row["method"] == "one_bit_edit" else "AdamW"
        own = row["optimizer"] == optimizer and row["variant"] in ("", "rounds that grow")
        if own and row["tau"] in (1, 16) and "over_minibatch" in row:
            found[row["method"]].append(row)
    for method, row in zip(METHODS, rows_of_relatives()):
        loss, sent = row[4:6]
        if method == "a_edit":
            assert loss == "as `edit`"
            continue
        losses = [run["over_minibatch"] for run in found[method]]
        assert len(losses) in (1, 4, 8)
        assert loss == mean_and_error(losses, "{:+.1%}")
        assert sent == f"1/{found[method][0]['fewer_bytes']:.0f}"


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


# ---- commands and flags ----


def test_flags_of_the_slurm_script_are_valid():
    script_text = (ROOT / "plumbing" / "slurm.sh").read_text()
    argv = script_text.split("train.py ")[1].split()
    assert read_flags(argv).tokens_per_step % (8 * 2048) == 0


NAMED = {
    "README": {"train.py", "data.py", "sample.py", "export.py", "lab", "lab.plot"},
    "RESULTS": {"lab"},
}


@pytest.mark.parametrize("name, text", [("README", TEXT), ("RESULTS", RESULTS)])
def test_every_command_names_real_files_modules_and_flags(name, text):
    seen = set()
    for command in commands(text):
        words = shlex.split(command)
        scripts = [word for word in words if word.endswith(".py")]
        modules = re.findall(r"-m (lab[.\w]*)", command)
        seen.update(scripts, modules)
        for path in scripts:
            assert (ROOT / path).exists(), command
        for module in modules:
            assert importlib.util.find_spec(module), command

        if "train.py" in scripts:
            first = words.index("train.py") + 1
            read_flags(words[first:])
        if "lab.bench" in modules:
            first = words.index("lab.bench") + 1
            read_flags(words[first:], bench.Flags)
        if modules == ["lab"]:
            experiment = set(words[3:4])
            assert experiment <= set(runs.EXPERIMENTS), command
    assert seen >= NAMED[name]


def test_flags_in_the_text_exist(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    programs = [
        lambda: read_flags(["--help", "all"]),
        lambda: read_flags(["--help", "all"], bench.Flags),
        data.main,
        sample.main,
        export.main,
        runs.main,
        plot.main,
    ]
    for show_help in programs:
        with pytest.raises(SystemExit):
            show_help()
    known = capsys.readouterr().out + "--max-restarts --shutdown_timeout --signal --include"  # torchrun, Slurm, grep

    launchers = r"(torchrun|srun|#SBATCH) .*?(train\.py|lab|$)"
    text = re.sub(launchers, "", TEXT + RESULTS + RELATIVES, flags=re.M)
    for flag in set(re.findall(r"--[a-z][\w-]*", text)):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known), flag


def test_makefile_runs_the_commands_of_the_readme():
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    shown = commands(TEXT)
    for command in command_with("torchrun --standalone"), "python -m pytest":
        assert command in makefile
        assert command in shown
    assert {"make train", "make test"} <= set(shown)


def test_experiments_have_valid_commands():
    for name, experiment in runs.EXPERIMENTS.items():
        found = experiment.runs([1])
        assert found or name == "scale"
        for run in found:
            argv = run.command().split("train.py ")[1].split()
            read_flags(argv).check(replicas=4)


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


def command_with_averaging(argv, rank, world_size, port, folder):
    """As in train.py after the README's two changes."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    METHODS["averaging"] = importlib.import_module("averaging").Averaging
    ranks._command(argv, rank, world_size, port, folder)


def values_in(record, event, key):
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    return [row[key] for row in rows if row["event"] == event]


def test_method_in_the_readme_trains_saves_and_resumes_as_printed(tmp_path, corpus_folder):
    assert len(METHOD.splitlines()) <= 10
    assert "METHODS = {" in (ROOT / "train.py").read_text()
    (tmp_path / "averaging.py").write_text(METHOD)
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
