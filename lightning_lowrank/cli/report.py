"""The tables that compare runs, written into a folder together with their plots and a page that holds both.

``lightning-lowrank report`` calls it with folders that a `CSVLogger` wrote. Runs of one configuration with several
seeds are one row and one curve.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

from rich.console import Console

from lightning_lowrank.cli.pages import Column, Page, write_csv, write_html, write_latex, write_markdown
from lightning_lowrank.cli.plots import SHOWN, draw, draw_narrow
from lightning_lowrank.cli.runs import (
    Run,
    argument,
    as_number,
    describe,
    differing,
    find_runs,
    found_in,
    group_by_seed,
    mean_and_deviation,
    monitors,
    printable,
    short_names,
    told,
)
from lightning_lowrank.configuration import check_integer, misconfigured
from lightning_lowrank.metric_direction import USUAL, direction

_UNITS = {"B": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), start=1)}}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)}
_CONSTANTS = ("R", "P", "Q")
_MOST_SETTINGS = 8
_SHOWN_CLIENTS = 20

Groups = Mapping[str, Sequence[Run]]


def parse_bytes(text: str) -> float:
    """Return a number of bytes: ``100MB`` (a million bytes are one MB), ``64 MiB``, ``2.5e6``.

    Raises:
        MisconfigurationException: If the text is no positive number of bytes.

    Example:
        >>> parse_bytes("100MB"), parse_bytes("64 MiB"), parse_bytes("2.5e6")
        (100000000.0, 67108864.0, 2500000.0)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): size for name, size in _UNITS.items()}
    try:
        number = float(found[1]) * units[(found[2] or "B").lower()] if found else math.nan
    except (KeyError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise misconfigured(f"{text!r} is no number of bytes: give one such as 100MB, 1.5GB or 64MiB ({[*_UNITS]}).")
    return number


def report(
    paths: Sequence[Path],
    metric: str | None = None,
    output: Path = Path("report"),
    console: Console | None = None,
    each: bool = False,
    target: float | None = None,
    budget: float | None = None,
    rounds: int | None = None,
) -> list[Path]:
    """Print a table of runs, and write it and their plots into ``output``.

    Bytes are those to and from clients that took part, in all rounds so far. Bytes that a method sent to idle clients
    (see `Algorithm.announce`) have a column of their own. So have the last values of the metric for
    personal models (``personal/val_acc``, ``personal/val_acc_worst10``, ``personal/val_acc_std``) and for the global
    model on clients' own samples (``global/val_acc`` and so on), simulated seconds
    (``system/seconds``) and the constants of `ConvergenceMonitor`, if they were logged, and the wall time of a fit that
    was neither killed nor resumed, nor cut by ``rounds``.

    Runs that differ only in the seed (see `group_by_seed`) are one row, with their number under ``seeds``. A figure
    that differs between them is shown as mean ± sample standard deviation (n − 1); one that some of them did not log
    is left empty. The plots draw their mean, with a band of one standard deviation, over the rounds that all of them
    logged. The plots against bytes and simulated seconds use their means.

    A table has the clients that the first run of each row judged last, the worst first, 20 at most.

    A second table has the settings: method, low-rank layers, partition, clients, codecs, samples and ranks of
    the row's first run, and all else that differs.

    Args:
        paths: Run folders, or folders that hold some. Runs that did not log ``metric``, or only evaluated, as a
            ``test`` run, are left out with a message.
        metric: Name of the logged metric to compare; by default the first of ``val_acc``, ``val_accuracy``,
            ``test_acc``, ``val_loss`` that a run has. Whether it is better when lower, its name says and what monitors
            it in the runs' configurations; where they do not, no best value is shown, and a line says why.
        output: Folder for ``report.html``, a page that holds everything and needs no other file; ``report.md``,
            ``report.csv`` (all digits) and ``report.tex``; and the pictures. Created if it does not exist.
        console: Where the table is printed.
        each: Show runs that differ only in the seed one by one.
        target: A value of the metric. Columns show the round that reached it first, and the bytes and simulated
            seconds until then. Where some seeds did not reach it, the figures are of those that did, with their number.
            A run that went on from another one, and has such a value from the start, is not one of them.
        budget: A number of bytes, up and down. A column shows the best value that was reached within it. By default a
            sentence compares runs within what the cheapest of them spent.
        rounds: How many rounds of each run are looked at, from its first; by default all.

    Returns:
        The files written. ``bytes.png`` only if a run logged ``comm/total_bytes``, ``seconds.png`` only if one logged
        ``system/seconds``, ``convergence.png`` only if one logged the constants of `ConvergenceMonitor`;
        ``rounds_each.png`` and so on only where curves hide each other.

    Raises:
        MisconfigurationException: If a path holds no run, no run that trained logged ``metric``, or ``target`` is given
            for a metric of which it is not known whether higher is better.
    """
    console = console or Console()
    found = find_runs(paths)
    if rounds is not None:
        check_integer("rounds", rounds)
        found = [run.first(rounds) for run in found]
    known = sorted({name for run in found for figures in run.rounds.values() for name in figures})
    metric = metric or next((name for name in USUAL if name in known), None)
    if metric is None or metric not in known:
        raise misconfigured(f"no run logged {metric or 'a metric of ' + str(USUAL)}; logged were: {known}")
    runs = [run for run in found if run.series(metric) and run.trained]
    if not runs:
        raise misconfigured(f"only runs of validate, test or predict logged {metric}: give the folder of a fit.")
    grouped = [[run] for run in runs] if each else group_by_seed(runs)
    groups = dict(zip(short_names(grouped), grouped, strict=True))

    higher, why = direction(_judged(metric).removesuffix("_worst10"), monitors=monitors(runs))
    if target is not None and not math.isfinite(target):
        raise misconfigured(f"target must be a finite number, got {target}.")
    if target is not None and higher is None:
        raise misconfigured(f"target={target} needs to know whether {metric} is better when higher: {why}.")
    goal = Goal(metric, higher, target, budget)
    title = f"{metric} of {len(runs)} run{'s' * (len(runs) > 1)}"
    title += "" if rounds is None else f", first {rounds} rounds"
    results, settings = _results(groups, goal), _settings(groups)
    sentences = answers(groups, goal)
    notes = (
        []
        if higher is not None
        else [f"No best {metric} is shown, for it is not known whether higher is better: {why}."]
    )
    for run in found:
        if run not in runs:
            first = "" if rounds is None else f" of the first {rounds}"
            lacks = f"it logged no {metric}" if run.rounds else f"its metrics.csv has no round{first} that can be read"
            lacks = lacks if run.trained else "it only evaluated a model"
            notes.append(f"{run.folder} is left out: {lacks}")
        elif run.went_on:
            began = f"went on from another run in round {run.began}"
            notes.append(f"{run.folder} {began}: its figures are of the rounds from there on")
    for line in [title, "", *_text_table(results), *([""] if sentences else []), *sentences, *notes]:
        _print_line(console, line)

    output.mkdir(parents=True, exist_ok=True)
    # What an earlier report drew of other runs would look like a part of this one.
    for name in (*SHOWN.values(), "convergence"):
        for part in ("", "_each"):
            (output / f"{name}{part}.png").unlink(missing_ok=True)
    pictures = draw(groups, metric, higher, output, target, budget)
    narrow = draw_narrow(groups, metric, higher, target, budget)
    folders = {name: [str(run.folder) for run in group] for name, group in groups.items()}
    page = Page(title, sentences, notes, results, settings, folders, pictures, narrow, _clients(groups, goal))
    written = [
        write(page, output / f"report.{kind}")
        for kind, write in (("md", write_markdown), ("html", write_html), ("csv", write_csv), ("tex", write_latex))
    ]
    _print_line(console, f"wrote {', '.join(str(path) for path in [*written, *pictures])}")
    return [*written, *pictures]


@dataclass(frozen=True)
class Goal:
    """What runs are compared by: a metric, whether higher is better, a value to reach, and bytes to spend."""

    metric: str
    higher: bool | None
    target: float | None = None
    budget: float | None = None

    def best(self, points: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
        """Return the best of rounds and values, the first of equals; the last, if it is not known what is better."""
        numbers = [point for point in points if not math.isnan(point[1])] or list(points)
        if not numbers or self.higher is None:
            return numbers[-1] if numbers else None
        return (max if self.higher else min)(numbers, key=lambda point: point[1])

    def reached(self, run: Run) -> int | None:
        """Return the first round whose value is as good as the target; ``None`` as well where it is not known."""
        assert self.target is not None
        series = run.series(self.metric)
        for number, value in series:
            if value >= self.target if self.higher else value <= self.target:
                # A run that went on from another one may have reached it there.
                return None if run.went_on and number == series[0][0] else number
        return None

    def within(self, run: Run, budget: float) -> tuple[int, float] | None:
        """Return the best round and value before a run had spent more bytes than ``budget``."""
        spent = dict(run.series("comm/total_bytes"))
        return self.best([point for point in run.series(self.metric) if spent.get(point[0], math.inf) <= budget])


def _at(run: Run, name: str, number: int | None) -> float | None:
    return None if number is None else run.rounds[number - 1].get(name)


def _figure(values: Sequence[float | None], form: str, partly: bool = False) -> tuple[str, tuple[float, float] | None]:
    """Format the value that all runs of a group share, or its mean and deviation; empty if a run did not log it.

    Args:
        values: A value for each run of the group.
        form: How a number is written.
        partly: Take those that have a value, and say how many they are.
    """
    known = [value for value in values if value is not None]
    if not known or (len(known) < len(values) and not partly):
        return "–" if partly else "", None
    if len({repr(value) for value in known}) == 1:
        text, figures = format(known[0], form), (float(known[0]), 0.0)
    else:
        figures = mean_and_deviation(known)
        # A mean of round numbers gets one decimal.
        text = " ± ".join(format(value, ".1f" if form == "d" else form) for value in figures)
    return text + (f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""), figures


def _column(
    groups: Groups, title: str, figure: Callable[[Run], float | None], form: str, partly: bool = False
) -> Column:
    cells = [_figure([figure(run) for run in group], form, partly) for group in groups.values()]
    return Column(title, [text for text, _ in cells], {title.replace("\n", " "): [figures for _, figures in cells]})


def _with_round(groups: Groups, title: str, point: Callable[[Run], tuple[int, float] | None]) -> Column:
    """Make a column of a value, and of its round in brackets."""

    def part(place: int) -> Callable[[Run], float | None]:
        return lambda run: None if (found := point(run)) is None else found[place]

    value, number = _column(groups, title, part(1), ".4f"), _column(groups, f"round of {title}", part(0), "d")
    texts = [
        f"{value_text} ({number_text})" if value_text else ""
        for value_text, number_text in zip(value.texts, number.texts, strict=True)
    ]
    named = title.replace("(round)\n", "").replace("\n", " ")
    figures = [*value.figures.values(), *number.figures.values()]
    return Column(title, texts, dict(zip((named, f"round of {named}"), figures, strict=True)))


def _results(groups: Groups, goal: Goal) -> list[Column]:
    runs = [run for group in groups.values() for run in group]
    column = partial(_column, groups)

    def logged(name: str, unit: float = 1) -> Callable[[Run], float | None]:
        return lambda run: None if (value := run.last(name)) is None else value / unit

    columns = [Column("run", list(groups))]
    if len(runs) > len(groups):
        columns.append(Column("seeds", [str(len(group)) for group in groups.values()]))
    columns.append(column("rounds", lambda run: run.count, "d"))
    metric = goal.metric
    if goal.higher is not None:
        columns.append(_with_round(groups, f"best (round)\n{metric}", lambda run: goal.best(run.series(metric))))
    columns.append(column(f"last\n{metric}", logged(metric), ".4f"))
    judged = _judged(metric)
    for model in ("personal", "global"):
        for suffix in ("", "_worst10", "_std"):
            name = f"{model}/{judged}{suffix}"
            if name != metric and any(run.last(name) is not None for run in runs):
                columns.append(column(f"{model}\n{suffix.removeprefix('_') or judged}", logged(name), ".4f"))
    if goal.target is not None:
        for title, name, unit, form in (
            ("rounds", "", 1.0, "d"),
            ("MB", "comm/total_bytes", 1e6, ".2f"),
            ("simulated s", "system/seconds", 1.0, ".1f"),
        ):
            if not name or any(run.series(name) for run in runs):

                def until(run: Run, name: str = name, unit: float = unit) -> float | None:
                    number = goal.reached(run)
                    value = _at(run, name, number) if name else number
                    return None if value is None else value / unit if name else value

                columns.append(column(f"{title} to\n{goal.target:g}", until, form, partly=True))
    if goal.budget is not None:
        limit = goal.budget
        columns.append(
            _with_round(groups, f"in {_bytes(limit)} (round)\n{metric}", lambda run: goal.within(run, limit))
        )
    for title, name, unit, form, optional in (
        ("MB\nup", "comm/total_up_bytes", 1e6, ".2f", False),
        ("MB\ndown", "comm/total_down_bytes", 1e6, ".2f", False),
        ("MB\nidle", "comm/total_idle_down_bytes", 1e6, ".2f", True),
        ("of dense\nFedAvg", "comm/ratio", 1.0, ".2%", False),
        ("simulated\ns", "system/seconds", 1.0, ".1f", True),
        *((f"constant\n{each}", f"convergence/{each}", 1.0, ".3g", True) for each in _CONSTANTS),
    ):
        if not optional or any(run.last(name) for run in runs):
            columns.append(column(title, logged(name, unit), form))
    if any(run.seconds is not None for run in runs):
        columns.append(column("wall\ns", lambda run: run.seconds, ".1f"))
    return columns


def _bytes(number: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g} B"


def _judged(metric: str) -> str:
    return metric.removeprefix("personal/").removeprefix("global/")


def _clients(groups: Groups, goal: Goal) -> list[Column]:
    """Return the clients of each row's first run, those with the worst values of the metric first."""
    judged = _judged(goal.metric).removesuffix("_worst10")
    table: list[dict[str, str]] = []
    for name, group in groups.items():
        rows = group[0].clients
        of = next((each for each in (f"global/{judged}", f"personal/{judged}") if rows and each in rows[0]), None)

        def worst(row: Mapping[str, str], of: str | None = of) -> float:
            value = as_number(row.get(of or "", ""))
            return -math.inf if value is None or math.isnan(value) else -value if goal.higher is False else value

        shown = sorted(rows, key=worst)[:_SHOWN_CLIENTS] if of and goal.higher is not None else rows[:_SHOWN_CLIENTS]
        table += [{"run": name, **row} for row in shown]
    titles = dict.fromkeys(title for row in table for title in row)
    cells = {title: [row.get(title, "") for row in table] for title in titles}
    # Names may look like numbers.
    return [Column(title, [*map(_cell, texts)] if "/" in title else texts) for title, texts in cells.items()]


def _cell(text: str) -> str:
    value = as_number(text)
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def _settings(groups: Groups) -> list[Column]:
    """Return what runs were told: what every reader asks for, then what differs between them beside it."""
    loops = [found_in(group[0].config, "federated") for group in groups.values()]
    layers = [found_in(group[0].config, "lowrank") for group in groups.values()]

    def size(layer: object) -> str:
        sizes = (f"{name}={found_in(layer, name)}" for name in ("rank", "budget", "ratio", "rank_ratio"))
        flags = (name for name in ("decouple", "half_frozen") if found_in(layer, name) is True)
        parts = (describe(found_in(layer, "factorization")), found_in(layer, "role"))
        given = [str(part) for part in parts if part] + [each for each in sizes if not each.endswith("=None")]
        return ", ".join([*given, *flags])

    def clients(loop: object) -> str:
        drawn, of = (found_in(loop, name) for name in ("clients_per_round", "clients"))
        # A float is a share of them.
        number = f"{100 * drawn:g}%" if type(drawn) is float else describe(drawn)
        return " of ".join(each for each in (number, describe(of)) if each)

    columns = [
        Column("run", list(groups)),
        Column("method", [describe(found_in(loop, "algorithm")) for loop in loops]),
        Column("low-rank layers", [size(layer) for layer in layers]),
        Column("partition", [describe(found_in(loop, "partition")) for loop in loops]),
        Column("clients\nper round", [clients(loop) for loop in loops]),
        *(Column(name, [describe(found_in(loop, name)) for loop in loops]) for name in ("uplink", "downlink")),
    ]
    facts = [group[0].facts for group in groups.values()]
    for title, names, between in (
        ("samples per client\nleast, median, most", ("samples",), ", "),
        ("ranks", ("ranks",), " to "),
        ("trained\nparameters", ("trained", "parameters"), " of "),
    ):
        numbers = [[number for name in names for number in each.get(name, [])] for each in facts]
        # Where all are the same, one says it.
        told_of = [each[:1] if len(set(each)) == 1 else each for each in numbers]
        texts = [between.join(f"{number:,.10g}" for number in each) for each in told_of]
        columns.append(Column(title, texts))
    columns = [column for column in columns if any(column.texts)]
    others = _not_told(groups, [column.texts for column in columns if column.title != "run"])
    for path in others[:_MOST_SETTINGS]:
        values = [group[0].settings.get(path) for group in groups.values()]
        texts = ["" if value is None else told(path, value).removeprefix(f"{argument(path)}=") for value in values]
        columns.append(Column(argument(path), texts))
    runs = _all(groups)
    for name in dict.fromkeys(name for run in runs for name in run.software):
        if len({run.software.get(name) for run in runs}) > 1:
            # Runs made before a run's folder had its versions, too: they may have had another one.
            made = [dict.fromkeys(run.software.get(name, "unknown") for run in group) for group in groups.values()]
            columns.append(Column(f"{name}\nof the run", [", ".join(each) for each in made]))
    if others[_MOST_SETTINGS:]:
        further = ", ".join(argument(path) for path in others[_MOST_SETTINGS:])
        columns.append(Column("further settings\nthat differ", [further] * len(groups)))
    return columns if len(columns) > 1 else []


def _not_told(groups: Groups, columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the settings that differ between runs, but for those that these columns, which sum some up, tell apart."""
    summed_up = ("lowrank", *(f"federated.init_args.{name}" for name in ("algorithm", "partition", "clients")))
    summed_up += ("federated.init_args.uplink", "federated.init_args.downlink", "trainer.callbacks")
    rows = [tuple(column[place] for column in columns) for place in range(len(groups))]

    def told_apart(path: str) -> bool:
        values = [repr(group[0].settings.get(path)) for group in groups.values()]
        return all(
            rows[one] != rows[other] or values[one] == values[other] for one, other in combinations(range(len(rows)), 2)
        )

    return [
        path
        for path in differing(list(groups.values()))
        if not path.endswith("summary")
        and not path.startswith("trainer.enable_")
        and not (path.startswith(summed_up) and told_apart(path))
    ]


def answers(groups: Groups, goal: Goal) -> list[str]:
    """Return in sentences which runs are best: in all, within the budget, and to the target."""
    metric, higher = goal.metric, goal.higher
    if higher is None or len(groups) < 2:
        return []

    def ranked(figure: Callable[[Run], float | None], largest: bool) -> list[tuple[str, float, float]]:
        found = []
        for name, group in groups.items():
            _, figures = _figure([figure(run) for run in group], "g")
            if figures is not None and not math.isnan(figures[0]):
                found.append((name, *figures))
        return sorted(found, key=lambda each: -each[1] if largest else each[1])

    def said(order: Sequence[tuple[str, float, float]]) -> str:
        name, value, deviation = order[0]
        text = f"{name}, {value:.4f}" + (f" ± {deviation:.4f}" if deviation else "")
        if len(order) == 1:
            return f"{text}."
        second, next_value, next_deviation = order[1]
        text += f"; next is {second}, {next_value:.4f}" + (f" ± {next_deviation:.4f}" if next_deviation else "")
        if value == next_value:
            return f"{text}; they are equal."
        near = abs(value - next_value) <= max(deviation, next_deviation)
        return text + ("; they are nearer than a standard deviation." if near else ".")

    sentences = []
    order = ranked(lambda run: None if (found := goal.best(run.series(metric))) is None else found[1], higher)
    if order:
        sentences.append(f"Best {metric}: {said(order)}")
    spent = [max((value for _, value in run.series("comm/total_bytes")), default=0.0) for run in _all(groups)]
    budget = goal.budget or min((value for value in spent if 0 < value < math.inf), default=0.0)
    if budget:
        order = ranked(lambda run: None if (found := goal.within(run, budget)) is None else found[1], higher)
        which = "" if goal.budget else ", all that the cheapest run spent"
        none = f"no run logged {metric} within them."
        sentences.append(f"Best {metric} within {_bytes(budget)} up and down{which}: {said(order) if order else none}")
    if goal.target is not None:
        first = []
        for name, least, form in (
            ("comm/total_bytes", "the fewest bytes", _bytes),
            ("system/seconds", "the fewest simulated seconds", "{:.4g} s".format),
            ("", "the fewest rounds", "{:.4g}".format),
        ):

            def until(run: Run, name: str = name) -> float | None:
                number = goal.reached(run)
                return _at(run, name, number) if name else number

            order = ranked(until, largest=False)
            if order:
                first.append(f"with {least} by {order[0][0]} ({form(order[0][1])})")
        text = f"is reached {', '.join(first)}." if first else "is reached by no run with all its seeds."
        sentences.append(f"{metric} {goal.target:g} {text}")
    return [printable(sentence) for sentence in sentences]


def _all(groups: Groups) -> list[Run]:
    return [run for group in groups.values() for run in group]


def _text_table(columns: Sequence[Column]) -> list[str]:
    """Lay out a table as lines of text. Unlike rich's tables, they lose nothing in a narrow console."""
    titles = [column.title.split("\n") for column in columns]
    height = max(map(len, titles))
    head = list(zip(*([""] * (height - len(title)) + title for title in titles), strict=True))
    rows = list(zip(*(column.texts for column in columns), strict=True))
    widths = [max(map(len, column)) for column in zip(*head, *rows, strict=True)]

    def aligned(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )

    return [*map(aligned, head), "─" * (sum(widths) + 2 * (len(widths) - 1)), *map(aligned, rows)]


def _print_line(console: Console, text: str) -> None:
    # A name of a file or a metric may hold what a terminal takes for a command.
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
