"""The plan of a run equals what the run takes: parameters, memory, traffic."""

import itertools
import json
import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch

import data
import train
from config import UserError
from plumbing import launch
from plumbing.plan import costs
from ranks import flags, run_training
from rows import each_row

CASES = [(name, 2, "fp32", {}) for name in ("minibatch", "diloco", "edit")]
SLOW = [("minibatch", 1, "fp32", {}), ("edit", 1, "fp64", {}), ("edit", 4, "fp32", {})]
SLOW += [(name, 2, "fp32", {}) for name in ("a_edit", "post_local_sgd", "slowmo", "robust")]
SLOW += [("edit", 4, "bf16", dict(optimizer="muon"))]
SCALARS = {"post_local_sgd": 2, "edit": 2 + 2 * 4, "a_edit": 2 + 2 * 4}  # others 3


def planned(corpus_folder, ranks, **options):
    argv = [*flags(**options), "--data", str(corpus_folder)]
    return launch.Setup(argv, train.METHODS, train.data.load, ranks).plan


def measure_memory(method, model, mesh):
    tensors = [model.master, model.grad, model.exp_avg, model.exp_avg_sq, *model.gathered]
    tensors += [getattr(method, name) for name in method.vectors]
    tensors += [model.grad_buffer] if mesh.shards > 1 else []
    count = sum(p.numel() for layer in model.layers for p in layer.parameters())
    return count, sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    "method, shards, dtype, more",
    CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_parameters_memory_and_traffic_planned_are_those_of_a_run(
    corpus_folder, method, shards, dtype, more
):
    options = dict(method=method, shards=shards, dtype=dtype, max_steps=2, sync_warmup_steps=0)
    run = run_training(4, corpus_folder, measure_memory, **options | more)
    plan = planned(corpus_folder, 4, **options | more)
    rest = ("sync buffers", "activations")
    held = sum(count for kind, count in plan.memory().items() if kind not in rest)
    if more.get("optimizer") == "muon":  # the plan leaves out second moments of the blocks' gains
        held = pytest.approx(held, rel=0.01)
    for rank in run.ranks:
        assert rank["watched"] == (plan.n_params, held)
    for row in run.rows("sync"):
        # Loss and steps; then the norm, EDiT: norms and limits of 4 layers.
        scalars = (plan.replicas - 1) * SCALARS.get(method, 3) * plan.master.itemsize
        if method == "robust":
            scalars += (2 - 1) * 2 * 4 * 2**2  # the Gram matrices of both shards
        assert row["sync_bytes"] == plan.sync_bytes() + scalars


def watch_memory(method, model, mesh):
    """The most bytes that tensors take at a time, beside those that live from here on."""
    os.environ["KINETO_LOG_LEVEL"] = "6"  # without reports of its own
    profiler = torch.profiler.profile(profile_memory=True)
    profiler.start()

    def stop():
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace")
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
        return max(itertools.accumulate(event["args"]["Bytes"] for event in events))

    return stop


@pytest.mark.slow
@each_row("more, tolerance", [
    (dict(shards=2), 0.03),
    (dict(recompute=True), 0.03),
    # Not all of what a large vocabulary takes is there at the same time.
    (dict(shards=2, dtype="bf16", vocab_size=20000, batch_size=1, block_size=64), 0.1),
])  # fmt: skip
def test_planned_memory_is_near_the_peak(more, tolerance, corpus_folder):
    options = dict(n_layer=4, n_embd=256, n_head=4, block_size=256, batch_size=4, dtype="fp32")
    options |= dict(max_steps=2, sync_warmup_steps=0, tau=1) | more
    run = run_training(2, corpus_folder, watch_memory, **options)
    kinds = planned(corpus_folder, 2, **options).memory()
    total = sum(kinds.values())
    held = total - kinds["activations"]
    # Rank 0 also gathers the model at the end.
    assert held + run.ranks[1]["watched"] == pytest.approx(total, rel=tolerance)


