"""CO2: one all-reduce per round that travels while the next round computes.

The problem. Even one all-reduce per round makes every replica wait. CO2 sends the pseudo-gradients
of round t while round t+1 computes, and applies their mean one round late.

    sync_warmup_steps steps with averaged gradients; anchor = x; u = 0; then round t = 1, 2, ...:
        tau inner steps: x_i <- AdamW(x_i)
        d_i = anchor - x_i                            # in the storage of x_i
        if t > 1:
            wait for f                                # f = mean of the d_i of round t-1
            u      <- mu u + f
            anchor <- anchor - lr u
        f <- d_i / M;  start to sum f over replicas   # [sync] all-reduce, asynchronous
        x_i <- anchor
    at the end of training: wait for f and apply it as above

So the first two rounds start from the same anchor. When a round begins, the anchor does not yet
contain what the replicas have learned in the round before.

    paper        variable       shape        where
    x_i, d_i     model.master   (sum P/N,)   every rank its shard
    a            anchor         (sum P/N,)   equal on all ranks of a sync group
    u            momentum       (sum P/N,)   equal on all ranks of a sync group
    f            mean           (sum P/N,)   the asynchronous all-reduce's own buffer

Deviations: (1) There is no staleness gap penalty, which makes the paper's step smaller where the
anchor moves fast: we could not obtain its formula. The authors' code has none by default. (2) d is
not divided by the inner learning rate. (3) u is not clamped. (4) The published code's default,
memory-efficient mode does not overlap. This file always does, so its sync group needs gloo or NCCL.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N. Let T be the time of the all-reduce. Then
the training waits for max(0, T - tau * time of a step) per round.
Run: torchrun --nproc_per_node 4 train.py --method co2 --shards 2
Source: CO2, arXiv 2401.16265 (abstract), and its authors' code, fairscale-CO2.
Plain version: plain/local.py.
"""

from dataclasses import dataclass

import torch

from config import option
from mesh import Handle
from method import LocalConfig, Method


@dataclass
class Config(LocalConfig):  # code: tau 48, outer_lr 1, outer_momentum 0.5, no penalty
    outer_lr: float = option(0.7, "outer learning rate")
    outer_momentum: float = option(0.2, "momentum over rounds", below=1)


class CO2(Method):
    Config = Config
    vectors = ("anchor", "momentum", "mean")
    barrier = False
    handle = Handle()  # of f: nothing is in flight

    def begin(self):
        self.anchor.copy_(self.model.master)

    def sync(self):
        # d_i = a - x_i, in the storage of x_i
        d = torch.sub(self.anchor, self.model.master, out=self.model.master)
        if self.rounds > 1:
            self.outer_step()
        # f = d_i / M
        torch.div(d, self.mesh.replicas, out=self.mean)
        # [sync] all-reduce, sum P/N fp32, asynchronous, once per round
        self.handle = self.mesh.all_reduce(self.mean, self.mesh.sync_group)
        # x_i <- a
        self.model.master.copy_(self.anchor)

    def outer_step(self):
        """The mean pseudo-gradient of the round before moves the anchor."""
        self.handle.wait()
        f = self.mean
        u = self.momentum
        # u <- mu u + f;  a <- a - lr u
        u.mul_(self.config.outer_momentum).add_(f)
        self.anchor.sub_(u, alpha=self.config.outer_lr)

    def drain(self):
        with self.record.stall():
            self.handle.wait()

    def finish(self):
        self.drain()
        if not self.averages_gradients:
            self.outer_step()
            self.model.master.copy_(self.anchor)
