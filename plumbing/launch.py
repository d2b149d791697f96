"""How ranks start together, and how they end.

All ranks connect. Then every rank checks the whole command line, the corpus and the checkpoint, and
the ranks share what they have found: either all train, or all end.

    reason of the end       what happens                                            exit code
    wrong input             all ranks end before training, rank 0 prints a line     2
    full disk               all ranks end after the failed checkpoint, likewise     2
    divergence              the ranks that find it end, the others lose them        2 (others 1)
    a token id that is not  the rank that reads it ends, the others lose it         2 (others 1)
    in the vocabulary       (the beginning of each file is checked before training)
    a rank is lost          gloo, shm: the others end at once or after --timeout_s  1
                            nccl: after --timeout_s its watchdog ends them
    SIGTERM, Ctrl-C,        at once; with --save_on_exit at the next round end,     128 + signal
    SIGHUP                  after a checkpoint. SIGHUP: the terminal was closed
    torchrun is killed      on Linux as after SIGTERM; elsewhere the ranks go on    128 + SIGTERM

torchrun kills the ranks 30 s after its signal. From torch 2.13 on it has --shutdown_timeout. When a
node joins, it is always 30 s. A round and its checkpoint should take less. A signal that torchrun
does not know, such as SIGUSR1, kills it.

With --save_on_exit the signal of one rank is enough. At a round end all ranks share their
signals, so replicas wait for each other there, also in a method without a barrier.
"""

import ctypes
import hashlib
import math
import os
import platform
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from config import NCCL_TIMEOUT_S, STOPS, Config, UserError, end_at_next, explain, make_config
from config import padded_vocabulary, read_flags
from hf import open_model
from mesh import Mesh, translate_comm_errors
from model import has_native_bf16
from plumbing import checkpoint, shm, simulate
from plumbing.checkpoint import alike
from plumbing.plan import Plan

LIBC = ctypes.CDLL(None)
START_S = 600  # how long ranks wait for the slowest to start


# ---- checking ----


def read_command(argv: list, methods: dict) -> tuple:
    """(config of the flags that all methods have, the flags given, and of checkpoint.choose() the
    run's folder and the checkpoints that it may continue). Raises UserError."""
    given = read_flags(argv, methods)
    common = given.keys() & Config.__dataclass_fields__.keys()
    config = Config(**{name: given[name] for name in common})  # the method's flags come later
    return config, given, *checkpoint.choose(config)


class Setup:
    """The run that a command line asks for. Making it checks everything that wrong input can break,
    and writes nothing. Raises UserError.

    config, given: all flags, and those on the command line; corpus, plan;
    path, saved: of the checkpoint to continue, and its state; source: the model to start from
    """

    def __init__(self, argv: list, methods: dict, open_corpus, world_size: int, path=None):
        """open_corpus: data.load; path: the checkpoint that all ranks have agreed on; by default
        this rank chooses it."""
        self.saved = self.source = None
        config, self.given, out_dir, found = read_command(argv, methods)
        alone = Mesh(1, torch.device("cpu"), alone=True)
        self.path = path or checkpoint.newest(found, alone, world_size, self.given.get("shards"))
        base = {}
        if self.path:
            self.saved = checkpoint.read(self.path, methods)
            base = self.saved["flags"]
        elif config.init_from:
            self.source = open_model(config.init_from)
            same = Path(out_dir, "model.pt").resolve() == Path(config.init_from).resolve()
            if config.overwrite and same:
                raise UserError("--overwrite deletes the model of --init_from: change --out_dir")
            base = vars(self.source.config) | {"vocab_size": 0}
        self.config = config = make_config(self.given, methods, base)
        config.out_dir = out_dir
        if "data" in self.given:  # the checkpoint may be continued from another folder
            config.data = os.path.abspath(config.data)

        if config.dry_run:  # for any mesh
            world_size = config.replicas * config.shards or max(world_size, config.shards)
        elif self.saved and "shards" not in self.given:
            config.shards = math.gcd(config.shards, world_size)  # the mesh follows the ranks
        check_mesh(config, world_size)
        resolve_device(config)
        replicas = world_size // config.shards
        config.check(replicas)
        simulate.check(config, methods[config.method], replicas)
        self.corpus = self.find_corpus(open_corpus)
        if config.data_by_replica:
            self.corpus = self.corpus.by_replica(replicas, config.block_size)
        if self.source and not config.vocab_size:
            if self.source.is_padded(self.corpus):
                self.corpus.vocab_size = self.source.config.vocab_size
            config.vocab_size = self.corpus.vocab_size  # that of the model, see check() below
        vocab_size = padded_vocabulary(config, self.corpus.vocab_size)
        self.plan = Plan(config, methods[config.method], vocab_size, world_size)
        if self.source:
            self.source.check(self.plan.model_config, self.corpus)
        if self.saved:
            checkpoint.check_resume(self)

    def find_corpus(self, open_corpus):
        config = self.config
        try:
            return open_corpus(config.data or None, config.vocab_size, config.block_size)
        except (OSError, UserError) as error:
            if not self.saved or "data" in self.given or not self.config.data:
                raise
            reason = explain(error)[1]
            origin = f"so says the --data of checkpoint {self.path}"
            raise UserError(f"{reason}: {origin}; name the corpus with --data") from None

    def describe(self, mesh) -> dict:
        """What the record and the checkpoints say of the run."""
        name = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu"
        return vars(self.config) | {
            "world_size": mesh.world_size,
            "mesh": {"replicas": mesh.replicas, "shards": mesh.shards},
            "micro_steps": self.plan.micro_steps, "micro_batch": self.plan.micro_batch,
            "n_params": self.plan.n_params, "corpus_hash": self.corpus.hash,
            "torch": str(torch.__version__), "device_name": name,
        }  # fmt: skip


