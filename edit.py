"""EDiT: local SGD on sharded parameters, synchronised layer by layer inside the forward pass.

The problem. DiLoCo's outer step blocks: every replica stands still while the whole model crosses
the slow links. And it trusts every replica alike, also one whose loss has just blown up. EDiT (1)
synchronises layer l just before the forward needs it, so that the traffic of later layers overlaps
with the computation of earlier ones, and (2) puts the *pseudo-gradient penalty* between the
replicas and the model: drop anomalies, weigh by norm, clip, or roll back.

    sync_warmup_steps steps of mini-batch; then anchor = x, and after every tau inner steps, at the
    start of the next forward (M replicas; every layer l):

        d_i   = anchor - x_i                                    # in the storage of x_i
        G_i   = ||d_i||                                         # [shard] one all-reduce, all layers
                flag i if (G_i - mu_i) / sigma_i > threshold    # running statistics of replica i
        G, flags of all replicas                                # [sync] one all-gather, all layers
        w_i   = exp(-G_i) / sum_j exp(-G_j) over the unflagged  # on the device, no host read
        issue dbar = sum_i w_i d_i for l = 0, 1, ...            # [sync] all-reduce per layer, async
        for each layer l, when the forward gets there:
            wait for dbar
            dhat    = dbar * min(1, phi / (||dbar|| + 1e-6))    # [shard] all-gather of one scalar
            b      <- mu b + dhat
            anchor <- anchor - lr (dhat + mu b)                 # unless all replicas are flagged
            x_i    <- anchor
            all-gather, compute (shard.py)

All norms can be taken at once, with the same result as layer by layer, because parameters do not
change between the moment a sync is due and a layer's turn.

    paper          variable              shape        where
    theta_i, d_i   model.masters[l]      (P/N,)       every rank its shard
    theta (anchor) anchor                (sum P/N,)   equal in a sync group
    m (momentum)   momentum              (sum P/N,)   equal in a sync group
    G_i            norms                 (M, L)       after the all-gather, all ranks
    w_i            weights               (M, L)       all ranks
    mu_i, sigma_i  detector.mean, .variance  (L,)     replica i
    tau            tau                   inner steps
    phi            pseudo_grad_clip      norm
    delta          anomaly_threshold     standard deviations
    alpha          anomaly_ema           share of a new sample

Deviations from the paper and its authors' code: (1) one fused exchange of norms and flags, and no
host read; the code takes 5 collectives and 2 to 4 host reads per layer, and one of the reads waits
for the slow all-reduce, which undoes the overlap. (2) A norm that is not finite is flagged, from
the first round on. (3) Flagged norms never enter the statistics, so one outlier does not blind the
detector; the price is that a replica whose norms rise at once and for good stays flagged (the log
shows it: raise anomaly_threshold). (4) During the first anomaly_warmup_rounds samples the
statistics are the plain mean and standard deviation: an exponential average started at zero is
badly biased. (5) sigma is taken to be at least SIGMA_FLOOR * mu, so that nearly equal norms do not
flag noise. (6) The last round may be shorter, so that no step is lost. (7) No layer is prefetched
in the forward that synchronises: its parameters are not final before its turn. (8) An inner
gradient that is not finite is not applied (shard.py), so that a sick replica keeps a usable AdamW
and is healthy again after the sync that left it out.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 P/N, as DiLoCo, and 8 (M-1) L for the exchange.
Exposed time per round: max(first layer's all-reduce, all layers' all-reduce - forward).
Run: torchrun --nproc_per_node 4 train.py --method edit --shards 2
Source: EDiT, arXiv 2412.07210, and its authors' code, atorch local_sgd.
"""

from dataclasses import dataclass

import torch

from flags import option
from mesh import Handle, Stall

SIGMA_FLOOR = 0.05  # of the mean: nothing within threshold * 5% of the mean counts as an anomaly


@dataclass
class SyncConfig:
    """What EDiT shares with A-EDiT: everything but the trigger."""

    sync_warmup_steps: int = option(200, "first steps with averaged gradients (paper: 1024)")
    outer_lr: float = option(0.7, "outer learning rate (paper: 0.8)")
    outer_momentum: float = option(0.8, "outer Nesterov momentum (paper: 0.85)", below=1)
    anomaly_threshold: float = option(3.0, "delta, standard deviations above the mean norm")
    anomaly_ema: float = option(0.02, "alpha, a new norm's share in the statistics", below=1)
    anomaly_warmup_rounds: int = option(10, "norms seen before any finite one is flagged")
    pseudo_grad_clip: float = option(
        10.0, "phi, largest norm of a layer's pseudo-gradient", above=0
    )
    anomaly_elimination: bool = option(True, "leave flagged replicas out")
    weighted_averaging: bool = option(True, "weigh replicas by exp(-norm), else equally")
    pseudo_grad_clipping: bool = option(True, "clip each layer's pseudo-gradient")
    offload: bool = option(False, "keep anchor and momentum in the host's memory (on a GPU)")
    n_outer_vectors = 2  # not a flag: anchor and momentum


