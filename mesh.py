r"""The replicas x shards grid: the process groups, every collective, the byte ledger.

    world_size = M replicas * N shards; four ranks with --shards 2:

                   shard 0     shard 1
                 +-----------+-----------+
      replica 0  |  rank 0   |  rank 1   |  <- shard group: one replica, consecutive ranks, fast
                 +-----------+-----------+     links; communicates every step
      replica 1  |  rank 2   |  rank 3   |
                 +-----------+-----------+
                       ^ sync group: the ranks that hold the same shard, slow links;
                         communicates once per round (in the warm-up every step)

Tensors cross ranks only here: `grep -rn '^ *# \[s' --include=*.py .` lists every collective. The
ledger counts in sent["shard"] and sent["sync"] the bytes that this rank has sent, as bandwidth-
optimal algorithms would: all-gather, reduce-scatter and all-to-all (n-1)/n of the whole vector,
all-reduce 2(n-1)/n of its payload, send-receive all of it.

(A first reader can stop here.)

Collectives are asynchronous and return a handle. gather_rows, sum_over_ranks and all_gather_object
wait. `wait()` blocks the stream on NCCL and the host on gloo and shm (plumbing/shm.py). On a GPU,
issue a collective and wait for it on the stream on which its tensors were allocated. In a group of
one rank an operation does nothing and is not counted (send_receive needs two).

If a rank has died, or is silent for timeout_s, the others raise RankLostError. NCCL is different:
its watchdog ends the process when an operation has not finished timeout_s after its issue, and
prints lines of its own.
"""

import re
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.profiler import record_function


def found_in_torch(*names):
    """The first of these functions that this torch has. A torch that was built without any is
    enough for plain/."""
    return next((getattr(dist, name) for name in names if hasattr(dist, name)), None)


