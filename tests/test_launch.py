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
import shard
from plumbing import checkpoint, launch
from plumbing.run import Run
from ranks import ROOT, TINY, Launch, agent_store

RUN = [*TINY, *"--dtype fp32 --method edit --shards 2 --tau 4 --sync_warmup_steps 3".split()]
LOST = "lost contact with another rank"


def command(folder, corpus_folder, more="", steps=28):
    place = ["--data", str(corpus_folder), "--out_dir", str(folder)]
    return [*RUN, *place, "--max_steps", str(steps), *more.split()]


def record(folder):
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


def essence(folder):
    """What two equal runs have in common: steps, losses, the model."""
    rows = [row for row in record(folder) if row["event"] == "step"]
    model = torch.load(folder / "model.pt", weights_only=True)["model"]
    return [row["step"] for row in rows], [row["loss"] for row in rows], model


def assert_same(folder, other):
    (steps, losses, model), (all_steps, expected, expected_model) = map(essence, (folder, other))
    assert (steps, losses) == (all_steps, expected)  # every step once, none missing
    assert all(torch.equal(model[name], value) for name, value in expected_model.items())


def finish(world_size, log, argv):
    """Run to the end, without a line of error."""
    run = Launch(world_size, log, *argv)
    assert (run.wait(), run.lines("err")) == ([0] * world_size, [])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus_folder):
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(4, folder / "log", command(folder / "run", corpus_folder))
    return folder / "run"


def run_patched(argv, rank, world_size, port, folder, patch, *more):
    """ranks._command after patch(rank, *more)."""
    patch(rank, *more)
    ranks._command(argv, rank, world_size, port, folder)


def patched(patch, *more, of=range(4)):
    return {rank: (run_patched, patch, *more) for rank in of}


# ---- stopping ----


def wait_for_signal(rank, step, lag, *waiting):
    """These ranks take no step after this one until they have got a signal. lag: the host reads
    metrics so many steps late (on CUDA 1)."""
    make, vote = shard.ShardedModel.__init__, Run.vote

    def make_late(self, *args, **options):
        make(self, *args, **options)
        self.metrics_lag = lag
        self.metrics = type(self.metrics)(maxlen=1 + lag)

    def wait_and_vote(self):
        while rank in waiting and self.method.steps == step and not self.stop.signal:
            time.sleep(0.001)
        return vote(self)

    shard.ShardedModel.__init__, Run.vote = make_late, wait_and_vote


@pytest.mark.parametrize(
    "method, number, to, lag",
    [
        ("minibatch", signal.SIGINT, [2], 1),
        ("edit", signal.SIGTERM, [0, 1, 2, 3], 0),
        ("diloco", signal.SIGINT, [0, 1, 2, 3], 1),
    ],
)
def test_signal_with_save_on_exit_stops_all_at_one_round_end(
    method, number, to, lag, tmp_path, corpus_folder
):
    """One signalled rank is enough. In mini-batch every step is a round end: nothing is lost."""
    more = f"--method {method} --tau 1000"
    argv = command(tmp_path / "run", corpus_folder, f"{more} --save_on_exit --resume auto")
    run = Launch(4, tmp_path / "log", *argv, special=patched(wait_for_signal, 19, lag, *to))
    run.wait_for("step 00019/")
    run.signal(number, *to)
    assert run.wait() == [128 + number] * 4, run.lines("err")
    (line,) = run.lines("err")
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    at = 20 + lag
    assert f"stopped by {number.name} after step {at}; --resume auto continues from {path}" in line
    assert path.name == f"checkpoint-{at:08d}" and not (tmp_path / "run" / "model.pt").exists()
    assert [replica["steps"] for replica in checkpoint.read(path)["replicas"]][-1] == at
    finish(4, tmp_path / "log", argv)
    if method == "minibatch":
        finish(4, tmp_path / "log", command(tmp_path / "whole", corpus_folder, more))
        assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("method", ["edit", "a_edit"])
def test_signal_to_a_slow_replica_stops_the_fast_one(method, tmp_path, corpus_folder):
    """Replicas take different numbers of steps in the last round. An evaluation that is due for one
    of them alone must not separate them."""
    more = f"--tau 5000 --save_on_exit --method {method} --tau_time_s 1000 --eval_interval 20"
    argv = command(tmp_path / "run", corpus_folder, more, steps=5000)
    run = Launch(4, tmp_path / "log", *argv, special=patched(wait_for_signal, 9, 0, 3))
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


def wait_in_final_evaluation(rank):
    """Print a line when the training is over, and wait for a signal."""
    finish = Run.finish

    def wait_and_finish(self):
        print("training is over", flush=True)
        while rank == 0 and not self.stop.signal:
            time.sleep(0.001)
        finish(self)

    Run.finish = wait_and_finish