@dataclass
class Config(SyncConfig):
    tau: int = option(16, "inner steps per round (paper: 128)", low=1)


# ---- the equations: tensors in, tensors out ----


class Detector:
    """Replica i's running mean and variance of each layer's norm: (L,) each, and how many
    norms they hold."""

    def __init__(self, n_layers, device, dtype, threshold, ema, warmup):
        self.count, self.mean, self.variance = torch.zeros(3, n_layers, device=device, dtype=dtype)
        self.threshold, self.ema = threshold, ema
        self.warmup = max(warmup, 2)  # a variance takes two samples

    def flag(self, G):
        """True where G (L,) is an anomaly; the other norms enter the statistics."""
        sigma = torch.maximum(self.variance.sqrt(), SIGMA_FLOOR * self.mean)
        # flag if z = (G - mu) / sigma > delta: one-sided, a small norm is good news
        flagged = ((G - self.mean) > self.threshold * sigma) & (self.count >= self.warmup)
        flagged |= ~G.isfinite()  # NaN compares False above
        self.learn(torch.where(flagged, self.mean, G), ~flagged)
        return flagged

    def learn(self, G, taken):
        n = self.count + 1
        early = n <= self.warmup
        # warm-up: plain mean and sample variance, mu_n = mu + (G - mu)/n,
        #          sigma^2_n = (n-2)/(n-1) sigma^2 + (G - mu)^2/n  (Welford)
        # after:   mu <- mu + alpha (G - mu),  sigma^2 <- (1 - alpha) sigma^2 + alpha (G - mu_new)^2
        mean = self.mean + torch.where(early, 1 / n, self.ema) * (G - self.mean)
        plain = (n - 2).clamp(min=0) / (n - 1).clamp(min=1) * self.variance
        plain = plain + torch.where(n > 1, (G - self.mean) ** 2 / n, 0.0)
        moving = (1 - self.ema) * self.variance + self.ema * (G - mean) ** 2
        self.variance = torch.where(taken, torch.where(early, plain, moving), self.variance)
        self.mean = torch.where(taken, mean, self.mean)
        self.count = self.count + taken

    def state_dict(self) -> dict:
        return {name: getattr(self, name).tolist() for name in ("count", "mean", "variance")}

    def load_state_dict(self, state: dict):
        for name, values in state.items():
            setattr(self, name, self.mean.new_tensor(values))


def replica_weights(norms, flagged, weighted=True):
    """Weights (M, L) that sum to 1 over the unflagged replicas; all 0 where every
    replica is flagged."""
    # w_i = exp(-G_i) / sum_j exp(-G_j), j unflagged; equal weights are the case G = 0
    G = norms if weighted else torch.zeros_like(norms)
    exponents = (-G).masked_fill(flagged, -torch.inf)
    weights = torch.softmax(exponents, dim=0)  # subtracts the smallest G
    return weights.masked_fill(flagged, 0.0)


def clip_factor(norm, phi):
    # dhat = dbar * min(1, phi / (||dbar|| + 1e-6))
    return (phi / (norm + 1e-6)).clamp(max=1.0)


def outer_nesterov(anchor, momentum, dhat, lr, mu, alive):
    """One Nesterov step in place (torch.optim.SGD's form). Where `alive` (0 or 1) is 0, dhat must
    be 0 and nothing changes, bit for bit: the rollback."""
    # b <- mu b + dhat;  a <- a - lr (dhat + mu b)
    momentum.mul_(mu**alive).add_(dhat)
    anchor.addcmul_(dhat, alive, value=-lr).addcmul_(momentum, alive, value=-lr * mu)


# ---- the method ----


