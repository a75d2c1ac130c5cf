"""Factorizations, low-rank layers, and the conversion of a model to them and back."""

from lightning_lowrank.layers.attention import LowRankMultiheadAttention
from lightning_lowrank.layers.conversion import convert
from lightning_lowrank.layers.conversion_report import Conversion, LayerReport
from lightning_lowrank.layers.convolution import (
    LowRankConv1d,
    LowRankConv2d,
    LowRankConv3d,
    LowRankConvTranspose1d,
    LowRankConvTranspose2d,
    LowRankConvTranspose3d,
)
from lightning_lowrank.layers.decay import add_frobenius_decay, frobenius_norm_squared, frobenius_penalty
from lightning_lowrank.layers.factorization import (
    CP,
    BlockKronecker,
    CoreProduct,
    Factorization,
    Hadamard,
    HalfFrozen,
    MatrixProduct,
    Stage,
    factorization_from_dict,
)
from lightning_lowrank.layers.layer import LowRankLayer, keep_frozen, low_rank_layers
from lightning_lowrank.layers.linear import LowRankEmbedding, LowRankLinear
from lightning_lowrank.layers.recovery import LayerSpec, dense_state_dict, merge, recover, unmerge
from lightning_lowrank.layers.settings import LayerSettings, LowRankSettings
from lightning_lowrank.layers.survey import low_rank_class

__all__ = [
    "CP",
    "BlockKronecker",
    "Conversion",
    "CoreProduct",
    "Factorization",
    "Hadamard",
    "HalfFrozen",
    "LayerReport",
    "LayerSettings",
    "LayerSpec",
    "LowRankConv1d",
    "LowRankConv2d",
    "LowRankConv3d",
    "LowRankConvTranspose1d",
    "LowRankConvTranspose2d",
    "LowRankConvTranspose3d",
    "LowRankEmbedding",
    "LowRankLayer",
    "LowRankLinear",
    "LowRankMultiheadAttention",
    "LowRankSettings",
    "MatrixProduct",
    "Stage",
    "add_frobenius_decay",
    "convert",
    "dense_state_dict",
    "factorization_from_dict",
    "frobenius_norm_squared",
    "frobenius_penalty",
    "keep_frozen",
    "low_rank_class",
    "low_rank_layers",
    "merge",
    "recover",
    "unmerge",
]
