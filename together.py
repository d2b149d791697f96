"""How ranks start and leave together: all of them, in bounded time, with one line for the user.

Starting. torchrun gives all ranks a key-value store, and keeps it, keys and all, when it restarts them
(--max-restarts). So the first thing that they do is to find a name for this attempt (`meet`); all
they say later, the process groups too, is said under that name. Then they compare notes (`agree`).

Leaving.

    why                        what happens                                              exit code
    wrong input                all ranks compare notes before training and leave         2
    disk full, divergence      as found; rank by rank, or all at once                    2
    a rank is lost             gloo's others notice at once or after --timeout_s         1
    SIGTERM, Ctrl-C            at once, or with --save_on_exit after a checkpoint        128 + signal

Whoever comes first says why, the others leave silently. torchrun stops the remaining ranks of its
node as soon as one has gone (SIGTERM, after 30 s SIGKILL) and adds a report of its own.

Stopping together. A signal reaches the ranks at different moments, and a rank that stops where
another does not leaves it waiting for ever. So each replica passes a gate before every step that it
may share with others (`together`), and the first to come decides for all what the gate is, by one
atomic compare-and-set in torchrun's store:

    between two steps:
        asked = somebody in this replica has had a signal      # rides on the gradient norm's all-reduce
        if asked or together:
            gate k is "open" or, if asked, "closed", unless somebody has decided before
            if it is closed: save a checkpoint and leave       # so does everybody, right here
            if together: k <- k + 1

Nobody is past a gate that is closed, so all replicas stop in the same round: methods in lockstep,
which have a gate at every step, at the same step.
"""

import json
import os
import signal
import sys
import time
import uuid

import torch.distributed as dist

from flags import UserError
from mesh import contact

MEET_S = 600  # how long ranks wait for the slowest to start


def meet(store, rank: int, world_size: int) -> tuple:
    """(a store of this attempt alone, has torchrun restarted the run?). Rank 0 names the attempt; another rank
    believes the name only beside its own latest hello, as it may be one that an earlier attempt has left."""
    hello, deadline = uuid.uuid4().hex, time.monotonic() + MEET_S
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))  # counted by each node for itself
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
    raise UserError(f"not all of the {world_size} ranks have started within {MEET_S} s")


def agree(store, rank: int, world_size: int, error: str, fingerprint: str):
    """All ranks leave together if one has an error: rank 0 prints the first, every rank exits with code 2."""
    # torchrun ends the other ranks at the first exit it sees; here each is about to exit by itself
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    store.set(f"set-up/{rank}", f"{error}\n{fingerprint}")
    answers = [store.get(f"set-up/{r}").decode().split("\n", 1) for r in range(world_size)]
    error = next((theirs for theirs, _ in answers if theirs), "")
    if not error and len({theirs for _, theirs in answers}) > 1:
        error = "the ranks differ in their flags or read different corpora: start them all alike"
    if error:
        if rank == 0:
            print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    signal.signal(signal.SIGTERM, before)


class Leaving:
    """Signals, gates and last words of one rank."""

    def __init__(self, store, save_first: bool):
        self.store, self.save_first = store, save_first
        self.signal = 0  # the first one that came, if it is to wait for a checkpoint
        self.gate = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        if self.save_first:
            self.signal = self.signal or number
        else:
            self.end(128 + number, f"stopped by {signal.Signals(number).name}")

    def asked(self) -> float:
        return float(self.signal > 0)

    def stops_here(self, asked: bool, together: bool) -> bool:
        """Between two steps, on all ranks of a replica with the same arguments. Costs a round trip to the store."""
        if not (self.save_first and (asked or together)):
            return False
        mine = f"closed {int(self.signal)}" if asked else "open"
        with contact():
            answer = self.store.compare_set(f"gate/{self.gate}", "", mine).decode()
        self.gate += together
        if answer == "open":
            return False
        self.signal = self.signal or int(answer.split()[1]) or signal.SIGTERM
        return True

    def end(self, code: int, line: str, lost: bool = False):
        """Leave at once; the first rank to do so prints the line, and so does whoever has lost the others and the
        store with them. No destructor gets to wait for lost ranks."""
        try:
            first = self.store.compare_set("last words", "", str(os.getpid())) == str(os.getpid()).encode()
        except RuntimeError:
            first = lost
        if first:
            print(f"train.py: {line}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
