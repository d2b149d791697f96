"""Checkpoints: what a run needs to continue, on the same ranks or on others.

    out/edit/checkpoint-00000400/
        state.json       progress, flags, mesh, corpus; counters and statistics of each replica
        rank-00000.pt    the vectors of rank 0: a dict of flat tensors; one file per rank

A checkpoint is taken at a round end. Then the method's `shared` vectors and, in most methods, the
parameters are equal in all replicas, and only the ranks of replica 0 write them. AdamW's moments
and `private` vectors are written by every rank. In the warm-up (always, in mini-batch) replicas are
equal in everything, so only replica 0 writes. Saving reads vectors and changes nothing.

The folder is written as checkpoint.tmp and gets its name when all ranks have written their files.
So list_checkpoints() finds only complete ones, whenever a rank is killed. After a power cut the
last one may be damaged. Checksums show it: torch.save writes a CRC-32 of each tensor, state.json
has its own.

Loading: every rank reads what it needs; no communication.

    same mesh        exact: on CPUs the run continues bit for bit (a GPU's attention adds in
                     varying order)
    other shards     exact but for the order of sums: a layer's shards are joined and cut again
    other replicas   replica i continues saved replica i mod M: its moments and statistics; in
                     NoLoCo all start from the mean of the saved replicas

Nothing in a file is executed: JSON, and tensors through torch.load(weights_only=True).
"""

import dataclasses
import fcntl
import functools
import json
import os
import re
import shutil
import zlib
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

import torch

from plumbing.config import NOT_RESUMED, UserError

NAME = re.compile(r"checkpoint-(\d{8,})")


# ---- which one ----


def list_checkpoints(folder) -> list:
    """The complete checkpoints of a run's folder, oldest first."""
    try:  # not glob(): an unreadable folder would look empty
        found = [path for path in Path(folder).iterdir() if NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda path: int(NAME.fullmatch(path.name)[1]))


def choose(resume: str, out_dir: str) -> Path | None:
    """The checkpoint to continue, None to start afresh. resume: "", "auto" or a folder (a run's or
    a checkpoint's). Raises UserError if there is none, or if two runs would mix in out_dir."""
    own = list_checkpoints(out_dir)
    if own:  # a run that is writing there could remove what this one reads
        os.close(lock(out_dir, fcntl.LOCK_SH))
    found = own if resume == "auto" else []
    if resume not in ("", "auto"):
        there = list_checkpoints(run_folder(resume))
        found = [path for path in there if Path(resume) in (path, path.parent)]
        if not found:
            raise UserError(
                f"--resume {resume[:200]}: there is no checkpoint; "
                "name a run's folder or a checkpoint-... in it"
            )
    if own and not (found and found[-1].samefile(own[-1])):
        raise UserError(
            f"--out_dir {out_dir} has checkpoints of an earlier run, the last is {own[-1].name}: "
            "--resume auto continues it; otherwise name another --out_dir or delete them"
        )
    return found[-1] if found else None


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
    parameters = {"parameters": model.master}
    private = {"exp_avg": model.exp_avg, "exp_avg_sq": model.exp_avg_sq}
    if not method.local:  # the method's vectors are not in use yet
        return parameters | private, {}
    shared = {name: getattr(method, name) for name in method.shared}
    private |= {name: getattr(method, name) for name in method.private}
    if method.equal_replicas:
        return parameters | shared, private
    return shared, parameters | private


def files(path, state: dict) -> list:
    """The vector files of a checkpoint, in rank order: of one replica or of all."""
    count = state["mesh"]["shards"] * len(state["replicas"])
    return [path / f"rank-{rank:05d}.pt" for rank in range(count)]


