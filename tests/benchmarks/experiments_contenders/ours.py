"""This library as its command line runs a recipe: datamodule, module, `Trainer.fit`, CSV logger and checkpoints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_lowrank.cli.parser import CLI_SETTINGS, LowRankCLI
from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.experiments_contenders.engines import ENGINES
from tests.benchmarks.experiments_contenders.trial import Trial


class Report(pl.Callback):
    """Reports rounds. A round's checkpoints are written after its end, and count into the next."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.accuracies: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rounds.begin()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.accuracies.append(trainer.callback_metrics["val_acc"].item())
        self.rounds.end()


def run_recipe(trial: Trial, callbacks: Sequence[pl.Callback], arguments: Sequence[str] = ()) -> LowRankCLI:
    """Run ``lightning-lowrank fit`` with the recipe's files, besides the recipe's with these callbacks."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    words = [word for config in trial.recipe.configs for word in ("--config", config)]
    words += ["--data.root", trial.root, "--trainer.max_epochs", str(trial.rounds)]
    words += ["--trainer.default_root_dir", trial.folder, "--trainer.enable_progress_bar", "false"]
    words += ["--data.limit_samples", "600", "--federated.clients", "20"] if trial.quick else []
    trainer_defaults = {**CLI_SETTINGS["trainer_defaults"], "callbacks": list(callbacks)}
    settings = {**CLI_SETTINGS, "trainer_defaults": trainer_defaults}
    return LowRankCLI(args=["fit", *words, *trial.arguments, *arguments], **settings)


def run(trial: Trial, rounds: Rounds) -> dict[str, Any]:
    # A contender is called "default-log" where the engine "log" is off.
    for engine in trial.contender.split("-")[1:]:
        ENGINES[engine]()
    report = Report(rounds)
    done = run_recipe(trial, [report])
    return trial.finish(report.accuracies, list(done.model.network.state_dict().values()))


if __name__ == "__main__":
    contend(Trial, run)
