"""lab.sweep: which runs it makes, which it repeats, resumes or leaves out, and how it ends. A small
program stands for torchrun and train.py, but in the tests of plain runs and in the last one."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranks
from config import STOPS, UserError
from lab import sweep

FAKE = '''
import json, os, signal, sys, time
from pathlib import Path

words = sys.argv[1:]
flags = {name[2:]: value for name, value in zip(words, words[1:] + ['']) if name[:2] == "--"}
folder = Path(flags["out_dir"])
began = {"flags": flags, "ranks": words[0], "threads": os.environ["OMP_NUM_THREADS"]}
with open("began", "a") as file:
    file.write(json.dumps(began) + "\\n")

def wait_for_signal():
    def save(*_):
        (folder / "checkpoint-00000004").mkdir()
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    (folder / "waits").touch()
    time.sleep(6000)

MORE
config = {"event": "config", "method": flags["method"], "seed": int(flags["seed"])}
config |= {"tau": int(flags["tau"])} if "tau" in flags else {}
loss = 2 + int(flags.get("tau", 0)) / 8 + int(flags["seed"]) / 4
counts = {"step": 8, "tokens": 8, "train_s": 1.0, "sync_bytes": 10}
rows = [config, {"event": "eval", "val_loss": loss} | counts]
rows.append({"event": "end", "step": 8, "train_s": 1.0, "val_loss": loss, "exit": "done"})
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
'''


@pytest.fixture
def start(tmp_path, corpus_folder, monkeypatch):
    """A function that runs `lab.sweep try WORDS` in an empty folder and returns what the runs were
    started with. more: lines of the program that stands for train.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sweep, "TORCHRUN", [sys.executable, "fake.py"])
    handlers = {number: signal.getsignal(number) for number in STOPS}

    def start(words, more="", name="try"):
        Path("fake.py").write_text(FAKE.replace("MORE", more))
        Path("began").write_text("")
        try:
            sweep.main([name, *words.split(), "--data", str(corpus_folder)])
        finally:
            found = [json.loads(line) for line in Path("began").read_text().splitlines()]
            start.began = sorted(found, key=lambda row: json.dumps(row["flags"]))
        return start.began

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


WORDS = "--method minibatch edit --tau 4 16 --seed 1 2"


def settings(began) -> set:
    return {tuple(row["flags"].get(name) for name in ("method", "tau", "seed")) for row in began}


def test_each_combination_is_run_once_and_flags_that_are_left_out_are_named(start, capsys):
    began = start(WORDS)
    assert len(began) == 6
    assert settings(began) == {
        ("minibatch", None, "1"), ("minibatch", None, "2"),
        ("edit", "4", "1"), ("edit", "16", "1"), ("edit", "4", "2"), ("edit", "16", "2"),
    }  # fmt: skip
    assert {row["ranks"] for row in began} == {"4"}
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "note    minibatch does not have --tau: left out for it"
    assert "8 combinations, 6 different runs, 6 to do" in lines[1]
    assert all("seed 1" in line for line in lines[2:5])  # whole seeds first
    assert lines[7].startswith("6/6 | ")
    assert lines[7].endswith("0m00s left")
    # Losses 2 + tau / 8 + seed / 4: those of edit are 2.75, 3 and 4.25, 4.5
    row = "| edit | 4 | 2.8750 +- 0.1250 | 0.0 | 2 | +21.11% +- 1.11% * | 2 |"
    assert row in printed
    assert row in Path("out/sweep/try/try.md").read_text()
    assert Path("out/sweep/try/try.csv").read_text().count("\n") == 7
    (folder,) = Path("out/sweep/try").glob("edit,tau=16,seed=2-*")
    command = shlex.split((folder / "command.txt").read_text())
    assert command[command.index("--out_dir") + 1] == str(folder)


def test_a_finished_run_is_not_repeated_and_an_interrupted_one_resumes(start, capsys):
    start(WORDS)
    assert start(WORDS) == []
    assert "6 different runs, 0 to do" in capsys.readouterr().out

    (folder,) = Path("out/sweep/try").glob("edit,tau=16,seed=2-*")
    record = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(record[:-1]) + "\n")
    (again,) = start(WORDS)
    assert again["flags"]["out_dir"] == str(folder)
    assert "overwrite" in again["flags"]  # it has no checkpoint

    began = start("--method edit --tau 16 --seed 1 2 3")  # another line finds the same runs
    assert settings(began) == {("edit", "16", "3")}
    assert len(start(WORDS + " --lr 0.002")) == 6  # other runs
    assert len(start(WORDS, name="other")) == 6


