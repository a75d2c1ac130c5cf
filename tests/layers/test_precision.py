"""Trained parts of a model whose other weights have 16 bits."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_lowrank.layers import (
    CP,
    LowRankConv2d,
    MatrixProduct,
    add_frobenius_decay,
    convert,
    dense_state_dict,
    frobenius_norm_squared,
    frobenius_penalty,
    low_rank_layers,
    merge,
    recover,
)
from tests.helpers import assert_same


class Encoder(nn.Module):
    """A table, a layer to convert, a norm and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 16)
        self.hidden = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        return self.head(input=self.norm(self.hidden(self.table(tokens))))


TOKENS = torch.arange(6).view(2, 3)


def converted(dtype=torch.bfloat16, keep=("table", "norm", "head"), **settings):
    model = Encoder().to(dtype)
    given = {"include": ["hidden"], "freeze_rest": True, "keep_trained": list(keep), **settings}
    convert(model, MatrixProduct(), rank=2, **given)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_trained_is_of_32_bits_and_what_is_frozen_of_16(dtype):
    model = converted(dtype)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else dtype), name
    output = model(TOKENS)
    assert output.dtype == dtype
    wide = copy.deepcopy(model).float()
    torch.testing.assert_close(output.float(), wide(TOKENS), rtol=0.02, atol=0.02)
    output.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad and p.grad is not None)
    assert model.head.weight.grad.any()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(TOKENS).float(), wide(TOKENS).float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("compute", ["dense", "contracted"])
@pytest.mark.parametrize("keep", [[], ["*.bias"]])
def test_factors_that_are_the_weight_itself(compute, keep):
    model = nn.Sequential(
        nn.Embedding(7, 16),
        nn.Linear(16, 16),
        nn.Linear(16, 16, bias=False),
        nn.Unflatten(-1, (4, 4)),
        nn.Conv2d(6, 5, 3),
    ).bfloat16()
    how = {"role": "weight", "freeze_rest": True, "keep_trained": keep, "skip": [], "compute": compute}
    convert(model, MatrixProduct(), rank=2, **how)
    tokens = torch.arange(6).view(1, 6)
    output = model(tokens)
    assert output.dtype == model[1].weight.dtype == torch.bfloat16
    assert model[1].factors["U"].dtype == torch.float32
    wide = copy.deepcopy(model).float()
    assert wide[1].weight.dtype == torch.float32
    torch.testing.assert_close(output.float(), wide(tokens), rtol=0.05, atol=0.02)
    output.float().square().sum().backward()
    assert all(p.grad.any() and p.grad.dtype == torch.float32 for p in model[2].factors.values())
    dense = recover(copy.deepcopy(model))
    assert {p.dtype for p in dense.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(dense(tokens), output, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("role", ["update", "weight"])
def test_autocast_rounds_no_weight_that_is_kept(role):
    def kept():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.MultiheadAttention(16, 2))
        conversion = convert(model, MatrixProduct(), rank=4, role=role)
        found = {"error": torch.tensor([layer.error or 0.0 for layer in conversion.layers])}
        found |= LowRankConv2d.from_dense(nn.Conv2d(6, 6, 3), CP(), 2, role="weight").state_dict()
        layers = dict(low_rank_layers(model))
        for name, layer in layers.items():
            for factor in layer.factors.values():
                factor.detach().normal_()
            found[f"{name} norm"] = frobenius_norm_squared(layer).detach()
        found["penalty"] = frobenius_penalty(model, 0.1).detach()
        add_frobenius_decay(model, 0.1)
        found |= {f"{name} decay": layer.factors["V"].grad for name, layer in layers.items()}
        found |= dense_state_dict(model.state_dict(), conversion.specs)
        merge(model)
        found |= {f"{name} merged": layer.merged_weight for name, layer in layers.items()}
        if role == "update":
            for name, layer in layers.items():
                layer.fold()
                found[f"{name} folded"] = layer.frozen_weight.detach().clone()
        found |= {f"recovered {name}": value for name, value in recover(model).state_dict().items()}
        return found

    expected = kept()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(kept(), expected)


@pytest.mark.parametrize("settings", [{"half_frozen": True}, {"decouple": True}], ids=str)
def test_fixed_factors_of_16_bits_beside_trained_ones_of_32(settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16)).bfloat16()
    conversion = convert(model, MatrixProduct(), rank=2, role="weight", freeze_rest=True, **settings)
    layer = model[0]
    assert {layer.factors["V"].dtype, *(f.dtype for f in layer.fixed.values())} == {torch.float32, torch.bfloat16}
    torch.testing.assert_close(frobenius_penalty(model, 2.0), layer.update().square().sum())
    add_frobenius_decay(model, 2.0)
    (slope,) = torch.autograd.grad(layer.update().square().sum(), layer.factors["V"])
    torch.testing.assert_close(layer.factors["V"].grad, slope)
    dense = dense_state_dict(model.state_dict(), conversion.specs)
    assert torch.equal(dense["0.weight"].bfloat16(), recover(model)[0].weight)


