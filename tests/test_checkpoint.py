"""Saving changes nothing, resuming is exact, the mesh may change, damaged files are refused."""

import io
import json
import pickle
import shutil
import signal

import pytest
import torch

import checkpoint
from a_edit import AEDiT, Config
from flags import UserError
from mesh import Mesh
from model import ModelConfig
from ranks import ROOT, Launch, flags, run_training
from shard import ShardedModel
from test_a_edit import VirtualClock

ROUNDS = dict(tau=4, sync_warmup_steps=3, max_steps=17, eval_interval=5, dtype="fp32", shards=2)
TIMES = {
    "step_ms", "train_s", "tokens_per_s", "stall_ms", "wait_others_ms", "wait_link_ms",
    "peak_memory_bytes",
}  # fmt: skip


def rows(run, left_out=()):
    """The record but for times and what says where it began."""
    return [
        {key: value for key, value in row.items() if key not in TIMES}
        for row in run.ranks[0]["rows"]
        if row["event"] not in ("config", "resume", *left_out)
    ]


def assert_same_run(a, b, left_out=()):
    assert rows(a, left_out) == rows(b, left_out)
    for ours, theirs in zip(a.ranks, b.ranks):
        assert torch.equal(ours["master"], theirs["master"])
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
        # counters, EDiT's statistics, A-EDiT's clock
        assert ours["method_state"] == theirs["method_state"]


