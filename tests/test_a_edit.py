"""A-EDiT under virtual clocks: rounds of replicas of any speed, agreement, weights, the end."""

from collections import deque

import pytest
import torch

from a_edit import norms_per_step, weight_by_steps
from ranks import run_training, train_all
from reference import all_flags, assert_matches, cosine, simulate_a_edit

LONG = dict(method="a_edit", sync_warmup_steps=3, tau_time_s=4.0, dtype="fp32", log_interval=1000)


class SpeedClock:
    """Replica i's clock moves by seconds[i] per step and not while it waits.
    pause: (replica, step, seconds). late: votes are read a step late, as on GPUs."""

    def __init__(self, *seconds, pause=(None, None, 0.0), late=False):
        self.seconds, self.pause, self.late = seconds, pause, late

    def __call__(self, method, model, mesh):
        now, vote, before_step = [100.0], method.vote, method.before_step
        seconds = self.seconds[mesh.replica]
        if self.late:
            model.metrics_lag, model.metrics = 1, deque(maxlen=2)
        if mesh.shard_index > 0:
            seconds = 1000.0  # must not matter: shard 0's clock decides

        def set_clock():  # by now the run has set its own
            method.clock = lambda: now[0]
            before_step()

        def pass_time_and_vote():
            now[0] += seconds
            if self.pause[:2] == (mesh.replica, method.steps):
                now[0] += self.pause[2]
            return vote()

        method.before_step, method.vote = set_clock, pass_time_and_vote


def steps_of_rounds(run):
    return [row["steps"] for row in run.rows("sync")]


def test_equal_clocks_equal_edit(corpus_folder):
    """Bit for bit, with a last round that is shorter, evaluations in between, and accumulation."""
    common = dict(sync_warmup_steps=3, max_steps=21, shards=2)
    common |= dict(dtype="fp32", eval_interval=5, accum=2)
    edit = run_training(4, corpus_folder, method="edit", tau=4, **common)
    common |= dict(method="a_edit", tau_time_s=4.0, virtual_clock=True)
    a_edit = run_training(4, corpus_folder, **common)
    assert steps_of_rounds(a_edit) == steps_of_rounds(edit) == [[4, 4]] * 4 + [[2, 2]]
    assert all(torch.equal(a_edit.model[name], value) for name, value in edit.model.items())
    for event, key in (
        ("eval", "val_loss"), ("eval", "step"), ("step", "lr"), ("step", "tokens"),
        ("sync", "weight"), ("sync", "loss"),
    ):  # fmt: skip
        assert [row[key] for row in a_edit.rows(event)] == [row[key] for row in edit.rows(event)]
    for ours, theirs in zip(a_edit.ranks, edit.ranks):  # no collective and no byte more
        assert ours["calls"] == theirs["calls"] and ours["sent"] == theirs["sent"]


def test_pause_of_several_rounds_costs_one_round_and_recorded_tokens_never_fall(corpus_folder):
    options = LONG | dict(log_interval=1, min_lr_ratio=1.0)
    clock = SpeedClock(1.0, 1.0, pause=(1, 11, 100.0))
    run = run_training(2, corpus_folder, max_steps=40, tamper=clock, **options)
    steps = steps_of_rounds(run)
    assert steps[:2] == [[4, 4]] * 2 and steps[2] == [4, 1]  # step 11, then time is long up
    assert steps[3:-1] == [[4, 4]] * len(steps[3:-1]) and len(steps) >= 9
    # Replica 0 extrapolated 4 steps in the third round, and the mean is 2.5.
    tokens = [row["tokens"] for row in run.rows("step")]
    assert tokens == sorted(tokens) and tokens[14] == tokens[13] > tokens[12]
    assert [row["tokens_per_s"] == 0 for row in run.rows("step")] == [
        step == 14 for step in range(len(tokens))
    ]
    per_step = 2 * 2 * 8
    assert run.rows("eval")[-1]["tokens"] == (3 + sum(sum(pair) / 2 for pair in steps)) * per_step


