"""The weight as a matrix product ``U Vᵀ``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import check_choice, check_number
from lightning_lowrank.layers.factorization.base import (
    Factorization,
    HalfFrozen,
    Stage,
    ceil,
    check_two_dimensions,
    frozen_factor,
    working_precision,
)

Layout = Literal["permuted", "channel", "raw"]


class MatrixProduct(Factorization):
    """The weight as a matrix ``U Vᵀ``, with ``U`` (rows × rank) and ``V`` (columns × rank).

    A linear weight is its own matrix. A convolution's kernel is split: half of its modes (the larger half if their
    number is odd) are in the rows with the output channels, the others in the columns with the input channels. So
    (cout, cin, kh, kw) has cout·kh rows and cin·kw columns, (cout, cin, k) has cout·k rows and cin columns, and (cout,
    cin, kd, kh, kw) has cout·kd·kh rows and cin·kw columns.

    The rank for a ratio ρ of N = rows × columns is max(1, ⌈ρN / (rows + columns)⌉), ⌈ρN / columns⌉ if only
    ``V`` is trained and ⌈ρN / rows⌉ if only ``U`` is. (Section 3.2 of FedMUD gives the ratio as
    2(m + n)r / mn, which counts each factor twice.)

    Args:
        layout: ``"permuted"`` (default) brings the kernel's modes next to their channels, so that
            ``U Vᵀ`` is a 1×kw convolution followed by a kh×1 convolution (FedHM). ``"channel"`` leaves the
            rows to the output channels alone: cout rows and cin·kh·kw columns, a kh×kw convolution followed
            by a 1×1 convolution (LoRA as PEFT and LyCORIS apply it to convolutions; Pufferfish). ``"raw"``
            has the sides of ``"permuted"`` but reshapes the weight row-major as it lies in memory, which mixes channels
            and kernel positions, as in the FedMUD authors' code. A linear weight is the same in each.

    Raises:
        ValueError: If ``layout`` is not one of these.

    Example:
        >>> product = MatrixProduct()
        >>> product.rank_for_ratio((64, 32, 3, 3), 1 / 32)
        2
        >>> product.factor_shapes((64, 32, 3, 3), rank=2)
        {'U': (192, 2), 'V': (96, 2)}
        >>> weight = torch.ones(4, 3, 2, 2)
        >>> torch.allclose(product.compose(product.decompose(weight, rank=1), weight.shape), weight)
        True
    """

    any_rank = True

    def __init__(self, layout: Layout = "permuted") -> None:
        check_choice("layout", layout, Layout)
        self.layout = layout

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a weight of this shape as a matrix.

        Raises:
            ValueError: If the shape has fewer than two dimensions.
        """
        check_two_dimensions(shape)
        split = self._input_position(shape) + 1
        return shape[0] * math.prod(shape[2:split]), shape[1] * math.prod(shape[split:])

    def _input_position(self, shape: Sequence[int]) -> int:
        """Position of the input channels after the rows' kernel dimensions have moved before them."""
        return 1 if self.layout == "channel" else 1 + (len(shape) - 1) // 2

    def as_matrix(self, weight: Tensor) -> Tensor:
        """A weight as a matrix of :meth:`matrix_shape`."""
        matrix_shape = self.matrix_shape(weight.shape)
        if self.layout == "permuted":
            weight = weight.movedim(1, self._input_position(weight.shape))
        return weight.reshape(matrix_shape)

    def as_weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Undo :meth:`as_matrix`."""
        if self.layout != "permuted":
            return matrix.reshape(tuple(shape))
        position = self._input_position(shape)
        unfolded = matrix.reshape(shape[0], *shape[2 : position + 1], shape[1], *shape[position + 1 :])
        return unfolded.movedim(position, 1).contiguous()

    @override
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: HalfFrozen = False) -> int:
        check_number("ratio", ratio, above=0)
        rows, columns = self.matrix_shape(shape)
        sides = {None: rows + columns, "U": columns, "V": rows}
        rank = max(1, ceil(ratio * rows * columns / sides[frozen_factor(half_frozen)]))
        return self._rank_within_max(shape, rank, ratio, half_frozen)

    def max_rank(self, shape: Sequence[int], half_frozen: HalfFrozen = False) -> int:
        """The smaller side of the matrix, or the side of the frozen factor.

        With ``Ũ`` fixed, ``Ũ Vᵀ`` reaches every matrix only once ``Ũ`` spans all rows, and with ``Ṽ`` fixed
        once that spans all columns.
        """
        rows, columns = self.matrix_shape(shape)
        return {None: min(rows, columns), "U": rows, "V": columns}[frozen_factor(half_frozen)]

    @override
    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        rows, columns = self.matrix_shape(shape)
        return {"U": (rows, rank), "V": (columns, rank)}

    @override
    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        return self.as_weight(factors["U"] @ factors["V"].mT, shape)

    @override
    def compose_multiply_adds(self, shape: Sequence[int], rank: int) -> int:
        return math.prod(shape) * rank

    def stage_shapes(self, shape: Sequence[int], rank: int) -> tuple[Stage, ...] | None:
        """The stages ``V`` and ``U``, each a convolution with the kernel dimensions of its side.

        In the layout ``"raw"`` there are such convolutions only if reshaping does not mix channels with
        kernel positions: for a linear weight, a single input channel, or a kernel of size 1 in the rows.
        """
        self.matrix_shape(shape)
        split = self._input_position(shape) + 1
        tall, wide = tuple(shape[2:split]), tuple(shape[split:])
        if self.layout == "raw" and shape[1] > 1 and math.prod(tall) > 1:
            return None
        return (
            Stage((rank, shape[1], *(1 for _ in tall), *wide), 1),
            Stage((shape[0], rank, *tall, *(1 for _ in wide)), 1),
        )

    @override
    def stages(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> list[Tensor]:
        left, right = factors["U"], factors["V"]
        if len(shape) == 2:
            return [right.mT, left]
        stages = self.stage_shapes(shape, left.shape[-1])
        if stages is None:
            return super().stages(factors, shape)
        first, second = stages
        tall = left.reshape(shape[0], *shape[2 : self._input_position(shape) + 1], -1)
        return [right.mT.reshape(first.kernel), tall.movedim(-1, 1).reshape(second.kernel)]

    @override
    def inner(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        return ((left["U"].mT @ right["U"]) * (left["V"].mT @ right["V"])).sum()

    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """The truncated singular value decomposition, ``U √Σ`` and ``V √Σ``."""
        self.check_rank(weight.shape, rank)
        left, values, right = torch.linalg.svd(self.as_matrix(working_precision(weight)), full_matrices=False)
        roots = values[:rank].sqrt()
        factors = {"U": left[:, :rank] * roots, "V": right[:rank].mT * roots}
        return {name: factor.to(weight.dtype).contiguous() for name, factor in factors.items()}

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """√(3 / rank): the step is ``Ũ Ũᵀ G``, and ``E[Ũ Ũᵀ] = rank · a²/3 · I``."""
        return math.sqrt(3 / rank)

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """The ``a`` with ``rank · (a²/3)² = std²``."""
        return math.sqrt(3 * std / math.sqrt(rank))
