r"""Train a small Llama-style model with one of several synchronization methods.

    python train.py --method minibatch                                      # one process
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 train.py --method edit --shards 2
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \
        train.py --shards 8

A method decides when and how replicas synchronize (method.py). To add one, write its file and name
it in METHODS. What surrounds the steps (evaluation, checkpoints, the record) is in plumbing/run.py.
"""

import math
import sys

from a_edit import AEDiT
from co2 import CO2
from diloco import DiLoCo
from edit import EDiT
from minibatch import MiniBatch
from noloco import NoLoCo
from plumbing import launch
from plumbing.run import Run
from post_local_sgd import PostLocalSGD
from shard import ShardedModel
from slowmo import SlowMo
from streaming_diloco import StreamingDiLoCo
from streaming_edit import StreamingEDiT

METHODS = {
    "minibatch": MiniBatch, "post_local_sgd": PostLocalSGD, "slowmo": SlowMo, "diloco": DiLoCo,
    "streaming_diloco": StreamingDiLoCo, "co2": CO2, "noloco": NoLoCo, "edit": EDiT,
    "a_edit": AEDiT, "streaming_edit": StreamingEDiT,
}  # fmt: skip


def train(setup, mesh, shutdown):
    config, plan = setup.config, setup.plan
    model = ShardedModel(plan.model_config, mesh, plan.dtype, config.seed, config.recompute)
    if config.compile:
        launch.compile_layers(model.layers)
    optimizer = model.adamw(config.weight_decay, betas=(config.beta1, config.beta2))
    method = METHODS[config.method](
        model, mesh, setup.method_config, config.max_steps, config.seed
    )
    run = Run(setup, mesh, model, optimizer, method, shutdown)  # continues a checkpoint, if any

    while method.progress < config.max_steps:
        method.before_step()
        lr = set_learning_rate(optimizer, method.progress, config)
        average = method.averages_gradients
        # The gradient is a mean over micro-steps, the N ranks of a replica and, if averaged, the
        # M replicas.
        scale = 1 / (config.accum * (mesh.world_size if average else mesh.shards))
        loss = 0.0
        run.before_step()
        for micro_step in range(config.accum):
            inputs, targets = run.load_batch(method.steps, micro_step)  # (B, T) each
            loss += model.forward(inputs, targets) / config.accum
            first, last = micro_step == 0, micro_step == config.accum - 1
            model.backward(scale, first, average_replicas=average and last)
        # Norm, loss and votes to end the round share one small all-reduce.
        metrics = model.step_metrics(loss, run.vote(), average)
        model.clip_gradient(metrics.norm, config.grad_clip)
        optimizer.step()
        model.invalidate_gathered()
        method.after_step(lr)  # a sync starts here
        run.after_step(lr, metrics)  # log; at a round end: evaluate, save or stop if due
    run.finish()


def set_learning_rate(optimizer, progress: float, config) -> float:
    """Linear warm-up, then a cosine from lr to min_lr_ratio * lr at max_steps."""
    if progress < config.lr_warmup_steps:
        lr = config.lr * (progress + 1) / config.lr_warmup_steps
    else:
        t = progress - config.lr_warmup_steps
        t = min(1.0, t / max(1, config.max_steps - config.lr_warmup_steps))
        cosine = 0.5 * (1 + math.cos(math.pi * t))
        lr = config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def main(argv: list):
    def run(shutdown):
        setup = launch.start(argv, METHODS, shutdown)
        if setup.config.dry_run:
            return setup.plan.show(setup.corpus)
        launch.keep_freed_memory()
        mesh = launch.make_mesh(setup, shutdown.store)
        train(setup, mesh, shutdown)

    launch.run_on_this_rank("train.py", run)


if __name__ == "__main__":
    main(sys.argv[1:])
