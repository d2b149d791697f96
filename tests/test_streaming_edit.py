"""Streaming EDiT: against the plain fp64 reference, what it must equal, sick replicas at every
phase of a fragment, and what it sends."""

import pytest
import torch

from mesh import Handle, Mesh
from model import ModelConfig
from ranks import run_training, train_all
from reference import all_flags, assert_matches, simulate
from shard import ShardedModel
from streaming_edit import StreamingEDiT
from test_edit import Sick
from test_relatives import STREAMING, assert_equal_runs, shard_sizes, streaming_bytes

# thresholds so tight that all of it happens: drops, rollbacks, clipping
TIGHT = STREAMING | dict(
    method="streaming_edit", max_steps=28, anomaly_warmup_rounds=2, anomaly_threshold=0.05,
    pseudo_grad_clip=0.03, anomaly_ema=0.1, min_lr_ratio=1.0,
)  # fmt: skip
CASES = {
    "e3m0": TIGHT | dict(delay=3, alpha=0.5),
    "int8": TIGHT | dict(delay=0, quantize="int8", fragment_pattern="sequential", accum=2),
    "none": TIGHT | dict(delay=1, alpha=0.5, quantize="none", fragments=4),
}
OFF = dict(anomaly_elimination=False, weighted_averaging=False, pseudo_grad_clipping=False)


@pytest.mark.parametrize("replicas, shards, names", [
    (1, 1, ["e3m0"]), (1, 4, ["e3m0"]), (4, 1, ["e3m0", "int8"]), (2, 2, ["e3m0", "none"]),
])  # fmt: skip
def test_method_equals_fp64_reference(replicas, shards, names, corpus, corpus_folder):
    cases = [CASES[name] | dict(shards=shards, eval_interval=1) for name in names]
    runs = train_all(replicas * shards, corpus_folder, *((None, None, each) for each in cases))
    for run, options in zip(runs, cases):
        expected = simulate(all_flags(**options), replicas, shards, corpus)
        quantized = options.get("quantize") != "none" and replicas > 1
        assert_matches(run, expected, rtol=1e-7 if quantized else 1e-9)
        assert sum(sum(sync["dropped"]) for sync in expected["syncs"]) > 0
        assert min(row["clip"] for row in run.rows("sync")) < 1
    # Besides what Streaming DiLoCo sends, two numbers (fp64) of each layer.
    sizes = shard_sizes(cases[0], shards)
    expected = streaming_bytes(cases[0], replicas, sizes) + 16 * (replicas - 1) * len(sizes)
    assert runs[0].rows("sync")[1]["sync_bytes"] == pytest.approx(expected)


def test_equals_streaming_diloco_bit_for_bit_and_edit_and_diloco(corpus_folder):
    """With three replicas: 1/3 is not exact."""
    one = dict(fragments=1, delay=0, quantize="none")
    case = lambda method, **more: (None, None, STREAMING | dict(method=method, n_layer=1) | more)
    runs = train_all(
        3, corpus_folder,
        case("streaming_diloco", delay=3, alpha=0.5),
        case("streaming_edit", delay=3, alpha=0.5, **OFF),
        case("streaming_diloco", delay=2, quantize="none"),
        case("streaming_edit", delay=2, quantize="none", **OFF),
        case("edit"), case("streaming_edit", **one),
        case("diloco", outer_momentum=0.8), case("streaming_edit", **one, **OFF),
    )  # fmt: skip
    for streaming, ours in (runs[:2], runs[2:4]):
        assert streaming.losses == ours.losses
        for name, value in streaming.model.items():
            assert torch.equal(ours.model[name], value)
    assert_equal_runs(*runs[4:6])
    assert_equal_runs(*runs[6:8])


# ---- sick replicas ----


# Fragment 1 is sent after 8, 16, 24, ... steps and lands 3 steps later.
BEFORE, IN_FLIGHT, WHEN_IT_LANDS, AFTER = 24, 26, 27, 29


@pytest.mark.parametrize("what, quantize, mesh, phases", [
    ("all nan", "e3m0", (3, 1), [BEFORE, IN_FLIGHT, AFTER]),
    ("spike", "e3m0", (3, 1), [BEFORE, IN_FLIGHT, WHEN_IT_LANDS, AFTER]),
    ("all inf", "e3m0", (3, 1), [BEFORE, IN_FLIGHT, AFTER]),
    ("nan", "none", (3, 1), [BEFORE]),  # in one of the two layers of fragment 0
    ("nan", "e3m0", (2, 2), [BEFORE]),  # in one of the shards
])  # fmt: skip
def test_sick_replica_is_left_out_and_healthy_within_a_round(
    what, quantize, mesh, phases, corpus, corpus_folder
):
    options = STREAMING | dict(
        method="streaming_edit", delay=3, alpha=0.5, max_steps=43, quantize=quantize, n_layer=1,
        anomaly_warmup_rounds=2, anomaly_threshold=5.0, min_lr_ratio=1.0, shards=mesh[1],
    )  # fmt: skip
    tampers = [Sick(what, [1], 2 + k) for k in phases]
    ranks = mesh[0] * mesh[1]
    runs = train_all(ranks, corpus_folder, *((tamper, None, options) for tamper in tampers))
    for run, tamper in zip(runs, tampers):
        expected = simulate(all_flags(**options), *mesh, corpus, tamper.spoil)
        assert_matches(run, expected, rtol=1e-6)  # a sick replica amplifies rounding errors
        dropped = [sum(column) for column in zip(*(row["dropped"] for row in run.rows("sync")))]
        assert dropped[1] == sum(dropped) > 0


def test_all_flagged_change_no_bit_and_three_such_rounds_end_the_training(corpus_folder):
    options = STREAMING | dict(method="streaming_edit", delay=3)
    run = run_training(2, corpus_folder, Sick("all nan", [0, 1], 2 + 12), **options)
    first, end, second, third, *_ = run.ranks[0]["seen"]  # a landing, the end of the round, two
    assert first == end != second == third  # fragment 0, sent after step 12
    assert all(value.isfinite().all() for value in run.model.values())
    lost = Sick("all nan", [0, 1], *range(3, 60))
    with pytest.raises(AssertionError, match="all replicas were left out of the last 3 syncs"):
        run_training(2, corpus_folder, lost, **options | dict(max_steps=60))


@pytest.mark.parametrize("elimination, quantize", [(True, "e3m0"), (False, "none")])
def test_fragment_reads_nothing_on_the_host(elimination, quantize):
    """On the meta device there is no data, so every way to read it on the host raises an error. Of
    four replicas this is one; nothing is sent."""
    mesh = Mesh(1, torch.device("meta"))
    mesh.replicas = mesh.sync.size = 4
    mesh._issue = lambda *operation: Handle()
    model = ShardedModel(ModelConfig(2, 1, 6, 8, 20), mesh)
    flags = dict(sync_warmup_steps=0, tau=4, fragments=2, quantize=quantize)
    flags |= dict(anomaly_elimination=elimination)
    method = StreamingEDiT(model, model.mesh, StreamingEDiT.Config(**flags), max_steps=10)
    method.before_step()
    for p in range(2):
        method.send(p)
        method.mean.halfway()
        method.land()
    assert len(method.landings) == 2
