import copy
import math

import pytest
import torch
from torch import nn

from lightning_lowrank.layers import (
    CP,
    Hadamard,
    MatrixProduct,
    add_frobenius_decay,
    convert,
    frobenius_norm_squared,
    frobenius_penalty,
    low_rank_layers,
)
from tests.helpers import FACTORIZATIONS


def converted(factorization, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(5, 7, (3, 2), groups=1), nn.ConvTranspose2d(7, 6, 3), nn.Flatten(), nn.Linear(11, 9)
    ).double()
    convert(model, factorization, ratio=0.5, allow_larger=True, **settings)
    with torch.no_grad():
        for _, layer in low_rank_layers(model):
            for factor in layer.factors.values():
                factor.normal_()
    return model


def products(model):
    """The dense product of each layer's factors, which the decay never builds."""
    return [
        layer.weight - layer.frozen_weight if layer.role == "update" else layer.weight
        for _, layer in low_rank_layers(model)
    ]


@pytest.mark.parametrize("factorization", FACTORIZATIONS, ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"role": "weight"}, {"alpha": 3.0}, {"decouple": True}, {"half_frozen": True}, {"half_frozen": "V"}],
    ids=str,
)
def test_penalty_and_gradients_equal_those_of_the_dense_products(factorization, settings):
    if ("decouple" in settings or "half_frozen" in settings) and isinstance(factorization, (CP, Hadamard)):
        pytest.skip("needs two factors")
    model = converted(factorization, **settings)
    factors = [factor for _, layer in low_rank_layers(model) for factor in layer.factors.values()]
    expected = 0.3 / 2 * sum(product.square().sum() for product in products(model))
    slopes = torch.autograd.grad(expected, factors)
    penalty = frobenius_penalty(model, 0.3)
    torch.testing.assert_close(penalty, expected)
    for slope, actual in zip(slopes, torch.autograd.grad(penalty, factors), strict=True):
        torch.testing.assert_close(actual, slope)
    factors[0].grad = torch.ones_like(factors[0])
    add_frobenius_decay(model, 0.3)
    for index, (factor, slope) in enumerate(zip(factors, slopes, strict=True)):
        torch.testing.assert_close(factor.grad, slope + (index == 0))
    assert all(p.grad is None for p in model.parameters() if all(p is not factor for factor in factors))


def test_the_gradient_of_a_matrix_product_is_the_one_of_fedhm():
    """d/dU λ/2‖UVᵀ‖² = λ U VᵀV, and the like for V."""
    model = converted(MatrixProduct(), role="weight", include=["3"])
    (_, layer), *_ = low_rank_layers(model)
    left, right = layer.factors["U"], layer.factors["V"]
    add_frobenius_decay(model, 0.1)
    torch.testing.assert_close(left.grad, 0.1 * left @ right.mT @ right)
    torch.testing.assert_close(right.grad, 0.1 * right @ left.mT @ left)
    torch.testing.assert_close(frobenius_norm_squared(layer), layer.weight.square().sum())


def test_only_the_given_parameters_decay():
    model = converted(MatrixProduct())
    first, second, _ = (layer for _, layer in low_rank_layers(model))
    add_frobenius_decay(model, 0.1, [*second.parameters()])
    assert first.factors["U"].grad is None
    assert second.factors["U"].grad is not None
    add_frobenius_decay(model, 0.1, [])


def test_shared_factors_decay_once():
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    model[1].weight = model[0].weight
    convert(model, MatrixProduct(), rank=2, role="weight")
    once = frobenius_norm_squared(model[0])
    torch.testing.assert_close(frobenius_penalty(model, 2.0), once)


def test_a_large_product_is_not_built():
    """A dense product of this size would hold 16 GB."""
    model = nn.Sequential(nn.Linear(4, 4))
    convert(model, MatrixProduct(), rank=1, role="weight")
    layer = copy.deepcopy(model[0])
    layer.weight_shape = (64_000, 64_000)
    layer.factors["U"], layer.factors["V"] = (nn.Parameter(torch.ones(64_000, 2)) for _ in range(2))
    assert frobenius_norm_squared(layer).item() == pytest.approx(4 * 64_000**2, rel=1e-5)


@pytest.mark.parametrize("weight_decay", [-1.0, math.nan, math.inf])
def test_wrong_values_are_refused(weight_decay):
    with pytest.raises(ValueError, match="weight_decay"):
        add_frobenius_decay(converted(MatrixProduct()), weight_decay)
    with pytest.raises(ValueError, match="no low-rank layers"):
        frobenius_penalty(nn.Linear(2, 2), 0.1)
