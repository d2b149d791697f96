"""Error feedback: what was rounded away is added to the next message. For methods in few bits.

The problem. In 1 bit an element, most of a vector is lost in each message. Error feedback keeps
what a sender has not sent (e_i) and what the owner of a piece has not sent of its mean (E), and
adds it to the next vector: in the long run nothing is lost.

    z_i <- vector_i + e_i;  e_i <- z_i - C(z_i)                 # C: see quantize.py
    C(s), E <- s - C(s), where s = 1/M sum_i C(z_i) + E         # [sync] quantize.py, two hops

A method in rounds has no use for the errors before its first round. Until then they serve the
warm-up: with --warmup_format int8 it averages gradients in 8 bits, and sends a quarter of the
bytes. As in mini-batch, layer l's mean starts when the backward has its gradient.

    paper      variable            shape        where
    e_i        error               (sum P/N,)   replica i
    E          mean_error          (sum P/N,)   replica i: of its piece, else 0

A resumed run on another mesh keeps e of the replicas that go on, and of E what lies both in the old
and in the new piece of a replica.

Slow-link bytes per rank and step of such a warm-up: 2 (M-1)/M * 1.016 P/N.
Source: 1-bit Adam, arXiv 2102.02888.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from method import Method
from plumbing.config import option
from quantize import MeanInFlight, QuantizedConfig


@dataclass
class ErrorFeedbackConfig(QuantizedConfig):
    error_feedback: bool = option(True, "add what was not sent to the next round")
    warmup_format: str = option(
        "none", "of mean gradients in the warm-up, errors fed back", choices=["none", "int8"]
    )


class ErrorFeedback(Method):
    Config = ErrorFeedbackConfig
    private = ("error", "mean_error")

    def __init__(self, model, mesh, config, record):
        super().__init__(model, mesh, config, record)
        self.started = []  # means of gradients whose second hop has not started
        if config.warmup_format != "none":
            model.average_layer = self.average_layer

    def average_layer(self, l):
        """Start to replace layer l's gradient by its sum over the replicas."""
        vectors = self.model.grad, self.error, self.mean_error
        g, e, E = (self.model.used_views(vector)[l] for vector in vectors)
        mean = MeanInFlight([e.add_(g)], self.config.warmup_format, self.mesh, errors=[E])
        self.started.append(mean)

        def wait():
            while self.started:  # all second hops, before one of them is waited for
                self.started.pop(0).halfway()
            torch.mul(mean.wait()[0], self.mesh.replicas, out=g)

        return SimpleNamespace(wait=wait)

    def begin(self):
        """The errors of the gradients are dropped."""
        self.error.zero_()
        self.mean_error.zero_()

    def forget_errors(self, l, where):
        """Layer l's errors become 0 where `where` says so; without error feedback everywhere."""
        where = where | (not self.config.error_feedback)
        for error in self.error, self.mean_error:
            self.model.used_views(error)[l].masked_fill_(where, 0)
