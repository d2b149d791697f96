"""lab/: each experiment makes the runs whose results are kept, and RESULTS.md shows these results."""

import math
import os
import re
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from edit import PenaltyConfig
from lab import plot, rows, sweep, table, worth
from plumbing.plan import link_seconds, round_seconds
from model import Llama, ModelConfig
from ranks import ROOT
from test_readme import RESULTS, TEXT

SCRIPTS = sorted(ROOT.glob("lab/experiments/*.sh"))
NOT_STARTED = {"two_gpus", "after"}  # one makes no figure, one copies models of other runs
EXPERIMENTS = [path for path in SCRIPTS if path.stem not in NOT_STARTED]
KEPT = sorted(ROOT.glob("lab/results/*.csv"))
NO_RUNS = {"timeline"}  # CSV files that are not lab.table's
TUNED_IN = {  # sweep with --best -> kept runs of its tuning, if they have another name
    "tau": "outer_steps",
    "frontier": "outer_steps_2000",
    "frontier_muon": "outer_steps_2000",
}
MACHINE = {"corpus_hash", "backend"}  # what `auto` and the built-in corpus became there
RELATIVES = (ROOT / "relatives" / "README.md").read_text()
LOG = (ROOT / "lab" / "LOG.md").read_text()


def commands(path, folder) -> list:
    """The words of each command that an experiment starts. None is really started."""
    for name in "python", "torchrun":
        program = folder / name
        lines = [
            "#!/bin/sh",
            f'printf "%s\\0" {name} "$@" >> {folder}/seen',
            f"echo >> {folder}/seen",
        ]
        program.write_text("\n".join(lines) + "\n")
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["sh", str(path)], check=True, env=environment, cwd=folder)
    lines = (folder / "seen").read_text().splitlines()
    return [line.split("\0")[:-1] for line in lines]


def planned(path, folder) -> dict:
    """Name of a sweep -> the configs of its runs."""
    found = defaultdict(list)
    for words in commands(path, folder):
        if words[:3] == ["python", "-m", "lab.sweep"]:
            args, axes = sweep.read_command(words[3:])
            root = folder / args.name
            runs, _ = sweep.plan(root, axes, args.ranks, args.plain)
            if args.best:
                tried, _ = sweep.plan(root, axes | {"seed": [args.best]}, args.ranks, args.plain)
                if args.name not in TUNED_IN:
                    found[f"{args.name}_tune"] += [run.config for run in tried]
                kept = rows.read_csv(kept_file(TUNED_IN.get(args.name, f"{args.name}_tune")))
                best = sweep.choose(tried, [kept_loss(run.config, kept) for run in tried])
                settings = [run.setting() for run in best]
                runs = [run for run in runs if run.setting() in settings]
            found[args.name] += [run.config for run in runs]
    return found


def kept_file(name) -> Path:
    return ROOT / f"lab/results/{name}.csv"


def kept_loss(config, kept) -> float:
    """Of a planned run, in a file with more or fewer columns. Averaged gradients without a rival
    need not be in there."""
    flags = rows.settings(config)
    for run in kept:
        known = run.flags.keys() & flags.keys() - MACHINE
        if run.seed == config["seed"] and all(run.flags[name] == flags[name] for name in known):
            if run.flags["method"] == config["method"]:
                return run.loss
    assert config["method"] == "minibatch"
    return math.inf


