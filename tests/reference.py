"""The methods from their equations, as plainly as possible: one process, fp64, M whole models.
Written from the papers, not from this repository's methods. It shares with them only the network
(model.Llama, whole and unsharded) and which windows of the corpus a rank reads."""

import math
import types

import numpy as np
import torch
import torch.nn.functional as F

import data
import simulate as simulate_flags
from model import Llama, ModelConfig
from plumbing.config import parse
from ranks import flags
from train import METHODS


def cosine(step, lr, min_lr_ratio, warmup, max_steps):
    if step < warmup:
        return lr * (step + 1) / warmup
    t = (step - warmup) / (max_steps - warmup)
    return lr * min_lr_ratio + lr * (1 - min_lr_ratio) * (1 + math.cos(math.pi * t)) / 2


class Replica:
    """A whole model. x: its parameters in one vector, layer by layer, a layer's matrices first.
    layers: the slices of x; places: (name, slice, shape) of each parameter."""

    def __init__(self, config, seed):
        self.net = Llama(config, seed).double()
        self.parameters, self.places, self.layers, end = [], [], [], 0
        for l, layer in enumerate(self.net.layers):
            first = end
            for name, p in sorted(layer.named_parameters(), key=lambda item: -item[1].dim()):
                self.parameters.append(p)
                self.places.append((f"layers.{l}.{name}", slice(end, end + p.numel()), p.shape))
                end += p.numel()
            self.layers.append(slice(first, end))
        self.x = torch.cat([p.data.flatten() for p in self.parameters])
        for p, (_, place, shape) in zip(self.parameters, self.places):
            p.data = self.x[place].view(shape)
        self.decayed = torch.cat([torch.full((p.numel(),), p.dim() == 2) for p in self.parameters])
        self.m, self.v, self.t = torch.zeros_like(self.x), torch.zeros_like(self.x), 0

    def gradient(self, f, corpus, step, i, M, N):
        """Mean loss and gradient of replica i of M in a step, over its N ranks and their
        micro-steps."""
        sizes, losses = (f.batch_size, f.accum, f.block_size), []
        for micro in range(f.accum):
            for rank in range(i * N, i * N + N):
                batch = data.train_batch(corpus, f.seed, step, micro, rank, M * N, *sizes)
                losses.append(self.net(*batch))
        loss = mean(losses)
        grads = torch.autograd.grad(loss, self.parameters)
        return loss.item(), torch.cat([g.flatten() for g in grads])

    def adamw(self, g, lr, f):
        self.t += 1
        self.m = f.beta1 * self.m + (1 - f.beta1) * g
        self.v = f.beta2 * self.v + (1 - f.beta2) * g**2
        m_hat = self.m / (1 - f.beta1**self.t)
        v_hat = self.v / (1 - f.beta2**self.t)
        decay = f.weight_decay * self.decayed
        self.x[:] = self.x - lr * decay * self.x - lr * m_hat / (v_hat.sqrt() + 1e-8)


def clipped(g, max_norm):
    """g with a norm of at most max_norm (0: any), or 0 if its norm is not finite."""
    norm = g.norm().item()
    if not math.isfinite(norm):
        return torch.zeros_like(g)
    return g * (min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0)


class Method:
    """What replicas do together after the warm-up. f: flags; x_i: replicas[i].x; a: the anchor;
    k: inner steps since the warm-up. sync() returns what its row says of the replicas."""

    def __init__(self, f, replicas, N):
        self.f, self.replicas, self.M, self.N = f, replicas, len(replicas), N
        self.layers, self.a = replicas[0].layers, None

    def begin(self):
        self.a = self.replicas[0].x.clone()
        self.b = torch.zeros_like(self.a)

    def after_inner_step(self, k):
        pass

    def sync(self, lr):
        """At the end of a round. lr: the inner rate of its last step."""

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


def mean(vectors):
    return sum(vectors) / len(vectors)


def norms(vectors):
    return [vector.norm().item() for vector in vectors]


class PostLocalSGD(Method):
    def sync(self, lr):
        self.set_all(mean([replica.x for replica in self.replicas]))
        return {}


