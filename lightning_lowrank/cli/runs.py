"""Runs read from their folders, which runs differ only in the seed, and short names for them."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import yaml

from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.facts import read_facts, read_software
from lightning_lowrank.metric_direction import Monitor

_TOLD = 4
_LONGEST_WORD = 40
# What a folder may make this process hold: a run of 10,000 rounds that logs a hundred figures has a million.
_MOST_ROUNDS = 2**31
_MOST_FIGURES = 2_000_000
_MOST_CLIENTS = 100_000
_LONGEST_LINE = 2**20
_LARGEST_CONFIG = 2**20
_MOST_NODES = 20_000
_DEEPEST = 100
# What a configuration has otherwise than others in every run, or what a row's other columns tell.
_NOT_TOLD = ("seed_everything", "ckpt_path", "trainer.logger", "trainer.default_root_dir")
# Arguments that only say where a run writes to.
_PLACES = ("trainer.logger", "trainer.default_root_dir", "trainer.callbacks.init_args.dirpath")
# Of two settings that tell the same runs apart, the one that comes first here names them.
_TELLING = ("federated.init_args.algorithm", "federated.algorithm", "lowrank", "federated", "model", "data")
_VERSION = re.compile(r"version_\d+")


@dataclass
class Run:
    """A run's folder, and for each round (Lightning's epoch) the last value logged under each name.

    Attributes:
        folder: The folder.
        rounds: The values by round and name.
        cut: Whether the run made further rounds, which are left out.
    """

    folder: Path
    rounds: dict[int, dict[str, float]]
    cut: bool = False

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return ``metric`` by round number, counted from 1, where it was logged."""
        return [(number + 1, figures[metric]) for number, figures in self.rounds.items() if metric in figures]

    def last(self, name: str) -> float | None:
        """Return the last logged value of ``name``."""
        values = self.series(name)
        return values[-1][1] if values else None

    @property
    def count(self) -> int:
        """Number of the last round that was made: an evaluation after the fit is logged under a number more."""
        made = [number for number, figures in self.rounds.items() if any(map(_is_of_a_round, figures))]
        return max(made or self.rounds.keys() - {self.evaluation}) + 1

    @property
    def evaluation(self) -> int | None:
        """The last epoch of a run without a federation, if it was an evaluation after the fit.

        It has only ``val_…`` and ``test_…`` while every epoch before it has some ``train…`` too.
        """
        *earlier, last = [*map(_names, self.rounds.values())] or [set()]
        if not earlier or not last or any(_is_of_a_round(name) for names in (*earlier, last) for name in names):
            return None
        if not all(name.startswith(("val_", "test_")) for name in last):
            return None
        trained = all(any(name.startswith("train") for name in names) for names in earlier)
        return max(self.rounds) if trained else None

    def first(self, rounds: int) -> Run:
        """Return the run without what came after its first rounds."""
        kept = {number: figures for number, figures in self.rounds.items() if number < rounds}
        return Run(self.folder, kept, cut=bool(self.rounds) and self.count > rounds)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's ``config.yaml``; empty where there is none that can be read."""
        return _load_config(self.folder / "config.yaml")

    @property
    def trained(self) -> bool:
        """Whether the run trained, as far as its configuration tells: only the other subcommands have these options."""
        return not {"verbose", "return_predictions"} & self.config.keys()

    @cached_property
    def facts(self) -> dict[str, list[float]]:
        """What `FederatedLoop` wrote beside the metrics, such as ``seconds``."""
        return read_facts(self.folder)

    @cached_property
    def clients(self) -> list[dict[str, str]]:
        """A row for each client that the last validation judged: ``client``, ``samples`` and figures, by name."""
        try:
            with open(self.folder / "clients.csv", newline="", errors="replace") as file:
                rows = list(itertools.islice(csv.DictReader(_lines(file)), _MOST_CLIENTS))
        except (OSError, csv.Error):
            return []
        return [{str(key): value for key, value in row.items() if isinstance(value, str)} for row in rows]

    @property
    def began(self) -> int | None:
        """The number of the first round that was made, if it is known."""
        return int(self.facts["first_round"][0]) if "first_round" in self.facts else None

    @property
    def went_on(self) -> bool:
        """Whether the run went on from another one, whose rounds are not in it."""
        return self.began is not None and self.began > 1

    @property
    def seconds(self) -> float | None:
        """The seconds that all rounds took; ``None`` for a run that was killed or cut, or went on from another."""
        return self.facts["seconds"][0] if "seconds" in self.facts and self.began == 1 and not self.cut else None

    @cached_property
    def software(self) -> dict[str, str]:
        """The versions that the run was made with, such as ``torch``'s, and this package's ``commit``."""
        return read_software(self.folder)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that the run was told, by the path of the argument: of its configuration, else of ``hparams.yaml``."""
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


def printable(text: str) -> str:
    """Return a text without what a terminal, a page or a font takes for something else than a letter."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def read_run(folder: Path) -> Run:
    """Read the ``metrics.csv`` of one run folder, without what is no number in it.

    A run folder may come from anyone. One whose file is none of a `CSVLogger`'s, or has more figures than any run, is
    one without rounds.
    """
    rounds: dict[int, dict[str, float]] = {}
    held = 0
    try:
        with open(folder / "metrics.csv", newline="", errors="replace") as file:
            for row in csv.DictReader(_lines(file)):
                epoch = as_number(row.pop("epoch", None))
                if epoch is not None and 0 <= epoch < _MOST_ROUNDS:
                    found = {key: as_number(value) for key, value in row.items() if key is not None}
                    figures = rounds.setdefault(int(epoch), {})
                    held -= len(figures)
                    figures.update({key: value for key, value in found.items() if value is not None})
                    held += len(figures)
                    if held > _MOST_FIGURES:
                        raise csv.Error(f"more than {_MOST_FIGURES:,} figures")
    except (OSError, csv.Error):
        rounds.clear()
    return Run(folder, dict(sorted(rounds.items())))


