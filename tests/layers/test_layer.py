import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from lightning_lowrank.layers import (
    CP,
    BlockKronecker,
    Hadamard,
    LowRankConv2d,
    LowRankLayer,
    LowRankLinear,
    MatrixProduct,
    low_rank_class,
)
from lightning_lowrank.seeding import derive_seed
from tests.grids import all_pairs, daily, in_turn, nightly_except, pairwise
from tests.helpers import FACTORIZATIONS

DENSE = {
    "linear": (lambda: nn.Linear(10, 8), (3, 10)),
    "linear without bias": (lambda: nn.Linear(10, 8, bias=False), (3, 5, 10)),
    "conv": (lambda: nn.Conv2d(6, 8, 3), (2, 6, 9, 8)),
    "strided dilated": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=(2, 1), dilation=2), (2, 6, 9, 8)),
    "groups, no bias": (lambda: nn.Conv2d(6, 8, 3, groups=2, bias=False), (2, 6, 9, 8)),
    "circular, kernel 3×5": (lambda: nn.Conv2d(6, 8, (3, 5), padding=(1, 2), padding_mode="circular"), (2, 6, 9, 8)),
    "same, even kernel, reflect": (
        lambda: nn.Conv2d(6, 8, (2, 4), padding="same", padding_mode="reflect"),
        (2, 6, 9, 8),
    ),
    "same, even kernel": (lambda: nn.Conv2d(6, 8, (4, 2), padding="same"), (2, 6, 9, 8)),
}
GEOMETRIES = {
    **DENSE,
    "square linear": (lambda: nn.Linear(9, 9), (2, 9)),
    "one position": (lambda: nn.Linear(6, 10), (6,)),
    "no sample": (lambda: nn.Conv2d(4, 6, 3, groups=2), (0, 4, 7, 7)),
    "conv 1d": (lambda: nn.Conv1d(6, 8, 5, stride=3, padding=2, dilation=2), (2, 6, 17)),
    "conv 1d, groups, circular": (
        lambda: nn.Conv1d(6, 8, 3, groups=2, padding=2, padding_mode="circular", bias=False),
        (2, 6, 9),
    ),
    "conv 1d, unbatched": (lambda: nn.Conv1d(6, 8, 3, padding="same", dilation=2), (6, 9)),
    "conv 1×1, strided": (lambda: nn.Conv2d(6, 8, 1, stride=(2, 3), padding=1), (2, 6, 9, 8)),
    "conv 1×3, replicate": (
        lambda: nn.Conv2d(6, 8, (1, 3), stride=(2, 1), padding=(1, 2), padding_mode="replicate"),
        (2, 6, 9, 8),
    ),
    "conv 5×1, valid": (lambda: nn.Conv2d(6, 8, (5, 1), padding="valid", dilation=(2, 1)), (2, 6, 12, 5)),
    "depthwise": (lambda: nn.Conv2d(6, 12, 3, groups=6, padding=1, stride=2), (2, 6, 9, 8)),
    "groups, unbatched": (lambda: nn.Conv2d(6, 9, (3, 2), groups=3, padding=(0, 1)), (6, 9, 8)),
    "groups, reflect, strided": (
        lambda: nn.Conv2d(4, 6, 3, groups=2, stride=(1, 2), padding=(2, 1), padding_mode="reflect"),
        (2, 4, 9, 8),
    ),
    "conv 3d": (
        lambda: nn.Conv3d(4, 6, (3, 2, 3), stride=(1, 2, 1), padding=(1, 0, 2), dilation=(1, 1, 2)),
        (2, 4, 5, 6, 7),
    ),
    "conv 3d, groups": (lambda: nn.Conv3d(4, 6, 3, groups=2, padding="same", bias=False), (1, 4, 4, 5, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(6, 8, 4, stride=2, padding=1, output_padding=1), (2, 6, 7)),
    "transposed": (
        lambda: nn.ConvTranspose2d(6, 8, (3, 4), stride=(2, 3), padding=(1, 0), output_padding=(1, 2), dilation=(1, 2)),
        (2, 6, 5, 4),
    ),
    "transposed, groups": (lambda: nn.ConvTranspose2d(6, 8, 3, groups=2, stride=2), (2, 6, 5, 4)),
    "transposed, groups, unbatched": (lambda: nn.ConvTranspose2d(6, 9, 3, groups=3, padding=1, bias=False), (6, 5, 4)),
    "transposed 1×1": (lambda: nn.ConvTranspose2d(6, 8, 1, stride=2, output_padding=1), (2, 6, 5, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 6, (2, 3, 1), stride=(2, 1, 2)), (2, 4, 3, 4, 3)),
    "embedding": (lambda: nn.Embedding(12, 9), (3, 4)),
    "embedding with padding": (lambda: nn.Embedding(12, 9, padding_idx=2), (5,)),
}
BILINEAR = [MatrixProduct(), MatrixProduct("raw"), BlockKronecker(), BlockKronecker(grid=True)]
ROLES = ["update", "weight"]
MODIFIERS = {"plain": {}, "decoupled": {"decouple": True}, "half-frozen": {"half_frozen": True}}

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

every_role = pytest.mark.parametrize("role", ROLES)
every_modifier = pytest.mark.parametrize("modifier", MODIFIERS)
every_factorization = pytest.mark.parametrize("factorization", BILINEAR, ids=str)


def low_rank(module, factorization=None, rank=4, **settings):
    return low_rank_class(module).from_dense(module, factorization or MatrixProduct(), rank, **settings)


def make(kind, seed=0):
    torch.manual_seed(seed)
    build, shape = GEOMETRIES[kind]
    module = build()
    return module, torch.randint(12, shape) if isinstance(module, nn.Embedding) else torch.randn(shape)


def scramble(layer, seed=1):
    """Give every factor a value, as training would, so that no term of the weight is zero."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in layer.factors.values():
            factor.copy_(torch.randn(factor.shape, generator=source))


def weight_by_hand(layer):
    shape = layer.weight_shape
    trained, fixed = dict(layer.factors.items()), dict(layer.fixed.items())
    if layer.decouple:
        weight = layer.factorization.compose({"U": trained["U"], "V": fixed["V"]}, shape)
        weight = weight + layer.factorization.compose({"U": fixed["U"], "V": trained["V"]}, shape)
    else:
        weight = layer.factorization.compose({**fixed, **trained}, shape)
    return weight * layer.scale + layer.frozen_weight if layer.role == "update" else weight


def can_contract(layer):
    layer.compute = "contracted"
    try:
        return layer._can_contract()
    finally:
        layer.compute = "auto"


@pairwise(strength=1)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("factorization", FACTORIZATIONS, ids=str)
def test_both_ways_equal_the_dense_layer_with_the_recovered_weight(geometry, factorization):
    """Output, input gradient and factor gradients, in both roles, with every modifier, to 1e-10 in float64."""
    module, batch = make(geometry)
    if low_rank_class(module).why_not(module, factorization):
        assert isinstance(factorization, BlockKronecker)
        assert module.padding_idx is not None
        return
    module.double()
    if batch.is_floating_point():
        batch = batch.double().requires_grad_()
    shape = tuple(module.weight.shape)
    rank = factorization.rank_for_ratio(shape, 0.45)
    modifiers = MODIFIERS.values() if factorization.bilinear(shape) else [{}]
    contracted = 0
    for role, modifier in itertools.product(["update", "weight"], modifiers):
        settings = {"alpha": 3.0} if role == "update" else {"init": "uniform"}
        layer = low_rank(copy.deepcopy(module), factorization, rank, role=role, **settings, **modifier)
        scramble(layer)
        inputs = [*layer.factors.values(), *((batch,) if batch.is_floating_point() else ())]
        reference = copy.deepcopy(module)
        expected = functional_call(reference, {"weight": weight_by_hand(layer)}, (batch,))
        weights = torch.cos(torch.arange(expected.numel()).reshape(expected.shape))
        slopes = torch.autograd.grad((expected * weights).sum(), inputs)
        for compute in ("dense", "contracted") if can_contract(layer) else ("dense",):
            layer.compute = compute
            output = layer(batch)
            torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
            contracted += compute == "contracted"
            for actual, slope in zip(torch.autograd.grad((output * weights).sum(), inputs), slopes, strict=True):
                torch.testing.assert_close(actual, slope, rtol=1e-10, atol=1e-10)
        back = layer.to_dense()
        assert type(back) is type(reference)
        assert repr(back) == repr(reference)
        assert list(back.state_dict()) == list(reference.state_dict())
        assert back.weight.requires_grad
        torch.testing.assert_close(back(batch), expected, rtol=1e-10, atol=1e-10)
    assert contracted == (2 * len(modifiers) if can_contract(layer) else 0)
    assert can_contract(layer) or isinstance(factorization, BlockKronecker) or factorization == MatrixProduct("raw")


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_gradients_spare_the_padding(padding_idx):
    module = nn.Embedding(12, 9, padding_idx=padding_idx).double()
    layer = low_rank(module, role="weight", init="uniform", init_scale=1.0)
    batch = torch.tensor([[2, 3], [2, 7]])
    slopes = {}
    for compute in ("dense", "contracted"):
        layer.compute = compute
        slopes[compute] = torch.autograd.grad(layer(batch).square().sum(), list(layer.factors.values()))
    for dense, contracted in zip(slopes["dense"], slopes["contracted"], strict=True):
        torch.testing.assert_close(dense, contracted)
    assert bool(slopes["contracted"][0][2].any()) is (padding_idx is None)


@pytest.mark.parametrize("size", [(11, 9), [2, 8, 10, 8]])
@pytest.mark.parametrize("compute", ["dense", "contracted"])
def test_transposed_convolutions_take_an_output_size(size, compute):
    module = nn.ConvTranspose2d(6, 8, 3, stride=2, padding=1)
    batch = torch.randn(2, 6, 5, 4)
    size = [10, 8] if size == [2, 8, 10, 8] else [9, 8]
    expected = module(batch, output_size=size)
    layer = low_rank(module, compute=compute)
    assert torch.equal(layer(batch, output_size=size), expected)
    assert list(layer(batch, output_size=size).shape[2:]) == size


# Which of the two ways


def multiply_adds_of(function):
    """Count the multiply-adds of the products that torch really runs."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("geometry", "compute", "factorization"),
    [
        (geometry, compute, factorization)
        for compute in ("dense", "contracted")
        for geometry, factorization in in_turn(
            [name for name in GEOMETRIES if "embedding" not in name and name != "no sample"],
            [MatrixProduct(), MatrixProduct("channel"), CP()],
        )
    ],
    ids=str,
)
def test_multiply_adds_are_what_torch_counts(geometry, factorization, compute):
    module, batch = make(geometry)
    rank = factorization.rank_for_ratio(tuple(module.weight.shape), 0.4)
    for role in ("update", "weight"):
        layer = low_rank(copy.deepcopy(module), factorization, rank, role=role, compute=compute, init="uniform")
        if compute == "dense":
            layer.merge()
        with torch.no_grad():
            assert layer.multiply_adds(batch) == multiply_adds_of(lambda layer=layer: layer(batch))


