"""The laboratory: experiments about the methods. Each is a question, runs of train.py, a figure.

    python lab.py                    # list the experiments and their cost
    python lab.py quality            # print the table; write results/quality.json and quality.svg
    python lab.py quality --quick    # a small version for a first look, into out/lab/quick/

Runs are kept in out/lab/: finished ones are not repeated, also if two experiments share them, and
an interrupted one resumes from its last checkpoint. To add an experiment, write a function that
returns its runs, with @Experiment (plumbing/runs.py) above it.

All runs train the tiny model on the built-in corpus, 2,048 tokens a step, on 4 replicas x 1 shard
unless they say otherwise. `tune` gives every method the same budget of three settings (TUNING), on
a seed that no other experiment reports; these take the best settings from results/tune.json.
"""

import itertools
import json
import math
import statistics

from plot import METHODS, Panel
from plumbing import timeline
from plumbing.config import Parser, check_limits, run_command
from plumbing.runs import CASE, EXPERIMENTS, RESULTS, Experiment, Run, run_experiment

TUNING_SEED = 7
BASE = {
    "max_steps": 448, "sync_warmup_steps": 128, "eval_interval": 64, "log_interval": 64,
    "checkpoint_interval": 128,
}  # fmt: skip
QUICK = {
    "max_steps": 96, "sync_warmup_steps": 32, "eval_interval": 32, "eval_batches": 4,
    "checkpoint_interval": 16,
}  # fmt: skip


def settings(*values) -> list:
    names = ("lr", "outer_lr", "outer_momentum")
    return [dict(zip(names, setting)) for setting in values]


RATES = settings((3e-3,), (4.5e-3,), (6e-3,))
NESTEROV = settings((3e-3, 0.7, 0.8), (4.5e-3, 0.7, 0.8), (4.5e-3, 0.9, 0.7))
TUNING = {  # the first pairs of outer learning rate and momentum are the defaults
    "minibatch": RATES, "post_local_sgd": RATES,
    "slowmo": settings((3e-3, 1.0, 0.5), (4.5e-3, 1.0, 0.5), (4.5e-3, 0.7, 0.7)),
    "co2": settings((3e-3, 0.7, 0.2), (4.5e-3, 0.7, 0.2), (4.5e-3, 0.5, 0.2)),
    "noloco": settings((3e-3, 0.9, 0.5), (4.5e-3, 0.9, 0.5), (4.5e-3, 0.9, 0.3)),
    "diloco": NESTEROV, "streaming_diloco": NESTEROV, "edit": NESTEROV, "streaming_edit": NESTEROV,
}  # fmt: skip


def best_setting(method: str) -> dict:
    """Flags from results/tune.json; A-EDiT has EDiT's."""
    path, method = RESULTS / "tune.json", "edit" if method == "a_edit" else method
    rows = json.loads(path.read_text()) if path.exists() else []
    found = [row for row in rows if row["method"] == method]
    words = min(found, key=lambda row: row["val_loss"])["setting"].split() if found else []
    return dict(zip(words[::2], words[1::2]))


def training(method, seed, tau=16, stages=((4, None),), columns=None, **flags) -> Run:
    """A run with the best setting of the method. flags: other than BASE; columns: of its row."""
    columns = {"method": method, "variant": "", "tau": tau, "seed": seed} | (columns or {})
    rounds = {"tau": tau}
    if method == "minibatch":
        columns["tau"], rounds = 1, {}
    if method == "a_edit":  # by the virtual clock: as many steps as in the other methods
        rounds = {"tau_time_s": tau, "virtual_clock": True}
    flags = BASE | {"method": method, "seed": seed} | rounds | best_setting(method) | flags
    return Run(columns, flags, stages)


def timing(method, tau=16, columns=None, **flags) -> Run:
    """A short run for the time of a step: three rounds without evaluations and checkpoints."""
    steps = 4 if method == "minibatch" else tau
    length = {"max_steps": 3 * steps, "log_interval": steps, "eval_interval": 10**6}
    flags = length | {"checkpoint_interval": 0, "sync_warmup_steps": 0} | flags
    return training(method, TUNING_SEED, tau, columns={"seed": None} | (columns or {}), **flags)


def times_and_losses(rows):
    """A slow link changes no loss, and a slow replica none if all replicas take the same steps. So
    the losses come from full runs (with a seed), and the time of a step from the short run of
    timing() (without a seed)."""
    full = [row for row in rows if row["seed"] is not None]
    timings = [row for row in rows if row["seed"] is None]
    timed = {timing["method"] for timing in timings}
    result = [row for row in full if row["method"] not in timed]
    for row, timing in itertools.product(full, timings):
        if row["method"] == timing["method"]:
            case = {name: timing[name] for name in CASE if name in timing}
            step_s = statistics.median(timing["step_ms_curve"]) / 1e3
            seconds = [(k - BASE["sync_warmup_steps"]) * step_s for k in row["step_curve"]]
            speed = row["tokens_curve"][-1] / row["step_curve"][-1] / step_s
            row = row | case | {"tokens_per_s": speed, "step_ms": 1e3 * step_s}
            row |= {"seconds_curve": seconds, "local_s": seconds[-1]}
            result.append(row | {"command": row["command"] + "\n" + timing["command"]})
    return result


