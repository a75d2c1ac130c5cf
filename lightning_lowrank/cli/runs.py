"""Reading of run folders, grouping of runs by seed, and short names for them."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import yaml

from lightning_lowrank.arguments import escape_formula, join_names, printable
from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.metric_direction import Monitor
from lightning_lowrank.run_metadata import read_metadata, read_software

_MOST_NAMED = 4
_LONGEST_WORD = 40
# Limits for reading, because anyone may have written the folder.
_MOST_ROUNDS = 2**31
_MOST_CELLS = 200_000_000
_MOST_COLUMNS = 10_000
_CELLS_AT_ONCE = 2**19
_MOST_CLIENTS = 100_000
_LONGEST_LINE = 2**20
_LARGEST_CONFIG = 2**20
_MOST_NODES = 20_000
_DEEPEST = 100
# Settings that differ between all runs, or that have a column of their own.
_NOT_NAMED = ("seed_everything", "ckpt_path", "weights_only", "trainer.logger", "trainer.default_root_dir")
# Arguments that only set where a run writes files.
_PLACES = ("trainer.logger", "trainer.default_root_dir", "trainer.callbacks.init_args.dirpath")
# Arguments of a run that continues another one of its settings.
_RESUMING = ("ckpt_path", "weights_only")
# Preference among settings that distinguish the same runs.
_TELLING = ("federated.init_args.algorithm", "federated.algorithm", "lowrank", "federated", "model", "data")
_VERSION = re.compile(r"version_\d+")
_OF_A_ROUND = ("comm/", "federated/", "system/", "convergence/")
# Not values of single batches: their step is the batch's number.
_OF_AN_EVALUATION = re.compile(r"(.*/)?(val|valid|validation|test)(?![a-z])(?!.*_step$)")


class Series(NamedTuple):
    """The values of a figure, and the numbers of their rounds, from 0."""

    rounds: np.ndarray
    values: np.ndarray


_NOTHING = Series(np.empty(0, np.int64), np.empty(0))


@dataclass(eq=False)
class Run:
    """A run's folder, with the last value logged under each name in each round (Lightning's epoch).

    Attributes:
        folder: The folder.
        figures: The figures by name.
        made: Numbers of the rounds, from 0.
        evaluated: The figures of an evaluation after the fit, which belong to no round.
        cut: Whether the run made further rounds, which are left out.
        problem: Why ``metrics.csv`` could not be read; empty if it could.
    """

    folder: Path
    figures: Mapping[str, Series] = field(default_factory=dict)
    made: np.ndarray = field(default_factory=lambda: _NOTHING.rounds)
    evaluated: Mapping[str, Series] = field(default_factory=dict)
    cut: bool = False
    problem: str = ""

    def column(self, name: str) -> Series:
        """A figure's values by round; if no round logged it, those of an evaluation after the fit."""
        return self.figures.get(name) or self.evaluated.get(name) or _NOTHING

    def series(self, name: str) -> list[tuple[int, float]]:
        """The values of a figure with the numbers of their rounds, from 1."""
        rounds, values = self.column(name)
        return list(zip((rounds + 1).tolist(), values.tolist(), strict=True))

    def last(self, name: str) -> float | None:
        """The last round's value of a figure, or that of the last round that logged it."""
        values = self.column(name).values
        return float(values[-1]) if len(values) else None

    def at(self, name: str, number: int) -> float | None:
        """The value of a figure in a round, counted from 1."""
        rounds, values = self.column(name)
        place = int(np.searchsorted(rounds, number - 1))
        return float(values[place]) if place < len(rounds) and rounds[place] == number - 1 else None

    @property
    def count(self) -> int:
        """The number of the last round, from 1; 0 for a run without rounds."""
        return int(self.made[-1]) + 1 if len(self.made) else 0

    def first(self, rounds: int) -> Run:
        """The run cut to its first ``rounds`` rounds."""
        if self.count <= rounds:
            return self
        kept = {name: Series(*(part[each.rounds < rounds] for part in each)) for name, each in self.figures.items()}
        kept = {name: each for name, each in kept.items() if len(each.rounds)}
        return Run(self.folder, kept, self.made[self.made < rounds], cut=True, problem=self.problem)

    def after(self, earlier: Run) -> Run:
        """The run joined with the rounds of the earlier run that it continues."""
        made = np.union1d(earlier.made, self.made)
        names = dict.fromkeys((*earlier.figures, *self.figures))
        both = {name: (earlier.figures.get(name, _NOTHING), self.figures.get(name, _NOTHING)) for name in names}
        figures = {name: _last_of_each(*map(np.concatenate, zip(*pair, strict=True))) for name, pair in both.items()}
        return Run(self.folder, figures, made, self.evaluated)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's ``config.yaml``; empty if there is none that can be read."""
        return _load_config(self.folder / "config.yaml")

    @property
    def trained(self) -> bool:
        """Whether the run was a fit, by its configuration: other subcommands have other options."""
        return not {"verbose", "return_predictions"} & self.config.keys()

    @cached_property
    def metadata(self) -> dict[str, list[float]]:
        """The metadata that `FederatedLoop` wrote next to the metrics, such as ``seconds``."""
        return read_metadata(self.folder)

    @cached_property
    def clients(self) -> list[dict[str, str]]:
        """The table of clients at the last validation, one row each: ``client``, ``samples`` and figures, by name."""
        try:
            with open(self.folder / "clients.csv", newline="", encoding="utf-8", errors="replace") as file:
                rows = list(itertools.islice(csv.DictReader(_lines(file)), _MOST_CLIENTS))
        except (OSError, csv.Error):
            return []
        found = [{str(key): value for key, value in row.items() if isinstance(value, str)} for row in rows]
        for row in found:
            name = row.get("client", "")
            # The apostrophe before a formula is not part of the client's name.
            if name.startswith("'") and escape_formula(name[1:]) == name:
                row["client"] = name[1:]
        return found

    @property
    def first_round(self) -> int | None:
        """The number of the first round, if it is known."""
        return int(self.metadata["first_round"][0]) if "first_round" in self.metadata else None

    @property
    def continues(self) -> bool:
        """Whether the run continues another run, whose first rounds are in that run's folder."""
        return self.first_round is not None and self.first_round > 1

    @property
    def seconds(self) -> float | None:
        """The seconds of all rounds; ``None`` for a run that was killed or cut, or continues another."""
        return (
            self.metadata["seconds"][0]
            if "seconds" in self.metadata and self.first_round == 1 and not self.cut
            else None
        )

    @cached_property
    def software(self) -> dict[str, str]:
        """Versions of the software that made the run, such as ``torch``'s, and this package's ``commit``."""
        return read_software(self.folder)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings by their path in the configuration, or else in ``hparams.yaml``."""
        found: dict[str, Any] = {}

        def walk(value: Any, path: str) -> None:
            if isinstance(value, list) and any(isinstance(part, dict) for part in value):
                value = dict(enumerate(value))
            if not isinstance(value, dict):
                found[path] = value
                return
            for key, part in value.items():
                walk(part, f"{path}.{key}" if path else str(key))

        walk(self.config or _load_config(self.folder / "hparams.yaml"), "")
        return found


def as_number(text: Any) -> float | None:
    """The number that a text represents; ``None`` if it represents none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def mean_and_deviation(values: Any) -> tuple[Any, Any]:
    """The mean and the sample standard deviation (n − 1) of two or more values, over the first axis of an array."""
    # A diverged run makes both figures NaN. The table shows that, so NumPy need not warn.
    with np.errstate(invalid="ignore", over="ignore"):
        mean, deviation = np.mean(values, axis=0), np.std(values, axis=0, ddof=1)
    return (mean, deviation) if np.ndim(mean) else (float(mean), float(deviation))


