"""The command line: dataclasses as strict flags, what all methods share, presets.

    @dataclass
    class Config:
        tau: int = option(16, "inner steps per round", low=1)      # becomes --tau 8

Booleans become --name and --no-name. Several dataclasses may declare the same flag, each with its
own default. A run has one object `config` with all its flags as attributes. Its class combines
Config, the simulation's dataclass and that of the method. A flag that is not given has the value
of the checkpoint that a run resumes from, else of the --model preset, else its default.
"""

import argparse
import dataclasses
import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STOPS = {signal.SIGINT, signal.SIGTERM}


class UserError(Exception):
    """Wrong input. The text is one line that says what to change."""

    exit_code = 2


def explain(error: Exception) -> tuple:
    """(exit code, line for the user) of an error that has an exit_code or that comes from outside:
    a full disk, a missing package. Raises any other error again."""
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # torch.save hides it
    if isinstance(error, OSError):
        return 2, f"{error.filename or 'output'}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):  # of a package that only some commands need
        return 2, f"this needs a package: pip install {error.name}"
    if not hasattr(error, "exit_code"):
        raise error
    return error.exit_code, str(error)


def run_command(program: str, main):
    """Run a program's main(). Under torchrun only rank 0 prints to standard output. Errors that
    explain() knows end the process with a code and one line, the last of torchrun's report."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        sys.stdout = open(os.devnull, "w")
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # a terminal may lack characters
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback, also while a rank waits in gloo
    try:
        return main()
    except Exception as error:
        code, line = explain(error)
    if line:
        with suppress(OSError, KeyError):
            report = json.dumps({"message": line, "timestamp": int(time.time())})
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(report)
        time.sleep(rank != "0")  # rank 0 first: when it has ended, torchrun ends this rank
        kind = "error: " if code < 128 else ""  # a signal is none
        print(f"{program}: {kind}{line}", file=sys.stderr, flush=True)
    os._exit(code)  # destructors could wait for lost ranks


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError."""

    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


def option(default, help, choices=None, nargs=None, const=None, **limits):
    """A dataclass field that is a flag. choices, nargs, const: as in argparse; limits: low, above,
    below, see check_limits()."""
    flag = {"type": type(default), "choices": choices, "nargs": nargs, "const": const}
    if isinstance(default, bool):
        flag = {"action": argparse.BooleanOptionalAction}
    return field(default=default, metadata={"help": help, "flag": flag, "limits": limits})


# ---- what all methods share ----

# Blocks, heads, channels, context; sequences per rank and micro-step; peak learning rate and its
# warm-up. Rates from 124m up are GPT-3's for these sizes (arXiv 2005.14165, table 2.1), which were
# used with batches of 0.5 to 2 million tokens. tau and warm-up are the EDiT paper's (from memory).
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "lr", "lr_warmup_steps")
LONG = dict(max_steps=20_000, eval_interval=1000, log_interval=20, tau=128, sync_warmup_steps=1024)
PRESETS = {
    "tiny": {},  # the defaults
    "10m": dict(zip(SHAPE, (6, 6, 384, 256, 4, 1e-3, 100)), max_steps=2000),
    "124m": dict(zip(SHAPE, (12, 12, 768, 1024, 16, 6e-4, 700)), **LONG),
    "1b": dict(zip(SHAPE, (24, 16, 2048, 2048, 4, 2e-4, 1000)), **LONG),
    "7b": dict(zip(SHAPE, (32, 32, 4096, 2048, 1, 1.2e-4, 2000)), **LONG),
}


