"""A slow, uneven, unreliable cluster on one machine, to show what methods gain.

Stragglers. `--slow_replica R:F`: replica R takes F times as long for every step. `--random_lag
P:SECONDS`: in each step, with probability P, one replica (drawn from the seed) pauses for SECONDS.
(With NCCL the time in which a step waits for other replicas counts as its work.)

The virtual clock. With `--virtual_clock` nothing sleeps. A step takes 1 virtual second (on the slow
replica F) plus its random lag. A-EDiT's tau_time_s and all times in the record except stall_ms and
wait_*_ms are virtual: two runs are equal, bit by bit. Where replicas wait for each other, all
continue at the time of the latest one: after every step with averaged gradients, and at a round
end. Every rank computes this from the steps that each replica has taken. (On CUDA votes are read
one step late, so A-EDiT's rounds have one step more.)

Disturbances of one replica, in its steps FIRST to LAST, counted from 1 as in the record.
`--random_tokens R:FIRST:LAST`: its inputs and targets are uniform random tokens. `--scale_lr
R:FIRST:LAST:FACTOR`: its inner learning rate is FACTOR times the schedule's; the record and the
syncs use the schedule's. `--flip R:FIRST:LAST`: in the syncs after these steps the replica's
progress has the wrong sign: x <- 2 anchor - x. Its norm stays as it is.

The slow link. `--link_mbps`, `--link_latency_ms`: every replica reaches the others through one link
of that rate, shared by its N ranks. A collective between replicas really happens, at the speed of
this machine, but its wait() returns no earlier than the link would allow:

    begin_k  = max(all its ranks have arrived, free)     # free: when the link has sent
                                                         #   what was queued before
    free     = begin_k + bytes_k * FRAMING / (rate / N)  # bytes as mesh.py's ledger counts them
    finish_k = free + latency * hops_k                   # hops: 2 (M-1) for an all-reduce, M-1 for
                                                         #   all-gather, all-to-all; 1: send-receive

Nothing blocks in between, so traffic that a method overlaps stays overlapped. Groups with a
simulated link use gloo or NCCL, which have threads or streams of their own. Everything is off by
default and then costs nothing.

    export OMP_NUM_THREADS=1
    torchrun --standalone --nproc_per_node 2 train.py --method a_edit --slow_replica 1:2.0
    torchrun --standalone --nproc_per_node 2 train.py --method edit --random_tokens 1:300:315
    torchrun --standalone --nproc_per_node 2 train.py --method minibatch --link_mbps 100
"""

import queue
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from config import UserError, option

FRAMING = 1538 / 1448  # TCP over Ethernet: 1448 bytes of payload take 1538 on the wire


@dataclass
class Config:
    slow_replica: str = option("", "R:F, replica R is F times slower", group="simulated cluster")
    random_lag: str = option("", "P:SECONDS, with probability P a step of one replica pauses")
    virtual_clock: bool = option(
        False, "count virtual seconds: a step takes 1, on a slow replica its factor"
    )
    random_tokens: str = option("", "R:FIRST:LAST, in these steps replica R gets random tokens")
    scale_lr: str = option("", "R:FIRST:LAST:FACTOR, multiplies replica R's lr in these steps")
    flip: str = option("", "R:FIRST:LAST, in these steps replica R syncs progress of wrong sign")
    link_mbps: float = option(0.0, "Mbit/s of each replica's link to the others; 0: no limit")
    link_latency_ms: float = option(0.0, "latency of that link per hop", below=1e6)

    @property
    def limits_link(self) -> bool:
        return self.link_mbps > 0 or self.link_latency_ms > 0

    def check(self, replicas: int):
        super().check(replicas)
        Disturbances(self, replicas)
        method = self.method_class
        has_anchor = "anchor" in method.shared + method.private
        if self.flip and not (has_anchor and method.syncs_at_round_end):
            hint = "has no anchor, or syncs within a round; choose diloco, edit or robust"
            raise UserError(f"--flip: {self.method} {hint}")
        if self.virtual_clock and not self.method_class.barrier:
            raise UserError(
                f"--virtual_clock: replicas of {self.method} do not wait for each other; choose "
                "another --method"
            )
        if self.virtual_clock and self.limits_link:
            raise UserError(
                "--virtual_clock: a simulated link takes real seconds; leave out --link_mbps and "
                "--link_latency_ms"
            )


