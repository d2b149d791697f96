"""Every command of the texts and of the docstrings runs, with small settings; or ELSEWHERE says who
runs it, or why nobody can. They run in the order of the texts, and some need what others wrote."""

import ast
import os
import re
import runpy
import shlex
import shutil
import sys
from glob import glob

import pytest
from torch.distributed.run import get_args_parser

import data
import ranks
from methods import METHODS
from ranks import ROOT, Launch
from test_readme import commands
from test_texts import PAGES

ELSEWHERE = {  # beginning of a command -> who runs it, or why nobody does
    "make ": "tests/test_readme.py: the Makefile has README's commands",
    "python3 -m venv": ".ci/run",
    "pip install": ".ci/run",
    "python -m pytest": ".ci/run",
    "python -m lab.bench": "tests/test_bench.py",
    "python -m lab.timeline": "tests/test_lab.py",
    "python -m lab.worth": "tests/house/test_results.py",
    "python -m lab.table out/sweep/tune": "the hours of lab/experiments/tune.sh",
    "python one_page.py": "tests/test_one_page.py",
    "python docs/tour.py": "tests/test_docs.py",
    "python docs/notebook.py": "tests/test_docs.py",
    "python examples/make_edit_rounds.py": "tests/test_conformance.py",
    "python check_edit.py": "tests/test_conformance.py",
    "python examples/own_layers.py": "tests/test_own.py",
    "python data.py --input book.txt more.jsonl shard.parquet": "tests/test_ecosystem.py",
    "python hf.py": "tests/test_ecosystem.py: it needs transformers",
    "torchrun train.py --init_from my_model": "it needs what the command above writes",
    "torchrun examples/own_layers.py": "tests/test_own.py",
    "torchrun examples/train_fsdp2.py": "tests/test_fsdp2.py",
    "torchrun examples/bench_fsdp2.py": "tests/test_fsdp2.py",
    "torchrun -m lab.bench": "tests/test_bench.py",
    "sh lab/experiments/two_gpus.sh": "tests/test_two_gpus.py",
    "sh lab/experiments/": "hours; tests/house/test_results.py reads each line of these scripts",
    "git ": "a clone with its history",
    "sudo ": "root",
    "export ": "the shell",
    "cp ": "the shell",
}
EXERCISES = "EXERCISES.md", "docs/answers.md"  # tests/test_exercises.py runs theirs
TRAININGS = ("train.py", "plain", "lab.sweep", "lab.loss_rule")
SMALL = {  # those of these flags that a method has
    "device": "cpu", "n_layer": 2, "n_embd": 8, "n_head": 1, "block_size": 16, "batch_size": 1,
    "sync_warmup_steps": 2, "lr_warmup_steps": 1, "tau": 4,
    "tau_time_s": 0.01, "eval_batches": 1,
}  # fmt: skip


