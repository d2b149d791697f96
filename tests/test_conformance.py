"""Every EDiT of the project computes the rounds of examples/edit_rounds.json, and the check names
the equation that is broken."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

import edit
import one_page
from edit import PenaltyConfig
from plain import edit as plain_edit
from ranks import ROOT
from rows import each_row

sys.path.insert(0, str(ROOT / "examples"))
import check_edit
import edit_fsdp2
import make_edit_rounds
from check_edit import first_difference, read_vectors

VECTORS = read_vectors()
CONFIG = PenaltyConfig(**VECTORS["config"])
M, L = 3, 4


def tensors(layers) -> list:
    return [torch.tensor(layer, dtype=torch.float64) for layer in layers]


class Equations:
    """The pure functions of edit.py or edit_fsdp2.py, one after the other, for all replicas."""

    def __init__(self, module):
        self.m = module
        self.anchor = tensors(VECTORS["anchor"])
        self.momentum = [torch.zeros_like(a) for a in self.anchor]
        self.statistics = [torch.zeros(3, L, dtype=torch.float64) for _ in range(M)]

    def sync(self, d):
        m = self.m
        d = [tensors(layers) for layers in d]
        norms = torch.stack([torch.stack([d_l.norm() for d_l in d_i]) for d_i in d])
        limits = torch.stack([m.anomaly_limits(own, CONFIG) for own in self.statistics])
        flags = m.is_anomaly(norms, limits)
        lost = flags.all(dim=0)
        for i, own in enumerate(self.statistics):
            own = m.update_statistics(own, norms[i], ~flags[i], CONFIG)
            self.statistics[i] = m.forget_lost_layers(own, norms[i], lost)
        weights = m.replica_weights(norms, flags)
        dbar = []
        clip = []
        for l in range(L):
            mean = sum((weights[i, l] * d[i][l]).nan_to_num(0.0, 0.0, 0.0) for i in range(M))
            factor = m.clip_factor(mean.norm(), CONFIG.pseudo_grad_clip)
            lr, mu = CONFIG.outer_lr, CONFIG.outer_momentum
            a, b = self.anchor[l], self.momentum[l]
            m.nesterov_unless_flagged(a, b, mean * factor, lr, mu, (~lost[l]).to(mean.dtype))
            dbar.append(mean)
            clip.append(factor)
        return {
            "norms": norms,
            "limits": limits,
            "flags": flags,
            "weights": weights,
            "dbar": dbar,
            "clip": clip,
            "momentum": self.momentum,
            "anchor": self.anchor,
        }


class Page:
    """one_page.py's synchronize(), which shows neither the mean nor its clip."""

    def __init__(self):
        self.anchors = tensors(VECTORS["anchor"])
        self.outer = torch.optim.SGD(self.anchors, lr=0.7, momentum=0.5, nesterov=True)
        self.replicas = []
        for _ in range(M):
            layers = [torch.nn.Linear(a.numel(), 1, bias=False).double() for a in self.anchors]
            model = SimpleNamespace(layers=layers)
            self.replicas.append(SimpleNamespace(model=model, accepted=[[] for _ in layers]))

    def sync(self, d):
        limits = []
        for replica, d_i in zip(self.replicas, d):
            limits.append([one_page.anomaly_limit(norms) for norms in replica.accepted])
            for layer, anchor, d_l in zip(replica.model.layers, self.anchors, tensors(d_i)):
                layer.weight.data = (anchor - d_l)[None]
        norms, weights, flags = one_page.synchronize(
            self.replicas, self.anchors, self.outer, penalty=True
        )
        buffers = [self.outer.state[anchor]["momentum_buffer"] for anchor in self.anchors]
        found = {"norms": norms, "limits": limits, "flags": flags, "weights": weights}
        return found | {"momentum": buffers, "anchor": self.anchors}


def test_edit_py_and_edit_fsdp2_py_compute_the_rounds():
    assert first_difference(Equations(edit).sync, VECTORS) is None
    assert first_difference(Equations(edit_fsdp2).sync, VECTORS) is None


def test_one_page_computes_the_rounds():
    torch.set_default_dtype(torch.float64)
    try:
        assert first_difference(Page().sync, VECTORS) is None
    finally:
        torch.set_default_dtype(torch.float32)


def test_file_is_what_its_command_makes_with_plain_edit_py():
    made = make_edit_rounds.make_rounds()
    assert {name: made[name] for name in ("config", "anchor")} == {
        name: VECTORS[name] for name in ("config", "anchor")
    }
    rounds = iter(made["rounds"])
    assert first_difference(lambda d: next(rounds), VECTORS) is None
    text = make_edit_rounds.as_text(made)
    json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def test_rounds_take_every_branch():
    rounds = VECTORS["rounds"]
    flags = torch.tensor([round["flags"] for round in rounds])  # (rounds, M, L)
    limits = torch.tensor([[list(map(float, row)) for row in r["limits"]] for r in rounds])
    clips = torch.tensor([round["clip"] for round in rounds])
    lost = flags.all(dim=1)
    assert lost.nonzero().tolist() == [[13, 0], [15, 1]]
    assert flags[11].tolist() == [[False] * 4, [True] * 4, [False] * 4]
    assert flags[2, 1].tolist() == [False, True, False, False]  # not finite, without a limit
    assert limits[14, :, 0].isinf().all() and limits[-1, :, 0].isfinite().all()
    assert flags[16, :, 1].tolist() == [True, False, False]
    assert (clips == 1).any() and (clips < 1).any()


