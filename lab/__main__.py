"""The laboratory: experiments about the methods. Each is a question, runs of train.py, a picture.

    python -m lab                    # list the experiments
    python -m lab tau                # print the table; write tau.json, .md and .svg to lab/results/
    python -m lab tau --steps 96 --seeds 1             # tau_96.json: short runs, for a first look
    python -m lab frontier --steps 2000 --seeds 1 2    # frontier_2000.json
    python -m lab --tables           # rewrite all tables and pictures from the JSON files

Runs are kept in out/lab/. A finished run is not repeated, also if another experiment has it or if
the JSON file has its row, and an interrupted run resumes from its last checkpoint. To add an
experiment, write a function that yields the runs of one seed, with @experiment (lab/runs.py) above
it.

All runs train the tiny model on the built-in corpus, 2,048 tokens a step, on 4 replicas x 1 shard
unless they say otherwise. They have the settings of BEST, which `tune` has found on a seed that no
other experiment reports.
"""

import re

from config import run_command
from lab import planner
from lab.plot import Panel
from lab.rows import beside_minibatch, distance, with_base
from lab.runs import BASE, Run, experiment, main
from lab.timeline import draw, draw_overlap

TUNING_SEED = 7

# Flags of a method. From lab/results/tune.json: the lowest loss of three settings with tau 16, 448
# steps. A-EDiT without slow replicas is EDiT.
BEST = {
    "minibatch": "lr 0.0045",
    "post_local_sgd": "lr 0.0045",
    "slowmo": "lr 0.0045 outer_lr 1.0 outer_momentum 0.5",
    "co2": "lr 0.0045 outer_lr 0.7 outer_momentum 0.2",
    "noloco": "lr 0.0045 outer_lr 0.9 outer_momentum 0.5",
    "diloco": "lr 0.0045 outer_lr 0.7 outer_momentum 0.8",
    "streaming_diloco": "lr 0.0045 outer_lr 0.9 outer_momentum 0.7",
    "edit": "lr 0.0045 outer_lr 0.7 outer_momentum 0.8",
    "streaming_edit": "lr 0.0045 outer_lr 0.9 outer_momentum 0.7",
    "a_edit": "lr 0.0045 outer_lr 0.7 outer_momentum 0.8",
    "zero_one_adam": "lr 0.003",
    "sparse_loco": "lr 0.0045 outer_lr 1.0",
    "top_k": "lr 0.0045",
    "eager": "lr 0.003 outer_lr 0.7 outer_momentum 0.0",
    "robust": "lr 0.003 outer_lr 0.7 outer_momentum 0.8",
}
LONG = 1000  # Runs with so many steps have lr 0.003: mini-batch ends lower than with 0.0045.
# Nothing of these is tuned.
MUON = {"optimizer": "muon", "lr": 0.0045, "muon_lr": 0.02}
ONE_BIT = MUON | {"outer_lr": 1.0, "outer_momentum": 0.0, "warmup_format": "int8"}

LOCAL = ("diloco", "streaming_diloco", "edit", "streaming_edit")
SHORT = {4: {"fragments": 2, "delay": 1}}  # with tau 4 the delay is at most tau / F - 1
# Where time is measured: nothing but rounds.
ROUNDS = {"sync_warmup_steps": 0, "eval_interval": 10**6, "checkpoint_interval": 0}


def flags_of(setting: str) -> dict:
    return dict(re.findall(r"(\w+) (\S+)", setting))


def training(
    method, seed, tau=16, variant="", columns=None, ranks=4, timed_by=None, **flags
) -> Run:
    """A run with the best setting of the method. flags: other than BASE; columns: of its row."""
    best = flags_of(BEST.get(method, ""))
    if BASE["max_steps"] >= LONG:
        best["lr"] = 0.003
    if "model" in BASE:  # it has a learning rate of its own
        best.pop("lr", None)

    own = {"method": method, "variant": variant, "tau": tau, "seed": seed}
    rounds = {"tau": tau}
    if method == "minibatch":
        own["tau"] = 1
        rounds = {}
    if method == "a_edit":  # by the virtual clock: as many steps as in the other methods
        rounds = {"tau_time_s": tau, "virtual_clock": True}

    flags = BASE | {"method": method, "seed": seed} | rounds | best | flags
    return Run(own | (columns or {}), flags, ranks, timed_by)


