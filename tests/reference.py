"""The methods from their equations, as plainly as possible: one process, fp64, M whole models.
Written from the papers, not from this repository's methods. It shares with them only the network
(model.Llama, whole and unsharded) and which windows of the corpus a rank reads."""

import math

import numpy as np
import torch

import data
from model import Llama, ModelConfig

MATRICES = ("qkv", "out", "gate_up", "down")
MULOCO = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037))
MULOCO += ((2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))


def cosine(step, lr, min_lr_ratio, warmup, max_steps):
    if step < warmup:
        return lr * (step + 1) / warmup
    t = (step - warmup) / (max_steps - warmup)
    return lr * min_lr_ratio + lr * (1 - min_lr_ratio) * (1 + math.cos(math.pi * t)) / 2


def mean(values):
    return sum(values) / len(values)


def weighted(vectors, w):
    """sum_i w_i v_i. Weight 0 leaves a vector out."""
    kept = [w_i * v for w_i, v in zip(w, vectors) if w_i > 0]
    return sum(kept, torch.zeros_like(vectors[0]))


def norms(vectors):
    return [vector.norm().item() for vector in vectors]


def clipped(g, max_norm):
    """g with a norm of at most max_norm (0: any), or 0 if its norm is not finite."""
    norm = g.norm().item()
    if not math.isfinite(norm):
        return torch.zeros_like(g)
    return g * (min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0)


class Replica:
    """A whole model. x: its parameters in one vector, layer by layer, a layer's matrices first.
    layers: the slices of x; decayed: where weights decay."""

    def __init__(self, config, seed):
        self.net, self.parameters, self.layers = Llama(config, seed).double(), {}, []
        for l, layer in enumerate(self.net.layers):
            named = layer.named_parameters(prefix=f"layers.{l}")
            self.parameters |= sorted(named, key=lambda item: -item[1].dim())
            end = sum(p.numel() for p in self.parameters.values())
            self.layers.append(slice(self.layers[-1].stop if l else 0, end))
        parameters = self.parameters.values()
        self.decayed = torch.cat([torch.full((p.numel(),), p.dim() == 2) for p in parameters])
        self.x = torch.cat([p.data.flatten() for p in parameters])
        for p, part in zip(parameters, self.x.split([p.numel() for p in parameters])):
            p.data = part.view(p.shape)
        self.m, self.v, self.t = torch.zeros_like(self.x), torch.zeros_like(self.x), 0

    def gradient(self, f, corpus, step, i, M, N):
        """Mean loss and gradient of replica i of M in a step, over its N ranks and their
        micro-steps."""
        sizes, losses = (f.block_size, f.batch_size, f.accum), []
        for micro in range(f.accum):
            for rank in range(i * N, i * N + N):
                batches = data.Batches(corpus, *sizes, rank, M * N, f.seed)
                losses.append(self.net(*batches.train(step, micro)))
        grads = torch.autograd.grad(mean(losses), self.parameters.values())
        return mean(losses).item(), torch.cat([g.flatten() for g in grads])

    def adamw(self, g, lr, f):
        self.t += 1
        self.m = f.beta1 * self.m + (1 - f.beta1) * g
        self.v = f.beta2 * self.v + (1 - f.beta2) * g**2
        m_hat = self.m / (1 - f.beta1**self.t)
        v_hat = self.v / (1 - f.beta2**self.t)
        decay = f.weight_decay * self.decayed
        before = self.x.clone()
        self.x[:] = self.x - lr * decay * self.x - lr * m_hat / (v_hat.sqrt() + 1e-8)
        if f.optimizer == "muon":
            self.muon(before, lr, f)

    def muon(self, before, lr, f):
        """The step of the blocks' matrices, in place of AdamW's. Newton-Schulz is a polynomial of
        the singular values: here it is computed from them."""
        blocks = range(1, len(self.layers) - 1)
        matrices = {f"layers.{l}.{name}.weight" for l in blocks for name in MATRICES}
        ends = np.cumsum([p.numel() for p in self.parameters.values()])
        for (name, p), end in zip(self.parameters.items(), ends):
            if name in matrices:
                part = slice(end - p.numel(), end)
                left, s, right = torch.linalg.svd(self.m[part].view(p.shape), full_matrices=False)
                s = s / (s.norm() + 1e-7)
                for a, b, c in MULOCO:
                    s = a * s + b * s**3 + c * s**5
                X = (left * s) @ right * math.sqrt(p.shape[0] / p.shape[1])
                decayed = (1 - lr * f.weight_decay) * before[part]
                self.x[part] = decayed - f.muon_lr * lr / f.lr * X.flatten()


