"""The record of a run: what it prints, and what it writes to OUT_DIR/metrics.jsonl.

Rank 0 writes the rows: one JSON object each, whose first key is `event`.
`step` counts finished inner steps.

    config  all flags, world_size, mesh, micro_steps and micro_batch (of a rank), n_params,
            corpus_hash, torch, device_name
    resume  the same and step: a run continues from a checkpoint here. Rows that were written after
            that checkpoint are removed, so every step is in the file once
    step    step, tokens, loss, lr, grad_norm, step_ms, train_s, tokens_per_s, shard_bytes,
            sync_bytes (sent so far)
    sync    round, step, tau, steps, loss, pseudo_grad_norm, weight, dropped, rolled_back,
            clip, stall_ms, wait_others_ms, wait_link_ms, sync_bytes
    eval    step, tokens, train_s, val_loss, bits_per_byte, sync_bytes; NoLoCo: spread, the root
            mean square distance of the replicas from their mean
    end     step, val_loss, train_s, tokens_per_s, peak_memory_bytes, exit

step.loss is the mean over all ranks if gradients were averaged, else over replica 0: a local step
has no communication between replicas. A sync row has lists with one entry per replica: `loss` (mean
over the round), `steps` (of the round), `pseudo_grad_norm`, `weight`, `dropped` (layers it was left
out of). `rolled_back` has the numbers of the layers in which all replicas were left out. In
methods without a barrier (method.py) the lists have one entry, of replica 0 (in streaming_edit only
`loss` and `steps`). Of stall_ms, wait_others_ms is the host's waiting for other replicas and
wait_link_ms for a simulated link (plumbing/simulate.py); the rest is arithmetic.

timeline-RANK.json, with --timeline: {"replica": ..., "spans": [[name, begin, end], ...]}, seconds
since 1970. Names: step, wait for others, wait for link, link (a transfer on the simulated link).

To profile some steps: `with torch.profiler.profile() as profiler:` around train.main([...]), then
profiler.export_chrome_trace("trace.json"). Layers and collectives have their names in it.

To read a record and to plot it, with pandas and matplotlib:

    rows = pandas.read_json("out/edit/metrics.jsonl", lines=True)
    rows[rows.event == "step"].plot("step", "loss")

Plain version: plain/record.py.
"""

import json
import math
import os
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import torch

from config import NOT_RESUMED
from plumbing.plan import size
from plumbing.posix import MAXRSS_BYTES, resource


class Clock:
    """Seconds of training: without what happens in `with clock:`, evaluation and saving."""

    def __init__(self, device: torch.device):
        self.device = device
        self.started = time.perf_counter()

    def start_at(self, saved: dict):
        """Continue a checkpoint. saved: its state."""
        self.started = time.perf_counter() - saved["train_s"]

    def train_s(self) -> float:
        return time.perf_counter() - self.started

    def __enter__(self):
        if self.device.type == "cuda":  # what is in its queue is training
            torch.cuda.synchronize()
        self.entered = time.perf_counter()

    def __exit__(self, *exception):
        self.started += time.perf_counter() - self.entered


