"""The pictures of runs whose numbers are known."""

import statistics
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.transforms import Bbox

import lightning_lowrank.plots as plots
from lightning_lowrank.cli.runs import curve, find_runs
from lightning_lowrank.plots import ACROSS, draw, is_hidden, shorten
from tests.cli.run_folders import configured, make_report, rows_of, write_run

TABLES = {"report.md", "report.html", "report.csv", "report.tex", ".report"}


def points(values: list[float], spread: float = 0.0, times: float = 1.0) -> np.ndarray:
    return np.array([(times * number, value, spread) for number, value in enumerate(values, start=1)])


def drawn(monkeypatch, curves, **arguments) -> tuple[list[Figure], dict[str, bytes]]:
    """The figures by rounds alone, and the files."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: figures.append(self) or save(self, *args, **more)
    )
    asked = {("val_acc", None): curves}
    return figures, draw(lambda metric, against: asked.get((metric, against), {}), "val_acc", True, **arguments)


def pixels(png: bytes, folder: Path) -> np.ndarray:
    (folder / "picture.png").write_bytes(png)
    return imread(folder / "picture.png")


def test_curves_are_means_over_the_rounds_that_all_seeds_logged(tmp_path):
    first = configured(tmp_path / "version_0", 0, rows_of([0.1, 0.9, 0.7], 100, 0))
    second = configured(tmp_path / "version_1", 1, rows_of([0.3, 0.4], 200, 0))
    group = find_runs([first, second])
    deviations = [statistics.stdev(values) for values in ([0.1, 0.3], [0.9, 0.4])]
    for against, places in ((None, [1, 2]), ("comm/total_bytes", [150, 300])):
        x, y, spread = curve(group, against, "val_acc").T.tolist()
        assert x == places
        assert y == pytest.approx([0.2, 0.65])
        assert spread == pytest.approx(deviations)
        (*_, last) = curve(group[:1], against, "val_acc").tolist()
        assert last == ([3, 0.7, 0] if against is None else [300, 0.7, 0])


def test_an_evaluation_after_a_fit_without_a_federation_is_not_drawn(tmp_path):
    rows = [{"epoch": number, "train_loss": 0.5, "val_acc": 0.5} for number in range(2)]
    write_run(tmp_path / "run", [*rows, {"epoch": 2, "val_acc": 0.5, "test_acc": 0.4}])
    runs = find_runs([tmp_path])
    assert curve(runs, None, "val_acc")[:, 0].tolist() == [1, 2]
    assert curve(runs, None, "test_acc")[:, 0].tolist() == [3]


@pytest.mark.slow
def test_which_pictures_there_are(tmp_path):
    constants = {"convergence/R": 3.0, "convergence/P": 2.0, "convergence/Q": 0.0}
    seconds = [{"epoch": number, "system/seconds": 60.0 * (number + 1)} for number in range(2)]
    write_run(tmp_path / "plain", [{"epoch": 0, "step": 5, "val_acc": 0.5}])
    write_run(tmp_path / "runs" / "a", rows_of([0.2, 0.5], 1, 1, **constants) + seconds)
    write_run(tmp_path / "runs" / "b", rows_of([0.2, 0.5], 1, 1))
    for name, pictures in (("plain", {"rounds"}), ("runs", {"bytes_each", "convergence", "seconds", "rounds_each"})):
        make_report([tmp_path / name], tmp_path / "out" / name)
        pictures |= {"rounds", "bytes"} if name == "runs" else set()
        files = {f"{picture}.png" for picture in pictures}
        assert {file.name for file in (tmp_path / "out" / name).iterdir()} == TABLES | files
    page = (tmp_path / "out" / "runs" / "report.html").read_text()
    # Three for wide screens and for narrow ones, two with panels, and the constants.
    assert page.count("data:image/png;base64,iVBOR") == 2 * 3 + 2 + 1
    assert "By simulated seconds" in page


@pytest.mark.parametrize(
    ("other", "hidden"),
    [
        ([0.0, 0.5, 1.0], True),
        ([0.01, 0.51, 0.99], True),
        # Curves that cross do not hide each other, nor do curves whose ends are far from each other.
        ([1.0, 0.5, 0.0], False),
        ([0.1, 0.6, 1.1], False),
        ([0.0, 0.5, 1.0, 0.2, 0.1, 0.0], True),
        ([], False),
    ],
)
def test_which_curves_hide_each_other(other, hidden):
    curves = {"a": points([0.0, 0.5, 1.0]), "b": points(other).reshape(-1, 3)}
    assert is_hidden(curves, ACROSS["rounds"]) == hidden
    assert not is_hidden({"a": curves["a"]}, ACROSS["rounds"])


def test_curves_of_other_bytes_do_not_hide_each_other():
    curves = {name: points([0.1, 0.9], times=times) for name, times in (("cheap", 10), ("dear", 10_000))}
    assert not is_hidden(curves, ACROSS["bytes"])


@pytest.mark.slow
def test_each_curve_has_its_name_and_no_name_is_over_a_curve(tmp_path, monkeypatch):
    curves = {"a" * 50: points([0.0, 0.5, 1.0]), "_b": points([0.0, 0.5, 1.0]), "$c": points([0.3, 0.2])}
    (wide, narrow, panels), pictures = drawn(monkeypatch, curves, level=0.5, narrow=True)
    assert list(pictures) == ["rounds", "rounds_narrow", "rounds_each"]
    for figure in (wide, narrow):
        (axes,), (legend,) = figure.axes, figure.legends
        figure.draw_without_rendering()
        assert axes.get_title("left") == "val_acc by round"
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "val_acc (higher is better)")
        # In the order of their ends.
        names = [text.get_text() for text in legend.get_texts()]
        assert names == [f"{'a' * 20}…{'a' * 11}", " _b", "$c"]
        box = legend.get_window_extent()
        assert not Bbox.intersection(box, axes.get_tightbbox())
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert [panel.get_title("left")[:1] for panel in panels.axes if panel.get_visible()] == ["a", "_", "$"]
    assert shorten("a" * 32) == "a" * 32


@pytest.mark.nightly
def test_a_band_is_drawn_and_explained(tmp_path, monkeypatch):
    def pale_blue(png: bytes) -> int:
        red, green, blue = np.moveaxis(pixels(png, tmp_path)[..., :3], -1, 0)
        # The first colour of the cycle at an opacity of a fifth.
        return int(((abs(red - 0.82) < 0.03) & (abs(green - 0.89) < 0.03) & (abs(blue - 0.94) < 0.03)).sum())

    def tallest_blue(png: bytes) -> int:
        red, green, blue = np.moveaxis(pixels(png, tmp_path)[..., :3], -1, 0)
        found = (abs(red - 0.12) < 0.05) & (abs(green - 0.47) < 0.05) & (abs(blue - 0.71) < 0.05)
        return int(found.sum(axis=0).max())

    for spread in (0.0, 0.1):
        figures, pictures = drawn(monkeypatch, {"a": points([0.2, 0.5, 0.6], spread)})
        assert ("one standard deviation" in figures[0].axes[0].get_title("left")) == bool(spread)
        assert (pale_blue(pictures["rounds"]) > 10_000) == bool(spread)
        one = drawn(monkeypatch, {"a": np.array([(1, 0.5, spread)])})[1]["rounds"]
        assert (tallest_blue(one) > 300) == bool(spread)


@pytest.mark.nightly
def test_many_runs_fit_the_picture(tmp_path, monkeypatch):
    curves = {f"run{number}": points([0.1, 0.2 + number / 20]) for number in range(60)}
    (figure, *_), pictures = drawn(monkeypatch, curves)
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 40
    assert legend.get_title().get_text() == "40 of 60 curves are named"
    assert legend.get_window_extent().y0 >= 0
    colours = pixels(pictures["rounds"], tmp_path)[..., :3]
    assert colours.shape[1] >= 900
    assert len({tuple(line.get_color()) for line in figure.axes[0].lines}) == 10


def test_where_the_figures_to_draw_are_named():
    assert {*plots.DRAWN} == {"comm/total_bytes", "system/seconds", *(f"convergence/{each}" for each in "RPQ")}