class Method:
    """What replicas do together after the warm-up. f: flags; x_i: replicas[i].x; a: the anchor;
    k: inner steps since the warm-up; steps: of each replica in the round."""

    a = steps = None

    def __init__(self, f, replicas, N):
        self.f, self.replicas, self.M, self.N = f, replicas, len(replicas), N
        self.layers = replicas[0].layers

    def begin(self):
        self.a = self.replicas[0].x.clone()
        self.b = torch.zeros_like(self.a)

    def gradients(self, g):
        """Those of the replicas in a local step -> those that they step with."""
        return g

    def inner_step(self, i, g, lr):
        self.replicas[i].adamw(g, lr, self.f)

    def after_inner_step(self, k):
        pass

    def sync(self, lr):
        """At the end of a round. lr: the inner rate of its last step. Returns what its row in the
        record says of the replicas."""

    def finish(self, k):
        pass

    def judged(self):
        return self.replicas[0].x

    def d(self):
        """The pseudo-gradients d_i = a - x_i."""
        return [self.a - replica.x for replica in self.replicas]

    def set_all(self, x):
        for replica in self.replicas:
            replica.x[:] = x

    def nesterov(self, part, d):
        """The outer step of DiLoCo, EDiT and the streaming methods, on a part of a."""
        mu = self.f.outer_momentum
        self.b[part] = mu * self.b[part] + d
        self.a[part] = self.a[part] - self.f.outer_lr * (d + mu * self.b[part])


class PostLocalSGD(Method):
    def sync(self, lr):
        self.set_all(mean([replica.x for replica in self.replicas]))


class DiLoCo(Method):
    def sync(self, lr):
        d = self.d()
        self.nesterov(slice(None), mean(d))
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms(d)}


class SlowMo(Method):
    """As in the paper: u <- mu u + d / g_t, a <- a - lr g_t u."""

    def sync(self, g):
        d, f = self.d(), self.f
        self.b = f.outer_momentum * self.b + mean(d) / g
        self.a = self.a - f.outer_lr * g * self.b
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms(d)}


class CO2(Method):
    mean, r, C = None, 0.0, 0.0

    def outer_step(self):
        f = self.f
        G = 1 + self.r / self.C if self.C > 0 and f.staleness_penalty else 1.0
        self.b = f.outer_momentum * self.b + self.mean / G
        self.a = self.a - f.outer_lr * self.b
        self.r = f.outer_lr * self.b.norm().item()
        self.C = max(self.C, self.r)

    def sync(self, lr):
        d = self.d()
        if self.mean is not None:
            self.outer_step()
        self.mean = mean(d)  # it acts one round later
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms(d)}

    def finish(self, k):
        self.outer_step()
        self.set_all(self.a)


class NoLoCo(Method):
    def begin(self):
        self.anchors = [replica.x.clone() for replica in self.replicas]
        self.u, self.t = [torch.zeros_like(a) for a in self.anchors], 0

    def sync(self, lr):
        f, old, self.t = self.f, self.anchors, self.t + 1
        draw = np.random.Generator(np.random.Philox(key=f.seed, counter=[0, 0, 2, self.t]))
        order = draw.permutation(self.M).tolist()
        d = [a - replica.x for a, replica in zip(old, self.replicas)]
        self.anchors = [None] * self.M
        globally = f.global_every and self.t % f.global_every == 0
        size = 1 if globally else 2
        for pair in [order[first : first + size] for first in range(0, self.M, size)]:
            for i in pair:
                progress = f.outer_lr * mean([d[j] for j in pair])
                pull = f.pull * (old[i] - mean([old[j] for j in pair]))
                self.u[i] = f.outer_momentum * self.u[i] + progress + pull
                self.anchors[i] = old[i] - self.u[i]
        if globally:
            self.anchors = [mean(self.anchors)] * self.M
        for a, replica in zip(self.anchors, self.replicas):
            replica.x[:] = a
        return {"pseudo_grad_norm": norms(d)}

    def judged(self):
        return mean(self.anchors)

    def spread(self):
        return math.sqrt(mean([(a - mean(self.anchors)).norm().item() ** 2 for a in self.anchors]))


