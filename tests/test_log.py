"""MFU: the share of a known GPU's peak that a step uses."""

import json
from types import SimpleNamespace

import pytest

import train
from mesh import Mesh
from plumbing import launch
from plumbing.log import Log, peak_flops
from ranks import CPU, flags


@pytest.mark.parametrize(
    "name, dtype, expected",
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA H100 PCIe", "bf16", 0),  # slower
        ("NVIDIA GB200", "bf16", 0),
        ("NVIDIA H200", "fp32", 0),
        ("cpu", "bf16", 0),
    ],
)
def test_peak_is_known_of_four_gpus_in_bf16(name, dtype, expected):
    assert peak_flops(name, dtype) == expected


@pytest.mark.parametrize("name, known", [("NVIDIA H200", True), ("cpu", False)])
def test_step_line_shows_mfu_of_a_known_gpu_only(name, known, tmp_path, capsys):
    options = dict(method="minibatch", out_dir=tmp_path, n_layer=2, n_embd=6, block_size=8)
    setup = launch.Setup(flags(**options), train.METHODS, train.data.load, 1)
    setup.config.dtype = "bf16"
    description = setup.describe(Mesh(1, CPU)) | {"device_name": name}
    setup.describe = lambda mesh: description
    clock = SimpleNamespace(train_s=lambda: 2.0)
    log = Log(setup, Mesh(1, CPU), clock, 0)
    method = SimpleNamespace(steps=1, progress=1)
    log.step(method, 0.1, SimpleNamespace(read=lambda: [1.0, 2.0, 0.0]))
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])

    printed = capsys.readouterr().out
    assert ("mfu" in row) == ("| mfu 0% |" in printed) == known
    if known:
        V, C, T, layers = setup.plan.model_config.vocab_size, 6, 8, 2
        hidden = setup.plan.n_params - 2 * V * C  # parameters of blocks and of the last norm
        flops = 6 * (hidden + V * C) + 12 * layers * C * T
        tokens_per_s = 2 * 8 / 2.0  # batch_size 2
        assert row["mfu"] == pytest.approx(flops * tokens_per_s / 989e12)
