"""Checkpoints: what a run needs to continue, on the same ranks or on others.

    out/edit/checkpoint-00000400/
        state.json       the run: progress, flags, mesh; a checksum of all of it
        rank-00000.pt    rank 0: its counters, scalars and flat vectors by name, and a label: of
                         which checkpoint and rank it is, a checksum of each value; a file per rank

Checkpoints are taken at round ends, the last one at the end of the training. What is equal in all
replicas there is only in the files of replica 0: a method's `shared` vectors, in most methods the
parameters, and in the warm-up (with minibatch always) AdamW's moments. Replicas compare checksums
of it first. If they differ, the run ends.

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

Machines without a shared disk. At the start the ranks find out which of them see one folder. The
ranks of a replica must. Each folder then gets the files of its own ranks and a state.json, which
lists the ranks of all `folders`. What is equal in all replicas is in the files of the first replica
of each folder. The folders get their new names when all of them are complete, and old checkpoints
go when all have their names. So the machines always have a complete checkpoint in common. A start
takes the newest of these; one that only some machines have gets the name .damaged, too. On the same
mesh each rank continues its own file, exactly. On another mesh, or where a file is lost, all ranks
must see the same files (copy them), and replica i continues replica i mod M of these.

Nothing in a file is executed: JSON, and tensors through torch.load(weights_only=True).
"""

import json
import os
import re
import shutil
import socket
import zlib
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import pad

from config import UserError, check_fields, check_value, explain, make_config
from model import ModelConfig
from plumbing import shm
from plumbing.posix import fcntl
from plumbing.text import regular_file, to_disk

UNFINISHED = "checkpoint.tmp"

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


def name_of(step) -> str:
    return f"checkpoint-{step:0>8}"


def unnamed(folder) -> list:
    """checkpoint.tmp, if this machine has died when its checkpoint was complete but for its name.
    Other machines may have renamed theirs."""
    path = Path(folder, UNFINISHED)
    complete = {"folders", "step"} <= peek(path).keys() and not path.is_symlink()
    return [path] if complete else []


def peek(path) -> dict:
    """What a checkpoint's state.json says, unchecked. {}: it cannot be read."""
    with suppress(OSError, ValueError, RecursionError, UserError):
        state = json.loads(regular_file(path / "state.json").read_bytes())
        if isinstance(state, dict):
            return state
    return {}


def final_name(path) -> str:
    """A checkpoint's name, also of one that does not have it yet."""
    if path.name != UNFINISHED:
        return path.name
    return name_of(peek(path)["step"])


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
        found = list_checkpoints(resume)
        if found and "folders" not in peek(found[-1]):  # else an older one may be the common one
            found = found[-1:]
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
    if resume == "auto":
        found += unnamed(out_dir)
    return out_dir, found


def prepare(setup, mesh):
    """Make and lock the run's folder, on each machine that has its own. Remove what a killed run
    has left, or an earlier run. All ranks call it before training. Raises UserError on all of
    them."""
    check_parts(setup, mesh)
    folder = Path(setup.config.out_dir)
    folders = find_folders(folder, mesh)
    check_replicas(folders, setup.config, mesh)
    (own,) = [ranks for ranks in folders if mesh.rank in ranks]
    path = setup.path
    if path and path.name == UNFINISHED:
        setup.path = path.with_name(name_of(setup.saved["step"]))
    with alike(mesh):
        if mesh.rank == own[0]:
            lock(folder)
            if path != setup.path:
                os.rename(path, setup.path)
            clean(folder, setup)
    if len(folders) > 1:
        setup.folders = folders
        parts = "; ".join(", ".join(map(str, ranks)) for ranks in folders)
        print(
            f"note    no shared --out_dir {folder}: these ranks each keep their own files in it: "
            f"{parts}"
        )


def find_folders(folder, mesh) -> list:
    """The ranks that see one folder under this name, for each such folder: [[0, 1, ...]] if they
    share it. Makes the folder."""
    sign = folder / f"sign-{os.urandom(8).hex()}.tmp"
    try:
        with alike(mesh):
            folder.mkdir(parents=True, exist_ok=True)
            sign.touch()
        # [start] all-gather of objects, all ranks, once per start
        signs = mesh.all_gather_object(sign.name)
        seen = [rank for rank, name in enumerate(signs) if (folder / name).exists()]
        # [start] all-gather of objects, all ranks, once per start
        seen_by = mesh.all_gather_object(seen)
    finally:
        with suppress(OSError):
            sign.unlink()
    folders = []
    for ranks in seen_by:
        if ranks not in folders:
            folders.append(ranks)
    if sorted(sum(folders, [])) != list(range(mesh.world_size)):
        line = f"--out_dir {folder}: the ranks do not see the same files yet; start again"
        raise UserError("" if mesh.rank else line)
    return folders


