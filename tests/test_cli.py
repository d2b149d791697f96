"""Wrong input: one clear line, exit code 2 on every rank, no traceback, no hang, nothing
half-written."""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import pytest

import ranks
import train
from config import Config, METHODS, has_native_bf16, parse, resolve_device, set_up
from flags import UserError
from ranks import ROOT, TINY, Launch

# Stands between torchrun and train.py:
# passes on signals and the exit code, and writes the code down.
RANK_SCRIPT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "train.py", *sys.argv[1:]])
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
code = child.wait()
open(os.environ["CODES"] + os.environ["RANK"], "w").write(str(code))
sys.exit(code)
"""


def launch(*flags):
    """Plain `python train.py`: (exit code, stdout, lines of stderr)."""
    done = subprocess.run(
        [sys.executable, "train.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


def launch_ranks(world_size, folder, *flags, script="train.py", timeout_s=120):
    """Each rank's exit code, as torchrun sees it, and what the ranks printed."""
    between = folder / "between.py"
    between.write_text(RANK_SCRIPT.replace("train.py", str(script)))
    environment = os.environ | {"CODES": f"{folder}/code-"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc_per_node", str(world_size),
    ]  # fmt: skip
    done = subprocess.run(
        [*command, between, *flags], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
        env=environment,
    )  # fmt: skip
    codes = [int((folder / f"code-{rank}").read_text()) for rank in range(world_size)]
    return codes, done.stdout, done.stderr.splitlines()


