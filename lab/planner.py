"""Compute utilization of every method, on paper: a simulated timeline of steps, layers and a link.

    compute               |forward 0 1 2|backward 2  1  0 |           |forward 0 1 2| ...
    link, mini-batch                              | 2 | 1 | 0 |         # forward waits for all
    link, EDiT                                            | 0 | 1 | 2 | # layer l waits for layer l

Assumptions:
(1) The M replicas have equal links and equal speed. At most one of them is slow: it takes
    `slowness` times as long for each layer. (--slow_replica sleeps after the step, so a recorded
    mini-batch hides less of its traffic.)
(2) The L layers are equal: each has 1/L of the parameters. A backward takes twice a forward.
(3) A replica has one link, without latency. It sends one layer after the other, first come, first
    served, and begins when all replicas have the layer. An all-reduce sends 2 (M-1)/M of a vector.
    For M = 2 this is an exchange with one partner, so NoLoCo has DiLoCo's timeline. Traffic inside
    a replica, outer steps and EDiT's norms take no time.
(4) An element takes 16 bits, 4 in the streaming methods and 1.125 in one_bit_edit, with its scales.
    This repository sends 32, 4.125 and 1.125.
(5) A round has H = 100 steps. Streaming methods: 3 layers per fragment, strided, one step of delay.
(6) Mini-batch sends a layer when its backward is done. The other methods here start after the step:
    the inner optimizer clips the gradient first, and its norm needs all layers.
(7) A-EDiT's rounds last as long as tau steps of a fast replica. A slow one takes tau / slowness
    steps, rounded up. The clock does not count the time of waiting.
(8) Two hops (one_bit_edit, M > 2): the link sends half of every layer, then the other halves.

A recorded run beside this simulation:

    torchrun --standalone --nproc_per_node 2 train.py --method edit --timeline --link_mbps 100 ...
    python -m lab.planner out/edit

explain.html computes the same in a browser, with the same names.

Source: the simulation is ours; models and grid are from arXiv 2501.18512. tests/test_planner.py
compares it with table 4 of that paper.
"""

import itertools
import math
import sys
from collections import defaultdict, namedtuple
from dataclasses import dataclass

from config import UserError, run_command
from lab.rows import read_run
from lab.timeline import read_timeline
from plumbing.simulate import FRAMING

H = 100  # inner steps per round
LEVELS = {"50%": 0.5, "80%": 0.8, "90%": 0.9, "95%": 0.95, "99%": 0.99}


# step_s: seconds of pure compute; step_tokens: of one replica
Model = namedtuple("Model", "parameters layers step_s step_tokens", defaults=[2**20])
MODELS = {"1b": Model(1e9, 24, 0.1), "10b": Model(1e10, 48, 0.8), "100b": Model(1e11, 108, 4.9)}
MORE_MODELS = {  # for explain.html: `make train`, eight GPUs, between the published models
    "tiny": Model(0.92e6, 4, 0.1, 2048),
    "124m": Model(124e6, 12, 0.5, 2**19),
    "7b": Model(7e9, 32, 0.6),
}
TOKENS_PER_PARAMETER = 20  # of a training: Hoffmann et al., arXiv 2203.15556

Span = namedtuple("Span", "name who layer begin end")  # who: 0, 1: slow replica, or "link"
Timeline = namedtuple("Timeline", "spans ends")  # ends: of the slow replica's rounds


@dataclass
class Schedule:
    every: int = H  # steps between two syncs
    bits: float = 16  # per element
    blocks: int = 0  # layers per fragment; 0: all
    delay: int = 0  # 0: the step after the sending one waits; 1: the step after that; ...
    early: bool = False  # a layer is sent when its backward is done, else after the step
    by_layer: bool = False  # layer l's forward waits for layer l, else the first for all
    by_clock: bool = False  # a slow replica takes fewer steps per round, else as many as others
    hops: int = 1  # of a mean over more than two replicas


