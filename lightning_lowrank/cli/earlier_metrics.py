"""Keeps the metrics of an earlier run in the folder of a `CSVLogger`, which deletes them when it is first used.

`LowRankCLI` takes them before each command, so that a refused run loses nothing. When training starts, a run that goes
on keeps those of its rounds.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_lowrank.federated.run_files import go_on_with_metadata, metrics_folders
from lightning_lowrank.federated.safe_files import local_path
from lightning_lowrank.run_metadata import replaces

_METRICS = "metrics.csv"


class EarlierMetrics:
    """The metrics of an earlier run in the folder of a logger that was not used yet.

    Args:
        logger: The logger.
        folder: Its folder, which has metrics.
        command: The command; the figures of an evaluation go into a file of their own.
    """

    def __init__(self, logger: CSVLogger, folder: Path, command: str) -> None:
        self._logger, self._folder, self._file = logger, folder, folder / _METRICS
        self._continues = False
        with _moved_away(self._file), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Experiment logs directory")
            self._writer: Any = logger.experiment
        if command != "fit":
            file = folder / f"metrics_{command}.csv"
            file.unlink(missing_ok=True)
            self._writer.metrics_file_path = str(file)

    def begin_fit(self, trainer: pl.Trainer) -> None:
        """Have the run's metadata count from the first round of the earlier run, if the fit continues that."""
        self._continues = self._goes_on(trainer)
        if self._continues:
            go_on_with_metadata(self._logger)

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Keep the metrics of the rounds before this one, or none if the fit does not continue the earlier run."""
        rows: list[dict[str, str]] = []
        if self._continues:
            with open(self._file, newline="", encoding="utf-8") as file:
                rows = _before(list(csv.DictReader(file)), trainer.current_epoch)
        if not rows:
            rank_zero_warn(f"{self._file} of an earlier run is deleted.")
            self._file.unlink(missing_ok=True)
            return
        # The logger appends rows in this order.
        self._writer.metrics_keys = sorted(rows[0])
        part = self._folder / f"{_METRICS}.part"
        with replaces(part, self._file), open(part, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._writer.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)

    def _goes_on(self, trainer: Any) -> bool:
        """Whether the fit continues from a checkpoint of this folder, or of the run's folders of checkpoints."""
        path = None if trainer.ckpt_path is None else local_path(trainer.ckpt_path)
        dirpaths = (getattr(each, "dirpath", None) for each in trainer.callbacks if isinstance(each, Checkpoint))
        folders = [self._folder, *(local_path(each) for each in dirpaths if each is not None)]
        return path is not None and any(
            path.resolve().is_relative_to(folder.resolve()) for folder in folders if folder is not None
        )


@contextmanager
def _moved_away(file: Path) -> Iterator[None]:
    """A context in which a file has another name."""
    kept = file.rename(file.with_name(f"{file.name}.kept"))
    try:
        yield
    finally:
        kept.replace(file)


def take_earlier_metrics(trainer: Any, command: str) -> list[EarlierMetrics]:
    """The earlier metrics in the folders of the trainer's `CSVLogger` on this machine."""
    return [
        EarlierMetrics(logger, folder, command)
        for logger, folder in metrics_folders(trainer).items()
        if (folder / _METRICS).is_file()
    ]


def _before(rows: list[dict[str, str]], epoch: int) -> list[dict[str, str]]:
    """The rows up to the last one of an epoch before ``epoch``."""
    # By position, because rows such as a learning rate's have no epoch.
    places = [place for place, row in enumerate(rows) if row.get("epoch") and float(row["epoch"]) < epoch]
    return rows[: max(places, default=-1) + 1]
