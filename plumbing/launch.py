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

Stopping with --save_on_exit. The rank that has the signal votes to end the round early (method.py)
and sets the key `stop` in the store, so that other replicas vote, too. At the round end all ranks
exchange their signals. So all decide alike: they save and leave together, or none does. Methods
that overlap (CO2, NoLoCo, Streaming ...) finish their round. With this flag their replicas wait for
each other at the round ends.
"""

import ctypes
import dataclasses
import hashlib
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
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


def set_up(argv: list, methods: dict, rank: int, world_size: int) -> Setup:
    """Check everything that wrong input can break. Writes nothing. Raises UserError."""
    config, *_ = parse(argv, methods, simulate.Config)  # which checkpoint?
    resumed = checkpoint.run_folder(config.resume) if config.resume not in ("", "auto") else ""
    out_dir = config.out_dir or str(resumed) or f"out/{config.method}"
    path = saved = None
    if config.resume or not config.dry_run:
        path = checkpoint.choose(config.resume, out_dir)
    if path:
        saved = checkpoint.read(path)
    # Once more: flags that are not given come from the checkpoint.
    flags = saved["flags"] if saved else {}
    config, method_config, simulation, given = parse(argv, methods, simulate.Config, flags)
    config.out_dir = out_dir
    if config.dry_run:
        world_size = config.replicas * config.shards or max(world_size, config.shards)
    check_mesh(config, world_size)
    resolve_device(config)
    replicas = world_size // config.shards
    simulate.check(simulation, methods, config.method, method_config, replicas)
    corpus = data.load(config.data or None)
    data.check_windows(corpus, config.block_size)
    method = methods[config.method]
    method.check(config, method_config, replicas)
    plan = Plan(config, method, method_config, simulation, corpus.vocab_size, world_size)
    if not config.dry_run:
        plan.check_memory()
    if saved:
        checkpoint.check_resume(saved, config, given, corpus, plan.tokens_per_step, path)
        checkpoint.verify(path, saved, rank, world_size)
    return Setup(config, method_config, simulation, given, corpus, plan, path, saved)


def check_mesh(config, world_size: int):
    M, N = config.replicas, config.shards
    if world_size % N or M and world_size != M * N:
        mesh = f"--replicas {M} --shards {N}" if M else f"--shards {N}"
        raise UserError(
            f"{mesh}: {world_size} ranks do not form such a mesh; change --nproc_per_node"
        )


def resolve_device(config):
    """Replace `auto` in device and dtype by what this machine has."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "auto":
        config.device = "cuda" if gpus else "cpu"
    if config.dtype == "auto":
        config.dtype = "bf16" if has_native_bf16(config.device) else "fp32"
    if config.backend == "nccl" and config.device == "cpu":
        raise UserError("--backend nccl: it is for --device cuda; use --backend gloo")
    if config.dry_run or config.device == "cpu":  # a dry run may be for another machine
        return
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if gpus == 0 or config.backend in ("auto", "nccl") and local_rank >= gpus:
        raise UserError(
            f"--device cuda: torch finds {gpus} CUDA devices here; use --device cpu, lower "
            "--nproc_per_node, or let the ranks share a GPU with --backend shm"
        )


def has_native_bf16(device: str) -> bool:
    if device == "cuda":  # without one it is a dry run for another machine
        cuda = torch.cuda
        return not cuda.is_available() or cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def environment() -> tuple:
    """(rank, world size) that torchrun has set; (0, 1) without it. Raises UserError."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    rank, world_size, address, port, local_rank = values = [os.environ.get(n) for n in names]
    if rank is world_size is None:
        return 0, 1
    numbers = [value and value.isdecimal() for value in (rank, world_size, port, local_rank or "0")]
    if None in values[:4] or not all(numbers) or int(rank) >= int(world_size):
        raise UserError(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do not describe a run: use torchrun, or "
            "unset them to run one process"
        )
    return int(rank), int(world_size)


def rendezvous(rank: int, world_size: int):
    """A store for this attempt only. After a restart torchrun's store still has the old keys, and
    its count of restarts may differ between nodes. So each rank announces a random id, and the
    prefix of the new keys is a hash of all ids. It is valid when all ranks have computed it: then
    none has read an old id. Raises RankLostError if a rank is missing after START_S."""
    if world_size == 1:
        return dist.HashStore()
    valid, deadline = False, time.monotonic() + START_S
    with translate_comm_errors():
        store = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_S)))[0]
        store.set(f"hello/{rank}", os.urandom(16).hex())
        while not valid and time.monotonic() < deadline:
            ids = store.multi_get([f"hello/{r}" for r in range(world_size)])
            prefix = hashlib.sha256(b"".join(ids)).hexdigest()
            store.set(f"{prefix}/{rank}", "")
            valid = store.check([f"{prefix}/{r}" for r in range(world_size)])
            time.sleep(0.02)
    return dist.PrefixStore(prefix, store)


@contextmanager
def alike(store, topic: str, rank: int, world_size: int):
    """If the block raises an error that explain() knows on one rank, raise it on all ranks."""
    error = ""
    try:
        yield
    except Exception as wrong:
        error = explain(wrong)[1].removeprefix("error: ") or "standard output is closed"
    with translate_comm_errors():
        store.set(f"{topic}/{rank}", error.encode(errors="backslashreplace"))
        errors = [store.get(f"{topic}/{r}").decode() for r in range(world_size)]
    if any(errors):
        raise UserError(next(filter(None, errors)))


def start(argv: list, methods: dict, shutdown) -> Setup:
    """The Setup, equal on all ranks. The run's folder exists and is locked."""
    rank, world_size = environment()
    store = shutdown.store = rendezvous(rank, world_size)
    with alike(store, "flags", rank, world_size):
        setup = set_up(argv, methods, rank, world_size)
        # Paths may differ between nodes.
        config = dataclasses.replace(setup.config, out_dir="", data="", resume="")
        read = f"{config} {setup.method_config} {setup.simulation} {setup.corpus.hash}"
        read += f" {setup.saved}"
        if store.compare_set("read", "", read).decode() != read:
            raise UserError("the ranks differ in their flags or corpora: start them all alike")
    with alike(store, "folder", rank, world_size):
        if rank == 0 and not setup.config.dry_run:
            Path(setup.config.out_dir).mkdir(parents=True, exist_ok=True)
            checkpoint.lock(setup.config.out_dir)
            checkpoint.clean_up(setup.config.out_dir)
    store.set_timeout(timedelta(seconds=setup.config.timeout_s))
    if not setup.config.dry_run:
        shutdown.out_dir = setup.config.out_dir
    return setup


