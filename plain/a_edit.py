"""A-EDiT (arXiv 2412.07210): EDiT whose rounds end by the clock.

So replicas take unequal numbers of steps. Here the clock is virtual: a step takes 1 s, on a slow
replica its factor (train.py ends the rounds). The penalty is corrected for the steps of a replica.
Sharded twin: a_edit.py.
"""

from plain.edit import EDiT
from plain.method import mean


class AEDiT(EDiT):
    """Replicas take steps_i steps in a round. --step_weighting none: the paper's weights."""

    def begin(self):
        super().begin()
        self.longest = [0] * self.M  # the most steps of replica i in a round, slowly forgotten

    def sync(self):
        kept = 1 - self.f.anomaly_ema
        self.longest = [max(kept * most, steps) for most, steps in zip(self.longest, self.steps)]
        # The statistics are of G_i / steps_i, and the limit of G_i is for the longest round.
        self.length = self.steps
        return super().sync()

    def norms_for_weights(self, norms):
        if self.f.step_weighting != "norm_per_step":
            return norms
        # G_i mean_j(steps_j) / steps_i
        return [norm / count * mean(self.steps) for norm, count in zip(norms, self.steps)]
