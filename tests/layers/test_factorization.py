"""The contract of every factorization of the package, then what is particular to each."""

import itertools
import json
import math
import pickle
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowrank.layers import (
    CP,
    BlockKronecker,
    CoreProduct,
    Factorization,
    Hadamard,
    MatrixProduct,
    Stage,
    factorization_from_dict,
)
from lightning_lowrank.registry import subclasses_by_name
from lightning_lowrank.testing import check_factorization
from tests.grids import all_pairs, each_of, in_turn, pairwise

VARIANTS = {
    "MatrixProduct": [{"layout": "permuted"}, {"layout": "channel"}, {"layout": "raw"}],
    "BlockKronecker": [{"grid": False}, {"grid": True}],
    "CoreProduct": [{"heads": 2}],
}
FACTORIZATIONS = [
    pytest.param(kind(**arguments), id="-".join(map(str, (name, *arguments.values()))))
    for name, kind in subclasses_by_name(Factorization).items()
    if kind.__module__.startswith("lightning_lowrank.")
    for arguments in VARIANTS.get(name, [{}])
]
FORMS = [parameter.values[0] for parameter in FACTORIZATIONS]
SHAPES = [
    (6, 4),
    (5, 7),
    (6, 1),
    (4, 3, 3, 3),
    (4, 3, 2, 3),
    (6, 1, 3, 3),
    (5, 3, 1, 1),
    (4, 3, 1, 3),
    (4, 3, 5),
    (2, 3, 7),
    (3, 2, 2, 3, 2),
]
every_factorization = pytest.mark.parametrize("factorization", FACTORIZATIONS)
# Shapes of each number of dimensions, and those with a kernel dimension of size 1.
OF_A_KIND = [
    [shape for shape in SHAPES if (len(shape), 1 in shape[2:]) == kind]
    for kind in ((2, False), (3, False), (4, False), (4, True), (5, False))
]
# Every factorization with every kind of shape, of which the shapes take turns.
CASES = [
    pytest.param(parameter.values[0], shapes[turn % len(shapes)], id=f"{parameter.id}-{shapes[turn % len(shapes)]}")
    for turn, parameter in enumerate(FACTORIZATIONS)
    for shapes in OF_A_KIND
]
BILINEAR_CASES = [case for case in CASES if case.values[0].bilinear(case.values[1])]
every_case = pytest.mark.parametrize(("factorization", "shape"), CASES)
every_bilinear_case = pytest.mark.parametrize(("factorization", "shape"), BILINEAR_CASES)
every_way_to_train = pytest.mark.parametrize(
    ("factorization", "shape", "half_frozen"),
    [
        pytest.param(*case.values, half_frozen, id=f"{case.id}-{half_frozen}")
        for cases, values in ((CASES, [False]), (BILINEAR_CASES, [True, "U", "V"]))
        for case, half_frozen in in_turn(cases, values)
    ],
)
every_case_and_a_ratio = pytest.mark.parametrize(
    ("factorization", "shape", "ratio"),
    [pytest.param(*case.values, ratio, id=f"{case.id}-{ratio}") for case, ratio in in_turn(CASES, [0.2, 0.9])],
)


def composed_by_hand(factorization, factors, shape):
    """The dense weight, derived number by number from the definitions."""
    if isinstance(factorization, CP):
        factors = list(factors.values())
        weight = factors[0].new_zeros(shape)
        for index in np.ndindex(*shape):
            weight[index] = torch.stack([f[i] for f, i in zip(factors, index, strict=True)]).prod(dim=0).sum()
        return weight
    if isinstance(factorization, Hadamard):
        return tucker_by_hand(factors, "1", shape) * tucker_by_hand(factors, "2", shape)
    left, right = factors["U"], factors["V"]
    if isinstance(factorization, CoreProduct):
        blocks = factors["H"].reshape(factorization.heads, *factors["H"].shape[-2:])
        scales = factors.get("S", torch.ones(1, dtype=left.dtype))
        heads = left.unflatten(1, (factorization.heads, -1))
        left = torch.stack([s * (heads[:, i] @ blocks[i]) for i, s in enumerate(scales)], dim=1).flatten(1)
    if isinstance(factorization, (MatrixProduct, CoreProduct)):
        weight = left.new_zeros(shape)
        row_modes = 0 if factorization.layout == "channel" else (len(shape) - 1) // 2
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


