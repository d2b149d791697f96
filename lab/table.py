"""Runs side by side: means, standard errors, paired distances, a picture.

    python -m lab.table out/diloco out/edit
    python -m lab.table out/sweep/tau/*/ --base method=minibatch --x sync_bytes --out tau
    python -m lab.table lab/results/tau.csv --base method=minibatch --show local_bytes

The folders are those of any runs that have a metrics.jsonl. A CSV file that an earlier call has
written stands for its runs, with their last loss alone. Where it has none, the loss is an empty
cell, and counts in no mean and no distance. The columns are the flags in which the runs differ, so
runs of unlike settings never share a line. A flag that only follows another one (each --model has
its own n_layer) is named below the table. Runs that differ in nothing but their seed are one line:
the mean of their last validation loss +- its standard error,

    s / sqrt(n),  s^2 = sum_i (x_i - mean)^2 / (n - 1)

The distance to the base is how much higher the loss is, as a share. It is computed run by run and
then averaged over the seeds. The base of a run has the flags of --base, and the run's own value of
every other column, also its seed. A flag that one of the two methods lacks is no difference. A run
without a base, or with several, has no distance. Without --base, it is the first value of the first
column.

An effect is what one flag does, together with the flags that follow it and change with it (`tau,
with outer_lr`), everything else equal: the same pairs, averaged over the settings of the other
flags, for each seed. Only the seeds count that all these settings have. Marks: * the mean is at
least two standard errors from 0; ? one seed only, so nobody knows the error.

--at STEP compares the runs at their last evaluation up to this step, not at their ends. --only
leaves out all other runs. --show adds columns: local_bytes (sent after the warm-up), train_s,
tokens_per_s (after the warm-up), step_ms (the median of the logged ones, without the first two).

--out NAME writes NAME.md, NAME.csv (a line per run: pandas.read_csv reads it) and NAME.svg: the
losses over tokens; over the first flag with numbers if the runs have one evaluation each; or over
--x, one of step, tokens, train_s, sync_bytes or a flag: numbers, or a switch, yes and no. Where
--base is given and a run is one point, the picture shows distances, as the table does: they scatter
less than losses, because seeds are paired. A name in the picture leaves out switches that are on.
"""

import csv
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from config import Config, Parser, UserError, run_command
from lab import plot
from lab.rows import METHODS, read_run

# Flags of a start, of its files and of its log: runs that differ in them are alike. The others are
# what the record says beside the flags; the flags say the same.
NO_SETTING = {"event", "step", "seed", "out_dir", "resume", "overwrite", "dry_run"}
NO_SETTING |= {"save_on_exit", "checkpoint_interval", "keep", "timeline", "timeout_s"}
NO_SETTING |= {"log_interval", "eval_interval"}
NO_SETTING |= {"world_size", "mesh", "micro_steps", "micro_batch", "n_params"}
SWITCH = {"no": 0, "yes": 1}  # a switch on the x axis
CURVES = ("step", "tokens", "train_s", "sync_bytes")  # what --x may be beside a flag
RESULTS = ("val_loss", "sync_bytes", "local_bytes", "train_s", "tokens_per_s", "step_ms", "steps")
SHOWN = {  # what --show may name -> heading, factor
    "local_bytes": ("MB sent after the warm-up", 1e-6),
    "train_s": ("seconds", 1),
    "tokens_per_s": ("tokens per second", 1),
    "step_ms": ("ms a step", 1),
}


@dataclass(eq=False)
class Run:
    """A finished run. flags: what may be a column; results: the RESULTS that are known; curve: x
    and val_loss of each evaluation, lists by name."""

    folder: str
    flags: dict
    seed: int
    results: dict
    curve: dict
    base: object = None  # the run with which it is compared

    @property
    def known(self) -> bool:
        """Is the loss known? A CSV file may lack it."""
        return "val_loss" in self.results

    @property
    def loss(self):
        """The last one, or NaN."""
        return self.results.get("val_loss", math.nan)

    @property
    def over(self):
        """How much higher the loss is than that of the base, as a share. None without a base, or
        without one of the losses."""
        if self.base and self.known and self.base.known:
            return self.loss / self.base.loss - 1
        return None

    def values(self, names) -> tuple:
        return tuple(self.flags.get(name) for name in names)


