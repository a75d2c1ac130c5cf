"""Stacked convolutions and batch normalisations against one plain call per client."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from lightning_lowrank import BlockKronecker, MatrixProduct
from lightning_lowrank.federated.execution import mapped_layers
from lightning_lowrank.federated.execution.mapped_layers import (
    StackedProducts,
    _channels_last,
    _StackedBatchNorm,
    _StackedConvolution,
)
from lightning_lowrank.internals.torch import is_mapped, map_level
from lightning_lowrank.layers import convert
from lightning_lowrank.models import CNN4
from tests.grids import all_pairs, in_turn

CLIENTS = 3
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
GEOMETRIES = {
    "plain": {},
    "stride": {"stride": 2},
    "uneven stride": {"stride": (2, 1)},
    "padding": {"padding": 1},
    "uneven padding": {"padding": (0, 2)},
    "padding in a list of one": {"padding": [1]},
    "same": {"padding": "same"},
    "same of an even kernel": {"padding": "same", "kernel": (2, 4)},
    "same, dilated": {"padding": "same", "dilation": (1, 3), "kernel": (3, 2)},
    "valid": {"padding": "valid", "stride": 2},
    "dilation": {"dilation": (2, 1), "padding": 1},
    "groups": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4, "padding": 1, "outputs": 8},
    "kernel of a row": {"kernel": (1, 3), "padding": (0, 1)},
    "kernel of a column": {"kernel": (3, 1), "stride": (2, 1)},
    "pointwise": {"kernel": (1, 1)},
    "pointwise, strided": {"kernel": (1, 1), "stride": 2},
    "the whole image": {"kernel": (7, 5)},
    "one channel": {"inputs": 1, "padding": 1},
    "one output channel": {"outputs": 1, "padding": 1},
    "one image": {"batch": (1,), "padding": 1},
    "no batch dimension": {"batch": (), "padding": 1},
    "no image": {"batch": (0,), "padding": 1},
    "all at once": {
        "batch": (2,),
        "stride": (1, 2),
        "padding": (2, 1),
        "dilation": (1, 2),
        "groups": 2,
        "kernel": (2, 3),
    },
}
ANOTHER_WAY = {"_StackedConvolutionBackward", "_StackedBatchNormBackward"}


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.manual_seed(seed), dtype=torch.float64).to(dtype)


def names_in_graph(output):
    seen, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def compare(function, stacks, shared=(), tolerance=1e-10, taken=True, in_place=()):
    """Hold outputs and gradients of a mapped function against those of one client after another.

    Args:
        function: Takes the tensors by name.
        stacks: Values of each client.
        shared: Values of all clients.
        tolerance: Absolute and relative.
        taken: Whether the function is to be computed otherwise than torch maps it.
        in_place: Names of stacks that the function changes in place.
    """
    shared = dict(shared)
    ends = []
    for mapped in (True, False):
        tensors = {
            name: value.clone().requires_grad_(value.is_floating_point() and name not in in_place)
            for name, value in {**stacks, **shared}.items()
        }
        mine, common = ({name: tensors[name] for name in part} for part in (stacks, shared))
        if mapped:
            with StackedProducts():
                outputs = vmap(lambda own: function(**own, **common), randomness="different")(mine)  # noqa: B023
            assert bool(names_in_graph(outputs) & ANOTHER_WAY) == taken
        else:
            clients = [{name: value[index] for name, value in mine.items()} for index in range(CLIENTS)]
            outputs = torch.stack([function(**own, **common) for own in clients])
        outputs.backward(numbers(*outputs.shape, seed=7, dtype=outputs.dtype))
        ends.append([outputs, *(tensor if name in in_place else tensor.grad for name, tensor in tensors.items())])
    for found, expected in zip(*ends, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def case(
    dimensions=2,
    inputs=4,
    outputs=6,
    kernel=None,
    batch=(2,),
    bias=True,
    size=(7, 5, 6),
    dtype=torch.float64,
    **geometry,
):
    kernel = kernel or (3, 2, 3)[:dimensions]
    groups = geometry.get("groups", 1)
    tensors = {
        "input": numbers(CLIENTS, *batch, inputs, *size[:dimensions], seed=1, dtype=dtype),
        "weight": numbers(CLIENTS, outputs, inputs // groups, *kernel, seed=2, dtype=dtype),
    }
    if bias:
        tensors["bias"] = numbers(CLIENTS, outputs, seed=3, dtype=dtype)
    return partial(FUNCTIONS[dimensions], **geometry), tensors


@pytest.mark.parametrize(("geometry", "bias"), in_turn(GEOMETRIES, [True, False]))
def test_convolution(geometry, bias):
    function, tensors = case(bias=bias, **GEOMETRIES[geometry])
    compare(function, tensors)


@pytest.mark.parametrize("dimensions", [1, 3])
@pytest.mark.parametrize(
    "geometry",
    [
        {},
        {"stride": 2, "padding": 1, "dilation": 2},
        {"padding": "same", "groups": 2},
        {"batch": ()},
        {"inputs": 1, "outputs": 1},
    ],
)
def test_convolution_of_other_dimensions(dimensions, geometry):
    compare(*case(dimensions, **geometry))


def test_positional_arguments():
    _, tensors = case()
    compare(
        lambda input, weight, bias: F.conv2d(input, weight, bias, (1, 2), 1, 2, 2),
        {**tensors, "weight": tensors["weight"][:, :, :2]},
    )


def native(input, weight, padding_idx):
    # Where nothing is padding, it takes -1.
    return torch.embedding(weight, input, -1 if padding_idx is None else padding_idx % len(weight))


@pytest.mark.parametrize("look_up", [F.embedding, native])
@pytest.mark.parametrize("padding", [None, 0, -1])
@pytest.mark.parametrize("common", [False, True])
def test_embeddings_of_padding_are_not_trained(padding, common, look_up):
    words = torch.tensor([[0, 1, 4, 0], [2, 0, 0, 4]]).repeat(CLIENTS, 1)[:CLIENTS]
    words = words[0] if common else words
    weight = numbers(CLIENTS, 5, 3).requires_grad_()
    with StackedProducts():
        found = vmap(partial(look_up, padding_idx=padding), in_dims=(None if common else 0, 0))(words, weight)
    expected = torch.stack(
        [F.embedding(own, each, padding) for own, each in zip(words.expand(CLIENTS, 4), weight, strict=True)]
    )
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad((rows * numbers(*rows.shape)).sum(), weight)[0] for rows in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("dim", "shared"), [(0, ()), (1, ("input",)), (-1, ("src",))])
def test_select_scatter(dim, shared):
    tensors = {"input": numbers(CLIENTS, 5, 4, 3), "src": numbers(CLIENTS, 5, 4, 3, seed=1).select(dim + (dim >= 0), 0)}
    common = {name: tensors.pop(name)[0] for name in shared}
    compare(partial(torch.select_scatter, dim=dim, index=-1), tensors, common, taken=False)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_linear_cross_entropy_in_chunks():
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    tensors = {"input": numbers(CLIENTS, 5, 4), "linear_weight": numbers(CLIENTS, 3, 4, seed=1)}
    target = torch.tensor([0, 2, 1, 1, 0])
    compare(partial(F.linear_cross_entropy, target=target, options=options), tensors, taken=False)


def test_uneven_padding_by_pad():
    function, tensors = case()
    compare(lambda input, **others: function(F.pad(input, (1, 0, 2, 3)), **others), tensors)


@pytest.mark.parametrize("shared", ["input", "weight", "bias"])
def test_what_clients_share(shared):
    function, tensors = case(padding=1)
    common = {shared: tensors.pop(shared)[0]}
    compare(function, tensors, common, taken=shared != "weight")


@pytest.mark.parametrize("frozen", [("input",), ("weight",), ("bias",), ("input", "bias"), ("weight", "bias")])
def test_only_gradients_that_are_needed(frozen, monkeypatch):
    function, tensors = case(padding=1)
    masks = []
    backward = torch.ops.aten.convolution_backward

    def spy(*arguments):
        masks.append(arguments[-1])
        return backward(*arguments)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", spy)
    for name, value in tensors.items():
        value.requires_grad_(name not in frozen)
    with StackedProducts():
        outputs = vmap(lambda tensors: function(**tensors))(tensors)
    outputs.square().sum().backward()
    assert {tuple(mask) for mask in masks} == {tuple(name not in frozen for name in ("input", "weight", "bias"))}
    assert len(masks) == CLIENTS
    for name in frozen:
        assert tensors[name].grad is None


def test_other_dimension_is_mapped():
    function, tensors = case(padding=1)
    moved = {name: value.movedim(0, 1) for name, value in tensors.items()}
    with StackedProducts():
        found = vmap(lambda own: function(**own), in_dims=1)(moved)
        expected = vmap(lambda own: function(**own))(tensors)
    assert torch.equal(found, expected)


def test_outputs_have_their_channels_last():
    function, tensors = case(inputs=1, padding=1)
    with StackedProducts():
        found = vmap(lambda own: function(**own))(tensors)
    for output in found:
        assert output.is_contiguous(memory_format=torch.channels_last)


def test_one_channel_is_told_to_be_last():
    assert _channels_last(torch.zeros(3, 2, 1, 5, 4))[0].stride() == (20, 1, 4, 1)


def test_gradients_lie_as_the_weights_do():
    function, tensors = case(padding=1)
    weight = tensors["weight"].requires_grad_()
    with StackedProducts():
        outputs = vmap(lambda own: function(**own))(tensors)
    # Not through `backward`, which copies a gradient into its parameter's layout.
    (gradient,) = torch.autograd.grad(outputs.sum(), weight)
    assert gradient.is_contiguous()


def test_one_client():
    function, tensors = case(padding=1)
    with StackedProducts():
        found = vmap(lambda own: function(**own))({name: value[:1] for name, value in tensors.items()})
    torch.testing.assert_close(found[0], function(**{name: value[0] for name, value in tensors.items()}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    function, tensors = case(padding=1, dtype=dtype)
    compare(function, tensors, tolerance=5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autocast_casts_as_torch_does(dtype):
    function, tensors = case(padding=1, dtype=dtype)

    def autocast(**tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return function(**tensors)

    outputs = autocast(**{name: value[0] for name, value in tensors.items()})
    assert outputs.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    compare(autocast, tensors, tolerance=1e-10 if dtype == torch.float64 else 5e-2)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_under_autocast_takes_what_has_different_types(masked):
    """As rotary embeddings leave queries and keys in single precision, and values not."""

    def attend(query, key, value, mask):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(query, key, value.bfloat16(), mask if masked else None)

    tensors = {name: torch.randn(3, 2, 5, 4) for name in ("query", "key", "value")} | {"mask": torch.randn(3, 2, 5, 5)}
    with StackedProducts():
        found = vmap(lambda own: attend(**own))(tensors)
    assert found.dtype == torch.bfloat16
    for client, own in enumerate(found):
        expected = attend(**{name: value[client] for name, value in tensors.items()})
        torch.testing.assert_close(own, expected, rtol=2e-2, atol=2e-2)


def test_nan_stays_with_its_client():
    function, tensors = case(padding=1)
    tensors["weight"][1] = torch.nan
    with StackedProducts():
        outputs = vmap(lambda own: function(**own))(tensors)
    assert outputs.isnan().flatten(1).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"padding": "full"}, "padding"), ({"padding": "same", "stride": 2}, "strided"), ({"inputs": 5}, "channels")],
)
def test_torch_refuses_in_its_own_words(change, message):
    function, tensors = case(**{"inputs": 4, **change})
    tensors["weight"] = tensors["weight"][:, :, :4]
    with StackedProducts(), pytest.raises(RuntimeError, match=message):
        vmap(lambda own: function(**own))(tensors)


def test_second_derivative_is_refused():
    function, tensors = case()
    weight = tensors["weight"].requires_grad_()
    with StackedProducts():
        outputs = vmap(lambda own: function(**own))({**tensors, "weight": weight})
    (gradient,) = torch.autograd.grad(outputs.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_further_transforms_are_left_to_torch():
    function, tensors = case(padding=1)
    ensemble = {name: torch.stack([value, value + 1]) for name, value in tensors.items()}

    def loss(own):
        return function(**own).square().sum()

    for nested in (vmap(vmap(lambda own: function(**own))), vmap(vmap(grad(loss)))):
        expected = nested(ensemble)
        with StackedProducts():
            found = nested(ensemble)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_outside_a_map_nothing_changes():
    function, tensors = case(padding=1)
    own = {name: value[0].requires_grad_() for name, value in tensors.items()}
    with StackedProducts():
        outputs = function(**own)
    assert torch.equal(outputs, function(**own))
    assert not names_in_graph(outputs) & ANOTHER_WAY


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"ignore_index": 2},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"weight": torch.tensor([1.0, 2.0, 0.5])},
    ],
    ids=lambda keywords: next(iter(keywords), "plain"),
)
@pytest.mark.parametrize(("targets_shared", "classes_last"), [(False, True), (True, True), (False, False)])
def test_cross_entropy(keywords, targets_shared, classes_last):
    keywords = {name: value.double() if name == "weight" else value for name, value in keywords.items()}
    targets = torch.tensor([[0, 2, 1, 2], [2, 2, 0, 1], [2, 1, 1, 0]])
    expected_loss = partial(F.cross_entropy, **keywords)
    logits = (numbers(CLIENTS, 4, 3) if classes_last else numbers(CLIENTS, 3, 4).mT).requires_grad_()
    with StackedProducts():
        mapped = vmap(expected_loss, in_dims=(0, None if targets_shared else 0))
        losses = mapped(logits, targets[0] if targets_shared else targets)
    each = [expected_loss(logits[client], targets[0 if targets_shared else client]) for client in range(CLIENTS)]
    torch.testing.assert_close(losses, torch.stack(each), rtol=1e-12, atol=1e-12)
    (found,) = torch.autograd.grad(losses.sum(), logits)
    (expected,) = torch.autograd.grad(sum(each), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "dtype"), in_turn([(4, 3), (32, 100), (7, 1000)], [torch.bfloat16, torch.float16]), ids=str
)
def test_cross_entropy_of_half_precision_is_torch_s(shape, dtype):
    draws = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(CLIENTS, *shape, generator=draws)).to(dtype)
    targets = torch.randint(shape[1], (CLIENTS, shape[0]), generator=draws)
    expected = vmap(F.cross_entropy)(logits, targets)
    with StackedProducts():
        assert torch.equal(vmap(F.cross_entropy)(logits, targets), expected)


def test_cross_entropy_of_shapes_that_do_not_fit_is_refused_in_torch_s_words():
    logits, targets = torch.zeros(CLIENTS, 5, 3, 2), torch.zeros(CLIENTS, 5, dtype=torch.long)
    with pytest.raises((RuntimeError, ValueError)) as plain:
        vmap(F.cross_entropy)(logits, targets)
    with StackedProducts(), pytest.raises(type(plain.value)) as found:
        vmap(F.cross_entropy)(logits, targets)
    assert str(found.value) == str(plain.value)


def test_cross_entropy_of_ignored_samples_alone_is_nan_for_their_client():
    targets = torch.tensor([[0, -100], [-100, -100]])
    with StackedProducts():
        losses = vmap(F.cross_entropy)(torch.zeros(2, 2, 3), targets)
    assert losses.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("logits", "targets"),
    [((4, 3, 2), (4, 2)), ((3,), ()), ((4, 3), (4, 3))],
    ids=["of pixels", "of one sample", "of probabilities"],
)
def test_other_cross_entropies_are_torch_s(logits, targets):
    values = numbers(CLIENTS, *logits)
    wanted = values.softmax(-1) if logits == targets else torch.ones(CLIENTS, *targets, dtype=torch.long)
    with StackedProducts():
        losses = vmap(F.cross_entropy)(values, wanted)
    each = [F.cross_entropy(own, target) for own, target in zip(values, wanted, strict=True)]
    torch.testing.assert_close(losses, torch.stack(each))


@pytest.mark.parametrize("weight_shared", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4)])
def test_linear(shape, weight_shared):
    stacks = {"input": numbers(CLIENTS, *shape), "weight": numbers(CLIENTS, 5, 4), "bias": numbers(CLIENTS, 5)}
    shared = {"weight": stacks.pop("weight")[0]} if weight_shared else {}
    compare(lambda input, weight, bias: F.linear(input, weight, bias), stacks, shared, taken=False)


# Batch normalisation

STATISTICS = ("running_mean", "running_var")


def normalisation(size=(4, 3), batch=3, channels=5):
    return {
        "input": 3 * numbers(CLIENTS, batch, channels, *size, seed=1) + 1,
        "running_mean": numbers(CLIENTS, channels, seed=2),
        "running_var": numbers(CLIENTS, channels, seed=3).square() + 0.5,
        "weight": numbers(CLIENTS, channels, seed=4),
        "bias": numbers(CLIENTS, channels, seed=5),
    }


@pytest.mark.parametrize(
    ("size", "training", "without"),
    all_pairs([(4, 3), (1, 1), (2, 3, 2)], [True, False], [(), ("weight", "bias"), ("bias",)]),
    ids=str,
)
def test_batch_norm(size, training, without):
    tensors = {name: value for name, value in normalisation(size).items() if name not in without}
    compare(partial(F.batch_norm, training=training, momentum=0.3, eps=1e-3), tensors, in_place=STATISTICS)


@pytest.mark.parametrize("without", [(), ("weight", "bias"), STATISTICS], ids=str)
@pytest.mark.parametrize("size", [(200, 200), (10, 200, 20)])
def test_batch_norm_of_many_numbers_is_as_precise_as_alone(size, without):
    tensors = {name: value.float() for name, value in normalisation(size, batch=2, channels=3).items()}
    tensors["input"] = 33.3 + tensors["input"] / 10
    none = {name: None for name in without if name in STATISTICS}
    tensors = {name: value for name, value in tensors.items() if name not in without}
    compare(partial(F.batch_norm, training=True, **none), tensors, in_place=STATISTICS, tolerance=3e-4)


def test_batch_norm_without_running_statistics():
    tensors = {name: value for name, value in normalisation().items() if name not in STATISTICS}
    compare(partial(F.batch_norm, running_mean=None, running_var=None, training=True), tensors)


@pytest.mark.parametrize("size", [(), (4,)])
def test_batch_norm_of_other_inputs_is_left_to_torch(size):
    compare(partial(F.batch_norm, training=True), normalisation(size), in_place=STATISTICS, taken=False)


def test_batch_norm_of_no_samples():
    compare(F.batch_norm, normalisation((4, 4), batch=0), in_place=STATISTICS, taken=False)


@pytest.mark.parametrize("shared", [("weight", "bias"), ("bias",), STATISTICS])
def test_batch_norm_with_shared_values(shared):
    tensors = normalisation()
    common = {name: tensors.pop(name)[0] for name in shared}
    compare(partial(F.batch_norm, training=shared != STATISTICS), tensors, common, in_place=STATISTICS)


def test_shared_running_statistics_are_not_changed():
    tensors = normalisation()
    mean, variance = (tensors.pop(name)[0] for name in STATISTICS)
    with StackedProducts(), pytest.raises(RuntimeError, match="running_var"):
        vmap(lambda own: F.batch_norm(running_mean=mean, running_var=variance, training=True, **own))(tensors)


def test_running_statistics_are_needed_outside_training():
    tensors = {name: value for name, value in normalisation().items() if name not in STATISTICS}
    for function in (F.batch_norm, partial(F.batch_norm, training=False)):
        with StackedProducts(), pytest.raises(RuntimeError, match="running_mean"):
            vmap(lambda own, function=function: function(running_mean=None, running_var=None, **own))(tensors)


def test_one_value_per_channel_is_refused():
    with StackedProducts(), pytest.raises(ValueError, match=r"\[1, 5, 1, 1\]"):
        vmap(lambda own: F.batch_norm(training=True, **own))(normalisation((1, 1), batch=1))


@pytest.mark.parametrize("others", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_bfloat16(others, training):
    tensors = {name: value.to(others) for name, value in normalisation((8, 8)).items()}
    tensors["input"] = tensors["input"].bfloat16()
    compare(partial(F.batch_norm, training=training), tensors, in_place=STATISTICS, tolerance=5e-2)


def test_batch_norm_of_bfloat16_without_other_values():
    tensors = {"input": normalisation((8, 8))["input"].bfloat16()}
    compare(partial(F.batch_norm, running_mean=None, running_var=None, training=True), tensors, tolerance=5e-2)


@pytest.mark.parametrize("frozen", [("input",), ("weight", "bias"), ("input", "weight")])
def test_only_gradients_of_batch_norm_that_are_needed(frozen):
    tensors = normalisation()
    for name, value in tensors.items():
        value.requires_grad_(name not in (*frozen, *STATISTICS))
    with StackedProducts():
        outputs = vmap(lambda own: F.batch_norm(training=True, **own))(tensors)
    outputs.square().sum().backward()
    assert {name for name, value in tensors.items() if value.grad is None} == {*frozen, *STATISTICS}


def test_two_passes_before_one_gradient():
    tensors = normalisation()
    function = partial(F.batch_norm, training=True)

    def twice(input, **others):
        return function(input, **others) * function(input + 1, **others)

    compare(twice, tensors, in_place=STATISTICS)


@pytest.fixture
def folding(monkeypatch):
    """Have the CPU take the way of accelerators."""
    monkeypatch.setattr(mapped_layers, "_folds", lambda input: is_mapped(input) and map_level() == 1)


@pytest.mark.parametrize("size", [(), (4,), (4, 3)])
@pytest.mark.parametrize("shared", [(), ("weight", "bias"), STATISTICS])
def test_batch_norm_of_all_channels_at_once(folding, size, shared):
    tensors = normalisation(size)
    common = {name: tensors.pop(name)[0] for name in shared}
    function = partial(F.batch_norm, training=shared != STATISTICS, momentum=0.3, eps=1e-3)
    compare(lambda **own: F.relu(function(**own), inplace=True), tensors, common, taken=False, in_place=STATISTICS)


def test_batch_norm_of_all_channels_after_convolutions_keeps_their_order(folding):
    images, weight = numbers(CLIENTS, 2, 3, 6, 6), numbers(CLIENTS, 4, 3, 3, 3, seed=1).requires_grad_()

    def network(images, weight):
        features = F.relu_(F.batch_norm(F.conv2d(images, weight), None, None, training=True))
        return F.max_pool2d(features, 2).sum((0, 2, 3)) @ torch.arange(4.0, dtype=torch.float64)

    with StackedProducts():
        vmap(network)(images, weight).sum().backward()
    (expected,) = torch.autograd.grad(sum(network(*each) for each in zip(images, weight, strict=True)), weight)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-10, atol=1e-10)


IN_PLACE = {
    "keyword": partial(F.relu, inplace=True),
    "positional": lambda input: F.relu(input, True),
    "hardtanh": nn.ReLU6(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "leaky": nn.LeakyReLU(0.2, inplace=True),
    "function": torch.relu_,
    "method": torch.Tensor.relu_,
}


@pytest.mark.parametrize("activation", IN_PLACE.values(), ids=IN_PLACE)
def test_activations_in_place_change_no_view(folding, activation):
    images, weight = numbers(CLIENTS, 2, 3, 6, 6), numbers(CLIENTS, 4, 3, 3, 3, seed=1).requires_grad_()
    images.requires_grad_()

    def network(images, weight):
        features = F.batch_norm(F.conv2d(images, weight), None, None, training=True)
        # Who holds the input sees what has become of it.
        return (activation(features) * torch.arange(4.0, dtype=torch.float64) + features).square().sum()

    with StackedProducts():
        losses = vmap(network)(images, weight)
    assert "CopySlices" not in names_in_graph(losses)
    expected = torch.stack([network(*each) for each in zip(images, weight, strict=True)])
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    found, wanted = (torch.autograd.grad(each.sum(), [images, weight]) for each in (losses, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("change", [nn.ReLU6(inplace=True), nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)])
def test_an_output_and_its_copied_view_are_not_torn_apart(change):
    """Whether the change is asked for by keyword or, as torch's own modules do, by position."""
    images, weight = numbers(CLIENTS, 2, 3, 6, 6), numbers(CLIENTS, 4, 3, 3, 3, seed=1)

    def network(images, weight):
        features = F.conv2d(images, weight)
        flat = features.view(len(features), -1)
        change(features)
        return flat.sum()

    with StackedProducts(), pytest.raises(NotImplementedError, match=r"its view\(\) is changed in place"):
        vmap(network, randomness="different")(images, weight)


