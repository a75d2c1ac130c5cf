"""Seconds and memory of a federation with very many clients of five samples each, most of whom are never drawn."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.rounds_contenders.experiment import Setting
from tests.benchmarks.rounds_contenders.with_lightning import Report, TimedModule, quiet, trainer

SAMPLES, FEATURES = 500_000, 16
SAMPLES_PER_BATCH = 5


class FirstRound(pl.Callback):
    seconds = 0.0

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = self.seconds or time.perf_counter() - self.began


def run(setting: Setting, rounds: Rounds) -> dict[str, Any]:
    from lightning_lowrank import IID, FedAvg, FederatedLoop

    quiet()
    draws = torch.Generator().manual_seed(setting.seed)
    inputs = torch.randn(SAMPLES, FEATURES, generator=draws)
    dataset = TensorDataset(inputs, torch.randint(10, (SAMPLES,), generator=draws))
    began = time.perf_counter()
    IID().split(dataset, setting.clients, setting.seed)
    partition = time.perf_counter() - began

    loop = FederatedLoop(
        FedAvg(),
        clients=setting.clients,
        clients_per_round=setting.cohort,
        partition=IID(),
        local_steps=1,
        execution=setting.contender,  # type: ignore[arg-type]
        summary=False,
    )
    network = torch.nn.Sequential(torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    first_round = FirstRound()
    training = trainer(setting.rounds, loop, Report(rounds, setting.rounds), first_round)
    training.fit(TimedModule(network, setting.learning_rate), DataLoader(dataset, SAMPLES_PER_BATCH, shuffle=True))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.ckpt"
        began = time.perf_counter()
        training.save_checkpoint(path)
        checkpoint = time.perf_counter() - began
        checkpoint_bytes = path.stat().st_size
    return {
        "partition": partition,
        "first_round": first_round.seconds,
        "checkpoint": checkpoint,
        "checkpoint_bytes": checkpoint_bytes,
        "index_bytes": 8 * (SAMPLES + setting.clients),
    }


if __name__ == "__main__":
    contend(Setting, run)
