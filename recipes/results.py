"""The published figures beside those measured here: writes ``recipes/RESULTS.md``.

``RESULTS.yaml`` holds each published figure once, with the recipes that run it or the reason why it is not run.
``RESULTS.json`` holds what runs gave, taken from run folders by this command. The page is made from both:

    python recipes/results.py --rerun 'fedslop/mnist+rank_*' --seeds 0 1 2 --data ../shared/data
    python recipes/results.py --runs runs/fedslop
    python recipes/results.py --check

A run is known by its configuration, not by its folder's name: a folder whose ``config.yaml`` differs from the recipe's
in anything that changes the result is refused, and the difference is told.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import re
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from lightning_lowrank.cli.runs import Run, find_runs, mean_and_deviation

HERE = Path(__file__).parent
PUBLISHED, MEASURED, PAGE = (HERE / f"RESULTS.{kind}" for kind in ("yaml", "json", "md"))
NEAR = 1.0
"""Percentage points that a figure may be off and still be called near, and the most of our own spread that counts."""
_MOST_KEYS = 4
# What a run's configuration may have otherwise than the recipe's: where it reads and writes, what it shows, and how
# clients are executed, which changes sums in their last digits.
_FREE = (
    *("seed_everything", "trainer.logger", "trainer.default_root_dir", "trainer.enable_", "trainer.callbacks"),
    *("trainer.accelerator", "trainer.devices", "trainer.max_time", "data.init_args.root", "data.init_args.download"),
    *("data.init_args.num_workers", "data.init_args.eval_batch_size", "federated.init_args.execution"),
    *("federated.init_args.chunk_size", "federated.init_args.summary", "federated.init_args.compile"),
    "federated.init_args.data_on_device",
)
_ROUNDS = "trainer.max_epochs"


_SAFE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SAFE):  # type: ignore[misc, valid-type]
    """Reads ``93.50`` as a text: the last digit of a published figure says how exact it is."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
        for letter, resolvers in _SAFE.yaml_implicit_resolvers.items()
    }


def refuse(said: str) -> NoReturn:
    """End with one line."""
    raise SystemExit(f"results.py: {said}")


@dataclass(frozen=True)
class Figure:
    """A mean in percent with its standard deviation, if one is known, and the last digit that it is given to."""

    value: float
    spread: float | None = None
    digit: float = 0.01

    @classmethod
    def parse(cls, text: str | float) -> Figure:
        """Read ``90.3 ± 0.2`` or ``90.3``."""
        value, *spread = (part.strip() for part in str(text).split("±"))
        decimals = len(value.partition(".")[2])
        return cls(float(value), float(spread[0]) if spread else None, 10.0**-decimals)

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Return the mean of seeds' values, and their sample standard deviation where there are several."""
        if len(values) == 1:
            return cls(values[0])
        return cls(*mean_and_deviation(values))

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.spread is None else f" ± {self.spread:.2f}")


def judge(theirs: Figure, ours: Figure) -> str:
    """Return the verdict on a figure: ``within spread``, ``near``, ``off, above`` or ``off, below``.

    The spread is the larger of the two standard deviations, ours counting for a point at most: seeds that differ by
    more than that do not confirm anything. Where neither is known, it is half of the last published digit.

    Example:
        >>> judge(Figure.parse("90.3 ± 0.2"), Figure(90.51)), judge(Figure.parse("90.3 ± 0.2"), Figure(90.48))
        ('near', 'within spread')
        >>> judge(Figure.parse("92.47"), Figure(82.27, 13.95)), judge(Figure.parse("87.3 ± 0.4"), Figure(89.0))
        ('off, below', 'off, above')
    """
    gap = ours.value - theirs.value
    spread = max(theirs.spread or 0.0, min(ours.spread or 0.0, NEAR), theirs.digit / 2)
    if abs(gap) <= spread + 1e-9:
        return "within spread"
    return "near" if abs(gap) <= NEAR + 1e-9 else f"off, {'above' if gap > 0 else 'below'}"