class DiLoCo(Method):
    def sync(self, lr):
        d, f = self.d(), self.f
        self.b = f.outer_momentum * self.b + mean(d)
        self.a = self.a - f.outer_lr * (mean(d) + f.outer_momentum * self.b)
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
    def begin(self):
        super().begin()
        self.mean, self.r, self.C = None, 0.0, 0.0

    def outer_step(self):
        f = self.f
        phi = f.outer_momentum_clip or math.inf
        G = 1 + self.r / self.C if self.C > 0 and f.staleness_penalty else 1.0
        self.b = (f.outer_momentum * self.b + self.mean / G).clamp(-phi, phi)
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
        self.u = [torch.zeros_like(a) for a in self.anchors]
        self.t = 0

    def pairs(self):
        """The groups of one or two replicas of round t."""
        draw = np.random.Generator(np.random.Philox(key=self.f.seed, counter=[0, 0, 2, self.t]))
        order = draw.permutation(self.M).tolist()
        return [order[first : first + 2] for first in range(0, self.M, 2)]

    def sync(self, lr):
        f, old, self.t = self.f, self.anchors, self.t + 1
        d = [a - replica.x for a, replica in zip(old, self.replicas)]
        self.anchors = [None] * self.M
        for pair in self.pairs():
            for i in pair:
                progress = f.outer_lr * mean([d[j] for j in pair])
                pull = f.pull * (old[i] - mean([old[j] for j in pair]))
                self.u[i] = f.outer_momentum * self.u[i] + progress + pull
                self.anchors[i] = old[i] - self.u[i]
                self.replicas[i].x[:] = self.anchors[i]
        return {"pseudo_grad_norm": norms(d)}

    def finish(self, k):
        self.set_all(mean(self.anchors))

    def judged(self):
        return mean(self.anchors)

    def spread(self):
        return math.sqrt(mean([(a - mean(self.anchors)).norm().item() ** 2 for a in self.anchors]))


