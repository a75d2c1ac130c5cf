"""Lightning's `Trainer.fit`: plain, or with `FederatedLoop` in either mode of execution."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.rounds_contenders.experiment import Setting


class TimedModule(pl.LightningModule):
    def __init__(self, net: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.net = net
        self.learning_rate = learning_rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class Report(pl.Callback):
    def __init__(self, rounds: Rounds, last: int) -> None:
        self.rounds = rounds
        self.last = last

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rounds.begin()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rounds.end()
        trainer.should_stop = trainer.current_epoch + 1 == self.last


class WholeBatches(Dataset):
    """Reads a batch by one gather, so that the plain fit is not slowed down by reading sample by sample."""

    def __init__(self, images: Tensor, classes: Tensor) -> None:
        self.images, self.classes = images, classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, batch: Tensor) -> list[Tensor]:
        return [self.images[batch], self.classes[batch]]


class RoundsInOrder(Sampler):
    """Each epoch, the batches of the next round's clients, one client after another."""

    def __init__(self, setting: Setting) -> None:
        indices = setting.client_indices()
        self.length = setting.steps_per_round
        self._rounds = iter(
            [batch for client in c for batch in setting.batches(indices[client])] for c in setting.cohorts()
        )

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        yield from next(self._rounds)


def federated_loop(setting: Setting, mode: str) -> pl.Callback:
    from lightning_lowrank import FedAvg, FederatedLoop, FromIndices

    return FederatedLoop(
        FedAvg(),
        clients=setting.clients,
        partition=FromIndices(setting.client_indices()),
        participants=setting.cohorts() if setting.cohort < setting.clients else None,
        execution="vectorized" if mode == "compiled" else mode,  # type: ignore[arg-type]
        compile=mode == "compiled",
        summary=False,
    )


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def trainer(max_epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def run(setting: Setting, rounds: Rounds) -> dict[str, Any]:
    quiet()
    callbacks = [*setting.low_rank()]
    tensors = setting.mnist(train=True)
    if setting.contender == "fit":
        loader = DataLoader(WholeBatches(*tensors), batch_size=None, sampler=RoundsInOrder(setting))
    else:
        loader = DataLoader(TensorDataset(*tensors), batch_size=setting.batch_size)
        callbacks.append(federated_loop(setting, setting.contender))
    module = TimedModule(setting.network(), setting.learning_rate)
    planned = max(setting.rounds, setting.planned)
    trainer(planned, *callbacks, Report(rounds, setting.rounds)).fit(module, loader)
    # A plain fit is another algorithm, which nobody expects to reach the same accuracy.
    return {} if setting.contender == "fit" else {"accuracy": setting.accuracy(module.net)}


if __name__ == "__main__":
    contend(Setting, run)