def timing(method, tau=16, **flags) -> Run:
    """A short run for the time of a step: three rounds without evaluations and checkpoints. A slow
    link changes no loss, and a slow replica none if all replicas take the same steps. So the full
    runs, which give the losses, have neither."""
    steps = tau
    if method == "minibatch":
        steps = 4
    flags |= ROUNDS | {"max_steps": 3 * steps, "log_interval": steps}
    return training(method, TUNING_SEED, tau, columns={"seed": None}, **flags)


# ---- what EDiT buys ----


def draw_timelines(rows, path):
    """The rows of the variant "overlap" have a picture of their own."""
    others = [row for row in rows if not row["variant"]]
    draw(others, path, "Two replicas on a slow link, replica 1 half as fast")
    overlap = [row for row in rows if row["variant"]]
    draw_overlap(overlap, path.with_name("overlap.svg"))


@experiment("computing", picture=draw_timelines)
def timeline(seed):
    """When does each replica compute, and when does it wait?"""
    flags = ROUNDS | {
        "dtype": "fp32",
        "timeline": True,
        "log_interval": 8,
        "columns": {"seed": None},
        "ranks": 2,
    }
    slow = {"link_mbps": 60, "slow_replica": "1:2", "batch_size": 16} | flags
    yield training("minibatch", TUNING_SEED, 8, max_steps=16, **slow)
    for method in ("diloco", "edit", "co2", "streaming_diloco"):
        yield training(method, TUNING_SEED, 8, max_steps=40, **slow)
    # as long as 8 steps of the slow replica
    rounds = {"tau_time_s": 2.6, "virtual_clock": False, "max_steps": 60}
    yield training("a_edit", TUNING_SEED, 8, **slow, **rounds)

    # a link that is busy about as long as a forward of 64 sequences
    alike = {"link_mbps": 120, "batch_size": 64} | flags
    for method in ("diloco", "edit"):
        yield training(method, TUNING_SEED, 4, "overlap", max_steps=20, **alike)


@experiment(
    "val_loss",
    "local_bytes",
    panels=[Panel("tau", "val_loss", "tau, steps per round", log=True)],
)
def tau(seed):
    """How long may a round be?"""
    for tau in (4, 16, 64, 128):
        for method in LOCAL:
            yield training(method, seed, tau, **SHORT.get(tau, {}))


# ---- a slow link, a slow replica, a sick replica ----


def link_panel(mbps):
    return Panel(
        "seconds_curve",
        "val_loss_curve",
        "seconds after the warm-up",
        title=f"{mbps} Mbit/s",
        where={"link_mbps": mbps},
        log=True,
        first=1,
    )


@experiment("step_ms", "local_s", "val_loss", panels=[link_panel(100), link_panel(10)])
def link(seed):
    """How long does the training take over a slow link?"""
    methods = ("minibatch", "post_local_sgd", "slowmo", "co2", "noloco", *LOCAL)
    for method in methods:
        for mbps in (100, 10):
            slow = {"link_mbps": mbps}
            short = timing(method, 64, **slow)
            yield training(method, seed, 64, columns=slow, timed_by=short)


VIRTUAL = {"clock": "virtual"}


