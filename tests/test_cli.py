"""Wrong input: one clear line, exit code 2 on every rank, no traceback, no hang, nothing left."""

import ctypes
import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch

import bench
import data
import ranks
import sample
import simulate
import train
from plumbing import launch
from plumbing.config import Config, parse, run_command
from ranks import ROOT, Launch, flags

TRAIN = """
--learning_rate 1                  | --learning_rate
--lr fast                          | --lr
--method adam                      | --method
edit                               | edit
--tau 0                            | --tau 0: must be at least 1
--lr nan                           | --lr nan
--outer_lr=-1                      | --outer_lr -1
--pseudo_grad_clip 0               | --pseudo_grad_clip 0.0: must be above 0
--max_steps DIGITS                 | --max_steps 999
--timeout_s 1e14                   | --timeout_s 1000
--batch_size 1e10                  | --batch_size
--batch_size 2000000000            | a rank needs about
--n_embd 20000 --n_head 100 --n_layer 500 | a rank needs about
--block_size 1000000000            | lower --block_size
--shards 3                         | --shards 3: 1 ranks do not form
--replicas 2                       | --replicas 2 --shards 1
--n_head 2 --n_embd 6              | --n_embd 6
--slow_replica 1:2                 | --slow_replica 1:2
--random_lag fast                  | --random_lag fast
--random_tokens 1:2:3              | --random_tokens 1:2:3: must be R:FIRST:LAST, 0 <= R <= 0
--random_tokens 0:0:3              | 1 <= FIRST
--random_tokens 0:3:2              | FIRST 3 is after LAST 2
--scale_lr 0:1:2                   | must be R:FIRST:LAST:FACTOR
--scale_lr 0:200:201:100           | gradients are averaged
--scale_lr 0:3:4:9 --method minibatch | gradients are averaged
--virtual_clock --method noloco    | it works with minibatch, post_local_sgd, slowmo, diloco, edit
--virtual_clock --link_mbps 10     | leave out --link_mbps
--step_weighting norm              | --step_weighting
--resume nowhere                   | --resume nowhere: there is no checkpoint
--out_dir NAME                     | File name too long
--out_dir a\x07b                    | --out_dir 'a\\x07b': must be printable
--out_dir /dev/null/run            | error: /dev/null/run: Not a directory
--backend nccl                     | --backend nccl
--device cuda                      | use --device cpu
--data nowhere                     | --data nowhere: No such file
--data \udcff                      | --data
--resume IN/locked/run             | run: Permission denied
--resume IN/locked/checkpoint-00000001 | locked: Permission denied
--out_dir IN/locked/run            | run: Permission denied
--out_dir IN/read-only/run         | run: Permission denied
--data IN/locked/corpus            | corpus: Permission denied
--method streaming_diloco --tau 8 --fragments 3 | --fragments 3: must divide --tau 8
--method streaming_diloco --tau 8 --fragments 2 --delay 4 | must be below tau / fragments = 4
--method streaming_diloco --tau 8 --fragments 8 --delay 0 | more than the model's layers
--method streaming_diloco --alpha 1.5 | --alpha 1.5: must be at most 1
--method streaming_diloco --alpha=-0.5 | --alpha
--method streaming_diloco --quantize fp8 | --quantize
--method noloco                    | --method noloco: it needs at least two replicas
--method co2 --outer_momentum 1    | --outer_momentum
RANK=1                             | do not describe a run
RANK=0 WORLD_SIZE=2                | do not describe a run
RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=1 LOCAL_RANK=x | do not describe a run
RANK=2 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1 | do not describe a run
"""
DATA = """
                                   | --out
--input IN/nowhere --out new       | No such file
--input IN --out new               | Is a directory
--input IN/latin.txt --out new     | not UTF-8
--input IN/empty.txt --out new     | no text
--input IN/bad.jsonl --out new     | line 2 is not a JSON object
--input IN/deep.jsonl --out new    | line 2 is not a JSON object
--input IN/half-pair.jsonl --out new | line 2 is not a JSON object
--input IN/text.txt --out IN       | exists already
--input IN/text.txt --out NAME     | File name too long
--input IN/text.txt --out new --max_tokens nan | --max_tokens
--input IN/locked/text.txt --out new | Permission denied
--input IN/text.txt --out IN/locked/new | Permission denied
--input IN/text.txt --out IN/read-only/new | Permission denied
--input IN/text.txt --dataset fineweb-edu --out new | not allowed with
"""
SAMPLE = """
                                   | --model
--model IN/nowhere                 | No such file
--model IN                         | Is a directory
--model IN/text.txt                | not a model.pt
--model IN/half.pt                 | not a model.pt
--model IN/foreign.pt              | not a model.pt
--model IN/pickle.pt               | not a model.pt
--model IN/locked/model.pt         | model.pt: Permission denied
--model x --seed DIGITS            | --seed
"""
BENCH = """
--parts sync                       | --parts sync
--parts speed                      | --parts speed
--repeats 0                        | --repeats 0
--method edit                      | --method
--json /dev/null/rows.json         | /dev/null
--json IN/locked/rows.json         | rows.json: Permission denied
"""
TABLE = [
    (program, *(part.strip() for part in line.split("|")))
    for program, lines in [(train, TRAIN), (data, DATA), (sample, SAMPLE), (bench, BENCH)]
    for line in lines.strip("\n").splitlines()
]
assert len(TABLE) >= 60


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder of wrong input: texts, models."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.save({"model": {}}, folder / "foreign.pt")
    half = (folder / "foreign.pt").read_bytes()[:500]
    files = {"text.txt": b"some text " * 100, "empty.txt": b"", "latin.txt": b"\xe9"}
    files |= {"half.pt": half, "pickle.pt": pickle.dumps(os.system, 2)}
    lines = {"bad": b"{", "half-pair": b'{"text": "\\ud800"}', "deep": b'{"text": ' + b"[" * 10**5}
    files |= {f"{name}.jsonl": b'{"text": "good"}\n' + line for name, line in lines.items()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    rights = {"locked": 0, "read-only": 0o500}
    for name, mode in rights.items():
        (folder / name).mkdir(mode)
    yield folder
    [(folder / name).chmod(0o700) for name in rights]  # pytest removes them


@pytest.fixture
def ordinary_user():
    """Takes away this thread's capabilities 1 and 2 (capabilities(7)): without them root, too, is
    refused what the modes of files and folders forbid."""
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; again for 32 and up
    assert libc.capget(header, rights) == 0
    effective = rights[0]
    rights[0] &= ~0b110
    assert libc.capset(header, rights) == 0
    yield
    rights[0] = effective
    assert libc.capset(header, rights) == 0


def run_here(program, argv, monkeypatch):
    """The program's main() in this process: its exit code."""

    def leave(shutdown, code, line):
        print(f"{shutdown.program}: {line}", file=sys.stderr)
        sys.exit(code)

    monkeypatch.setattr(launch.Shutdown, "leave", leave)
    monkeypatch.setattr(launch, "STOPS", set())
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # ranks above 0 replace it
    monkeypatch.setattr(sys, "argv", [program.__name__, *argv])
    try:
        if program in (train, bench):
            return program.main(argv)
        return run_command(f"{program.__name__}.py", program.main)
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize(
    "program, line, message", TABLE, ids=[f"{p.__name__} {line}"[:60] for p, line, _ in TABLE]
)
def test_wrong_input_is_refused_in_one_line(
    program, line, message, inputs, ordinary_user, corpus_folder, tmp_path, monkeypatch, capsys
):
    """A word NAME=value sets a variable of the environment. This machine has no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "has_native_bf16", lambda device: False)
    monkeypatch.setattr(launch.shm, "machine_id", lambda: "")
    line = line.replace("DIGITS", "9" * 400).replace("NAME", "n" * 300)
    argv = [re.sub("^IN", str(inputs), word) for word in line.split()]
    while argv and argv[0][0].isupper():
        monkeypatch.setenv(*argv.pop(0).split("="))
    if program is train:  # would end soon if it was not refused
        argv = [*flags(max_steps=1, data=corpus_folder), *argv]
    if program is bench:
        argv = [*"--device cpu --parts step --repeats 1 --n_layer 1".split(), *argv]
    assert run_here(program, argv, monkeypatch) == 2
    written = capsys.readouterr()
    (error,) = written.err.splitlines()
    assert error.startswith(f"{program.__name__}.py: error: ") and message in error
    assert len(error) < 600 and written.out == "" and not list(tmp_path.iterdir())


def differ_in_lr(argv, rank, *more):
    ranks._command([*argv, f"--lr=0.{rank}1"], rank, *more)


@pytest.mark.parametrize(
    "function, argv, message",
    [
        (ranks._command, ["--shards", "3"], "--shards 3"),
        (ranks._command, ["--out_dir", "/dev/null/run"], "/dev/null/run"),  # only rank 0 notices it
        (ranks._command, ["--data", "\udcff"], "--data"),
        (differ_in_lr, [], "the ranks differ"),
        (ranks.run_bench, ["--json", "/dev/null/rows.json"], "/dev/null"),
    ],
)
def test_every_rank_exits_with_2_after_one_line(function, argv, message, tmp_path, corpus_folder):
    argv = flags(data=corpus_folder, out_dir=tmp_path / "out") + argv
    run = Launch(4, tmp_path, *argv, special={rank: (function,) for rank in range(4)})
    assert run.wait() == [2] * 4 and run.lines("out") == []
    (line,) = run.lines("err")
    assert ".py: error: " in line and message in line
    assert not (tmp_path / "out").exists()


def test_programs_end_with_the_right_code_and_one_line_or_none(corpus_folder, inputs, tmp_path):
    """Real processes, side by side: standard output that is full, closed, or a closed pipe (a quiet
    end, as with `| head -1`), and wrong input under torchrun."""
    run = ["train.py", *flags(data=corpus_folder, max_steps=10**6)]
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 1".split()
    commands = [  # standard output, or the launcher; command; exit code; the line
        ("full", [*run, "--out_dir", tmp_path / "full"], 2, "No space left"),
        ("pipe", [*run, "--out_dir", tmp_path / "pipe"], 141, ""),
        ("pipe", ["data.py", "--input", inputs / "text.txt", "--out", tmp_path / "new"], 141, ""),
        ("closed", [*run, "--out_dir", tmp_path / "closed", "--max_steps", "2"], 0, ""),
        ("torchrun", [*torchrun, "bench.py", "--parts", "no"], 1, "bench.py: error: --parts no"),
    ]
    reader, pipe = os.pipe()
    os.close(reader)
    shell = {"closed": '"$@" >&-'}
    outputs = {"full": os.open("/dev/full", os.O_WRONLY), "pipe": pipe}
    started = [
        subprocess.Popen(
            ["bash", "-c", shell.get(kind, '"$@"'), "-", sys.executable, *command],
            cwd=ROOT, stdout=outputs.get(kind), stderr=subprocess.PIPE, text=True,
        )
        for kind, command, *_ in commands
    ]  # fmt: skip
    for process, (kind, command, code, message) in zip(started, commands):
        _, errors = process.communicate(timeout=90)
        assert process.returncode == code, (kind, command, process.returncode, errors)
        lines = errors.splitlines()
        if kind == "torchrun":  # its report, too
            assert "exitcode  : 2" in errors and 'bench.py", line' not in errors
            lines = [line for line in lines if "bench.py: error" in line]
        assert len(lines) == bool(message) and message in errors, (command, errors)


def test_help_lists_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as done:
        parse(["--help"], train.METHODS, simulate.Config)
    text = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0
    configs = [Config, simulate.Config, *(method.Config for method in train.METHODS.values())]
    for f in (f for config in configs for f in dataclasses.fields(config)):
        assert f"--{f.name}" in text, f.name
        assert isinstance(f.default, (bool, str)) or f"{f.default}" in text, f.name
    assert "slowmo: 0.5, diloco: 0.8, " in text  # methods differ


def test_run_leaves_a_record_and_a_model(tmp_path, corpus_folder, monkeypatch, capsys):
    argv = flags(data=corpus_folder, out_dir=tmp_path / "run", max_steps=7, tau=2)
    argv += "--sync_warmup_steps 1 --log_interval 3 --eval_interval 3 --method edit".split()
    run = Launch(1, tmp_path, *argv)
    assert (run.wait(), run.lines("err")) == ([0], [])
    rows = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    events = [(row["event"], row.get("step")) for row in rows]
    assert events[0][0] == "config" and events[-1] == ("end", 7)
    assert [step for event, step in events if event == "step"] == [1, 3, 6, 7]
    assert [step for event, step in events if event == "sync"] == [3, 5, 7]
    # due at 3 and 6, at round ends 3, 5, 7
    assert [step for event, step in events if event == "eval"] == [3, 7]
    expected = {
        "step": "step tokens loss lr grad_norm step_ms train_s tokens_per_s shard_bytes sync_bytes",
        "sync": "round step tau steps loss pseudo_grad_norm weight dropped clip stall_ms "
        "wait_others_ms wait_link_ms sync_bytes",
        "eval": "step tokens train_s val_loss bits_per_byte sync_bytes",
        "end": "step val_loss train_s tokens_per_s peak_memory_bytes exit",
    }
    for row in rows[1:]:
        assert row.keys() == {"event", *expected[row["event"]].split()}
    assert rows[0]["method"] == "edit" and rows[0]["tau"] == 2 and rows[0]["world_size"] == 1
    printed = "\n".join(run.lines("out"))
    assert "sync 0003 | tau 2 |" in printed and "sample  def " in printed
    argv = ["--model", str(tmp_path / "run" / "model.pt"), "--tokens", "3", "--prompt", "abc"]
    assert run_here(sample, argv, monkeypatch) is None
    assert capsys.readouterr().out.startswith("abc")
