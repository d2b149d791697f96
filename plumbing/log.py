"""The record of a run: what it prints, and what it writes to OUT_DIR/metrics.jsonl.

Rank 0 writes one JSON object per row; its first key is `event`. `step` counts finished inner steps.

    config  all flags, world_size, mesh, micro_steps and micro_batch (of a rank), n_params,
            corpus_hash, torch, device_name
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
import os
import resource
import sys
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import torch

from mesh import Handle
from plumbing.config import NOT_RESUMED, UserError
from plumbing.plan import size

LOST_ROUNDS = 3


class Clock:
    """Seconds of training. `with clock:` stops it during evaluation and saving."""

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


class RoundRecord:
    """What the rows `sync` need to know: method.py and the methods write it, Log reads it."""

    def __init__(self, mesh, clock):
        self.mesh, self.clock, self.gather = mesh, clock, Handle()
        self.spread = None  # distance between replicas at the last evaluation, if they differ
        # Rows that the log has not written yet, each with its exchange. Only rank 0 writes. The
        # other ranks keep the last row, for wait().
        self.rows = deque(maxlen=None if mesh.rank == 0 else 1)
        self.start_round()

    def start_round(self):
        """From here on losses, stalls, waits and bytes count for the next row."""
        self.loss_sum, self.fields, self.stalls = 0.0, {}, []
        self.waited_before, self.sent_before = dict(self.mesh.waited_s), self.mesh.sent["sync"]

    @contextmanager
    def stall(self):
        """The device's time in this context is a stall of the training."""
        begin = time_mark(self.mesh.device)
        yield
        self.stalls.append((begin, time_mark(self.mesh.device)))

    def describe(self, **fields):
        """Fields of the row about replicas, in place of the defaults in done()."""
        self.fields = fields

    def done(self, method):
        """A sync of the method is complete. Reads nothing from the device."""
        all_, M = method.exchanged, self.mesh.replicas
        row = {"round": method.rounds, "step": method.steps, "tau": all_.steps[self.mesh.replica]}
        row |= {"steps": all_.steps, "loss": all_.losses}
        row |= {"pseudo_grad_norm": getattr(all_, "norms", None)}
        row |= {"weight": [1 / M] * M, "dropped": [0] * M, "clip": 1.0} | self.fields
        row["stall_ms"] = self.stalls
        for cause, seconds in self.mesh.waited_s.items():
            row[f"wait_{cause}_ms"] = 1e3 * (seconds - self.waited_before[cause])
        row["sync_bytes"] = self.mesh.sent["sync"] - self.sent_before
        self.rows.append((row, self.gather))
        self.start_round()

    def take(self) -> dict | None:
        """The next row whose exchange has arrived, or None. Reads the device."""
        if not self.rows or not self.rows[0][1].is_completed():
            return None
        row, gather = self.rows.popleft()
        gather.wait()  # raises an error if another rank was lost
        row = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in row.items()}
        row |= {"tau": int(row["tau"]), "steps": [int(steps) for steps in row["steps"]]}
        return row | {"stall_ms": sum(passed_ms(*marks) for marks in row["stall_ms"])}

    def wait(self):
        """Wait for the exchanges in flight."""
        for _, gather in self.rows:
            gather.wait()