class EDiT:
    lockstep = True  # all replicas take the same number of steps
    mends_replicas = True  # a sick one is left out of the sync and starts again from the anchor

    def __init__(self, model, mesh, config, max_steps: int, clock):
        self.model, self.mesh, self.config = model, mesh, config
        self.max_steps, self.clock = max_steps, clock
        self.anchor = model.outer_vector(config.offload)
        self.momentum = model.outer_vector(config.offload)
        self.outer_vectors = {"anchor": self.anchor, "momentum": self.momentum}
        self.anchors, self.momenta = model.views(self.anchor), model.views(self.momentum)
        self.detector = Detector(
            len(model.layers), mesh.device, model.master.dtype,
            config.anomaly_threshold, config.anomaly_ema, config.anomaly_warmup_rounds,
        )  # fmt: skip
        self.steps = self.local_steps = self.round = 0  # inner steps in all, since a sync; syncs
        self.last_sync = None  # what stats() will say of it
        self.steps_of_round = None  # (M,) list, where replicas differ (A-EDiT)

    @property
    def armed(self) -> bool:
        return self.model.sync_layer is not None

    @property
    def in_sync(self) -> bool:
        """Also true once a sync has started: the next forward, or finish(), completes it."""
        return self.local_steps == 0 or self.armed

    @property
    def replicas_differ(self) -> bool:
        """Has the local phase begun? Until then replicas are equal, and anchor and
        momentum unused."""
        return self.steps > self.config.sync_warmup_steps

    def averages_gradients(self, step: int) -> bool:
        return step < self.config.sync_warmup_steps

    def before_step(self, step: int):
        if step == self.config.sync_warmup_steps:
            self.anchor.copy_(self.model.master)
        if self.sync_is_due():
            self.start()

    def sync_is_due(self) -> bool:
        return self.local_steps == self.config.tau

    def after_step(self, step: int):
        self.steps = step + 1
        if step >= self.config.sync_warmup_steps:
            self.local_steps += 1

    def position(self, step: int) -> float:
        return step

    def common_position(self, step: int):
        return step

    def finished(self, step: int) -> bool:
        return step >= self.max_steps

    def finish(self):
        if self.local_steps and not self.armed:
            self.start()
        if self.armed:
            for l in range(len(self.model.layers)):
                self.complete(l)

    # ---- the sync ----

    def start(self):
        """All norms, one exchange, all weights; then every layer's all-reduce is on its way, and
        the next forward will complete() layer after layer."""
        self.stall, self.waited_before = Stall(self.mesh.device), dict(self.mesh.waited_s)
        self.sent_before, self.clips, self.arriving = self.mesh.sent["sync"], [], []
        with self.stall:
            row = self.inspect(self.pseudo_gradient())
            # [sync] all-gather, 2 L scalars per replica, once per round
            self.judge(self.mesh.gather_rows(row, self.mesh.sync))
            for l, d in enumerate(self.model.masters):
                self.weigh_down(d, self.mesh.replica, l)
                # [sync] all-reduce, P/N fp32, once per round and layer
                self.arriving.append(self.mesh.all_reduce(d, self.mesh.sync, many=True))
        self.model.forget_gathered()
        self.model.sync_layer = self.complete

    def pseudo_gradient(self):
        """d_i takes the place of x_i. Returns G_i of this replica, (L,)."""
        squares = []
        for a, x in zip(self.anchors, self.model.masters):
            # d_i = a - x_i
            d = torch.sub(self.visit(a), x, out=x)
            squares.append(d.norm() ** 2)
        squares = torch.stack(squares)
        # [shard] all-reduce, L scalars, once per round
        self.mesh.all_reduce(squares, self.mesh.shard).wait()
        return squares.sqrt()

    def visit(self, home):
        """A layer of an outer vector on the device: itself or, with --offload, a copy."""
        return home.to(self.mesh.device, non_blocking=True)

    def inspect(self, G):
        """What the other replicas have to know of this one: its norms, its flags, its counts,
        (2 L + counts,)."""
        flagged = self.detector.flag(G) if self.config.anomaly_elimination else torch.zeros_like(G)
        return torch.cat([G, flagged.to(G.dtype), self.counts(G)])

    def counts(self, G):
        return G[:0]  # A-EDiT has something to add

    def judge(self, rows):
        """From the rows of all replicas: norms, flags, weights (M, L), and which layers
        have anybody left (L,)."""
        L = len(self.model.layers)
        self.norms, flags, self.all_counts = rows.split([L, L, rows.shape[1] - 2 * L], dim=1)
        self.flagged = flags > 0
        self.weights = self.weigh(self.norms, self.flagged, self.all_counts)
        self.alive = (~self.flagged).any(dim=0).to(self.weights.dtype)

    def weigh(self, norms, flagged, counts):
        return replica_weights(norms, flagged, self.config.weighted_averaging)

    def weigh_down(self, d, i: int, l: int):
        """d <- w_i d, replica i's share in layer l's dbar. If it is flagged w_i = 0, and 0 * NaN,
        which is NaN, is overwritten; if not, all of d is finite."""
        d.mul_(self.weights[i, l]).nan_to_num_(0.0, 0.0, 0.0)

    def complete(self, l: int):
        """The forward's call just before it gathers layer l, l = 0, 1, ..., L-1:
        x_l becomes the new anchor."""
        with self.stall:
            self.arriving[l].wait()
            dbar = self.model.masters[l]
            clip = torch.ones_like(self.alive[l])
            if self.config.pseudo_grad_clipping:
                square = (dbar.norm() ** 2).view(1)
                # Summed in the same order in every replica, where all-reduce may differ in the last
                # bit, and the replicas with it.
                # [shard] all-gather, N scalars, once per round and layer
                squares = self.mesh.gather_rows(square, self.mesh.shard)
                clip = clip_factor(squares.sum().sqrt(), self.config.pseudo_grad_clip)
            anchor, momentum = self.visit(self.anchors[l]), self.visit(self.momenta[l])
            outer_nesterov(
                anchor, momentum, dbar.mul_(clip),
                self.config.outer_lr, self.config.outer_momentum, self.alive[l],
            )  # fmt: skip
            self.model.masters[l].copy_(anchor)
            for home, guest in ((self.anchors[l], anchor), (self.momenta[l], momentum)):
                home.copy_(guest, non_blocking=True)  # nothing to do if they are the same
            self.clips.append(clip)
        if l == len(self.model.layers) - 1:
            self.end()

    def end(self):
        self.model.sync_layer = None
        self.round += 1
        self.last_sync = {"round": self.round, "step": self.steps, "tau": self.local_steps}
        self.last_sync["sync_bytes"] = self.mesh.sent["sync"] - self.sent_before
        for what, seconds in self.mesh.waited_s.items():
            self.last_sync[f"wait_{what}_ms"] = 1e3 * (seconds - self.waited_before[what])
        self.local_steps = 0

    def stats(self) -> dict | None:
        """What the record's `sync` row says of a sync since the last call, else None.
        Reads the device."""
        if self.last_sync is None:
            return None
        row, self.last_sync = self.last_sync, None
        return row | {
            "pseudo_grad_norm": self.norms.norm(dim=1).tolist(),
            "weight": self.weights.mean(dim=1).tolist(),
            "dropped": self.flagged.sum(dim=1).tolist(),
            "clip": torch.stack(self.clips).mean().item(),
            "stall_ms": self.stall.ms(),
            "steps": self.steps_of_round or [row["tau"]] * len(self.norms),
        }

    # ---- checkpoints ----

    def sync_saved(self, replicas: int, load):
        """End the round that `replicas` saved replicas had begun, on ranks that are now another
        number: the same sync with the replicas one after the other. load(i) brings replica i's
        parameters into model.master and its state into this object. Leaves all ranks in sync, with
        the new anchor in model.master."""
        self.stall, self.waited_before = Stall(self.mesh.device), dict(self.mesh.waited_s)
        self.sent_before, self.clips = self.mesh.sent["sync"], []
        x, dbar, rows, states = self.model.master, torch.zeros_like(self.model.master), [], []
        for i in range(replicas):
            load(i)
            rows.append(self.inspect(self.pseudo_gradient()))
            states.append(self.state_dict())  # its detector has learned
        self.judge(torch.stack(rows))
        for i in range(replicas):
            load(i)
            self.pseudo_gradient()
            for l, d in enumerate(self.model.masters):
                self.weigh_down(d, i, l)
            dbar += x
        x.copy_(dbar)
        self.load_state_dict(states[self.mesh.replica % replicas])
        self.arriving = [Handle()] * len(self.model.layers)
        for l in range(len(self.model.layers)):
            self.complete(l)

    def state_dict(self) -> dict:
        """What a replica has of its own beside the vectors, in plain numbers."""
        counters = {"steps": self.steps, "round": self.round, "local_steps": self.local_steps}
        return counters | {"detector": self.detector.state_dict()}

    def load_state_dict(self, state: dict):
        self.steps, self.round = state["steps"], state["round"]
        self.local_steps = state["local_steps"]
        self.detector.load_state_dict(state["detector"])
