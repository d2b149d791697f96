"""EDiT: local SGD on sharded parameters, synchronized layer by layer inside the forward pass.

The problem. DiLoCo's outer step blocks until the whole model has crossed the slow links, and it
trusts every replica alike, even one whose loss has just exploded. EDiT (1) completes layer l just
before the forward needs it, so that the traffic of later layers overlaps with the computation of
earlier ones, and (2) applies a *pseudo-gradient penalty*: eliminate anomalies, weight by norm,
clip, or, if all replicas are flagged, keep the anchor (roll back).

    sync_warmup_steps steps of mini-batch; anchor = x; then repeat tau inner steps and, for all
    layers l at the round's end (the paper does this in the forward, with the same result):
        d_i   = anchor - x_i                                    # in the storage of x_i
        G_i   = ||d_i||                                         # [shard] one all-reduce, all layers
        limit_i = mean_i + delta sigma_i                        # running statistics of replica i
        exchange G and limits of all replicas                   # [sync] one all-gather, all layers
        flag i if G_i > limit_i                                 # (G_i - mean_i) / sigma_i > delta
        w_i   = exp(-G_i) / sum_j exp(-G_j) over the unflagged  # on the device, no host read
        start dbar = sum_i w_i d_i for l = 0, 1                 # [sync] all-reduce per layer, async
    complete(l), in the next forward, when it gets to layer l:
        wait for dbar
        dhat    = dbar * min(1, phi / (||dbar|| + 1e-6))        # [shard] all-gather of one scalar
        unless all replicas are flagged:
            b      <- mu b + dhat
            anchor <- anchor - lr (dhat + mu b)
        x_i    <- anchor
        start to gather layer l; then start dbar of layer l + 2

    M replicas, L layers (with embedding and head), P elements of a layer, N shards
    paper     here             variable            shape        where
    theta_i   x_i, d_i, dbar   model.masters[l]    (P/N,)       every rank its shard; after sync()
                                                                it holds d_i, then dbar
    theta     anchor           anchor              (sum P/N,)   equal in a sync group
    m         b                momentum            (sum P/N,)   equal in a sync group
    G_i       G_i              exchanged.norms     (M, L)       all ranks
    w_i       w_i              weights             (M, L)       all ranks
              mean_i, sigma_i  statistics          (3, L)       replica i: count, mean, variance
    delta, phi                 anomaly_threshold, pseudo_grad_clip
              lr, mu           outer_lr, outer_momentum

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N, and 8 (M-1) (L + 1) for the exchange.

What the overlap saves, on NCCL and gloo. Let each of L equal layers take c seconds to all-reduce
and f seconds to compute. DiLoCo waits L c. EDiT waits for layer 0 and then, if c > f, at each layer
for the rest of its all-reduce: max(c, L c - (L-1) f) in all. So it saves at most one forward.

Why only two means are in flight. NCCL may start operations in the order in which the host issues
them, over all groups (see plumbing/launch.py). If all means were issued at once, the gather of
layer 0 would start after the last mean but one, and nothing would overlap. With two, one travels
and one is queued. The link has nothing to do only if a layer computes longer than the next one
travels. (The price: a last layer that is much larger than the others starts two layers early.)

The deviations from the paper are listed at the end of this file.
Run: torchrun --nproc_per_node 4 train.py --method edit --shards 2
Source: EDiT, arXiv 2412.07210, and its authors' code, atorch local_sgd.
Plain version: tests/reference/edit.py.
"""

import functools
from collections import deque
from dataclasses import dataclass

import torch

from config import UserError, option
from method import LocalConfig, Method

SIGMA_FLOOR = 0.05  # sigma is at least so much of the mean


@dataclass
class Penalty:
    anomaly_threshold: float = option(3.0, "delta, standard deviations above the mean norm")
    anomaly_ema: float = option(0.02, "alpha, a new norm's share in the statistics", below=1)
    anomaly_warmup_rounds: int = option(10, "norms seen before the first one can be flagged")
    pseudo_grad_clip: float = option(10.0, "phi, largest norm of a layer's dbar", above=0)
    anomaly_elimination: bool = option(True, "leave out replicas with anomalous norms")
    norm_per_lr: bool = option(False, "judge norms divided by the round's learning rates")
    weighted_averaging: bool = option(True, "weight replicas by exp(-norm), else equally")
    pseudo_grad_clipping: bool = option(True, "clip each layer's dbar")


