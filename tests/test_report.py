"""`report`: tables and plots from folders whose numbers are known."""

import csv
import io
import math
import struct
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib.image import imread
from rich.console import Console

from lightning_lowrank import FedAvg, FederatedLoop, FedMUD, LowRank, MatrixProduct
from lightning_lowrank.report import find_runs, report, short_names
from tests.helpers import Data, Module, fit, trainer


def write_run(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    columns = sorted({name for row in rows for name in row})
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return folder


def rows_of(accuracies: list[float], up: int, down: int, first: int = 0, **more: float) -> list[dict[str, Any]]:
    """A round's figures come in two rows, as CSVLogger writes them."""
    rows: list[dict[str, Any]] = []
    for number, accuracy in enumerate(accuracies, start=first):
        rows.append({"epoch": number, "step": 10 * number, "val_acc": accuracy, "val_loss": 1 - accuracy})
        rows.append(
            {
                "epoch": number,
                "step": 10 * number,
                "comm/total_up_bytes": up * (number + 1),
                "comm/total_down_bytes": down * (number + 1),
                "comm/total_bytes": (up + down) * (number + 1),
                "comm/ratio": 0.0625,
                **more,
            }
        )
    return rows


def table_of(output: Path) -> list[dict[str, str]]:
    header, _, *rows = (
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in (output / "report.md").read_text().splitlines()
    )
    return [dict(zip(header, row, strict=True)) for row in rows]


def make_report(paths: list[Path], output: Path, **arguments: Any) -> tuple[list[dict[str, str]], str]:
    text = io.StringIO()
    report(paths, output=output, console=Console(file=text, width=80), **arguments)
    return table_of(output), text.getvalue()


def picture(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
        _, _, width, height = struct.unpack(">I4sII", file.read(16))
    pixels = imread(path)
    assert pixels.shape[:2] == (height, width)
    return pixels


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


def test_a_loss_is_better_when_lower(tmp_path):
    run = write_run(tmp_path / "run", rows_of([0.1, 0.9, 0.7], 1, 1))
    (row,), _ = make_report([run], tmp_path / "out", metric="val_loss")
    assert row["best (round) val_loss"] == "0.1000 (2)"
    assert row["last val_loss"] == "0.3000"


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


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/quickstart/version_0"], ["quickstart/version_0"]),
        (["runs/a/version_0", "runs/b/version_0"], ["a", "b"]),
        (["runs/a/version_0", "runs/a/version_1"], ["version_0", "version_1"]),
        (["runs/a/version_0", "runs/b/c/version_0"], ["a", "b/c"]),
        (["runs/a", "runs/a/version_0"], ["a", "a/version_0"]),
        (["x/one/version_0", "y/one/version_0"], ["x", "y"]),
    ],
)
def test_names_are_short_and_distinct(tmp_path, folders, names):
    for folder in folders:
        write_run(tmp_path / folder, rows_of([0.5], 1, 1))
    assert short_names(find_runs([tmp_path / folder for folder in folders])) == names


def test_a_run_is_found_once_by_whatever_path(tmp_path, monkeypatch):
    run = write_run(tmp_path / "runs" / "a" / "version_0", rows_of([0.5], 1, 1))
    monkeypatch.chdir(tmp_path)
    assert [found.folder for found in find_runs([Path("runs"), Path("runs/a"), run])] == [run]