def tucker_by_hand(factors, number, shape):
    left, right = factors[f"U{number}"], factors[f"V{number}"]
    weight = left.new_zeros(shape)
    for index in np.ndindex(*shape):
        core = torch.eye(left.shape[1], dtype=left.dtype)
        if len(shape) > 2:
            core = factors[f"T{number}"][(..., *index[2:])]
        weight[index] = left[index[0]] @ core @ right[index[1]]
    return weight


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


@pytest.mark.slow
@each_of(3)
@pytest.mark.parametrize(
    ("factorization", "shape"),
    [
        pytest.param(*pair, marks=() if pair in [case.values for case in CASES] else pytest.mark.slow)
        for pair in itertools.product(FORMS, SHAPES)
    ],
    ids=str,
)
def test_contract(factorization, shape):
    check_factorization(factorization, [shape])


@every_case_and_a_ratio
def test_compose_equals_the_definition(factorization, shape, ratio):
    rank = factorization.rank_for_ratio(shape, ratio)
    factors = random_factors(factorization, shape, rank)
    assert tuple(factors) == factorization.factor_names(shape) == factorization.trained_factors(shape)
    weight = factorization.compose(factors, shape)
    assert weight.is_contiguous()
    torch.testing.assert_close(weight, composed_by_hand(factorization, factors, shape))


@every_way_to_train
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


@every_way_to_train
def test_factors_and_one_more_of_rank_1_hold_the_share_asked_for(factorization, shape, half_frozen):
    names = factorization.trained_factors(shape, half_frozen)

    def numbers(rank):
        shapes = factorization.factor_shapes(shape, rank)
        return sum(math.prod(shapes[name]) for name in names)

    for ratio in np.linspace(0.001, 1, 100):
        rank = factorization.rank_for_ratio(shape, ratio, half_frozen)
        assert numbers(rank) == factorization.trained_numbers(shape, rank, half_frozen)
        assert numbers(rank) + numbers(1) >= ratio * math.prod(shape) - 1e-9
        if not isinstance(factorization, CP):
            assert numbers(rank) >= ratio * math.prod(shape) - 1e-9


@pytest.mark.parametrize(
    "factorization", [parameter for parameter in FACTORIZATIONS if parameter.values[0].bilinear((16, 8))]
)
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
    factors = factorization.decompose(weight.requires_grad_(), 4)
    assert all(factor.dtype == dtype and not factor.requires_grad for factor in factors.values())
    if factorization.bilinear(shape):
        for name, factor in factors.items():
            tolerance = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(factor.abs().double(), exact[name].abs(), rtol=0, atol=tolerance)
    else:
        errors = [
            (factorization.compose({name: f.double() for name, f in found.items()}, shape) - weight).norm().item()
            for found in (factors, exact)
        ]
        assert errors[0] < errors[1] + (0.01 + 8 * torch.finfo(dtype).eps) * weight.norm().item()


