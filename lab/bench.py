r"""Speed: a step of this repository beside torch's FSDP2 and beside no communication at all.

    OMP_NUM_THREADS=1 torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 2 \
        -m lab.bench --shards 2  # mesh 1x2
    OMP_NUM_THREADS=1 torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 4 \
        -m lab.bench --shards 2  # mesh 2x2
    python -m lab.bench --device cuda --model 124m --vocab_size 50304 --batch_size 16 --compile

    ours    a step with averaged gradients, as in train.py
    fsdp2   torch's fully_shard with the same layers, batch, dtype, fused AdamW and clipping
    bound   as many independent single processes at once as there are ranks, if there are several

The speed of a machine drifts, so the candidates take turns in one run, a few steps at a time. A
ratio is the median of the ratios of the turns. Of the flags of train.py those count that a step of
minibatch needs (mesh, device, model, batch, dtype, optimizer, --compile), and --repeats. The
default is --model 10m --batch_size 2 --vocab_size 257.
"""

import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import minibatch
from config import option, parse, run_command
from mesh import Mesh
from minibatch import MiniBatch
from model import Llama
from plumbing import launch
from plumbing.plan import Plan
from train import make_model, make_optimizer

DEFAULTS = "--model 10m --batch_size 2 --vocab_size 257 --method minibatch".split()
STEPS = 2  # timed ones in a turn


@dataclass
class Flags(minibatch.Config):
    """The benchmark's flags: train.py's and its own."""

    repeats: int = option(5, "turns", group="benchmark", low=1)


class Bench(MiniBatch):
    Config = Flags


# ---- the candidates: each call is one step ----


def our_step(plan: Plan, mesh: Mesh, batch: torch.Tensor):
    """A step with averaged gradients, as in train.py."""
    config = plan.config
    model = make_model(plan.model_config, mesh, plan.dtype)
    if config.compile:
        for layer in model.layers:
            layer.compile()
    optimizer = make_optimizer(model, config)
    optimizer.lr = config.lr

    def step():
        loss = model.forward(*batch)
        model.backward(1 / mesh.world_size, sum_replicas=True)
        model.step_metrics(loss, 0.0, averaged=True)
        model.clip_gradient(config.grad_clip)
        optimizer.step()

    return step


def fsdp2_step(plan: Plan, mesh: Mesh, batch: torch.Tensor):
    """The same with torch's fully_shard, on the same mesh and backend."""
    config = plan.config
    backend = config.backend
    if backend == "shm":  # which FSDP2 does not know
        backend = "gloo"
    if not dist.is_initialized():  # one rank
        device = None
        if mesh.device.type == "cuda":
            device = mesh.device  # without it NCCL guesses the GPU, and warns
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
    grid = init_device_mesh(
        config.device,
        (mesh.replicas, mesh.shards),
        mesh_dim_names=("replica", "shard"),
        backend_override={"replica": backend, "shard": backend},
    )
    if mesh.replicas == 1:
        grid = grid["shard"]

    model = Llama(plan.model_config, seed=0).to(mesh.device)
    policy = MixedPrecisionPolicy(param_dtype=plan.dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        if config.compile:
            layer.compile()
        last = layer is model.layers[-1]  # stays gathered: its backward comes next
        fully_shard(layer, mesh=grid, mp_policy=policy, reshard_after_forward=not last)
    fully_shard(model, mesh=grid, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- timing ----


def now_ms(mesh) -> float:
    """When all ranks have done their work."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return 1e3 * time.perf_counter()


def alternate(mesh, steps: dict, turns: int) -> dict:
    """name -> milliseconds per step in each turn."""
    times = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            step()  # fills the caches, which the candidate before has used; the first one compiles
            began = now_ms(mesh)
            for _ in range(STEPS):
                step()
            times[name].append((now_ms(mesh) - began) / STEPS)
    return times


def table(times: dict) -> str:
    """A line per candidate: the median of its times, and of the ratios of its time to ours (above
    1: ours is faster), with the lowest and the highest ratio."""
    lines = []
    for name, own in times.items():
        ratios = sorted(b / a for a, b in zip(times["ours"], own))
        speed = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})"
        lines.append(f"{name:6} {statistics.median(own):9,.1f} ms a step | / ours {speed}")
    return "\n".join(lines)


def compare(plan: Plan, mesh: Mesh) -> str:
    config = plan.config
    shape = (2, config.batch_size, config.block_size)
    batch = torch.randint(config.vocab_size, shape, device=mesh.device)  # inputs and targets
    steps = {"ours": our_step(plan, mesh, batch), "fsdp2": fsdp2_step(plan, mesh, batch)}
    if mesh.world_size > 1:
        steps["bound"] = our_step(plan, Mesh(1, mesh.device, alone=True), batch)
    return table(alternate(mesh, steps, config.repeats))


# ---- the run ----


def main(argv: list):
    everyone = launch.connect()
    with launch.alike(everyone):
        config, _ = parse([*DEFAULTS, *argv], {"minibatch": Bench})
        launch.check_mesh(config, everyone.world_size)
        launch.resolve_device(config)
        plan = Plan(config, MiniBatch, config.vocab_size, everyone.world_size)
    mesh = launch.make_mesh(config, everyone)
    print(f"{mesh.replicas} replicas x {mesh.shards} shards, {config.dtype}, {plan.model_config}")
    print(compare(plan, mesh), flush=True)
    launch.leave_together()


if __name__ == "__main__":
    run_command("bench.py", lambda: main(sys.argv[1:]))
