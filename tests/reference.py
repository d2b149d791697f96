"""Mini-batch, DiLoCo and EDiT from their equations, as plainly as possible: one process, fp64, M
whole models. Written from the papers, not from this repository's methods. It shares with them only
the network (model.Llama, whole and unsharded) and which windows of the corpus a rank reads."""

import math
import types

import numpy as np
import torch

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
    def __init__(self, config, seed):
        self.net = Llama(config, seed).double()
        self.x = dict(self.net.named_parameters())
        self.m, self.v, self.t = self.zeros(), self.zeros(), 0

    def zeros(self):
        return {name: torch.zeros_like(p.data) for name, p in self.x.items()}

    def gradient(self, batches):
        """Mean loss and gradient over the replica's batches (its N ranks, their micro-steps)."""
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


def norm_of(vectors):
    """Euclidean norm of all tensors of a dict together."""
    return math.sqrt(sum((value**2).sum().item() for value in vectors.values()))


def clipped(g, max_norm):
    """g with a norm of at most max_norm (0: any), or 0 if its norm is not finite."""
    norm = norm_of(g)
    if not math.isfinite(norm):
        return {name: torch.zeros_like(value) for name, value in g.items()}
    factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    return {name: value * factor for name, value in g.items()}


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


def diloco_average(d):
    """The mean of d = [{name: tensor}, ...], and what the record says of it."""
    M = len(d)
    dhat = {name: sum(di[name] for di in d) / M for name in d[0]}
    return dhat, dict(G=[norm_of(di) for di in d], flagged=[0] * M, w=[1 / M] * M, clip=1.0)


def edit_average(d, detectors, f):
    """EDiT's dhat of one layer from the replicas' d = [{name: tensor}, ...], None for a rollback;
    and what the record says of it."""
    G = [norm_of(di) for di in d]
    flagged = [int(detector.flags(norm)) for detector, norm in zip(detectors, G)]
    good = [i for i in range(len(d)) if not flagged[i]]
    if not good:
        return None, dict(G=G, flagged=flagged, w=[0.0] * len(d), clip=1.0)
    least = min(G[j] for j in good)
    score = {i: math.exp(-(G[i] - least)) if f.weighted_averaging else 1.0 for i in good}
    w = {i: score[i] / sum(score.values()) for i in good}
    dbar = {name: sum(w[i] * d[i][name] for i in good) for name in d[0]}
    clip = min(1.0, f.pseudo_grad_clip / (norm_of(dbar) + 1e-6)) if f.pseudo_grad_clipping else 1.0
    dhat = {name: value * clip for name, value in dbar.items()}
    return dhat, dict(G=G, flagged=flagged, w=[w.get(i, 0.0) for i in range(len(d))], clip=clip)


def simulate(f, M, N, corpus, tamper=None):
    """Train M replicas of N ranks each. f: an object with all flags as attributes. Returns the
    logged loss of each step, the final parameters, and the sync rows of the record.
    tamper(step, replicas, anchor) may change the replicas after a step."""
    config = ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, corpus.vocab_size)
    replicas = [Replica(config, f.seed) for _ in range(M)]
    in_layer = lambda l: [name for name in replicas[0].x if name.startswith(f"layers.{l}.")]
    layers = {l: in_layer(l) for l in range(f.n_layer + 2)}
    detectors = {l: [OneDetector(f) for _ in range(M)] for l in layers}
    t_warm = f.max_steps if f.method == "minibatch" else f.sync_warmup_steps
    anchor, b, losses, round_losses, syncs = None, None, [], [], []

    def outer_step(step):
        reports = []
        for l, names in layers.items():
            d = [{name: anchor[name] - r.x[name].data for name in names} for r in replicas]
            if f.method == "edit":
                dhat, report = edit_average(d, detectors[l], f)
            else:
                dhat, report = diloco_average(d)
            reports.append(report)
            for name in names if dhat is not None else []:
                b[name] = f.outer_momentum * b[name] + dhat[name]
                anchor[name] = anchor[name] - f.outer_lr * (dhat[name] + f.outer_momentum * b[name])
        for replica in replicas:
            replica.set(anchor)
        each = lambda key: np.array([report[key] for report in reports])  # (L, M) or (L,)
        syncs.append({
            "step": step + 1, "steps": [len(round_losses)] * M,
            "loss": np.mean(round_losses, axis=0), "dropped": each("flagged").sum(axis=0),
            "pseudo_grad_norm": np.sqrt((each("G") ** 2).sum(axis=0)),
            "weight": each("w").mean(axis=0), "clip": each("clip").mean(),
        })  # fmt: skip

    for step in range(f.max_steps):
        if step == t_warm:
            anchor, b = replicas[0].copy(), replicas[0].zeros()
        step_losses, gradients = [], []
        for i, replica in enumerate(replicas):
            sizes = f.batch_size, f.accum, f.block_size
            batches = [
                data.train_batch(corpus, f.seed, step, micro, i * N + n, M * N, *sizes)
                for micro in range(f.accum)
                for n in range(N)
            ]
            loss, g = replica.gradient(batches)
            step_losses.append(loss)
            gradients.append(g)
        if step < t_warm:
            mean = {name: sum(g[name] for g in gradients) / M for name in gradients[0]}
            gradients = [mean] * M
        lr = cosine(step, f.lr, f.min_lr_ratio, f.lr_warmup_steps, f.max_steps)
        for replica, g in zip(replicas, gradients):
            replica.adamw(clipped(g, f.grad_clip), lr, f)
        # Averaged steps log the mean of all replicas, local steps replica 0's loss.
        losses.append(sum(step_losses) / M if step < t_warm else step_losses[0])
        if tamper:
            tamper(step, replicas, anchor)
        if step >= t_warm:
            round_losses.append(step_losses)
            if len(round_losses) == f.tau or step == f.max_steps - 1:
                outer_step(step)
                round_losses = []
    return {"losses": losses, "model": replicas[0].copy(), "syncs": syncs}


def all_flags(**options):
    """What simulate() wants to know of a run with these flags."""
    config, method_config, *_ = parse(flags(**options), METHODS, simulate_flags.Config)
    return types.SimpleNamespace(**vars(config) | vars(method_config))


def assert_matches(run, expected):
    """A ranks.Run against what simulate() returned. Everything is fp64, so only the order of sums
    differs; model.pt is fp32."""
    assert_close(run.losses, expected["losses"])
    assert len(run.rows("sync")) == len(expected["syncs"])
    for row, sync in zip(run.rows("sync"), expected["syncs"]):
        for key, value in sync.items():
            assert_close(row[key], value, f"{key} at step {row['step']}")
    for name, value in expected["model"].items():
        torch.testing.assert_close(run.model[name], value.float(), rtol=1e-6, atol=1e-7)


def assert_close(recorded, value, message=""):
    """Numbers of the record, in which None stands for one that is not finite."""
    recorded, value = np.array(recorded, dtype=float), np.array(value, dtype=float)
    value = np.where(np.isfinite(value), value, math.nan)
    np.testing.assert_allclose(recorded, value, rtol=1e-9, atol=1e-14, err_msg=message)
