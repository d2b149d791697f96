"""Loss over the gain of the outer step: how far it moves the anchor.

    python -m lab.gain out/sweep/tune/*/ --out gain
    python -m lab.gain lab/results/outer_steps.csv --only method=edit optimizer=adamw --out gain

The outer step with learning rate `lr` and momentum `mu` adds up the moves of the replicas. If all
moves are alike, its steps become

    gain = lr (1 + mu + mu^2 + ...) = lr / (1 - mu)

times as long as these. (Moves that are less alike add up to less: with a cosine rho between
successive moves, momentum counts like mu rho.) So outer steps that look different, such as 1 / 0
and 0.5 / 0.5, may be nearly the same.

A point shows how much the loss of an outer step, a mean over seeds, is above the lowest of its
color. A color is a setting of all other flags in which the runs differ. Points with a momentum of
0.8 or more are open and have a line of their own: their gain is the least certain.
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np

from config import Parser, UserError, run_command
from lab import table
from lab.svg import new_figure, save

FLAGS = ["outer_lr", "outer_momentum"]
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "os^vDPX"
UNCERTAIN = 0.8  # momentum


def gain_of(lr: float, mu: float) -> float:
    return lr / (1 - mu)


def find_points(runs) -> dict:
    """Setting of the other flags -> points (gain, share above the lowest loss, momentum), by gain.
    Raises UserError if there is no setting with two outer steps."""
    runs = [run for run in runs if run.known]
    columns, _ = table.find_columns(runs)
    names = [name for name in columns if name not in FLAGS]
    found = defaultdict(dict)
    for values, seeds in table.find_lines(runs, names + FLAGS).items():
        setting = table.label(names, values[: len(names)])
        found[setting][values[-2:]] = fmean(run.loss for run in seeds)

    lines = {}
    for setting, losses in found.items():
        if len(losses) > 1:
            lowest = min(losses.values())
            points = []
            for (lr, mu), loss in losses.items():
                points.append((gain_of(lr, mu), loss / lowest - 1, mu))
            lines[setting] = sorted(points)
    if not lines:
        raise UserError("no setting has runs with two values of --outer_lr or --outer_momentum")
    return lines


def draw(lines, path):
    picture = new_figure(6.5, 3.8)
    from matplotlib.ticker import PercentFormatter
    axes = picture.subplots()
    for number, (setting, points) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        marker = MARKERS[number // len(COLORS) % len(MARKERS)]
        sure = [(gain, above) for gain, above, momentum in points if momentum < UNCERTAIN]
        others = [(gain, above) for gain, above, momentum in points if momentum >= UNCERTAIN]
        axes.plot(*np.reshape(sure, (-1, 2)).T, marker + "-", color=color, label=setting)
        axes.plot(*np.reshape(others, (-1, 2)).T, marker + ":", color=color, fillstyle="none")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("gain = outer_lr / (1 - outer_momentum)")
    axes.set_ylabel("loss above the best step of its color")
    axes.plot([], [], "ko:", fillstyle="none", label=f"momentum {UNCERTAIN} or more")
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(frameon=False)
    save(picture, lines, path)


def main(argv: list):
    parser = Parser(prog="python -m lab.gain", description="Draw loss over gain.")
    parser.add_argument("runs", nargs="+", metavar="FOLDER", help="as for lab.table")
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="FLAG=VALUE", help="only these"
    )
    parser.add_argument("--out", default="gain", help="picture (default: gain.svg)")
    args = parser.parse_args(argv)
    runs, notes = table.read_runs(args.runs)
    only = table.check_base(args.only, [run.flags for run in runs], "--only")
    runs = [run for run in runs if only.items() <= run.flags.items()]
    for flag in FLAGS:
        if not any(flag in run.flags for run in runs):
            raise UserError(f"no run has --{flag}: name the folders of the runs, not a CSV file")
    runs = [run for run in runs if run.flags.keys() >= set(FLAGS)]  # not those of minibatch
    points = find_points(runs)
    columns, _ = table.find_columns(runs)
    notes += table.notes_on_seeds(table.find_lines(runs, columns), columns)
    for note in notes:
        print(f"- {note}")
    path = Path(args.out.removesuffix(".svg") + ".svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        draw(points, path)
    except ModuleNotFoundError as error:
        print(f"picture none: pip install {error.name}")
    else:
        print(f"picture {path}")


if __name__ == "__main__":
    run_command("lab.gain", lambda: main(sys.argv[1:]))
