"""Eager updates: a replica's own pseudo-gradient acts at once, the others' one round late.

The problem. CO2 hides the all-reduce behind the next round and applies all of it one round late. A
replica knows its own pseudo-gradient at once, and need not wait for it.

    sync_warmup_steps steps with averaged gradients; a_i = x; b_i = 0; then round t = 0, 1, ...:
        tau inner steps: x_i <- AdamW(x_i)
        d_i = a_i - x_i
        u   = d_i / M + (dbar - d_i' / M)         # ' and dbar: of round t-1; 0 if t = 0
        b_i <- mu b_i + u;  a_i <- a_i - lr (u + mu b_i);  x_i <- a_i
        start dbar = 1/M sum_i d_i                # [sync] all-reduce, asynchronous
    at the end of training: a, b <- their means over the replicas        # [sync] all-reduce
        and, if M > 1, one more outer step with (M-1)/M dbar: then each d_i has counted once

Replicas differ by what they have done in the last round. The model to evaluate is the mean of all
a_i.

    paper      variable        shape        where
    a_i        anchor          (sum P/N,)   replica i
    b_i        momentum        (sum P/N,)   replica i
    d_i'       own             (sum P/N,)   replica i
    dbar       mean            (sum P/N,)   the asynchronous all-reduce's own buffer

Deviation: the last outer step is ours. Only 1/M of the mean acts at once. With few rounds, as on a
laptop, the late rest costs loss: eager ends behind EDiT (lab/results/frontier_others.csv).

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N. Let T be the time of the all-reduce. Then
the training waits for max(0, T - tau * time of a step) per round.
Run: torchrun --nproc_per_node 4 train.py --method eager
Source: eager updates for overlapped communication in DiLoCo, arXiv 2502.12996.
Plain version: plain/local.py.
"""

from dataclasses import dataclass

import torch

from config import option
from diloco import nesterov
from mesh import Handle
from method import LocalConfig, Method


@dataclass
class Config(LocalConfig):  # paper: tau 30
    outer_lr: float = option(0.7, "outer learning rate")
    outer_momentum: float = option(0.0, "outer Nesterov momentum (paper: 0.9)", below=1)


class Eager(Method):
    Config = Config
    vectors = ("anchor", "momentum", "own", "mean")
    barrier = False
    handle = Handle()  # of dbar: nothing is in flight

    def begin(self):
        self.anchor.copy_(self.model.master)

    def outer_step(self, u):
        nesterov(self.anchor, self.momentum, u, self.config.outer_lr, self.config.outer_momentum)

    def sync(self):
        x = self.model.master
        M = self.mesh.replicas
        # d_i = a_i - x_i, in the storage of x_i
        d = torch.sub(self.anchor, x, out=x)
        # u = d_i / M + (dbar - d_i' / M), in the storage of the gradient
        u = torch.div(d, M, out=self.model.grad)
        self.handle.wait()
        u.add_(self.mean).sub_(self.own, alpha=1 / M)
        self.own.copy_(d)
        torch.div(d, M, out=self.mean)
        # [sync] all-reduce, sum P/N fp32, asynchronous, once per round
        self.handle = self.mesh.all_reduce(self.mean, self.mesh.sync_group)
        # b_i <- mu b_i + u;  a_i <- a_i - lr (u + mu b_i);  x_i <- a_i
        self.outer_step(u)
        x.copy_(self.anchor)

    def drain(self):
        with self.record.stall():
            self.handle.wait()

    def evaluation_model(self):
        mean = self.model.grad.copy_(self.anchor)
        self.average(mean)
        return mean

    def finish(self):
        self.drain()
        if not self.averages_gradients:
            self.average(self.anchor)
            self.average(self.momentum)
            if self.mesh.replicas > 1:
                self.outer_step(self.mean.mul_(1 - 1 / self.mesh.replicas))
            self.model.master.copy_(self.anchor)
