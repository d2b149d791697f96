"""A-EDiT: replicas of any speed, their votes, the end. The weighting by steps: test_methods.py."""

import copy
from collections import deque

import pytest

from ranks import run_training, train_all

LONG = dict(method="a_edit", sync_warmup_steps=3, tau_time_s=4.0, dtype="fp32", log_interval=1000)


class SpeedClock:
    """Replica i's clock moves by seconds[i] per step and not while it waits.
    pause: (replica, step, seconds). late: votes are read a step late, as on GPUs."""

    def __init__(self, *seconds, pause=(None, None, 0.0), late=False):
        self.seconds, self.pause, self.late = seconds, pause, late

    def __call__(self, method, model, mesh):
        now, vote = [100.0], method.vote
        # Of another shard's clock nothing must depend: shard 0's decides.
        seconds = 1000.0 if mesh.shard_index > 0 else self.seconds[mesh.replica]
        if self.late:
            model.metrics_lag, model.metrics = 1, deque(maxlen=2)
        method.clock = copy.copy(method.clock)
        method.clock.train_s = lambda: now[0]

        def pass_time_and_vote():
            now[0] += seconds
            if self.pause[:2] == (mesh.replica, method.steps):
                now[0] += self.pause[2]
            return vote()

        method.vote = pass_time_and_vote


def steps_of_rounds(run):
    return [row["steps"] for row in run.rows("sync")]


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
    stopped = [step for step, row in enumerate(run.rows("step")) if row["tokens_per_s"] == 0]
    assert stopped == [14]
    per_step = 2 * 2 * 8
    assert run.rows("eval")[-1]["tokens"] == (3 + sum(sum(pair) / 2 for pair in steps)) * per_step


@pytest.mark.parametrize("shards, clocks", [
    (1, [SpeedClock(1.0, 2.5)]), (2, [SpeedClock(3.0, 1.0, late=True), SpeedClock(0.1, 4.0)]),
])  # fmt: skip
def test_uneven_replicas_stop_together_at_the_budget(shards, clocks, corpus_folder):
    options = LONG | dict(max_steps=41, shards=shards)
    runs = train_all(2 * shards, corpus_folder, *((clock, None, options) for clock in clocks))
    for clock, run in zip(clocks, runs):
        steps = steps_of_rounds(run)
        assert max(steps[0]) >= 4  # by any other clock than shard 0's it would be 1 or 2
        # Votes after 2 and 4 steps; a late one is not read again in the next round.
        assert not clock.late or steps[0] == steps[1] == [3, 5]
        progress = 3 + sum(sum(pair) / 2 for pair in steps)
        assert progress - sum(steps[-1]) / 2 < 41 <= progress
        assert run.ranks[-1]["method_state"]["rate"] == sum(steps[-1]) / 2 / steps[-1][1]
        (final,) = run.rows("eval")
        assert final["tokens"] == round(progress * 2 * shards * 2 * 8)
        # the early last sync keeps the overshoot to a step or two of the fastest, not a round
        ratio = max(clock.seconds) / min(clock.seconds)
        assert progress - 41 <= clock.late + max(1.0, 1.5 * ratio / 2)


def test_real_clock_ends_rounds_by_time(corpus_folder):
    options = LONG | dict(max_steps=40, tau_time_s=0.05, slow_replica="1:10")
    rounds = steps_of_rounds(run_training(2, corpus_folder, **options))
    assert len(rounds) >= 2 and sum(fast - slow for fast, slow in rounds) > 0
