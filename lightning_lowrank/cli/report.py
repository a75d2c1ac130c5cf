"""The report that compares runs: tables, sentences and pictures, printed and written into a folder.

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

import numpy as np
from rich.console import Console

from lightning_lowrank.arguments import join_names, printable
from lightning_lowrank.cli.pages import Column, Page, Table
from lightning_lowrank.cli.runs import (
    Run,
    argument,
    as_number,
    curve,
    describe,
    differing_settings,
    find_runs,
    group_by_seed,
    mean_and_deviation,
    monitors,
    nested_argument,
    setting_text,
    short_names,
)
from lightning_lowrank.configuration import check_integer, misconfigured
from lightning_lowrank.files import replacing
from lightning_lowrank.metric_direction import USUAL, direction, usual_metric
from lightning_lowrank.plots import draw
from lightning_lowrank.units import bytes_text, format_decimals, percent

_UNITS = {"B": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), start=1)}}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)}
_MOST_SETTINGS = 8
_SHOWN_CLIENTS = 20
_MANIFEST = ".report"
"""The file that lists the files of a report in its folder."""

Groups = Mapping[str, Sequence[Run]]
Figure = Callable[[Run], float | None]


def parse_bytes(text: str) -> float:
    """A number of bytes: ``100MB`` (a million bytes are one MB), ``64 MiB``, ``2.5e6``.

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
    """Print a table of runs, and write it and their pictures into ``output``.

    Runs that differ only in the seed (see `group_by_seed`) are one row, with their number under ``seeds``. A figure
    that differs between them is shown as mean ± sample standard deviation (n − 1); one that some of them did not log
    is left empty. The pictures show their mean, with a band of one standard deviation, over the rounds that all of them
    logged. docs/howto/compare.md defines each figure.

    Further tables have the settings of each row's first run and all that differs, and the clients that it evaluated
    last, the worst first, 20 at most. Runs that ``rounds`` cuts have no clients.

    Args:
        paths: Run folders, or folders that hold some. Runs that did not log ``metric``, or only evaluated, as a
            ``test`` run, are left out with a message.
        metric: Name of the logged metric to compare; by default the first of ``val_acc``, ``val_accuracy``,
            ``test_acc``, ``val_loss`` that a run has, or another metric of validation. Its name, or the callback that
            monitors it in the runs' configurations, says whether higher is better; if neither does, no best value is
            shown, and a line says why.
        output: Folder for ``report.html``, a page that holds everything and needs no other file; ``report.md``,
            ``report.csv`` (all digits) and ``report.tex``; and the pictures. Created if it does not exist. Files of an
            earlier report there are replaced or removed, and no others.
        console: Where the table is printed.
        each: Show runs that differ only in the seed one by one.
        target: A value of the metric. Columns show the round that reached it first, and the bytes and simulated
            seconds until then. If some seeds did not reach it, the figures are of the others, with their number. A run
            that continues another one and has reached the value in its first round counts as not having reached it.
        budget: A number of bytes, up and down. A column shows the best value that was reached within it. By default a
            sentence compares runs within the bytes of the cheapest of them.
        rounds: How many rounds of each run are looked at, from its first; by default all.

    Returns:
        The files written. ``bytes.png`` only if a run logged ``comm/total_bytes``, ``seconds.png`` only if one logged
        ``system/seconds``, ``convergence.png`` only if one logged the constants of `ConvergenceMonitor`;
        ``rounds_each.png`` and so on only if curves hide each other and are at most 24.

    Raises:
        MisconfigurationException: If a path holds no run, no run that trained logged ``metric``, ``target`` is given
            for a metric of unknown direction, or ``output`` has a file of such a name that no report wrote, is a file
            or cannot be made.
    """
    console = console or Console()
    found = find_runs(paths)
    if rounds is not None:
        check_integer("rounds", rounds)
        found = [run.first(rounds) for run in found]
    known = sorted({name for run in found for name in (*run.figures, *run.evaluated)})
    metric = metric or usual_metric(known)
    if metric is None or metric not in known:
        why = [f"{run.folder}/metrics.csv cannot be read: {run.problem}" for run in found if run.problem]
        raise misconfigured(
            "; ".join([f"no run logged {metric or f'a metric of {USUAL}'}; logged were: {known}", *why])
        )
    runs = [run for run in found if len(run.column(metric).rounds) and run.trained]
    if not runs:
        raise misconfigured(f"only runs of validate, test or predict logged {metric}: give the folder of a fit.")
    grouped = [[run] for run in runs] if each else group_by_seed(runs)
    groups = dict(zip(short_names(grouped), grouped, strict=True))

    higher, why_not = direction(_judged(metric).removesuffix("_worst10"), monitors=monitors(runs))
    if target is not None and not math.isfinite(target):
        raise misconfigured(f"target must be a finite number, got {target}.")
    if target is not None and higher is None:
        raise misconfigured(f"target={target} needs to know whether {metric} is better when higher: {why_not}.")
    goal = Goal(metric, higher, target, budget)
    title = f"{metric} of {len(runs)} run{'s' * (len(runs) > 1)}"
    title += "" if rounds is None else f", first {rounds} rounds"
    notes = [f"No best {metric} is shown, for it is not known whether higher is better: {why_not}."] * (higher is None)
    for run in found:
        if run not in runs:
            first = "" if rounds is None else f" of the first {rounds}"
            lacks = f"its metrics.csv has no round{first} that can be read" + f" ({run.problem})" * bool(run.problem)
            lacks = f"it logged no {metric}" if run.count else lacks
            notes.append(f"{run.folder} is left out: {lacks if run.trained else 'it only evaluated a model'}")
        elif run.continues:
            began = f"went on from another run in round {run.first_round}"
            notes.append(f"{run.folder} {began}: its figures are of the rounds from there on")
    for name, group in groups.items():
        counts = sorted({run.count for run in group})
        if len(counts) > 1:
            each_count = join_names(list(map(str, counts)))
            notes.append(f"{name}: its seeds ended after {each_count} rounds, and each counts with its own last round")
    folders = ["\n".join(str(run.folder) for run in group) for group in groups.values()]
    tables = {
        "": _results(groups, goal),
        "Settings": _settings(groups),
        "Clients": _clients(groups, goal),
        "Folders": Table([Column("run", list(groups)), Column("folders", folders)]),
    }

    def curves(name: str, against: str | None) -> dict[str, np.ndarray]:
        return {group: curve(members, against, name) for group, members in groups.items()}

    page = Page(title, answers(groups, goal), notes, tables, draw(curves, metric, higher, target, budget, narrow=True))
    # Names of files and metrics may contain escape sequences for terminals, hence printable() below.
    lines = [title, "", *tables[""].text(), *[""] * bool(page.answers), *page.answers, *notes]
    written = _write(
        output,
        {
            "report.md": page.markdown().encode(),
            "report.html": page.html().encode(),
            "report.csv": Table([*tables[""], *tables["Settings"][1:]]).csv().encode(),
            "report.tex": tables[""].latex().encode(),
            **{f"{name}.png": png for name, png in page.pictures.items() if not name.endswith("_narrow")},
        },
    )
    for line in [*lines, f"wrote {', '.join(map(str, written))}"]:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    return written


