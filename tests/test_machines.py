"""Two machines without a shared disk: each keeps the files of its own ranks, and they go on
together from a checkpoint that both have. Here a machine is a working folder and a machine id."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ranks
from config import UserError
from lab import planner
from plumbing import checkpoint, launch, shm
from plumbing.plan import costs, smallest_tau
from ranks import TINY, Launch, agent_store
from test_launch import FULL, assert_same, break_in, command, errors, finish

SAVING = "--checkpoint_interval 5 --timeout_s 60"  # at steps 7, 11, 15 and 20


def on_machine(argv, rank, world_size, port, folder, number, patch=None, *more):
    """In place of ranks._command: on the machine of this number."""
    place = Path(folder).parent / f"machine-{number}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    shm.machine_id = lambda: f"machine {number}"
    if patch:
        patch(rank, *more)
    ranks._command(argv, rank, world_size, port, folder)


class Machines:
    """Runs of four ranks, two on each machine."""

    def __init__(self, folder, corpus_folder):
        self.folder = folder
        self.corpus_folder = corpus_folder
        self.store = agent_store()
        self.starts = 0

    def start(self, more="--resume auto", places=(0, 0, 1, 1), patches={}, steps=20):
        """places: the machine of each rank; patches: rank -> (patch, *more)."""
        self.starts += 1
        argv = command("run", self.corpus_folder, f"{SAVING} {more}", steps)
        special = {}
        for rank, number in enumerate(places):
            special[rank] = (on_machine, number, *patches.get(rank, ()))
        log = self.folder / f"log-{self.starts}"
        return Launch(len(places), log, *argv, special=special, store=self.store)

    def run(self, number) -> Path:
        return self.folder / f"machine-{number}" / "run"

    def saved(self) -> list:
        """Of each machine: step -> the ranks whose files are there."""
        found = []
        for number in 0, 1:
            ranks = {}
            for path in checkpoint.list_checkpoints(self.run(number)):
                step = int(path.name.split("-")[1])
                ranks[step] = []
                for name in sorted(checkpoint.files_of(path)):
                    replica, _, shard, shards = map(int, re.findall("[0-9]+", name))
                    ranks[step].append(replica * shards + shard)
            found.append(ranks)
        return found

    def refusal(self, *arguments, **options) -> str:
        """The only line of a start that all ranks refuse."""
        run = self.start(*arguments, **options)
        assert set(run.wait()) == {2} and run.lines("out") == []
        line, *others = errors(run)
        assert not any(others)
        return line


@pytest.fixture
def machines(tmp_path, corpus_folder):
    return Machines(tmp_path, corpus_folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus_folder):
    """The folder of a run on two machines that share a disk, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("shared")
    special = {rank: (in_shared_folder, rank // 2) for rank in range(4)}
    argv = command(folder / "run", corpus_folder, SAVING)
    finish(Launch(4, folder / "log", *argv, special=special))
    return folder / "run"


def in_shared_folder(argv, rank, world_size, port, folder, number):
    shm.machine_id = lambda: f"machine {number}"
    ranks._command(argv, rank, world_size, port, folder)


# ---- saving and continuing ----


def test_machines_without_a_shared_folder_continue_bit_for_bit(machines, undisturbed):
    """One is switched off in the middle of its second checkpoint."""
    run = machines.start(patches={2: (break_in, "torch.save", 2, None)})
    codes = run.wait()
    assert codes[2] == -9 and codes[:2] == [1, 1]
    assert machines.saved() == [{7: [0, 1]}, {7: [2, 3]}]
    run = machines.start()
    finish(run)
    assert any("step 7, 2 replicas x 2 shards" in line for line in run.lines("out"))
    assert_same(machines.run(0), undisturbed)
    assert machines.saved() == [{15: [0, 1], 20: [0, 1]}, {15: [2, 3], 20: [2, 3]}]
    names = {path.name for path in machines.run(1).iterdir()}
    assert names == {"checkpoint-00000015", "checkpoint-00000020"}


def die_at_name(rank, last):
    """This machine dies when the checkpoint of this step is to get its name."""
    rename = os.rename

    def rename_or_die(source, target):
        if Path(target).name == f"checkpoint-{last:08d}":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.rename = rename_or_die


# What happens; on which ranks; the step to go on from. The test above kills in a write.
KILLS = {
    "before a name here": ((die_at_name, 15), (2, 3), 11),
    "before a name there": ((die_at_name, 15), (0, 1), 11),
    "full disk": ((break_in, "torch.save", 3, FULL), (3,), 11),
}


@pytest.mark.slow
@pytest.mark.parametrize("patch, dying, step", KILLS.values(), ids=list(KILLS))
def test_killed_machine_costs_nothing_that_both_had_agreed_on(
    patch, dying, step, machines, undisturbed
):
    keeping = "--resume auto --keep 1"
    run = machines.start(keeping, patches=dict.fromkeys(dying, patch))
    codes = run.wait()
    here, there = machines.saved()
    if patch[-1] is FULL:
        assert codes == [2] * 4
        assert "no checkpoint could be written to run: rank 3: " in errors(run)[0]
        assert not list(machines.folder.glob("machine-*/run/*.tmp"))
    else:
        assert {codes[rank] for rank in dying} == {-9} and set(codes) == {-9, 1}
    one_has_it = here.keys() ^ there.keys()
    assert bool(one_has_it) == (patch[0] is die_at_name)
    run = machines.start(keeping)
    finish(run)
    resumed = [line for line in run.lines("out") if line.startswith("resume  ")]
    assert resumed and all(f": step {step}, " in line for line in resumed)
    notes = [line for line in run.lines("out") if "checkpoint-00000011 is continued" in line]
    assert len(notes) == len(one_has_it)
    assert_same(machines.run(0), undisturbed)
    assert machines.saved() == [{20: [0, 1]}, {20: [2, 3]}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, corpus_folder):
    """The folder of two machines, one of which was switched off after step 11."""
    machines = Machines(tmp_path_factory.mktemp("saved"), corpus_folder)
    machines.start(patches={2: (break_in, "torch.save", 3, None)}).wait()
    assert machines.saved() == [{7: [0, 1], 11: [0, 1]}, {7: [2, 3], 11: [2, 3]}]
    return machines.folder


@pytest.fixture
def copy(saved, machines):
    for number in 0, 1:
        shutil.copytree(saved / f"machine-{number}", machines.folder / f"machine-{number}")
    return machines


@pytest.mark.slow
def test_machine_that_lost_its_newest_checkpoint_takes_all_back_to_the_one_before(
    copy, undisturbed
):
    shutil.rmtree(copy.run(1) / "checkpoint-00000011")
    run = copy.start("--resume run")  # auto: see the kills above
    finish(run)
    (note,) = [line for line in run.lines("out") if line.startswith("note ")]
    need = "checkpoint-00000011: rank 2 needs replica-0-of-2-shard-0-of-2.pt, which rank 0 sees"
    assert need in note and note.endswith("checkpoint-00000007 is continued")
    assert any("step 7, " in line for line in run.lines("out") if line.startswith("resume  "))
    assert_same(copy.run(0), undisturbed)


@pytest.mark.slow
def test_what_is_missing_is_named_and_copying_it_helps(copy, undisturbed):
    """A folder that is gone, machines that have changed places, another mesh."""
    names = sorted(os.listdir(copy.run(0)))
    line = copy.refusal(places=(1, 1, 0, 0))
    assert "rank 0 needs replica-0-of-2-shard-0-of-2.pt, which rank 2 sees" in line
    assert "--node_rank" in line
    line = copy.refusal("--resume auto --batch_size 2", places=(0, 0, 1, 1, 1, 1))
    assert "rank 4 needs replica-0-of-2-shard-0-of-2.pt, which rank 0 sees: copy it there" in line
    shutil.copytree(copy.run(1), copy.folder / "kept")
    shutil.rmtree(copy.run(1))
    line = copy.refusal()
    assert "rank 2 needs replica-0-of-2-shard-0-of-2.pt, which rank 0 sees: copy it there" in line
    assert "checkpoint-00000011: " in line and "--overwrite" in line
    assert sorted(os.listdir(copy.run(0))) == names  # nothing has changed
    shutil.copytree(copy.folder / "kept", copy.run(1), dirs_exist_ok=True)
    finish(copy.start())
    assert_same(copy.run(0), undisturbed)


@pytest.mark.slow
def test_machines_continue_with_other_shards_from_their_own_files(copy):
    """A replica of two shards on each machine becomes one of one shard."""
    finish(copy.start("--resume auto --shards 1 --batch_size 4", places=(0, 1)))
    assert copy.saved() == [{15: [0], 20: [0]}, {15: [1], 20: [1]}]


@pytest.mark.slow
def test_what_is_left_of_a_lost_machine_is_enough_to_go_on(copy):
    """Replica 1 continues replica 0; or one machine goes on alone."""
    shutil.copytree(copy.run(0), copy.folder / "alone" / "run")
    shutil.rmtree(copy.run(1))
    shutil.copytree(copy.run(0), copy.run(1))
    lost = "checkpoint-00000011 lacks replica-1-of-2-shard-0-of-2.pt and 1 more"
    run = copy.start()
    finish(run)
    assert any(lost in line for line in run.lines("out"))
    assert copy.saved() == [{15: [0, 1], 20: [0, 1]}, {15: [2, 3], 20: [2, 3]}]
    shutil.rmtree(copy.run(0))
    os.rename(copy.folder / "alone" / "run", copy.run(0))
    run = copy.start("--resume auto --tokens_per_step 64", places=(0, 0))
    finish(run)
    assert any(lost in line for line in run.lines("out"))
    assert copy.saved()[0] == {15: [0, 1], 20: [0, 1]}
    line = copy.refusal()  # machine 1 has gone on by itself, too
    assert "checkpoint-00000020: it has files of several runs; --overwrite starts anew" in line


@pytest.mark.slow
def test_one_machine_begins_and_its_replica_becomes_two(machines):
    """As the page says for GPUs."""
    more = "--resume auto --tokens_per_step 64 --checkpoint_interval 3"  # 3: the warm-up's end
    first = machines.start(more, places=(0, 0), patches={1: (break_in, "torch.save", 2, None)})
    first.wait()
    shutil.copytree(machines.run(0), machines.run(1))
    run = machines.start(more)
    finish(run)
    assert any("step 3, 1 replicas x 2 shards" in line for line in run.lines("out"))
    last = max(machines.saved()[0])
    assert [found[last] for found in machines.saved()] == [[0, 1], [2, 3]]


@pytest.mark.slow
def test_files_of_all_machines_in_one_folder_are_a_checkpoint_for_any_mesh(copy):
    for path in checkpoint.list_checkpoints(copy.run(1)):
        for name in checkpoint.files_of(path):
            shutil.copy(path / name, copy.run(0) / path.name)
    finish(copy.start("--resume auto --shards 1 --tokens_per_step 64", places=(0,)))
    assert copy.saved()[0] == {15: [0], 20: [0]}


@pytest.mark.slow
def test_overwrite_starts_anew_on_all_machines(copy):
    line = copy.refusal("")
    assert "has an earlier run" in line
    finish(copy.start("--overwrite", steps=8))
    assert copy.saved() == [{7: [0, 1], 8: [0, 1]}, {7: [2, 3], 8: [2, 3]}]


@pytest.mark.slow
def test_folder_that_one_machine_cannot_write_is_named_with_its_rank(machines):
    (machines.folder / "machine-1").mkdir()
    (machines.folder / "machine-1" / "run").write_text("a file")
    line = machines.refusal()
    assert "rank 2: run: " in line


# ---- what is checked before the first step ----


def interfaces(monkeypatch, loopback, named="", local="1", master="192.0.2.1") -> list:
    """What check_interfaces() says on two ranks, "" if it finds nothing. loopback: of each rank,
    whether the name of its machine means 127.*; named: $GLOO_SOCKET_IFNAME of both."""
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    monkeypatch.setattr(launch.os, "environ", {"MASTER_ADDR": master, "LOCAL_WORLD_SIZE": local})
    launch.os.environ["GLOO_SOCKET_IFNAME"] = named
    monkeypatch.setattr(launch.socket, "gethostname", lambda: "own name")
    found = {"192.0.2.1": False, "127.0.0.1": True}
    monkeypatch.setattr(launch, "is_loopback", lambda name: found.get(name, loopback[rank]))
    lines = {}
    for rank in (0, 1, 0):  # the first one does not find the second one's key yet
        try:
            launch.check_interfaces(store, rank, 2)
            lines[rank] = ""
        except UserError as error:
            lines[rank] = str(error) or "other"
        except RuntimeError:  # torch: the key is missing
            pass
    return [lines[0], lines[1]]


def test_gloo_at_loopback_on_several_machines_is_refused(monkeypatch):
    """Debian's name of the own machine. A run on one machine, or with an interface, is none."""
    first, second = interfaces(monkeypatch, [False, True])
    assert "rank 1 would listen at 127.*" in first and "GLOO_SOCKET_IFNAME=" in first
    assert "NCCL_SOCKET_IFNAME" in first and second == "other"
    assert interfaces(monkeypatch, [True, True], named="eth0") == ["", ""]
    assert interfaces(monkeypatch, [True, True], local="2") == ["", ""]
    assert interfaces(monkeypatch, [True, True], master="127.0.0.1") == ["", ""]
    assert interfaces(monkeypatch, [False, False]) == ["", ""]


def test_names_of_the_own_machine_are_known():
    names = ["127.0.1.1", "::1", "no-such-name.invalid", "192.0.2.1", "2001:db8::1"]
    assert list(map(launch.is_loopback, names)) == [True, True, True, False, False]


class Pair:
    """Two ranks that check one after the other: rank 0 when it knows what rank 1 has."""

    world_size = 2

    def __init__(self):
        self.known = {}

    def all_gather_object(self, own):
        self.known[self.rank] = own
        return [self.known.get(rank, own) for rank in (0, 1)]


def difference(changes, software="3.11.0") -> str:
    """The line of rank 0 when rank 1's run differs in these and in its Python."""
    pair = Pair()
    for pair.rank in (1, 0):
        config = vars(ranks.run_config(data="a" if pair.rank else "b", out_dir=str(pair.rank)))
        run = SimpleNamespace(config=SimpleNamespace(**config), saved=None)
        run.corpus = SimpleNamespace(hash="1")
        launch.platform = SimpleNamespace(python_version=lambda: "3.11.0")
        if pair.rank:
            launch.platform = SimpleNamespace(python_version=lambda: software)
            for name, value in changes.items():
                owner = run.corpus if name == "hash" else run.config
                setattr(owner, name, value)
        try:
            launch.check_alike(run, pair)
            line = ""
        except UserError as error:
            line = str(error)
    return line


def test_ranks_that_differ_are_told_in_what(monkeypatch, capsys):
    monkeypatch.setattr(launch, "platform", None)
    assert difference({}) == ""  # folders may differ
    assert "note" not in capsys.readouterr().out
    line = difference({"dtype": "bf16"})
    assert line == "the ranks differ: --dtype is fp64 on rank 0 and bf16 on rank 1; give the same to both"
    assert "the corpus of rank 1 is not that of rank 0" in difference({"hash": "2"})
    assert difference({}, software="3.12.1") == ""
    assert "note    rank 1 has Python 3.12.1, torch" in capsys.readouterr().out


@pytest.mark.slow
def test_another_model_on_one_machine_is_refused(machines, undisturbed):
    for number in 0, 1:
        (machines.folder / f"machine-{number}").mkdir()
        content = torch.load(undisturbed / "model.pt", weights_only=True)
        next(iter(content["model"].values())).add_(number)
        torch.save(content, machines.folder / f"machine-{number}" / "first.pt")
    run = machines.start("--init_from first.pt")
    assert run.wait() == [2] * 4
    line, *others = errors(run)
    assert "--init_from first.pt: rank 2 has another model than rank 0" in line
    assert not any(others) and not any("step 0" in line for line in run.lines("out"))


# ---- the page ----


class Agents:
    """The torchruns of the page's command, on small models, in two working folders."""

    def __init__(self, folder, corpus_folder, more=""):
        self.folder = folder
        page = (ranks.ROOT / "docs" / "two_machines.md").read_text()
        shutil.rmtree(folder / "my_corpus", ignore_errors=True)
        shutil.copytree(corpus_folder, folder / "my_corpus")
        small = [*TINY, *"--backend gloo --sync_warmup_steps 2 --tau 4 --max_steps 40".split()]
        small += "--checkpoint_interval 8 --data ../my_corpus".split() + more.split()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (line,) = re.findall("^torchrun (.* out/two .*)", page, re.MULTILINE)
        line = line.replace("192.168.1.10", "127.0.0.1").replace("29500", str(port))
        line = line.replace("train.py", f"{ranks.ROOT}/train.py")
        self.commands = []
        for node_rank in "--node_rank 0", "--node_rank 1":
            own = line.replace("--node_rank 0", node_rank)
            self.commands.append([*own.split(), *small])
        self.running = [self.start(number) for number in (0, 1)]

    def start(self, number):
        place = self.folder / f"machine-{number}"
        place.mkdir(exist_ok=True)
        argv = [sys.executable, *"-m torch.distributed.run --local_addr 127.0.0.1".split()]
        argv += self.commands[number]
        with open(self.folder / f"printed-{number}", "w") as out:
            return subprocess.Popen(argv, cwd=place, stdout=out, stderr=out, start_new_session=True)

    def printed(self) -> str:
        return (self.folder / "printed-0").read_text()

    def wait(self) -> list:
        return [agent.wait(900) for agent in self.running]


@pytest.mark.slow
def test_commands_of_the_page_continue_after_one_machine_was_switched_off(tmp_path, corpus_folder):
    (tmp_path / "whole").mkdir()
    assert Agents(tmp_path / "whole", corpus_folder).wait() == [0, 0]
    (tmp_path / "kill").mkdir()
    agents = Agents(tmp_path / "kill", corpus_folder, "--slow_replica 1:10")
    while "step 00017/" not in agents.printed():
        assert agents.running[0].poll() is None, agents.printed()
        time.sleep(0.02)
    os.killpg(agents.running[1].pid, signal.SIGKILL)
    assert agents.wait() == [1, -9]
    assert "lost contact with another rank" in agents.printed()
    agents = Agents(tmp_path / "kill", corpus_folder, "--slow_replica 1:1")
    assert agents.wait() == [0, 0], agents.printed()
    assert "resume  out/two/checkpoint-000000" in agents.printed()
    assert_same(*(tmp_path / name / "machine-0" / "out" / "two" for name in ("kill", "whole")))


def test_figures_of_the_page_are_the_planners(capsys):
    """And the default of --timeout_s is too short for its last command, which gives enough."""
    page = (ranks.ROOT / "docs" / "two_machines.md").read_text()
    (words,) = re.findall("^python -m lab.planner (.*)$", page, re.MULTILINE)
    run = planner.read_command(words.split())
    pattern = r"here (\d+) for `edit`, (\d+) for `streaming_edit`.* (\d+) for `one_bit_edit`"
    taus = re.search(pattern, page, re.S)
    for tau, method in zip(taus.groups(), ("edit", "streaming_edit", "one_bit_edit")):
        assert int(tau) == smallest_tau(run, method)
    assert f'A "worth" of {costs(run, "edit")["worth"]:.2f} means' in page
    by_hand = 9 * costs(run, "edit")["link_s"] / run.step_s
    assert by_hand == pytest.approx(9 * 34e-6 * run.parameters / run.link_mbps, rel=0.001)
    assert by_hand / 2 < smallest_tau(run, "diloco") / 2 < by_hand <= smallest_tau(run, "diloco")

    printed = []
    for link in 100, 1000, 10_000:
        planner.main(["--model", "7b", "--link_mbps", str(link)])
        printed.append(capsys.readouterr().out)
    (needed,) = re.findall(r"--timeout_s (\d+) or more", printed[0])
    (given,) = re.findall(r"--compile --timeout_s (\d+)", page)
    assert f"{needed} s" in page and 3600 < int(needed) < int(given)
    for text, link in (printed[1], "1 Gbit/s"), (printed[2], "10 Gbit/s"):
        (time,) = re.findall(r"average gradients: (.*), and", text)
        (alone,) = re.findall(r"On one replica alone: (.*), and", text)
        assert f"{time} on {link}" in page and f"{alone} on" in " ".join(page.split())
