# %% [markdown]
# # From mini-batch training to EDiT
#
# Four replicas of a small model take turns in one process. They learn to write Python: first by
# mini-batch training, then by local SGD, DiLoCo and EDiT. At the end one of them falls sick.
#
# Run it cell by cell (an editor that knows `# %%`; `jupytext --to ipynb` makes a notebook of it) or
# as a whole, from the project's folder: `python docs/tour.py`. It takes 1 to 3 minutes on one
# core and writes the losses to out/tour.svg.

# %% The numbers of this tour
# Everything below depends on these. Change them later and run all cells again.
M = 4  # replicas
STEPS = 160  # of each replica
WARMUP = 16  # first steps, in which all methods average gradients
TAU = 8  # steps of a round
OUTER_MOMENTUM = 0.5  # 0.8 or 0.9 in longer runs
SICK_ROUND = 13  # in which replica 3 trains with 100 times its learning rate
LAYERS, CHANNELS, CONTEXT = 2, 64, 64  # of the model
PICTURE = "out/tour.svg"

# %% Four replicas of one model
# Each replica has a copy of the model, an AdamW optimizer and its own part of the data. All copies
# begin equal, because they have the same seed.
import copy
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [".", ".."]  # the project's folder, from itself or from docs/

import torch

import data
import one_page
from model import Llama, ModelConfig

torch.set_num_threads(1)
SHAPE = ModelConfig(n_layer=LAYERS, n_head=4, n_embd=CHANNELS, block_size=CONTEXT)
corpus = data.standard_library()
batches = [data.Batches(corpus, CONTEXT, 8, rank=i, world_size=M) for i in range(M)]
models = [Llama(SHAPE, seed=1) for _ in range(M)]
optimizers = [one_page.make_optimizer(model) for model in models]
size = sum(p.numel() for p in models[0].parameters())
print(f"{size:,} parameters, {len(corpus.tokens):,} bytes of text")

# %% What a replica does alone
# The inner step: a gradient from its own batch, clipped, then AdamW. Nothing here knows of other
# replicas. losses[method] collects the validation loss: all curves of the plot at the end.
losses = {}


def replicas():
    """As one_page.py knows them: a model, and each layer's norms that were not flagged."""
    return [SimpleNamespace(model=m, accepted=[[] for _ in m.layers]) for m in models]


def compute_gradient(i, step):
    models[i].zero_grad()
    models[i](*batches[i].train(step)).backward()


def inner_step(i, step, factor=1):
    torch.nn.utils.clip_grad_norm_(models[i].parameters(), 1.0)
    for group in optimizers[i].param_groups:
        group["lr"] = factor * one_page.learning_rate(step, STEPS, lr_warmup=WARMUP)
    optimizers[i].step()


@torch.no_grad()
def validate(method, steps):
    found = [models[0](inputs, targets).item() for inputs, targets, _ in batches[0].validation(2)]
    losses.setdefault(method, []).append((steps, sum(found) / len(found)))


# %% Mini-batch training
# In each step the replicas average their gradients, so that they stay equal. Expect the lowest loss
# of this tour, 2.2 to 2.3 (untrained: 5.5), at the highest price: an exchange in each step.
for step in range(STEPS):
    for i in range(M):
        compute_gradient(i, step)
    one_page.average_gradients(replicas())  # the exchange
    for i in range(M):
        inner_step(i, step)
    if step + 1 == WARMUP:
        warm = copy.deepcopy((models, optimizers))  # here the other methods begin
    if (step + 1) % TAU == 0:
        validate("mini-batch", step + 1)
print(f"mini-batch   {losses['mini-batch'][-1][1]:.3f} after {STEPS} exchanges")


# %% Local SGD
# Now each replica trains alone for TAU steps, a round. Then they average their *parameters*. That
# is one exchange per round, an eighth of the traffic. Expect a loss about a tenth higher: where the
# replicas walk in different directions, the mean of their ends is not far from the beginning
# (docs/pseudo_gradient.svg). In longer runs the distance shrinks.
def train_alone(first, sick=False):
    for i in range(M):
        factor = 100 if sick and i == M - 1 else 1
        for step in range(first, first + TAU):
            compute_gradient(i, step)
            inner_step(i, step, factor)


