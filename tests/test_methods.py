"""All methods: each equals the plain fp64 reference, on every mesh, also with sick replicas.
What they share: the outer step, a small surface."""

import ast
import collections
import functools
import inspect
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco import nesterov
from edit import nesterov_unless_flagged
from method import Method
from ranks import ROOT, method_alone, run_config, train_all
from reference import METHODS as PLAIN_VERSIONS
from reference import Sick, Simulation
from relatives import RELATIVES
from train import METHODS

# Both sides are fp64, so only the order of sums differs: 1e-9 is far below any wrong term. Scales
# of quantized blocks are fp32: another order of sums may change the last bit of one. A sick replica
# makes such differences up to ten times larger. model.pt is fp32.
RTOL, QUANTIZED, SICK_FACTOR, FP32 = 1e-9, 1e-7, 10, dict(rtol=1e-6, atol=1e-7)

LOCAL = dict(tau=3, sync_warmup_steps=2, max_steps=12)
# 17 local steps: the last round is shorter. A delay of 1 lands at the last step, of 3 after it.
STREAMING = dict(tau=8, sync_warmup_steps=3, max_steps=20, fragments=2)
STREAMING_DILOCO = STREAMING | dict(method="streaming_diloco")
STREAMING_INT8 = STREAMING_DILOCO | dict(delay=3, alpha=0.5, quantize="int8", n_layer=3)
NONE = dict(delay=1, alpha=0.5, quantize="none", fragments=4)
# Limits so tight that all of it happens: drops, rollbacks, clipping.
TIGHT = dict(anomaly_warmup_rounds=2, anomaly_threshold=0.05, anomaly_ema=0.1)
TIGHT |= dict(pseudo_grad_clip=0.03, min_lr_ratio=1.0)
EDIT = TIGHT | dict(method="edit", tau=2, sync_warmup_steps=2, max_steps=17)
CLOCK = dict(method="a_edit", tau_time_s=3.0, virtual_clock=True)
CLOCKS = TIGHT | CLOCK | dict(tau_time_s=5.0, slow_replica="0:2")
CLOCKS |= dict(sync_warmup_steps=2, max_steps=28, min_lr_ratio=0.9)
STREAMING_EDIT = STREAMING | TIGHT | dict(method="streaming_edit", max_steps=28)
MOMENTS = dict(average_moments="both")
QSR = dict(tau_rule="qsr", qsr_c=0.012, max_steps=16, min_lr_ratio=0.3)
# After a shorter warm-up some variances are so small that the fp32 of a scale shows.
ONE_BIT = dict(method="zero_one_adam", tau=3, sync_warmup_steps=8, max_steps=25)
ONE_BIT_EDIT = EDIT | dict(method="one_bit_edit")
GROWING = dict(warmup_format="int8", tau_schedule="1:3,2:5", max_steps=26)
MUON = dict(optimizer="muon", muon_lr=0.03)
ODD = MUON | dict(n_layer=3)  # the last blocks on two and on four shards are fewer than the shards
# Limits that only a sick replica exceeds. EDiT's rounds end after 5, 8, 11, 14 steps. Fragment 1 of
# Streaming EDiT is sent after 24 local steps, among others, and lands 3 steps later.
SICK = dict(method="edit", tau=3, sync_warmup_steps=2, max_steps=14)
SICK |= dict(anomaly_warmup_rounds=2, anomaly_threshold=15.0)
SICK_ONE_BIT = SICK | dict(method="one_bit_edit")
SICK_STREAMING = STREAMING | dict(method="streaming_edit", max_steps=43, delay=3, alpha=0.5)
SICK_STREAMING |= dict(anomaly_warmup_rounds=2, anomaly_threshold=5.0, min_lr_ratio=1.0, n_layer=1)
BEFORE, IN_FLIGHT, LANDING, AFTER = 2 + 24, 2 + 26, 2 + 27, 2 + 29
one_nan = functools.partial(Sick, math.nan, one_element=True)

