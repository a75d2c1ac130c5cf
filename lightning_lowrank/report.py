"""Tables and plots from run folders.

``lightning-lowrank report`` calls it with the folders that a `CSVLogger` wrote; several runs stand side by side, by
accuracy against rounds and against bytes.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table

_METRICS = ("val_acc", "val_accuracy", "test_acc", "val_loss")


@dataclass
class Run:
    """One run's logged figures by round.

    Args:
        name: The folder, as far as it differs from the other runs'.
        rounds: For each round (Lightning's epoch) the last value logged under each name.
    """

    name: str
    rounds: dict[int, dict[str, float]]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return ``metric`` by round number, counted from 1, where it was logged."""
        return [(number + 1, figures[metric]) for number, figures in self.rounds.items() if metric in figures]

    def last(self, name: str) -> float | None:
        """Return the last logged value of ``name``."""
        values = self.series(name)
        return values[-1][1] if values else None


def read_run(folder: Path, name: str) -> Run:
    """Read the ``metrics.csv`` of one run folder."""
    rounds: dict[int, dict[str, float]] = {}
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row.get("epoch"):
                figures = rounds.setdefault(int(float(row["epoch"])), {})
                figures.update({key: float(value) for key, value in row.items() if value and key != "epoch"})
    return Run(name, dict(sorted(rounds.items())))


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Find every run in ``paths``, which are run folders or hold some.

    Raises:
        MisconfigurationException: If a path holds no run.
    """
    folders: list[Path] = []
    for path in paths:
        found = sorted(file.parent for file in path.rglob("metrics.csv"))
        if not found:
            raise MisconfigurationException(
                f"{path} holds no run: expected metrics.csv, which lightning.pytorch.loggers.CSVLogger writes."
            )
        folders += [folder for folder in found if folder not in folders]
    return [read_run(folder, name) for folder, name in zip(folders, _short_names(folders), strict=True)]


def _short_names(folders: Sequence[Path]) -> list[str]:
    parts = [folder.resolve().parts for folder in folders]
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

    Args:
        paths: Run folders, or folders that hold some.
        metric: Name of the logged metric to compare; by default the first of ``val_acc``, ``val_accuracy``,
            ``test_acc``, ``val_loss`` that a run has. A name with ``loss`` in it is better when lower.
        output: Folder for ``report.md``, ``rounds.png`` and ``bytes.png``; made if need be.
        console: Where the table is printed.

    Returns:
        The files written. ``bytes.png`` is missing where no run logged ``comm/total_bytes``.

    Raises:
        MisconfigurationException: If a path holds no run, or no run logged ``metric``.
    """
    runs = find_runs(paths)
    known = sorted({name for run in runs for figures in run.rounds.values() for name in figures})
    metric = metric or next((name for name in _METRICS if name in known), None)
    if metric is None or metric not in known:
        raise MisconfigurationException(
            f"no run logged {metric or 'a metric of ' + str(_METRICS)}; logged were: {known}"
        )

    header = [
        "run",
        "rounds",
        f"best {metric}",
        "at round",
        f"last {metric}",
        "MB up",
        "MB down",
        "of dense FedAvg",
    ]
    best_of = min if "loss" in metric else max
    rows = []
    for run in runs:
        series = run.series(metric)
        best = best_of(series, key=lambda point: point[1]) if series else None
        up, down, ratio = (run.last(f"comm/{name}") for name in ("total_up_bytes", "total_down_bytes", "ratio"))
        rows.append(
            [
                run.name,
                str(max(run.rounds, default=-1) + 1),
                "" if best is None else f"{best[1]:.4f}",
                "" if best is None else str(best[0]),
                "" if not series else f"{series[-1][1]:.4f}",
                "" if up is None else f"{up / 1e6:.2f}",
                "" if down is None else f"{down / 1e6:.2f}",
                "" if ratio is None else f"{ratio:.4f}",
            ]
        )
    table = Table(title="runs")
    for number, column in enumerate(header):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    (console or Console()).print(table)

    output.mkdir(parents=True, exist_ok=True)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    written = [output / "report.md"]
    written[0].write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    curves = {run.name: run.series(metric) for run in runs}
    written.append(_plot(curves, "round", metric, output / "rounds.png"))
    by_bytes = {
        run.name: [
            (figures["comm/total_bytes"] / 1e6, figures[metric])
            for figures in run.rounds.values()
            if metric in figures and "comm/total_bytes" in figures
        ]
        for run in runs
    }
    if any(by_bytes.values()):
        written.append(_plot(by_bytes, "MB up and down", metric, output / "bytes.png", logarithmic=True))
    (console or Console()).print(f"wrote {', '.join(str(path) for path in written)}")
    return written


def _plot(
    curves: dict[str, list[tuple[int, float]]] | dict[str, list[tuple[float, float]]],
    x_label: str,
    y_label: str,
    path: Path,
    logarithmic: bool = False,
) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    return path
