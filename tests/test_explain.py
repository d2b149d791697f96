"""explain.html computes what lab/planner.py and edit.py compute, and its controls work."""

import html
import json
import math
import os
import re
import shutil
import subprocess
from itertools import product

import pytest
import test_planner
import torch

from edit import Penalty, anomaly_limits, clip_factor, is_anomaly, replica_weights
from lab import planner
from ranks import ROOT

pytestmark = pytest.mark.ecosystem
PAGE = ROOT / "explain.html"
METHODS = "minibatch diloco edit a_edit streaming_edit co2 one_bit_edit".split()
MODELS = planner.MODELS | planner.MORE_MODELS
DEFAULT = dict(method="edit", model="7b", replicas=2, tau=16, gbit_per_s=10.0)
DEFAULT |= dict(slowness=1.0, bits="own")
DEFAULT |= dict(G0=1.0, G1=1.26, G2=0.794, G3=5.01, mean=1.0, sigma=0.2, phi=10.0)
PUBLISHED = {  # method of the page -> that of the published table
    "minibatch": "minibatch",
    "diloco": "paper_diloco",
    "streaming_edit": "paper_overlap_4bit",
}


def many_settings() -> list:
    """Every method with every model, and every other setting at its ends and between."""
    found = []
    clusters = [
        dict(replicas=2, tau=16, gbit_per_s=1.0, slowness=1.0, bits="own"),
        dict(replicas=4, tau=7, gbit_per_s=0.06, slowness=1.7, bits="32"),
        dict(replicas=64, tau=100, gbit_per_s=40.0, slowness=4.0, bits="1.125"),
        dict(replicas=3, tau=1, gbit_per_s=1000.0, slowness=1.5, bits="8"),
        dict(replicas=8, tau=33, gbit_per_s=0.001, slowness=1.1, bits="16"),
    ]
    norms = [
        dict(G0=1.0, G1=1.0, G2=1.0, G3=1.0, mean=1.0, sigma=0.0, phi=1.0),
        dict(G0=9.0, G1=8.0, G2=70.0, G3=1000.0, mean=1.0, sigma=0.5, phi=10.0),  # all flagged
        dict(G0=30.0, G1=20.0, G2=25.0, G3=0.1, mean=20.0, sigma=3.0, phi=0.05),
    ]
    for k, (method, model) in enumerate(product(METHODS, MODELS)):
        setting = {"method": method, "model": model} | clusters[k % 5] | norms[k % 3]
        found.append(setting)
    for method, slowness, replicas in product(METHODS, [1.0, 2.0], [2, 4]):
        setting = dict(method=method, model="tiny", slowness=slowness, replicas=replicas, tau=4)
        found.append(DEFAULT | setting | {"gbit_per_s": 0.06})
    for model in planner.MODELS:
        found.append(DEFAULT | {"model": model, "tau": 100})
    return found


def in_fragment(setting: dict) -> str:
    return "&".join(f"{name}={value}" for name, value in setting.items())


def loaded(page, fragment: str) -> str:
    """The page as it is after its scripts have run."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if not chromium:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command.append(f"{page.as_uri()}#{fragment}")
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return run.stdout


def numbers_of_the_page(fragment: str) -> list:
    """The JSON at its end: a dict for each of the settings in the fragment."""
    text = re.search(r'<pre id="numbers">(.*?)</pre>', loaded(PAGE, fragment), re.S)[1]
    return json.loads(html.unescape(text))


def plan_of(method, setting):
    plan = planner.schedules(setting["tau"])[method]
    if setting["bits"] != "own":
        plan.bits = float(setting["bits"])
    return plan


def costs(method, setting) -> dict:
    plan = plan_of(method, setting)
    model = MODELS[setting["model"]]
    cluster = (plan, model, setting["gbit_per_s"], setting["replicas"], setting["slowness"])
    return {
        "utilization": planner.utilization(*cluster),
        "shares": planner.shares(*cluster),
        "round_s": planner.round_seconds(*cluster),
        "training_s": planner.training_seconds(*cluster),
        "sent_bytes": planner.sent_bytes(plan, model, setting["replicas"]),
    }


def curves(setting) -> dict:
    rates = [10 ** (k / 6 - 3) for k in range(37)]
    found = {"gbit_per_s": rates}
    for method in METHODS:
        plan = plan_of(method, setting)
        cluster = (setting["replicas"], setting["slowness"])
        model = MODELS[setting["model"]]
        found[method] = [planner.utilization(plan, model, gbit, *cluster) for gbit in rates]
    return found


def enlarged(setting) -> tuple:
    """The picture of a round's end: from when to when, and the spans that are in it."""
    plan = plan_of(setting["method"], setting)
    model = MODELS[setting["model"]]
    slowness = setting["slowness"]
    cluster = (setting["gbit_per_s"], setting["replicas"], slowness)
    timeline = planner.simulate(plan, model, *cluster, rounds=4)
    round_end = timeline.ends[1]
    slow = int(slowness > 1)
    steps = [span for span in timeline.spans if span.name == "backward" and span.who == slow]
    later = [span for span in steps if span.begin > round_end]
    begin = round_end - model.step_s * slowness
    end = later[plan.delay if plan.delay < plan.every else 0].end
    spans = [span for span in timeline.spans if span.end > span.begin]
    return [begin, end], [list(span) for span in spans if span.end > begin and span.begin < end]


