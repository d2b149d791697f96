"""lab.table: means, paired distances and effects are those worked out by hand; what cannot be
compared is said."""

import csv
import json
import sys

import pytest

from config import UserError, explain
from lab import gain, plot, table

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


CSV_HEAD = "folder,method,tau,seed,val_loss,step_ms,over_base"


def write_csv(path, *lines):
    path.write_text("\n".join([CSV_HEAD, *lines]) + "\n")
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
    """The lines of the Markdown tables, each as the list of its cells, without the rulers."""
    found = []
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("| ---"):
            found.append([cell.strip() for cell in line[1:-1].split("|")])
    return found


def compared(folders, *base):
    """(lines of the first table, lines of the second one, the notes)."""
    runs, notes = table.read_runs(folders)
    text, *_ = table.page(runs, list(base), notes)
    first, *rest = text.split("\n\n")
    second = cells(rest[1])[1:] if rest[0].startswith("Each flag") else []
    return cells(first), second, [line[2:] for line in text.splitlines() if line[:2] == "- "]


def test_at_a_step_counts_the_last_evaluation_up_to_it(write, capsys, tmp_path):
    """write_run() evaluates after step 4, with a loss that is higher by 1, and after step 8."""
    write(2.0, "minibatch")
    write(3.0, "edit")
    table.main([*write.folders, "--at", "7", "--base", "method=minibatch"])
    _, first, second = cells(capsys.readouterr().out.split("\n\n")[0])
    assert first[1] == "3.0000" and second[1] == "4.0000"
    assert second[4] == "+33.33% ?"
    table.main([*write.folders, "--at", "8", "--out", str(tmp_path / "x")])
    with open(tmp_path / "x.csv", newline="") as file:
        assert [float(row["val_loss"]) for row in csv.DictReader(file)] == [2.0, 3.0]
    with pytest.raises(UserError, match="--at 3: .* has no evaluation up to this step"):
        table.main([*write.folders, "--at", "3"])


# ---- means and distances ----


def test_standard_error_of_a_mean_is_that_with_n_minus_1(write):
    """Losses 2.0, 2.2, 2.7: mean 2.3; squares 0.09 + 0.01 + 0.16 = 0.26; s = sqrt(0.26 / 2) =
    0.36056; s / sqrt(3) = 0.20817."""
    for seed, loss in {1: 2.0, 2: 2.2, 3: 2.7}.items():
        write(loss, seed=seed)
    (_, line), effects, notes = compared(write.folders)
    assert line == ["2.3000 +- 0.2082", "1.0", "3"]
    assert effects == notes == []


def test_distance_is_the_mean_of_those_of_the_seeds(write):
    """edit: +10% and +20%, so 15%; s = 7.07%, s / sqrt(2) = 5%. Of the means it would be 16.67%.
    diloco: +10% and -5%, so 2.5%; s / sqrt(2) = 7.5%: it may be chance. qsr: one seed."""
    losses = {
        "minibatch": {1: 2.0, 2: 4.0},
        "edit": {1: 2.2, 2: 4.8},
        "diloco": {1: 2.2, 2: 3.8},
        "qsr": {2: 6.0},
    }
    for method, of_seed in losses.items():
        for seed, loss in of_seed.items():
            write(loss, method, seed)
    lines, effects, notes = compared(write.folders, "method=minibatch")
    assert lines == [
        ["method", "validation loss", "MB sent", "seeds", "over minibatch", "n"],
        ["minibatch", "3.0000 +- 1.0000", "1.0", "2", "base", ""],
        ["qsr", "6.0000", "1.0", "1", "+50.00% ?", "1"],
        ["diloco", "3.0000 +- 0.8000", "1.0", "2", "+2.50% +- 7.50%", "2"],
        ["edit", "3.5000 +- 1.3000", "1.0", "2", "+15.00% +- 5.00% *", "2"],
    ]
    assert notes == ["qsr: its mean is without seed 1"]
    assert ["method", "edit", "minibatch", "+15.00% +- 5.00% *", "2", "1"] in effects
    # Without --base: the first method
    assert compared(write.folders)[0] == lines


