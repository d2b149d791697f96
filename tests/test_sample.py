"""Sampling: reproducible and bounded by the context. Wrong input is in test_cli.py."""

import dataclasses
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample
from config import UserError
from model import Llama, ModelConfig
from plumbing.tokenizer import make_tokenizer

CONFIG = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=16)


def test_sampling_is_a_function_of_seed_and_cools_to_the_likeliest():
    model = Llama(CONFIG, seed=0)
    draw = lambda **options: list(sample.generate(model, [1, 2, 3], 20, **options))
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    cold = draw(temperature=0)
    assert cold == draw(temperature=1.0, top_k=1) and len(cold) == 20
    assert all(cold == draw(temperature=small) for small in (1e-310, 1e-46, 1e-7))
    assert cold[0] == model(torch.tensor([[1, 2, 3]]))[0, -1].argmax()
    # hot: all tokens, or the 3 most likely ones
    assert len(set(draw(temperature=1e300, top_k=0))) > 10
    hot = dict(temperature=1e300, top_k=3)
    one = lambda seed: next(sample.generate(model, [1], 1, seed=seed, **hot))
    best = model(torch.tensor([[1]]))[0, -1].topk(3).indices.tolist()
    assert {one(seed) for seed in range(40)} == set(best)


def test_context_is_the_last_block_size_tokens():
    model = Llama(CONFIG, seed=0)
    long = list(range(100, 140))
    draw = lambda tokens: list(sample.generate(model, tokens, 5, temperature=0))
    assert draw(long) == draw(long[-16:])


def test_text_begins_and_ends_at_the_end_of_text_and_has_no_token_of_the_padding():
    byte = make_tokenizer("byte")
    seen = []

    def model(context):  # likes a token of the padding most, then the end of the text
        seen.append(context.tolist())
        logits = torch.zeros(*context.shape, 300)
        logits[..., 299] = 2.0
        logits[..., 256 if len(seen) == 3 else ord("a")] = 1.0
        return logits

    model.config = CONFIG
    assert sample.continue_text(model, byte, "", count=9, temperature=0) == "aa"
    assert seen == [[[256]], [[256, 97]], [[256, 97, 97]]]


def test_prompt_that_is_no_utf_8_is_read_with_marks_in_its_place():
    """As `--prompt $'\\xe9'` arrives. tiktoken and tokenizers refuse such a text."""
    strict = SimpleNamespace(begin=[], eot_token=256, n_vocab=257, decode=bytes)
    strict.encode = lambda text: np.frombuffer(text.encode(), np.uint8)
    model = lambda context: torch.zeros(*context.shape, 257)
    model.config = CONFIG
    assert sample.continue_text(model, strict, "a\udce9", count=0, temperature=0) == b"a?"


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_program_continues_a_prompt_and_executes_nothing_of_the_file(tmp_path, monkeypatch, capsys):
    saved = {"model": Llama(CONFIG, seed=0).state_dict(), "model_config": dataclasses.asdict(CONFIG)}
    torch.save(saved | {"tokenizer": "byte", "config": {}}, tmp_path / "model.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sample.py", "--model", "model.pt", "--prompt", "x" * 50])
    sample.main()
    printed = capsys.readouterr()
    assert printed.out.startswith("x" * 50) and len(printed.out) > 51
    assert printed.err == ""
    torch.save(saved | {"tokenizer": "byte", "config": Malicious()}, "model.pt")
    with pytest.raises(UserError, match="is not a model"):
        sample.main()
    assert not (tmp_path / "executed").exists()


SHAPE = ("n_layer", 10**8), ("n_layer", 2), ("n_layer", "1"), ("n_head", 3), ("n_head", 8)
SHAPE += ("n_head", 0), ("n_embd", "8"), ("n_embd", 10**9), ("block_size", 10**9)
SHAPE += ("block_size", 0), ("block_size", -1), ("block_size", "x"), ("norm_eps", "x")
SHAPE += ("norm_eps", float("nan")), ("rope_base", 0), ("rope_base", float("inf"))
SHAPE += ("vocab_size", 0), ("more", 1)
TENSORS = {
    "NaN": lambda x: x.fill_(float("nan")),
    "inf": lambda x: x.fill_(float("inf")),
    "sparse": lambda x: x.to_sparse(),
    "complex": lambda x: x.to(torch.complex64),
    "whole numbers": lambda x: x.to(torch.int32),
    "no storage": lambda x: x.to("meta"),
    "another shape": lambda x: x[:1].clone(),
    "a list": lambda x: x.tolist(),
}


def test_model_of_wrong_content_is_refused_in_one_line(tmp_path):
    path = tmp_path / "model.pt"

    def save(change):
        model = Llama(CONFIG, seed=0)
        saved = {"model": model.state_dict(), "model_config": dict(vars(CONFIG))}
        saved |= {"tokenizer": "byte", "config": {}}
        change(saved)
        torch.save(saved, path)

    save(lambda saved: None)
    sample.load(str(path))
    changes = {}
    for name, value in SHAPE:
        changes[name, value] = lambda saved, n=name, v=value: saved["model_config"].update({n: v})
    for name, how in TENSORS.items():
        last = "layers.2.output.weight"

        def spoil(saved, how=how):
            saved["model"][last] = how(saved["model"][last])

        changes[name] = spoil
    changes["no tokenizer"] = lambda saved: saved.update(tokenizer=7)
    changes["no norm"] = lambda saved: saved["model"].pop("layers.2.norm.weight")
    changes["no config"] = lambda saved: saved.update(model_config=None)
    for name, change in changes.items():
        save(change)
        with pytest.raises(UserError) as error:
            sample.load(str(path))
        line = str(error.value)
        kinds = f"{path} is not a model (", f"{path} is of another model than the Llama"
        assert line.startswith(kinds) and "\n" not in line, name


def test_sampling_from_a_model_of_a_long_context_takes_little_memory(tmp_path):
    """Of the rotary angles only those of the last 65,536 tokens are made."""
    saved = {"model": Llama(CONFIG, seed=0).state_dict(), "tokenizer": "byte", "config": {}}
    saved["model_config"] = vars(CONFIG) | {"block_size": 2**20}
    torch.save(saved, tmp_path / "model.pt")
    model, _ = sample.load(str(tmp_path / "model.pt"))
    assert len(model.layers[1].cos) == 2**16
