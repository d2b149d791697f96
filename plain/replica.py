"""A replica of the plain versions: a whole model, its gradient, and its inner optimizer.

The parameters are one flat vector x, layer by layer, and the network computes with views of it.
Read step() and adamw() first. `f` has all flags of a run as attributes.
Sharded twins: shard.py (the layout, the gradient), optimizer.py (AdamW).
Source: AdamW, arXiv 1711.05101.
"""

import math

import numpy as np
import torch

import data
from model import Llama
from plain.method import EPS, hits
from plain.muon import muon_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def clipped(g, max_norm):
    """g with a norm of at most max_norm (0: any), or 0 if its norm is not finite."""
    norm = g.norm().item()
    if not math.isfinite(norm):
        return torch.zeros_like(g)
    if max_norm == 0:
        return g
    return g * min(1.0, max_norm / (norm + 1e-6))


class Replica:
    """A whole model and the state of its inner optimizer.

    x, m, v      parameters, AdamW's first and second moment: (P,), layer by layer
    layers       the slice of each layer
    parameters   name -> tensor, a view of x; a layer's matrices come first
    places       name -> slice of x
    decayed      (P,): 1 in matrices, on which weight decay acts, else 0

    With --dtype bf16 the network computes with a copy of x in bf16, and all vectors are fp32.
    """

    def __init__(self, config, f):
        self.net = Llama(config, f.seed).to(f.device)
        self.parameters = {}
        self.places = {}
        self.layers = []
        end = 0
        for l, layer in enumerate(self.net.layers):
            first = end
            named = layer.named_parameters(prefix=f"layers.{l}")
            for name, p in sorted(named, key=lambda item: -item[1].dim()):
                begin = end
                end = begin + p.numel()
                self.parameters[name] = p
                self.places[name] = slice(begin, end)
            self.layers.append(slice(first, end))

        dtype = DTYPES[f.dtype]
        self.x = torch.zeros(end, dtype=torch.promote_types(dtype, torch.float32), device=f.device)
        self.weights = self.x
        if dtype == torch.bfloat16:
            self.weights = torch.zeros_like(self.x, dtype=dtype)
        self.decayed = torch.zeros_like(self.x)
        for name, p in self.parameters.items():
            place = self.places[name]
            self.x[place] = p.data.flatten()
            self.decayed[place] = p.dim() == 2
            p.data = self.weights[place].view(p.shape)  # from here on the network computes with it

        self.m = torch.zeros_like(self.x)
        self.v = torch.zeros_like(self.x)
        self.t = 0  # steps of AdamW

    def gradient(self, f, corpus, step, i, M, N):
        """Mean loss and gradient of replica i of M in a step, over its N ranks and their
        micro-steps. The windows of all its ranks are one batch."""
        loss = 0.0
        g = 0.0
        self.read_x()
        for micro_step in range(f.accum):
            inputs, targets = windows(f, corpus, step, micro_step, i, M, N)
            loss_here = self.net(inputs, targets) / f.accum
            parts = torch.autograd.grad(loss_here, self.parameters.values())
            g = g + torch.cat([part.flatten() for part in parts]).to(self.x.dtype)
            loss += loss_here.item()
        return loss, g

    @torch.no_grad()
    def loss(self, batch):
        """Of a batch of data.Batches.validation()."""
        inputs, targets, _ = batch
        return self.net(inputs, targets).item()

    def read_x(self):
        """The network computes with the x of this moment."""
        if self.weights is not self.x:
            self.weights.copy_(self.x)

    def step(self, g, lr, f):
        """The inner step: AdamW and, with --optimizer muon, Muon for the blocks' matrices."""
        if f.optimizer == "muon":
            before = self.x.clone()
            self.adamw(g, lr, f)
            muon_step(self, before, lr, f)
        else:
            self.adamw(g, lr, f)

    def adamw(self, g, lr, f):
        """In place: a new vector for each term would take three times as long."""
        self.t += 1
        # m <- beta1 m + (1 - beta1) g
        self.m.mul_(f.beta1).add_(g, alpha=1 - f.beta1)
        # v <- beta2 v + (1 - beta2) g^2
        self.v.mul_(f.beta2).addcmul_(g, g, value=1 - f.beta2)
        # v_hat = v / (1 - beta2^t)
        v_hat = self.v / (1 - f.beta2**self.t)
        # x <- x - lr wd x, where x is decayed
        self.x.addcmul_(self.x, self.decayed, value=-lr * f.weight_decay)
        # x <- x - lr m_hat / (sqrt(v_hat) + eps);  m_hat = m / (1 - beta1^t)
        self.x.addcdiv_(self.m, v_hat.sqrt_().add_(EPS), value=-lr / (1 - f.beta1**self.t))


def windows(f, corpus, step, micro_step, i, M, N):
    """Inputs and targets of replica i in a micro-step: the windows of its N ranks, one below the
    other, or with --random_tokens uniform random tokens."""
    inputs = []
    targets = []
    for rank in range(i * N, i * N + N):
        sizes = (f.block_size, f.batch_size, f.accum, rank, M * N)
        batches = data.Batches(corpus, *sizes, f.seed, torch.device(f.device))
        batch = batches.train(step, micro_step)
        if hits(f.random_tokens, i, step + 1):
            # The third number: 0 draws the batches, 2 NoLoCo's pairs.
            counter = [0, micro_step * N + rank - i * N, 3, step]
            generator = np.random.Generator(np.random.Philox(key=f.seed, counter=counter))
            tokens = generator.integers(corpus.vocab_size, size=(2, *batch[0].shape))
            batch = torch.from_numpy(tokens).to(f.device)
        inputs.append(batch[0])
        targets.append(batch[1])
    return torch.cat(inputs), torch.cat(targets)
