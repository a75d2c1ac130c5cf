"""Adapter folders that PEFT wrote, folders that are refused, and modules that do not fit."""

import copy
import json
import shutil
import sys
import time
from collections import OrderedDict
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    LowRank,
    MatrixProduct,
    cli,
    convert,
    export_adapter,
    import_adapter,
    load_dense,
    recover,
)
from lightning_lowrank.interop import peft_import
from lightning_lowrank.interop.checkpoints import adapter_checkpoint
from lightning_lowrank.layers import low_rank_layers
from tests.helpers import Module
from tests.interop.helpers import INPUTS, LORA, Images, Shared, config_of, conv, peft, perturbed, same_function


def test_all_biases_beside_modules_that_are_saved(tmp_path):
    torch.manual_seed(0)
    base, inputs = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.randn(2, 8)
    settings = peft().LoraConfig(r=2, target_modules=["0"], bias="all", modules_to_save=["1"])
    wrapped = peft().get_peft_model(copy.deepcopy(base), settings)
    with torch.no_grad():
        for value in wrapped.parameters():
            if value.requires_grad:
                value.normal_()
    wrapped.save_pretrained(tmp_path)
    names = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors").keys()
    assert any(".original_module." in name for name in names)
    torch.testing.assert_close(import_adapter(tmp_path, base)(inputs), wrapped(inputs))


