"""lab.sweep: which runs it makes, which it repeats, how it ends. A small program stands for torchrun
and train.py, but in the tests of plain runs and in the last one."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ranks
from config import STOPS, UserError
from lab import sweep
from rows import each_row

FAKE = """
import json, os, sys
from pathlib import Path

words = sys.argv[1:]
flags = {name[2:]: value for name, value in zip(words, words[1:] + ['']) if name[:2] == "--"}
folder = Path(flags["out_dir"])
began = {"flags": flags, "ranks": words[0], "threads": os.environ["OMP_NUM_THREADS"]}
with open("began", "a") as file:
    file.write(json.dumps(began) + "\\n")
MORE
config = {"event": "config", "method": flags["method"], "seed": int(flags["seed"])}
config |= {name: float(flags[name]) for name in ("tau", "outer_lr") if name in flags}
loss = 2 + float(flags.get("tau", 0)) / 8 + int(flags["seed"]) / 4
if "outer_lr" in flags:
    loss += abs(float(flags["outer_lr"]) - 4 / float(flags["tau"]))
counts = {"step": 8, "tokens": 8, "train_s": 1.0, "sync_bytes": 10}
rows = [config, {"event": "eval", "val_loss": loss} | counts]
rows.append({"event": "end", "step": 8, "train_s": 1.0, "val_loss": loss, "exit": "done"})
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def start(tmp_path, corpus_folder, monkeypatch):
    """A function that runs `lab.sweep try WORDS` in an empty folder and returns what the runs were
    started with. more: lines of the program that stands for train.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sweep, "TORCHRUN", [sys.executable, "fake.py"])
    # Threads need not import torch. The real runs below have processes.
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    handlers = {number: signal.getsignal(number) for number in STOPS}

    def start(words, more="", name="try"):
        Path("fake.py").write_text(FAKE.replace("MORE", more))
        Path("began").write_text("")
        try:
            sweep.main([name, *words.split(), "--data", str(corpus_folder)])
        finally:
            start.began = [json.loads(line) for line in Path("began").read_text().splitlines()]
        return start.began

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


WORDS = "--method minibatch edit --tau 4 16 --seed 1 2"


def settings(began, *names) -> set:
    names = names or ("method", "tau", "seed")
    return {tuple(row["flags"].get(name) for name in names) for row in began}


def test_each_combination_is_run_once_and_the_same_line_repeats_none(start, capsys):
    began = start(WORDS)
    assert len(began) == 6
    assert settings(began) == {
        ("minibatch", None, "1"), ("minibatch", None, "2"),
        ("edit", "4", "1"), ("edit", "16", "1"), ("edit", "4", "2"), ("edit", "16", "2"),
    }  # fmt: skip
    assert {row["ranks"] for row in began} == {"4"}
    assert all(row["flags"]["seed"] == "1" for row in began[:3])  # whole seeds first
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "note    minibatch does not have --tau: left out for it"
    assert "6 runs, 6 to do" in lines[1]
    assert lines[7].startswith("6/6 | ")
    assert "| minibatch |  | 2.3750 " in Path("out/sweep/try/try.md").read_text()
    assert Path("out/sweep/try/try.csv").read_text().count("\n") == 7
    (folder,) = Path("out/sweep/try").glob("method=edit,tau=16,seed=2-*")
    command = shlex.split((folder / "command.txt").read_text())
    assert command[command.index("--out_dir") + 1] == str(folder)

    assert start(WORDS) == []
    assert settings(start("--method edit --tau 16 --seed 1 2 3")) == {("edit", "16", "3")}
    assert len(start(WORDS + " --lr 0.002")) == 6  # other runs


def test_an_interrupted_run_starts_again_or_resumes_from_its_checkpoint(start):
    start("--method edit --seed 1")
    (folder,) = Path("out/sweep/try").glob("edit-*")
    record = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(record[0] + "\n")
    (again,) = start("--method edit --seed 1")
    assert again["flags"]["out_dir"] == str(folder) and "overwrite" in again["flags"]

    (folder / "metrics.jsonl").write_text(record[0] + "\n")
    (folder / "checkpoint-00000004").mkdir()
    (again,) = start("--method edit --seed 1")
    assert again["flags"]["resume"] == "auto" and "save_on_exit" in again["flags"]
    assert not list(folder.glob("checkpoint-*"))  # of a run that is done


def test_a_failed_run_is_named_stops_nobody_and_is_tried_again(start, capsys):
    fail = "if flags['method'] == 'minibatch' and flags['seed'] == '1':\n"
    fail += "    sys.exit('train.py: error: no space left')"
    with pytest.raises(sweep.Ended, match="1 of 6 runs failed: method=minibatch,seed=1-") as caught:
        start(WORDS, fail)
    assert caught.value.exit_code == 1
    printed = capsys.readouterr().out
    assert "failed: train.py: error: no space left (out/sweep/try/method=minibatch" in printed
    assert "| minibatch |  | 2.5000 |" in printed  # the other seed
    assert settings(start(WORDS)) == {("minibatch", None, "1")}


def test_a_run_that_diverges_is_a_row_of_the_table_and_not_repeated(start, capsys):
    diverge = "config = {'event': 'config', 'method': 'edit', 'seed': int(flags['seed'])}\n"
    diverge += "config['tau'] = int(flags['tau'])\n"
    diverge += "(folder / 'metrics.jsonl').write_text(json.dumps(config) + '\\n')\n"
    diverge += "if flags['tau'] == '16' or flags['seed'] == '3':\n"
    diverge += "    sys.exit('train.py: error: diverged at step 3: loss nan')\n"
    words = "--method edit --tau 4 16 --seed 1 2 3"
    start(words, diverge)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 4", "| 16"))]
    assert "; diverged, 1 of 3 seeds |" in rows[0]
    assert "| diverged, 3 of 3 seeds |" in rows[1]
    assert start(words) == []


def test_best_trains_each_setting_with_its_own_best_outer_step_on_other_seeds(start, capsys):
    """The fake's best outer_lr is 4 / tau. minibatch has none."""
    began = start("--method minibatch edit --tau 4 8 --outer_lr 0.1 0.5 1 --best 7 --seed 1 2 7")
    tuning, others = [], []
    for row in began:
        (tuning if row["flags"]["seed"] == "7" else others).append(row)
    assert len(tuning) == 7
    assert settings(others, "method", "tau", "outer_lr", "seed") == {
        ("minibatch", None, None, "1"), ("minibatch", None, None, "2"),
        ("edit", "4", "1", "1"), ("edit", "4", "1", "2"),
        ("edit", "8", "0.5", "1"), ("edit", "8", "0.5", "2"),
    }  # fmt: skip
    assert Path("out/sweep/try_tune/try_tune.csv").exists()
    assert "note    best of its setting: method=edit,tau=8,outer_lr=0.5-" in capsys.readouterr().out
    with pytest.raises(UserError, match="--best 7: give other seeds"):
        start("--method edit --seed 7 --best 7")


