"""Who talks to whom: the replicas x shards grid, its two kinds of group, every collective, the byte
ledger.

    world_size = M replicas * N shards; four ranks with --shards 2:

                   shard 0     shard 1
                 +-----------+-----------+
      replica 0  |  rank 0   |  rank 1   |  <- shard group: one replica, consecutive ranks, fast
                 +-----------+-----------+     links, talks every step (all-gather, reduce-scatter)
      replica 1  |  rank 2   |  rank 3   |
                 +-----------+-----------+
                       ^ sync group: the ranks that hold the same shard, slow links,
                         talks once per round

    group  operation       payload            what for
    shard  all-gather      one layer          parameters, before computing the layer
    shard  reduce-scatter  one layer          its gradient
    shard  all-reduce      a few scalars      norms that span the shards, the loss, a clock
    shard  all-gather      one scalar         EDiT's clipping
    sync   all-reduce      a layer's shard    gradients (mini-batch) or pseudo-gradients (local SGD)
    sync   all-gather      a vector of norms  EDiT's penalty, DiLoCo's log

No other file lets tensors cross ranks in training, so nothing escapes the ledger: `sent[group]` is
what this rank has sent, in bytes, as a bandwidth-optimal algorithm would: all-gather and
reduce-scatter (n-1)/n of the whole vector, all-reduce 2(n-1)/n of its payload.
`calls["group operation"]` counts them.

gloo and GPUs: with --backend gloo ranks may share a GPU, to try things on one; everything they say
to each other then goes through host memory.

A rank that has died, or says nothing for `timeout_s`, makes the operations of the others raise
LostRank (gloo; NCCL's watchdog ends the process after the same time).

Every operation returns a handle at once (through an outbox, see below: as soon as there is a free
slot, so no more than two gathers and two sums may be under way in a group); `wait()` orders what
follows after it (NCCL: the stream waits, gloo: the host does). Ranks of a group must issue its
operations in the same order. A group of one rank has nothing to say: the operation costs nothing
and is not counted.

gloo's own all-gather and reduce-scatter pass everything around a ring with a copy at every hop.
Here, on one machine, layers, their gradients and all that is smaller go through shared memory
(outbox.py), but not EDiT's all-reduces, of which all layers' are under way at once.
Where there is no outbox, each rank exchanges the pieces with each other rank directly, into their
final place: on two ranks of one machine this took 0.6x to 0.8x the time for an all-gather of 2 to 8
million elements (and as long as gloo's own for 0.2 million), and 0.4x to 0.5x for a reduce-scatter.
"""

import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.profiler import record_function

from outbox import open_outbox, slot_sizes

# torch 2.13 renamed these and warns at the old names, which is all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class LostRank(Exception):
    """Another rank has died or is silent. Its text is what torch says of it, in one line."""


@contextmanager
def contact():
    """torch reports lost neighbours as RuntimeError: here they get a name of their own."""
    try:
        yield
    except RuntimeError as error:
        raise LostRank(str(error).strip().split("\n")[0]) from error


class Handle:
    """Operations in flight, named for a profile, and what to do, once, when they have arrived.
    `waited_s`, if given, is where the seconds that the host waits are added up."""

    def __init__(self, works=(), name="", then=None, waited_s=None):
        self.works, self.name, self.then, self.waited_s = works, name, then, waited_s

    def wait(self):
        if not self.works:
            return
        began = time.perf_counter()
        with contact(), record_function(f"wait: {self.name}"):
            for work in self.works:
                work.wait()
        if self.waited_s:
            link_s = sum(getattr(work, "link_s", 0.0) for work in self.works)
            self.waited_s["link"] += link_s
            self.waited_s["others"] += time.perf_counter() - began - link_s
        if self.then:
            self.then()
        self.works, self.then = (), None


class Pickup:
    """What has to be collected from outboxes. Works like torch's Work."""

    def __init__(self, collect):
        self.wait = collect


def gather_through(outbox, own, pieces) -> Pickup:
    """Fill pieces with what the ranks have posted; own is in its place."""
    n = outbox.post(own)

    def collect():
        for rank, piece in enumerate(pieces):
            if rank != outbox.index:
                piece.copy_(outbox.take(n, rank, 0, piece))
        outbox.took(n)

    return Pickup(collect)


def add_through(outbox, flat, part, first: int) -> Pickup:
    """part <- the sum of what stands from byte `first` on in the ranks' `flat`."""
    n = outbox.post(flat)

    def collect():  # in rank order on every rank
        terms = [outbox.take(n, rank, first, part) for rank in range(outbox.size)]
        torch.add(terms[0], terms[1], out=part)
        for term in terms[2:]:
            part.add_(term)
        outbox.took(n)

    return Pickup(collect)


