"""Clients, partitions, rounds, and the callback that runs them."""

from lightning_lowrank.federated.algorithm import Algorithm
from lightning_lowrank.federated.client import Client, Server
from lightning_lowrank.federated.client_parallel import ClientParallelStrategy
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.partition import (
    IID,
    ByKey,
    ClientIndices,
    Dirichlet,
    FromIndices,
    LabelCount,
    Partition,
    find_labels,
)
from lightning_lowrank.federated.payload import Ledger, Payload

__all__ = [
    "IID",
    "Algorithm",
    "ByKey",
    "Client",
    "ClientIndices",
    "ClientParallelStrategy",
    "Dirichlet",
    "FederatedLoop",
    "FromIndices",
    "LabelCount",
    "Ledger",
    "Partition",
    "Payload",
    "Server",
    "find_labels",
]
