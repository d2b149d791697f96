"""One-bit EDiT: EDiT whose pseudo-gradients travel in 1 bit an element. Ours: it has no paper.

The problem. EDiT (edit.py) sends 32 bits an element once per round. In 1 bit most of a vector is
lost in each message. Error feedback keeps what was lost and adds it to the next message, so that in
the long run nothing is lost. With Muon inside (muon.py) this costs almost no loss: its steps have
the same size in all directions, and one code fits all elements. With AdamW inside it costs more.

    as edit.py, but at the round's end, for all layers l:
        d_i  = anchor - x_i;  norms, flags and weights w_i from d_i, as in edit.py
        z_i  = d_i + e_i;  0 if i is flagged
        send C(z_i);  e_i <- z_i - C(z_i)                # [sync] all-to-all, asynchronous
        the owner of a piece:  s = sum_i w_i C(z_i) + E;  E <- 0 first, if all are flagged
        send C(s);  E <- s - C(s)                        # [sync] all-gather, asynchronous
    complete(l), in the next forward, when it gets to layer l:
        wait for dbar = C(s);  clip and outer step, as in edit.py

C rounds blocks of 256 elements, see quantize.py. --quantize none sends d_i as edit.py does, and is
EDiT. So is one replica alone. A flagged replica forgets its errors: they may be what made it sick.

In the forward, the first hop of all layers is waited for before layer 0. The second hops travel
while earlier layers compute.

The warm-up averages gradients, in fp32 as in mini-batch or, with --warmup_format int8, in 8 bits.
Then the same errors are fed back, and dropped at the warm-up's end.

    symbol     variable            shape        where
    d_i, dbar  model.masters[l]    (P/N,)       every rank its shard
    e_i        error               (sum P/N,)   replica i
    E          mean_error          (sum P/N,)   replica i: of its piece, else 0

A resumed run on another mesh keeps e_i of the replicas that go on, and of E what lies both in the
old and in the new piece of a replica.

Slow-link bytes per rank and round: 2 (M-1)/M * 0.141 P/N, and 8 (M-1) (L + 1) for the exchange. A
step of the warm-up sends 2 (M-1)/M * 4 P/N, with int8 1.016 P/N.
Run: torchrun --nproc_per_node 4 train.py --method one_bit_edit --optimizer muon
Source: 1-bit Adam, arXiv 2102.02888, for errors that are fed back at both hops.
"""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import edit
from edit import EDiT
from plumbing.config import option
from quantize import FORMATS, MeanInFlight, QuantizedConfig


@dataclass
class Config(edit.Config, QuantizedConfig):
    quantize: str = option("sign", "what is sent", choices=FORMATS)
    warmup_format: str = option(
        "none", "of mean gradients in the warm-up, errors fed back", choices=["none", "int8"]
    )


class OneBitEDiT(EDiT):
    Config = Config
    private = ("error", "mean_error")

    def __init__(self, model, mesh, config, record):
        super().__init__(model, mesh, config, record)
        # Without padding: in 1 bit a 0 would become another number.
        self.errors = model.used_views(self.error)
        self.mean_errors = model.used_views(self.mean_error)
        self.started = []  # means whose second hop has not started
        if config.warmup_format != "none":
            model.average_layer = self.average_gradient

    def average_gradient(self, l):
        """In the warm-up: start to replace layer l's gradient by its sum over the replicas."""
        gradient = self.model.used_views(self.model.grad)[l].mul_(self.mesh.replicas)
        return self.start_coded_mean(l, gradient, self.config.warmup_format)

    def begin(self):
        super().begin()
        self.error.zero_()
        self.mean_error.zero_()

    def start_mean(self, l, d):
        if self.config.quantize == "none":
            return super().start_mean(l, d)
        d = d[: len(self.errors[l])]
        flagged = self.flagged[:, l]
        # e_i <- 0 and d_i <- 0 if i is flagged
        self.errors[l].masked_fill_(flagged[self.mesh.replica], 0)
        d.masked_fill_(flagged[self.mesh.replica], 0)
        # E <- 0 if all are flagged
        self.mean_errors[l].masked_fill_(flagged.all(), 0)
        weights = functools.partial(self.relative_weights, l)
        return self.start_coded_mean(l, d, self.config.quantize, weights)

    def relative_weights(self, l):
        """M w_i of layer l, (M, 1): 1 where all weights are equal."""
        return self.weights[:, l, None] * self.mesh.replicas

    def start_coded_mean(self, l, v, format, weights=None):
        """Start v <- C(s). v: a vector of layer l."""
        # z_i = v_i + e_i;  e_i <- z_i - C(z_i);  E <- s - C(s)
        z = self.errors[l].add_(v)
        mean = MeanInFlight([z], format, self.mesh, weights, errors=[self.mean_errors[l]])
        self.started.append(mean)

        def wait():
            while self.started:  # all second hops, before one of them is waited for
                self.started.pop(0).halfway()
            v.copy_(mean.wait()[0])

        return SimpleNamespace(wait=wait)