@dataclass
class Config:
    """Flags of every method."""

    method: str = option("edit", "synchronization method")
    shards: int = option(1, "N, ranks per replica; the other ranks form more replicas", low=1)
    replicas: int = option(0, "M, checked against the number of ranks; 0: as many as there are")
    max_steps: int = option(700, "inner steps", low=1)
    seed: int = option(1337, "of initialization and data order")
    out_dir: str = option("", "folder for metrics.jsonl and model.pt (default: out/METHOD)")
    device: str = option("auto", "auto: cuda if there is one", choices=["auto", "cpu", "cuda"])
    backend: str = option(
        "auto", "auto: nccl; CPUs: shm, across nodes gloo", choices=["auto", "nccl", "gloo", "shm"]
    )
    dtype: str = option(
        "auto", "auto: bf16 where native, else fp32", choices=["auto", "fp32", "bf16", "fp64"]
    )
    compile: bool = option(False, "torch.compile each layer")
    recompute: bool = option(False, "recompute blocks in the backward, keep only their inputs")
    profile: bool = option(False, "trace steps 2 to 4 into OUT_DIR/trace-RANK.json")
    timeline: bool = option(False, "record computing and waiting in OUT_DIR/timeline-RANK.json")
    dry_run: bool = option(False, "print memory and traffic of the run, for any mesh, and exit")
    log_interval: int = option(10, "steps between log lines", low=1)
    eval_interval: int = option(200, "steps between evaluations (at round ends)", low=1)
    eval_batches: int = option(16, "validation batches of 16 windows", low=1, below=10**6)
    timeout_s: float = option(600.0, "seconds to wait for a silent rank", above=0, below=1e7)

    checkpoint_interval: int = option(0, "in steps; 0: only one, at the end")
    keep: int = option(2, "checkpoints to keep", low=1)
    save_on_exit: bool = option(False, "at SIGTERM or Ctrl-C, save and stop at the next round end")
    resume: str = option("", "checkpoint or run's folder to continue; auto: OUT_DIR's, if any")
    overwrite: bool = option(False, "delete the earlier run in OUT_DIR")

    model: str = option("tiny", "preset of what is not given", choices=list(PRESETS))
    n_layer: int = option(4, "blocks", low=1, below=10_000)
    n_head: int = option(4, "attention heads", low=1)
    n_embd: int = option(128, "channels", low=1)
    block_size: int = option(128, "context, tokens", low=1)
    n_hidden: int = option(0, "channels in the MLP; 0: 8/3 n_embd, up to a multiple of 64")
    rope_base: float = option(10000.0, "of the rotary positions", above=0)
    norm_eps: float = option(1e-5, "of RMSNorm", above=0)
    init_from: str = option("", "start from this model.pt or Hugging Face Llama folder; its shape")

    data: str = option(
        "", "folder of data.py, or token files (default: standard library)", nargs="+"
    )
    vocab_size: int = option(0, "of token files (0: 50257, GPT-2's), or another than the corpus's")
    batch_size: int = option(8, "sequences per rank and micro-step", low=1)
    accum: int = option(1, "micro-steps per step; their gradients are averaged", low=1, below=10**6)
    tokens_per_step: int = option(0, "of all ranks; it sets accum, and batch_size is a limit then")

    optimizer: str = option(
        "adamw", "muon: Muon for the blocks' matrices", choices=["adamw", "muon"]
    )
    lr: float = option(3e-3, "peak learning rate of AdamW")
    muon_lr: float = option(0.02, "peak learning rate of Muon, which has the schedule of lr")
    min_lr_ratio: float = option(0.1, "final learning rate / peak learning rate")
    lr_warmup_steps: int = option(50, "steps of linear warm-up")
    weight_decay: float = option(0.1, "of matrices")
    beta1: float = option(0.9, "AdamW; momentum of Muon", below=1)
    beta2: float = option(0.95, "AdamW", below=1)
    grad_clip: float = option(1.0, "largest global gradient norm; 0: no clipping")

    # Not flags: what a method says of itself. Its dataclass may replace them.
    offload = False  # keep vectors in host memory?
    buffer_vectors = 0.0  # vectors like model.master that a sync needs beside the method's own

    def sent_vectors(self, replicas: int) -> float:
        """What a rank sends to other replicas per round, in vectors like model.master."""
        return 2 * (replicas - 1) / replicas

    def gathered_vectors(self, replicas: int) -> float:
        """What a rank writes and reads in a slot of shm, in vectors like model.master, if a method
        gathers more than a layer at a time."""
        return 0.0

    def averaged_moments(self) -> list:
        """Names of AdamW's moments that are averaged at each sync."""
        return []

    def describe_round(self, tokens_per_step: int) -> str:
        """How long a round is."""
        return "every step"

    def check(self, replicas: int):
        """Raise UserError if the flags do not fit together."""
        if self.optimizer == "muon" and self.lr == 0:
            raise UserError("--lr 0: muon's rate follows it; give --muon_lr 0 or --optimizer adamw")


