"""When each replica of a run computes and waits: recorded with --timeline, drawn as a Gantt chart.

    torchrun ... train.py --method edit --timeline --link_mbps 60 --slow_replica 1:2
    python -m lab.plot --timeline out/edit out/diloco --out timeline.svg
    python -m lab.plot --overlap out/edit out/diloco --out overlap.svg    # one sync, by layer

A span is a pair (begin, end), in seconds. Time in a step that is not waiting counts as computing;
time between steps (evaluation, saving) does not count. The shares are over whole rounds, without
the first and the last one. On a GPU the host only queues most of its work: record on CPUs.
"""

import json
from collections import defaultdict
from pathlib import Path

from config import UserError
from lab.rows import case_cell, read_run
from lab.svg import save, settings

SPANS = {  # name -> color, text in the legend
    "step": ("#0072b2", "computes"),
    "wait for link": ("#e69f00", "waits for the link"),
    "wait for others": ("#d7d7d7", "waits for the other replica"),
    "link": ("#444444", "its link is busy"),
}
WAITS = ("wait for link", "wait for others")
ROUNDS = 3  # that are drawn, of the run with the longest ones
GAP_S = 0.2  # Transfers with shorter pauses belong to one sync.


# ---- reading ----


def read_timeline(folder) -> list:
    """A row per replica: folder, method, replica, `computing` (share of the time), spans by name,
    `whole_s` (the seconds of all whole rounds), `some_s` (of at most ROUNDS of them). Time counts
    from the beginning of the second round. Raises UserError for less than three rounds."""
    record = read_run(folder)
    found = {}
    try:
        for path in sorted(Path(folder).glob("timeline-*.json")):
            recorded = json.loads(path.read_text())
            found.setdefault(recorded["replica"], recorded["spans"])
        rows = [replica_row(record, replica, found[replica]) for replica in sorted(found)]
    except (ValueError, LookupError, TypeError, RecursionError, ZeroDivisionError) as error:
        raise UserError(f"{folder}: its timeline is damaged ({error})") from None
    if not rows:
        raise UserError(f"{folder}: the run has no timeline; train with --timeline")

    origin = min(row.pop("begin") for row in rows)
    longest = max(row["whole_s"] for row in rows)
    for row in rows:
        row["folder"] = str(folder)
        row["method"] = record["method"]
        for name, spans in row["spans"].items():
            row["spans"][name] = visible_spans(spans, origin, longest)
    return rows


def replica_row(record, replica, recorded) -> dict:
    spans = defaultdict(list)
    for name, begin, end in recorded:
        spans[name].append((float(begin), float(end)))
    steps = spans["step"]

    ends = [len(steps)]  # the steps at which rounds end, the first one's beginning before them
    for each in reversed(record["rounds"] or [[1] * (replica + 1)] * len(steps)):
        if each[replica] > ends[0]:  # of an earlier start of train.py
            break
        ends.insert(0, ends[0] - each[replica])
    if len(ends) < 4:
        raise UserError(f"{record['folder']}: a timeline needs three rounds of one start")

    first = ends[1]
    last = ends[-2]
    some = ends[min(1 + ROUNDS, len(ends) - 2)]
    begin = steps[first][0]
    steps_s = sum(end - begin for begin, end in steps[first:last])
    waits_s = 0.0
    for name in WAITS:
        waits_s += sum(overlap_s(spans[name], *step) for step in steps[first:last])

    row = {"replica": replica, "computing": 1 - waits_s / steps_s, "begin": begin, "spans": spans}
    row["step_s"] = (steps_s - waits_s) / (last - first)
    row["whole_s"] = steps[last][0] - begin
    row["some_s"] = steps[some][0] - begin
    return row


def overlap_s(spans, begin, end) -> float:
    """Seconds of the spans between begin and end."""
    return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in spans)


def visible_spans(spans, origin, seconds) -> list:
    """The spans that a picture can show, from origin on, to the millisecond."""
    found = []
    for begin, end in sorted(spans):
        span = (round(begin - origin, 3), round(end - origin, 3))
        if -1 < span[0] < seconds and span[1] - span[0] > 0.003:
            found.append(span)
    return found


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
    for name in ("step", *WAITS):
        draw_spans(axes, row, name, y, 0.8)


def finish(figure, rows, path):
    """Write the picture with a legend."""
    from matplotlib import patches
    handles = [patches.Patch(color=color, label=label) for color, label in SPANS.values()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    save(figure, [row["spans"] for row in rows], path)


def draw(rows, path, title="Lost time"):
    """Write a bar for each replica of each run as SVG, and the share in which it computes."""
    from matplotlib import figure
    seconds = min(min(row["whole_s"] for row in rows), max(row["some_s"] for row in rows))
    with settings():
        picture = figure.Figure((10, 1.2 + 0.28 * len(rows)), layout="constrained")
        axes = picture.add_subplot()
        places = []
        names = []
        folder = rows[0]["folder"]
        y = 0.0
        for row in rows:
            if row["folder"] != folder:
                y -= 0.6
            folder = row["folder"]
            draw_replica(axes, row, y)
            draw_spans(axes, row, "link", y - 0.16, 0.12)
            axes.text(1.005 * seconds, y + 0.4, f"{row['computing']:.0%}", va="center")
            places.append(y + 0.4)
            names.append(f"{case_cell(row, 'method')}, replica {row['replica']}")
            y -= 1.05

        axes.set_title(title, weight="bold", loc="left")
        axes.set_title("computes", fontsize=9, loc="right")
        axes.set(xlim=(0, seconds), ylim=(y + 0.8, 1), xlabel="seconds")
        axes.set_yticks(places, names)
        finish(picture, rows, path)


def draw_overlap(rows, path):
    """Write one sync of replica 0 of each run as SVG: what it does and, by layer, what its link
    sends."""
    from matplotlib import figure
    shown = [row for row in rows if row["replica"] == 0 and row["spans"].get("link")]
    if not shown:
        raise UserError("no replica has used its link")
    longest = max(transfers(row)[-1][1] - transfers(row)[0][0] for row in shown)
    with settings():
        picture = figure.Figure((10, 0.8 + 1.1 * len(shown)), layout="constrained")
        all_axes = picture.subplots(len(shown), squeeze=False)[:, 0]
        for axes, row in zip(all_axes, shown):
            layers = transfers(row)
            first = layers[0][0]
            last = layers[-1][1]
            draw_replica(axes, row, 0.0)
            for l, (begin, end) in enumerate(layers):
                box = {"facecolor": SPANS["link"][0], "edgecolor": "white"}
                axes.broken_barh([(begin, end - begin)], (-0.75, 0.6), **box)
                middle = (begin + end) / 2
                axes.text(middle, -0.45, l, color="white", ha="center", va="center")

            axes.set(xlim=(first - 0.4 * longest, first + 1.8 * longest), ylim=(-0.8, 0.85))
            axes.set_xticks([first, last], ["0", f"{last - first:.2f} s"])
            name = case_cell(row, "method")
            axes.set_yticks([-0.45, 0.4], ["its link, by layer", f"{name}, replica 0"])
        finish(picture, rows, path)
