"""Batches of samples of similar length, which need little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

_BATCHES_OF_A_WINDOW = 50


def group_by_length(order: Tensor, lengths: Tensor, batch_size: int, draws: torch.Generator) -> Tensor:
    """Reorder samples so that each batch has samples of similar length.

    The batches come in random order. Samples at the end of ``order`` that do not fill a batch stay there.

    Args:
        order: Indices of samples in random order.
        lengths: Length of each sample of the dataset.
        batch_size: Samples per batch.
        draws: Draws the order of the batches.

    Example:
        >>> lengths = torch.tensor([9, 1, 8, 2, 7, 3])
        >>> found = group_by_length(torch.arange(6), lengths, 3, torch.Generator().manual_seed(0))
        >>> sorted(lengths[batch].tolist() for batch in found.split(3))
        [[1, 2, 3], [7, 8, 9]]
    """
    full = len(order) // batch_size
    head, tail = order[: full * batch_size], order[full * batch_size :]
    ordered = head[lengths[head].argsort(stable=True)].view(full, batch_size)
    return torch.cat([ordered[torch.randperm(full, generator=draws)].flatten(), tail])


class LengthGroupedSampler(RandomSampler):
    """Draws all samples in random order, grouped into batches of similar length.

    The random order is cut into windows of 50 batches, and `group_by_length` regroups each. A federated round regroups
    the samples that a client trains on in it: these are those of a plain random order.

    Args:
        data_source: The dataset.
        lengths: Length of each of its samples, an integer tensor.
        batch_size: Samples per batch of the loader.

    Raises:
        ValueError: If there is not one length for each sample.
    """

    def __init__(self, data_source: Sized, lengths: Tensor, batch_size: int) -> None:
        super().__init__(data_source)
        if lengths.shape != (len(data_source),):
            raise ValueError(
                f"lengths must hold one length for each of {len(data_source)} samples, got shape {tuple(lengths.shape)}"
            )
        self.lengths = lengths
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices of one pass."""
        draws = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        order = torch.randperm(len(self.lengths), generator=draws)
        for window in order.split(self.batch_size * _BATCHES_OF_A_WINDOW):
            yield from group_by_length(window, self.lengths, self.batch_size, draws).tolist()
