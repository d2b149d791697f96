"""Train a small Llama-style model with one of several synchronisation methods.

    python train.py --method minibatch                                      # one process
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 train.py --method edit --shards 2
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 train.py --shards 8

The file reads in the order of a run: flags, set-up that can fail, the loop. The loop knows nothing
of any method but the verbs

    before_step(step)           a sync that is due starts here; EDiT's completes inside the next forward
    finished(step)              is the training over?
    position(step)              how far it is, in steps of all ranks: rules the learning rate and evaluations
    in_sync                     are all replicas equal now (or will the next forward make them so)?
    averages_gradients(step)    over the replicas? true for mini-batch and in the warm-up
    after_step(step)            DiLoCo synchronises here
    finish()                    complete a sync that has started, end a round early: all replicas equal
    stats()                     what there is to tell of a sync since the last call
    lockstep, outer_vectors     for the record: same steps in all replicas; vectors kept beside the model

Wrong input ends every rank with exit code 2 after one line on rank 0 (torchrun adds a report of its
own).
"""

import argparse
import dataclasses
import math
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import a_edit
import data
import diloco
import edit
import minibatch
import simulate
from data import Parser, UserError
from mesh import Mesh
from model import ModelConfig
from record import Clock, Record, print_start
from sample import continue_text, load_model
from shard import ShardedModel

METHODS = {
    "minibatch": (minibatch.MiniBatch, minibatch.Config),
    "diloco": (diloco.DiLoCo, diloco.Config),
    "edit": (edit.EDiT, edit.Config),
    "a_edit": (a_edit.AEDiT, a_edit.Config),
}

# ---- flags ----


def option(default, help, **limits):
    return field(default=default, metadata={"help": help} | limits)


@dataclass
class Config:
    """What all methods share. Numbers are finite and at least `low` (0 if not said), see check_limits."""

    # run
    method: str = option("edit", "synchronisation method", choices=list(METHODS))
    shards: int = option(1, "N, ranks per replica; the other ranks form more replicas", low=1)
    max_steps: int = option(700, "inner steps", low=1)
    seed: int = option(1337, "of initialisation and data order", below=2**40)
    out_dir: str = option("", "where metrics.jsonl and model.pt go (default: out/METHOD)")
    device: str = option(
        "auto", "cpu, cuda, or cuda where there is one", choices=["auto", "cpu", "cuda"]
    )
    dtype: str = option(
        "auto", "of the layers; auto: bf16 where the device has it natively; fp64 takes the masters along",
        choices=["auto", "fp32", "bf16", "fp64"],
    )  # fmt: skip
    compile: bool = option(False, "torch.compile each layer")
    log_interval: int = option(10, "steps between log lines", low=1)
    eval_interval: int = option(
        200, "steps between evaluations, which wait for the next sync", low=1
    )
    eval_batches: int = option(16, "validation batches of 16 windows, over all ranks", low=1)
    # model
    n_layer: int = option(4, "blocks", low=1)
    n_head: int = option(4, "attention heads", low=1)
    n_embd: int = option(128, "channels", low=1)
    block_size: int = option(128, "context, tokens", low=1)
    # data
    data: str = option("", "corpus folder made by data.py (default: Python's standard library)")
    batch_size: int = option(8, "sequences per rank and micro-step", low=1)
    accum: int = option(1, "micro-steps per step, their gradients summed", low=1)
    # inner
    lr: float = option(3e-3, "peak inner (AdamW) learning rate")
    min_lr_ratio: float = option(0.1, "final over peak learning rate")
    lr_warmup_steps: int = option(50, "steps of linear warm-up")
    weight_decay: float = option(0.1, "of matrices")
    beta1: float = option(0.9, "AdamW", below=1)
    beta2: float = option(0.95, "AdamW", below=1)
    grad_clip: float = option(1.0, "largest global gradient norm; 0: no clipping")


# The first flag of each group of --help.
GROUPS = {
    "method": "run", "n_layer": "model", "data": "data", "lr": "inner", "slow_replica": "simulation of a slow, uneven cluster",
    "sync_warmup_steps": "outer (methods with local steps)",
}  # fmt: skip


def parse(argv: list) -> tuple:
    """Flags -> (Config, the method's, simulate's). Flags of other methods are checked and then not used, so that
    one command line serves to compare methods. Raises UserError, naming the flag, for what cannot be."""
    fields = {
        f.name: [(None, f)]
        for shared in (Config, simulate.Config)
        for f in dataclasses.fields(shared)
    }
    for name, (_, method_config) in METHODS.items():
        for f in dataclasses.fields(method_config):
            fields.setdefault(f.name, []).append((name, f))
    parser = Parser(
        description="Train with " + ", ".join(METHODS) + ".", usage="train.py [--flag value ...]"
    )
    for name, owners in fields.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        add_flag(group, name, owners)
    given = {
        name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None
    }
    for name, value in given.items():
        check_limits(name, value, fields[name][0][1].metadata)

    def fill(config_class):
        return config_class(
            **{f.name: given[f.name] for f in dataclasses.fields(config_class) if f.name in given}
        )

    config = fill(Config)
    config.out_dir = config.out_dir or f"out/{config.method}"
    check_model(config)
    return config, fill(METHODS[config.method][1]), fill(simulate.Config)