def corrupt_corpus(folder, corpus_folder, damage):
    """A copy of the corpus with something wrong."""
    target = folder / damage
    target.mkdir()
    tokens = (corpus_folder / "tokens.bin").read_bytes()
    meta = json.loads((corpus_folder / "meta.json").read_text())
    if damage == "half":
        tokens = tokens[: len(tokens) // 2]
    elif damage == "short":  # a text shorter than a window
        tokens, meta["tokens"], meta["train_tokens"] = tokens[:20], 10, 9
    elif damage == "no-meta":
        (target / "tokens.bin").write_bytes(tokens)
        return target
    (target / "tokens.bin").write_bytes(tokens)
    (target / "meta.json").write_text("{" if damage == "broken-meta" else json.dumps(meta))
    return target


BAD_FLAGS = {
    "unknown flag": ["--learning_rate", "1"],
    "shortened flag": ["--max_step", "1"],
    "unknown method": ["--method", "adam"],
    "word for a number": ["--lr", "fast"],
    "fraction for a whole number": ["--max_steps", "1.5"],
    "missing value": ["--lr"],
    "stray word": ["edit"],
    "tau 0": ["--tau", "0"],
    "negative tau": ["--tau", "-3"],
    "negative lr": ["--lr", "-0.1"],
    "lr nan": ["--lr", "nan"],
    "lr infinite": ["--lr", "inf"],
    "outer_lr negative": ["--outer_lr=-1"],
    "outer_lr nan": ["--outer_lr", "nan"],
    "outer_momentum 1": ["--outer_momentum", "1"],
    "beta1 1": ["--beta1", "1.0"],
    "beta2 negative": ["--beta2", "-0.5"],
    "weight_decay negative": ["--weight_decay", "-0.1"],
    "grad_clip nan": ["--grad_clip", "nan"],
    "pseudo_grad_clip 0": ["--pseudo_grad_clip", "0"],
    "anomaly_ema 2": ["--anomaly_ema", "2"],
    "max_steps 0": ["--max_steps", "0"],
    "batch_size 0": ["--batch_size", "0"],
    "accum 0": ["--accum", "0"],
    "log_interval 0": ["--log_interval", "0"],
    "shards 0": ["--shards", "0"],
    "negative seed": ["--seed", "-1"],
    "heads do not divide": ["--n_head", "3", "--n_embd", "128"],
    "odd channels per head": ["--n_head", "2", "--n_embd", "6"],
    "negative warm-up": ["--sync_warmup_steps", "-1"],
    "seed too large": ["--seed", str(2**50)],
    "tau_time_s 0": ["--tau_time_s", "0"],
}


@pytest.mark.parametrize("argv", BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_bad_flag_is_refused_in_one_line_that_names_it(argv):
    with pytest.raises(UserError) as error:
        parse(argv)
    line = str(error.value)
    assert "\n" not in line
    assert argv[0].split("=")[0].lstrip("-") in line


@pytest.mark.parametrize("damage", ["half", "short", "no-meta", "broken-meta"])
def test_damaged_corpus_is_refused_in_one_line(damage, tmp_path, corpus_folder):
    folder = corrupt_corpus(tmp_path, corpus_folder, damage)
    with pytest.raises(UserError, match="damaged|window needs|make it again") as error:
        set_up(TINY + ["--data", str(folder), "--out_dir", str(tmp_path / "out")], 0, 1)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_bf16_where_it_is_not_native_is_refused(monkeypatch):
    monkeypatch.setattr("config.has_native_bf16", lambda device: False)
    config, *_ = parse(["--dtype", "bf16", "--device", "cpu"])
    with pytest.raises(UserError, match="--dtype fp32"):
        resolve_device(config)
    config, *_ = parse(["--device", "cpu"])
    resolve_device(config)
    assert config.dtype == "fp32"  # auto


def test_cuda_where_there_is_none_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config, *_ = parse(["--device", "cuda"])
    with pytest.raises(UserError, match="--device cpu"):
        resolve_device(config)


def test_plain_python_prints_one_line_and_exits_with_2(tmp_path):
    code, out, lines = launch("--data", str(tmp_path / "nowhere"))
    assert code == 2 and out == "" and len(lines) == 1
    assert lines[0].startswith("train.py: error: --data") and "no such folder" in lines[0]


def test_torchrun_sees_exit_code_2_of_every_rank_after_one_line(tmp_path):
    codes, out, lines = launch_ranks(2, tmp_path, "--learning_rate", "1")
    assert codes == [2, 2] and out == ""
    (ours,) = [line for line in lines if "train.py: error:" in line]
    assert "--learning_rate" in ours
    assert not any('train.py", line' in line for line in lines)  # a traceback of ours


def with_rank_in_lr(argv, rank, *more):
    ranks._command([*argv, f"--lr=0.{rank}1"], rank, *more)


ALL_RANKS = {
    "impossible mesh": (4, ["--shards", "3"], {}, "--shards 3"),
    # only rank 0 can see this one
    "unwritable out_dir": (2, ["--out_dir", "/dev/null/run"], {}, "--out_dir"),
    "different flags": (
        2, [], {0: (with_rank_in_lr,), 1: (with_rank_in_lr,)}, "the ranks differ in their flags",
    ),
    "no checkpoint": (2, ["--resume", "nowhere"], {}, "--resume nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("world_size, argv, special, message", ALL_RANKS.values(), ids=ALL_RANKS)
def test_every_rank_exits_with_2_after_one_line(
    world_size, argv, special, message, tmp_path, corpus_folder
):
    argv = [*TINY, "--data", str(corpus_folder), "--out_dir", str(tmp_path / "out"), *argv]
    run = Launch(world_size, tmp_path, *argv, special=special)
    assert run.wait() == [2] * world_size and run.lines("out") == []
    (line,) = run.lines("err")
    assert line.startswith("train.py: error: ") and message in line


def test_help_lists_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as done:
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0
    import simulate

    configs = [Config, simulate.Config, *(config for _, config in METHODS.values())]
    for f in (f for config in configs for f in dataclasses.fields(config)):
        assert f"--{f.name}" in text, f.name
        assert isinstance(f.default, (bool, str)) or f"{f.default}" in text, f.name
    assert "(default: diloco: 0.9, edit: 0.8, a_edit: 0.8)" in text


def test_equals_sign_and_space_mean_the_same():
    assert parse(["--lr=0.5", "--tau=7"]) == parse(["--lr", "0.5", "--tau", "7"])


def test_learning_rate_warms_up_linearly_then_follows_a_cosine():
    config, *_ = parse(
        ["--lr", "1", "--lr_warmup_steps", "10", "--max_steps", "110", "--min_lr_ratio", "0.1"]
    )
    lr = [train.learning_rate(step, config) for step in range(110)]
    assert lr[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert lr[10] == 1 and lr[60] == pytest.approx(0.55) and lr[109] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_run_leaves_a_record_and_a_model_that_samples(dtype, tmp_path, corpus_folder):
    if dtype == "bf16" and not has_native_bf16("cpu"):
        pytest.skip("no native bf16 on this CPU")
    out = tmp_path / "run"
    argv = [
        "--data", str(corpus_folder), "--out_dir", str(out), "--max_steps", "7", "--tau", "2",
        "--dtype", dtype,
    ]  # fmt: skip
    argv += "--sync_warmup_steps 1 --log_interval 3 --eval_interval 3 --eval_batches 1".split()
    argv += "--device cpu --n_layer 1 --n_embd 16 --n_head 2 --block_size 16".split()
    code, printed, errors = launch("--method", "edit", *argv)
    assert code == 0 and errors == []  # no warning either
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    events = [(row["event"], row.get("step")) for row in rows]
    assert events[0][0] == "config" and events[-1] == ("end", 7)
    assert [step for event, step in events if event == "step"] == [1, 3, 6, 7]
    assert [step for event, step in events if event == "sync"] == [3, 5, 7]
    # due at 3 and 6, in sync at 3, 5, 7
    assert [step for event, step in events if event == "eval"] == [3, 7]
    assert all(next(iter(row)) == "event" for row in rows)
    expected = {
        "step": "step tokens loss lr grad_norm step_ms train_s tokens_per_s shard_bytes sync_bytes",
        "sync": "round step pseudo_grad_norm weight dropped clip stall_ms sync_bytes",
        "eval": "step tokens train_s val_loss bits_per_byte",
        "end": "step val_loss train_s tokens_per_s peak_memory_bytes exit",
    }
    for event, fields in expected.items():
        for row in (row for row in rows if row["event"] == event):
            assert set(fields.split()) <= row.keys()
    assert rows[0]["method"] == "edit" and rows[0]["tau"] == 2 and rows[0]["world_size"] == 1
    assert "sync 0003 | tau 2 |" in printed and "sample  def " in printed
    done = subprocess.run(
        [sys.executable, ROOT / "sample.py", "--model", out / "model.pt", "--tokens", "3"],
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0


def test_torchrun_trains_on_one_node_and_on_two_alike(tmp_path, corpus_folder):
    """Four ranks, then two agents with two ranks each:
    data and groups go by global rank. Without a warning."""
    argv = ["--data", str(corpus_folder)]
    argv += ["--max_steps", "6", "--tau", "2", "--sync_warmup_steps", "2"]
    argv += ["--n_layer", "1", "--block_size", "16", "--eval_batches", "1", "--device", "cpu"]
    argv += ["--method", "edit", "--shards", "2", "--dtype", "fp32", "--log_interval", "1"]
    codes, printed, errors = launch_ranks(4, tmp_path, *argv, "--out_dir", str(tmp_path / "one"))
    assert codes == [0] * 4 and errors == []
    assert printed.count("done |") == 1 and "replica 1" in printed and printed.count("sync 0") == 2
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    launcher += ["--nnodes", "2", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1"]
    command = [*launcher, "train.py", *argv, "--out_dir", str(tmp_path / "two")]
    nodes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in "ab"
    ]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    read = lambda name: [json.loads(line) for line in open(tmp_path / name / "metrics.jsonl")]
    both = read("one"), read("two")
    losses = [[row["loss"] for row in rows if row["event"] == "step"] for rows in both]
    assert losses[0] == losses[1] and len(losses[0]) == 6
