"""All methods: each equals the plain fp64 reference, on every mesh, also with sick replicas.
What they share: the outer step, a small surface."""

import collections
import functools
import json
import math

import numpy as np
import pytest
import torch

import data
import plain.edit
from diloco import nesterov
from edit import anomaly_limits, nesterov_unless_flagged
from methods import METHODS, PLAIN
from plain import text_training
from ranks import run_config, run_training, train_all
from rows import each_row
from sick import Sick
from train import learning_rate

# Both sides are fp64, so only the order of sums differs: 1e-9 is far below any wrong term. Scales
# of quantized blocks are fp32: another order of sums may change the last bit of one. A sick replica
# makes such differences up to ten times larger. model.pt is fp32.
RTOL = 1e-9
QUANTIZED_RTOL = 1e-7
SICK_FACTOR = 10
FP32 = dict(rtol=1e-6, atol=1e-7)

MINIBATCH = dict(method="minibatch", max_steps=8)
LOCAL = dict(tau=3, sync_warmup_steps=2, max_steps=12)
QSR = dict(method="qsr", qsr_c=0.018, max_steps=16, min_lr_ratio=0.3)
MUON = dict(optimizer="muon", muon_lr=0.03)
ODD = MUON | dict(n_layer=3)  # the last blocks on two and on four shards are fewer than the shards

# Limits so tight that all of it happens: rollbacks, clipping and, in the fourth round, in which
# replica 0 learns faster, drops. The rounds after it use the statistics that it did not enter.
TIGHT = dict(anomaly_warmup_rounds=2, anomaly_threshold=0.05, anomaly_ema=0.1)
TIGHT |= dict(pseudo_grad_clip=0.03, min_lr_ratio=1.0)
EDIT = TIGHT | dict(method="edit", tau=2, sync_warmup_steps=2, max_steps=17)
EDIT |= dict(scale_lr="0:9:10:4")
CLOCK = dict(method="a_edit", tau_time_s=3.0, virtual_clock=True)
CLOCKS = TIGHT | CLOCK | dict(tau_time_s=5.0, slow_replica="0:2", scale_lr="0:12:14:6")
CLOCKS |= dict(sync_warmup_steps=2, max_steps=28, min_lr_ratio=0.9)

# 17 local steps: the last round is shorter. A delay of 1 lands at the last step, of 3 after it.
STREAMING = dict(tau=8, sync_warmup_steps=3, max_steps=20, fragments=2)
STREAMING_DILOCO = STREAMING | dict(method="streaming_diloco")
STREAMING_EDIT = STREAMING | TIGHT | dict(method="streaming_edit", max_steps=36)
STREAMING_EDIT |= dict(scale_lr="0:22:24:6")
NONE = dict(delay=1, alpha=0.5, quantize="none", fragments=4)

# After a shorter warm-up some variances are so small that the fp32 of a scale shows.
ONE_BIT = dict(method="zero_one_adam", tau=3, sync_warmup_steps=8, max_steps=25)
ONE_BIT_EDIT = EDIT | dict(method="one_bit_edit")
GRADIENTS = dict(warmup_format="int8", max_steps=26)

# Limits that only a sick replica exceeds. EDiT's rounds end after 5, 8, 11, 14 steps. Fragment 1 of
# Streaming EDiT is sent after 24 local steps, among others, and lands 3 steps later.
SICK = dict(method="edit", tau=3, sync_warmup_steps=2, max_steps=14)
SICK |= dict(anomaly_warmup_rounds=2, anomaly_threshold=15.0)
SICK_ONE_BIT = SICK | dict(method="one_bit_edit")
SICK_STREAMING = STREAMING | dict(method="streaming_edit", max_steps=43, delay=3, alpha=0.5)
SICK_STREAMING |= dict(anomaly_warmup_rounds=2, anomaly_threshold=5.0, min_lr_ratio=1.0, n_layer=1)
BEFORE = 2 + 24
IN_FLIGHT = 2 + 26
LANDING = 2 + 27
AFTER = 2 + 29


def nan(replicas, *steps):
    return Sick(math.nan, replicas, *steps)


def one_nan(replicas, *steps):
    return Sick(math.nan, replicas, *steps, one_element=True)


ONE = (1, 1)  # replicas, shards
THREE = (3, 1)
FOUR = (4, 1)
GRID = (2, 2)
ALL = (ONE, (1, 4), FOUR, GRID)
FEW = (FOUR, GRID)  # of a relative: shards are all methods' business, and the others show them
TABLE = {}  # case -> (flags, meshes)


