r"""Train a small Llama-style model with one of several synchronization methods.

    python train.py --method minibatch                                      # one process
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 train.py --method edit --shards 2
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \
        train.py --shards 8

A method decides when and how replicas synchronize (method.py). To add one, write its file and name
it in METHODS. Evaluations, checkpoints and stops are at round ends.
"""

import math
import sys
import time
from pathlib import Path

import torch

import data
from a_edit import AEDiT
from config import UserError, run_command
from diloco import DiLoCo
from edit import EDiT
from export import save_model
from minibatch import MiniBatch
from optimizer import AdamW, Muon
from plumbing import checkpoint, launch
from plumbing.log import Clock, Log, RoundRecord
from plumbing.simulate import Cluster
from relatives import RELATIVES
from sample import print_sample
from shard import ShardedModel

HINT = "lower --lr, or raise --lr_warmup_steps"
LARGEST_SAMPLED = 200e6  # parameters. The other ranks wait for the sample, which one CPU makes
METHODS = {"minibatch": MiniBatch, "diloco": DiLoCo, "edit": EDiT, "a_edit": AEDiT} | RELATIVES


def train(setup, mesh, stop):
    """setup: plumbing.launch.Setup; stop: plumbing.launch.StopRequest."""
    config = setup.config
    plan = setup.plan
    model = ShardedModel(plan.model_config, mesh, plan.dtype, config.seed, config.recompute)
    if config.compile:
        for layer in model.layers:
            layer.compile()
    optimizer = make_optimizer(model, config)
    cluster = Cluster(config, mesh)  # simulates stragglers and sick replicas, if asked to
    clock = cluster if config.virtual_clock else Clock(mesh.device)
    batches = make_batches(setup, mesh)
    method = METHODS[config.method](model, mesh, config, RoundRecord(mesh), clock)
    checkpoint.load(setup, model, optimizer, method, clock)  # with --resume or --init_from
    log = Log(setup, mesh, clock, method.steps)
    round_end = method.progress  # at the last round end

    while method.progress < config.max_steps:
        began = time.perf_counter()
        method.before_step()
        lr = optimizer.lr = learning_rate(method.progress, config)
        average = method.averages_gradients
        loss = 0.0
        # The gradient is a mean over micro-steps and ranks: this replica's, in the warm-up all.
        scale = 1 / (plan.micro_steps * (mesh.world_size if average else mesh.shards))
        with cluster.step(optimizer, method):
            for micro_step in range(plan.micro_steps):
                inputs, targets = cluster.batch(batches, method, micro_step)
                loss += model.forward(inputs, targets) / plan.micro_steps
                last = micro_step == plan.micro_steps - 1
                model.backward(scale, first=micro_step == 0, sum_replicas=average and last)
            method.after_backward()
        # Norm, loss and votes share one small exchange. A vote ends the round or, in the warm-up,
        # says that this rank has a signal to stop.
        vote = stop.signal if average else method.vote()
        metrics = model.step_metrics(loss, vote, average)
        model.clip_gradient(config.grad_clip)
        method.inner_step(optimizer)
        model.invalidate_gathered()
        if method.after_step(lr, metrics):
            with cluster.sync(method):
                method.end_round()  # a sync starts here; EDiT's ends in the next forward
        mesh.note("step", began, time.perf_counter())  # for --timeline
        write_syncs(method, log)
        log.step(method, lr, metrics)
        check_finite(model, method)
        if method.local_steps == 0:
            at_round_end(setup, batches, model, method, log, stop, round_end)
            round_end = method.progress
    finish(setup, batches, model, method, log)


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
    norm, loss, _ = model.known_metrics()
    repaired = method.repairs_replicas and not method.averages_gradients
    if not math.isfinite(norm + loss) and not repaired:
        raise UserError(
            f"diverged at step {method.steps - len(model.metrics) + 1}: loss {loss:.4g}, "
            f"gradient norm {norm:.4g}; {HINT}"
        )


def write_syncs(method, log):
    """The rows of the syncs that have completed since the last call. Stops if EDiT has left out all
    replicas three times in a row."""
    while row := method.record.take():
        log.sync(row)
        if method.record.lost_rounds == 3:
            raise UserError(
                "all replicas were left out of the last 3 syncs: "
                "lower --lr, or raise --anomaly_threshold"
            )


