"""The command line: what all methods share, which method, what a resumed run takes over, and all
that can be wrong with it.

`set_up` turns the flags into a Setup before any process group exists, and whatever wrong input can
break it breaks here, as a UserError. What a method needs beside these flags stands in its own file.

When a run goes on from a checkpoint (--resume), flags that are not given come from there. Those
that change the trajectory must be the same, or be named in --allow_change.
"""

import dataclasses
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import a_edit
import checkpoint
import data
import diloco
import edit
import flags
import minibatch
import simulate
from flags import UserError, option

METHODS = {
    "minibatch": (minibatch.MiniBatch, minibatch.Config),
    "diloco": (diloco.DiLoCo, diloco.Config),
    "edit": (edit.EDiT, edit.Config),
    "a_edit": (a_edit.AEDiT, a_edit.Config),
}


# --model: blocks, heads, channels, context; sequences per rank and micro-step; peak
# learning rate and its warm-up, in steps. Llama shapes; rates from 124m up are GPT-3's
# for these sizes (arXiv 2005.14165, table 2.1), which holds them for batches of 0.5 to
# 2 million tokens. With them come the EDiT paper's tau and warm-up (from memory).
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "lr", "lr_warmup_steps")
LONG = {
    "max_steps": 20_000, "eval_interval": 1000, "log_interval": 20, "tau": 128,
    "sync_warmup_steps": 1024,
}  # fmt: skip
SIZES = {
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
    """What all methods share.
    Numbers are finite and at least `low` (0 if not said), see check_limits."""

    # run
    method: str = option("edit", "synchronisation method", choices=list(METHODS))
    shards: int = option(1, "N, ranks per replica; the other ranks form more replicas", low=1)
    replicas: int = option(
        0, "M, to check the number of ranks by, or for --dry_run; 0: what the ranks make"
    )
    max_steps: int = option(700, "inner steps", low=1)
    seed: int = option(1337, "of initialisation and data order", below=2**40)
    out_dir: str = option("", "where metrics.jsonl and model.pt go (default: out/METHOD)")
    device: str = option(
        "auto", "cpu, cuda, or cuda where there is one", choices=["auto", "cpu", "cuda"]
    )
    backend: str = option(
        "auto",
        "of torch.distributed; auto: nccl on cuda, else gloo. With gloo ranks may share a GPU",
        choices=["auto", "nccl", "gloo"],
    )
    dtype: str = option(
        "auto",
        "of the layers; auto: bf16 where the device has it natively; fp64 takes the masters along",
        choices=["auto", "fp32", "bf16", "fp64"],
    )
    compile: bool = option(False, "torch.compile each layer")
    recompute: bool = option(
        False, "compute blocks again in the backward instead of keeping activations"
    )
    profile: bool = option(
        False, "record a few early steps for chrome://tracing in out_dir/trace-RANK.json"
    )
    dry_run: bool = option(False, "print what the run would take, for any mesh, and exit")
    log_interval: int = option(10, "steps between log lines", low=1)
    eval_interval: int = option(
        200, "steps between evaluations, which wait for the next sync", low=1
    )
    eval_batches: int = option(16, "validation batches of 16 windows, over all ranks", low=1)
    timeout_s: float = option(
        600.0, "how long a rank waits for a silent one before it gives up", above=0
    )
    # checkpoints
    checkpoint_interval: int = option(0, "steps between checkpoints in out_dir; 0: none")
    keep: int = option(2, "checkpoints to keep", low=1)
    save_on_exit: bool = option(False, "write a checkpoint before stopping at SIGTERM or Ctrl-C")
    resume: str = option(
        "",
        "checkpoint, or folder with checkpoints, to go on from; auto: the last in out_dir, if any",
    )
    allow_change: str = option(
        "", "names of flags that may differ from the checkpoint's: lr,batch_size,..."
    )
    # model
    model: str = option(
        "tiny",
        "size: sets the flags of model, batch, rates, tau, warm-ups and intervals "
        "that are not given",
        choices=list(SIZES),
    )
    n_layer: int = option(4, "blocks", low=1)
    n_head: int = option(4, "attention heads", low=1)
    n_embd: int = option(128, "channels", low=1)
    block_size: int = option(128, "context, tokens", low=1)
    # data
    data: str = option("", "corpus folder made by data.py (default: Python's standard library)")
    batch_size: int = option(8, "sequences per rank and micro-step", low=1)
    accum: int = option(1, "micro-steps per step, their gradients summed", low=1)
    # inner
    lr: float = option(3e-3, "peak inner (AdamW) learning rate")
    min_lr_ratio: float = option(0.1, "final over peak learning rate")
    lr_warmup_steps: int = option(50, "steps of linear warm-up")
    weight_decay: float = option(0.1, "of matrices")
    beta1: float = option(0.9, "AdamW", below=1)
    beta2: float = option(0.95, "AdamW", below=1)
    grad_clip: float = option(1.0, "largest global gradient norm; 0: no clipping")


# The first flag of each group of --help.
GROUPS = {
    "method": "run",
    "checkpoint_interval": "checkpoints",
    "model": "model",
    "data": "data",
    "lr": "inner",
    "slow_replica": "simulation of a slow, uneven cluster",
    "sync_warmup_steps": "outer (methods with local steps)",
}


def parse(argv: list, saved: dict | None = None) -> tuple:
    """Flags -> (Config, the method's, simulate's). Flags of other methods are checked and
    then not used, so that one command line serves to compare methods. saved: a checkpoint's
    flags, for those not given. Raises UserError, naming the flag, for what cannot be."""
    config, *others = read_flags(argv, saved or {})
    if config.n_embd % config.n_head or config.n_embd // config.n_head % 2:
        raise UserError(
            f"--n_embd {config.n_embd} --n_head {config.n_head}: "
            "channels per head must be a whole, even number"
        )
    return config, *others


def read_flags(argv: list, saved: dict) -> tuple:
    owners = {name: [config] for name, (_, config) in METHODS.items()}
    owners = {None: [Config, simulate.Config]} | owners
    texts = dict(description="Train with " + ", ".join(METHODS) + ".")
    texts["usage"] = "train.py [--flag value ...]"
    given = flags.parse(argv, owners, GROUPS, **texts)
    before = saved.get("method")
    if given.get("method", before) != before:  # each has defaults of its own
        saved = {name: value for name, value in saved.items() if name in vars(Config)}
    saved = {name: value for name, value in saved.items() if name not in NEVER_TAKEN_OVER}
    given = flags.check_saved(saved, owners) | given
    given = SIZES[given.get("model", "tiny")] | given
    config = flags.fill(Config, given)
    if config.resume in ("", "auto"):
        config.out_dir = config.out_dir or f"out/{config.method}"
    else:
        config.out_dir = config.out_dir or str(checkpoint.run_folder(config.resume))
    return config, flags.fill(METHODS[config.method][1], given), flags.fill(simulate.Config, given)


def resolve_device(config):
    """Replace `auto` in device and dtype by what this machine has."""
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.dry_run and config.device == "cuda":  # of another machine, with bf16
        config.dtype = "bf16" if config.dtype == "auto" else config.dtype
        return
    if config.backend == "auto":
        config.backend = "nccl" if config.device == "cuda" else "gloo"
    if config.backend == "nccl" and config.device == "cpu":
        raise UserError("--backend nccl: it is for --device cuda; use --backend gloo")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if config.backend == "nccl" and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"--device cuda: more ranks than the {torch.cuda.device_count()} CUDA devices of "
            "this machine; lower --nproc_per_node, or let them share with --backend gloo"
        )
    native = has_native_bf16(config.device)
    if config.dtype == "bf16" and not native and not config.dry_run:
        raise UserError(f"--dtype bf16: this {config.device} has no native bf16; use --dtype fp32")
    if config.dtype == "auto":
        config.dtype = "bf16" if native else "fp32"


