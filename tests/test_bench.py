"""The benchmark runs from end to end, its figures follow from its times, and it refuses flags of
other methods. No test depends on real times."""

from types import SimpleNamespace

import pytest
import torch

from config import UserError
from lab import bench
from ranks import Launch, run_bench
from rows import each_row

SMALL = "--n_layer 1 --n_head 1 --n_embd 16 --block_size 8 --batch_size 1 --dtype fp32".split()
SMALL += "--repeats 1 --device cpu".split()


def names(figures) -> list:
    """The first word of each line."""
    return [line.split()[0] for line in figures]


def test_ratios_follow_from_the_times():
    # ours is 1.5 times as fast as fsdp2 in the middle turn, and has 0.8 of the bound's speed
    text = bench.table({"ours": [10, 20, 40], "fsdp2": [14, 30, 80], "bound": [9, 16, 30]})
    assert text.splitlines() == [
        "ours        20.0 ms a step | / ours 1.00 (1.00 .. 1.00)",
        "fsdp2       30.0 ms a step | / ours 1.50 (1.40 .. 2.00)",
        "bound       16.0 ms a step | / ours 0.80 (0.75 .. 0.90)",
    ]


def test_candidates_take_turns(monkeypatch):
    calls = []
    steps = {
        "a": lambda: calls.append("a"),
        "b": lambda: calls.append("b"),
        "c": lambda: calls.append("c"),
    }
    monkeypatch.setattr(bench, "now_ms", lambda mesh: 10.0 * len(calls))
    mesh = SimpleNamespace(device=torch.device("cpu"))
    times = bench.alternate(mesh, steps, 2)
    assert "".join(calls) == "aaabbbccc" * 2  # one untimed and two timed ones
    assert times == dict.fromkeys("abc", [10.0, 10.0])


def test_one_rank_is_compared_with_fsdp2_alone(capsys):
    bench.main(SMALL)
    title, *figures = capsys.readouterr().out.splitlines()
    assert title.startswith("1 replicas x 1 shards, fp32")
    assert "n_embd=16" in title
    assert names(figures) == ["ours", "fsdp2"]


@each_row("shards", [1, 2])
def test_two_ranks_are_compared_with_the_bound_too(shards, tmp_path):
    special = {0: (run_bench,), 1: (run_bench,)}
    run = Launch(2, tmp_path, *SMALL, "--shards", str(shards), special=special)
    assert run.wait() == [0, 0]
    assert run.lines("err") == []
    title, *figures = run.lines("out")
    assert title.startswith(f"{2 // shards} replicas x {shards} shards, fp32")
    assert names(figures) == ["ours", "fsdp2", "bound"]


@each_row("flag, value", [("--method", "edit"), ("--tau", "2")])
def test_flags_of_other_methods_are_refused(flag, value):
    with pytest.raises(UserError, match=flag):
        bench.main([*SMALL, flag, value])