ONE, THREE, FOUR, GRID = (1, 1), (3, 1), (4, 1), (2, 2)  # replicas, shards
ALL = (ONE, (1, 4), FOUR, GRID)
TABLE = {  # case: (flags, meshes)
    "minibatch": (dict(method="minibatch", max_steps=8), ALL),
    "minibatch, micro-steps": (dict(method="minibatch", max_steps=8, accum=3), [GRID]),
    "post_local_sgd": (LOCAL | dict(method="post_local_sgd"), ALL),
    "diloco": (LOCAL | dict(method="diloco"), ALL),
    "minibatch, muon": (dict(method="minibatch", max_steps=8) | ODD, ALL),
    "diloco, muon": (LOCAL | ODD | dict(method="diloco", average_moments="m"), ALL),
    "edit, muon": (EDIT | ODD, ALL),
    "diloco, moments": (LOCAL | MOMENTS | dict(method="diloco"), [GRID]),
    "slowmo": (LOCAL | dict(method="slowmo", lr_warmup_steps=9), ALL),
    "co2": (LOCAL | dict(method="co2", outer_momentum=0.5), ALL),
    "co2, no penalty": (LOCAL | dict(method="co2", staleness_penalty=False, accum=2), [GRID]),
    # while the all-reduce of the round before is in flight
    "co2, moments": (LOCAL | MOMENTS | dict(method="co2", link_mbps=2.0), [GRID]),
    "noloco": (LOCAL | dict(method="noloco"), [GRID, FOUR]),
    "noloco, pull": (LOCAL | dict(method="noloco", pull=1.1, outer_lr=0.7), [GRID, THREE]),
    "noloco, moments": (LOCAL | MOMENTS | dict(method="noloco"), [FOUR]),
    "streaming_diloco": (STREAMING_DILOCO | dict(delay=1, alpha=0.5), ALL),
    "streaming_diloco, int8": (STREAMING_INT8, [GRID, THREE, FOUR]),
    "streaming_diloco, none": (STREAMING_DILOCO | NONE | dict(delay=0, alpha=1.0), [GRID]),
    "streaming_diloco, moments": (STREAMING_DILOCO | MOMENTS | dict(delay=3), [GRID, FOUR]),
    "edit": (EDIT, ALL),
    "edit, micro-steps": (EDIT | dict(anomaly_elimination=False, accum=3), [GRID]),
    "edit, equal weights": (EDIT | dict(weighted_averaging=False), [GRID]),
    # the embedding's 2570 elements need padding
    "edit, no clipping": (EDIT | dict(pseudo_grad_clipping=False, n_embd=10), [(2, 3)]),
    "edit, moments": (EDIT | MOMENTS, [FOUR]),
    "edit, first moment averaged": (EDIT | dict(average_moments="m"), [THREE]),
    "a_edit": (CLOCKS, ALL),
    "a_edit, moments": (CLOCKS | MOMENTS, [GRID]),
    "a_edit, weights as in the paper": (CLOCKS | dict(step_weighting="none"), [GRID, THREE]),
    "a_edit, weights times steps": (CLOCKS | dict(step_weighting="times_steps"), [GRID, THREE]),
    "streaming_edit": (STREAMING_EDIT | dict(delay=3, alpha=0.5), ALL),
    "streaming_edit, int8": (STREAMING_EDIT | dict(delay=0, quantize="int8", accum=2), [FOUR]),
    "streaming_edit, none": (STREAMING_EDIT | NONE, [GRID]),
    "diloco, growing rounds": (LOCAL | QSR | dict(method="diloco"), [GRID]),
    "noloco, global": (LOCAL | dict(method="noloco", global_every=2), [FOUR, GRID]),
    "zero_one_adam": (ONE_BIT, ALL),
    "zero_one_adam, every step": (ONE_BIT | dict(tau=1, refresh=False, accum=2), [FOUR, THREE]),
    "zero_one_adam, 4 bits": (
        ONE_BIT | dict(quantize="e3m0", step_bound=0.0), [FOUR, (2, 1)]
    ),
    "zero_one_adam, no errors": (ONE_BIT | dict(error_feedback=False), [FOUR]),
    "zero_one_adam, none": (ONE_BIT | dict(quantize="none"), [GRID]),
    "zero_one_adam, growing": (ONE_BIT | dict(tau_schedule="1:3,2:5"), [GRID, THREE]),
    "one_bit_edit": (ONE_BIT_EDIT, ALL),
    "one_bit_edit, micro-steps": (
        ONE_BIT_EDIT | GROWING | MUON | dict(accum=2, anomaly_warmup_rounds=12), [FOUR, GRID, THREE]
    ),
    "one_bit_edit, equal weights": (
        ONE_BIT_EDIT | dict(weighted_averaging=False, quantize="two_bits"), [THREE, FOUR]
    ),
    "one_bit_edit, a large norm that is not flagged": (
        ONE_BIT_EDIT | dict(anomaly_elimination=False, sick=Sick(100.0, [1], 7)), [THREE, (2, 1)]
    ),
    "one_bit_edit, 4 bits": (ONE_BIT_EDIT | dict(quantize="e3m0"), [FOUR]),
    "one_bit_edit, 8 bits": (ONE_BIT_EDIT | dict(quantize="int8"), [FOUR]),
    "top_k": (LOCAL | dict(method="top_k", density=0.05), ALL),
    "top_k, micro-steps": (LOCAL | dict(method="top_k", accum=2), [GRID]),
    "top_k, control": (LOCAL | dict(method="top_k", momentum_correction=0.0), [THREE]),
    "sparse_loco": (LOCAL | dict(method="sparse_loco"), ALL),
    "sparse_loco, micro-steps": (LOCAL | dict(method="sparse_loco", accum=2), [GRID]),
    "sparse_loco, values": (
        LOCAL | dict(method="sparse_loco", two_bits=False, outer_lr=0.7, error_decay=0.5), [THREE]
    ),
    "eager": (LOCAL | dict(method="eager", outer_momentum=0.5, link_mbps=20.0), ALL),
    "eager, micro-steps": (LOCAL | dict(method="eager", accum=2), [GRID]),
    "robust": (LOCAL | dict(method="robust"), ALL),
    "robust, micro-steps": (LOCAL | dict(method="robust", accum=2), [FOUR]),
    "robust, median": (LOCAL | dict(method="robust", aggregate="median"), [GRID, THREE, FOUR]),
    "robust, trimmed": (LOCAL | dict(method="robust", aggregate="trimmed_mean"), [THREE, FOUR]),
    "robust, one nan": (
        LOCAL | dict(method="robust", sick=Sick(math.nan, [1], 3, 7), max_steps=14), [THREE]
    ),
    "sick: nan": (SICK | MOMENTS | dict(sick=one_nan([1], 10)), [GRID]),
    "sick: inf": (SICK | dict(sick=Sick(math.inf, [0], 10)), [THREE]),
    "sick: spike": (SICK | dict(sick=Sick(100.0, [1], 10)), [GRID]),
    # the replica's own gradients are NaN in one step, and AdamW's moments must stay finite
    "sick: mid round": (SICK | dict(sick=one_nan([0], 6)), [GRID]),
    "sick: one bit": (SICK_ONE_BIT | dict(sick=Sick(100.0, [1], 10)), [THREE, GRID]),
    "sick: one bit, nan": (SICK_ONE_BIT | dict(sick=one_nan([1], 7)), [THREE, FOUR]),
    # with three the owners have errors, which a rollback must not send
    "sick: one bit, rollback": (SICK_ONE_BIT | dict(sick=Sick(math.nan, [0, 1, 2], 7)), [THREE]),
    "sick: off": (SICK | dict(sick=one_nan([1], 4, 10), anomaly_elimination=False), [GRID]),
    # Training goes on while a layer of a replica is left, or if fewer than three rounds in a row
    # are rolled back.
    "sick: one of three": (SICK | dict(sick=Sick(math.nan, [1], 4, 7, 10)), [THREE]),
    "sick: one layer": (SICK | dict(sick=one_nan([0, 1], 4, 7, 10)), [GRID]),
    "sick: a_edit": (
        SICK | CLOCK | dict(sick=Sick(math.nan, [0, 1], 4), step_weighting="times_steps"), [GRID]
    ),
    "sick: rollback": (SICK | dict(sick=Sick(math.nan, [0, 1], 4, 7, 13)), [GRID]),
    "sick: one of two layers": (
        SICK_STREAMING | dict(sick=one_nan([1], BEFORE), quantize="none"), [THREE]
    ),
    "sick: one of two shards": (SICK_STREAMING | dict(sick=one_nan([1], BEFORE)), [GRID]),
}  # fmt: skip
for step in BEFORE, IN_FLIGHT, LANDING, AFTER:
    for factor in math.nan, 100.0:
        sick = dict(sick=Sick(factor, [1], step))
        TABLE[f"sick: times {factor}, step {step}"] = SICK_STREAMING | sick, [THREE]
