"""The record of a run: what it prints, and what it writes to OUT_DIR/metrics.jsonl.

Rank 0 writes one JSON object per row; its first key is `event`. `step` counts finished inner steps.

    config  all flags, world_size, mesh, n_params, corpus_hash, torch, device_name
    resume  the same and step: a run continues from a checkpoint here. Rows that were written after
            that checkpoint are removed, so every step is in the file once
    step    step, tokens, loss, lr, grad_norm, step_ms, train_s, tokens_per_s, shard_bytes,
            sync_bytes
    sync    round, step, tau, steps, loss, pseudo_grad_norm, weight, dropped, clip, stall_ms,
            wait_others_ms, wait_link_ms, sync_bytes
    eval    step, tokens, train_s, val_loss, bits_per_byte, sync_bytes; NoLoCo: spread, the root
            mean square distance of the replicas from their mean
    end     step, val_loss, train_s, tokens_per_s, peak_memory_bytes, exit

step.loss is the mean over all ranks if gradients were averaged, else over replica 0: a local step
has no communication between replicas. A sync row has lists with one entry per replica: `loss` (mean
over the round), `steps` (of the round), `pseudo_grad_norm`, `weight`, `dropped` (layers it was left
out of). Of stall_ms, wait_others_ms is the host's waiting for other replicas and wait_link_ms for a
simulated link (simulate.py); the rest is arithmetic.
"""

import json
import math
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from plumbing.config import UserError
from plumbing.plan import size


