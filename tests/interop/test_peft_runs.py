"""Adapters of federated runs: from the module, from the checkpoint and by the command."""

import copy

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
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
    export_adapter,
)
from lightning_lowrank.interop.checkpoints import adapter_checkpoint
from tests.helpers import Data, Module, fit, network, trainer
from tests.interop.helpers import (
    LORA,
    config_of,
    peft,
    same_function,
)

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
