"""Speed: a step of this repository beside torch's FSDP2 and beside no communication at all.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m lab.bench --shards 2  # mesh 1x2
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 -m lab.bench --shards 2  # mesh 2x2
    python -m lab.bench --device cuda --model 124m --vocab_size 50304 --compile         # one GPU

    ours    a mini-batch step, as in train.py
    fsdp2   torch's fully_shard with the same layers, batch, dtype, fused AdamW and clipping
    bound   as many independent single processes at once as there are ranks

The speed of a machine drifts, so the candidates take turns in one run, a few steps at a time:
A B C, then B C A, and so on. A ratio is the median of the ratios of the turns. The other flags are
those of train.py, but the default is --model 10m --batch_size 2.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from config import UserError, option, parse, run_command
from mesh import Mesh
from model import Llama
from plumbing import launch
from plumbing.plan import Plan
from shard import AdamW, ShardedModel
from train import METHODS

LR, DECAY, CLIP = 1e-3, 0.1, 1.0
DEFAULTS = "--model 10m --batch_size 2 --method minibatch".split()
USED = "shards replicas device backend dtype compile recompute timeout_s model n_layer n_head"
USED = set(f"{USED} n_embd block_size n_hidden rope_base norm_eps batch_size method".split())


@dataclass
class Flags:
    """The benchmark's flags, beside train.py's."""

    repeats: int = option(5, "turns", low=1, group="benchmark")
    steps: int = option(2, "timed steps per turn", low=1)
    vocab_size: int = option(257, "of the model; 257: bytes", low=2)
    json: str = option("out/bench.json", "file for the rows")
    limits_link = False  # no link is simulated


# ---- the candidates: each call is one step ----


def our_step(plan: Plan, mesh: Mesh, batch: torch.Tensor):
    """A step of mini-batch as in train.py."""
    model = ShardedModel(plan.model_config, mesh, plan.dtype, recompute=plan.config.recompute)
    if plan.config.compile:
        for layer in model.layers:
            layer.compile()
    optimizer = AdamW(model, DECAY, (0.9, 0.999))  # torch's default
    optimizer.lr = LR

    def step():
        loss = model.forward(*batch)
        model.backward(1 / mesh.world_size, sum_replicas=True)
        model.step_metrics(loss, 0.0, averaged=True)
        model.clip_gradient(CLIP)
        optimizer.step()
        model.invalidate_gathered()

    return step


def fsdp2_step(plan: Plan, mesh: Mesh, batch: torch.Tensor):
    """The same with torch's fully_shard, on the same mesh and backend."""
    backend = "gloo"
    if mesh.device.type == "cuda" and plan.config.backend == "nccl":
        backend = "nccl"
    if not dist.is_initialized():  # one rank
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sizes = {"replica": mesh.replicas, "shard": mesh.shards}
    if mesh.replicas == 1:
        del sizes["replica"]
    grid = init_device_mesh(
        mesh.device.type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=dict.fromkeys(sizes, backend),
    )
    model = Llama(plan.model_config, seed=0).to(mesh.device)
    policy = MixedPrecisionPolicy(param_dtype=plan.dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        if plan.config.compile:
            layer.compile()
        last = layer is model.layers[-1]  # stays gathered: its backward comes next
        fully_shard(layer, mesh=grid, mp_policy=policy, reshard_after_forward=not last)
    fully_shard(model, mesh=grid, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def step():
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- timing ----


def now_ms(mesh) -> float:
    """When all ranks have done their work."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return 1e3 * time.perf_counter()


def alternate(mesh, steps: dict, config) -> dict:
    """name -> milliseconds per step in each turn. Each turn begins with another candidate."""
    for step in [*steps.values()] * 2:
        step()
    times = {name: [] for name in steps}
    names = list(steps)
    for _ in range(config.repeats):
        for name in names:
            steps[name]()  # fills the caches, which the candidate before has used
            began = now_ms(mesh)
            for _ in range(config.steps):
                steps[name]()
            times[name].append((now_ms(mesh) - began) / config.steps)
        names.append(names.pop(0))
    return times


def speedups(times: dict) -> dict:
    """Medians; the speed of the first candidate over each other one (above 1: faster), and its
    lowest and highest."""
    ours, *others = times
    row = {f"{name}_ms": statistics.median(times[name]) for name in times}
    for other in others:
        name = f"over_{other}"
        if other == "bound":
            name = "of_bound"
        ratios = sorted(b / a for a, b in zip(times[ours], times[other]))
        row[name] = statistics.median(ratios)
        row[f"{name}_range"] = f"{ratios[0]:.2f}..{ratios[-1]:.2f}"
    return row


def compare(plan: Plan, mesh: Mesh, batch: torch.Tensor) -> dict:
    """The row of the table."""
    steps = {"ours": our_step(plan, mesh, batch), "fsdp2": fsdp2_step(plan, mesh, batch)}
    if mesh.world_size > 1:
        steps["bound"] = our_step(plan, Mesh(1, mesh.device, alone=True), batch)
    row = speedups(alternate(mesh, steps, plan.config))
    tokens = mesh.world_size * plan.tokens_per_micro_step
    return row | {"tokens_per_s": 1e3 * tokens / row["ours_ms"]}


# ---- the run ----


def read_config(argv: list, world_size: int):
    """The flags. Raises UserError."""
    config, given = parse([*DEFAULTS, *argv], METHODS, Flags)
    refused = given.keys() - USED - Flags.__dataclass_fields__.keys()
    if config.method != "minibatch":
        refused.add("method")
    if refused:
        raise UserError(f"--{min(refused)}: it has no effect on the benchmark")
    launch.check_mesh(config, world_size)
    launch.resolve_device(config)
    return config


def main(argv: list):
    everyone = launch.connect()
    with launch.alike(everyone):
        config = read_config(argv, everyone.world_size)
        plan = Plan(config, METHODS["minibatch"], config.vocab_size, everyone.world_size)
        plan.check_memory()
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        open(config.json, "a").close()  # is it possible? Now, not after the measurements
    mesh = launch.make_mesh(config, everyone)
    shape = (2, config.batch_size, config.block_size)
    batch = torch.randint(config.vocab_size, shape, device=mesh.device)  # inputs and targets
    row = compare(plan, mesh, batch)
    if mesh.rank == 0:
        print(f"{mesh.replicas} replicas x {mesh.shards} shards, {config.dtype}, ", end="")
        print(f"{plan.n_params:,} parameters, {shape[1]} x {shape[2]} tokens per rank")
        for name, x in row.items():
            if not isinstance(x, str):
                x = f"{x:,.4g}"
            print(f"{name:>16}  {x}")
        record = {"command": sys.argv, "torch": torch.__version__, "device": mesh.device.type}
        if mesh.device.type == "cuda":
            record["device"] = torch.cuda.get_device_name()
        record |= {"config": vars(config), "n_params": plan.n_params, "rows": [row]}
        Path(config.json).write_text(json.dumps(record, indent=1))
        print(f"rows in {config.json}", flush=True)
    launch.leave_together()


if __name__ == "__main__":
    run_command("bench.py", lambda: main(sys.argv[1:]))
