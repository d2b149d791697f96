r"""EDiT and DiLoCo on one page: four replicas take turns in one process, and one of them diverges.

    python one_page.py      # 10 to 30 s; set a breakpoint anywhere

Each replica is a copy of one small model. At first the replicas average their gradients in each
step, so they stay equal. Then each one trains alone for tau steps: a round. At its end, in the
sync, synchronize() makes one set of parameters out of four, and all replicas go on from there. EDiT
and DiLoCo begin with the same replicas and train them on the same text.

In round 12 replica 3 trains with 100 times its learning rate. DiLoCo averages what it gets, so its
loss jumps and stays high. EDiT's penalty protects the sync from bad replicas. Layer by layer, it
leaves out a replica that has moved much farther than it usually does (it flags it), gives less
weight to one that has moved far, and limits the length of the common step. All 4 layers of replica
3 (embedding, 2 blocks, head) are flagged, so only the others count:

       EDiT's replicas                                            | validation loss
round  norms                | weights             | flagged layers | EDiT    DiLoCo
   11  0.5 0.4 0.5 0.5      | 0.25 0.26 0.25 0.25 | 0 0 0 0        | 2.7362  2.7368
   12  0.5 0.4 0.4 44.0     | 0.33 0.34 0.33 0.00 | 0 0 0 4        | 2.7102  3.4533
   13  0.4 0.4 0.4 0.4      | 0.25 0.25 0.25 0.25 | 0 0 0 0        | 2.6923  3.2793

In rounds in which nobody is sick the two losses differ a little, too: EDiT's weights are 0.24 to
0.26, not exactly 0.25, and training enlarges small differences. Neither is better by that.

Not here: overlap (edit.py), shards (shard.py). One process sends nothing, so nothing can overlap.
plain/ has all methods in one process, with all their flags. This page computes what the distributed
run does, where each replica is a rank. The losses differ by rounding only, but that grows:

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 4 train.py --method edit --device cpu --dtype fp32 \
        --n_layer 2 --n_embd 64 --block_size 32 --max_steps 96 --lr_warmup_steps 16 \
        --sync_warmup_steps 16 --tau 4 --scale_lr 3:61:64:100 --eval_interval 4 --eval_batches 4
"""

import copy
import math
import statistics

import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import data
from config import run_command
from model import Llama, ModelConfig

SHAPE = ModelConfig(n_layer=2, n_embd=64, block_size=32)
SEED = 1337
DELTA = 3.0  # a norm is an anomaly above mean + DELTA sigma
ALPHA = 0.02  # share of a new norm in the running mean and variance
PHI = 10.0  # largest norm of a layer's averaged pseudo-gradient


class Replica:
    """A whole model with its own optimizer."""

    def __init__(self):
        self.model = Llama(SHAPE, SEED)  # equal in all replicas: they have the same seed
        self.optimizer = make_optimizer(self.model)
        self.accepted = [[] for _ in self.model.layers]  # each layer's norms that were not flagged

    def compute_gradient(self, inputs, targets):
        self.model.zero_grad()
        self.model(inputs, targets).backward()

    def inner_step(self, lr):
        clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


class Run:
    """Replicas that synchronize with EDiT's penalty, or without it: that is DiLoCo."""

    def __init__(self, replicas, penalty):
        self.replicas = copy.deepcopy(replicas)
        self.penalty = penalty
        # The anchor is what all replicas had at the last sync, a vector for each layer.
        self.anchors = [as_vector(layer) for layer in replicas[0].model.layers]
        self.outer = torch.optim.SGD(self.anchors, lr=0.7, momentum=0.5, nesterov=True)


def train(M=4, steps=96, sync_warmup=16, tau=4, sick_round=12):
    torch.set_num_threads(1)  # of a model so small more threads make no step faster
    corpus = data.standard_library()
    batches = []
    for i in range(M):  # a replica gets 8 windows of the text in each step, other ones than others
        batches.append(data.Batches(corpus, SHAPE.block_size, 8, rank=i, world_size=M, seed=SEED))
    replicas = [Replica() for _ in range(M)]

    for step in range(sync_warmup):  # averaged gradients, at least one step
        for i, replica in enumerate(replicas):
            replica.compute_gradient(*batches[i].train(step))
        average_gradients(replicas)
        for replica in replicas:
            replica.inner_step(learning_rate(step, steps))

    edit = Run(replicas, penalty=True)
    diloco = Run(replicas, penalty=False)
    print(HEADER)
    for round, first in enumerate(range(sync_warmup, steps, tau), start=1):
        losses = []
        for run in diloco, edit:
            for i, replica in enumerate(run.replicas):  # in any order: they train alone
                sick = round == sick_round and i == M - 1
                for step in range(first, min(first + tau, steps)):
                    replica.compute_gradient(*batches[i].train(step))
                    replica.inner_step(learning_rate(step, steps) * (100 if sick else 1))
            seen = synchronize(run.replicas, run.anchors, run.outer, run.penalty)
            losses.append(validation_loss(run.replicas[0].model, corpus))
        show(round, *seen, losses, round == sick_round)  # of EDiT, which was last


