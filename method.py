"""What all methods share: warm-up, rounds, counters, and the record of a sync. No equations.

    sync_warmup_steps steps with averaged gradients: all replicas stay equal
    begin()                                            # for example: anchor <- parameters
    repeat:
        tau inner steps (a round; the last one may be shorter, so that no step is lost)
        rows = local_stats() of all replicas           # with their losses and step counts
        average AdamW's moments over the replicas      # only with --average_moments
        sync(rows)                                     # in after_step() of the round's last step

A method is a subclass in a file of its own. It names the vectors and counters that it keeps between
syncs and writes begin(), local_stats() and sync(). A sync may stay in flight: EDiT's completes
layer by layer during the next forward, CO2's a round later. drain() waits for it. A-EDiT decides in
sync_due() when a round ends; Streaming DiLoCo also communicates within a round, in
after_inner_step().

A run is evaluated, saved and stopped at round ends (in the warm-up after every step) and nowhere
else. In most methods replicas are equal there; where they are not, consensus() is the model that is
evaluated.
"""

import time
from collections import deque
from contextlib import contextmanager

import torch

from mesh import Handle
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
        for event in self.times[-1:]:  # not the whole device: traffic may be in flight
            event.synchronize()
        return sum(began.elapsed_time(end) for began, end in spans)


