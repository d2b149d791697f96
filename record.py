"""The record of a run: what it prints and what stands in out_dir/metrics.jsonl.

Rank 0 writes one JSON object a row and flushes it; the first key is `event`. A `step` counts the
inner steps that are done.

    config  every resolved flag, world_size, mesh, n_params, corpus_hash, torch, device_name
    resume  the same and step: where a run goes on from a checkpoint. What was written after that
            is cut off, so that every step stands in the file once
    step    step, tokens, loss, lr, grad_norm, step_ms, train_s, tokens_per_s, shard_bytes,
            sync_bytes
    sync    round, step, tau, steps, pseudo_grad_norm, weight, dropped, clip, stall_ms,
            wait_others_ms, wait_link_ms, sync_bytes
    eval    step, tokens, train_s, val_loss, bits_per_byte
    end     step, val_loss, train_s, tokens_per_s, peak_memory_bytes, exit

`steps` lists each replica's inner steps in the round. Of the stall, wait_others_ms is the host's
waiting for the other replicas and wait_link_ms that for a simulated link (simulate.py); the rest is
arithmetic.

`loss` is the mean over all ranks. Between syncs replicas run freely, and a collective for the log
would chain them together in every logged step. So each replica leaves its loss in torchrun's
key-value store, and rank 0 writes the row as soon as all have: no collective, nobody waits.
"""

import dataclasses
import json
import math
import os
import resource
import sys
import time
from collections import deque
from contextlib import contextmanager

import torch

from flags import UserError
from plan import size


class Clock:
    """Seconds of training. `with clock:` stops it, for what is not training (evaluation,
    saving)."""

    def __init__(self, device: torch.device):
        self.device, self.paused_s, self.stopped_at = device, 0.0, None
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