@pytest.mark.parametrize(
    ("role", "settings", "dtype"),
    [
        ("update", {}, torch.float32),
        ("weight", {}, torch.float32),
        ("update", {"dropout": 0.5}, torch.float32),
        ("update", {}, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("through_input", [False, True])
def test_auto_takes_the_way_that_torch_counts_fewer_for(role, settings, dtype, recorded, through_input):
    """Forward and backward are run both ways at many batch sizes; ``auto`` must be the cheaper each time."""
    module = nn.Linear(48, 40).to(dtype)
    layer = low_rank(module, rank=16, role=role, init="uniform", init_scale=1.0, **settings)
    twice = bool(settings) or dtype == torch.bfloat16
    chosen = []
    for positions in (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 512):
        batch = torch.randn(positions, 48, dtype=dtype, requires_grad=through_input and recorded)
        costs = {}
        for compute in ("dense", "contracted"):
            layer.compute = compute
            with torch.set_grad_enabled(recorded):
                costs[compute] = multiply_adds_of(
                    lambda: layer(batch).square().sum().backward() if recorded else layer(batch)  # noqa: B023
                )
        layer.compute = "auto"
        with torch.set_grad_enabled(recorded):
            assert layer.contracts(batch) is (costs["contracted"] < costs["dense"])
        chosen.append(layer.contracts(batch))
    assert chosen[0]
    if role == "update" and not recorded:
        assert chosen[-1] is twice
        layer.compute = "dense"
        composing = layer.factorization.compose_multiply_adds(layer.weight_shape, 16)
        assert layer.multiply_adds(batch) + composing == multiply_adds_of(lambda: layer(batch))
        layer.compute, layer.training = "auto", False
        assert layer.contracts(batch) is (dtype == torch.bfloat16)


def test_contraction_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r'compute="contracted".*BlockKronecker.*grid=False'):
        low_rank(nn.Conv2d(6, 8, 3), BlockKronecker(), compute="contracted")


# LoRA


@pytest.mark.parametrize(
    ("dense", "random", "rows"),
    [("linear", "V", 10), ("conv", "V", 18), ("transposed", "U", 18), ("embedding", "U", 12)],
)
def test_lora_starts_with_the_input_side_at_random(dense, random, rows):
    module, batch = make(dense)
    expected = module(batch)
    layer = low_rank(module, init="lora", alpha=8.0, seed=2)
    zero = "U" if random == "V" else "V"
    assert not layer.factors[zero].any()
    assert layer.factors[random].shape[0] == rows
    bound = 1 / math.sqrt(rows)
    assert 0.7 * bound < layer.factors[random].abs().max() <= bound
    assert torch.equal(layer(batch), expected)
    first = layer.factors[random].detach().clone()
    scramble(layer)
    layer.reset_factors(2)
    assert torch.equal(layer.factors[random], first)
    assert not layer.factors[zero].any()


@pytest.mark.parametrize(("stabilized", "scale"), [(False, 8 / 4), (True, 8 / 2)])
@pytest.mark.parametrize("compute", ["dense", "contracted"])
def test_alpha_scales_the_update(stabilized, scale, compute):
    module, batch = make("conv")
    layer = low_rank(module, MatrixProduct("channel"), alpha=8.0, rank_stabilized=stabilized, compute=compute)
    scramble(layer)
    down, up = layer.factors["V"].mT.reshape(4, 6, 3, 3), layer.factors["U"].reshape(8, 4, 1, 1)
    expected = nn.functional.conv2d(batch, layer.frozen_weight, layer.bias)
    expected = expected + scale * nn.functional.conv2d(nn.functional.conv2d(batch, down), up)
    torch.testing.assert_close(layer(batch), expected, rtol=1e-4, atol=1e-4)
    assert layer.scale == scale
    before = layer.frozen_weight.clone()
    layer.fold()
    torch.testing.assert_close(layer.frozen_weight - before, layer.update(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compute", ["dense", "contracted"])
def test_dropout_acts_on_the_update_alone_and_in_training_alone(compute):
    module, _ = make("linear")
    # As models come from from_pretrained(), and PEFT's dropout acts in them.
    layer = low_rank(module.eval(), dropout=0.5, compute=compute)
    scramble(layer)
    batch = torch.randn(4, 10)
    torch.manual_seed(7)
    output = layer(batch)
    torch.manual_seed(7)
    dropped = nn.functional.dropout(batch, 0.5)
    expected = nn.functional.linear(batch, layer.frozen_weight, layer.bias)
    torch.testing.assert_close(output, expected + dropped @ layer.update().mT)
    layer.eval()
    torch.testing.assert_close(layer(batch), nn.functional.linear(batch, layer.weight, layer.bias))


@pytest.mark.parametrize(
    ("dense", "frozen", "init"), all_pairs(["linear", "conv", "transposed"], ["U", "V", True], ["auto", "lora"])
)
def test_either_factor_may_be_frozen(dense, frozen, init):
    module, batch = make(dense)
    expected = module(batch)
    layer = low_rank(module, half_frozen=frozen, init=init)
    fixed = "U" if frozen is True else frozen
    (trained,) = {"U", "V"} - {fixed}
    assert list(layer.factors) == [trained]
    assert list(layer.fixed) == [fixed]
    assert layer.fixed[fixed].any()
    assert torch.equal(layer(batch), expected)
    layer(batch).square().sum().backward()
    assert layer.factors[trained].grad.any()


# Merging


@pytest.mark.parametrize(
    ("role", "modifier", "dense"), all_pairs(ROLES, MODIFIERS, ["linear", "conv", "transposed", "embedding"])
)
def test_merging_composes_once_and_is_undone_bit_for_bit(role, modifier, dense):
    module, batch = make(dense)
    layer = low_rank(module, role=role, **MODIFIERS[modifier]).eval()
    scramble(layer)
    before, state = layer(batch), copy.deepcopy(layer.state_dict())
    weight = layer.weight.detach()
    layer.merge()
    torch.testing.assert_close(layer(batch), before)
    assert torch.equal(layer.weight, weight)
    assert layer.weight.data_ptr() == layer.weight.data_ptr()
    assert torch.equal(pickle.loads(pickle.dumps(layer))(batch), layer(batch))
    assert list(layer.state_dict()) == list(state)
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in state.items())
    assert {p.dtype for p in copy.deepcopy(layer).double().buffers()} == {torch.float64}
    for undo in (layer.unmerge, layer.train, lambda: layer.load_state_dict(state)):
        layer.merge()
        assert layer.merged_weight is not None
        undo()
        assert layer.merged_weight is None
        assert torch.equal(layer.eval()(batch), before)


# Compilation, precision


@nightly_except("embedding-update-BlockKronecker(grid=False)")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense", "role", "factorization"),
    in_turn(
        ["linear", "strided dilated", "groups, no bias", "transposed, groups", "embedding"],
        ROLES,
        [MatrixProduct(), BlockKronecker(), CP(), Hadamard()],
    ),
    ids=str,
)
def test_compiles_as_one_graph(role, dense, factorization):
    torch._dynamo.reset()
    module, batch = make(dense)
    layer = low_rank(module, factorization, 2, role=role, init="uniform")
    scramble(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    output = compiled(batch)
    torch.testing.assert_close(output, layer(batch))
    output.square().sum().backward()
    assert all(factor.grad is not None for factor in layer.factors.values())


@pytest.mark.parametrize(
    ("role", "compute", "dense", "factorization"),
    all_pairs(
        ROLES,
        ["dense", "contracted"],
        ["linear", "conv", "transposed", "embedding"],
        [MatrixProduct("channel"), CP(), Hadamard()],
    ),
    ids=str,
)
def test_autocast_and_half_precision_stay_close_to_the_dense_layer(role, compute, dense, factorization):
    module, batch = make(dense)
    layer = low_rank(module, factorization, 2, role=role, compute=compute, init="uniform")
    reference = layer.to_dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(batch)
        expected = reference(batch)
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output.float(), reference(batch), rtol=0.05, atol=0.05)
    output.float().sum().backward()
    half = copy.deepcopy(layer).bfloat16()
    inputs = batch.bfloat16() if batch.is_floating_point() else batch
    assert half(inputs).dtype == torch.bfloat16
    torch.testing.assert_close(half(inputs).float(), reference(batch), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("dense", "role", "modifier"), all_pairs(DENSE, ROLES, MODIFIERS))
def test_parameters_and_their_training(dense, role, modifier):
    module, batch = make(dense)
    weight, bias = module.weight, module.bias
    layer = low_rank(module, role=role, **MODIFIERS[modifier])
    names = {"factors.V"} | ({"factors.U"} if modifier != "half-frozen" else set())
    names |= {"bias"} if bias is not None else set()
    frozen = {"frozen_weight"} if role == "update" else set()
    frozen |= {"decoupled": {"fixed.U", "fixed.V"}, "half-frozen": {"fixed.U"}}.get(modifier, set())
    parameters = dict(layer.named_parameters())
    assert {name for name, p in parameters.items() if p.requires_grad} == names
    assert {name for name, p in parameters.items() if not p.requires_grad} == frozen
    assert set(layer.state_dict()) == names | frozen
    assert layer.bias is bias
    if role == "update":
        assert layer.frozen_weight is weight
        assert weight.requires_grad is False
    scramble(layer)
    layer(batch).square().sum().backward()
    assert {name for name, p in parameters.items() if p.grad is not None and p.grad.abs().sum() > 0} == names


@pytest.mark.parametrize(("dense", "modifier", "factorization"), all_pairs(DENSE, MODIFIERS, BILINEAR), ids=str)
def test_a_weight_starts_at_the_nearest_one(dense, modifier, factorization):
    module, _ = make(dense)
    module.double()
    rank = 1 if isinstance(factorization, MatrixProduct) else 4
    nearest = factorization.compose(factorization.decompose(module.weight, rank), module.weight.shape)
    layer = low_rank(module, factorization, rank, role="weight", **MODIFIERS[modifier])
    torch.testing.assert_close(layer.weight, nearest)
    assert all(factor.any() for factor in layer.factors.values())


@every_modifier
def test_uniform_weight_draws_everything(modifier):
    module, _ = make("linear")
    layer = low_rank(module, role="weight", init="uniform", init_scale=0.25, seed=3, **MODIFIERS[modifier])
    assert layer.init_scale == 0.25
    values = [*layer.factors.values(), *layer.fixed.values()]
    assert len(values) == {"plain": 2, "decoupled": 4, "half-frozen": 2}[modifier]
    for value in values:
        assert 0.15 < value.abs().max() <= 0.25
        assert value.min() < 0 < value.max()
    flat = [value.flatten()[:32] for value in values]
    assert all(not torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i])


@every_modifier
@every_factorization
def test_default_scale_of_a_weight_keeps_the_standard_deviation(modifier, factorization):
    module, _ = make("linear")
    module = nn.Linear(300, 200)
    std = module.weight.std().item()
    layer = low_rank(module, factorization, 16, role="weight", init="uniform", **MODIFIERS[modifier])
    assert layer.weight.std().item() == pytest.approx(std, rel=0.15)


@every_modifier
@every_factorization
def test_default_scale_of_an_update_is_the_factorizations_for_each_of_its_terms(modifier, factorization):
    layer = low_rank(nn.Linear(10, 8), factorization, **MODIFIERS[modifier])
    terms = 2 if modifier == "decoupled" else 1
    assert layer.init_scale == pytest.approx(factorization.default_init_scale((8, 10), 4) / math.sqrt(terms))


@every_role
@every_modifier
def test_reset_draws_in_place_from_the_seed(role, modifier):
    module, _ = make("conv")
    layer = low_rank(module, role=role, init="uniform", seed=5, **MODIFIERS[modifier])
    first = copy.deepcopy(layer.state_dict())
    objects = {name: id(p) for name, p in layer.named_parameters()}
    scramble(layer)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    layer.reset_factors(6)
    assert torch.equal(torch.get_rng_state(), state)
    drawn = [
        name
        for name, value in first.items()
        if name.startswith(("factors", "fixed")) and not torch.equal(layer.state_dict()[name], value)
    ]
    assert drawn == [name for name, value in first.items() if name.startswith(("fac", "fix")) and value.any()]
    layer.reset_factors(5)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, first[name])
    assert {name: id(p) for name, p in layer.named_parameters()} == objects


