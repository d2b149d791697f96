"""What surrounds the steps of a run: batches, the record, evaluation, checkpoints, stopping.

Evaluation, checkpoints and stops happen at round ends only (method.py).
"""

import dataclasses
import math
import os
import signal
import time
from pathlib import Path

import torch

import data
from plumbing import checkpoint, launch
from plumbing.config import UserError
from plumbing.log import Clock, Log
from sample import print_sample
from simulate import Disturbances, SimulatedLink, VirtualClock


class Run:
    """Everything around the steps of one run."""

    def __init__(self, setup, mesh, model, optimizer, method, shutdown):
        self.setup, self.mesh, self.shutdown = setup, mesh, shutdown
        self.config, self.corpus = setup.config, setup.corpus
        self.model, self.optimizer, self.method = model, optimizer, method
        setup.plan.show(setup.corpus)
        print(flush=True)
        self.disturbances = Disturbances(setup.simulation, mesh.replicas, self.config.seed)
        self.clock, self.virtual = Clock(mesh.device), setup.simulation.virtual_clock
        if self.virtual:
            self.clock = VirtualClock(self.disturbances, mesh.replica)
        method.clock = self.clock.train_s
        if setup.simulation.limits_link:
            mesh.simulated_link = SimulatedLink(setup.simulation, mesh.shards, mesh.device)
        path = Path(self.config.out_dir, "metrics.jsonl")
        self.log = Log(path, self.config, mesh, self.clock, setup.plan.tokens_per_step)
        self.evaluated_at = self.saved_at = 0  # progress
        self.resume() if setup.saved else self.log.start(self.describe(), None, False, 0)
        self.stop = launch.StopRequest(shutdown.store, self.config.save_on_exit)
        self.tracer = start_tracing(self.config, mesh.rank) if self.config.profile else None

    # ---- around a step ----

    def load_batch(self, step, micro_step) -> list:
        """This rank's inputs and targets, (batch_size, block_size) int64 each, on its device."""
        config, mesh = self.config, self.mesh
        tensors = data.train_batch(
            self.corpus, config.seed, step, micro_step, mesh.rank, mesh.world_size,
            config.batch_size, config.accum, config.block_size,
        )  # fmt: skip
        vocab_size = self.corpus.vocab_size
        tensors = self.disturbances.batch(tensors, vocab_size, step, micro_step, mesh)
        if mesh.device.type == "cuda":  # pinned, so that the copy does not block the host
            tensors = [tensor.contiguous().pin_memory() for tensor in tensors]
        return [tensor.to(mesh.device, non_blocking=True) for tensor in tensors]

    def before_step(self):
        self.disturbances.scale_lr(self.optimizer, self.method.steps, self.mesh.replica)
        self.disturbances.begin_step(self.mesh)

    def vote(self) -> float:
        """Add the step's simulated delay. Returns 1.0 if the round must end after this step."""
        if self.virtual:
            self.clock.end_step(self.method.steps)
        else:
            self.disturbances.end_step(self.method.steps, self.mesh)
        return max(self.method.vote(), self.stop.vote(self.method))

    def after_step(self, lr, metrics):
        method, config = self.method, self.config
        if self.virtual and method.round_ended:  # each step with averaged gradients is a round
            steps = method.rows[:, 1].tolist() if method.local else [1] * self.mesh.replicas
            self.clock.end_round([int(count) for count in steps])
        self.log.sync(method)
        self.log.step(method, lr, metrics)
        self.check_finite()
        if self.tracer:
            self.tracer.step()
        if not method.round_ended:
            return
        stopping = self.stop.agreed(method)
        if stopping:
            method.align_steps()  # before decisions that all replicas must make alike
        over = method.progress >= config.max_steps
        if is_due(method.progress, self.evaluated_at, config.eval_interval) and not over:
            self.evaluated_at = method.progress
            self.evaluate()
        due = is_due(method.progress, self.saved_at, config.checkpoint_interval)
        if stopping or due or over and config.checkpoint_interval:
            path = self.save()
        if stopping:
            name, step = signal.Signals(stopping).name, method.steps
            line = f"stopped by {name} after step {step}; --resume auto continues from {path}"
            self.shutdown.leave(128 + stopping, line)

    def check_finite(self):
        """Stop if the loss or the norm is not finite, unless the next sync repairs the replica."""
        norm, loss, _ = self.model.known_metrics()
        if math.isfinite(norm + loss) or (self.method.repairs_replicas and self.method.local):
            return
        raise UserError(
            f"diverged at step {self.method.steps - self.model.metrics_lag}: loss {loss:.4g}, "
            f"gradient norm {norm:.4g}; lower --lr, or raise --lr_warmup_steps"
        )

    def evaluate(self) -> float:
        """Mean loss over the validation windows, nats per token; the ranks share the work."""
        config, mesh = self.config, self.mesh
        total = torch.zeros(2, dtype=torch.float64)  # sum of losses, rows
        batches = data.validation_batches(
            self.corpus, config.eval_batches, mesh.rank, mesh.world_size,
            config.batch_size, config.block_size,
        )  # fmt: skip
        self.method.drain()  # this still counts as training
        self.model.invalidate_gathered()  # judged() may change the parameters, here and at its end
        with self.clock, self.mesh.uncounted(), self.method.judged():
            for inputs, targets, rows in batches:
                inputs, targets = inputs.to(mesh.device), targets.to(mesh.device)
                loss = self.model.forward(inputs, targets, train=False)
                total += torch.tensor([loss.item() * rows, rows], dtype=torch.float64)
            total = total.to(mesh.device)
            # [sync] all-reduce, all ranks, 2 scalars, once per evaluation
            mesh.all_reduce(total, mesh.world).wait()
        self.model.invalidate_gathered()
        self.log.sync(self.method)
        val_loss = (total[0] / total[1]).item()
        self.log.eval(self.method, val_loss, self.corpus.bytes_per_token)
        return val_loss

    def finish(self):
        """The last evaluation, model.pt, a sample."""
        config, method = self.config, self.method
        if self.tracer:
            self.tracer.stop()
        method.finish()
        val_loss = self.evaluate()
        path = Path(config.out_dir, "model.pt")
        with method.judged():
            if self.mesh.replica == 0:
                checkpoint.export(path, self.model, self.corpus.tokenizer, self.describe())
        self.log.end(method, val_loss)
        if self.mesh.rank == 0:
            print(f"model   {path}")
            print_sample(path)

    # ---- checkpoints ----

    def describe(self) -> dict:
        """What the record and the checkpoints say of the run."""
        setup, mesh, cuda = self.setup, self.mesh, self.mesh.device.type == "cuda"
        return vars(self.config) | vars(setup.method_config) | vars(setup.simulation) | {
            "world_size": mesh.world_size,
            "mesh": {"replicas": mesh.replicas, "shards": mesh.shards},
            "n_params": self.model.n_params,
            "corpus_hash": self.corpus.hash,
            "torch": str(torch.__version__),
            "device_name": torch.cuda.get_device_name() if cuda else "cpu",
        }  # fmt: skip

    def save(self) -> Path:
        method, began = self.method, time.perf_counter()
        method.drain()
        with self.clock, self.mesh.uncounted():
            self.log.sync(method)
            self.saved_at = method.progress
            state = self.log.state(method.progress) | {
                "flags": self.describe(), "mesh": self.describe()["mesh"],
                "model_config": dataclasses.asdict(self.model.config),
                "tokenizer": self.corpus.tokenizer, "corpus_hash": self.corpus.hash,
                "evaluated_at": self.evaluated_at,
            }  # fmt: skip
            path = checkpoint.save(
                self.config.out_dir, state, self.model, method, self.config.keep
            )
        self.log.saved(path, time.perf_counter() - began)
        return path

    def resume(self):
        setup, saved, method = self.setup, self.setup.saved, self.method
        self.clock.start_at(saved)  # A-EDiT's round begins in load()
        self.mesh.sent.update(saved["sent"])
        with self.clock:
            checkpoint.load(setup.path, saved, self.model, method)
        for state in self.optimizer.state.values():
            state["step"].fill_(method.steps)
        self.evaluated_at, self.saved_at = saved["evaluated_at"], saved["progress"]
        same_file = setup.path.parent.resolve() == Path(self.config.out_dir).resolve()
        self.log.start(self.describe(), saved, same_file, method.steps)
        changed = checkpoint.changed_flags(saved, self.describe(), setup.given)
        self.log.resumed(setup.path, saved["mesh"], changed)


def is_due(progress, last, interval: int) -> bool:
    """Has the training come to the next multiple of interval (0: none) after `last`?"""
    return bool(interval) and progress >= last - last % interval + interval


def start_tracing(config, rank: int):
    """torch's profiler: three steps go to a file, after the first ones, which also compile and
    allocate."""
    first = min(4, max(0, config.max_steps - 4))
    steps = torch.profiler.schedule(wait=first, warmup=1, active=3, repeat=1)
    path = Path(config.out_dir, f"trace-{rank}.json")

    def write(tracer):
        tracer.export_chrome_trace(str(path))
        print(f"profile {path}: open it in chrome://tracing or ui.perfetto.dev", flush=True)

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would report its own starts and stops
    tracer = torch.profiler.profile(schedule=steps, on_trace_ready=write)
    tracer.start()
    return tracer
