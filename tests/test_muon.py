"""Muon: beside torch's, on any shards, refused where a method needs AdamW's variance."""

import pytest
import torch

import optimizer
from mesh import Mesh
from model import ModelConfig
from ranks import CPU, run_training
from train import make_model

SHAPE = ModelConfig(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=97)
TORCHS = (3.4445, -4.7750, 2.0315)  # coefficients
LR = 0.01
MUON_LR = 0.05
DECAY = 0.1
BETAS = (0.9, 0.95)


def take_steps(count, dtype=torch.float32):
    """(model, [gradient of each step], the master before): on one rank."""
    torch.manual_seed(0)
    model = make_model(SHAPE, Mesh(1, CPU), dtype)
    muon = optimizer.Muon(model, DECAY, BETAS, MUON_LR / LR)
    muon.lr = LR
    before = model.master.clone()
    gradients = []
    for _ in range(count):
        model.grad.normal_()
        gradients.append(model.grad.clone())
        muon.step()
    return model, gradients, before


def parameters(model, vector):
    """(layer, name) -> tensor, in a vector laid out like model.master."""
    found = {}
    for l, view in enumerate(model.views(vector)):
        for name, tensor in model.layouts[l].cut(view).items():
            found[l, name] = tensor
    return found


def takes_muon(model, l, tensor):
    """The matrices of blocks, which are between the embedding and the head."""
    return 0 < l < len(model.layers) - 1 and tensor.dim() == 2


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)], ids=str)
def test_orthogonalized_matrix_has_the_singular_vectors_and_singular_values_near_1(shape):
    torch.manual_seed(0)
    U, _, V = torch.linalg.svd(torch.randn(shape).double(), full_matrices=False)
    values = torch.logspace(0, -2, 8).double()
    found = optimizer.orthogonalize(1e-6 * (U * values) @ V)
    along = (U.T @ found @ V.T).diagonal()
    torch.testing.assert_close((U * along) @ V, found)
    assert along.min() > 0.85
    assert along.max() < 1.15


def test_orthogonalized_zeros_are_zeros():
    assert (optimizer.orthogonalize(torch.zeros(4, 6)) == 0).all()


def test_step_equals_torchs_muon_within_the_rounding_of_bf16(monkeypatch):
    """torch's computes in bf16, 8 bits, and has one learning rate for all shapes."""
    monkeypatch.setattr(optimizer, "COEFFICIENTS", [TORCHS] * 5)
    model, gradients, before = take_steps(3)
    gradients = [parameters(model, gradient) for gradient in gradients]
    start = parameters(model, before)
    compared = 0
    for (l, name), ours in parameters(model, model.master).items():
        if not takes_muon(model, l, ours):
            continue
        ratio = ours.shape[0] / ours.shape[1]
        lr = MUON_LR * ratio**0.5 / max(1, ratio) ** 0.5
        theirs = torch.nn.Parameter(start[l, name].clone())
        decay = DECAY * LR / lr
        torchs = torch.optim.Muon([theirs], lr=lr, weight_decay=decay, momentum=0.9, nesterov=False)
        for gradient in gradients:
            theirs.grad = gradient[l, name].clone()
            torchs.step()
        moved = theirs.detach() - start[l, name]
        assert (ours - theirs.detach()).norm() < 0.02 * moved.norm(), (l, name)
        compared += 1
    assert compared == 3 * 4


def test_step_in_bf16_is_that_in_fp32_within_its_rounding():
    """Layers in bf16 have gather buffers on one rank, too; no collective copies between them."""
    found = []
    for dtype in torch.float32, torch.bfloat16:
        model, _, before = take_steps(2, dtype)
        moved = parameters(model, model.master - before)
        found.append(moved)
    for (l, name), exact in found[0].items():
        if takes_muon(model, l, exact):
            assert (found[1][l, name] - exact).norm() < 0.05 * exact.norm(), (l, name)


def test_weights_decay_with_the_learning_rate_of_adamw():
    model = make_model(SHAPE, Mesh(1, CPU))
    muon = optimizer.Muon(model, DECAY, BETAS, MUON_LR / LR)
    muon.lr = LR
    before = parameters(model, model.master.clone())
    muon.step()  # the gradient is 0
    for (l, name), ours in parameters(model, model.master).items():
        if takes_muon(model, l, ours):
            torch.testing.assert_close(ours, before[l, name] * (1 - LR * DECAY))


def test_steps_are_counted_on_a_rank_without_matrices():
    """Its gains have AdamW's bias correction, too."""
    model = make_model(SHAPE, Mesh(1, CPU))
    adamw = optimizer.AdamW(model, DECAY, BETAS)
    adamw.lr = LR
    adamw.matrices = []
    theirs = [torch.nn.Parameter(gains[0].clone()) for gains in adamw.gains]
    torchs = torch.optim.AdamW(theirs, LR, BETAS, weight_decay=0.0)
    for _ in range(3):
        model.grad.normal_()
        for parameter, gains in zip(theirs, adamw.gains):
            parameter.grad = gains[1].clone()
        adamw.step()
        torchs.step()
    assert theirs
    for parameter, gains in zip(theirs, adamw.gains):
        torch.testing.assert_close(gains[0], parameter.detach())


def count_matrices(method, model, mesh):
    """How many matrices this rank orthogonalizes."""
    calls = []
    orthogonalize = optimizer.orthogonalize
    optimizer.orthogonalize = lambda M: calls.append(M) or orthogonalize(M)

    def end():
        optimizer.orthogonalize = orthogonalize
        return len(calls)

    return end


def test_embedding_head_and_gains_take_adamws_step():
    model, (gradient,), before = take_steps(1)
    start = parameters(model, before)
    gradient = parameters(model, gradient)
    for (l, name), ours in parameters(model, model.master).items():
        if takes_muon(model, l, ours):
            continue
        theirs = torch.nn.Parameter(start[l, name].clone())
        theirs.grad = gradient[l, name].clone()
        decay = DECAY if ours.dim() == 2 else 0.0
        torch.optim.AdamW([theirs], LR, BETAS, weight_decay=decay).step()
        torch.testing.assert_close(ours, theirs.detach())
    gains = 3 * 2 * 16
    embedding = model.layouts[0].padded
    head = model.layouts[-1].padded
    assert len(model.exp_avg_sq) == gains + embedding + head


@pytest.mark.parametrize("dtype, rtol", [
    ("fp64", 1e-12), pytest.param("bf16", 1e-2, marks=pytest.mark.slow)
])  # fmt: skip
def test_shards_change_only_the_order_of_sums(dtype, rtol, corpus_folder):
    """Three blocks on four shards: one rank has none to orthogonalize."""
    options = dict(method="minibatch", optimizer="muon", n_layer=3, max_steps=4, batch_size=4)
    losses = {}
    for shards in (1, 2, 4):
        run = run_training(4, corpus_folder, count_matrices, shards=shards, dtype=dtype, **options)
        losses[shards] = run.losses
    worked = [rank["watched"] > 0 for rank in run.ranks]
    assert worked == [True, True, True, False]  # of 4 shards
    assert losses[2] == pytest.approx(losses[1], rel=rtol)
    assert losses[4] == pytest.approx(losses[1], rel=rtol)
