"""Real processes, really killed and stopped: they leave in bounded time with one line, and a
resumed run continues as if nothing had happened."""

import json
import os
import random
import resource
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

# More kills make a soak of it: KILLS=20 python -m pytest tests/test_launch.py -k kills
KILLS = int(os.environ.get("KILLS", 2))
RUN = [*TINY, *"--dtype fp32 --method edit --shards 2 --tau 4 --sync_warmup_steps 3".split()]


def command(folder, corpus_folder, more="", steps=20):
    place = ["--data", str(corpus_folder), "--out_dir", str(folder)]
    return [*RUN, *place, "--max_steps", str(steps), *more.split()]


def record(folder):
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


def assert_same(*folders):
    """Two runs have the same losses, with every step once, and the same model."""
    rows = [[row for row in record(folder) if row["event"] == "step"] for folder in folders]
    names = ("step", "loss", "shard_bytes")
    ours, expected = [[[row[name] for name in names] for row in run] for run in rows]
    assert ours == expected
    model, other = [torch.load(folder / "model.pt")["model"] for folder in folders]
    assert all(torch.equal(model[name], value) for name, value in other.items())


def finish(run):
    """Wait for the end, without a line of error."""
    assert (run.wait(300), run.lines("err")) == ([0] * len(run.ranks), [])


@pytest.fixture
def start(tmp_path, corpus_folder):
    """start(flags, ...): a training on real ranks. Its folder is out."""

    def start(more="", steps=20, ranks=4, out="run", **options):
        argv = command(tmp_path / out, corpus_folder, more, steps)
        return Launch(ranks, tmp_path / f"log-{len(list(tmp_path.iterdir()))}", *argv, **options)

    return start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus_folder):
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(Launch(4, folder / "log", *command(folder / "run", corpus_folder)))
    return folder / "run"


def run_patched(argv, rank, world_size, port, folder, patch, *more):
    """ranks._command after patch(rank, *more)."""
    patch(rank, *more)
    ranks._command(argv, rank, world_size, port, folder)


def patched(patch, *more, of=range(4)):
    return {rank: (run_patched, patch, *more) for rank in of}


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
        ("edit", signal.SIGTERM, [0, 1, 2, 3], 1),
        ("noloco", signal.SIGTERM, [1], 0),
    ],
)
def test_signal_stops_all_ranks_at_one_round_end(method, number, to, lag, start, tmp_path):
    """One signalled rank is enough. In mini-batch every step is a round end: nothing is lost. An
    overlapping method ends its round, here of 4 steps."""
    tau = 4 if method == "noloco" else 1000
    more = f"--method {method} --tau {tau} --save_on_exit --resume auto"
    # Step 12 is in the middle of a round: a signal about a round end could stop the run there.
    run = start(more, special=patched(wait_for_signal, 12, lag, *to))
    run.wait_for("step 00012/")
    run.signal(number, *to)
    assert run.wait() == [128 + number] * 4, run.lines("err")
    (line,) = run.lines("err")
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    at = 15 if method == "noloco" else 13 + lag
    assert f"stopped by {number.name} after step {at}; --resume auto continues from {path}" in line
    assert path.name == f"checkpoint-{at:08d}" and not (tmp_path / "run" / "model.pt").exists()
    finish(start(more))
    if method != "edit":
        finish(start(more, out="whole"))
        assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("method", ["edit", "a_edit"])
def test_signal_to_a_slow_replica_stops_the_fast_one(method, start, tmp_path):
    """Replicas take different numbers of steps in the last round. An evaluation that is due for one
    of them alone must not separate them."""
    more = f"--tau 5000 --save_on_exit --method {method} --tau_time_s 1000 --eval_interval 20"
    run = start(more, steps=5000, special=patched(wait_for_signal, 9, 0, 3))
    run.wait_for("step 00030/")
    run.signal(signal.SIGTERM, 3)
    assert run.wait(20) == [143] * 4, run.lines("err")
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    state = checkpoint.read(path)
    (sync,) = [row for row in record(tmp_path / "run") if row["event"] == "sync"]
    fast, slow = sync["steps"]
    assert slow <= 10 - 3 and fast >= 30 - 3
    counted = [replica["steps"] for replica in state["replicas"]]
    assert counted == [3 + fast, 3 + (fast if method == "edit" else slow)]
    assert state["progress"] == 3 + (fast if method == "edit" else (fast + slow) / 2)
    finish(start(f"{more} --resume auto", steps=int(state["progress"]) + 5))


def wait_in_final_evaluation(rank):
    """Print a line when the training is over, and wait for a signal."""
    finish = Run.finish

    def wait_and_finish(self):
        print("training is over", flush=True)
        while rank == 0 and not self.stop.signal:
            time.sleep(0.001)
        finish(self)

    Run.finish = wait_and_finish


