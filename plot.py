"""Curves of runs side by side: validation loss over tokens, seconds, and bytes on the slow links.

    python plot.py out/edit out/diloco --out curves.svg

lab.py draws its figures with draw(), so a method has the same color, marker and place everywhere.
Runs that differ in their seed only are one line: the mean, and from the lowest to the highest a
band or, where there are few points, a vertical line. Most colors are Okabe and Ito's, safe for
color-blind readers; lines and markers differ, too. The text is gray, readable on a light and on a
dark page. Needs matplotlib, which nothing else here does.
"""

import io
import math
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.config import Parser, UserError, run_command
from plumbing.log import read_run

GRAY = "#808080"
METHODS = {  # in the order of all figures: name, color, marker, line
    "minibatch": ("mini-batch", GRAY, "s", "-"),
    "post_local_sgd": ("Post Local SGD", "#a6761d", "<", "-"),
    "slowmo": ("SlowMo", "#e69f00", ">", "-"),
    "co2": ("CO2", "#cc79a7", "^", "-"),
    "noloco": ("NoLoCo", "#56b4e9", "v", "-"),
    "diloco": ("DiLoCo", "#d55e00", "o", "-"),
    "streaming_diloco": ("Streaming DiLoCo", "#d55e00", "D", "--"),
    "edit": ("EDiT", "#0072b2", "o", "-"),
    "streaming_edit": ("Streaming EDiT", "#0072b2", "D", "--"),
    "a_edit": ("A-EDiT", "#009e73", "P", "-"),
}
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
    log: bool = False  # the x axis
    xlim: tuple = (-math.inf, math.inf)  # draw only these points


def in_order(rows: list) -> list:
    """Rows in the order of METHODS, and then the reader's own methods."""
    order = [*METHODS, *(row["method"] for row in rows)]
    return sorted(rows, key=lambda row: order.index(row["method"]))


def lines_of(rows: list, panel: Panel) -> dict:
    """(method, variant) -> points (x, mean y, lowest y, highest y), in the order of METHODS and
    of x. Rows with the same x are seeds."""
    lines = {}
    for row in in_order(rows):
        if panel.where.items() <= row.items():
            points = lines.setdefault((row["method"], row.get("variant")), defaultdict(list))
            xs, ys = row[panel.x], row[panel.y]
            for x, y in zip(xs, ys) if isinstance(xs, list) else [(xs, ys)]:
                if panel.xlim[0] <= x <= panel.xlim[1]:
                    points[x].append(y)
    return {
        label: [(x, sum(ys) / len(ys), min(ys), max(ys)) for x, ys in sorted(points.items())]
        for label, points in lines.items() if points
    }  # fmt: skip


def checksum(panels_lines: list) -> str:
    """Of all points, a line in the SVG: it shows whether a picture belongs to its rows."""
    return f"crc32 of its points: {zlib.crc32(repr(panels_lines).encode())}"


def styles_of(panels_lines: list) -> dict:
    """(method, variant) -> its style. A variant has its method's color, another line and another,
    open marker. Of lines that are equal in all panels only the first has a style, with the names
    of all: it would hide the others."""
    styles, equal = {}, {}
    for label in {label: 0 for lines in panels_lines for label in lines}:
        name, color, marker, line = METHODS.get(label[0], (label[0], "#7570b3", "X", "-"))
        variants = [variant for method, variant in styles if method == label[0] and variant]
        if label[1]:
            marker, line = VARIANTS[len(variants) % len(VARIANTS)]
            name = f"{name}, {label[1]}"
        first = equal.setdefault(str([lines.get(label) for lines in panels_lines]), label)
        if first in styles:
            styles[first]["label"] += f" = {name}"
            continue
        face = "none" if label[1] else color
        styles[label] = {"color": color, "marker": marker, "linestyle": line, "label": name}
        styles[label] |= {"markerfacecolor": face, "linewidth": 1.4, "markersize": 4.5}
    return styles


