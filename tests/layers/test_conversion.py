import copy
import fnmatch
import io
import itertools
import json
import math
import pickle

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from lightning_lowrank import models
from lightning_lowrank.layers import (
    CP,
    BlockKronecker,
    CoreProduct,
    Hadamard,
    LayerSpec,
    LowRankConv2d,
    LowRankLayer,
    LowRankLinear,
    MatrixProduct,
    convert,
    dense_state_dict,
    low_rank_layers,
    merge,
    recover,
)
from lightning_lowrank.seeding import derive_seed
from tests.grids import nightly_except
from tests.helpers import assert_same

PRODUCT, KRONECKER = MatrixProduct(layout="raw"), BlockKronecker()
MODIFIERS = {"plain": {}, "decoupled": {"decouple": True}, "half-frozen": {"half_frozen": True}}


def convolutional(channels, widths, pool_every, features, classes):
    layers = []
    for index, width in enumerate(widths):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        if (index + 1) % pool_every == 0:
            layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes, bias=False))


def cnn4(channels=1, features=256):
    return convolutional(channels, (32, 64, 128, 256), 1, features, 10)


def ten_convolutions(classes):
    return convolutional(3, (32, 32, 64, 64, 128, 128, 256, 256, 512, 512), 2, 512, classes)


class Tower(nn.Module):
    """A model with what conversion must cope with: nesting, biases, a norm, a shared layer."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)),
            nn.Sequential(nn.Conv2d(8, 12, (3, 5), stride=2, groups=2, padding=1, bias=False), nn.ReLU()),
        )
        self.fc1 = nn.Linear(12, 16)
        self.fc2 = nn.Linear(16, 16)
        self.again = self.fc2
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        hidden = self.fc1(self.encoder(x).mean(dim=(2, 3)))
        return self.head(self.again(torch.relu(self.fc2(hidden))))


@pytest.fixture
def tower():
    torch.manual_seed(0)
    return Tower().eval()


@pytest.fixture
def batch():
    return torch.randn(2, 3, 8, 9, generator=torch.Generator().manual_seed(1))


def scramble(model, seed=1):
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in low_rank_layers(model):
            for factor in layer.factors.values():
                factor.copy_(0.3 * torch.randn(factor.shape, generator=source))


def ranks(conversion):
    return [layer.rank for layer in conversion.layers if layer.converted]


def snapshot(model):
    return {n: (id(p), p.requires_grad) for n, p in model.named_parameters()}


# The figures of FedMUD


@pytest.mark.parametrize("rule", ["largest", "authors"])
def test_cnn4_product(rule):
    conversion = convert(cnn4(), PRODUCT, budget=1 / 32, budget_rule=rule, skip=["first", "last"])
    assert conversion.dense_parameters == 390_880
    assert ranks(conversion) == [2, 3, 5]
    assert conversion.trainable_parameters == 11_872
    assert conversion.ratio == 11_872 / 390_880


@pytest.mark.parametrize(
    ("rule", "blocks", "trainable"),
    [("authors", [(2, 10), (8, 10), (31, 10)], 12_008), ("largest", [(2, 10), (8, 10), (32, 10)], 12_208)],
)
def test_cnn4_kronecker(rule, blocks, trainable):
    model = cnn4()
    conversion = convert(model, KRONECKER, budget=1 / 32, budget_rule=rule, skip=["first", "last"], decouple=True)
    assert [tuple(layer.factors["U"].shape[:2]) for _, layer in low_rank_layers(model)] == blocks
    assert conversion.trainable_parameters == trainable


@pytest.mark.parametrize(
    ("factorization", "expected", "trainable"), [(PRODUCT, [5, 9, 17], 12_544), (KRONECKER, [9, 34, 134], 12_481)]
)
def test_cnn4_half_frozen_by_the_authors_rule(factorization, expected, trainable):
    model = cnn4()
    conversion = convert(
        model, factorization, budget=1 / 32, budget_rule="authors", skip=["first", "last"], half_frozen=True
    )
    assert ranks(conversion) == expected
    assert conversion.trainable_parameters == trainable
    if factorization is KRONECKER:
        assert {layer.factors["V"].shape[1:] for _, layer in low_rank_layers(model)} == {(7, 7)}


@pytest.mark.parametrize(
    ("classes", "factorization", "dense", "expected", "trainable"),
    [
        (10, PRODUCT, 4_719_328, [2, 2, 3, 4, 6, 8, 12, 15, 23], 151_840),
        (10, KRONECKER, 4_719_328, [2, 4, 7, 14, 28, 55, 110, 219, 438], 152_026),
        (100, PRODUCT, 4_765_408, None, 149_536),
        (100, KRONECKER, 4_765_408, None, 153_232),
    ],
)
def test_ten_convolutions_by_the_authors_rule(classes, factorization, dense, expected, trainable):
    model = ten_convolutions(classes)
    conversion = convert(model, factorization, budget=1 / 32, budget_rule="authors", skip=["first", "last"])
    assert conversion.dense_parameters == dense
    assert conversion.trainable_parameters == trainable
    if expected is not None:
        assert ranks(conversion) == expected
    if classes == 10 and factorization is KRONECKER:
        assert {layer.factors["U"].shape[1] for _, layer in low_rank_layers(model)} == {9}


@pytest.mark.parametrize("rule", ["largest", "authors"])
def test_svhn_cannot_reach_a_32nd_and_the_error_names_the_floor(rule):
    model = cnn4(channels=3, features=1024)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"12,064 \(3\.02%\).*14,080 \(3\.53%\)"):
        convert(model, PRODUCT, budget=1 / 32, budget_rule=rule, skip=["first", "last"])
    assert snapshot(model) == before
    conversion = convert(model, PRODUCT, rank=1, skip=["first", "last"])
    assert ranks(conversion) == [1, 1, 1]
    assert conversion.trainable_parameters == 14_080
    assert f"{conversion.ratio:.2%}" == "3.53%"


# Budget, ratio, rank


@pytest.mark.parametrize("factorization", [PRODUCT, KRONECKER, BlockKronecker(grid=True)], ids=str)
@pytest.mark.parametrize("half_frozen", [False, True])
@pytest.mark.parametrize("budget", [0.35, 0.5, 0.62, 0.8])
def test_largest_budget_equals_an_exhaustive_search(factorization, half_frozen, budget):
    sizes = [(20, 12), (15, 20), (15, 15), (3, 15)]
    model = nn.Sequential(*(nn.Linear(columns, rows) for rows, columns in sizes), nn.LayerNorm(3))
    dense = sum(p.numel() for p in model.parameters())
    rest = sum(rows for rows, _ in sizes) + 6

    def trained(shape, rank):
        shapes = factorization.factor_shapes(shape, rank)
        total = math.prod(shapes["V"]) + (0 if half_frozen else math.prod(shapes["U"]))
        return min(total, math.prod(shape))

    candidates = {
        min(1.0, factorization.ratio_for_rank(shape, rank, half_frozen))
        for shape in sizes
        for rank in range(1, factorization.max_rank(shape, half_frozen) + 1)
        if not getattr(factorization, "grid", False) or math.isqrt(rank) ** 2 == rank
    }
    fitting = []
    for ratio in candidates:
        chosen = [factorization.rank_for_ratio(shape, ratio, half_frozen) for shape in sizes]
        if rest + sum(map(trained, sizes, chosen)) <= budget * dense:
            fitting.append((ratio, chosen))
    best = max(fitting)[1]
    expected = rest + sum(map(trained, sizes, best))
    conversion = convert(model, factorization, budget=budget, half_frozen=half_frozen)
    assert conversion.trainable_parameters == expected
    for layer, shape, rank in zip(conversion.layers, sizes, best, strict=True):
        assert layer.rank == (rank if trained(shape, rank) < math.prod(shape) else None)


def test_authors_rule_goes_down_in_steps_from_the_budget():
    model = cnn4()
    conversion = convert(model, KRONECKER, budget=1 / 32, budget_rule="authors", skip=["first", "last"])
    sizes = [64 * 32 * 9, 128 * 64 * 9, 256 * 128 * 9]
    fixed = 390_880 - sum(sizes)
    for step in itertools.count():
        ratio = 1 / 32 - 0.001 * step
        blocks = [math.ceil(ratio**2 * size / 4) for size in sizes]
        total = fixed + sum(2 * k * math.ceil((size / k) ** 0.25) ** 2 for k, size in zip(blocks, sizes, strict=True))
        if total / 390_880 <= 1 / 32 + 0.001:
            break
    assert step > 0
    assert ranks(conversion) == blocks


def test_a_budget_counts_biases_and_frozen_parameters_as_they_are(tower):
    for parameter in tower.head.parameters():
        parameter.requires_grad_(False)
    conversion = convert(tower, MatrixProduct(), budget=0.5, exclude=["head"])
    now = sum(p.numel() for p in tower.parameters() if p.requires_grad)
    assert conversion.trainable_parameters == now <= 0.5 * conversion.dense_parameters
    assert {layer.name: layer.trainable for layer in conversion.layers}["head"] == 0


def test_a_rank_above_the_largest_is_what_allow_larger_allows():
    """FedLoRA-M of the authors of FedSLoP: rank 15 also for a head of ten outputs."""
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    how = {"rank": 15, "freeze_rest": True, "init": "uniform", "init_scale": 15**-0.5}
    inputs = torch.randn(5, 784)
    before = model(inputs)
    convert(model, PRODUCT, allow_larger=True, **how)
    assert sum(value.numel() for value in model.parameters() if value.requires_grad) == 15_750
    assert torch.equal(model(inputs), before)
    head = model[2]
    assert head.factors["U"].shape == (10, 15)
    assert 0.2 < head.factors["U"].abs().max() <= 15**-0.5
    assert not head.factors["V"].any()
    with torch.no_grad():
        head.factors["V"].uniform_()
    torch.testing.assert_close(head.weight, head.frozen_weight + head.factors["U"] @ head.factors["V"].T)
    outputs = model(inputs)
    torch.testing.assert_close(recover(model)(inputs), outputs)


def test_a_rank_above_the_largest_is_refused_elsewhere():
    for arguments in ({"role": "weight"}, {"role": "update", "factorization": CP()}):
        arguments = {"factorization": PRODUCT, **arguments}
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        factorization = arguments.pop("factorization")
        conversion = convert(model, factorization, rank={"0": 2, "1": 9}, allow_larger=True, **arguments)
        assert [spec.name for spec in conversion.specs] == ["0"]
    with pytest.raises(ValueError, match=r"rank.*1"):
        LowRankLinear.from_dense(nn.Linear(4, 3), PRODUCT, rank=9, role="weight")
    with pytest.raises(ValueError, match=r"rank.*1"):
        LowRankLinear.from_dense(nn.Linear(4, 3), PRODUCT, rank=2.5)


def test_freeze_rest_leaves_no_layer_frozen_for_its_rank():
    """As with PEFT, LoRA of rank 8 on a head of two classes trains."""
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 2))
    how = {"rank": 8, "freeze_rest": True}
    plain, larger = copy.deepcopy(model), copy.deepcopy(model)
    conversion = convert(plain, PRODUCT, init="lora", **how)
    convert(larger, PRODUCT, init="lora", allow_larger=True, **how)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), larger.parameters(), strict=True))
    assert plain[1].factors["U"].shape == (2, 8)
    assert "176 numbers" in str(conversion)
    for left in ({"keep_trained": ["1"]}, {"exclude": ["1"]}):
        conversion = convert(copy.deepcopy(model), PRODUCT, **how, **left)
        assert [spec.name for spec in conversion.specs] == ["0"]


@pytest.mark.parametrize(
    ("factorization", "settings"),
    [(PRODUCT, {"role": "weight"}), (CP(), {}), (CoreProduct(), {}), (BlockKronecker(grid=True), {}), (Hadamard(), {})],
    ids=str,
)
def test_freeze_rest_gives_a_small_layer_the_largest_rank(factorization, settings):
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(5, 1))
    largest = factorization.max_rank((1, 5))
    rank = 16
    assert largest < rank
    conversion = convert(model, factorization, rank=rank, freeze_rest=True, **settings)
    small = conversion.layers[1]
    assert (small.rank, model[1].rank) == (largest, largest)
    assert small.reason == f"rank {rank} is more than the largest of such a weight, {largest}"
    assert small.trainable == sum(p.numel() for p in model[1].parameters() if p.requires_grad)
    assert conversion.trainable_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("keep", [[], ["1"]], ids=str)
def test_a_budget_counts_the_factors_of_small_layers_that_freeze_rest_would_freeze(keep):
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 1, bias=False))
    conversion = convert(model, PRODUCT, budget=401, budget_unit="parameters", freeze_rest=True, keep_trained=keep)
    assert conversion.layers[1].converted == (not keep)
    # One rank of the first layer is 80 numbers, of the second 41, and its weight 40.
    assert conversion.trainable_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert conversion.trainable_parameters == 4 * 80 + (40 if keep else 41)


def test_a_rank_ratio_that_a_wide_layer_has_no_rank_for_says_why():
    model = nn.Sequential(nn.Linear(24, 512), nn.Linear(512, 24))
    conversion = convert(model, PRODUCT, rank_ratio=0.25)
    assert [layer.rank for layer in conversion.layers] == [None, 6]
    assert "512 output channels" in conversion.layers[0].reason


@pytest.mark.parametrize("frozen_before", [False, True])
def test_freeze_rest_leaves_the_base_that_is_trained(frozen_before):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    model[0].weight.requires_grad_(not frozen_before)
    conversion = convert(model, PRODUCT, rank=2, include=["0"], freeze_rest=True, train_base=True, convert_frozen=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"0.factors.U", "0.factors.V", *([] if frozen_before else ["0.frozen_weight"])}
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert (conversion.layers[0].trainable, conversion.trainable_parameters) == (count, count)


def test_freeze_rest_leaves_only_factors(tower):
    dense = sum(p.numel() for p in tower.parameters())
    conversion = convert(tower, MatrixProduct(), budget=0.1, include=["fc1", "fc2"], freeze_rest=True)
    trained = {name for name, p in tower.named_parameters() if p.requires_grad}
    assert trained == {f"{layer}.factors.{name}" for layer in ("fc1", "fc2") for name in "UV"}
    assert conversion.trainable_parameters == sum(layer.trainable for layer in conversion.layers) <= 0.1 * dense
    assert conversion.trainable_parameters == sum(p.numel() for p in tower.parameters() if p.requires_grad)


def test_keep_trained_spares_parameters_by_name(tower):
    conversion = convert(
        tower, PRODUCT, rank=2, include=["fc1", "fc2"], freeze_rest=True, keep_trained=["head", "0.0.bias", "again"]
    )
    factors = {f"{layer}.factors.{name}" for layer in ("fc1", "fc2") for name in "UV"}
    trained = {name for name, p in tower.named_parameters() if p.requires_grad}
    assert trained == factors | {"head.weight", "head.bias", "encoder.0.0.bias", "fc2.bias"}
    assert conversion.trainable_parameters == sum(p.numel() for p in tower.parameters() if p.requires_grad)
    by_name = {layer.name: layer.trainable for layer in conversion.layers}
    assert (by_name["head"], by_name["encoder.0.0"], by_name["encoder.1.0"]) == (80, 0, 0)


def test_keep_trained_leaves_frozen_what_was_frozen(tower):
    tower.head.weight.requires_grad_(False)
    conversion = convert(tower, PRODUCT, rank=2, include=["fc1"], freeze_rest=True, keep_trained=["head"])
    assert (tower.head.weight.requires_grad, tower.head.bias.requires_grad) == (False, True)
    assert conversion.layers[-1].trainable == 0


@pytest.mark.parametrize("unit", ["share", "bytes"])
def test_a_budget_counts_what_is_kept_trained(unit):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 10).double())
    # Whatever the head and its pattern take is not the factors' any more; the first layer's weight is theirs.
    kept = (10 * 40 + 10) * (8 if unit == "bytes" else 1) + 40 * (4 if unit == "bytes" else 1)
    allowed = kept + 5 * 2 * 80 * (4 if unit == "bytes" else 1) + 3
    total = sum(p.numel() for p in model.parameters())
    conversion = convert(
        model,
        PRODUCT,
        budget=allowed / total if unit == "share" else allowed,
        budget_unit=unit,
        exclude=["2"],
        freeze_rest=True,
        keep_trained=["2", "0"],
    )
    assert ranks(conversion) == [5, 5]
    assert conversion.trainable_parameters == 5 * 2 * 80 + 410 + 40


def test_keep_trained_is_refused_where_it_does_nothing(tower):
    before = snapshot(tower)
    with pytest.raises(ValueError, match=r"keep_trained=\['head'\] .* set freeze_rest=True"):
        convert(tower, PRODUCT, rank=2, keep_trained=["head"])
    with pytest.raises(ValueError, match=r"keep_trained.*'haed'"):
        convert(tower, PRODUCT, rank=2, freeze_rest=True, keep_trained=["haed"])
    with pytest.raises(ValueError, match=r"keep_trained.*'fc1\.weight'"):
        convert(tower, PRODUCT, rank=2, freeze_rest=True, keep_trained=["fc1.weight"])
    with pytest.raises(TypeError, match=r"keep_trained.*'head'"):
        convert(tower, PRODUCT, rank=2, freeze_rest=True, keep_trained="head")
    assert snapshot(tower) == before


@pytest.mark.parametrize("factorization", [PRODUCT, KRONECKER])
def test_ratio_is_per_layer(factorization):
    conversion = convert(cnn4(), factorization, ratio=0.1, skip=["first", "last"])
    for layer in conversion.layers[1:-1]:
        assert layer.rank == factorization.rank_for_ratio(layer.shape, 0.1)
        assert layer.trainable == factorization.trained_numbers(layer.shape, layer.rank)


def test_patterns_give_ranks_and_the_first_match_counts(tower):
    conversion = convert(tower, MatrixProduct(), rank={"encoder.1.*": 2, "fc2": 3, "fc*": 4})
    by_name = {layer.name: layer for layer in conversion.layers}
    assert {name: layer.rank for name, layer in by_name.items()} == {
        "encoder.0.0": None,
        "encoder.1.0": 2,
        "fc1": 4,
        "fc2": 3,
        "head": None,
    }
    assert by_name["head"].reason == "no pattern of rank matches"
    assert isinstance(tower.head, nn.Linear)
    assert not isinstance(tower.head, LowRankLayer)


def test_patterns_give_ratios():
    conversion = convert(cnn4(), PRODUCT, ratio={"[48]": 0.1, "12": 0.02})
    assert ranks(conversion) == [PRODUCT.rank_for_ratio(layer.shape, 0.1) for layer in conversion.layers[1:3]] + [6]


def test_a_layer_that_would_not_shrink_is_left_alone(tower):
    conversion = convert(tower, MatrixProduct(), rank=4)
    head = conversion.layers[-1]
    assert (head.name, head.converted, head.rank) == ("head", False, None)
    assert head.reason == "rank 4 would train 84 numbers, not fewer than the weight has"
    assert head.trainable == head.parameters == 80


def test_half_frozen_counts_only_what_is_trained():
    model = nn.Sequential(nn.Linear(16, 5, bias=False), nn.Linear(5, 16, bias=False))
    conversion = convert(model, MatrixProduct(), rank=4, half_frozen=True)
    assert [layer.converted for layer in conversion.layers] == [True, True]
    assert conversion.trainable_parameters == 4 * 16 + 4 * 5


def test_a_rank_ratio_is_of_the_output_channels():
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(8, 20, 3),
            "transposed": nn.ConvTranspose2d(12, 10, 3, groups=2),
            "embedding": nn.Embedding(50, 12),
            "linear": nn.Linear(40, 30),
            "small": nn.Linear(9, 3),
        }
    )
    conversion = convert(model, MatrixProduct(), rank_ratio={"linear": 0.1, "*": 0.25})
    assert [layer.rank for layer in conversion.layers] == [5, 2, 3, 3, 1]


@pytest.mark.parametrize("unit", ["parameters", "bytes"])
@pytest.mark.parametrize("allocation", ["uniform", "singular_values"])
def test_a_budget_in_parameters_or_bytes_is_met_and_used_up(unit, allocation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 30).double(), nn.Linear(30, 20))

    def size():
        return sum(
            p.numel() * (p.element_size() if unit == "bytes" else 1) for p in model.parameters() if p.requires_grad
        )

    budget = size() // 3
    convert(model, MatrixProduct(), budget=budget, budget_unit=unit, allocation=allocation, role="weight")
    largest_step = 60 * 8 + 70 * 4 + 50 * 4 if unit == "bytes" else 60 + 70 + 50
    assert budget - largest_step < size() <= budget


@pytest.mark.parametrize("role", ["update", "weight"])
@pytest.mark.parametrize("allocation", ["uniform", "singular_values"])
def test_bytes_are_those_of_the_factors_of_a_model_of_16_bits(role, allocation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16()
    kept = {"freeze_rest": True, "keep_trained": ["2", "0.bias"]}
    convert(model, MatrixProduct(), budget=7000, budget_unit="bytes", allocation=allocation, role=role, **kept)
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert 7000 - 2 * 128 * 4 < size <= 7000


@pytest.mark.parametrize("role", ["update", "weight"])
@pytest.mark.parametrize("keep", ["*.bias", "1", "2", "3"])
def test_bytes_are_those_of_what_is_kept_trained_in_a_model_of_16_bits(role, keep):
    def trained_bytes(budget):
        torch.manual_seed(0)
        # The third layer stays dense at each rank, the first two at ranks above 4.
        layers = [nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 1), nn.MultiheadAttention(8, 2)]
        model, kept = nn.Sequential(*layers).bfloat16(), {"freeze_rest": True, "keep_trained": [keep]}
        convert(model, PRODUCT, budget=budget, budget_unit="bytes", role=role, **kept)
        return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)

    budget = 2500
    for _ in range(4):
        size = trained_bytes(budget)
        assert size <= budget
        budget = size - 1


class Texts(nn.Module):
    def __init__(self, kind=nn.GRU):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(60, 24, padding_idx=0), kind(24, 32)
        self.mid, self.head = nn.Linear(32, 32), nn.Linear(32, 4)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRUCell])
def test_recurrent_layers_are_reported_and_left_alone(kind):
    model = Texts(kind)
    report = convert(model, MatrixProduct(), rank=1)
    found = {layer.name: layer for layer in report.layers if layer.name.startswith("rnn")}
    matrices = {name: value for name, value in model.named_parameters() if name.startswith("rnn") and value.ndim > 1}
    assert {name: layer.shape for name, layer in found.items()} == {
        name: tuple(value.shape) for name, value in matrices.items()
    }
    assert all(layer.reason == "weights of recurrent layers are not converted" for layer in found.values())
    assert sum(layer.trainable for layer in found.values()) == sum(value.numel() for value in matrices.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"include": ["embed"]}, "include has 'embed', which matches .* (embed: .* no factor with a row for padding"),
        ({"exclude": ["rnn"]}, "exclude has 'rnn', which .* (rnn.weight_ih_l0: weights of recurrent layers .*; rnn"),
        ({"rank": {"rnn": 2}}, "rank has 'rnn', which .* (rnn.weight_ih_l0: weights of recurrent layers"),
        ({"budget": 0.01}, "Largest of those outside: rnn.weight_hh_l0 (3,072), rnn.weight_ih_l0 (2,304), embed"),
    ],
)
def test_errors_have_the_reasons_of_layers_that_are_left_alone(settings, message):
    settings = {"rank": 1, **settings} if "budget" not in settings else settings
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        convert(Texts(), BlockKronecker(), **settings)


def test_a_budget_counts_factors_that_may_be_larger_than_the_weight():
    model = nn.Sequential(nn.Linear(64, 1, bias=False), nn.Linear(64, 1, bias=False), nn.Linear(8, 8, bias=False))
    with pytest.raises(ValueError, match=r"budget=0\.7.*134.*192.*0"):
        convert(model, MatrixProduct(), budget=0.7, allow_larger=True)


@pytest.mark.parametrize("budget", [0.25, 0.5, 0.8])
def test_singular_values_are_allocated_as_an_exhaustive_search_would(budget):
    """Equal layer sizes make the best choice a matter of the largest singular values alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(3)))
    with torch.no_grad():
        for decay, layer in zip((0.3, 0.7, 1.0), model, strict=True):
            left, _, right = torch.linalg.svd(layer.weight)
            layer.weight.copy_(left @ torch.diag(decay ** torch.arange(12.0)) @ right)
    spectra = [torch.linalg.svdvals(layer.weight.detach()).square() for layer in model]
    affordable = int(budget * 3 * 144) // 24

    def explained(ranks):
        return sum(float(s[:rank].sum() / s.sum()) for s, rank in zip(spectra, ranks, strict=True))

    choices = [c for c in itertools.product(range(1, 6), repeat=3) if sum(c) <= affordable]
    best = max(choices, key=explained)
    conversion = convert(model, MatrixProduct(), budget=budget, allocation="singular_values", role="weight")
    assert explained([layer.rank for layer in conversion.layers]) == pytest.approx(explained(best), abs=1e-6)
    assert conversion.ratio <= budget


