"""Adapter folders against PEFT itself: what it loads and saves must be the function that our layers compute."""

import copy
import json
import shutil

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    BlockKronecker,
    FederatedLoop,
    FedEx,
    FedLoRA,
    FedMUD,
    FedSA,
    FromIndices,
    LowRank,
    MatrixProduct,
    ProductSum,
    cli,
    convert,
    export_adapter,
    import_adapter,
    recover,
)
from lightning_lowrank.callbacks.lowrank import adapter_checkpoint
from lightning_lowrank.layers import low_rank_layers
from tests.helpers import Data, Module, fit, network, trainer

LORA = {"init": "lora", "allow_larger": True}


def peft():
    return pytest.importorskip("peft", reason="PEFT is not installed")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def perturbed(module):
    """Give everything that is trained, and batch norms' statistics, values that it did not have."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if value.is_floating_point() and (value.requires_grad or name.endswith("running_var")):
                value.add_(0.3 * torch.rand(value.shape, generator=draws, dtype=value.dtype))
    return module


class Images(nn.Module):
    """Convolutions of all three dimensions' kinds, batch norms and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.block = nn.Sequential(nn.Conv2d(6, 8, (3, 1), padding="same", bias=False), nn.ReLU(), nn.Conv2d(8, 5, 1))
        self.line = nn.Conv1d(5, 4, 3, padding=1)
        self.volume = nn.Conv3d(1, 3, 3, padding=1)
        self.head = nn.Linear(12, 3)

    def forward(self, images):
        found = self.block(torch.relu(self.norm(self.stem(images))))
        line = self.line(found.flatten(2))
        volume = self.volume(line[:, None, :, :, None])
        return self.head(volume.mean(dim=(3, 4)).flatten(1))


class Tokens(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh())
        self.out = nn.Linear(6, 11)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, tokens):
        return self.out(self.body(self.table(tokens)))


class Gpt(nn.Module):
    """Conv1D layers, square and not, beside a linear one."""

    def __init__(self):
        super().__init__()
        Conv1D = pytest.importorskip("transformers").pytorch_utils.Conv1D
        self.square, self.wide, self.last = Conv1D(6, 6), Conv1D(9, 6), nn.Linear(9, 4)

    def forward(self, inputs):
        return self.last(torch.tanh(self.wide(torch.tanh(self.square(inputs)))))


INPUTS = {
    Images: lambda: torch.randn(4, 3, 8, 8),
    Tokens: lambda: torch.randint(11, (4, 7)),
    Gpt: lambda: torch.randn(5, 6),
}


def same_function(first, second, inputs):
    with torch.no_grad():
        outputs, others = first.eval()(inputs), second.eval()(inputs)
    torch.testing.assert_close(outputs, others, rtol=1e-5, atol=1e-5)
    return outputs


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


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


def test_the_configuration_says_what_differs_between_layers(tmp_path):
    base = Gpt()
    convert(base, MatrixProduct(), rank={"square": 2, "wide": 2, "last": 1}, alpha=3, **LORA, freeze_rest=True)
    config = config_of(export_adapter(base, tmp_path))
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 2, 3, "none")
    assert config["rank_pattern"] == {"^last": 1}
    assert config["alpha_pattern"] == {}
    assert config["target_modules"] == ["square", "wide", "last"]
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
    with pytest.raises(MisconfigurationException, match=r"head was trained whole.*would take forehead for it"):
        export_adapter(net, tmp_path / "folder")
    adapted = nn.ModuleDict({"body": nn.ModuleDict({"head": nn.Linear(4, 4)}), "head": nn.Linear(4, 4)})
    convert(adapted, MatrixProduct(), rank=1, include=["body"], freeze_rest=True, keep_trained=["head"])
    with pytest.raises(MisconfigurationException, match=r"head was trained whole.*would take body\.head for it"):
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


