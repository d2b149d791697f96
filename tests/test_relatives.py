"""The relatives: what those without a barrier send, NoLoCo's pairs, CO2's staleness, fragments."""

from types import SimpleNamespace

import pytest

import train
from mesh import Handle
from model import Llama, ModelConfig
from ranks import method_alone, run_config
from relatives.noloco import partner
from test_edit import on_meta
from test_methods import ROWS, TABLE, flags_of, trained

SENDING = [  # test_plan.py has the bytes of the methods with a barrier
    row for row in ROWS
    if not train.METHODS[TABLE[row[0]][0]["method"]].barrier and "moments" not in row[0]
]  # fmt: skip


def layer_sizes(f):
    """P/N of each layer."""
    layers = Llama(ModelConfig(f.n_layer, f.n_head, f.n_embd, f.block_size, 257)).layers
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


@pytest.mark.parametrize("case, mesh, transport", SENDING, ids=str)
def test_bytes_equal_the_docstrings_and_the_plan(case, mesh, transport, corpus_folder):
    (M, _), f = mesh, run_config(**flags_of(case, mesh))
    rows, sizes = trained(corpus_folder, mesh, transport)[case].rows("sync"), layer_sizes(f)
    sent, planned = [row["sync_bytes"] for row in rows], 8 * sum(sizes) * f.sent_vectors(M)  # fp64
    if f.method == "co2":
        assert sent == pytest.approx([planned] * len(sent))
    elif f.method == "noloco":
        alone = [partner(0, M, f.seed, t + 1) == 0 for t in range(len(sent))]
        assert sent == pytest.approx([0 if without else planned for without in alone])
    else:  # the plan counts from fp32, and knows neither padding nor norms
        planned /= 1 if f.quantize == "none" else 2
        assert sent[1] == pytest.approx(bytes_of_fragments(f, M, sizes))
        assert planned * (1 - 1e-9) <= sent[1] <= 2 * planned


@pytest.mark.parametrize("M", [2, 3, 4, 7, 8])
def test_noloco_pairs_are_a_perfect_matching_and_new_each_round(M):
    rounds = [tuple(partner(i, M, 5, t) for i in range(M)) for t in range(1, 200)]
    for pairs in rounds:
        assert all(pairs[j] == i for i, j in enumerate(pairs))
        assert sum(i == j for i, j in enumerate(pairs)) == M % 2  # alone
    met = {(i, pairs[i]) for pairs in rounds for i in range(M)}
    assert len(met) == M * (M - 1) + M * (M % 2)  # everybody meets everybody
    assert rounds != [tuple(partner(i, M, 6, t) for i in range(M)) for t in range(1, 200)] or M == 2


def test_slowmo_goes_through_a_rate_of_zero():
    method = method_alone(method="slowmo")
    for lr in (0.01, 0.0, 0.01):
        method.lr = lr
        method.model.master.mul_(1 - lr)
        method.sync()
        assert method.anchor.isfinite().all()


def test_co2_waits_one_round_late_and_before_a_checkpoint():
    method, waited = method_alone(method="co2"), []
    work = SimpleNamespace(wait=lambda: waited.append(None))
    method.mesh.all_reduce = lambda x, group: Handle([work])
    for wait, count in (method.sync, 0), (method.sync, 1), (method.drain, 2):
        wait()
        assert len(waited) == count


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
