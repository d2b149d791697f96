"""lab.worth: steps, minutes and worth are those worked out by hand, and the seconds on the link
those of runs over a simulated one."""

import math

import pytest

from lab import worth
from lab.rows import read_csv
from plumbing.plan import link_seconds

ALONE = {500: [1.6, 1.4], 1000: [1.4, 1.2], 2000: [1.2, 1.2]}


def test_between_two_lengths_the_loss_alone_is_a_line_over_the_logarithm():
    for steps, losses in ALONE.items():
        assert worth.steps_alone(sum(losses) / 2, ALONE) == pytest.approx(steps)
    assert worth.steps_alone(1.25, ALONE) == pytest.approx(1000 * math.sqrt(2))
    assert worth.steps_alone(1.15, ALONE) == pytest.approx(2000 * math.sqrt(2))  # the line goes on
    assert worth.steps_alone(1.7, ALONE) == pytest.approx(250)


def test_calculated_steps_are_within_5_percent_of_runs_over_a_simulated_link():
    """Two ranks on two cores: each has one, as a machine of the calculation."""
    runs = read_csv(worth.RESULTS / "worth_link.csv")
    free = {}
    for run in runs:
        if not run.flags["link_mbps"]:
            free[run.flags["method"], run.flags.get("tau")] = run.results["step_ms"] / 1000
    compared = 0
    for run in runs:
        mbps = run.flags["link_mbps"]
        if mbps:
            method, tau = case = run.flags["method"], run.flags.get("tau")
            rounds = run.results["steps"] / (tau or 1)
            link_s = link_seconds(run.results["sync_bytes"] / rounds, mbps)
            added = worth.exchange_seconds(method, tau or 1, free[case], link_s)
            step_ms = 1000 * (free[case] + added / (tau or 1))
            assert run.results["step_ms"] == pytest.approx(step_ms, rel=0.05), case
            compared += 1
    assert compared >= 5


@pytest.fixture
def figures(monkeypatch):
    """2000 steps of 1 s, of 3 s alone. Averaged gradients send 10 GB, rounds 1 GB."""

    def runs_of(file, flags):
        results = {"val_loss": 1.25, "steps": 2000.0, "local_bytes": 1e9, "sync_bytes": 1e10}
        return [Run(results), Run(results)]

    class Run:
        def __init__(self, results):
            self.results, self.loss = results, results["val_loss"]

    monkeypatch.setattr(worth, "runs_of", runs_of)
    monkeypatch.setattr(worth, "losses_alone", lambda optimizer: ALONE)
    monkeypatch.setattr(worth, "step_seconds", lambda optimizer: (1.0, 3.0))

    def make(method, **more):
        line = worth.Line("", "", {"method": method}, **more)
        monkeypatch.setattr(worth, "LINES", [line])
        return worth.Result(line)

    return make


def test_minutes_count_computing_the_warm_up_alone_and_what_the_link_adds(figures):
    steps = figures("minibatch")
    assert steps.minutes(1e12) == pytest.approx(2000 / 60)
    link_s = link_seconds(5e6, 40)
    assert steps.minutes(40) == pytest.approx(2000 * (1 + link_s) / 60)
    assert steps.worth(1e12)[0] == pytest.approx(3 * math.sqrt(2) / 2)

    rounds = figures("diloco", tau=10, warmup=100)
    link_s = link_seconds(1e9 / 190, 40)
    copy_s = link_seconds(worth.COPIED_BYTES, 40)
    assert rounds.minutes(40) == pytest.approx((300 + 1900 + 190 * link_s + copy_s) / 60)


def test_slowest_link_that_pays_is_where_the_worth_is_1(figures):
    rounds = figures("diloco", tau=10, warmup=100)
    middle, low, high = rounds.pays_from_mbps()
    assert rounds.worth(middle)[0] == pytest.approx(1, rel=1e-3)
    assert rounds.worth(low)[2] == pytest.approx(1, rel=1e-3)  # if the loss is the lowest
    assert high == math.inf and rounds.worth(1e9)[1] < 1  # if it is the highest


def test_interval_of_a_worth_is_that_of_the_distance_of_two_means(figures):
    """All lines together have s = sqrt(0.04 / 4), with 4 degrees of freedom (t 2.776)."""
    rounds = figures("diloco", tau=10)
    half = 2.776 * 0.1 * math.sqrt(1 / 2 + 1 / 4)
    assert rounds.half == pytest.approx(half, rel=1e-3)
    middle, low, high = rounds.worth(100)
    assert low < middle < high
    assert low / middle == pytest.approx(
        worth.steps_alone(1.25 + half, ALONE) / worth.steps_alone(1.25, ALONE), rel=1e-3
    )