@dataclass(frozen=True)
class Key:
    """What is run: recipes in the order in which they are merged, the base first, and options after them."""

    recipes: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        base = self.recipes[0]
        folder = base.partition("/")[0]
        others = [each.removeprefix(f"{folder}/") for each in self.recipes[1:]]
        return " ".join(["+".join([base, *others]), *(f"--{name} {value}" for name, value in self.options)])

    @property
    def words(self) -> list[str]:
        """The command line after ``lightning-lowrank fit``."""
        configs = [word for each in self.recipes for word in ("--config", f"recipes/{each}.yaml")]
        return configs + [word for name, value in self.options for word in (f"--{name}", value)]

    def said(self, *path: str) -> Any:
        """Return what the options, or else the last of the recipes that says it, say at a place."""
        options = dict(self.options)
        if ".".join(path) in options:
            return yaml.safe_load(options[".".join(path)])
        found = None
        for name in self.recipes:
            content: Any = recipe(name)
            for part in path:
                content = content.get(part) if isinstance(content, dict) else None
            found = found if content is None else content
        return found


@cache
def recipe(name: str) -> dict[str, Any]:
    """Return a recipe's content."""
    file = HERE / f"{name}.yaml"
    if not file.is_file():
        refuse(f"{PUBLISHED.name} names recipes/{name}.yaml, which is not there.")
    content: dict[str, Any] = yaml.load(file.read_text(), Loader=_SAFE)
    return content


@dataclass(frozen=True)
class Cell:
    """A published figure: where it stands, what it is compared with, and what runs it or why nothing does."""

    paper: dict[str, Any]
    table: dict[str, Any]
    row: str
    column: str
    figure: Figure
    key: Key | None
    not_run: str | None
    why: str | None
    varied: tuple[str, ...] | None


def cells_of(paper: dict[str, Any], table: dict[str, Any]) -> Iterator[Cell]:
    """Yield a table's figures by rows. What is said nearest to a figure holds: of its row, column, table, paper."""
    columns = table["columns"]
    for row in table["rows"]:
        if len(row["figures"]) != len(columns):
            refuse(f"{paper['name']}, {table['name']}, {row['name']}: {len(columns)} figures are wanted.")
        for column, text in zip(columns, row["figures"], strict=True):
            if text is None:
                continue
            levels = (row, column, table, paper)

            def nearest(name: str, levels: tuple[dict[str, Any], ...] = levels) -> Any:
                return next((level[name] for level in levels if name in level), None)

            base = nearest("base")
            names: list[str] = [base]
            options: dict[str, Any] = {}
            for level in (table, row, column):
                names += level.get("overlays") or []
                options.update(level.get("options") or {})
            names += (row.get("with") or {}).get(base, [])
            runnable = base is not None and base in row.get("only", [base])
            runnable &= all(level.get("overlays", []) is not None for level in (row, column))
            folder = paper["folder"]
            recipes = tuple(f"{folder}/{name}" for name in names)
            key = Key(recipes, tuple((name, str(value)) for name, value in options.items())) if runnable else None
            why, varied = nearest("why"), nearest("varied")
            yield Cell(
                paper,
                table,
                row["name"],
                column["name"],
                Figure.parse(text),
                key,
                nearest("not_run"),
                why,
                None if varied is None else tuple(varied),
            )


def cells(published: dict[str, Any]) -> list[Cell]:
    """Return all published figures."""
    return [cell for paper in published["papers"] for table in paper["tables"] for cell in cells_of(paper, table)]


@dataclass(frozen=True)
class Measured:
    """What is known of a run, in percent: best and last value and the mean of the last ten looks; over which seeds."""

    best: Figure
    last: Figure | None
    last_ten: Figure | None
    at: str
    seeds: tuple[int, ...]
    rounds: int
    seconds: str
    made: str

    def compared(self, reported: str) -> Figure | None:
        """Return the figure that the paper's is compared with; for a last value that was not noted, the mean of ten."""
        return self.best if reported == "best" else self.last or self.last_ten