def add(case, meshes, *groups, **more):
    """A case. groups, more: its flags, and perhaps sick=Sick(...)."""
    flags = {}
    for group in groups:
        flags |= group
    TABLE[case] = (flags | more, meshes)


add("minibatch", ALL, MINIBATCH)
add("minibatch, micro-steps", [GRID], MINIBATCH, accum=3)
add("minibatch, muon", [(1, 4), GRID], MINIBATCH, ODD)

add("post_local_sgd", ALL, LOCAL, method="post_local_sgd")

add("diloco", ALL, LOCAL, method="diloco")
add("diloco, muon", [GRID], LOCAL, ODD, method="diloco")
add("qsr", FEW, LOCAL, QSR)

add("slowmo", FEW, LOCAL, method="slowmo", lr_warmup_steps=9)

add("co2", FEW, LOCAL, method="co2", outer_momentum=0.5)
# while the all-reduce of the round before is in flight
add("co2, slow link", [GRID], LOCAL, method="co2", link_mbps=2.0)

add("noloco", [GRID, FOUR], LOCAL, method="noloco")
add("noloco, pull", [GRID, THREE], LOCAL, method="noloco", pull=1.1, outer_lr=0.7)
add("noloco, global", [FOUR, GRID], LOCAL, method="noloco", global_every=2)

add("streaming_diloco", FEW, STREAMING_DILOCO)  # with the default --delay
add(
    "streaming_diloco, int8", [GRID, THREE, FOUR],
    STREAMING_DILOCO, delay=3, alpha=0.5, quantize="int8", n_layer=3,
)  # fmt: skip
add("streaming_diloco, none", [GRID], STREAMING_DILOCO, NONE, delay=0, alpha=1.0)

add("edit", ALL, EDIT)
add("edit, muon", [(1, 4), GRID], EDIT, ODD)
add("edit, many rounds", [GRID], EDIT, tau=1, anomaly_threshold=2.0, max_steps=30)
add("edit, micro-steps", [GRID], EDIT, anomaly_elimination=False, accum=3)
add("edit, equal weights", [GRID], EDIT, weighted_averaging=False)
# the embedding's 2570 elements need padding
add("edit, no clipping", [(2, 3)], EDIT, pseudo_grad_clipping=False, n_embd=10)

# the ladder: with these flags a method is the one below it (test_ladder.py: in plain/)
UNDONE = dict(anomaly_elimination=False, weighted_averaging=False, pseudo_grad_clipping=False)
add("edit, all parts off", [GRID], LOCAL, UNDONE, method="edit")
add("diloco, no outer step", [GRID], LOCAL, method="diloco", outer_lr=1.0, outer_momentum=0.0)
add("slowmo, no outer step", [GRID], LOCAL, method="slowmo", outer_lr=1.0, outer_momentum=0.0)

add("a_edit", ALL, CLOCKS)
add("a_edit, weights as in the paper", [GRID, THREE], CLOCKS, step_weighting="none")

add("streaming_edit", FEW, STREAMING_EDIT, delay=3, alpha=0.5)
add("streaming_edit, int8", [FOUR], STREAMING_EDIT, delay=0, quantize="int8", accum=2)

add("streaming_edit, all parts off", [GRID], STREAMING_EDIT, UNDONE)
add(
    "streaming_edit, one fragment", [GRID], STREAMING_EDIT,
    fragments=1, delay=0, alpha=0.0, quantize="none",
)  # fmt: skip

add("zero_one_adam", [ONE, *FEW], ONE_BIT)
add("zero_one_adam, every step", [FOUR, THREE], ONE_BIT, tau=1, refresh=False, accum=2)
add("zero_one_adam, 4 bits", [FOUR], ONE_BIT, quantize="e3m0")
add("zero_one_adam, none", [GRID], ONE_BIT, quantize="none")
add("zero_one_adam, growing", [GRID, THREE], ONE_BIT, tau_schedule="1:3,2:5")

