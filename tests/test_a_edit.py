"""A-EDiT: replicas of any speed, their votes, the end. The weighting by steps: test_methods.py."""

import copy
from collections import deque

import pytest
import torch

from mesh import Mesh
from ranks import CPU, method_alone, run_training, train_all
from rows import each_row

WARMUP = 3  # steps
LONG = dict(
    method="a_edit", sync_warmup_steps=WARMUP, tau_time_s=4.0, dtype="fp32", log_interval=1000
)
TOKENS = 2 * 8  # of a rank and step: two rows of 8


class SpeedClock:
    """Replica i's clock moves by seconds[i] per step and not while it waits.
    pause: (replica, step, seconds). late: votes are read a step late, as on GPUs."""

    def __init__(self, *seconds, pause=(None, None, 0.0), late=False):
        self.seconds = seconds
        self.pause = pause
        self.late = late

    def __call__(self, method, model, mesh):
        if self.late:
            model.metrics_lag = 1
            model.metrics = deque(maxlen=2)
        paused_replica, paused_step, pause_s = self.pause
        step_s = self.seconds[mesh.replica]
        if mesh.shard_index > 0:
            step_s = 1000.0  # Nothing may depend on this clock: shard 0's decides.
        now_s = 100.0
        vote = method.vote

        def train_s():
            return now_s

        def pass_time_and_vote():
            nonlocal now_s
            now_s += step_s
            if (mesh.replica, method.steps) == (paused_replica, paused_step):
                now_s += pause_s
            return vote()

        method.clock = copy.copy(method.clock)
        method.clock.train_s = train_s
        method.vote = pass_time_and_vote


@each_row("rounds", [
    [8] * 20 + [40] * 60,  # faster
    [40] * 20 + [8] * 60,  # slower
    [40] * 20 + [20] * 200 + [40] * 60,  # slower for a while
    [40] * 20 + [8] * 200 + [40] * 60 + [3],  # the last round is short
])  # fmt: skip
def test_machine_that_changes_its_speed_is_no_anomaly(rounds):
    """rounds: the steps of each. A norm grows less than the steps do, here with their root."""
    method = method_alone(method="a_edit")
    generator = torch.Generator().manual_seed(1)
    for steps in rounds:
        method.local_steps = steps
        method.remember_round()
        noise = 0.03 * torch.randn(4, generator=generator).double()  # one norm per layer
        assert not method.penalty.flag(steps**0.5 * (1 + noise)).any()
    assert method.penalty.flag(torch.full((4,), 100.0).double()).all()


@each_row("longest", [8, 40, 200])
def test_a_long_round_is_forgotten(longest):
    """After 400 more rounds of 8 steps a norm of twice the usual size is flagged as ever."""
    method = method_alone(method="a_edit")
    generator = torch.Generator().manual_seed(1)
    for steps in [8] * 20 + [longest] + [8] * 400:
        method.local_steps = steps
        method.remember_round()
        noise = 0.03 * torch.randn(4, generator=generator).double()
        method.penalty.flag(steps**0.5 * (1 + noise))
    assert not method.penalty.flag(torch.full((4,), 8**0.5).double()).any()
    assert method.penalty.flag(torch.full((4,), 2 * 8**0.5).double()).all()


def end_round(method, steps, norm):
    """A round of so many steps, in which each layer moves by `norm`. Was one of them flagged?"""
    for x in method.model.masters:
        x[0] += norm
    method.local_steps = steps
    method.record.loss_sum = torch.zeros(())
    method.end_round()
    method.drain()
    return method.penalty.flagged.any().item()


def test_round_longer_than_all_before_is_no_anomaly():
    """Its limit is for its own steps: it is 5 times as long, and moves sqrt(5) times as far."""
    method = method_alone(method="a_edit")
    for _ in range(20):
        assert not end_round(method, steps=8, norm=8**0.5)
    assert not end_round(method, steps=40, norm=40**0.5)
    assert not end_round(method, steps=8, norm=8**0.5)
    assert end_round(method, steps=8, norm=100.0)


def test_longest_round_is_forgotten_where_the_statistics_start_anew():
    """A resumed run has rounds of 8 steps in place of 200. A limit for 200 would see nothing."""
    method = method_alone(method="a_edit")
    for _ in range(12):
        end_round(method, steps=200, norm=200**0.5)
    method.resume_with({"tau_time_s"})
    for _ in range(12):
        assert not end_round(method, steps=8, norm=8**0.5)
    assert end_round(method, steps=8, norm=2 * 8**0.5)


@each_row("replica", [0, 1])
@each_row("shard", [0, 1])
def test_shard_0_of_every_replica_votes_and_nobody_else(replica, shard):
    mesh = Mesh(1, CPU)
    method = method_alone(mesh, method="a_edit", tau_time_s=2.0)
    mesh.rank = 2 * replica + shard
    mesh.replica = replica
    mesh.shard_index = shard
    began = method.round_began
    for seconds, vote in ((1.9, 0.0), (2.0, 1.0), (2.5, 1.0)):
        method.clock.train_s = lambda: began + seconds
        assert method.vote() == (vote if shard == 0 else 0.0)


