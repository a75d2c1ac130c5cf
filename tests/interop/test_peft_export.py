"""Adapter folders that we write: PEFT and `import_adapter` must compute what our layers compute."""

import copy

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import BlockKronecker, CoreProduct, MatrixProduct, convert, export_adapter, import_adapter
from lightning_lowrank.interop.peft_export import write_adapter
from lightning_lowrank.interop.peft_layout import outline
from lightning_lowrank.layers import low_rank_layers
from tests.interop.helpers import (
    INPUTS,
    LORA,
    Gpt,
    Images,
    Shared,
    Tokens,
    config_of,
    conv,
    peft,
    perturbed,
    same_function,
)

CASES = [
    (Images, {"exclude": ["head"]}),
    (Images, {"exclude": ["head"], "freeze_rest": True, "keep_trained": ["head"]}),
    (Images, {"include": ["stem", "block.*"], "freeze_rest": True, "dropout": 0.1}),
    (Tokens, {"freeze_rest": True}),
    (Tokens, {"half_frozen": "V", "init": "auto"}),
    (Gpt, {"exclude": ["last"]}),
    (Gpt, {"rank_stabilized": True, "freeze_rest": True}),
]


@pytest.mark.parametrize(("network", "settings"), CASES, ids=lambda case: getattr(case, "__name__", None))
@pytest.mark.parametrize("several", [False, True], ids=["one rank", "several"])
def test_peft_loads_the_same_function_and_so_do_we(tmp_path, network, settings, several):
    base = network().eval()
    rank = {"block.2": 1, "out": 3, "wide": 3, "*": 2}
    rank = {name: rank[name] for name in rank if name == "*" or name in dict(base.named_modules())} if several else 2
    inputs = INPUTS[network]()
    converted = copy.deepcopy(base)
    convert(converted, MatrixProduct("channel"), rank=rank, alpha=3, **{**LORA, **settings})
    perturbed(converted)
    export_adapter(converted, tmp_path / "folder")

    loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "folder")
    outputs = same_function(converted, loaded, inputs)
    assert not torch.allclose(outputs, base(inputs), atol=1e-4)

    ours = import_adapter(tmp_path / "folder", copy.deepcopy(base))
    same_function(converted, ours, inputs)
    for (name, layer), (again, other) in zip(low_rank_layers(converted), low_rank_layers(ours), strict=True):
        assert (name, layer.rank, layer.alpha, layer.dropout) == (again, other.rank, other.alpha, other.dropout)
        assert layer.rank_stabilized == other.rank_stabilized
    trained = {name.replace(".fixed.", ".factors.") for name, value in ours.named_parameters() if value.requires_grad}
    wanted = {name for name, value in converted.named_parameters() if value.requires_grad}
    assert wanted <= trained
    assert not any("frozen_weight" in name for name in trained)

    # What PEFT saves of it is the same adapter, and loads as well.
    loaded.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    same_function(converted, import_adapter(tmp_path / "again", copy.deepcopy(base)), inputs)
    first, second = (
        safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors") for name in ("folder", "again")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("stabilized", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("network", [Images, Tokens, Gpt])
def test_cores_are_multiplied_into_the_adapter(tmp_path, network, heads, stabilized):
    base = network().eval()
    converted = copy.deepcopy(base)
    core = CoreProduct(heads=heads, layout="channel")
    settings = {"alpha": 3, "rank_stabilized": stabilized, "freeze_rest": True, "allow_larger": True}
    convert(converted, core, rank=1, exclude=["head"] if network is Images else [], **settings)
    perturbed(converted)
    export_adapter(converted, tmp_path)
    loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    outputs = same_function(converted, loaded, INPUTS[network]())
    assert not torch.allclose(outputs, base(INPUTS[network]()), atol=1e-4)
    assert config_of(tmp_path)["r"] == heads
    with pytest.raises(MisconfigurationException, match="it has a core between its factors"):
        import_adapter(tmp_path, converted)


@pytest.mark.parametrize("again", [0.0, 0.5])
@pytest.mark.parametrize("heads", [1, 2])
def test_cores_beside_a_changed_weight_are_part_of_the_change(tmp_path, heads, again):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 12))
    converted = copy.deepcopy(base)
    convert(converted, CoreProduct(heads=heads), rank=3, freeze_rest=True)
    with torch.no_grad():
        converted[0].factors["H"].normal_()
        converted[0].fold()
        converted[0].factors["H"].normal_().mul_(again)
    export_adapter(converted, tmp_path, base=base)
    loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    inputs = torch.randn(3, 16)
    torch.testing.assert_close(loaded(inputs), converted(inputs))
    assert not torch.allclose(loaded(inputs), base(inputs), atol=1e-3)


