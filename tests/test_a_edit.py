"""A-EDiT under virtual clocks: deterministic rounds for replicas of any speed, agreement, and the
end."""

import pytest
import torch

from a_edit import weigh_by_steps
from ranks import run_training

LONG = dict(method="a_edit", sync_warmup_steps=3, tau_time_s=4.0, dtype="fp32", log_interval=1000)


class VirtualClock:
    """Replica i's clock moves by seconds[i] per step and not while it waits.
    pause: (replica, step, seconds)."""

    def __init__(self, *seconds, pause=(None, None, 0.0), shards_disagree=False):
        self.seconds, self.pause, self.shards_disagree = seconds, pause, shards_disagree

    def __call__(self, method, model, mesh):
        now, vote, seconds = [100.0], model.vote, self.seconds[mesh.replica]
        if self.shards_disagree and mesh.shard_index > 0:
            seconds = 1000.0  # must not matter: shard 0's clock decides

        def pass_time_and_vote():
            now[0] += seconds
            if self.pause[:2] == (mesh.replica, method.steps):
                now[0] += self.pause[2]
            return vote()

        method.clock, model.vote = lambda: now[0], pass_time_and_vote


def steps_of_rounds(run):
    return [row["steps"] for row in run.rows("sync")]


@pytest.mark.parametrize("shards", [1, 2])
def test_equal_clocks_equal_edit(shards, corpus_folder):
    """Bit for bit, with a last round that is shorter, evaluations in between, and accumulation."""
    common = dict(sync_warmup_steps=3, max_steps=21, shards=shards)
    common |= dict(dtype="fp32", eval_interval=5, accum=2)
    edit = run_training(2 * shards, corpus_folder, method="edit", tau=4, **common)
    clock = VirtualClock(0.25, 0.25, shards_disagree=True)
    a_edit = run_training(
        2 * shards, corpus_folder, method="a_edit", tau_time_s=1.0, tamper=clock, **common
    )
    assert steps_of_rounds(a_edit) == steps_of_rounds(edit) == [[4, 4]] * 4 + [[2, 2]]
    assert all(torch.equal(a_edit.model[name], value) for name, value in edit.model.items())
    for event, key in (
        ("eval", "val_loss"), ("eval", "step"), ("step", "lr"), ("step", "tokens"),
        ("sync", "weight"),
    ):  # fmt: skip
        assert [row[key] for row in a_edit.rows(event)] == [row[key] for row in edit.rows(event)]
    for ours, theirs in zip(a_edit.ranks, edit.ranks):
        assert ours["calls"] == theirs["calls"]  # no collective more
        assert ours["sent"]["shard"] == theirs["sent"]["shard"]
        # five syncs, one fp32 more each
        assert ours["sent"]["sync"] == theirs["sent"]["sync"] + 5 * 4


def test_half_speed_takes_half_the_steps_in_every_round_of_a_long_run(corpus_folder):
    run = run_training(2, corpus_folder, max_steps=183, tamper=VirtualClock(1.0, 2.0), **LONG)
    steps = steps_of_rounds(run)
    assert len(steps) >= 60 and steps[:-1] == [[4, 2]] * (len(steps) - 1)  # no drift


def test_three_speeds(corpus_folder):
    run = run_training(3, corpus_folder, max_steps=60, tamper=VirtualClock(1.0, 2.0, 4.0), **LONG)
    steps = steps_of_rounds(run)
    assert steps[:-1] == [[4, 2, 1]] * (len(steps) - 1) and len(steps) > 20


def test_pause_of_several_rounds_costs_one_round_and_leaves_no_trace(corpus_folder):
    clock = VirtualClock(1.0, 1.0, pause=(1, 12, 100.0))
    steps = steps_of_rounds(run_training(2, corpus_folder, max_steps=40, tamper=clock, **LONG))
    assert steps[:2] == [[4, 4]] * 2 and steps[2] == [4, 2]  # steps 11 and 12, then time is long up
    assert steps[3:-1] == [[4, 4]] * len(steps[3:-1]) and len(steps) >= 9


@pytest.mark.parametrize("speeds", [(1.0, 2.5), (3.0, 1.0), (0.1, 4.0)])
@pytest.mark.parametrize("shards", [1, 2])
def test_replicas_that_reach_the_budget_unevenly_stop_together(speeds, shards, corpus_folder):
    clock = VirtualClock(*speeds, shards_disagree=True)
    run = run_training(2 * shards, corpus_folder, max_steps=41, shards=shards, tamper=clock, **LONG)
    steps = steps_of_rounds(run)
    position = 3 + sum(sum(pair) / 2 for pair in steps)
    before_last = position - sum(steps[-1]) / 2
    assert before_last < 41 <= position
    (final,) = [row for row in run.rows("eval")]
    assert final["tokens"] == round(position * 2 * shards * 2 * 8)
    # the early last sync keeps the overshoot to a step or two of the fastest, not a round
    assert position - 41 <= max(1.0, 1.5 * max(speeds) / min(speeds) / 2)


def test_training_that_ends_in_the_warmup_is_minibatch(corpus_folder):
    short = LONG | dict(max_steps=3, log_interval=1)
    a_edit = run_training(2, corpus_folder, tamper=VirtualClock(1.0, 9.0), **short)
    minibatch = run_training(2, corpus_folder, **short | {"method": "minibatch"})
    assert all(torch.equal(a_edit.model[name], value) for name, value in minibatch.model.items())
    assert a_edit.rows("sync") == []


def test_learning_rate_follows_the_tokens_of_all_replicas(corpus_folder):
    options = LONG | dict(max_steps=60, log_interval=1, min_lr_ratio=0.0)
    run = run_training(2, corpus_folder, tamper=VirtualClock(1.0, 2.0), **options)
    import train
    from config import parse

    flags = ["--max_steps", "60", "--lr", "0.01", "--lr_warmup_steps", "3", "--min_lr_ratio", "0"]
    config, *_ = parse(flags)
    lr = {row["step"]: row["lr"] for row in run.rows("step")}
    # replica 0, rounds of [4, 2] after step 3:
    # three steps' worth per round, extrapolated at 3/4 per own step
    position = lambda step: 3 + (step - 3) * 3 / 4
    for step in range(8, 40):  # its (step+1)-th step; the first round extrapolates at 1
        assert lr[step + 1] == pytest.approx(train.learning_rate(position(step), config))


def test_weights_times_steps_sum_to_one_worked_out_by_hand():
    weights, steps = torch.tensor([[0.5, 0.0, 1.0], [0.5, 0.0, 0.0]]), torch.tensor([3.0, 1.0])
    assert weigh_by_steps(weights, steps).tolist() == [[0.75, 0.0, 1.0], [0.25, 0.0, 0.0]]


def test_step_weighting_reaches_the_sync(corpus_folder):
    options = LONG | dict(max_steps=20, weighted_averaging=False, tamper=VirtualClock(1.0, 2.0))
    plain = run_training(2, corpus_folder, **options).rows("sync")[0]
    weighted = run_training(2, corpus_folder, step_weighting=True, **options).rows("sync")[0]
    assert plain["weight"] == [0.5, 0.5] and weighted["weight"] == pytest.approx([2 / 3, 1 / 3])


def test_real_clock_ends_rounds_by_time(corpus_folder):
    options = LONG | dict(max_steps=150, tau_time_s=0.05)
    run = run_training(2, corpus_folder, slow_replica="1:3", **options)
    rounds = run.rows("sync")
    assert len(rounds) >= 2 and run.rows("end")[0]["exit"] == "done"
    assert sum(row["steps"][0] for row in rounds) > sum(row["steps"][1] for row in rounds)
