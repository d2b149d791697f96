"""Many runs of train.py, and experiments made of them: a table, a JSON file, a picture.

    run = training("edit", seed=1)    # see __main__.py
    run.execute()                     # starts torchrun
    run.results()[0]["val_loss"]

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
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from config import PRESETS, STOPS, Parser, UserError, check_limits
from lab.plot import draw
from lab.rows import read_run, table
from lab.timeline import read_timeline
from plumbing.checkpoint import list_checkpoints

HERE = Path(__file__).parent.parent
RUNS = HERE / "out/lab"
RESULTS = HERE / "lab/results"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]  # also where `torchrun` has no path
EXPERIMENTS = {}  # by name
BASE = {  # flags of the runs, where an experiment does not say others
    "max_steps": 448,
    "sync_warmup_steps": 32,
    "eval_interval": 448,
    "log_interval": 64,
    "checkpoint_interval": 500,
}


@dataclass
class Run:
    """One training. columns: those of its row; flags: of train.py."""

    columns: dict
    flags: dict
    ranks: int = 4

    @property
    def folder(self) -> Path:
        text = json.dumps([self.flags, self.ranks], sort_keys=True)
        return RUNS / f"{self.flags['method']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def command(self) -> str:
        flags = {"batch_size": 4, "device": "cpu"} | self.flags
        flags |= {"resume": "auto", "out_dir": os.path.relpath(self.folder, HERE)}
        if flags["method"] == "minibatch":  # all is warm-up; results() counts as in the others
            flags.pop("sync_warmup_steps", None)
        words = [f"OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node {self.ranks} train.py"]
        for name, value in flags.items():
            if value is True:
                words.append(f"--{name}")
            elif value is False:
                words.append(f"--no-{name}")
            else:
                words.append(f"--{name} {value}")
        return " ".join(words)

    def finished(self) -> bool:
        return (self.folder / "model.pt").exists()

    def execute(self):
        """Train, or go on where an earlier start was interrupted. Then keep no checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        words = self.command().split()[2:]  # without OMP_NUM_THREADS and torchrun
        os.environ["OMP_NUM_THREADS"] = "1"
        output = self.folder / "output.txt"
        with open(output, "a") as file:
            torchrun = subprocess.Popen(TORCHRUN + words, cwd=HERE, stdout=file, stderr=file)
        try:
            torchrun.wait()
        finally:
            torchrun.terminate()  # it stops its ranks
            torchrun.wait()
        if not self.finished():
            raise UserError(f"a run failed, see {output}: {self.command()}")
        for path in list_checkpoints(self.folder):  # those of all experiments take 22 GB
            shutil.rmtree(path)

    def results(self) -> list:
        """A dict of losses, bytes, speed and, as *_curve, the lists of the evaluations. Of a run
        with --timeline one per replica."""
        if "timeline" in self.flags:
            return read_timeline(self.folder)
        record = read_run(self.folder)
        warmup = self.flags["sync_warmup_steps"]
        steps = record["steps"]
        begin = next(row for row in steps if row["step"] >= warmup)
        sent_bytes = record["sync_bytes"][-1]
        warmup_bytes = warmup * steps[0]["sync_bytes"]  # all its steps send alike
        tokens = record["tokens"][-1] - begin["tokens"]
        seconds = record["train_s"][-1] - begin["train_s"]
        found = {
            "val_loss": record["val_loss"][-1],
            "sync_bytes": sent_bytes,
            "local_bytes": sent_bytes - warmup_bytes,
            "tokens_per_s": tokens / seconds,
            "step_curve": record["step"],
            "val_loss_curve": record["val_loss"],
        }
        if len(steps) > 2:  # the first ones are slower
            found["step_ms"] = statistics.median(step["step_ms"] for step in steps[2:])
        return [found]


def execute_all(runs):
    """Execute the runs that have not finished."""
    todo = {run.folder: run for run in runs if not run.finished()}
    print(f"{len(runs)} rows, {len(todo)} runs to do", flush=True)
    for done, run in enumerate(todo.values(), 1):
        run.execute()
        print(f"{done}/{len(todo)} | {run.folder.name}", flush=True)