@pytest.mark.parametrize(
    "dense", [nn.Linear(10, 8), nn.Embedding(10, 8, padding_idx=2).bfloat16(), nn.Conv2d(4, 6, 3)], ids=str
)
@pytest.mark.parametrize("modifier", [{}, {"decouple": True}, {"half_frozen": True}], ids=str)
def test_drawn_factors_are_those_that_reset_installs_and_leave_the_layer_alone(dense, modifier):
    layer = low_rank(copy.deepcopy(dense), rank=2, **modifier)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    drawn = layer.draw_factors(seed=5)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer.reset_factors(seed=5)
    assert drawn.keys() == {name for name in before if name.split(".")[0] in ("factors", "fixed")}
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in drawn.items())
    assert {value.dtype for value in drawn.values()} == {torch.float32}


def test_dropout_leaves_the_indices_of_an_embedding_alone():
    table = low_rank(nn.Embedding(10, 8), rank=2, dropout=0.5)
    scramble(table)
    index = torch.arange(10)
    torch.testing.assert_close(table(index), table.weight)


def test_draws_follow_the_documented_streams_in_every_dtype():
    draws = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        dense = nn.Linear(10, 8, dtype=dtype)
        layer = low_rank(dense, decouple=True, init_scale=0.5, seed=11, role="weight", init="uniform")
        draws[dtype] = layer.fixed["U"]
        assert layer.fixed["U"].dtype == dtype
    source = torch.Generator().manual_seed(derive_seed(11, "fixed", "U"))
    expected = torch.empty(8, 4).uniform_(-0.5, 0.5, generator=source)
    for dtype, draw in draws.items():
        assert torch.equal(draw, expected.to(dtype))