def test_an_adapter_of_peft_with_embeddings_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=13, n_positions=9, n_embd=8, n_layer=1, n_head=2)
    base = transformers.GPT2LMHeadModel(config).eval()
    settings = peft().LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["wte", "c_attn", "c_proj"],
        rank_pattern={"mlp.c_proj": 2},
        alpha_pattern={"c_attn": 5},
        bias="all",
        init_lora_weights=False,
        use_rslora=True,
        lora_dropout=0.2,
    )
    wrapped = perturbed(peft().get_peft_model(copy.deepcopy(base), settings)).eval()
    wrapped.save_pretrained(tmp_path, save_embedding_layers=True)
    tokens = torch.randint(13, (2, 5))

    class Logits(pl.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.gpt = model
            self.metric = nn.Linear(2, 2)

        def forward(self, tokens):
            return self.gpt(tokens).logits

    ours = import_adapter(tmp_path, Logits(copy.deepcopy(base)))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), wrapped(tokens).logits, rtol=1e-4, atol=1e-5)
    ranks = {name: (layer.rank, layer.alpha, layer.dropout) for name, layer in low_rank_layers(ours)}
    assert ranks == {
        "gpt.transformer.wte": (4, 6, 0.2),
        "gpt.transformer.h.0.attn.c_attn": (4, 5, 0.2),
        "gpt.transformer.h.0.attn.c_proj": (4, 6, 0.2),
        "gpt.transformer.h.0.mlp.c_proj": (2, 6, 0.2),
    }
    assert ours.metric.weight.requires_grad
    assert ours.gpt.transformer.ln_f.bias.requires_grad
    assert not ours.gpt.transformer.ln_f.weight.requires_grad
    assert not ours.gpt.transformer.wte.frozen_weight.requires_grad
    assert not ours.gpt.lm_head.weight.requires_grad

    # And back: the biases of norms that were trained make the norms modules to save.
    ours.metric.requires_grad_(False)
    export_adapter(ours, tmp_path / "back")
    assert config_of(tmp_path / "back")["modules_to_save"] == [
        "transformer.h.0.ln_1",
        "transformer.h.0.ln_2",
        "transformer.h.0.mlp.c_fc",
        "transformer.ln_f",
    ]
    back = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "back").eval()
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, wrapped(tokens).logits, rtol=1e-4, atol=1e-5)


def test_import_into_layers_that_lowrank_has_converted(tmp_path):
    base, inputs = Images().eval(), INPUTS[Images]()
    first = copy.deepcopy(base)
    convert(first, MatrixProduct("channel"), rank=2, alpha=3, exclude=["head"], **LORA)
    export_adapter(perturbed(first), tmp_path)
    second = Module(copy.deepcopy(base))
    lowrank = LowRank(MatrixProduct("channel"), rank=2, alpha=16, exclude=["head"], summary=False, **LORA)
    lowrank.convert(second)
    trained = {name for name, value in second.named_parameters() if value.requires_grad}
    assert import_adapter(tmp_path, second) is second
    same_function(first, second.net, inputs)
    assert {name for name, value in second.named_parameters() if value.requires_grad} == trained
    assert {layer.alpha for _, layer in low_rank_layers(second)} == {16}
    assert lowrank.convert(second) is lowrank.conversion
    same_function(first, recover(copy.deepcopy(second.net)), inputs)

    merged = copy.deepcopy(base)
    convert(merged, MatrixProduct("channel"), rank=2, exclude=["head"], **LORA)
    for _, layer in low_rank_layers(merged.eval()):
        layer.merge()
    same_function(first, import_adapter(tmp_path, merged), inputs)


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
    with pytest.raises(MisconfigurationException, match=r"frozen weight line\.weight is not that of base"):
        export_adapter(converted, tmp_path, base=base)
    with pytest.raises(MisconfigurationException, match=r"base has no stem\.weight of shape \(6, 3, 3, 3\)"):
        export_adapter(converted, tmp_path, base=Tokens())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.body = nn.Linear(4, 4)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.ones(3))


