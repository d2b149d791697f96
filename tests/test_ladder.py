"""Degeneracy: where two methods, or two meshes, must be the same, they are."""

import pytest
import torch

from ranks import run_training, train_all

PLAIN = dict(anomaly_elimination=False, weighted_averaging=False, pseudo_grad_clipping=False)


def test_minibatch_is_the_same_on_every_mesh_in_fp32(corpus_folder):
    options = dict(method="minibatch", dtype="fp32", max_steps=15, lr=3e-3)
    alone = run_training(1, corpus_folder, accum=4, **options)
    cases = [(None, None, options | dict(shards=shards)) for shards in (1, 2, 4)]
    for run in train_all(4, corpus_folder, *cases):
        assert run.losses == pytest.approx(alone.losses, abs=1e-4)
        ours, theirs = (each.rows("eval")[-1]["val_loss"] for each in (run, alone))
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_edit_without_penalty_equals_diloco(corpus_folder):
    options = dict(outer_lr=0.7, outer_momentum=0.9, shards=2, dtype="fp32")
    options |= dict(tau=3, sync_warmup_steps=2, max_steps=13)  # four rounds
    cases = dict(method="edit") | PLAIN, dict(method="diloco")
    edit, diloco = train_all(4, corpus_folder, *((None, None, options | case) for case in cases))
    assert edit.losses == pytest.approx(diloco.losses, abs=1e-5)


def test_sgd_tau_1_and_plain_averaging_equal_minibatch(corpus_folder):
    """x_i - lr g_i, averaged, is x - lr mean(g): with SGD inside, without clipping. SlowMo's outer
    momentum is then SGD's, while the learning rate changes."""
    options = dict(max_steps=6, grad_clip=0, n_layer=1)
    local = options | dict(sync_warmup_steps=0, tau=1, outer_lr=1.0, outer_momentum=0.0)
    plain, with_momentum, *averaged, slowmo = train_all(
        2, corpus_folder,
        (inner_sgd, None, options | dict(method="minibatch")),
        (momentum_sgd, None, options | dict(method="minibatch")),
        (inner_sgd, None, local | dict(method="diloco")),
        (inner_sgd, None, local | dict(method="edit") | PLAIN),
        (inner_sgd, None, local | dict(method="post_local_sgd")),
        (inner_sgd, None, local | dict(method="slowmo", outer_momentum=0.6)),
    )  # fmt: skip
    for run, minibatch in (*((run, plain) for run in averaged), (slowmo, with_momentum)):
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


def momentum_sgd(method, model, mesh):
    """Replace AdamW's update by that of torch.optim.SGD(momentum=0.6)."""
    buffer = torch.zeros_like(model.master)

    def step(optimizer):
        buffer.mul_(0.6).add_(model.grad)
        model.master.sub_(buffer, alpha=optimizer.param_groups[0]["lr"])

    torch.optim.AdamW.step = step  # in this rank's process only


def test_warmup_is_bitwise_minibatch(corpus_folder):
    options = dict(dtype="fp32", shards=2, max_steps=4, sync_warmup_steps=4, n_layer=1)
    methods = "minibatch", "edit", "diloco", "a_edit"
    cases = [(None, None, options | dict(method=method)) for method in methods]
    minibatch, *others = train_all(4, corpus_folder, *cases)
    for run in others:
        assert run.losses == minibatch.losses and run.rows("sync") == []
        assert all(torch.equal(run.model[name], value) for name, value in minibatch.model.items())
