"""explain.html computes what lab/planner.py and edit.py compute, and its controls work."""

import html
import json
import math
import os
import re
import shutil
import struct
import subprocess
import tempfile
from itertools import product

import pytest
import torch

import test_planner
from edit import PenaltyConfig, anomaly_limits, clip_factor, is_anomaly, replica_weights
from lab import planner
from ranks import ROOT

pytestmark = pytest.mark.ecosystem
PAGE = ROOT / "explain.html"
METHODS = "minibatch diloco edit a_edit streaming_edit co2 one_bit_edit".split()
MODELS = planner.MODELS | test_planner.MORE_MODELS
STEP_TOKENS = {"tiny": 2048, "124m": 2**19}  # of one replica; of the others 2^20
TOKENS_PER_PARAMETER = 20  # of a training: Hoffmann et al., arXiv 2203.15556
DEFAULT = dict(method="edit", model="7b", replicas=2, tau=16, gbit_per_s=10.0)
DEFAULT |= dict(slowness=1.0, bits="own")
DEFAULT |= dict(G0=1.0, G1=1.3, G2=0.8, G3=5.0, mean=1.0, sigma=0.2, phi=10.0)
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
        dict(G0=1.0, G1=1.0, G2=1.0, G3=1.0, mean=1.0, sigma=0.0, phi=0.5),
        dict(G0=9.0, G1=8.0, G2=33.3, G3=40.0, mean=1.0, sigma=0.5, phi=10.0),  # all flagged
        dict(G0=30.0, G1=20.0, G2=25.0, G3=0.1, mean=20.0, sigma=3.0, phi=0.1),
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


# ---- the page in a browser ----


def chromium(*arguments) -> str:
    """What headless Chromium prints."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    flags += " --disable-background-networking --disable-component-update --disable-sync"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [found, *flags.split(), f"--user-data-dir={folder}", *arguments]
        run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    return run.stdout


def result_of(script, folder, fragment=""):
    """The JSON that a script at the end of the page leaves in `result`."""
    page = folder / "explain.html"
    script += "\ndocument.title = JSON.stringify(result);"
    page.write_text(PAGE.read_text().replace("</body>", f"<script>{script}</script></body>"))
    dom = chromium("--dump-dom", f"{page.as_uri()}#{fragment}")
    title = re.search("<title>(.*?)</title>", dom, re.S)[1]
    return json.loads(html.unescape(title))


def shown_with(fragments: list, folder) -> list:
    """For each fragment the numbers that the page shows, and its settings."""
    script = f"""
    const result = {json.dumps(fragments)}.map((fragment) => {{
      history.replaceState(null, "", "#" + fragment);
      show();
      return {{...numbers, settings}};
    }});
    """
    return result_of(script.replace("</", "<\\/"), folder)


# ---- the same numbers from the planner and from edit.py ----


def plan_of(method, setting):
    plan = planner.schedules(setting["tau"])[method]
    if setting["bits"] != "own":
        plan.bits = float(setting["bits"])
    return plan


def curves(setting) -> dict:
    found = {}
    for method in METHODS:
        plan = plan_of(method, setting)
        model = MODELS[setting["model"]]
        cluster = (setting["replicas"], setting["slowness"])
        rates = [10 ** (k / 6 - 3) for k in range(37)]
        found[method] = [planner.utilization(plan, model, gbit, *cluster) for gbit in rates]
    return found


def window(spans, begin, end) -> dict:
    spans = [span for span in spans if span.begin < span.end]
    inside = [span._asdict() for span in spans if span.end > begin and span.begin < end]
    return {"from": begin, "to": end, "spans": inside}


def by_layer(span, forward_s) -> list:
    """A forward or a backward in pieces. forward_s: of one layer."""
    if span.name == "forward":
        n = round((span.end - span.begin) / forward_s)
        layers = range(span.layer - n, span.layer)
        layer_s = forward_s
    elif span.name == "backward":
        layers = reversed(range(span.layer))
        layer_s = 2 * forward_s
    else:
        return [span]
    pieces = []
    for k, layer in enumerate(layers):
        begin = span.begin + k * layer_s
        pieces.append(span._replace(layer=layer, begin=begin, end=begin + layer_s))
    return pieces


def pictures(plan, model, setting) -> dict:
    """Two rounds, and the end of a round."""
    slowness = setting["slowness"]
    cluster = (setting["gbit_per_s"], setting["replicas"], slowness)
    spans, ends = planner.simulate(plan, model, *cluster, rounds=4)
    steps = [span for span in spans if span.name == "backward" and span.who == 1]
    later = [span for span in steps if span.begin > ends[1]]
    begin = ends[1] - model.step_s * slowness
    enlarged = window(spans, begin, later[1].end)
    pieces = []
    for span in enlarged["spans"]:
        speed = slowness if span["who"] == 1 else 1
        pieces += by_layer(planner.Span(**span), model.step_s * speed / 3 / model.layers)
    enlarged["spans"] = [piece._asdict() for piece in pieces]
    return {"overview": window(spans, ends[0], ends[2]), "closeup": enlarged}


def penalty(setting) -> dict:
    norms = torch.tensor([[setting[f"G{i}"]] for i in range(4)], dtype=torch.float64)
    statistics = torch.tensor([100.0, setting["mean"], setting["sigma"] ** 2], dtype=torch.float64)
    limits = anomaly_limits(statistics[:, None], PenaltyConfig())
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


def costs(plan, setting) -> dict:
    """The planner's, and the seconds of a training with TOKENS_PER_PARAMETER."""
    model = MODELS[setting["model"]]
    cluster = (setting["gbit_per_s"], setting["replicas"], setting["slowness"])
    found = planner.costs(plan, model, *cluster)
    slow_steps = planner.steps_per_round(plan, setting["slowness"])
    steps = (setting["replicas"] - 1) * plan.every + slow_steps
    rounds = TOKENS_PER_PARAMETER * model.parameters / steps
    rounds /= STEP_TOKENS.get(setting["model"], 2**20)
    return found | {"training_s": rounds * found["round_s"]}


