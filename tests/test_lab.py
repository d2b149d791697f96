"""Timelines: when replicas of a run compute and wait. And the rule that is compared with EDiT's."""

import csv
import json
import time

import pytest

import methods
from config import UserError, explain
from lab import plot, timeline
from plain.__main__ import main as train_plain
from ranks import flags, run_training

CONFIG = {"event": "config", "method": "edit", "sync_warmup_steps": 4}


def json_lines(found) -> str:
    return "".join(json.dumps(row) + "\n" for row in found)


SPANS = [("step", k, k + 1.0) for k in range(4)]


def write_timeline(folder, rounds, text):
    record = [CONFIG]
    for steps in rounds:
        record.append({"event": "sync", "steps": steps})
    (folder / "metrics.jsonl").write_text(json_lines(record))
    (folder / "timeline-0.json").write_text(text)


def test_timelines_that_are_short_or_missing_are_refused(tmp_path):
    text = json.dumps({"replica": 0, "spans": SPANS})
    write_timeline(tmp_path, [[1]] * 4, text)
    assert timeline.read_timeline(tmp_path)[0]["computing"] == 1.0
    write_timeline(tmp_path, [[2]] * 2, text)
    with pytest.raises(UserError, match="less than three rounds"):
        timeline.read_timeline(tmp_path)
    (tmp_path / "timeline-0.json").unlink()
    with pytest.raises(UserError, match="no timeline; train with --timeline"):
        timeline.read_timeline(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        timeline.main([str(tmp_path)])
    assert explain(caught.value) == (2, f"{tmp_path}/metrics.jsonl: No such file or directory")


def recorded_spans(replica) -> list:
    """Four rounds of 2 steps, of 1.5 and 0.5 s. In the second step replica 0 waits 0.3 s for the
    other replica and 0.1 s for the link. In the first and in the last round both wait longer."""
    spans = [("wait for link", 100.5, 100.9), ("wait for link", 106.5, 106.9)]
    for begin in (100 + replica / 4, 102 + replica / 4, 104 + replica / 4, 106 + replica / 4):
        spans.append(("step", begin, begin + 1.5))
        spans.append(("step", begin + 1.5, begin + 2.0))
        if replica == 0:
            spans.append(("wait for others", begin + 1.5, begin + 1.8))
            spans.append(("wait for link", begin + 1.8, begin + 1.9))
            spans.append(("link", begin + 1.4, begin + 1.9))
    return spans


def test_timeline_counts_whole_rounds(tmp_path):
    record = [CONFIG] + [{"event": "sync", "steps": [2, 2]}] * 4
    (tmp_path / "metrics.jsonl").write_text(json_lines(record))
    for replica in (0, 1):
        text = json.dumps({"replica": replica, "spans": recorded_spans(replica)})
        (tmp_path / f"timeline-{replica}.json").write_text(text)
    first, second = timeline.read_timeline(tmp_path)
    assert first["computing"] == pytest.approx(1 - 0.8 / 4.0)  # of rounds 2 and 3
    assert first["step_s"] == pytest.approx(3.2 / 4)
    assert second["computing"] == 1.0
    # round 2 begins at 0
    assert first["spans"]["wait for others"] == [(-0.5, -0.2), (1.5, 1.8), (3.5, 3.8), (5.5, 5.8)]
    assert first["spans"]["step"][1:4] == [(-0.5, 0.0), (0.0, 1.5), (1.5, 2.0)]
    assert first["spans"]["link"][:2] == [(-0.6, -0.1), (1.4, 1.9)]


def test_timeline_of_a_run_is_drawn(tmp_path, corpus_folder):
    began = time.time()
    options = {"method": "diloco", "tau": 2, "max_steps": 9, "timeline": True}
    options |= {"sync_warmup_steps": 1, "eval_interval": 100}
    run_training(2, corpus_folder, out_dir=tmp_path, link_mbps=1, dtype="fp32", **options)
    for _, begin, end in json.loads((tmp_path / "timeline-0.json").read_text())["spans"]:
        assert began < begin <= end  # on one scale for all machines
    slow = timeline.read_timeline(tmp_path)
    assert len(slow) == 2
    for row in slow:
        assert 0 < row["computing"] < 1
        assert len(row["spans"]["link"]) >= 4

    fast = tmp_path / "fast"
    run_training(4, corpus_folder, out_dir=fast, **options)  # no link, four replicas
    found = slow + timeline.read_timeline(fast)
    assert len(found) == 6
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.svg"
    timeline.main([str(tmp_path), str(fast), "--out", str(out)])
    svg = out.read_text()
    assert ">DiLoCo, replica 3<" in svg
    assert plot.checksum([row["spans"] for row in found]) in svg
    with out.with_suffix(".csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["replica"] for row in written] == ["0", "1", "0", "1", "2", "3"]
    assert float(written[0]["computing"]) == found[0]["computing"]


def test_rule_leaves_out_the_replica_with_twice_the_median_loss(
    tmp_path, corpus_folder, monkeypatch
):
    monkeypatch.setitem(methods.TABLE, "rule", ("LossRule", "lab.loss_rule", "lab.loss_rule"))
    options = dict(method="rule", tau=4, sync_warmup_steps=2, max_steps=14, scale_lr="1:7:10:3000")
    argv = flags(**options, data=corpus_folder, out_dir=tmp_path)
    train_plain([*argv, "--replicas", "3"])
    syncs = [json.loads(line) for line in open(tmp_path / "metrics.jsonl")]
    weights = [row["weight"] for row in syncs if row["event"] == "sync"]
    equal = pytest.approx([1 / 3] * 3)
    assert weights == [equal, [0.5, 0.0, 0.5], equal]
