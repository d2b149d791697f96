"""Streaming EDiT: against the plain fp64 reference, what it must equal, sick replicas at every
phase of a fragment, what it sends, and what must not change a run."""

import math
import zlib

import pytest
import torch

from mesh import Mesh
from model import ModelConfig
from ranks import run_training
from reference import all_flags, assert_matches, simulate
from shard import ShardedModel
from streaming_edit import StreamingEDiT
from test_relatives import (
    STREAMING, all_vectors, assert_equal_runs, assert_nothing_changes_a_bit, shard_sizes,
    streaming_bytes, train_all,
)  # fmt: skip

# thresholds so tight that all of it happens: drops, rollbacks, clipping
TIGHT = STREAMING | dict(
    method="streaming_edit", max_steps=32, anomaly_warmup_rounds=2, anomaly_threshold=0.05,
    pseudo_grad_clip=0.03, anomaly_ema=0.1, min_lr_ratio=1.0,
)  # fmt: skip
CASES = {
    "e3m0": TIGHT | dict(delay=3, alpha=0.5),
    "int8": TIGHT | dict(delay=0, quantize="int8", fragment_pattern="sequential"),
    "none": TIGHT | dict(delay=1, alpha=0.5, quantize="none", fragments=4),
}
OFF = dict(anomaly_elimination=False, weighted_averaging=False, pseudo_grad_clipping=False)


@pytest.mark.parametrize("replicas, shards", [(1, 1), (1, 4), (4, 1), (2, 2)])
def test_method_equals_fp64_reference(replicas, shards, corpus, corpus_folder):
    cases = [options | dict(shards=shards, eval_interval=1) for options in CASES.values()]
    cases = cases[:1] if replicas == 1 else cases  # one replica quantizes nothing
    runs = train_all(replicas * shards, corpus_folder, *((None, None, each) for each in cases))
    for run, options in zip(runs, cases):
        expected = simulate(all_flags(**options), replicas, shards, corpus)
        quantized = options.get("quantize") != "none" and replicas > 1
        assert_matches(run, expected, rtol=1e-7 if quantized else 1e-9)
        assert sum(sum(sync["dropped"]) for sync in expected["syncs"]) > 0
        assert min(row["clip"] for row in run.rows("sync")) < 1


def test_equals_streaming_diloco_bit_for_bit_and_edit_and_diloco(corpus_folder):
    plain = STREAMING | dict(shards=2)
    one = dict(fragments=1, delay=0, quantize="none")
    case = lambda method, *more: (all_vectors, None, plain | dict(method=method) | merged(*more))
    merged = lambda *more: {key: value for part in more for key, value in part.items()}
    same = dict(outer_momentum=0.8)
    runs = train_all(
        4, corpus_folder,
        case("streaming_diloco", dict(delay=3, alpha=0.5)),
        case("streaming_edit", dict(delay=3, alpha=0.5), OFF),
        case("streaming_diloco", dict(delay=2, quantize="none")),
        case("streaming_edit", dict(delay=2, quantize="none"), OFF),
        case("edit"), case("streaming_edit", one),
        case("diloco", same), case("streaming_edit", one, OFF),
    )  # fmt: skip
    for streaming, ours in (runs[:2], runs[2:4]):
        assert streaming.losses == ours.losses
        for name, value in streaming.model.items():
            assert torch.equal(ours.model[name], value)
    assert_equal_runs(*runs[4:6])
    assert_equal_runs(*runs[6:8])


def test_without_penalty_three_replicas_equal_streaming_diloco_bit_for_bit(corpus_folder):
    """1/3 is not exact."""
    options = STREAMING | dict(delay=1)
    streaming, ours = train_all(
        3, corpus_folder, (None, None, options),
        (None, None, options | OFF | dict(method="streaming_edit")),
    )  # fmt: skip
    assert streaming.losses == ours.losses


# ---- sick replicas ----


