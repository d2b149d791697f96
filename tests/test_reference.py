"""Every method, on every mesh, against the plain fp64 reference; and what must not change it."""

import pytest
import torch

from ranks import run_training
from reference import all_flags, assert_matches, simulate

METHODS = {
    "minibatch": dict(method="minibatch", max_steps=8),
    "diloco": dict(method="diloco", max_steps=16, tau=4, sync_warmup_steps=3),
    # thresholds so tight that all of it happens: drops, rollbacks, clipping, a shorter last round
    "edit": dict(
        method="edit", max_steps=30, tau=3, sync_warmup_steps=4, anomaly_warmup_rounds=3,
        anomaly_threshold=0.05, pseudo_grad_clip=0.05, anomaly_ema=0.1, min_lr_ratio=1.0,
    ),
}  # fmt: skip
SYNCS = {"diloco": [7, 11, 15, 16], "edit": [*range(7, 29, 3), 30]}  # after so many steps
SWITCHES = ("anomaly_elimination", "weighted_averaging", "pseudo_grad_clipping")


@pytest.mark.parametrize("replicas, shards", [(1, 1), (1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_method_equals_fp64_reference(method, replicas, shards, corpus, corpus_folder):
    options = METHODS[method] | {"shards": shards}
    expected = simulate(all_flags(**options), replicas, shards, corpus)
    for transport in ("gloo", "shm") if (replicas, shards) == (2, 2) else ("gloo",):
        run = run_training(replicas * shards, corpus_folder, transport=transport, **options)
        assert_matches(run, expected)
    if method == "edit":
        dropped = sum(sync["dropped"].sum() for sync in expected["syncs"])
        assert dropped > 0 and min(row["clip"] for row in run.rows("sync")) < 1
    if method in SYNCS:
        assert [row["step"] for row in run.rows("sync")] == SYNCS[method]


@pytest.mark.parametrize("method, replicas, shards, more", [
    *((method, 2, 2, dict(accum=3, max_steps=14)) for method in METHODS),
    *(("edit", 2, 2, {switch: False}) for switch in SWITCHES),
    ("edit", 2, 3, dict(n_embd=10)),  # the embedding's 2570 elements need padding
])  # fmt: skip
def test_variant_equals_fp64_reference(method, replicas, shards, more, corpus, corpus_folder):
    options = METHODS[method] | {"shards": shards} | more
    run = run_training(replicas * shards, corpus_folder, **options)
    assert_matches(run, simulate(all_flags(**options), replicas, shards, corpus))


@pytest.mark.parametrize("method", ["diloco", "edit"])
def test_evaluation_does_not_change_the_run_and_waits_for_round_ends(method, corpus_folder):
    options = METHODS[method] | {"shards": 2}
    quiet = run_training(4, corpus_folder, **options)
    often = run_training(4, corpus_folder, **options, eval_interval=1)
    assert often.losses == quiet.losses
    assert all(torch.equal(often.model[name], value) for name, value in quiet.model.items())
    warmup = list(range(1, options["sync_warmup_steps"] + 1))
    assert [row["step"] for row in often.rows("eval")] == warmup + SYNCS[method]