def test_flags_joined_by_commas_change_together():
    axes = sweep.read_axes("--tau 4 16 --outer_lr,outer_momentum 1,0 0.9,0.3".split())
    pairs = [(flags["outer_lr"], flags["outer_momentum"]) for flags in sweep.combinations(axes)]
    assert pairs == [("1", "0"), ("0.9", "0.3")] * 2
    with pytest.raises(UserError, match="--tau: alone or with another flag, not both"):
        sweep.read_axes("--tau 4 --seed,tau 1,8 2,16".split())
    with pytest.raises(UserError, match="--out_dir: the sweep sets it"):
        sweep.read_axes("--out_dir,seed a,1".split())
    with pytest.raises(UserError, match="it takes 2 values at a time"):
        sweep.combinations({"outer_lr,outer_momentum": ["1"]})


def test_a_seed_may_change_with_another_flag(start):
    began = start("--method edit --tau,seed 4,1 16,2")
    assert settings(began) == {("edit", "4", "1"), ("edit", "16", "2")}
    with pytest.raises(UserError, match="--best 7: give --seed alone"):
        start("--method edit --tau,seed 4,1 16,2 --best 7")


def test_switches_take_yes_and_no():
    axes = sweep.read_axes("--weighted_averaging yes no --compile --no-offload --tau=4".split())
    found = [" ".join(sweep.words_of(flags)) for flags in sweep.combinations(axes)]
    assert found == [
        "--weighted_averaging --compile --no-offload --tau 4",
        "--no-weighted_averaging --compile --no-offload --tau 4",
    ]


