"""The weight in canonical polyadic (CP) form."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import check_number
from lightning_lowrank.layers.factorization.base import (
    Factorization,
    HalfFrozen,
    Stage,
    ceil,
    check_two_dimensions,
    frozen_factor,
    working_precision,
)


class CP(Factorization):
    r"""The weight as a sum of ``rank`` outer products of one vector per dimension (canonical polyadic form).

    A linear weight has the factors ``U`` (dim0 × rank) and ``V`` (dim1 × rank) and is ``U Vᵀ``. With a kernel
    there is one factor more for each of its dimensions, ``K0`` (k₀ × rank) and so on:

    .. math:: W_{o i a b} = \sum_r U_{o r} V_{i r} K^0_{a r} K^1_{b r}

    As convolutions that is 1×1 (``V``), then one depthwise convolution for each kernel dimension (k×1, 1×k),
    then 1×1 (``U``). That is the form of TDPFed (Wang et al., Tensor Decomposition based Personalized Federated
    Learning, Eqs. 7 to 10).

    The rank for a ratio ρ is the integer nearest to ρN over the sum of the dimensions, N being the weight's
    numbers (a half goes down), and at least 1: the paper's Eqs. 21 and 22 solved for the rank, as in its
    Table I. A linear weight can be half-frozen, for which only the trained factor's dimension counts.

    Example:
        >>> cp = CP()
        >>> cp.rank_for_ratio((256, 128, 3, 3), 1 / 2)
        378
        >>> cp.factor_shapes((256, 128, 3, 3), rank=5)
        {'U': (256, 5), 'V': (128, 5), 'K0': (3, 5), 'K1': (3, 5)}
        >>> [stage.kernel for stage in cp.stage_shapes((256, 128, 3, 3), rank=5)]
        [(5, 128, 1, 1), (5, 1, 3, 1), (5, 1, 1, 3), (256, 5, 1, 1)]
    """

    @override
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: HalfFrozen = False) -> int:
        check_number("ratio", ratio, above=0)
        rank = max(1, ceil(ratio * math.prod(shape) / self.trained_numbers(shape, 1, half_frozen) - 0.5))
        return self._rank_within_max(shape, rank, ratio, half_frozen)

    @override
    def ratio_for_rank(self, shape: Sequence[int], rank: int, half_frozen: HalfFrozen = False) -> float:
        self.check_rank(shape, rank, half_frozen)
        return (rank + 0.5) * self.trained_numbers(shape, 1, half_frozen) / math.prod(shape)

    def max_rank(self, shape: Sequence[int], half_frozen: HalfFrozen = False) -> int:
        """The product of all dimensions but the largest, or the dimension of the frozen factor.

        That many terms make any weight: one for each line of numbers along the largest dimension.
        """
        self.trained_factors(shape, half_frozen)
        frozen = frozen_factor(half_frozen)
        return math.prod(shape) // max(shape) if frozen is None else shape["UV".index(frozen)]

    @override
    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        check_two_dimensions(shape)
        names = ("U", "V", *(f"K{position}" for position in range(len(shape) - 2)))
        return {name: (size, rank) for name, size in zip(names, shape, strict=True)}

    @override
    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        first, *others = (factors[name] for name in self.factor_names(shape))
        columns = others.pop()
        while others:
            columns = _rows_product(others.pop(), columns)
        return (first @ columns.mT).reshape(tuple(shape))

    @override
    def compose_multiply_adds(self, shape: Sequence[int], rank: int) -> int:
        check_two_dimensions(shape)
        partial = sum(math.prod(shape[start:]) for start in range(1, len(shape) - 1))
        return rank * (partial + math.prod(shape))

    def stage_shapes(self, shape: Sequence[int], rank: int) -> tuple[Stage, ...]:
        """The stages: ``V``, a depthwise convolution for each kernel dimension above 1, and ``U``.

        The factors of kernel dimensions of size 1 only scale, which is done to ``V``.
        """
        check_two_dimensions(shape)
        ones = [1] * (len(shape) - 2)
        depthwise = [
            Stage((rank, 1, *ones[:position], size, *ones[position + 1 :]), rank)
            for position, size in enumerate(shape[2:])
            if size > 1
        ]
        return Stage((rank, shape[1], *ones), 1), *depthwise, Stage((shape[0], rank, *ones), 1)

    @override
    def stages(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> list[Tensor]:
        first, *depthwise, last = self.stage_shapes(shape, factors["U"].shape[-1])
        kernels = [factors[name] for name in self.factor_names(shape)[2:]]
        right = factors["V"]
        for kernel, size in zip(kernels, shape[2:], strict=True):
            if size == 1:
                right = right * kernel
        spatial = [kernel for kernel, size in zip(kernels, shape[2:], strict=True) if size > 1]
        return [
            right.mT.reshape(first.kernel),
            *(kernel.mT.reshape(stage.kernel) for kernel, stage in zip(spatial, depthwise, strict=True)),
            factors["U"].reshape(last.kernel),
        ]

    @override
    def inner(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        first, *others = (left[name].mT @ right[name] for name in self.factor_names(shape))
        for gram in others:
            first = first * gram
        return first.sum()

    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """Factors from alternating least squares; the optimal ones for a linear weight.

        The iteration starts from the largest singular triples of the matrices that the weight's two largest
        dimensions span at each position of the others. For a linear weight, where they are the truncated singular
        value decomposition, and at :meth:`max_rank`, where they are exact, they are the result. Otherwise at most 30
        sweeps over the factors follow, none of which makes the error larger. The length of each term is split evenly
        over the factors.
        """
        self.check_rank(weight.shape, rank)
        target = working_precision(weight)
        factors, lengths = _largest_triples(target, rank)
        if weight.dim() > 2 and rank < self.max_rank(weight.shape):
            factors, lengths = _alternating_least_squares(target, factors, lengths)
        root = lengths ** (1 / weight.dim())
        names = self.factor_names(weight.shape)
        return {
            name: (factor * root).to(weight.dtype).contiguous() for name, factor in zip(names, factors, strict=True)
        }

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """The ``a`` with ``rank · (a²/3)ⁿ⁻¹ = 1``, n being the number of factors.

        The step is ``Σᵣ xᵣ (xᵣ · G)`` along ``V``'s dimension, ``xᵣ`` being the outer product of the other
        factors' columns, and ``E[xᵣ xᵣᵀ] = (a²/3)ⁿ⁻¹ · I``.
        """
        return math.sqrt(3 * rank ** (-1 / (len(self.factor_names(shape)) - 1)))

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """The ``a`` with ``rank · (a²/3)ⁿ = std²``, n being the number of factors."""
        return math.sqrt(3 * (std**2 / rank) ** (1 / len(self.factor_names(shape))))


def _rows_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply every row of ``left`` with every row of ``right``, number by number (Khatri-Rao)."""
    return (left.unsqueeze(-2) * right.unsqueeze(-3)).flatten(-3, -2)