def test_allocation_by_singular_values_loses_less_than_one_ratio_for_all():
    torch.manual_seed(0)
    errors = {}
    for allocation in ("uniform", "singular_values"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(64, 48))
        with torch.no_grad():
            model[1].weight.mul_(torch.rand(32, 1, 1, 1) ** 6)
        conversion = convert(model, MatrixProduct(), budget=0.5, allocation=allocation, role="weight")
        errors[allocation] = sum(layer.error**2 for layer in conversion.layers if layer.converted)
    assert errors["singular_values"] < errors["uniform"]


def test_allocation_needs_a_matrix_product(tower):
    with pytest.raises(ValueError, match="needs a MatrixProduct"):
        convert(tower, CP(), budget=0.5, allocation="singular_values")


def test_errors_of_spectral_weights_are_those_of_the_truncation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 3))
    weights = [layer.weight.detach().clone() for layer in model]
    conversion = convert(model, MatrixProduct(), rank=5, role="weight")
    for layer, weight in zip(conversion.layers[:2], weights, strict=False):
        values = torch.linalg.svdvals(weight)
        assert layer.error == pytest.approx(float(values[5:].norm() / values.norm()), rel=1e-4)
    assert conversion.layers[2].error is None
    header, first, *_ = str(conversion).splitlines()
    assert header.split() == ["layer", "kind", "shape", "rank", "parameters", "trainable", "error"]
    assert f"{conversion.layers[0].error:.4f}" in first
    recover(model)
    assert all(layer.error is None for layer in convert(model, MatrixProduct(), rank=5).layers)


