"""What must not change a bit; the mesh may change; damaged files are refused."""

import json
import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf
import train
from config import UserError
from mesh import Mesh
from plumbing import checkpoint, launch, log
from ranks import OUR_METHODS, Launch, method_alone, run_training, train_all

ROUNDS = dict(tau=4, sync_warmup_steps=3, max_steps=17, eval_interval=5, dtype="fp32")
CONSTANT_LR = dict(min_lr_ratio=1.0, tau=4, sync_warmup_steps=3, eval_interval=1000)
LOCAL = dict(tau=3, sync_warmup_steps=2, max_steps=12, n_layer=1, dtype="fp32")
ENDS = [1, 2, 5, 8, 11, 12]  # of the rounds of LOCAL
STREAMING_METHODS = "streaming_diloco", "streaming_edit"
STREAMING = LOCAL | dict(tau=8, fragments=2, alpha=0.5, max_steps=15)
VIRTUAL = dict(tau_time_s=4.0, virtual_clock=True, slow_replica="1:2")  # rounds of 4 and 2 steps
SLOW = dict(link_mbps=2.0)
UNEVEN = dict(link_mbps=20, link_latency_ms=2, slow_replica="0:1.5")
TIGHT = dict(anomaly_warmup_rounds=2, anomaly_threshold=0.05, min_lr_ratio=1.0)  # drops
CASES = [  # flags; ranks; round ends; where to resume; a simulation that changes nothing
    (dict(method="minibatch", max_steps=4), 2, [1, 2, 3, 4], [2], UNEVEN),
    (LOCAL | dict(method="post_local_sgd", accum=2), 2, ENDS, [8], {}),
    (LOCAL | dict(method="diloco"), 2, ENDS, [2, 8], {}),
    (LOCAL | dict(method="slowmo"), 2, ENDS, [2, 8], {}),
    (LOCAL | TIGHT | dict(method="edit", shards=2), 4, ENDS, [1, 8, 12], UNEVEN),
    (LOCAL | VIRTUAL | dict(method="a_edit"), 2, [1, 2, 6, 10, 14, 16], [2, 6], {}),
    (LOCAL | dict(method="co2", shards=2), 4, ENDS, [2, 8, 12], SLOW),
    # On 4x1 no two of NoLoCo's replicas are equal; in bf16 layers are gathered there, too.
    (LOCAL | dict(method="noloco", dtype="bf16"), 4, ENDS, [2, 8, 12], SLOW),
    (STREAMING | dict(method="streaming_diloco", delay=1, shards=2), 4, [1, 2, 10, 15], [10], SLOW),
    (STREAMING | TIGHT | dict(method="streaming_edit", delay=3, max_steps=27, dtype="bf16"), 2,
     [1, 2, 10, 18, 26, 27], [2, 18, 27], SLOW),
    (LOCAL | dict(method="zero_one_adam", tau_schedule="1:2"), 4, [1, 2, 3, 4, 7, 10, 12],
     [2, 4, 7], {}),
    (LOCAL | dict(method="qsr", qsr_c=0.012), 2, [1, 2, 5, 8, 12], [2, 8], {}),
    (LOCAL | TIGHT | dict(method="one_bit_edit", shards=2, warmup_format="int8", optimizer="muon",
                          anomaly_warmup_rounds=2),
     4, ENDS, [1, 2, 8], SLOW),
    (LOCAL | dict(method="sparse_loco", shards=2), 4, ENDS, [2, 8], {}),
    (LOCAL | dict(method="top_k", shards=2), 4, ENDS, [2, 8], {}),
    (LOCAL | dict(method="eager"), 2, ENDS, [2, 8, 12], SLOW),
    (LOCAL | dict(method="robust", shards=2), 4, ENDS, [8], {}),
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


def edit_state(path, change):
    """Change state.json, with a checksum that fits."""
    state = json.loads((path / "state.json").read_text())
    del state["checksum"]
    change(state)
    state["checksum"] = checkpoint.state_checksum(state)
    (path / "state.json").write_text(json.dumps(state))


def another_corpus(state):
    state["flags"]["corpus_hash"] = "another"


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


@pytest.mark.parametrize("options", [
    LOCAL | TIGHT | dict(method="edit"), LOCAL | VIRTUAL | dict(method="a_edit"),
], ids=["edit", "a_edit"])  # fmt: skip
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


@pytest.mark.parametrize("method", ["edit", pytest.param("streaming_edit", marks=pytest.mark.slow)])
def test_resume_that_changes_the_size_of_norms_starts_their_statistics_anew(
    method, tmp_path, corpus_folder
):
    """Limits of short rounds would flag every replica of a long one. `data`: another corpus in the
    same place."""
    options = dict(method=method, tau=4, sync_warmup_steps=2, max_steps=50, min_lr_ratio=1.0)
    if method == "streaming_edit":
        options |= dict(fragments=2, delay=1)
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
            edit_state(folder / "checkpoint-00000050", another_corpus)
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
    names = {name: method for name in method.shared + method.private}
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
    """A checkpoint at the first round end (3, 7, 11, 15, 17) at or after each multiple of 5. State
    that replicas share is stored once."""
    options = ROUNDS | dict(method="edit", shards=2, checkpoint_interval=5, keep=3)
    run = run_training(4, corpus_folder, out_dir=tmp_path, **options)
    assert [row["step"] for row in run.rows("eval")] == [7, 11, 15, 17]
    assert run.printed.count("saved ") == 4
    names = [f"checkpoint-{step:08d}" for step in (11, 15, 17)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "metrics.jsonl", "model.pt"]
    shared = {"parameters", "anchor", "momentum"}
    own = {"exp_avg", "exp_avg_sq"}
    own |= {"steps", "rounds", "statistics", "label"}
    for rank in range(4):
        held = torch.load(tmp_path / names[0] / f"rank-{rank:05d}.pt", weights_only=True)
        assert held.keys() == (shared | own if rank < 2 else own)


def train_and_resume(tmp_path, corpus_folder, tamper, ranks, cases, *meshes):
    """Train the cases and save at the end of step 6. Yield (run resumed from there, saved run) of
    each case and mesh. meshes: (ranks, flags that differ)."""
    places = [tmp_path / str(number) for number in range(len(cases))]
    saving = dict(checkpoint_interval=6, keep=100)
    saved = [(tamper, out, case | saving) for out, case in zip(places, cases)]
    saved = train_all(ranks, corpus_folder, *saved)
    for ranks, flags in meshes:
        copies = [cut_off(out, tmp_path / f"{out.name} on {ranks} ranks", 6) for out in places]
        resumed = [case | flags | dict(resume="auto") for case in cases]
        runs = train_all(ranks, corpus_folder, *[(tamper, *case) for case in zip(copies, resumed)])
        yield from zip(runs, saved, strict=True)


@pytest.mark.slow
def test_other_shards_continue_the_trajectory(tmp_path, corpus_folder):
    """fp64, the same windows in each step: only the order of sums differs."""
    options = CONSTANT_LR | dict(tau=3, max_steps=12, batch_size=4, shards=2)
    options["quantize"] = "none"  # the blocks would differ
    methods = [dict(method="edit"), dict(method="streaming_edit", fragments=3, delay=0)]
    methods.append(dict(method="edit", optimizer="muon", n_layer=3))
    cases = [options | method for method in methods]
    meshes = (2, dict(shards=1, batch_size=8)), (8, dict(shards=4, batch_size=2))
    for run, whole in train_and_resume(tmp_path, corpus_folder, None, 4, cases, *meshes):
        assert run.losses == pytest.approx(whole.losses, rel=1e-9)
        assert run.losses[6:] != whole.losses[6:]  # the steps were taken again
        for name, value in whole.model.items():
            torch.testing.assert_close(run.model[name], value, rtol=1e-5, atol=1e-7)


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
def test_run_starts_from_a_model_on_any_mesh_with_any_method(tmp_path, corpus_folder, monkeypatch):
    """No step changes a parameter: the rate is 0."""
    trained = run_training(2, corpus_folder, out_dir=tmp_path / "run", max_steps=3, n_hidden=64)
    init = dict(init_from=tmp_path / "run" / "model.pt", lr=0.0, max_steps=3, sync_warmup_steps=1)
    methods = [method for method in OUR_METHODS if method != "a_edit"]
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
        assert "/rank-0" not in open("/proc/self/maps").read()  # no file is kept open
        parameters.append(model.master.clone())
        model.master.zero_()

    method.finish = finish
    return parameters


@pytest.mark.slow
def test_other_replicas_take_over_replica_i_mod_m(tmp_path, corpus_folder):
    """Of 3 replicas. The resumed runs have no step to take: they end with what they have loaded."""
    options = CONSTANT_LR | dict(sync_warmup_steps=2, max_steps=6, fragments=2, delay=1)
    methods = ("diloco", "slowmo", "co2", "noloco", "edit", "streaming_edit", "eager", "sparse_loco")
    methods += ("zero_one_adam", "top_k")
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
    saved = torch.load(path / "rank-00001.pt", weights_only=True)
    assert saved.keys() == {"steps", "rounds", "label"}  # all vectors are equal
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
        return [line.split()[5] for line in maps if "rank-0" in line]


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


def refusal(argv, world_size) -> str:
    """The line that Setup refuses these flags with, "" if the run can continue."""
    try:
        launch.Setup([*argv.split(), "--device", "cpu"], train.METHODS, train.data.load, world_size)
    except UserError as error:
        return str(error)
    return ""


def cut(file):
    file.write_bytes(file.read_bytes()[:99])


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


class Executed:
    """A pickle that makes a folder when it is loaded, if it is allowed to."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


OTHER_RUN = "has an earlier run: --resume auto continues it, --overwrite deletes it"
UNREADABLE = "cannot be read"
S = "state.json"
R = "rank-00001.pt"
OLD_PICKLE = dict(_use_new_zipfile_serialization=False)
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
    ("--resume {tmp}/run --data {tmp}/wide", 2, "another --vocab_size, 257: leave it out, and give the --data"),
    ("--resume {tmp}/moved", 2, "trained on another corpus"),
    ("--resume {tmp}/moved --data {tmp}/new", 2, ""),
]
DAMAGE = [  # what happens to the last checkpoint p; what the line must say
    (lambda p: (p / S).unlink(), UNREADABLE),
    (lambda p: cut(p / S), UNREADABLE),
    (lambda p: make_pipe(p / S), "state.json: not a regular file"),
    (lambda p: (p / S).write_text("[" * 100000), "checkpoint-00000009 cannot be read"),
    (lambda p: (p / S).write_text("{}"), "an earlier edition of this code has saved it"),
    (lambda p: (p / S).write_text('{"checkpoint": 0, "flags": []}'), UNREADABLE),
    (lambda p: edit_state(p, lambda state: state["flags"].update(method="gone")), UNREADABLE),
    (lambda p: edit_state(p, lambda state: state["flags"].update(model="350m")), UNREADABLE),
]  # fmt: skip
PARTS = [  # the same, of a part that only rank 1 reads
    (lambda p: (p / R).unlink(), "2 ranks have saved it, and it has files of 1"),
    (lambda p: cut(p / R), UNREADABLE),
    (lambda p: make_pipe(p / R), "rank-00001.pt: not a regular file"),
    (lambda p: torch.save({"model": {}}, p / R), "KeyError: 'label'"),
    (lambda p: torch.save([Executed()], p / R), UNREADABLE),
    (lambda p: torch.save([Executed()], p / R, **OLD_PICKLE), UNREADABLE),
]  # fmt: skip
REFUSED = [(None, *row) for row in FLAGS]
REFUSED += [(damage, "--resume {tmp}/run", 2, message) for damage, message in DAMAGE]


@pytest.mark.parametrize("damage, argv, ranks, message", REFUSED)
def test_wrong_flags_and_damaged_files_are_refused_in_one_line_and_nothing_is_executed(
    damage, argv, ranks, message, saved_run, tmp_path, corpus_folder, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    meta = json.loads((corpus_folder / "meta.json").read_text())
    for name, change in ("wide", {"vocab_size": 300}), ("new", {"hash": "another"}):
        shutil.copytree(corpus_folder, tmp_path / name)
        (tmp_path / name / "meta.json").write_text(json.dumps(meta | change))
    shutil.copytree(saved_run / "checkpoint-00000007", tmp_path / "old" / "checkpoint-00000007")
    moved = shutil.copytree(saved_run, tmp_path / "moved") / "checkpoint-00000009"
    edit_state(moved, lambda state: state["flags"].update(data=str(tmp_path / "new")))
    last = shutil.copytree(saved_run, tmp_path / "run") / "checkpoint-00000009"
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "model.pt").touch()
    if damage:
        damage(last)
    error = refusal(argv.format(tmp=tmp_path), ranks)
    assert bool(error) == bool(message) and message in error and "\n" not in error
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("damage, message", PARTS)
def test_damaged_part_ends_all_ranks_with_one_line(damage, message, saved_run, tmp_path):
    shutil.copytree(saved_run, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoint-00000009")
    run = Launch(2, tmp_path / "log", "--resume", str(tmp_path / "run"), "--device", "cpu")
    assert run.wait() == [2, 2]
    (line,) = run.lines("err")
    assert "checkpoint-00000009 cannot be read" in line and message in line
    assert not list(tmp_path.rglob("executed")) and not Path("executed").exists()


def test_dry_run_is_possible_while_a_run_writes(saved_run):
    again = f"--out_dir {saved_run} --overwrite"
    descriptor = checkpoint.lock(saved_run)
    try:
        assert "another run is writing there" in refusal(again, 2)
        assert refusal(f"{again} --dry_run", 2) == ""
    finally:
        os.close(descriptor)


# ---- verification ----


@pytest.fixture(scope="module")
def saved_shards(tmp_path_factory, corpus_folder):
    """saved_run on two shards."""
    folder = tmp_path_factory.mktemp("shards") / "run"
    options = CONSTANT_LR | dict(method="edit", max_steps=9, shards=2)
    run_training(2, corpus_folder, **options, out_dir=folder, checkpoint_interval=1, keep=2)
    return folder


def change(name, how, rank=0):
    """Damage that changes a value of a rank, but not its checksum."""

    def damage(path):
        file = path / f"rank-{rank:05d}.pt"
        content = torch.load(file, weights_only=True)
        content[name] = how(content[name])
        torch.save(content, file)

    return damage


def flip_exponent(vector):
    vector.view(torch.int64).view(-1)[3] ^= 1 << 60
    return vector


def zero_page(path):
    """The middle of rank 1's file is lost, as on a disk without power."""
    content = bytearray((path / R).read_bytes())
    middle = content.index(b"archive/data/2") if b"archive/data/2" in content else len(content) // 2
    content[middle + 64 : middle + 4096] = bytes(4032)
    (path / R).write_bytes(content)


def swap(path):
    os.rename(path / R0, path / "kept")
    os.rename(path / R, path / R0)
    os.rename(path / "kept", path / R)


def from_before(name):
    return lambda path: shutil.copy(path.with_name("checkpoint-00000007") / name, path / name)


def from_another_run(path):
    """The same steps, rank and sizes, but other numbers and checksums that fit them."""
    content = torch.load(path / R, weights_only=True)
    content["exp_avg"] += 1
    content["label"]["checksums"]["exp_avg"] = checkpoint.checksum(content["exp_avg"])
    content["label"]["checkpoint"] += 1
    torch.save(content, path / R)


def leave_out(name, rank=0):
    def damage(path):
        file = path / f"rank-{rank:05d}.pt"
        content = torch.load(file, weights_only=True)
        del content[name]
        torch.save(content, file)

    return damage


R0 = "rank-00000.pt"
VECTORS = "exp_avg exp_avg_sq anchor momentum parameters statistics".split()
CORRUPTIONS = {f"a bit of {name}": change(name, flip_exponent) for name in VECTORS}
CORRUPTIONS |= {
    "a bit of rank 1": change("exp_avg", flip_exponent, rank=1),
    "a page of zeros": zero_page,
    "files swapped": swap,
    "rank 0's file twice": lambda p: shutil.copy(p / R0, p / R),
    "rank 0's file of the one before": from_before(R0),
    "rank 1's file of the one before": from_before(R),
    "state.json of the one before": from_before(S),
    "rank 1's file of another run": from_another_run,
    "a vector of one element": change("exp_avg", lambda vector: vector[:1].clone()),
    "statistics of 7 layers": change("statistics", lambda _: torch.zeros(3, 7)),
    "steps that are a text": change("steps", lambda _: "x", rank=1),
    "other steps": change("steps", lambda steps: steps + 1, rank=1),
    "a sparse vector": change("exp_avg", lambda vector: vector.to_sparse()),
    "a vector without storage": change("exp_avg", lambda vector: vector.to("meta")),
    "no statistics": leave_out("statistics"),
    "no label": leave_out("label", rank=1),
    "a label of three ranks": change("label", lambda label: label | {"world_size": 3}),
    "no file of rank 1": lambda p: (p / R).unlink(),
    "half a file": lambda p: cut(p / R),
    "no state.json": lambda p: (p / S).unlink(),
    "another step in its name": lambda p: os.rename(p, p.with_name("checkpoint-00000012")),
}


@pytest.mark.parametrize("mesh", ["2x1", "1x2"])
def test_damaged_checkpoint_is_refused_in_one_line_and_auto_takes_the_one_before(
    mesh, saved_run, saved_shards, tmp_path
):
    saved = {"2x1": saved_run, "1x2": saved_shards}[mesh]
    argv = ["--resume=auto", f"--out_dir={saved}"]
    setup = launch.Setup(argv, train.METHODS, train.data.load, 2)
    assert setup.path.name == "checkpoint-00000009"  # nothing is damaged yet
    for name, damage in CORRUPTIONS.items():
        run = shutil.copytree(saved, tmp_path / name / "run")
        damage(run / "checkpoint-00000009")
        with pytest.raises(UserError) as error:
            launch.Setup(["--resume", str(run)], train.METHODS, train.data.load, 2)
        line = str(error.value)
        assert "\n" not in line and "cannot be read (" in line and "--resume auto" in line, name
        argv = ["--resume=auto", f"--out_dir={run}"]
        setup = launch.Setup(argv, train.METHODS, train.data.load, 2)
        assert setup.path.name == "checkpoint-00000007", name


def setting(place, value):
    """Damage of state.json: place is a name, or a name in flags."""

    def damage(path):
        def set_value(state):
            *folders, name = place.split(".")
            for folder in folders:
                state = state[folder]
            if value is None:
                del state[name]
            else:
                state[name] = value

        edit_state(path, set_value)

    return damage


NAN = float("nan")
WRONG_VALUES = [
    ("tokens", None), ("tokens", "1"), ("tokens", -1), ("tokens", 2**63), ("tokens", [1]),
    ("train_s", None), ("train_s", "1"), ("train_s", NAN), ("train_s", -1.0),
    ("metrics_bytes", None), ("metrics_bytes", 1.5), ("metrics_bytes", -1),
    ("tokens_per_step", None), ("tokens_per_step", "32"), ("progress", None), ("progress", NAN),
    ("progress", True), ("sent", None), ("sent", 7), ("sent.sync", "x"), ("sent.shard", None),
    ("sent.shard", NAN),
    ("step", None), ("step", 8), ("checkpoint", "x"), ("averages_gradients", None),
    ("averages_gradients", 0), ("model_config", None), ("model_config.n_layer", None),
    ("model_config.n_layer", 10**8), ("model_config.n_layer", "2"), ("model_config.more", 1),
    ("model_config.norm_eps", NAN), ("model_config.vocab_size", 0), ("flags", 3),
    ("flags.seed", -1), ("flags.seed", "1"), ("flags.seed", 1.5), ("flags.lr", "x"),
    ("flags.lr", NAN), ("flags.lr", -1.0), ("flags.keep", 0), ("flags.keep", "2"),
    ("flags.log_interval", 0), ("flags.tau", 0), ("flags.batch_size", -3),
    ("flags.dtype", "int8"), ("flags.compile", "no"), ("flags.timeout_s", 0),
    ("flags.world_size", None), ("flags.world_size", 10**9), ("flags.world_size", 1),
    ("flags.world_size", "2"), ("flags.shards", 0), ("flags.shards", 3), ("flags.mesh", None),
    ("flags.mesh", [2, 1]), ("flags.mesh.replicas", 7), ("flags.mesh.shards", "1"),
    ("flags.corpus_hash", None), ("flags.data", 5), ("flags.method", ["edit"]),
    ("flags.optimizer", "sgd"), ("flags.max_steps", True), ("flags.model", {}),
]  # fmt: skip


def test_wrong_value_in_state_json_is_refused_as_on_a_command_line(saved_run, tmp_path):
    run = shutil.copytree(saved_run, tmp_path / "run")
    last = run / "checkpoint-00000009"
    kept = (last / S).read_bytes()
    for place, value in WRONG_VALUES:
        (last / S).write_bytes(kept)
        setting(place, value)(last)
        error = refusal(f"--resume {run}", 2)
        assert "checkpoint-00000009 cannot be read (" in error and "\n" not in error, (place, value)
        setup = launch.Setup(["--resume=auto", f"--out_dir={run}"], train.METHODS, train.data.load, 2)
        assert setup.path.name == "checkpoint-00000007", (place, value)


def others(value):
    """The value with one change at a time, in each place of it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            for other in others(inner):
                yield value | {name: other}
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            for other in others(inner):
                yield value[:i] + [other] + value[i + 1 :]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, str):
        yield value + "0"
    else:
        yield value + 1


def test_every_changed_value_of_state_json_is_noticed(saved_run, tmp_path):
    """Also one that is legal: of a run with another seed."""
    path = shutil.copytree(saved_run / "checkpoint-00000009", tmp_path / "checkpoint-00000009")
    state = json.loads((path / S).read_text())
    changed = list(others(state))
    assert len(changed) > 80
    for other in changed:
        (path / S).write_text(json.dumps(other))
        with pytest.raises(UserError, match="checkpoint-00000009 cannot be read"):
            checkpoint.read(path, train.METHODS)
    (path / S).write_text(json.dumps(state))
    checkpoint.read(path, train.METHODS)


def test_numbers_of_a_long_run_are_not_too_large(saved_run):
    """Flags are below 2^31, but a run has more tokens soon."""
    state = json.loads((saved_run / "checkpoint-00000009" / S).read_text())
    large = dict(tokens=2**45, metrics_bytes=2**45, train_s=2.0**45)
    large["sent"] = dict(shard=2.0**45, sync=2.0**45)
    state = {name: (state | large)[name] for name in state if name != "checksum"}
    state["checksum"] = checkpoint.state_checksum(state)
    checkpoint.check_state(state, train.METHODS)


def test_every_flipped_bit_of_a_file_is_noticed_or_changes_nothing(saved_run, tmp_path):
    path = shutil.copytree(saved_run, tmp_path / "run") / "checkpoint-00000009"
    state, _ = checkpoint.read(path, train.METHODS)
    expected = torch.load(path / R0, weights_only=True)
    whole = (path / R0).read_bytes()
    dice = random.Random(1)
    noticed = 0
    for _ in range(300):
        content = bytearray(whole)
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        (path / R0).write_bytes(content)
        try:
            checkpoint.verify(path, state, [0])
        except UserError:
            noticed += 1
            continue
        found = checkpoint.open_part(path, state, 0)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
            assert same, name
    assert noticed > 150  # the rest is padding and names that nobody reads


@pytest.mark.parametrize("damage", [change("exp_avg", flip_exponent, 1), from_before(R)])
def test_damage_that_one_rank_sees_sends_all_ranks_to_the_checkpoint_before(
    damage, saved_run, saved_shards, tmp_path
):
    for saved in saved_run, saved_shards:
        run = shutil.copytree(saved, tmp_path / saved.parent.name / "run")
        damage(run / "checkpoint-00000009")
        argv = ["--resume=auto", f"--out_dir={run}", "--device=cpu"]
        launched = Launch(2, tmp_path / "log", *argv)
        assert launched.wait() == [0, 0], launched.lines("err")
        (line,) = [line for line in launched.lines("out") if "the one before is taken" in line]
        assert "checkpoint-00000009" in line
        assert saved_steps(run) == [7, 9]  # the run has saved step 9 again
        assert (run / "checkpoint-00000009.damaged").is_dir()
        rows = [json.loads(row) for row in open(run / "metrics.jsonl")]
        steps = [row["step"] for row in rows if row["event"] == "step"]
        assert steps == list(range(1, 10))  # each once


def test_vector_of_another_size_is_refused_although_copying_would_stretch_it():
    model = method_alone().model
    for saved in [model.exp_avg[:1]], [model.exp_avg[:1]] * 2:
        with pytest.raises(UserError, match="exp_avg does not have this model's size"):
            checkpoint.fill(model.exp_avg, saved, model, "exp_avg")


def test_dry_run_reads_no_vector(saved_run, tmp_path):
    run = shutil.copytree(saved_run, tmp_path / "run")
    change("exp_avg", flip_exponent)(run / "checkpoint-00000009")
    assert "exp_avg of rank 0 is damaged" in refusal(f"--resume {run}", 2)
    assert refusal(f"--resume {run} --dry_run", 2) == ""


def test_run_does_not_start_anew_when_all_its_checkpoints_are_damaged(saved_run, tmp_path):
    run = shutil.copytree(saved_run, tmp_path / "run")
    for path in checkpoint.list_checkpoints(run):
        setting("checkpoint", None)(path)
    error = refusal(f"--resume=auto --out_dir {run}", 2)
    assert "checkpoint-00000009 cannot be read (it has no checksums: an earlier edition" in error
    assert "--overwrite starts anew" in error


def test_checkpoint_that_vanishes_is_not_called_damaged(saved_run, tmp_path, monkeypatch):
    """Another run has removed it meanwhile."""
    run = shutil.copytree(saved_run, tmp_path / "run")

    def vanish(path, *args):
        shutil.rmtree(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(checkpoint, "open_part", vanish)
    error = refusal(f"--resume {run} --out_dir {tmp_path}/new", 2)
    assert "it is gone: the run that writes there keeps only its last ones" in error
    assert "delete" not in error


def test_passing_error_of_the_disk_ends_the_start_and_renames_nothing(
    saved_run, tmp_path, monkeypatch, capsys
):
    """The newest checkpoint may be sound."""
    run = shutil.copytree(saved_run, tmp_path / "run")
    last = run / "checkpoint-00000009"
    names = sorted(os.listdir(run))
    read_bytes = Path.read_bytes

    def fail(path):
        if path == last / S:
            raise OSError(5, "Input/output error", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    argv = ["--resume=auto", f"--out_dir={run}", "--batch_size=2", "--device=cpu"]
    with pytest.raises(UserError, match="cannot be read now .Input/output error: .*state.json"):
        launch.start(argv, train.METHODS, train.data.load)
    assert sorted(os.listdir(run)) == names


# ---- names, links and disks ----


def test_only_names_of_digits_are_checkpoints_and_copies_of_users_stay(saved_run, tmp_path):
    run = shutil.copytree(saved_run, tmp_path / "run")
    copies = {"checkpoint-best7", "checkpoint-00000002-backup1", "checkpoint-00000009.old"}
    copies |= {"checkpoint-mine.damaged", "checkpoint-best.tmp"}
    for name in copies:
        shutil.copytree(run / "checkpoint-00000007", run / name)
    for name in "checkpoint-100000000", "checkpoint-99999999":
        (run / name).mkdir()
    (run / "checkpoint-00000001").touch()  # not a folder
    assert saved_steps(run) == [7, 9, 99999999, 100000000]  # by number
    checkpoint.remove(checkpoint.list_checkpoints(run)[2:])
    assert launch.Setup(["--resume", str(run)], train.METHODS, train.data.load, 2).path == run / "checkpoint-00000009"
    setup = launch.Setup([f"--out_dir={run}", "--overwrite", "--device=cpu"], train.METHODS, train.data.load, 1)
    os.rename(run / "checkpoint-00000009", run / "checkpoint-00000009.damaged")
    (run / "checkpoint-00000004.tmp").mkdir()
    checkpoint.prepare(setup, Mesh(1, torch.device("cpu"), alone=True))
    names = {path.name for path in run.iterdir()}
    assert names == copies | {"checkpoint-00000001", "metrics.jsonl"}


def test_nothing_is_written_or_deleted_through_a_link(saved_run, tmp_path, corpus_folder):
    run = shutil.copytree(saved_run, tmp_path / "run")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("kept")
    mesh = Mesh(1, torch.device("cpu"), alone=True)
    state = {"step": 12, "flags": {"keep": 1}}
    (run / "checkpoint.tmp").symlink_to(theirs)
    with pytest.raises(UserError, match="checkpoint.tmp is a link: remove it"):
        checkpoint.write(run, mesh, {}, state)
    (run / "checkpoint.tmp").symlink_to(theirs)
    (run / "checkpoint-00000003.tmp").symlink_to(theirs)
    (run / "checkpoint-00000001").symlink_to(theirs)
    (run / "model.pt.tmp").symlink_to(theirs / "file")
    setup = launch.Setup(["--resume", str(run)], train.METHODS, train.data.load, 2)
    checkpoint.prepare(setup, mesh)
    assert not list(run.glob("checkpoint*.tmp"))
    assert checkpoint.write(run, mesh, {}, state).name == "checkpoint-00000012"
    assert saved_steps(run) == [12]  # the link is gone, too
    model = method_alone().model
    hf.save_model(run / "model.pt", model, "byte", {})
    assert (theirs / "file").read_text() == "kept" and len(list(theirs.iterdir())) == 1
    assert not (run / "model.pt").is_symlink()


def test_checkpoint_makes_a_folder_again_that_was_removed_during_the_run(tmp_path):
    state = {"step": 4, "flags": {"keep": 1}}
    mesh = Mesh(1, torch.device("cpu"), alone=True)
    checkpoint.write(tmp_path / "out" / "run", mesh, {}, state)
    assert saved_steps(tmp_path / "out" / "run") == [4]


def test_disk_has_every_file_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    events = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def note_fsync(descriptor):
        events.append("disk has " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note(function):
        def call(source, target):
            events.append(f"name {Path(target).name}")
            function(source, target)

        return call

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note(rename))
    monkeypatch.setattr(os, "replace", note(replace))
    folder = tmp_path / "run"
    folder.mkdir()
    mesh = Mesh(1, torch.device("cpu"), alone=True)
    checkpoint.write(folder, mesh, {}, {"step": 4, "flags": {"keep": 1}})
    files = ["disk has rank-00000.pt", "disk has state.json", "disk has checkpoint.tmp"]
    assert events == [*files, "name checkpoint-00000004", "disk has run"]
    events.clear()
    hf.save_model(folder / "model.pt", method_alone().model, "byte", {})
    assert events == ["disk has model.pt.tmp", "name model.pt", "disk has run"]
