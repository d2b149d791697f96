"""The benchmark runs from end to end, its figures follow from its times, and it refuses flags of
other methods. No test depends on real times."""

from types import SimpleNamespace

import pytest
import torch

from config import UserError
from lab import bench
from ranks import Launch, run_bench

SMALL = "--n_layer 1 --n_head 1 --n_embd 16 --block_size 8 --batch_size 1 --dtype fp32".split()
SMALL += "--repeats 1 --device cpu".split()


def test_ratios_follow_from_the_times():
    # ours is 1.5 times as fast as fsdp2 in the middle turn, and has 0.8 of the bound's speed
    text = bench.table({"ours": [10, 20, 40], "fsdp2": [14, 30, 80], "bound": [9, 16, 30]})
    assert text.splitlines() == [
        "ours        20.0 ms a step | / ours 1.00 (1.00 .. 1.00)",
        "fsdp2       30.0 ms a step | / ours 1.50 (1.40 .. 2.00)",
        "bound       16.0 ms a step | / ours 0.80 (0.75 .. 0.90)",
    ]


def test_candidates_take_turns(monkeypatch):
    calls, mesh = [], SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(bench, "now_ms", lambda mesh: 10.0 * len(calls))
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = bench.alternate(mesh, steps, 2)
    assert "".join(calls) == "aaabbbccc" * 2  # one untimed and two timed ones
    assert times == {"a": [10.0] * 2, "b": [10.0] * 2, "c": [10.0] * 2}


def test_one_rank_is_compared_with_fsdp2_alone(capsys):
    bench.main(SMALL)
    title, *figures = capsys.readouterr().out.splitlines()
    assert title.startswith("1 replicas x 1 shards, fp32") and "n_embd=16" in title
    assert [line.split()[0] for line in figures] == ["ours", "fsdp2"]


@pytest.mark.parametrize("shards", [1, 2])
def test_two_ranks_are_compared_with_the_bound_too(shards, tmp_path):
    argv = [*SMALL, "--shards", str(shards)]
    run = Launch(2, tmp_path, *argv, special={rank: (run_bench,) for rank in (0, 1)})
    assert (run.wait(), run.lines("err")) == ([0, 0], [])
    title, *figures = run.lines("out")
    assert title.startswith(f"{2 // shards} replicas x {shards} shards, fp32")
    assert [line.split()[0] for line in figures] == ["ours", "fsdp2", "bound"]


def test_flags_of_other_methods_are_refused():
    for flag in "--method edit", "--tau 2":
        with pytest.raises(UserError, match=flag.split()[0]):
            bench.main([*SMALL, *flag.split()])