def measured_of(key: Key, stored: dict[str, Any], earlier: dict[str, Any]) -> Measured | None:
    """Return what run folders gave for a key, else what was measured before this page was made, if anything was.

    If that was a single run, it counts beside the folders' runs of other seeds.
    """
    runs, before = stored.get(str(key), {}), earlier.get(str(key))
    rounds_before = 0 if before is None else before.get("rounds") or key.said("trainer", "max_epochs")
    if runs and before is not None and len(before["seeds"]) == 1 and "last" in before:
        runs = {str(before["seeds"][0]): _run_of(before, rounds_before), **runs}
    # One seed that was run again does not take the place of three, nor a shortened run that of a whole one.
    if runs and (
        before is None
        or (len(runs) >= len(before["seeds"]) and min(run["rounds"] for run in runs.values()) >= rounds_before)
    ):
        ordered = [runs[seed] for seed in sorted(runs, key=int)]
        seconds = [run["seconds"] for run in ordered if run["seconds"] is not None]
        made = sorted({f"{run['date']} ({run['commit']})" if run["commit"] else run["date"] for run in ordered})
        tens = [run["last_ten"] for run in ordered]
        return Measured(
            Figure.of([run["best"] for run in ordered]),
            Figure.of([run["last"] for run in ordered]),
            None if None in tens else Figure.of(tens),
            ", ".join(str(run["best_round"]) for run in ordered),
            tuple(sorted(map(int, runs))),
            min(run["rounds"] for run in ordered),
            f"{sum(seconds) / len(seconds):,.0f}" if seconds else "",
            ", ".join(made),
        )
    if before is None:
        return None
    return Measured(
        Figure.parse(before["best"]),
        Figure.parse(before["last"]) if "last" in before else None,
        Figure.parse(before["last_ten"]) if "last_ten" in before else None,
        str(before.get("round", "")),
        tuple(before["seeds"]),
        rounds_before,
        str(before.get("seconds", "")),
        "earlier",
    )