# torch 2.13 renamed these two and warns about the old names; torch 2.11 has only the old ones.
all_gather_single = found_in_torch("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = found_in_torch("reduce_scatter_single", "reduce_scatter_tensor")

# The sync of a round between machines occupies at most this many SMs of a GPU, see
# _nccl_options(). Not measured yet.
SYNC_CTAS = 4


class RankLostError(Exception):
    """Another rank has died or is silent. The text is one line, with torch's message."""

    exit_code = 1


@contextmanager
def translate_comm_errors():
    """Raise RankLostError where torch raises RuntimeError: that is how it reports lost ranks."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # a fault of this rank's GPU
        raise
    except RuntimeError as error:
        text = str(error).strip().split("\n")[0]
        if re.search("^ProcessGroup|Check failed", text):  # a wrong argument, for example a size
            raise
        # gloo's text begins with its source file and ends with advice.
        if found := re.match(r"\[\S+:\d+\] (.*?)(\. |$)", text):
            text = found[1]
        hint = "--resume auto continues from the last checkpoint, if there is one"
        raise RankLostError(f"lost contact with another rank ({text}); {hint}") from error


class Handle:
    """A collective in flight. mesh: the Mesh that counts how long the host waits; None in a shard
    group."""

    def __init__(self, works=(), name="", mesh=None):
        self.works = works
        self.name = name
        self.mesh = mesh

    def wait(self):
        if not self.works:
            return
        began = time.perf_counter()
        link_s = 0.0
        with translate_comm_errors(), record_function(f"wait: {self.name}"):
            for work in self.works:
                work.wait()
                link_s += getattr(work, "link_s", 0.0)  # waited for a simulated link
        if self.mesh:
            ended = time.perf_counter()
            self.mesh.waited("others", began, ended - link_s)
            self.mesh.waited("link", ended - link_s, ended)
        self.works = ()


class Group:
    """A row or a column of the grid."""

    backend = "gloo"

    def __init__(self, name: str, ranks: list, rank: int, process_group):
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.process_group = process_group
        self.call = {"group": process_group, "async_op": True}  # for torch's functions

    @property
    def elsewhere(self) -> float:
        """The share of a vector that the other ranks hold."""
        return (self.size - 1) / self.size

    def own_piece(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of this rank's piece of a flat vector."""
        return whole.chunk(self.size)[self.index]


class Mesh:
    """The grid as seen by one rank. backend(ranks, crosses_replicas) names the backend of a group;
    few_sms(ranks): whether NCCL gives that sync group few SMs; alone: ignore the other ranks.
    Things that travel on the host use torch.distributed's default group, which must be gloo. link:
    between replicas, a simulate.SimulatedLink or None."""

    def __init__(
        self,
        shards,
        device,
        timeout_s=600,
        backend=None,
        few_sms=lambda ranks: False,
        alone=False,
    ):
        self.world_size = 1
        self.rank = 0
        if dist.is_initialized() and not alone:
            self.world_size = dist.get_world_size()
            self.rank = dist.get_rank()
        self.device = device
        self.shards = shards
        self.replicas = self.world_size // shards
        self.replica, self.shard_index = divmod(self.rank, shards)
        self.timeout = timedelta(seconds=timeout_s)
        self.backend = backend
        self.link = None
        self.few_sms = few_sms
        grid = torch.arange(self.world_size).view(self.replicas, self.shards)
        self.shard_group = self._group("shard", grid, self.replica)
        self.sync_group = self._group("sync", grid.T, self.shard_index)
        self.sent = {"shard": 0.0, "sync": 0.0}  # bytes
        self.calls = Counter()  # operations, by name
        # Seconds that the host has waited for other replicas, and for a simulated link. (For waits
        # on NCCL see RoundRecord.stall().)
        self.waited_s = {"others": 0.0, "link": 0.0}
        self.spans = None  # --timeline: a list of (name, begin, end), seconds of perf_counter()

    def _group(self, name, grid, row):
        process_groups = []
        for ranks in grid.tolist():  # every rank takes part in creating every group
            if len(ranks) == 1:
                process_groups.append(None)
                continue
            backend = "gloo"
            options = None
            if self.backend:
                backend = self.backend(ranks, name == "sync")
            if backend == "nccl":
                options = self._nccl_options(ranks, name == "sync")
            process_groups.append(dist.new_group(ranks, self.timeout, backend, options))
        ranks = grid[row].tolist()
        group = Group(name, ranks, self.rank, process_groups[row])
        if group.size > 1:
            group.backend = dist.get_backend(group.process_group)
        if group.backend == "nccl":
            # NCCL connects a group in its first operation, for which it needs all ranks.
            # [start] all-reduce, 1 scalar, once per group
            dist.all_reduce(torch.zeros(1, device=self.device), group=group.process_group)
        return group

    def _nccl_options(self, ranks, crosses_replicas):
        """A sync group on a slow link gets few SMs, because NCCL's kernels hold them until the link
        has delivered. A shard group gets priority, because the computation of the next layer waits
        for it."""
        options = dist.ProcessGroupNCCL.Options()
        if crosses_replicas and self.few_sms(ranks):
            options.config.max_ctas = SYNC_CTAS
        options.is_high_priority_stream = not crosses_replicas
        options._timeout = self.timeout  # new_group() warns if it differs
        return options

    def waited(self, cause: str, begin: float, end: float):
        self.waited_s[cause] += end - begin
        self.note(f"wait for {cause}", begin, end)

    def note(self, name: str, begin: float, end: float):
        if self.spans is not None:
            self.spans.append((name, begin, end))

    @contextmanager
    def uncounted(self):
        """What is sent and waited for inside does not count: evaluation is not training."""
        sent = dict(self.sent)
        waited_s = dict(self.waited_s)
        yield
        self.sent.update(sent)
        self.waited_s.update(waited_s)

    @contextmanager
    def _collective(self, group, operation, sent_bytes):
        """What surrounds the start of every collective: its name in the profiler, errors of lost
        ranks, the ledger, the host's waiting, the simulated link. Yields a Handle, into which the
        block puts torch's works. This rank sends sent_bytes."""
        handle = Handle(name=f"{group.name} {operation}")
        began = time.perf_counter()
        with translate_comm_errors(), record_function(handle.name):
            yield handle
        self.calls[handle.name] += 1
        self.sent[group.name] += sent_bytes
        if group is self.sync_group:
            handle.mesh = self
            self.waited("others", began, time.perf_counter())  # shm may wait for a free slot
            if self.link:
                handle.works = [self.link.carry(handle.works, sent_bytes)]

    def all_gather(self, whole: torch.Tensor, group: Group) -> Handle:
        """Fill `whole` (flat, group.size equal pieces); this rank's own piece is in place."""
        if group.size == 1:
            return Handle()
        own = group.own_piece(whole)
        sent_bytes = whole.nbytes * group.elsewhere
        with self._collective(group, "all-gather", sent_bytes) as handle:
            handle.works = [all_gather_single(whole, own, **group.call)]
        return handle

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, group: Group) -> Handle:
        """part <- this rank's piece of the sum of `whole` over the group. `whole` may be reused
        after wait()."""
        if group.size == 1:
            return Handle()
        sent_bytes = whole.nbytes * group.elsewhere
        with self._collective(group, "reduce-scatter", sent_bytes) as handle:
            handle.works = [reduce_scatter_single(part, whole, **group.call)]
        return handle

    def all_reduce(self, x: torch.Tensor, group: Group) -> Handle:
        """x <- its sum over the group, in place; bit-identical on all its ranks."""
        if group.size == 1:
            return Handle()
        # A reduce-scatter, then an all-gather.
        sent_bytes = 2 * x.nbytes * group.elsewhere
        with self._collective(group, "all-reduce", sent_bytes) as handle:
            handle.works = [dist.all_reduce(x, **group.call)]
        return handle

    def all_to_all(self, received: torch.Tensor, pieces: torch.Tensor, group: Group) -> Handle:
        """received and pieces have one block of rows per rank, in rank order: received's block i
        <- the block of rank i's `pieces` that is for this rank."""
        if group.size == 1:
            return Handle()
        sent_bytes = pieces.nbytes * group.elsewhere
        with self._collective(group, "all-to-all", sent_bytes) as handle:
            handle.works = [dist.all_to_all_single(received, pieces, **group.call)]
        return handle

    def send_receive(self, received: torch.Tensor, x: torch.Tensor, partner: int, group: Group):
        """received <- the partner's x. partner: its index in the group; it calls this too."""
        peer = group.ranks[partner]
        receive = dist.P2POp(dist.irecv, received, peer, group.process_group)
        send = dist.P2POp(dist.isend, x, peer, group.process_group)
        with self._collective(group, "send-receive", x.nbytes) as handle:
            # Both in one call: a send may have to wait for the partner's receive.
            handle.works = dist.batch_isend_irecv([receive, send])
        return handle

    def gather_rows(self, row: torch.Tensor, group: Group) -> torch.Tensor:
        """The rows (n,) of all ranks of the group, (group.size, n); waits for them."""
        rows = row.new_empty(group.size, len(row))
        rows[group.index] = row
        self.all_gather(rows.view(-1), group).wait()
        return rows

    def sum_over_ranks(self, row: torch.Tensor) -> torch.Tensor:
        """The sum of the rows (n,) of all ranks, bit-identical on all of them; waits for it. The
        argument may be overwritten."""
        if min(self.replicas, self.shards) == 1:  # all ranks are one group
            group = self.sync_group if self.shards == 1 else self.shard_group
            self.all_reduce(row, group).wait()
            return row
        # No group has all ranks, and two sums in turn could add in another order on each rank. So
        # every rank gathers all rows and adds them in rank order.
        rows = self.gather_rows(row, self.shard_group).view(-1)
        rows = self.gather_rows(rows, self.sync_group).view(self.world_size, -1)
        return rows.sum(dim=0)

    def all_gather_object(self, thing) -> list:
        """What every rank passes, in rank order; on the host, for rare things."""
        things = [thing] * self.world_size
        if self.world_size > 1:
            with translate_comm_errors():
                dist.all_gather_object(things, thing)
        return things
