"""Real processes, really killed and stopped: they leave in bounded time with one line each, and a
resumed run continues as if nothing had happened."""

import functools
import itertools
import json
import os
import pty
import random
import resource
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import pytest
import torch

import config
import data
import ranks
import shard
import train
from plumbing import checkpoint, launch
from ranks import ROOT, TINY, Launch, agent_store

# More kills make a soak of it: KILLS=20 python -m pytest tests/test_launch.py -k kills
KILLS = int(os.environ.get("KILLS", 2))
RUN = [*TINY, *"--dtype fp32 --method edit --shards 2 --eval_interval 6".split()]
ROUNDS = {"minibatch": "", "a_edit": "--sync_warmup_steps 3"}
LOST = "error: lost contact with another rank ("


def command(folder, corpus_folder, more="", steps=20):
    place = ["--data", str(corpus_folder), "--out_dir", str(folder)]
    words = more.split()
    method = words[words.index("--method") + 1] if "--method" in words else "edit"
    rounds = ROUNDS.get(method, "--tau 4 --sync_warmup_steps 3").split()
    return [*RUN, *rounds, *place, "--max_steps", str(steps), *words]


def assert_same(*folders):
    """Two runs have the same losses, with every step once, and the same model."""
    records = [map(json.loads, open(folder / "metrics.jsonl")) for folder in folders]
    names = ("event", "step", "loss", "shard_bytes")
    ours, expected = [
        [[row.get(name) for name in names] for row in rows if row["event"] in ("step", "eval")]
        for rows in records
    ]
    assert ours == expected
    model, other = [torch.load(folder / "model.pt")["model"] for folder in folders]
    assert all(torch.equal(model[name], value) for name, value in other.items())


def finish(run):
    """Wait for the end, without a line of error."""
    assert (run.wait(), run.lines("err")) == ([0] * len(run.ranks), [])


def errors(run) -> list:
    """One line of each rank, "" if it has printed none. Torch's warnings begin with a bracket."""
    paths = [run.folder / f"err-{rank}" for rank in range(len(run.ranks))]
    texts = [path.read_text() if path.exists() else "" for path in paths]
    lines = [[line for line in text.splitlines() if line[0] != "["] for text in texts]
    assert max(map(len, lines)) <= 1, lines
    return ["".join(each) for each in lines]


@pytest.fixture
def start(tmp_path, corpus_folder):
    """start(flags, ...): a training on real ranks. Its folder is out."""

    def start(more="", steps=20, ranks=4, out="run", **options):
        argv = command(tmp_path / out, corpus_folder, more, steps)
        return Launch(ranks, tmp_path / f"log-{len(list(tmp_path.iterdir()))}", *argv, **options)

    return start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus_folder):
    """undisturbed(more): the folder of a run that nothing disturbs."""

    @functools.cache
    def train_whole(more):
        folder = tmp_path_factory.mktemp("undisturbed")
        finish(Launch(4, folder / "log", *command(folder / "run", corpus_folder, more)))
        return folder / "run"

    return train_whole


def run_patched(argv, rank, world_size, port, folder, patch, *more):
    """ranks._command after patch(rank, *more)."""
    patch(rank, *more)
    ranks._command(argv, rank, world_size, port, folder)


def patched(patch, *more, of=range(4)):
    return {rank: (run_patched, patch, *more) for rank in of}


# ---- signals ----


def wait_for_signal(rank, step, lag, *waiting):
    """These ranks wait for a signal before this step. lag: the host reads metrics so many steps
    late (on CUDA 1)."""
    make = shard.ShardedModel.__init__
    enable = launch.StopRequest
    load_batch = data.Batches.train
    stops = []

    def make_late(self, *args, **options):
        make(self, *args, **options)
        self.metrics_lag, self.metrics = lag, deque(maxlen=1 + lag)

    def wait_and_load(batches, at, micro_step):
        while rank in waiting and at == step and not stops[0].signal:
            time.sleep(0.001)
        return load_batch(batches, at, micro_step)

    shard.ShardedModel.__init__, data.Batches.train = make_late, wait_and_load
    launch.StopRequest = lambda *args: stops.append(enable(*args)) or stops[0]


VIRTUAL = "--tau_time_s 4 --virtual_clock --slow_replica 1:2"  # rounds of 4 and 2 steps


