"""Low-rank, communication-efficient federated learning as PyTorch Lightning callbacks.

The names below are imported when one of them is first used: Lightning takes seconds, and the commands ``export`` and
``report`` do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_lowrank.aggregation import (
        FFA,
        RBLA,
        Aggregator,
        Bucketing,
        CenteredClipping,
        CoLR,
        CoordinateMedian,
        FedEx,
        FedInc,
        FedSA,
        FedSVD,
        FLoRA,
        GeometricMedian,
        Krum,
        LoRAA2,
        LoRAFair,
        MultiKrum,
        NearestNeighborMixing,
        NormBound,
        ProductSum,
        RoLoRA,
        SumProduct,
        TrimmedMean,
        WeightedMean,
        ZeroPadding,
    )
    from lightning_lowrank.algorithms import (
        EF21P,
        MOON,
        SCAFFOLD,
        Ditto,
        FedAdam,
        FedAvg,
        FedAvgM,
        FedBAT,
        FedBN,
        FedDyn,
        FedHM,
        FedLoRA,
        FedMUD,
        FedNova,
        FedNTD,
        FedPer,
        FedProx,
        FedSB,
        FedSLoP,
        FedYogi,
        GradientMask,
        HeteroFL,
        LocalTraining,
        PFedMe,
        RandomCoordinates,
        RandomMask,
        Ravan,
        SlidingWindowMask,
        SplitMix,
        TDPFed,
    )
    from lightning_lowrank.algorithms.split_mix import Ensemble
    from lightning_lowrank.callbacks.convergence_monitor import ConvergenceMonitor
    from lightning_lowrank.callbacks.differential_privacy import DifferentialPrivacy
    from lightning_lowrank.callbacks.lowrank import LowRank
    from lightning_lowrank.callbacks.static_batch_norm import StaticBatchNorm
    from lightning_lowrank.callbacks.trained_checkpoints import TrainedCheckpoints
    from lightning_lowrank.compression import Half, Quantize, RandomK, Sign, TopK
    from lightning_lowrank.federated import (
        ALIE,
        IID,
        Algorithm,
        Attack,
        ByKey,
        ClientContext,
        ClientIndices,
        ClientInfo,
        ClientParallelStrategy,
        ClientPrivacy,
        DeviceClasses,
        Dirichlet,
        Distribution,
        FederatedLoop,
        FromIndices,
        GaussianNoise,
        InnerProduct,
        LabelCount,
        LabelFlip,
        LogNormal,
        MaskAbsentClasses,
        Message,
        Objective,
        Partition,
        Scaled,
        Server,
        SignFlip,
        SystemModel,
        Trace,
        WholeCheckpoints,
    )
    from lightning_lowrank.interop import export_adapter, import_adapter, load_dense
    from lightning_lowrank.layers import (
        CP,
        BlockKronecker,
        CoreProduct,
        Factorization,
        Hadamard,
        MatrixProduct,
        convert,
        merge,
        recover,
        unmerge,
    )
    from lightning_lowrank.optim import ProjectedAdamW, ProjectedSGD

__version__ = "0.1.0"

__all__ = [
    "ALIE",
    "CP",
    "EF21P",
    "FFA",
    "IID",
    "MOON",
    "RBLA",
    "SCAFFOLD",
    "Aggregator",
    "Algorithm",
    "Attack",
    "BlockKronecker",
    "Bucketing",
    "ByKey",
    "CenteredClipping",
    "ClientContext",
    "ClientIndices",
    "ClientInfo",
    "ClientParallelStrategy",
    "ClientPrivacy",
    "CoLR",
    "ConvergenceMonitor",
    "CoordinateMedian",
    "CoreProduct",
    "DeviceClasses",
    "DifferentialPrivacy",
    "Dirichlet",
    "Distribution",
    "Ditto",
    "Ensemble",
    "FLoRA",
    "Factorization",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBAT",
    "FedBN",
    "FedDyn",
    "FedEx",
    "FedHM",
    "FedInc",
    "FedLoRA",
    "FedMUD",
    "FedNTD",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedSA",
    "FedSB",
    "FedSLoP",
    "FedSVD",
    "FedYogi",
    "FederatedLoop",
    "FromIndices",
    "GaussianNoise",
    "GeometricMedian",
    "GradientMask",
    "Hadamard",
    "Half",
    "HeteroFL",
    "InnerProduct",
    "Krum",
    "LabelCount",
    "LabelFlip",
    "LoRAA2",
    "LoRAFair",
    "LocalTraining",
    "LogNormal",
    "LowRank",
    "MaskAbsentClasses",
    "MatrixProduct",
    "Message",
    "MultiKrum",
    "NearestNeighborMixing",
    "NormBound",
    "Objective",
    "PFedMe",
    "Partition",
    "ProductSum",
    "ProjectedAdamW",
    "ProjectedSGD",
    "Quantize",
    "RandomCoordinates",
    "RandomK",
    "RandomMask",
    "Ravan",
    "RoLoRA",
    "Scaled",
    "Server",
    "Sign",
    "SignFlip",
    "SlidingWindowMask",
    "SplitMix",
    "StaticBatchNorm",
    "SumProduct",
    "SystemModel",
    "TDPFed",
    "TopK",
    "Trace",
    "TrainedCheckpoints",
    "TrimmedMean",
    "WeightedMean",
    "WholeCheckpoints",
    "ZeroPadding",
    "convert",
    "export_adapter",
    "import_adapter",
    "load_dense",
    "merge",
    "recover",
    "unmerge",
]

_PACKAGES = ("aggregation", "algorithms", "callbacks", "compression", "federated", "interop", "layers", "optim")
_HOMES = (*_PACKAGES, "algorithms.split_mix")
"""The modules that the names come from."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # All at once: a class can be named in a YAML file without its module once that has been imported.
    homes = [vars(import_module(f"{__name__}.{home}")) for home in _HOMES]
    globals().update({each: next(home[each] for home in homes if each in home) for each in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *__all__})
