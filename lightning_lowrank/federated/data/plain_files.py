"""Plain values from files: numbers, strings, arrays, and containers of such values.

Partitions, data modules and traces of devices read other projects' files by `read_plain` and `read_columns`. No code of
a file is run.
"""

from __future__ import annotations

import ast
import codecs
import collections
import csv
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.federated.data.columns import refuse_empty

__all__ = ["csv_rows", "owners_in_file", "read_columns", "read_plain"]

_CLIENT_COLUMNS, _INDEX_COLUMNS = ("client", "client_id", "user", "user_id"), ("index", "sample")


def read_plain(path: Path, argument: str) -> Any:
    """Read a file of plain values; the suffix, in capitals or not, decides the format.

    ``.json``; ``.npy`` and ``.npz``, a dictionary of the latter's arrays; ``.pt`` of `torch.save`, with tensors and
    NumPy arrays; ``.txt`` with a Python literal, as FedML and NIID-Bench write divisions; and pickles, ``.pkl``,
    ``.pickle`` and files without a suffix, as PFLlib, FedLab and FedScale write them: with plain values and NumPy
    arrays alone.

    Args:
        path: The file.
        argument: Name of the argument that names it, for messages.

    Raises:
        MisconfigurationException: If there is no such file, it has another suffix, is damaged or nested too deeply, or
            holds objects other than plain values.
    """
    if not path.is_file():
        raise MisconfigurationException(f"{argument} names the file {str(path)!r}, which does not exist.")
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise MisconfigurationException(
            f"{argument} names {str(path)!r}: {', '.join(filter(None, _READERS))}, .csv and pickles without a suffix"
            " can be read."
        )
    kind, read = _READERS[suffix]
    try:
        return read(path)
    except Exception as error:  # a damaged file fails in any way
        # Replaced, because torch's message explains how to run the file's code.
        reason = "it is cut, or holds more than tensors, arrays and plain values" if suffix == ".pt" else error
        raise MisconfigurationException(f"{argument} names {str(path)!r}, which is no {kind}: {reason}.") from error


def csv_rows(lines: Iterable[str]) -> list[list[str]]:
    """The cells of each row of a CSV file, without empty rows; a cell may be of any length.

    Args:
        lines: The file's lines, with their ends.

    Raises:
        csv.Error: If a row of several lines has a quote that is not closed, or text after a closing quote. Such a row
            usually begins with a quote too many, and contains the rows below.
    """
    # With a further line a quote that is open in the last line makes a row of several lines too.
    lines = [*lines, "\n"]
    limit = csv.field_size_limit(max(sum(map(len, lines)), 1))
    try:
        reader, rows, start = csv.reader(lines), [], 0
        for row in reader:
            if reader.line_num > start + 1:
                try:
                    list(csv.reader(lines[start : reader.line_num], strict=True))
                except csv.Error as error:
                    raise csv.Error(
                        f"the row of line {start + 1} has a quote that is not closed, or text after a closing quote"
                        f" ({error}); a quote inside of a quoted cell is written twice"
                    ) from error
            start = reader.line_num
            if row:
                rows.append(row)
        return rows
    finally:
        csv.field_size_limit(limit)


