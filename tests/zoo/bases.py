"""What several exhibits share: data drawn once, and the classifier that every tutorial begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

SAMPLES = 36
BATCH = 4
CLASSES = 4
FEATURES = 6


class Listed(Dataset):
    """Samples in a list: dictionaries, tuples, tensors of unlike sizes."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def draws(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader(dataset: Any, **arguments: Any) -> DataLoader:
    """Return a loader over the first samples that clients are given."""
    return DataLoader(dataset, batch_size=BATCH, **arguments)


def tensors(*columns: Tensor) -> DataLoader:
    return loader(TensorDataset(*(column[:TOTAL] for column in columns)))


TOTAL = 23


def images(size: int = 32, channels: int = 3) -> DataLoader:
    inputs = torch.randn(TOTAL, channels, size, size, generator=draws())
    return tensors(inputs, torch.randint(CLASSES, (TOTAL,), generator=draws(12)))


class LitClassifier(pl.LightningModule):
    def __init__(self, net: nn.Module, lr: float = 0.05, optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", (logits.argmax(-1) == y).float().mean(), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        if self.hparams.optimizer is not None:
            return self.hparams.optimizer(self.parameters(), lr=self.hparams.lr)
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def rows(classes: int = CLASSES) -> Any:
    chance = draws()
    return tensors(torch.randn(TOTAL, FEATURES, generator=chance), torch.randint(classes, (TOTAL,), generator=chance))


def mlp(width: int = 16, after: int = CLASSES) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, after)
    )
