"""Sampling: reproducible, bounded by the context, one line per mistake."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import sample as program
from model import Llama, ModelConfig
from plumbing.config import UserError
from ranks import ROOT
from sample import generate

CONFIG = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=16)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.pt"
    saved = {"model": Llama(CONFIG).state_dict(), "model_config": dataclasses.asdict(CONFIG)}
    torch.save(saved | {"tokenizer": "byte", "config": {}}, path)
    return path


def test_sampling_is_a_function_of_seed_and_cools_to_the_likeliest():
    model = Llama(CONFIG)
    draw = lambda **options: list(generate(model, [1, 2, 3], 20, **options))
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    cold = draw(temperature=0)
    assert cold == draw(temperature=1.0, top_k=1) and len(cold) == 20
    for temperature in (1e-46, 5e-324, 1e-7):
        assert cold == draw(temperature=temperature)
    tokens = torch.tensor([[1, 2, 3]])
    assert cold[0] == model(tokens)[0, -1].argmax()
    # hot: all tokens, or the 3 most likely ones
    assert len(set(draw(temperature=1e300, top_k=0))) > 10
    one = lambda seed: next(generate(model, [1], 1, temperature=1e300, top_k=3, seed=seed))
    best = model(torch.tensor([[1]]))[0, -1].topk(3).indices.tolist()
    assert {one(seed) for seed in range(40)} == set(best)


def test_context_is_the_last_block_size_tokens():
    model, long = Llama(CONFIG), list(range(100, 140))
    draw = lambda tokens: list(generate(model, tokens, 5, temperature=0))
    assert draw(long) == draw(long[-16:])


def test_diverged_model_is_one_line():
    model = Llama(CONFIG)
    model.layers[0].weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="diverged"):
        list(generate(model, [1], 1))


def run(path, *more, **options):
    command = [sys.executable, ROOT / "sample.py", "--model", path, *map(str, more)]
    return subprocess.run(command, text=True, timeout=60, stderr=subprocess.PIPE, **options)


def test_command_line_continues_a_prompt_and_notes_what_it_cuts(model_file):
    done = run(model_file, "--prompt", "x" * 50, "--tokens", 30, stdout=subprocess.PIPE)
    assert done.returncode == 0 and done.stdout.startswith("x" * 50) and len(done.stdout) > 51
    assert done.stderr.count("\n") == 1 and "the last 16 of 50" in done.stderr


def test_full_or_closed_output_is_one_line_or_a_quiet_end(model_file):
    with open("/dev/full", "w") as full:
        done = run(model_file, stdout=full)
    line = "sample.py: error: output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)
    end, start = os.pipe()
    os.close(end)
    done = run(model_file, stdout=start)
    os.close(start)
    assert (done.returncode, done.stderr) == (141, "")


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_wrong_input_raises_one_line(model_file, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("this is no model")
    (tmp_path / "folder").mkdir()
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other")
    torch.save(Malicious(str(tmp_path / "executed")), tmp_path / "malicious")
    files = [(tmp_path / name, []) for name in ("missing", "text", "folder", "other", "malicious")]
    files += [("x" * 300, []), (model_file / "below", [])]
    wrong = ["--warmth 1", "--temperature nan", "--temperature -1", "--temperature inf"]
    wrong += ["--seed -1", "--seed 9" + 30 * "0", "--top_k -1"]
    wrong += ["--tokens -1", "--tokens 99999999999", "--tokens " + 5000 * "9"]
    for path, flags in files + [(model_file, line.split()) for line in wrong]:
        monkeypatch.setattr(sys, "argv", ["sample.py", "--model", str(path), *flags])
        with pytest.raises(UserError) as error:
            program.main()
        assert "\n" not in str(error.value) and len(str(error.value)) < 420
    assert not (tmp_path / "executed").exists() and capsys.readouterr().out == ""
