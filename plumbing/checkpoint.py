"""Checkpoints: what a run needs to continue, on the same ranks or on others.

    out/edit/checkpoint-00000400/          of a run with 2 replicas x 2 shards:
        replica-0-of-2-shard-0-of-2.pt     a file of each rank
        replica-0-of-2-shard-1-of-2.pt
        replica-1-of-2-shard-0-of-2.pt
        replica-1-of-2-shard-1-of-2.pt

train.py decides at each round end whether a checkpoint is due, and calls save(). Each rank then
writes all that it keeps into a file of its own:

    state             equal in all files: the checkpoint's random id, progress, flags, model's shape
    steps, rounds     of this replica
    scalars, vectors  by name: the method's, and the rank's shards of parameters and moments

The ranks write into the folder checkpoint.tmp. When the disk has the files of all of them (fsync),
the folder gets its name. So a checkpoint is complete, whenever a rank is killed or the power fails.

Without a shared disk each machine has the files of its own ranks. At a start the ranks tell each
other which files they see. A replica is whole if somebody sees each of its files. A rank needs the
files of the replica that it continues, and no others:

    same mesh        its own file. On CPUs the run continues bit for bit (a GPU's attention adds in
                     varying order)
    other shards     all files of its replica: a layer's shards are joined and cut again, which is
                     exact but for the order of later sums
    other replicas   replica i continues saved replica i mod M, of M whole ones
    a lost replica   likewise: one machine can go on alone if the other is gone with its disk

The newest checkpoint of which all ranks see what they need is continued. A line names each newer
one and what it lacks. A .pt file is a zip file, which has a CRC of each value. They are compared
before the training, and a damaged file ends the start. Nothing in a file is executed:
torch.load(weights_only=True).

Replicas are not compared. Processors may round differently, so what is equal in all replicas by
the method's equations may differ in the last bits. Each replica continues its own.
"""

import math
import os
import re
import shutil
import zipfile
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.nn.functional import pad

from config import UserError, explain
from plumbing.posix import fcntl

UNFINISHED = "checkpoint.tmp"


# ---- names ----


def list_checkpoints(folder) -> list:
    """The checkpoints in a run's folder, oldest first. checkpoint-best is a user's own."""
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        if re.fullmatch("checkpoint-[0-9]+", path.name) and path.is_dir():
            found.append(path)
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


def name_of_file(replica: int, replicas: int, shard: int, shards: int) -> str:
    return f"replica-{replica}-of-{replicas}-shard-{shard}-of-{shards}.pt"


def files_of(path: Path) -> set:
    """The names of the ranks' files in a checkpoint."""
    return {file.name for file in path.glob("replica-*-of-*-shard-*-of-*.pt")}


def sort_files(files: set) -> tuple:
    """(replica -> the names of its files, of each replica that is whole; the names of lost files).
    files: all that somebody sees. Raises UserError if no replica is whole."""
    meshes = set()
    for name in files:
        _, replicas, _, shards = map(int, re.findall("[0-9]+", name))
        meshes.add((replicas, shards))
    if not meshes:
        raise UserError("it has no files")
    if len(meshes) > 1:
        raise UserError("it has files of several runs")

    ((replicas, shards),) = meshes
    whole = {}
    lost = []
    for replica in range(replicas):
        names = [name_of_file(replica, replicas, shard, shards) for shard in range(shards)]
        missing = [name for name in names if name not in files]
        lost += missing
        if not missing:
            whole[replica] = names
    if not whole:
        raise UserError(f"it lacks {listed(lost)}, so no replica is whole")
    return whole, lost


