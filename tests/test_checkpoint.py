"""Saving changes nothing, resuming is exact, the mesh may change, damaged files are refused."""

import json
import os
import pickle
import shutil

import pytest
import torch

import train
from plumbing import checkpoint, launch
from plumbing.config import UserError
from ranks import flags, run_training

ROUNDS = dict(tau=4, sync_warmup_steps=3, max_steps=17, eval_interval=5, dtype="fp32", shards=2)
CONSTANT_LR = dict(min_lr_ratio=1.0, tau=4, sync_warmup_steps=3, eval_interval=1000)
TIMES = {
    "step_ms", "train_s", "tokens_per_s", "stall_ms", "wait_others_ms", "wait_link_ms",
    "peak_memory_bytes",
}  # fmt: skip


def rows(run):
    """The record without times and without the rows that say where a run began."""
    events = [row for row in run.ranks[0]["rows"] if row["event"] not in ("config", "resume")]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in events]


def assert_same_run(a, b):
    assert rows(a) == rows(b)
    for ours, theirs in zip(a.ranks, b.ranks):
        assert torch.equal(ours["master"], theirs["master"])
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
        for name, vector in theirs["vectors"].items():
            assert torch.equal(ours["vectors"][name], vector), name
        # counters, EDiT's statistics, A-EDiT's progress
        assert ours["method_state"] == theirs["method_state"]


def saved_steps(folder):
    return [int(path.name.split("-")[1]) for path in checkpoint.list_checkpoints(folder)]


