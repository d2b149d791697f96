"""EDiT: local SGD on sharded parameters, synchronized layer by layer inside the forward pass.

Read EDiT.sync() and complete() first, then Penalty, then the equations.

The problem. DiLoCo's outer step waits until the whole model has crossed the slow links, and it
trusts every replica alike, even one whose loss has just exploded. EDiT (1) completes layer l just
before the forward needs it, so that the traffic of later layers overlaps with the computation of
earlier ones, and (2) applies a *pseudo-gradient penalty*: leave out replicas with abnormal norms,
weight the others by their norms, clip the mean, or, if all replicas are abnormal, keep the anchor.

    sync_warmup_steps steps with averaged gradients; anchor = x; then repeat tau inner steps and,
    for all layers l at the round's end (in the paper in the forward, with the same result):
        d_i   = anchor - x_i                                    # in the storage of x_i
        G_i   = ||d_i||                                         # [shard] one all-reduce, all layers
        limit_i = mean_i + delta sigma_i                        # from its running statistics
        flag i if G_i > limit_i                                 # (G_i - mean_i) / sigma_i > delta
        else add G_i to the running statistics of replica i
        gather G and flags of all replicas                      # [sync] one all-gather, all layers
        if all replicas are flagged: each whose G_i is finite clears its statistics of layer l
        w_i   = exp(-G_i) / sum_j exp(-G_j) over the unflagged  # on the device, no host read
    for l = 0, 1: start dbar = sum_i w_i d_i                    # [sync] all-reduce per layer, async
    complete(l), in the next forward, when it gets to layer l:
        wait for dbar
        dhat    = dbar * min(1, phi / (||dbar|| + 1e-6))        # [shard] all-gather of one scalar
        unless all replicas are flagged:
            b      <- mu b + dhat
            anchor <- anchor - lr (dhat + mu b)
        x_i    <- anchor
        start to gather layer l; then start dbar of layer l + 2

    [shard]: among the ranks of a replica, fast links. [sync]: among the replicas, slow links.
    M replicas, L layers (with embedding and head), P elements of a layer, N shards
    paper     here             variable            shape        where
    theta_i   x_i, d_i, dbar   model.masters[l]    (P/N,)       every rank its shard; after sync()
                                                                it holds d_i, then dbar
    theta     anchor           anchor              (sum P/N,)   equal in a sync group
    m         b                momentum            (sum P/N,)   equal in a sync group
    G_i       G_i              penalty.norms       (M, L)       all ranks
    w_i       w_i              penalty.weights     (M, L)       all ranks
              mean_i, sigma_i  statistics          (3, L)       replica i: count, mean, variance
    delta, phi                 anomaly_threshold, pseudo_grad_clip
              lr, mu           outer_lr, outer_momentum

AdamW's moments stay on their replica: they are neither sent nor reset. docs/sync.svg shows one
layer through one sync, in five frames.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N, and 8 (M-1) (L + 1) for norms and
flags, losses and steps.

What the overlap saves, on NCCL and gloo. Let each of L equal layers take c seconds to all-reduce
and f seconds to compute. DiLoCo waits L c. EDiT waits c for layer 0 and, if c > f, another c - f at
each later layer: max(c, L c - (L-1) f) in all. So it saves at most (L-1) f, less than one forward.

The deviations from the paper are listed at the end of this file.
Run: torchrun --nproc_per_node 4 train.py --method edit --shards 2
Source: EDiT, arXiv 2412.07210, and its authors' code, atorch local_sgd.
Plain version: plain/edit.py. For a model under torch's FSDP2: examples/edit_fsdp2.py.
"""

import functools
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from config import option
from method import LocalConfig, Method

SIGMA_FLOOR = 0.05  # sigma is never below this fraction of the mean


@dataclass
class PenaltyConfig:
    """Flags of EDiT, A-EDiT and Streaming EDiT: the penalty and the outer step."""

    anomaly_threshold: float = option(3.0, "delta, standard deviations above the mean norm")
    anomaly_ema: float = option(0.02, "alpha, a new norm's share in the statistics", below=1)
    anomaly_warmup_rounds: int = option(10, "norms seen before the first one can be flagged")
    pseudo_grad_clip: float = option(10.0, "phi, largest norm of a layer's dbar", above=0)
    anomaly_elimination: bool = option(True, "leave out replicas with anomalous norms")
    weighted_averaging: bool = option(True, "weight replicas by exp(-norm), else equally")
    pseudo_grad_clipping: bool = option(True, "clip each layer's dbar")
    # large: the paper's, from memory, which has rounds of 128 steps
    outer_lr: float = option(0.7, "outer learning rate", large=0.8)
    outer_momentum: float = option(0.5, "outer Nesterov momentum", below=1, large=0.85)


