"""Who follows README's "Writing a method", or task 11 of EXERCISES.md, keeps a green suite."""

import re
import shlex

from ranks import ROOT
from test_readme import copy_of_the_project, files_of_the_recipe, follow, python_in

# Tests that go through all methods; and a few that train one.
ENUMERATING = (
    "help or wrong_input or take_muon or commands_for_own_text or printed"
    " or (ladder and warm) or (planned_equal and (minibatch or top_k or averaging))"
    " or (fp64_reference and (post_local_sgd or averaging))"
)


def pytest_in(folder, words) -> str:
    """What `python -m pytest` prints in this folder."""
    done = python_in(folder, f"python -m pytest {words}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def collected(folder) -> set:
    """The tests of `make test`."""
    lines = pytest_in(folder, "--collect-only").splitlines()
    return {line for line in lines if "::" in line}


def test_suite_is_green_with_methods_of_ones_own(tmp_path):
    copy = tmp_path / "copy"
    copy_of_the_project(copy)
    before = collected(copy)
    assert len(before) > 300
    assert not any("house" in line for line in before)

    answer = (ROOT / "docs" / "answers.md").read_text().split("**11. ")[1]
    follow({"second.py": re.search(r"```python\n(.*?)```", answer, re.S)[1]}, copy)
    follow({"methods.py": '    "second": ("EverySecond", "second", ""),\n'}, copy)
    assert collected(copy) == before  # without a plain version nothing is promised
    follow(files_of_the_recipe(), copy)
    more = collected(copy) - before  # it is tested like ours
    assert any("averaging" in line for line in more)
    pytest_in(copy, f"-k {shlex.quote(ENUMERATING)}")

    for name in "averaging", "second":
        done = python_in(copy, f"python train.py --method {name} --dry_run --device cpu")
        assert done.returncode == 0, done.stderr
        assert f"{name} on 1 ranks" in done.stdout