def conv(**settings):
    return nn.Sequential(nn.Conv2d(4, 4, 3, **settings))


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
    with pytest.raises(
        MisconfigurationException, match=r"one lora_dropout for all layers, and these have \[0.1, 0.5\]"
    ):
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
    with pytest.raises(MisconfigurationException, match=r"prefix is 'nothing', and .* are backbone, head"):
        export_adapter(module, tmp_path, prefix="nothing")
    module.head.requires_grad_(True)
    with pytest.raises(MisconfigurationException, match=r"head.weight, head.bias are trained outside 'backbone'"):
        export_adapter(module, tmp_path)
    module.head.requires_grad_(False)
    with pytest.raises(MisconfigurationException, match=r"backbone.0, backbone.2 are trained outside 'head'"):
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


def test_import_finds_the_part_or_asks(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    convert(net, MatrixProduct(), rank=1)
    export_adapter(perturbed(net), tmp_path)
    pair = nn.ModuleDict({"one": nn.Sequential(nn.Linear(4, 4)), "two": nn.Sequential(nn.Linear(4, 4))})
    with pytest.raises(MisconfigurationException, match="give as prefix one of one, two"):
        import_adapter(tmp_path, pair)
    import_adapter(tmp_path, pair, prefix="two")
    assert [name for name, _ in low_rank_layers(pair)] == ["two.0"]
    torch.testing.assert_close(pair["two"][0].update(), net[0].update())
    with pytest.raises(MisconfigurationException, match=r"has adapters for three\.0, and the module has no such"):
        import_adapter(tmp_path, pair, prefix="three")


@pytest.fixture
def saved(tmp_path):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    convert(net, MatrixProduct(), rank=2, alpha=2, exclude=["2"], freeze_rest=True, keep_trained=["2"])
    return export_adapter(perturbed(net), tmp_path / "saved")


def plain():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def rewrite(folder, config=None, **tensors):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    contents = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    for name, value in tensors.items():
        contents[f"base_model.model.{name}"] = value
    contents = {name: value for name, value in contents.items() if value is not None}
    safetensors.torch.save_file(contents, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"peft_type": "LOHA"}, {}, "PEFT's type 'LOHA', and only 'LORA' is read"),
        ({"use_dora": True}, {}, "use_dora=True: DoRA's magnitudes"),
        ({"lora_bias": True}, {}, "lora_bias=True: its adapters have biases"),
        ({"trainable_token_indices": [1]}, {}, r"trainable_token_indices=\[1\]"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa', which changes the base weights"),
        ({}, {"0.lora_magnitude_vector": torch.ones(5)}, r"holds 0\.lora_magnitude_vector"),
        ({}, {"0.lora_B.bias": torch.ones(5)}, r"holds 0\.lora_B\.bias, which is no factor"),
        ({}, {"0.lora_A.weight": None}, "lacks lora_A of layer '0'"),
        ({}, {"0.lora_B.weight": torch.ones(5, 3)}, r"factors of layer '0' do not fit: .*\(5, 3\), and the rank is 2"),
        ({"r": 3}, {}, r"factors of layer '0' do not fit: .* and the rank is 3"),
        ({"lora_alpha": 0}, {}, "lora_alpha of layer '0' must be above 0"),
        ({}, {"0.lora_A.weight": torch.ones(2, 7)}, r"shapes \(2, 7\) \(A\) and \(5, 2\) \(B\).*Linear.*\(5, 6\)"),
        (
            {},
            {"1.lora_A.weight": torch.ones(2, 7), "1.lora_B.weight": torch.ones(5, 2)},
            "'1' cannot be loaded: PEFT's ",
        ),
        ({}, {"9.lora_A.weight": torch.ones(2, 7), "9.lora_B.weight": torch.ones(5, 2)}, "adapters for 9, and the mod"),
        (
            {},
            {
                "0.lora_A.weight": None,
                "0.lora_B.weight": None,
                "0.lora_embedding_A": torch.ones(2, 6),
                "0.lora_embedding_B": torch.ones(5, 2),
            },
            "factors of layer '0' .* do not fit a Linear",
        ),
        ({}, {"3.weight": torch.ones(2)}, r"holds 3\.weight, and the module has no parameter or buffer 3\.weight"),
        ({}, {"2.weight": torch.ones(2)}, r"holds 2\.weight of shape \(2,\), and the module's has \(4, 5\)"),
        (
            {"r": 6},
            {"0.lora_A.weight": torch.ones(6, 6), "0.lora_B.weight": torch.ones(5, 6)},
            "rank must be an integer",
        ),
    ],
)
def test_folders_that_are_no_plain_lora_of_the_module_change_nothing(saved, config, tensors, said):
    module = plain()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    rewrite(saved, config, **tensors)
    with pytest.raises(MisconfigurationException, match=f"(?s){said}"):
        import_adapter(saved, module)
    assert not list(low_rank_layers(module))
    assert all(value.requires_grad for value in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_pickles_are_never_read(saved, tmp_path):
    class Boom:
        def __reduce__(self):
            return (shutil.rmtree, (str(saved),))

    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(MisconfigurationException, match=r"holds no adapter_model\.safetensors\.$"):
        import_adapter(saved, plain())
    torch.save({"x": Boom()}, saved / "adapter_model.bin")
    with pytest.raises(MisconfigurationException, match=r"adapter_model\.bin is a pickle, which is not read"):
        import_adapter(saved, plain())
    shutil.copy(saved / "adapter_model.bin", saved / "adapter_model.safetensors")
    with pytest.raises(MisconfigurationException, match="is no safetensors file"):
        import_adapter(saved, plain())
    assert saved.exists()
    (saved / "adapter_config.json").write_text("{")
    with pytest.raises(MisconfigurationException, match=r"adapter_config\.json is no JSON"):
        import_adapter(saved, plain())
    with pytest.raises(MisconfigurationException, match=r"no PEFT adapter folder: it holds no adapter_config\.json"):
        import_adapter(tmp_path, plain())


def test_converted_layers_that_are_not_the_folders_are_refused(saved):
    other = plain()
    convert(other, MatrixProduct(), rank=2)
    with pytest.raises(MisconfigurationException, match="but differ in 2: convert the folder's layers"):
        import_adapter(saved, other)
    larger = plain()
    convert(larger, MatrixProduct(), rank=1, include=["0"])
    with pytest.raises(
        MisconfigurationException, match="layer '0' cannot be loaded: its rank is 1, and the folder's 2"
    ):
        import_adapter(saved, larger)
    weight = plain()
    convert(weight, MatrixProduct(), rank=2, include=["0"], role="weight")
    with pytest.raises(MisconfigurationException, match="layer '0' cannot be loaded: its role is 'weight'"):
        import_adapter(saved, weight)


@pytest.mark.parametrize("setting", [{"dilation": 2}, {"groups": 2}, {"padding": 1, "padding_mode": "reflect"}])
def test_convolutions_whose_adapter_is_none_of_their_weight_are_not_imported(tmp_path, setting):
    net = conv()
    convert(net, MatrixProduct("channel"), rank=2, freeze_rest=True)
    export_adapter(net, tmp_path)
    with pytest.raises(MisconfigurationException, match=f"layer '0' cannot be loaded: it has {list(setting)[-1]}="):
        import_adapter(tmp_path, conv(**setting))
    assert import_adapter(tmp_path, conv())[0].rank == 2


def test_a_layer_that_the_model_holds_twice_is_not_imported(tmp_path):
    apart = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    convert(apart, MatrixProduct(), rank=1, include=["first"], freeze_rest=True)
    shared = Shared()
    with pytest.raises(MisconfigurationException, match="the model holds first twice, and PEFT wraps one of them"):
        import_adapter(export_adapter(apart, tmp_path), shared)
    assert isinstance(shared.second, nn.Linear)
    assert shared.first.weight.requires_grad


def test_what_peft_has_wrapped_is_left_to_peft(saved):
    wrapped = peft().get_peft_model(plain(), peft().LoraConfig(target_modules=["0"]))
    with pytest.raises(MisconfigurationException, match=r"PEFT has wrapped 'base_model.model.0' already: call save_"):
        export_adapter(wrapped, saved)
    with pytest.raises(MisconfigurationException, match=r"PEFT has wrapped .* call load_adapter"):
        import_adapter(saved, wrapped)


CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103))]


