"""Ablations in one line: every combination of flags, each with every seed, and a table at the end.

    python -m lab.sweep tau --method diloco edit --tau 4 16 --seed 1 2 3 --max_steps 448 --plain
    python -m lab.sweep tau --method minibatch --seed 1 2 3 --max_steps 448 --plain    # more of it

The first word names the sweep. The others are flags of train.py, each with one value or several;
yes and no stand for --name and --no-name: --weighted_averaging yes no. Flags that change together
are joined by commas, as are their values: --outer_lr,outer_momentum 1,0 0.9,0.3. A flag that only
some of the methods have is left out for the others, and a line says so. All command lines are
checked before the first run starts.

--best 7 --seed 1 2 3 compares settings fairly, each with its own best outer step. First all
combinations train with seed 7. Then each setting trains with the other seeds, but only with those
values of --outer_lr, --outer_momentum, --lr and --muon_lr that had the lowest loss. (A setting is
what all other flags say.) The runs with seed 7 are in a sweep of their own, NAME_tune.

--plain trains a run in one process (plain/), much faster for small models; without it --ranks
processes do, 4 by default, with torchrun. --jobs 2 makes two runs at once.

The runs are in out/sweep/NAME/, a folder each, with what the run has printed (output.txt) and its
command line (command.txt). The name of a folder ends with a hash of all its flags and its corpus,
not of the code: after a change of the code take another NAME. The same line goes on after Ctrl-C or
a kill: a finished run is not repeated, a failed one is tried again, an interrupted one resumes from
its checkpoint (with --plain it starts again). A run that has diverged is a result: the table says
so. At the end lab.table compares all runs in there, also those of earlier lines, and writes
NAME.md, NAME.csv and NAME.svg beside them.
"""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import data
from config import STOPS, Config, Parser, UserError, explain, read_flags, run_command
from lab import table
from lab.rows import read_run, read_runs
from methods import METHODS
from plain.__main__ import main as train_plain
from plain.__main__ import read_config
from plumbing import launch

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--local_addr", "127.0.0.1", "--nproc_per_node"]
TRAIN = os.path.relpath(Path(__file__).parent.parent / "train.py")
TUNED = ("outer_lr", "outer_momentum", "lr", "muon_lr")  # by --best
OWN_FLAGS = ("out_dir", "resume", "overwrite", "save_on_exit", "dry_run")  # the sweep sets them
# Flags that do not change what a run computes: they are not in its hash.
NO_SETTING = {*OWN_FLAGS, "data", "checkpoint_interval", "keep", "timeout_s"}
DIVERGED = ("diverged", "all replicas were left out")  # how such errors begin


class Ended(Exception):
    def __init__(self, exit_code, line):
        self.exit_code = exit_code
        super().__init__(line)


@dataclass
class Run:
    """flags: those of train.py that are given, as words; config: all of them; words: its command
    line, but for the folder."""

    flags: dict
    config: dict
    words: list
    plain: bool
    folder: Path

    def setting(self) -> dict:
        """Its flags without the seed."""
        return {name: value for name, value in self.flags.items() if name != "seed"}


# ---- planning ----


def read_axes(words) -> dict:
    """The words of a command line as flag -> its values. A flag that stands alone is `yes`."""
    axes = {}  # of a flag that is given twice the last values count, as in argparse
    for word in words:
        if word.startswith("--no-"):
            axes[word[5:]] = ["no"]
            continue
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            axes[name] = [value] if equals else []
        elif axes:
            axes[name].append(word)
        else:
            raise UserError(f"{word}: a value stands behind its flag, as in --tau 4 16")
    names = [name for key in axes for name in key.split(",")]
    for name in names:
        if name in OWN_FLAGS:
            raise UserError(f"--{name}: the sweep sets it for each run; leave it out")
        if names.count(name) > 1:
            raise UserError(f"--{name}: alone or with another flag, not both")
    return {name: values or ["yes"] for name, values in axes.items()}


