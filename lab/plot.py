"""Curves of runs side by side: validation loss over tokens, seconds, and bytes on the slow links.

    python -m lab.plot out/edit out/diloco --out curves.svg

The experiments draw their figures with draw(), too, so a method has the same color, marker and
place in all of them. There, runs that differ only in their seed are one line: the mean, with
vertical lines from the lowest to the highest. Most colors are Okabe and Ito's, safe for color-blind
readers; lines and markers differ, too. Needs matplotlib.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np

from config import Parser, UserError, run_command
from lab import timeline
from lab.rows import GRAY, METHODS, in_order, read_run
from lab.svg import new_figure, save

VARIANTS = "os^vDX"  # markers
# The names in the picture of a frontier. All other points are gray.
NAMED = (
    "minibatch",
    "post_local_sgd",
    "diloco",
    "edit",
    "one_bit_edit",
    "zero_one_adam",
    "sparse_loco",
)


@dataclass
class Panel:
    """A pair of axes. x and y name columns of the rows: numbers, or lists, which are a curve."""

    x: str
    y: str
    xlabel: str
    ylabel: str = "validation loss, nats per token"
    title: str = ""
    where: dict = field(default_factory=dict)  # draw only the rows with these values
    log: int = 0  # the base, if the x axis is logarithmic
    first: float = -math.inf  # draw only the points from this x on
    frontier: bool = False  # names only of NAMED; a line through the points that none beats


def lines_of(rows, panel) -> dict:
    """(method, variant) -> points (x, mean y, lowest y, highest y), in the order of METHODS and of
    x. Points with the same x are seeds."""
    found = defaultdict(lambda: defaultdict(list))
    for row in in_order(rows):
        if panel.where.items() <= row.items():
            label = row["method"], row.get("variant")
            for x, y in np.column_stack([row[panel.x], row[panel.y]]).tolist():
                if x >= panel.first:
                    found[label][x].append(y)

    lines = {}
    for label, points in found.items():
        lines[label] = []
        for x, seeds in sorted(points.items()):
            lines[label].append((x, fmean(seeds), min(seeds), max(seeds)))
    return lines


def styles_of(panels_lines, frontier=False) -> dict:
    """(method, variant) -> its style. A variant has its method's color, a dotted line and another,
    open marker. frontier: all but NAMED are gray and have no name."""
    styles = {}
    for method, variant in dict.fromkeys(chain(*panels_lines)):
        name, color, marker, line = METHODS.get(method, (method, "#7570b3", "X", "-"))
        style = {"color": color, "marker": marker, "linestyle": line, "label": name}
        style |= {"linewidth": 1.4, "markersize": 4.5, "markerfacecolor": color}
        if variant:
            before = [other for other in styles if other[0] == method and other[1]]
            style["marker"] = VARIANTS[len(before) % len(VARIANTS)]
            style |= {"label": f"{name}, {variant}", "linestyle": ":", "markerfacecolor": "none"}
        if frontier and method not in NAMED:
            style |= {"color": GRAY, "marker": ".", "linestyle": "none", "label": None}
        styles[method, variant] = style
    return styles


def draw_panel(axes, panel, lines, styles):
    from matplotlib.ticker import EngFormatter, LogLocator
    for label, style in styles.items():
        if label not in lines:  # in the legend, too
            axes.plot([], [], **style)
            continue
        x, y, lowest, highest = zip(*lines[label])
        axes.plot(x, y, markevery=max(1, len(x) // 6), **style)
        if lowest != highest:
            axes.vlines(x, lowest, highest, color=style["color"], linewidth=0.8)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
    if panel.frontier:
        axes.plot(*zip(*best_points(lines)), color=GRAY, linewidth=5, alpha=0.25, zorder=0)
    if panel.log:
        axes.set_xscale("log", base=panel.log)
        axes.minorticks_off()
    if panel.log == 10:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter())  # 100 M, not 10^8
    axes.grid(axis="y", alpha=0.3, linewidth=0.5)


def best_points(lines) -> list:
    """The points (x, y) that no other point beats in both."""
    best = []
    for x, y, *_ in sorted(chain(*lines.values())):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def draw(rows, panels, path):
    """Write the panels, side by side, as an SVG."""
    picture = new_figure(2.5 + 3.7 * len(panels), 4.5)
    all_axes = picture.subplots(1, len(panels), squeeze=False)[0]
    panels_lines = [lines_of(rows, panel) for panel in panels]
    styles = styles_of(panels_lines, panels[0].frontier)
    for axes, panel, lines in zip(all_axes, panels, panels_lines):
        draw_panel(axes, panel, lines, styles)
    handles = axes.get_legend_handles_labels()
    picture.legend(*handles, loc="outside right upper", frameon=False)
    save(picture, [list(lines.values()) for lines in panels_lines], path)


def rows_of(folders) -> list:
    """A row per run. Runs of the same method differ in the name of their folder. Raises UserError
    for a run without a curve."""
    rows = [read_run(folder) for folder in folders]
    methods = [row["method"] for row in rows]
    for row in rows:
        if not row["step"]:
            raise UserError(f"{row['folder']}: the run has no evaluation yet")
        if None in row["val_loss"]:
            raise UserError(f"{row['folder']}: a validation loss of the run is not finite")
        if methods.count(row["method"]) > 1:
            row["variant"] = row["folder"]
    return rows


def main():
    parser = Parser(description="Draw the validation loss of runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="FOLDER", help="a run's out_dir")
    parser.add_argument("--out", default="curves.svg", help="the picture (default: curves.svg)")
    parser.add_argument("--timeline", action="store_true", help="when they compute and wait")
    args = parser.parse_args()
    path = Path(args.out).with_suffix(".svg")
    if args.timeline:
        rows = []
        for folder in args.runs:
            rows += timeline.read_timeline(folder)
        timeline.draw(rows, path)
    else:
        panels = [
            Panel("tokens", "val_loss", "tokens"),
            Panel("train_s", "val_loss", "seconds of training"),
            Panel("sync_bytes", "val_loss", "bytes over slow links, per rank"),
        ]
        draw(rows_of(args.runs), panels, path)
    print(f"picture {path}")


if __name__ == "__main__":
    run_command("plot.py", main)