add("one_bit_edit", ALL, ONE_BIT_EDIT)
add(
    "one_bit_edit, micro-steps", [FOUR, GRID, THREE],
    ONE_BIT_EDIT, GRADIENTS, MUON, accum=2, anomaly_warmup_rounds=12,
)  # fmt: skip
add(
    "one_bit_edit, equal weights", [THREE, FOUR],
    ONE_BIT_EDIT, weighted_averaging=False, quantize="two_bits",
)  # fmt: skip
add(
    "one_bit_edit, a large norm that is not flagged", [THREE],
    ONE_BIT_EDIT, anomaly_elimination=False, sick=Sick(100.0, [1], 7),
)  # fmt: skip
add("one_bit_edit, 4 bits", [FOUR], ONE_BIT_EDIT, quantize="e3m0")
add("one_bit_edit, 32 bits", [THREE], ONE_BIT_EDIT, quantize="none")

add("top_k", FEW, LOCAL, method="top_k", density=0.05)
add("top_k, all", [GRID], LOCAL, method="top_k", density=1.0, momentum_correction=0.0, tau=1)
add("top_k, control", [THREE], LOCAL, method="top_k", momentum_correction=0.0)

add("sparse_loco", FEW, LOCAL, method="sparse_loco")
add(
    "sparse_loco, values", [THREE],
    LOCAL, method="sparse_loco", two_bits=False, outer_lr=0.7, error_decay=0.5,
)  # fmt: skip

add(
    "sparse_loco, all", [THREE],
    LOCAL, method="sparse_loco", two_bits=False, density=1.0, error_decay=0.0,
)  # fmt: skip

add("eager", FEW, LOCAL, method="eager", outer_momentum=0.5, link_mbps=20.0)

add("robust", FEW, LOCAL, method="robust")
add("robust, median", [GRID, THREE, FOUR], LOCAL, method="robust", aggregate="median")
add("robust, trimmed", [THREE, FOUR], LOCAL, method="robust", aggregate="trimmed_mean")
add("robust, one nan", [THREE], LOCAL, method="robust", max_steps=14, sick=nan([1], 3, 7))

# what a flag does to one replica
add("disturbed: rate", [GRID], SICK, scale_lr="1:8:10:100")
add("disturbed: tokens", [GRID], SICK, random_tokens="0:4:9", accum=2)
add("disturbed: flip", [GRID], LOCAL, method="diloco", flip="1:6:8")
add("disturbed: flip of its own anchor", [GRID], LOCAL, method="noloco", flip="1:6:8")

add("sick: nan", [GRID], SICK, sick=one_nan([1], 10))
add("sick: inf", [THREE], SICK, sick=Sick(math.inf, [0], 10))
add("sick: spike", [GRID], SICK, sick=Sick(100.0, [1], 10))
# the replica's own gradients are NaN in one step, and AdamW's moments must stay finite
add("sick: mid round", [GRID], SICK, sick=one_nan([0], 6))
add("sick: one bit", [THREE, GRID], SICK_ONE_BIT, sick=Sick(100.0, [1], 10))
add("sick: one bit, nan", [THREE, FOUR], SICK_ONE_BIT, sick=one_nan([1], 7))
# with three the owners have errors, which a rollback must not send
add("sick: one bit, rollback", [THREE], SICK_ONE_BIT, sick=nan([0, 1, 2], 7))
add("sick: off", [GRID], SICK, sick=one_nan([1], 4, 10), anomaly_elimination=False)
# Training goes on while a layer of a replica is left, or if fewer than three rounds in a row are
# rolled back.
add("sick: one of three", [THREE], SICK, sick=nan([1], 4, 7, 10))
add("sick: one layer", [GRID], SICK, sick=one_nan([0, 1], 4, 7, 10))
add("sick: a_edit", [GRID], SICK, CLOCK, sick=nan([0, 1], 4), step_weighting="none")
add("sick: rollback", [GRID], SICK, sick=nan([0, 1], 4, 7, 13))
add("sick: one of two layers", [THREE], SICK_STREAMING, sick=one_nan([1], BEFORE), quantize="none")
add("sick: one of two shards", [GRID], SICK_STREAMING, sick=one_nan([1], BEFORE))
for step in BEFORE, IN_FLIGHT, LANDING, AFTER:
    add(f"sick: nan, step {step}", [THREE], SICK_STREAMING, sick=nan([1], step))
sick = Sick(100.0, [1], IN_FLIGHT)
add("sick: times 100, in flight", [THREE], SICK_STREAMING, sick=sick)

# methods of your own

ROWS = []  # (case, mesh, transport)
for case, (_, meshes) in TABLE.items():
    for mesh in meshes:
        ROWS.append((case, mesh, "auto"))
for case in "minibatch", "edit", "zero_one_adam", "one_bit_edit":
    ROWS.append((case, GRID, "gloo"))
