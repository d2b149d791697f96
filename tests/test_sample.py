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
from plumbing.tokenizer import UNKNOWN, make_tokenizer

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


def test_model_of_token_files_gives_logits_and_says_why_it_gives_no_text(tmp_path):
    llama = Llama(CONFIG, seed=0)
    saved = {"model": llama.state_dict(), "model_config": vars(CONFIG), "config": {}}
    torch.save(saved | {"tokenizer": UNKNOWN}, tmp_path / "model.pt")
    model, encoding = sample.load(str(tmp_path / "model.pt"))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), llama(tokens)) and encoding is None
    assert len(list(sample.generate(model, [1, 2, 3], 5))) == 5
    with pytest.raises(UserError, match="the tokenizer of this model is not known"):
        sample.continue_text(model, encoding, "a", count=1)


def test_end_of_a_run_without_a_tokenizer_prints_the_reason_in_place_of_a_sample(tmp_path, capsys):
    saved = {"model": Llama(CONFIG, seed=0).state_dict(), "model_config": vars(CONFIG)}
    torch.save(saved | {"tokenizer": UNKNOWN, "config": {}}, tmp_path / "model.pt")
    sample.print_sample(str(tmp_path / "model.pt"))
    assert "sample  none: the tokenizer of this model is not known" in capsys.readouterr().out
