"""The plan of a run equals what the run takes: memory, traffic, parameters. Presets, profile."""

import json
from pathlib import Path

import pytest
import torch

import train
from bench import peak_rss
from model import Block, ModelConfig
from plumbing import launch
from plumbing.config import PRESETS, parse
from plumbing.plan import KEPT
from plumbing.shm import SLOTS
from ranks import flags, run_training
from simulate import Config as Simulation

# test_relatives.py has the traffic of methods that overlap.
CASES = [(name, 2, "fp32", {}) for name, method in train.METHODS.items() if not method.overlaps]
CASES += [("minibatch", 1, "fp32", {}), ("edit", 1, "fp64", {}), ("edit", 4, "fp32", {})]
CASES += [("edit", 2, "fp32", dict(average_moments=True))]


def measure_memory(method, model, mesh):
    def held():
        outer, slots = method.shared + method.private, []
        for group in (mesh.shard, mesh.sync):
            if group.size > 1:
                channels = (group.process_group.gathers, group.process_group.sums)
                slots += [SLOTS * channel.slot_bytes for channel in channels]
        kinds = {
            "parameters": model.master.nbytes,
            "gradient": model.grad.nbytes,
            "AdamW": model.exp_avg.nbytes + model.exp_avg_sq.nbytes,
            " and ".join(outer): sum(getattr(method, name).nbytes for name in outer),
            "two whole layers": sum(buffer.nbytes for buffer in model.gathered),
            "a layer's gradient": 0 if mesh.shards == 1 else model.grad_buffer.nbytes,
            # without those that have room for scalars only
            "shm slots": sum(count for count in slots if count > 1000),
        }
        return model.n_params, {kind: count for kind, count in kinds.items() if count}

    return held


@pytest.mark.parametrize("method, shards, dtype, more", CASES)
def test_memory_and_traffic_planned_equal_those_of_a_run(
    corpus_folder, method, shards, dtype, more
):
    options = dict(method=method, shards=shards, dtype=dtype, max_steps=2, sync_warmup_steps=0)
    options |= more
    run = run_training(4, corpus_folder, measure_memory, transport="shm", **options)
    argv = [*flags(**options), "--data", str(corpus_folder)]
    plan = launch.set_up(argv, train.METHODS, 1, 4).plan
    rounds = len(run.rows("sync"))
    for rank in run.ranks:
        assert rank["watched"] == (plan.n_params, plan.memory())
        if shards == 2 and rounds:  # else all ranks are one group, in which more is sent
            calls = [rank["calls"][f"sync {name}"] for name in ("all-reduce", "all-gather")]
            assert calls == [4 * (3 if more else 1) * rounds, rounds]  # 4 layers, two moments
    for row in run.rows("sync"):
        # loss and steps; then the norm, EDiT: norms and flags of 4 layers
        scalars = {"post_local_sgd": 2, "slowmo": 3, "diloco": 3}.get(method, 2 + 2 * 4)
        row_bytes = (plan.replicas - 1) * scalars * plan.master.itemsize
        assert row["sync_bytes"] == plan.sync_bytes() + row_bytes


def test_a_block_keeps_as_much_as_planned():
    block, kept = Block(ModelConfig(1, 6, 384, 64, 99)), {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() / 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = block(torch.randn(2, 64, 384, requires_grad=True))
    for tensor in [*block.parameters(), *block.buffers()]:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) / y.numel() == pytest.approx(KEPT, rel=0.05)


def test_dry_run_of_7b_on_64_gpus_is_right_and_takes_no_memory(corpus_folder, capsys):
    argv = "--model 7b --replicas 8 --shards 8 --device cuda --dry_run --offload".split()
    argv += f"--method edit --link_mbps 10000 --data {corpus_folder}".split()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present value
    before = peak_rss()
    setup = launch.set_up(argv, train.METHODS, 0, 1)
    setup.plan.show(setup.corpus)
    assert peak_rss() - before < 50e6
    C, F, L, V = 4096, 10944, 32, 257
    block = 4 * C * C + 3 * C * F + 2 * C
    params = L * block + 2 * V * C + C
    shard, sync = params / 8 * 4, 2 * 7 / 8 * params / 8 * 4
    megabytes = lambda count: f"{count / 1e6:.1f} MB"
    printed = capsys.readouterr().out
    for text in (
        "64 ranks = 8 replicas x 8 shards (cuda, bfloat16)",
        f"model   {params:,} parameters",
        f"parameters {megabytes(shard)}, gradient {megabytes(shard)}, ",
        f"AdamW {megabytes(2 * shard)}, anchor and momentum on the host {megabytes(2 * shard)}, ",
        f"two whole layers {megabytes(2 * 2 * block)}",
        "64 ranks x 1 micro-steps x 1 sequences x 2048 tokens = 131,072 tokens",
        f"128 steps x 131,072 tokens = 16,777,216 tokens: {megabytes(sync)} per rank",
        f"at 10,000 Mbit/s per replica a sync takes {8 * sync * 8 * 1538 / 1448 / 1e10:.3g} s",
    ):
        assert text in printed, text


def test_presets_set_what_is_not_given():
    read = lambda *argv: parse(list(argv), train.METHODS, Simulation)
    millions = [0.9, 10.6, 85, 302, 1208, 2517, 6442]  # parameters of the blocks
    for name, expected in zip(PRESETS, millions, strict=True):
        config = read("--model", name)[0]
        blocks = config.n_layer * (4 + 8) * config.n_embd**2 / 1e6  # F is about 8/3 C
        assert blocks == pytest.approx(expected, rel=0.15), name
    config, method_config, *_ = read(*"--model 124m --n_layer 3 --lr 0.5 --tau 9".split())
    assert (config.n_layer, config.n_embd, config.lr, method_config.tau) == (3, 768, 0.5, 9)


def test_profile_names_layers_and_collectives(corpus_folder, tmp_path):
    options = dict(shards=2, max_steps=9, sync_warmup_steps=0, tau=3)
    run_training(4, corpus_folder, out_dir=tmp_path, profile=True, **options)
    assert len(list(tmp_path.glob("trace-*.json"))) == 4
    events = json.loads((tmp_path / "trace-3.json").read_text())["traceEvents"]
    expected = {f"{part}, layer {l}" for part in ("forward", "backward", "sync") for l in range(4)}
    operations = {f"shard {name}" for name in ("all-gather", "reduce-scatter", "all-reduce")}
    operations |= {"sync all-reduce", "sync all-gather"}
    expected |= operations | {f"wait: {name}" for name in operations}
    assert expected <= {event.get("name") for event in events}