@every_modifier
def test_fold_adds_the_update_and_reset_starts_at_zero_again(modifier):
    module, _ = make("conv")
    layer = low_rank(module, **MODIFIERS[modifier])
    scramble(layer)
    weight, frozen = layer.weight.detach().clone(), layer.frozen_weight
    before = frozen.clone()
    factors = {name: factor.detach().clone() for name, factor in layer.factors.items()}
    layer.fold()
    assert layer.frozen_weight is frozen
    torch.testing.assert_close(frozen.data, weight)
    assert all(torch.equal(layer.factors[name], factor) for name, factor in factors.items())
    layer.reset_factors(1)
    assert torch.equal(layer.weight, frozen)
    other = {name: 2 * factor for name, factor in factors.items()}
    expected = frozen + layer.update(other)
    layer.fold(other)
    assert torch.equal(frozen, expected)
    assert not torch.equal(frozen, before)


@every_modifier
def test_update_takes_values_for_the_trained_factors(modifier):
    module, _ = make("linear")
    layer = low_rank(module, **MODIFIERS[modifier])
    other = copy.deepcopy(layer)
    scramble(other)
    torch.testing.assert_close(layer.update(dict(other.factors.items())), weight_by_hand(other) - other.frozen_weight)
    with pytest.raises(ValueError, match=r"factors.*\['W'\]"):
        layer.update({"W": torch.ones(1)})


