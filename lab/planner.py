r"""Compute utilization of every method, on paper: a simulated timeline of steps, layers and a link.

    compute               |forward 0 1 2|backward 2  1  0 |           |forward 0 1 2| ...
    link, minibatch                              | 2 | 1 | 0 |         # forward waits for all
    link, EDiT                                            | 0 | 1 | 2 | # layer l waits for layer l

Assumptions:
(1) The M replicas have equal links and equal speed. At most one of them is slow: it takes
    `slowness` times as long for each layer. (--slow_replica sleeps after the step, so a recorded
    minibatch hides less of its traffic.)
(2) The L layers are equal: each has 1/L of the parameters. A backward takes twice a forward.
(3) A replica has one link, without latency. It sends one layer after the other, first come, first
    served, and begins when all replicas have the layer. An all-reduce sends 2 (M-1)/M of a vector.
    For M = 2 this is an exchange with one partner, so NoLoCo has DiLoCo's timeline. Traffic inside
    a replica, outer steps and EDiT's norms take no time.
(4) An element takes 16 bits, 4 in the streaming methods and 1.125 in one_bit_edit, with its scales.
    This repository sends 32, 4.125 and 1.125.
(5) Streaming methods: 3 layers per fragment, strided, one step of delay. In the tables a round has
    H = 100 steps.
(6) minibatch sends a layer when its backward is done. The other methods here start after the step:
    the inner optimizer clips the gradient first, and its norm needs all layers.
(7) A-EDiT's rounds last as long as tau steps of a fast replica. A slow one takes tau / slowness
    steps, rounded up. The clock does not count the time of waiting.
(8) Two hops (one_bit_edit, M > 2): the link sends the layers' halves in the order of
    relatives/one_bit_edit.py. Sending a layer never waits for the forward: what is in flight is
    not limited to two layers. (For equal layers that makes no difference.)

    python -m lab.planner --out scale    # the table; scale.csv and scale.svg: MODELS, all rates

A recorded run beside this simulation:

    torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 2 \
        train.py --method edit --timeline --link_mbps 100 ...
    python -m lab.planner out/edit

explain.html computes the same in a browser, with the same names and three more models.

Source: the simulation is ours; models and grid are from arXiv 2501.18512. tests/test_planner.py
compares it with table 4 of that paper.
"""

import csv
import math
import sys
from collections import defaultdict, namedtuple
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from config import Parser, UserError, run_command
from lab import plot
from lab.rows import METHODS, by_method, read_run
from lab.timeline import read_timeline
from plumbing.simulate import FRAMING, read_disturbance

H = 100  # inner steps per round
DRAWN = ("minibatch", "edit", "streaming_edit", "one_bit_edit")
LEVELS = {"50%": 0.5, "80%": 0.8, "90%": 0.9, "95%": 0.95, "99%": 0.99}


Model = namedtuple("Model", "parameters layers step_s")  # step_s: seconds of pure compute
MODELS = {"1b": Model(1e9, 24, 0.1), "10b": Model(1e10, 48, 0.8), "100b": Model(1e11, 108, 4.9)}

Span = namedtuple("Span", "name who layer begin end")  # who: 0: fast, 1: slow replica, or "link"


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


def schedules(tau=H) -> dict:
    blocking = Schedule(tau)
    streaming = Schedule(tau, bits=4, blocks=3, delay=1)
    return {
        "minibatch": Schedule(1, early=True),
        "post_local_sgd": blocking,
        "slowmo": blocking,
        "diloco": blocking,
        "noloco": blocking,
        "co2": Schedule(tau, delay=tau),
        "edit": Schedule(tau, by_layer=True),
        "a_edit": Schedule(tau, by_layer=True, by_clock=True),
        "streaming_diloco": streaming,
        "streaming_edit": streaming,
        "one_bit_edit": Schedule(tau, bits=1.125, by_layer=True, hops=2),
    }


SCHEDULES = schedules()
SENT_BITS = {16: 32, 4: 4.125, 1.125: 1.125}  # above -> in this repository


