"""How arrivals become one value: means, robust rules, and aggregation-broadcast operators for LoRA's factors."""

from lightning_lowrank.aggregation.adapters import Adapter, find_adapters, keep_base_changes
from lightning_lowrank.aggregation.aggregator import Aggregator, KeepsArrivals, Peers
from lightning_lowrank.aggregation.averaging import FFA, RBLA, FedSA, FedSVD, LoRAA2, ProductSum, RoLoRA, ZeroPadding
from lightning_lowrank.aggregation.clustering import FedInc
from lightning_lowrank.aggregation.convergence import ConvergenceConstants, convergence_constants
from lightning_lowrank.aggregation.inputs import Broadcast, Factors
from lightning_lowrank.aggregation.mean import WeightedMean
from lightning_lowrank.aggregation.operator import Operator
from lightning_lowrank.aggregation.pairs import LowRankPair
from lightning_lowrank.aggregation.preaggregation import Bucketing, NearestNeighborMixing, PreAggregation
from lightning_lowrank.aggregation.products import CoLR, FedEx, FLoRA, FLoRIST, LoRAFair, RaFLoRA, SumProduct
from lightning_lowrank.aggregation.robust import (
    CenteredClipping,
    CoordinateMedian,
    CoordinateRule,
    DistanceRule,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormBound,
    RobustRule,
    TrimmedMean,
)
from lightning_lowrank.aggregation.robust_pca import FedRPCA

__all__ = [
    "FFA",
    "RBLA",
    "Adapter",
    "Aggregator",
    "Broadcast",
    "Bucketing",
    "CenteredClipping",
    "CoLR",
    "ConvergenceConstants",
    "CoordinateMedian",
    "CoordinateRule",
    "DistanceRule",
    "FLoRA",
    "FLoRIST",
    "Factors",
    "FedEx",
    "FedInc",
    "FedRPCA",
    "FedSA",
    "FedSVD",
    "GeometricMedian",
    "KeepsArrivals",
    "Krum",
    "LoRAA2",
    "LoRAFair",
    "LowRankPair",
    "MultiKrum",
    "NearestNeighborMixing",
    "NormBound",
    "Operator",
    "Peers",
    "PreAggregation",
    "ProductSum",
    "RaFLoRA",
    "RoLoRA",
    "RobustRule",
    "SumProduct",
    "TrimmedMean",
    "WeightedMean",
    "ZeroPadding",
    "convergence_constants",
    "find_adapters",
    "keep_base_changes",
]