def test_layers_may_be_converted_although_they_grow(tower):
    conversion = convert(tower, MatrixProduct(), rank=4, allow_larger=True)
    head = conversion.layers[-1]
    assert (head.name, head.converted, head.trainable, head.parameters) == ("head", True, 84, 80)


# The figures of the other papers


def test_the_lora_mlp_of_the_aggregation_paper():
    """Section 002: every layer LoRA with ranks 160, 100 and 10, W₀ frozen, biases trained."""
    model = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    conversion = convert(
        model, MatrixProduct(), rank={"0": 160, "2": 100, "4": 10}, init="lora", alpha=1, allow_larger=True
    )
    assert conversion.trainable_parameters == 199_950


RESNET_DENSE = {"ResNet18": ["layer1.0", "downsample", "fc"], "ResNet34": ["layer1", "layer2", "downsample", "fc"]}


@nightly_except()
@pytest.mark.parametrize(
    ("network", "classes", "counts"),
    [
        ("ResNet18", 10, (11_173_962, 4_157_514, 2_209_866, 1_236_042)),
        ("ResNet34", 100, (21_328_292, 8_401_316, 4_985_252, 3_277_220)),
        ("ResNet34", 200, (21_379_592, 8_452_616, 5_036_552, 3_328_520)),
    ],
)
@pytest.mark.slow
def test_the_hybrid_resnets_of_fedhm(network, classes, counts):
    dense, *reduced = counts
    for rank_ratio, count in zip((1 / 2, 1 / 4, 1 / 8), reduced, strict=True):
        model = getattr(models, network)(num_classes=classes)
        conversion = convert(
            model,
            MatrixProduct(),
            rank_ratio=rank_ratio,
            exclude=RESNET_DENSE[network],
            skip=["first"],
            role="weight",
            init="uniform",
        )
        assert conversion.dense_parameters == dense
        assert sum(p.numel() for p in model.parameters()) == conversion.trainable_parameters == count


