"""The CUDA path of a training, on a device that is not there (gpu.py): its losses and parameters
are those of a CPU, and a step that prints nothing waits for nothing but the step before it."""

import contextlib
import io
import itertools
import json
import shutil
from collections import deque

import pytest
import torch
from gpu import CPU, CUDA, Gpu, ImaginedMesh

import data
import train
from a_edit import AEDiT
from plumbing import checkpoint, launch
from plumbing.log import Log
from ranks import flags
from relatives.quantize import VALUES, decode, encode
from shard import ShardedModel

pytestmark = pytest.mark.skipif(bool(torch.version.cuda), reason="torch would ask for a real GPU")
# Rounds end at steps 7, 11, 15 and 17; 7 and 15 without a log line, EDiT's row follows a step later.
FLAGS = dict(tau=4, sync_warmup_steps=3, max_steps=17, log_interval=4, eval_interval=8)
FLAGS |= dict(eval_batches=1, dtype="fp64", shards=2, accum=2)
METHODS = {name: {} for name in train.METHODS} | {
    "a_edit": dict(tau_time_s=4, virtual_clock=True),
    "streaming_diloco": dict(fragments=2, delay=1),
    "streaming_edit": dict(fragments=2, delay=1),
}
QUICK = ("minibatch", "edit", "a_edit", "one_bit_edit")
CASES = [
    pytest.param(name, more, marks=() if name in QUICK else pytest.mark.slow)
    for name, more in METHODS.items()
]
CASES += [(name, dict(offload=True)) for name in ("diloco", "edit")]
CASES += [("edit", dict(recompute=True)), ("edit", dict(average_moments="both"))]
DIVIDED = dict(dtype="fp32", grad_clip=0.2)  # AdamW's kernel divides the gradient
CASES += [("edit", DIVIDED), ("one_bit_edit", DIVIDED | dict(optimizer="muon"))]
CASES += [("one_bit_edit", dict(offload=True))]


def run(method, device, folder, corpus_folder, monkeypatch, gpu=None, **more):
    """Rows of the record, the vectors of the last checkpoint, and of each step [did it write a
    line or save?, what the host waited for]."""
    argv = flags(method=method, device=device.type, out_dir=folder, data=corpus_folder)
    argv += flags(**FLAGS | more)
    steps, make = [], ShardedModel.__init__

    def make_late(self, *args, **options):  # metrics are known one step late on both
        make(self, *args, **options)
        assert self.metrics_lag == (device == CUDA)
        self.metrics_lag, self.metrics = 1, deque(maxlen=2)

    def load_batch(batches, step, micro_step):
        if gpu and micro_step == 0:
            gpu.step, gpu.waits = step, []
            steps.append([False, gpu.waits])
        return load(batches, step, micro_step)

    def note(function):
        def noted(*args, **options):
            steps[-1:] = [[True, waits] for _, waits in steps[-1:]]
            return function(*args, **options)

        return noted

    def save(*args):
        before = len(gpu.waits) if gpu else 0
        path = save_checkpoint(*args)
        # Then copies to vectors on the host have arrived before it reads them.
        assert not gpu or gpu.waits[before] == "device"
        return path

    load, save_checkpoint = data.Batches.train, checkpoint.save
    monkeypatch.setattr(ShardedModel, "__init__", make_late)
    monkeypatch.setattr(data.Batches, "train", load_batch)
    monkeypatch.setattr(Log, "write", note(Log.write))
    monkeypatch.setattr(checkpoint, "save", note(save))
    for name in "sync", "end_sync":  # A-EDiT reads the steps, and waits for the clock
        monkeypatch.setattr(AEDiT, name, note(getattr(AEDiT, name)))
    monkeypatch.setattr(train, "print_sample", lambda path: None)
    monkeypatch.setattr(checkpoint, "files", lambda path, mesh: 4 * [path / "rank-00000.pt"])
    setup = launch.Setup(argv, train.METHODS, 4)
    folder.mkdir(exist_ok=True)
    mesh = ImaginedMesh(device)
    with contextlib.redirect_stdout(io.StringIO()):
        train.train(setup, mesh, launch.StopRequest(False))
    monkeypatch.undo()
    seconds = {name: timeout.total_seconds() for name, timeout in mesh.timeouts.items()}
    assert seconds == {"shard": 100, "sync": 600}  # a dead neighbour is soon known
    rows = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    last = checkpoint.list_checkpoints(folder)[-1]
    return rows, torch.load(last / "rank-00000.pt"), steps


def numbers(rows, event):
    times = {"step_ms", "train_s", "tokens_per_s", "stall_ms", "wait_others_ms", "wait_link_ms"}
    values = [row[name] for row in rows if row["event"] == event for name in row.keys() - times]
    values = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return sorted(value for value in values if isinstance(value, float))


@pytest.mark.parametrize("method, more", CASES, ids=str)
def test_training_equals_that_of_a_cpu_and_quiet_steps_wait_only_for_the_step_before(
    method, more, tmp_path, corpus_folder, monkeypatch
):
    rows, vectors, _ = run(method, CPU, tmp_path / "cpu", corpus_folder, monkeypatch, **more)
    with Gpu() as gpu:
        folder, dtypes = tmp_path / "gpu", (torch.float32, torch.float64)
        for dtype, format in itertools.product(dtypes, VALUES):
            block = torch.zeros(1, 256, dtype=dtype, device=CUDA)
            decode(encode(block, format), format, dtype)  # its constants are copied once
        found, others, steps = run(method, CUDA, folder, corpus_folder, monkeypatch, gpu, **more)
    near = dict(rtol=1e-4, atol=1e-5) if "dtype" in more else dict(rtol=1e-9, atol=1e-12)
    for event in "step", "sync", "eval":
        expected = numbers(rows, event)
        close = pytest.approx(expected, rel=near["rtol"], abs=near["atol"])
        assert numbers(found, event) == close, event
        assert expected or method == "minibatch"
    for name, vector in vectors.items():  # and scalars
        torch.testing.assert_close(others[name], vector, **near)
    quiet = [set(waits) for printed, waits in steps[1:] if not printed]
    assert len(quiet) >= 4 and all(waits == {"event of 1 steps before"} for waits in quiet)


@pytest.mark.parametrize("method", ["diloco", "edit"])
def test_a_run_with_vectors_on_the_host_resumes(method, tmp_path, corpus_folder, monkeypatch):
    arguments = corpus_folder, monkeypatch
    run(method, CPU, tmp_path / "cpu", *arguments, max_steps=11)
    shutil.copytree(tmp_path / "cpu", tmp_path / "gpu")
    more = dict(max_steps=17, resume="auto", offload=True)
    _, expected, _ = run(method, CPU, tmp_path / "cpu", *arguments, **more)
    with Gpu() as gpu:
        _, found, _ = run(method, CUDA, tmp_path / "gpu", *arguments, gpu, **more)
    torch.testing.assert_close(found["anchor"], expected["anchor"], rtol=1e-9, atol=1e-12)
