"""When each replica of a run computes and waits: recorded with --timeline, drawn as a Gantt chart.

    torchrun ... train.py --method edit --timeline --link_mbps 60 --slow_replica 1:2
    python -m lab.plot --timeline out/edit out/diloco --out timeline.svg

A span is a pair (begin, end), in seconds. Time in a step that is not waiting counts as computing;
time between steps (evaluation, saving) does not count. The shares are over whole rounds, without
the first and the last one. A picture ends where the shortest of its runs ends: record a few rounds.
On a GPU the host only queues most of its work: record on CPUs.
"""

import json
from collections import defaultdict
from pathlib import Path

from config import UserError
from lab.rows import DAMAGED, case_cell, read_run
from lab.svg import new_figure, save

SPANS = {  # name -> color, text in the legend
    "step": ("#0072b2", "computes"),
    "wait for link": ("#e69f00", "waits for the link"),
    "wait for others": ("#d7d7d7", "waits for the other replica"),
    "link": ("#444444", "its link is busy"),
}
GAP_S = 0.2  # Transfers with shorter pauses belong to one sync.


# ---- reading ----


def read_timeline(folder) -> list:
    """A row per replica: folder, method, replica, `computing` (share of the time), spans by name,
    `whole_s` (the seconds of all whole rounds). Time counts from the beginning of the second round.
    Raises UserError for a run of less than three rounds."""
    record = read_run(folder)
    found = {}
    try:
        for path in sorted(Path(folder).glob("timeline-*.json")):
            row = replica_row(record, **json.loads(path.read_text()))
            found[row["replica"]] = row  # ranks of a replica are alike
    except (*DAMAGED, ZeroDivisionError) as error:
        reason = f"its timeline is damaged, or has less than three rounds ({error})"
        raise UserError(f"{folder}: {reason}") from None
    if not found:
        raise UserError(f"{folder}: the run has no timeline; train with --timeline")

    rows = [found[replica] for replica in sorted(found)]
    origin = min(row.pop("begin") for row in rows)
    for row in rows:
        row["folder"] = str(folder)
        row["method"] = record["method"]
        for spans in row["spans"].values():
            spans[:] = [(round(begin - origin, 3), round(end - origin, 3)) for begin, end in spans]
    return rows


def replica_row(record, replica, spans) -> dict:
    """spans: as the run has recorded them, triples (name, begin, end)."""
    by_name = defaultdict(list)
    for name, begin, end in sorted(spans):
        by_name[name].append((float(begin), float(end)))

    steps = by_name["step"]
    lengths = [each[replica] for each in record["rounds"]]
    if not lengths:  # mini-batch
        lengths = [1] * len(steps)
    ends = [len(steps)]  # the steps at which rounds end, the first one's beginning before them
    for length in reversed(lengths):
        if length > ends[0]:  # of an earlier start of train.py
            break
        ends.insert(0, ends[0] - length)

    whole = steps[ends[1] : ends[-2]]
    begin = whole[0][0]
    waits = by_name["wait for link"] + by_name["wait for others"]
    steps_s = sum(end - begin for begin, end in whole)
    waits_s = sum(overlap_s(waits, *step) for step in whole)
    return {
        "replica": replica,
        "computing": 1 - waits_s / steps_s,
        "step_s": (steps_s - waits_s) / len(whole),
        "spans": by_name,
        "begin": begin,
        "whole_s": whole[-1][1] - begin,
    }


def overlap_s(spans, begin, end) -> float:
    """Seconds of the spans between begin and end."""
    return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in spans)


def transfers(row) -> list:
    """Of one sync in the middle of the run: the spans of the link that follow one another."""
    syncs = []
    for span in row["spans"]["link"]:
        if not syncs or span[0] - syncs[-1][-1][1] > GAP_S:
            syncs.append([])
        syncs[-1].append(span)
    return syncs[len(syncs) // 2]


# ---- drawing ----


def draw_spans(axes, row, name, y, height):
    bars = [(begin, end - begin) for begin, end in row["spans"].get(name, ())]
    axes.broken_barh(bars, (y, height), color=SPANS[name][0], linewidth=0)


def draw_replica(axes, row, y):
    """A replica's bar of height 0.8 above y."""
    for name in ("step", "wait for link", "wait for others"):
        draw_spans(axes, row, name, y, 0.8)


def finish(figure, rows, path):
    """Write the picture with a legend."""
    from matplotlib import patches
    handles = [patches.Patch(color=color, label=label) for color, label in SPANS.values()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    save(figure, [row["spans"] for row in rows], path)


def draw(rows, path, title="Lost time"):
    """Write a bar for each replica of each run as SVG, and the share in which it computes."""
    seconds = min(row["whole_s"] for row in rows)
    picture = new_figure(10, 1.2 + 0.28 * len(rows))
    axes = picture.add_subplot()
    names = {}  # y -> the name of a bar
    folder = rows[0]["folder"]
    y = 0.0
    for row in rows:
        if row["folder"] != folder:
            y -= 0.6
        folder = row["folder"]
        draw_replica(axes, row, y)
        draw_spans(axes, row, "link", y - 0.16, 0.12)
        axes.text(1.005 * seconds, y + 0.4, f"{row['computing']:.0%}", va="center")
        names[y + 0.4] = f"{case_cell(row, 'method')}, replica {row['replica']}"
        y -= 1.05

    axes.set_title(title, weight="bold", loc="left")
    axes.set_title("computes", fontsize=9, loc="right")
    axes.set(xlim=(0, seconds), ylim=(y + 0.8, 1), xlabel="seconds")
    axes.set_yticks(list(names), names.values())
    finish(picture, rows, path)


def draw_overlap(rows, path):
    """Write one sync of replica 0 of each run as SVG: what it does and, by layer, what its link
    sends."""
    shown = [row for row in rows if row["replica"] == 0]
    syncs = [transfers(row) for row in shown]
    longest = max(layers[-1][1] - layers[0][0] for layers in syncs)
    picture = new_figure(10, 0.8 + 1.1 * len(shown))
    all_axes = picture.subplots(len(shown), squeeze=False)[:, 0]
    for axes, row, layers in zip(all_axes, shown, syncs):
        first = layers[0][0]
        last = layers[-1][1]
        draw_replica(axes, row, 0.0)
        for l, (begin, end) in enumerate(layers):
            place = [(begin, end - begin)], (-0.75, 0.6)
            axes.broken_barh(*place, facecolor=SPANS["link"][0], edgecolor="white")
            middle = (begin + end) / 2
            axes.text(middle, -0.45, l, color="white", ha="center", va="center")

        axes.set(xlim=(first - 0.4 * longest, first + 1.8 * longest), ylim=(-0.8, 0.85))
        axes.set_xticks([first, last], ["0", f"{last - first:.2f} s"])
        name = case_cell(row, "method")
        axes.set_yticks([-0.45, 0.4], ["its link, by layer", f"{name}, replica 0"])
    finish(picture, rows, path)
