"""For lab.py: its command, many runs of train.py (start, keep, read), and experiments made of them
(table, JSON, picture).

A run's folder is named after its flags, not after the code: after a change that affects results,
delete out/lab.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import torch.distributed as dist

from plot import draw
from plumbing.checkpoint import list_checkpoints, lock
from plumbing.config import Parser, UserError, check_limits
from plumbing.log import CURVES, read_run
from plumbing.rows import CASE, table

HERE = Path(__file__).parent.parent
RUNS, RESULTS = HERE / "out" / "lab", HERE / "results"
EXPERIMENTS = {}  # by name
SEQUENCES, CONTEXT = 16, 128  # of all ranks per step, each of so many tokens
BASE = {  # flags of the runs, where an experiment does not say others
    "max_steps": 448, "sync_warmup_steps": 128, "eval_interval": 64, "log_interval": 64,
    "checkpoint_interval": 128,
}  # fmt: skip
QUICK = {  # the same with --quick
    "max_steps": 96, "sync_warmup_steps": 32, "eval_interval": 32, "eval_batches": 4,
    "checkpoint_interval": 16,
}  # fmt: skip
STOP = threading.Event()  # after a signal or a failure
# Ranks are forked from a process that has torch already: torchrun would take 8 s more per run.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["train", "torch._dynamo"])


def run_rank(argv: list, rank: int, ranks: int, port: int, output: Path):
    """In place of torchrun: train.py with these flags on one of the ranks."""
    import train  # the fork server has it

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # lab.py has the store
    with open(output, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(HERE)
    train.main(argv)


@dataclass
class Run:
    """One training. columns: what its row says of it; flags: of train.py; stages: (ranks, step at
    which these are stopped and the next ones resume)."""

    columns: dict
    flags: dict
    stages: tuple

    @property
    def folder(self) -> Path:
        text = json.dumps([self.flags, self.stages], sort_keys=True)
        return RUNS / f"{self.flags['method']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def command(self, ranks: int) -> str:
        flags = {"batch_size": SEQUENCES // ranks, "device": "cpu"} | self.flags
        flags |= {"resume": "auto", "out_dir": os.path.relpath(self.folder, HERE)}
        words = [f"OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node {ranks} train.py"]
        for name, value in flags.items():
            switch = {True: f"--{name}", False: f"--no-{name}"}
            words.append(switch[value] if isinstance(value, bool) else f"--{name} {value}")
        return " ".join(words)

    def commands(self) -> list:
        stops = [f"    # until step {stop}" if stop else "" for _, stop in self.stages]
        return [self.command(ranks) + stop for (ranks, _), stop in zip(self.stages, stops)]

    def minutes(self) -> float:
        """Roughly, on 2 cores: 4 s for start and evaluations, and 57 ms per step of 4 sequences per
        rank. A slow link is not counted."""
        sequences = self.flags.get("batch_size", 4)
        return (4 + self.flags["max_steps"] * (0.025 + 0.008 * sequences)) / 60

    def finished(self) -> bool:
        try:
            return read_run(self.folder)["end"] is not None
        except (OSError, UserError):  # not begun, or killed while it began
            return False

    def row(self) -> dict:
        """columns, results, the lists of the evaluations as *_curve, the command lines."""
        record = read_run(self.folder)
        row = self.columns | {name: record[name][-1] for name in ("val_loss", "sync_bytes")}
        row["warmup_steps"] = self.flags["sync_warmup_steps"]
        tokens, seconds, sent = (record[name] for name in ("tokens", "train_s", "sync_bytes"))
        ranks = self.stages[0][0]
        step_tokens = CONTEXT * ranks * self.flags.get("batch_size", SEQUENCES // ranks)
        warmup = row["warmup_steps"] * step_tokens
        # What the warm-up took is not counted, if there was an evaluation at its end.
        began = {0: (0, 0.0)} | dict(zip(tokens, zip(sent, seconds)))
        warmup = warmup if warmup in began else 0
        row["local_bytes"] = sent[-1] - began[warmup][0]
        row["tokens_per_s"] = (tokens[-1] - warmup) / (seconds[-1] - began[warmup][1])
        row |= {f"{name}_curve": record[name] for name in CURVES}
        # Milliseconds per step between the rows of the record; the first step is slower.
        row["step_ms_curve"] = [step["step_ms"] for step in record["steps"][2:]]
        return row | {"command": "\n".join(self.commands())}

    def execute(self):
        """Train, or go on where an earlier start was interrupted. Then keep no checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for ranks, stop in self.stages:
            if not self.reached(stop):
                self.start(ranks, stop)
        for path in list_checkpoints(self.folder):  # those of all experiments take 22 GB
            shutil.rmtree(path)

    def reached(self, stop) -> bool:
        steps = [int(path.name.split("-")[1]) for path in list_checkpoints(self.folder)]
        return self.finished() or stop is not None and max(steps, default=0) >= stop

    def start(self, ranks: int, stop: int | None):
        """Run train.py to its end or, if there is a `stop`, until a checkpoint has that step."""
        flags = self.command(ranks).split("train.py ")[1].split()
        output = self.folder / "output.txt"
        output.write_text("")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        arguments = [(flags, rank, ranks, store.port, output) for rank in range(ranks)]
        processes = [forkserver.Process(target=run_rank, args=args) for args in arguments]
        try:
            for process in processes:
                process.start()
            # Until all ranks have ended, or one with an error.
            while {process.exitcode for process in processes} in ({None}, {None, 0}):
                if STOP.is_set() or stop and self.reached(stop):
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                if process.pid:
                    process.terminate()
                    process.join()
        if not self.reached(stop):
            if STOP.is_set():
                raise UserError("interrupted; the same command goes on from here")
            raise UserError(f"a run failed, see {output}: {self.command(ranks)}")


