"""README.md, RESULTS.md, EXERCISES.md and the pages of folders are true: file tree, links, flags,
equation map, ladder, tables."""

import re
import statistics
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.distributed.run import get_args_parser

import data
import hf
import one_page
import sample
import test_ladder
from lab import bench, planner, rows, sweep, table, timeline, worth
from methods import METHODS
from plumbing import plan
from ranks import ROOT
from relatives import quantize, robust
from test_readme import RESULTS, TEXT, read_flags

RELATIVES = (ROOT / "relatives" / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "relatives/README.md"]
PAGES = sorted([*PAGES, ROOT / "lab/LOG.md"])
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


def test_rows_of_the_first_screen_are_those_of_the_page_that_prints_them():
    assert diagram_with("flagged layers") in one_page.__doc__


def diagram_with(part):
    """The first diagram of the README that contains it."""
    return next(diagram for diagram in DIAGRAMS if part in diagram)


def test_equation_map_names_real_functions():
    named = re.findall(r"`([\w/]+\.py):(\w+)`", TEXT)
    assert len(named) > 8
    for file, function in named:
        assert f"def {function}(" in (ROOT / file).read_text(), (file, function)


def anchors(path) -> set:
    """Of the headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), (target, anchor)


def test_links_of_the_page_with_sliders_lead_to_files():
    links = re.findall(r'href="([^"#]+)"', (ROOT / "explain.html").read_text())
    assert "RESULTS.md" in links
    assert all((ROOT / link).exists() for link in links)


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
    known = capsys.readouterr().out + get_args_parser().format_help()  # torchrun's
    known += "--index-url"  # of pip

    pages = [path.read_text() for path in PAGES if path.name != "LOG.md"]  # it has old flags
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]*", "".join(pages))):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known), flag


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
    found = []
    for line in lines[1:]:  # the first one is the header
        cells = line.split("|")[1:-1]
        found.append([cell.strip() for cell in cells])
    return found


def test_table_of_relatives_has_every_method_and_its_file():
    found = rows_of_relatives()
    assert [row[0].split("`")[1] for row in found] == list(METHODS)
    for method, row in zip(METHODS, found):
        file, target = re.fullmatch(r"\[(.*)\]\((.*)\)", row[1]).groups()
        path = (ROOT / "relatives" / target).resolve()
        module = sys.modules[METHODS[method].__module__]
        assert path.name == file
        assert path == (ROOT / module.__file__).resolve()


def kept_lines(*names) -> list:
    """The runs of each line of the table of these kept files, with distances to minibatch."""
    runs = []
    for name in names:
        runs += rows.read_csv(ROOT / f"lab/results/{name}.csv")
    table.page(runs, ["method=minibatch"], [])
    return list(rows.find_lines(runs, rows.find_columns(runs)[0]).values())


def test_losses_and_bytes_of_the_relatives_are_those_of_the_frontier():
    """With intervals as lab.table prints them. A loss of one seed has none and is not shown;
    one_bit_edit is compared with averaged gradients with Muon."""
    found = {}
    for names in ["frontier"], ["frontier_muon"]:
        lines = kept_lines(*names)
        others = [line for line in lines if line[0].why != "base"]
        spread = table.Spread.of([table.distances_of(line) for line in others])
        for line in others:
            method = line[0].flags["method"]
            ours = method != "edit" and line[0].flags.get("quantize") != "two_bits"
            if names == ["frontier"] or ours:
                over = table.distances_of(line)
                half = spread.half_interval(len(over))
                found[method] = f"{statistics.mean(over):+.1%} +- {half:.1%}"
    found["one_bit_edit"] += " ‡"
    found["a_edit"] = "[RESULTS](../RESULTS.md)"

    sent = {}
    for line in kept_lines("frontier", "frontier_others") + kept_lines("frontier_muon"):
        sent[line[0].flags["method"]] = line[0].results["sync_bytes"]
    sent["one_bit_edit"] = min(
        run.results["sync_bytes"] for line in kept_lines("frontier_muon") for run in line
    )
    for method, row in zip(METHODS, rows_of_relatives()):
        assert row[4] == found.get(method, ""), method
        share = f"1/{sent['minibatch'] / sent[method]:.0f}" if method in sent else ""
        assert row[5] == share, method


def test_numbers_walked_through_are_those_of_the_code():
    wanted = torch.tensor([0.6, -0.2, 0.1])
    blocks = torch.nn.functional.pad(wanted, (0, quantize.BLOCK - 3))[None]
    read = quantize.decode(quantize.encode(blocks, "sign"), "sign")[0, :3]
    assert "0.6, -0.2 and 0.1" in RELATIVES and "so the others read 0.3, -0.3 and 0.3" in RELATIVES
    torch.testing.assert_close(read, torch.tensor([0.3, -0.3, 0.3]))
    assert "have not got, 0.3, 0.1 and -0.2" in RELATIVES
    torch.testing.assert_close(wanted - read, torch.tensor([0.3, 0.1, -0.2]))

    moved = torch.tensor([[2.0], [3.0], [4.0], [-3.0]])
    assert "by 2, 3 and 4, and one lies and says -3. The mean is 1.5" in RELATIVES
    assert moved.mean() == 1.5 and robust.middle(moved, 1) == 2.5
    assert "the middle two, is 2.5" in " ".join(RELATIVES.split())

    settings = read_flags("--method streaming_edit --tau 16".split())
    assert (settings.fragments, settings.steps_late) == (4, 2)
    settings = read_flags("--method sparse_loco".split())
    assert round(settings.density * 4096) == 512 and settings.error_decay == 0.95


# ---- the table on the first screen ----


def test_first_screen_shows_lines_of_the_table_of_worth():
    names = {"averaged gradients, as in DDP": "averaged gradients"}
    names |= {
        "EDiT, rounds of 16 steps": "EDiT, tau 16",
        "[Streaming EDiT](relatives/README.md) (ours)": "Streaming EDiT, 4 bits",
    }
    head, *lines = worth.table_lines(list(map(worth.Result, worth.LINES)))
    computed = {line[0]: dict(zip(head, line)) for line in lines}
    screen = TEXT[TEXT.index("## What you gain") : TEXT.index("## Where to go")]
    in_one_line = screen.replace("\n", " ")
    shown = [row for row in screen.splitlines() if row.startswith("| ")][1:]
    assert len(shown) == 5
    for row in shown[1:]:
        name, *cells = [cell.strip() for cell in row.split("|")[1:-1]]
        line = computed[names.get(name, name)]
        expected = [line[key] for key in ("loss", "10 Mbit/s", "100 Mbit/s", "pays from")]
        assert cells == expected, name

    edit_runs = worth.runs_of("frontier", {"method": "edit"})
    base = statistics.mean(run.loss for run in worth.runs_of("frontier", {"method": "minibatch"}))
    higher = statistics.mean(run.loss for run in edit_runs) / base - 1
    assert f"EDiT's is {higher:.1%} above that of averaged gradients" in in_one_line
    edit = worth.Result(next(line for line in worth.LINES if line.name == "EDiT, tau 16"))
    share = worth.steps_alone(edit.loss, edit.alone) / edit.steps
    text = " ".join(TEXT.split())
    assert f"in {share:.0%} of the steps, so rounds of 16 steps keep {share:.0%} of the speed" in text
    long = worth.Result(next(line for line in worth.LINES if line.name == "EDiT, tau 64"))
    kept = worth.steps_alone(long.loss, long.alone) / long.steps
    assert f"and rounds of 64 only {kept:.0%}. At that price" in text
    assert plan.ROUNDS_KEEP == {16: round(share, 2), 64: round(kept, 2)}
    assert f"computes all the time, so at that price it is worth {2 * share:.1f}." in text
    assert round(1000 * edit.t) == 41 and round(worth.PARAMETERS / 1e6, 2) == 0.92
    highest = edit.a / edit.t
    assert f"{highest:.1f} is the highest possible here" in in_one_line
