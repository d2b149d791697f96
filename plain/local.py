"""Methods with rounds of local steps and one exchange of whole vectors at the end of each.

Post Local SGD (arXiv 1808.07217), QSR (2310.14423), SlowMo (1910.00643), CO2 (2401.16265, without
its staleness gap penalty), NoLoCo (2506.10911, with Gossip-PGA, 2105.09080), eager updates
(2502.12996), robust DiLoCo (median and trimmed mean, 1803.01498; Flag Aggregator, ICLR 2024).
Sharded twins: relatives/NAME.py. An all-reduce there is a mean() here. What travels asynchronously
there waits in an attribute here.
"""

import math

import numpy as np
import torch

from plain.diloco import ALL
from plain.method import Method, mean, norms_of


class PostLocalSGD(Method):
    def sync(self):
        # x_i <- 1/M sum_j x_j
        self.set_all(mean([replica.x for replica in self.replicas]))
        return {}


class QSR(PostLocalSGD):
    """It differs in when a round ends (train.py)."""


class SlowMo(Method):
    """With the paper's u. The sharded version's momentum is v = lr_inner u, which divides by no
    rate."""

    def sync(self):
        lr = self.rates[-1]
        d = self.d()
        # u <- mu u + d / lr_inner
        self.b = self.f.outer_momentum * self.b + mean(d) / lr
        # a <- a - lr_outer lr_inner u
        self.a = self.a - self.f.outer_lr * lr * self.b
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms_of(d)}


class CO2(Method):
    """b is the paper's u. f: the mean of the round before, which arrives one round late."""

    def begin(self):
        super().begin()
        self.mean = None

    def sync(self):
        d = self.d()
        if self.mean is not None:
            self.outer_step()
        # f = 1/M sum_i d_i
        self.mean = mean(d)
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms_of(d)}

    def outer_step(self):
        # u <- mu u + f
        self.b = self.f.outer_momentum * self.b + self.mean
        # a <- a - lr u
        self.a = self.a - self.f.outer_lr * self.b

    def finish(self, k):
        self.outer_step()
        self.set_all(self.a)


class NoLoCo(Method):
    """Every replica has an anchor a_i and a momentum u_i of its own. Here d_i and a_i are averaged
    over a pair, as in the paper. In the sharded version z_i = lr x_i + (pull - lr) a_i, the same
    sum."""

    def begin(self):
        self.anchors = [replica.x.clone() for replica in self.replicas]
        self.u = self.zeros()
        self.t = 0  # rounds

    def anchor(self, i):
        return self.anchors[i]

    def pairs(self):
        """The replicas of each pair, drawn for this round. If M is odd, the last one is alone."""
        generator = np.random.Generator(
            np.random.Philox(key=self.f.seed, counter=[0, 0, 2, self.t])
        )
        order = generator.permutation(self.M).tolist()
        return [order[first : first + 2] for first in range(0, self.M, 2)]

    def sync(self):
        self.t += 1
        d = self.d()
        if self.f.global_every and self.t % self.f.global_every == 0:
            # Gossip-PGA: each replica takes its outer step alone, then all anchors are averaged
            self.outer_steps(d, [[i] for i in range(self.M)])
            self.anchors = [mean(self.anchors)] * self.M
        else:
            self.outer_steps(d, self.pairs())
        # x_i <- a_i
        for a_i, replica in zip(self.anchors, self.replicas):
            replica.x[:] = a_i
        return {"pseudo_grad_norm": norms_of(d)}

    def outer_steps(self, d, groups):
        mu = self.f.outer_momentum
        new_anchors = list(self.anchors)
        for group in groups:
            # means over the pair: 1/2 (d_i + d_j), 1/2 (a_i + a_j)
            mean_d = mean([d[j] for j in group])
            mean_a = mean([self.anchors[j] for j in group])
            for i in group:
                # u_i <- mu u_i + lr mean(d_i, d_j) + pull (a_i - mean(a_i, a_j))
                progress = self.f.outer_lr * mean_d
                pull = self.f.pull * (self.anchors[i] - mean_a)
                self.u[i] = mu * self.u[i] + progress + pull
                # a_i <- a_i - u_i
                new_anchors[i] = self.anchors[i] - self.u[i]
        self.anchors = new_anchors

    def evaluation_model(self):
        return mean(self.anchors)

    def spread(self):
        # sqrt(1/M sum_i ||a_i - mean||^2)
        center = mean(self.anchors)
        squares = [(a_i - center).norm().item() ** 2 for a_i in self.anchors]
        return {"spread": math.sqrt(mean(squares))}


