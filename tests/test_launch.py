"""Real processes, really killed and stopped: they leave in bounded time with one line, and a
resumed run continues as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import ranks
from plumbing import checkpoint, launch
from ranks import ROOT, TINY, Launch, agent_store

RUN = [
    *TINY, "--dtype", "fp32", "--method", "edit", "--shards", "2", "--tau", "4",
    "--sync_warmup_steps", "3",
]  # fmt: skip
LOST = "lost contact with another rank"


def command(folder, corpus_folder, *argv, steps=40):
    words = ["--data", corpus_folder, "--out_dir", folder, "--max_steps", steps, *argv]
    return [*RUN, *map(str, words)]


def record(folder):
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


def essence(folder):
    """What two equal runs have in common: the losses by step, and the model."""
    losses = [(row["step"], row["loss"]) for row in record(folder) if row["event"] == "step"]
    return losses, torch.load(folder / "model.pt", weights_only=True)["model"]


def assert_same(folder, other):
    (losses, model), (expected, expected_model) = essence(folder), essence(other)
    assert losses == expected  # every step once, none missing
    assert all(torch.equal(model[name], value) for name, value in expected_model.items())


def finish(world_size, log, argv, **options):
    """Run to the end, without a line of error."""
    run = Launch(world_size, log, *argv, **options)
    assert (run.wait(), run.lines("err")) == ([0] * world_size, [])
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus_folder):
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(4, folder / "log", command(folder / "run", corpus_folder))
    return folder / "run"


# ---- stopping ----


def run_patched(argv, rank, world_size, port, folder, patch, *more):
    """ranks._command after patch(rank, *more)."""
    import ranks

    patch(rank, *more)
    ranks._command(argv, rank, world_size, port, folder)


def patched(patch, *more, of=range(4)):
    return {rank: (run_patched, patch, *more) for rank in of}


def lag_metrics(rank):
    """The host reads metrics one step late, as on CUDA."""
    import shard

    make = shard.ShardedModel.__init__

    def make_late(self, *args, **options):
        make(self, *args, **options)
        self.metrics_lag = 1
        self.metrics = type(self.metrics)(maxlen=2)

    shard.ShardedModel.__init__ = make_late


def wait_for_signal(rank, step, *waiting):
    """These ranks take no further step until they have got a signal."""
    from plumbing.run import Run

    vote = Run.vote

    def wait_and_vote(self):
        while rank in waiting and self.method.steps == step and not self.stop.signal:
            time.sleep(0.001)
        return vote(self)

    Run.vote = wait_and_vote


def wait_late(rank, step, *waiting):
    lag_metrics(rank)
    wait_for_signal(rank, step, *waiting)


@pytest.mark.parametrize(
    "method, number, to, patch, at",
    [
        ("minibatch", "SIGTERM", [0, 1, 2, 3], wait_for_signal, 20),
        ("minibatch", "SIGINT", [2], wait_late, 21),
        ("edit", "SIGINT", [0, 1, 2, 3], wait_for_signal, 20),
        ("diloco", "SIGTERM", [0, 1, 2, 3], wait_late, 21),
    ],
)
def test_signal_with_save_on_exit_stops_all_at_one_round_end(
    method, number, to, patch, at, tmp_path, corpus_folder
):
    """One signalled rank is enough. In mini-batch every step is a round end: nothing is lost."""
    argv = command(tmp_path / "run", corpus_folder, "--save_on_exit", "--resume", "auto")
    argv += ["--method", method, "--tau", "1000"]
    run = Launch(4, tmp_path / "log", *argv, special=patched(patch, 19, *to))
    run.wait_for("step 00019/")
    run.signal(signal.Signals[number], *to)
    assert run.wait() == [128 + signal.Signals[number]] * 4, run.lines("err")
    (line,) = run.lines("err")
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    assert f"stopped by {number} after step {at}; --resume auto continues from {path}" in line
    assert path.name == f"checkpoint-{at:08d}" and not (tmp_path / "run" / "model.pt").exists()
    assert [replica["steps"] for replica in checkpoint.read(path)["replicas"]][-1] == at
    finish(4, tmp_path / "log", argv)
    if method == "minibatch":
        whole = command(tmp_path / "whole", corpus_folder, "--method", method)
        finish(4, tmp_path / "log", whole)
        assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("method", ["edit", "a_edit"])
def test_signal_to_a_slow_replica_stops_the_fast_one(method, tmp_path, corpus_folder):
    """Replicas take different numbers of steps in the last round. An evaluation that is due for one
    of them alone must not separate them."""
    argv = command(
        tmp_path / "run", corpus_folder, "--tau", "5000", "--save_on_exit", "--method", method,
        "--tau_time_s", "1000", "--eval_interval", "20", steps=5000,
    )  # fmt: skip
    run = Launch(4, tmp_path / "log", *argv, special=patched(wait_for_signal, 9, 3))
    run.wait_for("step 00030/")
    run.signal(signal.SIGTERM, 3)
    assert run.wait(20) == [143] * 4, run.lines("err")
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    state = checkpoint.read(path)
    (sync,) = [row for row in record(tmp_path / "run") if row["event"] == "sync"]
    fast, slow = sync["steps"]
    assert slow == 10 - 3 and fast >= 30 - 3
    counted = [replica["steps"] for replica in state["replicas"]]
    assert counted == [3 + fast, 3 + (fast if method == "edit" else slow)]
    assert state["progress"] == 3 + (fast if method == "edit" else (fast + slow) / 2)
    more = ["--resume", "auto", "--max_steps", str(int(state["progress"]) + 5)]
    finish(4, tmp_path / "log", [*argv, *more])


def tell_in_final_evaluation(rank):
    """Print a line and wait for a signal when the training is over."""
    from plumbing.run import Run

    finish = Run.finish

    def tell_and_finish(self):
        print("training is over", flush=True)
        if rank == 0:
            while not (self.stop.signal or not self.config.save_on_exit):
                time.sleep(0.001)
        finish(self)

    Run.finish = tell_and_finish


def test_signal_after_the_training_leaves_the_model(tmp_path, corpus_folder):
    argv = command(tmp_path / "run", corpus_folder, "--save_on_exit", steps=8)
    run = Launch(4, tmp_path / "log", *argv, special=patched(tell_in_final_evaluation))
    run.wait_for("training is over")
    run.signal(signal.SIGTERM)
    assert (run.wait(), run.lines("err")) == ([0] * 4, [])
    assert (tmp_path / "run" / "model.pt").exists()
    assert record(tmp_path / "run")[-1]["event"] == "end"


def test_signals_kill_at_once_without_save_on_exit_and_the_second_one_with_it(
    tmp_path, corpus_folder
):
    argv = command(tmp_path / "run", corpus_folder, steps=100000)
    run = Launch(2, tmp_path / "log", *argv)
    run.wait_for("step 00003/")
    run.signal(signal.SIGINT)
    assert run.wait(10) == [-signal.SIGINT] * 2 and run.lines("err") == []
    # A rank that is asleep lets no other rank reach the round end.
    run = Launch(2, tmp_path / "log", *argv, "--save_on_exit", "--timeout_s", "60")
    run.wait_for("step 00003/")
    run.signal(signal.SIGSTOP, 1)
    time.sleep(0.2)  # it waits in a collective
    run.signal(signal.SIGINT, 0)
    time.sleep(0.2)
    assert run.ranks[0].is_alive()
    while run.ranks[0].is_alive():
        run.signal(signal.SIGINT, 0)
        time.sleep(0.01)
    run.signal(signal.SIGKILL, 1)
    assert run.wait() == [130, -9]


# ---- lost ranks ----


@pytest.mark.parametrize("victim, backend", [(0, "shm"), (3, "gloo")])
def test_killed_rank_ends_the_others_at_once_with_a_line(victim, backend, tmp_path, corpus_folder):
    argv = command(
        tmp_path / "run", corpus_folder, "--checkpoint_interval", "3", "--backend", backend,
        steps=100000,
    )  # fmt: skip
    run = Launch(4, tmp_path / "log", *argv)
    run.wait_for("step 00013/")
    run.signal(signal.SIGKILL, victim)
    codes = run.wait(20)  # far less than --timeout_s
    assert codes == [-9 if rank == victim else 1 for rank in range(4)]
    (line,) = run.lines("err")
    assert LOST in line and "--resume auto continues from" in line


def test_silent_rank_is_given_up_after_the_timeout(tmp_path, corpus_folder):
    argv = command(tmp_path / "run", corpus_folder, "--timeout_s", "2", steps=100000)
    run = Launch(4, tmp_path / "log", *argv)
    run.wait_for("step 00005/")
    run.signal(signal.SIGSTOP, 3)  # a machine that hangs, not a process that is gone
    for process in run.ranks[:3]:
        process.join(10)
    run.signal(signal.SIGKILL, 3)
    assert run.wait() == [1, 1, 1, -9]
    (line,) = [line for line in run.lines("err") if not line.startswith("[")]  # torch's warnings
    assert LOST in line and "--checkpoint_interval would have kept checkpoints" in line


def wait_two_seconds(rank):
    launch.START_S = 2


def never_start(rank):
    os._exit(0)


def test_rank_that_never_starts_ends_the_others(tmp_path, corpus_folder):
    special = patched(wait_two_seconds, of=[0]) | patched(never_start, of=[1])
    run = Launch(2, tmp_path / "log", *command(tmp_path / "run", corpus_folder), special=special)
    assert run.wait(20) == [1, 0]
    (line,) = [line for line in run.lines("err") if not line.startswith("[")]  # torch's warnings
    assert LOST in line and not (tmp_path / "run").exists()


# ---- crashes ----


def die_in(rank, name, count):
    """A function of checkpoint.py kills its process when it is called for the count-th time."""
    function, calls = getattr(checkpoint, name), []

    def deadly(*args, **options):
        calls.append(None)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    setattr(checkpoint, name, deadly)


CRASHES = {  # function, rank, call
    "before the vectors are written": ("write_vectors", 2, 2),
    "before the files are reported": ("checksum", 1, 2),
    "before the description": ("write_whole", 0, 2),
    "before the new name": ("sync_folder", 0, 3),
    "after the new name": ("sync_folder", 0, 4),
    "while the oldest is removed": ("remove", 0, 1),
}


@pytest.mark.parametrize("name, victim, count", CRASHES.values(), ids=CRASHES)
def test_crash_while_saving_leaves_the_last_complete_checkpoint(
    name, victim, count, tmp_path, corpus_folder, undisturbed
):
    argv = command(
        tmp_path / "run", corpus_folder, "--checkpoint_interval", "7", "--keep", "1",
        "--resume", "auto",
    )  # fmt: skip
    run = Launch(4, tmp_path / "log", *argv, special=patched(die_in, name, count, of=[victim]))
    codes = run.wait()
    assert codes[victim] == -9 and 0 not in codes
    complete = checkpoint.list_checkpoints(tmp_path / "run")
    assert complete
    for path in complete:
        checkpoint.verify(path, checkpoint.read(path))
    finish(4, tmp_path / "log", argv)
    assert_same(tmp_path / "run", undisturbed)
    assert not list((tmp_path / "run").glob("*.tmp"))


# More kills make a soak of it: KILLS=20 python -m pytest tests/test_launch.py -k kills
KILLS = int(os.environ.get("KILLS", 2))
STEPS = max(100, 30 * KILLS)


def survive(folder, meshes, *argv):
    """Run argv on one mesh after another and kill a random rank at a random moment, KILLS times;
    then let it finish. meshes: pairs of (world size, flags). Returns the number of kills."""
    dice, kills, store = random.Random(KILLS), 0, agent_store()
    while True:
        world_size, mesh = dice.choice(meshes)
        run = Launch(world_size, folder, *argv, *mesh, store=store)
        victim = dice.randrange(world_size)
        if kills < KILLS:
            run.wait_for("| loss ")
            time.sleep(dice.uniform(0, 0.5))
            kills += run.ranks[victim].is_alive()
            run.signal(signal.SIGKILL, victim)
            codes = run.wait(30)
        else:
            codes = run.wait(300)
        if codes == [0] * world_size:
            return kills
        assert codes[victim] == -9 and set(codes) - {-9} <= {1, 0}, (codes, run.lines("err"))
        assert codes.count(-9) == 1


def soak(tmp_path, corpus_folder, meshes, *argv):
    """(folder of a run with kills, folder of a run without them on the last mesh)."""
    argv = [*RUN, "--max_steps", str(STEPS), "--data", str(corpus_folder), *argv]
    saving = ["--checkpoint_interval", "5", "--resume", "auto", "--out_dir", str(tmp_path / "run")]
    assert survive(tmp_path / "log", meshes, *argv, *saving) >= 1
    world_size, mesh = meshes[-1]
    finish(world_size, tmp_path / "log", [*argv, *mesh, "--out_dir", str(tmp_path / "whole")])
    return tmp_path / "run", tmp_path / "whole"


def test_random_kills_cost_no_step_and_change_no_bit(tmp_path, corpus_folder):
    assert_same(*soak(tmp_path, corpus_folder, [(4, [])]))


def test_random_kills_and_other_shards_continue_the_trajectory(tmp_path, corpus_folder):
    """One or two shards, by chance, after each kill, with the same global batch. fp64: the order
    of sums differs. Runs without kills differ, too: by 1e-6 after 600 steps."""
    meshes = [(2 * n, ["--shards", str(n), "--batch_size", str(4 // n)]) for n in (1, 2)]
    run, whole = soak(tmp_path, corpus_folder, meshes, "--dtype", "fp64")
    (losses, _), (expected, _) = essence(run), essence(whole)
    assert [step for step, _ in losses] == [step for step, _ in expected]
    losses, expected = [loss for _, loss in losses], [loss for _, loss in expected]
    assert losses[:100] == pytest.approx(expected[:100], rel=1e-9)
    assert losses == pytest.approx(expected, rel=1e-4)


# ---- two runs, one folder; torchrun ----


def test_run_never_starts_beside_another_run_or_its_checkpoints(tmp_path, corpus_folder):
    argv = command(tmp_path / "run", corpus_folder, "--checkpoint_interval", "3", steps=100000)
    store = agent_store()
    first = Launch(2, tmp_path / "log", *argv, store=store)
    first.wait_for("step 00001/")
    for resume in ("", "auto"):
        second = Launch(2, tmp_path / "log-2", *argv, "--resume", resume)
        assert second.wait(20) == [2, 2] and second.lines("out") == []
        (line,) = second.lines("err")
        assert "another run is writing there" in line
    first.wait_for("saved ")
    first.signal(signal.SIGKILL)
    first.wait()
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    again = Launch(2, tmp_path / "log", *argv, store=store)  # as under --max-restarts
    assert again.wait(20) == [2, 2]
    (line,) = again.lines("err")
    assert "has checkpoints of an earlier run" in line
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    # The lock has gone with the killed process.
    last = checkpoint.list_checkpoints(tmp_path / "run")[-1]
    steps = int(last.name.split("-")[1]) + 3
    finish(2, tmp_path / "log", [*argv, "--resume", "auto", "--max_steps", str(steps)])


def test_torchrun_restarts_from_the_last_checkpoint(tmp_path, corpus_folder):
    """The whole chain, once: torchrun --max-restarts, kill -9 of one rank, --resume auto."""
    argv = command(tmp_path / "run", corpus_folder, "--shards", "1", steps=20)
    more = ["--checkpoint_interval", "5", "--random_lag", "1:0.02", "--resume", "auto"]
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "--max-restarts", "1", "train.py",
    ]  # fmt: skip
    agent = subprocess.Popen(
        [*launcher, *argv, *more], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    for line in agent.stdout:
        if line.startswith("step 00012"):
            pgrep = ["pgrep", "-P", str(agent.pid)]
            children = subprocess.run(pgrep, capture_output=True, text=True).stdout.split()
            os.kill(int(children[-1]), signal.SIGKILL)
            break
    printed, _ = agent.communicate(timeout=90)
    assert agent.returncode == 0 and "resume  " in printed
    argv[argv.index(str(tmp_path / "run"))] = str(tmp_path / "whole")
    finish(2, tmp_path / "log", argv)
    assert_same(tmp_path / "run", tmp_path / "whole")


# ---- full disks, divergence ----


def limit_files(rank, most_bytes):
    """A file can have so many bytes: writing more fails as on a full disk."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