def schedules(tau: int = H) -> dict:
    blocking = Schedule(tau)
    by_layer = Schedule(tau, by_layer=True)
    streaming = Schedule(tau, bits=4, blocks=3, delay=1)
    return {
        "minibatch": Schedule(1, early=True),
        "post_local_sgd": blocking,
        "slowmo": blocking,
        "diloco": blocking,
        "noloco": blocking,
        "co2": Schedule(tau, delay=tau),
        "edit": by_layer,
        "a_edit": Schedule(tau, by_layer=True, by_clock=True),
        "streaming_diloco": streaming,
        "streaming_edit": streaming,
        "one_bit_edit": Schedule(tau, bits=1.125, by_layer=True, hops=2),
    }


SCHEDULES = schedules()
SENT_BITS = {16: 32, 4: 4.125, 1.125: 1.125}  # above -> in this repository


def sent_bytes(plan: Schedule, model: Model, replicas=2) -> float:
    """Of a replica per round. Each of its N ranks sends 1/N of them."""
    return 2 * (replicas - 1) / replicas * model.parameters * plan.bits / 8


def steps_per_round(plan: Schedule, slowness) -> int:
    """Of a replica that is slower than the others, or not (1)."""
    return math.ceil(plan.every / slowness) if plan.by_clock else plan.every


