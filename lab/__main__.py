"""The laboratory: experiments about the methods. Each is a question, runs of train.py, a figure.

    python -m lab                    # list the experiments and their cost
    python -m lab quality            # print the table; write quality.json and .svg to lab/results/
    python -m lab quality --quick    # a small version for a first look, into out/lab/quick/
    python -m lab quality --add      # only the runs that quality.json has no rows of

Runs are kept in out/lab/. A finished run is not repeated, also if another experiment has it, and an
interrupted run resumes from its last checkpoint. To add an experiment, write a function that
returns the runs of one seed, with @Experiment (lab/runs.py) above it.

All runs train the tiny model on the built-in corpus, 2,048 tokens a step, on 4 replicas x 1 shard
unless they say otherwise. `tune` gives every method the same budget of three settings (TUNING), on
a seed that no other experiment reports. The others take the best settings from tune.json.
"""

import itertools
import json
import math
from functools import partial

from config import run_command
from lab import merge as merge_module
from lab import planner
from lab import timeline as timeline_module
from lab.plot import Panel
from lab.rows import LATER, METHODS, beside_minibatch, over, with_standard_error
from lab.runs import BASE, RESULTS, Experiment, Run, main

TUNING_SEED = 7


def training(
    method, seed, tau=16, variant="", columns=None, stages=((4, None),), timed_by=None, **flags
) -> Run:
    """A run with the best setting of the method. flags: other than BASE; columns: of its row."""
    columns = {"method": method, "variant": variant, "tau": tau, "seed": seed} | (columns or {})
    rounds = {"tau": tau}
    if method == "minibatch":
        columns["tau"], rounds = 1, {}
    if method == "a_edit":  # by the virtual clock: as many steps as in the other methods
        rounds = {"tau_time_s": tau, "virtual_clock": True}
    flags = BASE | {"method": method, "seed": seed} | rounds | best_setting(method) | flags
    return Run(columns, flags, stages, timed_by=timed_by)


def timing(method, tau=16, **flags) -> Run:
    """A short run for the time of a step: three rounds without evaluations and checkpoints. A slow
    link changes no loss, and a slow replica none if all replicas take the same steps. So the full
    runs, which give the losses, have neither."""
    steps = 4 if method == "minibatch" else tau
    length = {"max_steps": 3 * steps, "log_interval": steps, "eval_interval": 10**6}
    flags = length | {"checkpoint_interval": 0, "sync_warmup_steps": 0} | flags
    return training(method, TUNING_SEED, tau, columns={"seed": None}, **flags)


def best_setting(method: str) -> dict:
    """Flags from tune.json. A-EDiT has those of EDiT, an unknown method has none."""
    method = "edit" if method == "a_edit" else method
    rows = json.loads((RESULTS / "tune.json").read_text())
    found = [(row["val_loss"], row["setting"]) for row in rows if row["method"] == method]
    return flags_of(min(found, default=(0.0, ""))[1])


def flags_of(setting: str) -> dict:
    words = setting.split()
    return dict(zip(words[::2], words[1::2]))


FAST, RANDOM, LIAR = "learning rate x 100", "random tokens", "wrong sign"


def sick(disturbance: str, first: int, last: int) -> dict:
    """Flags with which replica 3 is sick from step first to last."""
    steps = f"3:{first}:{last}"
    flags = {FAST: {"scale_lr": f"{steps}:100"}, RANDOM: {"random_tokens": steps}}
    return (flags | {LIAR: {"flip": steps}, "none": {}})[disturbance]


# ---- the experiments: functions of one seed ----

SHORT_ROUND = {"fragments": 2, "delay": 1}  # with tau 4 the delay is at most tau / F - 1
RATES = ["lr 0.003", "lr 0.0045", "lr 0.006"]


def outer(default: tuple, other: tuple) -> list:
    """Three settings with two pairs of outer learning rate and momentum."""
    cases = (0.003, default), (0.0045, default), (0.0045, other)
    return [f"lr {lr} outer_lr {rate} outer_momentum {momentum}" for lr, (rate, momentum) in cases]


NESTEROV = outer((0.7, 0.8), (0.9, 0.7))
TUNING = {
    "minibatch": RATES, "post_local_sgd": RATES,
    "slowmo": outer((1.0, 0.5), (0.7, 0.7)), "co2": outer((0.7, 0.2), (0.5, 0.2)),
    "noloco": outer((0.9, 0.5), (0.9, 0.3)),
    "diloco": NESTEROV, "streaming_diloco": NESTEROV, "edit": NESTEROV, "streaming_edit": NESTEROV,
    "zero_one_adam": RATES, "top_k": RATES, "robust": NESTEROV,
    "eager": outer((0.7, 0.0), (0.5, 0.0)),
    "sparse_loco": ["lr 0.003 outer_lr 1.0", "lr 0.0045 outer_lr 1.0", "lr 0.0045 outer_lr 0.7"],
}  # fmt: skip


