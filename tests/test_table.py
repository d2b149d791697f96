"""lab.table: means, intervals and paired distances are those worked out by hand; what cannot be
compared is said."""

import csv
import json
import math
import sys

import pytest

from config import UserError, explain
from lab import plot, rows, table

MESH = {"replicas": 4, "shards": 1}


def write_run(folder, loss, method="edit", seed=1, rows=(), **flags):
    """The record of a finished run. rows: others in place of its `end`."""
    config = {"event": "config", "method": method, "seed": seed, "max_steps": 8, "mesh": MESH}
    config |= {"out_dir": str(folder), "corpus_hash": "c"} | flags
    record = [config]
    for step, distance in (4, 1.0), (8, 0.0):
        counts = {"step": step, "tokens": 10 * step, "train_s": step / seed, "sync_bytes": 10**6}
        record.append({"event": "eval", **counts, "val_loss": loss + distance})
    end = {"event": "end", "step": 8, "train_s": 4.0, "tokens_per_s": 20.0, "val_loss": loss}
    record += rows or [end | {"exit": "done"}]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in record))
    return str(folder)


def write_csv(path, *lines):
    path.write_text("\n".join(["folder,method,tau,seed,val_loss,step_ms,over_base", *lines]) + "\n")
    return str(path)


@pytest.fixture
def write(tmp_path):
    """write_run() into folders 0, 1, ...; write.folders: these."""

    def write(*args, **flags):
        name = str(len(write.folders))
        write.folders.append(write_run(tmp_path / name, *args, **flags))

    write.folders = []
    return write


def cells(text) -> list:
    """The lines of the Markdown table, each as the list of its cells, without the ruler."""
    found = []
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("| ---"):
            found.append([cell.strip() for cell in line[1:-1].split("|")])
    return found


def compared(folders, *base):
    """(lines of the table, the notes)."""
    runs, notes = table.read_runs(folders)
    text, *_ = table.page(runs, list(base), notes)
    return cells(text), [line[2:] for line in text.splitlines() if line[:2] == "- "]


DIVERGED = [{"event": "end", "exit": "diverged"}]

# ---- means, intervals, distances ----

T_TABLE = {  # degrees of freedom -> t of 95%, from printed tables
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 17: 2.110, 30: 2.042,
    60: 2.000, 120: 1.980,
}  # fmt: skip


def test_quantiles_of_student_are_those_of_printed_tables():
    for df, t in T_TABLE.items():
        assert table.t_quantile(df) == pytest.approx(t, abs=6e-4)
    assert table.t_quantile(100_000) == pytest.approx(1.95996, abs=1e-4)  # the normal one


def test_all_lines_share_one_standard_deviation(write):
    """edit: 2.0, 2.2, 2.7, mean 2.3, squares 0.26. diloco: 3.0, 3.2, mean 3.1, squares 0.02. qsr:
    one seed, so no interval. s = sqrt(0.28 / 3) = 0.30551, t = 3.18245: 0.5613 for three seeds,
    0.6875 for two."""
    losses = {"edit": [2.0, 2.2, 2.7], "diloco": [3.0, 3.2], "qsr": [5.0]}
    for method, found in losses.items():
        for seed, loss in enumerate(found, 1):
            write(loss, method, seed)
    shown = {line[0]: line[1] for line in compared(write.folders)[0]}
    assert shown["edit"] == "2.3000 +- 0.5613"
    assert shown["diloco"] == "3.1000 +- 0.6875"
    assert shown["qsr"] == "5.0000"


