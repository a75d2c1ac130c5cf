"""Robust principal component analysis of clients' factors: a common low-rank part and sparse individual parts."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import check_integer, check_number
from lightning_lowrank.lora.inputs import Broadcast, LayerInputs
from lightning_lowrank.lora.operators.averaging import ProductSum

__all__ = ["FedRPCA", "principal_component_pursuit"]


class FedRPCA(ProductSum):
    r"""FedRPCA: Product-Sum with the parts that are particular to single clients amplified (Jhunjhunwala et al., 2025).

    The clients' changes of a factor, as vectors, are the columns of a matrix :math:`M`. Robust principal component
    analysis (Candès et al., 2011) divides it, by minimising :math:`\|L\|_* + \lambda \|S\|_1` with :math:`L + S = M`,
    into a low-rank part, which clients have in common, and a sparse part. The new factor is the old one plus
    :math:`\operatorname{mean}_i L_i + \beta \operatorname{mean}_i S_i`, for ``B`` and for ``A``. Clients are weighted
    in the two means alone. Changes are from ``previous``, the server's pair from before the round, or from zero without
    it.

    With :math:`\beta = 1` this is :class:`ProductSum`. We had the paper's abstract and not its text: that factors are
    divided one by one, :math:`\lambda` and the default of :math:`\beta` are our reading, and its rule for a
    :math:`\beta` that changes with the rounds is not included. For clients of one rank.

    Args:
        scale: :math:`\beta`, at least 0. Default: 2.
        sparsity: :math:`\lambda`, positive. ``None`` (default): :math:`1 / \sqrt{\text{numbers of the factor}}` or of
            the clients, whichever are more, the choice of Candès et al.
        iterations: Of the analysis, at most; 1 or more. It needs 60 to 100. Default: 200.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If an argument is out of range.

    Example:
        >>> from lightning_lowrank.lora import LowRankPair
        >>> pairs = [LowRankPair(torch.ones(30, 1), torch.ones(1, 2)) for _ in range(4)]
        >>> pairs[0].B[3] = 9.0
        >>> FedRPCA(scale=3.0).aggregate(pairs).server.B[2:5, 0].round(decimals=2)
        tensor([1., 7., 1.])
    """

    linear: ClassVar[bool] = False

    def __init__(self, scale: float = 2.0, sparsity: float | None = None, iterations: int = 200) -> None:
        check_number("scale", scale, least=0)
        if sparsity is not None:
            check_number("sparsity", sparsity, above=0)
        check_integer("iterations", iterations)
        self.scale = scale
        self.sparsity = sparsity
        self.iterations = iterations

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        lefts, rights = inputs.factors()
        starts = [torch.zeros_like(lefts[0]), torch.zeros_like(rights[0])]
        if inputs.previous is not None:
            before = inputs.previous.resized(inputs.largest)
            starts = [before.B.double() * (before.scaling / inputs.scaling), before.A.double()]
        chosen = inputs.weights > 0
        weights = inputs.weights[chosen].to(lefts[0].device)
        means = []
        for factors, start in zip((lefts, rights), starts, strict=True):
            taken = [factor for factor, own in zip(factors, chosen.tolist(), strict=True) if own]
            changes = torch.stack([(factor - start).flatten() for factor in taken], dim=1)
            mean = changes @ weights
            if self.scale != 1:
                common = principal_component_pursuit(changes, self.sparsity, self.iterations)
                mean = mean + (self.scale - 1) * ((changes - common) @ weights)
            means.append(start + mean.view_as(start))
        return inputs.broadcast(means[0], means[1])


def principal_component_pursuit(matrix: Tensor, sparsity: float | None = None, iterations: int = 200) -> Tensor:
    r"""The low-rank part :math:`L` of a matrix; the sparse part is the rest.

    The inexact augmented Lagrangian method of Lin et al. (2010), until :math:`L` and :math:`S` add up to the matrix to
    :math:`10^{-7}` of its norm. The penalty grows by 5 % in each iteration; if it grows faster, the result is
    farther from the minimum.

    Args:
        matrix: ``[rows, columns]``, in double precision.
        sparsity: :math:`\lambda`. By default :math:`1 / \sqrt{\max(\text{rows}, \text{columns})}`.
        iterations: At most so many.
    """
    largest = matrix.abs().max()
    if largest == 0:
        return matrix.clone()
    weight = 1 / math.sqrt(max(matrix.shape)) if sparsity is None else sparsity
    norm, spectral = matrix.norm(), torch.linalg.matrix_norm(matrix, 2)
    penalty = 1.25 / spectral
    dual = matrix / torch.maximum(spectral, largest / weight)
    low = sparse = torch.zeros_like(matrix)
    for _ in range(iterations):
        left, values, right = torch.linalg.svd(matrix - sparse + dual / penalty, full_matrices=False)
        low = (left * (values - 1 / penalty).clamp(min=0)) @ right
        rest = matrix - low + dual / penalty
        sparse = rest.sign() * (rest.abs() - weight / penalty).clamp(min=0)
        missing = matrix - low - sparse
        dual = dual + penalty * missing
        if missing.norm() <= 1e-7 * norm:
            break
        penalty = 1.05 * penalty
    return low
