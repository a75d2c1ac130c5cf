"""Factorizations of a weight into a few small tensors: the base class, and one file for each."""

from lightning_lowrank.layers.factorization.base import Factorization, HalfFrozen, Stage, factorization_from_dict
from lightning_lowrank.layers.factorization.block_kronecker import BlockKronecker
from lightning_lowrank.layers.factorization.core_product import CoreProduct
from lightning_lowrank.layers.factorization.cp import CP
from lightning_lowrank.layers.factorization.hadamard import Hadamard
from lightning_lowrank.layers.factorization.matrix_product import MatrixProduct

__all__ = [
    "CP",
    "BlockKronecker",
    "CoreProduct",
    "Factorization",
    "Hadamard",
    "HalfFrozen",
    "MatrixProduct",
    "Stage",
    "factorization_from_dict",
]