@Experiment(("val_loss",))
def tune(seed, quick):
    """Which of three settings is the best one of each method?"""
    return [
        training(method, TUNING_SEED, columns={"setting": setting}, **flags_of(setting))
        for method, settings in TUNING.items() for setting in (settings[:1] if quick else settings)
    ]  # fmt: skip


MOMENTS = {"variant": "moments averaged", "average_moments": True}
CHEAP = MOMENTS | {"variant": "moments in 8 bits", "moments_format": "int8"}
OVER_MINIBATCH = over("over_minibatch", method="minibatch")
LOCKSTEP = ("minibatch", "diloco", "edit")
LOCAL = ("diloco", "streaming_diloco", "edit", "streaming_edit")
IN_ALL = "sent per rank over slow links, the warm-up included"
AFTER_WARMUP = "sent per rank over slow links after the warm-up"


@Experiment(
    ("val_loss", "over_minibatch", "local_bytes"),
    [Panel("local_bytes", "val_loss", AFTER_WARMUP, log=10, frontier=True)],
    combine=OVER_MINIBATCH,
)
def quality(seed, quick):
    """What does each method lose against mini-batch, and how much does it send?"""
    methods = [method for method in METHODS if method not in ("minibatch", *LATER)]
    runs = [training("minibatch", seed)]
    for tau in (16,) if quick else (16, 64):
        runs += [training(method, seed, tau) for method in methods]
    runs += [training("edit", seed, **MOMENTS), training("edit", seed, **CHEAP)]
    runs.append(training("streaming_diloco", seed, variant="32 bits", quantize="none"))
    runs += [training("zero_one_adam", seed, tau) for tau in (1, 4, 16)]
    runs += [training(method, seed) for method in ("sparse_loco", "eager", "robust")]
    control = {"variant": "without momentum correction", "momentum_correction": 0}
    return runs + [training("top_k", seed, columns={"tau": 1}, **own) for own in ({}, control)]


@Experiment(("val_loss", "over_minibatch"), combine=OVER_MINIBATCH)
def longer(seed, quick):
    """Is the distance from mini-batch smaller in a longer run with a larger batch?"""
    # The batch, steps and warm-up of train.py
    flags = {"batch_size": 8, "max_steps": 700, "sync_warmup_steps": 200, "eval_interval": 200}
    flags = {} if quick else flags
    runs = [training(method, seed, **flags) for method in LOCKSTEP]
    return [*runs, training("edit", seed, **flags, **MOMENTS)]


@Experiment(("val_loss", "local_bytes"), [Panel("tau", "val_loss", "tau, steps per round", log=2)])
def tau(seed, quick):
    """How long may a round be?"""
    return [
        training(method, seed, tau, **SHORT_ROUND if tau == 4 else {})
        for tau in ((4, 16) if quick else (4, 16, 64, 128)) for method in LOCAL
    ]  # fmt: skip


@Experiment(
    ("step_ms", "local_s", "val_loss"),
    [
        Panel("seconds_curve", "val_loss_curve", "seconds after the warm-up", log=10,
              title=f"{mbps} Mbit/s", where={"link_mbps": mbps}, xlim=(1, math.inf))
        for mbps in (100, 10)
    ],
)  # fmt: skip
def link(seed, quick):
    """How long does the training take over a slow link?"""
    methods = ("minibatch", "diloco", "streaming_diloco", "edit") if quick else METHODS
    methods = [method for method in methods if method not in ("a_edit", *LATER)]
    runs = []
    for method, mbps in itertools.product(methods, (100,) if quick else (100, 10)):
        slow = {"link_mbps": mbps}
        short = timing(method, 64, **slow)
        runs.append(training(method, seed, 64, columns=slow, timed_by=short))
    return runs


def replicas_of(run) -> list:
    """A row per replica."""
    own = {"folder": run.folder.name, "command": run.commands()}
    return [run.columns | row | own for row in timeline_module.read_timeline(run.folder)]


TITLE = "Lost time: two replicas on a slow link, replica 1 half as fast"


@Experiment(("computing",), rows_of=replicas_of, picture=partial(timeline_module.draw, title=TITLE))
def timeline(seed, quick):
    """When does each replica compute, and when does it wait?"""
    flags = {"link_mbps": 60, "slow_replica": "1:2", "batch_size": 16, "dtype": "fp32"}
    flags |= {"sync_warmup_steps": 0, "eval_interval": 10**6, "checkpoint_interval": 0}
    flags |= {"timeline": True, "log_interval": 8}
    flags |= {"columns": {"seed": None}, "stages": ((2, None),)}
    runs = [training("minibatch", TUNING_SEED, 8, max_steps=16, **flags)]
    for method in ("diloco", "edit", "co2", "streaming_diloco"):
        runs.append(training(method, TUNING_SEED, 8, max_steps=40, **flags))
    # as long as 8 steps of the slow replica
    rounds = {"tau_time_s": 2.6, "virtual_clock": False, "max_steps": 60}
    return runs[:3] if quick else [*runs, training("a_edit", TUNING_SEED, 8, **flags, **rounds)]


