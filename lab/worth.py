"""Worth: are four machines with a slow link better than one of them alone?

    python -m lab.worth --out lab/results/worth_over_link

    worth = minutes in which one machine alone reaches the same loss / minutes of all M together

With a worth of 1 you may as well unplug the link. The losses are measured (lab/results, the runs of
lab/experiments/worth.sh and frontier.sh). The minutes are calculated, because four ranks on two
cores are not four machines:

    alone       S a
    together    W a + C + (S - W) t + what the exchanges add

    S  steps; W  those of the warm-up, on one machine
    C  seconds in which it then copies parameters and moments to the others (docs/two_machines.md)
    t  seconds of a step of one machine of M, with its share of the batch: one process, one thread
    a  seconds of a step of one machine alone, which computes the M shares one after the other

t and a are measured (worth_time.csv). What an exchange adds follows from its bytes and the link, by
round_seconds() of plumbing/plan.py. Runs over a simulated link agree with it (worth_link.csv).
Averaged gradients add all of their time on the link: in those runs their backward hides nothing
that can be measured. The link has no latency.

The loss of one machine alone is measured at several lengths, each with its own whole schedule.
Between them it is a line over log(steps). A worth stands with the interval that its loss implies:
half of a 95% interval of the distance of two means, from one standard deviation of all lines.
"""

import math
import statistics
import sys
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config import Parser, run_command
from lab import plot
from lab.rows import METHODS, read_csv
from lab.table import Spread, markdown
from plumbing.plan import link_seconds, round_seconds

RESULTS = Path(__file__).parent / "results"
MACHINES = 4
LAYERS = 6
PARAMETERS = 918_912
COPIED_BYTES = (MACHINES - 1) * 12 * PARAMETERS  # after the warm-up; in fp32, with two moments
SEEDS = (5, 6, 8, 9)
TABLE_MBPS = (1, 10, 100, 1000)
PICTURE_MBPS = np.geomspace(0.3, 10_000, 91)


@dataclass
class Line:
    """A way to train on all machines. file, flags: its runs; bytes_factor: 0.5 for gradients in 16
    bits, whose loss is taken to be that of 32."""

    name: str
    file: str
    flags: dict
    optimizer: str = "adamw"
    tau: int = 1
    warmup: int = 0
    batch: int = 1  # a step is so many batches
    bytes_factor: float = 1.0

    @property
    def method(self) -> str:
        return self.flags["method"]

    @property
    def loses_nothing(self) -> bool:
        """Has it the loss of one machine alone, because it steps with the same gradients?"""
        return self.method == "minibatch" and self.batch == 1


ONE_BIT = {"method": "one_bit_edit", "quantize": "sign"}
LINES = [  # what a sync of 0/1 Adam adds depends on its bytes alone, so its tau may be any
    Line("averaged gradients", "frontier", {"method": "minibatch"}),
    Line("averaged gradients, 16 bits", "frontier", {"method": "minibatch"}, bytes_factor=0.5),
    Line("averaged gradients, batches x 16", "worth_batch", {"method": "minibatch"}, batch=16),
    Line("DiLoCo, tau 16", "frontier", {"method": "diloco"}, tau=16, warmup=32),
    Line("EDiT, tau 16", "frontier", {"method": "edit"}, tau=16, warmup=32),
    Line("EDiT, tau 64", "worth", {"method": "edit"}, tau=64, warmup=32),
    Line("Streaming EDiT, 4 bits", "frontier", {"method": "streaming_edit"}, tau=16, warmup=32),
    Line("0/1 Adam, 1 bit", "frontier", {"method": "zero_one_adam"}, tau=16, warmup=32),
    Line("EDiT, 1 bit, Muon", "frontier_muon", ONE_BIT, "muon", tau=16, warmup=2),
]
ALONE = {  # optimizer -> the files that have its runs alone
    "adamw": ("worth", "frontier"),
    "muon": ("worth_muon", "frontier_muon"),
}