@dataclass
class PenaltyConfig(Penalty):
    """Flags of EDiT, A-EDiT and Streaming EDiT: everything but when to synchronize."""

    outer_lr: float = option(0.7, "outer learning rate (paper: 0.8)")
    outer_momentum: float = option(0.8, "outer Nesterov momentum (paper: 0.85)", below=1)
    offload: bool = option(False, "keep anchor and momentum in host memory (on a GPU)")


@dataclass
class Config(PenaltyConfig, LocalConfig):  # paper: tau 128, 1024 warm-up steps
    def check(self, replicas):
        super().check(replicas)
        # Longer rounds have larger norms: see deviation (8).
        if self.tau_schedule and self.anomaly_elimination and not self.norm_per_lr:
            raise UserError("--tau_schedule: norms grow; add --norm_per_lr --anomaly_threshold 5")


# ---- the equations: tensors in, tensors out ----


def anomaly_limits(statistics, config):
    """The largest norms (L,) that are not anomalies. statistics: replica i's norms so far, (3, L):
    their number, mean and variance for each layer."""
    count, mean, variance = statistics
    sigma = torch.maximum(variance.sqrt(), SIGMA_FLOOR * mean)
    limits = mean + config.anomaly_threshold * sigma
    known = count >= max(config.anomaly_warmup_rounds, 2)  # a variance takes two samples
    return limits.where(known & config.anomaly_elimination, torch.inf)


def update_statistics(statistics, G, accepted, config):
    """The statistics (3, L) with those norms of G (L,) that are accepted. For one layer:

    n <- n + 1
    if n <= max(anomaly_warmup_rounds, 2):    # plain mean and sample variance (Welford's update)
        variance <- (n-2)/(n-1) variance + (G - mean)^2 / n           # n = 1: it stays 0
        mean     <- mean + (G - mean) / n
    else:                             # moving averages
        mean     <- mean + alpha (G - mean)
        variance <- (1 - alpha) variance + alpha (G - mean)^2         # with the new mean

    Here the same without branches, for all layers at once."""
    count, mean, variance = statistics
    alpha = config.anomaly_ema
    n = count + 1
    early = n <= max(config.anomaly_warmup_rounds, 2)
    new_mean = mean + torch.where(early, 1 / n, alpha) * (G - mean)
    plain = (n - 2).clamp(min=0) / (n - 1).clamp(min=1) * variance
    plain = plain + torch.where(n > 1, (G - mean) ** 2 / n, 0.0)
    moving = (1 - alpha) * variance + alpha * (G - new_mean) ** 2
    new = torch.stack([n, new_mean, torch.where(early, plain, moving)])
    return new.where(accepted, statistics)


def is_anomaly(G, limits):
    # flag if z = (G - mean) / sigma > delta; one-sided: a small norm is never flagged
    return (G > limits) | ~G.isfinite()  # NaN > limit is False


def replica_weights(norms, flagged, weighted=True):
    """Weights (M, L), 0 for flagged replicas, with sum 1, or 0 where all are flagged."""
    # w_i = exp(-G_i) / sum_j exp(-G_j), j unflagged; equal weights are the case G = 0
    G = norms if weighted else torch.zeros_like(norms)
    exponents = (-G).masked_fill(flagged, -torch.inf)
    weights = torch.softmax(exponents, dim=0)  # NaN where all are flagged, there 0 below
    return weights.masked_fill(flagged, 0.0)


def clip_factor(norm, phi):
    # dhat = dbar * min(1, phi / (||dbar|| + 1e-6))
    return (phi / (norm + 1e-6)).clamp(max=1.0)


