"""Post Local SGD, SlowMo, CO2, NoLoCo and Streaming DiLoCo: against the plain fp64 reference, what
each must equal, and what each sends."""

import functools
from types import SimpleNamespace

import pytest
import torch

import train
from co2 import CO2
from mesh import Handle, Mesh
from model import Llama, ModelConfig
from noloco import NoLoCo, partner
from ranks import end_with_what_is_loaded, run_ranks, run_training, train_all
from reference import all_flags, assert_matches, simulate
from shard import ShardedModel
from slowmo import SlowMo
from streaming_diloco import fragment_layers

LOCAL = dict(tau=3, sync_warmup_steps=2, max_steps=12)
ENDS = [5, 8, 11, 12]
# 17 local steps: the last round is shorter. A delay of 1 lands at the last step, of 3 after it.
STREAMING = dict(
    method="streaming_diloco", tau=8, sync_warmup_steps=3, max_steps=20, fragments=2
)  # fmt: skip
CASES = {
    "post_local_sgd": LOCAL | dict(method="post_local_sgd"),
    "slowmo": LOCAL | dict(method="slowmo", lr_warmup_steps=9),
    "co2": LOCAL | dict(method="co2", outer_momentum=0.5),
    "co2 clip": LOCAL | dict(method="co2", staleness_penalty=False, outer_momentum_clip=1e-3),
    "noloco": LOCAL | dict(method="noloco"),
    "noloco pull": LOCAL | dict(method="noloco", pull=1.1, outer_lr=0.7),
    "streaming": STREAMING | dict(delay=1, alpha=0.5),
    "streaming int8": STREAMING | dict(delay=3, quantize="int8", fragment_pattern="sequential"),
    "streaming none": STREAMING | dict(delay=0, alpha=1.0, quantize="none", fragments=4),
    "streaming layers": STREAMING | dict(delay=3, alpha=0.5, n_layer=3),
    "streaming uneven": STREAMING
    | dict(delay=0, n_layer=3, fragments=4, fragment_pattern="sequential"),
}
FIVE = ("post_local_sgd", "slowmo", "co2", "noloco", "streaming")
PAIRS = [(case, (2, 2)) for case in CASES]
PAIRS += [(case, (4, 1)) for case in (*FIVE, "streaming int8")]
PAIRS += [(case, (1, 1)) for case in FIVE if case != "noloco"]
PAIRS += [(case, (1, 4)) for case in FIVE if case != "noloco"]
PAIRS += [(case, mesh) for mesh in ((2, 1), (3, 1)) for case in ("noloco pull",)]
CASES |= {"co2 accum": CASES["co2"] | dict(accum=2)}
PAIRS += [("co2 accum", (2, 2))]
PAIRS.sort(key=lambda pair: pair[1])  # one spawn of ranks for each mesh


def assert_equal_runs(a, b):
    """But for the order of sums, in fp64."""
    assert a.losses == pytest.approx(b.losses, rel=1e-9)
    for name, value in a.model.items():
        torch.testing.assert_close(value, b.model[name], rtol=1e-6, atol=1e-7)


# ---- the reference ----


@functools.cache
def trained(corpus_folder, replicas, shards):
    """Runs of all cases on one mesh, evaluated at every round end."""
    cases = [case for case, mesh in PAIRS if mesh == (replicas, shards)]
    options = [CASES[case] | dict(shards=shards, eval_interval=1) for case in cases]
    runs = train_all(
        replicas * shards, corpus_folder, *((None, None, each) for each in options),
        transport="gloo" if replicas > 1 else "shm",
    )  # fmt: skip
    return dict(zip(cases, runs))


@pytest.mark.parametrize("case, mesh", PAIRS)
def test_method_equals_fp64_reference(case, mesh, corpus, corpus_folder):
    run, f = trained(corpus_folder, *mesh)[case], all_flags(**CASES[case], shards=mesh[1])
    # Scales are rounded to fp32: another order of sums may change the last bit of one.
    quantized = getattr(f, "quantize", "none") != "none" and mesh[0] > 1
    expected = simulate(f, *mesh, corpus)
    assert_matches(run, expected, rtol=1e-7 if quantized else 1e-9)
    if case == "co2 clip":
        assert run.ranks[0]["vectors"]["momentum"].abs().max() == f.outer_momentum_clip
    ends, warmup = ([11, 19, 20], [1, 2, 3]) if f.tau == 8 else (ENDS, [1, 2])
    assert [row["step"] for row in run.rows("sync")] == ends
    assert [row["step"] for row in run.rows("eval")] == warmup + ends


