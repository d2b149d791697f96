"""Streaming DiLoCo (arXiv 2501.18512), and Streaming EDiT, which has EDiT's penalty.

The model is cut into F fragments: fragment p has the layers p, p + F, p + 2F, ... Every tau / F
inner steps one of them is sent, and it lands `delay` steps later. Nothing travels here: the mean is
computed when a fragment is sent, and used when it lands.
Sharded twins: relatives/streaming_diloco.py and relatives/streaming_edit.py.
"""

from dataclasses import dataclass

import torch

from plain.method import Method
from plain.edit import EDiT
from plain.quantize import quantized_mean


@dataclass
class Flight:
    """A fragment on its way."""

    p: int
    sent_at: int  # inner step k
    means: dict  # layer -> what mean_of() has returned


class StreamingDiLoCo(Method):
    def begin(self):
        super().begin()
        self.flight = None
        self.landed_at = {}  # p -> inner step k of its last landing

    def after_inner_step(self, k):
        interval = self.f.tau // self.f.fragments
        if k % interval == 0:
            self.send((k // interval - 1) % self.f.fragments, k)
        if self.flight is None:
            return
        last = self.f.max_steps - self.f.sync_warmup_steps
        sent_at = self.flight.sent_at
        if k == sent_at + self.delay() or k == last > sent_at:
            self.land(k)

    def delay(self):
        """Inner steps from sending to landing."""
        if self.f.delay == -1:
            return min(2, self.f.tau // self.f.fragments - 1)
        return self.f.delay

    def send(self, p, k):
        d = self.d()
        means = {}
        for l in range(p, len(self.layers), self.f.fragments):
            layer = self.layers[l]
            means[l] = self.mean_of(l, [d_i[layer] for d_i in d])
        self.flight = Flight(p, k, means)

    def mean_of(self, l, d):
        # d = 1/M sum_i C(d_i)
        return quantized_mean(d, self.N, self.f.quantize)

    def land(self, k):
        alpha = self.f.alpha
        for l, arrived in self.flight.means.items():
            self.outer_step(l, arrived)
            layer = self.layers[l]
            for replica in self.replicas:
                # x_i <- alpha x_i + (1 - alpha) a
                replica.x[layer] = alpha * replica.x[layer] + (1 - alpha) * self.a[layer]
        self.landed_at[self.flight.p] = k
        self.flight = None

    def outer_step(self, l, dbar):
        self.nesterov(self.layers[l], dbar)

    def finish(self, k):
        """Each fragment that has not just landed is sent and lands."""
        if self.flight:
            self.land(k)
        for p in range(self.f.fragments):
            if self.landed_at.get(p) != k:
                self.send(p, k)
                self.land(k)

    def evaluation_model(self):
        return self.a


class StreamingEDiT(StreamingDiLoCo, EDiT):
    """The schedule is Streaming DiLoCo's; flag_and_weigh() and penalized_step() are EDiT's."""

    def mean_of(self, l, d):
        verdict = self.flag_and_weigh(l, d)
        # dbar = sum_i w_i C(d_i)
        dbar = quantized_mean(d, self.N, self.f.quantize, verdict.w)
        return dbar, verdict

    def outer_step(self, l, arrived):
        dbar, verdict = arrived
        self.penalized_step(l, dbar, verdict)

    def land(self, k):
        landing = self.flight.means
        super().land(k)
        for l, (_, verdict) in landing.items():
            layer = self.layers[l]
            for replica, flagged in zip(self.replicas, verdict.flagged):
                # x_i <- a if replica i was flagged when the fragment was sent. Else only those of
                # its elements become a that are not finite.
                x = replica.x[layer]
                replica.x[layer] = torch.where(flagged | ~x.isfinite(), self.a[layer], x)

    def sync(self):
        return self.row()
