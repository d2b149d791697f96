"""EDiT for a model of your own under torch's FSDP2: this one file, which imports torch alone.

    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"  # before init_process_group
    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replica", "shard"))
    for block in model.layers:
        fully_shard(block, mesh=mesh["shard"])  # not mesh: FSDP2 would average every gradient
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    edit = EDiT(model, mesh["replica"], tau=16, warmup_steps=1024)
    for batch in batches:                       # every rank has its own
        loss = model(batch)                     # completes a sync, layer by layer
        loss.backward()                         # in the warm-up it averages gradients
        clip_gradient(model.parameters(), 1.0)  # and sets one that is not finite to 0
        optimizer.step()
        optimizer.zero_grad()
        edit.step()                             # every tau steps it starts a sync
    edit.finish()                               # a last sync: all replicas are equal

A replica is a row of the mesh. FSDP2 knows only its row, so replicas train alone. A *layer* is what
one fully_shard() call gathers at once: a block, a list of modules, or what is left for the root.
The equations, their names and their order are those of the project's edit.py:

    warmup_steps steps with averaged gradients; anchor = x; then repeat tau inner steps and sync():
        d_i   = anchor - x_i
        G_i   = ||d_i||                                         # [shard] all-gather, all layers
        limit_i = mean_i + delta sigma_i                        # from its running statistics
        flag i if G_i > limit_i
        else add G_i to the running statistics of replica i
        share G and flags with all replicas                     # [sync] all-gather, all layers
        if all replicas are flagged: each whose G_i is finite clears its statistics of the layer
        w_i   = exp(-G_i) / sum_j exp(-G_j) over the unflagged
    for the first two layers: start dbar = sum_i w_i d_i        # [sync] all-reduce per layer, async
    complete(layer), in the next forward, just before FSDP2 gathers the layer:
        wait for dbar
        dhat    = dbar * min(1, phi / (||dbar|| + 1e-6))        # [shard] all-gather of one scalar
        unless all replicas are flagged:
            b      <- mu b + dhat
            anchor <- anchor - lr (dhat + mu b)
        x_i    <- anchor
        start to gather the layer; then start dbar of the next layer but one

    M replicas, L layers, P elements of a layer, N shards
    paper     here             variable            shape        where
    theta_i   x_i              Layer.parameters    (P/N,)       every rank its shards
    theta, m  anchor, b        Layer.anchor, .momentum  (P/N,)  equal in a sync group
    G_i, w_i                   norms, weights      (M, L)       all ranks
              mean_i, sigma_i  statistics          (3, L)       replica i: count, mean, variance

In the warm-up all replicas must run the same layers in the same order in every step: what one of
them skips or reverses is an error. After it, each may go its own way, and this one order remains.
DiLoCo is the same with anomaly_elimination, weighted_averaging and pseudo_grad_clipping off.
Memory: two vectors like the parameters, and d of two layers. A sync gathers every layer once more
than FSDP2 would (see finish_layer). Parameters that need no gradient when EDiT is made, and
buffers, are never averaged.

Not tried on GPUs. How it was tested, NCCL, torchtitan, and what it does not do: docs/fsdp2.md.
Source: EDiT, arXiv 2412.07210; deviations as at the end of edit.py.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

SIGMA_FLOOR = 0.05  # sigma is never below this fraction of the mean
CHECKPOINTED = "_checkpoint_wrapped_module."  # torch's state_dict() leaves it out, too
PRIVATE_NAME = "_get_fsdp_state"  # of torch. It tells which modules one fully_shard() call gathers


@dataclass
class Config:
    """What EDiT() takes by keyword."""

    tau: int = 16  # inner steps per round (paper: 128)
    warmup_steps: int = 1024  # first steps, with averaged gradients
    # The paper's outer step (from memory), for large models. Small ones want 0.7 and 0.5.
    outer_lr: float = 0.8
    outer_momentum: float = 0.85  # Nesterov's
    anomaly_threshold: float = 3.0  # delta, standard deviations above the mean norm
    anomaly_ema: float = 0.02  # alpha, a new norm's share in the statistics
    anomaly_warmup_rounds: int = 10  # norms seen before the first one can be flagged
    pseudo_grad_clip: float = 10.0  # phi, largest norm of a layer's dbar
    anomaly_elimination: bool = True  # leave out replicas with anomalous norms
    weighted_averaging: bool = True  # weight replicas by exp(-norm), else equally
    pseudo_grad_clipping: bool = True  # clip each layer's dbar


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


def forget_lost_layers(statistics, G, lost):
    """The statistics (3, L), cleared in the layers that are lost (L,): all replicas are flagged
    there, so norms have grown, and the limits are out of date. A norm that is not finite says
    nothing about the limits, so it clears nothing."""
    return statistics.masked_fill(lost & G.isfinite(), 0.0)


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
    """The outer step, in place, without a host read. moves: a scalar tensor, 0 if all replicas are
    flagged, else 1. If it is 0, all weights are 0, so dhat is 0, too. Then nothing changes, bit for
    bit."""
    # b <- mu b + dhat;  a <- a - lr (dhat + mu b)
    # A branch would have to read `moves` on the host, which waits for a GPU. So it is a factor.
    momentum.mul_(mu**moves).add_(dhat)  # mu^0 = 1
    anchor.addcmul_(dhat, moves, value=-lr).addcmul_(momentum, moves, value=-lr * mu)


# ---- the layers ----


class Layer:
    """What one fully_shard() call gathers. Anchor and momentum are flat vectors: this rank's shards
    of all its parameters, one after the other."""

    def __init__(self, index, name, modules, places):
        self.index, self.name = index, name
        self.modules = modules  # those of the fully_shard() call
        self.places = places  # parameter's name -> (its module, its name there)
        self.parameters = {}  # parameter's name -> DTensor
        for full_name, (module, key) in places.items():
            self.parameters[full_name] = getattr(module, key)
        self.shapes = [x.shape for x in self.shards()]
        self.anchor = torch.zeros_like(self.flat())
        self.momentum = torch.zeros_like(self.anchor)
        self.pending = False  # True: its sync is not complete

    @torch.no_grad()
    def shards(self) -> list:
        """This rank's shard of each parameter. Writing into it changes the parameter."""
        return [p.to_local() for p in self.parameters.values()]

    @torch.no_grad()
    def flat(self) -> torch.Tensor:
        """x_i: a copy."""
        return torch.cat([x.flatten() for x in self.shards()])

    def difference(self) -> torch.Tensor:
        """d_i = anchor - x_i"""
        x = self.flat()
        return torch.sub(self.anchor, x, out=x)

    def cut(self, vector) -> list:
        """Views of a flat vector, shaped like shards()."""
        sizes = [shape.numel() for shape in self.shapes]
        return [v.view(shape) for v, shape in zip(vector.split(sizes), self.shapes)]

    def as_dtensors(self, vector) -> dict:
        """Parameter's name -> its part of the vector, sharded like the parameter."""
        found = {}
        for (name, p), v in zip(self.parameters.items(), self.cut(vector)):
            shape = {"shape": p.shape, "stride": p.stride()}
            found[name] = DTensor.from_local(v, p.device_mesh, p.placements, **shape)
        return found

    def is_sharded(self) -> bool:
        """Are the parameters that its modules would compute with the shards, not whole ones?"""
        registered = [getattr(module, key) for module, key in self.places.values()]
        return all(p is q for p, q in zip(registered, self.parameters.values()))