# ---- a broken equation is named ----


def own(module):
    """The functions of a module, to be replaced."""
    return SimpleNamespace(**vars(module))


def without_floor(statistics, config):
    count, mean, variance = statistics
    limits = mean + config.anomaly_threshold * variance.sqrt()
    return limits.where(count >= config.anomaly_warmup_rounds, torch.inf)


def with_old_mean(statistics, G, accepted, config):
    """The variance takes the mean before the update."""
    count, mean, variance = statistics
    new = edit.update_statistics(statistics, G, accepted, config)
    late = accepted & (count >= config.anomaly_warmup_rounds)
    alpha = config.anomaly_ema
    new[2] = ((1 - alpha) * variance + alpha * (G - mean) ** 2).where(late, new[2])
    return new


def with_flagged(statistics, G, accepted, config):
    return edit.update_statistics(statistics, G, torch.ones_like(accepted), config)


def step_of_momentum(anchor, momentum, dhat, lr, mu, moves):
    """Without Nesterov."""
    momentum.mul_(mu**moves).add_(dhat)
    anchor.addcmul_(momentum, moves, value=-lr)


def step_always(anchor, momentum, dhat, lr, mu, moves):
    edit.nesterov_unless_flagged(anchor, momentum, dhat, lr, mu, torch.ones_like(moves))


def norms_at_the_end(norms, flagged, weighted=True):
    """Flagged replicas are left out after the softmax, so weights do not sum to 1."""
    return torch.softmax(-norms.nan_to_num(math.inf), dim=0).masked_fill(flagged, 0.0)


BROKEN = {
    "no floor of sigma": ("anomaly_limits", without_floor, "limits"),
    "variance from the old mean": ("update_statistics", with_old_mean, "limits"),
    "flagged norms in the statistics": ("update_statistics", with_flagged, "limits"),
    "no new start": ("forget_lost_layers", lambda s, G, lost: s, "limits"),
    "NaN clears": ("forget_lost_layers", lambda s, G, lost: s.masked_fill(lost, 0.0), "limits"),
    "NaN is not flagged": ("is_anomaly", lambda G, limits: G > limits, "flags"),
    "two-sided": (
        "is_anomaly",
        lambda G, limits: edit.is_anomaly(G, limits) | ((G < 0.1) & limits.isfinite()),
        "flags",
    ),
    "weights that do not sum to 1": ("replica_weights", norms_at_the_end, "weights"),
    "equal weights": (
        "replica_weights", lambda G, flagged: edit.replica_weights(G, flagged, False), "weights"
    ),
    "no clip": ("clip_factor", lambda norm, phi: torch.ones_like(norm), "clip"),
    "no Nesterov": ("nesterov_unless_flagged", step_of_momentum, "anchor"),
    "no rollback": ("nesterov_unless_flagged", step_always, "momentum"),
}  # fmt: skip


@each_row("case", BROKEN)
def test_broken_equation_is_named(case):
    name, function, equation = BROKEN[case]
    module = own(edit)
    setattr(module, name, function)
    difference = first_difference(Equations(module).sync, VECTORS)
    assert difference and difference.split(": ")[1] == equation
    assert difference.endswith(check_edit.EQUATIONS[equation])


def test_check_reads_the_rounds_of_another_program(tmp_path, capsys):
    path = tmp_path / "found.json"
    anchors = [{"anchor": round["anchor"]} for round in read_vectors()["rounds"]]
    path.write_text(json.dumps(anchors))
    assert check_edit.main([str(path)]) == 0
    anchors[7]["anchor"][2][1] *= 1.001
    path.write_text(json.dumps(anchors))
    assert check_edit.main([str(path)]) == 1
    assert "round 7: anchor: " in capsys.readouterr().out
    assert check_edit.main([str(path), "0.1"]) == 0
    path.write_text(json.dumps([{}] * len(anchors)))
    assert check_edit.main([str(path)]) == 1  # nothing was compared
    assert check_edit.main([]) == 2


def test_wrong_plain_version_makes_another_file(monkeypatch):
    monkeypatch.setattr(plain_edit, "SIGMA_FLOOR", 0.06)
    rounds = iter(make_edit_rounds.make_rounds()["rounds"])
    assert "limits" in first_difference(lambda d: next(rounds), VECTORS)
