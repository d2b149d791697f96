"""SparseLoCo: DiLoCo that sends the largest 12.5% of the pseudo-gradient, in 2 bits a value.

The problem. DiLoCo's pseudo-gradient is as large as the model. Most of its sum is in few elements.
SparseLoCo sends these; an error feedback keeps the others for later rounds, and takes the place of
the outer momentum.

    sync_warmup_steps steps with averaged gradients; anchor = x; e_i = 0; then repeat:
        tau inner steps: x_i <- AdamW(x_i)
        e_i    <- beta e_i + (anchor - x_i)
        s_i     = Q(the k largest |e_i| of each chunk)
        e_i    <- e_i - s_i
        anchor <- anchor - lr 1/M sum_i s_i      # [sync] all-gather, once per round, blocking
        x_i    <- anchor

Q keeps of each value its sign, and whether it is above the mean absolute value of those sent from
its chunk. The values above decode to their mean, the others to theirs; both means are fp16. Chunks
and positions are those of sparse.py.

    paper      variable        shape        where
    theta      anchor          (sum P/N,)   equal in a sync group
    e_i        error           (sum P/N,)   replica i
    alpha, beta, k    outer_lr, error_decay, density * 4096

With --density 1 --error_decay 0 --no-two_bits it is DiLoCo without momentum. Error feedback needs
many rounds: e_i releases about the density in a round. So the paper's 1/64 of 4,096 needs hundreds,
and the default here is 1/8.

Deviations: (1) the mean is over all M replicas, as in the paper; the authors' codes divide an
element by the number of its senders, and one of them clips messages to their median norm. (2) Two
classes of values, not quantiles. (3) The warm-up averages gradients.

Slow-link bytes per rank and round: (M-1) (1.75 density + 4/4096) sum P/N, and 12 (M-1) for
losses, steps and norms. It grows with M.
Run: torchrun --nproc_per_node 4 train.py --method sparse_loco
Source: SparseLoCo, arXiv 2508.15706; the codes tplr-ai/CCLoco and one-covenant/templar.
Plain version: plain/sparse.py.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from config import option
from method import LocalConfig, Method
from relatives.quantize import pack, unpack
from relatives.sparse import CHUNK, flat, gather_entries, largest


@dataclass
class Config(LocalConfig):  # paper: tau 15 to 100, density 1/64
    outer_lr: float = option(1.0, "outer learning rate (templar: 0.4)")
    density: float = option(0.125, "share of the elements that is sent", above=0, below=1.000001)
    error_decay: float = option(0.95, "beta, of what was not sent", below=1)
    two_bits: bool = option(True, "send 2 bits a value, else whole values")

    @property
    def buffer_vectors(self):
        """Positions and codes are int64 on their way to bytes and back: 84 bytes an element."""
        return 84 / 4 * self.density

    def sent_vectors(self, replicas):
        each = 5.5 * self.density  # bytes
        if self.two_bits:
            each = 1.75 * self.density + 4 / CHUNK
        return (replicas - 1) * each / 4


def encode(values):
    """Values (R, k) -> 2 bits of each, (R, k) in 0..3, and the rows' means (R, 2) in fp16."""
    size = values.abs()
    high = size > size.mean(dim=1, keepdim=True)
    means = []
    for own in ~high, high:
        means.append((size * own).sum(dim=1) / own.sum(dim=1).clamp(min=1))
    codes = 2 * (values < 0) + high
    return codes.to(torch.uint8), torch.stack(means, dim=1).half()


def decode(codes, means):
    """The inverse, in the dtype of the means."""
    return torch.cat([means, -means], dim=1).gather(1, codes.long())


class SparseLoCo(Method):
    Config = Config
    vectors = ("anchor", "error")

    def begin(self):
        self.anchor.copy_(self.model.master)

    def sync(self):
        a = self.anchor
        x = self.model.master
        e = self.error
        config = self.config
        # e_i <- beta e_i + (a - x_i)
        d = torch.sub(a, x, out=x)
        e.mul_(config.error_decay).add_(d)
        # s_i = Q(the largest of e_i)
        found, positions = largest(e, self.model, config.density)
        payload = self.to_bytes([e[at] for at in found])
        # e_i <- e_i - s_i
        e.index_add_(0, flat(found), self.from_bytes(payload, positions), alpha=-1)
        # a <- a - lr 1/M sum_i s_i;  x_i <- a
        for at, payload in gather_entries(self.mesh, found, positions, payload):
            s = self.from_bytes(payload, positions)
            a.index_add_(0, at, s.mul_(-config.outer_lr / self.mesh.replicas))
        x.copy_(a)

    def to_bytes(self, matrices: list):
        """What is sent of values (R, k), as bytes: the means of all rows, then 2 bits of each
        value; without two_bits whole values."""
        if not self.config.two_bits:
            return flat(matrices).view(torch.uint8)
        all_codes = []
        all_means = []
        for values in matrices:
            codes, means = encode(values)
            all_codes.append(codes)
            all_means.append(means)
        codes = flat(all_codes)
        codes = pack(pad(codes, (0, -len(codes) % 4)), bits=2)
        return torch.cat([flat(all_means).view(torch.uint8), codes])

    def from_bytes(self, payload, like: list):
        """The values of all matrices, (n,). like: matrices of the same shapes."""
        dtype = self.anchor.dtype
        if not self.config.two_bits:
            return payload.view(dtype)
        border = 4 * sum(map(len, like))  # two means of each row
        means = payload[:border].view(torch.float16).view(-1, 2).to(dtype)
        codes = unpack(payload[border:], bits=2).flatten()
        values = []
        for matrix in like:
            rows, k = matrix.shape
            values.append(decode(codes[: rows * k].view(rows, k), means[:rows]))
            codes = codes[rows * k :]
            means = means[rows:]
        return flat(values)
