"""`shm`, a torch.distributed backend: the ranks of one machine read each other's memory.

gloo sends a tensor through a TCP socket: four copies, two of them in the kernel, and a thread on
each side that must wake up while all cores compute. Here every rank of a group has slots of memory
that the other ranks can read, and the n-th gather, or the n-th sum, is

    write      wait until all ranks have released what was in slot n mod SLOTS
               copy the tensor into it;                  written[n mod SLOTS, me] <- n
    read       for each rank: wait until written[n mod SLOTS, rank] = n; use its data
    release    released[n mod SLOTS, me] <- n

There is no lock and no thread: each word of `written` and `released` has one writer, and an x86
processor shows stores to others in the order in which they were made (on other processors use
gloo). A rank that waits sleeps for some microseconds at a time.

A call writes. `work.wait()` copies or sums the data of all ranks and releases. Both run on the
caller's thread, so nothing overlaps with computation. A rank completes its own operation on a slot
before it uses the slot again. Gathers and sums have slots of their own: a rank can then be one
layer ahead of its neighbours in both.

The memory has no name in any file system (memfd_create), so it disappears with the last process
that maps it. A slot has room for any layer, but takes memory only where something was written. A
dead neighbour is noticed in /proc, a silent one after the group's timeout; both raise RuntimeError.

    dist.new_group(ranks, backend="shm")    # after `import plumbing.shm`; see machine_id()
"""

import mmap
import os
import platform
import time

import numpy as np
import torch
import torch.distributed as dist

from plumbing.posix import resource

GATHER = 0
SUM = 1
SLOTS = 2
SLOT_BYTES = 1 << 34
HEADER_BYTES = 1 << 16  # written[slot, rank] in the first half, released in the other, int64


def machine_id() -> str:
    """Equal on ranks that can use this backend together; empty where it does not run."""
    limits = {resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)}
    able = platform.machine() == "x86_64" and hasattr(os, "memfd_create")
    if not able or limits != {resource.RLIM_INFINITY}:
        return ""
    try:
        boot = open("/proc/sys/kernel/random/boot_id").read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # some sandboxes have no such file: then gloo
        return ""


class Work(dist.Work):
    """An operation in flight; wait() moves the data."""

    def __init__(self, finish):
        super().__init__()
        self.finish = finish

    def wait(self, timeout=None) -> bool:
        if self.finish:
            self.finish()
            self.finish = None
        return True


class ShmGroup(dist.ProcessGroup):
    """All-gather, all-to-all (of equal pieces), reduce-scatter and all-reduce (only sums) of
    contiguous tensors; 2 or more ranks."""

    def __init__(self, options, _):
        """options: what torch.distributed tells a backend: store, group_rank, timeout, ..."""
        super().__init__(options.group_rank, options.group_size)
        self.timeout_s = options.timeout.total_seconds()
        self.counts = [0, 0]  # operations of each kind
        self.works = {}  # slot -> the last one there
        # Rank 0's file is the memory. The path of a rank's file lives as long as its process.
        file = os.memfd_create("shm")
        os.ftruncate(file, HEADER_BYTES + self.size() * 2 * SLOTS * SLOT_BYTES)
        options.store.set(f"shm/{self.rank()}", f"/proc/{os.getpid()}/fd/{file}")
        self.paths = [options.store.get(f"shm/{r}").decode() for r in range(self.size())]
        memory = np.memmap(self.paths[0], np.uint8)
        memory.base.madvise(mmap.MADV_DONTDUMP)  # a core dump would fill all slots
        words = np.asarray(memory)[:HEADER_BYTES].view(np.int64).reshape(2, 2 * SLOTS, -1)
        self.written = words[0]  # (slot, rank)
        self.released = words[1]
        slots = torch.from_numpy(memory[HEADER_BYTES:])
        self.slots = slots.view(2 * SLOTS, self.size(), SLOT_BYTES)

    # ---- the protocol ----

    def _start(self, kind: int, output, input, first_byte=0) -> Work:
        """Write this rank's input. The work's wait() reads what the ranks have written, from
        first_byte on, in rank order: each into its piece of output (GATHER), or output becomes
        their sum (SUM), with equal bits on all ranks."""
        self.counts[kind] += 1
        n = self.counts[kind]
        me = self.rank()
        slot = kind * SLOTS + n % SLOTS
        if slot in self.works:
            self.works[slot].wait()
        for rank in range(self.size()):
            self._wait(self.released, slot, rank, n - SLOTS)
        self.slots[slot, me, : input.nbytes].view(input.dtype).copy_(input.view(-1))
        self.written[slot, me] = n
        pieces = output.view(-1).chunk(self.size())
        if kind == SUM:
            pieces = [output.view(-1)] * self.size()

        def finish():
            for rank, piece in enumerate(pieces):
                self._wait(self.written, slot, rank, n)
                found = self.slots[slot, rank, first_byte:][: piece.nbytes].view(piece.dtype)
                if kind == SUM and rank > 0:
                    piece.add_(found.to(piece.device))
                elif rank != me or piece.data_ptr() != input.data_ptr():  # else it is there already
                    piece.copy_(found)
            self.released[slot, me] = n

        self.works[slot] = Work(finish)
        return self.works[slot]

    def _wait(self, numbers, slot, rank, n):
        """Until this rank has written n, or more, in its word of the slot."""
        deadline = time.monotonic() + self.timeout_s
        tries = 0
        while numbers[slot, rank] < n:
            tries += 1
            time.sleep(min(tries, 20) * 2e-5)
            dead = tries % 50 == 0 and not os.path.exists(self.paths[rank])
            if dead and numbers[slot, rank] < n:
                raise RuntimeError("a neighbour has died")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a neighbour is silent for {self.timeout_s:g} s")

    # ---- the operations ----

    def all_gather_single(self, output, input, opts):
        return self._start(GATHER, output, input)

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts):
        return self._start(GATHER, output, input, self.rank() * input.nbytes // self.size())

    def allreduce(self, tensors, opts):
        return self._sum(tensors[0], tensors[0], 0, opts)

    def reduce_scatter_single(self, output, input, opts):
        return self._sum(output, input, self.rank() * output.nbytes, opts)

    def _sum(self, output, input, first_byte, opts):
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError("the shm backend only sums")
        return self._start(SUM, output, input, first_byte)

    # the names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


dist.Backend.register_backend("shm", ShmGroup, extended_api=True, devices=["cpu", "cuda"])
