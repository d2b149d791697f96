"""The benchmark runs from end to end, its figures follow from its times, and it refuses flags that
have no effect. No test depends on real times."""

import json
from types import SimpleNamespace

import pytest
import torch

from config import UserError
from lab import bench
from mesh import Mesh
from plumbing.plan import Plan
from ranks import Launch, run_bench

SMALL = "--n_layer 1 --n_head 1 --n_embd 16 --block_size 8 --batch_size 1 --dtype fp32".split()
SMALL += "--repeats 1 --steps 1 --device cpu".split()


def test_ratios_follow_from_the_times():
    # ours is 1.5 times as fast as fsdp2 in the middle turn, and has 0.8 of the bound's speed
    row = bench.speedups({"ours": [10, 20, 40], "fsdp2": [14, 30, 80], "bound": [9, 16, 30]})
    assert (row.pop("over_fsdp2"), row.pop("of_bound")) == (1.5, pytest.approx(0.8))
    assert row.pop("over_fsdp2_range") == "1.40..2.00" and row.pop("of_bound_range") == "0.75..0.90"
    assert row == {"ours_ms": 20, "fsdp2_ms": 30, "bound_ms": 16}


def test_candidates_take_turns(monkeypatch):
    calls, mesh = [], SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(bench, "now_ms", lambda mesh: 10.0 * len(calls))
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = bench.alternate(mesh, steps, SimpleNamespace(repeats=2, steps=2))
    # two steps each to warm up; then one untimed and two timed per turn
    assert "".join(calls) == "abcabc" + "aaabbbccc" + "bbbcccaaa"
    assert times == {"a": [10.0] * 2, "b": [10.0] * 2, "c": [10.0] * 2}


def test_one_rank_is_compared_with_fsdp2_alone():
    config = bench.read_config(SMALL, 1)
    plan = Plan(config, bench.METHODS["minibatch"], config.vocab_size, 1)
    batch = torch.zeros(2, 1, 8, dtype=torch.int64)
    row = bench.compare(plan, Mesh(1, torch.device("cpu")), batch)
    torch.distributed.destroy_process_group()
    assert row["tokens_per_s"] == pytest.approx(8e3 / row["ours_ms"])
    assert "over_fsdp2" in row and "of_bound" not in row


def test_two_ranks_print_what_they_write(tmp_path):
    file = tmp_path / "a" / "new" / "folder.json"
    argv = [*SMALL, "--shards", "2", "--json", str(file)]
    run = Launch(2, tmp_path, *argv, special={rank: (run_bench,) for rank in (0, 1)})
    assert (run.wait(), run.lines("err")) == ([0, 0], [])
    written, (title, *figures, _) = json.loads(file.read_text()), run.lines("out")
    (row,), n_params = written["rows"], written["n_params"]
    assert f"{n_params:,} parameters" in title and written["config"]["n_embd"] == 16
    assert [line.split()[0] for line in figures] == list(row)
    assert "of_bound_range" in row and row["tokens_per_s"] == pytest.approx(16e3 / row["ours_ms"])


def test_flags_without_effect_are_refused():
    for flag in "--method edit", "--accum 2", "--timeline", "--grad_clip 2":
        with pytest.raises(UserError, match=f"{flag.split()[0]}: it has no effect on the bench"):
            bench.read_config([*SMALL, *flag.split()], 2)
