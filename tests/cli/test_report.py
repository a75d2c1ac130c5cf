"""The table of runs whose numbers are known."""

import csv
import errno
import math
import statistics
from pathlib import Path

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import Dirichlet, FedAvg, FederatedLoop, FedMUD, LowRank, MatrixProduct
from lightning_lowrank.cli.report import parse_bytes, report
from lightning_lowrank.cli.runs import find_runs
from lightning_lowrank.run_metadata import software, write_metadata
from tests.cli.run_folders import configured, draw_nothing, make_report, rows_of, write_run
from tests.helpers import Data, Module, fit, trainer

PERSONAL = {"personal/val_acc": 0.75, "personal/val_acc_worst10": 0.25, "personal/val_acc_std": 0.125}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch, request):
    """Draw pictures of real runs alone: they take far longer than a table does."""
    if request.function is not test_real_runs:
        draw_nothing(monkeypatch)


def test_the_first_rounds_alone(tmp_path):
    folder = write_run(tmp_path / "runs" / "dense", rows_of([0.1, 0.7, 0.9], up=4_000_000, down=1_000_000))
    (row,), _ = make_report([folder], tmp_path / "out", rounds=2)
    assert (row["rounds"], row["best (round) val_acc"], row["MB up"]) == ("2", "0.7000 (2)", "8.00")
    assert "val_acc of 1 run, first 2 rounds" in (tmp_path / "out" / "report.md").read_text()
    with pytest.raises(MisconfigurationException, match="rounds must be"):
        make_report([folder], tmp_path / "out", rounds=0)


def test_best_last_rounds_and_bytes(tmp_path):
    first = write_run(tmp_path / "runs" / "dense", rows_of([0.1, 0.9, 0.7], up=4_000_000, down=1_000_000))
    second = write_run(tmp_path / "runs" / "low", rows_of([0.2, 0.3], up=500_000, down=20_000))
    (dense, low), _ = make_report([first, second], tmp_path / "out")
    assert dense == {
        "run": "dense",
        "rounds": "3",
        "best (round) val_acc": "0.9000 (2)",
        "last val_acc": "0.7000",
        "MB up": "12.00",
        "MB down": "3.00",
        "of dense FedAvg": "6.25%",
    }
    assert [low[column] for column in ("rounds", "best (round) val_acc", "last val_acc", "MB up", "MB down")] == [
        "2",
        "0.3000 (2)",
        "0.3000",
        "1.00",
        "0.04",
    ]


def test_clients_are_shown_worst_first(tmp_path):
    folder = write_run(
        tmp_path / "runs" / "dense", [{**row, "global/val_acc": 0.5} for row in rows_of([0.1, 0.7], up=1, down=1)]
    )
    lines = [f"1.{client},{client},{0.5 + client / 100},{1 - client / 100}" for client in range(30)]
    (folder / "clients.csv").write_text("\n".join(["client,samples,personal/val_acc,global/val_acc", *lines, "odd\0,"]))
    (row,), _ = make_report([folder], tmp_path / "out")
    assert row["global val_acc"] == "0.5000"
    text = (tmp_path / "out" / "report.md").read_text().partition("## Clients")[2].partition("##")[0]
    shown = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| dense")]
    # A client without the figure comes first.
    assert shown == ["odd\\\\x00", *(f"1.{client}" for client in range(29, 10, -1))]
    assert "0.7900 | 0.7100" in text
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h2>Clients</h2>" in page
    for rounds, told in ((2, True), (1, False)):
        make_report([folder], tmp_path / "out", rounds=rounds)
        assert ("## Clients" in (tmp_path / "out" / "report.md").read_text()) == told
    (folder / "clients.csv").write_bytes(b"\xff\x00" * 100)
    make_report([folder], tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, None),
        ({"federated__algorithm": {"class_path": "FedAdam", "init_args": {"lr": 0.75}}}, None),
        ({"data__learning_rate": 0.75}, None),
        ({"model": {"init_args": {"lr": 0.25}}, "federated__lr": 0.75}, "0.25"),
        ({"model": {"init_args": {"lr": 0.25}}, "optimizer": {"init_args": {"lr": 0.125}}}, "0.125"),
    ],
)
def test_the_learning_rate_is_that_of_the_clients(tmp_path, changes, rate):
    run = configured(tmp_path / "run", 0, rows_of([0.5], 1, 1), **changes)
    make_report([run], tmp_path / "out")
    (row,) = csv.DictReader((tmp_path / "out" / "report.csv").read_text().splitlines())
    assert row.get("learning rate") == rate