ROWS.sort(key=lambda row: row[1:])  # one spawn of ranks for each mesh and transport


def sick_of(case):
    flags, _ = TABLE[case]
    return flags.get("sick")


def flags_of(case, mesh):
    """Without the sick replica. Every round end is evaluated."""
    flags = dict(TABLE[case][0])
    flags.pop("sick", None)
    return flags | dict(shards=mesh[1], eval_interval=1)


QUICK = ("edit, muon", "edit, many rounds", "sick: nan", "sick: spike", "sick: rollback")
QUICK += ("sick: mid round",)


def is_slow(case, mesh):
    """Quick: each method on the grid, EDiT and minibatch on other meshes, a few variants."""
    variant = ", " in case or ":" in case
    if case in ("minibatch", "edit"):
        return mesh == (1, 4)
    return mesh != GRID or variant and case not in QUICK


def selected(rows):
    """The rows as parameters of a test."""
    found = []
    for row in rows:
        marks = ()
        if is_slow(*row[:2]):
            marks = pytest.mark.slow
        found.append(pytest.param(*row, marks=marks))
    return found


def selected_cases(items, mesh, transport, slow) -> list:
    """Cases of a mesh and transport that the tests of this session (items) ask for. With -k NAME
    others are not trained."""
    rows = set()
    for item in items:
        if hasattr(item, "callspec"):
            asked = {"transport": "auto"} | item.callspec.params
            rows.add((asked.get("case"), asked.get("mesh"), asked["transport"]))
    found = []
    for row in ROWS:
        if row in rows and row[1:] == (mesh, transport) and is_slow(*row[:2]) == slow:
            found.append(row[0])
    return found


@functools.cache
def trained(session, corpus_folder, mesh, transport, slow):
    """case -> Run of all slow or all other selected cases on one mesh, in one spawn of ranks."""
    cases = selected_cases(session.items, mesh, transport, slow)
    each = [(sick_of(case), None, flags_of(case, mesh)) for case in cases]
    try:
        runs = train_all(mesh[0] * mesh[1], corpus_folder, *each, transport=transport)
    except AssertionError as error:  # not all once more for the next case
        return collections.defaultdict(functools.partial(pytest.fail, str(error)))
    return dict(zip(cases, runs))


@pytest.mark.parametrize("case, mesh, transport", selected(ROWS), ids=str)
def test_method_equals_fp64_reference(case, mesh, transport, corpus, corpus_folder, request):
    M, N = mesh
    run = trained(request.session, corpus_folder, mesh, transport, is_slow(case, mesh))[case]
    f = run_config(**flags_of(case, mesh))
    sick = sick_of(case)
    expected = text_training(f, M, N, corpus, sick=sick)
    verdicts = watch_verdicts(expected.method)
    expected.run()
    assert_same_rows(run, expected, tolerance(f, M, sick))
    if f.virtual_clock:
        assert run.rows("end")[0]["train_s"] == expected.now
    assert_same_model(run, expected, f, tolerance(f, M, sick))
    assert_same_limits(run, expected, f, N, tolerance(f, M, sick))
    assert_moments_are_as_equal_as_promised(run, f, N)
    # Run compares the replicas whenever one is seen.
    assert len(run.ranks[-1]["seen"]) >= len(run.rows("sync"))
    if case in ("edit", "diloco"):
        assert_each_round_sends_what_its_docstring_promises(run, f, M)
    if case in ("edit", "a_edit", "streaming_edit", "one_bit_edit") and M > 1:
        assert_penalty_has_acted(run, verdicts)
    if case == "edit, many rounds":
        assert max(len(norms) for layer in expected.method.samples for norms in layer) > 20


def tolerance(f, M, sick) -> float:
    rtol = RTOL
    if M > 1 and getattr(f, "quantize", "none") != "none":
        rtol = QUANTIZED_RTOL
    if sick or f.scale_lr:
        rtol *= SICK_FACTOR
    return rtol


def twins(name) -> str:
    """The files of a method's two versions."""
    return f"{METHODS.file(name)} and {PLAIN.file(name)}"


def assert_same_rows(run, expected, rtol):
    for event, rows in expected.rows.items():
        for row, values in zip(run.rows(event), rows, strict=True):
            assert ("spread" in row) == ("spread" in values)
            for key, value in values.items():
                # Without a virtual clock seconds differ. The last row of a round is written before
                # the sync here, and after it there, where A-EDiT's replicas know their progress.
                if key == "train_s" or key == "tokens" and event == "step":
                    continue
                if key == "cosine":  # only the plain version has it
                    continue
                if event == "sync" and isinstance(row[key], list) and key != "rolled_back":
                    value = value[: len(row[key])]  # without a barrier: of replica 0 alone
                what = f"{twins(expected.f.method)} differ in {key} at step {row['step']}"
                assert_close(row[key], value, rtol, what)


