"""Saving changes nothing, resuming is exact, the mesh may change, damaged files are refused."""

import json
import pickle
import shutil

import pytest
import torch

import checkpoint
from flags import UserError
from ranks import ROOT, Launch, flags, run_training
from test_a_edit import VirtualClock

ROUNDS = dict(tau=4, sync_warmup_steps=3, max_steps=17, eval_interval=5, dtype="fp32", shards=2)
TIMES = {"step_ms", "train_s", "tokens_per_s", "stall_ms", "wait_others_ms", "wait_link_ms", "peak_memory_bytes"}


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


def cut_off(folder, target, step):
    """A run's folder as a crash leaves it: checkpoints up to a step, the record further on, and torn."""
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
        ("minibatch", 2, [11]),
        ("diloco", 1, [3, 11, 13]),  # 11: right after a sync
        ("edit", 2, [2, 3, 11, 13, 17]),  # warm-up, its end, sync due, in the middle of a round, the end
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
    for path in saved[1::2]:
        step = int(path.name.split("-")[1])
        out_dir = cut_off(tmp_path / "whole", tmp_path / f"from-{step}", step)
        again = run_training(2 * shards, corpus_folder, **options, out_dir=out_dir, resume="auto")
        assert_same_run(again, plain, **losses_aside)


def test_interval_keep_and_what_is_in_the_folder(tmp_path, corpus_folder):
    options = ROUNDS | dict(method="edit", out_dir=tmp_path / "run", checkpoint_interval=4, keep=3)
    run_training(4, corpus_folder, **options)
    names = [path.name for path in checkpoint.complete(tmp_path / "run")]
    assert names == ["checkpoint-00000012", "checkpoint-00000016", "checkpoint-00000017"]  # 17: the end
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [*names, "metrics.jsonl", "model.pt"]
    state = checkpoint.read(tmp_path / "run" / names[0])
    assert state["replicas"][0]["step"] == 12 and state["tokens"] == 12 * 4 * 2 * 8
    assert state["outer"] == ["anchor", "momentum"] and len(state["replicas"]) == 2


def stored_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("method, vectors", [("minibatch", 3), ("edit", 2 * 3 + 2)])
def test_shared_state_is_stored_once(method, vectors, tmp_path, corpus_folder):
    """Two replicas: mini-batch has parameters and moments once; EDiT these twice, anchor and momentum once."""
    big = dict(n_embd=128, n_head=2, n_layer=3, block_size=8, sync_warmup_steps=0, max_steps=2, dtype="fp32")
    run_training(2, corpus_folder, method=method, checkpoint_interval=2, out_dir=tmp_path / "run", **big)
    parameters = sum(value.numel() for value in torch.load(tmp_path / "run" / "model.pt")["model"].values())
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
def test_round_of_the_saved_replicas_ends_in_the_methods_own_sync(method, replicas, tmp_path, corpus_folder):
    """Two replicas, saved after two of four local steps, go on as one, three or four: what those start from is
    what the two would have agreed on if the training had ended there."""
    options = CONSTANT_LR | dict(method=method, max_steps=9, pseudo_grad_clip=0.05)
    out_dir = tmp_path / "run"
    stopped = run_training(2, corpus_folder, **options, out_dir=out_dir, checkpoint_interval=9)
    resumed = run_training(replicas, corpus_folder, **options, out_dir=out_dir, resume="auto")
    for name, value in stopped.model.items():
        torch.testing.assert_close(resumed.model[name], value, rtol=1e-6, atol=1e-9)  # stored as fp32
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
    stopped = run_training(
        2, corpus_folder, **options, out_dir=tmp_path / "run", checkpoint_interval=9, tamper=SpoilOne()
    )
    resumed = run_training(1, corpus_folder, **options, out_dir=tmp_path / "run", resume="auto")
    assert stopped.rows("sync")[-1]["dropped"] == resumed.rows("sync")[-1]["dropped"] == [0, 1]
    torch.testing.assert_close(resumed.ranks[0]["master"], stopped.ranks[0]["master"], rtol=1e-12, atol=1e-14)
    assert resumed.ranks[0]["master"].isfinite().all()


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
    third = checkpoint.complete(tmp_path / "run")[4]  # three of the warm-up, then before the second sync, the third
    out_dir = cut_off(tmp_path / "run", tmp_path / "part", int(third.name.split("-")[1]))
    more = run_training(
        3, corpus_folder, **options, out_dir=out_dir, resume="auto", tamper=VirtualClock(1.0, 2.0, 1.0)
    )
    sync = more.rows("sync")[2]
    assert sync["steps"] == [4, 2] and sync["weight"] == pytest.approx(whole.rows("sync")[2]["weight"], rel=1e-12)
    later = [row["steps"] for row in more.rows("sync")[3:-1]]
    assert later and later == [[4, 2, 4]] * len(later)
    assert more.rows("end")[0]["exit"] == "done"


