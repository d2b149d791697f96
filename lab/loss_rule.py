"""A rule of one line beside EDiT's penalty: leave out a replica whose loss is twice the median.

    python -m lab.loss_rule --scale_lr 3:241:256:10 --tau 16 --out_dir out/loss_rule

This is DiLoCo but for the rule, in the plain version only. The flags are those of python -m plain
--method diloco. The loss is the mean of the round, as in the record. lab/experiments/dose.sh
compares.
"""

import statistics
import sys

import methods
from config import run_command
from diloco import DiLoCo
from plain.__main__ import main
from plain.diloco import ALL
from plain.method import Method, norms_of, weighted_sum


class LossRule(Method):
    Config, vectors = DiLoCo.Config, DiLoCo.vectors  # what the command line asks a sharded twin

    def begin(self):
        super().begin()
        self.sums = [0.0] * self.M  # of the losses in this round
        for i, replica in enumerate(self.replicas):
            replica.gradient = self.listen(i, replica.gradient)

    def listen(self, i, gradient):
        def gradient_and_note(batches):
            loss, g = gradient(batches)
            self.sums[i] += loss
            return loss, g

        return gradient_and_note

    def sync(self):
        # w_i = 1 if loss_i < 2 median_j loss_j, else 0. A NaN is in no comparison.
        losses = [total / steps for total, steps in zip(self.sums, self.steps)]
        self.sums = [0.0] * self.M
        w = [float(loss < 2 * statistics.median(losses)) for loss in losses]
        d = self.d()
        if sum(w):
            w = [w_i / sum(w) for w_i in w]
            self.nesterov(ALL, weighted_sum(d, w))
        # x_i <- a
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms_of(d), "weight": w}


if __name__ == "__main__":
    methods.TABLE["loss_rule"] = ("LossRule", "lab.loss_rule", "lab.loss_rule")
    run_command("loss_rule", lambda: main(["--method", "loss_rule", *sys.argv[1:]]))
