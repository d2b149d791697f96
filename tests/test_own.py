"""Layers and loops of one's own: any list of layers has autograd's gradients, what cannot work is
refused in one line, nothing trains on stale layers, and docs/own.py runs."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf
import model
import sample
import train
from config import UserError, parse
from docs import own
from hf import open_model, whole_model
from mesh import Mesh
from model import Llama, ModelConfig, initialize
from optimizer import AdamW, Muon
from ranks import CPU, OUR_METHODS, ROOT, method_alone, run_ranks
from shard import ShardedModel

FP64 = torch.float64
SEED = 7


class Head(nn.Linear):
    def forward(self, x, targets):
        return F.cross_entropy(super().forward(x), targets)


class Residual(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.up = nn.Linear(n, 3 * n)
        self.down = nn.Linear(3 * n, n, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Table(nn.Module):
    """An embedding whose gradient needs its weights: rows are normalized and projected."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(11, 6))
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        rows = F.normalize(self.rows, dim=1)
        return self.out(rows[(x[:, 0] * 3).long() % 11])


def deep_first():
    first = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))
    return [first, Residual(5), Residual(5), Head(5, 4)]


def table_first():
    return [Table(), Residual(5), Head(5, 4)]


def two_layers():
    return [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5)), Head(5, 4)]


def one_layer():
    return [Head(3, 4)]


LISTS = {make.__name__: make for make in (deep_first, table_first, two_layers, one_layer)}
MESHES = {"1x1": (1, 1), "1x4": (4, 4), "2x2": (4, 2)}  # ranks, shards
CASES = [(name, dtype) for name in LISTS for dtype in (FP64, torch.float32)]


def make_layers(name) -> list:
    torch.manual_seed(SEED)
    return LISTS[name]()


def batch(rank, micro):
    generator = torch.Generator().manual_seed(100 + 10 * rank + micro)
    x = torch.randn(6, 3, generator=generator, dtype=FP64)
    return x, torch.randint(4, (6,), generator=generator)


def compute_loss(layers, x, y):
    for layer in layers[:-1]:
        x = layer(x)
    return layers[-1](x, y)


def autograd_gradient(layers, world_size) -> dict:
    """The gradient of the mean loss of all ranks and both micro-steps, by name."""
    model = nn.ModuleList(layers).double()
    for rank in range(world_size):
        for micro in range(2):
            (compute_loss(model, *batch(rank, micro)) / (2 * world_size)).backward()
    return {f"layers.{name}": p.grad.float() for name, p in model.named_parameters()}


def sharded_gradient(mesh, layers, dtype=FP64, initialize=None) -> dict:
    """The same with ShardedModel, gathered on rank 0; its model."""
    model = ShardedModel(layers, mesh, dtype, initialize)
    for micro in range(2):
        x, y = batch(mesh.rank, micro)
        model.forward(x.to(dtype), y)
        model.backward(1 / (2 * mesh.world_size), first=micro == 0, sum_replicas=micro == 1)
    model.master.copy_(model.grad)  # whole_model() then returns the gathered gradient
    return whole_model(model)


def all_gradients(shards):
    mesh = Mesh(shards, CPU)
    return [sharded_gradient(mesh, make_layers(name), dtype) for name, dtype in CASES]


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_of_any_list_of_layers_equal_autograds(mesh):
    """Also if the first layer has two matrices, or is a table that needs its weights."""
    world_size, shards = MESHES[mesh]
    found = run_ranks(world_size, all_gradients, shards)[0]
    for (name, dtype), gradient in zip(CASES, found):
        expected = autograd_gradient(make_layers(name), world_size)
        assert gradient.keys() == expected.keys()
        tolerance = dict(rtol=1e-6, atol=1e-9) if dtype == FP64 else dict(rtol=1e-4, atol=1e-6)
        for key, value in gradient.items():
            assert value.norm() > 0
            torch.testing.assert_close(value, expected[key], msg=f"{name} {key}", **tolerance)


