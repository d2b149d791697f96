"""The plan of a run equals what the run takes: memory, traffic, parameters."""

import itertools
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import data
import train
from config import UserError
from plumbing import launch
from ranks import OUR_METHODS, ROOT, flags, run_training

# test_relatives.py has the traffic of methods without a barrier.
CASES = [(name, 2, "fp32", {}) for name in OUR_METHODS if train.METHODS[name].barrier]
CASES += [("minibatch", 1, "fp32", {}), ("edit", 1, "fp64", {}), ("edit", 4, "fp32", {})]
CASES += [("edit", 2, "fp32", dict(average_moments="both"))]
MUON = dict(optimizer="muon")
CASES += [("one_bit_edit", 2, "fp32", MUON), ("minibatch", 1, "fp32", MUON), ("edit", 4, "bf16", MUON)]
QUICK = [(name, 2, "fp32", {}) for name in ("minibatch", "diloco", "edit")]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES
]
SCALARS = {"post_local_sgd": 2, "qsr": 2, "top_k": 2}
SCALARS |= dict.fromkeys(["edit", "a_edit", "one_bit_edit"], 2 + 2 * 4)
ONE_BIT = ("zero_one_adam", "one_bit_edit")
CODED = (*ONE_BIT, "sparse_loco", "top_k")  # the plan knows neither padding nor tails


def planned(corpus_folder, ranks, **options):
    argv = [*flags(**options), "--data", str(corpus_folder)]
    return launch.Setup(argv, train.METHODS, train.data.load, ranks).plan


def measure_memory(method, model, mesh):
    tensors = [model.master, model.grad, model.exp_avg, model.exp_avg_sq, *model.gathered]
    tensors += [getattr(method, name) for name in method.shared + method.private]
    tensors += [model.grad_buffer] if mesh.shards > 1 else []
    count = sum(p.numel() for layer in model.layers for p in layer.parameters())
    return count, sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("method, shards, dtype, more", CASES)
def test_memory_and_traffic_planned_equal_those_of_a_run(
    corpus_folder, method, shards, dtype, more
):
    options = dict(method=method, shards=shards, dtype=dtype, max_steps=2, sync_warmup_steps=0)
    options |= more | (dict(sync_warmup_steps=1, max_steps=2) if method in ONE_BIT else {})
    run = run_training(4, corpus_folder, measure_memory, transport="shm", **options)
    plan = planned(corpus_folder, 4, **options)
    rounds = len(run.rows("sync"))
    rest = ("shared memory", "torch's kernels", "sync buffers", "Muon's buffer, a block", "activations")
    held = sum(count for kind, count in plan.memory().items() if kind not in rest)
    if more is MUON:  # the plan leaves out the second moments of the blocks' gains
        held = pytest.approx(held, rel=0.01)
    for rank in run.ranks:
        assert rank["watched"] == (plan.n_params, held)
        if shards == 2 and rounds and method not in (*CODED, "robust"):  # else all ranks are one group, in which more is sent
            calls = [rank["calls"][f"sync {name}"] for name in ("all-reduce", "all-gather")]
            # 4 layers, two moments; one all-gather in the evaluation
            assert calls == [4 * (3 if "average_moments" in more else 1) * rounds, rounds + 1]
    for row in run.rows("sync"):
        # loss and steps; then the norm, EDiT: norms and limits of 4 layers
        row_bytes = (plan.replicas - 1) * SCALARS.get(method, 3) * plan.master.itemsize
        sent = row["sync_bytes"] - row_bytes
        if method == "robust":
            sent -= (2 - 1) * 2 * 4 * 2**2  # the Gram matrices of both shards
        if method in CODED:
            steps = row["tau"] if method == "top_k" else 1
            assert sent == steps * expected_bytes(method, plan)
            shown = plan.sync_bytes() * (steps / plan.config.tau if method == "top_k" else 1)
            assert 0.9 * shown <= sent <= (30 if method in ONE_BIT else 2) * shown
        else:
            assert sent == plan.sync_bytes()


def test_streaming_buffers_hold_a_fragment_sent_and_received(corpus_folder):
    for F in (1, 2):
        plan = planned(corpus_folder, 2, method="streaming_diloco", fragments=F)
        assert plan.memory()["sync buffers"] == 2 / F * plan.shard_bytes


@pytest.mark.parametrize(
    "formats, block_bytes",
    [(("sign", "none"), 32 + 4), (("sign", "int8"), 256 + 4), (("none", "none"), 0)],
)
def test_one_bit_buffers_hold_the_codes_of_all_layers_sent_and_received(
    corpus_folder, formats, block_bytes
):
    """A block of 256 elements has 1024 bytes in fp32."""
    flags = dict(zip(("quantize", "warmup_format"), formats))
    plan = planned(corpus_folder, 2, method="one_bit_edit", **flags)
    expected = 2 * block_bytes / 1024 * plan.shard_bytes
    assert plan.memory().get("sync buffers", 0) == pytest.approx(expected)


