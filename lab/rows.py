"""Runs: their records, their settings, and the lines of a table that they form.

    read_run("out/edit")["val_loss"]    # of each evaluation
    runs, notes = read_runs(["out/edit", "lab/results/tau.csv"])
    columns, _ = find_columns(runs)
    find_lines(runs, columns)           # values of the columns -> runs that differ in their seed
"""

import csv
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from config import Config, UserError

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
CURVES = ("step", "tokens", "train_s", "sync_bytes")  # columns of the evaluations
RESULTS = ("val_loss", "sync_bytes", "local_bytes", "train_s", "tokens_per_s", "step_ms", "steps")
RESULTS += ("bits_per_byte", "cosine")
# Flags of a start, of its files and of its log: runs that differ in them are alike. The others are
# what the record says beside the flags; the flags say the same.
NO_SETTING = {"event", "step", "seed", "out_dir", "resume", "overwrite", "dry_run"}
NO_SETTING |= {"save_on_exit", "checkpoint_interval", "keep", "timeline", "timeout_s"}
NO_SETTING |= {"log_interval", "eval_interval"}
NO_SETTING |= {"world_size", "mesh", "micro_steps", "micro_batch", "n_params"}


# ---- records ----


def read_run(folder) -> dict:
    """The record of a run: its folder, config and method; `steps`, `syncs`, `evals` and `resumes`,
    the lists of these rows; a list per column of the evaluations; `rounds`, the steps of each
    replica in each; `end`, that row if the run has finished, else None; `diverged`, whether
    lab.sweep saw it diverge. A val_loss that is not finite is None. Raises UserError for a file
    that is not a record."""
    path = Path(folder, "metrics.jsonl")
    rows = defaultdict(list)
    text = path.read_text()
    if not text.endswith("\n"):  # the last line is being written, or was cut off
        text = text[: text.rfind("\n") + 1]
    try:
        for line in text.splitlines():
            row = json.loads(line)
            rows[row["event"]].append(row)
        config = rows["config"][0]
        record = {"folder": folder, "config": config, "method": config["method"]}
        for name in (*CURVES, "val_loss"):
            record[name] = [row[name] for row in rows["eval"]]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is not the record of a run ({error!r})") from None

    record["steps"] = rows["step"]
    record["syncs"] = rows["sync"]
    record["evals"] = rows["eval"]
    record["resumes"] = rows["resume"]
    record["rounds"] = [row["steps"] for row in rows["sync"]]
    exits = {row.get("exit"): row for row in rows["end"]}
    record["end"] = exits.get("done")
    record["diverged"] = "diverged" in exits
    return record


def by_method(rows) -> list:
    """Rows in the order of METHODS, and then the reader's own methods."""
    order = [*METHODS, *(row["method"] for row in rows)]
    return sorted(rows, key=lambda row: order.index(row["method"]))


# ---- runs ----


@dataclass(eq=False)
class Run:
    """A run that has ended. flags: what may be a column; results: the RESULTS that are known;
    curve: x and val_loss of each evaluation, lists by name."""

    folder: str
    flags: dict
    seed: int
    results: dict
    curve: dict
    over: float | None = None  # how much higher the loss is than that of the base, as a share
    why: str = ""  # why there is none; "base" if the run is one

    @property
    def loss(self):
        """The last one; inf if the run has diverged, NaN if a CSV file lacks it."""
        return self.results.get("val_loss", math.nan)

    def values(self, names) -> tuple:
        return tuple(self.flags.get(name) for name in names)


def read_runs(folders) -> tuple:
    """(the runs that have ended, notes on what was left out). Raises UserError for a folder that is
    no run."""
    runs = []
    notes = []
    for folder in folders:
        if str(folder).endswith(".csv"):
            runs += read_csv(folder)
            continue
        if Path(folder, "command.txt").exists() and not Path(folder, "metrics.jsonl").exists():
            notes.append(f"{folder}: has not begun, left out")  # a run of lab.sweep
            continue
        record = read_run(folder)
        if not record["end"] and not record["diverged"]:
            step = max((row["step"] for row in record["steps"]), default=0)
            notes.append(f"{folder}: not finished (step {step}), left out")
            continue
        config = [record["config"], *record["resumes"]][-1]
        results = results_of(record, config)
        curve = {name: record[name] for name in (*CURVES, "val_loss")}
        runs.append(Run(str(folder), settings(config), config["seed"], results, curve))
    if not runs:
        raise UserError("; ".join([*notes, "there is no finished run to compare"]))
    return runs, notes


