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
    round     tau steps of EDiT with their sync, beside the bound                 any
    memory    the peak per rank, beside what a rank must hold (plan.py)           any

The speed of a machine drifts, so the candidates take turns in one run, a few steps at a time:
A B C, then B C A, and so on. A ratio is the median of the ratios of the turns. The flags of model,
batch, mesh and device, --compile, --recompute, --tau, --offload and --link_mbps are train.py's.
"""

import ctypes
import dataclasses
import gc
import json
import os
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
from plumbing.config import Parser, UserError, check_limits, explain, fill, parse
from plumbing.plan import Plan
from shard import ShardedModel
from train import METHODS

PARTS = ("step", "sync", "round", "memory")
ALONE = ("step", "round", "memory")  # possible on one rank
LR, DECAY, CLIP, NEVER = 1e-3, 0.1, 1.0, 2**30


@dataclass
class Case:
    """A model, a batch and a dtype on a mesh."""

    config: object  # plumbing.config.Config
    method_config: object
    simulation: simulate.Config
    vocab_size: int
    mesh: Mesh

    def __post_init__(self):
        self.config = dataclasses.replace(self.config, shards=self.mesh.shards)
        self.plan = Plan(
            self.config, METHODS["edit"], self.method_config, self.simulation, self.vocab_size,
            self.mesh.world_size,
        )  # fmt: skip
        shape = (2, self.config.batch_size, self.config.block_size)
        self.tokens, self.targets = torch.randint(self.vocab_size, shape, device=self.mesh.device)

    def replace(self, **flags):
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **flags))

    def on_mesh(self, shards: int):
        """The same on a new mesh of the same ranks."""
        mesh = self.mesh
        mesh = Mesh(shards, mesh.device, self.config.timeout_s, mesh.backend)
        return dataclasses.replace(self, mesh=mesh)

    def alone(self):
        """The same on every rank by itself, without communication."""
        return dataclasses.replace(self, mesh=Mesh(1, self.mesh.device, alone=True))

    def compiled(self, model):
        for layer in model.layers if self.config.compile else []:
            layer.compile()
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

    def __init__(self, case: Case, method: str = "minibatch", tau: int = NEVER):
        plan, recompute, self.case = case.plan, case.config.recompute, case
        model = ShardedModel(plan.model_config, case.mesh, plan.dtype, recompute=recompute)
        self.model, self.optimizer = case.compiled(model), model.adamw(DECAY, lr=LR)
        values = {"sync_warmup_steps": 0, "tau": tau, "offload": case.method_config.offload}
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
        method.after_step()


def torch_step(case):
    """The same with torch's own means: FSDP2 or, on one rank, whole fp32 parameters and autocast
    (as in nanoGPT)."""
    mesh, dtype = case.mesh, case.plan.dtype
    model = case.compiled(Llama(case.plan.model_config).to(mesh.device))
    if mesh.world_size > 1:
        names = ("replica", "shard") if mesh.replicas > 1 else ("shard",)
        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
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


def alternate(mesh, steps: dict, repeats: int, count: int) -> dict:
    """name -> milliseconds per step in each of `repeats` turns. Each turn begins with another
    candidate."""
    gc.collect()  # the models of earlier rows
    for step in [*steps.values()] * 2:
        step()
    times, names = {name: [] for name in steps}, list(steps)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            steps[name]()  # fills the caches, which the candidate before has used
            times[name].append(timed_ms(mesh, steps[name], count))
    return times


def speedups(times: dict) -> dict:
    """Medians, and the speed of the first candidate over each other one: above 1 it is faster."""
    ours, *others = times
    row = {f"{name}_ms": statistics.median(times[name]) for name in times}
    for other in others:
        name = "of_bound" if other == "bound" else f"over_{other}"
        row[name] = statistics.median(b / a for a, b in zip(times[ours], times[other]))
    return row


def compare(case, args) -> dict:
    """One row of the part step."""
    mesh, steps = case.mesh, {"ours": OurStep(case)}
    steps["fsdp2" if mesh.world_size > 1 else "plain"] = torch_step(case)
    if mesh.world_size > 1:
        steps["bound"] = OurStep(case.alone())
    row = case.describe() | speedups(alternate(mesh, steps, args.repeats, args.steps))
    if "bound" in steps:
        overhead_ms = row["ours_ms"] - row["bound_ms"]
        row["overhead_ms_per_layer"] = overhead_ms / (case.config.n_layer + 2)
    tokens = mesh.world_size * case.plan.tokens_per_micro_step
    row["tokens_per_s"] = 1e3 * tokens / row["ours_ms"]
    return row


# ---- the parts: each yields rows ----


def part_step(case, args):
    for dtype in args.dtypes:
        yield compare(case.replace(dtype=dtype), args)


def part_sync(case, args):
    """The time that a sync of EDiT and of DiLoCo stalls the training. bound: for DiLoCo the
    all-reduce of all parameters; for EDiT the part of it that a forward cannot hide."""
    case = case if case.mesh.replicas > 1 else case.on_mesh(1)
    mesh, steps = case.mesh, {name: OurStep(case, name) for name in ("edit", "diloco")}
    if case.simulation.limits_link:
        mesh.simulated_link = simulate.SimulatedLink(case.simulation, mesh.shards, mesh.device)
    model = steps["edit"].model
    vector, first_layer = torch.zeros_like(model.master), case.plan.layouts[0].shard_size
    # [sync] all-reduce, sum P/N and then a layer's P/N fp32, once per turn, for comparison
    wire = lambda: mesh.all_reduce(vector, mesh.sync).wait()
    first = lambda: mesh.all_reduce(vector[:first_layer], mesh.sync).wait()
    forward = lambda: model.forward(case.tokens, case.targets, train=False)
    times = {name: [] for name in ("edit", "diloco", "step", "forward", "wire", "first")}
    for turn in range(args.repeats + 2):
        for name, step in steps.items():
            times["step"].append(timed_ms(mesh, step))
            step.method.end_round()
            step()  # completes EDiT's sync layer by layer
            times[name].append(step.method.stats()["stall_ms"])
        for name, run in ("forward", forward), ("wire", wire), ("first", first):
            times[name].append(timed_ms(mesh, run))
        if turn < 2:  # warm-up
            [values.clear() for values in times.values()]
    mesh.simulated_link = None
    ms = {name: statistics.median(values) for name, values in times.items()}
    hidden = max(ms["first"], ms["wire"] - ms["forward"])
    for name in steps:
        row = case.describe() | {
            "method": name, "link_mbps": case.simulation.link_mbps, "stall_ms": ms[name],
            "bound_ms": hidden if name == "edit" else ms["wire"], "wire_ms": ms["wire"],
            "step_ms": ms["step"], "forward_ms": ms["forward"],
            "stall_in_steps": ms[name] / ms["step"],
        }  # fmt: skip
        yield row | {f"tau {tau}": ms[name] / (tau * ms["step"]) for tau in (8, 32, 128)}


def part_round(case, args):
    case, tau = case if case.mesh.replicas > 1 else case.on_mesh(1), case.method_config.tau
    steps = {"edit": OurStep(case, "edit", tau), "bound": OurStep(case.alone())}
    times = alternate(case.mesh, steps, args.repeats, tau)
    yield case.describe() | {"tau": tau} | speedups(times)


def part_memory(case, args):
    """The peak of two steps and a sync, and the same on one rank. There, what is not held for good
    are the activations, which are as large in both."""
    # How much freed memory glibc keeps otherwise depends on what came before.
    launch.keep_freed_memory(False)
    for dtype in args.dtypes:
        one, all_ = case.alone().replace(dtype=dtype), case.replace(dtype=dtype)
        peak_bytes(one), peak_bytes(all_)  # code and scratch memory, allocated once
        held = sum(all_.plan.memory().values())
        activations = peak_bytes(one) - sum(one.plan.memory().values())
        peak = peak_bytes(all_)
        yield all_.describe() | {
            "peak_MB": peak / 1e6, "held_MB": held / 1e6, "activations_MB": activations / 1e6,
            "planned_MB": all_.plan.activations() / 1e6,
            "peak_over_formula": peak / (held + all_.plan.seen() + activations),
        }  # fmt: skip
    launch.keep_freed_memory()


def peak_bytes(case) -> int:
    """Above what there was before. A new mesh, because the slots of shm stay with the groups."""
    case = case.on_mesh(case.mesh.shards) if case.mesh.world_size > 1 else case
    gc.collect()
    cuda = case.mesh.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present value
        before = status_bytes("VmRSS")
    step = OurStep(case, "edit", tau=2)
    step(), step(), step()
    return torch.cuda.max_memory_allocated() - before if cuda else status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# ---- the run ----


def show(rows: list) -> None:
    """The last row, below a heading if its columns are new."""
    row = rows[-1]
    if len(rows) == 1 or rows[-2].keys() != row.keys():
        print("\n" + "  ".join(f"{name:>10}" for name in row))
    text = lambda x: x if isinstance(x, str) else f"{x:.3g}" if abs(x) < 100 else f"{x:,.0f}"
    print("  ".join(f"{text(x):>{max(10, len(name))}}" for name, x in row.items()), flush=True)


def read_arguments(argv: list, world_size: int) -> tuple:
    """(the benchmark's flags, the Config of train.py, the method's, the simulation's), checked."""
    parser = Parser(description="Speed, memory, the cost of a sync. Also takes train.py's flags.")
    add, possible = parser.add_argument, PARTS if world_size > 1 else ALONE
    add("--parts", default=",".join(possible), help="some of " + ",".join(possible))
    add("--repeats", type=int, default=5, help="turns (default: 5)")
    add("--steps", type=int, default=2, help="steps per turn (default: 2)")
    add("--vocab_size", type=int, default=257, help="of the model (default: 257, bytes)")
    add("--json", default="out/bench.json", help="file for the rows (default: out/bench.json)")
    args, rest = parser.parse_known_args(argv)
    args.parts = args.parts.split(",")
    for part in args.parts:
        if part not in possible:
            options = ", ".join(possible)
            raise UserError(f"--parts {part[:100]}: with {world_size} ranks there are {options}")
    for name, low in ("repeats", 1), ("steps", 1), ("vocab_size", 2):
        check_limits(name, getattr(args, name), {"low": low})
    defaults = ["--model", "10m", "--batch_size", "2", "--tau", "32"]
    config, *others, given = parse(defaults + rest, METHODS, simulate.Config)
    if refused := {"method", "resume", "dry_run"} & given.keys():
        raise UserError(f"--{min(refused)}: the benchmark does not take it")
    launch.check_mesh(config, world_size)
    automatic = config.dtype == "auto"
    launch.resolve_device(config)
    args.dtypes = [config.dtype]
    if automatic and config.dtype == "bf16":
        args.dtypes, config.dtype = ["fp32", "bf16"], "fp32"
    return args, config, *others


def measure(argv: list, shutdown):
    rank, world_size = launch.environment()
    store, error = launch.rendezvous(rank, world_size), ""
    shutdown.store = store
    try:
        args, config, method_config, simulation = read_arguments(argv, world_size)
        if rank == 0:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            open(args.json, "a").close()  # is it possible? Now, not after the measurements
    except Exception as wrong:
        error = explain(wrong)[1].removeprefix("error: ")
    launch.check_same_config(store, "flags", rank, world_size, error)
    launch.keep_freed_memory()  # as in train.py; here it also speeds up the others
    device, backend = launch.open_groups(config, simulation, store)
    mesh = Mesh(config.shards, device, config.timeout_s, backend)
    case, rows = Case(config, method_config, simulation, args.vocab_size, mesh), {}
    case.plan.check_memory()
    for part in sorted(args.parts, key="memory".__ne__):  # first, before others have used some
        print(f"\n{part}", end="")
        rows[part] = []
        for row in globals()[f"part_{part}"](case, args):
            rows[part].append(row)
            show(rows[part])
    if rank == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        record = {"command": sys.argv, "torch": torch.__version__, "device": name, "parts": rows}
        Path(args.json).write_text(json.dumps(record, indent=1))
        print(f"\nrows in {args.json}", flush=True)


def main(argv: list):
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")
    shutdown = launch.Shutdown("bench.py")
    try:
        measure(argv, shutdown)
    except Exception as error:
        shutdown.explain(error, "")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