def test_jobs_run_at_once_and_share_the_cores(start, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    # Each run waits until there are two.
    wait = "import time\n"
    wait += "while len(open('began').read().splitlines()) < 2: time.sleep(0.01)"
    began = start("--method edit diloco --seed 1 --jobs 2", wait)
    assert [row["threads"] for row in began] == ["2", "2"]  # of 2 x 4 ranks
    (alone,) = start("--method edit --seed 5 --replicas 2 --shards 3")
    assert alone["ranks"] == "6"


def test_a_warm_up_of_the_whole_run_is_said(start, capsys):
    start("--method minibatch edit --seed 1 --max_steps 60")
    assert "note    edit: --sync_warmup_steps 200 is the whole run" in capsys.readouterr().out


WRONG = {
    "--method edit --taus 4": "unrecognized arguments: --taus 4",
    "--method edit dilco": "invalid choice: 'dilco'",
    "--method edit --tau 4 four": "--tau: invalid int value: 'four'",
    "--method edit --tau 4 0": "--tau 0: must be at least 1",
    "--method minibatch --tau 4 16": "--method minibatch does not have --tau",
    "--method edit --shards 1 3": "shards=3: --shards 3: 4 ranks do not form replicas of 3",
    "--method edit --jobs 0": "--jobs 0: must be at least 1",
    "--method edit --data nowhere": "nowhere",
    "--method edit --out_dir x": "--out_dir: the sweep sets it",
    "--method edit --optimizer muon adamw --lr 0": "muon's rate follows it",
    "--method edit --plain --link_mbps 10": "--link_mbps: only train.py has it",
    "edit --tau 4": "edit: a value stands behind its flag",
}


@each_row("words", WRONG)
def test_wrong_words_are_refused_in_one_line_before_the_first_run(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, OSError), match=WRONG[words]) as caught:
        sweep.main(["try", *words.split()])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@each_row("argv", [[], ["--method", "edit"], ["a/b", "--method", "edit"], [".."]])
def test_a_sweep_has_a_name(argv):
    with pytest.raises(UserError, match="the first word is the name of the sweep"):
        sweep.main(argv)


# ---- real runs ----

PLAIN = "--plain --replicas 2 --tau 2 --sync_warmup_steps 2 --n_layer 1 --n_embd 16 "
PLAIN += "--block_size 8 --eval_batches 1 --dtype fp32"


def begin(tmp_path, words):
    command = [sys.executable, "-m", "lab.sweep", "real", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, stdout=pipe, text=True, start_new_session=True)


def wait_for(condition, process, seconds=300):
    ends = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.05)


def is_empty(group) -> bool:
    """Has every process of the group ended?"""
    try:
        os.killpg(group, 0)
        return False
    except ProcessLookupError:
        return True


@pytest.mark.slow
@each_row("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_or_killed_leaves_no_process_and_goes_on(
    number, tmp_path, corpus_folder
):
    words = f"--method edit --seed 1 2 --jobs 2 --data {corpus_folder} {PLAIN} --max_steps 400"
    first = begin(tmp_path, words.split())
    wait_for(lambda: len(list(tmp_path.glob("out/sweep/real/*/metrics.jsonl"))) == 2, first)
    if number == signal.SIGINT:
        os.killpg(first.pid, number)  # as a terminal does
        assert first.wait(600) == 130
    else:
        first.kill()
        first.wait(600)
    wait_for(lambda: is_empty(first.pid), None)

    second = begin(tmp_path, words.split())
    printed, _ = second.communicate(timeout=900)
    assert second.returncode == 0
    assert "2 runs, 2 to do" in printed and "2/2 | seed=" in printed


@pytest.mark.slow
def test_interrupted_sweep_of_sharded_runs_resumes_and_ends_with_a_table(tmp_path, corpus_folder):
    """torchrun, train.py, Ctrl-C; then once more to the end."""
    short = ranks.flags(data=corpus_folder, max_steps=300, checkpoint_interval=20, eval_batches=1)
    words = "--method edit diloco --seed 1 --jobs 2 --ranks 2".split()
    for name, value in zip(short[::2], short[1::2]):
        if name not in ("--out_dir", "--method", "--seed"):
            words += [name, value]
    first = begin(tmp_path, words)
    wait_for(lambda: list(tmp_path.glob("out/sweep/real/*/checkpoint-*")), first)
    first.send_signal(signal.SIGINT)
    assert first.wait(600) == 130

    second = begin(tmp_path, words)
    printed, _ = second.communicate(timeout=900)
    assert second.returncode == 0
    assert "2 runs, 2 to do" in printed and "| diloco | " in printed
    resumed = 0
    for folder in tmp_path.glob("out/sweep/real/*/"):
        events = [json.loads(line)["event"] for line in (folder / "metrics.jsonl").open()]
        assert events.count("end") == 1
        resumed += events.count("resume")
        assert not list(folder.glob("checkpoint-*"))
    assert resumed >= 1


@pytest.mark.slow
def test_a_plain_run_of_a_sweep_is_that_of_the_plain_program(tmp_path, corpus_folder, monkeypatch):
    words = f"--method edit --seed 1 --data {corpus_folder} {PLAIN} --max_steps 6"
    done = begin(tmp_path, words.split())
    assert done.wait(600) == 0
    (folder,) = tmp_path.glob("out/sweep/real/edit-*")
    command = shlex.split((folder / "command.txt").read_text())
    monkeypatch.chdir(tmp_path)
    sweep.train_plain([*command[3:], "--out_dir", "alone"])
    assert sweep.loss_of("alone") == sweep.loss_of(folder)
