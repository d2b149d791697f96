"""Speed and memory: this repository's step beside torch's FSDP2, beside no communication at all,
and the cost of a sync.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 bench.py --shards 2  # mesh 1x2
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 bench.py --shards 2  # mesh 2x2
    python bench.py --device cuda --model 124m --vocab_size 50304 --compile         # one GPU

    part      what is compared                                                    needs
    step      ours: a mini-batch step; fsdp2: torch's fully_shard (HSDP mesh)     any
              with the same layers, batch, dtype, fused AdamW and clipping;
              bound: as many independent single processes at once.
              One rank: plain, an ordinary training loop
    sync      a sync of EDiT and of DiLoCo, beside an all-reduce of the same      two ranks
              bytes (with N = 1 if there is only one replica otherwise)
    memory    the peak per rank, beside what a rank must hold (plan.py)           any

The speed of a machine drifts, so the candidates take turns in one run, a few steps at a time:
A B C, then B C A, and so on. A ratio is the median of the ratios of the turns. The other flags are
train.py's. Without --dtype, a device with native bf16 is measured in fp32 and in bf16.
"""

import ctypes
import dataclasses
import gc
import json
import re
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
from plumbing.config import UserError, fill, option, parse
from plumbing.plan import Plan
from shard import ShardedModel
from train import METHODS

LR, DECAY, CLIP, NEVER = 1e-3, 0.1, 1.0, 2**30


@dataclass
class Flags(simulate.Config):
    """The benchmark's flags, beside train.py's."""

    parts: str = option("", "some of step,sync,memory (default: all that are possible)")
    repeats: int = option(5, "turns", low=1)
    steps: int = option(2, "steps per turn", low=1)
    vocab_size: int = option(257, "of the model; 257: bytes", low=2)
    json: str = option("out/bench.json", "file for the rows")


@dataclass
class Case:
    """A model, a batch and a dtype on a mesh."""

    config: object  # plumbing.config.Config
    method_config: object
    flags: Flags
    mesh: Mesh

    def __post_init__(self):
        mesh, flags, vocab_size = self.mesh, self.flags, self.flags.vocab_size
        config = self.config = dataclasses.replace(self.config, shards=mesh.shards)
        self.plan = Plan(
            config, METHODS["edit"], self.method_config, flags, vocab_size, mesh.world_size
        )
        shape = (2, config.batch_size, config.block_size)
        self.tokens, self.targets = torch.randint(vocab_size, shape, device=mesh.device)

    def alone(self):
        """The same on every rank by itself, without communication."""
        return dataclasses.replace(self, mesh=Mesh(1, self.mesh.device, alone=True))

    def compiled(self, model):
        if self.config.compile:
            launch.compile_layers(model.layers)
        return model

    def describe(self) -> dict:
        config = self.config
        return {
            "mesh": f"{self.mesh.replicas}x{self.mesh.shards}", "dtype": config.dtype,
            "n_layer": config.n_layer, "n_embd": config.n_embd,
            "tokens": f"{config.batch_size}x{config.block_size}", "n_params": self.plan.n_params,
        }  # fmt: skip


# ---- the candidates: functions that return a function that takes one step ----


class OurStep:
    """A step as in train.py, without its warm-up steps."""

    def __init__(self, case: Case, method: str = "minibatch"):
        plan, recompute, self.case = case.plan, case.config.recompute, case
        model = ShardedModel(plan.model_config, case.mesh, plan.dtype, recompute=recompute)
        self.model, self.optimizer = case.compiled(model), model.adamw(DECAY, lr=LR)
        values = vars(case.method_config) | {"sync_warmup_steps": 0, "tau": NEVER}
        config = fill(METHODS[method].Config, values)
        self.method = METHODS[method](model, case.mesh, config, NEVER)

    def __call__(self):
        case, model, method = self.case, self.model, self.method
        method.before_step()
        average = method.averages_gradients
        loss = model.forward(case.tokens, case.targets)
        ranks = case.mesh.world_size if average else case.mesh.shards
        model.backward(1 / ranks, average_replicas=average)
        metrics = model.step_metrics(loss, 0.0, average)
        model.clip_gradient(metrics.norm, CLIP)
        self.optimizer.step()
        model.invalidate_gathered()
        method.after_step(LR)


