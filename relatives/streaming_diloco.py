"""Streaming DiLoCo: one fragment of the model at a time, in the background, in 4 bits.

The problem. DiLoCo sends little, but all at once, and all replicas wait. Here one of F fragments of
the model is sent every tau / F steps, while the steps go on. It lands `delay` steps later: then the
mean is there, and the fragment's outer step is taken.

    sync_warmup_steps steps with averaged gradients; anchor = x; b = 0; I = tau / F
    then, after inner step k:
        if k % I == 0:                               # send fragment p: layers p, p + F, ...
            p = (k / I - 1) mod F;  sent_at = k
            start d = 1/M sum_i (anchor_p - x_{i,p})     # [sync] quantize.py, once per fragment
        if k >= sent_at + ceil(delay / 2): halfway()     # [sync] the second hop of the mean
        if k == sent_at + delay: land():
            wait for d;  b_p <- mu b_p + d;  anchor_p <- anchor_p - lr (d + mu b_p)
            x_{i,p} <- alpha x_{i,p} + (1 - alpha) anchor_p
    at the end of training each fragment that has not just landed is sent and lands; x_i <- anchor

anchor and momentum (b) are equal in all replicas at all times, x_i (model.master) is not, and the
anchor is the model to evaluate. alpha 0 loses a fragment's local steps between sending and landing;
alpha 1 ignores the other replicas. The paper's H is tau, its tau is delay. Deviation: with a delay
a fragment is sent when step k+1 begins: a checkpoint after step k has nothing in flight.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N / 7.76. Let T be the time that a fragment
takes on the link. Then the training waits for F max(0, T - delay * time of a step) per round.
Run: torchrun --nproc_per_node 4 train.py --method streaming_diloco
Source: Streaming DiLoCo, arXiv 2501.18512 (read: tables and captions).
Plain version: plain/streaming.py.
"""

from dataclasses import dataclass

from config import UserError, option
from edit import nesterov_unless_flagged
from method import Method
from relatives.quantize import MeanInFlight, QuantizedConfig


@dataclass
class Config(QuantizedConfig):
    # large: the paper's, which has rounds of 100 steps
    outer_lr: float = option(0.7, "outer learning rate", large=0.4)
    outer_momentum: float = option(0.5, "outer Nesterov momentum", below=1, large=0.9)
    fragments: int = option(4, "F, parts of the model; divides tau", low=1)
    delay: int = option(-1, "steps from sending to outer step; -1: tau / F - 1, at most 2", low=-1)
    alpha: float = option(0.0, "weight of local values when a fragment lands", below=1.000001)

    @property
    def buffer_vectors(self):
        return 2 / self.fragments  # a fragment, sent and received

    @property
    def steps_late(self) -> int:
        if self.delay >= 0:
            return self.delay
        return min(2, self.tau // self.fragments - 1)

    def check(self, replicas):
        super().check(replicas)
        F = self.fragments
        interval = self.tau / F
        if interval % 1 or F > self.n_layer + 2:
            raise UserError(f"--fragments {F}: must divide --tau {self.tau}, at most one per layer")
        if self.steps_late >= interval:
            raise UserError(f"--delay {self.delay}: must be below tau / fragments = {interval:g}")


class StreamingDiLoCo(Method):
    Config = Config
    vectors = ("anchor", "momentum")
    scalars = ("landed",)
    barrier = False
    mean = None  # of the fragment in flight
    landed = None  # the fragment that landed in this step

    def __init__(self, *arguments):
        super().__init__(*arguments)
        vectors = self.model.master, self.anchor, self.momentum
        rows = list(zip(*map(self.model.used_views, vectors)))  # a layer's x, anchor and momentum
        F = self.config.fragments
        if F > len(rows):
            raise UserError(f"--fragments {F}: the model has only {len(rows)} layers")
        self.layers = [rows[p::F] for p in range(F)]  # of each fragment

    def begin(self):
        self.anchor.copy_(self.model.master)

    def before_step(self):
        super().before_step()
        self.send_if_due(self.config.steps_late > 0)

    def after_step(self, lr, metrics):
        over = super().after_step(lr, metrics)
        delay = self.config.steps_late
        self.landed = None
        self.send_if_due(delay == 0)
        if self.mean and self.local_steps >= self.sent_at + (delay + 1) // 2:
            with self.record.stall():
                self.mean.halfway()  # the second hop starts, unless it has
                if self.local_steps == self.sent_at + delay:
                    self.land()
        return over

    def send_if_due(self, here: bool):
        k = self.local_steps
        interval = self.config.tau // self.config.fragments
        # Both are 0 before the first step; k = 0 in a later round sends the last fragment.
        if here and k % interval == 0 and k + self.rounds > 0:
            self.send((k // interval - 1) % self.config.fragments)

    def send(self, p):
        self.p = p
        self.sent_at = self.local_steps
        with self.record.stall():
            d = [a - x for x, a, _ in self.layers[p]]  # d_i = a - x_i
            self.mean = self.start_mean(d)

    def start_mean(self, d) -> MeanInFlight:
        return MeanInFlight(d, self.config.quantize, self.mesh)

    def outer_step(self, l, d, a, b):
        """Layer l has landed: its mean is d."""
        lr, mu = self.config.outer_lr, self.config.outer_momentum
        # As in Streaming EDiT: then both have the same bits.
        nesterov_unless_flagged(a, b, d, lr, mu, moves=d.new_ones(()))

    def land(self):
        alpha = self.config.alpha
        for n, (x, a, b) in enumerate(self.layers[self.p]):
            d = self.mean.wait(n)
            self.outer_step(self.p + n * self.config.fragments, d, a, b)
            x.mul_(alpha).add_(a, alpha=1 - alpha)  # x_i <- alpha x_i + (1 - alpha) a
        self.landed = self.p
        self.mean = None

    def measure(self):
        self.gather()  # no distance: the anchor moves within the round, too

    def sync(self):
        if self.mean:  # only if the training ends in the middle of a round
            self.land()

    def evaluation_model(self):
        return self.anchor

    def finish(self):
        super().finish()
        if not self.averages_gradients:
            for p in sorted({*range(self.config.fragments)} - {self.landed}):
                self.send(p)
                self.land()
            self.model.master.copy_(self.anchor)