class StreamingDiLoCo(Method):
    def begin(self):
        super().begin()
        L, F = len(self.layers), self.f.fragments
        strided = self.f.fragment_pattern == "strided"
        owner = [l % F if strided else l * F // L for l in range(L)]
        self.fragments = [[l for l in range(L) if owner[l] == p] for p in range(F)]
        self.flying, self.landed = None, {}  # (p, k_sent, means by layer); p -> k

    def after_inner_step(self, k):
        interval = self.f.tau // self.f.fragments
        if k % interval == 0:
            self.send((k // interval - 1) % self.f.fragments, k)
        if self.flying and k == self.flying[1] + self.f.delay:
            self.land(k, self.f.alpha)

    def send(self, p, k):
        d = self.d()
        means = {
            l: quantized_mean([di[self.layers[l]] for di in d], self.N, self.f.quantize)
            for l in self.fragments[p]
        }
        self.flying = p, k, means

    def land(self, k, alpha):
        p, _, means = self.flying
        for l, d in means.items():
            layer, mu = self.layers[l], self.f.outer_momentum
            self.b[layer] = mu * self.b[layer] + d
            self.a[layer] = self.a[layer] - self.f.outer_lr * (d + mu * self.b[layer])
            for replica in self.replicas:
                replica.x[layer] = alpha * replica.x[layer] + (1 - alpha) * self.a[layer]
        self.flying, self.landed[p] = None, k

    def sync(self, lr):
        return {}

    def finish(self, k):
        if self.flying:
            self.land(k, alpha=0)
        for p in range(self.f.fragments):
            if self.landed.get(p) != k:
                self.send(p, k)
                self.land(k, alpha=0)

    def judged(self):
        return self.a


def quantized_mean(d, N, form, w=None):
    """The mean of M replicas' vectors of one layer, with weights w (default: equal; 0 leaves a
    replica out). Each of N ranks has a piece of the layer."""
    M, size = len(d), len(d[0])
    w = w or [1 / M] * M
    good = [i for i in range(M) if w[i] > 0]
    weighted = lambda vectors: sum((w[i] * vectors[i] for i in good), torch.zeros_like(d[0]))
    if M == 1 or form == "none":
        return weighted(d)
    pieces = [F.pad(di, (0, -size % N)).chunk(N) for di in d]
    weighted = lambda n: sum(w[i] * rounded(pieces[i][n], form) for i in good)
    means = [weighted(n) if good else torch.zeros_like(pieces[0][n]) for n in range(N)]
    if M > 2:  # who has the mean of a piece sends it quantised, too
        means = [rounded(piece, form) for piece in means]
    return torch.cat(means)[:size]


def rounded(v, form):
    """v as the receiver decodes it: blocks of 256 elements, each with a scale in fp32."""
    blocks = F.pad(v, (0, -len(v) % 256)).view(-1, 256)
    rows = [rounded_int8(block) if form == "int8" else rounded_e3m0(block) for block in blocks]
    return torch.cat(rows)[: len(v)]


def rounded_int8(block):
    s = (block.abs().max() / 127).float().double()
    return torch.zeros_like(block) if s == 0 else s * (block / s).round()


def rounded_e3m0(block):
    """The nearest of 0, s/64, s/32, ..., s, the larger one of two that are as near."""
    s = block.abs().max().float().double()
    levels = torch.tensor([0.0] + [2.0**-n for n in range(6, -1, -1)], dtype=torch.float64) * s
    distance = (block.abs()[:, None] - levels.flip(0)).abs()
    return block.sign() * levels.flip(0)[distance.argmin(dim=1)]


class EDiT(Method):
    steps = None  # A-EDiT: how many each replica has taken in the round

    def begin(self):
        super().begin()
        self.detectors = [[OneDetector(self.f) for _ in self.replicas] for _ in self.layers]

    def sync(self, lr):
        d, mu, reports = self.d(), self.f.outer_momentum, []
        for layer, detectors in zip(self.layers, self.detectors):
            w, report = edit_weights([di[layer] for di in d], detectors, self.f, self.steps)
            reports.append(report | {"clip": 1.0})
            if any(w):
                dbar = sum(w[i] * d[i][layer] for i in range(self.M) if w[i] > 0)
                reports[-1]["clip"] = edit_clip(dbar, self.f)
                dhat = dbar * reports[-1]["clip"]
                self.b[layer] = mu * self.b[layer] + dhat
                self.a[layer] = self.a[layer] - self.f.outer_lr * (dhat + mu * self.b[layer])
        self.set_all(self.a)
        return edit_row(reports)


class OneDetector:
    """Norm statistics of one layer on one replica."""

    def __init__(self, f):
        self.f, self.samples = f, []

    def flags(self, G):
        warmup = max(self.f.anomaly_warmup_rounds, 2)
        if not math.isfinite(G) or not self.f.anomaly_elimination:
            return not math.isfinite(G)
        if len(self.samples) >= warmup:
            mu, sigma = self.statistics(warmup)
            if (G - mu) / max(sigma, 0.05 * mu) > self.f.anomaly_threshold:
                return True
        self.samples.append(G)
        return False

    def statistics(self, warmup):
        mu, variance = np.mean(self.samples[:warmup]), np.var(self.samples[:warmup], ddof=1)
        for G in self.samples[warmup:]:
            mu = mu + self.f.anomaly_ema * (G - mu)
            variance = (1 - self.f.anomaly_ema) * variance + self.f.anomaly_ema * (G - mu) ** 2
        return mu, math.sqrt(variance)


def edit_weights(d, detectors, f, steps=None):
    """EDiT's weights of one layer from the replicas' d, 0 for flagged ones; and what the record
    says of it. steps: of each replica in A-EDiT."""
    G = judged = norms(d)
    if steps and f.step_weighting == "norm_per_step":
        judged = [norm / count * (sum(steps) / len(steps)) for norm, count in zip(G, steps)]
    flagged = [int(detector.flags(norm)) for detector, norm in zip(detectors, judged)]
    least = min((norm for norm, out in zip(judged, flagged) if not out), default=0.0)
    score = [math.exp(least - norm) if f.weighted_averaging else 1.0 for norm in judged]
    if steps and f.step_weighting == "times_steps":
        score = [s * count for s, count in zip(score, steps)]
    score = [0.0 if out else s for s, out in zip(score, flagged)]
    w = [s / (sum(score) or 1.0) for s in score]
    return w, dict(G=G, flagged=flagged, w=w)


def edit_clip(dbar, f):
    phi = f.pseudo_grad_clip if f.pseudo_grad_clipping else math.inf
    return min(1.0, phi / (dbar.norm().item() + 1e-6))


def edit_row(reports):
    each = lambda key: np.array([report[key] for report in reports])  # (L, M) or (L,)
    return {
        "pseudo_grad_norm": np.sqrt((each("G") ** 2).sum(axis=0)),
        "dropped": each("flagged").sum(axis=0),
        "weight": each("w").mean(axis=0),
        "clip": each("clip").mean(),
    }


class StreamingEDiT(StreamingDiLoCo):
    def begin(self):
        super().begin()
        self.detectors = [[OneDetector(self.f) for _ in self.replicas] for _ in self.layers]
        self.reports = []

    def after_inner_step(self, k):
        super().after_inner_step(k)
        last = self.f.max_steps - self.f.sync_warmup_steps
        if k == last and self.flying and self.flying[1] < k:
            self.land(k, alpha=0)  # early enough for the last row

    def send(self, p, k):
        d, means = self.d(), {}
        for l in self.fragments[p]:
            own = [di[self.layers[l]] for di in d]
            w, report = edit_weights(own, self.detectors[l], self.f)
            means[l] = quantized_mean(own, self.N, self.f.quantize, w), report
        self.flying = p, k, means

    def land(self, k, alpha):
        p, _, means = self.flying
        for l, (dbar, report) in means.items():
            layer, mu = self.layers[l], self.f.outer_momentum
            report["clip"] = edit_clip(dbar, self.f)
            self.reports.append(report)
            if any(report["w"]):
                dhat = dbar * report["clip"]
                self.b[layer] = mu * self.b[layer] + dhat
                self.a[layer] = self.a[layer] - self.f.outer_lr * (dhat + mu * self.b[layer])
            for i, replica in enumerate(self.replicas):
                sick = report["flagged"][i] or not replica.x[layer].isfinite().all()
                mixed = alpha * replica.x[layer] + (1 - alpha) * self.a[layer]
                replica.x[layer] = self.a[layer] if sick else mixed
        self.flying, self.landed[p] = None, k

    def sync(self, lr):
        reports, self.reports = self.reports, []
        return edit_row(reports) if reports else {}


RULES = {
    "minibatch": Method, "post_local_sgd": PostLocalSGD, "slowmo": SlowMo, "diloco": DiLoCo,
    "streaming_diloco": StreamingDiLoCo, "co2": CO2, "noloco": NoLoCo, "edit": EDiT,
    "streaming_edit": StreamingEDiT,
}  # fmt: skip


def validation_loss(x, config, f, corpus):
    judge = Replica(config, f.seed)
    judge.x[:] = x
    batches = data.validation_batches(corpus, f.eval_batches, 0, 1, 16, f.block_size)
    with torch.no_grad():
        return mean([judge.net(inputs, targets).item() for inputs, targets, _ in batches])


def simulate(f, M, N, corpus, tamper=None):
    """Train M replicas of N ranks each. f: an object with all flags as attributes. Returns the
    logged loss of each step, the final parameters, the sync rows of the record, the validation loss
    by step and (NoLoCo) the spread at round ends. tamper(step, replicas, anchor) may change the
    replicas after a step."""
    config = ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, corpus.vocab_size)
    replicas = [Replica(config, f.seed) for _ in range(M)]
    method = RULES[f.method](f, replicas, N)
    t_warm = f.max_steps if f.method == "minibatch" else f.sync_warmup_steps
    losses, round_losses, syncs, evals, spreads = [], [], [], {}, []
    evaluate = lambda: validation_loss(method.judged(), config, f, corpus)

    for step in range(f.max_steps):
        if step == t_warm:
            method.begin()
        each = [replica.gradient(f, corpus, step, i, M, N) for i, replica in enumerate(replicas)]
        step_losses, gradients = zip(*each)
        if step < t_warm:
            gradients = [mean(gradients)] * M
        lr = cosine(step, f.lr, f.min_lr_ratio, f.lr_warmup_steps, f.max_steps)
        for replica, g in zip(replicas, gradients):
            replica.adamw(clipped(g, f.grad_clip), lr, f)
        # Averaged steps log the mean of all replicas, local steps replica 0's loss.
        losses.append(mean(step_losses) if step < t_warm else step_losses[0])
        if tamper:
            tamper(step, replicas, method.a)
        if step < t_warm:
            continue
        method.after_inner_step(step + 1 - t_warm)
        round_losses.append(step_losses)
        if len(round_losses) == f.tau or step == f.max_steps - 1:
            row = {"step": step + 1, "steps": [len(round_losses)] * M}
            row |= {"loss": np.mean(round_losses, axis=0)}
            row |= {"weight": [1 / M] * M, "dropped": [0] * M, "clip": 1.0}
            syncs.append(row | method.sync(lr))
            if f.average_moments:
                m, v = mean([each.m for each in replicas]), mean([each.v for each in replicas])
                for replica in replicas:
                    replica.m, replica.v = m, v
            round_losses = []
            evals[step + 1] = evaluate()
            spreads += [method.spread()] if f.method == "noloco" else []
    if f.max_steps > t_warm:
        method.finish(f.max_steps - t_warm)
    evals[f.max_steps] = evaluate()
    x = method.judged()
    model = {name: x[place].view(shape) for name, place, shape in replicas[0].places}
    return {"losses": losses, "model": model, "syncs": syncs, "evals": evals, "spreads": spreads}


def simulate_a_edit(f, M, N, corpus, seconds):
    """A-EDiT without a warm-up, on M replicas whose steps take seconds[i]. Returns what simulate()
    returns, and the seconds of the whole run."""
    config = ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, corpus.vocab_size)
    replicas = [Replica(config, f.seed) for _ in range(M)]
    method, taken, rate, progress, now = EDiT(f, replicas, N), [0] * M, [1.0] * M, 0.0, 0.0
    losses, syncs = [], []
    method.begin()
    while progress < f.max_steps:
        method.steps, sums, ends = [0] * M, [0.0] * M, [now] * M
        for i, replica in enumerate(replicas):
            full = False
            while not full:
                here = progress + method.steps[i] * rate[i]
                lr = cosine(here, f.lr, f.min_lr_ratio, f.lr_warmup_steps, f.max_steps)
                step = taken[i] + method.steps[i]
                loss, g = replica.gradient(f, corpus, step, i, M, N)
                replica.adamw(clipped(g, f.grad_clip), lr, f)
                losses += [loss] if i == 0 else []
                sums[i], ends[i] = sums[i] + loss, ends[i] + seconds[i]
                method.steps[i] += 1
                full = ends[i] - now >= f.tau_time_s
                full = full or progress + method.steps[i] * rate[i] >= f.max_steps
        taken = [before + count for before, count in zip(taken, method.steps)]
        now, average = max(ends), sum(method.steps) / M
        progress, rate = progress + average, [average / count for count in method.steps]
        row = {"step": taken[0], "steps": method.steps}
        row |= {"loss": [total / count for total, count in zip(sums, method.steps)]}
        syncs.append(row | method.sync(None))
    x = method.judged()
    evals = {taken[0]: validation_loss(x, config, f, corpus)}
    model = {name: x[place].view(shape) for name, place, shape in replicas[0].places}
    return {"losses": losses, "model": model, "syncs": syncs, "evals": evals, "seconds": now}


def all_flags(**options):
    """What simulate() wants to know of a run with these flags."""
    config, method_config, *_ = parse(flags(**options), METHODS, simulate_flags.Config)
    return types.SimpleNamespace(**vars(config) | vars(method_config))


def assert_matches(run, expected, rtol=1e-9):
    """A ranks.Run against what simulate() returned. Everything is fp64, so only the order of sums
    differs; model.pt is fp32."""
    assert_close(run.losses, expected["losses"], rtol)
    assert len(run.rows("sync")) == len(expected["syncs"])
    for row, sync in zip(run.rows("sync"), expected["syncs"]):
        for key, value in sync.items():
            assert_close(row[key], value, rtol, f"{key} at step {row['step']}")
    for row in run.rows("eval"):
        if row["step"] in expected["evals"]:
            assert_close(row["val_loss"], expected["evals"][row["step"]], rtol, row["step"])
    for name, value in expected["model"].items():
        torch.testing.assert_close(run.model[name], value.float(), rtol=1e-6, atol=1e-7)


def assert_close(recorded, value, rtol, message=""):
    """Numbers of the record, in which None stands for one that is not finite."""
    recorded, value = np.array(recorded, dtype=float), np.array(value, dtype=float)
    value = np.where(np.isfinite(value), value, math.nan)
    np.testing.assert_allclose(recorded, value, rtol=rtol, atol=1e-14, err_msg=str(message))
