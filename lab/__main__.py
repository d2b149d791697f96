"""The laboratory: experiments about the methods. Each is a question, runs of train.py, a picture.

    python -m lab                    # list the experiments
    python -m lab tau                # print the table; write tau.json, .md and .svg to lab/results/
    python -m lab tau --steps 96 --seeds 1             # tau_96.json: short runs, for a first look
    python -m lab frontier --steps 2000 --seeds 1 2    # frontier_2000.json
    python -m lab frontier --model 10m --gpu           # frontier_10m_gpu.json
    python -m lab --tables           # rewrite all tables and pictures from the JSON files

Runs are kept in out/lab/. A finished run is not repeated, even if only another experiment or the
JSON file has it. An interrupted run resumes from its last checkpoint. To add an experiment, write a
function that yields the runs of one seed, with @experiment (lab/runs.py) above it.

All runs train the tiny model on the built-in corpus, 2,048 tokens a step, on 4 replicas x 1 shard
unless they say otherwise. The outer step is the best one of `tune`, which has a seed of its own. So
`tune` comes first: python -m lab tune, and python -m lab tune --steps 2000 for longer runs. Methods
that it has not tried in this length with this optimizer have the default outer step.
"""

import json
import math

from config import run_command
from lab import planner
from lab.plot import Panel, draw_grid
from lab.rows import beside_minibatch, distance, grid, with_base
from lab.runs import BASE, RESULTS, Run, experiment, main
from lab.timeline import draw, draw_overlap

TUNING_SEED = 7

# Inner steps of all methods. From mini-batch: the best of six pairs in 2,000 steps.
INNER = {
    "AdamW": {"lr": 0.0045},
    "Muon": {"optimizer": "muon", "lr": 0.0045, "muon_lr": 0.01},
}
OUTER = ("1.0/0.0", "0.9/0.3", "0.7/0.5", "0.26/0.8", "0.5/0.8", "0.7/0.8")  # rate / momentum
LIKE = {"a_edit": "edit", "streaming_diloco": "streaming_edit"}  # have the same outer step
# The others: their default outer step is the best of three with tau 16 (lab/results/rates.md).
# 0/1 Adam and SparseLoCo have the best of six in 2,000 steps (rates_2000.md).
OTHERS = {
    "sparse_loco": {"outer_lr": 1.3},
    "zero_one_adam": {"tau_schedule": "2:96,4:192,8:384"},
    "eager": {"lr": 0.003},
    "robust": {"lr": 0.003},
}
LONG = 1000  # runs with so many steps have the outer steps of tune_2000.json

# Where time is measured: nothing but rounds.
ROUNDS = {"sync_warmup_steps": 0, "eval_interval": 10**6, "checkpoint_interval": 0}


def best_outer(method, tau, optimizer, variant="") -> str | None:
    """The outer step that `tune` has found, for this or the nearest tau. None: the default."""
    path = RESULTS / ("tune.json" if BASE["max_steps"] < LONG else "tune_2000.json")
    same = {"method": LIKE.get(method, method), "variant": variant, "optimizer": optimizer}
    rows = [row for row in json.loads(path.read_text()) if same.items() <= row.items()]
    if not rows:
        return None
    return min(rows, key=lambda row: (abs(math.log(row["tau"] / tau)), row["val_loss"]))["setting"]


def training(
    method,
    seed,
    tau=16,
    variant="",
    columns=None,
    ranks=4,
    optimizer="AdamW",
    outer=None,
    **flags,
) -> Run:
    """A run with the best settings. columns: of its row; outer: "0.7/0.8" in place of the best one;
    flags: other than BASE."""
    own = {"method": method, "variant": variant, "optimizer": optimizer, "tau": tau, "seed": seed}
    best = INNER[optimizer] | OTHERS.get(method, {})
    if "model" in BASE:  # it has a learning rate of its own
        best.pop("lr", None)
    if BASE.get("model") == "10m" and optimizer == "AdamW":  # the best of four, on TUNING_SEED
        best["lr"] = 0.0005

    rounds = {"tau": tau}
    if method == "minibatch":
        own["tau"] = 1
        rounds = {}
    if method == "a_edit":  # by the virtual clock: as many steps as in the other methods
        rounds = {"tau_time_s": tau, "virtual_clock": True}
    if method == "one_bit_edit":
        rounds["warmup_format"] = "int8"
    if method.startswith("streaming") and tau == 4:  # the delay is at most tau / fragments - 1
        rounds |= {"fragments": 2, "delay": 1}
    if outer := outer or best_outer(method, tau, optimizer):
        best["outer_lr"], best["outer_momentum"] = outer.split("/")

    flags = BASE | {"method": method, "seed": seed} | rounds | best | flags
    return Run(own | (columns or {}), flags, ranks)


