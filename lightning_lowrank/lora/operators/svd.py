"""Truncated SVD of a mean of low-rank products, computed from the factors.

``Σ_i p_i s_i B_i A_i`` is the product of the stacked factors ``[p_1 s_1 B_1 … p_c s_c B_c]`` and ``[A_1; …; A_c]``.
While these are narrower than the matrix itself, a QR of each and the SVD of the small core between them is exact and
never builds the ``m × n`` matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import working_dtype
from lightning_lowrank.lora.pairs import LowRankPair
from lightning_lowrank.optim.orthonormal import completed_basis, rank_above_noise
from lightning_lowrank.seeding import generator

__all__ = ["SVD", "Method", "Split", "truncated_svd"]

Method = Literal["exact", "iterative"]
Split = Literal["left", "balanced"]

OVERSAMPLING = 10
POWER_ITERATIONS = 4


class SVD(NamedTuple):
    """``U · diag(S) · Vh`` with orthonormal rows of ``Vh`` and ``S`` descending.

    The columns of ``U`` are orthonormal, or zero where ``S`` is.
    """

    U: Tensor
    S: Tensor
    Vh: Tensor

    def split(self, rank: int, split: Split, scaling: float, dtype: torch.dtype) -> LowRankPair:
        """The leading ``rank`` part as a pair; its product times ``scaling`` is that part."""
        left, values, right = self.U[:, :rank], self.S[:rank] / scaling, self.Vh[:rank]
        if split == "left":
            left = left * values
        else:
            root = values.sqrt()
            left, right = left * root, root[:, None] * right
        return LowRankPair(left.to(dtype).clone(), right.to(dtype).clone(), scaling)


def truncated_svd(
    pairs: Sequence[LowRankPair], weights: Tensor, rank: int, method: Method, seed: int, dtype: torch.dtype
) -> SVD:
    """The leading ``rank`` singular triplets of the weighted mean of the pairs' effective updates.

    The signs are fixed: the largest entry of each row of ``Vh`` in absolute value is positive. Beyond the rank of the
    mean, values and columns of ``U`` are zero, and the rows of ``Vh`` are drawn from the seed: singular vectors there
    would be rounding noise. ``dtype`` is that of the clients' factors, which ``pairs`` may hold in a wider one.
    """
    working = working_dtype(pairs[0].B.dtype)
    coefficients = [weight * pair.scaling for weight, pair in zip(weights.tolist(), pairs, strict=True)]
    left = torch.cat([pair.B.to(working) * c for c, pair in zip(coefficients, pairs, strict=True)], dim=1)
    right = torch.cat([pair.A.to(working) for pair in pairs])
    if method == "iterative":
        found = _iterative(left, right, rank, seed)
    elif left.shape[1] <= min(left.shape[0], right.shape[1]):
        found = _of_stacked(left, right, rank)
    else:
        found = _of_dense(left @ right, rank)
    known = rank_above_noise(found.S[:rank], working_dtype(dtype))
    left, values, right = found.U[:, :known], found.S[:known], found.Vh[:known]
    if known < rank:
        rows = torch.randn(
            rank - known, right.shape[1], generator=generator(seed, "completion"), dtype=working, device="cpu"
        )
        right = completed_basis(right.mT, rows.mT.to(right.device)).mT
        left, values = (F.pad(part, (0, rank - known)) for part in (left, values))
    largest = right.gather(1, right.abs().argmax(dim=1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(right.dtype)
    return SVD(left * signs.T, values, right * signs)


def _of_stacked(left: Tensor, right: Tensor, rank: int) -> SVD:
    left_basis, left_core = torch.linalg.qr(left)
    right_basis, right_core = torch.linalg.qr(right.T)
    inner_left, values, inner_right = torch.linalg.svd(left_core @ right_core.T)
    return SVD(left_basis @ inner_left[:, :rank], values, inner_right[:rank] @ right_basis.T)


def _of_dense(mean: Tensor, rank: int) -> SVD:
    if mean.dtype == torch.float64:
        return SVD(*torch.linalg.svd(mean, full_matrices=False))
    if mean.shape[0] < mean.shape[1]:
        found = _of_dense(mean.T, rank)
        return SVD(found.Vh.T, found.S, found.U.T)
    # Eigenvalues are squared singular values: those of float32 fit into float64, those of float64 fit nowhere.
    wide = mean.double()
    basis = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:].to(mean.dtype)
    return _within(basis, lambda vectors: mean @ vectors)


def _iterative(left: Tensor, right: Tensor, rank: int, seed: int) -> SVD:
    columns = min(rank + OVERSAMPLING, left.shape[0], right.shape[1])
    start = torch.randn(
        right.shape[1], columns, generator=generator(seed, "subspace iteration"), dtype=left.dtype, device="cpu"
    ).to(left.device)
    basis = torch.linalg.qr(start).Q
    for _ in range(POWER_ITERATIONS):
        image = torch.linalg.qr(left @ (right @ basis)).Q
        basis = torch.linalg.qr(right.T @ (left.T @ image)).Q
    return _within(basis, lambda vectors: left @ (right @ vectors))


def _within(basis: Tensor, apply: Callable[[Tensor], Tensor]) -> SVD:
    """The SVD of a matrix restricted to the span of the orthonormal columns of ``basis``."""
    image_basis, core = torch.linalg.qr(apply(basis))
    inner_left, values, inner_right = torch.linalg.svd(core)
    return SVD(image_basis @ inner_left, values, inner_right @ basis.T)
