"""LoRA: a module's adapters as pairs of factors, and operators that combine clients' pairs.

These names need torch alone. `FedLoRA`, the method over them, is in `lightning_lowrank.algorithms` with the others.
"""

from lightning_lowrank.internals.peft import keep_base_changes
from lightning_lowrank.lora.adapters import Adapter, find_adapters
from lightning_lowrank.lora.convergence import ConvergenceConstants, convergence_constants
from lightning_lowrank.lora.inputs import AggregatedRound, Broadcast, Factors
from lightning_lowrank.lora.operator import Operator
from lightning_lowrank.lora.operators.averaging import (
    FFA,
    RBLA,
    FedSA,
    FedSVD,
    LoRAA2,
    ProductSum,
    RoLoRA,
    ZeroPadding,
)
from lightning_lowrank.lora.operators.clustering import FedInc
from lightning_lowrank.lora.operators.products import CoLR, FedEx, FLoRA, FLoRIST, LoRAFair, RaFLoRA, SumProduct
from lightning_lowrank.lora.operators.robust_pca import FedRPCA
from lightning_lowrank.lora.pairs import LowRankPair

__all__ = [
    "FFA",
    "RBLA",
    "Adapter",
    "AggregatedRound",
    "Broadcast",
    "CoLR",
    "ConvergenceConstants",
    "FLoRA",
    "FLoRIST",
    "Factors",
    "FedEx",
    "FedInc",
    "FedRPCA",
    "FedSA",
    "FedSVD",
    "LoRAA2",
    "LoRAFair",
    "LowRankPair",
    "Operator",
    "ProductSum",
    "RaFLoRA",
    "RoLoRA",
    "SumProduct",
    "ZeroPadding",
    "convergence_constants",
    "find_adapters",
    "keep_base_changes",
]
