"""What all methods share: the warm-up, rounds, and what a method may use and write. No equations.

    sync_warmup_steps steps with averaged gradients: all replicas stay equal
    begin()                                            # for example: anchor <- parameters
    repeat:
        tau inner steps (a round; the last one may be shorter, so that no step is lost)
        sync()                                         # in end_round()

A method is a subclass in a file of its own. It names the vectors and scalars that it keeps between
syncs, and writes begin() and sync(). A run is evaluated, saved and stopped only after a sync, or
after a step of the warm-up. In most methods all replicas are equal there, after drain().

Who calls what, in train.py:

    resume_with()          once, if the run continues a checkpoint from after the warm-up
    for each step:
        before_step()      the first time after the warm-up: begin()
        after_backward()
        vote()             in rounds; in the warm-up a signal to stop travels in its place
        inner_step()
        after_step()       true at the end of a round; then
        end_round()        measure() for the record; sync()
    evaluation_model()     and drain(), if an evaluation is due
    finish()               once, after the last step

Plain version: plain/method.py.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from config import Config, option


@dataclass
class RoundConfig(Config):
    """Flags of every method with rounds, whatever ends them."""

    sync_warmup_steps: int = option(200, "first steps with averaged gradients")


@dataclass
class LocalConfig(RoundConfig):
    """Flags of every method whose rounds have a number of steps."""

    tau: int = option(16, "inner steps per round", low=1)

    def describe_round(self, tokens_per_step: int) -> str:
        tokens = self.tau * tokens_per_step
        return f"{self.tau} steps x {tokens_per_step:,} tokens = {tokens:,} tokens"


class Method:
    Config = LocalConfig  # its flags: a dataclass
    vectors = ()  # names of what it keeps beside model.master, each laid out like that; zeros first
    scalars = ()  # names of a replica's numbers and small tensors, from begin() on
    barrier = True  # False: no collective at a round end waits for all replicas
    repairs_replicas = False  # does a sync replace parameters that are not finite?

    def __init__(self, model, mesh, config, record, clock):
        """config: all flags of the run; record: plumbing.log.RoundRecord; clock.train_s(): seconds
        of training."""
        self.model, self.mesh, self.config = model, mesh, config
        self.record, self.clock = record, clock
        self.steps = 0  # of the run
        self.local_steps = 0  # of this round
        self.rates = []  # inner learning rates of this round's steps
        self.rounds = 0
        self.averages_gradients = True  # until the warm-up ends
        self.rows = None  # see gather()
        for name in self.vectors:
            if name not in vars(self):  # with --offload EDiT has made it on the host
                setattr(self, name, torch.zeros_like(model.master))

    # ---- what a method writes ----

    def begin(self):
        """The warm-up is over: fill the vectors and make the scalars. A run that resumes after the
        warm-up takes both from its checkpoint instead."""

    def resume_with(self, changed: set):
        """The run continues a checkpoint from after the warm-up. changed: the given flags whose
        values differ from the checkpoint's; perhaps none. Called after the scalars have been set
        and before the vectors are filled."""

    def sync(self):
        """Make model.master the parameters that the next round starts from, now or (EDiT) layer by
        layer in the next forward. They must be equal in all replicas; else let evaluation_model()
        return some that are. The storage of model.grad is free from here to the next step.
        self.rounds counts this round, too: it is 1 in the first one."""
        raise NotImplementedError

    def after_backward(self):
        """model.grad holds the mean gradient of this replica, in the warm-up that of all replicas.
        It is not clipped yet. A method may change it."""

    def inner_step(self, optimizer):
        """The step of the inner optimizer (optimizer.py), with the learning rate in .lr."""
        optimizer.step()

    def steps_of_round(self) -> float:
        """How many inner steps this round has. It is asked after each of them."""
        return self.config.tau

    def vote(self) -> float:
        """1.0 if the round is to end after this step, else 0.0. The vote travels with the step's
        metrics. One vote in a replica is enough. The warm-up has no rounds, so there it is 0.0."""
        return 0.0

    def drain(self):
        """Complete all that is in flight. The run's result is the same."""

    def finish(self):
        """The training is over: complete what is in flight, and make model.master the model to
        keep, equal in all replicas."""
        self.drain()

    def evaluation_model(self) -> torch.Tensor:
        """The parameters to evaluate, laid out like model.master."""
        return self.model.master

    # ---- what a method uses ----

    def gather(self, **values):
        """Gather one row of numbers per replica. Returns them, also as self.rows: .losses (each
        replica's mean loss in the round), .steps (its inner steps) and .NAME have an entry per
        replica: (M,) for a scalar, (M, n) for a vector (n,). A value must be equal in the shard
        group. In a method without a barrier nobody waits for the others. Then the only entry is
        this replica's: (1,) or (1, n)."""
        loss = self.record.loss_sum / self.local_steps
        own = {"losses": loss, "steps": torch.full_like(loss, self.local_steps), **values}
        row = torch.cat([value.to(self.model.master.dtype).view(-1) for value in own.values()])
        rows = row[None]
        if self.barrier:
            # [sync] all-gather, 2 scalars and the values per replica, once per round
            rows = self.mesh.gather_rows(row, self.mesh.sync_group)
        columns = rows.split([value.numel() for value in own.values()], dim=1)
        self.rows = SimpleNamespace()
        for (name, value), column in zip(own.items(), columns):
            setattr(self.rows, name, column if value.dim() else column.squeeze(1))
        return self.rows

    def measure(self):
        """Gather every replica's loss, steps and distance from its anchor, if it has one.
        The storage of model.grad is free at a round's end."""
        norms = {}
        if "anchor" in self.vectors:
            d = torch.sub(self.anchor, self.model.master, out=self.model.grad)
            norms["norms"] = self.model.norm(d)
        self.gather(**norms)

    def average(self, vector: torch.Tensor):
        """vector, laid out like model.master, becomes its mean over the replicas; blocks. One
        all-reduce per layer, so that its buffers are no larger than a layer."""
        vector.div_(self.mesh.replicas)
        # [sync] all-reduce, P/N fp32, once per call and layer
        handles = [self.mesh.all_reduce(v, self.mesh.sync_group) for v in self.model.views(vector)]
        for handle in handles:
            handle.wait()

    # ---- what train.py calls ----

    @property
    def progress(self) -> float:
        """How far the run is: it decides the learning rate, intervals and the end. In A-EDiT
        replicas take unequal numbers of steps, and this is their mean."""
        return self.steps

    def before_step(self):
        if self.averages_gradients and self.steps >= self.config.sync_warmup_steps:
            self.averages_gradients = False
            self.record.start_round()
            self.begin()

    def after_step(self, lr: float, metrics) -> bool:
        """Is the round over? lr: the schedule's learning rate of this inner step; metrics:
        shard.Metrics."""
        self.steps += 1
        if self.averages_gradients:
            return False
        self.local_steps += 1
        self.rates.append(lr)
        self.record.loss_sum = self.record.loss_sum + metrics.loss
        voted = False
        # On a GPU the votes are known one step late. So those that are known in the first step of a
        # round belong to the round before.
        if self.local_steps > self.model.metrics_lag:
            _, _, votes = self.model.known_metrics()
            voted = votes > 0
        full = self.local_steps >= self.steps_of_round()
        return voted or full or self.progress >= self.config.max_steps

    def end_round(self):
        self.rounds += 1
        with self.record.stall():
            self.measure()
            self.sync()
        self.local_steps = 0
        self.rates = []
        if not self.model.pre_layer_hook:  # EDiT's sync ends in the next forward
            self.record.done(self)