FULL = {  # the largest file there is room for -> what cannot be written
    "record": (3_000, ["--log_interval", "1"], "metrics.jsonl could not be written: File too"),
    "model": (20_000, [], "model.pt could not be written"),
    "checkpoint": (40_000, ["--checkpoint_interval", "10"], "no checkpoint could be written to"),
}


@pytest.mark.parametrize("most_bytes, more, message", FULL.values(), ids=FULL)
def test_full_disk_ends_the_run_with_one_line_and_nothing_half_written(
    most_bytes, more, message, tmp_path, corpus_folder
):
    argv = command(tmp_path / "run", corpus_folder, "--n_embd", "8", "--log_interval", "20", *more)
    run = Launch(4, tmp_path / "log", *argv, special=patched(limit_files, most_bytes))
    codes = run.wait(30)
    # The other ranks have finished when rank 0 writes the model.
    assert codes[0] == 2 and set(codes) <= {0, 1, 2}
    (line,) = run.lines("err")
    assert message in line
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"metrics.jsonl"}


def block_second_checkpoint(rank, obstacle):
    """There is a file where the second checkpoint's folder has to be."""
    clean_up = checkpoint.clean_up

    def clean_up_and_block(folder):
        clean_up(folder)
        open(obstacle, "w").close()

    checkpoint.clean_up = clean_up_and_block


