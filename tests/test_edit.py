"""The penalty: its equations, rollback; what a sync sends, reads and allocates, and in which order.
Sick replicas are in test_methods.py."""

import functools
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edit import (
    PenaltyConfig,
    anomaly_limits,
    clip_factor,
    is_anomaly,
    replica_weights,
    update_statistics,
)
from mesh import Mesh
from ranks import method_alone, run_training
from reference import Sick

ROUNDS = dict(method="edit", tau=3, sync_warmup_steps=2, max_steps=14)  # four rounds
L = 4  # layers of the tiny model: embedding, 2 blocks, head


def test_weights_and_clip_factor_worked_out_by_hand():
    norms, none = torch.tensor([[1.0, 5.0], [2.0, 5.0]]), torch.zeros(2, 2, dtype=torch.bool)
    e = math.exp(-1.0)
    expected = torch.tensor([[1 / (1 + e), 0.5], [e / (1 + e), 0.5]])
    torch.testing.assert_close(replica_weights(norms, none), expected)
    assert torch.equal(replica_weights(norms, none, weighted=False), torch.full((2, 2), 0.5))
    norms = torch.tensor([[1e30], [3e30], [math.nan], [math.inf]])
    assert replica_weights(norms, ~norms.isfinite()).tolist() == [[1.0], [0.0], [0.0], [0.0]]
    assert replica_weights(norms, norms != 0).tolist() == [[0.0]] * 4
    assert clip_factor(torch.tensor(5.0), 10.0) == 1
    assert clip_factor(torch.tensor(20.0), 10.0) * 20 == pytest.approx(10)


def feed(norms, statistics=None, **flags):
    """One layer's norms, one after the other. Returns which are flagged, and the statistics."""
    statistics, flagged = torch.zeros(3, 1).double() if statistics is None else statistics, []
    for norm in norms:
        config, G = PenaltyConfig(**flags), torch.tensor([norm]).double()
        flagged.append(is_anomaly(G, anomaly_limits(statistics, config)))
        statistics = update_statistics(statistics, G, ~flagged[-1], config)
    return [bool(flag) for flag in flagged], statistics


def test_statistics_are_the_sample_mean_and_deviation_during_warmup_then_exponential():
    samples = [1.0, 1.2, 0.9, 1.1, 1.3]
    flagged, statistics = feed([*samples, 1.0], anomaly_warmup_rounds=5)
    early = torch.tensor(samples).double()
    mean = early.mean() + 0.02 * (1.0 - early.mean())
    variance = 0.98 * early.var() + 0.02 * (1.0 - mean) ** 2
    assert flagged == [False] * 6
    torch.testing.assert_close(statistics[:, 0], torch.stack([torch.tensor(6.0), mean, variance]))


def test_outlier_is_flagged_and_does_not_blind_the_statistics():
    assert not any(feed([*[1.0] * 12, 1.001, 1.1])[0])  # within the floor of sigma
    _, before = feed([1.0, 1.1, 0.9, 1.05] * 3)
    flagged, after = feed([100.0, math.nan, math.inf, 100.0], before)
    assert flagged == [True] * 4 and torch.equal(before, after)
    assert feed([0.01], before)[0] == [False]  # a small norm is good news
    assert feed([100.0], before, anomaly_elimination=False)[0] == [False]


def test_warmup_flags_only_non_finite_norms_and_takes_at_least_two():
    flagged, statistics = feed([math.nan, 1.0, math.inf, 1.0])
    assert flagged == [True, False, True, False] and statistics[:2, 0].tolist() == [2, 1]
    assert feed([1.0, 5.0, 100.0], anomaly_warmup_rounds=0)[0] == [False, False, True]


@pytest.mark.parametrize("options", [
    # at the end of the next round or, if there is none, at the end of the training
    ROUNDS | dict(max_steps=20), ROUNDS | dict(max_steps=11),
    dict(method="streaming_edit", tau=8, sync_warmup_steps=2, fragments=2, max_steps=60),
])  # fmt: skip
def test_three_rounds_rolled_back_in_a_row_end_the_training(options, corpus_folder):
    steps = [4, 7, 10] if options["method"] == "edit" else range(3, 60)
    with pytest.raises(AssertionError, match="UserError: all replicas were left out of the last 3"):
        run_training(2, corpus_folder, Sick(math.nan, [0, 1], *steps), **options)


def spoil(method, model, mesh):
    model.master.fill_(math.nan)


