"""What the record says of a sick run."""

from types import SimpleNamespace

import pytest

import train
from mesh import Mesh
from plumbing import launch
from plumbing.log import Log
from ranks import CPU, flags, run_training
from rows import each_row


def row(dropped):
    """Of a sync."""
    names = "round clip stall_ms wait_others_ms wait_link_ms sync_bytes".split()
    lists = {"weight": [1], "rolled_back": [], "pseudo_grad_norm": None}
    return dict.fromkeys(names, 0) | lists | {"steps": [1] * len(dropped), "dropped": dropped}


@each_row(
    "rounds, times",
    [
        ([3, 3, 4, 4, 4], 1),
        ([3, 3, 0, 3, 3], 0),  # not in a row
        ([2, 2, 2, 2], 0),  # not in most of the four layers
    ],
)
def test_replica_that_most_layers_leave_out_in_three_rounds_is_named_once(
    rounds, times, tmp_path, capsys
):
    setup = launch.Setup(flags(out_dir=tmp_path), train.METHODS, train.data.load, 1)
    mesh = Mesh(1, CPU)
    mesh.replicas = 2
    log = Log(setup, mesh, SimpleNamespace(), 0)
    for count in rounds:
        log.sync(row([0, count]))
    note = "note    most layers have left out replica 1 in 3 syncs in a row"
    assert capsys.readouterr().out.count(note) == times


def spoil_evaluation(method, model, mesh):
    """The parameters to evaluate are not finite."""
    method.evaluation_model = lambda: model.master * float("nan")


def test_validation_loss_that_is_not_finite_ends_the_run(corpus_folder):
    options = dict(method="diloco", tau=2, sync_warmup_steps=0, max_steps=8, eval_interval=2)
    with pytest.raises(AssertionError, match="the validation loss at step 2 is nan; lower --lr"):
        run_training(1, corpus_folder, spoil_evaluation, **options)
