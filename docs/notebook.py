"""Writes docs/tour.ipynb: the cells of docs/tour.py with what they print.

    python docs/notebook.py    # about a minute; pip install matplotlib
"""

import base64
import contextlib
import io
import json
import os
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def read_cells(script: str) -> list:
    """(kind, source) of the cells of a script with `# %%` lines. The text after # %% and the
    comments below it become a text cell of the notebook; [markdown]: all of the cell is text."""
    cells = []
    for cell in f"\n{script}".split("\n# %%")[1:]:
        title, _, body = cell.partition("\n")
        lines = body.strip("\n").split("\n")
        text = []
        while lines and lines[0].startswith("#"):
            text.append(lines.pop(0)[2:])
        if title.strip() != "[markdown]":
            text = [f"## {title.strip()}", "", *text]
        cells.append(("markdown", "\n".join(text)))
        code = "\n".join(lines).strip("\n")
        if code:
            cells.append(("code", code))
    return cells


def run_cells(cells: list) -> list:
    """What each cell prints, all of them in one process."""
    variables = {"__name__": "tour"}
    printed = []
    for kind, source in cells:
        output = io.StringIO()
        if kind == "code":
            with contextlib.redirect_stdout(output):
                exec(compile(source, "tour.py", "exec"), variables)
        printed.append(output.getvalue())
    return printed


def make_notebook(cells: list, printed: list, picture: bytes) -> dict:
    """In Jupyter's format 4. The picture stands below the last cell."""
    found = []
    for number, ((kind, source), output) in enumerate(zip(cells, printed)):
        cell = {"id": f"cell-{number}", "cell_type": kind, "metadata": {}}
        cell["source"] = source.splitlines(keepends=True)
        if kind == "code":
            text = {"output_type": "stream", "name": "stdout"}
            text["text"] = output.splitlines(keepends=True)
            cell |= {"execution_count": None, "outputs": [text] if output else []}
        found.append(cell)
    encoded = base64.b64encode(picture).decode()
    drawn = {"output_type": "display_data", "metadata": {}, "data": {"image/png": encoded}}
    found[-1]["outputs"].append(drawn)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "cells": found,
    }


def main():
    os.chdir(DOCS.parent)
    cells = read_cells((DOCS / "tour.py").read_text())
    printed = run_cells(cells)
    notebook = make_notebook(cells, printed, Path("out/tour.png").read_bytes())
    (DOCS / "tour.ipynb").write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__":
    main()
