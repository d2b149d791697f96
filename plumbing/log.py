"""The record of a run: what it prints, and what it writes to OUT_DIR/metrics.jsonl.

Rank 0 writes one JSON object per row; its first key is `event`. `step` counts finished inner steps.

    config  all flags, world_size, mesh, n_params, corpus_hash, torch, device_name
    resume  the same and step: a run continues from a checkpoint here. Rows that were written after
            that checkpoint are removed, so every step is in the file once
    step    step, tokens, loss, lr, grad_norm, step_ms, train_s, tokens_per_s, shard_bytes,
            sync_bytes
    sync    round, step, tau, steps, loss, pseudo_grad_norm, weight, dropped, clip, stall_ms,
            wait_others_ms, wait_link_ms, sync_bytes
    eval    step, tokens, train_s, val_loss, bits_per_byte
    end     step, val_loss, train_s, tokens_per_s, peak_memory_bytes, exit

step.loss is the mean over all ranks if gradients were averaged, else over replica 0: a local step
has no communication between replicas. A sync row has lists with one entry per replica: `loss` (mean
over the round), `steps` (of the round), `pseudo_grad_norm`, `weight`, `dropped` (layers it was left
out of). Of stall_ms, wait_others_ms is the host's waiting for other replicas and wait_link_ms for a
simulated link (simulate.py); the rest is arithmetic.
"""

import json
import math
import os
import resource
import sys
import time
from contextlib import contextmanager

import torch

from plumbing.config import UserError
from plumbing.plan import size


class Clock:
    """Seconds of training. `with clock:` stops it during what is not training (evaluation,
    saving)."""

    def __init__(self, device: torch.device):
        self.device, self.stopped_at = device, None
        self.start_at(0.0)

    def start_at(self, train_s: float):
        self.started, self.paused_s = time.perf_counter() - train_s, 0.0

    def __enter__(self):
        self._finish_queued_work()
        self.stopped_at = time.perf_counter()

    def __exit__(self, *exception):
        self._finish_queued_work()
        self.paused_s += time.perf_counter() - self.stopped_at
        self.stopped_at = None

    def _finish_queued_work(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def train_s(self) -> float:
        return (self.stopped_at or time.perf_counter()) - self.started - self.paused_s


class Log:
    """Rank 0 prints and writes; on other ranks every method does nothing."""

    def __init__(self, path, config, mesh, clock):
        self.path, self.config, self.mesh, self.clock = path, config, mesh, clock
        self.tokens_per_step = (
            mesh.world_size * config.accum * config.batch_size * config.block_size
        )
        self.file = None
        self.tokens, self.first_tokens, self.first_progress = 0, 0, 0.0
        self.last = {"step": 0, "tokens": 0, "train_s": 0.0}  # of the last step row

    def write(self, event: str, **row):
        with self.writable():
            line = json.dumps({"event": event} | {k: finite(v) for k, v in row.items()})
            self.file.write(line + "\n")
            self.file.flush()

    @contextmanager
    def writable(self):
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path} could not be written: {error.strerror}") from None

    def start(self, description: dict, saved: dict | None, same_file: bool, step: int):
        """Open the file. description: what the config row says; saved: the state.json that the
        run resumes from; same_file: its record is the beginning of this file."""
        if saved:
            self.tokens = self.first_tokens = saved["tokens"]
            self.first_progress = saved["progress"]
            self.mesh.sent.update(saved["sent"])
            self.last = {"step": step, "tokens": self.tokens, "train_s": saved["train_s"]}
        if self.mesh.rank != 0:
            return
        with self.writable():
            self.file = open(self.path, "a" if same_file else "w")
            if same_file and self.file.tell() > saved["metrics_bytes"]:
                self.file.truncate(saved["metrics_bytes"])
                self.file.seek(0, os.SEEK_END)
        if not same_file:
            self.write("config", **description)
        if saved:
            self.write("resume", step=step, **description)

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
        with self.writable():
            if self.file:
                os.fsync(self.file.fileno())
            written = self.file.tell() if self.file else 0
        return {
            "progress": progress,
            "tokens": self.count_tokens(progress),
            "tokens_per_step": self.tokens_per_step,
            "train_s": self.clock.train_s(),
            "sent": dict(self.mesh.sent),
            "metrics_bytes": written,
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
        self.write(
            "step", step=step, tokens=now["tokens"], loss=loss, lr=lr, grad_norm=grad_norm,
            step_ms=step_ms, train_s=now["train_s"], tokens_per_s=speed, **sent,
        )  # fmt: skip
        left = self.first_tokens + (config.max_steps - self.first_progress) * self.tokens_per_step
        left_s = round(max(0, left - now["tokens"]) / speed) if speed else 0
        print(
            f"step {step:05d}/{config.max_steps:05d} | loss {loss:.4f} | lr {lr:.1e} | "
            f"gnorm {grad_norm:.2f} | {step_ms:.0f} ms | {speed:,.0f} tok/s | "
            f"{left_s // 60}m{left_s % 60:02d}s left",
            flush=True,
        )

    def sync(self, method):
        """A sync that has finished since the last call, if any."""
        row = method.stats() if self.file else None
        if row is None:
            return
        self.write("sync", **row)
        norms, weights, steps = row["pseudo_grad_norm"], row["weight"], row["steps"]
        tau = str(steps[0]) if len(set(steps)) == 1 else "/".join(map(str, steps))
        spread = "-"
        if norms:
            spread = f"{sum(norms) / len(norms):.3f} [{min(norms):.3f} .. {max(norms):.3f}]"
        print(
            f"sync {row['round']:04d} | tau {tau} | pseudo-grad {spread} | "
            f"weights [{min(weights):.2f} .. {max(weights):.2f}] | dropped {sum(row['dropped'])} | "
            f"clip {row['clip']:.2f} | {size(row['sync_bytes'])} | stall {row['stall_ms']:.0f} ms "
            f"(others {row['wait_others_ms']:.0f}, link {row['wait_link_ms']:.0f})",
            flush=True,
        )
        for i, layers in enumerate(row["dropped"]):
            if layers:
                print(f"left out replica {i} in {layers} layers: norm {norms[i]:.3g}", flush=True)

    def eval(self, method, val_loss: float, bytes_per_token: float):
        bits = val_loss / math.log(2) / bytes_per_token
        tokens, train_s = self.count_tokens(method.progress), self.clock.train_s()
        if self.file:
            row = {"step": method.steps, "tokens": tokens, "train_s": train_s}
            self.write("eval", **row, val_loss=val_loss, bits_per_byte=bits)
            print(
                f"eval {method.steps:05d} | val loss {val_loss:.4f} nats/token | "
                f"{bits:.3f} bits/byte",
                flush=True,
            )

    def end(self, method, val_loss: float):
        if not self.file:
            return
        train_s, peak = self.clock.train_s(), peak_memory_bytes(self.mesh.device)
        speed = self.count_tokens(method.progress) / max(train_s, 1e-9)
        row = {"step": method.steps, "val_loss": val_loss, "train_s": train_s}
        row |= {"tokens_per_s": speed, "peak_memory_bytes": peak, "exit": "done"}
        self.write("end", **row)
        print(
            f"done | {method.steps} steps in {train_s:.0f} s | {speed:,.0f} tok/s | "
            f"val loss {val_loss:.4f} | peak {size(peak)} on rank 0",
            flush=True,
        )


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
