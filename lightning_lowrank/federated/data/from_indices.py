"""`FromIndices`: a partition from given indices, in Python or a file.

Other projects' files have many forms: the samples of each client or the client of each sample, for one data set or
for two. Each becomes a `_Division`, one for training and one for evaluation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Dataset, Subset

from lightning_lowrank.federated.data.columns import Column, length_of, refuse_empty, to_column
from lightning_lowrank.federated.data.indices import ClientIndices, index_tensor
from lightning_lowrank.federated.data.partitions import Partition, check_client_count, natural_sort_key
from lightning_lowrank.federated.data.plain_files import owners_in_file, read_plain
from lightning_lowrank.federated.data.rows import Rows, rows_of

_SPLITS = ("train", "test")
_OWNER_ADVICE = "a flat list says which client each sample has, by one integer or string"


@dataclass(frozen=True)
class _Division:
    """The sample indices of each client, as read from the user's indices or file.

    Args:
        indices: All clients' samples, client after client: int64.
        sizes: Number of samples of each client: int64.
        names: The clients' names, or ``None``.
        total: Number of samples of the data set, if the division says it.
    """

    indices: Tensor
    sizes: Tensor
    names: list[str | int] | None = None
    total: int | None = None

    def of(self, dataset: Dataset | int) -> ClientIndices:
        """The partition of a dataset. If its samples are known rows of a file, the indices number these rows."""
        rows = None if isinstance(dataset, int) else rows_of(dataset)
        size = rows.total if rows else dataset if isinstance(dataset, int) else length_of(dataset)
        if self.total not in (None, size):
            raise MisconfigurationException(
                f"indices says the client of each of {self.total:,} samples, and there are {size:,}: give a client for"
                " each sample, or each client's sample indices."
            )
        given = ClientIndices(self.indices, size, self.names, sizes=self.sizes)
        return given if rows is None else self._of_rows(given, rows)

    def _of_rows(self, given: ClientIndices, rows: Rows) -> ClientIndices:
        samples = rows.positions()[given.indices]
        known = samples >= 0
        missing = len(samples) - int(known.sum())
        if len(samples) and missing == len(samples):
            raise MisconfigurationException(
                f"indices names {missing:,} rows, and none of them is in the data set, which has"
                f" {len(rows.numbers):,} of the {rows.total:,} rows: they are held out or dropped, or left out by"
                " limit_samples."
            )
        if missing:
            rank_zero_info(
                f"FromIndices: {missing:,} of the {len(samples):,} rows that indices names are not in the data set:"
                " they are held out, or were dropped."
            )
        clients = torch.repeat_interleave(torch.arange(len(given)), given.sizes)[known]
        sizes = torch.bincount(clients, minlength=len(given))
        return ClientIndices(samples[known], len(rows.numbers), given.names, sizes=sizes)


class FromIndices(Partition):
    """A partition by given indices; nothing is drawn, and samples without a client are unused.

    Indices number the samples of the training set. If a data module of this package holds samples out for tests or
    validation, or drops some, they number the rows of its file, split or arrays: a client then has those of its rows
    that are in the training set.

    Args:
        indices: The sample indices of each client: a list, tensor, set or `torch.utils.data.Subset` for each, in a list
            or in a dictionary from the clients' names, strings or integers. Named clients are numbered in ascending
            order of the names, numbers in them by their value (``u2`` before ``u10``); the result keeps the names (as
            integers if all are written so, such as JSON's ``"0"`` to ``"10"``). Or a flat list with the client of
            each sample. Or a dictionary with either for ``"train"`` and for ``"test"``, or such a dictionary for each
            client: ``"test"`` is for ``personal_test="by_client"`` and numbers the samples of the evaluation set; a
            client has the same name in both, as an integer or as text. Or the path of a file that holds one of these:
            ``.json``, ``.npy``, ``.npz``, ``.pt`` of `torch.save`, ``.txt`` with a Python literal, a pickle of plain
            values and NumPy arrays, or ``.csv`` with a column of clients.
        client: Name of that column of a ``.csv``. ``None``: the first of ``client``, ``client_id``, ``user``,
            ``user_id``.
        index: Name of the column with the samples' indices. ``None``: ``index`` or ``sample`` if there is one, and
            else a line for each sample, in their order.

    Raises:
        MisconfigurationException: If the file cannot be read or holds other objects, an index is out of range or occurs
            twice, a sample's client is a negative number, or ``clients`` is given and is not the number of clients.

    Example:
        >>> FromIndices({"ward b": [2, 0], "ward a": [1]}).split(4, clients=None, seed=0)[1]
        tensor([2, 0])
        >>> FromIndices(["b", "a", "b"]).split(3, clients=None, seed=0).names
        ('a', 'b')
    """

    def __init__(
        self,
        indices: Sequence[Any] | Mapping[str, Any] | Mapping[int, Any] | str | Path,
        client: str | None = None,
        index: str | None = None,
    ) -> None:
        content: Any = indices
        if isinstance(indices, (str, os.PathLike)):
            path = Path(indices)
            suffix = path.suffix.lower()
            if suffix == ".csv":
                owners, places = owners_in_file(path, "indices", client, index)
                self._train, self._test = _of_owners(owners, places), None
                return
            content = read_plain(path, "indices")
            # A single array in an .npz file is the whole partition, not one client of that name.
            if suffix == ".npz" and len(content) == 1:
                (content,) = content.values()
        parts = _splits(content)
        self._train = _division(parts["train"])
        self._test = _division(parts["test"]) if "test" in parts else None

    def divide_named(self, dataset: Dataset, clients: int | None) -> ClientIndices | None:
        """See `Partition.divide_named`."""
        self.count_clients(clients, None)
        return self._train.of(dataset)

    def count_clients(self, clients: int | None, keys: Column | None) -> int:
        """The number of clients."""
        number = len(self._train.sizes)
        return check_client_count(clients, number, f"indices has {number} lists, one for each client")

    def divide_evaluation(self, dataset: Dataset, clients: ClientIndices) -> list[Tensor]:
        """See `Partition.divide_evaluation`; uses the indices given for ``"test"``."""
        if self._test is None:
            raise MisconfigurationException(
                "personal_test='by_client' needs the indices of the evaluation samples too:"
                " FromIndices({'train': ..., 'test': ...})."
            )
        # By text: names are integers only if all names of a part are written so.
        names = map(str, self._test.names or range(len(self._test.sizes)))
        found = dict(zip(names, self._test.of(dataset), strict=True))
        return [
            found.get(str(name), torch.zeros(0, dtype=torch.int64)) for name in clients.names or range(len(clients))
        ]

    def assign(self, size: int, clients: int, seed: int, labels: Tensor | None, keys: Column | None) -> ClientIndices:
        """See `Partition.assign`."""
        return self._train.of(size)


def _splits(content: Any) -> dict[str, Any]:
    """The parts for ``"train"`` and, if given, ``"test"``."""
    if isinstance(content, Mapping) and set(content) == set(_SPLITS):
        return dict(content)
    parts = content.values() if isinstance(content, Mapping) else content if isinstance(content, (list, tuple)) else ()
    if not any(isinstance(part, Mapping) for part in parts):
        return {"train": content}
    other = next((part for part in parts if not (isinstance(part, Mapping) and set(_SPLITS) <= set(part))), None)
    if other is not None:
        raise MisconfigurationException(
            "indices has a dictionary for some clients, but then each client needs a dictionary with 'train' and"
            " 'test', got"
            f" {str(other)[:100]}."
        )
    if isinstance(content, Mapping):
        return {split: {name: part[split] for name, part in content.items()} for split in _SPLITS}
    return {split: [part[split] for part in parts] for split in _SPLITS}


def _division(content: Any) -> _Division:
    if isinstance(content, Mapping):
        named = _sorted_clients(content)
        return _of_lists(list(named.values()), list(named))
    if not isinstance(content, (Sequence, Tensor, np.ndarray)) or isinstance(content, (str, bytes)):
        raise MisconfigurationException(
            "indices must be a list with the sample indices of each client, a dictionary of such lists, a flat list"
            f" with the client of each sample, or a path, got {type(content).__name__}."
        )
    first = content[0] if len(content) else []
    if isinstance(first, (str, Integral)) or getattr(first, "ndim", 1) == 0:
        return _of_owners(content)
    return _of_lists(list(content), None)


def _of_lists(parts: Sequence[Any], names: list[str | int] | None) -> _Division:
    if not len(parts):
        raise MisconfigurationException("indices is empty: give the sample indices of at least one client.")
    lists = []
    for client, part in enumerate(parts):
        taken = part.indices if isinstance(part, Subset) else sorted(part) if isinstance(part, Set) else part
        # torch has no uint16 and uint32 indices.
        if isinstance(taken, np.ndarray) and taken.dtype.kind in "iu":
            taken = taken.astype(np.int64)
        lists.append(index_tensor(taken, client))
    return _Division(torch.cat(lists), torch.tensor([len(part) for part in lists]), names)


def _of_owners(content: Any, places: np.ndarray | None = None) -> _Division:
    """The partition, given the client of each sample, or of each sample in ``places``."""
    owners = to_column(content, "indices", _OWNER_ADVICE)
    refuse_empty(owners, "indices")
    found, codes = np.unique(owners, return_inverse=True)
    # Files hold numbers as text. A name such as "-1" among names that are no numbers is a name.
    negative = [name for name in found.tolist() if str(name).startswith("-")]
    if negative and all(re.fullmatch(r"-?[0-9]+(\.0*)?", str(name)) for name in found.tolist()):
        place = int(np.flatnonzero(owners == negative[0])[0])
        raise MisconfigurationException(
            f"indices says that sample {place if places is None else places[place]} has the client {negative[0]}:"
            " clients are numbered from 0. To leave samples out, give each client's sample indices instead."
        )
    order = _sorted_clients(dict(zip(found.tolist(), range(len(found)), strict=True)))
    number_of = np.empty(len(found), np.int64)
    number_of[list(order.values())] = np.arange(len(found))
    clients = number_of[codes]
    samples = np.argsort(clients, kind="stable")
    sizes = torch.from_numpy(np.bincount(clients, minlength=len(found)))
    if places is not None:
        return _Division(torch.from_numpy(places[samples]), sizes, list(order))
    return _Division(torch.from_numpy(samples), sizes, list(order), len(owners))


def _sorted_clients(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Sort clients by name; sort numerically if all names are integers in Python's notation."""
    other = [name for name in content if isinstance(name, bool) or not isinstance(name, (str, Integral))]
    if other:
        raise MisconfigurationException(
            f"the names of the clients in indices must be strings or integers, got {other[0]!r} of type"
            f" {type(other[0]).__name__}."
        )
    # Names such as "007" stay strings: as integers they would change, or equal another name.
    if all(isinstance(name, str) and re.fullmatch("0|[1-9][0-9]*", name) for name in content):
        content = {int(name): part for name, part in content.items()}
    content = {int(name) if isinstance(name, Integral) else name: part for name, part in content.items()}
    twice = sorted({str(name) for name in content if isinstance(name, int) and str(name) in content})
    if twice:
        raise MisconfigurationException(
            f"indices names the client {twice[0]} twice, as an integer and as a string: give it one name."
        )
    return {name: content[name] for name in sorted(content, key=natural_sort_key)}
