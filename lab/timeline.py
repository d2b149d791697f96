"""When each replica of a run computes and waits: recorded with --timeline, drawn as a Gantt chart.

    torchrun ... train.py --method edit --timeline --link_mbps 60 --slow_replica 1:2
    python -m lab.timeline out/edit out/diloco --out timeline        # timeline.svg, timeline.csv
    python -m lab.timeline out/edit out/diloco --sync --out overlap  # one sync, layer by layer

A span is a pair (begin, end), in seconds. All time that is not waiting counts as computing, so
record without evaluations and checkpoints. The shares are over whole rounds, without the first and
the last one. A picture ends where the shortest of its runs ends: record a few rounds. On a GPU the
host only queues most of its work: record on CPUs.
"""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path

from config import Parser, UserError, run_command
from lab.plot import new_figure, save
from lab.rows import METHODS, by_method, read_run

SPANS = {  # name -> color, text in the legend; in a bar the later ones cover the earlier ones
    "step": ("#0072b2", "computes"),
    "link": ("#009e73", "computes while its link sends"),
    "wait for others": ("#d7d7d7", "waits for the other replica"),
    "wait for link": ("#e69f00", "waits for the link"),
}
DARK = "#444444"  # the link
LAYERS = 6  # of the tiny model: embedding, four blocks, output


# ---- reading ----


def read_timeline(folder) -> list:
    """A row per replica: method, replica, `computing` (share of the time), `step_s` (mean time of a
    step without its waits), spans by name. Time counts from the beginning of the second round.
    Raises UserError for a run of less than three rounds."""
    record = read_run(folder)
    found = {}
    for path in sorted(Path(folder).glob("timeline-*.json")):
        row = replica_row(record, **json.loads(path.read_text()))
        found[row["replica"]] = row  # ranks of a replica are alike
    if not found:
        raise UserError(f"{folder}: the run has no timeline; train with --timeline")

    rows = [found[replica] for replica in sorted(found)]
    origin = min(row.pop("begin") for row in rows)
    for row in rows:
        for spans in row["spans"].values():
            spans[:] = [(round(begin - origin, 3), round(end - origin, 3)) for begin, end in spans]
    return rows


def replica_row(record, replica, spans) -> dict:
    """spans: as the run has recorded them, triples (name, begin, end)."""
    by_name = defaultdict(list)
    for name, begin, end in sorted(spans):
        by_name[name].append((begin, end))

    steps = by_name["step"]
    # Methods without a barrier record replica 0 alone.
    rounds = [each[min(replica, len(each) - 1)] for each in record["rounds"]]
    if not rounds:  # minibatch
        rounds = [1] * len(steps)
    if len(rounds) < 3:
        raise UserError(f"{record['folder']}: its timeline has less than three rounds")
    whole = steps[-sum(rounds[1:]) : -rounds[-1]]
    first = whole[0][0]
    last = whole[-1][1]
    waiting_s = 0.0
    for begin, end in by_name["wait for link"] + by_name["wait for others"]:
        if first <= begin < last:
            waiting_s += end - begin
    computing_s = last - first - waiting_s
    return {
        "method": record["method"],
        "replica": replica,
        "computing": computing_s / (last - first),
        "step_s": computing_s / len(whole),
        "spans": by_name,
        "begin": first,
    }


# ---- drawing ----


def name_of(row) -> str:
    return METHODS.get(row["method"], (row["method"],))[0]


def bars_of(spans, origin) -> list:
    """(begin, width) of each span."""
    return [(begin - origin, end - begin) for begin, end in spans]


def draw_replica(axes, row, y, origin=0.0):
    """A replica's bar of height 0.8 around y."""
    for name, (color, _) in SPANS.items():
        bars = bars_of(row["spans"].get(name, ()), origin)
        axes.broken_barh(bars, (y - 0.4, 0.8), color=color, linewidth=0)


def finish(figure, rows, path):
    """Write the picture with a legend."""
    from matplotlib import patches
    handles = [patches.Patch(color=color, label=label) for color, label in SPANS.values()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    save(figure, [row["spans"] for row in rows], path)


def draw(rows, path):
    """Write a bar for each replica of each run as SVG, and the share in which it computes."""
    seconds = min(row["spans"]["step"][-1][1] for row in rows)
    picture = new_figure(9, 1.2 + 0.28 * len(rows))
    axes = picture.add_subplot()
    names = {}  # y -> the name of a bar
    y = 0.0
    for row in rows:
        if row["replica"] == 0:  # of the next run
            y -= 0.6
        draw_replica(axes, row, y)
        axes.text(1.005 * seconds, y, f"{row['computing']:.0%}", va="center")
        names[y] = f"{name_of(row)}, replica {row['replica']}"
        y -= 1

    axes.set_title("Lost time", weight="bold", loc="left")
    axes.set_title("computes", fontsize=9, loc="right")
    axes.set(xlim=(0, seconds), xlabel="seconds")
    axes.set_yticks(list(names), names.values())
    finish(picture, rows, path)


def draw_overlap(rows, path):
    """Write the second sync of replica 0 of each run as SVG: what it does and, by layer, what its
    link sends."""
    shown = [row for row in rows if row["replica"] == 0]
    picture = new_figure(9, 1 + 0.9 * len(shown))
    axes = picture.add_subplot()
    names = {}
    y = 0.0
    for row in shown:
        sent = [(begin, end) for begin, end in row["spans"]["link"] if end > begin]  # not norms
        layers = sent[LAYERS : 2 * LAYERS]
        origin = layers[0][0]
        draw_replica(axes, row, y, origin)
        begins, widths = zip(*bars_of(layers, origin))
        bars = axes.barh(y - 0.7, widths, 0.5, begins, color=DARK, edgecolor="white")
        axes.bar_label(bars, range(len(layers)), label_type="center", color="white")
        names[y] = name_of(row)
        names[y - 0.7] = "its link, by layer"
        y -= 1.7

    sync_s = begins[-1] + widths[-1]
    axes.set(xlim=(-0.3 * sync_s, 1.5 * sync_s), xlabel="seconds since the sync began")
    axes.set_yticks(list(names), names.values())
    finish(picture, rows, path)


# ---- the command line ----


def main(argv):
    parser = Parser(prog="python -m lab.timeline", description="When replicas compute and wait.")
    parser.add_argument("runs", nargs="+", metavar="FOLDER", help="a run with --timeline")
    parser.add_argument("--sync", action="store_true", help="draw one sync, layer by layer")
    parser.add_argument("--out", default="timeline", help="OUT.svg, OUT.csv (default: timeline)")
    args = parser.parse_args(argv)
    rows = []
    for folder in args.runs:
        rows += read_timeline(folder)
    rows = by_method(rows)
    path = Path(args.out).with_suffix(".svg")
    draw_part = draw_overlap if args.sync else draw
    draw_part(rows, path)
    columns = ("method", "replica", "computing", "step_s")
    with open(path.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(f"{name_of(row)}, replica {row['replica']}: computes {row['computing']:.0%}")
    print(f"picture {path}, {path.with_suffix('.csv')}")


if __name__ == "__main__":
    run_command("timeline.py", lambda: main(sys.argv[1:]))
