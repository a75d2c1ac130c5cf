"""Whatever an operator did to the base weights, the adapter of its run is whole on the original ones."""

import copy
from abc import ABCMeta

import pytest
import safetensors.torch
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowrank import (
    CoreProduct,
    FederatedLoop,
    FedLoRA,
    FedSB,
    FromIndices,
    LowRank,
    MatrixProduct,
    Ravan,
    TrainedCheckpoints,
    cli,
    export_adapter,
    lora,
)
from lightning_lowrank.federated.state import Base
from lightning_lowrank.interop.checkpoints import adapter_checkpoint
from lightning_lowrank.lora import Operator
from lightning_lowrank.lora.adapters import Adapters, find_adapters
from lightning_lowrank.lora.base_changes import BaseChanges
from tests.grids import each_of, nightly_except, pairwise
from tests.helpers import fit, trainer
from tests.interop.helpers import config_of, peft, perturbed
from tests.lora.test_fedlora_peft import CLIENTS, Labelling, bert, convolutions, data, gpt

# Also those that come later.
OPERATORS = sorted(
    (each for each in vars(lora).values() if isinstance(each, ABCMeta) and issubclass(each, Operator)),
    key=lambda each: each.__name__,
)
OPERATORS.remove(Operator)
TARGETS = {bert: ["query", "dense"], gpt: ["c_attn", "c_fc"], convolutions: ["0", "2"]}
HEADS = {bert: "classifier", gpt: "score", convolutions: "5"}


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    pytest.importorskip("transformers", reason="transformers is not installed")
    peft()


def start(network, form, **settings):
    """Return a module with adapters, the callbacks that it needs, and its network as it was."""
    torch.manual_seed(0)
    base = network()
    own = copy.deepcopy(base)
    if form == "ours":
        low_rank = LowRank(
            MatrixProduct("channel"),
            rank=2,
            alpha=4,
            init="lora",
            include=TARGETS[network],
            keep_trained=[HEADS[network]],
            freeze_rest=True,
            allow_larger=True,
            summary=False,
        )
        return Labelling(own), [low_rank], base
    config = peft().LoraConfig(
        r=2, lora_alpha=4, target_modules=TARGETS[network], modules_to_save=[HEADS[network]], **settings
    )
    if form == "injected":
        return Labelling(peft().inject_adapter_in_model(config, own)), [], base
    return Labelling(peft().get_peft_model(own, config)), [], base


def federate(folder, network, form, operator, **settings):
    module, callbacks, base = start(network, form, **settings)
    loop = FederatedLoop(FedLoRA(operator), partition=FromIndices(CLIENTS), summary=False)
    run = trainer(folder, *callbacks, loop, max_epochs=2, limit_val_batches=0)
    fit(run, module, DataLoader(data(network), batch_size=4))
    return run, module, base


