"""README's shares, the planner and explain.html are one model of time: formulas, and a simulation."""

import html
import json
import math
import re
import shutil
import subprocess
from itertools import product

import pytest
import torch

from config import UserError
from edit import PenaltyConfig, anomaly_limits, clip_factor, is_anomaly, replica_weights
from lab import planner
from plumbing.plan import FRAMING, Run, costs, describe, links_for_rounds
from plumbing.plan import round_seconds, smallest_tau
from ranks import ROOT
from rows import each_row

PAGE = ROOT / "explain.html"
METHODS = "minibatch diloco edit a_edit streaming_edit co2 one_bit_edit".split()
SETTING = "--model 7b --replicas 2 --shards 8 --link_mbps 10000 --tau 16".split()  # README's
DEFAULT = dict(method="edit", model="7b", replicas=2, tau=16, gbit_per_s=10, slowness=1)
DEFAULT |= dict(step_s=3.58, bits=32, kept=0.71, G0=1, G1=1.04, G2=0.97, G3=1.01)
DEFAULT |= dict(mean0=1.02, mean1=1, mean2=0.98, mean3=1.04, sigma=0.05, phi=10)
# Gbit/s that 50, 80, 90 and 95% need with 16 bits and two replicas: arXiv 2501.18512, table 4, a
# grid of steps of 1.2. (Its DiLoCo overlaps with the backward.)
PUBLISHED = {
    (1e9, 24, 0.1): (86.8, 152.6, 184.2, 222.3),
    (1e10, 48, 0.8): (104.8, 222.3, 222.3, 268.3),
    (1e11, 108, 4.9): (184.2, 323.8, 390.7, 390.7),
}


@each_row(
    "method, tau, link_s, round_s",  # steps of 6 s, two layers: forward 1 + 1 s, backward 2 + 2 s
    [
        ("minibatch", 1, 8, 12),  # layer 1 from 4 to 8 s, layer 0 from 8 to 12 s
        ("minibatch", 1, 1, 6.5),  # the last layer is never hidden
        ("diloco", 100, 8, 600 + 8),
        ("averaging", 100, 8, 600 + 8),  # a method of one's own
        ("edit", 100, 8, 600 + 7),  # layer 0 after 4 s, layer 1 after 8 s, needed after 4 + 1 s
        ("edit", 100, 2, 600 + 1),
        ("co2", 100, 700, 700),
        ("co2", 100, 500, 600),
        ("streaming_edit", 100, 4 * 15, 600 + 4 * 3),  # fragments of 15 s, two steps of 6 s
        ("streaming_edit", 8, 4 * 7, 48 + 4 * 1),  # two steps between fragments: one of delay
    ],
)
def test_rounds_by_hand(method, tau, link_s, round_s):
    assert round_seconds(method, tau, 6.0, link_s, 2) == pytest.approx(round_s)


def test_only_the_last_micro_step_hides_gradients_and_only_the_first_hides_a_sync():
    # two of them, in each a forward of 0.5 + 0.5 s and a backward of 1 + 1 s
    assert round_seconds("minibatch", 1, 6.0, 8, 2, 2) == pytest.approx(13)  # from 5 to 13 s
    assert round_seconds("edit", 100, 6.0, 8, 2, 2) == pytest.approx(600 + 7.5)


def test_links_that_averaged_gradients_need_are_at_most_two_grid_values_from_the_published_ones():
    for (parameters, layers, step_s), rates in PUBLISHED.items():
        for share, gbit in zip((0.5, 0.8, 0.9, 0.95), rates):
            found = [
                costs(Run(parameters, layers, step_s, 2, 1, gbit * factor * 1000 * FRAMING, 16),
                      "minibatch")["share"]
                for factor in (1 / 1.2, 1.2**2)
            ]  # fmt: skip
            assert found[0] < share < found[1], (parameters, share)


def test_shortest_rounds_reach_90_percent_and_no_shorter_ones():
    run = planner.read_command(SETTING)
    for method in "diloco", "edit", "one_bit_edit":
        run.tau = smallest_tau(run, method)
        assert costs(run, method)["share"] >= 0.9
        run.tau /= 2
        assert run.tau < 1 or costs(run, method)["share"] < 0.9