def save(folder, state: dict, model, method, keep: int) -> Path:
    """Write folder/checkpoint-STEP, keep the last `keep`. state: what is equal on all ranks. All
    ranks call it at a round end and return when it is complete. Raises UserError on a rank that
    cannot write its part; earlier checkpoints stay."""
    mesh, unfinished = model.mesh, Path(folder, "checkpoint.tmp")
    with explain_errors(f"no checkpoint could be written to {folder}"):
        unfinished.mkdir(exist_ok=True)
        write_vectors(unfinished / f"rank-{mesh.rank:05d}.pt", model, method)
        # [sync] all-gather of objects, all ranks, once per checkpoint
        replicas = mesh.all_gather_object(method.state_dict())
        # A-EDiT's replicas differ in their steps.
        final = Path(folder, f"checkpoint-{replicas[0]['steps']:08d}")
        if mesh.rank == 0:
            distinct = replicas[:: mesh.shards] if method.local else replicas[:1]
            complete(unfinished, final, state | {"replicas": distinct}, keep)
        # [sync] all-gather of objects, all ranks, once per checkpoint: rank 0 is ready
        mesh.all_gather_object(None)
    return final


@contextmanager
def explain_errors(what: str):
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save on a full disk
        raise UserError(f"{what}: {one_line(error)}") from None


def write_vectors(path, model, method):
    """This rank's file, if it has something to write."""
    shared, own = vectors(model, method)
    if model.mesh.replica == 0:
        own = shared | own
    parameters, saved = model.master.cpu(), {}
    for name, vector in own.items():
        # At a round end the anchor is the parameters. torch.save writes the same tensor once.
        vector = vector.cpu()
        saved[name] = parameters if torch.equal(vector, parameters) else vector
    if saved:
        torch.save(saved, path)


def complete(unfinished, final, state: dict, keep: int):
    """Rank 0: describe and rename the folder, remove the oldest checkpoints."""
    for file in files(unfinished, state):
        if not file.is_file():
            raise OSError(f"rank 0 does not see {file}: nodes must share --out_dir")
    state["crc32"] = checksum(state)
    (unfinished / "state.json").write_text(json.dumps(state, indent=1))
    os.rename(unfinished, final)
    for old in list_checkpoints(final.parent)[:-keep]:
        half_removed = old.with_suffix(".tmp")  # must not look complete
        os.rename(old, half_removed)
        shutil.rmtree(half_removed, ignore_errors=True)


