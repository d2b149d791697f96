"""Write edit_rounds.json, EDiT's conformance vectors, with plain/edit.py in fp64.

    python examples/make_edit_rounds.py

Three replicas and four layers of 2 to 4 elements. The pseudo-gradients d_i come from a seed; what
happens to them is in EVENTS, so that every branch of every equation is taken. check_edit.py says
what the file holds.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
from edit import PenaltyConfig
from plain.edit import EDiT, anomaly_limit

ROUNDS = 25  # the last one has limits again where they started anew in round 13
SIZES = [2, 3, 4, 3]  # elements of the layers
NORMS = [0.4, 2.0, 12.0, 1.0]  # of d_i in each layer, about. phi is 10: the third mean is clipped
JITTER = [0.2, 0.2, 0.02, 0.002]  # of the last layer so small that sigma has its floor
ALL = (0, 1, 2)  # replicas, or layers
EVENTS = [  # round (from 0), replicas, layers, factor of d_i
    (2, [1], [1], np.inf),  # flagged, although there are no limits yet
    (11, [1], [0, 1, 2, 3], 40.0),  # replica 1 explodes
    (12, [0], [3], 1.1),  # above mean + 3 sigma, but for the floor of sigma
    (12, [2], [0], np.nan),
    (13, [0], [1], 0.01),  # a small norm is no anomaly
    (13, ALL, [0], 30.0),  # a layer that all lose: its limits start anew
    (14, ALL, [0], 30.0),  # so now its norms are accepted
    (15, ALL, [1], 30.0),
    (15, [0], [1], np.nan),  # all lose it; that clears the statistics of replicas 1 and 2 only
    (16, ALL, [1], 30.0),  # so replica 0 is flagged, and the others are not
]


class Recorded(EDiT):
    """Takes given pseudo-gradients, and keeps the means of layers."""

    def d(self):
        return self.given

    def penalized_step(self, l, dbar, verdict):
        self.means.append(dbar)
        super().penalized_step(l, dbar, verdict)

    def row(self):
        """What sync() returns."""
        verdicts = self.verdicts
        self.verdicts = []
        return verdicts


def make_inputs() -> list:
    """d[round][replica]: a vector of all layers. Three decimals, so that the file is small."""
    draw = np.random.default_rng(1)
    rounds = []
    for round in range(ROUNDS):
        common = [draw.standard_normal(size) for size in SIZES]  # so that means are not small
        replicas = []
        for i in ALL:
            layers = []
            for size, norm, jitter, mean in zip(SIZES, NORMS, JITTER, common):
                direction = mean + 0.3 * draw.standard_normal(size)
                length = norm * (1 + jitter * draw.standard_normal())
                layers.append(direction / np.linalg.norm(direction) * length)
            for when, who, where, factor in EVENTS:
                if when == round and i in who:
                    for l in where:
                        layers[l] = layers[l] * factor
            replicas.append(np.round(np.concatenate(layers), 3))
        rounds.append(replicas)
    return rounds


def limits(method) -> list:
    """Before the round, (M, L)."""
    f = method.f
    warmup = f.anomaly_warmup_rounds
    rows = []
    for i in ALL:
        row = []
        for samples in method.samples:
            known = len(samples[i]) >= warmup
            row.append(anomaly_limit(samples[i], warmup, f) if known else np.inf)
        rows.append(row)
    return rows


def writable(value):
    """Nested lists of numbers; JSON has no NaN and no infinity, so those are strings."""
    if isinstance(value, (list, tuple)):
        return [writable(v) for v in value]
    if torch.is_tensor(value) or isinstance(value, np.ndarray):
        return writable(value.tolist())
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return float(value) if np.isfinite(value) else str(value)


def make_rounds() -> dict:
    f = PenaltyConfig()
    ends = np.cumsum(SIZES).tolist()
    layers = [slice(end - size, end) for size, end in zip(SIZES, ends)]
    start = torch.linspace(-1, 1, ends[-1], dtype=torch.float64)
    replicas = [SimpleNamespace(x=start.clone(), layers=layers) for _ in ALL]
    method = Recorded(f, replicas, N=1)
    method.begin()

    def by_layer(vector):
        return [vector[layer] for layer in layers]

    rounds = []
    for d in make_inputs():
        method.given = [torch.from_numpy(d_i) for d_i in d]
        method.means = []
        before = limits(method)
        verdicts = method.sync()
        found = {
            "d": [by_layer(d_i) for d_i in d],
            "norms": np.array([verdict.norms for verdict in verdicts]).T,
            "limits": before,
            "flags": np.array([verdict.flagged for verdict in verdicts]).T,
            "weights": np.array([verdict.w for verdict in verdicts]).T,
            "dbar": method.means,
            "clip": [verdict.clip for verdict in verdicts],
            "momentum": by_layer(method.b.clone()),
            "anchor": by_layer(method.a.clone()),
        }
        rounds.append({name: writable(value) for name, value in found.items()})
    return {"config": vars(f), "anchor": writable(by_layer(start)), "rounds": rounds}


def as_text(vectors) -> str:
    """JSON with a line for each round."""
    lines = [json.dumps(round) for round in vectors["rounds"]]
    head = [f'"{name}": {json.dumps(vectors[name])}' for name in ("config", "anchor")]
    return "{" + ",\n".join(head) + ',\n"rounds": [\n' + ",\n".join(lines) + "\n]}\n"


if __name__ == "__main__":
    (FOLDER / "edit_rounds.json").write_text(as_text(make_rounds()))