# Which layers


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ({}, ["encoder.0.0", "encoder.1.0", "fc1", "fc2", "head"]),
        ({"skip": ["first"]}, ["encoder.1.0", "fc1", "fc2", "head"]),
        ({"skip": ["first", "last"]}, ["encoder.1.0", "fc1", "fc2"]),
        ({"include": ["encoder"]}, ["encoder.0.0", "encoder.1.0"]),
        ({"include": ["encoder"], "skip": ["first", "last"]}, ["encoder.1.0"]),
        ({"include": ["encoder.1"]}, ["encoder.1.0"]),
        ({"include": ["fc?"]}, ["fc1", "fc2"]),
        ({"include": ["again"]}, ["fc2"]),
        ({"include": ["*.0"]}, ["encoder.0.0", "encoder.1.0"]),
        ({"exclude": ["encoder", "head"]}, ["fc1", "fc2"]),
        ({"include": ["fc*", "head"], "exclude": ["fc2"]}, ["fc1", "head"]),
    ],
)
def test_selection(tower, selection, names):
    conversion = convert(tower, MatrixProduct(), rank=1, **selection)
    assert [layer.name for layer in conversion.layers if layer.converted] == names
    assert [spec.name for spec in conversion.specs] == names
    assert [name for name, _ in low_rank_layers(tower)] == names
    assert all(layer.reason for layer in conversion.layers if not layer.converted)
    assert len(conversion.layers) == 5