def test_failed_save_leaves_the_one_before(tmp_path, corpus_folder, undisturbed):
    argv = command(
        tmp_path / "run", corpus_folder, "--checkpoint_interval", "10", "--resume", "auto"
    )
    obstacle = tmp_path / "run" / "checkpoint-00000023.tmp"  # round ends: 3, 7, 11, 15, ...
    special = patched(block_second_checkpoint, str(obstacle), of=[0])
    run = Launch(4, tmp_path / "log", *argv, special=special)
    assert run.wait() == [2] * 4
    (line,) = run.lines("err")
    assert "no checkpoint could be written" in line
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path / "run")]
    assert names == ["checkpoint-00000011"]
    obstacle.unlink(missing_ok=True)
    finish(4, tmp_path / "log", argv)
    assert_same(tmp_path / "run", undisturbed)


def spoil_losses(rank, step):
    """The loss of rank 2 is NaN from a step on."""
    import shard

    forward, count = shard.ShardedModel.forward, []

    def sick_forward(self, *args, **options):
        count.append(None)
        sick = len(count) > step and rank == 2
        return forward(self, *args, **options) * (float("nan") if sick else 1)

    shard.ShardedModel.forward = sick_forward


@pytest.mark.parametrize(
    "method, saved", [("minibatch", range(1, 15)), ("diloco", [1, 2, 3, 7, 11])]
)
def test_loss_that_is_not_finite_stops_methods_that_cannot_mend_it(
    method, saved, tmp_path, corpus_folder
):
    argv = command(
        tmp_path / "run", corpus_folder, "--checkpoint_interval", "1", "--keep", "100",
        "--method", method,
    )  # fmt: skip
    run = Launch(4, tmp_path / "log", *argv, special=patched(spoil_losses, 14))
    codes = run.wait(20)
    assert 2 in codes and set(codes) <= {1, 2}
    (line,) = run.lines("err")
    assert "diverged at step 15" in line and "loss nan" in line and "lower --lr" in line
    steps = [int(path.name[-8:]) for path in checkpoint.list_checkpoints(tmp_path / "run")]
    assert steps == list(saved)
