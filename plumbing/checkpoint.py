"""Checkpoints: what a run needs to continue bit by bit, on the same ranks or on others.

    out/edit/checkpoint-00000400/
        state.json       progress, flags, mesh, corpus; counters and statistics of each replica;
                         size and CRC-32 of every other file
        rank-00000.pt    the vectors of rank 0: a dict of flat tensors; one file per rank

A checkpoint is taken at a round end. Then the parameters and the method's `shared` vectors are
equal in all replicas, and only the ranks of replica 0 write them. AdamW's moments and `private`
vectors are written by every rank. In the warm-up (always, in mini-batch) replicas are equal in
everything, so only replica 0 writes. Saving reads vectors and changes nothing.

The folder is written as checkpoint-....tmp and gets its name when all ranks have reported their
files and everything is on the disk. So list_checkpoints() finds only complete ones.

Loading: every rank reads what it needs; no communication.

    same mesh        exact: the run continues bit for bit
    other shards     exact but for the order of sums: a layer's shards are joined and cut again
    other replicas   replica i continues saved replica i mod M: its moments and statistics

Nothing in a file is executed: JSON, and tensors through torch.load(weights_only=True).
"""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import zlib
from contextlib import suppress
from pathlib import Path

import torch

from method import Method
from plumbing.config import NOT_RESUMED, UserError

FORMAT = 2
NAME = re.compile(r"checkpoint-(\d{8,})")
FILE = re.compile(r"rank-\d{5,}\.pt")


# ---- which one ----


