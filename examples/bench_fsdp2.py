"""A step of EDiT here and under FSDP2, and one of FSDP2 alone, in turns, on CPUs over gloo.

    OMP_NUM_THREADS=1 torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 4 \
        examples/bench_fsdp2.py [TURNS]

All three train the same Llama on 2 replicas x 2 shards, without a warm-up. A turn is a round of 8
steps, with one sync, or without one (fsdp2 alone: replicas never meet). A ratio to fsdp2 alone is
the median of the ratios of the turns, with the lowest and the highest.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from config import parse
from edit_fsdp2 import EDiT, clip_gradient
from mesh import Mesh
from methods import METHODS
from model import Llama, ModelConfig
from plumbing.launch import connect
from plumbing.log import Clock, RoundRecord

TAU = 8
SHAPE = ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=257)
FLAGS = f"--method edit --tau {TAU} --sync_warmup_steps 0 --shards 2 --device cpu".split()


def our_step(mesh, batch):
    config, _ = parse(FLAGS, METHODS)
    model = train.make_model(SHAPE, mesh)
    optimizer = train.make_optimizer(model, config)
    optimizer.lr = 1e-3
    method = METHODS["edit"](model, mesh, config, RoundRecord(mesh), Clock(mesh.device))

    def step():
        method.before_step()
        loss = model.forward(*batch)
        model.backward(1 / mesh.shards)
        metrics = model.step_metrics(loss, method.vote(), averaged=False)
        model.clip_gradient(1.0)
        method.inner_step(optimizer)
        if method.after_step(optimizer.lr, metrics):
            method.end_round()

    return step


def fsdp2_step(grid, batch, with_edit):
    model = Llama(SHAPE, seed=0)
    for layer in model.layers:
        last = layer is model.layers[-1]  # stays gathered: its backward comes next
        fully_shard(layer, mesh=grid["shard"], reshard_after_forward=not last)
    fully_shard(model, mesh=grid["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    edit = EDiT(model, grid["replica"], tau=TAU, warmup_steps=0) if with_edit else None

    def step():
        model(*batch).backward()
        if edit:
            clip_gradient(model.parameters(), 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if edit:
            edit.step()

    return step


def main():
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    connect()
    mesh = Mesh(2, torch.device("cpu"), 600, lambda ranks, crosses_replicas: "gloo")
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    batch = torch.randint(SHAPE.vocab_size, (2, 2, SHAPE.block_size))
    steps = {
        "train.py": our_step(mesh, batch),
        "edit_fsdp2": fsdp2_step(grid, batch, with_edit=True),
        "fsdp2 alone": fsdp2_step(grid, batch, with_edit=False),
    }
    times = {name: [] for name in steps}  # milliseconds per step in each turn
    for turn in range(turns + 1):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(TAU):
                step()
            dist.barrier()
            if turn > 0:  # the first one fills caches
                times[name].append(1e3 * (time.perf_counter() - began) / TAU)
    for name, own in times.items():
        ratios = sorted(a / b for a, b in zip(own, times["fsdp2 alone"]))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})"
        if mesh.rank == 0:
            print(f"{name:11} {statistics.median(own):7.1f} ms a step | ratio {spread}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
