"""How fast, and how lean: this repository's step against torch's own FSDP2, against no
communication at all, and what a sync costs.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 bench.py --shards 2  # mesh 1x2
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 bench.py --shards 2  # mesh 2x2
    python bench.py --device cuda --model 124m --vocab_size 50304 --compile         # one GPU

    part      what is timed in turn                                               needs
    step      (a) one mini-batch step of ours, (b) FSDP2 (`fully_shard`, HSDP     any
              mesh) with the same layers, batch, dtype, fused AdamW and
              clipping, (c) the bound: as many independent single processes at
              once. One rank: a plain training loop
    growth    the same over layers, widths and meshes                             two ranks
    sync      EDiT's and DiLoCo's sync, beside a bare all-reduce of the same      two replicas
              bytes                                                               (N = 1 if need be)
    round     tau steps of EDiT with their sync, and as many without              any
              communication. One rank: what EDiT costs where there is nobody to
              synchronise with
    memory    peak per rank, beside what must be held (plan.py)                   any

All are timed A B C, B C A, ..., a few steps at a time, in one run, because a machine's speed
drifts; a ratio is the median of the ratios of one round of turns. Model, batch, --shards, --dtype,
--device, --compile, --recompute, --tau, --offload and --link_mbps are train.py's flags.
"""

import ctypes
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import simulate
from config import METHODS, has_native_bf16, parse
from flags import Parser, UserError
from mesh import Mesh
from model import Llama
from plan import Plan
from shard import ShardedModel, keep_freed_memory

PARTS = ("step", "growth", "sync", "round", "memory")
ALONE = ("step", "round", "memory")  # what one rank can do
LR, DECAY, CLIP = 1e-3, 0.1, 1.0


# ---- what is timed: each function returns one that takes a step ----


class Case:
    """A model, a batch and a dtype, on the ranks of this run."""

    def __init__(self, config, method_config, simulation, vocab_size: int, mesh):
        self.config, self.method_config = config, method_config
        self.simulation, self.mesh = simulation, mesh
        setup = SimpleNamespace(
            config=config, method_config=method_config, simulation=simulation,
            corpus=SimpleNamespace(vocab_size=vocab_size),
        )  # fmt: skip
        self.plan = Plan(setup, mesh.world_size)
        shape = (2, config.batch_size, config.block_size)
        self.tokens, self.targets = torch.randint(vocab_size, shape, device=mesh.device)

    def but(self, mesh=None, **flags):
        """The same with other flags, on another mesh."""
        mesh = mesh or self.mesh
        config = dataclasses.replace(self.config, shards=mesh.shards, **flags)
        vocab_size = self.plan.model_config.vocab_size
        return Case(config, self.method_config, self.simulation, vocab_size, mesh)

    def compiled(self, layers):
        for layer in layers if self.config.compile else []:
            layer.compile()

    def model(self):
        model = ShardedModel(
            self.plan.model_config, self.mesh, self.plan.dtype, recompute=self.config.recompute
        )
        self.compiled(model.layers)
        return model, model.adamw(DECAY, lr=LR)


def our_step(case, average: bool = True):
    model, optimizer = case.model()

    def step():
        loss = model.forward(case.tokens, case.targets)
        model.backward(1 / case.mesh.world_size, average_replicas=average)
        model.clip_gradient(CLIP, loss)
        optimizer.step()
        model.forget_gathered()

    return step


def fsdp2_step(case):
    mesh = case.mesh
    shape, names = (mesh.shards,), ("shard",)
    if mesh.replicas > 1:
        shape, names = (mesh.replicas, mesh.shards), ("replica", "shard")
    grid = init_device_mesh(mesh.device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=case.plan.dtype, reduce_dtype=torch.float32)
    model = Llama(case.plan.model_config).to(mesh.device)
    case.compiled(model.layers)
    for layer in model.layers:  # the last one is kept: its backward comes at once
        last = layer is model.layers[-1]
        fully_shard(layer, mesh=grid, mp_policy=policy, reshard_after_forward=not last)
    fully_shard(model, mesh=grid, mp_policy=policy)
    return plain_loop(case, model)


def plain_step(case):
    """One process, the ordinary way: whole fp32 parameters, autocast for bf16 (as nanoGPT does)."""
    model = Llama(case.plan.model_config).to(case.mesh.device)
    case.compiled(model.layers)
    return plain_loop(case, model, autocast=case.plan.dtype == torch.bfloat16)


