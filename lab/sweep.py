"""Ablations in one line: every combination of flags, each with every seed, and a table at the end.

    python -m lab.sweep tau --method diloco edit --tau 4 16 --seed 1 2 3 --max_steps 448
    python -m lab.sweep tau --method minibatch --seed 1 2 3 --max_steps 448    # more runs of it

The first word names the sweep. The others are flags of train.py, each with one value or several;
yes and no stand for --name and --no-name: --weighted_averaging yes no. (Several --data are several
corpora.) A flag that only some of the methods have is left out for the others, and a line says so.
Runs that are then equal are made once. All command lines are checked before the first run starts.

The runs are in out/sweep/NAME/, a folder each, with what the run has printed (output.txt) and its
command line (command.txt). The name of a folder ends with a hash of all its flags and its corpus,
not of the code: after a change of the code that affects results, take another NAME. At the end
lab.table compares all runs in there, also those of earlier command lines, and writes NAME.md,
NAME.csv and NAME.svg beside them.

The same command line continues an interrupted sweep: a finished run is not repeated, an interrupted
one resumes from its checkpoint (with --plain it starts again), a failed one is tried again. Ctrl-C
lets each run end its round and save. A second Ctrl-C does not wait.

--ranks 4 processes train a run, with torchrun; --plain trains it in one (plain/), much faster for
small models: importing torch takes seconds, and here a process imports it once for all its runs.
The number of ranks is --replicas times --shards where --replicas is given. --jobs 2 makes two runs
at once, also on one GPU; the CPU's cores are divided among all processes, unless OMP_NUM_THREADS is
set.
"""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import data
from config import STOPS, Config, Parser, UserError, explain, make_config, read_flags, run_command
from lab import table
from plain.__main__ import main as train_plain
from plain.__main__ import read_config
from plumbing import checkpoint, launch
from train import METHODS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
PLAIN = [sys.executable, "-m", "plain"]
TRAIN = os.path.relpath(Path(__file__).parent.parent / "train.py")
OWN_FLAGS = ("out_dir", "resume", "overwrite", "save_on_exit", "dry_run")  # the sweep sets them
# Flags that do not change what a run computes: they are not in its hash.
NO_SETTING = {*OWN_FLAGS, "data", "checkpoint_interval", "keep", "timeout_s"}


@dataclass
class Run:
    """label: its flags that have several values in the sweep; flags: those of train.py that are
    given, as words; config: all of them."""

    label: str
    flags: dict
    config: dict
    ranks: int
    plain: bool
    folder: Path

    @property
    def fresh(self) -> bool:
        return self.plain or not checkpoint.list_checkpoints(self.folder)

    def words(self) -> list:
        """The flags on the command line."""
        words = words_of(self.flags)
        if self.plain:
            replicas = self.ranks // int(self.flags.get("shards", 1))
            words += ["--replicas", str(replicas)] if "replicas" not in self.flags else []
        else:
            words.append("--save_on_exit")
        return [
            *words, "--out_dir", str(self.folder),
            *(["--overwrite"] if self.fresh else ["--resume", "auto"]),
        ]  # fmt: skip

    def command(self) -> list:
        if self.plain:
            return [*PLAIN, *self.words()]
        return [*TORCHRUN, str(self.ranks), TRAIN, *self.words()]


# ---- planning ----


def read_axes(words) -> dict:
    """The words of a command line as flag -> its values. None: the flag stands alone."""
    axes = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found = [value] if equals else []
            if name.startswith("no-"):
                name = name[3:]
                found = ["no"]
            axes.setdefault(name, []).extend(found)
        elif name:
            axes[name].append(word)
        else:
            raise UserError(f"{word}: a value stands behind its flag, as in --tau 4 16")
    for name in OWN_FLAGS:
        if name in axes:
            raise UserError(f"--{name}: the sweep sets it for each run; leave it out")
    return {name: values or [None] for name, values in axes.items()}


def words_of(flags: dict) -> list:
    words = []
    for name, value in flags.items():
        if value == "no":
            words.append(f"--no-{name}")
        elif value in ("yes", None):
            words.append(f"--{name}")
        else:
            words += [f"--{name}", value]
    return words


def combinations(axes) -> list:
    """Each combination of values, as flag -> value. The first seed of all comes first, so that a
    sweep that is not finished yet has whole seeds."""
    names = sorted(axes, key=lambda name: name != "seed")
    found = []
    for values in itertools.product(*(axes[name] for name in names)):
        flags = dict(zip(names, values))
        found.append({name: flags[name] for name in axes})
    return found