@experiment(
    "tokens_per_s",
    "val_loss",
    panels=[
        Panel(
            "slowness",
            "tokens_per_s",
            "slowness of a replica",
            "tokens per virtual second",
            where=VIRTUAL,
        ),
        Panel("slowness", "val_loss", "slowness of a replica", where=VIRTUAL),
    ],
)
def stragglers(seed):
    """What does one slow replica cost?"""
    for slowness in (1.0, 1.5, 2.0, 4.0):
        columns = {"slowness": slowness} | VIRTUAL
        slow = {"slow_replica": f"3:{slowness}"}
        for method in ("minibatch", "diloco", "edit"):
            short = timing(method, **slow, virtual_clock=True)
            yield training(method, seed, columns=columns, timed_by=short)
        for weighting in ("none", "times_steps", "norm_per_step"):
            flags = slow | {"step_weighting": weighting}
            if slowness == 1:  # all weights are equal
                flags = {}
            yield training("a_edit", seed, 16, f"weights {weighting}", columns, **flags)

    columns = {"slowness": 2.0, "clock": "real"}
    slow = {"slow_replica": "3:2.0"}
    yield training("edit", seed, columns=columns, timed_by=timing("edit", **slow))
    yield training("a_edit", seed, columns=columns, tau_time_s=1.0, virtual_clock=False, **slow)


# Replica 3 is sick for one or three rounds, which end at step 256, one round before the end. Before
# them EDiT has seen at least 11 healthy rounds.
FAST = "learning rate x 100"
SICK = {
    "none": {},
    FAST: {"scale_lr": "3:241:256:100"},
    "random tokens": {"random_tokens": "3:209:256"},
}
SICK_RUN = {"sync_warmup_steps": 32, "max_steps": 272, "eval_interval": 16, "eval_batches": 8}
# A replica with the wrong sign does its harm slowly: runs of BASE, sick in the last ten rounds.
LYING = {"none": {}, "wrong sign": {"flip": "3:289:448"}}
PARTS = {  # of EDiT's penalty
    "without elimination": {"anomaly_elimination": False},
    "only elimination": {"weighted_averaging": False, "pseudo_grad_clipping": False},
    "without weights": {"weighted_averaging": False},
    "only weights": {"anomaly_elimination": False, "pseudo_grad_clipping": False},
    "without clip": {"pseudo_grad_clipping": False},
    "only clip": {"anomaly_elimination": False, "weighted_averaging": False},
}


def sick_panel(disturbance, more="", **where):
    where["disturbance"] = disturbance
    title = disturbance + more
    return Panel("step_curve", "val_loss_curve", "steps", title=title, where=where, first=192)


def over_undisturbed(rows) -> list:
    same = ("method", "aggregate", "steps", "seed")
    for row, base in with_base(rows, same, disturbance="none"):
        row["excess"] = distance(row, base)
    return rows


@experiment(
    "excess",
    "val_loss",
    panels=[
        sick_panel(FAST, variant=""),
        sick_panel("random tokens"),
        sick_panel(FAST, ": EDiT's parts", method="edit"),
        sick_panel("wrong sign"),
    ],
    combine=over_undisturbed,
)
def penalty(seed):
    """What does EDiT's penalty do when a replica is sick?"""
    for disturbance, sick in SICK.items():
        columns = {"disturbance": disturbance, "steps": 272}
        for method in LOCAL:
            yield training(method, seed, columns=columns, **SICK_RUN, **sick)

    columns = {"disturbance": FAST, "steps": 272}
    for variant, parts in PARTS.items():
        yield training("edit", seed, 16, variant, columns, **SICK_RUN, **parts, **SICK[FAST])

    for disturbance, sick in LYING.items():
        columns = {"disturbance": disturbance, "steps": 448}
        for method in ("diloco", "edit"):
            yield training(method, seed, columns=columns, **sick)
        columns["aggregate"] = "flag"  # the default
        yield training("robust", seed, 16, "flag", columns, **sick)
        columns = columns | {"aggregate": "median"}
        yield training("robust", seed, 16, "median", columns, aggregate="median", **sick)


# ---- the frontier ----

WHOLE = (  # methods that send the whole model at once
    "post_local_sgd",
    "slowmo",
    "co2",
    "noloco",
    "diloco",
    "edit",
    "zero_one_adam",
    "sparse_loco",
    "eager",
    "robust",
)


