"""Records of runs, and how methods are named and drawn.

    read_run("out/edit")["val_loss"]    # of each evaluation
"""

import json
from collections import defaultdict
from pathlib import Path

from config import UserError

GRAY = "#808080"
METHODS = {  # in the order of all tables and pictures: name, color, marker and line
    "minibatch": ("averaged gradients", GRAY, "s-"),
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
    "one_bit_edit": ("EDiT in 1 bit", "#0072b2", "*-"),
    "sparse_loco": ("SparseLoCo", "#66a61e", "X-"),
    "top_k": ("top-k", "#66a61e", "p--"),
    "eager": ("eager", "#cc79a7", "h--"),
    "robust": ("Robust DiLoCo", "#999933", "d-"),
}
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
        text = path.read_text()
        if not text.endswith(("\n", "}")):  # the last line is being written, or was cut off
            text = text[: text.rfind("\n") + 1]
        for line in text.splitlines():
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
