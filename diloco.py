"""DiLoCo: tau local steps, then one blocking outer step with the mean of the replicas' progress.

The problem. Averaging gradients sends the whole model over the slow links in every step. DiLoCo
lets each replica train alone for tau steps and exchanges once: 1/tau of the traffic.

Where the replicas' updates differ, their mean is shorter than a typical update. The outer momentum
makes up for it: in directions that stay the same from round to round, the steps add up. The mean
alone (lr 1, mu 0) is Post Local SGD.

    warm-up: sync_warmup_steps steps with averaged gradients, so that all replicas are equal; then
    anchor = x
    repeat:
        tau inner steps: x_i <- AdamW(x_i)                       # no traffic between replicas
        d_i     = anchor - x_i                                   # pseudo-gradient, points uphill
        d       = 1/M sum_i d_i                                  # [sync] all-reduce per layer
        anchor <- Nesterov(anchor, d):  b <- mu b + d
                                        anchor <- anchor - lr (d + mu b)
        x_i    <- anchor

    M replicas of N shards; a layer has P elements, of which a rank has P/N; sum: over the layers.
    [sync]: among the ranks with the same shard. A ring all-reduce sends 2 (M-1)/M of a vector:
    (M-1)/M in its reduce-scatter, and as much in its all-gather.

    symbol     variable        shape        where
    x_i        model.master    (sum P/N,)   each rank holds its own shard
    anchor, a  anchor          (sum P/N,)   equal on all ranks of a sync group
    d_i, d     model.master    (sum P/N,)   written over x_i, which the sync replaces anyway
    b          momentum        (sum P/N,)   torch.optim.SGD's momentum buffer

The inner AdamW's moments stay with their replica. Deviation: the paper starts from a model that was
pretrained on one worker, not from a warm-up with averaged gradients.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N, and 12 (M-1) for losses, steps and norms.
Run: torchrun --nproc_per_node 4 train.py --method diloco --shards 2
Source: DiLoCo, arXiv 2311.08105 (algorithm 1); Post Local SGD, arXiv 1808.07217.
Plain version: plain/diloco.py.
"""

from dataclasses import dataclass

import torch
from torch.optim.sgd import sgd

from config import option
from method import LocalConfig, Method


@dataclass
class Config(LocalConfig):
    # The paper has rounds of H = 500 steps, the learning rate 0.7 and the momentum 0.9.
    outer_lr: float = option(0.7, "outer learning rate")
    outer_momentum: float = option(0.5, "outer Nesterov momentum", below=1, large=0.9)


def nesterov(anchor, momentum, d, lr, mu):
    """A step of torch.optim.SGD(nesterov=True) with the gradient d, in place."""
    # b <- mu b + d;  a <- a - lr (d + mu b)
    # torch's sgd() is what torch.optim.SGD itself calls. But its optimizer object would own the
    # momentum. Here the momentum is a vector of the method, so checkpoints save it.
    options = {"dampening": 0, "weight_decay": 0, "nesterov": mu > 0, "maximize": False}
    sgd([anchor], [d], [momentum], lr=lr, momentum=mu, fused=True, **options)


class DiLoCo(Method):
    Config = Config
    vectors = ("anchor", "momentum")  # Method makes self.anchor and self.momentum: zeros

    def begin(self):
        self.anchor.copy_(self.model.master)

    def sync(self):
        x = self.model.master
        # d_i = a - x_i, in the storage of x_i
        d = torch.sub(self.anchor, x, out=x)
        # d = 1/M sum_i d_i
        self.combine(d)
        # a <- Nesterov(a, d);  x_i <- a
        nesterov(self.anchor, self.momentum, d, self.config.outer_lr, self.config.outer_momentum)
        x.copy_(self.anchor)

    def combine(self, d):
        """d <- the mean of all replicas' d. (relatives/robust.py takes another mean.)"""
        self.average(d)
