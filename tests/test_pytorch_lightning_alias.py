"""Libraries that import `pytorch_lightning` get `lightning.pytorch` after `alias_pytorch_lightning`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# What a library may do with the package, each in its own process: an import cannot be undone.
LIBRARY = """
import pytorch_lightning as pl
import pytorch_lightning.callbacks.early_stopping
import torch
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn


class Older(pl.LightningModule):
    def __init__(self, features: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(features, 2)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OlderData(pl.LightningDataModule):
    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 2)
        return torch.utils.data.DataLoader(data, batch_size=2)
"""


def run(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess:
    (folder / "older_library.py").write_text(LIBRARY)
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.nightly
def test_it_is_the_newer_package_itself(tmp_path):
    script = """
from lightning_lowrank import alias_pytorch_lightning
alias_pytorch_lightning()
alias_pytorch_lightning()
import lightning.fabric, lightning.pytorch as pl
import older_library as library
assert library.pl is pl and library.Trainer is pl.Trainer
assert library.pl.callbacks.early_stopping.EarlyStopping is pl.callbacks.EarlyStopping
assert library.seed_everything is lightning.fabric.seed_everything
for module in (pl, pl.callbacks, pl.callbacks.early_stopping, lightning.fabric):
    assert module.__spec__.name == module.__name__
try:
    import pytorch_lightning.no_such_part
except ModuleNotFoundError as error:
    assert "pytorch_lightning.no_such_part" in str(error)
else:
    raise AssertionError
from lightning_lowrank import IID, FedAvg, FederatedLoop
loop = FederatedLoop(FedAvg(), clients=3, partition=IID(), summary=False)
trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[loop], accelerator="cpu")
trainer.fit(library.Older(), library.OlderData())
assert trainer.callback_metrics["federated/clients"] == 3
"""
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_the_command_line_takes_older_modules(tmp_path):
    words = ["fit", "--model", "older_library.Older", "--data", "older_library.OlderData", "--trainer.max_epochs", "1"]
    words += ["--federated.algorithm", "FedAvg", "--federated.clients", "3", "--trainer.accelerator", "cpu"]
    done = run(tmp_path, "from lightning_lowrank.cli import main; main()", *words)
    assert done.returncode == 0, done.stderr
    assert "after 1 round" in done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning_fabric"])
def test_it_comes_before_the_older_package(tmp_path, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    script = f"import {name}\nfrom lightning_lowrank import alias_pytorch_lightning\nalias_pytorch_lightning()"
    assert f"{name} has been imported already: call alias_pytorch_lightning() before it" in run(tmp_path, script).stderr
