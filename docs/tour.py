# %% [markdown]
# # From averaged gradients to EDiT
#
# Four replicas of a small model train in one process. They learn to write Python: first with
# averaged gradients, then by local SGD, DiLoCo and EDiT. At the end one of them falls sick.
#
# Run it cell by cell (in tour.ipynb, or in an editor that knows `# %%`) or as a whole, from the
# project's folder: `python docs/tour.py`. It takes about a minute and draws the losses into out/tour.png.

# %% The numbers of this tour
# Everything below depends on these. Change them later and run all cells again. (There must be more
# rounds than SICK_ROUND, and ten before it: EDiT flags nobody before it has seen ten norms.)
M = 4  # replicas
STEPS = 160  # of each replica
WARMUP = 16  # first steps, in which all methods average gradients
TAU = 8  # steps of a round
SICK_ROUND = 13  # in which replica 3 trains with 100 times its learning rate
LAYERS, CHANNELS, CONTEXT = 2, 64, 32  # of the model
PICTURE = "out/tour.png"

# %% How a method trains
# The folder plain/ has every method in one process. A run takes the flags of train.py. Replicas
# begin equal, because they have the same seed, and each one has its own AdamW optimizer and its own
# part of the text. losses[name] collects the validation loss: all curves of the plot at the end.
import inspect
import sys
from pathlib import Path

sys.path[:0] = [".", ".."]  # the project's folder, from itself or from docs/

import data
from plain.__main__ import read_config
from plain.diloco import DiLoCo
from plain.edit import EDiT
from plain.local import PostLocalSGD
from plain.text import text_training

corpus = data.standard_library()
losses = {}


def train(name, method, flags=""):
    """A run. Returns the rows of its record."""
    common = f"--max_steps {STEPS} --lr_warmup_steps {WARMUP} --eval_interval {TAU}"
    shape = f"--n_layer {LAYERS} --n_embd {CHANNELS} --block_size {CONTEXT} --eval_batches 4"
    if method != "minibatch":
        flags += f" --tau {TAU} --sync_warmup_steps {WARMUP}"
    words = f"--method {method} --replicas {M} --device cpu {common} {shape} {flags}".split()
    training = text_training(read_config(words), M, 1, corpus)
    training.run()
    curve = [(row["step"], row["val_loss"]) for row in training.rows["eval"]]
    losses[name] = curve
    rounds = len(training.rows["sync"])
    exchanges = rounds + WARMUP if rounds else STEPS
    print(f"{name:20} loss {curve[-1][1]:.3f} after {exchanges} exchanges")
    return training.rows


print(f"{len(corpus):,} bytes of text")

# %% Averaged gradients
# In each step the replicas average their gradients, so that they stay equal. Expect the lowest loss
# of this tour, about 2.3 (untrained: 5.5), at the highest price: an exchange in each step.
train("averaged gradients", "minibatch")

# %% Local SGD
# Now each replica trains alone for TAU steps, a round. Then they average their *parameters*. That
# is one exchange per round, 18 here, and 16 in the warm-up, which other runs keep shorter. Here is
# all that happens at the end of a round; x is all parameters of a replica as one vector. Expect a
# higher loss: where the replicas walk in different directions, the mean of their ends is not far
# from the beginning (docs/pseudo_gradient.svg). In longer runs the losses come nearer to each other.
print(inspect.getsource(PostLocalSGD.sync))
train("local SGD", "post_local_sgd")

# %% DiLoCo
# The anchor a is the model after the last exchange. Anchor minus parameters is a pseudo-gradient d:
# the outer optimizer takes the mean of all four as the gradient of the anchor. Where the mean
# points in the same direction from round to round, the outer momentum b makes the steps longer.
# Expect about the loss of local SGD: in so few rounds the momentum gains little. (More of
# it goes too far in so short a run: try train("DiLoCo, 0.8", "diloco", "--outer_momentum 0.8").)
print(inspect.getsource(DiLoCo.sync))
print(inspect.getsource(DiLoCo.nesterov))
train("DiLoCo", "diloco")

# %% EDiT's penalty
# EDiT does the same layer by layer, and looks at the norm of each replica's pseudo-gradient first:
# an unusually large one is flagged and does not count, and of the others a larger one weighs less.
# The rest is in plain/edit.py: read it now. Look at the weights: four healthy replicas have nearly
# equal norms, so each weighs a quarter. Expect DiLoCo's loss.
print(inspect.getsource(EDiT.sync))


def show(row):
    """A round."""
    norms = " ".join(f"{norm:.1f}" for norm in row["pseudo_grad_norm"])
    weights = " ".join(f"{w:.2f}" for w in row["weight"])
    flagged = " ".join(str(count) for count in row["dropped"])
    print(f"round {row['round']:2}  norms {norms}  weights {weights}  flagged layers {flagged}")


rows = train("EDiT", "edit")
for number in 1, SICK_ROUND, len(rows["sync"]):
    show(rows["sync"][number - 1])

# %% A sick round
# In round 13 replica 3 trains with 100 times its learning rate. DiLoCo averages what it gets: its
# loss jumps. For EDiT the norm is far above the limit, so it flags all layers of this replica and
# goes on with the other three. Look at the norms, the weights and the flagged layers of round 13.
first = WARMUP + (SICK_ROUND - 1) * TAU + 1
sick = f"--scale_lr {M - 1}:{first}:{first + TAU - 1}:100"
for name, method in {"DiLoCo, sick": "diloco", "EDiT, sick": "edit"}.items():
    rows = train(name, method, sick)
    show(rows["sync"][SICK_ROUND - 1])

# %% All losses
# The final losses, and the curves as a picture. The dashed ones had the sick round: DiLoCo's jumps
# there and has not come back at the end; EDiT's lies on the curve without it.
for name, curve in losses.items():
    print(f"{name:20} {curve[-1][1]:.3f}")
try:
    from matplotlib.figure import Figure
except ImportError:
    print("no picture: pip install matplotlib")
else:
    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="steps", ylabel="validation loss")
    for name, curve in losses.items():
        axes.plot(*zip(*curve), "--" if "sick" in name else "-", label=name)
    axes.legend()
    Path(PICTURE).parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)
    print(f"{PICTURE}: all losses")
