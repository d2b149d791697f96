r"""Train a small Llama-style model with one of several synchronisation methods.

    python train.py --method minibatch                                      # one process
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 train.py --method edit --shards 2
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \
        train.py --shards 8

The command line is read in config.py; here a run starts, loops and ends. The loop knows nothing of
any method but the verbs

    before_step(step)         a sync that is due starts here; EDiT's completes in the next forward
    finished(step)            is the training over?
    position(step)            how far it is, in steps of all ranks: rules the learning rate and
                              evaluations
    in_sync                   are all replicas equal now (or will the next forward make them so)?
    averages_gradients(step)  over the replicas? true for mini-batch and in the warm-up
    after_step(step)          DiLoCo synchronises here
    finish()                  complete a begun sync, end a round early: all replicas equal
    stats()                   what there is to tell of a sync since the last call
    common_position(step)     the position, if all replicas are at the same point here: where a
                              checkpoint can be
    replicas_differ           has the local phase begun?
    mends_replicas            does a sync leave out a replica whose parameters are not finite?
    lockstep, outer_vectors   same steps in all replicas? anchor and momentum, by name
    state_dict(), load_state_dict(), sync_saved()   see checkpoint.py

Wrong input ends every rank with exit code 2 after one line on rank 0 (torchrun adds a report of its
own).
"""

import dataclasses
import math
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import data
import simulate
import together
from config import METHODS, Setup, read_flags, set_up
from flags import UserError
from mesh import LostRank, Mesh, contact
from plan import Plan
from record import Clock, Record
from sample import continue_text, load_model
from shard import Arriving, ShardedModel, keep_freed_memory


def main(argv: list):
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank != 0:
        sys.stdout = open(os.devnull, "w")  # nothing is printed N times
    leaving = together.Leaving(rank)
    store, setup = start(argv, rank, world_size, leaving)
    config = setup.config
    patience = timedelta(seconds=config.timeout_s)
    store.set_timeout(patience)
    leaving.store = together.Store(store, config.timeout_s)
    device = torch.device(config.device)
    if config.device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    keep_freed_memory()
    try:
        with contact():
            if world_size > 1:
                dist.init_process_group(
                    config.backend, store=store, rank=rank, world_size=world_size, timeout=patience
                )
            mesh = Mesh(config.shards, device, config.timeout_s)
        train(setup, mesh, leaving.store, leaving)
    except UserError as wrong:
        leaving.end(2, f"error: {wrong}")
    except LostRank as lost:
        last = checkpoint.complete(config.out_dir)
        way_out = "--checkpoint_interval would have kept checkpoints"
        if last:
            way_out = f"--resume auto goes on from {last[-1]}"
        leaving.end(1, f"error: lost contact with another rank ({lost}); {way_out}", lost=True)
    if world_size > 1:
        dist.destroy_process_group()


def start(argv: list, rank: int, world_size: int, leaving) -> tuple:
    """(the store of this attempt, the Setup that all ranks agree on);
    exits, on all ranks alike, if they do not."""
    error, fingerprint, setup, code = "", "", None, 2
    try:
        if is_dry_run(argv):
            setup = set_up(argv, rank, world_size)
            Plan(setup, setup.world_size).show()
            sys.exit(0)
        store = dist.HashStore()
        if world_size > 1:  # torchrun's key-value store
            with contact():
                store, rank, world_size = next(dist.rendezvous("env://"))
        store, restarted = together.meet(store, rank, world_size)
        try:
            setup = set_up(argv, rank, world_size, restarted)
            # nodes' paths may differ
            alike = dataclasses.replace(setup.config, out_dir="", data="", resume="")
            where = (setup.path.name, setup.saved) if setup.saved else None
            fingerprint = f"{alike} {setup.method_config} {setup.simulation} "
            fingerprint += f"{setup.corpus.hash} {where}"
        except UserError as wrong:
            error = str(wrong)
        leaving.busy = True
        with contact():
            together.agree(store, rank, world_size, error, fingerprint)
        leaving.wait_for_a_checkpoint(setup.config.save_on_exit)
        return store, setup
    except UserError as wrong:
        error = str(wrong)
    except LostRank as lost:
        error, code = f"lost contact with another rank while starting ({lost})", 1
    # torchrun ends the other ranks at the first exit it sees; here each is about to exit by itself
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 0:
        print(f"train.py: error: {error}", file=sys.stderr, flush=True)
    sys.exit(code)


