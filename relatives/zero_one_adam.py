"""0/1 Adam: all replicas share one variance, so a round's momentum can travel in 1 bit.

The problem. Each replica's Adam divides by a v of its own, so what replicas did in a round has no
common unit. In 0/1 Adam the variance V is equal everywhere and changes rarely. Then local steps
differ by their momentum only, and its sum can travel in 1 bit, with error feedback.

    sync_warmup_steps steps of mini-batch, T in all; V = v / (1 - beta2^T); a = x; v_i = V;
    e_i = E = 0; then repeat:
        tau inner steps; g_i is clipped by the replica's own norm:
            m_i <- beta1 m_i + (1 - beta1) g_i
            v_i <- beta2 v_i + (1 - beta2) g_i^2                    # only for the refresh
            x_i <- (1 - lr wd) x_i - lr clamp(m_i / (sqrt(V) + eps), -1, 1)     # step_bound
        z_i  = (a - x_i) (sqrt(V) + eps) + e_i     # (a - x_i) ...: the round's sum of lr m_i
        e_i <- z_i - C(z_i)                        # C: 1 bit an element, see quantize.py
        u    = C(s), E <- s - u, where s = 1/M sum_i C(z_i) + E     # [sync] quantize.py, two hops
        u   <- u, at most (the round's sum of lr) (sqrt(V) + eps)             # round_bound; off
        a   <- a - u / (sqrt(V) + eps);  x_i <- a;  m_i <- u / (the round's sum of lr)
        after rounds 1, 2, 4, 8, ...:
            w = 1/M sum_i v_i;  v_i <- w           # [sync] quantize.py, log8
            V <- w sum(V) / sum(w) in each layer   # [shard] all-gather of the sums

Where V is 0 (embedding rows of tokens that have not occurred) nothing moves. An old V may be much
too small; the bound keeps steps as short as Adam's own are, and without it long runs diverge. The
refresh takes the shape of w, not its size: gradients of one replica are noisier than their mean.
--tau 1 is 1-bit Adam; --refresh no freezes V. With --warmup_format int8 the warm-up averages
gradients in 8 bits, layer by layer, with errors of its own, which the warm-up's end drops.

    paper      variable         shape        where
    m_i, V     exp_avg, exp_avg_sq of the model: V and, after a sync, m_i are equal everywhere
    a          anchor           (sum P/N,)   equal in a sync group
    v_i, e_i   variance, error  (sum P/N,)   replica i
    E          mean_error       (sum P/N,)   replica i: of its piece, else 0

Deviations: (1) the bound; (2) the refresh after rounds that double, of the replicas' v_i, with the
old scale; in the paper of mean gradients in full precision; (3) blocks of 256 have a scale each;
(4) weight decay is in z_i. A resumed run on another mesh keeps e of the replicas that go on, and of
E what their pieces need.

Slow-link bytes per rank and round: 2 (M-1)/M * 0.141 P/N; with a refresh * 1.156. Blocking. In each
step of a warm-up in 8 bits: 2 (M-1)/M * 1.016 P/N.
Run: torchrun --nproc_per_node 4 train.py --method zero_one_adam --tau 4
Source: 0/1 Adam, arXiv 2202.06009; 1-bit Adam, arXiv 2102.02888; DeepSpeed's code of both.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from method import Method
from plumbing.config import LocalConfig, UserError, option
from quantize import FORMATS, MeanInFlight, bytes_per_element

EPS = 1e-8


@dataclass
class Config(LocalConfig):  # paper: tau grows from 1 to 16
    quantize: str = option("sign", "what is sent", choices=FORMATS)
    error_feedback: bool = option(True, "add what was not sent to the next round")
    step_bound: float = option(1.0, "largest step of an element, in learning rates; 0: none")
    round_bound: float = option(
        0.0, "largest move of an element in a round, in sums of its learning rates; 0: any"
    )
    refresh: str = option("shape", "what of V is refreshed", choices=["no", "shape", "full"])
    warmup_format: str = option(
        "none", "of mean gradients in the warm-up, errors fed back", choices=["none", "int8"]
    )
    buffer_vectors = 2

    def sent_vectors(self, replicas):
        return bytes_per_element(self.quantize) / 4 * super().sent_vectors(replicas)

    def check(self, replicas):
        super().check(replicas)
        if self.sync_warmup_steps < 1 or self.average_moments != "none":
            reason = "needs --sync_warmup_steps above 0, for V, and no --average_moments"
            raise UserError(f"--method {self.method}: {reason}")


class ZeroOneAdam(Method):
    Config = Config
    shared = ("anchor",)
    private = ("variance", "error", "mean_error")

    def __init__(self, model, mesh, config, record):
        super().__init__(model, mesh, config, record)
        if config.warmup_format != "none":
            model.average_layer, self.starting = self.average_layer, []

    def average_layer(self, l):
        """The sum of layer l's gradient over the replicas; e and E are not in use yet."""
        g, e, E = (self.model.views(v)[l] for v in (self.model.grad, self.error, self.mean_error))
        mean = MeanInFlight([e.add_(g)], self.config.warmup_format, self.mesh, errors=[E])
        self.starting.append(mean)

        def wait():
            while self.starting:  # all second hops, before one of them is waited for
                self.starting.pop(0).halfway()
            torch.mul(mean.wait()[0], self.mesh.replicas, out=g)

        return SimpleNamespace(wait=wait)

    def begin(self):
        self.anchor.copy_(self.model.master)
        self.error.zero_()
        self.mean_error.zero_()
        self.model.exp_avg_sq.div_(1 - self.config.beta2**self.steps)
        self.variance.copy_(self.model.exp_avg_sq)
        self.lr_sum = 0.0  # of the round

    def inner_step(self, optimizer, grad_scale):
        if self.averages_gradients:
            return super().inner_step(optimizer, grad_scale)
        model, (beta1, beta2), bound = self.model, optimizer.betas, self.config.step_bound
        V, g = model.exp_avg_sq, model.grad if grad_scale is None else model.grad / grad_scale
        model.exp_avg.lerp_(g, 1 - beta1)
        self.variance.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        step = model.exp_avg / V.sqrt().add_(EPS)
        step = (step.clamp_(-bound, bound) if bound else step).masked_fill_(V == 0, 0)
        optimizer.decay()
        model.master.sub_(step, alpha=optimizer.lr)

    def after_step(self, lr, metrics):
        over = super().after_step(lr, metrics)
        self.lr_sum = 0.0 if self.averages_gradients else self.lr_sum + lr
        return over

    def sync(self):
        views = self.model.views
        self.exchange(norms=self.model.norm(self.anchor - self.model.master))  # for the record
        z = self.error.add_(self.momentum_sum())
        E = views(self.mean_error)
        mean = MeanInFlight(views(z), self.config.quantize, self.mesh, errors=E).wait()
        for l, u in enumerate(mean):
            self.outer_step(l, u)
        self.end_steps()

    def momentum_sum(self):
        """(a - x_i) (sqrt(V) + eps): the round's sum of lr m_i, 0 where V is 0."""
        V = self.model.exp_avg_sq
        return (self.anchor - self.model.master).mul_(V.sqrt().add_(EPS)).masked_fill_(V == 0, 0)

    def outer_step(self, l, u):
        """Layer l's anchor and momentum from u, the mean of what all have sent."""
        model, config = self.model, self.config
        vectors = model.master, self.anchor, model.exp_avg, model.exp_avg_sq
        x, a, m, V = (model.views(vector)[l] for vector in vectors)
        frozen, size = V == 0, V.sqrt().add_(EPS)
        u.masked_fill_(frozen, 0)
        for error in model.views(self.error)[l], model.views(self.mean_error)[l]:
            error.masked_fill_(frozen, 0) if config.error_feedback else error.zero_()
        if config.round_bound:
            limit = size * (config.round_bound * self.lr_sum)
            u.clamp_(-limit, limit)
        # a <- a - u / (sqrt(V) + eps);  x_i <- a;  m_i <- u / sum of lr
        x.copy_(a.addcdiv_(u, size, value=-1))
        m.copy_(u.div_(self.lr_sum or 1.0))

    def end_steps(self):
        """All layers have had their outer step."""
        self.lr_sum = 0.0
        if self.config.refresh != "no" and self.rounds & self.rounds - 1 == 0:
            self.refresh()

    def refresh(self):
        V, v, views = self.model.exp_avg_sq, self.variance, self.model.views
        v.copy_(torch.cat(MeanInFlight(views(v), "log8", self.mesh).wait()))
        sums = torch.stack([layer.sum() for vector in (V, v) for layer in views(vector)])
        # [shard] all-gather, 2 scalars per layer, once per refresh (bit-equal in all replicas)
        old, new = self.mesh.gather_rows(sums, self.mesh.shard).sum(dim=0).chunk(2)
        scale = torch.where(new > 0, old / new, 1.0)
        for l, (V_l, v_l) in enumerate(zip(views(V), views(v))):
            V_l.copy_(v_l * scale[l] if self.config.refresh == "shape" else v_l)
