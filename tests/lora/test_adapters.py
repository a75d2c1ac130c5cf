"""Adapters as pairs, against what the layers and PEFT themselves make of the same factors."""

import copy

import pytest
import torch
from torch import nn

from lightning_lowrank.layers import MatrixProduct, convert, low_rank_layers
from lightning_lowrank.lora import LowRankPair
from lightning_lowrank.lora.adapters import find_adapters


def peft():
    return pytest.importorskip("peft", reason="PEFT is not installed")


class Mixed(nn.Module):
    """One layer of each kind that takes an adapter."""

    def __init__(self):
        super().__init__()
        Conv1D = pytest.importorskip("transformers").pytorch_utils.Conv1D
        self.table = nn.Embedding(7, 6)
        self.linear = nn.Linear(6, 5)
        self.stored_by_input = Conv1D(4, 5)
        self.line = nn.Conv1d(4, 3, 3, padding=1)
        self.image = nn.Conv2d(3, 4, (3, 2), padding="same")
        self.point = nn.Conv2d(4, 2, 1)
        self.volume = nn.Conv3d(2, 3, (1, 2, 2))
        self.out = nn.Linear(3, 2)

    def forward(self, tokens):
        found = self.stored_by_input(torch.tanh(self.linear(self.table(tokens))))
        line = self.line(found.transpose(1, 2))
        image = self.point(torch.tanh(self.image(line.unflatten(2, (2, -1)))))
        return self.out(self.volume(image.unsqueeze(-1).expand(*image.shape, 2)).mean(dim=(2, 3, 4)))


LAYERS = ["table", "linear", "stored_by_input", "line", "image", "point", "volume"]
TOKENS = torch.arange(24).reshape(4, 6) % 7


def wrapped(**settings):
    torch.manual_seed(0)
    base = Mixed()
    given = {"r": 2, "lora_alpha": 3, "target_modules": LAYERS, "init_lora_weights": False, **settings}
    model = peft().get_peft_model(base, peft().LoraConfig(**given))
    draws = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=draws))
    return model.eval()


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"rank_pattern": {"linear": 3}, "lora_alpha": 5}])
def test_pairs_are_pefts_own_updates(settings):
    model = wrapped(**settings)
    tensors = dict(model.named_parameters())
    found = find_adapters(model)
    assert [name.removeprefix("base_model.model.") for name in found] == LAYERS
    for name, adapter in found.items():
        layer = model.get_submodule(name)
        pair = adapter.pair(tensors, adapter.rank, adapter.scaling)
        assert pair.shape == adapter.shape
        assert all(tensors[parameter].requires_grad for parameter in adapter.parameters.values())
        if name.endswith("volume"):
            # PEFT takes a kernel of 1×2×2 for that of a point convolution.
            update = torch.einsum("or,rcijk->ocijk", pair.B, layer.lora_A["default"].weight) * pair.scaling
        else:
            update = layer.get_delta_weight("default")
        stored_by_input = name.endswith(("table", "stored_by_input"))
        product = pair.product().T if stored_by_input else pair.product()
        torch.testing.assert_close(product.reshape(update.shape), update)


def test_tensors_undo_pairs_of_every_rank_and_scaling():
    model = wrapped()
    tensors = dict(model.named_parameters())
    for adapter in find_adapters(model).values():
        whole = adapter.pair(tensors, 2, adapter.scaling)
        for name, value in adapter.tensors(whole, adapter.scaling, ("B",)).items():
            assert torch.equal(value, tensors[name]), name
        half = adapter.pair(tensors, 1, adapter.scaling_at(1))
        assert (half.rank, half.scaling) == (1, pytest.approx(2 * adapter.scaling))
        back = adapter.tensors(half, adapter.scaling, ("B",))
        assert {name: value.shape for name, value in back.items()} == {name: tensors[name].shape for name in back}
        again = adapter.pair(back, 2, adapter.scaling)
        torch.testing.assert_close(again.product(), half.product())
        for which in ("B", "A"):
            value = tensors[adapter.parameters[which]]
            matrix = adapter.matrix(which, value)
            # A client of LoRA-A² may upload no slot of a layer.
            for rank in (0, 1):
                slots = adapter.slots(which, value, rank)
                assert torch.equal(adapter.matrix(which, slots), matrix[:, :rank] if which == "B" else matrix[:rank])
                assert slots.dim() == value.dim()


