"""Clients, partitions, rounds, and the callback that runs them."""

from lightning_lowrank.federated.algorithm import Algorithm, Claims, LocalStep, detached, zeros_like
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
from lightning_lowrank.federated.clock import DeviceClasses, Distribution, LogNormal, SystemModel
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
from lightning_lowrank.federated.device_traces import AvailabilityTrace, Trace
from lightning_lowrank.federated.execution.processes import ClientParallelStrategy
from lightning_lowrank.federated.ledger import Ledger
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.objective import MaskAbsentClasses, Objective
from lightning_lowrank.federated.privacy import ClientPrivacy
from lightning_lowrank.federated.protocols import ChangesBase, OwnCodec, OwnSteps, Personal, UnequalClients
from lightning_lowrank.federated.safe_files import WholeCheckpoints
from lightning_lowrank.federated.stages import Arrival, RoundStage
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into

__all__ = [
    "ALIE",
    "IID",
    "Algorithm",
    "Arrival",
    "Attack",
    "AvailabilityTrace",
    "Base",
    "ByKey",
    "ChangesBase",
    "Claims",
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
    "OwnCodec",
    "OwnSteps",
    "Partition",
    "Personal",
    "RoundStage",
    "Scaled",
    "Server",
    "SignFlip",
    "SystemModel",
    "Trace",
    "UnequalClients",
    "WholeCheckpoints",
    "copy_into",
    "detached",
    "find_labels",
    "register_elementwise",
    "zeros_like",
]