def count_gathers(needs_weights):
    layers = make_layers("deep_first")
    layers[0].backward_needs_weights = needs_weights
    mesh = Mesh(2, CPU)
    model = ShardedModel(layers, mesh, FP64)
    for micro in range(2):
        model.forward(*batch(mesh.rank, micro))
        model.backward(0.5)
    return mesh.calls["shard all-gather"]


@pytest.mark.parametrize("needs_weights, gathers", [(True, 2 * 4 - 2), (False, 2 * 4 - 3)])
def test_layer_0_is_gathered_in_the_backward_unless_it_says_that_it_needs_no_weights(
    needs_weights, gathers
):
    assert run_ranks(2, count_gathers, needs_weights) == 2 * [2 * gathers]  # two micro-steps


# ---- the start ----


def set_to_number(layer, l):
    for parameter in layer.parameters():
        assert not parameter.any()  # zeros before
        nn.init.constant_(parameter, l + 1)


def test_function_initializes_layers_on_meta_and_without_one_they_keep_their_values():
    with torch.device("meta"):
        layers = deep_first()
    model = ShardedModel(layers, Mesh(1, CPU), FP64, set_to_number)
    for l, (layout, master) in enumerate(zip(model.layouts, model.masters)):
        assert (master[: layout.used] == l + 1).all() and not master[layout.used :].any()

    expected = nn.ModuleList(make_layers("deep_first")).state_dict()
    found = whole_model(ShardedModel(make_layers("deep_first"), Mesh(1, CPU)))
    assert found.keys() == {f"layers.{name}" for name in expected}
    for name, value in expected.items():
        assert torch.equal(found[f"layers.{name}"], value)


def shared():
    first = nn.Linear(3, 3)
    last = Head(3, 3)
    last.weight = first.weight
    return [first, last]


REFUSED = {
    "layer 1 has no parameters": lambda: [nn.Linear(3, 3), nn.Tanh(), Head(3, 4)],
    "layer 1 shares weight with layer 0": shared,
    "layer 0 has .*running_mean": lambda: [
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=True)), Head(3, 4)
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_list_that_cannot_be_sharded_is_refused_in_one_line(message):
    with pytest.raises(UserError, match=message):
        ShardedModel(REFUSED[message](), Mesh(1, CPU))


def start_from_own_seed():
    mesh = Mesh(2, CPU)
    torch.manual_seed(mesh.rank)
    with pytest.raises(UserError, match="replica 1 starts from other parameters than replica 0"):
        ShardedModel(deep_first(), mesh)


def test_replicas_that_start_from_different_seeds_are_refused_on_all_ranks():
    run_ranks(4, start_from_own_seed)


class Gpt2Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.out = nn.Linear(n, n)
        self.mlp = nn.Sequential(nn.RMSNorm(n), nn.Linear(n, 2 * n), nn.Conv1d(n, n, 3))


def test_biases_start_at_0_gains_at_1_and_every_matrix_at_random():
    block = Gpt2Block(32)
    initialize(block, ModelConfig(n_layer=8), 1, seed=0)
    for name, parameter in block.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / 4 if name == "out.weight" else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name


def test_vector_that_is_neither_gain_nor_bias_must_say_how_it_starts():
    block = nn.Linear(3, 3)
    block.scale = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="scale of layer 1"):
        initialize(block, ModelConfig(), 1, seed=0)


def test_muon_refuses_inner_layers_of_different_shapes():
    for layers in ([nn.Linear(3, 5), Residual(5), nn.Linear(5, 5), Head(5, 4)], two_layers()):
        model = ShardedModel(layers, Mesh(1, CPU))
        with pytest.raises(UserError, match="muon: .*same matrices"):
            Muon(model, 0.0, (0.9, 0.95), 1.0)
    torch.manual_seed(SEED)
    model = ShardedModel(deep_first(), Mesh(1, CPU))
    Muon(model, 0.0, (0.9, 0.95), 1.0).step()


