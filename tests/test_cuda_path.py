"""The CUDA path of a training, on a device that is not there (gpu.py): its losses and parameters
are those of a CPU, and a step that prints nothing waits for nothing but the step before it."""

import contextlib
import io
import json
import shutil
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from gpu import CPU, CUDA, Gpu, ImaginedMesh

import data
import train
from a_edit import AEDiT
from plumbing import checkpoint, launch
from plumbing.log import Log
from ranks import OUR_METHODS, flags
from relatives.quantize import VALUES, decode, encode
from shard import ShardedModel

pytestmark = pytest.mark.skipif(bool(torch.version.cuda), reason="torch would ask for a real GPU")
# Rounds end at steps 7, 11, 15 and 17; 7 and 15 have no log line. EDiT's row is a step later.
FLAGS = dict(
    tau=4,
    sync_warmup_steps=3,
    max_steps=17,
    log_interval=4,
    eval_interval=8,
    eval_batches=1,
    dtype="fp64",
    shards=2,
    accum=2,
)
NEEDED = {
    "a_edit": dict(tau_time_s=4, virtual_clock=True),
    "streaming_diloco": dict(fragments=2, delay=1),
    "streaming_edit": dict(fragments=2, delay=1),
}
QUICK = ("edit",)
DIVIDED = dict(dtype="fp32", grad_clip=0.2)  # AdamW's kernel divides the gradient
CASES = [
    pytest.param("one_bit_edit", DIVIDED | dict(optimizer="muon"), marks=pytest.mark.slow),
    pytest.param("edit", DIVIDED, marks=pytest.mark.slow),
    pytest.param("edit", dict(offload=True), marks=pytest.mark.slow),
    pytest.param("edit", dict(recompute=True), marks=pytest.mark.slow),
    pytest.param("one_bit_edit", dict(offload=True), marks=pytest.mark.slow),
]
for name in OUR_METHODS:
    marks = () if name in QUICK else pytest.mark.slow
    CASES.append(pytest.param(name, NEEDED.get(name, {}), marks=marks))


class Watch:
    """Of each step: did it write a line, save or sync by the clock, and what did the host wait for?
    Replaces functions of the product until monkeypatch takes it back."""

    def __init__(self, monkeypatch, device, gpu):
        self.device = device
        self.gpu = gpu
        self.steps = []  # [printed, waits]
        self.make = ShardedModel.__init__
        self.load = data.Batches.train
        self.save = checkpoint.save

        def make(model, *args, **options):
            self.make_late(model, *args, **options)

        def load(batches, step, micro_step):
            return self.begin_step(batches, step, micro_step)

        monkeypatch.setattr(ShardedModel, "__init__", make)
        monkeypatch.setattr(data.Batches, "train", load)
        monkeypatch.setattr(checkpoint, "save", self.noted(self.save_late))
        monkeypatch.setattr(Log, "write", self.noted(Log.write))
        # A-EDiT reads the steps, and waits for the clock.
        monkeypatch.setattr(AEDiT, "sync", self.noted(AEDiT.sync))
        monkeypatch.setattr(AEDiT, "end_sync", self.noted(AEDiT.end_sync))

    def make_late(self, model, *args, **options):
        """Metrics are known one step late on both devices."""
        self.make(model, *args, **options)
        assert model.metrics_lag == (self.device == CUDA)
        model.metrics_lag = 1
        model.metrics = deque(maxlen=2)

    def begin_step(self, batches, step, micro_step):
        if self.gpu and micro_step == 0:
            self.gpu.step = step
            self.gpu.waits = []
            self.steps.append([False, self.gpu.waits])
        return self.load(batches, step, micro_step)

    def noted(self, function):
        """The function; whoever calls it makes the step one that may wait."""

        def call(*args, **options):
            if self.steps:
                self.steps[-1][0] = True
            return function(*args, **options)

        return call

    def save_late(self, *args):
        """Copies to vectors on the host have arrived before it reads them."""
        if not self.gpu:
            return self.save(*args)
        setup, _, method, _ = args
        if getattr(setup.config, "offload", False):
            assert method.anchor.device == method.momentum.device == CPU
        before = len(self.gpu.waits)
        path = self.save(*args)
        assert self.gpu.waits[before] == "device"
        return path


