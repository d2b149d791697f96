"""0/1 Adam: all replicas share one variance, so a round's momentum can travel in 1 bit.

The problem. Each replica's Adam divides by a v of its own, so what replicas did in a round has no
common unit. In 0/1 Adam the variance V is equal everywhere and changes rarely. Then local steps
differ by their momentum only, and its sum can travel in 1 bit, with error feedback.

    T steps with averaged gradients (the warm-up)
    V = v_i = v / (1 - beta2^T); a = x; e_i = E = 0; repeat:
        tau inner steps; g_i is clipped by the replica's own norm:
            m_i <- beta1 m_i + (1 - beta1) g_i
            v_i <- beta2 v_i + (1 - beta2) g_i^2                    # for the refresh
            x_i <- (1 - lr wd) x_i - lr clamp(m_i / (sqrt(V) + eps), -1, 1)
        z_i  = (a - x_i) (sqrt(V) + eps) + e_i     # = sum of lr m_i (bounded) + e_i
        e_i <- z_i - C(z_i)                        # C(z): z as a receiver decodes it, in 1 bit
        s    = 1/M sum_i C(z_i) + E                # [sync] average_coded(): quantize.py
        u    = C(s);  E <- s - u                   # M = 2: u = s, there is no E
        a   <- a - u / (sqrt(V) + eps);  x_i <- a;  m_i <- u / (the round's sum of lr)
        after rounds 1, 2, 4, 8, ..., unless --no-refresh:
            v_i <- w = 1/M sum_i v_i                                # [sync] average_coded(), log8
            V   <- w sum(V) / sum(w) in each layer                  # [shard] all-gather of sums

    paper      variable            shape        where
    m_i        model.exp_avg       (sum P/N,)   equal everywhere after a sync
    V          model.exp_avg_sq    (sum P/N,)   equal everywhere
    v_i, w     variance            (sum P/N,)   replica i
    a          anchor              (sum P/N,)   equal everywhere
    e_i        error               (sum P/N,)   replica i
    E          mean_error          (sum P/N,)   replica i: of its pieces, else 0

Error feedback keeps what a sender has not sent, and what the owner of a piece has not sent of its
mean, for the next message (quantize.py explains owners). Where V is 0 (embedding rows of tokens
that have not occurred) nothing moves. --tau 1 is 1-bit Adam; --no-refresh freezes V. A run
resumed on another mesh keeps e_i of replicas that go on, and E where a replica's old and new pieces
overlap.

Deviations: (1) An old V may be much too small: the bound keeps steps as short as Adam's, and
without it long runs diverge. (2) The paper refreshes V from mean gradients in full precision, in
steps whose distance doubles. Here it is from the v_i, in 8 bits, after rounds whose number doubles.
The replicas' own gradients are noisier than their mean, so V takes the shape of w and keeps its
size. (3) A scale for each block of 256. (4) Weight decay is in z_i.

The first rounds should be short, so the paper lets them grow: --tau_schedule. With rounds of 16
steps throughout, runs of 2,000 steps ended 7% (mean of four seeds) and 19% (a fifth one) above
minibatch; with rounds that grow, 2%: RESULTS.md.

Slow-link bytes per rank and round: 2 (M-1)/M * 0.141 sum P/N (with a refresh 1.156), and 12 (M-1).
Run: torchrun --nproc_per_node 4 train.py --method zero_one_adam --tau_schedule 2:96,4:192,8:384
Source: 0/1 Adam, arXiv 2202.06009; 1-bit Adam, arXiv 2102.02888; DeepSpeed's code of both.
Plain version: plain/one_bit.py.
"""

import functools
import re
from dataclasses import dataclass

import torch

from config import UserError, option
from method import Method
from relatives.quantize import FORMATS, MeanInFlight, QuantizedConfig

EPS = 1e-8  # AdamW's


@dataclass
class Config(QuantizedConfig):  # paper: tau grows from 1 to 16
    quantize: str = option("sign", "what is sent", choices=FORMATS)
    refresh: bool = option(True, "take a new shape of V after rounds 1, 2, 4, 8, ...")
    tau_schedule: str = option("", "TAU:STEPS,...: for STEPS steps rounds of TAU; then --tau")
    buffer_vectors = 1.5  # a mean or the root of V, and codes: sent, received

    def describe_round(self, tokens_per_step: int) -> str:
        text = super().describe_round(tokens_per_step)
        if self.tau_schedule:
            text += f", at first --tau_schedule {self.tau_schedule}"
        return text

    def check(self, replicas):
        super().check(replicas)
        scheduled_rounds(self.tau_schedule)
        if self.sync_warmup_steps < 1:
            reason = "needs --sync_warmup_steps above 0, for V"
            raise UserError(f"--method {self.method}: {reason}")
        if self.optimizer != "adamw":
            raise UserError(f"--optimizer {self.optimizer}: {self.method} needs AdamW's variance")


