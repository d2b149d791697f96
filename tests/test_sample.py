"""Sampling: reproducible, bounded by the context, one line per mistake."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from model import Llama, ModelConfig
from ranks import ROOT
from sample import generate

CONFIG = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=16)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.pt"
    saved = {"model": Llama(CONFIG).state_dict(), "model_config": dataclasses.asdict(CONFIG)}
    torch.save(saved | {"tokenizer": "byte", "config": {}}, path)
    return path


def sample(*flags):
    return subprocess.run(
        [sys.executable, ROOT / "sample.py", *map(str, flags)], capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip


def test_sampling_is_a_function_of_seed_and_cools_to_the_likeliest():
    model = Llama(CONFIG)
    draw = lambda **options: list(generate(model, [1, 2, 3], 20, **options))
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    cold = draw(temperature=0)
    assert cold == draw(temperature=1.0, top_k=1) and len(cold) == 20
    tokens = torch.tensor([[1, 2, 3]])
    assert cold[0] == model(tokens)[0, -1].argmax()


def test_context_is_the_last_block_size_tokens():
    model, long = Llama(CONFIG), list(range(100, 140))
    draw = lambda tokens: list(generate(model, tokens, 5, temperature=0))
    assert draw(long) == draw(long[-16:])


def test_command_line_continues_the_prompt(model_file):
    done = sample("--model", model_file, "--prompt", "def ", "--tokens", 30)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("def ")
    assert len(done.stdout) > 10


def test_prompt_longer_than_the_context_is_cut_with_a_note(model_file):
    done = sample("--model", model_file, "--prompt", "x" * 50, "--tokens", 5)
    assert done.returncode == 0 and done.stdout.startswith("x" * 50)
    assert done.stderr.count("\n") == 1 and "the last 16" in done.stderr


@pytest.mark.parametrize(
    "wrong", ["missing", "text", "other pickle", "folder", "malicious", "flag", "nan"]
)
def test_wrong_input_is_one_line_and_exit_code_2(wrong, model_file, tmp_path):
    path, extra = tmp_path / "model.pt", []
    if wrong == "text":
        path.write_text("this is no model")
    elif wrong == "other pickle":
        torch.save({"weights": torch.zeros(3)}, path)
    elif wrong == "folder":
        path.mkdir()
    elif wrong == "malicious":
        torch.save(Malicious(str(tmp_path / "executed")), path)
    elif wrong in ("flag", "nan"):
        path = model_file
        extra = {"flag": ["--warmth", "1"], "nan": ["--temperature", "nan"]}[wrong]
    done = sample("--model", path, *extra)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("sample.py: error: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "executed").exists()


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")