def test_a_failed_run_is_named_stops_nobody_and_is_tried_again(start, capsys):
    fail = "if flags['method'] == 'minibatch' and flags['seed'] == '1':\n"
    fail += "    sys.exit('train.py: error: diverged at step 3')"
    with pytest.raises(sweep.Failed, match="1 of 6 runs failed: minibatch,seed=1-") as caught:
        start(WORDS, fail)
    assert caught.value.exit_code == 1
    assert len(start.began) == 6
    printed = capsys.readouterr().out
    assert "minibatch, seed 1 | failed" in printed
    assert "/output.txt: train.py: error: diverged at step 3\n" in printed
    assert "| minibatch |  | 2.5000 |" in printed
    assert "minibatch: its mean is without seed 1" in printed
    assert settings(start(WORDS)) == {("minibatch", None, "1")}


@pytest.mark.parametrize(
    "output, expected",
    [
        ("train.py: error: a\nstep 1\n", "train.py: error: a"),
        ("[rank0]: RuntimeError: b\n=====\nRoot Cause\n=====\n", "[rank0]: RuntimeError: b"),
        ("round 3\n=====\n  exitcode  : -9 (pid: 7)\n=====\n", "exitcode  : -9 (pid: 7)"),
        ("round 3\n", "exit -9"),
        ("", "exit -9"),
    ],
)
def test_reason_of_a_failed_run_is_an_error_or_an_exit_code(output, expected, tmp_path):
    (tmp_path / "output.txt").write_text(output)
    assert sweep.reason(tmp_path, -9) == expected


def test_jobs_run_at_once_and_share_the_cores(start, monkeypatch):
    monkeypatch.setattr(sweep, "cores", lambda: 16)
    # Each run waits until there are two.
    wait = "while len(open('began').read().splitlines()) < 2: time.sleep(0.01)"
    began = start("--method edit diloco --seed 1 --jobs 2", wait)
    assert [row["threads"] for row in began] == ["2", "2"]  # of 2 x 4 ranks
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (alone,) = start("--method edit --seed 5 --replicas 2 --shards 3")
    assert alone["ranks"] == "6"
    assert alone["threads"] == "3"


def test_ctrl_c_ends_all_children_and_the_same_line_goes_on(start):
    """The second run sends Ctrl-C to the sweep when both wait."""
    both = "if flags['seed'] == '2':\n"
    both += "    while not list(folder.parent.glob('*seed=1*/waits')): time.sleep(0.01)\n"
    both += "    os.kill(os.getppid(), signal.SIGINT)\n"
    both += "wait_for_signal()"
    line = "stopped by SIGINT: 0 of 3 runs are done; the same command line goes on from here"
    with pytest.raises(sweep.Stopped, match=line) as caught:
        start("--method edit --seed 1 2 3 --jobs 2", both)
    assert caught.value.exit_code == 130
    assert len(start.began) == 2
    assert len(list(Path("out/sweep/try").glob("*/checkpoint-00000004"))) == 2
    alive = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(os.fsencode(str(Path("out/sweep/try"))) in line for line in alive)


def test_a_second_ctrl_c_does_not_wait(start):
    deaf = "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))\n"
    deaf += "os.kill(os.getppid(), signal.SIGINT)\n"
    deaf += "while True: time.sleep(1)"
    with pytest.raises(sweep.Stopped):
        start("--method edit --seed 1 2", deaf)
    assert len(start.began) == 1


def test_an_interrupted_run_with_a_checkpoint_gets_resume_auto(tmp_path, corpus_folder):
    axes = sweep.read_axes(["--data", str(corpus_folder), "--method", "edit"])
    (run,), _ = sweep.plan(tmp_path, axes, 4, False)
    assert run.words()[-1] == "--overwrite"
    (run.folder / "checkpoint-00000004").mkdir(parents=True)
    assert run.words()[-2:] == ["--resume", "auto"]
    assert "--save_on_exit" in run.words()


