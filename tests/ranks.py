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
from config import Config, parse, run_command
from mesh import Mesh
from method import Method
from model import ModelConfig
from optimizer import AdamW
from plumbing import launch, simulate
from plumbing.log import Clock, RoundRecord
from methods import PLAIN, TABLE

# A method that a reader has added is tested like the others when it has its plain version.
OUR_METHODS = list(PLAIN)
ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
context = multiprocessing.get_context("forkserver")
# Imported once instead of in every rank: besides train the methods, what tests import, and what
# torch.use_deterministic_algorithms() imports.
PRELOADED = ["train", "lab.bench", "pytest", "torch._inductor.config"]
context.set_forkserver_preload(PRELOADED + [module for _, module, _ in TABLE.values()])


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


def run_ranks(world_size, function, *args, timeout_s=900):
    """[function(*args) on rank 0, ...]; function must be a module's, its result picklable."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            own_args = (rank, world_size, folder, function, args)
            ranks.append(context.Process(target=_rank_main, args=own_args))
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout_s)
            if process.is_alive():
                for other in ranks:
                    other.kill()
                raise TimeoutError(f"{function.__name__}: a rank hangs after {timeout_s} s")
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        assert not errors, "\n".join(errors)
        files = [f"{folder}/result-{rank}" for rank in range(world_size)]
        return [torch.load(file, weights_only=False) for file in files]


def _become(rank, world_size, port, folder):
    """A rank of torchrun, which writes into files of this folder."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it is there already, and stays
    _write_to(folder, rank)
    torch.set_num_threads(1)


def _command(argv, rank, world_size, port, folder):
    """What `python train.py argv` does under a launcher, in a process that has its imports."""
    _become(rank, world_size, port, folder)
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
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # as Python's


def script(argv, rank, world_size, port, folder, path, cwd):
    """In place of _command: what `python path argv` does in the folder cwd."""
    _become(rank, world_size, port, folder)
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
        self.store = store or agent_store()
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in *self.folder.glob("out-*"), *self.folder.glob("err-*"):
            old.unlink()
        self.ranks = []
        for rank in range(world_size):
            target, *more = special.get(rank, (_command,))
            args = (list(argv), rank, world_size, self.store.port, str(folder), *more)
            self.ranks.append(context.Process(target=target, args=args))
        for process in self.ranks:
            process.start()

    def signal(self, number, *ranks):
        for rank in ranks or range(len(self.ranks)):
            with contextlib.suppress(ProcessLookupError):
                if self.ranks[rank].is_alive():
                    os.kill(self.ranks[rank].pid, number)

    def wait(self, timeout_s=900) -> list:
        """The exit codes; -9 for a rank that had to be killed because it hung."""
        deadline = time.monotonic() + timeout_s
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        self.signal(signal.SIGKILL)
        for process in self.ranks:
            process.join()
        return [process.exitcode for process in self.ranks]

    def lines(self, name) -> list:
        """All lines that the ranks wrote to "out" or "err"."""
        found = []
        for rank in range(len(self.ranks)):
            path = self.folder / f"{name}-{rank}"
            if path.exists():
                found += path.read_text().splitlines()
        return found

    def wait_for(self, text, timeout_s=900):
        """Until rank 0 has printed a line with this text."""
        deadline = time.monotonic() + timeout_s
        while not any(text in line for line in self.lines("out")):
            assert time.monotonic() < deadline, (text, self.lines("out"), self.lines("err"))
            time.sleep(0.005)


TINY = "--n_layer 2 --n_head 1 --n_embd 6 --block_size 8 --batch_size 2 --dtype fp64".split()
TINY += "--log_interval 1 --eval_batches 1 --lr 0.01 --lr_warmup_steps 3 --device cpu".split()


COMMON = Config.__dataclass_fields__.keys()


def flags(**options) -> list:
    """Keyword arguments as command-line flags on top of TINY. Those that only other methods have
    are left out, so that a test can give all methods the same ones. (With resume and without a
    method the checkpoint knows the method: all flags stay.)"""
    fields = {}  # method -> its own flags
    for method, method_class in train.METHODS.items():
        fields[method] = method_class.Config.__dataclass_fields__.keys()
    chosen = options.get("method", "edit")
    foreign = set().union(*fields.values()) - fields.get(chosen, set()) - COMMON
    if "resume" in options and "method" not in options:
        foreign = set()
    argv = list(TINY)
    for name, value in options.items():
        if name in foreign:
            continue
        if value is True:
            argv.append(f"--{name}")
        elif value is False:
            argv.append(f"--no-{name}")
        else:
            argv.append(f"--{name}={value}")
    return argv


def run_config(**options):
    """All flags of a run as attributes."""
    return parse(flags(**options), train.METHODS)[0]


def method_alone(mesh=None, steps=0, **options):
    """A method at the end of its first round of two steps, without a training around it. steps:
    those that it has taken before."""
    config = run_config(**dict(sync_warmup_steps=0) | options)
    mesh = mesh or Mesh(1, CPU)
    shape = ModelConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, 20)
    model = train.make_model(shape, mesh, torch.float64)
    AdamW(model, 0.0, (0.9, 0.95))  # it makes the moments
    record = RoundRecord(mesh)
    method = train.METHODS[config.method](model, mesh, config, record, Clock(mesh.device))
    method.steps = steps
    method.before_step()
    method.local_steps = 2
    record.loss_sum = model.master.new_zeros(())
    return method


