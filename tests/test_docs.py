"""docs/: the pictures are those of their script, readable and true; the tour runs; links lead to
files."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest
import torch

import data
from docs import pictures
from ranks import ROOT

DOCS = ROOT / "docs"
README = (DOCS / "README.md").read_text()
TOUR = (DOCS / "tour.py").read_text()
DRAWN = sorted(DOCS.glob("*.svg"))


# ---- the pictures ----


def test_pictures_are_what_their_script_writes(tmp_path):
    pictures.main(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(written) == 7
    assert written == {path.name: path.read_text() for path in DRAWN}


def text_box(element) -> tuple:
    """(left, top, right, bottom) of a text, about."""
    size = float(element.get("font-size"))
    wide = 0.6 if element.get("font-weight") == "bold" else 0.55
    width = wide * size * len(element.text)
    before = {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor")]
    left = float(element.get("x")) - before * width
    y = float(element.get("y"))
    return left, y - 0.75 * size, left + width, y + 0.2 * size


def overlap(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("path", DRAWN, ids=[path.stem for path in DRAWN])
def test_pictures_are_readable_at_the_width_of_a_readme(path):
    root = ElementTree.parse(path).getroot()
    width, height = int(root.get("width")), int(root.get("height"))
    assert width == 720
    shapes = [element for element in root if element.tag.endswith("}rect")]
    assert shapes[0].get("fill") == "#ffffff"  # a page may be dark
    assert (float(shapes[0].get("width")), float(shapes[0].get("height"))) == (width, height)

    texts = [element for element in root if element.tag.endswith("}text")]
    assert len(texts) >= 5
    boxes = {}
    for element in texts:
        assert float(element.get("font-size")) >= 12
        box = text_box(element)
        assert box[0] >= 0 and box[1] >= 0, element.text
        assert box[2] <= width and box[3] <= height, element.text
        boxes[element] = box
    for one, other in combinations(texts, 2):
        assert not overlap(boxes[one], boxes[other]), (one.text, other.text)


def test_buffers_are_those_of_the_trace_in_shard_py():
    order, gathers, held = pictures.trace(4)
    assert order == [0, 1, 2, 3, 3, 2, 1, 0]
    assert gathers == {-1: 0, 0: 1, 1: 2, 2: 3, 5: 1}
    assert held == {0: [[0, 0, 0], [2, 2, 5]], 1: [[1, 1, 1], [3, 3, 4], [1, 6, 6]]}
    for L in range(4, 9):
        assert len(pictures.trace(L)[1]) == 2 * L - 3


@pytest.mark.parametrize("c", [0.5, 1.0, 1.4, 5.0])
def test_exposed_part_of_the_exchange_is_the_formula_of_edit_py(c):
    for L in range(1, 7):
        _, waits = pictures.exchange_times(L, c, 1.0)
        assert sum(waits) == pytest.approx(max(c, L * c - (L - 1)))


def test_outer_step_goes_downhill_and_beyond_the_mean():
    best = torch.tensor(pictures.BEST, dtype=torch.float64).mean(dim=0)

    def loss(x):
        return ((x - best) @ pictures.H @ (x - best) / 2).item()

    for anchor, _, mean, after in pictures.outer_rounds(2):
        assert loss(after) < loss(mean) < loss(anchor)
        assert (after - anchor).norm() > (mean - anchor).norm()
    assert torch.stack([mean - anchor, after - anchor]).det().abs() > 0.5  # not the same direction


def test_rounds_of_the_timelines_have_the_numbers_that_the_pictures_tell():
    _, minibatch = pictures.simulate([[1.0], [1.0]], [1, 1], 0.5, 12.0)
    _, local = pictures.simulate([[1.0], [1.0]], [4, 4], 0.5, 12.0)
    assert (minibatch, local) == ([8, 8], [11, 11])
    spans, counts = pictures.simulate([[1.0], [2.0]], [8, 4], 0.7, 17.4)
    assert counts == [16, 8]
    assert all(begin == end for _, color, begin, end in spans if color == pictures.OTHERS)


def test_flagged_replica_has_no_weight_and_a_large_norm_a_small_one():
    limits, flagged, weights = pictures.judge([1.0, 1.2, 0.9, 2.1])
    assert flagged == [False] * 4 and limits[3] > 2.1
    assert 0 < weights[3] < min(weights[:3])
    _, flagged, weights = pictures.judge([1.0, 1.2, 0.9, 4.0])
    assert flagged == [False, False, False, True] and weights[3] == 0


# ---- README.md and EXERCISES.md ----


def test_readme_shows_each_picture_once_with_a_text_for_those_who_do_not_see_it():
    shown = re.findall(r"!\[(.*?)\]\((\w+\.svg)\)", README)
    assert sorted(name for _, name in shown) == [path.name for path in DRAWN]
    assert [name for _, name in shown] == [f"{draw.__name__}.svg" for draw in pictures.PICTURES]
    assert all(len(alt) > 40 for alt, _ in shown)


def test_links_lead_to_files():
    for folder, text in (DOCS, README), (ROOT, (ROOT / "EXERCISES.md").read_text()):
        targets = re.findall(r"\]\((?!http)([^)#]+)", text)
        assert len(targets) > 7
        for target in targets:
            assert (folder / target).exists(), target


# ---- the tour ----

SHORT = {
    "STEPS = 160": "STEPS = 30", "WARMUP = 16": "WARMUP = 4", "TAU = 8": "TAU = 2",
    "SICK_ROUND = 13": "SICK_ROUND = 12",
    "LAYERS, CHANNELS, CONTEXT = 2, 64, 64": "LAYERS, CHANNELS, CONTEXT = 1, 16, 8",
}  # fmt: skip


def run_tour(changes) -> dict:
    """All cells, with other numbers. Returns the variables."""
    text = TOUR
    for old, new in changes.items():
        assert text.count(f"\n{old}") == 1, old
        text = text.replace(old, new)
    variables = {"__name__": "tour"}
    exec(compile(text, "tour.py", "exec"), variables)
    return variables


def test_short_tour_flags_the_sick_replica_and_needs_no_matplotlib(corpus, monkeypatch, capsys):
    monkeypatch.setattr(data, "standard_library", lambda: corpus)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    losses = run_tour(SHORT)["losses"]
    printed = capsys.readouterr().out
    healthy = ["mini-batch", "local SGD", "DiLoCo", "EDiT"]
    assert list(losses) == [*healthy, "DiLoCo, sick", "EDiT, sick"]
    assert len(losses["mini-batch"]) == 15
    assert {len(losses[method]) for method in losses if method != "mini-batch"} == {13}
    for (step, with_sick), (same, without) in zip(losses["DiLoCo, sick"][:11], losses["DiLoCo"]):
        assert step == same
        assert with_sick == pytest.approx(without, rel=1e-4)
    flagged = re.findall(r"round 12 .*flagged layers (.*?) \|", printed)
    assert flagged == ["0 0 0 0", "0 0 0 0", "0 0 0 3"]  # EDiT, DiLoCo and EDiT with the sick one
    assert printed.splitlines()[-1] == "no picture: pip install matplotlib"


def cells():
    return TOUR.split("# %%")[1:]


def test_cells_are_short_and_say_what_to_look_at():
    for cell in cells():
        assert len(cell.strip().splitlines()) <= 32
        assert re.search(r"\n# \w", cell)  # a comment before the code


def test_last_cell_draws_the_losses(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "tour.svg"
    losses = {"EDiT": [(1, 2.0), (2, 1.0)], "EDiT, sick": [(1, 2.5), (2, 1.5)]}
    exec(cells()[-1].partition("\n")[2], dict(losses=losses, PICTURE=picture, Path=Path))
    assert "EDiT, sick" in picture.read_text() or picture.stat().st_size > 5000


@pytest.mark.slow
def test_whole_tour_tells_the_story(tmp_path):
    """The claims in its comments, of the final losses."""
    picture = str(tmp_path / "tour.svg")
    losses = run_tour({'PICTURE = "out/tour.svg"': f"PICTURE = {picture!r}"})["losses"]
    final = {method: curve[-1][1] for method, curve in losses.items()}
    assert final["mini-batch"] < final["DiLoCo"] < final["local SGD"] < 1.15 * final["mini-batch"]
    assert final["EDiT"] == pytest.approx(final["DiLoCo"], rel=0.01)
    assert final["EDiT, sick"] == pytest.approx(final["EDiT"], rel=0.01)
    assert final["DiLoCo, sick"] > 1.1 * final["DiLoCo"]