def test_plan_shows_the_mesh_the_warm_up_and_the_round(corpus_folder, capsys):
    plan = planned(corpus_folder, 4, shards=2, max_steps=20, sync_warmup_steps=5, link_mbps=10.0)
    corpus = data.load(corpus_folder)
    plan.show(corpus)
    text = capsys.readouterr().out
    assert "ranks   [[0 1]\n         [2 3]]: a row is a replica" in text
    assert "warm-up steps 1 to 5 average gradients, then edit begins" in text
    assert "round   16 steps x 64 tokens" in text and "a sync takes" in text
    assert "tau for 90%" not in text  # only with --dry_run


def test_tokens_per_step_rule_the_micro_steps_and_keep_the_global_batch(corpus_folder):
    flags = dict(method="minibatch", tokens_per_step=24 * 8, dtype="fp64", batch_size=5)
    expected = {1: (4, 6), 2: (4, 3), 4: (3, 2), 8: (3, 1), 24: (1, 1)}
    for ranks, (batch_size, accum) in expected.items():
        plan = planned(corpus_folder, ranks, **flags)
        assert (plan.micro_batch, plan.micro_steps, plan.tokens_per_step) == (batch_size, accum, 192)
    with pytest.raises(UserError, match="--tokens_per_step 192: must be a multiple of 40"):
        planned(corpus_folder, 5, **flags)
    one, four = (run_training(n, corpus_folder, max_steps=3, **flags) for n in (1, 4))
    assert one.losses == pytest.approx(four.losses, rel=1e-12)


def test_dry_run_of_7b_on_64_gpus_is_right_and_takes_no_memory(corpus_folder, capsys):
    argv = "--model 7b --replicas 8 --shards 8 --device cuda --dry_run".split()
    argv += f"--method edit --offload --link_mbps 10000 --data {corpus_folder}".split()
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    before = peak()
    setup = launch.Setup(argv, train.METHODS, train.data.load, 1)
    setup.plan.show(setup.corpus)
    assert peak() - before < 400_000  # a block alone takes 800 MB
    C, F, L, V = 4096, 10944, 32, 320  # padded
    block = 4 * C * C + 3 * C * F + 2 * C
    params = L * block + 2 * V * C + C
    shard = params / 8 * 4
    assert shard < 2**32 < 2 * shard  # 4295 MB of pinned memory for a vector
    sync = 2 * 7 / 8 * params / 8 * 4
    megabytes = lambda count: f"{count / 1e6:.1f} MB"
    run = setup.plan.run(setup.plan.step_seconds())
    edit = costs(run, "edit")
    assert edit["link_s"] == pytest.approx(8 * sync * 8 * 1538 / 1448 / 1e10)
    printed = capsys.readouterr().out
    for text in (
        "64 ranks = 8 replicas x 8 shards (cuda, bf16)",
        f"model   {params:,} parameters",
        f"parameters {megabytes(shard)}, gradient {megabytes(shard)}, ",
        f"AdamW {megabytes(2 * shard)}, anchor (host) 4295.0 MB, ",
        f"two whole layers {megabytes(2 * 2 * block)}",
        "64 ranks x 1 micro-steps x 1 sequences x 2048 tokens = 131,072 tokens",
        f"16 steps x 131,072 tokens = 2,097,152 tokens: {megabytes(sync)} per rank",
        f"at 10,000 Mbit/s per replica a sync takes {edit['link_s']:.3g} s",
        "a GPU makes 396 TFLOP/s, an H100 at 40% of its peak",
        f"{edit['share']:.1%}",
        "give --timeout_s ",
    ):
        assert text in printed, text


@each_row("method", ["minibatch", "a_edit", "streaming_edit", "noloco"])
def test_dry_run_knows_the_seconds_of_every_method(corpus_folder, capsys, method):
    options = dict(method=method, model="1b", replicas=2, shards=8, device="cuda")
    options |= dict(dry_run=True, link_mbps=1e4, dtype="bf16")
    argv = [f"--{name}={value}" for name, value in options.items() if name != "dry_run"]
    argv += ["--dry_run", "--data", str(corpus_folder)]
    setup = launch.Setup(argv, train.METHODS, train.data.load, 1)
    setup.plan.show(setup.corpus)
    printed = capsys.readouterr().out
    assert "\nEDiT " in printed and "\nlink    EDiT is " in printed