ROWS = [(case, mesh, "auto") for case, (_, meshes) in TABLE.items() for mesh in meshes]
ROWS += [(case, GRID, "gloo") for case in ("minibatch", "diloco", "edit", "zero_one_adam", "one_bit_edit")]
ROWS.sort(key=lambda row: row[1:])  # one spawn of ranks for each mesh and transport


def flags_of(case, mesh):
    """Without the sick replica. Every round end is evaluated."""
    flags = {name: value for name, value in TABLE[case][0].items() if name != "sick"}
    return flags | dict(shards=mesh[1], eval_interval=1)


def is_slow(case):
    """A variant of a relative."""
    return ", " in case and case.split(",")[0] in RELATIVES


def selected(rows):
    return [pytest.param(*row, marks=pytest.mark.slow if is_slow(row[0]) else ()) for row in rows]


@functools.cache
def trained(corpus_folder, mesh, transport, slow):
    """case -> Run of all slow or all other cases on one mesh."""
    cases = [case for case, *rest in ROWS if rest == [mesh, transport] and is_slow(case) == slow]
    each = [(TABLE[case][0].get("sick"), None, flags_of(case, mesh)) for case in cases]
    try:
        runs = train_all(mesh[0] * mesh[1], corpus_folder, *each, transport=transport)
    except AssertionError as error:  # not all once more for the next case
        return collections.defaultdict(functools.partial(pytest.fail, str(error)))
    return dict(zip(cases, runs))


