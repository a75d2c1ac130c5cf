"""Curves of runs as PNG files, drawn with matplotlib, for ``lightning-lowrank report`` and `RoundPictures`."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

# Larger numbers overflow in matplotlib's arithmetic of axes.
_LARGEST_DRAWN = 1e300
_MOST_NAMES = 40
_LONGEST_NAME = 32
_MOST_PANELS = 24
_PANELS_IN_ROW = 4
_ROW = 0.19
"""Height of a name in the legend, in inches."""
_CONSTANTS = ("convergence/R", "convergence/P", "convergence/Q")

Curves = Mapping[str, np.ndarray]
"""Points ``[points, 3]`` by name: place on the axis, value, and its standard deviation over seeds."""


class Across(NamedTuple):
    """An axis that a metric is drawn against.

    Args:
        figure: Name of the logged figure; ``None`` for rounds.
        label: Title of the axis.
        unit: Unit of an axis in powers of ten; empty for an axis that counts.
    """

    figure: str | None
    label: str
    unit: str = ""


ACROSS = {
    "bytes": Across("comm/total_bytes", "bytes sent up and down", "B"),
    "rounds": Across(None, "round"),
    "seconds": Across("system/seconds", "simulated seconds", "s"),
}
"""The axes by the names of the pictures, the first one first."""
DRAWN = tuple(each.figure for each in ACROSS.values() if each.figure) + _CONSTANTS
"""Names of the figures that `draw` asks for in addition to the metric."""


def draw(
    curves: Callable[[str, str | None], Curves],
    metric: str,
    higher: bool | None,
    level: float | None = None,
    budget: float | None = None,
    narrow: bool = False,
) -> dict[str, bytes]:
    """PNG files by name: a metric against rounds, and against bytes and simulated seconds if these were logged.

    Args:
        curves: The curves of a metric (first argument) against a logged figure, or against rounds (``None``).
        metric: The metric's name.
        higher: Whether it is better when higher; ``None`` if that is not known.
        level: A value of the metric to mark by a line.
        budget: A number of bytes to mark by a line.
        narrow: Draw pictures for narrow screens as well: ``bytes_narrow`` and so on.

    Returns:
        ``rounds``, ``bytes``, ``seconds``; ``rounds_each`` and so on, a panel for each curve, only if curves hide each
        other and are at most 24; ``convergence`` if the constants of `ConvergenceMonitor` were logged.
    """
    named = metric if higher is None else f"{metric} ({'higher' if higher else 'lower'} is better)"
    pictures = {}
    for name, across in ACROSS.items():
        drawn = _drawable(curves(metric, across.figure), across)
        if across.figure is not None and not any(map(len, drawn.values())):
            continue
        title = f"{metric} by {across.label}"
        if any(points[:, 2].any() for points in drawn.values()):
            title += "\nmean of the seeds ± one standard deviation"
        limit = budget if name == "bytes" else None
        pictures[name] = _png(_plot(drawn, across, named, title, level, limit, (8.5, 5.0)))
        if narrow:
            pictures[f"{name}_narrow"] = _png(_plot(drawn, across, named, title, level, limit, (4.4, 4.4)))
        if 1 < len(drawn) <= _MOST_PANELS and is_hidden(drawn, across):
            pictures[f"{name}_each"] = _png(_plot_panels(drawn, across, named, title))
    constants = {name: _drawable(curves(name, None), ACROSS["rounds"]) for name in _CONSTANTS}
    if any(map(len, constants[_CONSTANTS[0]].values())):
        pictures["convergence"] = _png(_plot_constants(constants))
    return pictures


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=150)
    return file.getvalue()


def _drawable(curves: Curves, across: Across) -> dict[str, np.ndarray]:
    found = {}
    for name, points in curves.items():
        can = (np.abs(points) < _LARGEST_DRAWN).all(1)
        found[name] = points[can & (points[:, 0] > 0) if across.unit else can]
    return found


def _plot(
    curves: Curves,
    across: Across,
    y_label: str,
    title: str,
    level: float | None,
    limit: float | None,
    size: tuple[float, float],
) -> Figure:
    """One picture of all curves, with their names below."""
    wide = size[0] > 6
    rows = math.ceil(min(len(curves), _MOST_NAMES) / (1 + wide))
    figure = Figure(figsize=(size[0], size[1] + _ROW * rows), layout="constrained")
    axes, smaller = figure.add_subplot(), 0 if wide else 2
    lines = _draw(axes, curves)
    for place, along in ((level, axes.axhline), (limit, axes.axvline)):
        if place is not None and 0 < abs(place) < _LARGEST_DRAWN:
            along(place, color="0.45", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    _set_scale(axes, curves, across)
    axes.set_title(title, fontsize=13 - smaller, loc="left", parse_math=False)
    axes.set_xlabel(across.label, fontsize=12 - smaller)
    axes.set_ylabel(y_label, fontsize=12 - smaller, parse_math=False)
    axes.tick_params(labelsize=11 - smaller)
    if not wide and across.unit:
        axes.tick_params(axis="x", labelrotation=30)
    _add_legend(figure, curves, lines, 1 + wide)
    return figure


def _add_legend(figure: Figure, curves: Curves, lines: Mapping[str, Line2D], columns: int) -> None:
    """Add a legend: the curves' names, ordered by their last values, the highest first."""
    order = sorted(lines, key=lambda name: -curves[name][-1, 1])[:_MOST_NAMES]
    # matplotlib leaves out names that begin with an underscore.
    names = [f" {text}" if (text := shorten(name)).startswith("_") else text for name in order]
    unnamed = f"{len(order)} of {len(lines)} curves are named" if len(order) < len(lines) else None
    handles = [lines[name] for name in order]
    legend = figure.legend(
        handles, names, title=unnamed, loc="outside lower left", ncols=columns, frameon=False, fontsize=9.5
    )
    for label in legend.get_texts():
        label.set_parse_math(False)


