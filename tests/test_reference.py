"""Every method, on every mesh, against the plain fp64 reference; and what must not change it."""

import types

import pytest
import torch

from config import parse
from ranks import flags, run_training
from reference import simulate

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


def all_flags(**options):
    config, method_config, _ = parse(flags(**options))
    return types.SimpleNamespace(**vars(config), **vars(method_config))


def assert_matches(run, expected, tolerance=1e-9):
    # fp64 throughout: only the order of sums differs. model.pt is fp32.
    assert run.losses == pytest.approx(expected["losses"], rel=tolerance)
    for name, value in expected["model"].items():
        torch.testing.assert_close(run.model[name], value.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("replicas, shards", MESHES)
@pytest.mark.parametrize("method", METHODS)
def test_method_equals_fp64_reference(method, replicas, shards, corpus, corpus_folder):
    options = METHODS[method] | {"shards": shards}
    run = run_training(replicas * shards, corpus_folder, **options)
    expected = simulate(all_flags(**options), replicas, shards, corpus)
    assert_matches(run, expected)
    if method != "minibatch":
        assert [row["step"] for row in run.rows("sync")] == schedule(options)
        assert [sum(row["dropped"]) for row in run.rows("sync")] == expected["dropped"]
    if method == "edit":
        assert sum(expected["dropped"]) > 0 and min(row["clip"] for row in run.rows("sync")) < 1


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
    "ablation", [
        {"anomaly_elimination": False}, {"weighted_averaging": False},
        {"pseudo_grad_clipping": False},
    ],
)  # fmt: skip
def test_edit_ablation_equals_reference(ablation, corpus, corpus_folder):
    options = METHODS["edit"] | {"shards": 2} | ablation
    run = run_training(4, corpus_folder, **options)
    assert_matches(run, simulate(all_flags(**options), 2, 2, corpus))


@pytest.mark.parametrize("method", ["diloco", "edit"])
def test_evaluation_does_not_change_the_trajectory_and_waits_for_a_sync(method, corpus_folder):
    options = METHODS[method] | {"shards": 2}
    quiet = run_training(4, corpus_folder, **options)
    often = run_training(4, corpus_folder, **options, eval_interval=1)
    assert often.losses == quiet.losses
    assert all(torch.equal(often.model[name], value) for name, value in quiet.model.items())
    warmup = list(range(1, options["sync_warmup_steps"] + 1))
    assert [row["step"] for row in often.rows("eval")] == warmup + schedule(options)


def test_first_outer_step_of_diloco_moves_lr_times_one_plus_momentum(corpus_folder):
    options = dict(method="diloco", sync_warmup_steps=0, tau=1, max_steps=1)
    options |= dict(outer_lr=0.5, outer_momentum=0.9)
    averaging = options | dict(outer_lr=1.0, outer_momentum=0.0)
    start = run_training(1, corpus_folder, **options | {"lr": 0.0}).model
    local = run_training(1, corpus_folder, **averaging).model
    moved = run_training(1, corpus_folder, **options).model
    for name in start:
        expected = start[name] - 0.5 * 1.9 * (start[name] - local[name])
        torch.testing.assert_close(moved[name], expected, rtol=1e-5, atol=1e-7)
