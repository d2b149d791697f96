"""Whoever follows README's "Writing a method", or task 11 of EXERCISES.md, keeps a green suite."""

import os
import re
import shutil
import subprocess
import sys

from ranks import ROOT

# name, class and file of the method; where it is printed
RECIPES = {
    "averaging": ("Averaging", "averaging.py", "README.md", "## Writing a method"),
    "second": ("EverySecond", "second.py", "EXERCISES.md", "**11. "),
}
# Tests that go through all methods; and a few that train one.
ENUMERATING = (
    "help or wrong_input or take_muon or only_selected or commands_for_own_text or printed"
    " or (ladder and warm) or (planned_equal and (minibatch or top_k))"
    " or (fp64_reference and post_local_sgd)"
)


def run_pytest(folder, *words) -> str:
    """What `python -m pytest` prints in this folder."""
    command = [sys.executable, "-m", "pytest", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def collected(folder) -> list:
    """The tests of `make test`."""
    return [line for line in run_pytest(folder, "--collect-only").splitlines() if "::" in line]


def test_suite_is_green_with_methods_of_ones_own(tmp_path):
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "out", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    before = collected(copy)
    assert len(before) > 300
    assert not any("house" in line for line in before)

    path = copy / "train.py"
    for name, (class_name, file, text, heading) in RECIPES.items():
        section = (ROOT / text).read_text().split(heading)[1]
        (copy / file).write_text(re.search(r"```python\n(.*?)```", section, re.S)[1])
        named = f'from {file[:-3]} import {class_name}\nMETHODS = {{"{name}": {class_name}, '
        path.write_text(path.read_text().replace("METHODS = {", named))
    assert collected(copy) == before
    run_pytest(copy, "-k", ENUMERATING)

    for name in RECIPES:
        printed = subprocess.run(
            [sys.executable, "train.py", "--method", name, "--dry_run", "--device", "cpu"],
            cwd=copy, capture_output=True, text=True,
        )  # fmt: skip
        assert printed.returncode == 0, printed.stderr
        assert f"{name} on 1 ranks" in printed.stdout