def assert_close(recorded, value, rtol, what):
    """Numbers of the record, in which None stands for one that is not finite."""
    recorded = np.array(recorded, dtype=float)
    value = np.array(value, dtype=float)
    value = np.where(np.isfinite(value), value, math.nan)
    same = recorded.shape == value.shape
    if same:
        same = np.allclose(recorded, value, rtol=rtol, atol=1e-14, equal_nan=True)
    if not same:
        pytest.fail(f"{what}: {recorded.tolist()} and {value.tolist()}", pytrace=False)


def assert_same_model(run, expected, f, rtol):
    """The parameters in fp64, and model.pt, which is fp32."""
    what = f"{twins(f.method)} differ in"
    close = dict(rtol=1e-4, atol=1e-5)
    if f.method != "zero_one_adam":
        # A 1-bit update divided by a tiny variance enlarges the rounding of its scale. In all
        # others an element is as exact as the largest ones of its tensor.
        close = FP32
        for name, value in run.parameters().items():
            other = expected.model[name]
            exact = dict(rtol=0, atol=rtol * other.abs().max().item())
            torch.testing.assert_close(value, other, msg=f"{what} {name}", **exact)
    for name, value in expected.model.items():
        torch.testing.assert_close(run.model[name], value.float(), msg=f"{what} {name}", **close)


def assert_same_limits(run, expected, f, N, rtol):
    """EDiT's statistics are of the norms that were not flagged, and so are the next limits. The
    statistics of a detector of one's own are its own affair; its flags are compared."""
    samples = getattr(expected.method, "samples", ())
    if samples and type(expected.method).limit is not plain.edit.EDiT.limit:
        return
    warmup = max(getattr(f, "anomaly_warmup_rounds", 0), 2)
    for i, layers in enumerate(zip(*samples)):
        statistics = run.ranks[i * N]["method_state"]["statistics"]
        statistics = torch.tensor(statistics, dtype=torch.float64)
        assert statistics[0].tolist() == [len(norms) for norms in layers]
        assert statistics.isfinite().all()
        if not f.anomaly_elimination:
            continue
        for limit, norms in zip(anomaly_limits(statistics, f).tolist(), layers):
            theirs = math.inf
            if len(norms) >= warmup:
                theirs = plain.edit.anomaly_limit(norms, warmup, f)
            assert limit == pytest.approx(theirs, rel=rtol)


def assert_moments_are_as_equal_as_promised(run, f, N):
    """At the end, which is a sync in all runs."""
    equal = f.method in ("minibatch", "zero_one_adam", "top_k")
    first = run.ranks[0]["exp_avg"]
    for rank in run.ranks[N::N]:
        assert torch.equal(first, rank["exp_avg"]) == equal


def assert_each_round_sends_what_its_docstring_promises(run, f, M):
    """Over the slow links, per rank. The docstrings count in fp32, and here all is fp64."""
    layouts = run.ranks[0]["layouts"]
    shard = sum(layout.shard_size for layout in layouts)
    scalars = 3  # loss, steps, norm
    if f.method == "edit":
        scalars = 2 + 2 * len(layouts)  # loss, steps; of each layer norm and flag
    promised = 8 * (2 * (M - 1) / M * shard + scalars * (M - 1))
    assert [row["sync_bytes"] for row in run.rows("sync")] == [promised] * len(run.rows("sync"))


def watch_verdicts(method):
    """[(layer, whether it has had a limit, Verdict), ...] of a plain method with a penalty."""
    found = []
    judge = getattr(method, "flag_and_weigh", None)

    def judge_and_look(l, d):
        known = min(map(len, method.samples[l])) >= method.f.anomaly_warmup_rounds
        verdict = judge(l, d)
        found.append((l, known, verdict))
        return verdict

    if judge:
        method.flag_and_weigh = judge_and_look
    return found


