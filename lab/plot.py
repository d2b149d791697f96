"""Curves of runs side by side: validation loss over tokens, seconds, and bytes on the slow links.

    python -m lab.plot out/edit out/diloco --out curves.svg
    python -m lab.plot --tensorboard out/edit out/diloco    # event files, into the runs' folders

A run with at most three evaluations has its training loss beside them: the mean of each round over
all replicas; before the first sync, the loss of each logged step.

The pictures of lab.table and lab.planner are drawn with draw(), too: a method has the same color,
marker and place in all of them. There, runs that differ only in their seed are one line: the mean,
with vertical lines from the lowest to the highest. Most colors are Okabe and Ito's, safe for
color-blind readers; lines and markers differ, too. Pictures need matplotlib, event files
tensorboard.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from config import Parser, UserError, run_command
from lab.rows import COUNTS, METHODS, in_order, read_run
from lab.svg import new_figure, save

OWN = ("#7570b3", "X-")  # color, marker and line of the reader's own methods
VARIANTS = "os^vDX"  # markers
FEW_EVALUATIONS = 3  # with at most so many a run shows its training loss, too
AXES = {  # column of the evaluations -> its name below an axis
    "step": "inner steps",
    "tokens": "tokens",
    "train_s": "seconds of training",
    "sync_bytes": "bytes over slow links, per rank",
}


@dataclass
class Panel:
    """A pair of axes. x and y name columns of the rows: numbers, or lists, which are a curve."""

    x: str
    y: str
    xlabel: str
    ylabel: str = "validation loss, nats per token"
    title: str = ""
    where: dict = field(default_factory=dict)  # draw only the rows with these values
    log: bool = False  # is the x axis logarithmic?
    first: float = -math.inf  # draw only the points from this x on
    ticks: dict = field(default_factory=dict)  # name -> x, in place of numbers


def lines_of(rows, panel) -> dict:
    """(method, variant) -> points (x, mean y, lowest y, highest y), in the order of METHODS and of
    x. Points with the same x are seeds."""
    found = defaultdict(lambda: defaultdict(list))
    for row in in_order(rows):
        if panel.where.items() <= row.items():
            case = row["method"], row.get("variant", "")
            for x, y in np.column_stack([row[panel.x], row[panel.y]]).tolist():
                if x >= panel.first:
                    found[case][x].append(y)

    lines = {}
    for case, points in found.items():
        lines[case] = []
        for x, seeds in sorted(points.items()):
            lines[case].append((x, fmean(seeds), min(seeds), max(seeds)))
    return lines


def style_of(method, variant, number) -> tuple:
    """Marker and line, color, text in the legend. A variant has its method's color, a dotted line
    and another, open marker."""
    name, color, form = METHODS.get(method, (method, *OWN))
    if variant:
        form = VARIANTS[number % len(VARIANTS)] + ":"
        return form, {"color": color, "label": f"{name}, {variant}", "fillstyle": "none"}
    return form, {"color": color, "label": name}


def draw_panel(axes, panel, lines):
    from matplotlib.ticker import EngFormatter, LogLocator

    for number, (case, points) in enumerate(lines.items()):
        form, look = style_of(*case, number)
        x, y, lowest, highest = np.transpose(points)
        axes.plot(x, y, form, markevery=max(1, len(x) // 6), **look)
        if any(lowest < highest):
            axes.vlines(x, lowest, highest, color=look["color"], linewidth=0.8)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
    axes.grid(axis="y", alpha=0.3, linewidth=0.5)
    if panel.log:
        axes.set_xscale("log")
        axes.minorticks_off()
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    if panel.log or axes.get_xlim()[1] >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter())  # 100 M, not 10^8
    if panel.ticks:
        axes.set_xticks(list(panel.ticks.values()), list(panel.ticks))
    at = sorted({x for points in lines.values() for x, *_ in points})
    if panel.log and len(at) <= 6 and panel.x not in AXES:  # a few values of a flag
        axes.set_xticks(at, [f"{x:g}" for x in at])


def draw(rows, panels, path):
    """Write the panels, side by side, as an SVG."""
    panels_lines = [lines_of(rows, panel) for panel in panels]
    names = [f"{method}, {variant}" for lines in panels_lines for method, variant in lines]
    legend_width = 0.075 * max([15, *map(len, names)])
    picture = new_figure(1.4 + 3.7 * len(panels) + legend_width, 4.5)
    all_axes = picture.subplots(1, len(panels), squeeze=False)[0]
    legend = {}
    for axes, panel, lines in zip(all_axes, panels, panels_lines):
        draw_panel(axes, panel, lines)
        handles, labels = axes.get_legend_handles_labels()
        legend.update(zip(labels, handles))
    picture.legend(legend.values(), legend, loc="outside right upper", frameon=False)
    save(picture, [list(lines.values()) for lines in panels_lines], path)


# ---- runs ----


def draw_runs(folders, path):
    """The picture of the runs' losses. Runs of the same method differ in the name of their folder.
    Raises UserError for a run without a curve."""
    rows = [read_run(folder) for folder in folders]
    methods = Counter(row["method"] for row in rows)
    for row in rows:
        if not row["step"]:
            raise UserError(f"{row['folder']}: the run has no evaluation yet")
        if None in row["val_loss"]:
            raise UserError(f"{row['folder']}: a validation loss of the run is not finite")
        if methods[row["method"]] > 1:
            row["variant"] = row["folder"]

    training = []
    for row in rows:
        if len(row["step"]) <= FEW_EVALUATIONS:
            training += training_losses(row)
    ylabel = "loss, nats per token" if training else Panel.ylabel
    names = ("tokens", "train_s", "sync_bytes")
    panels = [Panel(name, "val_loss", AXES[name], ylabel) for name in names]
    draw(rows + training, panels, path)


def training_losses(record) -> list:
    """A row like that of the run, with the training loss as its curve; none if there is none.
    record: of read_run()."""
    rounds = [row for row in record["syncs"] if {"step", "loss"} <= row.keys()]
    first = rounds[0]["step"] if rounds else math.inf
    points = []  # (step, loss)
    for row in record["steps"]:
        if row["step"] < first and row.get("loss") is not None:
            points.append((row["step"], row["loss"]))
    for row in rounds:
        losses = [loss for loss in row["loss"] if loss is not None]
        if losses:
            points.append((row["step"], fmean(losses)))
    if not points:
        return []

    # A sync row has no clock. Between two logged steps tokens, seconds and bytes grow evenly.
    known = sorted(record["steps"] + record["evals"], key=lambda row: row["step"])
    at, losses = zip(*points)
    found = {"method": record["method"], "val_loss": losses}
    found["variant"] = ", ".join(filter(None, [record.get("variant"), "training loss"]))
    for name in COUNTS:
        logged = [row[name] for row in known]
        found[name] = np.interp(at, [row["step"] for row in known], logged).tolist()
    return [found]


def write_events(folder, path):
    """All numbers of the run's step and eval rows as curves of TensorBoard. Those that an earlier
    call has written to the folder `path` do not count any more."""
    record = read_run(folder)
    from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(path, purge_step=0) as writer:
        for row in record["steps"] + record["evals"]:
            event = row.pop("event")
            step = row.pop("step")
            for name, value in row.items():
                if value is not None:  # a loss that is not finite
                    writer.add_scalar(f"{event}/{name}", value, step)


def main():
    parser = Parser(description="Draw the validation loss of runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="FOLDER", help="a run's out_dir")
    parser.add_argument("--out", help="picture (default: curves.svg), or folder for event files")
    parser.add_argument("--tensorboard", action="store_true", help="write event files")
    args = parser.parse_args()
    if args.tensorboard:
        for folder in args.runs:
            path = folder
            if args.out:
                path = Path(args.out, Path(folder).name)
            write_events(folder, path)
            print(f"events {path}")
        return

    path = Path(args.out or "curves").with_suffix(".svg")
    draw_runs(args.runs, path)
    print(f"picture {path}")


if __name__ == "__main__":
    run_command("plot.py", main)
