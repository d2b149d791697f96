"""Curves of runs side by side: validation loss over tokens, seconds, and bytes on the slow links.

    python -m lab.plot out/edit out/diloco --out curves.svg

The experiments draw their figures with draw(), too, so a method has the same color, marker and
place in all of them. Runs that differ only in their seed are one line: the mean, with vertical
lines from the lowest to the highest. Most colors are Okabe and Ito's, safe for color-blind readers;
lines and markers differ, too. The text is gray, readable on a light and on a dark page. Needs
matplotlib.
"""

import itertools
import math
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from config import NOT_RESUMED, Parser, UserError, run_command
from lab import timeline
from lab.rows import GRAY, METHODS, after_warmup, in_order, read_run

# These may differ between the runs of a line.
SAME_LINE = NOT_RESUMED | {"seed", "mesh", "micro_steps", "micro_batch", "n_params"}
SAME_LINE |= {"corpus_hash", "torch", "device_name"}
VARIANTS = (
    ("o", ":"), ("s", "-."), ("^", (0, (1, 3))), ("v", (0, (5, 1, 1, 1))), ("D", "--"), ("X", "-"),
)  # fmt: skip


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
    direct: bool = False  # names at the ends of the lines, in place of a legend
    frontier: bool = False  # points without lines, with their names and the line of the best


def lines_of(rows: list, panel: Panel) -> dict:
    """(method, variant) -> points (mean x, mean y, lowest y, highest y), in the order of METHODS
    and of x. Rows with the same x, and the k-th points of curves, are seeds."""
    lines = {}
    for row in in_order(rows):
        if panel.where.items() <= row.items():
            points = lines.setdefault((row["method"], row.get("variant")), defaultdict(list))
            xs, ys = row[panel.x], row[panel.y]
            curve = zip(xs, ys) if isinstance(xs, list) else [(xs, ys)]
            for k, (x, y) in enumerate(curve):
                if panel.xlim[0] <= x <= panel.xlim[1]:
                    points[k if isinstance(xs, list) else x].append((x, y))
    mean = lambda values: sum(values) / len(values) if len(set(values)) > 1 else values[0]
    found = {}
    for label, points in lines.items():
        columns = [list(zip(*seeds)) for _, seeds in sorted(points.items())]
        found[label] = [(mean(xs), sum(ys) / len(ys), min(ys), max(ys)) for xs, ys in columns]
    return {label: line for label, line in found.items() if line}


def checksum(panels_lines: list) -> str:
    """Of all points, a line in the SVG: it shows whether a picture belongs to its rows."""
    return f"crc32 of its points: {zlib.crc32(repr(panels_lines).encode())}"


def styles_of(panels_lines: list) -> dict:
    """(method, variant) -> its style. A variant has its method's color, another line and another,
    open marker. Lines that are equal in all panels would hide each other: only the first of them
    has a style, with the names of all."""
    styles, equal = {}, {}
    for label in {label: 0 for lines in panels_lines for label in lines}:
        name, color, marker, line = METHODS.get(label[0], (label[0], "#7570b3", "X", "-"))
        variants = [variant for method, variant in styles if method == label[0] and variant]
        if label[1]:
            marker, line = VARIANTS[len(variants) % len(VARIANTS)]
            name = f"{name}, {label[1]}"
        first = equal.setdefault(str([lines.get(label) for lines in panels_lines]), label)
        if first in styles:
            styles[first]["label"] += f" = {name if label[0] != first[0] else label[1] or name}"
            continue
        styles[label] = {"color": color, "marker": marker, "linestyle": line, "label": name}
        styles[label] |= {"linewidth": 1.4, "markersize": 4.5}
        styles[label] |= {"markerfacecolor": "none" if label[1] else color}
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


def name_points(axes, named: list):
    """Write names beside their points, where they hide no point and no other name, with a thin line
    to the point if it is not beside it. named: (x, y, text, color)."""
    to_points = lambda x, y: axes.transData.transform((x, y)) * 72 / axes.figure.dpi
    first, bottom, _, top = axes.bbox.extents * 72 / axes.figure.dpi
    places = [to_points(x, y) for x, y, *_ in named]
    taken = [(x - 4, x + 4, y - 4, y + 4) for x, y in places]  # left, right, bottom, top
    free = lambda box: all(
        box[1] < other[0] or other[1] < box[0] or box[3] < other[2] or other[3] < box[2]
        for other in taken
    )  # fmt: skip
    pairs = sorted(zip(named, places), key=lambda pair: pair[0][1])
    for (x, y, text, color), (own_x, own_y) in pairs:
        width, shifts = 4.5 * len(text), sorted(range(-150, 160, 5), key=abs)
        for dy, dx in itertools.product(shifts, (9, -9 - width, 60, -60 - width)):
            box = (own_x + dx, own_x + dx + width, own_y + dy - 5, own_y + dy + 5)
            if free(box) and first < box[0] and bottom < box[2] and box[3] < top:
                break
        taken.append(box)
        left, near = dx < 0, abs(dy) < 5 and abs(dx) < 60
        place = {"xytext": (dx + width if left else dx, dy), "ha": "right" if left else "left"}
        place |= {"textcoords": "offset points", "fontsize": 8, "va": "center", "color": color}
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": color, "relpos": (left, 0.5)}
        axes.annotate(text, (x, y), arrowprops=None if near else line, **place)


