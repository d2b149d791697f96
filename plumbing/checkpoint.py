"""Checkpoints: what a run needs to continue, on the same ranks or on others.

    out/edit/checkpoint-00000400/
        state.json       progress, flags, mesh, corpus; counters and scalars of each replica
        rank-00000.pt    the vectors of rank 0: a dict of flat tensors; one file per rank

Checkpoints are taken at round ends, the last one at the end of the training. There the method's
`shared` vectors and, in most methods, the parameters are equal in all replicas, and only the ranks
of replica 0 write them. AdamW's moments and `private` vectors are written by every rank. In the
warm-up (always, in mini-batch) replicas are equal in everything, so only replica 0 writes, unless
gradients are quantized (--warmup_format). Saving reads vectors and changes nothing.

The folder is written as checkpoint.tmp and gets its name when all ranks have written their files.
So list_checkpoints() finds only complete ones, whenever a rank is killed.

    same mesh        exact: on CPUs the run continues bit for bit (a GPU's attention adds in
                     varying order)
    other shards     exact but for the order of sums: a layer's shards are joined and cut again
    other replicas   replica i continues saved replica i mod M, M replicas saved

Nothing in a file is executed: JSON, and tensors through torch.load(weights_only=True).
"""

import dataclasses
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import torch

from method import Method
from model import ModelConfig
from plumbing.config import UserError

NAME = re.compile(r"checkpoint-(\d{8,})")
KEYS = {"flags", "mesh", "model_config", "corpus_hash", "tokens_per_step", "tokens", "train_s"}
KEYS |= {"progress", "evaluated_at", "sent", "metrics_bytes"}  # of state.json


# ---- which one ----


def list_checkpoints(folder) -> list:
    """The complete checkpoints of a run's folder, oldest first."""
    try:  # not glob(): an unreadable folder would look empty
        found = [path for path in Path(folder).iterdir() if NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda path: int(NAME.fullmatch(path.name)[1]))


