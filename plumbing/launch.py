"""How ranks start together and leave together: in bounded time, with one line for the user.

Starting. Every rank checks the whole command line, the corpus and the checkpoint before any process
group exists, and exchanges the result through the store of torchrun. So all ranks start, or all
print one line (rank 0) and exit with code 2.

Leaving.

    reason                what happens                                              exit code
    wrong input           all ranks leave before training                           2
    full disk, divergence the rank that finds it leaves, the others lose it         2 (others 1)
    a rank is lost        gloo, shm: the others leave at once or after --timeout_s  1
    SIGTERM, Ctrl-C       at once; with --save_on_exit after a checkpoint           128 + signal

The first rank to leave prints the reason, the others are silent. torchrun stops the remaining ranks
of its node (SIGTERM, after 30 s SIGKILL) and adds a report of its own.

Stopping with --save_on_exit. A stop is a vote to end the round early (method.py). The rank that has
the signal writes the key stop/k to the store before it enters sync k. No rank completes sync k
without it, so every rank that looks after sync k finds the key, and all save and leave at this
round end. With averaged gradients every step is a round, and the votes of all ranks travel with the
step's metrics.
"""

import ctypes
import dataclasses
import json
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import data
import simulate
from mesh import Mesh, RankLostError, translate_comm_errors
from plumbing import checkpoint, shm
from plumbing.config import UserError, explain, parse
from plumbing.plan import Plan

START_S = 600  # how long ranks wait for the slowest to start
STOPS = {signal.SIGINT, signal.SIGTERM}


# ---- starting ----


@dataclass
class Setup:
    """What set_up has made of the command line."""

    config: object  # config.Config
    method_config: object
    simulation: simulate.Config
    given: dict  # flags on the command line
    corpus: data.Corpus
    plan: Plan
    path: Path | None = None  # the checkpoint to continue
    saved: dict | None = None  # its state.json
    lock: int | None = None  # descriptor that holds the lock of the run's folder, on rank 0


def set_up(argv: list, methods: dict, rank: int, world_size: int) -> Setup:
    """Check everything that wrong input can break. Writes nothing. Raises UserError."""
    config, method_config, simulation, given = parse(argv, methods, simulate.Config)
    path = saved = None
    if config.dry_run and config.resume:
        raise UserError("--dry_run --resume: a dry run shows flags only; leave out --resume")
    if config.dry_run:
        world_size = config.replicas * config.shards or max(world_size, config.shards)
    resumed = checkpoint.run_folder(config.resume) if config.resume not in ("", "auto") else ""
    out_dir = config.out_dir or str(resumed) or f"out/{config.method}"
    if not config.dry_run:
        path = checkpoint.choose(config.resume, out_dir)
    if config.resume:
        saved = checkpoint.read(path) if path else None
        try:
            again = parse(argv, methods, simulate.Config, saved["flags"] if path else {})
        except (KeyError, TypeError, AttributeError) as error:
            raise checkpoint.damaged(path, f"flags: {error}") from None
        config, method_config, simulation, given = again
    config.out_dir = out_dir
    check_mesh(config, world_size)
    resolve_device(config)
    simulate.Stragglers(simulation, world_size // config.shards, config.seed)  # checks its flags
    corpus = data.load(config.data or None)
    data.check_windows(corpus, config.block_size)
    method = methods[config.method]
    plan = Plan(config, method, method_config, simulation, corpus.vocab_size, world_size)
    if not config.dry_run:
        plan.check_memory()
    if saved:
        checkpoint.check_resume(saved, config, given, corpus, world_size, path)
        checkpoint.verify(path, saved, rank, world_size)
    return Setup(config, method_config, simulation, given, corpus, plan, path, saved)


def check_mesh(config, world_size: int):
    M, N = config.replicas, config.shards
    if M and world_size != M * N:
        raise UserError(
            f"--replicas {M} --shards {N}: these are {M * N} ranks, but {world_size} have been "
            "started; change --nproc_per_node or --nnodes, or leave out --replicas"
        )
    if world_size % N:
        raise UserError(f"--shards {N}: {world_size} ranks do not divide into replicas of {N}")


def resolve_device(config):
    """Replace `auto` in device and dtype by what this machine has."""
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.dry_run and config.device == "cuda":  # of another machine, with bf16
        config.dtype = "bf16" if config.dtype == "auto" else config.dtype
        return
    if config.backend == "nccl" and config.device == "cpu":
        raise UserError("--backend nccl: it is for --device cuda; use --backend gloo")
    if config.backend == "shm" and not shm.machine_id():
        raise UserError("--backend shm: it needs Linux on x86_64 without a limit on file sizes")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu")
    gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if config.device == "cuda" and config.backend in ("auto", "nccl") and local_rank >= gpus:
        raise UserError(
            f"--device cuda: more ranks than the {gpus} CUDA devices of this machine; lower "
            "--nproc_per_node, or share the GPUs with --backend shm"
        )
    native = has_native_bf16(config.device)
    if config.dtype == "bf16" and not native and not config.dry_run:
        raise UserError(f"--dtype bf16: this {config.device} has no native bf16; use --dtype fp32")
    if config.dtype == "auto":
        config.dtype = "bf16" if native else "fp32"


def has_native_bf16(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def environment() -> tuple:
    """(rank, world size) that torchrun has set; (0, 1) without it. Raises UserError."""
    try:
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 0}
        rank, world_size, local_rank, _ = (int(os.environ.get(k, v)) for k, v in names.items())
        addressed = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        if not (0 <= rank < world_size and local_rank >= 0 and (addressed or world_size == 1)):
            raise ValueError
        return rank, world_size
    except ValueError:
        raise UserError(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do not describe a run: use torchrun, "
            "or unset them to run one process"
        ) from None


def rendezvous(rank: int, world_size: int):
    """A store for this attempt only. After a restart torchrun keeps its store with the old keys. So
    rank 0 publishes a new prefix together with the random id that each rank wrote last, and a rank
    accepts the prefix only if its own id is in the list. Raises RankLostError if a rank is missing
    after START_S."""
    if world_size == 1:
        return dist.HashStore()
    hello, deadline = uuid.uuid4().hex, time.monotonic() + START_S
    with translate_comm_errors():
        store = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_S)))[0]
        store.set(f"hello/{rank}", hello)
        name = uuid.uuid4().hex
        arrived = [f"{name}/arrived/{r}" for r in range(1, world_size)]
        while time.monotonic() < deadline:
            if rank == 0:
                hellos = [store.get(f"hello/{r}").decode() for r in range(world_size)]
                store.set("attempt", json.dumps([name, hellos]))
                if store.check(arrived):
                    return dist.PrefixStore(name, store)
            else:
                name, hellos = json.loads(store.get("attempt"))
                if hellos[rank : rank + 1] == [hello]:
                    store.set(f"{name}/arrived/{rank}", "")
                    return dist.PrefixStore(name, store)
            time.sleep(0.02)
    raise RankLostError(f"not all of the {world_size} ranks have started within {START_S} s")


