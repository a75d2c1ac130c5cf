"""The rows of a file, or of a split, from which a dataset's samples come.

Datamodules that hold out, drop or limit samples renumber the others. They leave a `Rows` on the training set as
``dataset.rows``, by which partitions that name samples by their number, such as `FromIndices`, find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Subset

__all__ = ["Rows", "rows_of"]


@dataclass(frozen=True, eq=False)
class Rows:
    """The row number of each sample of a dataset.

    Args:
        numbers: Number of each sample's row in its file or split, from 0: int64, shape ``[samples]``.
        total: Number of rows of the file or split.

    Example:
        >>> Rows.all(5).select([4, 1]).positions()
        tensor([-1,  1, -1, -1,  0])
    """

    numbers: Tensor
    total: int

    @classmethod
    def all(cls, total: int) -> Rows:
        """The rows of a complete dataset in order."""
        return cls(torch.arange(total), total)

    def select(self, samples: Tensor | Sequence[int]) -> Rows:
        """The rows of some samples, in the given order."""
        return Rows(self.numbers[torch.as_tensor(samples, dtype=torch.int64)], self.total)

    def positions(self) -> Tensor:
        """The sample of each row, -1 for a row without sample: int64, shape ``[total]``."""
        found = torch.full((self.total,), -1, dtype=torch.int64)
        found[self.numbers] = torch.arange(len(self.numbers))
        return found


def rows_of(dataset: Any) -> Rows | None:
    """The rows of a dataset's samples; ``None`` if the dataset does not record any.

    `torch.utils.data.Subset` of a dataset with rows has those of its samples.

    Raises:
        MisconfigurationException: If the dataset has the rows of another number of samples.

    Example:
        >>> rows_of([1.0, 2.0]) is None
        True
    """
    found = getattr(dataset, "rows", None)
    if isinstance(found, Rows):
        if len(found.numbers) != len(dataset):
            raise MisconfigurationException(
                f"{type(dataset).__name__}.rows has the rows of {len(found.numbers)} samples, and there are"
                f" {len(dataset)}: set it to None, or to the rows of these samples."
            )
        return found
    if isinstance(dataset, Subset):
        inner = rows_of(dataset.dataset)
        return None if inner is None else inner.select([int(index) for index in dataset.indices])
    return None
