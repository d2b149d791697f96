"""Checkpoints: what a run needs to continue, on the same ranks or on others.

    out/edit/checkpoint-00000400/
        state.json       the run: progress, flags, mesh
        rank-00000.pt    rank 0: its counters, scalars and flat vectors by name; one file per rank

Checkpoints are taken at round ends, the last one at the end of the training. What is equal in all
replicas there is only in the files of replica 0: a method's `shared` vectors, in most methods the
parameters, and in the warm-up (in mini-batch always) AdamW's moments. Replicas compare checksums of
it first. If they differ, the run ends.

The folder is written as checkpoint.tmp and gets its name when all ranks have written their files.
So list_checkpoints() finds only complete ones, whenever a rank is killed.

    same mesh        exact: on CPUs the run continues bit for bit (a GPU's attention adds in
                     varying order)
    other shards     exact but for the order of sums: a layer's shards are joined and cut again
    other replicas   replica i continues saved replica i mod M, M replicas saved

Nothing in a file is executed: JSON, and tensors through torch.load(weights_only=True).
"""

import json
import os
import shutil
import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import pad

from config import UserError, explain
from plumbing.posix import fcntl

# Maps a file: tensors are read when they are used.
open_file = partial(torch.load, map_location="cpu", weights_only=True, mmap=True)


# ---- which one ----


def list_checkpoints(folder) -> list:
    """The complete checkpoints of a run's folder, oldest first."""
    return sorted(Path(folder).glob("checkpoint-*[0-9]"))


def choose(config) -> tuple:
    """(the run's folder, the checkpoint to continue or None). Raises UserError if there is none, or
    if two runs would mix in the folder."""
    resume = config.resume
    out_dir = config.out_dir or f"out/{config.method}"
    if resume and config.overwrite:
        raise UserError("--resume, --overwrite: give only one of them")
    found = []
    if resume == "auto":
        found = list_checkpoints(out_dir)
    elif resume:
        found = list_checkpoints(resume)
        if Path(resume, "state.json").exists():  # it is a checkpoint
            found = [Path(resume)]
        if not found:
            raise UserError(
                f"--resume {resume}: there is no checkpoint; "
                "name a run's folder or a checkpoint-... in it"
            )
        out_dir = config.out_dir or str(found[-1].parent)

    last = found[-1] if found else None
    own = list_checkpoints(out_dir)
    if own and not config.dry_run:  # a run that is writing there could remove what this one reads
        os.close(lock(out_dir, fcntl.LOCK_SH))
    earlier = own or Path(out_dir, "model.pt").exists()
    continues = own and last and last.samefile(own[-1])
    if earlier and not (continues or config.overwrite or config.dry_run):
        raise UserError(
            f"--out_dir {out_dir} has an earlier run: --resume auto continues it, "
            "--overwrite deletes it; or name another --out_dir"
        )
    return out_dir, last


