"""SlowMo: local steps, averaged parameters, and a slow momentum over the rounds.

The problem. Plain averaging (Post Local SGD) loses accuracy as tau grows. A momentum over rounds
regains it and sends nothing more.

    sync_warmup_steps steps with averaged gradients; anchor = x; v = 0; then repeat:
        tau inner steps: x_i <- AdamW(x_i)
        d       = 1/M sum_i (anchor - x_i)       # [sync] all-reduce per layer, blocking
        v      <- mu * g_t / g_{t-1} * v + d     # g_t: inner learning rate of the last step
        anchor <- anchor - lr * v                #      of round t; g_{-1} = g_0
        x_i    <- anchor

The paper writes u <- mu u + d / g_t and anchor <- anchor - lr g_t u. With v = g_t u this is the
same, without a division by a learning rate near 0.

    paper      variable        shape        where
    x_i        model.master    (sum P/N,)   every rank its shard
    a          anchor          (sum P/N,)   equal on all ranks of a sync group
    g_t u      momentum        (sum P/N,)   equal on all ranks of a sync group
    alpha      outer_lr
    beta       outer_momentum
    gamma_t    lr, previous_lr

With --outer_lr 1 --outer_momentum 0 this is Post Local SGD. With a constant inner rate it is DiLoCo
with heavy-ball instead of Nesterov momentum.

Deviation from the paper: the warm-up averages gradients. (The inner AdamW keeps its moments at a
sync, as in the paper, which sets only SGD's momentum to zero.)

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N, and 12 (M-1) for losses, steps and norms.
Run: torchrun --nproc_per_node 4 train.py --method slowmo --shards 2
Source: SlowMo, arXiv 1910.00643.
Plain version: plain/local.py.
"""

from dataclasses import dataclass

import torch

from config import option
from method import LocalConfig, Method


@dataclass
class Config(LocalConfig):  # paper: tau 12; momentum 0.4 to 0.8, tuned
    outer_lr: float = option(1.0, "outer learning rate")
    outer_momentum: float = option(0.5, "momentum over rounds", below=1)


class SlowMo(Method):
    Config = Config
    vectors = ("anchor", "momentum")
    scalars = ("previous_lr",)

    def begin(self):
        self.anchor.copy_(self.model.master)
        self.previous_lr = None  # no round has ended

    def sync(self):
        x = self.model.master
        a = self.anchor
        v = self.momentum
        # d_i = a - x_i, in the storage of x_i
        d = torch.sub(a, x, out=x)
        # d = 1/M sum_i d_i
        self.average(d)
        # v <- mu g_t / g_{t-1} v + d;  a <- a - lr v
        lr = self.rates[-1]
        ratio = 1.0
        if self.previous_lr:  # neither the first round nor a rate of 0
            ratio = lr / self.previous_lr
        self.previous_lr = lr
        v.mul_(self.config.outer_momentum * ratio).add_(d)
        a.sub_(v, alpha=self.config.outer_lr)
        # x_i <- a
        x.copy_(a)