def test_a_changed_weight_that_the_state_dict_leaves_out_is_part_of_the_change(tmp_path):
    class OnlyFactors(nn.Sequential):
        def state_dict(self, *arguments, **keywords):
            state = super().state_dict(*arguments, **keywords)
            return {name: value for name, value in state.items() if "factors" in name}

    base = nn.Sequential(nn.Linear(16, 12))
    converted = OnlyFactors(*copy.deepcopy(base))
    convert(converted, MatrixProduct(), rank=3, freeze_rest=True, **LORA)
    perturbed(converted)[0].fold()
    export_adapter(converted, tmp_path, base=base)
    loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    inputs = torch.randn(3, 16)
    torch.testing.assert_close(loaded(inputs), converted(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("form", ["ours", "peft"])
@pytest.mark.parametrize("part", ["", "block", "network"])
def test_the_adapter_of_a_compiled_network_is_that_of_the_plain_one(tmp_path, form, part, with_base):
    inner, kept = Images().eval(), ["head", "norm"]
    base = copy.deepcopy(inner)
    if form == "ours":
        settings = {"include": ["stem", "block.2"], "freeze_rest": True, "keep_trained": kept, **LORA}
        convert(inner, MatrixProduct("channel"), rank={"block.2": 1, "*": 2}, alpha=3, **settings)
        module = inner
    else:
        settings = {"target_modules": ["stem", "block.2"], "modules_to_save": kept, "rank_pattern": {"block.2": 1}}
        module = peft().get_peft_model(inner, peft().LoraConfig(r=2, **settings))
    perturbed(module)
    if with_base:
        layer = inner.block[2]
        with torch.no_grad():
            (layer.frozen_weight if form == "ours" else layer.base_layer.weight).add_(0.1)
    plain = export_adapter(module, tmp_path / "plain", base=base if with_base else None)
    if part == "block":
        inner.block = torch.compile(inner.block)
    elif part == "network" and form == "peft":
        module.base_model.model = torch.compile(inner)
    else:
        module = torch.compile(module)
    folder = export_adapter(module, tmp_path / "compiled", base=torch.compile(base) if with_base else None)
    assert config_of(folder) == config_of(plain)
    first, second = (safetensors.torch.load_file(each / "adapter_model.safetensors") for each in (plain, folder))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_configuration_says_what_differs_between_layers(tmp_path):
    base = Gpt()
    convert(base, MatrixProduct(), rank={"square": 2, "wide": 2, "last": 1}, alpha=3, **LORA, freeze_rest=True)
    config = config_of(export_adapter(base, tmp_path))
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 2, 3, "none")
    assert config["rank_pattern"] == {"^last": 1}
    assert config["alpha_pattern"] == {}
    assert config["target_modules"] == ["last", "square", "wide"]
    assert config["fan_in_fan_out"]
    assert config["modules_to_save"] is None

    without_alpha = Gpt()
    convert(without_alpha, MatrixProduct(), rank={"square": 2, "wide": 2, "last": 1}, **LORA)
    config = config_of(export_adapter(without_alpha, tmp_path))
    assert (config["lora_alpha"], config["alpha_pattern"], config["bias"]) == (2, {"^last": 1}, "lora_only")


@pytest.mark.parametrize("alpha", [5.5, None])
def test_a_mix_of_stabilised_and_plain_layers_keeps_its_scales(tmp_path, alpha):
    base = Gpt()
    converted = copy.deepcopy(base)
    convert(converted, MatrixProduct(), rank=3, alpha=alpha, **LORA)
    converted.square.alpha, converted.square.rank_stabilized = 2.0, True
    converted.square.scale = converted.square.scale_at(3)
    perturbed(converted)
    config = config_of(export_adapter(converted, tmp_path))
    assert not config["use_rslora"]
    inputs = INPUTS[Gpt]()
    same_function(converted, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), inputs)
    same_function(converted, import_adapter(tmp_path, base), inputs)


