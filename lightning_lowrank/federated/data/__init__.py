"""Partitions of the training set, cohorts of rounds, and the order of batches."""

from lightning_lowrank.federated.data.from_indices import FromIndices
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.data.label_table import LabelTable
from lightning_lowrank.federated.data.labels import find_labels
from lightning_lowrank.federated.data.partitions import IID, ByKey, Dirichlet, LabelCount, Partition

__all__ = [
    "IID",
    "ByKey",
    "ClientIndices",
    "Dirichlet",
    "FromIndices",
    "LabelCount",
    "LabelTable",
    "Partition",
    "find_labels",
]
