"""Checks of the contracts of methods, codecs, factorizations, operators, aggregators, partitions and stages.

Each check raises `AssertionError` if its contract is broken.
"""

from lightning_lowrank.testing.aggregator import check_aggregator
from lightning_lowrank.testing.algorithm import PARTS, Expected, check_algorithm
from lightning_lowrank.testing.codec import check_codec
from lightning_lowrank.testing.experiment import small_module
from lightning_lowrank.testing.factorization import check_factorization
from lightning_lowrank.testing.operator import check_operator
from lightning_lowrank.testing.partition import check_partition
from lightning_lowrank.testing.stage import check_stage

__all__ = [
    "PARTS",
    "Expected",
    "check_aggregator",
    "check_algorithm",
    "check_codec",
    "check_factorization",
    "check_operator",
    "check_partition",
    "check_stage",
    "small_module",
]
