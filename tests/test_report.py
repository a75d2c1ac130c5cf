"""`report`: tables and plots from folders whose numbers are known."""

import csv
import io
import math
import statistics
import struct
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib.image import imread
from rich.console import Console

from lightning_lowrank import FedAvg, FederatedLoop, FedMUD, LowRank, MatrixProduct
from lightning_lowrank.report import _common_parts, _curve, _short_names, find_runs, group_by_seed, report, short_names
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


def configured(folder: Path, seed: Any, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Write a run with such a ``config.yaml`` as the command saves: the data have a seed that does not follow."""
    config = {
        "seed_everything": seed,
        "federated": {"clients": 4, "seed": None},
        "data": {"class_path": "Digits", "init_args": {"seed": 0}},
        "trainer": {
            "max_epochs": len(rows) // 2,
            "default_root_dir": str(folder),
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder.parent), "name": folder.name}},
            "callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(folder / "saved")}}],
        },
    }
    for path, value in more.items():
        place: Any = config
        *inner, last = path.split("__")
        for key in inner:
            place = place[key]
        place[last] = value
    write_run(folder, rows)
    (folder / "config.yaml").write_text("# lightning.pytorch==2.6.0\n" + yaml.safe_dump(config))
    return folder


def grouped(root: Path) -> list[list[str]]:
    runs = find_runs([root])
    return [[str(run.folder.relative_to(root.resolve())) for run in group] for group in group_by_seed(runs)]


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


def test_seeds_of_one_configuration_are_one_row(tmp_path):
    accuracies = [[0.1, 0.9, 0.7], [0.3, 0.5, 0.8], [0.2, 0.6, 0.6]]
    for seed, (values, up) in enumerate(zip(accuracies, (4_000_000, 4_000_000, 5_000_000), strict=True)):
        configured(tmp_path / "runs" / "low" / f"version_{seed}", seed, rows_of(values, up, 1_000_000))
    configured(tmp_path / "runs" / "dense" / "version_0", 0, rows_of([0.4, 0.5], 1_000_000, 1_000_000))
    (dense, low), text = make_report([tmp_path / "runs"], tmp_path / "out")

    def figure(values: list[float], digits: int) -> str:
        return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"

    assert low == {
        "run": "low/version_{0,1,2}",
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
    ] == [
        "dense/version_0",
        "1",
        "2",
        "0.5000 (2)",
        "0.5000",
        "2.00",
    ]
    assert all(value in text for value in low.values())


def test_a_loss_is_lowest_in_each_seed(tmp_path):
    for seed, values in enumerate(([0.1, 0.9, 0.7], [0.3, 0.5, 0.8])):
        configured(tmp_path / f"version_{seed}", seed, rows_of(values, 1, 1))
    (row,), _ = make_report([tmp_path], tmp_path / "out", metric="val_loss")
    assert row["best (round) val_loss"] == f"0.1500 ± {statistics.stdev([0.1, 0.2]):.4f} (2.5 ± 0.7)"


def test_each_shows_every_seed(tmp_path):
    for seed in (0, 1):
        configured(tmp_path / "runs" / f"version_{seed}", seed, rows_of([0.1, 0.5 + seed / 10], 1, 1))
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out", each=True)
    assert [(row["run"], row["last val_acc"]) for row in rows] == [("version_0", "0.5000"), ("version_1", "0.6000")]
    assert "seeds" not in rows[0]


def test_unlike_configurations_are_rows_of_their_own_and_unchanged(tmp_path):
    configured(tmp_path / "runs" / "a", 0, rows_of([0.1], 1, 1))
    configured(tmp_path / "runs" / "b", 1, rows_of([0.2], 1, 1), federated__clients=5)
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out")
    assert [row["run"] for row in rows] == ["a", "b"]
    assert "seeds" not in rows[0]
    assert rows[0]["last val_acc"] == "0.1000"


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ([{}, {}], True),
        ([{}, {"federated__clients": 5}], False),
        ([{}, {"federated__momentum": 0.9}], False),
        ([{}, {"trainer__max_epochs": 9}], False),
        # Seeds that follow seed_everything, whose values are 0 and 1, in both runs or in neither.
        ([{"federated__seed": 0}, {"federated__seed": 1}], True),
        ([{}, {"federated__seed": 1}], True),
        ([{"federated__seed": 7}, {"federated__seed": 7}], True),
        ([{"federated__seed": 7}, {"federated__seed": 8}], False),
        ([{}, {"federated__seed": 7}], False),
        ([{}, {"data__init_args__seed": 1}], True),
        ([{}, {"data__init_args__seed": 2}], False),
        ([{}, {"data__init_args__split_seed": 2}], False),
        ([{"data__init_args__split_seed": 0}, {"data__init_args__split_seed": 1}], True),
        ([{"data__init_args__split_seed": 5}, {"data__init_args__split_seed": 6}], False),
        # What a seed is called is more than how it ends, and a list's items are told apart.
        ([{"data__init_args__unseed": 0}, {"data__init_args__unseed": 1}], False),
        ([{"data__parts": [{"seed": 2}, {"seed": 9}]}, {"data__parts": [{"seed": 3}, {"seed": 9}]}], False),
        ([{"data__parts": [{"seed": 0}, {"seed": 3}]}, {"data__parts": [{"seed": 1}, {"seed": 3}]}], True),
        # Only where a run writes to may differ otherwise.
        ([{"trainer__logger": True}, {"trainer__logger": [{"class_path": "CSVLogger"}]}], True),
        ([{"data__init_args__dirpath": "a"}, {"data__init_args__dirpath": "b"}], False),
        ([{"ckpt_path": "a"}, {"ckpt_path": "b"}], False),
        ([{"federated__share": float("nan")}, {"federated__share": float("nan")}], True),
    ],
)
def test_which_runs_differ_only_in_their_seed(tmp_path, changes, together):
    for seed, change in enumerate(changes):
        configured(tmp_path / f"version_{seed}", seed, rows_of([0.1], 1, 1), **change)
    expected = [["version_0", "version_1"]] if together else [["version_0"], ["version_1"]]
    assert grouped(tmp_path) == expected


def test_a_seed_counts_once_and_by_its_longest_run(tmp_path):
    for number, (seed, rounds) in enumerate([(1, 3), (0, 1), (0, 3), (2, 3), (0, 3), (1, 2)]):
        configured(tmp_path / f"version_{number}", seed, rows_of([0.5] * rounds, 1, 1), trainer__max_epochs=3)
    assert grouped(tmp_path) == [
        ["version_4", "version_0", "version_3"],
        ["version_1"],
        ["version_2", "version_5"],
    ]


@pytest.mark.parametrize("config", [None, "a: [", "- 1", "model: x", "seed_everything: false", "seed_everything: true"])
def test_runs_without_a_known_seed_stand_alone(tmp_path, config):
    for number in (0, 1):
        folder = write_run(tmp_path / f"version_{number}", rows_of([0.5], 1, 1))
        if config is not None:
            (folder / "config.yaml").write_text(config)
    assert grouped(tmp_path) == [["version_0"], ["version_1"]]


def test_a_run_that_was_not_seeded_is_none_of_several_seeds(tmp_path):
    for number, seed in enumerate((False, 1, 2)):
        configured(tmp_path / f"version_{number}", seed, rows_of([0.5], 1, 1))
    assert grouped(tmp_path) == [["version_0"], ["version_1", "version_2"]]


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([["low/version_0", "low/version_1"]], ["low/version_{0,1}"]),
        ([["a/version_0", "a/version_1"], ["b/version_0", "b/version_1"]], ["a", "b"]),
        ([["a/version_9", "a/version_10"], ["a/version_3"]], ["version_{9,10}", "version_3"]),
        ([["seed1/version_0", "seed11/version_0"], ["other/version_0"]], ["seed{1,11}", "other"]),
        ([["a/version_0", "b/version_3"], ["c/version_0"]], ["{a/version_0,b/version_3}", "c/version_0"]),
        ([["a", "a/version_0"], ["c"]], ["a/{,version_0}", "c"]),
    ],
)
def test_names_of_several_seeds_are_as_a_shell_would_read_them(tmp_path, groups, names):
    for number, group in enumerate(groups):
        for seed, folder in enumerate(group):
            configured(tmp_path / "runs" / folder, seed, rows_of([0.5], 1, 1), federated__clients=number + 1)
    folders = [tmp_path / "runs" / folder for group in groups for folder in group]
    found = group_by_seed(find_runs(folders))
    assert _short_names([_common_parts(group) for group in found]) == names


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


PERSONAL = {"personal/val_acc": 0.75, "personal/val_acc_worst10": 0.25, "personal/val_acc_std": 0.125}


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


def test_the_constants_of_convergence_are_drawn_where_they_were_logged(tmp_path):
    constants = {"convergence/R": 3.0, "convergence/P": 2.0, "convergence/Q": 0.0}
    write_run(tmp_path / "runs" / "products", rows_of([0.5, 0.6], 1, 1, **constants))
    write_run(tmp_path / "runs" / "sums", rows_of([0.5, 0.6], 1, 1, **{**constants, "convergence/R": 30.0}))
    make_report([tmp_path / "runs"], tmp_path / "both")
    make_report([tmp_path / "runs" / "products"], tmp_path / "one")
    both, one = picture(tmp_path / "both" / "convergence.png"), picture(tmp_path / "one" / "convergence.png")
    assert both.shape != one.shape or not np.array_equal(both, one)
    assert (one < 1).any()
    write_run(tmp_path / "other", rows_of([0.5], 1, 1))
    make_report([tmp_path / "other"], tmp_path / "none")
    assert not (tmp_path / "none" / "convergence.png").exists()


def test_personal_figures_of_several_seeds(tmp_path):
    for seed in (0, 1):
        more = {name: value + seed / 10 for name, value in PERSONAL.items()}
        configured(tmp_path / f"version_{seed}", seed, rows_of([0.5], 1, 1, **more))
    (row,), _ = make_report([tmp_path], tmp_path / "out")
    assert row["personal worst10"] == f"0.3000 ± {statistics.stdev([0.25, 0.35]):.4f}"


def test_curves_are_means_over_the_rounds_that_all_seeds_logged(tmp_path):
    first = configured(tmp_path / "version_0", 0, rows_of([0.1, 0.9, 0.7], 100, 0))
    second = configured(tmp_path / "version_1", 1, rows_of([0.3, 0.4], 200, 0))
    group = find_runs([first, second])
    deviations = [statistics.stdev(values) for values in ([0.1, 0.3], [0.9, 0.4])]
    for against, places in ((None, [1, 2]), ("comm/total_bytes", [150, 300])):
        points = _curve(group, against, "val_acc")
        assert [point.x for point in points] == places
        assert [point.y for point in points] == pytest.approx([0.2, 0.65])
        assert [point.spread for point in points] == pytest.approx(deviations)
        (*_, last) = _curve(group[:1], against, "val_acc")
        assert (last.x, last.y, last.spread) == ((3, 0.7, 0) if against is None else (300, 0.7, 0))


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


def test_the_deviation_is_a_band_in_the_curves_colour(tmp_path):
    def pale_blue(path: Path) -> int:
        red, green, blue = np.moveaxis(picture(path)[..., :3], -1, 0)
        # The first colour of the cycle at an opacity of a fifth.
        return int(((abs(red - 0.82) < 0.03) & (abs(green - 0.89) < 0.03) & (abs(blue - 0.94) < 0.03)).sum())

    for seed in (0, 1):
        configured(tmp_path / "runs" / f"version_{seed}", seed, rows_of([0.2, 0.5 + seed / 4], 10_000, 10_000))
        configured(tmp_path / "one" / f"version_{seed}", seed, rows_of([0.2 + seed / 4], 10_000, 10_000))
    for folder, each in (("runs", False), ("runs", True), ("one", False), ("one", True)):
        report([tmp_path / folder], output=tmp_path / f"{folder} {each}", each=each, console=Console(quiet=True))
    for name in ("rounds.png", "bytes.png"):
        assert pale_blue(tmp_path / "runs False" / name) > 10_000
        assert pale_blue(tmp_path / "runs True" / name) < 500
        assert tallest_blue(tmp_path / "one False" / name) > 300
        assert tallest_blue(tmp_path / "one True" / name) < 60


def tallest_blue(path: Path) -> int:
    """Return the largest number of pixels in the cycle's first colour that one column of the picture has."""
    red, green, blue = np.moveaxis(picture(path)[..., :3], -1, 0)
    return int(((abs(red - 0.12) < 0.05) & (abs(green - 0.47) < 0.05) & (abs(blue - 0.71) < 0.05)).sum(axis=0).max())


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
