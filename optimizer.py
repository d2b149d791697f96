"""The inner optimizers on ZeRO-3 shards: AdamW and Muon.

AdamW works element by element, so each rank steps its own shard of the flat vectors. This is
torch's fused kernel on them: matrices decay, norms' gains do not.

Muon. The problem: AdamW scales each element by itself. Muon looks at a whole matrix: it keeps the
directions of the momentum and makes all their singular values about 1, so that rare directions
move as far as frequent ones. But with ZeRO-3 a rank has 1/N of a flat vector and no whole matrix.

    for each matrix W (out x in) of a block, with gradient G, clipped as for AdamW:
        M <- beta1 M + (1 - beta1) G
        X  = M / (||M|| + 1e-7), transposed if out > in
        5 times: A = X X^T;  X <- a X + (b A + c A A) X            # Newton-Schulz
        W <- (1 - lr wd) W - muon_lr(t) sqrt(out / in) X           # X transposed back

The embedding, the head and the gains of norms take AdamW's step. muon_lr(t) has the
schedule of lr. The iteration brings singular values above 0.007 to 0.98 .. 1.03 (in bf16 less
exactly) without computing them. The blocks are stepped N at a time, so that each rank
orthogonalizes one whole block:

    rank n has shard n of the momenta of blocks l .. l + N - 1          (N, P/N)
    all-to-all: rank n has block l + n, whole                           (P,)
    rank n orthogonalizes each matrix of its block                      # idle if there is no block
    all-to-all: rank n has shard n of the steps of blocks l .. l + N - 1

All blocks have the same layout. `pieces` and `whole` are shard.py's two gather buffers, which are
free between two steps.

    symbol     variable              shape        dtype
    M          model.exp_avg         (sum P/N,)   fp32; AdamW's first moment is the same average
    X          pieces, whole         (N, P/N)     that of the layers (bf16, fp32)
               model.exp_avg_sq      less         fp32; only of what AdamW steps

A matrix of m rows and n columns, m <= n, takes 20 m^2 n + 10 m^3 FLOP. Of a rank and step, with
N = 8, bf16 and 16,384 tokens (with the 2,048 tokens of --model 7b its first column is 79 TFLOP):

            blocks, both passes     here                    if each rank did all blocks
    124m      8.3 TFLOP             0.25 TFLOP,    50 MB    1.5 TFLOP,    149 MB    [shard] links
    7b        634 TFLOP               77 TFLOP, 2,822 MB    616 TFLOP, 11,289 MB

Deviations: (1) qkv and gate_up are one matrix each. (2) Each of the five iterations has its own
coefficients, as in MuLoCo. (3) No Nesterov momentum. (4) The scale is sqrt(out / in), by which the
step has about the same effect on the outputs of every matrix. Jordan's code and torch.optim.Muon
have sqrt(max(1, out / in)) (adjust_lr_fn "original"). The two differ where out < in, which is
`down` alone: with F = 8/3 C its step is 1.6 times smaller here than with torch's at the same rate.

While gradients are averaged, each replica computes the same steps. On hardware of different kinds,
rounding differs, and replicas drift apart.

Run: torchrun --nproc_per_node 4 train.py --method edit --optimizer muon
Source: Muon, Jordan et al. 2024, kellerjordan.github.io/posts/muon; MuLoCo, arXiv 2505.23725.
Plain versions: plain/replica.py (AdamW), plain/muon.py.
"""

import torch
from torch.optim.adamw import adamw

from config import UserError


class AdamW:
    """torch's fused AdamW on the flat vectors of a ShardedModel: matrices decay, norm gains do not.
    (torch.optim's class does the same, but imports the compiler: 0.8 s of each start.)"""

    def __init__(self, model, weight_decay: float, betas: tuple, others=()):
        """others: layers whose matrices another optimizer steps. They have no exp_avg_sq."""
        self.lr = 0.0
        self.betas = betas
        self.weight_decay = weight_decay
        self.steps = 0  # that the moments have seen, for their bias correction
        self.device = model.mesh.device
        index = model.mesh.shard_index
        for l in others:
            model.squares_from[l] = model.layouts[l].decayed
        sizes = model.sizes_from(model.squares_from, model.mesh.shards, index)
        model.exp_avg = torch.zeros_like(model.master)
        model.exp_avg_sq = model.master.new_zeros(sum(sizes))

        self.matrices = []  # of each layer: parameters, gradient, moments
        self.gains = []
        momenta = model.views(model.exp_avg)
        squares = model.exp_avg_sq.split(sizes)
        for layout, x, g, m, v in zip(model.layouts, model.masters, model.grads, momenta, squares):
            first = layout.shard_size - len(v)  # Muon steps the elements before it
            vectors = x[first:], g[first:], m[first:], v
            border = layout.border(layout.decayed, index) - first
            if border > 0:
                self.matrices.append([vector[:border] for vector in vectors])
            if border < len(v):
                self.gains.append([vector[border:] for vector in vectors])

    def step(self):
        self._step(self.matrices, self.weight_decay)
        self._step(self.gains, 0.0)
        self.steps += 1

    def _step(self, rows: list, weight_decay: float):
        if not rows:
            return
        x, g, m, v = map(list, zip(*rows))
        # One each, because adamw() adds 1 to all of them.
        steps = list(torch.full((len(rows),), float(self.steps), device=self.device))
        beta1, beta2 = self.betas
        adamw(
            x, g, m, v, [], steps, fused=True, amsgrad=False, maximize=False,
            lr=self.lr, beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=weight_decay,
        )  # fmt: skip


