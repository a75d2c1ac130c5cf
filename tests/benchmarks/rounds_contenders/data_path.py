"""One epoch of MNIST in batches, without any training: torchvision's way, and ours.

Ours is the loader that `FederatedLoop` gives Lightning, read once from its first to its last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.rounds_contenders.experiment import MEAN, STD, Setting
from tests.benchmarks.rounds_contenders.with_lightning import TimedModule, quiet, trainer


def read(setting: Setting, rounds: Rounds, batches: Callable[[], Iterable[Any]]) -> None:
    for number in range(setting.rounds):
        images = 0
        if not number:
            rounds.begin()
        for batch in batches():
            leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            images += sum(leaf.numel() // 784 for leaf in leaves if leaf.is_floating_point())
        rounds.end()
        assert images == setting.clients * setting.samples, images


def run(setting: Setting, rounds: Rounds) -> dict[str, Any]:
    quiet()
    if setting.contender == "torchvision":
        from torchvision import datasets, transforms

        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
        dataset = datasets.MNIST(setting.root, train=True, transform=transform)
        loader = DataLoader(dataset, batch_size=setting.batch_size, shuffle=True)
        read(setting, rounds, lambda: loader)
        return {}

    from lightning_lowrank import IID, FedAvg, FederatedLoop
    from lightning_lowrank.data import MNIST

    class Reader(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            read(setting, rounds, lambda: trainer.train_dataloader)
            trainer.should_stop = True

    data = MNIST(root=setting.root, download=False, batch_size=setting.batch_size)
    loop = FederatedLoop(FedAvg(), clients=setting.clients, partition=IID(), execution=setting.contender, summary=False)
    module = TimedModule(torch.nn.Sequential(torch.nn.Flatten(), setting.network()), setting.learning_rate)
    training = trainer(1, loop, Reader())
    training.limit_val_batches = 0
    training.fit(module, datamodule=data)
    return {}


if __name__ == "__main__":
    contend(Setting, run)
