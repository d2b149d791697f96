r"""Layers, data and a training loop of your own, with the methods of this project.

    python examples/own_layers.py --method minibatch
    OMP_NUM_THREADS=1 torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 4 \
        examples/own_layers.py --shards 2

To which of three noisy spirals does a point belong? Replace the first two parts. Then come two
trainings: a sharded one, whose loop you may change, and a plain one in one process. In fp64 both
must end at the same loss; if they do not, a layer or the loop is wrong. Harmless reasons are:

- Methods that round what they send agree to fewer digits.
- The rounds of a_edit end by the clock, so no two runs are alike.
- Dropout draws other masks in the two trainings.
- Some gradients are 0 but for rounding, as that of the keys' bias in attention. Optimizers whose
  steps are as large for a tiny gradient (AdamW, signs) move such a parameter at random.

Flags of the method, the optimizer and --accum count. Those about text, files and devices do not.
Simulations happen in the plain training only.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project's folder
from config import parse, run_command
from mesh import Mesh
from methods import METHODS, PLAIN
from model import mixed_seed
from plain import Training
from plumbing.launch import check_mesh, connect, leave_together
from plumbing.log import Clock, RoundRecord
from shard import ShardedModel
from train import learning_rate, make_optimizer, seed_dropout


# ---- layers: any list of nn.Modules; x = layer(x), and the last one returns the mean loss ----
class Head(nn.Linear):
    def forward(self, x, targets):
        return nn.functional.cross_entropy(super().forward(x), targets)


def make_layers(n=32) -> list:
    torch.manual_seed(0)  # all ranks must start from the same parameters
    inner = [nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n)) for _ in range(2)]
    return [nn.Sequential(nn.Linear(2, n), nn.Tanh()), *inner, Head(n, 3)]


# ---- data: every rank must get a batch of its own in every step ----
def make_points(seed: int, size=64) -> tuple:
    random = {"generator": torch.Generator().manual_seed(seed)}
    spiral = torch.randint(3, (size,), **random)
    radius = torch.rand(size, **random, dtype=torch.float64)
    angle = 4 * radius + 2.1 * spiral + 0.1 * torch.randn(size, **random)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), spiral


def batches(step: int, micro_step: int, rank: int) -> tuple:
    return make_points(seed=mixed_seed(1, step, micro_step, rank))


# ---- the sharded training: method.py says what each call does ----
def train_sharded(config, mesh, layers) -> ShardedModel:
    model = ShardedModel(layers, mesh, torch.float64)
    optimizer = make_optimizer(model, config)
    method = METHODS[config.method](model, mesh, config, RoundRecord(mesh), Clock(mesh.device))
    while method.progress < config.max_steps:
        method.before_step()
        lr = optimizer.lr = learning_rate(method.progress, config)
        average = method.averages_gradients  # over all replicas: in the warm-up
        scale = 1 / (config.accum * (mesh.world_size if average else mesh.shards))
        seed_dropout(config.seed, method.steps, mesh.rank)  # here no layer draws random numbers
        loss = 0.0
        for micro_step in range(config.accum):
            last = micro_step == config.accum - 1
            loss += model.forward(*batches(method.steps, micro_step, mesh.rank)) / config.accum
            model.backward(scale, first=micro_step == 0, sum_replicas=average and last)
        method.after_backward()
        metrics = model.step_metrics(loss, method.vote(), average)
        model.clip_gradient(config.grad_clip)
        method.inner_step(optimizer)
        if method.after_step(lr, metrics):
            method.end_round()
        while row := method.record.take():  # a sync is complete
            print(f"round {row['round']}, step {row['step']}: losses {row['loss']}")
    method.finish()  # model.master is the result; hf.whole_model() gathers it
    return model


# ---- the plain training: the loop is in plain/train.py ----
def train_plain(config, mesh, layers, validation) -> Training:
    training = Training(config, layers, batches, mesh.replicas, mesh.shards, validation)
    training.run()
    return training


def main():
    config, _ = parse(sys.argv[1:], METHODS)
    config.dtype, config.device = "fp64", "cpu"
    check_mesh(config, connect().world_size)
    mesh = Mesh(config.shards, torch.device("cpu"))
    config.check(mesh.replicas)
    new_points = make_points(seed=0, size=3000)
    model = train_sharded(config, mesh, make_layers())
    loss = model.forward(*new_points, train=False).item()
    print(f"{config.method}: loss {loss:.12f} on new points (guessing: 1.099)")
    if mesh.rank == 0 and config.method in PLAIN:
        training = train_plain(config, mesh, make_layers(), [new_points])
        print(f"plain: loss {training.rows['eval'][-1]['val_loss']:.12f}")
    leave_together()  # the plain training takes rank 0 some time


if __name__ == "__main__":
    run_command("own_layers.py", main)