def test_dropout_of_ones_own_is_off_in_evaluations_and_on_in_training():
    layers = [nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), Head(64, 4)]
    model = ShardedModel(layers, Mesh(1, CPU))
    batch = torch.ones(2, 8), torch.tensor([0, 1])
    losses = [model.forward(*batch, train=train).item() for train in (True, False, False, True)]
    assert losses[1] == losses[2]
    assert len(set(losses)) == 3


# ---- no stale layers ----


def change_by_step(model, optimizer):
    model.grad.fill_(1.0)
    optimizer.step()


def change_by_data(model, optimizer):
    model.master.data.add_(0.1)  # moves no version counter


def change_by_numpy(model, optimizer):
    model.master.numpy()[:] += 0.1


def change_in_inference_mode(model, optimizer):
    with torch.inference_mode():
        model.masters[1].mul_(1.5)


def change_by_collective(model, optimizer):
    model.mesh.all_reduce(model.master, model.mesh.shard_group).wait()


def change_by_swap(model, optimizer):
    model.swap(torch.full_like(model.master, 0.1))


CHANGES = [
    change_by_step,
    change_by_data,
    change_by_numpy,
    change_in_inference_mode,
    change_by_collective,
    change_by_swap,
]


def losses_after_changes():
    """[(the loss that a model with the changed parameters has, the loss found)] of each change,
    after a step, and after an evaluation."""
    mesh = Mesh(2, CPU)
    found = []
    for change in CHANGES:
        for train_before in (True, False):
            model = ShardedModel(make_layers("two_layers"), mesh)
            optimizer = AdamW(model, 0.0, (0.9, 0.95))
            optimizer.lr = 0.1
            x, y = batch(0, 0)
            before = model.forward(x.float(), y, train=train_before)
            if train_before:
                model.backward(1.0)
            change(model, optimizer)
            after = model.forward(x.float(), y, train=False)
            weights = whole_model(model)  # {} on rank 1
            if mesh.rank == 0:
                layers = make_layers("two_layers")
                nn.ModuleList(layers).load_state_dict(
                    {name.removeprefix("layers."): value for name, value in weights.items()}
                )
                expected = compute_loss(layers, x.float(), y).item()
                found.append((change.__name__, before.item(), expected, after.item()))
    return found


def test_forward_sees_every_change_of_the_parameters_however_it_is_made():
    """With two layers both are still gathered after a forward: a loop that forgot to say that they
    are out of date would train on them."""
    found = run_ranks(2, losses_after_changes)[0]
    assert len(found) == 2 * len(CHANGES)
    for name, before, expected, after in found:
        assert after == pytest.approx(expected, rel=1e-5), name
        assert abs(after - before) > 1e-4, name


def test_forward_without_a_backward_leaves_nothing_behind():
    model = ShardedModel(make_layers("deep_first"), Mesh(1, CPU), FP64)
    for micro in range(3):
        model.forward(*batch(0, micro))
    assert len(model.tape) == 4
    model.backward(1.0)
    again = ShardedModel(make_layers("deep_first"), Mesh(1, CPU), FP64)
    again.forward(*batch(0, 2))
    again.backward(1.0)
    assert torch.equal(model.grad, again.grad)
    model.forward(*batch(0, 0), train=False)
    assert model.tape == []  # an evaluation keeps no activations


# ---- the votes of a loop of one's own ----


@pytest.mark.parametrize("method", OUR_METHODS)
def test_every_method_votes_0_in_the_warm_up(method):
    made = method_alone(method=method, sync_warmup_steps=1)  # before its first round
    assert made.averages_gradients
    assert made.vote() == 0.0


# ---- a model.pt of another model ----


def saved_model(path, shape, **changes):
    saved = {"model": Llama(shape, seed=0).state_dict(), "model_config": vars(shape)}
    saved |= {"tokenizer": "byte", "config": {}}
    for key, change in changes.items():
        saved[key] = saved[key] | change
    torch.save(saved, path)
    return str(path)


SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=8, block_size=16, vocab_size=257)
ANOTHER = {
    "Unexpected key.*layers.0.positions": {"model": {"layers.0.positions": torch.zeros(16, 8)}},
    "size mismatch for layers.1.out.weight": {"model": {"layers.1.out.weight": torch.zeros(4, 4)}},
    "Missing key.*layers.3.attention_norm.weight": {"model_config": {"n_layer": 5}},
    "n_experts": {"model_config": {"n_experts": 2}},
}