def time_mark(device: torch.device):
    """Now: seconds, or on CUDA, where the host only queues work, an event in the stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def passed_ms(begin, end) -> float:
    """Between two time marks. Waits for the second one, not for the whole device."""
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)


LINES = {  # what is printed of a row
    "step": "step {step:05d}/{max_steps:05d} | loss {loss:.4f} | lr {lr:.1e} | "
    "gnorm {grad_norm:.2f} | {step_ms:.0f} ms | {tokens_per_s:,.0f} tok/s | "
    "{minutes}m{seconds:02d}s left",
    "sync": "sync {round:04d} | tau {steps} | pseudo-grad {norms} | weights {weights} | "
    "dropped {dropped} | clip {clip:.2f} | {sent} | stall {stall_ms:.0f} ms "
    "(others {wait_others_ms:.0f}, link {wait_link_ms:.0f})",
    "eval": "eval {step:05d} | val loss {val_loss:.4f} nats/token{more}",
    "end": "done | {step} steps in {train_s:.0f} s | {tokens_per_s:,.0f} tok/s | "
    "val loss {val_loss:.4f} | peak {peak} on rank 0",
}


class Log:
    """Rank 0 prints and writes; on other ranks it only counts."""

    def __init__(self, setup, mesh, clock):
        self.setup, self.config, self.mesh, self.clock = setup, setup.config, mesh, clock
        self.path = Path(self.config.out_dir, "metrics.jsonl")
        self.record, self.file, self.tracer = RoundRecord(mesh, clock), None, None
        self.lost_rounds = 0  # in a row, in which EDiT left out all replicas in all layers
        saved = setup.saved or {"tokens": 0, "progress": 0, "evaluated_at": 0, "train_s": 0.0}
        self.tokens = self.first_tokens = saved["tokens"]
        self.saved_at = self.first_progress = saved["progress"]
        self.evaluated_at = saved["evaluated_at"]  # progress
        self.last = {"step": 0, "tokens": self.tokens, "train_s": saved["train_s"]}  # step row

    def start(self, method):
        """Open the file. The record of the run that this one continues may be its beginning."""
        setup, saved, self.last["step"] = self.setup, self.setup.saved, method.steps
        if self.config.profile:
            steps = int(self.config.max_steps - method.progress)
            self.tracer = start_tracing(self.config.out_dir, self.mesh.rank, steps)
        if self.mesh.rank != 0:
            return
        same_file = bool(saved) and setup.path.parent.resolve() == self.path.parent.resolve()
        self.file = open(self.path, "a" if same_file else "w", buffering=1)  # whole lines
        if same_file and self.file.tell() > saved["metrics_bytes"]:
            self.file.truncate(saved["metrics_bytes"])
        description = setup.describe(self.mesh)
        if self.file.tell() == 0:
            self.write("config", description)
        if saved:
            self.write("resume", {"step": method.steps} | description)
            print(resume_line(setup, method.steps, description), flush=True)
        if setup.source:
            print("; ".join(filter(None, [f"init    {setup.source.path}", setup.source.notes])))

    def write(self, event: str, row: dict, **printed):
        """Write a row and print its line. printed: what the line has beside the row."""
        finite_row = {name: finite(value) for name, value in row.items()}  # JSON has no NaN
        try:
            self.file.write(json.dumps({"event": event} | finite_row) + "\n")
        except OSError as error:
            raise UserError(f"{self.path} could not be written: {error.strerror}") from None
        if event in LINES:
            print(LINES[event].format(**row | printed), flush=True)

    def saved(self, method, path, seconds: float):
        self.saved_at = method.progress
        if self.file:
            count = sum(file.stat().st_size for file in path.iterdir())
            print(f"saved   {path}: {size(count)} in {seconds:.2f} s", flush=True)

    def now(self, method) -> dict:
        """tokens: that all ranks have trained on. A-EDiT extrapolates its progress between syncs;
        the count never falls."""
        passed = (method.progress - self.first_progress) * self.setup.plan.tokens_per_step
        self.tokens = max(self.tokens, round(self.first_tokens + passed))
        return {"step": method.steps, "tokens": self.tokens, "train_s": self.clock.train_s()}

    def state(self, method) -> dict:
        """What a checkpoint must know to continue this record."""
        self.write_syncs()
        return self.now(method) | {
            "progress": method.progress, "evaluated_at": self.evaluated_at,
            "tokens_per_step": self.setup.plan.tokens_per_step, "sent": dict(self.mesh.sent),
            "metrics_bytes": self.path.stat().st_size if self.file else 0,
        }  # fmt: skip

    def step(self, method, lr: float, metrics):
        """metrics: shard.Metrics. Reading them waits for the step."""
        self.write_syncs()
        if self.tracer:
            self.tracer.step()
        step, max_steps = method.steps, self.config.max_steps
        due = step % self.config.log_interval == 0 or step in (1, max_steps)
        if due and self.file:
            self._step_row(method, lr, metrics)
        if step == getattr(self.config, "sync_warmup_steps", 0) < max_steps and self.file:
            print(f"warm-up ends after step {step}: {self.config.method} begins", flush=True)

    def _step_row(self, method, lr, metrics):
        grad_norm, loss, _ = metrics.read()
        now = self.now(method)
        passed = {name: now[name] - self.last[name] for name in now}
        self.last, seconds = now, max(passed["train_s"], 1e-9)
        row = now | {"loss": loss, "lr": lr, "grad_norm": grad_norm}
        row["step_ms"] = 1e3 * seconds / max(passed["step"], 1)
        row["tokens_per_s"] = speed = passed["tokens"] / seconds
        row |= {f"{group}_bytes": round(count) for group, count in self.mesh.sent.items()}
        max_steps = self.config.max_steps
        left = (max_steps - method.progress) * self.setup.plan.tokens_per_step
        minutes, seconds = divmod(round(left / speed) if speed else 0, 60)
        self.write("step", row, max_steps=max_steps, minutes=minutes, seconds=seconds)

    def write_syncs(self):
        """The rows of the syncs that have been completed since the last call."""
        while self.file and (row := self.record.take()):
            norms, weights, steps = row["pseudo_grad_norm"], row["weight"], row["steps"]
            taus = steps[:1] if len(set(steps)) == 1 else steps
            bounds = lambda x, digits: f"[{min(x):.{digits}f} .. {max(x):.{digits}f}]"
            spread = f"{sum(norms) / len(norms):.3f} {bounds(norms, 3)}" if norms else "-"
            printed = {"steps": "/".join(map(str, taus)), "norms": spread}
            printed |= {"weights": bounds(weights, 2), "dropped": sum(row["dropped"])}
            self.write("sync", row, **printed, sent=size(row["sync_bytes"]))
            self.lost_rounds = 0 if any(weights) else self.lost_rounds + 1
            if self.lost_rounds == LOST_ROUNDS:
                raise UserError(
                    f"all replicas were left out of the last {LOST_ROUNDS} syncs, so training "
                    "makes no progress: lower --lr, or raise --anomaly_threshold"
                )
            for i, layers in enumerate(row["dropped"]):
                if layers:
                    line = f"left out replica {i} in {layers} layers: norm {norms[i]:.3g}"
                    print(line, flush=True)

    def eval(self, method, val_loss: float):
        self.evaluated_at, spread = method.progress, self.record.spread
        self.write_syncs()
        if self.file:
            bits = val_loss / math.log(2) / self.setup.corpus.bytes_per_token
            row = self.now(method) | {"val_loss": val_loss, "bits_per_byte": bits}
            row |= {"sync_bytes": round(self.mesh.sent["sync"])}
            row |= {} if spread is None else {"spread": spread}
            more = f" | {bits:.3f} bits/byte" if math.isfinite(bits) else ""  # not of token files
            self.write("eval", row, more=more + (f" | spread {spread:.3g}" if spread else ""))

    def write_timeline(self):
        """Spans of this rank in seconds since 1970: the names are "step", "wait for others", "wait
        for link" and "link" (a transfer on the simulated link)."""
        at = time.time() - time.perf_counter()
        spans = [(name, begin + at, end + at) for name, begin, end in self.mesh.spans]
        path = Path(self.config.out_dir, f"timeline-{self.mesh.rank}.json")
        path.write_text(json.dumps({"replica": self.mesh.replica, "spans": spans}))

    def end(self, method, val_loss: float):
        if self.tracer:
            self.tracer.stop()
        if self.mesh.spans:
            self.write_timeline()
        if self.file:
            now, peak = self.now(method), peak_memory_bytes(self.mesh.device)
            row = {"step": method.steps, "val_loss": val_loss, "train_s": now["train_s"]}
            row |= {"tokens_per_s": now["tokens"] / max(now["train_s"], 1e-9)}
            row |= {"peak_memory_bytes": peak, "exit": "done"}
            self.write("end", row, peak=size(peak))


