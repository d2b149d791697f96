"""Degeneracy: where two methods must be the same, they are. The plain versions show it in
one process; test_methods.py says that the sharded ones are the same. What only these have is
compared on ranks."""

import functools

import pytest
import torch
from test_methods import RTOL

from plain import text_training
from ranks import OUR_METHODS, few_ulp, run_config, run_training, train_all

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


def wait_at_once(training):
    """CO2 that waits at once."""
    method = training.method
    sync = method.sync
    outer_step = method.outer_step

    def sync_and_step():
        row = sync()
        outer_step()
        method.set_all(method.a)
        method.mean = None
        return row

    method.outer_step = lambda: None
    method.sync = sync_and_step


def inner_sgd(training):
    """Replace AdamW's update by x <- x - lr g."""

    def step(replica, g, lr, f):
        replica.x[:] = replica.x - lr * g

    for replica in training.replicas:
        replica.step = functools.partial(step, replica)


def case(method, flags={}, tamper=None, **more):
    """A training of one method with flags of its own."""
    return method, flags | more, tamper


CLOSE = {}  # claim -> (ranks, flags of all cases, cases): of the plain versions
BITWISE = {}  # of the sharded ones


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
    CLOSE,
    "one_bit_edit in 32 bits is edit",
    ranks=4,
    flags=ROUNDS | BALL | dict(shards=2),
    cases=[
        case("edit"),
        case("one_bit_edit", quantize="none"),
    ],
)
claim(
    CLOSE,
    "also with three replicas",
    ranks=3,
    flags=ROUNDS | BALL | MUON,
    cases=[
        case("edit"),
        case("one_bit_edit", quantize="none"),
    ],
)
claim(
    CLOSE,
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
    CLOSE,
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


def val_losses(rows):
    """By step. (The losses of a local step are replica 0's.)"""
    return {row["step"]: row["val_loss"] for row in rows}


def plain_run(ranks, corpus, method, flags, tamper):
    f = run_config(**flags, method=method)
    training = text_training(f, ranks // f.shards, f.shards, corpus)
    if tamper:
        tamper(training)
    training.run()
    return training


@pytest.mark.parametrize("text", CLOSE)
def test_methods_equal_each_other(text, corpus):
    ranks, common, cases = CLOSE[text]
    runs = []
    for method, flags, tamper in cases:
        runs.append(plain_run(ranks, corpus, method, common | flags, tamper))
    first, *others = runs
    expected = val_losses(first.rows["eval"])
    assert len(expected) >= 4
    for other in others:
        assert val_losses(other.rows["eval"]) == pytest.approx(expected, rel=RTOL, abs=0)
        for name, value in first.model.items():
            torch.testing.assert_close(other.model[name], value, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("text", BITWISE)
def test_methods_equal_each_other_bit_for_bit(text, corpus_folder):
    # methods without a barrier need gloo
    ranks, common, cases = BITWISE[text]
    each = []
    for method, flags, tamper in cases:
        each.append((tamper, None, common | flags | dict(method=method)))
    first, *others = train_all(ranks, corpus_folder, *each, transport="gloo")
    expected = val_losses(first.rows("eval"))
    assert len(expected) >= 4
    for other in others:
        assert val_losses(other.rows("eval")) == expected
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
    expected = val_losses(shm.rows("eval"))
    assert val_losses(gloo.rows("eval")) == pytest.approx(expected, rel=rtol, abs=0)
    assert gloo.losses == pytest.approx(shm.losses, rel=rtol, abs=0)
