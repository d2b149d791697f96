"""A slow, uneven, unreliable cluster on one machine, to show what methods gain.

Stragglers. `--slow_replica R:F`: replica R takes F times as long for every step. (With NCCL the
time in which a step waits for other replicas counts as its work.)

The virtual clock. With `--virtual_clock` nothing sleeps. A step takes 1 virtual second, on the slow
replica F. A-EDiT's tau_time_s and all times in the record except stall_ms and wait_*_ms are
virtual: two runs are equal, bit by bit. Where replicas wait for each other, all continue at the
time of the latest one: after every step with averaged gradients, and at a round end. Every rank
computes this from the steps that each replica has taken. (On CUDA votes are read one step late, so
A-EDiT's rounds have one step more.)

Disturbances of one replica, in its steps FIRST to LAST, counted from 1 as in the record.
`--random_tokens R:FIRST:LAST`: its inputs and targets are uniform random tokens. `--scale_lr
R:FIRST:LAST:FACTOR`: its inner learning rate is FACTOR times the schedule's, but in the
warm-up (with minibatch always) nothing changes: replicas must stay equal there. The record and the
syncs use the schedule's. `--flip R:FIRST:LAST`: in the syncs after these steps the replica's
progress has the wrong sign: x <- 2 anchor - x. Its norm stays as it is.

The slow link. `--link_mbps`: every replica reaches the others through one link of that rate, shared
by its N ranks. A collective between replicas really happens, at the speed of this machine, but its
wait() returns no earlier than the link would allow. The link has no latency:

    begin_k  = max(all its ranks have arrived, free)     # free: when the link has sent
                                                         #   what was queued before
    free     = begin_k + bytes_k * FRAMING / (rate / N)  # bytes as mesh.py's ledger counts them
    wait() of k returns when it is `free`

Nothing blocks in between, so traffic that a method overlaps stays overlapped. Groups with a
simulated link use gloo or NCCL, which have threads or streams of their own. Everything is off by
default and then costs nothing.

    export OMP_NUM_THREADS=1
    alias run="torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 2 train.py"
    run --method a_edit --slow_replica 1:2.0
    run --method edit --random_tokens 1:300:315
    run --method minibatch --link_mbps 100

Plain version: plain/train.py, with a virtual clock.
"""

import operator
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from config import UserError

FRAMING = 1538 / 1448  # TCP over Ethernet: 1448 bytes of payload take 1538 on the wire

SLOWEST_MBPS = 0.01  # on slower links a transfer could take longer than a process can sleep


FORMS = {
    "slow_replica": "R:F",
    "random_tokens": "R:FIRST:LAST",
    "scale_lr": "R:FIRST:LAST:FACTOR",
    "flip": "R:FIRST:LAST",
}
NOBODY = {"R": -1, "F": 1.0, "FIRST": 0, "LAST": 0, "FACTOR": 1.0}


def read_disturbance(config, flag: str, replicas: int) -> dict:
    """The numbers of a flag by name; those of NOBODY if it is not given. Raises UserError."""
    text = getattr(config, flag)
    if not text:
        return NOBODY
    names = FORMS[flag].split(":")
    try:
        found = NOBODY | dict(zip(names, map(float, text.split(":")), strict=True))
        right = found["R"] in range(replicas) and found["FIRST"] <= found["LAST"]
        right &= 1 <= found["F"] < 1e9 and 0 <= found["FACTOR"] < 1e9  # NaN is not
        right &= 0 <= found["FIRST"]
    except ValueError:
        right = False
    if not right:
        limits = f"R below {replicas}, 1 <= F < 1e9, 0 <= FACTOR < 1e9, 0 <= FIRST <= LAST"
        raise UserError(f"--{flag} {text}: must be {FORMS[flag]}, {limits}")
    return found


def check(config, method, replicas: int):
    """Raise UserError if the flags of the simulation do not fit the method or the mesh."""
    if 0 < config.link_mbps < SLOWEST_MBPS:
        raise UserError(f"--link_mbps {config.link_mbps}: must be 0 or at least {SLOWEST_MBPS}")
    for flag in FORMS:
        read_disturbance(config, flag, replicas)
    has_anchor = "anchor" in method.vectors
    if config.flip and (not has_anchor or hasattr(config, "fragments")):  # these sync in a round
        hint = "has no anchor, or syncs within a round; choose diloco, edit or robust"
        raise UserError(f"--flip: {config.method} {hint}")
    if config.virtual_clock and not method.barrier:
        hint = "do not wait for each other; choose another --method"
        raise UserError(f"--virtual_clock: replicas of {config.method} {hint}")