def _names(figures: dict[str, float]) -> set[str]:
    # CSVLogger writes the step beside all figures.
    return set(figures) - {"step"}


def _is_of_a_round(name: str) -> bool:
    return name.startswith(("comm/", "federated/"))


def run_figures(run: Run) -> dict[str, str | float]:
    """Return what a model card says of a run, by name: its method, rounds, clients, bytes and last values."""
    found: dict[str, str | float] = {}
    algorithm = found_in(run.config, "federated", "algorithm")
    if algorithm is not None:
        found["algorithm"] = printable(describe(algorithm))
    if run.rounds:
        found["rounds"] = run.count
    for name, fact in (
        ("samples", "samples of a client (least, median, most)"),
        ("ranks", "ranks"),
    ):
        if name in run.facts:
            found[fact] = ", ".join(f"{each:g}" for each in run.facts[name])
    if run.seconds is not None:
        found["seconds"] = f"{run.seconds:g}"
    if run.software:
        found["made with"] = ", ".join(f"{name} {version}" for name, version in run.software.items())
    names = dict.fromkeys(name for figures in run.rounds.values() for name in figures)
    for name in names:
        value = run.last(name)
        bytes_moved = name.startswith("comm/total_") or name == "comm/ratio"
        if value is not None and (bytes_moved or name.startswith(("val_", "test_"))):
            found[printable(name)] = int(value) if float(value).is_integer() else value
    return found


