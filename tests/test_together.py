"""Real processes, really killed and stopped: they leave in bounded time with one line, and go on
later as if nothing had been."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import checkpoint
import ranks
import together
from mesh import LostRank
from ranks import ROOT, TINY, Launch, agent_store

RUN = [
    *TINY, "--dtype", "fp32", "--method", "edit", "--shards", "2", "--tau", "4",
    "--sync_warmup_steps", "3",
]  # fmt: skip


def command(folder, corpus_folder, *argv, steps=40):
    words = ["--data", corpus_folder, "--out_dir", folder, "--max_steps", steps, *argv]
    return [*RUN, *map(str, words)]


def record(folder):
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


def essence(folder):
    """What two runs that are the same have in common: the losses by step, and the model."""
    losses = [(row["step"], row["loss"]) for row in record(folder) if row["event"] == "step"]
    return losses, torch.load(folder / "model.pt", weights_only=True)["model"]


def assert_same(folder, other):
    (losses, model), (expected, expected_model) = essence(folder), essence(other)
    assert losses == expected  # every step once, none missing
    assert all(torch.equal(model[name], value) for name, value in expected_model.items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus_folder):
    folder = tmp_path_factory.mktemp("undisturbed")
    launch = Launch(4, folder / "log", *command(folder / "run", corpus_folder))
    assert launch.wait() == [0] * 4 and launch.lines("err") == []
    return folder / "run"


def run_late(argv, rank, world_size, port, folder):
    """ranks._command with the host one step behind, as on CUDA."""
    import ranks
    import shard

    make = shard.ShardedModel.__init__

    def make_late(self, *args, **options):
        make(self, *args, **options)
        self.read_late = 1

    shard.ShardedModel.__init__ = make_late
    ranks._command(argv, rank, world_size, port, folder)


@pytest.mark.parametrize(
    "number, to, how", [("SIGTERM", [], None), ("SIGINT", [2], None), ("SIGTERM", [], run_late)]
)
def test_signal_with_save_on_exit_stops_all_at_one_step_and_the_rest_follows(
    number, to, how, tmp_path, corpus_folder, undisturbed
):
    argv = command(tmp_path / "run", corpus_folder, "--save_on_exit", "--resume", "auto")
    special = {rank: (how,) for rank in range(4)} if how else {}
    launch = Launch(4, tmp_path / "log", *argv, special=special)
    launch.wait_for("step 00017/")
    launch.signal(signal.Signals[number], *to)  # one rank alone is enough
    assert launch.wait() == [128 + signal.Signals[number]] * 4
    (line,) = launch.lines("err")
    (path,) = checkpoint.complete(tmp_path / "run")
    assert f"stopped by {number}" in line and str(path) in line and "--resume auto" in line
    assert not (tmp_path / "run" / "model.pt").exists()
    again = Launch(4, tmp_path / "log", *argv, special=special)
    assert again.wait() == [0] * 4, again.lines("err")
    assert_same(tmp_path / "run", undisturbed)


def test_signal_to_the_slow_replica_stops_the_fast_one(tmp_path, corpus_folder):
    """The fast one is always ahead, and first at every gate."""
    argv = command(
        tmp_path / "run", corpus_folder, "--tau", "20", "--save_on_exit", "--slow_replica", "1:4",
        steps=5000,
    )  # fmt: skip
    launch = Launch(4, tmp_path / "log", *argv)
    launch.wait_for("step 00010/")
    launch.signal(signal.SIGTERM, 3)
    assert launch.wait(10) == [143] * 4, launch.lines("err")
    replicas = checkpoint.read(*checkpoint.complete(tmp_path / "run"))["replicas"]
    assert replicas[0]["step"] == replicas[1]["step"] < 60


def test_signal_in_a_edit_stops_replicas_in_the_same_round(tmp_path, corpus_folder):
    """No two replicas are at the same step:
    each saves where it is, and nobody waits for a sync that never comes."""
    argv = command(
        tmp_path / "run", corpus_folder, "--method", "a_edit", "--tau_time_s", "0.2",
        "--save_on_exit", steps=400,
    )  # fmt: skip
    launch = Launch(4, tmp_path / "log", *argv, "--slow_replica", "1:3")
    launch.wait_for("sync 0002")
    launch.signal(signal.SIGTERM, 2)
    assert launch.wait() == [143] * 4
    (path,) = checkpoint.complete(tmp_path / "run")
    fast, slow = checkpoint.read(path)["replicas"]
    assert fast["step"] > slow["step"] and fast["method"]["round"] == slow["method"]["round"]
    argv = command(
        tmp_path / "run", corpus_folder, "--resume", "auto", "--max_steps", "40",
        "--allow_change", "max_steps",
    )  # fmt: skip
    argv = [word for word in argv if word not in ("--method", "edit")]
    again = Launch(4, tmp_path / "log", *argv)
    assert again.wait() == [0] * 4, again.lines("err")


def test_signal_without_save_on_exit_ends_at_once_with_one_line(tmp_path, corpus_folder):
    launch = Launch(2, tmp_path / "log", *command(tmp_path / "run", corpus_folder, steps=100000))
    launch.wait_for("step 00003/")
    launch.signal(signal.SIGINT)
    assert launch.wait(10) == [130] * 2
    assert [line for line in launch.lines("err")] == ["train.py: stopped by SIGINT"]


# 1000: no sync is near that would tell
@pytest.mark.parametrize("victim, tau", [(0, 4), (3, 4), (3, 1000)])
def test_killed_rank_ends_the_others_at_once_with_a_line(victim, tau, tmp_path, corpus_folder):
    argv = command(
        tmp_path / "run", corpus_folder, "--checkpoint_interval", "10", "--tau", tau, steps=100000
    )
    launch = Launch(4, tmp_path / "log", *argv)
    launch.wait_for("step 00013/")
    launch.signal(signal.SIGKILL, victim)
    began = time.monotonic()
    codes = launch.wait(20)
    assert time.monotonic() - began < 10
    assert codes == [-9 if rank == victim else 1 for rank in range(4)]
    lines = launch.lines("err")
    for said in ("lost contact with another rank", "--resume auto goes on from"):
        assert all(said in line for line in lines), lines
    assert len(lines) == 1


def test_silent_rank_is_given_up_after_the_timeout(tmp_path, corpus_folder):
    argv = command(tmp_path / "run", corpus_folder, "--timeout_s", "2", steps=100000)
    launch = Launch(4, tmp_path / "log", *argv)
    launch.wait_for("step 00005/")
    launch.signal(signal.SIGSTOP, 3)  # a machine that hangs, not a process that is gone
    codes = launch.wait(7)  # rank 3 is then killed, still asleep
    assert codes == [1, 1, 1, -9]
    assert sum("lost contact" in line for line in launch.lines("err")) == 1, launch.lines("err")


class SilentStore:
    def __getattr__(self, operation):
        return lambda *args: time.sleep(1)


def test_silent_store_is_given_up_after_the_timeout():
    with pytest.raises(LostRank, match="the store is silent for 0.2 s"):
        together.Store(SilentStore(), 0.2).get("key")


def wait_two_seconds_for_the_others(argv, *more):
    together.MEET_S = 2
    ranks._command(argv, *more)


def never_come(argv, *more):
    pass


def test_rank_that_never_starts_ends_the_others(tmp_path, corpus_folder):
    special = {0: (wait_two_seconds_for_the_others,), 1: (never_come,)}
    launch = Launch(2, tmp_path / "log", *command(tmp_path / "run", corpus_folder), special=special)
    assert launch.wait(20) == [1, 0]
    # beside torch's own warnings
    (line,) = [line for line in launch.lines("err") if not line.startswith("[")]
    assert "error: lost contact with another rank while starting" in line


# ---- crashes ----


CRASHES = {
    "before the vectors are written": ("write_vectors", 2, 2),
    "before the files are reported": ("checksum", 1, 2),
    "before the description": ("write_whole", 0, 2),
    "before the new name": ("sync_folder", 0, 3),
    "after the new name": ("sync_folder", 0, 4),
    "while the oldest is removed": ("remove", 0, 1),
}


def run_and_die(argv, rank, world_size, port, folder, name, count):
    """ranks._command with a function of checkpoint.py that kills
    its process when it is called for the count-th time."""
    import ranks

    function, calls = getattr(checkpoint, name), []

    def deadly(*args, **options):
        calls.append(None)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    setattr(checkpoint, name, deadly)
    ranks._command(argv, rank, world_size, port, folder)


@pytest.mark.parametrize("name, victim, count", CRASHES.values(), ids=CRASHES)
def test_crash_while_saving_leaves_the_last_complete_checkpoint(
    name, victim, count, tmp_path, corpus_folder, undisturbed
):
    argv = command(
        tmp_path / "run", corpus_folder, "--checkpoint_interval", "7", "--keep", "1",
        "--resume", "auto",
    )  # fmt: skip
    launch = Launch(4, tmp_path / "log", *argv, special={victim: (run_and_die, name, count)})
    codes = launch.wait()
    assert codes[victim] == -9 and 0 not in codes
    for path in checkpoint.complete(tmp_path / "run"):
        checkpoint.verify(path, checkpoint.read(path))
    assert checkpoint.complete(tmp_path / "run")
    again = Launch(4, tmp_path / "log", *argv)
    assert again.wait() == [0] * 4, again.lines("err")
    assert_same(tmp_path / "run", undisturbed)
    assert not list((tmp_path / "run").glob("*.tmp"))


# more make a soak of it: KILLS=20 python -m pytest tests/test_together.py
KILLS = int(os.environ.get("KILLS", 2))
STEPS = max(100, 30 * KILLS)


def survive(folder, meshes, *argv):
    """Run argv on one mesh after another, killing a random rank at a random
    moment of its training, KILLS times; then let it finish. meshes: pairs
    of (world size, flags). The survivors have to end by themselves."""
    dice, struck, store = random.Random(KILLS), 0, agent_store()
    while True:
        world_size, mesh = dice.choice(meshes)
        launch = Launch(world_size, folder, *argv, *mesh, store=store)
        victim = dice.randrange(world_size)
        if struck < KILLS:
            launch.wait_for("| loss ")
            time.sleep(dice.uniform(0, 0.5))
            struck += launch.ranks[victim].is_alive()
            launch.signal(signal.SIGKILL, victim)
            codes = launch.wait(30)
        else:
            codes = launch.wait(300)
        if codes == [0] * world_size:
            return struck
        assert codes[victim] == -9 and set(codes) - {-9} <= {1, 0}, (codes, launch.lines("err"))
        assert codes.count(-9) == 1


def soak(tmp_path, corpus_folder, meshes, *argv, at_least=1):
    """(folder of a run on one mesh after another, with kills;
    folder of one that was left alone on the last mesh)."""
    argv = [*RUN, "--max_steps", str(STEPS), "--data", str(corpus_folder), *argv]
    saving = ["--checkpoint_interval", "5", "--resume", "auto", "--allow_change", "batch_size"]
    kills = survive(tmp_path / "log", meshes, *argv, *saving, "--out_dir", str(tmp_path / "run"))
    assert kills >= at_least
    world_size, mesh = meshes[-1]
    whole = Launch(world_size, tmp_path / "log", *argv, *mesh, "--out_dir", str(tmp_path / "whole"))
    assert whole.wait() == [0] * world_size
    return tmp_path / "run", tmp_path / "whole"


def test_random_kills_cost_no_step_and_change_no_bit(tmp_path, corpus_folder):
    assert_same(*soak(tmp_path, corpus_folder, [(4, [])], at_least=KILLS))


def test_random_kills_and_other_shards_continue_the_trajectory(tmp_path, corpus_folder):
    """On one or two shards, by chance, after each kill, with the same global batch.
    fp64: the order of sums differs."""
    meshes = [(2 * n, ["--shards", str(n), "--batch_size", str(4 // n)]) for n in (1, 2)]
    run, whole = soak(tmp_path, corpus_folder, meshes, "--dtype", "fp64")
    (losses, _), (expected, _) = essence(run), essence(whole)
    assert [step for step, _ in losses] == [step for step, _ in expected]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], rel=1e-9)


def test_random_kills_and_other_replicas_train_as_well(tmp_path, corpus_folder):
    """One, two or four replicas, by chance: another trajectory, as good a model."""
    meshes = [(m, ["--shards", "1", "--batch_size", str(8 // m)]) for m in (1, 4, 2)]
    run, whole = soak(tmp_path, corpus_folder, meshes)
    steps = [row["step"] for row in record(run) if row["event"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    ours, theirs = (record(folder)[-1]["val_loss"] for folder in (run, whole))
    assert ours == pytest.approx(theirs, rel=0.05)


def test_torchrun_restarts_from_the_last_checkpoint_without_being_told(
    tmp_path, corpus_folder, undisturbed
):
    """The whole chain, once: torchrun --max-restarts, kill -9 of one rank, no --resume flag."""
    argv = command(
        tmp_path / "run", corpus_folder, "--checkpoint_interval", "5", "--random_lag", "1:0.02"
    )
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4",
        "--max-restarts", "1",
    ]  # fmt: skip
    agent = subprocess.Popen(
        [*launcher, "train.py", *argv], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    for line in agent.stdout:
        if line.startswith("step 00012"):
            pgrep = ["pgrep", "-P", str(agent.pid)]
            ranks = subprocess.run(pgrep, capture_output=True, text=True).stdout.split()
            os.kill(int(ranks[-1]), signal.SIGKILL)
            break
    printed, _ = agent.communicate(timeout=90)
    assert agent.returncode == 0 and "checkpoint-00000010: step 10" in printed
    assert_same(tmp_path / "run", undisturbed)


# ---- full disks, divergence ----


def run_with_small_files(argv, rank, world_size, port, folder, most_bytes):
    """ranks._command on a disk where a file can have so many bytes:
    writing more fails as on a full one."""
    import resource

    import ranks

    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    ranks._command(argv, rank, world_size, port, folder)


FULL = {  # the largest file there is room for -> what cannot be written
    "record": (
        3_000, ["--log_interval", "1"], "metrics.jsonl could not be written: File too large",
    ),
    "model": (20_000, [], "model.pt could not be written"),
    "checkpoint": (40_000, ["--checkpoint_interval", "10"], "no checkpoint could be written to"),
}  # fmt: skip


@pytest.mark.parametrize("most_bytes, more, message", FULL.values(), ids=FULL)
def test_full_disk_ends_the_run_with_one_line_and_nothing_half_written(
    most_bytes, more, message, tmp_path, corpus_folder
):
    argv = command(tmp_path / "run", corpus_folder, "--n_embd", "8", "--log_interval", "20", *more)
    special = {rank: (run_with_small_files, most_bytes) for rank in range(4)}
    launch = Launch(4, tmp_path / "log", *argv, special=special)
    codes = launch.wait(30)
    # the others are done when rank 0 writes the model
    assert codes[0] == 2 and set(codes) <= {0, 1, 2}
    (line,) = launch.lines("err")
    assert message in line
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"metrics.jsonl"}


def test_failed_save_leaves_the_one_before(tmp_path, corpus_folder, undisturbed):
    argv = command(
        tmp_path / "run", corpus_folder, "--checkpoint_interval", "10", "--resume", "auto"
    )
    obstacle = tmp_path / "run" / "checkpoint-00000020.tmp"
    special = {0: (run_into, str(obstacle))}
    launch = Launch(4, tmp_path / "log", *argv, special=special)
    assert launch.wait() == [2] * 4
    (line,) = launch.lines("err")
    assert "no checkpoint could be written" in line
    assert [path.name for path in checkpoint.complete(tmp_path / "run")] == ["checkpoint-00000010"]
    obstacle.unlink(missing_ok=True)
    again = Launch(4, tmp_path / "log", *argv)
    assert again.wait() == [0] * 4
    assert_same(tmp_path / "run", undisturbed)


def run_into(argv, rank, world_size, port, folder, obstacle):
    """ranks._command with a file where the second checkpoint's folder has to be."""
    import ranks

    clean_up = checkpoint.clean_up

    def clean_up_and_block(folder):
        clean_up(folder)
        open(obstacle, "w").close()

    checkpoint.clean_up = clean_up_and_block
    ranks._command(argv, rank, world_size, port, folder)