def check_replicas(folders: list, config, mesh):
    """Raise UserError unless the ranks of each replica share a folder."""
    place = {rank: i for i, ranks in enumerate(folders) for rank in ranks}
    for rank in range(mesh.world_size):
        first = rank - rank % config.shards
        if place[rank] != place[first]:
            line = (
                f"--out_dir {config.out_dir}: ranks {first} and {rank} are one replica and do not "
                "share this folder; lower --shards, so that a replica lies on one machine, or name "
                "a folder that both machines share"
            )
            raise UserError("" if mesh.rank else line)


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
    for path in folder / UNFINISHED, *leftovers(folder, ".tmp"):
        delete(path)
    for path in folder.glob("sign-*.tmp"):
        path.unlink(missing_ok=True)  # another rank may be removing its own


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
    rank 0 with its line, which begins with `doing` and names the rank if it is another, the others
    without one."""
    error = ""
    try:
        yield
    except Exception as wrong:
        error = explain(wrong)[1]
    # [start] all-gather of objects, all ranks, 4 or 5 per start, 4 per checkpoint
    for rank, line in enumerate(mesh.all_gather_object(error)):
        if line:
            where = f"rank {rank}: " if rank else ""
            raise UserError("" if mesh.rank else doing + where + line)


def files(path, world_size: int) -> list:
    """The files of all ranks, in rank order."""
    return [path / f"rank-{r:05d}.pt" for r in range(world_size)]


def complete_parts(path, state: dict) -> list:
    """The ranks whose files are in one folder, for each folder of which all files are here."""
    world_size = state["flags"]["world_size"]
    paths = files(path, world_size)
    parts = state.get("folders", [list(range(world_size))])
    return [ranks for ranks in parts if all(paths[rank].exists() for rank in ranks)]


def ranks_here(path, state: dict) -> list:
    return sum(complete_parts(path, state), [])


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

    state = state | {
        "step": method.steps,
        "checkpoint": None,
        "flags": setup.describe(mesh),
        "model_config": vars(model.config),
        "tokens_per_step": setup.plan.tokens_per_step,
        "averages_gradients": method.averages_gradients,
        "progress": method.progress,
        "train_s": method.clock.train_s(),
        "sent": dict(mesh.sent),
    }
    if setup.folders:
        state["folders"] = setup.folders
    writes_equal = mesh.replica == neighbours(state, mesh)[0] // mesh.shards

    sums = {}  # of what replicas share, up to the end of each layer
    for name, vector in equal.items():
        passed = 0
        parts = vector.split(layer_sizes(model, name, mesh.shards, mesh.shard_index))
        for l, layer in enumerate(parts):
            passed = sums[f"{name} of layer {l}"] = checksum(layer.cpu(), passed)
        if writes_equal:
            checksums[name] = passed
    # [sync] all-gather of objects, all ranks, once per checkpoint
    gathered = mesh.all_gather_object((sums, checksums, state))
    check_equal(mesh, [sums for sums, _, _ in gathered])
    if writes_equal:
        content |= {name: vector.cpu() for name, vector in equal.items()}

    identity = checksum([checksums for _, checksums, _ in gathered])  # of the whole checkpoint
    state = gathered[0][2] | {"checkpoint": identity}  # rank 0's: A-EDiT's replicas differ
    content["label"] = {
        "checkpoint": identity,
        "rank": mesh.rank,
        "world_size": mesh.world_size,
        "checksums": checksums,
    }
    return write(Path(setup.config.out_dir), mesh, content, state)


def neighbours(state: dict, mesh) -> list:
    """The ranks that write into this rank's folder."""
    for ranks in state.get("folders", []):
        if mesh.rank in ranks:
            return ranks
    return list(range(mesh.world_size))


def write(folder: Path, mesh, content: dict, state: dict) -> Path:
    """Write this rank's content and, on the first rank of the folder, state.json: all or nothing.
    Each phase begins when the one before has ended on all ranks."""
    unfinished = folder / UNFINISHED
    final = folder / name_of(state["step"])
    paths = files(unfinished, mesh.world_size)
    own = neighbours(state, mesh)
    is_first = mesh.rank == own[0]
    failure = f"no checkpoint could be written to {folder}: "
    try:
        with alike(mesh, failure):
            if unfinished.is_symlink():  # somebody else's folder
                raise UserError(f"{unfinished} is a link: remove it")
            unfinished.mkdir(parents=True, exist_ok=True)  # out_dir may be gone
            with open(paths[mesh.rank], "wb") as file:
                torch.save(content, file)
            to_disk(paths[mesh.rank])
        with alike(mesh, failure):
            if is_first:
                if not all(paths[rank].is_file() for rank in own):
                    raise UserError(f"{unfinished} is incomplete: nodes must share --out_dir")
                state = state | {"checksum": state_checksum(state)}
                (unfinished / "state.json").write_text(json.dumps(state, indent=1))
                to_disk(unfinished / "state.json")
                to_disk(unfinished)
    except UserError:
        delete(unfinished)  # a full disk needs the room
        raise
    with alike(mesh, failure):
        if is_first:
            os.rename(unfinished, final)
            to_disk(folder)
    with alike(mesh, failure):
        if is_first:
            remove(list_checkpoints(folder)[: -state["flags"]["keep"]])
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


