"""Post Local SGD, SlowMo, CO2, NoLoCo and Streaming DiLoCo: against the plain fp64 reference, what
each must equal, what each sends, and what must not change a run."""

import functools
import zlib
from types import SimpleNamespace

import pytest
import torch

import train
from co2 import CO2
from mesh import Handle, Mesh
from model import Llama, ModelConfig
from noloco import NoLoCo, partner
from plumbing import launch
from plumbing.config import UserError
from post_local_sgd import PostLocalSGD
from ranks import Run, _train, flags, run_ranks, run_training
from reference import all_flags, assert_matches, simulate
from shard import ShardedModel
from slowmo import SlowMo
from streaming_diloco import fragment_layers
from test_ladder import inner_sgd

LOCAL = dict(tau=4, sync_warmup_steps=3, max_steps=17)
# 21 local steps: the last round is shorter. A delay of 1 lands at the last step, of 3 after it.
STREAMING = dict(
    method="streaming_diloco", tau=8, sync_warmup_steps=3, max_steps=24, fragments=2
)  # fmt: skip
CASES = {
    "post_local_sgd": LOCAL | dict(method="post_local_sgd"),
    "slowmo": LOCAL | dict(method="slowmo", lr_warmup_steps=9),
    "co2": LOCAL | dict(method="co2", outer_momentum=0.5),
    "co2 clip": LOCAL | dict(method="co2", staleness_penalty=False, outer_momentum_clip=0.01),
    "noloco": LOCAL | dict(method="noloco"),
    "noloco pull": LOCAL | dict(method="noloco", pull=1.1, outer_lr=0.7),
    "streaming": STREAMING | dict(delay=1, alpha=0.5),
    "streaming int8": STREAMING | dict(delay=3, quantize="int8", fragment_pattern="sequential"),
    "streaming none": STREAMING | dict(delay=0, alpha=0.5, quantize="none", fragments=4),
    "streaming layers": STREAMING | dict(delay=3, alpha=0.5, n_layer=3),
    "streaming uneven": STREAMING
    | dict(delay=0, n_layer=3, fragments=4, fragment_pattern="sequential"),
}
FIVE = ("post_local_sgd", "slowmo", "co2", "noloco", "streaming")
OVERLAPPING = ("co2", "noloco", "streaming")
PAIRS = [(case, (2, 2)) for case in CASES]
PAIRS += [(case, (4, 1)) for case in (*FIVE, "streaming int8")]
PAIRS += [(case, (1, 1)) for case in FIVE if case != "noloco"]
PAIRS += [(case, (1, 4)) for case in ("slowmo", "co2", "streaming")]  # norms over four shards
PAIRS += [(case, mesh) for mesh in ((2, 1), (3, 1)) for case in ("noloco pull",)]
CASES |= {"co2 accum": CASES["co2"] | dict(accum=2)}
PAIRS += [("co2 accum", (2, 2))]
PAIRS.sort(key=lambda pair: pair[1])  # one spawn of ranks for each mesh


def train_cases(corpus_folder, transport, cases):
    """On every rank: one training after the other. cases: (tamper, out_dir, flags)."""
    methods, results = dict(train.METHODS), []
    for tamper, out_dir, options in cases:
        train.METHODS.update(methods)  # without the last case's tamper
        results.append(_train(flags(**options), corpus_folder, tamper, out_dir, transport))
    return results


def train_all(world_size, corpus_folder, *cases, transport="gloo"):
    """A Run of each case, in one spawn. With shm no traffic overlaps."""
    ranks = run_ranks(world_size, train_cases, str(corpus_folder), transport, cases)
    return [Run(list(results)) for results in zip(*ranks)]


def all_vectors(method, model, mesh):
    """A tamper that changes nothing: all of the method's vectors, as they are in the end."""
    names = method.shared + method.private
    return lambda: {name: getattr(method, name).clone() for name in names}