def test_scalings_are_set_and_follow_the_rank():
    model = wrapped(lora_alpha=4, use_rslora=True)
    adapter = find_adapters(model)["base_model.model.linear"]
    assert adapter.scaling == pytest.approx(4 / 2**0.5)
    assert adapter.scaling_at(8) == pytest.approx(4 / 8**0.5)
    adapter.scaling = 2.5
    assert model.base_model.model.linear.scaling == {"default": 2.5}
    # Whatever a client's scaling is, that of another rank comes from α.
    assert adapter.scaling_at(8) == pytest.approx(4 / 8**0.5)


@pytest.mark.parametrize("ours", [False, True], ids=["PEFT", "ours"])
def test_folding_a_pair_moves_its_update_into_the_base_weight(ours):
    model = wrapped()
    if ours:
        model = Mixed().eval()
        convert(model, MatrixProduct("channel"), rank=2, alpha=3, init="uniform", allow_larger=True, include=LAYERS)
        with torch.no_grad():
            for _, layer in low_rank_layers(model):
                for factor in layer.factors.values():
                    factor.copy_(torch.randn(factor.shape))
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        before = model(TOKENS)
        for adapter in find_adapters(model).values():
            pair = adapter.pair(tensors, 2, adapter.scaling)
            adapter.fold(LowRankPair(torch.cat([pair.B, pair.B], 1), torch.cat([pair.A, pair.A]), pair.scaling / 4))
            adapter.fold(pair.product() / 2)
            for parameter in adapter.parameters.values():
                tensors[parameter].zero_()
        torch.testing.assert_close(model(TOKENS), before, rtol=1e-4, atol=1e-5)


def test_another_adapter_than_the_active_one():
    model = wrapped(target_modules=["linear", "image"])
    model.add_adapter("second", peft().LoraConfig(r=1, target_modules=["linear", "point"]))
    names = [name.rpartition(".")[2] for name in find_adapters(model)]
    assert names == ["linear", "image"]
    second = find_adapters(model, "second")
    assert [name.rpartition(".")[2] for name in second] == ["linear", "point"]
    assert second["base_model.model.linear"].parameters["A"] == "base_model.model.linear.lora_A.second.weight"
    with pytest.raises(ValueError, match=r"'third'.*PEFT.*'default'"):
        find_adapters(model, "third")
    with pytest.raises(ValueError, match=r"'x'.*PEFT"):
        find_adapters(Mixed(), "x")
    for name in ("linear", "image", "point"):
        getattr(model.base_model.model, name)._active_adapter = []
    with pytest.raises(
        ValueError, match="none of PEFT's adapters is active: set one active, or name one of default, second"
    ):
        find_adapters(model)
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"PEFT.*'base_model\.model\.linear'.*\['default', 'second'\]"):
        find_adapters(model)


