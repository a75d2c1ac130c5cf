"""A column of a dataset: one integer or string per sample, from its attributes, its samples, or a user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

Column: TypeAlias = np.ndarray
_MISSING = ("NAType", "NaTType")
"""Names of pandas' classes of missing values."""


class ClientColumn:
    """A column that holds each sample's client, as positions in a list of all clients' names.

    Unlike an array of names it keeps the clients' order, and clients without samples.

    Args:
        names: The clients' names, strings or integers.
        places: Place of each sample's client among ``names``: int64, shape ``[samples]``.

    Example:
        >>> column = ClientColumn(["west", "east", "north"], np.array([0, 2, 0]))
        >>> np.asarray(column).tolist(), len(column[[1, 2]])
        (['west', 'north', 'west'], 2)
    """

    def __init__(self, names: Sequence[str | int], places: np.ndarray) -> None:
        self.names = tuple(names)
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, samples: Any) -> ClientColumn:
        return ClientColumn(self.names, self.places[samples])

    def __iter__(self) -> Iterator[str | int]:
        return (self.names[place] for place in self.places.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.names)[self.places].astype(dtype or np.asarray(self.names).dtype)


def client_column(dataset: Any, name: str) -> ClientColumn | None:
    """The `ClientColumn` that is a dataset's attribute ``name``, also through `torch.utils.data.Subset`."""
    found = getattr(dataset, name, None)
    if isinstance(found, ClientColumn):
        return found
    if not isinstance(dataset, Subset):
        return None
    inner = client_column(dataset.dataset, name)
    return None if inner is None else inner[np.asarray(dataset.indices, np.int64)]


def find_column(
    dataset: Dataset,
    names: Sequence[str],
    columns: Sequence[str],
    pick: Callable[[Any], Any],
    what: str,
    advice: str,
    classes: bool = False,
) -> Column:
    """The first attribute with one entry per sample, else the first column, else the entries that ``pick`` reads.

    A dataset has columns if ``dataset.column_names`` lists them and ``dataset[name]`` returns one, as a
    `datasets.Dataset` does. Both are found through `torch.utils.data.Subset` and `torch.utils.data.ConcatDataset` as
    well, without loading a sample; of ``tensors`` the last is meant. For ``pick`` the dataset is read once, and the
    global random number generators are given back as they were.

    Args:
        dataset: A map-style dataset.
        names: Attributes to look for.
        columns: Columns to look for.
        pick: Returns a sample's entry.
        what: The name of the entries, for the progress bar.
        advice: Last part of error messages: what would work.
        classes: Whether a column of a ``ClassLabel`` of `datasets` is read as the names of its classes.
    """
    values = _stored_values(dataset, names, columns, advice, classes)
    if values is None:
        # A separate console: a console can have only one live display, such as the trainer's progress bar.
        console = Console(stderr=True)
        positions = track(range(length_of(dataset)), f"Reading {what}", console=console, transient=True)
        with isolate_rng(include_cuda=torch.cuda.is_initialized()):
            entries = [pick(dataset[position]) for position in positions]
        values = to_column(entries, "the dataset's samples", advice)
    return values


def call_on(dataset: Dataset, function: Callable[[Any], Any], name: str, advice: str) -> Column:
    """The result of a user's function of the dataset as a column; ``name`` is the argument that the user gave."""
    if getattr(type(dataset), "is_wrapper", False):
        # Pass the user's own dataset, not the wrapper around it.
        dataset = dataset.dataset  # type: ignore[attr-defined]
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):
        values = to_column(function(dataset), f"{name}(dataset)", advice)
    if len(values) != length_of(dataset):
        raise MisconfigurationException(
            f"{name}(dataset) returned {len(values)} entries for {length_of(dataset)} samples: return one for each."
        )
    return values


def refuse_missing(missing: Sequence[int], samples: int, source: str) -> None:
    """Raise if the entries of some samples are missing, given the samples' positions."""
    if missing:
        raise MisconfigurationException(
            f"{len(missing)} of {samples} entries of {source} are missing (None, NaN or empty), such as number"
            f" {missing[0]}: fill them in, for example with 'unknown', or leave these samples out by"
            " torch.utils.data.Subset."
        )


def refuse_empty(names: Sequence[str] | Column, source: str) -> None:
    """Raise if some names are empty or blank, as empty cells of a CSV file are read."""
    column = np.asarray(names)
    if column.dtype.kind == "U":
        refuse_missing(np.flatnonzero(np.char.strip(column) == "").tolist(), len(column), source)