def simulate(plan: Schedule, model: Model, gbit_per_s, replicas=2, slowness=1.0, rounds=3):
    """The Timeline of one replica of each speed and of the link."""
    L = model.layers
    hops = plan.hops if replicas > 2 else 1
    hop_s = sent_bytes(plan, model, replicas) * 8 / L / (gbit_per_s * 1e9) / hops  # of a layer
    F = min(-(-L // (plan.blocks or L)), plan.every)
    fragments = {(p + 1) * plan.every // F - 1: range(p, L, F) for p in range(F)}  # by step
    speeds = sorted({1.0, slowness})
    taken = [steps_per_round(plan, slow) for slow in speeds]
    now = [0.0] * len(speeds)
    free = 0.0  # when the link has sent what is queued
    waits = defaultdict(dict)  # step -> layer -> (when all replicas have it, when it arrives)
    timeline = Timeline([], [])
    for step in range(rounds * plan.every):
        due = waits.pop(step, {})
        for i, slow in enumerate(speeds):
            if step % plan.every < taken[i]:
                now[i] = compute(timeline.spans, i, now[i], due, model.step_s * slow / 3, L)

        sent = fragments.get(step % plan.every, ())
        if plan.early:
            sent = reversed(sent)
        for l in [*sent] * hops:
            ready = 0.0
            for i, slow in enumerate(speeds):
                after = 2 * model.step_s * slow / 3 / L * l  # the backward of the layers below
                ready = max(ready, now[i] - after * plan.early)
            begin = max(free, ready)
            free = begin + hop_s
            timeline.spans.append(Span("link", "link", l, begin, free))
            waits[step + 1 + plan.delay][l * plan.by_layer] = ready, free
        if (step + 1) % plan.every == 0:
            timeline.ends.append(now[-1])
    return timeline


def compute(spans: list, replica, now, due: dict, forward_s, L) -> float:
    """A step that begins now: its spans, with waits; returns its end."""
    done = 0  # layers whose forward has ended
    for l, (ready, arrival) in due.items():
        begin = now
        now += (l - done) * forward_s / L
        done = l
        all_ready = max(now, ready)
        arrived = max(now, arrival)
        spans.append(Span("forward", replica, l, begin, now))
        spans.append(Span("wait for others", replica, l, now, all_ready))
        spans.append(Span("wait for link", replica, l, all_ready, arrived))
        now = arrived
    forward_ends = now + (L - done) * forward_s / L
    end = forward_ends + 2 * forward_s
    spans.append(Span("forward", replica, L, now, forward_ends))
    spans.append(Span("backward", replica, L, forward_ends, end))
    return end


def round_seconds(*arguments) -> float:
    """Of a steady round, with the arguments of simulate(): the third, as all that follow."""
    ends = simulate(*arguments).ends
    return ends[2] - ends[1]


def shares(plan: Schedule, model: Model, gbit_per_s, replicas=2, slowness=1.0) -> list:
    """Compute time / wall time, 0 to 1, of a steady round: a fast replica's and the slow one's."""
    round_s = round_seconds(plan, model, gbit_per_s, replicas, slowness)
    found = []
    for slow in (1.0, slowness):
        busy_s = steps_per_round(plan, slow) * model.step_s * slow
        found.append(busy_s / round_s)
    return found


def utilization(plan: Schedule, model: Model, gbit_per_s, replicas=2, slowness=1.0) -> float:
    """The mean of these shares over all replicas."""
    fast, slow = shares(plan, model, gbit_per_s, replicas, slowness)
    return ((replicas - 1) * fast + slow) / replicas


def training_seconds(plan: Schedule, model: Model, gbit_per_s, replicas=2, slowness=1.0) -> float:
    """Of TOKENS_PER_PARAMETER."""
    steps = (replicas - 1) * steps_per_round(plan, 1) + steps_per_round(plan, slowness)
    rounds = TOKENS_PER_PARAMETER * model.parameters / (steps * model.step_tokens)
    return rounds * round_seconds(plan, model, gbit_per_s, replicas, slowness)


def rows(schedules: dict = SCHEDULES) -> list:
    """lab/results/scale.json: every model and method at 0.1 to 1000 Gbit/s, rising."""
    links = [round(10 ** (-1 + 4 * k / 49), 3) for k in range(50)]  # the paper's: of ratio 1.207
    found = []
    for name, method, gbit in itertools.product(MODELS, schedules, links):
        used = round(utilization(schedules[method], MODELS[name], gbit), 4)
        row = {"model": name, "method": method, "gbit_per_s": gbit, "utilization": used}
        found.append(row)
    return found


def needed(rows) -> list:
    """Rows of the table: the lowest rate, Gbit/s, that reaches each level, for every model and
    method; of methods with equal rates only the first."""
    found = defaultdict(dict)
    for row in rows:
        for name, level in LEVELS.items():
            if row["utilization"] >= level:
                found[row["model"], row["method"]].setdefault(name, row["gbit_per_s"])
    different = {}
    for (model, method), rates in found.items():
        row = {"model": model, "method": method} | rates
        different.setdefault((model, *rates.values()), row)
    return list(different.values())


# ---- beside a recorded run ----


def compare(folder):
    """Print the share of computing of each replica of a run with --timeline: as it was recorded,
    and as the simulation predicts it from the time of a step. (Of the streaming methods it knows
    no --fragments.) Raises UserError for a method that it does not know."""
    config = read_run(folder)["config"]
    if config["method"] not in SCHEDULES:
        raise UserError(f"{folder}: {config['method']} has no schedule in lab/planner.py")
    recorded = read_timeline(folder)
    slow_replica, _, factor = config["slow_replica"].partition(":")
    step_s = min(row["step_s"] for row in recorded)
    tau = config.get("tau", 1)
    if "tau_time_s" in config:
        tau = math.ceil(config["tau_time_s"] / step_s)
    plan = schedules(tau)[config["method"]]
    plan.bits = SENT_BITS[plan.bits] * FRAMING
    model = Model(config["n_params"], config["n_layer"], step_s)
    gbit_per_s = (config["link_mbps"] or math.inf) / 1000
    fast, slow = shares(plan, model, gbit_per_s, len(recorded), float(factor or 1))
    for row in recorded:
        predicted = slow if str(row["replica"]) == slow_replica else fast
        print(f"{folder}, replica {row['replica']}: measured {row['computing']:.1%}", end=", ")
        print(f"predicted {predicted:.1%}")


def main():
    for folder in sys.argv[1:]:
        compare(folder)


if __name__ == "__main__":
    run_command("planner", main)
