"""Muon's step, with singular values in place of Newton-Schulz iterations.

X <- a X + (b A + c A A) X with A = X X^T leaves the singular vectors of X as they are, and a
singular value s becomes a s + b s^3 + c s^5. So the plain version decomposes the momentum and
iterates on its singular values. The matrices of all layers but the first and the last take this
step, all else AdamW's (replica.py).
Sharded twin: optimizer.py, which iterates on whole matrices that it collects from shards.
Source: Muon (Jordan et al., 2024); the coefficients are MuLoCo's, arXiv 2505.23725.
"""

import math

import torch

COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalized(momentum):
    """The matrix with the singular vectors of momentum and singular values near 1."""
    left, s, right = torch.linalg.svd(momentum, full_matrices=False)
    # X = M / (||M|| + 1e-7)
    s = s / (s.norm() + 1e-7)
    for a, b, c in COEFFICIENTS:
        # X <- a X + b (X X^T) X + c (X X^T)^2 X
        s = a * s + b * s**3 + c * s**5
    return (left * s) @ right


def muon_step(replica, before, lr, f):
    """Replaces the step of the blocks' matrices, which AdamW has just taken. before: x before it.
    The momentum of Muon is AdamW's first moment."""
    muon_lr = f.muon_lr * lr / f.lr  # the schedule of lr
    first, *_, last = replica.layers
    for name, place in replica.places.items():
        shape = replica.parameters[name].shape
        of_a_block = first.stop <= place.start < last.start
        if not of_a_block or len(shape) != 2:
            continue
        X = orthogonalized(replica.m[place].view(shape)) * math.sqrt(shape[0] / shape[1])
        # W <- (1 - lr wd) W - muon_lr sqrt(out / in) X
        W = before[place]
        replica.x[place] = (1 - lr * f.weight_decay) * W - muon_lr * X.flatten()
