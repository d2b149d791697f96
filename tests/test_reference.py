"""Every method, on every mesh, against the plain fp64 reference; and what must not change it."""

import pytest
import torch

from ranks import run_training
from reference import all_flags, assert_matches, simulate

MESHES = [(1, 1), (1, 4), (4, 1), (2, 2)]  # replicas, shards
METHODS = {
    "minibatch": dict(method="minibatch", max_steps=8),
    "diloco": dict(method="diloco", max_steps=16, tau=4, sync_warmup_steps=3),
    # thresholds so tight that all of it happens: drops, rollbacks, clipping, a shorter last round
    "edit": dict(
        method="edit", max_steps=30, tau=3, sync_warmup_steps=4, anomaly_warmup_rounds=3,
        anomaly_threshold=0.05, pseudo_grad_clip=0.05, anomaly_ema=0.1, min_lr_ratio=1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("replicas, shards", MESHES)
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
        assert [sync["step"] for sync in expected["syncs"]] == schedule(options)


def schedule(options):
    """Steps done at each sync: every tau steps after the warm-up, and at the end."""
    first = options["sync_warmup_steps"] + options["tau"]
    steps = list(range(first, options["max_steps"] + 1, options["tau"]))
    return steps if steps[-1] == options["max_steps"] else steps + [options["max_steps"]]


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_equals_reference_and_does_not_count_as_steps(method, corpus, corpus_folder):
    options = METHODS[method] | {"shards": 2, "accum": 3, "max_steps": 14}
    run = run_training(4, corpus_folder, **options)
    assert_matches(run, simulate(all_flags(**options), 2, 2, corpus))


@pytest.mark.parametrize(
    "ablation", ["anomaly_elimination", "weighted_averaging", "pseudo_grad_clipping"]
)
def test_edit_ablation_equals_reference(ablation, corpus, corpus_folder):
    options = METHODS["edit"] | {"shards": 2, ablation: False}
    run = run_training(4, corpus_folder, **options)
    assert_matches(run, simulate(all_flags(**options), 2, 2, corpus))


@pytest.mark.parametrize("method", ["diloco", "edit"])
def test_evaluation_does_not_change_the_run_and_waits_for_round_ends(method, corpus_folder):
    options = METHODS[method] | {"shards": 2}
    quiet = run_training(4, corpus_folder, **options)
    often = run_training(4, corpus_folder, **options, eval_interval=1)
    assert often.losses == quiet.losses
    assert all(torch.equal(often.model[name], value) for name, value in quiet.model.items())
    warmup = list(range(1, options["sync_warmup_steps"] + 1))
    assert [row["step"] for row in often.rows("eval")] == warmup + schedule(options)