def test_only_a_sync_repairs_a_replica_so_the_warmup_ends_if_it_diverges(corpus_folder):
    with pytest.raises(AssertionError, match="UserError: diverged at step 1: loss nan"):
        run_training(2, corpus_folder, spoil, **ROUNDS)


class LargestNew(TorchDispatchMode):
    """Elements of the largest tensor that is none of `known` and no view of them."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.elements = {x.untyped_storage()._cdata for x in known}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in self.known:
            self.elements = max(self.elements, out.numel())
        return out


def on_meta(replicas=1, **options):
    """A method on the meta device, which has no data, so every way to read it on the host raises an
    error; one of so many replicas. Returns it and [what it sends or waits for, ...]."""
    mesh, events = Mesh(1, torch.device("meta")), []
    mesh.replicas = mesh.sync.size = replicas

    def issue(group, operation, *_, **__):
        name = f"{group.name} {operation}"
        events.append(f"{name} {sum(event.startswith(name) for event in events)}")
        return SimpleNamespace(wait=functools.partial(events.append, f"wait: {events[-1]}"))

    mesh._issue = issue
    return method_alone(mesh, **options), events


@pytest.mark.parametrize("elimination", [True, False])
def test_sync_reads_nothing_on_the_host_and_allocates_only_scalars(elimination):
    """The collectives are those that edit.py promises."""
    method, events = on_meta(method="edit", anomaly_elimination=elimination)
    with LargestNew(method.model.master, method.anchor, method.momentum) as largest:
        method.end_round()
        assert method.model.pre_layer_hook
        method.drain()
    assert method.rounds == 1 and not method.model.pre_layer_hook and len(method.clips) == L
    assert 0 < largest.elements <= 3 * L  # d_i lives in the storage of x_i
    # pseudo-gradients, and rows with norms and limits; norms, and norms for the clip
    expected = {"sync all-reduce": L, "sync all-gather": 1}
    expected |= {"shard all-reduce": 1, "shard all-gather": L}
    assert Counter(event[:-2] for event in events if "wait" not in event) == expected
    x = torch.zeros(2, device="meta")
    for read in (
        x[0].item, lambda: bool(x[0]), x.tolist, x.numpy, lambda: x.to("cpu"),
        lambda: torch.zeros(2).copy_(x),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, NotImplementedError, TypeError), match="meta"):
            read()


@pytest.mark.parametrize("elimination, quantize", [(True, "e3m0"), (False, "none")])
def test_fragment_reads_nothing_on_the_host(elimination, quantize):
    flags = dict(anomaly_elimination=elimination, quantize=quantize, tau=4, fragments=2)
    method, events = on_meta(4, method="streaming_edit", **flags)
    for p in range(2):
        method.send(p)
        method.halfway()
        method.land()
    assert len(method.landings) == 4  # layers
    # of each fragment: of the norms, then of the means of its two layers
    waits = [event for event in events if event.startswith("wait: sync all-gather")]
    assert waits == [f"wait: sync all-gather {number}" for number in range(6)]


def test_sync_of_offloaded_vectors_writes_their_new_values_back(monkeypatch):
    """On a GPU, to() copies what --offload keeps on the host."""
    results = []
    for _ in range(2):
        method = method_alone(method="edit")
        vectors = method.model.master, method.anchor, method.momentum
        vectors[0].mul_(0.9)
        method.end_round()
        method.drain()
        results.append([vector.clone() for vector in vectors])
        monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, **more: x.clone())
    assert results[0][2].norm() > 0 and all(map(torch.equal, *results))


def test_all_layers_are_sent_before_the_first_wait_and_arrive_in_the_forward():
    """Each layer is waited for only when the forward has computed the layers before it."""
    method, events = on_meta(method="edit")
    for l, layer in enumerate(method.model.layers):
        layer.register_forward_pre_hook(lambda *_, l=l: events.append(f"compute {l}"))
    method.end_round()
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    method.model.forward(tokens, tokens)
    expected = [f"sync all-reduce {l}" for l in range(L)]
    for l in range(L):
        expected += [f"wait: sync all-reduce {l}", f"compute {l}"]
    assert [each for each in events if "sync all-reduce" in each or "compute" in each] == expected


def test_evaluation_between_round_end_and_forward_changes_neither_losses_nor_bytes(corpus_folder):
    often, never = (
        run_training(4, corpus_folder, **ROUNDS | dict(shards=2, eval_interval=n))
        for n in (1, 10**6)
    )
    assert often.losses == never.losses and len(often.rows("eval")) > 3
    assert [rank["sent"] for rank in often.ranks] == [rank["sent"] for rank in never.ranks]
