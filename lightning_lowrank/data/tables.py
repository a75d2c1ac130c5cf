"""Tables of named columns: from files, from Hugging Face `datasets`, or from lists of dictionaries.

The datamodules of texts read their splits as a `Table` and store it with the tokens, so that `ByKey` finds clients in
any of its columns.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.arguments import join_names
from lightning_lowrank.extras import import_extra
from lightning_lowrank.federated.data.plain_files import csv_rows
from lightning_lowrank.federated.data.rows import Rows


class Table:
    """Columns of equal length, and the origin of each row.

    Args:
        columns: The columns by name.
        source: The rows' source, for messages.
        first_line: Line number of the first row in the file; ``None``: rows are counted from 0.
        classes: Names of the classes in the order of their numbers, by column, if the source says them.
        rows: The rows of the source that these are. ``None``: all of them.

    Example:
        >>> table = Table({"text": ["good", "bad"], "speaker": ["ada", "ben"]}, "train.tsv", first_line=2)
        >>> len(table), table["speaker"], table.place(1)
        (2, ['ada', 'ben'], 'train.tsv, line 3')
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any]],
        source: str,
        first_line: int | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
        rows: Rows | None = None,
    ) -> None:
        self._columns = dict(columns)
        self.source = source
        self.first_line = first_line
        self.classes = dict(classes or {})
        self.rows = Rows.all(len(self)) if rows is None else rows

    @property
    def column_names(self) -> list[str]:
        """The columns' names."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __getitem__(self, name: str) -> Sequence[Any]:
        return self._columns[name]

    def place(self, row: int) -> str:
        """Where a row came from, for error messages."""
        number = int(self.rows.numbers[row]) if row < len(self.rows.numbers) else row
        if self.first_line is None:
            return f"{self.source}, row {number}"
        return f"{self.source}, line {self.first_line + number}"

    def find(self, names: Sequence[str], argument: str) -> str:
        """The first of these names that a column has.

        Raises:
            MisconfigurationException: If there is none; ``argument`` is the argument that names the column.
        """
        found = next((name for name in names if name in self._columns), None)
        if found is None:
            raise MisconfigurationException(
                f"{self.source} has no column {' or '.join(map(repr, names))} ({argument});"
                f" it has {join_names(self.column_names)}"
            )
        return found

    def select(self, rows: Sequence[int]) -> Table:
        """A table of the rows at ``rows``."""
        columns = {name: [column[row] for row in rows] for name, column in self._columns.items()}
        return Table(columns, self.source, self.first_line, self.classes, self.rows.select(list(rows)))


class HasColumns:
    """Mixin for datasets with further columns, from a `Table` or a `datasets.Dataset`."""

    columns: Any = None
    """Further columns of the samples, if any, with one row per sample."""

    rows: Rows | None = None
    """The rows of the file or split that the samples come from, if that is known."""

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return [] if self.columns is None else self.columns.column_names

    def column(self, name: str) -> Sequence[Any]:
        """A column by name.

        Raises:
            KeyError: If there is none of this name.
        """
        if name not in self.column_names:
            raise KeyError(f"there is no column {name!r}, only {self.column_names}")
        return self.columns[name]


def find_file(root: str, name: str) -> Path:
    """The path of a file in a folder.

    Raises:
        MisconfigurationException: If there is no such folder or file.
    """
    path = Path(root, name)
    if not path.parent.is_dir():
        raise MisconfigurationException(f"root={root!r}: there is no folder {path.parent}")
    if not path.is_file():
        present = ", ".join(sorted(file.name for file in path.parent.iterdir())[:10]) or "nothing"
        raise MisconfigurationException(f"there is no file {path}; {path.parent} holds {present}")
    return path


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise MisconfigurationException(f"there is no file {path} (in {Path.cwd()})") from None
    except UnicodeDecodeError as error:
        raise MisconfigurationException(f"{path} is not UTF-8: {error}") from error


def read_table(path: Path, names: Sequence[str] | None = None) -> Table:
    r"""Read a table: ``.jsonl`` or ``.ndjson``, ``.json`` (a list of objects), ``.csv``, or tab-separated columns.

    Quotes are special only in ``.csv`` files, because they are plain text in GLUE's tab-separated files. Empty lines of
    ``.csv`` files are skipped.

    Args:
        path: The file, in UTF-8.
        names: The columns' names if the first line does not say them; not for JSON.

    Raises:
        MisconfigurationException: If a line is malformed; it is named.
    """
    text, suffix = read_text(path), path.suffix.lower()
    if suffix == ".json":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MisconfigurationException(f"{path} is no valid JSON: {error}") from error
        if not isinstance(rows, list):
            raise MisconfigurationException(f"{path} must hold a list of objects, got {type(rows).__name__}")
        return table_of(rows, str(path))
    lines = text.removesuffix("\n").split("\n")
    if suffix in (".jsonl", ".ndjson"):
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise MisconfigurationException(f"{path}, line {number}: no valid JSON: {error}") from error
        return table_of(rows, str(path), first_line=1)
    if suffix == ".csv":
        try:
            cells = csv_rows(io.StringIO(text, newline=""))
        except csv.Error as error:
            raise MisconfigurationException(f"{path} is no valid CSV: {error}") from error
        # A quoted cell may contain line breaks, so row numbers differ from line numbers.
        first_line = None
    else:
        cells, first_line = [line.rstrip("\r").split("\t") for line in lines], 1
    if names is None:
        names, cells = cells[0] if cells else [], cells[1:]
        first_line = None if first_line is None else 2
    if not cells:
        raise MisconfigurationException(f"{path} has no line after its header, {join_names(names)}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MisconfigurationException(f"{path} has several columns named {join_names(twice)}: rename all but one")
    for row, parts in enumerate(cells):
        if len(parts) != len(names):
            place = Table({}, str(path), first_line).place(row)
            raise MisconfigurationException(
                f"{place}: there are {len(parts)} cells for the {len(names)} columns {join_names(names)}"
            )
    return Table({name: [parts[place] for parts in cells] for place, name in enumerate(names)}, str(path), first_line)


def table_of(rows: Any, source: str, first_line: int | None = None) -> Table:
    """The table of a `datasets.Dataset` or of a list of dictionaries.

    Columns of a list are those of the first row; a row that lacks one has ``None``. A ``ClassLabel`` column holds the
    names of its classes, and -1 if a label is kept back.

    Raises:
        MisconfigurationException: If it is neither, there are no rows, or ``check_stored`` refuses them.
    """
    if isinstance(rows, Table):
        return rows
    if hasattr(rows, "with_format"):
        check_stored(rows, source)
        names, stored = rows.column_names, rows.with_format(None)
        kinds = getattr(rows, "features", None) or {}
        classes = {name: list(kinds[name].names) for name in names if hasattr(kinds.get(name), "int2str")}
        columns = {name: _named(stored[name][:], classes.get(name)) for name in names}
        return Table(columns, source, classes=classes)
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
        raise MisconfigurationException(
            f"{source} must be a datasets.Dataset or a list of dictionaries, got {type(rows).__name__}"
        )
    if not rows:
        raise MisconfigurationException(f"{source} has no rows")
    other = next((row for row, entry in enumerate(rows) if not isinstance(entry, Mapping)), None)
    if other is not None:
        place = Table({}, source, first_line).place(other)
        raise MisconfigurationException(f"{place}: must be a dictionary, got {type(rows[other]).__name__}")
    return Table({name: [row.get(name) for row in rows] for name in rows[0]}, source, first_line)


def check_stored(rows: Any, source: str) -> None:
    """Raise unless ``rows`` is a `datasets.Dataset` in memory, without a transform and with at least one row.

    Raises:
        MisconfigurationException: If it is refused.
    """
    if not (isinstance(getattr(rows, "column_names", None), list) and hasattr(rows, "__len__")):
        raise MisconfigurationException(
            f"{source} must be a datasets.Dataset, got {type(rows).__name__}: load it without streaming, or make one"
            " with datasets.Dataset.from_list or from_dict"
        )
    if rows.format["type"] == "custom":
        raise MisconfigurationException(
            f"{source} has a transform, which would not be applied: dataset.map(function) applies one once, and"
            " dataset.with_format(None) has none"
        )
    if not len(rows):
        raise MisconfigurationException(f"{source} has no rows")


def _named(values: Sequence[Any], classes: Sequence[str] | None) -> Sequence[Any]:
    if classes is None:
        return values
    return [value if value is None or value < 0 else classes[value] for value in values]


def load_splits(dataset: Any, root: str | None, user: str) -> Mapping[str, Any]:
    """The splits of a data set by name.

    Args:
        dataset: Name of a data set on the Hugging Face hub, or a local folder of files or of ``save_to_disk``; a list
            of the name and its configuration; or the splits themselves: a `datasets.DatasetDict` or another dictionary.
            A single `datasets.Dataset` is the split ``train``.
        root: Folder in which downloads are kept; ``None``: that of `datasets`.
        user: The class or argument that needs the data, for messages.

    Raises:
        MisconfigurationException: If it cannot be loaded, or `datasets` is not installed.
    """
    if isinstance(dataset, Mapping):
        return dataset
    if isinstance(getattr(dataset, "column_names", None), list):
        return {"train": dataset}
    names = [dataset] if isinstance(dataset, str) else dataset
    if not (isinstance(names, Iterable) and all(isinstance(name, str) for name in names)):
        raise MisconfigurationException(
            "dataset must be a name, a list of a name and its configuration, or a dictionary of splits, got"
            f" {type(dataset).__name__}"
        )
    library, names = import_extra("datasets", user), list(names)
    try:
        if len(names) > 1 or not any(Path(names[0], mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            return library.load_dataset(*names, cache_dir=root)
        found = library.load_from_disk(names[0])
        return found if isinstance(found, Mapping) else {"train": found}
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        raise MisconfigurationException(
            f"dataset={dataset!r} cannot be loaded: give a name on the Hugging Face hub, a local folder, or the splits"
            f" themselves. {error}"
        ) from error


def split_of(splits: Mapping[str, Any], name: str, argument: str) -> Any:
    """A split of a dataset, by name.

    Raises:
        MisconfigurationException: If there is none; ``argument`` is the argument that names it.
    """
    if name not in splits:
        raise MisconfigurationException(
            f"dataset has no split {name!r} ({argument}); it has {join_names(list(splits))}"
        )
    return splits[name]