class Eager(Method):
    """A replica's own part of dbar acts at once, the others' part one round late."""

    def begin(self):
        self.anchors = [replica.x.clone() for replica in self.replicas]
        self.b = self.zeros()
        self.dbar = None  # the mean of the round before
        self.own = None  # the d_i of the round before

    def anchor(self, i):
        return self.anchors[i]

    def sync(self):
        d = self.d()
        for i in range(self.M):
            # u = d_i / M + (dbar - d_i' / M);  ' and dbar: of the round before
            u = d[i] / self.M
            if self.dbar is not None:
                u = u + (self.dbar - self.own[i] / self.M)
            self.outer_step(i, u)
        self.own = d
        self.dbar = mean(d)
        return {"pseudo_grad_norm": norms_of(d)}

    def outer_step(self, i, u):
        mu = self.f.outer_momentum
        # b_i <- mu b_i + u
        self.b[i] = mu * self.b[i] + u
        # a_i <- a_i - lr (u + mu b_i);  x_i <- a_i
        self.anchors[i] = self.anchors[i] - self.f.outer_lr * (u + mu * self.b[i])
        self.replicas[i].x[:] = self.anchors[i]

    def evaluation_model(self):
        return mean(self.anchors)

    def finish(self, k):
        """Replicas become equal. Then the late part of the last round acts, too."""
        M = self.M
        self.anchors = [mean(self.anchors)] * M
        self.b = [mean(self.b)] * M
        if M > 1:
            for i in range(M):
                self.outer_step(i, (M - 1) / M * self.dbar)


class Robust(Method):
    """DiLoCo with another aggregate than the mean. Elements that are not finite count as 0. (The
    sharded version also cuts what is beyond +-1e12: nothing here is.)"""

    def sync(self):
        d = self.d()
        if self.M == 1:
            self.nesterov(ALL, d[0])
        else:
            finite = [torch.where(d_i.isfinite(), d_i, 0.0) for d_i in d]
            self.nesterov(ALL, self.aggregate(torch.stack(finite)))
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms_of(d)}

    def aggregate(self, d):
        """d: (M, P) -> (P,)"""
        if self.f.aggregate == "flag":
            return flag(d)
        if self.f.aggregate == "trimmed_mean":
            left_out = self.f.trim
        else:  # the median: one or two in the middle are left
            left_out = (self.M - 1) // 2
        # of each element: without the largest and the smallest ones
        ordered = d.sort(dim=0).values
        return mean(ordered[left_out : self.M - left_out])


def flag(d):
    """The Flag Aggregator, with singular vectors of P elements. (The sharded version needs only the
    M x M products of the d_i.) d: (M, P)."""
    G = d.norm(dim=1)
    # u_i = d_i / G_i, the columns
    u = (d / G[:, None].clamp(min=1e-30)).T
    w = torch.ones_like(G)
    for _ in range(6):
        # y = the first left singular vector of [w_1 u_1, ..., w_M u_M]
        left, _, _ = torch.linalg.svd(u * w, full_matrices=False)
        y = left[:, 0]
        # w_i = (1 - <y, u_i>^2 + 1e-7)^(-1/4)
        w = (1 - (y @ u) ** 2 + 1e-7) ** -0.25
    if (y @ u).sum() < 0:  # y and -y are the same direction
        y = -y
    # d = y * 1/M sum_i max(0, <y, u_i>) * median_i G_i
    agreement = (y @ u).clamp(min=0).mean().item()
    return y * agreement * np.median(G.tolist())
