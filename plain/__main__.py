"""Train with a plain version: one process, any number of replicas, a breakpoint anywhere.

    python -m plain --method edit --replicas 4 --tau 16
    OMP_NUM_THREADS=1 python -m plain --method edit    # one thread: for breakpoints
    python -m plain --method a_edit --replicas 2 --slow_replica 1:2 --tau_time_s 16
    python -m plain --method diloco --replicas 2 --shards 2 --device cuda
    python -m plain --method edit --help

The flags are train.py's. --replicas 4 --shards 2 means: in each step 4 replicas, each of which gets
the batches of 2 ranks. (--replicas 0, the default, means 4.) Flags that need several processes, or
that only train.py has, are refused. The clock of a_edit and of --slow_replica is virtual: a step
takes 1 s, on a slow replica its factor.

--init_from starts from a model.pt or a Hugging Face Llama folder, as in train.py.

OUT_DIR is out/plain/METHOD by default. It gets metrics.jsonl, which lab reads, and model.pt, which
sample.py, hf.py and --init_from read.

The methods of the sharded twins are imported for their flags only. Sharded twin: train.py.
"""

import sys
from pathlib import Path

import torch

import data
from config import UserError, make_config, read_flags, run_command
from hf import open_model, write_model
from methods import METHODS, check_plain
from model import has_native_bf16
from plain.record import Record
from plain.text import model_config, text_training
from plumbing import simulate

REFUSED = "backend timeout_s compile recompute timeline dry_run checkpoint_interval keep"
REFUSED += " save_on_exit resume tokens_per_step offload link_mbps"
REPLICAS = 4


def read_config(argv):
    """All flags. Raises UserError."""
    return read_command(argv)[0]


def read_command(argv):
    """(all flags, the model of --init_from or None). Raises UserError."""
    given = read_flags(argv, METHODS)
    for name in REFUSED.split():
        if name in given:
            raise UserError(f"--{name}: only train.py has it, not one process; leave it out")
    source = None
    base = {}
    if "init_from" in given:
        source = open_model(given["init_from"])
        base = vars(source.config) | {"vocab_size": 0}
    f = make_config(given, METHODS, base)
    check_plain(f.method)
    f.replicas = f.replicas or REPLICAS
    f.out_dir = f.out_dir or f"out/plain/{f.method}"
    f.backend = "plain"  # for the record
    if hasattr(f, "tau_time_s") or f.slow_replica:  # what depends on time
        if not given.get("virtual_clock", True):
            hint = "a_edit and --slow_replica have a virtual clock in one process; leave it out"
            raise UserError(f"--no-virtual_clock: {hint}")
        f.virtual_clock = True
    if f.device == "auto":
        f.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif f.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if f.dtype == "auto":
        f.dtype = "bf16" if has_native_bf16(f.device) else "fp32"
    f.check(f.replicas)
    simulate.check(f, METHODS[f.method], f.replicas)
    return f, source


def make_folder(f):
    """Raises UserError if there is a run already."""
    folder = Path(f.out_dir)
    if list(folder.glob("checkpoint-*")):
        raise UserError(f"--out_dir {folder} has a run of train.py: name another --out_dir")
    earlier = any((folder / name).exists() for name in ("metrics.jsonl", "model.pt"))
    if earlier and not f.overwrite:
        raise UserError(
            f"--out_dir {folder} has an earlier run: --overwrite deletes it; "
            "or name another --out_dir"
        )
    if f.init_from and Path(f.init_from).resolve() == Path(folder, "model.pt").resolve():
        raise UserError("--overwrite deletes the model of --init_from: change --out_dir")
    folder.mkdir(parents=True, exist_ok=True)
    for name in "metrics.jsonl", "model.pt":
        (folder / name).unlink(missing_ok=True)


def check_source(source, f, corpus):
    """The model of --init_from and the corpus get one vocabulary. Raises UserError if they do not
    fit."""
    if not f.vocab_size:
        if source.is_padded(corpus):
            corpus.vocab_size = source.config.vocab_size
        f.vocab_size = corpus.vocab_size
    source.check(model_config(f, corpus), corpus)


def save_model(path, model, shape, corpus, flags):
    """A model.pt as that of hf.py. model: name -> parameter; shape: its ModelConfig."""
    weights = {name: p.float().cpu().clone() for name, p in model.items()}
    saved = {"model": weights, "model_config": vars(shape)}
    saved |= {"tokenizer": corpus.tokenizer, "config": flags}
    write_model(path, saved)


def main(argv):
    f, source = read_command(argv)
    M, N = f.replicas, f.shards
    corpus = data.load(f.data or None, f.vocab_size, f.block_size)
    if source:
        check_source(source, f, corpus)
    training = text_training(f, M, N, corpus, source and source.tensors)
    make_folder(f)
    record = Record(f, training, corpus)
    training.listen = record.note
    print(f"{f.method}: {M} replicas, each with the batches of {N} ranks ({f.device}, {f.dtype})")
    if source:
        print("init", source.path, source.notes)
    training.run()
    path = Path(f.out_dir, "model.pt")
    save_model(path, training.model, model_config(f, corpus), corpus, record.describe())
    record.end()
    print(f"model {path}: python sample.py --model {path}")


if __name__ == "__main__":
    run_command("plain", lambda: main(sys.argv[1:]))
