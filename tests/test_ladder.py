"""Degeneracy: where two methods must be the same, they are."""

import pytest
import torch
from test_methods import FP32, RTOL

import shard
from ranks import few_ulp, run_training, train_all
from train import METHODS

LOCAL = dict(tau=3, sync_warmup_steps=2, max_steps=13, n_layer=1)  # four rounds
OFF = dict(anomaly_elimination=False, weighted_averaging=False, pseudo_grad_clipping=False)
PLAIN = dict(outer_lr=1.0, outer_momentum=0.0)
BALL = dict(outer_lr=0.8, outer_momentum=0.6)
CONSTANT = BALL | dict(min_lr_ratio=1.0)  # the inner rate, from the third step on
FRAGMENTS = dict(tau=8, fragments=2, delay=3, alpha=0.5, max_steps=20)
WHOLE = dict(fragments=1, delay=0, quantize="none")
ROUNDS = dict(max_steps=18, anomaly_warmup_rounds=2, anomaly_threshold=2.0)
MUON = dict(optimizer="muon")
SGD = dict(sync_warmup_steps=0, tau=1, max_steps=6, grad_clip=0)


def wait_at_once(method, model, mesh):
    """CO2 with staleness 0."""
    sync = method.sync
    outer_step = method.outer_step

    def sync_and_step():
        sync()
        outer_step()
        model.master.copy_(method.anchor)

    method.outer_step = lambda: None
    method.sync = sync_and_step


def inner_sgd(method, model, mesh):
    """Replace AdamW's update by x <- x - lr g."""

    def step(optimizer):
        model.master.sub_(model.grad, alpha=optimizer.lr)

    shard.AdamW.step = step  # in this rank's process only


CLOSE = {  # claim: ranks, flags of all, [(method, its flags, perhaps a tamper), ...]
    "edit without its penalty is diloco": (4, dict(shards=2, n_layer=2), [
        ("edit", BALL | OFF), ("diloco", BALL),
    ]),
    "slowmo and diloco without an outer optimizer are post_local_sgd": (2, {}, [
        ("post_local_sgd", {}), ("slowmo", PLAIN), ("diloco", PLAIN),
    ]),
    # NoLoCo's two replicas are a pair in every round.
    "with heavy-ball momentum noloco and a co2 that waits are slowmo": (2, CONSTANT, [
        ("slowmo", {}), ("noloco", dict(pull=0.8)),
        ("co2", dict(staleness_penalty=False), wait_at_once),
    ]),
    # With three replicas: 1/3 is not exact.
    "streaming methods in one piece are diloco": (3, BALL | WHOLE, [
        ("diloco", {}), ("streaming_diloco", {}), ("streaming_edit", OFF),
    ]),
    "streaming_edit in one piece is edit": (3, WHOLE, [("edit", {}), ("streaming_edit", {})]),
    "sparse_loco that sends all is post_local_sgd": (3, {}, [
        ("post_local_sgd", {}), ("sparse_loco", dict(density=1.0, two_bits=False, error_decay=0.0)),
    ]),
    "top_k that sends all is minibatch": (4, dict(shards=2), [
        ("minibatch", {}), ("top_k", dict(density=1.0, momentum_correction=0.0, tau=1)),
    ]),
    "robust and eager with nobody to disagree or to wait for are diloco": (1, BALL, [
        ("diloco", {}), ("robust", {}), ("eager", {}),
    ]),
    "the median of two is their mean": (2, BALL, [
        ("diloco", {}), ("robust", dict(aggregate="median")),
    ]),
    # x_i - lr g_i, averaged, is x - lr mean(g): with SGD inside, without clipping.
    "sgd, tau 1 and plain averaging are minibatch": (2, SGD | PLAIN, [
        (method, OFF, inner_sgd)
        for method in ("minibatch", "diloco", "edit", "post_local_sgd", "slowmo")
    ]),
}  # fmt: skip
BITWISE = {
    # with a last round that is shorter, and accumulation
    "a_edit with equal clocks is edit": (4, dict(shards=2, max_steps=21, accum=2), [
        ("edit", dict(tau=4)), ("a_edit", dict(tau_time_s=4.0, virtual_clock=True)),
    ]),
    "one_bit_edit in 32 bits is edit": (4, ROUNDS | dict(shards=2), [
        ("edit", {}), ("one_bit_edit", dict(quantize="none")),
    ]),
    "also with three replicas": (3, ROUNDS | MUON, [
        ("edit", {}), ("one_bit_edit", dict(quantize="none")),
    ]),
    "one_bit_edit with one replica is edit": (2, ROUNDS | dict(shards=2), [
        ("edit", {}), ("one_bit_edit", {}), ("one_bit_edit", dict(quantize="two_bits")),
    ]),
    "streaming_edit without its penalty is streaming_diloco": (3, FRAGMENTS, [
        ("streaming_diloco", {}), ("streaming_edit", OFF),
    ]),
    "the warm-up is minibatch": (4, FRAGMENTS | dict(max_steps=4, sync_warmup_steps=4, shards=2), [
        (method, {}) for method in METHODS
    ]),
}  # fmt: skip


@pytest.mark.parametrize("claim", [*CLOSE, *BITWISE])
def test_methods_equal_each_other(claim, corpus_folder):
    """The losses of a local step are replica 0's, so the evaluations are compared."""
    ranks, common, methods = (CLOSE | BITWISE)[claim]
    common, cases = LOCAL | dict(eval_interval=1) | common, []
    for method, own, *tamper in methods:
        cases.append((tamper[0] if tamper else None, None, common | own | dict(method=method)))
    transport = "gloo" if claim in BITWISE else "auto"  # methods without a barrier need it
    first, *others = train_all(ranks, corpus_folder, *cases, transport=transport)
    rtol, model = (0.0, dict(rtol=0, atol=0)) if claim in BITWISE else (RTOL, FP32)
    judged = {row["step"]: row["val_loss"] for row in first.rows("eval")}
    for other in others:
        found = {row["step"]: row["val_loss"] for row in other.rows("eval")}
        assert len(found) >= 4 and found == pytest.approx(judged, rel=rtol, abs=0)
        for name, value in first.model.items():
            torch.testing.assert_close(other.model[name], value, **model)
    if "a_edit" in claim:  # the votes travel with the step's metrics
        for ours, theirs in zip(other.ranks, first.ranks):
            assert ours["calls"] == theirs["calls"] and ours["sent"] == theirs["sent"]


def test_transports_differ_by_a_few_ulp(corpus_folder):
    options = LOCAL | dict(method="diloco", eval_interval=1)
    shm, gloo = (
        run_training(4, corpus_folder, transport=name, **options) for name in ("shm", "gloo")
    )
    judged, found = ([row["val_loss"] for row in run.rows("eval")] for run in (shm, gloo))
    assert found == pytest.approx(judged, rel=few_ulp(torch.float64), abs=0)
    assert gloo.losses == pytest.approx(shm.losses, rel=few_ulp(torch.float64), abs=0)