def federated(tmp_path, operator, **settings):
    base = network(norm=nn.BatchNorm1d)
    module = Module(copy.deepcopy(base))
    loop = FederatedLoop(
        operator if isinstance(operator, FedMUD) else FedLoRA(operator), partition=FromIndices(CLIENTS)
    )
    lowrank = LowRank(MatrixProduct(), rank=2, alpha=4, summary=False, exclude=["net.5"], **{**LORA, **settings})
    run = trainer(tmp_path, lowrank, loop, max_epochs=2)
    fit(run, module, Data())
    run.save_checkpoint(tmp_path / "run.ckpt")
    return base, module


def test_a_federated_runs_model_from_module_checkpoint_and_command(tmp_path, capsys):
    base, module = federated(tmp_path, ProductSum())
    export_adapter(module, tmp_path / "module")
    adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "checkpoint")
    cli.main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "command"), "--format", "peft", "--prefix", "net."])
    assert f"wrote {tmp_path / 'command'}: PeftModel.from_pretrained" in capsys.readouterr().out
    config = config_of(tmp_path / "module")
    assert config["modules_to_save"] == ["1", "5"]
    inputs = torch.randn(9, 6)
    for name in ("module", "checkpoint", "command"):
        assert config_of(tmp_path / name) == config
        loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name)
        outputs = same_function(module.net, loaded, inputs)
        assert not torch.allclose(outputs, base.eval()(inputs), atol=1e-3)