class EDiT(Method):
    """With a step_weighting it is A-EDiT. samples[l][i]: the norms of replica i's layer l."""

    def begin(self):
        super().begin()
        self.samples, self.reports = [[[] for _ in self.replicas] for _ in self.layers], []

    def judge(self, l, d):
        """What the record says of layer l: the norms of the replicas' d, flags, weights."""
        G = judged = norms(d)
        weighting, steps = getattr(self.f, "step_weighting", "none"), self.steps
        if weighting == "norm_per_step":
            judged = [norm / count * mean(steps) for norm, count in zip(G, steps)]
        flagged = [int(is_anomaly(norm, own, self.f)) for norm, own in zip(judged, self.samples[l])]
        least = min((norm for norm, out in zip(judged, flagged) if not out), default=0.0)
        score = [math.exp(least - norm) if self.f.weighted_averaging else 1.0 for norm in judged]
        if weighting == "times_steps":
            score = [s * count for s, count in zip(score, steps)]
        score = [0.0 if out else s for s, out in zip(score, flagged)]
        self.reports.append(dict(G=G, flagged=flagged, w=[s / (sum(score) or 1.0) for s in score]))
        return self.reports[-1]

    def penalized_step(self, l, dbar, report):
        phi = self.f.pseudo_grad_clip if self.f.pseudo_grad_clipping else math.inf
        report["clip"] = min(1.0, phi / (dbar.norm().item() + 1e-6))
        if any(report["w"]):
            self.nesterov(self.layers[l], dbar * report["clip"])

    def sync(self, lr):
        d = self.d()
        for l, layer in enumerate(self.layers):
            own = [di[layer] for di in d]
            report = self.judge(l, own)
            self.penalized_step(l, weighted(own, report["w"]), report)
        self.set_all(self.a)
        return self.row()

    def row(self):
        """Of the layers that have had their outer step since the last row."""
        done = [report for report in self.reports if "clip" in report]
        self.reports = [report for report in self.reports if "clip" not in report]
        each = lambda key: np.array([report[key] for report in done])  # (L, M) or (L,)
        return done and {
            "pseudo_grad_norm": np.sqrt((each("G") ** 2).sum(axis=0)),
            "dropped": each("flagged").sum(axis=0),
            "weight": each("w").mean(axis=0),
            "clip": each("clip").mean(),
        }


def is_anomaly(G, samples, f):
    """samples: the norms of one layer of one replica so far. G joins them if it is no anomaly."""
    warmup, limit = max(f.anomaly_warmup_rounds, 2), math.inf
    if f.anomaly_elimination and len(samples) >= warmup:
        mu, variance = np.mean(samples[:warmup]), np.var(samples[:warmup], ddof=1)
        for sample in samples[warmup:]:
            mu = mu + f.anomaly_ema * (sample - mu)
            variance = (1 - f.anomaly_ema) * variance + f.anomaly_ema * (sample - mu) ** 2
        limit = mu + f.anomaly_threshold * max(math.sqrt(variance), 0.05 * mu)
    if math.isfinite(G) and G <= limit:
        samples.append(G)
        return False
    return True


