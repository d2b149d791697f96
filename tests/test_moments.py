"""--average_moments: after a sync AdamW's moments are equal in all replicas, and the run is that of
the plain fp64 reference."""

import pytest
import torch

from ranks import train_all
from reference import all_flags, assert_matches, simulate
from test_edit import Sick

LOCAL = dict(average_moments=True, tau=4, sync_warmup_steps=3, max_steps=13)
CASES = {
    "diloco": LOCAL | dict(method="diloco"),
    "off": LOCAL | dict(method="diloco", average_moments=False),
    "edit": LOCAL | dict(method="edit"),
    "sick": LOCAL | dict(method="edit"),
    "a_edit": LOCAL | dict(method="a_edit", tau_time_s=4.0, virtual_clock=True),  # tau 4
    "noloco": LOCAL | dict(method="noloco"),
    # In flight at a round end: the all-reduce of the round before; the fragment of the last step.
    "co2": LOCAL | dict(method="co2", link_mbps=2.0),
    "streaming_diloco": LOCAL
    | dict(method="streaming_diloco", tau=8, fragments=2, delay=3, max_steps=16),
}


@pytest.mark.parametrize("replicas, shards", [(2, 2), (4, 1)])
def test_run_equals_fp64_reference_and_moments_are_equal(replicas, shards, corpus, corpus_folder):
    """A-EDiT with equal clocks is EDiT. A sick replica has NaN parameters in the second round. All
    runs end with a sync."""
    options = {case: each | dict(shards=shards) for case, each in CASES.items()}
    sick = {"sick": Sick("nan", [1], 8)}
    cases = [(sick.get(case), None, each) for case, each in options.items()]
    for case, run in zip(CASES, train_all(4, corpus_folder, *cases)):
        f = all_flags(**options[case] | (dict(method="edit") if case == "a_edit" else {}))
        tamper = sick[case].spoil if case in sick else None
        expected = simulate(f, replicas, shards, corpus, tamper)
        # The scales of quantized blocks are fp32.
        assert_matches(run, expected, rtol=1e-7 if case == "streaming_diloco" else 1e-9)
        twins = [run.ranks[rank["shard_index"]]["exp_avg"] for rank in run.ranks]
        equal = [torch.equal(rank["exp_avg"], twin) for rank, twin in zip(run.ranks, twins)]
        assert all(equal) == (case != "off"), case
        dropped = sum(sum(row["dropped"]) for row in run.rows("sync"))
        assert (dropped > 0) == (case == "sick")