def test_a_clients_own_adapter(tmp_path, capsys):
    base, module = federated(tmp_path, FedSA())
    cli.main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "own"), "--format", "peft", "--client", "1"])
    own = torch.load(tmp_path / "run.ckpt", weights_only=True)["callbacks"]["FederatedLoop"]["clients"][1]["personal"]
    assert own
    inputs = torch.randn(9, 6)
    with torch.no_grad():
        for name, value in own.items():
            module.get_parameter(name).copy_(value)
    loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "own")
    outputs = same_function(module.net, loaded, inputs)
    assert not torch.allclose(outputs, base.eval()(inputs), atol=1e-3)
    with pytest.raises(SystemExit, match="client 7 keeps no model of its own"):
        cli.main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "own"), "--format", "peft", "--client", "7"])


@pytest.mark.parametrize("operator", [FedEx(), FedMUD()], ids=["FedEx", "FedMUD"])
def test_runs_that_changed_the_frozen_weights_are_refused(tmp_path, operator):
    base, module = federated(tmp_path, operator)
    name = "FedMUD" if isinstance(operator, FedMUD) else "FedLoRA"
    said = rf"{name} with this operator or setting folds updates into the frozen weights.*export dense weights instead"
    with pytest.raises(MisconfigurationException, match=said):
        export_adapter(module, tmp_path / "folder")
    with pytest.raises(SystemExit, match=said):
        cli.main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "folder"), "--format", "peft"])
    with pytest.raises(MisconfigurationException, match=r"frozen weight 0\.weight is not that of base"):
        export_adapter(module, tmp_path / "folder", base=base)
    assert not (tmp_path / "folder").exists()


def test_checkpoints_that_do_not_describe_their_layers_are_refused(tmp_path):
    federated(tmp_path, ProductSum())
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    del checkpoint["callbacks"]
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    with pytest.raises(MisconfigurationException, match=r"bare\.ckpt does not describe the layers of its module"):
        adapter_checkpoint(tmp_path / "bare.ckpt", tmp_path / "folder")
    checkpoint["state_dict"]["net.0.lora_A.default.weight"] = torch.zeros(1)
    torch.save(checkpoint, tmp_path / "wrapped.ckpt")
    with pytest.raises(MisconfigurationException, match=r"wrapped\.ckpt is of a module that PEFT wrapped"):
        adapter_checkpoint(tmp_path / "wrapped.ckpt", tmp_path / "folder")


def test_checkpoints_of_before_outlines_resume(tmp_path):
    lowrank = LowRank(MatrixProduct(), rank=1, summary=False)
    lowrank.convert(network())
    state = lowrank.state_dict()
    lowrank.load_state_dict({"layers": state["layers"]})
    with pytest.raises(MisconfigurationException, match="converted with other LowRank arguments"):
        lowrank.load_state_dict({"layers": state["layers"][1:]})