def plan(root: Path, axes: dict, ranks: int, plain: bool) -> tuple:
    """(the different runs of a sweep in the folder root; method -> flags left out for it). Raises
    UserError for a command line that cannot run. Writes nothing."""
    axes = {"method": [Config.method]} | axes
    for method in axes["method"]:
        read_flags(words_of({"method": method}), METHODS)
    swept = [name for name, values in axes.items() if len(values) > 1]
    load = functools.lru_cache(data.load)
    runs = {}
    left_out = defaultdict(dict)  # of dicts without values: sets in order
    for flags in combinations(axes):
        given = read_flags(words_of(flags), METHODS)
        method = given.get("method", Config.method)
        known = METHODS[method].Config.__dataclass_fields__
        for name in sorted(given.keys() - known):
            # What no method of the sweep has stays, and make_config() refuses it.
            if any(name in METHODS[m].Config.__dataclass_fields__ for m in axes["method"]):
                left_out[method][name] = None
                flags.pop(name)
                given.pop(name)
        label = describe({name: flags[name] for name in swept if name in flags})
        try:
            run = make_run(root, label, flags, given, ranks, plain, load)
            if run.folder not in runs and not finished(run.folder):
                check(run, load)
        except (OSError, UserError) as error:
            raise UserError(f"{label or method}: {explain(error)[1]}") from None
        runs.setdefault(run.folder, run)
    return list(runs.values()), left_out


def notes_on_warmups(runs) -> list:
    """A line for each run that is mostly warm-up, where the defaults are those of longer runs."""
    notes = {}  # without values: a set in order
    for run in runs:
        steps = run.config["max_steps"]
        for name in "sync_warmup_steps", "lr_warmup_steps":
            warmup = run.config.get(name, 0)
            if 2 * warmup > steps:
                method = run.config["method"]
                notes[f"{method}: --{name} {warmup} is {warmup / steps:.0%} of the run"] = None
    return list(notes)


def describe(flags: dict) -> str:
    parts = []
    for name, value in flags.items():
        shown = {None: "yes", "": "none"}.get(value, value)
        parts.append(shown if name == "method" else f"{name} {shown}")
    return ", ".join(parts)


def make_run(root, label, flags, given, ranks, plain, load) -> Run:
    config = make_config(given, METHODS, {})
    if config.replicas:
        ranks = config.replicas * config.shards
    corpus = load(config.data or None, config.vocab_size, config.block_size)
    config.replicas = ranks // config.shards
    settings = {name: value for name, value in vars(config).items() if name not in NO_SETTING}
    text = json.dumps([settings, corpus.hash, ranks, plain], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    # Another command line may have made the run, in which other flags had several values.
    earlier = list(root.glob(f"*-{digest}"))
    name = label.replace(", ", ",").replace(" ", "=").replace("/", "_")[:100] or config.method
    folder = earlier[0] if earlier else root / f"{name}-{digest}"
    return Run(label or config.method, flags, vars(config), ranks, plain, folder)


def check(run: Run, load):
    """Raise UserError for what the run's program would refuse."""
    if run.plain:
        read_config(run.words())
    os.environ["LOCAL_RANK"] = str(0 if run.plain else run.ranks - 1)  # the last rank needs a GPU
    try:
        launch.Setup(run.words(), METHODS, load, run.ranks)
    finally:
        del os.environ["LOCAL_RANK"]


def finished(folder) -> bool:
    """Has the run written its last row?"""
    try:
        last = Path(folder, "metrics.jsonl").read_text().splitlines()[-1]
        row = json.loads(last)
        return row["event"] == "end" and row["exit"] == "done"
    except (OSError, ValueError, LookupError, TypeError):
        return False


# ---- running ----


class Torchrun:
    """A run of train.py with torchrun."""

    def __init__(self, run, environment):
        mode = "w" if run.fresh else "a"
        with open(run.folder / "output.txt", mode) as output:
            # In a session of its own: Ctrl-C in a terminal reaches the sweep only, which passes
            # one signal on. A second one would end train.py without a checkpoint.
            self.process = subprocess.Popen(
                run.command(),
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code of the run that has ended."""
        return self.process.poll()

    def stop(self, at_once):
        """SIGTERM, which torchrun passes on. at_once: without waiting for a checkpoint."""
        if not at_once:
            self.process.terminate()
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # torchrun's ranks notice it, see launch.py


class Worker:
    """A process that makes plain runs, one after the other. It imports torch once. spawn: a new
    Python, as Windows needs it, and as CUDA and threads do."""

    def __init__(self, environment):
        os.environ |= environment
        context = multiprocessing.get_context("spawn")
        self.runs, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()  # so that runs.recv() ends when the process does

    def start(self, run):
        output = run.folder / "output.txt"
        output.write_text("")
        with suppress(OSError):  # the process has died: poll() says it
            self.runs.send((run.words(), str(output)))

    def poll(self) -> int | None:
        """The exit code of the run that has ended. If the process has died, it is that of it."""
        if not self.runs.poll():
            return None
        try:
            return self.runs.recv()
        except (EOFError, OSError):
            self.process.join()
            return self.process.exitcode

    def stop(self, at_once):
        self.process.terminate()  # there is nothing to save

    def close(self):
        self.runs.close()
        self.process.join()


def work(runs):
    """A worker's process. It ends when the sweep has closed its end of `runs`."""
    for number in STOPS - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches it, too; the sweep stops it
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    with suppress(EOFError, OSError):
        while True:
            words, output = runs.recv()
            with open(output, "w", buffering=1) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            runs.send(make_plain_run(words))


def make_plain_run(words) -> int:
    """The exit code of `python -m plain`."""
    code = 0
    try:
        train_plain(words)
    except Exception as error:
        try:
            code, line = explain(error)
            print(f"plain: error: {line}", file=sys.stderr)
        except Exception:
            code = 1
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


class Stopped(Exception):
    def __init__(self, number, done, total):
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name}: {done} of {total} runs are done; "
            "the same command line goes on from here"
        )