def check(network, module, base, folder):
    inputs = data(network).tensors[0]
    loaded = Labelling(peft().PeftModel.from_pretrained(copy.deepcopy(base), folder)).eval()
    with torch.no_grad():
        found, expected = loaded(inputs), module.eval()(inputs)
        before = Labelling(base).eval()(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (expected - before).abs().max() > 0.01


CASES = [
    (bert, "wrapped"),
    (bert, "ours"),
    (gpt, "wrapped"),
    (gpt, "ours"),
    (convolutions, "wrapped"),
    (bert, "injected"),
]


@nightly_except("bert-injected-FedInc", "bert-wrapped-FedSVD", "bert-wrapped-RoLoRA", "gpt-wrapped-FLoRA")
@pytest.mark.slow
@pairwise(strength=1)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("network", "form"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_the_adapter_of_each_operator_is_whole_on_the_original_base(tmp_path, network, form, operator):
    run, module, base = federate(tmp_path, network, form, operator())
    export_adapter(module, tmp_path / "adapter", base=base)
    check(network, module, base, tmp_path / "adapter")
    run.save_checkpoint(tmp_path / "run.ckpt")
    new, _, _ = start(network, form)
    adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "from_checkpoint", module=new)
    check(network, module, base, tmp_path / "from_checkpoint")
    assert config_of(tmp_path / "from_checkpoint") == config_of(tmp_path / "adapter")
    config = config_of(tmp_path / "adapter")
    if operator.changes_base:
        with pytest.raises(MisconfigurationException, match="folds updates into the frozen weights"):
            export_adapter(module, tmp_path / "other")
        # Also without the trainer.
        with pytest.raises(MisconfigurationException, match=r"folded into the frozen weights of .*export dense"):
            export_adapter(module.network, tmp_path / "other")
    else:
        assert {config["r"], *config["rank_pattern"].values()} == {2}
        export_adapter(module, tmp_path / "other")
        check(network, module, base, tmp_path / "other")


class Numbered(nn.Module):
    """Layers of which one's name is a part of another's, and a pattern for one may match others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(6, 6), "v": nn.Linear(6, 6)}) for _ in range(11))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer["v"](layer["q"](inputs)))
        return inputs


PATTERNS = [{}, {"q": 4}, {"0.q": 4}, {r".*\.1\d?\.q": 4}, {"layers.1.v": 4, "v": 6}, {r"layers\.(0|10)\.\w": 4}]
CHANGED = [[], ["layers.1.q"], ["layers.0.q", "layers.10.v"], ["layers.1.v", "layers.3.q"]]


@pytest.mark.slow
@each_of(5)
@pytest.mark.parametrize("number", range(30))
def test_ranks_and_scalings_of_ones_own_patterns_are_kept(tmp_path, number):
    ranks, alphas = PATTERNS[number % 6], PATTERNS[(number // 5 + number) % 6]
    changed = CHANGED[number % 4]
    torch.manual_seed(number)
    base = Numbered()
    config = peft().LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=["q", "v"] if number % 3 else r"layers\.(0|1|10)\.(q|v)",
        rank_pattern=ranks,
        alpha_pattern={name: value + 1.5 for name, value in alphas.items()},
        use_rslora=number % 2 == 1,
        init_lora_weights=[True, "orthogonal", "gaussian"][number % 3],
    )
    wrapped = peft().get_peft_model(copy.deepcopy(base), config)
    draws = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            inner = name.replace("base_model.model.", "").replace(".base_layer.weight", "")
            if "lora_" in name:
                parameter.normal_(0, 0.3, generator=draws)
            elif inner in changed:
                # Of rank 3, which is no layer's own.
                parameter.add_(torch.randn(6, 3, generator=draws) @ torch.randn(3, 6, generator=draws))
    inputs = torch.randn(5, 6, generator=draws)
    for given in [{"base": base}] + ([] if changed else [{}]):
        folder = export_adapter(wrapped, tmp_path / f"adapter_{len(given)}", **given)
        loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base), folder)
        with torch.no_grad():
            torch.testing.assert_close(loaded(inputs), wrapped(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wrapped", "ours"])
def test_a_change_of_weights_of_16_bits_is_that_before_rounding(tmp_path, form):
    def network():
        return bert().bfloat16()

    torch.manual_seed(0)
    TARGETS[network], HEADS[network] = TARGETS[bert], HEADS[bert]
    module, callbacks, base = start(network, form)
    loop = FederatedLoop(FedLoRA(lora.FLoRA()), partition=FromIndices(CLIENTS), summary=False)
    run = trainer(tmp_path, *callbacks, loop, max_epochs=2, limit_val_batches=0)
    fit(run, module, DataLoader(data(bert), batch_size=4))
    run.save_checkpoint(tmp_path / "run.ckpt")
    new, _, _ = start(network, form)
    folders = [
        export_adapter(module, tmp_path / "module", base=base),
        adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "checkpoint", module=new),
    ]
    first, second = (safetensors.torch.load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    sums = loop.server.base.state["sums"]
    assert sums
    for layer, total in sums.items():
        name = layer.removeprefix("network.").removeprefix("base_model.model.")
        A, B = (first[f"base_model.model.{name}.lora_{factor}.weight"].double() for factor in "AB")
        change = total.double() - base.get_parameter(f"{name}.weight").double()
        # FLoRA's own factors begin each round at a product of zero, and their scaling is 1 in what is written.
        torch.testing.assert_close(B @ A, change, rtol=0, atol=1e-6)
        rounded = total.bfloat16().double() - base.get_parameter(f"{name}.weight").double()
        assert (rounded - change).abs().max() > 1e-4

    # Sums of other weights than the module now has, as after the test of an earlier checkpoint, are left out.
    own = "base_layer.weight" if form == "wrapped" else "frozen_weight"
    weights = {layer: module.get_parameter(f"{layer}.{own}") for layer in sums}
    with torch.no_grad():
        for weight in weights.values():
            weight.mul_(0.5)
    export_adapter(module, tmp_path / "module", base=base)
    first = safetensors.torch.load_file(tmp_path / "module/adapter_model.safetensors")
    for layer, weight in weights.items():
        name = layer.removeprefix("network.").removeprefix("base_model.model.")
        A, B = (first[f"base_model.model.{name}.lora_{factor}.weight"].double() for factor in "AB")
        change = weight.double() - base.get_parameter(f"{name}.weight").double()
        torch.testing.assert_close(B @ A, change, rtol=0, atol=1e-6)


class Built(Labelling):
    """What a recipe names: the module of `start`, with the draws of the process that it is built in."""

    def __init__(self, form: str = "wrapped"):
        torch.manual_seed(0)
        own = bert()
        config = peft().LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS[bert], modules_to_save=[HEADS[bert]])
        super().__init__(peft().get_peft_model(own, config) if form == "wrapped" else own)


@nightly_except("ours-True")
@pytest.mark.slow
@pytest.mark.parametrize(("form", "trained"), [("wrapped", True), ("ours", True), ("wrapped", False)])
def test_the_command_builds_what_the_run_began_with(tmp_path, capsys, form, trained):
    _, callbacks, base = start(bert, form)
    module = Built(form)
    loop = FederatedLoop(FedLoRA(lora.FedEx()), partition=FromIndices(CLIENTS), summary=False)
    callbacks = [*callbacks, loop, *([TrainedCheckpoints()] if trained else [])]
    run = trainer(tmp_path, *callbacks, max_epochs=2, limit_val_batches=0)
    fit(run, module, DataLoader(data(bert), batch_size=4))
    checkpoint, folder, recipe = (tmp_path / name for name in ("run.ckpt", "adapter", "recipe.yaml"))
    run.save_checkpoint(checkpoint)
    recipe.write_text(f"model: {{class_path: {__name__}.Built, init_args: {{form: {form}}}}}\n")
    words = ["export", str(checkpoint), str(folder), "--format", "peft"]
    with pytest.raises(SystemExit, match="--config"):
        cli.main(words)
    assert not folder.exists()
    cli.main([*words, "--config", str(recipe)])
    assert f"wrote {folder}" in capsys.readouterr().out
    check(bert, module, base, folder)
    if trained:
        # A base with other weights than those that checkpoints leave out is refused.
        recipe.write_text(f"model: {{class_path: {__name__}.Other, init_args: {{form: {form}}}}}\n")
        with pytest.raises(SystemExit, match="to other frozen weights than the module has"):
            cli.main([*words, "--config", str(recipe)])


class Other(Built):
    def __init__(self, form: str = "wrapped"):
        super().__init__(form)
        with torch.no_grad():
            for value in self.parameters():
                value.add_(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedSB(), Ravan()], ids=repr)
def test_the_adapters_of_methods_with_cores(tmp_path, algorithm):
    torch.manual_seed(0)
    base = bert()
    module = Labelling(copy.deepcopy(base))
    low_rank = LowRank(
        CoreProduct() if isinstance(algorithm, FedSB) else CoreProduct(heads=2),
        rank=2,
        include=TARGETS[bert],
        keep_trained=[HEADS[bert]],
        freeze_rest=True,
        allow_larger=True,
        summary=False,
    )
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False)
    run = trainer(tmp_path, low_rank, loop, max_epochs=4, limit_val_batches=0)
    fit(run, module, DataLoader(data(bert), batch_size=4))
    run.save_checkpoint(tmp_path / "run.ckpt")
    check(bert, module, base, export_adapter(module, tmp_path / "adapter"))
    check(bert, module, base, adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "from_checkpoint"))


@pytest.mark.parametrize("init", ["pissa", True])
def test_what_cannot_be_part_of_the_adapter_is_refused(tmp_path, init):
    """What PEFT itself changed of the base weights is told from the network as it was, as what rounds changed is."""
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    config = peft().LoraConfig(r=2, lora_alpha=4, target_modules=["0"], init_lora_weights=init)
    wrapped = peft().get_peft_model(copy.deepcopy(net), config).eval()
    if init == "pissa":
        with pytest.raises(MisconfigurationException, match="init_lora_weights='pissa'"):
            export_adapter(wrapped, tmp_path / "adapter")
    inputs = torch.randn(7, 6)
    export_adapter(wrapped, tmp_path / "adapter", base=net)
    loaded = peft().PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(inputs), wrapped(inputs), rtol=1e-5, atol=1e-5)
    wrapped.train()(inputs)
    with pytest.raises(MisconfigurationException, match=r"1.*running_mean.*1"):
        export_adapter(wrapped, tmp_path / "other", base=net)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_base_weight_that_has_changed_is_told_from_its_layer(tmp_path, resumed):
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    wrapped = peft().get_peft_model(copy.deepcopy(net), peft().LoraConfig(r=2, target_modules=["0"]))
    adapters = find_adapters(wrapped)
    if resumed:
        changes = BaseChanges(lora.FLoRA())
        changes.adapters = Adapters(adapters)
        export_adapter(wrapped, tmp_path / "before")
        changes.configure(Base(wrapped, seed=0, state={"folded": True}))
    else:
        adapters["base_model.model.0"].fold(torch.ones(5, 6))
    with pytest.raises(MisconfigurationException, match="folded into the frozen weights of 0, so"):
        export_adapter(copy.deepcopy(wrapped), tmp_path / "other")
    export_adapter(wrapped, tmp_path / "whole", base=net)
    # The merged network is the base of another adapter.
    again = peft().get_peft_model(wrapped.merge_and_unload(), peft().LoraConfig(r=2, target_modules=["0"]))
    export_adapter(again, tmp_path / "again")


@pytest.mark.parametrize(("norm", "named"), [(nn.LayerNorm, r"1\.weight, 1\.bias"), (nn.BatchNorm1d, "1.running_mean")])
def test_what_is_trained_outside_of_the_adapter_is_not_left_out(tmp_path, norm, named):
    net = nn.Sequential(nn.Linear(6, 5), norm(5), nn.Linear(5, 4))
    settings = {"r": 2, "target_modules": ["0"]}
    wrapped = peft().get_peft_model(copy.deepcopy(net), peft().LoraConfig(**settings))
    wrapped.base_model.model[1].requires_grad_(norm is nn.LayerNorm)
    with pytest.raises(MisconfigurationException, match=rf"{named}.*modules_to_save"):
        export_adapter(Labelling(wrapped), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    export_adapter(Labelling(wrapped), tmp_path / "base", base=net)
    saved = peft().get_peft_model(net, peft().LoraConfig(**settings, modules_to_save=["1"]))
    export_adapter(Labelling(saved), tmp_path / "saved")


def test_what_is_trained_outside_of_the_wrapped_model_is_told(tmp_path, recwarn):
    wrapped = peft().get_peft_model(nn.Sequential(nn.Linear(6, 5)), peft().LoraConfig(r=2, target_modules=["0"]))
    module = Labelling(wrapped)
    export_adapter(module, tmp_path / "whole")
    assert not [each for each in recwarn if "outside" in str(each.message)]
    module.head = nn.Linear(5, 2)
    with pytest.warns(UserWarning, match=r"head\.weight, head\.bias.*outside"):
        export_adapter(module, tmp_path / "part")


def from_checkpoint(tmp_path, module, new):
    """Return the folder that is written from a checkpoint, with a new module of the same kind."""
    run = trainer(tmp_path, max_epochs=0)
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "run.ckpt")
    return adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "from_checkpoint", module=new)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "OLoRA"])
def test_a_checkpoints_adapter_is_on_the_weights_of_before_peft_took_a_part_of_them(tmp_path, init):
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))

    def wrapped():
        torch.manual_seed(0)
        config = peft().LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"], init_lora_weights=init)
        return peft().get_peft_model(copy.deepcopy(net), config)

    module = Labelling(perturbed(wrapped()))
    folder = from_checkpoint(tmp_path, module, Labelling(wrapped()))
    inputs = torch.randn(7, 6)
    loaded = peft().PeftModel.from_pretrained(copy.deepcopy(net), folder).eval()
    torch.testing.assert_close(loaded(inputs), module.network.eval()(inputs), rtol=1e-5, atol=1e-5)
    assert (loaded(inputs) - net(inputs)).abs().max() > 0.1
    new = wrapped()
    # What PEFT quantises cannot be told from the adapters.
    new.peft_config["default"].init_lora_weights = "loftq"
    with pytest.raises(MisconfigurationException, match=r"init_lora_weights='loftq' changed .* base=pretrained"):
        from_checkpoint(tmp_path, module, Labelling(new))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("PromptTuning", {"num_virtual_tokens": 2, "task_type": "SEQ_CLS"}),
        ("PromptEncoder", {"num_virtual_tokens": 2, "task_type": "SEQ_CLS"}),
        ("LoHa", {"target_modules": ["query"], "r": 2}),
        ("LNTuning", {"target_modules": ["LayerNorm"]}),
    ],
)
def test_what_other_methods_train_is_written(tmp_path, method, settings):
    base = bert()
    # There is room for the prompt's tokens.
    base.bert.embeddings.position_embeddings = nn.Embedding(12, 8)
    base.bert.embeddings.position_ids = torch.arange(12)[None]
    base.bert.embeddings.token_type_ids = torch.zeros(1, 12, dtype=torch.long)

    def wrapped():
        torch.manual_seed(0)
        config = getattr(peft(), f"{method}Config")(**settings)
        return peft().get_peft_model(copy.deepcopy(base), config)

    module = Labelling(wrapped())
    run = trainer(tmp_path, TrainedCheckpoints(), max_epochs=1, limit_val_batches=0)
    fit(run, module, DataLoader(data(bert), batch_size=4))
    perturbed(module)
    run.save_checkpoint(tmp_path / "run.ckpt")
    folders = [
        export_adapter(module, tmp_path / "alone"),
        export_adapter(module, tmp_path / "base", base=base),
        adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "from_checkpoint", module=Labelling(wrapped())),
    ]
    for folder in folders:
        check(bert, module, base, folder)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_trained_biases_are_written(tmp_path, bias):
    net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4))

    def wrapped():
        torch.manual_seed(0)
        return peft().get_peft_model(copy.deepcopy(net), peft().LoraConfig(r=2, target_modules=["0"], bias=bias))

    module = Labelling(perturbed(wrapped()))
    folders = [
        export_adapter(module, tmp_path / "alone"),
        export_adapter(module, tmp_path / "base", base=net),
        from_checkpoint(tmp_path, module, Labelling(wrapped())),
    ]
    inputs = torch.randn(7, 6)
    for folder in folders:
        loaded = peft().PeftModel.from_pretrained(copy.deepcopy(net), folder).eval()
        torch.testing.assert_close(loaded(inputs), module.network.eval()(inputs), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        module.network.base_model.model[1].weight.add_(1)
    with pytest.raises(MisconfigurationException, match=r"1.*PEFT"):
        export_adapter(module, tmp_path / "other", base=net)


def test_the_active_one_of_a_transformers_models_adapters_is_written(tmp_path):
    base = bert()
    wrapped = peft().get_peft_model(copy.deepcopy(base), peft().LoraConfig(r=2, target_modules=["query"]))
    wrapped.add_adapter("second", peft().LoraConfig(r=3, target_modules=["value"], init_lora_weights=False))
    wrapped.set_adapter("second")
    export_adapter(Labelling(wrapped), tmp_path / "adapter", base=base)
    check(bert, Labelling(wrapped), base, tmp_path / "adapter")
    assert config_of(tmp_path / "adapter")["r"] == 3


def test_one_of_several_adapters_is_written(tmp_path):
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    config = peft().LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    wrapped = peft().get_peft_model(copy.deepcopy(net), config)
    wrapped.add_adapter("second", peft().LoraConfig(r=3, target_modules=["1"], init_lora_weights=False))
    inputs = torch.randn(7, 6)
    for name, rank in (("default", 2), ("second", 3)):
        wrapped.set_adapter(name)
        for adapter in (None, name):
            assert config_of(export_adapter(wrapped, tmp_path / name, base=net, adapter=adapter))["r"] == rank
        loaded = peft().PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / name)
        torch.testing.assert_close(loaded(inputs), wrapped(inputs))
    with pytest.raises(MisconfigurationException, match="'third'"):
        export_adapter(wrapped, tmp_path / "third", adapter="third")
    with pytest.raises(MisconfigurationException, match="is for a model that PEFT wrapped"):
        export_adapter(net, tmp_path / "third", adapter="third")


class Causal(Labelling):
    def training_step(self, batch, batch_idx):
        tokens, _ = batch
        return self.network(input_ids=tokens, labels=tokens).loss


@pytest.mark.slow
@each_of(3)
@pytest.mark.parametrize("tying", [False, True])
@pytest.mark.parametrize(
    ("form", "operator"),
    [
        ({"target_modules": ["embed_tokens", "q_proj"]}, "ProductSum"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "SumProduct"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "FedSA"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "FLoRA"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "FLoRA"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "FedEx"),
    ],
)
def test_tied_embeddings(tmp_path, form, operator, tying):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sides = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = LlamaConfig(**sides, num_hidden_layers=1, tie_word_embeddings=True, use_cache=False, initializer_range=0.3)
    base = LlamaForCausalLM(config)
    config = peft().LoraConfig(r=2, lora_alpha=2, ensure_weight_tying=tying, **form)
    module = Causal(peft().get_peft_model(copy.deepcopy(base), config))
    loop = FederatedLoop(FedLoRA(getattr(lora, operator)()), partition=FromIndices(CLIENTS), summary=False)
    run = trainer(tmp_path, loop, max_epochs=2, limit_val_batches=0)
    loader = DataLoader(data(bert), batch_size=4)
    if operator == "FLoRA" and "embed_tokens" in form["target_modules"]:
        with pytest.raises(MisconfigurationException, match=r"network\.base_model\.model\.model\.embed_tokens"):
            fit(run, module, loader)
        return
    if operator == "FedSA" and tying:
        # PEFT lays the head's B into the embedding's A.
        with pytest.raises(MisconfigurationException, match=r"(?s)lm_head\.lora_\w.*embed_tokens\.lora_embedding_\w"):
            fit(run, module, loader)
        return
    fit(run, module, loader)
    export_adapter(module, tmp_path / "adapter", base=base)
    check(bert, module, base, tmp_path / "adapter")
