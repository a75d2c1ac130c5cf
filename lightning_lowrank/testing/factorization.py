"""`check_factorization`: the contract that every factorization must keep."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from lightning_lowrank.layers import (
    Factorization,
    HalfFrozen,
    LowRankConv2d,
    LowRankConvTranspose2d,
    LowRankLayer,
    LowRankLinear,
    convert,
    dense_state_dict,
    factorization_from_dict,
    frobenius_norm_squared,
    recover,
)
from lightning_lowrank.testing.require import require

__all__ = ["check_factorization"]

_LARGEST_RANKS = 40


def check_factorization(
    factorization: Factorization, shapes: Sequence[Sequence[int]] = ((12, 8), (6, 9), (8, 4, 3, 3), (6, 4, 3))
) -> None:
    """Check that a factorization keeps the contract that layers, budgets and federated methods rely on.

    For each shape it checks that

    - factors have the shapes, names and numbers that the factorization says;
    - ``compose`` gives a weight of the right shape and dtype, depends on every factor, lets gradients through to
      every factor, is linear in each factor of a bilinear form, and can be mapped over clients with
      :func:`torch.func.vmap`;
    - ``decompose`` is deterministic, does not change the weight, comes nearer to it than zero is, and is exact at
      the highest rank;
    - ranks grow with the ratio, hold the share that was asked for, and are found again by ``ratio_for_rank`` and
      ``lower_rank``;
    - ``multiply``, ``stages`` and ``inner``, if there are such forms, equal the composed weight;
    - an update starts at zero with factors that can train;
    - a layer (linear for two dimensions, convolutions for four) computes the same densely and contracted, draws
      the same factors from the same seed, folds, merges and becomes dense again;
    - the factorization is written to a checkpoint and read again.

    Call it in a test of your own class. It needs no GPU and takes a few seconds.

    Args:
        factorization: The factorization to check, with any number of factors.
        shapes: Shapes of weights, each (dim0, dim1, *kernel), that the factorization has a form for.

    Raises:
        AssertionError: If the contract is violated. The message names the factorization, the shape and the rule.

    Example:
        >>> from lightning_lowrank.layers import CP
        >>> from lightning_lowrank.testing import check_factorization
        >>> check_factorization(CP(), shapes=[(6, 4), (4, 3, 3, 3)])
    """
    with _explained(factorization, "it describes itself"):
        _check_description(factorization)
    for shape in (tuple(shape) for shape in shapes):
        for rule, check in _RULES.items():
            with _explained(factorization, f"shape {shape}: {rule}"):
                check(factorization, shape)


@contextmanager
def _explained(factorization: Factorization, rule: str) -> Iterator[None]:
    """Turn any error within the context into an `AssertionError` that names the violated rule."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise AssertionError(f"{factorization!r}, {rule}: {kind}{error}") from error


