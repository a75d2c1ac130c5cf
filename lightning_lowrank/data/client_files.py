"""Readers of files of federated data: LEAF, PFLlib, TensorFlow Federated, a file or a folder for each client, tables.

Each is a `ClientDatasets` that finds the clients in its files.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.arguments import join_names
from lightning_lowrank.data.classes import check_class_names, is_number
from lightning_lowrank.data.client_datasets import ClientDatasets, Split, join_arrays
from lightning_lowrank.data.tables import Table, read_table
from lightning_lowrank.extras import import_extra
from lightning_lowrank.federated.data.columns import is_blank, is_missing, refuse_empty, to_column
from lightning_lowrank.federated.data.partitions import natural_sort_key
from lightning_lowrank.federated.data.plain_files import read_plain
from lightning_lowrank.federated.data.rows import Rows

__all__ = ["LEAF", "ClientFiles", "ClientTable", "FederatedHDF5"]

_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
_FILES = (".npz", *_TABLES)
_DIGITS = re.compile(r"[+-]?[\d_]+")
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")


class ClientArrays(ClientDatasets):
    """Base class of the readers: a subclass finds one client after another in ``clients``.

    Args:
        encode: A function that takes the list or array of a client's inputs and returns an array of numbers, such as
            one that turns texts into tokens. ``None``: they are numbers.
        shape: Shape that each input is given, such as ``[1, 28, 28]``. ``None``: that of the file.
        classes: Names of the classes in the order of their numbers, such as those of all sites, of which this one may
            lack some. Targets that are integers are the numbers themselves, unless one of these names is a number.
            ``None``: the strings among the targets to train on, sorted.
        **kwargs: Arguments of `ClientDatasets`: ``test_share``, ``validation``, ``batch_size``, ``eval_batch_size``,
            ``num_workers``, ``seed``, ``collate_fn``.

    Attributes:
        classes: Names of the classes in the order of their numbers, if they are given or the targets are strings.
        feature_names: Names of the columns of inputs in their order, once tables are read; ``None`` for other files.

    Raises:
        MisconfigurationException: If ``classes`` lists fewer than two names, or one twice. When files are read: if a
            client's inputs are no numbers, differ in shape from others', or are not as many as its targets; if a target
            is not one of ``classes``; or, without them, if there are targets to test on that nobody trains on.
    """

    def __init__(
        self,
        encode: Callable[[Any], Any] | None = None,
        shape: list[int] | None = None,
        classes: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__({"": None}, **kwargs)
        self.encode, self.shape = encode, shape
        self.classes = self._given_classes = check_class_names("classes", classes)
        self.feature_names: list[str] | None = None
        self._codes: dict[str, int] = {}
        self._numbered = False

    def clients(self, split: Split) -> Iterator[tuple[Any, Any, Any]] | None:
        """Iterator over the clients' names, inputs and targets; ``None`` if the split does not exist."""
        raise NotImplementedError(f"{type(self).__name__} must define clients")

    def names(self, split: Split) -> list[Any] | None:
        """All clients' names in order; ``None`` to keep the order of `clients`."""
        return None

    def read(self, split: Split) -> Any:
        """See `ClientDatasets.read`."""
        clients = self.clients(split)
        if clients is None:
            return None
        named = ((name, self._inputs(name, x), self._targets(name, y)) for name, x, y in clients)
        found = join_arrays(named, self.names(split))
        if self._codes:
            self.classes = self.classes or sorted(self._codes)
            other = sorted(set(self._codes) - set(self.classes))
            if other:
                raise MisconfigurationException(
                    f"{type(self).__name__}: the test data have targets that the training data lack:"
                    f" {join_names(other)}"
                )
            numbers = torch.tensor([self.classes.index(name) for name in self._codes])
            found.tensors = (found.tensors[0], numbers[found.tensors[1]])
        return found

    def _inputs(self, name: Any, inputs: Any) -> np.ndarray:
        try:
            array = np.asarray(inputs if self.encode is None else self.encode(inputs))
        except ValueError as error:
            raise MisconfigurationException(
                f"{type(self).__name__}: the inputs of client {name!r} differ in shape: give encode=, a function that"
                f" makes one array of a client's inputs ({error})"
            ) from error
        if array.dtype.kind not in "biufc":
            raise MisconfigurationException(
                f"{type(self).__name__}: the inputs of client {name!r} are no numbers but {array.dtype}, such as"
                f" {str(array.reshape(-1)[:1])[:50]}: give encode=, a function that makes numbers of a client's inputs"
            )
        if self.shape is None or not len(array):
            return array
        if array[0].size != math.prod(self.shape):
            raise MisconfigurationException(
                f"shape={self.shape} has {math.prod(self.shape)} numbers, but the inputs of client {name!r} have"
                f" the shape {list(array.shape[1:])}"
            )
        return array.reshape(len(array), *self.shape)

    def _targets(self, name: Any, targets: Any) -> np.ndarray:
        """A client's targets; strings are numbered as ``classes`` says, or in order of first appearance."""
        array = np.asarray(targets)
        strings = array.dtype.kind in "USO"
        if strings and any(is_blank(each) or is_missing(each) for each in array.reshape(-1).tolist()):
            raise MisconfigurationException(
                f"{type(self).__name__}: client {name!r} has targets that are empty, None or NaN: leave the samples out"
            )
        if self._given_classes is not None and len(array):
            return self._numbers_of_classes(name, array, self._given_classes)
        self._numbered = self._numbered or bool(len(array) and not strings)
        if self._numbered and (strings or self._codes) and len(array):
            raise MisconfigurationException(
                f"{type(self).__name__}: the targets of client {name!r} are {array.dtype}, such as"
                f" {str(array.reshape(-1)[0])[:50]!r}, and those of other clients are not: give only numbers, or only"
                " strings, or name all classes by classes="
            )
        if not strings:
            return array
        return np.array([self._codes.setdefault(text, len(self._codes)) for text in _texts(array)], np.int64)

    def _numbers_of_classes(self, name: Any, targets: np.ndarray, classes: list[str]) -> np.ndarray:
        """The numbers of a client's targets in the given classes."""
        if targets.dtype.kind in "fc":
            raise MisconfigurationException(
                f"classes={classes}: the targets of client {name!r} are {targets.dtype}, such as"
                f" {targets.reshape(-1)[0]}: give integers or strings, or leave out classes to predict numbers"
            )
        numbered = targets.dtype.kind in "iu" and not any(map(is_number, classes))
        number_of = {str(number) if numbered else each: number for number, each in enumerate(classes)}
        texts = _texts(targets)
        unknown = next((text for text in texts if text not in number_of), None)
        if unknown is not None:
            known = f"0 to {len(classes) - 1}, the numbers of classes={classes}" if numbered else f"classes={classes}"
            raise MisconfigurationException(
                f"{type(self).__name__}: client {name!r} has the target {unknown!r}, which is not in {known}"
            )
        return np.array([number_of[text] for text in texts], np.int64).reshape(targets.shape)


