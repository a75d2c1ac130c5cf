"""Adapters of federated runs: from the module, from the checkpoint and by the command."""

import copy
import warnings

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
    FLoRA,
    FromIndices,
    LowRank,
    MatrixProduct,
    ProductSum,
    cli,
    export_adapter,
)
from lightning_lowrank.interop.checkpoints import adapter_checkpoint
from lightning_lowrank.layers import low_rank_layers
from tests.helpers import Data, Module, fit, network, trainer
from tests.interop.helpers import LORA, config_of, peft, same_function

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_clients_own_adapter(tmp_path, capsys):
    base, module = federated(tmp_path, FedSA())
    cli.main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "own"), "--format", "peft", "--client", "1"])
    own = torch.load(tmp_path / "run.ckpt", weights_only=True)["callbacks"]["FederatedLoop"]["server"]["clients"][1][
        "personal"
    ]
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


@pytest.mark.slow
def test_what_no_adapter_can_be_is_refused_first(tmp_path):
    module = Module(network())
    lowrank = LowRank(BlockKronecker(), rank=1, role="update", summary=False)
    run = trainer(tmp_path, lowrank, FederatedLoop(FedMUD(), clients=2, summary=False), max_epochs=2)
    fit(run, module, Data())
    run.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(MisconfigurationException, match=r"PEFT.*net\.0.*factorization.*grid=False"):
        export_adapter(module, tmp_path / "folder")
    with pytest.raises(SystemExit, match=r"PEFT.*net\.0.*factorization.*grid=False"):
        cli.main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "folder"), "--format", "peft"])


@pytest.mark.slow
@pytest.mark.parametrize("operator", [FedEx(), FedMUD()], ids=["FedEx", "FedMUD"])
def test_runs_that_changed_the_frozen_weights_are_refused(tmp_path, operator):
    base, module = federated(tmp_path, operator)
    name = "FedMUD" if isinstance(operator, FedMUD) else "FedLoRA"
    said = rf"{name} with this operator or setting folds updates into the frozen weights.*base=pretrained_network"
    with pytest.raises(MisconfigurationException, match=said):
        export_adapter(module, tmp_path / "folder")
    with pytest.raises(SystemExit, match=said):
        cli.main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "folder"), "--format", "peft"])
    # With the network as it was, the change is part of the adapters.
    export_adapter(module, tmp_path / "whole", base=base)
    adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "from_run", module=Module(copy.deepcopy(base)))
    for name in ("whole", "from_run"):
        loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name)
        same_function(module.net, loaded, torch.randn(9, 6))
    # Also when the trainer is gone, and from the checkpoint of a later run that folds nothing.
    other = Module(copy.deepcopy(module.net))
    with pytest.raises(MisconfigurationException, match=r"folded into the frozen weights of net\.0, net\.3, so"):
        export_adapter(other, tmp_path / "folder")
    other = Module(module.net)
    other.lowrank_conversion = module.lowrank_conversion
    again = LowRank(MatrixProduct(), rank=2, alpha=4, summary=False, exclude=["net.5"], **LORA)
    run = trainer(tmp_path, again, max_epochs=1)
    fit(run, other, Data())
    run.save_checkpoint(tmp_path / "later.ckpt")
    with pytest.raises(MisconfigurationException, match="folded into the frozen weights"):
        adapter_checkpoint(tmp_path / "later.ckpt", tmp_path / "folder")
    adapter_checkpoint(tmp_path / "later.ckpt", tmp_path / "later", module=Module(copy.deepcopy(base)))
    loaded = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "later")
    same_function(other.net, loaded, torch.randn(9, 6))
    assert not (tmp_path / "folder").exists()


@pytest.mark.slow
@pytest.mark.parametrize("operator", [FLoRA(), FedEx(), ProductSum()], ids=["FLoRA", "FedEx", "ProductSum"])
def test_what_peft_would_save_without_the_changed_base(tmp_path, operator):
    """The fit says so, and each way out that messages name has the whole model."""
    base, inputs = network(), torch.randn(9, 6)
    config = peft().LoraConfig(r=2, lora_alpha=4, target_modules=["0", "2"], modules_to_save=["4"])
    module = Module(peft().get_peft_model(copy.deepcopy(base), config))
    loop = FederatedLoop(FedLoRA(operator), partition=FromIndices(CLIENTS), summary=False)
    run = trainer(tmp_path, loop, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, Data())
    run.save_checkpoint(tmp_path / "run.ckpt")
    said = [str(each.message) for each in caught if "changed base weights" in str(each.message)]
    module.net.save_pretrained(tmp_path / "adapter")
    onto_old = peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    if not operator.changes_base:
        assert not said
        same_function(module.net, onto_old, inputs)
        return
    (told,) = said
    assert "merge_and_unload() returns" in told
    assert "`lightning-lowrank export`" in told
    with torch.no_grad():
        assert not torch.allclose(onto_old.eval()(inputs), module.net.eval()(inputs), atol=1e-3)
    with pytest.raises(MisconfigurationException, match=r"folds updates into the frozen weights"):
        export_adapter(module, tmp_path / "folder")
    with pytest.raises(MisconfigurationException, match=r"PEFT.*`lightning-lowrank export`.*--config"):
        adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "folder")
    export_adapter(module, tmp_path / "folder", base=base)
    same_function(module.net, peft().PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "folder"), inputs)

    merged = network()
    merged.load_state_dict(copy.deepcopy(module.net).merge_and_unload().state_dict())
    same_function(module.net, merged, inputs)
    cli.main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "whole.safetensors"), "--prefix", "net."])
    loaded = peft().get_peft_model(copy.deepcopy(base), config)
    loaded.load_state_dict(safetensors.torch.load_file(tmp_path / "whole.safetensors"))
    same_function(module.net, loaded, inputs)