@pytest.mark.parametrize("method", ["minibatch", "edit"])
def test_other_shards_continue_the_same_trajectory(method, tmp_path, corpus_folder):
    """2 x 2 saved in the middle of a round goes on as 2 x 1 and as 2 x 4, with the same global batch: fp64."""
    options = ROUNDS | dict(method=method, dtype="fp64", batch_size=4)
    whole = run_training(4, corpus_folder, **options, out_dir=tmp_path / "run", checkpoint_interval=9)
    for shards, batch_size in ((1, 8), (4, 2)):
        out_dir = cut_off(tmp_path / "run", tmp_path / f"shards-{shards}", 9)
        changed = options | dict(shards=shards, batch_size=batch_size, allow_change="batch_size")
        run = run_training(2 * shards, corpus_folder, **changed, out_dir=out_dir, resume="auto")
        assert run.losses == pytest.approx(whole.losses, rel=1e-9)
        assert [row["tokens"] for row in run.rows("step")] == [row["tokens"] for row in whole.rows("step")]
        for name, value in whole.model.items():
            torch.testing.assert_close(run.model[name], value, rtol=1e-5, atol=1e-7)


def test_tokens_go_on_from_the_saved_count_when_their_rate_changes(tmp_path, corpus_folder):
    options = CONSTANT_LR | dict(method="edit", max_steps=6, out_dir=tmp_path / "run", checkpoint_interval=4)
    run_training(2, corpus_folder, **options)
    shutil.rmtree(tmp_path / "run" / "checkpoint-00000006")
    run = run_training(4, corpus_folder, **options, resume="auto")
    per_rank = 2 * 8
    assert [row["tokens"] for row in run.rows("step")] == [
        *(step * 2 * per_rank for step in (1, 2, 3, 4)), *(4 * 2 * per_rank + extra * 4 * per_rank for extra in (1, 2)),
    ]  # fmt: skip


def test_method_can_change_in_the_warmup_and_not_after(tmp_path, corpus_folder):
    """A mini-batch run branches into EDiT, bit for bit as if it had been EDiT's own warm-up."""
    options = ROUNDS | dict(shards=1)
    edit = run_training(2, corpus_folder, **options, method="edit")
    saving = dict(checkpoint_interval=3, keep=100)
    run_training(2, corpus_folder, **options, **saving, method="minibatch", out_dir=tmp_path / "mini")
    path = tmp_path / "mini" / "checkpoint-00000003"
    branch = dict(resume=path, allow_change="method", out_dir=tmp_path / "branch")
    run = run_training(2, corpus_folder, **options, method="edit", **branch)
    assert all(torch.equal(run.model[name], value) for name, value in edit.model.items())
    assert [row["step"] for row in run.rows("step")] == list(range(4, 18))  # a record of its own


# ---- a model for use ----


def test_export_on_one_process_is_the_model_the_run_would_have_ended_with(tmp_path, corpus_folder):
    options = CONSTANT_LR | dict(method="edit", max_steps=9, shards=2)
    run = run_training(4, corpus_folder, **options, out_dir=tmp_path / "run", checkpoint_interval=9)
    done = run_script("checkpoint.py", "--checkpoint", tmp_path / "run", "--out", tmp_path / "model.pt")
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
