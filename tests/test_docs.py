"""docs/tour.py runs and tells its story; docs/tour.ipynb is the same."""

import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import data
from docs import notebook
from plain.diloco import DiLoCo
from plain.edit import EDiT
from plain.local import PostLocalSGD
from ranks import ROOT

TOUR = (ROOT / "docs" / "tour.py").read_text()
SHORT = {
    "STEPS = 160": "STEPS = 30", "WARMUP = 16": "WARMUP = 4", "TAU = 8": "TAU = 2",
    "SICK_ROUND = 13": "SICK_ROUND = 12",
    "LAYERS, CHANNELS, CONTEXT = 2, 64, 32": "LAYERS, CHANNELS, CONTEXT = 1, 16, 8",
}  # fmt: skip


def shortened_tour() -> str:
    text = TOUR
    for old, new in SHORT.items():
        assert text.count(f"\n{old}") == 1, old
        text = text.replace(old, new)
    return text


def run_short_tour() -> dict:
    """All cells, with smaller numbers. Returns the variables."""
    variables = {"__name__": "tour"}
    exec(compile(shortened_tour(), "tour.py", "exec"), variables)
    return variables


def test_short_tour_flags_the_sick_replica_and_needs_no_matplotlib(corpus, monkeypatch, capsys):
    monkeypatch.setattr(data, "standard_library", lambda: corpus)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    losses = run_short_tour()["losses"]
    printed = capsys.readouterr().out
    healthy = ["averaged gradients", "local SGD", "DiLoCo", "EDiT"]
    assert list(losses) == [*healthy, "DiLoCo, sick", "EDiT, sick"]
    assert {len(curve) for curve in losses.values()} == {15}  # averaged gradients: as often
    for (step, with_sick), (same, without) in zip(losses["DiLoCo, sick"][:13], losses["DiLoCo"]):
        assert step == same
        assert with_sick == pytest.approx(without, rel=1e-4)
    flagged = re.findall(r"round 12 .*flagged layers (.*)", printed)
    assert flagged == ["0 0 0 0", "0 0 0 0", "0 0 0 3"]  # EDiT, DiLoCo and EDiT with the sick one
    assert "after 17 exchanges" in printed and "after 30 exchanges" in printed
    assert printed.splitlines()[-1] == "no picture: pip install matplotlib"


def test_last_cell_draws_the_losses(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "tour.svg"
    losses = {"EDiT": [(1, 2.0), (2, 1.0)], "EDiT, sick": [(1, 2.5), (2, 1.5)]}
    _, last = notebook.read_cells(TOUR)[-1]
    exec(last, dict(losses=losses, PICTURE=picture, Path=Path))
    assert "EDiT, sick" in picture.read_text() or picture.stat().st_size > 5000


def test_notebook_is_the_tour_with_outputs():
    """If not: python docs/notebook.py"""
    found = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in found["cells"]]
    assert cells == notebook.read_cells(TOUR)
    for cell in found["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and ("print(" in code or "train(" in code):
            assert cell["outputs"][0]["text"]
    *_, picture = found["cells"][-1]["outputs"]
    assert picture["data"]["image/png"]
    printed = "".join(
        "".join(cell["outputs"][0]["text"]) for cell in found["cells"] if cell.get("outputs")
    )
    for function in PostLocalSGD.sync, DiLoCo.sync, DiLoCo.nesterov, EDiT.sync:
        assert inspect.getsource(function) in printed


def test_notebook_keeps_all_of_a_script():
    script = "# %% [markdown]\n# # A `# %%` line\n\n# %% One\n# Words.\nx = 1\n\n\nprint(x)\n"
    cells = notebook.read_cells(script)
    assert cells == [
        ("markdown", "# A `# %%` line"),
        ("markdown", "## One\n\nWords."),
        ("code", "x = 1\n\n\nprint(x)"),
    ]
    printed = notebook.run_cells(cells)
    assert printed == ["", "", "1\n"]
    made = notebook.make_notebook(cells, printed, b"picture")
    (text, picture) = made["cells"][-1]["outputs"]
    assert text["text"] == ["1\n"] and picture["data"]["image/png"] == "cGljdHVyZQ=="


def test_losses_of_the_notebook_tell_the_story():
    """The claims in its comments, of the final losses. It takes a minute, so it is not run here."""
    found = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
    printed = "".join(found["cells"][-1]["outputs"][0]["text"])
    final = {name: float(loss) for name, loss in re.findall(r"(\S.*?) +(\d+\.\d+)\n", printed)}
    assert len(final) == 6
    lowest = final["averaged gradients"]
    assert lowest < final["DiLoCo"] < 1.15 * lowest
    assert final["local SGD"] == pytest.approx(final["DiLoCo"], rel=0.02)
    assert final["EDiT"] == pytest.approx(final["DiLoCo"], rel=0.01)
    assert final["EDiT, sick"] == pytest.approx(final["EDiT"], rel=0.01)
    assert final["DiLoCo, sick"] > 1.1 * final["DiLoCo"]
