"""What a run is said to take is what it takes; sizes; the dry run; the profile; offloading."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from config import METHODS, SIZES, parse, set_up
from flags import UserError
from mesh import Mesh
from model import Block, ModelConfig
from plan import KEPT, Plan
from ranks import ROOT, flags, run_ranks, run_training
from shard import ShardedModel


def planned_and_held(argv, corpus_folder):
    setup = set_up([*argv, "--data", corpus_folder], rank=1, world_size=dist.get_world_size())
    plan = Plan(setup, dist.get_world_size())
    mesh = Mesh(plan.shards, torch.device("cpu"))
    model = ShardedModel(plan.model_config, mesh, plan.dtype)
    model.adamw(0.1)
    method = METHODS[setup.config.method][0](model, mesh, setup.method_config, 10, None)
    boxes = [(g, box) for g in (mesh.shard, mesh.sync) for box in set(g.outboxes.values())]
    held = {
        "parameters": model.master.nbytes,
        "gradient": model.grad.nbytes,
        "AdamW": model.exp_avg.nbytes + model.exp_avg_sq.nbytes,
        "anchor and momentum": sum(vector.nbytes for vector in method.outer_vectors.values()),
        "two whole layers": sum(buffer.nbytes for buffer in model.whole),
        "a layer's gradient": sum(buffer.nbytes for buffer in model.buffers()[len(model.whole) :]),
        "outboxes": sum(box.slots[g.index].nbytes for g, box in boxes),
    }
    held = {kind: count for kind, count in held.items() if count}
    return plan.memory(), held, plan.n_params, model.n_params


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shards", [1, 2])
def test_memory_planned_equals_memory_held(corpus_folder, method, shards):
    for dtype in ("fp32", "fp64"):
        argv = flags(method=method, shards=shards, dtype=dtype, n_layer=3, n_embd=10)
        for planned, held, *params in run_ranks(2, planned_and_held, argv, str(corpus_folder)):
            assert planned == held and params[0] == params[1]


@pytest.mark.parametrize("method", ["edit", "diloco"])
def test_traffic_planned_equals_traffic_of_a_sync(corpus_folder, method):
    options = dict(method=method, shards=2, max_steps=2, sync_warmup_steps=0, tau=2)
    run = run_training(4, corpus_folder, **options)
    setup = set_up([*flags(**options), "--data", str(corpus_folder)], 1, 4)
    norms = (2 * 4 if method == "edit" else 1) * 8  # fp64; 2 L or 1 of them, 4 layers
    assert run.rows("sync")[0]["sync_bytes"] == Plan(setup, 4).sync_bytes() + norms


@pytest.mark.parametrize("heads, channels", [(4, 128), (6, 384)])
def test_a_block_keeps_as_much_as_planned(heads, channels):
    kept, T = {}, 64
    block = Block(ModelConfig(1, heads, channels, T, 99))
    own = [*block.parameters(), *block.buffers()]
    own = {tensor.untyped_storage().data_ptr() for tensor in own}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes() / 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = block(torch.randn(2, T, channels, requires_grad=True))
    assert sum(kept.values()) / y.numel() == pytest.approx(KEPT, rel=0.05)


def test_dry_run_of_7b_on_64_gpus_is_right_and_takes_no_memory(tmp_path):
    script = (
        "import resource, runpy, sys, torch; sys.argv[0] = 'train.py'; import train\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: train.main(sys.argv[1:])\n"
        "finally: print('grown', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    argv = "--model 7b --replicas 8 --shards 8 --device cuda --dry_run".split()
    argv += "--method edit --link_mbps 10000".split()
    done = subprocess.run(
        [sys.executable, "-c", script, *argv, "--out_dir", str(tmp_path / "out")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and not (tmp_path / "out").exists()
    C, F, L, V = 4096, 10944, 32, 257
    block = 4 * C * C + 3 * C * F + 2 * C
    params = L * block + 2 * V * C + C
    shard = (L * block + 2 * V * C + C) / 8 * 4
    sync = 2 * 7 / 8 * shard
    for text in (
        "64 ranks = 8 replicas x 8 shards (cuda, bfloat16)",
        f"model   {params:,} parameters",
        f"parameters {shard / 1e6:.1f} MB, gradient {shard / 1e6:.1f} MB, "
        f"AdamW {2 * shard / 1e6:.1f} MB",
        f"anchor and momentum {2 * shard / 1e6:.1f} MB, "
        f"two whole layers {2 * 2 * block / 1e6:.1f} MB",
        "64 ranks x 1 micro-steps x 1 sequences x 2048 tokens = 131,072 tokens",
        f"128 steps x 131,072 tokens = 16,777,216 tokens: {sync / 1e6:.1f} MB per rank",
        "at 10,000 Mbit/s per replica an exchange is on the wire for "
        f"{8 * sync * 8 * 1538 / 1448 / 1e10:.3g} s",
    ):
        assert text in done.stdout, text
    grown = int(done.stdout.split("grown")[1])  # KiB
    assert grown < 200_000


def test_impossible_number_of_replicas_is_one_line():
    with pytest.raises(UserError, match="--replicas 3 --shards 2: these are 6 ranks, but 4"):
        set_up(["--replicas", "3", "--shards", "2"], 1, 4)
    assert set_up(["--replicas", "2", "--shards", "2"], 1, 4).world_size == 4
    assert set_up(["--shards", "8", "--dry_run"], 1, 1).world_size == 8


def test_sizes_set_what_is_not_given():
    millions = {
        "tiny": 0.9, "10m": 10.6, "124m": 85, "350m": 302, "1b": 1208, "3b": 2517, "7b": 6442,
    }  # fmt: skip
    for name in SIZES:
        config, method_config, _ = parse(["--model", name])
        blocks = config.n_layer * (4 + 8) * config.n_embd**2 / 1e6  # F is about 8/3 C
        assert blocks == pytest.approx(millions[name], rel=0.15), name
        assert config.n_embd // config.n_head % 8 == 0
        assert config.batch_size * config.block_size >= 1024
        assert method_config.sync_warmup_steps + 2 * method_config.tau <= config.max_steps
    config, method_config, _ = parse("--model 124m --n_layer 3 --lr 0.5 --tau 9".split())
    assert (config.n_layer, config.n_embd, config.lr, method_config.tau) == (3, 768, 0.5, 9)
    assert parse([])[0] == parse(["--model", "tiny"])[0]


def test_profile_names_layers_and_collectives(corpus_folder, tmp_path):
    options = dict(shards=2, max_steps=9, sync_warmup_steps=0, tau=5, profile=True)
    plain = run_training(4, corpus_folder, **options | {"profile": False})
    assert run_training(4, corpus_folder, out_dir=tmp_path, **options).losses == plain.losses
    assert len(list(tmp_path.glob("trace-*.json"))) == 4
    events = json.loads((tmp_path / "trace-3.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    for l in range(4):
        assert {f"forward, layer {l}", f"backward, layer {l}", f"sync, layer {l}"} <= names
    for what in (
        "shard all-gather", "shard reduce-scatter", "shard all-reduce", "sync all-reduce",
        "sync all-gather",
    ):  # fmt: skip
        assert {what, f"wait: {what}"} <= names


def visit_as_copies(method, model, mesh):
    """What --offload does on a GPU: what lives on the host comes as a copy."""
    method.visit = lambda home: home.clone()


def test_offloaded_anchor_and_momentum_go_home_after_their_visit(corpus_folder):
    options = dict(shards=2, max_steps=9, sync_warmup_steps=1, tau=2)
    usual = run_training(4, corpus_folder, **options)
    visiting = run_training(4, corpus_folder, tamper=visit_as_copies, offload=True, **options)
    assert all(torch.equal(usual.model[name], visiting.model[name]) for name in usual.model)