def add_flag(group, name, owners):
    """One flag; several methods may own it, each with a default of its own."""
    f = owners[0][1]
    defaults = {method: field.default for method, field in owners}
    if len(set(defaults.values())) == 1:
        default = f.default
    else:
        default = ", ".join(f"{method}: {value}" for method, value in defaults.items())
    help = f.metadata["help"] + (f" (default: {default})" if default != "" else "")
    if isinstance(f.default, bool):
        group.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=help
        )
    else:
        choices = f.metadata.get("choices")
        metavar = "|".join(choices) if choices else type(f.default).__name__.upper()
        group.add_argument(
            f"--{name}", type=type(f.default), choices=choices, metavar=metavar, help=help
        )


def check_limits(name, value, limits):
    if isinstance(value, (str, bool)):
        return
    low, above, below = (
        limits.get("low", 0),
        limits.get("above", -math.inf),
        limits.get("below", math.inf),
    )
    if not (low <= value < below and value > above):  # also refuses NaN and infinity
        bound = f"above {above}" if above >= low else f"at least {low}"
        raise UserError(
            f"--{name} {value}: must be {bound} and {f'below {below}' if below < math.inf else 'finite'}"
        )


def check_model(config):
    if config.n_embd % config.n_head or config.n_embd // config.n_head % 2:
        raise UserError(
            f"--n_embd {config.n_embd} --n_head {config.n_head}: channels per head must be a whole, even number"
        )


def resolve_device(config):
    """Replace `auto` in device and dtype by what this machine has."""
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if (
        config.device == "cuda"
        and int(os.environ.get("LOCAL_RANK", 0)) >= torch.cuda.device_count()
    ):
        raise UserError(
            f"--device cuda: more ranks than the {torch.cuda.device_count()} CUDA devices of this machine; "
            "lower --nproc_per_node"
        )
    native = has_native_bf16(config.device)
    if config.dtype == "bf16" and not native:
        raise UserError(f"--dtype bf16: this {config.device} has no native bf16; use --dtype fp32")
    if config.dtype == "auto":
        config.dtype = "bf16" if native else "fp32"