def test_distance_is_the_mean_of_those_of_the_seeds(write):
    """edit: +10% and +20%, so 15%; of the means it would be 16.67%. diloco: +10% and -5%. s^2 =
    (50 + 112.5) / 2 = 81.25, t = 4.3027: 4.3027 * 9.0139 / sqrt(2) = 27.42%. qsr: one seed."""
    losses = {
        "minibatch": {1: 2.0, 2: 4.0},
        "edit": {1: 2.2, 2: 4.8},
        "diloco": {1: 2.2, 2: 3.8},
        "qsr": {2: 6.0},
    }
    for method, of_seed in losses.items():
        for seed, loss in of_seed.items():
            write(loss, method, seed)
    lines, notes = compared(write.folders, "method=minibatch")
    assert lines[0] == ["method", "validation loss", "MB sent", "seeds", "over minibatch", "n"]
    assert [line[-2:] for line in lines[1:]] == [
        ["base", ""],
        ["+50.00%", "1"],
        ["+2.50% +- 27.42%", "2"],
        ["+15.00% +- 27.42%", "2"],
    ]
    assert notes == []
    assert compared(write.folders)[0] == lines  # without --base: the first method


def test_runs_of_unlike_settings_are_never_merged_nor_paired(write):
    """The settings' losses differ by up to a factor of 8, edit's from diloco's always by 1%."""
    for t, tau in enumerate((4, 16)):
        for r, rate in enumerate((0.5, 1.0)):
            for seed in 1, 2:
                loss = 2.0 ** (t + 2 * r) + seed
                write(loss, "diloco", seed, tau=tau, outer_lr=rate)
                write(1.01 * loss, "edit", seed, tau=tau, outer_lr=rate)
    (head, *lines), _ = compared(write.folders, "method=diloco")
    assert head[:3] == ["method", "tau", "outer_lr"]
    settings = [line[:3] for line in lines]
    assert settings == sorted(settings, key=lambda s: (s[0], int(s[1]), s[2]))
    assert [line[6:] for line in lines[:4]] == [["base", ""]] * 4
    assert [line[6:] for line in lines[4:]] == [["+1.00% +- 0.00%", "2"]] * 4


def test_a_run_without_a_base_or_with_several_has_no_distance(write):
    write(2.0, "minibatch")
    for tau in 4, 16:
        write(2.0, "diloco", tau=tau)
    write(2.2, "edit", tau=4)
    write(2.2, "edit", tau=64)
    lines, _ = compared(write.folders, "method=diloco")
    assert [line[-2:] for line in lines[1:]] == [
        ["several bases", "0"], ["base", ""], ["base", ""], ["+10.00%", "1"], ["no base", "0"]
    ]  # fmt: skip
    lines, _ = compared(write.folders, "method=edit", "tau=4")  # minibatch lacks tau: no difference
    assert [line[-2] for line in lines[1:2]] == ["-9.09%"]


def test_losses_on_two_texts_have_no_distance(write):
    write(2.0, "diloco", data=["a"], corpus_hash="a")
    write(2.2, "edit", data=["b"], corpus_hash="b")
    lines, _ = compared(write.folders)
    assert lines[-1][-2:] == ["other text", "0"]
    write(2.4, "edit", data=["a"], corpus_hash="a")
    lines, _ = compared(write.folders, "method=diloco")
    assert sorted(line[-2] for line in lines[1:]) == ["+20.00%", "base", "no base"]


def test_seeds_that_diverged_are_said_and_in_no_mean(write, tmp_path, capsys):
    """Of two seeds of outer_lr 1 one diverged, of 9 both."""
    for seed in 1, 2:
        write(2.0, seed=seed, outer_lr=0.5)
        write(math.nan, seed=seed, outer_lr=9.0, rows=DIVERGED)
    write(2.2, seed=1, outer_lr=1.0)
    write(math.nan, seed=2, outer_lr=1.0, rows=DIVERGED)
    folder = [*write.folders, "--out", str(tmp_path / "x")]
    table.main(folder)
    lines = cells(capsys.readouterr().out)
    assert [line[1] for line in lines[2:]] == [
        "2.2000; diverged, 1 of 2 seeds", "diverged, 2 of 2 seeds"
    ]  # fmt: skip
    assert [line[-2] for line in lines[2:]] == ["+10.00%; 1 of 2 diverged", ""]
    assert compared([str(tmp_path / "x.csv")])[0] == lines  # the file knows it, too
    lines, _ = compared(write.folders, "outer_lr=9.0")
    assert lines[1][-2] == "base diverged"


# ---- columns ----


