"""Muon: beside torch's, on any shards, refused where a method needs AdamW's variance."""

import pytest
import torch

import muon
from mesh import Mesh
from model import ModelConfig
from ranks import CPU, run_training
from shard import ShardedModel

SHAPE = ModelConfig(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=97)
TORCHS = (3.4445, -4.7750, 2.0315)  # coefficients
RATES = dict(lr=0.01, muon_lr=0.05, decay=0.1)


def one_step(dtype, steps=1):
    """(model, [gradient of each step], the master before): on one rank."""
    torch.manual_seed(0)
    model = ShardedModel(SHAPE, Mesh(1, CPU), dtype)
    ratio = RATES["muon_lr"] / RATES["lr"]
    optimizer = muon.Muon(model, RATES["decay"], (0.9, 0.95), ratio)
    optimizer.lr, before, grads = RATES["lr"], model.master.clone(), []
    for _ in range(steps):
        model.grad.normal_()
        grads.append(model.grad.clone())
        optimizer.step()
    return model, grads, before


def matrices(model, vector):
    """(layer, name) -> matrix of a block in a vector laid out like model.master."""
    found = {}
    for l, view in list(enumerate(model.views(vector)))[1:-1]:
        named = model.layouts[l].cut(view).items()
        found |= {(l, name): matrix for name, matrix in named if matrix.dim() == 2}
    return found


def test_orthogonalized_matrix_has_the_singular_vectors_and_singular_values_near_1():
    torch.manual_seed(0)
    for shape in (8, 8), (24, 8), (8, 24):
        U, _, V = torch.linalg.svd(torch.randn(shape).double(), full_matrices=False)
        values = torch.logspace(0, -2, 8).double()
        found = muon.orthogonalize(1e-6 * (U * values) @ V)
        along = (U.T @ found @ V.T).diagonal()
        torch.testing.assert_close((U * along) @ V, found)
        assert along.min() > 0.85 and along.max() < 1.15
    assert (muon.orthogonalize(torch.zeros(4, 6)) == 0).all()


def test_step_equals_torchs_muon_within_the_rounding_of_bf16(monkeypatch):
    """torch's computes in bf16, 8 bits, and has one learning rate for all shapes."""
    monkeypatch.setattr(muon, "COEFFICIENTS", [TORCHS] * 5)
    model, grads, before = one_step(torch.float32, steps=3)
    found, start = matrices(model, model.master), matrices(model, before)
    for key, matrix in found.items():
        theirs, (out, columns) = torch.nn.Parameter(start[key].clone()), matrix.shape
        lr = RATES["muon_lr"] * (out / columns) ** 0.5 / max(1, out / columns) ** 0.5
        decay = RATES["decay"] * RATES["lr"] / lr
        torchs = torch.optim.Muon([theirs], lr=lr, weight_decay=decay, momentum=0.9, nesterov=False)
        for grad in grads:
            theirs.grad = matrices(model, grad)[key].clone()
            torchs.step()
        moved = theirs.detach() - start[key]
        assert (matrix - theirs.detach()).norm() < 0.02 * moved.norm(), key


def test_embedding_head_and_gains_take_adamws_step():
    model, grads, before = one_step(torch.float32)
    blocks = {l for l, _ in matrices(model, before)}
    for l, (x, x0, g) in enumerate(zip(*map(model.views, (model.master, before, grads[0])))):
        named = zip(*(model.layouts[l].cut(vector).items() for vector in (x, x0, g)))
        for (_, ours), (_, theirs), (_, gradient) in named:
            if l in blocks and ours.dim() == 2:
                continue
            theirs = torch.nn.Parameter(theirs.clone())
            theirs.grad = gradient.clone()
            decay = RATES["decay"] if ours.dim() == 2 else 0.0
            torch.optim.AdamW([theirs], RATES["lr"], (0.9, 0.95), weight_decay=decay).step()
            torch.testing.assert_close(ours, theirs.detach())
    gains = 3 * 2 * 16
    assert len(model.exp_avg_sq) == gains + model.layouts[0].padded + model.layouts[-1].padded


@pytest.mark.parametrize("more", [{}, dict(dtype="bf16")])
def test_shards_change_only_the_order_of_sums(more, corpus_folder):
    """Three blocks on four shards: one rank has none to orthogonalize."""
    options = dict(method="minibatch", optimizer="muon", n_layer=3, max_steps=4, batch_size=4) | more
    losses = []
    for shards in (1, 2, 4):
        run = run_training(4, corpus_folder, shards=shards, **options)
        losses.append(run.losses)
    close = 1e-2 if more else 1e-12
    assert losses[1] == pytest.approx(losses[0], rel=close)
    assert losses[2] == pytest.approx(losses[0], rel=close)