def is_dry_run(argv: list) -> bool:
    """Ranks of a dry run need not hear of one another.
    (Wrong flags are reported where all runs' are.)"""
    try:
        return read_flags(argv, saved={})[0].dry_run
    except UserError:
        return False


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
        corpus, config.eval_batches, mesh.rank, mesh.world_size,
        config.batch_size, config.block_size,
    )  # fmt: skip
    for inputs, targets, rows in batches:
        loss = model.forward(inputs.to(mesh.device), targets.to(mesh.device), train=False)
        total += torch.tensor([loss.item() * rows, rows], dtype=torch.float64)
    total = total.to(mesh.device)
    for group in (mesh.shard, mesh.sync):
        # [shard], [sync] all-reduce, 2 scalars, once per evaluation
        mesh.all_reduce(total, group).wait()
    return (total[0] / total[1]).item()


def load_batch(corpus, config, mesh, step, micro_step) -> list:
    """This rank's inputs and targets, (batch_size, block_size) int64 each, on its device."""
    tensors = data.train_batch(
        corpus, config.seed, step, micro_step, mesh.rank, mesh.world_size,
        config.batch_size, config.accum, config.block_size,
    )  # fmt: skip
    if mesh.device.type == "cuda":  # pinned, so that the copy does not hold up the host
        tensors = [tensor.pin_memory() for tensor in tensors]
    return [tensor.to(mesh.device, non_blocking=True) for tensor in tensors]