def check_mesh(config, world_size: int):
    M, N = config.replicas, config.shards
    if world_size > 2**20:
        raise UserError(f"{world_size:,} ranks: a mesh may have 2^20; lower --replicas or --shards")
    if M and world_size != M * N:
        raise UserError(
            f"--replicas {M} --shards {N}: that takes {M * N} ranks, but there are {world_size}; "
            f"start {M * N} (torchrun's --nproc_per_node), or change the two flags"
        )
    if world_size % N:
        raise UserError(
            f"--shards {N}: {world_size} ranks do not form replicas of {N}; "
            f"change --nproc_per_node or give --shards {math.gcd(world_size, N)}"
        )


def resolve_device(config):
    """Replace `auto` in device, backend and dtype by what this machine has. Raises UserError."""
    gpus = torch.cuda.device_count()
    if config.device == "auto":
        config.device = "cuda" if gpus else "cpu"
    on_gpu = config.device == "cuda"
    if config.backend == "auto":
        config.backend = "nccl" if on_gpu else "shm"
    if config.dtype == "auto":
        config.dtype = "bf16" if has_native_bf16(config.device) else "fp32"
    if config.backend == "nccl" and not on_gpu:
        raise UserError("--backend nccl: it is for --device cuda; use --backend gloo")
    if on_gpu and not config.dry_run:  # which is for any machine
        if gpus == 0:
            raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu")
        # NCCL refuses two ranks on one GPU of one host. With NCCL_HOSTID each may name its own.
        shared = local_rank() >= gpus and not os.environ.get("NCCL_HOSTID")
        if config.backend == "nccl" and shared:
            raise UserError(
                "--backend nccl: some ranks share a GPU; lower --nproc_per_node, "
                "or use --backend shm"
            )


def local_rank() -> int:
    """Number on this machine. 0 for all if each sees only its own GPU, as with torchrun's
    --virtual-local-rank."""
    return int(os.environ.get("LOCAL_RANK", 0))


# ---- starting ----