@pytest.mark.parametrize(
    "method, number, to, lag, at",
    [
        # the request of step 13 is known one step late
        pytest.param("minibatch", signal.SIGINT, [2], 1, 14, marks=pytest.mark.slow),
        pytest.param("noloco", signal.SIGTERM, [0, 1, 2, 3], 0, 15, marks=pytest.mark.slow),
        (f"a_edit {VIRTUAL}", signal.SIGHUP, [1], 0, 15),  # a closed terminal
    ],
)
def test_signal_stops_all_ranks_at_the_next_round_end(
    method, number, to, lag, at, start, tmp_path, undisturbed
):
    """One signalled rank is enough. With minibatch every step is a round end. Nothing is lost."""
    more = f"--method {method} --save_on_exit --resume auto"
    run = start(more, special=patched(wait_for_signal, 12, lag, *to))
    run.wait_for("step 00012/")
    run.signal(number, *to)
    assert run.wait() == [128 + number] * 4, run.lines("err")
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    line = f"stopped by {number.name} after step {at}; --resume auto continues from {path}"
    assert (run.folder / "out-1").read_text() == ""  # rank 0 prints
    first, *others = errors(run)
    assert first == f"train.py: {line}" and not any("error" in other for other in others)
    assert path.name == f"checkpoint-{at:08d}" and not (tmp_path / "run" / "model.pt").exists()
    finish(start(more))
    assert_same(tmp_path / "run", undisturbed(f"--method {method}"))


def test_second_signal_kills(start):
    run = start("--save_on_exit --timeout_s 6000", steps=10**5, ranks=2)
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


ALONE = "--shards 1 --save_on_exit"


def print_to(argv, rank, world_size, port, folder, path):
    """ranks._command that prints to this file, pipe or terminal; "": to none."""
    os.setsid()
    output = os.open(path or os.devnull, os.O_RDWR)  # of a new session: its terminal
    write_to = ranks._write_to

    def write_there(folder, rank):
        write_to(folder, rank)
        if path:
            os.dup2(output, 1)
        else:
            os.close(1)
            sys.stdout = None  # as Python starts if it finds no descriptor 1

    ranks._write_to = write_there
    ranks._command(argv, rank, world_size, port, folder)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_lost_output_costs_no_step(number, start, tmp_path):
    """A closed terminal, and Ctrl-C in `train.py --save_on_exit | tee log`: the rank can no longer
    print, and it saves nevertheless."""
    if number == signal.SIGHUP:
        ours, theirs = pty.openpty()
        path = os.ttyname(theirs)
    else:
        path = str(tmp_path / "pipe")
        os.mkfifo(path)
        ours = theirs = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    run = start(ALONE, 10**5, ranks=1, special={0: (print_to, path)})
    printed = b""
    while b"step 00005/" not in printed:
        assert run.ranks[0].is_alive(), printed
        if select.select([ours], [], [], 1)[0]:
            printed += os.read(ours, 1000)
    for end in {theirs, ours}:
        os.close(end)
    if number == signal.SIGINT:
        run.signal(number)
    assert run.wait() == [128 + number], errors(run)
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    assert int(path.name.split("-")[1]) >= 5


@pytest.mark.parametrize("path, reason", [("/dev/full", "No space left"), ("", "it is closed")])
def test_run_without_output_ends_as_any_other(path, reason, start, tmp_path):
    run = start("--shards 1", steps=6, ranks=1, special={0: (print_to, path)})
    assert run.wait() == [0]
    assert f"note    standard output is lost: {reason}" in errors(run)[0]
    assert (tmp_path / "run" / "model.pt").exists()