@pytest.mark.parametrize("reason", ANOTHER)
def test_model_file_of_another_model_is_refused_in_one_line(reason, tmp_path, monkeypatch):
    """By sample.py, hf.py and train.py --init_from."""
    path = saved_model(tmp_path / "model.pt", SHAPE, **ANOTHER[reason])
    programs = {
        sample.main: ["--model", path],
        hf.main: ["--model", path, "--out", str(tmp_path / "new")],
    }
    message = rf"model.pt is not a model \(.*{reason}"
    for program, argv in programs.items():
        monkeypatch.setattr(sys, "argv", ["program.py", *argv])
        with pytest.raises(UserError, match=message) as error:
            program()
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=message):
        train.main(["--init_from", path, "--out_dir", str(tmp_path / "run")])
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


class WithPositions(model.Embedding):
    """GPT-2's: a vector for each position, as long as the context."""

    def __init__(self, config):
        super().__init__(config)
        self.positions = nn.Parameter(torch.empty(config.block_size, config.n_embd))

    def forward(self, tokens):
        return super().forward(tokens) + self.positions[: tokens.shape[1]]


def test_changed_model_py_samples_from_its_own_file_and_is_not_exported_as_llama(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(model, "Embedding", WithPositions)
    path = saved_model(tmp_path / "model.pt", SHAPE)
    llama, encoding = sample.load(path)
    assert sample.continue_text(llama, encoding, "a", count=3).startswith("a")
    with pytest.raises(UserError, match="another model than Llama: it has layers.0.positions"):
        hf.write_folder(open_model(path), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


# ---- docs/own.py ----

OWN = ["edit", "diloco", "one_bit_edit", "a_edit"]
SHORT = "--max_steps 120 --sync_warmup_steps 20 --lr_warmup_steps 20 --lr 0.01 --shards 2".split()


def run_own():
    """Of each method: the loss on new points, and this rank's parameters."""
    found = {}
    for method in OWN:
        rounds = ["--tau=8"]
        if method == "a_edit":  # how many steps a round has depends on the load of the machine
            rounds = "--tau_time_s=0.1 --outer_lr=1 --outer_momentum=0".split()
        options = [f"--method={method}", *rounds, *SHORT]
        config, _ = parse(options, train.METHODS)
        trained = own.train(config, Mesh(2, CPU))
        loss = trained.forward(*own.make_batch(seed=0, size=3000), train=False).item()
        found[method] = loss, trained.master
    return found


@pytest.mark.slow
def test_own_layers_and_own_loop_learn_with_every_kind_of_method():
    """A-EDiT's vote() is called in the warm-up, too. Replicas are equal in the end."""
    ranks = run_ranks(4, run_own)
    for method in OWN:
        losses, parameters = zip(*[rank[method] for rank in ranks])
        assert losses[0] < 0.8, (method, losses[0])  # 1.1 is guessing
        assert losses == 4 * losses[:1]
        for rank in range(4):
            assert torch.equal(parameters[rank], parameters[rank % 2])


@pytest.mark.slow
def test_own_py_runs_under_torchrun_and_alone():
    method = "edit"
    command = [sys.executable, "docs/own.py", "--method", method, "--max_steps", "60"]
    command += ["--sync_warmup_steps", "20", "--lr_warmup_steps", "10"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launched = [*launcher, "--nproc_per_node", "4", *command[1:], "--shards", "2"]
    for argv in command, launched:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        *rounds, last = done.stdout.splitlines()
        found = [line.split(":")[0] for line in rounds]
        assert found[:2] == ["round 1, step 36", "round 2, step 52"]  # EDiT's last one: in finish()
        assert float(re.match(rf"{method}: loss (\S+) on new points", last)[1]) < 1.0
    done = subprocess.run([*command, "--tau", "0"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("own.py: error: --tau") and done.stderr.count("\n") == 1
