"""0/1 Adam: all replicas share one variance, so a round's momentum can travel in 1 bit.

The problem. Each replica's Adam divides by a v of its own, so what replicas did in a round has no
common unit. In 0/1 Adam the variance V is equal everywhere and changes rarely. Then local steps
differ by their momentum only, and its sum can travel in 1 bit, with error feedback.

    T steps of mini-batch (the warm-up); V = v_i = v / (1 - beta2^T); a = x; e_i = E = 0; repeat:
        tau inner steps; g_i is clipped by the replica's own norm:
            m_i <- beta1 m_i + (1 - beta1) g_i
            v_i <- beta2 v_i + (1 - beta2) g_i^2                    # for the refresh
            x_i <- (1 - lr wd) x_i - lr clamp(m_i / (sqrt(V) + eps), -1, 1)     # step_bound
        z_i  = (a - x_i) (sqrt(V) + eps) + e_i     # = sum of lr m_i (bounded) + e_i
        e_i <- z_i - C(z_i)                        # C: 1 bit an element, see quantize.py
        u    = C(s), E <- s - u, where s = 1/M sum_i C(z_i) + E     # [sync] quantize.py, two hops
        u   <- u, at most (the round's sum of lr) (sqrt(V) + eps)             # round_bound; off
        a   <- a - u / (sqrt(V) + eps);  x_i <- a;  m_i <- u / (the round's sum of lr)
        after rounds 1, 2, 4, 8, ...: refresh V from all v_i              # shared_variance.py

m_i and V are exp_avg and exp_avg_sq, a is anchor: equal everywhere after a sync. e_i, E and
--warmup_format: error_feedback.py. Where V is 0 (embedding rows of tokens that have not occurred)
nothing moves. An old V may be much too small: the bound keeps steps as short as Adam's, and without
it long runs diverge. --tau 1 is 1-bit Adam; --refresh no freezes V.

Deviations: (1) the bound; (2) those of shared_variance.py; (3) a scale for each block of 256; (4)
weight decay is in z_i.

Slow-link bytes per rank and round: 2 (M-1)/M * 0.141 P/N (with a refresh 1.156), and 12 (M-1).
--refresh measured: see shared_variance.py.
Run: torchrun --nproc_per_node 4 train.py --method zero_one_adam --tau 4
Source: 0/1 Adam, arXiv 2202.06009; 1-bit Adam, arXiv 2102.02888; DeepSpeed's code of both.
"""

from dataclasses import dataclass

import torch

from plumbing.config import option
from quantize import FORMATS, MeanInFlight
from relatives.shared_variance import SharedVariance, SharedVarianceConfig


@dataclass
class Config(SharedVarianceConfig):  # paper: tau grows from 1 to 16
    quantize: str = option("sign", "what is sent", choices=FORMATS)
    step_bound: float = option(1.0, "largest step of an element, in learning rates; 0: none")
    round_bound: float = option(0.0, "largest move of an element in a round, in sums of lr; 0: any")


class ZeroOneAdam(SharedVariance):
    Config = Config
    shared = ("anchor",)
    eps = 1e-8  # AdamW's

    def begin(self):
        super().begin()
        self.anchor.copy_(self.model.master)

    def inner_step(self, optimizer, grad_scale):
        if self.averages_gradients:
            return super().inner_step(optimizer, grad_scale)
        model, (beta1, beta2) = self.model, optimizer.betas
        m, V, bound = model.exp_avg, model.exp_avg_sq, self.config.step_bound or torch.inf
        g = model.grad if grad_scale is None else model.grad.div_(grad_scale)
        m.lerp_(g, 1 - beta1)
        self.variance.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        optimizer.decay()
        step = (m / V.sqrt().add_(self.eps)).clamp_(-bound, bound).masked_fill_(V == 0, 0)
        model.master.sub_(step, alpha=optimizer.lr)

    def after_step(self, lr, metrics):
        self.lr_sum = lr + (self.lr_sum if self.local_steps > 0 else 0.0)  # of the round
        return super().after_step(lr, metrics)

    def sync(self):
        self.exchange(norms=self.model.norm(self.anchor - self.model.master))  # for the record
        z, E = map(self.model.used_views, (self.error.add_(self.momentum_sum()), self.mean_error))
        for l, u in enumerate(MeanInFlight(z, self.config.quantize, self.mesh, errors=E).wait()):
            self.outer_step(l, u)
        self.refresh_if_due()

    def momentum_sum(self):
        """(a - x_i) (sqrt(V) + eps): the round's sum of lr m_i, 0 where V is 0."""
        V, d = self.model.exp_avg_sq, self.anchor - self.model.master
        return d.mul_(V.sqrt().add_(self.eps)).masked_fill_(V == 0, 0)

    def outer_step(self, l, u):
        """Layer l's anchor and momentum from u, the mean of what all have sent."""
        vectors = self.model.master, self.anchor, self.model.exp_avg, self.model.exp_avg_sq
        x, a, m, V = (self.model.used_views(vector)[l] for vector in vectors)
        frozen, size = V == 0, V.sqrt().add_(self.eps)
        self.forget_errors(l, frozen)
        u.masked_fill_(frozen, 0)
        if self.config.round_bound:
            limit = size * (self.config.round_bound * self.lr_sum)
            u.clamp_(-limit, limit)
        # a <- a - u / (sqrt(V) + eps);  x_i <- a;  m_i <- u / sum of lr
        x.copy_(a.addcdiv_(u, size, value=-1))
        m.copy_(u.div_(self.lr_sum or 1.0))
