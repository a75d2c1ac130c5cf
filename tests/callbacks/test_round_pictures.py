"""Loggers that show images get the report's pictures of a run."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_lowrank.plots as plots
from lightning_lowrank import (
    ConvergenceMonitor,
    FedAvg,
    FederatedLoop,
    FedLoRA,
    LowRank,
    MatrixProduct,
    ProductSum,
    RoundPictures,
)
from lightning_lowrank.cli.lightning_messages import without_tips
from lightning_lowrank.cli.parser import CLI_SETTINGS, LowRankCLI
from lightning_lowrank.cli.runs import find_runs
from lightning_lowrank.data import Digits
from lightning_lowrank.models import MLP, Classifier

IMAGES = {"pictures/rounds", "pictures/bytes"}


def trainer_of(
    folder: Path, logger: Any, rounds: int = 2, before: Any = (), validation: Any = None, **pictures: Any
) -> pl.Trainer:
    loop = FederatedLoop(FedAvg(), clients=5, clients_per_round=2, summary=False)
    return pl.Trainer(
        max_epochs=rounds,
        logger=logger,
        default_root_dir=folder,
        accelerator="cpu",
        limit_val_batches=1,
        **(validation or {}),
        callbacks=[*before, loop, RoundPictures(**pictures)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(folder: Path, logger: Any, rounds: int = 2, ckpt: Any = None, **pictures: Any) -> pl.Trainer:
    pl.seed_everything(0, verbose=False)
    trainer = trainer_of(folder, logger, rounds, **pictures)
    trainer.fit(Classifier(MLP(in_features=64, hidden=[8])), Digits(), ckpt_path=ckpt)
    return trainer


def images(folder: str) -> dict[str, list[Any]]:
    """Return the images of TensorBoard's event files, by tag."""
    events = EventAccumulator(folder, size_guidance={"images": 0}).Reload()
    return {tag: events.Images(tag) for tag in events.Tags()["images"]}


class Recording:
    """Stands for the client of W&B or MLflow, and keeps what it is given while the files are there."""

    def __init__(self) -> None:
        self.given: list[tuple[str, bytes]] = []

    def log_artifact(self, run_id: str, path: str, folder: str) -> None:
        self.given.append((f"{folder}/{Path(path).stem}", Path(path).read_bytes()))


def recording(kind: type) -> tuple[Any, Recording]:
    class Logger(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            pl.loggers.Logger.__init__(self)

        name = version = "recording"
        save_dir = None
        run_id = "1"
        experiment = client = Recording()

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...
        def log_hyperparams(self, params: Any) -> None: ...
        def after_save_checkpoint(self, callback: Any) -> None: ...
        def finalize(self, status: str) -> None: ...

        def log_image(self, key: str, images: list[Any], step: Any = None) -> None:
            (image,) = images
            self.client.given.append((key, Path(image).read_bytes()))

    return Logger(), Logger.client


@pytest.mark.slow
def test_tensorboard_has_the_pictures_when_the_fit_has_ended(tmp_path, monkeypatch):
    drawn = []
    one = plots._plot
    monkeypatch.setattr(plots, "_plot", lambda curves, *rest: drawn.append(curves) or one(curves, *rest))
    logger = TensorBoardLogger(tmp_path, name="board")
    trainer = fit(tmp_path, [CSVLogger(tmp_path), logger])
    found = images(logger.log_dir)
    assert found.keys() == IMAGES
    assert all([each.step for each in of_tag] == [trainer.global_step] for of_tag in found.values())
    assert all(each.width > 500 and each.height > 300 for (each,) in found.values())
    by_bytes, by_rounds = ([(x, y) for x, y, _ in curves["FedAvg"].tolist()] for curves in drawn)
    accuracy = trainer.callback_metrics["val_acc"].item()
    spent = trainer.callback_metrics["comm/total_bytes"].item()
    assert [x for x, _ in by_rounds] == [1, 2]
    assert by_rounds[-1][1] == pytest.approx(accuracy)
    assert by_bytes[-1] == (pytest.approx(spent), pytest.approx(accuracy))
    assert by_bytes[0][0] == pytest.approx(spent / 2)


@pytest.mark.parametrize(
    ("validation", "rounds"),
    [
        ({"check_val_every_n_epoch": 2}, [2, 4]),
        # Rounds have two batches: the validations are inside round 2, at the end of round 3 and inside round 5.
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, [1, 3, 4]),
        ({"val_check_interval": 0.5}, [1, 2, 3, 4, 5]),
    ],
)
@pytest.mark.slow
def test_a_point_is_of_the_round_whose_model_was_evaluated(tmp_path, monkeypatch, validation, rounds):
    drawn: list[Any] = []
    one = plots._plot
    monkeypatch.setattr(plots, "_plot", lambda curves, *rest: drawn.append(curves) or one(curves, *rest))
    monkeypatch.setattr(RoundPictures, "_draw", lambda self, trainer: self._pictures(trainer))
    trainer = trainer_of(tmp_path, CSVLogger(tmp_path), rounds=5, validation=validation)
    trainer.fit(Classifier(MLP(in_features=64, hidden=[8])), Digits())
    by_bytes, by_rounds = (curves["FedAvg"].tolist() for curves in drawn)
    assert [x for x, _, _ in by_rounds] == rounds
    (run,) = find_runs([tmp_path])
    spent, judged = dict(run.series("comm/total_bytes")), run.series("val_acc")
    assert [(x, y) for x, y, _ in by_rounds] == [(number, pytest.approx(value)) for number, value in judged]
    assert [(x, y) for x, y, _ in by_bytes] == [
        (pytest.approx(spent[number]), pytest.approx(value)) for number, value in judged
    ]