def _largest_triples(weight: Tensor, rank: int) -> tuple[list[Tensor], Tensor]:
    """Start of the iteration: unit columns for each dimension, and lengths, from singular triples of slices."""
    by_size = sorted(range(weight.dim()), key=lambda dimension: -weight.shape[dimension])
    rows, columns, others = by_size[0], by_size[1], sorted(by_size[2:])
    positions = tuple(weight.shape[dimension] for dimension in others)
    slices = weight.permute(*others, rows, columns).reshape(-1, weight.shape[rows], weight.shape[columns])
    left, values, right = torch.linalg.svd(slices, full_matrices=False)
    lengths, chosen = values.flatten().sort(descending=True, stable=True)
    lengths, chosen = lengths[:rank], chosen[:rank]
    place, term = chosen // values.shape[1], chosen % values.shape[1]
    factors = {rows: left[place, :, term].mT, columns: right[place, term].mT}
    for dimension, index in zip(others, torch.unravel_index(place, positions) if others else (), strict=True):
        factors[dimension] = F.one_hot(index, weight.shape[dimension]).mT.to(weight.dtype)
    return [factors[dimension] for dimension in range(weight.dim())], lengths


def _alternating_least_squares(
    weight: Tensor, factors: list[Tensor], lengths: Tensor, sweeps: int = 30
) -> tuple[list[Tensor], Tensor]:
    """Improve a CP decomposition, solving for one factor after another, until a sweep gains less than 0.01 %.

    A small pull towards the factor's last value takes the place of a ridge: it makes the normal equations
    solvable without ever making the error larger.
    """
    count, rank = weight.dim(), len(lengths)
    factors = list(factors)
    grams = [factor.mT @ factor for factor in factors]
    pull = 10 * torch.finfo(weight.dtype).eps * rank
    identity = torch.eye(rank, dtype=weight.dtype, device=weight.device)
    matrix = weight.reshape(weight.shape[0], -1)
    tiny = torch.finfo(weight.dtype).tiny
    square = weight.square().sum()
    before = math.inf
    for _ in range(sweeps):
        for solved in range(count):
            if solved == 0:
                projected = matrix @ functools.reduce(_rows_product, factors[1:])
            else:
                if solved == 1:
                    partial = (matrix.mT @ factors[0]).reshape(*weight.shape[1:], rank)
                operands: list[Any] = [partial, [*range(1, count), count]]
                for other in range(1, count):
                    if other != solved:
                        operands += [factors[other], [other, count]]
                projected = torch.einsum(*operands, [solved, count])
            normal = functools.reduce(torch.mul, (grams[other] for other in range(count) if other != solved))
            pulled = projected + pull * lengths * factors[solved]
            solution = torch.linalg.solve(normal + pull * identity, pulled, left=False)
            lengths = solution.norm(dim=0)
            factors[solved] = solution / lengths.clamp_min(tiny)
            grams[solved] = factors[solved].mT @ factors[solved]
        error = (square - 2 * (projected * solution).sum() + (normal * (solution.mT @ solution)).sum()).item()
        if error > (1 - 1e-4) * before:
            break
        before = error
    return factors, lengths