def test_kinds_of_memory_follow_the_method_and_the_dtype(corpus_folder):
    methods = [planned(corpus_folder, 2, method=name, backend="shm") for name in ("diloco", "co2")]
    shared = [plan.memory().get("shared memory", 0) for plan in methods]
    assert shared[0] > 0 == shared[1]  # without a barrier replicas use gloo
    plan = planned(corpus_folder, 1, dtype="bf16")  # the parameters are in fp32
    largest = max(layout.padded for layout in plan.layouts)
    assert plan.memory()["two whole layers"] == 2 * 2 * largest


def expected_bytes(method, plan):
    """Two replicas; shards of less than 4,096 elements: what one sends, counted."""
    sizes = [layout.shard_size for layout in plan.layouts]
    if method in ONE_BIT:
        blocks = sum(-(-size // 256) for size in sizes)
        refresh = 256 + 4 if method == "zero_one_adam" else 0  # after the first round
        return blocks * (32 + 4 + refresh)
    counts = [max(1, round(plan.config.density * size)) for size in sizes]
    positions = -(-sum(counts) // 2) * 3
    each = -(-sum(counts) // 4) + 4 * len(sizes) if method == "sparse_loco" else 4 * sum(counts)
    return positions + each


def watch_memory(method, model, mesh):
    """The most bytes that tensors take at a time, with the slots of shm, beside those tensors that
    live from here on."""
    os.environ["KINETO_LOG_LEVEL"] = "6"  # without reports of its own
    profiler = torch.profiler.profile(profile_memory=True)
    trace = tempfile.mkstemp()[1]
    profiler.start()

    def stop():
        profiler.stop()
        profiler.export_chrome_trace(trace)
        events = json.loads(Path(trace).read_text())["traceEvents"]
        events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
        maps = Path("/proc/self/smaps").read_text().split("memfd:shm")[1:]  # a slot's touched pages
        slots = sum(1024 * int(re.search(r"Rss: *(\d+)", text)[1]) for text in maps)
        return slots + max(itertools.accumulate(event["args"]["Bytes"] for event in events))

    return stop


@pytest.mark.slow
@pytest.mark.parametrize("more", [dict(shards=2), dict(recompute=True), dict(
    shards=2, dtype="bf16", vocab_size=20000, batch_size=1, block_size=64
)])  # fmt: skip
def test_planned_memory_is_within_a_tenth_of_the_peak(more, corpus_folder):
    options = dict(n_layer=4, n_embd=256, n_head=4, block_size=256, batch_size=4, dtype="fp32")
    options |= dict(max_steps=2, sync_warmup_steps=0, tau=1) | more
    run = run_training(2, corpus_folder, watch_memory, transport="shm", **options)
    plan = planned(corpus_folder, 2, **options)
    kinds = plan.memory()
    planned_bytes = sum(kinds.values()) - kinds["torch's kernels"]  # not all that a process takes
    # Rank 0 also gathers the model at the end.
    held = planned_bytes - kinds["activations"] - kinds["shared memory"]
    assert held + run.ranks[1]["watched"] == pytest.approx(planned_bytes, rel=0.1)


@pytest.fixture(scope="module")
def torch_bytes():
    """What `import torch` takes in a process of its own."""
    peak = "import torch; print(open('/proc/self/status').read())"
    status = subprocess.run([sys.executable, "-c", peak], capture_output=True, text=True).stdout
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])


# Methods whose sync needs other buffers than EDiT's. Not all: each takes half a minute on a slow
# machine.
LOCAL = [dict(method=name) for name in ("sparse_loco", "robust", "top_k")]
LOCAL += [dict(method="one_bit_edit", optimizer="muon")]
SHARDED = [dict(method="edit")]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, shards, cases", [(2, 1, LOCAL), (4, 2, SHARDED)])
def test_memory_of_a_fresh_process_is_within_15_percent_of_the_plan(
    corpus_folder, tmp_path, torch_bytes, ranks, shards, cases
):
    """Of rank 0, which at the end also has the whole model, without what `import torch` takes."""
    options = dict(n_layer=4, n_embd=512, n_head=8, block_size=32, batch_size=1, dtype="fp32")
    options |= dict(sync_warmup_steps=1, tau=2, max_steps=5, eval_batches=1, shards=shards)
    torchrun = [*f"-m torch.distributed.run --standalone --nproc_per_node {ranks}".split()]
    ratios = {}
    for number, more in enumerate(cases):
        out_dir = tmp_path / str(number)
        plan = planned(corpus_folder, ranks, **options | more)
        argv = flags(**options | more, data=corpus_folder, out_dir=out_dir)
        command = [sys.executable, *torchrun, "train.py", *argv]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        *_, end = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
        planned_bytes = sum(plan.memory().values()) + plan.model_bytes()
        ratios[str(more)] = (end["peak_memory_bytes"] - torch_bytes) / planned_bytes
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1), abs=0.15)


