"""docs/: the pictures are those of their script, readable and true."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
import torch

from docs import pictures
from ranks import ROOT

DOCS = ROOT / "docs"
README = (DOCS / "README.md").read_text()
DRAWN = sorted(DOCS.glob("*.svg"))


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


def test_pictures_are_what_their_script_writes(tmp_path):
    pictures.main(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(written) == 7
    assert written == {path.name: path.read_text() for path in DRAWN}


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


def test_readme_shows_each_picture_once_with_a_text_for_those_who_do_not_see_it():
    shown = re.findall(r"!\[(.*?)\]\((\w+\.svg)\)", README)
    assert sorted(name for _, name in shown) == [path.name for path in DRAWN]
    assert [name for _, name in shown] == [f"{draw.__name__}.svg" for draw in pictures.PICTURES]
    assert all(len(alt) > 40 for alt, _ in shown)
