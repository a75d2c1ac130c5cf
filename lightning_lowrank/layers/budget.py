"""Dividing one budget among the weights of a model: which rank each of them gets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_lowrank.layers.factorization import Factorization, HalfFrozen, MatrixProduct

__all__ = ["Budget", "BudgetRule", "BudgetUnit"]

BudgetRule = Literal["largest", "authors"]
BudgetUnit = Literal["share", "parameters", "bytes"]

_AUTHORS_STEP = 0.001


@dataclass(frozen=True)
class Budget:
    """The arithmetic of a budget over the weights to factorise.

    A number of a weight costs 1 or, in bytes, its size. ``rest`` is what is trained outside these weights and
    ``dense`` the dense model, both in that unit.
    """

    factorization: Factorization
    half_frozen: HalfFrozen
    weights: tuple[Tensor, ...]
    costs: tuple[int, ...]
    rest: int
    dense: int
    budget: float
    unit: BudgetUnit

    @classmethod
    def of(
        cls,
        model: nn.Module,
        weights: Sequence[Tensor],
        factorization: Factorization,
        half_frozen: HalfFrozen,
        freeze_rest: bool,
        budget: float,
        unit: BudgetUnit,
    ) -> Budget:
        """Count a model in which ``weights`` are to be factorised."""

        def cost(tensor: Tensor) -> int:
            return tensor.element_size() if unit == "bytes" else 1

        factorised = set(weights)
        rest = sum(p.numel() * cost(p) for p in model.parameters() if p.requires_grad and p not in factorised)
        dense = sum(p.numel() * cost(p) for p in model.parameters())
        costs = tuple(map(cost, weights))
        return cls(factorization, half_frozen, tuple(weights), costs, 0 if freeze_rest else rest, dense, budget, unit)

    @cached_property
    def counts(self) -> Counter[tuple[tuple[int, ...], int]]:
        """How many of the weights have a shape and a cost."""
        return Counter((tuple(weight.shape), cost) for weight, cost in zip(self.weights, self.costs, strict=True))

    def allowed(self, tolerated: float = 0.0) -> float:
        """Return the budget in the unit; its tolerance only absorbs rounding of a product: totals are integers."""
        return (self.budget + tolerated) * self.dense + 1e-6 if self.unit == "share" else self.budget

    def rank(self, shape: tuple[int, ...], ratio: float) -> int:
        """Return the rank for a ratio, where a ratio of 0 or less means the smallest."""
        return self.factorization.rank_for_ratio(shape, ratio, self.half_frozen) if ratio > 0 else 1

    def trained(self, shape: tuple[int, ...], rank: int) -> int:
        """Return the numbers that stand for a weight, which stays dense where its factors would be larger."""
        return min(math.prod(shape), self.factorization.trained_numbers(shape, rank, self.half_frozen))

    def total(self, ranks: Mapping[tuple[int, ...], int]) -> int:
        """Add up all that is trained."""
        return self.rest + sum(
            count * cost * self.trained(shape, ranks[shape]) for (shape, cost), count in self.counts.items()
        )

    def ranks(self, ratio: float) -> dict[tuple[int, ...], int]:
        """Return each shape's rank for a ratio."""
        return {shape: self.rank(shape, ratio) for shape, _ in self.counts}

    def uniform(self, rule: BudgetRule) -> list[int]:
        """Return the weights' ranks at one common ratio, chosen by one of the two rules.

        Raises:
            ValueError: If the budget is below what the smallest ranks need.
        """
        allowed = self.allowed(_AUTHORS_STEP if rule == "authors" else 0.0)
        self._check_floor(allowed)
        ranks = self.ranks(self._authors(allowed) if rule == "authors" else self._largest(allowed))
        return [ranks[tuple(weight.shape)] for weight in self.weights]

    def _check_floor(self, allowed: float) -> None:
        floor = self.total(self.ranks(0))
        if floor <= allowed:
            return
        needed = math.ceil(floor / self.dense * 1e4) / 1e4 if self.unit == "share" else f"{floor:,}"
        unit = "bytes" if self.unit == "bytes" else "parameters"
        raise ValueError(
            f"budget={self.budget:.6g} cannot be met: it allows {int(allowed):,} of the dense model's "
            f"{self.dense:,} {unit}, but {self.rest:,} ({self.rest / self.dense:.2%}) are trained "
            f"outside the {sum(self.counts.values())} layers to convert, and with rank 1 in each of those it is "
            f"{floor:,} ({floor / self.dense:.2%}). Use a budget of at least {needed}, convert more "
            "layers, or set freeze_rest=True."
        )

    def by_singular_values(self) -> list[int]:
        """Return ranks given one by one, to the singular value that explains most per cost, while they fit.

        What one explains is its square, as a share of the sum of squares of its weight.

        Raises:
            ValueError: If the budget is below what the smallest ranks need.
        """
        assert isinstance(self.factorization, MatrixProduct)
        allowed = self.allowed()
        self._check_floor(allowed)
        total = self.total(self.ranks(0))
        ranks = [1] * len(self.weights)
        one_rank: list[int] = []
        steps: list[tuple[float, int, int]] = []
        for index, (weight, cost) in enumerate(zip(self.weights, self.costs, strict=True)):
            numbers = self.factorization.trained_numbers(weight.shape, 1, self.half_frozen)
            one_rank.append(numbers * cost)
            energy = torch.linalg.svdvals(self.factorization.as_matrix(weight.detach().float())).square()
            explained = energy / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny)
            largest = min(len(energy), (weight.numel() - 1) // numbers)
            gains = (explained / one_rank[index]).tolist()
            steps.extend((-gains[rank - 1], index, rank) for rank in range(2, largest + 1))
        full: set[int] = set()
        for _, index, rank in sorted(steps):
            if index not in full and total + one_rank[index] <= allowed:
                ranks[index] = rank
                total += one_rank[index]
            else:
                full.add(index)
        return ranks

    def _largest(self, allowed: float) -> float:
        """Go down from the bound, from one ratio at which some rank changes to the next, until it fits.

        The total need not fall with the ratio (block sizes are rounded up), so the first that fits from above
        is the largest. No ratio above the bound fits: one rank more than a ratio gives holds at least its share.
        """
        numbers = sum(count * cost * math.prod(shape) for (shape, cost), count in self.counts.items())
        one_more = sum(
            count * cost * self.factorization.trained_numbers(shape, 1, self.half_frozen)
            for (shape, cost), count in self.counts.items()
        )
        ratio = min(1.0, (allowed - self.rest + one_more) / numbers)
        ranks = self.ranks(ratio)
        while self.total(ranks) > allowed:
            steps = []
            for shape, rank in ranks.items():
                lower = self.factorization.lower_rank(shape, rank)
                if lower is not None:
                    steps.append(self.factorization.ratio_for_rank(shape, lower, self.half_frozen))
            if not steps:
                return 0.0
            ratio = max(steps)
            ranks = self.ranks(ratio)
        return ratio

    def _authors(self, allowed: float) -> float:
        """Go down from the budget in the authors' steps; below 0 every rank is 1, which fits."""
        step = 0
        ratio = self.budget
        while ratio > 0 and self.total(self.ranks(ratio)) > allowed:
            step += 1
            ratio = self.budget - step * _AUTHORS_STEP
        return ratio