def test_plain_runs_have_their_replicas_and_no_flag_of_torchrun(tmp_path, corpus_folder, monkeypatch):
    seen = []
    monkeypatch.setattr(sweep, "read_config", seen.append)
    words = f"--data {corpus_folder} --method edit --shards 2 --replicas 2 3".split()
    runs, _ = sweep.plan(tmp_path, sweep.read_axes(words), 4, True)
    for run, replicas in zip(runs, "23"):
        assert run.command()[:3] == [sys.executable, "-m", "plain"]
        assert run.words() == [
            "--method", "edit", "--data", str(corpus_folder), "--shards", "2", "--replicas",
            replicas, "--out_dir", str(run.folder), "--overwrite",
        ]  # fmt: skip
    assert seen == [run.words() for run in runs]
    (four_ranks,), _ = sweep.plan(tmp_path, sweep.read_axes(words[:6]), 4, True)
    assert four_ranks.words()[6:8] == ["--replicas", "2"]
    assert four_ranks.folder.name[-8:] == runs[0].folder.name[-8:]  # the same run


PLAIN = "--plain --replicas 2 --tau 2 --sync_warmup_steps 2 --n_layer 1 --n_embd 16 "
PLAIN += "--block_size 8 --eval_batches 1 --dtype fp32"


@pytest.mark.slow
def test_plain_runs_share_a_process_and_survive_the_death_of_one(start, monkeypatch, capsys, tmp_path):
    """Four runs in one process, without os.fork. The process is killed in the first run, and two
    runs diverge. The last one trains as `python -m plain` does, bit for bit."""
    monkeypatch.delattr(os, "fork")
    made = []
    begin = sweep.Sweep.start

    def begin_and_kill_the_first(self, run):
        begin(self, run)
        ((worker, _),) = self.running.items()
        made.append(worker)
        if len(made) == 1:
            worker.process.kill()

    monkeypatch.setattr(sweep.Sweep, "start", begin_and_kill_the_first)
    words = f"--method diloco edit --seed 1 --lr 0.002 1e25 {PLAIN} --max_steps 6"
    with pytest.raises(sweep.Failed, match="3 of 4 runs failed"):
        start(words)
    killed, *others = made
    assert len(set(others)) == 1
    assert others[0] is not killed
    assert not others[0].process.is_alive()
    printed = capsys.readouterr().out
    assert "diloco,lr=0.002" in printed and "exit -9" in printed
    assert "plain: error: diverged" in printed

    (folder,) = Path("out/sweep/try").glob("edit,lr=0.002-*")
    words_of_run = shlex.split((folder / "command.txt").read_text())[3:]
    sweep.train_plain([*words_of_run, "--out_dir", "alone"])
    assert sweep.last_loss("alone") == sweep.last_loss(folder)
    assert "done | 6 steps" in (folder / "output.txt").read_text()


def test_a_warm_up_of_most_of_the_run_is_said(start, capsys):
    start("--method minibatch edit --seed 1 2 --max_steps 60 --lr_warmup_steps 31")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "of the run" in line] == [
        "note    minibatch: --lr_warmup_steps 31 is 52% of the run",
        "note    edit: --sync_warmup_steps 200 is 333% of the run",
        "note    edit: --lr_warmup_steps 31 is 52% of the run",
    ]
    start("--method edit --seed 1 --max_steps 60 --lr_warmup_steps 30 --sync_warmup_steps 30")
    assert "of the run" not in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_ends_plain_runs_and_the_same_line_repeats_them(tmp_path, corpus_folder):
    command = [sys.executable, "-m", "lab.sweep", "real", "--method", "edit", "--seed", "1", "2"]
    command += f"--jobs 2 --data {corpus_folder} {PLAIN} --max_steps 400".split()

    def start():
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=tmp_path, stdout=pipe, text=True, start_new_session=True)

    first = start()
    while len(list(tmp_path.glob("out/sweep/real/*/metrics.jsonl"))) < 2:
        assert first.poll() is None
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    assert first.wait(600) == 130
    ends = time.monotonic() + 300
    while True:
        try:
            os.killpg(first.pid, 0)
        except ProcessLookupError:
            break  # nobody trains any more
        assert time.monotonic() < ends
        time.sleep(0.1)

    second = start()
    printed, _ = second.communicate(timeout=900)
    assert second.returncode == 0
    assert "2 different runs, 2 to do" in printed
    assert "2/2 | seed " in printed


