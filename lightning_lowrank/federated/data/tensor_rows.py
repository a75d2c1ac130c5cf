"""Datasets whose samples are rows of tensors, and the construction of batches from these rows.

`SeededBatches` gathers such batches, in main memory or on the device that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate


def is_plain(tensor: Tensor) -> bool:
    """Whether indexing a tensor gives the same batch as `torch.stack` of its samples."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


class TensorRows(Protocol):
    """Describes how a dataset of tensors builds a batch from rows, in three parts.

    The dataset's method ``by_rows()`` returns it, or ``None`` for a dataset that is read sample by sample.
    """

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that hold the samples' rows."""

    @property
    def collates(self) -> Sequence[Callable[..., Any]]:
        """The collate functions whose result is that of `make`."""

    def draw(self, samples: int, generator: torch.Generator) -> Tensor | None:
        """The random draws of a batch, int64 of shape ``[draws, samples]`` on the CPU; ``None`` without randomness."""

    def make(self, rows: Sequence[Tensor], draws: Tensor | None) -> list[Tensor]:
        """A batch made of gathered ``rows``, on their device; samples are independent of each other."""

    def cached(self, samples: int) -> Sequence[Tensor] | None:
        """The result of `make` for all rows, if cached on the CPU and nothing is random.

        Args:
            samples: Number of samples that are about to be read.
        """


class _RowsOfTensors:
    """`TensorRows` of a `torch.utils.data.TensorDataset`."""

    collates = (default_collate,)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def draw(self, samples: int, generator: torch.Generator) -> None:
        return None

    def make(self, rows: Sequence[Tensor], draws: Tensor | None) -> list[Tensor]:
        return list(rows)

    def cached(self, samples: int) -> Sequence[Tensor]:
        return self.tensors


class Source(NamedTuple):
    """A dataset whose samples are rows of tensors, behind any `torch.utils.data.Subset`.

    Args:
        rows: How batches are made of rows.
        chosen: Row of each sample, int64; ``None``: the sample's own number.
    """

    rows: TensorRows
    chosen: np.ndarray | None

    def rows_of(self, samples: np.ndarray) -> np.ndarray:
        """The row numbers of samples."""
        return samples if self.chosen is None else self.chosen[samples]


def source_of(dataset: Any, collate: Callable[..., Any]) -> Source | None:
    """The `Source` of a dataset's batches, looked for through any number of `torch.utils.data.Subset`.

    Returns:
        ``None`` if its samples are not rows of tensors, or ``collate`` is not one that only puts them together.

    Example:
        >>> pairs = TensorDataset(torch.arange(4.0), torch.arange(4))
        >>> source_of(Subset(pairs, [3, 1]), default_collate).rows_of(np.array([0, 1]))
        array([3, 1])
        >>> source_of(pairs, list) is None
        True
    """
    chosen: np.ndarray | None = None
    while type(dataset) is Subset:
        outer = np.asarray(dataset.indices)
        if outer.ndim != 1 or (len(outer) and outer.dtype.kind not in "iu"):
            return None
        outer = outer.astype(np.int64)
        chosen = outer if chosen is None else outer[chosen]
        dataset = dataset.dataset
    rows: TensorRows | None = None
    if type(dataset) is TensorDataset:
        rows = _RowsOfTensors(dataset.tensors)
    elif hasattr(dataset, "by_rows"):
        rows = dataset.by_rows()
    if rows is None or collate not in rows.collates or not all(map(is_plain, rows.tensors)):
        return None
    if chosen is not None and len(chosen) and chosen.min() < 0:
        chosen = np.where(chosen < 0, chosen + len(rows.tensors[0]), chosen)
    return Source(rows, chosen)
