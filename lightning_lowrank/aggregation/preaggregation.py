"""Pre-aggregations: nearest-neighbour mixing or bucketing of a round's arrivals before a robust rule.

Each is a matrix whose rows are weights of the arrivals. It depends on their inner products alone, so rules that need
only inner products never build the mixed vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import Configured, check_integer, check_number
from lightning_lowrank.seeding import generator

__all__ = ["Bucketing", "Byzantine", "NearestNeighborMixing", "PreAggregation", "squared_distances"]

Byzantine = int | float
"""How many arrivals may be Byzantine: a count, or a share of the arrivals in [0, 0.5), rounded down."""


def check_byzantine(name: str, value: object) -> None:
    """Raise unless the value is a count of 0 or more or a share in [0, 0.5)."""
    if isinstance(value, float):
        check_number(name, value, least=0, below=0.5, hint="an integer for a count")
    else:
        check_integer(name, value, least=0)


def byzantine_count(value: Byzantine, arrivals: int) -> int:
    """Number of Byzantine arrivals to withstand among ``arrivals``, from a count or a share.

    Example:
        >>> byzantine_count(3, 10), byzantine_count(0.3, 10), byzantine_count(0.3, 9)
        (3, 3, 2)
    """
    # Add a small number, because of rounding errors: 0.29 * 100 is just below 29.
    return int(value * arrivals + 1e-9) if isinstance(value, float) else value


def squared_distances(gram: Tensor) -> Tensor:
    """The vectors' squared pairwise distances ``[n, n]``, from their inner products."""
    norms = gram.diagonal()
    return (norms[:, None] + norms - 2 * gram).clamp(min=0).fill_diagonal_(0)


class PreAggregation(Configured, ABC):
    """Replaces a round's ``n`` arrivals by other vectors, each a weighted mean of them.

    A robust rule takes a list of these as ``before=[...]``, and they are applied in that order.
    """

    def vectors(self, count: int) -> int:
        """Number of vectors after the step, from ``count`` vectors before it."""
        return count

    def allowed(self, arrivals: int) -> int:
        """Number of Byzantine arrivals that the step's arguments allow for in a round; 0 without such an argument."""
        return 0

    def least(self, byzantine: int) -> int:
        """Least number of vectors that the step needs if ``byzantine`` of them may be Byzantine."""
        return 1

    @abstractmethod
    def matrix(self, gram: Tensor, byzantine: int, draws: torch.Generator) -> Tensor:
        """The weights of the old vectors (columns) in the new ones (rows).

        Args:
            gram: The vectors' inner products, ``[n, n]``, float64, on the CPU.
            byzantine: How many of them may be Byzantine, as `allowed` counts.
            draws: Generator for random draws.

        Returns:
            ``[m, n]``, float64: not negative, and each row sums to 1.
        """


class NearestNeighborMixing(PreAggregation):
    r"""Nearest-neighbour mixing (NNM): each vector becomes the mean of those nearest to it (Allouah et al., 2023).

    :math:`y_i = \frac{1}{n-f} \sum_{j \in N_i} x_j`, where :math:`N_i` are the :math:`n - f` vectors nearest to
    :math:`x_i`, itself included (arXiv:2302.01772, Algorithm 2). Unweighted. With it, the median, the trimmed mean,
    Krum and the geometric median are robust to the best possible order if clients have different data.

    Args:
        byzantine: How many arrivals may be Byzantine (:math:`f`): a count, or a share in [0, 0.5) of them.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is out of range.

    Example:
        >>> gram = torch.tensor([[0.0], [1.0], [9.0]]) @ torch.tensor([[0.0, 1.0, 9.0]])
        >>> NearestNeighborMixing(1).matrix(gram, 1, torch.Generator())
        tensor([[0.5000, 0.5000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.0000, 0.5000, 0.5000]])
    """

    def __init__(self, byzantine: Byzantine = 0.2) -> None:
        check_byzantine("byzantine", byzantine)
        self.byzantine = byzantine

    @override
    def allowed(self, arrivals: int) -> int:
        return byzantine_count(self.byzantine, arrivals)

    @override
    def least(self, byzantine: int) -> int:
        return 2 * byzantine + 1

    @override
    def matrix(self, gram: Tensor, byzantine: int, draws: torch.Generator) -> Tensor:
        nearest = squared_distances(gram).argsort(dim=1, stable=True)[:, : len(gram) - byzantine]
        # Ties with equal vectors may exclude a vector from its own nearest neighbours.
        mixed = torch.zeros_like(gram).scatter_(1, nearest, 1.0)
        return mixed / mixed.sum(dim=1, keepdim=True)


class Bucketing(PreAggregation):
    r"""Bucketing: the arrivals are shuffled, and each ``size`` of them become their mean (Karimireddy et al., 2022).

    :math:`y_i = \frac{1}{s} \sum_{k=(i-1)s+1}^{\min(is, n)} x_{\pi(k)}` with a random permutation :math:`\pi`, drawn
    in each round (arXiv:2006.09365, Algorithm 1). Unweighted; a last bucket that is not full is the mean of fewer
    arrivals. Of the resulting :math:`\lceil n/s \rceil` vectors, as many may be Byzantine as of the arrivals.

    Args:
        size: Arrivals in a bucket (:math:`s`), 1 or more; the paper uses 2.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is below 1.

    Example:
        >>> Bucketing(2).matrix(torch.eye(3), 0, torch.Generator().manual_seed(0)).sum(dim=1)
        tensor([1., 1.])
    """

    def __init__(self, size: int = 2) -> None:
        check_integer("size", size)
        self.size = size

    @override
    def vectors(self, count: int) -> int:
        return -(-count // self.size)

    @override
    def matrix(self, gram: Tensor, byzantine: int, draws: torch.Generator) -> Tensor:
        order = torch.randperm(len(gram), generator=draws, device="cpu")
        found = gram.new_zeros(self.vectors(len(gram)), len(gram))
        for bucket, members in zip(found, order.split(self.size), strict=True):
            bucket[members] = 1 / len(members)
        return found


def mixing_matrix(steps: list[PreAggregation], gram: Tensor, byzantine: list[int], seed: int) -> Tensor | None:
    """The product of all pre-aggregations' matrices, applied in order; ``None`` without pre-aggregations."""
    whole: Tensor | None = None
    for number, (step, count) in enumerate(zip(steps, byzantine, strict=True)):
        part = step.matrix(gram, count, generator(seed, number))
        gram = part @ gram @ part.T
        whole = part if whole is None else part @ whole
    return whole
