"""The command line: dataclasses as strict flags, what all methods share, presets.

    @dataclass
    class Config:
        tau: int = option(16, "inner steps per round", low=1)      # becomes --tau 8

Numbers must be at least `low` (0 by default), above `above` and below `below` (2^31; 1e30 for
fractions). Booleans become --name and --no-name. Several dataclasses may declare the same flag,
each with its own default. Wrong input raises UserError; its text is the one line that the user
sees.

A run has one object `config` with all its flags as attributes. Its class combines Config, the
simulation's dataclass and that of the method. A flag that is not given has the value of the
checkpoint that a run resumes from, else of the --model preset, else its default.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

STOPS = {signal.SIGINT, signal.SIGTERM}


class UserError(Exception):
    """Wrong input. The text is one line that says what to change."""

    exit_code = 2


def explain(error: Exception) -> tuple:
    """(exit code, line for the user) of an error that has an exit_code, or that comes from outside
    the program: a full disk, too little memory, a closed pipe (no line). Raises any other error
    again."""
    text = str(error).strip().split("\n")[0]
    if hasattr(error, "exit_code"):
        return error.exit_code, text
    if isinstance(error, BrokenPipeError):
        return 141, ""  # as if SIGPIPE had ended the process
    too_large = any(words in text for words in ("out of memory", "allocate", "overflow"))
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and too_large:
        return 2, f"out of memory ({text[-100:]}): lower --batch_size or the model's size"
    if isinstance(error, OSError):
        return 2, f"{error.filename or 'output'}: {error.strerror}"
    raise error


def run_command(program: str, main):
    """Run a program's main(). Under torchrun only rank 0 prints to standard output. Errors that
    explain() knows end the process with a code and one line."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        sys.stdout = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may lack some characters
            stream.reconfigure(errors="replace")
    for number in STOPS:  # without a traceback, also while a rank waits inside gloo
        signal.signal(number, signal.SIG_DFL)
    try:
        main()
        return print(end="", flush=True)
    except Exception as error:
        code, line = explain(error)
    if line:
        report_to_torchrun(line)
        time.sleep(rank != "0")  # rank 0 first: when it has ended, torchrun ends this rank
        kind = "error: " if code < 128 else ""  # a signal is none
        print(f"{program}: {kind}{line}", file=sys.stderr, flush=True)
    with suppress(OSError):
        print(end="", flush=True)
    os._exit(code)  # destructors could wait for lost ranks


def report_to_torchrun(line: str):
    """torchrun prints a long report of ranks that fail. It shall end with this line."""
    report = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with suppress(OSError, KeyError):
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report))