@pytest.mark.slow
@pairwise(strength=1)
@every_factorization
@pytest.mark.parametrize("shape", [(6, 4), (4, 2, 3, 3)], ids=str)
def test_default_init_scale_makes_the_first_step_the_dense_one_in_expectation(factorization, shape):
    samples, rate, rank = 40_000, 0.1, 4
    scale = factorization.default_init_scale(shape, rank)
    source = torch.Generator().manual_seed(0)
    shapes = factorization.factor_shapes(shape, rank)
    zero = factorization.zero_factor(shape)
    drawn = {
        name: (torch.rand(samples, *s, generator=source) * 2 - 1) * scale for name, s in shapes.items() if name != zero
    }
    gradient = torch.randn(shape, generator=source)
    start = torch.zeros(shapes[zero])

    def change(others):
        def loss(factor):
            return (gradient * factorization.compose({**others, zero: factor}, shape)).sum()

        return factorization.compose({**others, zero: start - rate * grad(loss)(start)}, shape)

    mean = vmap(change, chunk_size=8000)(drawn).mean(dim=0)
    assert (mean + rate * gradient).norm() < 0.06 * rate * gradient.norm()
    assert not factorization.compose({**{name: f[0] for name, f in drawn.items()}, zero: start}, shape).any()


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
    assert eval(repr(factorization), {**subclasses_by_name(Factorization)}) == factorization
    assert description["name"] == type(factorization).__name__


@pytest.mark.parametrize(("factorization", "rank"), in_turn(FORMS, [0, -1, 26, 2.0, True]))
def test_ranks_out_of_range_are_refused(factorization, rank):
    for refuse in (factorization.check_rank, factorization.ratio_for_rank):
        with pytest.raises(ValueError, match=rf"rank must be an integer from 1 to \d+ .*{rank}"):
            refuse((6, 4), rank)
    with pytest.raises(ValueError, match=r"rank.*1"):
        factorization.decompose(torch.ones(6, 4), rank)


@pytest.mark.parametrize(("factorization", "ratio"), in_turn(FORMS, [0, -0.1, math.nan, math.inf]))
def test_ratios_out_of_range_are_refused(factorization, ratio):
    with pytest.raises(ValueError, match=r"ratio.*0"):
        factorization.rank_for_ratio((6, 4), ratio)


@every_bilinear_case
def test_names_of_trained_and_fixed_factors(factorization, shape):
    assert factorization.trained_factors(shape) == ("U", "V")
    assert factorization.fixed_factors(shape) == ()
    assert factorization.fixed_factors(shape, decouple=True) == ("U", "V")
    for half_frozen, trained, fixed in ((True, "V", "U"), ("U", "V", "U"), ("V", "U", "V")):
        assert factorization.trained_factors(shape, half_frozen) == (trained,)
        assert factorization.fixed_factors(shape, half_frozen=half_frozen) == (fixed,)


@pytest.mark.parametrize(
    ("factorization", "shape", "names"),
    [
        (CP(), (4, 3, 5), "U, V, K0"),
        (CP(), (4, 3, 3, 3), "U, V, K0, K1"),
        (CP(), (3, 2, 2, 3, 2), "U, V, K0, K1, K2"),
        (CoreProduct(), (6, 4), "U, H, V"),
        (Hadamard(), (6, 4), "U1, V1, U2, V2"),
        (Hadamard(), (4, 3, 3, 3), "U1, V1, T1, U2, V2, T2"),
    ],
    ids=str,
)
@pytest.mark.parametrize("half_frozen", [True, "U", "V"])
def test_modifiers_are_refused_where_there_are_more_than_two_factors(factorization, shape, names, half_frozen):
    assert factorization.fixed_factors(shape) == ()
    assert not factorization.bilinear(shape)
    message = re.escape(f"{factorization!r} gives a weight of shape {shape} the factors {names}; half_frozen needs two")
    for ask, arguments in (
        (factorization.trained_factors, (half_frozen,)),
        (factorization.fixed_factors, (False, half_frozen)),
        (factorization.rank_for_ratio, (0.5, half_frozen)),
        (factorization.ratio_for_rank, (1, half_frozen)),
        (factorization.max_rank, (half_frozen,)),
        (factorization.check_rank, (1, half_frozen)),
        (factorization.trained_numbers, (1, half_frozen)),
    ):
        with pytest.raises(ValueError, match=message):
            ask(shape, *arguments)
    with pytest.raises(ValueError, match="decouple needs two"):
        factorization.fixed_factors(shape, decouple=True)


