"""Runs side by side: means, 95% intervals, paired distances, a picture.

    python -m lab.table out/diloco out/edit
    python -m lab.table out/sweep/tau/*/ --base method=minibatch --x sync_bytes --out tau
    python -m lab.table lab/results/tau.csv --base method=minibatch --show local_bytes

A run is a folder with a metrics.jsonl, or a line of a CSV file that an earlier call has written.
The columns are the flags in which the runs differ. A flag that only follows an earlier column is
named below the table. Runs that differ in nothing but their seed are one line: the mean of their
last validation loss. A seed that diverged is in no mean, and the line says so.

The distance to the base is how much higher the loss is, as a share, with the same seed and the same
values of all other columns. (A flag that one of the two methods lacks is no difference.) Then it is
averaged over the seeds. --base names flags of the base; without it, it is the first value of the
first column. Losses on two texts have no distance.

Behind +- stands half of a 95% interval, t s / sqrt(n). Few seeds say little about their own
scatter, so all lines of the table share one standard deviation s:

    s^2 = sum over lines, sum over seeds (x - mean of the line)^2 / df
    df  = sum over lines (n - 1)

and t is Student's for df. Losses have one s, distances another. A line with one seed has no
interval.

--at STEP compares the runs at their last evaluation up to this step. --only leaves out all other
runs. --show adds columns: local_bytes (sent after the warm-up), train_s, tokens_per_s (after the
warm-up), step_ms (the median of the logged ones), bits_per_byte (for unlike tokenizers), cosine
(--plain: between the mean pseudo-gradients of successive rounds, its mean over the rounds).

--out NAME writes NAME.md, NAME.csv (a line per run: pandas.read_csv reads it; a loss of inf means
diverged) and NAME.svg: the losses over tokens, or over --x, one of step, tokens, train_s,
sync_bytes, a flag, or gain = lr (1 + mu / (1 - mu rho)), by which an outer step with lr and
momentum mu multiplies the moves of rounds. rho is their cosine, and 1 where a run does not know it.
If the runs have one evaluation each, it is over the first flag with numbers. Where --base is given
and a run is one point, it shows distances: they scatter less.

A run alone, in pandas:

    import pandas
    rows = pandas.read_json("out/edit/metrics.jsonl", lines=True)
    rows[rows.event == "eval"].plot("step", "val_loss")
"""

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from config import Parser, UserError, run_command
from lab import plot
from lab.rows import CURVES, cut, find_columns, find_lines, in_order, label, number_or_text
from lab.rows import read_runs, write_csv

SHOWN = {  # what --show may name -> heading, form
    "local_bytes": ("MB sent after the warm-up", "{:,.1f}"),
    "train_s": ("seconds", "{:,.1f}"),
    "tokens_per_s": ("tokens per second", "{:,.0f}"),
    "step_ms": ("ms a step", "{:,.1f}"),
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "cosine": ("cosine of successive means", "{:.2f}"),
}


# ---- distances ----


def read_base(words, runs, columns) -> dict:
    """--base FLAG=VALUE ... as flag -> value, or the first value of the first column."""
    if not words and columns:
        first = {run.flags.get(columns[0]) for run in runs} - {None}
        return {columns[0]: min(first, key=in_order)}
    return check_base(words, [run.flags for run in runs])


def check_base(words, known, option="--base") -> dict:
    """The words FLAG=VALUE of an option as flag -> value. known: the flags of the runs. Raises
    UserError if no run has all of them."""
    base = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name in base:
            raise UserError(f"{option} {word}: write FLAG=VALUE once, as in method=minibatch")
        base[name] = number_or_text(text)
    if base and not any(base.items() <= flags.items() for flags in known):
        values = {str(flags[name]) for name in base for flags in known if name in flags}
        choices = ", ".join(sorted(values)) or "no such flag"
        raise UserError(f"{option} {' '.join(words)}: no run has it; there is: {choices}")
    return base


