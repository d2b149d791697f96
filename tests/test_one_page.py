"""The page that students read first does what the distributed run does."""

import inspect
import re

import pytest

import one_page
import train
from config import parse
from model import ModelConfig
from plumbing import simulate
from ranks import run_training


@pytest.mark.parametrize("more", [{}, dict(tau=3, steps=23)])  # 23: the last round is shorter
def test_page_prints_the_losses_of_the_distributed_run(
    corpus, corpus_folder, monkeypatch, capsys, more
):
    # A high rate, so that the replicas' norms and weights differ.
    monkeypatch.setattr(one_page, "learning_rate", lambda step, steps: 0.05)
    lengths = dict(steps=40, warmup=8, tau=8) | more
    one_page.train(corpus=corpus, shape=ModelConfig(2, 2, 16, 8), **lengths)
    shown = dict(re.findall(r"step (\d+)/\d+ \| loss (\d+\.\d+)", capsys.readouterr().out))
    options = dict(method="edit", sync_warmup_steps=8, tau=lengths["tau"], dtype="fp32")
    options |= dict(max_steps=lengths["steps"], n_layer=2, n_head=2, n_embd=16, batch_size=8)
    options |= dict(lr=0.05, lr_warmup_steps=0, min_lr_ratio=1.0)
    run = run_training(4, corpus_folder, **options)
    theirs = {f"{row['step']:05d}": row["loss"] for row in run.rows("step")}
    # 4 decimals are printed, and the last one may be rounded up or down.
    close = {step: pytest.approx(theirs[step], abs=1e-4) for step in shown}
    assert len(shown) >= 3 and {step: float(loss) for step, loss in shown.items()} == close
    weights = [row["weight"] for row in run.rows("sync")]
    assert len(weights) > 3 and max(map(max, weights)) > 0.253


def test_page_has_the_rates_and_defaults_of_train():
    config = parse(["--method", "edit"], train.METHODS, simulate.Config)[0]
    for step in (0, 30, 49, 50, 400, 699):
        theirs = train.learning_rate(step, config)
        assert one_page.learning_rate(step, config.max_steps) == pytest.approx(theirs, rel=1e-12)
    signature = inspect.signature(one_page.train).parameters
    names = dict(steps="max_steps", warmup="sync_warmup_steps", tau="tau", seed="seed")
    assert all(signature[ours].default == getattr(config, name) for ours, name in names.items())
    assert signature["shape"].default == ModelConfig()