def test_fold_needs_a_frozen_weight():
    with pytest.raises(ValueError, match='role="update"'):
        low_rank(nn.Linear(10, 8), role="weight").fold()


def test_dtype_device_and_mode_are_taken_over():
    module = nn.Conv2d(6, 8, 3, dtype=torch.bfloat16).eval()
    module.note = "kept"
    layer = low_rank(module, role="weight")
    assert layer.training is False
    assert layer.note == "kept" == layer.to_dense().note
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer(torch.zeros(1, 6, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert {p.dtype for p in layer.double().parameters()} == {torch.float64}
    assert layer.to_dense().training is False


@daily("contracted-linear")
@pytest.mark.parametrize("dense", ["linear", "conv", "transposed", "embedding with padding"])
@pytest.mark.parametrize("way", ["contracted", "dense", "dropout"])
def test_factors_beside_16_bits_are_of_32(way, dense):
    module, batch = make(dense)
    settings = {"compute": "dense", "dropout": 1e-9} if way == "dropout" else {"compute": way}
    half = low_rank(module.bfloat16(), rank=2, **settings)
    assert half.frozen_weight.dtype == half.weight.dtype == half.to_dense().weight.dtype == torch.bfloat16
    assert {factor.dtype for factor in half.factors.values()} == {torch.float32}
    scramble(half)
    wide = copy.deepcopy(half).float()
    numbers = batch.is_floating_point()
    given = batch.bfloat16() if numbers else batch
    output, expected = half(given), wide(given.float() if numbers else given)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert half(given).dtype == module(given).dtype
    output.float().sum().backward()
    expected.sum().backward()
    for name, factor in half.factors.items():
        assert factor.grad.dtype == torch.float32
        near = wide.factors[name].grad
        torch.testing.assert_close(factor.grad, near, rtol=0.05, atol=0.02 * float(near.abs().max()))
    trained = low_rank(make(dense)[0].bfloat16(), rank=2, train_base=True)
    assert {value.dtype for value in trained.parameters()} == {torch.bfloat16}


def test_conversion_leaves_the_global_random_state_alone():
    module = nn.Linear(10, 8)
    state = torch.get_rng_state()
    low_rank(module).to_dense()
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_and_their_handles_keep_working():
    module, batch = make("linear")
    calls = []
    handle = module.register_forward_hook(lambda hooked, args, output: calls.append(hooked))
    layer = low_rank(module)
    layer(batch)
    assert calls == [layer]
    layer.to_dense()(batch)
    assert calls == [layer]
    dense = layer.to_dense(hooks=True)
    dense(batch)
    assert calls == [layer, dense]
    handle.remove()
    layer(batch)
    assert len(calls) == 2


def test_a_pending_gradient_of_the_frozen_weight_is_dropped():
    module, batch = make("linear")
    module(batch).sum().backward()
    assert low_rank(module).frozen_weight.grad is None


def test_the_weight_cannot_be_assigned_or_reset_unnoticed():
    layer = low_rank(nn.Linear(10, 8))
    with pytest.raises(AttributeError):
        layer.weight = torch.zeros(8, 10)
    with pytest.raises(RuntimeError, match="'weight'"):
        layer.weight = nn.Parameter(torch.zeros(8, 10))
    with pytest.raises(NotImplementedError, match="reset_factors"):
        layer.reset_parameters()


def test_repr_says_what_is_low_rank():
    layer = low_rank(nn.Linear(10, 8), BlockKronecker(), 2, decouple=True)
    assert layer.extra_repr() == (
        "in_features=10, out_features=8, bias=True, factorization=BlockKronecker(grid=False), rank=2, "
        "role='update', decouple=True"
    )


def test_layers_are_of_their_dense_kind():
    linear, convolution = low_rank(nn.Linear(10, 8)), low_rank(nn.Conv2d(6, 8, 3))
    assert isinstance(linear, nn.Linear)
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(linear, LowRankLayer)
    assert isinstance(convolution, LowRankLayer)
    with pytest.raises(TypeError, match=r"use LowRankLinear\.from_dense"):
        LowRankLinear(10, 8)


# What is refused


def test_both_modifiers_at_once_are_refused():
    with pytest.raises(ValueError, match=r"decouple=True.*half_frozen=True"):
        low_rank(nn.Linear(10, 8), decouple=True, half_frozen=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": "spectral"}, 'init="spectral" needs role="weight"'),
        ({"init": "zeros"}, r"init.*'zeros'"),
        ({"role": "delta"}, "'delta'"),
        ({"init_scale": 0}, r"init_scale.*0"),
        ({"init_scale": math.nan}, r"init_scale.*0"),
        ({"rank": 0}, r"rank.*0"),
        ({"rank": 9, "role": "weight"}, r"rank.*1.*9"),
    ],
)
def test_settings_out_of_range_are_refused_and_change_nothing(settings, message):
    module = nn.Linear(10, 8)
    with pytest.raises(ValueError, match=message):
        low_rank(module, **settings)
    assert module.weight.requires_grad


def test_half_frozen_may_have_a_rank_up_to_the_rows():
    layer = low_rank(nn.Linear(3, 8), rank=8, half_frozen=True)
    assert layer.factors["V"].shape == (3, 8)
    with pytest.raises(ValueError, match=r"rank.*1.*8"):
        low_rank(nn.Linear(3, 8), rank=8, half_frozen=True, role="weight")


def test_a_constant_weight_gives_no_scale():
    module = nn.Linear(10, 8)
    nn.init.zeros_(module.weight)
    with pytest.raises(ValueError, match="init_scale is 0"):
        low_rank(module, role="weight", init="uniform")
    assert low_rank(module, role="weight", init="uniform", init_scale=1.0).weight.any()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Conv2d(3, 4, 3), "Conv2d is not exactly nn.Linear"),
        (nn.Bilinear(3, 4, 5), "Bilinear is not exactly"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "parametrize"),
        (nn.Linear(4, 4, dtype=torch.complex64), "complex64"),
    ],
)
def test_other_modules_are_refused(module, reason):
    with pytest.raises(TypeError, match=f"cannot become a LowRankLinear: .*{reason}"):
        LowRankLinear.from_dense(module, MatrixProduct(), 1)


