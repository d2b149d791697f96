"""Checkpoints: all that a run needs to go on bit by bit, on the same ranks or on others.

    out/edit/checkpoint-00000400/
        state.json               step, tokens, flags, mesh, corpus; each replica's counters and
                                 statistics; size and CRC-32 of every other file
        .metadata, __R_0.distcp  the vectors, written by torch.distributed.checkpoint,
                                 a file per rank R

    vector                key, for each layer          who writes it
    parameters, exp_avg,  replica{i}/{vector}/{layer}  the N ranks of replica i, 1/N each
      exp_avg_sq
    anchor, momentum      outer/{vector}/{layer}       equal in all replicas:
                                                       replica l mod M writes layer l

Until the local phase begins (always, in mini-batch) replicas are equal in everything: then there is
one replica0, shared out like the anchor. Right after a DiLoCo sync the parameters are the anchor,
and only that is written. A layer's vector is stored whole and without padding: it is a DTensor over
the shard group, so that any number of shards can read it.

Saving changes nothing: it happens between two steps, reads the vectors, and uses no collective of
the method; torch's library agrees on its plan over a gloo group. The folder is written as
checkpoint-....tmp and gets its name when all ranks have reported their files and all is on the
disk. So whatever happens, `complete` finds only complete ones.

Loading: every rank reads its pieces, no collective.

    same replicas            exact: the run continues bit for bit;
                             with another N, but for the order of sums
    other replicas, between  replica i continues saved replica (i mod M): parameters (all equal
      rounds or in warm-up   there), AdamW's moments, detector. Those beyond the first M share a
                             past, not a future: other data.
    other replicas, in the   first the method's own sync of the M saved replicas ends the round
      middle of a round      early, one replica after the other (method.sync_saved); the order of
                             sums apart, it is the sync that they would have made. Then as above.

No code from a file is executed. Numbers come as JSON; tensors through
torch.load(weights_only=True); `.metadata` is a pickle, and is read by an unpickler that knows the
names it is made of and no others.

    python checkpoint.py --checkpoint out/edit --out model.pt  # a checkpoint as model for sample.py
"""

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import re
import shutil
import sys
import warnings
import zlib
from pathlib import Path

import torch

from flags import Parser, UserError
from mesh import Mesh, contact
from model import ModelConfig
from shard import ShardedModel

# torch.distributed.checkpoint and .tensor take a second to import:
# runs without a checkpoint do without.

FORMAT = 1  # of the folder; older programs refuse newer ones
NAME = re.compile(r"checkpoint-(\d{8,})")
FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")


# ---- which one ----


