"""EDiT in 1 bit: EDiT whose pseudo-gradients travel in 1 bit an element. Ours: it has no paper.

The problem. EDiT (edit.py) sends 32 bits an element once per round. In 1 bit most of a vector is
lost in each message. Error feedback keeps what was lost and adds it to the next message, so that in
the long run nothing is lost. It is meant for Muon as inner optimizer (optimizer.py), whose steps
have the same size in all directions. Figures: RESULTS.md.

C(v) is v as a receiver decodes it (quantize.py). With M > 2 replicas a vector is cut into M pieces,
and replica j is the owner of piece j: it sums up what all replicas send of this piece.

    as edit.py, but at the round's end, for all layers l:
        d_i  = anchor - x_i;  norms, flags and weights w_i from d_i, as in edit.py
        e_i <- 0 if i is flagged, and then w_i = 0;  E <- 0 if all are flagged
        z_i  = w_i d_i + e_i
        hop 1 of layer l:
            send each piece of C(z_i) to its owner       # [sync] all-to-all, asynchronous
            e_i <- z_i - C(z_i)
        hop 2 of layer l, as owner of a piece:
            s    = sum_i C(z_i) + E                      # of the piece
            send C(s) to all;  E <- s - C(s)             # [sync] all-gather, asynchronous
    complete(l), in the next forward, when it gets to layer l:
        wait for dbar = C(s);  clip and outer step, as in edit.py

So a layer takes two hops. As in edit.py two operations are in flight at any time. They start in
this order: hop 1 of layers 0 and 1, hop 2 of layer 0, hop 1 of layer 2, hop 2 of layer 1, and so
on. With two replicas there is no owner, no hop 2 and no E: each sends C(z_i) to the other
(all-gather), and dbar = sum_i C(z_i).
One replica alone sends nothing, and is EDiT; so is --quantize none, which sends w_i d_i as edit.py
does.

Outer momentum repeats errors, too. So fewer bits need less momentum: in 2,000 steps with Muon the
best of six outer steps was 0.9 / 0.3 in 1 bit and 0.5 / 0.8 in 2 bits.

A flagged replica forgets its errors. The weights come before C: a replica with a large norm and a
small weight would otherwise send its errors later, with a normal weight.

The warm-up averages gradients, in fp32 as in minibatch or, with --warmup_format int8, in 8 bits.
Then the errors of gradients are fed back in the same way, and dropped at the warm-up's end.

    symbol     variable            shape        where
    d_i, dbar  model.masters[l]    (P/N,)       every rank its shard
    e_i        error               (sum P/N,)   replica i
    E          mean_error          (sum P/N,)   replica i: of its pieces, else 0 (0 if M <= 2)

A run resumed on another mesh keeps e_i of replicas that go on, and E where a replica's old and new
pieces overlap.

Slow-link bytes per rank and round: 2 (M-1)/M * 0.141 sum P/N, and 8 (M-1) (L + 1) for norms and
flags.
A step of the warm-up sends 2 (M-1)/M * 4 sum P/N, with int8 2 (M-1)/M * 1.016 sum P/N.
Run: torchrun --nproc_per_node 4 train.py --method one_bit_edit --optimizer muon
Source: 1-bit Adam, arXiv 2102.02888, for error feedback at both hops.
Plain version: plain/one_bit.py.
"""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import torch

import edit
from config import option
from edit import EDiT
from relatives.quantize import FORMATS, MeanInFlight, QuantizedConfig, bytes_per_element


@dataclass
class Config(edit.Config, QuantizedConfig):
    outer_lr: float = option(0.9, "outer learning rate")
    outer_momentum: float = option(0.3, "outer Nesterov momentum", below=1)
    quantize: str = option("sign", "what is sent", choices=FORMATS)
    warmup_format: str = option(
        "none", "of mean gradients in the warm-up, errors fed back", choices=["none", "int8"]
    )

    @property
    def buffer_vectors(self):
        """The codes of all layers, sent and received."""
        formats = {self.quantize, self.warmup_format} - {"none"}
        return 2 * max(map(bytes_per_element, formats), default=0) / 4

    def sent_in_warmup(self, replicas):
        return bytes_per_element(self.warmup_format) / 4 * super().sent_in_warmup(replicas)


class OneBitEDiT(EDiT):
    Config = Config
    vectors = (*EDiT.vectors, "error", "mean_error")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # Without padding: in 1 bit a 0 would become another number.
        self.errors = self.model.used_views(self.error)
        self.mean_errors = self.model.used_views(self.mean_error)
        self.means = {}  # of layers, in flight
        self.started = []  # those of the warm-up whose second hop has not started
        if self.config.warmup_format != "none":
            self.model.sum_layer = self.sum_gradient

    def sum_gradient(self, l):
        """In the warm-up: start to replace layer l's gradient by its sum over the replicas."""
        grad = self.model.grads[l]
        mean = self.start_coded(l, grad, self.config.warmup_format)
        self.started.append(mean)

        def wait():
            while self.started:  # all second hops, before one of them is waited for
                self.started.pop(0).halfway()
            self.receive(l, mean, grad)

        return SimpleNamespace(wait=wait)

    def begin(self):
        super().begin()
        self.error.zero_()
        self.mean_error.zero_()

    def operations(self) -> list:
        """With two hops: hop 1 of layers 0 and 1, hop 2 of layer 0, hop 1 of layer 2, ..."""
        first_hops = super().operations()
        if self.config.quantize == "none" or self.mesh.replicas <= 2:
            return first_hops
        order = first_hops[:1]
        for l, first_hop in enumerate(first_hops[1:]):
            order += [first_hop, functools.partial(self.start_second_hop, l)]
        return [*order, functools.partial(self.start_second_hop, l + 1)]

    def start_mean(self, l):
        if self.config.quantize == "none":
            return super().start_mean(l)
        d = self.model.masters[l]
        flagged = self.penalty.flagged[:, l]
        self.errors[l].masked_fill_(flagged[self.mesh.replica], 0)
        self.mean_errors[l].masked_fill_(flagged.all(), 0)
        # A flagged replica has w_i = 0, but 0 * NaN is NaN, so overwrite it with 0.
        d.mul_(self.penalty.weights[self.mesh.replica, l]).nan_to_num_(0.0, 0.0, 0.0)
        mean = self.means[l] = self.start_coded(l, d, self.config.quantize)
        return mean.first_hop or mean.last_hop

    def start_second_hop(self, l):
        self.means[l].halfway()
        return self.means[l].last_hop

    def wait_for_mean(self, l):
        if self.config.quantize == "none":
            return super().wait_for_mean(l)
        mean = self.means[l]
        handle = self.in_flight.popleft()
        while handle is not mean.last_hop:  # operations that started before it
            handle.wait()
            self.start_next()
            handle = self.in_flight.popleft()
        self.receive(l, self.means.pop(l), self.model.masters[l])

    def start_coded(self, l, v, format) -> MeanInFlight:
        """The mean of v, of layer l, over the replicas starts, with errors fed back."""
        v = v[: len(self.errors[l])]
        # z_i = v_i + e_i;  e_i <- z_i - C(z_i);  E <- s - C(s). Here s and E are means, the sums
        # of the docstring divided by M; receive() multiplies by M again.
        z = self.errors[l].add_(v)
        return MeanInFlight([z], format, self.mesh, [self.mean_errors[l]])

    def receive(self, l, mean, out):
        """out <- the sum over the replicas, of which this is the mean."""
        out = out[: len(self.errors[l])]
        torch.mul(mean.wait(), self.mesh.replicas, out=out)