# ---- what EDiT buys ----


def draw_timelines(rows, path):
    """The rows of the variant "overlap" have a picture of their own."""
    others = [row for row in rows if not row["variant"]]
    draw(others, path, "Two replicas on a slow link, replica 1 half as fast")
    overlap = [row for row in rows if row["variant"]]
    draw_overlap(overlap, path.with_name(path.name.replace("timeline", "overlap")))


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


@experiment("val_loss", "over_minibatch", "sync_bytes", "local_bytes", combine=beside_minibatch)
def first(seed):
    """The run of `make train`: what do other methods reach in it?"""
    # Its own flags, all defaults (tau 16), in place of BASE: --steps, --model and --gpu change only
    # the file's name.
    flags = {"shards": 2, "batch_size": 8, "sync_warmup_steps": 200}
    for method in ("minibatch", "diloco", "edit", "streaming_edit"):
        own = {"method": method, "seed": seed}
        yield Run(own | {"optimizer": "AdamW"}, own | flags)


@experiment(
    "val_loss",
    "over_minibatch",
    "local_bytes",
    combine=beside_minibatch,
)
def tau(seed):
    """How long may a round be?"""
    yield training("minibatch", seed)
    for tau in (4, 16, 64):
        for method in ("diloco", "edit"):
            yield training(method, seed, tau)


# ---- a slow link, a slow replica, a sick replica ----


@experiment("step_ms")
def link(seed):
    """How long does a step take over a slow link?"""
    blocking = ("minibatch", "post_local_sgd", "slowmo", "noloco", "diloco", "edit")
    for method in (*blocking, "co2", "streaming_diloco", "streaming_edit"):
        steps = 4 if method == "minibatch" else 64
        rounds = ROUNDS | {"max_steps": 3 * steps, "log_interval": steps}
        for mbps in (100, 10):
            columns = {"link_mbps": mbps, "seed": None}
            yield training(method, TUNING_SEED, 64, "", columns, link_mbps=mbps, **rounds)


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
    for slowness in (2.0, 4.0):
        columns = {"slowness": slowness} | VIRTUAL
        slow = {"slow_replica": f"3:{slowness}"}
        yield training("edit", seed, 16, "", columns, virtual_clock=True, **slow)
        for weighting in ("none", "norm_per_step"):
            slow["step_weighting"] = weighting
            yield training("a_edit", seed, 16, f"weights {weighting}", columns, **slow)

    columns = {"slowness": 2.0, "clock": "real"}
    slow = {"slow_replica": "3:2.0"}
    yield training("edit", seed, 16, "", columns, **slow)
    yield training("a_edit", seed, 16, "", columns, tau_time_s=1.0, virtual_clock=False, **slow)


# Replica 3 is sick for one or three rounds, which end at step 256, one round before the end. Before
# them EDiT has seen at least 11 healthy rounds.
FAST = "learning rate x 100"
SICK = {
    "none": {},
    FAST: {"scale_lr": "3:241:256:100"},
    "learning rate x 3": {"scale_lr": "3:209:256:3"},
    "random tokens": {"random_tokens": "3:209:256"},
}
SICK_RUN = {"sync_warmup_steps": 32, "max_steps": 272, "eval_interval": 16, "eval_batches": 8}
# A replica with the wrong sign does its harm slowly: longer runs, sick in the last ten rounds.
LYING_RUN = {"max_steps": 448, "eval_interval": 16}
LYING = {
    "none": LYING_RUN,
    "wrong sign": LYING_RUN | {"flip": "3:289:448"},
}
PARTS = {  # of EDiT's penalty
    "only elimination": {"weighted_averaging": False, "pseudo_grad_clipping": False},
    "only weights": {"anomaly_elimination": False, "pseudo_grad_clipping": False},
    "only clip": {"anomaly_elimination": False, "weighted_averaging": False},
}


