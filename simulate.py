"""A slow, uneven cluster on one machine: stragglers and slow links, to show what methods gain.

Stragglers. `--slow_replica R:F`: replica R takes F times as long for every step. `--random_lag
P:SECONDS`: in each step, with probability P, one replica (drawn from the seed) pauses for SECONDS.

The slow link. `--link_mbps`, `--link_latency_ms`: every replica reaches the others through one link
of that rate, shared by its N ranks. A collective between replicas really happens, at the speed of
this machine, but its wait() returns no earlier than the link would allow:

    begin_k  = max(all its ranks have arrived, free)     # free: when the link has sent
                                                         #   what was queued before
    free     = begin_k + bytes_k * FRAMING / (rate / N)  # bytes as mesh.py's ledger counts them
    finish_k = free + latency * hops_k                   # M-1 hops for an all-gather,
                                                         #   2 (M-1) for an all-reduce

Nothing blocks in between, so traffic that a method overlaps stays overlapped. Groups with a
simulated link use gloo or NCCL, which have threads or streams of their own. Everything is off by
default and then costs nothing.

    export OMP_NUM_THREADS=1
    torchrun --standalone --nproc_per_node 2 train.py --method a_edit --slow_replica 1:2.0
    torchrun --standalone --nproc_per_node 2 train.py --method minibatch --link_mbps 100
"""

import queue
import threading
import time
from dataclasses import dataclass

import numpy as np
import torch

from plumbing.config import UserError, option

FRAMING = 1538 / 1448  # TCP over Ethernet: 1448 bytes of payload take 1538 on the wire


@dataclass
class Config:
    slow_replica: str = option("", "R:F, replica R is F times slower")
    random_lag: str = option("", "P:SECONDS, with probability P a step of one replica pauses")
    link_mbps: float = option(0.0, "Mbit/s of each replica's link to the others; 0: no limit")
    link_latency_ms: float = option(0.0, "latency of that link per hop", below=1e6)

    @property
    def limits_link(self) -> bool:
        return self.link_mbps > 0 or self.link_latency_ms > 0


def pair(flag: str, text: str, low: tuple, high: tuple) -> tuple:
    """Two numbers from "A:B" within their bounds. Raises UserError."""
    try:
        numbers = tuple(float(part) for part in text.split(":"))
        fits = len(numbers) == 2 and all(a <= x <= b for a, x, b in zip(low, numbers, high))
    except ValueError:
        fits = False
    if not fits:
        raise UserError(
            f"--{flag} {text}: must be two numbers A:B, "
            f"{low[0]:g} <= A <= {high[0]:g} and B >= {low[1]:g}"
        )
    return numbers


class Stragglers:
    """Delays this rank's replica. Raises UserError for flags that name no replica."""

    def __init__(self, config: Config, replicas: int, seed: int):
        self.slow = self.lag = None
        self.replicas, self.seed = replicas, seed
        if config.slow_replica:
            self.slow = pair("slow_replica", config.slow_replica, (0, 1), (replicas - 1, 1e6))
            if self.slow[0] % 1:
                raise UserError(f"--slow_replica {config.slow_replica}: R must be a whole number")
        if config.random_lag:
            self.lag = pair("random_lag", config.random_lag, (0, 0), (1, 1e6))

    def pause_s(self, step: int, replica: int, busy_s: float) -> float:
        """How long `replica` pauses in `step`, which kept it busy for busy_s seconds."""
        pause = (self.slow[1] - 1) * busy_s if self.slow and replica == self.slow[0] else 0.0
        if self.lag:
            philox = np.random.Philox(key=self.seed, counter=[0, 0, 1, step])
            generator = np.random.Generator(philox)
            late, unlucky = generator.random() < self.lag[0], generator.integers(self.replicas)
            pause += self.lag[1] if late and unlucky == replica else 0.0
        return pause

    def begin_step(self, mesh):
        if self.slow or self.lag:
            self.began, self.waited = time.perf_counter(), sum(mesh.waited_s.values())

    def end_step(self, step: int, mesh):
        if self.slow or self.lag:
            if mesh.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            # Waiting for other replicas is not work, so it does not get slower.
            waited = sum(mesh.waited_s.values()) - self.waited
            time.sleep(self.pause_s(step, mesh.replica, time.perf_counter() - self.began - waited))


class Transfer:
    """A collective on the link. wait() returns when it has arrived, like torch's Work."""

    def __init__(self, work, seconds, latency_s, on_cuda):
        self.work, self.seconds, self.latency_s, self.on_cuda = work, seconds, latency_s, on_cuda
        self.begun, self.finish, self.error = threading.Event(), None, None
        self.link_s = 0.0  # how long wait() waited for the link, not for other ranks

    def wait(self):
        self.begun.wait()
        if self.error:
            raise self.error
        if self.on_cuda:
            self.work.wait()  # it has finished, but the caller's stream must be ordered after it
        self.link_s = max(0.0, self.finish - time.perf_counter())
        time.sleep(min(self.link_s, 1e6))


class SimulatedLink:
    """One replica's link to the others; this rank has 1/N of its rate."""

    def __init__(self, config: Config, ranks: int, device: torch.device):
        rate = config.link_mbps * 1e6 / 8
        self.bytes_per_s = rate / ranks if config.link_mbps else float("inf")
        self.latency_s, self.device = config.link_latency_ms / 1e3, device
        self.transfers = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def carry(self, work, sent_bytes: float, hops: int) -> Transfer:
        """Queue a collective in flight behind what is on the link already."""
        seconds = sent_bytes * FRAMING / self.bytes_per_s
        transfer = Transfer(work, seconds, hops * self.latency_s, self.device.type == "cuda")
        self.transfers.put(transfer)
        return transfer

    def _run(self):
        """Wait for each collective to really happen, in order, and compute when the link would
        have finished it."""
        free = 0.0
        while True:
            transfer = self.transfers.get()
            try:
                self._wait(transfer.work)
                free = max(time.perf_counter(), free) + transfer.seconds
                transfer.finish = free + transfer.latency_s
            except Exception as error:  # a lost neighbour: transfer.wait() raises it
                transfer.error = error
            transfer.begun.set()

    def _wait(self, work):
        if self.device.type != "cuda":
            work.wait()
            return
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream()):
            work.wait()
            torch.cuda.current_stream().synchronize()