def test_runs_without_the_metric_are_left_out_and_named(tmp_path):
    write_run(tmp_path / "runs" / "version_0", rows_of([0.5], 1, 1))
    write_run(tmp_path / "runs" / "version_1", [{"epoch": 0, "step": 0, "test_acc": 0.9}])
    write_run(tmp_path / "runs" / "version_2", [])
    rows, text = make_report([tmp_path / "runs"], tmp_path / "out")
    assert [row["run"] for row in rows] == ["runs/version_0"]
    for number in (1, 2):
        assert f"version_{number} is left out, for it logged no val_acc" in text


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
    with pytest.raises(MisconfigurationException, match=r"empty holds no run: expected metrics\.csv"):
        report([tmp_path / "empty"], output=tmp_path / "out")
    with pytest.raises(MisconfigurationException, match="nowhere holds no run"):
        report([tmp_path / "nowhere"], output=tmp_path / "out")
    run = write_run(tmp_path / "run", rows_of([0.5], 1, 1))
    with pytest.raises(MisconfigurationException, match=r"no run logged val_f1; logged were: .*val_acc"):
        report([run], metric="val_f1", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_plots_are_pictures_with_a_curve_for_each_run(tmp_path):
    few = write_run(tmp_path / "few" / "a", rows_of([0.2, 0.5, 0.6], 10_000, 10_000))
    console = Console(quiet=True)
    written = report([few], output=tmp_path / "one", console=console)
    assert [path.name for path in written] == ["report.md", "rounds.png", "bytes.png"]
    for path in written[1:]:
        pixels = picture(path)
        assert pixels.shape[0] >= 600
        assert pixels.shape[1] >= 900

    def colours(path: Path) -> set[tuple[int, ...]]:
        pixels = (picture(path)[..., :3] * 255).round().astype(int)
        grey = (np.ptp(pixels, axis=-1) < 60).all()
        assert not grey
        values, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
        return {tuple(value) for value, count in zip(values, counts, strict=True) if count > 200 and np.ptp(value) > 60}

    write_run(tmp_path / "few" / "b", rows_of([0.3, 0.4, 0.7], 1_000_000_000, 10))
    report([tmp_path / "few"], output=tmp_path / "two", console=console)
    for name in ("rounds.png", "bytes.png"):
        assert len(colours(tmp_path / "one" / name)) == 1
        assert len(colours(tmp_path / "two" / name)) == 2


def test_many_runs_fit_the_picture(tmp_path):
    for number in range(13):
        write_run(tmp_path / "runs" / f"run{number}", rows_of([0.1, 0.2 + number / 20], 10**number, 1))
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out")
    assert len(rows) == 13
    assert picture(tmp_path / "out" / "bytes.png").shape == picture(tmp_path / "out" / "rounds.png").shape


def test_a_run_that_is_not_federated_has_no_plot_by_bytes(tmp_path):
    run = write_run(tmp_path / "run", [{"epoch": 0, "step": 5, "val_acc": 0.5}])
    written = report([run], output=tmp_path / "out", console=Console(quiet=True))
    assert [path.name for path in written] == ["report.md", "rounds.png"]
    assert not (tmp_path / "out" / "bytes.png").exists()


def test_real_runs(tmp_path):
    loops = {}
    last = {}
    for name, algorithm in (("dense", FedAvg()), ("low", FedMUD())):
        loops[name] = FederatedLoop(algorithm, clients=6, clients_per_round=2, seed=1, summary=False)
        converters: list[pl.Callback] = (
            [] if name == "dense" else [LowRank(MatrixProduct(), rank=1, skip=["last"], summary=False)]
        )
        logger = CSVLogger(tmp_path / "runs", name=name)
        run = trainer(tmp_path, *converters, loops[name], logger=logger, max_epochs=2)
        fit(run, Module(), Data())
        last[name] = float(run.callback_metrics["val_acc"])
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out")
    assert [row["run"] for row in rows] == ["dense", "low"]
    for row in rows:
        figures = loops[row["run"]].ledger.metrics()
        assert row["rounds"] == "2"
        assert row["last val_acc"] == f"{last[row['run']]:.4f}"
        assert row["MB up"] == f"{figures['comm/total_up_bytes'] / 1e6:.2f}"
        assert row["MB down"] == f"{figures['comm/total_down_bytes'] / 1e6:.2f}"
        assert row["MB idle"] == f"{figures['comm/total_idle_down_bytes'] / 1e6:.2f}"
        assert row["of dense FedAvg"] == f"{figures['comm/ratio']:.2%}"
    assert rows[0]["of dense FedAvg"] == "100.00%"
    run = {run.folder.parent.name: run for run in find_runs([tmp_path / "runs"])}["low"]
    assert math.isclose(run.last("comm/total_bytes") or 0, loops["low"].ledger.metrics()["comm/total_bytes"])