def _write(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Replace the files of an earlier report; raise rather than overwrite any other file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise misconfigured(
            f"--output {folder}: this folder cannot be made ({error.strerror}): give one that can."
        ) from error
    manifest = folder / _MANIFEST
    earlier = set(manifest.read_text("utf-8").splitlines()) if manifest.is_file() else set()
    others = [name for name in files if name not in earlier and (folder / name).exists()]
    if others:
        raise misconfigured(
            f"{folder} already has {join_names(others)}, which no earlier report wrote: give --output another folder."
        )
    with replacing(manifest) as part:
        part.write_text("\n".join(sorted(earlier | files.keys())), "utf-8")
    for name in earlier - files.keys():
        # Leftover pictures of an earlier report would look like part of this one.
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)
    for name, data in files.items():
        with replacing(folder / name) as part:
            part.write_bytes(data)
    with replacing(manifest) as part:
        part.write_text("\n".join(sorted(files)), "utf-8")
    return [folder / name for name in files]


@dataclass(frozen=True)
class Goal:
    """The criterion of a comparison: metric, direction, target value and budget of bytes."""

    metric: str
    higher: bool | None
    target: float | None = None
    budget: float | None = None

    def best(self, run: Run, within: float = math.inf) -> tuple[int, float] | None:
        """The best round, counted from 1, and its value, within a budget of bytes; the first of equal values.

        With an unknown direction, the last one. NaN only counts if all values are NaN.
        """
        rounds, values = run.column(self.metric)
        if within < math.inf:
            spent = run.column("comm/total_bytes")
            cheap = np.isin(rounds, spent.rounds[spent.values <= within])
            rounds, values = rounds[cheap], values[cheap]
        if not np.isnan(values).all():
            rounds, values = rounds[~np.isnan(values)], values[~np.isnan(values)]
        if not len(values):
            return None
        place = -1 if self.higher is None else int(values.argmax() if self.higher else values.argmin())
        return int(rounds[place]) + 1, float(values[place])

    def reached(self, run: Run) -> int | None:
        """The first round whose value reaches the target; both are rounded to float32, as logged values are."""
        rounds, values = run.column(self.metric)
        with np.errstate(over="ignore"):
            values, target = values.astype(np.float32), np.float32(self.target)
        places = np.flatnonzero(values >= target if self.higher else values <= target)
        # A run that continues another run may have reached the target there already.
        return None if not len(places) or (run.continues and places[0] == 0) else int(rounds[places[0]]) + 1

    def until(self, run: Run, name: str, unit: float = 1) -> float | None:
        """The value of a figure in the round that reached the target; without a name, the round's number."""
        number = self.reached(run)
        value = number if number is None or not name else run.at(name, number)
        return value if value is None or not name else value / unit