def _texts(targets: np.ndarray) -> list[str]:
    return [each.decode() if isinstance(each, bytes) else str(each) for each in targets.reshape(-1).tolist()]


class LEAF(ClientArrays):
    """Files of `LEAF <https://arxiv.org/abs/1812.01097>`_: ``users``, and for each of them ``user_data`` with x and y.

    Users are read one after another into one array of 32-bit numbers, without the rest of the file in memory. Needs the
    extra ``ijson``.

    Args:
        root: A folder with the folders ``train`` and ``test`` of ``.json`` files, as LEAF's ``preprocess.sh`` makes
            them; a folder of such files; or one file. Without ``test``, ``test_share`` of each user's samples is held
            out.
        **kwargs: Arguments of `ClientArrays` and `ClientDatasets`. ``encode`` takes the list of a user's x, such as
            texts (Shakespeare, Sent140) or names of images (CelebA).

    Raises:
        MisconfigurationException: If there is no such file, one is no JSON of this form, or a user is in two files of a
            split; and as for `ClientArrays`.

    Example:
        >>> import json, tempfile
        >>> file = Path(tempfile.mkdtemp()) / "data.json"
        >>> users = {"f1": {"x": [[0.5, 1.0]] * 5, "y": [1] * 5}, "f0": {"x": [[0.0, 1.0]] * 5, "y": [0] * 5}}
        >>> _ = file.write_text(json.dumps({"users": list(users), "num_samples": [5, 5], "user_data": users}))
        >>> data = LEAF(str(file), shape=[2, 1])
        >>> data.setup()
        >>> data.train_set.client.names, len(data.train_set), data.train_set[0][0].shape
        (('f1', 'f0'), 8, torch.Size([2, 1]))
    """

    def __init__(self, root: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root

    def names(self, split: Split) -> list[Any] | None:
        """See `ClientArrays.names`: the users in the order of the files."""
        found: list[Any] = []
        for file in self._files(split) or ():
            # Reads only the names; the data are skipped.
            users: Any = next(self._parsed(file, lambda ijson, text: ijson.items(text, "users")), [])
            if not (isinstance(users, list) and all(isinstance(each, str) for each in users)):
                raise MisconfigurationException(f"{file}: users must be a list of names, got {str(users)[:50]}")
            found += users
        return found or None

    def clients(self, split: Split) -> Iterator[tuple[Any, Any, Any]] | None:
        """See `ClientArrays.clients`."""
        files = self._files(split)
        if files is None:
            return None

        def user(file: Path, name: str, content: Any) -> tuple[Any, Any, Any]:
            if not isinstance(content, Mapping) or not {"x", "y"} <= set(content):
                raise MisconfigurationException(f"{file}: the user {name!r} must have lists x and y")
            return name, content["x"], content["y"]

        def users(ijson: Any, text: Any) -> Iterator[tuple[str, Any]]:
            return ijson.kvitems(text, "user_data", use_float=True)

        return (user(file, *entry) for file in files for entry in self._parsed(file, users))

    def _inputs(self, name: Any, inputs: Any) -> np.ndarray:
        # A feature may be integers for one user and fractions for another, so convert all.
        found = super()._inputs(name, inputs)
        return found if self.encode is not None else found.astype(np.float32)

    def _files(self, split: Split) -> list[Path] | None:
        root = Path(self.root).expanduser()
        folders = _split_folders(root)
        if split == "test" and not {"train", "test"} <= folders.keys():
            return None
        folder = folders[split] if "train" in folders else root
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        files = [root] if root.is_file() else [file for file in entries if file.suffix.lower() == ".json"]
        if not files:
            raise MisconfigurationException(
                f"root={self.root!r} must be a .json file, or a folder of such files or with folders train and test"
            )
        return files

    def _parsed(self, file: Path, read: Callable[[Any, Any], Iterator[Any]]) -> Iterator[Any]:
        ijson = import_extra("ijson", type(self).__name__)
        with open(file, "rb") as text:
            try:
                yield from read(ijson, _Shallow(text))
            except (ijson.JSONError, RecursionError) as error:
                raise MisconfigurationException(f"{file} is no valid JSON: {error}") from error


class _Shallow:
    """File wrapper that refuses deeply nested JSON: ijson's memory grows with the square of the depth."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._depth = file, 0

    def read(self, size: int = -1) -> bytes:
        part = self._file.read(16_384 if size else 0)
        # Brackets inside strings count too, but rarely differ by this many.
        self._depth += part.count(b"[") + part.count(b"{") - part.count(b"]") - part.count(b"}")
        if self._depth > 10_000:
            raise RecursionError("it is nested too deeply")
        return part


class FederatedHDF5(ClientArrays):
    """HDF5 files of TensorFlow Federated: group ``examples``, with a group of arrays for each client.

    Needs the extra ``h5py``.

    Args:
        train: The file to train on, such as ``fed_emnist_train.h5``.
        test: The file to test on. ``None``: ``test_share`` of each client's samples is held out.
        x: Name of the array of inputs, such as ``pixels`` (EMNIST), ``image`` (CIFAR-100) or ``snippets``.
        y: Name of the array of targets.
        **kwargs: Arguments of `ClientArrays` and `ClientDatasets`.

    Raises:
        MisconfigurationException: If a file is none of this form, or lacks an array; and as for `ClientArrays`.
    """

    def __init__(self, train: str, test: str | None = None, x: str = "pixels", y: str = "label", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._paths = {"train": train, "test": test}
        self.x, self.y = x, y

    def clients(self, split: Split) -> Iterator[tuple[Any, Any, Any]] | None:
        """See `ClientArrays.clients`."""
        path = self._paths[split]
        return None if path is None else self._read(path, split)

    def _read(self, path: str, split: Split) -> Iterator[tuple[Any, Any, Any]]:
        h5py = import_extra("h5py", type(self).__name__)
        try:
            with h5py.File(path, "r") as file:
                for name, arrays in file["examples"].items():
                    yield name, arrays[self.x][()], arrays[self.y][()]
        except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"{split}={path!r} must be an HDF5 file with the group 'examples', and in it for each client the arrays"
                f" x={self.x!r} and y={self.y!r}: {error}"
            ) from error


class ClientFiles(ClientArrays):
    """A file for each client, or a folder with several; also the folders that PFLlib makes.

    ``root`` holds the clients' files and folders, or a folder ``train`` and a folder ``test`` that do. In a client's
    folder, a file called ``test`` is of its test data, and all others are of its training data. Names of splits and
    suffixes may be in capitals. A client's name is that of its file, without suffix, or folder; clients come in natural
    order (``u2`` before ``u10``).

    Files are ``.npz`` with the arrays ``x`` and ``y``, or, as PFLlib's, with a dictionary of them; or tables: ``.csv``,
    ``.tsv``, ``.jsonl`` or ``.ndjson``, ``.json``, and ``.parquet``, which needs the extra ``pyarrow``. Images in
    folders are read by `ImageFolder`, with ``clients=True``.

    Args:
        root: The folder.
        target: Name of a table's column of targets. Strings are numbered as classes, in sorted order. A text file's
            cells are numbers if all are; codes of digits, such as ``01``, are strings.
        features: Names of a table's columns of inputs, numbers. ``None``: all but ``target``.
        **kwargs: Arguments of `ClientArrays` and `ClientDatasets`.

    Raises:
        MisconfigurationException: If there is no such file, one cannot be read or holds other objects, or a cell of a
            table is no number; and as for `ClientArrays`.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> for name in ("west", "east"):
        ...     np.savez(root / f"{name}.npz", x=np.random.rand(10, 3), y=np.arange(10) % 2)
        >>> data = ClientFiles(str(root))
        >>> data.setup()
        >>> data.train_set.client.names, len(data.test_set)
        (('east', 'west'), 4)
    """

    def __init__(self, root: str, target: str = "label", features: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root, self.target, self.features = root, target, features
        self._table = _Columns(target, features)

    def clients(self, split: Split) -> Iterator[tuple[Any, Any, Any]] | None:
        """See `ClientArrays.clients`."""
        found = self._files(split)
        if found is None:
            return None
        return ((name, *self._joined(name, files)) for name, files in found.items() if files)

    def names(self, split: Split) -> list[Any] | None:
        """See `ClientArrays.names`."""
        return list(self._files(split) or ())

    def _files(self, split: Split) -> dict[str, list[Path]] | None:
        """Each client's files of a split; ``None`` if there are no test files."""
        root = Path(self.root).expanduser()
        try:
            folders = _split_folders(root)
            folder = folders.get(split) if "train" in folders else root
            if folder is None:
                return None
            entries = sorted(
                (each for each in folder.iterdir() if not each.name.startswith((".", "__"))), key=natural_sort_key
            )
        except OSError as error:
            raise MisconfigurationException(f"root={self.root!r} is no folder that can be read: {error}") from error
        found: dict[str, list[Path]] = {}
        for entry in entries:
            files = [entry] if entry.is_file() else sorted(entry.iterdir())
            chosen = [file for file in files if file.suffix.lower() in _FILES]
            if folder is root:
                tested = [file for file in chosen if file is not entry and file.stem.lower() == "test"]
                chosen = tested if split == "test" else [file for file in chosen if file not in tested]
            if chosen or entry.is_dir():
                found.setdefault(entry.name if entry.is_dir() else entry.stem, []).extend(chosen)
        if any(found.values()):
            return found
        if split == "test":
            return None
        raise MisconfigurationException(
            f"root={self.root!r} holds no file of a client: {', '.join(_FILES)} are read, and images by ImageFolder"
        )

    def _joined(self, name: str, files: Sequence[Path]) -> tuple[Any, Any]:
        pairs = [self._arrays(file) for file in files]
        if len(pairs) == 1:
            return pairs[0]
        x, y = zip(*pairs, strict=True)
        try:
            return np.concatenate(x), np.concatenate(y)
        except ValueError as error:
            raise MisconfigurationException(f"the files of client {name!r} differ in shape: {error}") from error

    def _arrays(self, file: Path) -> tuple[Any, Any]:
        if file.suffix.lower() != ".npz":
            found = self._table.arrays(load_table(file))
            self.feature_names = self._table.names
            return found
        content = read_plain(file, "root")
        content = content.get("data", content)
        if not isinstance(content, Mapping) or not {"x", "y"} <= set(content):
            raise MisconfigurationException(f"{file} must have the arrays x and y, or a dictionary 'data' with them")
        return content["x"], content["y"]


class ClientTable(ClientArrays):
    r"""A table with a column of clients, such as patients of several hospitals with a column for the hospital.

    Args:
        train: The file: ``.csv``, ``.tsv``, ``.jsonl``, ``.json`` or ``.parquet``, which needs the extra ``pyarrow``.
        client: Name of its column of clients. They come in natural order.
        target: Name of its column of targets. Strings are numbered as classes, in sorted order. A text file's cells are
            numbers if all are; codes of digits, such as ``01``, are strings.
        features: Names of its columns of inputs, numbers. ``None``: all others.
        test: A file of rows to test on, with the same columns.
        split: Name of a column with ``train`` and ``test`` instead; other rows are left out. ``None``, and no ``test``:
            ``test_share`` of each client's rows is held out.
        **kwargs: Arguments of `ClientArrays` and `ClientDatasets`.

    Raises:
        MisconfigurationException: If a file cannot be read, there is no such column, or a cell is no number; and as for
            `ClientArrays`.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "patients.csv"
        >>> _ = file.write_text("hospital,age,ill\n" + "west,40,0\neast,50,1\n" * 5)
        >>> data = ClientTable(str(file), client="hospital", target="ill")
        >>> data.setup()
        >>> data.train_set.client.names, data.train_set[0]
        (('east', 'west'), (tensor([50.]), tensor(1)))
    """

    def __init__(
        self,
        train: str,
        client: str = "client",
        target: str = "label",
        features: list[str] | None = None,
        test: str | None = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if test is not None and split is not None:
            raise MisconfigurationException(f"test={test!r} and split={split!r} both define the test data: give one")
        self._paths = {"train": train, "test": train if split else test}
        self.client, self.target, self.features, self.split = client, target, features, split
        self._table = _Columns(target, features, [client, *([split] if split else [])])
        self._rows: dict[str, Rows] = {}

    def clients(self, split: Split) -> Iterator[tuple[Any, Any, Any]] | None:
        """See `ClientArrays.clients`."""
        path = self._paths[split]
        if path is None:
            return None
        table = load_table(Path(path))
        for argument, name in zip(("client", "split"), self._table.no_inputs, strict=False):
            table.find([name], f"{argument}={name!r}")
        chosen = np.arange(len(table))
        if self.split is not None:
            chosen = np.flatnonzero(np.asarray([str(each).lower() == split for each in table[self.split]]))
        owners = to_column(table[self.client], f"{path}: {self.client}", "give one integer or string for each row")
        refuse_empty(owners, f"{path}: {self.client}")
        names, codes = np.unique(owners[chosen], return_inverse=True)
        x, y = self._table.arrays(table)
        self.feature_names = self._table.names
        order = np.argsort(codes, kind="stable")
        parts = np.split(chosen[order], np.cumsum(np.bincount(codes, minlength=len(names)))[:-1]) if len(names) else []
        named = dict(sorted(zip(names.tolist(), parts, strict=True), key=lambda entry: natural_sort_key(entry[0])))
        self._rows[split] = Rows(torch.from_numpy(np.concatenate([chosen[:0], *named.values()])), len(table))
        return ((name, x[rows], y[rows]) for name, rows in named.items())

    def read(self, split: Split) -> Any:
        """See `ClientDatasets.read`; the dataset also has each sample's row in the file."""
        found = super().read(split)
        if found is not None:
            found.rows = self._rows[split]
        return found


def _split_folders(root: Path) -> dict[str, Path]:
    """The folders ``train`` and ``test`` in a folder, in capitals or not."""
    found: dict[str, Path] = {}
    for each in sorted(root.iterdir()) if root.is_dir() else ():
        name = each.name.lower()
        if name in ("train", "test") and each.is_dir():
            if name in found:
                raise MisconfigurationException(
                    f"root={str(root)!r} must hold one folder {name}, not {found[name].name} and {each.name}"
                )
            found[name] = each
    return found


def load_table(path: Path) -> Table:
    """Read a table as `read_table` does, or a Parquet file."""
    if path.suffix.lower() != ".parquet":
        return read_table(path)
    parquet = import_extra("pyarrow.parquet", "a table in a .parquet file")
    try:
        return Table(parquet.read_table(path).to_pydict(), str(path))
    except (OSError, ValueError) as error:
        raise MisconfigurationException(f"{path} is no Parquet file: {error}") from error


class _Columns:
    """The columns of inputs and targets, the same for all tables of a datamodule.

    Args:
        target: The column of targets.
        features: The columns of inputs; ``None``: all others of the first table, which the others must have too.
        no_inputs: Columns that are no inputs, such as the client.
    """

    def __init__(self, target: str, features: Sequence[str] | None, no_inputs: Sequence[str] = ()) -> None:
        self._target, self.no_inputs = target, no_inputs
        self.names = None if features is None else list(features)
        self._all_others = features is None

    def arrays(self, table: Table) -> tuple[np.ndarray, np.ndarray]:
        """The inputs, float32 ``(rows, features)``, and the targets, which are integers, float32 or strings.

        A column alone may hold lists of numbers.

        Raises:
            MisconfigurationException: If there is no such column, another one, or a cell is empty or no finite number.
        """
        targets = table[table.find([self._target], f"target={self._target!r}")]
        missing = next((row for row, cell in enumerate(targets) if is_blank(cell) or is_missing(cell)), None)
        if missing is not None:
            raise MisconfigurationException(f"{table.place(missing)}: {self._target!r} has no value: leave the row out")
        others = [name for name in table.column_names if name not in (self._target, *self.no_inputs)]
        features = self.names = others if self.names is None else self.names
        unknown = sorted(set(others) - set(features)) if self._all_others else []
        if unknown:
            raise MisconfigurationException(
                f"{table.source} has columns that other tables do not have, {join_names(unknown)}: give features="
            )
        columns = [_numbers(table, table.find([name], f"features={features}")) for name in features]
        if not columns:
            raise MisconfigurationException(f"{table.source} has no column of inputs in addition to {self._target!r}")
        inputs = columns[0] if len(columns) == 1 and columns[0].ndim > 1 else np.stack(columns, 1)
        found = np.asarray(targets)
        if found.dtype.kind in "US":
            found = _numbers_of_texts(found)
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found.reshape(len(found), -1)).all(1))[0])
            raise MisconfigurationException(
                f"{table.place(row)}: {self._target!r} must be a finite number, got {targets[row]!r}: fill it in or"
                " leave the row out"
            )
        return inputs, found


