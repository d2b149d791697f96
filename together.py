"""How ranks start and leave together: all of them, in bounded time, with one line for the user.

Starting. torchrun gives all ranks a key-value store, and keeps it, keys and all, when it restarts
them (--max-restarts). So the first thing that they do is to find a name for this attempt (`meet`);
all they say later, the process groups too, is said under that name. Then they compare notes
(`agree`).

Leaving.

    why                    what happens                                          exit code
    wrong input            all ranks compare notes before training and leave     2
    disk full, divergence  as found; rank by rank, or all at once                2
    a rank is lost         gloo's others notice at once or after --timeout_s     1
    SIGTERM, Ctrl-C        at once, or with --save_on_exit after a checkpoint    128 + signal

Whoever comes first says why, the others leave silently. torchrun stops the remaining ranks of its
node as soon as one has gone (SIGTERM, after 30 s SIGKILL) and adds a report of its own.

Stopping together. A signal reaches the ranks at different moments, and a rank that stops where
another does not leaves it waiting for ever. So the first to have one leaves word in the store,
where every replica looks at the end of each step, and each replica passes a gate before every step
that it may share with others (`together`). The first to come decides for all what a gate is, by one
atomic compare-and-set:

    between two steps:
        asked = somebody has had a signal  # known to all ranks of this replica alike:
        if asked or together:              #   it rides on the gradient norm's all-reduce
            gate k is "open" or, if asked, "closed", unless somebody has decided before
            if it is closed: save a checkpoint and leave  # so does everybody, right here
            if together: k <- k + 1

Nobody is past a gate that is closed, so all replicas stop in the same round: methods in lockstep,
which have a gate at every step, at the same step.
"""

import concurrent.futures
import json
import os
import signal
import sys
import threading
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from flags import UserError
from mesh import LostRank, contact

MEET_S = 600  # how long ranks wait for the slowest to start


def meet(store, rank: int, world_size: int) -> tuple:
    """(a store of this attempt alone, has torchrun restarted the run?). Rank 0 names the attempt;
    another rank believes the name only beside its own latest hello, as it may be one that an
    earlier attempt has left. Raises LostRank if not all ranks have come within MEET_S."""
    store.set_timeout(timedelta(seconds=MEET_S))
    hello, deadline = uuid.uuid4().hex, time.monotonic() + MEET_S
    # counted by each node for itself
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    with contact():
        store.set(f"hello/{rank}", f"{hello} {restarts}")
        if rank == 0:
            name, again = uuid.uuid4().hex, store.check(["attempt"])
            arrived = [f"{name}/arrived/{r}" for r in range(1, world_size)]
        while time.monotonic() < deadline:
            if rank == 0:
                hellos = [store.get(f"hello/{r}").decode().split() for r in range(world_size)]
                again |= any(int(count) for _, count in hellos)
                store.set("attempt", json.dumps([name, [word for word, _ in hellos], again]))
                if not arrived or store.check(arrived):
                    return dist.PrefixStore(name, store), again
            else:
                name, hellos, again = json.loads(store.get("attempt"))
                if hellos[rank : rank + 1] == [hello]:
                    store.set(f"{name}/arrived/{rank}", "")
                    return dist.PrefixStore(name, store), again
            time.sleep(0.02)
    raise LostRank(f"not all of the {world_size} ranks have started within {MEET_S} s")


def agree(store, rank: int, world_size: int, error: str, fingerprint: str):
    """Raises UserError, on all ranks alike, if one of
    them has an error or differs from the others."""
    store.set(f"set-up/{rank}", f"{error}\n{fingerprint}")
    answers = [store.get(f"set-up/{r}").decode().split("\n", 1) for r in range(world_size)]
    error = next((theirs for theirs, _ in answers if theirs), "")
    if not error and len({theirs for _, theirs in answers}) > 1:
        error = "the ranks differ in their flags or read different corpora: start them all alike"
    if error:
        raise UserError(error)


class Store:
    """torch's store with patience that ends: whatever fails, or takes longer
    than timeout_s, raises LostRank. (A TCPStore waits for ever for a host
    that is silent.) Costs a tenth of a millisecond a call on one machine."""

    def __init__(self, store, timeout_s: float):
        self.store, self.timeout_s = store, timeout_s
        self.thread = concurrent.futures.ThreadPoolExecutor(1)

    def __getattr__(self, operation):
        def call(*args):
            with contact():
                answer = self.thread.submit(getattr(self.store, operation), *args)
                try:
                    return answer.result(self.timeout_s)
                except concurrent.futures.TimeoutError:
                    raise LostRank(f"the store is silent for {self.timeout_s:g} s") from None

        return call


class Leaving:
    """Signals, gates and last words of one rank."""

    def __init__(self, rank: int):
        self.rank, self.store = rank, None
        self.save_first = False  # a signal waits for a checkpoint
        self.busy = False  # a signal has to wait: all ranks are about to leave together, or not
        self.signal = 0  # the first one that had to wait
        self.told, self.gate = False, 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        if self.save_first or self.busy:
            self.signal = self.signal or number
        else:
            self.end(128 + number, f"stopped by {signal.Signals(number).name}")

    def wait_for_a_checkpoint(self, do: bool):
        """From now on, or no longer."""
        self.save_first, self.busy = do, False
        if self.signal and not do:
            self.on_signal(self.signal, None)

    def asked(self, speaks: bool) -> float:
        """The signal that any rank has had, 0 for none or if it
        is for another rank to say so. At each step's end."""
        if self.save_first and self.signal and not self.told:
            self.store.set("asked", str(int(self.signal)))
            self.told = True
        if not (self.save_first and speaks and (self.told or self.store.check(["asked"]))):
            return 0.0
        self.told = True
        return float(self.store.get("asked"))

    def stops_here(self, asked: int, together: bool) -> bool:
        """Between two steps, on all ranks of a replica with the same arguments."""
        if not (self.save_first and (asked or together)):
            return False
        mine = f"closed {asked}" if asked else "open"
        answer = self.store.compare_set(f"gate/{self.gate}", "", mine).decode()
        self.gate += together
        if answer == "open":
            return False
        self.signal = int(answer.split()[1])
        return True

    def end(self, code: int, line: str, lost: bool = False):
        """Leave at once; the first rank to do so prints the line, and so does
        whoever has lost the others and the store with them. No destructor gets
        to wait for lost ranks, and nobody waits for the store for long."""
        threading.Timer(5, os._exit, [code]).start()
        mine = f"{self.rank} {os.getpid()}"
        try:
            first = self.rank == 0 if self.store is None else self.claims(mine) == mine
        except LostRank:
            first = lost
        if first:
            print(f"train.py: {line}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def claims(self, mine: str) -> str:
        self.store.timeout_s = min(3.0, self.store.timeout_s)
        return self.store.compare_set("last words", "", mine).decode()