# ---- reading ----


def read_runs(folders) -> tuple:
    """(the finished runs, notes on what was left out). Raises UserError for a folder that is no
    run."""
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
        end = record["end"]
        if not end:
            steps = [row["step"] for row in record["steps"]]
            done = f"step {max(steps, default=0)} of {record['config'].get('max_steps', '?')}"
            notes.append(f"{folder}: not finished ({done}), left out")
        elif not isinstance(end.get("val_loss"), (int, float)):
            notes.append(f"{folder}: its last loss is not finite, left out")
        else:
            notes += changes_on_the_way(record)
            config = [record["config"], *record["resumes"]][-1]
            flags = settings(config)
            seed = config.get("seed")
            curve = {name: record[name] for name in (*CURVES, "val_loss")}
            runs.append(Run(str(folder), flags, seed, results_of(record, config), curve))
    if not runs:
        raise UserError("; ".join([*notes, "there is no finished run to compare"]))
    return runs, notes


def results_of(record, config) -> dict:
    end = record["end"]
    found = {"val_loss": end["val_loss"], "train_s": end.get("train_s"), "steps": end.get("step")}
    logged = record["steps"]
    times = [row["step_ms"] for row in logged[2:] if "step_ms" in row]  # the first ones are slower
    if times:
        found["step_ms"] = statistics.median(times)
    if record["evals"]:
        last = record["evals"][-1]
        found["sync_bytes"] = last["sync_bytes"]
        warmup = config.get("sync_warmup_steps", 0)  # minibatch has none
        later = [row for row in logged if row["step"] >= warmup]
        if "sync_warmup_steps" in config and later:
            # All steps of the warm-up send alike. The first row is that of one step.
            found["local_bytes"] = last["sync_bytes"] - warmup * logged[0]["sync_bytes"]
        if later and last["train_s"] > later[0]["train_s"]:
            seconds = last["train_s"] - later[0]["train_s"]
            found["tokens_per_s"] = (last["tokens"] - later[0]["tokens"]) / seconds
    return found


def read_csv(path) -> list:
    """The runs of a file of write_csv(). An empty cell, or NaN, is not known. Raises UserError for
    another file."""
    runs = []
    try:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                written = {name: text for name, text in row.items() if text and text != "nan"}
                known = {name: number_or_text(text) for name, text in written.items()}
                folder = known.pop("folder")
                seed = known.pop("seed")
                known.pop("over_base", None)
                results = {name: known.pop(name) for name in RESULTS if name in known}
                curve = {name: [results.get(name)] for name in ("val_loss", *CURVES)}
                curve["step"] = [results.get("steps")]
                known["method"], row["val_loss"]  # are there
                float(results.get("val_loss", math.nan))  # is a number
                runs.append(Run(folder, known, seed, results, curve))
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
    """The flags that may be columns, as name -> a number, a text or None."""
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


def changes_on_the_way(record) -> list:
    """Notes on a run that was resumed with other flags. The last ones stand in the table."""
    notes = []
    before = settings(record["config"])
    for row in record["resumes"]:
        after = settings(row)
        for name in before:
            if after.get(name) != before[name] and name != "data":
                change = f"{name} {before[name]} -> {after.get(name)}"
                notes.append(f"{record['folder']}: resumed at step {row['step']} with {change}")
        before = after
    return notes


def without_repetitions(runs, columns, notes) -> list:
    """Runs that differ in nothing are no independent ones: the first counts."""
    kept = {}
    for run in runs:
        key = run.values(columns), run.seed
        if key in kept:
            notes.append(f"{run.folder}: repeats {kept[key].folder}, left out")
        else:
            kept[key] = run
    return list(kept.values())


# ---- columns and lines ----


def find_columns(runs) -> tuple:
    """(the columns; flag -> the column that it follows). A flag is a column if runs that have it
    differ in it, and if no earlier column tells its value."""
    names = list(dict.fromkeys(name for run in runs for name in run.flags))
    hashes = {run.flags.get("corpus_hash") for run in runs}
    columns = []
    followers = {}
    for name in names:
        if len({run.flags[name] for run in runs if name in run.flags}) < 2:
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
    found = defaultdict(set)
    for run in runs:
        found[run.flags.get(column)].add(run.flags.get(name))
    return all(len(others) == 1 for others in found.values())


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