def test_equal_losses_carry_no_mark(write):
    for seed in 1, 2:
        write(2.0, "minibatch", seed)
        write(2.0, "edit", seed)
    assert compared(write.folders)[0][-1][-2:] == ["+0.00% +- 0.00%", "2"]


def test_runs_of_unlike_settings_are_never_merged_nor_paired(write):
    """The settings' losses differ by up to a factor of 8, edit's from diloco's always by 1%."""
    for t, tau in enumerate((4, 16)):
        for r, rate in enumerate((0.5, 1.0)):
            for seed in 1, 2:
                loss = 2.0 ** (t + 2 * r) + seed
                write(loss, "diloco", seed, tau=tau, outer_lr=rate)
                write(1.01 * loss, "edit", seed, tau=tau, outer_lr=rate)
    (head, *lines), effects, notes = compared(write.folders, "method=diloco")
    assert head[:3] == ["method", "tau", "outer_lr"]
    settings = [line[:3] for line in lines]
    assert settings == sorted(settings, key=lambda s: (s[0], int(s[1]), s[2]))
    assert len({tuple(setting) for setting in settings}) == len(lines) == 8
    assert {line[5] for line in lines} == {"2"}  # seeds
    assert [line[6:] for line in lines[:4]] == [["base", ""]] * 4
    assert [line[6:] for line in lines[4:]] == [["+1.00% +- 0.00% *", "2"]] * 4
    assert effects[0] == ["method", "edit", "diloco", "+1.00% +- 0.00% *", "2", "4"]
    assert notes == []


# ---- effects ----

GRID = {  # (tau, outer_lr, seed) -> loss
    (4, 0.5, 1): 2.0, (4, 0.5, 2): 2.0, (4, 1.0, 1): 2.0, (4, 1.0, 2): 2.0,
    (16, 0.5, 1): 2.2, (16, 0.5, 2): 2.8, (16, 1.0, 1): 2.6, (16, 1.0, 2): 2.4,
}  # fmt: skip


def write_grid(write, without=()):
    for (tau, rate, seed), loss in GRID.items():
        if (tau, rate, seed) not in without:
            write(loss, "edit", seed, tau=tau, outer_lr=rate)


def test_effect_is_averaged_over_settings_and_its_error_is_that_of_the_seeds(write):
    """tau 16 over 4: seed 1 (10% + 30%) / 2 = 20%, seed 2 (40% + 20%) / 2 = 30%. Mean 25%,
    s = 7.07%, s / sqrt(2) = 5%; of all four numbers it would be 6.45%.
    outer_lr 1 over 0.5: seed 1 (0 + 2.6 / 2.2 - 1) / 2 = 9.09%, seed 2 (0 + 2.4 / 2.8 - 1) / 2 =
    -7.14%. Mean 0.97%, s / sqrt(2) = (9.09 + 7.14) / 2 = 8.12%."""
    write_grid(write)
    _, effects, notes = compared(write.folders)
    assert effects == [
        ["tau", "16", "4", "+25.00% +- 5.00% *", "2", "2"],
        ["outer_lr", "1.0", "0.5", "+0.97% +- 8.12%", "2", "2"],
    ]
    assert notes == []


def test_a_missing_run_takes_its_seed_out_of_the_effect_and_this_is_said(write):
    write_grid(write, without=[(16, 1.0, 2)])
    lines, effects, notes = compared(write.folders, "tau=4")
    assert effects[0] == ["tau", "16", "4", "+20.00% ?", "1", "2"]
    assert lines[-1] == ["16", "1.0", "2.6000", "1.0", "1", "+30.00% ?", "1"]
    assert notes == [
        "tau 16, outer_lr 1.0: its mean is without seed 2",
        "effect of tau 16 over 4: without seed 2, which not all settings have",
        "effect of outer_lr 1.0 over 0.5: without seed 2, which not all settings have",
    ]