def over(name, same=("seed",), **baseline):
    """A function that adds to each row how much higher its losses are than those of its base: the
    row with the columns `baseline` and the same values in `same`."""

    def combine(rows):
        key = lambda row: [row[column] for column in same]
        relative = lambda loss, base: loss / base - 1
        result = []
        for row in rows:
            base = next(r for r in rows if baseline.items() <= r.items() and key(r) == key(row))
            curve = list(map(relative, row["val_loss_curve"], base["val_loss_curve"]))
            added = {name: relative(row["val_loss"], base["val_loss"]), f"{name}_curve": curve}
            result.append(row | added)
        return result

    return combine


# ---- the experiments ----


@Experiment(("val_loss",))
def tune(seeds, quick):
    """Which of three settings is the best one of each method?"""
    runs = []
    for method, budget in TUNING.items():
        for flags in budget[: 1 if quick else None]:
            columns = {"setting": " ".join(f"{name} {value}" for name, value in flags.items())}
            runs.append(training(method, TUNING_SEED, columns=columns, **flags))
    return runs


BYTES = "bytes over the slow links after the warm-up, per rank"
MOMENTS = {"columns": {"variant": "moments averaged"}, "average_moments": True}
FP32 = {"columns": {"variant": "32 bits"}, "quantize": "none"}


@Experiment(
    ("val_loss", "over_minibatch", "local_bytes"),
    combine=over("over_minibatch", method="minibatch"),
    panels=[Panel("local_bytes", "val_loss", BYTES, log=True)],
)  # fmt: skip
def quality(seeds, quick):
    """What does each method lose against mini-batch, and how much does it send?"""
    methods = [method for method in METHODS if method != "minibatch"]
    runs = [training("minibatch", seed) for seed in seeds]
    for tau in (16,) if quick else (16, 64):
        runs += [training(method, seed, tau) for method in methods for seed in seeds]
    for method, more in ("edit", MOMENTS), ("streaming_diloco", FP32):
        runs += [training(method, seed, **more) for seed in seeds]
    return runs


@Experiment(("val_loss", "over_minibatch"), combine=over("over_minibatch", method="minibatch"))
def longer(seeds, quick):
    """Is the distance from mini-batch smaller in a longer run with a larger batch?"""
    # The batch, steps and warm-up of train.py
    flags = {"batch_size": 8, "max_steps": 700, "sync_warmup_steps": 200, "eval_interval": 200}
    flags = {} if quick else flags
    cases = ("minibatch", {}), ("diloco", {}), ("edit", {}), ("edit", MOMENTS)
    return [training(method, seed, **flags | more) for method, more in cases for seed in seeds]


@Experiment(
    ("val_loss", "local_bytes"), [Panel("tau", "val_loss", "tau, steps per round", log=True)]
)
def tau(seeds, quick):
    """How long may a round be?"""
    methods = ("diloco", "streaming_diloco", "edit", "streaming_edit")
    runs = []
    for tau in (4, 16) if quick else (4, 16, 64, 128):
        flags = {"fragments": 2, "delay": 1} if tau == 4 else {}  # the delay is at most tau / F - 1
        runs += [training(method, seed, tau, **flags) for method in methods for seed in seeds]
    return runs


@Experiment(
    ("step_ms", "local_s", "val_loss"),
    combine=times_and_losses,
    panels=[
        Panel("seconds_curve", "val_loss_curve", "seconds after the warm-up", log=True,
              title=f"{mbps} Mbit/s", where={"link_mbps": mbps}, xlim=(1, math.inf))
        for mbps in (100, 10)
    ],
)  # fmt: skip
def link(seeds, quick):
    """How long does the training take over a slow link?"""
    methods = ("minibatch", "diloco", "streaming_diloco", "edit") if quick else METHODS
    methods = [method for method in methods if method != "a_edit"]  # it is EDiT without stragglers
    runs = [training(method, seed, 64) for method in methods for seed in seeds]
    for mbps in (100,) if quick else (100, 10):
        columns = {"link_mbps": mbps}
        runs += [timing(method, 64, columns, link_mbps=mbps) for method in methods]
    return runs


@Experiment(
    ("tokens_per_s", "val_loss"),
    combine=times_and_losses,
    panels=[
        Panel("slowness", "tokens_per_s", "slowness of a replica", "tokens per virtual second",
              where={"clock": "virtual"}),
        Panel("slowness", "val_loss", "slowness of a replica", where={"clock": "virtual"}),
    ],
)  # fmt: skip
def stragglers(seeds, quick):
    """What does one slow replica cost?"""
    lockstep = ("minibatch", "diloco", "edit")
    runs = [training(method, seed) for method in lockstep for seed in seeds]
    for slowness in (1.0, 2.0) if quick else (1.0, 1.5, 2.0, 4.0):
        columns, slow = {"slowness": slowness, "clock": "virtual"}, f"3:{slowness}"
        flags = {"slow_replica": slow, "virtual_clock": True}
        runs += [timing(method, columns=columns, **flags) for method in lockstep]
        for weighting in ("none", "times_steps", "norm_per_step"):
            columns = columns | {"variant": f"weights {weighting}"}
            flags = {"slow_replica": slow, "step_weighting": weighting}
            flags = flags if slowness > 1 else {}  # all weights are equal
            runs += [training("a_edit", seed, columns=columns, **flags) for seed in seeds]
    columns, flags = {"slowness": 2.0, "clock": "real"}, {"slow_replica": "3:2.0"}
    runs.append(timing("edit", columns=columns, **flags))
    flags |= {"tau_time_s": 1.0, "virtual_clock": False}
    return runs + [training("a_edit", seeds[0], columns=columns, **flags)]