def numbers(flag: str, text: str, **bounds) -> tuple:
    """The numbers in "A:B:...", () in "". bounds: name -> (lowest, highest); ints for a whole
    number. Raises UserError."""
    if not text:
        return ()
    try:
        parts = zip(text.split(":"), bounds.values(), strict=True)
        found = tuple(type(low)(part) for part, (low, _) in parts)
        fits = all(low <= x <= high for x, (low, high) in zip(found, bounds.values()))
    except ValueError:
        fits = False
    if not fits:
        limits = [f"{low:g} <= {name} <= {high:g}" for name, (low, high) in bounds.items()]
        raise UserError(f"--{flag} {text}: must be {':'.join(bounds)}, {', '.join(limits)}")
    return found


class Disturbances:
    """What the flags say of each replica's steps. Raises UserError for flags that name no replica,
    or that do not fit together."""

    def __init__(self, config, replicas: int):
        self.replicas, self.seed, R = replicas, config.seed, (0, replicas - 1)
        place = {"R": R, "FIRST": (1, 2**31), "LAST": (1, 2**31)}
        self.slow = numbers("slow_replica", config.slow_replica, R=R, F=(1.0, 1e6))
        self.lag = numbers("random_lag", config.random_lag, P=(0.0, 1.0), SECONDS=(0.0, 1e6))
        self.tokens = numbers("random_tokens", config.random_tokens, **place)
        self.scaled = numbers("scale_lr", config.scale_lr, **place, FACTOR=(0.0, 1e6))
        self.flipped = numbers("flip", config.flip, **place)
        for _, first, last, *_ in filter(None, (self.tokens, self.scaled, self.flipped)):
            if first > last:
                flags = "--random_tokens, --scale_lr, --flip"
                raise UserError(f"{flags}: FIRST {first} is after LAST {last}")
        if self.scaled and self.scaled[1] <= config.sync_warmup_steps:
            raise UserError(
                f"--scale_lr {config.scale_lr}: replicas must stay equal while gradients are "
                "averaged: choose FIRST after --sync_warmup_steps, or a method with local steps"
            )

    def draw(self, kind: int, step: int, index: int = 0) -> np.random.Generator:
        """Kind 0 draws the batches (data.py), kind 2 NoLoCo's pairs."""
        counter = [0, index, kind, step]
        return np.random.Generator(np.random.Philox(key=self.seed, counter=counter))

    def hits(self, place: tuple, step: int, replica: int) -> bool:
        """place: R, FIRST, LAST, ... or (); step: of the replica, counted from 0."""
        return bool(place) and replica == place[0] and place[1] <= step + 1 <= place[2]

    def pause_s(self, step: int, replica: int, busy_s: float) -> float:
        """How long `replica` pauses in `step`, which kept it busy for busy_s seconds."""
        pause = (self.slow[1] - 1) * busy_s if self.slow and replica == self.slow[0] else 0.0
        if self.lag:
            generator = self.draw(1, step)
            late, unlucky = generator.random() < self.lag[0], generator.integers(self.replicas)
            pause += self.lag[1] if late and unlucky == replica else 0.0
        return pause


class VirtualClock(nullcontext):
    """Virtual seconds of training, in place of plumbing.log.Clock."""

    def __init__(self, config, mesh):
        super().__init__()
        self.disturbances, self.replica = Disturbances(config, mesh.replicas), mesh.replica
        self.now = self.synced_at = 0.0
        self.steps = [0] * mesh.replicas  # that each replica had taken at synced_at

    def start_at(self, saved: dict):
        """Continue a checkpoint. saved: its state.json."""
        self.now = self.synced_at = saved["train_s"]
        self.steps = [saved["steps"][r % len(saved["steps"])] for r in range(len(self.steps))]

    def train_s(self) -> float:
        return self.now

    def step_s(self, step: int, replica: int) -> float:
        return 1.0 + self.disturbances.pause_s(step, replica, busy_s=1.0)

    def end_step(self, step: int):
        self.now += self.step_s(step, self.replica)

    def end_round(self, counts: list):
        """Replica r has taken counts[r] steps since the last call. All go on at the same time."""
        ends = [self.synced_at] * len(counts)
        for replica, count in enumerate(counts):
            for _ in range(count):
                ends[replica] += self.step_s(self.steps[replica], replica)
                self.steps[replica] += 1
        self.now = self.synced_at = max(ends)