def test_a_run_without_a_base_is_named_and_has_no_distance(write):
    write_grid(write, without=[(4, 1.0, 2), (4, 0.5, 1), (4, 0.5, 2)])
    lines, effects, notes = compared(write.folders, "tau=4")
    assert lines[-1][-2:] == ["+30.00% ?", "1"]
    assert lines[-2][-2:] == ["", "0"]
    assert "tau 16, outer_lr 0.5: no base, seed 1, 2" in notes
    assert "tau 16, outer_lr 1.0: no base, seed 2" in notes
    assert "effect of tau 16 over 4: no pair for outer_lr 0.5" in notes
    assert effects[0] == ["tau", "16", "4", "+30.00% ?", "1", "1"]


def test_an_effect_names_the_flags_that_change_with_its_flag(write):
    """Of those that follow tau: `clip` has one value at tau 4 and 16, and another at tau 64."""
    for tau, rate, clip in (4, 0.9, 1), (16, 0.7, 1), (64, 0.7, 2):
        write(2.0, tau=tau, outer_lr=rate, clip=clip, optimizer="adamw", lr=0.1)
        write(2.2, tau=tau, outer_lr=rate, clip=clip, optimizer="muon", lr=0.2)
    _, effects, _ = compared(write.folders)
    assert [effect[:3] for effect in effects] == [
        ["optimizer, with lr", "muon", "adamw"],
        ["tau, with outer_lr", "16", "4"],
        ["tau, with outer_lr, clip", "64", "4"],
    ]


def test_a_follower_that_one_of_two_methods_lacks_does_not_change_with_them(write):
    """outer_lr follows method; minibatch has none."""
    write(2.0, "minibatch")
    write(2.2, "edit", outer_lr=0.9)
    write(2.4, "diloco", outer_lr=0.7)
    _, effects, _ = compared(write.folders, "method=minibatch")
    assert [effect[:2] for effect in effects] == [["method", "diloco"], ["method", "edit"]]
    _, effects, _ = compared(write.folders, "method=diloco")
    assert [effect[:2] for effect in effects] == [
        ["method", "minibatch"],
        ["method, with outer_lr", "edit"],
    ]


def test_an_effect_without_a_pair_is_no_effect_of_which_several_fit(write):
    write(2.0, "minibatch")
    for tau in 4, 16:
        write(2.0, "diloco", tau=tau)
        write(2.2, "edit", tau=tau)
    write(2.2, "edit", tau=64)
    _, effects, notes = compared(write.folders, "method=diloco")
    assert effects[0][:2] == ["method", "edit"]
    assert notes == [
        "minibatch: several bases fit, seed 1",
        "edit, tau 64: no base, seed 1",
        "effect of method minibatch over diloco: several fit for all runs",
        "effect of method edit over diloco: no pair for tau 64",
    ]


def test_an_effect_counts_its_settings_without_a_pair_in_one_line(write):
    """edit has lr 0.2 alone: no pair in its four settings. diloco has two runs with lr 0.1 that fit
    its one with lr 0.2, which has no outer_lr."""
    write(2.0, "minibatch", lr=0.1)
    write(2.0, "minibatch", lr=0.2)
    for tau in 4, 16:
        for rate in 0.5, 1.0:
            write(2.2, "edit", lr=0.2, tau=tau, outer_lr=rate)
    write(2.2, "diloco", lr=0.1, tau=4, outer_lr=0.5)
    write(2.2, "diloco", lr=0.1, tau=4, outer_lr=1.0)
    write(2.2, "diloco", lr=0.2, tau=4)
    _, _, notes = compared(write.folders)
    (note,) = [note for note in notes if note.startswith("effect of lr")]
    title, reasons = note.split(": ")
    assert title == "effect of lr 0.2 over 0.1"
    assert reasons.split("; ") == [
        "no pair in 4 settings, for example edit, tau 4, outer_lr 0.5",
        "several fit for diloco, tau 4",
    ]


