"""The page that students read first does what the distributed run does."""

import functools
import inspect
import shlex
from types import SimpleNamespace

import pytest
import torch

import one_page
import train
from config import parse
from edit import PenaltyConfig, anomaly_limits, update_statistics
from model import Llama, ModelConfig
from ranks import train_all
from rows import each_row

# The last round, the 15th, is shorter.
SICK_ROUND = 12
PAGE = dict(steps=52, sync_warmup=8, tau=3, sick_round=SICK_ROUND)
DISTRIBUTED = dict(sync_warmup_steps=8, tau=3, max_steps=52, scale_lr="3:42:44:100")
DISTRIBUTED |= dict(eval_interval=1, eval_batches=4, dtype="fp64")
DISTRIBUTED |= dict(n_layer=2, n_head=2, n_embd=16, batch_size=8)
DISTRIBUTED |= dict(lr=0.05, lr_warmup_steps=0, min_lr_ratio=1.0)


@pytest.fixture
def small_page(corpus, monkeypatch):
    """In fp64, so that only a wrong term differs from the distributed run. Returns the arguments of
    each show(): norms, weights, flags, [DiLoCo's loss, EDiT's loss], whether a replica is sick."""
    monkeypatch.setattr(one_page, "SHAPE", ModelConfig(2, 2, 16, 8))
    monkeypatch.setattr(one_page.data, "standard_library", lambda: corpus)
    monkeypatch.setattr(one_page, "Llama", lambda shape, seed: Llama(shape, seed).double())
    # A high rate, so that the replicas' norms and weights differ.
    monkeypatch.setattr(one_page, "learning_rate", lambda step, steps: 0.05)
    monkeypatch.setattr(one_page, "PHI", 0.2)  # so that the clip acts
    shown = []

    def show_and_note(round, *found):
        shown.append(found)
        show(round, *found)

    show = one_page.show
    monkeypatch.setattr(one_page, "show", show_and_note)
    return shown


def test_page_trains_as_the_distributed_run_until_a_replica_is_sick(small_page, corpus_folder):
    """Afterwards DiLoCo's replicas are far from everything, and differences of rounding grow, so
    there only what the page says is compared."""
    edit_flags = DISTRIBUTED | dict(method="edit", pseudo_grad_clip=one_page.PHI)
    diloco_flags = DISTRIBUTED | dict(method="diloco")
    edit_run, diloco_run = train_all(
        4, corpus_folder, (None, None, edit_flags), (None, None, diloco_flags)
    )
    one_page.train(**PAGE)
    syncs = edit_run.rows("sync")
    assert len(small_page) == len(syncs) == 15
    evals = [run.rows("eval")[-15:] for run in (diloco_run, edit_run)]  # without the warm-up's
    rounds = list(zip(small_page, syncs, *evals))

    for (norms, weights, flags, losses, _), sync, *rows in rounds[: SICK_ROUND - 1]:
        close = functools.partial(pytest.approx, rel=1e-6)  # norms and weights are fp32 in the page
        assert norms.norm(dim=1).tolist() == close(sync["pseudo_grad_norm"])
        assert weights.mean(dim=1).tolist() == close(sync["weight"])
        assert flags.sum(dim=1).tolist() == sync["dropped"] == [0] * 4
        assert losses == close([row["val_loss"] for row in rows])

    loss_before = evals[1][SICK_ROUND - 2]["val_loss"]
    for (_, weights, flags, losses, sick), sync, *rows in rounds[SICK_ROUND - 1 :]:
        dropped = [0, 0, 0, 4] if sick else [0] * 4
        assert flags.sum(dim=1).tolist() == sync["dropped"] == dropped
        assert (weights[3] == 0).all() == sick
        for diloco, edit in (losses, [row["val_loss"] for row in rows]):
            assert edit < loss_before + 0.1  # EDiT's loss stays where it is
            assert diloco > loss_before + 0.3  # DiLoCo's jumps and stays high

    # The penalty has acted, all of it, where the page says so.
    assert max(max(row["weight"]) for row in syncs[: SICK_ROUND - 1]) > 0.253
    assert min(row["clip"] for row in syncs) < 0.9
    assert [sick for *_, sick in small_page] == [number == SICK_ROUND for number in range(1, 16)]