def test_the_learning_rate_of_a_run_of_python_is_its_hyperparameter(tmp_path):
    run = write_run(tmp_path / "run", rows_of([0.5], 1, 1))
    (run / "hparams.yaml").write_text("lr: 0.25\n")
    make_report([run], tmp_path / "out")
    assert "learning rate" in (tmp_path / "out" / "report.csv").read_text()


def test_a_loss_is_better_when_lower(tmp_path):
    run = write_run(tmp_path / "run", rows_of([0.1, 0.9, 0.7], 1, 1))
    (row,), _ = make_report([run], tmp_path / "out", metric="val_loss")
    assert row["best (round) val_loss"] == "0.1000 (2)"
    assert row["last val_loss"] == "0.3000"


def test_the_best_value_goes_by_what_is_better(tmp_path):
    rows = [{"epoch": number, "val_ppl": 2.0 - number, "val_merit": float(number), "lr": 0.1} for number in range(2)]
    plain = write_run(tmp_path / "plain", rows)
    (row,), text = make_report([plain], tmp_path / "out", metric="val_ppl")
    assert row["best (round) val_ppl"] == "1.0000 (2)"
    assert text.startswith("val_ppl of 1 run\n")
    (row,), text = make_report([plain], tmp_path / "out", metric="val_merit")
    assert list(row)[:3] == ["run", "rounds", "last val_merit"]
    assert "No best val_merit is shown, for it is not known whether higher is better: the name does not say" in text
    watched = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val_merit", "mode": "max"}}]
    run = configured(tmp_path / "watched", 0, rows, trainer__callbacks=watched)
    (row,), _ = make_report([run], tmp_path / "out", metric="val_merit")
    assert row["best (round) val_merit"] == "1.0000 (2)"


def test_a_broken_folder_is_left_out_and_named(tmp_path):
    write_run(tmp_path / "whole", rows_of([0.5], 1, 1))
    (write_run(tmp_path / "torn", [{"epoch": 0}]) / "metrics.csv").write_bytes(b"\x00")
    rows, text = make_report([tmp_path], tmp_path / "out")
    assert len(rows) == 1
    assert "torn is left out: its metrics.csv has no round that can be read" in text


def test_seeds_of_one_configuration_are_one_row(tmp_path):
    accuracies = [[0.1, 0.9, 0.7], [0.3, 0.5, 0.8], [0.2, 0.6, 0.6]]
    for seed, (values, up) in enumerate(zip(accuracies, (4_000_000, 4_000_000, 5_000_000), strict=True)):
        configured(tmp_path / "runs" / "low" / f"version_{seed}", seed, rows_of(values, up, 1_000_000))
    configured(tmp_path / "runs" / "dense" / "version_0", 0, rows_of([0.4, 0.5], 1_000_000, 1_000_000))
    (dense, low), text = make_report([tmp_path / "runs"], tmp_path / "out")

    def figure(values: list[float], digits: int) -> str:
        return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"

    assert low == {
        "run": "low",
        "seeds": "3",
        "rounds": "3",
        "best (round) val_acc": f"{figure([0.9, 0.8, 0.6], 4)} ({figure([2, 3, 2], 1)})",
        "last val_acc": figure([0.7, 0.8, 0.6], 4),
        "MB up": figure([12, 12, 15], 2),
        "MB down": "3.00",
        "of dense FedAvg": "6.25%",
    }
    assert [
        dense[column] for column in ("run", "seeds", "rounds", "best (round) val_acc", "last val_acc", "MB up")
    ] == ["dense", "1", "2", "0.5000 (2)", "0.5000", "2.00"]
    assert all(value in text for value in low.values())


@pytest.mark.parametrize(("rounds", "told"), [([2, 2], False), ([3, 2], True)])
def test_seeds_of_unequal_rounds_are_told(tmp_path, rounds, told):
    for seed, count in enumerate(rounds):
        rows = rows_of([0.5] * count, 1, 1)
        configured(tmp_path / "runs" / "low" / f"version_{seed}", seed, rows, trainer__max_epochs=3)
    _, text = make_report([tmp_path / "runs"], tmp_path / "out")
    assert ("low: its seeds ended after 2, 3 rounds" in text) == told
    assert "its seeds" not in make_report([tmp_path / "runs"], tmp_path / "out", each=True)[1]