def assert_same_run(a, b):
    """Bit for bit."""
    assert a.losses == b.losses
    for ours, theirs in zip(a.ranks, b.ranks):
        assert torch.equal(ours["master"], theirs["master"])
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
        assert ours["method_state"] == theirs["method_state"]
        for name, vector in theirs["watched"].items():
            assert torch.equal(ours["watched"][name], vector), name


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
    ends = [11, 19, 24] if f.tau == 8 else [7, 11, 15, 17]
    assert [row["step"] for row in run.rows("sync")] == ends
    assert [row["step"] for row in run.rows("eval")] == [1, 2, 3, *ends]


def test_noloco_records_the_distance_between_replicas(corpus, corpus_folder):
    spreads = simulate(all_flags(**CASES["noloco"]), 4, 1, corpus)["spreads"]
    evals = trained(corpus_folder, 4, 1)["noloco"].rows("eval")
    # The replicas are equal in the warm-up and after the end of the training.
    assert [row["spread"] for row in evals[3:6]] == pytest.approx(spreads[:3], rel=1e-9)
    assert not any("spread" in row for row in evals[:3]) and evals[6]["spread"] < 1e-12


# ---- what is sent ----


def shard_sizes(options, N):
    """P/N of each layer."""
    f = all_flags(**options)
    layers = Llama(ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, 257)).layers
    return [-(-sum(p.numel() for p in layer.parameters()) // N) for layer in layers]


def streaming_bytes(options, M, sizes):
    """Of each sync row: in a round, a fragment is sent every tau / F steps."""
    f, layers, counts = all_flags(**options), range(len(sizes)), []
    F, interval = f.fragments, f.tau // f.fragments
    strided = f.fragment_pattern == "strided"
    owner = [l % F if strided else l * F // len(sizes) for l in layers]
    for first, last in ((1, 8), (9, 16), (17, 21)):
        late = 1 if f.delay else 0  # then what is due at the end of a step goes at the next
        total = 0
        for k in range(max(1, first - late), last + 1 - late):
            if k % interval == 0:
                own = [sizes[l] for l in layers if owner[l] == (k // interval - 1) % F]
                blocks = sum(-(-size // 256) for size in own)
                blocks += -blocks % M if M > 2 else 0  # a whole number of blocks for each owner
                per_block = {"e3m0": 128 + 4, "int8": 256 + 4}.get(f.quantize)
                total += blocks * per_block if per_block else 8 * sum(own)
        counts.append(2 * (M - 1) / M * total)
    return counts


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
        "noloco": [8 * P * (2 if "pull" in case else 1) * (j != 0) for j in partners],
        "streaming": streaming_bytes(options, M, sizes) if f.tau == 8 else None,
    }[case.split()[0]]
    rows = [row["sync_bytes"] for row in run.rows("sync")]
    assert rows == pytest.approx(expected)
    if "noloco" in case and partners[1] == 0:
        return  # alone in the second round
    # In the second round everything is sent. The plan knows neither padding nor losses and norms.
    planned = P * (4 if f.tau == 8 and f.quantize != "none" else 8)
    planned *= train.METHODS[f.method].sent_vectors(f, M)
    padding = 2 * (M - 1) / M * (len(sizes) + 4 * M) * 256 * 260 / 256 if f.tau == 8 else 8 * 3 * M
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
        counts[case]["all-reduce"] -= 3 * L  # gradients of the warm-up
    assert counts == {
        "post_local_sgd": {"all-reduce": 4 * L, "all-gather": 4},
        "slowmo": {"all-reduce": 4 * L, "all-gather": 4},
        "co2": {"all-reduce": 4},
        "noloco": {"exchange": 4, "all-reduce": 2 * 5 + 1},
        # fragments sent after 4, 8, ..., 20 steps, and at the end the one that did not land there
        "streaming": {"all-reduce": 0, "all-gather": 5 + 1},
    }


# ---- what changes nothing ----


def every_round_end(method, model, mesh):
    """A tamper that changes nothing: all vectors at each round end, by step; first: at the first
    step of the run."""
    seen, before_step, after_step = {}, method.before_step, method.after_step
    names = method.shared + method.private

    def look(key):
        vectors = {name: getattr(method, name) for name in names} | {"x": model.master}
        seen[key] = {name: vector.clone() for name, vector in vectors.items()}

    def before_step_and_look():
        before_step()
        if "first" not in seen:
            look("first")

    def after_step_and_look(lr):
        after_step(lr)
        if method.round_ended:
            look(method.steps)

    method.before_step, method.after_step = before_step_and_look, after_step_and_look
    return lambda: seen


def assert_nothing_changes_a_bit(options, links, corpus_folder, tmp_path):
    """Not an evaluation, nor saving, nor one of `links`, nor a resume: in the warm-up, with work in
    flight, at the end."""
    steps = 2, 11, options["max_steps"]
    changes = [{}, dict(eval_interval=1), dict(checkpoint_interval=1, keep=100), *links]
    paths = [tmp_path / "2" / f"checkpoint-{step:08d}" for step in steps]
    changes += [dict(resume=str(path)) for path in paths]
    cases = [(all_vectors, tmp_path / str(i), options | more) for i, more in enumerate(changes)]
    quiet, *others = train_all(4, corpus_folder, *cases)
    losses = quiet.losses
    for other in others[:-3]:
        assert_same_run(quiet, other)
    for step, resumed in zip(steps, others[-3:]):
        quiet.losses = losses[step:]
        assert_same_run(quiet, resumed)


@pytest.mark.parametrize("case", ["slowmo", *OVERLAPPING])
def test_evaluation_a_slow_link_and_a_resume_change_no_bit(case, corpus_folder, tmp_path):
    # On 4x1 no two of NoLoCo's replicas are equal; in bf16 layers are gathered there, too.
    mesh = dict(dtype="bf16") if case == "noloco" else dict(shards=2)
    # With three layers a forward would start with a layer that an evaluation has gathered.
    options = CASES[case] | mesh | dict(n_layer=1)
    links = [dict(link_mbps=2.0)] if case in OVERLAPPING else []
    assert_nothing_changes_a_bit(options, links, corpus_folder, tmp_path)


def test_noloco_resumed_on_fewer_replicas_starts_from_the_mean(corpus_folder, tmp_path):
    options = CASES["noloco"] | dict(checkpoint_interval=1, keep=100)
    saved = run_training(4, corpus_folder, every_round_end, tmp_path / "4", **options)
    options |= dict(resume=tmp_path / "4" / "checkpoint-00000011", batch_size=4)
    resumed = run_training(2, corpus_folder, every_round_end, tmp_path / "2", **options)
    mean = lambda name: sum(rank["watched"][11][name] for rank in saved.ranks) / 4
    for rank in resumed.ranks:
        first = rank["watched"]["first"]
        torch.testing.assert_close(first["anchor"], mean("anchor"), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(first["momentum"], mean("momentum"), rtol=1e-12, atol=1e-15)
        assert torch.equal(first["x"], first["anchor"])


# ---- where two methods are the same ----


def heavy_ball(method, model, mesh):
    """DiLoCo with SGD(nesterov=False)."""
    begin = method.begin

    def begin_without_nesterov():
        begin()
        method.outer.param_groups[0]["nesterov"] = False

    method.begin = begin_without_nesterov


def wait_at_once(method, model, mesh):
    """CO2 with staleness 0."""
    sync = method.sync

    def sync_and_wait(norms):
        sync(norms)
        method.finish()

    method.sync = sync_and_wait


def silent(method, model, mesh):
    """Streaming DiLoCo that neither sends nor receives."""
    method.send, method.land = lambda p: None, lambda: None
    return before_finish(method, model, mesh)


def before_finish(method, model, mesh):
    """A tamper that changes nothing: the parameters before finish()."""
    seen, finish = {}, method.finish

    def look_and_finish():
        seen["x"] = model.master.clone()
        finish()

    method.finish = look_and_finish
    return lambda: seen


def test_methods_equal_each_other_where_they_must(corpus_folder):
    plain, common = dict(outer_lr=1.0, outer_momentum=0.0), LOCAL | dict(shards=2)
    ball = dict(outer_lr=0.8, outer_momentum=0.6)
    constant = dict(min_lr_ratio=1.0)  # from the third step on
    one = dict(fragments=1, delay=0, quantize="none")
    run = lambda method, *more, tamper=None: (
        tamper, None, functools.reduce(dict.__or__, more, common | dict(method=method)),
    )  # fmt: skip
    runs = train_all(
        4, corpus_folder,
        run("post_local_sgd"), run("slowmo", plain), run("diloco", plain),
        run("diloco", ball, constant, tamper=heavy_ball), run("slowmo", ball, constant),
        run("co2", ball, constant, dict(staleness_penalty=False), tamper=wait_at_once),
        run("noloco", ball, constant, dict(pull=0.8), tamper=every_round_end),
        run("diloco", ball), run("streaming_diloco", ball, one),
        run("streaming_diloco", dict(alpha=1.0, delay=1, fragments=2), tamper=before_finish),
        run("streaming_diloco", dict(alpha=1.0, delay=1, fragments=2), tamper=silent),
    )  # fmt: skip
    averaging, heavy, nesterov, alone = runs[:3], runs[3:7], runs[7:9], runs[9:]
    for first, *others in (averaging, heavy, nesterov):
        for other in others:
            assert_equal_runs(first, other)
    pairs = heavy[-1].ranks  # NoLoCo, M = 2: a_0 = a_1
    for rank, twin in zip(pairs[:2], pairs[2:]):
        for step in (7, 11, 15, 17):
            ours, theirs = rank["watched"][step]["anchor"], twin["watched"][step]["anchor"]
            assert torch.equal(ours, theirs)
    local, without = alone
    assert local.losses == without.losses  # alpha 1: x_i as if the others were not there
    for ours, theirs in zip(local.ranks, without.ranks):
        assert torch.equal(ours["watched"]["x"], theirs["watched"]["x"])


def momentum_sgd(method, model, mesh):
    """Replace AdamW's update by that of torch.optim.SGD(momentum=0.6)."""
    buffer = torch.zeros_like(model.master)

    def step(optimizer):
        buffer.mul_(0.6).add_(model.grad)
        model.master.sub_(buffer, alpha=optimizer.param_groups[0]["lr"])

    torch.optim.AdamW.step = step  # in this rank's process only


def test_sgd_and_tau_1_equal_minibatch_sgd(corpus_folder):
    """SlowMo: with SGD's momentum, while the learning rate changes."""
    options = dict(max_steps=8, grad_clip=0, shards=2)
    local = options | dict(sync_warmup_steps=0, tau=1)
    slowmo = local | dict(method="slowmo", outer_lr=1.0, outer_momentum=0.6)
    plain, with_momentum, averaged, slow = train_all(
        4, corpus_folder,
        (inner_sgd, None, options | dict(method="minibatch")),
        (momentum_sgd, None, options | dict(method="minibatch")),
        (inner_sgd, None, local | dict(method="post_local_sgd")),
        (inner_sgd, None, slowmo),
    )  # fmt: skip
    for run, expected in (averaged, plain), (slow, with_momentum):
        losses = [sum(row["loss"]) / 2 for row in run.rows("sync")]
        assert losses == pytest.approx(expected.losses, rel=1e-10)


# ---- single rounds ----


def lone(method_class, **options):
    """A method with a tiny model on one rank, at the end of its warm-up."""
    mesh = Mesh(1, torch.device("cpu"), alone=True)
    return started(method_class, mesh, **options)


def started(method_class, mesh, **options):
    model = ShardedModel(ModelConfig(2, 1, 6, 8, 257), mesh, torch.float64)
    config = method_class.Config(sync_warmup_steps=0, **options)
    method = method_class(model, mesh, config, max_steps=100, seed=3)
    method.before_step()
    return method


def do_round(method, d, lr=0.01):
    """A round in which the parameters have moved by -d; lr: the inner rate of its last step."""
    method.model.master.copy_(method.anchor - d)
    method.lr, method.rounds = lr, method.rounds + 1
    method.sync(method.local_stats().view(1, -1))


def some_d(method, rounds):
    generator = torch.Generator().manual_seed(1)
    size = method.model.master.numel()
    return torch.randn(rounds, size, generator=generator, dtype=torch.float64)


def test_co2_is_slowmo_one_round_late():
    flags = dict(outer_lr=0.7, outer_momentum=0.6)
    co2, slowmo = lone(CO2, staleness_penalty=False, **flags), lone(SlowMo, **flags)
    start = co2.anchor.clone()
    slow_anchor = start
    for d in some_d(co2, 5):
        do_round(co2, d)
        torch.testing.assert_close(co2.anchor, slow_anchor, rtol=0, atol=1e-12)
        assert torch.equal(co2.model.master, co2.anchor)
        do_round(slowmo, d)
        slow_anchor = slowmo.anchor.clone()
    waited = []
    co2.handle = Handle(SimpleNamespace(wait=lambda: waited.append(True)))
    co2.drain()  # waits, but does not apply what has arrived
    assert waited and not torch.allclose(co2.anchor, slow_anchor)
    for _ in range(2):  # the second finish() changes nothing
        co2.finish()
        torch.testing.assert_close(co2.anchor, slow_anchor, rtol=0, atol=1e-12)
        assert torch.equal(co2.model.master, co2.anchor)


def test_co2_limits_its_momentum_and_its_gap():
    phi = 0.5
    method = lone(CO2, outer_momentum_clip=phi, outer_lr=0.7)
    for i, d in enumerate(some_d(method, 6)):
        before = method.anchor.clone()
        do_round(method, d)
        assert method.momentum.abs().max() == (phi if i else 0)
        move = (method.anchor - before).norm().item()
        assert method.r.item() == pytest.approx(move, rel=1e-9) and method.r <= method.C


def test_slowmo_goes_through_a_rate_of_zero():
    method = lone(SlowMo)
    for d, lr in zip(some_d(method, 3), (0.01, 0.0, 0.01)):
        do_round(method, d * lr, lr)
        assert method.anchor.isfinite().all()


def test_one_replica_averages_nothing_and_slowmo_without_momentum_is_lookahead():
    averaging, slowmo = lone(PostLocalSGD), lone(SlowMo, outer_momentum=0.0, outer_lr=0.3)
    x = averaging.model.master.clone()
    averaging.sync(averaging.local_stats().view(1, -1))
    assert torch.equal(averaging.model.master, x)
    (d,) = some_d(slowmo, 1)
    expected = slowmo.anchor + 0.3 * ((slowmo.anchor - d) - slowmo.anchor)
    do_round(slowmo, d)
    torch.testing.assert_close(slowmo.model.master, expected, rtol=0, atol=1e-12)


def noloco_rounds():
    """[(a, u, d) before and (a, u) after a round] with different anchors and momenta, for some
    flags."""
    results, mesh = [], Mesh(1, torch.device("cpu"))
    for flags in (
        dict(outer_lr=0.8, outer_momentum=0.6, pull=1.1),
        dict(outer_lr=0.8, outer_momentum=0.6, pull=0.8),
        dict(outer_lr=0.0, outer_momentum=0.0, pull=1.0),
    ):
        method = started(NoLoCo, mesh, **flags)
        mixed = some_d(method, 3 * mesh.replicas)[3 * mesh.replica :]
        a, u, d = mixed[0], mixed[1], mixed[2]
        method.anchor.copy_(a), method.momentum.copy_(u)
        do_round(method, d)
        assert torch.equal(method.model.master, method.anchor)
        results.append((a, u, d, method.anchor.clone(), method.momentum.clone()))
    return results


@pytest.mark.parametrize("M", [3, 4])
def test_noloco_mean_follows_heavy_ball_and_pairs_average(M):
    different, same, mixing = zip(*run_ranks(M, noloco_rounds))
    for ranks in (different, same):
        a, u, d, new_a, new_u = (sum(vectors) / M for vectors in zip(*ranks))
        torch.testing.assert_close(new_u, 0.6 * u + 0.8 * d, rtol=0, atol=1e-12)
        torch.testing.assert_close(new_a, a - new_u, rtol=0, atol=1e-12)
    for i, rank in enumerate(mixing):
        j = partner(i, M, 3, 1)
        mean = (rank[0] + mixing[j][0]) / 2
        torch.testing.assert_close(rank[3], mean, rtol=0, atol=1e-12)


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
    lands; and checksums of what replicas share at each landing. The warm-up has three steps."""
    events, checksums, issue, land = [], [], mesh._issue, method.land
    names = {"all-to-all": "sent", "all-gather": "second hop"}

    def issue_and_look(group, operation, *rest):
        if method.local and group is mesh.sync and operation in names:
            events.append((names[operation], method.steps - 3, method.p))
        return issue(group, operation, *rest)

    def land_and_look():
        land()
        events.append(("landed", method.steps - 3, method.p))
        vectors = method.anchor, method.momentum
        checksums.append([zlib.crc32(vector.numpy()) for vector in vectors])

    mesh._issue, method.land = issue_and_look, land_and_look
    return lambda: (events, checksums)


def test_streaming_sends_each_fragment_once_per_tau_and_keeps_anchors_equal(corpus_folder):
    options = STREAMING | dict(delay=3, alpha=0.5, tamper=watch_fragments)
    ranks = run_training(4, corpus_folder, **options).ranks
    events, checksums = ranks[0]["watched"]
    assert all(rank["watched"] == (events, checksums) for rank in ranks)
    stages, expected = ("sent", "second hop", "landed"), []
    for k, p in [(4, 0), (8, 1), (12, 0), (16, 1)]:
        expected += zip(stages, (k, k + 2, k + 3), (p, p, p))
    # After step 21 fragment 0 lands early and fragment 1 is sent for the final model.
    expected += [("sent", 20, 0)] + [(stage, 21, 0) for stage in stages[1:]]
    assert events == expected + [(stage, 21, 1) for stage in stages]


@pytest.mark.parametrize("text, options", [
    ("--fragments 3: must divide --tau 8", STREAMING | dict(fragments=3)),
    ("--delay 4: must be below tau / fragments = 4", STREAMING | dict(delay=4)),
    ("--fragments 8: more than the model's layers", STREAMING | dict(fragments=8, delay=0)),
    ("--alpha 1.5: must be at most 1", STREAMING | dict(alpha=1.5)),
    ("--alpha", STREAMING | dict(alpha=-0.5)),
    ("--quantize", STREAMING | dict(quantize="fp8")),
    ("--method noloco: it needs at least two replicas", CASES["noloco"]),
    ("--outer_momentum", CASES["co2"] | dict(outer_momentum=1.0)),
])  # fmt: skip
def test_impossible_flags_are_one_line(text, options, corpus_folder, tmp_path):
    argv = [*flags(**options), "--data", str(corpus_folder), "--out_dir", str(tmp_path)]
    with pytest.raises(UserError) as error:
        launch.set_up(argv, train.METHODS, 0, 1)
    assert text in str(error.value) and "\n" not in str(error.value)