def train(setup: Setup, mesh, store, leaving):
    config, method_config, simulation = setup.config, setup.method_config, setup.simulation
    corpus, saved = setup.corpus, setup.saved
    plan = Plan(setup, mesh.world_size)
    plan.show()
    print(flush=True)
    model = ShardedModel(plan.model_config, mesh, plan.dtype, config.seed, config.recompute)
    if config.compile:
        for layer in model.layers:
            layer.compile()
    optimizer = model.adamw(config.weight_decay, betas=(config.beta1, config.beta2))
    model.asked_to_stop = lambda: leaving.asked(speaks=mesh.shard_index == 0)
    clock = Clock(mesh.device)
    method = METHODS[config.method][0](model, mesh, method_config, config.max_steps, clock.train_s)
    stragglers = simulate.Stragglers(simulation, mesh.replicas, config.seed)
    if simulation.link_mbps or simulation.link_latency_ms:
        mesh.wire = simulate.Wire(simulation, mesh.shards, mesh.works_on)
    rows = Path(config.out_dir, "metrics.jsonl")
    record = Record(rows, config, mesh, store, clock, method.lockstep)
    step = evaluated_at = saved_at = 0  # evaluated_at, saved_at: positions
    if saved:
        clock.start_at(saved["train_s"])
        same_method = config.method == saved["flags"]["method"]
        with clock:  # stopped
            own = checkpoint.load(setup.path, saved, model, method, same_method)
        step, evaluated_at, saved_at = own["step"], saved["evaluated_at"], saved["position"]
        for state in optimizer.state.values():
            state["step"].fill_(step)
        # without the last number, the wish to stop, which has been granted
        model.shared.extend(Arriving(torch.tensor([*news[:3], 0.0])) for news in own["news"])
    same_file = saved is not None and setup.path.parent.resolve() == Path(config.out_dir).resolve()
    record.start(method_config, simulation, model, corpus, saved, same_file, method.position(step))
    if saved:
        record.resumed(setup.path, saved, method)

    def run_evaluation():
        method.finish()  # a sync that has begun ends here, on the training's time
        record.sync(method)
        with clock:  # stopped
            loss = evaluate(model, mesh, corpus, config)
        record.eval(step, method.position(step), loss, corpus.bytes_per_token)
        return loss

    def save(common):
        began = time.perf_counter()
        with clock:  # stopped
            # Its name is rank 0's step (A-EDiT's replicas are at different ones);
            # and now we know that all are alive.
            name, *_ = mesh.exchange(step)
            position = method.position(step) if common is None else common
            run = record.state(position) | {
                "flags": vars(config) | vars(method_config) | vars(simulation),
                "mesh": {"replicas": mesh.replicas, "shards": mesh.shards},
                "model_config": dataclasses.asdict(model.config),
                "tokenizer": corpus.tokenizer, "corpus_hash": corpus.hash,
                "evaluated_at": evaluated_at, "torch": torch.__version__,
            }  # fmt: skip
            replica = {"step": step, "method": method.state_dict()}
            replica["news"] = [n.read() for n in model.shared]
            path = checkpoint.save(config.out_dir, name, run, replica, model, method, config.keep)
        record.saved(path, time.perf_counter() - began)
        return path, position

    tracer = start_tracing(config, mesh.rank) if config.profile else None
    asked = 0  # to stop, by this signal
    while True:
        common = method.common_position(step)
        stopping = leaving.stops_here(asked, together=common is not None)
        if stopping or is_due(common, saved_at, config.checkpoint_interval, config.max_steps):
            check_finite(step, model.shared[-1].read(), method)
            path, saved_at = save(common)
        if stopping:
            name = signal.Signals(leaving.signal).name
            line = f"stopped by {name} after step {step}; --resume auto goes on from {path}"
            leaving.end(128 + leaving.signal, line)

        method.before_step(step)
        if method.finished(step):
            break
        position = method.position(step)
        if is_due(position, evaluated_at, config.eval_interval) and method.in_sync:
            run_evaluation()
            evaluated_at = position
        lr = learning_rate(position, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        average = method.averages_gradients(step)
        # A mean over all that is summed:
        # micro-steps, the N ranks of a replica and, if asked, the M replicas.
        scale = 1 / (config.accum * mesh.shards * (mesh.replicas if average else 1))
        loss = 0.0
        stragglers.begin_step(mesh)
        for micro_step in range(config.accum):
            batch = load_batch(corpus, config, mesh, step, micro_step)
            loss += model.forward(*batch) / config.accum
            last = micro_step == config.accum - 1
            model.backward(scale, first=micro_step == 0, average_replicas=average and last)
        stragglers.end_step(step, mesh)
        model.clip_gradient(config.grad_clip, loss)
        optimizer.step()
        model.forget_gathered()
        method.after_step(step)
        record.sync(method)
        step += 1
        record.step(step, method.position(step), lr, model.shared[-1])
        check_finite(step - model.read_late, model.news(), method)
        asked = round(model.news()[3])
        if tracer:
            tracer.step()

    if tracer:
        tracer.stop()
    leaving.wait_for_a_checkpoint(False)  # there is nothing left to save but the model
    val_loss = run_evaluation()  # performs the last sync
    if mesh.replica == 0:  # all replicas are equal now
        model_path = Path(config.out_dir, "model.pt")
        checkpoint.export(model_path, model, corpus.tokenizer, vars(config) | vars(method_config))
    record.end(step, method.position(step), val_loss)
    if mesh.rank == 0:
        print(f"model   {model_path}")
        print_sample(config)


def start_tracing(config, rank: int):
    """torch's profiler: after the first steps, which also
    compile and allocate, three steps go to a file."""
    first = min(4, max(0, config.max_steps - 4))
    steps = torch.profiler.schedule(wait=first, warmup=1, active=3, repeat=1)
    path = Path(config.out_dir, f"trace-{rank}.json")

    def write(tracer):
        path.parent.mkdir(parents=True, exist_ok=True)
        tracer.export_chrome_trace(str(path))
        print(f"profile {path}: open it in chrome://tracing or ui.perfetto.dev", flush=True)

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would report its own starts and stops
    tracer = torch.profiler.profile(schedule=steps, on_trace_ready=write)
    tracer.start()
    return tracer


def is_due(position, last, interval: int, end: float = math.inf) -> bool:
    """Has the training come to the next multiple of interval (0: none) after `last`,
    or to its end?"""
    if not interval or position is None or position == last:
        return False
    return position >= min(last - last % interval + interval, end)


def check_finite(step: int, news: list, method):
    """Where replicas share their gradients, or a plain
    mean of their parameters, nothing mends a sick one."""
    norm, loss = news[:2]
    if math.isfinite(norm + loss) or (method.mends_replicas and method.replicas_differ):
        return
    raise UserError(
        f"diverged at step {step}: loss {loss:.4g}, gradient norm {norm:.4g}; "
        "nothing was saved of it; lower --lr, or raise --lr_warmup_steps"
    )


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