def assert_penalty_has_acted(run, verdicts):
    """TIGHT does what it is for: a layer of one replica weighs nothing while that of another one
    counts, and a later round has a limit for this layer."""
    assert min(row["clip"] for row in run.rows("sync")) < 1
    assert any(all(verdict.flagged) for _, _, verdict in verdicts)
    used = False
    for number, (l, _, verdict) in enumerate(verdicts):
        for flagged, weight in zip(verdict.flagged, verdict.w):
            assert (weight == 0) == flagged
        if any(verdict.flagged) and not all(verdict.flagged):
            used |= any(known and later == l for later, known, _ in verdicts[number + 1 :])
    assert used


OTHERS = [dict(schedule="wsd", decay_share=0.35), dict(data_by_replica=True)]


@each_row("flags", OTHERS)
def test_schedule_and_documents_are_those_of_the_plain_version(flags, tmp_path):
    """With uneven clocks: the rate follows the tokens of all replicas."""
    texts = [f"{word} {count} " * count for count in range(3, 90) for word in ("one", "two")]
    documents = data.text_documents([write(tmp_path / "texts.jsonl", texts)])
    data.write_corpus(documents, "byte", tmp_path / "tokens")
    (run,) = train_all(4, tmp_path / "tokens", (None, None, CLOCKS | flags | dict(shards=2)))
    expected = text_training(run_config(**CLOCKS, **flags), 2, 2, data.load(tmp_path / "tokens"))
    expected.run()
    assert_same_rows(run, expected, RTOL)  # with the learning rates


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


SICK_ROWS = [(case, mesh) for case, mesh, _ in ROWS if "sick" in case]


@pytest.mark.parametrize("case, mesh", selected(SICK_ROWS), ids=str)
def test_sick_replicas_and_they_alone_are_left_out(case, mesh, corpus_folder, request):
    run = trained(request.session, corpus_folder, mesh, "auto", is_slow(case, mesh))[case]
    sick = sick_of(case)
    dropped = np.array([row["dropped"] for row in run.rows("sync")])  # (rounds, M)
    for i, count in enumerate(dropped.sum(axis=0)):
        assert (count > 0) == (i in sick.replicas)
    for rank in run.ranks:
        assert rank["exp_avg"].isfinite().all()
    # in the next step
    assert run.losses.count(None) == (case == "sick: mid round")


def test_tokens_after_a_resume_are_those_before_it_and_those_of_the_new_batch(
    tmp_path, corpus_folder
):
    options = dict(method="minibatch", out_dir=tmp_path)
    run_training(1, corpus_folder, max_steps=3, batch_size=2, **options)
    run = run_training(1, corpus_folder, max_steps=5, batch_size=6, resume="auto", **options)
    tokens = [row["tokens"] for row in run.rows("step")]
    assert tokens == [16, 32, 48, 48 + 48, 48 + 96]


def test_wsd_rises_stays_falls_and_does_not_depend_on_the_end_before_the_decay():
    flags = dict(schedule="wsd", lr=1.0, lr_warmup_steps=4, min_lr_ratio=0.2, decay_share=0.25)
    short = run_config(max_steps=16, **flags)
    expected = [0.25, 0.5, 0.75, 1.0] + 9 * [1.0] + [0.8, 0.6, 0.4, 0.2]
    rates = [learning_rate(step, short) for step in range(17)]
    assert rates == pytest.approx(expected, rel=1e-12)
    long = run_config(max_steps=160, **flags)
    assert [learning_rate(step, long) for step in range(13)] == rates[:13]


nesterov_moves = functools.partial(nesterov_unless_flagged, moves=torch.ones(()).double())


@each_row("momentum", [0.85, 0.0])
@each_row("step", [nesterov, nesterov_moves])
def test_outer_step_is_torchs_sgd(step, momentum):
    torch.manual_seed(0)
    a = torch.randn(7).double()
    b = torch.zeros_like(a)
    theirs = torch.nn.Parameter(a.clone())
    sgd = torch.optim.SGD([theirs], lr=0.8, momentum=momentum, nesterov=momentum > 0)
    for _ in range(4):
        theirs.grad = torch.randn(7).double()
        step(a, b, theirs.grad.clone(), lr=0.8, mu=momentum)
        sgd.step()
        torch.testing.assert_close(a, theirs.detach(), rtol=1e-14, atol=1e-14)


def test_outer_step_keeps_every_bit_of_what_it_leaves_out():
    a = torch.randn(7).double()
    b = torch.randn(7).double()
    before = a.clone(), b.clone()
    flagged = torch.zeros(()).double()
    nesterov_unless_flagged(a, b, torch.zeros_like(a), lr=0.8, mu=0.85, moves=flagged)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
