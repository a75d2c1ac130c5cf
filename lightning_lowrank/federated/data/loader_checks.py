"""Checks of the user's loaders: whether they can be read client by client, and which settings are kept.

`RoundData`, `ClientEvaluation` and `DifferentialPrivacy` check loaders before they read their datasets by index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from lightning_lowrank.arguments import join_names
from lightning_lowrank.federated.data.lengths import LengthGroupedSampler


def lengths_of(loader: DataLoader) -> Tensor | None:
    """The samples' lengths, if the loader groups batches by length, else ``None``."""
    return loader.sampler.lengths if isinstance(loader.sampler, LengthGroupedSampler) else None


def weights_of(loader: DataLoader) -> Tensor | None:
    """The samples' weights, if the loader draws samples by weight, else ``None``."""
    return loader.sampler.weights if isinstance(loader.sampler, WeightedRandomSampler) else None


def check_loader(loader: Any, training: bool = True, weighted: bool = False) -> DataLoader:
    """Check that a loader's dataset can be read by sample indices, and return the loader.

    It is the given one, or if a `torch.utils.data.BatchSampler` makes its batches, one with a ``batch_size`` that
    has the same batches.

    Args:
        loader: The result of the user's hook.
        training: Whether batches are drawn as the loader's sampler draws them. Otherwise only its dataset is read, and
            a list with just one loader will do.
        weighted: Whether a `torch.utils.data.WeightedRandomSampler` may draw, with replacement.

    Raises:
        MisconfigurationException: If it is anything but a plain `torch.utils.data.DataLoader` over a map-style
            dataset, all of it in order or shuffled.

    Example:
        >>> data = torch.arange(10.0, 15.0)
        >>> sampler = BatchSampler(SequentialSampler(data), 2, drop_last=False)
        >>> plain = check_loader(DataLoader(data, batch_size=None, sampler=sampler))
        >>> plain.batch_size, [batch.tolist() for batch in plain]
        (2, [[10.0, 11.0], [12.0, 13.0], [14.0]])
    """
    hook = "train_dataloader()" if training else "val_dataloader() and test_dataloader()"
    if not training and isinstance(loader, (list, tuple)) and len(loader) == 1:
        (loader,) = loader
    needed = f"{hook} must return one plain torch.utils.data.DataLoader, whose dataset is read by the samples' indices;"
    if not isinstance(loader, DataLoader):
        several = f" of {len(loader)} loaders" if isinstance(loader, (list, tuple, dict)) else ""
        raise MisconfigurationException(f"{needed} got {type(loader).__name__}{several}.")
    if isinstance(loader.dataset, IterableDataset):
        raise MisconfigurationException(
            f"{needed} got one of {type(loader.dataset).__name__}, an IterableDataset without indices: give a map-style"
            " dataset (with __getitem__ and __len__)."
        )
    if isinstance(loader.dataset, Mapping) and all(isinstance(name, str) for name in loader.dataset):
        splits = join_names([repr(name) for name in loader.dataset])
        raise MisconfigurationException(
            f"{needed} got one of a {type(loader.dataset).__name__} with the entries {splits}, not of samples: give one"
            f" of its data sets, such as dataset[{next(iter(loader.dataset), 'train')!r}]."
        )
    if not hasattr(loader.dataset, "__len__"):
        raise MisconfigurationException(
            f"{needed} got one of {type(loader.dataset).__module__}.{type(loader.dataset).__name__}, which has no"
            " length: give a map-style dataset (with __getitem__ and __len__)."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise MisconfigurationException(
            f"{needed} {type(loader).__name__} has its own __iter__(), which would be replaced: move its work into the"
            " dataset or collate_fn."
        )
    if loader.batch_size is None:
        sized = _with_batch_size(loader)
        if sized is None:
            raise MisconfigurationException(
                f"{needed} got one with a batch_sampler or batch_size=None, whose batches cannot be cut client by"
                " client: give it batch_size and shuffle, or a plain torch.utils.data.BatchSampler."
            )
        loader = sized
    sampler: Any = loader.sampler
    if weighted and type(sampler) is WeightedRandomSampler:
        _check_weights(sampler, len(loader.dataset), needed)
        return loader
    # Exact types only: a subclass may draw in its own way.
    plain = type(sampler) in (SequentialSampler, RandomSampler, LengthGroupedSampler)
    part = ""
    if plain and sampler.data_source is not loader.dataset:
        drawn, size = len(sampler.data_source), len(loader.dataset)
        part = f" over {drawn} of {size} samples" if drawn != size else ""
    if plain and training and isinstance(sampler, RandomSampler):
        plain = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if not plain or part:
        raise MisconfigurationException(
            f"{needed} got one that draws with {type(sampler).__name__}{part}, which cannot be done client by client:"
            " use shuffle=True or shuffle=False without a sampler, and choose samples with torch.utils.data.Subset."
        )
    return loader


def _check_weights(sampler: WeightedRandomSampler, samples: int, needed: str) -> None:
    weights = sampler.weights
    if not (len(weights) == sampler.num_samples == samples and sampler.replacement):
        raise MisconfigurationException(
            f"{needed} got one whose WeightedRandomSampler draws {sampler.num_samples} of {samples} samples by"
            f" {len(weights)} weights with replacement={sampler.replacement}: each client draws as many as it holds, so"
            " give each sample a weight, num_samples=len(dataset), and replacement=True."
        )
    if not (weights.isfinite() & (weights >= 0)).all():
        wrong = weights[~(weights.isfinite() & (weights >= 0))]
        raise MisconfigurationException(
            f"{needed} got one whose WeightedRandomSampler has the weight {float(wrong[0])}: weights must be 0 or more,"
            " and finite."
        )


class _ReadByLists(Subset):
    """A whole dataset whose ``__getitem__`` takes a list of indices and returns a batch."""

    is_wrapper = True

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, range(len(dataset)))  # type: ignore[arg-type]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset[indices]


def _with_batch_size(loader: DataLoader) -> DataLoader | None:
    """An equal loader with a ``batch_size`` in place of a plain `torch.utils.data.BatchSampler`; else ``None``."""
    dataset: Dataset = loader.dataset
    batches: Any = loader.batch_sampler
    if batches is None:
        batches, dataset = loader.sampler, _ReadByLists(dataset)
    if type(batches) is not BatchSampler:
        return None
    made = {"batch_size": batches.batch_size, "sampler": batches.sampler, "drop_last": batches.drop_last}
    return loader_like(loader, dataset, **made)


def loader_like(loader: DataLoader, dataset: Dataset, **batches: Any) -> DataLoader:
    """A loader with other ``batches``, and with the workers, pinned memory and collate function of ``loader``."""
    of_workers = ("multiprocessing_context", "prefetch_factor", "persistent_workers") if loader.num_workers else ()
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", *of_workers)
    return DataLoader(dataset, **{name: getattr(loader, name) for name in kept} | batches, generator=torch.Generator())


def batches_of(samples: np.ndarray, loader: DataLoader) -> np.ndarray:
    """The number of batches in one pass, for each number of samples."""
    size = cast(int, loader.batch_size)
    return samples // size if loader.drop_last else -(-samples // size)


def last_batch_is_single(samples: int, loader: DataLoader) -> bool:
    """Whether the last batch of a pass over ``samples`` samples has a single sample.

    Example:
        >>> loader = DataLoader(range(100), batch_size=8)
        >>> [last_batch_is_single(samples, loader) for samples in (0, 1, 8, 17)]
        [False, True, False, True]
    """
    size = cast(int, loader.batch_size)
    return samples > 0 and (size == 1 or (samples % size == 1 and not loader.drop_last))