def test_signal_after_the_training_leaves_the_model(start, tmp_path):
    run = start("--save_on_exit", steps=8, ranks=2, special=patched(wait_in_final_evaluation))
    run.wait_for("training is over")
    run.signal(signal.SIGTERM)
    assert (run.wait(), run.lines("err")) == ([0] * 2, [])
    assert (tmp_path / "run" / "model.pt").exists()
    assert record(tmp_path / "run")[-1]["event"] == "end"


def test_first_signal_kills_without_save_on_exit_and_the_second_one_with_it(start):
    run = start(steps=10**5, ranks=2)
    run.wait_for("step 00003/")
    run.signal(signal.SIGINT)
    assert run.wait(10) == [-signal.SIGINT] * 2 and run.lines("err") == []
    run = start("--save_on_exit --timeout_s 60", steps=10**5, ranks=2)
    run.wait_for("step 00003/")
    run.signal(signal.SIGSTOP, 1)  # so rank 0 waits in a collective before the round end
    run.signal(signal.SIGINT, 0)
    time.sleep(0.2)
    assert run.ranks[0].is_alive()
    while run.ranks[0].is_alive():
        run.signal(signal.SIGINT, 0)
        time.sleep(0.01)
    run.signal(signal.SIGKILL, 1)
    assert run.wait() == [-signal.SIGINT, -9]


def die_or_wait(rank):
    launch.START_S = 2
    if rank == 3:
        os._exit(9)


@pytest.mark.parametrize(
    "victim, number, more, hint",
    [
        (0, signal.SIGKILL, "--backend shm --checkpoint_interval 3", "--resume auto continues"),
        (3, signal.SIGKILL, "--backend gloo --checkpoint_interval 3", "--resume auto continues"),
        # a machine that hangs, not a process that is gone
        (3, signal.SIGSTOP, "--timeout_s 2", "is silent for 2 s"),
        (3, None, "", "hello/3"),  # the key that it has not set
    ],
)
def test_lost_rank_ends_the_others_with_a_line(victim, number, more, hint, start):
    """A killed rank at once, a silent one after --timeout_s, a missing one after START_S."""
    run = start(more, steps=10**5, special={} if number else patched(die_or_wait))
    if number:
        run.wait_for("step 00013/")
        run.signal(number, victim)
    for process in (run.ranks[rank] for rank in range(4) if rank != victim):
        process.join(20)
    run.signal(signal.SIGKILL, victim)
    lost = -9 if number else 9
    assert run.wait(1) == [lost if rank == victim else 1 for rank in range(4)]
    (line,) = [line for line in run.lines("err") if not line.startswith("[")]  # torch's warnings
    assert "lost contact with another rank" in line and hint in line


def break_in(rank, name, count, error):
    """The count-th call of a function kills its process or raises the error."""
    module, name = name.split(".")
    function, calls = getattr(sys.modules[module], name), []

    def deadly(*args, **options):
        calls.append(None)
        if len(calls) != count:
            return function(*args, **options)
        if error:
            raise error
        if name == "rmtree":  # it has removed one file
            os.remove(f"{args[0]}/state.json")
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(sys.modules[module], name, deadly)


CRASHES = {  # function, rank, call, error
    "before the vectors are written": ("torch.save", 2, 2, None),
    "before the new name": ("os.rename", 0, 2, None),
    "before the oldest is removed": ("os.rename", 0, 3, None),
    "while the oldest is removed": ("shutil.rmtree", 0, 1, None),
    "a disk full of vectors": ("torch.save", 2, 2, OSError(28, "No space left")),
    "no room for the name": ("os.rename", 0, 2, OSError(28, "No space left")),
}


@pytest.mark.parametrize("name, victim, count, error", CRASHES.values(), ids=CRASHES)
def test_crash_leaves_a_checkpoint(name, victim, count, error, start, tmp_path, undisturbed):
    more, store = "--checkpoint_interval 7 --keep 1 --resume auto", agent_store()
    run = start(more, special=patched(break_in, name, count, error, of=[victim]), store=store)
    codes = run.wait()
    assert codes[victim] == (2 if error else -9) and 0 not in codes
    if error:
        (line,) = run.lines("err")
        assert "no checkpoint could be written" in line
    complete = checkpoint.list_checkpoints(tmp_path / "run")
    assert complete
    for path in complete:
        checkpoint.verify(path, checkpoint.read(path))
    finish(start(more, store=store))  # as under --max-restarts
    assert_same(tmp_path / "run", undisturbed)
    assert not list((tmp_path / "run").glob("*.tmp"))


