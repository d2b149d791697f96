"""Wrong input: one clear line, exit code 2 on every rank, no traceback, no hang, nothing left."""

import contextlib
import dataclasses
import io
import json
import math
import os
import pickle
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import hf
import method as method_module
import ranks
import sample
import train
from config import Config, UserError, make_config, option, parse, run_command
from mesh import Mesh
from model import Llama, ModelConfig
from plumbing import checkpoint, launch
from plumbing.log import Clock
from plumbing.plan import Plan
from ranks import ROOT, Launch, flags, method_alone
from rows import each_row

WRONG = """
train --learning_rate 1                 | --learning_rate
train --lr fast                         | --lr
train edit                              | edit
train --method diloco --anomaly_threshold 5 --quantize sign | --method diloco does not have --anomaly_threshold (a flag of edit, a_edit, streaming_edit, one_bit_edit), --quantize (a flag of streaming_diloco,
train --method minibatch --tau 16       | minibatch does not have --tau (a flag of all but minibatch, a_edit)
train --density 0.1                     | --method edit does not have --density (a flag of sparse_loco, top_k)
train --tau 0                           | --tau 0: must be at least 1
train --pseudo_grad_clip 0              | --pseudo_grad_clip 0.0: must be above 0
train --max_steps DIGITS                | --max_steps 999
train --shards 3                        | error: --shards 3: 1 ranks do not form replicas of 3; change --nproc_per_node or give --shards 1
train --replicas 2 --shards 3           | --replicas 2 --shards 3: that takes 6 ranks, but there are 1; start 6
train --replicas 100000 --shards 100000 --dry_run | 10,000,000,000 ranks
train --link_mbps 1e-300                | --link_mbps 1e-300: must be 0 or at least
train --lr 1e-320 --optimizer muon      | muon's rate follows its schedule
train --data xNEWLINEy                     | x\\ny: No such file
train --data EMPTY                      | --data is empty, as of an unset variable
data --input IN/text.txt --out EMPTY    | --out is empty
hf --model IN/half.pt --out EMPTY   | --out is empty
train --n_head 2 --n_embd 6             | --n_embd 6
train --slow_replica 1:2                | --slow_replica 1:2: must be R:F, R below 1, 1 <= F < 1e9
train --method zero_one_adam --sync_warmup_steps 0 | needs --sync_warmup_steps above 0
train --method zero_one_adam --optimizer muon | --optimizer muon: zero_one_adam needs AdamW's variance
train --optimizer muon --lr 0 --muon_lr 0 | raise --lr, or give --optimizer adamw
train --schedule wsd --decay_share 0.95 | of 1 steps the decay would begin at step 0, in the rate's warm-up of 3
train --method top_k --density 0        | --density 0.0: must be above 0
train --method zero_one_adam --tau_schedule 2:96,4            | --tau_schedule 2:96,4: write 2:96,4:384 for rounds of
train --flip 3:1:2                      | --flip 3:1:2: must be R:FIRST:LAST
train --method top_k --flip 0:1:2       | top_k has no anchor
train --virtual_clock --method co2      | replicas of co2 do not wait for each other
train --resume nowhere                  | --resume nowhere: there is no checkpoint
train --out_dir NAME                    | File name too long
train --out_dir /dev/null/run           | error: /dev/null/run: Not a directory
train --overwrite --resume auto         | --resume, --overwrite: give only one of them
train --tokens_per_step 96 --accum 2    | leave out --accum
train --device cuda                     | use --device cpu
train --data nowhere                    | nowhere: No such file
train --data IN/text.txt                | is no folder: python data.py --input FILE --out FOLDER makes one
train --vocab_size 9                    | its vocabulary has 9 tokens
train --method streaming_diloco --tau 8 --fragments 3 | --fragments 3: must divide --tau 8
train --method streaming_diloco --tau 8 --delay 2 | --delay 2: must be below tau / fragments = 2
train --method noloco                   | --method noloco: it needs at least two replicas
data                                    | --out
data --input IN --out new               | Is a directory
data --input IN/text.txt --out new --tokenizer gpt3 | gpt3/tokenizer.json: No such file
data --input IN/text.txt --out IN       | exists already
data --input IN/text.txt --out new --tokenizer EMPTY | --tokenizer is empty, as of an unset
train --init_from IN/nowhere            | nowhere'): name a model.pt of train.py
train --init_from IN/foreign.pt         | is not a model (KeyError: 'model_config'): name a model.pt
hf                                      | --model
hf --model IN --out new             | this needs a package: pip install transformers
hf --model IN/half.pt --out new     | is not a model (RuntimeError: PytorchStreamReader failed reading
sample                                  | --model
sample --model IN/nowhere               | No such file
sample --model IN/pickle.pt             | is not a model
sample --model x --seed DIGITS          | --seed
"""
TABLE = [[part.strip() for part in line.split("|")] for line in WRONG.strip().splitlines()]
PROGRAMS = {
    "train": lambda argv: run_command("train.py", lambda: train.main(argv)),
    "data": lambda argv: run_command("data.py", data.main),
    "hf": lambda argv: run_command("hf.py", hf.main),
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
    files |= {"a.Json": b'[{"text": ""}]', "bad.jsonl": b'{"text": "good"}\n{'}
    files |= {"half.pt": half, "pickle.pt": pickle.dumps(os.system, 2)}
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


@each_row("line, message", TABLE)
def test_wrong_input_is_refused_in_one_line(
    line, message, inputs, run_here, corpus_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    line = line.replace("DIGITS", "9" * 400).replace("NAME", "n" * 300)
    program, *argv = [re.sub("^IN", str(inputs), word) for word in line.split()]
    argv = [word.replace("EMPTY", "").replace("NEWLINE", "\n") for word in argv]
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
    assert "diverged: the validation loss at step 1 is nan; lower" in capsys.readouterr().err
    assert not (tmp_path / "model.pt").exists()


@each_row(
    "variables, message",
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "let it start torchrun, see plumbing/slurm.sh"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR expected, but not set; start with torchrun"),
    ],
)
def test_start_without_torchrun_is_refused_in_a_line(
    variables, message, run_here, monkeypatch, capsys
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run_here("train", ["--dry_run"]) == 2
    written = capsys.readouterr()
    (error,) = written.err.splitlines()
    assert message in error and written.out == ""


def on_windows(argv, rank, *more):
    """What the programs do where Python lacks these modules and functions. train.py is the last."""
    folder = argv[0]
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", ""))
        if file.startswith(str(ROOT)) and not file.startswith(sys.prefix):  # .venv may be in ROOT
            del sys.modules[name]
    sys.modules |= {"fcntl": None, "resource": None}
    for name in "SIGHUP", "SIGALRM", "setitimer", "getitimer", "ITIMER_REAL":
        delattr(signal, name)
    del os.sched_getaffinity
    runpy.run_path(str(ROOT / "one_page.py"))
    runpy.run_path(str(ROOT / "hf.py"))
    make_corpus = f"--input {folder}/a.txt --out {folder}/corpus"
    ranks.script(make_corpus.split(), rank, *more, ROOT / "data.py", ROOT)
    for line in f"sample.py --model {folder}/model.pt --prompt abc --tokens 1", "train.py":
        sys.argv = line.split()
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")


def test_windows_gets_all_but_the_training_and_there_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 100)
    config = ModelConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=257, block_size=16)
    saved = {"model": Llama(config, seed=0).state_dict(), "model_config": vars(config)}
    torch.save(saved | {"tokenizer": "byte"}, tmp_path / "model.pt")
    run = Launch(1, tmp_path / "log", str(tmp_path), special={0: (on_windows,)})
    assert run.wait() == [2]
    (line,) = run.lines("err")
    assert "no fcntl" in line and "python -m plain; one_page.py" in line
    assert len(data.load(str(tmp_path / "corpus"))) == 501
    assert run.lines("out")[-1].startswith("abc")


