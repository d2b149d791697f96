"""Wrong input: one clear line, exit code 2 on every rank, no traceback, no hang, nothing left."""

import contextlib
import dataclasses
import io
import json
import math
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import data
import export
import method as method_module
import ranks
import sample
import train
from config import FIRST_FLAGS, Config, UserError, make_config, parse, run_command
from mesh import Handle, Mesh
from model import ModelConfig
from plumbing import checkpoint, launch, load_model, simulate
from plumbing.log import Clock, Log, RoundRecord
from ranks import ROOT, Launch, flags
from shard import ShardedModel

WRONG = """
train --learning_rate 1                 | --learning_rate
train --lr fast                         | --lr
train --method adam                     | --method
train edit                              | edit
train --tau 0                           | --tau 0: must be at least 1
train --lr nan                          | --lr nan
train --outer_lr=-1                     | --outer_lr -1
train --pseudo_grad_clip 0              | --pseudo_grad_clip 0.0: must be above 0
train --max_steps DIGITS                | --max_steps 999
train --beta1 1                         | --beta1 1.0: must be at least 0 and below 1
train --timeout_s 1e14                  | --timeout_s 1000
train --batch_size 2000000000           | a rank needs about
train --block_size 1000000000           | lower --block_size
train --shards 3                        | do not form such a mesh; change --nproc_per_node or give --shards 1
train --replicas 2                      | --replicas 2 --shards 1
train --n_head 2 --n_embd 6             | --n_embd 6
train --slow_replica 1:2                | --slow_replica 1:2: must be R:F, R below 1, 1 <= F < 1e9
train --slow_replica 0:0.5              | --slow_replica 0:0.5
train --slow_replica fast               | --slow_replica fast: must be R:F
train --random_tokens 1:2:3             | --random_tokens 1:2:3: must be R:FIRST:LAST, R below 1
train --random_tokens 0:3:2             | must be R:FIRST:LAST, R below 1, 1 <= F < 1e9, 0 <= FACTOR < 1e9, 0 <= FIRST <= LAST
train --method zero_one_adam --sync_warmup_steps 0 | needs --sync_warmup_steps above 0
train --method zero_one_adam --average_moments | no --average_moments
train --method zero_one_adam --optimizer muon | --optimizer muon: zero_one_adam needs AdamW's variance
train --optimizer muon --average_moments | give --average_moments m
train --optimizer muon --lr 0           | give --muon_lr 0 or --optimizer adamw
train --optimizer sgd                   | --optimizer: invalid choice
train --method top_k --density 0        | --density 0.0: must be above 0
train --method streaming_diloco --tau_rule qsr | a streaming round has tau steps
train --method streaming_diloco --tau_schedule 2:8 | a streaming round has tau steps
train --tau_schedule 2:96,4             | --tau_schedule 2:96,4: write 2:96,4:384 for rounds of
train --method edit --tau_schedule 2:96 | --tau_schedule: norms grow; add --norm_per_lr --anomaly_threshold 5
train --tau_schedule 0:96               | --tau_schedule 0:96: write 2:96,4:384
train --tau_schedule 2:96:5,4:384       | --tau_schedule 2:96:5,4:384: write 2:96,4:384
train --tau_schedule ,                  | --tau_schedule ,: write 2:96,4:384
train --average_moments v               | --average_moments: invalid choice
train --flip 0:5:4                      | must be R:FIRST:LAST
train --flip 3:1:2                      | --flip 3:1:2: must be R:FIRST:LAST
train --method top_k --flip 0:1:2       | top_k has no anchor
train --method streaming_edit --flip 0:1:2 | or syncs within a round
train --scale_lr 0:1:2                  | must be R:FIRST:LAST:FACTOR
train --virtual_clock --method co2      | replicas of co2 do not wait for each other
train --resume nowhere                  | --resume nowhere: there is no checkpoint
train --out_dir NAME                    | File name too long
train --out_dir /dev/null/run           | error: /dev/null/run: Not a directory
train --overwrite --resume auto         | --resume, --overwrite: give only one of them
train --tokens_per_step 100             | --tokens_per_step 100: must be a multiple of 8
train --tokens_per_step 3               | --tokens_per_step 3: must be a multiple of 8
train --tokens_per_step 96 --accum 2    | leave out --accum
train --backend nccl                    | --backend nccl
train --device cuda                     | use --device cpu
train --data nowhere                    | nowhere: No such file
train --data IN/text.txt                | no token files; name token files (.bin), or one corpus folder
train --data IN/tokens.bin --block_size 2 --vocab_size 9 | its vocabulary has 9 tokens
train --data IN/loop/corpus             | corpus: Too many levels of symbolic links
train --resume IN/loop/run              | there is no checkpoint
train --out_dir IN/loop/run             | run: Too many levels of symbolic links
train --method streaming_diloco --tau 8 --fragments 3 | --fragments 3: must divide --tau 8
train --method streaming_diloco --tau 8 --fragments 2 --delay 4 | below tau / fragments = 4
train --method streaming_diloco --tau 8 --delay 2 | --delay 2: must be below tau / fragments = 2
train --method streaming_diloco --tau 8 --fragments 8 --delay 0 | at most one per layer
train --method streaming_diloco --alpha 1.5 | --alpha 1.5: must be at least 0
train --method noloco                   | --method noloco: it needs at least two replicas
data                                    | --out
data --input IN/nowhere --out new       | No such file
data --input IN --out new               | Is a directory
data --input IN/latin.txt --out new     | 'utf-8' codec can't decode
data --input IN/empty.txt --out new     | no text
data --input IN/bad.jsonl --out new     | line 2 is not a JSON object
data --input IN/half-pair.jsonl --out new | line 2 is not a JSON object
data --input IN/tokens.bin --out new    | neither text nor .jsonl
data --input IN/a.Json --out new        | neither text nor .jsonl (one object per line)
data --input IN/text.txt --out new --tokenizer gpt3 | gpt3/tokenizer.json: No such file
data --input IN/text.txt --out IN       | exists already
data --input IN/text.txt --out NAME     | File name too long
data --input IN/text.txt --out IN/loop/new | Too many levels of symbolic links
train --init_from IN/nowhere            | nowhere'): name a model.pt of train.py
train --init_from IN/foreign.pt         | is not a model (KeyError: 'model_config'): name a model.pt
export                                  | --model
export --model IN --out new             | this needs a package: pip install transformers
export --model IN/half.pt --out new     | is not a model (RuntimeError: PytorchStreamReader failed reading
sample                                  | --model
sample --model IN/nowhere               | No such file
sample --model IN                       | this needs a package: pip install transformers
sample --model IN/text.txt              | is not a model
sample --model IN/half.pt               | is not a model
sample --model IN/foreign.pt            | is not a model
sample --model IN/pickle.pt             | is not a model
sample --model IN/path.pt               | is not a model (UnpicklingError: Weights only load failed
sample --model x --seed DIGITS          | --seed
"""
TABLE = [[part.strip() for part in line.split("|")] for line in WRONG.strip().splitlines()]
PROGRAMS = {
    "train": lambda argv: run_command("train.py", lambda: train.main(argv)),
    "data": lambda argv: run_command("data.py", data.main),
    "export": lambda argv: run_command("export.py", export.main),
    "sample": lambda argv: run_command("sample.py", sample.main),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder of wrong input: texts, models, a link to itself."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.save({"model": {}}, folder / "foreign.pt")
    torch.save({"model": folder}, folder / "path.pt")
    half = (folder / "foreign.pt").read_bytes()[:500]
    files = {"text.txt": b"some text " * 100, "empty.txt": b"", "latin.txt": b"\xe9"}
    files |= {"tokens.bin": bytes(range(100)), "a.Json": b'[{"text": ""}]'}
    files |= {"half.pt": half, "pickle.pt": pickle.dumps(os.system, 2)}
    lines = {"bad": b"{", "half-pair": b'{"text": "\\ud800"}'}
    files |= {f"{name}.jsonl": b'{"text": "good"}\n' + line for name, line in lines.items()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.fixture
def run_here(monkeypatch):
    """run_here(program, argv): its exit code, in this process. This machine has no GPU and lacks
    transformers."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(launch, "has_native_bf16", lambda device: False)
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # ranks above 0 replace it

    def run(program, argv):
        monkeypatch.setattr(sys, "argv", [f"{program}.py", *argv])
        try:
            PROGRAMS[program](argv)
        except SystemExit as left:
            return left.code

    return run


@pytest.mark.parametrize("line, message", TABLE, ids=[line[:60] for line, _ in TABLE])
def test_wrong_input_is_refused_in_one_line(
    line, message, inputs, run_here, corpus_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    line = line.replace("DIGITS", "9" * 400).replace("NAME", "n" * 300)
    program, *argv = [re.sub("^IN", str(inputs), word) for word in line.split()]
    if program == "train":  # would end soon if it was not refused
        argv = [*flags(max_steps=1, data=corpus_folder), *argv]
    assert run_here(program, argv) == 2
    written = capsys.readouterr()
    (error,) = written.err.splitlines()
    assert error.startswith(f"{program}.py: error: ") and message in error
    assert len(error) < 600 and written.out == "" and not list(tmp_path.iterdir())


def test_port_in_use_is_named(run_here, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
        for name, value in (variables | {"MASTER_PORT": str(server.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        assert run_here("train", []) == 1
    assert "EADDRINUSE" in capsys.readouterr().err


def test_loss_that_is_not_finite_at_the_end_is_a_divergence(
    run_here, corpus_folder, tmp_path, capsys
):
    argv = flags(method="minibatch", lr=1e12, lr_warmup_steps=0, max_steps=1, data=corpus_folder)
    assert run_here("train", [*argv, "--dtype", "fp32", "--out_dir", str(tmp_path)]) == 2
    assert "diverged: the validation loss at the end is nan; lower" in capsys.readouterr().err
    assert not (tmp_path / "model.pt").exists()


def test_divergence_names_its_step_also_if_the_metrics_are_known_a_step_late():
    model = SimpleNamespace(known_metrics=lambda: [1.0, math.nan, 0.0], metrics_lag=1)
    method = SimpleNamespace(steps=5, repairs_replicas=False, averages_gradients=False)
    with pytest.raises(UserError, match="diverged at step 4: loss nan, gradient norm 1; lower"):
        train.check_finite(model, method)


def test_characters_that_a_terminal_lacks_are_replaced(run_here, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    run_command("sample.py", lambda: print("\u03c0"))
    assert sys.stdout.buffer.getvalue() == b"?\n"


def test_new_run_replaces_an_earlier_one_only_with_overwrite(
    run_here, corpus_folder, tmp_path, capsys, monkeypatch
):
    argv = [*flags(data=corpus_folder, max_steps=4), "--out_dir", str(tmp_path), "--device", "cpu"]
    monkeypatch.setattr(checkpoint, "lock", lambda *_: os.open(os.devnull, os.O_RDONLY))
    assert run_here("train", argv) is None
    assert run_here("train", argv) == 2
    ways = "--resume auto continues it, --overwrite deletes it; or name another --out_dir"
    assert ways in capsys.readouterr().err
    (tmp_path / "timeline-7.json").touch()  # of more ranks
    assert run_here("train", [*argv, "--max_steps", "6", "--resume", "auto"]) is None
    (tmp_path / "checkpoint-best").mkdir()
    monkeypatch.setattr(train, "evaluate", None)
    with pytest.raises(TypeError):
        run_here("train", [*argv, "--max_steps", "2", "--overwrite"])
    names = {path.name for path in tmp_path.iterdir()}
    # not the earlier run's model; what is no checkpoint stays
    assert names == {"checkpoint-00000002", "metrics.jsonl", "checkpoint-best"}


class FullDisk(io.BytesIO):
    """A file that 100 bytes fit into. torch.save turns its error into one of its own."""

    def write(self, data):
        if self.tell() + len(data) > 100:
            raise OSError(28, "No space left on device")
        return super().write(data)


FULL_DISKS = [FullDisk, lambda: open("/dev/full", "wb")]  # the latter's close fails, too


@pytest.mark.parametrize("open_full", FULL_DISKS)
def test_disk_without_room_for_the_last_checkpoint_costs_only_that(
    open_full, run_here, corpus_folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(checkpoint, "open", lambda path, mode: open_full(), raising=False)
    argv = [*flags(data=corpus_folder, max_steps=2), "--out_dir", str(tmp_path)]
    assert run_here("train", argv) is None
    line = f"saved   none: no checkpoint could be written to {tmp_path}: .*No space left on device\n"
    assert re.search(line, capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "model.pt"}


@pytest.mark.parametrize("open_full", FULL_DISKS)
def test_disk_without_room_for_the_model_is_named_and_gets_its_room_back(
    open_full, tmp_path, monkeypatch
):
    model = ShardedModel(ModelConfig(1, 1, 8, 8, 11), Mesh(1, torch.device("cpu")))
    monkeypatch.setattr(export, "open", lambda path, mode: open_full(), raising=False)
    (tmp_path / "model.pt.tmp").touch()
    with pytest.raises(UserError, match="model.pt could not be written: .*No space left on device"):
        export.save_model(tmp_path / "model.pt", model, "byte", {})
    assert not list(tmp_path.iterdir())


def differ_in_lr(argv, rank, *more):
    ranks._command([*argv, f"--lr=0.{rank}1"], rank, *more)


@pytest.mark.parametrize(
    "function, argv, message",
    [
        (ranks._command, ["--out_dir", "/dev/null/run"], "/dev/null/run"),  # only rank 0 notices it
        (ranks._command, ["--data", "\udcff"], "No such file"),
        (differ_in_lr, [], "the ranks differ"),
    ],
)
def test_every_rank_exits_with_2_after_one_line(function, argv, message, tmp_path, corpus_folder):
    argv = flags(data=corpus_folder, out_dir=tmp_path / "out") + argv
    run = Launch(4, tmp_path, *argv, special={rank: (function,) for rank in range(4)})
    assert run.wait() == [2] * 4 and run.lines("out") == []
    (line,) = run.lines("err")
    assert ".py: error: " in line and message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_full_and_closed_output_and_torchrun_give_one_line_or_none(corpus_folder, tmp_path):
    train = f"{sys.executable} train.py --dry_run --device cpu --data {corpus_folder}"
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2"
    cases = [  # shell line; exit code; the line of error
        (f"{train} > /dev/full", 2, "No space left"),
        (f"{train} | true", 2, "output: Broken pipe"),  # as with `| head -1`
        (f"{torchrun} train.py --method adam", 1, "--method"),  # one rank prints; and torchrun
    ]
    shell = ["bash", "-o", "pipefail", "-c"]
    options = dict(stderr=subprocess.PIPE, text=True)
    started = [subprocess.Popen([*shell, line], cwd=ROOT, **options) for line, *_ in cases]
    for process, (line, code, message) in zip(started, cases):
        errors = process.communicate(timeout=90)[1]
        lines = [error for error in errors.splitlines() if ".py: error: " in error]
        assert process.returncode == code and len(lines) == bool(message), (line, errors)
        assert message in "".join(lines) and 'train.py", line' not in errors
        assert message or not errors


def show_help(capsys, *argv):
    with pytest.raises(SystemExit) as done:
        parse(["--help", *argv], train.METHODS, simulate.Config)
    assert done.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_lists_the_flags_of_a_first_run(capsys):
    text = show_help(capsys)
    listed = set(re.findall(r"--(?:no-)?(\w+)", text)) - {"flag", "help"}
    assert listed == set(FIRST_FLAGS) and "--help all" in text


def test_help_all_lists_every_flag_with_its_default(capsys):
    text = show_help(capsys, "all")
    configs = [Config, simulate.Config, *(method.Config for method in train.METHODS.values())]
    for f in (f for config in configs for f in dataclasses.fields(config)):
        assert f"--{f.name}" in text, f.name
        assert isinstance(f.default, (bool, str)) or f"{f.default}" in text, f.name
    assert "(default: 0.7, 0.9, 1.0)" in text  # methods differ


def test_presets_set_what_is_not_given():
    argv = "--model 124m --n_layer 3 --lr 0.5 --tau 9".split()
    config, given = parse(argv, train.METHODS, simulate.Config)
    assert (config.n_layer, config.n_embd, config.lr, config.tau) == (3, 768, 0.5, 9)
    assert given == dict(model="124m", n_layer=3, lr=0.5, tau=9)


def test_average_moments_without_a_value_means_both():
    both = ["exp_avg", "exp_avg_sq"]
    for argv, found in ([], []), (["--average_moments"], both), (["--average_moments", "m"], both[:1]):
        config, _ = parse(["--method", "edit", *argv], train.METHODS, simulate.Config)
        assert config.averaged_moments() == found
    with pytest.raises(UserError, match="--trim 2: leaves none of 4"):
        argv = ["--method", "robust", "--aggregate", "trimmed_mean", "--trim", "2"]
        parse(argv, train.METHODS, simulate.Config)[0].check(4)


@pytest.mark.parametrize("tau, delay", [(4, 0), (8, 1), (16, 2), (64, 2)])
def test_default_delay_follows_the_rounds(tau, delay):
    for method in ("streaming_diloco", "streaming_edit"):
        config, _ = parse(["--method", method, "--tau", str(tau)], train.METHODS, simulate.Config)
        config.check(2)
        assert config.steps_late == delay


def test_schedule_of_rounds_is_parsed_once_and_not_in_every_step(monkeypatch):
    config = ranks.run_config(tau_schedule="2:96,4:384", tau=8)
    for parser in method_module.re, None:
        monkeypatch.setattr(method_module, "re", parser)
        taus = [config.steps_of_round([0.0], k) for k in (0, 95, 96, 479, 480)]
        assert taus == [2, 2, 4, 4, 8]


def test_a_resumed_run_does_not_take_what_belongs_to_a_start():
    saved = {"overwrite": True, "tau": 3, "lr": 0.5}
    config = make_config({"lr": 0.1}, train.METHODS, simulate.Config, saved)
    assert (config.overwrite, config.tau, config.lr) == (False, 3, 0.1)


def test_model_and_corpus_must_have_the_same_tokens():
    cases = [  # tokenizers of the model and of the corpus, size of the corpus's vocabulary; do they fit?
        ("byte", "byte", 257, True),
        ("byte", "byte", 300, False),
        ("{a", "{b", 257, False),
        ("{a", "gpt2", 257, True),
        ("gpt2", load_model.UNKNOWN, 257, True),
    ]
    for ours, theirs, vocab_size, fits in cases:
        source = load_model.Source("", ModelConfig(), ours, {})
        corpus = SimpleNamespace(tokenizer=theirs, vocab_size=vocab_size)
        refused = pytest.raises(UserError, match="another vocabulary")
        with contextlib.nullcontext() if fits else refused:
            source.check(ModelConfig(block_size=4), corpus)
        assert corpus.tokenizer == (ours if theirs == load_model.UNKNOWN else theirs)


def test_folder_that_nodes_do_not_share(run_here, corpus_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint, "to_disk", lambda path: path.unlink())  # on another node
    argv = [*flags(data=corpus_folder, max_steps=1), "--out_dir", str(tmp_path)]
    assert run_here("train", argv) is None
    assert "nodes must share --out_dir" in capsys.readouterr().out


def test_clock_stops_for_evaluations_and_goes_on_in_a_resumed_run(monkeypatch):
    moments = 0.0, 5.0, 35.0, 36.0, 100.0, 101.0
    monkeypatch.setattr("time.perf_counter", iter(moments).__next__)
    clock = Clock(torch.device("cpu"))
    with clock:  # from 5 to 35 s
        pass
    assert clock.train_s() == 6.0
    clock.start_at({"train_s": 50.0})
    assert clock.train_s() == 51.0


def test_three_lost_rounds_end_the_training_if_they_are_in_a_row():
    mesh = Mesh(1, torch.device("cpu"))
    log = Log.__new__(Log)
    log.file = io.StringIO()
    record = RoundRecord(mesh)
    row = dict.fromkeys("round clip sync_bytes tau wait_others_ms wait_link_ms".split(), 0)
    row |= dict(steps=[1], dropped=[0], stall_ms=[], pseudo_grad_norm=[math.nan])
    record.rows += [row | {"weight": [w]} for w in (0, 0, 1, 0, 0, 0)]
    with pytest.raises(UserError, match="left out of the last 3 syncs"):
        train.write_syncs(SimpleNamespace(record=record), log)
    assert log.file.getvalue().count("[null]") == 6  # JSON has no NaN


def test_stall_counts_for_one_round():
    record = RoundRecord(Mesh(1, torch.device("cpu")))
    exchanged = SimpleNamespace(steps=torch.ones(1), losses=torch.ones(1))
    method = SimpleNamespace(rounds=1, steps=1, exchanged=exchanged)
    record.stalls.append((1.0, 3.0))
    for stall_ms in 2000.0, 0.0:
        record.done(method)
        assert record.take()["stall_ms"] == stall_ms


def test_run_leaves_a_record_and_a_model(tmp_path, corpus_folder, run_here, capsys):
    corpus = shutil.copytree(corpus_folder, tmp_path / "corpus")
    meta = json.loads((corpus / "meta.json").read_text())
    (corpus / "meta.json").write_text(json.dumps(meta | {"bytes_per_token": 4.0}))
    argv = flags(data=corpus, out_dir=tmp_path / "run", max_steps=7, tau=2)
    argv += "--sync_warmup_steps 1 --log_interval 3 --eval_interval 3 --method edit".split()
    run = Launch(1, tmp_path, *argv)
    assert (run.wait(), run.lines("err")) == ([0], [])
    rows = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    events = [(row["event"], row.get("step")) for row in rows]
    assert events[0][0] == "config" and events[-1] == ("end", 7)
    assert [step for event, step in events if event == "step"] == [1, 3, 6, 7]
    assert [step for event, step in events if event == "sync"] == [3, 5, 7]
    steps = [row for row in rows if row["event"] == "step"]
    for before, row in zip(steps, steps[1:]):
        taken = row["step"] - before["step"]
        passed_s = row["train_s"] - before["train_s"]
        assert row["step_ms"] == pytest.approx(1e3 * passed_s / taken)
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
    assert rows[-2]["bits_per_byte"] == pytest.approx(rows[-2]["val_loss"] / math.log(2) / 4)
    printed = "\n".join(run.lines("out"))
    assert "sync 0003 | tau 2 |" in printed and "sample  def " in printed
    argv = ["--model", str(tmp_path / "run" / "model.pt"), "--tokens", "3", "--prompt", "abc"]
    assert run_here("sample", argv) is None
    assert capsys.readouterr().out.startswith("abc")
