"""What all plain versions share: a method's hooks, and sums of vectors.

A replica is a whole model, and its parameters are one flat vector x (replica.py). A vector of a
method (an anchor, a momentum) has the same layout. train.py calls the hooks. `f` has all flags of a
run as attributes. Sharded twin: method.py.
Source: the outer step with Nesterov momentum, arXiv 2311.08105.
"""

import math

import torch

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


def hits(disturbance, i, step):
    """Does R:FIRST:LAST, the value of a flag of the simulation, mean replica i in this step? Steps
    are counted from 1."""
    if not disturbance:
        return False
    R, first, last, *_ = map(float, disturbance.split(":"))
    return i == R and first <= step <= last


class Method:
    """What M replicas do together after the warm-up. As it stands, it does nothing.

    x_i      self.replicas[i].x
    a, b     anchor and outer momentum, from begin() on
    steps    inner steps of each replica in this round
    rates    the learning rates of replica 0's steps in this round
    """

    a = None
    steps = None
    rates = None

    def __init__(self, f, replicas, N):
        self.f = f
        self.replicas = replicas
        self.M = len(replicas)
        self.N = N
        self.layers = replicas[0].layers

    # ---- the hooks, in the order in which train.py calls them ----

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

    def sync(self):
        """The end of a round. Returns what the row of the record says of the replicas."""
        return {}

    def finish(self, k):
        """The end of the training, after k inner steps since the warm-up."""

    def evaluation_model(self):
        """The parameters to evaluate, at the end of a round."""
        return self.replicas[0].x

    def spread(self):
        """What an evaluation records besides the loss."""
        return {}

    # ---- what methods use ----

    def anchor(self, i):
        """What replica i had at the last sync."""
        return self.a

    def d(self):
        """The pseudo-gradients d_i = a - x_i."""
        return [self.anchor(i) - replica.x for i, replica in enumerate(self.replicas)]

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
