"""Top-k gradients (Deep Gradient Compression): the largest 1.6% of the gradient in each step.

The problem. Averaging gradients sends the whole gradient in every step, but most of its elements
are small and can wait. What is not sent stays with the replica and is added to the next step. If
the momentum is applied after the exchange, an element that is sent late has missed it. So the
momentum is applied before the exchange, and set to 0 where an element was sent.

    sync_warmup_steps steps with averaged gradients; u_i = m (AdamW's); v_i = 0; then in each step:
        u_i <- m u_i + (1 - m) g_i                # momentum correction
        v_i <- v_i + u_i
        s_i  = the k largest |v_i| of each chunk
        u_i, v_i <- 0 where sent                  # momentum factor masking
        g    = 1/M sum_i s_i                      # [sync] all-gather of positions and values
        x   <- AdamW(x, clip(g)), with beta1 = 0  # u has the momentum

All replicas stay equal. There are no rounds: tau only spaces the record's rows. Chunks: sparse.py.

    paper      variable        shape        where
    u, v       momentum, rest  (sum P/N,)   replica i
    m          momentum_correction

With --momentum_correction 0 --density 1 this is minibatch. With --momentum_correction 0 alone it
is plain error feedback, with AdamW's own momentum: the control that the paper is about.

Deviations from the paper: (1) AdamW in place of momentum SGD. (2) The mean that arrives is clipped;
in the paper each gradient, before it is added. (3) The density does not fall in five epochs; the
warm-up averages gradients.

Slow-link bytes per rank and step: (M-1) 5.5 density sum P/N, and 8 (M-1) per row of the record.
Run: torchrun --nproc_per_node 4 train.py --method top_k
Source: Deep Gradient Compression, arXiv 1712.01887, and its authors' code.
Plain version: plain/sparse.py.
"""

from dataclasses import dataclass

import torch

from config import option
from method import LocalConfig, Method
from relatives.sparse import flat, gather_entries, largest


@dataclass
class Config(LocalConfig):  # paper: 0.001
    density: float = option(0.0156, "share of the elements that is sent", above=0, below=1.000001)
    momentum_correction: float = option(0.9, "m; 0: AdamW's own momentum instead", below=1)

    @property
    def buffer_vectors(self):
        """Positions are int64 on their way to bytes and back: 44 bytes an element."""
        return 44 / 4 * self.density

    def sent_vectors(self, replicas):
        return self.tau * (replicas - 1) * self.density * 5.5 / 4


class TopK(Method):
    Config = Config
    vectors = ("momentum", "rest")

    def begin(self):
        self.momentum.copy_(self.model.exp_avg)

    def after_backward(self):
        if not self.averages_gradients:
            with self.record.stall():
                self.average_largest(self.model.grad)

    def average_largest(self, g):
        m = self.config.momentum_correction
        u = self.momentum
        v = self.rest
        # u_i <- m u_i + (1 - m) g_i;  v_i <- v_i + u_i
        v.add_(u.mul_(m).add_(g, alpha=1 - m))
        # s_i = the largest of v_i;  u_i, v_i <- 0 where sent
        found, positions = largest(v, self.model, self.config.density)
        at = flat(found)
        payload = v[at].view(torch.uint8)
        u.index_fill_(0, at, 0.0)
        v.index_fill_(0, at, 0.0)
        # g = 1/M sum_i s_i
        g.zero_()
        for at, payload in gather_entries(self.mesh, found, positions, payload):
            g.index_add_(0, at, payload.view(g.dtype).div_(self.mesh.replicas))

    def inner_step(self, optimizer):
        if not self.averages_gradients and self.config.momentum_correction > 0:
            optimizer.betas = (0.0, optimizer.betas[1])
        super().inner_step(optimizer)

    def sync(self):
        """Replicas are equal after every step."""