def test_names_that_others_end_with_mean_the_layer_alone(tmp_path):
    base = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 4))
    converted = copy.deepcopy(base)
    convert(converted, MatrixProduct(), rank={"2": 1, "0": 1}, **LORA, freeze_rest=True)
    perturbed(converted)
    assert config_of(export_adapter(converted, tmp_path))["target_modules"] == "0|2"
    inputs = torch.randn(3, 4)
    same_function(converted, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), inputs)
    ours = import_adapter(tmp_path, base)
    assert [name for name, _ in low_rank_layers(ours)] == ["0", "2"]
    same_function(converted, ours, inputs)


def test_a_saved_module_whose_name_others_end_with_is_refused(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.forehead = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    net = Net()
    convert(net, MatrixProduct(), rank=1, include=["body"], freeze_rest=True, keep_trained=["head"])
    with pytest.raises(MisconfigurationException, match=r"PEFT.*modules_to_save"):
        export_adapter(net, tmp_path / "folder")
    adapted = nn.ModuleDict({"body": nn.ModuleDict({"head": nn.Linear(4, 4)}), "head": nn.Linear(4, 4)})
    convert(adapted, MatrixProduct(), rank=1, include=["body"], freeze_rest=True, keep_trained=["head"])
    with pytest.raises(MisconfigurationException, match=r"PEFT.*modules_to_save.*body\.head"):
        export_adapter(adapted, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_tied_layers_are_adapters_of_their_own(tmp_path):
    base, inputs = Tokens(tied=True), INPUTS[Tokens]()
    converted = copy.deepcopy(base)
    convert(converted, MatrixProduct(), rank=2, alpha=4, **LORA, freeze_rest=True)
    assert converted.out.factors is converted.table.factors
    perturbed(converted)
    with torch.no_grad():
        converted.table.factors["U"][0] = 0  # the padding's, which stays zero in training
    export_adapter(converted, tmp_path)
    same_function(converted, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), inputs)
    apart = import_adapter(tmp_path, copy.deepcopy(base))
    same_function(converted, apart, inputs)

    tied = copy.deepcopy(base)
    convert(tied, MatrixProduct(), rank=2, alpha=8, **LORA, freeze_rest=True)
    same_function(converted, import_adapter(tmp_path, tied), inputs)
    perturbed(apart)
    export_adapter(apart, tmp_path / "apart")
    with pytest.raises(MisconfigurationException, match="table, out share their factors"):
        import_adapter(tmp_path / "apart", tied)
    same_function(converted, tied, inputs)


def test_what_differs_from_the_base_is_written_where_the_base_is_given(tmp_path):
    base, inputs = Images().eval(), INPUTS[Images]()
    converted = copy.deepcopy(base)
    convert(converted, MatrixProduct("channel"), rank=2, include=["stem", "line"], **LORA)
    with torch.no_grad():
        converted.line.factors["U"].fill_(0.3)
        converted.head.weight.add_(1)
    converted.requires_grad_(False)
    config = config_of(export_adapter(converted, tmp_path, base=base))
    assert (config["modules_to_save"], config["bias"]) == (["head"], "none")
    same_function(converted, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), inputs)
    with torch.no_grad():
        converted.line.bias.add_(1)
    assert config_of(export_adapter(converted, tmp_path, base=base))["bias"] == "lora_only"
    same_function(converted, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), inputs)

    converted.line.fold()
    assert config_of(export_adapter(converted, tmp_path, base=base))["rank_pattern"] == {"^line": 1}
    same_function(converted, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), inputs)
    with pytest.raises(MisconfigurationException, match=r"stem\.weight.*6.*3"):
        export_adapter(converted, tmp_path, base=Tokens())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.body = nn.Linear(4, 4)


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("module", "factorization", "settings", "said"),
    [
        (conv(), MatrixProduct(), {}, r"0: its kernel is factorised in another way.*MatrixProduct\(layout='channel'\)"),
        (conv(), MatrixProduct("raw"), {}, r"0: its kernel is factorised in another way"),
        (conv(groups=2), MatrixProduct("channel"), {}, r"0: it has groups=2"),
        (conv(dilation=2), MatrixProduct("channel"), {}, r"0: it has dilation=\(2, 2\)"),
        (conv(padding=1, padding_mode="circular"), MatrixProduct("channel"), {}, "0: it has padding_mode='circular'"),
        (
            nn.Sequential(nn.ConvTranspose2d(4, 4, 3)),
            MatrixProduct("channel"),
            {},
            "0: PEFT has no LoRA for ConvTransp",
        ),
        (Attention(), MatrixProduct(), {}, r"attention\.in_proj: nn\.MultiheadAttention reads its weight"),
        (
            Attention(),
            MatrixProduct(),
            {"include": ["*out_proj"]},
            r"attention\.out_proj: nn\.MultiheadAttention reads",
        ),
        (
            nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8)),
            MatrixProduct(),
            {"include": ["*.linear2"]},
            r"0\.linear2: nn\.TransformerEncoderLayer reads its weight",
        ),
        (Shared(), MatrixProduct(), {}, "first: the model holds it twice, as first and second"),
        (Root(), BlockKronecker(), {}, r"body: its factorization is BlockKronecker\("),
        (Root(), MatrixProduct(), {"role": "weight"}, "body: its role is 'weight'"),
        (Root(), MatrixProduct(), {"decouple": True}, "body: its factors are decoupled"),
        (Root(), MatrixProduct(), {"train_base": True}, r"body: its base weight is trained as well \(train_base\)"),
        (Root(), MatrixProduct(), {}, "token has changed, and PEFT saves only whole modules"),
    ],
)
def test_what_peft_cannot_express_is_refused_by_name(tmp_path, module, factorization, settings, said):
    convert(module, factorization, rank=1, allow_larger=True, **settings)
    with pytest.raises(MisconfigurationException, match=rf"(?is){said}.*export dense"):
        export_adapter(module, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_different_dropouts_and_dense_modules_are_refused(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(MisconfigurationException, match="no low-rank layers"):
        export_adapter(net, tmp_path)
    convert(net, MatrixProduct(), rank=1, dropout=0.1)
    net[1].dropout = 0.5
    with pytest.raises(MisconfigurationException, match=r"lora_dropout.*\[0\.1, 0\.5\]"):
        export_adapter(net, tmp_path)


class Twin(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2)

    def forward(self, inputs):
        return self.head(self.backbone(inputs))


def test_names_are_relative_to_the_network_in_a_lightning_module(tmp_path):
    module = Twin()
    base, inputs = copy.deepcopy(module.backbone), torch.randn(3, 4)
    convert(module, MatrixProduct(), rank=1, include=["backbone"], freeze_rest=True)
    perturbed(module)
    assert config_of(export_adapter(module, tmp_path))["target_modules"] == ["0", "2"]
    same_function(module.backbone, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), inputs)
    same_function(module.backbone, import_adapter(tmp_path, copy.deepcopy(base)), inputs)
    fresh = Twin()
    fresh.backbone = copy.deepcopy(base)
    same_function(module.backbone, import_adapter(tmp_path, fresh).backbone, inputs)
    assert fresh.head.weight.requires_grad

    names = config_of(export_adapter(module, tmp_path, prefix=""))["target_modules"]
    assert names == ["backbone.0", "backbone.2"]
    with pytest.raises(MisconfigurationException, match=r"prefix.*'nothing'"):
        export_adapter(module, tmp_path, prefix="nothing")
    module.head.requires_grad_(True)
    with pytest.raises(MisconfigurationException, match=r"head\.weight.*head\.bias.*'backbone'"):
        export_adapter(module, tmp_path)
    module.head.requires_grad_(False)
    with pytest.raises(MisconfigurationException, match=r"backbone\.0.*backbone\.2.*'head'"):
        export_adapter(module, tmp_path, prefix="head.")


def test_a_lightning_module_that_is_itself_the_network(tmp_path):
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 3)

    net = Net()
    convert(net, MatrixProduct(), rank=1, init="lora", freeze_rest=True)
    assert config_of(export_adapter(net, tmp_path))["target_modules"] == ["body"]
    import_adapter(tmp_path, net)


