"""Mini-batch, DiLoCo and EDiT, on every mesh, against the plain fp64 reference."""

import pytest

from ranks import run_training
from reference import all_flags, assert_matches, simulate

METHODS = {
    "minibatch": dict(method="minibatch", max_steps=8),
    "diloco": dict(method="diloco", max_steps=12, tau=3, sync_warmup_steps=2),
    # thresholds so tight that all of it happens: drops, rollbacks, clipping, a shorter last round
    "edit": dict(
        method="edit", max_steps=17, tau=2, sync_warmup_steps=2, anomaly_warmup_rounds=2,
        anomaly_threshold=0.05, pseudo_grad_clip=0.03, anomaly_ema=0.1, min_lr_ratio=1.0,
    ),
}  # fmt: skip
ENDS = {"diloco": [5, 8, 11, 12], "edit": [*range(4, 17, 2), 17]}  # after so many steps


@pytest.mark.parametrize("replicas, shards", [(1, 1), (1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_method_equals_fp64_reference(method, replicas, shards, corpus, corpus_folder):
    options = METHODS[method] | dict(shards=shards, eval_interval=1)
    expected = simulate(all_flags(**options), replicas, shards, corpus)
    for transport in ("gloo", "shm") if (replicas, shards) == (2, 2) else ("gloo",):
        run = run_training(replicas * shards, corpus_folder, transport=transport, **options)
        assert_matches(run, expected)
    if method == "edit":
        dropped = sum(sync["dropped"].sum() for sync in expected["syncs"])
        assert dropped > 0 and min(row["clip"] for row in run.rows("sync")) < 1
    if method in ENDS:
        assert [row["step"] for row in run.rows("sync")] == ENDS[method]
        assert [row["step"] for row in run.rows("eval")] == [1, 2, *ENDS[method]]


@pytest.mark.parametrize("method, shards, more", [
    ("minibatch", 2, dict(accum=3)),
    ("edit", 2, dict(anomaly_elimination=False, accum=3)),
    ("edit", 2, dict(weighted_averaging=False)),
    # the embedding's 2570 elements need padding
    ("edit", 3, dict(pseudo_grad_clipping=False, n_embd=10)),
])  # fmt: skip
def test_variant_equals_fp64_reference(method, shards, more, corpus, corpus_folder):
    options = METHODS[method] | {"shards": shards} | more
    run = run_training(2 * shards, corpus_folder, **options)
    assert_matches(run, simulate(all_flags(**options), 2, shards, corpus))
