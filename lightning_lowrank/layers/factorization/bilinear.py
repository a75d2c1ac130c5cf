"""The forms with two factors ``U`` and ``V`` in whatever shape the weight has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.layers.factorization.base import (
    Factorization,
    HalfFrozen,
    Stage,
    ceil,
    check_ratio,
    frozen_factor,
    working_precision,
)

__all__ = ["BlockKronecker", "MatrixProduct"]


class MatrixProduct(Factorization):
    """The weight as a matrix ``U Vᵀ``, with ``U`` (rows × rank) and ``V`` (columns × rank).

    A linear weight is its own matrix. A convolution's kernel is split: half of its modes (the larger half
    where their number is odd) stand with the output channels in the rows, the others with the input channels
    in the columns. So (cout, cin, kh, kw) has cout·kh rows and cin·kw columns, (cout, cin, k) has cout·k
    rows and cin columns, and (cout, cin, kd, kh, kw) has cout·kd·kh rows and cin·kw columns.

    The rank for a ratio ρ of N = rows × columns is max(1, ⌈ρN / (rows + columns)⌉), ⌈ρN / columns⌉ where only
    ``V`` is trained and ⌈ρN / rows⌉ where only ``U`` is. (Section 3.2 of FedMUD gives the ratio as
    2(m + n)r / mn, which counts each factor twice.)

    Args:
        layout: ``"permuted"`` (default) brings the kernel's modes next to their channels, so that
            ``U Vᵀ`` is a 1×kw convolution followed by a kh×1 convolution (FedHM). ``"channel"`` leaves the
            rows to the output channels alone: cout rows and cin·kh·kw columns, a kh×kw convolution followed
            by a 1×1 convolution (LoRA as PEFT and LyCORIS apply it to convolutions; Pufferfish). ``"raw"``
            has the sides of ``"permuted"`` but reshapes the weight row-major as it lies in memory, which
            mixes channels and kernel positions and is what the authors of FedMUD ran. A linear weight is the
            same in each.

    Raises:
        ValueError: If ``layout`` is none of these.

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

    def __init__(self, layout: Literal["permuted", "channel", "raw"] = "permuted") -> None:
        if layout not in ("permuted", "channel", "raw"):
            raise ValueError(f'layout must be "permuted", "channel" or "raw", but is {layout!r}.')
        self.layout = layout

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of the matrix that a weight of this shape is read as.

        Args:
            shape: The weight's shape, of at least two dimensions.

        Raises:
            ValueError: If the shape has fewer than two dimensions.
        """
        if len(shape) < 2:
            raise ValueError(
                f"shape must have at least two dimensions to be read as a matrix, but is {tuple(shape)}; "
                "BlockKronecker takes any shape."
            )
        split = self._input_position(shape) + 1
        return shape[0] * math.prod(shape[2:split]), shape[1] * math.prod(shape[split:])

    def _input_position(self, shape: Sequence[int]) -> int:
        """Return where the input channels stand once the rows' kernel modes have moved before them."""
        return 1 if self.layout == "channel" else 1 + (len(shape) - 1) // 2

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Read a weight as a matrix of :meth:`matrix_shape`.

        Args:
            weight: The weight.
        """
        matrix_shape = self.matrix_shape(weight.shape)
        if self.layout == "permuted":
            weight = weight.movedim(1, self._input_position(weight.shape))
        return weight.reshape(matrix_shape)

    def as_weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Undo :meth:`as_matrix`.

        Args:
            matrix: A matrix of :meth:`matrix_shape`.
            shape: The weight's shape.
        """
        if self.layout != "permuted":
            return matrix.reshape(tuple(shape))
        position = self._input_position(shape)
        unfolded = matrix.reshape(shape[0], *shape[2 : position + 1], shape[1], *shape[position + 1 :])
        return unfolded.movedim(position, 1).contiguous()

    @override
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: HalfFrozen = False) -> int:
        check_ratio(ratio)
        rows, columns = self.matrix_shape(shape)
        sides = {None: rows + columns, "U": columns, "V": rows}
        rank = max(1, ceil(ratio * rows * columns / sides[frozen_factor(half_frozen)]))
        return self._rank_within_max(shape, rank, ratio, half_frozen)

    def max_rank(self, shape: Sequence[int], half_frozen: HalfFrozen = False) -> int:
        """Return the smaller side of the matrix, or the side of the frozen factor.

        With ``Ũ`` fixed, ``Ũ Vᵀ`` reaches every matrix only once ``Ũ`` spans all rows, and with ``Ṽ`` fixed
        once that spans all columns.

        Args:
            shape: The weight's shape.
            half_frozen: Which factor is frozen, if any.
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
        """Return ``V`` and then ``U`` as convolutions, each with the kernel modes of its own side.

        In the layout ``"raw"`` there are such convolutions only where reshaping does not mix channels with
        kernel positions: for a linear weight, a single input channel, or a kernel of size 1 in the rows.

        Args:
            shape: The weight's shape.
            rank: The rank.
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
        """Return the truncated singular value decomposition, ``U √Σ`` and ``V √Σ``.

        Args:
            weight: The weight.
            rank: The rank, at most the smaller side of the matrix.

        Raises:
            ValueError: If ``rank`` is out of range.
        """
        self.check_rank(weight.shape, rank)
        left, values, right = torch.linalg.svd(self.as_matrix(working_precision(weight)), full_matrices=False)
        roots = values[:rank].sqrt()
        factors = {"U": left[:, :rank] * roots, "V": right[:rank].mT * roots}
        return {name: factor.to(weight.dtype).contiguous() for name, factor in factors.items()}

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """Return √(3 / rank): the step is ``Ũ Ũᵀ G``, and ``E[Ũ Ũᵀ] = rank · a²/3 · I``.

        Args:
            shape: The weight's shape.
            rank: The rank.
        """
        return math.sqrt(3 / rank)

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """Return the ``a`` with ``rank · (a²/3)² = std²``.

        Args:
            shape: The weight's shape.
            rank: The rank.
            std: The standard deviation of the dense weight's numbers.
        """
        return math.sqrt(3 * std / math.sqrt(rank))


