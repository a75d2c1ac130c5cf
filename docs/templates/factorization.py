"""A weight as left vectors, values and right vectors, ``U diag(S) Vᵀ`` (template).

A factorization is one file in ``lightning_lowrank/layers/factorization``. It holds no tensors: it answers, for a shape,
which factors there are, what they stand for, and how many numbers a rank takes. Its class name is what checkpoints and
the command line call it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_lowrank.layers import Factorization


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of the weight as a matrix: output channels, and all else."""
    return shape[0], math.prod(shape[1:])


class Diagonal(Factorization):
    """``U diag(S) Vᵀ`` of rank r: (rows + columns + 1) r numbers, all of them trained."""

    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        rows, columns = _sides(shape)
        return {"U": (rows, rank), "S": (rank,), "V": (columns, rank)}

    def max_rank(self, shape: Sequence[int], half_frozen: bool | str = False) -> int:
        return min(_sides(shape))

    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: bool | str = False) -> int:
        # Refuses half_frozen, for which a form needs to be bilinear: factors U and V alone.
        self.trained_factors(shape, half_frozen)
        rank = max(1, math.ceil(ratio * math.prod(shape) / (sum(_sides(shape)) + 1) - 1e-9))
        if not ratio > 0 or rank > self.max_rank(shape):
            raise ValueError(f"ratio must be above 0 and not need more than rank {self.max_rank(shape)}, got {ratio}.")
        return rank

    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        # Out of place, for it is differentiated, and mapped over clients.
        return ((factors["U"] * factors["S"]) @ factors["V"].mT).reshape(tuple(shape))

    def compose_multiply_adds(self, shape: Sequence[int], rank: int) -> int:
        return math.prod(shape) * rank

    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        self.check_rank(weight.shape, rank)
        matrix = weight.detach().flatten(1).double()
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        factors = {"U": left[:, :rank], "S": values[:rank], "V": right[:rank].mT}
        return {name: factor.to(weight.dtype).contiguous() for name, factor in factors.items()}

    # An update begins with V = 0 and the others uniform in (-a, a), whose variance is a²/3.

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        # A step on V changes the weight by UU'SS' times the dense step: rank · (a²/3)² = 1.
        return math.sqrt(3 / math.sqrt(rank))

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        # A number of the weight is a sum of rank products of three: rank · (a²/3)³ = std².
        return math.sqrt(3 * (std**2 / rank) ** (1 / 3))
