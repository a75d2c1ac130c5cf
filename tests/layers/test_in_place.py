"""Converting and recovering in place: whoever holds a layer holds the converted one, and nothing is left behind."""

import copy
import functools
import operator
import pickle

import pytest
import torch
from torch import nn

from lightning_lowrank.layers import LowRankLayer, MatrixProduct, convert, low_rank_layers, merge, recover
from tests.helpers import assert_same


class Held(nn.Module):
    """Registers its layers, and calls them by what else holds them."""

    def __init__(self, hold):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.held = hold(self.first, self.second)

    def forward(self, inputs):
        first, second = self.held if isinstance(self.held, (list, tuple)) else self.held.values()
        return second(torch.relu(first(inputs)))


def call(layer, inputs):
    return layer(inputs)


HOLDERS = {
    "list": lambda *layers: list(layers),
    "tuple": lambda *layers: layers,
    "dictionary": lambda first, second: {"first": first, "second": second},
    "lambda": lambda *layers: [lambda inputs, layer=layer: layer(inputs) for layer in layers],
    "partial": lambda *layers: [functools.partial(call, layer) for layer in layers],
    "bound forward": lambda *layers: [layer.forward for layer in layers],
}


@pytest.mark.parametrize("role", ["weight", "update"])
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_whoever_holds_a_layer_holds_the_converted_one(hold, role):
    torch.manual_seed(0)
    model, inputs = Held(hold), torch.randn(5, 6)
    objects = [model.first, model.second]
    convert(model, MatrixProduct(), rank=2, role=role, allow_larger=True)
    assert [model.first, model.second] == objects
    with torch.no_grad():
        for _, layer in low_rank_layers(model):
            for factor in layer.factors.values():
                factor.normal_()
    expected = model.second(torch.relu(model.first(inputs)))
    torch.testing.assert_close(model(inputs), expected)
    model(inputs).square().sum().backward()
    for _, layer in low_rank_layers(model):
        assert all(factor.grad is not None and factor.grad.any() for factor in layer.factors.values())
    recover(model)
    assert [model.first, model.second] == objects
    torch.testing.assert_close(model(inputs), expected)
    model.second.weight.data.zero_()
    torch.testing.assert_close(model(inputs), model.second.bias.expand(5, -1))


def test_an_attention_that_a_list_holds_is_the_converted_one():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    held, inputs = [model["attention"]], torch.randn(3, 2, 8)
    expected = held[0](inputs, inputs, inputs)[0]
    convert(model, MatrixProduct(), rank=3, role="update")
    assert held[0] is model["attention"]
    assert isinstance(model["attention"].in_proj, LowRankLayer)
    torch.testing.assert_close(held[0](inputs, inputs, inputs)[0], expected)
    recover(model)
    assert held[0] is model["attention"]
    assert type(held[0]) is nn.MultiheadAttention
    torch.testing.assert_close(held[0](inputs, inputs, inputs)[0], expected)


@pytest.mark.parametrize("settings", [{}, {"role": "update", "freeze_rest": True}])
def test_a_recovered_model_knows_nothing_of_this_package(settings):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3), nn.MultiheadAttention(8, 2))
    convert(model, MatrixProduct("channel"), rank=2, allow_larger=True, **settings)
    assert b"lightning_lowrank" in pickle.dumps(model)
    for _, layer in low_rank_layers(model):
        assert layer.weight.any()
    recover(model)
    assert b"lightning_lowrank" not in pickle.dumps(model)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3), nn.MultiheadAttention(8, 2))
    for part, other in zip(model.modules(), plain.modules(), strict=True):
        assert type(part) is type(other)
        assert vars(part).keys() == vars(other).keys()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_with_a_hook_is_not_converted(register):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    getattr(model[0].weight, register)(lambda *given: None)
    conversion = convert(model, MatrixProduct(), rank=2)
    assert [layer.converted for layer in conversion.layers] == [False, True]
    assert "hook" in conversion.layers[0].reason


