"""Training on a real GPU, where there is one. Four ranks share it. They end with the parameters of a
training on CPUs. Without a GPU see test_cuda_path.py.

NCCL refuses two ranks on one GPU of one host. So each rank says that it is a host of its own, and
they talk through NCCL's sockets, as hosts do.

    python -m pytest -m "slow or not slow" tests/test_gpu.py"""

import json
import math
import os
import signal
from collections import deque

import pytest
import torch
import torch.distributed as dist

import ranks
from plumbing.checkpoint import list_checkpoints
from ranks import Launch, flags
from shard import ShardedModel
from test_cuda_path import CASES, FLAGS

NO_GPU = not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(NO_GPU, reason="there is no GPU")
NEEDS_NCCL = ("noloco",)
# Sums run in another order: that changes the last digits, in fp32 after clipping the fourth one.
FP64 = 1e-8
FP32 = 1e-3


def own_host(argv, rank, *more):
    """In place of ranks._command: the rank says that it is a host of its own."""
    os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    ranks._command(argv, rank, *more)


def late(argv, rank, *more):
    """In place of ranks._command: metrics are known one step late, as on a GPU. So A-EDiT, whose
    votes travel with them, has the same rounds."""
    make = ShardedModel.__init__

    def make_late(model, *args, **options):
        make(model, *args, **options)
        model.metrics_lag = 1
        model.metrics = deque(maxlen=2)

    ShardedModel.__init__ = make_late
    ranks._command(argv, rank, *more)


def start(backend, folder, corpus_folder, **options) -> Launch:
    own = dict(backend=backend, out_dir=folder, data=corpus_folder)
    special = {}
    if backend == "nccl":
        special = {rank: (own_host,) for rank in range(4)}
    elif options["device"] == "cpu":
        special = {rank: (late,) for rank in range(4)}
    return Launch(4, folder / "ranks", *flags(**own | options), special=special)


def run(method, device, backend, folder, corpus_folder, more) -> tuple:
    """Validation losses, and the vectors and scalars of rank 0's last checkpoint."""
    options = dict(method=method, device=device) | FLAGS | more
    launch = start(backend, folder, corpus_folder, **options)
    assert launch.wait() == [0, 0, 0, 0], launch.lines("err")
    assert launch.lines("err") == []
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [row["val_loss"] for row in rows if row["event"] == "eval"]
    (path,) = list_checkpoints(folder)[-1].glob("replica-0-of-*-shard-0-of-*.pt")
    saved = torch.load(path, map_location="cpu")
    return losses, saved["vectors"] | saved["scalars"] | {"steps": saved["steps"]}


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory, corpus_folder):
    """on_cpus(method, more): that run on CPUs, once for all backends."""
    found = {}

    def run_once(method, more):
        key = f"{method} {more}"
        if key not in found:
            folder = tmp_path_factory.mktemp("cpu") / "out"
            found[key] = run(method, "cpu", "shm", folder, corpus_folder, more)
        return found[key]

    return run_once


@pytest.mark.parametrize("backend", ["shm", "nccl"])
@pytest.mark.parametrize("method, more", CASES, ids=str)
def test_training_equals_that_of_cpus(method, more, backend, tmp_path, corpus_folder, on_cpus):
    if backend == "shm" and method in NEEDS_NCCL:
        pytest.skip("it needs NCCL")
    if backend == "nccl" and not dist.is_nccl_available():
        pytest.skip("torch has no NCCL")
    gpu_losses, gpu = run(method, "cuda", backend, tmp_path / "gpu", corpus_folder, more)
    assert all(map(math.isfinite, gpu_losses))
    cpu_losses, cpu = on_cpus(method, more)
    rtol = FP32 if "dtype" in more else FP64
    assert gpu_losses == pytest.approx(cpu_losses, rel=rtol)
    assert gpu.keys() == cpu.keys()
    for name, vector in cpu.items():
        torch.testing.assert_close(gpu[name], vector, rtol=rtol, atol=rtol / 100)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
def test_killed_rank_ends_the_others_over_nccl_with_at_most_one_line_each(tmp_path, corpus_folder):
    """Either Python notices it, or NCCL's watchdog ends the process and prints lines of its own."""
    options = dict(method="edit", device="cuda", max_steps=10**6, timeout_s=30)
    launch = start("nccl", tmp_path / "out", corpus_folder, **FLAGS | options)
    launch.wait_for("sync 0002")
    launch.signal(signal.SIGKILL, 3)
    codes = launch.wait()
    assert codes[3] == -signal.SIGKILL
    for rank, code in enumerate(codes[:3]):
        assert code not in (0, -signal.SIGKILL)  # -9: it hung
        lines = (launch.folder / f"err-{rank}").read_text().splitlines()
        assert len([line for line in lines if line.startswith("train.py: ")]) <= 1, lines
