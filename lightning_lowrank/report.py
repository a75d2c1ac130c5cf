"""Tables and plots from run folders.

``lightning-lowrank report`` calls it with the folders that a `CSVLogger` wrote; several runs stand side by side, by
accuracy against rounds and against bytes. Runs of one configuration with several seeds are one row and one curve.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

_METRICS = ("val_acc", "val_accuracy", "test_acc", "val_loss")
_LEGEND_INSIDE = 6
# Where a run writes to: nothing that is trained or logged depends on it.
_PLACES = ("trainer.logger", "trainer.default_root_dir", "trainer.callbacks.init_args.dirpath")


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


@dataclass
class Point:
    """One place of a curve.

    Args:
        x: Round, or bytes so far; the mean where it is of several runs.
        y: The metric; the mean where it is of several runs.
        spread: Sample standard deviation of the metric over the runs; 0 for a single run.
    """

    x: float
    y: float
    spread: float = 0.0


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


def group_by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Put together the runs whose configurations differ in nothing but the seed.

    Two runs belong together if their ``config.yaml`` are equal but for ``seed_everything``, for those arguments called
    ``seed`` or ``…_seed`` that have the value of ``seed_everything`` (or none) in every such run, and for where the
    runs write to (``trainer.logger``, ``trainer.default_root_dir``, a callback's ``dirpath``). Of runs that have the
    seed in common as well, only one is put with those of other seeds, the one with most rounds (the last, if equal):
    a repeated run would make the deviation look smaller than it is.

    Args:
        runs: The runs, in order.

    Returns:
        The groups, in the order of their first runs; within a group by seed. A run without a ``config.yaml`` of
        LightningCLI is a group of its own.
    """
    alike: dict[str, list[_Configured]] = {}
    groups: list[list[Run]] = []
    for run in runs:
        configured = _read_config(run)
        if configured is None:
            groups.append([run])
        else:
            alike.setdefault(configured.rest, []).append(configured)
    for similar in alike.values():
        following = {path for path in similar[0].seeds if all(one.seeds[path] in (None, one.seed) for one in similar)}
        kinds: dict[str, list[_Configured]] = {}
        for one in similar:
            own = {path: value for path, value in one.seeds.items() if path not in following}
            kinds.setdefault(json.dumps(own, sort_keys=True), []).append(one)
        for kind in kinds.values():
            by_seed: dict[Any, list[Run]] = {}
            for one in kind:
                by_seed.setdefault(one.seed, []).append(one.run)
            for repeats in by_seed.values():
                repeats.sort(key=lambda run: max(run.rounds, default=-1))
            while any(by_seed.values()):
                groups.append([by_seed[seed].pop() for seed in sorted(by_seed) if by_seed[seed]])
    place = {id(run): number for number, run in enumerate(runs)}
    return sorted(groups, key=lambda group: min(place[id(run)] for run in group))


@dataclass
class _Configured:
    """A run with its seed, other arguments that are seeds by their path, and all else of its configuration as JSON."""

    run: Run
    seed: int
    seeds: dict[str, Any]
    rest: str