@pytest.mark.slow
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

    with pytest.warns(UserWarning, match=r"lora_dropout=0\.2.*no effect.*train\(\)"):
        ours = import_adapter(tmp_path, Logits(copy.deepcopy(base)))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), wrapped(tokens).logits, rtol=1e-4, atol=1e-5)
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
        ({"use_dora": True}, {}, "use_dora=True, a variant of LoRA"),
        ({"lora_bias": True}, {}, "lora_bias=True, a variant of LoRA"),
        ({"target_modules": [[1]]}, {}, r"adapter_config\.json .*PEFT.*TypeError"),
        ({"use_dora": True, "lora_bias": True}, {}, r"adapter_config\.json .*PEFT.*lora_bias"),
        ({"use_bdlora": {"nblocks": 2}}, {}, "use_bdlora=BdLoraConfig"),
        ({"self": 1}, {}, r"adapter_config\.json .*PEFT.*self"),
        ({"trainable_token_indices": [1]}, {}, r"trainable_token_indices=\[1\]"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa', which changes the base weights"),
        ({}, {"0.lora_magnitude_vector": torch.ones(5)}, r"holds 0\.lora_magnitude_vector"),
        ({}, {"0.lora_B.bias": torch.ones(5)}, r"holds 0\.lora_B\.bias, which is not a factor"),
        ({}, {"0.lora_A.weight": None}, "lacks lora_A of layer '0'"),
        ({}, {"0.lora_B.weight": torch.ones(5, 3)}, r"factors of layer '0' do not fit: .*\(5, 3\), and the rank is 2"),
        ({"r": 3}, {}, r"factors of layer '0' do not fit: .* and the rank is 3"),
        ({"r": "2"}, {}, "r='2'.*whole number"),
        ({"r": [2]}, {}, r"r=\[2\].*whole number"),
        ({"r": True}, {}, "r=True.*whole number"),
        ({"lora_alpha": 0}, {}, "lora_alpha=0.*above 0"),
        ({"lora_alpha": "16"}, {}, "lora_alpha='16'.*a number"),
        ({"lora_alpha": float("nan")}, {}, "lora_alpha=nan.*a number"),
        ({"lora_dropout": "0.1"}, {}, "lora_dropout='0.1'.*a number"),
        ({"use_rslora": "no"}, {}, "use_rslora='no'.*true or false"),
        ({"bias": True}, {}, "bias=True.*lora_only"),
        ({"modules_to_save": "2"}, {}, "modules_to_save='2'.*list of names"),
        ({"target_modules": 3}, {}, "target_modules=3.*list of names"),
        ({"exclude_modules": 3}, {}, "exclude_modules=3.*list of names"),
        ({}, {"0.lora_A.weight": torch.full((2, 6), torch.nan)}, "lora_A of layer '0'.*NaN"),
        ({}, {"0.lora_B.weight": torch.full((5, 2), torch.inf)}, "lora_B of layer '0'.*infinity"),
        ({}, {"2.weight": torch.full((4, 5), torch.nan)}, r"2\.weight.*NaN"),
        ({"rank_pattern": {f"x{number}": 2 for number in range(5001)}}, {}, "5,001 keys in rank_pattern"),
        ({"rank_pattern": ["0"]}, {}, r"rank_pattern=\['0'\].*an object"),
        ({"rank_pattern": {"0": "2"}}, {}, r"rank_pattern\['0'\]='2'.*whole number"),
        ({"alpha_pattern": {"0": [2]}}, {}, r"alpha_pattern\['0'\]=\[2\].*a number"),
        ({"rank_pattern": {"(": 2}}, {}, r"'\('.*rank_pattern.*no regular expression"),
        ({"alpha_pattern": {"*0": 2}}, {}, r"'\*0'.*alpha_pattern.*no regular expression"),
        ({"rank_pattern": {"(0+)+x": 2}}, {}, r"'\(0\+\)\+x'.*rank_pattern.*repeats a group"),
        ({"alpha_pattern": {"(0|00)" * 30 + "x": 2}}, {}, "alpha_pattern.*more than 2 repetitions"),
        ({"alpha_pattern": {"0?" * 30: 2}}, {}, "alpha_pattern.*more than 2 repetitions"),
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
    with pytest.raises(MisconfigurationException, match=r"adapter_model\.bin"):
        import_adapter(saved, plain())
    shutil.copy(saved / "adapter_model.bin", saved / "adapter_model.safetensors")
    with pytest.raises(MisconfigurationException, match=r"adapter_model\.safetensors"):
        import_adapter(saved, plain())
    assert saved.exists()
    (saved / "adapter_config.json").write_text("{")
    with pytest.raises(MisconfigurationException, match=r"adapter_config\.json.*JSON"):
        import_adapter(saved, plain())
    (saved / "adapter_config.json").write_text('[{"r": 8}]')
    with pytest.raises(MisconfigurationException, match=r"adapter_config\.json is no JSON object.*'r': 8"):
        import_adapter(saved, plain())
    with pytest.raises(MisconfigurationException, match=r"PEFT.*adapter_config\.json"):
        import_adapter(tmp_path, plain())


def test_converted_layers_that_are_not_the_folders_are_refused(saved):
    other = plain()
    convert(other, MatrixProduct(), rank=2)
    with pytest.raises(MisconfigurationException, match=" in 2: convert the folder's layers"):
        import_adapter(saved, other)
    larger = plain()
    convert(larger, MatrixProduct(), rank=1, include=["0"])
    with pytest.raises(MisconfigurationException, match=r"'0'.*rank.*1"):
        import_adapter(saved, larger)
    weight = plain()
    convert(weight, MatrixProduct(), rank=2, include=["0"], role="weight")
    with pytest.raises(MisconfigurationException, match=r"'0'.*'weight'"):
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


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(OrderedDict(table=nn.Embedding(5, 4), body=nn.Linear(4, 4), head=nn.Linear(4, 5, bias=False)))
        self.head.weight = self.table.weight


@pytest.mark.parametrize("kept", [["head"], ["table"], ["table", "head"]], ids=str)
def test_a_tied_module_to_save_is_untied_as_peft_does(tmp_path, kept):
    base, inputs = Tied(), torch.arange(5)
    settings = peft().LoraConfig(r=2, target_modules=["body"], modules_to_save=kept, init_lora_weights=False)
    perturbed(peft().get_peft_model(copy.deepcopy(base), settings)).save_pretrained(tmp_path)
    ours = copy.deepcopy(base)
    # Another name of the head, outside the network, is no tie of it.
    import_adapter(tmp_path, nn.ModuleDict({"network": ours, "head": ours.head}), prefix="network")
    same_function(peft().PeftModel.from_pretrained(base, tmp_path), ours, inputs)
    assert ours.head.weight is not ours.table.weight
    assert [name for name in ("table", "head") if getattr(ours, name).weight.requires_grad] == kept


def test_a_tie_stays_if_the_folder_has_equal_values(tmp_path):
    base, inputs = Tied(), torch.arange(5)
    trained = copy.deepcopy(base)
    convert(trained, MatrixProduct(), rank=1, include=["body"], freeze_rest=True, keep_trained=["table", "head"])
    export_adapter(perturbed(trained), tmp_path)
    assert config_of(tmp_path)["modules_to_save"] == ["head", "table"]
    ours = import_adapter(tmp_path, base)
    same_function(trained, ours, inputs)
    assert ours.head.weight is ours.table.weight


def test_a_module_to_save_that_the_model_holds_twice_is_not_imported(tmp_path):
    class Twice(Shared):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)

    settings = peft().LoraConfig(r=2, target_modules=["body"], modules_to_save=["first"])
    perturbed(peft().get_peft_model(Twice(), settings)).save_pretrained(tmp_path)
    network = Twice()
    with pytest.raises(MisconfigurationException, match="the model holds first twice"):
        import_adapter(tmp_path, network)
    assert type(network.body) is nn.Linear


def test_what_peft_has_wrapped_is_not_imported_into(saved):
    wrapped = peft().get_peft_model(plain(), peft().LoraConfig(target_modules=["0"]))
    with pytest.raises(MisconfigurationException, match=r"PEFT.*'base_model\.model\.0'.*load_adapter"):
        import_adapter(saved, wrapped)