def read_columns(path: Path, argument: str) -> dict[str, list[str]]:
    """The columns of a CSV file, by the names in its first line.

    Raises:
        MisconfigurationException: If it cannot be read, or a line has another number of cells.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv_rows(file)
            # FedLab's reports begin with a line that holds a title.
            rows = rows[len(rows[0]) == 1 < len(rows[1]) :] if len(rows) > 1 else rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MisconfigurationException(
            f"{argument}={str(path)!r} is no CSV file that can be read: {error}."
        ) from error
    header = rows[0] if rows else []
    other = next((number for number, row in enumerate(rows) if len(row) != len(header)), None)
    if other is not None:
        raise MisconfigurationException(
            f"{argument}={str(path)!r}: row {other} has {len(rows[other])} cells, and the first line names"
            f" {len(header)} columns."
        )
    cells = zip(*rows[1:], strict=True) if rows[1:] else ((),) * len(header)
    return {name: list(column) for name, column in zip(header, cells, strict=True)}


def owners_in_file(
    path: Path, argument: str, client: str | None, index: str | None
) -> tuple[list[str], np.ndarray | None]:
    """Read each sample's client from a CSV file.

    Args:
        path: The file.
        argument: Name of the argument that names it, for messages.
        client: Name of its column of clients; ``None``: the first of some common names.
        index: Name of its column of the samples' indices; ``None``: one of a common name, if any.

    Returns:
        The client of each line; and the index of its sample, or ``None`` if lines are those of the samples in their
        order.

    Raises:
        MisconfigurationException: If it cannot be read, lacks a column, or a line has no client or no integer index.
    """
    columns = read_columns(path, argument)
    owners = client or next((name for name in _CLIENT_COLUMNS if name in columns), None)
    places = index or next((name for name in _INDEX_COLUMNS if name in columns), None)
    for what, name in (("client", owners), *((("index", places),) if places else ())):
        if name not in columns:
            raise MisconfigurationException(
                f"{argument}={str(path)!r} has no column {name or list(_CLIENT_COLUMNS)!r}: give {what}=, one of"
                f" {list(columns)}."
            )
    assert owners is not None
    refuse_empty(columns[owners], f"{argument}={str(path)!r}, column {owners!r},")
    if places is None:
        return columns[owners], None
    try:
        return columns[owners], np.array([int(value) for value in columns[places]], np.int64)
    except ValueError as error:
        raise MisconfigurationException(
            f"{argument}={str(path)!r}: its column {places!r} must hold integers: {error}."
        ) from error


class _Unpickler(pickle.Unpickler):
    """An unpickler that admits only NumPy arrays and Python's built-in containers."""

    def find_class(self, module: str, name: str) -> Any:
        found = _ADMITTED.get((module.replace("numpy._core", "numpy.core"), name))
        if found is None:
            raise pickle.UnpicklingError(
                f"it holds {module}.{name}, and of a pickle only numbers, texts, NumPy arrays, lists, dictionaries and"
                " sets are read, because anything else may run code: save these alone"
            )
        return found

    def persistent_load(self, key: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def _unpickled(file: BinaryIO) -> Any:
    return _Unpickler(file).load()


class _Type:
    """A safe ``numpy.dtype`` for pickles: NumPy's own ``__setstate__`` may crash on manipulated sizes and flags."""

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"[?bBhHiIlLqQefdFDgGU]|[biufcSU]\d{1,5}|O8?", code):
            raise pickle.UnpicklingError(f"it holds an array of type {code!r}, and not of numbers or texts")
        self.dtype: np.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(np.ndarray):
    """An array whose pickled type is a `_Type`."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, kind, is_fortran, data = state
        super().__setstate__((version, shape, _dtype_of(kind), is_fortran, data))


def _dtype_of(kind: Any) -> np.dtype:
    if not isinstance(kind, _Type):
        raise pickle.UnpicklingError(f"it holds an array of a type that is {kind!r}")
    return kind.dtype


def _array_of(buffer: Any, kind: Any, shape: tuple[int, ...], order: str) -> np.ndarray:
    # A copy, because the file may resize its bytearray afterwards.
    return np.frombuffer(bytes(memoryview(buffer)), _dtype_of(kind)).copy().reshape(shape, order=order)


def _scalar(kind: Any, data: Any = b"") -> Any:
    return np.frombuffer(data if isinstance(data, bytes) else data.encode("latin1"), _dtype_of(kind))[0]


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes by {encoding!r}")
    return codecs.encode(text, "latin1")


def _empty_array(*_: Any) -> _Array:
    return np.empty(0).view(_Array)


_PLAIN = {kind.__name__: kind for kind in (set, frozenset, list, dict, tuple, int, float, complex, bytearray)}
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.numeric", "_frombuffer"): _array_of,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encoded,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    **{(module, name): kind for module in ("builtins", "__builtin__") for name, kind in _PLAIN.items()},
}


def _read_pickle(path: Path) -> Any:
    return _unpickled(io.BytesIO(path.read_bytes()))


def _read_torch(path: Path) -> Any:
    arrays = [(_empty_array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    admitted: list[Any] = [*arrays, (_Array, "numpy.ndarray"), (_Type, "numpy.dtype"), (_encoded, "_codecs.encode")]
    with torch.serialization.safe_globals(admitted):
        return torch.load(path, map_location="cpu", weights_only=True)


def _read_npz(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        return {name.removesuffix(".npy"): _array(io.BytesIO(archive.read(name))) for name in names}


def _array(file: BinaryIO) -> Any:
    """Read an array in ``.npy`` format; for a pickled scalar object, return the object."""
    if np.lib.format.read_magic(file) == (1, 0) and np.lib.format.read_array_header_1_0(file)[2].hasobject:
        found = _unpickled(file)
        return found.item() if isinstance(found, np.ndarray) and not found.ndim else found
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


_READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    ".json": ("valid JSON", lambda path: json.loads(path.read_text(encoding="utf-8"))),
    ".npy": ("array of NumPy", lambda path: _array(io.BytesIO(path.read_bytes()))),
    ".npz": (".npz file", _read_npz),
    ".pt": ("file of torch.save", _read_torch),
    ".txt": ("literal of Python", lambda path: ast.literal_eval(path.read_text(encoding="utf-8").strip())),
    **dict.fromkeys((".pkl", ".pickle", ""), ("pickle of plain values", _read_pickle)),
}