def nesterov_unless_flagged(anchor, momentum, dhat, lr, mu, accepted):
    """diloco.nesterov() in place, without a host read. accepted: a scalar tensor, 1, or 0 if all
    replicas are flagged. Then dhat must be 0, and nothing changes, bit for bit."""
    # b <- mu b + dhat;  a <- a - lr (dhat + mu b)
    momentum.mul_(mu**accepted).add_(dhat)  # mu^0 = 1
    anchor.addcmul_(dhat, accepted, value=-lr).addcmul_(momentum, accepted, value=-lr * mu)


# ---- the method ----


class EDiT(Method):
    Config = Config
    shared = ("anchor", "momentum")
    scalars = ("statistics",)
    repairs_replicas = True  # a flagged replica restarts from the anchor

    def __init__(self, model, mesh, config, record, clock):
        super().__init__(model, mesh, config, record, clock)
        self.anchors = model.views(self.anchor)
        self.momenta = model.views(self.momentum)

    def begin(self):
        self.anchor.copy_(self.model.master, non_blocking=True)  # --offload: on the host
        self.statistics = self.model.master.new_zeros(3, len(self.model.layers))

    def sync(self):
        """The end of the round: norms, weights, and the start of every layer's all-reduce. The next
        forward ends what begins here."""
        squares = []
        for a, x in zip(self.anchors, self.model.masters):
            # d_i = a - x_i, in the storage of x_i
            d = torch.sub(a.to(x.device, non_blocking=True), x, out=x)
            squares.append(d.norm() ** 2)
        self.flag_and_weigh(torch.stack(squares))
        self.clips = []
        self.to_start = deque(self.operations())
        self.in_flight = deque()  # handles, at most two
        self.start_next()
        self.start_next()
        # This line is EDiT: the forward in shard.py calls complete(l) just before it computes layer
        # l. While a layer computes, the all-reduces of the next layers travel.
        self.model.pre_layer_hook = self.complete

    def operations(self) -> list:
        """Functions that start one sync operation each and return its handle, in their order."""
        masters = enumerate(self.model.masters)
        return [functools.partial(self.start_mean, l, d) for l, d in masters]

    def start_next(self):
        if self.to_start:
            start = self.to_start.popleft()
            self.in_flight.append(start())

    def flag_and_weigh(self, squares):
        """Flags and weights (M, L), from the squared norms of this rank's shards (L,)."""
        # [shard] all-reduce, L scalars, once per round
        self.mesh.all_reduce(squares, self.mesh.shard).wait()
        scale = sum(self.rates) if self.config.norm_per_lr else 1.0
        limits = scale * anomaly_limits(self.statistics, self.config)
        self.exchange(norms=squares.sqrt(), limits=limits)  # sets self.exchanged
        G = self.comparable_norms()  # (M, L)
        # Divided by all rates of a round, A-EDiT's norms need no correction for unequal steps.
        judged = self.exchanged.norms if self.config.norm_per_lr else G
        self.flagged = is_anomaly(judged, self.exchanged.limits)
        self.any_accepted = (~self.flagged).any(dim=0).to(G.dtype)  # (L,): 0 if all are flagged
        i = self.mesh.replica
        own = judged[i] / scale
        self.statistics = update_statistics(self.statistics, own, ~self.flagged[i], self.config)
        self.weights = self.compute_weights(G)

    def comparable_norms(self):
        """The norms (M, L) by which replicas are compared; A-EDiT may correct them."""
        return self.exchanged.norms

    def compute_weights(self, G):
        return replica_weights(G, self.flagged, self.config.weighted_averaging)

    def start_mean(self, l, d):
        """Start d <- dbar = sum_i w_i d_i in layer l."""
        # A flagged replica has w_i = 0, but 0 * NaN is NaN, so overwrite it with 0.
        d.mul_(self.weights[self.mesh.replica, l]).nan_to_num_(0.0, 0.0, 0.0)
        # [sync] all-reduce, P/N fp32, once per round and layer
        return self.mesh.all_reduce(d, self.mesh.sync)

    def wait_for_mean(self, l):
        self.in_flight.popleft().wait()

    def complete(self, l: int):
        """The next forward calls it before it computes layer l: x_l becomes the new anchor."""
        self.outer_step(l)
        # First the gather of this layer, then the next mean: see "Why only two" above.
        self.model.start_gather(l)
        if self.to_start:
            with self.record.stall():
                self.start_next()

    def outer_step(self, l):
        lr, mu = self.config.outer_lr, self.config.outer_momentum
        x = self.model.masters[l]  # it has received dbar
        with self.record.stall():
            self.wait_for_mean(l)
            clip = x.new_ones(())
            if self.config.pseudo_grad_clipping:
                clip = clip_factor(self.model.norm(x), self.config.pseudo_grad_clip)
            dhat = x.mul_(clip)
            with self.on_device(self.anchors[l], self.momenta[l]) as (a, b):
                nesterov_unless_flagged(a, b, dhat, lr, mu, self.any_accepted[l])
                x.copy_(a)
        self.clips.append(clip)
        if l == len(self.model.layers) - 1:
            self.end_sync()

    def end_sync(self):
        """All layers are complete: describe the sync for the record."""
        self.model.pre_layer_hook = None
        self.record.describe(
            pseudo_grad_norm=self.exchanged.norms.norm(dim=1),
            weight=self.weights.mean(dim=1),
            dropped=self.flagged.sum(dim=1),
            clip=torch.stack(self.clips).mean(),
        )
        self.record.done(self)

    def drain(self):
        if self.model.pre_layer_hook:
            for l in range(len(self.model.layers)):
                self.outer_step(l)
                self.start_next()


