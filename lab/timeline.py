"""When each replica of a run computes and waits: recorded with --timeline, drawn as a Gantt chart.

    torchrun ... train.py --method edit --timeline --link_mbps 60 --slow_replica 1:2
    python -m lab.plot --timeline out/edit out/diloco --out timeline.svg

A span is a pair (begin, end), in seconds. Time in a step that is not waiting counts as computing;
time between steps (evaluation, saving) does not count. The shares are over whole rounds, without
the first and the last one. On a GPU the host only queues most of its work: record on CPUs.
"""

import json
import zlib
from collections import defaultdict
from pathlib import Path

from config import UserError
from lab.rows import GRAY, METHODS, read_run

COMPUTES = ("#0072b2", "#5aa9d6")  # two shades, in turns, so that steps can be told apart
WAITS = {"wait for link": ("#e69f00", "waits for the link"),
         "wait for others": ("#d7d7d7", "waits for the other replica")}  # fmt: skip
LINK = "#444444"
ROUNDS = 3  # that are drawn, of the run with the longest ones


def read_timeline(folder) -> list:
    """A row per replica: folder, method, replica, `computing` (share of the time), spans by name,
    `whole_s` (the seconds of all whole rounds), `some_s` (of at most ROUNDS of them). Time counts
    from the beginning of the second round. Raises UserError for less than three rounds."""
    record, found = read_run(folder), {}
    try:
        for path in sorted(Path(folder).glob("timeline-*.json")):
            recorded = json.loads(path.read_text())
            found.setdefault(recorded["replica"], recorded["spans"])
        rows = [replica_row(record, replica, found[replica]) for replica in sorted(found)]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{folder}: its timeline is damaged ({error})") from None
    if not rows:
        raise UserError(f"{folder}: the run has no timeline; train with --timeline")
    if None in rows:
        raise UserError(f"{folder}: a timeline needs three rounds of one start of train.py")
    origin, longest = min(row["begin"] for row in rows), max(row["whole_s"] for row in rows)
    for row in rows:
        row.pop("begin")
        row["folder"], row["method"] = str(folder), record["config"]["method"]
        row["spans"] = {
            name: visible_spans(spans, origin, longest, merge=name in WAITS)
            for name, spans in row["spans"].items()
        }
    return rows


def replica_row(record: dict, replica: int, recorded: list):
    """None if there are too few rounds."""
    spans = defaultdict(list)
    for name, begin, end in recorded:
        spans[name].append((float(begin), float(end)))
    steps, ends = spans["step"], [len(spans["step"])]  # steps at the rounds' ends
    for each in reversed(record["rounds"] or [[1] * (replica + 1)] * len(steps)):
        if each[replica] > ends[0]:  # of an earlier start of train.py
            break
        ends.insert(0, ends[0] - each[replica])
    if len(ends) < 4:
        return None
    last, drawn_last = ends[-2], ends[min(1 + ROUNDS, len(ends) - 2)]
    begin, whole = steps[ends[1]][0], steps[ends[1] : last]
    waits = [span for name in WAITS for span in spans[name]]
    waited_s = sum(overlap_s(waits, *step) for step in whole)
    steps_s = sum(end - begin for begin, end in whole)
    if min(steps_s, steps[last][0] - begin) <= 0:
        raise ValueError("its rounds have no length")
    row = {"replica": replica, "computing": 1 - waited_s / steps_s, "begin": begin, "spans": spans}
    return row | {"whole_s": steps[last][0] - begin, "some_s": steps[drawn_last][0] - begin}


def visible_spans(spans: list, origin: float, seconds: float, merge: bool) -> list:
    """The spans that a picture can show, from origin on, to the millisecond. merge: those with less
    than 5 ms between them are one."""
    found = []
    for begin, end in sorted(spans):
        begin, end = round(begin - origin, 3), round(end - origin, 3)
        if merge and found and begin - found[-1][1] < 0.005:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif -1 < begin < seconds:
            found.append((begin, end))
    return [(begin, end) for begin, end in found if end - begin > 0.003]


def overlap_s(spans: list, begin: float, end: float) -> float:
    """Seconds of the spans between begin and end."""
    return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in spans)


def bars(axes, spans: list, y: float, height: float, color: str, edge="none"):
    """Rectangles as one path, which keeps the SVG small. spans: those that the axes show."""
    corners = [[(b, y), (b, y + height), (e, y + height), (e, y), (b, y)] for b, e in spans]
    if corners:
        from matplotlib import patches, path
        whole = path.Path.make_compound_path(*(path.Path(each, closed=True) for each in corners))
        style = {"facecolor": color, "edgecolor": edge, "linewidth": 0.8 * (edge != "none")}
        axes.add_patch(patches.PathPatch(whole, **style))


def draw_replica(axes, row: dict, y: float, begin: float, end: float):
    """A replica's bar of height 0.8 above y, and below it a thin line while its link is busy."""
    inside = lambda name: [
        (max(b, begin), min(e, end)) for b, e in row["spans"].get(name, ()) if e > begin and b < end
    ]
    for shade, color in enumerate(COMPUTES):
        bars(axes, inside("step")[shade::2], y, 0.8, color)
    for name, (color, _) in WAITS.items():
        bars(axes, inside(name), y, 0.8, color)
    bars(axes, inside("link"), y - 0.16, 0.12, LINK)


