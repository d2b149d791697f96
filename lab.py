"""The laboratory: experiments about the methods. Each is a question, runs of train.py, a figure.

    python lab.py                    # list the experiments and their cost
    python lab.py quality            # print the table; write results/quality.json and quality.svg
    python lab.py quality --quick    # a small version for a first look, into out/lab/quick/

Runs are kept in out/lab/: finished ones are not repeated, also if two experiments share them, and
an interrupted one resumes from its last checkpoint. To add an experiment, write a function that
returns its runs and name it in EXPERIMENTS.

All runs train the tiny model on the built-in corpus, 2,048 tokens a step, on 4 replicas x 1 shard
unless they say otherwise. `tune` gives every method the same budget of three settings (TUNING), on
a seed that no other experiment reports; these take the best settings from results/tune.json.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from plot import METHODS, Panel, draw
from plumbing import timeline
from plumbing.config import Parser, check_limits, run_command
from plumbing.runs import RUNS, Run, execute_all, table

RESULTS = Path(__file__).parent / "results"
TUNING_SEED = 7
BASE = {
    "max_steps": 448, "sync_warmup_steps": 128, "eval_interval": 64, "log_interval": 64,
    "checkpoint_interval": 128,
}  # fmt: skip
QUICK = {"max_steps": 96, "sync_warmup_steps": 32, "eval_interval": 32, "eval_batches": 4}
MOMENTS = "moments averaged"  # the variant with --average_moments


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


def best_setting(method: str, variant: str) -> dict:
    """Flags from results/tune.json; A-EDiT has EDiT's."""
    path, method = RESULTS / "tune.json", "edit" if method == "a_edit" else method
    variant = variant if variant == MOMENTS else ""
    rows = json.loads(path.read_text()) if path.exists() else []
    found = [row for row in rows if (row["method"], row["variant"]) == (method, variant)]
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
    if columns["variant"] == MOMENTS:
        flags["average_moments"] = True
    setting = best_setting(method, columns["variant"])
    flags = BASE | {"method": method, "seed": seed} | rounds | setting | flags
    return Run(columns, flags, stages)


# ---- the experiments: (seeds, quick) -> runs; then rows of the runs -> rows of the result ----


def tune(seeds, quick):
    runs = []
    for method, variant in [*((m, "") for m in TUNING), ("diloco", MOMENTS), ("edit", MOMENTS)]:
        for flags in TUNING[method][: 1 if quick else None]:
            setting = " ".join(f"{name} {value}" for name, value in flags.items())
            columns = {"variant": variant, "setting": setting}
            runs.append(training(method, TUNING_SEED, columns=columns, **flags))
    return runs


def quality(seeds, quick):
    runs = [training("minibatch", seed) for seed in seeds]
    for tau in (16,) if quick else (16, 64):
        for seed in seeds:
            runs += [training(method, seed, tau) for method in METHODS if method != "minibatch"]
            columns = {"variant": MOMENTS}
            runs += [training(method, seed, tau, columns=columns) for method in ("diloco", "edit")]
            columns = {"variant": "32 bits"}
            runs.append(training("streaming_diloco", seed, tau, columns=columns, quantize="none"))
    return runs


def over(name, **baseline):
    """A function that adds how much higher each row's losses are than those of the row with the
    same seed and these columns."""

    def combine(rows):
        base = {row["seed"]: row for row in rows if baseline.items() <= row.items()}
        relative = lambda loss, least: loss / least - 1
        result = []
        for row in rows:
            least = base[row["seed"]]
            curve = list(map(relative, row["val_loss_curve"], least["val_loss_curve"]))
            added = {name: relative(row["val_loss"], least["val_loss"]), f"{name}_curve": curve}
            result.append(row | added)
        return result

    return combine


def longer(seeds, quick):
    """With train.py's own batch, steps and warm-up."""
    flags = {"batch_size": 8, "max_steps": 700, "sync_warmup_steps": 200, "eval_interval": 200}
    cases = [("minibatch", ""), ("diloco", ""), ("edit", ""), ("edit", MOMENTS)]
    return [
        training(method, seed, columns={"variant": variant}, **{} if quick else flags)
        for method, variant in cases for seed in seeds
    ]  # fmt: skip


def round_length(seeds, quick):
    methods = ("diloco", "streaming_diloco", "edit", "streaming_edit")
    runs = []
    for tau in (4, 16) if quick else (4, 16, 64, 128):
        flags = {"fragments": 2, "delay": 1} if tau == 4 else {}  # the delay is at most tau / F - 1
        runs += [training(method, seed, tau, **flags) for method in methods for seed in seeds]
    return runs