def execute_all(runs: list, jobs: int):
    """Run what has not finished, `jobs` runs at a time. Ctrl-C and SIGTERM stop them."""
    todo = list({run.folder: run for run in runs if not run.finished()}.values())
    print(f"{len(runs)} runs, {len(todo)} to do", flush=True)
    if not todo:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for lab.py, not for the fork server
    ensure_running()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: STOP.set())
    RUNS.mkdir(parents=True, exist_ok=True)
    lock(RUNS)
    began = time.perf_counter()
    pool = ThreadPoolExecutor(jobs)
    futures = {pool.submit(run.execute): run for run in todo}
    try:
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            row = futures[future].row()
            name = " ".join(str(row[key]) for key in (*CASE, "seed") if row.get(key))
            left_s = (time.perf_counter() - began) / done * (len(todo) - done)
            left = f"{left_s // 60:.0f}m{left_s % 60:02.0f}s left"
            print(f"{done}/{len(todo)} | {name} | {row['val_loss']:.4f} | {left}", flush=True)
    finally:
        STOP.set()
        pool.shutdown(cancel_futures=True)


@dataclass
class Experiment:
    """Decorator of a function (seed, quick) -> list of Run, with a question as its docstring."""

    columns: tuple  # of the table
    panels: tuple = ()  # of the picture
    combine: object = list  # rows of the runs -> rows of the result
    summary: object = list  # rows of the result -> rows of the table

    def __call__(self, function):
        self.runs_of_seed, self.question = function, function.__doc__
        EXPERIMENTS[function.__name__] = self
        return function

    def all_runs(self, seeds: list, quick: bool) -> list:
        """The runs of all seeds. Some do not depend on the seed: these once."""
        found = []
        for seed in seeds:
            found += [run for run in self.runs_of_seed(seed, quick) if run not in found]
        return found


def run_experiment(name: str, seeds: list, quick: bool, jobs: int):
    experiment, folder = EXPERIMENTS[name], RUNS / "quick" if quick else RESULTS
    runs = experiment.all_runs(seeds, quick)
    execute_all(runs, jobs)
    drawn = {column for panel in experiment.panels for column in (panel.x, panel.y)}
    kept = lambda row: {k: v for k, v in row.items() if k in drawn or not isinstance(v, list)}
    rows = [kept(row) for row in experiment.combine([run.row() for run in runs])]
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    unfinished = folder / f"{name}.json.tmp"  # tune.json is read by all other experiments
    unfinished.write_text(f"[\n{lines}\n]\n")
    unfinished.replace(folder / f"{name}.json")
    print(table(experiment.summary(rows), experiment.columns))
    print(f"results {folder / name}.json", flush=True)
    if experiment.panels:
        draw(rows, experiment.panels, folder / f"{name}.svg")


def main():
    parser = Parser(description="Run an experiment; without one, list them.")
    parser.add_argument("experiment", nargs="?", choices=list(EXPERIMENTS))
    parser.add_argument("--quick", action="store_true", help="short runs, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (distorts times)")
    args = parser.parse_args()
    check_limits("jobs", args.jobs, {"low": 1})
    for seed in args.seeds:
        check_limits("seeds", seed, {})
    if args.quick:
        BASE.update(QUICK)
        args.seeds = args.seeds[:1]
    if args.experiment:
        return run_experiment(args.experiment, args.seeds, args.quick, args.jobs)
    for name, experiment in EXPERIMENTS.items():
        runs = {run.folder: run for run in experiment.all_runs(args.seeds, args.quick)}
        minutes = sum(run.minutes() for run in runs.values())
        print(f"{name:11} {experiment.question} {minutes:.0f} minutes")
