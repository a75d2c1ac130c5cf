"""The layers' ranks, from settings for each layer or from one budget for the whole model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_lowrank.layers.factorization import MatrixProduct
from lightning_lowrank.layers.precision import widened
from lightning_lowrank.layers.settings import LowRankSettings
from lightning_lowrank.layers.survey import Candidate
from lightning_lowrank.units import percent

_AUTHORS_STEP = 0.001
_NAMED = 3


def assign_ranks(
    model: nn.Module, layers: Sequence[Candidate], settings: LowRankSettings, spared: Set[nn.Parameter]
) -> None:
    """Assign each layer a rank, or the reason why it stays dense.

    ``layers`` are without those that share the weight of an earlier one, ``spared`` is what ``freeze_rest`` leaves
    trained. A layer that ``freeze_rest`` would freeze is converted whatever its size, as PEFT converts it. A budget
    below the cost of the smallest ranks is a ``ValueError``.
    """
    for layer in layers:
        if settings.rank is not None:
            layer.rank = layer.first_match("rank", settings.rank)
        elif settings.rank_ratio is not None:
            share = layer.first_match("rank_ratio", settings.rank_ratio)
            layer.rank = None if share is None else max(round(share * layer.output_channels), 1)
        elif settings.ratio is not None:
            share = layer.first_match("ratio", settings.ratio)
            if share is not None:
                with _naming(layer):
                    layer.rank = settings.factorization.rank_for_ratio(layer.shape, share, settings.half_frozen)
    if settings.budget is not None and layers:
        ranks = _Budget(model, [layer.weight for layer in layers], settings, spared).ranks()
        for layer, rank in zip(layers, ranks, strict=True):
            layer.rank = rank
    for layer in layers:
        if layer.rank is None:
            continue
        frozen_otherwise = settings.freeze_rest and layer.weight not in spared
        _check_rank(layer, layer.rank, settings, frozen_otherwise)


def _check_rank(layer: Candidate, rank: int, settings: LowRankSettings, frozen_otherwise: bool) -> None:
    """Keep the layer dense if factors of this rank save no parameters, unless the dense weight would be frozen."""
    factorization, half_frozen = settings.factorization, settings.half_frozen
    with _naming(layer):
        largest = factorization.max_rank(layer.shape, half_frozen)
        redundant = settings.role == "update" and factorization.any_rank
        if rank > largest and not (redundant and (settings.allow_larger or frozen_otherwise)):
            channels = f" ({layer.output_channels} output channels)" if settings.rank_ratio is not None else ""
            above = f"rank {rank}{channels} is more than the largest of such a weight, {largest}"
            if not frozen_otherwise:
                layer.reason = above
                return
            layer.note, layer.rank, rank = above, largest, largest
        if rank <= largest:
            factorization.check_rank(layer.shape, rank, half_frozen)
        factorization.fixed_factors(layer.shape, settings.decouple, half_frozen)
        trained = factorization.trained_numbers(layer.shape, rank, half_frozen)
    if trained >= layer.numbers and not settings.allow_larger:
        if frozen_otherwise:
            layer.note = layer.note or f"its factors are {trained:,} numbers, not fewer than the weight"
        else:
            layer.reason = f"rank {rank} would train {trained:,} numbers, not fewer than the weight has"


@contextmanager
def _naming(layer: Candidate) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error} Exclude it or give it settings of its own.") from None


class _Kind(NamedTuple):
    """What weights have in common: shape, cost of a number in the weight and in its factors."""

    shape: tuple[int, ...]
    of_weight: int
    of_factors: int
    may_be_larger: bool
    """Whether the factors may have more numbers than the weight."""


class _Budget:
    """The arithmetic of a budget over the weights to factorize. A number costs 1 or, in bytes, its size.

    Factors of a frozen weight of 16 bits have 32 bits. With ``freeze_rest`` so have the parameters
    that `widen` changes.
    """

    def __init__(
        self, model: nn.Module, weights: Sequence[nn.Parameter], settings: LowRankSettings, spared: Set[nn.Parameter]
    ) -> None:
        assert settings.budget is not None
        # Factors of an update are float32 from the start; with freeze_rest, `widen` converts all factors to float32.
        wide_factors = settings.role == "update" or settings.freeze_rest
        factorized = set(weights)
        outside = [p for p in model.parameters() if p not in factorized]
        self.settings, self.budget = settings, settings.budget
        self.model, self.weights, self.spared = model, weights, spared
        self.outside = [p for p in outside if (p in spared if settings.freeze_rest else p.requires_grad)]
        self.costs = [self._cost(weight, wide_factors) for weight in weights]
        self.kinds = [
            _Kind(
                tuple(weight.shape),
                self._cost(weight),
                of_factors,
                settings.allow_larger or (settings.freeze_rest and weight not in spared),
            )
            for weight, of_factors in zip(weights, self.costs, strict=True)
        ]
        self.counts = Counter(self.kinds)
        # Cost of the parameters outside these weights, and of the dense model.
        outside_trained = set(self.outside)
        self.largest = sorted(
            ((p.numel(), name) for name, p in model.named_parameters() if p in outside_trained), reverse=True
        )[:_NAMED]
        self._unfactorized: dict[frozenset[_Kind], int] = {}
        self.rest = self.unfactorized(frozenset())
        self.dense = sum(
            p.numel() * self._cost(p) for p in model.parameters() if p.requires_grad or settings.convert_frozen
        )

    def _cost(self, tensor: Tensor, wide: bool = False) -> int:
        if self.settings.budget_unit != "bytes":
            return 1
        return (torch.promote_types(tensor.dtype, torch.float32) if wide else tensor.dtype).itemsize

    def unfactorized(self, dense: frozenset[_Kind]) -> int:
        """Cost of all trained numbers that are not in factors if the weights of these kinds stay dense."""
        if dense not in self._unfactorized:
            by_kind = list(zip(self.weights, self.kinds, strict=True))
            replaced = {weight for weight, kind in by_kind if kind not in dense}
            wide: set[nn.Parameter] = set()
            if self.settings.freeze_rest:
                gone = replaced if self.settings.role == "weight" else set()
                wide = widened(self.model, self.spared - replaced, gone)
            trained = [*self.outside, *(weight for weight, kind in by_kind if kind in dense)]
            self._unfactorized[dense] = sum(p.numel() * self._cost(p, p in wide) for p in trained)
        return self._unfactorized[dense]

    def allowed(self, tolerated: float = 0.0) -> float:
        """The budget in numbers or bytes; 1e-6 absorbs the rounding of the product, because totals are integers."""
        in_share = self.settings.budget_unit == "share"
        return (self.budget + tolerated) * self.dense + 1e-6 if in_share else self.budget

    def numbers(self, shape: Sequence[int], rank: int) -> int:
        """Number of trained numbers in a weight's factors."""
        return self.settings.factorization.trained_numbers(shape, rank, self.settings.half_frozen)

    def total(self, ranks: Mapping[tuple[int, ...], int]) -> int:
        """Total cost of all trained numbers; a weight whose factors would be larger counts as dense, if allowed."""
        numbers = {kind: self.numbers(kind.shape, ranks[kind.shape]) for kind in self.counts}
        no_fewer = [kind for kind in self.counts if numbers[kind] >= math.prod(kind.shape)]
        dense = frozenset(kind for kind in no_fewer if not kind.may_be_larger)
        factorized = self.counts.keys() - dense
        return self.unfactorized(dense) + sum(
            self.counts[kind] * numbers[kind] * kind.of_factors for kind in factorized
        )

    def at_ratio(self, ratio: float) -> dict[tuple[int, ...], int]:
        """Each shape's rank for a ratio; a ratio of 0 or less means the smallest rank."""
        factorization, half_frozen = self.settings.factorization, self.settings.half_frozen
        return {
            shape: factorization.rank_for_ratio(shape, ratio, half_frozen) if ratio > 0 else 1
            for shape, *_ in self.counts
        }

    def ranks(self) -> list[int]:
        """The ranks within the budget, by the rule of ``allocation``."""
        authors = self.settings.budget_rule == "authors"
        allowed = self.allowed(_AUTHORS_STEP if authors else 0.0)
        self._check_floor(allowed)
        if self.settings.allocation == "singular_values":
            return self._by_singular_values(allowed)
        ranks = self.at_ratio(self._authors(allowed) if authors else self._largest(allowed))
        return [ranks[tuple(weight.shape)] for weight in self.weights]

    def _check_floor(self, allowed: float) -> None:
        floor = self.total(self.at_ratio(0))
        if floor <= allowed:
            return
        needed = math.ceil(floor / self.dense * 1e4) / 1e4 if self.settings.budget_unit == "share" else f"{floor:,}"
        unit = "bytes" if self.settings.budget_unit == "bytes" else "parameters"
        layers = sum(self.counts.values())
        raise ValueError(
            f"budget={self.budget:.6g} cannot be met: it allows {int(allowed):,} of the dense model's "
            f"{self.dense:,} {unit}, but {self.rest:,} ({percent(self.rest / self.dense)}) are trained "
            f"outside the {f'{layers} layers' if layers > 1 else 'one layer'} to convert, and with rank 1 in "
            f"{'each of those' if layers > 1 else 'that'} it is "
            f"{floor:,} ({percent(floor / self.dense)}). {self._largest_outside()}Use a budget of at least {needed}, "
            "convert more layers, or set freeze_rest=True."
        )

    def _largest_outside(self) -> str:
        named = ", ".join(f"{name} ({numbers:,})" for numbers, name in self.largest)
        return f"Largest of those outside: {named}. " if named else ""

    def _by_singular_values(self, allowed: float) -> list[int]:
        """Ranks assigned greedily to the singular value with the most energy per cost, while the budget lasts.

        The energy of a singular value is its square, as a share of its weight's sum of squares.
        """
        product = self.settings.factorization
        assert isinstance(product, MatrixProduct)
        total = self.total(self.at_ratio(0))
        ranks = [1] * len(self.weights)
        one_rank: list[int] = []
        steps: list[tuple[float, int, int]] = []
        for index, (weight, cost) in enumerate(zip(self.weights, self.costs, strict=True)):
            numbers = self.numbers(weight.shape, 1)
            one_rank.append(numbers * cost)
            energy = torch.linalg.svdvals(product.as_matrix(weight.detach().float())).square()
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
        """The largest ratio within the budget: from the upper bound down, through each ratio at which a rank changes.

        The total need not fall with the ratio (block sizes are rounded up), so the first that fits from above
        is the largest. No ratio above the bound fits: one rank more than a ratio gives holds at least its share.
        """
        counts = self.counts.items()
        numbers = sum(count * of_weight * math.prod(shape) for (shape, of_weight, *_), count in counts)
        one_more = sum(count * of_factors * self.numbers(shape, 1) for (shape, _, of_factors, _), count in counts)
        ratio = min(1.0, (allowed - self.rest + one_more) / numbers)
        ranks = self.at_ratio(ratio)
        factorization = self.settings.factorization
        while self.total(ranks) > allowed:
            lower = {shape: factorization.lower_rank(shape, rank) for shape, rank in ranks.items()}
            steps = [
                factorization.ratio_for_rank(shape, rank, self.settings.half_frozen)
                for shape, rank in lower.items()
                if rank is not None
            ]
            ratio = max(steps, default=0.0)
            ranks = self.at_ratio(ratio)
        return ratio

    def _authors(self, allowed: float) -> float:
        """The ratio by FedMUD's own rule: lowered from the budget in steps until it fits; below 0 every rank is 1."""
        step = 0
        ratio = self.budget
        while ratio > 0 and self.total(self.at_ratio(ratio)) > allowed:
            step += 1
            ratio = self.budget - step * _AUTHORS_STEP
        return ratio