# ---- pairs ----


def partners(run, others, same) -> list:
    """Those of the others that have the run's seed and its values of the flags `same`."""
    found = []
    for other in others:
        if other.seed == run.seed and not differences(run.flags, other.flags, same):
            found.append(other)
    return found


def differences(flags, others, names) -> list:
    """The names of which the two have unlike values. One that either lacks is no difference."""
    common = [name for name in names if name in flags and name in others]
    return [name for name in common if flags[name] != others[name]]


def read_base(words, runs, columns) -> dict:
    """--base FLAG=VALUE ... as flag -> value, or the first value of the first column."""
    if not words and columns:
        first = {run.flags.get(columns[0]) for run in runs} - {None}
        return {columns[0]: min(first, key=in_order)}
    return check_base(words, [run.flags for run in runs])


def check_base(words, known, option="--base") -> dict:
    """The words FLAG=VALUE of an option as flag -> value. Raises UserError if no run has it. known:
    the flags of the runs."""
    base = {}
    for word in words:
        name, equals, text = word.partition("=")
        values = {flags[name] for flags in known if name in flags}
        found = [value for value in values if matches(value, text)]
        if not equals:
            raise UserError(f"{option} {word}: write FLAG=VALUE, as in method=minibatch")
        if not found:
            choices = ", ".join(map(str, sorted(values, key=in_order))) or "no such flag"
            raise UserError(f"{option} {word}: no run has it; there is: {choices}")
        if name in base:
            raise UserError(f"{option} {word}: {name} has a value already; give each flag one")
        base[name] = found[0]
    if base and not any(base.items() <= flags.items() for flags in known):
        raise UserError(f"{option} {' '.join(words)}: no run has all of these")
    return base


def matches(value, text) -> bool:
    try:
        return text == str(value) or float(text) == value
    except ValueError:
        return False


def set_bases(runs, base, columns, followers) -> list:
    """Give each run its base. Returns notes on those that have none, or several."""
    if not base:
        return []
    excused = {followers.get(name, name) for name in base}
    same = [name for name in columns if name not in excused]
    bases = [run for run in runs if base.items() <= run.flags.items()]
    lacking = defaultdict(list)
    for run in runs:
        found = [run] if run in bases else partners(run, bases, same)
        if len(found) == 1:
            run.base = found[0]
        else:
            reason = "several bases fit" if found else "no base"
            lacking[f"{label(columns, run.values(columns))}: {reason}"].append(run.seed)
    return [f"{text}, seed {', '.join(map(str, seeds))}" for text, seeds in lacking.items()]


def cut(run, step):
    """Make the run end at its last evaluation up to this step. Raises UserError if it has none."""
    count = sum(at is not None and at <= step for at in run.curve["step"])
    if count == 0:
        raise UserError(f"--at {step}: {run.folder} has no evaluation up to this step")
    for name, column in run.curve.items():
        run.curve[name] = column[:count]
    last = {name: column[-1] for name, column in run.curve.items()}
    names = {"steps": "step"} | {name: name for name in ("val_loss", "sync_bytes", "train_s")}
    run.results = {name: last[column] for name, column in names.items() if last[column] is not None}


# ---- statistics ----


def standard_error(found) -> float:
    """That of the mean of n >= 2 numbers."""
    return statistics.stdev(found) / math.sqrt(len(found))


def describe_mean(found, form) -> str:
    text = form.format(statistics.mean(found))
    if len(found) > 1:
        text += f" +- {form.format(standard_error(found)).lstrip('+')}"
    return text


def describe_distance(found) -> str:
    """The mean of distances, with its mark."""
    text = describe_mean(found, "{:+.2%}")
    if len(found) == 1:
        return f"{text} ?"
    mean = statistics.mean(found)
    if mean != 0 and abs(mean) >= 2 * standard_error(found):
        return f"{text} *"
    return text


@dataclass
class Effect:
    """What a flag's value does to the loss, compared with another value of it."""

    name: str
    along: list  # names of the flags that change with it
    value: object
    first: object
    by_seed: dict  # seed -> mean distance over the settings of the other flags
    settings: int  # that count
    notes: list