def words_of(flags: dict) -> list:
    words = []
    for name, value in flags.items():
        if value == "no":
            words.append(f"--no-{name}")
        elif value == "yes":
            words.append(f"--{name}")
        else:
            words += [f"--{name}", value]
    return words


def combinations(axes) -> list:
    """Each combination of values, as flag -> value. The first seed of all comes first, so that a
    sweep that is not finished yet has whole seeds."""
    keys = sorted(axes, key=lambda key: key != "seed")
    found = []
    for values in itertools.product(*(axes[key] for key in keys)):
        chosen = dict(zip(keys, values))
        flags = {}
        for key in axes:
            names = key.split(",")
            parts = chosen[key].split(",") if len(names) > 1 else [chosen[key]]
            if len(parts) != len(names):
                raise UserError(f"--{key} {chosen[key]}: it takes {len(names)} values at a time")
            flags |= dict(zip(names, parts))
        found.append(flags)
    return found


def plan(root: Path, axes: dict, ranks: int, plain: bool) -> tuple:
    """(the different runs of a sweep in the folder root, notes). Raises UserError for a command
    line that cannot run. Writes nothing."""
    axes = {"method": [Config.method]} | axes
    swept = {name for key, values in axes.items() if len(values) > 1 for name in key.split(",")}
    found = combinations(axes)
    fields = {}  # method -> names of its flags
    for method in METHODS.keys() & {flags["method"] for flags in found}:
        fields[method] = METHODS[method].Config.__dataclass_fields__.keys()
    some = set().union(*fields.values())

    runs = {}
    notes = {}  # without values: a set in order
    for flags in found:
        method = flags["method"]
        # What no method of the sweep has stays, and is refused.
        for name in [name for name in flags if name in some - fields.get(method, some)]:
            notes[f"{method} does not have --{name}: left out for it"] = None
            del flags[name]
        name = ",".join(f"{name}={flags[name]}" for name in flags if name in swept) or method
        try:
            run = make_run(root, name, flags, ranks, plain)
        except (OSError, UserError) as error:
            raise UserError(f"{name}: {explain(error)[1]}") from None
        warmup = run.config.get("sync_warmup_steps", 0)
        if warmup >= run.config["max_steps"]:
            notes[f"{method}: --sync_warmup_steps {warmup} is the whole run"] = None
        runs.setdefault(run.folder, run)
    return list(runs.values()), list(notes)


open_corpus = functools.cache(data.load)  # each corpus once


