"""Does an EDiT compute what this project's EDiT computes? Conformance vectors, with numpy alone.

    python check_edit.py FOUND.json [TOLERANCE]     # 1e-12; for float32 give 1e-5

Copy this file and edit_rounds.json, beside your implementation: torchft, JAX, Megatron, a fork. The
file holds 25 rounds of three replicas and four layers, made in fp64 by plain/edit.py, the readable
reference (examples/make_edit_rounds.py). In them a replica explodes, norms are NaN or infinite,
means are clipped, one norm is very small, and all replicas lose a layer, so that every branch of
every equation is taken. The first equation that differs is named, with its round.

    config          the penalty's settings: delta, alpha, phi, outer lr and momentum
    anchor          before the first round: a list for each layer
    rounds[r]       d        what goes in: d[i][l], the pseudo-gradient of replica i and layer l
                    norms, limits, flags, weights            (M, L), of all replicas
                    dbar, momentum, anchor                   a list for each layer
                    clip                                     (L,), the factor of dbar

Limits are those that the round's norms are compared with; "inf" where there is none yet. Momentum
and anchor are those after the round. All that is not finite is a string, as in "nan".

How to feed your implementation. Make three replicas with four layers of these sizes, with `anchor`
as their parameters and with the settings of `config`. There is no training. In each round

    1. set the parameters of replica i to anchor - d_i; or give d_i to your equations, if you can
    2. sync
    3. note what you can see. Names may be missing: the anchor alone shows whether something is
       wrong, and each name more shows better what.

In Python, sync(d) does this for one round and returns {name: value}:

    from check_edit import first_difference, read_vectors
    vectors = read_vectors()
    edit = MyEDiT(vectors["anchor"], **vectors["config"])
    print(first_difference(edit.sync, vectors) or "equal")

In another language or over several processes: write a list with such an object for each round as
JSON, and give its name to this program. It exits with 1 if something differs.

What the vectors do not say: who sends what when, precision, rounds of unequal length (A-EDiT).
The order of checks within a round is the order of the equations. A wrong update of the statistics
shows in the limits of a later round.
"""

import json
import sys
from pathlib import Path

import numpy as np

EQUATIONS = {
    "norms": "G_i = ||d_i||",
    "limits": "limit_i = mean_i + delta sigma_i; or the statistics of an earlier round",
    "flags": "flag i if G_i > limit_i, or if G_i is not finite",
    "weights": "w_i = exp(-G_i) / sum_j exp(-G_j) over the unflagged; 0 if all are flagged",
    "dbar": "dbar = sum_i w_i d_i; flagged ones are left out, because 0 * NaN is NaN",
    "clip": "min(1, phi / (||dbar|| + 1e-6))",
    "momentum": "b <- mu b + dhat; unchanged if all are flagged",
    "anchor": "anchor <- anchor - lr (dhat + mu b); unchanged if all are flagged",
}


def read_vectors(path=Path(__file__).with_name("edit_rounds.json")) -> dict:
    return json.loads(Path(path).read_text())


def numbers(value) -> np.ndarray:
    """One vector of all numbers in nested lists, arrays or tensors. "nan" becomes NaN."""
    if isinstance(value, (list, tuple)):
        parts = [numbers(v) for v in value]
        return np.concatenate(parts)
    return np.asarray(value, dtype=float).reshape(-1)


def first_difference(sync, vectors, tolerance=1e-12) -> str | None:
    """The first equation whose numbers differ by more than the tolerance, absolute and relative;
    None if there is none. sync(d): see above."""
    seen = set()
    for r, expected in enumerate(vectors["rounds"]):
        d = [[numbers(layer) for layer in replica] for replica in expected["d"]]
        found = sync(d)
        for name, equation in EQUATIONS.items():
            if name not in found:
                continue
            seen.add(name)
            a, b = numbers(found[name]), numbers(expected[name])
            if a.shape != b.shape:
                return f"round {r}: {name} has {a.size} numbers, not {b.size}"
            same = np.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
            if not same.all():
                k = np.argmin(same)
                return f"round {r}: {name}: {a[k]} is not {b[k]} (number {k}). Check {equation}"
    return None if seen else f"nothing was compared: name something of {', '.join(EQUATIONS)}"


def main(argv) -> int:
    if len(argv) not in (1, 2):
        print(__doc__)
        return 2
    rounds = iter(json.loads(Path(argv[0]).read_text()))
    vectors = read_vectors()
    difference = first_difference(lambda d: next(rounds), vectors, *map(float, argv[1:]))
    print(difference or f"equal in {len(vectors['rounds'])} rounds")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