@pytest.mark.parametrize("argument", ["include", "exclude", "rank", "ratio"])
def test_a_pattern_without_a_layer_is_refused_with_close_names(tower, argument):
    values = {"fc_1": 1} if argument in ("rank", "ratio") else ["fc1", "fc_1"]
    settings = {argument: values} if argument in ("rank", "ratio") else {argument: values, "rank": 1}
    with pytest.raises(ValueError, match=rf"{argument} has 'fc_1', which matches no layer .* fc1"):
        convert(tower, MatrixProduct(), **settings)
    assert not list(low_rank_layers(tower))


class Odds(nn.Module):
    """Layers of many kinds, one that cannot be converted, and a weight that is no layer's."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3)
        self.transposed = nn.ConvTranspose2d(16, 16, 3)
        self.volume = nn.Conv3d(16, 16, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.old_normed = nn.utils.weight_norm(nn.Linear(16, 16))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.pruned = nn.utils.prune.l1_unstructured(nn.Linear(16, 16), "weight", 0.5)
        self.pair = nn.Bilinear(8, 8, 8)
        self.bag = nn.EmbeddingBag(50, 16)
        self.clipped = nn.Embedding(20, 16, max_norm=1.0)
        self.sparse = nn.Embedding(20, 16, sparse=True)
        self.free = nn.Linear(16, 16)
        self.borrowed = nn.Linear(16, 16)
        self.template = self.borrowed.weight


class Dropped(nn.Module):
    def forward(self, weight):
        return nn.functional.dropout(weight, training=self.training)


def test_a_weight_that_is_computed_is_not_read():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 8), nn.Linear(8, 8))
    nn.utils.parametrize.register_parametrization(model[1], "weight", Dropped())
    before, random = copy.deepcopy(model[0].state_dict()), torch.get_rng_state()
    conversion = convert(model, MatrixProduct(), rank=2, role="weight")
    assert [layer.shape for layer in conversion.layers] == [(8, 6), (8, 8), (8, 8)]
    assert all(torch.equal(value, before[name]) for name, value in model[0].state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


class Hashed(nn.Embedding):
    """An embedding without a weight of its own."""

    def __init__(self):
        super().__init__(1, 1)
        del self.weight
        self.tables = nn.ModuleList([nn.Embedding(30, 8), nn.Embedding(30, 8)])


def test_layers_without_a_weight_are_left_alone_with_a_reason():
    model = nn.Sequential(Hashed(), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = None
    conversion = convert(model, MatrixProduct(), rank=2)
    assert {layer.name: layer.reason for layer in conversion.layers} == {
        "0": "Hashed is not exactly nn.Embedding",
        "0.tables.0": "",
        "0.tables.1": "",
        "1": "it has no weight",
        "2": "",
    }
    assert [conversion.layers[number].trainable for number in (0, 3)] == [0, 0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_cannot_be_converted_is_left_alone_with_a_reason():
    odds = Odds()
    conversion = convert(odds, MatrixProduct(), rank=1)
    for layer in conversion.layers:
        trained = (p.numel() for n, p in odds.get_submodule(layer.name).named_parameters() if p.requires_grad)
        biases = (p.numel() for n, p in odds.get_submodule(layer.name).named_parameters() if n.endswith("bias"))
        assert layer.trainable == sum(trained) - sum(biases), layer.name
    assert {layer.name: layer.reason for layer in conversion.layers} == {
        "conv": "",
        "transposed": "",
        "volume": "",
        "normed": "it is parametrized (torch.nn.utils.parametrize)",
        "old_normed": "torch.nn.utils.weight_norm computes its weight from weight_g and weight_v",
        "old_spectral": "torch.nn.utils.spectral_norm computes its weight from weight_orig and weight_u",
        "pruned": "torch.nn.utils.prune computes its weight from weight_mask and weight_orig",
        "pair": "layers of class Bilinear are not converted",
        "bag": "layers of class EmbeddingBag are not converted",
        "clipped": "max_norm changes its weight in the forward pass",
        "sparse": "its gradient is of a special kind (sparse or scale_grad_by_freq)",
        "free": "",
        "borrowed": "its weight is shared with template",
    }
    assert [spec.name for spec in conversion.specs] == ["conv", "transposed", "volume", "free"]


# Shared weights


class LanguageModel(nn.Module):
    """Predicts the next token with the embedding's own weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16, padding_idx=0)
        self.hidden = nn.Linear(16, 16)
        self.decoder = nn.Linear(16, 30, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(torch.relu(self.hidden(self.embedding(tokens))))


@pytest.mark.parametrize("role", ["update", "weight"])
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_a_tie_holds_through_conversion_training_and_recovery(role, modifier):
    torch.manual_seed(0)
    model = LanguageModel()
    original = copy.deepcopy(model)
    tokens, targets = torch.randint(30, (6, 5)), torch.randint(30, (6, 5))
    conversion = convert(model, MatrixProduct(), rank=4, role=role, **MODIFIERS[modifier])
    assert [layer.reason for layer in conversion.layers] == ["", "", "shares the factors of embedding"]
    assert conversion.trainable_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert conversion.layers[0].trainable == 4 * (16 if modifier == "half-frozen" else 30 + 16)
    assert conversion.layers[2].trainable == 0
    assert [name for name, _ in low_rank_layers(model)] == ["embedding", "hidden", "decoder"]
    assert [name for name, _ in low_rank_layers(model, tied=False)] == ["embedding", "hidden"]
    if role == "update":
        assert torch.equal(model(tokens), original(tokens))
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    before = model.embedding.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    assert not torch.allclose(model.embedding.weight, before)
    assert torch.equal(model.embedding.weight, model.decoder.weight)
    expected = model(tokens)

    fresh = LanguageModel()
    fresh.load_state_dict(dense_state_dict(model.state_dict(), conversion.specs))
    torch.testing.assert_close(fresh(tokens), expected)
    recover(model)
    assert model.embedding.weight is model.decoder.weight
    assert isinstance(model.embedding.weight, nn.Parameter)
    assert list(model.state_dict()) == list(original.state_dict())
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize(
    ("settings", "left", "reason"),
    [
        ({"exclude": ["decoder"], "rank": 2}, "embedding", "shared with decoder, which stays dense"),
        ({"rank": {"hidden": 2}}, "decoder", "shared with embedding, which stays dense"),
    ],
)
def test_layers_that_share_a_weight_are_converted_all_or_none(settings, left, reason):
    model = LanguageModel()
    conversion = convert(model, MatrixProduct(), **settings)
    assert [spec.name for spec in conversion.specs] == ["hidden"]
    assert reason in {layer.name: layer.reason for layer in conversion.layers}[left]
    assert model.decoder.weight is model.embedding.weight


@pytest.mark.parametrize("settings", [{"include": ["decoder", "hidden"], "rank": 2}, {"rank": {"decod*": 2, "*": 2}}])
def test_a_pattern_of_half_a_tied_pair_alone_is_refused(settings):
    model = LanguageModel()
    with pytest.raises(
        ValueError, match=r"has 'decod.*\(decoder: its weight is shared with embedding, which stays dense"
    ):
        convert(model, MatrixProduct(), **{"exclude": ["embedding"], **settings})
    assert not any(low_rank_layers(model))


def test_a_budget_counts_shared_factors_once():
    conversion = convert(LanguageModel(), MatrixProduct(), budget=0.6)
    assert conversion.dense_parameters == 30 * 16 + 16 * 16 + 16
    assert conversion.layers[0].converted
    larger = [16 + rank * (30 + 16) + other * 32 for rank in range(1, 11) for other in range(1, 8)]
    assert conversion.trainable_parameters in larger
    assert 0.5 < conversion.ratio <= 0.6


# Attention


def test_an_attention_keeps_its_buffers():
    attention = nn.MultiheadAttention(16, 2)
    attention.register_buffer("calls", torch.tensor(3))
    attention.register_buffer("mask", torch.ones(2, 2), persistent=False)
    nn.utils.prune.random_unstructured(attention, "in_proj_bias", 0.5)
    model, inputs = nn.ModuleList([attention]), torch.randn(2, 2, 16)
    kept = dict(attention.named_buffers())
    for change in (lambda: convert(model, MatrixProduct(), rank=2), lambda: recover(model)):
        change()
        assert all(buffer is kept[name] for name, buffer in model[0].named_buffers())
        assert {"calls", "in_proj_bias_mask", "mask"} == dict(model[0].named_buffers()).keys()
        assert "0.calls" in model.state_dict()
        assert "0.mask" not in model.state_dict()
        assert model[0](inputs, inputs, inputs)[0].requires_grad


def test_some_projections_of_an_attention_and_its_copies():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, kdim=12, batch_first=True).eval()
    model = nn.ModuleList([attention, attention])
    inputs = torch.randn(2, 4, 16), torch.randn(2, 4, 12), torch.randn(2, 4, 16)
    weight = attention.k_proj_weight
    convert(model, MatrixProduct(), rank=2, include=["q_proj", "out_proj"])
    assert model[0] is model[1]
    assert model[0].k_proj_weight is weight
    assert weight.requires_grad
    scramble(model)
    expected = model[0](*inputs)[0]
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert clone[0] is clone[1]
        assert torch.equal(clone[0](*inputs)[0], expected)
    recover(model)
    assert model[0] is model[1]
    torch.testing.assert_close(model[0](*inputs)[0], expected)
    convert(model, MatrixProduct(), rank=2)
    with pytest.raises(TypeError, match="to_dense"):
        recover(model[0])


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, {"compute": "contracted"}])
def test_what_needs_a_layer_to_be_called_is_refused_for_attention(settings):
    model = nn.TransformerEncoderLayer(16, 2, 32)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"self_attn\.in_proj.*self_attn\.out_proj"):
        convert(model, MatrixProduct(), rank=2, **settings)
    assert snapshot(model) == before
    convert(model, MatrixProduct(), rank=2, exclude=["self_attn"], **settings)