def choose(resume: str, out_dir: str, overwrite: bool) -> Path | None:
    """The checkpoint to continue, None to start afresh. resume: "", "auto" or a folder (a run's or
    a checkpoint's). Raises UserError if there is none, or if two runs would mix in out_dir."""
    if resume and overwrite:
        raise UserError("--resume, --overwrite: give only one of them")
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
    earlier = bool(own) or Path(out_dir, "model.pt").exists()
    if earlier and not overwrite and not (own and found and found[-1].samefile(own[-1])):
        last = f"--resume auto continues {own[-1].name}; otherwise " if own else ""
        raise UserError(
            f"--out_dir {out_dir} has an earlier run: {last}name another --out_dir, or delete "
            "that run with --overwrite"
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
    if replicas_equal(method):  # the method's vectors are not in use yet
        return parameters | private, {}
    shared = {name: getattr(method, name) for name in method.shared}
    private |= {name: getattr(method, name) for name in method.private}
    if type(method).evaluation_model is Method.evaluation_model:  # replicas are equal
        return parameters | shared, private
    return shared, parameters | private


def replicas_equal(method) -> bool:
    """In everything: in the warm-up, if it has no errors of quantization."""
    return method.averages_gradients and getattr(method.config, "warmup_format", "none") == "none"


def numbers(method) -> dict:
    """The state of a replica beside the vectors, for JSON."""
    names = () if method.averages_gradients else method.scalars
    values = {n: getattr(method, n) for n in ("steps", "rounds", "averages_gradients", *names)}
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def restore(method, saved: dict):
    """The inverse of numbers(). The vectors are loaded after it."""
    method.steps, method.rounds = saved["steps"], saved["rounds"]
    if not saved["averages_gradients"]:
        method.averages_gradients = False
        method.record.start_round()
        method.begin()
        for name in method.scalars:
            old, new = getattr(method, name), saved[name]
            setattr(method, name, old.new_tensor(new) if torch.is_tensor(old) else new)


def files(path, state: dict) -> list:
    """The vector files of a checkpoint, in rank order: of one replica or of all."""
    count = state["mesh"]["shards"] * len(state["replicas"])
    return [path / f"rank-{rank:05d}.pt" for rank in range(count)]


def save(setup, model, method, state: dict) -> Path:
    """Write a checkpoint into the run's folder and remove the oldest. state: the record's. All
    ranks call it at a round end and return when it is complete. Raises UserError on all ranks if
    one of them cannot write its part; earlier checkpoints stay."""
    folder, mesh, error = setup.config.out_dir, model.mesh, ""
    unfinished, flags = Path(folder, "checkpoint.tmp"), setup.describe(mesh)
    try:
        unfinished.mkdir(exist_ok=True)
        write_vectors(unfinished / f"rank-{mesh.rank:05d}.pt", model, method)
    except (OSError, RuntimeError) as wrong:
        error = one_line(wrong.__context__ or wrong)  # torch.save hides the OSError
    # [sync] all-gather of objects, all ranks, once per checkpoint
    replicas, errors = zip(*mesh.all_gather_object((numbers(method), error)))
    # A-EDiT's replicas differ in their steps.
    final = Path(folder, f"checkpoint-{replicas[0]['steps']:08d}")
    if mesh.rank == 0:
        state |= {
            "flags": flags, "mesh": flags["mesh"], "corpus_hash": setup.corpus.hash,
            "model_config": dataclasses.asdict(model.config),
            "replicas": replicas[:1] if replicas_equal(method) else replicas[:: mesh.shards],
        }  # fmt: skip
        error = next(filter(None, errors), "") or complete(unfinished, final, state)
        if error:
            shutil.rmtree(unfinished, ignore_errors=True)  # a full disk needs the room
    # [sync] all-gather of objects, all ranks, once per checkpoint: rank 0 is ready
    if error := mesh.all_gather_object(error)[0]:
        text = f"no checkpoint could be written to {folder}: {error}"
        raise UserError("" if mesh.rank else text)
    return final


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
        with open(path, "wb") as file:
            torch.save(saved, file)


def complete(unfinished, final, state: dict) -> str:
    """Rank 0: describe and rename the folder, remove the oldest checkpoints. Returns an error."""
    try:
        for file in files(unfinished, state):
            if not file.is_file():
                raise OSError(f"rank 0 does not see {file}: nodes must share --out_dir")
        (unfinished / "state.json").write_text(json.dumps(state, indent=1))
        os.rename(unfinished, final)
        for old in list_checkpoints(final.parent)[: -state["flags"]["keep"]]:
            remove(old)
    except OSError as error:
        return one_line(error)
    return ""


def remove(path):
    """Remove a checkpoint. It must not look complete while some of its files are gone."""
    half_removed = path.with_suffix(".tmp")
    os.rename(path, half_removed)
    shutil.rmtree(half_removed, ignore_errors=True)


def clean_up(folder, overwrite: bool):
    """Remove what a killed run has left, or an earlier run. Rank 0 calls it before training."""
    for path in list_checkpoints(folder) if overwrite else ():
        remove(path)
    for path in Path(folder).glob("checkpoint*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in Path(folder).glob("timeline-*.json"):  # of other spans, perhaps of more ranks
        path.unlink()
    for name in ("model.pt.tmp", "model.pt", "metrics.jsonl") if overwrite else ("model.pt.tmp",):
        Path(folder, name).unlink(missing_ok=True)


def one_line(error) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().split("\n")[0]


# ---- loading ----


def damaged(path, error) -> UserError:
    what = f"{type(error).__name__}: {one_line(error)}"
    if isinstance(error, KeyError):
        what = f"it has no {error}; perhaps another version of the code wrote it"
    if not path.exists():
        return UserError(f"checkpoint {path} is gone: another run writes there; start again")
    earlier = [other.name for other in list_checkpoints(path.parent) if other.name < path.name]
    hint = f"delete it, and --resume auto continues {earlier[-1]}" if earlier else "delete it"
    return UserError(f"checkpoint {path} is damaged ({what}): {hint}")


def open_file(file):
    """Maps the file: tensors are read when they are used."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def read(path, rank: int = 0, world_size: int = 1) -> dict:
    """A checkpoint's state.json. Opens this rank's share of the vector files, too. Raises UserError
    if it is damaged."""
    try:
        state = json.loads((path / "state.json").read_bytes())
        if "averages_gradients" not in state["replicas"][0]:
            raise UserError(f"checkpoint {path} is of an earlier edition: start the run anew")
        for key in KEYS - state.keys():
            raise KeyError(key)
        for file in files(path, state)[rank::world_size]:
            open_file(file)["exp_avg"]
        return state
    except UserError:
        raise
    except Exception as error:  # json and torch.load raise many kinds for damaged, foreign files
        raise damaged(path, error) from None


def check_resume(saved: dict, config, given: dict, corpus, plan, path):
    """Raise UserError if the run cannot continue the checkpoint with these flags. given: the flags
    on the command line."""
    flags, was = saved["flags"], ModelConfig(**saved["model_config"])
    free = {"block_size", "vocab_size"}
    other = {k for k, v in vars(was).items() if vars(plan.model_config)[k] != v} - free
    other_shape = sorted(other | ({"model"} if config.model != flags["model"] else set()))
    local = not saved["replicas"][0]["averages_gradients"]
    took, take = saved["tokens_per_step"], plan.tokens_per_step
    reason = ""
    if other_shape:
        reason = f"has another shape: leave out {' '.join(f'--{name}' for name in other_shape)}"
    elif saved["model_config"]["vocab_size"] != corpus.vocab_size:
        reason = "has another vocabulary: give the --data that it was trained on"
    elif saved["corpus_hash"] != corpus.hash and "data" not in given:
        reason = "was trained on another corpus: name a corpus with --data"
    elif local and config.method != flags["method"]:
        reason = f"is past the warm-up of {flags['method']}: keep this method"
    elif take != took and not {"batch_size", "accum", "tokens_per_step"} & given.keys():
        reason = (
            f"took {took:,} tokens per step, these ranks take {take:,}: keep the number with "
            f"--tokens_per_step {took}, or confirm the change with --batch_size or --accum"
        )
    if reason:
        raise UserError(f"checkpoint {path} {reason}")


def load(setup, model, optimizer, method, clock):
    """Continue setup's checkpoint, or start from the model of --init_from, if there is one. Every
    rank reads what it needs; no communication. Raises UserError for files that do not contain what
    state.json promises."""
    if setup.source:
        return start_from(setup.source, model)
    if not setup.saved:
        return
    path, state, mesh = setup.path, setup.saved, model.mesh
    shards, replica = state["mesh"]["shards"], mesh.replica % len(state["replicas"])
    clock.start_at(state)
    mesh.sent.update(state["sent"])
    try:
        with clock:  # A-EDiT's round begins here
            restore(method, state["replicas"][replica])
            shared, private = vectors(model, method)
            for i, own in (0, shared), (replica, private):
                saved = [open_file(f) for f in files(path, state)[i * shards : (i + 1) * shards]]
                for name, vector in own.items():
                    # In the warm-up the method may change: another one has no errors.
                    other = method.averages_gradients and name in method.shared + method.private
                    if not other or name in saved[0]:
                        fill(vector, [each[name] for each in saved], model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise damaged(path, error) from None
    optimizer.steps = method.steps
    model.invalidate_gathered()


def start_from(source, model):
    """Set the parameters. source: an export.Source."""
    for l, (layout, master) in enumerate(zip(model.layouts, model.masters)):
        tensors = {name: source.tensors.pop(f"layers.{l}.{name}") for name in layout.shapes}
        master.copy_(model.own_shard(layout, tensors))
    model.invalidate_gathered()


def fill(vector, saved: list, model):
    """vector <- this rank's shards, from the flat vectors of all saved shards."""
    first, n = 0, model.mesh.shard_index
    for layout, place in zip(model.layouts, model.views(vector)):
        size = layout.size_of_shard(len(saved))
        if len(saved) == model.mesh.shards:
            place.copy_(saved[n][first : first + size])
        else:
            whole = torch.cat([each[first : first + size] for each in saved])[: layout.used]
            own = whole[n * layout.shard_size : (n + 1) * layout.shard_size]
            place[: len(own)] = own  # the rest is padding, 0
        first += size
    if first != len(saved[0]):
        raise ValueError(f"a vector has {len(saved[0])} elements, not {first}")
