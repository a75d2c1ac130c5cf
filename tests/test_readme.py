"""The README's commands and code are the ones that run."""

import re
from pathlib import Path

import pytest
import yaml
from torch import nn

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_ci_runs_the_readmes_test_command():
    commands = [line for block in blocks("bash") for line in block.splitlines() if " pytest" in line]
    assert len(commands) == 1
    steps = commands[0].split(" && ")
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert all(step in script for step in steps[2:])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rounds", "accuracy"), [(1, 0.1), pytest.param(10, 0.7, marks=pytest.mark.slow)])
def test_the_python_example_runs(tmp_path, monkeypatch, capsys, rounds, accuracy):
    import lightning as L

    monkeypatch.chdir(tmp_path)
    trainer = L.Trainer
    monkeypatch.setattr(L, "Trainer", lambda max_epochs, **arguments: trainer(max_epochs=rounds, **arguments))
    namespace: dict = {}
    exec(blocks("python")[0], namespace)
    assert namespace["trainer"].callback_metrics["val_acc"] > accuracy
    assert namespace["trainer"].callback_metrics["comm/ratio"] < 1 / 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_layer_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, resnet, fine_tune, optimizer, *_ = blocks("python")
    namespace: dict = {}
    exec(resnet, namespace)
    printed = capsys.readouterr().out
    table = next(block for block in README.split("```")[1::2] if "layer4.2.conv3" in block)
    for line in table.strip().splitlines():
        assert line == "…" or line in printed
    exec(fine_tune, namespace)
    printed = capsys.readouterr().out
    trained, factorised, tuned = (namespace[name] for name in ("trained", "factorised", "tuned"))
    assert trained > 0.97
    assert factorised > 0.9
    assert tuned > trained - 0.015
    assert type(namespace["module"].network.classifier) is nn.Linear
    exec(optimizer, namespace)
    module = namespace["MyModule"](namespace["MLP"](in_features=64, hidden=[32], out_features=10))
    trainer = namespace["L"].Trainer(fast_dev_run=2)
    trainer.fit(module, namespace["data"])
    state = trainer.optimizers[0].state
    assert state[module.network.hidden[0].weight]["exp_avg"].shape == (32, 16)
    assert state[module.network.classifier.weight]["exp_avg"].shape == (10, 32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_lora_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    channels, federated, operator, _ = blocks("python")[4:]
    namespace: dict = {}
    exec(channels, namespace)
    assert [type(codec).__name__ for codec in namespace["loop"].uplink] == ["TopK", "Half"]
    exec(federated, namespace)
    figures = namespace["trainer"].callback_metrics
    assert figures["convergence/R"] > 0
    assert figures["comm/up_bytes"] > 0
    capsys.readouterr()
    exec(operator, {})
    assert capsys.readouterr().out == "torch.Size([768, 768]) 10\n"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_example_with_a_pretrained_network_runs(tmp_path, monkeypatch):
    """On random weights and made-up images of the right shape, for a round of two batches."""
    import lightning as L
    import torch
    import torchvision

    from lightning_lowrank.data import CIFAR10

    monkeypatch.chdir(tmp_path)
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(256, (400, 3, 32, 32), dtype=torch.uint8, generator=draws)
    monkeypatch.setattr(CIFAR10, "prepare_data", lambda self: None)
    monkeypatch.setattr(CIFAR10, "load_images", lambda self, train: (images, torch.arange(400) % 10))
    network, trainer = torchvision.models.resnet18, L.Trainer
    monkeypatch.setattr(torchvision.models, "resnet18", lambda weights: network())
    monkeypatch.setattr(L, "Trainer", lambda **arguments: trainer(**arguments, fast_dev_run=2))
    namespace: dict = {}
    exec(blocks("python")[7], namespace)
    assert namespace["network"].fc.weight.requires_grad
    assert not namespace["network"].conv1.frozen_weight.requires_grad
    assert namespace["trainer"].callback_metrics["comm/ratio"] < 0.1


def test_every_method_stands_in_the_table():
    from lightning_lowrank import algorithms

    table = README.split("## The methods")[1].split("## Bytes")[0]
    assert all(f"`{name}`" in table for name in algorithms.__all__)


@pytest.mark.slow
def test_the_yaml_example_runs(tmp_path, monkeypatch):
    from lightning_lowrank.cli import main

    monkeypatch.chdir(tmp_path)
    config = tmp_path / "example.yaml"
    config.write_text(blocks("yaml")[0])
    assert set(yaml.safe_load(config.read_text())) == {"federated", "lowrank", "model", "data", "trainer"}
    main(["fit", "--config", str(config), "--trainer.fast_dev_run", "2"])


def test_every_path_in_the_readme_exists():
    paths = re.findall(r"(?:recipes|tests)/[\w/]+\.(?:yaml|py|md)", README)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
