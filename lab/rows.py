"""Records of runs, rows of results, tables of rows.

    read_run("out/edit")["val_loss"]                                    # of each evaluation
    rows = json.loads(Path("lab/results/tau.json").read_text())
    print(table(rows, ("val_loss", "local_bytes")))                     # Markdown

    print(compare(rows, {"method": "edit", "tau": 4}, {"method": "diloco", "tau": 4}))

A row is a dict with the columns of a run (method, tau, seed ...), its results and its command
lines. The rows of one case differ only in their seed: the table has a line for each case.
"""

import json
import math
import statistics
from collections import defaultdict
from itertools import product
from pathlib import Path

from config import UserError

GRAY = "#808080"
METHODS = {  # in the order of all tables and pictures: name, color, marker and line
    "minibatch": ("mini-batch", GRAY, "s-"),
    "post_local_sgd": ("Post Local SGD", "#a6761d", "<-"),
    "qsr": ("QSR", "#a6761d", "1-"),
    "slowmo": ("SlowMo", "#e69f00", ">-"),
    "co2": ("CO2", "#cc79a7", "^-"),
    "noloco": ("NoLoCo", "#56b4e9", "v-"),
    "diloco": ("DiLoCo", "#d55e00", "o-"),
    "streaming_diloco": ("Streaming DiLoCo", "#d55e00", "D--"),
    "edit": ("EDiT", "#0072b2", "o-"),
    "streaming_edit": ("Streaming EDiT", "#0072b2", "D--"),
    "a_edit": ("A-EDiT", "#009e73", "P-"),
    "zero_one_adam": ("0/1 Adam", "#7570b3", "*-"),
    "one_bit_edit": ("one-bit EDiT", "#0072b2", "*-"),
    "sparse_loco": ("SparseLoCo", "#66a61e", "X-"),
    "top_k": ("top-k", "#66a61e", "p--"),
    "eager": ("eager", "#cc79a7", "h--"),
    "robust": ("Robust DiLoCo", "#999933", "d-"),
}
CASE = (  # what distinguishes the cases
    "method",
    "replica",
    "variant",
    "optimizer",
    "setting",
    "warm-up",
    "tau",
    "steps",
    "slowness",
    "clock",
    "disturbance",
    "link_mbps",
    "model",
)
COUNTS = ("step", "tokens", "train_s", "sync_bytes")  # columns of step rows and evaluations
CURVES = (*COUNTS, "val_loss")  # columns of the evaluations
DAMAGED = (ValueError, LookupError, TypeError, ArithmeticError)  # what reading such a file raises


def read_run(folder) -> dict:
    """The record of a run: its folder, config and method; `steps`, `syncs`, `evals` and `resumes`,
    the lists of these rows; a list per column of the evaluations; `rounds`, the steps of each
    replica in each; `end`, that row if the run has finished, else None. A val_loss that is not
    finite is None. Raises UserError for a file that is not a record."""
    path = Path(folder, "metrics.jsonl")
    rows = defaultdict(list)
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["event"]].append(row)

        config = rows["config"][0]
        record = {"folder": folder, "config": config, "method": config["method"]}
        record["steps"] = rows["step"]
        record["syncs"] = rows["sync"]
        record["evals"] = rows["eval"]
        record["resumes"] = rows["resume"]
        ends = [row for row in rows["end"] if row.get("exit") == "done"]
        record["end"] = ends[-1] if ends else None
        record["rounds"] = [row["steps"] for row in rows["sync"]]
        for name in CURVES:
            record[name] = [row[name] for row in rows["eval"]]
            sum(value or 0 for value in record[name])  # raises a TypeError if one is no number
        for row in rows["step"]:
            sum(row[name] for name in COUNTS)
    except DAMAGED as error:
        raise UserError(f"{path} is not the record of a run ({error})") from None
    return record


def in_order(rows) -> list:
    """Rows in the order of METHODS, and then the reader's own methods."""
    order = [*METHODS, *(row["method"] for row in rows)]
    return sorted(rows, key=lambda row: order.index(row["method"]))


def values(row, names) -> tuple:
    return tuple(row.get(name) for name in names)


# ---- differences between runs of the same seed ----


def with_base(rows, same, **baseline) -> list:
    """Pairs of each row and its base: the row with the columns `baseline` and the same values in
    the columns `same`. Leaves out rows without a base."""
    bases = {values(row, same): row for row in rows if baseline.items() <= row.items()}
    return [(row, bases[values(row, same)]) for row in rows if values(row, same) in bases]


def distance(row, base) -> float:
    """How much higher the loss is, as a share."""
    return row["val_loss"] / base["val_loss"] - 1


