"""Batches of validation and test loaders that are read in one piece instead of sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset, TensorDataset, default_collate

from lightning_lowrank.federated.data.device import DeviceData, is_plain, source_of
from lightning_lowrank.internals.torch import read_by, written

_KEPT_BYTES = 2**28


class WholeBatches:
    """Has loaders read their batches in one piece, where the batches are the same bit for bit.

    These are loaders in order and without workers, over one of the following or a `torch.utils.data.Subset` of it:

    - A `torch.utils.data.TensorDataset`, collated as PyTorch does. A batch is a slice of each tensor.
    - A dataset that says, as its collate function does, that it is ``deterministic``. Up to 256 MiB of a loader's
      batches are kept, until an attribute of the dataset is replaced or written to.

    Where samples are kept on the device that trains, batches are made there.

    A step may change its batch, which is always a copy.

    Args:
        device_data: Keeps samples on the device; ``None``: batches are read on the host.

    Example:
        >>> loader = DataLoader(TensorDataset(torch.arange(3.0), torch.arange(3)), batch_size=2)
        >>> restore = WholeBatches().begin(loader)
        >>> list(loader)
        [[tensor([0., 1.]), tensor([0, 1])], [tensor([2.]), tensor([2])]]
        >>> restore()
    """

    def __init__(self, device_data: DeviceData | None = None) -> None:
        self._device_data = device_data
        self._kept: WeakKeyDictionary[DataLoader, _KeptBatches] = WeakKeyDictionary()
        self._begun: WeakSet[DataLoader] = WeakSet()

    def reads_as_usual(self, loader: DataLoader) -> bool:
        """Return whether `begin` has not been called with a loader, or what it returned has been called since."""
        return loader not in self._begun

    def begin(self, loader: Any) -> Callable[[], None]:
        """Have a loader read its batches so, if possible.

        Returns:
            What gives the loader's own way back.
        """
        if not (isinstance(loader, DataLoader) and _in_order(loader)):
            return lambda: None
        restore = self._begin(loader)
        self._begun.add(loader)

        def end() -> None:
            self._begun.discard(loader)
            restore()

        return end

    def _begin(self, loader: DataLoader) -> Callable[[], None]:
        on_device = self._on_device(loader)
        if on_device is not None:
            return read_by(loader, on_device, pinned=False)
        dataset, subsets = loader.dataset, []
        while type(dataset) is Subset:
            subsets.append(dataset)
            dataset = dataset.dataset
        collate = loader.collate_fn
        if type(dataset) is TensorDataset:
            if collate is not default_collate or not all(map(is_plain, dataset.tensors)):
                return lambda: None
            return read_by(loader, _Slices(dataset.tensors, subsets).read)
        deterministic = getattr(dataset, "deterministic", False)
        if not (deterministic and (collate is default_collate or getattr(collate, "deterministic", False))):
            return lambda: None
        kept = self._kept.setdefault(loader, _KeptBatches())
        owners = [dataset, collate, *subsets]
        kept.check(owners)

        def read(indices: Sequence[int], as_loader: Callable[[Sequence[int]], Any]) -> Any:
            if not indices[0]:
                kept.check(owners)
            return kept.read(indices, as_loader)

        return read_by(loader, read)

    def _on_device(self, loader: DataLoader) -> Callable[..., list[Tensor]] | None:
        """Return what makes a loader's batches on the device, if its samples are kept there and nothing is drawn."""
        data, source = self._device_data, source_of(loader.dataset, loader.collate_fn)
        if data is None or source is None or source.draws:
            return None
        if data.where(source)[0] != "device":
            return None

        def read(indices: Sequence[int], as_loader: Callable[[Sequence[int]], Any]) -> list[Tensor]:
            return data.slices(source, slice(indices[0], indices[-1] + 1))

        return read


class _Slices:
    """Reads slices of tensors."""

    def __init__(self, tensors: Sequence[Tensor], subsets: Sequence[Subset]) -> None:
        self._tensors = tensors
        self._rows: Tensor | None = None
        for subset in reversed(subsets):
            rows = torch.as_tensor(subset.indices)
            self._rows = rows if self._rows is None else self._rows[rows]

    def read(self, indices: Sequence[int], as_loader: Callable[[Sequence[int]], Any]) -> list[Tensor]:
        part = slice(indices[0], indices[-1] + 1)
        if self._rows is None:
            return [tensor[part].clone() for tensor in self._tensors]
        return [tensor.index_select(0, self._rows[part].to(tensor.device)) for tensor in self._tensors]


class _KeptBatches:
    """Reads batches as their loader does, and copies those that have been read before."""

    def __init__(self) -> None:
        self._batches: dict[tuple[int, int], Any] = {}
        self._bytes = 0
        self._attributes: list[Any] = []
        self._written: list[Any] = []

    def check(self, owners: Sequence[Any]) -> None:
        """Forget the batches if an attribute of one of the owners has changed."""
        attributes = [value for owner in owners for value in (owner, *getattr(owner, "__dict__", {}).values())]
        versions = [written(value) for value in attributes if isinstance(value, Tensor)]
        known = len(attributes) == len(self._attributes) and versions == self._written
        if not known or any(map(_differ, attributes, self._attributes)):
            self._batches.clear()
            self._bytes = 0
        # They are held, so that nothing else can be taken for them.
        self._attributes, self._written = attributes, versions

    def read(self, indices: Sequence[int], as_loader: Callable[[Sequence[int]], Any]) -> Any:
        key = indices[0], len(indices)
        if key in self._batches:
            return _copy(self._batches[key])
        batch = as_loader(indices)
        size = _bytes(batch)
        if size is not None and self._bytes + size <= _KEPT_BYTES:
            self._batches[key] = _copy(batch)
            self._bytes += size
        return batch


def _in_order(loader: DataLoader) -> bool:
    return (
        loader.num_workers == 0
        and type(loader.sampler) is SequentialSampler
        and type(loader.batch_sampler) is BatchSampler
        and loader.batch_sampler.sampler is loader.sampler
        and loader.sampler.data_source is loader.dataset
    )


def _differ(first: Any, second: Any) -> bool:
    return first is not second


def _bytes(batch: Any) -> int | None:
    """Return the bytes of a batch that is a collection of tensors, none of them part of another; else ``None``."""
    parts = list(batch.values()) if type(batch) is dict else batch if type(batch) in (list, tuple) else [batch]
    if not all(isinstance(part, Tensor) and is_plain(part) for part in parts):
        return None
    apart = len({part.untyped_storage().data_ptr() for part in parts}) == len(parts)
    return sum(part.nbytes for part in parts) if apart else None


def _copy(batch: Any) -> Any:
    return apply_to_collection(batch, Tensor, Tensor.clone)
