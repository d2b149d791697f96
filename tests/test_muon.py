"""AdamW and Muon: beside torch's, on any shards."""

import math
from types import SimpleNamespace

import pytest
import torch

import optimizer
from mesh import Mesh
from model import ModelConfig
from ranks import CPU, run_training
from rows import each_row
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


@each_row("shape", [(8, 8), (24, 8), (8, 24)])
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


def test_step_equals_torchs_muon_within_the_rounding_of_bf16_but_for_a_smaller_step_of_down(
    monkeypatch,
):
    """torch's computes in bf16, 8 bits, and has one learning rate for all shapes. Its scale is
    sqrt(max(1, out / in)): deviation (4) in optimizer.py."""
    monkeypatch.setattr(optimizer, "COEFFICIENTS", [TORCHS] * 5)
    model, gradients, before = take_steps(3)
    gradients = [parameters(model, gradient) for gradient in gradients]
    start = parameters(model, before)
    names = []
    for (l, name), ours in parameters(model, model.master).items():
        if not takes_muon(model, l, ours):
            continue
        lr = MUON_LR
        if name == "down.weight":
            lr = MUON_LR * math.sqrt(SHAPE.n_embd / SHAPE.n_hidden)
        theirs = torch.nn.Parameter(start[l, name].clone())
        decay = DECAY * LR / lr
        torchs = torch.optim.Muon([theirs], lr=lr, weight_decay=decay, momentum=0.9, nesterov=False)
        for gradient in gradients:
            theirs.grad = gradient[l, name].clone()
            torchs.step()
        moved = theirs.detach() - start[l, name]
        assert (ours - theirs.detach()).norm() < 0.02 * moved.norm(), (l, name)
        names.append(name)
    assert names == ["qkv.weight", "out.weight", "gate_up.weight", "down.weight"] * 3


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


def test_20_steps_of_adamw_equal_torchs_of_what_decays_and_of_what_does_not():
    """Matrices decay, gains of norms do not. All are large, so that the decay shows."""
    torch.manual_seed(0)
    model = make_model(SHAPE, Mesh(1, CPU), torch.float64)
    model.master.normal_()
    adamw = optimizer.AdamW(model, 0.5, BETAS)
    start = parameters(model, model.master.clone())
    theirs = {key: torch.nn.Parameter(value) for key, value in start.items()}
    decayed = [parameter for parameter in theirs.values() if parameter.dim() == 2]
    others = [parameter for parameter in theirs.values() if parameter.dim() == 1]
    assert len(decayed) == 4 * 3 + 2 and len(others) == 2 * 3 + 1
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.5)
    for step in range(20):
        lr = 0.01 * (1 + step % 3)
        adamw.lr = lr
        for group in torchs.param_groups:
            group["lr"] = lr
        model.grad.normal_()
        for key, gradient in parameters(model, model.grad).items():
            theirs[key].grad = gradient.clone()
        adamw.step()
        torchs.step()
    for key, ours in parameters(model, model.master).items():
        torch.testing.assert_close(ours, theirs[key].detach(), rtol=1e-12, atol=1e-14)


def test_blocks_that_travel_and_blocks_that_arrive_share_no_memory_on_two_shards():
    """An all-to-all reads one and writes the other. gloo and shm copy first, NCCL does not."""
    mesh = Mesh(1, torch.device("meta"))
    mesh.shards = mesh.shard_group.size = 2
    for name in "all_gather", "all_to_all":
        setattr(mesh, name, lambda *args: SimpleNamespace(wait=lambda: None))
    muon = optimizer.Muon(make_model(SHAPE, mesh), DECAY, BETAS, MUON_LR / LR)
    storages = [x.untyped_storage()._cdata for x in (muon.pieces, muon.whole)]
    assert storages[0] != storages[1]


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


@pytest.mark.slow  # the default suite has a run of Muon on two shards in test_methods.py
@each_row("dtype, rtol", [("fp64", 1e-12), ("bf16", 1e-2)])
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
