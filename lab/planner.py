"""Compute utilization of every method, on paper: a simulated timeline of steps, layers and a link.

    compute               |forward 0 1 2|backward 2  1  0 |           |forward 0 1 2| ...
    link, mini-batch                              | 2 | 1 | 0 |         # forward waits for all
    link, EDiT                                            | 0 | 1 | 2 | # layer l waits for layer l

Assumptions:
(1) M = 2 replicas. An all-reduce then sends as much as an exchange with one partner, so NoLoCo has
    DiLoCo's timeline. A-EDiT's replicas are equally fast.
(2) The L layers are equal: each has 1/L of the parameters. A backward takes twice a forward.
(3) A replica has one link. It sends one layer after the other, first come, first served, without
    latency. Traffic inside a replica, outer steps and EDiT's norms take no time.
(4) An element takes 16 bits, and 4 in the streaming methods. This repository sends 32 and 4.1.
(5) A round has H = 100 steps. Streaming methods: 3 layers per fragment, strided, one step of delay.
(6) Mini-batch sends a layer when its backward is done. The other methods here start after the step:
    the inner optimizer clips the gradient first, and its norm needs all layers.

Source: the simulation is ours; models and grid are from arXiv 2501.18512. tests/test_planner.py
compares it with table 4 of that paper.
"""

import itertools
from collections import defaultdict, namedtuple
from dataclasses import dataclass

H = 100  # inner steps per round
LEVELS = {"50%": 0.5, "80%": 0.8, "90%": 0.9, "95%": 0.95, "99%": 0.99}


Model = namedtuple("Model", "parameters layers step_s")  # step_s: seconds of pure compute
MODELS = {"1b": Model(1e9, 24, 0.1), "10b": Model(1e10, 48, 0.8), "100b": Model(1e11, 108, 4.9)}


@dataclass
class Schedule:
    every: int = H  # steps between two syncs
    bits: int = 16  # per element
    blocks: int = 0  # layers per fragment; 0: all
    delay: int = 0  # 0: the step after the sending one waits; 1: the step after that; ...
    early: bool = False  # a layer is sent when its backward is done, else after the step
    by_layer: bool = False  # layer l's forward waits for layer l, else the first for all


SCHEDULES = {
    "minibatch": Schedule(every=1, early=True),
    **dict.fromkeys(["post_local_sgd", "slowmo", "diloco", "noloco"], Schedule()),
    "co2": Schedule(delay=H),
    **dict.fromkeys(["edit", "a_edit"], Schedule(by_layer=True)),
    **dict.fromkeys(["streaming_diloco", "streaming_edit"], Schedule(blocks=3, delay=1, bits=4)),
}


def utilization(plan: Schedule, model: Model, gbit_per_s) -> float:
    """Compute time / wall time, 0 to 1, of a steady round."""
    L = model.layers
    forward_s = model.step_s / 3
    layer_s = forward_s / L
    wire_s = model.parameters / L * plan.bits / (gbit_per_s * 1e9)  # a layer on the link
    F = -(-L // (plan.blocks or L))
    fragments = {(p + 1) * plan.every // F - 1: range(p, L, F) for p in range(F)}  # by step
    waits = defaultdict(dict)  # step -> layer -> time of arrival
    now = free = 0.0  # free: when the link has sent what is queued
    for step in range(3 * plan.every):  # the third round is like all that follow
        if step == 2 * plan.every:
            start = now
        for l, arrival in waits[step].items():
            now = max(now, arrival - l * layer_s)  # to wait at layer l is to start later
        now += forward_s
        sent = fragments.get(step % plan.every, ())
        if plan.early:
            sent = reversed(sent)
        for l in sent:
            done = now + 2 * forward_s
            if plan.early:
                done = now + 2 * layer_s * (L - l)
            free = max(free, done) + wire_s
            due = waits[step + 1 + plan.delay]
            due[l * plan.by_layer] = free
        now += 2 * forward_s
    return plan.every * model.step_s / (now - start)


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