@each_row(
    "argv, said, unsaid",
    [
        ("--method minibatch", "", "warm-up steps"),
        ("--method edit", "then edit begins", "note"),
    ],
)
def test_header_says_when_the_warm_up_ends(argv, said, unsaid, run_here, corpus_folder, capsys):
    argv = ["--dry_run", "--device", "cpu", "--data", str(corpus_folder), *argv.split()]
    assert run_here("train", argv) is None
    printed = capsys.readouterr().out
    assert said in printed and unsaid not in printed


def test_large_model_gets_a_command_in_place_of_a_sample(
    run_here, corpus_folder, tmp_path, monkeypatch, capsys
):
    """All ranks would wait for it."""
    monkeypatch.setattr(train, "LARGEST_SAMPLED", 100)
    monkeypatch.setattr(train, "print_sample", None)
    argv = flags(data=corpus_folder, max_steps=1, out_dir=tmp_path)
    assert run_here("train", argv) is None
    assert f"minutes; python sample.py --model {tmp_path}/model.pt" in capsys.readouterr().out


def test_run_resumes_from_another_folder(run_here, corpus_folder, tmp_path, monkeypatch, capsys):
    """The checkpoint's relative --data goes by the folder in which the run started."""
    shutil.copytree(corpus_folder, tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "lock", lambda *_: os.open(os.devnull, os.O_RDONLY))
    argv = flags(data="corpus", max_steps=2, out_dir="run")
    assert run_here("train", argv) is None
    monkeypatch.chdir("/")
    argv = ["--resume", str(tmp_path / "run"), "--max_steps", "3"]
    assert run_here("train", argv) is None
    os.rename(tmp_path / "corpus", tmp_path / "moved")
    capsys.readouterr()
    assert run_here("train", argv) == 2
    error = capsys.readouterr().err
    assert "so says the --data of checkpoint" in error and "name the corpus with --data" in error


