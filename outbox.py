"""Ranks of one machine read each other's memory, instead of sending it through sockets.

The problem. gloo moves a tensor from one process to the next through a TCP socket: four copies,
half of them in the kernel, and a thread on each side that has to be woken up while all cores
compute. A step exchanges three times per layer; with small layers, the waking up is most of it.

Here every rank of a group has two outboxes, memory that its neighbours can read, one for what is
gathered and one for what is summed, with a few slots each:

    post(n):    wait until all neighbours have taken what was in slot n mod SLOTS
                copy my tensor into it;              posted[me, n mod SLOTS] <- n
    take(n):    for each neighbour: wait until posted[neighbour, n mod SLOTS] = n, use its piece
                taken[me, n mod SLOTS] <- n

No lock and no thread, and no system call if nobody has to wait: each word of `posted` and `taken`
has one writer, and an x86 processor shows stores to others in the order in which they were made (so
elsewhere, sockets it is). Who has to wait sleeps for moments, so that others can run. All ranks
post the same exchanges in the same order, and each has at most SLOTS of them under way in an
outbox. Two slots for gathers and two for sums let a rank be one layer ahead of its neighbours, so
that they rarely wait for each other's hiccups.

The memory has no name in any file system (memfd_create) and goes with the last process that maps
it, however that ends. A neighbour that dies while it is waited for is noticed through its pidfd,
one that is silent after the mesh's timeout.

    slots of              bytes per rank, SLOTS times
    shard group, gathers  P/N in the compute dtype, the largest layer's
            and sums      4 P, its gradient
    sync group, gathers   ROW, for norms
            and sums      4 P/N
"""

import os
import platform
import select
import time
import uuid
import weakref

import torch
import torch.distributed as dist

SLOTS = 2
WORDS = 2 * SLOTS * 8  # bytes: posted[SLOTS], taken[SLOTS]
ROW = 4096  # bytes of norms that EDiT's exchange can have per replica; more go through sockets


class Outbox:
    """This rank's slots and the neighbours'.
    slot_bytes: the largest exchange, equal on all ranks of the group."""

    def __init__(
        self, memories: list, neighbours: list, index: int, slot_bytes: int, timeout_s: float
    ):
        self.index, self.timeout_s, self.deaths = index, timeout_s, []
        for neighbour in neighbours:  # pidfds, readable from the moment that the process has ended
            self.deaths.append(select.poll())
            self.deaths[-1].register(neighbour, select.POLLIN)
            weakref.finalize(self, os.close, neighbour)
        self.size = len(memories)
        self.slot_bytes, self.count = slot_bytes, 0
        self.slots, self.posted, self.taken = [], [], []
        for memory in memories:
            words = memory[:WORDS].view(torch.int64).numpy()
            self.posted.append(words[:SLOTS])
            self.taken.append(words[SLOTS:])
            self.slots.append(memory[WORDS:].view(SLOTS, slot_bytes))

    def post(self, flat: torch.Tensor) -> int:
        """Put a flat tensor into the next slot. Returns the exchange's number."""
        self.count += 1
        n, slot = self.count, self.count % SLOTS
        if self.taken[self.index][slot] < n - SLOTS:
            raise AssertionError(
                f"more than {SLOTS} exchanges under way: wait for one, or say many=True"
            )
        for other in range(self.size):
            self._wait(self.taken[other], slot, n - SLOTS, other)
        self._view(self.index, slot, 0, flat).copy_(flat)
        self.posted[self.index][slot] = n
        return n

    def take(self, n: int, rank: int, first: int, like: torch.Tensor) -> torch.Tensor:
        """What `rank` of the group has posted in exchange n, from byte `first`
        on and as long as `like`: a view of its memory, good until took(n)."""
        self._wait(self.posted[rank], n % SLOTS, n, rank)
        return self._view(rank, n % SLOTS, first, like)

    def took(self, n: int):
        """This rank is done with exchange n."""
        self.taken[self.index][n % SLOTS] = n

    def _view(self, rank, slot, first, like):
        return self.slots[rank][slot, first : first + like.nbytes].view(like.dtype)

    def _wait(self, words, slot, n, other):
        tries, deadline = 0, None
        while words[slot] < n:
            tries += 1
            time.sleep(min(tries, 20) * 2e-5)
            if tries % 50 == 0:
                deadline = deadline or time.monotonic() + self.timeout_s
                if self.deaths[other].poll(0) and words[slot] < n:
                    raise RuntimeError("a neighbour has died")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"a neighbour is silent for {self.timeout_s:g} s")


def slot_sizes(shards: int, layer_bytes: int, gradient_bytes: int) -> dict:
    """Bytes of a slot, for gathers and for sums, of the shard and the sync group."""
    aligned = lambda size: -(-size // 64) * 64  # whatever the dtype
    return {
        "shard": (aligned(layer_bytes // shards), aligned(gradient_bytes)),
        "sync": (ROW, aligned(gradient_bytes // shards)),
    }


def open_outbox(group, slot_bytes: int, timeout):
    """An Outbox for a mesh's group, or None, for all of it, where that
    cannot be: ranks on several machines or in several containers, not
    Linux on x86, a limit on the size of files. Collective."""
    if group.size == 1:
        return None
    name = f"outbox-{uuid.uuid4().hex}"
    size, descriptor, memories, neighbours = WORDS + SLOTS * slot_bytes, None, [], []
    able = platform.machine() == "x86_64" and hasattr(os, "memfd_create")
    try:
        descriptor = os.memfd_create(name) if able else None
        os.ftruncate(descriptor, size) if able else None
    except OSError:
        able = False
    addresses, answers = [None] * group.size, [None] * group.size
    mine = (name, os.getpid(), descriptor, able)
    dist.all_gather_object(addresses, mine, group=group.process_group)
    able = all(theirs for *_, theirs in addresses)
    try:
        for its_name, process, number, _ in addresses if able else ():
            path = f"/proc/{process}/fd/{number}"
            if not os.readlink(path).startswith(f"/memfd:{its_name}"):
                raise OSError(f"{process} is another process here: the neighbour runs elsewhere")
            memories.append(torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
            neighbours.append(os.pidfd_open(process))
    except (OSError, RuntimeError):
        able = False
    dist.all_gather_object(answers, able, group=group.process_group)  # all have mapped it, or not
    if descriptor is not None:
        os.close(descriptor)
    if all(answers):
        return Outbox(memories, neighbours, group.index, slot_bytes, timeout.total_seconds())
    for number in neighbours:
        os.close(number)
    return None