def draw_rows(axes, runs: list, seconds: float):
    """A bar for each replica of each run, from the top; at the right the shares."""
    y, right = 0.0, seconds * 1.055
    axes.text(right, 1.05, "computes", fontsize=8, va="bottom")
    axes.text(-0.005 * seconds, 1.05, "replica", fontsize=8, va="bottom", ha="right")
    for rows in runs:
        top = y
        for row in rows:
            draw_replica(axes, row, y, 0.0, seconds)
            small = {"va": "center", "fontsize": 8}
            axes.text(seconds * 1.005, y + 0.4, f"{row['computing']:.0%}", **small)
            axes.text(-0.005 * seconds, y + 0.4, str(row["replica"]), ha="right", **small)
            y -= 1.05
        middle = (top + y + 1.05) / 2 + 0.4
        both = sum(row["computing"] for row in rows) / len(rows)
        place = {"va": "center", "weight": "bold"}
        axes.text(right, middle, f"{both:.0%}", fontsize=11, **place)
        name = METHODS.get(rows[0]["method"], (rows[0]["method"],))[0]
        axes.text(-0.025 * seconds, middle, name, ha="right", fontsize=10, **place)
        y -= 0.6
    axes.set(xlim=(0, seconds), ylim=(y + 1.2, 1), yticks=[], xlabel="seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)


def transfers(row: dict) -> list:
    """Of one sync: the spans of the link after 0 that follow one another."""
    sent = [span for span in row["spans"].get("link", []) if span[0] > 0]
    gaps = [i for i in range(1, len(sent)) if sent[i][0] - sent[i - 1][1] > 0.2]
    return sent[: gaps[0]] if gaps else sent


def draw_sync(axes, row: dict, text: str):
    """One sync of a replica, enlarged: what it does, and what its link does."""
    layers = transfers(row)
    begin, end = layers[0][0] - 0.25, layers[-1][1] + 0.35
    draw_replica(axes, row | {"spans": row["spans"] | {"link": []}}, 0, begin, end)
    for l, (b, e) in enumerate(layers):
        bars(axes, [(b, e)], -0.75, 0.6, "none", LINK)
        name = "whole model" if len(layers) == 1 else str(l)
        if e - b > 0.03 * (end - begin):
            axes.text((b + e) / 2, -0.45, name, ha="center", va="center", fontsize=7)
    axes.set_title(f"{METHODS[row['method']][0]}: {text}", fontsize=9)
    axes.set(xlim=(begin, end), ylim=(-0.8, 0.85), yticks=[], xticks=[])


def checksum(rows: list) -> str:
    """Of the rows, a line in the SVG: it shows whether a picture belongs to them."""
    return f"crc32 of its rows: {zlib.crc32(json.dumps([row['spans'] for row in rows]).encode())}"


SYNCS = {
    "diloco": "stands still", "edit": "computes layer l while later ones travel",
    "co2": "computes on",
}  # fmt: skip


def draw(rows: list, path, title="Lost time"):
    """Write the picture as SVG."""
    import matplotlib.figure as figure_module
    from matplotlib import patches, rc_context
    runs = defaultdict(list)
    for row in rows:
        runs[row["folder"]].append(row)
    last = {run[-1]["method"]: run[-1] for run in runs.values()}
    syncs = [method for method in SYNCS if method in last and transfers(last[method])]
    seconds = min(min(row["whole_s"] for row in rows), max(row["some_s"] for row in rows))
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"), GRAY)
    settings = colors | {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": ""}
    with rc_context(settings | {"font.sans-serif": ["DejaVu Sans"]}):
        heights = [0.45 + 0.17 * len(runs) + 0.22 * len(rows), 1.1 * bool(syncs) or 0.01]
        figure = figure_module.Figure((10, sum(heights) + 0.6), layout="constrained")
        grid = figure.add_gridspec(2, max(1, len(syncs)), height_ratios=heights)
        axes = figure.add_subplot(grid[0, :])
        draw_rows(axes, list(runs.values()), seconds)
        axes.set_title(title + "\n", fontsize=11, weight="bold", loc="left")
        for k, method in enumerate(syncs):
            sync = figure.add_subplot(grid[1, k])
            sync.spines[:].set_visible(False)
            draw_sync(sync, last[method], SYNCS[method])
            texts = (0.4, f"replica {last[method]['replica']}  "), (-0.45, "its link, by layer  ")
            for y, text in texts if k == 0 else ():
                sync.text(sync.get_xlim()[0], y, text, ha="right", va="center", fontsize=8)
        shown = [*zip(COMPUTES[:1], ["computes"]), *WAITS.values(), (LINK, "its link is busy")]
        handles = [patches.Patch(color=color, label=label) for color, label in shown]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
        metadata = {"Date": None, "Description": checksum(rows)}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)