class BlockKronecker(Factorization):
    """The weight as K blocks, each a Kronecker product of two z×z matrices (FedMUD's BKD, section 3.2).

    ``U`` and ``V`` have shape (K, z, z). Block k is ``U[k] ⊗ V[k]``, z²×z². The blocks are flattened one
    after another, cropped to the weight's N numbers and reshaped, so any weight shape works. The rank is the
    number of blocks K, and z the smallest integer with K·z⁴ ≥ N.

    The number of blocks for a ratio ρ is max(1, ⌈ρ²N / 4⌉), with 2ρ in place of ρ where one factor is frozen;
    2Kz² numbers (Kz²) are then trained, ρN before rounding.

    The inputs can be multiplied factor by factor where a linear weight is as wide as the blocks (dim1 = z², or
    √K·z² in a grid), so that each block's rows are rows of the weight.

    Args:
        grid: Whether to lay the blocks out as the paper describes (section 3.2), a √K × √K grid that is a
            √K·z² × √K·z² matrix, flattened row-major and cropped. K is then a perfect square, rounded up
            where it comes from a ratio. Off by default: the authors' code flattens block after block.

    Example:
        >>> kronecker = BlockKronecker()
        >>> kronecker.rank_for_ratio((64, 32, 3, 3), 1 / 32)
        5
        >>> kronecker.factor_shapes((64, 32, 3, 3), rank=5)
        {'U': (5, 8, 8), 'V': (5, 8, 8)}
    """

    def __init__(self, grid: bool = False) -> None:
        self.grid = grid

    def block_size(self, shape: Sequence[int], rank: int) -> int:
        """Return z, the side of the factors of each block.

        Args:
            shape: The weight's shape.
            rank: The number of blocks K, at least 1.
        """
        return math.isqrt(math.isqrt((math.prod(shape) - 1) // rank)) + 1

    @override
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: HalfFrozen = False) -> int:
        check_ratio(ratio)
        share = ratio if frozen_factor(half_frozen) is None else 2 * ratio
        rank = max(1, ceil(share**2 * math.prod(shape) / 4))
        if self.grid:
            rank = (math.isqrt(rank - 1) + 1) ** 2
        return self._rank_within_max(shape, rank, ratio, half_frozen)

    @override
    def ratio_for_rank(self, shape: Sequence[int], rank: int, half_frozen: HalfFrozen = False) -> float:
        self.check_rank(shape, rank, half_frozen)
        ratio = 2 * math.sqrt(rank / math.prod(shape))
        return ratio if frozen_factor(half_frozen) is None else ratio / 2

    def max_rank(self, shape: Sequence[int], half_frozen: HalfFrozen = False) -> int:
        """Return the number of blocks at which each is a single number.

        Args:
            shape: The weight's shape.
            half_frozen: Which factor is frozen, if any; makes no difference here.
        """
        frozen_factor(half_frozen)
        numbers = math.prod(shape)
        return (math.isqrt(numbers - 1) + 1) ** 2 if self.grid else numbers

    @override
    def lower_rank(self, shape: Sequence[int], rank: int) -> int | None:
        if not self.grid:
            return super().lower_rank(shape, rank)
        return (math.isqrt(rank) - 1) ** 2 if rank > 1 else None

    def check_rank(self, shape: Sequence[int], rank: int, half_frozen: HalfFrozen = False) -> None:
        """Refuse a number of blocks that is out of range or, in a grid, not a perfect square.

        Args:
            shape: The weight's shape.
            rank: The number of blocks.
            half_frozen: Which factor is frozen, if any; makes no difference here.

        Raises:
            ValueError: If a weight of this shape cannot have ``rank`` blocks.
        """
        super().check_rank(shape, rank, half_frozen)
        if self.grid and math.isqrt(rank) ** 2 != rank:
            raise ValueError(
                f"rank must be a perfect square for {self!r}, such as {math.isqrt(rank) ** 2}, but is {rank}."
            )

    @override
    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        size = self.block_size(shape, rank)
        return {"U": (rank, size, size), "V": (rank, size, size)}

    @override
    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        rank, size, _ = factors["U"].shape
        products = torch.einsum("kij,kpq->kipjq", factors["U"], factors["V"])
        if self.grid:
            side = math.isqrt(rank)
            products = products.reshape(side, side, size**2, size**2).transpose(1, 2)
        return products.reshape(-1)[: math.prod(shape)].reshape(tuple(shape))

    @override
    def compose_multiply_adds(self, shape: Sequence[int], rank: int) -> int:
        return rank * self.block_size(shape, rank) ** 4

    def _sides(self, rank: int) -> tuple[int, int]:
        """Return how many blocks stand below and beside one another in the matrix that is flattened."""
        return (math.isqrt(rank), math.isqrt(rank)) if self.grid else (rank, 1)

    def _rows_of_blocks(self, shape: Sequence[int], rank: int, size: int) -> int | None:
        """Return how many rows of blocks a linear weight reaches into, ``None`` where it is not as wide as one."""
        if len(shape) != 2 or shape[1] != self._sides(rank)[1] * size**2:
            return None
        return -(-shape[0] // size**2)

    def multiply_adds(self, shape: Sequence[int], rank: int) -> int | None:
        """Return 2z³ for each block, for two z×z products; ``None`` where the weight is not as wide as a block.

        Args:
            shape: The weight's shape.
            rank: The number of blocks.
        """
        size = self.block_size(shape, rank)
        rows = self._rows_of_blocks(shape, rank, size)
        return None if rows is None else 2 * rows * self._sides(rank)[1] * size**3

    def multiply(
        self,
        input: Tensor,
        factors: Mapping[str, Tensor],
        shape: Sequence[int],
        transposed: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Multiply by the composed weight block by block: ``(U ⊗ V) vec(X) = vec(U X Vᵀ)`` for row-major vec.

        Args:
            input: A tensor (…, dim1), or (…, dim0) if ``transposed``.
            factors: All factors by name.
            shape: The weight's shape, (dim0, dim1).
            transposed: Whether to return ``input @ W`` rather than ``input @ Wᵀ``. Off by default.
            bias: Added to the result. None by default.

        Raises:
            ValueError: If the weight is not of two dimensions and as wide as a block.
        """
        rank, size, _ = factors["U"].shape
        rows = self._rows_of_blocks(shape, rank, size)
        if rows is None:
            raise ValueError(
                f"{self!r} of rank {rank} can multiply without composing only where the weight is a matrix as wide "
                f"as its blocks, {self._sides(rank)[1] * size**2}, but its shape is {tuple(shape)}; use compose."
            )
        across = self._sides(rank)[1]
        left, right = (factors[name][: rows * across].reshape(rows, across, size, size) for name in ("U", "V"))
        if transposed:
            left, right = left.transpose(0, 1).mT, right.transpose(0, 1).mT
            input = F.pad(input, (0, rows * size**2 - shape[0]))
        down, across = left.shape[:2]
        blocks = input.reshape(-1, across, size, size).transpose(0, 1).reshape(across, -1, size)
        by_right = blocks @ right.permute(1, 3, 0, 2).reshape(across, size, down * size)
        by_right = by_right.reshape(across, -1, size, down, size).permute(3, 1, 0, 2, 4)
        by_right = by_right.reshape(down, -1, across * size, size)
        by_both = left.transpose(1, 2).reshape(down, 1, size, across * size) @ by_right
        product = by_both.transpose(0, 1).reshape(*input.shape[:-1], down * size**2)
        product = product[..., : shape[1] if transposed else shape[0]]
        return product if bias is None else product + bias.to(product.dtype)

    def inner(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """Return the sum over the rows of the blocks of what each row contributes.

        Row (i, p) of ``U[k] ⊗ V[k]`` is ``U[k, i] ⊗ V[k, p]``, so its inner product with another such row is
        ``(U[k, i]·U'[k, i]) (V[k, p]·V'[k, p])``. Only the row in which the weight ends is built.

        Args:
            left: All factors of the one weight.
            right: All factors of the other.
            shape: The shape of both weights.
        """
        rank, size, _ = left["U"].shape
        down, across = self._sides(rank)
        one, other = (
            {name: factor.reshape(down, across, size, size) for name, factor in factors.items()}
            for factors in (left, right)
        )
        row_norms = {name: (one[name] * other[name]).sum(dim=-1) for name in ("U", "V")}
        rows = torch.einsum("abi,abp->aip", row_norms["U"], row_norms["V"]).reshape(-1)
        numbers, width = math.prod(shape), across * size**2
        whole, cut = numbers // width, numbers % width
        total = rows[:whole].sum()
        if cut:
            block, i, p = whole // size**2, whole % size**2 // size, whole % size
            ends = [
                torch.einsum("bj,bq->bjq", f["U"][block, :, i], f["V"][block, :, p]).reshape(-1)[:cut]
                for f in (one, other)
            ]
            total = total + (ends[0] * ends[1]).sum()
        return total

    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """Return the nearest Kronecker product of each block.

        Rearranging a block so that each z×z tile of it becomes a row turns the nearest Kronecker product
        into the best approximation of rank one (Van Loan and Pitsianis, 1993). Numbers beyond the weight's
        end count as zeros.

        Args:
            weight: The weight.
            rank: The number of blocks.

        Raises:
            ValueError: If the weight cannot have ``rank`` blocks.
        """
        self.check_rank(weight.shape, rank)
        size = self.block_size(weight.shape, rank)
        flat = working_precision(weight).reshape(-1)
        padded = F.pad(flat, (0, rank * size**4 - flat.numel()))
        if self.grid:
            side = math.isqrt(rank)
            padded = padded.reshape(side, size**2, side, size**2).transpose(1, 2)
        tiles = padded.reshape(rank, size, size, size, size).transpose(2, 3)
        left, values, right = torch.linalg.svd(tiles.reshape(rank, size**2, size**2), full_matrices=False)
        roots = values[:, :1].sqrt()
        factors = {"U": left[:, :, 0] * roots, "V": right[:, 0] * roots}
        return {name: f.reshape(rank, size, size).to(weight.dtype) for name, f in factors.items()}

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """Return √3: a block's step is ``Ũ ⊗ (Σ Ũᵢⱼ Gᵢⱼ)``, whose mean is a²/3 times the dense step.

        Args:
            shape: The weight's shape.
            rank: The number of blocks.
        """
        return math.sqrt(3)

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """Return the ``a`` with ``(a²/3)² = std²``: each number of the weight is one product.

        Args:
            shape: The weight's shape.
            rank: The number of blocks.
            std: The standard deviation of the dense weight's numbers.
        """
        return math.sqrt(3 * std)