def test_patterns_of_names_match_as_peft_matches_them():
    names = ["layers.0.q_proj", "layers.0.v_proj", "layers.11.q_proj", "head"]
    peft()
    from peft.utils.other import get_pattern_key

    for pattern in (
        "q_proj",
        "^layers.0.q_proj",
        r"layers\.\d+\.(?:q|k)_proj",
        r".*\.[qv]_proj",
        "(q|k|v|o|gate|up|down)_proj",
    ):
        assert not peft_import._why_not_matched(pattern)
        for name in names:
            matches = get_pattern_key([pattern], name) == pattern
            assert peft_import._by_pattern(peft_import._matchers({pattern: 3}), name, 1) == (3 if matches else 1)


def test_the_slowest_pattern_that_is_matched_ends_soon():
    group = f"(a{'|a' * 10})"
    pattern, name = f"{group}{group}.*.*b", "a" * 200 + ".aaa" * 10
    assert not peft_import._why_not_matched(pattern)
    began = time.process_time()
    assert peft_import._by_pattern(peft_import._matchers({pattern: 3}), name, 1) == 1
    assert time.process_time() - began < 5


def test_a_missing_folder_and_a_file_in_place_of_one_are_refused(tmp_path):
    file, none = tmp_path / "adapter.safetensors", tmp_path / "none"
    file.write_text("kept")
    converted = plain()
    convert(converted, MatrixProduct(), rank=2)
    checkpoint = tmp_path / "run.ckpt"
    torch.save({"state_dict": plain().state_dict()}, checkpoint)
    for call in (
        lambda: import_adapter(file, plain()),
        lambda: export_adapter(converted, file),
        lambda: adapter_checkpoint(checkpoint, file),
    ):
        with pytest.raises(MisconfigurationException, match=f"{file} is a file"):
            call()
    with pytest.raises(MisconfigurationException, match=f"no folder {none}.*pull_adapter"):
        import_adapter(none, plain())
    assert file.read_text() == "kept"
    assert not none.exists()


@pytest.mark.parametrize("call", [import_adapter, export_adapter, load_dense])
def test_arguments_in_the_wrong_order_are_refused_by_type(tmp_path, call):
    ordered = (plain(), tmp_path) if call is export_adapter else (tmp_path, plain())
    with pytest.raises(MisconfigurationException, match=rf"{call.__name__}\(.*in this order.*(Sequential|Path)"):
        call(*reversed(ordered))
    with pytest.raises(MisconfigurationException, match=rf"{call.__name__}\(.*of type int"):
        call(*(3 if isinstance(each, nn.Module) else each for each in ordered))


@pytest.mark.parametrize("call", ["export", "import", "checkpoint", "command"])
def test_the_extra_is_named_before_anything_is_read_or_written(tmp_path, saved, monkeypatch, call):
    dense, checkpoint = plain(), tmp_path / "run.ckpt"
    # None of these would be accepted with PEFT.
    checkpoint.write_bytes(b"none")
    (saved / "adapter_config.json").write_text("{")
    monkeypatch.setitem(sys.modules, "peft", None)
    calls = {
        "export": lambda: export_adapter(dense, tmp_path / "folder"),
        "import": lambda: import_adapter(saved, dense),
        "checkpoint": lambda: adapter_checkpoint(checkpoint, tmp_path / "folder"),
        "command": lambda: cli.main(
            ["export", str(checkpoint), str(tmp_path / "folder"), "--format", "peft", "--config", "none.yaml"]
        ),
    }
    with pytest.raises((MisconfigurationException, SystemExit), match=r"needs peft: .*\[peft\]"):
        calls[call]()
    assert not (tmp_path / "folder").exists()


def test_a_field_of_a_later_peft_is_left_out_with_its_warning(saved):
    rewrite(saved, {"later_field": 1})
    with pytest.warns(UserWarning, match="later_field"):
        assert import_adapter(saved, plain())[0].rank == 2


@pytest.mark.parametrize("wrapped", [False, True], ids=["ours", "PEFT"])
def test_nothing_is_asked_of_the_hub(tmp_path, monkeypatch, wrapped):
    class Named(nn.Sequential):
        config = SimpleNamespace(_name_or_path="meta/some-model", vocab_size=7)

        def get_input_embeddings(self):
            return self[0]

    def ask(*arguments):
        asked.append(arguments)
        raise OSError("no network")

    asked = []
    module = Named(nn.Embedding(7, 5), nn.Linear(5, 4))
    if wrapped:
        module = peft().get_peft_model(module, peft().LoraConfig(r=2, target_modules=["1"]))
        module.peft_config["default"].base_model_name_or_path = "meta/some-model"
    else:
        convert(module, MatrixProduct(), rank=2, include=["1"], freeze_rest=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.socket.connect", ask)
    monkeypatch.setattr("socket.getaddrinfo", ask)
    folder = export_adapter(module, tmp_path)
    assert config_of(folder)["base_model_name_or_path"] == "meta/some-model"
    import_adapter(folder, Named(nn.Embedding(7, 5), nn.Linear(5, 4)))
    assert not asked
