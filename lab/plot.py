"""Pictures of runs. lab.table draws them:

    python -m lab.table out/edit out/diloco --x train_s --out curves    # losses over seconds
    python -m lab.table out/sweep/tau/*/ --x tau --out tau              # over a flag
    python -m lab.table out/sweep/tune/*/ --x gain --out gain           # over the outer step's gain

A method has the same color, marker and place in all pictures. A picture of one method alone has a
color for each variant. Runs that differ only in their seed are one line: the mean, with vertical
lines from the lowest to the highest. Most colors are Okabe and Ito's, safe for color-blind readers;
lines and markers differ, too. Pictures need matplotlib.
"""

import json
import math
import zlib
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from lab.rows import CURVES, METHODS, by_method, find_columns, find_lines, label

OWN = ("#7570b3", "X-")  # color, marker and line of the reader's own methods
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
VARIANTS = "os^vDX"  # markers
OUTER = ("outer_lr", "outer_momentum")
SWITCH = {"no": 0, "yes": 1}  # a switch on the x axis
AXES = {  # column of the evaluations -> its name below an axis
    "step": "inner steps",
    "tokens": "tokens",
    "train_s": "seconds of training",
    "sync_bytes": "bytes over slow links, per rank",
    "gain": "gain of the outer step",
    "scale_lr": "learning rate of the sick replica, times that of the others",
}
LOOK = {  # of matplotlib
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "",
}


# ---- files ----


def new_figure(width, height):
    """An empty one, in inches."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update(LOOK)
    return Figure((width, height), layout="constrained")


def save(figure, data, path):
    """As SVG. Without a date the same data give the same file."""
    metadata = {"Date": None, "Description": checksum(data)}
    figure.savefig(path, format="svg", metadata=metadata)


def checksum(data) -> str:
    """A line in the SVG: it shows whether a picture belongs to its data."""
    return f"crc32 of its data: {zlib.crc32(json.dumps(data).encode())}"


# ---- lines ----


@dataclass
class Panel:
    """A pair of axes. x and y name columns of the rows: numbers, or lists, which are a curve."""

    x: str
    y: str
    xlabel: str
    ylabel: str = "validation loss, nats per token"
    log: bool = False  # is the x axis logarithmic?
    first: float = -math.inf  # draw only the points from this x on
    ticks: dict | None = None  # name -> x, in place of numbers
    joined: bool = True  # are the points of a line joined?


def lines_of(rows, panel) -> dict:
    """(method, variant) -> points (x, mean y, lowest y, highest y), in the order of METHODS and of
    x. Points with the same x are seeds."""
    found = defaultdict(lambda: defaultdict(list))
    for row in by_method(rows):
        case = row["method"], row["variant"]
        for x, y in np.column_stack([row[panel.x], row[panel.y]]).tolist():
            if x >= panel.first:
                found[case][x].append(y)

    lines = {}
    for case, points in found.items():
        lines[case] = []
        for x, seeds in sorted(points.items()):
            lines[case].append((x, fmean(seeds), min(seeds), max(seeds)))
    return lines


def style_of(method, variant, number, alone=False) -> tuple:
    """Marker and line, color, text in the legend. A variant has its method's color, a dotted line
    and another, open marker; if its method is alone in the picture, a color of its own."""
    name, color, form = METHODS.get(method, (method, *OWN))
    if not variant:
        return form, {"color": color, "label": name}
    marker = VARIANTS[number % len(VARIANTS)]
    label = f"{name}, {variant}"
    if alone:
        return marker + "-", {"color": COLORS[number % len(COLORS)], "label": label}
    return marker + ":", {"color": color, "label": label, "fillstyle": "none"}


def draw_panel(axes, panel, lines):
    from matplotlib.ticker import EngFormatter, LogLocator

    alone = len({method for method, _ in lines}) == 1
    for number, (case, points) in enumerate(lines.items()):
        form, look = style_of(*case, number, alone)
        x, y, lowest, highest = np.transpose(points)
        if panel.joined:
            axes.plot(x, y, form, markevery=max(1, len(x) // 6), **look)
        else:
            axes.plot(x, y, form[0], **look)
        if any(lowest < highest):
            axes.vlines(x, lowest, highest, color=look["color"], linewidth=0.8)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.grid(axis="y", alpha=0.3, linewidth=0.5)
    if panel.log:
        axes.set_xscale("log")
        axes.minorticks_off()
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    if axes.get_xlim()[1] >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter())  # 100 M, not 10^8
    elif panel.log:
        axes.xaxis.set_major_formatter("{x:g}")
    if panel.ticks:
        axes.set_xticks(list(panel.ticks.values()), list(panel.ticks))
    at = sorted({x for points in lines.values() for x, *_ in points})
    if panel.log and len(at) <= 6 and panel.x not in (*CURVES, "gain"):  # a few values of a flag
        axes.set_xticks(at, [f"{x:g}" for x in at])


def draw(rows, panel, path):
    """Write the panel as an SVG."""
    lines = lines_of(rows, panel)
    widest = max(len(f"{method}, {variant}") for method, variant in lines)
    picture = new_figure(5.1 + 0.075 * max(15, widest), 4.5)
    draw_panel(picture.add_subplot(), panel, lines)
    picture.legend(loc="outside right upper", frameon=False)
    save(picture, [list(lines.values())], path)


# ---- runs ----


def is_point(run) -> bool:
    """Has it one evaluation?"""
    return len(run.curve["val_loss"]) == 1


def default_x(runs, columns) -> str:
    """Curves over tokens. One evaluation is no curve: then the losses over the first number."""
    if not all(map(is_point, runs)):
        return "tokens"
    for name in columns:
        if all(isinstance(run.flags.get(name, 0), (int, float)) for run in runs):
            return name
    return "sync_bytes"


def columns_by_method(runs, without=()) -> dict:
    """Method -> the columns in which its runs differ."""
    found = {}
    for method in dict.fromkeys(run.flags["method"] for run in runs):
        alike = [run for run in runs if run.flags["method"] == method]
        found[method] = find_columns(alike, without)[0]
    return found


def curves(runs, columns, x, y="val_loss") -> list:
    """Rows of draw(). The runs of a line have the same x at the same evaluation: their mean. A
    line's name says in what it differs from the other lines of its method. y: val_loss, or `over`,
    the distances in percent, of runs that are one point each."""
    own_columns = columns_by_method(runs)
    rows = []
    for found in find_lines(runs, columns).values():
        method = found[0].flags["method"]
        names = [name for name in own_columns[method] if name != x]
        variant = short_label(names, found[0])
        count = min(len(run.curve["val_loss"]) for run in found)
        at = [[place(x, run.flags.get(x))] for run in found]
        if x in CURVES:
            columns_of_x = [run.curve[x][:count] for run in found]
            if any(None in column for column in columns_of_x):  # a CSV file may lack it
                continue
            at = [[fmean(values) for values in zip(*columns_of_x)]] * len(found)
        for run, points in zip(found, at):
            losses = [run.loss]
            if y == "over":
                losses = [100 * run.over]
            elif x in CURVES:
                losses = [math.nan if loss is None else loss for loss in run.curve[y][:count]]
            if points and isinstance(points[0], (int, float)):  # a method may lack the flag
                rows.append({"method": method, "variant": variant, x: points, y: losses})
    return rows


def place(x, value):
    """Where a flag's value is on the x axis: a switch at 0 or 1, --scale_lr at its factor."""
    if x == "scale_lr":
        return 1.0 if value == "none" else float(value.split(":")[-1])
    return SWITCH.get(value, value)