@pytest.mark.parametrize("kind", [WandbLogger, pytest.param(MLFlowLogger, marks=pytest.mark.slow)])
@pytest.mark.nightly
def test_wandb_and_mlflow_have_the_pictures(tmp_path, kind):
    logger, client = recording(kind)
    fit(tmp_path, logger)
    assert {name for name, _ in client.given} == IMAGES
    assert all(content.startswith(b"\x89PNG") for _, content in client.given)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_constants_of_the_monitor_are_drawn(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="board")
    loop = FederatedLoop(FedLoRA(ProductSum()), clients=4, clients_per_round=2, summary=False)
    low_rank = LowRank(MatrixProduct(), role="update", rank=2, summary=False)
    trainer = trainer_of(tmp_path, logger)
    trainer.callbacks[:] = [low_rank, loop, ConvergenceMonitor(), RoundPictures()]
    trainer.fit(Classifier(MLP(in_features=64, hidden=[8])), Digits())
    assert images(logger.log_dir).keys() == {*IMAGES, "pictures/convergence"}


@pytest.mark.slow
def test_pictures_every_few_rounds_and_once_at_the_end(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="board")
    trainer = fit(tmp_path, logger, rounds=4, every_n_rounds=2, monitor="val_loss")
    steps = [each.step for each in images(logger.log_dir)["pictures/rounds"]]
    assert len(steps) == 2
    assert steps[0] < steps[1] == trainer.global_step


@pytest.mark.nightly
def test_a_resumed_run_draws_the_rounds_before(tmp_path, monkeypatch):
    drawn = []
    one = plots._plot
    monkeypatch.setattr(plots, "_plot", lambda curves, *rest: drawn.append(curves) or one(curves, *rest))
    first = fit(tmp_path, CSVLogger(tmp_path), rounds=2)
    file = tmp_path / "first.ckpt"
    first.save_checkpoint(file)
    assert not drawn
    fit(tmp_path, TensorBoardLogger(tmp_path, name="board"), rounds=3, ckpt=file)
    assert [x for x, _, _ in drawn[1]["FedAvg"].tolist()] == [1, 2, 3]
    # Lightning reads a checkpoint without running code of it.
    state = torch.load(file, weights_only=True)["callbacks"]["RoundPictures"]
    assert list(state["rounds"]) == [0, 1]


def test_a_checkpoint_after_a_validation_has_its_round(tmp_path):
    trainer = trainer_of(tmp_path, False, rounds=4, validation={"check_val_every_n_epoch": 2}, monitor="val_loss")
    trainer.callbacks.append(ModelCheckpoint(tmp_path, save_last=True))
    trainer.fit(Classifier(MLP(in_features=64, hidden=[8])), Digits())
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["RoundPictures"]
    assert [number for number, figures in state["rounds"].items() if "val_loss" in figures] == [1, 3]


@pytest.mark.slow
def test_a_logger_that_fails_costs_the_pictures_alone(tmp_path, monkeypatch):
    logger, client = recording(MLFlowLogger)

    def fails(*arguments: Any) -> None:
        raise ConnectionError("the server does not answer")

    monkeypatch.setattr(type(client), "log_artifact", fails)
    with pytest.warns(UserWarning, match="RoundPictures draws no more pictures: ConnectionError: the server does not"):
        trainer = fit(tmp_path, logger, rounds=3, every_n_rounds=1)
    assert trainer.current_epoch == 3


@pytest.mark.slow
def test_nothing_is_drawn_without_a_metric_or_a_logger_of_images(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "draw", lambda *arguments: pytest.fail("drawn"))
    fit(tmp_path, CSVLogger(tmp_path))
    logger = TensorBoardLogger(tmp_path, name="board")
    fit(tmp_path, logger, monitor="val_f1")
    assert images(logger.log_dir) == {}


def test_rounds_between_pictures_are_at_least_one():
    with pytest.raises(MisconfigurationException, match="every_n_rounds"):
        RoundPictures(every_n_rounds=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logger", "own", "added"),
    [
        ("TensorBoardLogger", False, True),
        ("CSVLogger", False, False),
        ("TensorBoardLogger", True, False),
    ],
)
@pytest.mark.nightly
def test_the_command_line_adds_it_where_a_logger_shows_images(tmp_path, logger, own, added):
    words = ["fit", "--config", "recipes/quickstart.yaml", "--trainer.max_epochs=1", "--quiet"]
    words += [f"--trainer.logger={logger}", f"--trainer.logger.save_dir={tmp_path}"]
    words += ["--trainer.callbacks+=RoundPictures", "--trainer.callbacks.every_n_rounds=7"] if own else []
    with without_tips():  # --quiet sets levels, which main() puts back.
        cli = LowRankCLI(args=words, **CLI_SETTINGS)
    found = [each for each in cli.trainer.callbacks if isinstance(each, RoundPictures)]
    assert len(found) == (added or own)
    assert all(each.every_n_rounds == (7 if own else None) for each in found)
