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
shapes are those of edit.py and streaming_diloco.py. Norms, flags and weights are (M, L), where L
counts the layers of the fragment.

With all parts off it is Streaming DiLoCo, bit for bit. With --fragments 1 --delay 0 --quantize none
it is EDiT.

Measured (lab/results/by_hand.md, 4 replicas, 700 steps, tau 16): its loss is within 1% of EDiT's
over three seeds, at 1/8 of the bytes over the slow links.

Slow-link bytes per rank and round: those of Streaming DiLoCo, and for each fragment
8 (M-1) L for norms and flags.
Run: torchrun --nproc_per_node 4 train.py --method streaming_edit
Plain version: tests/reference/streaming.py.
"""

from dataclasses import dataclass

import torch

from config import UserError
from edit import (
    PenaltyConfig,
    anomaly_limits,
    clip_factor,
    forget_lost_layers,
    forget_norms,
    is_anomaly,
    replica_weights,
    update_statistics,
)
from relatives import streaming_diloco
from relatives.streaming_diloco import StreamingDiLoCo


@dataclass
class Config(PenaltyConfig, streaming_diloco.Config):
    def check(self, replicas):
        super().check(replicas)
        if self.offload:
            raise UserError("--offload: streaming_edit does not have it; leave it out")


class StreamingEDiT(StreamingDiLoCo):
    Config = Config
    scalars = (*StreamingDiLoCo.scalars, "statistics")
    repairs_replicas = True  # fragment by fragment, from the anchor
    landings = ()  # of layers in this round: (norms, flagged, weights, clip) each

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.lost = torch.zeros(len(self.model.layers), dtype=torch.bool, device=self.mesh.device)

    def begin(self):
        super().begin()
        self.statistics = self.model.master.new_zeros(3, len(self.model.layers))

    def resume_with(self, changed):
        forget_norms(self, changed)

    def judge(self, d) -> dict:
        squares = torch.stack([d_l.norm() ** 2 for d_l in d])
        # [shard] all-reduce, one scalar per layer, once per fragment
        self.mesh.all_reduce(squares, self.mesh.shard).wait()
        G = squares.sqrt()
        own = self.statistics[:, self.p :: self.config.fragments]
        flagged = is_anomaly(G, anomaly_limits(own, self.config))
        own.copy_(update_statistics(own, G, ~flagged, self.config))
        return {"row": torch.cat([G, flagged]), "weigh": self.weigh}

    def weigh(self, rows):
        """The norms and flags of all replicas are there."""
        self.norms, flags = rows.chunk(2, dim=1)
        self.flagged = flags > 0
        own = self.statistics[:, self.p :: self.config.fragments]
        G = self.norms[self.mesh.replica]
        own.copy_(forget_lost_layers(own, G, self.flagged.all(dim=0)))
        self.weights = replica_weights(self.norms, self.flagged, self.config.weighted_averaging)
        return self.weights * self.mesh.replicas

    def penalize(self, l, dbar):
        """Clip the mean of layer l. Returns 0 if all replicas have flagged the layer, else 1."""
        clip = dbar.new_ones(())
        if self.config.pseudo_grad_clipping:
            clip = clip_factor(self.model.norm(dbar), self.config.pseudo_grad_clip)
        dbar.mul_(clip)
        flagged = self.flagged[:, l]
        self.landings += ((self.norms[:, l], flagged, self.weights[:, l], clip),)
        return (~flagged).any().to(dbar.dtype)

    def land(self):
        super().land()
        self.lost[self.p :: self.config.fragments] |= self.flagged.all(dim=0)
        for (x, a, _), flagged in zip(self.layers[self.p], self.flagged[self.mesh.replica]):
            torch.where(flagged | ~x.isfinite(), a, x, out=x)

    def sync(self):
        super().sync()
        if self.landings:
            columns = [torch.stack(parts, dim=-1) for parts in zip(*self.landings)]
            norms, flagged, weights, clips = columns  # (M, L), clips (L,)
            self.landings = ()
            self.record.describe(
                pseudo_grad_norm=norms.norm(dim=1),
                weight=weights.mean(dim=1),
                dropped=flagged.sum(dim=1),
                rolled_back=self.lost.clone(),
                clip=clips.mean(),
            )
            self.lost.zero_()