def run(method, device, folder, corpus_folder, monkeypatch, gpu=None, **more):
    """Rows of the record, the vectors of the last checkpoint, and the steps of Watch."""
    watch = Watch(monkeypatch, device, gpu)
    monkeypatch.setattr(train, "print_sample", lambda path: None)
    options = FLAGS | more
    argv = flags(
        method=method, device=device.type, out_dir=folder, data=corpus_folder, **options
    )
    setup = launch.Setup(argv, train.METHODS, train.data.load, 4)
    folder.mkdir(exist_ok=True)
    mesh = ImaginedMesh(device)
    with contextlib.redirect_stdout(io.StringIO()):
        train.Training(setup, mesh, launch.StopRequest(False)).run()
    monkeypatch.undo()

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = checkpoint.list_checkpoints(folder)[-1]
    own = last / "replica-0-of-2-shard-0-of-2.pt"
    shutil.copy(own, last / "replica-0-of-2-shard-1-of-2.pt")  # of an imagined rank
    saved = torch.load(own)
    return SimpleNamespace(
        rows=[json.loads(line) for line in lines],
        vectors=saved["vectors"] | saved["scalars"],
        steps=watch.steps,
    )


def numbers(rows, event):
    """All floats in these rows, but times."""
    times = {"step_ms", "train_s", "tokens_per_s", "stall_ms", "wait_others_ms", "wait_link_ms"}
    found = []
    for row in rows:
        if row["event"] != event:
            continue
        for name in row.keys() - times:
            value = row[name]
            found += value if isinstance(value, list) else [value]
    return sorted(value for value in found if isinstance(value, float))


def copy_constants():
    """quantize.py copies its tables to a device once."""
    for dtype in torch.float32, torch.float64:
        for format in VALUES:
            block = torch.zeros(1, 256, dtype=dtype, device=CUDA)
            decode(encode(block, format), format, dtype)


@pytest.mark.parametrize("method, more", CASES, ids=str)
def test_training_equals_that_of_a_cpu_and_quiet_steps_wait_only_for_the_step_before(
    method, more, tmp_path, corpus_folder, monkeypatch
):
    arguments = corpus_folder, monkeypatch
    cpu = run(method, CPU, tmp_path / "cpu", *arguments, **more)
    with Gpu() as device:
        copy_constants()
        gpu = run(method, CUDA, tmp_path / "gpu", *arguments, device, **more)

    rtol = 1e-9
    atol = 1e-12
    if "dtype" in more:
        rtol = 1e-4
        atol = 1e-5
    for event in "step", "sync", "eval":
        expected = numbers(cpu.rows, event)
        assert expected or method == "minibatch"
        assert numbers(gpu.rows, event) == pytest.approx(expected, rel=rtol, abs=atol), event
    for name, vector in cpu.vectors.items():  # and scalars
        torch.testing.assert_close(gpu.vectors[name], vector, rtol=rtol, atol=atol)

    quiet = [set(waits) for printed, waits in gpu.steps[1:] if not printed]
    assert len(quiet) >= 4
    for waits in quiet:
        assert waits == {"event of 1 steps before"}


@pytest.mark.slow
def test_run_with_vectors_on_the_host_resumes_as_on_a_cpu(tmp_path, corpus_folder, monkeypatch):
    method = "edit"
    arguments = corpus_folder, monkeypatch
    run(method, CPU, tmp_path / "cpu", *arguments, max_steps=11)
    shutil.copytree(tmp_path / "cpu", tmp_path / "gpu")
    more = dict(max_steps=17, resume="auto", offload=True)
    cpu = run(method, CPU, tmp_path / "cpu", *arguments, **more)
    with Gpu() as device:
        gpu = run(method, CUDA, tmp_path / "gpu", *arguments, device, **more)
    expected = cpu.vectors["anchor"]
    torch.testing.assert_close(gpu.vectors["anchor"], expected, rtol=1e-9, atol=1e-12)