def list_checkpoints(folder) -> list:
    """The complete checkpoints of a run's folder, oldest first. Raises UserError if the folder
    cannot be read."""
    try:
        found = [path for path in Path(folder).iterdir() if NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{str(folder)[:200]}: {error.strerror}") from None
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def choose(resume: str, out_dir: str) -> Path | None:
    """The checkpoint to continue, None to start afresh. resume: "", "auto" or a folder (a run's or
    a checkpoint's). Raises UserError if there is none, or if two runs would mix in out_dir."""
    own = list_checkpoints(out_dir)
    if own:  # a run that is writing there could remove what this one reads
        os.close(lock(out_dir, fcntl.LOCK_SH))
    if resume == "auto":
        return own[-1] if own else None
    chosen = None
    if resume:
        is_one = NAME.fullmatch(Path(resume).name) and Path(resume).is_dir()
        found = [Path(resume)] if is_one else list_checkpoints(resume)
        if not found:
            raise UserError(
                f"--resume {resume[:200]}: there is no checkpoint; "
                "name a run's folder or a checkpoint-... in it"
            )
        chosen = found[-1]
    if own and not (chosen and chosen.resolve() == own[-1].resolve()):
        raise UserError(
            f"--out_dir {out_dir} has checkpoints of an earlier run, the last is {own[-1].name}: "
            "--resume auto continues it; otherwise name another --out_dir or delete them"
        )
    return chosen


def run_folder(path: str) -> Path:
    """The folder of the run that --resume names."""
    return Path(path).parent if NAME.fullmatch(Path(path).name) else Path(path)


def lock(folder, kind=fcntl.LOCK_EX):
    """Lock a run's folder until this process ends or closes the descriptor that this returns.
    Raises UserError if another run has locked it."""
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


# ---- saving ----


def vectors(model, method) -> tuple:
    """(those that are equal in all replicas, those of this replica), name -> flat vector."""
    shared = {"parameters": model.master}
    private = {"exp_avg": model.exp_avg, "exp_avg_sq": model.exp_avg_sq}
    if not method.local:  # the method's vectors are not in use yet
        return shared | private, {}
    shared |= {name: getattr(method, name) for name in method.shared}
    return shared, private | {name: getattr(method, name) for name in method.private}


def save(folder, state: dict, model, method, keep: int) -> Path:
    """Write folder/checkpoint-STEP, keep the last `keep`. state: what is equal on all ranks. All
    ranks call it at a round end and return when it is complete. Raises UserError, on all ranks, if
    it cannot be written; earlier checkpoints stay."""
    mesh = model.mesh
    report = {"error": "", "files": {}, "method": method.state_dict()}
    # [sync] all-gather of objects, all ranks, once per checkpoint. A-EDiT's steps differ.
    step = mesh.all_gather_object(method.steps)[0]
    final = Path(folder, f"checkpoint-{step:08d}")
    unfinished = final.with_suffix(".tmp")
    try:
        unfinished.mkdir(exist_ok=True)
        report["files"] = write_vectors(unfinished / f"rank-{mesh.rank:05d}.pt", model, method)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save on a full disk
        report["error"] = f"no checkpoint could be written to {folder}: {one_line(error)}"
    # [sync] all-gather of objects, all ranks, once per checkpoint
    reports = mesh.all_gather_object(report)
    errors = [each["error"] for each in reports if each["error"]]
    if mesh.rank == 0:
        distinct = reports[:: mesh.shards] if method.local else reports[:1]
        state = state | {"format": FORMAT, "replicas": [each["method"] for each in distinct]}
        state["files"] = {name: entry for each in reports for name, entry in each["files"].items()}
        errors += finish_folder(unfinished, final, state, keep, errors)
    # [sync] all-gather of objects, all ranks, once per checkpoint
    error = mesh.all_gather_object(errors)[0]
    if error:
        raise UserError(error[0])
    return final


def write_vectors(path, model, method) -> dict:
    """This rank's file. Returns {name: [size, CRC-32]}, empty if it has nothing to write."""
    shared, own = vectors(model, method)
    if model.mesh.replica == 0:
        own = shared | own
    if not own:
        return {}
    saved = {"parameters": model.master.cpu()} if "parameters" in own else {}
    for name, vector in own.items():
        # At a round end the anchor is the parameters. torch.save writes the same tensor once.
        vector = vector.cpu()
        same = "parameters" in saved and torch.equal(vector, saved["parameters"])
        saved[name] = saved["parameters"] if same else vector
    with open(path, "wb") as file:
        torch.save(saved, file)
        file.flush()
        os.fsync(file.fileno())
    return {path.name: [path.stat().st_size, checksum(path)]}


def finish_folder(unfinished, final, state, keep, errors) -> list:
    """Rank 0: check, describe, rename, remove the oldest. Returns what went wrong."""
    unseen = [name for name in state["files"] if not (unfinished / name).is_file()]
    try:
        if unseen and not errors:
            errors = [f"rank 0 does not see {unfinished / unseen[0]}: nodes must share --out_dir"]
        if errors:
            shutil.rmtree(unfinished, ignore_errors=True)
            return errors
        text = json.dumps(state | {"crc32": own_checksum(state)}, indent=1)
        write_whole(unfinished / "state.json", text.encode())
        sync_folder(unfinished)
        if final.exists():  # of the same step, after an early stop
            remove(final)
        os.rename(unfinished, final)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        return [f"no checkpoint could be written to {final.parent}: {error.strerror}"]
    with suppress(OSError, UserError):  # the new one is complete
        sync_folder(final.parent)
        for old in list_checkpoints(final.parent)[:-keep]:
            remove(old)
    return []


def remove(path):
    """Rename first: a half-removed checkpoint must not look complete."""
    os.rename(path, path.with_suffix(".old.tmp"))
    shutil.rmtree(path.with_suffix(".old.tmp"), ignore_errors=True)


def clean_up(folder):
    """Remove what a killed run has left. Rank 0 calls it before training."""
    for path in Path(folder).glob("checkpoint-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def write_whole(path, content: bytes):
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path):
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def checksum(path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def own_checksum(state: dict) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def one_line(error) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().split("\n")[0]


# ---- loading ----


def damaged(path, what) -> UserError:
    earlier = [other.name for other in list_checkpoints(path.parent) if other.name < path.name]
    hint = f"delete it, and --resume auto continues {earlier[-1]}" if earlier else "delete it"
    return UserError(f"checkpoint {path} is damaged ({what}): {hint}")


def read(path) -> dict:
    """A checkpoint's state.json. Raises UserError if it is damaged or of another format."""
    try:
        state = json.loads((path / "state.json").read_bytes())
        if state.pop("crc32") != own_checksum(state):
            raise ValueError("its checksum is wrong")
        found = state["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"state.json: {one_line(error)}") from None
    if found != FORMAT:
        raise UserError(f"checkpoint {path} has format {found!r}, this program reads {FORMAT}")
    return state


def verify(path, state: dict, rank: int = 0, world_size: int = 1):
    """Compare this rank's share of the files with state.json. Raises UserError."""
    for name in sorted(state["files"])[rank::world_size]:
        size, crc = state["files"][name]
        try:
            if not FILE.fullmatch(name):
                raise damaged(path, f"{name} is not a file of a checkpoint")
            if (path / name).stat().st_size != size:
                found = (path / name).stat().st_size
                raise damaged(path, f"{name} has {found:,} bytes instead of {size:,}")
            if checksum(path / name) != crc:
                raise damaged(path, f"the checksum of {name} is wrong")
        except OSError as error:
            raise damaged(path, f"{name}: {error.strerror}") from None


def check_resume(saved: dict, config, given: dict, corpus, world_size: int, path):
    """Raise UserError if the run cannot continue the checkpoint with these flags. given: the flags
    on the command line."""
    flags = saved["flags"]
    for name in ("model", "n_layer", "n_head", "n_embd"):
        if getattr(config, name) != flags[name]:
            raise UserError(
                f"--{name} {getattr(config, name)}: checkpoint {path} has {flags[name]}; "
                "leave the flag out"
            )
    if saved["model_config"]["vocab_size"] != corpus.vocab_size:
        raise UserError(
            f"checkpoint {path} has a vocabulary of {saved['model_config']['vocab_size']}, "
            f"the corpus of {corpus.vocab_size}: give the --data that it was trained on"
        )
    if saved["corpus_hash"] != corpus.hash and "data" not in given:
        raise UserError(
            f"checkpoint {path} was trained on another corpus ({saved['corpus_hash']}, this is "
            f"{corpus.hash}): name a corpus with --data"
        )
    if config.method != flags["method"] and saved["replicas"][0]["local"]:
        raise UserError(
            f"--method {config.method}: checkpoint {path} is past the warm-up of "
            f"{flags['method']}; until then the method can be changed"
        )
    tokens = world_size * config.accum * config.batch_size * config.block_size
    if tokens != saved["tokens_per_step"] and not {"batch_size", "accum"} & given.keys():
        raise UserError(
            f"checkpoint {path} took {saved['tokens_per_step']:,} tokens per step, these ranks "
            f"take {tokens:,}: keep the number with --batch_size or --accum, or confirm the "
            "change by giving one of them"
        )


def changed_flags(saved: dict, now: dict, given: dict) -> list:
    """What the log says of flags that were given and differ from the checkpoint's."""
    differ = [n for n in given if n not in NOT_RESUMED and saved["flags"].get(n) != now.get(n)]
    return [f"--{name} {saved['flags'].get(name)} -> {now.get(name)}" for name in differ]


def load(path, state: dict, model, method, same_method: bool = True):
    """Fill the model's and the method's vectors and counters. Raises UserError for files that do
    not contain what state.json promises."""
    mesh, shards = model.mesh, state["mesh"]["shards"]
    replica = mesh.replica % len(state["replicas"])
    # A method that continues another one's warm-up takes over the common counters only.
    restore = type(method) if same_method else Method
    try:
        restore.load_state_dict(method, state["replicas"][replica])
        for vectors_of, source in zip(vectors(model, method), (0, replica)):
            files = []
            for rank in range(source * shards, (source + 1) * shards) if vectors_of else ():
                name = path / f"rank-{rank:05d}.pt"
                files.append(torch.load(name, map_location="cpu", weights_only=True, mmap=True))
            for name, vector in vectors_of.items():
                fill(vector, [file[name] for file in files], model)
    except Exception as error:  # torch.load raises many kinds for damaged and foreign files
        raise damaged(path, f"{type(error).__name__}: {one_line(error)}") from None
    model.invalidate_gathered()


def fill(vector, saved: list, model):
    """vector <- this rank's shards, from the flat vectors of all saved shards."""
    first, n = 0, model.mesh.shard_index
    for layout, place in zip(model.layouts, model.views(vector)):
        size = -(-layout.used // len(saved))  # of a saved shard
        if len(saved) == model.mesh.shards:
            place.copy_(saved[n][first : first + size])
        else:
            whole = torch.cat([each[first : first + size] for each in saved])[: layout.used]
            own = whole[n * layout.shard_size : (n + 1) * layout.shard_size]
            place.zero_()[: len(own)] = own
        first += size


# ---- a model for use ----


def export(path, model, tokenizer: str, flags: dict):
    """Write the whole model in fp32, and what sample.py needs: whole or not at all. The ranks of
    replica 0 call it. Raises UserError on rank 0 if it cannot be written."""
    weights = model.state_dict()
    if model.mesh.rank != 0:
        return
    saved = {"model": weights, "model_config": dataclasses.asdict(model.config)}
    saved |= {"tokenizer": tokenizer, "config": flags}
    unfinished = Path(f"{path}.tmp")
    try:
        torch.save(saved, unfinished)
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save on a full disk
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written: {one_line(error)}") from None