@pytest.mark.parametrize("shards, speeds, late", [
    (1, (1.0, 2.5), False), (2, (3.0, 1.0), True), (2, (0.1, 4.0), False),
])  # fmt: skip
def test_uneven_replicas_stop_together_at_the_budget(shards, speeds, late, corpus_folder):
    clock = SpeedClock(*speeds, late=late)
    run = run_training(2 * shards, corpus_folder, max_steps=41, shards=shards, tamper=clock, **LONG)
    steps = steps_of_rounds(run)
    assert max(steps[0]) >= 4  # by any other clock than shard 0's it would be 1 or 2
    progress = 3 + sum(sum(pair) / 2 for pair in steps)
    assert progress - sum(steps[-1]) / 2 < 41 <= progress
    assert run.ranks[-1]["method_state"]["rate"] == sum(steps[-1]) / 2 / steps[-1][1]
    (final,) = run.rows("eval")
    assert final["tokens"] == round(progress * 2 * shards * 2 * 8)
    # the early last sync keeps the overshoot to a step or two of the fastest, not a round
    assert progress - 41 <= late + max(1.0, 1.5 * max(speeds) / min(speeds) / 2)


def test_learning_rate_follows_the_tokens_of_all_replicas(corpus_folder):
    options = LONG | dict(max_steps=30, log_interval=1, min_lr_ratio=0.0, weighted_averaging=False)
    run = run_training(2, corpus_folder, tamper=SpeedClock(1.0, 2.0), **options)
    lr = {row["step"]: row["lr"] for row in run.rows("step")}
    # Replica 0, rounds of [4, 2] after step 3: three steps' worth per round, so 3/4 per own step.
    progress = lambda step: 3 + (step - 3) * 3 / 4
    for step in range(8, 30):  # its (step+1)-th step; the first round extrapolates at 1
        assert lr[step + 1] == pytest.approx(cosine(progress(step), 0.01, 0.0, 3, 30))
    assert run.rows("sync")[0]["weight"] == [0.5, 0.5]


def test_step_weighting_worked_out_by_hand():
    weights, steps = torch.tensor([[0.5, 0.0, 1.0], [0.5, 0.0, 0.0]]), torch.tensor([3.0, 1.0])
    assert weight_by_steps(weights, steps).tolist() == [[0.75, 0.0, 1.0], [0.25, 0.0, 0.0]]
    norms = torch.tensor([[6.0, torch.inf], [2.0, 5.0]])
    assert norms_per_step(norms, steps).tolist() == [[4.0, torch.inf], [4.0, 10.0]]


@pytest.mark.parametrize("replicas, shards", [(3, 1), (2, 2)])
def test_step_weighting_equals_fp64_reference(replicas, shards, corpus, corpus_folder):
    """Limits so tight that replicas are dropped; rounds of 5 seconds, and a shorter last one."""
    common = dict(
        method="a_edit", max_steps=28, tau_time_s=5.0, sync_warmup_steps=0, min_lr_ratio=1.0,
        anomaly_warmup_rounds=3, anomaly_threshold=0.05, shards=shards, virtual_clock=True,
        slow_replica="1:2",
    )  # fmt: skip
    cases = [common | dict(step_weighting=s) for s in ("none", "times_steps", "norm_per_step")]
    runs = train_all(replicas * shards, corpus_folder, *((None, None, case) for case in cases))
    for run, options in zip(runs, cases):
        seconds = [1.0, 2.0, 1.0][:replicas]
        expected = simulate_a_edit(all_flags(**options), replicas, shards, corpus, seconds)
        assert_matches(run, expected)
        assert run.rows("end")[0]["train_s"] == expected["seconds"]
        dropped = sum(row["dropped"] for row in expected["syncs"])  # by replica
        assert sum(dropped) > 0
        for replica, rank in enumerate(run.ranks[::shards]):  # no flagged norm is learned
            learned = rank["method_state"]["statistics"][0]
            assert sum(learned) == len(learned) * len(expected["syncs"]) - dropped[replica]


def test_real_clock_ends_rounds_by_time(corpus_folder):
    options = LONG | dict(max_steps=60, tau_time_s=0.05, slow_replica="1:3")
    rounds = steps_of_rounds(run_training(2, corpus_folder, **options))
    assert len(rounds) >= 2 and sum(fast - slow for fast, slow in rounds) > 0
