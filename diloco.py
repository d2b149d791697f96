"""DiLoCo: tau local steps, then one blocking outer step on the average of what the replicas did.

The problem. Averaging gradients sends the whole model over the slow links in every step. DiLoCo
lets each replica train alone for tau steps and exchanges once: 1/tau of the traffic.

    warm-up: sync_warmup_steps steps of mini-batch, so that all replicas are equal; then
    anchor = x
    repeat:
        tau inner steps: x_i <- AdamW(x_i)                       # no traffic between replicas
        d_i     = anchor - x_i                                   # pseudo-gradient, points uphill
        d       = 1/M sum_i d_i                                  # [sync] all-reduce, P/N fp32
        anchor <- Nesterov(anchor, d):  b <- mu b + d
                                        anchor <- anchor - lr (d + mu b)
        x_i    <- anchor

    symbol     variable        shape        where
    x_i        model.master    (sum P/N,)   every rank its shard
    a          anchor          (sum P/N,)   equal on all ranks of a sync group
    d_i, d     model.master    (sum P/N,)   in the storage of x_i, which is about to be overwritten
    b          momentum buffer (sum P/N,)   inside torch.optim.SGD

The inner AdamW's moments stay with their replica, across rounds, and are never averaged. Weight
decay and gradient clipping belong to the inner step. With --outer_lr 1 --outer_momentum 0 this is
Post Local SGD: x_i <- mean_j x_j.

Deviations from the paper: (1) the warm-up is mini-batch, as in Post Local SGD and EDiT; the paper
starts from a model that was pretrained on one worker. (2) A training that does not end on a
multiple of tau ends with one shorter round, so that no step is lost.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 P/N, and 4 (M-1) for the norms in the log.
Run: torchrun --nproc_per_node 4 train.py --method diloco --shards 2
Source: DiLoCo, arXiv 2311.08105 (algorithm 1); Post Local SGD, arXiv 1808.07217.
"""

from dataclasses import dataclass

import torch

from flags import option
from mesh import Stall


@dataclass
class Config:
    sync_warmup_steps: int = option(200, "first steps with averaged gradients")
    tau: int = option(16, "inner steps per round (the paper's H = 500)", low=1)
    outer_lr: float = option(0.7, "outer learning rate")
    outer_momentum: float = option(0.9, "outer Nesterov momentum", below=1)
    offload: bool = option(False, "keep anchor and momentum in the host's memory (on a GPU)")

    @property
    def n_outer_vectors(self) -> int:
        return 2 if self.outer_momentum > 0 else 1