def test_lists_of_parameters_are_saved_with_the_module_that_holds_them(tmp_path):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.values = nn.ParameterList([torch.ones(4), torch.ones(4)])

        def forward(self, inputs):
            return inputs * self.values[0] * self.values[1]

    base, inputs = nn.Sequential(nn.Linear(4, 4), Scales()), torch.randn(3, 4)
    converted = copy.deepcopy(base)
    convert(converted, MatrixProduct(), rank=1, init="lora", freeze_rest=True, keep_trained=["1"])
    perturbed(converted)
    assert config_of(export_adapter(converted, tmp_path))["modules_to_save"] == ["1"]
    same_function(converted, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), inputs)
    same_function(converted, import_adapter(tmp_path, base), inputs)


def test_a_module_with_parameters_of_its_own_is_saved_with_its_parts(tmp_path):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.offset = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

        def forward(self, inputs):
            return self.dense(inputs) + self.offset

    base, inputs = nn.Sequential(nn.Linear(4, 4), Head()), torch.randn(3, 4)
    converted = copy.deepcopy(base)
    convert(converted, MatrixProduct(), rank=1, include=["0"], init="lora", freeze_rest=True, keep_trained=["1"])
    perturbed(converted)
    assert config_of(export_adapter(converted, tmp_path))["modules_to_save"] == ["1"]
    same_function(converted, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path), inputs)


