"""The record of a run: what it prints, and what it writes to OUT_DIR/metrics.jsonl.

All ranks make the rows, rank 0 writes them: one JSON object each, whose first key is `event`.
`step` counts finished inner steps.

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
simulated link (plumbing/simulate.py); the rest is arithmetic.
"""

import json
import math
import os
import resource
import time
from collections import Counter, deque
from contextlib import contextmanager
from pathlib import Path

import torch

from config import NOT_RESUMED
from mesh import Handle
from plumbing.plan import size


class Clock:
    """Seconds of training: without what happens in `with clock:`, evaluation and saving."""

    def __init__(self, device: torch.device):
        self.device, self.started = device, time.perf_counter()

    def start_at(self, saved: dict):
        """Continue a checkpoint. saved: its state.json."""
        self.started = time.perf_counter() - saved["train_s"]

    def train_s(self) -> float:
        return time.perf_counter() - self.started

    def __enter__(self):
        self.entered = self._when_idle()

    def __exit__(self, *exception):
        self.started += self._when_idle() - self.entered

    def _when_idle(self) -> float:
        """Now, when a GPU has done what is in its queue."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class RoundRecord:
    """What the rows `sync` need to know: method.py and the methods write it, Log reads it."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.spread = None  # distance between replicas at the last evaluation, if they differ
        self.rows = deque()  # that nobody has taken yet, each with its exchange
        self.lost_rounds = 0  # in a row, in which EDiT left out all replicas in all layers
        self.start_round()

    def start_round(self):
        """From here on losses, stalls, waits and bytes count for the next row."""
        self.loss_sum, self.fields, self.stalls = 0.0, {}, []
        self.gather = Handle()  # of the round's exchange, if it is still in flight
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
        mesh, all_, M = self.mesh, method.exchanged, self.mesh.replicas
        row = {
            "round": method.rounds, "step": method.steps, "tau": all_.steps[mesh.replica],
            "steps": all_.steps, "loss": all_.losses,
            "pseudo_grad_norm": getattr(all_, "norms", None),
            "weight": [1 / M] * M, "dropped": [0] * M, "clip": 1.0, **self.fields,
            "stall_ms": self.stalls,
        }  # fmt: skip
        for cause, seconds in mesh.waited_s.items():
            row[f"wait_{cause}_ms"] = 1e3 * (seconds - self.waited_before[cause])
        row["sync_bytes"] = mesh.sent["sync"] - self.sent_before
        self.rows.append((row, self.gather))
        self.start_round()

    def take(self) -> dict | None:
        """The next row whose exchange has arrived, or None. Reads the device. Counts the rounds
        that were lost."""
        if not self.rows or not self.rows[0][1].is_completed():
            return None
        row, gather = self.rows.popleft()
        gather.wait()  # raises an error if another rank was lost
        row = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in row.items()}
        row |= {"tau": int(row["tau"]), "steps": [int(steps) for steps in row["steps"]]}
        self.lost_rounds = 0 if any(row["weight"]) else self.lost_rounds + 1
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
    "resume": "resume  {path}: step {step}, {replicas} replicas x {shards} shards{differ}",
    "step": "step {step:05d}/{max_steps:05d} | loss {loss:.4f} | lr {lr:.1e} | "
    "gnorm {grad_norm:.2f} | {step_ms:.0f} ms | {tokens_per_s:,.0f} tok/s | "
    "{minutes}m{seconds:02d}s left",
    "sync": "sync {round:04d} | tau {taus} | pseudo-grad {norms} | weights {weights} | "
    "dropped {left_out} | clip {clip:.2f} | {sent} | stall {stall_ms:.0f} ms "
    "(others {wait_others_ms:.0f}, link {wait_link_ms:.0f})",
    "eval": "eval {step:05d} | val loss {val_loss:.4f} nats/token{more}",
    "end": "done | {step} steps in {train_s:.0f} s | {tokens_per_s:,.0f} tok/s | "
    "val loss {val_loss:.4f} | peak {peak} on rank 0",
}