def test_a_flag_that_the_base_lacks_is_no_difference(write):
    write(2.0, "minibatch")
    write(2.2, "edit", tau=4)
    write(2.4, "edit", tau=16)
    lines, effects, _ = compared(write.folders, "method=minibatch")
    assert [line[-2] for line in lines[1:]] == ["base", "+10.00% ?", "+20.00% ?"]
    assert effects[0] == ["method", "edit", "minibatch", "+15.00% ?", "1", "2"]

    lines, _, notes = compared(write.folders, "method=edit")  # minibatch has two
    assert [line[-2] for line in lines[1:]] == ["", "base", "base"]
    assert "minibatch: several bases fit, seed 1" in notes
    lines, _, notes = compared(write.folders, "method=edit", "tau=16")
    assert lines[0][-2] == "over edit, tau 16"
    assert [line[-2] for line in lines[1:]] == ["-16.67% ?", "-8.33% ?", "base"]


# ---- columns ----


def test_a_flag_that_follows_another_is_named_below_the_table(write):
    shapes = {"tiny": (4, 128), "10m": (6, 384)}
    for model, (n_layer, n_embd) in shapes.items():
        for method, rate in {"diloco": 0.7, "edit": 0.9}.items():
            more = {"n_layer": n_layer, "n_embd": n_embd, "outer_lr": rate}
            write(2.0, method, model=model, **more)
    (head, *lines), _, notes = compared(write.folders)
    assert head[:3] == ["method", "model", "validation loss"]
    assert len(lines) == 4
    assert notes == [
        "n_layer follows model (10m: 6, tiny: 4)",
        "n_embd follows model (10m: 384, tiny: 128)",
        "outer_lr follows method (diloco: 0.7, edit: 0.9)",
    ]
    lines, _, _ = compared(write.folders, "n_layer=4")  # a base may name it all the same
    assert lines[0][-2] == "over n_layer 4"
    assert [line[-2] for line in lines[1:]] == ["+0.00% ?", "base", "+0.00% ?", "base"]


def test_settings_of_a_start_are_no_columns_but_mesh_machine_and_corpus_are(write):
    write(2.0, keep=2, data=["a"], device_name="cpu", torch="2.13")
    write(2.0, keep=3, data=["b"], device_name="H100", torch="2.13")
    assert compared(write.folders)[0][0][0] == "device_name"
    write(2.0, data=["b"], device_name="H100", torch="2.13", corpus_hash="other")
    assert compared(write.folders[1:])[0][0][0] == "corpus_hash"
    write(2.0, data=["c"], device_name="H100", torch="2.13", corpus_hash="third")
    head, *_ = compared(write.folders[1:])[0]
    assert head[:2] == ["data", "corpus_hash"]
    write(2.0, mesh={"replicas": 2, "shards": 2}, replicas=0)
    write(2.0, mesh=MESH, replicas=4)
    write(2.1, mesh=MESH, replicas=0, seed=2)
    lines = compared(write.folders[-3:])[0]
    assert lines[0][0] == "replicas"
    assert [line[0] for line in lines[1:]] == ["2", "4"]


# ---- what does not count ----


def test_unfinished_repeated_and_changed_runs_are_said_and_not_averaged(write):
    write(2.0)
    write(9.0, rows=[{"event": "step", "step": 5, "tokens": 1, "train_s": 1, "sync_bytes": 1}])
    write(9.0, rows=[{"event": "end", "val_loss": 9.0, "exit": "stopped"}])
    write(9.0, rows=[{"event": "end", "val_loss": None, "exit": "done"}])
    write(9.0, data=["elsewhere"])  # the same corpus, flags and seed as the first one
    lines, _, notes = compared(write.folders)
    assert lines[1] == ["2.0000", "1.0", "1"]
    _, unfinished, stopped, diverged, repeated = write.folders
    assert notes == [
        f"{unfinished}: not finished (step 5 of 8), left out",
        f"{stopped}: not finished (step 0 of 8), left out",
        f"{diverged}: its last loss is not finite, left out",
        f"{repeated}: repeats {write.folders[0]}, left out",
    ]
    with pytest.raises(UserError, match="there is no finished run"):
        table.read_runs(write.folders[1:4])


