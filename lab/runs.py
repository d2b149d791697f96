"""Many runs of train.py, and experiments made of them: a table, a JSON file, a picture.

    run = training("edit", seed=1)    # see __main__.py
    run.execute()                     # starts torchrun, or does nothing if the run has finished
    run.row()["val_loss"]

The folder of a run, in out/lab/, is named after its flags, not after the code: delete it after a
change of the code that affects results. It has the record of the run and its output.txt. Runs are
executed one after the other. An interrupted run goes on from its last checkpoint.
"""

import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from config import STOPS, Parser, UserError, check_limits
from lab.plot import draw
from lab.rows import CASE, CURVES, after_warmup, read_run, table
from plumbing.checkpoint import list_checkpoints

HERE = Path(__file__).parent.parent
RUNS, RESULTS = HERE / "out" / "lab", HERE / "lab" / "results"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]  # also where `torchrun` has no path
EXPERIMENTS = {}  # by name
SEQUENCES = 16  # of all ranks per step
BASE = {  # flags of the runs, where an experiment does not say others
    "max_steps": 448, "sync_warmup_steps": 128, "eval_interval": 64, "log_interval": 64,
    "checkpoint_interval": 128,
}  # fmt: skip
QUICK = {  # the same with --quick
    "max_steps": 96, "sync_warmup_steps": 32, "eval_interval": 32, "eval_batches": 4,
    "checkpoint_interval": 16,
}  # fmt: skip


