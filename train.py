r"""Train a small Llama-style model with one of several synchronization methods.

    python train.py --method minibatch                                      # one process
    OMP_NUM_THREADS=1 torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 4 \
        train.py --method edit --shards 2
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \
        train.py --shards 8    # a shared disk; without one see docs/two_machines.md

What happens is this; the rest of the project is what these words mean:

    for each step:
        method.before_step()                        # begin(), once, when the warm-up is over
        loss = forward, backward                    # EDiT: a layer is completed when it is needed
        clip; method.inner_step()                   # AdamW or Muon
        if method.after_step(): method.end_round()  # sync(), at the end of a round

A method decides when and how replicas synchronize (method.py). To add one, write its file and its
row in methods.py. Evaluations, checkpoints and stops are at round ends.

Plain version: plain/train.py.
"""

import math
import sys
import time
from pathlib import Path

import torch

import data
from config import HINT, UserError, run_command
from hf import save_model
from methods import METHODS
from model import initialize, make_layer, mixed_seed
from optimizer import AdamW, Muon
from plumbing import checkpoint, launch
from plumbing.log import Clock, Log, RoundRecord
from plumbing.simulate import Cluster
from sample import print_sample
from shard import ShardedModel

LARGEST_SAMPLED = 200e6  # parameters. The other ranks wait for the sample, which one CPU makes