def _whole(number: float) -> str:
    # A mean of integers is shown with one decimal.
    return f"{number:d}" if isinstance(number, int) else f"{number:.1f}"


def _figure(
    values: Sequence[float | None], form: Callable[[float], str], partly: bool = False
) -> tuple[str, tuple[float, float] | None]:
    """The text and numbers of a table cell: the value that a group's runs share, or its mean and deviation.

    Args:
        values: A value for each run of the group.
        form: How a number is written.
        partly: Take the runs that have a value, and say how many they are.
    """
    known = [value for value in values if value is not None]
    if not known or (len(known) < len(values) and not partly):
        return "–" if partly else "", None
    if len({repr(value) for value in known}) == 1:
        text, figures = form(known[0]), (known[0], 0.0)
    else:
        figures = mean_and_deviation(known)
        text = " ± ".join(map(form, figures))
    return text + (f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""), figures


def _column(groups: Groups, title: str, figure: Figure, form: Callable[[float], str], partly: bool = False) -> Column:
    cells = [_figure([figure(run) for run in group], form, partly) for group in groups.values()]
    return Column(title, [text for text, _ in cells], {title.replace("\n", " "): [figures for _, figures in cells]})


def _with_round(groups: Groups, title: str, point: Callable[[Run], tuple[int, float] | None]) -> Column:
    """A column of values with their rounds in brackets."""
    parts: list[Figure] = [lambda run, place=place: (point(run) or (None, None))[place] for place in (1, 0)]  # type: ignore[misc]
    value, number = _column(groups, title, parts[0], "{:.4f}".format), _column(groups, title, parts[1], _whole)
    texts = [f"{one} ({other})" if one else "" for one, other in zip(value.texts, number.texts, strict=True)]
    named = title.replace("(round)\n", "").replace("\n", " ")
    figures = (*value.figures.values(), *number.figures.values())
    return Column(title, texts, dict(zip((named, f"round of {named}"), figures, strict=True)))


def _judged(metric: str) -> str:
    return metric.removeprefix("personal/").removeprefix("global/")