def plain_loop(case, model, autocast: bool = False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def step():
        with torch.autocast(case.mesh.device.type, torch.bfloat16, enabled=autocast):
            loss = model(case.tokens, case.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def edit_step(case, method_name: str = "edit"):
    """A step as train.py takes it in the local phase. Returns (step, method, model)."""
    model, optimizer = case.model()
    method_class, method_config = METHODS[method_name]
    tau, offload = case.method_config.tau, case.method_config.offload
    config = method_config(sync_warmup_steps=0, tau=tau, offload=offload)
    method = method_class(model, case.mesh, config, 1 << 30, None)
    count = 0

    def step():
        nonlocal count
        method.before_step(count)
        loss = model.forward(case.tokens, case.targets)
        model.backward(1 / case.mesh.shards)
        model.clip_gradient(CLIP, loss)
        optimizer.step()
        model.forget_gathered()
        method.after_step(count)
        count += 1

    return step, method, model


# ---- timing ----


def in_step(mesh):
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def alternate(mesh, steps: dict, repeats: int, count: int) -> dict:
    """Milliseconds a step, name -> list of `repeats`. Every turn begins with another one."""
    for step in [*steps.values()] * 2:
        step()
    times, names = {name: [] for name in steps}, list(steps)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            steps[name]()  # whoever was here before has taken the caches
            in_step(mesh)
            began = time.perf_counter()
            for _ in range(count):
                steps[name]()
            in_step(mesh)
            times[name].append(1e3 * (time.perf_counter() - began) / count)
    return times


def ratio(times, above: str, below: str) -> float:
    return statistics.median(a / b for a, b in zip(times[above], times[below]))


def compare(case, args) -> dict:
    """Ours, and what it is measured against; on one rank the plain loop,
    on several FSDP2 and the bound."""
    mesh, steps = case.mesh, {"ours": our_step(case)}
    if mesh.world_size == 1:
        steps["plain"] = plain_step(case)
    else:
        steps["fsdp2"] = fsdp2_step(case)
        steps["bound"] = our_step(case.but(mesh=Mesh(1, mesh.device, alone=True)))
    times = alternate(mesh, steps, args.repeats, args.steps)
    row = describe(case) | {f"{name}_ms": statistics.median(times[name]) for name in times}
    others = [name for name in ("plain", "fsdp2") if name in times]
    row |= {f"over_{name}": ratio(times, name, "ours") for name in others}
    if "bound" in times:
        row["of_bound"] = ratio(times, "bound", "ours")
        overhead_ms = row["ours_ms"] - row["bound_ms"]
        row["overhead_ms_per_layer"] = overhead_ms / (case.config.n_layer + 2)
    tokens = mesh.world_size * case.plan.tokens_per_micro_step
    row["tokens_per_s"] = 1e3 * tokens / row["ours_ms"]
    matrices = case.plan.n_params - case.plan.layouts[0].used  # the embedding is looked up
    flops = 6 * matrices + 6 * case.config.n_layer * case.config.block_size * case.config.n_embd
    row["tflops_per_rank"] = flops * row["tokens_per_s"] / mesh.world_size / 1e12
    if args.peak_tflops:
        row["mfu"] = row["tflops_per_rank"] / args.peak_tflops
    del steps
    gc.collect()
    return row


def describe(case) -> dict:
    config = case.config
    return {
        "mesh": f"{case.mesh.replicas}x{case.mesh.shards}", "dtype": config.dtype,
        "n_layer": config.n_layer, "n_embd": config.n_embd,
        "tokens": f"{config.batch_size}x{config.block_size}", "n_params": case.plan.n_params,
    }  # fmt: skip


# ---- the parts: each yields rows ----


def part_step(case, args):
    for dtype in args.dtypes:
        yield compare(case.but(dtype=dtype), args)
    if case.mesh.world_size == 1 and len(args.dtypes) == 2:
        fp32, bf16 = (case.but(dtype=dtype) for dtype in ("fp32", "bf16"))
        steps = {"ours": our_step(bf16), "plain": plain_step(fp32)}
        times = alternate(case.mesh, steps, args.repeats, args.steps)
        middle = statistics.median(times["plain"])
        over = ratio(times, "plain", "ours")
        yield describe(bf16) | {"fp32_plain_ms": middle, "over_fp32_plain": over}


def part_growth(case, args):
    meshes = [n for n in range(1, case.mesh.world_size + 1) if case.mesh.world_size % n == 0]
    for dtype in args.dtypes:
        for layers in (2, 4, 8, 16):
            yield compare(case.but(dtype=dtype, n_layer=layers, n_embd=256, n_head=4), args)
        for width in (128, 512, 1024):  # 256: see above
            yield compare(case.but(dtype=dtype, n_layer=2, n_embd=width, n_head=width // 64), args)
        yield compare(case.but(dtype=dtype, n_layer=12, n_embd=128, n_head=2), args)
        for shards in meshes:
            mesh = Mesh(shards, case.mesh.device)
            yield compare(case.but(mesh=mesh, dtype=dtype), args)


def with_replicas(case):
    return case if case.mesh.replicas > 1 else case.but(mesh=Mesh(1, case.mesh.device))


def part_sync(case, args):
    """Stalls of EDiT and DiLoCo in turn, the wire alone, and the bound: what a forward
    cannot hide."""
    case = with_replicas(case)
    mesh, steps = case.mesh, {name: edit_step(case, name) for name in ("edit", "diloco")}
    if case.simulation.link_mbps or case.simulation.link_latency_ms:
        mesh.wire = simulate.Wire(case.simulation, mesh.shards, mesh.works_on)
    stalls, wires, firsts, forwards, plains = {"edit": [], "diloco": []}, [], [], [], []
    for step, *_ in steps.values():
        step(), step()
    vector = torch.zeros_like(steps["edit"][2].master)
    layers = [layout.piece for layout in case.plan.layouts]
    for _ in range(args.repeats + 1):
        for name, (step, method, _) in steps.items():
            method.finish()
            method.stats()
            in_step(mesh)
            began = time.perf_counter()
            step()
            in_step(mesh)
            plains.append(1e3 * (time.perf_counter() - began))
            if name == "edit":
                method.start()
                step()  # completes it, layer by layer
            else:
                method.sync()
            stalls[name].append(method.stats()["stall_ms"])
            in_step(mesh)
        began = time.perf_counter()
        steps["edit"][2].forward(case.tokens, case.targets, train=False)
        in_step(mesh)
        forwards.append(1e3 * (time.perf_counter() - began))
        for times, part in ((wires, vector), (firsts, vector[: layers[0]])):
            in_step(mesh)
            began = time.perf_counter()
            # [sync] all-reduce, sum P/N and then a layer's P/N fp32, once per turn, for comparison
            mesh.all_reduce(part, mesh.sync, many=True).wait()
            times.append(1e3 * (time.perf_counter() - began))
    mesh.wire = None
    middle = lambda times: statistics.median(times[1:])
    step_ms, wire, forward = middle(plains), middle(wires), middle(forwards)
    hidden = max(middle(firsts), wire - forward)
    for name in stalls:
        stall, bound = middle(stalls[name]), hidden if name == "edit" else wire
        row = describe(case) | {
            "method": name, "link_mbps": case.simulation.link_mbps,
            "stall_ms": stall, "bound_ms": bound, "wire_ms": wire,
            "step_ms": step_ms, "forward_ms": forward, "stall_in_steps": stall / step_ms,
        }  # fmt: skip
        yield row | {f"tau {tau}": stall / (tau * step_ms) for tau in (8, 32, 128)}


def part_round(case, args):
    case = with_replicas(case)
    step, method, _ = edit_step(case)
    alone = case.but(mesh=Mesh(1, case.mesh.device, alone=True))
    steps, tau = {"edit": step, "bound": our_step(alone)}, method.config.tau
    times = alternate(case.mesh, steps, args.repeats, tau)
    middle = {f"{name}_ms": statistics.median(times[name]) for name in times}
    of_bound = ratio(times, "bound", "edit")
    yield describe(case) | {"tau": tau} | middle | {"of_bound": of_bound}


def part_memory(case, args):
    """Peak over what was there before, of two steps and a sync, and the same with one rank: the
    difference to what one rank must hold are the activations, which are the same in both."""
    alone = case.but(mesh=Mesh(1, case.mesh.device, alone=True))
    give_back_freed_memory()
    for dtype in args.dtypes:
        one, all_ = alone.but(dtype=dtype), case.but(dtype=dtype)
        peak_bytes(one), peak_bytes(all_)  # code and scratch memory come on first use, and stay
        activations = peak_bytes(one) - sum(one.plan.memory().values())
        must = sum(all_.plan.memory().values()) + all_.plan.seen() + activations
        peak = peak_bytes(all_)
        yield describe(all_) | {
            "peak_MB": peak / 1e6, "held_MB": sum(all_.plan.memory().values()) / 1e6,
            "activations_MB": activations / 1e6, "planned_MB": all_.plan.activations() / 1e6,
            "peak_over_formula": peak / must,
        }  # fmt: skip
    keep_freed_memory()


def give_back_freed_memory():
    """Let large blocks go back to the system at once. How much glibc keeps of them otherwise, up to
    a third of the activations, depends on what came before."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD, bytes


def peak_bytes(case) -> int:
    for group in (case.mesh.shard, case.mesh.sync):
        group.outboxes = {}  # the last model's
    gc.collect()
    cuda = case.mesh.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what there is now
        before = status_bytes("VmRSS")
    step, method, _ = edit_step(case)
    step(), step(), method.finish(), step()
    return torch.cuda.max_memory_allocated() - before if cuda else status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# ---- the run ----


def show(rows: list) -> None:
    """The last row, under a heading where its columns change."""
    row = rows[-1]
    if len(rows) == 1 or rows[-2].keys() != row.keys():
        print("\n" + "  ".join(f"{name:>10}" for name in row))
    cells = []
    for name, value in row.items():
        if isinstance(value, float) and abs(value) < 100:
            value = f"{value:.3g}"
        elif isinstance(value, (int, float)):
            value = f"{value:,.0f}"
        cells.append(f"{value:>{max(10, len(name))}}")
    print("  ".join(cells), flush=True)


def read_arguments(argv):
    description = "Speed, memory and the cost of a sync. Takes train.py's flags, too."
    parser = Parser(description=description)
    add = parser.add_argument
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    possible = PARTS if ranks > 1 else ALONE
    parts = f"some of {','.join(PARTS)} (default: all; one rank: {','.join(ALONE)})"
    add("--parts", default=",".join(possible), help=parts)
    add("--repeats", type=int, default=5, help="turns (default: 5)")
    add("--steps", type=int, default=2, help="steps per turn (default: 2)")
    add("--vocab_size", type=int, default=257, help="of the model (default: 257, bytes)")
    add("--peak_tflops", type=float, default=0.0, help="of the device, for the MFU (H200: 989)")
    add("--json", default="out/bench.json", help="file for the rows (default: out/bench.json)")
    args, rest = parser.parse_known_args(argv)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        raise UserError(f"--parts {min(unknown)}: there are {', '.join(PARTS)}")
    if lonely := set(args.parts) - set(possible):
        raise UserError(
            f"--parts {min(lonely)} takes two ranks: torchrun --nproc_per_node 2 bench.py"
        )
    if min(args.repeats, args.steps) < 1 or args.vocab_size < 2:
        raise UserError("--repeats and --steps are at least 1, --vocab_size at least 2")
    given = {flag.split("=")[0] for flag in rest}
    ignored = {"--method", "--backend", "--replicas", "--dry_run"} & given
    if ignored:
        raise UserError(f"{min(ignored)}: the benchmark does not take it")
    return args, parse(["--model", "10m", "--batch_size", "2", "--tau", "32", *rest])


def main():
    args, (config, method_config, simulation) = read_arguments(sys.argv[1:])
    cuda = config.device == "cuda" or config.device == "auto" and torch.cuda.is_available()
    config.device = "cuda" if cuda else "cpu"
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size % config.shards:
        raise UserError(f"--shards {config.shards} must divide the number of ranks, {world_size}")
    if cuda and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu")
    keep_freed_memory()  # as train.py does; here it speeds up the others, too
    args.dtypes = [config.dtype]
    if config.dtype == "auto":
        args.dtypes = ["fp32", "bf16"] if has_native_bf16(config.device) else ["fp32"]
        config.dtype = "fp32"
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world_size > 1:
        # Told its device, NCCL need not guess it when a barrier is its first operation.
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    mesh = Mesh(config.shards, device)
    case = Case(config, method_config, simulation, args.vocab_size, mesh)
    rows = {}
    # memory first, before others have left some
    for part in sorted(args.parts, key="memory".__ne__):
        rows[part] = []
        if mesh.rank == 0:
            print(f"\n{part}", end="")
        for row in globals()[f"part_{part}"](case, args):
            rows[part].append(row)
            if mesh.rank == 0:
                show(rows[part])
    if mesh.rank == 0:
        name = torch.cuda.get_device_name() if cuda else "cpu"
        record = {"command": sys.argv, "torch": torch.__version__, "device": name, "parts": rows}
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(record, indent=1))
        print(f"\nrows in {args.json}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"bench.py: error: {error}", file=sys.stderr)
        sys.exit(2)
