"""The plots of runs whose numbers are known."""

import statistics
import struct
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.transforms import Bbox
from rich.console import Console

from lightning_lowrank.cli.plots import (
    BYTES,
    ROUNDS,
    Point,
    curve,
    draw_narrow,
    hidden,
    plot_curves,
    shortened,
    spread_out,
)
from lightning_lowrank.cli.report import report
from lightning_lowrank.cli.runs import find_runs
from tests.cli.run_folders import configured, make_report, rows_of, write_run

TABLES = ["report.md", "report.html", "report.csv", "report.tex"]


def picture(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
        _, _, width, height = struct.unpack(">I4sII", file.read(16))
    pixels = imread(path)
    assert pixels.shape[:2] == (height, width)
    return pixels


@pytest.mark.nightly
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


def test_curves_are_means_over_the_rounds_that_all_seeds_logged(tmp_path):
    first = configured(tmp_path / "version_0", 0, rows_of([0.1, 0.9, 0.7], 100, 0))
    second = configured(tmp_path / "version_1", 1, rows_of([0.3, 0.4], 200, 0))
    group = find_runs([first, second])
    deviations = [statistics.stdev(values) for values in ([0.1, 0.3], [0.9, 0.4])]
    for against, places in ((None, [1, 2]), ("comm/total_bytes", [150, 300])):
        points = curve(group, against, "val_acc")
        assert [point.x for point in points] == places
        assert [point.y for point in points] == pytest.approx([0.2, 0.65])
        assert [point.spread for point in points] == pytest.approx(deviations)
        (*_, last) = curve(group[:1], against, "val_acc")
        assert (last.x, last.y, last.spread) == ((3, 0.7, 0) if against is None else (300, 0.7, 0))


def test_an_evaluation_after_a_fit_without_a_federation_is_not_drawn(tmp_path):
    rows = [{"epoch": number, "train_loss": 0.5, "val_acc": 0.5} for number in range(2)]
    write_run(tmp_path / "run", [*rows, {"epoch": 2, "val_acc": 0.5, "test_acc": 0.4}])
    runs = find_runs([tmp_path])
    assert [point.x for point in curve(runs, None, "val_acc")] == [1, 2]
    assert [point.x for point in curve(runs, None, "test_acc")] == [3]


@pytest.mark.nightly
def test_the_plots_are_pictures_with_a_curve_for_each_run(tmp_path):
    few = write_run(tmp_path / "few" / "a", rows_of([0.2, 0.5, 0.6], 10_000, 10_000))
    console = Console(quiet=True)
    written = report([few], output=tmp_path / "one", console=console)
    assert [path.name for path in written] == [*TABLES, "rounds.png", "bytes.png"]
    for path in written[len(TABLES) :]:
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


@pytest.mark.slow
@pytest.mark.nightly
def test_narrow_pictures_have_room_for_a_curve_beside_long_names(tmp_path):
    for number in range(3):
        name = f"a_name_of_many_letters_{number}"
        write_run(tmp_path / "runs" / name, rows_of([0.2 + number / 5, 0.5], 10_000, 10_000))
    groups = {run.folder.name: [run] for run in find_runs([tmp_path / "runs"])}
    pictures = draw_narrow(groups, "val_acc", True, budget=15_000)
    assert list(pictures) == ["rounds", "bytes"]
    for name, data in pictures.items():
        (tmp_path / name).write_bytes(data)
        pixels = picture(tmp_path / name)
        assert pixels.shape[:2] == (660, 660)
        # The axis below is a line of dark pixels.
        dark = (pixels[..., :3] < 0.2).all(axis=-1)
        assert dark.sum(axis=1).max() > 330
    assert shortened("a_name_of_many_letters_2", 14) == "a_name_o…ers_2"


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_many_runs_fit_the_picture(tmp_path):
    for number in range(13):
        write_run(tmp_path / "runs" / f"run{number}", rows_of([0.1, 0.2 + number / 20], 10**number, 1))
    rows, _ = make_report([tmp_path / "runs"], tmp_path / "out")
    assert len(rows) == 13
    assert picture(tmp_path / "out" / "bytes.png").shape == picture(tmp_path / "out" / "rounds.png").shape


@pytest.mark.slow
def test_a_run_that_is_not_federated_has_no_plot_by_bytes(tmp_path):
    run = write_run(tmp_path / "run", [{"epoch": 0, "step": 5, "val_acc": 0.5}])
    written = report([run], output=tmp_path / "out", console=Console(quiet=True))
    assert [path.name for path in written] == [*TABLES, "rounds.png"]
    assert not (tmp_path / "out" / "bytes.png").exists()


def points(values: list[float]) -> list[Point]:
    return [Point(float(number), value) for number, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("other", "is_hidden"),
    [
        ([0.0, 0.5, 1.0], True),
        ([0.01, 0.51, 0.99], True),
        # Curves that cross do not hide each other, nor do those whose ends are far from each other.
        ([1.0, 0.5, 0.0], False),
        ([0.1, 0.6, 1.1], False),
        ([0.0, 0.5, 1.0, 0.2, 0.1, 0.0], True),
        ([], False),
    ],
)
def test_which_curves_hide_each_other(other, is_hidden):
    assert hidden({"a": points([0.0, 0.5, 1.0]), "b": points(other)}) == is_hidden
    assert not hidden({"a": points([0.0, 0.5, 1.0])})


def test_curves_of_other_bytes_do_not_hide_each_other():
    cheap = [Point(x, y) for x, y in ((10.0, 0.1), (20.0, 0.9))]
    dear = [Point(x, y) for x, y in ((10_000.0, 0.1), (20_000.0, 0.9))]
    assert not hidden({"a": cheap, "b": dear}, BYTES)


def test_names_are_spread_as_little_as_it_takes():
    draws = np.random.default_rng(0)
    for _ in range(20):
        ends = draws.uniform(0, 100, 7).tolist()
        found = spread_out(ends, 8.0, 0.0, 100.0)
        order = np.argsort(ends)
        assert (np.diff(np.array(found)[order]) >= 8.0 - 1e-9).all()
        assert min(found) >= 0
        assert max(found) <= 100
    assert spread_out([10.0, 40.0], 8.0, 0.0, 100.0) == [10.0, 40.0]
    assert spread_out([50.0, 50.0, 10.0], 8.0, 0.0, 100.0) == [46.0, 54.0, 10.0]
    assert spread_out([100.0, 100.0], 8.0, 0.0, 100.0) == [92.0, 100.0]


def test_rounds_are_whole_numbers_and_a_band_is_explained(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **more: figures.append(figure))
    for spread in (0.0, 0.1):
        plot_curves({"a": [Point(x, 0.5, spread) for x in (1, 2, 3)]}, ROUNDS, "val_acc", tmp_path / "rounds.png")
    for figure, explained in zip(figures, (False, True), strict=True):
        (axes,) = figure.axes
        assert ("one standard deviation" in axes.get_title("left")) == explained
        assert all(float(tick).is_integer() for tick in axes.get_xticks())


@pytest.mark.slow
def test_each_curve_has_its_name_at_its_end(tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **more: figures.append(figure) or save(figure, *args, **more)
    )
    curves = {"a" * 50: points([0.0, 0.5, 1.0]), "b": points([0.0, 0.5, 1.0]), "c": points([0.3, 0.2])}
    written = plot_curves(curves, ROUNDS, "val_acc", tmp_path / "rounds.png", "higher", level=0.5)
    assert [file.name for file in written] == ["rounds.png", "rounds_each.png"]
    whole, panels = figures
    (axes,) = whole.axes
    whole.draw_without_rendering()
    assert axes.get_title("left") == "val_acc by round"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "val_acc (higher is better)")
    names = {text.get_text(): text for text in axes.texts}
    assert list(names) == [f"{'a' * 20}…{'a' * 11}", "b", "c"]
    boxes = [text.get_window_extent() for text in names.values()]
    assert not any(Bbox.intersection(first, second) for first, second in combinations(boxes, 2))
    assert all(box.x0 >= axes.transData.transform(text.xy)[0] for box, text in zip(boxes, names.values(), strict=True))
    assert boxes[2].x1 < boxes[1].x1
    assert all(box.x1 <= whole.bbox.x1 for box in boxes)
    assert [panel.get_title("left")[:1] for panel in panels.axes if panel.get_visible()] == ["a", "b", "c"]
    assert plot_curves({"a": curves["b"]}, ROUNDS, "val_acc", tmp_path / "one.png") == [tmp_path / "one.png"]


@pytest.mark.nightly
def test_simulated_seconds_have_a_picture_where_they_were_logged(tmp_path):
    seconds = [{"epoch": number, "system/seconds": 60.0 * (number + 1)} for number in range(2)]
    write_run(tmp_path / "runs" / "a", rows_of([0.2, 0.5], 1, 1) + seconds)
    write_run(tmp_path / "runs" / "b", rows_of([0.3, 0.4], 1, 1))
    report([tmp_path / "runs"], output=tmp_path / "out", console=Console(quiet=True))
    assert picture(tmp_path / "out" / "seconds.png").shape == picture(tmp_path / "out" / "bytes.png").shape
    page = (tmp_path / "out" / "report.html").read_text()
    # Each of the three for wide screens and for narrow ones.
    assert page.count("data:image/png;base64,iVBOR") == 2 * 3
    assert "by simulated seconds" in page
