"""Checkpoints: what a run needs to continue, on the same ranks or on others.

    out/edit/checkpoint-00000400/
        state.json       the run: progress, flags, mesh; a checksum of all of it
        rank-00000.pt    rank 0: its counters, scalars and flat vectors by name, and a label: of
                         which checkpoint and rank it is, a checksum of each value; a file per rank

Checkpoints are taken at round ends, the last one at the end of the training. What is equal in all
replicas there is only in the files of replica 0: a method's `shared` vectors, in most methods the
parameters, and in the warm-up (in mini-batch always) AdamW's moments. Replicas compare checksums of
it first. If they differ, the run ends.

The folder is written as checkpoint.tmp and gets its name when all ranks have written their files
and the disk has them (fsync). So list_checkpoints() finds only complete ones, whenever a rank is
killed or the power fails.

At a start every value is verified before it is used, by the checksums; those of state.json also as
flags are. The ranks share this work and agree on the result. A checkpoint that is damaged is
refused in one line. With --resume auto the one before is taken, and the damaged one gets the name
checkpoint-00000400.damaged. A disk that cannot be read now ends the start, and changes no name.

    same mesh        exact: on CPUs the run continues bit for bit (a GPU's attention adds in
                     varying order)
    other shards     exact but for the order of sums: a layer's shards are joined and cut again
    other replicas   replica i continues saved replica i mod M, M replicas saved

Nothing in a file is executed: JSON, and tensors through torch.load(weights_only=True).
"""

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

from config import UserError, check_fields, check_value, explain, make_config
from model import ModelConfig
from plumbing.posix import fcntl
from plumbing.text import to_disk

# Maps a file: tensors are read when they are used.
open_file = partial(torch.load, map_location="cpu", weights_only=True, mmap=True)


# ---- which one ----


def number(path) -> int | None:
    """The step in the name of a checkpoint's folder. None: it has another name."""
    found = re.fullmatch("checkpoint-([0-9]+)", Path(path).name)
    return int(found[1]) if found else None


def leftovers(folder, suffix: str) -> list:
    """What a run may have left: checkpoint-00000400 with this suffix. A user's
    checkpoint-best.tmp is not among them."""
    found = Path(folder).glob(f"checkpoint-*{suffix}")
    return [path for path in found if number(path.name.removesuffix(suffix)) is not None]


def list_checkpoints(folder) -> list:
    """The complete checkpoints of a run's folder, oldest first."""
    found = [path for path in Path(folder).glob("checkpoint-*") if number(path) is not None]
    return sorted(filter(Path.is_dir, found), key=number)


def choose(config) -> tuple:
    """(the run's folder; the checkpoints that the run may continue, oldest first: it takes the
    newest that is not damaged). Raises UserError if there is none, or if two runs would mix in the
    folder."""
    resume = config.resume
    out_dir = config.out_dir or f"out/{config.method}"
    if resume and config.overwrite:
        raise UserError("--resume, --overwrite: give only one of them")
    found = []
    if resume == "auto":
        found = list_checkpoints(out_dir)
    elif resume:
        found = list_checkpoints(resume)[-1:]
        if Path(resume, "state.json").exists():  # it is a checkpoint
            found = [Path(resume)]
        if not found:
            raise UserError(
                f"--resume {resume}: there is no checkpoint; "
                "name a run's folder or a checkpoint-... in it"
            )
        out_dir = config.out_dir or str(found[-1].parent)

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


def prepare(setup, mesh):
    """Make and lock the run's folder. Remove what a killed run has left, or an earlier run. All
    ranks call it before training. Raises UserError on all of them."""
    folder = Path(setup.config.out_dir)
    sign = folder / "checkpoint.tmp"
    with alike(mesh):
        if mesh.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            lock(folder)
            clean(folder, setup)
            sign.mkdir()
    # [start] all-gather of objects, all ranks, once per start
    sees = mesh.all_gather_object(sign.is_dir())
    if mesh.rank == 0:
        sign.rmdir()
    if not all(sees):
        line = f"--out_dir {folder}: rank {sees.index(False)} does not see this folder of rank 0, "
        line += "so no checkpoint can be written: name one that all nodes share"
        if setup.config.checkpoint_interval or setup.config.save_on_exit:
            raise UserError("" if mesh.rank else line)
        print(f"note    {line}")


def clean(folder, setup):
    own = list_checkpoints(folder)
    if setup.config.overwrite:
        remove(own)
        for path in leftovers(folder, ".damaged"):
            delete(path)
        for path in folder / "model.pt", *folder.glob("timeline-*.json"):
            path.unlink(missing_ok=True)
    elif own and setup.path:  # the run continues one of them; later ones are damaged
        (index,) = [i for i, path in enumerate(own) if path.samefile(setup.path)]
        for path in own[index + 1 :]:
            damaged = path.with_suffix(".damaged")
            delete(damaged)
            os.rename(path, damaged)
    for path in folder / "checkpoint.tmp", *leftovers(folder, ".tmp"):
        delete(path)


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
        delete(half_removed)


