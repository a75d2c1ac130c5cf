"""The table that compares runs, written into a folder together with their plots.

``lightning-lowrank report`` calls it with folders that a `CSVLogger` wrote. Runs of one configuration with several
seeds are one row and one curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from lightning_lowrank.cli.plots import curve, plot_convergence, plot_curves
from lightning_lowrank.cli.runs import Run, find_runs, group_by_seed, mean_and_deviation, monitors, short_names
from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.direction import direction

_METRICS = ("val_acc", "val_accuracy", "test_acc", "val_loss")


def report(
    paths: Sequence[Path],
    metric: str | None = None,
    output: Path = Path("report"),
    console: Console | None = None,
    each: bool = False,
) -> list[Path]:
    """Print a table of runs, and write it and two plots into ``output``.

    Bytes are those to and from clients that took part, in all rounds so far. Bytes that a method sent to idle clients
    (see `Algorithm.announce`) have a column of their own. So have the last values of the metric for
    personal models (``personal/val_acc``, ``personal/val_acc_worst10``, ``personal/val_acc_std``), if they were logged.

    Runs that differ only in the seed (see `group_by_seed`) are one row, with their number under ``seeds``. A figure
    that differs between them is shown as mean ± sample standard deviation (n − 1); one that some of them did not log
    is left empty. The plots draw their mean, with a band of one standard deviation, over the rounds that all of them
    logged. The plot against bytes uses their mean number of bytes.

    Args:
        paths: Run folders, or folders that hold some. Runs that did not log ``metric``, such as a ``test`` run, are
            left out with a message.
        metric: Name of the logged metric to compare; by default the first of ``val_acc``, ``val_accuracy``,
            ``test_acc``, ``val_loss`` that a run has. Whether it is better when lower, its name says and what monitors
            it in the runs' configurations; where they do not, no best value is shown, and a line says why.
        output: Folder for ``report.md``, ``rounds.png`` and ``bytes.png``; created if it does not exist.
        console: Where the table is printed.
        each: Show runs that differ only in the seed one by one.

    Returns:
        The files written; ``bytes.png`` only if a run logged ``comm/total_bytes``, ``convergence.png`` only if a run
        logged the constants of `ConvergenceMonitor`.

    Raises:
        MisconfigurationException: If a path holds no run, or no run logged ``metric``.
    """
    console = console or Console()
    found = find_runs(paths)
    known = sorted({name for run in found for figures in run.rounds.values() for name in figures})
    metric = metric or next((name for name in _METRICS if name in known), None)
    if metric is None or metric not in known:
        raise misconfigured(f"no run logged {metric or 'a metric of ' + str(_METRICS)}; logged were: {known}")
    runs = [run for run in found if run.series(metric)]
    grouped = [[run] for run in runs] if each else group_by_seed(runs)
    groups = dict(zip(short_names(grouped), grouped, strict=True))

    judged = metric.removeprefix("personal/").removesuffix("_worst10")
    higher, why = direction(judged, monitors=monitors(runs))
    title = f"{metric} of {len(runs)} run{'s' * (len(runs) > 1)}"
    header, rows = _rows(groups, metric, higher)
    for line in [title, "", *_text_table(header, rows)]:
        _print_line(console, line)
    if higher is None:
        _print_line(console, f"no best {metric} is shown, for it is not known whether higher is better: {why}")
    for run in found:
        if run not in runs:
            lacks = f"it logged no {metric}" if run.rounds else "its metrics.csv has no round that can be read"
            _print_line(console, f"{run.folder} is left out: {lacks}")

    output.mkdir(parents=True, exist_ok=True)
    lines = [[title.replace("\n", " ") for title in header], ["---", *["---:"] * (len(header) - 1)], *rows]
    written = [output / "report.md"]
    written[0].write_text(f"# {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    by_rounds = {name: curve(group, None, metric) for name, group in groups.items()}
    written.append(plot_curves(by_rounds, "round", metric, output / "rounds.png"))
    by_bytes = {name: curve(group, "comm/total_bytes", metric) for name, group in groups.items()}
    if any(by_bytes.values()):
        written.append(plot_curves(by_bytes, "bytes sent up and down", metric, output / "bytes.png", in_bytes=True))
    if any(run.series("convergence/R") for run in runs):
        written.append(plot_convergence(groups, output / "convergence.png"))
    _print_line(console, f"wrote {', '.join(str(path) for path in written)}")
    return written


def _figure(values: Sequence[float | None], form: str) -> str:
    """Format the value that all runs of a group share, or its mean and deviation; empty if a run did not log it."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return ""
    if len({repr(value) for value in known}) == 1:
        return format(known[0], form)
    # A mean of round numbers gets one decimal.
    return " ± ".join(format(value, ".1f" if form == "d" else form) for value in mean_and_deviation(known))


def _rows(
    groups: Mapping[str, Sequence[Run]], metric: str, higher_is_better: bool | None
) -> tuple[list[str], list[list[str]]]:
    best_of = max if higher_is_better else min
    runs = [run for group in groups.values() for run in group]

    def column(figure: Callable[[Run], float | None], form: str) -> list[str]:
        return [_figure([figure(run) for run in group], form) for group in groups.values()]

    def logged(name: str, unit: float = 1) -> Callable[[Run], float | None]:
        return lambda run: None if (value := run.last(name)) is None else value / unit

    def best(run: Run) -> tuple[int, float]:
        return best_of(run.series(metric), key=lambda point: point[1])

    columns: dict[str, list[str]] = {"run": list(groups)}
    if len(runs) > len(groups):
        columns["seeds"] = [str(len(group)) for group in groups.values()]
    columns["rounds"] = column(lambda run: max(run.rounds) + 1, "d")
    if higher_is_better is not None:
        bests = zip(column(lambda run: best(run)[1], ".4f"), column(lambda run: best(run)[0], "d"), strict=True)
        columns[f"best (round)\n{metric}"] = [f"{value} ({number})" for value, number in bests]
    columns[f"last\n{metric}"] = column(logged(metric), ".4f")
    judged = metric.removeprefix("personal/")
    for suffix in ("", "_worst10", "_std"):
        name = f"personal/{judged}{suffix}"
        if name != metric and any(run.last(name) is not None for run in runs):
            columns[f"personal\n{suffix.removeprefix('_') or judged}"] = column(logged(name), ".4f")
    for title, name, optional in (
        ("MB\nup", "comm/total_up_bytes", False),
        ("MB\ndown", "comm/total_down_bytes", False),
        ("MB\nidle", "comm/total_idle_down_bytes", True),
    ):
        if not optional or any(run.last(name) for run in runs):
            columns[title] = column(logged(name, unit=1e6), ".2f")
    columns["of dense\nFedAvg"] = column(logged("comm/ratio"), ".2%")
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out a table as lines of text. Unlike rich's tables, they lose nothing in a narrow console."""
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
    # A name of a file or a metric may hold what a terminal takes for a command.
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    console.print(shown, markup=False, highlight=False, soft_wrap=True)
