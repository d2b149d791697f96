"""The command line: dataclasses as strict flags, what all methods share, presets.

    @dataclass
    class Config:
        tau: int = option(16, "inner steps per round", low=1)      # becomes --tau 8

Booleans become --name and --no-name. Several dataclasses may declare the same flag, each with its
own default. A run has one object `config` with all its flags as attributes. Its class is the
method's Config, which inherits the flags of all methods. A flag that is not given has the value of
the checkpoint that a run resumes from, else of the --model preset, else its default.
"""

import argparse
import dataclasses
import io
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STOPS = {signal.SIGINT, signal.SIGTERM}
# The terminal was closed. Windows has no such signal, and after `nohup` it stops nothing.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    STOPS.add(signal.SIGHUP)

HINT = "lower --lr, or raise --lr_warmup_steps"  # when a run diverges or learns nothing
NCCL_TIMEOUT_S = 3600  # between machines
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def printable(text: str, keep: str = "") -> str:
    """The text with escapes in place of its control characters, which a terminal would execute, but
    those to keep."""
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


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


class Output(io.FileIO):
    """Standard output. A line that cannot be printed is lost, which must not end a training: the
    terminal was closed, Ctrl-C ended `tee` as well, or the disk of the log is full."""

    told = False

    def write(self, line) -> int:
        try:
            return super().write(line) or len(line)  # None: a reader that is not ready
        except OSError as error:
            if not self.told:
                self.told = True
                tell_loss(error.strerror)
            return len(line)


def tell_loss(reason: str):
    with suppress(OSError):  # standard error may be lost as well
        print(f"note    standard output is lost: {reason}", file=sys.stderr, flush=True)


