"""Aggregation-broadcast operators for LoRA: from the clients' factors to those that each client receives."""

from lightning_lowrank.aggregation.adapters import Adapter, find_adapters
from lightning_lowrank.aggregation.aggregator import Aggregator, KeepsArrivals, Peers
from lightning_lowrank.aggregation.averaging import FFA, RBLA, FedSA, LoRAA2, ProductSum, RoLoRA, ZeroPadding
from lightning_lowrank.aggregation.clustering import FedInc
from lightning_lowrank.aggregation.convergence import ConvergenceConstants, convergence_constants
from lightning_lowrank.aggregation.inputs import Broadcast, Factors
from lightning_lowrank.aggregation.mean import WeightedMean
from lightning_lowrank.aggregation.operator import Operator
from lightning_lowrank.aggregation.pairs import LowRankPair
from lightning_lowrank.aggregation.products import CoLR, FedEx, FLoRA, LoRAFair, SumProduct

__all__ = [
    "FFA",
    "RBLA",
    "Adapter",
    "Aggregator",
    "Broadcast",
    "CoLR",
    "ConvergenceConstants",
    "FLoRA",
    "Factors",
    "FedEx",
    "FedInc",
    "FedSA",
    "KeepsArrivals",
    "LoRAA2",
    "LoRAFair",
    "LowRankPair",
    "Operator",
    "Peers",
    "ProductSum",
    "RoLoRA",
    "SumProduct",
    "WeightedMean",
    "ZeroPadding",
    "convergence_constants",
    "find_adapters",
]