# ---- experiments ----


@dataclass
class Experiment:
    runs_of_seed: object  # seed -> its runs; its docstring is the question
    columns: tuple  # of the table
    panels: tuple = ()  # of the picture
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
    """Write the JSON file `path`, and its table and picture beside it. A row of the file stays,
    and its run is not repeated, if the experiment still has that command or if the row has another
    seed. Delete the file to run all again."""
    earlier = []
    if path.exists():
        earlier = json.loads(path.read_text())
    known = defaultdict(dict)
    for row in earlier:
        known[row.get("command")][row.get("replica")] = row

    runs = experiment.runs(seeds)
    execute_all([run for run in runs if run.command() not in known])
    made = {run.columns["seed"] for run in runs}
    rows = [row for row in earlier if row.get("seed") not in made]
    for run in runs:
        own = run.columns | {"command": run.command()}
        rows += [row | own for row in known[run.command()].values() or run.results()]
    lines = ",\n".join(json.dumps(row) for row in experiment.combine(rows))
    partial = path.with_suffix(".tmp")
    partial.write_text(f"[\n{lines}\n]\n")
    partial.replace(path)
    print(f"results {path}")
    print(write_page(experiment, path))


def page(experiment, path, rows) -> str:
    """The text of the .md file beside the JSON file `path`: the full table."""
    name = path.stem
    source = f"From [{name}.json]({name}.json), which has the command lines of all runs."
    return f"# {name}\n\n{source}\n\n{table(experiment.summary(rows), experiment.columns)}\n"


def write_page(experiment, path) -> str:
    """Write the table, which is returned, and the picture of a JSON file beside it."""
    rows = json.loads(path.read_text())
    text = page(experiment, path, rows)
    path.with_suffix(".md").write_text(text)
    if experiment.panels:
        draw(rows, experiment.panels, path.with_suffix(".svg"))
    if experiment.picture:
        experiment.picture(rows, path.with_suffix(".svg"))
    return text


def experiment_of(path) -> Experiment | None:
    """Of a JSON file: that with the first word of its name. None: it is gone, and its table and
    picture stay as they are."""
    return EXPERIMENTS.get(path.stem.split("_")[0])


# ---- the command line ----


def main():
    parser = Parser(prog="python -m lab", description="Run an experiment; without one, list them.")
    parser.add_argument("experiment", nargs="?", choices=list(EXPERIMENTS))
    parser.add_argument("--tables", action="store_true", help="rewrite all tables and pictures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--steps", type=int, default=0, help="of runs with no others of their own")
    parser.add_argument("--model", choices=list(PRESETS), help="(default: tiny)")
    parser.add_argument("--gpu", action="store_true", help="train on GPUs; ranks may share one")
    args = parser.parse_args()
    if args.tables:
        for path in sorted(RESULTS.glob("*.json")):
            if experiment := experiment_of(path):
                write_page(experiment, path)
    elif args.experiment:
        start(args)
    else:
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:12} {experiment.runs_of_seed.__doc__}")


def start(args):
    """Run the experiment of the command line."""
    name = args.experiment
    if args.steps:
        check_limits("--steps", args.steps, {"low": 65})
        name = f"{name}_{args.steps}"
        BASE.update(max_steps=args.steps, eval_interval=args.steps)
    if args.model:
        name = f"{name}_{args.model}"
        BASE.update(model=args.model, batch_size=2)  # 10m: windows of 256, so 2,048 tokens again
    if args.gpu:
        name = f"{name}_gpu"
        BASE.update(device="cuda", backend="shm")

    for number in STOPS:  # end the run, too
        signal.signal(number, signal.default_int_handler)
    try:
        run_experiment(EXPERIMENTS[args.experiment], args.seeds, RESULTS / f"{name}.json")
    except KeyboardInterrupt:
        raise UserError("interrupted; the same command goes on from here") from None