def check_same_config(store, topic: str, rank: int, world_size: int, error: str, fingerprint: str =
""):
    """Raise UserError, on all ranks, if one has an error or another fingerprint."""
    with translate_comm_errors():
        answer = f"{error}\n{fingerprint}".encode(errors="backslashreplace")
        store.set(f"{topic}/{rank}", answer)
        answers = [store.get(f"{topic}/{r}").decode().split("\n", 1) for r in range(world_size)]
    error = next((theirs for theirs, _ in answers if theirs), "")
    if not error and len({theirs for _, theirs in answers}) > 1:
        error = "the ranks differ in their flags or read different corpora: start them all alike"
    if error:
        raise UserError(error)


def start(argv: list, methods: dict, shutdown) -> Setup:
    """The Setup, equal on all ranks. The run's folder exists and is locked."""
    rank, world_size = environment()
    shutdown.rank = rank
    store = shutdown.store = rendezvous(rank, world_size)
    error = fingerprint = ""
    try:
        setup = set_up(argv, methods, rank, world_size)
        # Paths may differ between nodes.
        alike = dataclasses.replace(setup.config, out_dir="", data="", resume="")
        read = (setup.corpus.hash, setup.path and setup.path.name, setup.saved)
        fingerprint = f"{alike} {setup.method_config} {setup.simulation} {read}"
    except BrokenPipeError:  # of --help
        raise
    except Exception as wrong:
        error = explain(wrong)[1].removeprefix("error: ")
    check_same_config(store, "flags", rank, world_size, error, fingerprint)
    try:
        if rank == 0 and not setup.config.dry_run:
            setup.lock = open_folder(setup.config.out_dir)
    except UserError as wrong:
        error = str(wrong)
    check_same_config(store, "folder", rank, world_size, error)
    store.set_timeout(timedelta(seconds=setup.config.timeout_s))
    return setup


def open_folder(out_dir: str) -> int:
    """Create the run's folder, check that it can be written to, lock it, remove leftovers."""
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out_dir).close()
        descriptor = checkpoint.lock(out_dir)
        checkpoint.clean_up(out_dir)
        return descriptor
    except OSError as error:
        raise UserError(
            f"--out_dir {out_dir[:200]}: {error.strerror}; name a folder to write to"
        ) from None