@pytest.mark.parametrize("replicas, micro_steps", [(2, 1), (4, 16)])
def test_rounds_pay_between_two_links(replicas, micro_steps):
    """By hand, in seconds of a step, for l on the link: EDiT's round is 16 + l - h, h a forward but
    that of a layer; a step of averaged gradients is 1 + l - 2 h."""
    run = Run(1e9, 24, 1.0, replicas, 16, 1.0, micro_steps=micro_steps)
    alone, averaged = links_for_rounds(run)
    h = 23 / 24 / 3 / micro_steps
    sent = 2 * (replicas - 1) / replicas * 32e3 * FRAMING  # Mbit
    assert sent / alone == pytest.approx(replicas * 0.71 * 16 - 16 + h, rel=1e-3)
    l = (16 - h - 0.71 * 16 * (1 - 2 * h)) / (0.71 * 16 - 1)
    assert sent / averaged == pytest.approx(l, rel=1e-3)


def test_rounds_pay_on_no_link_if_they_keep_too_little():
    run = planner.read_command([*SETTING, "--kept", "0.5"])
    assert links_for_rounds(run)[0] == math.inf
    assert "EDiT is nowhere worth more than both" in describe(run)
    every_step = planner.read_command([*SETTING, "--kept", "1"])
    assert links_for_rounds(every_step)[1] == math.inf
    assert "and more than averaged gradients below" not in describe(every_step)


def test_longer_rounds_keep_less():
    shares = [costs(Run(1e9, 24, 1.0, 2, tau, 1e6), "edit") for tau in (4, 16, 64, 128)]
    assert [found["worth"] / found["share"] / 2 for found in shares] == [
        pytest.approx(kept) for kept in (0.71, 0.71, 0.48, 0.48)
    ]


def test_a_run_costs_its_warm_up_and_its_rounds():
    run = Run(1e9, 10, 1.0, 4, 8, 1000 * FRAMING, 32, 0, max_steps=108, warmup_steps=20)
    vector = 1.5 * 4e9  # bytes of a replica's all-reduce: 48 s
    found = costs(run, "diloco")
    assert found["warmup_bytes"] == 20 * vector and found["run_bytes"] == (20 + 88 / 8) * vector
    step_s = 1 / 3 + 2 / 30 + 48
    assert found["warmup_s"] == pytest.approx(20 * step_s)
    assert found["run_s"] == pytest.approx(20 * step_s + 11 * (8 + 48))
    assert found["worth"] == pytest.approx(0.71 * 4 * 8 / 56)
    assert costs(run, "minibatch")["worth"] == pytest.approx(4 / step_s)  # at an equal loss


def test_planner_answers_in_a_few_lines(capsys):
    planner.main("--model 1b --replicas 4 --shards 8 --link_mbps 25000 --tau 64".split())
    printed = capsys.readouterr().out
    run = planner.read_command("--link_mbps 25000 --model 1b --replicas 4 --tau 64".split())
    # 6 FLOPs a parameter outside of the embedding, and attention; 32 H100s at 40%
    flops = 6 * (run.parameters - 50304 * 2048) + 12 * 24 * 2048 * 2048
    assert run.step_s == pytest.approx(2**19 / 32 * flops / (0.4 * 989e12))
    share = costs(run, "edit")["share"]
    assert re.search(rf"\nEDiT +32 .* {share:.1%} +{0.48 * 4 * share:.2f} ", printed)
    assert "\nlink    EDiT is worth more than one replica alone above " in printed
    assert re.search(r"\nEDiT +32 +8522.4 MB +2.9 s ", printed)  # 1.5 x 4 bytes a parameter
    assert "of methods in rounds x 0.48," in printed
    assert "--timeout_s 7 or more" in printed and len(printed.splitlines()) < 21


@each_row(
    "words, line",
    [
        ("--link_mbps 0", "--link_mbps 0.0: must be above 0"),
        ("--tau 4", "required: --link_mbps"),
        ("--link_mbps 9 --parameters 1e9", "--parameters: give --layers and --step_s, too"),
        ("--link_mbps 9 --kept 71", "--kept 71: a share of the speed, at most 1"),
        ("--link_mbps 9 --tokens_per_step 7", "--tokens_per_step 7: must be a multiple of"),
    ],
)
def test_wrong_questions_are_refused_in_one_line(words, line):
    with pytest.raises(UserError, match=line):
        planner.read_command(words.split())


# ---- README, planner and page ----


