"""A replica of the plain versions: a whole model, its gradient, and its inner optimizer.

The model is any list of layers, as for shard.py: x = layer(x) for each, and the last one also gets
the targets and returns the mean loss. The parameters are one flat vector, layer by layer, and the
layers compute with views of it. Read gradient() and adamw() first. `f` has all flags of a run as
attributes.
Sharded twins: shard.py (the layout, the gradient), optimizer.py (AdamW).
Source: AdamW, arXiv 1711.05101.
"""

import copy
import math

import torch

from model import check_layers, run_layer
from plain.method import EPS
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
    t            inner steps so far

    With --dtype bf16 the layers compute with a copy of x in bf16, and all vectors are fp32.
    """

    def __init__(self, layers, f, optimizer):
        """layers: nn.Modules, of which the replica takes a copy; optimizer(replica, g, lr, f): the
        inner step. Raises UserError for layers that cannot be trained."""
        check_layers(layers)
        self.optimizer = optimizer
        self.net = [copy.deepcopy(layer).to(f.device) for layer in layers]
        self.parameters = {}
        self.places = {}
        self.layers = []
        end = 0
        for l, layer in enumerate(self.net):
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
            self.decayed[place] = p.dim() > 1
            p.data = self.weights[place].view(p.shape)  # from here on the layers compute with it

        self.m = torch.zeros_like(self.x)
        self.v = torch.zeros_like(self.x)
        self.t = 0

    def loss(self, inputs, targets, train=True):
        """The mean loss of a batch, with the x that read_x() has read. In the training also what
        layers add to it (shard.py: aux_loss)."""
        x = inputs
        total = 0.0
        for l, layer in enumerate(self.net):
            layer.train(train)
            more = [targets] if l == len(self.net) - 1 else []
            x, *own_losses = run_layer(layer, l, x, *more)
            if train:
                total = total + sum(own_losses)
        return x + total

    def gradient(self, batches):
        """Mean loss and gradient over the batches of a step: those of the replica's ranks and their
        micro-steps. A parameter that no batch has used has gradient 0."""
        mean_loss = 0.0
        g = torch.zeros_like(self.x)
        self.read_x()
        for inputs, targets in batches:
            loss = self.loss(inputs, targets) / len(batches)
            parts = torch.autograd.grad(
                loss, self.parameters.values(), allow_unused=True, materialize_grads=True
            )
            g += torch.cat([part.flatten() for part in parts])
            mean_loss += loss.item()
        return mean_loss, g

    @torch.no_grad()
    def evaluate(self, batch):
        """The loss of a batch, whose first two entries are inputs and targets."""
        inputs, targets = batch[:2]
        return self.loss(inputs, targets, train=False).item()

    def read_x(self):
        """The layers compute with the x of this moment."""
        if self.weights is not self.x:
            self.weights.copy_(self.x)

    def step(self, g, lr, f):
        """The inner step, with the gradient g."""
        self.t += 1
        self.optimizer(self, g, lr, f)


def adamw(replica, g, lr, f):
    """In place: a new vector for each term would take three times as long."""
    # m <- beta1 m + (1 - beta1) g
    replica.m.mul_(f.beta1).add_(g, alpha=1 - f.beta1)
    # v <- beta2 v + (1 - beta2) g^2
    replica.v.mul_(f.beta2).addcmul_(g, g, value=1 - f.beta2)
    # v_hat = v / (1 - beta2^t)
    v_hat = replica.v / (1 - f.beta2**replica.t)
    # x <- x - lr wd x, where x is decayed
    replica.x.addcmul_(replica.x, replica.decayed, value=-lr * f.weight_decay)
    # x <- x - lr m_hat / (sqrt(v_hat) + eps);  m_hat = m / (1 - beta1^t)
    size = lr / (1 - f.beta1**replica.t)
    replica.x.addcdiv_(replica.m, v_hat.sqrt_().add_(EPS), value=-size)


def muon(replica, g, lr, f):
    """AdamW, and in the matrices of the inner layers Muon."""
    before = replica.x.clone()
    adamw(replica, g, lr, f)
    muon_step(replica, before, lr, f)


OPTIMIZERS = {"adamw": adamw, "muon": muon}
