"""Records of runs, rows of results, tables of rows.

    read_run("out/edit")["val_loss"]                                    # of each evaluation
    rows = json.loads(Path("lab/results/tau.json").read_text())
    print(table(rows, ("val_loss", "local_bytes")))                     # Markdown

A row is a dict with the columns of a run (method, tau, seed ...), its results and its command
lines. over() turns the rows of runs into those of an experiment.
"""

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from config import UserError

GRAY = "#808080"
METHODS = {  # in the order of all tables and figures: name, color, marker, line
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
    "zero_one_adam": ("0/1 Adam", "#7570b3", "*", "-"),
    "one_bit_edit": ("one-bit EDiT", "#0072b2", "*", "-"),
    "sparse_loco": ("SparseLoCo", "#66a61e", "X", "-"),
    "top_k": ("top-k", "#66a61e", "p", "--"),
    "eager": ("eager", "#cc79a7", "h", "--"),
    "robust": ("Robust DiLoCo", "#999933", "d", "-"),
}
# These are not in the experiments of "all" methods.
LATER = ("zero_one_adam", "one_bit_edit", "sparse_loco", "top_k", "eager", "robust")
CASE = (  # what distinguishes the rows, the seed apart
    "method", "replica", "variant", "setting", "tau", "slowness", "clock", "disturbance",
    "link_mbps", "model", "gbit_per_s",
)  # fmt: skip
COUNTS = ("step", "tokens", "train_s", "sync_bytes")  # columns of step rows and evaluations
CURVES = (*COUNTS, "val_loss")  # columns of the evaluations
NUMBER = (int, float)


