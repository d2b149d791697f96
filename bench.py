"""This repository's sharded step against torch's own FSDP2 (`fully_shard`), on the same model and
batch.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 bench.py --shards 2          # ZeRO-3
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 bench.py --shards 2          # 2x2 (HSDP)

Both train model.py's layers with mini-batch steps (no sync of a local method), the same dtype,
fused AdamW and gradient clipping. They are timed in turn, A B A B ..., a few steps at a time, in
one run, because a machine's speed drifts; the ratio is the median of the pairwise ratios.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flags import Parser, UserError
from mesh import Mesh
from model import Llama, ModelConfig
from shard import ShardedModel

LR = 1e-3


def our_step(config, mesh, dtype, tokens, targets):
    model = ShardedModel(config, mesh, dtype)
    optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), lr=LR, fused=True)

    def step():
        loss = model.forward(tokens, targets)
        model.backward(1 / mesh.world_size, average_replicas=True)
        model.clip_gradient(1.0, loss)
        optimizer.step()
        model.forget_gathered()

    return step


def fsdp2_step(config, mesh, dtype, tokens, targets):
    shape, names = (
        ((mesh.replicas, mesh.shards), ("replica", "shard"))
        if mesh.replicas > 1
        else ((mesh.shards,), ("shard",))
    )
    grid = init_device_mesh(mesh.device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = Llama(config).to(mesh.device)
    for layer in model.layers:  # the last one is kept: its backward comes at once
        fully_shard(
            layer, mesh=grid, mp_policy=policy, reshard_after_forward=layer is not model.layers[-1]
        )
    fully_shard(model, mesh=grid, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)

    def step():
        optimizer.zero_grad()
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def milliseconds(step, steps, mesh):
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return 1e3 * (time.perf_counter() - started) / steps


def main():
    parser = Parser(description="Time this repository's sharded step against FSDP2's.")
    for name, default in dict(
        shards=2, n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=4
    ).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="(default: fp32)")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of measurements (default: 7)")
    parser.add_argument("--steps", type=int, default=3, help="steps per measurement (default: 3)")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        raise UserError("start it with torchrun on two or more ranks")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if args.shards < 1 or dist.get_world_size() % args.shards or min(args.repeats, args.steps) < 1:
        raise UserError(
            "--shards must divide the number of ranks; --repeats and --steps are at least 1"
        )
    mesh = Mesh(args.shards, device)
    config = ModelConfig(args.n_layer, args.n_head, args.n_embd, args.block_size)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    tokens, targets = torch.randint(
        config.vocab_size, (2, args.batch_size, args.block_size), device=device
    )
    steps = [make(config, mesh, dtype, tokens, targets) for make in (our_step, fsdp2_step)]
    for step in steps * 2:
        step()
    times = [[milliseconds(step, args.steps, mesh) for step in steps] for _ in range(args.repeats)]
    if mesh.rank == 0:
        ours, fsdp2 = (statistics.median(column) for column in zip(*times))
        ratio = statistics.median(theirs / mine for mine, theirs in times)
        print(
            f"{mesh.replicas}x{mesh.shards} {args.dtype}: {config.n_layer} blocks of {config.n_embd} channels, "
            f"{args.batch_size} x {args.block_size} tokens a rank | ours {ours:.0f} ms | FSDP2 {fsdp2:.0f} ms | "
            f"tokens/s ratio {ratio:.2f} (median of {args.repeats} pairs)"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"bench.py: error: {error}", file=sys.stderr)
        sys.exit(2)
