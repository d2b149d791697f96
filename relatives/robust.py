"""Robust DiLoCo: a median, a trimmed mean or the Flag Aggregator in place of the mean.

The problem. A replica that sends its pseudo-gradient with the wrong sign has a normal norm, so
EDiT's penalty does not see it, and a mean counts it in full. These aggregates look at directions or
at single elements.

    as diloco.py, but the pseudo-gradients d_i are aggregated in pieces:
        send piece j of d_i to replica j                         # [sync] all-to-all
        median         of each element (M even: the mean of the middle two)
        trimmed_mean   of each element, without the `trim` largest and the `trim` smallest
        flag           G_i = ||d_i||, u_i = d_i / G_i; y: the direction nearest to all u_i;
                       d = y * 1/M sum_i max(0, <y, u_i>) * median_i G_i
        the owners send the pieces of d to all                   # [sync] all-gather
    then DiLoCo's outer step.

The direction y is the first left singular vector of [w_1 u_1, ..., w_M u_M]. First all w_i are 1;
then, 5 times, w_i = (1 - <y, u_i>^2 + 1e-7)^(-1/4): what lies far from y counts less. Because y is
a combination sum_i c_i u_i, all of it is algebra with the M x M Gram matrix of the d_i (a sum
of M^2 scalars over all ranks). Of y and -y, that one is taken for which sum_i <y, u_i> is positive.
Elements of d_i that are not finite count as 0, and those beyond +-1e12 as that: so no square
overflows.

Deviations: the authors' code drops the length of d, starts at a random y and takes one step.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N, 12 (M-1) for losses, steps and norms,
and with flag 4 M^2 (M-1) N (if N = 1: 8 M (M-1)).
Run: torchrun --nproc_per_node 4 train.py --method robust --aggregate flag --flip 1:300:700
Source: Flag Aggregator, ICLR 2024, and its authors' code; the median and the trimmed mean,
arXiv 1803.01498.
Plain version: plain/local.py.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

import diloco
from config import UserError, option
from diloco import DiLoCo

STEPS = 5
TINY = 1e-30
HUGE = 1e12
COLUMNS = 2**16  # elements that are sorted at a time


@dataclass
class Config(diloco.Config):
    aggregate: str = option(
        "flag", "in place of the mean", choices=["median", "trimmed_mean", "flag"]
    )
    trim: int = option(1, "replicas left out at each end by trimmed_mean")
    buffer_vectors = 6  # pieces, theirs, and on CPUs two copies of both in shared memory

    def check(self, replicas):
        super().check(replicas)
        if self.aggregate == "trimmed_mean" and 2 * self.trim >= replicas > 1:
            raise UserError(f"--trim {self.trim}: leaves none of {replicas} replicas")


def middle(values, trim: int):
    """Values (M, n) -> (n,): each element's mean without its `trim` largest and smallest."""
    return values.sort(dim=0).values[trim : len(values) - trim].mean(dim=0)


def flag_weights(K):
    """The Gram matrix K_ij = <d_i, d_j>, (M, M) -> weights c (M,): d = sum_i c_i d_i."""
    G = K.diagonal().sqrt()
    cosines = K / torch.outer(G, G).clamp(min=TINY)  # <u_i, u_j>
    w = torch.ones_like(G)
    for _ in range(1 + STEPS):
        # The first eigenvector z of (w_i w_j <u_i, u_j>) gives y = sum_i w_i z_i u_i / sqrt(value).
        values, vectors = torch.linalg.eigh(w[:, None] * cosines * w)
        c = w * vectors[:, -1] / values[-1].clamp(min=TINY).sqrt()
        along = cosines @ c  # <y, u_i>
        w = (1 - along.square() + 1e-7).clamp(min=1e-7) ** -0.25
    sign = torch.where(along.sum() < 0, -1.0, 1.0)
    length = (sign * along).clamp(min=0).mean() * middle(G[:, None], (len(G) - 1) // 2)
    return sign * c * length / G.clamp(min=TINY)


class Robust(DiLoCo):
    Config = Config
    repairs_replicas = True  # a replica that is not finite goes on from the anchor

    def combine(self, d):
        mesh = self.mesh
        M = mesh.replicas
        d.nan_to_num_(0.0, 0.0, 0.0).clamp_(-HUGE, HUGE)
        if M == 1:
            return
        pieces = pad(d, (0, -len(d) % M)).view(M, -1)
        theirs = torch.empty_like(pieces)  # own piece of all replicas
        # [sync] all-to-all, sum P/N fp32, once per round
        mesh.all_to_all(theirs, pieces, mesh.sync_group).wait()
        if self.config.aggregate == "flag":
            # [sync] sum over all ranks, M^2 scalars, once per round
            K = mesh.sum_over_ranks((theirs @ theirs.T).view(-1)).view(M, M)
            pieces[mesh.replica] = flag_weights(K) @ theirs
        else:
            trim = self.config.trim
            if self.config.aggregate == "median":
                trim = (M - 1) // 2
            # A sort takes 6 times the memory of its values: some columns at a time.
            for values, place in zip(theirs.split(COLUMNS, 1), pieces[mesh.replica].split(COLUMNS)):
                place.copy_(middle(values, trim))
        # [sync] all-gather, sum P/N fp32, once per round
        mesh.all_gather(pieces.view(-1), mesh.sync_group).wait()
        d.copy_(pieces.view(-1)[: len(d)])
