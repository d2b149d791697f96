"""Mini-batch: the baseline. Gradients are averaged over all ranks in every step.

    for each step:
        g   = mean over all M * N ranks of the gradient  # [shard] reduce-scatter, [sync] all-reduce
        x  <- AdamW(x, clip(g))                          # identical on all replicas

This is synchronous data parallelism on sharded parameters (HSDP). The whole method is one answer,
"yes, average the gradients over the replicas": the all-reduce itself stands in shard.py, where it
can overlap with the backward. The local methods give the same answer during their warm-up.

Slow-link bytes per rank and step: 2 (M-1)/M * 4 P/N.
Run: python train.py --method minibatch
"""

from dataclasses import dataclass


@dataclass
class Config:
    n_outer_vectors = 0  # no anchor, no momentum; and nothing to set


class MiniBatch:
    in_sync = lockstep = True
    replicas_differ = mends_replicas = False
    outer_vectors = {}

    def __init__(self, model, mesh, config: Config, max_steps: int, clock):
        self.max_steps = max_steps

    def averages_gradients(self, step: int) -> bool:
        return True

    def before_step(self, step: int):
        pass

    def after_step(self, step: int):
        pass

    def position(self, step: int) -> float:
        return step

    common_position = position

    def finished(self, step: int) -> bool:
        return step >= self.max_steps

    def finish(self):
        pass

    def stats(self):
        return None

    def state_dict(self) -> dict:
        return {"local_steps": 0}

    def load_state_dict(self, state: dict):
        pass
