"""What must not change a bit; the mesh may change; damaged files are refused."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ranks
import train
from config import UserError
from plumbing import checkpoint, launch, log
from ranks import OUR_METHODS, Launch, run_training, train_all
from rows import each_row
from test_launch import errors, finish, patched

ROUNDS = dict(tau=4, sync_warmup_steps=3, max_steps=17, eval_interval=5, dtype="fp32")
CONSTANT_LR = dict(min_lr_ratio=1.0, tau=4, sync_warmup_steps=3, eval_interval=1000)
LOCAL = dict(tau=3, sync_warmup_steps=2, max_steps=12, n_layer=1, dtype="fp32")
ENDS = [1, 2, 5, 8, 11, 12]  # of the rounds of LOCAL
STREAMING_METHODS = "streaming_diloco", "streaming_edit"
STREAMING = LOCAL | dict(tau=8, fragments=2, alpha=0.5, max_steps=15)
VIRTUAL = dict(tau_time_s=4.0, virtual_clock=True, slow_replica="1:2")  # rounds of 4 and 2 steps
SLOW = dict(link_mbps=2.0)
UNEVEN = dict(link_mbps=20, slow_replica="0:1.5")
TIGHT = dict(anomaly_warmup_rounds=2, anomaly_threshold=0.05, min_lr_ratio=1.0)  # drops
# Flags; ranks; round ends; where to resume; a simulation that changes nothing. The padding test below
# resumes all methods once.
CASES = [
    (dict(method="minibatch", max_steps=4), 2, [1, 2, 3, 4], [2], UNEVEN),
    (LOCAL | TIGHT | dict(method="edit", shards=2), 4, ENDS, [1, 8, 12], UNEVEN),
    (LOCAL | VIRTUAL | dict(method="a_edit"), 2, [1, 2, 6, 10, 14, 16], [2, 6], {}),
    (LOCAL | dict(method="co2", shards=2), 4, ENDS, [2, 8, 12], SLOW),
    # On 4x1 no two of NoLoCo's replicas are equal; in bf16 layers are gathered there, too.
    (LOCAL | dict(method="noloco", dtype="bf16"), 4, ENDS, [2, 8, 12], SLOW),
    (STREAMING | TIGHT | dict(method="streaming_edit", delay=3, max_steps=27, dtype="bf16"), 2,
     [1, 2, 10, 18, 26, 27], [2, 18, 27], SLOW),
    (LOCAL | dict(method="zero_one_adam", tau_schedule="1:2"), 4, [1, 2, 3, 4, 7, 10, 12],
     [2, 4, 7], {}),
    (LOCAL | TIGHT | dict(method="one_bit_edit", shards=2, warmup_format="int8", optimizer="muon",
                          anomaly_warmup_rounds=2),
     4, ENDS, [1, 2, 8], SLOW),
]  # fmt: skip
# shard_bytes: the forward after an evaluation finds no layer that is gathered already.
LEFT_OUT = "shard_bytes step_ms train_s tokens_per_s stall_ms wait_others_ms wait_link_ms".split()
LEFT_OUT += ["peak_memory_bytes"]


def rows(run):
    """Steps and syncs of the record. A save waits for what is in flight: then the row of the sync
    may come before that of its step."""
    events = run.rows("step") + run.rows("sync") + run.rows("end")
    return [{key: row[key] for key in row if key not in LEFT_OUT} for row in events]


def assert_same_state(ours, theirs):
    """Of two ranks."""
    assert torch.equal(ours["master"], theirs["master"])
    assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
    for name, vector in theirs["vectors"].items():
        assert torch.equal(ours["vectors"][name], vector), name
    # counters, EDiT's statistics, A-EDiT's progress
    assert ours["method_state"] == theirs["method_state"]


def assert_same_run(a, b):
    assert rows(a) == rows(b)
    for ours, theirs in zip(a.ranks, b.ranks):
        assert_same_state(ours, theirs)


def saved_steps(folder):
    return [int(path.name.split("-")[1]) for path in checkpoint.list_checkpoints(folder)]


def cut_off(folder, target, step):
    """A run's folder as a crash leaves it: checkpoints up to a step, a longer record, torn."""
    shutil.copytree(folder, target)
    for later in (n for n in saved_steps(target) if n > step):
        shutil.rmtree(target / f"checkpoint-{later:08d}")
    with open(target / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    return target


def edit_files(path, change):
    """Change what each rank has saved in a checkpoint. The CRCs fit."""
    for name in checkpoint.files_of(path):
        content = torch.load(path / name, weights_only=True)
        change(content)
        torch.save(content, path / name)


def another_corpus(content):
    content["state"]["flags"]["corpus_hash"] = "another"


QUICK = ("minibatch", "edit", "a_edit")
SELECTED = [
    pytest.param(
        *case, id=case[0]["method"],
        marks=() if case[0]["method"] in QUICK else pytest.mark.slow,
    )
    for case in CASES
]  # fmt: skip


def without_log(method, model, mesh):
    """From here on all calls of the log do nothing."""
    for name in "__init__", "step", "sync", "eval", "saved", "end":
        setattr(log.Log, name, lambda *arguments: None)
    log.Log.state = lambda *arguments: {}
    Path(method.config.out_dir, "metrics.jsonl").touch()


@each_row("options", [
    LOCAL | TIGHT | dict(method="edit"), LOCAL | VIRTUAL | dict(method="a_edit"),
])  # fmt: skip
def test_run_without_the_log_trains_evaluates_and_saves_the_same(options, corpus_folder, tmp_path):
    options = options | dict(checkpoint_interval=4, eval_interval=5, keep=9)
    cases = (None, tmp_path / "logged", options), (without_log, tmp_path / "silent", options)
    logged, silent = train_all(2, corpus_folder, *cases)
    assert silent.rows("step") == [] and len(logged.rows("step")) >= 12
    for ours, theirs in zip(silent.ranks, logged.ranks):
        assert_same_state(ours, theirs)
        assert ours["calls"] == theirs["calls"]  # those of evaluations, too
    assert saved_steps(tmp_path / "silent") == saved_steps(tmp_path / "logged")
    assert len(saved_steps(tmp_path / "logged")) >= 3


@pytest.mark.slow
def test_resume_that_changes_the_size_of_norms_starts_their_statistics_anew(
    tmp_path, corpus_folder
):
    """Limits of short rounds would flag every replica of a long one. `data`: another corpus in the
    same place."""
    options = dict(method="edit", tau=4, sync_warmup_steps=2, max_steps=50, min_lr_ratio=1.0)
    run_training(2, corpus_folder, out_dir=tmp_path / "whole", **options)
    changes = {"same": {}, "tau": dict(tau=24), "lr": dict(lr=0.1), "beta2": dict(beta2=0.5)}
    changes["batch_size"] = dict(shards=2)  # of a replica: two ranks' windows in place of one's
    changes["data"] = dict(data=corpus_folder)
    cases = []
    for name, change in changes.items():
        folder = shutil.copytree(tmp_path / "whole", tmp_path / name)
        more = dict(max_steps=50 + 4 * 24) | change
        if name == "same":
            more = dict(anomaly_threshold=4.0)  # norms do not depend on it
        if name == "data":
            edit_files(folder / "checkpoint-00000050", another_corpus)
        cases.append((None, folder, options | more | dict(resume="auto")))
    same, *runs = train_all(2, corpus_folder, *cases)
    assert same.ranks[0]["method_state"]["statistics"][0][0] > 10
    assert "anew" not in same.printed
    for name, run in zip(list(changes)[1:], runs):
        assert f"--{name}" in run.printed and "statistics of norms start anew" in run.printed
        after = [row for row in run.rows("sync") if row["step"] > 50]
        assert len(after) >= 4
        assert not any(sum(row["dropped"]) for row in after[:10])


@pytest.mark.parametrize("options, ranks, ends, steps, slow", SELECTED)
def test_evaluation_saving_a_simulation_and_a_resume_change_no_bit(
    options, ranks, ends, steps, slow, tmp_path, corpus_folder
):
    busy = options | slow | dict(eval_interval=1, checkpoint_interval=1, keep=100)
    cases = (None, None, options), (None, tmp_path / "whole", busy)
    quiet, whole = train_all(ranks, corpus_folder, *cases, transport="gloo")  # a link needs it
    assert_same_run(whole, quiet)
    assert saved_steps(tmp_path / "whole") == ends  # and nowhere else
    assert [row["step"] for row in whole.rows("eval")] == ends
    for row in whole.rows("sync") if slow is UNEVEN else ():
        assert row["stall_ms"] >= row["wait_link_ms"]  # test_simulate.py: when a link delivers
    folders = [cut_off(tmp_path / "whole", tmp_path / f"from-{step}", step) for step in steps]
    cases = [(None, folder, options | dict(resume="auto")) for folder in folders]
    for step, again in zip(steps, train_all(ranks, corpus_folder, *cases, transport="gloo")):
        assert_same_run(again, quiet)
        assert [row["step"] for row in again.rows("resume")] == [step]
        for name in ("train_s", "tokens_per_s") if "virtual_clock" in options else ():
            times = [[row[name] for row in each.rows("step")] for each in (again, quiet)]
            assert times[0] == times[1]


@pytest.mark.slow
def test_a_long_wsd_run_ends_sooner_or_later_from_its_constant_phase(tmp_path, corpus_folder):
    """One long run gives the curve over lengths: each end costs only its decay."""
    options = dict(method="diloco", tau=2, sync_warmup_steps=2, schedule="wsd", decay_share=0.25)
    long = options | dict(max_steps=24, checkpoint_interval=2, keep=100)
    cases = [(None, tmp_path / "long", long)]
    cases += [(None, None, options | dict(max_steps=steps)) for steps in (12, 32)]
    _, shorter, longer = train_all(2, corpus_folder, *cases)
    cases = []
    for step, end in (8, 12), (18, 32):
        folder = cut_off(tmp_path / "long", tmp_path / str(end), step)
        cases.append((None, folder, dict(resume="auto", max_steps=end)))
    for again, whole in zip(train_all(2, corpus_folder, *cases), (shorter, longer)):
        assert_same_run(again, whole)


def watch_padding(method, model, mesh):
    """Returns when called the names of the vectors that have anything but 0 in their padding."""
    names = {name: method for name in method.vectors}
    names |= dict.fromkeys(["master", "grad", "exp_avg", "exp_avg_sq"], model)

    def stop():
        wrong = set()
        for name, owner in names.items():
            for layout, view in zip(model.layouts, model.views(getattr(owner, name))):
                used = max(0, layout.used - mesh.shard_index * layout.shard_size)
                wrong |= {name} if view[used:].any() else set()
        return wrong

    return stop


@pytest.mark.slow
def test_padding_stays_0_and_a_resume_changes_no_bit(tmp_path, corpus_folder):
    """In the formats in which 0 becomes another number."""
    options = dict(n_layer=1, dtype="fp32", sync_warmup_steps=1, tau=2, max_steps=7, eval_batches=1)
    own = {name: dict(tau=4, fragments=2, alpha=0.5, delay=1) for name in STREAMING_METHODS}
    own |= dict(sparse_loco=dict(density=1), top_k=dict(density=1), a_edit=VIRTUAL)
    own |= dict.fromkeys(["zero_one_adam", "one_bit_edit"], dict(warmup_format="int8"))
    cases = [options | dict(method=name) | own.get(name, {}) for name in OUR_METHODS]
    cases = [case | dict(quantize="sign", keep=100, checkpoint_interval=3) for case in cases]
    folders = [tmp_path / case["method"] for case in cases]
    runs = train_all(3, corpus_folder, *zip([watch_padding] * len(cases), folders, cases))
    for folder in folders:
        shutil.rmtree(checkpoint.list_checkpoints(folder)[-1])
    cases = [(None, folder, case | dict(resume="auto")) for folder, case in zip(folders, cases)]
    for (_, folder, _), run, again in zip(cases, runs, train_all(3, corpus_folder, *cases)):
        assert [rank["watched"] for rank in run.ranks] == [set()] * 3, folder.name
        assert_same_run(again, run)
        assert 0 < again.rows("resume")[0]["step"] < 7


def test_interval_counts_round_ends_and_keep_counts_checkpoints(tmp_path, corpus_folder):
    """A checkpoint at the first round end (3, 7, 11, 15, 17) at or after each multiple of 5."""
    options = ROUNDS | dict(method="edit", shards=2, checkpoint_interval=5, keep=3)
    run = run_training(4, corpus_folder, out_dir=tmp_path, **options)
    assert [row["step"] for row in run.rows("eval")] == [7, 11, 15, 17]
    assert run.printed.count("saved ") == 4
    names = [f"checkpoint-{step:08d}" for step in (11, 15, 17)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "metrics.jsonl", "model.pt"]
    for name in names:
        assert len(list((tmp_path / name).iterdir())) == 4  # a file of each rank


def train_and_resume(tmp_path, corpus_folder, tamper, ranks, cases, *meshes):
    """Train the cases and save at the end of step 6 or 12. Yield (run resumed from there, saved run)
    of each case and mesh. meshes: (ranks, flags that differ)."""
    places = [tmp_path / str(number) for number in range(len(cases))]
    step = min(12, cases[0]["max_steps"])
    saving = dict(checkpoint_interval=6, keep=100)
    saved = [(tamper, out, case | saving) for out, case in zip(places, cases)]
    saved = train_all(ranks, corpus_folder, *saved)
    for ranks, flags in meshes:
        copies = [cut_off(out, tmp_path / f"{out.name} on {ranks} ranks {flags}", step) for out in places]
        resumed = [case | flags | dict(resume="auto") for case in cases]
        runs = train_all(ranks, corpus_folder, *[(tamper, *case) for case in zip(copies, resumed)])
        yield from zip(runs, saved, strict=True)


PENALTIES = [  # the methods that leave out a replica whose update is far too long
    dict(method="edit"),
    dict(method="a_edit", tau_time_s=3.0, virtual_clock=True),
    dict(method="streaming_edit", fragments=3, delay=0),
    dict(method="one_bit_edit"),
]
# The third round after the resume is sick.
SICK = dict(tau=3, anomaly_warmup_rounds=2, max_steps=18, scale_lr="1:13:15:30")


def left_out(run, first=12) -> list:
    """Of each sync after this step, from how many layers each replica was left out."""
    return [row["dropped"] for row in run.rows("sync") if row["step"] > first]


@pytest.mark.slow
def test_other_shards_continue_the_trajectory(tmp_path, corpus_folder):
    """fp64, the same windows in each step: only the order of sums differs. The batch of a replica
    is the same, so the statistics of norms go on, and see that replica 1 becomes sick."""
    options = CONSTANT_LR | SICK | dict(batch_size=4, shards=2)
    options["quantize"] = "none"  # the blocks would differ
    cases = [options | method for method in PENALTIES]
    cases.append(options | dict(method="edit", optimizer="muon", n_layer=3))
    meshes = (2, dict(shards=1, batch_size=8)), (8, dict(shards=4, batch_size=2))
    for run, whole in train_and_resume(tmp_path, corpus_folder, None, 4, cases, *meshes):
        assert run.losses == pytest.approx(whole.losses, rel=1e-9)
        assert run.losses[12:] != whole.losses[12:]  # the steps were taken again
        assert left_out(run) == left_out(whole)
        assert any(one > 0 and zero == 0 for zero, one in left_out(run))
        assert "anew" not in run.printed
        for name, value in whole.model.items():
            torch.testing.assert_close(run.model[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_statistics_go_on_with_other_replicas_and_other_micro_steps(tmp_path, corpus_folder):
    """The batch of a replica is the same, its text is another one."""
    cases = [CONSTANT_LR | SICK | method for method in PENALTIES]
    meshes = (3, dict(batch_size=2)), (2, dict(batch_size=1, accum=2))
    for run, _ in train_and_resume(tmp_path, corpus_folder, None, 2, cases, *meshes):
        assert any(one > 0 and zero == 0 for zero, one, *_ in left_out(run))
        assert "anew" not in run.printed


def test_mesh_of_a_resumed_run_follows_the_ranks(tmp_path, corpus_folder):
    options = dict(max_steps=2, sync_warmup_steps=1, out_dir=tmp_path / "run")
    run_training(4, corpus_folder, shards=4, **options)
    for ranks, given, shards in (1, [], 1), (2, [], 2), (6, [], 2), (4, ["--shards", "1"], 1):
        argv = ["--resume", str(tmp_path / "run"), "--batch_size", "2", *given]
        assert launch.Setup(argv, train.METHODS, train.data.load, ranks).config.shards == shards
    argv = ["--resume", str(tmp_path / "run"), "--batch_size", "2"]
    assert launch.Setup([*argv, "--dry_run"], train.METHODS, train.data.load, 1).config.shards == 4
    with pytest.raises(UserError, match="another --optimizer, adamw: leave it out"):
        launch.Setup([*argv, "--optimizer=muon"], train.METHODS, train.data.load, 4)
    for flag in "--model=10m", "--n_embd=12", "--n_hidden=128":
        with pytest.raises(UserError, match=f"another {flag.split('=')[0]}, \\w+: leave it out"):
            launch.Setup([*argv, flag], train.METHODS, train.data.load, 4)
    launch.Setup([*argv, "--n_hidden=64"], train.METHODS, train.data.load, 4)  # what it has


@pytest.mark.slow
def test_run_starts_from_a_model_on_another_mesh_with_another_method(tmp_path, corpus_folder):
    """No step changes a parameter: the rate is 0."""
    trained = run_training(2, corpus_folder, out_dir=tmp_path / "run", max_steps=3, n_hidden=64)
    init = dict(init_from=tmp_path / "run" / "model.pt", lr=0.0, max_steps=3, sync_warmup_steps=1)
    methods = "minibatch", "edit", "noloco", "streaming_edit", "one_bit_edit"
    cases = [(None, None, init | dict(method=method, tau=4, shards=2)) for method in methods]
    for run in train_all(4, corpus_folder, *cases):
        for name, value in trained.model.items():
            torch.testing.assert_close(run.model[name], value, rtol=1e-6, atol=1e-7)
        assert f"init    {init['init_from']}" in run.printed
    start = f"--init_from={init['init_from']}"
    data = f"--data={corpus_folder}"
    refuse = lambda *argv: launch.Setup([start, *argv], train.METHODS, train.data.load, 1)
    with pytest.raises(UserError, match="another shape, .*n_layer=2.*: leave out the flags"):
        refuse(data, "--n_layer=3", "--norm_eps=0.1")
    with pytest.raises(UserError, match=r"257 tokens\) than the corpus \(300\): give the --data"):
        refuse(data, "--vocab_size=300")
    with pytest.raises(UserError, match="--overwrite deletes the model of --init_from"):
        refuse(data, "--overwrite", f"--out_dir={Path(init['init_from']).parent}")
    assert refuse(data, "--model=10m").plan.model_config.n_embd == 6
    padded = tmp_path / "padded"  # as presets from 124m up do it
    run_training(1, corpus_folder, out_dir=padded, method="minibatch", max_steps=1, vocab_size=320)
    setup = launch.Setup(
        [f"--init_from={padded / 'model.pt'}", data], train.METHODS, train.data.load, 1
    )
    assert setup.plan.model_config.vocab_size == setup.corpus.vocab_size == 320


def keep_what_is_loaded(method, model, mesh):
    """Returns the parameters at the end. Then they become 0: run_training() expects equal ones."""
    parameters = []

    def finish():
        assert mapped_files() == []  # the disk would keep their room
        parameters.append(model.master.clone())
        model.master.zero_()

    method.finish = finish
    return parameters


@pytest.mark.slow
def test_other_replicas_take_over_replica_i_mod_m(tmp_path, corpus_folder):
    """Of 3 replicas. The resumed runs have no step to take: they end with what they have loaded."""
    options = CONSTANT_LR | dict(sync_warmup_steps=2, max_steps=6, fragments=2, delay=1)
    methods = "diloco", "noloco", "edit", "streaming_edit", "sparse_loco", "zero_one_adam"
    cases = [options | dict(method=method) for method in methods]
    meshes = [(replicas, dict(batch_size=2)) for replicas in (2, 4)]
    arguments = tmp_path, corpus_folder, keep_what_is_loaded, 3, cases, *meshes
    for run, whole in train_and_resume(*arguments):
        vectors = [[rank["exp_avg"], *rank["vectors"].values()] for rank in whole.ranks[:2]]
        assert not all(map(torch.equal, *vectors))  # replicas differ
        for i, result in enumerate(run.ranks):
            theirs = whole.ranks[i % 3]
            assert torch.equal(*result["watched"], *theirs["watched"])
            assert_same_state(result, theirs)


def test_method_can_change_in_the_warmup(tmp_path, corpus_folder):
    """A run of minibatch branches into EDiT, bit for bit as if it had been EDiT's own warm-up."""
    edit = run_training(2, corpus_folder, **ROUNDS, method="edit")
    saving = ROUNDS | dict(max_steps=3, checkpoint_interval=3, out_dir=tmp_path / "mini")
    run_training(2, corpus_folder, **saving, method="minibatch")
    path = tmp_path / "mini" / "checkpoint-00000003"
    branch = ROUNDS | dict(resume=path, out_dir=tmp_path / "branch")
    run = run_training(2, corpus_folder, **branch, method="edit")
    assert all(torch.equal(run.model[name], value) for name, value in edit.model.items())
    assert [row["step"] for row in run.rows("step")] == list(range(4, 18))  # a record of its own
    assert "--method minibatch -> edit" in run.printed
    own = run_training(2, corpus_folder, **ROUNDS, method="one_bit_edit")
    branch |= dict(out_dir=tmp_path / "bits", warmup_format="int8")  # from now on; errors are 0
    run = run_training(2, corpus_folder, **branch, method="one_bit_edit")
    assert all(torch.equal(run.model[name], value) for name, value in own.model.items())


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory, corpus_folder):
    """Two replicas of EDiT; checkpoints 7 and 9, at round ends."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    options = CONSTANT_LR | dict(method="edit", max_steps=9)
    run_training(2, corpus_folder, **options, out_dir=folder, checkpoint_interval=1, keep=2)
    assert saved_steps(folder) == [7, 9]
    return folder


def mapped_files() -> list:
    """The files of checkpoints that this process maps: the disk keeps their room."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "replica-" in line]


def load_for_an_hour(method, model, mesh):
    """By the clock of the training, which a run reads in plumbing/log.py. Returns mapped_files."""
    passed = []
    fill = checkpoint.fill
    hours = lambda: 3600 * len(passed) + time.perf_counter()
    log.time = SimpleNamespace(perf_counter=hours, time=time.time)

    def slow_fill(*args):
        passed.append("an hour")
        fill(*args)

    checkpoint.fill = slow_fill
    return mapped_files


def test_given_flags_count_and_others_come_from_the_checkpoint(saved_run, corpus_folder, tmp_path):
    """--tau 2 is less than the checkpoint's; the log names each flag that differs."""
    out_dir = shutil.copytree(saved_run, tmp_path / "run")
    (out_dir / "metrics.jsonl").unlink()  # a new one begins with a row `config`
    changed = dict(max_steps=20, tau=2, lr=0.02, batch_size=3, resume="auto", out_dir=out_dir)
    run = run_training(2, corpus_folder, load_for_an_hour, **changed, checkpoint_interval=6)
    assert all(row["train_s"] < 3600 for row in run.rows("step"))  # loading is no training
    assert [rank["watched"] for rank in run.ranks] == [[], []]
    assert run.printed.count("saved ") == 3  # due at 12 and 18, and at the end
    assert [row["steps"] for row in run.rows("sync")] == [[2, 2]] * 5 + [[1, 1]]
    (line,) = [line for line in run.printed.splitlines() if line.startswith("resume ")]
    changes = {"--max_steps 9 -> 20", "--tau 4 -> 2", "--lr 0.01 -> 0.02", "--batch_size 2 -> 3"}
    changes.add("--checkpoint_interval 1 -> 6")
    assert set(line.split("; ")[1:]) == changes and "step 9, 2 replicas x 1 shards" in line
    for (row,) in run.rows("config"), run.rows("resume"):
        assert (row.get("step", 9), row["tau"], row["sync_warmup_steps"]) == (9, 2, 3)
    assert all(row["lr"] == 0.02 for row in run.rows("step"))  # min_lr_ratio 1, as before
    # 9 steps of 32 tokens, then steps of 48
    assert [row["tokens"] for row in run.rows("step")] == [336 + 48 * i for i in range(11)]


def test_tokens_count_on_after_a_resume_with_another_batch(tmp_path, corpus_folder):
    """By A-EDiT's progress, in steps of which each replica takes its own number."""
    options = dict(method="a_edit", sync_warmup_steps=2, **VIRTUAL)
    first = run_training(2, corpus_folder, out_dir=tmp_path, max_steps=11, **options)
    changed = dict(max_steps=20, batch_size=3, resume="auto", out_dir=tmp_path)
    second = run_training(2, corpus_folder, **options, **changed)

    def steps_of_replicas(run):
        return sum(sum(row["steps"]) for row in run.rows("sync"))

    steps = 2 * 2 + steps_of_replicas(first)
    more = steps_of_replicas(second) - steps_of_replicas(first)  # one record has both
    assert [row["tokens"] for row in second.rows("eval")][-1] == 8 * (2 * steps + 3 * more)
    assert [row["tokens"] for row in first.rows("eval")] == [8 * 2 * steps]


def refusal(argv, world_size) -> str:
    """The line that Setup refuses these flags with, "" if the run can continue."""
    try:
        launch.Setup([*argv.split(), "--device", "cpu"], train.METHODS, train.data.load, world_size)
    except UserError as error:
        return str(error)
    return ""


@each_row("argv, ranks, changed", [
    ("--shards 2 --batch_size 1", 4, set()),
    ("--accum 2 --batch_size 1", 2, set()),
    ("--tokens_per_step 64", 4, set()),
    ("--batch_size 2 --tau 7", 3, {"tau"}),
    ("--batch_size 3", 2, {"batch_size"}),
    ("--shards 2 --batch_size 2", 4, {"batch_size"}),
    ("--tokens_per_step 32", 1, {"batch_size", "tokens_per_step"}),
])  # fmt: skip
def test_batch_of_a_replica_has_changed_only_if_its_product_has(argv, ranks, changed, saved_run):
    argv = f"--resume {saved_run} --device cpu {argv}".split()
    setup = launch.Setup(argv, train.METHODS, train.data.load, ranks)
    assert checkpoint.changed_flags(setup) - {"resume", "device", "shards"} == changed


OTHER_RUN = "has an earlier run: --resume auto continues it, --overwrite deletes it"
FLAGS = [  # flags; ranks; what the line must say, "" if the run can continue
    ("--resume {tmp}", 2, "there is no checkpoint"),
    ("--out_dir {tmp}/run", 2, OTHER_RUN),
    ("--resume {tmp}/run/checkpoint-00000007", 2, OTHER_RUN),
    ("--resume {tmp}/run --out_dir {tmp}/old", 2, OTHER_RUN),
    ("--out_dir {tmp}/run --overwrite", 2, ""),
    ("--resume auto --out_dir {tmp}/done", 2, OTHER_RUN),
    ("--resume {tmp}/run --n_layer 3", 2, "another --n_layer, 2: leave it out"),
    ("--resume {tmp}/run --method diloco", 2, "is past the warm-up of edit"),
    ("--resume {tmp}/run --block_size 16", 2, "took 32 tokens per step, these ranks take 64"),
    ("--resume {tmp}/run", 1, "took 32 tokens per step, these ranks take 16"),
    ("--resume {tmp}/run --batch_size 2", 1, ""),
    ("--resume {tmp}/run --tokens_per_step 32", 1, ""),
    ("--resume {tmp}/run --accum 3", 2, ""),
    ("--resume {tmp}/run --data {tmp}/wide", 2, "another --vocab_size, 257: leave it out, and give"),
    ("--resume {tmp}/moved", 2, "trained on another corpus"),
    ("--resume {tmp}/moved --data {tmp}/new", 2, ""),
    ("--resume {tmp}/gone", 2, "is of --method averaging, which this code does not have"),
    ("--resume {tmp}/earlier", 2, "is of an earlier edition of this code, which can continue it"),
    ("--resume=auto --out_dir {tmp}/earlier", 2, "is of an earlier edition of this code"),
]


@each_row("argv, ranks, message", FLAGS)
def test_wrong_flags_are_refused_in_one_line(
    argv, ranks, message, saved_run, tmp_path, corpus_folder, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    meta = json.loads((corpus_folder / "meta.json").read_text())
    for name in "wide", "new":
        shutil.copytree(corpus_folder, tmp_path / name)
    (tmp_path / "wide" / "meta.json").write_text(json.dumps(meta | {"vocab_size": 300}))
    (tmp_path / "new" / "val.bin").write_bytes((corpus_folder / "train.bin").read_bytes())
    for name in "run", "moved", "gone":
        shutil.copytree(saved_run, tmp_path / name)
    shutil.copytree(saved_run / "checkpoint-00000007", tmp_path / "old" / "checkpoint-00000007")
    moved = {"data": str(tmp_path / "new")}
    last = "checkpoint-00000009"
    edit_files(tmp_path / "moved" / last, lambda content: content["state"]["flags"].update(moved))
    gone = {"method": "averaging"}
    edit_files(tmp_path / "gone" / last, lambda content: content["state"]["flags"].update(gone))
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "model.pt").touch()
    (tmp_path / "earlier" / last).mkdir(parents=True)
    (tmp_path / "earlier" / last / "state.json").touch()
    error = refusal(argv.format(tmp=tmp_path), ranks)
    assert bool(error) == bool(message) and message in error and "\n" not in error


# ---- files that are damaged or lost ----

OF_RANK = ["replica-0-of-2-shard-0-of-1.pt", "replica-1-of-2-shard-0-of-1.pt"]  # of saved_run


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def zero_a_page(file):
    content = bytearray(file.read_bytes())
    content[4096:8192] = bytes(4096)
    file.write_bytes(content)


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-99])