def test_noloco_records_the_distance_between_replicas(corpus, corpus_folder):
    spreads = simulate(all_flags(**CASES["noloco"]), 4, 1, corpus)["spreads"]
    evals = trained(corpus_folder, 4, 1)["noloco"].rows("eval")
    # The replicas are equal in the warm-up and after the end of the training.
    assert [row["spread"] for row in evals[2:5]] == pytest.approx(spreads[:3], rel=1e-9)
    assert not any("spread" in row for row in evals[:2]) and evals[5]["spread"] < 1e-12


# ---- what is sent ----


def shard_sizes(options, N):
    """P/N of each layer."""
    f = all_flags(**options)
    layers = Llama(ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, 257)).layers
    return [-(-sum(p.numel() for p in layer.parameters()) // N) for layer in layers]


def streaming_bytes(options, M, sizes):
    """Of the second round, in which each fragment is sent once."""
    f, total = all_flags(**options), 0
    for layers in fragment_layers(len(sizes), f.fragments, f.fragment_pattern):
        blocks = sum(-(-sizes[l] // 256) for l in layers)
        blocks += -blocks % M if M > 2 else 0  # a whole number of blocks for each owner
        total += blocks * {"e3m0": 128 + 4, "int8": 256 + 4, "none": 256 * 8}[f.quantize]
    return 2 * (M - 1) / M * total


@pytest.mark.parametrize("case, mesh", [pair for pair in PAIRS if "accum" not in pair[0]])
def test_bytes_equal_the_table_and_the_plan(case, mesh, corpus_folder):
    (M, N), options = mesh, CASES[case]
    f, sizes = all_flags(**options), shard_sizes(options, N)
    run, P = trained(corpus_folder, M, N)[case], sum(sizes)
    A = 2 * (M - 1) / M * 8 * P  # fp64
    partners = [partner(0, M, f.seed, t) for t in range(1, 5)]
    expected = {
        "post_local_sgd": [A + (M - 1) * 8 * 2] * 4,  # loss and steps
        "slowmo": [A + (M - 1) * 8 * 3] * 4,  # and the norm
        "co2": [A] * 4,
        "noloco": [8 * P * (j != 0) for j in partners],
    }
    rows = [row["sync_bytes"] for row in run.rows("sync")]
    if f.tau == 8:
        assert rows[1] == pytest.approx(streaming_bytes(options, M, sizes))
    else:
        assert rows == pytest.approx(expected[case.split()[0]])
    if "noloco" in case and partners[1] == 0:
        return  # alone in the second round
    # In the second round everything is sent. The plan knows neither padding nor losses and norms.
    planned = P * (4 if f.tau == 8 and f.quantize != "none" else 8)
    planned *= train.METHODS[f.method].sent_vectors(f, M)
    block = 256 * 8 if f.tau == 8 and f.quantize == "none" else 260
    padding = 2 * (M - 1) / M * (len(sizes) + 4 * M) * block if f.tau == 8 else 8 * 3 * M
    assert planned * (1 - 1e-9) <= rows[1] <= (planned + padding) * (1 + 1e-9)


def test_collectives_are_those_of_the_methods(corpus_folder):
    """On 2x2, across replicas, in four rounds. NoLoCo's mean: three evaluations, and at the end
    the last one and model.pt."""
    L, counts = 4, {}
    for case in FIVE:
        run = trained(corpus_folder, 2, 2)[case]
        counts[case] = {
            key[5:]: n for key, n in run.ranks[0]["calls"].items() if key.startswith("sync ")
        }
        counts[case]["all-reduce"] -= CASES[case]["sync_warmup_steps"] * L  # gradients
    assert counts == {
        "post_local_sgd": {"all-reduce": 4 * L, "all-gather": 4},
        "slowmo": {"all-reduce": 4 * L, "all-gather": 4},
        "co2": {"all-reduce": 4},
        "noloco": {"exchange": 4, "all-reduce": 2 * 6},
        # fragments sent after 4, 8, 12, 16 steps, and at the end the one that did not land there
        "streaming": {"all-reduce": 0, "all-gather": 4 + 1},
    }


def test_noloco_resumed_on_fewer_replicas_starts_from_the_mean(corpus_folder, tmp_path):
    """The resumed run has no step to take."""
    options = CASES["noloco"] | dict(max_steps=8, checkpoint_interval=8, out_dir=tmp_path)
    run_training(4, corpus_folder, **options)
    files = (tmp_path / "checkpoint-00000008").glob("rank-*.pt")
    saved = [torch.load(file, weights_only=True) for file in files]
    options |= dict(resume="auto", batch_size=4, tamper=end_with_what_is_loaded)
    resumed = run_training(2, corpus_folder, **options)
    for rank in resumed.ranks:
        for name, vector in rank["vectors"].items():  # anchor and momentum
            mean = sum(vectors[name] for vectors in saved) / 4
            torch.testing.assert_close(vector, mean, rtol=1e-12, atol=1e-15)
        assert torch.equal(*rank["watched"], rank["vectors"]["anchor"])


# ---- where two methods are the same ----


def wait_at_once(method, model, mesh):
    """CO2 with staleness 0."""
    sync = method.sync

    def sync_and_wait(norms):
        sync(norms)
        method.finish()

    method.sync = sync_and_wait


def test_methods_equal_each_other_where_they_must(corpus_folder):
    """NoLoCo's two replicas are a pair in every round."""
    plain, ball = dict(outer_lr=1.0, outer_momentum=0.0), dict(outer_lr=0.8, outer_momentum=0.6)
    constant = ball | dict(min_lr_ratio=1.0)  # the inner rate, from the third step on
    case = lambda method, tamper=None, **more: (
        tamper, None, LOCAL | dict(n_layer=1, method=method) | more
    )  # fmt: skip
    runs = train_all(
        2, corpus_folder,
        case("post_local_sgd"), case("slowmo", **plain), case("diloco", **plain),
        case("slowmo", **constant), case("noloco", **constant, pull=0.8),
        case("co2", wait_at_once, **constant, staleness_penalty=False),
        case("diloco", **ball),
        case("streaming_diloco", **ball, fragments=1, delay=0, quantize="none"),
        case("streaming_diloco", tau=4, fragments=2, delay=1, alpha=1.0),
        case("post_local_sgd", tau=1000),
    )  # fmt: skip
    alone = runs.pop()  # until the last step, as with alpha 1
    assert runs.pop().losses == alone.losses
    assert torch.equal(*(rank["vectors"]["momentum"] for rank in runs[4].ranks))  # NoLoCo's pair
    for first, *others in (runs[:3], runs[3:6], runs[6:]):
        for other in others:
            assert_equal_runs(first, other)


# ---- single methods ----


def method_on_one_rank(method_class, **flags):
    model = ShardedModel(ModelConfig(2, 1, 6, 8, 257), Mesh(1, torch.device("cpu")))
    config = method_class.Config(sync_warmup_steps=0, **flags)
    method = method_class(model, model.mesh, config, max_steps=9)
    method.before_step()
    return method


def test_anchor_of_co2_is_slowmos_one_round_late():
    """Of the same pseudo-gradients, at a constant learning rate."""
    flags, anchors = dict(outer_lr=0.7, outer_momentum=0.4), []
    for method in (
        method_on_one_rank(SlowMo, **flags),
        method_on_one_rank(CO2, **flags, staleness_penalty=False),
    ):
        method.lr, generator = 1.0, torch.Generator().manual_seed(0)
        anchors.append([])
        for _ in range(4):
            d = torch.randn(method.anchor.shape, generator=generator)
            torch.sub(method.anchor, d, out=method.model.master)
            method.sync(method.local_stats())
            anchors[-1].append(method.anchor.clone())
        method.finish()
        anchors[-1].append(method.anchor)
    for earlier, later in zip(anchors[0], anchors[1][1:]):
        torch.testing.assert_close(earlier, later)


def noloco_rounds(outer_lr, outer_momentum, pull):
    """Anchor, momentum and pseudo-gradient of this rank before each of four rounds, (4, 3, P)."""
    mesh, rounds = Mesh(1, torch.device("cpu")), []
    model = ShardedModel(ModelConfig(2, 1, 6, 8, 257), mesh, torch.float64)
    config = NoLoCo.Config(0, False, 3, outer_lr, outer_momentum, pull)
    method = NoLoCo(model, mesh, config, max_steps=9, seed=5)
    torch.manual_seed(mesh.rank)
    method.anchor.normal_(), method.momentum.normal_()
    for method.rounds in range(1, 5):
        x = model.master.normal_()
        rounds.append(torch.stack([method.anchor, method.momentum, method.anchor - x]))
        method.sync(None)
    return torch.stack(rounds)


def test_mean_of_noloco_follows_heavy_ball_and_pull_1_averages_pairs():
    states = torch.stack(run_ranks(4, noloco_rounds, 0.9, 0.5, 1.1)).mean(dim=0)
    for (a, u, d), (next_a, next_u, _) in zip(states, states[1:]):
        torch.testing.assert_close(next_u, 0.5 * u + 0.9 * d)
        torch.testing.assert_close(next_a, a - next_u)
    ranks = torch.stack(run_ranks(4, noloco_rounds, 0.0, 0.0, 1.0))
    for t in range(3):
        pairs = [partner(i, 4, 5, t + 1) for i in range(4)]
        means = (ranks[:, t, 0] + ranks[pairs, t, 0]) / 2
        torch.testing.assert_close(ranks[:, t + 1, 0], means)

def test_slowmo_goes_through_a_rate_of_zero():
    method = method_on_one_rank(SlowMo)
    for lr in (0.01, 0.0, 0.01):
        method.lr = lr
        method.model.master.mul_(1 - lr)
        method.sync(method.local_stats().view(1, -1))
        assert method.anchor.isfinite().all()


def test_co2_waits_one_round_late_and_before_a_checkpoint():
    method, waited = method_on_one_rank(CO2), []
    work = SimpleNamespace(wait=lambda: waited.append(None))
    method.mesh.all_reduce = lambda x, group: Handle(work)
    for wait, count in (method.sync, 0), (method.sync, 1), (lambda _: method.drain(), 2):
        wait(method.local_stats().view(1, -1))
        assert len(waited) == count


@pytest.mark.parametrize("M", [2, 3, 4, 7, 8])
def test_noloco_pairs_are_a_perfect_matching_and_new_each_round(M):
    rounds = [tuple(partner(i, M, 5, t) for i in range(M)) for t in range(1, 200)]
    for pairs in rounds:
        assert all(pairs[j] == i for i, j in enumerate(pairs))
        assert sum(i == j for i, j in enumerate(pairs)) == M % 2  # alone
    met = {(i, pairs[i]) for pairs in rounds for i in range(M)}
    assert len(met) == M * (M - 1) + M * (M % 2)  # everybody meets everybody
    repeated = sum(a == b for a, b in zip(rounds, rounds[1:])) / 198
    matchings = {2: 1, 3: 3, 4: 3, 7: 105, 8: 105}[M]
    assert repeated == pytest.approx(1 / matchings, abs=0.15)
    assert rounds != [tuple(partner(i, M, 6, t) for i in range(M)) for t in range(1, 200)] or M == 2


# ---- Streaming DiLoCo's fragments ----


@pytest.mark.parametrize("pattern", ["strided", "sequential"])
def test_fragments_contain_each_layer_once(pattern):
    for L in range(3, 12):
        for F in range(1, L + 1):
            fragments = fragment_layers(L, F, pattern)
            assert len(fragments) == F and sorted(sum(fragments, [])) == list(range(L))
            assert max(map(len, fragments)) - min(map(len, fragments)) <= 1
    assert fragment_layers(5, 2, "strided") == [[0, 2, 4], [1, 3]]
    assert fragment_layers(5, 2, "sequential") == [[0, 1, 2], [3, 4]]


def watch_fragments(method, model, mesh):
    """[(what, k, fragment), ...]: when a fragment is sent, when its second hop starts, when it
    lands. The warm-up has three steps."""
    events, issue, land = [], mesh._issue, method.land
    names = {"all-to-all": "sent", "all-gather": "second hop"}

    def issue_and_look(group, operation, *rest):
        if method.local and group is mesh.sync and operation in names:
            events.append((names[operation], method.steps - 3, method.p))
        return issue(group, operation, *rest)

    def land_and_look():
        land()
        events.append(("landed", method.steps - 3, method.p))

    mesh._issue, method.land = issue_and_look, land_and_look
    return events


def test_streaming_sends_each_fragment_once_per_tau(corpus_folder):
    options = STREAMING | dict(delay=3, alpha=0.5, tamper=watch_fragments)
    ranks = run_training(4, corpus_folder, **options).ranks
    stages, expected = ("sent", "second hop", "landed"), []
    for k, p in [(4, 0), (8, 1), (12, 0)]:
        expected += zip(stages, (k, k + 2, k + 3), (p, p, p))
    # After step 17 fragment 1 lands early and fragment 0 is sent for the final model.
    expected += [("sent", 16, 1)] + [(stage, 17, 1) for stage in stages[1:]]
    expected += [(stage, 17, 0) for stage in stages]
    assert [rank["watched"] for rank in ranks] == [expected] * 4
