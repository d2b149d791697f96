"""A slow, uneven cluster on one machine: stragglers and slow links, so that anyone can see why
these methods exist.

Stragglers. `--slow_replica R:F`: replica R takes F times as long for every step. `--random_lag
P:SECONDS`: in each step, with probability P, one replica, drawn from the seed, pauses for so long.

The slow link. `--link_mbps`, `--link_latency_ms`: every replica reaches the others through one wire
of that rate, shared by its N ranks. A collective of a sync group really happens, at the speed of
this machine, but its handle's wait() returns no earlier than the wire would allow:

    begin_k  = max(all its ranks have arrived, free)     # free: when the wire has sent
                                                         #   what was queued before
    free     = begin_k + bytes_k * FRAMING / (rate / N)  # bytes as mesh.py's ledger counts them
    finish_k = free + latency * hops_k                   # M-1 hops for an all-gather,
                                                         #   2 (M-1) for an all-reduce

Nothing blocks in between, so what a method overlaps stays overlapped. All of it is off by default
and then costs nothing; it is written for every method, on gloo and on NCCL (where a simulated wait
blocks the host; not run there yet).

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

from flags import UserError, option


FRAMING = 1538 / 1448  # TCP over Ethernet: 1448 bytes of payload take 1538 on the wire


@dataclass
class Config:
    slow_replica: str = option("", "R:F, replica R is F times slower")
    random_lag: str = option("", "P:SECONDS, with probability P a step of one replica pauses")
    link_mbps: float = option(0.0, "Mbit/s of each replica's link to the others; 0: no limit")
    link_latency_ms: float = option(0.0, "of that link, per hop")


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
    """Makes this rank's replica late, if it is its turn.
    Raises UserError for flags that name no replica."""

    def __init__(self, config: Config, replicas: int, seed: int):
        self.slow = self.lag = None
        self.replicas, self.seed = replicas, seed
        if config.slow_replica:
            self.slow = pair("slow_replica", config.slow_replica, (0, 1), (replicas - 1, 1e6))
            if self.slow[0] % 1:
                raise UserError(
                    f"--slow_replica {config.slow_replica}: a replica's number is whole"
                )
        if config.random_lag:
            self.lag = pair("random_lag", config.random_lag, (0, 0), (1, 1e6))

    def pause_s(self, step: int, replica: int, busy_s: float) -> float:
        """How long `replica` has to wait in `step`, which kept it busy for busy_s seconds."""
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
                torch.cuda.synchronize()
            # waiting for other replicas is not work, so it does not get slower
            waited = sum(mesh.waited_s.values()) - self.waited
            time.sleep(self.pause_s(step, mesh.replica, time.perf_counter() - self.began - waited))


class Parcel:
    """A collective on the wire. Works like torch's Work: wait() returns when it has arrived."""

    def __init__(self, works, seconds, latency_s, on_cuda):
        self.works, self.seconds, self.latency_s, self.on_cuda = works, seconds, latency_s, on_cuda
        self.begun, self.finish, self.error = threading.Event(), None, None
        self.link_s = 0.0  # how long wait() waited for the wire, not for the other ranks

    def wait(self):
        self.begun.wait()
        if self.error:
            raise self.error
        if self.on_cuda:
            for work in self.works:
                work.wait()  # long done, but the caller's stream has to be ordered behind it
        self.link_s = max(0.0, self.finish - time.perf_counter())
        time.sleep(self.link_s)


class Wire:
    """One replica's link to the others, as this rank sees its 1/N of it.
    device: where the operations are carried out, cuda only for NCCL."""

    def __init__(self, config: Config, sharers: int, device: torch.device):
        rate = config.link_mbps * 1e6 / 8
        self.bytes_per_s = rate / sharers if config.link_mbps else float("inf")
        self.latency_s, self.device = config.link_latency_ms / 1e3, device
        self.parcels = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def carry(self, works: list, sent_bytes: float, hops: int) -> Parcel:
        """Queue what `works` (collectives in flight) send behind what is on the wire already."""
        seconds, on_cuda = sent_bytes * FRAMING / self.bytes_per_s, self.device.type == "cuda"
        parcel = Parcel(works, seconds, hops * self.latency_s, on_cuda)
        self.parcels.put(parcel)
        return parcel

    def _run(self):
        """Watch each collective really happen, in order,
        and work out when the wire would be done with it."""
        free = 0.0
        while True:
            parcel = self.parcels.get()
            try:
                self._wait(parcel.works)
                free = max(time.perf_counter(), free) + parcel.seconds
                parcel.finish = free + parcel.latency_s
            except Exception as error:  # a lost neighbour: for whoever waits for the parcel
                parcel.error = error
            parcel.begun.set()

    def _wait(self, works):
        if self.device.type != "cuda":
            return [work.wait() for work in works]
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream()):
            [work.wait() for work in works]
            torch.cuda.current_stream().synchronize()