def test_transformers_own_linear_layer():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    from lightning_lowrank.layers.transformers import LowRankConv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(12, 9), nn.Linear(12, 12)).double()
    original, batch = copy.deepcopy(model), torch.randn(4, 9).double()
    conversion = convert(model, MatrixProduct(), rank=3, init="lora", alpha=6)
    assert type(model[0]) is LowRankConv1D
    assert isinstance(model[0], Conv1D)
    assert conversion.layers[0].shape == (9, 12)
    assert model[0].factors["U"].any()
    assert not model[0].factors["V"].any()
    assert torch.equal(model(batch), original(batch))
    scramble(model)
    outputs = []
    for compute in ("dense", "contracted"):
        model[0].compute = compute
        outputs.append(model(batch))
    torch.testing.assert_close(*outputs)
    assert torch.equal(pickle.loads(pickle.dumps(model))(batch), outputs[1])
    original.load_state_dict(dense_state_dict(model.state_dict(), conversion.specs))
    torch.testing.assert_close(original(batch), outputs[0])
    recover(model)
    assert type(model[0]) is Conv1D
    torch.testing.assert_close(model(batch), outputs[0])


def test_skip_counts_only_layers_that_can_be_converted():
    shared = nn.Linear(8, 8)
    tied = nn.Linear(8, 8)
    tied.weight = shared.weight
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8), shared, tied)
    conversion = convert(model, MatrixProduct(), rank=1, skip=["first"])
    assert [layer.name for layer in conversion.layers if layer.converted] == ["2", "3"]


def test_classes_and_seeds_of_converted_layers(tower):
    fc1 = copy.deepcopy(tower.fc1)
    convert(tower, MatrixProduct(), rank=2, seed=7)
    assert type(tower.fc1) is LowRankLinear
    assert type(tower.encoder[1][0]) is LowRankConv2d
    alone = LowRankLinear.from_dense(fc1, MatrixProduct(), 2, seed=derive_seed(7, "fc1"))
    assert torch.equal(tower.fc1.factors["U"], alone.factors["U"])


# There and back


@pytest.mark.parametrize("role", ["update", "weight"])
@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("factorization", [MatrixProduct(), BlockKronecker(), BlockKronecker(grid=True)], ids=str)
def test_recovered_model_and_dense_state_dict_give_the_same_output(tower, batch, role, modifier, factorization):
    plain, original = copy.deepcopy(tower), copy.deepcopy(tower)
    conversion = convert(tower, factorization, ratio=0.3, role=role, **MODIFIERS[modifier])
    if role == "update":
        assert torch.equal(tower(batch), plain(batch))
    scramble(tower)
    expected = tower(batch)
    assert not torch.allclose(expected, plain(batch))

    file = io.BytesIO()
    torch.save(tower.state_dict(), file)
    file.seek(0)
    specs = [LayerSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) for spec in conversion.specs]
    assert specs == conversion.specs
    dense = dense_state_dict(torch.load(file, weights_only=True), specs)
    assert list(dense) == list(plain.state_dict())
    assert not any(tensor.requires_grad for tensor in dense.values())
    plain.load_state_dict(dense)
    torch.testing.assert_close(plain(batch), expected)

    assert recover(tower) is tower
    assert repr(tower) == repr(original)
    assert list(tower.state_dict()) == list(original.state_dict())
    assert tower.again is tower.fc2
    assert all(parameter.requires_grad for parameter in tower.parameters())
    torch.testing.assert_close(tower(batch), expected)


def test_state_dict_keys(tower):
    convert(tower, MatrixProduct(), rank=1, decouple=True, include=["encoder.1", "fc1"])
    tensors = {"frozen_weight", "factors.U", "factors.V", "fixed.U", "fixed.V"}
    keys = set(tower.state_dict())
    assert {key for key in keys if key.startswith("encoder.1")} == {f"encoder.1.0.{t}" for t in tensors}
    assert {key for key in keys if key.startswith("fc1")} == {f"fc1.{t}" for t in {*tensors, "bias"}}


