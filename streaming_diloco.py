"""Streaming DiLoCo: one fragment of the model at a time, in the background, in 4 bits.

The problem. DiLoCo sends little, but all at once, and all replicas wait. Streaming DiLoCo cuts the
layers into F fragments, sends one of them every tau / F steps while the steps go on, and applies
its outer step `delay` steps later.

    sync_warmup_steps steps of mini-batch; anchor = x; b = 0; I = tau / F; after inner step k:
        if k % I == 0:                               # p = (k / I - 1) mod F
            start the mean of d_i = anchor_p - x_{i,p} over the replicas
                                                     # [sync] quantize.py, F times per round
        if k == sent_at + ceil(delay / 2): start the second hop of the mean
        if k == sent_at + delay: land(p)
    land(p):
        wait for the mean d
        b_p      <- mu b_p + d
        anchor_p <- anchor_p - lr (d + mu b_p)
        x_{i,p}  <- alpha x_{i,p} + (1 - alpha) anchor_p
    at the end of training: the fragment in flight lands; each other one is sent and lands;
        x_i <- anchor

alpha is the weight of the local value: 0 overwrites it, 1 ignores the other replicas. With alpha 0
the local steps between sending and landing are lost for this fragment. Layer l is in fragment
l mod F (strided) or l F // L (sequential); embedding and head are layers like others.

    paper      variable        shape        where
    theta_m    model.master    (sum P/N,)   replica i, never equal
    theta      anchor          (sum P/N,)   equal on all ranks of a sync group, at all times
               momentum        (sum P/N,)   equal on all ranks of a sync group
    tau        delay           steps        (the paper's H is our tau)

The model to evaluate is the anchor. With --fragments 1 --delay 0 --quantize none it is DiLoCo.

Deviations: (1) The paper's scaling for 4 bits is unknown, see quantize.py. (2) If delay > 0, a
fragment is sent when step k+1 begins, so that nothing is in flight in a checkpoint after step k.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 P/N; in 4 bits 1/7.76 of it. Exposed per round: F
max(0, T - delay * time of a step), where T is the time that a fragment takes on the link.
Run: torchrun --nproc_per_node 4 train.py --method streaming_diloco
Source: Streaming DiLoCo, arXiv 2501.18512 (read: tables and captions).
"""

from dataclasses import dataclass

from edit import outer_nesterov
from method import Method
from plumbing.config import LocalConfig, UserError, option
from quantize import MeanInFlight, bytes_per_element


@dataclass
class Config(LocalConfig):  # paper: tau 100
    outer_lr: float = option(0.7, "outer learning rate (paper: 0.4)")
    outer_momentum: float = option(0.8, "outer Nesterov momentum (paper: 0.9)", below=1)
    fragments: int = option(4, "F, parts of the model; divides tau", low=1)
    fragment_pattern: str = option("strided", "layers of a part", choices=["strided", "sequential"])
    delay: int = option(2, "steps from sending a fragment to its outer step, below tau / F")
    alpha: float = option(0.0, "weight of the local value when a fragment lands, 0 to 1")
    quantize: str = option("e3m0", "what is sent", choices=["none", "int8", "e3m0"])


def fragment_layers(layers: int, fragments: int, pattern: str) -> list:
    """The layers of each fragment."""
    owner = lambda l: l % fragments if pattern == "strided" else l * fragments // layers
    return [[l for l in range(layers) if owner(l) == p] for p in range(fragments)]


class StreamingDiLoCo(Method):
    Config = Config
    shared = ("anchor", "momentum")
    counters = ("landed",)
    equal_replicas, overlaps = False, True

    @classmethod
    def check(cls, config, method_config, replicas):
        c, interval = method_config, method_config.tau / method_config.fragments
        if interval % 1:
            raise UserError(f"--fragments {c.fragments}: must divide --tau {c.tau}")
        if c.delay >= interval:
            raise UserError(f"--delay {c.delay}: must be below tau / fragments = {interval:g}")
        if c.fragments > config.n_layer + 2:
            raise UserError(f"--fragments {c.fragments}: more than the model's layers")
        if c.alpha > 1:
            raise UserError(f"--alpha {c.alpha}: must be at most 1")

    @classmethod
    def held_vectors(cls, method_config):
        copies = 2 if method_config.quantize == "none" else 1  # sent and received
        return 2 + copies / method_config.fragments

    @classmethod
    def sent_vectors(cls, method_config, replicas):
        share = bytes_per_element(method_config.quantize) / 4
        return share * super().sent_vectors(method_config, replicas)

    def begin(self):
        self.anchor.copy_(self.model.master)
        F, vectors = self.config.fragments, (self.model.master, self.anchor, self.momentum)
        layers = list(zip(*map(self.model.views, vectors)))  # (x, a, b) of each layer
        self.layers_of = fragment_layers(len(layers), F, self.config.fragment_pattern)
        self.fragments = [[layers[l] for l in own] for own in self.layers_of]
        self.interval = self.config.tau // F
        self.mean = None  # of the fragment in flight
        self.landed = None  # the fragment that has landed in this step

    def before_step(self):
        super().before_step()
        self.landed = None
        if self.local and self.config.delay > 0:
            self.send_if_due()

    def after_inner_step(self):
        delay = self.config.delay
        if delay == 0:
            self.send_if_due()
        if self.mean and self.local_steps >= self.sent_at + (delay + 1) // 2:
            with self.stall:
                self.mean.halfway()
                if self.local_steps == self.sent_at + delay:
                    self.land()

    def send_if_due(self):
        """A fragment lands in the round in which it is sent, because delay < tau / F."""
        k = self.local_steps
        if k % self.interval == 0 and (k > 0 or self.rounds > 0):
            self.send((k // self.interval - 1) % self.config.fragments)

    def send(self, p):
        self.p, self.sent_at = p, self.local_steps
        with self.stall:
            self.mean = self.start_mean([a - x for x, a, _ in self.fragments[p]])  # of d_i

    def land(self):
        self.outer_step(self.fragments[self.p], self.mean.wait())
        self.landed, self.mean = self.p, None

    def start_mean(self, d) -> MeanInFlight:
        return MeanInFlight(d, self.config.quantize, self.mesh)

    def outer_step(self, layers, means):
        lr, mu, alpha = self.config.outer_lr, self.config.outer_momentum, self.config.alpha
        for (x, a, b), d in zip(layers, means):
            # b <- mu b + d;  a <- a - lr (d + mu b);  x_i <- alpha x_i + (1 - alpha) a
            outer_nesterov(a, b, d, lr, mu, kept=a.new_ones(()))
            x.mul_(alpha).add_(a, alpha=1 - alpha)

    def sync(self, rows):
        if self.mean:  # only if the training ends in the middle of a round
            self.land()

    def consensus(self):
        return self.anchor

    def finish(self):
        super().finish()
        if self.local:
            others = [p for p in range(self.config.fragments) if p != self.landed]
            for p in others:
                self.send(p)
                self.land()
            self.model.master.copy_(self.anchor)