def watch_syncs(method):
    """Record a checksum of what a method promises to be equal in all replicas, whenever a sync has
    completed or a fragment has landed: the parameters, or the anchor of the streaming methods."""
    seen = []
    equal = None
    if type(method).evaluation_model is Method.evaluation_model:
        equal = method.model.master
    elif hasattr(method, "land"):
        equal = method.anchor

    def and_look(function, *args):
        function(*args)
        seen.append(None if equal is None else zlib.crc32(equal.numpy()))

    method.record.done = functools.partial(and_look, method.record.done)
    if hasattr(method, "land"):
        method.land = functools.partial(and_look, method.land)
    return seen


def end_long_rounds(method):
    """A round that nobody ends would train for ever, while other replicas wait."""
    after_step = method.after_step

    def look_and_end(*args):
        assert method.local_steps < 1000, f"nobody ends the round of replica {method.mesh.replica}"
        return after_step(*args)

    method.after_step = look_and_end


def _train(corpus_folder, transport, tamper, out_dir, options):
    train.print_sample = lambda path: None  # 200 tokens take as long as ten steps
    with tempfile.TemporaryDirectory() as temporary:
        same = [out_dir or temporary]
        if dist.is_initialized():  # that of rank 0 on all ranks
            dist.broadcast_object_list(same)
        out = Path(same[0])
        out.mkdir(parents=True, exist_ok=True)
        argv = [*flags(**options), "--data", corpus_folder, "--out_dir", str(out)]
        setup = launch.Setup(argv, train.METHODS, train.data.load, dist.get_world_size())
        mesh = _mesh(setup.config, transport)
        with contextlib.redirect_stdout(io.StringIO()) as printed, _made(tamper) as made:
            train.Training(setup, mesh, launch.StopRequest(False)).run()
        method = made["method"]
        if callable(made["watched"]):
            made["watched"] = made["watched"]()  # before the copies below
        result = {
            "rows": None,
            "model": None,
            "printed": printed.getvalue(),
            "seen": made["seen"],
            "watched": made["watched"],
            "master": method.model.master.clone(),
            "exp_avg": method.model.exp_avg.clone(),
            "layouts": method.model.layouts,
            "vectors": {},
            "method_state": _state(method),
            "calls": dict(mesh.calls),
            "sent": dict(mesh.sent),
            "shard_index": mesh.shard_index,
        }
        for name in method.vectors:
            result["vectors"][name] = getattr(method, name).clone()
        if mesh.rank == 0:
            result["rows"] = [json.loads(line) for line in open(out / "metrics.jsonl")]
            result["model"] = torch.load(out / "model.pt", weights_only=True)["model"]
        return result


def _mesh(config, transport):
    link = None
    if config.link_mbps:
        link = simulate.SimulatedLink(config, config.shards, CPU)
    overlaps = link or not train.METHODS[config.method].barrier  # as in plumbing/launch.py

    def backend(ranks, crosses_replicas):
        if transport != "auto":
            return transport
        return "gloo" if crosses_replicas and overlaps else "shm"

    mesh = Mesh(config.shards, CPU, 3600, backend)
    mesh.link = link
    if config.timeline:
        mesh.spans = []
    if link:
        link.note = mesh.note
    return mesh


@contextlib.contextmanager
def _made(tamper):
    """What train.Training makes of the method: the method itself, what it looks like after each sync
    and what tamper() returns."""
    made = {"watched": None}
    classes = train.METHODS

    def make(name, model, *rest):
        method = classes[name](model, *rest)
        made["method"] = method
        end_long_rounds(method)
        made["seen"] = watch_syncs(method)
        if tamper:
            made["watched"] = tamper(method, model, model.mesh)
        return method

    train.METHODS = {name: functools.partial(make, name) for name in classes}
    yield made
    train.METHODS = classes


def _state(method) -> dict:
    """Steps, rounds and scalars, as lists and numbers."""
    names = ["steps", "rounds"]
    if not method.averages_gradients:
        names += method.scalars
    state = {}
    for name in names:
        value = getattr(method, name)
        state[name] = value.tolist() if torch.is_tensor(value) else value
    return state


class Run:
    """A training's `losses` by step, `model` (state dict), rows by event, and `ranks` (raw)."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.model = ranks[0]["model"]
        self.printed = ranks[0]["printed"]
        self.losses = [row["loss"] for row in self.rows("step")]
        # What a method promises to be equal in all replicas is bit-identical after every sync.
        for rank in ranks:
            twin = ranks[rank["shard_index"]]
            assert rank["seen"] == twin["seen"]
            assert torch.equal(rank["master"], twin["master"])

    def parameters(self) -> dict:
        """Of replica 0, in the precision of its masters: name -> value, as in `model`."""
        layouts = self.ranks[0]["layouts"]
        sizes = [layout.shard_size for layout in layouts]
        shards = [rank["master"].split(sizes) for rank in self.ranks[: layouts[0].padded // sizes[0]]]
        found = {}
        for l, (layout, *pieces) in enumerate(zip(layouts, *shards)):
            for name, value in layout.cut(torch.cat(pieces)).items():
                found[f"layers.{l}.{name}"] = value
        return found

    def rows(self, event) -> list:
        return [row for row in self.ranks[0]["rows"] if row["event"] == event]


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
    if out_dir:
        out_dir = str(out_dir)
    case = tamper, out_dir, options
    return train_all(world_size, corpus_folder, case, transport=transport)[0]
