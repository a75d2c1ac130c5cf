"""Modules that PEFT wrapped, as they are: they train as the same adapters of ours do, and PEFT saves what came out."""

import copy
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowrank import (
    FFA,
    FedAvg,
    FederatedLoop,
    FedEx,
    FedLoRA,
    FedSA,
    FLoRA,
    FromIndices,
    ProductSum,
    SumProduct,
    export_adapter,
    import_adapter,
)
from lightning_lowrank.federated.ledger import dense_bytes
from lightning_lowrank.layers import low_rank_layers
from tests.grids import nightly_except
from tests.helpers import Data, Module, blobs, fit, trainer

CLIENTS = [list(range(12)), list(range(12, 20)), list(range(20, 32))]


@pytest.fixture(scope="module", autouse=True)
def peft():
    pytest.importorskip("transformers", reason="transformers is not installed")
    return pytest.importorskip("peft", reason="PEFT is not installed")


class Labelling(pl.LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, inputs):
        # Without a mask GPT-2 looks for padding; with one BERT asks whether it masks anything. Neither can be mapped
        # over clients.
        causal = any(type(part).__name__ == "GPT2Model" for part in self.network.modules())
        outputs = self.network(inputs, attention_mask=torch.ones_like(inputs)) if causal else self.network(inputs)
        return getattr(outputs, "logits", outputs)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return nn.functional.cross_entropy(self(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=0.2)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
    config = BertConfig(
        vocab_size=15,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=6,
        num_labels=3,
        **settings,
    )
    return BertForSequenceClassification._from_config(config, attn_implementation="eager")


def gpt():
    from transformers import GPT2Config, GPT2ForSequenceClassification

    settings = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": 0.3}
    config = GPT2Config(
        vocab_size=15, n_positions=6, n_embd=8, n_layer=1, n_head=2, num_labels=3, pad_token_id=0, **settings
    )
    return GPT2ForSequenceClassification._from_config(config, attn_implementation="eager")


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)
    )


def data(network):
    draws = torch.Generator().manual_seed(5)
    labels = torch.randint(3, (32,), generator=draws)
    if network is convolutions:
        return TensorDataset(torch.randn(32, 2, 3, 3, generator=draws) + labels[:, None, None, None], labels)
    return TensorDataset(torch.randint(1, 5, (32, 6), generator=draws) + 5 * labels[:, None], labels)


TARGETS = {
    bert: {"target_modules": ["query", "value", "word_embeddings"], "task_type": "SEQ_CLS"},
    gpt: {"target_modules": ["c_attn", "c_fc"], "task_type": "SEQ_CLS"},
    convolutions: {"target_modules": ["0", "2"], "modules_to_save": ["5"]},
}


class Named(nn.Module):
    """Holds a network under the name that it has in PEFT's model: seeds of layers come from their names."""

    def __init__(self, network):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = network

    def forward(self, *inputs, **masks):
        return self.base_model.model(*inputs, **masks)


def pair(peft, folder, network, **settings):
    """Return a module that holds PEFT's model, and one with our layers and the same numbers."""
    torch.manual_seed(0)
    base = network()
    given = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **TARGETS[network], **settings}
    wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**given))
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return Labelling(wrapped), import_adapter(folder, Labelling(Named(base)), prefix="network.base_model.model")


def run(folder, module, algorithm, network, **settings):
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), **settings)
    wire = {"up": {}, "down": {}}
    begin, end = algorithm.begin, algorithm.end

    def count(direction, message):
        names = wire[direction]
        for tensor, value in message.tensors.items():
            names[tensor] = names.get(tensor, 0) + value.numel()
        return message

    algorithm.begin = lambda client, message: begin(client, count("down", message))
    algorithm.end = lambda client: count("up", end(client))
    used = trainer(folder, loop, max_epochs=2, limit_val_batches=0)
    fit(used, module, DataLoader(data(network), batch_size=4))
    return used, loop, wire