def is_blank(entry: Any) -> bool:
    """Whether an entry is a text that is empty or only spaces, as an empty cell of a CSV file is read."""
    return isinstance(entry, (str, bytes)) and not entry.strip()


def is_missing(entry: Any) -> bool:
    """Whether an entry is ``None``, NaN, or the missing value of pandas."""
    return entry is None or (isinstance(entry, float) and entry != entry) or type(entry).__name__ in _MISSING


def to_column(values: Any, source: str, advice: str) -> Column:
    """Convert one integer or string per sample to a flat array."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        array = values.double().numpy() if values.is_floating_point() else values.numpy()
    elif isinstance(values, np.ndarray) and values.dtype != object:
        array = values
    else:
        entries = [entry.tolist() if isinstance(entry, Tensor) else entry for entry in values]
        refuse_missing([place for place, entry in enumerate(entries) if is_missing(entry)], len(entries), source)
        if len({isinstance(entry, str) for entry in entries}) > 1:
            raise MisconfigurationException(f"{source} mixes strings with other types: {advice}")
        try:
            array = np.asarray(entries)
        except ValueError as error:
            raise MisconfigurationException(f"{source} has entries of different lengths: {advice}") from error
    if array.ndim == 1 and array.dtype.kind == "f":
        refuse_missing(np.flatnonzero(np.isnan(array)).tolist(), len(array), source)
    if array.ndim != 1 or (array.dtype.kind not in "iubU" and len(array)):
        raise MisconfigurationException(f"{source} holds {array.dtype} of shape {list(array.shape)}: {advice}")
    return array


def length_of(dataset: Dataset) -> int:
    """The number of samples of a map-style dataset."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise MisconfigurationException(
            f"{type(dataset).__name__} has no length, so it cannot be divided among clients: give a map-style"
            " dataset (with __getitem__ and __len__)."
        ) from error


def describe(sample: Any) -> str:
    """The type of a sample in words, for an error message."""
    if isinstance(sample, Mapping):
        return f"dictionaries with {list(sample)}"
    if isinstance(sample, (tuple, list)):
        return f"{type(sample).__name__} of length {len(sample)}"
    return f"of type {type(sample).__name__}"


def _stored_values(
    dataset: Dataset, names: Sequence[str], columns: Sequence[str], advice: str, classes: bool
) -> Column | None:
    """The first attribute or column with one entry per sample; `Subset` and `ConcatDataset` are looked through."""
    for name in names:
        values = getattr(dataset, name, None)
        if name == "tensors" and isinstance(values, (tuple, list)) and values:
            values = values[-1]
        if _is_column(values, length_of(dataset)):
            return to_column(values, f"{type(dataset).__name__}.{name}", advice)
    column_names = getattr(dataset, "column_names", None)
    for name in columns:
        if isinstance(column_names, list) and name in column_names:
            # A datasets.Dataset's format applies to samples, and would change the column too.
            stored: Any = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
            column = to_column(stored[name][:], f"{type(dataset).__name__}[{name!r}]", advice)
            return _class_names(dataset, name, column) if classes else column
    if isinstance(dataset, Subset):
        values = _stored_values(dataset.dataset, names, columns, advice, classes)
        return None if values is None else values[[int(index) for index in dataset.indices]]
    if isinstance(dataset, ConcatDataset):
        parts = [_stored_values(part, names, columns, advice, classes) for part in dataset.datasets]
        found = [part for part in parts if part is not None]
        if len(found) == len(parts):
            # NumPy would turn integers into strings.
            if len({part.dtype.kind == "U" for part in found}) > 1:
                raise MisconfigurationException(f"the parts of a ConcatDataset mix strings and integers: {advice}")
            return np.concatenate(found)
    return None


def _class_names(dataset: Any, name: str, column: Column) -> Column:
    """Replace the numbers of a ``ClassLabel`` column by class names; return other columns unchanged."""
    features = getattr(dataset, "features", None) or getattr(getattr(dataset, "columns", None), "features", None)
    kind = features.get(name) if isinstance(features, Mapping) else None
    names = getattr(kind, "names", None)
    if not names or column.dtype.kind not in "iu" or not ((column >= 0) & (column < len(names))).all():
        return column
    return np.asarray(names)[column]


def _is_column(values: Any, size: int) -> bool:
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
        return False
    return getattr(values, "ndim", 1) > 0 and len(values) == size