@pytest.fixture
def with_gpus(monkeypatch):
    """Some scripts ask for one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    large = SimpleNamespace(total_memory=10**12)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: large)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_makes_exactly_the_runs_of_its_results(path, tmp_path, with_gpus):
    for name, configs in planned(path, tmp_path).items():
        if name == "tune" or name in NO_RUNS:
            continue
        runs = rows.read_csv(kept_file(name))
        names = {flag for run in runs for flag in run.flags} - MACHINE
        columns = sorted(names)
        expected = sorted(str((run.values(columns), run.seed)) for run in runs)
        found = set()
        for config in configs:
            flags = rows.settings(config)
            found.add(str((tuple(flags.get(flag) for flag in columns), config["seed"])))
        assert sorted(found) == expected


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_files_of_an_experiment_are_kept_and_the_texts_name_it(path, tmp_path):
    assert path.read_text().startswith("# ")
    assert f"sh lab/experiments/{path.name}" in TEXT + RESULTS + RELATIVES + LOG
    for words in commands(path, tmp_path):
        assert words[0] == "torchrun" or words[:2] == ["python", "-m"]
        if words[2] == "lab.table":
            table.read_command(words[3:])
        if "--out" in words and path.stem != "tune":
            out = words[words.index("--out") + 1]
            assert list(ROOT.glob(f"{out}.*"))


def test_results_are_those_of_the_experiments():
    written = "".join(path.read_text() for path in SCRIPTS)
    for path in KEPT:
        assert re.search(rf"lab/results/{path.stem}\b", written), path
    pictures = {path.name for path in ROOT.glob("lab/results/*.svg")}
    shown = set(re.findall(r"lab/results/(\w+\.svg)", TEXT + RESULTS + RELATIVES))
    assert shown <= pictures
    assert {path.suffix for path in ROOT.glob("lab/results/*")} <= {".csv", ".svg", ".md"}


def test_table_and_picture_of_worth_follow_from_kept_runs(tmp_path, monkeypatch):
    found = list(map(worth.Result, worth.LINES))
    for line in table.markdown(worth.table_lines(found)).splitlines():
        assert line in RESULTS.splitlines()
    data = []
    monkeypatch.setattr(plot, "save", lambda picture, drawn, path: data.append(drawn))
    pytest.importorskip("matplotlib")
    worth.draw(found, tmp_path / "x.svg")
    assert plot.checksum(data[0]) in (ROOT / "lab/results/worth_over_link.svg").read_text()


def harm(name, base, columns) -> dict:
    """Values of columns -> factor of the learning rate -> how much the loss is above the base: mean,
    lowest and highest of the seeds."""
    runs = rows.read_csv(kept_file(name))
    table.page(runs, [base], [])
    found = defaultdict(dict)
    for (rate, *case), line in rows.find_lines(runs, ["scale_lr", *columns]).items():
        over = [100 * run.over for run in line]
        shown = f"{statistics.mean(over):+.1f}% ({min(over):+.1f} to {max(over):+.1f})"
        found[tuple(case)][rate.split(":")[-1]] = shown
    return found


def test_one_machine_alone_ends_as_low_with_a_quarter_of_the_batch():
    loss = statistics.mean(run.loss for run in rows.read_csv(kept_file("worth_small")))
    assert f"rate and beta2, a machine alone ends at {loss:.3f}, too." in " ".join(RESULTS.split())
    assert f"| one machine alone | {loss:.3f} |" in RESULTS


def test_table_of_the_dose_follows_from_kept_runs():
    cells = defaultdict(dict)
    for column, name in ("one round later", "dose_272"), ("at the end", "dose"):
        for (method,), doses in harm(name, "scale_lr=none", ["method"]).items():
            for factor, shown in doses.items():
                cells[factor][method, column] = shown
    assert len(cells) == 5
    order = [(m, c) for m in ("diloco", "edit") for c in ("one round later", "at the end")]
    for factor in cells.keys() - {"none"}:
        row = " | ".join(cells[factor][key] for key in order)
        assert f"| x {factor} | {row} |" in RESULTS


def test_table_of_the_price_of_rounds_follows_from_kept_runs():
    both = ("minibatch", "edit")
    files = {"size": both, "length": both, "frontier": both, "worth": ["minibatch"]}
    pairs = {}  # (parameters, steps) -> method -> seed -> loss
    for file, methods in files.items():
        for run in rows.read_csv(kept_file(file)):
            if run.flags["method"] in methods and run.seed in worth.SEEDS:
                parameters = {40: "0.11", 72: "0.29"}.get(run.flags.get("n_embd"), "0.92")
                losses = pairs.setdefault((parameters, int(run.results["steps"])), {})
                losses.setdefault(run.flags["method"], {})[run.seed] = run.loss
    pairs = {key: losses for key, losses in pairs.items() if len(losses) == 2}
    assert len(pairs) == 6
    over = {}
    for key, losses in pairs.items():
        over[key] = [losses["edit"][s] / losses["minibatch"][s] - 1 for s in worth.SEEDS]
    half = 100 * table.Spread.of(over.values()).half_interval(len(worth.SEEDS))
    wsd = rows.read_csv(kept_file("wsd"))
    table.page(wsd, ["method=minibatch"], [])
    with_wsd = {}  # steps -> distances
    for (method, steps), line in rows.find_lines(wsd, ["method", "max_steps"]).items():
        if method == "edit":
            with_wsd[steps] = table.distances_of(line)
    spread = table.Spread.of(with_wsd.values())
    common = {run.seed for run in wsd if run.flags["max_steps"] == 4000}
    last = []
    for steps in 2000, 4000:
        own = [r.over for r in wsd if r.flags["max_steps"] == steps and r.seed in common and r.over]
        assert len(own) == 3
        last.append(f"{100 * statistics.mean(own):.1f}%")
    text = " ".join(RESULTS.split())
    assert f"With wsd it stays: {last[0]} and {last[1]} on the three common seeds." in text
    for (parameters, steps), found in over.items():
        means = [statistics.mean(pairs[parameters, steps][method].values()) for method in both]
        row = f"| {parameters} million | {steps:,} | {means[0]:.3f} | {means[1]:.3f} |"
        row += f" +{100 * statistics.mean(found):.1f}% |"
        if parameters == "0.92":
            own = with_wsd[steps]
            row += f" {100 * statistics.mean(own):+.1f}%"
            row += f" +- {100 * spread.half_interval(len(own)):.1f}%"
        assert f"{row} |" in RESULTS
    assert f"| EDiT above (each +- {half:.1f}%) |" in RESULTS
    rates = {run.flags["lr"]: run.loss for run in rows.read_csv(kept_file("worth_rates"))}
    assert min(rates, key=rates.get) == 0.0045 and len(rates) == 4  # the best one of 2,000 steps
    text = " ".join(RESULTS.split())
    tokens = []  # for each parameter, where all have as many
    for channels, heads, steps in (40, 2, 233), (72, 2, 623), (128, 4, 2000):
        model = Llama(ModelConfig(n_embd=channels, n_head=heads, vocab_size=257))
        parameters = sum(p.numel() for p in model.parameters())
        tokens.append(f"{2048 * steps / parameters:.1f}")
    assert parameters == worth.PARAMETERS
    assert f"each model gets {min(tokens)} to {max(tokens)} tokens for each parameter" in text


def overtakes_gbps(gradients, rounds, loss, hides) -> str:
    """From which link on averaged gradients are worth more than rounds that end at this loss. hides:
    their backward hides as much of the exchange as it can."""
    worth_of_rounds = lambda mbps: rounds.minutes_alone(loss) / rounds.minutes(mbps)
    alone = gradients.minutes_alone(gradients.loss)

    def fits(mbps):
        minutes = gradients.minutes(mbps)
        if hides:
            link_s = link_seconds(gradients.bytes / gradients.steps, mbps)
            step_s = round_seconds("minibatch", 1, gradients.t, link_s, worth.LAYERS)
            minutes = gradients.steps * step_s / 60
        return alone / minutes >= worth_of_rounds(mbps)

    return f"{worth.slowest_mbps(fits) / 1000:.1f}"


def test_sentences_on_worth_follow_from_its_table():
    text = " ".join(RESULTS.split())
    found = {line.name: worth.Result(line) for line in worth.LINES}
    pays = {name: worth.rounded(result.pays_from_mbps()[0]) for name, result in found.items()}
    gradients, bits = found["averaged gradients"], found["averaged gradients, 16 bits"]
    edit, long = found["EDiT, tau 16"], found["EDiT, tau 64"]
    first, second = pays["averaged gradients"], pays["averaged gradients, 16 bits"]
    assert f"worth one machine from {first} Mbit/s on, in 16 bits from {second}, EDiT" in text
    assert f"from {pays['EDiT, tau 16']}, in rounds of 64 from {pays['EDiT, tau 64']}." in text
    for name in "Streaming EDiT", "0/1 Adam", "EDiT in 1 bit with Muon":
        line = {"Streaming EDiT": "Streaming EDiT, 4 bits", "0/1 Adam": "0/1 Adam, 1 bit"}
        assert f"{name} pays from {pays[line.get(name, 'EDiT, 1 bit, Muon')]} Mbit/s on" in text

    ends = (edit.loss, edit.loss + edit.half, edit.loss - edit.half)
    middle, low, high = (f"{worth.steps_alone(loss, edit.alone) / edit.steps:.0%}" for loss in ends)
    assert f"one machine alone has it after {middle} ({low} to {high}) of them" in text
    shown = []
    for line in gradients, bits:
        middle, first, last = (overtakes_gbps(line, edit, loss, False) for loss in ends)
        shown += [middle, f"({first} to {last})"]
    middle, interval, *of_bits = shown
    assert f"above {middle} Gbit/s {interval} averaged gradients overtake EDiT" in text
    assert f"overtake EDiT, in 16 bits above {' '.join(of_bits)}." in text
    hidden = [overtakes_gbps(line, edit, edit.loss, True) for line in (gradients, bits)]
    assert f"overtake EDiT at {hidden[0]} Gbit/s, in 16 bits at {hidden[1]} Gbit/s" in text

    fastest = long.worth(1e9)[0]
    assert f"In rounds of 64 steps EDiT is worth {fastest:.1f} at most" in text
    large = found["averaged gradients, batches x 16"]
    assert f"16 times as large end at {large.loss:.2f} in place of {edit.loss:.2f}" in text
    muon = found["EDiT, 1 bit, Muon"]
    assert f"takes {1000 * edit.t:.0f} ms, and one alone" in text
    assert f"all four batches, {1000 * edit.a:.0f} ms" in text
    shown = f"machines are worth {edit.a / edit.t:.1f} (with Muon {muon.a / muon.t:.1f}, because"
    assert shown in text
    assert f"first machine sends {worth.COPIED_BYTES / 1e6:.0f} MB of copies" in text
    free = {}  # ms of a step without a link
    for run in rows.read_csv(kept_file("worth_link")):
        if run.flags["link_mbps"] == 0 and run.flags.get("tau") == 16:
            free[run.flags["method"]] = run.results["step_ms"]
    longer = free["streaming_edit"] / free["edit"] - 1
    assert f"a step of Streaming EDiT took {longer:.0%} longer than one of EDiT.)" in text
    shown = []  # where the backward hides all that it can
    for line in gradients, bits:
        link_s = link_seconds(line.bytes / line.steps, 1000)
        step_s = round_seconds("minibatch", 1, line.t, link_s, worth.LAYERS)
        shown.append(f"{line.minutes_alone(line.loss) * 60 / line.steps / step_s:.1f}")
    assert f"worth {shown[0]} at 1,000 Mbit/s, in 16 bits {shown[1]}." in text


def test_models_that_go_on_began_with_equal_losses():
    losses = defaultdict(dict)  # method -> seed -> loss
    steps = set()  # of averaged gradients
    for run in rows.read_csv(kept_file("equal")):
        losses[run.flags["method"]][run.seed] = run.loss
        if run.flags["method"] == "minibatch":
            steps.add(run.flags["max_steps"])
    over = [100 * (loss / losses["minibatch"][s] - 1) for s, loss in losses["edit"].items()]
    assert len(over) == 8
    text = " ".join(RESULTS.split())
    assert f"train for fewer, {min(steps)} to {max(steps)}, so that the losses are about" in text
    shown = f"EDiT's is {-statistics.mean(over):.1f}% lower (from {-min(over):.1f}% lower"
    assert f"{shown} to {max(over):.1f}% higher)" in text


def test_bits_of_10_million_parameters_are_those_of_kept_runs():
    runs = rows.read_csv(kept_file("frontier_10m"))
    table.page(runs, ["method=minibatch"], [])
    over = defaultdict(list)
    for run in runs:
        if run.flags["method"] == "one_bit_edit" and run.over is not None:
            over[run.flags["quantize"]].append(run.over)
    two, one = (100 * statistics.mean(over[bits]) for bits in ("two_bits", "sign"))
    assert f"two bits end {two:.0f}% and one bit {one:.0f}%" in " ".join(RESULTS.split())


def test_sentences_on_the_parts_of_the_penalty_follow_from_kept_runs():
    parts = ["anomaly_elimination", "weighted_averaging", "pseudo_grad_clipping"]
    mean = lambda shown: float(shown.split("%")[0])
    clip, rule = [], []  # one round later, and at the end
    for suffix, most in ("_272", 0.2), ("", 0.1):
        alone = harm(f"dose_parts{suffix}", "scale_lr=none", parts)
        (of_the_rule,) = harm(f"loss_rule{suffix}", "scale_lr=3:241:256:1", []).values()
        for part in ("yes", "no", "no"), ("no", "yes", "no"):
            assert max(abs(mean(shown)) for shown in alone[part].values()) <= most
        assert max(abs(mean(of_the_rule[factor])) for factor in ("3", "30", "100")) <= 0.1
        rule.append(f"{mean(of_the_rule['10']):+.1f}%")
        means = [mean(alone["no", "no", "yes"][factor]) for factor in ("10", "30", "100")]
        clip.append("{}%, {}% and {}%".format(*means))
    text = " ".join(RESULTS.split())
    assert "within 0.1% of that of an undisturbed run (one round later within 0.2%)" in text
    assert f"is {clip[0]} higher one round later, and {clip[1]} at the end" in text
    assert f"but for x 10 ({rule[0]}, at the end {rule[1]})" in text


def test_picture_of_the_dose_shows_the_kept_runs():
    runs = []
    for name in "dose", "dose_parts", "loss_rule":
        runs += rows.read_csv(kept_file(name))
    found = plot.curves(runs, rows.find_columns(runs)[0], "scale_lr")
    panel = plot.Panel("scale_lr", "val_loss", "")
    written = plot.checksum([list(plot.lines_of(found, panel).values())])
    assert written in (ROOT / "lab/results/dose_of_all.svg").read_text()


def test_sentence_on_rates_follows_from_kept_runs():
    runs = rows.read_csv(kept_file("rates"))
    table.page(runs, ["method=diloco"], [])
    lines = rows.find_lines(runs, ["method", "lr"])
    over = [table.distances_of(line) for (method, _), line in lines.items() if method == "edit"]
    means = sorted(100 * statistics.mean(found) for found in over)
    half = 100 * table.Spread.of(over).half_interval(3)
    best, *_, worst = (
        statistics.mean(run.loss for run in line) for line in list(lines.values())[:4]
    )
    text = " ".join(RESULTS.split())
    assert f"EDiT ends {means[0]:.1f}% to {means[-1]:.1f}% above DiLoCo" in text
    assert f"each +- {half:.1f}% (n = 3;" in text
    assert f"with 8 times the rate they end {100 * (worst / best - 1):.0f}% higher" in text


def test_picture_of_the_gain_shows_the_kept_runs():
    runs = rows.read_csv(kept_file("gain"))
    panel = plot.Panel("gain", "over", "")
    written = plot.checksum([list(plot.lines_of(plot.gain_curves(runs), panel).values())])
    assert written in (ROOT / "lab/results/gain.svg").read_text()


def test_gains_in_the_sentences_are_those_of_the_kept_runs():
    above = {}  # tau -> [(gain, percent above the best)]; the default
    for row in plot.gain_curves(rows.read_csv(kept_file("gain"))):
        above.setdefault(row["variant"], []).append((row["gain"], row["over"]))
    best = [min(points, key=lambda point: point[1])[0] for points in above.values()]
    assert 0.95 < min(best) and max(best) < 1.25
    text = " ".join(RESULTS.split())
    four = sorted(above["tau 4"])
    near = [gain for gain, percent in four if percent < 1]
    assert f"In rounds of 4 steps gains of {near[0]:.1f} and {near[1]:.1f} are best" in text
    high = [percent for gain, percent in four if gain > 1.5]
    assert f"from 1.5 on the loss is {high[0]:.0f}% to {high[-1]:.0f}% higher" in text
    longer = [p for tau in ("tau 16", "tau 64") for g, p in above[tau] if 0.8 < g < 1.6]
    *others, slowest = sorted(longer)
    assert f"others from 0.8 to 1.6 cost at most {others[-1]:.1f}%. But momentum" in text
    losses = {}  # tau -> (loss, outer_lr, outer_momentum)
    steps = ["tau", "outer_lr", "outer_momentum"]
    for (tau, *step), line in rows.find_lines(rows.read_csv(kept_file("gain")), steps).items():
        losses.setdefault(tau, []).append((statistics.mean(run.loss for run in line), *step))
    (slow,) = [loss for loss, *step in losses[64] if step == [0.5, 0.8]]
    assert slowest == pytest.approx(100 * (slow / min(losses[64])[0] - 1))
    assert f"0.5 and 0.8 have a gain of 1.1, and are {slowest:.1f}% above" in text
    ((four,), (sixteen,)) = [
        [loss for loss, *step in losses[tau] if step == [0.7, 0.8]] for tau in (4, 16)
    ]
    assert f"({four:.3f} beside {sixteen:.3f}, n = 3)" in text
    best = (
        f"rounds of 4 end at {min(losses[4])[0]:.3f} and rounds of 16 at {min(losses[16])[0]:.3f}"
    )
    assert best in text
    gain, _ = max(above["tau 4"])
    assert f"in rounds of 4 steps that outer step had a gain of {gain:.1f}" in text
    best, ahead = [], []
    tried = rows.find_lines(rows.read_csv(kept_file("length_tune")), ["max_steps"])
    for (steps,), line in tried.items():
        first, second, *_ = sorted(line, key=lambda run: run.loss)
        step = f"{first.flags['outer_lr']} and {first.flags['outer_momentum']}"
        best.append(f"{step} after {int(steps):,}")
        ahead.append(second.loss / first.loss - 1)
    assert ", ".join(best).replace("500", "500 steps") in text
    assert max(ahead[:-1]) < 0.005 and f"only the last is ahead by {ahead[-1]:.0%}" in text


def test_default_outer_step_is_near_the_best_in_all_kept_runs():
    """The README says by how much; so does the answer on outer steps."""
    over = defaultdict(dict)  # outer step -> setting -> percent above the best one
    for name in "gain", "outer_steps", "outer_steps_2000", "length_tune", "default":
        losses = defaultdict(lambda: defaultdict(list))  # setting -> outer step -> losses
        for run in rows.read_csv(kept_file(name)):
            names = ("method", "tau", "max_steps", "optimizer")
            method, tau, max_steps, optimizer = map(run.flags.get, names)
            if method != "one_bit_edit" and run.flags.get("schedule") != "wsd":
                setting = (method, tau, optimizer or "adamw", max_steps or run.results["steps"])
                step = (run.flags["outer_lr"], run.flags["outer_momentum"])
                losses[setting][step].append(run.loss)
        for setting, found in losses.items():
            means = {step: statistics.mean(each) for step, each in found.items()}
            for step, loss in means.items():  # gain.csv, on three seeds, comes first
                over[step].setdefault(setting, 100 * (loss / min(means.values()) - 1))
    default = (PenaltyConfig.outer_lr, PenaltyConfig.outer_momentum)
    average = f"{statistics.mean(over[default].values()):.1f}%"
    worst = f"{max(over[default].values()):.1f}%"
    settings = len(over[default])
    text = " ".join(RESULTS.split())
    shown = f"On average it ends {average} above the best of the outer steps that we tried"
    assert f"{shown}, at most {worst}: in {settings} settings" in text
    old = {True: [], False: []}  # in rounds of 4 steps, and in longer ones
    for (_, tau, _, _), percent in over[0.7, 0.8].items():
        old[tau == 4].append(percent)
    short, long = (f"{statistics.mean(old[four]):.1f}%" for four in (True, False))
    log = " ".join(LOG.split())
    assert f"0.7 / 0.8, the default before, ends {short} above in rounds of 4 steps and {long}" in log
    after_2000 = defaultdict(list)
    for step in (0.7, 0.8), default:
        for (_, _, optimizer, steps), percent in over[step].items():
            if steps == 2000:
                after_2000[optimizer, step].append(percent)
    muon, new_muon, adamw, new_adamw = (
        f"{statistics.mean(after_2000[optimizer, step]):.1f}%"
        for optimizer in ("muon", "adamw")
        for step in ((0.7, 0.8), default)
    )
    shown = f"After 2,000 steps it is better with Muon ({muon} above, the new one {new_muon})"
    assert f"{shown} and worse with AdamW ({adamw}, the new one {new_adamw})" in log
    shown = f"In {settings} settings it ends on average {average}, at most {worst}, above"
    assert shown in " ".join(TEXT.split())
    assert f"{average} above the best one in {settings} settings" in LOG
    gains = []
    for run in rows.read_csv(kept_file("gain")):
        if (run.flags["outer_lr"], run.flags["outer_momentum"]) == default:
            gains.append(0.7 * (1 + 0.5 / (1 - 0.5 * run.results["cosine"])))
    assert 1.1 < min(gains) and max(gains) < 1.25


def test_losses_in_the_tables_of_results_are_means_of_kept_runs():
    means = set()
    for path in KEPT:
        if path.stem not in NO_RUNS:
            runs = rows.read_csv(path)
            for line in rows.find_lines(runs, rows.find_columns(runs)[0]).values():
                means.add(f"{statistics.mean(run.loss for run in line):.4f}")
    shown = []
    for line in RESULTS.splitlines():
        if line.startswith("| "):
            shown += re.findall(r"\| (\d\.\d{4})(?= )", line)
    assert len(shown) > 15
    assert set(shown) <= means


def kept_tables(folder):
    """The kept runs of each table that an experiment prints, with their distances."""
    for path in EXPERIMENTS:
        own = folder / path.stem
        own.mkdir()
        for words in commands(path, own):
            if words[2:3] != ["lab.table"]:
                continue
            args = table.read_command(words[3:])
            names = [Path(run.rstrip("/*")).stem for run in args.runs]  # of out/sweep/NAME/*/
            if args.out:  # the table of its own file, which has no other runs
                names, args.only = [Path(args.out).name], []
            runs = []
            for name in names:
                if kept_file(name).exists():
                    runs += rows.read_csv(kept_file(name))
            only = table.check_base(args.only, [run.flags for run in runs], "--only")
            runs = [run for run in runs if only.items() <= run.flags.items()]
            if runs:
                table.page(runs, args.base, [])
                yield runs
    for path in KEPT:
        if path.stem.startswith("after_"):  # its script is not started
            runs = rows.read_csv(path)
            table.page(runs, ["init_from=out/after/averaged_gradients.pt"], [])
            yield runs


def test_distances_in_results_are_those_of_kept_runs(tmp_path):
    """As lab.table computes them with the options of the experiments, rounded once. A sentence says
    "below" in place of a minus."""
    found = set()
    for runs in kept_tables(tmp_path):
        lines = rows.find_lines(runs, rows.find_columns(runs)[0]).values()
        others = [line for line in lines if {run.why for run in line} != {"base"}]
        spread = table.Spread.of([table.distances_of(line) for line in others])
        for over in map(table.distances_of, others):
            if len(over) > 1:
                half = 100 * spread.half_interval(len(over))
                found.add(f"{100 * statistics.mean(over):+.1f}% +- {half:.1f}%")
    shown = set(re.findall(r"[+-]?\d+\.\d% \+- \d+\.\d%", RESULTS))
    assert len(shown) > 10
    shown |= set(re.findall(r"[+-]?\d+\.\d% \+- \d+\.\d%", TEXT))
    wrong = [text for text in shown if not {text, f"+{text}", f"-{text}"} & found]
    assert not wrong
