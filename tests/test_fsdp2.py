"""examples/edit_fsdp2.py under torch's FSDP2 is edit.py: it has the losses and parameters of
train.py, in fp64. Whatever FSDP2 allows (prefetch, kept layers, compiled blocks, evaluations
between steps, checkpoints on another mesh) changes nothing, and each line that guards against a
silent error is needed."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import train
from config import parse
from methods import METHODS
from model import Llama, ModelConfig
from ranks import ROOT, Launch, Run, _train, run_config, run_ranks, script

sys.path.insert(0, str(ROOT / "examples"))
import edit_fsdp2

SOURCE = ROOT / "examples" / "edit_fsdp2.py"
M, N = 2, 2
# 8 steps of warm-up, 6 rounds of 4 steps, and a last one of 2
RUN = dict(shards=N, method="edit", n_layer=3, n_head=2, n_embd=16, block_size=16, lr=3e-3)
RUN |= dict(max_steps=34, sync_warmup_steps=8, tau=4, anomaly_warmup_rounds=2, lr_warmup_steps=10)
SHORT = RUN | dict(max_steps=22)
CLOSE = dict(rtol=0, atol=1e-12)
OFF = dict(anomaly_elimination=False, weighted_averaging=False, pseudo_grad_clipping=False)


def options_of(config) -> dict:
    """The keywords of EDiT(), from train.py's flags."""
    options = dict(OFF)  # DiLoCo
    for name in edit_fsdp2.Config.__dataclass_fields__:
        if hasattr(config, name):
            options[name] = getattr(config, name)
    return options | {"warmup_steps": config.sync_warmup_steps}


def test_defaults_are_those_of_the_large_presets():
    config = parse(["--model", "124m"], METHODS)[0]
    assert edit_fsdp2.Config(**options_of(config)) == edit_fsdp2.Config()


def test_a_round_without_steps_is_refused():
    with pytest.raises(ValueError, match="tau=0: a round has at least one step"):
        edit_fsdp2.EDiT(None, None, tau=0)


def make_model(config, vocab_size, mesh, variant):
    shape = ModelConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, vocab_size)
    model = variant.get("model", Llama)(shape, variant.get("seed", config.seed)).double()
    if variant.get("recompute"):
        for l in range(1, len(model.layers) - 1):
            model.layers[l] = checkpoint_wrapper(model.layers[l])
    layers = list(model.layers)
    keep = {"reshard_after_forward": not variant.get("hold", False)}
    if "compile" in variant:
        for layer in layers:
            layer.compile(backend=variant["compile"])
    for layer in layers[1:-1] if variant.get("root") else layers:
        fully_shard(layer, mesh=mesh["shard"], **keep)
    fully_shard(model, mesh=mesh["shard"], **keep)
    if variant.get("prefetch"):
        for layer, *ahead in zip(layers, layers[1:], layers[2:]):
            layer.set_modules_to_forward_prefetch(ahead)
    return model


def broken_module(*changes):
    """edit_fsdp2.py with other lines. changes: (line, another)."""
    source = SOURCE.read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    spec = importlib.util.spec_from_loader("broken_edit_fsdp2", loader=None)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(source, "broken_edit_fsdp2.py", "exec"), module.__dict__)
    return module