class Log:
    def __init__(self, setup, mesh, clock):
        self.setup, self.config, self.mesh, self.clock = setup, setup.config, mesh, clock
        self.path, self.file = Path(self.config.out_dir, "metrics.jsonl"), None
        self.tracer = None
        self.first = self.last = setup.saved or Counter()  # of zeros; last: step row
        self.tokens = self.first["tokens"]

    def start(self, method):
        """Open the file. The record of the run that this one continues may be its beginning."""
        setup, saved = self.setup, self.setup.saved
        if self.config.profile:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would report its starts and stops
            trace = Path(self.config.out_dir, f"trace-{self.mesh.rank}.json")
            self.tracer = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1),
                on_trace_ready=lambda tracer: tracer.export_chrome_trace(str(trace)),
            )
            self.tracer.start()
            print(f"profile {trace}: steps 2 to 4; open it in chrome://tracing or ui.perfetto.dev")
        if self.mesh.rank != 0:
            return
        same_file = saved and setup.path.parent.resolve() == self.path.parent.resolve()
        self.file = open(self.path, "a" if same_file else "w", buffering=1)  # whole lines
        self.file.truncate(min(self.file.tell(), self.first["metrics_bytes"]))
        description = setup.describe(self.mesh)
        if self.file.tell() == 0:
            self.write("config", description)
        if saved:
            differ, mesh = "", description["mesh"]
            if saved["mesh"] != mesh:
                differ = " -> {replicas} x {shards}".format(**mesh)
            for name in setup.given:
                was, now = saved["flags"].get(name), description.get(name)
                if was != now and name not in NOT_RESUMED:
                    differ += f"; --{name} {was} -> {now}"
            row = {"step": method.steps} | description
            self.write("resume", row, path=setup.path, **saved["mesh"], differ=differ)
        if setup.source:
            print("init   ", setup.source.path, setup.source.notes)

    def write(self, event: str, row: dict, **printed):
        """Write a row and print its line. printed: what the line has beside the row."""
        if event in LINES:
            print(LINES[event].format(**row | printed), flush=True)
        row = json.loads(json.dumps(row), parse_constant=lambda name: None)  # JSON has no NaN
        if not self.file:
            return
        try:
            self.file.write(json.dumps({"event": event} | row) + "\n")
        except OSError as error:  # a failed write does not say of which file
            error.filename = self.path
            raise

    def saved(self, path, seconds: float):
        count = sum(file.stat().st_size for file in path.iterdir()) if self.file else 0
        print(f"saved   {path}: {size(count)} in {seconds:.2f} s", flush=True)

    def now(self, method) -> dict:
        """tokens: that all ranks have trained on. A-EDiT extrapolates its progress between syncs;
        the count never falls."""
        passed = (method.progress - self.first["progress"]) * self.setup.plan.tokens_per_step
        self.tokens = max(self.tokens, round(self.first["tokens"] + passed))
        return {"step": method.steps, "tokens": self.tokens, "train_s": self.clock.train_s()}

    def state(self, method) -> dict:
        """What a checkpoint must know to continue this file."""
        length = self.path.stat().st_size if self.file else 0
        return self.now(method) | {"metrics_bytes": length}

    def step(self, method, lr: float, metrics):
        """metrics: shard.Metrics. Reading them waits for the step."""
        if self.tracer:
            self.tracer.step()
        step, max_steps = method.steps, self.config.max_steps
        if step % self.config.log_interval == 0 or step in (1, max_steps):
            self._step_row(method, lr, metrics)
        if step == getattr(self.config, "sync_warmup_steps", 0) < max_steps:
            print(f"warm-up ends after step {step}: {self.config.method} begins", flush=True)

    def _step_row(self, method, lr, metrics):
        step, max_steps = method.steps, self.config.max_steps
        grad_norm, loss, _ = metrics.read()
        now, last = self.now(method), self.last
        self.last, train_s = now, max(now["train_s"] - last["train_s"], 1e-9)
        row = now | {"loss": loss, "lr": lr, "grad_norm": grad_norm}
        row["step_ms"] = 1e3 * train_s / max(step - last["step"], 1)
        row["tokens_per_s"] = speed = (now["tokens"] - last["tokens"]) / train_s
        row |= {f"{group}_bytes": round(count) for group, count in self.mesh.sent.items()}
        left = (max_steps - method.progress) * self.setup.plan.tokens_per_step
        minutes, seconds = divmod(round(left / speed) if speed else 0, 60)
        self.write("step", row, max_steps=max_steps, minutes=minutes, seconds=seconds)

    def sync(self, row: dict):
        """row: of RoundRecord.take()."""
        each = lambda counts: "/".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
        bounds = lambda x, digits: f"[{min(x):.{digits}f} .. {max(x):.{digits}f}]"
        norms, weights = row["pseudo_grad_norm"], row["weight"]
        about = f"{sum(norms) / len(norms):.3f} {bounds(norms, 3)}" if norms else "-"
        printed = {"taus": each(row["steps"]), "norms": about, "weights": bounds(weights, 2)}
        printed |= {"left_out": each(row["dropped"]), "sent": size(row["sync_bytes"])}
        self.write("sync", row, **printed)

    def eval(self, method, val_loss: float):
        spread = method.record.spread
        bits = val_loss / math.log(2) / self.setup.corpus.bytes_per_token
        row = self.now(method) | {"val_loss": val_loss, "bits_per_byte": bits}
        row["sync_bytes"] = round(self.mesh.sent["sync"])
        more = f" | {bits:.3f} bits/byte" if math.isfinite(bits) else ""  # not of token files
        if spread is not None:
            row["spread"], more = spread, f"{more} | spread {spread:.3g}"
        self.write("eval", row, more=more)

    def end(self, method, val_loss: float):
        if self.mesh.spans:
            # "step", "wait for others", "wait for link", "link" (a transfer on the simulated link)
            zero = time.time() - time.perf_counter()  # in seconds since 1970
            spans = [(name, begin + zero, end + zero) for name, begin, end in self.mesh.spans]
            path = Path(self.config.out_dir, f"timeline-{self.mesh.rank}.json")
            path.write_text(json.dumps({"replica": self.mesh.replica, "spans": spans}))
        peak, now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self.now(method)
        if self.mesh.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        row = {"step": method.steps, "val_loss": val_loss, "train_s": now["train_s"]}
        row |= {"tokens_per_s": now["tokens"] / max(now["train_s"], 1e-9)}
        self.write("end", row | {"peak_memory_bytes": peak, "exit": "done"}, peak=size(peak))