# ---- from the command line to a config ----

# Flags of this machine or this start: a resumed run does not take them from the checkpoint.
NOT_RESUMED = {"out_dir", "device", "backend", "replicas", "resume", "overwrite", "profile"}
NOT_RESUMED |= {"dry_run", "init_from", "timeline"}
# What --help lists; --help all lists every flag.
FIRST_FLAGS = """method shards replicas max_steps out_dir device dry_run checkpoint_interval resume
    overwrite model data batch_size lr sync_warmup_steps tau""".split()


def parse(argv: list, methods: dict, simulation_class) -> tuple:
    """Flags -> (the run's config, the flags given as name -> value). methods: name -> Method class.
    Raises UserError that names the flag."""
    classes = [Config, simulation_class]
    classes += [method.Config for method in methods.values()]
    fields = {}  # flag -> its fields, one of each class that has it
    for config_class in classes:
        for f in dataclasses.fields(config_class):
            fields.setdefault(f.name, []).append(f)

    parser = Parser(
        usage="%(prog)s [--flag value ...]",
        epilog="--help all lists every flag",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, found in fields.items():
        text = found[0].metadata["help"]
        flag = found[0].metadata["flag"]
        defaults = {str(f.default) for f in found}  # those of methods may differ
        if defaults != {""}:
            text += f" (default: {', '.join(sorted(defaults))})"
        if argv[-2:] != ["--help", "all"] and name not in FIRST_FLAGS:
            text = argparse.SUPPRESS
        if name == "method":
            flag = {"choices": list(methods)}
        parser.add_argument(f"--{name}", help=text, **flag)

    given = vars(parser.parse_args(argv))
    for name, value in given.items():
        check_limits(f"--{name}", value, fields[name][0].metadata["limits"])
    return make_config(given, methods, simulation_class, {}), given


def make_config(given: dict, methods: dict, simulation_class, base: dict):
    """The config of a run. given: flags as name -> value; base: those of a checkpoint or a model.
    Flags of other methods are left out, so that one command line can compare methods."""
    values = {"model": Config.model, "method": Config.method}
    values |= {name: value for name, value in base.items() if name not in NOT_RESUMED}
    values |= given
    values = PRESETS[values["model"]] | values

    method = methods[values["method"]]
    bases = (method.Config, simulation_class, Config)
    run_class = dataclasses.make_dataclass("RunConfig", [], bases=bases)
    run_class.method_class = method
    fields = run_class.__dataclass_fields__
    return run_class(**{name: value for name, value in values.items() if name in fields})


def read_number(config: dict, key: str, flag: str):
    """A number of a config.json. Raises UserError unless it is above 0 and within the limits of the
    flag that has this meaning."""
    f = Config.__dataclass_fields__[flag]
    value = type(f.default)(config[key])
    check_limits(f"config.json: {key}", value, f.metadata["limits"] | {"above": 0})
    return value


def check_limits(name: str, value, limits: dict):
    """Raise UserError unless a number is at least `low` (by default 0), not `above` (0, if it is
    given) and below `below` (2^31; 1e30 for fractions)."""
    if isinstance(value, (str, list)):
        return
    low = limits.get("low", 0)
    below = limits.get("below", 2**31 if isinstance(value, int) else 1e30)
    if not (low <= value < below) or value == limits.get("above"):  # also refuses NaN
        bound = f"above {limits['above']}" if "above" in limits else f"at least {low}"
        raise UserError(f"{name} {value}: must be {bound} and below {below:g}")
