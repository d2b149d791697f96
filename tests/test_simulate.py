"""The slow, uneven, unreliable cluster: what happens is what the flags say, and nothing else. That
it changes no bit is in test_checkpoint.py, virtual seconds of runs are in test_methods.py."""

from types import SimpleNamespace

import pytest
import torch

import data
import optimizer
from config import Config, UserError
from plumbing import simulate
from plumbing.simulate import FRAMING, Cluster, SimulatedLink, read_disturbance
from ranks import run_training, train_all
from rows import each_row

CPU = torch.device("cpu")


def config(seed=3, **flags):
    """The simulation's flags, beside those of a run that it reads."""
    return SimpleNamespace(**vars(Config(seed=seed, **flags)), sync_warmup_steps=0)


@pytest.fixture
def clock(monkeypatch):
    """A clock in place of the real one: only the test changes `now`, and sleeping is noted."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now, sleeps=[])
    clock.sleep = clock.sleeps.append
    monkeypatch.setattr(simulate, "time", clock)
    return clock


@pytest.mark.parametrize(
    "ranks, transfers, expected_s",
    [  # transfers: (when the last rank arrives, bytes); the link carries 1 MB/s
        (2, [(0, 5_000), (0, 10_000), (0, 0)], [0.01 * FRAMING, *[0.03 * FRAMING] * 2]),
        (1, [(7, 10_000), (0, 10_000)], [7 + 0.01 * FRAMING, 7 + 0.02 * FRAMING]),
    ],
)
def test_transfers_arrive_when_the_link_allows(clock, ranks, transfers, expected_s):
    link = SimulatedLink(config(link_mbps=8.0), ranks, CPU)

    def carry(arrival_s, sent_bytes):
        arrive = lambda: setattr(clock, "now", max(clock.now, arrival_s))
        early = SimpleNamespace(wait=lambda: None)
        return link.carry([early, SimpleNamespace(wait=arrive)], sent_bytes)

    busy = []
    link.note = lambda *span: busy.append(span)
    issued = [carry(*transfer) for transfer in transfers]
    assert [transfer.finish.result() for transfer in issued] == pytest.approx(expected_s)
    assert clock.sleeps == []  # only wait() blocks
    seconds = [end - begin for _, begin, end in busy]  # of the link, for --timeline
    assert seconds == pytest.approx([1.0 * FRAMING * ranks * n / 1e6 for _, n in transfers])
    issued[-1].wait()
    assert clock.sleeps == [issued[-1].link_s] == [pytest.approx(expected_s[-1] - clock.now)]
    with pytest.raises(AttributeError, match="wait"):  # errors of a collective are passed on
        link.carry([None], 10).wait()


def quiet_mesh(replica=0):
    """One of two replicas that have not waited yet."""
    return SimpleNamespace(replica=replica, replicas=2, device=CPU, waited_s={"others": 0.0})


def nothing(*arguments):
    """In place of what a method does."""


def take_step(cluster, averages_gradients=False):
    cluster.method = SimpleNamespace(averages_gradients=averages_gradients)
    cluster.begin_step(nothing)
    cluster.delay(nothing)


def end_round(cluster, steps):
    """steps: of each replica in the round."""
    rows = SimpleNamespace(steps=torch.tensor(steps))
    cluster.method = SimpleNamespace(steps=sum(steps), rows=rows)
    cluster.end_round(nothing)


def test_slow_replica_takes_f_times_as_long_without_its_waiting(clock):
    sleeps = []
    for replica in 0, 1:
        mesh = quiet_mesh(replica)
        mesh.waited_s = {"others": 3.0, "link": 1.0}
        cluster = Cluster(config(slow_replica="1:1.5"), mesh)
        cluster.method = SimpleNamespace(averages_gradients=False)
        cluster.begin_step(nothing)
        clock.now += 2.0
        mesh.waited_s = {"others": 3.5, "link": 2.0}  # of 2 seconds it has waited 1.5
        cluster.delay(nothing)
        sleeps.append(clock.sleeps[:])
    assert sleeps == [[], [pytest.approx(0.25)]]  # 0.5 + 0.25 = 1.5 * 0.5


def test_virtual_clock_worked_out_by_hand():
    """Replica 1 takes 2 seconds for a step. After a round all go on at the time of the latest."""
    clock = Cluster(config(slow_replica="1:2", virtual_clock=True), quiet_mesh())
    seconds = []
    for steps in [4, 4], [5, 2]:
        for _ in range(steps[0]):
            take_step(clock)
        seconds.append(clock.train_s())
        end_round(clock, steps)
        seconds.append(clock.train_s())
    assert seconds == [4, 8, 13, 13]


def test_virtual_clock_counts_the_slowest_replica_while_gradients_are_averaged():
    clock = Cluster(config(slow_replica="1:2.5", virtual_clock=True), quiet_mesh())
    seconds = []
    for averages_gradients in True, True, False:
        take_step(clock, averages_gradients)
        seconds.append(clock.train_s())
    assert seconds == [2.5, 5.0, 6.0]
    end_round(clock, [1, 1])
    assert clock.train_s() == 7.5


def test_flags_are_read_as_numbers_or_refused():
    flags = config(slow_replica="1:2", scale_lr="0:3:4:0.5")
    slow = read_disturbance(flags, "slow_replica", 2)
    scaled = read_disturbance(flags, "scale_lr", 2)
    assert (slow["R"], slow["F"]) == (1, 2.0)
    assert [scaled[name] for name in ("R", "FIRST", "LAST", "FACTOR")] == [0, 3, 4, 0.5]
    wrong = {
        "slow_replica": ["1", "1:nan", "1:0.5", "2:3", "0.5:3", "1:inf"],
        "flip": ["0:1:2:3", "0:2:1", "0:nan:2", "-1:1:2"],
        "scale_lr": ["0:1:2", "0:2:1:3", "0:1:2:much"],
    }
    for flag, texts in wrong.items():
        for text in texts:
            with pytest.raises(UserError, match=f"^--{flag} {text}: must be R:"):
                read_disturbance(config(**{flag: text}), flag, 2)


def keep_progress(method, model, mesh):
    """x and a before the sync and the disturbance, and x where the sync begins."""
    seen = []
    after_step = method.after_step
    sync = method.sync

    def look(*args):
        over = after_step(*args)
        if over:
            seen.append([method.steps, model.master.clone(), method.anchor.clone()])
        return over

    def look_and_sync():
        seen[-1].append(model.master.clone())
        sync()

    method.after_step = look
    method.sync = look_and_sync
    return seen


@each_row("method", ["diloco", "edit", "robust"])
def test_flip_turns_the_progress_of_one_replica_in_its_rounds(method, corpus_folder):
    options = dict(method=method, tau=4, sync_warmup_steps=2, max_steps=18, flip="1:9:14")
    run = run_training(2, corpus_folder, keep_progress, **options)
    for replica, rank in enumerate(run.ranks):
        for step, x, a, synced in rank["watched"]:
            wrong = replica == 1 and step in (10, 14)
            torch.testing.assert_close(synced, 2 * a - x if wrong else x)
            assert (x != a).any()


def watch_steps(method, model, mesh):
    """(learning rate, inputs, targets) of each step of this rank."""
    seen, forward = [], model.forward

    def look(inputs, targets, train=True):
        if train:
            seen.append([inputs.clone(), targets.clone()])
        return forward(inputs, targets, train)

    model.forward = look

    step = optimizer.AdamW.step
    optimizer.AdamW.step = lambda self: seen[-1].insert(0, self.lr) or step(self)

    def end():
        optimizer.AdamW.step = step
        return seen

    return end


def test_disturbances_hit_the_named_replica_and_steps_only(corpus, corpus_folder):
    options = dict(method="diloco", tau=4, sync_warmup_steps=2, max_steps=10, shards=2)
    options |= dict(random_tokens="1:2:4", scale_lr="0:5:6:3.5")
    run, again = train_all(4, corpus_folder, *[(watch_steps, None, options)] * 2)
    lr = [row["lr"] for row in run.rows("step")]  # the schedule's
    for rank, repeated in zip(range(4), again.ranks):
        for step, (rate, *batch) in enumerate(run.ranks[rank]["watched"]):
            scaled = rank < 2 and step + 1 in (5, 6)
            assert rate == (lr[step] * 3.5 if scaled else lr[step])
            theirs = data.Batches(corpus, 8, 2, rank=rank, world_size=4).train(step)
            random = rank >= 2 and step + 1 in (2, 3, 4)
            assert all(torch.equal(a, b) != random for a, b in zip(batch, theirs))
            assert all(map(torch.equal, batch, repeated["watched"][step][1:]))
    random = torch.cat([each for *_, each in run.ranks[2]["watched"][1:4]])
    other = torch.cat([each for *_, each in run.ranks[3]["watched"][1:4]])
    assert random.min() >= 0 and len(random.unique()) > 40 and not torch.equal(random, other)
