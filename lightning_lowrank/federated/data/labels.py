"""The label of each sample of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Dataset

from lightning_lowrank.federated.data.columns import call_on, describe, find_column

_ADVICE = (
    "labels must be one integer or string for each sample. For regression targets, several labels or one-hot"
    " vectors give labels=, a function dataset -> labels that says how to group the samples."
)
_FIELDS = ("label", "labels", "target")


def find_labels(dataset: Dataset, labels: Callable[[Any], Any] | None = None) -> Tensor:
    """Find the label of each sample of a dataset.

    The first of these that has one entry for each sample is taken: the dataset's ``targets``, its ``labels``, the last
    of its ``tensors`` (each found through `torch.utils.data.Subset` and `torch.utils.data.ConcatDataset` as well). Such
    attributes are read without loading a sample, so transforms of the targets are not applied. The same is true of
    the columns ``label``, ``labels`` or ``target`` of a `datasets.Dataset`, which are looked for next. Otherwise the
    dataset is read once: ``sample[1]`` of tuples and lists, ``sample["label"]``, ``["labels"]`` or ``["target"]`` of
    dictionaries. The global random number generators, which a dataset's augmentations may use, are given back as they
    were.

    Args:
        dataset: A map-style dataset.
        labels: A function that takes the dataset and returns one label for each sample, used instead of all this.

    Returns:
        Labels, int64, shape ``[len(dataset)]``. Integer labels are kept as they are; strings become their position
        among the sorted different ones.

    Raises:
        MisconfigurationException: If no labels are found, or they are not one integer or string for each sample (as
            regression targets and one-hot vectors are not).

    Example:
        >>> find_labels([(0.1, "dog"), (0.2, "cat"), (0.3, "dog")])
        tensor([1, 0, 1])
        >>> find_labels([0.1, 0.2, 0.3], labels=lambda dataset: [int(x > 0.15) for x in dataset])
        tensor([0, 1, 1])
    """
    if labels is not None:
        values = call_on(dataset, labels, "labels", _ADVICE)
    else:
        values = find_column(dataset, ("targets", "labels", "tensors"), _FIELDS, _label_of, "labels", _ADVICE)
    if values.dtype.kind == "U":
        values = np.unique(values, return_inverse=True)[1]
    return torch.from_numpy(values.astype(np.int64))


def _label_of(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        for name in _FIELDS:
            if name in sample:
                return sample[name]
    elif isinstance(sample, (tuple, list)) and len(sample) > 1:
        return sample[1]
    raise MisconfigurationException(
        f"no label can be found in the dataset's samples ({describe(sample)}): they should be (input, label,"
        " ...) or dictionaries with 'label', 'labels' or 'target'. Otherwise give labels=, a function dataset"
        " -> labels."
    )


def check_labels(labels: Tensor, size: int) -> Tensor:
    """Return labels as int64 on the CPU.

    Raises:
        MisconfigurationException: If they are not an integer tensor of shape ``[size]``.
    """
    integers = isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex()
    if not integers or labels.shape != (size,):
        got = type(labels).__name__
        if isinstance(labels, Tensor):
            got = f"{labels.dtype} of shape {list(labels.shape)}"
        raise MisconfigurationException(
            f"labels must be an integer tensor of shape [{size}], one label for each sample, got {got};"
            " find_labels(dataset) makes one."
        )
    return labels.detach().cpu().to(torch.int64)