class Centred(nn.Module):
    """A module with a buffer beside its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("center", torch.zeros(6))

    def forward(self, inputs):
        return self.last(self.first(inputs) - self.center)


@pytest.mark.parametrize("imported", [False, True], ids=["converted", "imported"])
def test_a_buffer_beside_adapters_is_refused_where_it_has_changed(tmp_path, imported):
    module = Centred()
    convert(module, MatrixProduct(), rank=1, freeze_rest=True)
    export_adapter(module, tmp_path / "folder")
    if imported:
        module = import_adapter(tmp_path / "folder", Centred())
        export_adapter(module, tmp_path / "folder")
    module.center += 1
    with pytest.raises(MisconfigurationException, match=r"center.*PEFT.*modules_to_save.*`lightning-lowrank export`"):
        export_adapter(module, tmp_path / "none")


def test_a_buffer_of_a_module_without_adapters_is_saved_with_its_parts(tmp_path):
    base = nn.Sequential(nn.Linear(6, 6), Centred())
    module = copy.deepcopy(base)
    convert(module, MatrixProduct(), rank=1, freeze_rest=True, include=["0"])
    perturbed(module)[1].center += 1
    export_adapter(module, tmp_path)
    assert config_of(tmp_path)["modules_to_save"] == ["1"]
    same_function(module, peft().PeftModel.from_pretrained(base, tmp_path), torch.randn(4, 6))


def test_a_state_dict_that_lacks_an_adapters_tensors_is_refused(tmp_path):
    module = Images()
    convert(module, MatrixProduct("channel"), rank=1, include=["stem"], freeze_rest=True, **LORA)
    perturbed(module)
    for state, named in (dict(module.named_parameters()), "norm.running_mean"), (dict(module.named_buffers()), "stem"):
        with pytest.raises(MisconfigurationException, match=named):
            write_adapter(outline(module), state, tmp_path / "folder")


class Called(nn.TransformerEncoderLayer):
    """One whose forward always calls its layers."""

    def forward(self, inputs):
        return inputs + self._ff_block(inputs)


def test_the_layers_of_an_encoder_that_calls_them_are_exported(tmp_path):
    base = nn.Sequential(Called(4, 2, 8, dropout=0))
    module = copy.deepcopy(base)
    convert(module, MatrixProduct(), rank=1, freeze_rest=True, include=["*.linear1", "*.linear2"])
    export_adapter(perturbed(module), tmp_path)
    same_function(module, peft().PeftModel.from_pretrained(base, tmp_path), torch.randn(2, 5, 4))


class Counted(nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("wrapped", [False, True], ids=["ours", "PEFT"])
def test_a_state_that_is_no_tensor_is_refused_where_it_would_be_saved(tmp_path, wrapped):
    base = nn.Sequential(nn.Linear(6, 6), Counted(6, 6))
    module = copy.deepcopy(base)
    if wrapped:
        module = peft().get_peft_model(module, peft().LoraConfig(target_modules=["0"], modules_to_save=["1"]))
    else:
        convert(module, MatrixProduct(), rank=1, include=["0"])
    with pytest.raises(MisconfigurationException, match=r"base_model\.model\.1.*_extra_state.*only tensors"):
        export_adapter(module, tmp_path / "folder")
    if not wrapped:
        export_adapter(module, tmp_path / "folder", base=base)
