"""One variance for all replicas: that of the warm-up, refreshed now and then.

The problem. Replicas that divide by the same V have local steps in a common unit. But V gets old,
and a new one from their own gradients is too large, because these are noisier than their mean.

    after T steps of warm-up: V = v_i = exp_avg_sq / (1 - beta2^T)
    in each inner step of replica i: v_i <- beta2 v_i + (1 - beta2) g_i^2
    after rounds 1, 2, 4, 8, ..., unless --refresh no:
        v_i <- w = 1/M sum_i v_i                                    # [sync] quantize.py, log8
        V   <- r w in each layer, where r is, by --refresh:         # [shard] all-gather of sums
            shape      sum(V) / sum(w)                              # V keeps its size
            measured   ||1/M sum_i g_i||^2 / (1/M sum_i ||g_i||^2)  # [sync] int8; all-gather
                       and at least 1/M. The first time, k steps after the warm-up:
                       w <- w + beta2^k (1/r - 1) V                 # before V <- r w
            full       1

    paper      variable            shape        where
    V          model.exp_avg_sq    (sum P/N,)   equal in all replicas
    v_i, w     variance            (sum P/N,)   replica i
    g_i        model.grad          (sum P/N,)   replica i: of the last step, clipped

shape keeps V's size at the end of the warm-up, when gradients are still large. measured gives V
about the size that it has in mini-batch training: r, the ratio of mean to local squares, is 1/M if
gradients are noise, 1 if they are equal. At first v_i is of V's size, hence the correction. Where
all g_i are 0, r is 1. A replica that one_bit_edit.py flags counts as g_i = 0: of four replicas one
makes r at most 1/4 too small.

Slow-link bytes per rank and refresh: 2 (M-1)/M * 1.016 P/N; measured: twice that, and 4 (M-1) for
each layer.
Source: 0/1 Adam, arXiv 2202.06009. It refreshes V from mean gradients in full precision, in steps
whose distance doubles. Deviations: (1) from the v_i, in 8 bits; (2) after rounds whose number
doubles; (3) the three rules for r.
"""

from dataclasses import dataclass

import torch

from plumbing.config import UserError, option
from relatives.error_feedback import ErrorFeedback, ErrorFeedbackConfig


@dataclass
class SharedVarianceConfig(ErrorFeedbackConfig):
    refresh: str = option(
        "shape", "of V: nothing, its shape, its shape and a measured size, or all that the v_i say",
        choices=["no", "shape", "measured", "full"],
    )  # fmt: skip
    buffer_vectors = 2

    def check(self, replicas):
        super().check(replicas)
        if self.sync_warmup_steps < 1 or self.average_moments != "none":
            reason = "needs --sync_warmup_steps above 0, for V, and no --average_moments"
            raise UserError(f"--method {self.method}: {reason}")


class SharedVariance(ErrorFeedback):
    Config = SharedVarianceConfig
    private = ("variance", *ErrorFeedback.private)

    def begin(self):
        super().begin()
        self.variance.copy_(self.model.exp_avg_sq.div_(1 - self.config.beta2**self.steps))

    def refresh_if_due(self):
        rule = self.config.refresh
        if rule == "no" or self.rounds & self.rounds - 1:  # not 1, 2, 4, 8, ...
            return
        V, v, g, views = self.model.exp_avg_sq, self.variance, self.model.grad, self.model.views
        sums = lambda vector: torch.stack([layer.sum() for layer in views(vector)])
        self.average(v, "log8")
        above, below = sums(V), sums(v)
        if rule == "measured":  # g is still that of the last step, until the next backward
            # [sync] all-gather, 1 scalar per layer, once per refresh
            below = self.mesh.gather_rows(sums(g**2), self.mesh.sync).mean(dim=0)
            self.average(g, "int8")
            above = sums(g**2)
        # [shard] all-gather, 2 scalars per layer, once per refresh (bit-equal in all replicas)
        rows = self.mesh.gather_rows(torch.cat([above, below]), self.mesh.shard)
        above, below = rows.sum(dim=0).chunk(2)
        # r = sum(V) / sum(w)  or  ||1/M sum_i g_i||^2 / (1/M sum_i ||g_i||^2)  or  1
        r = torch.where((below > 0) & (rule != "full"), above / below, 1.0)
        if rule == "measured":
            r.clamp_(min=1 / self.mesh.replicas)
        k = self.steps - self.config.sync_warmup_steps
        for V_l, w, r_l in zip(views(V), views(v), r):
            if rule == "measured" and self.rounds == 1:  # w <- w + beta2^k (1/r - 1) V
                w.add_(V_l * (1 / r_l - 1), alpha=self.config.beta2**k)
            torch.mul(w, r_l, out=V_l)
