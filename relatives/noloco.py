"""NoLoCo: each replica exchanges its parameters with one random partner per round.

The problem. A collective waits for all replicas, and the more they are, the longer it waits. In
NoLoCo a replica waits for one other only. A pull towards the partner keeps all of them together.

    sync_warmup_steps steps with averaged gradients; a_i = x; u_i = 0
    then round t = 1, 2, ..., replica i:
        tau inner steps: x_i <- AdamW(x_i)
        j = partner(i, t)                     # random pairs from Philox(seed, t)
        z_i = lr x_i + (pull - lr) a_i
        exchange z                            # [sync] with the partner, once per round
        u_i <- mu u_i + pull a_i - mean(z_i, z_j)
        a_i <- a_i - u_i;  x_i <- a_i
    at the end of training: x_i <- mean over all replicas of a_j                # [sync] all-reduce

If M is odd, one replica is alone in each round: z_j = z_i. If M > 2, replicas are not equal, but
come closer as the inner learning rate decays. The model to evaluate is the mean of all a_j.
--global_every H (Gossip-PGA): in every H-th round there are no pairs; a_i and x_i become the mean
of all a_j, by an all-reduce, for which all replicas wait.

    paper      variable        shape        where
    theta_i    model.master    (sum P/N,)   every rank its shard (x_i)
    phi_i      anchor          (sum P/N,)   replica i (a_i)
    -delta_i   momentum        (sum P/N,)   replica i (u_i)
    alpha, beta, gamma   outer_momentum, outer_lr, pull

Deviations: (1) The warm-up averages gradients. (2) In the paper x and a travel, and with d = a - x
    u_i <- mu u_i + lr mean(d_i, d_j) + pull (a_i - mean(a_i, a_j)):
the same sum. Its equation 2 prints - lr mean(d_i, d_j), but only the plus sign of equation 32 and
of the authors' code makes progress.

Slow-link bytes per rank and round: 4 sum P/N, or 0 if it is alone; one hop. In a global round
2 (M-1)/M * 4 sum P/N.
Run: torchrun --nproc_per_node 4 train.py --method noloco
Source: NoLoCo, arXiv 2506.10911, and its authors' code; Gossip-PGA, arXiv 2105.09080.
Plain version: plain/local.py.
"""

from dataclasses import dataclass

import numpy as np
import torch

from config import UserError, option
from method import LocalConfig, Method


@dataclass
class Config(LocalConfig):  # paper: tau 50; it converges if mu < pull < sqrt(2 + mu^2)
    outer_lr: float = option(0.9, "outer learning rate (paper: 0.7)")
    outer_momentum: float = option(0.5, "momentum over rounds", below=1)
    pull: float = option(0.9, "strength of the pull towards the partner's anchor")
    global_every: int = option(0, "H: in every H-th round average all anchors; 0: never")
    buffer_vectors = 1  # a_i - mean, at an evaluation

    def sent_vectors(self, replicas):  # in the mean of replicas and rounds
        pair = replicas // 2 * 2 / replicas
        globally = super().sent_vectors(replicas)
        return pair + (globally - pair) / (self.global_every or torch.inf)

    def check(self, replicas):
        super().check(replicas)
        if replicas < 2:
            raise UserError("--method noloco: it needs at least two replicas; start more ranks")
        if self.device == "cuda" and self.backend in ("gloo", "shm"):
            raise UserError(f"--backend {self.backend}: noloco on GPUs needs nccl")


def partner(replica: int, replicas: int, seed: int, t: int) -> int:
    """The partner of a replica in round t; itself if it is alone."""
    order = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 2, t]))
    order = order.permutation(replicas).tolist()
    place = order.index(replica) ^ 1  # pairs: places 0 and 1, 2 and 3, ...
    return order[place] if place < replicas else replica


class NoLoCo(Method):
    Config = Config
    vectors = ("anchor", "momentum")
    barrier = False

    def begin(self):
        self.anchor.copy_(self.model.master)

    def sync(self):
        a = self.anchor
        x = self.model.master
        u = self.momentum
        config = self.config
        mean = self.model.grad  # its storage is free between two steps
        # z_i = lr x_i + (pull - lr) a_i, in the storage of x_i
        z = x.mul_(config.outer_lr).add_(a, alpha=config.pull - config.outer_lr)
        i = self.mesh.replica
        j = partner(i, self.mesh.replicas, config.seed, self.rounds)
        mean.copy_(z)
        globally = config.global_every and self.rounds % config.global_every == 0
        if j != i and not globally:
            # [sync] send-receive with the partner, sum P/N fp32, once per round
            self.mesh.send_receive(mean, z, j, self.mesh.sync_group).wait()
            mean.add_(z).div_(2)
        # u_i <- mu u_i + pull a_i - mean(z_i, z_j)
        u.mul_(config.outer_momentum).add_(a, alpha=config.pull).sub_(mean)
        # a_i <- a_i - u_i;  x_i <- a_i
        a.sub_(u)
        if globally:  # a_i <- 1/M sum_j a_j
            self.average(a)
        x.copy_(a)

    def evaluation_model(self):
        """The mean of all a_i. Also measures spread = sqrt(mean_i ||a_i - mean||^2)."""
        M = self.mesh.replicas
        mean = torch.div(self.anchor, M, out=self.model.grad)
        # [sync] all-reduce, sum P/N fp32, once per evaluation and at the end of training
        self.mesh.all_reduce(mean, self.mesh.sync_group).wait()
        square = self.model.norm(self.anchor - mean).square() / M
        # [sync] all-reduce, 1 scalar, once per evaluation and at the end of training
        self.mesh.all_reduce(square, self.mesh.sync_group).wait()
        self.record.spread = square.sqrt().item()
        return mean

    def finish(self):
        super().finish()
        if not self.averages_gradients:
            self.model.master.copy_(self.evaluation_model())