def draw_panel(axes, panel: Panel, lines: dict, styles: dict):
    xs = sorted({point[0] for points in lines.values() for point in points})
    for label, style in styles.items():
        x, y, lowest, highest = zip(*lines[label]) if label in lines else [()] * 4
        axes.plot(x, y, markevery=max(1, len(x) // 6), **style)
        if lowest != highest and len(x) > 5:
            axes.fill_between(x, lowest, highest, color=style["color"], alpha=0.15, linewidth=0)
        elif lowest != highest:
            axes.vlines(x, lowest, highest, color=style["color"], linewidth=0.8)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
    if panel.log:
        axes.set_xscale("log")
        if len(xs) <= 6:
            axes.set_xticks(xs, [f"{x:g}" for x in xs])
        if xs[-1] > 30 * xs[0]:  # enough room between the labels of decades
            axes.minorticks_off()
    axes.grid(alpha=0.3, linewidth=0.5)


def draw(rows: list, panels: list, path):
    """Write the panels, side by side, as an SVG. Raises UserError without matplotlib."""
    try:
        import matplotlib.figure
    except ModuleNotFoundError:
        raise UserError("pictures need matplotlib: pip install matplotlib") from None
    panels = [panel for panel in panels if lines_of(rows, panel)]  # --quick leaves some empty
    panels_lines = [lines_of(rows, panel) for panel in panels]
    styles = styles_of(panels_lines)
    settings = {key: GRAY for key in ("text.color", "axes.labelcolor", "axes.edgecolor")}
    settings |= {"xtick.color": GRAY, "ytick.color": GRAY, "font.size": 9, "svg.fonttype": "none"}
    settings |= {"svg.hashsalt": "", "axes.spines.top": False, "axes.spines.right": False}
    settings |= {"font.sans-serif": ["DejaVu Sans"]}
    with matplotlib.rc_context(settings):
        alone = len(panels) == 1  # then the legend stands beside the panel
        size = (7.5 if alone else 1 + 3.6 * len(panels), 4)
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel, lines in zip(all_axes, panels, panels_lines):
            draw_panel(axes, panel, lines, styles)
        figure.legend(
            *axes.get_legend_handles_labels(), frameon=False,
            loc="outside right upper" if alone else "outside lower center",
            ncols=1 if alone else len(panels) + 1,
        )  # fmt: skip
        picture = io.StringIO()
        # Without a date the same figures give the same file.
        metadata = {"Date": None, "Description": checksum(panels_lines)}
        figure.savefig(picture, format="svg", transparent=True, metadata=metadata)
    # A smaller file: tenths of a point are precise enough, and the indentation is not seen.
    shorter = lambda match: re.sub(r"(\.\d)\d+", r"\1", match[0])
    text = re.sub(r' (d|x|y|transform)="[^"]*"', shorter, picture.getvalue())
    Path(path).write_text(re.sub(r"\n +", "\n", text))


def main():
    parser = Parser(description="Draw the validation loss of runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="FOLDER", help="a run's out_dir")
    parser.add_argument("--out", default="curves.svg", help="the picture (default: curves.svg)")
    args = parser.parse_args()
    rows = []
    names = [Path(folder).resolve().name for folder in args.runs]
    for folder, name in zip(args.runs, names):
        run, name = read_run(folder), folder if names.count(name) > 1 else name
        if not run["step"]:
            raise UserError(f"{folder}: the run has no evaluation yet")
        method = run["config"]["method"]
        rows.append(run | {"method": method, "variant": "" if name == method else name})
    panels = [
        Panel("tokens", "val_loss", "tokens"),
        Panel("train_s", "val_loss", "seconds of training", ""),
        Panel("sync_bytes", "val_loss", "bytes over the slow links, per rank", "", log=True),
    ]
    draw(rows, panels, args.out)
    print(f"picture {args.out}")


if __name__ == "__main__":
    run_command("plot.py", main)