def _run_of(before: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return a single run that was measured before this page was made, as it is stored."""
    seconds = before.get("seconds")
    return {
        "best": float(before["best"]),
        "last": float(before["last"]),
        "last_ten": None,
        "best_round": before.get("round", ""),
        "rounds": rounds,
        "seconds": None if seconds is None else float(str(seconds).replace(",", "")),
        "date": "earlier",
        "commit": "",
    }


def read() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the papers say, and what runs gave."""
    published = yaml.load(PUBLISHED.read_text(), Loader=_Loader)
    return published, json.loads(MEASURED.read_text()) if MEASURED.is_file() else {}


def page(published: dict[str, Any], stored: dict[str, Any]) -> str:
    """Return the page.

    Raises:
        SystemExit: If a figure has neither a measurement nor a reason, or one that is off has neither a cause nor a
            list of what was varied; if what was measured is of no published figure; if a recipe is in no list.
    """
    if wrong := unplaced(published):
        refuse("; ".join(wrong))
    lines: list[str] = []
    counts: dict[str, int] = {}
    used: set[str] = set()
    for paper in published["papers"]:
        lines += ["", f"## {paper['name']}", "", paper["about"].strip()]
        earlier = {str(key): value for key, value in (paper.get("earlier") or {}).items()}
        used_here: set[str] = set()
        for table in paper["tables"]:
            reported = table.get("reported", paper["reported"])
            notes: list[str] = []
            rows: list[str] = []
            left_out: dict[str, list[Cell]] = {}
            for cell in cells_of(paper, table):
                found = None if cell.key is None else measured_of(cell.key, stored, earlier)
                where = f"{paper['name']}, {table['name']}, {cell.row}, {cell.column}"
                if found is None:
                    if not cell.not_run:
                        refuse(f"{where}: nothing was measured, and `not_run` gives no reason.")
                    left_out.setdefault(cell.not_run, []).append(cell)
                    counts["not run"] = counts.get("not run", 0) + 1
                    continue
                assert cell.key is not None
                used_here.add(str(cell.key))
                ours = found.compared(reported)
                if ours is None:
                    refuse(f"{where}: {cell.key} has no last value, which the paper reports.")
                full = cell.key.said("trainer", "max_epochs")
                if found.rounds < full:
                    verdict = kind = f"shortened: {found.rounds} of {full} rounds"
                    kind = "shortened"
                else:
                    verdict = kind = judge(cell.figure, ours)
                    if verdict.startswith("off"):
                        kind = "off"
                        verdict += f" ({_note(notes, cell, where)})"
                    if ours is found.last_ten:
                        verdict += ", by the mean of the last ten rounds"
                    if len(found.seeds) == 1:
                        verdict += ", one seed"
                counts[kind] = counts.get(kind, 0) + 1
                texts = (
                    " / ".join(part for part in (cell.row, cell.column) if part),
                    str(cell.key).replace(f"{paper['folder']}/", "", 1),
                    f"{_published(cell.figure)}",
                    str(ours),
                    f"{ours.value - cell.figure.value:+.2f}",
                    f"{found.best} ({found.at})" if found.at else str(found.best),
                    *("" if each is None else str(each) for each in (found.last, found.last_ten)),
                    " ".join(map(str, found.seeds)),
                    found.seconds,
                    found.made,
                    verdict,
                )
                rows.append(f"| {' | '.join(texts)} |")
            lines += ["", f"### {table['name']}"]
            if "about" in table:
                lines += ["", table["about"].strip()]
            if rows:
                lines += [
                    "",
                    f"| figure | run | paper | ours, {reported} | difference | best (round) | last | last ten | seeds"
                    " | s a run | measured | verdict |",
                    "|---|---|---:|---:|---:|---:|---:|---:|---|---:|---|---|",
                    *rows,
                ]
            if notes:
                lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))]
            for reason, missing in left_out.items():
                lines += ["", f"Not run: {reason}", "", *_grid(missing)]
        unknown = set(earlier) - used_here - set(stored)
        if unknown:
            refuse(f"{paper['name']}: `earlier` has {sorted(unknown)}, which run no published figure.")
        used |= used_here
    if unused := set(stored) - used:
        refuse(f"{MEASURED.name} has {sorted(unused)}, which run no published figure.")
    others = [
        f"- {entry['reason']} {', '.join(f'`{name}`' for name in _named(entry))}" for entry in published["unpublished"]
    ]
    total = ", ".join(
        f"{counts[kind]} {kind}" for kind in ("within spread", "near", "off", "shortened", "not run") if kind in counts
    )
    head = _HEAD.format(total=total, figures=sum(counts.values()), near=NEAR)
    return "\n".join([head.strip(), *lines, "", "## Recipes of no published figure", "", *others, ""])


def _named(entry: dict[str, Any]) -> list[str]:
    """Return what an entry of ``unpublished`` names: recipes, and folders, which end in a slash."""
    return [*entry.get("recipes", []), *(f"{folder}/" for folder in entry.get("folders", []))]


def unplaced(published: dict[str, Any]) -> list[str]:
    """Return what is wrong with the list of recipes: those that are in no list, in both, or not there."""
    run = {name for cell in cells(published) if cell.key is not None for name in cell.key.recipes}
    there = {str(file.relative_to(HERE).with_suffix("")) for file in HERE.rglob("*.yaml")} - {PUBLISHED.stem}
    others = [name for entry in published["unpublished"] for name in _named(entry)]
    told = [
        name for name in there for other in others if name == other or (other.endswith("/") and name.startswith(other))
    ]
    wrong = [f"{name} runs no published figure and is not said to be unpublished" for name in there - run - set(told)]
    wrong += [f"{name} runs a published figure and is said to be unpublished" for name in run & set(told)]
    wrong += [f"{name} is said to be unpublished more than once" for name in set(told) if told.count(name) > 1]
    missing = [other for other in others if not any(name == other or name.startswith(other) for name in there)]
    return sorted(wrong + [f"{name} is not there" for name in [*missing, *(run - there)]])