def test_a_small_step_is_kept():
    model = converted()
    before = model.head.weight.detach().clone()
    model(TOKENS).float().sum().backward()
    torch.optim.SGD([model.head.weight], lr=1e-6).step()
    assert (model.head.weight != before).any()
    assert torch.equal(model.head.weight.bfloat16(), before.bfloat16())


@pytest.mark.parametrize("settings", [{"freeze_rest": False, "keep_trained": None}, {"train_base": True}], ids=str)
def test_where_the_weights_are_trained_too_they_keep_their_type(settings):
    model = converted(**settings)
    assert {p.dtype for name, p in model.named_parameters() if "factors" not in name} == {torch.bfloat16}


def test_a_bias_beside_a_frozen_weight_keeps_its_type():
    model = converted(keep=["head.bias", "hidden.bias", "norm"])
    types = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    wide = {name for name, dtype in types.items() if dtype == torch.float32}
    assert wide == {"hidden.factors.U", "hidden.factors.V", "norm.weight", "norm.bias"}
    assert types.keys() - wide == {"head.bias", "hidden.bias"}
    model(TOKENS).float().sum().backward()
    assert all(model.get_parameter(name).grad is not None for name in types)


def test_weights_of_32_bits_get_no_hooks():
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in converted(torch.float32).modules())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.cells = nn.Linear(16, 16), nn.LSTM(16, 8, batch_first=True)

    def forward(self, inputs, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.hidden(inputs), lengths, batch_first=True)
        return self.cells(packed)[0]


