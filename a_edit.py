"""A-EDiT: EDiT whose rounds end by the clock, so that fast replicas do not wait for slow ones.

The problem. EDiT synchronises after a number of steps: a replica that is twice as fast as another
spends half of its time waiting. A-EDiT synchronises after a time: everyone trains for tau_time_s
seconds, takes as many steps as it can, and then takes part in the same sync as EDiT's. Nobody waits
longer than one step of the slowest.

    sync_warmup_steps steps of mini-batch; then anchor = x, round_began = now
    repeat, replica i:
        inner steps; at the end of each:
            vote = (now - round_began >= tau_time_s)         # by shard 0's clock alone,
            all-reduce [norm^2, loss, vote] over the shards  # on the norm's trip: all N ranks agree
            if somebody voted: the next forward synchronises, as in edit.py;
                its exchange of norms and flags carries steps_i, this replica's steps in the round
        at the end of the sync: round_began = now

    sync k:  position <- position + 1/M sum_i steps_i        # global steps' worth, all know it

`position` takes the place of the step number wherever replicas have to agree: the learning rate,
when to evaluate, and the end, which is the first sync with position >= max_steps, for all. Between
syncs a replica extrapolates, position + (its own steps) * rate with rate = (mean of steps_j /
steps_i) of the last round, and when that reaches max_steps it votes for an early sync, so that the
budget is not overshot by a round.

    paper     variable    unit
    tau_time  tau_time_s  seconds
    -         steps       (M,) inner steps of each replica in the last round
    -         position    global steps' worth (tokens = position * tokens of one step of all ranks)

Deviations from the authors' code: (1) a monotonic clock, differences only; an fp32 tensor of
wall-clock seconds has a resolution of 128 s. (2) The clock restarts at the end of the sync, not
before it: otherwise a replica's waiting is taken from its next round and the rounds of a fast
replica shrink to nothing. (3) Learning rate and end follow the tokens of all replicas. (4)
Optional, --step_weighting: weights are multiplied by steps_i and normalised again. (5) On CUDA the
vote is read one step late, when it has long arrived, so that the host runs ahead; and the host
waits for the device once per sync, to see when it is over.

Run: torchrun --nproc_per_node 2 train.py --method a_edit --tau_time_s 2 --slow_replica 1:2.0
Source: EDiT, arXiv 2412.07210 (A-EDiT), and its authors' code, atorch local_sgd.
"""

from dataclasses import dataclass

import torch

from edit import EDiT, SyncConfig
from flags import option


@dataclass
class Config(SyncConfig):
    tau_time_s: float = option(2.0, "seconds of training per round (code: 600)", above=0)
    step_weighting: bool = option(False, "multiply weights by the replica's steps in the round")


def weigh_by_steps(weights, steps):
    """Weights (M, L) times steps (M,), normalised again;
    columns of zeros (everybody flagged) stay zero."""
    # w_i <- w_i steps_i / sum_j w_j steps_j
    weights = weights * steps[:, None]
    return weights / weights.sum(dim=0).clamp(min=torch.finfo(weights.dtype).tiny)


class AEDiT(EDiT):
    lockstep = False

    def __init__(self, model, mesh, config: Config, max_steps: int, clock):
        """clock(): seconds of training so far, at any zero; only its differences count."""
        super().__init__(model, mesh, config, max_steps, clock)
        self.position_at_sync = float(config.sync_warmup_steps)
        self.rate = 1.0  # global steps per own step
        self.round_began = 0.0
        model.vote = self.vote

    # ---- the trigger ----

    def before_step(self, step: int):
        if step == self.config.sync_warmup_steps:
            self.round_began = self.clock()
        super().before_step(step)

    def vote(self) -> float:
        """Called by the gradient norm's all-reduce at the end of every step;
        counts if this is shard 0."""
        if self.steps < self.config.sync_warmup_steps or self.mesh.shard_index != 0:
            return 0.0
        time_is_up = self.clock() - self.round_began >= self.config.tau_time_s
        budget_is_up = self.position_at_sync + (self.local_steps + 1) * self.rate >= self.max_steps
        return float(time_is_up or budget_is_up)

    def sync_is_due(self) -> bool:
        if self.local_steps <= self.model.read_late:  # no vote of this round has arrived yet
            return False
        _, _, votes, _ = self.model.news()
        return votes > 0

    # ---- what differs in the sync ----

    def counts(self, G):
        return G.new_tensor([self.local_steps])  # exact in fp32 up to 2^24 steps

    def weigh(self, norms, flagged, counts):
        weights = super().weigh(norms, flagged, counts)
        return weigh_by_steps(weights, counts[:, 0]) if self.config.step_weighting else weights

    def start(self):
        super().start()
        # host read, once per sync; the all-reduces are on their way already
        self.move_on(self.all_counts[:, 0].tolist(), self.mesh.replica)

    def move_on(self, steps: list, i: int):
        """The round has taken steps[j] inner steps of each replica j; this one's are steps[i]."""
        self.steps_of_round = [round(count) for count in steps]
        mean = sum(self.steps_of_round) / len(steps)
        self.position_at_sync += mean
        self.rate = mean / self.steps_of_round[i]

    def end(self):
        super().end()
        if self.mesh.device.type == "cuda":
            # until now the host has only queued the waiting
            torch.cuda.current_stream().synchronize()
        self.round_began = self.clock()

    # ---- where the training is ----

    def position(self, step: int) -> float:
        if step <= self.config.sync_warmup_steps:
            return step
        return self.position_at_sync + (0 if self.armed else self.local_steps * self.rate)

    def finished(self, step: int) -> bool:
        return self.in_sync and self.position(step) >= self.max_steps

    def common_position(self, step: int):
        if step <= self.config.sync_warmup_steps:
            return step
        return self.position_at_sync if self.sync_is_due() else None

    # ---- checkpoints ----

    def sync_saved(self, replicas: int, load):
        super().sync_saved(replicas, load)
        self.move_on(self.all_counts[:, 0].tolist(), self.mesh.replica % replicas)

    def state_dict(self) -> dict:
        own = {"position_at_sync": self.position_at_sync, "rate": self.rate}
        return super().state_dict() | own | {"round_s": self.clock() - self.round_began}

    def load_state_dict(self, state: dict):
        super().load_state_dict(state)
        if self.replicas_differ:  # until then they follow from the flags
            self.position_at_sync, self.rate = state["position_at_sync"], state["rate"]
        self.round_began = self.clock() - state["round_s"]