def penalty(setting) -> dict:
    norms = torch.tensor([[setting[f"G{i}"]] for i in range(4)], dtype=torch.float64)
    statistics = torch.tensor([100.0, setting["mean"], setting["sigma"] ** 2], dtype=torch.float64)
    limits = anomaly_limits(statistics[:, None], Penalty())
    flagged = is_anomaly(norms, limits)
    weights = replica_weights(norms, flagged)
    dbar_norm = (weights * norms).sum()
    return {
        "limit": limits.item(),
        "flagged": flagged[:, 0].tolist(),
        "weights": weights[:, 0].tolist(),
        "dbar_norm": dbar_norm.item(),
        "clip": clip_factor(dbar_norm, setting["phi"]).item(),
    }


def published(setting) -> dict:
    fits = setting["tau"] == 100 and setting["replicas"] == 2
    if not fits or setting["slowness"] != 1 or setting["bits"] != "own":
        return {}
    table = test_planner.PUBLISHED
    model = setting["model"]
    return {m: list(table[model, p]) for m, p in PUBLISHED.items() if (model, p) in table}


def expected(setting) -> dict:
    minibatch = plan_of("minibatch", setting)
    minibatch.bits = max(16, minibatch.bits)
    model = MODELS[setting["model"]]
    window, spans = enlarged(setting)
    return costs(setting["method"], setting) | {
        "settings": setting,
        "warmup_step_bytes": planner.sent_bytes(minibatch, model, setting["replicas"]),
        "minibatch": costs("minibatch", setting),
        "penalty": penalty(setting),
        "window": window,
        "spans": spans,
        "curve": curves(setting),
        "published": published(setting),
    }


def assert_equal(theirs, ours, where):
    """Numbers to 1e-9, all else exactly."""
    if isinstance(ours, dict):
        assert theirs.keys() == ours.keys(), where
        for key in ours:
            assert_equal(theirs[key], ours[key], f"{where} {key}")
    elif isinstance(ours, (list, tuple)):
        assert len(theirs) == len(ours), where
        for k, (their, our) in enumerate(zip(theirs, ours)):
            assert_equal(their, our, f"{where} {k}")
    elif isinstance(ours, (int, float)) and not isinstance(ours, bool):
        assert math.isclose(theirs, ours, rel_tol=1e-9, abs_tol=1e-12), (where, theirs, ours)
    else:
        assert theirs == ours, (where, theirs, ours)


def test_every_number_of_the_page_is_the_planners():
    settings = many_settings()
    assert len(settings) >= 60
    found = numbers_of_the_page("|".join(map(in_fragment, settings)))
    assert len(found) == len(settings)
    for numbers, setting in zip(found, settings):
        assert_equal(numbers, expected(setting), in_fragment(setting))


def test_wrong_settings_in_the_fragment_become_the_defaults():
    wrong = "method=sgd&model=9b&replicas=2.5&tau=0&gbit_per_s=1e9&slowness=nan&bits=3&G0=-1&G1="
    odd = ["", "%", "tau=16;rm", "&&=&", "constructor=1&__proto__=2", "tau=1e400", "phi=x"]
    odd += ["method=toString", "model=constructor"]
    odd += ["replicas=65", "slowness=0.5", "<script>alert(1)</script>"]
    for numbers in numbers_of_the_page("|".join([wrong, *odd])):
        assert numbers["settings"] == DEFAULT


PLAYED = """<script>
const lit = {};
function change(id, value) {
  element(id).value = value;
  element(id).dispatchEvent(new Event("input"));
}
for (const method in METHODS) {
  lit[method] = new Set();
  change("method", method);
  for (const place of ["20", "45"]) {
    change("gbit_per_s", place);
    for (let time = 0; time < 1; time += 0.002) {
      change("time", time);
      for (const row of document.querySelectorAll(".lit")) lit[method].add(row.dataset.key);
    }
  }
  lit[method] = [...lit[method]].sort().join("");
}
document.dispatchEvent(new KeyboardEvent("keydown", {key: " "}));  // not the body: nothing
document.body.dispatchEvent(new KeyboardEvent("keydown", {key: " ", bubbles: true}));
document.title = JSON.stringify([lit, location.hash, element("play").textContent]);
</script></body>"""


def test_controls_change_the_fragment_and_the_cursor_lights_the_code(tmp_path):
    page = tmp_path / "played.html"
    page.write_text(PAGE.read_text().replace("</body>", PLAYED))
    dom = loaded(page, "model=tiny&tau=4&slowness=1.5")
    title = re.search("<title>(.*?)</title>", dom)[1]
    lit, fragment, button = json.loads(html.unescape(title))
    every = {method: "bflsw" for method in METHODS}  # forward, backward, link, sync, wait
    assert lit == every | {"minibatch": "bflw"}
    assert fragment.startswith("#method=one_bit_edit&model=tiny&replicas=2&tau=4&gbit_per_s=5.62&")
    assert button == "Pause"


def test_page_is_one_small_file_that_needs_no_network():
    text = PAGE.read_text()
    assert len(text.encode()) <= 60_000
    assert not re.search(r'https?://|\bsrc=|<link|@import|\bfetch\(|\bimport\b', text)
    linked = re.findall(r'href="([^"#]+)"', text)
    assert linked and all(os.path.exists(ROOT / target) for target in linked)