def link(seeds, quick):
    """The losses are those of `quality`: a link changes no loss. Short runs without evaluations
    and checkpoints measure the seconds of a step. Without stragglers A-EDiT is EDiT."""
    methods = ("minibatch", "diloco", "streaming_diloco", "edit") if quick else METHODS
    methods = [method for method in methods if method != "a_edit"]
    runs = [training(method, seed, 64) for method in methods for seed in seeds]
    for mbps in (100,) if quick else (100, 10):
        for method in methods:
            steps = 4 if method == "minibatch" else 64
            flags = {"max_steps": 4 * steps, "log_interval": steps, "eval_interval": 10**6}
            flags |= {"checkpoint_interval": 0, "sync_warmup_steps": 0, "link_mbps": mbps}
            runs.append(training(method, TUNING_SEED, 64, columns={"link_mbps": mbps}, **flags))
    return runs


def loss_over_seconds(rows):
    """The runs of `quality` at each rate, with the seconds that their steps take there. They count
    from the end of the warm-up, which is the same in all methods."""
    timed = {(row["link_mbps"], row["method"]): row for row in rows if "link_mbps" in row}
    result = []
    for (mbps, method), timing in timed.items():
        step_ms = statistics.median(timing["step_ms_curve"])
        for row in rows:
            if row["method"] == method and "link_mbps" not in row:
                steps = [step - BASE["sync_warmup_steps"] for step in row["step_curve"]]
                seconds = [step * step_ms / 1e3 for step in steps]
                row = row | {"link_mbps": mbps, "step_ms": step_ms, "local_s": seconds[-1]}
                row["command"] += "\n" + timing["command"]
                result.append(row | {"seconds_curve": seconds})
    return result


def stragglers(seeds, quick):
    """Replica 3 is slow. In lockstep this changes no loss, so one seed is enough there."""
    runs = []
    for slowness in (1.0, 2.0) if quick else (1.0, 1.5, 2.0, 4.0):
        flags = {"virtual_clock": True, "slow_replica": f"3:{slowness}"}
        columns = {"slowness": slowness, "clock": "virtual"}
        for method in ("minibatch", "diloco", "edit"):
            some = seeds if slowness == 1 else seeds[:1]
            runs += [training(method, seed, columns=columns, **flags) for seed in some]
        for weighting in ("none", "times_steps", "norm_per_step"):
            columns["variant"] = f"weights {weighting}"
            flags["step_weighting"] = weighting if slowness > 1 else "none"  # no difference at 1
            runs += [training("a_edit", seed, columns=columns, **flags) for seed in seeds]
    columns, flags = {"slowness": 2.0, "clock": "real"}, {"slow_replica": "3:2.0"}
    for method, more in (("edit", {}), ("a_edit", {"tau_time_s": 1.0, "virtual_clock": False})):
        runs.append(training(method, seeds[0], columns=columns, **flags | more))
    return runs


def same_losses(rows):
    """In lockstep losses do not depend on the slowness: fill in the rows of the other seeds."""
    result = []
    for row in rows:
        case, others = (row["method"], "virtual", 1), [row]
        if row["method"] != "a_edit" and row["clock"] == "virtual" and row["slowness"] > 1:
            others = [o for o in rows if (o["method"], o["clock"], o["slowness"]) == case]
        for other in others:
            assert other["seed"] != row["seed"] or other["val_loss"] == row["val_loss"]
            commands = dict.fromkeys([row["command"], other["command"]])  # of speed, of loss
            loss = {name: other[name] for name in ("seed", "val_loss")}
            result.append(row | loss | {"command": "\n".join(commands)})
    return result


SICK = {
    "none": {}, "learning rate x 100": {"scale_lr": "3:225:240:100"},
    "random tokens": {"random_tokens": "3:193:240"},
}  # fmt: skip
PARTS = ("anomaly_elimination", "weighted_averaging", "pseudo_grad_clipping")


def penalty(seeds, quick):
    """Replica 3 is sick for one or three rounds, until step 240. By then EDiT has seen the norms of
    10 healthy rounds."""
    methods = ("diloco", "streaming_diloco", "edit", "streaming_edit")
    variants = [(method, "", {}) for method in methods]
    for part in () if quick else PARTS:
        name, others = part.replace("_", " "), [other for other in PARTS if other != part]
        variants.append(("edit", f"no {name}", {part: False}))
        variants.append(("edit", f"only {name}", dict.fromkeys(others, False)))
    length = {"sync_warmup_steps": 32, "max_steps": 272, "eval_interval": 16, "eval_batches": 8}
    runs = []
    for method, variant, without in variants:
        for disturbance in list(SICK)[: 2 if quick else None]:
            columns = {"variant": variant, "disturbance": disturbance}
            flags = length | without | SICK[disturbance]
            runs += [training(method, seed, columns=columns, **flags) for seed in seeds]
    return runs


def excess_loss(rows):
    """Add how much higher the loss is one round after the disturbance than without it."""
    after, result = {}, []
    for row in rows:  # in each case the undisturbed run comes first
        case = row["method"], row["variant"], row["seed"]
        loss = dict(zip(row["step_curve"], row["val_loss_curve"]))[256]
        after[case] = after.get(case, loss)
        result.append(row | {"excess": loss / after[case] - 1})
    return result