def test_a_merged_layer_whose_factors_change_is_no_longer_merged():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(3, 8)
    convert(model, MatrixProduct(), rank=2, role="weight")
    merge(model)
    kept = model[0].merged_weight
    before = model(inputs)
    assert model[0].merged_weight is kept
    copied = copy.deepcopy(model).double().float()
    assert_same({"outputs": copied(inputs)}, {"outputs": before})
    assert copied[0].merged_weight is not None
    with torch.no_grad():
        model[0].factors["U"].mul_(2)
    changed = model(inputs)
    assert not torch.equal(changed, before)
    assert model[0].merged_weight is None
    assert_same({"outputs": model(inputs)}, {"outputs": changed})
    merge(model)
    with torch.inference_mode():
        assert torch.equal(model(inputs), model(inputs))


def doubled(layer):
    with torch.no_grad():
        layer.factors["U"].mul_(2)


def replaced(layer):
    layer.factors["U"] = nn.Parameter(2 * layer.factors["U"].detach())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize("change", [doubled, replaced])
@pytest.mark.parametrize("first", ["copied", "changed"])
def test_a_copy_of_a_merged_layer_whose_factors_change_is_no_longer_merged(duplicate, change, first):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(3, 8)
    convert(model, MatrixProduct(), rank=2, role="weight")
    layer = merge(model)[0]
    assert duplicate(layer).merged_weight is not None
    if first == "copied":
        layer = duplicate(layer)
        change(layer)
    else:
        change(layer)
        layer = duplicate(layer)
    outputs = layer(inputs)
    assert layer.merged_weight is None
    layer.unmerge()
    assert torch.equal(outputs, layer(inputs))


@pytest.mark.parametrize("role", ["weight", "update"])
def test_what_is_written_into_a_composed_weight_is_an_error(role):
    def made():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        convert(model, MatrixProduct(), rank=2, role=role)
        return model, model[0]

    inputs = torch.randn(3, 8)
    for write in (
        lambda weight: weight.copy_(torch.zeros(8, 8)),
        lambda weight: weight.clamp_(-0.1, 0.1),
        lambda weight: weight[0].zero_(),
        nn.init.zeros_,
    ):
        model, layer = made()
        with torch.no_grad():
            write(layer.weight)
        with pytest.raises(RuntimeError, match=r"changed in place.*exclude"):
            model(inputs)
        # As SwAV's normalisation of prototypes, which is given the weight and turns off gradients itself.
        for reads, write_to in ((9, torch.no_grad()(write)), (0, lambda weight, write=write: write(weight.data))):
            model, layer = made()
            for _ in range(reads):
                assert layer.weight.shape == (8, 8)
            write_to(layer.weight)
            with pytest.raises(RuntimeError, match=r"changed in place.*exclude"):
                model(inputs)
    model, layer = made()
    with torch.no_grad():
        layer.factors["U"].fill_(torch.nan)
        assert layer.weight.isnan().all()
    assert model(inputs).isnan().all()
    model, layer = made()
    with torch.no_grad():
        expected = model(inputs)
        kept = layer.weight
        kept.clone().zero_(), (2 * layer.weight).zero_()
        torch.testing.assert_close(inputs @ kept.T + layer.bias, layer(inputs))
    assert_same({"outputs": model(inputs)}, {"outputs": expected})
    copied = copy.deepcopy(model)
    assert_same({"outputs": copied(inputs)}, {"outputs": expected})


@pytest.mark.parametrize("read", ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"])
@pytest.mark.parametrize("training", [False, True])
def test_what_is_written_into_a_weight_that_torch_reads_is_an_error(read, training):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, inputs = nn.Sequential(layer).train(training), torch.randn(2, 3, 16)
    convert(model, MatrixProduct(), rank=2)
    with torch.no_grad():
        model(inputs)
        nn.init.zeros_(operator.attrgetter(read)(model[0]))
        with pytest.raises(RuntimeError, match=r"changed in place.*exclude"):
            model(inputs)
