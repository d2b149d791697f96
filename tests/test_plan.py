"""The plan of a run equals what the run takes: memory, traffic, parameters. Presets, profile."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import train
from mesh import Mesh
from model import Block, ModelConfig
from plumbing import launch
from plumbing.config import PRESETS, UserError, parse
from plumbing.plan import KEPT
from plumbing.shm import SLOTS
from ranks import ROOT, flags, run_ranks, run_training
from shard import ShardedModel
from simulate import Config as Simulation


def planned_and_held(corpus_folder):
    """For every method, mesh and dtype: what plan.py says, and what is there after a round."""
    pairs = {}
    cases = [(m, s, d) for m in train.METHODS for s in (1, 2) for d in ("fp32", "fp64")]
    for case in cases:
        method_name, shards, dtype = case
        argv = flags(method=method_name, shards=shards, dtype=dtype, n_layer=3, n_embd=10)
        argv += ["--data", corpus_folder, "--sync_warmup_steps", "1"]
        setup = launch.set_up(argv, train.METHODS, dist.get_rank(), dist.get_world_size())
        mesh = Mesh(shards, torch.device("cpu"), backend=lambda ranks, crosses_replicas: "shm")
        model = ShardedModel(setup.plan.model_config, mesh, setup.plan.dtype)
        optimizer = model.adamw(0.1)
        method = train.METHODS[method_name](model, mesh, setup.method_config, 10)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        for _ in range(2):
            method.before_step()
            loss = model.forward(tokens, tokens)
            model.backward(1.0, average_replicas=method.averages_gradients)
            model.step_metrics(loss, 0.0, method.averages_gradients)
            optimizer.step()
            model.invalidate_gathered()
            method.after_step()
        if method.local:
            method.end_round()
        method.drain()
        slots = [0]
        for group in (mesh.shard, mesh.sync):
            if group.size > 1:
                channels = (group.process_group.gathers, group.process_group.sums)
                slots += [SLOTS * channel.slot_bytes for channel in channels]
        outer = [getattr(method, name) for name in method.shared + method.private]
        held = {
            "parameters": model.master.nbytes,
            "gradient": model.grad.nbytes,
            "AdamW": model.exp_avg.nbytes + model.exp_avg_sq.nbytes,
            " and ".join(method.shared + method.private): sum(x.nbytes for x in outer),
            "two whole layers": sum(buffer.nbytes for buffer in model.gathered),
            "a layer's gradient": 0 if shards == 1 else model.grad_buffer.nbytes,
            # without those that have room for scalars only
            "shm slots": sum(count for count in slots if count > 1000),
        }
        held = {kind: count for kind, count in held.items() if count}
        pairs[case] = (setup.plan.memory(), held, setup.plan.n_params, model.n_params)
    return pairs


def test_memory_planned_equals_memory_held(corpus_folder):
    for rank in run_ranks(2, planned_and_held, str(corpus_folder)):
        for case, (planned, held, *parameters) in rank.items():
            assert planned == held, case
            assert parameters[0] == parameters[1]


@pytest.mark.parametrize("method", ["edit", "diloco"])
def test_traffic_planned_equals_traffic_of_a_sync(corpus_folder, method):
    options = dict(method=method, shards=2, max_steps=2, sync_warmup_steps=0, tau=2)
    run = run_training(4, corpus_folder, **options)
    plan = launch.set_up(
        [*flags(**options), "--data", str(corpus_folder)], train.METHODS, 1, 4
    ).plan
    scalars = (2 + 2 * 4 if method == "edit" else 3) * 8  # fp64; loss, steps, norms, flags
    assert run.rows("sync")[0]["sync_bytes"] == plan.sync_bytes() + scalars


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
    shard = params / 8 * 4
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
        f"at 10,000 Mbit/s per replica a sync is on the wire for "
        f"{8 * sync * 8 * 1538 / 1448 / 1e10:.3g} s",
    ):
        assert text in done.stdout, text
    grown = int(done.stdout.split("grown")[1])  # KiB
    assert grown < 200_000


def test_impossible_meshes_and_sizes_are_one_line(corpus_folder):
    set_up = lambda argv, ranks: launch.set_up(argv.split(), train.METHODS, 0, ranks)
    with pytest.raises(UserError, match="--replicas 3 --shards 2: these are 6 ranks, but 4"):
        set_up("--replicas 3 --shards 2", 4)
    with pytest.raises(UserError, match="a rank needs about .* of memory"):
        set_up(f"--device cpu --data {corpus_folder} --batch_size 2000000000", 1)
    assert set_up("--replicas 2 --shards 2", 4).plan.world_size == 4
    assert set_up("--shards 8 --dry_run", 1).plan.world_size == 8


def test_presets_set_what_is_not_given():
    read = lambda *argv: parse(list(argv), train.METHODS, Simulation)
    millions = {
        "tiny": 0.9, "10m": 10.6, "124m": 85, "350m": 302, "1b": 1208, "3b": 2517, "7b": 6442,
    }  # fmt: skip
    for name in PRESETS:
        config, method_config, *_ = read("--model", name)
        blocks = config.n_layer * (4 + 8) * config.n_embd**2 / 1e6  # F is about 8/3 C
        assert blocks == pytest.approx(millions[name], rel=0.15), name
        assert config.n_embd // config.n_head % 8 == 0
        assert config.batch_size * config.block_size >= 1024
        assert method_config.sync_warmup_steps + 2 * method_config.tau <= config.max_steps
    config, method_config, *_ = read(*"--model 124m --n_layer 3 --lr 0.5 --tau 9".split())
    assert (config.n_layer, config.n_embd, config.lr, method_config.tau) == (3, 768, 0.5, 9)
    assert read()[0] == read("--model", "tiny")[0]


def test_profile_names_layers_and_collectives(corpus_folder, tmp_path):
    options = dict(shards=2, max_steps=9, sync_warmup_steps=0, tau=3)
    plain = run_training(4, corpus_folder, **options)
    profiled = run_training(4, corpus_folder, out_dir=tmp_path, profile=True, **options)
    assert profiled.losses == plain.losses
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