def test_layers_whose_factors_are_no_pair_are_refused_by_name():
    for settings, said in (
        (
            {"alora_invocation_tokens": [1], "target_modules": ["linear"]},
            "it is the variant ALoraLinearVariant of LoRA",
        ),
        ({"lora_bias": True, "target_modules": ["linear"]}, "its adapter has a bias of its own"),
        ({"target_modules": [], "target_parameters": ["linear.weight"]}, "it adapts a parameter that is no layer's"),
    ):
        with pytest.raises(ValueError, match=rf"PEFT's layer 'base_model.model.linear' cannot be aggregated: {said}"):
            find_adapters(wrapped(**settings))
    merged = wrapped(target_modules=["linear"])
    merged.merge_adapter()
    with pytest.raises(ValueError, match=r"unmerge_adapter\(\)"):
        find_adapters(merged)
    attention = nn.Sequential(nn.MultiheadAttention(4, 2))
    model = peft().get_peft_model(attention, peft().LoraConfig(target_modules=["0"], r=1))
    with pytest.raises(ValueError, match=r"'base_model\.model\.0'.*nn\.MultiheadAttention"):
        find_adapters(model)
    grouped = peft().get_peft_model(
        nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), peft().LoraConfig(target_modules=["0"])
    )
    with pytest.raises(ValueError, match="it is a convolution with groups"):
        find_adapters(grouped)
    for settings, said in (
        ({"role": "weight"}, "its role is 'weight'"),
        ({"decouple": True}, "decoupled or half frozen"),
        ({"half_frozen": True}, "decoupled or half frozen"),
        ({"train_base": True}, "its weight is trained as well"),
    ):
        module = nn.Sequential(nn.Linear(4, 4))
        convert(module, MatrixProduct(), rank=1, **settings)
        with pytest.raises(ValueError, match=f"layer '0' holds no LoRA factors: .*{said}"):
            find_adapters(module)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.table.weight


def test_a_base_weight_that_others_use_takes_no_change():
    model = peft().get_peft_model(Tied(), peft().LoraConfig(r=2, target_modules=["table"]))
    (adapter,) = find_adapters(model).values()
    before = model.base_model.model.out.weight.clone()
    change = LowRankPair(torch.ones(4, 1), torch.ones(1, 9))
    with pytest.raises(ValueError, match=r"'base_model\.model\.table'.*base_model\.model\.out\.weight"):
        adapter.fold(change)
    assert torch.equal(model.base_model.model.out.weight, before)

    tied = Tied()
    convert(tied, MatrixProduct(), rank=2, init="lora", allow_larger=True)
    (adapter,) = find_adapters(tied).values()
    assert adapter.unfoldable == ""
    adapter.fold(change)
    torch.testing.assert_close(tied.out.weight, tied.table.weight)

    convolution = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"))
    model = peft().get_peft_model(convolution, peft().LoraConfig(r=2, target_modules=["0"]))
    (adapter,) = find_adapters(model).values()
    assert adapter.unfoldable == "its convolution has padding_mode='circular', and PEFT's adapter of it has not"


def test_a_module_of_both_kinds():
    inner = wrapped(target_modules=["linear"])
    module = nn.ModuleDict({"ours": nn.Sequential(nn.Linear(4, 4)), "theirs": copy.deepcopy(inner)})
    convert(module, MatrixProduct(), rank=1, include=["ours"])
    assert list(find_adapters(module)) == ["ours.0", "theirs.base_model.model.linear"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_of_an_embedding_that_peft_wrapped_stays(tied):
    net = nn.ModuleDict({"table": nn.Embedding(7, 6, padding_idx=2), "out": nn.Linear(6, 7)})
    if tied:
        net["out"].weight = net["table"].weight
    settings = {"r": 2, "target_modules": ["table"], "init_lora_weights": False}
    adapter = find_adapters(peft().get_peft_model(net, peft().LoraConfig(**settings)))["base_model.model.table"]
    pair = LowRankPair(torch.ones(6, 2), torch.ones(2, 7), 0.5)
    factors = adapter.tensors(pair, 0.5, {"B"})
    columns = [True, True, tied, True, True, True, True]
    assert factors[adapter.parameters["A"]].any(dim=0).tolist() == columns
    assert factors[adapter.parameters["B"]].all()
    if not tied:
        before = net["table"].base_layer.weight.detach().clone()
        adapter.fold(pair)
        assert (net["table"].base_layer.weight != before).any(dim=1).tolist() == columns
