"""Degeneracy: where two methods, or two meshes, must be the same, they are."""

import pytest
import torch

from ranks import run_training

PLAIN = dict(anomaly_elimination=False, weighted_averaging=False, pseudo_grad_clipping=False)


def test_minibatch_fp32_50_steps_is_the_same_on_every_mesh(corpus_folder):
    options = dict(method="minibatch", dtype="fp32", max_steps=50, lr=3e-3)
    alone = run_training(1, corpus_folder, accum=4, **options)
    for shards in (1, 2, 4):
        run = run_training(4, corpus_folder, shards=shards, **options)
        assert run.losses == pytest.approx(alone.losses, abs=1e-4)
        ours, theirs = (each.rows("eval")[-1]["val_loss"] for each in (run, alone))
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_edit_without_penalty_equals_diloco(corpus_folder):
    options = dict(outer_lr=0.7, outer_momentum=0.9, shards=2, dtype="fp32")
    options |= dict(tau=4, sync_warmup_steps=3, max_steps=23)  # five rounds
    edit = run_training(4, corpus_folder, method="edit", **PLAIN, **options)
    diloco = run_training(4, corpus_folder, method="diloco", **options)
    assert edit.losses == pytest.approx(diloco.losses, abs=1e-5)


def test_sgd_tau_1_and_plain_averaging_equals_minibatch(corpus_folder):
    """x_i - lr g_i, averaged, is x - lr mean(g): with SGD inside, without clipping."""
    options = dict(tamper=inner_sgd, max_steps=6, grad_clip=0, shards=2)
    outer = dict(sync_warmup_steps=0, tau=1, outer_lr=1.0, outer_momentum=0.0)
    minibatch = run_training(4, corpus_folder, method="minibatch", **options)
    for method in (dict(method="diloco"), dict(method="edit") | PLAIN):
        run = run_training(4, corpus_folder, **method, **outer, **options)
        # The logged loss of a local step is replica 0's, that of the sync is all replicas'.
        losses = [sum(row["loss"]) / 2 for row in run.rows("sync")]
        assert losses == pytest.approx(minibatch.losses, rel=1e-10)
        for name, value in minibatch.model.items():
            torch.testing.assert_close(run.model[name], value, rtol=1e-8, atol=1e-10)


def inner_sgd(method, model, mesh):
    """Replace AdamW's update by x <- x - lr g."""

    def step(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])

    torch.optim.AdamW.step = step  # in this rank's process only


def test_warmup_is_bitwise_minibatch(corpus_folder):
    options = dict(dtype="fp32", shards=2, max_steps=6)
    minibatch = run_training(4, corpus_folder, method="minibatch", **options)
    for method in ("edit", "diloco", "a_edit"):
        run = run_training(4, corpus_folder, method=method, sync_warmup_steps=6, **options)
        assert run.losses == minibatch.losses and run.rows("sync") == []
        assert all(torch.equal(run.model[name], value) for name, value in minibatch.model.items())