def _lines(file: TextIO) -> Iterator[str]:
    """Yield a file's lines, and refuse one that is longer than any header."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise csv.Error(f"a line of more than {_LONGEST_LINE:,} letters")
        yield line


def as_number(text: Any) -> float | None:
    """Return a text as a number, ``None`` where it is none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Find every run in ``paths``, which are run folders or hold some.

    Raises:
        MisconfigurationException: If a path holds no run.
    """
    folders: list[Path] = []
    for path in paths:
        # Not a pipe or a device: reading would not end.
        found = sorted(file.parent for file in path.resolve().rglob("metrics.csv") if file.is_file())
        if not found:
            raise misconfigured(
                f"{path} holds no run: expected metrics.csv, which lightning.pytorch.loggers.CSVLogger writes."
            )
        folders += [folder for folder in found if folder not in folders]
    return [read_run(folder) for folder in folders]


def group_by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Group the runs whose configurations differ in nothing but the seed.

    Two runs belong together if their ``config.yaml`` files are equal except for:

    - ``seed_everything``;
    - arguments called ``seed`` or ``…_seed`` that have the value of ``seed_everything``, or none, in every such run;
    - where the runs write to: ``trainer.logger``, ``trainer.default_root_dir``, a callback's ``dirpath``.

    If several runs have the same seed too, only one of them joins the runs of other seeds: the one with most rounds,
    or the last of these. Repeated runs would make the deviation look smaller than it is.

    Groups are in the order of their first runs, and within a group runs are by seed. A run without a ``config.yaml`` of
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


def _load_config(file: Path) -> dict[str, Any]:
    """Return what a YAML file says; empty where it holds no configuration that can be read.

    Aliases may make a small file one of any size: what it comes to is counted before it is made.
    """
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_CONFIG:
            return {}
        text = file.read_text()
        # The scanner's time grows with the square of the depth.
        depth = itertools.accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0) for letter in text)
        if max(depth, default=0) > _DEEPEST:
            return {}
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None or _expanded(node, {}) > _MOST_NODES:
                return {}
            config = loader.construct_document(node)
            # A number may have more digits than Python writes.
            json.dumps(config, default=str)
        finally:
            loader.dispose()
    # Its constructors raise whatever they stumble over: a ValueError for a date, an IndexError for an empty number.
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _expanded(node: yaml.Node, known: dict[int, float]) -> float:
    """Return how many nodes there are if each alias is written out; infinite where one contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        # A long text that is repeated counts by its length.
        own = 1 + len(node.value) // 64 if isinstance(node, yaml.ScalarNode) else 1
        known[id(node)] = own + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


def monitors(runs: Iterable[Run]) -> list[Monitor]:
    """Return what the callbacks of runs' configurations monitor."""
    found = set()
    for run in runs:
        trainer = run.config.get("trainer")
        callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else None
        for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
            if not isinstance(callback, dict):
                continue
            given = callback.get("init_args")
            if isinstance(given, dict) and given.get("monitor") and given.get("mode") in ("min", "max"):
                owner = str(callback.get("class_path")).rpartition(".")[2]
                found.add(Monitor(owner, str(given["monitor"]), given["mode"]))
    return sorted(found)


def _read_config(run: Run) -> _Configured | None:
    config = dict(run.config)
    # Two runs without a seed cannot be told apart from repetitions.
    if type(config.get("seed_everything")) is not int:
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


def short_names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return a name for each group of runs, all of them different.

    A group is called by its folders, as far as they differ from other groups' folders, without Lightning's
    ``version_…``. Groups of the same folder are called by what differs in their configurations: by class names first,
    and by no more settings than are needed to tell them apart. Those that no setting tells apart are called by their
    seed, and those of the same seed are numbered.
    """
    bases = [_common_parts(group) for group in groups]
    folders = _folder_names(list(dict.fromkeys(bases)))
    members: dict[str, list[int]] = {}
    for number, base in enumerate(bases):
        members.setdefault(folders[base], []).append(number)
    names = [""] * len(groups)
    for folder, numbers in members.items():
        for number, told in zip(numbers, _differences([groups[number] for number in numbers]), strict=True):
            names[number] = folder if not told else told if len(members) == 1 else f"{folder} ({told})"
    count = Counter(names)
    names = [printable(f"{name}{_seed(group) * (count[name] > 1)}") for name, group in zip(names, groups, strict=True)]
    count = Counter(names)
    for number, name in enumerate(names):
        if count[name] > 1:
            # A folder may be called as another one's run.
            numbered = (f"{name}, run {repeat}" for repeat in itertools.count(1))
            names[number] = next(each for each in numbered if each not in count)
            count[names[number]] = 1
    return names


def _seed(group: Sequence[Run]) -> str:
    seed = group[0].config.get("seed_everything")
    return f", seed {seed}" if len(group) == 1 and type(seed) is int else ""


def found_in(config: Any, *names: str) -> Any:
    """Return an argument of a configuration by its name, or ``None``; ``init_args`` between names are passed over."""
    for name in names:
        inner = config.get("init_args", config) if isinstance(config, dict) else None
        config = inner.get(name) if isinstance(inner, dict) else None
    return config


def describe(value: Any) -> str:
    """Return an argument's value as it would be written in Python: ``Dirichlet(alpha=0.3)``; empty for none."""
    if isinstance(value, list):
        return _cut(", ".join(describe(part) for part in value[:_TOLD]), 3 * _LONGEST_WORD)
    if not isinstance(value, dict) or "class_path" not in value:
        return "" if value is None else _cut(str(value))
    given = value.get("init_args")
    arguments = (
        [f"{key}={_short(each)}" for key, each in given.items() if each is not None] if isinstance(given, dict) else []
    )
    return _cut(f"{_short(value)}({', '.join(arguments)})", 3 * _LONGEST_WORD)