def find_effect(runs, columns, followers, name, value, first) -> Effect:
    flags = {run.flags.get(name): run.flags for run in runs}  # its value tells its followers'
    own = [follower for follower, leader in followers.items() if leader == name]
    along = differences(flags[value], flags[first], own)

    runs = [run for run in runs if run.known]
    others = [column for column in columns if column != name]
    bases = [run for run in runs if run.flags.get(name) == first]
    cells = defaultdict(dict)  # setting of the other flags -> seed -> distance
    several = set()  # settings with a run that has several partners
    for run in runs:
        if run.flags.get(name) == value:
            found = partners(run, bases, others)
            setting = run.values(others)
            cell = cells[setting]
            if len(found) == 1:
                cell[run.seed] = run.loss / found[0].loss - 1
            elif found:
                several.add(setting)

    title = f"effect of {name} {value} over {first}"
    lacking = defaultdict(list)  # reason -> settings
    for setting, cell in cells.items():
        if not cell:
            reason = "several fit" if setting in several else "no pair"
            lacking[reason].append(label(others, setting))
    notes = []
    if lacking:
        reasons = [count_settings(reason, found) for reason, found in lacking.items()]
        notes.append(f"{title}: {'; '.join(reasons)}")

    paired = [cell for cell in cells.values() if cell]
    if not paired:
        return Effect(name, along, value, first, {}, 0, notes)
    common = set.intersection(*map(set, paired))
    some = set.union(*map(set, paired))
    if some - common:
        seeds = ", ".join(map(str, sorted(some - common)))
        notes.append(f"{title}: without seed {seeds}, which not all settings have")
    by_seed = {s: statistics.mean(cell[s] for cell in paired) for s in sorted(common)}
    return Effect(name, along, value, first, by_seed, len(paired), notes)


def count_settings(reason, labels) -> str:
    if len(labels) == 1:
        return f"{reason} for {labels[0]}"
    return f"{reason} in {len(labels)} settings, for example {labels[0]}"


def find_effects(runs, columns, followers, base) -> list:
    """The effect of each value of each column over the base's value, or over the first one."""
    found = []
    for name in columns:
        values = sorted({run.flags[name] for run in runs if name in run.flags}, key=in_order)
        first = base.get(name, values[0])
        for value in values:
            if value != first:
                found.append(find_effect(runs, columns, followers, name, value, first))
    return found


# ---- output ----


def markdown(lines) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rest])


def result_lines(lines, columns, base, shown=()) -> list:
    """The cells of the table. base: flag -> value; shown: of SHOWN."""
    over = f"over {label(base, base.values())}"
    head = [*columns, "validation loss", "MB sent"]
    head += [SHOWN[name][0] for name in shown] + ["seeds"]
    if base:
        head += [over, "n"]
    table = [head]
    for values, runs in lines.items():
        cells = ["" if value is None else str(value) for value in values]
        losses = [run.loss for run in runs if run.known]
        cells.append(describe_mean(losses, "{:.4f}") if losses else "")
        cells.append(mean_cell(runs, "sync_bytes", 1e-6))
        cells += [mean_cell(runs, name, SHOWN[name][1]) for name in shown]
        cells.append(str(len(runs)))
        found = [run.over for run in runs if run.over is not None]
        if base and all(run.base is run for run in runs):
            cells += ["base", ""]
        elif base:
            cells += [describe_distance(found) if found else "", str(len(found))]
        table.append(cells)
    return table


def mean_cell(runs, name, factor) -> str:
    found = [run.results[name] for run in runs if run.results.get(name) is not None]
    if not found:
        return ""
    mean = factor * statistics.mean(found)
    return f"{mean:,.1f}" if mean < 1000 or name.endswith("bytes") else f"{mean:,.0f}"


def effect_lines(effects) -> list:
    table = [["flag", "value", "over", "effect on the loss", "seeds", "settings"]]
    for effect in effects:
        if effect.by_seed:
            names = effect.name
            if effect.along:
                names += f", with {', '.join(effect.along)}"
            cells = [names, effect.value, effect.first]
            cells.append(describe_distance(list(effect.by_seed.values())))
            table.append([*map(str, cells), str(len(effect.by_seed)), str(effect.settings)])
    return table