@pytest.mark.slow
def test_a_frozen_module_does_not_tell_what_was_trained(tmp_path):
    base, module = federated(tmp_path, ProductSum())
    module.freeze()
    network_alone = module.net
    with pytest.raises(MisconfigurationException, match=r"freeze\(\)"):
        export_adapter(network_alone, tmp_path / "folder")
    export_adapter(network_alone, tmp_path / "folder", base=base)
    export_adapter(module, tmp_path / "noted")
    for folder in ("folder", "noted"):
        assert config_of(tmp_path / folder)["modules_to_save"] == ["1", "5"]


class AtEpoch(pl.Callback):
    def __init__(self, **actions):
        self.actions = {int(name.removeprefix("epoch_")): action for name, action in actions.items()}

    def on_train_epoch_start(self, trainer, pl_module):
        self.actions.get(trainer.current_epoch, lambda module: None)(pl_module)


def plain_run(tmp_path, callback, module=None, epochs=3, **arguments):
    settings = {"include": ["net.0", "net.2"], "freeze_rest": isinstance(callback, AtEpoch) and 1 in callback.actions}
    lowrank = LowRank(MatrixProduct(), rank=2, summary=False, **settings, **LORA)
    module = Module() if module is None else module
    few = {"limit_train_batches": 2, "limit_val_batches": 0}
    run = trainer(tmp_path, lowrank, callback, max_epochs=epochs, **few)
    fit(run, module, Data(), **arguments)
    run.save_checkpoint(tmp_path / "run.ckpt")
    return module


@pytest.mark.slow
@pytest.mark.parametrize("resume", [False, True], ids=["one run", "resumed"])
@pytest.mark.parametrize(
    "when",
    [
        {"epoch_1": lambda module: module.net[4].requires_grad_(True)},
        {"epoch_2": lambda module: module.net[4].requires_grad_(False)},
    ],
    ids=["thawed", "frozen"],
)
def test_what_was_trained_in_a_part_of_a_run_is_exported(tmp_path, when, resume):
    module = plain_run(tmp_path, AtEpoch(**when))
    if resume:
        module = plain_run(tmp_path, AtEpoch(**when), epochs=4, ckpt_path=tmp_path / "run.ckpt")
    export_adapter(module, tmp_path / "module")
    adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "checkpoint")
    for folder in ("module", "checkpoint"):
        assert config_of(tmp_path / folder)["modules_to_save"] == ["4"]
        loaded = peft().PeftModel.from_pretrained(network(), tmp_path / folder)
        same_function(module.net, loaded, torch.randn(9, 6))


@pytest.mark.slow
def test_updates_that_are_folded_in_a_run_are_refused_from_its_checkpoints(tmp_path):
    def fold(module):
        for _, layer in low_rank_layers(module):
            layer.fold()
            layer.reset_factors(1)

    plain_run(tmp_path, AtEpoch(epoch_2=fold))
    said = r"folded into the frozen weights of net\.0, net\.2, so"
    with pytest.raises(MisconfigurationException, match=said):
        adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "folder")
    resumed = plain_run(tmp_path, AtEpoch(), epochs=4, ckpt_path=tmp_path / "run.ckpt")
    for export in (
        lambda: export_adapter(resumed, tmp_path / "folder"),
        lambda: adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "folder"),
    ):
        with pytest.raises(MisconfigurationException, match=said):
            export()
    adapter_checkpoint(tmp_path / "run.ckpt", tmp_path / "whole", module=Module())
    loaded = peft().PeftModel.from_pretrained(network(), tmp_path / "whole")
    same_function(resumed.net, loaded, torch.randn(9, 6))


def test_a_base_weight_that_was_trained_and_frozen_again_is_refused(tmp_path):
    module = Module()
    lowrank = LowRank(MatrixProduct(), rank=2, train_base=True, summary=False)
    lowrank.convert(module)
    lowrank.on_train_batch_start(None, module, None, 0)
    for _, layer in low_rank_layers(module):
        layer.frozen_weight.requires_grad_(False)
    with pytest.raises(MisconfigurationException, match="its base weight is trained as well"):
        export_adapter(module, tmp_path / "folder")


def test_statistics_outside_of_the_network_are_not_left_out(tmp_path):
    class Normed(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.before, self.body = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 3))

    module = Normed()
    LowRank(MatrixProduct(), rank=1, init="lora", freeze_rest=True, summary=False).convert(module)
    with pytest.raises(MisconfigurationException, match=r"before\.running_mean.*'body'"):
        export_adapter(module, tmp_path)


def test_checkpoints_that_do_not_describe_their_layers_are_refused(tmp_path):
    federated(tmp_path, ProductSum())
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    del checkpoint["callbacks"]
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    with pytest.raises(MisconfigurationException, match=r"bare\.ckpt"):
        adapter_checkpoint(tmp_path / "bare.ckpt", tmp_path / "folder")
    checkpoint["state_dict"]["net.0.lora_A.default.weight"] = torch.zeros(1)
    torch.save(checkpoint, tmp_path / "wrapped.ckpt")
    with pytest.raises(MisconfigurationException, match=r"wrapped\.ckpt.*PEFT"):
        adapter_checkpoint(tmp_path / "wrapped.ckpt", tmp_path / "folder")


def test_checkpoints_of_before_outlines_resume(tmp_path):
    lowrank = LowRank(MatrixProduct(), rank=1, summary=False)
    lowrank.convert(network())
    state = lowrank.state_dict()
    lowrank.load_state_dict({"layers": state["layers"]})
    with pytest.raises(MisconfigurationException, match="converted with other LowRank arguments"):
        lowrank.load_state_dict({"layers": state["layers"][1:]})
