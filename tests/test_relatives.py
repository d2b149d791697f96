"""The relatives: what those without a barrier send, NoLoCo's pairs, CO2's traffic, fragments."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_edit import on_meta
from test_methods import ROWS, TABLE, flags_of, is_slow, selected, trained
from torch.nn.functional import cosine_similarity

import train
from mesh import Handle, Mesh
from model import Llama, ModelConfig
from ranks import CPU, method_alone, run_config, run_ranks
from relatives import sparse
from relatives.noloco import partner
from relatives.qsr import QSR
from relatives.quantize import pack, unpack
from relatives.robust import flag_weights, middle
from rows import each_row


def sends_without_a_barrier(case):
    """test_plan.py has the bytes of the methods with a barrier."""
    method = train.METHODS[TABLE[case][0]["method"]]
    return not method.barrier


def layer_sizes(f):
    """P/N of each layer."""
    shape = ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, 257)
    sizes = []
    for layer in Llama(shape, seed=0).layers:
        count = sum(p.numel() for p in layer.parameters())
        sizes.append(math.ceil(count / (16 * f.shards)) * 16)
    return sizes


def bytes_of_fragments(f, M, sizes):
    """Of a round, in which each layer is sent once."""
    block_bytes = {"e3m0": 128 + 4, "int8": 256 + 4, "none": 256 * 8}
    owners = M if M > 2 else 1
    total = 0
    for size in sizes:
        blocks_of_an_owner = math.ceil(size / (256 * owners))
        total += owners * blocks_of_an_owner * block_bytes[f.quantize]
    sent = 2 * (M - 1) / M * total
    if f.method == "streaming_edit":
        sent += 16 * (M - 1) * len(sizes)  # norms and flags
    return sent


def test_rounds_of_qsr_at_a_tiny_rate_last_to_the_end_of_the_run():
    method = object.__new__(QSR)
    method.config = SimpleNamespace(tau=4, qsr_c=0.02, max_steps=100)
    for lr, steps in (0.01, 4), (0.002, 100), (2.1e-4, 9070), (1e-200, math.inf), (0.0, math.inf):
        method.rates = [lr]
        assert method.steps_of_round() == steps


def vectors_of_noloco(f, M, t):
    """How many vectors replica 0 sends in round t."""
    if f.global_every and t % f.global_every == 0:
        return 2 * (M - 1) / M
    alone = partner(0, M, f.seed, t) == 0
    return 0 if alone else 1


SENDING = [row for row in ROWS if sends_without_a_barrier(row[0])]


@pytest.mark.parametrize("case, mesh, transport", selected(SENDING), ids=str)
def test_bytes_equal_the_docstrings_and_the_plan(case, mesh, transport, corpus_folder, request):
    M = mesh[0]
    f = run_config(**flags_of(case, mesh))
    run = trained(request.session, corpus_folder, mesh, transport, is_slow(case, mesh))[case]
    sent = [row["sync_bytes"] for row in run.rows("sync")]
    sizes = layer_sizes(f)
    vector = 8 * sum(sizes)  # fp64
    planned = vector * f.sent_vectors(M)
    if f.method in ("co2", "eager"):
        assert sent == pytest.approx([planned] * len(sent))
    elif f.method == "noloco":
        rounds = range(1, len(sent) + 1)
        assert sent == pytest.approx([vector * vectors_of_noloco(f, M, t) for t in rounds])
    else:
        assert sent[1] == pytest.approx(bytes_of_fragments(f, M, sizes))
        if f.quantize != "none":  # the plan counts from fp32, and knows neither padding nor norms
            planned /= 2
        assert planned * (1 - 1e-9) <= sent[1] <= 2.5 * planned


@each_row("M, global_every, expected", [
    (4, 0, 1), (3, 0, 2 / 3), (4, 2, (1 + 1.5) / 2), (3, 4, (3 * 2 / 3 + 4 / 3) / 4)
])  # fmt: skip
def test_noloco_plans_the_mean_of_its_rounds(M, global_every, expected):
    f = run_config(method="noloco", global_every=global_every)
    assert f.sent_vectors(M) == pytest.approx(expected)


def pairs_of_rounds(M, seed):
    """The partner of each replica, in many rounds."""
    return [[partner(i, M, seed, t) for i in range(M)] for t in range(1, 200)]


@each_row("M", [2, 3, 4, 7, 8])
def test_noloco_pairs_are_a_perfect_matching_and_new_each_round(M):
    rounds = pairs_of_rounds(M, seed=5)
    met = set()
    for partners in rounds:
        alone = 0
        for i, j in enumerate(partners):
            assert partners[j] == i
            alone += i == j
            met.add((i, j))
        assert alone == M % 2
    everybody_meets_everybody = M * (M - 1) + M * (M % 2)
    assert len(met) == everybody_meets_everybody
    if M > 2:
        assert rounds != pairs_of_rounds(M, seed=6)


def test_robust_repairs_one_replica_alone():
    method = method_alone(method="robust")
    method.model.master[0] = math.nan
    method.end_round()
    assert method.model.master.isfinite().all()


def test_slowmo_goes_through_a_rate_of_zero():
    method = method_alone(method="slowmo")
    for lr in (0.01, 0.0, 0.01):
        method.rates = [lr]
        method.model.master.mul_(1 - lr)
        method.sync()
        assert method.anchor.isfinite().all()


@each_row("name", ["co2", "eager"])
def test_mean_is_waited_for_one_round_late_and_before_a_checkpoint(name):
    method = method_alone(method=name)
    waited = []
    work = SimpleNamespace(wait=lambda: waited.append(None))
    method.mesh.all_reduce = lambda x, group: Handle([work])
    method.rounds = 1
    method.sync()
    assert len(waited) == 0
    method.rounds = 2
    method.sync()
    assert len(waited) == 1
    method.drain()
    assert len(waited) == 2


def test_method_without_a_barrier_records_its_own_row_only():
    method, events = on_meta(4, method="co2")
    method.end_round()
    assert [len(value) for value in vars(method.rows).values()] == [1, 1, 1]
    assert "sync all-gather 0" not in events


def test_second_hops_of_a_fragment_start_halfway():
    """Fragment 0: layers 0 and 2 of four."""
    method, events = on_meta(4, method="streaming_diloco", tau=8, fragments=2, delay=3)
    method.model.metrics.append(SimpleNamespace(read=lambda: [0.0, 0.0, 0.0]))
    for k in 5, 6, 7:
        method.local_steps = k - 1
        method.before_step()
        method.steps = k
        method.after_step(0.0, SimpleNamespace(loss=0.0))
        events.append(f"step {k}")
    assert method.landed == 0
    assert [event for number, event in enumerate(events) if event not in events[:number]] == [
        "sync all-to-all 0",  # of both layers
        "step 5",
        "wait: sync all-to-all 0",
        "sync all-gather 0",
        "step 6",
        "wait: sync all-gather 0",
        "step 7",
    ]


def test_one_bit_edit_starts_all_second_hops_of_a_warmup_step_before_it_waits_for_one():
    flags = dict(sync_warmup_steps=1, warmup_format="int8")
    method, events = on_meta(4, method="one_bit_edit", **flags)
    layers = len(method.model.layers)
    handles = [method.sum_gradient(l) for l in range(layers)]
    for handle in handles:
        handle.wait()
    waits = [n for n, event in enumerate(events) if event.startswith("wait: sync all-to-all")]
    assert len(waits) == layers
    for event in events[waits[0] : waits[-1]]:
        assert not event.startswith("wait: sync all-gather")


def disagreeing(*shape, seed=0):
    """Pseudo-gradients of replicas, (M, n), that have a common part."""
    torch.manual_seed(seed)
    common = torch.randn(shape[1]).double()
    return common + 0.5 * torch.randn(shape).double()


def flag(d):
    """The Flag Aggregator of pseudo-gradients (M, n)."""
    return flag_weights(d @ d.T) @ d


def column(*factors):
    """A factor for each replica."""
    return torch.tensor(factors, dtype=torch.float64)[:, None]


def test_flag_of_replicas_that_agree_is_what_they_send():
    common = torch.randn(500).double()
    torch.testing.assert_close(flag(common.expand(4, -1)), common)
    assert (flag(torch.zeros(4, 500).double()) == 0).all()


def test_flag_follows_the_others_if_one_replica_sends_the_wrong_sign():
    d = disagreeing(4, 500)
    negated = d * column(-1.0, 1.0, 1.0, 1.0)
    c = flag_weights(negated @ negated.T)
    assert c[0] < 0
    assert (c[1:] > 0).all()
    assert cosine_similarity(flag(negated), flag(d), dim=0) > 0.99


def test_flag_counts_an_opposed_replica_as_0_not_as_minus_1():
    common = torch.randn(500).double()
    opposed = common * column(1.0, 1.0, -1.0, 1.0)
    torch.testing.assert_close(flag(opposed), 0.75 * common)


def test_flag_takes_directions_and_the_median_of_lengths():
    d = disagreeing(4, 500)
    scaled = d * column(1.0, 1.0, 100.0, 1.0)
    cosine = cosine_similarity(flag(scaled), flag(d), dim=0)
    torch.testing.assert_close(cosine, torch.ones(()).double())
    assert flag(scaled).norm() < 1.2 * flag(d).norm()


def test_flag_does_not_depend_on_the_order_of_replicas():
    d = disagreeing(4, 500)
    torch.testing.assert_close(flag(d[[3, 1, 0, 2]]), flag(d))


def combine(pseudo_gradients):
    """What each rank's Robust makes of (M, n): it holds its shard of its replica's row."""
    method = method_alone(Mesh(2, CPU), method="robust")
    mesh = method.mesh
    results = []
    for d in pseudo_gradients:
        own = d[mesh.replica].chunk(mesh.shards)[mesh.shard_index].clone()
        method.combine(own)
        results.append(own)
    return results


def test_robust_on_shards_is_the_flag_and_stays_finite_if_squares_overflow():
    d = disagreeing(3, 40)
    outlier = d * column(1.0, 1000.0, 1.0)
    huge = d * column(1.0, 1e200, 1.0)
    infinite = d * column(1.0, torch.inf, 1.0)
    cases = [outlier, huge, infinite, 0 * d]
    results = run_ranks(6, combine, cases)
    for n in 0, 1:  # shards
        for rank in range(n, 6, 2):
            combined, of_huge, of_infinite, of_zero = results[rank]
            expected = flag(outlier).chunk(2)[n]
            torch.testing.assert_close(combined, expected, rtol=1e-12, atol=1e-12)
            assert of_huge.isfinite().all()
            assert cosine_similarity(of_huge, d.mean(dim=0).chunk(2)[n], dim=0) > 0.9
            assert of_huge.norm() < 2 * expected.norm()
            assert of_infinite.isfinite().all()
            assert (of_zero == 0).all()


def test_median_stays_between_the_honest_replicas():
    d = torch.randn(5, 100)
    d[3] = 1e30 * torch.randn(100)
    honest = d[[0, 1, 2, 4]]
    median = middle(d, 2)
    assert (honest.amin(dim=0) <= median).all()
    assert (median <= honest.amax(dim=0)).all()


def test_median_of_four_is_the_mean_of_the_middle_two():
    d = torch.randn(4, 100)
    middle_two = d.sort(dim=0).values[1:3]
    torch.testing.assert_close(middle(d, 1), middle_two.mean(dim=0))


def chunks_of_two_layers(vector):
    """Two chunks and 48 elements; then, beside padding, 16 elements."""
    return [vector[: 2 * 4096 + 48], vector[-16:]]


def test_largest_elements_of_long_and_short_chunks_are_found():
    model = SimpleNamespace(used_views=chunks_of_two_layers)
    memory = torch.randn(100 + 2 * 4096 + 72)
    vector = memory[100:]
    found, positions = sparse.largest(vector, model, 0.05)
    assert [tuple(part.shape) for part in positions] == [(2, 205), (1, 2), (1, 1)]
    at = [row for part in found for row in part]
    position = [row for part in positions for row in part]
    firsts = (0, 4096, 2 * 4096, len(vector) - 16)
    sizes = (4096, 4096, 48, 16)
    for l in range(4):
        assert torch.equal(at[l], firsts[l] + position[l])
        chunk = vector[firsts[l] : firsts[l] + sizes[l]].abs()
        largest = chunk.topk(len(at[l])).values
        assert torch.equal(vector[at[l]].abs().sort(descending=True).values, largest)


def test_at_least_one_element_of_a_chunk_is_found():
    model = SimpleNamespace(used_views=lambda vector: [vector])
    _, positions = sparse.largest(torch.randn(16), model, 0.01)
    assert positions[0].shape == (1, 1)


@each_row("n", [7, 8])
def test_positions_survive_12_bits_and_payloads_their_bytes(n):
    firsts = 4096 * torch.arange(n)
    positions = torch.tensor([0, 4095, 255, 256, 17, 2048, 3000, 1])[:n]
    payload = torch.arange(5, dtype=torch.uint8)
    sent = []

    def gather_rows(row, group):
        sent.append(row)
        return torch.stack([row, row])

    mesh = SimpleNamespace(gather_rows=gather_rows, sync_group=None)
    for at, theirs in sparse.gather_entries(mesh, [firsts + positions], [positions], payload):
        assert torch.equal(at, firsts + positions)
        assert torch.equal(theirs, payload)
    assert len(sent[0]) == 12 + 5  # three bytes for two positions


@each_row("bits", [1, 2, 4, 8])
def test_codes_of_one_to_eight_bits_survive_packing(bits):
    codes = (torch.arange(48) % 2**bits).to(torch.uint8)
    packed = pack(codes, bits)
    assert len(packed) == 6 * bits
    assert torch.equal(unpack(packed, bits).flatten(), codes)


def test_sparse_messages_of_zeros_are_zeros():
    method = method_alone(method="sparse_loco")
    method.sync()
    assert torch.equal(method.model.master, method.anchor)
    assert (method.error == 0).all()


def zero_one_adam_with_variances(*V):
    """V: of every third element, and of its two neighbours."""
    # n_embd 16: no padding
    method = method_alone(method="zero_one_adam", n_embd=16, sync_warmup_steps=1, steps=1)
    for first, value in enumerate(V):
        method.model.exp_avg_sq[first::3] = value
    return method


def test_nothing_moves_where_the_variance_is_zero():
    method = zero_one_adam_with_variances(0.0, 1.0, 4.0)
    model = method.model
    anchor = method.anchor.clone()
    model.grad.fill_(1e3)
    optimizer = SimpleNamespace(betas=(0.9, 0.95), lr=0.5, matrices=[])
    method.inner_step(optimizer)
    moved = anchor - model.master
    assert (moved[::3] == 0).all()
    assert (moved[1::3] == 0.5).all()  # at most lr: the bound

    method.rounds = 3
    method.rates = [0.5]
    method.sync()
    assert torch.equal(model.master[::3], anchor[::3])
    assert (model.exp_avg[::3] == 0).all()
    torch.testing.assert_close(anchor[1::3] - model.master[1::3], moved[1::3])
    # u / sum of lr = moved sqrt(V) / lr
    torch.testing.assert_close(model.exp_avg[2::3], torch.full_like(model.exp_avg[2::3], 2.0))