def _results(groups: Groups, goal: Goal) -> Table:
    runs, metric, four = _all(groups), goal.metric, "{:.4f}".format

    def add(title: str, name: str, unit: float, form: Callable[[float], str], optional: bool = True) -> None:
        if not optional or any(run.last(name) for run in runs):
            last: Figure = lambda run: None if (value := run.last(name)) is None else value / unit  # noqa: E731
            table.append(_column(groups, title, last, form))

    table = Table([Column("run", list(groups))])
    if len(runs) > len(groups):
        numbers = [len(group) for group in groups.values()]
        table.append(Column("seeds", [*map(str, numbers)], {"seeds": [(number, 0) for number in numbers]}))
    table.append(_column(groups, "rounds", lambda run: run.count, _whole))
    if goal.higher is not None:
        table.append(_with_round(groups, f"best (round)\n{metric}", goal.best))
    add(f"last\n{metric}", metric, 1, four, optional=False)
    for model in ("personal", "global"):
        for suffix in ("", "_worst10", "_std"):
            name = f"{model}/{_judged(metric)}{suffix}"
            if name != metric and any(run.last(name) is not None for run in runs):
                add(f"{model}\n{suffix.removeprefix('_') or _judged(metric)}", name, 1, four, optional=False)
    for title, name, unit, form in (
        ("rounds", "", 1, _whole),
        ("MB", "comm/total_bytes", 1e6, format_decimals),
        ("simulated s", "system/seconds", 1, "{:.1f}".format),
    ):
        if goal.target is not None and (not name or any(run.last(name) is not None for run in runs)):
            until = partial(goal.until, name=name, unit=unit)
            table.append(_column(groups, f"{title} to\n{goal.target:g}", until, form, partly=True))
    if goal.budget is not None:
        limit = goal.budget
        title = f"in {bytes_text(limit)} (round)\n{metric}"
        table.append(_with_round(groups, title, lambda run: goal.best(run, limit)))
    add("MB\nup", "comm/total_up_bytes", 1e6, format_decimals, optional=False)
    add("MB\ndown", "comm/total_down_bytes", 1e6, format_decimals, optional=False)
    add("MB\nidle", "comm/total_idle_down_bytes", 1e6, format_decimals)
    add("of dense\nFedAvg", "comm/ratio", 1, percent, optional=False)
    add("simulated\ns", "system/seconds", 1, "{:.1f}".format)
    for constant in ("R", "P", "Q"):
        add(f"constant\n{constant}", f"convergence/{constant}", 1, "{:.3g}".format)
    if any(run.seconds is not None for run in runs):
        table.append(_column(groups, "wall\ns", lambda run: run.seconds, "{:.1f}".format))
    return table


def _clients(groups: Groups, goal: Goal) -> Table:
    """The clients of each row's first run, unless it is cut, ordered from the worst value of the metric."""
    judged = _judged(goal.metric).removesuffix("_worst10")
    rows: list[dict[str, str]] = []
    for name, group in groups.items():
        # The table is that of the last evaluation.
        found = [] if group[0].cut else group[0].clients
        of = next((each for each in (f"global/{judged}", f"personal/{judged}") if found and each in found[0]), None)

        def worst(row: Mapping[str, str], of: str | None = of) -> float:
            value = as_number(row.get(of or "", ""))
            return -math.inf if value is None or math.isnan(value) else -value if goal.higher is False else value

        shown = sorted(found, key=worst) if of and goal.higher is not None else found
        rows += [{"run": name, **row} for row in shown[:_SHOWN_CLIENTS]]
    table = Table()
    for title in dict.fromkeys(title for row in rows for title in row):
        texts = [row.get(title, "") for row in rows]
        # Only columns of figures have "/" in their name; clients' names may look like numbers.
        numbers = [as_number(text) for text in texts] if "/" in title else []
        texts = ["" if value is None or math.isnan(value) else f"{value:.4f}" for value in numbers] or texts
        table.append(Column(title, texts))
    return table