def test_a_run_that_went_on_with_other_flags_has_the_last_ones_and_a_note(write):
    resume = {"event": "resume", "step": 4, "method": "edit", "seed": 1, "max_steps": 16}
    resume |= {"mesh": MESH, "corpus_hash": "c"}
    end = {"event": "end", "step": 16, "val_loss": 1.0, "exit": "done"}
    write(1.0, rows=[resume, end])
    write(2.0)
    lines, _, notes = compared(write.folders)
    assert [line[:2] for line in lines] == [
        ["max_steps", "validation loss"], ["8", "2.0000"], ["16", "1.0000"]
    ]  # fmt: skip
    assert notes == [f"{write.folders[0]}: resumed at step 4 with max_steps 8 -> 16"]


# ---- files ----


def test_runs_of_a_csv_file_give_the_same_table(write, tmp_path, capsys):
    for seed in 1, 2:
        write(2.0 + seed, "minibatch", seed, scale_lr="")
        for tau in 4, 16:
            write(2.2 + seed, "edit", seed, tau=tau, scale_lr="", weighted_averaging=True)
            write(2.4 + seed, "edit", seed, tau=tau, scale_lr="3:1:2:3", weighted_averaging=False)
    words = ["--base", "method=minibatch", "--show", "train_s", "--out"]
    table.main([*write.folders, *words, str(tmp_path / "first")])
    capsys.readouterr()
    table.main([str(tmp_path / "first.csv"), *words, str(tmp_path / "again")])
    for suffix in ".md", ".csv":
        again = (tmp_path / "again").with_suffix(suffix).read_text()
        assert again == (tmp_path / "first").with_suffix(suffix).read_text()
    capsys.readouterr()

    only = ["--only", "method=edit", "scale_lr=none"]
    table.main([str(tmp_path / "first.csv"), *only])
    lines = cells(capsys.readouterr().out)
    assert [line[0] for line in lines[:3]] == ["tau", "4", "16"]
    for text in "", "a,b\n1,2\n", "folder,method,seed,val_loss\nx,edit,1,low\n":
        (tmp_path / "other.csv").write_text(text)
        with pytest.raises(UserError, match="other.csv is no CSV file of lab.table|no finished run"):
            table.main([str(tmp_path / "other.csv")])


def test_runs_without_a_known_loss_have_no_distances_but_the_columns_of_show(tmp_path, capsys):
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
    notes = [line for line in printed.splitlines() if line.startswith("- ")]
    assert notes == ["- no run has a known loss, so there are no distances"]
    assert printed.endswith("picture none: no run has a known loss\n")
    assert not (tmp_path / "again.svg").exists()

    rows = list(csv.DictReader((tmp_path / "again.csv").open(newline="")))
    assert {row["val_loss"] + row["over_base"] for row in rows} == {""}
    assert [row["step_ms"] for row in rows] == ["400", "30.5", "20.5"]
    words = ["--base", "tau=4", "--x", "tau", "--out", str(tmp_path / "over_tau")]
    table.main([str(tmp_path / "again.csv"), "--show", "step_ms", *words])
    again = capsys.readouterr().out
    assert cells(again) == cells(printed)
    assert again.endswith("picture none: no run has a known loss\n")
    assert (tmp_path / "over_tau.csv").read_bytes() == (tmp_path / "again.csv").read_bytes()