def _require_close(value: Tensor, expected: Tensor, what: str) -> None:
    require(value.shape == expected.shape, f"{what} has shape {tuple(value.shape)}, not {tuple(expected.shape)}")
    error = (value.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item() + 1
    tolerance = 1e-8 if expected.dtype == torch.float64 else 1e-4
    require(error <= tolerance * scale, f"{what} is off by {error:.3g}")


def _random(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _factors(factorization: Factorization, shape: Sequence[int], rank: int, seed: int = 0) -> dict[str, Tensor]:
    shapes = factorization.factor_shapes(shape, rank)
    return {name: _random(size, 100 * seed + place) for place, (name, size) in enumerate(shapes.items())}


def _gradients(factorization: Factorization, factors: dict[str, Tensor], direction: Tensor) -> dict[str, Tensor]:
    """The factors' gradients of the inner product of the composed weight and a direction."""
    return grad(lambda given: (factorization.compose(given, direction.shape) * direction).sum())(factors)


def _ranks(factorization: Factorization, shape: Sequence[int], half_frozen: HalfFrozen = False) -> list[int]:
    """The ranks that the factorization accepts, in ascending order."""
    largest = factorization.max_rank(shape, half_frozen)
    ranks = []
    for rank in range(1, largest + 1):
        try:
            factorization.check_rank(shape, rank, half_frozen)
        except ValueError:
            continue
        ranks.append(rank)
    require(bool(ranks) and ranks[0] == 1, "rank 1 must be accepted")
    require(ranks[-1] == largest, f"max_rank says {largest}, which check_rank refuses")
    return ranks


def _some_ranks(factorization: Factorization, shape: Sequence[int]) -> list[int]:
    ranks = _ranks(factorization, shape)
    return sorted({ranks[0], ranks[len(ranks) // 3], ranks[-1]})


def _ways_to_train(factorization: Factorization, shape: Sequence[int]) -> Sequence[HalfFrozen]:
    return (False, "U", "V") if factorization.bilinear(shape) else (False,)


def _check_description(factorization: Factorization) -> None:
    description = json.loads(json.dumps(factorization.to_dict()))
    again = factorization_from_dict(description)
    require(
        again == factorization, f"factorization_from_dict(to_dict()) gives {again!r}; keep each argument under its name"
    )
    require(hash(again) == hash(factorization), "equal factorizations have different hashes")


def _check_factors(factorization: Factorization, shape: tuple[int, ...]) -> None:
    names = factorization.factor_names(shape)
    require(len(names) > 0, "factor_shapes names no factor")
    require(factorization.trained_factors(shape) == names, "trained_factors must be all factors, in their order")
    require(factorization.fixed_factors(shape) == (), "fixed_factors must be empty without modifiers")
    require(factorization.zero_factor(shape) in names, "zero_factor must be one of the factors")
    for rank in _some_ranks(factorization, shape):
        shapes = factorization.factor_shapes(shape, rank)
        require(tuple(shapes) == names, f"the names of the factors change at rank {rank}")
        numbers = sum(math.prod(size) for size in shapes.values())
        counted = factorization.trained_numbers(shape, rank)
        require(counted == numbers, f"trained_numbers says {counted} at rank {rank}, the factors hold {numbers}")
    for rank in (0, factorization.max_rank(shape) + 1):
        try:
            factorization.check_rank(shape, rank)
        except ValueError:
            continue
        raise AssertionError(f"check_rank must refuse rank {rank} with a ValueError")


def _check_compose(factorization: Factorization, shape: tuple[int, ...]) -> None:
    for rank in _some_ranks(factorization, shape):
        factors = _factors(factorization, shape, rank)
        kept = {name: factor.clone() for name, factor in factors.items()}
        weight = factorization.compose(factors, shape)
        require(tuple(weight.shape) == shape, f"compose gives shape {tuple(weight.shape)} at rank {rank}")
        require(weight.dtype == torch.float64, f"compose gives {weight.dtype} from factors of torch.float64")
        require(all(torch.equal(factors[name], kept[name]) for name in kept), "compose changes its factors")
        require(torch.equal(weight, factorization.compose(factors, shape)), "compose gives two results for one input")
        other = _factors(factorization, shape, rank, seed=1)
        expected = weight + factorization.compose(other, shape)
        _require_close(factorization.compose_sum([factors, other], shape), expected, "compose_sum of two sets")
        require(factorization.compose_multiply_adds(shape, rank) >= 0, "compose_multiply_adds is negative")
        for name, gradient in _gradients(factorization, factors, weight).items():
            require(bool(gradient.any()), f"compose passes no gradient to {name} at rank {rank}")
        if factorization.bilinear(shape):
            for name in factors:
                mixed = factorization.compose({**factors, name: 2 * factors[name] - 3 * other[name]}, shape)
                changed = factorization.compose({**factors, name: other[name]}, shape)
                _require_close(mixed, 2 * weight - 3 * changed, f"compose is bilinear but not linear in {name}: it")


def _check_mapping(factorization: Factorization, shape: tuple[int, ...]) -> None:
    rank = _some_ranks(factorization, shape)[1 if factorization.max_rank(shape) > 1 else 0]
    clients = [_factors(factorization, shape, rank, seed) for seed in range(3)]
    stacked = {name: torch.stack([client[name] for client in clients]) for name in clients[0]}
    target = _random(shape, 9)

    def loss(factors: Mapping[str, Tensor]) -> Tensor:
        return (factorization.compose(factors, shape) - target).square().sum()

    mapped = vmap(grad(loss))(stacked)
    for place, client in enumerate(clients):
        for name, gradient in grad(loss)(client).items():
            _require_close(mapped[name][place], gradient, f"the gradient of {name} under torch.func.vmap")


def _check_decompose(factorization: Factorization, shape: tuple[int, ...]) -> None:
    weight = _random(shape, 3)
    kept = weight.clone()
    for rank in _some_ranks(factorization, shape):
        factors = factorization.decompose(weight, rank)
        sizes = {name: tuple(factor.shape) for name, factor in factors.items()}
        require(sizes == factorization.factor_shapes(shape, rank), f"decompose gives shapes {sizes} at rank {rank}")
        contiguous = all(factor.is_contiguous() for factor in factors.values())
        require(contiguous, "decompose gives factors that are not contiguous in memory")
        again = factorization.decompose(weight, rank)
        require(
            all(torch.equal(factor, again[name]) for name, factor in factors.items()),
            "decompose gives two results for one weight; draw from a generator with a seed",
        )
        error = (factorization.compose(factors, shape) - weight).norm().item()
        require(error < weight.norm().item(), f"decompose at rank {rank} is farther from the weight than zero is")
    _require_close(factorization.compose(factors, shape), weight, f"decompose at max_rank {rank}")
    require(torch.equal(weight, kept), "decompose changes the weight")
    halves = factorization.decompose(weight.bfloat16(), 1)
    dtypes = {factor.dtype for factor in halves.values()}
    require(dtypes == {torch.bfloat16}, f"decompose gives {dtypes} for a weight of torch.bfloat16")


def _check_ratios(factorization: Factorization, shape: tuple[int, ...]) -> None:
    numbers = math.prod(shape)
    for half_frozen in _ways_to_train(factorization, shape):
        ranks = _ranks(factorization, shape, half_frozen)
        require(factorization.lower_rank(shape, 1) is None, "lower_rank of 1 must be None")
        for lower, rank in itertools.pairwise(ranks):
            found = factorization.lower_rank(shape, rank)
            require(found == lower, f"lower_rank({rank}) is {found}, but the next lower rank is {lower}")
        for rank in ranks[:_LARGEST_RANKS]:
            ratio = factorization.ratio_for_rank(shape, rank, half_frozen)
            found = factorization.rank_for_ratio(shape, ratio, half_frozen)
            require(found == rank, f"rank_for_ratio(ratio_for_rank({rank})) is {found}")
        highest = min(1.0, factorization.ratio_for_rank(shape, ranks[-1], half_frozen))
        one = factorization.trained_numbers(shape, 1, half_frozen)
        before = 0
        for step in range(1, 51):
            ratio = highest * step / 50
            rank = factorization.rank_for_ratio(shape, ratio, half_frozen)
            require(rank in ranks, f"rank_for_ratio({ratio:.3g}) is {rank}, which check_rank refuses")
            require(rank >= before, f"rank_for_ratio falls from {before} to {rank} as the ratio grows to {ratio:.3g}")
            stored = factorization.trained_numbers(shape, rank, half_frozen) + one
            require(
                stored >= ratio * numbers - 1e-9,
                f"rank_for_ratio({ratio:.3g}) is {rank}, whose factors and one more of rank 1 hold {stored} of the "
                f"{ratio * numbers:.1f} numbers asked for",
            )
            before = rank


def _check_products(factorization: Factorization, shape: tuple[int, ...]) -> None:
    for rank in _some_ranks(factorization, shape):
        left, right = (_factors(factorization, shape, rank, seed) for seed in (1, 2))
        weight = factorization.compose(left, shape)
        expected = (weight * factorization.compose(right, shape)).sum()
        _require_close(factorization.inner(left, right, shape), expected, "inner")
        stages = factorization.stage_shapes(shape, rank)
        if stages is not None:
            sizes = [tuple(kernel.shape) for kernel in factorization.stages(left, shape)]
            require(sizes == [stage.kernel for stage in stages], f"stages have shapes {sizes}, not stage_shapes'")
        if len(shape) == 2 and factorization.multiply_adds(shape, rank) is not None:
            bias = _random(shape[:1], 4)
            for transposed, matrix in ((False, weight), (True, weight.mT)):
                input = _random((5, matrix.shape[1]), 5)
                added = None if transposed else bias
                product = factorization.multiply(input, left, shape, transposed, added)
                _require_close(product, F.linear(input, matrix, added), f"multiply with transposed={transposed}")


def _check_start(factorization: Factorization, shape: tuple[int, ...]) -> None:
    for rank in _some_ranks(factorization, shape):
        for name, scale in (
            ("default_init_scale", factorization.default_init_scale(shape, rank)),
            ("init_scale_for_std", factorization.init_scale_for_std(shape, rank, 0.1)),
        ):
            require(scale > 0 and math.isfinite(scale), f"{name} is {scale} at rank {rank}")
        factors = _factors(factorization, shape, rank)
        zero = factorization.zero_factor(shape)
        factors[zero] = torch.zeros_like(factors[zero])
        require(not factorization.compose(factors, shape).any(), f"with {zero} zero the weight must be zero")
        gradient = _gradients(factorization, factors, _random(shape, 6))[zero]
        require(bool(gradient.any()), f"where an update starts, {zero} gets no gradient and nothing trains")
    scale = factorization.init_scale_for_std(shape, rank, 0.1)
    draws = {
        name: (torch.rand(200, *factor.shape, generator=torch.Generator().manual_seed(place)) * 2 - 1) * scale
        for place, (name, factor) in enumerate(factors.items())
    }
    std = vmap(lambda given: factorization.compose(given, shape))(draws).std().item()
    require(0.08 < std < 0.12, f"factors drawn at init_scale_for_std(std=0.1) make a weight of std {std:.3g}")


def _dense_layers(shape: tuple[int, ...]) -> list[tuple[type[LowRankLayer], nn.Module, Tensor]]:
    """Dense layers with a weight of this shape, each with its low-rank class and an input."""
    if len(shape) == 2:
        return [(LowRankLinear, nn.Linear(shape[1], shape[0]), _random((5, shape[1]), 7))]
    if len(shape) != 4:
        return []
    geometry: dict[str, Any] = {"kernel_size": shape[2:], "padding": (shape[2] // 2, 0), "stride": (1, 2)}
    return [
        (LowRankConv2d, nn.Conv2d(shape[1], shape[0], **geometry), _random((2, shape[1], 7, 8), 7)),
        (LowRankConvTranspose2d, nn.ConvTranspose2d(*shape[:2], **geometry), _random((2, shape[0], 5, 4), 7)),
    ]


def _check_layers(factorization: Factorization, shape: tuple[int, ...]) -> None:
    for kind, dense, input in _dense_layers(shape):
        _check_layer(factorization, shape, kind, dense, input)


def _check_layer(
    factorization: Factorization, shape: tuple[int, ...], kind: type[LowRankLayer], dense: nn.Module, input: Tensor
) -> None:
    weight = _random(shape, 8)
    dense.double().load_state_dict({**dense.state_dict(), "weight": weight})
    rank = _some_ranks(factorization, shape)[-2 if factorization.max_rank(shape) > 1 else -1]
    decoupled = (False, True) if factorization.bilinear(shape) else (False,)
    for role, decouple, half_frozen in (
        *itertools.product(("update", "weight"), decoupled, (False,)),
        *itertools.product(("update",), (False,), _ways_to_train(factorization, shape)[1:]),
    ):
        settings: dict[str, Any] = {"role": role, "decouple": decouple, "half_frozen": half_frozen}
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        layer = kind.from_dense(deepcopy(dense), factorization, rank, seed=1, **settings)
        if role == "update":
            _require_close(layer.weight, weight, f"the weight of a new layer ({shown})")
        layer.reset_factors(seed=2)
        drawn = {name: value.clone() for name, value in layer.named_parameters()}
        layer.reset_factors(seed=2)
        same = all(torch.equal(value, drawn[name]) for name, value in layer.named_parameters())
        require(same, f"one seed draws two sets of factors ({shown})")
        _perturb(layer)
        effective = layer.weight.detach().clone()
        output = torch.func.functional_call(dense, {"weight": effective}, input)
        layer.compute = "dense"
        _require_close(layer(input), output, f"the layer computed densely ({shown})")
        if layer._can_contract():
            layer.compute = "contracted"
            _require_close(layer(input), output, f"the layer computed factor by factor ({shown})")
        square = layer.update().square().sum()
        _require_close(frobenius_norm_squared(layer), square, f"the norm by inner products ({shown})")
        layer.merge()
        _require_close(layer(input), output, f"the merged layer ({shown})")
        layer.unmerge()
        require(torch.equal(layer.weight, effective), f"unmerge does not restore the layer ({shown})")
        require(
            torch.equal(layer.to_dense().get_parameter("weight"), effective), f"to_dense changes the weight ({shown})"
        )
        if role == "update":
            layer.fold()
            layer.reset_factors(seed=3)
            _require_close(layer.weight, effective, f"the weight after fold and reset_factors ({shown})")
    _check_model(factorization, dense, rank, input)


def _check_model(factorization: Factorization, dense: nn.Module, rank: int, input: Tensor) -> None:
    model = nn.Sequential(deepcopy(dense))
    conversion = convert(model, factorization, rank=rank, allow_larger=True)
    layer = model[0]
    require(isinstance(layer, LowRankLayer), "convert leaves the layer alone")
    assert isinstance(layer, LowRankLayer)
    _perturb(layer)
    output = model(input)
    recovered = nn.Sequential(deepcopy(dense))
    recovered.load_state_dict(dense_state_dict(model.state_dict(), conversion.specs))
    _require_close(recovered(input), output, "the model loaded from dense_state_dict")
    _require_close(recover(model)(input), output, "the recovered model")


def _perturb(layer: LowRankLayer) -> None:
    with torch.no_grad():
        for place, factor in enumerate(layer.factors.values()):
            factor.copy_(_random(factor.shape, 20 + place))


_RULES = {
    "the factors are what it says": _check_factors,
    "compose makes the weight": _check_compose,
    "compose can be mapped over clients": _check_mapping,
    "decompose comes near the weight": _check_decompose,
    "ranks follow ratios": _check_ratios,
    "products equal those of the composed weight": _check_products,
    "an update starts at zero and trains": _check_start,
    "its layers equal dense ones": _check_layers,
}
