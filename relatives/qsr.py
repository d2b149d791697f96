"""QSR, the quadratic synchronization rule: Post Local SGD whose rounds grow as the rate falls.

The problem. Long rounds send little, but with a large learning rate replicas move far apart in
them. QSR makes a round as long as the learning rate allows: its length grows with 1 / lr^2, so most
of the syncs are where the rate is large.

    as post_local_sgd.py, but a round has
        max(tau, floor((c / lr)^2))        # inner steps; lr is the rate at the round's beginning

c is qsr_c. While the rate still rises (its warm-up) the largest rate of the round so far counts. At
a rate of 0 the round lasts to the end of the training.

EDiT does not have this rule: the limits of its penalty are made from the norms of earlier rounds,
and a round that is much longer has larger norms.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N, and 8 (M-1) for losses and steps.
Run: torchrun --nproc_per_node 4 train.py --method qsr --tau 4
Source: arXiv 2310.14423 (from memory; the lengths of rounds are those of its authors' code).
Plain version: plain/local.py.
"""

import math
from dataclasses import dataclass

from config import option
from method import LocalConfig
from relatives.post_local_sgd import PostLocalSGD


@dataclass
class Config(LocalConfig):
    qsr_c: float = option(0.0175, "c, a learning rate: rounds of at least (c / lr)^2 steps")


class QSR(PostLocalSGD):
    Config = Config

    def steps_of_round(self) -> float:
        lr = max(self.rates)
        if lr <= self.config.qsr_c / self.config.max_steps:
            return math.inf  # longer than the run
        return max(self.config.tau, int((self.config.qsr_c / lr) ** 2))