class Cluster(nullcontext):
    """The disturbances of this rank's replica during the training. disturb() wraps what they
    change, so train.py's loop does not know of them. With --virtual_clock it is the training's
    clock, too, in place of plumbing.log.Clock. Does nothing without flags."""

    def __init__(self, config, mesh):
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.numbers = {flag: read_disturbance(config, flag, mesh.replicas) for flag in FORMS}
        slow = self.numbers["slow_replica"]
        self.step_s = [1.0] * mesh.replicas  # virtual seconds
        self.step_s[int(slow["R"])] = slow["F"]
        self.synced_at = 0.0  # when all replicas went on at the same virtual time
        self.steps = 0  # of this replica since then

    def start_at(self, saved: dict):
        """Continue a checkpoint. saved: its state."""
        self.synced_at = saved["train_s"]

    def train_s(self) -> float:
        return self.synced_at + self.steps * self.step_s[self.mesh.replica]

    def busy_s(self) -> float:
        """Now. Waiting for other replicas is not work, so a slow replica waits no longer."""
        return time.perf_counter() - sum(self.mesh.waited_s.values())

    def hits(self, flag: str, step: int) -> bool:
        """Is this replica disturbed in this step? step: counted from 1."""
        numbers = self.numbers[flag]
        return numbers["R"] == self.mesh.replica and numbers["FIRST"] <= step <= numbers["LAST"]

    def disturb(self, batches, method):
        """Wrap the batches and the method's calls, once, at the start."""
        self.method = method
        self.vocab_size = batches.corpus.vocab_size  # the model may have more, for padding
        self.wrap(batches, "train", self.batch)
        self.wrap(method, "before_step", self.begin_step)
        self.wrap(method, "after_backward", self.delay)
        self.wrap(method, "inner_step", self.scale_rate)
        self.wrap(method, "end_round", self.end_round)

    def wrap(self, owner, name: str, wrapper):
        """From here on owner.name(...) is wrapper(what it was, ...)."""
        setattr(owner, name, partial(wrapper, getattr(owner, name)))

    def begin_step(self, before_step):
        before_step()
        self.began = self.busy_s()

    def batch(self, train, step: int, micro_step: int):
        """The inputs and targets of a micro-step, or in their place uniform random tokens."""
        batch = train(step, micro_step)
        if not self.hits("random_tokens", step + 1):
            return batch
        mesh = self.mesh
        # The third number: 0 draws the batches, 2 NoLoCo's pairs.
        counter = [0, micro_step * mesh.shards + mesh.shard_index, 3, step]
        philox = np.random.Philox(key=self.config.seed, counter=counter)
        size = (2, *batch[0].shape)
        tokens = np.random.Generator(philox).integers(self.vocab_size, size=size)
        return torch.from_numpy(tokens).to(mesh.device)

    def delay(self, after_backward):
        """A slow replica sleeps after its backward."""
        after_backward()
        factor = self.step_s[self.mesh.replica]
        if factor > 1 and not self.config.virtual_clock:
            if self.mesh.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            time.sleep((factor - 1) * (self.busy_s() - self.began))
        if self.method.averages_gradients:  # all wait for the slowest
            self.synced_at += max(self.step_s)
        else:
            self.steps += 1

    def scale_rate(self, inner_step, optimizer):
        """The schedule and the record keep their rate."""
        if self.hits("scale_lr", self.method.steps + 1) and not self.method.averages_gradients:
            optimizer.lr *= self.numbers["scale_lr"]["FACTOR"]
        inner_step(optimizer)

    def end_round(self, end_round):
        """Before: the replica's progress since its anchor may get the wrong sign. After: replicas
        have waited for each other."""
        method = self.method
        if self.hits("flip", method.steps):
            x = method.model.master
            torch.sub(2 * method.anchor.to(x.device), x, out=x)
        end_round()
        if self.config.virtual_clock:  # all go on at the time of the latest one
            steps = method.rows.steps.tolist()
            self.synced_at += max(map(operator.mul, steps, self.step_s))
            self.steps = 0


@dataclass
class Transfer:
    """A collective on the link. wait() returns when it has arrived, like torch's Work."""

    works: list
    on_cuda: bool
    finish: Future  # when the link has delivered it, in seconds of perf_counter()
    link_s: float = 0.0  # how long wait() waited for the link, not for other ranks

    def wait(self):
        finish = self.finish.result()  # raises the error of a lost neighbour
        if self.on_cuda:
            for work in self.works:
                work.wait()  # it has finished, but the caller's stream must be ordered after it
        self.link_s = max(0.0, finish - time.perf_counter())
        time.sleep(self.link_s)


class SimulatedLink:
    """One replica's link to the others; this rank has 1/N of its rate."""

    def __init__(self, config, ranks: int, device: torch.device):
        self.bytes_per_s = config.link_mbps * 1e6 / 8 / ranks
        self.on_cuda = device.type == "cuda"
        self.free = 0.0  # when it has sent what was queued
        self.note = None  # Mesh.note
        self.thread = ThreadPoolExecutor(max_workers=1)  # so collectives are carried in order

    def carry(self, works: list, sent_bytes: float) -> Transfer:
        """Queue a collective in flight, torch's works, behind what is on the link already."""
        seconds = sent_bytes * FRAMING / self.bytes_per_s
        finish = self.thread.submit(self._finish, works, seconds)
        return Transfer(works, self.on_cuda, finish)

    def _finish(self, works, seconds) -> float:
        """Wait until the collective has really happened. Then compute when the link would have
        finished it."""
        for work in works:
            if self.on_cuda:
                while not work.is_completed():  # wait() would end NCCL's hold on its input tensors
                    time.sleep(1e-4)
            else:
                work.wait()
        begin = max(time.perf_counter(), self.free)
        self.free = begin + seconds
        self.note("link", begin, self.free)
        return self.free