def compare(rows, one, other) -> str:
    """How much higher the loss of the case `one` is than that of `other`, over the seeds that both
    have. A case is a dict of columns: {"method": "edit", "tau": 4}."""
    found = []
    for row in rows:
        for base in rows:
            if one.items() <= row.items() and other.items() <= base.items():
                if row["seed"] == base["seed"]:
                    found.append(distance(row, base))
    text = f"{statistics.mean(found):+.2%} (n = {len(found)}"
    if len(found) > 1:
        text += f", standard error {standard_error(found):.2%}, p = {sign_flip_p(found):.3f}"
    return text + ")"


def sign_flip_p(differences) -> float:
    """The chance of a mean so far from 0 if each sign was a coin's (exact, two-sided). With n
    differences it is at least 2 / 2^n."""
    sums = []
    for signs in product((1, -1), repeat=len(differences)):
        sums.append(abs(sum(sign * value for sign, value in zip(signs, differences))))
    return statistics.mean(value >= sums[0] * (1 - 1e-9) for value in sums)


def beside_minibatch(rows) -> list:
    """Adds how much higher the losses, and how many times lower the bytes are."""
    for row, base in with_base(rows, ["seed"], method="minibatch", optimizer="AdamW"):
        row["over_minibatch"] = distance(row, base)
        row["fewer_bytes"] = base["sync_bytes"] / row["sync_bytes"]
    for row, base in with_base(rows, ["seed"], method="minibatch", optimizer="Muon"):
        row["over_muon"] = distance(row, base)
    return rows


# ---- tables ----

DISTANCES = ("over_minibatch", "over_muon", "excess")
FORMATS = {  # column -> heading, format, factor
    "val_loss": ("validation loss", "{:.4f}", 1),
    "local_bytes": ("MB sent after the warm-up", "{:,.1f}", 1e-6),
    "sync_bytes": ("MB sent in all", "{:,.1f}", 1e-6),
    "fewer_bytes": ("of mini-batch's bytes", "1/{:,.0f}", 1),
    "over_minibatch": ("over mini-batch", "{:+.1%}", 1),
    "over_muon": ("over mini-batch, Muon", "{:+.1%}", 1),
    "excess": ("over undisturbed", "{:+.1%}", 1),
    "step_ms": ("ms a step", "{:,.0f}", 1),
    "tokens_per_s": ("tokens per second", "{:,.0f}", 1),
    "computing": ("computes", "{:.0%}", 1),
}


def table(rows, columns) -> str:
    """Markdown: a line per case, the mean over its seeds and in brackets the lowest and highest or,
    of a distance from a base, the standard error."""
    keys = ["method"]
    keys += [name for name in CASE[1:] if len({row.get(name) for row in rows}) > 1]
    seeded = any(row.get("seed") for row in rows)
    cases = defaultdict(list)
    for row in in_order(rows):
        cases[values(row, CASE)].append(row)

    lines = []
    for group in cases.values():
        cells = {name: case_cell(group[0], name) for name in keys}
        for name in columns:
            other = "{:.4f}" if "/" in name else "{:g}"  # the loss with a setting, or Gbit/s
            heading, form, factor = FORMATS.get(name, (name, other, 1))
            found = [factor * row[name] for row in group if name in row]
            if name in DISTANCES:
                cells[f"{heading} (standard error)"] = mean_and_error(found, form)
            else:
                cells[heading] = mean_and_range(found, form)
        if seeded:
            cells["seeds"] = str(len(group))
        lines.append(cells.values())
    lines = [cells, ["---"] * len(cells), *lines]  # the headings are the keys of all cells
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grid(rows) -> list:
    """Rows with the loss of each setting as a column of its name."""
    lines = defaultdict(dict)
    for row in rows:
        case = {name: row.get(name) for name in CASE if name != "setting"}
        lines[tuple(case.values())] |= case | {row["setting"]: row["val_loss"]}
    return list(lines.values())


def case_cell(row, name) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if value in METHODS:
        return METHODS[value][0]
    return str(value)


def mean_and_range(found, form) -> str:
    if not found:
        return ""
    low = form.format(min(found))
    high = form.format(max(found))
    if low == high:
        return low
    return f"{form.format(statistics.mean(found))} ({low} .. {high})"


def mean_and_error(found, form) -> str:
    if not found:
        return ""
    mean = form.format(statistics.mean(found))
    if len(found) == 1:
        return mean
    return f"{mean} ({standard_error(found):.1%})"


def standard_error(found) -> float:
    """Of the mean."""
    return statistics.stdev(found) / math.sqrt(len(found))