def test_a_layer_under_two_names_is_one_layer(tower, batch):
    conversion = convert(tower, MatrixProduct(), rank=2, include=["fc2"])
    assert tower.again is tower.fc2
    assert isinstance(tower.again, LowRankLinear)
    assert conversion.specs[0].aliases == ("again",)
    assert len(conversion.specs) == 1


def test_dense_state_dict_names_what_is_missing(tower):
    conversion = convert(tower, MatrixProduct(), rank=1)
    state = tower.state_dict()
    del state["fc1.factors.U"]
    with pytest.raises(ValueError, match=r"state_dict.*\['fc1\.factors\.U'\].*'fc1'"):
        dense_state_dict(state, conversion.specs)


def test_dense_state_dict_keeps_other_tensors(tower):
    conversion = convert(tower, MatrixProduct(), rank=1, include=["fc1"])
    state = tower.state_dict()
    dense = dense_state_dict(state, conversion.specs)
    assert dense["head.weight"] is state["head.weight"]
    assert dense["encoder.0.1.running_var"] is state["encoder.0.1.running_var"]


def test_converting_again_after_recovering(tower, batch):
    convert(tower, MatrixProduct(), rank=2)
    expected = tower(batch)
    with pytest.raises(ValueError, match=r"encoder\.0.*0.*encoder\.1"):
        convert(tower, MatrixProduct(), rank=2)
    convert(recover(tower), BlockKronecker(), rank=2)
    assert torch.equal(tower(batch), expected)


@pytest.mark.parametrize(
    ("factorization", "role"),
    [(PRODUCT, "update"), pytest.param(Hadamard(), "weight", marks=pytest.mark.slow)],
)
def test_a_default_device_changes_no_draw(factorization, role):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8, device="cpu"))

    expected, model = made(), made()
    convert(expected, factorization, rank=2, role=role, allow_larger=True)
    with torch.device("meta"):
        convert(model, factorization, rank=2, role=role, allow_larger=True)
    assert_same(model.state_dict(), expected.state_dict())


def test_weights_without_numbers_to_decompose_are_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 4), nn.Linear(20, 4).requires_grad_(False))
    for init in ("spectral", "uniform"):
        with pytest.raises(ValueError, match=r"0.*1.*weight"):
            convert(model, MatrixProduct(), rank=2, role="weight", init=init)
    convert(model, MatrixProduct(), rank=2, role="weight", init="uniform", init_scale=0.1)
    assert model[0].factors["U"].is_meta
    coarse = nn.Sequential(nn.Linear(12, 20).requires_grad_(False), nn.Linear(20, 4))
    coarse[0].to(torch.float8_e4m3fn)
    conversion = convert(coarse, MatrixProduct(), rank=2, convert_frozen=True)
    assert conversion.layers[0].reason == "its weight is of type torch.float8_e4m3fn"
    with pytest.raises(TypeError, match=r"MatrixProduct\(\).*'CP'"):
        convert(nn.Sequential(nn.Linear(4, 4)), "CP", rank=2)  # type: ignore[arg-type]


def test_recovering_a_dense_model_changes_nothing(tower):
    before = snapshot(tower)
    assert recover(tower) is tower
    assert snapshot(tower) == before


def test_decoupled_mean_of_recovered_models_is_the_recovered_mean(tower):
    tower.double()
    conversion = convert(tower, BlockKronecker(), ratio=0.3, decouple=True)
    states = []
    for seed in range(4):
        scramble(tower, seed)
        states.append({name: value.clone() for name, value in tower.state_dict().items()})
    mean = {
        name: torch.stack([s[name] for s in states]).mean(dim=0) if states[0][name].is_floating_point() else value
        for name, value in states[0].items()
    }
    recovered = [dense_state_dict(state, conversion.specs) for state in states]
    for name, value in dense_state_dict(mean, conversion.specs).items():
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack([r[name] for r in recovered]).mean(dim=0))


# The report


def test_report_adds_up(tower):
    conversion = convert(tower, MatrixProduct(), rank=2, exclude=["fc1"])
    for layer in conversion.layers:
        assert layer.parameters == math.prod(layer.shape)
    assert [layer.kind for layer in conversion.layers] == ["Conv2d", "Conv2d", "Linear", "Linear", "Linear"]
    biases = sum(p.numel() for n, p in tower.named_parameters() if fnmatch.fnmatch(n, "*bias"))
    norm_scale = 8
    assert conversion.trainable_parameters == sum(layer.trainable for layer in conversion.layers) + biases + norm_scale


def test_printed_table_is_aligned(tower):
    conversion = convert(tower, MatrixProduct(), rank=2, exclude=["fc1"])
    header, *rows, total = str(conversion).splitlines()
    assert len(rows) == 5
    end = header.index("rank") + len("rank")
    assert [row[:end].split()[-1] for row in rows if "in exclude" not in row] == ["2"] * 4
    assert rows[2].endswith("192  in exclude")
    assert total.startswith(f"{conversion.trainable_parameters:,} of {conversion.dense_parameters:,} parameters")


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"rank_ratio.*budget"),
        ({"rank": 1, "ratio": 0.5}, "rank and ratio are"),
        ({"rank": 1, "ratio": 0.5, "budget": 0.5}, "rank and ratio and budget are"),
        ({"rank": 0}, r"rank.*0"),
        ({"rank": 2.0}, r"rank.*2\.0"),
        ({"rank": {"fc1": 0}}, r"rank.*\['fc1'\].*0"),
        ({"rank": 99}, r"encoder\.0.*0.*rank"),
        ({"ratio": 0}, r"ratio.*0"),
        ({"ratio": 1.01}, r"ratio.*1\.01"),
        ({"ratio": {"fc1": -1}}, r"ratio.*\['fc1'\].*-1"),
        ({"budget": 0}, r"budget.*0"),
        ({"budget": 1.5}, r"budget.*1\.5"),
        ({"budget": math.nan}, r"budget.*0"),
        ({"budget": 0.001}, r"budget=0\.001"),
        ({"budget": 0.5, "budget_rule": "best"}, r"budget_rule.*'best'"),
        ({"budget": 0.5, "budget_unit": "bits"}, r"budget_unit.*'bits'"),
        ({"budget": 0.5, "budget_unit": "bytes"}, r"budget.*0\.5"),
        ({"budget": 10, "budget_unit": "parameters"}, r"budget=10.*10.*1,525"),
        ({"budget": 10, "budget_unit": "bytes"}, r"budget=10.*10.*6,100"),
        ({"budget": 0.5, "allocation": "greedy"}, "'greedy'"),
        ({"budget": 0.5, "budget_rule": "authors", "allocation": "singular_values"}, r'budget_rule="authors".*"share"'),
        ({"rank": 1, "allocation": "singular_values"}, "divide a budget, but rank is given"),
        ({"rank": 1, "budget_rule": "authors"}, r"budget_rule='authors'.*allocation='uniform'.*rank"),
        ({"budget": 0.5, "train_base": True}, "train_base=True"),
        ({"rank_ratio": 0}, r"rank_ratio.*0"),
        ({"rank": 1, "alpha": 0}, r"alpha.*0"),
        ({"rank": 1, "role": "weight", "init_scale": 2}, "init_scale=2"),
        ({"rank": 1, "alpha": 1, "role": "weight"}, 'role is "weight"'),
        ({"rank": 1, "dropout": 1.0}, "dropout must be"),
        ({"rank": 1, "dropout": 0.1, "role": "weight"}, 'role is "weight"'),
        ({"rank": 1, "rank_stabilized": True}, "alpha is None"),
        ({"rank": 1, "init": "lora", "role": "weight"}, 'init="lora"'),
        ({"rank": 1, "init": "lora", "decouple": True}, 'init="lora"'),
        ({"rank": 1, "half_frozen": "W"}, r"half_frozen.*'W'"),
        ({"rank": 1, "compute": "fast"}, "'fast'"),
        ({"rank": 1, "skip": ["middle"]}, "skip may hold"),
        ({"rank": 1, "decouple": True, "half_frozen": True}, "half_frozen=True"),
        ({"rank": 1, "role": "both"}, "'both'"),
        ({"rank": 1, "init": "spectral"}, 'needs role="weight"'),
        ({"rank": 1, "init_scale": -1}, r"init_scale.*-1"),
        ({"ratio": 1.0}, "no layer of the model can be converted"),
        ({"rank": 1, "exclude": ["*"]}, r"encoder\.0.*0.*encoder\.1"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(tower, settings, message):
    before = snapshot(tower)
    with pytest.raises((TypeError, ValueError), match=message):
        convert(tower, MatrixProduct(), **settings)
    assert snapshot(tower) == before


@pytest.mark.parametrize("settings", [{"include": "fc1"}, {"exclude": "fc1"}, {"skip": "first"}])
def test_a_string_in_place_of_a_list_is_refused(tower, settings):
    with pytest.raises(TypeError, match="must be a list of strings"):
        convert(tower, MatrixProduct(), rank=1, **settings)


def test_a_layer_itself_cannot_be_converted_or_recovered_in_place():
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        convert(nn.Linear(4, 4), MatrixProduct(), rank=1)
    with pytest.raises(TypeError, match="to_dense"):
        recover(LowRankLinear.from_dense(nn.Linear(4, 4), MatrixProduct(), 1))


def test_models_without_such_layers_and_uninitialised_layers_are_refused():
    with pytest.raises(ValueError, match="it has no such layers"):
        convert(nn.Sequential(nn.ReLU()), MatrixProduct(), rank=1)
    with pytest.raises(ValueError, match="layer '0' has no weight yet"):
        convert(nn.Sequential(nn.LazyLinear(4)), MatrixProduct(), rank=1)


def test_a_failure_while_building_layers_changes_nothing():
    model = nn.Sequential(nn.Linear(9, 9), nn.Conv2d(8, 8, 3))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"'1'.*compute=.contracted."):
        convert(model, BlockKronecker(), rank=1, compute="contracted")
    assert snapshot(model) == before