class Cluster:
    """The disturbances of this rank's replica during the training: what train.py calls around a
    step. Does nothing without flags."""

    def __init__(self, config, mesh, clock):
        self.mesh, self.disturbances = mesh, Disturbances(config, mesh.replicas)
        self.virtual_clock = clock if config.virtual_clock else None
        self.pauses = (self.disturbances.slow or self.disturbances.lag) and not self.virtual_clock

    def before_step(self, optimizer, step: int):
        """Change the learning rate that train.py has just set for this step."""
        if self.disturbances.hits(self.disturbances.scaled, step, self.mesh.replica):
            optimizer.lr *= self.disturbances.scaled[3]
        self.began, self.waited = time.perf_counter(), sum(self.mesh.waited_s.values())

    def batch(self, tensors: tuple, vocab_size: int, step: int, micro_step: int) -> tuple:
        """The batch (inputs, targets), (B, T) each, or random tokens in its place."""
        mesh, disturbances = self.mesh, self.disturbances
        if not disturbances.hits(disturbances.tokens, step, mesh.replica):
            return tensors
        generator = disturbances.draw(3, step, micro_step * mesh.shards + mesh.shard_index)
        return tuple(torch.from_numpy(generator.integers(vocab_size, size=(2, *tensors[0].shape))))

    def before_metrics(self, step: int):
        """The step's delay."""
        if self.virtual_clock:
            self.virtual_clock.end_step(step)
        if self.pauses:
            if self.mesh.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            # Waiting for other replicas is not work, so it does not get slower.
            waited_s = sum(self.mesh.waited_s.values()) - self.waited
            busy_s = time.perf_counter() - self.began - waited_s
            time.sleep(self.disturbances.pause_s(step, self.mesh.replica, busy_s))

    def before_sync(self, method):
        """The replica's progress since its anchor may get the wrong sign."""
        if self.disturbances.hits(self.disturbances.flipped, method.steps - 1, self.mesh.replica):
            x = method.model.master
            torch.sub(2 * method.anchor.to(x.device), x, out=x)

    def after_step(self, method):
        """Each step with averaged gradients is a round."""
        self.mesh.note("step", self.began, time.perf_counter())
        if self.virtual_clock and method.local_steps == 0:
            steps = [1] * self.mesh.replicas
            if not method.averages_gradients:
                steps = [int(count) for count in method.exchanged.steps.tolist()]
            self.virtual_clock.end_round(steps)


class Transfer:
    """A collective on the link. wait() returns when it has arrived, like torch's Work."""

    def __init__(self, works, seconds, latency_s, on_cuda):
        self.works, self.seconds, self.latency_s, self.on_cuda = works, seconds, latency_s, on_cuda
        self.begun, self.finish, self.error = threading.Event(), None, None
        self.link_s = 0.0  # how long wait() waited for the link, not for other ranks

    def wait(self):
        self.begun.wait()
        if self.error:
            raise self.error
        for work in self.works if self.on_cuda else []:
            work.wait()  # it has finished, but the caller's stream must be ordered after it
        self.link_s = max(0.0, self.finish - time.perf_counter())
        time.sleep(min(self.link_s, 1e6))


class SimulatedLink:
    """One replica's link to the others; this rank has 1/N of its rate."""

    def __init__(self, config, ranks: int, device: torch.device):
        rate = config.link_mbps * 1e6 / 8
        self.bytes_per_s = rate / ranks if config.link_mbps else float("inf")
        self.latency_s, self.device = config.link_latency_ms / 1e3, device
        self.transfers, self.note = queue.Queue(), lambda *span: None  # Mesh.note
        threading.Thread(target=self._run, daemon=True).start()

    def carry(self, works: list, sent_bytes: float, hops: int) -> Transfer:
        """Queue a collective in flight, torch's works, behind what is on the link already."""
        seconds = sent_bytes * FRAMING / self.bytes_per_s
        transfer = Transfer(works, seconds, hops * self.latency_s, self.device.type == "cuda")
        self.transfers.put(transfer)
        return transfer

    def _run(self):
        """Wait for each collective to really happen, in order, and compute when the link would
        have finished it."""
        free = 0.0
        while True:
            transfer = self.transfers.get()
            try:
                for work in transfer.works:
                    self._wait(work)
                begin = max(time.perf_counter(), free)
                free = begin + transfer.seconds
                transfer.finish = free + transfer.latency_s
                self.note("link", begin, free)
            except Exception as error:  # a lost neighbour: transfer.wait() raises it
                transfer.error = error
            transfer.begun.set()

    def _wait(self, work):
        if self.device.type != "cuda":
            work.wait()
            return
        while not work.is_completed():  # wait() would end NCCL's hold on its input tensors
            time.sleep(1e-4)
