"""Batches that follow each other, read in one go where nothing is drawn while samples are read.

`RoundLoader` reads the batches of clients that train one after another with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_BYTES = 2**20
# Products of matrices may depend on whether memory begins at a multiple of it, as that of a tensor of its own does.
_ALIGNED = 64


class Request(NamedTuple):
    """The sample indices of one batch, and the seed of whatever is drawn while they are read."""

    indices: np.ndarray
    seed: int


class BlockReader:
    """Reads several batches as one, and cuts it, which is faster than to read each.

    The batches are those that would be read one by one. It does so for tensors of at least one dimension, alone or in a
    list, tuple or dictionary, whose parts begin where memory of their own would begin. All else is read one by one, and
    so are batches of which one cannot be read.

    Args:
        read: Reads a batch.

    Example:
        >>> images = torch.arange(200.0).view(10, 20)
        >>> reader = BlockReader(lambda request: [images[request.indices]])
        >>> requests = [Request(np.arange(start, start + 4), seed=0) for start in (0, 4)]
        >>> [batch[0][:, 0].tolist() for batch in reader(requests)]
        [[0.0, 20.0, 40.0, 60.0], [80.0, 100.0, 120.0, 140.0]]
    """

    def __init__(self, read: Callable[[Request], Any]) -> None:
        self._read = read
        # Bytes of a sample, and those of each part in which numbers are rounded; unknown before the first batch.
        self._sample = 0
        self._rounded: list[int] = []

    def __call__(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Return an iterator over the batches; requests are taken in advance."""
        following = iter(requests)
        while block := self._block(following):
            whole = None if len(block) == 1 else self._whole(block)
            if whole is not None:
                yield from _cut(whole, [len(request.indices) for request in block])
                continue
            for request in block:
                batch = self._read(request)
                self._measure(batch, len(request.indices))
                yield batch

    def _block(self, requests: Iterator[Request]) -> list[Request]:
        """Take the requests that are read in one go, one at least where there is one."""
        block, nbytes = [], 0
        for request in requests:
            block.append(request)
            size = len(request.indices)
            nbytes += size * self._sample
            # The next one is taken to be as large.
            if not self._sample or nbytes + size * self._sample > _BYTES:
                break
            if any(size * each % _ALIGNED for each in self._rounded):
                break
        return block

    def _measure(self, batch: Any, size: int) -> None:
        parts = _parts(batch, size)
        nbytes = [part.nbytes // size for part in parts]
        self._sample = sum(nbytes)
        self._rounded = [each for each, part in zip(nbytes, parts, strict=True) if part.dtype.is_floating_point]

    def _whole(self, block: list[Request]) -> Any:
        try:
            whole = self._read(Request(np.concatenate([request.indices for request in block]), block[0].seed))
        except Exception:
            # It comes again with the batch that it belongs to.
            return None
        return whole if _parts(whole, sum(len(request.indices) for request in block)) else None


def _parts(batch: Any, size: int) -> list[Tensor]:
    """Return a batch's tensors, none where there is anything else in it, or they can't be cut into samples."""
    kind = type(batch)
    found = list(batch.values()) if kind is dict else list(batch) if kind in (list, tuple) else [batch]
    for part in found:
        plain = type(part) is Tensor and part.layout is torch.strided and not part.requires_grad
        if not plain or not part.ndim or len(part) != size or not part.is_contiguous():
            return []
    return found


def _cut(whole: Any, sizes: list[int]) -> Iterable[Any]:
    # Unlike other slices, these count what is written in place each for itself.
    if isinstance(whole, Tensor):
        return whole.unsafe_split_with_sizes(sizes)
    if isinstance(whole, dict):
        parts = zip(*(part.unsafe_split_with_sizes(sizes) for part in whole.values()), strict=True)
        return (dict(zip(whole, each, strict=True)) for each in parts)
    return map(type(whole), zip(*(part.unsafe_split_with_sizes(sizes) for part in whole), strict=True))
