"""What a low-rank weight is, the layers that have one, and converting a model to them and back."""

from lightning_lowrank.layers.conversion import (
    BudgetRule,
    Conversion,
    LayerReport,
    LayerSpec,
    convert,
    dense_state_dict,
    low_rank_layers,
    recover,
)
from lightning_lowrank.layers.factorization import (
    BlockKronecker,
    Factorization,
    MatrixProduct,
    factorization_from_dict,
    registered_factorizations,
)
from lightning_lowrank.layers.modules import Init, LowRankConv2d, LowRankLayer, LowRankLinear, Role

__all__ = [
    "BlockKronecker",
    "BudgetRule",
    "Conversion",
    "Factorization",
    "Init",
    "LayerReport",
    "LayerSpec",
    "LowRankConv2d",
    "LowRankLayer",
    "LowRankLinear",
    "MatrixProduct",
    "Role",
    "convert",
    "dense_state_dict",
    "factorization_from_dict",
    "low_rank_layers",
    "recover",
    "registered_factorizations",
]
