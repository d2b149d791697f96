"""`python -m plain`: its files are those of train.py, wrong flags get a line, and it runs where a
system has no fcntl, no fork and no SIGHUP. test_methods.py compares its numbers."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import sample
from config import UserError
from lab.rows import read_run
from model import ModelConfig
from plain import train
from methods import METHODS
from plain.__main__ import REFUSED, main, read_config
from ranks import ROOT, flags, run_training
from rows import each_row

OPTIONS = dict(method="edit", tau=3, sync_warmup_steps=2, max_steps=8, eval_interval=4)


def rows_of(folder):
    return [json.loads(line) for line in open(Path(folder, "metrics.jsonl"))]


def test_plain_run_has_the_files_of_a_sharded_one(tmp_path, corpus_folder, capsys):
    sharded = run_training(2, corpus_folder, out_dir=tmp_path / "sharded", shards=1, **OPTIONS)
    argv = [*flags(**OPTIONS), "--replicas", "2", "--data", str(corpus_folder)]
    main([*argv, "--out_dir", str(tmp_path / "plain")])
    printed = capsys.readouterr().out

    plain = rows_of(tmp_path / "plain")
    assert {row["event"] for row in plain} == {"config", "step", "sync", "eval", "end"}
    for event in "config", "step", "sync", "eval", "end":
        theirs = sharded.rows(event)
        ours = [row for row in plain if row["event"] == event]
        assert len(ours) == len(theirs)
        assert set(ours[-1]) - {"cosine"} == set(theirs[-1]), event
    assert read_run(tmp_path / "plain")["val_loss"] == pytest.approx(
        read_run(tmp_path / "sharded")["val_loss"], rel=1e-9
    )
    assert printed.count("round ") == 2 and "flagged layers 0 0" in printed

    ours, encoding = sample.load(str(tmp_path / "plain" / "model.pt"))
    theirs, _ = sample.load(str(tmp_path / "sharded" / "model.pt"))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    assert sample.continue_text(ours, encoding, "a", count=3)


def test_record_says_how_much_successive_rounds_move_alike(tmp_path, corpus_folder, monkeypatch):
    moves = []

    def sync(method):
        moves.append(np.mean([d.numpy() for d in method.d()], axis=0))
        return edit_sync(method)

    edit_sync = train.PLAIN["edit"].sync
    monkeypatch.setattr(train.PLAIN["edit"], "sync", sync)
    argv = [*flags(**OPTIONS | {"max_steps": 11}), "--replicas", "2", "--data", str(corpus_folder)]
    main([*argv, "--out_dir", str(tmp_path)])
    first, *found = [row["cosine"] for row in rows_of(tmp_path) if row["event"] == "sync"]
    lengths = [np.linalg.norm(move) for move in moves]
    expected = [moves[k] @ moves[k - 1] / lengths[k] / lengths[k - 1] for k in (1, 2)]
    assert first is None and found == pytest.approx(expected)


@pytest.mark.slow
@each_row("options", [
    dict(method="edit"), dict(method="one_bit_edit", warmup_format="int8")
])  # fmt: skip
def test_plain_run_counts_the_bytes_that_a_sharded_one_sends(options, tmp_path, corpus_folder):
    """But for rows of scalars, scales of blocks and padding."""
    options = OPTIONS | dict(dtype="fp32") | options
    sharded = run_training(2, corpus_folder, out_dir=tmp_path / "sharded", shards=1, **options)
    argv = [*flags(**options), "--replicas", "2", "--data", str(corpus_folder)]
    main([*argv, "--out_dir", str(tmp_path / "plain")])
    plain = [row["sync_bytes"] for row in rows_of(tmp_path / "plain") if row["event"] == "eval"]
    assert plain == pytest.approx([row["sync_bytes"] for row in sharded.rows("eval")], rel=0.2)


def test_flags_without_sense_in_one_process_are_refused():
    fields = METHODS["edit"].Config.__dataclass_fields__
    for name in REFUSED.split():
        argv = [f"--{name}"]
        if not isinstance(fields[name].default, bool):
            argv.append({"backend": "gloo"}.get(name, "2"))
        with pytest.raises(UserError, match=f"--{name}: only train.py has it"):
            read_config(argv)
    for argv in ["--method=a_edit"], ["--replicas=2", "--slow_replica=1:2"]:
        with pytest.raises(UserError, match="--no-virtual_clock: a_edit and --slow_replica have"):
            read_config([*argv, "--no-virtual_clock"])


def test_every_flag_is_read_or_refused():
    """No flag is swallowed in silence."""
    read = "".join(path.read_text() for path in (ROOT / "plain").glob("*.py"))
    known = {"model", *ModelConfig.__dataclass_fields__, *REFUSED.split()}
    for method in METHODS.values():
        for name in method.Config.__dataclass_fields__.keys() - known:
            assert re.search(rf"\bf\.{name}\b|f, \"{name}\"", read), name


def test_earlier_run_is_kept_unless_it_may_be_overwritten(tmp_path, corpus_folder):
    argv = [*flags(**OPTIONS), "--replicas=2", f"--data={corpus_folder}", f"--out_dir={tmp_path}"]
    main(argv)
    before = (tmp_path / "model.pt").read_bytes()
    with pytest.raises(UserError, match="--overwrite deletes it"):
        main(argv)
    assert (tmp_path / "model.pt").read_bytes() == before
    main([*argv, "--seed=1", "--overwrite"])
    assert (tmp_path / "model.pt").read_bytes() != before


def test_run_goes_on_from_a_model_as_a_sharded_one_does(tmp_path, corpus_folder):
    """With --init_from, whose model has one block, not the two of --n_layer."""
    first = tmp_path / "first"
    options = OPTIONS | dict(data=corpus_folder, n_layer=1)
    main([*flags(**options), "--replicas=2", f"--out_dir={first}"])
    later = OPTIONS | dict(init_from=first / "model.pt", n_layer=1, seed=2)
    sharded = run_training(2, corpus_folder, out_dir=tmp_path / "sharded", shards=1, **later)
    argv = [*flags(**later), "--replicas=2", f"--data={corpus_folder}"]
    main([*argv, f"--out_dir={tmp_path / 'plain'}"])
    ours = [row["val_loss"] for row in rows_of(tmp_path / "plain") if row["event"] == "eval"]
    theirs = [row["val_loss"] for row in sharded.rows("eval")]
    assert ours == pytest.approx(theirs, rel=1e-9)
    start = [row["val_loss"] for row in rows_of(first) if row["event"] == "eval"]
    assert ours[0] < start[-1]

    with pytest.raises(UserError, match="has another shape"):
        main([*argv, f"--out_dir={tmp_path / 'wide'}", "--n_embd=12"])
    with pytest.raises(UserError, match="--overwrite deletes the model of --init_from"):
        main([*argv, f"--out_dir={first}", "--overwrite"])
    assert (first / "model.pt").exists()


def test_clock_of_a_slow_replica_is_virtual(tmp_path, corpus_folder):
    options = OPTIONS | dict(method="a_edit", tau_time_s=4.0, slow_replica="1:2")
    argv = [*flags(**options), "--replicas=2", f"--data={corpus_folder}", f"--out_dir={tmp_path}"]
    main(argv)
    rows = rows_of(tmp_path)
    assert [row["steps"] for row in rows if row["event"] == "sync"][0] == [4, 2]
    # warm-up: two steps of 2 s; a round: 4 s
    assert [row["train_s"] for row in rows if row["event"] == "eval"] == [8.0, 12.0]


def test_threads_change_no_bit(tmp_path, corpus_folder, monkeypatch):
    """Three replicas on two threads."""
    models = []
    for threads in 1, 2:
        monkeypatch.setattr(train, "THREADS", threads)
        out_dir = tmp_path / str(threads)
        argv = [*flags(**OPTIONS), "--replicas=3", f"--data={corpus_folder}", "--dtype=fp32"]
        main([*argv, f"--out_dir={out_dir}"])
        models.append(torch.load(out_dir / "model.pt")["model"])
    for name, value in models[0].items():
        assert torch.equal(models[1][name], value)
    assert isinstance(train.map_in_threads(3, "cpu").__self__, ThreadPoolExecutor)


@each_row("dtype", ["fp32", "bf16"])
def test_lower_precision_trains_alike(dtype, tmp_path, corpus_folder):
    losses = {}
    for each in "fp64", dtype:
        out_dir = tmp_path / each
        argv = [*flags(**OPTIONS), "--replicas=2", f"--data={corpus_folder}"]
        main([*argv, f"--out_dir={out_dir}", f"--dtype={each}"])
        losses[each] = read_run(out_dir)["val_loss"][-1]
    close = {"fp32": 1e-5, "bf16": 1e-2}
    assert losses[dtype] == pytest.approx(losses["fp64"], rel=close[dtype])
    assert losses[dtype] != losses["fp64"]


# ---- systems without fcntl, fork, SIGHUP ----

ELSEWHERE = """
import mmap, multiprocessing, os, platform, runpy, signal, sys
import numpy, torch            # their own code may look for what is taken away here
sys.modules |= {"fcntl": None, "resource": None}
for module, names in (
    (os, ["fork", "forkpty", "register_at_fork", "sched_getaffinity", "killpg", "memfd_create"]),
    (signal, ["SIGHUP", "SIGALRM", "setitimer", "siginterrupt"]),
    (mmap, [name for name in dir(mmap) if name.startswith("MADV")]),
):
    for name in names:
        delattr(module, name)