def cut_off(folder, target, step):
    """A run's folder as a crash leaves it: checkpoints up to a step, a longer record, torn."""
    shutil.copytree(folder, target)
    for path in checkpoint.list_checkpoints(target):
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    with open(target / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    return target


def edit_state(path, change):
    """Change state.json and give it the right checksum again."""
    state = json.loads((path / "state.json").read_text())
    state.pop("crc32")
    change(state)
    state["crc32"] = checkpoint.own_checksum(state)
    (path / "state.json").write_text(json.dumps(state))


# ---- the same mesh ----


class VirtualClock:
    """Replica i's clock moves by seconds[i] per step and not while it waits."""

    def __init__(self, *seconds):
        self.seconds = seconds

    def __call__(self, method, model, mesh):
        now, vote = [100.0], method.vote

        def pass_time_and_vote():
            now[0] += self.seconds[mesh.replica]
            return vote()

        method.vote = pass_time_and_vote
        clock = property(lambda method: lambda: now[0], lambda method, clock: None)
        type(method).clock = clock  # Run cannot replace it


@pytest.mark.parametrize(
    "method, shards, saved, steps",
    [
        ("minibatch", 1, [1, 2, 3, 4, 5], [2, 5]),
        # the warm-up, its end, syncs, the end
        ("diloco", 1, [1, 2, 3, 7, 11, 15, 17], [3, 11, 17]),
        ("edit", 2, [1, 2, 3, 7, 11, 15, 17], [2, 3, 7, 17]),
        ("a_edit", 1, [1, 2, 3, 7, 11, 15, 19, 22], [3, 11, 22]),
    ],
)
def test_resumed_run_is_bit_identical(method, shards, saved, steps, tmp_path, corpus_folder):
    options = ROUNDS | dict(method=method, shards=shards)
    if method == "minibatch":
        options |= dict(max_steps=5)
    if method == "a_edit":
        options |= dict(tau_time_s=4.0, tamper=VirtualClock(1.0, 2.0))
    plain = run_training(2 * shards, corpus_folder, **options)
    saving = dict(checkpoint_interval=1, keep=100, out_dir=tmp_path / "whole")
    whole = run_training(2 * shards, corpus_folder, **options, **saving)
    assert_same_run(whole, plain)  # saving changes nothing
    assert [rank["calls"] for rank in whole.ranks] == [rank["calls"] for rank in plain.ranks]
    assert saved_steps(tmp_path / "whole") == saved  # round ends only
    for step in steps:
        out_dir = cut_off(tmp_path / "whole", tmp_path / f"from-{step}", step)
        again = run_training(2 * shards, corpus_folder, **options, out_dir=out_dir, resume="auto")
        assert_same_run(again, plain)
        assert [row["step"] for row in again.rows("resume")] == [step]


def test_a_edit_round_starts_anew_after_a_resume(tmp_path, corpus_folder):
    """The time before the checkpoint does not count for the round that begins after it."""
    options = CONSTANT_LR | dict(method="a_edit", tau_time_s=1000.0, max_steps=4)
    options |= dict(out_dir=tmp_path / "run", checkpoint_interval=1)
    run_training(2, corpus_folder, **options)
    out_dir = cut_off(tmp_path / "run", tmp_path / "again", 3)
    path = out_dir / "checkpoint-00000003"
    edit_state(path, lambda state: state.update(train_s=5000.0))
    options |= dict(out_dir=out_dir, max_steps=9, resume="auto")
    run = run_training(2, corpus_folder, **options)
    assert [row["steps"] for row in run.rows("sync")] == [[6, 6]]
    assert all(row["train_s"] > 5000 for row in run.rows("step")[3:])


def test_interval_counts_round_ends_and_keep_counts_checkpoints(tmp_path, corpus_folder):
    """A checkpoint at the first round end (3, 7, 11, 15, 17) at or after each multiple of 5."""
    options = ROUNDS | dict(method="edit", out_dir=tmp_path / "run", checkpoint_interval=5, keep=3)
    run = run_training(4, corpus_folder, **options)
    assert [row["step"] for row in run.rows("eval")] == [7, 11, 15, 17]
    assert saved_steps(tmp_path / "run") == [11, 15, 17] and run.printed.count("saved ") == 4
    names = [f"checkpoint-{step:08d}" for step in (11, 15, 17)]
    there = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert there == [*names, "metrics.jsonl", "model.pt"]
    path = tmp_path / "run" / names[0]
    state = checkpoint.read(path)
    assert state["replicas"][0]["steps"] == 11 and state["tokens"] == 11 * 4 * 2 * 8
    shared, own = {"parameters", "anchor", "momentum"}, {"exp_avg", "exp_avg_sq"}
    for rank in range(4):
        held = torch.load(path / f"rank-{rank:05d}.pt", weights_only=True)
        assert held.keys() == (shared | own if rank < 2 else own)


@pytest.mark.parametrize("method, vectors", [("minibatch", 3), ("edit", 2 * 2 + 2)])
def test_shared_state_is_stored_once(method, vectors, tmp_path, corpus_folder):
    """Two replicas. Mini-batch: parameters and moments once. EDiT: moments twice; the parameters
    and the momentum once; the anchor is the parameters."""
    options = dict(n_embd=128, n_head=2, n_layer=3, block_size=8, dtype="fp32")
    options |= dict(method=method, sync_warmup_steps=0, max_steps=2, checkpoint_interval=2)
    run = run_training(2, corpus_folder, **options, out_dir=tmp_path / "run")
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    size = sum(file.stat().st_size for file in path.iterdir())
    parameters = sum(value.numel() for value in run.model.values())
    assert size == pytest.approx(vectors * parameters * 4, rel=0.05)


# ---- another mesh, other flags ----


@pytest.mark.parametrize(
    "method, changes",
    [
        ("edit", [(1, dict(batch_size=8)), (4, dict(batch_size=2))]),
        # Micro-steps hand out the rows of a step in another order, which averaging undoes.
        ("minibatch", [(1, dict(accum=2))]),
    ],
)
def test_other_shards_continue_the_trajectory(method, changes, tmp_path, corpus_folder):
    """fp64, the same windows in each step: only the order of sums differs."""
    options = CONSTANT_LR | dict(method=method, tau=3, max_steps=18, batch_size=4, shards=2)
    saving = dict(checkpoint_interval=9, keep=100, out_dir=tmp_path / "run")
    whole = run_training(4, corpus_folder, **options, **saving)
    for shards, change in changes:
        out_dir = cut_off(tmp_path / "run", tmp_path / f"shards-{shards}", 9)
        again = options | change | dict(shards=shards, out_dir=out_dir, resume="auto")
        run = run_training(2 * shards, corpus_folder, **again)
        assert run.losses == pytest.approx(whole.losses, rel=1e-9)
        assert run.losses[9:] != whole.losses[9:]  # the steps were taken again
        tokens = [[row["tokens"] for row in each.rows("step")] for each in (run, whole)]
        assert tokens[0] == tokens[1]
        for name, value in whole.model.items():
            torch.testing.assert_close(run.model[name], value, rtol=1e-5, atol=1e-7)


class RememberStart:
    """Keep the vectors that a resumed run starts from, and the detector's means."""

    def __call__(self, method, model, mesh):
        kept, before_step = {}, method.before_step

        def remember_and_go():
            if not kept:
                for name in ("master", "exp_avg", "exp_avg_sq"):
                    kept[name] = getattr(model, name).clone()
                kept.update((name, getattr(method, name).clone()) for name in method.shared)
                if hasattr(method, "detector"):
                    kept["detector"] = method.detector.mean.clone()
            before_step()

        method.before_step = remember_and_go
        return lambda: kept


@pytest.mark.parametrize("method", ["diloco", "edit"])
def test_other_replicas_take_over_replica_i_mod_m(method, tmp_path, corpus_folder):
    options = CONSTANT_LR | dict(method=method, shards=2)
    saving = options | dict(max_steps=11, checkpoint_interval=11, out_dir=tmp_path / "run")
    saved = run_training(4, corpus_folder, **saving)
    state = checkpoint.read(tmp_path / "run" / "checkpoint-00000011")
    assert saved.ranks[0]["exp_avg"].ne(saved.ranks[2]["exp_avg"]).any()
    for replicas in (1, 3):
        out_dir = cut_off(tmp_path / "run", tmp_path / f"replicas-{replicas}", 11)
        more = options | dict(max_steps=15, out_dir=out_dir, resume="auto", batch_size=2)
        run = run_training(2 * replicas, corpus_folder, **more, tamper=RememberStart())
        assert [row["steps"] for row in run.rows("sync")][2:] == [[4] * replicas]
        for rank, result in enumerate(run.ranks):
            theirs, start = saved.ranks[rank % 4], result["watched"]
            assert torch.equal(start["master"], theirs["master"])
            assert torch.equal(start["exp_avg"], theirs["exp_avg"])
            for name, vector in theirs["vectors"].items():
                assert torch.equal(start[name], vector)
            if method == "edit":
                mean = state["replicas"][rank // 2 % 2]["detector"]["mean"]
                assert start["detector"].tolist() == mean and sum(mean) > 0


def test_method_can_change_in_the_warmup(tmp_path, corpus_folder):
    """A mini-batch run branches into EDiT, bit for bit as if it had been EDiT's own warm-up."""
    options = ROUNDS | dict(shards=1)
    edit = run_training(2, corpus_folder, **options, method="edit")
    saving = dict(checkpoint_interval=3, keep=100, out_dir=tmp_path / "mini")
    run_training(2, corpus_folder, **options, **saving, method="minibatch")
    path = tmp_path / "mini" / "checkpoint-00000003"
    branch = dict(resume=path, out_dir=tmp_path / "branch")
    run = run_training(2, corpus_folder, **options, method="edit", **branch)
    assert all(torch.equal(run.model[name], value) for name, value in edit.model.items())
    assert [row["step"] for row in run.rows("step")] == list(range(4, 18))  # a record of its own
    assert "--method minibatch -> edit" in run.printed


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory, corpus_folder):
    """Two replicas of EDiT; checkpoints 7 and 9, at round ends."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    options = CONSTANT_LR | dict(method="edit", max_steps=9)
    run_training(2, corpus_folder, **options, out_dir=folder, checkpoint_interval=1, keep=2)
    assert saved_steps(folder) == [7, 9]
    return folder


def test_given_flags_count_and_others_come_from_the_checkpoint(saved_run, corpus_folder, tmp_path):
    """--tau 2 is less than the checkpoint's; the log names each flag that differs."""
    out_dir = shutil.copytree(saved_run, tmp_path / "run")
    changed = dict(max_steps=20, tau=2, lr=0.02, batch_size=3, resume="auto", out_dir=out_dir)
    run = run_training(2, corpus_folder, **changed)
    assert [row["steps"] for row in run.rows("sync")][2:] == [[2, 2]] * 5 + [[1, 1]]
    (line,) = [line for line in run.printed.splitlines() if line.startswith("resume ")]
    changes = {"--max_steps 9 -> 20", "--tau 4 -> 2", "--lr 0.01 -> 0.02", "--batch_size 2 -> 3"}
    assert set(line.split("; ")[1:]) == changes and "step 9, 2 replicas x 1 shards" in line
    (row,) = run.rows("resume")
    assert row["step"] == 9 and row["tau"] == 2 and row["sync_warmup_steps"] == 3
    assert row["min_lr_ratio"] == 1.0 and all(row["lr"] == 0.02 for row in run.rows("step")[9:])
    first, rest = 9 * 2 * 2 * 8, 2 * 3 * 8  # tokens of 9 steps, of a step now
    tokens = [row["tokens"] for row in run.rows("step")]
    assert tokens[8:] == [first + rest * step for step in range(12)]


REFUSED = {  # flags beside --resume RUN -> what the line must say
    "no such folder": (["--resume", "{run}/nowhere"], "there is no checkpoint"),
    "a run without checkpoints": (["--resume", "{tmp}"], "there is no checkpoint"),
    "a file": (["--resume", "{run}/metrics.jsonl"], "there is no checkpoint"),
    "a fresh start among checkpoints": (
        ["--resume", "", "--out_dir", "{run}"],
        "has checkpoints of an earlier run, the last is checkpoint-00000009: --resume auto",
    ),
    "an older one beside a later": (
        ["--resume", "{run}/checkpoint-00000007"],
        "has checkpoints of an earlier run",
    ),
    "another run's": (
        ["--resume", "{run}", "--out_dir", "{other_run}"],
        "has checkpoints of an earlier run",
    ),
    "more layers": (["--n_layer", "3"], "--n_layer 3: checkpoint"),
    "other heads": (["--n_head", "3"], "--n_head 3: checkpoint"),  # 3 divides its 6 channels
    "wider": (["--n_embd", "8"], "--n_embd 8: checkpoint"),
    "another preset": (["--model", "10m"], "--model 10m: checkpoint"),
    "another method": (["--method", "diloco"], "is past the warm-up of edit"),
    "another corpus": (["--data", "{vocabulary}"], "a vocabulary of 257, the corpus of 300"),
    "shards that do not divide": (["--shards", "3"], "--shards 3"),
    "longer windows": (["--block_size", "16"], "took 32 tokens per step, these ranks take 64"),
    "an unknown name": (["--allow_change", "lr"], "--allow_change"),
}


@pytest.mark.parametrize("argv, message", REFUSED.values(), ids=REFUSED)
def test_resume_refuses_what_cannot_continue(argv, message, saved_run, tmp_path, corpus_folder):
    vocabulary = shutil.copytree(corpus_folder, tmp_path / "vocabulary")
    meta = json.loads((vocabulary / "meta.json").read_text())
    (vocabulary / "meta.json").write_text(json.dumps(meta | {"vocab_size": 300}))
    shutil.copytree(saved_run / "checkpoint-00000007", tmp_path / "old" / "checkpoint-00000007")
    places = dict(run=saved_run, tmp=tmp_path, vocabulary=vocabulary, other_run=tmp_path / "old")
    argv = ["--resume", str(saved_run), *(word.format(**places) for word in argv)]
    argv += ["--device", "cpu"]
    with pytest.raises(UserError) as error:
        launch.set_up(argv, train.METHODS, 0, 2)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_resume_refuses_other_tokens_per_step_or_another_corpus_until_confirmed(
    saved_run, corpus_folder, tmp_path
):
    argv = ["--device", "cpu", "--resume", str(saved_run)]
    with pytest.raises(UserError, match="took 32 tokens per step, these ranks take 16"):
        launch.set_up(argv, train.METHODS, 0, 1)
    assert launch.set_up([*argv, "--accum", "2"], train.METHODS, 0, 1).plan.tokens_per_step == 32
    assert launch.set_up([*argv, "--batch_size", "2"], train.METHODS, 0, 1)
    run, data = shutil.copytree(saved_run, tmp_path / "run"), tmp_path / "data"
    shutil.copytree(corpus_folder, data)
    edit_state(run / "checkpoint-00000009", lambda state: state["flags"].update(data=str(data)))
    meta = json.loads((data / "meta.json").read_text())
    (data / "meta.json").write_text(json.dumps(meta | {"hash": "another"}))
    argv = ["--device", "cpu", "--resume", str(run)]
    with pytest.raises(UserError, match="trained on another corpus"):
        launch.set_up(argv, train.METHODS, 0, 2)
    assert launch.set_up([*argv, "--data", str(data)], train.METHODS, 0, 2)


# ---- damage ----


def change_bytes(path, name, change):
    (path / name).write_bytes(change((path / name).read_bytes()))


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


FILE = "rank-00001.pt"
DAMAGE = {  # what is wrong with the last checkpoint -> how to get there, what the line must say
    "no description": (
        lambda p: (p / "state.json").unlink(),
        "delete it, and --resume auto continues checkpoint-00000007",
    ),
    "half a description": (
        lambda p: change_bytes(p, "state.json", lambda c: c[: len(c) // 2]),
        "damaged",
    ),
    "a digit changed": (
        lambda p: change_bytes(p, "state.json", lambda c: c.replace(b'"steps": 9', b'"steps": 8')),
        "its checksum is wrong",
    ),
    "a list for a description": (lambda p: (p / "state.json").write_text("[]"), "damaged"),
    "a thousand brackets": (lambda p: (p / "state.json").write_text("[" * 100000), "damaged"),
    "another format": (
        lambda p: edit_state(p, lambda s: s.update(format=1)),
        "has format 1, this program reads 2",
    ),
    "no flags": (lambda p: edit_state(p, lambda s: s.pop("flags")), "damaged (flags: 'flags'"),
    "no vectors": (lambda p: (p / FILE).unlink(), f"{FILE}: No such file"),
    "half the vectors": (
        lambda p: change_bytes(p, FILE, lambda c: c[: len(c) // 2]),
        "bytes instead of",
    ),
    "one bit flipped": (lambda p: change_bytes(p, FILE, flip), f"the checksum of {FILE} is wrong"),
    "a folder for a file": (lambda p: ((p / FILE).unlink(), (p / FILE).mkdir()), "damaged"),
    "a file for the checkpoint": (lambda p: (shutil.rmtree(p), p.write_text("")), "state.json"),
    "a file elsewhere": (
        lambda p: edit_state(p, lambda s: s["files"].update({"../../x": [0, 0]})),
        "../../x is not a file of a checkpoint",
    ),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_is_refused_in_one_line(damage, message, saved_run, tmp_path):
    run = shutil.copytree(saved_run, tmp_path / "run")
    damage(run / "checkpoint-00000009")
    errors = []
    for rank in (0, 1):  # each checks its share of the files
        try:
            launch.set_up(["--device", "cpu", "--resume", str(run)], train.METHODS, rank, 2)
        except UserError as error:
            errors.append(str(error))
    assert errors and not [error for error in errors if message not in error or "\n" in error]
    assert "checkpoint-00000009" in errors[0]


class Executed:
    """A pickle that runs a command when it is loaded, if it is allowed to."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def test_nothing_in_a_checkpoint_is_executed(saved_run, tmp_path, corpus_folder):
    """A forged file with a right checksum: as a plain pickle, and in torch's archive."""
    proof = tmp_path / "executed"

    def forge_pickle(file):
        file.write_bytes(pickle.dumps(Executed(proof), protocol=2))

    def forge_archive(file):
        torch.save({"parameters": Executed(proof)}, file)

    for number, forge in enumerate((forge_pickle, forge_archive)):
        run = shutil.copytree(saved_run, tmp_path / f"run-{number}")
        path = run / "checkpoint-00000009"
        forge(path / "rank-00000.pt")
        forged = path / "rank-00000.pt"
        entry = [forged.stat().st_size, checkpoint.checksum(forged)]
        edit_state(path, lambda state: state["files"].update({"rank-00000.pt": entry}))
        with pytest.raises(AssertionError, match="checkpoint-00000009 is damaged"):
            run_training(2, corpus_folder, out_dir=run, resume="auto", max_steps=20)
        assert not proof.exists()
    pickle.loads((tmp_path / "run-0/checkpoint-00000009/rank-00000.pt").read_bytes())
    assert proof.exists()  # so the test can tell


def test_leftovers_are_removed_and_never_look_complete(tmp_path, monkeypatch):
    for end in ("00000010", "00000005.tmp", "00000020.tmp", "00000001.old.tmp", "mine"):
        (tmp_path / f"checkpoint-{end}").mkdir()
        (tmp_path / f"checkpoint-{end}" / "file").write_text("content")
    assert saved_steps(tmp_path) == [10]
    os.close(launch.open_folder(str(tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-00000010", "checkpoint-mine"}
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)  # killed before it
    checkpoint.remove(tmp_path / "checkpoint-00000010")
    assert saved_steps(tmp_path) == []
