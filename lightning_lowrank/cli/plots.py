"""Curves of runs, drawn with matplotlib into files.

Each curve has its name at its end. Where curves hide each other, a second picture shows each in a panel of its own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from lightning_lowrank.cli.runs import Run, mean_and_deviation

# Beyond, an axis's own arithmetic overflows.
_LARGEST_DRAWN = 1e300
# A name's place is as high as a row of a table; more do not fit any page.
_MOST_NAMES = 40
_LONGEST_NAME = 32
_LONGEST_NAME_NARROW = 14
_MOST_PANELS = 24
_PANELS_IN_ROW = 4
_GREY = "0.45"


@dataclass(frozen=True)
class Across:
    """What a metric is drawn against.

    Args:
        figure: Name of the logged figure; ``None`` for rounds.
        label: Title of the axis.
        unit: Unit of an axis in powers of ten; empty for one that counts.
    """

    figure: str | None
    label: str
    unit: str = ""


ROUNDS = Across(None, "round")
BYTES = Across("comm/total_bytes", "bytes sent up and down", "B")
SECONDS = Across("system/seconds", "simulated seconds", "s")
SHOWN = {ROUNDS: "rounds", BYTES: "bytes", SECONDS: "seconds"}
"""What runs are drawn against, and the names of the files."""


@dataclass
class Point:
    """Round, bytes or seconds so far, the metric, and its sample standard deviation; of several runs, their means."""

    x: float
    y: float
    spread: float = 0.0


def curve(group: Sequence[Run], against: str | None, metric: str) -> list[Point]:
    """Return ``metric`` against rounds, or against another logged figure, where all runs of a group logged it."""
    points: list[Point] = []
    evaluations = {run.evaluation for run in group}
    for number in group[0].rounds:
        # A metric that only the evaluation logged is shown all the same.
        if points and number in evaluations:
            continue
        figures = [run.rounds.get(number, {}) for run in group]
        if not all(metric in each and (against is None or against in each) for each in figures):
            continue
        x = [number + 1 if against is None else each[against] for each in figures]
        y = [each[metric] for each in figures]
        points.append(Point(x[0], y[0]) if len(group) == 1 else Point(float(np.mean(x)), *mean_and_deviation(y)))
    return points


def plot_curves(
    curves: Mapping[str, Sequence[Point]],
    across: Across,
    metric: str,
    path: Path,
    better: str = "",
    level: float | None = None,
    limit: float | None = None,
) -> list[Path]:
    """Draw one curve for each group of runs, with a band of one standard deviation, into the file ``path``.

    Args:
        curves: Points by the group's name, which stands at the end of its curve.
        across: What the metric is drawn against.
        metric: The metric's name.
        path: The file to write; a picture of panels, where curves hide each other, is written beside it.
        better: ``"higher"`` or ``"lower"``, where that is known.
        level: A value of the metric to mark by a line.
        limit: A place on the axis to mark by a line.

    Returns:
        The files written: one or two.
    """
    curves = _drawable(curves, across)
    _curves_figure(curves, across, metric, better, level, limit).savefig(path, dpi=150)
    if not 1 < len(curves) <= _MOST_PANELS or not hidden(curves, across):
        return [path]
    beside = path.with_stem(f"{path.stem}_each")
    _plot_panels(curves, across, *_titles(curves, across, metric, better), beside)
    return [path, beside]


def _titles(curves: Mapping[str, Sequence[Point]], across: Across, metric: str, better: str) -> tuple[str, str]:
    """Return the title of the vertical axis, and that of the picture."""
    title = f"{metric} by {across.label}"
    if any(point.spread for points in curves.values() for point in points):
        title += "\nmean of the seeds ± one standard deviation"
    return f"{metric} ({better} is better)" if better else metric, title


def _curves_figure(
    curves: Mapping[str, Sequence[Point]],
    across: Across,
    metric: str,
    better: str,
    level: float | None,
    limit: float | None,
    narrow: bool = False,
) -> Figure:
    y_label, title = _titles(curves, across, metric, better)
    width, height, smaller = (4.4, 4.4, 2) if narrow else (8.5, 5.0, 0)
    figure = Figure(figsize=(width, max(height, 0.19 * min(len(curves), _MOST_NAMES) + 1.5)), layout="constrained")
    axes = figure.add_subplot()
    lines = _draw(axes, curves)
    for place, along in ((level, axes.axhline), (limit, axes.axvline)):
        if place is not None and 0 < abs(place) < _LARGEST_DRAWN:
            along(place, color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    _set_scale(axes, curves, across)
    axes.set_title(title, fontsize=13 - smaller, loc="left", parse_math=False)
    axes.set_xlabel(across.label, fontsize=12 - smaller)
    axes.set_ylabel(y_label, fontsize=12 - smaller, parse_math=False)
    axes.tick_params(labelsize=11 - smaller)
    if narrow and across.unit:
        axes.tick_params(axis="x", labelrotation=30)
    _name_ends(figure, axes, curves, lines, _LONGEST_NAME_NARROW if narrow else _LONGEST_NAME)
    return figure


def draw(
    groups: Mapping[str, Sequence[Run]],
    metric: str,
    higher: bool | None,
    folder: Path,
    level: float | None = None,
    budget: float | None = None,
) -> list[Path]:
    """Draw a metric of groups of runs by rounds, and by all else that they logged, into files of a folder.

    Args:
        groups: Runs that differ only in the seed, by their name.
        metric: The metric's name.
        higher: Whether it is better when higher; ``None`` where that is not known.
        folder: Where ``rounds.png`` and so on are written.
        level: A value of the metric to mark.
        budget: A number of bytes to mark.

    Returns:
        The files written. ``bytes.png`` only if a run logged bytes, ``seconds.png`` only if one logged simulated
        seconds, ``convergence.png`` only if one logged the constants of `ConvergenceMonitor`; ``rounds_each.png`` and
        so on only where curves hide each other.
    """
    pictures: list[Path] = []
    for across, name, curves in _shown(groups, metric):
        limit = budget if across is BYTES else None
        pictures += plot_curves(curves, across, metric, folder / f"{name}.png", _better(higher), level, limit)
    if any(run.series("convergence/R") for members in groups.values() for run in members):
        pictures.append(plot_convergence(groups, folder / "convergence.png"))
    return pictures


def draw_narrow(
    groups: Mapping[str, Sequence[Run]],
    metric: str,
    higher: bool | None,
    level: float | None = None,
    budget: float | None = None,
) -> dict[str, bytes]:
    """Draw what `draw` draws against rounds, bytes and seconds as it can be read on a phone.

    Returns:
        PNG files by the names of `draw`'s.
    """
    pictures = {}
    for across, name, curves in _shown(groups, metric):
        limit, file = budget if across is BYTES else None, io.BytesIO()
        drawn = _curves_figure(_drawable(curves, across), across, metric, _better(higher), level, limit, narrow=True)
        drawn.savefig(file, dpi=150)
        pictures[name] = file.getvalue()
    return pictures


def _shown(
    groups: Mapping[str, Sequence[Run]], metric: str
) -> Iterator[tuple[Across, str, Mapping[str, Sequence[Point]]]]:
    for across, name in SHOWN.items():
        curves = {group: curve(members, across.figure, metric) for group, members in groups.items()}
        if across is ROUNDS or any(curves.values()):
            yield across, name, curves


def _better(higher: bool | None) -> str:
    return "" if higher is None else "higher" if higher else "lower"


def plot_convergence(groups: Mapping[str, Sequence[Run]], path: Path) -> Path:
    """Draw the constants that `ConvergenceMonitor` logged, one below the other."""
    figure = Figure(figsize=(8.5, 11), layout="constrained")
    for axes, constant in zip(figure.subplots(3, 1), ("R", "P", "Q"), strict=True):
        metric = f"convergence/{constant}"
        curves = _drawable({name: curve(group, None, metric) for name, group in groups.items()}, ROUNDS)
        lines = _draw(axes, curves)
        _set_scale(axes, curves, ROUNDS)
        axes.set_title(f"{metric} by round", fontsize=13, loc="left")
        axes.set_xlabel("round", fontsize=12)
        axes.set_ylabel(metric, fontsize=12)
        positive = [point.y for points in curves.values() for point in points if point.y > 0]
        if positive:
            # As a logarithmic axis, but with a place for 0.
            axes.set_yscale("symlog", linthresh=min(positive))
        _name_ends(figure, axes, curves, lines)
    figure.savefig(path, dpi=150)
    return path


def hidden(curves: Mapping[str, Sequence[Point]], across: Across = ROUNDS) -> bool:
    """Return whether a curve is covered by another one over half of what both have in common.

    Curves cover each other where they are nearer than a fiftieth of the picture's height.
    """
    drawn = [
        (np.array([math.log(point.x) if across.unit else point.x for point in points]), [point.y for point in points])
        for points in curves.values()
        if points
    ]
    height = max((max(y) for _, y in drawn), default=0.0) - min((min(y) for _, y in drawn), default=0.0)
    for (x, y), (other_x, other_y) in combinations(drawn, 2):
        grid = np.linspace(max(x.min(), other_x.min()), min(x.max(), other_x.max()), 50)
        if grid[0] <= grid[-1]:
            order, other_order = np.argsort(x, kind="stable"), np.argsort(other_x, kind="stable")
            first = np.interp(grid, x[order], np.array(y)[order])
            second = np.interp(grid, other_x[other_order], np.array(other_y)[other_order])
            if np.mean(np.abs(first - second) <= height / 50) >= 0.5:
                return True
    return False


def _drawable(curves: Mapping[str, Sequence[Point]], across: Across) -> dict[str, list[Point]]:
    def can_be_drawn(point: Point) -> bool:
        parts = (point.x, point.y, point.spread)
        return all(abs(part) < _LARGEST_DRAWN for part in parts) and not (across.unit and point.x <= 0)

    return {name: [point for point in points if can_be_drawn(point)] for name, points in curves.items()}


def _style(number: int) -> dict[str, Any]:
    # Matplotlib has ten colours; after these, the line style changes.
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}


def _draw(axes: Axes, curves: Mapping[str, Sequence[Point]]) -> dict[str, Line2D]:
    lines = {}
    for number, (name, points) in enumerate(curves.items()):
        if points:
            lines[name] = _draw_one(axes, points, linewidth=1.8, **_style(number))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return lines


def _draw_one(axes: Axes, points: Sequence[Point], **style: Any) -> Line2D:
    x, y, spread = (np.array([getattr(point, part) for point in points]) for part in ("x", "y", "spread"))
    (line,) = axes.plot(x, y, marker="o" if len(points) == 1 else None, **style)
    if len(points) == 1 and spread[0]:
        axes.errorbar(x, y, spread, color=style["color"], capsize=4)
    elif spread.any():
        axes.fill_between(x, y - spread, y + spread, color=style["color"], alpha=0.2, linewidth=0)
    return line


def _set_scale(axes: Axes, curves: Mapping[str, Sequence[Point]], across: Across) -> None:
    if not across.unit:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    axes.set_xscale("log")
    spent = [point.x for points in curves.values() for point in points]
    few = not spent or max(spent) < 500 * min(spent)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axes.xaxis.set_major_formatter(EngFormatter(unit=across.unit, sep="\N{NO-BREAK SPACE}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _plot_panels(curves: Mapping[str, Sequence[Point]], across: Across, y_label: str, title: str, path: Path) -> None:
    """Draw each curve in a panel of its own, before all others in grey."""
    across_page = min(_PANELS_IN_ROW, math.ceil(math.sqrt(len(curves))))
    down_page = math.ceil(len(curves) / across_page)
    figure = Figure(figsize=(3.2 * across_page + 0.6, 2.4 * down_page + 1), layout="constrained")
    panels = figure.subplots(down_page, across_page, sharex=True, sharey=True, squeeze=False).flat
    for number, (axes, name) in enumerate(zip(panels, curves, strict=False)):
        for other, points in curves.items():
            if points and other != name:
                _draw_one(axes, [Point(point.x, point.y) for point in points], color="0.8", linewidth=0.9)
        if curves[name]:
            _draw_one(axes, curves[name], linewidth=2, **_style(number))
        _set_scale(axes, curves, across)
        axes.set_title(shortened(name), fontsize=10, loc="left", color=f"C{number % 10}", parse_math=False)
        axes.tick_params(labelsize=9)
        axes.tick_params(axis="x", labelrotation=30 if across.unit else 0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for place, axes in enumerate(figure.axes):
        axes.set_visible(place < len(curves))
        axes.tick_params(labelbottom=place + across_page >= len(curves))
    figure.suptitle(title, fontsize=13, parse_math=False)
    figure.supxlabel(across.label, fontsize=12)
    figure.supylabel(y_label, fontsize=12, parse_math=False)
    figure.savefig(path, dpi=150)


def shortened(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return a name as it fits beside a curve: without its middle, if it is long."""
    begin = longest * 5 // 8
    return name if len(name) <= longest else f"{name[:begin]}…{name[begin + 1 - longest :]}"