def notes_on_seeds(lines, columns) -> list:
    every = {run.seed for runs in lines.values() for run in runs if run.known}
    notes = []
    for values, runs in lines.items():
        known = {run.seed for run in runs if run.known}
        lacking = every - known
        if known and lacking:
            seeds = ", ".join(map(str, sorted(lacking, key=in_order)))
            notes.append(f"{label(columns, values)}: its mean is without seed {seeds}")
    return notes


def notes_on_followers(runs, followers) -> list:
    notes = []
    for name, leader in followers.items():
        pairs = {run.flags.get(leader): run.flags.get(name) for run in runs}
        shown = [f"{a}: {pairs[a]}" for a in sorted(pairs, key=in_order) if pairs[a] is not None]
        notes.append(f"{name} follows {leader} ({', '.join(shown)})")
    return notes


MARKS = "`*`: at least two standard errors from 0. `?`: one seed only. +-: the standard error."


def page(runs, base_words, notes, shown=()) -> tuple:
    """(text, the runs that count, columns, names of all flags that differ). Gives the runs their
    bases. Adds to the notes."""
    columns, followers = find_columns(runs)
    runs = without_repetitions(runs, columns, notes)
    base = read_base(base_words, runs, columns)
    if not any(run.known for run in runs):
        base = {}
        notes.append("no run has a known loss, so there are no distances")
    lines = find_lines(runs, columns)
    notes += set_bases(runs, base, columns, followers) + notes_on_seeds(lines, columns)
    parts = [markdown(result_lines(lines, columns, base, shown))]
    effects = find_effects(runs, columns, followers, base)
    if any(effect.by_seed for effect in effects):
        parts.append("Each flag, with those that follow it, everything else equal:")
        parts.append(markdown(effect_lines(effects)))
    parts.append(MARKS)
    for effect in effects:
        notes += effect.notes
    notes += notes_on_followers(runs, followers)
    parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join(parts), runs, columns, [*columns, *followers]


def write_csv(path, runs, names):
    names = ["method", *(name for name in names if name != "method")]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["folder", *names, "seed", *RESULTS, "over_base"])
        for run in runs:
            found = [run.results.get(name) for name in RESULTS]
            writer.writerow([run.folder, *run.values(names), run.seed, *found, run.over])


def check_x(x, known):
    """Raise UserError unless x is a column of the evaluations, or a flag that is a number or a
    switch. known: the flags of the runs."""
    if not x or x in CURVES:
        return
    found = {flags[x] for flags in known if x in flags}
    numbers = found and all(isinstance(value, (int, float)) for value in found)
    if not numbers and found != SWITCH.keys():
        raise UserError(
            f"--x {x}: it must be one of {', '.join(CURVES)}, or a flag whose values are numbers"
        )


def single(runs) -> bool:
    """Has each run one evaluation?"""
    return all(len(run.curve["val_loss"]) == 1 for run in runs)


def default_x(runs, columns) -> str:
    """Curves over tokens. One evaluation is no curve: then the losses over the first number."""
    if not single(runs):
        return "tokens"
    for name in columns:
        if all(isinstance(run.flags.get(name, 0), (int, float)) for run in runs):
            return name
    return "sync_bytes"


def curves(runs, columns, x, y="val_loss") -> list:
    """Rows of lab.plot. The runs of a line have the same x at the same evaluation: their mean. A
    line's name says in what it differs from the other lines of its method. y: val_loss, or `over`,
    the distances in percent, of runs that have a base and are one point each."""
    columns_of = {}
    for run in runs:
        method = run.flags["method"]
        if method not in columns_of:
            alike = [other for other in runs if other.flags["method"] == method]
            columns_of[method] = [name for name in find_columns(alike)[0] if name != x]
    rows = []
    for found in find_lines(runs, columns).values():
        method = found[0].flags["method"]
        names = columns_of[method]
        variant = short_label(names, found[0].values(names))
        if x not in CURVES:
            points = [[SWITCH.get(run.flags.get(x), run.flags.get(x))] for run in found]
            losses = [[run.loss] for run in found]
        elif any(None in run.curve[x] for run in found):  # a CSV file may lack it
            continue
        else:
            count = min(len(run.curve[x]) for run in found)
            columns_of_x = [run.curve[x][:count] for run in found]
            points = [[statistics.mean(at) for at in zip(*columns_of_x)]] * len(found)
            losses = [run.curve["val_loss"][:count] for run in found]
        if y == "over":
            losses = [[100 * run.over] for run in found]
        for at, loss in zip(points, losses):
            if at and at[0] is not None:  # a method may lack the flag
                loss = [math.nan if value is None else value for value in loss]
                rows.append({"method": method, "variant": variant, x: at, y: loss})
    return rows