def _short(value: Any) -> str:
    if isinstance(value, dict) and "class_path" in value:
        return _cut(str(value["class_path"]).rpartition(".")[2])
    return _cut(str(value))


def told(path: str, value: Any) -> str:
    """Return in short what an argument of a configuration is set to: ``FedAvg``, ``rank=4``."""
    text = str(value)
    if path.endswith("class_path"):
        return _cut(text.rpartition(".")[2])
    return f"{argument(path)}={_cut(text)}"


def argument(path: str) -> str:
    """Return an argument's own name, of its path in a configuration."""
    names = [name for name in path.split(".") if name not in ("class_path", "init_args") and not name.isdigit()]
    return _cut(names[-1]) if names else path


def _cut(text: str, longest: int = _LONGEST_WORD) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def differing(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the paths of the arguments that groups have otherwise than others, the most telling first."""
    flat = [group[0].settings for group in groups]
    paths = dict.fromkeys(path for each in flat for path in each)
    found = [
        path
        for path in paths
        if not path.startswith(_NOT_TOLD)
        and not path.endswith(("seed", "dirpath"))
        and len({repr(each.get(path)) for each in flat}) > 1
    ]
    ranks = {path: next((n for n, start in enumerate(_TELLING) if path.startswith(start)), 99) for path in found}
    return sorted(found, key=lambda path: (not path.endswith("class_path"), ranks[path]))


def _differences(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return for each group, in short, what its configuration has otherwise than others, as far as it tells."""
    flat = [group[0].settings for group in groups]
    # That layers are converted at all, the class of their factors says.
    paths = [path for path in differing(groups) if path not in ("lowrank", "lowrank.class_path")]
    values = {path: [repr(each.get(path)) for each in flat] for path in paths}
    chosen: list[str] = []
    known: list[tuple[str, ...]] = [()] * len(groups)

    def kinds(path: str) -> int:
        return len(set(zip(known, values[path], strict=True)))

    while len(chosen) < _TOLD:
        # What a class is given differs with it, so classes come first.
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
        return ", ".join(told(path, settings[path]) for path in given)
    # Of a run whose settings are not there, it is not known what it lacks.
    if not paths or not settings:
        return ""
    return "dense" if paths[0].startswith("lowrank") else f"no {argument(paths[0])}"


def _folder_names(bases: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Return the ends of paths as far as they differ, by path."""
    parts = list(bases)
    if len(parts) == 1:
        return {bases[0]: parts[0][-1]}
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while all(len(part) > 1 for part in parts) and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    return {base: "/".join(part) for base, part in zip(bases, parts, strict=True)}


def _shared(sequences: Sequence[Sequence[str]]) -> int:
    """Return how many items all sequences begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False)))


def _common_parts(group: Sequence[Run]) -> tuple[str, ...]:
    """Write several folders as one, with braces around what differs, as a shell would read them.

    Lightning's ``version_…`` are left out, for they say nothing of the runs.
    """
    parts = list(dict.fromkeys(_without_version(run.folder) for run in group))
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


def _without_version(folder: Path) -> tuple[str, ...]:
    return folder.parts[:-1] if _VERSION.fullmatch(folder.name) and len(folder.parts) > 1 else folder.parts


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (n − 1) of two or more values."""
    # A run that diverged makes both figures not a number. The table shows that, so NumPy need not warn.
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.mean(values)), float(np.std(values, ddof=1))