def test_a_run_without_a_known_loss_is_not_in_a_mean(tmp_path):
    """edit is 10% above minibatch in seed 1. Of seed 2 its own loss is not known, of seed 3 that of
    minibatch. Of diloco none is."""
    lines = ["a,minibatch,,1,2.0,,", "b,minibatch,,2,3.0,,", "c,edit,4,1,2.2,,"]
    lines += ["d,edit,4,2,nan,9,", "e,diloco,4,1,,,", "f,diloco,4,2,nan,,"]
    lines += ["g,minibatch,,3,nan,,", "h,edit,4,3,2.4,,"]
    lines, effects, notes = compared([write_csv(tmp_path / "a.csv", *lines)])
    assert lines[2:] == [
        ["diloco", "", "", "2", "", "0"],
        ["edit", "2.3000 +- 0.1000", "", "3", "+10.00% ?", "1"],
    ]
    assert effects == [["method", "edit", "minibatch", "+10.00% ?", "1", "1"]]
    assert notes == [
        "minibatch: its mean is without seed 3",
        "edit: its mean is without seed 2",
    ]


def test_picture_leaves_out_runs_without_a_known_loss(tmp_path, monkeypatch):
    lines = ["a,edit,4,1,2.0,,", "b,edit,16,1,nan,,", "c,edit,4,2,nan,,"]
    runs, _ = table.read_runs([write_csv(tmp_path / "a.csv", *lines)])
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda rows, panels, path: drawn.extend(rows))
    table.draw(runs, ["tau"], "tau", 0, [], "x.svg")
    assert [(row["tau"], row["val_loss"]) for row in drawn] == [([4], [2.0])]


def test_picture_of_runs_with_a_base_shows_distances(tmp_path, monkeypatch):
    """Seed 3 has no base."""
    lines = ["a,edit,4,1,2.0,,", "b,edit,4,2,3.0,,", "c,edit,16,1,2.2,,", "d,edit,16,2,3.6,,"]
    path = write_csv(tmp_path / "a.csv", *lines, "e,edit,16,3,9.0,,")
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda rows, panels, path: drawn.append((rows, panels)))
    table.main([path, "--base", "tau=4", "--x", "tau", "--out", str(tmp_path / "out")])
    ((rows, (panel,)),) = drawn
    assert (panel.x, panel.y, panel.ylabel) == ("tau", "over", "loss over tau=4, in %")
    found = sorted((*row["tau"], *row["over"]) for row in rows)
    assert found == [(4, 0), (4, 0), (16, pytest.approx(10)), (16, pytest.approx(20))]


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
        assert run.results["steps"] == 420
    write(2.0, "minibatch", rows=[*steps, *ends])
    ((run,), _) = table.read_runs(write.folders[-1:])
    assert "local_bytes" not in run.results  # it is nothing but warm-up

    for row in steps:
        del row["step_ms"]
    write(2.0, "minibatch", rows=[*steps, *ends])
    ((run,), _) = table.read_runs(write.folders[-1:])
    assert "step_ms" not in run.results  # not NaN


def test_names_in_the_picture_say_in_what_the_lines_of_a_method_differ(write):
    write(2.0, "minibatch")
    write(2.1, "diloco", tau=4, outer_lr=0.5)
    write(2.2, "edit", tau=4, outer_lr=0.7)
    write(2.3, "edit", tau=16, outer_lr=0.9)
    runs, _ = table.read_runs(write.folders)
    rows = table.curves(runs, table.find_columns(runs)[0], "tokens")
    found = [(row["method"], row["variant"]) for row in rows]
    assert found == [("minibatch", ""), ("diloco", ""), ("edit", "tau 4"), ("edit", "tau 16")]


def test_csv_has_a_line_per_run_with_numbers(write, tmp_path, capsys):
    write(2.0, "minibatch")
    write(2.2, "edit", tau=4)
    write(2.4, "edit", tau=16, seed=2)
    table.main([*write.folders, "--out", str(tmp_path / "tau0.5")])
    rows = list(csv.DictReader((tmp_path / "tau0.5.csv").open(newline="")))
    assert [row["method"] for row in rows] == ["minibatch", "edit", "edit"]
    assert [row["tau"] for row in rows] == ["", "4", "16"]
    assert [row["seed"] for row in rows] == ["1", "1", "2"]
    assert [float(row["val_loss"]) for row in rows] == [2.0, 2.2, 2.4]
    assert [row["over_base"] for row in rows][::2] == ["0.0", ""]
    assert float(rows[1]["over_base"]) == pytest.approx(0.1)
    assert [row["sync_bytes"] for row in rows] == ["1000000"] * 3
    printed = capsys.readouterr().out
    assert (tmp_path / "tau0.5.md").read_text().strip() in printed