def name_lines(axes, lines: dict, styles: dict, factors: bool):
    """Write the names at the right end of the lines; equal lines have one name. factors: write, at
    the points of the highest line, how many times as high as those of the lowest they are."""
    same = defaultdict(list)
    for label in filter(lines.get, styles):
        same[str(lines[label])].append(label)
    named = []
    for labels in same.values():
        methods = dict.fromkeys(METHODS[method][0] for method, _ in labels)
        text = " = ".join(methods) if len(labels) > 1 else styles[labels[0]]["label"]
        named.append((*lines[labels[0]][-1][:2], text, styles[labels[-1]]["color"]))
    name_points(axes, named)
    lowest, *_, highest = sorted(lines.values(), key=lambda line: line[-1][1])
    for (x, low, *_), (_, high, *_) in zip(lowest, highest) if factors else ():
        if high > low:
            place = {"xytext": (3, 5), "textcoords": "offset points"}
            axes.annotate(f"x {high / low:.1f}", (x, high), fontsize=8, **place)


def draw_frontier(axes, panel: Panel, rows: list, lines: dict, styles: dict):
    """Names and tau at the points, a line through those that no other point beats, an arrow to
    the best corner."""
    taus = {(row["method"], row.get("variant"), row[panel.x]): row["tau"] for row in rows}
    named, points = [], []
    for label in filter(lines.get, styles):
        for x, y, *_ in lines[label]:
            tau = taus[*label, x]
            text = styles[label]["label"] + f" {tau}" * (tau > 1)
            named.append((x, y, text, styles[label]["color"]))
            points.append((x, y))
    best = [(x, y) for x, y in sorted(points) if all(y < other for at, other in points if at < x)]
    axes.plot(*zip(*best), color=GRAY, linewidth=5, alpha=0.25, zorder=0)
    name_points(axes, named)
    corner = {"xycoords": "axes fraction", "arrowprops": {"arrowstyle": "->", "color": GRAY}}
    axes.annotate("better", (0.01, 0.01), (0.08, 0.08), **corner)


def draw(rows: list, panels: list, path):
    """Write the panels, side by side, as an SVG."""
    import matplotlib.figure
    from matplotlib.ticker import EngFormatter
    panels = [panel for panel in panels if lines_of(rows, panel)]  # --quick leaves some empty
    panels_lines = [lines_of(rows, panel) for panel in panels]
    styles = styles_of(panels_lines)
    plain, in_bytes = EngFormatter(sep=""), EngFormatter(unit="B")
    number = lambda x, _: plain(x) if x >= 1e6 else f"{x:g}"  # 100M, not 10^8
    settings = {key: GRAY for key in ("text.color", "axes.labelcolor", "axes.edgecolor")}
    settings |= {"xtick.color": GRAY, "ytick.color": GRAY, "font.size": 9, "svg.fonttype": "none"}
    settings |= {"svg.hashsalt": "", "axes.spines.top": False, "axes.spines.right": False}
    settings |= {"font.sans-serif": ["DejaVu Sans"]}
    with matplotlib.rc_context(settings):
        width = 2.5 + (4.5 if panels[0].direct else 3.7) * len(panels)
        width = 2 + 7 * len(panels) if panels[0].frontier else width
        height = 6 if panels[0].frontier else 4.5
        figure = matplotlib.figure.Figure((width, height), layout="constrained")
        one = lambda axis: len({getattr(panel, axis) for panel in panels}) == 1
        shared = {"sharex": one("x"), "sharey": one("y")}
        all_axes = figure.subplots(1, len(panels), squeeze=False, **shared)[0]
        for axes, panel, lines in zip(all_axes, panels, panels_lines):
            draw_panel(axes, panel, lines, styles)
            low, high = axes.get_xlim()
            if panel.direct:  # room for the names
                axes.set_xlim(low, high + 0.6 * (high - low))
                axes.set_xticks(sorted({point[0] for line in lines.values() for point in line}))
            if panel.frontier:
                axes.set_xlim(low, high * 3)
            of_bytes = panel.x.endswith("bytes") and high > 1  # one replica sends nothing
            axes.xaxis.set_major_formatter(in_bytes if of_bytes else number)
            if shared["sharey"]:
                axes.label_outer()
        figure.draw_without_rendering()  # the scales are known from here on
        for axes, panel, lines in zip(all_axes, panels, panels_lines):
            if panel.frontier:
                draw_frontier(axes, panel, rows, lines, styles)
            elif panel.direct:
                name_lines(axes, lines, styles, factors=panel.y == "tokens_per_s")
        if not panels[0].direct and not panels[0].frontier:
            handles = axes.get_legend_handles_labels()
            figure.legend(*handles, loc="outside right upper", frameon=False)
        # Without a date the same figures give the same file.
        metadata = {"Date": None, "Description": checksum(panels_lines)}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)


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
        timeline.draw([row for run in args.runs for row in timeline.read_timeline(run)], args.out)
        return print(f"picture {args.out}")
    runs = [read_run(folder) for folder in args.runs]
    for folder, run in zip(args.runs, runs):
        if not run["step"]:
            raise UserError(f"{folder}: the run has no evaluation yet")
        if None in run["val_loss"]:
            raise UserError(f"{folder}: a validation loss of the run is not finite")
    own = lambda run: {"method": run["config"]["method"], "variant": variant(run, runs)}
    longest = max(run["config"].get("sync_warmup_steps", 0) for run in runs)  # mini-batch has none
    rows = []
    for run in runs:
        warmup = run["config"].get("sync_warmup_steps", longest)
        rows.append(run | own(run) | {"local_bytes": after_warmup(run, warmup)["sync_bytes"]})
    panels = [
        Panel("tokens", "val_loss", "tokens"),
        Panel("train_s", "val_loss", "seconds of training"),
        Panel("local_bytes", "val_loss", "bytes over the slow links after the warm-up, per rank"),
    ]
    draw(rows, panels, args.out)
    print(f"picture {args.out}")


if __name__ == "__main__":
    run_command("plot.py", main)
