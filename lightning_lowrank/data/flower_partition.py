"""`FlowerPartition`: partitioners of Flower Datasets as partitions of this package."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Dataset

from lightning_lowrank.extras import import_extra
from lightning_lowrank.federated.data import ByKey, ClientIndices, Partition, find_labels
from lightning_lowrank.federated.data.columns import Column, length_of

_ROW = "lightning_lowrank.row"


class FlowerPartition(Partition):
    """A division by a partitioner of Flower Datasets (``flwr_datasets.partitioner``).

    The partitioner sees a `datasets.Dataset` with one row for each sample and one column, by which it may divide. The
    samples themselves are not read, so that any dataset can be divided. Samples that the partitioner leaves
    out are unused. It draws by its own seed; the experiment's seed changes nothing. Clients of a
    ``NaturalIdPartitioner`` have its ids as names. Needs the extra ``datasets``.

    Args:
        partitioner: A partitioner that has no dataset yet. It is copied, and stays as it is.
        column: Name of the column, which the partitioner calls ``partition_by``. ``None``: there is none, and nothing
            of the training set is read, as for ``IidPartitioner``.
        key: The values of the column. ``None``: the samples' labels, as `find_labels` finds them. Else what `ByKey`
            takes: a name, or a function of the dataset.

    Raises:
        MisconfigurationException: If ``partitioner`` is no such object or has a dataset, if the column's values cannot
            be found, if the partitioner refuses to divide or gives a sample twice, or if ``clients`` is given and is
            not its number of partitions.

    Example:
        >>> from flwr_datasets.partitioner import DirichletPartitioner  # doctest: +SKIP
        >>> partitioner = DirichletPartitioner(num_partitions=10, partition_by="label", alpha=0.5)  # doctest: +SKIP
        >>> partition = FlowerPartition(partitioner)  # doctest: +SKIP
    """

    def __init__(
        self, partitioner: Any, column: str | None = "label", key: Callable[[Any], Any] | str | None = None
    ) -> None:
        if not callable(getattr(partitioner, "load_partition", None)):
            raise MisconfigurationException(
                "partitioner must be an object of flwr_datasets.partitioner, such as IidPartitioner(10), got"
                f" {partitioner!r} of type {type(partitioner).__name__}."
            )
        if partitioner.is_dataset_assigned():
            raise MisconfigurationException(
                f"partitioner={type(partitioner).__name__} already has a dataset, which cannot be replaced: make a new"
                " partitioner."
            )
        if column is None and key is not None:
            raise MisconfigurationException(
                f"key={key!r} describes the values of a column, but column is None: give the column's name."
            )
        self.partitioner = partitioner
        self.column = column
        self.key = key

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.partitioner).__name__}, column={self.column!r})"

    def result_arguments(self) -> dict[str, Any]:
        """The arguments that a resumed run compares; the division itself is compared by its digest."""
        return {"partitioner": type(self.partitioner).__name__, "column": self.column, "key": self.key}

    def find_keys(self, dataset: Dataset) -> Column:
        """The column's values; without a column, each sample's index."""
        if self.column is None:
            return np.arange(length_of(dataset))
        return find_labels(dataset).numpy() if self.key is None else ByKey(self.key).find_keys(dataset)

    def count_clients(self, clients: int | None, keys: Column | None) -> int:
        """The number of partitions."""
        number = self._asked(keys, lambda partitioner: int(partitioner.num_partitions))
        if clients is not None and clients != number:
            raise MisconfigurationException(
                f"clients={clients}, but {type(self.partitioner).__name__} makes {number} partitions: set"
                f" clients={number}, or leave it out."
            )
        return number

    def assign(self, size: int, clients: int, seed: int, labels: Tensor | None, keys: Column | None) -> ClientIndices:
        """See `Partition.assign`."""

        def divide(partitioner: Any) -> tuple[list[list[int]], list[str | int] | None]:
            parts = [sorted(partitioner.load_partition(client)[_ROW][:]) for client in range(clients)]
            # A NaturalIdPartitioner has names.
            names = getattr(partitioner, "partition_id_to_natural_id", None)
            return parts, [names[client] for client in range(clients)] if names else None

        parts, names = self._asked(keys, divide)
        return ClientIndices(parts, size, names)

    def _asked(self, keys: Column | None, question: Callable[[Any], Any]) -> Any:
        """The result of ``question`` for a copy of the partitioner that has the column as its dataset."""
        if keys is None:
            raise MisconfigurationException(
                "FlowerPartition needs the training set: give the dataset instead of its size, or keys=."
            )
        datasets = import_extra("datasets", "FlowerPartition")
        columns = {_ROW: range(len(keys)), **({} if self.column is None else {self.column: keys.tolist()})}
        partitioner = copy.deepcopy(self.partitioner)
        partitioner.dataset = datasets.Dataset.from_dict({name: list(values) for name, values in columns.items()})
        try:
            return question(partitioner)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise MisconfigurationException(
                f"{type(partitioner).__name__} cannot divide {len(keys)} samples by the column {self.column!r}:"
                f" {type(error).__name__}: {error}"
            ) from error