@pytest.mark.parametrize("case, mesh, transport", selected(ROWS), ids=str)
def test_method_equals_fp64_reference(case, mesh, transport, corpus, corpus_folder):
    run, (M, N) = trained(corpus_folder, mesh, transport, is_slow(case))[case], mesh
    f, sick = run_config(**flags_of(case, mesh)), TABLE[case][0].get("sick")
    quantized = M > 1 and getattr(f, "quantize", "none") != "none"
    rtol = (QUANTIZED if quantized else RTOL) * (SICK_FACTOR if sick else 1)
    expected = Simulation(f, M, N, corpus, sick)
    for event, rows in expected.rows.items():
        for row, values in zip(run.rows(event), rows, strict=True):
            assert ("spread" in row) == ("spread" in values)
            for key, value in values.items():
                assert_close(row[key], value, rtol, f"{key} at step {row['step']}")
    assert not f.virtual_clock or run.rows("end")[0]["train_s"] == expected.now
    for name, value in expected.model.items():
        # A 1-bit update divided by a tiny variance enlarges the rounding of its scale.
        close = dict(rtol=1e-4, atol=1e-5) if f.method == "zero_one_adam" else FP32
        torch.testing.assert_close(run.model[name], value.float(), **close)
    for i, layers in enumerate(zip(*getattr(expected.method, "samples", ()))):
        count, *moments = run.ranks[i * N]["method_state"]["statistics"]
        assert count == [len(norms) for norms in layers]  # those that were not flagged
        assert np.isfinite(moments).all()
    assert len(run.ranks[-1]["seen"]) >= len(run.rows("sync"))  # Run compares the replicas
    # All runs end with a sync.
    first, equal = run.ranks[0]["exp_avg"], f.method in ("minibatch", "zero_one_adam", "top_k")
    equal = equal or f.average_moments != "none"
    assert all(torch.equal(first, rank["exp_avg"]) == equal for rank in run.ranks[N::N])
    if case in ("edit", "a_edit", "streaming_edit", "one_bit_edit") and M > 1:  # TIGHT does what it is for
        assert sum(sum(row["dropped"]) for row in run.rows("sync")) > 0
        assert min(row["clip"] for row in run.rows("sync")) < 1