class Answer(OrderedDict):
    """A mapping whose values are attributes as well, as those of transformers are."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


class Answering(nn.Linear):
    def forward(self, inputs):
        return Answer(logits=super().forward(inputs), states=[inputs])


def test_what_is_given_and_returned_keeps_its_class():
    model = Recurrent().bfloat16()
    convert(model, MatrixProduct(), rank=2, freeze_rest=True, keep_trained=["cells"])
    output = model(torch.randn(2, 5, 16, dtype=torch.bfloat16), torch.tensor([5, 3]))
    assert isinstance(output, nn.utils.rnn.PackedSequence)
    assert output.data.dtype == torch.bfloat16
    answering = nn.Sequential(nn.Linear(16, 16), Answering(16, 3)).bfloat16()
    convert(answering, MatrixProduct(), rank=2, include=["0"], freeze_rest=True, keep_trained=["1"])
    answer = answering(torch.randn(2, 16, dtype=torch.bfloat16))
    assert isinstance(answer, Answer)
    assert answer.logits is answer["logits"]
    assert {answer.logits.dtype, answer["states"][0].dtype} == {torch.bfloat16}


@pytest.mark.parametrize("settings", [{}, {"role": "weight", "keep": ["*bias", "head"]}], ids=["update", "weight"])
def test_a_recovered_model_has_its_former_types_and_nothing_of_this_package(settings):
    model, calls = copy.deepcopy(converted(**settings)), []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    expected = model(TOKENS)
    recover(model)
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    assert not dict(model.named_buffers())
    torch.testing.assert_close(model(TOKENS), expected, rtol=0.02, atol=0.02)
    assert len(calls) == 2
    model.head._forward_hooks.clear()
    assert b"lightning_lowrank" not in pickle.dumps(model)


class Table(nn.Module):
    """A parameter of its own before the children, and one in a list after them."""

    def __init__(self):
        super().__init__()
        self.places, self.norm = nn.Parameter(torch.randn(5, 16)), nn.LayerNorm(16)
        self.project = nn.ParameterList([torch.randn(16, 8)])

    def forward(self, inputs):
        return self.norm(inputs + self.places) @ self.project[0]


class Attention(nn.MultiheadAttention):
    def forward(self, inputs):
        return super().forward(inputs, inputs, inputs)[0]


KEPT = {
    "no bias": lambda: nn.Linear(16, 8, bias=False),
    "convolution": lambda: nn.Conv1d(5, 4, 3, bias=False),
    "norm": lambda: nn.LayerNorm(16, bias=False),
    "statistics": lambda: nn.BatchNorm1d(5),
    "children": Table,
    "attention": lambda: Attention(16, 2),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(16, 8, bias=False)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(16, 8)),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_module_that_is_kept_whole_computes_in_32_bits(kind):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(16, 16), "kept": KEPT[kind]()}).bfloat16()
    before = {name: value.dtype for name, value in model.state_dict().items()}
    convert(model, MatrixProduct(), rank=2, include=["body"], freeze_rest=True, keep_trained=["kept"])
    assert {p.dtype for p in model["kept"].parameters()} == {torch.float32}
    wide = copy.deepcopy(model["kept"]).float()
    inputs = torch.randn(2, 5, 16).bfloat16()
    output = model["kept"](inputs)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, wide(inputs.float()).bfloat16())
    assert output.requires_grad
    for name, value in wide.state_dict().items():
        assert torch.equal(model["kept"].state_dict()[name], value)
    recover(model)
    assert {name: value.dtype for name, value in model.state_dict().items()} == before
    assert not hasattr(model["kept"], "widened_buffers")


def test_parameters_beside_frozen_children_keep_their_type():
    class Own(Encoder):
        def __init__(self):
            super().__init__()
            self.scale, self.attention = nn.Parameter(torch.ones(16)), nn.MultiheadAttention(16, 2)
            self.shifts = nn.ParameterList([torch.ones(16)])

        def forward(self, tokens):
            hidden = self.hidden(self.table(tokens) * self.scale + self.shifts[0])
            return self.head(self.norm(self.attention(hidden, hidden, hidden)[0]))

    model = Own().bfloat16()
    keep = ["scale", "shifts", "attention.out_proj", "in_proj_bias", "head"]
    convert(model, MatrixProduct(), rank=2, include=["in_proj"], role="weight", freeze_rest=True, keep_trained=keep)
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {"attention.in_proj.factors.U", "attention.in_proj.factors.V", "head.weight", "head.bias"}
    model(TOKENS).float().sum().backward()
    assert model.scale.grad.any()


def test_recovery_rounds_only_buffers_that_were_of_16_bits():
    norm = nn.BatchNorm1d(5).bfloat16()
    norm.register_buffer("exact", torch.tensor([1 / 3]))
    model = nn.Sequential(nn.Linear(5, 5).bfloat16(), norm)
    convert(model, MatrixProduct(), rank=1, include=["0"], freeze_rest=True, keep_trained=["1"])
    assert norm.running_var.dtype == torch.float32
    recover(model)
    assert norm.running_var.dtype == torch.bfloat16
    assert norm.exact.dtype == torch.float32
