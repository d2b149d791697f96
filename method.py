"""What all methods share: warm-up, rounds, counters, and the record of a sync. No equations.

    sync_warmup_steps steps with averaged gradients: all replicas stay equal
    begin()                                            # for example: anchor <- parameters
    repeat:
        tau inner steps (a round)
        rows = local_stats() of all replicas           # with their losses and step counts
        sync(rows)                                     # in after_step() of the round's last step

A method is a subclass in a file of its own. It names the vectors that it keeps between syncs and
writes begin(), local_stats() and sync(). A sync may stay in flight: EDiT's completes layer by layer
during the next forward, or in drain(). A-EDiT decides in sync_due() when a round ends.

Replicas are equal at round ends only (in the warm-up after every step), so a run is evaluated,
saved and stopped there and nowhere else.
"""

import time
from contextlib import contextmanager

import torch

from plumbing.config import LocalConfig


class Stall:
    """Time that the device spends in `with stall:` blocks. On CUDA the host only queues work, so
    events in the stream take the time."""

    def __init__(self, device: torch.device):
        self.cuda, self.times = device.type == "cuda", []

    def __enter__(self, *_):
        now = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        self.times.append(now)

    __exit__ = __enter__

    def ms(self) -> float:
        """The sum. Waits for the device."""
        spans = zip(self.times[::2], self.times[1::2])
        if not self.cuda:
            return sum(1e3 * (end - began) for began, end in spans)
        torch.cuda.synchronize()
        return sum(began.elapsed_time(end) for began, end in spans)


class Method:
    Config = LocalConfig  # its flags: a dataclass
    shared = ()  # names of vectors, laid out like model.master, equal in all replicas after a sync
    private = ()  # names of vectors that differ between replicas
    repairs_replicas = False  # does a sync replace parameters that are not finite?
    lockstep = True  # do all replicas take the same number of steps?

    def __init__(self, model, mesh, config, max_steps: int):
        self.model, self.mesh, self.config, self.max_steps = model, mesh, config, max_steps
        self.clock = time.perf_counter  # seconds of training, only differences count
        self.steps = self.local_steps = self.rounds = 0  # inner steps in all, since a sync; syncs
        self.local = False  # has the warm-up ended?
        self.in_flight = False  # has sync() left work for drain()?
        self.loss_sum, self.last_sync = 0.0, None  # of the round; see stats()
        offload = getattr(config, "offload", False)
        for name in self.shared + self.private:
            setattr(self, name, model.new_vector(offload))

    # ---- what a method writes ----

    def begin(self):
        """The warm-up is over, or a run resumes after it."""

    def local_stats(self) -> torch.Tensor:
        """A few scalars, equal in the shard group, (n,)."""
        return self.model.master.new_empty(0)

    def sync(self, rows: torch.Tensor):
        """Make model.master the parameters that the next round starts from. rows: local_stats() of
        every replica, (M, n). Set in_flight to complete it later, and then call end_sync()."""
        raise NotImplementedError

    def sync_due(self) -> bool:
        over = self.local_steps >= self.config.tau or self.steps >= self.max_steps
        return over or self.sync_voted()

    def drain(self):
        """Complete a sync that is in flight."""

    @contextmanager
    def judged(self):
        """Inside this context model.master is the model to evaluate, save and export."""
        self.drain()
        yield

    def vote(self) -> float:
        """1.0 to end the round after this step; the vote travels with the step's metrics."""
        return 0.0

    def sync_stats(self, rows) -> dict:
        """The fields about replicas in the record's `sync` row: lists, scalars or tensors."""
        M = self.mesh.replicas
        return {"pseudo_grad_norm": None, "weight": [1 / M] * M, "dropped": [0] * M, "clip": 1.0}

    # ---- what train.py calls ----

    @property
    def averages_gradients(self) -> bool:
        return not self.local

    @property
    def progress(self) -> float:
        """Steps of the whole run: rules the learning rate, intervals and the end."""
        return self.steps

    @property
    def round_ended(self) -> bool:
        return self.local_steps == 0

    def before_step(self):
        if not self.local and self.steps >= self.config.sync_warmup_steps:
            self.local = True
            self.begin()

    def after_step(self):
        self.steps += 1
        if self.local:
            self.local_steps += 1
            self.loss_sum = self.loss_sum + self.model.metrics[-1].loss
            if self.sync_due():
                self.end_round()

    def sync_voted(self) -> bool:
        """Has a rank of this replica voted in this round? The same on all its ranks."""
        known = self.local_steps > self.model.metrics_lag  # the metrics are of this round
        return known and self.model.known_metrics()[2] > 0

    def end_round(self):
        self.drain()
        self.stall, self.waited_before = Stall(self.mesh.device), dict(self.mesh.waited_s)
        self.sent_before, self.round_steps = self.mesh.sent["sync"], self.local_steps
        with self.stall:
            stats, loss = self.local_stats(), self.loss_sum / self.local_steps
            own = torch.stack([loss, torch.full_like(loss, self.local_steps)]).to(stats.dtype)
            # [sync] all-gather, 2 scalars and local_stats() per replica, once per round
            self.rows = self.mesh.gather_rows(torch.cat([own, stats]), self.mesh.sync)
            self.local_steps, self.loss_sum, self.rounds = 0, 0.0, self.rounds + 1
            self.sync(self.rows[:, 2:])
        if not self.in_flight:
            self.end_sync()

    def end_sync(self):
        """Keep what stats() returns. Reads nothing from the device."""
        self.in_flight = False
        row = {"round": self.rounds, "step": self.steps, "tau": self.round_steps}
        row |= {"steps": self.rows[:, 1].int(), "loss": self.rows[:, 0]}
        row |= self.sync_stats(self.rows[:, 2:]) | {"stall_ms": self.stall}
        for cause, seconds in self.mesh.waited_s.items():
            row[f"wait_{cause}_ms"] = 1e3 * (seconds - self.waited_before[cause])
        self.last_sync = row | {"sync_bytes": self.mesh.sent["sync"] - self.sent_before}

    def stats(self) -> dict | None:
        """The record's `sync` row (plumbing/log.py) of a sync completed since the last call, else
        None. Reads the device."""
        row, self.last_sync = self.last_sync, None
        if row is None:
            return None
        row["stall_ms"] = row["stall_ms"].ms()
        return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in row.items()}

    def align_steps(self):
        """After a round that a stop ended early in some replicas: all count the largest number of
        steps, so that they go on with the same batch. Reads the device."""
        if self.lockstep and self.local:
            self.steps += int(self.rows[:, 1].max()) - self.round_steps

    def finish(self):
        """The training is over: complete what is in flight."""
        self.drain()

    # ---- checkpoints: the state of a replica beside the vectors, at a round end ----

    def state_dict(self) -> dict:
        return {"steps": self.steps, "rounds": self.rounds, "local": self.local}

    def load_state_dict(self, state: dict):
        """The vectors are loaded after it."""
        self.steps, self.rounds, self.local = state["steps"], state["rounds"], state["local"]
        if self.local:
            self.begin()