def test_curve_of_a_line_is_the_mean_of_its_runs(write, tmp_path, monkeypatch):
    """train_s is 4 / seed and 8 / seed, so their means over seeds 1 and 2 are 3 and 6."""
    for seed, loss in {1: 2.0, 2: 3.0}.items():
        write(loss, "edit", seed, tau=4)
        write(loss, "edit", seed, tau=16)
    runs, _ = table.read_runs(write.folders)
    rows = table.curves(runs, ["tau"], "train_s")
    panel = plot.Panel("train_s", "val_loss", "")
    lines = plot.lines_of(rows, panel)
    assert lines["edit", "tau 4"] == [(3.0, 3.5, 3.0, 4.0), (6.0, 2.5, 2.0, 3.0)]
    assert list(lines) == [("edit", "tau 4"), ("edit", "tau 16")]

    rows = table.curves(runs, ["tau"], "tau")  # the last losses over a flag
    lines = plot.lines_of(rows, plot.Panel("tau", "val_loss", ""))
    assert lines == {("edit", ""): [(4.0, 2.5, 2.0, 3.0), (16.0, 2.5, 2.0, 3.0)]}


def test_runs_with_one_evaluation_are_drawn_over_a_flag(write):
    for tau in 4, 16:
        write(2.0, "edit", tau=tau)
        write(2.0, "diloco", tau=tau)
    runs, _ = table.read_runs(write.folders)
    assert table.default_x(runs, ["method", "tau"]) == "tokens"
    for run in runs:
        for column in run.curve.values():
            column.pop()
    assert table.default_x(runs, ["method", "tau"]) == "tau"
    assert table.default_x(runs, ["method"]) == "sync_bytes"


def test_picture_is_drawn_or_its_package_named(write, tmp_path, monkeypatch, capsys):
    write(2.0, "minibatch")
    write(2.2, "edit", tau=4)
    write(2.2, "edit", tau=8)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        table.main([*write.folders, "--out", str(tmp_path / "x")])
    assert capsys.readouterr().out.endswith("picture none: pip install matplotlib\n")
    assert (tmp_path / "x.md").exists()
    assert not (tmp_path / "x.svg").exists()

    pytest.importorskip("matplotlib")
    table.main([*write.folders, "--x", "sync_bytes", "--out", str(tmp_path / "x.svg")])
    svg = (tmp_path / "x.svg").read_text()
    axis = "bytes over slow links, per rank"
    for text in "EDiT, tau 4", "EDiT, tau 8", "averaged gradients", axis:
        assert f">{text}<" in svg


def test_a_switch_may_be_the_x_axis(write, tmp_path):
    pytest.importorskip("matplotlib")
    write(2.0, data_by_replica=False)
    write(2.5, data_by_replica=True)
    table.main([*write.folders, "--x", "data_by_replica", "--out", str(tmp_path / "x")])
    svg = (tmp_path / "x.svg").read_text()
    assert ">no<" in svg and ">yes<" in svg and ">data_by_replica<" in svg


# ---- loss over gain ----


def outer_steps(write):
    """Two outer steps whose gain is 1, and one of 4; with tau 4 one of them has two seeds."""
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


def test_points_of_a_tau_are_how_far_each_outer_step_is_above_its_best_one(write):
    outer_steps(write)
    lines = gain.find_points(table.read_runs(write.folders[:-1])[0])
    assert list(lines) == ["tau 4", "tau 16"]
    short = [(1, 0, 0), (1, 0.1, 0.5), (4, 0.5, 0.8)]
    assert [list(point) for point in lines["tau 4"]] == [pytest.approx(point) for point in short]
    long = [(1, 0.1, 0), (4, 0, 0.8)]
    assert [list(point) for point in lines["tau 16"]] == [pytest.approx(point) for point in long]