def test_pictures_of_an_earlier_report_do_not_stay(tmp_path):
    write_run(tmp_path / "runs" / "a", [{"epoch": 0, "val_acc": 0.5}])
    write_run(tmp_path / "dear" / "a", rows_of([0.5], 1, 1))
    (tmp_path / "out").mkdir()
    for name in ("seconds_each.png", "convergence.png", "own.png"):
        (tmp_path / "out" / name).write_text("own")
    for runs, pictures in (("dear", ["bytes.png", "rounds.png"]), ("runs", ["rounds.png"])):
        make_report([tmp_path / runs], tmp_path / "out")
        own = {"seconds_each.png", "convergence.png", "own.png"}
        assert {file.name for file in (tmp_path / "out").glob("*.png")} == {*own, *pictures}
    # A name in the list that is no file of the folder is not followed.
    (tmp_path / "out" / ".report").write_text("../dear/a/metrics.csv\nreport.md\nrounds.png")
    with pytest.raises(MisconfigurationException, match=r"report\.html"):
        make_report([tmp_path / "runs"], tmp_path / "out")
    for name in ("report.html", "report.csv", "report.tex"):
        (tmp_path / "out" / name).unlink()
    make_report([tmp_path / "runs"], tmp_path / "out")
    assert (tmp_path / "dear" / "a" / "metrics.csv").is_file()