@pytest.mark.parametrize(("factorization", "half_frozen"), in_turn(FORMS, ["u", 1, None, "both"]))
def test_unknown_values_of_half_frozen_are_refused(factorization, half_frozen):
    for ask in (factorization.trained_factors, factorization.max_rank):
        with pytest.raises(ValueError, match=rf'half_frozen must be False, True, "U" or "V", but is {half_frozen!r}'):
            ask((6, 4), half_frozen)
    with pytest.raises(ValueError, match=r'half_frozen.*"U"'):
        factorization.rank_for_ratio((6, 4), 0.5, half_frozen)


# Applying a weight factor by factor


CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def ranks_to_apply(factorization, shape):
    return [rank for rank in valid_ranks(factorization, shape) if rank in (1, 2, 3, 4, 6)]


@pytest.mark.parametrize(("factorization", "shape"), [case for case in CASES if len(case.values[1]) > 2])
def test_stages_equal_the_convolution_with_the_composed_weight(factorization, shape):
    modes = len(shape) - 2
    convolution = CONVOLUTIONS[modes]
    settings = {"stride": [2, 1, 3][:modes], "padding": [1, 2, 0][:modes], "dilation": [1, 2, 1][:modes]}
    neutral = {"stride": 1, "padding": 0, "dilation": 1}
    image = torch.randn(2, shape[1], *[9, 8, 7][:modes], dtype=torch.float64)
    for rank in ranks_to_apply(factorization, shape):
        factors = random_factors(factorization, shape, rank)
        stages = factorization.stage_shapes(shape, rank)
        if stages is None:
            with pytest.raises(ValueError, match="has no chain of convolutions for a weight of shape"):
                factorization.stages(factors, shape)
            continue
        kernels = factorization.stages(factors, shape)
        assert [Stage(tuple(kernel.shape), stage.groups) for kernel, stage in zip(kernels, stages, strict=True)] == [
            *stages
        ]
        owners = []
        for mode in range(modes):
            larger = [position for position, kernel in enumerate(kernels) if kernel.shape[2 + mode] > 1]
            assert len(larger) == (shape[2 + mode] > 1)
            owners.append(larger[0] if larger else 0)
        output = image
        for position, (kernel, stage) in enumerate(zip(kernels, stages, strict=True)):
            own = {
                name: [value if owners[mode] == position else neutral[name] for mode, value in enumerate(values)]
                for name, values in settings.items()
            }
            output = convolution(output, kernel, groups=stage.groups, **own)
        expected = convolution(image, factorization.compose(factors, shape), **settings)
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


@every_factorization
def test_which_forms_are_chains_of_convolutions(factorization):
    shape = (4, 3, 3, 3)
    raw = factorization == MatrixProduct("raw")
    assert (factorization.stage_shapes(shape, 2) is None) == (raw or isinstance(factorization, BlockKronecker))
    assert (factorization.multiply_adds(shape, 2) is None) == (raw or isinstance(factorization, BlockKronecker))
    for like_permuted in ((4, 3), (4, 3, 1, 1), (4, 1, 3, 3), (4, 3, 1, 3)):
        assert (factorization.stage_shapes(like_permuted, 2) is None) == isinstance(factorization, BlockKronecker)


@every_case
def test_stages_can_be_mapped_and_differentiated(factorization, shape):
    if factorization.stage_shapes(shape, 2) is None:
        pytest.skip("no chain of convolutions")
    clients = [random_factors(factorization, shape, 2, seed) for seed in range(3)]
    stacked = {name: torch.stack([client[name] for client in clients]) for name in clients[0]}

    def loss(factors):
        return sum((kernel + 1).pow(3).sum() for kernel in factorization.stages(factors, shape))

    mapped = vmap(grad(loss))(stacked)
    for index, client in enumerate(clients):
        for name, gradient in grad(loss)(client).items():
            torch.testing.assert_close(mapped[name][index], gradient)