def test_modules_with_more_than_a_weight_are_refused():
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x
    with pytest.raises(TypeError, match="LowRankLinear"):
        low_rank(replaced, rank=1)
    buffered = nn.Linear(4, 4)
    buffered.register_buffer("mask", torch.ones(4, 4))
    with pytest.raises(TypeError, match="LowRankLinear"):
        low_rank(buffered, rank=1)


@pytest.mark.parametrize("compute", ["dense", "contracted", "auto"])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_base_that_is_trained_beside_its_update(compute, kind):
    torch.manual_seed(0)
    dense = nn.Linear(8, 6) if kind == "linear" else nn.Conv2d(4, 6, 3, padding=1)
    input = torch.randn(5, 8) if kind == "linear" else torch.randn(2, 4, 5, 5)
    made = LowRankLinear if kind == "linear" else LowRankConv2d
    layer = made.from_dense(dense, MatrixProduct(), rank=2, compute=compute, train_base=True)
    assert {name for name, p in layer.named_parameters() if p.requires_grad} >= {"frozen_weight", "factors.U", "bias"}
    with torch.no_grad():
        for factor in layer.factors.values():
            factor.normal_()
    whole = layer(input)
    layer.active = "base"
    torch.testing.assert_close(layer(input), dense(input))
    assert layer.multiply_adds(input) < 10**6
    layer.active = "factors"
    bias = dense.bias if kind == "linear" else dense.bias[:, None, None]
    torch.testing.assert_close(layer(input) - bias, whole - dense(input), rtol=1e-4, atol=1e-5)
    for value in layer.parameters():
        value.grad = None
    layer(input).square().sum().backward()
    assert layer.frozen_weight.grad is None
    assert layer.factors["U"].grad.any()


@pytest.mark.parametrize("decouple", [False, True])
def test_factors_alone_are_scaled_in_both_ways_to_compute(decouple):
    torch.manual_seed(0)
    layer = LowRankLinear.from_dense(nn.Linear(8, 6), MatrixProduct(), rank=2, alpha=16, decouple=decouple)
    with torch.no_grad():
        for factor in layer.factors.values():
            factor.normal_()
    layer.active = "factors"
    input = torch.randn(5, 8)
    for layer.compute in ("dense", "contracted"):
        torch.testing.assert_close(layer(input), nn.functional.linear(input, layer.update(), layer.bias))


@pytest.mark.parametrize("settings", [{"role": "weight"}, {"alpha": 2.0}, {"dropout": 0.1}])
def test_a_trained_base_is_refused_where_it_makes_no_sense(settings):
    with pytest.raises(ValueError, match="train_base=True"):
        LowRankLinear.from_dense(nn.Linear(8, 6), MatrixProduct(), rank=2, train_base=True, **settings)