@functools.cache  # every step asks for it
def scheduled_rounds(schedule: str) -> list:
    """--tau_schedule as pairs (TAU, STEPS). Raises UserError."""
    pair = r"([1-9]\d{0,8}):([1-9]\d{0,8})"
    if not re.fullmatch(f"({pair}(,{pair})*)?", schedule):
        example = "write 2:96,4:384 for rounds of 2 steps for 96 steps, then of 4 for 384"
        raise UserError(f"--tau_schedule {schedule}: {example}")
    return [(int(tau), int(steps)) for tau, steps in re.findall(pair, schedule)]


class ZeroOneAdam(Method):
    Config = Config
    vectors = ("anchor", "variance", "error", "mean_error")

    def begin(self):
        self.anchor.copy_(self.model.master)
        self.variance.copy_(self.model.exp_avg_sq.div_(1 - self.config.beta2**self.steps))

    def steps_of_round(self) -> float:
        before = self.steps - self.local_steps - self.config.sync_warmup_steps
        end = 0
        for tau, steps in scheduled_rounds(self.config.tau_schedule):
            end += steps
            if before < end:
                return tau
        return self.config.tau

    def inner_step(self, optimizer):
        if self.averages_gradients:
            return super().inner_step(optimizer)
        beta1, beta2 = optimizer.betas
        m = self.model.exp_avg
        V = self.model.exp_avg_sq
        g = self.model.grad
        m.lerp_(g, 1 - beta1)
        self.variance.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        for x, *_ in optimizer.matrices:
            x.mul_(1 - optimizer.lr * optimizer.weight_decay)
        # In the storage of the gradient, which is free from here to the next step.
        size = torch.sqrt(V, out=g).add_(EPS)
        step = torch.div(m, size, out=g).clamp_(-1, 1).masked_fill_(V == 0, 0)
        self.model.master.sub_(step, alpha=optimizer.lr)

    def sync(self):
        V = self.model.exp_avg_sq
        frozen = V == 0
        d = torch.sub(self.anchor, self.model.master, out=self.model.grad)
        # z_i = (a - x_i) (sqrt(V) + eps) + e_i
        z = self.error.add_(d.mul_(V.sqrt().add_(EPS)).masked_fill_(frozen, 0))
        # e_i <- z_i - C(z_i);  u = C(s), E <- s - u
        u = self.model.grad  # its storage is free between two steps
        errors = [[E] for E in self.model.used_views(self.mean_error)]
        self.average_coded(u, z, self.config.quantize, errors)
        for vector in u, self.error, self.mean_error:
            vector.masked_fill_(frozen, 0)
        # a <- a - u / (sqrt(V) + eps);  x_i <- a;  m_i <- u / sum of lr
        self.anchor.addcdiv_(u, V.sqrt().add_(EPS), value=-1)
        self.model.master.copy_(self.anchor)
        torch.div(u, sum(self.rates) or 1.0, out=self.model.exp_avg)
        if self.config.refresh and self.rounds & (self.rounds - 1) == 0:  # rounds 1, 2, 4, 8, ...
            self.refresh_variance()

    def average_coded(self, out, vector, format: str, errors):
        """out <- the mean of all replicas' `vector`, with the owners' errors of each layer."""
        views = self.model.used_views
        means = []
        for v, E in zip(views(vector), errors):
            means.append(MeanInFlight([v], format, self.mesh, E))
        for mean in means:
            mean.halfway()
        for place, mean in zip(views(out), means):
            place.copy_(mean.wait())

    def refresh_variance(self):
        V = self.model.views(self.model.exp_avg_sq)
        w = self.model.views(self.variance)
        self.average_coded(self.variance, self.variance, "log8", [None] * len(w))
        sums = torch.stack([layer.sum() for layer in [*V, *w]])
        # [shard] all-gather, 2 scalars per layer, once per refresh (bit-equal in all replicas)
        old, new = self.mesh.gather_rows(sums, self.mesh.shard_group).sum(dim=0).chunk(2)
        size = torch.where(new > 0, old / new, 1.0)
        for V_l, w_l, size_l in zip(V, w, size):
            torch.mul(w_l, size_l, out=V_l)