def short_label(names, values) -> str:
    """Without the flags that are off, and without those that are switched on, as most defaults."""
    parts = []
    for name, value in zip(names, values):
        if value == "no":
            parts.append(f"no {name}")
        elif value not in (None, "none", "yes"):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def draw(runs, columns, x, first, base_words, path) -> str:
    """Write the picture, from x = first on. Returns the line that says so."""
    runs = [run for run in runs if run.known]
    if not runs:
        return "picture none: no run has a known loss"
    y = "val_loss"
    ylabel = plot.Panel.ylabel
    if base_words and (x not in CURVES or single(runs)):
        runs = [run for run in runs if run.over is not None]
        if not runs:
            return "picture none: no run has a base with a known loss"
        y = "over"
        words = [word.removeprefix("method=") for word in base_words]
        words = [METHODS.get(word, [word])[0] for word in words]
        ylabel = f"loss over {', '.join(words)}, in %"
    try:
        rows = curves(runs, columns, x, y)
        if not rows:
            return f"picture none: no run has {x}"
        points = [row[x][0] for row in rows if len(row[x]) == 1]
        far_apart = points and 0 < 10 * min(points) < max(points)
        xlabel = plot.AXES.get(x, x)
        panel = plot.Panel(x, y, xlabel, ylabel, log=bool(far_apart), first=first)
        if any(run.flags.get(x) in SWITCH for run in runs):
            panel.ticks = SWITCH
        plot.draw(rows, [panel], path)
    except ModuleNotFoundError as error:
        return f"picture none: pip install {error.name}"
    return f"picture {path}"


def read_command(argv: list):
    parser = Parser(prog="python -m lab.table", description="Compare runs.", allow_abbrev=False)
    parser.add_argument(
        "runs", nargs="+", metavar="FOLDER", help="a run's out_dir, or a CSV file of such a table"
    )
    parser.add_argument(
        "--base", nargs="+", action="extend", default=[], metavar="FLAG=VALUE",
        help="the runs to compare with",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="FLAG=VALUE",
        help="only the runs with these flags",
    )  # fmt: skip
    parser.add_argument("--at", type=int, metavar="STEP", help="compare at this step")
    parser.add_argument("--x", help=f"of the picture: {', '.join(CURVES)}, or a flag")
    parser.add_argument("--first", type=float, default=-math.inf, help="draw only from this x on")
    parser.add_argument("--show", nargs="+", default=[], choices=list(SHOWN), help="more columns")
    parser.add_argument("--out", help="write OUT.md, OUT.csv and OUT.svg")
    return parser.parse_args(argv)


def main(argv: list):
    args = read_command(argv)
    runs, notes = read_runs(args.runs)
    only = check_base(args.only, [run.flags for run in runs], "--only")
    runs = [run for run in runs if only.items() <= run.flags.items()]
    for run in runs if args.at is not None else ():
        cut(run, args.at)
    check_x(args.x, [run.flags for run in runs])
    text, runs, columns, names = page(runs, args.base, notes, args.show)
    print(text)
    if args.out:
        write(args, text, runs, columns, names)


def write(args, text, runs, columns, names):
    name = args.out
    x = args.x or default_x(runs, columns)
    name = name.removesuffix(".md").removesuffix(".csv").removesuffix(".svg")
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{name}.md").write_text(f"{text}\n")
    write_csv(f"{name}.csv", runs, names)
    print(f"\ntable   {name}.md, {name}.csv")
    print(draw(runs, columns, x, args.first, args.base, f"{name}.svg"))


if __name__ == "__main__":
    run_command("table.py", lambda: main(sys.argv[1:]))