def complete(folder) -> list:
    """The finished checkpoints of a run's folder, oldest first."""
    try:
        found = [path for path in Path(folder).iterdir() if NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def find(flag: str, folder: str) -> Path:
    """The checkpoint that a folder is, or the last one in it. Raises UserError if there is none."""
    path = Path(folder)
    found = [path] if (path / "state.json").exists() else complete(path)
    if not found:
        raise UserError(
            f"{flag} {folder}: there is no checkpoint; "
            "name a run's folder or a checkpoint-... in it"
        )
    return found[-1]


def choose(resume: str, out_dir: str, restarted: bool = False) -> Path | None:
    """The checkpoint to go on from, None to start afresh. resume: "", "auto" or a folder (a run's
    or a checkpoint's). A run that torchrun has restarted goes on from its own last checkpoint.
    Raises UserError if there is none, or if the run would mix with another one in out_dir."""
    own = complete(out_dir)
    if own and (resume == "auto" or restarted):
        return own[-1]
    chosen = None if resume in ("", "auto") else find("--resume", resume)
    if own and not (chosen and chosen.resolve() == own[-1].resolve()):
        raise UserError(
            f"--out_dir {out_dir} has checkpoints of an earlier run, the last is {own[-1].name}: "
            "--resume auto goes on from it; otherwise name another --out_dir or delete them"
        )
    return chosen


def run_folder(path: str) -> Path:
    """The run that a --resume folder belongs to."""
    return Path(path).parent if NAME.fullmatch(Path(path).name) else Path(path)


# ---- the vectors ----


def pieces(key: str, vector, model, layers=None) -> dict:
    """A flat per-rank vector, laid out like model.master, as this rank's pieces of whole layers."""
    from torch.distributed.tensor import DTensor, Shard

    mesh, tensors = model.mesh, {}
    for l, (layout, piece) in enumerate(zip(model.layouts, model.views(vector))):
        if layers is not None and l not in layers:
            continue
        piece = piece[: max(0, layout.used - mesh.shard_index * layout.piece)]  # without padding
        if mesh.shards > 1:
            piece = DTensor.from_local(
                piece, shard_grid(mesh.shard.process_group, vector.device.type), [Shard(0)],
                run_check=False, shape=(layout.used,), stride=(1,),
            )  # fmt: skip
        tensors[f"{key}/{l}"] = piece
    return tensors


@functools.cache
def shard_grid(process_group, device_type: str):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(process_group, device_type)


def replica_vectors(model, at_the_anchor: bool) -> dict:
    """What a replica has of its own.
    at_the_anchor: its parameters are the anchor, which all have alike."""
    moments = {"exp_avg": model.exp_avg, "exp_avg_sq": model.exp_avg_sq}
    return moments if at_the_anchor else {"parameters": model.master} | moments


def what_this_rank_writes(model, method) -> dict:
    mesh, tensors = model.mesh, {}
    mine = range(mesh.replica, len(model.layers), mesh.replicas)  # of what all replicas have alike
    at_the_anchor = method.replicas_differ and method.in_sync
    for name, vector in replica_vectors(model, at_the_anchor).items():
        if method.replicas_differ:
            tensors |= pieces(f"replica{mesh.replica}/{name}", vector, model)
        else:
            tensors |= pieces(f"replica0/{name}", vector, model, mine)
    for name, vector in method.outer_vectors.items() if method.replicas_differ else ():
        tensors |= pieces(f"outer/{name}", vector, model, mine)
    return tensors


@contextlib.contextmanager
def no_process_group_is_fine():
    """A single process, and loading without collectives: the library warns of both."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        yield


# ---- saving ----


def save(folder, step: int, run: dict, replica: dict, model, method, keep: int) -> Path:
    """Write folder/checkpoint-{step}, keep the last `keep` of them. step: rank 0's,
    for all; run: what all ranks know alike; replica: this replica's own state. All
    ranks call it between two steps, and return when it is complete. Raises UserError,
    on all ranks, if it cannot be written; what was there before stays as it was."""
    mesh = model.mesh
    final = Path(folder, f"checkpoint-{step:08d}")
    unfinished = final.with_suffix(".tmp")
    error = write_vectors(unfinished, what_this_rank_writes(model, method), mesh)
    report = {"error": error, "replica": replica, "files": {}}
    try:
        own = list(unfinished.glob(f"__{mesh.rank}_*")) if not error else []
        own += [unfinished / ".metadata"] if mesh.rank == 0 and not error else []
        report["files"] = {path.name: [path.stat().st_size, checksum(path)] for path in own}
    except OSError as failed:
        report["error"] = f"{failed.filename} could not be read back: {failed.strerror}"
    reports = mesh.exchange(report)
    if mesh.rank == 0:
        error = finish_folder(unfinished, final, run, reports, method, mesh, keep)
    error = mesh.exchange(error)[0]
    if error:
        raise UserError(error)
    return final


def write_vectors(folder, tensors, mesh) -> str:
    """Returns what went wrong, the same on all ranks, or nothing."""
    import torch.distributed.checkpoint as dcp

    try:
        with contact(), no_process_group_is_fine():
            writer = dcp.FileSystemWriter(folder)  # which fsyncs every file
            dcp.save(tensors, storage_writer=writer, process_group=mesh.host_group())
    except dcp.CheckpointException as failed:
        rank, (reason, _) = sorted(failed.failures.items())[0]
        reason = one_line(reason)
        return f"no checkpoint could be written to {folder.parent} by rank {rank}: {reason}"
    return ""


def finish_folder(unfinished, final, run, reports, method, mesh, keep) -> str:
    """Rank 0's part: check, describe, rename, remove the oldest.
    Returns what went wrong, or nothing."""
    error = next((report["error"] for report in reports if report["error"]), "")
    files = {name: entry for report in reports for name, entry in report["files"].items()}
    unseen = [name for name in files if not (unfinished / name).is_file()]
    if unseen and not error:
        error = (
            f"rank 0 does not see {unseen[0]} in {unfinished}: "
            "all nodes must share --out_dir's file system"
        )
    distinct = reports[:: mesh.shards] if method.replicas_differ else reports[:1]
    replicas = [report["replica"] for report in distinct]
    state = run | {"format": FORMAT, "files": files, "replicas": replicas}
    state["outer"] = sorted(method.outer_vectors) if method.replicas_differ else []
    try:
        if error:
            shutil.rmtree(unfinished, ignore_errors=True)
            return error
        text = json.dumps(state | {"crc32": own_checksum(state)}, indent=1)
        write_whole(unfinished / "state.json", text.encode())
        sync_folder(unfinished)
        os.rename(unfinished, final)
    except OSError as failed:
        shutil.rmtree(unfinished, ignore_errors=True)
        return f"no checkpoint could be written to {final.parent}: {failed.strerror}"
    with contextlib.suppress(OSError):  # the new one is complete; one too many is removed next time
        sync_folder(final.parent)
        for old in complete(final.parent)[:-keep]:
            remove(old)
    return ""


def remove(path):
    """Renamed first: a checkpoint that is half there must not look like a whole one."""
    leaving = path.with_suffix(".tmp")
    os.rename(path, leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def clean_up(folder):
    """Remove what a run that was killed while it saved has left.
    Rank 0 calls it before training."""
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
    rest = [other.name for other in complete(path.parent) if other.name < path.name]
    way_out = f"delete it, and --resume auto goes on from {rest[-1]}" if rest else "delete it"
    return UserError(f"checkpoint {path} is damaged ({what}): {way_out}")


NUMBER = (int, float)
STATE = {  # what state.json has, and of what type; a list holds any number of its one kind
    "position": NUMBER, "tokens": int, "tokens_per_step": int, "train_s": NUMBER,
    "metrics_bytes": int, "flags": {"method": str, "dtype": str, "max_steps": int},
    "sent": {"shard": NUMBER, "sync": NUMBER}, "mesh": {"replicas": int, "shards": int},
    "model_config": {
        "n_layer": int, "n_head": int, "n_embd": int, "block_size": int, "vocab_size": int,
    },
    "tokenizer": str, "corpus_hash": str, "evaluated_at": NUMBER, "files": dict, "outer": [str],
    "replicas": [{"step": int, "method": {"local_steps": int}, "news": [[NUMBER]]}],
}  # fmt: skip


def check_types(value, kind, name="it"):
    """Raise TypeError if a JSON value is not what `kind` says:
    a type, a list of one kind, or fields with kinds."""
    expected = type(kind) if isinstance(kind, (list, dict)) else kind
    if not isinstance(value, expected) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}"[:80])
    if isinstance(kind, list):
        for item in value:
            check_types(item, kind[0], name)
    elif isinstance(kind, dict):
        for field, inner in kind.items():
            check_types(value.get(field), inner, field)


def read(path) -> dict:
    """A checkpoint's state.json. Raises UserError if it is not whole."""
    try:
        state = json.loads((path / "state.json").read_text())
        if state.pop("crc32") != own_checksum(state):
            raise ValueError("its checksum is wrong")
        if state["format"] == FORMAT:
            check_types(state, STATE)
            check_types(list(state["files"].values()), [[int]])
            if not state["replicas"] or any(len(entry) != 2 for entry in state["files"].values()):
                raise ValueError("something is missing")
            return state
    except OSError as error:
        raise damaged(path, f"state.json: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"state.json: {one_line(error)}") from None
    raise UserError(
        f"checkpoint {path} has format {state['format']!r}, this program reads {FORMAT}"
    )


def verify(path, state: dict, rank: int = 0, world_size: int = 1):
    """Compare this rank's share of the files with
    what state.json says of them. Raises UserError."""
    for name in sorted(state["files"])[rank::world_size]:
        size, crc = state["files"][name]
        try:
            no_file = (path / name).exists() and not (path / name).is_file()
            if not FILE.fullmatch(name) or no_file:
                raise damaged(path, f"{name} is not a file of a checkpoint")
            if (path / name).stat().st_size != size:
                raise damaged(
                    path, f"{name} has {(path / name).stat().st_size:,} bytes instead of {size:,}"
                )
            if checksum(path / name) != crc:
                raise damaged(path, f"the checksum of {name} is wrong")
        except OSError as error:
            raise damaged(path, f"{name}: {error.strerror}") from None


def load(path, state: dict, model, method, same_method: bool = True) -> dict:
    """Fill the model's vectors and the method from a checkpoint;
    returns this replica's saved state. Every rank calls it. Raises
    UserError for a file that does not hold what state.json promises."""
    mesh, saved = model.mesh, state["replicas"]
    i = mesh.replica % len(saved)
    # a momentum that is 0 now is not kept; one that was is not there
    outer = {name: v for name, v in method.outer_vectors.items() if name in state["outer"]}
    try:
        fetch(path, {f"outer/{name}": vector for name, vector in outer.items()}, model)
        at_the_anchor = not any(replica["method"]["local_steps"] for replica in saved)
        vectors = replica_vectors(model, at_the_anchor and state["outer"])
        if not at_the_anchor and len(saved) != mesh.replicas:

            def load_replica(j):
                fetch(path, {f"replica{j}/parameters": model.master}, model)
                method.load_state_dict(saved[j]["method"])

            method.sync_saved(len(saved), load_replica)
            vectors.pop("parameters")
        elif same_method:  # else the state is that of a warm-up, which is everybody's
            method.load_state_dict(saved[i]["method"])
        fetch(path, {f"replica{i}/{name}": vector for name, vector in vectors.items()}, model)
        if at_the_anchor and state["outer"]:
            model.master.copy_(outer["anchor"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        # a forged state: its checksum was right
        raise damaged(path, f"{type(error).__name__}: {one_line(error)}") from None
    model.forget_gathered()
    return saved[i]


def fetch(path, vectors: dict, model):
    """Read vectors, key -> flat per-rank vector, in place."""
    import torch.distributed.checkpoint as dcp

    tensors = {}
    for key, vector in vectors.items():
        tensors |= pieces(key, vector, model)
    if not tensors:
        return
    try:
        with no_process_group_is_fine():
            dcp.load(tensors, storage_reader=reader(path), no_dist=True)
    except (
        dcp.CheckpointException, pickle.UnpicklingError, OSError, RuntimeError, EOFError,
    ) as error:  # fmt: skip
        failures = getattr(error, "failures", {})
        reason = next(iter(failures.values()))[0] if failures else error
        raise damaged(path, one_line(reason)) from None


def reader(path):
    """torch's reader of a checkpoint folder, without its unpickling of whatever the file says."""
    import torch.distributed.checkpoint as dcp

    with open(path / ".metadata", "rb") as file:
        metadata = Unpickler(file).load()
    if not all(FILE.fullmatch(str(info.relative_path)) for info in metadata.storage_data.values()):
        raise pickle.UnpicklingError("it leads to files elsewhere")

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args, **options):
            return metadata

    return Reader(path)


class Unpickler(pickle.Unpickler):
    """Knows the names that .metadata is made of, exactly, and no others."""

    NAMES = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata",
            "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", "float32", "float64"},
    }  # fmt: skip

    def find_class(self, module, name):
        if module.startswith("pathlib") and name == "PosixPath":  # "pathlib._local" in Python 3.13
            return Path
        if name not in self.NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"refuses to load {module}.{name}")
        return super().find_class(module, name)


