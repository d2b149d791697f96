"""What all plain versions share: sums of vectors, a replica with its AdamW, the hooks of a method.

A replica is a whole model, and its parameters are one flat vector x. A vector of a method (an
anchor, a momentum) has the same layout. simulation.py calls the hooks of a method. `f` has all
flags of a run as attributes. Beside the product: shard.py (AdamW, the layout) and method.py.
Source: AdamW, arXiv 1711.05101; the outer step with Nesterov momentum, arXiv 2311.08105.
"""

import math

import torch

import data
from model import Llama
from reference.muon import muon_step

EPS = 1e-8  # of AdamW


def mean(values):
    return sum(values) / len(values)


def weighted_sum(vectors, w):
    """sum_i w_i v_i. A vector with weight 0 is left out: 0 * NaN would be NaN."""
    total = torch.zeros_like(vectors[0])
    for v_i, w_i in zip(vectors, w):
        if w_i > 0:
            total = total + w_i * v_i
    return total


def norms_of(vectors):
    return [vector.norm().item() for vector in vectors]


def clipped(g, max_norm):
    """g with a norm of at most max_norm (0: any), or 0 if its norm is not finite."""
    norm = g.norm().item()
    if not math.isfinite(norm):
        return torch.zeros_like(g)
    if max_norm == 0:
        return g
    return g * min(1.0, max_norm / (norm + 1e-6))


def pieces(layers, N):
    """The slices of x that belong to one rank each: every layer is cut for its N ranks into pieces
    of a multiple of 16 elements. The last piece of a layer is shorter, or is not there."""
    found = []
    for layer in layers:
        elements = layer.stop - layer.start
        size = 16 * math.ceil(elements / (16 * N))
        for begin in range(layer.start, layer.stop, size):
            found.append(slice(begin, min(begin + size, layer.stop)))
    return found


class Replica:
    """A whole model and the state of its inner optimizer.

    x, m, v      parameters, AdamW's first and second moment: (P,), layer by layer
    layers       the slice of each layer
    parameters   name -> tensor, a view of x; a layer's matrices come first
    places       name -> slice of x
    decayed      (P,): is the element in a matrix, which weight decay acts on?
    """

    def __init__(self, config, seed):
        self.net = Llama(config, seed).double()
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

        self.x = torch.zeros(end).double()
        self.decayed = torch.zeros(end, dtype=torch.bool)
        for name, p in self.parameters.items():
            place = self.places[name]
            self.x[place] = p.data.flatten()
            self.decayed[place] = p.dim() == 2
            p.data = self.x[place].view(p.shape)  # from here on the network computes with x

        self.m = torch.zeros_like(self.x)
        self.v = torch.zeros_like(self.x)
        self.t = 0  # steps of AdamW

    def gradient(self, f, corpus, step, i, M, N):
        """Mean loss and gradient of replica i of M in a step, over its N ranks and their
        micro-steps."""
        losses = []
        sizes = (f.block_size, f.batch_size, f.accum)
        for micro_step in range(f.accum):
            for rank in range(i * N, i * N + N):
                batches = data.Batches(corpus, *sizes, rank, M * N, f.seed)
                losses.append(self.net(*batches.train(step, micro_step)))
        loss = mean(losses)
        gradients = torch.autograd.grad(loss, self.parameters.values())
        return loss.item(), torch.cat([g.flatten() for g in gradients])

    def step(self, g, lr, f):
        """The inner step: AdamW and, with --optimizer muon, Muon for the blocks' matrices."""
        before = self.x.clone()
        self.adamw(g, lr, f)
        if f.optimizer == "muon":
            muon_step(self, before, lr, f)

    def adamw(self, g, lr, f):
        self.t += 1
        # m <- beta1 m + (1 - beta1) g
        self.m = f.beta1 * self.m + (1 - f.beta1) * g
        # v <- beta2 v + (1 - beta2) g^2
        self.v = f.beta2 * self.v + (1 - f.beta2) * g**2
        # m_hat = m / (1 - beta1^t);  v_hat = v / (1 - beta2^t)
        m_hat = self.m / (1 - f.beta1**self.t)
        v_hat = self.v / (1 - f.beta2**self.t)
        # x <- x - lr wd x - lr m_hat / (sqrt(v_hat) + eps)
        decay = f.weight_decay * self.decayed
        self.x[:] = self.x - lr * decay * self.x - lr * m_hat / (v_hat.sqrt() + EPS)


class Method:
    """What M replicas do together after the warm-up. As it stands, it does nothing.

    x_i      self.replicas[i].x
    a, b     anchor and outer momentum, from begin() on
    steps    inner steps of each replica in this round
    """

    a = None
    steps = None

    def __init__(self, f, replicas, N):
        self.f = f
        self.replicas = replicas
        self.M = len(replicas)
        self.N = N
        self.layers = replicas[0].layers

    # ---- the hooks, in the order in which simulation.py calls them ----

    def begin(self):
        """The warm-up is over, and all replicas are equal."""
        self.a = self.replicas[0].x.clone()
        self.b = torch.zeros_like(self.a)

    def gradients(self, g):
        """{replica: its gradient in a local step} -> {replica: the gradient that it steps with}."""
        return g

    def inner_step(self, i, g, lr):
        self.replicas[i].step(g, lr, self.f)

    def after_inner_step(self, k):
        """k: inner steps since the warm-up."""

    def sync(self, lr):
        """The end of a round. lr: the inner learning rate of its last step. Returns what the row of
        the record says of the replicas."""
        return {}

    def finish(self, k):
        """The end of the training, after k inner steps since the warm-up."""

    def judged(self):
        """The parameters to evaluate, at the end of a round."""
        return self.replicas[0].x

    def spread(self):
        """What an evaluation records besides the loss."""
        return {}

    # ---- what methods use ----

    def d(self):
        """The pseudo-gradients d_i = a - x_i."""
        return [self.a - replica.x for replica in self.replicas]

    def set_all(self, x):
        """x_i <- x"""
        for replica in self.replicas:
            replica.x[:] = x

    def zeros(self):
        """A vector of zeros for each replica."""
        return [torch.zeros_like(replica.x) for replica in self.replicas]

    def nesterov(self, part, d):
        """The outer step of DiLoCo, EDiT and the streaming methods, on a part of the anchor."""
        mu = self.f.outer_momentum
        # b <- mu b + d
        self.b[part] = mu * self.b[part] + d
        # a <- a - lr (d + mu b)
        self.a[part] = self.a[part] - self.f.outer_lr * (d + mu * self.b[part])
