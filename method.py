"""What all methods share: the warm-up, rounds, and what a method may use and write. No equations.

    sync_warmup_steps steps with averaged gradients: all replicas stay equal
    begin()                                            # for example: anchor <- parameters
    repeat:
        tau inner steps (a round; the last one may be shorter, so that no step is lost)
        sync()                                         # in end_round()

A method is a subclass in a file of its own. It names the vectors and scalars that it keeps between
syncs, and writes begin() and sync(). A run is evaluated, saved and stopped at round ends only; in
the warm-up every step is a round end. In most methods all replicas are equal there.
"""

from types import SimpleNamespace

import torch

from mesh import Handle
from plumbing.config import LocalConfig
from quantize import MeanInFlight


class Method:
    Config = LocalConfig  # its flags: a dataclass
    shared = ()  # names of vectors, laid out like model.master, equal in all replicas after a sync
    private = ()  # names of vectors that differ between replicas
    scalars = ()  # names of a replica's numbers and small tensors, from begin() on
    barrier = True  # False: no collective at a round end waits for all replicas
    repairs_replicas = False  # does a sync replace parameters that are not finite?

    def __init__(self, model, mesh, config, record):
        """config: all flags of the run; record: plumbing.log.RoundRecord."""
        self.model, self.mesh, self.config, self.record = model, mesh, config, record
        self.steps = self.local_steps = self.rounds = 0  # local_steps: steps of this round
        self.averages_gradients = True  # until the warm-up ends
        self.lr = 0.0  # inner learning rate of the last step
        self.exchanged = None  # see exchange()
        for name in self.shared:
            setattr(self, name, model.new_vector(getattr(config, "offload", False)))
        for name in self.private:
            setattr(self, name, model.new_vector())

    # ---- what a method writes ----

    def begin(self):
        """The warm-up is over, or a run resumes after it. Makes the scalars."""

    def sync(self):
        """Make model.master the parameters that the next round starts from, now or (EDiT) layer by
        layer in the next forward. They must be equal in all replicas, but see
        evaluation_model(). The storage of model.grad is free from here to the next step."""
        raise NotImplementedError

    def after_backward(self):
        """model.grad holds this replica's mean gradient, not clipped, in the warm-up that of all
        replicas. A method may replace it."""

    def inner_step(self, optimizer, grad_scale):
        """The step of the inner optimizer: shard.AdamW, with the step's learning rate in .lr. The
        gradient must still be divided by grad_scale, if it is not None."""
        optimizer.step(grad_scale)

    def vote(self) -> float:
        """1.0 to end the round after this step. The vote travels with the step's metrics, and one
        vote in a replica is enough."""
        return 0.0

    def drain(self):
        """Wait for all traffic in flight. This does not change the run."""
        self.record.wait()

    def finish(self):
        """The training is over: complete what is in flight, and make model.master the model to
        keep, equal in all replicas."""
        self.drain()

    def evaluation_model(self) -> torch.Tensor:
        """The parameters to evaluate, laid out like model.master. A method whose replicas differ
        after a sync must write this."""
        return self.model.master

    # ---- what a method uses ----

    def exchange(self, **values):
        """All-gather one row per replica. self.exchanged.losses is then each replica's mean loss in
        the round, .steps its number of steps, and .NAME its value NAME: (M,), or (M, n) for a value
        of n elements. A value must be equal in the shard group. Without a barrier the rows arrive
        later and are for the record only."""
        loss = self.record.loss_sum / self.local_steps
        own = {"losses": loss, "steps": torch.full_like(loss, self.local_steps)} | values
        row = torch.cat([value.to(self.model.master.dtype).view(-1) for value in own.values()])
        if self.barrier:
            # [sync] all-gather, 2 scalars and the values per replica, once per round
            rows, self.record.gather = self.mesh.gather_rows(row, self.mesh.sync), Handle()
        else:  # On a GPU the host waits for its own row, that is for the end of the round.
            # [sync] all-gather of rows as above, once per round, on the host, not counted
            rows, self.record.gather = self.mesh.gather_in_background(row.cpu())
            rows = rows[:: self.mesh.shards]
        columns = rows.split([value.numel() for value in own.values()], dim=1)
        self.exchanged = SimpleNamespace(**{k: v.squeeze(1) for k, v in zip(own, columns)})

    def average(self, vector: torch.Tensor, format="none"):
        """vector, laid out like model.master, becomes its mean over the replicas; blocks. format:
        how it travels, see quantize.py."""
        if format == "none":
            views = self.model.views(vector.div_(self.mesh.replicas))
            # [sync] all-reduce, P/N fp32, once per call and layer
            for handle in [self.mesh.all_reduce(view, self.mesh.sync) for view in views]:
                handle.wait()
        else:
            views = self.model.used_views(vector)
            for view, mean in zip(views, MeanInFlight(views, format, self.mesh).wait()):
                view.copy_(mean)

    # ---- what train.py calls ----

    @property
    def progress(self) -> float:
        """Steps of the whole run: rules the learning rate, intervals and the end."""
        return self.steps

    def before_step(self):
        if self.averages_gradients and self.steps >= self.config.sync_warmup_steps:
            self.averages_gradients = False
            self.record.start_round()
            self.begin()

    def after_step(self, lr: float, metrics) -> bool:
        """Is the round over? lr: the schedule's learning rate of this inner step; metrics:
        shard.Metrics."""
        self.steps, self.lr = self.steps + 1, lr
        if self.averages_gradients:
            return False
        self.local_steps += 1
        self.record.loss_sum = self.record.loss_sum + metrics.loss
        # On a GPU the votes are known one step late.
        voted = self.local_steps > self.model.metrics_lag and self.model.known_metrics()[2] > 0
        k = self.steps - self.local_steps - self.config.sync_warmup_steps
        full = self.local_steps >= self.config.steps_of_round(lr, k)
        return voted or full or self.progress >= self.config.max_steps

    def end_round(self):
        self.rounds, self.exchanged = self.rounds + 1, None
        with self.record.stall():
            # AdamW's moments (--average_moments). Those of a diverged replica are finite, too.
            for name, format in self.config.averaged_moments():
                self.average(getattr(self.model, name), format)
            self.sync()
            if self.exchanged is None:
                self.exchange()
        self.local_steps = 0
        if not self.model.pre_layer_hook:  # EDiT's sync ends in the next forward
            self.record.done(self)
