"""`LabelTable`: a partition by a given table of label counts per client."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.arguments import first_ten
from lightning_lowrank.federated.data.columns import Column, refuse_empty
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.data.partitions import Partition, check_client_count, deal
from lightning_lowrank.federated.data.plain_files import read_columns, read_plain
from lightning_lowrank.seeding import generator

_PFLLIB = "Size of samples for labels in clients"


class LabelTable(Partition):
    """A partition by a table of label counts per client, such as a published one; the samples themselves are drawn.

    Args:
        counts: The table: for each client a list of the number of samples of each label, from label 0 on, or a
            dictionary from labels to numbers. The clients are in a list, or in a dictionary by name, which the result
            keeps. Or the path of a file with one: ``.json``, also PFLlib's ``config.json``; the other files of
            `FromIndices`, such as FedML's ``distribution.txt``; or a report of FedLab, a ``.csv`` of shares of labels
            and an ``Amount`` for each client. Its shares have three digits, so that numbers are right to a few samples.
        proportions: ``False``: as many samples as the table says; other samples are unused. ``True``: all samples of
            each label, divided in the table's proportions, as for a table of a data set of another size.

    Raises:
        MisconfigurationException: If there is no such table, a number is below 0, or the training set lacks a label of
            the table; without ``proportions``, if it has fewer samples of a label; with it, if no client has one of its
            labels.

    Example:
        >>> labels = torch.arange(40) % 4
        >>> LabelTable([[5, 0, 0, 1], [0, 2]]).split(40, None, 0, labels).label_counts(labels)
        tensor([[5, 0, 0, 1],
                [0, 2, 0, 0]])
    """

    needs_labels = True

    def __init__(
        self, counts: Sequence[Any] | Mapping[str, Any] | Mapping[int, Any] | str | Path, proportions: bool = False
    ) -> None:
        content: Any = counts
        if isinstance(counts, (str, os.PathLike)):
            path = Path(counts)
            content = _fedlab_report(path) if path.suffix.lower() == ".csv" else read_plain(path, "counts")
            if isinstance(content, Mapping) and _PFLLIB in content:
                # PFLlib stores pairs of a label and its count.
                content = [dict(pairs) for pairs in content[_PFLLIB]]
        content = content.tolist() if isinstance(content, (Tensor, np.ndarray)) else content
        self._names = list(content) if isinstance(content, Mapping) else None
        rows = list(content.values()) if isinstance(content, Mapping) else content
        if not isinstance(rows, (list, tuple)) or not rows:
            raise MisconfigurationException(
                "counts must be a path, or a list or dictionary with each client's number of samples per label, got"
                f" {str(content)[:100]}."
            )
        self._rows = [_labels_of_client(row, client) for client, row in enumerate(rows)]
        self.proportions = proportions

    def count_clients(self, clients: int | None, keys: Column | None) -> int:
        """The number of clients in the table."""
        return check_client_count(clients, len(self._rows), f"counts has {len(self._rows)} clients")

    def assign(self, size: int, clients: int, seed: int, labels: Tensor | None, keys: Column | None) -> ClientIndices:
        """See `Partition.assign`."""
        assert labels is not None
        names, codes, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
        places = {int(name): place for place, name in enumerate(names)}
        table = torch.zeros(len(names), clients, dtype=torch.int64)
        for client, row in enumerate(self._rows):
            for label, count in row.items():
                if label in places:
                    table[places[label], client] = count
                elif count:
                    raise MisconfigurationException(
                        f"counts has {count} samples of label {label} for client {client}, and the training set has the"
                        f" labels {first_ten(list(places))}."
                    )
        asked = table.sum(1)
        if self.proportions:
            if not asked.all():
                raise MisconfigurationException(
                    f"counts has no sample of the labels {first_ten(names[asked == 0].tolist())}, which the training"
                    " set has, so that proportions=True has no proportions for them: leave it out."
                )
            ends = (table.cumsum(1).double() / asked[:, None] * sizes[:, None]).round().long()
            table = ends.diff(dim=1, prepend=torch.zeros(len(names), 1, dtype=torch.int64))
        elif (asked > sizes).any():
            label = int((asked - sizes).argmax())
            raise MisconfigurationException(
                f"counts has {asked[label]} samples of label {names[label]}, and the training set has"
                f" {sizes[label]}: set proportions=True to divide the existing samples in the table's proportions."
            )
        found = deal(codes, table, generator(seed, "partition", "samples"))
        return ClientIndices(found.indices, size, self._names, sizes=found.sizes)


def _labels_of_client(row: Any, client: int) -> dict[int, int]:
    """A client's number of samples per label."""
    entries = row.items() if isinstance(row, Mapping) else enumerate(row) if isinstance(row, (list, tuple)) else None
    try:
        found = {} if entries is None else {int(label): operator.index(count) for label, count in entries}
    except (TypeError, ValueError):
        found, entries = {}, None
    if entries is None or min(found.values(), default=0) < 0:
        raise MisconfigurationException(
            f"counts must have a number of samples, 0 or more, for each label; client {client} has {str(row)[:100]}."
        )
    return found


def _fedlab_report(path: Path) -> dict[str, dict[int, int]]:
    """Read label counts from a FedLab report, whose rows have shares ``class0``, ``class1``, ... and an ``Amount``."""
    columns = read_columns(path, "counts")
    labels = [name for name in columns if name.startswith("class")]
    if not labels or "Amount" not in columns or not all(re.fullmatch("class[0-9]+", name) for name in labels):
        raise MisconfigurationException(
            f"counts={str(path)!r} must have the columns client, class0, class1, ..., Amount, and has {list(columns)}."
        )
    clients = columns[next(iter(columns))]
    refuse_empty(clients, f"counts={str(path)!r}, the column of clients,")
    table: dict[str, dict[int, int]] = {}
    for row, (client, amount) in enumerate(zip(clients, columns["Amount"], strict=True)):
        try:
            shares = torch.tensor([float(columns[name][row]) for name in labels], dtype=torch.float64)
            ends = (shares.cumsum(0) / shares.sum().clamp_min(1e-9) * int(float(amount))).round().long()
        except ValueError as error:
            raise MisconfigurationException(f"counts={str(path)!r}: {client}: {error}.") from error
        counts = ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        table[client.strip()] = {
            int(name.removeprefix("class")): count for name, count in zip(labels, counts, strict=True)
        }
    return table