def open_groups(config, simulation, store, overlaps=False) -> tuple:
    """Start torch.distributed. Returns (this rank's device, backend), where backend(ranks,
    crosses_replicas) names the backend of a group, see mesh.Mesh. auto: nccl on GPUs; on CPUs shm
    for groups within one machine, else gloo. A simulated link, and a method that overlaps (see
    method.py), need a transport with a thread of its own, so not shm."""
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
        background = crosses_replicas and (simulation.limits_link or overlaps)
        return "shm" if one_machine and not background else "gloo"

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
    overlaps = setup.plan.method.overlaps
    device, backend = open_groups(config, setup.simulation, store, overlaps)
    with translate_comm_errors():
        return Mesh(config.shards, device, config.timeout_s, backend)


def compile_layers(layers):
    """torch.compile keeps the variants of all layers (training, evaluation, recompute) in one
    cache, which by default has room for 8."""
    torch._dynamo.config.recompile_limit = 8 * len(layers)
    for layer in layers:
        layer.compile()


def keep_freed_memory(keep: bool = True):
    """Let glibc keep what a step frees for the next step. By default it returns much of it to the
    system and fetches it again page by page: some 4% of a bf16 step on CPUs."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << (25 if keep else 16))  # M_MMAP_THRESHOLD, bytes: 32 MiB at most
        libc.mallopt(-1, 2**31 - 1 if keep else 1 << 17)  # M_TRIM_THRESHOLD


# ---- leaving ----


class StopRequest:
    """A signal that ends the run at the next round end, with a checkpoint."""

    def __init__(self, store, enabled: bool):
        self.store, self.enabled, self.signal = store, enabled, 0
        for number in STOPS if enabled else ():
            signal.signal(number, self._note)
            signal.siginterrupt(number, False)

    def _note(self, number, frame):
        """From then on a second signal ends the process at once. Python calls this in the main
        thread only: a rank that waits inside gloo notes the signal when the wait ends."""
        self.signal = number
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)

    def vote(self, method) -> float:
        """1.0 if this rank, or a rank of another replica, wants to stop. At each step's end."""
        if not self.enabled or method.overlaps and method.local:
            return 0.0
        if self.signal:
            self.store.set("stop", "")
            return 1.0
        # One rank per replica looks for the others' key.
        return float(method.mesh.shard_index == 0 and self.store.check(["stop"]))

    def agreed(self, method) -> int:
        """At a round end: the signal with which all ranks stop here, or 0."""
        if not self.enabled:
            return 0
        if method.averages_gradients and not method.model.known_metrics()[2]:  # no votes
            return 0
        # [sync] all-gather of objects, all ranks, once per round, with --save_on_exit
        return max(method.mesh.all_gather_object(self.signal))


class Shutdown:
    """Ends this rank with an exit code and, if it is the first to leave, one line."""

    def __init__(self, program: str):
        self.program, self.store = program, None
        self.out_dir = ""  # of the run, when it has begun
        for number in STOPS:  # also while a rank waits inside gloo, and without a traceback
            signal.signal(number, signal.SIG_DFL)

    def leave(self, code: int, line: str):
        """Ends with os._exit, because destructors could wait for lost ranks. Waits at most 5 s for
        the store."""
        # At the first exit torchrun sends SIGTERM to the other ranks. They leave by themselves.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Timer(5, os._exit, [code]).start()
        try:
            # Without a store, 2 means that this rank's environment is wrong, 1 that a rank is lost.
            own, first = os.urandom(8).hex(), code == 2 or os.environ.get("RANK", "0") == "0"
            if self.store:
                first = self.store.compare_set("first to leave", "", own).decode() == own
        except RuntimeError:
            first = True  # the store is gone
        if first and line:
            print(f"{self.program}: {line}", file=sys.stderr, flush=True)
        with suppress(OSError):
            print(end="", flush=True)
        os._exit(code)

    def explain(self, error: Exception):
        """leave() for an error from outside the program. Raises any other error again."""
        if not isinstance(error, RankLostError):
            self.leave(*explain(error))
        saved = checkpoint.list_checkpoints(self.out_dir) if self.out_dir else []
        hint = f"; --resume auto continues from {saved[-1]}" if saved else ""
        self.leave(1, f"error: lost contact with another rank ({error}){hint}")


def run_on_this_rank(program: str, main):
    """Run main(shutdown). Only rank 0 prints; errors that config.explain() knows end all ranks."""
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")
    shutdown = Shutdown(program)
    try:
        main(shutdown)
        print(end="", flush=True)
    except Exception as error:
        shutdown.explain(error)
    if dist.is_initialized():
        dist.destroy_process_group()
