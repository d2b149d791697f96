"""Degeneracy: where two methods, or two meshes, must be the same, they are."""

import pytest
import torch

import data
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


@pytest.mark.parametrize("method", ["edit", "diloco"])
def test_local_steps_do_not_depend_on_the_number_of_shards(method, corpus_folder):
    """All ranks of a replica read the same batch, so the gradient is the same for every N. The
    embedding's 2570 elements need padding for three shards."""
    options = dict(method=method, tamper=one_batch_per_replica, n_embd=10, min_lr_ratio=1.0)
    options |= ROUNDS
    if method == "edit":
        options |= dict(pseudo_grad_clip=0.1, anomaly_warmup_rounds=2, anomaly_threshold=0.5)
    runs = [run_training(2 * N, corpus_folder, shards=N, **options) for N in (1, 2, 3)]
    if method == "edit":
        rows = runs[0].rows("sync")
        assert any(sum(row["dropped"]) for row in rows) and any(row["clip"] < 1 for row in rows)
    for run in runs[1:]:
        assert_same(run, runs[0], 1e-9)
        for ours, theirs in zip(run.rows("sync"), runs[0].rows("sync"), strict=True):
            assert ours["dropped"] == theirs["dropped"] and ours["steps"] == theirs["steps"]
            for key in ("loss", "weight", "clip", "pseudo_grad_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-9)


def one_batch_per_replica(method, model, mesh):
    """The batch of a mesh without shards, on all ranks of the replica."""
    train_batch = data.train_batch

    def replicas_batch(corpus, seed, step, micro_step, rank, world_size, *sizes):
        return train_batch(corpus, seed, step, micro_step, mesh.replica, mesh.replicas, *sizes)

    data.train_batch = replicas_batch  # in this rank's process only


def test_diloco_outer_lr_1_without_momentum_is_parameter_averaging(corpus_folder):
    options = dict(method="diloco", sync_warmup_steps=0, tau=3, max_steps=3)
    options |= dict(outer_lr=1.0, outer_momentum=0.0)
    run = run_training(2, corpus_folder, tamper=keep_local_parameters, **options)
    mean = sum(rank["watched"]["local"] for rank in run.ranks) / 2
    torch.testing.assert_close(run.ranks[0]["master"], mean, rtol=1e-12, atol=1e-14)


def keep_local_parameters(method, model, mesh):
    end_round, kept = method.end_round, {}

    def keep_and_end_round():
        kept["local"] = model.master.clone()
        end_round()

    method.end_round = keep_and_end_round
    return kept


def test_sgd_tau_1_and_plain_averaging_equals_minibatch(corpus_folder):
    """x_i - lr g_i, averaged, is x - lr mean(g): with SGD inside, without clipping."""
    options = dict(tamper=inner_sgd, max_steps=6, grad_clip=0, shards=2)
    outer = dict(sync_warmup_steps=0, tau=1, outer_lr=1.0, outer_momentum=0.0)
    minibatch = run_training(4, corpus_folder, method="minibatch", **options)
    for method in (dict(method="diloco"), dict(method="edit") | PLAIN):
        run = run_training(4, corpus_folder, **method, **outer, **options)
        # The logged loss of a local step is replica 0's, that of the sync is all replicas'.
        run.losses = [sum(row["loss"]) / 2 for row in run.rows("sync")]
        assert_same(run, minibatch, 1e-10)


def inner_sgd(method, model, mesh):
    """Replace AdamW's update by x <- x - lr g."""

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
    for method in ("edit", "diloco", "a_edit"):
        run = run_training(4, corpus_folder, method=method, sync_warmup_steps=6, **options)
        assert run.losses == minibatch.losses and run.rows("sync") == []
        assert all(torch.equal(run.model[name], value) for name, value in minibatch.model.items())
