"""The script for people with two GPUs: without one it tries itself, with gloo."""

import json
import os
import subprocess

import pytest

from ranks import ROOT


@pytest.mark.slow
def test_report_of_the_script_for_two_gpus_has_equal_losses_and_all_times():
    environment = os.environ | {"METHODS": "edit", "CUDA_VISIBLE_DEVICES": ""}
    script = ["sh", "lab/experiments/two_gpus.sh"]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    report = json.loads(done.stdout.split("```json")[1].split("```")[0])
    assert report["failed"] == {}, done.stderr
    assert report["largest difference of losses"]["edit"] < 1e-9
    names = {"speed-diloco", "speed-edit", "order-1-diloco", "order-1-edit"}
    assert report["step_ms"].keys() == names | {"speed-minibatch"}
    assert report["stall_ms of a sync"].keys() == names