def test_ranks_of_a_machine_must_fit_into_its_memory_together(corpus_folder, monkeypatch):
    plan = planned(corpus_folder, 2)
    needed = sum(plan.memory().values())
    sizes = {"SC_PHYS_PAGES": 1.01 * needed / 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.get)
    plan.check_memory()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"a rank needs about 75.\d MB of memory, and 2 here have"):
        plan.check_memory()


def test_nccl_takes_two_gigabytes_of_a_gpu_and_offloaded_vectors_none(corpus_folder, monkeypatch):
    there = SimpleNamespace(total_memory=3e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    options = dict(method="edit", device="cuda", dtype="fp32", dry_run=True, offload=True)
    alone, two = (planned(corpus_folder, ranks, **options) for ranks in (1, 2))
    memory = two.memory()
    assert "NCCL" not in alone.memory() and memory["NCCL"] == 2e9
    on_host = {kind: count for kind, count in memory.items() if kind.endswith(" (host)")}
    assert on_host == dict.fromkeys(["anchor (host)", "momentum (host)"], memory["parameters"])

    needed = sum(memory.values()) - sum(on_host.values()) - memory["activations"]
    there.total_memory = needed
    two.check_memory()
    there.total_memory = needed - 1
    alone.check_memory()
    line = r"a rank needs about 2000.\d MB of memory, and its GPU has 2000.\d MB: lower --batch_size"
    with pytest.raises(UserError, match=line):
        two.check_memory()


def test_plan_shows_the_mesh_the_warm_up_and_the_round(corpus_folder, capsys):
    plan = planned(corpus_folder, 4, shards=2, max_steps=20, sync_warmup_steps=5, link_mbps=10.0)
    corpus = data.load(corpus_folder)
    plan.show(corpus)
    text = capsys.readouterr().out
    assert f"{len(corpus):,} tokens ({corpus.hash})\n        {corpus.describe()}\n" in text
    assert "warm-up steps 1 to 5 average gradients, then edit begins" in text
    assert "ranks   [[0 1]\n         [2 3]]: a row is a replica" in text
    assert "round   16 steps x 64 tokens" in text and "a sync takes" in text
    plan.replicas = 1
    plan.show(corpus)
    text = capsys.readouterr().out
    assert "parameters: " in text and "round" not in text and "a sync takes" not in text


def test_only_the_softmax_of_bf16_on_cpus_grows_with_the_heads(corpus_folder):
    size = dict(n_layer=3, n_embd=8, block_size=16, batch_size=4)
    cases = ("fp32", 0, {}), ("bf16", 3 + 1, {}), ("bf16", 1, dict(recompute=True))
    for dtype, blocks, own in (*cases, ("bf16", 0, dict(block_size=2048))):
        two, four = (planned(corpus_folder, 1, dtype=dtype, n_head=n, **size | own) for n in (2, 4))
        assert four.activations() - two.activations() == 2 * blocks * (4 * 16) * 16 * (4 - 2)


def test_tokens_per_step_rule_the_micro_steps_and_keep_the_global_batch(corpus_folder):
    flags = dict(method="minibatch", tokens_per_step=24 * 8, dtype="fp64", batch_size=5)
    expected = {1: (4, 6), 2: (4, 3), 4: (3, 2), 8: (3, 1), 24: (1, 1)}
    for ranks, (batch_size, accum) in expected.items():
        plan = planned(corpus_folder, ranks, **flags)
        assert (plan.micro_batch, plan.micro_steps, plan.tokens_per_step) == (batch_size, accum, 192)
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
    sync = 2 * 7 / 8 * params / 8 * 4
    megabytes = lambda count: f"{count / 1e6:.1f} MB"
    printed = capsys.readouterr().out
    for text in (
        "64 ranks = 8 replicas x 8 shards (cuda, bf16)",
        f"model   {params:,} parameters",
        f"parameters {megabytes(shard)}, gradient {megabytes(shard)}, ",
        f"AdamW {megabytes(2 * shard)}, anchor (host) {megabytes(shard)}, momentum (host) {megabytes(shard)}, ",
        f"two whole layers {megabytes(2 * 2 * block)}",
        "64 ranks x 1 micro-steps x 1 sequences x 2048 tokens = 131,072 tokens",
        f"128 steps x 131,072 tokens = 16,777,216 tokens: {megabytes(sync)} per rank",
        f"at 10,000 Mbit/s per replica a sync takes {8 * sync * 8 * 1538 / 1448 / 1e10:.3g} s",
    ):
        assert text in printed, text


def test_vocabulary_of_large_presets_is_padded_unless_it_is_given(corpus_folder, capsys):
    for more, expected in (
        (dict(model="124m"), 320),
        (dict(model="124m", vocab_size=257), 257),
        (dict(model="10m"), 257),
    ):
        plan = planned(corpus_folder, 1, dry_run=True, **more)
        assert plan.model_config.vocab_size == expected
        plan.show(data.load(corpus_folder))
        noted = "257 tokens is padded to 320, a multiple of 64" in capsys.readouterr().out
        assert noted == (expected == 320)
