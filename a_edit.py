"""A-EDiT: EDiT whose rounds end by the clock, so that fast replicas do not wait for slow ones.

The problem. EDiT synchronizes after a number of steps: a replica that is twice as fast as another
waits half of its time. In A-EDiT every replica trains for tau_time_s seconds, takes as many steps
as it can, and then takes part in EDiT's sync. It waits at most for one step of the slowest.

    sync_warmup_steps steps with averaged gradients; then anchor = x, round_began = now
    repeat, replica i:
        inner steps; at the end of each:
            vote = (now - round_began >= tau_time_s)         # by shard 0's clock alone;
                                                             # it travels with the step's metrics
            if there was a vote: sync as in edit.py          # steps_i come with the norms
            progress <- progress + 1/M sum_i steps_i;  at the end of the sync: round_began = now

`progress` (tokens of all replicas / tokens of a step with averaged gradients) replaces the step
number wherever replicas must agree: the learning rate, when to evaluate, and the end, which is the
first sync with progress >= max_steps. Between syncs a replica extrapolates: progress + (its own
steps) * rate, rate = mean_j(steps_j) / steps_i in the last round. When that reaches max_steps, it
votes for an early sync, so that the training does not overshoot by a round. tau_time_s is the
paper's tau_time.

Deviations from the authors' code: (1) A monotonic clock; theirs is wall-clock seconds in an fp32
tensor, whose resolution is 128 s. (2) The clock restarts at the end of the sync, so that waiting
does not shorten a round. (3) Learning rate and end follow the tokens of all replicas. (4) With the
paper's weights (--step_weighting none) a replica that takes more steps has a larger norm, and so a
smaller weight. norm_per_step, the default, replaces G_i by G_i mean_j(steps_j) / steps_i in the
weights. (5) The statistics are of norms per step, G_i / steps_i, and the limit of G_i is for
replica i's longest round, which is slowly forgotten: remember_round(). (6) On CUDA the vote is read
one step late, and the host waits for the device twice per sync. (7) Theirs can mix the weights with
the steps, w_i (1 - r) + r steps_i / sum_j steps_j, with r = 0.5 (use_step_weight, off by default):
a replica that takes more steps would weigh more. (8) Theirs skips a sync if the replicas have taken
fewer than 100 steps together (min_total_global_steps): short rounds would grow longer.

Run: torchrun --nproc_per_node 2 train.py --method a_edit --tau_time_s 2 --slow_replica 1:2.0
Source: EDiT, arXiv 2412.07210 (A-EDiT), and its authors' code, atorch local_sgd.
Plain version: plain/a_edit.py.
"""

import math
from dataclasses import dataclass

import torch

from config import option
from edit import EDiT, EDiTConfig
from method import RoundConfig


@dataclass
class Config(EDiTConfig, RoundConfig):
    tau_time_s: float = option(
        2.0, "seconds of training per round (code: 600)", above=0, large=50.0
    )
    step_weighting: str = option(
        "norm_per_step",
        "how weights allow for a replica's steps in the round (none: as in the paper)",
        choices=["none", "norm_per_step"],
    )

    def describe_round(self, tokens_per_step: int) -> str:
        return f"{self.tau_time_s:g} s of training"


def norms_per_step(norms, steps):
    """Norms (M, L) as if each replica had taken the mean number of steps; steps (M,)."""
    # G_i <- G_i mean_j(steps_j) / steps_i
    return norms * (steps.mean() / steps)[:, None]


class AEDiT(EDiT):
    Config = Config
    scalars = (*EDiT.scalars, "longest_round", "progress_at_sync", "rate")

    round_began = None  # seconds of training

    def begin(self):
        super().begin()
        self.longest_round = 0
        self.progress_at_sync = self.steps
        self.rate = 1.0

    def resume_with(self, changed):
        if self.penalty.resume_with(changed):
            self.longest_round = 0

    def before_step(self):
        super().before_step()
        # The first round of this process: a resumed run does not call begin().
        if self.round_began is None and not self.averages_gradients:
            self.round_began = self.clock.train_s()

    def steps_of_round(self) -> float:
        return math.inf  # votes end it

    def vote(self) -> float:
        if self.averages_gradients or self.mesh.shard_index != 0:
            return 0.0
        time_is_up = self.clock.train_s() - self.round_began >= self.config.tau_time_s
        # local_steps does not count this step yet.
        after_this_step = self.progress_at_sync + (self.local_steps + 1) * self.rate
        return float(time_is_up or after_this_step >= self.config.max_steps)

    def norms_for_weights(self, norms):
        if self.config.step_weighting == "none":
            return norms
        return norms_per_step(norms, self.rows.steps)

    def remember_round(self):
        """The statistics hold norms per step. In a short round the norm per step is larger, because
        a norm grows more slowly than the number of steps. So the limit per step is multiplied by
        the steps of the longest round, not of this one. Then a short round is no anomaly: not the
        last one, and not those of a machine that has become slower. The longest round is forgotten
        as slowly as old norms are. The price: while rounds are shorter than they were, the limit is
        looser."""
        remembered = (1 - self.config.anomaly_ema) * self.longest_round
        self.longest_round = max(remembered, self.local_steps)
        self.penalty.length = self.local_steps
        self.penalty.longest = self.longest_round

    def sync(self):
        self.remember_round()
        super().sync()
        steps = self.rows.steps.tolist()  # a host read, but the first layers travel already
        mean = sum(steps) / len(steps)
        self.progress_at_sync += mean
        self.rate = mean / steps[self.mesh.replica]

    def end_sync(self):
        super().end_sync()
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # so far the host has only queued the work
        self.round_began = self.clock.train_s()

    @property
    def progress(self) -> float:
        """Extrapolated between syncs. Only a sync, which all replicas share, takes it to
        max_steps."""
        if self.averages_gradients:
            return self.steps
        if self.local_steps == 0:
            return self.progress_at_sync
        progress = self.progress_at_sync + self.local_steps * self.rate
        # The largest number below max_steps: a guess must not end the training, because the other
        # replicas would wait for this one.
        return min(progress, math.nextafter(self.config.max_steps, 0))
