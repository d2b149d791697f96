"""When each replica of a run computes and waits: recorded with --timeline, drawn as a Gantt chart.

    torchrun ... train.py --method edit --timeline --link_mbps 60 --slow_replica 1:2
    python -m lab.timeline out/edit out/diloco --out timeline    # timeline.svg, timeline.csv

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


def draw_replica(axes, row, y):
    """A replica's bar of height 0.8 around y."""
    for name, (color, _) in SPANS.items():
        bars = [(begin, end - begin) for begin, end in row["spans"].get(name, ())]
        axes.broken_barh(bars, (y - 0.4, 0.8), color=color, linewidth=0)


def draw(rows, path):
    """Write a bar for each replica of each run as SVG, and the share in which it computes."""
    from matplotlib import patches
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
    handles = [patches.Patch(color=color, label=label) for color, label in SPANS.values()]
    picture.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    save(picture, [row["spans"] for row in rows], path)


# ---- the command line ----


def main(argv):
    parser = Parser(prog="python -m lab.timeline", description="When replicas compute and wait.")
    parser.add_argument("runs", nargs="+", metavar="FOLDER", help="a run with --timeline")
    parser.add_argument("--out", default="timeline", help="OUT.svg, OUT.csv (default: timeline)")
    args = parser.parse_args(argv)
    rows = []
    for folder in args.runs:
        rows += read_timeline(folder)
    rows = by_method(rows)
    path = Path(args.out).with_suffix(".svg")
    draw(rows, path)
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