def open_output():
    """Set sys.stdout: on rank 0 an Output, on the other ranks nothing is printed."""
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")
    elif sys.stdout is None:
        sys.stdout = open(os.devnull, "w")
        tell_loss("it is closed")
    elif not isinstance(sys.stdout.buffer, io.BytesIO):  # which a test reads
        output = io.BufferedWriter(Output(sys.stdout.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(output, sys.stdout.encoding)
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # a terminal may lack characters


def leave(number: int, frame):
    os._exit(128 + number)


def end_at_next(number: int):
    """From here on this signal ends the process at once: without a traceback, and also while a rank
    waits in gloo. Linux has no default action for process 1 of a container, so that one gets a
    function."""
    signal.signal(number, leave if os.getpid() == 1 else signal.SIG_DFL)


def run_command(program: str, main):
    """Run a program's main(). Under torchrun only rank 0 prints to standard output. Errors that
    explain() knows end the process with a code and one line, the last of torchrun's report."""
    open_output()
    for number in STOPS:
        end_at_next(number)
    try:
        return main()
    except Exception as error:
        code, line = explain(error)
    line = printable(line)
    if line:
        with suppress(OSError, KeyError):
            report = json.dumps({"message": line, "timestamp": int(time.time())})
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(report)
        if os.environ.get("RANK", "0") != "0":
            time.sleep(1)  # rank 0 first: when it has ended, torchrun ends this rank
        kind = "error: " if code < 128 else ""  # a signal is none
        with suppress(OSError):  # standard error may be lost
            print(f"{program}: {kind}{line}", file=sys.stderr, flush=True)
    os._exit(code)  # destructors could wait for lost ranks


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError."""

    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


def option(default, help, choices=None, group=None, large=None, **limits):
    """A dataclass field that is a flag. choices: as in argparse; limits: low, above, below, see
    check_limits(). group: the title in --help above this flag and those that follow. large: its
    default in the LARGE presets."""
    flag = {"type": type(default), "choices": choices}
    if isinstance(default, bool):
        flag = {"action": argparse.BooleanOptionalAction}
    metadata = {"help": help, "flag": flag, "limits": limits, "group": group, "large": large}
    return field(default=default, metadata=metadata)


# ---- what all methods share ----

# Blocks, heads, channels, context; sequences per rank and micro-step; peak learning rate and its
# warm-up. Rates from 124m up are GPT-3's for these sizes (arXiv 2005.14165, table 2.1), which were
# used with batches of 0.5 to 2 million tokens. The warm-up is the EDiT paper's (from memory).
# In the LARGE presets EDiT and DiLoCo, streaming or not, have the outer steps of their papers.
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "lr", "lr_warmup_steps")
LONG = dict(max_steps=20_000, eval_interval=1000, log_interval=20, sync_warmup_steps=1024)
PRESETS = {
    "tiny": {},  # the defaults
    "10m": dict(zip(SHAPE, (6, 6, 384, 256, 4, 1e-3, 100)), max_steps=2000),
    "124m": dict(zip(SHAPE, (12, 12, 768, 1024, 16, 6e-4, 700)), **LONG),
    "1b": dict(zip(SHAPE, (24, 16, 2048, 2048, 4, 2e-4, 1000)), **LONG),
    "7b": dict(zip(SHAPE, (32, 32, 4096, 2048, 1, 1.2e-4, 2000)), **LONG),
}
LARGE = ("124m", "1b", "7b")


def padded_vocabulary(config, tokens: int) -> int:
    """How many tokens the model has for a corpus with so many: in large presets a multiple of 64,
    because GPUs multiply matrices of such sizes faster. --vocab_size is taken as it is."""
    if config.vocab_size or config.model not in LARGE:
        return tokens
    return -(-tokens // 64) * 64


@dataclass
class Config:
    """Flags of every method."""

    method: str = option("edit", "synchronization method", group="run")
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
    timeline: bool = option(False, "record computing and waiting in OUT_DIR/timeline-RANK.json")
    dry_run: bool = option(False, "print memory and traffic of the run, for any mesh, and exit")
    log_interval: int = option(10, "steps between log lines", low=1)
    eval_interval: int = option(200, "steps between evaluations (at round ends)", low=1)
    eval_batches: int = option(16, "validation batches of 16 windows", low=1, below=10**6)
    timeout_s: float = option(
        0.0,
        f"wait for a silent rank; 0: 600, with NCCL between machines {NCCL_TIMEOUT_S}",
        below=1e7,
    )

    checkpoint_interval: int = option(
        0, "in steps; 0: only one, at the end", group="checkpoints and resuming"
    )
    keep: int = option(2, "checkpoints to keep", low=1)
    save_on_exit: bool = option(False, "at SIGTERM, SIGHUP, Ctrl-C save and stop at the round end")
    resume: str = option("", "checkpoint or run's folder to continue; auto: OUT_DIR's, if any")
    overwrite: bool = option(False, "delete the earlier run in OUT_DIR")

    model: str = option("tiny", "preset of what is not given", choices=list(PRESETS), group="model")
    n_layer: int = option(4, "blocks", low=1, below=10_000)
    n_head: int = option(4, "attention heads", low=1)
    n_embd: int = option(128, "channels", low=1)
    block_size: int = option(128, "context, tokens", low=1)
    n_hidden: int = option(0, "channels in the MLP; 0: 8/3 n_embd, up to a multiple of 64")
    rope_base: float = option(10000.0, "of the rotary positions", above=0)
    norm_eps: float = option(1e-5, "of RMSNorm", above=0)
    init_from: str = option("", "start from this model.pt or Hugging Face Llama folder; its shape")

    data: str = option("", "folder of data.py (default: standard library)", group="data")
    data_by_replica: bool = option(False, "each replica draws from its own 1/M of the documents")
    vocab_size: int = option(0, "another than the corpus's, for example to pad it")
    batch_size: int = option(8, "sequences per rank and micro-step", low=1)
    accum: int = option(1, "micro-steps per step; their gradients are averaged", low=1, below=10**6)
    tokens_per_step: int = option(0, "of all ranks; it sets accum, and batch_size is a limit then")

    optimizer: str = option(
        "adamw",
        "muon: Muon for the blocks' matrices",
        choices=["adamw", "muon"],
        group="inner optimizer",
    )
    lr: float = option(3e-3, "peak learning rate of AdamW")
    muon_lr: float = option(0.02, "peak learning rate of Muon, which has the schedule of lr")
    min_lr_ratio: float = option(0.1, "final learning rate / peak learning rate")
    lr_warmup_steps: int = option(50, "steps of linear warm-up")
    schedule: str = option(
        "cosine", "of the learning rate (wsd: constant, then linear)", choices=["cosine", "wsd"]
    )
    decay_share: float = option(0.2, "of max_steps, in which wsd's rate falls", below=1.000001)
    weight_decay: float = option(0.1, "of matrices")
    beta1: float = option(0.9, "AdamW; momentum of Muon", below=1)
    beta2: float = option(0.95, "AdamW", below=1)
    grad_clip: float = option(1.0, "largest global gradient norm; 0: no clipping")

    slow_replica: str = option("", "R:F, replica R is F times slower", group="simulation")
    virtual_clock: bool = option(
        False, "count virtual seconds: a step takes 1, on a slow replica its factor"
    )
    random_tokens: str = option("", "R:FIRST:LAST, in these steps replica R gets random tokens")
    scale_lr: str = option("", "R:FIRST:LAST:FACTOR, multiplies replica R's lr in these steps")
    flip: str = option("", "R:FIRST:LAST, in these steps replica R syncs progress of wrong sign")
    link_mbps: float = option(0.0, "Mbit/s of each replica's link to the others; 0: no limit")

    # No flag: what a sync needs beside the method's vectors, in vectors like model.master. A
    # method's dataclass may replace it.
    buffer_vectors = 0.0

    def sent_vectors(self, replicas: int) -> float:
        """What a rank sends to other replicas per round, in vectors like model.master."""
        return 2 * (replicas - 1) / replicas

    def sent_in_warmup(self, replicas: int) -> float:
        """The same per step of the warm-up."""
        return 2 * (replicas - 1) / replicas

    def describe_round(self, tokens_per_step: int) -> str:
        """How long a round is."""
        return "every step"

    def check(self, replicas: int):
        """Raise UserError if the flags do not fit together."""
        if self.n_embd % (2 * self.n_head):
            raise UserError(f"--n_embd {self.n_embd}: must be a multiple of 2 x --n_head")
        before_decay = (1 - self.decay_share) * self.max_steps
        if self.schedule == "wsd" and self.lr_warmup_steps > before_decay:
            raise UserError(
                f"--decay_share {self.decay_share:g}: of {self.max_steps} steps the decay would "
                f"begin at step {before_decay:.0f}, in the rate's warm-up of "
                f"{self.lr_warmup_steps} steps: lower it or --lr_warmup_steps"
            )
        if self.optimizer == "muon" and (self.lr == 0 or self.muon_lr / self.lr > 1e100):
            hint = "raise --lr, or give --optimizer adamw"
            raise UserError(f"--lr {self.lr}: muon's rate follows its schedule; {hint}")


# ---- from the command line to a config ----

# Flags of this machine or this start: a resumed run does not take them from the checkpoint.
NOT_RESUMED = {"out_dir", "device", "backend", "replicas", "resume", "overwrite", "dry_run"}
NOT_RESUMED |= {"init_from", "timeline"}


def parse(argv: list, methods: dict) -> tuple:
    """Flags -> (the run's config, the flags given as name -> value). methods: name -> Method class.
    Raises UserError that names the flag."""
    given = read_flags(argv, methods)
    return make_config(given, methods, {}), given


def read_flags(argv: list, methods: dict) -> dict:
    """The flags given, as name -> value. They may be of any method: a run that resumes knows its
    method from the checkpoint only. Raises UserError that names the flag. --help ends here."""
    options = {"argument_default": argparse.SUPPRESS, "allow_abbrev": False}
    first = Parser(add_help=False, **options)
    first.add_argument("--method", choices=list(methods), default=Config.method)
    method = first.parse_known_args(argv)[0].method

    fields = {}  # flag -> its field in each method that has it; the chosen method is the first one
    for name, config in configs(method, methods).items():
        for f in dataclasses.fields(config):
            fields.setdefault(f.name, {})[name] = f

    parser = Parser(
        usage="%(prog)s [--flag value ...]",
        description=describe_help(method, methods),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )
    titles = group_titles()
    groups = {}
    for name, found in fields.items():
        title = titles.get(name, f"of --method {method}")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        f = next(iter(found.values()))
        text = argparse.SUPPRESS
        if method in found:
            text = f.metadata["help"]
            if f.default != "":
                text += f" (default: {f.default})"
            if f.metadata["large"] is not None:
                text += f" ({f.metadata['large']} in --model {', '.join(LARGE)})"
        flag = f.metadata["flag"]
        if name == "method":
            flag = {"choices": list(methods)}
        groups[title].add_argument(f"--{name}", help=text, **flag)

    given = vars(parser.parse_args(argv))
    for name, value in given.items():
        f = next(iter(fields[name].values()))
        check_limits(f"--{name}", value, f.metadata["limits"])
    return given


def configs(method: str, methods: dict) -> dict:
    """Method -> its Config, the chosen one first. A method of one's own that is broken stops no
    other one: it is left out."""
    found = {method: methods[method].Config}
    for name in methods:
        with suppress(Exception):
            found[name] = methods[name].Config
    return found


def group_titles() -> dict:
    """Flag that all methods have -> its title in --help."""
    titles = {}
    title = ""
    for f in dataclasses.fields(Config):
        title = f.metadata["group"] or title
        titles[f.name] = title
    return titles


def describe_help(method: str, methods: dict) -> str:
    """The text above the flags."""
    lines = ["methods (--method NAME --help: the flags of one):"]
    for name, method_class in methods.items():
        docstring = sys.modules[method_class.__module__].__doc__ or ""
        lines.append(f"  {name:18}{docstring.splitlines()[0] if docstring else ''}")
    return "\n".join([*lines, "", f"The flags of --method {method}:"])


def list_methods(names: list, methods: dict) -> str:
    others = [name for name in methods if name not in names]
    if len(others) < 3 < len(names):
        return f"all but {', '.join(others)}"
    return ", ".join(names)


def make_config(given: dict, methods: dict, base: dict):
    """The config of a run. given: flags as name -> value; base: those of a checkpoint or a model.
    Flags of a preset or of the base that the method does not have are left out. Raises UserError
    if one of them was given."""
    values = {"model": Config.model, "method": Config.method}
    values |= {name: value for name, value in base.items() if name not in NOT_RESUMED}
    values |= given
    model, method = values["model"], values["method"]
    run_class = methods[method].Config
    fields = run_class.__dataclass_fields__
    preset = PRESETS[model]
    if model in LARGE:
        large = {name: f.metadata["large"] for name, f in fields.items()}
        preset = preset | {name: value for name, value in large.items() if value is not None}
    values = preset | values

    foreign = []
    for name in sorted(given.keys() - fields):
        found = configs(method, methods).items()
        owners = [other for other, its in found if name in its.__dataclass_fields__]
        foreign.append(f"--{name} (a flag of {list_methods(owners, methods)})")
    if foreign:
        raise UserError(f"--method {method} does not have {', '.join(foreign)}")
    return run_class(**{name: value for name, value in values.items() if name in fields})


PATHS = {f"--{name}" for name in "data init_from resume out_dir model input tokenizer out".split()}


def check_limits(name: str, value, limits: dict):
    """Raise UserError unless a number is at least `low` (by default 0), not `above` (0, if it is
    given) and below `below` (2^31; 1e30 for fractions)."""
    names = value if isinstance(value, list) else [value]
    if "" in names and name in PATHS:
        raise UserError(f"{name} is empty, as of an unset variable: leave it out for its default")
    if isinstance(value, (str, list)):
        return
    low = limits.get("low", 0)
    below = limits.get("below", 2**31 if isinstance(value, int) else 1e30)
    if not (low <= value < below) or value == limits.get("above"):  # also refuses NaN
        bound = f"above {limits['above']}" if "above" in limits else f"at least {low}"
        raise UserError(f"{name} {value}: must be {bound} and below {below:g}")
