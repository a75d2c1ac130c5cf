"""check_factorization: a class of the user's own passes, and each broken one fails with the rule it breaks."""

import math

import pytest
import torch

from lightning_lowrank.layers import Factorization, Stage
from lightning_lowrank.testing import check_factorization


class Triples(Factorization):
    """A weight as ``U diag(S) Vᵀ``: three factors, written against the documented base class alone."""

    def __init__(self, first_rank=1):
        self.first_rank = first_rank

    def _sides(self, shape):
        return shape[0], math.prod(shape[1:])

    def rank_for_ratio(self, shape, ratio, half_frozen=False):
        self.trained_factors(shape, half_frozen)
        numbers = sum(self._sides(shape)) + 1
        rank = max(1, math.ceil(ratio * math.prod(shape) / numbers - 1e-9))
        if rank > self.max_rank(shape):
            raise ValueError(f"ratio={ratio} is too large.")
        return rank

    def max_rank(self, shape, half_frozen=False):
        return min(self._sides(shape))

    def factor_shapes(self, shape, rank):
        rows, columns = self._sides(shape)
        return {"U": (rows, rank), "S": (rank,), "V": (columns, rank)}

    def compose(self, factors, shape):
        return ((factors["U"] * factors["S"]) @ factors["V"].mT).reshape(shape)

    def compose_multiply_adds(self, shape, rank):
        return math.prod(shape) * rank

    def decompose(self, weight, rank):
        self.check_rank(weight.shape, rank)
        left, values, right = torch.linalg.svd(weight.detach().flatten(1).float().double(), full_matrices=False)
        if weight.dtype == torch.float64:
            left, values, right = torch.linalg.svd(weight.detach().flatten(1), full_matrices=False)
        factors = {"U": left[:, :rank], "S": values[:rank], "V": right[:rank].mT}
        return {name: factor.to(weight.dtype).contiguous() for name, factor in factors.items()}

    def default_init_scale(self, shape, rank):
        return math.sqrt(3 / math.sqrt(rank))

    def init_scale_for_std(self, shape, rank, std):
        return math.sqrt(3 * (std**2 / rank) ** (1 / 3))

    def stage_shapes(self, shape, rank):
        if len(shape) != 2:
            return None
        return Stage((rank, shape[1]), 1), Stage((shape[0], rank), 1)

    def stages(self, factors, shape):
        if len(shape) != 2:
            return super().stages(factors, shape)
        return [factors["S"].unsqueeze(-1) * factors["V"].mT, factors["U"]]


@pytest.mark.slow
def test_a_class_of_the_users_own_with_three_factors_passes():
    check_factorization(Triples())
    check_factorization(Triples(first_rank=2), shapes=[(5, 7), (7, 5), (4, 1), (3, 2, 2, 3, 2)])


def undecided(self, weight, rank):
    factors = Triples.decompose(self, weight, rank)
    return {**factors, "S": factors["S"] + 0.01 * torch.rand(rank, dtype=weight.dtype)}


def in_place(self, factors, shape):
    return Triples.compose(self, {**factors, "S": factors["S"].mul_(1.5)}, shape)


def careless(self, weight, rank):
    factors = Triples.decompose(self, weight, rank)
    return {**factors, "S": factors["S"] * 0.9}


