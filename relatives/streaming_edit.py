"""Streaming EDiT: EDiT's penalty on Streaming DiLoCo's schedule, in 4 bits. Ours: it has no paper.

The problem. EDiT hides at most one forward of its traffic and sends 32 bits per element. Streaming
DiLoCo hides all of it and sends 4 bits, but trusts every replica alike. This method takes the
penalty from EDiT (edit.py), the schedule from Streaming DiLoCo (streaming_diloco.py) and the mean
in quantized pieces from quantize.py.

    as streaming_diloco.py, but for each layer l of a fragment:
    when it is sent:
        d_i  = anchor - x_i                             # into a buffer of its own: x_i trains on
        G_i  = ||d_i||                                  # [shard] all-reduce, one scalar per layer
        flag i by replica i's own running statistics    # a norm that is not finite is flagged;
                                                        # if all are flagged, they start anew
        send d_i, with G and flags                      # [sync] quantize.py, asynchronous
    on the way:
        w_i  = exp(-G_i) / sum_j exp(-G_j) over the unflagged
        dbar = sum_i w_i d_i                            # a flagged replica is left out
    when it lands:
        dhat = dbar * min(1, phi / (||dbar|| + 1e-6))   # [shard] all-gather, one scalar per layer
        b    <- mu b + dhat
        anchor <- anchor - lr (dhat + mu b)             # unless all replicas are flagged
        x_i  <- alpha x_i + (1 - alpha) anchor          # but anchor if replica i is flagged, and in
                                                        # elements of x_i that are not finite

So a replica that has diverged is repaired, fragment by fragment, within one round. The names and
shapes are those of edit.py and streaming_diloco.py. Norms, flags and weights are (M, n) for
the n layers of the fragment.

With all parts off it is Streaming DiLoCo, bit for bit. With --fragments 1 --delay 0 --quantize none
it is EDiT.

Measured (lab/results/frontier.csv: 4 replicas, 2,000 steps, tau 16): its loss does not differ from
EDiT's over four seeds, at a third of the bytes over the slow links.

Slow-link bytes per rank and round: those of Streaming DiLoCo, and 8 (M-1) L for norms and flags
of L layers.
Run: torchrun --nproc_per_node 4 train.py --method streaming_edit
Plain version: plain/streaming.py.
"""

from dataclasses import dataclass

import torch

from edit import Penalty, PenaltyConfig
from relatives import streaming_diloco
from relatives.quantize import MeanInFlight
from relatives.streaming_diloco import StreamingDiLoCo


@dataclass
class Config(PenaltyConfig, streaming_diloco.Config):
    pass


class StreamingEDiT(StreamingDiLoCo):
    Config = Config
    scalars = (*StreamingDiLoCo.scalars, "statistics")
    repairs_replicas = True  # fragment by fragment, from the anchor
    make_penalty = Penalty

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.penalty = self.make_penalty(self)
        self.landings = []  # numbers of the layers that have landed in this round

    def begin(self):
        super().begin()
        self.penalty.begin()

    def resume_with(self, changed):
        self.penalty.resume_with(changed)

    def fragment(self) -> slice:
        """The layers of the fragment in flight."""
        return slice(self.p, None, self.config.fragments)

    def start_mean(self, d):
        squares = torch.stack([d_l.norm() ** 2 for d_l in d])
        # [shard] all-reduce, one scalar per layer, once per fragment
        self.mesh.all_reduce(squares, self.mesh.shard_group).wait()
        G = squares.sqrt()
        row = torch.cat([G, self.penalty.flag(G, layers=self.fragment())])
        return MeanInFlight(d, self.config.quantize, self.mesh, row=row, weigh=self.weigh)

    def weigh(self, rows):
        """The norms and flags of all replicas have arrived."""
        norms, flags = rows.chunk(2, dim=1)
        # MeanInFlight makes a mean of M vectors, so the weights must have the mean 1.
        return self.penalty.weigh(norms, flags > 0, self.fragment()) * self.mesh.replicas

    def outer_step(self, l, d, a, b):
        self.penalty.outer_step(l, d, a, b)
        self.landings.append(l)

    def land(self):
        super().land()
        flagged = self.penalty.flagged[self.mesh.replica, self.fragment()]
        for (x, a, _), flag in zip(self.layers[self.p], flagged):
            torch.where(flag | ~x.isfinite(), a, x, out=x)

    def sync(self):
        super().sync()
        if self.landings:
            self.penalty.describe(self.landings)
            self.landings = []