MATRICES = [(6, 4), (5, 7), (6, 1), (1, 5), (12, 9), (10, 9), (20, 4), (8, 8), (6, 8), (3, 8)]


@pytest.mark.parametrize(("factorization", "shape", "transposed"), all_pairs(FORMS, MATRICES, [False, True]), ids=str)
def test_multiply_equals_the_composed_weight_and_so_do_its_gradients(factorization, shape, transposed):
    for rank in ranks_to_apply(factorization, shape):
        factors = random_factors(factorization, shape, rank)
        for batch in ((), (3,), (2, 0), (2, 3)):
            input = torch.randn(*batch, shape[0 if transposed else 1], dtype=torch.float64)
            if factorization.multiply_adds(shape, rank) is None:
                with pytest.raises(ValueError, match=r"only where the weight is a matrix as wide as its blocks, \d+"):
                    factorization.multiply(input, factors, shape, transposed)
                continue

            def multiplied(input, factors):
                return factorization.multiply(input, factors, shape, transposed)

            def dense(input, factors):
                weight = factorization.compose(factors, shape)
                return input @ (weight if transposed else weight.mT)

            torch.testing.assert_close(multiplied(input, factors), dense(input, factors))
            gradients = [
                grad(lambda input, factors, f=f: f(input, factors).pow(3).sum(), argnums=(0, 1))(input, factors)
                for f in (multiplied, dense)
            ]
            torch.testing.assert_close(*gradients)


@every_factorization
def test_multiply_can_be_mapped_over_factors(factorization):
    shape, rank = (10, 9), 2
    if factorization == BlockKronecker(grid=True):
        shape, rank = (6, 8), 4
    clients = [random_factors(factorization, shape, rank, seed) for seed in range(3)]
    stacked = {name: torch.stack([client[name] for client in clients]) for name in clients[0]}
    input = torch.randn(3, 2, shape[1], dtype=torch.float64)

    def loss(input, factors):
        return factorization.multiply(input, factors, shape).pow(3).sum()

    mapped = vmap(grad(loss, argnums=1))(input, stacked)
    for index, client in enumerate(clients):
        for name, gradient in grad(loss, argnums=1)(input[index], client).items():
            torch.testing.assert_close(mapped[name][index], gradient)


@every_factorization
def test_multiply_refuses_other_than_matrices(factorization):
    factors = random_factors(factorization, (4, 3, 1, 1), 1)
    with pytest.raises(ValueError, match=r"\(4, 3, 1, 1\)"):
        factorization.multiply(torch.zeros(2, 3, dtype=torch.float64), factors, (4, 3, 1, 1))


class CountedProducts(TorchDispatchMode):
    """Counts multiplications: those of matrix products, and number by number."""

    def __init__(self):
        super().__init__()
        self.in_matrices = self.single = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "mv", "dot"):
            self.in_matrices += output.numel() * args[-2 if name != "addmm" else 1].shape[-1]
        elif name == "mul":
            self.single += output.numel()
        return output


@every_case
def test_multiply_adds_are_those_that_are_done(factorization, shape):
    for rank in ranks_to_apply(factorization, shape):
        factors = random_factors(factorization, shape, rank)
        with CountedProducts() as counted:
            factorization.compose(factors, shape)
        assert counted.in_matrices + counted.single == factorization.compose_multiply_adds(shape, rank)
        count = factorization.multiply_adds(shape, rank)
        if count is None:
            continue
        if len(shape) > 2:
            assert count == sum(kernel.numel() for kernel in factorization.stages(factors, shape))
            continue
        with CountedProducts() as counted:
            factorization.multiply(torch.ones(5, shape[1], dtype=torch.float64), factors, shape)
        assert counted.in_matrices == 5 * count