def usage(path) -> list:
    """The commands in a module's docstring: indented lines, and `Run:`."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        shown = re.match(r"(?:    |Run: )((?:OMP_\S+ )?(?:python|torchrun|sh) .*)", line)
        if shown and " is killed " not in line:
            found.append(shown[1].split(" #")[0])
    return found


def commands_of_all_texts() -> list:
    """Each once, in one line."""
    found = []
    for page in PAGES:
        if str(page.relative_to(ROOT)) not in EXERCISES:
            found += commands(page.read_text())
    for folder in "", "plain", "plumbing", "relatives", "lab", "examples", "docs":
        for path in sorted((ROOT / folder).glob("*.py")):
            found += usage(path)
    return list(dict.fromkeys(" ".join(command.split()) for command in found))


def read_launcher(command) -> tuple:
    """How many ranks torchrun starts, and the command with no word of torchrun but its name."""
    command = command.removeprefix("OMP_NUM_THREADS=1 ")
    launched = re.fullmatch(r"torchrun (.*?) ?(\S+\.py.*|-m lab\.bench.*)", command)
    if not launched:
        return 1, command
    launcher, rest = launched.groups()
    launcher = launcher.replace("...", "--nproc_per_node 2")
    flags = get_args_parser().parse_args([*launcher.split(), "train.py"])
    return int(flags.nnodes.split(":")[0]) * int(flags.nproc_per_node), f"torchrun {rest}"


def reason(command) -> str:
    """Why it does not run here, or nothing."""
    _, short = read_launcher(command)
    return next((why for beginning, why in ELSEWHERE.items() if short.startswith(beginning)), "")


ALL = commands_of_all_texts()
HERE = [command for command in ALL if not reason(command)]
HERE.sort(key=lambda command: "lab.table" in command)  # after the runs that they compare


def test_what_does_not_run_here_has_its_reason_and_its_files():
    assert len(HERE) > 50
    for command in ALL:
        for file in re.findall(r"[\w/]+\.(?:sh|py)\b", command):
            assert (ROOT / file).exists() or (ROOT / "examples" / file).exists(), command
    for beginning, why in ELSEWHERE.items():
        assert any(read_launcher(command)[1].startswith(beginning) for command in ALL), beginning
        if why.startswith("tests/"):
            program = re.findall(r"\w+", beginning.removesuffix(".py"))[-1]
            assert program in (ROOT / why.split(":")[0].split(" ")[0]).read_text(), beginning


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands find: two texts, a corpus, and the kept runs."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "book.txt").write_text("It was a dark and stormy night. " * 400)
    (folder / "more.jsonl").write_text('{"text": "the rain fell in torrents"}\n')
    data.write_corpus([("the rain fell in torrents. " * 400, True)], "byte", folder / "my_corpus")
    (folder / "lab").symlink_to(ROOT / "lab")
    return folder


def start(argv, rank, world_size, port, out, program, folder):
    """In place of ranks._command: `python program argv`, or `python -m program argv`."""
    os.chdir(folder)
    if program == "train.py":
        return ranks._command(argv, rank, world_size, port, out)
    ranks._write_to(out, rank)
    sys.argv = [program, *argv]
    if program.endswith(".py"):
        runpy.run_path(str(ROOT / program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def made_small(words, count) -> list:
    """The words of a training with the values of SMALL. More ranks take more steps, so that two
    machines go on where one has ended."""
    at = words.index("--method") + 1 if "--method" in words else len(words)
    methods = [word for word in words[at:] if word in METHODS] or ["edit"]
    words = [word for word in words if word != "--compile"]
    if "--tokens_per_step" in words:
        words[words.index("--tokens_per_step") + 1] = "0"
    for flag, value in {"max_steps": 5 + count, **SMALL}.items():
        if not any(flag in METHODS[name].Config.__dataclass_fields__ for name in methods):
            continue
        if f"--{flag}" not in words:
            words += [f"--{flag}", str(value)]
            continue
        at = words.index(f"--{flag}") + 1
        if words[at + 1 : at + 2] and not words[at + 1].startswith("--"):
            continue  # several values, of a sweep
        words[at] = str(value)
    return words


@pytest.mark.parametrize("command", HERE)
def test_command_runs(command, folder, tmp_path):
    count, short = read_launcher(command)
    launcher, program, *words = shlex.split(short.replace("NAME", "edit"))
    if program == "-m":
        program, *words = words
    if program in TRAININGS and not {"--help", "--dry_run"} & {*words}:
        while count > 4:  # as many replicas of fewer shards
            count //= 2
            at = words.index("--shards") + 1
            words[at] = str(int(words[at]) // 2)
        words = made_small(words, count)
        if program != "lab.sweep" and "--resume" not in words and "--overwrite" not in words:
            words.append("--overwrite")
    if program == "data.py":  # it keeps what is there
        shutil.rmtree(folder / "my_corpus", ignore_errors=True)
    words = [each for word in words for each in sorted(glob(word, root_dir=folder)) or [word]]
    special = {rank: (start, program, folder) for rank in range(count)}
    launch = Launch(count, tmp_path, *words, special=special)
    assert launch.wait() == [0] * count, "\n".join(launch.lines("err"))
    assert launch.lines("out")
