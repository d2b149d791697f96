"""README.md, RESULTS.md, EXERCISES.md and the READMEs of folders are true: file tree, links, flags,
equation map, ladder, tables."""

import re
import statistics
import subprocess
import sys
from collections import defaultdict
from functools import partial

import pytest

import data
import hf
import sample
import test_ladder
from lab import bench, planner, sweep, table, timeline
from lab.rows import read_csv
from plumbing.simulate import FRAMING
from ranks import ROOT
from test_readme import RESULTS, TEXT, read_flags
from train import METHODS

RELATIVES = (ROOT / "relatives" / "README.md").read_text()
DOCS = (ROOT / "docs" / "README.md").read_text()
EXERCISES = (ROOT / "EXERCISES.md").read_text()
DIAGRAMS = re.findall(r"```text\n(.*?)```", TEXT, re.S)
LADDER = ["minibatch", "post_local_sgd", "diloco", "edit", "a_edit"]


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


def diagram_with(part):
    """The first diagram of the README that contains it."""
    return next(diagram for diagram in DIAGRAMS if part in diagram)


def test_equation_map_names_real_functions():
    rows = re.findall(r"`([\w/]+\.py):(\w+)`", TEXT)
    assert len(rows) > 8
    for file, function in rows:
        assert f"def {function}(" in (ROOT / file).read_text(), (file, function)


@pytest.mark.parametrize(
    "folder, text",
    [(".", TEXT), (".", RESULTS), (".", EXERCISES), ("relatives", RELATIVES), ("docs", DOCS)],
    ids=["README", "RESULTS", "EXERCISES", "relatives", "docs"],
)
def test_links_lead_to_files(folder, text):
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / folder / target).exists(), target


def test_flags_in_the_text_exist(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    programs = [
        *[partial(read_flags, ["--method", name, "--help"]) for name in METHODS],
        lambda: read_flags("--method minibatch --help".split(), {"minibatch": bench.Bench}),
        data.main,
        sample.main,
        hf.main,
        lambda: planner.main(["--help"]),
        lambda: timeline.main(["--help"]),
        lambda: sweep.read_command(["x", "--help"]),
        lambda: table.main(["--help"]),
    ]
    for show_help in programs:
        with pytest.raises(SystemExit):
            show_help()
    known = capsys.readouterr().out + "--max-restarts --shutdown_timeout --signal --include --index-url"  # torchrun, Slurm, grep, pip

    launchers = r"(torchrun|srun|#SBATCH) .*?(train\.py|lab|$)"
    text = re.sub(launchers, "", TEXT + RESULTS + RELATIVES, flags=re.M)
    for flag in set(re.findall(r"--[a-z][\w-]*", text)):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known), flag


# What runs, optimizers and models are made of needs no text.
UNTOLD = set("log_interval eval_interval eval_batches checkpoint_interval timeout_s".split())
UNTOLD |= set("anomaly_ema delay alpha offload beta1 beta2 weight_decay min_lr_ratio".split())
UNTOLD |= set("n_hidden norm_eps rope_base".split())


def test_every_flag_has_a_reader():
    told = TEXT + RESULTS + RELATIVES
    for pattern in "EXERCISES.md", "docs/*.md", "lab/experiments/*.sh":
        told += "".join(path.read_text() for path in ROOT.glob(pattern))
    for method in METHODS.values():
        for name in method.Config.__dataclass_fields__.keys() - UNTOLD:
            assert re.search(rf"--(no-)?{name}\b", told), name


# ---- the ladder ----


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


# ---- the table of relatives ----


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


def test_losses_and_bytes_of_the_relatives_are_those_of_the_frontier():
    """Means over the paired seeds; one_bit_edit with Muon, beside averaged gradients with Muon."""
    runs = []
    for name in "frontier", "frontier_others":
        runs += read_csv(ROOT / f"lab/results/{name}.csv")
    muon = read_csv(ROOT / "lab/results/frontier_muon.csv")
    muon_bases = {run.seed: run.loss for run in muon if run.flags["method"] == "minibatch"}
    for run in muon:
        if run.flags["method"] == "one_bit_edit" and run.flags.get("quantize") != "two_bits":
            runs.append(run)
    found = defaultdict(list)
    sent = {}
    for run in runs:
        found[run.flags["method"]].append(run)
        sent[run.flags["method"]] = run.results["sync_bytes"]
    bases = {run.seed: run.loss for run in found["minibatch"]}
    for method, row in zip(METHODS, rows_of_relatives()):
        loss, bytes_sent = row[4:6]
        if method == "a_edit":
            assert loss.startswith("see (d)")
            continue
        if method == "qsr":  # it was not compared
            assert loss == bytes_sent == ""
            continue
        compared = muon_bases if method == "one_bit_edit" else bases
        distances = [run.loss / compared[run.seed] - 1 for run in found[method]]
        assert len(distances) in (1, 4, 8)
        expected = f"{statistics.mean(distances):+.1%}"
        if len(distances) > 1:
            error = statistics.stdev(distances) / len(distances) ** 0.5
            expected += f" ({error:.1%})"
        if method == "one_bit_edit":
            expected += " ‡"
        assert loss == expected
        assert bytes_sent == f"1/{sent['minibatch'] / sent[method]:.0f}"


def test_table_says_which_method_does_not_take_muon():
    assert "`zero_one_adam` takes AdamW only" in RELATIVES


# ---- the table on the first screen ----


def test_losses_and_minutes_of_the_first_screen_follow_from_kept_runs():
    """Minutes of 2,000 steps: computing, and the bytes over the link, with the headers of TCP and
    Ethernet. One machine alone needs four times as long for a step as four together."""
    runs = read_csv(ROOT / "lab/results/frontier.csv")
    step_s = 0.054  # beside the table
    assert "a measured step of 54 ms" in TEXT.replace("\n", " ")
    found = {}
    for method in "minibatch", "edit", "diloco":
        own = [run for run in runs if run.flags["method"] == method and run.seed in (5, 6, 8, 9)]
        assert len(own) == 4
        found[method] = statistics.mean(run.loss for run in own), own[0].results["sync_bytes"]

    def minutes(bytes_sent, mbps):
        return (2000 * step_s + bytes_sent * 8 * FRAMING / (mbps * 1e6)) / 60

    alone = 4 * 2000 * step_s / 60
    loss, sent = found["minibatch"]
    edit_loss, edit_sent = found["edit"]
    rows = [
        f"| one of the machines alone | {loss:.3f} | {alone:.1f} | {alone:.1f} |",
        f"| averaged gradients (DDP) on all four | {loss:.3f} | {minutes(sent, 100):.0f} "
        f"| {minutes(sent, 10):.0f} |",
        f"| EDiT on all four | {edit_loss:.3f} | {minutes(edit_sent, 100):.1f} "
        f"| {minutes(edit_sent, 10):.0f} |",
    ]
    for row in rows:
        assert row in TEXT
    higher = [found[method][0] / loss - 1 for method in ("edit", "diloco")]
    assert f"{higher[0]:.1%} higher here (DiLoCo: {higher[1]:.1%})" in TEXT.replace("\n", " ")