def elastic(seeds, quick):
    first, second, interval = (48, 64, 16) if quick else (192, 320, 64)
    meshes = {"1 replica": ((1, None),), "2 replicas": ((2, None),), "4 replicas": ((4, None),)}
    meshes["1, 2, 4 replicas"] = ((1, first), (2, second), (4, None))
    meshes["4, 2, 1 replicas"] = ((4, first), (2, second), (1, None))
    return [
        training("edit", seed, 16, stages, {"variant": name}, checkpoint_interval=interval)
        for name, stages in meshes.items() for seed in seeds
    ]  # fmt: skip


def needed_rates(rows):
    """A row per model and method; of methods with the same timeline only the first."""
    different = {}
    for (model, method), rates in timeline.needed(rows).items():
        row = {"model": model, "method": method} | rates
        different.setdefault((model, *rates.values()), row)
    return list(different.values())


@dataclass
class Experiment:
    """columns: of its table; combine: rows of the runs -> rows of the result; summary: rows of the
    result -> rows of the table; curves: whether the result keeps the lists of the evaluations."""

    question: str
    runs: object
    columns: tuple
    panels: list
    combine: object = list
    summary: object = list
    curves: bool = False


BYTES = "bytes over the slow links after the warm-up, per rank"
EXPERIMENTS = {
    "tune": Experiment(
        "Which of three settings is the best one of each method?",
        tune, ("val_loss",), [],
    ),
    "quality": Experiment(
        "What does each method lose against mini-batch, and how much does it send?",
        quality, ("val_loss", "over_minibatch", "local_bytes"),
        [Panel("local_bytes", "val_loss", BYTES, log=True)],
        over("over_minibatch", method="minibatch"),
    ),
    "longer": Experiment(
        "Is the distance from mini-batch smaller in a longer run with a larger batch?",
        longer, ("val_loss", "over_minibatch"), [], over("over_minibatch", method="minibatch"),
    ),
    "tau": Experiment(
        "How long may a round be?",
        round_length, ("val_loss", "local_bytes"),
        [Panel("tau", "val_loss", "tau, steps per round", log=True)],
    ),
    "link": Experiment(
        "How long does the training take over a slow link?",
        link, ("step_ms", "local_s", "val_loss"),
        [Panel("seconds_curve", "val_loss_curve", "seconds after the warm-up", log=True,
               title=f"{mbps} Mbit/s", where={"link_mbps": mbps}, xlim=(1, math.inf))
         for mbps in (100, 10)],
        loss_over_seconds, curves=True,
    ),
    "stragglers": Experiment(
        "What does one slow replica cost?",
        stragglers, ("tokens_per_s", "val_loss"),
        [Panel("slowness", "tokens_per_s", "slowness of a replica", "tokens per virtual second",
               where={"clock": "virtual"}),
         Panel("slowness", "val_loss", "slowness of a replica", where={"clock": "virtual"})],
        same_losses,
    ),
    "penalty": Experiment(
        "What does EDiT's penalty do when a replica is sick?",
        penalty, ("excess", "val_loss"),
        [Panel("step_curve", "val_loss_curve", "steps", title=f"{who}{sick}",
               where={"disturbance": sick} | where, xlim=(176, 272))
         for who, sick, where in (
             ("replica 3: ", "learning rate x 100", {"variant": ""}),
             ("replica 3: ", "random tokens", {"variant": ""}),
             ("EDiT, ", "learning rate x 100", {"method": "edit"}),
         )],
        excess_loss, curves=True,
    ),
    "elastic": Experiment(
        "May the number of replicas change during the training?",
        elastic, ("val_loss", "over_one"),
        [Panel("step_curve", "over_one_curve", "steps", "loss over one replica's, relative")],
        over("over_one", variant="1 replica"), curves=True,
    ),
    "scale": Experiment(
        "On paper: how many Gbit/s between replicas does each compute utilization need?",
        lambda seeds, quick: [], tuple(timeline.LEVELS),
        [Panel("gbit_per_s", "utilization", "Gbit/s between replicas", "compute utilization",
               title=f"{model[:-1]} billion parameters", where={"model": model}, log=True)
         for model in timeline.MODELS], lambda rows: timeline.rows(), needed_rates,
    ),
}  # fmt: skip


def run_experiment(name: str, seeds: list, quick: bool, jobs: int):
    experiment, folder = EXPERIMENTS[name], RUNS / "quick" if quick else RESULTS
    runs = experiment.runs(seeds, quick)
    execute_all(runs, jobs)
    rows = experiment.combine([run.row() for run in runs])
    if not experiment.curves:
        rows = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    unfinished = folder / f"{name}.json.tmp"  # tune.json is read by all other experiments
    unfinished.write_text(f"[\n{lines}\n]\n")
    unfinished.replace(folder / f"{name}.json")
    print(table(experiment.summary(rows), experiment.columns))
    print(f"results {folder / name}.json", flush=True)
    if experiment.panels:
        draw(rows, experiment.panels, folder / f"{name}.svg")


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
        print(f"{name:11} {experiment.question} {cost:.0f} minutes, {left:.0f} of them to do")


if __name__ == "__main__":
    run_command("lab.py", main)