def connect() -> Mesh:
    """Start torch.distributed's default group. Returns a mesh of all ranks as one replica, for what
    they tell each other before the run's mesh is known."""
    end_with_torchrun()
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise UserError("srun starts several tasks: let it start torchrun, see plumbing/slurm.sh")
    timeout = timedelta(seconds=START_S)
    with translate_comm_errors():
        if world_size > 1:
            try:
                store, *_ = next(dist.rendezvous("env://", timeout=timeout))
            except ValueError as error:  # a variable is missing
                raise UserError(f"{error}; start with torchrun, which sets them") from None
            store = without_old_keys(store, rank, world_size)
            check_interfaces(store, rank, world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        return Mesh(world_size, torch.device("cpu"), START_S)


def end_with_torchrun():
    """This rank gets SIGTERM when its torchrun has been killed. Without it the rank would train on,
    and keep the run's folder and its GPU."""
    if dist.is_torchelastic_launched():
        parent = os.getppid()
        signal_at_death_of_parent(signal.SIGTERM)
        if os.getppid() != parent:  # it was killed meanwhile
            os.kill(os.getpid(), signal.SIGTERM)


def signal_at_death_of_parent(number: int):
    """Linux sends it to this process when the parent dies; 0: none. Elsewhere nothing happens."""
    if hasattr(LIBC, "prctl"):
        LIBC.prctl(1, number)  # PR_SET_PDEATHSIG


def without_old_keys(store, rank: int, world_size: int):
    """The store without keys of an earlier start. After a restart torchrun's store still has them,
    and TORCHELASTIC_RESTART_COUNT may differ between nodes. So each rank announces a random id, and
    the hash of all ids is the prefix of the new keys. When all ranks have computed it, none of them
    has read an old id."""
    store.set(f"hello/{rank}", os.urandom(16).hex())
    names = [f"hello/{r}" for r in range(world_size)]
    for _ in range(50 * START_S):
        prefix = hashlib.sha256(b"".join(store.multi_get(names))).hexdigest()
        store.set(f"{prefix}/{rank}", "")
        if store.check([f"{prefix}/{r}" for r in range(world_size)]):
            break
        time.sleep(0.02)
    return dist.PrefixStore(prefix, store)


def check_interfaces(store, rank: int, world_size: int):
    """Raise UserError on all ranks if one of them would listen where other machines cannot reach
    it: they would wait in vain. gloo takes the address of the machine's own name, which on Debian
    and Ubuntu is 127.0.1.1. (If MASTER_ADDR is such an address, all ranks are on one machine.)"""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        return
    closed = is_loopback(socket.gethostname()) and not is_loopback(os.environ["MASTER_ADDR"])
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    store.set(f"closed/{rank}", "yes" if closed and not named else "no")
    found = store.multi_get([f"closed/{r}" for r in range(world_size)])
    if b"yes" in found:
        line = (
            f"rank {found.index(b'yes')} would listen at 127.*, where other machines cannot reach "
            "it: on each machine name the interface to the others, export GLOO_SOCKET_IFNAME=eth0 "
            "(`ip -brief address` lists them; NCCL uses it, unless NCCL_SOCKET_IFNAME is set)"
        )
        raise UserError("" if rank else line)


def is_loopback(name: str) -> bool:
    """Does this name mean the machine itself to itself? (gloo takes an unknown one so.)"""
    try:
        first, *_ = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    address = first[4][0]
    return address.startswith("127.") or address == "::1"


def start(argv: list, methods: dict, open_corpus) -> tuple:
    """(the Setup, equal on all ranks; the mesh of connect()). The run's folder exists, locked and
    clean."""
    everyone = connect()
    with alike(everyone):
        _, given, _, found = read_command(argv, methods)
    path = checkpoint.newest(found, everyone, everyone.world_size, given.get("shards"))
    with alike(everyone):
        setup = Setup(argv, methods, open_corpus, everyone.world_size, path)
    check_alike(setup, everyone)
    if not setup.config.dry_run:
        checkpoint.prepare(setup, everyone)
    return setup, everyone


# Flags that name files, which machines may keep in different places
PLACES = {"data", "out_dir", "init_from", "resume"}


def check_alike(setup, everyone: Mesh):
    """Raise UserError on all ranks if two of them differ in what must be equal. Other versions of
    Python or torch are only worth a line."""
    own = {f"--{name}": value for name, value in vars(setup.config).items() if name not in PLACES}
    own |= {"--data": setup.corpus.hash, "--resume": setup.saved and setup.saved["id"]}
    software = f"Python {platform.python_version()}, torch {torch.__version__}"
    # [start] all-gather of objects, all ranks, once per start
    found = everyone.all_gather_object((own, software))
    first, first_software = found[0]
    for rank, (other, software) in enumerate(found):
        if software != first_software:
            print(f"note    rank {rank} has {software}, rank 0 has {first_software}")
            break
    for rank, (other, _) in enumerate(found):
        for name in first:
            if other.get(name) == first[name]:
                continue
            line = (
                f"{name} is {first[name]} on rank 0 and {other.get(name)} on rank {rank}; give the "
                "same to both"
            )
            if name == "--data":
                line = (
                    f"the corpus of rank {rank} is not that of rank 0; give both a copy of one "
                    "with --data (without it: the standard library, another in each Python)"
                )
            if name == "--resume":
                line = f"the checkpoint of rank {rank} is not that of rank 0"
            raise UserError("" if everyone.rank else f"the ranks differ: {line}")


def make_mesh(config, everyone: Mesh, barrier: bool = True) -> Mesh:
    """The run's mesh. Groups within a machine use shm, if the flags prefer it, others gloo. A
    simulated link, and a method without a barrier (see method.py), need a transport with a thread
    of its own between replicas, so not shm."""
    keep_freed_memory()
    device = torch.device(config.device)
    if config.device == "cuda":
        device = torch.device("cuda", local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if config.backend == "nccl":
        # NCCL forbids operations of two groups that wait for each other on the GPU: two ranks must
        # not start them in different orders. With this variable every rank starts them in the order
        # in which the host issued them, the same on all ranks. The price: an operation starts only
        # when the one before it has started, and so when all but the last have ended. EDiT and its
        # relatives keep this free of charge in their rounds: when a shard operation is issued, at
        # most one sync operation has not been waited for (see edit.py). The warm-up and minibatch
        # do not: with shards, the next gather waits for the all-reduces of gradients. Not measured
        # yet: on a GPU, compare runs with 0 and 1 in the environment, also of minibatch.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        if os.environ.get("GLOO_SOCKET_IFNAME"):  # the way to the other machines ("=": this name)
            interface = "=" + os.environ["GLOO_SOCKET_IFNAME"]
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    machine = shm.machine_id()
    if config.backend == "nccl":  # NCCL believes this variable, too
        machine = os.environ.get("NCCL_HOSTID", machine or socket.gethostname())
    # [start] all-gather of objects, all ranks, once per start
    machines = everyone.all_gather_object(machine)

    def on_one_machine(ranks):
        return len({machines[r] or r for r in ranks}) == 1

    def backend(ranks, crosses_replicas):
        if config.backend != "shm":
            return config.backend
        background = crosses_replicas and (config.link_mbps or not barrier)
        return "shm" if on_one_machine(ranks) and not background else "gloo"

    # NCCL counts an operation's time from its issue. The host issues a whole sync or backward at
    # once, so on a slow link the last operation is legitimately old.
    several = not on_one_machine(range(everyone.world_size))
    timeout_s = config.timeout_s or (
        NCCL_TIMEOUT_S if several and config.backend == "nccl" else 600
    )

    def few_sms(ranks):
        # In a round only syncs cross machines, and they may take the time of many steps. Averaged
        # gradients are needed at once. (The warm-up of a method with rounds has the groups of its
        # rounds. Not measured: no machine with two nodes of GPUs.)
        has_rounds = hasattr(config, "sync_warmup_steps")
        return has_rounds and not on_one_machine(ranks)

    link = simulate.SimulatedLink(config, config.shards, device) if config.link_mbps else None
    with translate_comm_errors():
        mesh = Mesh(config.shards, device, timeout_s, backend, few_sms)
    if dist.is_initialized():
        dist.group.WORLD.set_timeout(mesh.timeout)
    mesh.spans = [] if config.timeline else None
    mesh.link = link
    if link:
        link.note = mesh.note
    return mesh


def keep_freed_memory():
    """Let glibc keep what a step frees for the next step. By default it returns much of it to the
    system and fetches it again page by page: some 4% of a bf16 step on CPUs. Large blocks go back
    at once: kept, they leave gaps, and a run takes up to 15% more memory than planned."""
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(-3, 1 << 22)  # M_MMAP_THRESHOLD, bytes: 4 MiB
        LIBC.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def return_freed_memory():
    """The training is over: what glibc has kept goes back, and model.pt takes its place."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


# ---- ending ----


def leave_together():
    """All ranks wait here, so no process group is destroyed while rank 0 still samples. Nobody
    waits for a rank that has failed, and a failed rank does not come here."""
    if not dist.is_initialized():
        return
    try:
        # [start] barrier, all ranks, once per run
        dist.barrier()
    except RuntimeError:  # a rank has failed, not this one. Its groups could wait for it for ever
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()


class Stopped(Exception):
    """A signal ends the run after a step; a checkpoint is saved. (torchrun sends SIGTERM, too,
    when a node joins: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, see slurm.sh.)"""

    def __init__(self, number: int, step: int, path):
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        line = f"stopped by {name} after step {step}; --resume auto continues from {path}"
        super().__init__(line if os.getenv("RANK", "0") == "0" else "")


class StopRequest:
    """With --save_on_exit: a signal ends the run at the next round end, with a checkpoint; a second
    one ends the process at once."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.signal = 0  # its number. In the warm-up it travels with the metrics to all ranks
        if enabled:
            for number in STOPS:
                signal.signal(number, self._note)
                signal.siginterrupt(number, False)

    def _note(self, number, frame):
        """Python calls this in the main thread only: a rank that waits inside gloo notes the signal
        when the wait ends."""
        self.signal = number
        # A killed torchrun dies thread by thread, and Linux sends the signal of end_with_torchrun()
        # once for each of them. The next one must not count as the second signal.
        signal_at_death_of_parent(0)
        for each in STOPS:
            end_at_next(each)

    def agreed(self, method) -> int:
        """At a round end: the signal with which all ranks stop here, or 0."""
        if not self.enabled or method.averages_gradients and not method.model.known_metrics()[2]:
            return 0
        # [sync] all-gather of objects, all ranks, once per round, with --save_on_exit
        return max(method.mesh.all_gather_object(self.signal))