class Stall:
    """How long the device stands in `with stall:` blocks: `ms()` adds them up (and
    reads the device). On CUDA the host only queues the waiting, so the time is
    taken by events in the stream."""

    def __init__(self, device: torch.device):
        self.cuda, self.spans = device.type == "cuda", []

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self):
        self.began = self._now()

    def __exit__(self, *exception):
        self.spans.append((self.began, self._now()))

    def ms(self) -> float:
        if not self.cuda:
            return sum(1e3 * (end - began) for began, end in self.spans)
        torch.cuda.synchronize()
        return sum(began.elapsed_time(end) for began, end in self.spans)


class Group:
    """One row or column of the grid: its ranks and this rank's place among them."""

    def __init__(self, name, ranks, index, process_group):
        self.name, self.ranks, self.index, self.process_group = name, ranks, index, process_group
        self.size = len(ranks)
        self.outboxes = {}  # operation -> Outbox, see Mesh.share_memory


class Mesh:
    """The grid as seen by one rank. `shard` and `sync` are this rank's two groups."""

    def __init__(
        self, shards: int, device: torch.device, timeout_s: float = 600, alone: bool = False
    ):
        # Plain `python train.py` is a world of one, without process groups; so is a
        # rank that wants to be alone.
        started = dist.is_initialized() and not alone
        self.world_size = dist.get_world_size() if started else 1
        self.rank = dist.get_rank() if started else 0
        if self.world_size % shards:
            raise ValueError(
                f"{self.world_size} ranks cannot be cut into replicas of {shards} shards"
            )
        self.device, self.shards, self.replicas = device, shards, self.world_size // shards
        self.replica, self.shard_index = divmod(self.rank, shards)
        grid = torch.arange(self.world_size).view(self.replicas, self.shards)
        self.timeout, self.host = timedelta(seconds=timeout_s), None
        self.shard = self._group("shard", grid, self.replica)
        self.sync = self._group("sync", grid.T, self.shard_index)
        self.exchange_directly = started and dist.get_backend() == "gloo"
        self.staged = self.exchange_directly and device.type == "cuda"  # through host memory
        self.works_on = torch.device("cpu") if self.staged else device  # where operations happen
        self.sent = {"shard": 0.0, "sync": 0.0}  # bytes
        self.calls = Counter()
        self.wire = None  # simulate.py's slow link, which sync-group operations then travel on
        # Seconds this rank's host has waited for sync-group operations: for the
        # simulated link, and for the other replicas (and the real link, if that is
        # slow). NCCL's waits are the stream's: see Stall.
        self.waited_s = {"others": 0.0, "link": 0.0}

    def _group(self, name, grid, row):
        process_groups = []
        for ranks in grid.tolist():  # every rank takes part in creating every group
            alone = len(ranks) == 1
            process_groups.append(None if alone else dist.new_group(ranks, timeout=self.timeout))
        ranks = grid[row].tolist()
        return Group(name, ranks, ranks.index(self.rank), process_groups[row])

    def exchange(self, thing) -> list:
        """What every rank passes, in rank order, through the host: for the rare things
        that are not tensors."""
        if self.world_size == 1:
            return [thing]
        things = [None] * self.world_size
        with contact():
            dist.all_gather_object(things, thing, group=self.host_group())
        return things

    def host_group(self):
        """A gloo group of all ranks, for what has to be agreed on outside the device
        (None: the default group)."""
        if self.world_size > 1 and dist.get_backend() != "gloo" and self.host is None:
            self.host = dist.new_group(backend="gloo", timeout=self.timeout)
        return self.host

    def _launch(self, works, group, operation, payload_bytes, share, then=None):
        """Count an operation of which this rank sends share * (n-1)/n * payload_bytes;
        a handle for `works`."""
        sent_bytes = share * (group.size - 1) / group.size * payload_bytes
        name = f"{group.name} {operation}"
        self.calls[name] += 1
        self.sent[group.name] += sent_bytes
        if group is not self.sync:
            return Handle(works, name, then)
        if self.wire:
            works = [self.wire.carry(works, sent_bytes, hops=share * (group.size - 1))]
        return Handle(works, name, then, self.waited_s)

    def share_memory(self, layer_bytes: int, gradient_bytes: int):
        """From now on let groups whose ranks are on one machine exchange what they can
        through outbox.py: layers to gather and their gradients, of so many bytes at most.
        Collective; for one model per mesh."""
        if not self.exchange_directly or self.staged:
            return
        sizes = slot_sizes(self.shards, layer_bytes, gradient_bytes)
        for group in (self.shard, self.sync):
            group.outboxes = {}
            with contact():
                both = sizes[group.name]
                gathers, sums = (open_outbox(group, size, self.timeout) for size in both)
            # All or none: replicas that add in another order would drift apart by a bit.
            if all(self.exchange(None not in (gathers, sums))):
                group.outboxes = {"all-gather": gathers, "reduce-scatter": sums, "all-reduce": sums}

    def outbox(self, group: Group, operation: str, payload_bytes: int = 0):
        """The group's outbox for an operation, or None: if it has none, the payload is too large,
        or a simulated link has to carry it."""
        outbox = group.outboxes.get(operation)
        simulated = group is self.sync and self.wire is not None
        return None if simulated or outbox is None or payload_bytes > outbox.slot_bytes else outbox

    def _stage(self, x: torch.Tensor) -> torch.Tensor:
        """What gloo can send: x itself or, of a GPU's memory, a copy on the host."""
        return x.to("cpu", copy=True) if self.staged else x

    def _return(self, here, x):
        """What to do when a staged copy of x has arrived."""
        return None if here is x else lambda: x.copy_(here)

    def all_gather(self, whole: torch.Tensor, group: Group) -> Handle:
        """Fill `whole` (flat, group.size equal pieces), in which this rank's own piece is
        in place already."""
        if group.size == 1:
            return Handle()
        here = self._stage(whole)
        pieces = here.chunk(group.size)
        own = pieces[group.index]
        with contact(), record_function(f"{group.name} all-gather"):
            if outbox := self.outbox(group, "all-gather", own.nbytes):
                works = [gather_through(outbox, own, pieces)]
            elif self.exchange_directly:
                works = self._exchange([own] * group.size, pieces, group, tag=1)
            else:
                works = [_all_gather(here, own, group=group.process_group, async_op=True)]
        return self._launch(works, group, "all-gather", whole.nbytes, 1, self._return(here, whole))

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, group: Group) -> Handle:
        """part <- this rank's piece of the sum of `whole` over the group (alone: they are the same
        memory). `whole` may be reused after wait()."""
        if group.size == 1:
            return Handle()
        named = record_function(f"{group.name} reduce-scatter")
        if not self.exchange_directly:
            with contact(), named:
                works = [_reduce_scatter(part, whole, group=group.process_group, async_op=True)]
            return self._launch(works, group, "reduce-scatter", whole.nbytes, 1)
        if outbox := self.outbox(group, "reduce-scatter", whole.nbytes):
            with contact(), named:
                works = [add_through(outbox, whole, part, outbox.index * part.nbytes)]
            return self._launch(works, group, "reduce-scatter", whole.nbytes, 1)
        mine = self._stage(whole).chunk(group.size)
        here = torch.empty_like(mine[0]) if self.staged else part
        arriving = [
            own if i == group.index else torch.empty_like(here) for i, own in enumerate(mine)
        ]

        def add():  # in rank order on every rank
            torch.add(arriving[0], arriving[1], out=here)
            for piece in arriving[2:]:
                here.add_(piece)
            part.copy_(here)  # nothing to do if it is the same

        with contact(), named:
            works = self._exchange(mine, arriving, group, tag=2)
        return self._launch(works, group, "reduce-scatter", whole.nbytes, 1, then=add)

    def _exchange(self, outgoing, incoming, group, tag):
        """Send outgoing[i] to the i-th other rank of the group and receive incoming[i] from it."""
        works = []
        for distance in range(1, group.size):  # everyone starts with another neighbour
            to = (group.index + distance) % group.size
            source = (group.index - distance) % group.size
            pg = group.process_group
            works.append(dist.irecv(incoming[source], group.ranks[source], group=pg, tag=tag))
            works.append(dist.isend(outgoing[to], group.ranks[to], group=pg, tag=tag))
        return works

    def all_reduce(self, x: torch.Tensor, group: Group, many: bool = False) -> Handle:
        """x <- its sum over the group, in place; bit-identical on all its ranks. many: more of them
        will be under way at once than an outbox has slots."""
        if group.size == 1:
            return Handle()
        here, outbox = self._stage(x), None if many else self.outbox(group, "all-reduce", x.nbytes)
        with contact(), record_function(f"{group.name} all-reduce"):
            if outbox:
                works = [add_through(outbox, x, x, 0)]
            else:
                works = [dist.all_reduce(here, group=group.process_group, async_op=True)]
        return self._launch(works, group, "all-reduce", x.nbytes, 2, self._return(here, x))

    def gather_rows(self, row: torch.Tensor, group: Group) -> torch.Tensor:
        """The rows (n,) of all the group's ranks, (group.size, n); returns when they are there."""
        rows = row.new_empty(group.size, len(row))
        rows[group.index] = row
        self.all_gather(rows.view(-1), group).wait()
        return rows