def sick_panel(name):
    where = {"disturbance": name}
    return Panel("step_curve", "val_loss_curve", "steps", title=name, where=where, first=192)


def over_undisturbed(rows) -> list:
    same = ("method", "steps", "seed")
    for row, base in with_base(rows, same, disturbance="none"):
        row["excess"] = distance(row, base)
    return rows


@experiment(
    "excess",
    "val_loss",
    panels=[sick_panel(FAST), sick_panel("random tokens"), sick_panel("wrong sign")],
    combine=over_undisturbed,
)
def penalty(seed):
    """What does EDiT's penalty do when a replica is sick?"""
    for disturbance, sick in SICK.items():
        columns = {"disturbance": disturbance, "steps": 272}
        for method in ("diloco", "edit"):
            yield training(method, seed, columns=columns, **SICK_RUN, **sick)

    columns = {"disturbance": FAST, "steps": 272}
    for variant, parts in PARTS.items():
        yield training("edit", seed, 16, variant, columns, **SICK_RUN, **parts, **SICK[FAST])

    for disturbance, sick in LYING.items():
        columns = {"disturbance": disturbance, "steps": 448}
        for method in ("diloco", "edit", "robust"):
            yield training(method, seed, columns=columns, **sick)


# ---- the frontier ----

BITS = {"": {}, "2 bits": {"quantize": "two_bits"}, "4 bits": {"quantize": "e3m0"}}
POINTS = (("", 16, 2), ("2 bits", 16, 16))  # on the frontier: bits, tau, steps of the warm-up
PAIRED = (5, 6, 8, 9)  # seeds on which more methods train; on the first one all do


def coded(bits, seed, tau, steps):
    """One-bit EDiT with Muon and a warm-up of so many steps in 8 bits."""
    return training(
        "one_bit_edit",
        seed,
        tau,
        bits,
        {"warm-up": f"{steps} x int8"},
        optimizer="Muon",
        outer=best_outer("one_bit_edit", 16, "Muon", bits),
        sync_warmup_steps=steps,
        **BITS[bits],
    )


@experiment(
    "val_loss",
    "over_minibatch",
    "over_muon",
    "sync_bytes",
    "fewer_bytes",
    panels=[
        Panel("sync_bytes", "val_loss", "bytes over slow links, per rank", log=True, frontier=True),
    ],
    combine=beside_minibatch,
)
def frontier(seed):
    """Which method loses least for its bytes?"""
    yield training("minibatch", seed)
    yield training("minibatch", seed, optimizer="Muon")
    for bits, tau, steps in POINTS:
        yield coded(bits, seed, tau, steps)
    if seed not in PAIRED or "model" in BASE:
        return  # more seeds of what is compared most closely
    for method in ("diloco", "edit", "streaming_edit", "sparse_loco"):
        yield training(method, seed)
    yield training("zero_one_adam", seed, 16, "rounds that grow")
    yield training("edit", seed, optimizer="Muon")
    if seed > PAIRED[0]:
        return
    for method in "post_local_sgd slowmo co2 noloco streaming_diloco eager robust".split():
        yield training(method, seed)
    yield training("top_k", seed, columns={"tau": 1})


# More outer steps, of EDiT with AdamW alone, for the picture
CELLS = ("0.26/0.0", "0.26/0.5", "0.5/0.0", "0.5/0.5", "0.7/0.0", "1.0/0.5", "1.0/0.8")


@experiment(*OUTER, summary=grid, picture=draw_grid)
def tune(seed):
    """Which outer step is the best one, for each length of rounds?"""

    def runs(method, tau, settings=OUTER, variant="", **flags):
        for outer in settings:
            columns = {"setting": outer}
            yield training(method, TUNING_SEED, tau, variant, columns, outer=outer, **flags)

    short = BASE["max_steps"] < LONG
    for tau in (4, 16, 64):
        if tau == 4 and not short:
            continue
        for method in ("diloco", "edit", "streaming_edit", "one_bit_edit"):
            for optimizer in INNER:
                yield from runs(method, tau, optimizer=optimizer)
        if short:
            yield from runs("edit", tau, CELLS)
    if not short:
        for bits in ("2 bits", "4 bits"):
            yield from runs("one_bit_edit", 16, variant=bits, **BITS[bits], optimizer="Muon")


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