class Method:
    Config = LocalConfig  # its flags: a dataclass
    shared = ()  # names of vectors, laid out like model.master, equal in all replicas after a sync
    private = ()  # names of vectors that differ between replicas
    counters = ()  # names of this replica's numbers and small tensors, which begin() makes
    equal_replicas = True  # are the parameters equal in all replicas after a sync?
    overlaps = False  # True: replicas do not all wait for each other at a round end
    # Resumed with another number of replicas, does each start from the mean of the saved replicas?
    mean_on_resume = False
    repairs_replicas = False  # does a sync replace parameters that are not finite?
    lockstep = True  # do all replicas take the same number of steps?

    def __init__(self, model, mesh, config, max_steps: int, seed: int = 0):
        self.model, self.mesh, self.config, self.max_steps = model, mesh, config, max_steps
        self.seed = seed  # of the run
        self.clock = time.perf_counter  # seconds of training, only differences count
        self.steps = self.local_steps = self.rounds = 0  # inner steps in all, since a sync; syncs
        self.local = False  # has the warm-up ended?
        self.in_flight = False  # True: the sync is not complete; the method calls end_sync() then
        self.loss_sum = 0.0  # of the round
        # Pairs (row, gather) of syncs that stats() has not returned yet. Only rank 0 calls stats();
        # the other ranks keep the last pair, for drain().
        self.unread = deque(maxlen=None if mesh.rank == 0 else 1)
        self.lr = 0.0  # inner learning rate of the last step
        self.spread = None  # distance between replicas at the last evaluation, if they differ
        offload = getattr(config, "offload", False)
        for name in self.shared + self.private:
            setattr(self, name, model.new_vector(offload))

    # ---- what a method writes ----

    @classmethod
    def check(cls, config, method_config, replicas: int):
        """Raise UserError if the flags do not fit together. config: plumbing.config.Config."""

    @classmethod
    def held_vectors(cls, method_config) -> float:
        """How many vectors like model.master it holds, buffers included."""
        return len(cls.shared + cls.private)

    @classmethod
    def sent_vectors(cls, method_config, replicas: int) -> float:
        """What a rank sends to other replicas per round, in vectors like model.master."""
        return 2 * (replicas - 1) / replicas

    def begin(self):
        """The warm-up is over, or a run resumes after it. Makes the counters."""

    def local_stats(self) -> torch.Tensor:
        """A few scalars, equal in the shard group, (n,)."""
        return self.model.master.new_empty(0)

    def sync(self, rows: torch.Tensor):
        """Make model.master the parameters that the next round starts from. rows: local_stats() of
        every replica, (M, n). Set in_flight to complete it later, and then call end_sync()."""
        raise NotImplementedError

    def after_inner_step(self):
        """After every local step, before the round may end."""

    def sync_due(self) -> bool:
        """Rounds of an overlapping method never end early, because its replicas reach a round end
        at different times."""
        over = self.local_steps >= self.config.tau or self.steps >= self.max_steps
        return over or not self.overlaps and self.sync_voted()

    def drain(self):
        """Wait for all traffic in flight. This does not change the run."""
        for _, gather in self.unread:
            gather.wait()

    def consensus(self) -> torch.Tensor:
        """The one model to evaluate and export, laid out like model.master. Called only if replicas
        differ (not equal_replicas). It may overwrite model.master."""
        raise NotImplementedError

    def vote(self) -> float:
        """1.0 to end the round after this step; the vote travels with the step's metrics."""
        return 0.0

    def sync_stats(self, rows) -> dict:
        """The fields about replicas in the record's `sync` row: lists, scalars or tensors. rows:
        see sync(); their first column, if there is one, is the norm of the pseudo-gradient."""
        M, norm = self.mesh.replicas, rows[:, 0] if rows.shape[1] else None
        return {"pseudo_grad_norm": norm, "weight": [1 / M] * M, "dropped": [0] * M, "clip": 1.0}

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
            self.start_local_steps()

    def start_local_steps(self):
        self.local = True
        self.start_row()
        self.begin()

    def start_row(self):
        """From here on, stalls, waits and bytes count for the next row of stats()."""
        self.stall, self.waited_before = Stall(self.mesh.device), dict(self.mesh.waited_s)
        self.sent_before = self.mesh.sent["sync"]

    def after_step(self, lr: float):
        """lr: the learning rate of this inner step."""
        self.steps, self.lr = self.steps + 1, lr
        if self.local:
            self.local_steps += 1
            self.loss_sum = self.loss_sum + self.model.metrics[-1].loss
            self.after_inner_step()
            if self.sync_due():
                self.end_round()

    def sync_voted(self) -> bool:
        """Has a rank of this replica voted in this round? The same on all its ranks."""
        known = self.local_steps > self.model.metrics_lag  # the metrics are of this round
        return known and self.model.known_metrics()[2] > 0

    def end_round(self):
        self.round_steps = self.local_steps
        with self.stall:
            stats, loss = self.local_stats(), self.loss_sum / self.local_steps
            own = torch.stack([loss, torch.full_like(loss, self.local_steps)]).to(stats.dtype)
            self.rows, self.gather = self.gather_rows(torch.cat([own, stats]))
            self.local_steps, self.loss_sum, self.rounds = 0, 0.0, self.rounds + 1
            if self.config.average_moments:
                # Together 2 * 2 (M-1)/M * 4 P/N bytes per rank and round on the slow links. The
                # moments of a diverged replica are finite, too (see clip_gradient).
                self.average(self.model.exp_avg)
                self.average(self.model.exp_avg_sq)
            self.sync(self.rows[:, 2:])
        if not self.in_flight:
            self.end_sync()

    def gather_rows(self, row) -> tuple:
        """(rows of all replicas, (M, 2 + n): loss, steps, local_stats(); the gather of them). If
        the method overlaps, the rows arrive later, for the record only; on a GPU the host waits
        for its own row, that is for the end of the round."""
        if self.overlaps:
            # [sync] all-gather of rows as below, once per round, on the host, not counted
            rows, gather = self.mesh.gather_in_background(row.cpu())
            return rows[:: self.mesh.shards], gather
        # [sync] all-gather, 2 scalars and local_stats() per replica, once per round
        return self.mesh.gather_rows(row, self.mesh.sync), Handle()

    def end_sync(self):
        """Keep what stats() returns. Reads nothing from the device."""
        self.in_flight = False
        row = {"round": self.rounds, "step": self.steps, "tau": self.round_steps}
        row |= {"steps": self.rows[:, 1], "loss": self.rows[:, 0]}
        row |= self.sync_stats(self.rows[:, 2:]) | {"stall_ms": self.stall}
        for cause, seconds in self.mesh.waited_s.items():
            row[f"wait_{cause}_ms"] = 1e3 * (seconds - self.waited_before[cause])
        row["sync_bytes"] = self.mesh.sent["sync"] - self.sent_before
        self.unread.append((row, self.gather))
        self.start_row()

    def stats(self) -> dict | None:
        """The record's `sync` row (plumbing/log.py) of the next completed sync, None if there is
        none. Reads the device."""
        if not self.unread or not self.unread[0][1].is_completed():
            return None
        row, gather = self.unread.popleft()
        gather.wait()  # raises an error if another rank was lost
        row = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in row.items()}
        row["steps"] = [int(steps) for steps in row["steps"]]
        return row | {"stall_ms": row["stall_ms"].ms()}

    def average(self, vector: torch.Tensor):
        """vector, laid out like model.master, becomes its mean over the replicas; blocks."""
        vector.div_(self.mesh.replicas)
        # [sync] all-reduce, P/N fp32, once per call and layer
        handles = [self.mesh.all_reduce(v, self.mesh.sync) for v in self.model.views(vector)]
        for handle in handles:
            handle.wait()

    def norm(self, vector: torch.Tensor) -> torch.Tensor:
        """||vector|| over the whole replica, of a vector laid out like model.master; 0-dim. The
        squares are added in rank order, so replicas with equal vectors get bit-identical norms."""
        square = vector.norm().square().view(1)
        # [shard] all-gather, 1 scalar, when a method calls it
        return self.mesh.gather_rows(square, self.mesh.shard).sum().sqrt()

    def align_steps(self):
        """After a round that a stop ended early in some replicas: all count the largest number of
        steps, so that they go on with the same batch. Reads the device."""
        if self.lockstep and self.local and not self.overlaps:
            self.steps += int(self.rows[:, 1].max()) - self.round_steps

    def finish(self):
        """The training is over: complete what is in flight."""
        self.drain()

    @contextmanager
    def judged(self):
        """Inside this context model.master is the model to evaluate and export. Nothing is in
        flight before it, and afterwards everything is as it was."""
        x, own = self.model.master, None
        if self.local and not self.equal_replicas:
            own = x.clone()
            x.copy_(self.consensus())
        yield
        if own is not None:
            x.copy_(own)

    # ---- checkpoints: the state of a replica beside the vectors, at a round end ----

    def state_dict(self) -> dict:
        state = {"steps": self.steps, "rounds": self.rounds, "local": self.local}
        for name in self.counters if self.local else ():
            value = getattr(self, name)
            state[name] = value.tolist() if isinstance(value, torch.Tensor) else value
        return state

    def load_state_dict(self, state: dict):
        """The vectors are loaded after it."""
        self.steps, self.rounds = state["steps"], state["rounds"]
        if state["local"]:
            self.start_local_steps()
            for name in self.counters:
                new, value = getattr(self, name), state[name]
                is_tensor = isinstance(new, torch.Tensor)
                setattr(self, name, new.new_tensor(value) if is_tensor else value)