def _settings(groups: Groups) -> Table:
    """The usual settings, such as model and learning rate, followed by other settings that differ."""
    first = [group[0] for group in groups.values()]
    loops = [nested_argument(run.config, "federated") for run in first]

    def size(layer: object) -> str:
        sizes = (f"{name}={nested_argument(layer, name)}" for name in ("rank", "budget", "ratio", "rank_ratio"))
        flags = (name for name in ("decouple", "half_frozen") if nested_argument(layer, name) is True)
        parts = (describe(nested_argument(layer, "factorization")), nested_argument(layer, "role"))
        given = [str(part) for part in parts if part] + [each for each in sizes if not each.endswith("=None")]
        return ", ".join([*given, *flags])

    def clients(loop: object) -> str:
        drawn, of = (nested_argument(loop, name) for name in ("clients_per_round", "clients"))
        # A float is a share of the clients.
        number = f"{100 * drawn:g}%" if type(drawn) is float else describe(drawn)
        return " of ".join(each for each in (number, describe(of)) if each)

    def named(run: Run, names: Sequence[str], sections: Sequence[str]) -> str:
        """The first setting of these names in the sections; without a configuration, in all of ``hparams.yaml``."""
        paths = [path for path, value in run.settings.items() if argument(path) in names and value is not None]
        if run.config:
            sections_of = {path: path.partition(".")[0] for path in paths}
            paths = [path for section in sections for path in paths if sections_of[path] == section]
        return setting_text(paths[0], run.settings[paths[0]]) if paths else ""

    table = Table(
        [
            Column("run", list(groups)),
            Column("method", [describe(nested_argument(loop, "algorithm")) for loop in loops]),
            Column("low-rank layers", [size(nested_argument(run.config, "lowrank")) for run in first]),
            Column("partition", [describe(nested_argument(loop, "partition")) for loop in loops]),
            Column("clients\nper round", [clients(loop) for loop in loops]),
            *(
                Column(name, [describe(nested_argument(loop, name)) for loop in loops])
                for name in ("uplink", "downlink")
            ),
            *(
                Column(name, [describe(nested_argument(run.config, name), depth=1) for run in first])
                for name in ("model", "data")
            ),
            Column("batch size", [named(run, ["batch_size"], ["data", "model"]) for run in first]),
            Column("learning rate", [named(run, ["lr", "learning_rate"], ["optimizer", "model"]) for run in first]),
        ]
    )
    for title, names, between in (
        ("samples per client\nleast, median, most", ("samples",), ", "),
        ("ranks", ("ranks",), " to "),
        ("trained\nparameters", ("trained", "parameters"), " of "),
    ):
        numbers = [[number for name in names for number in run.metadata.get(name, [])] for run in first]
        # One value is enough if all are the same.
        shown = [each[:1] if len(set(each)) == 1 else each for each in numbers]
        table.append(Column(title, [between.join(f"{number:,.10g}" for number in each) for each in shown]))
    table = Table(column for column in table if any(column.texts))
    others = _others(groups, [column.texts for column in table[1:]])
    for path in others[:_MOST_SETTINGS]:
        values = [run.settings.get(path) for run in first]
        texts = ["" if value is None else setting_text(path, value) for value in values]
        table.append(Column(argument(path), texts))
    runs = _all(groups)
    for name in dict.fromkeys(name for run in runs for name in run.software):
        if len({run.software.get(name) for run in runs}) > 1:
            # "unknown", because runs whose folder records no versions may have used other ones.
            made = [dict.fromkeys(run.software.get(name, "unknown") for run in group) for group in groups.values()]
            table.append(Column(f"{name}\nof the run", [", ".join(each) for each in made]))
    if others[_MOST_SETTINGS:]:
        further = ", ".join(argument(path) for path in others[_MOST_SETTINGS:])
        table.append(Column("further settings\nthat differ", [further] * len(groups)))
    return table if len(table) > 1 else Table()


def _others(groups: Groups, columns: Sequence[Sequence[str]]) -> list[str]:
    """Settings that differ between runs and that the other columns do not distinguish."""
    summed_up: tuple[str, ...] = ("lowrank", "model", "data", "optimizer", "trainer.callbacks")
    summed_up += tuple(
        f"federated.init_args.{name}" for name in ("algorithm", "partition", "clients", "uplink", "downlink")
    )
    rows = [tuple(column[place] for column in columns) for place in range(len(groups))]

    def distinguished(path: str) -> bool:
        values = [repr(group[0].settings.get(path)) for group in groups.values()]
        return all(
            rows[one] != rows[other] or values[one] == values[other] for one, other in combinations(range(len(rows)), 2)
        )

    return [
        path
        for path in differing_settings(list(groups.values()))
        if not path.endswith("summary")
        and not path.startswith("trainer.enable_")
        and not (path.startswith(summed_up) and distinguished(path))
    ]


