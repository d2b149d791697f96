"""Speed: a step of this repository beside torch's FSDP2 and beside no communication at all.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m lab.bench --shards 2  # mesh 1x2
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 -m lab.bench --shards 2  # mesh 2x2
    python -m lab.bench --device cuda --model 124m --vocab_size 50304 --compile         # one GPU

    ours    a mini-batch step, as in train.py
    fsdp2   torch's fully_shard with the same layers, batch, dtype, fused AdamW and clipping
    plain   on one CPU rank, in place of fsdp2: an ordinary training loop
    bound   as many independent single processes at once as there are ranks

The speed of a machine drifts, so the candidates take turns in one run, a few steps at a time:
A B C, then B C A, and so on. A ratio is the median of the ratios of the turns. The other flags are
those of train.py, but the default is --model 10m --batch_size 2.
"""

import dataclasses
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

import simulate
from mesh import Mesh
from model import Llama
from plumbing import launch
from plumbing.config import UserError, option, parse, run_command
from plumbing.plan import Plan
from shard import AdamW, ShardedModel
from train import METHODS

LR, DECAY, CLIP = 1e-3, 0.1, 1.0
NO_EFFECT = {f.name for f in dataclasses.fields(simulate.Config)}
NO_EFFECT |= {"method", "resume", "dry_run", "accum", "tokens_per_step", "init_from", "timeline"}


@dataclass
class Flags(simulate.Config):
    """The benchmark's flags, beside train.py's."""

    repeats: int = option(5, "turns", low=1, group="benchmark")
    steps: int = option(2, "timed steps per turn", low=1)
    vocab_size: int = option(257, "of the model; 257: bytes", low=2)
    json: str = option("out/bench.json", "file for the rows")


# ---- the candidates: each call is one step ----


class OurStep:
    """A step of mini-batch as in train.py."""

    def __init__(self, plan: Plan, mesh: Mesh, batch: torch.Tensor):
        config, self.mesh, self.batch = plan.config, mesh, batch
        recompute = config.recompute
        self.model = ShardedModel(plan.model_config, mesh, plan.dtype, recompute=recompute)
        for layer in self.model.layers if config.compile else ():
            layer.compile()
        self.optimizer = AdamW(self.model, DECAY, (0.9, 0.999))  # torch's default
        self.optimizer.lr = LR

    def __call__(self):
        model = self.model
        loss = model.forward(*self.batch)
        model.backward(1 / self.mesh.world_size, average_replicas=True)
        metrics = model.step_metrics(loss, 0.0, averaged=True)
        self.optimizer.step(model.clip_gradient(metrics.norm, CLIP))
        model.invalidate_gathered()


def torch_step(plan: Plan, mesh: Mesh, batch: torch.Tensor) -> dict:
    """The same with torch's own means: FSDP2 or, on one CPU rank, whole fp32 parameters and
    autocast (as in nanoGPT)."""
    config, dtype = plan.config, plan.dtype
    model = Llama(plan.model_config).to(mesh.device)
    for layer in model.layers if config.compile else ():
        layer.compile()
    sharded = mesh.world_size > 1 or mesh.device.type == "cuda"
    if sharded:
        if not dist.is_initialized():
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        names = ("replica", "shard") if mesh.replicas > 1 else ("shard",)
        nccl = mesh.device.type == "cuda" and config.backend == "nccl"
        backend = "nccl" if nccl else "gloo"
        grid = init_device_mesh(
            mesh.device.type, (mesh.replicas, mesh.shards)[-len(names) :], mesh_dim_names=names,
            backend_override=dict.fromkeys(names, backend),
        )  # fmt: skip
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in model.layers:  # the last one stays gathered: its backward comes next
            last = layer is model.layers[-1]
            fully_shard(layer, mesh=grid, mp_policy=policy, reshard_after_forward=not last)
        fully_shard(model, mesh=grid, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    cast = not sharded and dtype == torch.bfloat16

    def step():
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=cast):
            loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return {"fsdp2" if sharded else "plain": step}


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
    times, names = {name: [] for name in steps}, list(steps)
    for turn in range(config.repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            steps[name]()  # fills the caches, which the candidate before has used
            began = now_ms(mesh)
            for _ in range(config.steps):
                steps[name]()
            times[name].append((now_ms(mesh) - began) / config.steps)
    return times


def speedups(times: dict) -> dict:
    """Medians; the speed of the first candidate over each other one (above 1: faster), and its
    lowest and highest."""
    ours, *others = times
    row = {f"{name}_ms": statistics.median(times[name]) for name in times}
    for other in others:
        name = "of_bound" if other == "bound" else f"over_{other}"
        ratios = sorted(b / a for a, b in zip(times[ours], times[other]))
        row[name] = statistics.median(ratios)
        row[f"{name}_range"] = f"{ratios[0]:.2f}..{ratios[-1]:.2f}"
    return row


def compare(plan: Plan, mesh: Mesh, batch: torch.Tensor) -> dict:
    """The row of the table."""
    steps = {"ours": OurStep(plan, mesh, batch)}
    steps |= torch_step(plan, mesh, batch)
    if mesh.world_size > 1:
        steps["bound"] = OurStep(plan, Mesh(1, mesh.device, alone=True), batch)
    row = speedups(alternate(mesh, steps, plan.config))
    tokens = mesh.world_size * plan.tokens_per_micro_step
    return row | {"tokens_per_s": 1e3 * tokens / row["ours_ms"]}


def show(row: dict):
    text = lambda x: x if isinstance(x, str) else f"{x:.3g}" if abs(x) < 100 else f"{x:,.0f}"
    for line in row, {name: text(x) for name, x in row.items()}.values():
        widths = (max(10, len(name)) for name in row)
        print("  ".join(f"{x:>{width}}" for x, width in zip(line, widths)), flush=True)


# ---- the run ----


def read_config(argv: list, world_size: int):
    """The flags. Raises UserError."""
    argv = ["--model", "10m", "--batch_size", "2", *argv]
    config, given = parse([*argv, "--method", "minibatch"], METHODS, Flags)
    if refused := NO_EFFECT & parse(argv, METHODS, Flags)[1].keys():
        raise UserError(f"--{min(refused)}: it has no effect on the benchmark")
    launch.check_mesh(config, world_size)
    launch.resolve_device(config)
    return config


def main(argv: list):
    rank, world_size = launch.environment()
    store = launch.rendezvous(rank, world_size)
    with launch.alike(store, "flags", rank, world_size):
        config = read_config(argv, world_size)
        plan = Plan(config, METHODS["minibatch"], config.vocab_size, world_size)
        plan.check_memory()
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        open(config.json, "a").close()  # is it possible? Now, not after the measurements
    mesh = launch.make_mesh(config, store)
    shape = (2, config.batch_size, config.block_size)
    batch = torch.randint(config.vocab_size, shape, device=mesh.device)  # inputs and targets
    row = compare(plan, mesh, batch)
    n_params, tokens = plan.n_params, f"{config.batch_size} x {config.block_size} tokens"
    print(f"{mesh.replicas} replicas x {mesh.shards} shards, {config.dtype}, ", end="")
    print(f"{n_params:,} parameters, {tokens} per rank")
    show(row)
    if rank == 0:
        name = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu"
        record = {"command": sys.argv, "torch": torch.__version__, "device": name}
        record |= {"config": vars(config), "n_params": n_params, "rows": [row]}
        Path(config.json).write_text(json.dumps(record, indent=1))
        print(f"rows in {config.json}", flush=True)


if __name__ == "__main__":
    run_command("bench.py", lambda: main(sys.argv[1:]))