# Networks


class Viewing(nn.Module):
    """What users write: views of a convolution's output, in-place activations."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 6, (1, 3), bias=False)
        )
        self.head = nn.Linear(6 * 6 * 4, 3)

    def forward(self, images):
        features = self.body(images)
        return self.head(features.view(features.size(0), -1))


def low_rank(factorization, **settings):
    network = CNN4(in_channels=2, num_classes=3, image_size=16)
    convert(network, factorization, budget=1 / 8, **settings)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(3)))
    return network


NETWORKS = {
    "views": Viewing,
    "dense": lambda: CNN4(in_channels=2, num_classes=3, image_size=16),
    "weight": lambda: low_rank(MatrixProduct(), role="weight"),
    "contracted": lambda: low_rank(MatrixProduct(), role="weight", compute="contracted"),
    "update": lambda: low_rank(MatrixProduct(), role="update"),
    "contracted update": lambda: low_rank(MatrixProduct(), role="update", compute="contracted"),
    "decoupled blocks": lambda: low_rank(BlockKronecker(), role="update", decouple=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_train_as_one_client_after_another(kind):
    torch.manual_seed(0)
    network = NETWORKS[kind]().double()
    size = 6 if kind == "views" else 16
    images, targets = numbers(CLIENTS, 4, 2, size, size), torch.randint(3, (CLIENTS, 4))
    trained = {name for name, value in network.named_parameters() if value.requires_grad}
    live = {
        **{name: value for name, value in network.named_parameters() if name in trained},
        **dict(network.named_buffers()),
    }
    stacks = {name: torch.stack([value.detach() for _ in range(CLIENTS)]) for name, value in live.items()}
    for name in trained:
        stacks[name].requires_grad_()

    def loss(values, images, targets):
        return F.cross_entropy(functional_call(network, values, (images,)), targets)

    with StackedProducts():
        losses = vmap(loss, randomness="different")(stacks, images, targets)
    assert names_in_graph(losses) & ANOTHER_WAY
    losses.sum().backward()
    for client in range(CLIENTS):
        alone = copy.deepcopy(network)
        expected = F.cross_entropy(alone(images[client]), targets[client])
        expected.backward()
        torch.testing.assert_close(losses[client], expected, rtol=1e-10, atol=1e-10)
        for name, value in alone.named_parameters():
            if name in trained:
                torch.testing.assert_close(stacks[name].grad[client], value.grad, rtol=1e-10, atol=1e-10)
        for name, value in alone.named_buffers():
            torch.testing.assert_close(stacks[name][client], value, rtol=1e-10, atol=1e-10)


def test_a_view_that_no_layout_allows_is_still_refused():
    with StackedProducts(), pytest.raises(RuntimeError, match=r"size.*24"):
        vmap(lambda tensor: tensor.view(7))(torch.zeros(2, 3, 4).transpose(1, 2))


def test_names_in_graphs():
    assert {f"{kind.__name__}Backward" for kind in (_StackedConvolution, _StackedBatchNorm)} == ANOTHER_WAY


SHARED = {
    "linear": lambda rows: F.linear(rows, torch.ones(5, 8), torch.ones(5)),
    "addmm": lambda rows: torch.addmm(torch.ones(5), rows, torch.ones(8, 5)),
    "convolution": lambda rows: F.conv1d(rows.unsqueeze(1), torch.ones(2, 1, 3)),
    "transposed convolution": lambda rows: F.conv_transpose1d(rows.unsqueeze(1), torch.ones(1, 2, 3)),
    "layer norm": lambda rows: F.layer_norm(rows.bfloat16(), (8,), torch.ones(8), torch.ones(8)),
}


@pytest.mark.parametrize("of", SHARED)
def test_autocast_reaches_what_all_clients_share(of):
    def compute(rows):
        with torch.autocast("cpu", torch.bfloat16):
            return SHARED[of](rows)

    rows = torch.randn(3, 4, 8)
    with StackedProducts():
        found = vmap(compute)(rows)
    for own, given in zip(found, rows, strict=True):
        expected = compute(given)
        assert own.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(own, expected, rtol=2e-2, atol=2e-2)


def test_where_torch_refuses_channels_last_in_memory_inputs_are_copied(monkeypatch):
    # Releases of torch such as 2.7 do so for F.group_norm on the CPU.
    def refusing(input, *arguments, **keywords):
        if not input.is_contiguous():
            raise RuntimeError("NYI: querying is_contiguous inside of vmap for memory_format")
        return F.group_norm(input, *arguments, **keywords)

    monkeypatch.setitem(mapped_layers._OTHERWISE, F.group_norm, refusing)
    stack = torch.randn(3, 2, 5, 5, 4, generator=torch.Generator().manual_seed(0)).movedim(-1, 2)
    with mapped_layers.StackedProducts():
        found = vmap(lambda images: F.group_norm(images, 2))(stack)
    assert torch.allclose(found, torch.stack([F.group_norm(images, 2) for images in stack]), atol=1e-6)
