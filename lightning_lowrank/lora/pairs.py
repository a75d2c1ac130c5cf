"""LoRA's two factors for one layer, and their arithmetic.

A client's update of a weight is ``scaling · B A``. Everything here works on ``B`` and ``A``; the only matrix of the
weight's own size is the one that :meth:`LowRankPair.product` returns, and no operator calls it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import float64_device, to_float64, working_dtype
from lightning_lowrank.arguments import check_integer, check_number

__all__ = ["LowRankPair"]

_ONLY_B: frozenset[Literal["B", "A"]] = frozenset({"B"})


@dataclass(frozen=True, eq=False)
class LowRankPair:
    """LoRA's factors for one layer: the update of its ``m × n`` weight is ``scaling · B @ A``.

    Attributes:
        B: The left factor, ``[m, rank]``.
        A: The right factor, ``[rank, n]``, of the same dtype and device.
        scaling: The factor of the product, positive: LoRA's ``alpha / rank``. Default: 1.

    Raises:
        TypeError: If a factor is not a tensor of floating-point numbers, or the scaling is not a number.
        ValueError: If the shapes do not fit, the dtypes or devices differ, or the scaling is not positive and finite.

    Example:
        >>> pair = LowRankPair(B=torch.ones(4, 2), A=torch.ones(2, 3), scaling=0.5)
        >>> pair.rank, pair.shape
        (2, (4, 3))
        >>> pair.product()[0]
        tensor([1., 1., 1.])
    """

    B: Tensor
    A: Tensor
    scaling: float = 1.0

    def __post_init__(self) -> None:
        for name, factor in (("B", self.B), ("A", self.A)):
            if not isinstance(factor, Tensor) or not factor.is_floating_point():
                kind = factor.dtype if isinstance(factor, Tensor) else type(factor).__name__
                raise TypeError(f"{name} must be a tensor of floating-point numbers, but is of type {kind}.")
            if factor.dim() != 2:
                raise ValueError(f"{name} must be a matrix, but has shape {tuple(factor.shape)}.")
        if self.B.shape[1] != self.A.shape[0]:
            raise ValueError(
                f"B must have as many columns as A has rows (the rank), but they have shapes {tuple(self.B.shape)} and "
                f"{tuple(self.A.shape)}."
            )
        if self.B.dtype != self.A.dtype or self.B.device != self.A.device:
            raise ValueError(
                f"B and A must have one dtype and device, but are {self.B.dtype} on {self.B.device} and "
                f"{self.A.dtype} on {self.A.device}."
            )
        check_number("scaling", self.scaling, above=0)

    @property
    def rank(self) -> int:
        """The number of columns of ``B`` and of rows of ``A``."""
        return self.B.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """``(m, n)``, the shape of the weight."""
        return self.B.shape[0], self.A.shape[1]

    def product(self) -> Tensor:
        """The dense matrix ``scaling · B @ A``, ``[m, n]``, computed in float32 or better, in the factors' dtype."""
        working = working_dtype(self.B.dtype)
        return (self.scaling * (self.B.to(working) @ self.A.to(working))).to(self.B.dtype)

    def resized(
        self, rank: int, scaling: float | None = None, folded: Collection[Literal["B", "A"]] = _ONLY_B
    ) -> LowRankPair:
        """The first ``rank`` columns of ``B`` and rows of ``A``, for a given scaling.

        The server sends its pair to clients of another rank in this form. A larger rank is filled with zeros; such
        slots stay zero in training until one of their factors is drawn.

        Args:
            rank: The rank of the result, at least 1.
            scaling: The scaling of the result. By default the pair's own.
            folded: The factors that absorb the difference of the scalings, each an equal share. Default: ``B``.

        Raises:
            TypeError: If the rank is not an integer or the scaling not a number.
            ValueError: If the rank is below 1, or the scaling is not positive and finite.

        Example:
            >>> pair = LowRankPair(torch.ones(4, 2), torch.ones(2, 3), scaling=0.5)
            >>> small = pair.resized(1, scaling=1.0)
            >>> small.B[0], small.product()[0, 0]
            (tensor([0.5000]), tensor(0.5000))
        """
        check_rank("rank", rank)
        wanted = self.scaling if scaling is None else scaling
        check_number("scaling", wanted, above=0)
        left, right = padded(self.B[:, :rank], rank, 1), padded(self.A[:rank], rank, 0)
        factors = {"B": left, "A": right}
        if wanted != self.scaling:
            share = (self.scaling / wanted) ** (1 / len(folded))
            factors.update({name: to_float64(factors[name]) * share for name in folded})
        left, right = (factor.to(self.B.dtype).to(self.B.device).clone() for factor in factors.values())
        return LowRankPair(left, right, wanted)

    def in_working_dtype(self) -> LowRankPair:
        """The pair in single precision or higher, so that its product is not rounded to 16 bits."""
        dtype = working_dtype(self.B.dtype)
        return LowRankPair(self.B.to(dtype), self.A.to(dtype), self.scaling)

    def to(self, device: torch.device) -> LowRankPair:
        """The pair on a device; the same object if it is already on it."""
        return self if self.B.device == device else LowRankPair(self.B.to(device), self.A.to(device), self.scaling)