# Reading


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """All runs in ``paths``, which are run folders or contain some.

    Raises:
        MisconfigurationException: If a path holds no run.
    """
    folders: list[Path] = []
    for path in paths:
        # is_file() excludes pipes and devices, whose reading would not end.
        found = sorted(file.parent for file in path.resolve().rglob("metrics.csv") if file.is_file())
        links = [str(each) for each in sorted(path.glob("*")) if each.is_symlink() and each.is_dir()]
        if links:
            # Not followed, because a folder that comes from anyone may have links to anywhere.
            warnings.warn(f"runs in linked folders are left out: also name {join_names(links)}.", stacklevel=2)
        if not found:
            raise misconfigured(
                f"{path} holds no run: expected metrics.csv, which lightning.pytorch.loggers.CSVLogger writes."
            )
        folders += [folder for folder in found if folder not in folders]
    return [read_run(folder) for folder in folders]


def read_run(folder: Path) -> Run:
    """Read the run in a folder from its ``metrics.csv``; cells that are no numbers are left out.

    A run folder may come from anyone. A file that is none of a `CSVLogger`'s, or is larger than any run's, makes a run
    without rounds, whose ``problem`` says why.
    """
    try:
        with open(folder / "metrics.csv", newline="", errors="replace") as file:
            columns = _read_columns(file)
    except (OSError, csv.Error) as error:
        return Run(folder, problem=str(error))
    if columns and "epoch" not in columns:
        return Run(folder, problem="it has no column epoch, as one of CSVLogger(prefix=...)")
    epoch = columns.pop("epoch", _NOTHING)
    known = (epoch.values >= 0) & (epoch.values < _MOST_ROUNDS)
    epochs = np.full(int(epoch.rounds[known].max(initial=-1)) + 1, -1)
    epochs[epoch.rounds[known]] = epoch.values[known]
    within = {}
    for name, (rows, values) in columns.items():
        chosen = rows < len(epochs)
        chosen[chosen] = epochs[rows[chosen]] >= 0
        within[name] = rows[chosen], values[chosen]
    end = _end_of_fit({name: rows for name, (rows, _) in within.items() if name != "step" and len(rows)}, epochs)
    between = _between_fits(within, epochs)
    numbers = epochs - between
    parts: tuple[dict[str, Series], dict[str, Series]] = ({}, {})
    for name, (rows, values) in within.items():
        # Evaluations between fits come first, so that a round's own value replaces theirs.
        order = np.argsort(~between[rows], kind="stable")
        rows, values = rows[order], values[order]
        for part, chosen in zip(parts, ((rows < end) & (numbers[rows] >= 0), rows >= end), strict=True):
            if chosen.any():
                part[name] = _last_of_each(numbers[rows[chosen]], values[chosen])
    of_rounds = [each.rounds for name, each in parts[0].items() if name.startswith(_OF_A_ROUND)]
    made = of_rounds[0] if of_rounds else np.unique(epochs[:end][epochs[:end] >= 0])
    for each in of_rounds[1:]:
        made = made if np.array_equal(made, each) else np.union1d(made, each)
    return Run(folder, parts[0], made, parts[1])


