"""EDiT on one page: four replicas that take turns in one process. Set a breakpoint anywhere.

    python one_page.py      # two to three minutes; it prints the losses of the distributed run:
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 4 train.py --method edit --device cpu --dtype fp32

There each replica is a rank. The sums are the same; rounding in fp32 is not, and that grows.
"""

import math

import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import data
import edit
from model import Llama, ModelConfig

flat = lambda layer: parameters_to_vector(layer.parameters()).detach()  # one vector

def train(M=4, steps=700, warmup=200, tau=16, corpus=None, shape=ModelConfig(), seed=1337):
    corpus = corpus or data.standard_library()
    models = [Llama(shape, seed) for _ in range(M)]  # all start equal
    batches = [
        data.Batches(corpus, shape.block_size, 8, rank=i, world_size=M, seed=seed) for i in range(M)
    ]
    optimizers = [make_optimizer(model) for model in models]
    for step in range(steps):
        if step == warmup:  # from here on each replica trains alone, tau steps a round
            anchors = [flat(layer) for layer in models[0].layers]  # a vector per layer
            momenta, statistics = [0 * a for a in anchors], torch.zeros(M, 3, len(anchors))
        losses = []
        for i, model in enumerate(models):
            model.zero_grad()
            losses.append(model(*batches[i].train(step)))
            losses[-1].backward()
        if step < warmup:  # mini-batch
            for same in zip(*(model.parameters() for model in models)):
                torch._foreach_copy_([p.grad for p in same], [sum(p.grad for p in same) / M] * M)
        for model, optimizer in zip(models, optimizers):
            clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            optimizer.step()
        if step >= warmup and ((step + 1 - warmup) % tau == 0 or step + 1 == steps):
            synchronize(models, anchors, momenta, statistics, edit.Config())
        if (step + 1) % 10 == 0 or step == 0:
            loss = losses[0] if step >= warmup else sum(losses) / M
            print(f"step {step + 1:05d}/{steps:05d} | loss {loss:.4f}", flush=True)


@torch.no_grad()
def synchronize(models, anchors, momenta, statistics, penalty):
    """The end of a round. statistics: (M, 3, layers), see edit.py."""
    d = [[a - flat(layer) for a, layer in zip(anchors, model.layers)] for model in models]
    G = torch.stack([torch.stack([d_l.norm() for d_l in d_i]) for d_i in d])  # (M, layers)
    flagged = edit.is_anomaly(G, torch.stack([edit.anomaly_limits(s, penalty) for s in statistics]))
    for i, s in enumerate(statistics):
        s.copy_(edit.update_statistics(s, G[i], ~flagged[i], penalty))
    w = edit.replica_weights(G, flagged)
    for l, (a, b) in enumerate(zip(anchors, momenta)):
        if not flagged[:, l].all():  # else all replicas go back to the anchor
            dbar = sum(w[i, l] * d[i][l].nan_to_num(0, 0, 0) for i in range(len(models)))
            dhat = dbar * edit.clip_factor(dbar.norm(), penalty.pseudo_grad_clip)
            b.mul_(penalty.outer_momentum).add_(dhat)
            a.sub_(penalty.outer_lr * (dhat + penalty.outer_momentum * b))
        for model in models:
            vector_to_parameters(a.clone(), model.layers[l].parameters())


def make_optimizer(model):
    split = lambda dim: [parameter for parameter in model.parameters() if parameter.dim() == dim]
    groups = {"params": split(2), "weight_decay": 0.1}, {"params": split(1), "weight_decay": 0.0}
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, peak=3e-3, warmup=50) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return peak * (step + 1) / warmup if step < warmup else peak * (0.1 + 0.9 * cosine)


if __name__ == "__main__":
    train()
