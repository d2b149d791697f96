"""Degeneracy: where two methods, or two meshes, must be the same, they are."""

import pytest
import torch

from ranks import run_training

PLAIN = dict(anomaly_elimination=False, weighted_averaging=False, pseudo_grad_clipping=False)
ROUNDS = dict(tau=4, sync_warmup_steps=3, max_steps=23)  # five rounds


def assert_same(a, b, rtol):
    assert a.losses == pytest.approx(b.losses, rel=rtol)
    for name, value in b.model.items():
        torch.testing.assert_close(a.model[name], value, rtol=100 * rtol, atol=rtol)


def test_minibatch_fp32_50_steps_is_the_same_on_every_mesh(corpus_folder):
    options = dict(method="minibatch", dtype="fp32", max_steps=50, lr=3e-3)
    options |= dict(n_embd=16, n_head=2, n_layer=3)
    alone = run_training(1, corpus_folder, accum=4, **options)
    for shards in (4, 1, 2):
        run = run_training(4, corpus_folder, shards=shards, **options)
        assert run.losses == pytest.approx(alone.losses, abs=1e-4)
        ours, theirs = (each.rows("eval")[-1]["val_loss"] for each in (run, alone))
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("shards", [1, 2])
def test_edit_without_penalty_equals_diloco(shards, corpus_folder):
    outer = dict(outer_lr=0.7, outer_momentum=0.9, shards=shards, dtype="fp32") | ROUNDS
    edit = run_training(2 * shards, corpus_folder, method="edit", **PLAIN, **outer)
    diloco = run_training(2 * shards, corpus_folder, method="diloco", **outer)
    assert edit.losses == pytest.approx(diloco.losses, abs=1e-5)


def test_edit_with_penalty_does_not_depend_on_shards(corpus_folder):
    # equal per-replica batch: 4 sequences over 1, 2 or 4 ranks
    runs = [
        run_training(
            2 * shards, corpus_folder, method="edit", shards=shards, batch_size=4 // shards,
            dtype="fp32", pseudo_grad_clip=0.1, **ROUNDS,
        )
        for shards in (1, 2, 4)
    ]  # fmt: skip
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)
        for a, b in zip(run.rows("sync"), runs[0].rows("sync")):
            assert a["weight"] == pytest.approx(b["weight"], rel=1e-4)
            assert a["clip"] == pytest.approx(b["clip"], rel=1e-3)


def test_diloco_outer_lr_1_without_momentum_is_parameter_averaging(corpus_folder):
    options = dict(method="diloco", sync_warmup_steps=0, tau=3, max_steps=3)
    options |= dict(outer_lr=1.0, outer_momentum=0.0)
    run = run_training(2, corpus_folder, tamper=keep_local_parameters, **options)
    mean = sum(rank["method_state"]["local"] for rank in run.ranks) / 2
    torch.testing.assert_close(run.ranks[0]["master"], mean, rtol=1e-12, atol=1e-14)


def keep_local_parameters(method, model, mesh):
    sync, kept = method.sync, {}

    def keep_and_sync():
        kept["local"] = model.master.clone()
        sync()

    method.sync, method.state_dict = keep_and_sync, lambda: kept


def test_sgd_tau_1_and_plain_averaging_equals_minibatch(corpus_folder):
    """x_i - lr g_i, averaged, is x - lr mean(g): with SGD inside, without clipping."""
    options = dict(tamper=inner_sgd, max_steps=6, grad_clip=0, shards=2)
    outer = dict(sync_warmup_steps=0, tau=1, outer_lr=1.0, outer_momentum=0.0)
    minibatch = run_training(4, corpus_folder, method="minibatch", **options)
    for method in (dict(method="diloco"), dict(method="edit") | PLAIN):
        run = run_training(4, corpus_folder, **method, **outer, **options)
        assert_same(run, minibatch, 1e-10)


def inner_sgd(method, model, mesh):
    """Replace AdamW's update by x <- x - lr g (this runs in a process of its own)."""
    import torch.optim

    def step(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])

    torch.optim.AdamW.step = step  # in this rank's process only


def test_edit_with_one_replica_is_nesterov_lookahead(corpus_folder):
    options = dict(outer_lr=0.7, outer_momentum=0.9) | ROUNDS
    edit = run_training(1, corpus_folder, method="edit", **options)
    diloco = run_training(1, corpus_folder, method="diloco", **options)
    assert_same(edit, diloco, 1e-10)  # one weight of 1, no norm near the clip
    assert all(row["weight"] == [1.0] for row in edit.rows("sync"))


def test_warmup_is_bitwise_minibatch(corpus_folder):
    options = dict(dtype="fp32", shards=2, max_steps=6)
    minibatch = run_training(4, corpus_folder, method="minibatch", **options)
    edit = run_training(4, corpus_folder, method="edit", sync_warmup_steps=6, tau=2, **options)
    assert edit.losses == minibatch.losses
    assert all(torch.equal(edit.model[name], value) for name, value in minibatch.model.items())
    assert edit.rows("sync") == []