def cut_off(folder, target, step):
    """A run's folder as a crash leaves it:
    checkpoints up to a step, the record further on, and torn."""
    shutil.copytree(folder, target)
    for path in checkpoint.complete(target):
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    with open(target / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    return target


@pytest.mark.parametrize(
    "method, shards, steps",
    [
        ("minibatch", 1, [2, 11]),
        ("diloco", 1, [3, 11, 13]),  # 11: right after a sync
        # the warm-up's end, sync due, in the middle of a round, the end
        ("edit", 2, [3, 11, 13, 17]),
    ],
)
def test_resumed_run_is_bit_identical(method, shards, steps, tmp_path, corpus_folder):
    options = ROUNDS | dict(method=method, shards=shards)
    plain = run_training(2 * shards, corpus_folder, **options)
    saving = dict(checkpoint_interval=1, keep=100, out_dir=tmp_path / "whole")
    whole = run_training(2 * shards, corpus_folder, **options, **saving)
    assert_same_run(whole, plain)  # saving is pure
    assert [rank["calls"] for rank in whole.ranks] == [rank["calls"] for rank in plain.ranks]
    for step in steps:
        out_dir = cut_off(tmp_path / "whole", tmp_path / f"from-{step}", step)
        again = run_training(2 * shards, corpus_folder, **options, out_dir=out_dir, resume="auto")
        assert_same_run(again, plain)
        assert [row["step"] for row in again.rows("resume")] == [step]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_edit_resumes_bit_identically_under_a_virtual_clock(shards, tmp_path, corpus_folder):
    options = ROUNDS | dict(method="a_edit", tau_time_s=4.0, shards=shards, max_steps=24)
    options |= dict(tamper=VirtualClock(1.0, 2.0))
    plain = run_training(2 * shards, corpus_folder, **options)
    saving = dict(checkpoint_interval=1, keep=100, out_dir=tmp_path / "whole")
    whole = run_training(2 * shards, corpus_folder, **options, **saving)
    # which losses of other replicas have arrived when a row is written is a matter of real time
    losses_aside = dict(left_out=("step",))
    assert_same_run(whole, plain, **losses_aside)
    saved = checkpoint.complete(tmp_path / "whole")
    assert len(saved) >= 6  # three steps of the warm-up, then before each sync
    for path in saved[1::2] if shards == 1 else saved[4:5]:
        step = int(path.name.split("-")[1])
        out_dir = cut_off(tmp_path / "whole", tmp_path / f"from-{step}", step)
        again = run_training(2 * shards, corpus_folder, **options, out_dir=out_dir, resume="auto")
        assert_same_run(again, plain, **losses_aside)


def test_a_edit_saved_in_the_middle_of_a_round_keeps_its_place_and_the_time_that_has_passed():
    """Only a stop on exit saves there:
    replicas are at different steps, and the clock is at another zero later."""

    def a_edit(now):
        mesh = Mesh(1, torch.device("cpu"))
        model = ShardedModel(ModelConfig(1, 1, 2, 4, 11), mesh)
        return AEDiT(model, mesh, Config(), 100, lambda: now)

    method = a_edit(110.0)
    method.steps, method.local_steps, method.round, method.round_began = 230, 5, 7, 101.5
    method.position_at_sync, method.rate = 217.5, 0.75
    method.detector.mean += 3.0
    again = a_edit(20.0)
    again.load_state_dict(json.loads(json.dumps(method.state_dict())))
    assert again.state_dict() == method.state_dict()
    assert again.clock() - again.round_began == 8.5 and again.position(230) == 217.5 + 5 * 0.75


def test_leftovers_of_a_crash_are_removed_at_the_next_start(tmp_path):
    for end in ("00000010", "00000005.tmp", "00000020.tmp", "mine"):
        (tmp_path / f"checkpoint-{end}").mkdir()
        (tmp_path / f"checkpoint-{end}" / "file").write_text("content")
    checkpoint.clean_up(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-00000010", "checkpoint-mine"}
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["checkpoint-00000010"]


def test_removal_that_is_cut_short_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint-00000010"
    path.mkdir()
    (path / "state.json").write_text("{}")
    # killed before it has begun
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)
    checkpoint.remove(path)
    assert checkpoint.complete(tmp_path) == []


def test_interval_keep_and_what_is_in_the_folder(tmp_path, corpus_folder):
    options = ROUNDS | dict(method="edit", out_dir=tmp_path / "run", checkpoint_interval=4, keep=3)
    run_training(4, corpus_folder, **options)
    names = [path.name for path in checkpoint.complete(tmp_path / "run")]
    # 17: the end
    assert names == ["checkpoint-00000012", "checkpoint-00000016", "checkpoint-00000017"]
    there = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert there == [*names, "metrics.jsonl", "model.pt"]
    state = checkpoint.read(tmp_path / "run" / names[0])
    assert state["replicas"][0]["step"] == 12 and state["tokens"] == 12 * 4 * 2 * 8
    assert state["outer"] == ["anchor", "momentum"] and len(state["replicas"]) == 2


def stored_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("method, vectors", [("minibatch", 3), ("edit", 2 * 3 + 2)])
def test_shared_state_is_stored_once(method, vectors, tmp_path, corpus_folder):
    """Two replicas: mini-batch has parameters and moments once;
    EDiT these twice, anchor and momentum once."""
    options = dict(n_embd=128, n_head=2, n_layer=3, block_size=8, dtype="fp32")
    options |= dict(method=method, sync_warmup_steps=0, max_steps=2, checkpoint_interval=2)
    run_training(2, corpus_folder, **options, out_dir=tmp_path / "run")
    model = torch.load(tmp_path / "run" / "model.pt")["model"]
    parameters = sum(value.numel() for value in model.values())
    size = stored_bytes(*checkpoint.complete(tmp_path / "run"))
    assert size == pytest.approx(vectors * parameters * 4, rel=0.05)


# ---- another mesh ----

CONSTANT_LR = dict(min_lr_ratio=1.0, tau=4, sync_warmup_steps=3, eval_interval=1000)


def moments(run, shards):
    """AdamW's first moment of each replica, whole."""
    parts = [rank["exp_avg"] for rank in run.ranks]
    return [torch.stack(parts[i : i + shards]) for i in range(0, len(parts), shards)]


@pytest.mark.parametrize("replicas", [1, 3, 4])
@pytest.mark.parametrize("method", ["diloco", "edit"])
def test_round_of_the_saved_replicas_ends_in_the_methods_own_sync(
    method, replicas, tmp_path, corpus_folder
):
    """Two replicas, saved after two of four local steps, go on as one, three or four:
    what those start from is what the two would have agreed on if the training had ended there."""
    options = CONSTANT_LR | dict(method=method, max_steps=9, pseudo_grad_clip=0.05)
    out_dir = tmp_path / "run"
    stopped = run_training(2, corpus_folder, **options, out_dir=out_dir, checkpoint_interval=9)
    resumed = run_training(replicas, corpus_folder, **options, out_dir=out_dir, resume="auto")
    for name, value in stopped.model.items():
        # stored as fp32
        torch.testing.assert_close(resumed.model[name], value, rtol=1e-6, atol=1e-9)
    for ours, theirs in zip(resumed.ranks, stopped.ranks):
        torch.testing.assert_close(ours["master"], theirs["master"], rtol=1e-12, atol=1e-14)
    (sync,), last = resumed.rows("sync")[1:], stopped.rows("sync")[-1]
    for key in ("round", "step", "tau", "pseudo_grad_norm", "weight", "dropped", "clip"):
        assert sync[key] == pytest.approx(last[key], rel=1e-12)
    saved = moments(stopped, 1)
    for i, moment in enumerate(moments(resumed, 1)):
        assert torch.equal(moment, saved[i % 2])


class SpoilOne:
    """Replica 1's parameters become NaN after step 7."""

    def __call__(self, method, model, mesh):
        after_step = method.after_step

        def after_step_and_spoil(step):
            after_step(step)
            if step == 7 and mesh.replica == 1:
                model.masters[1].fill_(float("nan"))

        method.after_step = after_step_and_spoil


def test_sick_replica_is_left_out_of_the_sync_that_a_changed_mesh_takes(tmp_path, corpus_folder):
    options = CONSTANT_LR | dict(method="edit", max_steps=9)
    options |= dict(out_dir=tmp_path / "run")
    stopped = run_training(2, corpus_folder, **options, checkpoint_interval=9, tamper=SpoilOne())
    resumed = run_training(1, corpus_folder, **options, resume="auto")
    assert stopped.rows("sync")[-1]["dropped"] == resumed.rows("sync")[-1]["dropped"] == [0, 1]
    ours, theirs = resumed.ranks[0]["master"], stopped.ranks[0]["master"]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert ours.isfinite().all()


class KeepAnchors:
    def __init__(self, *speeds):
        self.clock = VirtualClock(*speeds)

    def __call__(self, method, model, mesh):
        self.clock(method, model, mesh)
        end, kept, state_dict = method.end, [], method.state_dict

        def end_and_keep():
            end()
            kept.append(method.anchor.clone())

        method.end = end_and_keep
        method.state_dict = lambda: state_dict() | ({"anchors": kept} if len(kept) == 5 else {})


def test_a_edit_counts_every_saved_replicas_steps_when_the_mesh_changes(tmp_path, corpus_folder):
    options = CONSTANT_LR | dict(method="a_edit", tau_time_s=4.0, max_steps=18, step_weighting=True)
    whole = run_training(
        2, corpus_folder, **options, out_dir=tmp_path / "run", checkpoint_interval=1, keep=100,
        tamper=KeepAnchors(1.0, 2.0),
    )  # fmt: skip
    assert [row["steps"] for row in whole.rows("sync")][:3] == [[4, 2]] * 3
    # three of the warm-up, then before the second sync, the third
    third = checkpoint.complete(tmp_path / "run")[4]
    out_dir = cut_off(tmp_path / "run", tmp_path / "part", int(third.name.split("-")[1]))
    clock = VirtualClock(1.0, 2.0, 1.0)
    options |= dict(out_dir=out_dir, resume="auto", tamper=clock)
    more = run_training(3, corpus_folder, **options)
    sync, weights = more.rows("sync")[2], whole.rows("sync")[2]["weight"]
    assert sync["steps"] == [4, 2] and sync["weight"] == pytest.approx(weights, rel=1e-12)
    later = [row["steps"] for row in more.rows("sync")[3:-1]]
    assert later and later == [[4, 2, 4]] * len(later)
    assert more.rows("end")[0]["exit"] == "done"


@pytest.mark.parametrize("method", ["minibatch", "edit"])
def test_other_shards_continue_the_same_trajectory(method, tmp_path, corpus_folder):
    """2 x 2 saved in the middle of a round goes on as 2 x 1 and as 2 x 4,
    with the same global batch: fp64."""
    options = ROUNDS | dict(method=method, dtype="fp64", batch_size=4)
    saving = dict(out_dir=tmp_path / "run", checkpoint_interval=9)
    whole = run_training(4, corpus_folder, **options, **saving)
    for shards, batch_size in ((1, 8), (4, 2)):
        out_dir = cut_off(tmp_path / "run", tmp_path / f"shards-{shards}", 9)
        changed = options | dict(shards=shards, batch_size=batch_size, allow_change="batch_size")
        run = run_training(2 * shards, corpus_folder, **changed, out_dir=out_dir, resume="auto")
        assert run.losses == pytest.approx(whole.losses, rel=1e-9)
        tokens = [[row["tokens"] for row in each.rows("step")] for each in (run, whole)]
        assert tokens[0] == tokens[1]
        for name, value in whole.model.items():
            torch.testing.assert_close(run.model[name], value, rtol=1e-5, atol=1e-7)


def test_tokens_go_on_from_the_saved_count_when_their_rate_changes(tmp_path, corpus_folder):
    options = CONSTANT_LR | dict(method="edit", max_steps=6, checkpoint_interval=4)
    options |= dict(out_dir=tmp_path / "run")
    run_training(2, corpus_folder, **options)
    shutil.rmtree(tmp_path / "run" / "checkpoint-00000006")
    run = run_training(4, corpus_folder, **options, resume="auto")
    per_rank = 2 * 8
    assert [row["tokens"] for row in run.rows("step")] == [
        *(step * 2 * per_rank for step in (1, 2, 3, 4)),
        *(4 * 2 * per_rank + extra * 4 * per_rank for extra in (1, 2)),
    ]


def test_method_can_change_in_the_warmup_and_not_after(tmp_path, corpus_folder):
    """A mini-batch run branches into EDiT, bit for bit as if it had been EDiT's own warm-up."""
    options = ROUNDS | dict(shards=1)
    edit = run_training(2, corpus_folder, **options, method="edit")
    saving = dict(checkpoint_interval=3, keep=100, out_dir=tmp_path / "mini")
    run_training(2, corpus_folder, **options, **saving, method="minibatch")
    path = tmp_path / "mini" / "checkpoint-00000003"
    branch = dict(resume=path, allow_change="method", out_dir=tmp_path / "branch")
    run = run_training(2, corpus_folder, **options, method="edit", **branch)
    assert all(torch.equal(run.model[name], value) for name, value in edit.model.items())
    assert [row["step"] for row in run.rows("step")] == list(range(4, 18))  # a record of its own


# ---- a model for use ----


def test_export_on_one_process_is_the_model_the_run_would_have_ended_with(tmp_path, corpus_folder):
    options = CONSTANT_LR | dict(method="edit", max_steps=9, shards=2)
    run = run_training(4, corpus_folder, **options, out_dir=tmp_path / "run", checkpoint_interval=9)
    argv = ["--checkpoint", tmp_path / "run", "--out", tmp_path / "model.pt"]
    done = run_script("checkpoint.py", *argv)
    assert done.returncode == 0 and done.stderr == "" and "after 9 steps" in done.stdout
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    for name, value in run.model.items():
        torch.testing.assert_close(exported["model"][name], value, rtol=1e-6, atol=1e-9)
    done = run_script("sample.py", "--model", tmp_path / "model.pt", "--tokens", "3")
    assert done.returncode == 0


def run_script(*words):
    import subprocess
    import sys

    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)