class Training:
    """A run on this rank. setup: plumbing.launch.Setup; stop: plumbing.launch.StopRequest."""

    def __init__(self, setup, mesh, stop):
        self.setup, self.mesh, self.stop = setup, mesh, stop
        self.config = config = setup.config
        plan = setup.plan
        self.model = make_model(plan.model_config, mesh, plan.dtype, config.seed, config.recompute)
        if config.compile:
            for layer in self.model.layers:
                layer.compile()
        self.optimizer = make_optimizer(self.model, config)
        self.batches = make_batches(setup, mesh)
        cluster = Cluster(config, mesh)  # simulates slow and sick replicas, if flags ask for them
        clock = cluster if config.virtual_clock else Clock(mesh.device)
        make_method = METHODS[config.method]
        self.method = make_method(self.model, mesh, config, RoundRecord(mesh), clock)
        cluster.disturb(self.batches, self.method)
        # Fills model, optimizer, method and clock from a checkpoint, or the model alone from
        # another model, if the flags name one.
        checkpoint.load(setup, self.model, self.optimizer, self.method, clock)
        self.log = Log(setup, mesh, clock, self.method.steps)
        self.last_progress = self.method.progress  # when at_round_end() was called last

    def run(self):
        config, model, method = self.config, self.model, self.method
        while method.progress < config.max_steps:
            began = time.perf_counter()
            method.before_step()
            lr = self.optimizer.lr = learning_rate(method.progress, config)
            loss = self.forward_backward()
            metrics = model.step_metrics(loss, self.request(), method.averages_gradients)
            model.clip_gradient(config.grad_clip)
            method.inner_step(self.optimizer)
            if method.after_step(lr, metrics):
                # The sync. EDiT's only starts here: the next model.forward() ends it, layer by
                # layer (pre_layer_hook in shard.py calls complete() of edit.py).
                method.end_round()
            self.mesh.note("step", began, time.perf_counter())  # for --timeline
            write_syncs(method, self.log)
            self.log.step(method, lr, metrics)
            check_finite(model, method)
            if method.local_steps == 0:  # after a sync, and after each step of the warm-up
                self.at_round_end()
        self.finish()

    def forward_backward(self):
        """The gradient of a step, in model.grad. Returns this rank's loss."""
        model, method = self.model, self.method
        micro_steps = self.setup.plan.micro_steps
        average = method.averages_gradients
        # The gradient is a mean over micro-steps and over the ranks of this replica, or in the
        # warm-up of all replicas.
        ranks = self.mesh.world_size if average else self.mesh.shards
        scale = 1 / (micro_steps * ranks)
        loss = 0.0
        seed_dropout(self.config.seed, method.steps, self.mesh.rank)
        for micro_step in range(micro_steps):
            inputs, targets = self.batches.train(method.steps, micro_step)
            loss += model.forward(inputs, targets) / micro_steps
            # Replicas average once, after the last micro-step, so that less is sent.
            last = micro_step == micro_steps - 1
            model.backward(scale, first=micro_step == 0, sum_replicas=average and last)
        method.after_backward()
        return loss

    def request(self) -> float:
        """A number that travels with the step's loss and norm. In a round it is the vote to end it,
        in the warm-up the number of a signal to stop."""
        if self.method.averages_gradients:
            return self.stop.signal
        return self.method.vote()

    def at_round_end(self):
        """Evaluate, save and stop, each if it is due. In the warm-up each step is such an end, and
        method.rounds is 0. (--checkpoint_interval of k tau steps saves every k-th round.)"""
        config = self.config
        last = self.last_progress
        self.last_progress = progress = self.method.progress
        over = progress >= config.max_steps
        stopping = self.stop.agreed(self.method)
        if due(progress, last, config.eval_interval) and not over:
            val_loss = self.evaluate()
            self.log_evaluation(val_loss)
        if stopping or over or due(progress, last, config.checkpoint_interval):
            path = self.save(over)
            if stopping and path:
                raise launch.Stopped(stopping, self.method.steps, path)

    def save(self, over: bool) -> Path | None:
        """Save a checkpoint. over: the training has ended. Then a failure is only printed, because
        the disk may still have room for model.pt."""
        began = time.perf_counter()
        self.method.drain()
        with self.method.clock:  # saving is no training
            write_syncs(self.method, self.log)
            try:
                state = self.log.state(self.method)
                path = checkpoint.save(self.setup, self.model, self.method, state)
            except UserError as error:
                if not over:
                    raise
                print(f"saved   none: {error}")
                return None
        self.log.saved(path, time.perf_counter() - began)
        return path

    def finish(self):
        """The last evaluation, model.pt, a sample."""
        self.method.finish()
        val_loss = self.evaluate(self.model.master)  # the parameters to keep
        self.log_evaluation(val_loss)
        path = Path(self.config.out_dir, "model.pt")
        launch.return_freed_memory()
        if self.mesh.replica == 0:
            description = self.setup.describe(self.mesh)
            save_model(path, self.model, self.setup.corpus.tokenizer, description)
        self.log.end(self.method, val_loss)
        guessing = math.log(self.model.config.vocab_size)  # the loss of equal probabilities
        if val_loss > 0.99 * guessing:
            print(f"note    no better than guessing, which has a loss of {guessing:.4f}: {HINT}")
        if self.mesh.rank == 0 and self.setup.plan.n_params <= LARGEST_SAMPLED:
            print_sample(path)
        elif self.mesh.rank == 0:
            print(f"model   {path}")
            print(f"sample  none at this size: it takes minutes; python sample.py --model {path}")

    def log_evaluation(self, val_loss: float):
        write_syncs(self.method, self.log)
        self.log.eval(self.method, val_loss)
        if not math.isfinite(val_loss):
            step = self.method.steps
            raise UserError(f"diverged: the validation loss at step {step} is {val_loss}; {HINT}")

    def evaluate(self, parameters=None) -> float:
        """Mean loss over the validation windows, nats per token; the ranks share the work.
        parameters: evaluate these; by default those of method.evaluation_model()."""
        model, method, mesh = self.model, self.method, self.mesh
        total = torch.zeros(2, dtype=torch.float64)  # sum of losses, rows
        method.drain()
        with method.clock, mesh.uncounted():  # the clock stops, and no bytes count
            if parameters is None:
                in_warm_up = method.averages_gradients
                parameters = model.master if in_warm_up else method.evaluation_model()
            if parameters is not model.master:
                model.swap(parameters)
            for inputs, targets, rows in self.batches.validation(self.config.eval_batches):
                loss = model.forward(inputs, targets, train=False)
                total += torch.tensor([loss.item() * rows, rows], dtype=torch.float64)
            # [sync] sum over all ranks, 2 scalars, once per evaluation
            total = mesh.sum_over_ranks(total.to(mesh.device))
            if parameters is not model.master:
                model.swap(parameters)
        return (total[0] / total[1]).item()


