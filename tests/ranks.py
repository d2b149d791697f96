"""Run code on several ranks, and whole trainings through train.py's own loop. Ranks are forked from
a server process that has imported torch once: four start in a fraction of a second.

What is promised of bits. They are equal where the same sums run in the same order: a run and its
repetition, a run and its resumption, two methods that are the same, each on one mesh, transport and
machine. Two transports, meshes, machines, instruction sets or numbers of threads may add in
different orders. Then results differ by a few units in the last place, see few_ulp()."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

import train
from config import parse, run_command
from mesh import Mesh
from model import ModelConfig
from plumbing import launch, simulate
from plumbing.log import Clock, RoundRecord
from shard import AdamW, ShardedModel

ROOT, CPU = Path(__file__).resolve().parent.parent, torch.device("cpu")
context = multiprocessing.get_context("forkserver")
# Imported once instead of in every rank: besides train what tests import, and what
# torch.use_deterministic_algorithms() imports.
context.set_forkserver_preload(["train", "lab.bench", "pytest", "torch._inductor.config"])


def few_ulp(dtype, ulps=16) -> float:
    """Relative tolerance of results that differ only in the order of sums: 4 ranks round a sum
    three times, and a dozen steps of AdamW on a tiny model enlarge that some five times."""
    return ulps * torch.finfo(dtype).eps


def _rank_main(rank, world_size, folder, function, args):
    try:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN: reading it shows
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = function(*args)
        dist.barrier()  # nobody leaves while a neighbour still talks to it
        dist.destroy_process_group()
        torch.save(result, f"{folder}/result-{rank}")
    except BaseException:
        Path(folder, f"error-{rank}").write_text(traceback.format_exc())
        sys.exit(1)


def run_ranks(world_size, function, *args, timeout_s=120):
    """[function(*args) on rank 0, ...]; function must be a module's, its result picklable."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, function, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout_s)
            if process.is_alive():
                [other.kill() for other in ranks]
                raise TimeoutError(f"{function.__name__}: a rank hangs after {timeout_s} s")
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        assert not errors, "\n".join(errors)
        return [
            torch.load(f"{folder}/result-{rank}", weights_only=False) for rank in range(world_size)
        ]