def test_page_leaves_out_what_is_not_finite_and_keeps_a_layer_that_all_have_lost(capsys):
    """A lost layer does not move by the outer momentum either."""
    layers = [torch.nn.Linear(3, 2, bias=False) for _ in range(2)]
    replicas = [SimpleNamespace(model=SimpleNamespace(layers=[l]), accepted=[[]]) for l in layers]
    anchor = one_page.as_vector(layers[0]).clone()
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.5, nesterov=True)

    def sync(*moved):
        for layer, step in zip(layers, moved):
            start = anchor.clone().view(2, 3)
            layer.weight.data = start + step
        return one_page.synchronize(replicas, [anchor], outer, penalty=True)

    before = anchor.clone()
    sync(0.1, 0.1)
    torch.testing.assert_close(anchor, before + 0.7 * 1.5 * 0.1)
    before = anchor.clone()
    norms, weights, flags = sync(0.1, torch.nan)
    assert weights.flatten().tolist() == [1, 0] and flags.flatten().tolist() == [0, 1]
    assert anchor.isfinite().all() and not torch.equal(anchor, before)
    before = anchor.clone()
    norms, weights, flags = sync(torch.inf, torch.nan)
    assert weights.flatten().tolist() == [0, 0] and flags.flatten().tolist() == [1, 1]
    assert torch.equal(anchor, before)
    assert [len(replica.accepted[0]) for replica in replicas] == [2, 1]
    for layer in layers:
        assert torch.equal(one_page.as_vector(layer), anchor)

    for _ in range(10):  # so many are accepted before there are limits
        sync(0.1, 0.11)
    _, _, flags = sync(50.0, 60.0)  # both are far above their limits, so these start anew
    assert flags.flatten().tolist() == [1, 1]
    assert [replica.accepted[0] for replica in replicas] == [[], []]
    _, weights, flags = sync(50.0, 60.0)
    assert flags.flatten().tolist() == [0, 0]


def test_page_runs_on_one_thread(small_page, capsys):
    """With torch's default a loaded machine takes ten times as long."""
    torch.set_num_threads(2)
    one_page.train(M=1, steps=1, sync_warmup=1)
    assert torch.get_num_threads() == 1


def test_page_prints_a_row_per_round_and_says_which_replica_is_sick(capsys):
    norms = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    weights = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    flags = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    one_page.show(12, norms, weights, flags, [3.70921, 2.79379], sick=True)
    columns = capsys.readouterr().out.split("|")
    assert [" ".join(column.split()) for column in columns] == [
        "12 5.0 0.5", "0.00 1.00", "2 0", "2.7938 3.7092 <- replica 3 is sick"
    ]  # fmt: skip


@each_row("spread", [1.0, 0.01])  # below the floor of sigma, which is 5%
def test_limits_of_the_page_are_those_of_edit(spread):
    """The run above has too few rounds to show all of them."""
    generator = torch.Generator().manual_seed(1)
    norms = 1 + spread * torch.rand(40, generator=generator, dtype=torch.float64)
    statistics = torch.zeros(3, 1, dtype=torch.float64)
    accepted = torch.tensor([True])
    for seen, G in enumerate(norms):
        limit = anomaly_limits(statistics, PenaltyConfig()).item()
        assert one_page.anomaly_limit(norms[:seen].tolist()) == pytest.approx(limit, rel=1e-12)
        statistics = update_statistics(statistics, G[None], accepted, PenaltyConfig())


def test_page_has_the_rates_and_defaults_of_the_command_in_its_docstring():
    command = one_page.__doc__.split("train.py ")[1].replace("\\\n", " ")
    config = parse(shlex.split(command), train.METHODS)[0]
    for step in (0, 10, 15, 16, 50, 95):
        theirs = train.learning_rate(step, config)
        assert one_page.learning_rate(step, config.max_steps) == pytest.approx(theirs, rel=1e-12)
    ours = inspect.signature(one_page.train).parameters
    assert ours["steps"].default == config.max_steps
    assert ours["sync_warmup"].default == config.sync_warmup_steps
    assert ours["tau"].default == config.tau == config.eval_interval
    rounds_before = ours["sick_round"].default - 1
    first = config.sync_warmup_steps + rounds_before * config.tau + 1
    assert config.scale_lr == f"3:{first}:{first + config.tau - 1}:100"
    assert one_page.SEED == config.seed
    shape = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}
    assert one_page.SHAPE == ModelConfig(**shape | {"vocab_size": 257})
    assert one_page.DELTA == config.anomaly_threshold
    assert one_page.ALPHA == config.anomaly_ema
    assert one_page.PHI == config.pseudo_grad_clip
