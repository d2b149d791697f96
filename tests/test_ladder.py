"""Degeneracy: where two methods must be the same, they are."""

import pytest
import torch
from test_methods import FP32, RTOL

import optimizer
from ranks import OUR_METHODS, few_ulp, run_training, train_all

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
    """CO2 that waits at once."""
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

    optimizer.AdamW.step = step  # in this rank's process only


def case(method, flags={}, tamper=None, **more):
    """A training of one method with flags of its own."""
    return method, flags | more, tamper


CLOSE = {}  # claim -> (ranks, flags of all cases, cases)
BITWISE = {}


def claim(claims, text, ranks, cases, flags={}):
    claims[text] = ranks, LOCAL | dict(eval_interval=1) | flags, list(cases)


claim(
    CLOSE,
    "edit without its penalty is diloco",
    ranks=4,
    flags=BALL | dict(shards=2, n_layer=2),
    cases=[
        case("diloco"),
        case("edit", OFF),
    ],
)
claim(
    CLOSE,
    "slowmo and diloco without an outer optimizer are post_local_sgd",
    ranks=2,
    cases=[
        case("post_local_sgd"),
        case("slowmo", PLAIN),
        case("diloco", PLAIN),
    ],
)
claim(  # NoLoCo's two replicas are a pair in every round.
    CLOSE,
    "with heavy-ball momentum noloco and a co2 that waits are slowmo",
    ranks=2,
    flags=CONSTANT,
    cases=[
        case("slowmo"),
        case("noloco", pull=0.8),
        case("co2", tamper=wait_at_once),
    ],
)
claim(  # With three replicas: 1/3 is not exact.
    CLOSE,
    "streaming methods in one piece are diloco",
    ranks=3,
    flags=BALL,
    cases=[
        case("diloco"),
        case("streaming_diloco", WHOLE),
        case("streaming_edit", WHOLE | OFF),
    ],
)
claim(
    CLOSE,
    "streaming_edit in one piece is edit",
    ranks=3,
    cases=[
        case("edit"),
        case("streaming_edit", WHOLE),
    ],
)
claim(
    CLOSE,
    "sparse_loco that sends all is post_local_sgd",
    ranks=3,
    cases=[
        case("post_local_sgd"),
        case("sparse_loco", density=1.0, two_bits=False, error_decay=0.0),
    ],
)
claim(
    CLOSE,
    "top_k that sends all is minibatch",
    ranks=4,
    flags=dict(shards=2),
    cases=[
        case("minibatch"),
        case("top_k", density=1.0, momentum_correction=0.0, tau=1),
    ],
)
claim(
    CLOSE,
    "robust and eager with nobody to disagree or to wait for are diloco",
    ranks=1,
    flags=BALL,
    cases=[
        case("diloco"),
        case("robust"),
        case("eager"),
    ],
)
claim(
    CLOSE,
    "the median of two is their mean",
    ranks=2,
    flags=BALL,
    cases=[
        case("diloco"),
        case("robust", aggregate="median"),
    ],
)
claim(  # x_i - lr g_i, averaged, is x - lr mean(g): with SGD inside, without clipping.
    CLOSE,
    "sgd, tau 1 and plain averaging are minibatch",
    ranks=2,
    flags=SGD | PLAIN,
    cases=[
        case("minibatch", tamper=inner_sgd),
        case("diloco", tamper=inner_sgd),
        case("edit", OFF, tamper=inner_sgd),
        case("post_local_sgd", tamper=inner_sgd),
        case("slowmo", tamper=inner_sgd),
    ],
)
claim(  # with a last round that is shorter, and accumulation
    BITWISE,
    "a_edit with equal clocks is edit",
    ranks=4,
    flags=dict(shards=2, max_steps=21, accum=2),
    cases=[
        case("edit", tau=4),
        case("a_edit", tau_time_s=4.0, virtual_clock=True),
    ],
)
claim(
    BITWISE,
    "one_bit_edit in 32 bits is edit",
    ranks=4,
    flags=ROUNDS | BALL | dict(shards=2),
    cases=[
        case("edit"),
        case("one_bit_edit", quantize="none"),
    ],
)
claim(
    BITWISE,
    "also with three replicas",
    ranks=3,
    flags=ROUNDS | BALL | MUON,
    cases=[
        case("edit"),
        case("one_bit_edit", quantize="none"),
    ],
)
claim(
    BITWISE,
    "one_bit_edit with one replica is edit",
    ranks=2,
    flags=ROUNDS | BALL | dict(shards=2),
    cases=[
        case("edit"),
        case("one_bit_edit"),
        case("one_bit_edit", quantize="two_bits"),
    ],
)
claim(
    BITWISE,
    "streaming_edit without its penalty is streaming_diloco",
    ranks=3,
    flags=FRAGMENTS,
    cases=[
        case("streaming_diloco"),
        case("streaming_edit", OFF),
    ],
)
claim(
    BITWISE,
    "the warm-up is minibatch",
    ranks=4,
    flags=FRAGMENTS | dict(max_steps=4, sync_warmup_steps=4, shards=2),
    cases=map(case, OUR_METHODS),
)




def val_losses(run):
    """By step. (The losses of a local step are replica 0's.)"""
    return {row["step"]: row["val_loss"] for row in run.rows("eval")}


def runs_of(ranks, common, cases, corpus_folder, transport="auto"):
    each = []
    for method, flags, tamper in cases:
        each.append((tamper, None, common | flags | dict(method=method)))
    return train_all(ranks, corpus_folder, *each, transport=transport)


@pytest.mark.parametrize("text", CLOSE)
def test_methods_equal_each_other(text, corpus_folder):
    first, *others = runs_of(*CLOSE[text], corpus_folder)
    assert len(val_losses(first)) >= 4
    for other in others:
        assert val_losses(other) == pytest.approx(val_losses(first), rel=RTOL, abs=0)
        for name, value in first.model.items():
            torch.testing.assert_close(other.model[name], value, **FP32)


@pytest.mark.parametrize("text", BITWISE)
def test_methods_equal_each_other_bit_for_bit(text, corpus_folder):
    # methods without a barrier need gloo
    first, *others = runs_of(*BITWISE[text], corpus_folder, transport="gloo")
    assert len(val_losses(first)) >= 4
    for other in others:
        assert val_losses(other) == val_losses(first)
        for name, value in first.model.items():
            assert torch.equal(other.model[name], value)
    if text.startswith("a_edit"):  # the votes travel with the step's metrics
        for ours, theirs in zip(other.ranks, first.ranks):
            assert ours["calls"] == theirs["calls"]
            assert ours["sent"] == theirs["sent"]


def test_transports_differ_by_a_few_ulp(corpus_folder):
    options = LOCAL | dict(method="diloco", eval_interval=1)
    shm = run_training(4, corpus_folder, transport="shm", **options)
    gloo = run_training(4, corpus_folder, transport="gloo", **options)
    rtol = few_ulp(torch.float64)
    assert val_losses(gloo) == pytest.approx(val_losses(shm), rel=rtol, abs=0)
    assert gloo.losses == pytest.approx(shm.losses, rel=rtol, abs=0)