def limit_files(rank, most_bytes):
    """A file can have so many bytes: writing more fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def spoil_losses(rank, step):
    """The loss of rank 2 is NaN after a step."""
    forward, count = shard.ShardedModel.forward, []

    def sick_forward(self, *args, **options):
        count.append(None)
        sick = len(count) > step and rank == 2
        return forward(self, *args, **options) * (float("nan") if sick else 1)

    shard.ShardedModel.forward = sick_forward


@pytest.mark.parametrize(
    "patch, number, more, message, saved",
    [
        (limit_files, 3_000, "--checkpoint_interval 0", "metrics.jsonl could not be written", []),
        (limit_files, 20_000, "--checkpoint_interval 0 --log_interval 20", "model.pt could", []),
        (limit_files, 40_000, "--checkpoint_interval 10", "no checkpoint could be written", []),
        (spoil_losses, 14, "--method minibatch", "diverged at step 15", ["checkpoint-00000014"]),
        (spoil_losses, 14, "--method diloco", "diverged at step 15", ["checkpoint-00000011"]),
    ],
)
def test_full_disk_or_divergence_ends_a_run(patch, number, more, message, saved, start, tmp_path):
    more = f"--n_embd 8 --checkpoint_interval 1 --keep 1 {more}"
    run = start(more, special=patched(patch, number))
    codes = run.wait(30)
    # The other ranks have finished when rank 0 writes the model.
    assert 2 in codes and set(codes) <= {0, 1, 2}
    (line,) = run.lines("err")
    assert message in line
    left = {path.name for path in (tmp_path / "run").iterdir() if path.suffix != ".tmp"}
    assert left == {"metrics.jsonl", *saved}


def test_random_kills_cost_no_step_and_change_no_bit(start, tmp_path):
    steps, dice, store = max(60, 30 * KILLS), random.Random(KILLS), agent_store()
    kills, codes = 0, [1]
    while set(codes) != {0}:
        run = start("--checkpoint_interval 5 --resume auto", steps, store=store)
        victim = dice.randrange(4)
        if kills < KILLS:
            run.wait_for("| loss ")
            time.sleep(dice.uniform(0, 0.5))
            kills += run.ranks[victim].is_alive()
            run.signal(signal.SIGKILL, victim)
        codes = run.wait(300)
        ended = codes == [0] * 4 or codes[victim] == -9 and codes.count(-9) == 1
        assert ended and set(codes) <= {-9, 0, 1}, (codes, run.lines("err"))
    assert kills >= 1
    finish(start(steps=steps, out="whole"))
    assert_same(tmp_path / "run", tmp_path / "whole")


def assert_refused(run, message):
    assert run.wait(20) == [2, 2] and run.lines("out") == []
    (line,) = run.lines("err")
    assert message in line


def test_run_never_starts_beside_another_run_or_its_checkpoints(start, tmp_path):
    more, store = "--checkpoint_interval 3 --resume", agent_store()
    first = start(f"{more}=", steps=10**5, ranks=2, store=store)
    first.wait_for("step 00001/")
    for resume in ("", "auto"):
        assert_refused(start(f"{more}={resume}", ranks=2), "another run is writing there")
    first.wait_for("saved ")
    first.signal(signal.SIGKILL)
    first.wait()
    again = start(f"{more}=", ranks=2, store=store)  # as under --max-restarts
    assert_refused(again, "has checkpoints of an earlier run")
    # The lock has gone with the killed process.
    last = checkpoint.list_checkpoints(tmp_path / "run")[-1]
    finish(start(f"{more}=auto", steps=int(last.name.split("-")[1]) + 3, ranks=2))


def test_torchrun_on_two_nodes_restarts_from_the_last_checkpoint(start, tmp_path, corpus_folder):
    """Two agents with a rank each, --max-restarts, kill -9 of one rank, --resume auto: as one node
    trains without a kill. Data and groups go by global rank."""
    more = "--checkpoint_interval 5 --random_lag 1:0.02 --resume auto"
    store = agent_store()
    launcher = "-m torch.distributed.run --nnodes 2 --nproc_per_node 1 --max-restarts 1 "
    launcher += f"--rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{store.port} --local_addr 127.0.0.1"
    argv = [*launcher.split(), "train.py", *command(tmp_path / "run", corpus_folder, more)]
    with open(tmp_path / "printed", "w") as out:
        files = dict(stdout=out, stderr=subprocess.DEVNULL)
        agents = [subprocess.Popen([sys.executable, *argv], cwd=ROOT, **files) for _ in "ab"]
    while "step 00012/" not in (tmp_path / "printed").read_text():
        assert [agent.poll() for agent in agents] == [None] * 2
        time.sleep(0.01)
    pgrep = ["pgrep", "-P", str(agents[0].pid)]
    children = subprocess.run(pgrep, capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert [agent.wait(90) for agent in agents] == [0, 0]
    assert "resume  " in (tmp_path / "printed").read_text()
    finish(start(ranks=2, out="whole"))
    assert_same(tmp_path / "run", tmp_path / "whole")