def test_a_flag_that_follows_another_is_named_below_the_table(write):
    for model, layers in {"tiny": 4, "10m": 6}.items():
        for method, rate in {"diloco": 0.7, "edit": 0.9}.items():
            write(2.0, method, model=model, n_layer=layers, outer_lr=rate)
    (head, *lines), notes = compared(write.folders)
    assert head[:3] == ["method", "model", "validation loss"]
    assert len(lines) == 4
    assert notes == ["flags that follow another one: n_layer (model), outer_lr (method)"]
    lines, _ = compared(write.folders, "n_layer=4")  # a base may name it all the same
    assert [line[-2] for line in lines[1:]] == ["+0.00%", "base", "+0.00%", "base"]


def test_settings_of_a_start_are_no_columns_but_mesh_machine_and_corpus_are(write):
    write(2.0, keep=2, data=["a"], device_name="cpu", torch="2.13")
    write(2.0, keep=3, data=["b"], device_name="H100", torch="2.13")
    assert compared(write.folders)[0][0][0] == "device_name"
    write(2.0, data=["b"], device_name="H100", torch="2.13", corpus_hash="other")
    assert compared(write.folders[1:])[0][0][0] == "corpus_hash"
    write(2.0, mesh={"replicas": 2, "shards": 2}, replicas=0)
    write(2.0, mesh=MESH, replicas=4)
    write(2.1, mesh=MESH, replicas=0, seed=2)
    lines = compared(write.folders[-3:])[0]
    assert [line[0] for line in lines] == ["replicas", "2", "4"]


# ---- what does not count ----


def test_unfinished_and_repeated_runs_are_said_and_not_averaged(write, tmp_path):
    write(2.0)
    write(9.0, rows=[{"event": "step", "step": 5, "tokens": 1, "train_s": 1, "sync_bytes": 1}])
    write(9.0, data=["elsewhere"])  # the same corpus, flags and seed as the first one
    waiting = tmp_path / "waiting"  # as lab.sweep leaves it
    waiting.mkdir()
    (waiting / "command.txt").write_text("python train.py\n")
    cut_off = write_run(tmp_path / "cut", 3.0)
    record = tmp_path / "cut" / "metrics.jsonl"
    record.write_text(record.read_text()[:-9])
    lines, notes = compared([*write.folders, cut_off, str(waiting)])
    assert lines[1] == ["2.0000", "1.0", "1"]
    assert notes == [
        f"{write.folders[1]}: not finished (step 5), left out",
        f"{cut_off}: not finished (step 0), left out",
        f"{waiting}: has not begun, left out",
        "1 runs repeat another one, left out",
    ]
    with pytest.raises(UserError, match="there is no finished run"):
        table.read_runs([cut_off])


def test_a_run_that_went_on_with_other_flags_has_the_last_ones(write):
    resume = {"event": "resume", "step": 4, "method": "edit", "seed": 1, "max_steps": 16}
    end = {"event": "end", "step": 16, "val_loss": 1.0, "exit": "done"}
    write(1.0, rows=[resume | {"mesh": MESH, "corpus_hash": "c"}, end])
    write(2.0)
    lines, _ = compared(write.folders)
    assert [line[:2] for line in lines[1:]] == [["8", "2.0000"], ["16", "1.0000"]]


def test_at_a_step_counts_the_last_evaluation_up_to_it(write, capsys):
    """write_run() evaluates after step 4, with a loss that is higher by 1, and after step 8."""
    write(2.0, "minibatch")
    write(3.0, "edit")
    table.main([*write.folders, "--at", "7", "--base", "method=minibatch"])
    _, first, second = cells(capsys.readouterr().out)
    assert (first[1], second[1], second[4]) == ("3.0000", "4.0000", "+33.33%")
    with pytest.raises(UserError, match="--at 3: .* has no evaluation up to this step"):
        table.main([*write.folders, "--at", "3"])