# Deviations from the paper and its authors' code:
# (1) One exchange carries the norms and limits of all layers, and nothing is read on the host. The
#     code's 2 to 4 host reads per layer prevent the overlap.
# (2) A norm that is not finite is always flagged, also without anomaly elimination.
# (3) Flagged norms never enter the statistics, so one outlier does not hide the next. The cost: a
#     replica whose norms rise suddenly and permanently stays flagged (the log shows it; raise
#     --anomaly_threshold).
# (4) For the first anomaly_warmup_rounds samples the statistics are the plain mean and standard
#     deviation: an exponential average that starts at zero is biased.
# (5) sigma is at least SIGMA_FLOOR * mean, so nearly equal norms do not flag noise.
# (6) A non-finite inner gradient is set to 0 (shard.py).
# (7) Training stops with an error after three rounds in a row that were rolled back in all layers
#     (train.py).
# (8) Only with --norm_per_lr: limits and statistics take norms that are divided by the round's sum
#     of learning rates. Norms fall with the learning rate, and the statistics remember the past: in
#     448 steps with tau 16 the paper's limit grows from 1.7 times a healthy norm (round 11) to 11
#     times (round 26). So a sick replica is seen late or never. Divided it stays at 1.1 to 1.4
#     times, and then a threshold of 3 flags healthy replicas in most runs, one of 5 in none of 32.
#     With 5, in 272 steps, a replica on random tokens is flagged in 5 of 6 layers (late in 2,000
#     steps in 2), one with 3 times the learning rate in all. The paper's limit flags neither. But
#     the loss does not fall (three seeds): such replicas weigh less anyway. So it is off by
#     default. Rounds that grow (--tau_schedule) need it: their norms grow, too, and soon all
#     replicas would be above the limits of the earlier, shorter rounds.
# As in the paper, the weights take the norms as they are. So the penalty is stronger where norms
# are larger: in long rounds, at large learning rates, in large layers.
#
# Why a replica cannot leave or join while the others train on. When a replica dies, the others get
# an error and can form a new group without it: that takes gloo two seconds. The hard part is the
# sync that was under way. Layer 3 may have arrived at one replica and not at another, and the
# anchors and momenta of layers 0 to 2 have already moved. So the survivors are no longer equal, and
# no anchor is left to roll back to. A commit would help: change no anchor before all layers have
# arrived everywhere. But then the forward waits for the last layer, as in DiLoCo, and the overlap is
# gone. Overlap by layer and live membership exclude each other. So here a lost replica ends the
# run, and a restart goes on from the last checkpoint, with as many replicas as there are.
