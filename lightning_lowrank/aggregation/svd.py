"""The truncated SVD of a mean of low-rank products, from the factors.

``Σ_i p_i s_i B_i A_i`` is the product of the stacked factors ``[p_1 s_1 B_1 … p_c s_c B_c]`` and ``[A_1; …; A_c]``.
While these are narrower than the matrix itself, a QR of each and the SVD of the small core between them is exact and
never builds the ``m × n`` matrix. ``SumProduct`` is the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import float64_device
from lightning_lowrank.aggregation.pairs import (
    LowRankPair,
    check_pairs,
    check_rank,
    normalised_weights,
    working_dtype,
)
from lightning_lowrank.arguments import check_choice, check_number
from lightning_lowrank.seeding import generator

__all__ = ["Method", "Split", "svd_of_mean"]

Method = Literal["exact", "iterative"]
Split = Literal["left", "balanced"]

OVERSAMPLING = 10
POWER_ITERATIONS = 4


class SVD(NamedTuple):
    """``U · diag(S) · Vh``, with orthonormal columns of ``U`` and rows of ``Vh``, ``S`` descending."""

    U: Tensor
    S: Tensor
    Vh: Tensor

    def split(self, rank: int, split: Split, scaling: float, dtype: torch.dtype) -> LowRankPair:
        """Return the leading part as a pair whose effective update it is, whatever the pair's scaling."""
        left, values, right = self.U[:, :rank], self.S[:rank] / scaling, self.Vh[:rank]
        if split == "left":
            left = left * values
        else:
            root = values.sqrt()
            left, right = left * root, root[:, None] * right
        return LowRankPair(left.to(dtype).clone(), right.to(dtype).clone(), scaling)


@torch.no_grad()
def svd_of_mean(
    pairs: Sequence[LowRankPair],
    weights: Sequence[float] | Tensor | None = None,
    rank: int | None = None,
    *,
    method: Method = "exact",
    split: Split = "left",
    scaling: float = 1.0,
    seed: int = 0,
) -> LowRankPair:
    r"""Return the best approximation of a given rank of :math:`\sum_i p_i s_i B_i A_i`, as a pair (Eqs. 7-8 of ABO).

    The signs of the singular vectors are fixed: the largest entry of each row of :math:`V^\top` in absolute value is
    positive. Float16 and bfloat16 factors are computed with in float32.

    Args:
        pairs: The clients' pairs of one weight; ranks and scalings may differ.
        weights: As for :func:`normalised_weights`: data sizes, or ``None`` for a plain mean.
        rank: The rank of the result, at most ``min(m, n)``. By default the largest of the clients'. Beyond the rank of
            the mean, the columns of ``B`` are zero, and with ``split="left"`` the rows of ``A`` still orthonormal.
        method: ``"exact"`` (default) takes the cheaper of two exact ways: QR of the stacked factors where they are
            not wider than the matrix, else one dense mean (one matrix, whatever the number of clients). ``"iterative"``
            is randomised subspace iteration with the stacked factors (Halko et al., 2011): no matrix of the weight's
            size, and an error that decays with the ratio of the first singular value that is left out to the last
            that is kept.
        split: ``"left"`` (default): ``B = U Σ``, ``A = Vᵀ``. ``"balanced"``: ``√Σ`` on both.
        scaling: The result's scaling; its effective update does not depend on it. Default: 1.
        seed: For ``"iterative"``'s start, and for the rows of ``A`` beyond the rank of the mean. Default: 0.

    Returns:
        The pair, in the dtype and on the device of the clients' factors.

    Raises:
        TypeError: If ``pairs`` holds something else, or ``rank`` or ``scaling`` is not a number.
        ValueError: If the pairs are empty, of different weights or not finite, or an argument is out of range.

    Example:
        >>> ones = LowRankPair(torch.ones(3, 1), torch.ones(1, 4))
        >>> pair = svd_of_mean([ones, ones], rank=1)
        >>> torch.allclose(pair.product(), torch.ones(3, 4))
        True
    """
    check_pairs(pairs)
    rank = max(pair.rank for pair in pairs) if rank is None else rank
    check_rank("rank", rank, pairs[0].shape)
    check_choice("method", method, Method)
    check_choice("split", split, Split)
    check_number("scaling", scaling, above=0)
    first = pairs[0].B
    pairs = [pair.to(float64_device(first.device)) for pair in pairs]
    found = truncated_svd(pairs, normalised_weights(weights, len(pairs)), rank, method, seed)
    return found.split(rank, split, scaling, first.dtype).to(first.device)


def truncated_svd(pairs: Sequence[LowRankPair], weights: Tensor, rank: int, method: Method, seed: int) -> SVD:
    """Return the leading ``rank`` singular triplets of the mean, of checked pairs with normalised weights."""
    working = working_dtype(pairs[0].B.dtype)
    coefficients = [weight * pair.scaling for weight, pair in zip(weights.tolist(), pairs, strict=True)]
    left = torch.cat([pair.B.to(working) * c for c, pair in zip(coefficients, pairs, strict=True)], dim=1)
    right = torch.cat([pair.A.to(working) for pair in pairs])
    missing = rank - left.shape[1]
    if missing > 0:
        # Zero columns add nothing, and the rows beside them make the QR complete the right singular vectors.
        rows = torch.randn(missing, right.shape[1], generator=generator(seed, "completion"), dtype=working)
        left = torch.cat([left, left.new_zeros(len(left), missing)], dim=1)
        right = torch.cat([right, rows.to(right.device)])
    if method == "iterative":
        found = _iterative(left, right, rank, seed)
    elif left.shape[1] <= min(left.shape[0], right.shape[1]):
        found = _of_stacked(left, right, rank)
    else:
        found = _of_dense(left @ right, rank)
    return _with_fixed_signs(SVD(found.U[:, :rank], found.S[:rank], found.Vh[:rank]))


def _of_stacked(left: Tensor, right: Tensor, rank: int) -> SVD:
    left_basis, left_core = torch.linalg.qr(left)
    right_basis, right_core = torch.linalg.qr(right.T)
    inner_left, values, inner_right = torch.linalg.svd(left_core @ right_core.T)
    return SVD(left_basis @ inner_left[:, :rank], values, inner_right[:rank] @ right_basis.T)


def _of_dense(mean: Tensor, rank: int) -> SVD:
    if mean.dtype == torch.float64:
        return SVD(*torch.linalg.svd(mean, full_matrices=False))
    if mean.shape[0] < mean.shape[1]:
        return _transposed(_of_dense(mean.T, rank))
    # The eigenvalues are the squares of the singular values. Float64 has room for those of float32; nothing has for
    # those of float64.
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
    """Return the SVD of a matrix restricted to the span of orthonormal columns."""
    image_basis, core = torch.linalg.qr(apply(basis))
    inner_left, values, inner_right = torch.linalg.svd(core)
    return SVD(image_basis @ inner_left, values, inner_right @ basis.T)


def _transposed(found: SVD) -> SVD:
    return SVD(found.Vh.T, found.S, found.U.T)


def _with_fixed_signs(found: SVD) -> SVD:
    largest = found.Vh.gather(1, found.Vh.abs().argmax(dim=1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(found.Vh.dtype)
    return SVD(found.U * signs.T, found.S, found.Vh * signs)