def open_groups(config, simulation, store) -> tuple:
    """Start torch.distributed. Returns (this rank's device, backend), where backend(ranks,
    crosses_replicas) names the backend of a group, see mesh.Mesh. auto: nccl on GPUs; on CPUs shm
    for groups within one machine, else gloo. A simulated link needs a transport with a thread of
    its own, so not shm."""
    (rank, world_size), device = environment(), torch.device(config.device)
    if config.device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    machines = [""] * world_size

    def backend(ranks, crosses_replicas):
        preferred = config.backend
        if preferred == "auto":
            preferred = "nccl" if config.device == "cuda" else "shm"
        if preferred != "shm":
            return preferred
        one_machine = len({machines[r] or r for r in ranks}) == 1
        linked = crosses_replicas and simulation.limits_link
        return "shm" if one_machine and not linked else "gloo"

    if world_size > 1:
        timeout = timedelta(seconds=config.timeout_s)
        with translate_comm_errors():
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
            )
            # [sync] all-gather of objects, all ranks, once per run
            dist.all_gather_object(machines, shm.machine_id())
    return device, backend


def make_mesh(setup: Setup, store) -> Mesh:
    config = setup.config
    device, backend = open_groups(config, setup.simulation, store)
    with translate_comm_errors():
        return Mesh(config.shards, device, config.timeout_s, backend)


def keep_freed_memory(keep: bool = True):
    """Let glibc keep what a step frees for the next step. By default it returns much of it to the
    system and fetches it again page by page: some 3% of a step on CPUs."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << (25 if keep else 16))  # M_MMAP_THRESHOLD, bytes: 32 MiB at most
        libc.mallopt(-1, 2**31 - 1 if keep else 1 << 17)  # M_TRIM_THRESHOLD


# ---- leaving ----


class StopRequest:
    """A signal that ends the run at the next round end, with a checkpoint."""

    def __init__(self, store, enabled: bool):
        self.store, self.enabled, self.signal, self.voted = store, enabled, 0, False
        if enabled:
            self.pipe, wakeup = os.pipe()
            os.set_blocking(wakeup, False)
            signal.set_wakeup_fd(wakeup)
            for number in STOPS:
                signal.signal(number, lambda *_: None)
                signal.siginterrupt(number, False)
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        """Python writes the number of a signal into the pipe at once, even while the main thread
        waits inside gloo. A second signal ends the process at once."""
        self.signal = os.read(self.pipe, 1)[0]
        os._exit(128 + os.read(self.pipe, 1)[0])

    def vote(self, method) -> float:
        """1.0 if this rank, or a rank of another replica, wants to stop. At each step's end."""
        if not self.enabled:
            return 0.0
        key = f"stop/{method.rounds}"
        if self.signal and not self.voted:
            self.store.set(key, str(int(self.signal)))
            self.voted = True
        # One rank per replica looks for the others' keys.
        return float(self.voted or method.mesh.shard_index == 0 and self.store.check([key]))

    def agreed(self, method) -> int:
        """At a round end: the signal with which all ranks stop here, or 0."""
        if not self.enabled:
            return 0
        if method.averages_gradients:
            found, key = method.model.known_metrics()[2] > 0, f"stop/{method.rounds}"
        else:
            if method.mesh.device.type == "cuda":  # until all rows of sync k have been gathered
                torch.cuda.current_stream().synchronize()
            key = f"stop/{method.rounds - 1}"
            found = self.store.check([key])
        return int(self.store.get(key)) if found else 0


class Shutdown:
    """Ends this rank with an exit code and, if it is the first to leave, one line."""

    def __init__(self, program: str):
        self.program, self.store, self.rank = program, None, 0
        sys.stdout = sys.stdout or open(os.devnull, "w")  # None: closed by the shell
        for number in STOPS:  # also while a rank waits inside gloo, and without a traceback
            signal.signal(number, signal.SIG_DFL)

    def leave(self, code: int, line: str):
        """No destructor waits for lost ranks, and nobody waits long for the store."""
        # torchrun stops the other ranks at the first exit. They are about to leave by themselves.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Timer(5, os._exit, [code]).start()
        mine = f"{self.rank} {os.getpid()}"
        try:
            first = self.rank == 0 if self.store is None else self._claim(mine) == mine
        except RuntimeError:
            first = True  # the store is gone
        if first and line:
            print(f"{self.program}: {line}", file=sys.stderr, flush=True)
        try:
            sys.stdout.flush()
        except OSError:
            pass
        os._exit(code)

    def _claim(self, mine: str) -> str:
        self.store.set_timeout(timedelta(seconds=3))
        return self.store.compare_set("first to leave", "", mine).decode()

    def explain(self, error: Exception, out_dir: str):
        """leave() for an error from outside the program. Raises any other error again. out_dir: ""
        if the training has not begun."""
        if not isinstance(error, RankLostError):
            self.leave(*explain(error))
        saved = checkpoint.list_checkpoints(out_dir) if out_dir else []
        hint = "; --checkpoint_interval would have kept checkpoints" if out_dir else ""
        if saved:
            hint = f"; --resume auto continues from {saved[-1]}"
        self.leave(1, f"error: lost contact with another rank ({error}){hint}")