def assert_close(recorded, value, rtol, message):
    """Numbers of the record, in which None stands for one that is not finite."""
    recorded, value = np.array(recorded, dtype=float), np.array(value, dtype=float)
    value = np.where(np.isfinite(value), value, math.nan)
    np.testing.assert_allclose(recorded, value, rtol=rtol, atol=1e-14, err_msg=message)


@pytest.mark.parametrize("case, mesh", [row[:2] for row in ROWS if "sick" in row[0]], ids=str)
def test_sick_replicas_and_they_alone_are_left_out(case, mesh, corpus_folder):
    run = trained(corpus_folder, mesh, "auto", is_slow(case))[case]
    sick = TABLE[case][0]["sick"]
    for i, dropped in enumerate(zip(*(row["dropped"] for row in run.rows("sync")))):
        assert (sum(dropped) > 0) == (i in sick.replicas)
    assert all(rank["exp_avg"].isfinite().all() for rank in run.ranks)
    assert run.losses.count(None) == (case == "sick: mid round")  # in the next step


@pytest.mark.parametrize("name", METHODS)
def test_docstring_of_a_method_names_the_file_of_its_plain_version(name):
    last_line = sys.modules[METHODS[name].__module__].__doc__.splitlines()[-1]
    plain = Path(inspect.getfile(PLAIN_VERSIONS[name])).relative_to(ROOT)
    assert last_line == f"Plain version: {plain.as_posix()}."


def test_plain_versions_share_only_the_network_and_the_data_with_the_product():
    imported = set()
    for path in (ROOT / "tests" / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
    product = {path.stem for path in ROOT.glob("*.py")} | {"relatives", "plumbing", "lab"}
    assert {name.split(".")[0] for name in imported} & product == {"data", "model"}


def test_outer_step_is_torchs_sgd_and_keeps_every_bit_of_what_it_leaves_out():
    torch.manual_seed(0)
    one, zero, (lr, mu) = torch.ones(()).double(), torch.zeros(()).double(), (0.8, 0.85)
    for accepted, momentum in (None, mu), (None, 0.0), (one, mu), (one, 0.0):
        a, b = torch.randn(7).double(), torch.zeros(7).double()
        theirs = torch.nn.Parameter(a.clone())
        sgd = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=momentum > 0)
        for _ in range(4):
            theirs.grad = torch.randn(7).double()
            if accepted is None:
                nesterov(a, b, theirs.grad.clone(), lr, momentum)
            else:
                nesterov_unless_flagged(a, b, theirs.grad.clone(), lr, momentum, accepted)
            sgd.step()
            torch.testing.assert_close(a, theirs.detach(), rtol=1e-14, atol=1e-14)
    before = a.clone(), b.clone()
    nesterov_unless_flagged(a, b, torch.zeros(7).double(), lr, mu, zero)
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_surface_of_a_method_is_small():
    surface = [name for name in vars(Method) if not name.startswith("_")]
    assert "sync" in surface and len(surface) <= 23, surface
    method = method_alone(method="post_local_sgd")  # it adds nothing of its own
    assert len(vars(method)) <= 11, list(vars(method))