@dataclass
class EDiTConfig(PenaltyConfig):
    """Flags of EDiT and A-EDiT: everything but when to synchronize."""

    offload: bool = option(False, "keep anchor and momentum in host memory (on a GPU)")


@dataclass
class Config(EDiTConfig, LocalConfig):
    """The paper's rounds have 128 steps, its warm-up 1024."""


# ---- the equations: tensors in, tensors out ----


def anomaly_limits(statistics, config):
    """The largest norms (L,) that are not anomalies. statistics (3, L): for each layer the number,
    mean and variance of replica i's norms that were not flagged."""
    count, mean, variance = statistics
    sigma = torch.maximum(variance.sqrt(), SIGMA_FLOOR * mean)
    limits = mean + config.anomaly_threshold * sigma
    known = count >= max(config.anomaly_warmup_rounds, 2)  # a variance takes two samples
    return limits.where(known & config.anomaly_elimination, torch.inf)


def update_statistics(statistics, G, accepted, config):
    """The statistics (3, L) after adding the norms of G (L,) where accepted (L,) is true. For one
    layer:

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


def forget_lost_layers(statistics, G, lost, new=0.0):
    """The statistics (3, L), `new` in the layers that are lost (L,): all replicas are flagged
    there. One flagged replica is an outlier. If all are flagged, the norms have grown, and the
    limits are out of date. They would stay so, because flagged norms do not enter the statistics,
    and the layer would be rolled back in every later round. A norm that is not finite says nothing
    about the limits, so it clears nothing."""
    return torch.where(lost & G.isfinite(), new, statistics)


def is_anomaly(G, limits):
    # flag if z = (G - mean) / sigma > delta; one-sided: a small norm is never flagged
    return (G > limits) | ~G.isfinite()  # NaN > limit is False


def replica_weights(norms, flagged, weighted=True):
    """Weights (M, L), 0 for flagged replicas, with sum 1, or 0 where all are flagged."""
    # w_i = exp(-G_i) / sum_j exp(-G_j), j unflagged; equal weights are the case G = 0
    G = norms if weighted else torch.zeros_like(norms)
    exponents = (-G).masked_fill(flagged, -torch.inf)
    weights = torch.softmax(exponents, dim=0)  # NaN where all are flagged; the next line sets 0
    return weights.masked_fill(flagged, 0.0)


def clip_factor(norm, phi):
    # dhat = dbar * min(1, phi / (||dbar|| + 1e-6))
    return (phi / (norm + 1e-6)).clamp(max=1.0)


def nesterov_unless_flagged(anchor, momentum, dhat, lr, mu, moves):
    """The step of diloco.nesterov(), in place, without a host read. moves: a scalar tensor, 0 if
    all replicas are flagged, else 1. If it is 0, all weights are 0, so dhat is 0, too. Then nothing
    changes, bit for bit."""
    # b <- mu b + dhat;  a <- a - lr (dhat + mu b)
    # A branch would have to read `moves` on the host, which waits for a GPU. So it is a factor.
    momentum.mul_(mu**moves).add_(dhat)  # mu^0 = 1
    anchor.addcmul_(dhat, moves, value=-lr).addcmul_(momentum, moves, value=-lr * mu)


# ---- the penalty ----

# Flags that the size of a pseudo-gradient depends on.
SCALES_NORMS = {"tau", "tau_time_s", "max_steps", "data", "batch_size", "accum", "tokens_per_step"}
SCALES_NORMS |= {"lr", "muon_lr", "min_lr_ratio", "lr_warmup_steps", "grad_clip", "weight_decay"}
SCALES_NORMS |= {"schedule", "decay_share", "data_by_replica", "beta1", "beta2", "block_size"}
SCALES_NORMS |= {"delay", "alpha", "fragments"}  # of Streaming EDiT
ALL = slice(None)


class Penalty:
    """The pseudo-gradient penalty of replica i. EDiT uses it for all layers at once, Streaming EDiT
    (relatives/streaming_edit.py) for the layers of a fragment: `layers` is a slice of them.

    method.statistics        (3, L)   what replica i knows of its earlier norms: count, mean and
                                      variance of the unflagged ones. They are in its checkpoints
    norms, flagged, weights  (M, L)   of all replicas, in each layer's last sync
    clips                    (L,)     factors, in each layer's last outer step
    length, longest                   steps of this round and of the longest one. Both are 1 if all
                                      rounds are equally long; A-EDiT sets them

    Another detector, or other weights, is a subclass in a file of one's own that replaces one of
    the five functions from new_statistics() on. EDiT takes it as `make_penalty` (EXERCISES.md,
    17). The form of the statistics is the detector's own affair: any tensor whose last dimension
    is the layer.
    """

    length = 1.0
    longest = 1.0

    def __init__(self, method):
        self.method = method
        self.config = method.config
        x = method.model.master
        M = method.mesh.replicas
        L = len(method.model.layers)
        self.norms = x.new_zeros(M, L)
        self.flagged = torch.zeros(M, L, dtype=torch.bool, device=x.device)
        self.weights = x.new_zeros(M, L)
        self.clips = x.new_ones(L)

    def begin(self):
        self.method.statistics = self.new_statistics(len(self.method.model.layers))

    # ---- what a subclass may replace ----

    def new_statistics(self, L: int):
        return self.method.model.master.new_zeros(3, L)

    def limits(self, statistics):
        """The largest norms (L,) that are no anomalies."""
        return anomaly_limits(statistics, self.config)

    def update(self, statistics, G, accepted):
        """The statistics after adding the norms G (L,) where accepted (L,) is true."""
        return update_statistics(statistics, G, accepted, self.config)

    def forget(self, statistics, G, lost):
        """The statistics after a round that has lost the layers (L,): all replicas were flagged."""
        return forget_lost_layers(statistics, G, lost, self.new_statistics(len(G)))

    def make_weights(self, norms, flagged):
        """Weights (M, L) from the norms and flags (M, L)."""
        return replica_weights(norms, flagged, self.config.weighted_averaging)

    # ---- what a sync calls ----

    def flag(self, G, layers=ALL):
        """Flags (L,) of replica i for its norms G (L,). Those that are not flagged enter its
        statistics. Only replica i has seen its earlier norms, so it judges itself.

        The statistics hold norms divided by the steps of their round, so the limit is for one step,
        too. Times `longest` it is the limit for G."""
        own = self.method.statistics[..., layers]  # a view
        flagged = is_anomaly(G, self.longest * self.limits(own))
        own.copy_(self.update(own, G / self.length, ~flagged))
        return flagged

    def weigh(self, norms, flagged, layers=ALL, norms_for_weights=None):
        """The weights (M, L) of all replicas, from their norms and flags. Clears the statistics of
        lost layers. norms_for_weights: norms from which the weights are made, if not `norms`."""
        own = self.method.statistics[..., layers]
        G = norms[self.method.mesh.replica]
        own.copy_(self.forget(own, G, lost=flagged.all(dim=0)))
        if norms_for_weights is None:
            norms_for_weights = norms
        weights = self.make_weights(norms_for_weights, flagged)
        self.norms[:, layers] = norms
        self.flagged[:, layers] = flagged
        self.weights[:, layers] = weights
        return weights

    def outer_step(self, l, dbar, anchor, momentum):
        """Clip the mean of layer l and take the outer step, unless all replicas are flagged."""
        # dhat = dbar * min(1, phi / (||dbar|| + 1e-6))
        clip = dbar.new_ones(())
        if self.config.pseudo_grad_clipping:
            clip = clip_factor(self.method.model.norm(dbar), self.config.pseudo_grad_clip)
        self.clips[l] = clip
        dhat = dbar.mul_(clip)
        # b <- mu b + dhat;  anchor <- anchor - lr (dhat + mu b), unless all replicas are flagged
        moves = (~self.flagged[:, l]).any().to(dbar.dtype)
        lr, mu = self.config.outer_lr, self.config.outer_momentum
        nesterov_unless_flagged(anchor, momentum, dhat, lr, mu, moves)

    def describe(self, layers=ALL):
        """Tell the record about these layers, a slice or a list of their numbers."""
        flagged = self.flagged[:, layers]
        rolled_back = torch.zeros_like(self.flagged[0])
        rolled_back[layers] = flagged.all(dim=0)
        self.method.record.describe(
            pseudo_grad_norm=self.norms[:, layers].norm(dim=1),
            weight=self.weights[:, layers].mean(dim=1),
            dropped=flagged.sum(dim=1),
            rolled_back=rolled_back,
            clip=self.clips[layers].mean(),
        )

    def resume_with(self, changed: set) -> bool:
        """A run continues with other values of the flags `changed`. If norms depend on one of them,
        the limits of the checkpoint are wrong, so the statistics start anew. Returns whether they
        do."""
        found = sorted(changed & SCALES_NORMS)
        if found:
            self.begin()
            flags = ", ".join(f"--{name}" for name in found)
            print(f"note    {flags} changed, so the statistics of norms start anew")
        return bool(found)


# ---- the method ----


class EDiT(Method):
    Config = Config
    vectors = ("anchor", "momentum")
    scalars = ("statistics",)
    repairs_replicas = True  # a flagged replica restarts from the anchor
    make_penalty = Penalty

    def __init__(self, model, mesh, config, record, clock):
        x = model.master
        if config.offload and x.device.type == "cuda":  # in pinned memory of the host
            self.anchor = torch.zeros(x.shape, dtype=x.dtype, pin_memory=True)
            self.momentum = torch.zeros(x.shape, dtype=x.dtype, pin_memory=True)
        super().__init__(model, mesh, config, record, clock)
        self.penalty = self.make_penalty(self)
        self.anchors = model.views(self.anchor)
        self.momenta = model.views(self.momentum)

    def begin(self):
        self.anchor.copy_(self.model.master, non_blocking=True)  # --offload: on the host
        self.penalty.begin()

    def resume_with(self, changed):
        self.penalty.resume_with(changed)

    def sync(self):
        """The end of the round: norms, weights, and the start of the first two all-reduces. The
        next forward ends what begins here: it calls complete(l) for each layer."""
        # d_i = anchor - x_i, in the storage of x_i: from here on masters[l] holds d_i.
        squares = []
        for a, x in zip(self.anchors, self.model.masters):
            d = torch.sub(a.to(x.device, non_blocking=True), x, out=x)
            squares.append(d.norm() ** 2)

        # G_i = ||d_i||. A rank has a shard of d_i, so the squares are summed over its replica.
        squares = torch.stack(squares)  # (L,)
        # [shard] all-reduce, L scalars, once per round
        self.mesh.all_reduce(squares, self.mesh.shard_group).wait()
        G = squares.sqrt()

        # Each replica knows only its own earlier norms, so it flags itself and tells the others.
        flagged = self.penalty.flag(G)
        rows = self.gather(norms=G, flagged=flagged)
        flagged = rows.flagged > 0  # (M, L), back from numbers to bools
        norms_for_weights = self.norms_for_weights(rows.norms)
        self.penalty.weigh(rows.norms, flagged, norms_for_weights=norms_for_weights)

        # Two means are in flight at any time. Operations run in the order in which they are issued,
        # on NCCL over all groups (NCCL_LAUNCH_ORDER_IMPLICIT=1, plumbing/launch.py). If all means
        # were issued here, the gather of layer 0 would queue behind nearly all of them, and nothing
        # would overlap. So one mean travels, and the next one is queued behind it. The price: a
        # last layer that is much larger than the others starts only two layers before its turn.
        self.to_start = deque(self.operations())
        self.in_flight = deque()  # handles, at most two
        self.start_next()
        self.start_next()

        # This line is EDiT: the forward in shard.py calls complete(l) before it gathers and
        # computes layer l. While a layer computes, the next two means are on their way.
        self.model.pre_layer_hook = self.complete

    def measure(self):
        """Nothing: sync() gathers the norms."""

    def norms_for_weights(self, norms):
        """The norms (M, L) for the weights. A-EDiT corrects them for unequal rounds."""
        return norms

    def operations(self) -> list:
        """Functions in the order in which they run. Each starts one collective and returns its
        handle. (relatives/one_bit_edit.py has two for each layer.)"""
        return [functools.partial(self.start_mean, l) for l in range(len(self.model.layers))]

    def start_next(self):
        if self.to_start:
            start = self.to_start.popleft()
            self.in_flight.append(start())

    def start_mean(self, l):
        """Start dbar = sum_i w_i d_i of layer l, in the storage of d_i."""
        d = self.model.masters[l]
        # A flagged replica has w_i = 0, but 0 * NaN is NaN, so overwrite it with 0.
        d.mul_(self.penalty.weights[self.mesh.replica, l]).nan_to_num_(0.0, 0.0, 0.0)
        # [sync] all-reduce, P/N fp32, once per round and layer
        return self.mesh.all_reduce(d, self.mesh.sync_group)

    def wait_for_mean(self, l):
        self.in_flight.popleft().wait()

    def complete(self, l: int):
        """The next forward calls it before it computes layer l: x_l becomes the new anchor."""
        self.finish_layer(l)
        # First the gather of this layer, which the forward waits for, then the next mean.
        self.model.start_gather(l)
        if self.to_start:
            with self.record.stall():
                self.start_next()

    def finish_layer(self, l):
        """Wait for the mean of layer l and take its outer step."""
        x = self.model.masters[l]  # it receives dbar
        with self.record.stall():
            self.wait_for_mean(l)
            with self.on_device(self.anchors[l], self.momenta[l]) as (a, b):
                self.penalty.outer_step(l, x, a, b)
                # x_i <- anchor
                x.copy_(a)
        if l == len(self.model.layers) - 1:
            self.model.pre_layer_hook = None  # the next forward has no sync to end
            self.end_sync()

    @contextmanager
    def on_device(self, *vectors):
        """The vectors on the model's device. Those in host memory (--offload) are copied there,
        and back at the end."""
        copies = [vector.to(self.mesh.device, non_blocking=True) for vector in vectors]
        yield copies
        for vector, copy in zip(vectors, copies):
            if copy is not vector:
                vector.copy_(copy, non_blocking=True)

    def end_sync(self):
        """All layers are complete."""
        self.penalty.describe()
        self.record.done(self)

    def drain(self):
        if self.model.pre_layer_hook:
            for l in range(len(self.model.layers)):
                self.finish_layer(l)
                if self.to_start:
                    with self.record.stall():
                        self.start_next()


# Deviations from the paper and its authors' code:
# (1) One all-gather carries the norms and flags of all layers, and nothing is read on the host. The
#     authors' code reads 2 to 4 values per layer on the host, which prevents the overlap.
# (2) A norm that is not finite is always flagged, also without anomaly elimination.
# (3) Flagged norms never enter the statistics, so one outlier does not hide the next. The cost: if
#     the norms of one replica rise suddenly and for good, it stays flagged (the log shows it; raise
#     --anomaly_threshold). Where all replicas are flagged, the statistics of that layer start anew:
#     see forget_lost_layers(). So a layer is lost at most once in anomaly_warmup_rounds rounds, if
#     its norms are finite.
# (4) For the first anomaly_warmup_rounds samples the statistics are the plain mean and standard
#     deviation: an exponential average that starts at zero is biased.
# (5) sigma is at least SIGMA_FLOOR * mean, so that noise is not flagged where norms are nearly
#     equal.
# (6) A non-finite inner gradient is set to 0 (shard.py).
# (7) Training stops with an error after three rounds in a row that were rolled back in all layers
#     (train.py). Because of (3), only norms that are not finite can do that.
# The authors' code has these options, which are not here:
# (8) A dynamic threshold: delta max(1, standard deviation of the last z-scores). After restless
#     rounds it would flag fewer replicas.
# (9) A softmax temperature: exp(-G_i / temperature). A higher one would make weights more equal.
# (10) The detector is trusted after 120 norms; its example, as we, takes 10. With 120 the first
#     outliers would not be flagged.
# (11) GTA in place of the weighted mean: an element counts only where its sign is that of most
#     replicas. It would drop elements on which replicas disagree.
#
# As in the paper, the limits do not follow the learning rate. Norms fall with it, and the
# statistics remember larger ones, so a sick replica is seen late or never. Dividing the norms by
# the round's learning rates finds more of them, but does not lower the loss (lab/LOG.md).
# As in the paper, the weights take the norms as they are: the softmax sees their differences, not
# their ratios. So the penalty is stronger where norms are larger: in long rounds, at large learning
# rates, in large layers. Late in a small run norms are near 0.1. Then a replica that moves ten
# times as far (1.0) may be below its limit, and its weight only falls from 0.25 to 0.18.