def check_rank(name: str, rank: int, shape: tuple[int, int] | None = None) -> None:
    """Check that a rank is an integer from 1 to the smaller side of a matrix of shape ``shape``."""
    check_integer(name, rank)
    if shape is not None and rank > min(shape):
        raise ValueError(
            f"{name} must be at most {min(shape)}, the smaller side of a {shape[0]}×{shape[1]} weight, but is {rank}."
        )


def normalised_weights(weights: Sequence[float] | Tensor | None, clients: int) -> Tensor:
    """The clients' weights, normalised to a sum of 1: ``[clients]``, float64, on the CPU."""
    if weights is None:
        return torch.full((clients,), 1 / clients, dtype=torch.float64)
    values = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach()
    if values.shape != (clients,):
        raise ValueError(f"weights must be one number for each of {clients} clients, but has shape {[*values.shape]}.")
    for client, value in enumerate(values.tolist()):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"weights must be finite and not negative, but client {client}'s is {value}.")
    # Divide by the largest first, because the sum of large finite weights may overflow.
    largest = values.max()
    if largest == 0:
        raise ValueError("weights must have a positive sum, but all are zero.")
    values = values / largest
    return values / values.sum()


def check_pairs(pairs: Sequence[LowRankPair | None]) -> None:
    """Raise if clients' pairs do not belong to one layer or are not finite; the message names the client."""
    if not len(pairs):
        raise ValueError("pairs must hold at least one client's factors, but is empty.")
    first = pairs[0]
    for client, pair in enumerate(pairs):
        if pair is None:
            raise ValueError(f"client {client} has no factors for this layer; every client must have all layers.")
        if not isinstance(pair, LowRankPair):
            raise TypeError(f"pairs must be LowRankPairs, but client {client}'s is of type {type(pair).__name__}.")
        assert isinstance(first, LowRankPair)
        if pair.shape != first.shape:
            raise ValueError(
                f"pairs must be of one weight, but client 0's is {first.shape[0]}×{first.shape[1]} and client "
                f"{client}'s {pair.shape[0]}×{pair.shape[1]}."
            )
        if (pair.B.dtype, pair.B.device) != (first.B.dtype, first.B.device):
            raise ValueError(
                f"pairs must have one dtype and device, but client 0's is {first.B.dtype} on {first.B.device} and "
                f"client {client}'s {pair.B.dtype} on {pair.B.device}."
            )
        check_rank(f"client {client}'s rank", pair.rank, pair.shape)
        for name, factor in (("B", pair.B), ("A", pair.A)):
            if not torch.isfinite(factor).all():
                raise ValueError(f"client {client}'s {name} must be finite, but has NaN or infinite entries.")


def padded(tensor: Tensor, size: int, dim: int) -> Tensor:
    """Pad a matrix with zeros to a size along one dimension."""
    missing = size - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = (tensor.shape[0], missing) if dim else (missing, tensor.shape[1])
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def inner_products(pairs: Sequence[LowRankPair]) -> Tensor:
    r"""The Frobenius inner products between all pairs' products, from the factors' Gram matrices.

    :math:`\langle B_i A_i, B_j A_j \rangle = \operatorname{tr}(B_j^\top B_i A_i A_j^\top)`, so that no product is
    built: ``[pairs, pairs]``, float64. Ranks may differ.
    """
    pairs = [pair.to(float64_device(pair.B.device)) for pair in pairs]
    left = torch.cat([pair.B.detach().double() * pair.scaling for pair in pairs], dim=1)
    right = torch.cat([pair.A.detach().double() for pair in pairs])
    owners = torch.repeat_interleave(torch.tensor([pair.rank for pair in pairs])).to(left.device)
    gram = (left.T @ left) * (right @ right.T)
    rows = gram.new_zeros(len(pairs), gram.shape[1]).index_add_(0, owners, gram)
    return rows.new_zeros(len(pairs), len(pairs)).index_add_(1, owners, rows)