class Failed(Exception):
    exit_code = 1


class Signals:
    """Notes the signals that stop a sweep: how many have come, and the number of the first."""

    def __init__(self):
        self.count = 0
        self.number = 0
        for number in STOPS:
            signal.signal(number, self._note)

    def _note(self, number, frame):
        self.count += 1
        self.number = self.number or number


class Sweep:
    """Makes runs, `jobs` at once. failed: (run, its last line)."""

    def __init__(self, runs, jobs):
        self.runs = runs
        self.jobs = jobs
        self.waiting = list(runs)
        self.running = {}  # Torchrun or Worker -> (run, begin)
        self.idle = []  # workers
        self.failed = []
        self.done = 0  # failed ones, too
        self.began = time.monotonic()
        self.signals = Signals()

    def execute(self):
        """Raises Stopped after a signal, when all children have ended."""
        stopped = 0  # signals that the children have got
        while self.running or self.waiting and not self.signals.count:
            while self.waiting and len(self.running) < self.jobs and not self.signals.count:
                self.start(self.waiting.pop(0))
            for process in list(self.running):
                code = process.poll()
                if code is not None:
                    self.end(process, code)
            if stopped < self.signals.count:
                stopped = self.signals.count
                for process in self.running:
                    process.stop(at_once=stopped > 1)
            time.sleep(0.05)
        for worker in self.idle:
            worker.close()
        if self.signals.count:
            done = sum(finished(run.folder) for run in self.runs)
            raise Stopped(self.signals.number, done, len(self.runs))

    def start(self, run):
        run.folder.mkdir(parents=True, exist_ok=True)
        if run.fresh:  # an earlier record would look like this run's
            Path(run.folder, "metrics.jsonl").unlink(missing_ok=True)
        shown = ["python" if word == sys.executable else word for word in run.command()]
        Path(run.folder, "command.txt").write_text(shlex.join(shown) + "\n")
        processes = 1 if run.plain else run.ranks
        threads = os.environ.get("OMP_NUM_THREADS", max(1, cores() // (self.jobs * processes)))
        environment = {"OMP_NUM_THREADS": str(threads)}
        if run.plain:
            self.idle = [worker for worker in self.idle if worker.process.is_alive()]
            process = self.idle.pop() if self.idle else Worker(environment)
            process.start(run)
        else:
            process = Torchrun(run, environment)
        self.running[process] = run, time.monotonic()

    def end(self, process, code):
        """A line about the run that this process has made."""
        run, began = self.running.pop(process)
        if run.plain:
            self.idle.append(process)
        if self.signals.count and not finished(run.folder):
            return
        self.done += 1
        if finished(run.folder):
            result = f"loss {last_loss(run.folder):.4f}"
            checkpoint.remove(checkpoint.list_checkpoints(run.folder))  # model.pt stays
        else:
            self.failed.append((run, reason(run.folder, code)))
            result = "failed"
        now = time.monotonic()
        left = (now - self.began) / self.done * (len(self.runs) - self.done)
        minutes, seconds = divmod(round(left), 60)
        print(
            f"{self.done}/{len(self.runs)} | {run.label} | {result} | {now - began:.0f} s | "
            f"{minutes}m{seconds:02d}s left"
        )


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_loss(folder) -> float:
    last = Path(folder, "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(last)["val_loss"]


def reason(folder, exit_code) -> str:
    """The last error in a run's output, of this project or of Python; else what torchrun says of
    its exit code, or the code."""
    lines = Path(folder, "output.txt").read_text(errors="replace").splitlines()
    for sign in "error: ", "Error: ", "exitcode":
        if found := [line for line in lines if sign in line]:
            return found[-1].strip()
    return f"exit {exit_code}"


# ---- the command line ----


def read_command(argv: list) -> tuple:
    """(the sweep's own arguments, flag of train.py -> values)."""
    parser = Parser(
        prog="python -m lab.sweep",
        usage="python -m lab.sweep NAME [--flag VALUE ...] [--ranks N | --plain] [--jobs N]",
        description="Every combination of flags of train.py, and a table of the results.",
        allow_abbrev=False,
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--ranks", default=4, help="processes of a run (default: 4)", **number)
    parser.add_argument("--plain", action="store_true", help="train each run in one process")
    parser.add_argument("--jobs", default=1, help="runs at once (default: 1)", **number)
    parser.add_argument(
        "--base", nargs="+", default=[], metavar="FLAG=VALUE", help="compare with these runs"
    )
    parser.add_argument("--x", help="draw a picture with this x axis, as lab.table does")
    name = ""
    if argv and not argv[0].startswith("-"):
        name, *argv = argv
    args, words = parser.parse_known_args(argv)
    if not name or name in (".", "..") or "/" in name:
        raise UserError("the first word is the name of the sweep, a folder in out/sweep/")
    axes = read_axes(words)
    for flag in ("ranks", "jobs"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)}: must be at least 1")
    args.name = name
    return args, axes


def check_table(args, root, runs):
    """Raise UserError if the table could not be made from these runs and the earlier ones."""
    known = [table.settings(run.config) for run in runs]
    for path in root.glob("*/metrics.jsonl"):
        if finished(path.parent):
            known.append(table.settings(table.read_run(path.parent)["config"]))
    table.check_base(args.base, known)
    table.check_x(args.x, known)


def main(argv: list):
    args, axes = read_command(argv)
    root = Path("out/sweep", args.name)
    runs, left_out = plan(root, axes, args.ranks, args.plain)
    check_table(args, root, runs)
    todo = [run for run in runs if not finished(run.folder)]
    for method, names in left_out.items():
        print(f"note    {method} does not have --{', --'.join(names)}: left out for it")
    for line in notes_on_warmups(runs):
        print(f"note    {line}")
    total = len(combinations(axes))
    print(
        f"sweep   {root}: {total} combinations, {len(runs)} different runs, {len(todo)} to do, "
        f"{args.jobs} at a time"
    )
    root.mkdir(parents=True, exist_ok=True)
    lock = checkpoint.lock(root)
    try:
        make(root, args, todo)
    finally:
        os.close(lock)


def make(root, args, todo):
    """Make the runs, and then the table. Raises Failed if a run has failed."""
    sweep = Sweep(todo, args.jobs)
    sweep.execute()
    for run, text in sweep.failed:
        print(f"failed  {run.folder}/output.txt: {text}")
    show(root, args)
    if sweep.failed:
        folders = ", ".join(run.folder.name for run, _ in sweep.failed)
        raise Failed(f"{len(sweep.failed)} of {len(todo)} runs failed: {folders}")


def show(root, args):
    """The table of all runs of the sweep."""
    folders = sorted(path.parent for path in root.glob("*/metrics.jsonl"))
    if any(map(finished, folders)):
        print()
        words = [*map(str, folders), "--out", str(root / args.name)]
        words += ["--x", args.x] if args.x else []
        words += ["--base", *args.base] if args.base else []
        table.main(words)


if __name__ == "__main__":
    run_command("sweep.py", lambda: main(sys.argv[1:]))