def set_distances(runs, base, columns, followers):
    """Give each run its distance to the base, or the reason why it has none."""
    free = {followers.get(name, name) for name in base}
    same = [name for name in columns if name not in free]
    bases = [run for run in runs if base.items() <= run.flags.items()]
    for run in runs:
        alike = [other for other in bases if have_equal(same, run, other)]
        found = [other for other in alike if other.seed == run.seed]
        if run in bases:
            run.over = 0.0 if math.isfinite(run.loss) else None
            run.why = "base"
        elif len(found) != 1:
            run.why = "several bases" if found else "no base"
        elif not have_equal(["corpus_hash"], run, found[0]):
            run.why = "other text"
        elif found[0].loss == math.inf:
            run.why = "base diverged"
        elif math.isfinite(run.loss / found[0].loss):
            run.over = run.loss / found[0].loss - 1


def have_equal(names, run, other) -> bool:
    """Have two runs the same values of these flags? One that either lacks is no difference."""
    common = run.flags.keys() & other.flags.keys() & set(names)
    return all(run.flags[name] == other.flags[name] for name in common)


# ---- statistics ----


def t_quantile(df: int) -> float:
    """95% of Student's distribution with df degrees of freedom lie between -t and t."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        if share_within(angle, df) < 0.95:
            low = angle
        else:
            high = angle
    return math.sqrt(df) * math.tan(low)


def share_within(angle: float, df: int) -> float:
    """The share of Student's distribution between -t and t, where tan(angle) = t / sqrt(df).
    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term = cosine if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + odd, df - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@dataclass
class Spread:
    """The standard deviation s of all groups together, and its degrees of freedom. A number in a
    group is a seed."""

    s: float
    df: int

    @staticmethod
    def of(groups):
        groups = [found for found in groups if len(found) > 1]
        df = sum(len(found) - 1 for found in groups)
        squares = sum((len(found) - 1) * statistics.variance(found) for found in groups)
        return Spread(math.sqrt(squares / df) if df else math.nan, df)

    def half_interval(self, n: int) -> float:
        """Of the mean of n > 1 seeds."""
        return t_quantile(self.df) * self.s / math.sqrt(n)


def losses_of(runs) -> list:
    """Those that are known and finite."""
    return [run.loss for run in runs if math.isfinite(run.loss)]


def distances_of(runs) -> list:
    return [run.over for run in runs if run.over is not None]


# ---- output ----


def markdown(lines) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rest])


def mean_cell(found, form, spread) -> str:
    text = form.format(statistics.mean(found))
    if len(found) > 1:
        text += f" +- {form.format(spread.half_interval(len(found))).lstrip('+')}"
    return text


def loss_cell(runs, spread) -> str:
    losses = losses_of(runs)
    lost = sum(run.loss == math.inf for run in runs)
    parts = [mean_cell(losses, "{:.4f}", spread)] if losses else []
    if lost:
        parts.append(f"diverged, {lost} of {len(runs)} seeds")
    return "; ".join(parts)


def distance_cells(runs, spread) -> list:
    """The mean distance, or why there is none, and of how many seeds it is."""
    reasons = {run.why for run in runs}
    if reasons == {"base"}:
        return ["base", ""]
    found = distances_of(runs)
    text = mean_cell(found, "{:+.2%}", spread) if found else ""
    lost = sum(run.loss == math.inf for run in runs)
    if found and lost:
        reasons.add(f"{lost} of {len(runs)} diverged")
    return ["; ".join(filter(None, [text, *sorted(reasons)])), str(len(found))]


def shown_cell(runs, name, form, factor=1.0) -> str:
    found = [run.results[name] for run in runs if name in run.results]
    return form.format(factor * statistics.mean(found)) if found else ""