def answers(groups: Groups, goal: Goal) -> list[str]:
    """Sentences that name the best runs: overall, within the budget, and in reaching the target."""
    metric, higher = goal.metric, goal.higher
    if higher is None or len(groups) < 2:
        return []

    def ranked(figure: Figure, largest: bool) -> list[tuple[list[str], float, float]]:
        """Names with mean and deviation, the best first; equal means share an entry."""
        found: dict[float, tuple[list[str], float, float]] = {}
        for name, group in groups.items():
            _, figures = _figure([figure(run) for run in group], str)
            if figures is not None and not math.isnan(figures[0]):
                names, mean, deviation = found.get(figures[0], ([], *figures))
                found[figures[0]] = [*names, name], mean, max(deviation, figures[1])
        return sorted(found.values(), key=lambda each: -each[1] if largest else each[1])

    def ranking(order: Sequence[tuple[list[str], float, float]]) -> str:
        texts = [
            f"{_and(names)}, {value:.4f}" + f" ± {deviation:.4f}" * bool(deviation) + " each" * (len(names) > 1)
            for names, value, deviation in order[:2]
        ]
        if len(texts) == 1:
            return f"{texts[0]}."
        near = abs(order[0][1] - order[1][1]) <= max(order[0][2], order[1][2])
        return f"; next {'are' if len(order[1][0]) > 1 else 'is'} ".join(texts) + (
            "; they are nearer than a standard deviation." if near else "."
        )

    sentences = []
    order = ranked(lambda run: (goal.best(run) or (0, None))[1], higher)
    if order:
        sentences.append(f"Best {metric}: {ranking(order)}")
    spent = [float(run.column("comm/total_bytes").values.max(initial=0.0)) for run in _all(groups)]
    budget = goal.budget or min((value for value in spent if 0 < value < math.inf), default=0.0)
    if budget:
        order = ranked(lambda run: (goal.best(run, budget) or (0, None))[1], higher)
        which = "" if goal.budget else ", all that the cheapest run spent"
        none = f"no run logged {metric} within them."
        text = ranking(order) if order else none
        if order:
            text += _by_some("Not evaluated within them", groups, lambda run: goal.best(run, budget))
        sentences.append(f"Best {metric} within {bytes_text(budget)} up and down{which}: {text}")
    if goal.target is not None:
        first = []
        for name, least, form in (
            ("comm/total_bytes", "the fewest bytes", bytes_text),
            ("system/seconds", "the fewest simulated seconds", "{:.4g} s".format),
            ("", "the fewest rounds", "{:.4g}".format),
        ):
            order = ranked(lambda run, name=name: goal.until(run, name), largest=False)  # type: ignore[misc]
            if order:
                first.append(f"with {least} by {_and(order[0][0])} ({form(order[0][1])})")
        text = f"is reached {', '.join(first)}." if first else "is reached by no run with all its seeds."
        text += _by_some("Not reached", groups, goal.reached)
        sentences.append(f"{metric} {goal.target:g} {text}")
    return [printable(sentence.replace("\n", " ")) for sentence in sentences]


def _by_some(what: str, groups: Groups, figure: Callable[[Run], object]) -> str:
    """A sentence that names the groups of which not all runs have a figure; empty if all have."""
    counts = {name: sum(figure(run) is not None for run in group) for name, group in groups.items()}
    named = [f"{name} ({counts[name]} of {len(group)})" for name, group in groups.items() if counts[name] < len(group)]
    return f" {what} by all seeds: {', '.join(named)}." * bool(named)


def _and(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _all(groups: Groups) -> list[Run]:
    return [run for group in groups.values() for run in group]