def read_run(folder) -> dict:
    """The record of a run: its folder, its rows `config` and `end` (None: it has not ended), a list
    per column of its evaluations, `steps`, the list of its step rows, and `rounds`, the steps of
    each replica in each. A val_loss that is not finite is None. Raises UserError for a file that is
    not a record."""
    path, rows = Path(folder, "metrics.jsonl"), defaultdict(list)
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["event"]].append(row)
        config, end = rows["config"][0], rows["end"][0] if rows["end"] else None
        check_types(config, str, "method")
        check_types({"sync_warmup_steps": 0} | config, NUMBER, "sync_warmup_steps")
        for row in rows["step"] + rows["eval"]:
            check_types(row, NUMBER, *COUNTS)
        for row in rows["eval"]:
            check_types(row, (*NUMBER, type(None)), "val_loss")
        curves = {name: [row[name] for row in rows["eval"]] for name in CURVES}
        rounds = [row["steps"] for row in rows["sync"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not the record of a run ({error})") from None
    record = {"folder": folder, "config": config, "end": end, "steps": rows["step"]}
    return record | {"rounds": rounds} | curves


def check_types(row: dict, types, *names):
    for name in names:
        if not isinstance(row[name], types):
            raise TypeError(f"{name} has a wrong type")


def after_warmup(record: dict, warmup: int) -> dict:
    """Lists like the record's, less what the first `warmup` steps have sent and taken. Tokens and
    seconds are interpolated between rows. A step of the warm-up sends as many bytes as those before
    the last row within it. Raises UserError if there is no such row."""
    evaluations = [dict(zip(COUNTS, row)) for row in zip(*(record[name] for name in COUNTS))]
    rows = sorted(record["steps"] + evaluations, key=lambda row: row["step"])
    within = [row for row in rows if 0 < row["step"] <= warmup]
    if within:
        steps = [0, *(row["step"] for row in rows)]
        began = {
            name: np.interp(warmup, steps, [0, *(row[name] for row in rows)]) for name in COUNTS
        }
        # Later steps send less.
        began["sync_bytes"] = within[-1]["sync_bytes"] * (warmup / within[-1]["step"])
    elif not warmup:
        began = dict.fromkeys(COUNTS, 0)
    else:
        problem = f"no row of its record is within the warm-up of {warmup} steps"
        raise UserError(f"{record['folder']}: {problem}; name a run that began at step 1")
    return {name: [max(0, x - began[name]) for x in record[name]] for name in COUNTS}


def in_order(rows: list) -> list:
    """Rows in the order of METHODS, and then the reader's own methods."""
    order = [*METHODS, *(row["method"] for row in rows)]
    return sorted(rows, key=lambda row: order.index(row["method"]))


def over(name, same=("seed",), **baseline):
    """A function that adds to each row how much higher its loss is than that of its base: the row
    with the columns `baseline` and the same values in `same`."""

    def base(row, rows):
        wanted = baseline | {column: row[column] for column in same}
        return next(other for other in rows if wanted.items() <= other.items())

    def combine(rows):
        return [row | {name: row["val_loss"] / base(row, rows)["val_loss"] - 1} for row in rows]

    return combine


def beside_minibatch(rows):
    """Adds how much higher the losses, and how many times lower the bytes are."""
    sent = {row["seed"]: row["sync_bytes"] for row in rows if row["method"] == "minibatch"}
    found = over("over_minibatch", method="minibatch")(rows)
    return [row | {"fewer_bytes": sent[row["seed"]] / row["sync_bytes"]} for row in found]


def with_standard_error(rows):
    """Beside mini-batch, with the standard error of the mean distance from it, seed by seed."""
    rows, distances = beside_minibatch(rows), defaultdict(list)
    case = lambda row: (row["method"], row.get("variant"))
    for row in rows:
        distances[case(row)].append(row["over_minibatch"])
    return [row | {"standard_error": standard_error(distances[case(row)])} for row in rows]


def standard_error(values: list) -> float:
    """Of their mean; NaN for one value."""
    if len(values) < 2:
        return math.nan
    return statistics.stdev(values) / len(values) ** 0.5


FORMATS = {  # column -> heading, format, factor
    "val_loss": ("validation loss", "{:.4f}", 1),
    "local_bytes": ("MB sent after the warm-up", "{:,.1f}", 1e-6),
    "sync_bytes": ("MB sent in all", "{:,.1f}", 1e-6),
    "fewer_bytes": ("of mini-batch's bytes", "1/{:,.0f}", 1),
    "over_minibatch": ("over mini-batch", "{:+.1%}", 1), "step_ms": ("ms a step", "{:,.0f}", 1),
    "standard_error": ("standard error", "{:.2%}", 1),
    "local_s": ("seconds after the warm-up", "{:,.0f}", 1),
    "tokens_per_s": ("tokens per second", "{:,.0f}", 1),
    "computing": ("computes", "{:.0%}", 1),
    "over_one": ("over 1 replica", "{:+.1%}", 1), "excess": ("over undisturbed", "{:+.1%}", 1),
}  # fmt: skip


def table(rows: list, columns: tuple) -> str:
    """Markdown: a line per case, the mean over its seeds and in brackets the lowest and highest."""
    keys = [i for i, name in enumerate(CASE) if len({row.get(name) for row in rows}) > 1]
    formats = [FORMATS.get(name, (name, "{:.3g}", 1)) for name in columns]
    lines = [[CASE[i] for i in keys] + [heading for heading, _, _ in formats]]
    lines.append(["---"] * len(lines[0]))
    groups = defaultdict(list)  # case -> its rows, one per seed
    for row in in_order(rows):
        groups[tuple(row.get(name) for name in CASE)].append(row)
    for case, group in groups.items():
        case = (METHODS.get(case[0], case)[0], *case[1:])
        cells = ["" if case[i] is None else str(case[i]) for i in keys]
        for name, (_, form, factor) in zip(columns, formats):
            values = [factor * row[name] for row in group]
            cell = form.format(statistics.mean(values))
            spread = [form.format(pick(values)) for pick in (min, max)]
            cells.append(cell if spread[0] == spread[1] else f"{cell} ({' .. '.join(spread)})")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