def test_switches_take_yes_and_no():
    axes = sweep.read_axes("--weighted_averaging yes no --compile --no-offload --tau=4".split())
    assert list(axes.values()) == [["yes", "no"], [None], ["no"], ["4"]]
    found = [" ".join(sweep.words_of(flags)) for flags in sweep.combinations(axes)]
    assert found == [
        "--weighted_averaging --compile --no-offload --tau 4",
        "--no-weighted_averaging --compile --no-offload --tau 4",
    ]


WRONG = {
    "--method edit --taus 4": "unrecognized arguments: --taus 4",
    "--method edit --tau": "--tau: expected one argument",
    "--method edit dilco": "invalid choice: 'dilco'",
    "--method edit --tau 4 four": "--tau: invalid int value: 'four'",
    "--method edit --tau 4 0": "--tau 0: must be at least 1",
    "--method minibatch --tau 4 16": "--method minibatch does not have --tau",
    "--method edit --shards 1 3": "shards 3: --shards 3: 4 ranks do not form replicas of 3",
    "--method edit --replicas 2 --ranks 0": "--ranks 0: must be at least 1",
    "--method edit --jobs 0": "--jobs 0: must be at least 1",
    "--method edit --data nowhere": "nowhere",
    "--method edit --out_dir x": "--out_dir: the sweep sets it",
    "--method edit --optimizer muon --average_moments": "no second moment",
    "--method edit --base tau": "--base tau: write FLAG=VALUE",
    "--method edit --base taus=4": "--base taus=4: no run has it; there is: no such flag",
    "--method edit --x loss": "--x loss: it must be one of step, tokens",
    "--method edit --base method=diloco": "no run has it; there is: edit",
    "--method edit --x method": "a flag whose values are numbers",
    "edit --tau 4": "edit: a value stands behind its flag",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words_are_refused_in_one_line_before_the_first_run(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, OSError), match=WRONG[words]) as caught:
        sweep.main(["try", *words.split()])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv", [[], ["--method", "edit"], ["a/b", "--method", "edit"], [".."]])
def test_a_sweep_has_a_name(argv):
    with pytest.raises(UserError, match="the first word is the name of the sweep"):
        sweep.main(argv)


def test_two_sweeps_do_not_share_a_folder(start, tmp_path):
    folder = tmp_path / "out/sweep/try"
    folder.mkdir(parents=True)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another run is writing there"):
        start("--method edit --seed 1")
    os.close(descriptor)
    assert start.began == []


@pytest.mark.slow
def test_interrupted_sweep_of_real_runs_resumes_and_ends_with_a_table(tmp_path, corpus_folder):
    """torchrun, train.py, Ctrl-C; then once more to the end."""
    short = ranks.flags(data=corpus_folder, max_steps=300, checkpoint_interval=4, eval_batches=1)
    kept = []
    for name, value in zip(short[::2], short[1::2]):
        if name not in ("--out_dir", "--method", "--seed"):
            kept += [name, value]
    words = "real --method edit diloco --seed 1 --jobs 2 --ranks 2".split()
    command = [sys.executable, "-m", "lab.sweep", *words, *kept]

    def start():
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    first = start()
    while not list(tmp_path.glob("out/sweep/real/*/checkpoint-*")):
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    assert first.wait(600) == 130
    folders = list(tmp_path.glob("out/sweep/real/*/"))
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody trains there
        os.close(descriptor)

    second = start()
    printed, _ = second.communicate(timeout=900)
    assert second.returncode == 0
    assert "2 different runs, 2 to do" in printed
    assert "| diloco | " in printed
    resumed = 0
    for folder in folders:
        events = [json.loads(line)["event"] for line in (folder / "metrics.jsonl").open()]
        assert events.count("end") == 1
        resumed += events.count("resume")
        assert not list(folder.glob("checkpoint-*"))
    assert resumed >= 1
