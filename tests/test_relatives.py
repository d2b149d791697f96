"""The relatives: what those without a barrier send, NoLoCo's pairs, CO2's staleness, fragments."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_edit import on_meta
from test_methods import ROWS, TABLE, flags_of, is_slow, selected, trained

import train
from mesh import Handle, Mesh
from model import Llama, ModelConfig
from ranks import CPU, method_alone, run_config, run_ranks
from relatives import sparse
from relatives.noloco import partner
from relatives.quantize import pack, unpack
from relatives.robust import flag_weights, middle

SENDING = [  # test_plan.py has the bytes of the methods with a barrier
    row for row in ROWS
    if not train.METHODS[TABLE[row[0]][0]["method"]].barrier and "moments" not in row[0]
]  # fmt: skip


def layer_sizes(f):
    """P/N of each layer."""
    layers = Llama(ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, 257), seed=0).layers
    counts = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    return [-(-count // (16 * f.shards)) * 16 for count in counts]


def bytes_of_fragments(f, M, sizes):
    """Of a round, in which each fragment is sent once."""
    total = 0
    for p in range(f.fragments):
        blocks = sum(-(-size // 256) for size in sizes[p :: f.fragments])
        blocks += -blocks % M if M > 2 else 0  # a whole number of blocks for each owner
        total += blocks * {"e3m0": 128 + 4, "int8": 256 + 4, "none": 256 * 8}[f.quantize]
    norms = 16 * (M - 1) * len(sizes) if f.method == "streaming_edit" else 0
    return 2 * (M - 1) / M * total + norms


@pytest.mark.parametrize("case, mesh, transport", selected(SENDING), ids=str)
def test_bytes_equal_the_docstrings_and_the_plan(case, mesh, transport, corpus_folder):
    (M, _), f = mesh, run_config(**flags_of(case, mesh))
    rows, sizes = trained(corpus_folder, mesh, transport, is_slow(case))[case].rows("sync"), layer_sizes(f)
    sent, planned = [row["sync_bytes"] for row in rows], 8 * sum(sizes) * f.sent_vectors(M)  # fp64
    if f.method in ("co2", "eager"):
        assert sent == pytest.approx([planned] * len(sent))
    elif f.method == "noloco":
        expected, planned = [], 8 * sum(sizes)
        for t in range(1, len(sent) + 1):
            globally = f.global_every and t % f.global_every == 0
            alone = partner(0, M, f.seed, t) == 0
            each = 2 * (M - 1) / M if globally else 0 if alone else 1
            expected.append(each * planned)
        assert sent == pytest.approx(expected)
    else:  # the plan counts from fp32, and knows neither padding nor norms
        planned /= 1 if f.quantize == "none" else 2
        assert sent[1] == pytest.approx(bytes_of_fragments(f, M, sizes))
        assert planned * (1 - 1e-9) <= sent[1] <= 2 * planned


def test_noloco_plans_the_mean_of_its_rounds():
    for M, H, expected in (4, 0, 1), (3, 0, 2 / 3), (4, 2, (1 + 1.5) / 2), (3, 4, (3 * 2 / 3 + 4 / 3) / 4):
        planned = run_config(method="noloco", global_every=H).sent_vectors(M)
        assert planned == pytest.approx(expected)


@pytest.mark.parametrize("M", [2, 3, 4, 7, 8])
def test_noloco_pairs_are_a_perfect_matching_and_new_each_round(M):
    rounds = [tuple(partner(i, M, 5, t) for i in range(M)) for t in range(1, 200)]
    for pairs in rounds:
        assert all(pairs[j] == i for i, j in enumerate(pairs))
        assert sum(i == j for i, j in enumerate(pairs)) == M % 2  # alone
    met = {(i, pairs[i]) for pairs in rounds for i in range(M)}
    assert len(met) == M * (M - 1) + M * (M % 2)  # everybody meets everybody
    assert rounds != [tuple(partner(i, M, 6, t) for i in range(M)) for t in range(1, 200)] or M == 2


def test_robust_repairs_one_replica_alone():
    method = method_alone(method="robust")
    method.model.master[0] = math.nan
    method.end_round()
    assert method.model.master.isfinite().all()


def test_slowmo_goes_through_a_rate_of_zero():
    method = method_alone(method="slowmo")
    for lr in (0.01, 0.0, 0.01):
        method.lr = lr
        method.model.master.mul_(1 - lr)
        method.sync()
        assert method.anchor.isfinite().all()


@pytest.mark.parametrize("name", ["co2", "eager"])
def test_mean_is_waited_for_one_round_late_and_before_a_checkpoint(name):
    method, waited = method_alone(method=name), []
    work = SimpleNamespace(wait=lambda: waited.append(None))
    method.mesh.all_reduce = lambda x, group: Handle([work])
    for wait, count in (method.sync, 0), (method.sync, 1), (method.drain, 2):
        method.rounds += 1
        wait()
        assert len(waited) == count


def test_method_without_a_barrier_records_its_own_row_only():
    method, events = on_meta(4, method="co2")
    method.end_round()
    assert [len(value) for value in vars(method.exchanged).values()] == [1, 1, 1]
    assert "sync all-gather 0" not in events


def test_second_hop_of_a_fragment_starts_halfway():
    method, events = on_meta(4, method="streaming_diloco", tau=8, fragments=2, delay=3)
    method.model.metrics.append(SimpleNamespace(read=lambda: [0.0, 0.0, 0.0]))
    for k in 5, 6, 7:
        method.local_steps = k - 1
        method.before_step()
        method.steps = k
        method.after_step(0.0, SimpleNamespace(loss=0.0))
        events.append(str(k))
    assert method.landed == 0 and events == [
        "sync all-to-all 0", "5",
        "wait: sync all-to-all 0", "sync all-gather 0", "6",
        "wait: sync all-gather 0", "7",
    ]  # fmt: skip


def test_second_hops_of_all_layers_start_before_one_is_waited_for():
    warmup, first = on_meta(4, method="one_bit_edit", sync_warmup_steps=1, warmup_format="int8")
    for handle in [warmup.sum_gradient(l) for l in range(len(warmup.model.layers))]:
        handle.wait()
    rounds, second = on_meta(4, method="one_bit_edit", sync_warmup_steps=1, steps=1)
    rounds.sync()
    rounds.drain()
    for events in first, second:
        waits = [k for k, event in enumerate(events) if event.startswith("wait: sync all-to-all")]
        between = events[waits[0] : waits[-1]]
        assert len(waits) == len(rounds.model.layers)
        assert not any(event.startswith("wait: sync all-gather") for event in between)


def test_flag_follows_the_others_whatever_one_replica_sends():
    torch.manual_seed(0)
    common, d = torch.randn(500).double(), torch.randn(4, 500).double()
    d = common + 0.5 * d
    combined = lambda d: flag_weights(d @ d.T, torch.ones(4).double()) @ d
    torch.testing.assert_close(combined(common.expand(4, -1)), common)
    assert (combined(0 * d) == 0).all()
    honest, negated = combined(d), d * torch.tensor([[-1.0], [1.0], [1.0], [1.0]])
    c = flag_weights(negated @ negated.T, torch.ones(4).double())
    assert c[0] < 0 and (c[1:] > 0).all()
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(combined(negated), honest, dim=0) > 0.99
    opposed = common * torch.tensor([[1.0], [1.0], [-1.0], [1.0]])
    torch.testing.assert_close(combined(opposed), 0.75 * common)  # it counts as 0, not as -1
    scaled = d * torch.tensor([[1.0], [1.0], [100.0], [1.0]])
    torch.testing.assert_close(cosine(combined(scaled), honest, dim=0), torch.ones(()).double())
    assert combined(scaled).norm() < 1.2 * honest.norm()  # a median of lengths
    torch.testing.assert_close(combined(d[[3, 1, 0, 2]]), honest)


def combined_flag(pseudo_gradients):
    """What each rank's Robust makes of (replicas, n): it holds its shard of its replica's row."""
    method = method_alone(Mesh(2, CPU), method="robust")
    mesh, results = method.mesh, []
    for d in pseudo_gradients:
        own = d[mesh.replica].chunk(mesh.shards)[mesh.shard_index].clone()
        method.combine(own)
        results.append(own)
    return results


def test_flag_does_not_depend_on_the_outliers_size_even_if_its_square_overflows():
    torch.manual_seed(0)
    common, d = torch.randn(40).double(), torch.randn(3, 40).double()
    d = common + 0.5 * d
    d[:, 20:] *= 100  # the two shards of a replica have elements of other sizes
    sizes = torch.tensor([[0, n, 0] for n in (10, 600, -600)]).double().exp2()
    cases = [d * factors[:, None] for factors in sizes]
    cases += [torch.stack([d[0], torch.full((40,), torch.inf), d[2]]), 0 * d]
    large, huge, tiny, infinite, zero = zip(*run_ranks(6, combined_flag, cases))
    expected = (flag_weights(cases[0] @ cases[0].T, torch.ones(3).double()) @ cases[0]).chunk(2)
    for rank in range(6):
        torch.testing.assert_close(large[rank], expected[rank % 2], rtol=1e-12, atol=1e-12)
        assert torch.equal(huge[rank], large[rank])  # powers of 2: nothing is rounded
        assert tiny[rank].isfinite().all() and tiny[rank].norm() > 0
        assert infinite[rank].isfinite().all() and (zero[rank] == 0).all()


def test_median_stays_between_the_honest_replicas():
    d = torch.randn(5, 100)
    d[3] = 1e30 * torch.randn(100)
    honest = d[[0, 1, 2, 4]]
    median = middle(d, 2)
    assert (honest.amin(dim=0) <= median).all() and (median <= honest.amax(dim=0)).all()
    torch.testing.assert_close(middle(d[:4], 1), d[:4].sort(dim=0).values[1:3].mean(dim=0))


def test_largest_elements_of_long_and_short_chunks_are_found():
    model = SimpleNamespace(used_views=lambda v: [v[: 2 * 4096 + 48], v[-16:]])  # 8 of padding
    memory = torch.randn(100 + 2 * 4096 + 72)
    vector = memory[100:]
    ends = 4096, 2 * 4096, 2 * 4096 + 48, 2 * 4096 + 72
    at, positions = sparse.largest(vector, model, 0.05)
    assert [tuple(part.shape) for part in positions] == [(2, 205), (1, 2), (1, 1)]
    firsts = at - torch.cat([part.view(-1) for part in positions])
    for first, end, k in zip((*ends[:2], 0, ends[3] - 16), (*ends[1:3], ends[0], ends[3]), (205, 2, 205, 1)):
        found = vector[at[firsts == first]].abs().sort(descending=True).values
        assert torch.equal(found, vector[first:end].abs().sort(descending=True).values[:k])
    _, (_, _, one) = sparse.largest(vector, model, 0.01)
    assert one.shape == (1, 1)  # at least one


@pytest.mark.parametrize("n", [7, 8])
def test_positions_survive_12_bits_and_payloads_their_bytes(n):
    firsts = 4096 * torch.arange(n)
    positions = torch.tensor([0, 4095, 255, 256, 17, 2048, 3000, 1])[:n]
    payload = torch.arange(5, dtype=torch.uint8)
    sent = []
    gather_rows = lambda row, group: sent.append(row) or torch.stack([row, row])
    mesh = SimpleNamespace(gather_rows=gather_rows, sync=None)
    for at, theirs in sparse.gather_entries(mesh, firsts + positions, [positions.view(1, n)], payload):
        assert torch.equal(at, firsts + positions) and torch.equal(theirs, payload)
    assert len(sent[0]) == 12 + 5  # three bytes for two positions


def test_codes_of_one_to_eight_bits_survive_packing():
    for bits in 1, 2, 4, 8:
        codes = (torch.arange(48) % 2**bits).to(torch.uint8)
        packed = pack(codes, bits)
        assert len(packed) == 6 * bits and torch.equal(unpack(packed, bits).flatten(), codes)


def test_sparse_messages_of_zeros_are_zeros():
    method = method_alone(method="sparse_loco")
    method.sync()
    assert torch.equal(method.model.master, method.anchor) and (method.error == 0).all()


def test_nothing_moves_where_the_variance_is_zero():
    # n_embd 16: no padding
    method = method_alone(method="zero_one_adam", n_embd=16, sync_warmup_steps=1, steps=1)
    model, anchor = method.model, method.anchor.clone()
    model.exp_avg_sq[::3], model.exp_avg_sq[1::3], model.exp_avg_sq[2::3] = 0.0, 1.0, 4.0
    optimizer = SimpleNamespace(betas=(0.9, 0.95), lr=0.5, matrices=[])
    model.grad.fill_(1e3)
    method.inner_step(optimizer)
    moved = anchor - model.master
    assert (moved[::3] == 0).all() and (moved[1::3] == 0.5).all()  # at most lr: the bound
    method.lr_sum, method.rounds = 0.5, 3
    method.sync()
    assert torch.equal(model.master[::3], anchor[::3]) and (model.exp_avg[::3] == 0).all()
    torch.testing.assert_close(anchor[1::3] - model.master[1::3], moved[1::3])
    torch.testing.assert_close(model.exp_avg[2::3], torch.full_like(model.exp_avg[2::3], 2.0))
