"""How a few small tensors stand for one weight: what a form answers, and the forms there are."""

from lightning_lowrank.layers.factorization.base import (
    Factorization,
    HalfFrozen,
    Stage,
    factorization_from_dict,
    registered_factorizations,
)
from lightning_lowrank.layers.factorization.bilinear import BlockKronecker, MatrixProduct
from lightning_lowrank.layers.factorization.multilinear import CP, Hadamard

__all__ = [
    "CP",
    "BlockKronecker",
    "Factorization",
    "Hadamard",
    "HalfFrozen",
    "MatrixProduct",
    "Stage",
    "factorization_from_dict",
    "registered_factorizations",
]