def gain_curves(runs) -> list:
    """Rows of draw(): how much the loss of each outer step, a mean over seeds, is above the
    lowest of its line, in percent, over its gain. A line is a setting of all other flags.

    gain = lr (1 + mu + mu^2 rho + mu^3 rho^2 + ...): a round's move counts again in each later
    outer step, as far as that one's move is alike, with the cosine rho
    """
    runs = [run for run in runs if run.flags.keys() >= set(OUTER)]  # not those of minibatch
    own_columns = columns_by_method(runs, OUTER)
    rows = []
    for found in find_lines(runs, find_columns(runs, OUTER)[0]).values():
        method = found[0].flags["method"]
        variant = short_label(own_columns[method], found[0])
        steps = find_lines(found, OUTER)
        lowest = min(fmean(run.loss for run in seeds) for seeds in steps.values())
        for (lr, mu), seeds in steps.items():
            rho = fmean(run.results.get("cosine", 1.0) for run in seeds)
            above = 100 * (fmean(run.loss for run in seeds) / lowest - 1)
            rows.append({"method": method, "variant": variant})
            rows[-1] |= {"gain": lr * (1 + mu / (1 - mu * rho)), "over": above}
    return rows


def short_label(names, run) -> str:
    """Without the flags that are off, and without those that are switched on, as most defaults."""
    parts = []
    for name in names:
        value = run.flags.get(name)
        if value == "no":
            parts.append(f"no {name}")
        elif name != "method" and value not in (None, "none", "yes"):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def draw_runs(runs, columns, x, first, base, path) -> str:
    """Write the picture of runs, from x = first on; by default over tokens, or over the first flag
    with numbers. base: flag -> value, if --base was given. Returns the line that says so."""
    runs = [run for run in runs if math.isfinite(run.loss)]
    x = x or default_x(runs, columns)
    y, ylabel = "val_loss", Panel.ylabel
    try:
        if x == "gain":
            y, ylabel = "over", "loss above the best outer step of its line, in %"
            rows = gain_curves(runs)
        elif base and (x not in CURVES or all(map(is_point, runs))):
            y, ylabel = "over", f"loss over {label(base, base.values())}, in %"
            rows = curves([run for run in runs if run.over is not None], columns, x, y)
        else:
            rows = curves(runs, columns, x, y)
        if not rows:
            return f"picture none: no run has {x} and a known loss"
        points = np.concatenate([np.atleast_1d(row[x]) for row in rows])
        far_apart = x not in CURVES and 0 < 10 * min(points) < max(points)
        panel = Panel(x, y, AXES.get(x, x), ylabel, log=bool(far_apart), first=first)
        if any(run.flags.get(x) in SWITCH for run in runs):
            panel.ticks = SWITCH
        # Steps of one gain need not be alike: a line through them would go up and down.
        panel.joined = x != "gain"
        draw(rows, panel, path)
    except ModuleNotFoundError as error:
        return f"picture none: pip install {error.name}"
    return f"picture {path}"