CASES = [
    (bert, ProductSum(), {}),
    (bert, SumProduct(), {"levels": (1.0, 0.5)}),
    (bert, FLoRA(), {}),
    (bert, FFA(), {}),
    (bert, FedSA(), {}),
    (gpt, FedEx(), {}),
    (convolutions, SumProduct(), {"levels": (1.0, 0.5)}),
    *(
        pytest.param(network, operator, {}, marks=pytest.mark.slow)
        for network, operator in (
            (bert, FedEx()),
            (gpt, SumProduct()),
            (gpt, FLoRA()),
            (convolutions, ProductSum()),
            (convolutions, FedEx()),
            (convolutions, FLoRA()),
        )
    ),
]


@nightly_except("bert-case0-case0", "gpt-case9-case9")
@pytest.mark.slow
@pytest.mark.parametrize(("network", "operator", "settings"), CASES)
def test_a_wrapped_module_trains_as_our_own_layers_do(peft, tmp_path, network, operator, settings):
    theirs, ours = pair(peft, tmp_path / "start", network)
    start = copy.deepcopy(theirs)
    inputs = data(network).tensors[0]
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(inputs), ours.eval()(inputs), rtol=1e-4, atol=1e-5)
        before = theirs(inputs)
    together = copy.deepcopy(theirs)
    dense = [dense_bytes(Labelling(network())), dense_bytes(Labelling(Named(network())))]
    assert [dense_bytes(theirs), dense_bytes(ours)] == dense
    _, _, own_wire = run(tmp_path, ours, FedLoRA(operator, **settings), network)
    used, _, wire = run(tmp_path, theirs, FedLoRA(operator, **settings), network)
    with torch.no_grad():
        after = theirs.eval()(inputs)
        torch.testing.assert_close(after, ours.eval()(inputs), rtol=1e-3, atol=1e-4)
    assert (after - before).abs().max() > 0.05

    # Only factors, and what modules_to_save names, cross the wire, as many numbers as ours.
    names = {name for names in wire.values() for name in names if ".change." not in name}
    assert all(".lora_" in name or ".modules_to_save.default." in name for name in names), names
    assert any(".modules_to_save." in name for name in wire["up"])
    assert {way: sum(names.values()) for way, names in wire.items()} == {
        way: sum(names.values()) for way, names in own_wire.items()
    }
    frozen = {name for name, value in theirs.named_parameters() if not value.requires_grad}
    untouched = all(torch.equal(theirs.get_parameter(name), start.get_parameter(name)) for name in frozen)
    assert untouched == (not isinstance(operator, (FLoRA, FedEx)))

    # Clients that step together end where clients one after another do, where the network itself can be mapped, which
    # depends on transformers' version.
    refused = ""
    try:
        _, loop, _ = run(tmp_path, together, FedLoRA(operator, **settings), network, execution="vectorized")
    except MisconfigurationException as error:
        refused = str(error)
    if not refused:
        assert loop.state_dict()["execution"] == "vectorized"
        with torch.no_grad():
            torch.testing.assert_close(together.eval()(inputs), after, rtol=1e-3, atol=1e-4)
    assert not refused or (network is not convolutions and "cannot map training_step over clients" in refused)

    # PEFT saves the model as it saves its own.
    theirs.network.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    base = copy.deepcopy(theirs.network).unload()
    again = Labelling(peft.PeftModel.from_pretrained(base, tmp_path / "saved")).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(inputs), after, rtol=1e-5, atol=1e-5)
    if untouched:
        imported = import_adapter(tmp_path / "saved", Labelling(copy.deepcopy(start.network).unload()))
        with torch.no_grad():
            torch.testing.assert_close(imported.eval()(inputs), after, rtol=1e-3, atol=1e-4)
    used.save_checkpoint(tmp_path / "run.ckpt")
    resumed = copy.deepcopy(start)
    resumed.load_state_dict(torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"])
    with torch.no_grad():
        torch.testing.assert_close(resumed.eval()(inputs), after, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_client_of_half_the_rank_has_the_scaling_of_its_rank(peft, tmp_path):
    theirs, _ = pair(peft, tmp_path / "start", convolutions)
    seen = {}

    class Watched(Labelling):
        def training_step(self, batch, batch_idx):
            layer = self.network.base_model.model[0]
            rank = int((layer.lora_B["default"].weight != 0).flatten(1).any(0).sum())
            seen.setdefault(rank, set()).add(layer.scaling["default"])
            return super().training_step(batch, batch_idx)

    module = Watched(theirs.network)
    run(tmp_path, module, FedLoRA(SumProduct(), levels=(1.0, 0.5)), convolutions)
    assert seen == {4: {6 / 4}, 2: {6 / 2}}
    assert module.network.base_model.model[0].scaling == {"default": 6 / 4}


@pytest.mark.slow
def test_what_cannot_be_trained_says_why(peft, tmp_path):
    theirs, _ = pair(peft, tmp_path / "start", bert)
    with pytest.raises(MisconfigurationException, match=r"'other'.*PEFT.*'default'"):
        run(tmp_path, theirs, FedLoRA(ProductSum(), adapter="other"), bert)
    theirs.network.add_adapter("other", peft.LoraConfig(r=1, target_modules=["query"]))
    with pytest.raises(MisconfigurationException, match=r"attention\.self\.query\.lora_A\.other\.weight"):
        run(tmp_path, theirs, FedLoRA(ProductSum(), adapter="other"), bert)
    for name, value in theirs.network.named_parameters():
        value.requires_grad_(value.requires_grad or "lora_" in name)
    with pytest.raises(MisconfigurationException, match=r"'default'.*\.other\.weight.*'other'.*set_adapter\('default'"):
        run(tmp_path, theirs, FedLoRA(ProductSum(), adapter="default"), bert)
    with pytest.raises(MisconfigurationException, match=r"adapter='other'.*\['default'\].*set_adapter\('other'\)"):
        run(tmp_path, theirs, FedLoRA(ProductSum(), adapter="other"), bert)
    theirs.network.set_adapter("other")
    run(tmp_path, theirs, FedLoRA(ProductSum(), adapter="other"), bert)
    zero, _ = pair(peft, tmp_path / "zero", bert, init_lora_weights=True)
    with pytest.raises(MisconfigurationException, match=r"word_embeddings', A, is zero"):
        run(tmp_path, zero, FedLoRA(FFA()), bert)
    wide = Labelling(peft.get_peft_model(bert(), peft.LoraConfig(r=4, target_modules="all-linear")))
    with pytest.raises(MisconfigurationException, match=r"network\.base_model\.model\.classifier.*rank.*4"):
        run(tmp_path, wide, FedLoRA(ProductSum()), bert)


OTHERS = {
    "AdaLoraConfig": {"total_step": 10},
    "IA3Config": {"feedforward_modules": []},
    "LoHaConfig": {},
    "LoKrConfig": {},
    "VeraConfig": {},
    "RandLoraConfig": {},
    "LoraConfig": {"use_dora": True},
    "OFTConfig": {"oft_block_size": 2, "r": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("config", OTHERS)
def test_other_methods_of_peft_are_averaged_and_nothing_frozen_is_sent(peft, tmp_path, config):
    torch.manual_seed(0)
    net = nn.ModuleDict({"body": nn.Linear(6, 4), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 4)})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = copy.deepcopy(net)

        def forward(self, inputs):
            return self.parts["head"](self.parts["norm"](torch.tanh(self.parts["body"](inputs))))

    base = Model()
    given = {"target_modules": ["body"], "modules_to_save": ["norm", "head"], **OTHERS[config]}
    module = Module(peft.get_peft_model(copy.deepcopy(base), getattr(peft, config)(**given)))
    if config not in ("LoraConfig",):
        with pytest.raises(MisconfigurationException, match=r"PEFT.*LoRA.*peft\.LoraConfig"):
            fit(trainer(tmp_path, FederatedLoop(FedLoRA(ProductSum()), clients=2, summary=False)), module, Data())
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    sent = []
    loop.algorithm.end, end = lambda client: (sent.append(end(client)), sent[-1])[1], loop.algorithm.end
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    fit(trainer(tmp_path, loop, max_epochs=2, limit_val_batches=0), module, Data())
    names = set(sent[0].tensors)
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    statistics = {name for name in before if ".modules_to_save." in name and "norm" in name}
    assert trained <= names <= trained | statistics
    # All of it moves, and nothing else.
    after = module.state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved <= names
    assert any(name in moved for name in trained - statistics if ".head." not in name)

    # PEFT's own folder, and ours, hold all of it.
    module.net.save_pretrained(tmp_path / "theirs")
    inputs = torch.randn(9, 6)
    for folder in (tmp_path / "theirs", export_adapter(module, tmp_path / "ours", base=base)):
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(inputs), module.net.eval()(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [SumProduct(), FLoRA(), FedEx()], ids=repr)
def test_the_direction_of_dora_is_the_operators(peft, tmp_path, operator):
    """Where every magnitude is the same, the mean of directions is that of the products."""
    torch.manual_seed(0)
    base = convolutions()
    given = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": ["2"], "use_dora": True}
    module = Labelling(peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**given)))
    layer = module.network.base_model.model[2]
    seen = []
    algorithm = FedLoRA(operator)
    algorithm.observers.append(seen.append)
    start = layer.lora_magnitude_vector["default"].weight.detach().clone()
    own = []
    end = algorithm.end
    algorithm.end = lambda client: (own.append(layer.lora_magnitude_vector["default"].weight.clone()), end(client))[1]
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False)
    weight = layer.get_base_layer().weight.detach().clone()
    fit(
        trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), module, DataLoader(data(convolutions), batch_size=4)
    )
    sizes = torch.tensor([len(each) for each in CLIENTS]) / 32
    magnitude = layer.lora_magnitude_vector["default"].weight
    torch.testing.assert_close(magnitude, sum(size * each for size, each in zip(sizes, own, strict=True)))
    assert not torch.equal(magnitude, start)
    mean = sum(
        size * pair.product() for size, pairs in zip(sizes, seen[0].pairs, strict=True) for pair in pairs.values()
    )
    if operator.redraws:
        # What was drawn at the start went into the base weight.
        mean = (
            mean
            + (layer.get_base_layer().weight - weight).flatten(1)
            - next(iter(seen[0].broadcasts.values())).change.product()
        )
    now = (layer.get_base_layer().weight - weight).flatten(1) + layer.get_delta_weight("default").flatten(1)
    torch.testing.assert_close(now, mean, rtol=1e-4, atol=1e-5)
    export_adapter(module, tmp_path / "adapter", base=base)
    loaded = Labelling(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter"))
    inputs = data(convolutions).tensors[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(inputs), module.eval()(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fast", "targets", "told"), [(True, "linear1", 1), (True, "self_attn", 1), (False, "linear1", 0)]
)
def test_a_layer_that_torch_evaluates_without_adapters(peft, tmp_path, recwarn, fast, targets, told):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    network = nn.Sequential(nn.Unflatten(1, (1, 16)), layer, nn.Flatten(), nn.Linear(16, 4))
    config = peft.LoraConfig(target_modules=[targets], r=2, init_lora_weights=False)
    module = Module(peft.get_peft_model(network, config))
    inputs = blobs(features=16).tensors[0]
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        loop = FederatedLoop(FedAvg(), clients=2, summary=False)
        trainer(tmp_path, loop, max_epochs=1).fit(module, DataLoader(blobs(features=16), batch_size=8))
        with torch.no_grad():
            trained, evaluated = module.train().net(inputs), module.eval().net(inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    # What the warning says of torch.
    assert torch.allclose(trained, evaluated, atol=1e-5) == (told == 0)
    assert sum("by the base weights, without the adapters" in str(each.message) for each in recwarn) == told


@pytest.mark.slow
def test_examples_of_this_file_hold_adapters(peft, tmp_path: Path):
    for network, count in ((bert, 3), (gpt, 2), (convolutions, 2)):
        _, ours = pair(peft, tmp_path / network.__name__, network)
        assert len(list(low_rank_layers(ours))) == count
