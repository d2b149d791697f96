"""`shm`, a torch.distributed backend: the ranks of one machine read each other's memory.

gloo sends a tensor through a TCP socket: four copies, two of them in the kernel, and a thread on
each side that must wake up while all cores compute. Here every rank of a group has slots of memory
that the other ranks can read, and a collective is

    write(n):    wait until all ranks have released what was in slot n mod SLOTS
                 copy the tensor into it;                  written[me, n mod SLOTS] <- n
    read(n):     for each rank: wait until written[rank, n mod SLOTS] = n; use its data
    release(n):  released[me, n mod SLOTS] <- n

There is no lock and no thread: each word of `written` and `released` has one writer, and an x86
processor shows stores to others in the order in which they were made (on other processors use
gloo). A rank that waits sleeps for some microseconds at a time.

A call copies this rank's tensor into its slot. `work.wait()` copies or sums the data of the others.
Both run on the caller's thread, so nothing overlaps with computation. Before a rank uses a slot
again it completes its own operation on that slot. All ranks of a group issue the same operations in
the same order. Gathers and sums have slots of their own: a rank can then be one layer ahead of its
neighbours in both.

The memory has no name in any file system (memfd_create), so it disappears with the last process
that maps it, however that process ends. A slot has room for any layer, but takes memory only where
something was written. A dead neighbour is noticed in /proc, a silent one after the group's timeout;
both raise RuntimeError.

    dist.new_group(ranks, backend="shm")    # after `import plumbing.shm`; see machine_id()
"""

import os
import platform
import resource
import time

import torch
import torch.distributed as dist

SLOTS = 2
SLOT_BYTES = 1 << 34
HEADER_BYTES = 4096  # written[SLOTS], released[SLOTS], int64 each; padded to a page


def machine_id() -> str:
    """Equal on ranks that can use this backend together; empty where it does not run."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)]
    able = platform.machine() == "x86_64" and hasattr(os, "memfd_create")
    if not able or limits != [resource.RLIM_INFINITY] * 2:
        return ""
    boot = open("/proc/sys/kernel/random/boot_id").read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


class Channel:
    """The slots of all ranks of a group for one kind of operation."""

    def __init__(self, group, name: str):
        self.group, self.count, self.works = group, 0, [None] * SLOTS  # the last work of each slot
        size = HEADER_BYTES + SLOTS * SLOT_BYTES
        self.file = open(os.memfd_create("shm"), "wb")  # open as long as this process lives
        self.file.truncate(size)
        own_path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        group.store.set(f"{name}/{group.rank()}", own_path)
        self.paths = [group.store.get(f"{name}/{r}").decode() for r in range(group.size())]
        self.written, self.released, self.slots = [], [], []
        for path in self.paths:
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            written, released = memory[: 2 * SLOTS * 8].view(torch.int64).numpy().reshape(2, SLOTS)
            self.written.append(written)
            self.released.append(released)
            self.slots.append(memory[HEADER_BYTES:].view(SLOTS, SLOT_BYTES))

    def write(self, flat: torch.Tensor) -> int:
        """Put this rank's tensor into the next slot. Returns the operation's number."""
        self.count += 1
        n, slot, me = self.count, self.count % SLOTS, self.group.rank()
        if self.works[slot]:
            self.works[slot].wait()
        for rank in range(self.group.size()):
            self._wait(lambda: self.released[rank][slot] >= n - SLOTS, rank)
        self._view(me, n, 0, flat).copy_(flat)
        self.written[me][slot] = n
        return n

    def read(self, n: int, rank: int, first_byte: int, like: torch.Tensor) -> torch.Tensor:
        """What `rank` wrote in operation n, from first_byte on, as long as `like`: a view of its
        memory, valid until release(n)."""
        self._wait(lambda: self.written[rank][n % SLOTS] >= n, rank)
        return self._view(rank, n, first_byte, like)

    def release(self, n: int):
        self.released[self.group.rank()][n % SLOTS] = n

    def _view(self, rank, n, first_byte, like):
        return self.slots[rank][n % SLOTS, first_byte : first_byte + like.nbytes].view(like.dtype)

    def _wait(self, done, rank):
        """Until done(), which depends on `rank`."""
        tries, deadline = 0, time.monotonic() + self.group.timeout_s
        while not done():
            tries += 1
            time.sleep(min(tries, 20) * 2e-5)
            if tries % 50 == 0:
                ended = not os.path.exists(self.paths[rank])
                if ended and not done():
                    raise RuntimeError("a neighbour has died")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"a neighbour is silent for {self.group.timeout_s:g} s")


class Work(dist.Work):
    """An operation in flight; wait() moves the data."""

    def __init__(self, channel: Channel, flat: torch.Tensor, collect):
        super().__init__()
        self.channel, self.collect, self.n = channel, collect, channel.write(flat)
        channel.works[self.n % SLOTS] = self

    def wait(self, timeout=None) -> bool:
        if self.collect:
            self.collect(self.n)
            self.channel.release(self.n)
            self.collect = None
        return True

    def is_completed(self) -> bool:
        return self.collect is None


class ShmGroup(dist.ProcessGroup):
    """All-gather, all-to-all, reduce-scatter, all-reduce (only sums) of contiguous tensors; 2 or
    more ranks."""

    def __init__(self, options, _):
        """options: what torch.distributed tells a backend: store, group_rank, timeout, ..."""
        super().__init__(options.group_rank, options.group_size)
        self.store, self.timeout_s = options.store, options.timeout.total_seconds()
        self.gathers, self.sums = Channel(self, "gathers"), Channel(self, "sums")

    def _allgather_base(self, output, input, opts=None):
        return self._gather(output, input, 0)

    def alltoall_base(self, output, input, output_sizes, input_sizes, opts=None):
        """Equal pieces."""
        return self._gather(output, input, self.rank() * (input.nbytes // self.size()))

    def _reduce_scatter_base(self, output, input, opts=None):
        return self._sum(input.view(-1), output.view(-1), self.rank() * output.nbytes, opts)

    def allreduce(self, tensors, opts=None):
        return self._sum(tensors[0].view(-1), tensors[0].view(-1), 0, opts)

    # torch 2.13's names
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base

    def _gather(self, output, input, first_byte):
        """Each piece of output <- a rank's input from first_byte on, in rank order."""

        def collect(n):
            for rank, piece in enumerate(output.view(-1).chunk(self.size())):
                if piece.data_ptr() != input.data_ptr():  # in-place: it is there already
                    piece.copy_(self.gathers.read(n, rank, first_byte, piece))

        return Work(self.gathers, input.view(-1), collect)

    def _sum(self, flat, part, first_byte, opts):
        """part <- the sum over the ranks of `flat` from first_byte on, in rank order on every
        rank: the results are bit-identical."""
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError("the shm backend only sums")

        def collect(n):
            read = lambda rank: self.sums.read(n, rank, first_byte, part).to(part.device)
            torch.add(read(0), read(1), out=part)
            for rank in range(2, self.size()):
                part.add_(read(rank))

        return Work(self.sums, flat, collect)


dist.Backend.register_backend("shm", ShmGroup, extended_api=True, devices=["cpu", "cuda"])