def has_native_bf16(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


# ---- set-up ----


def set_up(argv: list, rank: int, world_size: int):
    """Everything that wrong input can break, before any process group exists."""
    config, method_config, simulation = parse(argv)
    if world_size % config.shards:
        raise UserError(
            f"--shards {config.shards}: {world_size} ranks do not divide into replicas of {config.shards}"
        )
    resolve_device(config)
    simulate.Stragglers(simulation, world_size // config.shards, config.seed)  # looks at its flags
    corpus = data.load(config.data or None)
    data.check_windows(corpus, config.block_size)
    if rank == 0:
        try:
            Path(config.out_dir).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=config.out_dir).close()  # can it be written to?
        except OSError as error:
            raise UserError(
                f"--out_dir {config.out_dir}: {error.strerror}; name a folder to write to"
            ) from None
    return config, method_config, simulation, corpus


def agree(store, rank: int, world_size: int, error: str, fingerprint: str):
    """All ranks leave together if one has an error: rank 0 prints the first, every rank exits with code 2."""
    if store:
        # torchrun ends the other ranks at the first exit it sees; here each is about to exit by itself
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        store.set(f"set-up/{rank}", f"{error}\n{fingerprint}")
        answers = [store.get(f"set-up/{r}").decode().split("\n", 1) for r in range(world_size)]
        error = next((theirs for theirs, _ in answers if theirs), "")
        if not error and len({theirs for _, theirs in answers}) > 1:
            error = (
                "the ranks differ in their flags or read different corpora: start them all alike"
            )
        if not error:
            signal.signal(signal.SIGTERM, before)
    if error:
        if rank == 0:
            print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def main(argv: list):
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank != 0:
        sys.stdout = open(os.devnull, "w")  # nothing is printed N times
    store, error, fingerprint = None, "", ""
    if world_size > 1:  # torchrun's key-value store
        store, rank, world_size = next(dist.rendezvous("env://"))
    try:
        config, method_config, simulation, corpus = set_up(argv, rank, world_size)
        alike = dataclasses.replace(config, out_dir="", data="")  # paths may differ between nodes
        fingerprint = f"{alike} {method_config} {simulation} {corpus.hash}"
    except UserError as wrong:
        error = str(wrong)
    agree(store, rank, world_size, error, fingerprint)

    device = torch.device(config.device)
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if store:
        backend = "nccl" if config.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    train(config, method_config, simulation, corpus, Mesh(config.shards, device), store)
    if store:
        dist.destroy_process_group()


# ---- training ----


def learning_rate(step: float, config) -> float:
    """Linear warm-up, then a cosine from lr down to min_lr_ratio * lr at max_steps."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    progress = (step - config.lr_warmup_steps) / max(1, config.max_steps - config.lr_warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def evaluate(model, mesh, corpus, config) -> float:
    """Mean loss over the validation windows, nats per token; the ranks share the work."""
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, rows
    batches = data.validation_batches(
        corpus, config.eval_batches, mesh.rank, mesh.world_size, config.batch_size, config.block_size
    )  # fmt: skip
    for inputs, targets, rows in batches:
        loss = model.forward(inputs.to(mesh.device), targets.to(mesh.device), train=False)
        total += torch.tensor([loss.item() * rows, rows], dtype=torch.float64)
    total = total.to(mesh.device)
    for group in (mesh.shard, mesh.sync):
        # [shard], [sync] all-reduce, 2 scalars, once per evaluation
        mesh.all_reduce(total, group).wait()
    return (total[0] / total[1]).item()


def train(config, method_config, simulation, corpus, mesh, store):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[config.dtype]
    model_config = ModelConfig(
        config.n_layer, config.n_head, config.n_embd, config.block_size, corpus.vocab_size
    )
    model = ShardedModel(model_config, mesh, dtype, config.seed)
    if config.compile:
        for layer in model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(
        model.optimizer_groups(config.weight_decay), betas=(config.beta1, config.beta2), fused=True
    )
    clock = Clock(mesh.device)
    method = METHODS[config.method][0](model, mesh, method_config, config.max_steps, clock.train_s)
    stragglers = simulate.Stragglers(simulation, mesh.replicas, config.seed)
    if simulation.link_mbps or simulation.link_latency_ms:
        mesh.wire = simulate.Wire(simulation, mesh.shards, mesh.device)
    if mesh.rank == 0:
        print_start(config, model, mesh, method, corpus)
    record = Record(
        Path(config.out_dir, "metrics.jsonl"), config, mesh, store, clock, method.lockstep
    )
    record.start(method_config, simulation, model, corpus)

    def batch(step, micro_step):
        tensors = data.train_batch(
            corpus, config.seed, step, micro_step, mesh.rank, mesh.world_size,
            config.batch_size, config.accum, config.block_size,
        )  # fmt: skip
        if mesh.device.type == "cuda":  # pinned, so that the copy does not hold up the host
            tensors = [tensor.pin_memory() for tensor in tensors]
        return [tensor.to(mesh.device, non_blocking=True) for tensor in tensors]

    def run_evaluation():
        method.finish()  # a sync that has begun ends here, on the training's time
        record.sync(method)
        with clock:  # stopped
            loss = evaluate(model, mesh, corpus, config)
        record.eval(step, method.position(step), loss, corpus.bytes_per_token)
        return loss

    step, next_eval = 0, config.eval_interval
    while True:
        method.before_step(step)
        if method.finished(step):
            break
        position = method.position(step)
        if position >= next_eval and method.in_sync:
            run_evaluation()
            next_eval = position - position % config.eval_interval + config.eval_interval
        lr = learning_rate(position, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        average = method.averages_gradients(step)
        # A mean over all that is summed: micro-steps, the N ranks of a replica and, if asked, the M replicas.
        scale = 1 / (config.accum * mesh.shards * (mesh.replicas if average else 1))
        loss = 0.0
        stragglers.begin_step(mesh)
        for micro_step in range(config.accum):
            loss += model.forward(*batch(step, micro_step)) / config.accum
            last = micro_step == config.accum - 1
            model.backward(scale, first=micro_step == 0, average_replicas=average and last)
        stragglers.end_step(step, mesh)
        shared = model.clip_gradient(config.grad_clip, loss)
        optimizer.step()
        model.forget_gathered()
        method.after_step(step)
        record.sync(method)
        step += 1
        record.step(step, method.position(step), lr, shared)

    val_loss = run_evaluation()  # performs the last sync
    save_model({**vars(config), **vars(method_config)}, config.out_dir, model, corpus)
    record.end(step, method.position(step), val_loss)
    if mesh.rank == 0:
        print_sample(config)


def save_model(flags: dict, out_dir: str, model, corpus):
    """out_dir/model.pt: the whole model in fp32 and what is needed to use it. Whole or not at all."""
    if model.mesh.replica != 0:
        return  # all replicas are equal now
    state = model.state_dict()
    if model.mesh.rank == 0:
        saved = {"model": state, "model_config": dataclasses.asdict(model.config)}
        saved |= {"tokenizer": corpus.tokenizer, "config": flags}
        path = Path(out_dir, "model.pt")
        torch.save(saved, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
        print(f"model   {path}")


def print_sample(config):
    try:
        model, encoding = load_model(Path(config.out_dir, "model.pt"))
        prompt = "def " if encoding.name == "byte" else "The "
        text = continue_text(model, encoding, prompt, count=200)
    except UserError as error:  # no vocabulary offline, or a diverged model: the run itself is fine
        text = f"none: {error}"
    print("sample  " + text.replace("\n", "\n        "))


if __name__ == "__main__":
    main(sys.argv[1:])