@every_case_and_a_ratio
def test_inner_is_the_inner_product_of_the_composed_weights(factorization, shape, ratio):
    rank = factorization.rank_for_ratio(shape, ratio)
    left, right = (random_factors(factorization, shape, rank, seed) for seed in (1, 2))

    def dense(left, right):
        return (composed_by_hand(factorization, left, shape) * composed_by_hand(factorization, right, shape)).sum()

    for one, other in ((left, right), (left, left)):
        value = factorization.inner(one, other, shape)
        assert value.shape == ()
        torch.testing.assert_close(value, dense(one, other))

    def composed(left, right):
        return (factorization.compose(left, shape) * factorization.compose(right, shape)).sum()

    gradients = [
        grad(f, argnums=(0, 1))(left, right)
        for f in (lambda one, other: factorization.inner(one, other, shape), composed)
    ]
    torch.testing.assert_close(*gradients)


@every_case
def test_inner_can_be_mapped(factorization, shape):
    clients = [random_factors(factorization, shape, 1, seed) for seed in range(3)]
    stacked = {name: torch.stack([client[name] for client in clients]) for name in clients[0]}
    mapped = vmap(lambda factors: factorization.inner(factors, clients[0], shape))(stacked)
    expected = [factorization.inner(client, clients[0], shape) for client in clients]
    torch.testing.assert_close(mapped, torch.stack(expected))


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

    assert subclasses_by_name(Factorization)["Halved"] is Halved
    assert Factorization not in subclasses_by_name(Factorization).values()
    restored = factorization_from_dict(Halved("raw", by=3).to_dict())
    assert isinstance(restored, Halved)
    assert (restored.layout, restored.by) == ("raw", 3)


def test_unknown_descriptions_are_refused():
    with pytest.raises(ValueError, match=r"factorization.*'Tucker'.*BlockKronecker"):
        factorization_from_dict({"name": "Tucker", "arguments": {}})
    with pytest.raises(ValueError, match="keys"):
        factorization_from_dict({"name": "MatrixProduct"})


# Matrix product


@pytest.mark.parametrize(
    ("ratio", "half_frozen", "rank"), [(0.07, False, 7), (0.07, True, 14), (0.07, "V", 14), (0.0701, False, 8)]
)
def test_product_rank_is_not_raised_by_rounding_noise(ratio, half_frozen, rank):
    assert 0.07 * 200 * 200 / 400 > 7
    assert MatrixProduct().rank_for_ratio((200, 200), ratio, half_frozen) == rank


def test_product_matrix_of_a_convolution():
    assert MatrixProduct().matrix_shape((8, 3, 5, 7)) == (40, 21)
    assert MatrixProduct().matrix_shape((8, 3, 5)) == (40, 3)
    assert MatrixProduct().matrix_shape((8, 3, 2, 5, 7)) == (80, 21)
    assert MatrixProduct("channel").matrix_shape((8, 3, 5, 7)) == (8, 105)
    assert MatrixProduct("raw").matrix_shape((8, 3, 5, 7)) == (40, 21)


@pytest.mark.parametrize("factorization", [MatrixProduct(), CP(), Hadamard(), CoreProduct()], ids=str)
def test_vectors_are_refused(factorization):
    for ask, arguments in (
        (factorization.rank_for_ratio, (0.5,)),
        (factorization.factor_shapes, (1,)),
        (factorization.stage_shapes, (1,)),
        (factorization.max_rank, ()),
    ):
        with pytest.raises(ValueError, match="at least two dimensions"):
            ask((8,), *arguments)


def test_product_with_one_factor_frozen_spends_the_share_on_the_other():
    product, shape = MatrixProduct(), (8, 3, 5, 7)
    assert product.rank_for_ratio(shape, 0.1, "U") == math.ceil(0.1 * 40)
    assert product.rank_for_ratio(shape, 0.1, "V") == math.ceil(0.1 * 21)
    assert (product.max_rank(shape, "U"), product.max_rank(shape, "V"), product.max_rank(shape)) == (40, 21, 21)