def due(progress: float, last: float, interval: int) -> bool:
    """Has the progress passed a multiple of the interval since `last`? Interval 0: never."""
    return interval > 0 and progress // interval > last // interval


def at_round_end(setup, batches, model, method, log, stop, last: float):
    """Evaluate, save and stop, each if it is due. last: the progress at the round end before."""
    launch.shorten_timeout(model.mesh)  # the first steps, which may compile, are over
    config = setup.config
    progress = method.progress
    over = progress >= config.max_steps
    stopping = stop.agreed(method)
    if due(progress, last, config.eval_interval) and not over:
        val_loss = evaluate(setup, batches, model, method)
        write_syncs(method, log)
        log.eval(method, val_loss)
    if stopping or over or due(progress, last, config.checkpoint_interval):
        began = time.perf_counter()
        method.drain()
        with method.clock:  # saving is no training
            write_syncs(method, log)
            try:
                path = checkpoint.save(setup, model, method, log.state(method))
            except UserError as error:
                if not over:
                    raise
                print(f"saved   none: {error}")  # a full disk may have room for model.pt
                return
        log.saved(path, time.perf_counter() - began)
        if stopping:
            raise launch.Stopped(stopping, method.steps, path)


def finish(setup, batches, model, method, log):
    """The last evaluation, model.pt, a sample."""
    method.finish()
    val_loss = evaluate(setup, batches, model, method, parameters=model.master)  # those to keep
    write_syncs(method, log)
    log.eval(method, val_loss)
    if not math.isfinite(val_loss):
        raise UserError(f"diverged: the validation loss at the end is {val_loss}; {HINT}")
    path = Path(setup.config.out_dir, "model.pt")
    launch.return_freed_memory()
    if model.mesh.replica == 0:
        save_model(path, model, setup.corpus.tokenizer, setup.describe(model.mesh))
    log.end(method, val_loss)
    if model.mesh.rank == 0 and setup.plan.n_params <= LARGEST_SAMPLED:
        print_sample(path)
    elif model.mesh.rank == 0:
        print(f"model   {path}")
        print(f"sample  none at this size: it takes minutes; python sample.py --model {path}")


def learning_rate(progress: float, config) -> float:
    """Linear warm-up, then a cosine from lr to min_lr_ratio * lr at max_steps."""
    if progress < config.lr_warmup_steps:
        return config.lr * (progress + 1) / config.lr_warmup_steps
    t = (progress - config.lr_warmup_steps) / max(1, config.max_steps - config.lr_warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * t))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def evaluate(setup, batches, model, method, parameters=None) -> float:
    """Mean loss over the validation windows, nats per token; the ranks share the work. parameters:
    evaluate these; by default those of method.evaluation_model()."""
    config, mesh = setup.config, model.mesh
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, rows
    method.drain()
    with method.clock, mesh.uncounted():  # the clock stops, and no bytes count
        if parameters is None:
            parameters = model.master if method.averages_gradients else method.evaluation_model()
        if parameters is not model.master:
            model.swap(parameters)
        for inputs, targets, rows in batches.validation(config.eval_batches):
            loss = model.forward(inputs, targets, train=False)
            total += torch.tensor([loss.item() * rows, rows], dtype=torch.float64)
        # [sync] sum over all ranks, 2 scalars, once per evaluation
        total = mesh.sum_over_ranks(total.to(mesh.device))
        if parameters is not model.master:
            model.swap(parameters)
        model.invalidate_gathered()
    return (total[0] / total[1]).item()


def main(argv: list):
    setup, everyone = launch.start(argv, METHODS)
    setup.plan.show(setup.corpus)
    if not setup.config.dry_run:
        mesh = launch.make_mesh(setup.config, everyone, setup.plan.method.barrier)
        train(setup, mesh, launch.StopRequest(setup.config.save_on_exit))
    launch.leave_together()


if __name__ == "__main__":
    run_command("train.py", lambda: main(sys.argv[1:]))