for name in list(vars(torch.distributed)):  # a torch without collectives
    if name.startswith(("all_", "broadcast", "gather", "reduce", "scatter", "init_process")):
        delattr(torch.distributed, name)
torch.distributed.is_available = lambda: False
platform.system = lambda: "Windows"
del sys.argv[0]
multiprocessing.set_start_method("spawn")
path = sys.argv[0]
if path.endswith(".py"):
    runpy.run_path(path, run_name="__main__")
else:
    runpy.run_module(path, run_name="__main__", alter_sys=True)
assert "plumbing.posix" not in sys.modules
"""


def run_elsewhere(*argv):
    """A program as on Windows or macOS, as far as this can be simulated: what it prints. Files have
    no encoding by default but ASCII: one that is not named is seen."""
    command = [sys.executable, "-c", ELSEWHERE, *map(str, argv)]
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | locale, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_programs_of_one_process_run_without_posix(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("ein schöner Text, 再び, again. " * 200, encoding="utf-8")
    run_elsewhere("data.py", "--input", text, "--out", tmp_path / "tokens")
    argv = [*flags(**OPTIONS), f"--data={tmp_path / 'tokens'}"]
    for seed in 1, 2:
        own = [f"--seed={seed}", f"--out_dir={tmp_path / f'out{seed}'}"]
        printed = run_elsewhere("plain", *argv, *own)
        assert "done | 8 steps" in printed
    runs = tmp_path / "out1", tmp_path / "out2"
    table = run_elsewhere("lab.table", *runs, "--out", tmp_path / "table")
    assert "edit" in table or "+-" in table
    files = {path.name for path in tmp_path.glob("table.*")}
    picture = {"table.svg"} if importlib.util.find_spec("matplotlib") else set()
    assert files == {"table.md", "table.csv"} | picture
    model = tmp_path / "out1" / "model.pt"
    assert run_elsewhere("sample.py", "--model", model, "--tokens", "3", "--prompt", "é")
    assert "validation loss" in run_elsewhere("one_page.py")


def test_model_without_a_record_is_no_less_an_earlier_run(tmp_path, corpus_folder):
    (tmp_path / "model.pt").write_text("precious")
    argv = [*flags(**OPTIONS), "--data", str(corpus_folder), "--out_dir", str(tmp_path)]
    with pytest.raises(UserError, match="has an earlier run: --overwrite deletes it"):
        main(argv)
    assert (tmp_path / "model.pt").read_text() == "precious"


def test_wrong_flag_ends_the_program_with_a_line(tmp_path):
    command = [sys.executable, "-m", "plain", "--resume", "auto"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "--resume: only train.py has it" in line
