r"""Layers, data and a training loop of your own, with the methods of this project.

    python docs/own.py --method minibatch
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 docs/own.py --method edit --shards 2

To which of three noisy spirals does a point belong? Replace the three parts. Flags of the method
and the optimizer count, those about text, files, devices and simulations do not.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project's folder
from config import parse, run_command
from mesh import Mesh
from plumbing.launch import check_mesh, connect
from plumbing.log import Clock, RoundRecord
from shard import ShardedModel
from train import METHODS, learning_rate, make_optimizer


# ---- layers: any list of nn.Modules; x = layer(x), and the last one returns the mean loss ----
class Head(nn.Linear):
    def forward(self, x, targets):
        return nn.functional.cross_entropy(super().forward(x), targets)


def make_layers(n=32) -> list:
    torch.manual_seed(0)  # all ranks must start from the same parameters
    inner = [nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n)) for _ in range(2)]
    return [nn.Sequential(nn.Linear(2, n), nn.Tanh()), *inner, Head(n, 3)]


# ---- data: every rank must get a batch of its own in every step ----
def make_batch(seed: int, size=64) -> tuple:
    random = {"generator": torch.Generator().manual_seed(seed)}
    spiral = torch.randint(3, (size,), **random)
    radius = torch.rand(size, **random)
    angle = 4 * radius + 2.1 * spiral + 0.1 * torch.randn(size, **random)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), spiral


# ---- the loop: method.py says what each call does ----
def train(config, mesh) -> ShardedModel:
    config.check(mesh.replicas)
    model = ShardedModel(make_layers(), mesh)
    optimizer = make_optimizer(model, config)
    method = METHODS[config.method](model, mesh, config, RoundRecord(mesh), Clock(mesh.device))
    while method.progress < config.max_steps:
        method.before_step()
        lr = optimizer.lr = learning_rate(method.progress, config)
        average = method.averages_gradients  # over all replicas: in the warm-up
        inputs, targets = make_batch(seed=1 + method.steps * mesh.world_size + mesh.rank)
        loss = model.forward(inputs, targets)
        model.backward(1 / (mesh.world_size if average else mesh.shards), sum_replicas=average)
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


def main():
    config, _ = parse(sys.argv[1:], METHODS)
    check_mesh(config, connect().world_size)
    model = train(config, Mesh(config.shards, torch.device("cpu")))
    loss = model.forward(*make_batch(seed=0, size=3000), train=False)
    print(f"{config.method}: loss {loss:.3f} on new points (guessing: 1.099)")


if __name__ == "__main__":
    run_command("own.py", main)