def test_signal_after_the_training_leaves_the_model(tmp_path, corpus_folder):
    argv = command(tmp_path / "run", corpus_folder, "--save_on_exit", steps=8)
    run = Launch(2, tmp_path / "log", *argv, special=patched(wait_in_final_evaluation))
    run.wait_for("training is over")
    run.signal(signal.SIGTERM)
    assert (run.wait(), run.lines("err")) == ([0] * 2, [])
    assert (tmp_path / "run" / "model.pt").exists()
    assert record(tmp_path / "run")[-1]["event"] == "end"


def test_first_signal_kills_without_save_on_exit_and_the_second_one_with_it(
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


# ---- lost ranks, bad disks, divergence ----


@pytest.mark.parametrize(
    "victim, number, more, hint",
    [
        (0, signal.SIGKILL, "--backend shm --checkpoint_interval 3", "--resume auto continues"),
        (3, signal.SIGKILL, "--backend gloo --checkpoint_interval 3", "--resume auto continues"),
        # a machine that hangs, not a process that is gone
        (3, signal.SIGSTOP, "--timeout_s 2", "--checkpoint_interval would have kept"),
    ],
)
def test_lost_rank_ends_the_others_with_a_line(
    victim, number, more, hint, tmp_path, corpus_folder
):
    """A killed one at once, a silent one after --timeout_s."""
    run = Launch(4, tmp_path / "log", *command(tmp_path / "run", corpus_folder, more, steps=10**5))
    run.wait_for("step 00013/")
    run.signal(number, victim)
    for process in (run.ranks[rank] for rank in range(4) if rank != victim):
        process.join(20)
    run.signal(signal.SIGKILL, victim)
    assert run.wait(1) == [-9 if rank == victim else 1 for rank in range(4)]
    (line,) = [line for line in run.lines("err") if not line.startswith("[")]  # torch's warnings
    assert LOST in line and hint in line


def never_start(rank):
    launch.START_S = 2
    if rank == 1:
        os._exit(0)


def test_rank_that_never_starts_ends_the_others(tmp_path, corpus_folder):
    argv = command(tmp_path / "run", corpus_folder)
    run = Launch(2, tmp_path / "log", *argv, special=patched(never_start))
    assert run.wait(20) == [1, 0]
    (line,) = [line for line in run.lines("err") if not line.startswith("[")]  # torch's warnings
    assert LOST in line and not (tmp_path / "run").exists()


def break_in(rank, name, count, error):
    """The count-th call of a function of checkpoint.py kills its process or raises the error."""
    function, calls = getattr(checkpoint, name), []

    def deadly(*args, **options):
        calls.append(None)
        if len(calls) == count and error:
            raise error
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    setattr(checkpoint, name, deadly)


CRASHES = {  # function, rank, call, error
    "before the vectors are written": ("write_vectors", 2, 2, None),
    "before the files are reported": ("checksum", 1, 2, None),
    "before the description": ("write_whole", 0, 2, None),
    "before the new name": ("sync_folder", 0, 3, None),
    "after the new name": ("sync_folder", 0, 4, None),
    "while the oldest is removed": ("remove", 0, 1, None),
    "a disk full of vectors": ("checksum", 2, 2, OSError(28, "No space left")),
    "no room for the description": ("write_whole", 0, 2, OSError(28, "No space left")),
}


@pytest.mark.parametrize("name, victim, count, error", CRASHES.values(), ids=CRASHES)
def test_crash_while_saving_leaves_the_last_complete_checkpoint(
    name, victim, count, error, tmp_path, corpus_folder, undisturbed
):
    more = "--checkpoint_interval 7 --keep 1 --resume auto"
    argv = command(tmp_path / "run", corpus_folder, more)
    special = patched(break_in, name, count, error, of=[victim])
    run = Launch(4, tmp_path / "log", *argv, special=special)
    codes = run.wait()
    if error:
        (line,) = run.lines("err")
        assert codes == [2] * 4 and "no checkpoint could be written" in line
        assert not list((tmp_path / "run").glob("*.tmp"))
    assert codes[victim] == (2 if error else -9) and 0 not in codes
    complete = checkpoint.list_checkpoints(tmp_path / "run")
    assert complete
    for path in complete:
        checkpoint.verify(path, checkpoint.read(path))
    finish(4, tmp_path / "log", argv)
    assert_same(tmp_path / "run", undisturbed)
    assert not list((tmp_path / "run").glob("*.tmp"))


def limit_files(rank, most_bytes):
    """A file can have so many bytes: writing more fails as on a full disk."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


@pytest.mark.parametrize(
    "most_bytes, more, message",
    [
        (3_000, "--log_interval 1", "metrics.jsonl could not be written: File too"),
        (20_000, "--log_interval 20", "model.pt could not be written"),
        (40_000, "--checkpoint_interval 10", "no checkpoint could be written to"),
    ],
)
def test_full_disk_ends_the_run_with_one_line_and_nothing_half_written(
    most_bytes, more, message, tmp_path, corpus_folder
):
    argv = command(tmp_path / "run", corpus_folder, f"--n_embd 8 {more}")
    run = Launch(4, tmp_path / "log", *argv, special=patched(limit_files, most_bytes))
    codes = run.wait(30)
    # The other ranks have finished when rank 0 writes the model.
    assert codes[0] == 2 and set(codes) <= {0, 1, 2}
    (line,) = run.lines("err")
    assert message in line
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"metrics.jsonl"}


def spoil_losses(rank, step):
    """The loss of rank 2 is NaN after a step."""
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
    more = f"--checkpoint_interval 1 --keep 100 --method {method}"
    argv = command(tmp_path / "run", corpus_folder, more)
    run = Launch(4, tmp_path / "log", *argv, special=patched(spoil_losses, 14))
    codes = run.wait(20)
    assert 2 in codes and set(codes) <= {1, 2}
    (line,) = run.lines("err")
    assert "diverged at step 15" in line and "loss nan" in line and "lower --lr" in line
    steps = [int(path.name[-8:]) for path in checkpoint.list_checkpoints(tmp_path / "run")]
    assert steps == list(saved)


# ---- restarts ----

# More kills make a soak of it: KILLS=20 python -m pytest tests/test_launch.py -k kills
KILLS = int(os.environ.get("KILLS", 2))


@pytest.mark.parametrize(
    "dtype, meshes", [("fp32", ["--shards 2"]), ("fp64", ["--shards 1", "--batch_size 1"])]
)
def test_random_kills_cost_no_step_and_change_no_bit(dtype, meshes, tmp_path, corpus_folder):
    """fp32: one mesh. fp64: by chance one or two shards, with the same global batch, so the order
    of sums differs. Runs without kills differ, too: by 1e-6 after 600 steps."""
    steps, dice, kills, store = max(100, 30 * KILLS), random.Random(KILLS), 0, agent_store()
    saving = "--checkpoint_interval 5 --resume auto"
    codes = []
    while set(codes) != {0}:
        mesh = dice.choice(meshes)
        world_size, victim = (2 if mesh == "--shards 1" else 4), dice.randrange(2)
        more = f"{saving} --dtype {dtype} {mesh}"
        argv = command(tmp_path / "run", corpus_folder, more, steps)
        run = Launch(world_size, tmp_path / "log", *argv, store=store)
        if kills < KILLS:
            run.wait_for("| loss ")
            time.sleep(dice.uniform(0, 0.5))
            kills += run.ranks[victim].is_alive()
            run.signal(signal.SIGKILL, victim)
        codes = run.wait(300)
        others = set(codes[:victim] + codes[victim + 1 :])
        assert codes[victim] in (0, -9) and others <= {0, 1}, (codes, run.lines("err"))
    assert kills >= 1
    more = f"--dtype {dtype} {meshes[-1]}"
    finish(4, tmp_path / "log", command(tmp_path / "whole", corpus_folder, more, steps))
    if dtype == "fp32":
        return assert_same(tmp_path / "run", tmp_path / "whole")
    (found, losses, _), (steps, expected, _) = map(essence, (tmp_path / "run", tmp_path / "whole"))
    assert found == steps and losses[:100] == pytest.approx(expected[:100], rel=1e-9)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_run_never_starts_beside_another_run_or_its_checkpoints(tmp_path, corpus_folder):
    argv = command(tmp_path / "run", corpus_folder, "--checkpoint_interval 3", steps=100000)
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
    again = Launch(2, tmp_path / "log", *argv, store=store)  # as under --max-restarts
    assert again.wait(20) == [2, 2]
    (line,) = again.lines("err")
    assert "has checkpoints of an earlier run" in line
    # The lock has gone with the killed process.
    last = checkpoint.list_checkpoints(tmp_path / "run")[-1]
    steps = int(last.name.split("-")[1]) + 3
    finish(2, tmp_path / "log", [*argv, "--resume", "auto", "--max_steps", str(steps)])


def test_torchrun_restarts_from_the_last_checkpoint(tmp_path, corpus_folder):
    """The whole chain, once: torchrun --max-restarts, kill -9 of one rank, --resume auto."""
    saving = "--checkpoint_interval 5 --random_lag 1:0.02 --resume auto"
    argv = command(tmp_path / "run", corpus_folder, f"--shards 1 {saving}", steps=20)
    launcher = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 1 train.py"
    agent = subprocess.Popen(
        [sys.executable, *launcher.split(), *argv], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for line in agent.stdout:
        if line.startswith("step 00012"):
            pgrep = ["pgrep", "-P", str(agent.pid)]
            children = subprocess.run(pgrep, capture_output=True, text=True).stdout.split()
            os.kill(int(children[-1]), signal.SIGKILL)
            break
    printed, _ = agent.communicate(timeout=90)
    assert agent.returncode == 0 and "resume  " in printed
    finish(2, tmp_path / "log", command(tmp_path / "whole", corpus_folder, "--shards 1", steps=20))
    assert_same(tmp_path / "run", tmp_path / "whole")