class Record:
    """Rank 0 prints and writes; the other replicas contribute their losses through the store."""

    def __init__(self, path, config, mesh, store, clock, lockstep: bool):
        self.path, self.config, self.mesh, self.store = path, config, mesh, store
        rows = mesh.world_size * config.accum * config.batch_size
        self.tokens_per_step = rows * config.block_size
        self.file = None
        self.lockstep = lockstep
        self.pending = deque()  # step rows that wait for other replicas' losses
        self.clock = clock
        self.last_step, self.last_position, self.last_s = 0, 0, 0.0
        self.first_position, self.first_tokens = 0, 0  # where this process began

    def write(self, event: str, **row):
        if self.file:
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

    def start(self, method_config, simulation, model, corpus, saved, same_file: bool, position):
        """Open the file. saved: the state.json of the checkpoint that the run goes on from, or
        None; same_file: its record is the file's beginning; position: where the training is now."""
        mesh = self.mesh
        if mesh.rank == 0:
            with self.writable():
                self.file = open(self.path, "a" if same_file else "w")
                if same_file and self.file.tell() > saved["metrics_bytes"]:
                    self.file.truncate(saved["metrics_bytes"])
                    self.file.seek(0, os.SEEK_END)
        if saved:
            # a round that was ended for another mesh was trained on the old one
            passed = (position - saved["position"]) * saved["tokens_per_step"]
            self.first_position, self.first_tokens = position, saved["tokens"] + round(passed)
            self.last_step, self.last_position = saved["replicas"][0]["step"], position
            self.last_s = saved["train_s"]
            mesh.sent.update(saved["sent"])
        if not same_file:
            self.describe("config", {}, method_config, simulation, model, corpus)
        if saved:
            self.describe(
                "resume", {"step": self.last_step}, method_config, simulation, model, corpus
            )

    def describe(self, event, first, method_config, simulation, model, corpus):
        mesh = self.mesh
        self.write(
            event,
            **first,
            **dataclasses.asdict(self.config),
            **dataclasses.asdict(method_config),
            **dataclasses.asdict(simulation),
            world_size=mesh.world_size,
            mesh={"replicas": mesh.replicas, "shards": mesh.shards},
            n_params=model.n_params,
            corpus_hash=corpus.hash,
            torch=torch.__version__,
            device_name=torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
        )

    def resumed(self, path, saved: dict, method):
        was, now = saved["mesh"], self.mesh
        line = f"resume  {path}: step {self.last_step}, "
        line += f"{was['replicas']} replicas x {was['shards']} shards"
        if (was["replicas"], was["shards"]) != (now.replicas, now.shards):
            line += f" -> {now.replicas} x {now.shards}"
        if self.file:
            print(line, flush=True)
        self.sync(method)  # the one that changing the number of replicas may have taken

    def saved(self, path, seconds: float):
        if self.file:
            count = sum(file.stat().st_size for file in path.iterdir())
            print(f"saved   {path}: {size(count)} in {seconds:.2f} s", flush=True)

    def tokens(self, position: float) -> int:
        """Tokens that all ranks together have trained on."""
        return self.first_tokens + round((position - self.first_position) * self.tokens_per_step)

    def state(self, position: float) -> dict:
        """What a checkpoint has to know to go on with this record; all rows so far are written.
        The other replicas have left their losses already."""
        metrics_bytes = 0
        if self.file:
            self.flush_steps(wait=True)
            with self.writable():
                os.fsync(self.file.fileno())
                metrics_bytes = self.file.tell()
        return {
            "position": position,
            "tokens": self.tokens(position),
            "tokens_per_step": self.tokens_per_step,
            "train_s": self.clock.train_s(),
            "sent": dict(self.mesh.sent),
            "metrics_bytes": metrics_bytes,
        }

    def step(self, step: int, position: float, lr: float, shared):
        """This replica has done `step` steps, all replicas together what is
        worth `position` of all ranks'. shared: [gradient norm, loss, ...],
        on its way to the host, equal in a shard group. All ranks call it."""
        due = step % self.config.log_interval == 0 or step in (1, self.config.max_steps)
        if not due or self.mesh.shard_index != 0:
            return
        grad_norm, loss = shared.read()[:2]  # host read: waits for the step
        if self.mesh.rank != 0:
            self.store.set(f"loss/{self._shelf(step)}/{self.mesh.replica}", repr(loss))
            return
        train_s, tokens = self.clock.train_s(), self.tokens(position)
        passed_s, steps = train_s - self.last_s, step - self.last_step
        speed = (tokens - self.tokens(self.last_position)) / passed_s
        self.last_step, self.last_position, self.last_s = step, position, train_s
        row = dict(step=step, tokens=tokens, loss=loss, lr=lr, grad_norm=grad_norm)
        row |= dict(step_ms=1e3 * passed_s / steps, train_s=train_s, tokens_per_s=speed)
        row |= {f"{group}_bytes": round(count) for group, count in self.mesh.sent.items()}
        self.pending.append(row)
        self.flush_steps(wait=False)

    def _shelf(self, step):
        """Where the losses of one row are.
        Without lockstep there is no common step: the latest ones count."""
        return step if self.lockstep else "latest"

    def flush_steps(self, wait: bool):
        """Write the step rows for which all replicas' losses are there (wait: all rows)."""
        while self.pending:
            row = self.pending[0]
            shelf = f"loss/{self._shelf(row['step'])}"
            keys = [f"{shelf}/{replica}" for replica in range(1, self.mesh.replicas)]
            if self.lockstep and keys and not wait and not self.store.check(keys):
                return
            losses = [row["loss"]]
            for key in keys:
                if self.lockstep or self.store.check([key]):
                    losses.append(float(self.store.get(key)))
            for key in keys if self.lockstep else []:
                self.store.delete_key(key)
            row["loss"] = sum(losses) / len(losses)
            self.write("step", **self.pending.popleft())
            self._print_step(row)

    def _print_step(self, row):
        left_s = round((self.tokens(self.config.max_steps) - row["tokens"]) / row["tokens_per_s"])
        print(
            f"step {row['step']:05d}/{self.config.max_steps:05d} | loss {row['loss']:.4f} | "
            f"lr {row['lr']:.1e} | gnorm {row['grad_norm']:.2f} | {row['step_ms']:.0f} ms | "
            f"{row['tokens_per_s']:,.0f} tok/s | {left_s // 60}m{left_s % 60:02d}s left",
            flush=True,
        )

    def sync(self, method):
        """A sync that has finished since the last call, if there was one.
        Only rank 0 reads its figures."""
        row = method.stats() if self.file else None
        if row is None:
            return
        self.flush_steps(wait=False)  # the rows from before the sync are complete by now
        self.write("sync", **row)
        norms, weights, steps = row["pseudo_grad_norm"], row["weight"], row["steps"]
        tau = str(steps[0]) if len(set(steps)) == 1 else "/".join(map(str, steps))
        print(
            f"sync {row['round']:04d} | tau {tau} | "
            f"pseudo-grad {sum(norms) / len(norms):.3f} [{min(norms):.3f} .. {max(norms):.3f}] | "
            f"weights [{min(weights):.2f} .. {max(weights):.2f}] | dropped {sum(row['dropped'])} | "
            f"clip {row['clip']:.2f} | {size(row['sync_bytes'])} | stall {row['stall_ms']:.0f} ms "
            f"(waiting for others {row['wait_others_ms']:.0f}, link {row['wait_link_ms']:.0f})",
            flush=True,
        )
        for i, layers in enumerate(row["dropped"]):
            if layers:
                print(
                    f"left out replica {i} in {layers} layers of sync {row['round']:04d}: "
                    f"norm {norms[i]:.3g}",
                    flush=True,
                )

    def eval(self, step: int, position: float, val_loss: float, bytes_per_token: float):
        bits = val_loss / math.log(2) / bytes_per_token
        train_s, tokens = self.clock.train_s(), self.tokens(position)
        # all replicas have come to the evaluation, and left their losses before
        self.flush_steps(wait=True)
        row = dict(step=step, tokens=tokens, train_s=train_s)
        self.write("eval", **row, val_loss=val_loss, bits_per_byte=bits)
        if self.file:
            print(
                f"eval {step:05d} | val loss {val_loss:.4f} nats/token | {bits:.3f} bits/byte",
                flush=True,
            )

    def end(self, step: int, position: float, val_loss: float):
        if not self.file:
            return
        self.flush_steps(wait=True)
        train_s = self.clock.train_s()
        speed, peak = self.tokens(position) / train_s, peak_memory_bytes(self.mesh.device)
        row = dict(step=step, val_loss=val_loss, train_s=train_s)
        row |= dict(tokens_per_s=speed, peak_memory_bytes=peak)
        self.write("end", **row, exit="done")
        print(
            f"done | {step} steps in {train_s:.0f} s | {speed:,.0f} tok/s | "
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