# Replica 3 is sick for one or three rounds, which end at step 256, one round before the end. Before
# them EDiT has seen at least 11 healthy rounds.
SICK = {
    "none": {}, "learning rate x 100": {"scale_lr": "3:241:256:100"},
    "random tokens": {"random_tokens": "3:209:256"},
}  # fmt: skip
PARTS = ("anomaly_elimination", "weighted_averaging", "pseudo_grad_clipping")


@Experiment(
    ("excess", "val_loss"),
    combine=over("excess", ("method", "seed"), disturbance="none"),
    panels=[
        Panel("step_curve", "val_loss_curve", "steps", title=f"{who}{sick}",
              where={"disturbance": sick} | where, xlim=(192, 272))
        for who, sick, where in (
            ("replica 3: ", "learning rate x 100", {"variant": ""}),
            ("replica 3: ", "random tokens", {"variant": ""}),
            ("EDiT, ", "learning rate x 100", {"method": "edit"}),
        )
    ],
)  # fmt: skip
def penalty(seeds, quick):
    """What does EDiT's penalty do when a replica is sick?"""
    methods = ("diloco", "streaming_diloco", "edit", "streaming_edit")
    sicknesses = list(SICK)[: 2 if quick else 3]
    cases = [(method, "", {}, sick) for sick in sicknesses for method in methods]
    for part in () if quick else PARTS:
        name, others = part.replace("_", " "), [other for other in PARTS if other != part]
        cases.append(("edit", f"no {name}", {part: False}, "learning rate x 100"))
        cases.append(("edit", f"only {name}", dict.fromkeys(others, False), "learning rate x 100"))
    length = {"sync_warmup_steps": 32, "max_steps": 272, "eval_interval": 16, "eval_batches": 8}
    runs = []
    for method, variant, without, sick in cases:
        columns = {"variant": variant, "disturbance": sick}
        flags = length | without | SICK[sick]
        runs += [training(method, seed, columns=columns, **flags) for seed in seeds]
    return runs


@Experiment(
    ("val_loss", "over_one"),
    combine=over("over_one", variant="1 replica"),
    panels=[Panel("step_curve", "over_one_curve", "steps", "loss over one replica's, relative")],
)  # fmt: skip
def elastic(seeds, quick):
    """May the number of replicas change during the training?"""
    first = BASE["sync_warmup_steps"] + BASE["checkpoint_interval"]
    second = first + BASE["checkpoint_interval"]
    meshes = {"1 replica": ((1, None),), "4 replicas": ((4, None),)}
    meshes["1, 2, 4 replicas"] = ((1, first), (2, second), (4, None))
    meshes["4, 2, 1 replicas"] = ((4, first), (2, second), (1, None))
    return [
        training("edit", seed, stages=stages, columns={"variant": name})
        for name, stages in meshes.items() for seed in seeds
    ]  # fmt: skip


@Experiment(
    tuple(timeline.LEVELS),
    combine=lambda rows: timeline.rows(), summary=timeline.table_rows,
    panels=[
        Panel("gbit_per_s", "utilization", "Gbit/s between replicas", "compute utilization",
              title=f"{model[:-1]} billion parameters", where={"model": model}, log=True)
        for model in timeline.MODELS
    ],
)  # fmt: skip
def scale(seeds, quick):
    """On paper: how many Gbit/s between replicas does each compute utilization need?"""
    return []


# ---- the command ----


def main():
    parser = Parser(description="Run an experiment; without one, list them.")
    parser.add_argument("experiment", nargs="?", choices=list(EXPERIMENTS))
    parser.add_argument("--quick", action="store_true", help="short runs, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (distorts times)")
    args = parser.parse_args()
    check_limits("jobs", args.jobs, {"low": 1})
    for seed in args.seeds:
        check_limits("seeds", seed, {})
    if args.quick:
        BASE.update(QUICK)
        args.seeds = args.seeds[:1]
    if args.experiment:
        return run_experiment(args.experiment, args.seeds, args.quick, args.jobs)
    for name, experiment in EXPERIMENTS.items():
        runs = {run.folder: run for run in experiment.runs(args.seeds, args.quick)}.values()
        cost = sum(run.minutes() for run in runs)
        left = sum(run.minutes() for run in runs if not run.finished())
        print(f"{name:11} {experiment.runs.__doc__} {cost:.0f} minutes, {left:.0f} of them to do")


if __name__ == "__main__":
    run_command("lab.py", main)