def test_bytes_and_speed_are_those_after_the_warmup(write):
    """A step of the warm-up sends 7 bytes. The first row at or after its end is that of step 90, or
    of 110."""
    steps = []
    for step, train_s, sent, ms in (1, 0.5, 7, 9000), (90, 0.9, 630, 900), (110, 1.5, 720, 100):
        steps.append({"step": step, "tokens": 2048 * step, "train_s": train_s, "sync_bytes": sent})
        steps[-1] |= {"event": "step", "step_ms": ms}
    last = {"step": 420, "tokens": 2048 * 420, "train_s": 9.0, "sync_bytes": 9000, "val_loss": 2.0}
    ends = [{"event": "eval"} | last, {"event": "end", "exit": "done"} | last]
    for warmup, sent, first in (90, 9000 - 630, 1), (100, 9000 - 700, 2):
        write(2.0, rows=[*steps, *ends], sync_warmup_steps=warmup)
        ((run,), _) = table.read_runs(write.folders[-1:])
        assert run.results["local_bytes"] == sent
        speed = 2048 * (420 - steps[first]["step"]) / (9.0 - steps[first]["train_s"])
        assert run.results["tokens_per_s"] == pytest.approx(speed)
        assert run.results["step_ms"] == 100  # the median from the third row on
    write(2.0, "minibatch", rows=[*steps, *ends])
    ((run,), _) = table.read_runs(write.folders[-1:])
    assert "local_bytes" not in run.results  # it is nothing but warm-up


# ---- files ----


def test_runs_of_a_csv_file_give_the_same_table(write, tmp_path, capsys):
    for seed in 1, 2:
        write(2.0 + seed, "minibatch", seed, scale_lr="")
        for tau in 4, 16:
            write(2.2 + seed, "edit", seed, tau=tau, scale_lr="", weighted_averaging=True)
            write(2.4 + seed, "edit", seed, tau=tau, scale_lr="3:1:2:3", weighted_averaging=False)
    words = ["--base", "method=minibatch", "--show", "train_s", "--out"]
    table.main([*write.folders, *words, str(tmp_path / "first")])
    table.main([str(tmp_path / "first.csv"), *words, str(tmp_path / "again")])
    assert (tmp_path / "again.md").read_text() == (tmp_path / "first.md").read_text()
    capsys.readouterr()

    only = ["--only", "method=edit", "scale_lr=none"]
    table.main([str(tmp_path / "first.csv"), *only])
    assert [line[0] for line in cells(capsys.readouterr().out)] == ["tau", "4", "16"]
    with (tmp_path / "first.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["seed"] for row in found] == ["1"] * 5 + ["2"] * 5
    assert [float(row["val_loss"]) for row in found[:3]] == [3.0, 3.2, 3.4]
    assert float(found[1]["over_base"]) == pytest.approx(0.2 / 3)
    for text in "", "a,b\n1,2\n", "folder,method,seed,val_loss\nx,edit,1,low\n":
        (tmp_path / "other.csv").write_text(text)
        with pytest.raises(UserError, match="other.csv is no CSV file of lab.table|no finished run"):
            table.main([str(tmp_path / "other.csv")])


def test_runs_without_a_known_loss_are_in_no_mean_and_no_picture(tmp_path, capsys):
    """Nothing is known where the file says nan, and where it says nothing."""
    lines = ["a,minibatch,,1,nan,400,nan", "b,edit,4,1,,30.5,", "c,edit,16,1,nan,20.5,nan"]
    path = write_csv(tmp_path / "speed.csv", *lines)
    table.main([path, "--show", "step_ms", "--out", str(tmp_path / "again")])
    printed = capsys.readouterr().out
    assert cells(printed) == [
        ["method", "tau", "validation loss", "MB sent", "ms a step", "seeds"],
        ["minibatch", "", "", "", "400.0", "1"],
        ["edit", "4", "", "", "30.5", "1"],
        ["edit", "16", "", "", "20.5", "1"],
    ]
    assert "picture none: no run has" in printed

    lines = ["a,minibatch,,1,2.0,,", "b,minibatch,,2,3.0,,", "c,edit,4,1,2.2,,", "d,edit,4,2,nan,9,"]
    (_, _, edit), _ = compared([write_csv(tmp_path / "a.csv", *lines)])
    assert edit == ["edit", "2.2000", "", "2", "+10.00%", "1"]


def test_a_folder_that_is_no_run_is_refused_in_one_line(write, tmp_path):
    write(2.0)
    with pytest.raises(FileNotFoundError) as caught:
        table.main([*write.folders, str(tmp_path)])
    line = f"{tmp_path}/metrics.jsonl: No such file or directory"
    assert explain(caught.value) == (2, line)
    for text in "{\n", '{"event": "step"}\n', "5\n", '{"event": "config"}\n':
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(UserError, match="is not the record of a run"):
            table.main([*write.folders, str(tmp_path)])


WRONG = {
    "--base method": "write FLAG=VALUE",
    "--base metod=edit": "no such flag",
    "--base method=diloco": "no run has it; there is: edit, minibatch",
    "--base tau=4 --base method=edit tau=4": "--base tau=4: write FLAG=VALUE once",
    "--base method=minibatch tau=4": "no run has it",
    "--only tau=5": "--only tau=5: no run has it; there is: 4",
    "--show loss": "invalid choice: 'loss'",
    "--best": "unrecognized arguments",
}


def test_wrong_words_are_refused_in_one_line_and_nothing_is_written(write, tmp_path, capsys):
    write(2.0, "minibatch")
    write(2.2, "edit", tau=4)
    for words, message in WRONG.items():
        with pytest.raises(UserError, match=message) as caught:
            table.main([*write.folders, *words.split(), "--out", str(tmp_path / "x")])
        assert "\n" not in str(caught.value), words
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.glob("x.*"))


