"""When each replica of a run computes and waits: recorded with --timeline, drawn as a Gantt chart.

    torchrun ... train.py --method edit --timeline --link_mbps 60 --slow_replica 1:2
    python -m lab.plot --timeline out/edit out/diloco --out timeline.svg

A span is a pair (begin, end), in seconds. A step computes where it does not wait. The shares are
over whole rounds, without the first and the last one, and each replica has its own: a window of
seconds would cut rounds. On a GPU the host only queues most of its work: use gloo or shm there.
"""

import json
import zlib
from collections import defaultdict
from itertools import accumulate
from pathlib import Path

from lab.rows import GRAY, METHODS, read_run
from plumbing.config import UserError, optional

COMPUTES = ("#0072b2", "#5aa9d6")  # two shades, in turns, so that steps can be told apart
WAITS = {"wait for link": ("#e69f00", "waits for the link"),
         "wait for others": ("#d7d7d7", "waits for the other replica")}  # fmt: skip
LINK = "#444444"
SECONDS = 9.0  # that are drawn


def read_timeline(folder) -> list:
    """A row per replica: method, replica, `computing` (share of the time), and spans by name, from
    the beginning of the second round. Raises UserError if nothing was recorded."""
    record, rows = read_run(folder), {}
    for path in sorted(Path(folder).glob("timeline-*.json")):
        found = json.loads(path.read_text())
        rows.setdefault(found["replica"], found["spans"])
    if not rows:
        raise UserError(f"{folder}: the run has no timeline; train with --timeline")
    begins = []
    for replica, recorded in sorted(rows.items()):
        spans = defaultdict(list)
        for name, begin, end in recorded:
            spans[name].append((begin, end))
        rounds = [steps[replica] for steps in record["rounds"]] or [1] * len(spans["step"])
        ends = list(accumulate(rounds, initial=len(spans["step"]) - sum(rounds)))
        if len(ends) < 4:
            raise UserError(f"{folder}: a timeline needs at least three rounds")
        begin, end = (spans["step"][step][0] for step in (ends[1], ends[-2]))
        waits = sum(cut(spans[name], begin, end) for name in WAITS)
        rows[replica] = {"replica": replica, "computing": 1 - waits / (end - begin)}
        rows[replica]["spans"] = spans
        begins.append(begin)
    for row in rows.values():
        row["method"] = record["config"]["method"]
        row["spans"] = {
            name: drawn(spans, min(begins), merge=name in WAITS)
            for name, spans in row["spans"].items()
        }
    return list(rows.values())


def drawn(spans: list, origin: float, merge: bool) -> list:
    """The spans that a picture can show, from origin on, to the millisecond. merge: those with less
    than 5 ms between them are one."""
    found = []
    for begin, end in sorted(spans):
        begin, end = round(begin - origin, 3), round(end - origin, 3)
        if merge and found and begin - found[-1][1] < 0.005:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif -1 < begin < SECONDS:
            found.append((begin, end))
    return [(begin, end) for begin, end in found if end - begin > 0.003]


def cut(spans: list, begin: float, end: float) -> float:
    """Seconds of the spans between begin and end."""
    return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in spans)


def bars(axes, spans: list, y: float, height: float, color: str, edge="none"):
    """Rectangles as one path, which keeps the SVG small. spans: those that the axes show."""
    corners = [[(b, y), (b, y + height), (e, y + height), (e, y), (b, y)] for b, e in spans]
    if corners:
        path = optional("matplotlib.path").Path
        whole = path.make_compound_path(*(path(each, closed=True) for each in corners))
        style = {"facecolor": color, "edgecolor": edge, "linewidth": 0.8 * (edge != "none")}
        axes.add_patch(optional("matplotlib.patches").PathPatch(whole, **style))


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


def draw_rows(axes, rows: list):
    """Two bars a method, from the top; at the right the shares."""
    for i, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        replicas = [row for row in rows if row["method"] == method]
        for k, row in enumerate(replicas):
            y = -2.7 * i - 1.05 * k
            draw_replica(axes, row, y, 0.0, SECONDS)
            small = {"va": "center", "fontsize": 8}
            axes.text(SECONDS * 1.005, y + 0.4, f"{row['computing']:.0%}", **small)
            axes.text(-0.005 * SECONDS, y + 0.4, str(row["replica"]), ha="right", **small)
        both = sum(row["computing"] for row in replicas) / len(replicas)
        place = {"va": "center", "weight": "bold"}
        axes.text(SECONDS * 1.055, -2.7 * i - 0.15, f"{both:.0%}", fontsize=11, **place)
        if i == 0:
            axes.text(SECONDS * 1.055, 1.05, "computes", fontsize=8, va="bottom")
        name = METHODS.get(method, (method,))[0]
        axes.text(-0.025 * SECONDS, -2.7 * i - 0.15, name, ha="right", fontsize=10, **place)


def draw_sync(axes, row: dict, text: str):
    """One sync of a replica, enlarged: what it does, and what its link does."""
    sent = [span for span in row["spans"]["link"] if span[1] - span[0] > 0.003 and span[0] > 0]
    gaps = [i for i in range(1, len(sent)) if sent[i][0] - sent[i - 1][1] > 0.2]
    layers = sent[: gaps[0]] if gaps else sent
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
    """Write the picture as SVG. Raises UserError without matplotlib."""
    figure_module, patches = optional("matplotlib.figure"), optional("matplotlib.patches")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    syncs = [method for method in SYNCS if method in methods]
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"), GRAY)
    settings = colors | {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": ""}
    with optional("matplotlib").rc_context(settings | {"font.sans-serif": ["DejaVu Sans"]}):
        heights = [0.45 + 0.62 * len(methods), 1.1 * bool(syncs) or 0.01]
        figure = figure_module.Figure((10, sum(heights) + 0.6), layout="constrained")
        grid = figure.add_gridspec(2, max(1, len(syncs)), height_ratios=heights)
        axes = figure.add_subplot(grid[0, :])
        draw_rows(axes, rows)
        axes.set(xlim=(0, SECONDS), ylim=(1.3 - 2.7 * len(methods), 1), yticks=[], xlabel="seconds")
        axes.set_title(title, fontsize=11, weight="bold", loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
        for k, method in enumerate(syncs):
            last = [row for row in rows if row["method"] == method][-1]
            sync = figure.add_subplot(grid[1, k])
            sync.spines[:].set_visible(False)
            draw_sync(sync, last, SYNCS[method])
            texts = (0.4, f"replica {last['replica']}  "), (-0.45, "its link, by layer  ")
            for y, text in texts if k == 0 else ():
                sync.text(sync.get_xlim()[0], y, text, ha="right", va="center", fontsize=8)
        shown = [*zip(COMPUTES[:1], ["computes"]), *WAITS.values(), (LINK, "its link is busy")]
        handles = [patches.Patch(color=color, label=label) for color, label in shown]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
        metadata = {"Date": None, "Description": checksum(rows)}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)