# ---- Muon ----

COEFFICIENTS = (  # a, b, c of each iteration
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalize(M):
    """A matrix (out, in) with the singular vectors of M and singular values near 1."""
    out, columns = M.shape
    if out > columns:  # A is as small as it can be if the smaller side comes first
        return orthogonalize(M.T).T
    X = M / (M.norm() + 1e-7)
    for a, b, c in COEFFICIENTS:
        A = X @ X.T
        # X <- a X + (b A + c A A) X
        B = torch.addmm(A, A, A, beta=b, alpha=c)
        X = torch.addmm(X, B, X, beta=a)
    return X


def check_blocks(shapes: list):
    """shapes: of each block, its parameters' by name. Raises UserError if they are not alike."""
    first = shapes[0] if shapes else {}
    too_many = any(len(shape) > 2 for shape in first.values())
    if too_many or not first or any(block != first for block in shapes):
        raise UserError(
            "muon: all layers but the first and the last must have the same matrices, and no "
            "tensors with more than two dimensions; use AdamW"
        )


class Muon(AdamW):
    """AdamW whose step of the blocks' matrices is Muon's."""

    def __init__(self, model, weight_decay: float, betas: tuple, ratio: float):
        """ratio: Muon's learning rate / AdamW's."""
        self.blocks = range(1, len(model.layers) - 1)
        check_blocks([model.layouts[l].shapes for l in self.blocks])
        super().__init__(model, weight_decay, betas, others=self.blocks)
        self.model = model
        self.ratio = ratio
        self.layout = model.layouts[1]  # of every block
        # Elements of matrices in this shard of a block; norms' gains follow them.
        self.size = self.layout.border(self.layout.decayed, model.mesh.shard_index)
        shards = model.mesh.shards
        padded = self.layout.padded
        # One shard: a block is whole already, and both names are one buffer.
        buffers = model.gathered[:shards] or [model.master.new_empty(padded)]
        self.pieces = buffers[0][:padded].view(shards, -1)
        self.whole = buffers[-1][:padded].view(shards, -1)

    def step(self):
        super().step()
        N = self.model.mesh.shards
        for first in range(0, len(self.blocks), N):
            self.step_blocks(self.blocks[first : first + N])

    def step_blocks(self, blocks):
        """The step of at most N blocks."""
        model = self.model
        mesh = model.mesh
        momenta = model.views(model.exp_avg)
        for piece, l in zip(self.pieces, blocks):
            M = momenta[l][: self.size]
            G = model.grads[l][: self.size]
            # M <- beta1 M + (1 - beta1) G
            M.lerp_(G, 1 - self.betas[0])
            piece[: self.size] = M  # casts to the layers' dtype
        # [shard] all-to-all, P in the compute dtype, once per N blocks and step
        mesh.all_to_all(self.whole, self.pieces, mesh.shard_group).wait()
        if mesh.shard_index < len(blocks):
            for X in self.layout.cut(self.whole.view(-1)).values():
                if X.dim() == 2:
                    out, columns = X.shape
                    X.copy_(orthogonalize(X).mul_((out / columns) ** 0.5))
        # [shard] all-to-all, P in the compute dtype, once per N blocks and step
        mesh.all_to_all(self.pieces, self.whole, mesh.shard_group).wait()
        for piece, l in zip(self.pieces, blocks):
            W = model.masters[l][: self.size]
            # W <- (1 - lr wd) W - muon_lr sqrt(out / in) X
            W.mul_(1 - self.lr * self.weight_decay)
            W.sub_(piece[: self.size], alpha=self.lr * self.ratio)