# An example of what state.json has beside its flags and the fields of ModelConfig, and the limits.
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
    if "folders" in state:
        found = sum(state["folders"], [])
        if len(found) != ranks or sorted(found) != list(range(ranks)):
            raise UserError("its folders are not those of its ranks")


def read(path, methods: dict) -> tuple:
    """A checkpoint's state.json, checked, and its flags. methods: name -> Method class. Raises
    UserError."""
    with readable(path):
        state = json.loads(regular_file(path / "state.json").read_bytes())
        check_state(state, methods)
        if number(path) not in (None, state["step"]):
            saved = f"another step than its state.json ({state['step']})"
            raise UserError(f"its folder's name says {saved}")
        world_size = state["flags"]["world_size"]
        if not complete_parts(path, state):
            there = len(list(path.glob("rank-*.pt")))
            line = f"{world_size} ranks have saved it, and it has files of {there}"
            if "folders" in state:
                line += ": bring back this machine's, or copy what is left to each machine"
            raise UserError(line)
        return state, state["flags"]


def open_part(path, state: dict, rank: int) -> dict:
    """What a rank has saved. Raises an error if its file is of another checkpoint or rank."""
    world_size = state["flags"]["world_size"]
    file = files(path, world_size)[rank]
    content = open_file(regular_file(file))
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


def own_share(path, state: dict, places: list, rank: int) -> list:
    """The saved ranks whose files this rank verifies. places: where each rank of the run reads."""
    here = ranks_here(path, state)
    if "folders" not in state:
        return [each for each in here if each % len(places) == rank]
    # Two folders may have copies of one file. So the ranks of each folder verify all that is in it.
    place = places[rank]
    return here[places[:rank].count(place) :: places.count(place)]


def place_of(path) -> tuple:
    """Equal on ranks that see one folder on one machine."""
    machine = shm.machine_id() or socket.gethostname()
    try:
        found = os.stat(path)
    except OSError:  # read() says why
        return machine, 0, 0
    return machine, found.st_dev, found.st_ino


def newest_sound(found: list, methods: dict, mesh, config) -> Path | None:
    """The newest of these checkpoints that is not damaged and that all ranks see, None of none. All
    ranks of the mesh call it and verify the files together. Raises UserError, on all ranks, if all
    are damaged, or if one cannot be read now: it may be sound, and the run must not go back behind
    it."""
    own = {final_name(path): path for path in reversed(found)}
    common, lines = find_common(own, mesh)
    for name in common:
        path = own[name]
        # [start] all-gather of objects, all ranks, once per start, and per damaged checkpoint
        places = mesh.all_gather_object(place_of(path))
        line = ""
        passing = False
        identity = None
        try:
            state, _ = read(path, methods)
            identity = state["checkpoint"]
            if not config.dry_run:
                verify(path, state, own_share(path, state, places, mesh.rank))
        except UserError as error:
            line = str(error)
            passing = isinstance(error, NotNow)
        # [start] all-gather of objects, all ranks, once per start, and per damaged checkpoint
        found_by = mesh.all_gather_object((line, passing, identity))
        for line, passing, _ in found_by:
            if passing:
                raise UserError("" if mesh.rank else line)
        damaged = []
        for rank, (line, *_) in enumerate(found_by):
            if line:  # ranks may read different folders
                damaged.append(line if len(set(places)) == 1 else f"rank {rank}: {line}")
        for rank, (*_, identity) in enumerate(found_by):
            if identity != found_by[0][2]:
                damaged.append(f"checkpoint {path} of rank {rank} is not that of rank 0")
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