def make_model(shape, mesh, dtype=torch.float32, seed=0, recompute=False) -> ShardedModel:
    """The layers of model.py, sharded. shape: a ModelConfig."""
    with torch.device("meta"):  # shapes without memory
        layers = [make_layer(shape, l) for l in range(shape.n_layer + 2)]

    def set_parameters(layer, l):
        initialize(layer, shape, l, seed)

    model = ShardedModel(layers, mesh, dtype, set_parameters, recompute)
    model.config = shape  # checkpoints and model.pt describe it
    return model


def seed_dropout(seed: int, step: int, rank: int):
    """Seed what layers of one's own draw in this step, as dropout does: other masks on other ranks,
    and in a resumed run those that it would have drawn without the stop. (model.py draws none.)"""
    torch.manual_seed(mixed_seed(seed, step, rank, 1))  # 1: other numbers than model.initialize()


def make_optimizer(model, config):
    betas = (config.beta1, config.beta2)
    if config.optimizer == "muon":
        return Muon(model, config.weight_decay, betas, ratio=config.muon_lr / config.lr)
    return AdamW(model, config.weight_decay, betas)


def make_batches(setup, mesh) -> data.Batches:
    return data.Batches(
        setup.corpus,
        setup.config.block_size,
        setup.plan.micro_batch,
        setup.plan.micro_steps,
        mesh.rank,
        mesh.world_size,
        setup.config.seed,
        mesh.device,
    )


def check_finite(model, method):
    """Stop if the loss or the norm is not finite, unless the next sync repairs the replica."""
    norm, loss, _ = model.known_metrics()  # on a GPU of the step before
    repaired = method.repairs_replicas and not method.averages_gradients
    if not math.isfinite(norm + loss) and not repaired:
        raise UserError(
            f"diverged at step {method.steps - len(model.metrics) + 1}: loss {loss:.4g}, "
            f"gradient norm {norm:.4g}; {HINT}"
        )


def write_syncs(method, log):
    """Write the rows of the syncs that have completed since the last call. Raises UserError if EDiT
    has left out all replicas three times in a row."""
    while row := method.record.take():
        log.sync(row)
        if method.record.lost_rounds == 3:
            raise UserError(
                "all replicas were left out of the last 3 syncs, because their updates were not "
                f"finite: {HINT}"
            )


def due(progress: float, last: float, interval: int) -> bool:
    """Has the progress passed a multiple of the interval since `last`? Interval 0: never."""
    return interval > 0 and progress // interval > last // interval


def learning_rate(progress: float, config) -> float:
    """Linear warm-up, then a cosine from lr to min_lr_ratio * lr at max_steps. With wsd (warm-up,
    stable, decay) it is constant, then, in the last decay_share of the run, linear. Before the
    decay wsd does not depend on max_steps, so a run can be resumed there with more steps."""
    warmup, end = config.lr_warmup_steps, config.max_steps
    if progress < warmup:
        return config.lr * (progress + 1) / warmup
    if config.schedule == "wsd":
        height = min(1.0, (end - progress) / max(1, config.decay_share * end))
    else:
        height = 0.5 * (1 + math.cos(math.pi * (progress - warmup) / max(1, end - warmup)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


def main(argv: list):
    # data.load is handed over, so that plumbing/ does not import data.py. everyone: a mesh of all
    # ranks, for the start only.
    setup, everyone = launch.start(argv, METHODS, data.load)
    setup.plan.show(setup.corpus)
    if not setup.config.dry_run:
        mesh = launch.make_mesh(setup.config, everyone, setup.plan.method.barrier)
        Training(setup, mesh, launch.StopRequest(setup.config.save_on_exit)).run()
    launch.leave_together()


if __name__ == "__main__":
    run_command("train.py", lambda: main(sys.argv[1:]))