# ---- pictures ----


@pytest.fixture
def drawn(monkeypatch):
    """A function: the lines and the panel that lab.table draws for these words."""
    found = []
    monkeypatch.setattr(plot, "draw", lambda rows, panel, path: found.append((rows, panel)))

    def drawn(tmp_path, *words):
        table.main([*words, "--out", str(tmp_path / "picture")])
        rows, panel = found.pop()
        return plot.lines_of(rows, panel), panel

    return drawn


def test_a_curve_is_the_mean_of_its_runs_and_named_by_what_differs(write, tmp_path, drawn):
    """train_s is 4 / seed and 8 / seed, so their means over seeds 1 and 2 are 3 and 6."""
    for seed, loss in {1: 2.0, 2: 3.0}.items():
        write(loss, "edit", seed, tau=4)
        write(loss, "edit", seed, tau=16)
        write(loss, "minibatch", seed)
    lines, _ = drawn(tmp_path, *write.folders, "--x", "train_s")
    assert lines["edit", "tau 4"] == [(3.0, 3.5, 3.0, 4.0), (6.0, 2.5, 2.0, 3.0)]
    assert list(lines) == [("minibatch", ""), ("edit", "tau 4"), ("edit", "tau 16")]
    lines, _ = drawn(tmp_path, *write.folders, "--x", "train_s", "--first", "5")
    assert lines["edit", "tau 4"] == [(6.0, 2.5, 2.0, 3.0)]
    lines, _ = drawn(tmp_path, *write.folders, "--x", "tau")  # the last losses over a flag
    assert lines == {("edit", ""): [(4.0, 2.5, 2.0, 3.0), (16.0, 2.5, 2.0, 3.0)]}
    assert drawn(tmp_path, *write.folders)[1].x == "tokens"


def test_points_with_a_base_show_distances(tmp_path, drawn):
    """Seed 3 has no base."""
    lines = ["a,edit,4,1,2.0,,", "b,edit,4,2,3.0,,", "c,edit,16,1,2.2,,", "d,edit,16,2,3.6,,"]
    path = write_csv(tmp_path / "a.csv", *lines, "e,edit,16,3,9.0,,")
    lines, panel = drawn(tmp_path, path, "--base", "tau=4")  # over the first flag with numbers
    assert (panel.x, panel.ylabel) == ("tau", "loss over tau 4, in %")
    (points,) = lines.values()
    assert points == [(4, 0, 0, 0), pytest.approx((16, 15, 10, 20))]