def test_control_characters_of_a_sample_do_not_reach_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sample, "load", lambda path: (None, SimpleNamespace(name="byte")))
    monkeypatch.setattr(sample, "continue_text", lambda *_, **__: "a\x1b[2Jb\n\tc\x9f")
    sample.print_sample("model.pt")
    monkeypatch.setattr(sys, "argv", ["sample.py", "--model", "model.pt"])
    sample.main()
    printed = capsys.readouterr().out
    assert printed.count(r"a\x1b[2Jb") == 2 and printed.count(r"c\x9f") == 2
    assert "\x1b" not in printed and "\n\tc" in printed


def test_corpus_that_was_made_elsewhere_has_no_bits_per_byte(run_here, tmp_path, capsys):
    """Nobody knows how many bytes of text a token of it is."""
    for name in "train.bin", "val.bin":
        (1 + np.arange(4000) % 97).astype(np.uint16).tofile(tmp_path / name)
    (tmp_path / "meta.json").write_text('{"dtype": "uint16", "vocab_size": 257}')
    argv = flags(data=tmp_path, max_steps=1, out_dir=tmp_path / "out")
    assert run_here("train", argv) is None
    printed = capsys.readouterr().out
    assert "nats/token" in printed and "bits/byte" not in printed and "nan" not in printed


def test_model_is_saved_although_its_folder_was_removed(tmp_path):
    model = train.make_model(ModelConfig(1, 1, 8, 8, 11), Mesh(1, torch.device("cpu")))
    hf.save_model(tmp_path / "removed" / "model.pt", model, "byte", {})
    assert (tmp_path / "removed" / "model.pt").exists()


