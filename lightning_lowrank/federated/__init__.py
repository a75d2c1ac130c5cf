"""Clients, partitions, rounds, and the callback that runs them."""

from lightning_lowrank.federated.algorithm import Algorithm, LocalStep
from lightning_lowrank.federated.attacks import (
    ALIE,
    Attack,
    GaussianNoise,
    InnerProduct,
    LabelFlip,
    Scaled,
    SignFlip,
)
from lightning_lowrank.federated.client_optimizers import register_elementwise
from lightning_lowrank.federated.data import (
    IID,
    ByKey,
    ClientIndices,
    Dirichlet,
    FromIndices,
    LabelCount,
    LabelTable,
    Partition,
    find_labels,
)
from lightning_lowrank.federated.execution.processes import ClientParallelStrategy
from lightning_lowrank.federated.ledger import Ledger
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.objective import MaskAbsentClasses, Objective
from lightning_lowrank.federated.privacy import ClientPrivacy
from lightning_lowrank.federated.safe_files import WholeCheckpoints
from lightning_lowrank.federated.stages import Arrival, RoundStage
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server
from lightning_lowrank.federated.system import DeviceClasses, Distribution, LogNormal, SystemModel
from lightning_lowrank.federated.traces import AvailabilityTrace, Trace

__all__ = [
    "ALIE",
    "IID",
    "Algorithm",
    "Arrival",
    "Attack",
    "AvailabilityTrace",
    "Base",
    "ByKey",
    "ClientContext",
    "ClientIndices",
    "ClientInfo",
    "ClientParallelStrategy",
    "ClientPrivacy",
    "DeviceClasses",
    "Dirichlet",
    "Distribution",
    "FederatedLoop",
    "FromIndices",
    "GaussianNoise",
    "InnerProduct",
    "LabelCount",
    "LabelFlip",
    "LabelTable",
    "Ledger",
    "LocalStep",
    "LogNormal",
    "MaskAbsentClasses",
    "Message",
    "Objective",
    "Partition",
    "RoundStage",
    "Scaled",
    "Server",
    "SignFlip",
    "SystemModel",
    "Trace",
    "WholeCheckpoints",
    "find_labels",
    "register_elementwise",
]