def take_from_before(file):
    shutil.copy(file.parent.with_name("checkpoint-00000007") / file.name, file)


class Executed:
    """A pickle that makes a folder when it is loaded, if it is allowed to."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def bring_code(file):
    torch.save([Executed()], file)


DAMAGE = [  # what happens to a file; what the line must say
    (flip_a_bit, "is damaged: the CRC of"),
    (zero_a_page, "cannot be read"),
    (cut_short, "cannot be read (BadZipFile"),
    (take_from_before, "is of another checkpoint"),
    (bring_code, "cannot be read (UnpicklingError"),
]


@each_row("damage, message", DAMAGE)
def test_damaged_file_ends_all_ranks_with_one_line_before_the_training(
    damage, message, saved_run, tmp_path
):
    """It is a file that only rank 1 reads."""
    run = shutil.copytree(saved_run, tmp_path / "run")
    damage(run / "checkpoint-00000009" / OF_RANK[1])
    record = (run / "metrics.jsonl").read_text()
    names = sorted(os.listdir(run))
    launched = Launch(2, tmp_path / "log", f"--resume={run}", "--device=cpu", "--timeout_s=20")
    assert launched.wait() == [2, 2]
    line, other = errors(launched)
    assert "rank 1: " in line and "checkpoint-00000009 cannot be read" in line and other == ""
    assert message in line and "delete it, and --resume auto continues the one before" in line
    assert not Path("executed").exists()
    assert sorted(os.listdir(run)) == names and (run / "metrics.jsonl").read_text() == record


@pytest.mark.slow
def test_run_continues_when_the_damaged_checkpoint_is_deleted(saved_run, tmp_path):
    """As the line says."""
    run = shutil.copytree(saved_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoint-00000009")
    finish(Launch(2, tmp_path / "log", f"--out_dir={run}", "--resume=auto", "--device=cpu"))
    rows = [json.loads(row) for row in open(run / "metrics.jsonl")]
    steps = [row["step"] for row in rows if row["event"] == "step"]
    assert steps == list(range(1, 10))  # each once


def test_flipped_bit_of_the_state_is_noticed_before_a_flag_is_used(saved_run, tmp_path):
    path = shutil.copytree(saved_run, tmp_path / "run") / "checkpoint-00000009"
    for name in OF_RANK:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content.replace(b"block_size", b"block_sine"))
    assert "BadZipFile: Bad CRC-32 for file" in refusal(f"--resume {path}", 2)


def test_replica_whose_file_is_lost_continues_another_one_and_a_line_says_so(
    saved_run, tmp_path, corpus_folder
):
    run = shutil.copytree(saved_run, tmp_path / "run")
    path = run / "checkpoint-00000009"
    saved = torch.load(path / OF_RANK[1], weights_only=True)
    (path / OF_RANK[0]).unlink()
    loaded = run_training(2, corpus_folder, keep_what_is_loaded, run, resume="auto")
    line = f"checkpoint-00000009 lacks {OF_RANK[0]}: other replicas take their place"
    assert line in loaded.printed
    for rank in loaded.ranks:
        assert torch.equal(rank["exp_avg"], saved["vectors"]["exp_avg"])
        assert rank["method_state"]["statistics"] == saved["scalars"]["statistics"].tolist()


def test_folder_without_a_whole_replica_is_named_when_the_one_before_is_taken(
    saved_run, tmp_path, capsys
):
    run = shutil.copytree(saved_run, tmp_path / "run")
    for name in OF_RANK:
        (run / "checkpoint-00000009" / name).unlink()
    argv = ["--resume=auto", f"--out_dir={run}", "--device=cpu"]
    setup = launch.Setup(argv, train.METHODS, train.data.load, 2)
    assert setup.path == run / "checkpoint-00000007"
    line = "note    checkpoint-00000009: it has no files; checkpoint-00000007 is continued\n"
    assert line in capsys.readouterr().out
    (run / "checkpoint-00000007" / OF_RANK[0]).rename(
        run / "checkpoint-00000007" / "replica-0-of-1-shard-0-of-1.pt"
    )
    assert refusal(f"--resume=auto --out_dir={run}", 2) == (
        "checkpoint-00000009: it has no files; --overwrite starts anew"
    )


# ---- names, locks and disks ----


@pytest.mark.slow
def test_only_names_of_digits_are_checkpoints_and_a_start_deletes_only_what_a_kill_has_left(
    saved_run, tmp_path
):
    run = shutil.copytree(saved_run, tmp_path / "run")
    kept = {"checkpoint-best7", "checkpoint-00000002-backup1", "checkpoint-00000009.old"}
    kept |= {"checkpoint-best.tmp", "checkpoint-00000002-mine.tmp"}
    kept |= {"checkpoint-00000007", "checkpoint-00000009"}
    for name in kept | {"checkpoint.tmp", "checkpoint-00000004.tmp"}:
        shutil.copytree(saved_run / "checkpoint-00000007", run / name, dirs_exist_ok=True)
    for name in "checkpoint-100000000", "checkpoint-99999999":
        (run / name).mkdir()
    (run / "checkpoint-00000003").touch()  # not a folder
    assert saved_steps(run) == [7, 9, 99999999, 100000000]  # by number
    checkpoint.remove(checkpoint.list_checkpoints(run)[2:])
    files = {"checkpoint-00000003", "metrics.jsonl", "model.pt"}
    argv = f"--out_dir={run} --resume=auto --device=cpu --batch_size=2"
    finish(Launch(1, tmp_path / "log", *argv.split()))
    assert {path.name for path in run.iterdir()} == kept | files
    finish(Launch(1, tmp_path / "log", f"--out_dir={run}", "--overwrite", "--max_steps=1", *argv.split()[2:]))
    kept -= {"checkpoint-00000007", "checkpoint-00000009"}
    assert {path.name for path in run.iterdir()} == kept | files | {"checkpoint-00000001"}


def test_checkpoint_that_a_start_has_left_out_does_not_count_and_is_replaced(saved_run, tmp_path):
    """A later one, which another machine does not have: here the folder 9 is empty."""
    run = shutil.copytree(saved_run, tmp_path / "run")
    (run / "checkpoint-00000008").mkdir()
    for name in OF_RANK:
        (run / "checkpoint-00000009" / name).unlink()
    (run / "checkpoint-00000012").mkdir()
    argv = f"--out_dir={run} --resume=auto --device=cpu --keep=1 --checkpoint_interval=1"
    finish(Launch(2, tmp_path / "log", *argv.split()))
    assert saved_steps(run) == [9, 12]
    assert sorted(checkpoint.files_of(run / "checkpoint-00000009")) == OF_RANK


def test_dry_run_is_possible_while_a_run_writes_and_reads_no_vector(saved_run, tmp_path):
    run = shutil.copytree(saved_run, tmp_path / "run")
    flip_a_bit(run / "checkpoint-00000009" / OF_RANK[0])
    descriptor = checkpoint.lock(run)
    try:
        assert "another run is writing there" in refusal(f"--resume {run}", 2)
        assert refusal(f"--resume {run} --dry_run", 2) == ""
    finally:
        os.close(descriptor)


def test_disk_has_every_file_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor):
        events.append("disk has " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(source, target):
        rename(source, target)
        events.append(f"name {Path(target).name}")

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    folder = tmp_path / "removed" / "run"  # the folder is made again
    mesh = SimpleNamespace(replica=0, replicas=1, shard_index=0, shards=1, rank=0)
    mesh.all_gather_object = lambda thing: [thing]
    checkpoint.write(folder, mesh, {"state": {"step": 4}}, keep=1)
    files = ["disk has replica-0-of-1-shard-0-of-1.pt", "disk has checkpoint.tmp"]
    assert events == [*files, "name checkpoint-00000004", "disk has run"]
    events.clear()
    checkpoint.write(folder, mesh, {"state": {"step": 8}}, keep=1)
    assert events[-1] == "name checkpoint-00000004.tmp"  # the old one goes last
    assert os.listdir(folder) == ["checkpoint-00000008"]


# ---- kills ----


def kill_in(rank, name, count):
    """The count-th call of a function kills its process, after it has removed or written a part."""
    module, name = name.split(".")
    function = getattr(sys.modules[module], name)
    calls = []

    def deadly(first, *args, **options):
        calls.append(None)
        if len(calls) == count:
            if name == "rmtree":
                os.remove(next(first.iterdir()))
            if name == "save":
                args[0].write(b"PK")
            os.kill(os.getpid(), signal.SIGKILL)
        return function(first, *args, **options)

    setattr(sys.modules[module], name, deadly)


KILLS = {  # the call that kills a rank; the checkpoint that is the last one then
    "in the second write": ("torch.save", 2, 7),
    "before the second name": ("os.rename", 4, 7),
    "while the first one is removed": ("shutil.rmtree", 1, 11),
}


@each_row("function, count, last", KILLS.values())
def test_killed_run_continues_its_last_complete_checkpoint(
    function, count, last, tmp_path, corpus_folder
):
    """kill -9 of one process. test_launch.py kills one of four at random moments."""
    options = ROUNDS | dict(method="edit", checkpoint_interval=5, keep=1)
    whole = run_training(1, corpus_folder, **options)
    run = tmp_path / "run"
    argv = [*ranks.flags(**options), f"--data={corpus_folder}", f"--out_dir={run}"]
    killed = Launch(1, tmp_path / "log", *argv, special=patched(kill_in, function, count, of=[0]))
    assert killed.wait() == [-signal.SIGKILL], killed.lines("out")
    assert saved_steps(run) == [last]
    finish(Launch(1, tmp_path / "log", *argv, "--resume=auto"))
    record = [json.loads(line) for line in open(run / "metrics.jsonl")]
    assert [row["step"] for row in record if row["event"] == "resume"] == [last]
    assert [row["loss"] for row in record if row["event"] == "step"] == whole.losses
    model = torch.load(run / "model.pt", weights_only=True)["model"]
    assert all(torch.equal(model[name], value) for name, value in whole.model.items())
    assert sorted(os.listdir(run)) == ["checkpoint-00000017", "metrics.jsonl", "model.pt"]


# ---- processors that round differently ----


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this processor has no other kernels"
)
def test_replicas_on_processors_that_round_differently_train_save_and_keep_their_model(
    tmp_path, corpus_folder
):
    options = dict(method="edit", n_embd=64, block_size=32, dtype="fp32", tau=4, timeout_s=60)
    options |= dict(sync_warmup_steps=8, checkpoint_interval=4, keep=9, data=corpus_folder)
    rank = "if [ $RANK = 1 ]; then export ATEN_CPU_CAPABILITY=default; fi; exec python train.py "
    launcher = "-m torch.distributed.run --standalone --local_addr 127.0.0.1 --nproc_per_node 2"
    torchrun = [sys.executable, *launcher.split()]
    for steps in 12, 16:  # the second one resumes
        options |= dict(max_steps=steps, out_dir=tmp_path / "run", resume="auto")
        line = rank + shlex.join(ranks.flags(**options))
        subprocess.run([*torchrun, "--no-python", "sh", "-c", line], cwd=ranks.ROOT, check=True)
        (tmp_path / "run" / "model.pt").unlink()  # it is there
    assert saved_steps(tmp_path / "run") == [4, 8, 12, 16]
    path = tmp_path / "run" / "checkpoint-00000016"
    ours, theirs = [torch.load(path / name, weights_only=True)["vectors"] for name in OF_RANK]
    assert not torch.equal(ours["anchor"], theirs["anchor"])  # else the test says nothing
    torch.testing.assert_close(ours["anchor"], theirs["anchor"], rtol=1e-2, atol=1e-3)