def torch_step(case):
    """The same with torch's own means: FSDP2 or, on one rank, whole fp32 parameters and autocast
    (as in nanoGPT)."""
    mesh, dtype = case.mesh, case.plan.dtype
    model = case.compiled(Llama(case.plan.model_config).to(mesh.device))
    if mesh.world_size > 1:
        names = ("replica", "shard") if mesh.replicas > 1 else ("shard",)
        nccl = mesh.device.type == "cuda" and case.config.backend in ("auto", "nccl")
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
    cast = mesh.world_size == 1 and dtype == torch.bfloat16

    def step():
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=cast):
            loss = model(case.tokens, case.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- timing ----


def wait_for_all(mesh):
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def timed_ms(mesh, run, count: int = 1) -> float:
    wait_for_all(mesh)
    began = time.perf_counter()
    for _ in range(count):
        run()
    wait_for_all(mesh)
    return 1e3 * (time.perf_counter() - began) / count


def alternate(mesh, steps: dict, flags: Flags) -> dict:
    """name -> milliseconds per step in each turn. Each turn begins with another candidate."""
    gc.collect()  # the models of earlier rows
    for step in [*steps.values()] * 2:
        step()
    times, names = {name: [] for name in steps}, list(steps)
    for turn in range(flags.repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            steps[name]()  # fills the caches, which the candidate before has used
            times[name].append(timed_ms(mesh, steps[name], flags.steps))
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


# ---- the parts: each yields rows ----


def compare_steps(case):
    mesh, steps = case.mesh, {"ours": OurStep(case)}
    steps["fsdp2" if mesh.world_size > 1 else "plain"] = torch_step(case)
    if mesh.world_size > 1:
        steps["bound"] = OurStep(case.alone())
    row = speedups(alternate(mesh, steps, case.flags))
    if "bound" in steps:
        overhead_ms = row["ours_ms"] - row["bound_ms"]
        row["overhead_ms_per_layer"] = overhead_ms / (case.config.n_layer + 2)
    tokens = mesh.world_size * case.plan.tokens_per_micro_step
    row["tokens_per_s"] = 1e3 * tokens / row["ours_ms"]
    yield row


def compare_syncs(case):
    """The time that a sync of EDiT and of DiLoCo stalls the training. bound: for DiLoCo the
    all-reduce of all parameters; for EDiT the part of it that a forward cannot hide."""
    mesh, steps = case.mesh, {name: OurStep(case, name) for name in ("edit", "diloco")}
    if case.flags.limits_link:
        mesh.simulated_link = simulate.SimulatedLink(case.flags, mesh.shards, mesh.device)
    model = steps["edit"].model
    vector, first_layer = torch.zeros_like(model.master), case.plan.layouts[0].shard_size
    # [sync] all-reduce, sum P/N and then a layer's P/N fp32, once per turn, for comparison
    wire = lambda: mesh.all_reduce(vector, mesh.sync).wait()
    first = lambda: mesh.all_reduce(vector[:first_layer], mesh.sync).wait()
    forward = lambda: model.forward(case.tokens, case.targets, train=False)
    times = {name: [] for name in ("edit", "diloco", "step", "forward", "wire", "first")}
    for turn in range(case.flags.repeats + 2):
        for name, step in steps.items():
            times["step"].append(timed_ms(mesh, step))
            step.method.end_round()
            step()  # completes EDiT's sync layer by layer
            times[name].append(step.method.stats()["stall_ms"])
        for name, run in ("forward", forward), ("wire", wire), ("first", first):
            times[name].append(timed_ms(mesh, run))
        if turn < 2:  # warm-up
            [values.clear() for values in times.values()]
    ms = {name: statistics.median(values) for name, values in times.items()}
    hidden = max(ms["first"], ms["wire"] - ms["forward"])
    for name in steps:
        row = {
            "method": name, "link_mbps": case.flags.link_mbps, "stall_ms": ms[name],
            "bound_ms": hidden if name == "edit" else ms["wire"], "wire_ms": ms["wire"],
            "step_ms": ms["step"], "forward_ms": ms["forward"],
            "stall_in_steps": ms[name] / ms["step"],
        }  # fmt: skip
        yield row | {f"tau {tau}": ms[name] / (tau * ms["step"]) for tau in (8, 32, 128)}


def measure_memory(case):
    """The peak of two steps and a sync, on the mesh and on one rank alone. On one rank the peak
    minus what is held for good is the activations; on the mesh they are as large."""
    # How much freed memory glibc keeps otherwise depends on what came before.
    launch.keep_freed_memory(False)
    alone = case.alone()
    peak_bytes(alone)  # code and scratch memory, allocated once
    activations = peak_bytes(alone) - sum(alone.plan.memory().values())
    held, peak = sum(case.plan.memory().values()), peak_bytes(case)
    launch.keep_freed_memory()
    yield {
        "peak_MB": peak / 1e6, "held_MB": held / 1e6, "activations_MB": activations / 1e6,
        "planned_MB": case.plan.activations() / 1e6,
        "peak_over_formula": peak / (held + case.plan.seen() + activations),
    }  # fmt: skip


def peak_bytes(case) -> int:
    """Above what there was before."""
    gc.collect()
    cuda = case.mesh.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present value
        before = peak_rss()
    step = OurStep(case, "edit")
    step(), step()
    step.method.end_round()
    step()  # completes the sync
    return (torch.cuda.max_memory_allocated() if cuda else peak_rss()) - before


def peak_rss() -> int:
    """Bytes, since clear_refs was written."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


PARTS = {"step": compare_steps, "sync": compare_syncs, "memory": measure_memory}


# ---- the run ----


def show(part: str, rows: list):
    print(f"\n{part}\n" + "  ".join(f"{name:>10}" for name in rows[0]))
    text = lambda x: x if isinstance(x, str) else f"{x:.3g}" if abs(x) < 100 else f"{x:,.0f}"
    for row in rows:
        print("  ".join(f"{text(x):>{max(10, len(name))}}" for name, x in row.items()), flush=True)


def read_arguments(argv: list, world_size: int) -> tuple:
    """(part names, dtypes, Config of train.py, the method's, Flags), checked."""
    argv = ["--model", "10m", "--batch_size", "2", *argv]
    config, method_config, flags, given = parse(argv, METHODS, Flags)
    if refused := {"method", "resume", "dry_run"} & given.keys():
        raise UserError(f"--{min(refused)}: the benchmark does not take it")
    possible = [part for part in PARTS if part != "sync" or world_size > 1]
    parts = flags.parts.split(",") if flags.parts else possible
    for part in parts:
        if part not in possible:
            options = ", ".join(possible)
            raise UserError(f"--parts {part[:100]}: with {world_size} ranks there are {options}")
    launch.check_mesh(config, world_size)
    dtypes = [config.dtype]
    launch.resolve_device(config)
    if dtypes == ["auto"]:
        dtypes = ["fp32", "bf16"] if config.dtype == "bf16" else ["fp32"]
    return parts, dtypes, config, method_config, flags


def measure(argv: list, shutdown):
    rank, world_size = launch.environment()
    store = shutdown.store = launch.rendezvous(rank, world_size)
    parts, dtypes, config, method_config, flags = read_arguments(argv, world_size)
    Path(flags.json).parent.mkdir(parents=True, exist_ok=True)
    open(flags.json, "a").close()  # is it possible? Now, not after the measurements
    device, backend = launch.open_groups(config, flags, store)
    launch.keep_freed_memory()  # as in train.py; here it also speeds up the others
    rows = {}
    for part in sorted(parts, key="memory".__ne__):  # first, before others have used some
        rows[part] = []
        shards = 1 if part == "sync" and config.shards == world_size else config.shards
        for dtype in dtypes:
            mesh = Mesh(shards, device, config.timeout_s, backend)
            case = Case(dataclasses.replace(config, dtype=dtype), method_config, flags, mesh)
            case.plan.check_memory()
            rows[part] += [case.describe() | row for row in PARTS[part](case)]
        show(part, rows[part])
    if rank == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        record = {"command": sys.argv, "torch": torch.__version__, "device": name, "parts": rows}
        Path(flags.json).write_text(json.dumps(record, indent=1))
        print(f"\nrows in {flags.json}", flush=True)


def main(argv: list):
    launch.run_on_this_rank("bench.py", lambda shutdown: measure(argv, shutdown))


if __name__ == "__main__":
    main(sys.argv[1:])
