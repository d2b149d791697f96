"""NoLoCo: each replica exchanges its parameters with one random partner per round.

The problem. A collective waits for all replicas, and the more they are, the longer it waits. In
NoLoCo nobody waits for more than one other replica. A pull towards the partner keeps the replicas
together.

    sync_warmup_steps steps of mini-batch; a_i = x; u_i = 0; then round t = 1, 2, ..., replica i:
        tau inner steps: x_i <- AdamW(x_i)
        j = partner(i, t)                     # random pairs from Philox(seed, t)
        exchange x (and a, if pull != lr)     # [sync] with the partner, once per round
        u_i <- mu u_i + lr mean(d_i, d_j) + pull (a_i - mean(a_i, a_j))         # d = a - x
               which is mu u_i + lr (a_i - mean(x_i, x_j)) if pull = lr
        a_i <- a_i - u_i;  x_i <- a_i
    at the end of training: x_i <- mean over all replicas of a_j                # [sync] all-reduce

With an odd number of replicas one is alone in each round; its own values are the means. Replicas
are never equal (if M > 2). Their distance is proportional to the inner learning rate, so the
replicas come closer as it decays. The model to evaluate is the mean of all a_j.

    paper      variable        shape        where
    theta_i    model.master    (sum P/N,)   every rank its shard (x_i)
    phi_i      anchor          (sum P/N,)   replica i (a_i)
    -delta_i   momentum        (sum P/N,)   replica i (u_i)
    alpha, beta, gamma   outer_momentum, outer_lr, pull

Deviations: (1) The warm-up is mini-batch. (2) The paper's equation 2 prints minus beta Delta; as
Delta = x - a, only the plus sign of equation 32 and of the code makes progress. (3) The code sends
pairs through a root and the CPU, tensor by tensor, and needs an even M. (4) On another number of
replicas a resumed run starts all from the mean of the a_i and of the u_i.

Slow-link bytes per rank and round: 4 P/N (8 P/N if pull != lr), whatever M is; one hop.
Run: torchrun --nproc_per_node 4 train.py --method noloco
Source: NoLoCo, arXiv 2506.10911, and its authors' code.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from method import Method
from plumbing.config import LocalConfig, UserError, option


@dataclass
class Config(LocalConfig):  # paper: tau 50; mu < pull < sqrt(2 + mu^2) is sufficient
    outer_lr: float = option(0.9, "outer learning rate (paper: 0.7)")
    outer_momentum: float = option(0.5, "momentum over rounds", below=1)
    pull: float = option(0.9, "strength of the pull towards the partner's anchor")


def partner(replica: int, replicas: int, seed: int, t: int) -> int:
    """The partner of a replica in round t; itself if it is alone."""
    order = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 2, t]))
    order = order.permutation(replicas).tolist()
    place = order.index(replica) ^ 1  # pairs: places 0 and 1, 2 and 3, ...
    return order[place] if place < replicas else replica


class NoLoCo(Method):
    Config = Config
    private = ("anchor", "momentum")
    equal_replicas, overlaps, mean_on_resume = False, True, True

    @classmethod
    def check(cls, config, method_config, replicas):
        if replicas < 2:
            raise UserError("--method noloco: it needs at least two replicas; start more ranks")
        if config.device == "cuda" and config.backend in ("gloo", "shm"):
            raise UserError(f"--backend {config.backend}: noloco on GPUs needs nccl")

    @classmethod
    def held_vectors(cls, method_config):
        return 3 if method_config.pull == method_config.outer_lr else 4

    @classmethod
    def sent_vectors(cls, method_config, replicas):
        return cls.held_vectors(method_config) - 2

    def begin(self):
        self.anchor.copy_(self.model.master)

    def local_stats(self):
        """||d_i||, for the log only."""
        return self.norm(self.anchor - self.model.master).view(1)

    def sync(self, norms):
        a, x, u, config = self.anchor, self.model.master, self.momentum, self.config
        j = partner(self.mesh.replica, self.mesh.replicas, self.seed, self.rounds)
        u.mul_(config.outer_momentum)
        x_mean = self.pair_mean(x, j)
        if config.pull == config.outer_lr:
            # u_i <- mu u_i + lr (a_i - mean(x_i, x_j))
            u.add_(torch.sub(a, x_mean, out=x_mean), alpha=config.outer_lr)
        else:
            # u_i <- mu u_i + lr mean(d_i, d_j) + pull (a_i - mean(a_i, a_j))
            a_mean = self.pair_mean(a, j)
            u.add_(torch.sub(a_mean, x_mean, out=x_mean), alpha=config.outer_lr)
            u.add_(torch.sub(a, a_mean, out=a_mean), alpha=config.pull)
        # a_i <- a_i - u_i;  x_i <- a_i
        x.copy_(a.sub_(u))

    def pair_mean(self, vector, j):
        """The mean of `vector` over this replica and replica j, a new vector."""
        mean = vector.clone()
        if j != self.mesh.replica:
            # [sync] exchange with the partner, sum P/N fp32, once per round (twice if pull != lr)
            self.mesh.exchange(mean, vector, j, self.mesh.sync).wait()
            mean.add_(vector).div_(2)
        return mean

    def average_replicas(self):
        x = self.model.master.div_(self.mesh.replicas)
        # [sync] all-reduce, sum P/N fp32, once per evaluation and at the end of training
        self.mesh.all_reduce(x, self.mesh.sync).wait()
        self.model.invalidate_gathered()

    @contextmanager
    def judged(self):
        """The mean of all replicas. Also measures spread = sqrt(mean_i ||a_i - mean||^2)."""
        if not self.local:
            yield
            return
        self.average_replicas()
        square = self.norm(self.anchor - self.model.master).square() / self.mesh.replicas
        # [sync] all-reduce, 1 scalar, once per evaluation
        self.mesh.all_reduce(square, self.mesh.sync).wait()
        self.spread = square.sqrt().item()
        yield
        self.model.master.copy_(self.anchor)
        self.model.invalidate_gathered()

    def finish(self):
        super().finish()
        if self.local:
            self.average_replicas()
            self.anchor.copy_(self.model.master)