def test_over_the_gain_each_outer_step_is_above_the_best_of_its_line(write, tmp_path, drawn):
    """With tau 4 the means are 2.0 (gain 1), 2.2 (also 1) and 3.0 (gain 4)."""
    for tau, seed, lr, mu, loss in (
        (4, 1, 1.0, 0.0, 1.5),
        (4, 2, 1.0, 0.0, 2.5),
        (4, 1, 0.5, 0.5, 2.2),
        (4, 1, 0.8, 0.8, 3.0),
        (16, 1, 1.0, 0.0, 4.4),
        (16, 1, 0.8, 0.8, 4.0),
    ):
        write(loss, tau=tau, seed=seed, outer_lr=lr, outer_momentum=mu)
    write(9.0, "minibatch")
    lines, _ = drawn(tmp_path, *write.folders, "--x", "gain")
    assert lines["edit", "tau 4"] == [pytest.approx((1, 5, 0, 10)), pytest.approx((4, 50, 50, 50))]
    assert lines["edit", "tau 16"] == [pytest.approx((1, 10, 10, 10)), pytest.approx((4, 0, 0, 0))]


def test_gain_counts_how_much_rounds_move_alike():
    flags = {"method": "edit", "outer_lr": 0.8, "outer_momentum": 0.8}
    runs = [rows.Run("", flags | {"tau": 16}, 1, {"val_loss": 2.0, "cosine": 0.5}, {})]
    runs += [rows.Run("", flags | {"tau": 4}, 1, {"val_loss": 2.0}, {})]  # unknown: as if all alike
    gains = [row["gain"] for row in plot.gain_curves(runs)]
    assert sorted(gains) == pytest.approx([0.8 * (1 + 0.8 / (1 - 0.4)), 4.0])


def test_a_picture_is_drawn_or_its_package_or_what_it_lacks_is_named(
    write, tmp_path, monkeypatch, capsys
):
    write(2.0, "minibatch")
    write(2.2, "edit", tau=4)
    write(2.2, "edit", tau=8)
    table.main([*write.folders, "--x", "method", "--out", str(tmp_path / "x")])
    assert capsys.readouterr().out.endswith("picture none: no run has method and a known loss\n")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        table.main([*write.folders, "--out", str(tmp_path / "x")])
    assert capsys.readouterr().out.endswith("picture none: pip install matplotlib\n")
    assert (tmp_path / "x.md").exists() and not (tmp_path / "x.svg").exists()

    pytest.importorskip("matplotlib")
    table.main([*write.folders, "--x", "sync_bytes", "--out", str(tmp_path / "x.svg")])
    svg = (tmp_path / "x.svg").read_text()
    for text in "EDiT, tau 4", "EDiT, tau 8", "averaged gradients", "bytes over slow links, per rank":
        assert f">{text}" in svg
    write(2.2, "edit", tau=8, data_by_replica=False)
    write(2.2, "edit", tau=8, data_by_replica=True)
    words = ["--x", "data_by_replica", "--out", str(tmp_path / "x")]
    table.main([*write.folders[-2:], *words])
    svg = (tmp_path / "x.svg").read_text()
    assert ">no<" in svg and ">yes<" in svg


def test_three_lines_of_pandas_read_a_record_and_one_a_table(write, tmp_path, capsys):
    pandas = pytest.importorskip("pandas")
    write(2.0, "minibatch")
    write(2.2, "edit")
    record = pandas.read_json(f"{write.folders[0]}/metrics.jsonl", lines=True)
    assert record[record.event == "eval"].val_loss.tolist() == [3.0, 2.0]
    table.main([*write.folders, "--out", str(tmp_path / "x")])
    assert pandas.read_csv(tmp_path / "x.csv").groupby("method").val_loss.mean()["edit"] == 2.2


def test_a_method_of_ones_own_comes_last(write):
    for method in "averaging", "edit":
        write(2.0, method)
    runs, _ = rows.read_runs(write.folders)
    assert [run.flags["method"] for run in runs] == ["averaging", "edit"]
    assert [line[0] for line in compared(write.folders)[0][1:]] == ["edit", "averaging"]
