"""The label of each sample of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Dataset

from lightning_lowrank.federated.data.columns import call_on, describe, find_column

_ADVICE = (
    "labels must be one integer or string for each sample. For regression targets, several labels or one-hot"
    " vectors give FederatedLoop(labels=...), a function dataset -> labels that says how to group the samples."
)
_FIELDS = ("label", "labels", "target")


def find_labels(dataset: Dataset, labels: Callable[[Any], Any] | None = None) -> Tensor:
    """Find the label of each sample of a dataset.

    The labels are the first of these with one entry for each sample: the dataset's ``targets``, its ``labels``, the
    last of its ``tensors`` (each found through `torch.utils.data.Subset` and `torch.utils.data.ConcatDataset` as well).
    Such attributes are read without loading a sample, so transforms of the targets are not applied. The same is true of
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
    return find_named_labels(dataset, labels)[0]


def find_named_labels(
    dataset: Dataset, labels: Callable[[Any], Any] | None = None
) -> tuple[Tensor, tuple[str, ...] | None]:
    """Labels as `find_labels` finds them; for string labels also the name of each number, else ``None``."""
    if labels is not None:
        values = call_on(dataset, labels, "labels", _ADVICE)
    else:
        values = find_column(dataset, ("targets", "labels", "tensors"), _FIELDS, _label_of, "labels", _ADVICE)
    if values.dtype.kind != "U":
        return torch.from_numpy(values.astype(np.int64)), None
    names, codes = np.unique(values, return_inverse=True)
    return torch.from_numpy(codes.astype(np.int64)), tuple(names.tolist())


def renumber_like(labels: Tensor, names: Sequence[str] | None, wanted: Sequence[str] | None) -> Tensor:
    """Renumber the labels of one dataset like those of another, such as a validation set's like the training set's.

    Args:
        labels: Labels of the first dataset, as `find_named_labels` finds them.
        names: Their names.
        wanted: Names of the second dataset's labels.

    Returns:
        For strings, the position of each sample's name among ``wanted``, and -1 if it is not; integers as they are.

    Raises:
        MisconfigurationException: If the labels of only one of the two are strings.
    """
    if names is None and (wanted is None or not len(labels)):
        return labels
    if names is None or wanted is None:
        raise MisconfigurationException(
            f"the labels of one data set are strings, such as {(names or wanted or [''])[0]!r}, and those of another"
            " are integers, so that they cannot be compared: give both the same, or FederatedLoop(labels=...), a"
            " function dataset -> labels."
        )
    numbers = {name: number for number, name in enumerate(wanted)}
    return torch.tensor([numbers.get(name, -1) for name in names], dtype=torch.int64)[labels]


def _label_of(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        for name in _FIELDS:
            if name in sample:
                return sample[name]
    elif isinstance(sample, (tuple, list)) and len(sample) > 1:
        return sample[1]
    raise MisconfigurationException(
        f"no label can be found in the dataset's samples ({describe(sample)}): they should be (input, label,"
        " ...) or dictionaries with 'label', 'labels' or 'target'. Otherwise give FederatedLoop(labels=...), a"
        " function dataset -> labels."
    )


def check_labels(labels: Tensor, size: int) -> Tensor:
    """Check labels, and return them as int64 on the CPU.

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
