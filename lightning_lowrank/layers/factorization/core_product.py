"""The weight as a product of two matrices with a small core between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import check_integer, check_number
from lightning_lowrank.layers.factorization.base import Factorization, HalfFrozen, Stage, ceil, working_precision
from lightning_lowrank.layers.factorization.matrix_product import Layout, MatrixProduct


class CoreProduct(Factorization):
    r"""The weight as a matrix ``U C Vᵀ`` with a small square core ``C``, or a sum of several such products.

    With one head the core is ``H``, (rank × rank): LoRA-XS (Bałazy et al., 2024) and LoRA-SB (Ponkshe et al., 2024)
    train it alone. With several, ``U`` and ``V`` have ``rank`` columns for each head, and the weight is

    .. math:: W = \sum_i S_i\, U_i H_i V_i^\top,

    with a scale ``S`` of each head (Ravan, Raje et al., NeurIPS 2025): its rank is up to ``heads · rank``, and the
    cores hold ``heads · rank²`` numbers. The methods ``FedSB`` and ``Ravan`` send the cores alone; in other training
    all factors are trained. The rank for a ratio is the smallest whose factors, all of them, hold that share of the
    weight's numbers.

    Args:
        heads: Number of products that are added up. Default: 1.
        layout: How the kernel of a convolution is read as a matrix, as in `MatrixProduct`. Default: ``"permuted"``.

    Raises:
        TypeError: If ``heads`` is not an integer.
        ValueError: If ``heads`` is below 1, or ``layout`` is not one of `MatrixProduct`'s.

    Example:
        >>> CoreProduct().factor_shapes((8, 6), rank=2)
        {'U': (8, 2), 'H': (2, 2), 'V': (6, 2)}
        >>> CoreProduct(heads=3).factor_shapes((8, 6), rank=2)
        {'U': (8, 6), 'S': (3,), 'H': (3, 2, 2), 'V': (6, 6)}
    """

    def __init__(self, heads: int = 1, layout: Layout = "permuted") -> None:
        check_integer("heads", heads)
        self.heads = heads
        self._product = MatrixProduct(layout)
        self.layout = self._product.layout

    @override
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: HalfFrozen = False) -> int:
        check_number("ratio", ratio, above=0)
        rows, columns = self._product.matrix_shape(shape)
        self.trained_factors(shape, half_frozen)
        # rank² + rank (rows + columns) for each head, and its scale.
        each = max(ratio * rows * columns / self.heads - (self.heads > 1), 0.0)
        sides = rows + columns
        rank = max(1, ceil(2 * each / (sides + math.sqrt(sides**2 + 4 * each))))
        return self._rank_within_max(shape, rank, ratio, half_frozen)

    def max_rank(self, shape: Sequence[int], half_frozen: HalfFrozen = False) -> int:
        """The rank at which all heads together reach full rank, the matrix's smaller side."""
        self.trained_factors(shape, half_frozen)
        return math.ceil(min(self._product.matrix_shape(shape)) / self.heads)

    @override
    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        rows, columns = self._product.matrix_shape(shape)
        width = self.heads * rank
        core: dict[str, tuple[int, ...]] = {"H": (rank, rank)}
        if self.heads > 1:
            core = {"S": (self.heads,), "H": (self.heads, rank, rank)}
        return {"U": (rows, width), **core, "V": (columns, width)}

    @override
    def zero_factor(self, shape: Sequence[int]) -> str:
        return "H"

    def core(self, factors: Mapping[str, Tensor]) -> Tensor:
        """The core as one matrix, (heads · rank) × (heads · rank), with the heads' blocks on its diagonal."""
        blocks = factors["H"]
        if self.heads == 1:
            return blocks
        blocks = blocks * factors["S"][:, None, None]
        width = self.heads * blocks.shape[-1]
        # [row, column, head] becomes [row, column, head, head], zero between different heads.
        return torch.diag_embed(blocks.permute(1, 2, 0)).permute(2, 0, 3, 1).reshape(width, width)

    @override
    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        return self._product.compose({"U": factors["U"] @ self.core(factors), "V": factors["V"]}, shape)

    @override
    def compose_multiply_adds(self, shape: Sequence[int], rank: int) -> int:
        rows, width = self._product.matrix_shape(shape)[0], self.heads * rank
        scales = self.heads * rank**2 if self.heads > 1 else 0
        return scales + rows * width**2 + math.prod(shape) * width

    @override
    def stage_shapes(self, shape: Sequence[int], rank: int) -> tuple[Stage, ...] | None:
        width = self.heads * rank
        outer = self._product.stage_shapes(shape, width)
        if outer is None:
            return None
        first, last = outer
        return first, Stage((width, width, *(1 for _ in shape[2:])), 1), last

    @override
    def stages(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> list[Tensor]:
        first, last = self._product.stages(factors, shape)
        core = self.core(factors)
        return [first, core.reshape(*core.shape, *(1 for _ in shape[2:])), last]

    @override
    def inner(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        # ⟨U C Vᵀ, U' C' V'ᵀ⟩ = ⟨C, (UᵀU') C' (VᵀV')ᵀ⟩.
        rows, columns = (left[side].mT @ right[side] for side in ("U", "V"))
        return (self.core(left) * (rows @ self.core(right) @ columns.mT)).sum()

    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """The truncated singular value decomposition: orthonormal ``U`` and ``V``, and ``H`` diagonal."""
        self.check_rank(weight.shape, rank)
        left, values, right = torch.linalg.svd(self._product.as_matrix(working_precision(weight)), full_matrices=False)
        width = self.heads * rank
        kept = min(width, len(values))
        shapes = self.factor_shapes(weight.shape, rank)
        factors = {name: left.new_zeros(shapes[name]) for name in shapes}
        factors["U"][:, :kept], factors["V"][:, :kept] = left[:, :kept], right[:kept].mT
        diagonal = left.new_zeros(width)
        diagonal[:kept] = values[:kept]
        factors["H"].diagonal(dim1=-2, dim2=-1).copy_(diagonal.reshape(factors["H"].shape[:-1]))
        if "S" in factors:
            factors["S"].fill_(1)
        return {name: factor.to(weight.dtype) for name, factor in factors.items()}

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """The ``a``, with t = a²/3: ``rank · t = 1``, or ``heads · rank² · t³ = 1`` for several heads.

        The step is the sum of ``S_i² U_i U_iᵀ G V_i V_iᵀ``, and ``E[U_i U_iᵀ] = rank · t · I``.
        """
        return math.sqrt(3 / (rank if self.heads == 1 else (self.heads * rank**2) ** (1 / 3)))

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """The ``a``, with t = a²/3, for which ``rank² · t³ = std²``, or ``heads · rank² · t⁴`` for several heads."""
        if self.heads == 1:
            return math.sqrt(3 * (std / rank) ** (2 / 3))
        return math.sqrt(3 * (std**2 / (self.heads * rank**2)) ** (1 / 4))
