"""Wrong input: one clear line, exit code 2 on every rank, no traceback, no hang, nothing left."""

import dataclasses
import json
import os
import pickle
import signal
import socket
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
from plumbing.config import Config, UserError, parse, run_command
from ranks import ROOT, TINY, Launch, flags

# Stands between torchrun and a program: passes on signals and the exit code, and notes the code.
RANK_SCRIPT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:]])
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
code = child.wait()
open(os.environ["CODES"] + os.environ["RANK"], "w").write(str(code))
sys.exit(code)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def launch_ranks(world_size, folder, *words):
    """Exit codes of the ranks, as torchrun sees them, and lines of stdout and stderr."""
    between = folder / "between.py"
    between.write_text(RANK_SCRIPT)
    environment = os.environ | {"CODES": f"{folder}/code-"}
    command = [*TORCHRUN, "--standalone", "--nproc_per_node", str(world_size), between, *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment
    )
    codes = [int((folder / f"code-{rank}").read_text()) for rank in range(world_size)]
    return codes, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, corpus_folder):
    """A folder of wrong input: corpora, texts, models."""
    folder = tmp_path_factory.mktemp("inputs")
    tokens = (corpus_folder / "tokens.bin").read_bytes()
    meta = json.loads((corpus_folder / "meta.json").read_text())
    short = meta | {"tokens": 10, "train_tokens": 9}
    corpora = {
        "half": (tokens[: len(tokens) // 4 * 2], json.dumps(meta)),
        "short": (tokens[:20], json.dumps(short)),
        "empty": (b"", json.dumps(meta | {"tokens": 0, "train_tokens": 0})),
        "no-meta": (tokens, None),
        "broken-meta": (tokens, "{"),
        "nested-meta": (tokens, "[" * 100000),
        "foreign-token": (b"\xff\xff" + tokens[2:], json.dumps(meta)),
    }
    for name, (tokens, text) in corpora.items():
        (folder / name).mkdir()
        (folder / name / "tokens.bin").write_bytes(tokens)
        if text is not None:
            (folder / name / "meta.json").write_text(text)
    (folder / "text.txt").write_text("some text " * 100)
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes("\u00e9".encode("latin-1"))
    lines = {"bad": "{", "no-text": '{"a": 1}', "number": '{"text": 1}'}
    lines |= {"deep": '{"text": ' + "[" * 100000, "half-pair": '{"text": "\\ud800"}'}
    for name, line in lines.items():
        (folder / f"{name}.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    torch.save({"model": {}}, folder / "foreign.pt")
    content = (folder / "foreign.pt").read_bytes()
    (folder / "half.pt").write_bytes(content[: len(content) // 2])
    (folder / "pickle.pt").write_bytes(pickle.dumps(os.system, protocol=2))
    return folder


LONG = "n" * 300
TRAIN = """
--learning_rate 1                  | --learning_rate
--max_step 1                       | --max_step
--method adam                      | --method
--lr fast                          | --lr
--max_steps 1.5                    | --max_steps
--lr                               | --lr
edit                               | edit
--tau 0                            | --tau 0: must be at least 1
--lr -0.1                          | --lr -0.1: must be at least 0
--lr nan                           | --lr nan
--outer_lr=-1                      | --outer_lr -1
--outer_lr 1e300                   | --outer_lr 1e+300
--outer_momentum 1                 | --outer_momentum 1
--pseudo_grad_clip 0               | --pseudo_grad_clip 0.0: must be above 0
--max_steps DIGITS                 | --max_steps 999
--max_steps DIGITSDIGITSDIGITS     | --max_steps
--batch_size 1e10                  | --batch_size
--batch_size 10000000000           | --batch_size 10000000000
--batch_size 2000000000            | a rank needs about
--n_layer 2000000000               | --n_layer 2000000000
--n_embd 2000000000 --n_head 1     | memory
--n_embd 20000 --n_head 100 --n_layer 500 | a rank needs about
--block_size 1000000000            | lower --block_size
--accum 2000000000                 | --accum 2000000000
--eval_batches 2000000000          | --eval_batches 2000000000
--keep 0                           | --keep 0
--shards 3                         | --shards 3: 1 ranks do not divide
--replicas 2                       | --replicas 2 --shards 1
--seed 2000000000000000            | --seed 2000000000000000
--n_head 3 --n_embd 128            | --n_head 3
--n_head 2 --n_embd 6              | --n_embd 6
--tau_time_s 0                     | --tau_time_s 0.0: must be above 0
--timeout_s 1e14                   | --timeout_s
--slow_replica 1:2                 | --slow_replica 1:2
--slow_replica fast                | --slow_replica fast
--random_lag 2:1                   | --random_lag 2:1
--link_mbps -1                     | --link_mbps -1
--backend nccl                     | --backend nccl
--dry_run --resume auto            | --dry_run --resume
--resume nowhere                   | --resume nowhere: there is no checkpoint
--out_dir NAME                     | File name too long
--out_dir /dev/null/run            | --out_dir /dev/null/run: Not a directory
--out_dir IN/text.txt              | --out_dir
--out_dir a\x07b                    | --out_dir 'a\\x07b': must be printable
--data nowhere                     | --data nowhere: No such file
--data NAME                        | File name too long
--data \udcff                      | --data
--data IN/text.txt                 | --data
--data IN/half                     | damaged
--data IN/short                    | lower --block_size
--data IN/empty                    | damaged
--data IN/no-meta                  | No such file
--data IN/broken-meta              | damaged
--data IN/nested-meta              | damaged
--data IN/foreign-token            | vocabulary
"""
DATA = """
                                   | --out
--out new                          | one of the arguments
--input IN/text.txt                | --out
--input IN/nowhere --out new       | No such file
--input IN/NAME --out new          | File name too long
--input IN --out new               | Is a directory
--input IN/latin.txt --out new     | not UTF-8
--input IN/empty.txt --out new     | no text
--input IN/bad.jsonl --out new     | line 2 is not a JSON object
--input IN/no-text.jsonl --out new | line 2 is not a JSON object
--input IN/number.jsonl --out new  | line 2 is not a JSON object
--input IN/deep.jsonl --out new    | line 2 is not a JSON object
--input IN/half-pair.jsonl --out new | line 2 is not a JSON object
--input IN/text.txt --out IN/half  | exists already
--input IN/text.txt --out NAME     | File name too long
--input IN/text.txt --out IN/text.txt/new | Not a directory
--input IN/text.txt --out new --max_tokens 0 | --max_tokens
--input IN/text.txt --out new --max_tokens nan | --max_tokens
--input IN/text.txt --out new --tokenizer bert | --tokenizer
--dataset c4 --out new             | --dataset
--input IN/text.txt --dataset fineweb-edu --out new | not allowed with
"""
SAMPLE = """
                                   | --model
--model IN/nowhere                 | No such file
--model NAME                       | File name too long
--model IN                         | Is a directory
--model IN/text.txt                | not a model.pt
--model IN/half.pt                 | not a model.pt
--model IN/foreign.pt              | not a model.pt
--model IN/pickle.pt               | not a model.pt
--model x --tokens -1              | --tokens -1
--model x --tokens ten             | --tokens
--model x --temperature -1         | --temperature -1
--model x --temperature nan        | --temperature nan
--model x --seed -1                | --seed -1
--model x --seed DIGITS            | --seed
"""
BENCH = """
--parts speed                      | --parts speed
--parts sync                       | --parts sync
--repeats 0                        | --repeats 0
--steps two                        | --steps
--vocab_size 1                     | --vocab_size 1
--method edit                      | --method
--n_layer 0                        | --n_layer 0
--shards 3                         | --shards 3
--learning_rate 1                  | --learning_rate
--json /dev/null/rows.json         | /dev/null
--json IN                          | Is a directory
--json NAME                        | File name too long
"""
TABLE = [
    (program, *(part.strip() for part in line.split("|")))
    for program, lines in [(train, TRAIN), (data, DATA), (sample, SAMPLE), (bench, BENCH)]
    for line in lines.strip("\n").splitlines()
]


def run_here(program, argv, monkeypatch):
    """The program's main() in this process: its exit code."""

    def leave(shutdown, code, line):
        print(f"{shutdown.program}: {line}", file=sys.stderr)
        sys.exit(code)

    monkeypatch.setattr(launch.Shutdown, "leave", leave)
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    handlers = {number: signal.getsignal(number) for number in launch.STOPS}
    try:
        if program in (train, bench):
            program.main(argv)
        else:
            monkeypatch.setattr(sys, "argv", [program.__name__, *argv])
            run_command(f"{program.__name__}.py", program.main)
    except SystemExit as left:
        return left.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def words(line, inputs):
    """Words of a line of the tables, with what its capitals stand for."""
    line = line.replace("DIGITS", "9" * 400).replace("NAME", LONG).replace("IN", str(inputs))
    return line.split()


@pytest.mark.parametrize(
    "program, line, message", TABLE, ids=[f"{p.__name__} {line}"[:60] for p, line, _ in TABLE]
)
def test_wrong_input_is_refused_in_one_line(
    program, line, message, inputs, corpus_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    argv = words(line, inputs)
    if program is train:  # would end soon if it was not refused
        argv = [*TINY, "--max_steps", "1", "--data", str(corpus_folder), *argv]
    if program is bench:
        argv = [*"--device cpu --parts step --repeats 1 --n_layer 1".split(), *argv]
    assert run_here(program, argv, monkeypatch) == 2
    written = capsys.readouterr()
    (error,) = written.err.splitlines()
    assert error.startswith(f"{program.__name__}.py: error: ") and message in error
    assert len(error) < 600 and written.out == "" and not list(tmp_path.iterdir())


def test_table_of_wrong_input_is_long_enough():
    assert len(TABLE) >= 90 and {program for program, *_ in TABLE} == {train, data, sample, bench}


ENVIRONMENTS = [
    "RANK=1", "RANK=0 WORLD_SIZE=2", "RANK=one", "WORLD_SIZE=0", "LOCAL_RANK=x",
    "RANK=2 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1", "RANK=-1 WORLD_SIZE=1",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=port",
]  # fmt: skip


@pytest.mark.parametrize("variables", ENVIRONMENTS)
def test_environment_that_describes_no_run_is_refused(variables, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # ranks above 0 replace it
    assert run_here(train, ["--max_steps", "1"], monkeypatch) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "do not describe a run" in error


def test_out_dir_under_an_unreadable_folder_is_refused(tmp_path, corpus_folder):
    """As another user, because root may read everything."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    argv = flags(data=corpus_folder, out_dir=closed / "run")
    opened = [path for path in (corpus_folder, *corpus_folder.parents) if path.stat().st_uid == 0]
    modes = {path: path.stat().st_mode for path in opened if "pytest" in str(path)}
    modes |= {path: path.stat().st_mode for path in (tmp_path,)}
    root = os.geteuid() == 0
    try:
        if root:
            [os.chmod(path, 0o755) for path in modes]
            os.seteuid(65534)
        with pytest.raises(UserError, match="Permission denied") as error:
            launch.set_up(argv, train.METHODS, 0, 1)
    finally:
        if root:
            os.seteuid(0)
            [os.chmod(path, mode) for path, mode in modes.items()]
    assert "--out_dir" in str(error.value) or str(closed) in str(error.value)


def test_device_or_dtype_that_is_not_there_is_refused(monkeypatch):
    def resolve(*argv):
        config, *_ = parse(argv, train.METHODS, simulate.Config)
        launch.resolve_device(config)
        return config

    monkeypatch.setattr(launch, "has_native_bf16", lambda device: False)
    with pytest.raises(UserError, match="--dtype fp32"):
        resolve("--dtype", "bf16", "--device", "cpu")
    assert resolve("--device", "cpu").dtype == "fp32"  # auto
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="--device cpu"):
        resolve("--device", "cuda")
    monkeypatch.setattr(launch.shm, "machine_id", lambda: "")
    with pytest.raises(UserError, match="--backend shm"):
        resolve("--device", "cpu", "--backend", "shm")


# ---- several ranks ----


def differ_in_lr(argv, rank, *more):
    ranks._command([*argv, f"--lr=0.{rank}1"], rank, *more)


ALL_RANKS = {
    "impossible mesh": (4, ["--shards", "3"], {}, "--shards 3"),
    "bad flag": (2, ["--tau", "0"], {}, "--tau 0"),
    "foreign token": (2, ["--data", "IN/foreign-token"], {}, "vocabulary"),
    # Only rank 0 can notice this one.
    "unwritable out_dir": (2, ["--out_dir", "/dev/null/run"], {}, "--out_dir"),
    "different flags": (2, [], {0: (differ_in_lr,), 1: (differ_in_lr,)}, "the ranks differ"),
    "no checkpoint": (2, ["--resume", "nowhere"], {}, "--resume nowhere"),
    "no bytes": (2, ["--data", "\udcff"], {}, "--data"),
}


@pytest.mark.parametrize("world_size, argv, special, message", ALL_RANKS.values(), ids=ALL_RANKS)
def test_every_rank_exits_with_2_after_one_line(
    world_size, argv, special, message, inputs, tmp_path, corpus_folder
):
    argv = [word.replace("IN", str(inputs)) for word in argv]
    argv = [*TINY, "--data", str(corpus_folder), "--out_dir", str(tmp_path / "out"), *argv]
    run = Launch(world_size, tmp_path, *argv, special=special)
    assert run.wait() == [2] * world_size and run.lines("out") == []
    (line,) = run.lines("err")
    assert line.startswith("train.py: error: ") and message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["train.py", "--learning_rate", "1"], "--learning_rate"),
        (["bench.py", "--device", "cpu", "--json", "/dev/null/rows.json"], "/dev/null"),
    ],
)
def test_torchrun_sees_exit_code_2_of_every_rank_after_one_line(words, message, tmp_path):
    codes, out, lines = launch_ranks(2, tmp_path, *words)
    assert codes == [2, 2] and out == []
    (ours,) = [line for line in lines if f"{words[0]}: error:" in line]
    assert message in ours
    assert not any(f'{words[0]}", line' in line for line in lines)  # a traceback of ours


# ---- standard output that is full or closed ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus_folder):
    """The folder of a short run on one rank."""
    folder = tmp_path_factory.mktemp("trained")
    argv = flags(data=corpus_folder, out_dir=folder / "run", max_steps=7, tau=2)
    argv += "--sync_warmup_steps 1 --log_interval 3 --eval_interval 3 --method edit".split()
    run = Launch(1, folder / "log", *argv)
    assert (run.wait(), run.lines("err")) == ([0], [])
    (folder / "printed").write_text("\n".join(run.lines("out")))
    return folder


def test_full_or_closed_output_ends_a_program_with_one_line_or_none(
    trained, corpus_folder, inputs, tmp_path
):
    """Real processes, side by side. A closed pipe is a quiet end, as with `| head -1`."""
    model = ["sample.py", "--model", trained / "run" / "model.pt"]
    run = ["train.py", *flags(data=corpus_folder, max_steps=10**6)]
    commands = [  # what is wrong with the output; command; exit code
        ("full", [*run, "--out_dir", tmp_path / "full"], 2),
        ("full", [*run, "--dry_run"], 2),
        ("full", ["train.py", "--help"], 2),
        ("full", [*model, "--tokens", "1"], 2),
        ("pipe", [*run, "--out_dir", tmp_path / "pipe"], 141),
        ("pipe", ["data.py", "--input", inputs / "text.txt", "--out", tmp_path / "corpus"], 141),
        ("closed", [*run, "--out_dir", tmp_path / "closed", "--max_steps", "2"], 0),
    ]
    reader, pipe = os.pipe()
    os.close(reader)
    outputs = {"full": os.open("/dev/full", os.O_WRONLY), "pipe": pipe, "closed": None}
    started = [
        subprocess.Popen(
            ["bash", "-c", '"$@"' + (" >&-" if kind == "closed" else ""), "-", sys.executable]
            + list(map(str, command)),
            cwd=ROOT, stdout=outputs[kind], stderr=subprocess.PIPE, text=True,
        )
        for kind, command, _ in commands
    ]  # fmt: skip
    for process, (kind, command, code) in zip(started, commands):
        _, errors = process.communicate(timeout=90)
        assert process.returncode == code, (kind, command, process.returncode, errors)
        assert "No space left" in errors if kind == "full" else errors == "", (command, errors)
        assert errors.count("\n") == (kind == "full"), (command, errors)


# ---- right input ----


def test_help_lists_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as done:
        parse(["--help"], train.METHODS, simulate.Config)
    text = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0
    configs = [Config, simulate.Config, *(method.Config for method in train.METHODS.values())]
    for f in (f for config in configs for f in dataclasses.fields(config)):
        assert f"--{f.name}" in text, f.name
        assert isinstance(f.default, (bool, str)) or f"{f.default}" in text, f.name
    assert "(default: diloco: 0.9, edit: 0.8, a_edit: 0.8)" in text


def test_flags_mean_what_they_say():
    read = lambda *argv: parse(argv, train.METHODS, simulate.Config)
    assert read("--lr=0.5", "--tau=7")[:3] == read("--lr", "0.5", "--tau", "7")[:3]
    config, method_config, *_ = read("--model", "124m", "--batch_size", "3", "--method", "diloco")
    assert (config.n_layer, config.batch_size, method_config.tau) == (12, 3, 128)
    config, _, _, given = read("--no-compile", "--method", "minibatch", "--outer_lr", "1")
    assert given == {"compile": False, "method": "minibatch", "outer_lr": 1.0}


def test_learning_rate_warms_up_linearly_then_follows_a_cosine():
    argv = "--lr 1 --lr_warmup_steps 10 --max_steps 110 --min_lr_ratio 0.1".split()
    config, *_ = parse(argv, train.METHODS, simulate.Config)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    rates = [train.set_learning_rate(optimizer, step, config) for step in range(110)]
    assert optimizer.param_groups[0]["lr"] == rates[-1]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1 and rates[60] == pytest.approx(0.55)
    assert rates[109] == pytest.approx(0.1, abs=1e-3)


def test_run_leaves_a_record_and_a_model_that_samples(trained, monkeypatch, capsys):
    rows = [json.loads(line) for line in open(trained / "run" / "metrics.jsonl")]
    events = [(row["event"], row.get("step")) for row in rows]
    assert events[0][0] == "config" and events[-1] == ("end", 7)
    assert [step for event, step in events if event == "step"] == [1, 3, 6, 7]
    assert [step for event, step in events if event == "sync"] == [3, 5, 7]
    # due at 3 and 6, at round ends 3, 5, 7
    assert [step for event, step in events if event == "eval"] == [3, 7]
    assert all(next(iter(row)) == "event" for row in rows)
    expected = {
        "step": "step tokens loss lr grad_norm step_ms train_s tokens_per_s shard_bytes sync_bytes",
        "sync": "round step tau steps loss pseudo_grad_norm weight dropped clip stall_ms "
        "wait_others_ms wait_link_ms sync_bytes",
        "eval": "step tokens train_s val_loss bits_per_byte",
        "end": "step val_loss train_s tokens_per_s peak_memory_bytes exit",
    }
    for event, fields in expected.items():
        for row in (row for row in rows if row["event"] == event):
            assert row.keys() == {"event", *fields.split()}
    assert rows[0]["method"] == "edit" and rows[0]["tau"] == 2 and rows[0]["world_size"] == 1
    printed = (trained / "printed").read_text()
    assert "sync 0003 | tau 2 |" in printed and "sample  def " in printed
    argv = ["--model", str(trained / "run" / "model.pt"), "--tokens", "3", "--prompt", "abc"]
    argv += ["--temperature", "1e-46"]  # 0 in fp32
    assert run_here(sample, argv, monkeypatch) is None
    assert capsys.readouterr().out.startswith("abc")


def test_two_nodes_train_as_one_does(tmp_path, corpus_folder):
    """Two agents of torchrun with a rank each: data and groups go by global rank."""
    argv = flags(data=corpus_folder, max_steps=6, tau=2, sync_warmup_steps=2)
    argv += ["--method", "edit", "--shards", "2"]
    one = Launch(2, tmp_path / "log", *argv, "--out_dir", str(tmp_path / "one"))
    assert (one.wait(), one.lines("err")) == ([0, 0], [])
    assert sum("done |" in line for line in one.lines("out")) == 1
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1"]
    command += ["train.py", *argv, "--out_dir", str(tmp_path / "two")]
    nodes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in "ab"
    ]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    read = lambda name: [json.loads(line) for line in open(tmp_path / name / "metrics.jsonl")]
    losses = [
        [row["loss"] for row in read(name) if row["event"] == "step"] for name in ("one", "two")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6
