"""EDiT (arXiv 2412.07210): DiLoCo with a penalty, layer by layer.

Read EDiT.sync first: for each layer norms, flags, weights, a weighted mean, clip, outer step. The
statistics are computed from the list of all norms so far, not updated in place. Another detector or
other weights: a subclass that replaces limit() or weights().
Sharded twin: edit.py. There the layers' outer steps run inside the next forward pass, which changes
when something is sent, but no number.
"""

import math
from dataclasses import dataclass

import numpy as np

from plain.method import Method, mean, norms_of, weighted_sum

SIGMA_FLOOR = 0.05  # sigma is at least this share of the mean


@dataclass
class Verdict:
    """What the record says of one layer in one round."""

    layer: int
    norms: list  # of each replica's pseudo-gradient
    flagged: list
    w: list
    clip: float = None  # known when the layer has had its outer step


class EDiT(Method):
    def begin(self):
        super().begin()
        # samples[l][i]: the norms of replica i's layer l so far, but those that were flagged
        self.samples = [[[] for _ in self.replicas] for _ in self.layers]
        self.verdicts = []
        # Always 1 in EDiT. A-EDiT sets them: steps of each replica's round, and of its longest one.
        self.length = self.longest = [1] * self.M

    def sync(self):
        d = self.d()
        for l, layer in enumerate(self.layers):
            d_l = [d_i[layer] for d_i in d]
            verdict = self.flag_and_weigh(l, d_l)
            # dbar = sum_i w_i d_i
            dbar = weighted_sum(d_l, verdict.w)
            self.penalized_step(l, dbar, verdict)
        # x_i <- a
        self.set_all(self.a)
        return self.row()

    def flag_and_weigh(self, l, d):
        """Flags and weights of layer l. d: the pseudo-gradients d_i of the layer."""
        norms = norms_of(d)  # G_i = ||d_i||
        flagged = []
        for i, (G_i, samples) in enumerate(zip(norms, self.samples[l])):
            # flag if (G - mean_G) / sigma > delta, that is, if G is above its limit
            flag = not math.isfinite(G_i) or G_i > self.longest[i] * self.limit(samples)
            if not flag:
                samples.append(G_i / self.length[i])
            flagged.append(flag)
        if all(flagged):  # not all can be outliers: norms have grown, so the limits start anew
            for G_i, samples in zip(norms, self.samples[l]):
                if math.isfinite(G_i):  # else the norm says nothing about its limit
                    samples.clear()
        w = self.weights(self.norms_for_weights(norms), flagged)
        verdict = Verdict(l, norms, flagged, w)
        self.verdicts.append(verdict)
        return verdict

    def limit(self, samples):
        """The largest norm that is no anomaly after `samples`, the norms before it."""
        warmup = max(self.f.anomaly_warmup_rounds, 2)  # a variance takes two samples
        if not self.f.anomaly_elimination or len(samples) < warmup:
            return math.inf
        return float(anomaly_limit(samples, warmup, self.f))

    def norms_for_weights(self, norms):
        """As they are. A-EDiT corrects them for unequal rounds."""
        return norms

    def weights(self, G, flagged):
        # w_i = exp(-G_i) / sum_j exp(-G_j), j unflagged
        w = [0.0] * self.M
        kept = [i for i in range(self.M) if not flagged[i]]
        if not kept:
            return w
        least = min([G[i] for i in kept])
        for i in kept:
            w[i] = 1.0
            if self.f.weighted_averaging:
                w[i] = math.exp(least - G[i])  # exp(-G_i) alone may be 0
        return [w_i / sum(w) for w_i in w]

    def penalized_step(self, l, dbar, verdict):
        # dhat = dbar * min(1, phi / (||dbar|| + 1e-6))
        verdict.clip = 1.0
        if self.f.pseudo_grad_clipping:
            verdict.clip = min(1.0, self.f.pseudo_grad_clip / (dbar.norm().item() + 1e-6))
        if not all(verdict.flagged):  # else the layer is rolled back to the anchor
            self.nesterov(self.layers[l], dbar * verdict.clip)

    def row(self):
        """The record of the layers that have had their outer step since the last row: here of all
        layers. Streaming EDiT takes the outer steps of a part of them at a time."""
        done = [verdict for verdict in self.verdicts if verdict.clip is not None]
        self.verdicts = [verdict for verdict in self.verdicts if verdict.clip is None]
        if not done:
            return {}
        norms = np.array([verdict.norms for verdict in done]).T  # (M, L)
        flagged = np.array([verdict.flagged for verdict in done]).T
        weights = np.array([verdict.w for verdict in done]).T
        return {
            "pseudo_grad_norm": np.sqrt((norms**2).sum(axis=1)),
            "dropped": flagged.sum(axis=1),
            "rolled_back": sorted(verdict.layer for verdict in done if all(verdict.flagged)),
            "weight": weights.mean(axis=1),
            "clip": mean([verdict.clip for verdict in done]),
        }


def anomaly_limit(samples, warmup, f):
    alpha = f.anomaly_ema
    # plain mean and sample variance of the first norms
    mean_G = np.mean(samples[:warmup])
    variance = np.var(samples[:warmup], ddof=1)
    for G in samples[warmup:]:
        # mean_G <- mean_G + alpha (G - mean_G)
        mean_G = mean_G + alpha * (G - mean_G)
        # sigma^2 <- (1 - alpha) sigma^2 + alpha (G - mean_G)^2, with the new mean
        variance = (1 - alpha) * variance + alpha * (G - mean_G) ** 2
    sigma = max(math.sqrt(variance), SIGMA_FLOOR * mean_G)
    return mean_G + f.anomaly_threshold * sigma
