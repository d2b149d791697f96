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

import fcntl
import json
import os
import re
import shutil
import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import pad

from config import UserError

NAME = re.compile(r"checkpoint-\d{8,}")
# Maps a file: tensors are read when they are used.
open_file = partial(torch.load, map_location="cpu", weights_only=True, mmap=True)


# ---- which one ----


def list_checkpoints(folder) -> list:
    """The complete checkpoints of a run's folder, oldest first."""
    try:  # not glob(): an unreadable folder would look empty
        found = [path for path in Path(folder).iterdir() if NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def run_folder(path: str) -> Path:
    """The folder of the run that --resume names by itself or by one of its checkpoints."""
    return Path(path).parent if NAME.fullmatch(Path(path).name) else Path(path)


def choose(resume: str, out_dir: str, overwrite: bool) -> Path | None:
    """The checkpoint to continue, None to start afresh. resume: "", "auto" or a folder (a run's or
    a checkpoint's). Raises UserError if there is none, or if two runs would mix in out_dir."""
    if resume and overwrite:
        raise UserError("--resume, --overwrite: give only one of them")
    own = list_checkpoints(out_dir)
    found = own if resume == "auto" else []
    if own:  # a run that is writing there could remove what this one reads
        os.close(lock(out_dir, fcntl.LOCK_SH))
    if resume not in ("", "auto"):
        there = list_checkpoints(run_folder(resume))
        found = [path for path in there if Path(resume) in (path, path.parent)]
        if not found:
            hint = "name a run's folder or a checkpoint-... in it"
            raise UserError(f"--resume {resume[:200]}: there is no checkpoint; {hint}")
    continues = own and found and found[-1].samefile(own[-1])
    if (own or Path(out_dir, "model.pt").exists()) and not continues and not overwrite:
        hint = "name another --out_dir, or delete that run with --overwrite"
        if own:
            hint = f"--resume auto continues {own[-1].name}; otherwise {hint}"
        raise UserError(f"--out_dir {out_dir} has an earlier run: {hint}")
    return found[-1] if found else None


def lock(folder, kind=fcntl.LOCK_EX):
    """Lock a run's folder until this process ends or closes the descriptor that this returns.
    Raises UserError if another run has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        hint = "wait for it or name another folder"
        raise UserError(f"--out_dir {folder}: another run is writing there; {hint}") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


# ---- saving ----


class ReplicasDiffer(Exception):
    """Vectors that must be equal in all replicas are not. The text is one line."""

    exit_code = 1  # as after a lost rank: a restart from an earlier checkpoint may go well


def files(path, mesh: dict) -> list:
    """The files of all ranks, in rank order. mesh: {"replicas": M, "shards": N}."""
    return [path / f"rank-{r:05d}.pt" for r in range(mesh["replicas"] * mesh["shards"])]


def vectors(model, method) -> tuple:
    """Name -> flat vector: those that are equal in all replicas at a round end, and the others."""
    equal = {name: getattr(method, name) for name in method.shared}
    own = {name: getattr(method, name) for name in method.private}
    warm_up = method.averages_gradients  # replicas differ in errors of quantized gradients only
    for name in "exp_avg", "exp_avg_sq":
        (equal if warm_up else own)[name] = getattr(model, name)
    (equal if warm_up or method.equal_replicas else own)["parameters"] = model.master
    return equal, own


def firsts(model, name: str) -> list:
    """The first element of each layer that a vector has: with Muon exp_avg_sq has no matrices."""
    return model.squares_from if name == "exp_avg_sq" else [0] * len(model.layers)


def checksums(model, equal: dict) -> dict:
    """Of each layer of these vectors, which are on the host, by its name."""
    found = {}
    for name, vector in equal.items():
        sizes = model.sizes_from(firsts(model, name), model.mesh.shards, model.mesh.shard_index)
        for l, layer in enumerate(vector.split(sizes)):
            found[f"{name} of layer {l}"] = zlib.crc32(layer.numpy())
    return found


def check_equal(mesh, found: list):
    """Raise ReplicasDiffer on all ranks, rank 0 with a line, unless each rank has found the same
    checksums as the rank with its shard in replica 0."""
    for rank, own in enumerate(found):
        replica, shard_index = divmod(rank, mesh.shards)
        for name, checksum in own.items():
            if checksum != found[shard_index][name]:
                line = f"{name}: replica {replica} is not equal to replica 0, so a memory or a "
                line += "link is faulty, or their hardware differs; --resume auto continues from "
                line += "the last checkpoint"
                raise ReplicasDiffer("" if mesh.rank else line)


def save(setup, model, method, state: dict) -> Path:
    """Write a checkpoint into the run's folder and remove the oldest. state: the log's. All ranks
    call it at a round end. Raises ReplicasDiffer, or UserError if a rank cannot write its
    part, on all of them; earlier checkpoints stay."""
    mesh, flags = model.mesh, setup.describe(model.mesh)
    state = state | {
        "progress": method.progress,
        "train_s": method.clock.train_s(),
        "sent": dict(mesh.sent),
        "tokens_per_step": setup.plan.tokens_per_step,
    }
    if mesh.device.type == "cuda":  # --offload: copies to vectors on the host may be in flight
        torch.cuda.synchronize()
    scalars = () if method.averages_gradients else method.scalars
    content = {name: getattr(method, name) for name in ("steps", "rounds", *scalars)}
    equal, own = vectors(model, method)
    equal = {name: vector.cpu() for name, vector in equal.items()}
    # [sync] all-gather of objects, all ranks, once per checkpoint
    found = mesh.all_gather_object((method.steps, checksums(model, equal)))
    check_equal(mesh, [own for _, own in found])
    content |= own if mesh.replica > 0 else own | equal
    parameters = model.master.cpu()
    for name, value in content.items():
        if torch.is_tensor(value):
            # At a round end the anchor is the parameters. torch.save writes the same tensor once.
            value = value.cpu()
            content[name] = parameters if torch.equal(value, parameters) else value
    steps = [steps for steps, _ in found[:: mesh.shards]]  # A-EDiT's replicas differ
    unfinished = Path(setup.config.out_dir, "checkpoint.tmp")
    final = unfinished.with_name(f"checkpoint-{steps[0]:08d}")
    paths = files(unfinished, flags["mesh"])
    with all_or_none(mesh, unfinished):
        unfinished.mkdir(exist_ok=True)
        with open(paths[mesh.rank], "wb") as file:
            torch.save(content, file)
    state |= {
        "flags": flags, "mesh": flags["mesh"], "model_config": vars(model.config), "steps": steps,
        "averages_gradients": method.averages_gradients,
    }  # fmt: skip
    with all_or_none(mesh, unfinished):
        if mesh.rank == 0:
            if unseen := [path for path in paths if not path.is_file()]:
                raise OSError(f"rank 0 does not see {unseen[0]}: nodes must share --out_dir")
            (unfinished / "state.json").write_text(json.dumps(state, indent=1))
            os.rename(unfinished, final)
            remove(list_checkpoints(final.parent)[: -flags["keep"]])
    return final


@contextmanager
def all_or_none(mesh, unfinished):
    """If one rank cannot write, all ranks raise UserError, rank 0 with a line."""
    error = ""
    try:
        yield
    except (OSError, RuntimeError) as wrong:  # torch.save hides the OSError
        error = one_line(wrong if isinstance(wrong, OSError) else wrong.__context__ or wrong)
    # [sync] all-gather of objects, all ranks, twice per checkpoint
    if errors := list(filter(None, mesh.all_gather_object(error))):
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk needs the room
        line = f"no checkpoint could be written to {unfinished.parent}: {errors[0]}"
        raise UserError("" if mesh.rank else line)


def remove(checkpoints: list):
    """A checkpoint must not look complete while some of its files are gone."""
    for path in checkpoints:
        half_removed = path.with_suffix(".tmp")
        os.rename(path, half_removed)
        shutil.rmtree(half_removed, ignore_errors=True)


def clean_up(folder, overwrite: bool):
    """Remove what a killed run has left, or an earlier run. Rank 0 calls it before training."""
    remove(list_checkpoints(folder) if overwrite else [])
    for path in Path(folder).glob("checkpoint*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    # Timelines may be of other spans and of more ranks.
    for name in ["timeline-*.json"] + overwrite * ["model.pt", "metrics.jsonl"]:
        for path in Path(folder).glob(name):
            path.unlink()


def one_line(error) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


# ---- loading ----


@contextmanager
def readable(path):
    """Damaged and foreign files raise errors of many kinds. All become UserError, one line."""
    try:
        yield
    except Exception as error:
        hint = "if it is damaged, or of another version of the code, delete it"
        if not path.exists():
            hint = "another run writes there and has removed it; start again"
        raise UserError(f"checkpoint {path} cannot be read ({one_line(error)}); {hint}") from None


def read(path, rank: int = 0, world_size: int = 1) -> dict:
    """A checkpoint's state.json. Raises UserError if it or this rank's part of the files is bad."""
    with readable(path):
        state = json.loads((path / "state.json").read_bytes())
        for file in files(path, state["mesh"])[rank::world_size]:
            open_file(file)["steps"]
        return state


def check_resume(setup):
    """Raise UserError if the run cannot continue its checkpoint with its flags."""
    saved, config, given, flags = setup.saved, setup.config, setup.given, setup.saved["flags"]
    took, take = saved["tokens_per_step"], setup.plan.tokens_per_step
    was = saved["model_config"] | {"model": flags["model"]}
    now = vars(setup.plan.model_config) | {"model": config.model, "block_size": was["block_size"]}
    optimizer = flags.get("optimizer", "adamw")
    other = " ".join(f"--{name}" for name in sorted(was) if was[name] != now[name])
    reasons = {
        "has another vocabulary: give the --data that it was trained on": "--vocab_size" in other,
        f"has another shape: leave out {other}": other,
        "was trained on another corpus: name a corpus with --data": (
            flags["corpus_hash"] != setup.corpus.hash and "data" not in given
        ),
        f"was trained with --optimizer {optimizer}: keep it": config.optimizer != optimizer,
        f"is past the warm-up of {flags['method']}: keep this method": (
            config.method != flags["method"] and not saved["averages_gradients"]
        ),
        f"took {took:,} tokens per step, these ranks take {take:,}: keep the number with "
        f"--tokens_per_step {took}, or confirm the change with --batch_size or --accum": (
            take != took and not {"batch_size", "accum", "tokens_per_step"} & given.keys()
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"checkpoint {setup.path} {reason}")


def load(setup, model, optimizer, method, clock):
    """Continue setup's checkpoint or start from the model of --init_from, if there is one. No
    communication. Raises UserError for files that do not contain what state.json promises."""
    if setup.source:
        return setup.source.copy_to(model)
    if not setup.saved:
        return
    state, mesh, N = setup.saved, model.mesh, setup.saved["mesh"]["shards"]
    clock.start_at(state)
    mesh.sent.update(state["sent"])
    with clock, readable(setup.path):  # A-EDiT's round begins here
        replica = mesh.replica % state["mesh"]["replicas"]
        paths = files(setup.path, state["mesh"])
        opened = [[open_file(path) for path in paths[r * N : r * N + N]] for r in (0, replica)]
        restore(method, opened[1][0], state["averages_gradients"])
        same_method = setup.config.method == state["flags"]["method"]
        for saved, found in zip(opened, vectors(model, method)):
            for name, vector in found.items():
                # In the warm-up the method may change. Vectors of another one do not fit.
                if same_method or name not in method.shared + method.private:
                    fill(vector, [file[name] for file in saved], model, firsts(model, name))
    optimizer.steps = method.steps
    model.invalidate_gathered()


def restore(method, saved: dict, averages_gradients: bool):
    """Counters and scalars, in place of begin()."""
    method.steps = saved["steps"]
    method.rounds = saved["rounds"]
    method.averages_gradients = averages_gradients
    if averages_gradients:
        return
    method.record.start_round()
    for name in method.scalars:
        value = saved[name]
        if torch.is_tensor(value):
            value = value.to(method.mesh.device, copy=True)
        setattr(method, name, value)


def fill(vector, saved: list, model, firsts: list):
    """vector <- this rank's shards, from the flat vectors of all saved shards."""
    shards, index = model.mesh.shards, model.mesh.shard_index
    if len(saved) == shards:
        vector.copy_(saved[index])
        return
    places = vector.split(model.sizes_from(firsts, shards, index))
    files = []
    for i, file in enumerate(saved):
        files.append(file.split(model.sizes_from(firsts, len(saved), i)))
    for layout, first, place, *pieces in zip(model.layouts, firsts, places, *files):
        whole = torch.cat(pieces)[: layout.used - first]
        whole = pad(whole, (first, layout.padded - layout.used))
        own = whole.chunk(shards)[index]
        place.copy_(own[len(own) - len(place) :])
