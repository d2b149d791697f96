"""docs/tour.py runs and tells its story."""

import re
import sys
from pathlib import Path

import pytest

import data
from ranks import ROOT

TOUR = (ROOT / "docs" / "tour.py").read_text()
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