def listed(names: list) -> str:
    """The first name of many."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0] + more


def needed_files(rank: int, shards: int, whole: dict) -> list:
    """The files that a rank continues. shards: of the run that starts now; whole: as above."""
    replica, shard = divmod(rank, shards)
    if replica not in whole:
        numbers = list(whole)
        replica = numbers[replica % len(numbers)]
    names = whole[replica]
    if len(names) == shards:
        return [names[shard]]
    return names


# ---- saving ----


def save(setup, model, method, state: dict) -> Path:
    """Write a checkpoint into the run's folder and remove the oldest. state: the log's. All ranks
    call it at a round end. Raises UserError on all of them if one cannot write its file. Earlier
    checkpoints stay then."""
    mesh = model.mesh
    if mesh.device.type == "cuda":  # --offload: copies to vectors on the host may be in flight
        torch.cuda.synchronize()
    state = state | {
        "id": os.urandom(8).hex(),
        "step": method.steps,
        "flags": setup.describe(mesh),
        "model_config": vars(model.config),
        "tokens_per_step": setup.plan.tokens_per_step,
        "averages_gradients": method.averages_gradients,
        "progress": method.progress,
        "train_s": method.clock.train_s(),
        "sent": dict(mesh.sent),
    }
    # [sync] all-gather of objects, all ranks, once per checkpoint
    state = mesh.all_gather_object(state)[0]  # A-EDiT's replicas differ in their steps
    content = {
        "state": state,
        "steps": method.steps,
        "rounds": method.rounds,
        "scalars": {},
        "vectors": vectors(model, method),
    }
    if not method.averages_gradients:  # else begin() has not made them yet
        content["scalars"] = {name: getattr(method, name) for name in method.scalars}
    for values in content["scalars"], content["vectors"]:
        for name, value in values.items():
            if torch.is_tensor(value):
                values[name] = value.cpu()  # no copy if it is there
    return write(Path(setup.config.out_dir), mesh, content, setup.config.keep)


def vectors(model, method) -> dict:
    """This rank's flat vectors by name."""
    found = {
        "parameters": model.master,
        "exp_avg": model.exp_avg,
        "exp_avg_sq": model.exp_avg_sq,
    }
    for name in method.vectors:
        found[name] = getattr(method, name)
    return found


