"""The report's pictures of one run, for loggers that show images.

`RoundPictures` is a callback that collects a run's figures and has `lightning_lowrank.cli.plots` draw them.
``lightning-lowrank fit`` adds it where TensorBoard, W&B or MLflow logs the run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_lowrank.configuration import check_integer
from lightning_lowrank.internals.lightning import NewFigures, check_namespace
from lightning_lowrank.metric_direction import direction, judged_by, monitors_of

_DRAWN = ("comm/total_bytes", "system/seconds", "convergence/R", "convergence/P", "convergence/Q")


class RoundPictures(Callback):
    """Give TensorBoard, W&B and MLflow the pictures that ``report`` draws of a run.

    These are the monitored metric by rounds, by bytes and, with `SystemModel`, by simulated seconds, and the constants
    of `ConvergenceMonitor`. TensorBoard and W&B show them as images called ``pictures/…``; MLflow has them among the
    run's artifacts. Other loggers get none. Two pictures take about half a second.

    ``lightning-lowrank fit`` adds it where one of these loggers is configured, unless the recipe has one. A resumed run
    draws the rounds before as well. Where several processes share a run, the first one draws. If a picture cannot be
    drawn or logged, a warning says so, and training goes on without pictures.

    Put it after `FederatedLoop` in the trainer's callbacks.

    Args:
        every_n_rounds: Number of rounds between two drawings. Default: pictures are drawn when the fit has ended alone.
        monitor: Name of the logged metric that is drawn. By default what a callback such as ``ModelCheckpoint`` or a
            scheduler monitors, else the first of ``val_acc``, ``val_accuracy``, ``test_acc`` and ``val_loss`` that is
            logged.

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
        self._figures = NewFigures()
        self._metric: str | None = None
        self._drawn = -1
        self._failed = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget an earlier fit."""
        check_namespace(trainer, pl_module)
        if stage == "fit" and trainer.current_epoch == 0:
            self._rounds, self._metric, self._drawn, self._failed = {}, None, -1, False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the round's figures, and draw where that is due."""
        logged, number = trainer.callback_metrics, trainer.current_epoch
        self._metric = judged_by(logged, self.monitor, monitors_of(trainer)) or self._metric
        names = [*_DRAWN, *([self._metric] if self._metric else [])]
        new = self._figures.take(logged)
        self._rounds[number] = {name: float(new[name]) for name in names if name in new}
        if self.every_n_rounds is not None and (number + 1) % self.every_n_rounds == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw all rounds."""
        self._draw(trainer)

    def _draw(self, trainer: pl.Trainer) -> None:
        takers = [(logger, take) for logger in trainer.loggers for kind, take in _TAKERS if isinstance(logger, kind)]
        last = max(self._rounds, default=-1)
        if not takers or self._metric is None or last == self._drawn or self._failed or not trainer.is_global_zero:
            return
        self._drawn = last
        try:
            with tempfile.TemporaryDirectory() as folder:
                pictures = self._pictures(trainer, Path(folder))
                for logger, take in takers:
                    take(logger, pictures, trainer.global_step)
        except Exception as error:
            # A server that does not answer must not cost the run.
            self._failed = True
            rank_zero_warn(f"RoundPictures draws no more pictures: {type(error).__name__}: {error}")

    def _pictures(self, trainer: pl.Trainer, folder: Path) -> list[Path]:
        from lightning_lowrank.cli.plots import draw
        from lightning_lowrank.cli.runs import Run

        assert self._metric is not None
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        names = [type(each.algorithm).__name__ for each in callbacks if each.state_key == "FederatedLoop"]
        run = Run(folder, self._rounds)
        higher = direction(self._metric, monitors=monitors_of(trainer))[0]
        return draw({(*names, "this run")[0]: [run]}, self._metric, higher, folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the figures of the rounds so far."""
        return {"rounds": {number: dict(figures) for number, figures in self._rounds.items()}, "metric": self._metric}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take `state_dict`'s result."""
        self._rounds, self._metric = dict(state_dict["rounds"]), state_dict["metric"]


def _to_tensorboard(logger: TensorBoardLogger, pictures: Sequence[Path], step: int) -> None:
    from matplotlib.image import imread

    for picture in pictures:
        # Without the layer of transparency, of which browsers make a dark ground.
        pixels = imread(picture)[..., :3]
        logger.experiment.add_image(f"pictures/{picture.stem}", pixels, step, dataformats="HWC")


def _to_wandb(logger: WandbLogger, pictures: Sequence[Path], step: int) -> None:
    for picture in pictures:
        logger.log_image(f"pictures/{picture.stem}", [str(picture)])


def _to_mlflow(logger: MLFlowLogger, pictures: Sequence[Path], step: int) -> None:
    for picture in pictures:
        logger.experiment.log_artifact(logger.run_id, str(picture), "pictures")


_TAKERS: tuple[tuple[type, Callable[[Any, Sequence[Path], int], None]], ...] = (
    (TensorBoardLogger, _to_tensorboard),
    (WandbLogger, _to_wandb),
    (MLFlowLogger, _to_mlflow),
)


def shows_pictures(logger: Any) -> bool:
    """Return whether a logger, or one of several, shows images."""
    loggers = logger if isinstance(logger, (list, tuple)) else [logger]
    return any(isinstance(each, kind) for each in loggers for kind, _ in _TAKERS)