@pytest.mark.parametrize("output", ["file", "file/out"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, output):
    write_run(tmp_path / "runs" / "a", rows_of([0.5], 1, 1))
    (tmp_path / "file").write_text("own")
    with pytest.raises(MisconfigurationException, match=rf"--output {tmp_path / output}\b"):
        make_report([tmp_path / "runs"], tmp_path / output)
    assert (tmp_path / "file").read_text() == "own"


@pytest.mark.parametrize("name", ["bytes.png", "report.csv"])
def test_files_that_no_report_wrote_are_not_replaced(tmp_path, name):
    write_run(tmp_path / "runs" / "a", rows_of([0.5], 1, 1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("own")
    with pytest.raises(MisconfigurationException, match=rf"{tmp_path / 'out'}.*{name}"):
        make_report([tmp_path / "runs"], tmp_path / "out")
    assert [file.read_text() for file in (tmp_path / "out").iterdir()] == ["own"]


def test_a_full_disk_leaves_the_earlier_report_whole(tmp_path, monkeypatch):
    write_run(tmp_path / "run", rows_of([0.5], 1, 1))
    make_report([tmp_path / "run"], tmp_path / "report")
    before = {each.name: each.read_bytes() for each in (tmp_path / "report").iterdir()}

    def write(self, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(MisconfigurationException, match=rf"{tmp_path}/report.*Free space"):
        make_report([tmp_path / "run"], tmp_path / "report")
    assert {each.name: each.read_bytes() for each in (tmp_path / "report").iterdir()} == before


def test_wall_time_is_that_of_whole_fits(tmp_path):
    for name, values in (("whole", [1, 12.34]), ("resumed", [5, 3.0]), ("killed", [1]), ("python", [])):
        folder = write_run(tmp_path / "runs" / name, rows_of([0.5], 1, 1))
        if values:
            write_metadata(folder, dict(zip(("first_round", "seconds"), values, strict=False)))
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out")
    assert {row["run"]: row["wall s"] for row in rows} == {"whole": "12.3", "resumed": "", "killed": "", "python": ""}


def test_a_cut_run_has_no_wall_time(tmp_path):
    evaluated = [{"epoch": 2, "step": 20, "test_acc": 0.5}]
    for name, rows in (("short", [*rows_of([0.5, 0.5], 1, 1), *evaluated]), ("long", rows_of([0.5, 0.5, 0.5], 1, 1))):
        write_metadata(write_run(tmp_path / "runs" / name, rows), {"first_round": 1, "seconds": 12.34})
    for rounds, told in ((3, {"short": "12.3", "long": "12.3"}), (2, {"short": "12.3", "long": ""})):
        rows_told, _ = make_report([tmp_path / "runs"], tmp_path / "out", rounds=rounds)
        assert {row["run"]: row["wall s"] for row in rows_told} == told
    (row, _), _ = make_report([tmp_path / "runs"], tmp_path / "out", rounds=1)
    assert "wall s" not in row


def test_a_run_that_went_on_from_another(tmp_path):
    for name, values in (("known", [0.5, 0.8]), ("unknown", [0.8, 0.9])):
        rows = [{**row, "epoch": 4 + row["epoch"]} for row in rows_of(values, 1, 1)]
        write_metadata(write_run(tmp_path / "runs" / name, rows), {"first_round": 5})
    rows, text = make_report([tmp_path / "runs"], tmp_path / "out", target=0.7)
    assert {row["run"]: row["rounds to 0.7"] for row in rows} == {"known": "6", "unknown": "–"}
    assert "unknown went on from another run in round 5: its figures are of the rounds from there on" in text


def test_versions_are_told_where_runs_differ_in_them(tmp_path):
    made = {"a": [("2.9", "ab12")], "b": [("2.9", "ab12"), ("2.9", "cd34")], "c": [None]}
    for name, runs in made.items():
        for seed, versions in enumerate(runs):
            folder = tmp_path / "runs" / name / f"version_{seed}"
            configured(folder, seed, rows_of([0.5], 1, 1), federated__algorithm=name)
            if versions:
                write_metadata(folder, {"software": dict(zip(("torch", "commit"), versions, strict=True))})
    for names, expected in (
        ("ab", {"commit": ["ab12", "ab12, cd34"]}),
        ("abc", {"torch": ["2.9", "2.9", "unknown"], "commit": ["ab12", "ab12, cd34", "unknown"]}),
        ("a", {}),
    ):
        make_report([tmp_path / "runs" / name for name in names], tmp_path / names)
        settings = (tmp_path / names / "report.md").read_text().partition("## Settings")[2].partition("##")[0]
        rows = [[cell.strip() for cell in line.split("|")] for line in settings.splitlines() if line.startswith("|")]
        told = {cell.removesuffix(" of the run"): index for index, cell in enumerate(rows[0]) if "of the run" in cell}
        assert {name: [row[index] for row in rows[2:]] for name, index in told.items()} == expected


def test_rounds_and_bytes_to_a_target(tmp_path):
    seconds = [{"epoch": number, "system/seconds": 1.5 * (number + 1)} for number in range(3)]
    for seed, values in enumerate(([0.1, 0.8, 0.7], [0.3, 0.5, 0.8], [0.1, 0.2, 0.3])):
        configured(tmp_path / "runs" / "some" / f"version_{seed}", seed, rows_of(values, 2_000_000, 10**6) + seconds)
    write_run(tmp_path / "runs" / "all", rows_of([0.75, 0.1], 5_000_000, 5_000_000))
    write_run(tmp_path / "runs" / "none", rows_of([0.5], 1, 1))
    rows, text = make_report([tmp_path / "runs"], tmp_path / "out", target=0.75)
    everyone, none, some = rows
    columns = ("rounds to 0.75", "MB to 0.75", "simulated s to 0.75")
    assert [some[column] for column in columns] == [
        "2.5 ± 0.7 (2 of 3)",
        f"7.50 ± {statistics.stdev([6, 9]):.2f} (2 of 3)",
        f"3.8 ± {statistics.stdev([3, 4.5]):.1f} (2 of 3)",
    ]
    assert some["simulated s"] == "4.5"
    assert [everyone[column] for column in columns] == ["1", "10.00", "–"]
    assert [none[column] for column in columns] == ["–", "–", "–"]
    # Of a group, all seeds have to reach it.
    said = "val_acc 0.75 is reached with the fewest bytes by all (10 MB), with the fewest rounds by all (1)."
    assert f"{said} Not reached by all seeds: none (0 of 1), some (2 of 3)." in text
    (row, *_), text = make_report([tmp_path / "runs"], tmp_path / "out", metric="val_loss", target=0.25)
    assert (row["rounds to 0.25"], row["MB to 0.25"]) == ("1", "10.00")
    _, text = make_report([tmp_path / "runs"], tmp_path / "out", target=0.99)
    assert "val_acc 0.99 is reached by no run with all its seeds." in text
    with pytest.raises(MisconfigurationException, match="target must be a finite number, got nan"):
        report([tmp_path / "runs"], target=float("nan"), output=tmp_path / "out")
    with pytest.raises(MisconfigurationException, match=r"target=1\.0"):
        report([tmp_path / "runs"], metric="step", target=1.0, output=tmp_path / "out")


def test_ties_and_targets_that_are_exactly_reached_are_said(tmp_path):
    # As a float32 of 0.9 is logged.
    reached = 0.8999999761581421
    write_run(tmp_path / "runs" / "a", rows_of([0.1, reached], 1_000_000, 0))
    write_run(tmp_path / "runs" / "b", rows_of([0.2, reached], 999_960_000, 0))
    write_run(tmp_path / "runs" / "c", rows_of([reached - 1e-6], 1, 0))
    rows, text = make_report([tmp_path / "runs"], tmp_path / "out", target=0.9)
    assert [row["rounds to 0.9"] for row in rows] == ["2", "2", "–"]
    assert "reached with the fewest bytes by a (2 MB), with the fewest rounds by a and b (2). Not" in text
    assert "Best val_acc: a and b, 0.9000 each; next is c, 0.9000." in text
    _, text = make_report([tmp_path / "runs" / "a", tmp_path / "runs" / "b"], tmp_path / "two", budget=999_960_000)
    assert "within 1 GB up and down: a, 0.9000; next is b, 0.2000." in text


def test_an_evaluation_after_the_fit_is_neither_last_nor_best(tmp_path):
    rows = [*rows_of([0.05, 0.0833, 0.1111], 10, 10), {"epoch": 2, "step": 20, "train_loss": 0.5}]
    evaluation = [{"epoch": 3, "step": 30, "val_acc": 0.3657, "val_loss": 0.2, "personal/val_acc": 0.9}]
    run = write_run(tmp_path / "runs" / "a", [*rows, *evaluation, {"epoch": 3, "step": 30, "test_acc": 0.4}])
    (row,), _ = make_report([run], tmp_path / "out", target=0.2)
    assert (row["rounds"], row["last val_acc"], row["best (round) val_acc"]) == ("3", "0.1111", "0.1111 (3)")
    assert row["rounds to 0.2"] == "–"
    (row,), _ = make_report([run], tmp_path / "out", metric="test_acc")
    assert row["last test_acc"] == "0.4000"
    assert find_runs([run])[0].series("train_loss") == [(3, 0.5)]


def test_metrics_with_a_prefix_are_named(tmp_path):
    write_run(tmp_path / "a", [{"mine-epoch": 0, "mine-val_acc": 0.5, "step": 1}])
    with pytest.raises(MisconfigurationException, match=r"CSVLogger\(prefix="):
        report([tmp_path / "a"], output=tmp_path / "out")


def test_the_best_method_for_a_budget(tmp_path):
    write_run(tmp_path / "runs" / "cheap", rows_of([0.5, 0.6, 0.55], 10_000_000, 10_000_000))
    write_run(tmp_path / "runs" / "dear", rows_of([0.4, 0.9], 50_000_000, 0))
    write_run(tmp_path / "runs" / "dearest", rows_of([0.99], 10**9, 0))
    rows, text = make_report([tmp_path / "runs"], tmp_path / "out", budget=parse_bytes("50MB"))
    assert [row["in 50 MB (round) val_acc"] for row in rows] == ["0.6000 (2)", "0.4000 (1)", ""]
    assert "Best val_acc: dearest, 0.9900; next is dear, 0.9000." in text
    assert "Best val_acc within 50 MB up and down: cheap, 0.6000; next is dear, 0.4000." in text
    assert "Not evaluated within them by all seeds: dearest (0 of 1)." in text
    _, text = make_report([tmp_path / "runs"], tmp_path / "out", budget=parse_bytes("100MB"))
    assert "within 100 MB up and down: dear, 0.9000; next is cheap, 0.6000." in text
    # Without a budget: as many bytes as all of them had.
    _, text = make_report([tmp_path / "runs"], tmp_path / "out")
    assert "within 60 MB up and down, all that the cheapest run spent: cheap, 0.6000; next is dear, 0.4000." in text
    _, text = make_report([tmp_path / "runs" / "dear"], tmp_path / "out")
    assert "Best" not in text


def test_a_lead_within_the_deviation_is_called_so(tmp_path):
    for name, best in (("a", (0.5, 0.7)), ("b", (0.5, 0.6))):
        for seed, value in enumerate(best):
            clients = {"federated__clients": ord(name)}
            configured(tmp_path / "runs" / name / f"version_{seed}", seed, rows_of([value], 1, 1), **clients)
    _, text = make_report([tmp_path / "runs"], tmp_path / "out")
    said = "a, 0.6000 ± 0.1414; next is b, 0.5500 ± 0.0707; they are nearer than a standard deviation."
    assert f"Best val_acc: {said}" in text


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "0", "nan", "1e999", "1 megabyte", "1.2.3MB"])
def test_budgets_that_are_none_are_refused(text):
    with pytest.raises(MisconfigurationException, match=r"MB.*1"):
        parse_bytes(text)


def test_a_loss_is_lowest_in_each_seed(tmp_path):
    for seed, values in enumerate(([0.1, 0.9, 0.7], [0.3, 0.5, 0.8])):
        configured(tmp_path / f"version_{seed}", seed, rows_of(values, 1, 1))
    (row,), _ = make_report([tmp_path], tmp_path / "out", metric="val_loss")
    assert row["best (round) val_loss"] == f"0.1500 ± {statistics.stdev([0.1, 0.2]):.4f} (2.5 ± 0.7)"


def test_each_shows_every_seed(tmp_path):
    for seed in (0, 1):
        configured(tmp_path / "runs" / f"version_{seed}", seed, rows_of([0.1, 0.5 + seed / 10], 1, 1))
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out", each=True)
    assert [(row["run"], row["last val_acc"]) for row in rows] == [
        ("runs, seed 0", "0.5000"),
        ("runs, seed 1", "0.6000"),
    ]
    assert "seeds" not in rows[0]


def test_unlike_configurations_are_rows_of_their_own_and_unchanged(tmp_path):
    configured(tmp_path / "runs" / "a", 0, rows_of([0.1], 1, 1))
    configured(tmp_path / "runs" / "b", 1, rows_of([0.2], 1, 1), federated__clients=5)
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out")
    assert [row["run"] for row in rows] == ["a", "b"]
    assert "seeds" not in rows[0]
    assert rows[0]["last val_acc"] == "0.1000"


def test_every_setting_that_differs_is_told(tmp_path):
    def factors(**given):
        return {"class_path": "LowRank", "init_args": {"factorization": "CP", "rank": 2, **given}}

    for name, layers, limit in (("a", factors(alpha=4), 1.0), ("b", factors(alpha=32), 1.0), ("c", factors(), 0.5)):
        more = {"data__init_args__seed": 0, "trainer__gradient_clip_val": limit, "lowrank": layers}
        configured(tmp_path / "runs" / name, 0, rows_of([0.1], 1, 1), **more)
    make_report([tmp_path / "runs"], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert all(told in text for told in ("alpha", "32", "gradient_clip_val"))
    # The rank and the class have a column that says them.
    assert "init_args.rank" not in text
    for name, value in (("a", 1), ("b", 2)):
        more = {f"trainer__option_{number}": value for number in range(11)}
        configured(tmp_path / "many" / name, 0, rows_of([0.1], 1, 1), **more)
    make_report([tmp_path / "many"], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert all(f"option_{number}" in text for number in range(11))


def test_what_not_all_seeds_logged_is_left_empty_and_what_diverged_is_not_a_number(tmp_path):
    configured(tmp_path / "version_0", 0, rows_of([0.5, 0.6], 10**6, 10**6))
    configured(tmp_path / "version_1", 1, [{"epoch": 0, "step": 1, "val_acc": 0.5, "comm/total_up_bytes": "nan"}])
    # The configurations say how long a run was to be, not how long it was.
    for number in (0, 1):
        file = tmp_path / f"version_{number}" / "config.yaml"
        file.write_text(file.read_text().replace("max_epochs: 0", "max_epochs: 2"))
    (row,), _ = make_report([tmp_path], tmp_path / "out")
    assert (row["seeds"], row["rounds"]) == ("2", f"1.5 ± {2**-0.5:.1f}")
    assert row["last val_acc"] == f"0.5500 ± {statistics.stdev([0.5, 0.6]):.4f}"
    assert (row["MB up"], row["MB down"]) == ("nan ± nan", "")


def test_personal_figures_have_columns_where_they_were_logged(tmp_path):
    write_run(tmp_path / "runs" / "global", rows_of([0.5], 1, 1))
    write_run(tmp_path / "runs" / "local", rows_of([0.4, 0.6], 1, 1, **PERSONAL))
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out")
    columns = ("personal val_acc", "personal worst10", "personal std")
    assert [rows[0][column] for column in columns] == ["", "", ""]
    assert [rows[1][column] for column in columns] == ["0.7500", "0.2500", "0.1250"]
    assert list(rows[1]).index("MB up") == 7
    (row,), _ = make_report([tmp_path / "runs" / "global"], tmp_path / "out")
    assert not any(column in row for column in columns)
    (_, row), _ = make_report([tmp_path / "runs"], tmp_path / "out", metric="val_loss")
    assert not any(column.startswith("personal") for column in row)
    (row,), _ = make_report([tmp_path / "runs"], tmp_path / "out", metric="personal/val_acc")
    assert row["last personal/val_acc"] == "0.7500"
    assert [column for column in row if column.startswith("personal")] == ["personal worst10", "personal std"]


def test_personal_figures_of_several_seeds(tmp_path):
    for seed in (0, 1):
        more = {name: value + seed / 10 for name, value in PERSONAL.items()}
        configured(tmp_path / f"version_{seed}", seed, rows_of([0.5], 1, 1, **more))
    (row,), _ = make_report([tmp_path], tmp_path / "out")
    assert row["personal worst10"] == f"0.3000 ± {statistics.stdev([0.25, 0.35]):.4f}"


def test_idle_clients_have_a_column_where_they_listened(tmp_path):
    quiet = write_run(tmp_path / "quiet", rows_of([0.5], 1, 1, **{"comm/total_idle_down_bytes": 0}))
    (row,), _ = make_report([quiet], tmp_path / "one")
    assert "MB idle" not in row
    told = write_run(tmp_path / "told", rows_of([0.5], 1, 1, **{"comm/total_idle_down_bytes": 3_000_000}))
    rows, _ = make_report([quiet, told], tmp_path / "two")
    assert [row["MB idle"] for row in rows] == ["0.00", "3.00"]


def test_a_round_that_was_logged_twice_counts_once_with_its_later_figures(tmp_path):
    cut_short = rows_of([0.1, 0.2, 0.95], 10_000_000, 0)
    resumed = rows_of([0.3, 0.4], 10_000_000, 0, first=2)
    run = write_run(tmp_path / "run", cut_short + resumed)
    assert find_runs([run])[0].series("val_acc") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    (row,), _ = make_report([run], tmp_path / "out")
    assert (row["rounds"], row["best (round) val_acc"], row["MB up"]) == ("4", "0.4000 (4)", "40.00")


def test_a_resumed_runs_rounds_go_on_where_they_were(tmp_path):
    run = write_run(tmp_path / "run", rows_of([0.3, 0.4], 10_000_000, 0, first=7))
    (row,), _ = make_report([run], tmp_path / "out")
    assert (row["rounds"], row["best (round) val_acc"], row["MB up"]) == ("9", "0.4000 (9)", "90.00")


def test_runs_without_the_metric_are_left_out_and_named(tmp_path):
    write_run(tmp_path / "runs" / "version_0", rows_of([0.5], 1, 1))
    write_run(tmp_path / "runs" / "version_1", [{"epoch": 0, "step": 0, "test_acc": 0.9}])
    write_run(tmp_path / "runs" / "version_2", [])
    rows, text = make_report([tmp_path / "runs"], tmp_path / "out")
    assert [row["run"] for row in rows] == ["runs"]
    assert "version_1 is left out: it logged no val_acc" in text
    assert "version_2 is left out: its metrics.csv has no round that can be read" in text


@pytest.mark.parametrize("option", ["verbose", "return_predictions"])
def test_runs_that_only_evaluated_are_left_out(tmp_path, option):
    trained, evaluated = tmp_path / "runs" / "version_0", tmp_path / "runs" / "version_1"
    configured(trained, 0, rows_of([0.5], 1, 1))
    write_run(evaluated, [{"epoch": 0, "step": 0, "val_acc": 0.9}])
    config = yaml.safe_load((trained / "config.yaml").read_text())
    (evaluated / "config.yaml").write_text(yaml.safe_dump({**config, option: True}))
    rows, text = make_report([tmp_path / "runs"], tmp_path / "out")
    assert len(rows) == 1
    assert "version_1 is left out: it only evaluated a model" in text
    with pytest.raises(MisconfigurationException, match="only runs of validate, test or predict logged val_acc"):
        make_report([evaluated], tmp_path / "out")


def test_the_default_metric_is_the_first_known_one_that_was_logged(tmp_path):
    run = write_run(tmp_path / "run", [{"epoch": 0, "step": 0, "val_loss": 0.5, "test_acc": 0.9}])
    (row,), _ = make_report([run], tmp_path / "out")
    assert row["last test_acc"] == "0.9000"
    assert row["MB up"] == row["of dense FedAvg"] == ""


def test_nothing_of_the_table_is_lost_in_a_narrow_console(tmp_path):
    name = "a-run-with-a-name-that-is-longer-than-half-of-a-terminal-window"
    write_run(tmp_path / "runs" / name, rows_of([0.123], 1_000_000, 1))
    write_run(tmp_path / "runs" / "b", rows_of([0.456], 1_000_000, 1))
    rows, text = make_report([tmp_path / "runs"], tmp_path / "out")
    assert name in text
    for row in rows:
        assert all(value in text for value in row.values())


def test_refusals_name_what_is_missing(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(MisconfigurationException, match=r"metrics\.csv"):
        report([tmp_path / "empty"], output=tmp_path / "out")
    with pytest.raises(MisconfigurationException, match="nowhere holds no run"):
        report([tmp_path / "nowhere"], output=tmp_path / "out")
    run = write_run(tmp_path / "run", rows_of([0.5], 1, 1))
    with pytest.raises(MisconfigurationException, match=r"val_f1.*'comm/ratio'.*'comm/total_bytes'"):
        report([run], metric="val_f1", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_real_runs(tmp_path):
    loops = {}
    last = {}
    for name, algorithm in (("dense", FedAvg()), ("low", FedMUD())):
        partition = Dirichlet(1.0, min_samples=5)
        loops[name] = FederatedLoop(
            algorithm, clients=6, partition=partition, clients_per_round=2, seed=1, summary=False
        )
        converters: list[pl.Callback] = (
            [] if name == "dense" else [LowRank(MatrixProduct(), rank=1, skip=["last"], summary=False)]
        )
        logger = CSVLogger(tmp_path / "runs", name=name)
        run = trainer(tmp_path, *converters, loops[name], logger=logger, max_epochs=2)
        fit(run, low := Module(), Data())
        last[name] = float(run.callback_metrics["val_acc"])
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out")
    assert [row["run"] for row in rows] == ["dense", "low"]
    for row in rows:
        figures = loops[row["run"]].ledger.figures()
        assert row["rounds"] == "2"
        assert row["last val_acc"] == f"{last[row['run']]:.4f}"
        for way, column in (("up", "MB up"), ("down", "MB down"), ("idle_down", "MB idle")):
            spent = figures[f"comm/total_{way}_bytes"] / 1e6
            assert float(row[column]) == pytest.approx(spent, abs=0.005)
            assert float(row[column]) > 0 or not spent
        assert row["of dense FedAvg"] == f"{figures['comm/ratio']:.2%}"
    assert rows[0]["of dense FedAvg"] == "100.00%"
    seconds = {run.folder.parent.name: run.metadata["seconds"][0] for run in find_runs([tmp_path / "runs"])}
    assert all(seconds[row["run"]] > 0 and row["wall s"] == f"{seconds[row['run']]:.1f}" for row in rows)
    settings = (tmp_path / "out" / "report.md").read_text().partition("## Settings")[2]
    sizes = loops["low"].indices.sizes.tolist()
    assert statistics.median_low(sizes) < statistics.median_high(sizes)
    spread = [f"{each:g}" for each in (min(sizes), statistics.median(sizes), max(sizes))]
    trained = sum(each.numel() for each in low.parameters() if each.requires_grad)
    whole = sum(each.numel() for each in low.parameters())
    assert f"| low | {', '.join(spread)} | 1 | {trained} of {whole} |" in settings
    run = {run.folder.parent.name: run for run in find_runs([tmp_path / "runs"])}["low"]
    assert run.software == software()
    assert math.isclose(run.last("comm/total_bytes") or 0, loops["low"].ledger.figures()["comm/total_bytes"])