def test_only_a_sync_takes_the_progress_to_the_end():
    """Between syncs it is a guess. If a guess ended a run, other replicas would wait for it."""
    method = method_alone(method="a_edit", max_steps=20)
    method.progress_at_sync = 18.0
    method.local_steps = 5
    assert 18 < method.progress < 20
    method.progress_at_sync = 20.5
    method.local_steps = 0
    assert method.progress == 20.5


def steps_of_rounds(run):
    """Of each round [steps of replica 0, of replica 1]."""
    return [row["steps"] for row in run.rows("sync")]


def mean_steps(rounds):
    return [sum(pair) / 2 for pair in rounds]


@pytest.mark.slow
def test_pause_of_several_rounds_costs_one_round_and_recorded_tokens_never_fall(corpus_folder):
    options = LONG | dict(log_interval=1, min_lr_ratio=1.0)
    clock = SpeedClock(1.0, 1.0, pause=(1, 11, 100.0))
    run = run_training(2, corpus_folder, max_steps=40, tamper=clock, **options)
    rounds = steps_of_rounds(run)
    assert rounds[:2] == [[4, 4], [4, 4]]
    assert rounds[2] == [4, 1]  # step 11, then time is long up
    after_it = rounds[3:-1]
    assert after_it == [[4, 4]] * len(after_it)
    assert len(rounds) >= 9

    # Replica 0 extrapolated 4 steps in the third round, and the mean is 2.5.
    rows = run.rows("step")
    tokens = [row["tokens"] for row in rows]
    assert tokens == sorted(tokens)
    assert tokens[14] == tokens[13] > tokens[12]
    standing = [step for step, row in enumerate(rows) if row["tokens_per_s"] == 0]
    assert standing == [14]

    progress = WARMUP + sum(mean_steps(rounds))
    assert run.rows("eval")[-1]["tokens"] == progress * 2 * TOKENS


@pytest.mark.parametrize(
    "shards, clocks",
    [
        (1, [SpeedClock(1.0, 2.5)]),
        pytest.param(
            2, [SpeedClock(3.0, 1.0, late=True), SpeedClock(0.1, 4.0)], marks=pytest.mark.slow
        ),
    ],
)
def test_uneven_replicas_stop_together_at_the_budget(shards, clocks, corpus_folder):
    ranks = 2 * shards
    budget = 41
    options = LONG | dict(max_steps=budget, shards=shards)
    cases = [(clock, None, options) for clock in clocks]
    runs = train_all(ranks, corpus_folder, *cases)
    for clock, run in zip(clocks, runs):
        rounds = steps_of_rounds(run)
        assert max(rounds[0]) >= 4  # by any other clock than shard 0's it would be 1 or 2
        if clock.late:
            # Votes after 2 and 4 steps; a late one is not read again in the next round.
            assert rounds[0] == rounds[1] == [3, 5]

        means = mean_steps(rounds)
        progress = WARMUP + sum(means)
        assert progress - means[-1] < budget <= progress
        replica_1 = run.ranks[-1]
        assert replica_1["method_state"]["rate"] == means[-1] / rounds[-1][1]
        fast = clock.seconds.index(min(clock.seconds))
        assert rounds[-1][fast] > rounds[-1][1 - fast]  # each one votes by its own rate
        (final,) = run.rows("eval")
        assert final["tokens"] == round(progress * ranks * TOKENS)

        # the early last sync keeps the overshoot to a step or two of the fastest, not a round
        ratio = max(clock.seconds) / min(clock.seconds)
        overshoot = progress - budget
        assert overshoot <= clock.late + max(1.0, 1.5 * ratio / 2)


def test_slow_replica_goes_on_alone(corpus_folder, tmp_path):
    """It has taken fewer steps than replica 0, whose files are lost."""
    run_training(2, corpus_folder, SpeedClock(1.0, 2.5), tmp_path, **LONG | dict(max_steps=20))
    (path,) = tmp_path.glob("checkpoint-*")
    (path / "replica-0-of-2-shard-0-of-1.pt").unlink()
    options = LONG | dict(max_steps=30, log_interval=1, resume="auto")
    run = run_training(1, corpus_folder, SpeedClock(1.0), tmp_path, **options)
    steps = [row["step"] for row in run.rows("step") if row["step"] != 1]
    assert steps == sorted(steps) and int(path.name[-8:]) + 1 in steps
    assert all(row["step_ms"] > 0 for row in run.rows("step"))
    assert max(tmp_path.glob("checkpoint-*")) > path



def test_real_clock_ends_rounds_by_time(corpus_folder):
    options = LONG | dict(max_steps=40, tau_time_s=0.05, slow_replica="1:10")
    run = run_training(2, corpus_folder, **options)
    rounds = steps_of_rounds(run)
    ahead = sum(fast - slow for fast, slow in rounds)
    assert len(rounds) >= 2
    assert ahead > 0