def results_of(record, config) -> dict:
    if record["diverged"]:
        return {"val_loss": math.inf}
    end = record["end"]
    last = record["evals"][-1]
    logged = record["steps"]
    found = {"val_loss": end["val_loss"], "train_s": end.get("train_s"), "steps": end["step"]}
    found["sync_bytes"] = last["sync_bytes"]
    found["bits_per_byte"] = last.get("bits_per_byte")
    times = [row["step_ms"] for row in logged[2:]]  # the first ones are slower
    if times:
        found["step_ms"] = statistics.median(times)
    warmup = config.get("sync_warmup_steps", 0)  # minibatch has none
    later = [row for row in logged if row["step"] >= warmup]
    if later and "sync_warmup_steps" in config:
        # All steps of the warm-up send alike. The first row is that of one step.
        found["local_bytes"] = last["sync_bytes"] - warmup * logged[0]["sync_bytes"]
    if later and last["train_s"] > later[0]["train_s"]:
        seconds = last["train_s"] - later[0]["train_s"]
        found["tokens_per_s"] = (last["tokens"] - later[0]["tokens"]) / seconds
    cosines = [row["cosine"] for row in record["syncs"] if row.get("cosine") is not None]
    if cosines:
        found["cosine"] = statistics.fmean(cosines)
    return {name: value for name, value in found.items() if value is not None}


def read_csv(path) -> list:
    """The runs of a file of write_csv(). An empty cell, or NaN, is not known. Raises UserError for
    another file."""
    runs = []
    try:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                written = {name: text for name, text in row.items() if text not in ("", "nan")}
                flags = {name: number_or_text(text) for name, text in written.items()}
                folder = flags.pop("folder")
                seed = flags.pop("seed")
                flags.pop("over_base", None)
                results = {name: float(flags.pop(name)) for name in RESULTS if name in flags}
                curve = {name: [results.get(name)] for name in (*CURVES, "val_loss")}
                curve["step"] = [results.get("steps")]
                flags["method"], row["val_loss"]  # are there
                runs.append(Run(folder, flags, seed, results, curve))
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file of lab.table ({error!r})") from None
    return runs


def number_or_text(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def settings(config: dict) -> dict:
    """The flags that may be columns, as name -> a number or a text."""
    flags = {name: plain_value(config[name]) for name in config.keys() - NO_SETTING}
    if "mesh" in config:  # --replicas 0 means: as many as there are
        flags["replicas"] = config["mesh"]["replicas"]
    order = [*Config.__dataclass_fields__, *config]
    return {name: flags[name] for name in dict.fromkeys(order) if name in flags}


def plain_value(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, dict)):
        value = " ".join(map(str, value))
    return "none" if value == "" else value


def cut(run, step):
    """Make the run end at its last evaluation up to this step. Raises UserError if it has none."""
    count = sum(at is not None and at <= step for at in run.curve["step"])
    if count == 0:
        raise UserError(f"--at {step}: {run.folder} has no evaluation up to this step")
    run.curve = {name: column[:count] for name, column in run.curve.items()}
    last = {name: column[-1] for name, column in run.curve.items()}
    last["steps"] = last.pop("step")
    run.results = {name: last[name] for name in RESULTS if last.get(name) is not None}


def write_csv(path, runs, names):
    names = ["method", *(name for name in names if name != "method")]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["folder", *names, "seed", *RESULTS, "over_base"])
        for run in runs:
            found = [run.results.get(name) for name in RESULTS]
            writer.writerow([run.folder, *run.values(names), run.seed, *found, run.over])


# ---- columns and lines ----


def find_columns(runs, without=()) -> tuple:
    """(the columns; flag -> the column that it follows). A flag is a column if runs that have it
    differ in it, and if no earlier column tells its value. without: no flags to look at."""
    names = list(dict.fromkeys(name for run in runs for name in run.flags))
    hashes = {run.flags.get("corpus_hash") for run in runs}
    columns = []
    followers = {}
    for name in names:
        if name in without or len({run.flags[name] for run in runs if name in run.flags}) < 2:
            continue
        if name == "data" and len(hashes) == 1:  # one corpus in two places
            continue
        leader = next((column for column in columns if tells(runs, column, name)), None)
        if leader:
            followers[name] = leader
        else:
            columns.append(name)
    return columns, followers


def tells(runs, column, name) -> bool:
    """Does each value of the column go with one value of the other flag?"""
    pairs = {run.values([column, name]) for run in runs}
    return len(pairs) == len({run.flags.get(column) for run in runs})


def in_order(value) -> tuple:
    """A key that sorts the values of a flag: methods as in all tables, numbers by size."""
    if value is None:
        return 0, 0, ""
    if isinstance(value, (int, float)):
        return 1, value, ""
    if value in METHODS:
        return 2, list(METHODS).index(value), ""
    return 3, 0, value


def find_lines(runs, columns) -> dict:
    """Values of the columns -> their runs, by seed."""
    lines = defaultdict(list)
    for run in sorted(runs, key=lambda run: in_order(run.seed)):
        lines[run.values(columns)].append(run)
    keys = sorted(lines, key=lambda values: [in_order(value) for value in values])
    return {values: lines[values] for values in keys}


def label(names, values) -> str:
    parts = []
    for name, value in zip(names, values):
        if value is not None:
            parts.append(str(value) if name == "method" else f"{name} {value}")
    return ", ".join(parts) or "all runs"