def be_process_1(argv, rank, world_size, port, folder, path):
    """ranks._command as the first process of a container."""
    launch.LIBC.unshare(0x20000000)  # CLONE_NEWPID: for the next child
    child = os.fork()
    if child:
        Path(path).write_text(str(child))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    launch.signal_at_death_of_parent(signal.SIGKILL)
    assert os.getpid() == 1
    ranks._command(argv, rank, world_size, port, folder)
    os._exit(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_process_1_of_a_container(number, start, tmp_path):
    """Linux gives it no default actions. docker stop sends SIGTERM."""
    special = {0: (be_process_1, str(tmp_path / "pid"))}
    run = start("--shards 1", steps=10**6, ranks=1, special=special)
    run.wait_for("step 00003/")
    os.kill(int((tmp_path / "pid").read_text()), number)
    assert run.wait(60) == [128 + number]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
def test_second_signal_ends_process_1_at_once(start, tmp_path):
    """The round, and so the first one's checkpoint, would come after 10^6 steps."""
    special = {0: (be_process_1, str(tmp_path / "pid"))}
    more = f"{ALONE} --tau 1000000 --sync_warmup_steps 0"
    run = start(more, steps=10**6, ranks=1, special=special)
    run.wait_for("step 00003/")
    for _ in range(2):
        time.sleep(0.3)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
    assert run.wait(60) == [128 + signal.SIGINT]
    assert checkpoint.list_checkpoints(tmp_path / "run") == []


def ignore_hangups(rank):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does before it starts the program
    anew = runpy.run_path(f"{ROOT}/config.py", run_name="config")
    config.STOPS = launch.STOPS = anew["STOPS"]


def test_nohup_keeps_its_promise(start):
    run = start(ALONE, steps=100, ranks=1, special=patched(ignore_hangups, of=[0]))
    run.wait_for("step 00003/")
    run.signal(signal.SIGHUP)
    finish(run)


def be_torchrun(argv, rank, world_size, port, folder):
    """Of torchrun's agent: the parent of a rank, with threads. When it is killed they end one after
    the other, and for several of them Linux sends the rank a signal."""
    child = os.fork()
    if child:
        for _ in range(8):
            threading.Thread(target=count_for_ever).start()
        os.waitpid(child, 0)
        return
    os.environ["TORCHELASTIC_RUN_ID"] = "some run"
    ranks._command(argv, rank, world_size, port, folder)
    os._exit(0)


def count_for_ever():
    for _ in itertools.count():
        pass


def test_no_rank_outlives_its_torchrun(start, tmp_path):
    """It would keep the run's folder, and a GPU. With --save_on_exit it still saves."""
    folder = tmp_path / "run"
    run = start(ALONE, steps=20_000, ranks=1, special={0: (be_torchrun,)})
    run.wait_for("step 00003/")
    run.signal(signal.SIGKILL, 0)
    run.wait()
    deadline = time.monotonic() + 900
    while not errors(run)[0]:  # its last line
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = checkpoint.list_checkpoints(folder)
    assert int(found[0].name.split("-")[1]) < 20_000 and not (folder / "model.pt").exists()
    assert "stopped by SIGTERM" in errors(run)[0]


# ---- lost ranks, full disks, divergence ----


def die_or_wait(rank):
    launch.START_S = 1
    if rank == 3:
        os._exit(9)


@pytest.mark.parametrize("silent", [pytest.param(True, marks=pytest.mark.slow), False])
def test_silent_or_missing_rank_ends_the_others_with_a_line(silent, start):
    """A silent one after --timeout_s (a machine that hangs, not a process that is gone), a missing
    one after START_S. It has not set its key hello/3 (nor perhaps a slow one its own)."""
    run = start("--timeout_s 3", steps=10**5, special={} if silent else patched(die_or_wait))
    if silent:
        run.wait_for("step 00013/")
        run.signal(signal.SIGSTOP, 3)
    for process in run.ranks[:3]:
        process.join(900)
    run.signal(signal.SIGKILL, 3)
    assert run.wait(1) == [1, 1, 1, -9 if silent else 9]
    *lines, last = errors(run)
    assert all(LOST in line for line in lines) and last == ""
    if silent:
        assert any("is silent for 3 s" in line for line in lines)
    else:
        assert all("hello/" in line for line in lines)


def run_and_note(argv, rank, world_size, port, folder, path):
    """ranks._command. Rank 0 samples for a while, and all note when they leave."""

    def note(text):
        with open(path, "a") as file:
            file.write(text)

    train.print_sample = lambda model: time.sleep(1) or note("sampled ")
    ranks._command(argv, rank, world_size, port, folder)
    note("left ")


def test_no_rank_leaves_while_rank_0_samples(start, tmp_path):
    finish(start(steps=4, special=dict.fromkeys(range(4), (run_and_note, tmp_path / "trace"))))
    assert (tmp_path / "trace").read_text().split() == ["sampled", *["left"] * 4]


def break_in(rank, name, count, error):
    """The count-th call of a function kills its process or raises the error."""
    module, name = name.split(".")
    function = getattr(sys.modules[module], name)
    calls = []

    def deadly(*args, **options):
        calls.append(None)
        if len(calls) != count:
            return function(*args, **options)
        if error:
            raise error
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(sys.modules[module], name, deadly)


def limit_files(rank, most_bytes):
    """A file can have so many bytes: writing more fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def spoil_losses(rank, step):
    """The loss of rank 2 is NaN after a step."""
    forward = shard.ShardedModel.forward
    count = []

    def sick_forward(self, *args, train=True, **options):
        count.extend([None] * train)
        sick = len(count) > step and rank == 2
        return forward(self, *args, train=train, **options) * (float("nan") if sick else 1)

    shard.ShardedModel.forward = sick_forward


FULL = OSError(28, "No space left")
ALL = [0, 1, 2, 3]
FAILURES = {  # what happens; on which ranks; their line, if they are not killed; flags
    "killed before the vectors are written": ((break_in, "torch.save", 2, None), [2], "", ""),
    "no room for vectors": ((break_in, "torch.save", 2, FULL), [2], "no checkpoint could be", ""),
    "no room for the record": ((limit_files, 3_000), [0], "metrics.jsonl: File too large", ""),
    "replicas diverge": ((spoil_losses, 14), ALL, "diverged at step 15", "--method minibatch"),
    "a replica diverges": ((spoil_losses, 14), [2, 3], "diverged at step 15", "--method diloco"),
}
SLOW = ("no room for the record", "replicas diverge", "a replica diverges")


@pytest.mark.parametrize(
    "patch, found_by, message, more",
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, case in FAILURES.items()
    ],
)
def test_failure_is_reported_in_a_line_and_costs_nothing_that_was_saved(
    patch, found_by, message, more, start, tmp_path, undisturbed
):
    saving = f"{more} --checkpoint_interval 7 --keep 1 --resume auto"
    store = agent_store()
    run = start(saving, special=patched(*patch, of=found_by), store=store)
    for rank, (code, line) in enumerate(zip(run.wait(), errors(run))):
        expected = (2 if message else -9, message) if rank in found_by else (1, LOST)
        if "checkpoint" in message:  # all ranks agree on it
            expected = (2, message if rank == 0 else "")
        assert code == expected[0] and expected[1] in line and bool(line) == bool(expected[1])
    complete = checkpoint.list_checkpoints(tmp_path / "run")
    # a full disk needs the room of the unfinished one
    assert "checkpoint" not in message or not list((tmp_path / "run").glob("*.tmp"))
    assert all(len(checkpoint.files_of(path)) == 4 for path in complete)
    assert bool(complete) == ("metrics" not in message)
    finish(start(saving, store=store))  # as under --max-restarts
    assert_same(tmp_path / "run", undisturbed(more))
    assert not list((tmp_path / "run").glob("*.tmp"))


@pytest.mark.slow
def test_random_kills_cost_no_step_and_change_no_bit(start, tmp_path):
    steps = max(60, 30 * KILLS)
    dice = random.Random(KILLS)
    store = agent_store()
    kills = 0
    codes = [1]
    while set(codes) != {0}:
        run = start("--checkpoint_interval 5 --resume auto", steps, store=store)
        victim = dice.randrange(4)
        if kills < KILLS:
            run.wait_for("| loss ")
            time.sleep(dice.uniform(0, 0.5))
            kills += run.ranks[victim].is_alive()
            run.signal(signal.SIGKILL, victim)
        codes = run.wait()
        ended = codes == [0] * 4 or codes[victim] == -9 and codes.count(-9) == 1
        assert ended and set(codes) <= {-9, 0, 1}, (codes, run.lines("err"))
    assert kills >= 1
    finish(start(steps=steps, out="whole"))
    assert_same(tmp_path / "run", tmp_path / "whole")


# ---- restarts ----


def test_run_never_starts_beside_another_run(start, tmp_path):
    more = "--checkpoint_interval 3"
    first = start(more, steps=10**5, ranks=2)
    first.wait_for("saved ")
    for resume in "", " --resume auto":
        second = start(more + resume, ranks=2)
        assert second.wait() == [2, 2] and second.lines("out") == []
        line, other = errors(second)
        assert "another run is writing there" in line and other == ""
    first.signal(signal.SIGKILL)
    first.wait()
    # The lock has gone with the killed process.
    last = checkpoint.list_checkpoints(tmp_path / "run")[-1]
    finish(start(f"{more} --resume auto", steps=int(last.name.split("-")[1]) + 3, ranks=2))


@pytest.mark.slow
def test_torchrun_on_two_nodes_restarts_from_the_last_checkpoint(start, tmp_path, corpus_folder):
    """Two agents with a rank each, --max-restarts, kill -9 of one rank, --resume auto: as one node
    trains without a kill. Data and groups go by global rank."""
    more = "--checkpoint_interval 5 --slow_replica 0:3 --resume auto"
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
    assert [agent.wait(900) for agent in agents] == [0, 0]
    assert "resume  " in (tmp_path / "printed").read_text()
    finish(start(ranks=2, out="whole"))
    assert_same(tmp_path / "run", tmp_path / "whole")
