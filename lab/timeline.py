"""When each replica of a run computes and when it waits: what `train.py --timeline` records.

    torchrun ... train.py --method edit --timeline --link_mbps 60 --slow_replica 1:2
    python -m lab.plot --timeline out/edit out/diloco --out timeline.svg

A span is a pair (begin, end), in seconds. Time in a step that is not waiting counts as computing;
time between steps (evaluation, saving) does not count. The shares are over whole rounds, without
the first and the last one. On a GPU the host only queues most of its work: record on CPUs.
"""

import json
from collections import defaultdict
from itertools import accumulate
from pathlib import Path

from lab.rows import read_run
from plumbing.config import UserError

WAITS = ("wait for link", "wait for others")  # names of spans; the others: "step", "link"
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
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder}: its timeline is damaged ({error})") from None
    if not rows:
        raise UserError(f"{folder}: the run has no timeline; train with --timeline")
    if None in rows:
        raise UserError(f"{folder}: a timeline needs three rounds of one start of train.py")
    origin, longest = min(row.pop("begin") for row in rows), max(row["whole_s"] for row in rows)
    for row in rows:
        row |= {"folder": str(folder), "method": record["config"]["method"]}
        visible = lambda name: visible_spans(row["spans"][name], origin, longest, name in WAITS)
        row["spans"] = {name: visible(name) for name in row["spans"]}
    return rows


def replica_row(record: dict, replica: int, recorded: list):
    """None if there are too few rounds."""
    spans = defaultdict(list)
    for name, begin, end in recorded:
        spans[name].append((begin, end))
    steps = spans["step"]
    taken = [each[replica] for each in record["rounds"]] or [1] * len(steps)
    ends = [len(steps) - later for later in accumulate(reversed(taken), initial=0)]
    ends = [end for end in reversed(ends) if end >= 0]  # below: of an earlier start of train.py
    if len(ends) < 4:
        return None
    last, drawn_last = ends[-2], ends[min(1 + ROUNDS, len(ends) - 2)]
    begin, whole = steps[ends[1]][0], steps[ends[1] : last]
    waits = [span for name in WAITS for span in spans[name]]
    waited_s = sum(max(0.0, min(e, end) - max(b, start)) for start, end in whole for b, e in waits)
    computing = 1 - waited_s / sum(end - start for start, end in whole)
    row = {"replica": replica, "computing": computing, "begin": begin, "spans": spans}
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
