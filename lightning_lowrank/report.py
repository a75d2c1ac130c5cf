"""Tables and plots from run folders.

``lightning-lowrank report`` calls it with the folders that a `CSVLogger` wrote; several runs stand side by side, by
accuracy against rounds and against bytes.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

_METRICS = ("val_acc", "val_accuracy", "test_acc", "val_loss")
_LEGEND_INSIDE = 6


@dataclass
class Run:
    """One run's logged figures by round.

    Args:
        folder: Where it was read from.
        rounds: For each round (Lightning's epoch) the last value logged under each name.
    """

    folder: Path
    rounds: dict[int, dict[str, float]]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return ``metric`` by round number, counted from 1, where it was logged."""
        return [(number + 1, figures[metric]) for number, figures in self.rounds.items() if metric in figures]

    def last(self, name: str) -> float | None:
        """Return the last logged value of ``name``."""
        values = self.series(name)
        return values[-1][1] if values else None


def read_run(folder: Path) -> Run:
    """Read the ``metrics.csv`` of one run folder."""
    rounds: dict[int, dict[str, float]] = {}
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row.get("epoch"):
                figures = rounds.setdefault(int(float(row["epoch"])), {})
                figures.update({key: float(value) for key, value in row.items() if value and key != "epoch"})
    return Run(folder, dict(sorted(rounds.items())))


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Find every run in ``paths``, which are run folders or hold some.

    Raises:
        MisconfigurationException: If a path holds no run.
    """
    folders: list[Path] = []
    for path in paths:
        found = sorted(file.parent for file in path.resolve().rglob("metrics.csv"))
        if not found:
            raise MisconfigurationException(
                f"{path} holds no run: expected metrics.csv, which lightning.pytorch.loggers.CSVLogger writes."
            )
        folders += [folder for folder in found if folder not in folders]
    return [read_run(folder) for folder in folders]


def short_names(runs: Sequence[Run]) -> list[str]:
    """Return runs' folders as far as they differ from one another."""
    parts = [run.folder.parts for run in runs]
    if len(parts) == 1:
        return ["/".join(parts[0][-2:])]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while all(len(part) > 1 for part in parts) and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    return ["/".join(part) for part in parts]


def report(
    paths: Sequence[Path],
    metric: str | None = None,
    output: Path = Path("report"),
    console: Console | None = None,
) -> list[Path]:
    """Print a table of runs, and write it and two plots into ``output``.

    Bytes are those to and from clients that took part, in all rounds so far. Where a method's other clients had to
    listen as well (see `Algorithm.every_client_listens`), what they heard stands in a column of its own.

    Args:
        paths: Run folders, or folders that hold some. Of several, those that did not log ``metric`` (such as a ``test``
            run's beside the ``fit`` it belongs to) are left out, which is said.
        metric: Name of the logged metric to compare; by default the first of ``val_acc``, ``val_accuracy``,
            ``test_acc``, ``val_loss`` that a run has. A name with ``loss`` in it is better when lower.
        output: Folder for ``report.md``, ``rounds.png`` and ``bytes.png``; made if need be.
        console: Where the table is printed.

    Returns:
        The files written. ``bytes.png`` is missing where no run logged ``comm/total_bytes``.

    Raises:
        MisconfigurationException: If a path holds no run, or no run logged ``metric``.
    """
    console = console or Console()
    found = find_runs(paths)
    known = sorted({name for run in found for figures in run.rounds.values() for name in figures})
    metric = metric or next((name for name in _METRICS if name in known), None)
    if metric is None or metric not in known:
        raise MisconfigurationException(
            f"no run logged {metric or 'a metric of ' + str(_METRICS)}; logged were: {known}"
        )
    runs = [run for run in found if run.series(metric)]
    names = short_names(runs)

    header, rows = _rows(runs, names, metric)
    for line in _text_table(header, rows):
        _print_line(console, line)
    for run in found:
        if run not in runs:
            _print_line(console, f"{run.folder} is left out, for it logged no {metric}")

    output.mkdir(parents=True, exist_ok=True)
    lines = [[title.replace("\n", " ") for title in header], ["---", *["---:"] * (len(header) - 1)], *rows]
    written = [output / "report.md"]
    written[0].write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    curves = {name: run.series(metric) for name, run in zip(names, runs, strict=True)}
    written.append(_plot(curves, "round", metric, output / "rounds.png"))
    by_bytes = {
        name: [
            (figures["comm/total_bytes"], figures[metric])
            for figures in run.rounds.values()
            if metric in figures and "comm/total_bytes" in figures
        ]
        for name, run in zip(names, runs, strict=True)
    }
    if any(by_bytes.values()):
        written.append(_plot(by_bytes, "bytes sent up and down", metric, output / "bytes.png", in_bytes=True))
    _print_line(console, f"wrote {', '.join(str(path) for path in written)}")
    return written


def _rows(runs: Sequence[Run], names: Sequence[str], metric: str) -> tuple[list[str], list[list[str]]]:
    best_of = min if "loss" in metric else max
    columns: dict[str, list[str]] = {"run": list(names)}
    columns["rounds"] = [str(max(run.rounds) + 1) for run in runs]
    best = [best_of(run.series(metric), key=lambda point: point[1]) for run in runs]
    columns[f"best (round)\n{metric}"] = [f"{value:.4f} ({number})" for number, value in best]
    columns[f"last\n{metric}"] = [f"{run.series(metric)[-1][1]:.4f}" for run in runs]
    for title, name, optional in (
        ("MB\nup", "comm/total_up_bytes", False),
        ("MB\ndown", "comm/total_down_bytes", False),
        ("MB\nidle", "comm/total_idle_down_bytes", True),
    ):
        totals = [run.last(name) for run in runs]
        if not optional or any(totals):
            columns[title] = ["" if total is None else f"{total / 1e6:.2f}" for total in totals]
    ratios = [run.last("comm/ratio") for run in runs]
    columns["of dense\nFedAvg"] = ["" if ratio is None else f"{ratio:.2%}" for ratio in ratios]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out a table as lines of text, which, unlike rich's tables, lose nothing in a narrow console."""
    titles = [title.split("\n") for title in header]
    height = max(map(len, titles))
    head = list(zip(*([""] * (height - len(title)) + title for title in titles), strict=True))
    widths = [max(map(len, column)) for column in zip(*head, *rows, strict=True)]

    def aligned(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )

    return [*map(aligned, head), "─" * (sum(widths) + 2 * (len(widths) - 1)), *map(aligned, rows)]


def _print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _plot(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    path: Path,
    in_bytes: bool = False,
) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    styles = ("-", "--", ":", "-.")
    for number, (name, points) in enumerate(curves.items()):
        if points:
            # The ten colours come again with another line style.
            style = styles[number // 10 % len(styles)]
            marker = "o" if len(points) == 1 else None
            axes.plot(*zip(*points, strict=True), style, marker=marker, linewidth=1.6, label=name)
    if in_bytes:
        axes.set_xscale("log")
        spent = [x for points in curves.values() for x, _ in points]
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(spent) < 500 * min(spent) else (1,)))
        axes.xaxis.set_major_formatter(EngFormatter(unit="B", sep="\N{NO-BREAK SPACE}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x_label, fontsize=12)
    axes.set_ylabel(y_label, fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) <= _LEGEND_INSIDE:
        axes.legend(fontsize=11, frameon=False)
    else:
        figure.legend(fontsize=9, frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=150)
    return path