def has_native_bf16(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


# ---- resuming ----

# Flags of this machine or this start;
# all others are taken from the checkpoint where they are not given.
NEVER_TAKEN_OVER = {
    "out_dir", "device", "resume", "allow_change", "backend", "replicas", "profile", "dry_run",
}  # fmt: skip
# What may differ from the checkpoint at will, as it changes no more than rounding.
# Corpora are compared by hash.
FREE = NEVER_TAKEN_OVER | {
    "shards", "compile", "recompute", "offload", "log_interval", "eval_interval", "eval_batches",
    "timeout_s", "data", "checkpoint_interval", "keep", "save_on_exit",
    *(f.name for f in dataclasses.fields(simulate.Config)),
}  # fmt: skip
FIXED = {"model", "n_layer", "n_head", "n_embd"}  # another model


def check_resume(saved: dict, config, method_config, corpus, path):
    """Raise UserError if a flag that changes the trajectory
    differs from the checkpoint's and was not allowed to."""
    allowed, now = set(config.allow_change.split(",")), vars(config) | vars(method_config)
    if unknown := allowed - now.keys() - {""}:
        raise UserError(f"--allow_change {config.allow_change}: there is no flag {min(unknown)}")
    if saved["model_config"]["vocab_size"] != corpus.vocab_size:
        raise UserError(
            f"checkpoint {path} has a vocabulary of {saved['model_config']['vocab_size']}, "
            f"the corpus of {corpus.vocab_size}: give the --data that it was trained on"
        )
    if saved["corpus_hash"] != corpus.hash and "data" not in allowed:
        raise UserError(
            f"checkpoint {path} was trained on another corpus ({saved['corpus_hash']}, "
            f"this is {corpus.hash}): give it with --data, or --allow_change data"
        )
    if config.method != saved["flags"]["method"]:
        if saved["outer"]:
            raise UserError(
                f"--method {config.method}: checkpoint {path} is from {saved['flags']['method']}'s "
                "local phase; methods can be changed up to the end of the warm-up"
            )
        now = vars(config)  # the other flags have other meanings
    for name, value in now.items():
        before = saved["flags"].get(name, value)
        if before == value or name in FREE or name in allowed - FIXED:
            continue
        way_out = "" if name in FIXED else f", or --allow_change {name} if you mean it"
        raise UserError(
            f"--{name} {value}: checkpoint {path} was made with {before}; leave it out{way_out}"
        )
    warmup = getattr(method_config, "sync_warmup_steps", math.inf)
    if bool(saved["outer"]) != (max(replica["step"] for replica in saved["replicas"]) > warmup):
        raise UserError(
            f"--sync_warmup_steps {warmup}: checkpoint {path} is "
            f"{'past' if saved['outer'] else 'still in'} its warm-up, "
            "which cannot be moved to the other side of it"
        )


# ---- set-up ----


@dataclass
class Setup:
    """What set_up has made of the command line."""

    config: Config
    method_config: object
    simulation: simulate.Config
    corpus: data.Corpus
    path: Path | None = None  # the checkpoint to go on from
    saved: dict | None = None  # its state.json
    world_size: int = 1  # ranks, of a dry run those that it is about


def set_up(argv: list, rank: int, world_size: int, restarted: bool = False) -> Setup:
    """Everything that wrong input can break, before any process group exists."""
    config, *_ = read_flags(argv, saved={})
    path, saved = None, None
    if not config.dry_run:
        path = checkpoint.choose(config.resume, config.out_dir, restarted)
    if path:
        saved = checkpoint.read(path)
        config, method_config, simulation = parse(argv, saved["flags"])
    else:
        config, method_config, simulation = parse(argv)
    if config.dry_run:
        world_size = config.replicas * config.shards or max(world_size, config.shards)
    if config.replicas and world_size != config.replicas * config.shards:
        raise UserError(
            f"--replicas {config.replicas} --shards {config.shards}: "
            f"these are {config.replicas * config.shards} ranks, but {world_size} have been "
            "started; change --nproc_per_node or --nnodes, or leave out --replicas"
        )
    if world_size % config.shards:
        raise UserError(
            f"--shards {config.shards}: "
            f"{world_size} ranks do not divide into replicas of {config.shards}"
        )
    resolve_device(config)
    simulate.Stragglers(simulation, world_size // config.shards, config.seed)  # looks at its flags
    corpus = data.load(config.data or None)
    data.check_windows(corpus, config.block_size)
    if saved:
        check_resume(saved, config, method_config, corpus, path)
        checkpoint.verify(path, saved, rank, world_size)
    if rank == 0 and not config.dry_run:
        try:
            Path(config.out_dir).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=config.out_dir).close()  # can it be written to?
        except OSError as error:
            raise UserError(
                f"--out_dir {config.out_dir}: {error.strerror}; name a folder to write to"
            ) from None
        checkpoint.clean_up(config.out_dir)
    return Setup(config, method_config, simulation, corpus, path, saved, world_size)