def make_run(root, name, flags, ranks, plain) -> Run:
    """Raises UserError for what the run's program would refuse."""
    words = words_of(flags)
    given = read_flags(words, METHODS)
    shards = given.get("shards", Config.shards)
    ranks = given.get("replicas", 0) * shards or ranks
    if plain:
        words += ["--replicas", str(ranks // shards)]
        config = read_config(words)
        corpus = open_corpus(config.data or None, config.vocab_size, config.block_size)
    else:
        setup = launch.Setup([*words, "--overwrite"], METHODS, open_corpus, ranks)
        config, corpus = setup.config, setup.corpus
        words = [*TORCHRUN, str(ranks), TRAIN, *words, "--save_on_exit"]
    config.replicas = ranks // shards
    settings = {name: value for name, value in vars(config).items() if name not in NO_SETTING}
    text = json.dumps([settings, corpus.hash, ranks, plain], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    # Another command line may have made the run, in which other flags had several values.
    earlier = list(root.glob(f"*-{digest}"))
    folder = root / f"{name.replace('/', '_')[:100]}-{digest}"
    return Run(flags, vars(config), words, plain, earlier[0] if earlier else folder)


def choose(runs, losses) -> list:
    """The runs with the lowest losses: one of each group that differs in TUNED flags only."""
    best = {}  # group -> (loss, run)
    for run, loss in zip(runs, losses):
        group = tuple(item for item in run.setting().items() if item[0] not in TUNED)
        if group not in best or loss < best[group][0]:
            best[group] = loss, run
    return [run for _, run in best.values()]


def ended(folder) -> bool:
    """Has the run finished, or diverged?"""
    try:
        record = read_run(folder)
        return record["diverged"] or record["end"] is not None
    except (OSError, UserError):
        return False


def loss_of(folder) -> float:
    """inf if the run has diverged."""
    ((run,), _) = read_runs([folder])
    return run.loss


# ---- running: in a worker's process, which makes several runs in turn and imports torch once ----

torchrun = None  # that of the run in progress


def begin_worker():
    signal.signal(signal.SIGTERM, end_worker)
    threading.Thread(target=end_with_the_sweep, daemon=True).start()


def end_worker(*_):
    """torchrun passes SIGTERM on to train.py, which saves a checkpoint."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if torchrun:
        torchrun.terminate()
        with suppress(ChildProcessError):  # torchrun.wait() could wait for itself in make()
            os.waitpid(torchrun.pid, 0)
    os._exit(128 + signal.SIGTERM)


def end_with_the_sweep():
    """When it has been killed, nobody else tells this process."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGTERM)


def make(run: Run) -> float:
    """Make a run. Returns its seconds."""
    global torchrun
    began = time.monotonic()
    run.folder.mkdir(parents=True, exist_ok=True)
    again = not run.plain and any(run.folder.glob("checkpoint-*"))
    words = [*run.words, "--out_dir", str(run.folder)]
    words += ["--resume", "auto"] if again else ["--overwrite"]
    program = ["python", "-m", "plain"] if run.plain else []
    Path(run.folder, "command.txt").write_text(shlex.join([*program, *words]) + "\n")
    with open(run.folder / "output.txt", "a" if again else "w", buffering=1) as output:
        if run.plain:
            with redirect_stdout(output), redirect_stderr(output):
                make_plain_run(words)
        else:
            # In a session of its own: Ctrl-C in a terminal does not reach it.
            options = {"stdout": output, "stderr": output, "start_new_session": True}
            torchrun = subprocess.Popen(words, **options)
            torchrun.wait()
            torchrun = None
    if not ended(run.folder) and reason(run.folder).partition("error: ")[2].startswith(DIVERGED):
        with open(run.folder / "metrics.jsonl", "a") as record:
            record.write(json.dumps({"event": "end", "exit": "diverged"}) + "\n")
    return time.monotonic() - began


def make_plain_run(words):
    """What `python -m plain` does."""
    try:
        train_plain(words)
    except Exception as error:
        try:
            print(f"plain: error: {explain(error)[1]}")
        except Exception:
            traceback.print_exc()


def reason(folder) -> str:
    """The last error in a run's output, of this project or of Python; else its last line."""
    lines = Path(folder, "output.txt").read_text(errors="replace").split("\n")
    for sign in "error: ", "Error: ", "exitcode", "":
        if found := [line for line in lines if sign in line and line.strip()]:
            return found[-1].strip()
    return "no output"


# ---- running: the sweep's own process ----


def make_all(runs, jobs) -> list:
    """Make the runs, `jobs` at once. Returns the names of those that have failed."""
    processes = 1  # of a run
    for run in runs:
        if not run.plain:
            processes = max(processes, run.config["replicas"] * run.config["shards"])
    threads = max(1, (os.cpu_count() or 1) // (jobs * processes))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    for number in STOPS - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)  # in the workers, too: the sweep ends them
    failed = []
    began = time.monotonic()
    # spawn: a new Python, as CUDA and threads need it
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), begin_worker)
    try:
        futures = {pool.submit(make, run): run.folder for run in runs}
        for number in STOPS:
            signal.signal(number, stop)
        for done, future in enumerate(as_completed(futures), 1):
            folder = futures[future]
            seconds = future.result()
            if not ended(folder):
                failed.append(folder.name)
                result = f"failed: {reason(folder)} ({folder}/output.txt)"
            else:
                result = f"loss {loss_of(folder):.4f}".replace("loss inf", "diverged")
                for path in folder.glob("checkpoint-*"):
                    shutil.rmtree(path)  # model.pt stays
            left = round((time.monotonic() - began) / done * (len(runs) - done))
            times = f"{seconds:.0f} s | {left} s left"
            print(f"{done}/{len(runs)} | {folder.name} | {result} | {times}")
    except BrokenProcessPool:
        raise Ended(1, "a process was killed (memory?); the same command line goes on") from None
    finally:
        for worker in multiprocessing.active_children():
            worker.terminate()
        pool.shutdown(cancel_futures=True)
        del pool  # its semaphores: a process that ends by a signal does not clean up
    return failed


def stop(number, frame):
    for other in STOPS:
        signal.signal(other, signal.SIG_IGN)  # the workers end now; some save a checkpoint first
    name = signal.Signals(number).name
    raise Ended(128 + number, f"stopped by {name}; the same command line goes on from here")


def sweep(root: Path, runs, notes, args):
    """Make the runs that are not there yet, and a table of all in the folder."""
    todo = [run for run in runs if not ended(run.folder)]
    for note in notes:
        print(f"note    {note}")
    print(f"sweep   {root}: {len(runs)} runs, {len(todo)} to do, {args.jobs} at a time")
    failed = make_all(todo, args.jobs)
    folders = sorted(path.parent for path in root.glob("*/metrics.jsonl"))
    if any(map(ended, folders)):
        words = [*map(str, folders), "--out", str(root / root.name)]
        words += ["--x", args.x] if args.x else []
        words += ["--base", *args.base] if args.base else []
        table.main(words)
    if failed:
        raise Ended(1, f"{len(failed)} of {len(todo)} runs failed: {', '.join(failed)}")


# ---- the command line ----


def read_command(argv: list) -> tuple:
    """(the sweep's own arguments, flag of train.py -> values)."""
    parser = Parser(
        prog="python -m lab.sweep",
        usage="python -m lab.sweep NAME [--flag VALUE ...] [--plain | --ranks N] [--jobs N]",
        description="Every combination of flags of train.py, and a table of the results.",
        allow_abbrev=False,
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--ranks", default=4, help="processes of a run (default: 4)", **number)
    parser.add_argument("--plain", action="store_true", help="train each run in one process")
    parser.add_argument("--jobs", default=1, help="runs at once (default: 1)", **number)
    parser.add_argument("--best", metavar="SEED", help="tune the outer step with this seed first")
    parser.add_argument("--base", nargs="+", default=[], metavar="FLAG=VALUE", help="compare with")
    parser.add_argument("--x", help="x axis of the picture, as in lab.table")
    args, words = parser.parse_known_args(argv)
    args.name = words[0] if words else ""
    if not args.name or args.name.startswith(("-", ".")) or "/" in args.name:
        raise UserError("the first word is the name of the sweep, a folder in out/sweep/")
    for name in "ranks", "jobs":
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    return args, read_axes(words[1:])


def main(argv: list):
    args, axes = read_command(argv)
    root = Path("out/sweep", args.name)
    if not any("seed" in key.split(",") for key in axes):
        axes["seed"] = [str(Config.seed)]
    if args.best is not None:
        if "seed" not in axes:
            raise UserError(f"--best {args.best}: give --seed alone, not with another flag")
        seeds = [seed for seed in axes["seed"] if seed != args.best]
        if not seeds:
            raise UserError(f"--best {args.best}: give other seeds, too, as in --seed 1 2 3")
        tuning_axes = axes | {"seed": [args.best]}
        axes["seed"] = seeds
    runs, notes = plan(root, axes, args.ranks, args.plain)
    if args.best is not None:
        tuning = Path(f"{root}_tune")
        tried, _ = plan(tuning, tuning_axes, args.ranks, args.plain)
        sweep(tuning, tried, notes, args)
        best = choose(tried, [loss_of(run.folder) for run in tried])
        notes = [f"best of its setting: {run.folder.name}" for run in best]
        settings = [run.setting() for run in best]
        runs = [run for run in runs if run.setting() in settings]
        print()
    sweep(root, runs, notes, args)


if __name__ == "__main__":
    run_command("sweep.py", lambda: main(sys.argv[1:]))