MUTATIONS = {
    "shape of the weight": (
        {"compose": lambda self, f, shape: Triples.compose(self, f, shape).mT},
        "compose gives shape",
    ),
    "a factor without use": (
        {"compose": lambda self, f, shape: (f["U"] @ f["V"].mT).reshape(shape)},
        "compose passes no gradient to S",
    ),
    "no gradient": (
        {"compose": lambda self, f, shape: Triples.compose(self, {**f, "U": f["U"].detach()}, shape)},
        "compose passes no gradient to U",
    ),
    "single precision": (
        {"compose": lambda self, f, shape: Triples.compose(self, f, shape).float()},
        "compose gives torch.float32",
    ),
    "no tensor operation": (
        {"compose": lambda self, f, shape: Triples.compose(self, f, shape) * f["U"].sum().sign().item()},
        "item",
    ),
    "changed in place": ({"compose": in_place}, "compose changes its factors"),
    "bilinear in name": (
        {
            "factor_shapes": lambda self, shape, rank: {
                name: size for name, size in Triples.factor_shapes(self, shape, rank).items() if name != "S"
            },
            "compose": lambda self, f, shape: (f["U"].square() @ f["V"].mT).reshape(shape),
        },
        "compose is bilinear but not linear in U",
    ),
    "numbers": ({"trained_numbers": lambda self, shape, rank, half_frozen=False: 3 * rank}, "trained_numbers says"),
    "names change": (
        {
            "factor_shapes": lambda self, shape, rank: {
                f"{name}{rank}": size for name, size in Triples.factor_shapes(self, shape, rank).items()
            },
            "zero_factor": lambda self, shape: "V1",
        },
        "the names of the factors change",
    ),
    "any rank": ({"check_rank": lambda self, shape, rank, half_frozen=False: None}, "check_rank must refuse rank 0"),
    "undecided": ({"decompose": undecided}, "decompose gives two results"),
    "careless": ({"decompose": careless}, "decompose at max_rank"),
    "far away": (
        {"decompose": lambda self, w, rank: Triples.decompose(self, -w if rank < self.max_rank(w.shape) else w, rank)},
        "decompose at rank 1 is farther from the weight than zero is",
    ),
    "dtype": (
        {"decompose": lambda self, w, rank: {n: f.double() for n, f in Triples.decompose(self, w, rank).items()}},
        "for a weight of torch.bfloat16",
    ),
    "falling rank": (
        {"rank_for_ratio": lambda self, shape, ratio, half_frozen=False: max(1, round((1 - ratio) * 3))},
        "rank_for_ratio",
    ),
    "stingy rank": (
        {"rank_for_ratio": lambda self, shape, ratio, half_frozen=False: 1},
        "ranks follow ratios: rank_for_ratio",
    ),
    "lower rank": (
        {"lower_rank": lambda self, shape, rank: rank - 2 if rank > 2 else None},
        "but the next lower rank is",
    ),
    "wrong order of stages": (
        {"stages": lambda self, f, shape: Triples.stages(self, f, shape)[::-1] if len(shape) == 2 else None},
        "stages have shapes",
    ),
    "stages without S": (
        {"stages": lambda self, f, shape: [f["V"].mT, f["U"]]},
        "multiply with transposed=False is off by",
    ),
    "inner": ({"inner": lambda self, left, right, shape: self.compose(left, shape).sum()}, "inner is off by"),
    "nothing is zero": ({"zero_factor": lambda self, shape: "W"}, "zero_factor must be one of the factors"),
    "scale": ({"init_scale_for_std": lambda self, shape, rank, std: 2 * std}, "make a weight of std"),
    "no scale": ({"default_init_scale": lambda self, shape, rank: 0.0}, "default_init_scale is 0.0"),
    "an argument is lost": (
        {"__init__": lambda self, first_rank=1: setattr(self, "first_rank", 1 + first_rank)},
        "keep each argument under its name",
    ),
    "an error of its own": ({"compose_multiply_adds": lambda self, shape, rank: 1 / 0}, "ZeroDivisionError"),
}


@pytest.mark.parametrize(("methods", "message"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_factorization_fails_with_the_rule_that_it_breaks(methods, message):
    broken = type("Broken", (Triples,), methods)
    with pytest.raises(AssertionError, match=message):
        check_factorization(broken())


def test_a_layer_that_computes_something_else_is_noticed(monkeypatch):
    from lightning_lowrank.layers import LowRankLinear

    computed = LowRankLinear._apply_factors
    monkeypatch.setattr(LowRankLinear, "_apply_factors", lambda *given: 1.01 * computed(*given))
    with pytest.raises(AssertionError, match="computed factor by factor"):
        check_factorization(Triples(), shapes=[(6, 4)])