@dataclass
class Run:
    """One training. columns: those of its row; flags: of train.py; stages: pairs (ranks, step at
    which they are stopped; the ranks of the next stage resume from there)."""

    columns: dict
    flags: dict
    stages: tuple
    program: str = "train.py"
    timed_by: object = None  # a short Run that gives the time of a step

    @property
    def folder(self) -> Path:
        text = json.dumps([self.flags, self.stages], sort_keys=True)
        return RUNS / f"{self.flags['method']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def command(self, ranks: int, stop: int | None = None) -> str:
        """The command line of a stage."""
        flags = {"batch_size": SEQUENCES // ranks, "device": "cpu"} | self.flags
        flags |= {"resume": "auto", "out_dir": os.path.relpath(self.folder, HERE)}
        words = [f"OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node {ranks} {self.program}"]
        for name, value in flags.items():
            switch = f"--{name}" if value else f"--no-{name}"
            words.append(switch if isinstance(value, bool) else f"--{name} {value}")
        return " ".join(words) + (f"    # until step {stop}" if stop else "")

    def commands(self) -> str:
        """The command lines of all stages, and of the run that times it."""
        lines = [self.command(*stage) for stage in self.stages]
        return "\n".join(lines + ([self.timed_by.commands()] if self.timed_by else []))

    def made(self, row: dict) -> bool:
        same = all(row.get(name) == self.columns.get(name) for name in (*CASE, "seed"))
        return same and row.get("command") == self.commands()

    def minutes(self) -> float:
        """Roughly, on 2 cores: 9 s for each start of torchrun, 3 s for evaluations, and 57 ms per
        step of 4 sequences per rank. A slow link and a larger model are not counted."""
        step_s = 0.025 + 0.008 * self.flags.get("batch_size", 4)
        return (9 * len(self.stages) + 3 + self.flags["max_steps"] * step_s) / 60

    def finished(self) -> bool:
        try:
            return read_run(self.folder)["end"] is not None
        except (OSError, UserError):  # not begun, or killed while it began
            return False

    def row(self) -> dict:
        """columns, results, the lists of the evaluations as *_curve, the command lines."""
        record, warmup = read_run(self.folder), self.flags["sync_warmup_steps"]
        row = self.columns | {name: record[name][-1] for name in ("val_loss", "sync_bytes")}
        after = {name: curve[-1] for name, curve in after_warmup(record, warmup).items()}
        row |= {"warmup_steps": warmup, "local_bytes": after["sync_bytes"]}
        row["tokens_per_s"] = after["tokens"] / after["train_s"]
        row |= {f"{name}_curve": record[name] for name in CURVES}
        if self.timed_by:
            step_s = self.timed_by.step_s()
            seconds = [(k - warmup) * step_s for k in record["step"]]
            row |= {"step_ms": 1e3 * step_s, "seconds_curve": seconds, "local_s": seconds[-1]}
            row["tokens_per_s"] = record["tokens"][-1] / record["step"][-1] / step_s
        return row | {"command": self.commands()}

    def step_s(self) -> float:
        """The median between the rows of the record; the first step is slower."""
        steps = read_run(self.folder)["steps"]
        return statistics.median(step["step_ms"] for step in steps[2:]) / 1e3

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
        _, _, *words = self.command(ranks).split()
        output, environment = self.folder / "output.txt", os.environ | {"OMP_NUM_THREADS": "1"}
        with open(output, "a") as file:
            streams = {"stdout": file, "stderr": file}
            torchrun = subprocess.Popen(TORCHRUN + words, cwd=HERE, env=environment, **streams)
        try:
            while torchrun.poll() is None and not (stop and self.reached(stop)):
                time.sleep(0.1)
        finally:
            torchrun.terminate()  # it stops its ranks
            torchrun.wait()
        if not self.reached(stop):
            raise UserError(f"a run failed, see {output}: {self.command(ranks)}")


def different(runs: list) -> list:
    """The runs, each once, and before them those that time them."""
    timings = [run.timed_by for run in runs if run.timed_by]
    return list({run.folder: run for run in timings + runs}.values())


def execute_all(runs: list):
    """Execute the runs that have not finished."""
    todo = [run for run in different(runs) if not run.finished()]
    print(f"{len(different(runs))} runs, {len(todo)} to do", flush=True)
    for done, run in enumerate(todo, 1):
        run.execute()
        row = run.row()
        name = " ".join(str(row[key]) for key in (*CASE, "seed") if row.get(key))
        left = f"{sum(other.minutes() for other in todo[done:]):.0f} minutes left"
        print(f"{done}/{len(todo)} | {name} | {row['val_loss']:.4f} | {left}", flush=True)


@dataclass
class Experiment:
    """Decorator of a function (seed, quick) -> list of Run, with a question as its docstring."""

    columns: tuple  # of the table
    panels: tuple = ()  # of the picture
    combine: object = list  # rows of the runs -> rows of the result
    summary: object = list  # rows of the result -> rows of the table
    rows_of: object = lambda run: [run.row()]
    picture: object = None  # in place of panels: draws (rows, path)

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


def run_experiment(name: str, seeds: list, quick: bool, add: bool = False):
    """add: do not repeat the runs that the JSON file has rows of."""
    experiment, folder = EXPERIMENTS[name], RUNS / "quick" if quick else RESULTS
    result, picture = folder / f"{name}.json", folder / f"{name}.svg"
    runs = experiment.all_runs(seeds, quick)
    old = json.loads(result.read_text()) if add else []
    known = {run.folder: [row for row in old if run.made(row)] for run in runs}
    execute_all([run for run in runs if not known[run.folder]])
    drawn = {column for panel in experiment.panels for column in (panel.x, panel.y)}
    kept = lambda row: {k: v for k, v in row.items() if k in drawn or not isinstance(v, list)}
    rows = [row for run in runs for row in known[run.folder] or experiment.rows_of(run)]
    rows = [kept(row) for row in experiment.combine(rows)]
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    result.write_text(f"[\n{lines}\n]\n")
    print(table(experiment.summary(rows), experiment.columns))
    print(f"results {result}", flush=True)
    if experiment.panels:
        draw(rows, experiment.panels, picture)
    elif experiment.picture:
        experiment.picture(json.loads(result.read_text()), picture)


def main():
    parser = Parser(prog="python -m lab", description="Run an experiment; without one, list them.")
    parser.add_argument("experiment", nargs="?", choices=list(EXPERIMENTS))
    parser.add_argument("--quick", action="store_true", help="short runs, one seed")
    parser.add_argument("--add", action="store_true", help="keep the rows of finished runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    args = parser.parse_args()
    for seed in args.seeds:
        check_limits("--seeds", seed, {})
    if args.quick:
        BASE.update(QUICK)
        args.seeds = args.seeds[:1]
    if args.experiment:
        for number in STOPS:  # end the run, too
            signal.signal(number, signal.default_int_handler)
        try:
            return run_experiment(args.experiment, args.seeds, args.quick, args.add)
        except KeyboardInterrupt:
            raise UserError("interrupted; the same command goes on from here") from None
    for name, experiment in EXPERIMENTS.items():
        runs = different(experiment.all_runs(args.seeds, args.quick))
        minutes = sum(run.minutes() for run in runs)
        print(f"{name:18} {experiment.question} {minutes:.0f} minutes")