VIRTUAL = {"clock": "virtual"}


@Experiment(
    ("tokens_per_s", "val_loss"),
    [
        Panel("slowness", "tokens_per_s", "slowness of a replica", "tokens per virtual second",
              where=VIRTUAL, direct=True),
        Panel("slowness", "val_loss", "slowness of a replica", where=VIRTUAL, direct=True),
    ],
)  # fmt: skip
def stragglers(seed, quick):
    """What does one slow replica cost?"""
    runs = []
    for slowness in (1.0, 2.0) if quick else (1.0, 1.5, 2.0, 4.0):
        columns, slow = {"slowness": slowness} | VIRTUAL, {"slow_replica": f"3:{slowness}"}
        for method in LOCKSTEP:
            short = timing(method, **slow, virtual_clock=True)
            runs.append(training(method, seed, columns=columns, timed_by=short))
        for weighting in ("none", "times_steps", "norm_per_step"):
            # If no replica is slow, all weights are equal.
            flags = slow | {"step_weighting": weighting} if slowness > 1 else {}
            variant = f"weights {weighting}"
            runs.append(training("a_edit", seed, variant=variant, columns=columns, **flags))
    columns, slow = {"slowness": 2.0, "clock": "real"}, {"slow_replica": "3:2.0"}
    runs.append(training("edit", seed, columns=columns, timed_by=timing("edit", **slow)))
    clock = {"tau_time_s": 1.0, "virtual_clock": False}
    return [*runs, training("a_edit", seed, columns=columns, **clock, **slow)]


PARTS = {
    "elimination": "anomaly_elimination", "weights": "weighted_averaging",
    "clip": "pseudo_grad_clipping",
}  # fmt: skip


@Experiment(
    ("excess", "val_loss"),
    [
        Panel("step_curve", "val_loss_curve", "steps", title=title, where=where, xlim=(192, 272),
              shade=(first, 256))
        for title, where, first in (
            (f"replica 3: {FAST}", {"disturbance": FAST, "variant": ""}, 241),
            (f"replica 3: {RANDOM}", {"disturbance": RANDOM, "variant": ""}, 209),
            (f"EDiT, {FAST}", {"disturbance": FAST, "method": "edit"}, 241),
        )
    ],
    combine=over("excess", ("method", "seed"), disturbance="none"),
)  # fmt: skip
def penalty(seed, quick):
    """What does EDiT's penalty do when a replica is sick?"""
    # For one or three rounds, which end at step 256, one round before the end. Before them EDiT has
    # seen at least 11 healthy rounds.
    first = {"none": 0, FAST: 241} | ({} if quick else {RANDOM: 209})
    length = {"sync_warmup_steps": 32, "max_steps": 272, "eval_interval": 16, "eval_batches": 8}

    def run(method, disturbance, variant="", **flags):
        flags = length | flags | sick(disturbance, first[disturbance], 256)
        columns = {"disturbance": disturbance}
        return training(method, seed, variant=variant, columns=columns, **flags)

    runs = [run(method, disturbance) for disturbance in first for method in LOCAL]
    for name, part in () if quick else PARTS.items():
        others = [other for other in PARTS.values() if other != part]
        runs.append(run("edit", FAST, f"without {name}", **{part: False}))
        runs.append(run("edit", FAST, f"only {name}", **dict.fromkeys(others, False)))
    return runs


@Experiment(
    ("excess", "val_loss"),
    [Panel("step_curve", "val_loss_curve", "steps", title="replica 3: wrong sign",
           where={"disturbance": LIAR}, xlim=(192, 448), shade=(289, 448))],
    combine=over("excess", ("method", "variant", "seed"), disturbance="none"),
)  # fmt: skip
def liar(seed, quick):
    """What does a replica cost that sends its progress with the wrong sign?"""
    runs = []
    for disturbance in ("none", LIAR):
        flags = sick(disturbance, 49 if quick else 289, 448)
        flags["columns"] = {"disturbance": disturbance}
        runs += [training(method, seed, **flags) for method in ("diloco", "edit")]
        runs.append(training("robust", seed, variant="flag", **flags))  # the default
        runs.append(training("robust", seed, variant="median", aggregate="median", **flags))
    return runs


FRONTIER_COLUMNS = ("val_loss", "over_minibatch", "sync_bytes", "fewer_bytes")