def _plot_constants(constants: Mapping[str, Curves]) -> Figure:
    """The constants of `ConvergenceMonitor`, one below the other."""
    figure = Figure(figsize=(8.5, 11), layout="constrained")
    for axes, (metric, curves) in zip(figure.subplots(3, 1), constants.items(), strict=True):
        lines = _draw(axes, curves)
        _set_scale(axes, curves, ACROSS["rounds"])
        axes.set_title(f"{metric} by round", fontsize=13, loc="left")
        axes.set_xlabel("round", fontsize=12)
        axes.set_ylabel(metric, fontsize=12)
        positive = [float(points[points[:, 1] > 0, 1].min(initial=math.inf)) for points in curves.values()]
        if min(positive, default=math.inf) < math.inf:
            # A logarithmic axis that also shows 0.
            axes.set_yscale("symlog", linthresh=min(positive))
    _add_legend(figure, curves, lines, 2)
    return figure


def is_hidden(curves: Curves, across: Across) -> bool:
    """Whether one curve covers another over at least half of their common range.

    Curves cover each other if they are nearer than a fiftieth of the picture's height.
    """
    whole = [points[np.argsort(points[:, 0], kind="stable")] for points in curves.values() if len(points)]
    drawn = [(np.log(points[:, 0]) if across.unit else points[:, 0], points[:, 1]) for points in whole]
    height = max((y.max() for _, y in drawn), default=0.0) - min((y.min() for _, y in drawn), default=0.0)
    for (x, y), (other_x, other_y) in combinations(drawn, 2):
        grid = np.linspace(max(x[0], other_x[0]), min(x[-1], other_x[-1]), 50)
        apart = np.abs(np.interp(grid, x, y) - np.interp(grid, other_x, other_y))
        if grid[0] <= grid[-1] and np.mean(apart <= height / 50) >= 0.5:
            return True
    return False


def _style(number: int) -> dict[str, Any]:
    # Matplotlib has ten colours; after these, the line style changes.
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}


def _draw(axes: Axes, curves: Curves) -> dict[str, Line2D]:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return {
        name: _draw_one(axes, points, linewidth=1.8, **_style(number))
        for number, (name, points) in enumerate(curves.items())
        if len(points)
    }


def _draw_one(axes: Axes, points: np.ndarray, **style: Any) -> Line2D:
    x, y, spread = points.T
    (line,) = axes.plot(x, y, marker="o" if len(x) == 1 else None, **style)
    if len(x) == 1 and spread[0]:
        axes.errorbar(x, y, spread, color=style["color"], capsize=4)
    elif spread.any():
        axes.fill_between(x, y - spread, y + spread, color=style["color"], alpha=0.2, linewidth=0)
    return line


def _set_scale(axes: Axes, curves: Curves, across: Across) -> None:
    if not across.unit:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    axes.set_xscale("log")
    ends = [end for points in curves.values() if len(points) for end in (points[:, 0].min(), points[:, 0].max())]
    few = not ends or max(ends) < 500 * min(ends)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axes.xaxis.set_major_formatter(EngFormatter(unit=across.unit, sep="\N{NO-BREAK SPACE}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _plot_panels(curves: Curves, across: Across, y_label: str, title: str) -> Figure:
    """Each curve in a panel of its own, in front of all others in grey."""
    columns = min(_PANELS_IN_ROW, math.ceil(math.sqrt(len(curves))))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(3.2 * columns + 0.6, 2.4 * rows + 1), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for number, (axes, name) in enumerate(zip(panels, curves, strict=False)):
        for other, points in curves.items():
            if len(points) and other != name:
                _draw_one(axes, points * (1, 1, 0), color="0.8", linewidth=0.9)
        _draw(axes, {})
        if len(curves[name]):
            _draw_one(axes, curves[name], linewidth=2, **_style(number))
        _set_scale(axes, curves, across)
        axes.set_title(shorten(name), fontsize=10, loc="left", color=f"C{number % 10}", parse_math=False)
        axes.tick_params(labelsize=9)
        axes.tick_params(axis="x", labelrotation=30 if across.unit else 0)
    for place, axes in enumerate(figure.axes):
        axes.set_visible(place < len(curves))
        axes.tick_params(labelbottom=place + columns >= len(curves))
    figure.suptitle(title, fontsize=13, parse_math=False)
    figure.supxlabel(across.label, fontsize=12)
    figure.supylabel(y_label, fontsize=12, parse_math=False)
    return figure


def shorten(name: str) -> str:
    """A name that fits into a legend: the middle of a long name is left out."""
    begin = _LONGEST_NAME * 5 // 8
    return name if len(name) <= _LONGEST_NAME else f"{name[:begin]}…{name[begin + 1 - _LONGEST_NAME :]}"