class DiLoCo:
    lockstep = True  # all replicas take the same number of steps
    mends_replicas = False  # a sick one spoils the mean

    def __init__(self, model, mesh, config: Config, max_steps: int, clock):
        self.model, self.mesh, self.config, self.max_steps = model, mesh, config, max_steps
        self.anchor = model.outer_vector(config.offload)
        nesterov = config.outer_momentum > 0  # torch refuses nesterov without momentum
        self.outer = torch.optim.SGD(
            [self.anchor], lr=config.outer_lr, momentum=config.outer_momentum, nesterov=nesterov,
            fused=True,
        )  # fmt: skip
        self.outer_vectors = {"anchor": self.anchor}
        if nesterov:  # there from the start, as a checkpoint has to know where it is
            self.outer_vectors["momentum"] = model.outer_vector(config.offload)
            self.outer.state[self.anchor]["momentum_buffer"] = self.outer_vectors["momentum"]
        self.steps = self.local_steps = self.round = 0  # inner steps in all, since a sync; syncs
        self.last_sync = None  # what stats() will say of it

    @property
    def in_sync(self) -> bool:
        return self.local_steps == 0

    @property
    def replicas_differ(self) -> bool:
        """Has the local phase begun? Until then replicas
        are equal, and anchor and momentum unused."""
        return self.steps > self.config.sync_warmup_steps

    def averages_gradients(self, step: int) -> bool:
        return step < self.config.sync_warmup_steps

    def before_step(self, step: int):
        if step == self.config.sync_warmup_steps:
            self.anchor.copy_(self.model.master)

    def after_step(self, step: int):
        self.steps = step + 1
        if step >= self.config.sync_warmup_steps:
            self.local_steps += 1
        if self.local_steps == self.config.tau:
            self.sync()

    def position(self, step: int) -> float:
        return step

    def common_position(self, step: int):
        return step

    def finished(self, step: int) -> bool:
        return step >= self.max_steps

    def finish(self):
        if self.local_steps:
            self.sync()

    def sync(self):
        self.end_round(self.outer_step)

    def end_round(self, outer_step):
        sent, waited = self.mesh.sent["sync"], dict(self.mesh.waited_s)
        stall = Stall(self.mesh.device)
        with stall:
            norms = outer_step(self.model.master)
        self.model.forget_gathered()
        self.round += 1
        self.last_sync = {"round": self.round, "step": self.steps, "tau": self.local_steps}
        self.last_sync["sync_bytes"] = self.mesh.sent["sync"] - sent
        for what, seconds in self.mesh.waited_s.items():
            self.last_sync[f"wait_{what}_ms"] = 1e3 * (seconds - waited[what])
        self.norms, self.stall, self.local_steps = norms, stall, 0

    def outer_step(self, x):
        """x (sum P/N,), this replica's parameters, becomes the new anchor.
        Returns ||d_i||, (M,)."""
        d = self.subtract_from_anchor(x)
        norms = self.exchange_norms(d)
        # d = 1/M sum_i d_i
        d.div_(self.mesh.replicas)
        # [sync] all-reduce, sum P/N fp32, once per round
        self.mesh.all_reduce(d, self.mesh.sync).wait()
        self.nesterov(d)
        x.copy_(self.anchor)
        return norms

    def subtract_from_anchor(self, x):
        # d_i = a - x_i, in the place of x_i
        for a, x_l in zip(self.model.views(self.anchor), self.model.views(x)):
            torch.sub(a.to(x.device, non_blocking=True), x_l, out=x_l)
        return x

    def nesterov(self, d):
        # b <- mu b + d;  a <- a - lr (d + mu b), where a and b are (with --offload, on the host)
        self.anchor.grad = d.to(self.anchor.device)
        self.outer.step()
        self.anchor.grad = None

    def exchange_norms(self, d):
        """||d_i|| of every replica, (M,): for the log only."""
        square = d.norm().square().view(1)
        # [shard] all-reduce, 1 scalar, once per round
        self.mesh.all_reduce(square, self.mesh.shard).wait()
        # [sync] all-gather, M scalars, once per round
        return self.mesh.gather_rows(square.sqrt(), self.mesh.sync)[:, 0]

    def stats(self) -> dict | None:
        """What the record's `sync` row says of a sync since
        the last call, else None. Reads the device."""
        if self.last_sync is None:
            return None
        row, self.last_sync = self.last_sync, None
        M = len(self.norms)
        return row | {
            "pseudo_grad_norm": self.norms.tolist(),
            "weight": [1 / M] * M,
            "dropped": [0] * M,
            "clip": 1.0,
            "stall_ms": self.stall.ms(),
            "steps": [row["tau"]] * M,
        }

    # ---- checkpoints ----

    def sync_saved(self, replicas: int, load):
        """End the round that `replicas` saved replicas had begun, on ranks that are now another
        number: the same outer step, with the replicas one after the other. load(i) brings replica
        i's parameters into model.master. Leaves all ranks in sync, with the new anchor in
        model.master."""

        def outer_step(x):
            mean, squares = torch.zeros_like(x), []
            for i in range(replicas):
                load(i)
                d = self.subtract_from_anchor(x)
                squares.append(d.norm().square())
                mean.add_(d.div_(replicas))
            squares = torch.stack(squares)
            # [shard] all-reduce, M scalars, once
            self.mesh.all_reduce(squares, self.mesh.shard).wait()
            self.nesterov(mean)
            x.copy_(self.anchor)
            return squares.sqrt()

        self.end_round(outer_step)

    def state_dict(self) -> dict:
        """What a replica has of its own beside the vectors, in plain numbers."""
        return {"steps": self.steps, "round": self.round, "local_steps": self.local_steps}

    def load_state_dict(self, state: dict):
        self.steps, self.round = state["steps"], state["round"]
        self.local_steps = state["local_steps"]
