r"""EDiT on one page: four replicas take turns in one process, and one of them diverges.

    python one_page.py      # about a minute; set a breakpoint anywhere

Each replica is a copy of one small model. At first the replicas average their gradients in each
step, so they stay equal. Then each one trains alone for tau steps: a round. At its end
synchronize() makes one set of parameters out of four, and all replicas go on from there.

In round 13 replica 3 trains with 100 times its learning rate. EDiT flags all its layers, so only
the other three replicas count:

    round 13 | norms 1.0 0.9 0.9 87.8 | weights .33 .34 .33 .00 | flagged layers 0 0 0 6 | loss ...

train(penalty=False) is DiLoCo. Replica 0's loss in the next round is then 3.5, here 2.1.

Not here: overlap (edit.py), shards (shard.py). One process sends nothing, so nothing can overlap.
This computes what the distributed run does, where each replica is a rank. The losses differ by
rounding only, but that grows:

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 4 train.py --method edit --device cpu --dtype fp32 \
        --max_steps 140 --sync_warmup_steps 20 --tau 8 --scale_lr 3:117:124:100
"""

import math
import statistics

import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import data
from model import Llama, ModelConfig

SHAPE = ModelConfig()
SEED = 1337
DELTA = 3.0  # a norm is an anomaly above mean + DELTA sigma
ALPHA = 0.02  # share of a new norm in the running mean and variance
PHI = 10.0  # largest norm of a layer's averaged pseudo-gradient


def train(M=4, steps=140, sync_warmup=20, tau=8, disturbed_round=13, penalty=True):
    corpus = data.standard_library()
    models = [Llama(SHAPE, SEED) for _ in range(M)]  # equal: they have the same seed
    optimizers = [make_optimizer(model) for model in models]
    batches = []  # of each replica: 8 windows of the corpus a step
    for i in range(M):
        batches.append(data.Batches(corpus, SHAPE.block_size, 8, rank=i, world_size=M, seed=SEED))

    def compute_gradient(i, step):
        """The gradient of replica i on its own batch. Returns the loss."""
        inputs, targets = batches[i].train(step)
        models[i].zero_grad()
        loss = models[i](inputs, targets)
        loss.backward()
        return loss.item()

    def inner_step(i, lr):
        clip_grad_norm_(models[i].parameters(), 1.0)
        for group in optimizers[i].param_groups:
            group["lr"] = lr
        optimizers[i].step()

    for step in range(sync_warmup):  # mini-batch training
        losses = [compute_gradient(i, step) for i in range(M)]
        average_gradients(models)
        for i in range(M):
            inner_step(i, learning_rate(step, steps))
    print(f"warm-up  | loss {statistics.fmean(losses):.4f}", flush=True)

    # The anchor is what all replicas had at the last sync, a vector for each layer.
    anchors = [as_vector(layer) for layer in models[0].layers]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.8, nesterov=True)
    accepted = [[[] for _ in anchors] for _ in models]  # norms of a replica and layer

    for round, first in enumerate(range(sync_warmup, steps, tau), start=1):
        for i in range(M):  # in any order: the replicas train alone
            factor = 100 if (round, i) == (disturbed_round, M - 1) else 1
            for step in range(first, min(first + tau, steps)):
                losses[i] = compute_gradient(i, step)
                inner_step(i, factor * learning_rate(step, steps))
        judged = synchronize(models, anchors, outer, accepted, penalty)
        show(round, losses[0], *judged)


@torch.no_grad()
def synchronize(models, anchors, outer, accepted, penalty):
    """The end of a round. Returns norms, weights and flags, (layers, M) each."""
    judged = []
    for l, anchor in enumerate(anchors):
        # d_i = anchor - x_i, the pseudo-gradient of replica i;  G_i = ||d_i||
        d = [anchor - as_vector(model.layers[l]) for model in models]
        G = torch.stack([d_i.norm() for d_i in d])  # (M,)

        # flag i if G_i > mean_i + delta sigma_i
        limits = torch.tensor([largest_norm(norms[l]) for norms in accepted])
        flagged = (G > limits) | ~G.isfinite()
        exponents = -G
        if not penalty:
            flagged[:] = False
            exponents[:] = 0.0

        # w_i = exp(-G_i) / sum_j exp(-G_j) over the unflagged; without penalty 1 / M
        exponents[flagged] = -torch.inf
        w = torch.softmax(exponents, dim=0).nan_to_num()  # 0 if all are flagged

        # dbar = sum_i w_i d_i
        dbar = torch.zeros_like(anchor)
        for i in range(len(models)):
            if not flagged[i]:
                dbar += w[i] * d[i]
                accepted[i][l].append(G[i].item())

        # dhat = dbar * min(1, phi / ||dbar||)
        if penalty:
            dbar *= (PHI / (dbar.norm() + 1e-6)).clamp(max=1.0)

        # For the outer optimizer this is a gradient. A layer without a gradient stays as it is.
        anchor.grad = None if flagged.all() else dbar
        judged.append((G, w, flagged))

    # b <- mu b + dhat;  anchor <- anchor - lr (dhat + mu b)
    outer.step()

    # x_i <- anchor
    for model in models:
        for layer, anchor in zip(model.layers, anchors):
            vector_to_parameters(anchor.clone(), layer.parameters())
    return [torch.stack(values) for values in zip(*judged)]


def largest_norm(norms):
    """The largest one that is no anomaly, from the earlier norms of the same replica and layer."""
    if len(norms) < 10:
        return math.inf
    mean = statistics.fmean(norms[:10])
    variance = statistics.variance(norms[:10])
    for G in norms[10:]:
        mean += ALPHA * (G - mean)
        variance = (1 - ALPHA) * variance + ALPHA * (G - mean) ** 2
    sigma = max(math.sqrt(variance), 0.05 * mean)  # less than that is noise
    return mean + DELTA * sigma


def average_gradients(models):
    for same in zip(*(model.parameters() for model in models)):  # one parameter of each replica
        mean = sum(p.grad for p in same) / len(models)
        for p in same:
            p.grad.copy_(mean)


def as_vector(layer):
    return parameters_to_vector(layer.parameters()).detach()


def make_optimizer(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def learning_rate(step, steps, peak=3e-3, lr_warmup=50):
    if step < lr_warmup:
        return peak * (step + 1) / lr_warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - lr_warmup) / (steps - lr_warmup)))
    return peak * (0.1 + 0.9 * cosine)


def show(round, loss, G, w, flagged):
    norms = " ".join(f"{norm:.1f}" for norm in G.norm(dim=0))  # of all layers together
    weights = " ".join(f"{weight:.2f}".lstrip("0") for weight in w.mean(dim=0))
    layers = " ".join(f"{count}" for count in flagged.sum(dim=0))
    judged = f"norms {norms} | weights {weights} | flagged layers {layers}"
    print(f"round {round:2d} | {judged} | loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    train()