def run_fsdp2(corpus_folder, options, variant={}) -> dict:
    """A training under FSDP2, on every rank. variant: see VARIANTS."""
    config = run_config(**options)
    corpus = train.data.load(corpus_folder)
    ranks = dist.get_world_size()
    shape = (ranks // config.shards, config.shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    batches = train.data.Batches(
        corpus, config.block_size, config.batch_size, config.accum, dist.get_rank(), ranks,
        config.seed,
    )  # fmt: skip
    model = make_model(config, corpus.vocab_size, mesh, variant)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)
    module = edit_fsdp2
    if "broken" in variant:
        module = broken_module(*variant["broken"])
    edit = module.EDiT(model, mesh["replica"], **options_of(config))
    if "load" in variant:
        path = variant["load"]
        if edit.replica > 0:
            path = variant.get("other_node", path)
        module.load(path, model, optimizer, edit)
    losses, reports = [], []
    while edit.steps < config.max_steps:
        lr = train.learning_rate(edit.steps, config)
        if config.scale_lr and edit.steps >= config.sync_warmup_steps:
            replica, first, last, factor = map(float, config.scale_lr.split(":"))
            if edit.replica == replica and first <= edit.steps + 1 <= last:
                lr *= factor
        for group in optimizer.param_groups:
            group["lr"] = lr
        warm_up = edit.steps < config.sync_warmup_steps
        mean_loss = 0.0
        for micro_step in range(config.accum):
            loss = model(*batches.train(edit.steps, micro_step)) / config.accum
            loss.backward()
            mean_loss += loss.detach()
        variant.get("after_backward", leave)(model, edit)
        module.clip_gradient(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if variant.get("evaluate") == "before":
            evaluate(model, batches)
        edit.step()
        variant.get("after_step", leave)(model, edit)
        if variant.get("evaluate") == "after":
            evaluate(model, batches)
        if report := edit.take_report():
            reports.append(report)
        group = None if warm_up else mesh["shard"].get_group()
        dist.all_reduce(mean_loss, group=group)
        losses.append(mean_loss.item() / dist.get_world_size(group))
        if edit.steps == variant.get("save_at"):
            module.save(variant["path"], model, optimizer, edit)
            break
    edit.finish()
    reports.append(edit.take_report())
    momentum = {}
    for layer in edit.layers:
        for name, b in layer.as_dtensors(layer.momentum).items():
            momentum[f"momentum {name}"] = b.full_tensor()
    parameters = {name: p.full_tensor() for name, p in model.state_dict().items()}
    moments = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    return {
        "losses": losses,
        "parameters": parameters,
        "momentum": momentum,
        "reports": reports,
        "moments": moments,
        "replica": edit.replica,
    }


def leave(model, edit):
    """Do nothing."""


def evaluate(model, batches):
    with torch.no_grad():
        model(*batches.train(0))


# ---- against train.py ----


def run_both(corpus_folder, options) -> tuple:
    return _train(corpus_folder, "gloo", None, None, options), run_fsdp2(corpus_folder, options)


def assert_equals_train_py(corpus_folder, **options) -> list:
    """Returns the reports of its syncs."""
    options = RUN | options
    ranks = run_ranks(M * N, run_both, str(corpus_folder), options)
    theirs = Run([ours_and_theirs[0] for ours_and_theirs in ranks])
    ours = [ours_and_theirs[1] for ours_and_theirs in ranks]
    torch.testing.assert_close(ours[0]["losses"], theirs.losses, **CLOSE)
    for rank in ours:
        torch.testing.assert_close(rank["parameters"], theirs.parameters(), **CLOSE)
    reports = ours[0]["reports"]
    rows = theirs.rows("sync")
    assert len(reports) == len(rows) == 7
    for report, row in zip(reports, rows):
        assert report["step"] == row["step"] and report["round"] == row["round"]
        assert report["norms"].norm(dim=1).tolist() == pytest.approx(row["pseudo_grad_norm"])
        if options["method"] == "edit":
            assert report["weights"].mean(dim=1).tolist() == pytest.approx(row["weight"])
            assert report["flagged"].sum(dim=1).tolist() == row["dropped"]
            assert report["clips"].mean().item() == pytest.approx(row["clip"])
    return reports


def test_edit_under_fsdp2_equals_train_py(corpus_folder):
    assert_equals_train_py(corpus_folder)


PARTS = {
    "diloco": dict(method="diloco"),
    # replica 1 explodes in a round, and its neighbour clips every mean
    "sick": dict(scale_lr="1:21:24:100", pseudo_grad_clip=0.2),
    # norms that grow, and a small threshold: at some syncs all replicas are flagged
    "rollback": dict(anomaly_threshold=0.5, lr_warmup_steps=34),
    "accumulation": dict(accum=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_the_method_under_fsdp2_equals_train_py(part, corpus_folder):
    reports = assert_equals_train_py(corpus_folder, **PARTS[part])
    flagged = torch.stack([report["flagged"] for report in reports])  # (7, M, L)
    clips = torch.stack([report["clips"] for report in reports])
    if part == "sick":
        assert flagged[3].tolist() == [5 * [False], 5 * [True]]
        assert (clips < 1).any()
    elif part == "rollback":
        assert flagged.all(dim=1).any()
    else:
        assert not flagged.any()


# ---- what FSDP2 allows changes nothing ----


class OtherOrder(Llama):
    """Replica 1 computes the blocks in reverse."""

    def forward(self, tokens, targets):
        first, *blocks, last = self.layers
        if dist.get_rank() >= N:
            blocks.reverse()
        x = first(tokens)
        for block in blocks:
            x = block(x)
        return last(x, targets)


def drain(model, edit):
    edit.drain()


def see_two_means_in_flight(model, edit):
    """After a sync has begun. The forward has ended the last one, layer by layer."""
    begun = edit.rounds > 0 and edit.local_steps == 0
    assert len(edit.in_flight) == (2 if begun else 0)


def unshard_early(model, edit):
    """As FSDP2's tutorial does, to start the first gathers before the forward."""
    for layer in model.layers:
        layer.unshard(async_op=True)
    model.unshard()


VARIANTS = {
    "prefetch": {"prefetch": True},
    "hold": {"hold": True},
    "evaluate after": {"evaluate": "after"},
    "evaluate before": {"evaluate": "before"},
    "hold, evaluate before": {"hold": True, "evaluate": "before"},
    "early": {"after_step": unshard_early},
    "recompute": {"recompute": True},
    "drain": {"after_step": drain},
    "two means": {"after_step": see_two_means_in_flight},
    "eager": {"compile": "eager"},
    "aot_eager": {"compile": "aot_eager"},
}


def run_each(corpus_folder, runs) -> list:
    """The result of each run; of one that raised an error: its message."""
    found = []
    for options, variant in runs:
        try:
            found.append(run_fsdp2(corpus_folder, options, variant))
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


def results(corpus_folder, *runs, world_size=M * N) -> list:
    """A list for each run: the results of its ranks. runs: (flags, variant)"""
    ranks = run_ranks(world_size, run_each, str(corpus_folder), runs)
    return list(zip(*ranks))


def assert_same(found, expected, steps=None, **tolerance):
    """Bits, unless there is a tolerance. steps: compare so many last losses."""
    for own, other in zip(found, expected):
        own_losses = own["losses"][-steps:] if steps else own["losses"]
        other_losses = other["losses"][-steps:] if steps else other["losses"]
        tolerance = tolerance or dict(rtol=0, atol=0)
        torch.testing.assert_close(own_losses, other_losses, **tolerance)
        for part in ("parameters", "momentum"):
            torch.testing.assert_close(own[part], other[part], **tolerance)


@pytest.mark.slow
def test_prefetch_kept_layers_evaluations_and_compilers_change_no_bit(corpus_folder):
    two_rounds = RUN | dict(max_steps=18)
    base, *others = results(
        corpus_folder, (two_rounds, {}), *[(two_rounds, variant) for variant in VARIANTS.values()]
    )
    for name, found in zip(VARIANTS, others):
        assert isinstance(found[0], dict), (name, found)
        assert_same(found, base)


@pytest.mark.slow
def test_layers_of_the_root_change_no_bit(corpus_folder):
    """Embedding and head are left to the root. Without penalty, which goes by layer."""
    diloco = SHORT | dict(method="diloco")
    base, root = results(corpus_folder, (diloco, {}), (diloco, {"root": True}))
    assert_same(root, base)


class SkipsOne(Llama):
    """Replica 1 leaves out the second block in its 4th step."""

    step = 0

    def forward(self, tokens, targets):
        self.step += 1
        x = tokens
        for layer in self.layers[:-1]:
            if not (layer is self.layers[2] and self.step == 4 and dist.get_rank() >= N):
                x = layer(x)
        return self.layers[-1](x, targets)


MUST = ": in the warm-up all replicas must run the same layers in the same order in every step"


@pytest.mark.slow
def test_other_order_in_the_warm_up_is_an_error_that_names_the_layer_on_every_rank(corpus_folder):
    """The blocks have the same shape. Their gradients would be mixed in silence."""
    message = "replica 1, step 1: the backward came to layers.1, not to layers.3" + MUST
    (found,) = results(corpus_folder, (SHORT, {"model": OtherOrder}))
    assert list(found) == M * N * [message]


@pytest.mark.slow
def test_layer_that_one_replica_skips_in_the_warm_up_is_an_error_that_names_it(corpus_folder):
    message = "replica 1, step 4: the backward came to layers.1, not to layers.2" + MUST
    with pytest.raises(AssertionError, match=message):  # replica 0 ends as it has lost replica 1
        run_ranks(M * N, run_fsdp2, str(corpus_folder), SHORT, {"model": SkipsOne}, timeout_s=120)


@pytest.mark.slow
def test_replica_that_visits_layers_in_another_order_adds_up_the_same_layers(corpus_folder):
    model = {"model": OtherOrder}
    own_order = ("self.layers[int(l)] for l in rows[0]", "self.layers[int(l)] for l in own")
    rounds = SHORT | dict(sync_warmup_steps=0)
    base, drained, broken = results(
        corpus_folder,
        (rounds, model),
        (rounds, model | {"after_step": drain}),
        (rounds, model | {"broken": [own_order]}),
    )
    assert_same(drained, base)
    with pytest.raises(AssertionError):
        assert_same(broken, base)


# ---- each line that guards against a silent error is needed ----

UNSHARD = "        layer.modules[0].unshard()\n"
RESHARD = "        layer.modules[0].reshard()\n"
DROP = UNSHARD + RESHARD
NO_NAN = "g.nan_to_num_(0.0, 0.0, 0.0)  # 0 * NaN is NaN\n    return norm"
BROKEN = {  # (line, another), variant, the error or None: silently other numbers
    "the hook runs after FSDP2's": ((", prepend=True)", ")"), {"hold": True}, "still gathered"),
    "nothing drops a gather": ((DROP, ""), {"prefetch": True}, None),
    "an early gather": ((DROP, ""), {"after_step": unshard_early}, None),
    "nothing ends a gather": ((UNSHARD, ""), {"prefetch": True}, None),
    "nothing frees a layer": ((RESHARD, ""), {"evaluate": "before"}, "still gathered"),
}


@pytest.mark.slow
def test_gathers_of_old_parameters_are_dropped_or_an_error(corpus_folder):
    runs = [(SHORT, variant | {"broken": [line]}) for line, variant, _ in BROKEN.values()]
    base, *others = results(corpus_folder, (SHORT, {}), *runs)
    for (name, (_, _, message)), found in zip(BROKEN.items(), others):
        if message:
            assert message in found[0], name
        else:
            with pytest.raises(AssertionError):
                assert_same(found, base)


def put_nan(model, edit):
    """Into the gradient of replica 1, in one step of the third round."""
    if edit.replica == 1 and edit.steps == 18:
        for p in model.parameters():
            p.grad.to_local().fill_(torch.nan)


@pytest.mark.slow
def test_gradient_that_is_not_finite_leaves_no_trace_in_the_moments(corpus_folder):
    """Without the line that sets it to 0 the replica would be flagged for ever: an error."""
    nan = {"after_backward": put_nan}
    whole, broken = results(
        corpus_folder, (RUN, nan), (RUN, nan | {"broken": [(NO_NAN, "pass\n    return norm")]})
    )
    for rank in whole:
        assert all(moment.isfinite().all() for moment in rank["moments"])
        assert not any(report["flagged"].any() for report in rank["reports"])
    for message in broken:
        assert message.startswith("replica 1 was not finite in the last 3 syncs: call clip_grad")


# ---- the start ----


def refusals() -> dict:
    mesh = init_device_mesh("cpu", (M, N), mesh_dim_names=("replica", "shard"))
    found = {}

    def refused(name, function):
        try:
            function()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    def make(on="shard", dtype=torch.float32, device="cpu", replicas="replica", seed=0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device, dtype)
        if on == "both":
            fully_shard(model, mesh=mesh)
        elif on == "two":
            fully_shard(model[0], mesh=mesh["replica"])
            fully_shard(model, mesh=mesh["shard"])
        elif on:
            fully_shard(model, mesh=mesh[on])
        edit = edit_fsdp2.EDiT(model, mesh[replicas], tau=2, warmup_steps=0)
        return model, edit

    refused("HSDP", lambda: make(on="both"))
    refused("two", lambda: make(on="two"))
    refused("unsharded", lambda: make(on=None))
    refused("bf16", lambda: make(dtype=torch.bfloat16))
    refused("meta", lambda: make(device="meta"))
    refused("mesh", lambda: make(replicas="shard"))
    name = edit_fsdp2.PRIVATE_NAME
    edit_fsdp2.PRIVATE_NAME = "_gone"
    refused("torch", make)
    edit_fsdp2.PRIVATE_NAME = name

    def start_unequal():
        model, _ = make(seed=mesh["replica"].get_local_rank())
        model(torch.ones(1, 4))

    def save_in_a_round():
        model, edit = make()
        model(torch.ones(1, 4)).sum().backward()
        edit.step()
        edit.state_dict()

    def capture():
        model, _ = make()
        with mock.patch.multiple(
            torch.cuda, is_available=lambda: True, is_current_stream_capturing=lambda: True
        ):
            model(torch.ones(1, 4))

    refused("unequal", start_unequal)
    refused("graph", capture)
    refused("round", save_in_a_round)
    return found


@pytest.mark.slow
def test_what_would_be_silently_wrong_is_refused_on_every_rank():
    messages = {
        "HSDP": "0.weight: give fully_shard() one dimension",
        "two": "the parameters are on 2 meshes",
        "unsharded": "0.weight: shard it with fully_shard()",
        "bf16": "0.weight: an outer step would be lost in torch.bfloat16",
        "meta": "0.weight: it is on meta",
        "mesh": "are in the mesh of the shards and in that of the replicas",
        "torch": f"torch {torch.__version__} has no FSDPModule._gone",
        "unequal": "replica 1 starts from other parameters than replica 0",
        "graph": "a CUDA graph would leave out the hooks",
        "round": "replicas differ, 1 steps after a sync",
    }
    for found in run_ranks(M * N, refusals):
        for name, message in messages.items():
            assert message in found[name] and "\n" not in found[name]


def load_before_training() -> tuple:
    """Without a warm-up: a model that is loaded after EDiT was made. Parameters and anchor."""
    mesh = init_device_mesh("cpu", (M, N), mesh_dim_names=("replica", "shard"))
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh["shard"])
    edit = edit_fsdp2.EDiT(model, mesh["replica"], tau=1, warmup_steps=0)
    with torch.no_grad():
        model(torch.ones(1, 4))  # an evaluation of what will be loaded over
        model.reshard()
        model.weight.fill_(3.0)
    model(torch.ones(1, 4)).sum().backward()
    edit.step()  # nothing has moved
    edit.drain()
    return model.weight.full_tensor()


@pytest.mark.slow
def test_anchor_is_what_training_starts_from():
    for weight in run_ranks(M * N, load_before_training):
        assert (weight == 3.0).all()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, rank):
        tokens = torch.tensor([rank, 4])
        logits = self.head(self.block(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits, tokens.flip(0))


def train_tied() -> tuple:
    """A round of DiLoCo under FSDP2. The tied matrix, and the norms of all replicas and layers."""
    mesh = init_device_mesh("cpu", (M, N), mesh_dim_names=("replica", "shard"))
    model = Tied().double()
    fully_shard(model.block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    average = OFF | dict(outer_lr=1.0, outer_momentum=0.0)
    edit = edit_fsdp2.EDiT(model, mesh["replica"], tau=2, warmup_steps=0, **average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        edit.step()
    edit.drain()
    assert model.head.weight is model.embedding.weight
    return model.head.weight.full_tensor(), edit.take_report()["norms"]


@pytest.mark.slow
def test_tied_matrix_counts_once():
    replicas = []
    for i in range(M):
        model = Tied().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            loss = sum(model(rank) for rank in range(i * N, (i + 1) * N)) / N
            loss.backward()
            optimizer.step()
        replicas.append(model.head.weight.detach())
    start = Tied().double().head.weight.detach()
    expected = torch.stack([(start - x).norm() for x in replicas])
    for weight, norms in run_ranks(M * N, train_tied):
        torch.testing.assert_close(weight, sum(replicas) / M, **CLOSE)
        torch.testing.assert_close(norms[:, 0], expected, **CLOSE)  # layer 0: the root


# ---- checkpoints ----


ONE_NAME = [  # for the moments of all replicas
    ('f"replica{replica}": dcp', '"replica0": dcp'),
    ('state[f"replica{replica}"])', 'state["replica0"])'),
]
TO_16 = SHORT | dict(max_steps=16)  # the end of the second round: after a load no step is left
ONE_SHARD = TO_16 | dict(shards=1)


def moments_by_replica(ranks) -> dict:
    return {rank["replica"]: rank["moments"] for rank in ranks}


@pytest.mark.slow
def test_checkpoint_goes_on_bit_for_bit_and_loads_exactly_on_other_meshes(corpus_folder, tmp_path):
    path = str(tmp_path / "dcp")
    mixed = str(tmp_path / "mixed")
    base, saved, resumed, loaded, four_replicas, _, broken = results(
        corpus_folder,
        (SHORT, {}),
        (SHORT, {"save_at": 16, "path": path}),
        (SHORT, {"load": path}),
        (TO_16, {"load": path}),
        (ONE_SHARD, {"load": path}),
        (SHORT, {"save_at": 16, "path": mixed, "broken": ONE_NAME}),
        (TO_16, {"load": mixed, "broken": ONE_NAME}),
    )
    copy = str(shutil.copytree(path, tmp_path / "copy"))
    two_replicas, one_replica = (
        results(corpus_folder, (options, {"load": path, "other_node": copy}), world_size=2)[0]
        for options in (ONE_SHARD, TO_16)
    )
    assert_same(resumed, base, steps=6)
    moments = moments_by_replica(saved)
    assert not torch.equal(moments[0][0], moments[1][0])
    for found in loaded, four_replicas, two_replicas, one_replica:
        for rank in found:
            assert rank["losses"] == []  # it has only loaded
            torch.testing.assert_close(rank["parameters"], saved[0]["parameters"], rtol=0, atol=0)
            torch.testing.assert_close(rank["momentum"], saved[0]["momentum"], rtol=0, atol=0)
            expected = moments[rank["replica"] % M]
            torch.testing.assert_close(rank["moments"], expected, rtol=0, atol=0)
    # With one name for both replicas DCP saves either one's.
    with pytest.raises(AssertionError):
        torch.testing.assert_close(moments_by_replica(broken), moments, rtol=0, atol=0)


@pytest.mark.slow
def test_checkpoint_of_another_number_of_shards_goes_on_but_for_the_order_of_sums(
    corpus_folder, tmp_path
):
    """One rank computes in two micro-steps what two ranks compute at once."""
    path = str(tmp_path / "dcp")
    alone = SHORT | dict(shards=1, accum=2)
    _, two_shards = results(
        corpus_folder,
        (SHORT, {"save_at": 16, "path": path}),
        (SHORT, {"load": path}),
        world_size=2,
    )
    (one_shard,) = results(corpus_folder, (alone, {"load": path}), world_size=1)
    assert_same(one_shard, two_shards, **CLOSE)


# ---- examples/train_fsdp2.py ----

FLAGS = "--max_steps 30 --tau 4 --lr 0.003 --batch_size 2".split()
THEIRS = "--method edit --shards 2 --n_layer 3 --n_head 4 --n_embd 64 --block_size 64 --seed 1337"
THEIRS += " --sync_warmup_steps 8 --lr_warmup_steps 8 --device cpu --dtype fp32 --log_interval 1"


def launch(folder, program, *argv) -> list:
    """The lines that a program prints on four ranks."""
    special = {rank: (script, ROOT / program, ROOT) for rank in range(M * N)}
    started = Launch(M * N, folder, *argv, special=special)
    assert started.wait() == M * N * [0], started.lines("err")
    return started.lines("out")


@pytest.mark.slow
def test_example_trains_as_train_py_does_and_goes_on_from_its_checkpoint(tmp_path):
    flags = [*FLAGS, "--warmup_steps", "8"]
    example = "examples/train_fsdp2.py"
    lines = launch(tmp_path / "ours", example, *flags, "--save", f"{tmp_path}/dcp")
    syncs = [line.split(" | ") for line in lines if line.startswith("sync")]
    assert [sync[0] for sync in syncs] == [f"sync {n:04}" for n in range(1, 6)]

    launch(tmp_path / "theirs", "train.py", *FLAGS, *THEIRS.split(), "--out_dir", f"{tmp_path}/run")
    rows = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    rows = [row for row in rows if row["event"] == "sync"]
    assert len(rows) == len(syncs) + 1  # the last one is in finish()
    for row, (_, norms, *_) in zip(rows, syncs):
        found = [float(number) for number in re.findall(r"\d+\.\d+", norms)]
        norms = row["pseudo_grad_norm"]
        assert found == pytest.approx([min(norms), max(norms)], abs=0.011)

    again = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    again += ["--local_addr", "127.0.0.1", "--nproc_per_node", "4", example, *flags]
    again += ["--load", f"{tmp_path}/dcp", "--max_steps", "40", "--shards", "1"]
    with subprocess.Popen(again, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert any(line.startswith("step 00032 | loss") for line in process.stdout)
        process.stdout.close()  # as `| head` does: the run goes on when nobody reads any more
        assert process.wait(900) == 0


@pytest.mark.slow
def test_bench_compares_three_steps(tmp_path):
    lines = launch(tmp_path, "examples/bench_fsdp2.py", "1")
    assert [line.split("  ")[0] for line in lines] == ["train.py", "edit_fsdp2", "fsdp2 alone"]
    assert "ratio 1.00 (1.00 .. 1.00)" in lines[2]