class Spoil:
    """After the inner step k of the local phase, spoil the parameters of `replicas`, in a training
    (as its tamper) or in the reference."""

    def __init__(self, what, k, *replicas):
        self.what, self.step, self.replicas = what, 3 + k - 1, replicas

    def spoil(self, x, anchor):
        if self.what == "spike":
            x.copy_(anchor + 100 * (x - anchor))
        else:
            x[: len(x) // 2] = float(self.what)

    def __call__(self, method, model, mesh):
        after_step, land, seen = method.after_step, method.land, []

        def spoil_and_end_step(lr):
            if method.steps == self.step and mesh.replica in self.replicas:
                self.spoil(model.master, method.anchor)
            after_step(lr)

        def land_and_look():
            land()
            vectors = method.anchor, method.momentum
            seen.append([zlib.crc32(vector.numpy()) for vector in vectors])

        method.after_step, method.land = spoil_and_end_step, land_and_look
        return lambda: (seen, model.master.isfinite().all().item())

    def in_reference(self, step, replicas, anchor):
        for i in self.replicas if step == self.step else ():
            self.spoil(replicas[i].x, anchor)


# A fragment is sent after steps 4, 8, 12, ... and lands 3 steps later.
PHASES = {"before it is sent": 28, "in flight": 30, "when it lands": 31, "after it": 33}


@pytest.mark.parametrize("what, quantize", [
    ("nan", "e3m0"), ("inf", "e3m0"), ("spike", "e3m0"), ("nan", "none"),
])  # fmt: skip
def test_sick_replica_is_left_out_and_healthy_within_a_round(what, quantize, corpus, corpus_folder):
    options = STREAMING | dict(
        method="streaming_edit", delay=3, alpha=0.5, max_steps=51, quantize=quantize,
        anomaly_warmup_rounds=2, anomaly_threshold=5.0, min_lr_ratio=1.0,
    )  # fmt: skip
    tampers = [Spoil(what, k, 1) for k in PHASES.values()]
    runs = train_all(3, corpus_folder, *((tamper, None, options) for tamper in tampers))
    for run, tamper in zip(runs, tampers):
        expected = simulate(all_flags(**options), 3, 1, corpus, tamper.in_reference)
        assert_matches(run, expected, rtol=1e-6)  # a sick replica amplifies rounding errors
        hashes, healthy = zip(*(rank["watched"] for rank in run.ranks))
        assert all(each == hashes[0] for each in hashes) and all(healthy)  # at each landing
        dropped = [sum(column) for column in zip(*(row["dropped"] for row in run.rows("sync")))]
        assert dropped[1] > 0 == dropped[0] == dropped[2]


def test_all_flagged_change_no_bit_and_three_such_rounds_end_the_training(corpus_folder):
    options = STREAMING | dict(method="streaming_edit", delay=3)
    run = run_training(2, corpus_folder, Spoil("nan", 12, 0, 1), **options)
    seen, healthy = run.ranks[0]["watched"]
    assert healthy and seen[2] == seen[1] != seen[0]  # fragment 0, sent after step 12
    with pytest.raises(AssertionError, match="all replicas were left out of the last 3 syncs"):
        run_training(2, corpus_folder, always_sick, **options | dict(max_steps=60))


def always_sick(method, model, mesh):
    send = method.send

    def spoil_and_send(p):
        model.master.fill_(math.nan)
        send(p)

    method.send = spoil_and_send


# ---- costs ----


@pytest.mark.parametrize("replicas, shards", [(2, 2), (4, 1)])
def test_bytes_are_those_of_streaming_diloco_and_the_norms(replicas, shards, corpus_folder):
    options = STREAMING | dict(method="streaming_edit", delay=3, shards=shards)
    run = run_training(4, corpus_folder, **options)
    sizes = shard_sizes(options, shards)
    expected = streaming_bytes(options, replicas, sizes)
    # Two numbers (fp64) of each layer: in the first round of fragment 0, then of both, then of both
    layers = [len(sizes) / 2, len(sizes), len(sizes)]
    expected = [n + 16 * (replicas - 1) * count for n, count in zip(expected, layers)]
    assert [row["sync_bytes"] for row in run.rows("sync")] == pytest.approx(expected)


@pytest.mark.parametrize("elimination", [True, False])
def test_fragment_reads_nothing_on_the_host(elimination):
    """On the meta device there is no data, so every way to read it on the host raises an error."""
    model = ShardedModel(ModelConfig(2, 1, 6, 8, 20), Mesh(1, torch.device("meta")))
    flags = dict(sync_warmup_steps=0, tau=4, fragments=2, anomaly_elimination=elimination)
    method = StreamingEDiT(model, model.mesh, StreamingEDiT.Config(**flags), max_steps=10)
    method.before_step()
    for p in range(2):
        method.send(p)
        method.mean.halfway()
        method.land()
    assert len(method.landings) == 2


def test_evaluation_a_slow_link_and_a_resume_change_no_bit(corpus_folder, tmp_path):
    options = CASES["e3m0"] | dict(shards=2, n_layer=1)
    assert_nothing_changes_a_bit(options, [dict(link_mbps=2.0)], corpus_folder, tmp_path)