def resume_line(setup, step: int, now: dict) -> str:
    """now: what the record says of this run. Names the flags that were given and differ."""
    was, differ = setup.saved["flags"], []
    for name in setup.given:
        if name not in NOT_RESUMED and was.get(name) != now.get(name):
            differ.append(f"--{name} {was.get(name)} -> {now.get(name)}")
    mesh = "{replicas} replicas x {shards} shards".format(**setup.saved["mesh"])
    if setup.saved["mesh"] != now["mesh"]:
        mesh += " -> {replicas} x {shards}".format(**now["mesh"])
    return "; ".join([f"resume  {setup.path}: step {step}, {mesh}", *differ])


def start_tracing(out_dir, rank: int, steps: int):
    """torch's profiler: three of the next `steps` steps go to a file, not the first ones."""
    first = min(4, steps - 4)
    steps = torch.profiler.schedule(wait=first, warmup=1, active=3, repeat=1)
    path = Path(out_dir, f"trace-{rank}.json")

    def write(tracer):
        tracer.export_chrome_trace(str(path))
        print(f"profile {path}: open it in chrome://tracing or ui.perfetto.dev", flush=True)

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would report its own starts and stops
    tracer = torch.profiler.profile(schedule=steps, on_trace_ready=write)
    tracer.start()
    return tracer


def finite(value):
    """null in place of what is not finite."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    scale = 1 if sys.platform == "darwin" else 1024  # Linux counts KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