def sent_bytes(plan, model, replicas=2) -> float:
    """What a replica sends in a round. Each of its N ranks sends 1/N of it."""
    return 2 * (replicas - 1) / replicas * model.parameters * plan.bits / 8


def steps_per_round(plan, slowness) -> int:
    """Steps of a replica in a round; each takes it `slowness` times as long as the fast ones."""
    return math.ceil(plan.every / slowness) if plan.by_clock else plan.every


def simulate(plan, model, gbit_per_s, replicas=2, slowness=1.0, rounds=3):
    """The spans of a fast replica, of the slow one and of the link, and the times at which the
    slow one's rounds end. plan: a Schedule; model: a Model."""
    L = model.layers
    hops = plan.hops if replicas > 2 else 1
    hop_s = sent_bytes(plan, model, replicas) * 8 / L / (gbit_per_s * 1e9) / hops  # of a layer
    F = min(math.ceil(L / (plan.blocks or L)), plan.every)
    fragments = {(p + 1) * plan.every // F - 1: range(p, L, F) for p in range(F)}  # by step
    step_s = [model.step_s, model.step_s * slowness]
    steps = [plan.every, steps_per_round(plan, slowness)]
    now = [0.0, 0.0]  # of the fast and of the slow replica
    free = 0.0  # when the link has sent what is queued
    due = defaultdict(dict)  # step -> layer -> (when all replicas have it, when it arrives)
    spans = []
    ends = []
    for step in range(rounds * plan.every):
        arrivals = due.pop(step, {})
        for i in range(2):
            if step % plan.every < steps[i]:
                spans += compute(i, now[i], arrivals, step_s[i] / 3, L)
                now[i] = spans[-1].end

        sent = fragments.get(step % plan.every, ())
        if plan.early:
            sent = reversed(sent)
        for l in order_on_link(list(sent), hops):
            below = 2 / 3 * l / L * plan.early  # the backward of the layers below, in steps
            ready = max(now[0] - below * step_s[0], now[1] - below * step_s[1])
            begin = max(free, ready)
            free = begin + hop_s
            spans.append(Span("link", "link", l, begin, free))
            due[step + 1 + plan.delay][l * plan.by_layer] = ready, free
        if (step + 1) % plan.every == 0:
            ends.append(now[1])
    return spans, ends


def order_on_link(layers, hops) -> list:
    """One hop: the layers. Two: the first halves of layers 0 and 1, the second half of layer 0, the
    first half of layer 2, the second half of layer 1, ..."""
    if hops == 1:
        return layers
    order = layers[:1]
    for one, next in pairwise(layers):
        order += [next, one]
    return order + layers[-1:]


def compute(replica, now, arrivals, forward_s, L):
    """The spans of a step that begins now, with waits. The last one is its backward."""
    done = 0  # layers whose forward has ended
    for l, (ready, arrival) in arrivals.items():
        forward_ends = now + (l - done) * forward_s / L
        all_ready = max(forward_ends, ready)
        arrived = max(all_ready, arrival)
        yield Span("forward", replica, l, now, forward_ends)
        yield Span("wait for others", replica, l, forward_ends, all_ready)
        yield Span("wait for link", replica, l, all_ready, arrived)
        now = arrived
        done = l
    forward_ends = now + (L - done) * forward_s / L
    yield Span("forward", replica, L, now, forward_ends)
    yield Span("backward", replica, L, forward_ends, forward_ends + 2 * forward_s)


def costs(plan, model, gbit_per_s, replicas=2, slowness=1.0) -> dict:
    """What a steady round costs (the third one; all that follow are like it):

    round_s      its seconds
    shares       compute time / wall time, 0 to 1, of a fast replica and of the slow one
    utilization  the mean of these shares over all replicas
    """
    spans, ends = simulate(plan, model, gbit_per_s, replicas, slowness)
    round_s = ends[2] - ends[1]
    fast = plan.every * model.step_s / round_s
    slow = steps_per_round(plan, slowness) * model.step_s * slowness / round_s
    return {
        "round_s": round_s,
        "shares": [fast, slow],
        "utilization": ((replicas - 1) * fast + slow) / replicas,
    }


def utilization(*arguments) -> float:
    return costs(*arguments)["utilization"]


def rows(schedules=SCHEDULES) -> list:
    """lab/results/scale.json: every model and method at 0.1 to 1000 Gbit/s, rising."""
    links = [round(10 ** (-1 + 4 * k / 49), 3) for k in range(50)]  # the paper's: of ratio 1.207
    found = []
    for name, model in MODELS.items():
        for method, plan in schedules.items():
            for gbit in links:
                row = {"model": name, "method": method, "gbit_per_s": gbit}
                row["utilization"] = round(utilization(plan, model, gbit), 4)
                found.append(row)
    return found


def needed(rows) -> list:
    """Rows of the table: the lowest rate, Gbit/s, that reaches each level, for every model and
    method; of methods with equal rates only the first."""
    found = defaultdict(dict)
    for row in rows:
        for name, level in LEVELS.items():
            if row["utilization"] >= level:
                rate = float(f"{row['gbit_per_s']:.3g}")
                found[row["model"], row["method"]].setdefault(name, rate)
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
    if config.get("virtual_clock"):
        raise UserError(f"{folder}: its times are virtual (--virtual_clock)")
    recorded = read_timeline(folder)
    step_s = min(row["step_s"] for row in recorded)
    tau = config.get("tau", 1)
    if "tau_time_s" in config:
        tau = math.ceil(config["tau_time_s"] / step_s)
    plan = schedules(tau)[config["method"]]
    plan.bits = SENT_BITS[plan.bits] * FRAMING
    model = Model(config["n_params"], config["n_layer"], step_s)
    gbit_per_s = (config["link_mbps"] or math.inf) / 1000
    slow = read_disturbance(SimpleNamespace(**config), "slow_replica", len(recorded))
    fast_and_slow = costs(plan, model, gbit_per_s, len(recorded), slow["F"])["shares"]
    for row in recorded:
        predicted = fast_and_slow[row["replica"] == slow["R"]]
        measured = f"{folder}, replica {row['replica']}: measured {row['computing']:.1%}"
        print(f"{measured}, predicted {predicted:.1%}")


# ---- the command line ----


def table(rows) -> str:
    """Markdown."""
    lines = [["method", "model", *LEVELS], ["---"] * (2 + len(LEVELS))]
    for row in by_method(needed(rows)):
        rates = [f"{row[level]:g}" if level in row else "" for level in LEVELS]
        lines.append([METHODS[row["method"]][0], row["model"], *rates])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(found, path):
    """The rows as PATH.csv, and those of four methods with one model as PATH.svg."""
    panel = plot.Panel(
        "gbit_per_s", "utilization", "Gbit/s between replicas", "compute utilization",
        log=True, first=0.3,
    )  # fmt: skip
    drawn = []
    for row in found:
        if row["method"] in DRAWN and row["model"] == "10b":
            drawn.append(row | {"variant": ""})
    plot.draw(drawn, panel, path.with_suffix(".svg"))
    with open(path.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, found[0])
        writer.writeheader()
        writer.writerows(found)


def main(argv):
    parser = Parser(prog="python -m lab.planner", description="Compute utilization, on paper.")
    parser.add_argument("runs", nargs="*", metavar="FOLDER", help="a run with --timeline")
    parser.add_argument("--out", help="write OUT.csv and OUT.svg: utilization over Gbit/s")
    args = parser.parse_args(argv)
    for folder in args.runs:
        compare(folder)
    if not args.runs:
        found = rows()
        print("Gbit/s between replicas for a compute utilization of\n")
        print(table(found))
        if args.out:
            write(found, Path(args.out))


if __name__ == "__main__":
    run_command("planner.py", lambda: main(sys.argv[1:]))