def _numbers_of_texts(cells: np.ndarray) -> np.ndarray:
    """Integers or float32 if all texts are numbers, or else the texts.

    Digits with leading zeros, or of a number beyond 64 bits, are codes and stay texts: as numbers, ``01`` and ``1``
    would be one class.
    """
    texts = [text.strip() for text in _texts(cells)]
    with contextlib.suppress(ValueError, OverflowError):
        if all(map(_DIGITS.fullmatch, texts)):
            whole = all(map(_INTEGER.fullmatch, texts))
            return np.array([int(text) for text in texts], np.int64).reshape(cells.shape) if whole else cells
        return cells.astype(np.float32)
    return cells


def _numbers(table: Table, name: str) -> np.ndarray:
    """A column of finite numbers as float32."""

    def finite(cells: Any) -> np.ndarray | None:
        with contextlib.suppress(TypeError, ValueError):
            found = np.asarray(cells).astype(np.float32)
            return found if np.isfinite(found).all() else None
        return None

    found = finite(table[name])
    if found is not None:
        return found
    row = next((row for row, cell in enumerate(table[name]) if finite(cell) is None), 0)
    raise MisconfigurationException(
        f"{table.place(row)}: {name!r} must be a number, or lists of one length, got {str(table[name][row])[:50]!r}:"
        " fill it in, leave the row out, or name the columns of numbers by features="
    )
