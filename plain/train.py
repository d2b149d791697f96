"""The training loop of the plain versions: M replicas in one process.

    while the warm-up lasts: all replicas take the same step with the mean gradient
    then, again and again:
        a round: each replica takes inner steps with its own gradients
        the method's sync

Read run() first. Layers, batches and optimizer may be any: text.py has those of train.py,
examples/own_layers.py others. Whatever depends on time is virtual: a step of replica i takes
seconds[i].
Sharded twins: train.py (the loop), method.py (rounds), a_edit.py (rounds that end by the clock),
plumbing/simulate.py (disturbed replicas).
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from methods import PLAIN
from plain.method import hits, mean
from plain.quantize import mean_with_errors
from plain.replica import OPTIMIZERS, Replica, clipped

THREADS = torch.get_num_threads()  # of all replicas together; OMP_NUM_THREADS says how many


def cosine(step, lr, min_lr_ratio, warmup, max_steps):
    """The learning rate of a step: it rises linearly, then falls along a cosine."""
    if step < warmup:
        return lr * (step + 1) / warmup
    t = (step - warmup) / max(1, max_steps - warmup)
    least = lr * min_lr_ratio
    return least + lr * (1 - min_lr_ratio) * (1 + math.cos(math.pi * t)) / 2


def warmup_stable_decay(step, lr, min_lr_ratio, warmup, max_steps, decay_steps):
    """The learning rate of a step: it rises linearly, stays, then falls linearly."""
    if step < warmup:
        return lr * (step + 1) / warmup
    into_decay = step - (max_steps - decay_steps)
    if into_decay <= 0:
        return lr
    return lr - lr * (1 - min_lr_ratio) * into_decay / max(1, decay_steps)


def scheduled_tau(f, k):
    """tau of a round that begins k inner steps after the warm-up. --tau_schedule 2:96,4:192 is
    tau 2 for 96 steps, then 4 for 192, then --tau."""
    if not getattr(f, "tau_schedule", ""):
        return f.tau
    for part in f.tau_schedule.split(","):
        tau, steps = part.split(":")
        if k < int(steps):
            return int(tau)
        k -= int(steps)
    return f.tau


def map_in_threads(M, device):
    """map() that uses several cores: no replica needs another one during a step, so each may have a
    thread. (One batched network for all of them, by torch.func.vmap, was 1.3 times slower.) With
    OMP_NUM_THREADS=1 it is Python's own map(), and a debugger sees one replica after the other."""
    workers = min(M, THREADS)
    torch.set_num_threads(THREADS // workers)  # of one operation of torch
    if workers == 1 or device == "cuda":
        return map
    return ThreadPoolExecutor(workers).map


class Training:
    """A training of M replicas of N ranks each.

    f            all flags as attributes
    layers       nn.Modules, as of shard.ShardedModel; each replica takes a copy
    batches      (step, micro-step, rank) -> inputs and targets; steps from 0, ranks of M x N
    validation   batches to evaluate; without them `model` is the only result
    optimizer    (replica, g, lr, f): the inner step in place of --optimizer's
    listen       called with (event, row) for each row of the record
    sick         what spoils replicas in a test

    After run():

    rows     event -> rows of the record: step, sync, eval
    model    name -> parameter

    Layers that draw random numbers draw others here than on ranks.
    """

    def __init__(
        self, f, layers, batches, M, N=1, validation=(), optimizer=None, listen=None, sick=None
    ):
        self.f = f
        self.M = M
        self.N = N
        self.batches = batches
        self.validation = validation
        self.sick = sick
        self.listen = listen
        optimizer = optimizer or OPTIMIZERS[f.optimizer]
        self.replicas = [Replica(layers, f, optimizer) for _ in range(M)]
        self.method = PLAIN[f.method](f, self.replicas, N)
        self.map = map_in_threads(M, f.device)
        self.rows = {"step": [], "sync": [], "eval": []}

        self.taken = [0] * M  # inner steps of each replica before this round
        self.in_round = False
        self.progress = 0.0  # their mean over the replicas
        self.rate = [1.0] * M  # progress in one step of replica i, as in the last round
        self.seconds = [1.0] * M  # of a step
        if f.slow_replica:
            slow, factor = f.slow_replica.split(":")
            self.seconds[int(slow)] = float(factor)
        self.now = 0.0  # virtual seconds, at the last round end
        self.evaluated_at = 0.0  # the progress
        self.evaluating_s = 0.0  # seconds: no training

        self.moved = None  # the mean pseudo-gradient of the last round
        # the errors of gradients that travel in 8 bits, in the warm-up
        self.e = [torch.zeros_like(replica.x) for replica in self.replicas]
        self.E = torch.zeros_like(self.replicas[0].x)

    def run(self):
        f = self.f
        self.began = time.perf_counter()
        warmup = min(f.sync_warmup_steps, f.max_steps)
        while self.progress < warmup:
            self.averaged_step()
            self.end_round(self.replicas[0].x, {})

        if self.progress < f.max_steps:
            self.method.begin()
        while self.progress < f.max_steps:
            self.round()
            self.sync()
            if self.progress >= f.max_steps:
                self.method.finish(self.taken[0] - f.sync_warmup_steps)
            self.end_round(self.method.evaluation_model(), self.method.spread())

    def end_round(self, x, more):
        """Evaluate the parameters x, if it is due. more: for the record."""
        interval = self.f.eval_interval
        due = self.progress // interval > self.evaluated_at // interval
        self.evaluated_at = self.progress
        if due or self.progress >= self.f.max_steps:
            self.evaluate(x, more)

    def note(self, event, row):
        """A row of the record."""
        self.rows[event].append(row)
        if self.listen:
            self.listen(event, row)

    def gradients(self, steps):
        """Losses and gradients of some replicas. steps: replica -> its step, from 0."""

        def gradient(i):
            batches = []
            for micro_step in range(self.f.accum):
                for rank in range(i * self.N, (i + 1) * self.N):
                    batches.append(self.batches(steps[i], micro_step, rank))
            return self.replicas[i].gradient(batches)

        found = list(self.map(gradient, steps))
        losses = {i: loss for i, (loss, _) in zip(steps, found)}
        return losses, {i: g for i, (_, g) in zip(steps, found)}

    def learning_rate(self, progress):
        f = self.f
        numbers = (progress, f.lr, f.min_lr_ratio, f.lr_warmup_steps, f.max_steps)
        if f.schedule == "wsd":
            return warmup_stable_decay(*numbers, f.decay_share * f.max_steps)
        return cosine(*numbers)

    # ---- the warm-up, and all of --method minibatch ----

    def averaged_step(self):
        losses, gradients = self.gradients(dict(enumerate(self.taken)))
        mean_g = self.mean_gradient(list(gradients.values()))
        g = clipped(mean_g, self.f.grad_clip)
        lr = self.learning_rate(self.progress)
        for replica in self.replicas:
            replica.step(g, lr, self.f)

        self.taken = [count + 1 for count in self.taken]
        self.progress += 1
        self.now += max(self.seconds)
        loss = mean(list(losses.values()))
        norm = mean_g.norm().item()
        self.note("step", self.counts() | {"loss": loss, "lr": lr, "grad_norm": norm})

    def mean_gradient(self, gradients):
        """1/M sum_i g_i; with --warmup_format int8 in 8 bits, with error feedback."""
        if getattr(self.f, "warmup_format", "none") == "none":
            return mean(gradients)
        # z_i = g_i / M + e_i;  the sum of all z_i is the mean gradient
        z = [g_i / self.M + e_i for g_i, e_i in zip(gradients, self.e)]
        u, self.e, self.E = mean_with_errors(z, self.E, self.method.layers, self.N, "int8")
        return self.M * u

    # ---- a round of local steps ----

    def round(self):
        self.in_round = True
        self.method.steps = [0] * self.M
        self.method.rates = []
        self.loss_sums = [0.0] * self.M
        running = list(range(self.M))
        while running:
            self.local_step(running)
            running = [i for i in running if not self.round_is_over(i)]

        self.in_round = False
        steps = self.method.steps
        self.taken = [before + count for before, count in zip(self.taken, steps)]
        self.now += max(count * seconds for count, seconds in zip(steps, self.seconds))
        self.progress += mean(steps)
        self.rate = [mean(steps) / count for count in steps]

    def local_step(self, running):
        """One step of each replica in `running`."""
        steps = self.method.steps
        losses, gradients = self.gradients({i: self.taken[i] + steps[i] for i in running})
        gradients = self.method.gradients(gradients)

        for i in running:
            step = self.taken[i] + steps[i]
            lr = self.learning_rate(self.progress + steps[i] * self.rate[i])
            g = clipped(gradients[i], self.f.grad_clip)
            self.method.inner_step(i, g, lr * self.rate_factor(i, step + 1))
            self.loss_sums[i] += losses[i]
            steps[i] += 1
            if i == 0:
                self.method.rates.append(lr)
                norm = gradients[i].norm().item()
                self.note("step", self.counts() | {"loss": losses[i], "lr": lr, "grad_norm": norm})
            if self.sick and step in self.sick.steps and i in self.sick.replicas:
                self.sick.spoil(self.replicas[i].x, self.method.a)

        self.method.after_inner_step(self.taken[0] + steps[0] - self.f.sync_warmup_steps)

    def rate_factor(self, i, step):
        """--scale_lr R:FIRST:LAST:FACTOR"""
        if hits(self.f.scale_lr, i, step):
            return float(self.f.scale_lr.split(":")[3])
        return 1.0

    def round_is_over(self, i):
        f = self.f
        count = self.method.steps[i]
        if self.progress + count * self.rate[i] >= f.max_steps:
            return True
        if hasattr(f, "tau_time_s"):  # A-EDiT: rounds end by the clock
            return count * self.seconds[i] >= f.tau_time_s
        tau = scheduled_tau(f, self.taken[0] - f.sync_warmup_steps)
        if hasattr(f, "qsr_c"):
            # tau = max(tau, (c / lr)^2); lr: the largest one
            # of the round, which is the first, once the warm-up of the rate is over
            lr = max(self.method.rates)
            if lr <= f.qsr_c / f.max_steps:
                return False  # longer than the run
            tau = max(tau, int((f.qsr_c / lr) ** 2))
        return count >= tau

    # ---- the end of a round ----

    def sync(self):
        steps = self.method.steps
        for i, replica in enumerate(self.replicas):
            if hits(self.f.flip, i, self.taken[i]):
                replica.x[:] = 2 * self.method.anchor(i) - replica.x
        row = {
            "round": len(self.rows["sync"]) + 1,
            "step": self.taken[0],
            "tau": steps[0],
            "steps": steps,
            "loss": [total / count for total, count in zip(self.loss_sums, steps)],
            "weight": [1 / self.M] * self.M,
            "dropped": [0] * self.M,
            "rolled_back": [],
            "clip": 1.0,
        }
        if self.method.a is not None:
            row["cosine"] = self.cosine_with_last()
        row.update(self.method.sync())
        self.note("sync", row)

    def cosine_with_last(self):
        """Of the angle between the mean pseudo-gradients of this round and of the last one: 1 if
        all rounds move the same way. Outer momentum adds up what is alike. NaN in the first."""
        last = self.moved
        self.moved = mean(self.method.d())
        if last is None:
            return math.nan
        return torch.nn.functional.cosine_similarity(self.moved, last, dim=0).item()

    # ---- the record ----

    def train_s(self):
        """Seconds of training: virtual ones, or those of a clock that stops in evaluations."""
        if not self.f.virtual_clock:
            return time.perf_counter() - self.began - self.evaluating_s
        if self.in_round:
            return self.now + self.method.steps[0] * self.seconds[0]
        return self.now

    def counts(self):
        """Finished steps of replica 0, tokens of all replicas, seconds."""
        f = self.f
        step = self.taken[0]
        progress = self.progress
        if self.in_round:
            step += self.method.steps[0]
            progress += self.method.steps[0] * self.rate[0]
        tokens = round(progress * self.M * self.N * f.accum * f.batch_size * f.block_size)
        return {"step": step, "tokens": tokens, "train_s": self.train_s()}

    def evaluate(self, x, more):
        """Replica 0's network computes the loss of the parameters x."""
        began = time.perf_counter()
        replica = self.replicas[0]
        own = replica.x.clone()
        replica.x[:] = x
        replica.read_x()
        losses = list(self.map(replica.evaluate, self.validation))
        self.model = {}
        for name, p in replica.parameters.items():
            self.model[name] = replica.x[replica.places[name]].view(p.shape).clone()
        replica.x[:] = own
        self.evaluating_s += time.perf_counter() - began
        if losses:
            self.note("eval", self.counts() | {"val_loss": mean(losses), **more})
