"""The weight as blocks that are Kronecker products."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import check_number
from lightning_lowrank.layers.factorization.base import (
    Factorization,
    HalfFrozen,
    ceil,
    frozen_factor,
    working_precision,
)


class BlockKronecker(Factorization):
    """The weight as K blocks, each a Kronecker product of two z×z matrices (FedMUD's BKD, section 3.2).

    ``U`` and ``V`` have shape (K, z, z). Block k is ``U[k] ⊗ V[k]``, z²×z². The blocks are flattened one
    after another, cropped to the weight's N numbers and reshaped, so any weight shape works. The rank is the
    number of blocks K, and z the smallest integer with K·z⁴ ≥ N.

    The number of blocks for a ratio ρ is max(1, ⌈ρ²N / 4⌉), with 2ρ in place of ρ if one factor is frozen;
    2Kz² numbers (Kz²) are then trained, ρN before rounding.

    The inputs can be multiplied factor by factor if a linear weight is as wide as the blocks (dim1 = z², or
    √K·z² in a grid), so that each block's rows are rows of the weight.

    Args:
        grid: Whether to lay the blocks out as the paper describes (section 3.2), a √K × √K grid that is a
            √K·z² × √K·z² matrix, flattened row-major and cropped. K is then a perfect square, rounded up
            if it comes from a ratio. Off by default: the authors' code flattens block after block.

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
        """z, the number of rows and of columns of each factor of a block."""
        return math.isqrt(math.isqrt((math.prod(shape) - 1) // rank)) + 1

    @override
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: HalfFrozen = False) -> int:
        check_number("ratio", ratio, above=0)
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
        """The number of blocks at which each block is a single number."""
        frozen_factor(half_frozen)
        numbers = math.prod(shape)
        return (math.isqrt(numbers - 1) + 1) ** 2 if self.grid else numbers

    @override
    def lower_rank(self, shape: Sequence[int], rank: int) -> int | None:
        if not self.grid:
            return super().lower_rank(shape, rank)
        return (math.isqrt(rank) - 1) ** 2 if rank > 1 else None

    def check_rank(self, shape: Sequence[int], rank: int, half_frozen: HalfFrozen = False) -> None:
        """Raise if the number of blocks is out of range or, in a grid, not a perfect square."""
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
        return self.compose_sum([factors], shape)

    @override
    def compose_sum(self, terms: Sequence[Mapping[str, Tensor]], shape: Sequence[int]) -> Tensor:
        rank, size, _ = terms[0]["U"].shape
        numbers, (down, across) = math.prod(shape), self._reached(shape, rank)
        # Outer products of the flattened factors: their gradients are matrix products, unlike those of broadcasting.
        left = torch.stack([factors["U"][: down * across].flatten(1) for factors in terms], dim=2)
        right = torch.stack([factors["V"][: down * across].flatten(1) for factors in terms], dim=1)
        blocks = torch.bmm(left, right).reshape(down, across, size, size, size, size)
        flat = blocks.permute(0, 2, 4, 1, 3, 5).reshape(-1)
        # The backward pass of a slice would first fill a tensor of all blocks with zeros.
        weight, _ = flat.split([numbers, len(flat) - numbers])
        return weight.reshape(tuple(shape))

    @override
    def compose_multiply_adds(self, shape: Sequence[int], rank: int) -> int:
        return math.prod(self._reached(shape, rank)) * self.block_size(shape, rank) ** 4

    def _reached(self, shape: Sequence[int], rank: int) -> tuple[int, int]:
        """Number of rows and columns of blocks that contain numbers of the weight; further blocks are padding."""
        down, across = self._sides(rank)
        return min(down, ceil(math.prod(shape) / (across * self.block_size(shape, rank) ** 4))), across

    def _sides(self, rank: int) -> tuple[int, int]:
        """Rows and columns of the grid of blocks in the matrix before it is flattened."""
        return (math.isqrt(rank), math.isqrt(rank)) if self.grid else (rank, 1)

    def _rows_of_blocks(self, shape: Sequence[int], rank: int, size: int) -> int | None:
        """Number of rows of blocks in a linear weight; ``None`` if the weight is narrower than a row of blocks."""
        if len(shape) != 2 or shape[1] != self._sides(rank)[1] * size**2:
            return None
        return -(-shape[0] // size**2)

    def multiply_adds(self, shape: Sequence[int], rank: int) -> int | None:
        """2z³ for each block, for two z×z products; ``None`` if the weight is narrower than a row of blocks."""
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
        """Multiply by the composed weight block by block: ``(U ⊗ V) vec(X) = vec(U X Vᵀ)`` for row-major vec."""
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
        """The inner product as a sum over the blocks' rows.

        Row (i, p) of ``U[k] ⊗ V[k]`` is ``U[k, i] ⊗ V[k, p]``, so its inner product with another such row is
        ``(U[k, i]·U'[k, i]) (V[k, p]·V'[k, p])``. Only the row in which the weight ends is built.
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
        """The nearest Kronecker product of each block.

        Rearranging a block so that each z×z tile of it becomes a row turns the nearest Kronecker product
        into the best approximation of rank one (Van Loan and Pitsianis, 1993). Numbers beyond the weight's
        end count as zeros.
        """
        self.check_rank(weight.shape, rank)
        size = self.block_size(weight.shape, rank)
        flat = working_precision(weight).reshape(-1)
        padded = F.pad(flat, (0, rank * size**4 - flat.numel()))
        down, across = self._sides(rank)
        blocks = padded.reshape(down, size**2, across, size**2).transpose(1, 2)
        tiles = blocks.reshape(rank, size, size, size, size).transpose(2, 3)
        left, values, right = torch.linalg.svd(tiles.reshape(rank, size**2, size**2), full_matrices=False)
        roots = values[:, :1].sqrt()
        factors = {"U": left[:, :, 0] * roots, "V": right[:, 0] * roots}
        return {name: f.reshape(rank, size, size).to(weight.dtype) for name, f in factors.items()}

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """√3: a block's step is ``Ũ ⊗ (Σ Ũᵢⱼ Gᵢⱼ)``, whose mean is a²/3 times the dense step."""
        return math.sqrt(3)

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """The ``a`` with ``(a²/3)² = std²``: each number of the weight is one product."""
        return math.sqrt(3 * std)
