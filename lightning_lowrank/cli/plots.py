"""Curves of runs, drawn with matplotlib into files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from lightning_lowrank.cli.runs import Run, mean_and_deviation

_LEGEND_INSIDE = 6
# Beyond, an axis's own arithmetic overflows.
_LARGEST_DRAWN = 1e300


@dataclass
class Point:
    """Round or bytes so far, the metric, and its sample standard deviation; of several runs, their means."""

    x: float
    y: float
    spread: float = 0.0


def curve(group: Sequence[Run], against: str | None, metric: str) -> list[Point]:
    """Return ``metric`` against rounds, or against another logged figure, where all runs of a group logged it."""
    points: list[Point] = []
    for number in group[0].rounds:
        figures = [run.rounds.get(number, {}) for run in group]
        if not all(metric in each and (against is None or against in each) for each in figures):
            continue
        x = [number + 1 if against is None else each[against] for each in figures]
        y = [each[metric] for each in figures]
        points.append(Point(x[0], y[0]) if len(group) == 1 else Point(float(np.mean(x)), *mean_and_deviation(y)))
    return points


def plot_curves(
    curves: Mapping[str, Sequence[Point]], x_label: str, y_label: str, path: Path, in_bytes: bool = False
) -> Path:
    """Draw one curve for each group of runs, with a band of one standard deviation, into the file ``path``."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, curves, x_label, y_label, in_bytes)
    axes.set_title(f"{y_label} by {x_label}", fontsize=13, parse_math=False)
    if len(curves) <= _LEGEND_INSIDE:
        legend = axes.legend(fontsize=11, frameon=False)
    else:
        legend = figure.legend(fontsize=9, frameon=False, loc="outside right upper")
    _as_text(legend)
    figure.savefig(path, dpi=150)
    return path


def plot_convergence(groups: Mapping[str, Sequence[Run]], path: Path) -> Path:
    """Draw the constants that `ConvergenceMonitor` logged, side by side."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    for axes, constant in zip(figure.subplots(1, 3), ("R", "P", "Q"), strict=True):
        metric = f"convergence/{constant}"
        curves = {name: curve(group, None, metric) for name, group in groups.items()}
        _draw(axes, curves, "round", metric)
        axes.set_title(f"{metric} by round", fontsize=13)
        if any(point.y > 0 for points in curves.values() for point in points):
            axes.set_yscale("log")
        if constant == "R":
            handles, labels = axes.get_legend_handles_labels()
    _as_text(figure.legend(handles, labels, fontsize=9, frameon=False, loc="outside right upper"))
    figure.savefig(path, dpi=150)
    return path


def _as_text(legend: Legend) -> None:
    """Show names as they are: a folder or a metric may be called anything."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _can_be_drawn(point: Point, in_bytes: bool) -> bool:
    return all(abs(part) < _LARGEST_DRAWN for part in (point.x, point.y, point.spread)) and not (
        in_bytes and point.x <= 0
    )


def _draw(
    axes: Axes, curves: Mapping[str, Sequence[Point]], x_label: str, y_label: str, in_bytes: bool = False
) -> None:
    curves = {name: [point for point in points if _can_be_drawn(point, in_bytes)] for name, points in curves.items()}
    styles = ("-", "--", ":", "-.")
    for number, (name, points) in enumerate(curves.items()):
        if points:
            # Matplotlib has ten colours; after these, the line style changes.
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
        few = not spent or max(spent) < 500 * min(spent)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.xaxis.set_major_formatter(EngFormatter(unit="B", sep="\N{NO-BREAK SPACE}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x_label, fontsize=12)
    axes.set_ylabel(y_label, fontsize=12, parse_math=False)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