models, optimizers = copy.deepcopy(warm)
rounds = range(WARMUP, STEPS, TAU)
for first in rounds:
    train_alone(first)
    with torch.no_grad():
        for same in zip(*(model.parameters() for model in models)):  # one of each replica
            mean = sum(same) / M
            for p in same:
                p.copy_(mean)
    validate("local SGD", first + TAU)
print(f"local SGD    {losses['local SGD'][-1][1]:.3f} after {WARMUP + len(rounds)} exchanges")

# %% DiLoCo
# The anchor is the model after the last exchange. Anchor minus parameters is a pseudo-gradient: the
# outer optimizer takes the mean of all four as the gradient of the anchor. Where the mean points in
# the same direction from round to round, the outer momentum makes the steps longer. Expect about
# the loss of local SGD: in so few rounds the momentum gains little. OUTER_MOMENTUM = 0.8 goes too
# far in so short a run: try it.
models, optimizers = copy.deepcopy(warm)
anchor = [p.detach().clone() for p in models[0].parameters()]
outer = torch.optim.SGD(anchor, lr=0.7, momentum=OUTER_MOMENTUM, nesterov=True)
for first in rounds:
    train_alone(first)
    with torch.no_grad():
        for a, *same in zip(anchor, *(model.parameters() for model in models)):
            a.grad = a - sum(same) / M  # the mean pseudo-gradient
        outer.step()
        for model in models:
            for a, p in zip(anchor, model.parameters()):
                p.copy_(a)
    validate("DiLoCo", first + TAU)
print(f"DiLoCo       {losses['DiLoCo'][-1][1]:.3f} after {WARMUP + len(rounds)} exchanges")


# %% EDiT's penalty
# EDiT does the same layer by layer, and looks at the norm of each replica's pseudo-gradient first:
# an unusually large one is flagged and does not count, and of the others a larger one weighs less.
# one_page.synchronize() is EDiT's end of a round: read it now. Look at the weights: four healthy
# replicas have nearly equal norms, so each weighs a quarter. Expect DiLoCo's loss.
def train_rounds(method, penalty, sick_round=0):
    global models, optimizers
    models, optimizers = copy.deepcopy(warm)
    anchors = [one_page.as_vector(layer) for layer in models[0].layers]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=OUTER_MOMENTUM, nesterov=True)
    synchronized = replicas()
    for number, first in enumerate(rounds, start=1):
        train_alone(first, sick=number == sick_round)
        judged = one_page.synchronize(synchronized, anchors, outer, penalty)
        validate(method, first + TAU)
        if number in (1, SICK_ROUND, len(rounds)):
            one_page.show(number, *judged, losses[method][-1][1])


train_rounds("EDiT", penalty=True)

# %% A sick round
# In round 13 replica 3 trains with 100 times its learning rate. DiLoCo averages what it gets: its
# loss jumps. For EDiT the norm is far above the limit, so it flags all layers of this replica and
# goes on with the other three. Look at the norms, the weights and the flagged layers of round 13.
train_rounds("DiLoCo, sick", penalty=False, sick_round=SICK_ROUND)
train_rounds("EDiT, sick", penalty=True, sick_round=SICK_ROUND)

# %% All losses
# The final losses, and the curves as a picture. The dashed ones had the sick round: DiLoCo's jumps
# there and has not come back at the end; EDiT's lies on the curve without it.
for method, curve in losses.items():
    print(f"{method:12s} {curve[-1][1]:.3f}")
try:
    from matplotlib.figure import Figure
except ImportError:
    print("no picture: pip install matplotlib")
else:
    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="steps", ylabel="validation loss")
    for method, curve in losses.items():
        axes.plot(*zip(*curve), "--" if "sick" in method else "-", label=method)
    axes.legend()
    Path(PICTURE).parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)
    print(f"{PICTURE}: all losses")