def delete(path):
    """A folder, if it is there. Of a link only the link goes."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path, ignore_errors=True)


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
    # [start] all-gather of objects, all ranks, 2 or 3 per start, 2 per checkpoint
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


def checksum(value, start: int = 0) -> int:
    """CRC-32 of a tensor on the host, or of what Python writes for any other value. start: the
    checksum of what comes before it. Copies no vector."""
    if torch.is_tensor(value):
        return zlib.crc32(value.reshape(-1).view(torch.uint8).numpy(), start)
    return zlib.crc32(repr(value).encode(), start)


def state_checksum(state: dict) -> int:
    """CRC-32 of a state.json. What JSON has read it writes as it was, also the order."""
    return zlib.crc32(json.dumps(state).encode())


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
    content = {"steps": method.steps, "rounds": method.rounds, **own}
    if not method.averages_gradients:
        content |= {name: getattr(method, name) for name in method.scalars}
    for name, value in content.items():
        if torch.is_tensor(value):
            content[name] = value.cpu()
    checksums = {name: checksum(value) for name, value in content.items()}

    sums = {}  # of what replicas share, up to the end of each layer
    for name, vector in equal.items():
        passed = 0
        parts = vector.split(layer_sizes(model, name, mesh.shards, mesh.shard_index))
        for l, layer in enumerate(parts):
            passed = sums[f"{name} of layer {l}"] = checksum(layer.cpu(), passed)
        if mesh.replica == 0:
            checksums[name] = passed
    # [sync] all-gather of objects, all ranks, once per checkpoint
    gathered = mesh.all_gather_object((sums, checksums))
    check_equal(mesh, [sums for sums, _ in gathered])
    if mesh.replica == 0:
        content |= {name: vector.cpu() for name, vector in equal.items()}

    identity = checksum([checksums for _, checksums in gathered])  # of the whole checkpoint
    content["label"] = {
        "checkpoint": identity,
        "rank": mesh.rank,
        "world_size": mesh.world_size,
        "checksums": checksums,
    }
    state = state | {
        "checkpoint": identity,
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
            if unfinished.is_symlink():  # somebody else's folder
                raise UserError(f"{unfinished} is a link: remove it")
            unfinished.mkdir(exist_ok=True)
            with open(paths[mesh.rank], "wb") as file:
                torch.save(content, file)
            to_disk(paths[mesh.rank])
        with alike(mesh, failure):
            if mesh.rank == 0:
                if not all(path.is_file() for path in paths):
                    raise UserError(f"{unfinished} is incomplete: nodes must share --out_dir")
                state = state | {"checksum": state_checksum(state)}
                (unfinished / "state.json").write_text(json.dumps(state, indent=1))
                to_disk(unfinished / "state.json")
                to_disk(unfinished)
                os.rename(unfinished, final)
                to_disk(folder)
                remove(list_checkpoints(folder)[: -state["flags"]["keep"]])
    except UserError:
        delete(unfinished)  # a full disk needs the room
        raise
    return final


# ---- loading ----


class NotNow(UserError):
    """The disk or the network does not give a file, which may be sound. The text is one line."""


@contextmanager
def readable(path):
    """Damaged and foreign files raise errors of many kinds. All become UserError, one line. A
    passing error becomes NotNow."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            reason = f"{error.strerror or error}: {error.filename or 'one of its files'}"
            hint = "start again when the disk gives it"
            raise NotNow(f"checkpoint {path} cannot be read now ({reason}); {hint}") from None
        reason = str(error)
        if not isinstance(error, UserError):
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
        if not path.exists():
            reason = "it is gone: the run that writes there keeps only its last ones, see --keep"
        raise UserError(f"checkpoint {path} cannot be read ({reason})") from None


# Of state.json, beside its flags and the fields of ModelConfig: an example and the limits.
STATE = {"step": 0, "tokens": 0, "metrics_bytes": 0, "tokens_per_step": 1, "train_s": 0.0}
STATE |= {"progress": 0.0, "averages_gradients": True, "checkpoint": 0}