def write(folder: Path, mesh, content: dict, keep: int) -> Path:
    """Each phase begins when the one before has ended on all ranks."""
    unfinished = folder / UNFINISHED
    final = folder / f"checkpoint-{content['state']['step']:08d}"
    file = unfinished / name_of_file(mesh.replica, mesh.replicas, mesh.shard_index, mesh.shards)
    failure = f"no checkpoint could be written to {folder}: "
    try:
        with alike(mesh, failure):
            remove([final])  # the start has left it out, and the run has come here again
            unfinished.mkdir(parents=True, exist_ok=True)  # the run's folder may be gone
            with open(file, "wb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(stream.fileno())
            names_to_disk(unfinished)
    except UserError:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk needs the room
        raise
    with alike(mesh, failure):
        with suppress(FileNotFoundError):  # another rank that shares the folder was faster
            os.rename(unfinished, final)
        names_to_disk(folder)
    with alike(mesh, failure):
        until_now = [path for path in list_checkpoints(folder) if step_of(path) <= step_of(final)]
        remove(until_now[:-keep])
    return final


def remove(checkpoints: list):
    """Delete these folders. They get another name first: a checkpoint must not look complete while
    some of its files are gone."""
    for path in checkpoints:
        half_removed = path.with_suffix(".tmp")
        with suppress(FileNotFoundError):  # another rank that shares the folder was faster
            os.rename(path, half_removed)
            shutil.rmtree(half_removed, ignore_errors=True)


def names_to_disk(folder: Path):
    """Wait until the disk has the names in a folder, if its file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@contextmanager
def alike(mesh, doing: str = ""):
    """If the block raises an error that explain() knows on one rank, all ranks raise UserError:
    rank 0 with its line, which begins with `doing` and names the rank if it is another, the others
    without one. So no rank leaves the block before all have come to its end."""
    error = ""
    try:
        yield
    except Exception as wrong:
        error = explain(wrong)[1]
    # [start] all-gather of objects, all ranks, 5 per start, 3 per checkpoint
    for rank, line in enumerate(mesh.all_gather_object(error)):
        if line:
            where = f"rank {rank}: " if rank else ""
            raise UserError("" if mesh.rank else doing + where + line)


# ---- which one ----


def choose(config) -> tuple:
    """(the run's folder; the checkpoints that the run may continue, oldest first). Raises UserError
    if there is none, or if two runs would mix in the folder."""
    resume = config.resume
    out_dir = config.out_dir or f"out/{config.method}"
    if resume and config.overwrite:
        raise UserError("--resume, --overwrite: give only one of them")
    found = []
    if resume == "auto":
        found = list_checkpoints(out_dir)
    elif resume:
        found = list_checkpoints(resume)
        if files_of(Path(resume)) or Path(resume, "state.json").exists():  # it is a checkpoint
            found = [Path(resume)]
        if not found:
            raise UserError(
                f"--resume {resume}: there is no checkpoint; "
                "name a run's folder or a checkpoint-... in it"
            )
        out_dir = config.out_dir or str(found[-1].parent)
    if found and Path(found[-1], "state.json").exists():
        raise UserError(
            f"checkpoint {found[-1]} is of an earlier edition of this code, which can continue it; "
            "start anew in another --out_dir, or with --overwrite and without --resume"
        )

    own = list_checkpoints(out_dir)
    if own and not config.dry_run:  # a run that is writing there could remove what this one reads
        os.close(lock(out_dir, fcntl.LOCK_SH))
    earlier = own or Path(out_dir, "model.pt").exists()
    continues = own and found and found[-1].samefile(own[-1])
    if earlier and not (continues or config.overwrite or config.dry_run):
        raise UserError(
            f"--out_dir {out_dir} has an earlier run: --resume auto continues it, "
            "--overwrite deletes it; or name another --out_dir"
        )
    return out_dir, found


def newest(found: list, mesh, world_size: int, shards: int | None) -> Path | None:
    """The newest of these checkpoints of which all ranks see what they need; None: there are none.
    All ranks of the mesh call it. world_size, shards: of the run; None: its shards follow the
    checkpoint's. Raises UserError, on all ranks, if no checkpoint can be continued."""
    own = {path.name: path for path in found}
    # [start] all-gather of objects, all ranks, once per start
    seen = mesh.all_gather_object({name: files_of(path) for name, path in own.items()})
    names = set().union(*seen)
    lacking = []  # a line for each newer checkpoint
    for name in sorted(names, key=lambda name: (len(name), name), reverse=True):
        try:
            check_seen([files.get(name, set()) for files in seen], world_size, shards)
        except UserError as error:
            lacking.append(f"{name}: {error}")
            continue
        for line in lacking:
            print(f"note    {line}; {name} is continued")
        return own[name]
    if lacking:
        raise UserError("" if mesh.rank else f"{lacking[0]}; --overwrite starts anew")
    return None


def check_seen(seen: list, world_size: int, shards: int | None):
    """Raise UserError unless each rank sees the files of a checkpoint that it needs. seen: the
    names of the files that each rank sees."""
    whole, _ = sort_files(set().union(*seen))
    if not shards:
        saved_shards = len(next(iter(whole.values())))
        shards = math.gcd(saved_shards, world_size)
    for rank, files in enumerate(seen):
        for name in needed_files(rank, shards, whole):
            if name not in files:
                other = [name in files for files in seen].index(True)
                raise UserError(
                    f"rank {rank} needs {name}, which rank {other} sees: copy it there (just after "
                    "a kill its folder may be called checkpoint.tmp), or give torchrun --node_rank "
                    "as before"
                )


def prepare(setup, mesh):
    """Make the run's folder and lock it. Remove what a killed run has left (checkpoint.tmp, and an
    old checkpoint that was half removed), and with --overwrite the earlier run. All ranks call it
    before training. Raises UserError on all of them."""
    folder = Path(setup.config.out_dir)
    with alike(mesh):
        folder.mkdir(parents=True, exist_ok=True)
        if mesh.rank == 0:
            lock(folder)
    with alike(mesh):
        for path in folder.glob("checkpoint*.tmp"):
            if re.fullmatch("checkpoint(-[0-9]+)?", path.stem):  # not checkpoint-best.tmp
                shutil.rmtree(path, ignore_errors=True)
        if setup.config.overwrite:
            remove(list_checkpoints(folder))
            for path in folder / "model.pt", *folder.glob("timeline-*.json"):
                path.unlink(missing_ok=True)


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


# ---- loading ----


@contextmanager
def readable(path):
    """Damaged and foreign files raise errors of many kinds. All become UserError, one line."""
    try:
        yield
    except Exception as error:
        reason = str(error)
        if not isinstance(error, UserError):
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"checkpoint {path} cannot be read ({reason}): if it is damaged, delete it, and "
            "--resume auto continues the one before"
        ) from None


def read(path: Path, methods: dict) -> dict:
    """The state of a checkpoint. Reads no vector. methods: name -> Method class. Raises
    UserError."""
    with readable(path):
        file = path / min(files_of(path))
        with zipfile.ZipFile(file) as archive:
            archive.read(archive.namelist()[0])  # data.pkl has the state; this compares its CRC
        state = open_file(file)["state"]
    method = state["flags"]["method"]
    if method not in methods:
        raise UserError(f"checkpoint {path} is of --method {method}, which this code does not have")
    return state


def open_file(file: Path) -> dict:
    """Maps the file: tensors are read when they are used."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def open_part(file: Path, state: dict) -> dict:
    """What a rank has saved. Raises an error if it is damaged or of another checkpoint."""
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise UserError(f"{file.name} is damaged: the CRC of {damaged} differs")
    content = open_file(file)
    if content["state"]["id"] != state["id"]:
        raise UserError(f"{file.name} is of another checkpoint")
    return content


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
    if took != take and not BATCH & setup.given.keys():
        refuse(
            f"took {took:,} tokens per step, these ranks take {take:,}: give --accum 1 "
            f"--tokens_per_step {took}, or confirm the change with --batch_size or --accum"
        )


BATCH = {"batch_size", "accum", "tokens_per_step"}


def changed_flags(setup) -> set:
    """The given flags whose values differ from the checkpoint's, for Method.resume_with()."""
    flags = setup.saved["flags"]
    now = vars(setup.config)
    changed = {name for name in setup.given if flags.get(name) != now.get(name)}

    changed -= {"data"}
    if flags["corpus_hash"] != setup.corpus.hash:  # it has not only moved
        changed.add("data")

    # What counts is the batch of a replica, from whatever flags and shards it comes.
    was = flags["shards"] * flags["micro_steps"] * flags["micro_batch"]
    if was == setup.config.shards * setup.plan.micro_steps * setup.plan.micro_batch:
        changed -= BATCH
    else:
        changed.add("batch_size")
    return changed


def load(setup, model, optimizer, method, clock):
    """Continue setup's checkpoint or start from the model of --init_from, if there is one.
    Raises UserError on all ranks if one of them cannot read the checkpoint."""
    mesh = model.mesh
    if setup.source:
        setup.source.copy_to(model)
        check_source(setup, model)
    if not setup.saved:
        return
    state = setup.saved
    path = setup.path
    clock.start_at(state)
    mesh.sent.update(state["sent"])
    # [start] all-gather of objects, all ranks, once per start
    seen = mesh.all_gather_object(files_of(path))
    with clock, alike(mesh):  # A-EDiT's round begins here
        with readable(path):
            whole, lost = sort_files(set().union(*seen))
            names = needed_files(mesh.rank, mesh.shards, whole)
            saved = [open_part(path / name, state) for name in names]
        if lost:
            print(f"note    {path} lacks {listed(lost)}: other replicas take their place")
        method.steps = optimizer.steps = saved[0]["steps"]
        if mesh.replica == 0:  # Checkpoints have its steps as names. Its own file may be lost, and
            method.steps = state["step"]  # in A-EDiT the one in its place may have taken fewer.
        method.rounds = saved[0]["rounds"]
        method.averages_gradients = state["averages_gradients"]
        if not method.averages_gradients:  # in place of begin()
            method.record.start_round()
            with readable(path):
                for name in method.scalars:
                    value = saved[0]["scalars"][name]
                    if torch.is_tensor(value):
                        value = value.to(mesh.device, copy=True)  # the file is not kept open
                    setattr(method, name, value)
            method.resume_with(changed_flags(setup))
        same_method = setup.config.method == state["flags"]["method"]
        with readable(path):
            for name, vector in vectors(model, method).items():
                # In the warm-up the method may change. Vectors of another one do not fit.
                if same_method or name not in method.vectors:
                    fill(vector, [part["vectors"][name] for part in saved], model, name)


def fill(vector, saved: list, model, name: str):
    """vector <- this rank's shards, from its own saved vector, or from those of all saved
    shards."""
    shards = model.mesh.shards
    if len(saved) == 1 and len(saved[0]) == len(vector):
        vector.copy_(saved[0])
        return
    # The first element of each layer that the vector has: with Muon exp_avg_sq has no matrices.
    firsts = [0] * len(model.layers)
    if name == "exp_avg_sq":
        firsts = model.squares_from
    pieces = []  # of each saved shard, by layer
    for shard, part in enumerate(saved):
        pieces.append(part.split(model.sizes_from(firsts, len(saved), shard)))
    places = vector.split(model.sizes_from(firsts, shards, model.mesh.shard_index))
    for layout, first, place, *parts in zip(model.layouts, firsts, places, *pieces):
        whole = torch.cat(parts)[: layout.used - first]
        whole = pad(whole, (first, layout.padded - layout.used))
        own = whole.chunk(shards)[model.mesh.shard_index]
        place.copy_(own[len(own) - len(place) :])


def check_source(setup, model):
    """Raise UserError, on all ranks, unless --init_from is the same model on all machines."""
    mesh = model.mesh
    checksum = zlib.crc32(model.master.cpu().numpy())
    # [start] all-gather of objects, all ranks, once per start, with --init_from
    checksums = mesh.all_gather_object(checksum)
    for rank, other in enumerate(checksums):
        if other != checksums[rank % mesh.shards]:
            line = f"--init_from {setup.source.path}: rank {rank} has another model than rank 0"
            raise UserError("" if mesh.rank else f"{line}; copy one of them to all machines")