# ---- a model for use ----


def export(path, model, tokenizer: str, flags: dict):
    """Write the whole model in fp32, and what is needed to use it, for
    sample.py: whole or not at all. The ranks of replica 0 call it when all
    replicas are equal. Raises UserError on rank 0 if it cannot be written."""
    weights = model.state_dict()
    if model.mesh.rank != 0:
        return
    saved = {"model": weights, "model_config": dataclasses.asdict(model.config)}
    saved |= {"tokenizer": tokenizer, "config": flags}
    unfinished = Path(f"{path}.tmp")
    try:
        torch.save(saved, unfinished)
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save puts a full disk
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written: {one_line(error)}") from None


def main():
    parser = Parser(description="Write a checkpoint of train.py as a model.pt for sample.py.")
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a run's folder or a checkpoint in it"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the model.pt to write")
    try:
        args = parser.parse_args()
        from config import METHODS, parse  # which imports this file

        path = find("--checkpoint", args.checkpoint)
        state = read(path)
        verify(path, state)
        config, method_config, _ = parse([], state["flags"])
        master = torch.float64 if config.dtype == "fp64" else torch.float32
        mesh = Mesh(1, torch.device("cpu"))
        model = ShardedModel(ModelConfig(**state["model_config"]), mesh, master)
        model.adamw(0.0)
        method_class, _ = METHODS[config.method]
        method = method_class(model, model.mesh, method_config, config.max_steps, lambda: 0.0)
        load(path, state, model, method)
        method.finish()  # the model is what the training would end with if it stopped here
        export(args.out, model, state["tokenizer"], state["flags"])
    except UserError as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    step = max(replica["step"] for replica in state["replicas"])
    print(f"{args.out}: the model of {path} after {step} steps")


if __name__ == "__main__":
    main()