def _command(argv, rank, world_size, port, folder):
    """What `python train.py argv` does under a launcher, in a process that has its imports."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it is there already, and stays
    _write_to(folder, rank)
    torch.set_num_threads(1)
    run_command("train.py", lambda: train.main(argv))


def run_bench(argv, rank, *more):
    """In place of _command: lab/bench.py."""
    import lab.bench

    train.main = lab.bench.main
    _command(argv, rank, *more)


def _write_to(folder, rank):
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")  # as Python's own


def script(argv, rank, world_size, port, folder, path, cwd):
    """In place of _command: what `python path argv` does in the folder cwd."""
    _write_to(folder, rank)
    torch.set_num_threads(1)
    os.chdir(cwd)
    sys.argv = [str(path), *argv]
    runpy.run_path(str(path), run_name="__main__")


def agent_store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Launch:
    """`train.py argv` on real processes. Of torchrun's agent there is only the store (give one to
    several launches, and they are restarts): nobody stops the ranks but themselves and the test."""

    def __init__(self, world_size, folder, *argv, special={}, store=None):
        """special: rank -> (function, *more), called like _command and with more in its place."""
        self.store, self.folder = store or agent_store(), Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        [old.unlink() for name in ("out", "err") for old in self.folder.glob(f"{name}-*")]
        self.ranks = [
            context.Process(
                target=target,
                args=(list(argv), rank, world_size, self.store.port, str(folder), *more),
            )
            for rank in range(world_size)
            for target, *more in [special.get(rank, (_command,))]
        ]
        for process in self.ranks:
            process.start()

    def signal(self, number, *ranks):
        for rank in ranks or range(len(self.ranks)):
            with contextlib.suppress(ProcessLookupError):
                if self.ranks[rank].is_alive():
                    os.kill(self.ranks[rank].pid, number)

    def wait(self, timeout_s=60) -> list:
        """The exit codes; -9 for a rank that had to be killed because it hung."""
        deadline = time.monotonic() + timeout_s
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        self.signal(signal.SIGKILL)
        return [process.join() or process.exitcode for process in self.ranks]

    def lines(self, name) -> list:
        """All lines that the ranks wrote to "out" or "err"."""
        paths = [self.folder / f"{name}-{rank}" for rank in range(len(self.ranks))]
        return [line for path in paths if path.exists() for line in path.read_text().splitlines()]

    def wait_for(self, text, timeout_s=60):
        """Until rank 0 has printed a line with this text."""
        deadline = time.monotonic() + timeout_s
        while not any(text in line for line in self.lines("out")):
            assert time.monotonic() < deadline, (text, self.lines("out"), self.lines("err"))
            time.sleep(0.005)


TINY = "--n_layer 2 --n_head 1 --n_embd 6 --block_size 8 --batch_size 2 --dtype fp64".split()
TINY += "--log_interval 1 --eval_batches 1 --lr 0.01 --lr_warmup_steps 3 --device cpu".split()


def flags(**options) -> list:
    """Keyword arguments as command-line flags on top of TINY."""
    switches = {True: "--{}", False: "--no-{}"}
    return TINY + [
        switches[v].format(k) if isinstance(v, bool) else f"--{k}={v}" for k, v in options.items()
    ]


def run_config(**options):
    """All flags of a run as attributes."""
    return parse(flags(**options), train.METHODS, simulate.Config)[0]


def method_alone(mesh=None, steps=0, **options):
    """A method at the end of its first round of two steps, without a training around it. steps:
    those that it has taken before."""
    config, mesh = run_config(**dict(sync_warmup_steps=0) | options), mesh or Mesh(1, CPU)
    shape = ModelConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, 20)
    model = ShardedModel(shape, mesh, torch.float64)
    AdamW(model, 0.0, (0.9, 0.95))  # it makes the moments
    record = RoundRecord(mesh)
    method = train.METHODS[config.method](model, mesh, config, record, Clock(mesh.device))
    method.steps = steps
    method.before_step()
    method.local_steps, record.loss_sum = 2, model.master.new_zeros(())
    return method


def watch_syncs(method):
    """Record a checksum of this rank's parameters and of the vectors that replicas share, whenever
    a sync has completed or a fragment has landed."""
    seen, shared = [], [name for name in method.shared if name != "mean"]  # CO2's is in flight

    def and_look(function, *args):
        function(*args)
        vectors = [getattr(method, name) for name in shared] + [method.model.master] * method.equal_replicas
        seen.append([zlib.crc32(vector.numpy()) for vector in vectors])

    for owner, name in (method.record, "done"), (method, "land"):
        if hasattr(owner, name):
            setattr(owner, name, functools.partial(and_look, getattr(owner, name)))
    return seen


def _train(corpus_folder, transport, tamper, out_dir, options):
    train.print_sample = lambda path: None  # 200 tokens take as long as ten steps
    with tempfile.TemporaryDirectory() as out:
        same = [out_dir or out]
        if dist.is_initialized():  # that of rank 0 on all ranks
            dist.broadcast_object_list(same)
        out = Path(same[0])
        out.mkdir(parents=True, exist_ok=True)
        argv = [*flags(**options), "--data", corpus_folder, "--out_dir", str(out)]
        setup = launch.Setup(argv, train.METHODS, dist.get_world_size())
        config, made = setup.config, []
        link = simulate.SimulatedLink(config, config.shards, CPU) if config.limits_link else None
        background = link or not train.METHODS[config.method].barrier  # as in plumbing/launch.py
        auto = lambda crosses: "gloo" if crosses and background else "shm"
        backend = lambda ranks, crosses: auto(crosses) if transport == "auto" else transport
        mesh = Mesh(config.shards, CPU, 60, backend, link)
        mesh.spans = [] if config.timeline else None
        if link:
            link.note = mesh.note
        method_class = train.METHODS[config.method]

        def make(model, mesh, *rest):
            made.append(method_class(model, mesh, *rest))
            made.append(watch_syncs(made[0]))
            made.append(tamper(made[0], model, mesh) if tamper else None)
            return made[0]

        train.METHODS[config.method] = make
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            train.train(setup, mesh, launch.StopRequest(False))
        train.METHODS[config.method] = method_class
        rows = saved = None
        if mesh.rank == 0:
            rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
            saved = torch.load(out / "model.pt", weights_only=True)["model"]
    method, seen, watched = made
    vectors = {name: getattr(method, name).clone() for name in method.shared + method.private}
    names = "steps", "rounds", *(() if method.averages_gradients else method.scalars)
    state = {name: getattr(method, name) for name in names}
    return {
        "rows": rows,
        "printed": printed.getvalue(),
        "model": saved,
        "seen": seen,
        "watched": watched() if callable(watched) else watched,
        "master": method.model.master.clone(),
        "exp_avg": method.model.exp_avg.clone(),
        "vectors": vectors,
        "method_state": {k: v.tolist() if torch.is_tensor(v) else v for k, v in state.items()},
        "calls": dict(mesh.calls),
        "sent": dict(mesh.sent),
        "shard_index": mesh.shard_index,
    }


class Run:
    """A training's `losses` by step, `model` (state dict), rows by event, and `ranks` (raw)."""

    def __init__(self, ranks):
        self.ranks, first = ranks, ranks[0]
        self.rows = lambda event: [row for row in first["rows"] if row["event"] == event]
        self.losses = [row["loss"] for row in self.rows("step")]
        self.model, self.printed = first["model"], first["printed"]
        # What a method promises to be equal in all replicas is bit-identical after every sync.
        for rank in ranks:
            twin = ranks[rank["shard_index"]]
            assert rank["seen"] == twin["seen"] and torch.equal(rank["master"], twin["master"])


def _train_cases(corpus_folder, transport, cases):
    return [_train(corpus_folder, transport, *case) for case in cases]


def train_all(world_size, corpus_folder, *cases, transport="auto"):
    """A Run of each case (tamper, out_dir, flags), one after the other in one spawn.
    tamper(method, model, mesh), on every rank, may change the method first; what it returns (if
    callable: returns when called) ends in rank["watched"]. transport: gloo, shm (in which no
    traffic overlaps), or auto, as train.py chooses."""
    ranks = run_ranks(world_size, _train_cases, str(corpus_folder), transport, cases)
    return [Run(list(results)) for results in zip(*ranks)]


def run_training(
    world_size, corpus_folder, tamper=None, out_dir=None, transport="auto", **options
) -> Run:
    """One case of train_all()."""
    case = tamper, str(out_dir) if out_dir else None, options
    return train_all(world_size, corpus_folder, case, transport=transport)[0]