def run_sick(argv, rank, world_size, port, folder, sick_rank, step):
    """ranks._command; the loss of one rank is NaN from a step on."""
    import ranks
    import shard

    forward, count = shard.ShardedModel.forward, []

    def sick_forward(self, *args, **options):
        count.append(None)
        sick = len(count) > step and rank == sick_rank
        return forward(self, *args, **options) * (float("nan") if sick else 1)

    shard.ShardedModel.forward = sick_forward
    ranks._command(argv, rank, world_size, port, folder)


@pytest.mark.parametrize("method", ["minibatch", "diloco"])
def test_loss_that_is_not_finite_stops_methods_that_cannot_mend_it(method, tmp_path, corpus_folder):
    argv = command(
        tmp_path / "run", corpus_folder, "--checkpoint_interval", "2", "--keep", "100",
        "--method", method,
    )  # fmt: skip
    special = {rank: (run_sick, 2, 14) for rank in range(4)}
    launch = Launch(4, tmp_path / "log", *argv, special=special)
    codes = launch.wait(20)
    assert 2 in codes and set(codes) <= {1, 2}
    (line,) = launch.lines("err")
    assert "diverged at step 15" in line and "loss nan" in line and "lower --lr" in line
    assert len(checkpoint.complete(tmp_path / "run")) == 7  # the last after step 14
