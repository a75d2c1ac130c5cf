"""Which of a model's parameters are projected."""

import pytest
import torch
from torch import nn

from lightning_lowrank.layers import MatrixProduct, convert
from lightning_lowrank.optim import ProjectedSGD, projected_parameter_groups


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.stem = nn.ConvTranspose1d(3, 4, 5)
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm((2, 8)), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight
        self.shared = nn.Linear(8, 8, bias=False)
        self.shared.weight = self.encoder[0].weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.temperature = nn.Parameter(torch.ones(()))


def names_of(model, groups):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [{names[p] for p in group["params"]} for group in groups]


def test_groups_take_weights_of_linear_layers_and_convolutions():
    model = Network()
    groups = projected_parameter_groups(model, 3, moments="zero", lr=0.5)
    projected, rest = names_of(model, groups)
    assert projected == {
        "stem.weight",
        "encoder.0.weight",
        "encoder.2.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    assert projected | rest == {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(len(group["params"]) for group in groups) == len(projected | rest)
    assert {**groups[0], "params": None} == {"params": None, "rank": 3, "moments": "zero", "lr": 0.5}
    assert {**groups[1], "params": None} == {"params": None, "rank": None}
    optimizer = ProjectedSGD(groups, lr=0.1, rank=None)
    for _ in range(2):
        for parameter in (p for group in groups for p in group["params"]):
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert optimizer.projection(model.stem.weight).shape == (20, 3)
    assert optimizer.projection(model.encoder[1].weight) is None


def test_the_factors_of_an_embedding_are_not_projected():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8))
    convert(model, MatrixProduct(), rank=2, role="weight")
    projected, rest = names_of(model, projected_parameter_groups(model, 2))
    assert projected == {"1.factors.U", "1.factors.V"}
    assert rest == {"0.factors.U", "0.factors.V", "1.bias"}


def test_a_parametrized_embedding_is_not_projected():
    model = nn.Sequential(*map(nn.utils.parametrizations.spectral_norm, (nn.Embedding(20, 8), nn.Linear(8, 4))))
    projected, rest = names_of(model, projected_parameter_groups(model, 2))
    assert projected == {"1.parametrizations.weight.original"}
    assert rest == {"0.parametrizations.weight.original", "1.bias"}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"include": ["encoder"]}, ["encoder.0.weight", "encoder.2.weight"]),
        ({"include": ["encoder.2"]}, ["encoder.2.weight"]),
        ({"include": ["*proj*"]}, ["attention.in_proj_weight", "attention.out_proj.weight"]),
        ({"include": ["shared"]}, ["encoder.0.weight"]),
        ({"exclude": ["attention", "st?m.weight"]}, ["encoder.0.weight", "encoder.2.weight"]),
        ({"include": ["encoder"], "exclude": ["0"]}, ["encoder.2.weight"]),
    ],
    ids=str,
)
def test_patterns_choose_what_is_projected(patterns, expected):
    model = Network()
    groups = projected_parameter_groups(model, 3, **patterns)
    projected, rest = names_of(model, groups)
    assert projected == set(expected)
    assert rest == {n for n, p in model.named_parameters() if p.requires_grad} - projected


def test_no_decay_spares_parameters_of_one_dimension_only():
    model = Network()
    groups = projected_parameter_groups(model, 3, no_decay=True, weight_decay=0.2)
    assert [group.get("weight_decay") for group in groups] == [0.2, None, 0.0]
    _, decayed, undecayed = names_of(model, groups)
    assert decayed == {"embedding.weight", "encoder.1.weight", "encoder.1.bias"}
    assert {"temperature", "head.bias", "encoder.3.weight"} < undecayed
    assert len(projected_parameter_groups(nn.Linear(4, 3, bias=False), 2, no_decay=True)) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 0}, ValueError, r"rank.*0"),
        ({"include": ["encodr"]}, ValueError, r"include.*'encodr'.*encoder\.2"),
        ({"exclude": ["embedding"]}, ValueError, r"exclude.*'embedding'"),
        ({"include": "encoder"}, TypeError, r"include.*'encoder'"),
        ({"refresh_intervall": 3}, TypeError, r"'refresh_intervall'.*refresh_interval"),
        ({"exclude": ["*"]}, ValueError, "no parameter can be projected"),
    ],
    ids=str,
)
def test_wrong_arguments_for_groups_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        projected_parameter_groups(Network(), **{"rank": 3, **arguments})


def test_uninitialised_parameters_are_refused():
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        projected_parameter_groups(nn.Sequential(nn.LazyLinear(3)), 2)