def prepare(config):
    """Make and lock the run's folder. Remove what a killed run has left, or an earlier run. Rank 0
    calls it before training."""
    folder = Path(config.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    if config.overwrite:
        remove(list_checkpoints(folder))
        for path in folder / "model.pt", *folder.glob("timeline-*.json"):
            path.unlink(missing_ok=True)
    for path in folder.glob("checkpoint*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def lock(folder, kind=fcntl.LOCK_EX) -> int:
    """Lock a run's folder until this process ends or closes the descriptor that this returns.
    Raises UserError if another run has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"--out_dir {folder}: another run is writing there; wait for it or name another folder"
        ) from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def remove(checkpoints: list):
    """A checkpoint must not look complete while some of its files are gone."""
    for path in checkpoints:
        half_removed = path.with_suffix(".tmp")
        os.rename(path, half_removed)
        shutil.rmtree(half_removed, ignore_errors=True)


# ---- saving ----


class ReplicasDiffer(Exception):
    """Vectors that must be equal in all replicas are not. The text is one line."""

    exit_code = 1  # as after a lost rank: a restart from an earlier checkpoint may go well


@contextmanager
def alike(mesh, doing: str = ""):
    """If the block raises an error that explain() knows on one rank, all ranks raise UserError:
    rank 0 with its line, which begins with `doing`, the others without one."""
    error = ""
    try:
        yield
    except Exception as wrong:
        error = explain(wrong)[1]
    # [sync] all-gather of objects, all ranks, 2 or 3 per start, 2 per checkpoint
    errors = [line for line in mesh.all_gather_object(error) if line]
    if errors:
        raise UserError("" if mesh.rank else doing + errors[0])


def files(path, world_size: int) -> list:
    """The files of all ranks, in rank order."""
    return [path / f"rank-{r:05d}.pt" for r in range(world_size)]


def vectors(model, method) -> tuple:
    """Name -> flat vector: those that are equal in all replicas at a round end, and the others."""
    warm_up = method.averages_gradients  # replicas differ in errors of quantized gradients only
    equal = {name: getattr(method, name) for name in method.shared}
    own = {name: getattr(method, name) for name in method.private}
    moments = equal if warm_up else own
    moments["exp_avg"] = model.exp_avg
    moments["exp_avg_sq"] = model.exp_avg_sq
    parameters = equal if warm_up or method.equal_replicas else own
    parameters["parameters"] = model.master
    return equal, own


def firsts(model, name: str) -> list:
    """The first element of each layer that a vector has: with Muon exp_avg_sq has no matrices."""
    return model.squares_from if name == "exp_avg_sq" else [0] * len(model.layers)


def layer_sizes(model, name: str, shards: int, index: int) -> list:
    """How many elements of each layer a vector of shard `index` of `shards` has."""
    return model.sizes_from(firsts(model, name), shards, index)


def check_equal(mesh, sums: list):
    """Raise ReplicasDiffer on all ranks, rank 0 with a line, unless each rank has the same
    checksums, of each layer of a vector, as the rank with its shard in replica 0."""
    for rank, own in enumerate(sums):
        for name, checksum in own.items():
            if checksum != sums[rank % mesh.shards][name]:
                cure = "must name it in private, not in shared"
                if name.startswith("parameters"):
                    cure = "must say equal_replicas = False"
                line = (
                    f"{name}: replica {rank // mesh.shards} is not equal to replica 0: a memory or "
                    f"a link is faulty, or their hardware differs, or the method {cure}; "
                    "--resume auto continues from the last checkpoint"
                )
                raise ReplicasDiffer("" if mesh.rank else line)


def save(setup, model, method, state: dict) -> Path:
    """Write a checkpoint into the run's folder and remove the oldest. state: the log's. All ranks
    call it at a round end. Raises ReplicasDiffer, or UserError if a rank cannot write its
    part, on all of them; earlier checkpoints stay."""
    mesh = model.mesh
    if mesh.device.type == "cuda":  # --offload: copies to vectors on the host may be in flight
        torch.cuda.synchronize()
    equal, own = vectors(model, method)
    sums = {}
    for name, vector in equal.items():
        parts = vector.split(layer_sizes(model, name, mesh.shards, mesh.shard_index))
        for l, layer in enumerate(parts):
            sums[f"{name} of layer {l}"] = zlib.crc32(layer.cpu().numpy())
    # [sync] all-gather of objects, all ranks, once per checkpoint
    check_equal(mesh, mesh.all_gather_object(sums))

    content = {"steps": method.steps, "rounds": method.rounds, **own}
    if not method.averages_gradients:
        content |= {name: getattr(method, name) for name in method.scalars}
    if mesh.replica == 0:
        content |= equal
    for name, value in content.items():
        if torch.is_tensor(value):
            content[name] = value.cpu()

    state = state | {
        "flags": setup.describe(mesh),
        "model_config": vars(model.config),
        "tokens_per_step": setup.plan.tokens_per_step,
        "averages_gradients": method.averages_gradients,
        "progress": method.progress,
        "train_s": method.clock.train_s(),
        "sent": dict(mesh.sent),
    }
    return write(Path(setup.config.out_dir), mesh, content, state)


def write(folder: Path, mesh, content: dict, state: dict) -> Path:
    """Write this rank's content and, on rank 0, state.json: all or nothing."""
    unfinished = folder / "checkpoint.tmp"
    final = folder / f"checkpoint-{content['steps']:08d}"  # rank 0's: A-EDiT's replicas differ
    paths = files(unfinished, mesh.world_size)
    failure = f"no checkpoint could be written to {folder}: "
    try:
        with alike(mesh, failure):
            unfinished.mkdir(exist_ok=True)
            with open(paths[mesh.rank], "wb") as file:
                torch.save(content, file)
        with alike(mesh, failure):
            if mesh.rank == 0:
                if not all(path.is_file() for path in paths):
                    raise UserError(f"{unfinished} is incomplete: nodes must share --out_dir")
                (unfinished / "state.json").write_text(json.dumps(state, indent=1))
                os.rename(unfinished, final)
                remove(list_checkpoints(folder)[: -state["flags"]["keep"]])
    except UserError:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk needs the room
        raise
    return final


# ---- loading ----


@contextmanager
def readable(path):
    """Damaged and foreign files raise errors of many kinds. All become UserError, one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UserError(
            f"checkpoint {path} cannot be read ({reason}); if it is damaged, or of another "
            "version of the code, delete it"
        ) from None


def read(path) -> tuple:
    """A checkpoint's state.json, and its flags."""
    with readable(path):
        state = json.loads((path / "state.json").read_bytes())
        return state, state["flags"]


def check_resume(setup):
    """Raise UserError if the run cannot continue its checkpoint with its flags."""
    saved, config, flags = setup.saved, setup.config, setup.saved["flags"]

    def refuse(reason):
        raise UserError(f"checkpoint {setup.path} {reason}")

    was = flags | saved["model_config"]
    now = vars(config) | vars(setup.plan.model_config)
    for name in "model", "optimizer", *saved["model_config"]:
        if name != "block_size" and was.get(name) != now[name]:
            refuse(
                f"was trained with another --{name}, {was.get(name)}: leave it out, and give the "
                "--data that it was trained on"
            )
    if flags["corpus_hash"] != setup.corpus.hash and "data" not in setup.given:
        refuse("was trained on another corpus: name a corpus with --data")
    if flags["method"] != config.method and not saved["averages_gradients"]:
        refuse(f"is past the warm-up of {flags['method']}: keep this method")
    took = saved["tokens_per_step"]
    take = setup.plan.tokens_per_step
    if took != take and not {"batch_size", "accum", "tokens_per_step"} & setup.given.keys():
        refuse(
            f"took {took:,} tokens per step, these ranks take {take:,}: give --accum 1 "
            f"--tokens_per_step {took}, or confirm the change with --batch_size or --accum"
        )


def load(setup, model, optimizer, method, clock):
    """Continue setup's checkpoint or start from the model of --init_from, if there is one.
    Raises UserError on all ranks if one of them cannot read the checkpoint."""
    if setup.source:
        setup.source.copy_to(model)
    if not setup.saved:
        return
    state = setup.saved
    mesh = model.mesh
    flags = state["flags"]
    N = flags["shards"]
    paths = files(setup.path, flags["world_size"])
    first = N * mesh.replica % len(paths)  # rank 0 of the replica to continue
    clock.start_at(state)
    mesh.sent.update(state["sent"])
    with clock, alike(mesh), readable(setup.path):  # A-EDiT's round begins here
        shared = [open_file(path) for path in paths[:N]]
        own = [open_file(path) for path in paths[first : first + N]]
        method.steps = optimizer.steps = own[0]["steps"]
        method.rounds = own[0]["rounds"]
        method.averages_gradients = state["averages_gradients"]
        if not method.averages_gradients:  # in place of begin()
            method.record.start_round()
            for name in method.scalars:
                value = own[0][name]
                if torch.is_tensor(value):
                    value = value.to(mesh.device, copy=True)
                setattr(method, name, value)
            now = vars(setup.config)
            method.resume_with({name for name in setup.given if flags.get(name) != now.get(name)})
        same_method = setup.config.method == flags["method"]
        for saved, found in zip((shared, own), vectors(model, method)):
            for name, vector in found.items():
                # In the warm-up the method may change. Vectors of another one do not fit.
                if same_method or name not in method.shared + method.private:
                    fill(vector, [file[name] for file in saved], model, name)


def fill(vector, saved: list, model, name: str):
    """vector <- this rank's shards, from the flat vectors of all saved shards."""
    shards = model.mesh.shards
    index = model.mesh.shard_index
    if len(saved) == shards:
        vector.copy_(saved[index])
        return
    pieces = []  # of each saved shard, by layer
    for i, file in enumerate(saved):
        pieces.append(file.split(layer_sizes(model, name, len(saved), i)))
    places = vector.split(layer_sizes(model, name, shards, index))
    for layout, first, place, *parts in zip(model.layouts, firsts(model, name), places, *pieces):
        whole = torch.cat(parts)[: layout.used - first]
        whole = pad(whole, (first, layout.padded - layout.used))
        own = whole.chunk(shards)[index]
        place.copy_(own[len(own) - len(place) :])
