"""`RoundPictures` logs the pictures of a report to loggers that show images."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_lowrank.configuration import check_integer
from lightning_lowrank.internals.lightning import NewFigures, ValidationFigures, check_namespace
from lightning_lowrank.metric_direction import direction, judged_by, monitors_of


class RoundPictures(Callback):
    """Log the pictures that ``report`` draws of a run to TensorBoard, W&B and MLflow.

    These are the monitored metric by rounds, by bytes and, with `SystemModel`, by simulated seconds, and the constants
    of `ConvergenceMonitor`. TensorBoard and W&B show them as images called ``pictures/…``; MLflow has them among the
    run's artifacts. Other loggers get none. Two pictures take about half a second.

    ``lightning-lowrank fit`` adds it to a federated run with one of these loggers, unless the recipe has one. A resumed
    run draws the earlier rounds as well. If several processes share a run, the first one draws. If a picture cannot be
    drawn or logged, a warning says so, and training continues without pictures.

    Put it after `FederatedLoop` in the trainer's callbacks.

    Args:
        every_n_rounds: Number of rounds between two drawings. Default: pictures are drawn only when the fit has ended.
        monitor: Name of the logged metric that is drawn. By default the figure that a callback such as
            ``ModelCheckpoint`` or a scheduler monitors, else the first of ``val_acc``, ``val_accuracy``, ``test_acc``
            and ``val_loss`` that is logged (or with ``valid`` or ``validation``), else another metric of validation.

    Raises:
        MisconfigurationException: If ``every_n_rounds`` is less than 1.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop
        >>> callbacks = [FederatedLoop(FedAvg(), clients=10), RoundPictures(every_n_rounds=20)]
    """

    def __init__(self, every_n_rounds: int | None = None, monitor: str | None = None) -> None:
        if every_n_rounds is not None:
            check_integer("every_n_rounds", every_n_rounds)
        self.every_n_rounds = every_n_rounds
        self.monitor = monitor
        self._rounds: dict[int, dict[str, float]] = {}
        self._figures, self._validated = NewFigures(), ValidationFigures()
        self._metric: str | None = None
        self._drawn = -1
        self._failed = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset the state of a previous fit."""
        check_namespace(trainer, pl_module)
        if stage == "fit" and trainer.current_epoch == 0:
            self._rounds, self._metric, self._drawn, self._failed = {}, None, -1, False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the figures that were logged before the validation."""
        self._validated.begin(trainer.callback_metrics)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the figures that the validation logged, before a checkpoint is saved."""
        self._validated.end(trainer.callback_metrics)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._record(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the round's figures, and draw every ``every_n_rounds`` rounds."""
        self._record(trainer)
        if self.every_n_rounds is not None and (trainer.current_epoch + 1) % self.every_n_rounds == 0:
            self._draw(trainer)

    def _record(self, trainer: pl.Trainer) -> None:
        """Record figures that are new. Those of a validation belong to the round whose model it evaluated."""
        # matplotlib takes half a second to import.
        from lightning_lowrank.plots import DRAWN

        logged, number = trainer.callback_metrics, trainer.current_epoch
        self._metric = judged_by(logged, self.monitor, monitors_of(trainer)) or self._metric
        names = [*DRAWN, *([self._metric] if self._metric else [])]
        new = self._figures.find(logged)
        validated = next((loop.validated_round for loop in _loops(trainer)), None)
        self._rounds.setdefault(number, {})
        for name in (each for each in names if each in new):
            of_validation = self._validated.has(name, logged[name])
            place = number if validated is None or not of_validation else validated - 1
            if place >= 0:
                self._rounds.setdefault(place, {})[name] = float(new[name])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw all rounds."""
        self._draw(trainer)

    def _draw(self, trainer: pl.Trainer) -> None:
        senders = [(logger, send) for logger in trainer.loggers for kind, send in _SENDERS if isinstance(logger, kind)]
        last = max(self._rounds, default=-1)
        if not senders or self._metric is None or last == self._drawn or self._failed or not trainer.is_global_zero:
            return
        self._drawn = last
        try:
            pictures = self._pictures(trainer)
            for logger, send in senders:
                send(logger, pictures, trainer.global_step)
        except Exception as error:
            # A logger's server that does not answer must not end the run.
            self._failed = True
            rank_zero_warn(f"RoundPictures draws no more pictures: {type(error).__name__}: {error}")

    def _pictures(self, trainer: pl.Trainer) -> dict[str, bytes]:
        from lightning_lowrank.plots import draw

        assert self._metric is not None
        names = [type(loop.algorithm).__name__ for loop in _loops(trainer)]
        return draw(
            lambda metric, against: {(*names, "this run")[0]: self._curve(metric, against)},
            self._metric,
            direction(self._metric, monitors=monitors_of(trainer))[0],
        )

    def _curve(self, metric: str, against: str | None) -> np.ndarray:
        points = [
            (number + 1 if against is None else figures[against], figures[metric], 0)
            for number, figures in sorted(self._rounds.items())
            if metric in figures and (against is None or against in figures)
        ]
        return np.array(points, float).reshape(-1, 3)

    def state_dict(self) -> dict[str, Any]:
        """The figures of the rounds so far."""
        return {"rounds": {number: dict(figures) for number, figures in self._rounds.items()}, "metric": self._metric}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`'s result."""
        self._rounds, self._metric = dict(state_dict["rounds"]), state_dict["metric"]


def _loops(trainer: pl.Trainer) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if each.state_key == "FederatedLoop"]


def _to_tensorboard(logger: TensorBoardLogger, pictures: Mapping[str, bytes], step: int) -> None:
    from matplotlib.image import imread

    for name, png in pictures.items():
        # Convert without an alpha channel: browsers show transparent pictures on a dark background.
        pixels = imread(io.BytesIO(png))[..., :3]
        logger.experiment.add_image(f"pictures/{name}", pixels, step, dataformats="HWC")


def _to_files(log: Callable[[Any, str, str], None]) -> Callable[[Any, Mapping[str, bytes], int], None]:
    def send(logger: Any, pictures: Mapping[str, bytes], step: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, png in pictures.items():
                file = Path(folder) / f"{name}.png"
                file.write_bytes(png)
                log(logger, f"pictures/{name}", str(file))

    return send


_SENDERS: tuple[tuple[type, Callable[[Any, Mapping[str, bytes], int], None]], ...] = (
    (TensorBoardLogger, _to_tensorboard),
    (WandbLogger, _to_files(lambda logger, name, file: logger.log_image(name, [file]))),
    (MLFlowLogger, _to_files(lambda logger, _, file: logger.experiment.log_artifact(logger.run_id, file, "pictures"))),
)


def shows_pictures(logger: Any) -> bool:
    """Whether a logger, or one of several, shows images."""
    loggers = logger if isinstance(logger, (list, tuple)) else [logger]
    return any(isinstance(each, kind) for each in loggers for kind, _ in _SENDERS)
