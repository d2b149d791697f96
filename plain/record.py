"""The record of a plain run: a line for each round, and OUT_DIR/metrics.jsonl.

The rows are those of the sharded twin, plumbing/log.py, so lab.table reads them. But in
one process nothing is sent. `sync_bytes` is what a rank of the sharded run would send, as the
method's flags estimate it: padding, norms and losses do not count.
"""

import json
import math
from pathlib import Path

import torch

from config import HINT, UserError


class Record:
    """f: all flags; training: plain.train.Training; corpus: data.Corpus. Opens the file."""

    def __init__(self, f, training, corpus):
        self.f = f
        self.training = training
        self.corpus = corpus
        self.sent_bytes = 0.0
        self.last = {"step": 0, "tokens": 0, "train_s": 0.0}  # of the last row `step`
        self.file = open(Path(f.out_dir, "metrics.jsonl"), "w", buffering=1)  # whole lines
        self.write("config", self.describe())

    def describe(self) -> dict:
        """The flags, and what plumbing/log.py records beside them."""
        f, training = self.f, self.training
        name = torch.cuda.get_device_name() if f.device == "cuda" else "cpu"
        return vars(f) | {
            "world_size": training.M * training.N,
            "mesh": {"replicas": training.M, "shards": training.N},
            "micro_steps": f.accum,
            "micro_batch": f.batch_size,
            "n_params": training.replicas[0].x.numel(),
            "corpus_hash": self.corpus.hash,
            "torch": str(torch.__version__),
            "device_name": name,
        }

    def write(self, event, row):
        row = {"event": event} | row
        row = json.loads(json.dumps(row), parse_constant=lambda name: None)  # JSON has no NaN
        self.file.write(json.dumps(row) + "\n")

    def note(self, event, row):
        """A row of the training."""
        getattr(self, event)(row)

    def step(self, row):
        step = row["step"]
        f, training = self.f, self.training
        M, x = training.M, training.replicas[0].x
        self.vector_bytes = 4 * x.numel() / training.N  # of a rank
        if not training.in_round:
            self.sent_bytes += f.sent_in_warmup(M) * self.vector_bytes
            check_finite(row["loss"], step)
        if step % f.log_interval and step not in (1, f.max_steps):
            return
        seconds = row["train_s"] - self.last["train_s"]
        steps = step - self.last["step"]
        row = row | {
            "step_ms": 1e3 * seconds / steps,
            "tokens_per_s": (row["tokens"] - self.last["tokens"]) / seconds,
            "shard_bytes": 0,
            "sync_bytes": round(self.sent_bytes),
        }
        self.last = row
        self.write("step", row)
        if not training.in_round:
            print(
                f"step {step:05d}/{f.max_steps:05d} | loss {row['loss']:.4f} | "
                f"lr {row['lr']:.1e} | gnorm {row['grad_norm']:.2f} | {row['step_ms']:.0f} ms"
            )

    def sync(self, row):
        sent = self.f.sent_vectors(self.training.M)
        self.sent_bytes += sent * self.vector_bytes
        names = ("pseudo_grad_norm", "weight", "dropped")
        lists = {name: [float(value) for value in row[name]] for name in names if name in row}
        waits = dict.fromkeys(("stall_ms", "wait_others_ms", "wait_link_ms"), 0.0)
        row = row | lists | waits | {"sync_bytes": round(sent * self.vector_bytes)}
        self.write("sync", row)

        steps = numbers(row["steps"], 0) if len(set(row["steps"])) > 1 else row["tau"]
        norms = numbers(row["pseudo_grad_norm"], 1) if "pseudo_grad_norm" in row else "-"
        lost = ""
        if row["rolled_back"]:
            lost = f" (rolled back: layer {numbers(row['rolled_back'], 0)})"
        print(
            f"round {row['round']:3d} | step {row['step']:05d} | tau {steps} | norms {norms} | "
            f"weights {numbers(row['weight'], 2)} | "
            f"flagged layers {numbers(row['dropped'], 0)}{lost} | "
            f"loss {numbers(row['loss'], 4)}"
        )
        if not any(map(math.isfinite, row["loss"])):
            check_finite(math.nan, row["step"])

    def eval(self, row):
        bits = row["val_loss"] / math.log(2) / self.corpus.bytes_per_token
        row = row | {"bits_per_byte": bits, "sync_bytes": round(self.sent_bytes)}
        self.write("eval", row)
        print(f"eval {row['step']:05d} | val loss {row['val_loss']:.4f} nats/token")
        if not math.isfinite(row["val_loss"]):
            reason = f"the validation loss at step {row['step']} is {row['val_loss']}"
            raise UserError(f"diverged: {reason}; {HINT}")

    def end(self):
        last = self.training.rows["eval"][-1]
        train_s, val_loss = self.training.train_s(), last["val_loss"]
        row = {"step": last["step"], "val_loss": val_loss, "train_s": train_s}
        row["tokens_per_s"] = last["tokens"] / train_s
        row |= {"peak_memory_bytes": None, "exit": "done"}
        self.write("end", row)
        print(
            f"done | {row['step']} steps in {train_s:.0f} s | "
            f"{row['tokens_per_s']:,.0f} tok/s | val loss {val_loss:.4f}"
        )


def check_finite(loss, step):
    if not math.isfinite(loss):
        raise UserError(f"diverged at step {step}: loss {loss}; {HINT}")


def numbers(values, digits):
    return " ".join(f"{value:.{digits}f}" for value in values)