def page_numbers(fragments: list) -> list:
    """For each fragment the numbers that explain.html shows, and its settings."""
    node = shutil.which("node")
    if not node:
        pytest.skip("no node, which runs the script of the page")
    script = PAGE.read_text().split("<script>")[1].split("// ---- drawing ----")[0]
    script += f"""
    const rounded = (number) => Number(number.toPrecision(3));
    const found = {json.dumps(fragments)}.map((fragment) => {{
      const settings = read_settings(fragment);
      return {{...numbers_of(settings), settings}};
    }});
    console.log(JSON.stringify(found));"""
    done = subprocess.run([node, "-"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_shares_of_readme_are_those_of_the_planner_and_of_the_page():
    readme = (ROOT / "README.md").read_text()
    fragments = ["method=minibatch", "", "tau=128"]
    (minibatch, edit, long), run = page_numbers(fragments), planner.read_command(SETTING)
    assert edit["settings"] == DEFAULT
    shares = []
    for page, method, tau in (minibatch, "minibatch", 1), (edit, "edit", 16), (long, "edit", 128):
        run.tau = tau
        share = costs(run, method)["share"]
        assert page["utilization"] == pytest.approx(share, abs=0.002)
        shares.append(f"{share:.0%}")

    in_one_line = readme.replace("\n", " ")
    assert f"the GPUs compute {shares[0]} of the time" in in_one_line
    shown = f"they compute {shares[1]} in rounds of 16 steps and {shares[2]} in rounds of 128."
    assert shown in in_one_line
    more = "--tokens_per_step 4194304 --accum 8".split()
    shares = []
    for bits in "32", "16":
        run = planner.read_command([*SETTING, *more, "--bits", bits])
        shares.append(f"{costs(run, 'minibatch')['share']:.0%}")
    assert f"compute {shares[0]} of the time, in 16 bits {shares[1]} (" in in_one_line
    worth = costs(run, "minibatch")["worth"]
    assert f"So two nodes are worth {worth:.1f}, more than with EDiT," in in_one_line
    assert worth > costs(run, "edit")["worth"]


def test_rules_of_readme_are_those_of_the_planner():
    readme = " ".join((ROOT / "README.md").read_text().split())

    def links(parameters, step_s, replicas, bits):
        run = Run(parameters, 24, step_s, replicas, 16, 1.0, bits, micro_steps=16)
        return [mbps / 1000 for mbps in links_for_rounds(run)]

    (alone, all_bits), (_, half) = links(1e9, 1.0, 2, 32), links(1e9, 1.0, 2, 16)
    assert f"above {alone:.0f} Gbit/s EDiT is worth more than one node alone" in readme
    shown = f"below {all_bits:.0f} Gbit/s EDiT is worth more than averaged gradients in 16"
    assert f"{shown} micro-steps (in 16 bits: below {half:.0f})" in readme
    (alone, all_bits), (_, half) = links(1.3e9, 0.7, 2, 32), links(1.3e9, 0.7, 2, 16)
    shown = f"0.7 s: above {alone:.0f} Gbit/s, and below {round(all_bits, -1):.0f} ({half:.0f})"
    assert shown in readme
    four = links(1.3e9, 0.7, 4, 32)[0]
    shown = f"EDiT breaks even at [{four:.1f} Gbit/s](#gpus-and-nodes) on four machines"
    assert f"{shown}, and at {alone:.0f} on two." in readme


def test_page_simulates_what_the_formulas_say():
    """Equal replicas. Each method and model, on slow and fast links."""
    cases = []
    for model, method in product(("tiny", "124m", "1b", "7b"), METHODS):
        for replicas, tau, bits, gbit in (2, 16, 32, 1), (4, 128, 16, 0.05), (3, 1, 8, 30):
            case = dict(model=model, method=method, replicas=replicas, tau=tau)
            cases.append(case | dict(bits=bits, gbit_per_s=gbit))
    cases.append(cases[-1] | dict(kept=0.6))
    pages = page_numbers(["&".join(f"{k}={v}" for k, v in case.items()) for case in cases])
    script = PAGE.read_text()
    for case, page in zip(cases, pages):
        size = re.search(rf'"{case["model"]}": {{parameters: (\S+), layers: (\d+)', script)
        run = Run(float(size[1]), int(size[2]), page["settings"]["step_s"], case["replicas"],
                  case["tau"], case["gbit_per_s"] * 1000, case["bits"])  # fmt: skip
        run.kept = case.get("kept", 0)
        found = costs(run, case["method"])
        assert page["utilization"] == pytest.approx(found["share"], rel=1e-9), case
        assert page["worth"] == pytest.approx(found["worth"], rel=1e-9), case
        if case["gbit_per_s"] == 1:  # the middle of the curve
            assert page["curve"][case["method"]][18] == pytest.approx(page["worth"]), case
        if case["model"] != "tiny":  # the planner counts the vocabulary of GPT-2
            ours = planner.read_command(["--model", case["model"], "--link_mbps", "1"])
            expected = pytest.approx([ours.parameters, ours.layers, ours.step_s], rel=0.005)
            assert [run.parameters, run.layers, run.step_s] == expected


def test_slow_replica_of_the_page_holds_up_edit_and_not_a_edit():
    fragments = [f"method={name}&tau=64&gbit_per_s=1000&slowness=2" for name in ("edit", "a_edit")]
    edit, a_edit = page_numbers(fragments)
    assert edit["shares"] == pytest.approx([0.5, 1], abs=0.01)
    assert a_edit["shares"] == pytest.approx([1, 1], abs=0.01)


def test_penalty_of_the_page_is_edits():
    fragments = ["", "G3=5", "sigma=0&G0=1.16&mean0=1", "G0=9&G1=9&G2=9&G3=9", "phi=0.5&sigma=9&G3=3"]
    for page in page_numbers(fragments):
        given = page["settings"]
        norms = torch.tensor([[given[f"G{i}"]] for i in range(4)], dtype=torch.float64)
        limits = []
        for i in range(4):
            statistics = torch.tensor([[100.0], [given[f"mean{i}"]], [given["sigma"] ** 2]])
            limits.append(anomaly_limits(statistics.double(), PenaltyConfig()))
        limits = torch.stack(limits)
        flagged = is_anomaly(norms, limits)
        weights = replica_weights(norms, flagged)
        norm = (weights * norms).sum()
        found = page["penalty"]
        assert found["limits"] == pytest.approx(limits[:, 0].tolist(), rel=1e-6)
        assert found["flagged"] == flagged[:, 0].tolist()
        assert found["weights"] == pytest.approx(weights[:, 0].tolist())
        assert found["clip"] == pytest.approx(clip_factor(norm, given["phi"]).item())
    (healthy,) = page_numbers([""])
    assert all(0.24 <= weight <= 0.26 for weight in healthy["penalty"]["weights"])


def test_wrong_settings_in_the_fragment_become_the_defaults():
    wrong = ["%", "method=sgd&model=9b&replicas=2.5&tau=0&step_s=nan&bits=x&G0=-1", "tau=1e400"]
    (long,) = page_numbers(["tau=128&kept=9"])
    assert long["settings"]["kept"] == 0.48
    wrong += ["constructor=1&__proto__=2", "method=toString", "<script>alert(1)</script>"]
    for page in page_numbers(wrong):
        assert page["settings"] == DEFAULT


@pytest.mark.ecosystem
def test_page_shows_its_numbers_and_its_controls_change_the_address(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if not chromium:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    script = """
    const table = element("table").textContent;
    element("model").value = "1b";
    element("model").dispatchEvent(new Event("input", {bubbles: true}));
    element("play").click();
    const widest = Math.max(...[...document.querySelectorAll("svg text, td, label")].map(
      (each) => each.getBoundingClientRect().right));
    const result = [table, location.hash, element("play").textContent, widest <= innerWidth];
    document.title = JSON.stringify(result);"""
    page = tmp_path / "explain.html"
    page.write_text(PAGE.read_text().replace("</body>", f"<script>{script}</script></body>"))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --window-size=500,900 --dump-dom"
    command = [chromium, *flags.split(), f"--user-data-dir={tmp_path}/profile", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    title = re.search("<title>(.*?)</title>", shown, re.S)[1]
    table, address, button, fits = json.loads(html.unescape(title))
    assert "compute utilization72.1%14.6%" in table
    assert "model=1b" in address and "step_s=0.755" in address and button == "Pause" and fits


def test_page_is_one_file_that_needs_no_network():
    text = PAGE.read_text()
    assert not re.search(r"https?://|\bsrc=|<link|@import|\bfetch\(|\bimport\b", text)