def test_gain_is_drawn_for_the_chosen_runs(write, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    outer_steps(write)
    gain.main([*write.folders, "--only", "tau=4", "--out", str(tmp_path / "new" / "gain")])
    svg = (tmp_path / "new" / "gain.svg").read_text()
    assert ">all runs<" in svg and ">momentum 0.8 or more<" in svg and ">50%<" in svg
    assert capsys.readouterr().out.endswith(f"\npicture {tmp_path}/new/gain.svg\n")


def test_runs_with_one_outer_step_have_no_picture(write, tmp_path):
    write(2.0, "minibatch")
    write(2.2, "edit", outer_lr=0.7, outer_momentum=0.8)
    with pytest.raises(UserError, match="no setting has runs with two values of --outer_lr"):
        gain.main([*write.folders, "--out", str(tmp_path / "gain")])
    assert not (tmp_path / "gain.svg").exists()
    for line in "a,edit,4,1,2.0,,", "b,edit,16,1,2.0,,":
        with pytest.raises(UserError, match="no run has --outer_lr: name the folders of the runs"):
            gain.main([write_csv(tmp_path / "a.csv", line), "--out", str(tmp_path / "gain")])


def test_gain_says_which_seeds_a_point_lacks_and_which_package(write, tmp_path, monkeypatch, capsys):
    outer_steps(write)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    gain.main([*write.folders, "--out", str(tmp_path / "gain")])
    printed = capsys.readouterr().out
    assert "tau 4, outer_lr 0.5: its mean is without seed 2" in printed
    assert printed.endswith("picture none: pip install matplotlib\n")


WRONG = {
    "--base method": "write FLAG=VALUE",
    "--base metod=edit": "no such flag",
    "--base method=diloco": "no run has it; there is: minibatch, edit",
    "--base tau=5": "there is: 4",
    "--base tau=4 --base method=edit tau=4": "--base tau=4: tau has a value already",
    "--only method=edit method=minibatch": "method has a value already; give each flag one",
    "--base method=minibatch tau=4": "no run has all of these",
    "--x loss": "one of step, tokens, train_s, sync_bytes",
    "--y tau": "unrecognized arguments",
    "--only tau=5": "--only tau=5: no run has it; there is: 4",
    "--show loss": "invalid choice: 'loss'",
    "--x method": "a flag whose values are numbers",
    "--best": "unrecognized arguments",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words_are_refused_in_one_line_and_nothing_is_written(words, write, tmp_path, capsys):
    write(2.0, "minibatch")
    write(2.2, "edit", tau=4)
    with pytest.raises(UserError, match=WRONG[words]) as caught:
        table.main([*write.folders, *words.split(), "--out", str(tmp_path / "x")])
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.glob("x.*"))


def test_runs_that_have_not_begun_or_were_cut_off_while_writing_are_left_out(write, tmp_path):
    """As lab.sweep leaves them."""
    write(2.0)
    cut_off = write_run(tmp_path / "cut", 3.0)
    record = tmp_path / "cut" / "metrics.jsonl"
    record.write_text(record.read_text()[:-9])
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    (waiting / "command.txt").write_text("python train.py\n")
    runs, notes = table.read_runs([*write.folders, cut_off, str(waiting)])
    assert [run.loss for run in runs] == [2.0]
    assert notes == [
        f"{cut_off}: not finished (step 0 of 8), left out",
        f"{waiting}: has not begun, left out",
    ]


def test_a_folder_that_is_no_run_is_refused_in_one_line(write, tmp_path):
    write(2.0)
    with pytest.raises(FileNotFoundError) as caught:
        table.main([*write.folders, str(tmp_path)])
    line = f"{tmp_path}/metrics.jsonl: No such file or directory"
    assert explain(caught.value) == (2, line)
    (tmp_path / "metrics.jsonl").write_text("{")
    with pytest.raises(UserError, match="is not the record of a run"):
        table.main([*write.folders, str(tmp_path)])