def _note(notes: list[str], cell: Cell, where: str) -> str:
    """Return the number of the note that says why a figure is off."""
    if not cell.why and not cell.varied:
        refuse(f"{where} is off: give `why`, or `varied` with the list of what was varied.")
    said = [cell.why.strip()] if cell.why else ["Not found out."]
    if cell.varied:
        said.append(f"Varied: {'; '.join(cell.varied)}.")
    note = " ".join(said)
    if note not in notes:
        notes.append(note)
    return f"{notes.index(note) + 1}"


def _published(figure: Figure) -> str:
    decimals = max(0, len(f"{figure.digit:.6f}".rstrip("0").partition(".")[2]))
    spread = "" if figure.spread is None else f" ± {figure.spread:.{decimals}f}"
    return f"{figure.value:.{decimals}f}{spread}"


def _grid(missing: Sequence[Cell]) -> list[str]:
    """Lay out figures that are not run as the paper does, with what would run each row."""
    there = {cell.column for cell in missing}
    columns = [column["name"] for column in missing[0].table["columns"] if column["name"] in there]
    rows: dict[str, dict[str, Cell]] = {}
    for cell in missing:
        rows.setdefault(cell.row, {})[cell.column] = cell
    lines = [f"| paper | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for name, found in rows.items():
        texts = [_published(found[column].figure) if column in found else "" for column in columns]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return lines


_HEAD = """
# Published figures, and ours

Made by `python recipes/results.py` from `RESULTS.yaml`, which holds what the papers say, and `RESULTS.json`, which
holds what runs gave; `python recipes/results.py --check` says whether it still is. Do not edit it by hand. Each paper's
own `RESULTS.md` says more about causes.

{figures} figures: {total}.

All figures are accuracies in percent: mean ± sample standard deviation over seeds. Verdicts:

- **within spread**: the difference is at most the larger of the two standard deviations. Ours counts for at most
  {near:g} point. Where neither is known, it is half of the last published digit.
- **near**: at most {near:g} point off.
- **off**: more than that. The number in brackets is that of the note below the table: why, or what was varied.
- **shortened**: fewer rounds than the recipe's; no verdict.
- **one seed**: there is no spread of ours to judge by.
- **not run**: below each table, with the reason.

`best` is over the rounds that were looked at, on the test images, as the papers do it; `last ten` is the mean of the
last ten looks. `s a run` is the wall time of a fit beside whatever else the machine did, and no more than an order of
size. `measured` has the date and the commit of the code that ran. The folders of runs up to 76b03c7 do not say it;
theirs is the last commit of the checkout before they ended, or noted by hand. `earlier` stands for runs whose folders
are gone: the paper's own `RESULTS.md` has their commands.

One row again, all its seeds, and the page:

```bash
python recipes/results.py --rerun 'fedslop/mnist+rank_64' --seeds 0 1 2 --data ../shared/data
```

The word after `--rerun` is the folder, a slash, and what the column `run` says; `*` stands for anything. With
`--commands` it prints the commands and runs nothing: `--rerun 'fedmud/*' --commands` has those of the figures that were
not run, too. Runs made by hand are taken from their folders by `--runs runs/fedslop`, if their configuration is the
recipe's; those of fewer rounds with `--shortened` besides.
"""


@cache
def printed_config(key: Key) -> str:
    """Return the whole configuration of a key, defaults included, as YAML."""
    from lightning_lowrank.cli.parser import CLI_SETTINGS, LowRankCLI

    printed = io.StringIO()
    words = [str(HERE.parent / word) if word.startswith("recipes/") else word for word in key.words]
    # LightningCLI warns of words on the command line beside those that it is given.
    with (
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
        unittest.mock.patch.object(sys, "argv", sys.argv[:1]),
    ):
        LowRankCLI(**CLI_SETTINGS, args=["fit", *words, "--print_config"])
    return printed.getvalue() or refuse(f"the recipes of {key} cannot be read.")


@cache
def _settings(key: Key) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(printed_config(key))
        return dict(Run(Path(folder)).settings)


def differences(run: Run, key: Key, shortened: bool = False) -> list[str]:
    """Return in what a run's configuration differs from a key's, as far as that changes results.

    A shortened run may have fewer rounds, and one that went on from another has its checkpoint.
    """
    wanted, got = _settings(key), run.settings
    free = (*_FREE, "ckpt_path") if run.continues else _FREE
    if shortened and int(got.get(_ROUNDS) or 0) < int(wanted[_ROUNDS]):
        free += (_ROUNDS,)
    paths = sorted(path for path in wanted.keys() | got.keys() if not path.startswith(free))
    # An argument that only one of the two versions has counts if it is set to something.
    known = [path for path in paths if (path in wanted and path in got) or wanted.get(path) or got.get(path)]
    return [
        f"{path}: {got.get(path)!r} in place of {wanted.get(path)!r}"
        for path in known
        if str(got.get(path)) != str(wanted.get(path))
    ]


def take(
    folders: Sequence[Path], published: dict[str, Any], stored: dict[str, Any], shortened: bool = False
) -> list[str]:
    """Put what runs gave into ``stored``, and return a line for each run.

    All stored runs of a key have the same number of rounds: longer runs take the place of shorter ones. A run that went
    on from a checkpoint is put together with the one before it, which must be in the folders too.
    """
    metrics = {
        cell.key: cell.table.get("metric", cell.paper["metric"]) for cell in cells(published) if cell.key is not None
    }
    said, pieces = [], dict[tuple[Key, Any], list[Run]]()
    for run in sorted(find_runs(folders), key=lambda run: (run.folder / "metrics.csv").stat().st_mtime):
        key, found = _nearest(run, list(metrics), shortened)
        if found:
            said.append(f"left out {run.folder}: it runs no published figure; nearest is {key}: {'; '.join(found[:3])}")
            continue
        seed = run.config["seed_everything"]
        before = pieces.setdefault((key, seed), [])
        if run.first_round is not None and run.continues:
            made = run.first_round - 1
            earlier = next((piece for piece in reversed(before) if piece.count >= made), None)
            if earlier is None:
                said.append(f"left out {run.folder}: the run whose first {made} rounds it went on from is not there")
                continue
            run = run.after(earlier.first(made))
        before.append(run)
        points = run.series(metrics[key])
        rounds = run.count
        full = key.said("trainer", "max_epochs")
        if not points or (rounds < full and not shortened):
            said.append(f"left out {run.folder}: {rounds} of {full} rounds of {key}")
            continue
        runs = stored.setdefault(str(key), {})
        longest = max((each["rounds"] for each in runs.values()), default=0)
        if rounds < longest:
            said.append(f"left out {run.folder}: {rounds} rounds of {key}, of which there are runs of {longest}")
            continue
        for other in [other for other, each in runs.items() if each["rounds"] < rounds]:
            del runs[other]
        best_round, best = max(points, key=lambda point: point[1])
        ended = (run.folder / "metrics.csv").stat().st_mtime
        runs[str(seed)] = {
            "best": round(100 * best, 4),
            "best_round": best_round,
            "last": round(100 * points[-1][1], 4),
            "last_ten": round(100 * sum(value for _, value in points[-10:]) / len(points[-10:]), 4),
            "rounds": rounds,
            "seconds": run.seconds,
            "date": datetime.fromtimestamp(ended, timezone.utc).date().isoformat(),
            "commit": _short_commit(run.software.get("commit", "unknown")),
        }
        said.append(f"took {run.folder}: {key}, seed {seed}")
    return said


def _short_commit(commit: str) -> str:
    return re.sub(r"^([0-9a-f]{7})[0-9a-f]+", r"\1", commit)


def _nearest(run: Run, keys: Sequence[Key], shortened: bool) -> tuple[Key, list[str]]:
    """Return the key that a run differs from least, and in what."""
    nearest: list[tuple[Key, list[str]]] = []
    for key in _likely(run, keys):
        nearest.append((key, differences(run, key, shortened)))
        if not nearest[-1][1]:
            break
    return min(nearest, key=lambda each: len(each[1]))


def _likely(run: Run, keys: Sequence[Key]) -> list[Key]:
    """Return the keys whose recipes contradict a run least, of those with as few the most particular ones.

    The parser takes a second for each key that it reads.
    """
    got = {_place(path): _short(value) for path, value in run.settings.items()}

    def contradictions(key: Key) -> tuple[int, int]:
        said: dict[str, Any] = {}
        for name in key.recipes:
            said.update(_leaves(recipe(name), ""))
        said.update({_place(path): value for path, value in key.options})
        said = {path: value for path, value in said.items() if not path.startswith(("trainer.logger", "data.root"))}
        return sum(got.get(path) != _short(value) for path, value in said.items()), -len(said)

    return sorted(keys, key=contradictions)[:_MOST_KEYS]


def _leaves(content: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for key, part in content.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    elif not isinstance(content, list):
        yield _place(path), content


def _place(path: str) -> str:
    """Return an argument's path as a command line has it."""
    return ".".join(part for part in path.split(".") if part not in ("init_args", "class_path"))


def _short(value: object) -> str:
    """Return a value as a text, a class by its name alone and equal numbers by the same one."""
    text = str(value)
    with contextlib.suppress(ValueError):
        return str(float(text))
    return text.rpartition(".")[2] if re.fullmatch(r"[a-z_]\w*(\.\w+)*\.[A-Z]\w*", text) else text


def rerun(patterns: Sequence[str], published: dict[str, Any], arguments: argparse.Namespace) -> list[Path]:
    """Run what the patterns name, each with all seeds, and return the folders; with ``commands`` only print them."""
    keys = list(dict.fromkeys(cell.key for cell in cells(published) if cell.key is not None))
    folders = []
    for pattern in patterns:
        chosen = [key for key in keys if fnmatch.fnmatchcase(str(key), pattern)]
        if not chosen:
            refuse(f"--rerun {pattern} names no run; there are such as {keys[0]}.")
        for key in chosen:
            folder = arguments.into / re.sub(r"[^\w.+/-]+", "_", str(key))
            words = ["fit", *key.words, "--seeds", *map(str, arguments.seeds)]
            words += ["--trainer.logger.init_args.save_dir", str(folder.parent)]
            words += ["--trainer.logger.init_args.name", folder.name]
            words += ["--data.root", str(arguments.data)] if arguments.data else []
            print("lightning-lowrank", *words, flush=True)
            if not arguments.commands:
                program = "from lightning_lowrank.cli import main; main()"
                subprocess.run([sys.executable, "-c", program, *words], check=True, cwd=HERE.parent)
                folders.append(HERE.parent / folder)
    return folders


def main(words: Sequence[str] | None = None) -> int:
    """Take figures from run folders, and write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="FOLDER", help="take figures from them")
    parser.add_argument("--rerun", nargs="+", default=[], metavar="RUN", help="make these runs and take their figures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of --rerun")
    parser.add_argument("--data", type=Path, help="folder of the data sets of --rerun; by default what the recipe says")
    parser.add_argument("--into", type=Path, default=Path("runs/results"), help="folder of the runs of --rerun")
    parser.add_argument(
        "--shortened", action="store_true", help="take runs of fewer rounds than the recipe's too: they get no verdict"
    )
    parser.add_argument("--commands", action="store_true", help="print the commands of --rerun, and run nothing")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is not what the data give"
    )
    arguments = parser.parse_args(words)
    published, stored = read()
    if arguments.check:
        if page(published, stored) != PAGE.read_text():
            refuse(f"{PAGE.name} is not what {PUBLISHED.name} and {MEASURED.name} give: run python recipes/results.py")
        return 0
    folders = [*arguments.runs, *rerun(arguments.rerun, published, arguments)]
    if arguments.commands:
        return 0
    if folders:
        for line in take(folders, published, stored, arguments.shortened):
            print(line)
        MEASURED.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")
    PAGE.write_text(page(published, stored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