def result_lines(lines, columns, base, shown=()) -> list:
    """The cells of the table. base: flag -> value; shown: of SHOWN."""
    head = [*columns, "validation loss", "MB sent"]
    head += [SHOWN[name][0] for name in shown] + ["seeds"]
    if base:
        head += [f"over {label(base, base.values())}", "n"]
    table = [head]
    losses = Spread.of([losses_of(runs) for runs in lines.values()])
    others = [runs for runs in lines.values() if {run.why for run in runs} != {"base"}]
    distances = Spread.of([distances_of(runs) for runs in others])
    for values, runs in lines.items():
        cells = ["" if value is None else str(value) for value in values]
        cells.append(loss_cell(runs, losses))
        cells.append(shown_cell(runs, "sync_bytes", "{:,.1f}", 1e-6))
        for name in shown:
            factor = 1e-6 if name.endswith("bytes") else 1.0
            cells.append(shown_cell(runs, name, SHOWN[name][1], factor))
        cells.append(str(len(runs)))
        if base:
            cells += distance_cells(runs, distances)
        table.append(cells)
    return table


def page(runs, base_words, notes, shown=()) -> tuple:
    """(text, the runs that count, columns, names of all flags that differ). Gives the runs their
    distances. Adds to the notes."""
    columns, followers = find_columns(runs)
    different = {}  # runs that differ in nothing are no independent ones: the first counts
    for run in runs:
        different.setdefault((run.values(columns), run.seed), run)
    if len(different) < len(runs):
        notes.append(f"{len(runs) - len(different)} runs repeat another one, left out")
    runs = list(different.values())
    base = read_base(base_words, runs, columns) if losses_of(runs) else {}
    set_distances(runs, base, columns, followers)
    text = markdown(result_lines(find_lines(runs, columns), columns, base, shown))
    if "+-" in text:
        text += "\n\n+-: half of a 95% interval, from one standard deviation of all lines"
    pairs = [f"{name} ({leader})" for name, leader in followers.items()]
    if pairs:
        notes.append(f"flags that follow another one: {', '.join(pairs)}")
    lines = [text, "", *(f"- {note}" for note in notes)]
    return "\n".join(lines).strip(), runs, columns, [*columns, *followers]


# ---- the command line ----


def read_command(argv: list):
    parser = Parser(prog="python -m lab.table", description="Compare runs.", allow_abbrev=False)
    add = parser.add_argument
    several = {"nargs": "+", "action": "extend", "default": [], "metavar": "FLAG=VALUE"}
    add("runs", nargs="+", metavar="FOLDER", help="a run's out_dir, or a CSV file of such a table")
    add("--base", help="the runs to compare with", **several)
    add("--only", help="only the runs with these flags", **several)
    add("--at", type=int, metavar="STEP", help="compare at this step")
    add("--x", help=f"of the picture: {', '.join(CURVES)}, a flag, or gain")
    add("--first", type=float, default=-math.inf, help="draw only from this x on")
    add("--show", nargs="+", default=[], choices=list(SHOWN), help="more columns")
    add("--out", help="write OUT.md, OUT.csv and OUT.svg")
    return parser.parse_args(argv)


def main(argv: list):
    args = read_command(argv)
    runs, notes = read_runs(args.runs)
    only = check_base(args.only, [run.flags for run in runs], "--only")
    runs = [run for run in runs if only.items() <= run.flags.items()]
    for run in runs if args.at is not None else ():
        cut(run, args.at)
    text, runs, columns, names = page(runs, args.base, notes, args.show)
    print(text)
    if args.out:
        name = args.out.removesuffix(".md").removesuffix(".csv").removesuffix(".svg")
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{name}.md").write_text(f"{text}\n")
        write_csv(f"{name}.csv", runs, names)
        print(f"\ntable   {name}.md, {name}.csv")
        base = check_base(args.base, [run.flags for run in runs])
        print(plot.draw_runs(runs, columns, args.x, args.first, base, f"{name}.svg"))


if __name__ == "__main__":
    run_command("table.py", lambda: main(sys.argv[1:]))