class StreamingDiLoCo(Method):
    def begin(self):
        super().begin()
        self.flying, self.landed = None, {}  # (p, k_sent, means by layer); p -> k

    def after_inner_step(self, k):
        interval, last = self.f.tau // self.f.fragments, self.f.max_steps - self.f.sync_warmup_steps
        if k % interval == 0:
            self.send((k // interval - 1) % self.f.fragments, k)
        if self.flying:
            sent = self.flying[1]
            if k == sent + self.f.delay or k == last > sent:
                self.land(k)

    def send(self, p, k):
        d, means = self.d(), {}
        for l in range(p, len(self.layers), self.f.fragments):
            means[l] = self.mean_of(l, [di[self.layers[l]] for di in d])
        self.flying = p, k, means

    def land(self, k):
        (p, _, means), alpha = self.flying, self.f.alpha
        for l, arrived in means.items():
            for replica, sick in zip(self.replicas, self.outer_step(l, arrived)):
                x, a = replica.x[self.layers[l]], self.a[self.layers[l]]
                x[:] = a if sick else alpha * x + (1 - alpha) * a
        self.flying, self.landed[p] = None, k

    def mean_of(self, l, d):
        return quantized_mean(d, self.N, self.f.quantize)

    def outer_step(self, l, dbar):
        """Returns which replicas are sick."""
        self.nesterov(self.layers[l], dbar)
        return [False] * self.M

    def finish(self, k):
        if self.flying:
            self.land(k)
        for p in range(self.f.fragments):
            if self.landed.get(p) != k:
                self.send(p, k)
                self.land(k)

    def judged(self):
        return self.a


class StreamingEDiT(StreamingDiLoCo, EDiT):
    def mean_of(self, l, d):
        report = self.judge(l, d)
        return quantized_mean(d, self.N, self.f.quantize, report["w"]), report

    def outer_step(self, l, arrived):
        dbar, report = arrived
        self.penalized_step(l, dbar, report)
        finite = [replica.x[self.layers[l]].isfinite().all() for replica in self.replicas]
        return [out or not healthy for out, healthy in zip(report["flagged"], finite)]

    def sync(self, lr):
        return self.row()


class Eager(Method):
    dbar = own = None

    def begin(self):
        self.anchors = [replica.x.clone() for replica in self.replicas]
        self.b = [torch.zeros_like(a) for a in self.anchors]

    def step(self, i, u):
        mu, lr = self.f.outer_momentum, self.f.outer_lr
        self.b[i] = mu * self.b[i] + u
        self.anchors[i] = self.anchors[i] - lr * (u + mu * self.b[i])
        self.replicas[i].x[:] = self.anchors[i]

    def sync(self, lr):
        d = [a - replica.x for a, replica in zip(self.anchors, self.replicas)]
        for i in range(self.M):
            late = 0.0 if self.own is None else self.dbar - self.own[i] / self.M
            self.step(i, d[i] / self.M + late)
        self.own, self.dbar = d, mean(d)
        return {"pseudo_grad_norm": norms(d)}

    def judged(self):
        return mean(self.anchors)

    def finish(self, k):
        self.anchors, self.b = [self.judged()] * self.M, [mean(self.b)] * self.M
        for i in range(self.M) if self.M > 1 else ():
            self.step(i, (self.M - 1) / self.M * self.dbar)


class Robust(DiLoCo):
    def sync(self, lr):
        d = self.d()
        healthy = torch.stack([torch.where(di.isfinite(), di, 0.0) for di in d])
        if self.M == 1:
            self.nesterov(slice(None), d[0])
        elif self.f.aggregate == "flag":
            self.nesterov(slice(None), flag(healthy))
        else:
            ordered = sorted_columns(healthy)
            median = self.f.aggregate == "median"
            out = (self.M - 1) // 2 if median else self.f.trim
            self.nesterov(slice(None), mean(ordered[out : self.M - out]))
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms(d)}


def sorted_columns(rows):
    return torch.from_numpy(np.sort(rows.numpy(), axis=0))


def flag(d):
    """With the singular vectors of all P elements."""
    G = d.norm(dim=1)
    u, w = (d / G[:, None].clamp(min=1e-30)).T, torch.ones(len(d)).double()  # (P, M)
    for _ in range(6):
        y = torch.linalg.svd(u * w, full_matrices=False).U[:, 0]
        w = (1 - (y @ u) ** 2 + 1e-7) ** -0.25
    y = y if (y @ u).sum() >= 0 else -y
    return y * mean([max(0.0, cosine.item()) for cosine in y @ u]) * np.median(G.numpy())


def by_pieces(vector, layers, N, size, function):
    """function(part) of every `size` elements of each rank's piece of each layer, put together."""
    result = torch.zeros_like(vector)
    for layer in layers:
        pieces = shards(vector[layer], N)
        result[layer] = torch.cat([function(part) for own in pieces for part in own.split(size)])
    return result


def shards(vector, N):
    """What each of N ranks has of a layer's vector, without the padding; the last may have none."""
    return vector.split(-(-len(vector) // (16 * N)) * 16)


def where_largest(chunk, density):
    k = max(1, round(density * len(chunk)))
    return chunk.abs().argsort(descending=True)[:k]


class TopK(Method):
    def begin(self):
        first = [replica.m for replica in self.replicas]
        self.u = [m.clone() if self.f.momentum_correction else torch.zeros_like(m) for m in first]
        self.v = [torch.zeros_like(m) for m in first]

    def gradients(self, g):
        m, sent = self.f.momentum_correction, []
        for i in range(self.M):
            self.u[i] = m * self.u[i] + (1 - m) * g[i]
            self.v[i] = self.v[i] + self.u[i]
            sent.append(by_pieces(self.v[i], self.layers, self.N, 4096, self.largest))
            self.u[i] = torch.where(sent[i] == 0, self.u[i], 0.0)
            self.v[i] = torch.where(sent[i] == 0, self.v[i], 0.0)
        return [mean(sent)] * self.M

    def largest(self, chunk):
        at, result = where_largest(chunk, self.f.density), torch.zeros_like(chunk)
        result[at] = chunk[at]
        return result

    def inner_step(self, i, g, lr):
        replica, f = self.replicas[i], self.f
        if f.momentum_correction:  # Adam without momentum
            replica.t += 1
            replica.v = f.beta2 * replica.v + (1 - f.beta2) * g**2
            size = (replica.v / (1 - f.beta2**replica.t)).sqrt() + 1e-8
            decay = f.weight_decay * replica.decayed
            replica.x[:] = replica.x - lr * decay * replica.x - lr * g / size
        else:
            replica.adamw(g, lr, f)


class SparseLoCo(Method):
    def begin(self):
        super().begin()
        self.e = [torch.zeros_like(self.a) for _ in self.replicas]

    def sync(self, lr):
        d, sent = self.d(), []
        for i in range(self.M):
            self.e[i] = self.f.error_decay * self.e[i] + d[i]
            sent.append(by_pieces(self.e[i], self.layers, self.N, 4096, self.message))
            self.e[i] = self.e[i] - sent[i]
        self.a = self.a - self.f.outer_lr * mean(sent)
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms(d)}

    def message(self, chunk):
        at, result = where_largest(chunk, self.f.density), torch.zeros_like(chunk)
        values = chunk[at]
        if self.f.two_bits:
            size, values = values.abs(), values.sign()
            for own in size > size.mean(), size <= size.mean():
                values[own] *= size[own].mean().half().double() if own.any() else 0.0
        result[at] = values
        return result


class ZeroOneAdam(Method):
    def begin(self):
        super().begin()
        first, f = self.replicas[0], self.f
        self.V = first.v / (1 - f.beta2**first.t)
        self.v = [self.V.clone() for _ in self.replicas]
        self.e, self.E = [torch.zeros_like(self.a) for _ in self.replicas], torch.zeros_like(self.a)
        self.lr_sum, self.rounds = 0.0, 0

    def inner_step(self, i, g, lr):
        replica, f = self.replicas[i], self.f
        replica.m = f.beta1 * replica.m + (1 - f.beta1) * g
        self.v[i] = f.beta2 * self.v[i] + (1 - f.beta2) * g**2
        step = replica.m / (self.V.sqrt() + 1e-8)
        step = step.clamp(-f.step_bound, f.step_bound) if f.step_bound else step
        step = torch.where(self.V > 0, step, 0.0) + f.weight_decay * replica.decayed * replica.x
        replica.x[:] = replica.x - lr * step
        self.lr_sum += lr if i == 0 else 0.0

    def sync(self, lr):
        size, self.rounds = self.V.sqrt() + 1e-8, self.rounds + 1
        healthy = lambda vectors: [torch.where(self.V > 0, v, 0.0) for v in vectors]
        d = self.d()
        z = [u + e for u, e in zip(healthy([di * size for di in d]), self.e)]
        u, self.e, self.E = mean_with_errors(z, self.E, self.layers, self.N, self.f.quantize)
        u, self.E, *self.e = healthy([u, self.E, *self.e])
        if not self.f.error_feedback:
            self.e, self.E = [0.0 * e for e in self.e], 0.0 * self.E
        self.a = self.a - u / size
        self.set_all(self.a)
        for replica in self.replicas:
            replica.m = u / self.lr_sum
        self.lr_sum = 0.0
        if self.f.refresh and math.log2(self.rounds) % 1 == 0:
            for layer in self.layers:
                w = quantized_mean([v[layer] for v in self.v], self.N, "log8")
                for v in self.v:
                    v[layer] = w
                self.V[layer] = w * self.V[layer].sum() / w.sum()
        return {"pseudo_grad_norm": norms(d)}


class OneBitEDiT(EDiT):
    def begin(self):
        super().begin()
        self.e, self.E = [torch.zeros_like(self.a) for _ in self.replicas], torch.zeros_like(self.a)

    def sync(self, lr):
        d = self.d()
        z = [e.clone() for e in self.e]
        for l, layer in enumerate(self.layers):
            report = self.judge(l, [di[layer] for di in d])
            for i, weight in enumerate(report["w"]):
                z[i][layer] = 0.0 if report["flagged"][i] else z[i][layer] + weight * d[i][layer]
            if all(report["flagged"]):
                self.E[layer] = 0.0
        mean, self.e, self.E = mean_with_errors(z, self.E, self.layers, self.N, self.f.quantize)
        for l, layer in enumerate(self.layers):
            self.penalized_step(l, self.M * mean[layer], self.reports[l])
        self.set_all(self.a)
        return self.row()


def mean_with_errors(z, E, layers, N, form):
    """(what all add up, the senders' errors, the owners' errors)."""
    M = len(z)
    exact, u, new_E = M == 1 or form == "none", torch.zeros_like(E), E.clone()
    errors = [torch.zeros_like(zi) for zi in z]
    for layer in layers:
        pieces = lambda v: shards(v[layer], N)
        put = lambda v, parts: v[layer].copy_(torch.cat(parts))
        rounding = lambda parts: list(parts) if exact else [rounded(part, form) for part in parts]
        sent = [rounding(pieces(zi)) for zi in z]
        for zi, error, own in zip(z, errors, sent):
            put(error, [part - coded for part, coded in zip(pieces(zi), own)])
        s = [mean(parts) for parts in zip(*sent)]
        if M > 2:  # the owner of a piece keeps an error, too
            s = [part + error for part, error in zip(s, pieces(E))]
            coded = rounding(s)
            put(new_E, [part - own for part, own in zip(s, coded)])
            s = coded
        put(u, s)
    return u, errors, new_E


def quantized_mean(d, N, form, w=None):
    """The mean of M replicas' vectors of one layer, with weights w (default: equal; 0 leaves a
    replica out). Each of N ranks has a piece of the layer."""
    M = len(d)
    w = w or [1 / M] * M
    if M == 1 or form == "none":
        return weighted(d, w)
    pieces = zip(*(shards(di, N) for di in d))
    means = [weighted([rounded(v, form) for v in own], w) for own in pieces]
    if M > 2:  # who has the mean of a piece sends it quantized, too
        means = [rounded(piece, form) for piece in means]
    return torch.cat(means)


def rounded(v, form):
    """v as the receiver decodes it: blocks of 256 elements, each with a scale in fp32."""
    rules = {"e3m0": rounded_e3m0, "int8": rounded_int8, "log8": rounded_log8, "sign": rounded_sign}
    rules["two_bits"] = rounded_two_bits
    return torch.cat([rules[form](block) for block in v.split(256)])


def rounded_int8(block):
    s = (block.abs().max() / 127).float().double()
    return torch.zeros_like(block) if s == 0 else s * (block / s).round()


def rounded_e3m0(block):
    """The nearest of 0, s/64, s/32, ..., s, the larger one of two that are as near."""
    s = block.abs().max().float().double()
    levels = torch.tensor([2.0**-n for n in range(7)] + [0.0]).double() * s
    distance = (block.abs()[:, None] - levels).abs()
    return block.sign() * levels[distance.argmin(dim=1)]


def rounded_log8(block):
    """The nearest power of 2^(1/8), as exponents; 0 stays 0, nothing else becomes 0."""
    s = block.max().float().double()
    steps = (8 * torch.log2(s / block)).round().clamp(0, 254)
    return torch.where(block > 0, s * 2.0 ** (-steps / 8), 0.0)


def rounded_sign(block):
    """+-s, where s is the mean of |v| over the elements that are not 0. The sign of 0 is +."""
    s = block.abs().sum() / max(1, block.count_nonzero())
    return torch.where(block >= 0, 1.0, -1.0) * s.float().double()


def rounded_two_bits(block):
    """The sign and one of two sizes; s is the rms of the elements that are not 0."""
    s = block.norm() / math.sqrt(max(1, block.count_nonzero()))
    is_large = (block.abs() > 0.9816 * s).double()
    size = 1.510 * is_large + 0.4528 * (1 - is_large)
    return torch.where(block >= 0, 1.0, -1.0) * size * s.float().double()


RULES = {
    "minibatch": Method, "post_local_sgd": PostLocalSGD, "slowmo": SlowMo, "diloco": DiLoCo,
    "streaming_diloco": StreamingDiLoCo, "co2": CO2, "noloco": NoLoCo, "edit": EDiT,
    "a_edit": EDiT, "streaming_edit": StreamingEDiT, "zero_one_adam": ZeroOneAdam,
    "one_bit_edit": OneBitEDiT,
    "sparse_loco": SparseLoCo, "top_k": TopK, "eager": Eager, "robust": Robust,
}  # fmt: skip


def scheduled_tau(f, k):
    """k: steps after the warm-up when the round begins."""
    for part in filter(None, f.tau_schedule.split(",")):
        tau, steps = map(int, part.split(":"))
        if k < steps:
            return tau
        k -= steps
    return f.tau


class Simulation:
    """A training of M replicas of N ranks each. f: all flags as attributes; sick: a Sick or None.
    Has the record's `rows` by event, the seconds, `now`, and the final `model`. While gradients are
    averaged a round is one step."""

    def __init__(self, f, M, N, corpus, sick=None):
        self.f, self.M, self.N, self.corpus, self.sick = f, M, N, corpus, sick
        self.config = ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, corpus.vocab_size)
        self.replicas = [Replica(self.config, f.seed) for _ in range(M)]
        self.method = RULES[f.method](f, self.replicas, N)
        slow, factor = (f.slow_replica or "0:1").split(":")
        zeros = torch.zeros_like(self.replicas[0].x)
        self.e, self.E = [zeros] * M, zeros  # of the warm-up's gradients
        self.seconds = [float(factor) if i == int(slow) else 1.0 for i in range(M)]  # of a step
        self.taken, self.rate, self.progress, self.now = [0] * M, [1.0] * M, 0.0, 0.0
        self.rows = {"step": [], "sync": [], "eval": []}
        while self.progress < f.max_steps:
            local = self.progress >= f.sync_warmup_steps
            if local and not self.rows["sync"]:
                self.method.begin()
            self.round(local)
            if local and self.progress >= f.max_steps:
                self.method.finish(self.taken[0] - f.sync_warmup_steps)
            self.evaluate(local)

    def round(self, local):
        f, method, running = self.f, self.method, range(self.M)
        method.steps, sums = [0] * self.M, [0.0] * self.M
        while running:
            found = {}  # (loss, gradient)
            for i in running:
                step = self.taken[i] + method.steps[i]
                found[i] = self.replicas[i].gradient(f, self.corpus, step, i, self.M, self.N)
            if not local:  # both are means over all replicas
                losses, g = zip(*found.values())
                found = dict.fromkeys(running, [mean(losses), self.warmup_mean(g)])
            if local:
                losses, g = zip(*found.values())
                found = dict(zip(found, zip(losses, method.gradients(g))))
            for i, (loss, g) in found.items():
                here = self.progress + method.steps[i] * self.rate[i]
                lr = cosine(here, f.lr, f.min_lr_ratio, f.lr_warmup_steps, f.max_steps)
                step = method.inner_step if local else lambda i, *rest: self.replicas[i].adamw(*rest, f)
                step(i, clipped(g, f.grad_clip), lr)
                sums[i], method.steps[i] = sums[i] + loss, method.steps[i] + 1
                self.rows["step"] += [{"loss": loss, "lr": lr}] if i == 0 else []
            step = self.taken[0] + method.steps[0]
            if self.sick and step - 1 in self.sick.steps:
                for i in self.sick.replicas:
                    self.sick.spoil(self.replicas[i].x, method.a)
            if local:
                method.after_inner_step(step - f.sync_warmup_steps)
            running = [i for i in running if local and not self.round_is_over(i)]
        self.taken = [before + count for before, count in zip(self.taken, method.steps)]
        self.now += max(count * s for count, s in zip(method.steps, self.seconds))
        self.progress += mean(method.steps)
        self.rate = [mean(method.steps) / count for count in method.steps]
        if local:
            self.sync(sums, lr)

    def warmup_mean(self, g):
        if getattr(self.f, "warmup_format", "none") == "none":
            return mean(g)
        z = [gi / self.M + e for gi, e in zip(g, self.e)]
        found, self.e, self.E = mean_with_errors(z, self.E, self.method.layers, self.N, "int8")
        return self.M * found

    def round_is_over(self, i):
        f, count = self.f, self.method.steps[i]
        timed = f.method == "a_edit"
        lr = self.rows["step"][-1]["lr"]  # the same in all replicas
        grown = int((f.qsr_c / lr) ** 2) if not timed and f.tau_rule == "qsr" else 0
        tau = 0 if timed else scheduled_tau(f, self.taken[0] - f.sync_warmup_steps)
        full = count * self.seconds[i] >= f.tau_time_s if timed else count == max(tau, grown)
        return full or self.progress + count * self.rate[i] >= f.max_steps

    def sync(self, sums, lr):
        steps, M, syncs = self.method.steps, self.M, self.rows["sync"]
        row = {"round": len(syncs) + 1, "step": self.taken[0], "tau": steps[0], "steps": steps}
        row |= {"loss": [total / count for total, count in zip(sums, steps)]}
        row |= {"weight": [1 / M] * M, "dropped": [0] * M, "clip": 1.0}
        syncs.append(row | (self.method.sync(lr) or {}))
        f = self.f  # before the sync in the product; the two do not meet
        for name in {"none": "", "m": "m", "both": "mv"}[f.average_moments]:
            for layer in self.method.layers:
                own = [getattr(replica, name)[layer] for replica in self.replicas]
                average = mean(own)
                [moment.copy_(average) for moment in own]

    def evaluate(self, local):
        judge, f = Replica(self.config, self.f.seed), self.f
        judge.x[:] = self.method.judged() if local else self.replicas[0].x
        batches = data.Batches(self.corpus, f.block_size, 16).validation(f.eval_batches)
        with torch.no_grad():
            loss = mean([judge.net(inputs, targets).item() for inputs, targets, _ in batches])
        spread = {"spread": self.method.spread()} if local and f.method == "noloco" else {}
        self.rows["eval"].append({"step": self.taken[0], "val_loss": loss} | spread)
        self.model = {name: p.data for name, p in judge.parameters.items()}


class Sick:
    """After each inner step in `steps` (counted from 0) the distance of some replicas to the anchor
    is `factor` (NaN, inf, 100) times as large; one_element: only that of the last element. In the reference, or as a training's tamper."""

    def __init__(self, factor, replicas, *steps, one_element=False):
        self.factor, self.replicas, self.steps = factor, replicas, steps
        self.one_element, self.part = one_element, slice(-1 if one_element else None, None)

    def __call__(self, method, model, mesh):
        after_step = method.after_step
        last = (model.layouts[-1].used - 1) // model.layouts[-1].shard_size  # shard
        here = mesh.shard_index == last or not self.one_element

        def spoil_and_end_step(*args):
            if here and method.steps in self.steps and mesh.replica in self.replicas:
                layers = list(zip(*map(model.used_views, (model.master, method.anchor))))
                for x, anchor in layers[-1:] if self.one_element else layers:
                    self.spoil(x, anchor)
            return after_step(*args)

        method.after_step = spoil_and_end_step

    def spoil(self, x, anchor):
        x, anchor = x[self.part], anchor[self.part]
        x.copy_(anchor + self.factor * (x - anchor))