@experiment(
    "val_loss",
    "over_minibatch",
    "sync_bytes",
    "fewer_bytes",
    "local_bytes",
    panels=[
        Panel("sync_bytes", "val_loss", "bytes over slow links, per rank", log=True, frontier=True),
        Panel("local_bytes", "val_loss", "bytes after the warm-up", log=True, frontier=True),
    ],
    combine=beside_minibatch,
)
def frontier(seed):
    """Which method loses least for its bytes?"""
    warmup = {"sync_warmup_steps": 32}
    yield training("minibatch", seed)
    yield training("minibatch", seed, variant="Muon", **MUON)
    yield training("top_k", seed, columns={"tau": 1}, **warmup)
    for tau in (4, 8, 16, 64):
        yield training("one_bit_edit", seed, tau, "Muon", **warmup, **ONE_BIT)
        for method in WHOLE:
            yield training(method, seed, tau, **warmup)
        for method in ("streaming_diloco", "streaming_edit"):
            yield training(method, seed, tau, **warmup, **SHORT.get(tau, {}))


RATES = ("lr 0.003", "lr 0.0045", "lr 0.006")
NESTEROV = (
    "lr 0.003 outer_lr 0.7 outer_momentum 0.8",
    "lr 0.0045 outer_lr 0.7 outer_momentum 0.8",
    "lr 0.0045 outer_lr 0.9 outer_momentum 0.7",
)
SETTINGS = {  # that `tune` tries, of each method the same number
    "minibatch": RATES,
    "post_local_sgd": RATES,
    "slowmo": (
        "lr 0.003 outer_lr 1.0 outer_momentum 0.5",
        "lr 0.0045 outer_lr 1.0 outer_momentum 0.5",
        "lr 0.0045 outer_lr 0.7 outer_momentum 0.7",
    ),
    "co2": (
        "lr 0.003 outer_lr 0.7 outer_momentum 0.2",
        "lr 0.0045 outer_lr 0.7 outer_momentum 0.2",
        "lr 0.0045 outer_lr 0.5 outer_momentum 0.2",
    ),
    "noloco": (
        "lr 0.003 outer_lr 0.9 outer_momentum 0.5",
        "lr 0.0045 outer_lr 0.9 outer_momentum 0.5",
        "lr 0.0045 outer_lr 0.9 outer_momentum 0.3",
    ),
    "diloco": NESTEROV,
    "streaming_diloco": NESTEROV,
    "edit": NESTEROV,
    "streaming_edit": NESTEROV,
    "zero_one_adam": RATES,
    "top_k": RATES,
    "robust": NESTEROV,
    "eager": (
        "lr 0.003 outer_lr 0.7 outer_momentum 0.0",
        "lr 0.0045 outer_lr 0.7 outer_momentum 0.0",
        "lr 0.0045 outer_lr 0.5 outer_momentum 0.0",
    ),
    "sparse_loco": (
        "lr 0.003 outer_lr 1.0",
        "lr 0.0045 outer_lr 1.0",
        "lr 0.0045 outer_lr 0.7",
    ),
}


@experiment("val_loss")
def tune(seed):
    """Which setting is the best one of each method?"""
    for method, settings in SETTINGS.items():
        for setting in settings:
            columns = {"setting": setting}
            yield training(method, TUNING_SEED, columns=columns, **flags_of(setting))


# ---- on paper ----


def scale_panel(model):
    return Panel(
        "gbit_per_s",
        "utilization",
        "Gbit/s between replicas",
        "compute utilization",
        title=f"{model[:-1]} billion parameters",
        where={"model": model},
        log=True,
        first=0.3,
    )


def planned(rows) -> list:
    """In place of the rows of runs."""
    return planner.rows()


@experiment(
    *planner.LEVELS,
    panels=[scale_panel(model) for model in planner.MODELS],
    combine=planned,
    summary=planner.needed,
)
def scale(seed):
    """On paper: how many Gbit/s between replicas does each compute utilization need?"""
    return []


if __name__ == "__main__":
    run_command("lab", main)
