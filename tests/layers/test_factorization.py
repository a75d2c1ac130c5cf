"""One contract for every registered factorization, then what is particular to each."""

import itertools
import json
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from lightning_lowrank.layers import (
    BlockKronecker,
    Factorization,
    MatrixProduct,
    factorization_from_dict,
    registered_factorizations,
)

VARIANTS = {
    "MatrixProduct": [{"layout": "permuted"}, {"layout": "raw"}],
    "BlockKronecker": [{"grid": False}, {"grid": True}],
}
FACTORIZATIONS = [
    pytest.param(kind(**arguments), id=f"{name}-{'-'.join(map(str, arguments.values()))}")
    for name, kind in registered_factorizations().items()
    for arguments in VARIANTS.get(name, [{}])
]
SHAPES = [(6, 4), (5, 7), (4, 3, 3, 3), (4, 3, 2, 3), (6, 1, 3, 3), (4, 3, 5), (3, 2, 2, 3, 2)]

every_factorization = pytest.mark.parametrize("factorization", FACTORIZATIONS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def composed_by_hand(factorization, factors, shape):
    """The dense weight, derived number by number from the definitions."""
    left, right = factors["U"], factors["V"]
    if isinstance(factorization, MatrixProduct):
        weight = left.new_zeros(shape)
        row_modes = (len(shape) - 1) // 2
        row_shape, column_shape = (shape[0], *shape[2 : 2 + row_modes]), (shape[1], *shape[2 + row_modes :])
        for flat, index in enumerate(np.ndindex(*shape)):
            if factorization.layout == "raw":
                row, column = divmod(flat, math.prod(column_shape))
            else:
                row = np.ravel_multi_index((index[0], *index[2 : 2 + row_modes]), row_shape)
                column = np.ravel_multi_index((index[1], *index[2 + row_modes :]), column_shape)
            weight[index] = (left[row] * right[column]).sum()
        return weight
    assert isinstance(factorization, BlockKronecker)
    blocks = [torch.kron(u, v) for u, v in zip(left, right, strict=True)]
    if factorization.grid:
        side = math.isqrt(len(blocks))
        rows = [torch.cat(blocks[start : start + side], dim=1) for start in range(0, len(blocks), side)]
        flat = torch.cat(rows, dim=0).flatten()
    else:
        flat = torch.cat([block.flatten() for block in blocks])
    return flat[: math.prod(shape)].reshape(shape)


def random_factors(factorization, shape, rank, seed=0, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    shapes = factorization.factor_shapes(shape, rank)
    return {name: torch.randn(s, generator=source, dtype=dtype) for name, s in shapes.items()}


def valid_ranks(factorization, shape, half_frozen=False):
    ranks = []
    for rank in range(1, factorization.max_rank(shape, half_frozen) + 1):
        try:
            factorization.check_rank(shape, rank, half_frozen)
        except ValueError:
            continue
        ranks.append(rank)
    return ranks


@every_factorization
@every_shape
@pytest.mark.parametrize("ratio", [0.2, 0.9])
def test_compose_equals_the_definition(factorization, shape, ratio):
    rank = factorization.rank_for_ratio(shape, ratio)
    factors = random_factors(factorization, shape, rank)
    assert tuple(factors) == ("U", "V") == factorization.trained_factors()
    weight = factorization.compose(factors, shape)
    assert weight.is_contiguous()
    torch.testing.assert_close(weight, composed_by_hand(factorization, factors, shape))


@every_factorization
@every_shape
def test_compose_is_linear_in_each_factor(factorization, shape):
    rank = factorization.rank_for_ratio(shape, 0.5)
    first, second = (random_factors(factorization, shape, rank, seed) for seed in (1, 2))
    for name in ("U", "V"):
        mixed = {**first, name: 2 * first[name] - 3 * second[name]}
        expected = 2 * factorization.compose(first, shape) - 3 * factorization.compose(
            {**first, name: second[name]}, shape
        )
        torch.testing.assert_close(factorization.compose(mixed, shape), expected)


@every_factorization
@every_shape
@pytest.mark.parametrize("half_frozen", [False, True])
def test_ratio_for_rank_is_the_largest_ratio_of_that_rank(factorization, shape, half_frozen):
    ranks = valid_ranks(factorization, shape, half_frozen)
    assert ranks[0] == 1
    assert ranks[-1] == factorization.max_rank(shape, half_frozen)
    for rank, following in itertools.zip_longest(ranks, ranks[1:]):
        ratio = factorization.ratio_for_rank(shape, rank, half_frozen)
        assert factorization.rank_for_ratio(shape, ratio, half_frozen) == rank
        if following is None:
            with pytest.raises(ValueError, match="at most rank"):
                factorization.rank_for_ratio(shape, ratio * (1 + 1e-9), half_frozen)
        else:
            assert factorization.rank_for_ratio(shape, ratio * (1 + 1e-9), half_frozen) == following
            assert factorization.lower_rank(shape, following) == rank
    assert factorization.lower_rank(shape, 1) is None


@every_factorization
@every_shape
@pytest.mark.parametrize("half_frozen", [False, True])
def test_factors_hold_at_least_the_share_asked_for(factorization, shape, half_frozen):
    for ratio in np.linspace(0.001, 1, 200):
        rank = factorization.rank_for_ratio(shape, ratio, half_frozen)
        trained = sum(
            math.prod(factorization.factor_shapes(shape, rank)[name])
            for name in factorization.trained_factors(half_frozen)
        )
        assert trained == factorization.trained_numbers(shape, rank, half_frozen)
        assert trained >= ratio * math.prod(shape) - 1e-9


@every_factorization
@every_shape
def test_decompose_has_the_factors_shapes_and_is_exact_at_the_highest_rank(factorization, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for rank in valid_ranks(factorization, shape):
        factors = factorization.decompose(weight, rank)
        assert {name: tuple(f.shape) for name, f in factors.items()} == factorization.factor_shapes(shape, rank)
        assert (factorization.compose(factors, shape) - weight).norm() < weight.norm()
    assert rank == factorization.max_rank(shape)
    torch.testing.assert_close(factorization.compose(factors, shape), weight)


@every_factorization
@pytest.mark.parametrize("shape", [(40, 30), (16, 8, 3, 3)], ids=str)
def test_decompose_gets_closer_with_the_ratio(factorization, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    errors = []
    for ratio in (0.1, 0.3, 0.9):
        factors = factorization.decompose(weight, factorization.rank_for_ratio(shape, ratio))
        errors.append((factorization.compose(factors, shape) - weight).norm().item())
    assert all(after < before for before, after in itertools.pairwise(errors))


@every_factorization
def test_decompose_splits_the_singular_values_evenly(factorization):
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    factors = factorization.decompose(weight, 4)
    norms = {name: factor.norm(dim=0 if factor.dim() == 2 else (1, 2)) for name, factor in factors.items()}
    torch.testing.assert_close(norms["U"], norms["V"])


@every_factorization
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_and_precision_of_decompose(factorization, dtype):
    shape = (8, 4, 2, 2)
    factors = random_factors(factorization, shape, 4, dtype=dtype)
    weight = factorization.compose(factors, shape)
    assert weight.dtype == dtype
    exact = factorization.decompose(weight.double(), 4)
    for name, factor in factorization.decompose(weight.requires_grad_(), 4).items():
        assert factor.dtype == dtype
        assert not factor.requires_grad
        torch.testing.assert_close(factor.abs().double(), exact[name].abs(), rtol=0, atol=8 * torch.finfo(dtype).eps)


@every_factorization
@every_shape
def test_vmap_of_grad_equals_a_loop(factorization, shape):
    rank = factorization.rank_for_ratio(shape, 0.5)
    clients = [random_factors(factorization, shape, rank, seed) for seed in range(3)]
    target = torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def loss(factors):
        return (factorization.compose(factors, shape) - target).pow(3).sum()

    stacked = {name: torch.stack([client[name] for client in clients]) for name in ("U", "V")}
    mapped = vmap(grad(loss))(stacked)
    for index, client in enumerate(clients):
        leaves = {name: factor.clone().requires_grad_() for name, factor in client.items()}
        loss(leaves).backward()
        for name, leaf in leaves.items():
            torch.testing.assert_close(mapped[name][index], leaf.grad)


@every_factorization
@pytest.mark.parametrize("shape", [(6, 4), (4, 2, 3, 3)], ids=str)
def test_default_init_scale_makes_the_first_step_the_dense_one_in_expectation(factorization, shape):
    samples, rate, rank = 20_000, 0.1, 4
    scale = factorization.default_init_scale(shape, rank)
    source = torch.Generator().manual_seed(0)
    shapes = factorization.factor_shapes(shape, rank)
    fixed = (torch.rand(samples, *shapes["U"], generator=source) * 2 - 1) * scale
    gradient = torch.randn(shape, generator=source)

    def change(left):
        def loss(right):
            return (gradient * factorization.compose({"U": left, "V": right}, shape)).sum()

        start = torch.zeros(shapes["V"])
        return factorization.compose({"U": left, "V": start - rate * grad(loss)(start)}, shape)

    mean = vmap(change)(fixed).mean(dim=0)
    assert (mean + rate * gradient).norm() < 0.06 * rate * gradient.norm()


@every_factorization
@pytest.mark.parametrize("shape", [(30, 40), (8, 6, 3, 3)], ids=str)
def test_init_scale_for_std(factorization, shape):
    scale = factorization.init_scale_for_std(shape, 4, std=0.3)
    shapes = factorization.factor_shapes(shape, 4)
    source = torch.Generator().manual_seed(0)
    draws = {name: (torch.rand(400, *s, generator=source) * 2 - 1) * scale for name, s in shapes.items()}
    weights = vmap(lambda factors: factorization.compose(factors, shape))(draws)
    assert weights.std().item() == pytest.approx(0.3, rel=0.03)


@every_factorization
def test_plain_description_roundtrips(factorization):
    description = json.loads(json.dumps(factorization.to_dict()))
    again = factorization_from_dict(description)
    assert again == factorization == pickle.loads(pickle.dumps(factorization))
    assert hash(again) == hash(factorization)
    assert eval(repr(factorization), {**registered_factorizations()}) == factorization
    assert description["name"] == type(factorization).__name__


@every_factorization
@pytest.mark.parametrize("rank", [0, -1, 26, 2.0, True])
def test_ranks_out_of_range_are_refused(factorization, rank):
    for refuse in (factorization.check_rank, factorization.ratio_for_rank):
        with pytest.raises(ValueError, match=rf"rank must be an integer from 1 to \d+ .*{rank}"):
            refuse((6, 4), rank)
    with pytest.raises(ValueError, match="rank must be"):
        factorization.decompose(torch.ones(6, 4), rank)


@every_factorization
@pytest.mark.parametrize("ratio", [0, -0.1, math.nan, math.inf])
def test_ratios_out_of_range_are_refused(factorization, ratio):
    with pytest.raises(ValueError, match="ratio must be"):
        factorization.rank_for_ratio((6, 4), ratio)


@every_factorization
def test_names_of_trained_and_fixed_factors(factorization):
    assert factorization.trained_factors(half_frozen=True) == ("V",)
    assert factorization.fixed_factors() == ()
    assert factorization.fixed_factors(decouple=True) == ("U", "V")
    assert factorization.fixed_factors(half_frozen=True) == ("U",)


def test_variants_differ_and_compare_by_arguments():
    variants = [parameter.values[0] for parameter in FACTORIZATIONS]
    assert len(set(variants)) == len(variants)
    assert MatrixProduct() == MatrixProduct("permuted") != MatrixProduct("raw")
    assert MatrixProduct() != "MatrixProduct()"


def test_a_subclass_registers_by_being_defined():
    class Halved(MatrixProduct):
        def __init__(self, layout="permuted", by=2):
            super().__init__(layout)
            self.by = by

    assert registered_factorizations()["Halved"] is Halved
    assert Factorization not in registered_factorizations().values()
    restored = factorization_from_dict(Halved("raw", by=3).to_dict())
    assert isinstance(restored, Halved)
    assert (restored.layout, restored.by) == ("raw", 3)


def test_unknown_descriptions_are_refused():
    with pytest.raises(ValueError, match="no factorization is named 'Tucker'; defined are BlockKronecker"):
        factorization_from_dict({"name": "Tucker", "arguments": {}})
    with pytest.raises(ValueError, match="keys"):
        factorization_from_dict({"name": "MatrixProduct"})


# Matrix product


@pytest.mark.parametrize(("ratio", "half_frozen", "rank"), [(0.07, False, 7), (0.07, True, 14), (0.0701, False, 8)])
def test_product_rank_is_not_raised_by_rounding_noise(ratio, half_frozen, rank):
    assert 0.07 * 200 * 200 / 400 > 7
    assert MatrixProduct().rank_for_ratio((200, 200), ratio, half_frozen) == rank


def test_product_matrix_of_a_convolution():
    assert MatrixProduct().matrix_shape((8, 3, 5, 7)) == (40, 21)
    assert MatrixProduct().matrix_shape((8, 3, 5)) == (40, 3)
    assert MatrixProduct().matrix_shape((8, 3, 2, 5, 7)) == (80, 21)
    with pytest.raises(ValueError, match="at least two dimensions"):
        MatrixProduct().matrix_shape((8,))


@pytest.mark.parametrize("layout", ["permuted", "raw"])
@every_shape
def test_product_matrix_and_weight_are_inverse(layout, shape):
    product = MatrixProduct(layout)
    weight = torch.arange(math.prod(shape)).reshape(shape)
    assert torch.equal(product.as_weight(product.as_matrix(weight), shape), weight)


def test_product_decompose_is_the_best_of_its_rank():
    weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    product = MatrixProduct()
    values = torch.linalg.svdvals(weight.permute(0, 2, 1, 3).reshape(18, 12))
    for rank in range(1, 12):
        error = (product.compose(product.decompose(weight, rank), weight.shape) - weight).norm()
        torch.testing.assert_close(error, values[rank:].norm())


@pytest.mark.parametrize(("kernel", "padding"), [((3, 3), (1, 1)), ((2, 5), (0, 2))])
def test_permuted_product_is_a_wide_then_a_tall_convolution(kernel, padding):
    channels_out, channels_in, rank = 6, 4, 3
    shape = (channels_out, channels_in, *kernel)
    product = MatrixProduct()
    factors = random_factors(product, shape, rank)
    wide = factors["V"].T.reshape(rank, channels_in, 1, kernel[1])
    tall = factors["U"].reshape(channels_out, kernel[0], rank).permute(0, 2, 1).unsqueeze(3)
    image = torch.randn(2, channels_in, 9, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hidden = nn.functional.conv2d(image, wide, padding=(0, padding[1]))
    expected = nn.functional.conv2d(hidden, tall, padding=(padding[0], 0))
    weight = product.compose(factors, shape)
    torch.testing.assert_close(nn.functional.conv2d(image, weight, padding=padding), expected)


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match=r'layout must be "permuted" or "raw", but is \'mixed\''):
        MatrixProduct("mixed")


# Block-wise Kronecker


def test_kronecker_rank_is_not_raised_by_rounding_noise():
    assert 0.1**2 * 40_000 / 4 > 100
    assert BlockKronecker().rank_for_ratio((200, 200), 0.1) == 100
    assert BlockKronecker().rank_for_ratio((200, 200), 0.1, half_frozen=True) == 400
    assert BlockKronecker(grid=True).rank_for_ratio((200, 200), 0.1) == 100
    assert BlockKronecker(grid=True).rank_for_ratio((200, 200), 0.1001) == 121


def test_kronecker_block_size_is_the_smallest_that_covers_the_weight():
    kronecker = BlockKronecker()
    for rank, size in itertools.product((1, 2, 3, 7, 100), (*range(1, 40), 8193)):
        exact = rank * size**4
        assert kronecker.block_size((exact,), rank) == size
        assert kronecker.block_size((exact + 1,), rank) == size + 1


def test_kronecker_takes_a_vector():
    factors = random_factors(BlockKronecker(), (11,), 2)
    weight = BlockKronecker().compose(factors, (11,))
    torch.testing.assert_close(weight, composed_by_hand(BlockKronecker(), factors, (11,)))


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("shape", [(12, 27), (10, 30)], ids=["whole blocks", "cropped"])
def test_kronecker_decompose_is_the_best_of_each_zero_padded_block(grid, shape):
    kronecker, rank = BlockKronecker(grid), 4
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    size = 3
    assert kronecker.block_size(shape, rank) == size
    padded = torch.zeros(rank * size**4, dtype=torch.float64)
    padded[: weight.numel()] = weight.flatten()
    if grid:
        big = padded.reshape(2 * size**2, 2 * size**2)
        blocks = [half for row in big.chunk(2, dim=0) for half in row.chunk(2, dim=1)]
    else:
        blocks = list(padded.reshape(rank, size**2, size**2))
    factors = kronecker.decompose(weight, rank)
    for block, left, right in zip(blocks, factors["U"], factors["V"], strict=True):
        tiles = torch.stack([tile.flatten() for row in block.chunk(size, 0) for tile in row.chunk(size, 1)])
        torch.testing.assert_close((block - torch.kron(left, right)).norm(), torch.linalg.svdvals(tiles)[1:].norm())


def test_grid_needs_a_perfect_square():
    with pytest.raises(ValueError, match=r"rank must be a perfect square .* such as 4, but is 5"):
        BlockKronecker(grid=True).check_rank((6, 4), 5)
    BlockKronecker(grid=False).check_rank((6, 4), 5)


# Decoupling (AAD), Eq. 8 and 9 of FedMUD


@every_factorization
@pytest.mark.parametrize("shape", [(6, 4), (4, 3, 3, 3)], ids=str)
def test_decoupled_mean_of_recovered_is_recovered_of_means_and_plain_is_not(factorization, shape):
    rank = factorization.rank_for_ratio(shape, 0.5)
    fixed = random_factors(factorization, shape, rank, seed=100)
    clients = [random_factors(factorization, shape, rank, seed) for seed in range(5)]
    mean = {name: torch.stack([client[name] for client in clients]).mean(dim=0) for name in ("U", "V")}

    def decoupled(factors):
        return composed_by_hand(factorization, {"U": factors["U"], "V": fixed["V"]}, shape) + composed_by_hand(
            factorization, {"U": fixed["U"], "V": factors["V"]}, shape
        )

    def plain(factors):
        return composed_by_hand(factorization, factors, shape)

    torch.testing.assert_close(torch.stack([decoupled(c) for c in clients]).mean(dim=0), decoupled(mean))
    assert (torch.stack([plain(c) for c in clients]).mean(dim=0) - plain(mean)).norm() > 0.1