def check_state(state: dict, methods: dict):
    """Raise an error unless all values of a state.json could be those of a run."""
    if not {"checkpoint", "checksum"} <= state.keys():
        raise UserError(
            "it has no checksums: an earlier edition of this code has saved it, which can continue "
            "it"
        )
    if state.pop("checksum") != state_checksum(state):
        raise UserError("state.json is damaged: its checksum differs")
    for name, example in STATE.items():
        check_value(name, state[name], example, {"below": 2**63})
    for group in "shard", "sync":
        check_value("sent", state["sent"][group], 0.0, {})
    shape = ModelConfig(**state["model_config"])
    if vars(shape) != state["model_config"]:
        raise UserError("its model_config is incomplete")
    check_fields("model_config: ", shape, {"above": 0})
    flags = state["flags"]
    check_fields("--", make_config({}, methods, flags), {})
    check_value("corpus_hash", flags["corpus_hash"], "", {})
    mesh = flags["mesh"]
    for name, value in {**mesh, "world_size": flags["world_size"]}.items():
        check_value(name, value, 1, {"low": 1})
    ranks = mesh["replicas"] * mesh["shards"]
    if (ranks, mesh["shards"]) != (flags["world_size"], flags["shards"]):
        raise UserError("its mesh is not that of its flags")


def read(path, methods: dict) -> tuple:
    """A checkpoint's state.json, checked, and its flags. methods: name -> Method class. Raises
    UserError."""
    with readable(path):
        state = json.loads((path / "state.json").read_bytes())
        check_state(state, methods)
        if number(path) not in (None, state["step"]):
            saved = f"another step than its state.json ({state['step']})"
            raise UserError(f"its folder's name says {saved}")
        world_size = state["flags"]["world_size"]
        there = len(list(path.glob("rank-*.pt")))
        if there < world_size:
            raise UserError(f"{world_size} ranks have saved it, and it has files of {there}")
        return state, state["flags"]


def open_part(path, state: dict, rank: int) -> dict:
    """What a rank has saved. Raises an error if its file is of another checkpoint or rank."""
    world_size = state["flags"]["world_size"]
    file = files(path, world_size)[rank]
    content = open_file(file)
    label = content["label"]
    found = label["checkpoint"], label["rank"], label["world_size"]
    if found != (state["checkpoint"], rank, world_size):
        raise UserError(f"{file.name} is of another checkpoint or rank")
    return content


def verify(path, state: dict, ranks):
    """Raise UserError unless the files of these ranks hold what was saved."""
    with readable(path):
        for rank in ranks:
            content = open_part(path, state, rank)
            saved = content.pop("label")["checksums"]
            if saved.keys() != content.keys():
                raise UserError(f"of rank {rank} there are other values than were saved")
            for name, value in content.items():
                if checksum(value) != saved[name]:
                    raise UserError(f"{name} of rank {rank} is damaged: its checksum differs")


def newest_sound(found: list, methods: dict, mesh, config) -> Path | None:
    """The newest of these checkpoints that is not damaged, None of none. All ranks of the mesh call
    it and verify the files together. Raises UserError, on all ranks, if all are damaged, or if one
    cannot be read now: it may be sound, and the run must not go back behind it."""
    # [start] all-gather of objects, all ranks, once per start
    if len(set(map(str, mesh.all_gather_object(found)))) > 1:
        hint = "nodes must share --out_dir and see the same files"
        raise UserError("" if mesh.rank else f"the ranks see different checkpoints: {hint}")
    lines = []
    for path in reversed(found):
        line = ""
        passing = False
        try:
            state, flags = read(path, methods)
            if not config.dry_run:
                verify(path, state, range(mesh.rank, flags["world_size"], mesh.world_size))
        except UserError as error:
            line = str(error)
            passing = isinstance(error, NotNow)
        # [start] all-gather of objects, all ranks, once per start, and per damaged checkpoint
        found_by = mesh.all_gather_object((line, passing))
        for line, passing in found_by:
            if passing:
                raise UserError("" if mesh.rank else line)
        damaged = [line for line, _ in found_by if line]
        if not damaged:
            for line in lines:
                print(f"resume  {line}; the one before is taken")
            return path
        lines.append(damaged[0])
    if lines:
        way_out = "name an earlier one; --resume auto, in its run's folder, does"
        if config.resume == "auto":
            way_out = "there is no other one; --overwrite starts anew"
        raise UserError("" if mesh.rank else f"{lines[0]}; {way_out}")
    return None


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
    first = N * mesh.replica % flags["world_size"]  # rank 0 of the replica to continue
    clock.start_at(state)
    mesh.sent.update(state["sent"])
    with clock, alike(mesh), readable(setup.path):  # A-EDiT's round begins here
        shared = [open_part(setup.path, state, rank) for rank in range(N)]
        own = [open_part(setup.path, state, rank) for rank in range(first, first + N)]
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
            changed = {name for name in setup.given if flags.get(name) != now.get(name)}
            if flags["corpus_hash"] == setup.corpus.hash:  # the corpus has only moved
                changed -= {"data"}
            method.resume_with(changed)
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
    sizes = [sum(layer_sizes(model, name, len(saved), i)) for i in range(len(saved))]
    if sizes != [file.numel() for file in saved]:
        raise UserError(f"{name} does not have this model's size")
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