# ---- what was measured ----


def runs_of(file, flags) -> list:
    wanted = flags.items()
    found = [run for run in read_csv(RESULTS / f"{file}.csv") if run.seed in SEEDS]
    return [run for run in found if wanted <= run.flags.items()]


def losses_alone(optimizer) -> dict:
    """Steps -> the losses of one machine alone. Averaged gradients are the same gradients."""
    losses = {}
    for file in ALONE[optimizer]:
        for run in runs_of(file, {"method": "minibatch"}):
            losses.setdefault(int(run.results["steps"]), []).append(run.loss)
    return dict(sorted(losses.items()))


def half_interval(line: Line, n: int) -> float:
    """Of the distance between its mean, of n seeds, and the loss of one machine alone. Larger
    batches scatter more, so they count only for themselves."""
    groups = list(losses_alone(line.optimizer).values())
    for other in LINES:
        alike = (other.optimizer, other.batch) == (line.optimizer, line.batch)
        if alike and not other.loses_nothing:
            groups.append([run.loss for run in runs_of(other.file, other.flags)])
    return Spread.of(groups).half_interval(n) * math.sqrt(1 + n / len(SEEDS))


def step_seconds(optimizer) -> tuple:
    """(t, a)"""
    found = {}
    for run in read_csv(RESULTS / "worth_time.csv"):
        if run.flags["optimizer"] == optimizer:
            found[run.flags["accum"]] = run.results["step_ms"] / 1000
    return found[1], found[MACHINES]


def steps_alone(loss: float, losses: dict) -> float:
    """How many steps does one machine alone need for this loss? losses: see losses_alone()."""
    at = [math.log(steps) for steps in losses]
    means = [-statistics.fmean(found) for found in losses.values()]  # they rise
    right = min(max(bisect(means, -loss), 1), len(at) - 1)
    share = (-loss - means[right - 1]) / (means[right] - means[right - 1])
    return math.exp(at[right - 1] + share * (at[right] - at[right - 1]))


# ---- minutes and worth ----


def exchange_seconds(method, tau, t, link_s) -> float:
    """What the exchange of a round adds to its computing. link_s: seconds on the link."""
    if method == "minibatch":
        return link_s
    return round_seconds(method, tau, t, link_s, LAYERS) - tau * t


class Result:
    """A line with its figures."""

    def __init__(self, line: Line):
        self.line = line
        self.alone = losses_alone(line.optimizer)
        self.t, self.a = step_seconds(line.optimizer)
        runs = runs_of(line.file, line.flags)
        self.loss = statistics.fmean(run.loss for run in runs)
        self.half = 0.0 if line.loses_nothing else half_interval(line, len(runs))
        self.steps = int(runs[0].results["steps"])
        sent = runs[0].results["local_bytes" if line.warmup else "sync_bytes"]
        self.bytes = sent * line.bytes_factor  # of a machine, without the warm-up

    def minutes(self, mbps) -> float:
        line = self.line
        steps = self.steps - line.warmup
        t = self.t * line.batch
        rounds = math.ceil(steps / line.tau)
        link_s = link_seconds(self.bytes / rounds, mbps)
        added = rounds * exchange_seconds(line.method, line.tau, t, link_s)
        if line.warmup:
            added += link_seconds(COPIED_BYTES, mbps)
        return (line.warmup * self.a + steps * t + added) / 60

    def minutes_alone(self, loss) -> float:
        return steps_alone(loss, self.alone) * self.a / 60

    def worth(self, mbps) -> tuple:
        """(worth, lower end, upper end of its interval)"""
        losses = (self.loss, self.loss + self.half, self.loss - self.half)
        return tuple(self.minutes_alone(loss) / self.minutes(mbps) for loss in losses)

    def pays_from_mbps(self) -> list:
        """The slowest link with which all machines together are as good as one alone, or inf; lower
        end, upper end of its interval."""
        losses = (self.loss, self.loss - self.half, self.loss + self.half)
        minutes = map(self.minutes_alone, losses)
        return [slowest_mbps(lambda mbps: self.minutes(mbps) <= alone) for alone in minutes]


