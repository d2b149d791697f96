"""Training on a real GPU, where there is one. Four ranks share it. They end with the parameters of a
training on CPUs. Without a GPU see test_cuda_path.py.

    python -m pytest -m "slow or not slow" tests/test_gpu.py"""

import json
import math

import pytest
import torch

from plumbing.checkpoint import list_checkpoints
from ranks import Launch, flags
from test_cuda_path import CASES, FLAGS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
NEEDS_NCCL = ("noloco",)  # and so a GPU for each rank
# On CUDA the vote for a sync is read one step late, so rounds have other steps than on CPUs.
OTHER_ROUNDS = ("a_edit",)
# Sums run in another order: that changes the last digits, in fp32 after clipping the fourth one.
FP64 = 1e-8
FP32 = 1e-3


def run(method, device, folder, corpus_folder, more) -> tuple:
    """Validation losses, and the vectors and scalars of rank 0's last checkpoint."""
    own = dict(method=method, device=device, backend="shm", out_dir=folder, data=corpus_folder)
    launch = Launch(4, folder / "ranks", *flags(**own | FLAGS | more))
    assert launch.wait(120) == [0, 0, 0, 0], launch.lines("err")
    assert launch.lines("err") == []
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [row["val_loss"] for row in rows if row["event"] == "eval"]
    path = list_checkpoints(folder)[-1] / "rank-00000.pt"
    saved = torch.load(path, map_location="cpu")
    del saved["label"]  # checksums
    return losses, saved


@pytest.mark.parametrize("method, more", CASES, ids=str)
def test_training_equals_that_of_cpus(method, more, tmp_path, corpus_folder):
    if method in NEEDS_NCCL:
        pytest.skip("it needs NCCL")
    gpu_losses, gpu = run(method, "cuda", tmp_path / "gpu", corpus_folder, more)
    assert all(map(math.isfinite, gpu_losses))
    if method in OTHER_ROUNDS:
        pytest.skip("it has trained, but there is nothing to compare")
    cpu_losses, cpu = run(method, "cpu", tmp_path / "cpu", corpus_folder, more)
    rtol = FP32 if "dtype" in more else FP64
    assert gpu_losses == pytest.approx(cpu_losses, rel=rtol)
    assert gpu.keys() == cpu.keys()
    for name, vector in cpu.items():
        torch.testing.assert_close(gpu[name], vector, rtol=rtol, atol=rtol / 100)
