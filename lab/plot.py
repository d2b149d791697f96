"""Pictures. Curves of runs side by side: loss over tokens, seconds, and bytes on the slow links.

    python -m lab.plot out/edit out/diloco --out curves.svg

The experiments draw with draw(), too, so a method has the same color and marker in all pictures.
Runs that differ only in their seed are one line: the mean, with vertical lines from the lowest to
the highest. Most colors are Okabe and Ito's, safe for color-blind readers; lines and markers
differ, too. The text is gray, readable on a light and on a dark page. Needs matplotlib, which
nothing else here does.
"""

import math
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from lab.rows import GRAY, METHODS, after_warmup, in_order, read_run
from lab.timeline import read_timeline
from plumbing.config import NOT_RESUMED, Parser, UserError, optional, run_command

# These may differ between the runs of a line.
SAME_LINE = NOT_RESUMED | {"seed", "mesh", "micro_steps", "micro_batch", "n_params"}
SAME_LINE |= {"corpus_hash", "torch", "device_name"}
VARIANTS = (  # fill of the marker, line
    ("none", ":"), ("left", "-."), ("top", "--"), ("right", (0, (1, 3))),
    ("bottom", (0, (5, 1, 1, 1))),
)  # fmt: skip
SPANS = {  # name in a timeline -> color, or two in turns, so that steps can be told apart; label
    "step": (("#0072b2", "#5aa9d6"), "computes"),
    "wait for link": ("#e69f00", "waits for the link"),
    "wait for others": ("#d7d7d7", "waits for the other replica"),
    "link": ("#444444", "its link is busy"),
}
STYLE = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), GRAY)
STYLE |= {"xtick.color": GRAY, "ytick.color": GRAY, "font.size": 9, "svg.fonttype": "none"}
STYLE |= {"svg.hashsalt": "", "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"font.sans-serif": ["DejaVu Sans"], "legend.frameon": False}
STYLE |= {"lines.linewidth": 1.4, "lines.markersize": 5.5}


@dataclass
class Panel:
    """A pair of axes. x and y name columns of the rows: numbers, or lists, which are a curve."""

    x: str
    y: str
    xlabel: str
    ylabel: str = "validation loss, nats per token"
    title: str = ""
    where: dict = field(default_factory=dict)  # draw only the rows with these values
    log: int = 0  # the base, if the x axis is logarithmic; its ticks are the powers
    xlim: tuple = (-math.inf, math.inf)  # draw only these points
    shade: tuple = ()  # (first, last) x of a disturbance
    frontier: bool = False  # points with tau beside them, and a line through the best


def lines_of(rows: list, panel: Panel) -> dict:
    """(method, variant) -> points (mean x, mean y, lowest y, highest y), in the order of METHODS
    and of x. Rows with the same x, and the k-th points of curves, are seeds."""
    lines = defaultdict(lambda: defaultdict(list))
    for row in in_order(rows):
        if panel.where.items() <= row.items():
            x, y = row[panel.x], row[panel.y]
            points = enumerate(zip(x, y)) if isinstance(x, list) else [(x, (x, y))]
            for key, (x, y) in points:
                if panel.xlim[0] <= x <= panel.xlim[1]:
                    lines[row["method"], row.get("variant")][key].append((x, y))
    for label, points in lines.items():
        seeds = [zip(*points[key]) for key in sorted(points)]
        lines[label] = [(mean(xs), mean(ys), min(ys), max(ys)) for xs, ys in seeds]
    return dict(lines)


def styles_of(panels_lines: list) -> dict:
    """(method, variant) -> its style. A variant has its method's color and marker, another fill and
    another line. Lines that are equal in all panels would hide each other: only the first of them
    has a style, with the names of all."""
    styles, equal = {}, {}
    for label in {label: 0 for lines in panels_lines for label in lines}:
        method, variant = label
        name, color, marker, line = METHODS.get(method, (method, "#7570b3", "X", "-"))
        fill, name = "full", f"{name}, {variant}" if variant else name
        if variant:
            earlier = [other for other in styles if other[0] == method and other[1]]
            fill, line = VARIANTS[len(earlier) % len(VARIANTS)]
        first = equal.setdefault(str([lines.get(label) for lines in panels_lines]), label)
        if first in styles:
            styles[first]["label"] += f" = {name if method != first[0] else variant or name}"
        else:
            styles[label] = {"color": color, "marker": marker, "linestyle": line, "label": name}
            styles[label]["fillstyle"] = fill
    return styles


def draw_panel(axes, panel: Panel, lines: dict, styles: dict):
    for label, style in styles.items():
        x, y, lowest, highest = zip(*lines[label]) if label in lines else [()] * 4
        style = style | ({"linestyle": "none"} if panel.frontier else {})
        axes.plot(x, y, markevery=max(1, len(x) // 6), **style)
        if lowest != highest:
            axes.vlines(x, lowest, highest, color=style["color"], linewidth=0.8)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
    if panel.shade:
        axes.axvspan(*panel.shade, color=GRAY, alpha=0.15, linewidth=0)
    if panel.log:
        axes.set_xscale("log", base=panel.log)
        axes.minorticks_off()
    axes.grid(axis="y", alpha=0.3, linewidth=0.5)


def draw_frontier(axes, panel: Panel, rows: list, lines: dict):
    """tau beside each point, and a line through those that no other point beats."""
    taus = {(row["method"], row.get("variant"), row[panel.x]): row["tau"] for row in rows}
    place = {"xytext": (5, 0), "textcoords": "offset points", "fontsize": 8, "va": "center"}
    points = []
    for label, line in lines.items():
        for x, y, *_ in line:
            axes.annotate(taus[*label, x], (x, y), **place)
            points.append((x, y))
    best = [(x, y) for x, y in sorted(points) if all(y < other for at, other in points if at < x)]
    axes.plot(*zip(*best), color=GRAY, linewidth=5, alpha=0.25, zorder=0)


def draw(rows: list, panels: list, path):
    """Write the panels, side by side, as an SVG. Raises UserError without matplotlib."""
    panels = [panel for panel in panels if lines_of(rows, panel)]  # --quick leaves some empty
    panels_lines = [lines_of(rows, panel) for panel in panels]
    frontier = any(panel.frontier for panel in panels)
    figure = new_figure(3 + 6 * len(panels) if frontier else 2.5 + 3.7 * len(panels), 5 + frontier)
    number_format = optional("matplotlib.ticker").EngFormatter  # 100M, not 10^8
    one = lambda axis: len({getattr(panel, axis) for panel in panels}) == 1
    grid = figure.subplots(1, len(panels), squeeze=False, sharex=one("x"), sharey=one("y"))
    styles = styles_of(panels_lines)
    for axes, panel, lines in zip(grid[0], panels, panels_lines):
        draw_panel(axes, panel, lines, styles)
        if panel.frontier:
            draw_frontier(axes, panel, rows, lines)
        sent = panel.x.endswith("bytes") and axes.get_xlim()[1] > 1  # one replica sends nothing
        axes.xaxis.set_major_formatter(number_format("B") if sent else number_format(sep=""))
        if one("y"):
            axes.label_outer()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    save(figure, path, panels_lines)


def draw_timeline(rows: list, path, title="Lost time"):
    """Write a bar for each replica of each run, with the busy time of its link below and its share
    of computing at the right. rows: of read_timeline(). Raises UserError without matplotlib."""
    seconds = min(min(row["whole_s"] for row in rows), max(row["some_s"] for row in rows))
    runs, names = list(dict.fromkeys(row["folder"] for row in rows)), {}
    figure = new_figure(10, 1.3 + 0.22 * len(rows) + 0.1 * len(runs))
    axes = figure.subplots()
    for k, row in enumerate(rows):
        y = -k - 0.5 * runs.index(row["folder"])
        method = METHODS.get(row["method"], [row["method"]])[0]
        names[y] = f"{method}, replica {row['replica']}"
        axes.text(seconds, y, f" {row['computing']:.0%}", va="center")
        for name, (colors, label) in SPANS.items():
            place = (y - 0.55, 0.1) if name == "link" else (y - 0.4, 0.8)
            spans = row["spans"].get(name, ())
            bars = [(b, e - b) for b, e in spans if e > 0 and b < seconds]
            axes.broken_barh(bars, place, facecolors=colors, label="" if k else label)
    axes.set(xlim=(0, seconds), xlabel="seconds")
    axes.set_yticks(list(names), names.values())
    axes.spines["left"].set_visible(False)
    axes.set_title(title, loc="left", weight="bold")
    axes.set_title("computes", loc="right", fontsize=9)
    figure.legend(loc="outside upper center", ncols=4)
    save(figure, path, [row["spans"] for row in rows])


def new_figure(width: float, height: float):
    """An empty figure, in inches. Raises UserError without matplotlib."""
    optional("matplotlib").rcParams.update(STYLE)
    return optional("matplotlib.figure").Figure((width, height), layout="constrained")


def save(figure, path, shown: list):
    # Without a date the same figures give the same file.
    metadata = {"Date": None, "Description": checksum(shown)}
    figure.savefig(path, format="svg", transparent=True, metadata=metadata)


def checksum(shown: list) -> str:
    """A line in the SVG: it shows whether a picture belongs to its rows."""
    return f"crc32 of its points: {zlib.crc32(repr(shown).encode())}"


def variant(run: dict, runs: list) -> str:
    """The flags of the run that differ between the runs of its method, but for the seed."""
    flags = run["config"]
    others = [other["config"] for other in runs if other["config"]["method"] == flags["method"]]
    return ", ".join(
        f"{name} {value}" for name, value in flags.items()
        if name not in SAME_LINE and any(other.get(name) != value for other in others)
    )  # fmt: skip


def main():
    parser = Parser(description="Draw the validation loss of runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="FOLDER", help="a run's out_dir")
    parser.add_argument("--out", default="curves.svg", help="the picture (default: curves.svg)")
    parser.add_argument("--timeline", action="store_true", help="when they compute and wait")
    args = parser.parse_args()
    if not args.out.endswith(".svg"):
        name = Path(args.out).with_suffix(".svg")
        raise UserError(f"--out {args.out}: pictures are SVG; name it {name}")
    if args.timeline:
        draw_timeline([row for run in args.runs for row in read_timeline(run)], args.out)
        return print(f"picture {args.out}")
    runs = [read_run(folder) for folder in args.runs]
    for folder, run in zip(args.runs, runs):
        if not run["val_loss"] or None in run["val_loss"]:
            raise UserError(f"{folder}: the run has no evaluation yet, or one that is not finite")
    longest = max(run["config"].get("sync_warmup_steps", 0) for run in runs)
    rows = []
    for run in runs:
        warmup = run["config"].get("sync_warmup_steps", longest)  # mini-batch has none
        own = {"method": run["config"]["method"], "variant": variant(run, runs)}
        own["local_bytes"] = after_warmup(run, warmup)["sync_bytes"]
        rows.append(run | own)
    panels = [
        Panel("tokens", "val_loss", "tokens"),
        Panel("train_s", "val_loss", "seconds of training"),
        Panel("local_bytes", "val_loss", "bytes over the slow links after the warm-up, per rank"),
    ]
    draw(rows, panels, args.out)
    print(f"picture {args.out}")


if __name__ == "__main__":
    run_command("plot.py", main)