def find_common(own: dict, mesh) -> tuple:
    """Names of the checkpoints that all ranks see, newest first; a line for each newer one that
    only some of them see. own: this rank's, name -> path. Raises UserError, on all ranks, if a
    folder must be missing: there is none in common, or a newer one is of ranks that shared one."""
    kinds = {}
    for name, path in own.items():
        kinds[name] = "part" if "folders" in peek(path) else "whole"
        if path.name == UNFINISHED:
            kinds[name] = "unnamed"
    # [start] all-gather of objects, all ranks, once per start
    seen = mesh.all_gather_object(kinds)
    common = [name for name in own if all(name in names for names in seen)]
    lines = {}
    for rank, names in enumerate(seen):
        for name, kind in names.items():
            if name in common[:1]:
                break
            lacking = [other for other in range(mesh.world_size) if name not in seen[other]]
            line = f"rank {lacking[0]} does not see {name}, which rank {rank} sees"
            if kind == "whole":
                way_out = "name a folder that all nodes share, or copy this one to each machine"
            elif not common:
                way_out = (
                    f"bring back its own, with rank-{lacking[0]:05d}.pt; if that is lost, copy the "
                    "files that are left into it on each machine; --overwrite starts anew"
                )
            if kind == "whole" or kind == "part" and not common:
                raise UserError("" if mesh.rank else f"{line}: {way_out}")
            if kind == "part":
                lines.setdefault(name, line)
    return common, list(lines.values())


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


def check_parts(setup, mesh):
    """Raise UserError, on all ranks, if one lacks files of a checkpoint that machines without a
    shared folder have saved."""
    if not setup.saved or "folders" not in setup.saved:
        return
    flags = setup.saved["flags"]
    # [start] all-gather of objects, all ranks, once per start
    seen = mesh.all_gather_object(ranks_here(setup.path, setup.saved))
    same_mesh = (flags["world_size"], flags["shards"]) == (mesh.world_size, setup.config.shards)
    lost = [rank for rank in range(mesh.world_size) if same_mesh and rank not in seen[rank]]
    everywhere = all(ranks == seen[0] for ranks in seen)
    if same_mesh and not lost:
        return
    if everywhere:
        if len(seen[0]) < flags["world_size"]:
            print(f"note    only these ranks' files are left, for all replicas: {seen[0]}")
        return
    line = "another mesh needs the files of all machines in it, on each machine: copy them"
    if same_mesh:
        name = files(setup.path, mesh.world_size)[lost[0]].name
        line = f"rank {lost[0]} does not see its file {name}"
        others = [rank for rank in range(mesh.world_size) if lost[0] in seen[rank]]
        if others:
            line += (
                f", which rank {others[0]} sees: the machines have changed places; "
                "give torchrun --node_rank as before (0: where rank-00000.pt is)"
            )
        else:
            line += ": copy it there; if it is lost, copy what is left to each machine"
    raise UserError("" if mesh.rank else f"checkpoint {setup.path}: {line}")


def load(setup, model, optimizer, method, clock):
    """Continue setup's checkpoint or start from the model of --init_from, if there is one.
    Raises UserError on all ranks if one of them cannot read the checkpoint."""
    if setup.source:
        setup.source.copy_to(model)
        check_source(setup, model)
    if not setup.saved:
        return
    state = setup.saved
    mesh = model.mesh
    flags = state["flags"]
    N = flags["shards"]
    parts = complete_parts(setup.path, state)
    here = [rank // N for ranks in parts for rank in ranks[::N]]  # saved replicas
    replica = mesh.replica if mesh.replica in here else here[mesh.replica % len(here)]
    first = N * replica
    (part,) = [ranks for ranks in parts if first in ranks]
    clock.start_at(state)
    mesh.sent.update(state["sent"])
    with clock, alike(mesh), readable(setup.path):  # A-EDiT's round begins here
        shared = [open_part(setup.path, state, rank) for rank in part[:N]]
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
            changed -= {"data"}
            if flags["corpus_hash"] != setup.corpus.hash:  # it has not only moved
                changed.add("data")
            plan = setup.plan
            batch = flags["shards"] * flags["micro_steps"] * flags["micro_batch"]
            if batch != mesh.shards * plan.micro_steps * plan.micro_batch:
                changed.add("batch_size")  # of a replica: its ranks count, too
            method.resume_with(changed)
        same_method = setup.config.method == flags["method"]
        for saved, found in zip((shared, own), vectors(model, method)):
            for name, vector in found.items():
                # In the warm-up the method may change. Vectors of another one do not fit.
                if same_method or name not in method.shared + method.private:
                    fill(vector, [file[name] for file in saved], model, name)


def check_source(setup, model):
    """Raise UserError, on all ranks, unless --init_from is the same model on all machines."""
    mesh = model.mesh
    own = checksum(model.master.cpu())
    # [start] all-gather of objects, all ranks, once per start, with --init_from
    sums = mesh.all_gather_object(own)
    for rank, other in enumerate(sums):
        if other != sums[rank % mesh.shards]:
            line = f"--init_from {setup.source.path}: rank {rank} has another model than rank 0"
            raise UserError("" if mesh.rank else f"{line}; copy one of them to all machines")


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