def _read_config(run: Run) -> _Configured | None:
    try:
        config = yaml.safe_load((run.folder / "config.yaml").read_text())
    except (FileNotFoundError, yaml.YAMLError):
        return None
    # Without a seed two runs are repetitions, which nothing tells from one another.
    if not isinstance(config, dict) or type(config.get("seed_everything")) is not int:
        return None
    seed = config.pop("seed_everything")
    seeds: dict[str, Any] = {}

    def without_seeds(value: Any, path: str, place: str) -> Any:
        if isinstance(value, list):
            return [without_seeds(each, f"{path}.{number}", place) for number, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, each in value.items():
            inner, inner_place = f"{path}.{key}", f"{place}.{key}" if place else str(key)
            if inner_place in _PLACES:
                continue
            if str(key) == "seed" or str(key).endswith("_seed"):
                seeds[inner] = each
            else:
                kept[str(key)] = without_seeds(each, inner, inner_place)
        return kept

    rest = without_seeds(config, "", "")
    return _Configured(run, seed, seeds, json.dumps([rest, sorted(seeds)], sort_keys=True, default=str))


def short_names(runs: Sequence[Run]) -> list[str]:
    """Return runs' folders as far as they differ from one another."""
    return _short_names([run.folder.parts for run in runs])


def _short_names(parts: list[tuple[str, ...]]) -> list[str]:
    if len(parts) == 1:
        return ["/".join(parts[0][-2:])]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while all(len(part) > 1 for part in parts) and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    return ["/".join(part) for part in parts]


def _shared(sequences: Sequence[Sequence[str]]) -> int:
    """Return how many items all sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False)))


def _common_parts(group: Sequence[Run]) -> tuple[str, ...]:
    """Write several folders as one, with braces around what differs, as a shell would read them."""
    parts = [run.folder.parts for run in group]
    if len(parts) == 1:
        return parts[0]
    ahead = _shared(parts)
    behind = _shared([part[ahead:][::-1] for part in parts])
    stop = len(parts[0]) - behind
    inner = ["/".join(part[ahead : len(part) - behind]) for part in parts]
    # Where only a number differs, all of it stands in the braces.
    start = inner[0][: _shared(inner)].rstrip("0123456789")
    braces = f"{start}{{{','.join(text[len(start) :] for text in inner)}}}"
    return (*parts[0][:ahead], braces, *parts[0][stop:])


def report(
    paths: Sequence[Path],
    metric: str | None = None,
    output: Path = Path("report"),
    console: Console | None = None,
    each: bool = False,
) -> list[Path]:
    """Print a table of runs, and write it and two plots into ``output``.

    Bytes are those to and from clients that took part, in all rounds so far. Where a method's other clients had to
    listen as well (see `Algorithm.every_client_listens`), what they heard stands in a column of its own, and where the
    compared metric was logged for personal models (``personal/val_acc``, ``personal/val_acc_worst10``,
    ``personal/val_acc_std``), their last values do.

    Runs that differ only in the seed (see `group_by_seed`) are one row, with their number under ``seeds``, and each
    figure that is not the same in all of them as mean ± sample standard deviation (n − 1). A figure that some of them
    did not log is left empty. In the plots their mean is drawn, with a band of one standard deviation, over the rounds
    that all of them logged; against bytes, it stands at their mean as well.

    Args:
        paths: Run folders, or folders that hold some. Of several, those that did not log ``metric`` (such as a ``test``
            run's beside the ``fit`` it belongs to) are left out, which is said.
        metric: Name of the logged metric to compare; by default the first of ``val_acc``, ``val_accuracy``,
            ``test_acc``, ``val_loss`` that a run has. A name with ``loss`` in it is better when lower.
        output: Folder for ``report.md``, ``rounds.png`` and ``bytes.png``; made if need be.
        console: Where the table is printed.
        each: Show runs that differ only in the seed one by one.

    Returns:
        The files written. ``bytes.png`` is missing where no run logged ``comm/total_bytes``, and ``convergence.png``,
        the constants of `ConvergenceMonitor`, where none logged these.

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
    groups = [[run] for run in runs] if each else group_by_seed(runs)
    names = _short_names([_common_parts(group) for group in groups])

    header, rows = _rows(groups, names, metric)
    for line in _text_table(header, rows):
        _print_line(console, line)
    for run in found:
        if run not in runs:
            _print_line(console, f"{run.folder} is left out, for it logged no {metric}")

    output.mkdir(parents=True, exist_ok=True)
    lines = [[title.replace("\n", " ") for title in header], ["---", *["---:"] * (len(header) - 1)], *rows]
    written = [output / "report.md"]
    written[0].write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    by_rounds = {name: _curve(group, None, metric) for name, group in zip(names, groups, strict=True)}
    written.append(_plot(by_rounds, "round", metric, output / "rounds.png"))
    by_bytes = {name: _curve(group, "comm/total_bytes", metric) for name, group in zip(names, groups, strict=True)}
    if any(by_bytes.values()):
        written.append(_plot(by_bytes, "bytes sent up and down", metric, output / "bytes.png", in_bytes=True))
    if any(run.series("convergence/R") for run in runs):
        written.append(_plot_convergence(groups, names, output / "convergence.png"))
    _print_line(console, f"wrote {', '.join(str(path) for path in written)}")
    return written


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    # A run that diverged makes both figures not a number, which is to be seen, and no reason for a warning.
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.mean(values)), float(np.std(values, ddof=1))


def _figure(values: Sequence[float | None], form: str) -> str:
    """Return what all runs of a group have in common, or the mean and the deviation; nothing if one did not log it."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return ""
    if len({repr(value) for value in known}) == 1:
        return format(known[0], form)
    # A mean of rounds has a digit behind the point.
    return " ± ".join(format(value, ".1f" if form == "d" else form) for value in _mean_and_deviation(known))


def _curve(group: Sequence[Run], against: str | None, metric: str) -> list[Point]:
    """Return ``metric`` against rounds, or against another logged figure, where all runs of a group logged it."""
    points: list[Point] = []
    for number in group[0].rounds:
        figures = [run.rounds.get(number, {}) for run in group]
        if not all(metric in each and (against is None or against in each) for each in figures):
            continue
        x = [number + 1 if against is None else each[against] for each in figures]
        y = [each[metric] for each in figures]
        points.append(Point(x[0], y[0]) if len(group) == 1 else Point(float(np.mean(x)), *_mean_and_deviation(y)))
    return points


def _rows(groups: Sequence[Sequence[Run]], names: Sequence[str], metric: str) -> tuple[list[str], list[list[str]]]:
    best_of = min if "loss" in metric else max
    several = any(len(group) > 1 for group in groups)

    def column(figure: Callable[[Run], float | None], form: str) -> list[str]:
        return [_figure([figure(run) for run in group], form) for group in groups]

    def logged(name: str, unit: float = 1) -> Callable[[Run], float | None]:
        return lambda run: None if (value := run.last(name)) is None else value / unit

    def best(run: Run) -> tuple[int, float]:
        return best_of(run.series(metric), key=lambda point: point[1])

    columns: dict[str, list[str]] = {"run": list(names)}
    if several:
        columns["seeds"] = [str(len(group)) for group in groups]
    columns["rounds"] = column(lambda run: max(run.rounds) + 1, "d")
    values, numbers = column(lambda run: best(run)[1], ".4f"), column(lambda run: best(run)[0], "d")
    columns[f"best (round)\n{metric}"] = [f"{value} ({number})" for value, number in zip(values, numbers, strict=True)]
    columns[f"last\n{metric}"] = column(logged(metric), ".4f")
    judged = metric.removeprefix("personal/")
    for suffix in ("", "_worst10", "_std"):
        name = f"personal/{judged}{suffix}"
        if name != metric and any(run.last(name) is not None for group in groups for run in group):
            columns[f"personal\n{suffix.removeprefix('_') or judged}"] = column(logged(name), ".4f")
    for title, name, optional in (
        ("MB\nup", "comm/total_up_bytes", False),
        ("MB\ndown", "comm/total_down_bytes", False),
        ("MB\nidle", "comm/total_idle_down_bytes", True),
    ):
        if not optional or any(run.last(name) for group in groups for run in group):
            columns[title] = column(logged(name, unit=1e6), ".2f")
    columns["of dense\nFedAvg"] = column(logged("comm/ratio"), ".2%")
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
    curves: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    path: Path,
    in_bytes: bool = False,
) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, curves, x_label, y_label, in_bytes)
    if len(curves) <= _LEGEND_INSIDE:
        axes.legend(fontsize=11, frameon=False)
    else:
        figure.legend(fontsize=9, frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=150)
    return path


def _plot_convergence(groups: Sequence[Sequence[Run]], names: Sequence[str], path: Path) -> Path:
    """Draw the constants that `ConvergenceMonitor` logged, one beside the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    for axes, constant in zip(figure.subplots(1, 3), ("R", "P", "Q"), strict=True):
        metric = f"convergence/{constant}"
        curves = {name: _curve(group, None, metric) for name, group in zip(names, groups, strict=True)}
        _draw(axes, curves, "round", metric)
        if any(point.y > 0 for points in curves.values() for point in points):
            axes.set_yscale("log")
        if constant == "R":
            handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=150)
    return path


def _draw(axes: Any, curves: Mapping[str, Sequence[Point]], x_label: str, y_label: str, in_bytes: bool = False) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    styles = ("-", "--", ":", "-.")
    for number, (name, points) in enumerate(curves.items()):
        if points:
            # The ten colours come again with another line style.
            style = styles[number // 10 % len(styles)]
            marker = "o" if len(points) == 1 else None
            x, y, spread = (np.array([getattr(point, part) for point in points]) for part in ("x", "y", "spread"))
            (line,) = axes.plot(x, y, style, marker=marker, linewidth=1.6, label=name)
            if len(points) == 1 and spread[0]:
                axes.errorbar(x, y, spread, color=line.get_color(), capsize=4)
            elif spread.any():
                axes.fill_between(x, y - spread, y + spread, color=line.get_color(), alpha=0.2, linewidth=0)
    if in_bytes:
        axes.set_xscale("log")
        spent = [point.x for points in curves.values() for point in points]
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
