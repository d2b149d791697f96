"""Train a model that FSDP2 shards with EDiT: a script to copy together with edit_fsdp2.py.

    OMP_NUM_THREADS=1 torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 4 \
        examples/train_fsdp2.py         # 2 replicas x 2 shards on CPUs, less than a minute

With GPUs it takes one for each rank, and NCCL. The first part is yours to replace, by any nn.Module
with blocks. --load continues what --save has saved, also on other numbers of shards and ranks.
"""

import argparse
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from edit_fsdp2 import EDiT, clip_gradient, load, save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the two parts that are yours
import data
from model import Llama, ModelConfig

FLAGS = {
    "shards": (2, "ranks of a replica, which should have fast links"),
    "max_steps": (150, "of the run"),
    "warmup_steps": (30, "first steps: averaged gradients, a rising learning rate"),
    "tau": (10, "inner steps per round"),
    "batch_size": (4, "windows of a rank"),
    "lr": (3e-3, "largest learning rate"),
    "save": ("", "folder for a checkpoint"),
    "load": ("", "folder of a checkpoint"),
}
SEED = 1337


# ---- yours ----
def make_model(vocab_size):
    """A module, and the blocks in it. All ranks must start from the same parameters."""
    model = Llama(ModelConfig(n_layer=3, n_embd=64, block_size=64, vocab_size=vocab_size), SEED)
    return model, model.layers


def make_batches(flags, device):
    """batches.train(step): inputs and targets, other ones on every rank."""
    ranks = dist.get_rank(), dist.get_world_size()
    return data.Batches(data.standard_library(), 64, flags.batch_size, 1, *ranks, SEED, device)


# ---- FSDP2 and EDiT ----
def shard(model, blocks, mesh):
    policy = MixedPrecisionPolicy()  # computes in float32
    if mesh.device_type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh["shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh["shard"], mp_policy=policy)


def make_optimizer(model, flags):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step, flags):
    if step < flags.warmup_steps:
        return flags.lr * (step + 1) / flags.warmup_steps
    done = (step - flags.warmup_steps) / max(1, flags.max_steps - flags.warmup_steps)
    return flags.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def train(flags, mesh, device):
    batches = make_batches(flags, device)
    model, blocks = make_model(batches.corpus.vocab_size)
    shard(model.to(device), blocks, mesh)
    optimizer = make_optimizer(model, flags)
    rounds = dict(tau=flags.tau, warmup_steps=flags.warmup_steps)
    # This toy is small. Leave the outer step out for a large model: EDiT has the paper's.
    edit = EDiT(model, mesh["replica"], outer_lr=0.7, outer_momentum=0.5, **rounds)
    if flags.load:
        load(flags.load, model, optimizer, edit)

    began = time.perf_counter()
    losses = []  # of this rank, since the last line
    while edit.steps < flags.max_steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(edit.steps, flags)
        loss = model(*batches.train(edit.steps))
        loss.backward()
        losses.append(loss.detach())
        clip_gradient(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        edit.step()
        if report := edit.take_report():  # a sync is complete, which began a step ago
            show(report)
        if edit.steps % flags.tau == 0:
            mean = torch.stack(losses).mean() / dist.get_world_size()
            dist.all_reduce(mean)  # all ranks wait here for each other, so not in every step
            seconds = time.perf_counter() - began
            say(f"step {edit.steps:05} | loss {mean.item():.4f} | {seconds:.1f} s")
            losses = []
    edit.finish()
    if flags.save:  # or whenever edit.local_steps is 0, so that replicas are equal
        save(flags.save, model, optimizer, edit)


def show(report):
    norms = report["norms"].norm(dim=1)
    weights = report["weights"].mean(dim=1)
    say(
        f"sync {report['round']:04} | norms {norms.min():.2f} .. {norms.max():.2f} | weights "
        f"{weights.min():.2f} .. {weights.max():.2f} | dropped {report['flagged'].sum()} | "
        f"clip {report['clips'].mean():.2f} | {report['sent_bytes'] / 1e6:.1f} MB"
    )


def say(line):
    if dist.get_rank() == 0:
        with suppress(OSError):  # nobody reads any more, as after `| head`: the run goes on
            os.write(1, f"{line}\n".encode())  # not print(), which tries again at the exit


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, (default, text) in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    flags = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # Two groups are in flight at once: their kernels must start in the same order everywhere.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shape = (dist.get_world_size() // flags.shards, flags.shards)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard"))
    train(flags, mesh, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