class RoundRecord:
    """What the rows `sync` need to know: method.py and the methods write it, Log reads it."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.spread = None  # distance between replicas at the last evaluation, if they differ
        self.rows = deque()  # that nobody has taken yet
        self.lost_rounds = 0  # in a row, in which EDiT left out all replicas in all layers
        self.start_round()

    def start_round(self):
        """From here on losses, stalls, waits and bytes count for the next row."""
        self.loss_sum = 0.0
        self.fields = {}
        self.stalls = []
        self.waited_before = dict(self.mesh.waited_s)
        self.sent_before = self.mesh.sent["sync"]

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
        mesh = self.mesh
        rows = method.rows
        row = {
            "round": method.rounds,
            "step": method.steps,
            "steps": rows.steps,
            "loss": rows.losses,
            "pseudo_grad_norm": getattr(rows, "norms", None),
            "weight": [1 / mesh.replicas] * len(rows.steps),
            "dropped": [0] * len(rows.steps),
            "rolled_back": [],
            "clip": 1.0,
            **self.fields,
            "stall_ms": self.stalls,
            "sync_bytes": mesh.sent["sync"] - self.sent_before,
        }
        for cause, seconds in mesh.waited_s.items():
            row[f"wait_{cause}_ms"] = 1e3 * (seconds - self.waited_before[cause])
        self.rows.append(row)
        self.start_round()

    def take(self) -> dict | None:
        """The next row, or None. Reads the device. Counts the rounds that were lost."""
        if not self.rows:
            return None
        row = self.rows.popleft()
        for name, value in row.items():
            if isinstance(value, torch.Tensor):
                row[name] = value.tolist()
        row["steps"] = list(map(int, row["steps"]))
        row["rolled_back"] = [l for l, lost in enumerate(row["rolled_back"]) if lost]
        row["tau"] = row["steps"][0]
        row["stall_ms"] = sum(passed_ms(begin, end) for begin, end in row["stall_ms"])
        self.lost_rounds += 1
        if any(row["weight"]):
            self.lost_rounds = 0
        return row


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


NEW_RUN = {"step": 0, "progress": 0, "tokens": 0, "train_s": 0.0}


class Log:
    """Writes the rows, on rank 0, and prints a line for each. It decides nothing."""

    def __init__(self, setup, mesh, clock, step: int):
        """Open the file. The record of the run that this one continues may be its beginning. step:
        of the checkpoint."""
        self.setup = setup
        self.config = setup.config
        self.mesh = mesh
        self.clock = clock
        self.at_start = setup.saved or NEW_RUN  # the state of the checkpoint that is continued
        self.tokens = self.at_start["tokens"]
        self.last = self.at_start  # the last row `step`
        # Rounds in a row in which most layers left a replica out, of each replica.
        self.sick_rounds = [0] * mesh.replicas
        self.told_sick = False

        path = Path(self.config.out_dir, "metrics.jsonl")
        continues = setup.saved and setup.path.parent.samefile(path.parent)
        if mesh.rank != 0:
            path = Path(os.devnull)
            continues = False
        elif not continues or path.is_symlink() or not path.is_file():
            path.unlink(missing_ok=True)  # nothing is written through a link or into a pipe
        self.file = open(path, "a" if continues else "w", buffering=1)  # whole lines
        if continues:
            self.file.truncate(min(self.file.tell(), setup.saved["metrics_bytes"]))
        description = setup.describe(mesh)
        if self.file.tell() == 0:
            self.write("config", description)
        if setup.saved:
            self.write("resume", {"step": step} | description)
            self.print_resume(step, description)
        if setup.source:
            print("init   ", setup.source.path, setup.source.notes)

    def print_resume(self, step: int, now: dict):
        """The checkpoint's mesh, and the given flags that change. now: what setup.describe() says
        of this start."""
        saved = self.setup.saved["flags"]
        mesh = "{replicas} replicas x {shards} shards".format(**saved["mesh"])
        line = f"resume  {self.setup.path}: step {step}, {mesh}"
        for name in sorted(self.setup.given.keys() - NOT_RESUMED):
            was = saved.get(name)
            if was != now.get(name):
                line += f"; --{name} {was} -> {now.get(name)}"
        print(line)

    def write(self, event: str, row: dict):
        row = json.loads(json.dumps(row), parse_constant=lambda name: None)  # JSON has no NaN
        try:
            self.file.write(json.dumps({"event": event} | row) + "\n")
        except OSError as error:  # a failed write does not say of which file
            error.filename = self.file.name
            raise

    def saved(self, path, seconds: float):
        print(f"saved   {path} in {seconds:.2f} s")

    def now(self, method) -> dict:
        """tokens: that all ranks have trained on. A-EDiT extrapolates its progress between syncs;
        the count never falls."""
        passed = method.progress - self.at_start["progress"]
        tokens = self.at_start["tokens"] + passed * self.setup.plan.tokens_per_step
        self.tokens = max(self.tokens, round(tokens))
        return {"step": method.steps, "tokens": self.tokens, "train_s": self.clock.train_s()}

    def state(self, method) -> dict:
        """What a checkpoint must know to continue this file."""
        return self.now(method) | {"metrics_bytes": self.file.tell()}

    def step(self, method, lr: float, metrics):
        """metrics: shard.Metrics. Reading them waits for the step."""
        step = method.steps
        max_steps = self.config.max_steps
        due = step % self.config.log_interval == 0 or step in (1, max_steps)
        if self.mesh.rank != 0 or not due:
            return

        grad_norm, loss, _ = metrics.read()
        last = self.last
        row = self.last = self.now(method)
        seconds = row["train_s"] - last["train_s"]
        step_s = seconds / (step - last["step"])
        tokens_per_s = (row["tokens"] - last["tokens"]) / seconds
        row |= {"loss": loss, "lr": lr, "grad_norm": grad_norm, "step_ms": 1e3 * step_s}
        row["tokens_per_s"] = tokens_per_s
        for group, count in self.mesh.sent.items():
            row[f"{group}_bytes"] = round(count)
        self.write("step", row)

        minutes, seconds = divmod(round((max_steps - method.progress) * step_s), 60)
        print(
            f"step {step:05d}/{max_steps:05d} | loss {loss:.4f} | lr {lr:.1e} | "
            f"gnorm {grad_norm:.2f} | {1e3 * step_s:.0f} ms | {tokens_per_s:,.0f} tok/s | "
            f"{minutes}m{seconds:02d}s left"
        )

    def sync(self, row: dict):
        """row: of RoundRecord.take()."""
        self.write("sync", row)
        norms = "-"
        if found := row["pseudo_grad_norm"]:
            norms = f"{sum(found) / len(found):.3f} [{min(found):.3f} .. {max(found):.3f}]"
        weights = f"[{min(row['weight']):.2f} .. {max(row['weight']):.2f}]"
        dropped = counts(row["dropped"])
        if lost := row["rolled_back"]:
            dropped += f" (rolled back: layer {', '.join(map(str, lost))})"
        print(
            f"sync {row['round']:04d} | tau {counts(row['steps'])} | pseudo-grad {norms} | "
            f"weights {weights} | dropped {dropped} | clip {row['clip']:.2f} | "
            f"{size(row['sync_bytes'])} | stall {row['stall_ms']:.0f} ms "
            f"(others {row['wait_others_ms']:.0f}, link {row['wait_link_ms']:.0f})"
        )
        self.note_sick(row["dropped"])

    def note_sick(self, dropped: list):
        """Say once that a replica is sick. dropped: layers that have left it out, per replica."""
        layers = self.config.n_layer + 2
        for replica, count in enumerate(dropped):
            self.sick_rounds[replica] += 1
            if count <= layers / 2:
                self.sick_rounds[replica] = 0
            if self.sick_rounds[replica] == 3 and not self.told_sick:
                self.told_sick = True
                print(
                    f"note    most layers have left out replica {replica} in 3 syncs in a row: its "
                    "steps count for nothing. Look at its data, its --lr, its machine"
                )

    def eval(self, method, val_loss: float):
        bits = val_loss / math.log(2) / self.setup.corpus.bytes_per_token  # of token files: NaN
        row = self.now(method) | {"val_loss": val_loss, "bits_per_byte": bits}
        row["sync_bytes"] = round(self.mesh.sent["sync"])
        if method.record.spread is not None:
            row["spread"] = method.record.spread
        self.write("eval", row)
        line = f"eval {row['step']:05d} | val loss {val_loss:.4f} nats/token"
        if not math.isnan(bits):
            line += f" | {bits:.3f} bits/byte"
        print(line)

    def end(self, method, val_loss: float):
        if self.config.timeline:
            self.write_timeline()
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES
        if self.mesh.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated()
        row = self.now(method)
        row["tokens_per_s"] = row.pop("tokens") / row["train_s"]
        row |= {"val_loss": val_loss, "peak_memory_bytes": peak_bytes, "exit": "done"}
        self.write("end", row)
        print(
            f"done | {row['step']} steps in {row['train_s']:.0f} s | "
            f"{row['tokens_per_s']:,.0f} tok/s | val loss {val_loss:.4f} | "
            f"peak {size(peak_bytes)} on rank 0"
        )

    def write_timeline(self):
        zero = time.time() - time.perf_counter()  # one scale for all machines
        spans = [(name, begin + zero, end + zero) for name, begin, end in self.mesh.spans]
        path = Path(self.config.out_dir, f"timeline-{self.mesh.rank}.json")
        path.unlink(missing_ok=True)  # nothing is written through a link
        path.write_text(json.dumps({"replica": self.mesh.replica, "spans": spans}))


def counts(found: list) -> str:
    """The counts of all replicas; one number if they are equal."""
    if len(set(found)) == 1:
        return str(found[0])
    return "/".join(map(str, found))