def find_layers(model) -> list:
    owners = {}  # parameter -> the state of its fully_shard() call
    modules = {}  # that state -> the modules of the call
    names = {}
    for name, module in model.named_modules():  # inner modules come after outer ones
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation may have left it gathered
            state = getattr(module, PRIVATE_NAME)()
            modules.setdefault(state, []).append(module)
            names.setdefault(state, name or "root")
            for p in module.parameters():
                owners[p] = state  # the innermost call's
    places = {state: {} for state in modules}
    seen = set()
    for prefix, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if p.requires_grad and p not in seen:  # a tied matrix counts once
                seen.add(p)
                name = f"{prefix}.{key}".removeprefix(".").replace(CHECKPOINTED, "")
                check_parameter(name, p, owners)
                places[owners[p]].setdefault(name, (module, key))
    layers = []
    for state, found in places.items():
        if found:
            layers.append(Layer(len(layers), names[state], modules[state], found))
    return layers


def check_parameter(name, p, owners):
    """Raise ValueError if the parameter cannot take part."""
    if p not in owners:
        raise ValueError(f"{name}: shard it with fully_shard(), before EDiT is made")
    if p.device_mesh.ndim > 1:
        raise ValueError(
            f'{name}: give fully_shard() one dimension, mesh=mesh["shard"]. With two, FSDP2 '
            "averages every gradient over all replicas (HSDP)"
        )
    if p.device.type == "meta":
        raise ValueError(f"{name}: it is on meta. Make EDiT when parameters have their memory")
    if p.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name}: an outer step would be lost in {p.dtype}. Keep float32, and compute in "
            "bfloat16 by MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )


def find_mesh(layers, replicas):
    """The mesh of the shards. Raises ValueError if it is not across that of the replicas."""
    meshes = {p.device_mesh for layer in layers for p in layer.parameters.values()}
    if len(meshes) > 1:
        raise ValueError(f"the parameters are on {len(meshes)} meshes: norms would be wrong")
    (shards,) = meshes
    both = set(shards.mesh.flatten().tolist()) & set(replicas.mesh.flatten().tolist())
    if both != {dist.get_rank()}:
        raise ValueError(
            f"ranks {sorted(both)} are in the mesh of the shards and in that of the replicas: give "
            'fully_shard() mesh["shard"] and EDiT mesh["replica"]'
        )
    return shards


# ---- the method ----


class EDiT:
    """replicas: the dimension of the mesh whose links are slow. options: the fields of Config."""

    def __init__(self, model, replicas, **options):
        if not hasattr(FSDPModule, PRIVATE_NAME):
            raise RuntimeError(
                f"torch {torch.__version__} has no FSDPModule.{PRIVATE_NAME}, which EDiT needs: "
                "find its new name (torch 2.11 to 2.13 have it)"
            )
        self.config = Config(**options)
        if self.config.tau < 1:
            raise ValueError(f"tau={self.config.tau}: a round has at least one step")
        self.layers = find_layers(model)
        shards = find_mesh(self.layers, replicas)
        self.shard_group, self.shards = shards.get_group(), shards.size()
        self.sync_group, self.replicas = replicas.get_group(), replicas.size()
        self.replica = replicas.get_local_rank()
        self.steps = 0
        self.local_steps = 0  # of this round
        self.rounds = 0
        self.averages_gradients = True  # until the warm-up ends
        self.started = False  # the start was checked
        self.turns = []  # of the first step in the warm-up: see check_turn()
        self.turn = 0  # the next one of them
        self.visited = []  # layers, as the first forward came to them
        self.order = None  # in which means travel: see agree_on_order()
        self.to_start = deque()  # layers
        self.in_flight = deque()  # (layer, dbar, handle), at most two
        x = self.layers[0].anchor
        self.statistics = x.new_zeros(3, len(self.layers))
        self.not_finite = x.new_zeros(self.replicas)  # syncs in a row
        self.report = None
        for layer in self.layers:
            for module in layer.modules:
                self.register(module, layer)

    def register(self, module, layer):
        def before_forward(*args):
            self.before_forward(layer)

        def average_gradient(gradient):
            self.average_gradient(layer, gradient)

        # FSDP2 put its own hook first. A later one with prepend=True runs before it.
        module.register_forward_pre_hook(torch.compiler.disable(before_forward), prepend=True)
        module.set_all_reduce_hook(average_gradient)

    # ---- the training loop calls these ----

    def step(self):
        """After each step of the inner optimizer."""
        self.drain()  # layers that the forward did not come to
        if self.averages_gradients:
            self.check_turn(len(self.layers))
        if self.order is None:
            self.agree_on_order()
        self.steps += 1
        if not self.averages_gradients:
            self.local_steps += 1
            if self.local_steps == self.config.tau:
                self.sync()

    def finish(self):
        """The training is over: a last, shorter round. Then all replicas are equal."""
        self.drain()
        if self.local_steps:
            self.sync()
            self.drain()

    def drain(self):
        """Complete a sync now, as before an export. The run's result is the same."""
        while self.in_flight:
            self.finish_layer()
            self.start_next()

    def take_report(self) -> dict | None:
        """What the last sync did, once, when it is complete; for a logger. Tensors are on the
        device: norms, flagged, weights (M, L); clips (L,)."""
        if self.in_flight:
            return None
        report = self.report
        self.report = None
        return report

    # ---- FSDP2 calls these ----

    def before_forward(self, layer):
        """FSDP2 is about to gather this layer."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph would leave out the hooks of EDiT: train without one")
        if torch.is_grad_enabled():
            self.before_step()
        if self.order is None and layer not in self.visited:
            self.visited.append(layer)
        self.complete(layer)

    def average_gradient(self, layer, gradient):
        """After each reduce-scatter, on the stream for all-reduces."""
        if self.averages_gradients:
            self.check_turn(layer.index)
            # [sync] all-reduce, P/N, once per layer and backward, in the warm-up
            dist.all_reduce(gradient.div_(self.replicas), group=self.sync_group)
            if gradient.is_cuda:  # FSDP2 may free it early, if reduce_dtype is not float32
                gradient.record_stream(torch.cuda.current_stream())

    # ---- start ----

    @torch.no_grad()
    def before_step(self):
        if not self.started:
            self.started = True
            self.check_start()
        if self.averages_gradients and self.steps >= self.config.warmup_steps:
            self.averages_gradients = False
            self.begin()

    def begin(self):
        """The warm-up is over. Only now, in a forward, are the parameters what training starts
        from: a model may have been loaded after EDiT was made."""
        for layer in self.layers:
            layer.anchor.copy_(layer.flat())

    def check_start(self):
        """Raise ValueError on all ranks if replicas start from different parameters. It compares
        sums, roughly, because processors may round differently."""
        rows = []
        for layer in self.layers:
            x = layer.flat()
            rows.append(torch.stack([x.sum(), x.norm()]))
        # [sync] all-gather, 2 L scalars, once
        rows = self.gather(torch.stack(rows), self.sync_group, self.replicas)  # (M, L, 2)
        sums, norms = rows.unbind(dim=2)
        differs = ((sums - sums[0]).abs() > 1e-3 * norms[0]).any(dim=1)  # (M,)
        # [shard] all-gather, M scalars, once
        differs = self.gather(differs.to(sums.dtype), self.shard_group, self.shards).sum(dim=0)
        if differs.any():
            raise ValueError(
                f"replica {differs.nonzero()[0].item()} starts from other parameters than replica "
                "0: seed the random numbers, the same on all ranks, or load the same model"
            )

    def check_turn(self, turn):
        """Raise RuntimeError where the warm-up would add up gradients of different layers. turn:
        the layer whose gradient is averaged next, by number, or L: the step ends. In the first step
        replicas compare their turns. The later ones must repeat it, which a rank knows by itself.
        There it raises alone, and the others end by their group's timeout."""
        end = len(self.layers)
        if self.order is None:
            own = torch.tensor([turn], device=self.not_finite.device)
            # [sync] all-gather, 1 number, once per layer, in the first step
            rows = self.gather(own, self.sync_group, self.replicas).flatten().tolist()
            self.turns.append(turn)
            expected = rows[0]
            replica = next((i for i, row in enumerate(rows) if row != expected), 0)
            turn = rows[replica]
        else:
            replica = self.replica
            expected = self.turns[self.turn]
            if expected == end and turn == self.turns[0]:  # it accumulates more micro-steps
                expected = turn
                self.turn = 0
            self.turn = (self.turn + 1) % len(self.turns)
        if turn != expected:
            names = [layer.name for layer in self.layers] + ["the end of the step"]
            raise RuntimeError(
                f"replica {replica}, step {self.steps + 1}: the backward came to {names[turn]}, "
                f"not to {names[expected]}: in the warm-up all replicas must run the same layers "
                "in the same order in every step"
            )

    def agree_on_order(self):
        """Means travel in the order in which replica 0's first forward came to the layers. If all
        replicas did not keep to one order, they would add up different layers."""
        left_out = [layer for layer in self.layers if layer not in self.visited]
        own = self.statistics.new_tensor([layer.index for layer in self.visited + left_out])
        # [sync] all-gather, L numbers, once
        rows = self.gather(own, self.sync_group, self.replicas)
        self.order = [self.layers[int(l)] for l in rows[0]]

    # ---- a sync ----

    @torch.no_grad()
    def sync(self):
        """The end of the round: norms, weights, and the start of the first two all-reduces. The
        next forward ends what begins here."""
        self.check_finite()
        self.rounds += 1
        self.local_steps = 0
        G = self.norms(layer.difference() for layer in self.layers)  # (L,)
        flagged = is_anomaly(G, anomaly_limits(self.statistics, self.config))
        self.statistics = update_statistics(self.statistics, G, ~flagged, self.config)
        row = torch.stack([G, flagged.to(G.dtype)])
        # [sync] all-gather, 2 L scalars, once per round
        rows = self.gather(row, self.sync_group, self.replicas)  # (M, 2, L)
        norms = rows[:, 0]  # (M, L)
        flagged = rows[:, 1] > 0  # back from numbers to bools
        lost = flagged.all(dim=0)
        self.statistics = forget_lost_layers(self.statistics, G, lost)
        self.weights = replica_weights(norms, flagged, self.config.weighted_averaging)
        self.moves = (~lost).to(G.dtype)
        self.not_finite = (self.not_finite + 1) * (~norms.isfinite()).any(dim=1)
        self.report = {
            "round": self.rounds,
            "step": self.steps,
            "norms": norms,
            "flagged": flagged,
            "weights": self.weights,
            "clips": torch.ones_like(G),
            "sent_bytes": self.sent_bytes(),
        }
        for layer in self.layers:
            layer.pending = True
        self.to_start = deque(self.order)
        self.start_next()
        self.start_next()

    def check_finite(self):
        """Stop if a replica is lost for good. A flagged replica restarts from the anchor. If it is
        not finite three times in a row, its optimizer's moments are not. This is the only host read
        of a sync; the number is a round old."""
        worst = self.not_finite.argmax().item()
        if self.not_finite[worst] >= 3:
            raise RuntimeError(
                f"replica {worst} was not finite in the last 3 syncs: call clip_gradient() before "
                "each optimizer step, or the moments stay NaN; else lower the learning rate"
            )

    def sent_bytes(self) -> float:
        """Over the slow links, by each rank, in a sync: 2 (M-1)/M of its shards, and the rows."""
        shards = sum(layer.anchor.nbytes for layer in self.layers)
        row = 2 * len(self.layers) * self.statistics.element_size()
        return 2 * (self.replicas - 1) / self.replicas * shards + (self.replicas - 1) * row

    def start_next(self):
        """Start dbar = sum_i w_i d_i of the next layer. Two are in flight at most: on NCCL a gather
        of FSDP2 may have to queue behind them."""
        if self.to_start:
            layer = self.to_start.popleft()
            d = layer.difference()
            # A flagged replica has w_i = 0, but 0 * NaN is NaN, so overwrite it with 0.
            d.mul_(self.weights[self.replica, layer.index]).nan_to_num_(0.0, 0.0, 0.0)
            # [sync] all-reduce, P/N, once per round and layer
            handle = dist.all_reduce(d, group=self.sync_group, async_op=True)
            self.in_flight.append((layer, d, handle))

    @torch.no_grad()
    def complete(self, layer):
        """The next forward calls it before it computes the layer: x becomes the new anchor. Layers
        that should have come before are completed, too, so that all replicas keep to one order."""
        while layer.pending:
            self.finish_layer()
            if not layer.pending:
                # This gather is queued behind the lines that have just written x. FSDP2's own would
                # use a stream that waits for them only once in a forward.
                layer.modules[0].unshard(async_op=True)
            self.start_next()

    @torch.no_grad()
    def finish_layer(self):
        """Wait for the first mean in flight and take the outer step of its layer."""
        layer, dbar, handle = self.in_flight.popleft()
        handle.wait()
        # FSDP2 may have gathered the layer already (an explicit prefetch, an evaluation), or be
        # about to. It would compute with old parameters. Nothing public tells, so finish such a
        # gather, and drop it.
        layer.modules[0].unshard()
        layer.modules[0].reshard()
        if not layer.is_sharded():
            raise RuntimeError(
                f"{layer.name} is still gathered, or its parameters are others than when EDiT was "
                "made: make EDiT last, after fully_shard() and after loading with assign=True"
            )
        clip = dbar.new_ones(())
        if self.config.pseudo_grad_clipping:
            clip = clip_factor(self.norms([dbar])[0], self.config.pseudo_grad_clip)
        self.report["clips"][layer.index] = clip
        dhat = dbar.mul_(clip)
        lr, mu = self.config.outer_lr, self.config.outer_momentum
        moves = self.moves[layer.index]
        nesterov_unless_flagged(layer.anchor, layer.momentum, dhat, lr, mu, moves)
        torch._foreach_copy_(layer.shards(), layer.cut(layer.anchor))
        layer.pending = False

    def norms(self, vectors) -> torch.Tensor:
        """Their norms over the whole replica. Ranks are added in one order: equal bits on all."""
        squares = torch.stack([v.norm() ** 2 for v in vectors])
        # [shard] all-gather, a scalar per vector
        return self.gather(squares, self.shard_group, self.shards).sum(dim=0).sqrt()

    def gather(self, row, group, size) -> torch.Tensor:
        rows = [torch.empty_like(row) for _ in range(size)]
        dist.all_gather(rows, row, group=group)
        return torch.stack(rows)

    # ---- checkpoints: torch.distributed.checkpoint (DCP) calls these ----

    def state_dict(self, replica=None) -> dict:
        """What replicas share has its own name. DCP saves it once, and reshards it. Of tensors that
        have one name but differ, DCP would save one replica's, so those carry the replica's number.
        Raises RuntimeError within a round. replica: by default this one."""
        self.drain()
        if self.local_steps:
            raise RuntimeError(
                f"replicas differ, {self.local_steps} steps after a sync: save at the end of a "
                "round, or after finish()"
            )
        state = {"anchor": {}, "momentum": {}}
        for layer in self.layers:
            state["anchor"] |= layer.as_dtensors(layer.anchor)
            state["momentum"] |= layer.as_dtensors(layer.momentum)
        for name in ("steps", "rounds", "averages_gradients"):
            state[name] = getattr(self, name)
        own = self.replica if replica is None else replica
        state[f"replica{own}"] = {"statistics": self.statistics}
        return state

    def load_state_dict(self, state: dict):
        for layer in self.layers:
            for name in ("anchor", "momentum"):
                own = [state[name][key].to_local() for key in layer.parameters]
                torch._foreach_copy_(layer.cut(getattr(layer, name)), own)
        for name in ("steps", "rounds", "averages_gradients"):
            setattr(self, name, state[name])
        (own,) = [name for name in state if name.startswith("replica")]
        self.statistics = state[own]["statistics"]


