"""0/1 Adam (arXiv 2202.06009) and EDiT in 1 bit (ours): 1 bit an element, with error feedback.

C(v) is v as the receiver decodes it (quantize.py). What a message leaves out, z - C(z), is added to
the next one: e_i of replica i, and E of the owners of pieces of the mean.
Sharded twins: relatives/zero_one_adam.py and relatives/one_bit_edit.py.
"""

import math

import torch

from plain.method import EPS, Method, norms_of
from plain.edit import EDiT
from plain.quantize import mean_with_errors, quantized_mean


class ZeroOneAdam(Method):
    """V: the variance that all replicas divide by; v_i: what each replica's Adam would have."""

    def begin(self):
        super().begin()
        first = self.replicas[0]
        # V = v_i = v / (1 - beta2^T)
        self.V = first.v / (1 - self.f.beta2**first.t)
        self.v = [self.V.clone() for _ in self.replicas]
        self.e = self.zeros()
        self.E = torch.zeros_like(self.a)
        self.rounds = 0

    def movable(self, vector):
        """0 where V is 0: there nothing moves."""
        return torch.where(self.V > 0, vector, 0.0)

    def inner_step(self, i, g, lr):
        f = self.f
        replica = self.replicas[i]
        # m_i <- beta1 m_i + (1 - beta1) g_i
        replica.m = f.beta1 * replica.m + (1 - f.beta1) * g
        # v_i <- beta2 v_i + (1 - beta2) g_i^2
        self.v[i] = f.beta2 * self.v[i] + (1 - f.beta2) * g**2
        # x_i <- x_i - lr (clamp(m_i / (sqrt(V) + eps), -1, 1) + wd x_i)
        step = replica.m / (self.V.sqrt() + EPS)
        step = step.clamp(-1, 1)
        decay = f.weight_decay * replica.decayed * replica.x
        replica.x[:] = replica.x - lr * (self.movable(step) + decay)

    def sync(self):
        size = self.V.sqrt() + EPS
        d = self.d()
        # z_i = (a - x_i) (sqrt(V) + eps) + e_i
        z = [self.movable(d_i * size) + e_i for d_i, e_i in zip(d, self.e)]
        # e_i <- z_i - C(z_i);  s = 1/M sum_i C(z_i) + E;  u = C(s);  E <- s - u
        u, e, E = mean_with_errors(z, self.E, self.layers, self.N, self.f.quantize)
        u = self.movable(u)
        self.e = [self.movable(e_i) for e_i in e]
        self.E = self.movable(E)
        # a <- a - u / (sqrt(V) + eps);  x_i <- a
        self.a = self.a - u / size
        self.set_all(self.a)
        # m_i <- u / (the round's sum of lr)
        for replica in self.replicas:
            replica.m = u / sum(self.rates)
        self.rounds += 1
        if self.f.refresh and math.log2(self.rounds).is_integer():  # rounds 1, 2, 4, 8, ...
            self.refresh_variance()
        return {"pseudo_grad_norm": norms_of(d)}

    def refresh_variance(self):
        for layer in self.layers:
            # v_i <- w = 1/M sum_i v_i
            w = quantized_mean([v_i[layer] for v_i in self.v], self.N, "log8")
            for v_i in self.v:
                v_i[layer] = w
            # V <- w sum(V) / sum(w): the shape of w, the size of V
            self.V[layer] = w * self.V[layer].sum() / w.sum()


class OneBitEDiT(EDiT):
    def begin(self):
        super().begin()
        self.e = self.zeros()
        self.E = torch.zeros_like(self.a)

    def sync(self):
        d = self.d()
        verdicts = []
        for l, layer in enumerate(self.layers):
            verdict = self.flag_and_weigh(l, [d_i[layer] for d_i in d])
            verdicts.append(verdict)
            # e_i <- 0 if replica i is flagged;  E <- 0 if all are
            for i in range(self.M):
                if verdict.flagged[i]:
                    self.e[i][layer] = 0.0
            if all(verdict.flagged):
                self.E[layer] = 0.0

        z = [self.message(i, d[i], verdicts) for i in range(self.M)]
        # e_i <- z_i - C(z_i);  s = 1/M sum_i C(z_i) + E;  u = C(s);  E <- s - u
        u, self.e, self.E = mean_with_errors(z, self.E, self.layers, self.N, self.f.quantize)
        for l, layer in enumerate(self.layers):
            # dbar is a sum of w_i d_i, and the weights have sum 1
            dbar = self.M * u[layer]
            self.penalized_step(l, dbar, verdicts[l])
        self.set_all(self.a)
        return self.row()

    def message(self, i, d_i, verdicts):
        # z_i = w_i d_i + e_i, and 0 where replica i is flagged
        z_i = self.e[i].clone()
        for layer, verdict in zip(self.layers, verdicts):
            if not verdict.flagged[i]:
                z_i[layer] = z_i[layer] + verdict.w[i] * d_i[layer]
        return z_i