def slowest_mbps(fits) -> float:
    """The slowest link that fits, or inf. If one fits, all faster ones do."""
    low, high = 1e-3, 1e6
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        if fits(middle):
            high = middle
        else:
            low = middle
    return high if high < 1e6 else math.inf


# ---- output ----


def rounded(number: float) -> str:
    """Two significant digits at least."""
    return f"{number:,.0f}" if number >= 10 else f"{number:#.2g}"


def table_lines(found) -> list:
    head = ["", "loss", "MB sent", *(f"{mbps:,} Mbit/s" for mbps in TABLE_MBPS), "pays from"]
    lines = [head]
    for optimizer, name in ("adamw", "one machine alone"), ("muon", "one machine alone, Muon"):
        own = [result for result in found if result.line.optimizer == optimizer]
        if own:
            steps, losses = list(own[0].alone.items())[-1]
            cells = [f"1, {rounded(steps * own[0].a / 60)} min"] * len(TABLE_MBPS)
            lines.append([name, f"{statistics.fmean(losses):.3f}", "0", *cells, ""])
        lines += map(table_line, own)
    return lines


def table_line(result) -> list:
    cells = []
    for mbps in TABLE_MBPS:
        worth, low, high = result.worth(mbps)
        interval = "" if result.line.loses_nothing else f" ({low:.2f} to {high:.2f})"
        cells.append(f"{worth:.2f}{interval}, {rounded(result.minutes(mbps))} min")
    mbps, low, high = result.pays_from_mbps()
    interval = "" if result.line.loses_nothing else f" ({rounded(low)} to {rounded(high)})"
    pays = f"{rounded(mbps)}{interval} Mbit/s" if math.isfinite(mbps) else "never"
    sent = rounded(result.bytes / 1e6)
    return [result.line.name, f"{result.loss:.3f}", sent, *cells, pays]


def color_of(line) -> str:
    return "#000000" if line.optimizer == "muon" else METHODS[line.method][1]


DASHES = {
    "averaged gradients, 16 bits": "--",
    "averaged gradients, batches x 16": ":",
    "EDiT, tau 64": "--",
    "Streaming EDiT, 4 bits": "-.",
}


def draw(found, path):
    """Worth over the rate of the link, as an SVG."""
    picture = plot.new_figure(7.2, 4.6)
    axes = picture.subplots()
    data = []
    for result in found:
        line = result.line
        worth, low, high = np.transpose([result.worth(mbps) for mbps in PICTURE_MBPS])
        look = {"color": color_of(line), "linestyle": DASHES.get(line.name, "-")}
        if line.method == "diloco":  # EDiT's line covers it
            look["linewidth"] = 4
        axes.plot(PICTURE_MBPS, worth, label=line.name, **look)
        axes.fill_between(PICTURE_MBPS, low, high, color=look["color"], alpha=0.12, linewidth=0)
        data.append([line.name, *worth.tolist()])
    axes.axhline(1, color="#d62728", linewidth=1, label="one machine alone")
    axes.set(xscale="log", xlim=(PICTURE_MBPS[0], PICTURE_MBPS[-1]), ylim=(0, MACHINES))
    axes.set(xlabel="link of each machine, Mbit/s", ylabel="four machines are worth ... machines")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    plot.save(picture, data, path)


def main(argv):
    parser = Parser(prog="python -m lab.worth", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write OUT.svg; it needs matplotlib")
    args = parser.parse_args(argv)
    found = list(map(Result, LINES))
    print(markdown(table_lines(found)))
    if args.out:
        draw(found, f"{args.out}.svg")
        print(f"\npicture {args.out}.svg")


if __name__ == "__main__":
    run_command("worth.py", lambda: main(sys.argv[1:]))