def clean_up(folder):
    """Remove what a killed run has left. Rank 0 calls it before training."""
    for path in Path(folder).glob("checkpoint*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def checksum(state: dict) -> int:
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
    """A checkpoint's state.json. Raises UserError if it is damaged."""
    try:
        state = json.loads((path / "state.json").read_bytes())
        if state.pop("crc32") != checksum(state):
            raise ValueError("its checksum is wrong")
        return state
    except Exception as error:  # many kinds, even RecursionError
        raise damaged(path, f"state.json: {one_line(error)}") from None


def verify(path, state: dict, rank: int = 0, world_size: int = 1):
    """Check this rank's share of the files. Raises UserError."""
    for file in files(path, state)[rank::world_size]:
        try:
            with ZipFile(file) as archive:
                damaged_part = archive.testzip()
        except Exception as error:  # zipfile raises many kinds for damaged and foreign files
            raise damaged(path, f"{file.name}: {one_line(error)}") from None
        if damaged_part:
            raise damaged(path, f"the checksum of {file.name} is wrong")


def check_resume(saved: dict, config, given: dict, corpus, tokens_per_step: int, path):
    """Raise UserError if the run cannot continue the checkpoint with these flags. given: the flags
    on the command line."""
    flags, shape = saved["flags"], ("model", "n_layer", "n_head", "n_embd")
    other_shape = [f"--{name}" for name in shape if getattr(config, name) != flags[name]]
    other_words = saved["model_config"]["vocab_size"] != corpus.vocab_size
    other_corpus = saved["corpus_hash"] != corpus.hash and "data" not in given
    other_method = config.method != flags["method"] and saved["replicas"][0]["local"]
    took, take = saved["tokens_per_step"], tokens_per_step
    other_batch = take != took and not {"batch_size", "accum"} & given.keys()
    refusals = [
        (other_shape, f"has another shape: leave out {' '.join(other_shape)}"),
        (other_words, "has another vocabulary: give the --data that it was trained on"),
        (other_corpus, "was trained on another corpus: name a corpus with --data"),
        (other_method, f"is past the warm-up of {flags['method']}: keep this method"),
        (
            other_batch,
            f"took {took:,} tokens per step, these ranks take {take:,}: keep the number with "
            "--batch_size or --accum, or confirm the change by giving one of them",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise UserError(f"checkpoint {path} {reason}")


def changed_flags(saved: dict, now: dict, given: dict) -> list:
    """What the log says of flags that were given and differ from the checkpoint's."""
    differ = [n for n in given if n not in NOT_RESUMED and saved["flags"].get(n) != now.get(n)]
    return [f"--{name} {saved['flags'].get(name)} -> {now.get(name)}" for name in differ]


def load(path, state: dict, model, method):
    """Fill the model's and the method's vectors and counters. Raises UserError for files that do
    not contain what state.json promises."""
    mesh, shards = model.mesh, state["mesh"]["shards"]
    saved_replicas = len(state["replicas"])
    replica = mesh.replica % saved_replicas

    @functools.cache
    def open_file(file):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)

    def shards_of(i, name):
        """A vector of saved replica i."""
        own = files(path, state)[i * shards : (i + 1) * shards]
        return [open_file(file)[name] for file in own]

    try:
        method.load_state_dict(state["replicas"][replica])
        shared, private = vectors(model, method)
        for name, vector in shared.items():
            fill(vector, shards_of(0, name), model)
        for name, vector in private.items():
            fill(vector, shards_of(replica, name), model)
            mean = method.mean_on_resume and saved_replicas != mesh.replicas
            if mean and name not in ("exp_avg", "exp_avg_sq"):
                part, total = torch.zeros_like(vector), torch.zeros_like(vector)
                for i in range(saved_replicas):
                    fill(part, shards_of(i, name), model)
                    total.add_(part)
                vector.copy_(total.div_(saved_replicas))
    except torch.OutOfMemoryError:
        raise
    except KeyError as error:
        raise UserError(
            f"checkpoint {path} has no {error}: another version of the code wrote it; continue it "
            "with that version"
        ) from None
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
            place[: len(own)] = own  # the rest is padding, 0
        first += size


# ---- a model for use ----


def whole_model(model) -> dict:
    """The parameters in fp32 on the CPU of rank 0, gathered layer by layer ({} on other ranks). The
    ranks of replica 0 call it; the names are those of model.Llama."""
    mesh, state = model.mesh, {}
    for l, (layout, master) in enumerate(zip(model.layouts, model.masters)):
        whole = master.new_empty(layout.padded)
        whole.chunk(mesh.shards)[mesh.shard_index].copy_(master)
        # [shard] all-gather, P fp32, once per call and layer
        mesh.all_gather(whole, mesh.shard).wait()
        for name, value in layout.cut(whole).items() if mesh.rank == 0 else ():
            state[f"layers.{l}.{name}"] = value.to("cpu", torch.float32, copy=True)
    return state


def export(path, model, tokenizer: str, flags: dict):
    """Write the whole model and what sample.py needs: whole or not at all. The ranks of replica 0
    call it. Raises UserError on rank 0 if it cannot be written."""
    weights = whole_model(model)
    if model.mesh.rank != 0:
        return
    saved = {"model": weights, "model_config": dataclasses.asdict(model.config)}
    saved |= {"tokenizer": tokenizer, "config": flags}
    unfinished = Path(f"{path}.tmp")
    with explain_errors(f"{path} could not be written"):
        torch.save(saved, unfinished)
        os.replace(unfinished, path)