@torch.no_grad()
def synchronize(replicas, anchors, outer, penalty):
    """The end of a round. Returns norms, weights and flags, (M, L) each: M replicas, L layers."""
    M = len(replicas)
    norms = torch.zeros(M, len(anchors))
    weights = torch.zeros_like(norms)
    flags = torch.zeros_like(norms)

    for l, anchor in enumerate(anchors):
        # d_i = anchor - x_i, the pseudo-gradient of replica i;  G_i = ||d_i||
        d = [anchor - as_vector(replica.model.layers[l]) for replica in replicas]
        G = torch.stack([d_i.norm() for d_i in d])  # (M,)
        if penalty:
            # flag i if G_i > mean_i + delta sigma_i
            limits = torch.tensor([anomaly_limit(replica.accepted[l]) for replica in replicas])
            flagged = (G > limits) | ~G.isfinite()
            # w_i = exp(-G_i) / sum_j exp(-G_j), j unflagged; 0 if all are flagged
            exponents = (-G).masked_fill(flagged, -torch.inf)
            w = torch.softmax(exponents, dim=0).nan_to_num()
        else:
            flagged = torch.zeros(M, dtype=torch.bool)
            w = torch.full((M,), 1 / M)

        # dbar = sum_i w_i d_i
        dbar = torch.zeros_like(anchor)
        for i in range(M):
            if not flagged[i]:
                dbar += w[i] * d[i]
                replicas[i].accepted[l].append(G[i].item())

        # If all are flagged, their limits are out of date, so they start anew.
        if flagged.all():
            for i in range(M):
                if G[i].isfinite():
                    replicas[i].accepted[l].clear()

        # dhat = dbar * min(1, phi / ||dbar||)
        if penalty:
            dbar *= (PHI / (dbar.norm() + 1e-6)).clamp(max=1.0)

        # For the outer optimizer this is a gradient. A layer without a gradient stays as it is.
        anchor.grad = None if flagged.all() else dbar
        norms[:, l] = G
        weights[:, l] = w
        flags[:, l] = flagged

    # b <- mu b + dhat;  anchor <- anchor - lr (dhat + mu b)
    outer.step()

    # x_i <- anchor
    for replica in replicas:
        for layer, anchor in zip(replica.model.layers, anchors):
            # The parameters become views of this vector. Without clone() all replicas would share
            # the anchor's own memory, and their next steps would move it.
            vector_to_parameters(anchor.clone(), layer.parameters())
    return norms, weights, flags


def anomaly_limit(norms):
    """The largest norm that is no anomaly. norms: earlier ones of the same replica and layer."""
    if len(norms) < 10:
        return math.inf
    mean = statistics.fmean(norms[:10])
    variance = statistics.variance(norms[:10])
    for G in norms[10:]:
        mean += ALPHA * (G - mean)
        variance = (1 - ALPHA) * variance + ALPHA * (G - mean) ** 2
    sigma = max(math.sqrt(variance), 0.05 * mean)  # less than that is noise
    return mean + DELTA * sigma


def average_gradients(replicas):
    for same in zip(*(replica.model.parameters() for replica in replicas)):  # one of each replica
        mean = sum(p.grad for p in same) / len(replicas)
        for p in same:
            p.grad.copy_(mean)


def as_vector(layer):
    return parameters_to_vector(layer.parameters()).detach()


def make_optimizer(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def learning_rate(step, steps, peak=3e-3, lr_warmup=16):
    if step < lr_warmup:
        return peak * (step + 1) / lr_warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - lr_warmup) / (steps - lr_warmup)))
    return peak * (0.1 + 0.9 * cosine)


@torch.no_grad()
def validation_loss(model, corpus):
    """Nats per byte, of 64 windows."""
    windows = data.Batches(corpus, SHAPE.block_size, 64).validation(4)
    return statistics.fmean(model(inputs, targets).item() for inputs, targets, _ in windows)


HEADER = """
       EDiT's replicas                                            | validation loss
round  norms                | weights             | flagged layers | EDiT    DiLoCo"""


def show(round, norms, weights, flags, losses, sick):
    """norms, weights, flags: EDiT's; losses: DiLoCo's and EDiT's."""
    norm = numbers(norms.norm(dim=1), digits=1)  # of all layers together
    weight = numbers(weights.mean(dim=1), digits=2)
    count = numbers(flags.sum(dim=1), digits=0)
    diloco, edit = losses
    mark = "  <- replica 3 is sick" if sick else ""
    print(f"{round:5}  {norm:20} | {weight} | {count:14} | {edit:.4f}  {diloco:.4f}{mark}")


def numbers(values, digits):
    return " ".join(f"{value:.{digits}f}" for value in values)


if __name__ == "__main__":
    run_command("one_page.py", train)  # one line for an error; `| head` ends nothing