def optional(name: str):
    """Import a module of a package that only some commands need. Raises UserError."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise UserError(f"this needs a package: pip install {name.split('.')[0]}") from None


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError and does not accept shortened flags."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise UserError(f"{message[:300]} (--help lists the flags)")


def option(default, help, **limits):
    """A dataclass field that is a flag. limits: low, above, below, choices."""
    return field(default=default, metadata={"help": help} | limits)


# ---- what all methods share ----

# Blocks, heads, channels, context; sequences per rank and micro-step; peak learning rate and its
# warm-up. Rates from 124m up are GPT-3's for these sizes (arXiv 2005.14165, table 2.1), which were
# used with batches of 0.5 to 2 million tokens. tau and warm-up are the EDiT paper's (from memory).
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "lr", "lr_warmup_steps")
LONG = {
    "max_steps": 20_000, "eval_interval": 1000, "log_interval": 20, "tau": 128,
    "sync_warmup_steps": 1024,
}  # fmt: skip
PRESETS = {
    "tiny": {},  # the defaults
    "10m": dict(zip(SHAPE, (6, 6, 384, 256, 4, 1e-3, 100))) | {"max_steps": 2000},
    "124m": dict(zip(SHAPE, (12, 12, 768, 1024, 16, 6e-4, 700))) | LONG,
    "350m": dict(zip(SHAPE, (24, 16, 1024, 1024, 8, 3e-4, 700))) | LONG,
    "1b": dict(zip(SHAPE, (24, 16, 2048, 2048, 4, 2e-4, 1000))) | LONG,
    "3b": dict(zip(SHAPE, (32, 20, 2560, 2048, 2, 1.6e-4, 1000))) | LONG,
    "7b": dict(zip(SHAPE, (32, 32, 4096, 2048, 1, 1.2e-4, 2000))) | LONG,
}


@dataclass
class Config:
    """Flags of every method."""

    # run
    method: str = option("edit", "synchronization method")
    shards: int = option(1, "N, ranks per replica; the other ranks form more replicas", low=1)
    replicas: int = option(0, "M, checked against the number of ranks; 0: as many as there are")
    max_steps: int = option(700, "inner steps", low=1)
    seed: int = option(1337, "of initialization and data order", below=2**40)
    out_dir: str = option("", "folder for metrics.jsonl and model.pt (default: out/METHOD)")
    device: str = option("auto", "auto: cuda if there is one", choices=["auto", "cpu", "cuda"])
    backend: str = option(
        "auto",
        "auto: nccl on GPUs; on CPUs shm within a machine, else gloo. shm: ranks can share a GPU",
        choices=["auto", "nccl", "gloo", "shm"],
    )
    dtype: str = option(
        "auto",
        "of the layers. auto: bf16 where native, else fp32 (without TF32). fp64: masters, too",
        choices=["auto", "fp32", "bf16", "fp64"],
    )
    compile: bool = option(False, "torch.compile each layer")
    recompute: bool = option(False, "recompute blocks in the backward, keep only their inputs")
    profile: bool = option(False, "trace a few early steps into OUT_DIR/trace-RANK.json")
    timeline: bool = option(False, "record computing and waiting in OUT_DIR/timeline-RANK.json")
    dry_run: bool = option(False, "print memory and traffic of the run, for any mesh, and exit")
    log_interval: int = option(10, "steps between log lines", low=1)
    eval_interval: int = option(200, "steps between evaluations (at round ends)", low=1)
    eval_batches: int = option(16, "validation batches of 16 windows", low=1, below=10**6)
    timeout_s: float = option(600.0, "seconds to wait for a silent rank", above=0, below=1e7)
    # checkpoints
    checkpoint_interval: int = option(
        0, "steps between checkpoints (at round ends); 0: only one, when the training is over"
    )
    keep: int = option(2, "checkpoints to keep", low=1)
    save_on_exit: bool = option(False, "at SIGTERM or Ctrl-C, save and stop at the next round end")
    resume: str = option(
        "", "checkpoint, or folder with checkpoints, to continue; auto: the last in OUT_DIR, if any"
    )
    overwrite: bool = option(False, "delete the earlier run in OUT_DIR")
    # model
    model: str = option("tiny", "preset for flags that are not given", choices=list(PRESETS))
    n_layer: int = option(4, "blocks", low=1, below=10_000)
    n_head: int = option(4, "attention heads", low=1)
    n_embd: int = option(128, "channels", low=1)
    block_size: int = option(128, "context, tokens", low=1)
    n_hidden: int = option(0, "channels in the MLP; 0: 8/3 n_embd, up to a multiple of 64")
    rope_base: float = option(10000.0, "of the rotary positions", above=0)
    norm_eps: float = option(1e-5, "of RMSNorm", above=0)
    init_from: str = option(
        "", "model.pt, or folder in Hugging Face's Llama format, to start from; sets the shape"
    )
    # data
    data: str = option(
        "", "corpus folder of data.py, or .bin token files (default: Python's standard library)"
    )
    vocab_size: int = option(0, "of token files (0: 50257, GPT-2's), or to pad the corpus's")
    batch_size: int = option(8, "sequences per rank and micro-step", low=1)
    accum: int = option(1, "micro-steps per step; their gradients are averaged", low=1, below=10**6)
    tokens_per_step: int = option(
        0,
        "tokens of all ranks per step; sets accum and the micro-batch, at most batch_size. "
        "0: accum and batch_size set them",
    )
    # inner
    lr: float = option(3e-3, "peak inner (AdamW) learning rate")
    min_lr_ratio: float = option(0.1, "final learning rate / peak learning rate")
    lr_warmup_steps: int = option(50, "steps of linear warm-up")
    weight_decay: float = option(0.1, "of matrices")
    beta1: float = option(0.9, "AdamW", below=1)
    beta2: float = option(0.95, "AdamW", below=1)
    grad_clip: float = option(1.0, "largest global gradient norm; 0: no clipping")

    # Not flags. The dataclass of a method may replace them.
    buffer_vectors = 0.0  # vectors like model.master that a sync needs beside the method's own

    def sent_vectors(self, replicas: int) -> float:
        """What a rank sends to other replicas per round, in vectors like model.master."""
        return 2 * (replicas - 1) / replicas

    def check(self, replicas: int):
        """Raise UserError if the flags do not fit together."""


@dataclass
class RoundConfig:
    """Flags of every method with rounds, whatever ends them."""

    sync_warmup_steps: int = option(200, "first steps with averaged gradients")
    average_moments: str = option(
        "none",
        "average AdamW's moments over the replicas at each sync, m or both (without a value: "
        "both): all replicas wait for them in every method",
        choices=["none", "m", "both"],
    )
    moments_format: str = option(
        "none", "of averaged moments. int8: m in int8, v in log8", choices=["none", "int8"]
    )

    def steps_of_round(self, lr: float, k: int) -> float:
        """lr: inner learning rate of the last step; k: steps from the warm-up to this round."""
        return math.inf  # votes end it

    def averaged_moments(self) -> list:
        """(AdamW's moment, its format in quantize.py) of each that is averaged."""
        formats = {"exp_avg": "int8", "exp_avg_sq": "log8"}
        if self.moments_format == "none":
            formats = dict.fromkeys(formats, "none")
        return list(formats.items())[: {"none": 0, "m": 1, "both": 2}[self.average_moments]]


@dataclass
class LocalConfig(RoundConfig):
    """Flags of every method whose rounds have a number of steps."""

    tau: int = option(16, "inner steps per round", low=1)
    tau_rule: str = option(
        "fixed", "qsr: max(tau, (qsr_c / lr)^2) steps, lr: of the step", choices=["fixed", "qsr"]
    )
    qsr_c: float = option(0.0175, "c of the quadratic synchronization rule, arXiv 2310.14423")
    tau_schedule: str = option(
        "", "TAU:STEPS,..., rounds of TAU steps for STEPS steps after the warm-up, ..., then --tau"
    )

    def steps_of_round(self, lr: float, k: int) -> float:
        tau = next((tau for tau, last in self.first_rounds() if k < last), self.tau)
        if self.tau_rule == "fixed":
            return tau
        return max(tau, int((self.qsr_c / lr) ** 2)) if lr else math.inf

    def first_rounds(self) -> list:
        """[(tau, steps after the warm-up before which a round of it begins), ...]"""
        parts = self.tau_schedule.split(",") if self.tau_schedule else []
        pairs = [(int(tau), int(steps)) for tau, steps in (part.split(":") for part in parts)]
        if any(not 0 < number < 2**31 for pair in pairs for number in pair):
            raise ValueError
        return list(zip([tau for tau, _ in pairs], accumulate(steps for _, steps in pairs)))

    def check(self, replicas: int):
        super().check(replicas)
        try:
            self.first_rounds()
        except ValueError:
            example = "write 2:96,4:384 for rounds of 2 steps for 96 steps, then of 4 for 384"
            raise UserError(f"--tau_schedule {self.tau_schedule}: {example}") from None


GROUPS = {  # first flag of each group of --help -> its title
    "method": "run",
    "checkpoint_interval": "checkpoints",
    "model": "model",
    "data": "data",
    "lr": "inner optimizer",
    "slow_replica": "simulation of a slow, uneven cluster",
    "repeats": "benchmark",
    "sync_warmup_steps": "synchronization (methods with local steps)",
}
# Flags of this machine or this start: a resumed run does not take them from the checkpoint.
NOT_RESUMED = {"out_dir", "device", "backend", "replicas", "resume", "overwrite", "profile"}
NOT_RESUMED |= {"dry_run", "init_from", "timeline"}


def parse(argv: list, methods: dict, simulation_class, saved: dict | None = None) -> tuple:
    """Flags -> (the run's config, the flags given as name -> value). methods: name -> Method class;
    saved: flags of a checkpoint. Flags of other methods are checked and ignored, so that one
    command line can compare methods. Raises UserError that names the flag."""
    owners = [(None, Config), (None, simulation_class)]
    owners += [(name, method.Config) for name, method in methods.items()]
    fields, defaults = {}, {}  # flag -> its field; flag -> {method name or None: default}
    for owner, config_class in owners:
        for f in dataclasses.fields(config_class):
            fields.setdefault(f.name, f)
            defaults.setdefault(f.name, {})[owner] = f.default
    given = read_flags(argv, fields, defaults, list(methods))
    values = {k: v for k, v in (saved or {}).items() if k not in NOT_RESUMED}
    for name, other in ("tokens_per_step", "accum"), ("accum", "tokens_per_step"):
        if name in given:  # the saved one gives way
            values.pop(other, None)
    values |= given
    values = PRESETS[values.get("model", "tiny")] | values
    method = methods[values.get("method", Config.method)]
    bases = (method.Config, simulation_class, Config)
    run_class = dataclasses.make_dataclass("RunConfig", [], bases=bases)
    names = [f.name for f in dataclasses.fields(run_class)]  # flags of other methods are left out
    return run_class(**{name: values[name] for name in names if name in values}), given


def read_flags(argv: list, fields: dict, defaults: dict, methods: list) -> dict:
    """The flags in argv, checked: name -> value."""
    group = parser = Parser(usage="%(prog)s [--flag value ...]")
    for name, f in fields.items():
        default = f.default
        if len(set(defaults[name].values())) > 1:
            default = ", ".join(f"{owner}: {value}" for owner, value in defaults[name].items())
        help = f.metadata["help"] + (f" (default: {default})" if default != "" else "")
        choices = methods if name == "method" else f.metadata.get("choices")
        if isinstance(f.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif choices:
            kind = {"choices": choices}
        else:
            kind = {"type": type(f.default), "metavar": type(f.default).__name__.upper()}
        if name == "data":
            kind["nargs"] = "+"
        if name == "average_moments":
            kind |= {"nargs": "?", "const": "both"}
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        group.add_argument(f"--{name}", default=None, help=help, **kind)
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    given |= {"data": ":".join(given["data"])} if "data" in given else {}
    for name, value in given.items():
        check_limits(name, value, fields[name].metadata)
    return given


def check_limits(name, value, limits):
    if isinstance(value, str):
        if not value.isprintable():
            raise UserError(f"--{name} {value[:100]!r}: must be printable text")
        return
    low, above = limits.get("low", 0), limits.get("above", -math.inf)
    below = limits.get("below", 2**31 if isinstance(value, int) else 1e30)
    if not (low <= value < below and value > above):  # also refuses NaN
        bound = f"above {above}" if above >= low else f"at least {low}"
        raise UserError(f"--{name} {str(value)[:20]}: must be {bound} and below {below:g}")