def _name_ends(
    figure: Figure,
    axes: Axes,
    curves: Mapping[str, Sequence[Point]],
    lines: Mapping[str, Line2D],
    longest: int = _LONGEST_NAME,
) -> None:
    """Write each curve's name at its end, where no other name is."""
    named = [
        axes.annotate(
            shortened(name, longest),
            (curves[name][-1].x, curves[name][-1].y),
            (6, 0),
            textcoords="offset points",
            fontsize=9.5,
            va="center",
            color=line.get_color(),
            parse_math=False,
            annotation_clip=False,
            # Readable where another curve passes.
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2},
        )
        for name, line in list(lines.items())[:_MOST_NAMES]
    ]
    if not named:
        return
    if len(named) < len(lines):
        axes.set_title(f"{len(named)} of {len(lines)} curves are named", fontsize=9, loc="right")
    figure.draw_without_rendering()
    for crowd in _crowds(named):
        boxes = [name.get_window_extent() for name in crowd]
        ends = [float(axes.transData.transform(name.xy)[1]) for name in crowd]
        room = max(box.height for box in boxes)
        for name, end, place in zip(crowd, ends, spread_out(ends, room, axes.bbox.y0, axes.bbox.y1), strict=True):
            name.set_position((14 if abs(place - end) > room / 4 else 6, (place - end) * 72 / figure.dpi))


def _crowds(names: Sequence[Annotation]) -> list[list[Annotation]]:
    """Group the names that would stand above each other."""
    crowds: list[list[Annotation]] = []
    right = -math.inf
    for name in sorted(names, key=lambda each: each.get_window_extent().x0):
        box = name.get_window_extent()
        if box.x0 > right:
            crowds.append([])
        crowds[-1].append(name)
        right = max(right, box.x1)
    return crowds


def spread_out(places: Sequence[float], room: float, low: float, high: float) -> list[float]:
    """Move places as little as it takes for each two to be ``room`` apart, in their order and between two bounds.

    Example:
        >>> spread_out([5.0, 5.0, 40.0], 10.0, 0.0, 100.0)
        [0.0, 10.0, 40.0]
    """
    order = sorted(range(len(places)), key=lambda number: places[number])
    # Least squares under an order: neighbours that are too near are moved about their mean.
    blocks: list[tuple[float, int]] = []
    for position, number in enumerate(order):
        total, count = places[number] - position * room, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    moved = [total / count for total, count in blocks for _ in range(count)]
    top = high - (len(places) - 1) * room
    found = [0.0] * len(places)
    for position, number in enumerate(order):
        found[number] = max(min(moved[position], top), low) + position * room
    return found