def expected(setting) -> dict:
    model = MODELS[setting["model"]]
    plan = plan_of(setting["method"], setting)
    minibatch = plan_of("minibatch", setting)
    warmup = plan_of("minibatch", setting)
    warmup.bits = max(16, warmup.bits)
    sent = [planner.sent_bytes(each, model, setting["replicas"]) for each in (plan, minibatch, warmup)]
    return costs(plan, setting) | pictures(plan, model, setting) | {
        "settings": setting,
        "minibatch": costs(minibatch, setting),
        "sent_bytes": sent,
        "penalty": penalty(setting),
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


# ---- tests ----


def test_every_number_of_the_page_is_the_planners(tmp_path):
    settings = many_settings()
    assert len(settings) >= 60
    found = shown_with([in_fragment(setting) for setting in settings], tmp_path)
    assert len(found) == len(settings)
    for numbers, setting in zip(found, settings):
        assert_equal(numbers, expected(setting), in_fragment(setting))


def test_wrong_settings_in_the_fragment_become_the_defaults(tmp_path):
    wrong = "method=sgd&model=9b&replicas=2.5&tau=0&gbit_per_s=1e9&slowness=nan&bits=3&G0=-1&G1="
    odd = ["", "%", "tau=16;rm", "&&=&", "constructor=1&__proto__=2", "tau=1e400", "phi=x"]
    odd += ["method=toString", "model=constructor", "phi=0"]
    odd += ["replicas=65", "slowness=0.5", "<script>alert(1)</script>"]
    for numbers in shown_with([wrong, *odd], tmp_path):
        assert numbers["settings"] == DEFAULT


PLAYED = """
const result = {lit: {}};
function change_to(id, value) {
  element(id).value = value;
  element(id).dispatchEvent(new Event("input", {bubbles: true}));
}
for (const method in METHODS) {
  const lit = new Set();
  change_to("method", method);
  for (const logarithm of [-1.25, 0.75]) {
    change_to("gbit_per_s", logarithm);
    for (let time = 0; time < 1; time += 0.002) {
      change_to("time", time);
      for (const row of document.querySelectorAll(".lit")) lit.add(row.dataset.key);
    }
  }
  result.lit[method] = [...lit].sort().join("");
}
element("play").click();
result.button = element("play").textContent;
result.fragment = location.hash;
result.table = element("table").textContent;
"""


def test_controls_change_the_fragment_and_the_cursor_lights_the_code(tmp_path):
    result = result_of(PLAYED, tmp_path, "model=tiny&tau=4&slowness=1.5")
    every = {method: "bflsw" for method in METHODS}  # forward, backward, link, sync, wait
    assert result["lit"] == every | {"minibatch": "bflw"}
    changed = "#method=one_bit_edit&model=tiny&replicas=2&tau=4&gbit_per_s=5.62&slowness=1.5&"
    assert result["fragment"].startswith(changed)
    assert result["button"] == "Pause"
    plan = planner.schedules(4)["one_bit_edit"]
    cluster = (MODELS["tiny"], 5.62, 2, 1.5)
    costs = planner.costs(plan, *cluster)
    minibatch = planner.costs(planner.schedules(4)["minibatch"], *cluster)
    shares = [f"{100 * each['utilization']:.3g}%" for each in (costs, minibatch)]
    assert "compute utilization" + "".join(shares) in result["table"]


@pytest.mark.parametrize("width", [400, 1600])
def test_page_fits_into_its_window(tmp_path, width):
    """Nothing is wider than the window, and no text of the pictures leaves it."""
    inner = tmp_path / "inner.html"
    inner.write_text(PAGE.read_text())
    outer = tmp_path / "outer.html"
    outer.write_text(f"""<title></title><iframe src="inner.html#model=100b&slowness=4"
        style="width: {width}px; height: 900px; border: 0" onload="look(this)"></iframe>
        <script>
        function look(frame) {{
          const page = frame.contentDocument;
          const ends = [...page.querySelectorAll("svg text, td, label")].map(
            (each) => each.getBoundingClientRect().right);
          const result = [page.documentElement.scrollWidth, Math.max(...ends)];
          document.title = JSON.stringify(result);
        }}
        </script>""")
    dom = chromium("--dump-dom", "--allow-file-access-from-files", outer.as_uri())
    widest = json.loads(re.search("<title>(.*?)</title>", dom)[1])
    assert max(widest) <= width


def test_page_is_one_file_that_needs_no_network():
    text = PAGE.read_text()
    assert not re.search(r'https?://|\bsrc=|<link|@import|\bfetch\(|\bimport\b', text)
    linked = re.findall(r'href="([^"#]+)"', text)
    assert linked and all(os.path.exists(ROOT / target) for target in linked)


@pytest.mark.parametrize(
    "width, fragment",
    [
        (400, ""),
        (1600, "method=diloco&model=124m&replicas=4&slowness=2&gbit_per_s=1"),
        (1600, "method=one_bit_edit&model=10b&tau=100&G2=40"),
    ],
)
def test_page_can_be_looked_at(width, fragment, tmp_path):
    """Keep the folder to see the three screenshots: --basetemp FOLDER."""
    picture = tmp_path / "page.png"
    size = f"--window-size={width},2400"
    chromium("--hide-scrollbars", size, f"--screenshot={picture}", f"{PAGE.as_uri()}#{fragment}")
    content = picture.read_bytes()
    header = struct.unpack(">8sII2I", content[:24])
    assert header[0] == b"\x89PNG\r\n\x1a\n" and header[3:] == (width, 2400)
    assert len(content) > 50_000  # a blank page takes less