# ---- bad input ----


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory, corpus_folder):
    """Two replicas of EDiT, checkpoints 6 and 9, both in the middle of a round."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    options = CONSTANT_LR | dict(method="edit", max_steps=9, tau=8)
    run_training(2, corpus_folder, **options, out_dir=folder, checkpoint_interval=3, keep=2)
    return folder


def edit_state(path, change):
    """Change state.json and give it the right checksum again:
    damage that only its meaning can show."""
    state = json.loads((path / "state.json").read_text())
    state.pop("crc32")
    change(state)
    state["crc32"] = checkpoint.own_checksum(state)
    (path / "state.json").write_text(json.dumps(state))


def replace_file(path, name, content):
    """Put other content into a file, and its size and checksum into state.json."""
    (path / name).write_bytes(content)
    entry = [len(content), checkpoint.checksum(path / name)]
    edit_state(path, lambda s: s["files"].update({name: entry}))


def change_bytes(path, name, change):
    (path / name).write_bytes(change((path / name).read_bytes()))


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


class Executed:
    """A pickle that runs a command when it is loaded, if it is allowed to."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.proof}",)


DATA = "__0_0.distcp"
DAMAGE = {  # what is wrong with the last checkpoint -> how to get there, what the line must say
    "no description": (
        lambda p: (p / "state.json").unlink(),
        "delete it, and --resume auto goes on from checkpoint-00000006",
    ),
    "half a description": (
        lambda p: change_bytes(p, "state.json", lambda c: c[: len(c) // 2]), "damaged",
    ),
    "a digit changed": (
        lambda p: change_bytes(p, "state.json", lambda c: c.replace(b'"step": 9', b'"step": 8')),
        "checksum",
    ),
    "a list for a description": (lambda p: (p / "state.json").write_text("[]"), "damaged"),
    "noise for a description": (
        lambda p: (p / "state.json").write_bytes(bytes(range(256))), "damaged",
    ),
    "a thousand brackets": (lambda p: (p / "state.json").write_text("[" * 100000), "damaged"),
    "a newer format": (
        lambda p: edit_state(p, lambda s: s.update(format=2)), "format 2, this program reads 1",
    ),
    "no flags": (lambda p: edit_state(p, lambda s: s.pop("flags")), "damaged (state.json: flags"),
    "words for numbers": (lambda p: edit_state(p, lambda s: s["flags"].update(lr="fast")), "--lr"),
    "no vocabulary": (lambda p: edit_state(p, lambda s: s.update(model_config={})), "damaged"),
    "no plan": (lambda p: (p / ".metadata").unlink(), ".metadata: No such file"),
    "half a plan": (
        lambda p: change_bytes(p, ".metadata", lambda c: c[:100]), "100 bytes instead of",
    ),
    "no vectors": (lambda p: (p / DATA).unlink(), f"{DATA}: No such file"),
    "half the vectors": (
        lambda p: change_bytes(p, DATA, lambda c: c[: len(c) // 2]), "bytes instead of",
    ),
    "longer vectors": (lambda p: change_bytes(p, DATA, lambda c: c + b"0"), "bytes instead of"),
    "one bit flipped": (lambda p: change_bytes(p, DATA, flip), f"the checksum of {DATA} is wrong"),
    "a folder for a file": (lambda p: ((p / DATA).unlink(), (p / DATA).mkdir()), "damaged"),
    "a file for the checkpoint": (lambda p: (shutil.rmtree(p), p.write_text("")), "state.json"),
}  # fmt: skip


def refused(capsys, *argv) -> str:
    """The one line with which train.py refuses argv, exit code 2."""
    import train

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(SystemExit) as left:
        train.main([str(word) for word in argv])
    [signal.signal(number, handler) for number, handler in handlers.items()]
    written = capsys.readouterr()
    (line,) = written.err.splitlines()
    assert left.value.code == 2 and line.startswith("train.py: error: ")
    assert "Traceback" not in written.out
    return line


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_is_refused_in_one_line(
    damage, message, saved_run, tmp_path, corpus_folder, capsys
):
    run = shutil.copytree(saved_run, tmp_path / "run")
    look = lambda: (stored_bytes(run / "checkpoint-00000006"), (run / "metrics.jsonl").read_bytes())
    before = look()
    damage(run / "checkpoint-00000009")
    argv = flags(method="edit", tau=8, data=corpus_folder, out_dir=run, resume="auto")
    line = refused(capsys, *argv)
    assert message in line
    assert "checkpoint-00000009" in line or damage is DAMAGE["words for numbers"][0]
    assert before == look()


OTHER = {  # flags that do not go with the checkpoint -> what the line must name
    "no such folder": (["--resume", "{run}/nowhere"], "there is no checkpoint"),
    "a run without checkpoints": (["--resume", "{tmp}"], "there is no checkpoint"),
    "a file": (["--resume", "{run}/metrics.jsonl"], "there is no checkpoint"),
    "a fresh start among checkpoints": (
        ["--resume", "", "--out_dir", "{run}"],
        "--resume auto goes on from it",
    ),
    "an older one beside a later": (
        ["--resume", "{run}/checkpoint-00000006"],
        "has checkpoints of an earlier run",
    ),
    "more layers": (["--n_layer", "3"], "--n_layer 3: checkpoint"),
    "other heads": (["--n_head", "3"], "made with 1; leave it out"),
    "wider": (["--n_embd", "8"], "--n_embd 8"),
    "wider, on purpose": (
        ["--n_embd", "8", "--allow_change", "n_embd"],
        "made with 6; leave it out",
    ),
    "another lr": (["--lr", "0.02"], "--lr 0.02: checkpoint"),
    "another batch": (["--batch_size", "3"], "or --allow_change batch_size if you mean it"),
    "another length": (["--max_steps", "20"], "made with 9"),
    "another seed": (["--seed", "2"], "--seed"),
    "another dtype": (["--dtype", "fp32"], "--dtype"),
    "another tau": (["--tau", "4"], "--tau 4"),
    "another method": (["--method", "diloco"], "--method"),
    "another method, on purpose": (
        ["--method", "diloco", "--allow_change", "method,outer_momentum,tau"],
        "local phase",
    ),
    "the warm-up moved": (
        ["--sync_warmup_steps", "100", "--allow_change", "sync_warmup_steps"],
        "--sync_warmup_steps 100",
    ),
    "an unknown name": (["--allow_change", "rate"], "there is no flag rate"),
    "another corpus": (["--data", "{other}"], "another corpus"),
    "another vocabulary": (["--data", "{vocabulary}"], "vocabulary"),
    "shards that do not divide": (["--shards", "2"], "--shards 2"),
    "no checkpoint to keep": (["--keep", "0"], "--keep 0"),
    "a negative interval": (["--checkpoint_interval", "-1"], "--checkpoint_interval -1"),
    "no patience": (["--timeout_s", "0"], "--timeout_s 0"),
    "out_dir is a file": (["--out_dir", "{run}/metrics.jsonl"], "--out_dir"),
}


@pytest.mark.parametrize("argv, message", OTHER.values(), ids=OTHER)
def test_flags_that_do_not_go_with_the_checkpoint_are_named(
    argv, message, saved_run, tmp_path, corpus_folder, capsys
):
    import data

    (tmp_path / "text.txt").write_text("another text, long enough for a window of each part " * 40)
    data.write_corpus(data.text_documents([tmp_path / "text.txt"]), "byte", tmp_path / "other")
    vocabulary = shutil.copytree(tmp_path / "other", tmp_path / "vocabulary")
    meta = json.loads((vocabulary / "meta.json").read_text())
    (vocabulary / "meta.json").write_text(json.dumps(meta | {"vocab_size": 300}))
    places = dict(run=saved_run, tmp=tmp_path, other=tmp_path / "other", vocabulary=vocabulary)
    argv = [word.format(**places) for word in argv]
    start = ["--device", "cpu", "--resume", str(saved_run)]
    if "--out_dir" in argv and "--resume" not in argv:
        start += ["--resume", str(saved_run / "checkpoint-00000009")]
    assert message in refused(capsys, *start, *argv)


@pytest.mark.parametrize("name", [".metadata", DATA])
def test_nothing_in_a_checkpoint_is_executed(name, saved_run, tmp_path, corpus_folder):
    """A forged file with a right checksum: refused by what it asks for, in one line."""
    run = shutil.copytree(saved_run, tmp_path / "run")
    proof = tmp_path / "executed"
    content = (run / "checkpoint-00000009" / name).read_bytes()
    forged = pickle.dumps(Executed(proof), protocol=2)
    if name == DATA:  # a pickle where each vector begins, as torch.load also takes them
        with open(run / "checkpoint-00000009" / ".metadata", "rb") as file:
            places = checkpoint.Unpickler(file).load().storage_data.values()
        content = bytearray(len(content))
        for place in places:
            if place.relative_path == name:
                content[place.offset : place.offset + len(forged)] = forged
        forged = bytes(content)
    replace_file(run / "checkpoint-00000009", name, forged)
    argv = flags(
        method="edit", tau=8, data=corpus_folder, out_dir=run, resume="auto", max_steps=9,
        min_lr_ratio=1.0,
    )  # fmt: skip
    argv += ["--sync_warmup_steps", "3", "--eval_interval", "1000"]
    launch = Launch(2, tmp_path / "log", *argv)
    assert launch.wait() == [2, 2], launch.lines("err")
    assert len(launch.lines("err")) == 1, launch.lines("err")
    (line,) = launch.lines("err")
    reason = "refuses to load posix.system" if name == ".metadata" else "Weights only load failed"
    assert reason in line and not proof.exists()
    pickle.loads(forged)
    assert proof.exists()  # it would have been, and the test can tell


def leaves(value, path=()):
    """Every (path, value) at the ends of a JSON value."""
    if isinstance(value, (dict, list)) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def test_state_with_any_one_value_forged_is_taken_or_refused_but_never_trips(
    saved_run, tmp_path, corpus_folder
):
    from config import set_up

    run = shutil.copytree(saved_run, tmp_path / "run")
    argv = ["--device", "cpu", "--data", str(corpus_folder), "--resume", str(run)]
    description = run / "checkpoint-00000009" / "state.json"
    original, refusals = description.read_text(), 0
    for path, _ in leaves({k: v for k, v in json.loads(original).items() if k != "crc32"}):
        for forged in (0, -1, "x", [], None):
            description.write_text(original)

            def forge(state):
                for key in path[:-1]:
                    state = state[key]
                state[path[-1]] = forged

            edit_state(run / "checkpoint-00000009", forge)
            try:
                set_up(argv, 0, 2)
            except UserError as error:
                assert "\n" not in str(error)
                refusals += 1
    assert refusals > 300


def test_file_names_that_lead_elsewhere_are_refused(saved_run, tmp_path, corpus_folder, capsys):
    for name in ("/dev/zero", "../checkpoint-00000006/__0_0.distcp", "state.json"):
        run = shutil.copytree(saved_run, tmp_path / name.replace("/", "-"))
        edit_state(run / "checkpoint-00000009", lambda s: s["files"].update({name: [0, 0]}))
        line = refused(capsys, "--device", "cpu", "--resume", run)
        assert f"{name} is not a file of a checkpoint" in line


def test_checkpoint_of_a_newer_python_is_read(saved_run):
    """3.13 calls it pathlib._local.PosixPath."""
    plan = b"\x80\x04\x8c\x0epathlib._local\x8c\tPosixPath\x93\x8c\x01a\x85R."
    assert str(checkpoint.Unpickler(io.BytesIO(plan)).load()) == "a"