@pytest.mark.parametrize("init", ["auto", "uniform"])
def test_constant_weights_are_left_alone(init):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.zeros_(model[1].weight)
    conversion = convert(model, MatrixProduct(), rank=1, role="weight", init=init)
    assert [layer.converted for layer in conversion.layers] == [True, False]
    assert conversion.layers[1].reason.startswith("its weight is")
    recover(model)
    scaled = convert(model, MatrixProduct(), rank=1, role="weight", init="uniform", init_scale=0.1)
    assert scaled.layers[1].converted


def test_recovered_weights_are_trainable_if_they_were():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    recover_me = convert(model, MatrixProduct(), rank=1, convert_frozen=True)
    assert recover_me.trainable_parameters == 2 * 16 + 2 * 8
    recover(model)
    assert [layer.weight.requires_grad for layer in model] == [False, True]


def test_a_spec_with_unknown_fields_is_refused(tower):
    fields = convert(tower, MatrixProduct(), rank=1).specs[0].to_dict()
    with pytest.raises(TypeError):
        LayerSpec.from_dict({**fields, "extra": 1})


def test_what_is_frozen_stays_as_it_is_and_out_of_the_budget():
    torch.manual_seed(0)
    model = nn.ModuleDict({"student": nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))})
    alone = copy.deepcopy(model)
    teacher = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model["teacher"] = teacher.requires_grad_(False)
    before = {name: (value, value.clone()) for name, value in model["teacher"].named_parameters()}
    conversion, expected = (
        convert(each, MatrixProduct(), budget=0.8, skip=["first", "last"]) for each in (model, alone)
    )
    assert [name for name, _ in low_rank_layers(model)] == ["student.1"]
    assert conversion.layers[4].reason == "its weight is frozen (set convert_frozen=True to convert it)"
    assert conversion.dense_parameters == expected.dense_parameters == 3 * 272
    assert conversion.layers[:3] == expected.layers
    assert not any(value.requires_grad for value in model["teacher"].parameters())
    for name, value in model["teacher"].named_parameters():
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])


def test_what_a_frozen_copy_may_follow_is_left_alone_unless_it_is_named():
    def online_and_teacher():
        torch.manual_seed(0)
        online = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        model = nn.ModuleDict({"online": online, "teacher": copy.deepcopy(online).requires_grad_(False)})
        model["head"] = nn.Linear(16, 16)
        return model

    model = online_and_teacher()
    conversion = convert(model, MatrixProduct(), rank=1)
    assert [name for name, _ in low_rank_layers(model)] == ["head"]
    assert conversion.layers[0].reason.startswith("teacher.0 is a frozen copy")
    for settings, converted in (({"include": ["online"]}, 2), ({"convert_frozen": True}, 5)):
        model = online_and_teacher()
        convert(model, MatrixProduct(), rank=1, **settings)
        assert len(list(low_rank_layers(model))) == converted


def test_layers_of_zeros_are_no_copies_of_one_another():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False))
    for layer in model:
        nn.init.zeros_(layer.weight)
    convert(model, MatrixProduct(), rank=1, role="update", init="lora")
    assert [name for name, _ in low_rank_layers(model)] == ["0"]


def test_what_is_made_in_inference_mode_trains_later():
    model, inputs = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(3, 16, requires_grad=True)
    with torch.inference_mode():
        convert(model, MatrixProduct(), rank=1)
        merge(model)
    model(inputs).sum().backward()
    assert inputs.grad is not None
    model.train()
    model(inputs).sum().backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)
    with torch.inference_mode():
        recover(model)
    model(inputs).sum().backward()
    assert all(value.grad is not None for value in model.parameters())


def test_frozen_layers_are_converted_where_that_is_asked_for():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)).requires_grad_(False)
    model[2].requires_grad_(True)
    settings = {"rank": 1, "exclude": ["2"], "init": "lora"}
    with pytest.raises(ValueError, match=r"0.*1.*weight"):
        convert(model, MatrixProduct(), **settings)
    conversion = convert(model, MatrixProduct(), **settings, convert_frozen=True)
    assert [name for name, _ in low_rank_layers(model)] == ["0", "1"]
    assert conversion.dense_parameters == 2 * 272 + 68
    assert conversion.trainable_parameters == 2 * 32 + 68
    assert not model[0].bias.requires_grad


def test_a_frozen_attention_and_embedding_stay():
    model = nn.ModuleDict({"table": nn.Embedding(32, 8), "mixer": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 8)})
    model["table"].requires_grad_(False)
    model["mixer"].in_proj_weight.requires_grad_(False)
    convert(model, MatrixProduct(), rank=1)
    assert [name for name, _ in low_rank_layers(model)] == ["mixer.out_proj", "head"]