# ---- beside the method ----


@torch.no_grad()
def clip_gradient(parameters, max_norm=0.0) -> torch.Tensor:
    """Scale the gradient of a replica to a norm of at most max_norm (0: any). If its norm is not
    finite, set it to 0: a sync repairs parameters that are not finite, but nobody repairs the
    optimizer's moments. Returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).full_tensor()
    factor = norm.isfinite().to(norm.dtype)
    if max_norm:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).where(norm.isfinite(), 0.0)
    shards = [g.to_local() for g in gradients]
    torch._foreach_mul_(shards, factor)
    for g in shards:
        g.nan_to_num_(0.0, 0.0, 0.0)  # 0 * NaN is NaN
    return norm


def training_state(model, optimizer, edit, replica) -> dict:
    """The moments of the inner optimizer differ between replicas, too."""
    return {
        "edit": edit.state_dict(replica),
        "model": dcp_state.get_model_state_dict(model),
        f"replica{replica}": dcp_state.get_optimizer_state_dict(model, optimizer),
    }


def save(path, model, optimizer, edit):
    """All that a run needs to go on, at the end of a round. Every rank calls it."""
    dcp.save(training_state(model, optimizer, edit, edit.replica), checkpoint_id=path)


def load(path, model, optimizer, edit):
    """Also on other numbers of shards and replicas. If there are more replicas than were saved,
    replica i continues the moments and statistics of the saved replica i mod M."""
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    saved = {name.split(".")[0] for name in names if name.startswith("replica")}
    if not saved:
        raise ValueError(f"{path} is no checkpoint of save()")
    replica = edit.replica % len(saved)
    state = training_state(model, optimizer, edit, replica)
    dcp.load(state, checkpoint_id=path)
    dcp_state.set_model_state_dict(model, state["model"])
    dcp_state.set_optimizer_state_dict(model, optimizer, state[f"replica{replica}"])
    edit.load_state_dict(state["edit"])
