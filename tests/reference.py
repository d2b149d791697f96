"""Mini-batch, DiLoCo and EDiT from their equations, as plainly as possible: one process, fp64, M
whole models.

Written from the papers, not from this repository's methods. It shares with them only what is not
the method: the network (model.Llama, whole and unsharded) and which windows a rank reads.
"""

import math

import numpy as np
import torch

import data
from model import Llama, ModelConfig


def cosine(step, lr, min_lr_ratio, warmup, max_steps):
    if step < warmup:
        return lr * (step + 1) / warmup
    t = (step - warmup) / (max_steps - warmup)
    return lr * min_lr_ratio + lr * (1 - min_lr_ratio) * (1 + math.cos(math.pi * t)) / 2


class Replica:
    def __init__(self, config, seed):
        self.net = Llama(config, seed).double()
        self.x = dict(self.net.named_parameters())
        self.m = {name: torch.zeros_like(p) for name, p in self.x.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.x.items()}
        self.t = 0

    def gradient(self, batches):
        """Mean loss and mean gradient over the replica's
        batches (its N ranks, their micro-steps)."""
        losses = [self.net(inputs, targets) for inputs, targets in batches]
        loss = sum(losses) / len(losses)
        grads = torch.autograd.grad(loss, list(self.x.values()))
        return loss.item(), dict(zip(self.x, grads))

    def adamw(self, g, lr, f):
        self.t += 1
        for name, p in self.x.items():
            decay = f.weight_decay if p.dim() == 2 else 0.0
            self.m[name] = f.beta1 * self.m[name] + (1 - f.beta1) * g[name]
            self.v[name] = f.beta2 * self.v[name] + (1 - f.beta2) * g[name] ** 2
            m_hat = self.m[name] / (1 - f.beta1**self.t)
            v_hat = self.v[name] / (1 - f.beta2**self.t)
            p.data = p.data - lr * decay * p.data - lr * m_hat / (v_hat.sqrt() + 1e-8)

    def set(self, x):
        for name, p in self.x.items():
            p.data = x[name].clone()

    def copy(self):
        return {name: p.data.clone() for name, p in self.x.items()}


def clipped(g, max_norm):
    norm = math.sqrt(sum((value**2).sum().item() for value in g.values()))
    factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    return {name: value * factor for name, value in g.items()}


class OneDetector:
    """Norm statistics of one layer on one replica."""

    def __init__(self, f):
        self.f, self.samples = f, []

    def flags(self, G):
        warmup, seen = max(self.f.anomaly_warmup_rounds, 2), len(self.samples)
        if not math.isfinite(G):
            return True
        if seen >= warmup:
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


def edit_average(d, detectors, f):
    """EDiT's dhat of one layer from the replicas' d = [{name: tensor}, ...];
    None for a rollback."""
    G = [math.sqrt(sum((value**2).sum().item() for value in di.values())) for di in d]
    pairs = zip(detectors, G)
    flagged = [f.anomaly_elimination and detector.flags(norm) for detector, norm in pairs]
    good = [i for i in range(len(d)) if not flagged[i]]
    if not good:
        return None, flagged
    least = min(G[j] for j in good)
    score = {i: math.exp(-(G[i] - least)) if f.weighted_averaging else 1.0 for i in good}
    w = {i: score[i] / sum(score.values()) for i in good}
    dbar = {name: sum(w[i] * d[i][name] for i in good) for name in d[0]}
    norm = math.sqrt(sum((value**2).sum().item() for value in dbar.values()))
    factor = min(1.0, f.pseudo_grad_clip / (norm + 1e-6)) if f.pseudo_grad_clipping else 1.0
    return {name: value * factor for name, value in dbar.items()}, flagged


def simulate(f, M, N, corpus, tamper=None):
    """Train M replicas of N ranks each. f: an object with all flags as attributes. Returns
    the mean loss of each step, the final parameters, and per sync the number of flagged
    (layer, replica) pairs. tamper(step, replicas) may change them after a step."""
    config = ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, corpus.vocab_size)
    replicas = [Replica(config, f.seed) for _ in range(M)]
    in_layer = lambda l: [name for name in replicas[0].x if name.startswith(f"layers.{l}.")]
    layers = {l: in_layer(l) for l in range(f.n_layer + 2)}
    detectors = None
    if f.method == "edit":
        detectors = {l: [OneDetector(f) for _ in range(M)] for l in layers}
    t_warm = f.max_steps if f.method == "minibatch" else f.sync_warmup_steps
    anchor, b, local, losses, dropped = None, None, 0, [], []

    def outer_step():
        flagged_here = 0
        for l, names in layers.items():
            d = [{name: anchor[name] - r.x[name].data for name in names} for r in replicas]
            if f.method == "edit":
                dhat, flagged = edit_average(d, detectors[l], f)
                flagged_here += sum(flagged)
            else:
                dhat = {name: sum(di[name] for di in d) / M for name in names}
            for name in names if dhat is not None else []:
                b[name] = f.outer_momentum * b[name] + dhat[name]
                anchor[name] = anchor[name] - f.outer_lr * (dhat[name] + f.outer_momentum * b[name])
        dropped.append(flagged_here)
        for replica in replicas:
            replica.set(anchor)

    for step in range(f.max_steps):
        if step == t_warm:
            anchor = replicas[0].copy()
            b = {name: torch.zeros_like(value) for name, value in anchor.items()}
        step_losses, gradients = [], []
        for i, replica in enumerate(replicas):
            batches = [
                data.train_batch(
                    corpus, f.seed, step, micro, i * N + n, M * N,
                    f.batch_size, f.accum, f.block_size,
                )
                for micro in range(f.accum)
                for n in range(N)
            ]  # fmt: skip
            loss, g = replica.gradient(batches)
            step_losses.append(loss)
            gradients.append(g)
        if step < t_warm:
            mean = {name: sum(g[name] for g in gradients) / M for name in gradients[0]}
            gradients = [mean] * M
        lr = cosine(step, f.lr, f.min_lr_ratio, f.lr_warmup_steps, f.max_steps)
        for replica, g in zip(replicas, gradients):
            replica.adamw(clipped(g, f.grad_clip), lr, f)
        losses.append(sum(step_losses) / M)
        if tamper:
            tamper(step, replicas)
        if step >= t_warm:
            local += 1
            if local == f.tau or step == f.max_steps - 1:
                outer_step()
                local = 0
    return {"losses": losses, "model": replicas[0].copy(), "dropped": dropped}