@pytest.mark.parametrize("layout", ["permuted", "channel", "raw"])
def test_product_matrix_and_weight_are_inverse(layout):
    product = MatrixProduct(layout)
    for shape in SHAPES:
        weight = torch.arange(math.prod(shape)).reshape(shape)
        assert torch.equal(product.as_weight(product.as_matrix(weight), shape), weight)


def test_product_decompose_is_the_best_of_its_rank():
    weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    product = MatrixProduct()
    values = torch.linalg.svdvals(weight.permute(0, 2, 1, 3).reshape(18, 12))
    for rank in range(1, 12):
        error = (product.compose(product.decompose(weight, rank), weight.shape) - weight).norm()
        torch.testing.assert_close(error, values[rank:].norm())


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match=r"layout.*'channel'.*'raw'"):
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
    with pytest.raises(ValueError, match=r"rank.*BlockKronecker.*grid=True"):
        BlockKronecker(grid=True).check_rank((6, 4), 5)
    BlockKronecker(grid=False).check_rank((6, 4), 5)


def test_kronecker_multiplies_in_blocks_where_the_weight_is_as_wide_as_they_are():
    kronecker, grid = BlockKronecker(), BlockKronecker(grid=True)
    assert kronecker.multiply_adds((1024, 1024), 1) == 2 * 32**3
    assert kronecker.multiply_adds((20, 4), 6) == 5 * 2 * 2**3
    assert kronecker.multiply_adds((1024, 1000), 1) is None
    assert grid.multiply_adds((8, 8), 4) == 4 * 2 * 2**3
    assert grid.multiply_adds((3, 8), 4) == 2 * 2 * 2**3
    assert kronecker.multiply_adds((8, 8), 4) is None


# CP


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ((100, 784), (59, 44)),
        ((10, 100), (6, 5)),
        ((32, 3, 3, 3), (14, 11)),
        ((64, 32, 3, 3), (120, 90)),
        ((128, 64, 3, 3), (248, 186)),
        ((256, 128, 3, 3), (504, 378)),
        ((256, 256, 3, 3), (759, 569)),
        ((256, 256), (85, 64)),
        ((10, 256), (6, 5)),
    ],
    ids=str,
)
def test_cp_ranks_of_tdpfed_table_1(shape, ranks):
    assert tuple(CP().rank_for_ratio(shape, 1 / compression) for compression in (1.5, 2)) == ranks
    assert tuple(CP().rank_for_ratio(shape[::-1], 1 / compression) for compression in (1.5, 2)) == ranks


def test_cp_rank_of_a_half_goes_down_and_rounding_noise_does_not_raise_it():
    assert CP().rank_for_ratio((200, 200), 0.075) == 7
    assert CP().rank_for_ratio((200, 200), 0.075 * (1 + 1e-15)) == 7
    assert CP().rank_for_ratio((200, 200), 0.075 * (1 + 1e-9)) == 8
    assert CP().rank_for_ratio((200, 200), 1e-6) == 1
    assert CP().rank_for_ratio((200, 100), 0.1, "U") == 20
    assert CP().rank_for_ratio((200, 100), 0.1, "V") == 10


def test_cp_of_a_linear_weight_is_the_matrix_product():
    weight = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = CP().decompose(weight, 3), MatrixProduct().decompose(weight, 3)
    torch.testing.assert_close(CP().compose(ours, (9, 5)), MatrixProduct().compose(theirs, (9, 5)))
    assert CP().bilinear((9, 5))
    assert not CP().bilinear((9, 5, 1))