def grid(seed, taus, warmup) -> list:
    """All methods with these rounds. A-EDiT without a slow replica is EDiT."""
    runs = [training("top_k", seed, columns={"tau": 1}, sync_warmup_steps=warmup)]
    for tau, method in itertools.product(taus, METHODS):
        if method not in ("minibatch", "a_edit", "top_k", "one_bit_edit"):
            few = SHORT_ROUND if tau == 4 and method.startswith("streaming") else {}
            runs.append(training(method, seed, tau, sync_warmup_steps=warmup, **few))
    return runs


@Experiment(
    FRONTIER_COLUMNS,
    [
        Panel("sync_bytes", "val_loss", IN_ALL, log=10, frontier=True),
        Panel("local_bytes", "val_loss", AFTER_WARMUP, log=10, frontier=True),
    ],
    combine=beside_minibatch,
)
def frontier(seed, quick):
    """Which method loses least for its bytes, those of the warm-up included?"""
    runs = [training("minibatch", seed)]
    if seed > 1 and not quick:  # with seed 1 all others end more than 1% above the frontier
        return [*runs, training("sparse_loco", seed, 4, sync_warmup_steps=32)]
    return runs + grid(seed, (16,) if quick else (4, 8, 16, 64), 32)


@Experiment(
    (*FRONTIER_COLUMNS, "local_bytes"),
    [Panel("local_bytes", "val_loss", AFTER_WARMUP, log=10, frontier=True)],
    combine=beside_minibatch,
)
def frontier_128(seed, quick):
    """And after a warm-up of 128 steps?"""
    first = seed == 1 or quick  # with seed 1 0/1 Adam is the frontier
    runs = [training("minibatch", seed)]
    runs += [training("zero_one_adam", seed, tau) for tau in ((1,) if first else (1, 4, 8, 16))]
    taus = (16,) if quick else (4, 8, 16, 64)
    return runs + (grid(seed, taus, BASE["sync_warmup_steps"]) if first else [])


LONG = {"max_steps": 2000, "sync_warmup_steps": 32, "eval_interval": 250, "log_interval": 250}
LONG |= {"checkpoint_interval": 1000}
MUON = {"optimizer": "muon", "lr": 0.0045, "muon_lr": 0.02}
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}


@Experiment((*FRONTIER_COLUMNS[:2], "standard_error", "fewer_bytes"), combine=with_standard_error)
def muon(seed, quick):
    """Muon inside, one bit between: what does a run of 2,000 steps lose and send?"""
    own = {} if quick else LONG
    inside = own | MUON | {"variant": "Muon"}
    in_1_bit = inside | PLAIN | {"warmup_format": "int8"}
    return [
        training("minibatch", seed, **own | {"lr": 0.003}),
        training("minibatch", seed, **inside),
        training("one_bit_edit", seed, **in_1_bit),
    ]


def merged_and_ensemble(run) -> list:
    """The merged model's row, and two of its four models: as an ensemble, and alone."""
    row = run.row()
    if run.program == "train.py":
        return [row]
    losses = merge_module.judge(run.folder, run.flags.get("eval_batches", 16))
    more = [row | {"variant": name, "val_loss": loss} for name, loss in losses.items()]
    return [row | {"variant": "merged once"}, *more]


@Experiment(("val_loss", "over_minibatch"), combine=OVER_MINIBATCH, rows_of=merged_and_ensemble)
def merge(seed, quick):
    """Train apart and merge once: a merge of weights beside the ensemble of the models."""
    apart = training("post_local_sgd", seed, 10**9, columns={"tau": None})
    apart.program = "-m lab.merge"
    return [training("minibatch", seed), apart, training("post_local_sgd", seed)]


@Experiment(("val_loss", "over_one"), combine=over("over_one", variant="1 replica"))
def elastic(seed, quick):
    """May the number of replicas change during the training?"""
    first = BASE["sync_warmup_steps"] + BASE["checkpoint_interval"]
    second = first + BASE["checkpoint_interval"]
    meshes = {
        "1 replica": ((1, None),), "4 replicas": ((4, None),),
        "1, 2, 4 replicas": ((1, first), (2, second), (4, None)),
        "4, 2, 1 replicas": ((4, first), (2, second), (1, None)),
    }  # fmt: skip
    return [training("edit", seed, variant=name, stages=meshes[name]) for name in meshes]


@Experiment(
    tuple(planner.LEVELS),
    [
        Panel("gbit_per_s", "utilization", "Gbit/s between replicas", "compute utilization",
              f"{model[:-1]} billion parameters", {"model": model}, log=10, xlim=(0.3, 1000))
        for model in planner.MODELS
    ],
    combine=lambda rows: planner.rows(), summary=planner.needed,
)  # fmt: skip
def scale(seed, quick):
    """On paper: how many Gbit/s between replicas does each compute utilization need?"""
    return []


if __name__ == "__main__":
    run_command("lab", main)
