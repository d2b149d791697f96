"""Methods that send the largest elements: top-k gradients and SparseLoCo.

Each rank's piece of each layer is cut into chunks of 4,096 elements, the last one shorter. Of a
chunk of n elements the round(density n) largest are sent, at least one. Here a message is a whole
vector that is 0 where nothing is sent; positions and bytes are the product's.
Sharded twins: relatives/top_k.py, relatives/sparse_loco.py and relatives/sparse.py.
Source: Deep Gradient Compression, arXiv 1712.01887; SparseLoCo, arXiv 2508.15706.
"""

import torch

from plain.method import EPS, Method, mean, norms_of, pieces

CHUNK = 4096  # elements


def chunks(layers, N):
    """The slices of x that are searched apart."""
    found = []
    for piece in pieces(layers, N):
        for begin in range(piece.start, piece.stop, CHUNK):
            found.append(slice(begin, min(begin + CHUNK, piece.stop)))
    return found


def largest(values, density):
    """Positions of the k largest absolute values."""
    k = max(1, round(density * len(values)))
    return values.abs().argsort(descending=True)[:k]


class TopK(Method):
    """m: --momentum_correction. All replicas stay equal, and there is no anchor."""

    def begin(self):
        self.v = self.zeros()
        self.u = self.zeros()
        if self.f.momentum_correction > 0:
            self.u = [replica.m.clone() for replica in self.replicas]

    def gradients(self, g):
        m = self.f.momentum_correction
        messages = []
        for i in range(self.M):
            # u_i <- m u_i + (1 - m) g_i
            self.u[i] = m * self.u[i] + (1 - m) * g[i]
            # v_i <- v_i + u_i
            self.v[i] = self.v[i] + self.u[i]
            # s_i = the k largest |v_i| of each chunk
            s_i = self.message(self.v[i])
            messages.append(s_i)
            # u_i, v_i <- 0 where sent
            self.u[i] = torch.where(s_i == 0, self.u[i], 0.0)
            self.v[i] = torch.where(s_i == 0, self.v[i], 0.0)
        # g = 1/M sum_i s_i
        return dict.fromkeys(range(self.M), mean(messages))

    def message(self, v):
        s = torch.zeros_like(v)
        for chunk in chunks(self.layers, self.N):
            at = largest(v[chunk], self.f.density)
            s[chunk][at] = v[chunk][at]
        return s

    def inner_step(self, i, g, lr):
        if self.f.momentum_correction == 0:
            return super().inner_step(i, g, lr)
        # AdamW with beta1 = 0: u has the momentum
        f = self.f
        replica = self.replicas[i]
        replica.t += 1
        replica.v = f.beta2 * replica.v + (1 - f.beta2) * g**2
        v_hat = replica.v / (1 - f.beta2**replica.t)
        decay = f.weight_decay * replica.decayed
        replica.x[:] = replica.x - lr * decay * replica.x - lr * g / (v_hat.sqrt() + EPS)


class SparseLoCo(Method):
    def begin(self):
        super().begin()
        self.e = self.zeros()

    def sync(self):
        d = self.d()
        messages = []
        for i in range(self.M):
            # e_i <- beta e_i + (a - x_i)
            self.e[i] = self.f.error_decay * self.e[i] + d[i]
            # s_i = Q(the k largest |e_i| of each chunk)
            s_i = self.message(self.e[i])
            messages.append(s_i)
            # e_i <- e_i - s_i
            self.e[i] = self.e[i] - s_i
        # a <- a - lr 1/M sum_i s_i
        self.a = self.a - self.f.outer_lr * mean(messages)
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms_of(d)}

    def message(self, e):
        s = torch.zeros_like(e)
        for chunk in chunks(self.layers, self.N):
            at = largest(e[chunk], self.f.density)
            values = e[chunk][at]
            if self.f.two_bits:
                values = two_sizes(values)
            s[chunk][at] = values
        return s


def two_sizes(values):
    """Q: signs with one of two sizes, the mean of the large and that of the small ones, in fp16."""
    size = values.abs()
    is_large = size > size.mean()
    result = values.sign()
    for members in is_large, ~is_large:
        if members.any():
            result[members] *= size[members].mean().half().to(values.dtype)
    return result