class Clock:
    """Seconds of training. `with clock:` stops it during what is not training (evaluation,
    saving)."""

    def __init__(self, device: torch.device):
        self.device, self.started, self.stopped_at = device, time.perf_counter(), None

    def start_at(self, saved: dict):
        """Continue a checkpoint. saved: its state.json."""
        self.started = time.perf_counter() - saved["train_s"]

    def __enter__(self):
        self._finish_queued_work()
        self.stopped_at = time.perf_counter()

    def __exit__(self, *exception):
        self._finish_queued_work()
        self.started += time.perf_counter() - self.stopped_at
        self.stopped_at = None

    def _finish_queued_work(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def train_s(self) -> float:
        return (self.stopped_at or time.perf_counter()) - self.started


class Log:
    """Rank 0 prints and writes; on other ranks every method does nothing."""

    def __init__(self, path, config, mesh, clock, tokens_per_step: int):
        self.path, self.config, self.mesh, self.clock = path, config, mesh, clock
        self.tokens_per_step = tokens_per_step  # of all ranks
        self.file = None
        self.tokens, self.first_tokens, self.first_progress = 0, 0, 0.0
        self.last = {"step": 0, "tokens": 0, "train_s": 0.0}  # of the last step row

    def start(self, description: dict, saved: dict | None, same_file: bool, step: int):
        """Open the file. description: what the config row says; saved: the state.json that the
        run resumes from; same_file: its record is the beginning of this file."""
        if saved:
            self.tokens = self.first_tokens = saved["tokens"]
            self.first_progress = saved["progress"]
            self.last = {"step": step, "tokens": self.tokens, "train_s": saved["train_s"]}
        if self.mesh.rank != 0:
            return
        self.file = open(self.path, "a" if same_file else "w", buffering=1)  # whole lines
        if same_file and self.file.tell() > saved["metrics_bytes"]:
            self.file.truncate(saved["metrics_bytes"])
        if not same_file:
            self.write("config", **description)
        if saved:
            self.write("resume", step=step, **description)

    def write(self, event: str, **row):
        line = json.dumps({"event": event} | {k: finite(v) for k, v in row.items()})
        try:
            self.file.write(line + "\n")
        except OSError as error:
            raise UserError(f"{self.path} could not be written: {error.strerror}") from None

    def report(self, line: str, event: str, **row):
        """Write a row and print its line."""
        self.write(event, **row)
        print(line, flush=True)

    def resumed(self, path, was: dict, changed: list):
        """was: the checkpoint's mesh; changed: flags that differ from the checkpoint's."""
        now = {"replicas": self.mesh.replicas, "shards": self.mesh.shards}
        arrow = f" -> {now['replicas']} x {now['shards']}" if was != now else ""
        mesh = f"{was['replicas']} replicas x {was['shards']} shards{arrow}"
        where = f"resume  {path}: step {self.last['step']}, {mesh}"
        print("; ".join([where, *changed]), flush=True)

    def saved(self, path, seconds: float):
        if self.file:
            count = sum(file.stat().st_size for file in path.iterdir())
            print(f"saved   {path}: {size(count)} in {seconds:.2f} s", flush=True)

    def count_tokens(self, progress: float) -> int:
        """Tokens that all ranks have trained on. A-EDiT extrapolates its progress between syncs;
        the count never falls."""
        tokens = self.first_tokens + (progress - self.first_progress) * self.tokens_per_step
        self.tokens = max(self.tokens, round(tokens))
        return self.tokens

    def state(self, progress: float) -> dict:
        """What a checkpoint must know to continue this record."""
        return {
            "progress": progress,
            "tokens": self.count_tokens(progress),
            "tokens_per_step": self.tokens_per_step,
            "train_s": self.clock.train_s(),
            "sent": dict(self.mesh.sent),
            "metrics_bytes": self.path.stat().st_size if self.file else 0,
        }

    def step(self, method, lr: float, metrics):
        """metrics: shard.Metrics. Reading them waits for the step."""
        step, config = method.steps, self.config
        due = step % config.log_interval == 0 or step in (1, config.max_steps)
        if not due or not self.file:
            return
        grad_norm, loss, _ = metrics.read()
        now = {"step": step, "tokens": self.count_tokens(method.progress)}
        now["train_s"] = self.clock.train_s()
        passed = {name: now[name] - self.last[name] for name in now}
        self.last, seconds = now, max(passed["train_s"], 1e-9)
        step_ms, speed = 1e3 * seconds / max(passed["step"], 1), passed["tokens"] / seconds
        sent = {f"{group}_bytes": round(count) for group, count in self.mesh.sent.items()}
        left = (config.max_steps - method.progress) * self.tokens_per_step
        left_s = round(left / speed) if speed else 0
        self.report(
            f"step {step:05d}/{config.max_steps:05d} | loss {loss:.4f} | lr {lr:.1e} | "
            f"gnorm {grad_norm:.2f} | {step_ms:.0f} ms | {speed:,.0f} tok/s | "
            f"{left_s // 60}m{left_s % 60:02d}s left",
            "step", step=step, tokens=now["tokens"], loss=loss, lr=lr, grad_norm=grad_norm,
            step_ms=step_ms, train_s=now["train_s"], tokens_per_s=speed, **sent,
        )  # fmt: skip

    def sync(self, method):
        """The syncs that have been completed since the last call."""
        while self.file and (row := method.stats()):
            self.sync_row(row)

    def sync_row(self, row: dict):
        norms, weights, steps = row["pseudo_grad_norm"], row["weight"], row["steps"]
        tau = str(steps[0]) if len(set(steps)) == 1 else "/".join(map(str, steps))
        spread = "-"
        if norms:
            spread = f"{sum(norms) / len(norms):.3f} [{min(norms):.3f} .. {max(norms):.3f}]"
        self.report(
            f"sync {row['round']:04d} | tau {tau} | pseudo-grad {spread} | "
            f"weights [{min(weights):.2f} .. {max(weights):.2f}] | dropped {sum(row['dropped'])} | "
            f"clip {row['clip']:.2f} | {size(row['sync_bytes'])} | stall {row['stall_ms']:.0f} ms "
            f"(others {row['wait_others_ms']:.0f}, link {row['wait_link_ms']:.0f})",
            "sync", **row,
        )  # fmt: skip
        for i, layers in enumerate(row["dropped"]):
            if layers:
                print(f"left out replica {i} in {layers} layers: norm {norms[i]:.3g}", flush=True)

    def eval(self, method, val_loss: float, bytes_per_token: float):
        if not self.file:
            return
        bits = val_loss / math.log(2) / bytes_per_token
        more = {} if method.spread is None else {"spread": method.spread}
        line = f"eval {method.steps:05d} | val loss {val_loss:.4f} nats/token | "
        self.report(
            line + f"{bits:.3f} bits/byte" + "".join(f" | {k} {v:.3g}" for k, v in more.items()),
            "eval", step=method.steps, tokens=self.count_tokens(method.progress),
            train_s=self.clock.train_s(), val_loss=val_loss, bits_per_byte=bits,
            sync_bytes=round(self.mesh.sent["sync"]), **more,
        )  # fmt: skip

    def end(self, method, val_loss: float):
        if not self.file:
            return
        train_s, peak = self.clock.train_s(), peak_memory_bytes(self.mesh.device)
        speed = self.count_tokens(method.progress) / max(train_s, 1e-9)
        self.report(
            f"done | {method.steps} steps in {train_s:.0f} s | {speed:,.0f} tok/s | "
            f"val loss {val_loss:.4f} | peak {size(peak)} on rank 0",
            "end", step=method.steps, val_loss=val_loss, train_s=train_s, tokens_per_s=speed,
            peak_memory_bytes=peak, exit="done",
        )  # fmt: skip


def finite(value):
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    scale = 1 if sys.platform == "darwin" else 1024  # Linux counts KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


CURVES = ("step", "tokens", "train_s", "sync_bytes", "val_loss")  # columns of the eval rows


def read_run(folder) -> dict:
    """A run's record: its rows `config` and `end` (None: it has not ended), a list per column of
    its evaluations, and `steps`, the list of its step rows. Raises UserError for a file that is not
    a record."""
    path, rows = Path(folder, "metrics.jsonl"), defaultdict(list)
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["event"]].append(row)
        curves = {name: [row[name] for row in rows["eval"]] for name in CURVES}
        config, end = rows["config"][0], rows["end"][0] if rows["end"] else None
        config["method"]  # a record without it is refused
        return {"config": config, "end": end, "steps": rows["step"]} | curves
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is not the record of a run ({error})") from None