@pytest.mark.slow
def test_cp_decompose_finds_a_weight_of_low_rank_and_beats_its_start():
    shape = (12, 10, 3, 3)
    weight = composed_by_hand(CP(), random_factors(CP(), shape, 3), shape)
    factors = CP().decompose(weight, 4)
    assert (CP().compose(factors, shape) - weight).norm() < 0.02 * weight.norm()
    norms = torch.stack([factor.norm(dim=0) for factor in factors.values()])
    torch.testing.assert_close(norms, norms[:1].expand_as(norms))
    again = CP().decompose(weight, 4)
    assert all(torch.equal(again[name], factor) for name, factor in factors.items())
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slices = torch.linalg.svdvals(noise.permute(2, 3, 0, 1)).flatten().sort(descending=True).values
    error = (CP().compose(CP().decompose(noise, 20), shape) - noise).norm()
    assert error < 0.95 * slices[20:].norm()


def test_a_weight_of_zeros_is_decomposed():
    for factorization in (CP(), Hadamard(), MatrixProduct(), BlockKronecker()):
        for shape in ((6, 4), (4, 3, 3, 3)):
            factors = factorization.decompose(torch.zeros(shape), 2)
            assert all(factor.isfinite().all() for factor in factors.values())
            torch.testing.assert_close(factorization.compose(factors, shape), torch.zeros(shape))


# CoreProduct


def test_a_core_stands_between_orthonormal_factors_of_the_truncated_svd():
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    left, values, right = np.linalg.svd(weight.numpy())
    for core, rank in ((CoreProduct(), 4), (CoreProduct(heads=2), 2)):
        factors = core.decompose(weight, rank)
        best = torch.from_numpy(left[:, :4] * values[:4] @ right[:4])
        torch.testing.assert_close(core.compose(factors, weight.shape), best)
        for side in ("U", "V"):
            torch.testing.assert_close(factors[side].T @ factors[side], torch.eye(4, dtype=torch.float64))
        torch.testing.assert_close(core.core(factors).diagonal(), torch.from_numpy(values[:4].copy()))


def test_one_head_keeps_the_contract():
    check_factorization(CoreProduct(), shapes=[(6, 9), (6, 4, 3, 3)])


# Hadamard


def test_hadamard_reaches_the_square_of_its_rank():
    weight = Hadamard().compose(random_factors(Hadamard(), (20, 18), 3), (20, 18))
    assert torch.linalg.matrix_rank(weight) == 9


@pytest.mark.parametrize("shape", [(20, 18), (16, 8, 3, 3)], ids=str)
def test_hadamard_rank_is_the_smallest_that_holds_the_share(shape):
    hadamard = Hadamard()
    positions = math.prod(shape[2:]) if len(shape) > 2 else 0
    for rank in range(1, hadamard.max_rank(shape) + 1):
        numbers = 2 * rank * (shape[0] + shape[1]) + 2 * rank**2 * positions
        assert hadamard.trained_numbers(shape, rank) == numbers
        assert hadamard.rank_for_ratio(shape, numbers / math.prod(shape)) == rank
        assert hadamard.rank_for_ratio(shape, (numbers - 1) / math.prod(shape)) == rank


@pytest.mark.slow
def test_hadamard_decompose_is_better_than_the_singular_value_decomposition():
    weight = torch.randn(24, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(weight)
    for rank in (1, 2, 5):
        error = (Hadamard().compose(Hadamard().decompose(weight, rank), weight.shape) - weight).norm()
        assert error < (1 + 1e-9 if rank == 1 else 0.97) * values[rank:].norm()


def test_hadamard_decompose_is_never_worse_than_its_start():
    left, right = random_factors(MatrixProduct(), (12, 9), 2).values()
    weight = left @ right.mT
    torch.testing.assert_close(Hadamard().compose(Hadamard().decompose(weight, 2), (12, 9)), weight)
    with torch.no_grad():
        again = Hadamard().decompose(weight, 2)
    first = Hadamard().decompose(weight, 2)
    assert all(torch.equal(again[name], factor) for name, factor in first.items())


# Decoupling (AAD), Eq. 8 and 9 of FedMUD
