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
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from config import PRESETS, STOPS, Parser, UserError, check_limits
from lab.plot import draw
from lab.rows import after_warmup, read_run, table
from plumbing.checkpoint import list_checkpoints

HERE = Path(__file__).parent.parent
RUNS = HERE / "out/lab"
RESULTS = HERE / "lab/results"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]  # also where `torchrun` has no path
EXPERIMENTS = {}  # by name
SEQUENCES = 16  # of all ranks per step
BASE = {  # flags of the runs, where an experiment does not say others
    "max_steps": 448,
    "sync_warmup_steps": 128,
    "eval_interval": 64,
    "log_interval": 64,
    "checkpoint_interval": 128,
}


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
            if value is True:
                words.append(f"--{name}")
            elif value is False:
                words.append(f"--no-{name}")
            else:
                words.append(f"--{name} {value}")
        if stop:
            words.append(f"   # until step {stop}")
        return " ".join(words)

    def commands(self) -> str:
        """The command lines of all stages, and of the run that times it."""
        lines = [self.command(*stage) for stage in self.stages]
        if self.timed_by:
            lines.append(self.timed_by.commands())
        return "\n".join(lines)

    def finished(self) -> bool:
        return (self.folder / "model.pt").exists()

    def row(self) -> dict:
        """columns, results, the lists of the evaluations as *_curve, the command lines."""
        record = read_run(self.folder)
        warmup = self.flags["sync_warmup_steps"]
        after = after_warmup(record, warmup)
        row = self.columns | {
            "val_loss": record["val_loss"][-1],
            "sync_bytes": record["sync_bytes"][-1],
            "warmup_steps": warmup,
            "local_bytes": after["sync_bytes"],
            "tokens_per_s": after["tokens"] / after["train_s"],
            "step_curve": record["step"],
            "val_loss_curve": record["val_loss"],
        }
        if self.timed_by:
            steps = read_run(self.timed_by.folder)["steps"]  # the first one is slower
            step_s = statistics.median(step["step_ms"] for step in steps[2:]) / 1e3
            row["step_ms"] = 1e3 * step_s
            row["seconds_curve"] = [(step - warmup) * step_s for step in record["step"]]
            row["local_s"] = row["seconds_curve"][-1]
            row["tokens_per_s"] = record["tokens"][-1] / record["step"][-1] / step_s
        row["command"] = self.commands()
        return row

    def execute(self):
        """Train, or go on where an earlier start was interrupted. Then keep no checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for ranks, stop in self.stages:
            if not self.reached(stop):
                self.start(ranks, stop)
        for path in list_checkpoints(self.folder):  # those of all experiments take 22 GB
            shutil.rmtree(path)

    def reached(self, stop: int | None) -> bool:
        steps = [int(path.name.split("-")[1]) for path in list_checkpoints(self.folder)]
        return self.finished() or max(steps, default=0) >= (stop or math.inf)

    def start(self, ranks: int, stop: int | None):
        """Run train.py to its end or, if there is a `stop`, until a checkpoint has that step."""
        words = self.command(ranks).split()[2:]  # without OMP_NUM_THREADS and torchrun
        os.environ["OMP_NUM_THREADS"] = "1"
        output = self.folder / "output.txt"
        with open(output, "a") as file:
            torchrun = subprocess.Popen(TORCHRUN + words, cwd=HERE, stdout=file, stderr=file)
        try:
            while torchrun.poll() is None and not (stop and self.reached(stop)):
                time.sleep(0.1)
        finally:
            torchrun.terminate()  # it stops its ranks
            torchrun.wait()
        if not self.reached(stop):
            raise UserError(f"a run failed, see {output}: {self.command(ranks)}")


def execute_all(runs):
    """Execute the runs that have not finished, and before them those that time them."""
    timings = [run.timed_by for run in runs if run.timed_by]
    todo = {run.folder: run for run in timings + runs if not run.finished()}
    print(f"{len(runs)} rows, {len(todo)} runs to do", flush=True)
    for done, run in enumerate(todo.values(), 1):
        run.execute()
        print(f"{done}/{len(todo)} | {run.folder.name}", flush=True)


# ---- experiments ----


def one_row(run) -> list:
    return [run.row()]


@dataclass
class Experiment:
    runs_of_seed: object  # seed -> its runs; its docstring is the question
    columns: tuple  # of the table
    panels: tuple = ()  # of the picture
    rows_of: object = one_row  # run -> rows of the result
    combine: object = list  # rows of all runs -> rows of the result
    summary: object = list  # rows of the result -> rows of the table
    picture: object = None  # in place of panels: draws (rows, path)

    def runs(self, seeds) -> list:
        """The runs of all seeds. Some do not depend on the seed: these once."""
        found = []
        for seed in seeds:
            found += [run for run in self.runs_of_seed(seed) if run not in found]
        return found


def experiment(*columns, **others):
    """A decorator: enters a function seed -> runs, with a question as its docstring."""

    def enter(function):
        EXPERIMENTS[function.__name__] = Experiment(function, columns, **others)
        return function

    return enter


def run_experiment(experiment, seeds, path):
    """Write the JSON file `path`, and its table and picture beside it."""
    runs = experiment.runs(seeds)
    execute_all(runs)
    rows = []
    for run in runs:
        rows += experiment.rows_of(run)
    lines = ",\n".join(json.dumps(row) for row in experiment.combine(rows))
    path.write_text(f"[\n{lines}\n]\n")
    print(f"results {path}", flush=True)
    print(write_page(experiment, path))


def page(experiment, path, rows) -> str:
    """The text of the .md file beside the JSON file `path`: the full table."""
    name = path.stem
    source = f"From [{name}.json]({name}.json), which has the command lines of all runs."
    return f"# {name}\n\n{source}\n\n{table(experiment.summary(rows), experiment.columns)}\n"


def write_page(experiment, path) -> str:
    """Write the table, which is returned, and the picture of a JSON file beside it."""
    rows = experiment.combine(json.loads(path.read_text()))
    text = page(experiment, path, rows)
    path.with_suffix(".md").write_text(text)
    if experiment.panels:
        draw(rows, experiment.panels, path.with_suffix(".svg"))
    if experiment.picture:
        experiment.picture(rows, path.with_suffix(".svg"))
    return text


# ---- the command line ----


def experiment_of(path) -> Experiment:
    """Of a JSON file: that with the first word of its name. Experiments that are gone had the table
    of `frontier`."""
    return EXPERIMENTS.get(path.stem.split("_")[0], EXPERIMENTS["frontier"])


def parse_arguments():
    parser = Parser(prog="python -m lab", description="Run an experiment; without one, list them.")
    parser.add_argument("experiment", nargs="?", choices=list(EXPERIMENTS))
    parser.add_argument("--tables", action="store_true", help="rewrite all tables and pictures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--steps", type=int, default=0, help="of runs with no others of their own")
    parser.add_argument("--model", choices=list(PRESETS), help="(default: tiny)")
    args = parser.parse_args()
    if args.steps:
        check_limits("--steps", args.steps, {"low": 64})
    return args


def main():
    args = parse_arguments()
    name = args.experiment
    if args.steps:
        name = f"{name}_{args.steps}"
        BASE.update(max_steps=args.steps, sync_warmup_steps=32)
    if args.model:
        name = f"{name}_{args.model}"
        BASE.update(model=args.model, batch_size=2)

    if args.tables:
        for path in sorted(RESULTS.glob("*.json")):
            write_page(experiment_of(path), path)
    elif args.experiment:
        for number in STOPS:  # end the run, too
            signal.signal(number, signal.default_int_handler)
        try:
            run_experiment(EXPERIMENTS[args.experiment], args.seeds, RESULTS / f"{name}.json")
        except KeyboardInterrupt:
            raise UserError("interrupted; the same command goes on from here") from None
    else:
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:12} {experiment.runs_of_seed.__doc__}")