def test_nothing_is_written_through_a_link(run_here, corpus_folder, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    for name in "metrics.jsonl", "model.pt.tmp", "timeline-0.json":
        (out / name).symlink_to(theirs)
    argv = [*flags(data=corpus_folder, max_steps=1, out_dir=out), "--timeline"]
    assert run_here("train", argv) is None
    assert theirs.read_text() == "precious"
    assert (out / "metrics.jsonl").read_text().count("\n") > 2 and (out / "model.pt").exists()


def test_tokens_per_step_are_divided_at_once():
    """As few micro-steps as the limit allows, also for numbers that have few divisors."""
    for tokens, batch_size, expected in (
        (2_147_483_520, 8, (8, 33_554_430)),
        (8 * 2_147_483, 8, (1, 2_147_483)),  # a prime
        (8 * 12, 8, (6, 2)),
        (8 * 12, 5, (4, 3)),
        (8 * 3, 5, (3, 1)),
    ):
        config = ranks.run_config(tokens_per_step=tokens, batch_size=batch_size)
        config.dtype = "fp32"
        plan = Plan(config, train.METHODS["edit"], 10, 1)
        assert (plan.micro_batch, plan.micro_steps) == expected


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
    monkeypatch.setattr(train.Training, "evaluate", None)
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


@each_row("open_full", FULL_DISKS)
def test_disk_without_room_for_the_last_checkpoint_costs_only_that(
    open_full, run_here, corpus_folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(checkpoint, "open", lambda path, mode: open_full(), raising=False)
    argv = [*flags(data=corpus_folder, max_steps=2), "--out_dir", str(tmp_path)]
    assert run_here("train", argv) is None
    line = f"saved   none: no checkpoint could be written to {tmp_path}: .*No space left on device\n"
    assert re.search(line, capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "model.pt"}


@each_row("open_full", FULL_DISKS)
def test_disk_without_room_for_the_model_is_named_and_gets_its_room_back(
    open_full, tmp_path, monkeypatch
):
    model = train.make_model(ModelConfig(1, 1, 8, 8, 11), Mesh(1, torch.device("cpu")))
    monkeypatch.setattr(hf, "open", lambda path, mode: open_full(), raising=False)
    (tmp_path / "model.pt.tmp").touch()
    with pytest.raises(UserError, match="model.pt could not be written: .*No space left on device"):
        hf.save_model(tmp_path / "model.pt", model, "byte", {})
    assert not list(tmp_path.iterdir())


def differ_in_lr(argv, rank, *more):
    ranks._command([*argv, f"--lr=0.{rank}1"], rank, *more)


@each_row(
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
def test_full_and_closed_output_end_nothing_and_torchrun_gives_one_line(corpus_folder, tmp_path):
    train = f"{sys.executable} train.py --dry_run --device cpu --data {corpus_folder}"
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --local_addr 127.0.0.1"
    torchrun += " --nproc_per_node 2"
    cases = [  # shell line; exit code; the line of error
        (f"{train} > /dev/full", 0, "output is lost: No space left"),
        (f"{train} | true", 0, "output is lost: Broken pipe"),  # as with `| head -1`
        (f"{train} >&-", 0, "output is lost: it is closed"),
        (f"{torchrun} train.py --method adam", 1, "--method"),  # one rank prints; and torchrun
    ]
    shell = ["bash", "-o", "pipefail", "-c"]
    options = dict(stderr=subprocess.PIPE, text=True)
    started = [subprocess.Popen([*shell, line], cwd=ROOT, **options) for line, *_ in cases]
    for process, (line, code, message) in zip(started, cases):
        errors = process.communicate(timeout=900)[1]
        ours = [each for each in errors.splitlines() if re.match(r"train.py: error: |note ", each)]
        assert process.returncode == code and len(ours) == 1, (line, errors)
        assert message in ours[0] and 'train.py", line' not in errors


def show_help(capsys, *argv):
    with pytest.raises(SystemExit) as done:
        parse(["--help", *argv], train.METHODS)
    assert done.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def listed_in(text):
    return set(re.findall(r"--(?!no-)(\w+)", text))


@each_row("method", ["edit", "diloco", "minibatch", "a_edit"])
def test_help_of_a_method_lists_its_flags_with_its_defaults(method, capsys):
    text = show_help(capsys, "--method", method)
    text = text.split(f"The flags of --method {method}: options:")[1]
    fields = parse(["--method", method], train.METHODS)[0].__dataclass_fields__
    assert listed_in(text) == {"help", *fields}
    for name, f in fields.items():
        entry = re.search(rf" --{name}\b.*?(?= --(?!no-)|$)", text)[0]
        assert f.default == "" or f"(default: {f.default})" in entry, name
    groups = ["run: --method", "model: --model", "data: --data", "optimizer: --optimizer"]
    groups += ["checkpoints and resuming: --checkpoint_interval", "simulation: --slow_replica"]
    for group in groups:
        assert group in text
    if method == "diloco":
        assert "of --method diloco: --sync_warmup_steps" in text


def test_help_alone_is_that_of_the_default_method(capsys):
    alone = show_help(capsys)
    assert alone == show_help(capsys, "--method", Config.method)
    for name in ranks.OUR_METHODS:
        method = train.METHODS[name]
        first_line = sys.modules[method.__module__].__doc__.splitlines()[0]
        assert f"{name} {first_line}" in alone


def test_flag_of_an_own_method_may_have_the_name_of_another_methods_flag():
    @dataclasses.dataclass
    class OwnConfig(method_module.LocalConfig):
        density: str = option("low", "a word", choices=["low", "high"])

    class Own(method_module.Method):
        Config = OwnConfig

    methods = {**train.METHODS, "own": Own}
    config, _ = parse(["--density", "high", "--method", "own"], methods)
    assert config.density == "high"
    config, _ = parse("--density 0.1 --method top_k".split(), methods)
    assert config.density == 0.1


def test_resumed_run_has_the_flags_of_its_checkpoints_method(
    corpus_folder, tmp_path, run_here, capsys, monkeypatch
):
    monkeypatch.setattr(checkpoint, "lock", lambda *_: os.open(os.devnull, os.O_RDONLY))
    argv = [*flags(data=corpus_folder, max_steps=2), "--out_dir", str(tmp_path)]
    top_k = ["--method", "top_k", "--sync_warmup_steps", "4", "--density", "0.5"]
    assert run_here("train", [*argv, *top_k]) is None
    resume = [*argv, "--resume", str(tmp_path)]
    assert run_here("train", [*resume, "--max_steps", "3", "--density", "0.25"]) is None
    assert "--density 0.5 -> 0.25" in capsys.readouterr().out

    # in the warm-up the method may change: flags that it does not have are no mistake
    assert run_here("train", [*resume, "--max_steps", "4", "--method", "edit"]) is None
    printed = capsys.readouterr().out
    assert "--method top_k -> edit" in printed
    assert run_here("train", [*resume, "--max_steps", "5", "--density", "0.25"]) == 2
    assert "--method edit does not have --density" in capsys.readouterr().err


def test_presets_set_what_is_not_given():
    argv = "--model 124m --n_layer 3 --lr 0.5 --tau 9".split()
    config, given = parse(argv, train.METHODS)
    assert (config.n_layer, config.n_embd, config.lr, config.tau) == (3, 768, 0.5, 9)
    assert given == dict(model="124m", n_layer=3, lr=0.5, tau=9)


def test_more_replicas_are_trimmed_than_there_are():
    with pytest.raises(UserError, match="--trim 2: leaves none of 4"):
        argv = ["--method", "robust", "--aggregate", "trimmed_mean", "--trim", "2"]
        parse(argv, train.METHODS)[0].check(4)


@each_row("tau, delay", [(4, 0), (8, 1), (16, 2), (64, 2)])
def test_default_delay_follows_the_rounds(tau, delay):
    for method in ("streaming_diloco", "streaming_edit"):
        config, _ = parse(["--method", method, "--tau", str(tau)], train.METHODS)
        config.check(2)
        assert config.steps_late == delay


def test_rounds_of_zero_one_adam_grow_as_scheduled():
    flags = dict(tau_schedule="2:96,4:384", tau=8, sync_warmup_steps=10)
    method = method_alone(method="zero_one_adam", steps=10, **flags)
    taus = []
    for before in (0, 95, 96, 479, 480):  # steps of local rounds before this one
        method.steps = 10 + before + method.local_steps
        taus.append(method.steps_of_round())
    assert taus == [2, 2, 4, 4, 8]


def test_a_resumed_run_does_not_take_what_belongs_to_a_start():
    saved = {"overwrite": True, "tau": 3, "lr": 0.5}
    config = make_config({"lr": 0.1}, train.METHODS, saved)
    assert (config.overwrite, config.tau, config.lr) == (False, 3, 0.1)


def test_model_and_corpus_must_have_the_same_tokens():
    cases = [  # tokenizers of the model and of the corpus, size of the corpus's vocabulary; do they fit?
        ("byte", "byte", 257, True),
        ("byte", "byte", 300, False),
        ("{a", "{b", 257, False),
        ("{a", "gpt2", 257, True),
        ("gpt2", hf.UNKNOWN, 257, True),
    ]
    for ours, theirs, vocab_size, fits in cases:
        source = hf.Source("", ModelConfig(), ours, {})
        corpus = SimpleNamespace(tokenizer=theirs, vocab_size=vocab_size)
        refused = pytest.raises(UserError, match="another vocabulary")
        with contextlib.nullcontext() if fits else refused:
            source.check(ModelConfig(block_size=4), corpus)
        assert corpus.tokenizer == (ours if theirs == hf.UNKNOWN else theirs)


@each_row(
    "ours, theirs, tokens, padded",
    [("gpt2", "gpt2", 320, True), ("gpt2", "gpt2", 384, False), ("gpt2", "{a", 320, False)],
)
def test_model_of_a_large_preset_has_a_padded_vocabulary_and_fits_its_corpus(
    ours, theirs, tokens, padded
):
    source = hf.Source("", ModelConfig(vocab_size=tokens), ours, {})
    corpus = SimpleNamespace(tokenizer=theirs, vocab_size=257)
    assert source.is_padded(corpus) == padded


def test_clock_stops_for_evaluations_and_goes_on_in_a_resumed_run(monkeypatch):
    moments = 0.0, 5.0, 35.0, 36.0, 100.0, 101.0
    monkeypatch.setattr("time.perf_counter", iter(moments).__next__)
    clock = Clock(torch.device("cpu"))
    with clock:  # from 5 to 35 s
        pass
    assert clock.train_s() == 6.0
    clock.start_at({"train_s": 50.0})
    assert clock.train_s() == 51.0


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
        "sync": "round step tau steps loss pseudo_grad_norm weight dropped rolled_back clip "
        "stall_ms wait_others_ms wait_link_ms sync_bytes",
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
