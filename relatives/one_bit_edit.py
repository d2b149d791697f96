"""One-bit EDiT: 0/1 Adam's rounds in 1 bit, with EDiT's penalty, layer by layer. Ours: no paper.

The problem. 0/1 Adam (zero_one_adam.py) loses little for what it sends, but it blocks, and one sick
replica ruins it. EDiT (edit.py) has neither problem, but sends 32 bits an element. This method has
0/1 Adam's rounds and EDiT's penalty and schedule.

    as zero_one_adam.py, but at the round's end, for all layers l:
        u_i  = (a - x_i) (sqrt(V) + eps)
        G_i  = ||u_i|| / (the round's sum of lr)        # [shard] one all-reduce, all layers
        exchange G and limits of all replicas           # [sync] one all-gather, all layers
        flag i if G_i > limit_i, as in edit.py, and G_i > (1 + 0.05 delta) median_j G_j
        g_i  = G_i / median_j G_j;  w_i = exp(-g_i) / sum_j exp(-g_j) over the unflagged
        z_i  = u_i + e_i; 0 if i is flagged, and then v_i <- V
        e_i <- z_i - C(z_i)
        start u = C(s), E <- s - u, where s = sum_i w_i C(z_i) + E       # [sync] quantize.py, async
    complete(l), in the next forward, when it gets to layer l:
        wait for u
        u   <- u * min(1, phi / (||u|| / (sum of lr) + 1e-6))            # [shard] all-gather
        u   <- 0 if all replicas are flagged
        u   <- u, at most (sum of lr) (sqrt(V) + eps)   # round_bound
        a   <- a - u / (sqrt(V) + eps);  x_i <- a;  m_i <- u / (sum of lr)
    after the last layer: V is refreshed as in shared_variance.py

delta is --anomaly_threshold, phi --pseudo_grad_clip; for other names see the files above.
In units of the sum of learning rates u_i is a momentum, so G_i does not grow with the length of a
round or the learning rate. It judges this round alone, without e_i. If it grows in all replicas
alike, that is no anomaly: hence the median (the lower one of two). In the first rounds there is no
limit_i, and i is flagged if G_i > 3 median_j G_j: otherwise e_i would carry a sick round into the
next ones. One replica alone is flagged only if its norm is not finite.

A flagged replica sends zeros, forgets its errors, and then has the a and m of the others. In a
refresh V stands in for its v_i, 0 for its g_i. Where all replicas are flagged, the layer goes back
to its anchor, its momentum is 0, and what E has sent is lost. So is what a bound or the clip cuts.

With all parts off it is 0/1 Adam, bit for bit: --no-anomaly_elimination --no-weighted_averaging
--no-pseudo_grad_clipping --round_bound 0.

The first hop of all layers is waited for before layer 0; the second hops travel during the forward.
Nothing is one step late: the sync would replace the parameters from which that step started.

Slow-link bytes per rank and round: 0/1 Adam's, but 8 (M-1) (L + 1) for the exchange.
Run: torchrun --nproc_per_node 4 train.py --method one_bit_edit --tau 8 --tau_schedule 2:96,4:384
"""

import functools
from dataclasses import dataclass

import torch

from edit import SIGMA_FLOOR, EDiT, Penalty, clip_factor
from plumbing.config import option
from quantize import MeanInFlight
from relatives import zero_one_adam
from relatives.zero_one_adam import ZeroOneAdam


@dataclass
class Config(Penalty, zero_one_adam.Config):
    pseudo_grad_clip: float = option(1.0, "phi, largest norm of a layer's u / sum of lr", above=0)
    round_bound: float = option(1.0, "largest move of an element in a round, in sums of its lr")


class OneBitEDiT(EDiT, ZeroOneAdam):
    Config = Config
    shared = ZeroOneAdam.shared

    def begin(self):
        ZeroOneAdam.begin(self)
        self.statistics = self.model.master.new_zeros(3, len(self.model.layers))

    def sync(self):
        """The end of the round: norms, weights, and the start of every layer's mean."""
        model, i, config = self.model, self.mesh.replica, self.config
        u = self.momentum_sum()
        self.judge(torch.stack([(u_l / self.unit).norm() ** 2 for u_l in model.views(u)]))
        self.means = []
        vectors = u, self.error, self.mean_error, model.grad, self.variance, model.exp_avg_sq
        for l, (u, e, E, g, v, V) in enumerate(zip(*map(model.used_views, vectors))):
            g.masked_fill_(self.flagged[i, l], 0)
            v.copy_(torch.where(self.flagged[i, l], V, v))
            z = e.add_(u).masked_fill_(self.flagged[i, l], 0)
            weights = functools.partial(self.relative_weights, l)
            self.means.append(MeanInFlight([z], config.quantize, self.mesh, weights, [E]))
        model.pre_layer_hook = self.complete

    @property
    def unit(self) -> float:
        return self.lr_sum or 1.0

    def exchange(self, **values):
        super().exchange(**values)
        self.median = self.exchanged.norms.nanmedian(dim=0).values  # (L,)
        # A rise in all replicas is no anomaly. A replica without a past has the others' norms.
        limits, threshold = self.exchanged.limits, self.config.anomaly_threshold
        first = 3.0 if self.config.anomaly_elimination else torch.inf
        known = torch.maximum(limits, self.median * (1 + threshold * SIGMA_FLOOR))
        self.exchanged.limits = known.where(limits.isfinite(), first * self.median)

    def compute_weights(self, G):
        return super().compute_weights(G / self.median.clamp(min=torch.finfo(G.dtype).tiny))

    def relative_weights(self, l):
        """M w_i of layer l, (M, 1): 1 where all weights are equal."""
        weights = self.weights[:, l, None]
        return weights / torch.full_like(weights, 1 / self.mesh.replicas)  # * M would round

    def complete(self, l: int):
        with self.record.stall():
            for mean in self.means if l == 0 else ():
                mean.halfway()
            u, clip = self.means[l].wait()[0], torch.ones_like(self.any_kept[l])
            u.masked_fill_(self.model.used_views(self.model.exp_avg_sq)[l] == 0, 0)
            if self.config.pseudo_grad_clipping:
                clip = clip_factor(self.model.norm(u) / self.unit, self.config.pseudo_grad_clip)
            self.clips.append(clip)
            self.outer_step(l, u.mul_(clip * self.any_kept[l]))
            if l == len(self.means) - 1:
                self.refresh_if_due()
        if l == len(self.means) - 1:
            self.end_sync()
