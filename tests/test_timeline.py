"""The timeline model: cases worked out by hand, the published table, what must hold everywhere."""

import json
import math
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from plumbing.timeline import LEVELS, MODELS, SCHEDULES, Model, needed, rows, utilization
from ranks import ROOT
from train import METHODS

# arXiv 2501.18512, table 4: Gbit/s for 50, 80, 90, 95, 99%
PUBLISHED = {
    ("1b", "minibatch"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1b", "paper_diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1b", "paper_streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1b", "paper_overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1b", "paper_overlap_4bit"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10b", "minibatch"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10b", "paper_diloco"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10b", "paper_streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10b", "paper_overlap"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10b", "paper_overlap_4bit"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100b", "minibatch"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100b", "paper_diloco"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100b", "paper_streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100b", "paper_overlap"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100b", "paper_overlap_4bit"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
NEEDED = needed(rows() + rows(paper=True))
LINKS = [10 ** (k / 8) for k in range(-16, 33)]  # Gbit/s


def compared(*names):
    """(ours / theirs, the same in grid values) for each published value of these models."""
    for (name, method), row in PUBLISHED.items():
        for level, theirs in zip(LEVELS, row):
            if name in names:
                ratio = NEEDED[name, method][level] / theirs
                yield ratio, round(math.log10(ratio) * 49 / 4)


def test_published_needs_of_1b_are_met_within_one_grid_value():
    ratios = [ratio for ratio, _ in compared("1b")]
    assert sum(1 / 1.25 <= ratio <= 1.25 for ratio in ratios) >= 20
    assert all(1 / 2 <= ratio <= 2 for ratio in ratios)


def test_distance_to_the_published_table_is_as_the_docstring_says():
    assert Counter(step for _, step in compared("1b")) == {0: 4, 1: 21}
    assert Counter(step for _, step in compared("10b", "100b")) == {0: 5, 1: 42, 2: 3}


@pytest.mark.parametrize(
    "method, gbit_per_s, round_s",  # of H = 100 steps of 6 s
    [
        # forward 2 s, layer 1's backward to 4 s, layer 0's to 6 s; a layer takes 4 s on the link:
        ("minibatch", 2, 100 * 12),  # layer 1 from 4 to 8 s, layer 0 from 8 to 12 s
        ("diloco", 2, 600 + 8),  # both after the step
        ("paper_diloco", 2, 600 + 6),  # both after layer 1's backward, 2 s before the step's end
        ("edit", 2, 600 + 7),  # layer 0 arrives after 4 s, layer 1 after 8 s, due after 4 + 1 s
        ("edit", 8, 600 + 1),  # first layer only
        ("co2", 16 / 700, 700),  # 700 s on the link, 600 s of compute
        ("co2", 16 / 500, 600),
        ("paper_overlap", 1, 600 + 8),  # from 4 to 20 s, due at 12 s
        ("streaming_diloco", 0.5, 600 + 2),  # 4 bits: 8 s, due after a step of 6 s
    ],
)
def test_round_by_hand(method, gbit_per_s, round_s):
    model = Model(1e9, 2, 6.0)
    assert utilization(method, model, gbit_per_s) == pytest.approx(600 / round_s, rel=1e-9)


def test_strided_fragments_by_hand():
    # Forward 6 s, layers' backwards end at 8, 10, ..., 18 s, a layer takes 3 s on the link.
    # Layers 4, 2, 0: 10 to 13, 14 to 17, 18 to 21 s. Layers 5, 3, 1: 8 to 11, 12 to 15, 16 to 19 s.
    model = Model(6e9, 6, 18.0)
    expected = 1800 / (1800 + 3 + 1)
    assert utilization("paper_streaming", model, 16 / 3) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_utilization_rises_with_bandwidth_to_1(name):
    model = MODELS[name]
    for method in SCHEDULES:
        values = [utilization(method, model, gbit) for gbit in LINKS]
        assert all(a <= b + 1e-9 for a, b in zip(values, values[1:])), method
        assert utilization(method, model, 1e6) == pytest.approx(1, abs=1e-4), method
        at = NEEDED[name, method]["90%"]
        assert utilization(method, model, at) >= 0.9 > utilization(method, model, at / 1.208)


@pytest.mark.parametrize("name", MODELS)
def test_more_overlap_is_never_slower(name):
    order = "diloco edit co2 | diloco paper_diloco paper_streaming paper_overlap paper_overlap_4bit"
    for gbit in LINKS:
        used = {method: utilization(method, MODELS[name], gbit) for method in SCHEDULES}
        for chain in order.split("|"):
            values = [used[method] for method in chain.split()] + [1]
            assert all(a <= b + 1e-9 for a, b in zip(values, values[1:])), (gbit, chain)


def test_every_method_has_rows_and_the_result_has_these():
    found = rows()
    assert {(row["model"], row["method"]) for row in found} == set(product(MODELS, METHODS))
    assert all(0 < row["utilization"] <= 1 for row in found)
    assert found == json.loads(Path(ROOT, "results/scale.json").read_text())