def _read_columns(file: TextIO) -> dict[str, Series]:
    """The numbers in each column of a CSV file, with their row numbers."""
    # A last line without an end is of a run that was killed while it wrote: its last number may lack digits.
    reader = csv.reader(line if line.endswith(("\n", "\r")) else line.rpartition(",")[0] for line in _lines(file))
    header = next(reader, [])
    width = len(header)
    if width > _MOST_COLUMNS:
        raise csv.Error(f"more than {_MOST_COLUMNS:,} columns")
    found: list[list[Series]] = [[] for _ in header]
    begin = 0
    # By column: a million rows as dictionaries would take minutes and gigabytes.
    while width and (rows := list(itertools.islice(reader, max(1, _CELLS_AT_ONCE // width)))):
        rows = [row if len(row) == width else (row + [""] * width)[:width] for row in rows]
        for parts, texts in zip(found, zip(*rows, strict=True), strict=True):
            parts.append(_numbers(texts, begin))
        begin += len(rows)
        if begin * width > _MOST_CELLS:
            raise csv.Error(f"more than {_MOST_CELLS:,} figures")
    columns = {}
    for name, parts in zip(header, found, strict=True):
        columns[name] = Series(*map(np.concatenate, zip(*parts, strict=True))) if parts else _NOTHING
    return columns


def _numbers(texts: Sequence[str], begin: int) -> Series:
    filled = np.fromiter(map(bool, texts), bool, len(texts))
    try:
        values = np.fromiter(map(float, filter(None, texts)), float)
    except ValueError:
        numbers = [as_number(text) for text in texts]
        filled = np.array([number is not None for number in numbers])
        values = np.array([number for number in numbers if number is not None], float)
    return Series(np.flatnonzero(filled) + begin, values)


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file; raises if a line is longer than any header can be."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise csv.Error(f"a line of more than {_LONGEST_LINE:,} letters")
        # Python 3.10's csv module accepts no NUL.
        yield line.replace("\0", "\\x00")


def _last_of_each(rounds: np.ndarray, values: np.ndarray) -> Series:
    """The last value of each round, by the rounds' numbers."""
    if (np.diff(rounds) > 0).all():
        return Series(rounds, values)
    numbers, places = np.unique(rounds[::-1], return_index=True)
    return Series(numbers, values[::-1][places])


def _end_of_fit(rows: Mapping[str, np.ndarray], epochs: np.ndarray) -> int:
    """The first row of ``metrics.csv`` from an evaluation after the fit, as of ``trainer.validate(ckpt_path="best")``.

    Its epoch is another one than the last round's. A federated run logs figures of its own in each round; in other runs
    an evaluation has ``val_…`` and ``test_…`` alone, and every other epoch has some ``train…`` too.
    """
    federated = any(name.startswith(_OF_A_ROUND) for name in rows)
    made = [each for name, each in rows.items() if name.startswith(_OF_A_ROUND if federated else "train")]
    last = max((int(each[-1]) for each in made), default=len(epochs))
    behind = np.flatnonzero((epochs[last + 1 :] >= 0) & (epochs[last + 1 :] != epochs[last : last + 1])) + last + 1
    if federated or not len(behind):
        return int(behind[0]) if len(behind) else len(epochs)
    begin = int(behind[0])
    names = [name for name, each in rows.items() if each[-1] >= begin]
    alone = names and all(name.startswith(("val_", "test_")) for name in names) and len(set(epochs[behind])) == 1
    trained = np.concatenate([epochs[each] for each in made])
    return begin if alone and {*epochs[:begin]} <= {*trained, -1} else len(epochs)


def _between_fits(columns: Mapping[str, tuple[np.ndarray, np.ndarray]], epochs: np.ndarray) -> np.ndarray:
    """For each row of ``metrics.csv``, whether it is of an evaluation before a fit that made further rounds.

    Its epoch is the next round's, and its step the last round's. The validation of a round of two steps or more has a
    larger step; in rounds of fewer steps the two cannot be distinguished, and no row is taken for such an evaluation.
    """
    found = [rows for name, (rows, _) in columns.items() if name.startswith(_OF_A_ROUND)]
    marks = np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
    steps = np.full(len(epochs), -1.0)
    rows, values = columns.get("step", _NOTHING)
    steps[rows] = values
    evaluates = np.ones(len(epochs), bool)
    for name, (rows, _) in columns.items():
        if name != "step" and not _OF_AN_EVALUATION.match(name):
            evaluates[rows] = False
    place = np.searchsorted(marks, np.arange(len(epochs)))
    last_epoch = np.concatenate([[-1], epochs[marks]])[place]
    last_step = np.concatenate([[0.0], np.maximum.accumulate(steps[marks])])[place]
    next_step = np.concatenate([steps[marks], [-1.0]])[place]
    return evaluates & (epochs == last_epoch + 1) & (steps == last_step) & (next_step > last_step + 1)


def curve(group: Sequence[Run], against: str | None, metric: str) -> np.ndarray:
    """Points of ``metric`` over rounds, or over another figure, for the rounds in which all runs logged both.

    Returns:
        The place, the value, and the value's standard deviation over the runs, ``[points, 3]``. Means, of several runs.
    """
    columns = [run.column(name) for run in group for name in (metric, against or metric)]
    rounds = columns[0].rounds
    for each in columns[1:]:
        rounds = np.intersect1d(rounds, each.rounds, assume_unique=True)
    values = [each.values[np.searchsorted(each.rounds, rounds)] for each in columns]
    with np.errstate(over="ignore", invalid="ignore"):
        x = rounds + 1.0 if against is None else np.mean(values[1::2], axis=0)
    y, spread = (values[0], np.zeros(len(rounds))) if len(group) == 1 else mean_and_deviation(values[::2])
    return np.stack([x, y, spread], axis=1)


def _load_config(file: Path) -> dict[str, Any]:
    """The content of a YAML file; empty if it cannot be read as a configuration.

    Aliases may make a small file one of any size: its whole size is counted before it is built.
    """
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_CONFIG:
            return {}
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            # Written in another encoding by this machine.
            text = file.read_text(errors="replace")
        # YAML's scanner takes time quadratic in the depth.
        depth = itertools.accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0) for letter in text)
        if max(depth, default=0) > _DEEPEST:
            return {}
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None or _expanded(node, {}) > _MOST_NODES:
                return {}
            config = loader.construct_document(node)
            # An integer may have more digits than Python converts to text.
            json.dumps(config, default=str)
        finally:
            loader.dispose()
    # YAML's constructors raise many kinds of errors: ValueError for a date, IndexError for an empty number.
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _expanded(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of nodes after expansion of aliases; infinite if an alias contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
        # A long text counts by its length, because aliases may repeat it.
        own = 1 + len(node.value) // 64 if isinstance(node, yaml.ScalarNode) else 1
        known[id(node)] = own + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


def monitors(runs: Iterable[Run]) -> list[Monitor]:
    """The figures that callbacks in the runs' configurations monitor."""
    found = set()
    for run in runs:
        callbacks = nested_argument(run.config, "trainer", "callbacks")
        for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
            monitor, mode = (nested_argument(callback, name) for name in ("monitor", "mode"))
            if monitor and mode in ("min", "max") and "class_path" in callback:
                found.add(Monitor(str(callback["class_path"]).rpartition(".")[2], str(monitor), mode))
    return sorted(found)


def run_figures(run: Run) -> dict[str, str | float]:
    """The rows of a model card by name: a run's method, rounds, clients, bytes and last values."""
    found: dict[str, str | float] = {}
    algorithm = nested_argument(run.config, "federated", "algorithm")
    if algorithm is not None:
        found["algorithm"] = describe(algorithm)
    if run.count:
        found["rounds"] = run.count
    for name, label in (("samples", "samples of a client (least, median, most)"), ("ranks", "ranks")):
        if name in run.metadata:
            found[label] = ", ".join(f"{each:g}" for each in run.metadata[name])
    if run.seconds is not None:
        found["seconds"] = f"{run.seconds:g}"
    if run.software:
        found["made with"] = ", ".join(f"{name} {version}" for name, version in run.software.items())
    for name in dict.fromkeys((*run.figures, *run.evaluated)):
        value = run.last(name)
        if value is not None and name.startswith(("comm/total_", "comm/ratio", "val_", "test_")):
            found[name] = int(value) if value.is_integer() else value
    return found


# Seeds


def group_by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Group the runs whose configurations differ only in the seed.

    Two runs belong together if their ``config.yaml`` files are equal except for:

    - ``seed_everything``;
    - arguments called ``seed`` or ``…_seed`` that have the value of ``seed_everything``, or none, in every such run;
    - where the runs write to: ``trainer.logger``, ``trainer.default_root_dir``, a callback's ``dirpath``;
    - what they continue: ``ckpt_path``, ``weights_only``.

    If several runs have the same seed too, only one of them joins the runs of other seeds: the one with the highest
    round, such as one that continues a killed run, or the last of these. Repeated runs would make the deviation look
    smaller than it is.

    Groups are in the order of their first runs, and within a group runs are by seed. A run without a ``config.yaml`` of
    LightningCLI is a group of its own.
    """
    alike: dict[str, list[_Configured]] = {}
    groups: list[list[Run]] = []
    for run in runs:
        configured = _without_seed(run)
        if configured is None:
            groups.append([run])
        else:
            alike.setdefault(configured.rest, []).append(configured)
    for similar in alike.values():
        following = {path for path in similar[0].seeds if all(one.seeds[path] in (None, one.seed) for one in similar)}
        kinds: dict[str, dict[int, list[Run]]] = {}
        for one in similar:
            own = {path: value for path, value in one.seeds.items() if path not in following}
            by_seed = kinds.setdefault(json.dumps(own, sort_keys=True), {})
            by_seed.setdefault(one.seed, []).append(one.run)
        for by_seed in kinds.values():
            for repeats in by_seed.values():
                repeats.sort(key=lambda run: run.count)
            while any(by_seed.values()):
                groups.append([by_seed[seed].pop() for seed in sorted(by_seed) if by_seed[seed]])
    place = {id(run): number for number, run in enumerate(runs)}
    return sorted(groups, key=lambda group: min(place[id(run)] for run in group))


class _Configured(NamedTuple):
    """A run's seed, its other seeds by path, and the rest of its configuration as JSON."""

    run: Run
    seed: int
    seeds: dict[str, Any]
    rest: str


def _without_seed(run: Run) -> _Configured | None:
    seed = run.config.get("seed_everything")
    # Two runs without a seed cannot be distinguished from repetitions.
    if type(seed) is not int:
        return None
    seeds: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for path, value in run.settings.items():
        names = [name for name in path.split(".") if not name.isdigit()]
        left_out = ("seed_everything", *_RESUMING, *_PLACES)
        if any(names[: place.count(".") + 1] == place.split(".") for place in left_out):
            continue
        (seeds if names and (names[-1] == "seed" or names[-1].endswith("_seed")) else rest)[path] = value
    return _Configured(run, seed, seeds, json.dumps([rest, sorted(seeds)], sort_keys=True, default=str))


# Names


def short_names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Distinct names, one for each group of runs.

    A group is called by its folders, as far as they differ from other groups' folders, without Lightning's
    ``version_…``. Groups of the same folder are called by what differs in their configurations: by class names first,
    and by no more settings than are needed to distinguish them. Groups that no setting distinguishes are called by
    their seed, and groups of the same seed are numbered.
    """
    bases = [_common_parts(group) for group in groups]
    folders = _folder_names(list(dict.fromkeys(bases)))
    members: dict[str, list[int]] = {}
    for number, base in enumerate(bases):
        members.setdefault(folders[base], []).append(number)
    names = [""] * len(groups)
    for folder, numbers in members.items():
        for number, words in zip(numbers, _differences([groups[number] for number in numbers]), strict=True):
            names[number] = folder if not words else words if len(members) == 1 else f"{folder} ({words})"
    count = Counter(names)
    names = [f"{name}{_seed(group) * (count[name] > 1)}" for name, group in zip(names, groups, strict=True)]
    names = [printable(name.replace("\n", " ")) for name in names]
    count = Counter(names)
    for number, name in enumerate(names):
        if count[name] > 1:
            # A folder's name may equal another group's short name.
            numbered = (f"{name}, run {repeat}" for repeat in itertools.count(1))
            names[number] = next(each for each in numbered if each not in count)
            count[names[number]] = 1
    return names


def _seed(group: Sequence[Run]) -> str:
    seed = group[0].config.get("seed_everything")
    return f", seed {seed}" if len(group) == 1 and type(seed) is int else ""


def nested_argument(config: Any, *names: str) -> Any:
    """An argument of a nested configuration by its names, or ``None``; ``init_args`` between names is skipped."""
    for name in names:
        inner = config.get("init_args", config) if isinstance(config, dict) else None
        config = inner.get(name) if isinstance(inner, dict) else None
    return config


def describe(value: Any, depth: int = 0) -> str:
    """An argument's value as Python code: ``Dirichlet(alpha=0.3)``; empty for ``None``.

    Args:
        value: The value.
        depth: How deep classes among a class's arguments are written with arguments of their own.
    """
    if isinstance(value, list):
        return _cut(", ".join(describe(part) for part in value[:_MOST_NAMED]), 3 * _LONGEST_WORD)
    if not isinstance(value, dict) or "class_path" not in value:
        return "" if value is None else _cut(str(value))
    given = value.get("init_args")
    given = given if isinstance(given, dict) else {}
    arguments = [
        f"{key}={describe(each, depth - 1) if depth else _short(each)}"
        for key, each in given.items()
        if each is not None
    ]
    return _cut(f"{_short(value)}({', '.join(arguments)})", 3 * _LONGEST_WORD)


def _short(value: Any) -> str:
    if isinstance(value, dict) and "class_path" in value:
        return _cut(str(value["class_path"]).rpartition(".")[2])
    return _cut(str(value))


def setting_text(path: str, value: Any) -> str:
    """A short text for a setting's value, such as ``FedAvg`` or ``4``."""
    return _cut(str(value).rpartition(".")[2] if path.endswith("class_path") else str(value))


def argument(path: str) -> str:
    """The last name in an argument's path."""
    names = [name for name in path.split(".") if name not in ("class_path", "init_args") and not name.isdigit()]
    return _cut(names[-1]) if names else path


def _cut(text: str, longest: int = _LONGEST_WORD) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def differing_settings(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Paths of the settings that differ between groups, the most informative first."""
    flat = [group[0].settings for group in groups]
    found = [
        path
        for path in dict.fromkeys(path for each in flat for path in each)
        if not path.startswith(_NOT_NAMED)
        and not path.endswith(("seed", "dirpath"))
        and len({repr(each.get(path)) for each in flat}) > 1
    ]
    ranks = {path: next((n for n, start in enumerate(_TELLING) if path.startswith(start)), 99) for path in found}
    return sorted(found, key=lambda path: (not path.endswith("class_path"), ranks[path]))


def _differences(groups: Sequence[Sequence[Run]]) -> list[str]:
    """For each group, a short text of the settings that distinguish it from the others."""
    flat = [group[0].settings for group in groups]
    # Left out: the factorization's class already shows that layers are converted.
    paths = [path for path in differing_settings(groups) if path not in ("lowrank", "lowrank.class_path")]
    values = {path: [repr(each.get(path)) for each in flat] for path in paths}
    chosen: list[str] = []
    known: list[tuple[str, ...]] = [()] * len(groups)

    def kinds(path: str) -> int:
        return len(set(zip(known, values[path], strict=True)))

    while len(chosen) < _MOST_NAMED:
        # Classes first, because their arguments differ together with them.
        for candidates in ([path for path in paths if path.endswith("class_path")], paths):
            best = max(candidates, key=kinds, default=None)
            if best is not None and kinds(best) > len(set(known)):
                chosen.append(best)
                known = [(*before, value) for before, value in zip(known, values[best], strict=True)]
                break
        else:
            break
    chosen.sort(key=paths.index)
    return [_words(each, chosen) for each in flat]


def _words(settings: dict[str, Any], paths: Sequence[str]) -> str:
    given = [path for path in paths if settings.get(path) not in (None, [], {}, "")]
    if given:
        named = ["" if path.endswith("class_path") else f"{argument(path)}=" for path in given]
        return ", ".join(name + setting_text(path, settings[path]) for name, path in zip(named, given, strict=True))
    # A run without any settings is not described by a missing setting.
    if not paths or not settings:
        return ""
    return "dense" if paths[0].startswith("lowrank") else f"no {argument(paths[0])}"


def _folder_names(bases: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """For each path, its shortest ending that no other path shares."""
    if len(bases) == 1:
        return {bases[0]: bases[0][-1]}
    shortest = min(map(len, bases)) - 1
    ahead = min(_shared(bases), shortest)
    behind = min(_shared([base[::-1] for base in bases]), shortest - ahead)
    return {base: "/".join(base[ahead : len(base) - behind]) for base in bases}


def _shared(sequences: Sequence[Sequence[str]]) -> int:
    """Length of the common beginning of all sequences."""
    return sum(1 for _ in itertools.takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False)))


def _common_parts(group: Sequence[Run]) -> tuple[str, ...]:
    """Several folders as one path, with their differences in braces, as a shell would expand them.

    Lightning's ``version_…`` are left out, for they say nothing of the runs.
    """
    parts = list(dict.fromkeys(_without_version(run.folder) for run in group))
    if len(parts) == 1:
        return parts[0]
    ahead = _shared(parts)
    behind = _shared([part[ahead:][::-1] for part in parts])
    stop = len(parts[0]) - behind
    inner = ["/".join(part[ahead : len(part) - behind]) for part in parts]
    # Keep numbers whole rather than splitting them between digits.
    start = inner[0][: _shared(inner)].rstrip("0123456789")
    braces = f"{start}{{{','.join(text[len(start) :] for text in inner)}}}"
    return (*parts[0][:ahead], braces, *parts[0][stop:])


def _without_version(folder: Path) -> tuple[str, ...]:
    return folder.parts[:-1] if _VERSION.fullmatch(folder.name) and len(folder.parts) > 1 else folder.parts
