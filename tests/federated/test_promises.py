"""The page "Lightning in a federation", row by row: each setting and callback of Lightning's against a plain fit."""

from __future__ import annotations

import csv
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices
from tests.helpers import Data, Module, Thaw, assert_same, blobs, fit, network, seen, trainer, weights

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "lightning.md"
SAMPLES = 103
BATCHES = 13
CLIENTS = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 103))]
STEPS = [-(-len(indices) // 8) for indices in CLIENTS]
OURS = ("comm/", "federated/")
PLAIN, ONCE, REFUSED = "as in Lightning", "once a client", "refused"

Check = Callable[[Path], None]
ROWS: dict[tuple[str, str], tuple[str, Check]] = {}


def row(name: str, use: str, verdict: str, check: Check | None = None) -> Callable[[Check], Check]:
    """Enter a row of the page's tables with what checks it."""

    def enter(check: Check) -> Check:
        assert (name, use) not in ROWS
        ROWS[name, use] = verdict, check
        return check

    if check is not None:
        enter(check)
    return enter


# As in Lightning: one client that holds all samples, beside a plain fit


@dataclass(eq=False)
class Fit:
    """A fit made plainly, and with one client that holds all samples; ``look`` returns what else is compared."""

    settings: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Path], list[pl.Callback]] = lambda folder: []
    look: Callable[[pl.Trainer, Any, list[Any]], Any] = lambda run, module, callbacks: None
    module: type[Module] = Module
    arguments: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], Data] = lambda: Data(shuffle=False)
    logger: Callable[[Path], Any] = lambda folder: CSVLogger(folder, name="", version=0)
    loop: dict[str, Any] = field(default_factory=dict)
    after: str | None = None
    without: tuple[str, ...] = ()
    fails: type[BaseException] | None = None

    def __call__(self, tmp_path: Path) -> None:
        found, expected = (self._made(tmp_path / way, way == "rounds") for way in ("rounds", "epochs"))
        of_rounds, of_epochs = ([each.pop("weights"), *each.pop("saved weights")] for each in (found, expected))
        # A fit that fails leaves the last global model.
        for one, other in zip(of_rounds, of_epochs, strict=True) if self.fails is None else ():
            assert_same(one, other)
        assert near(found.pop("figures"), expected.pop("figures"))
        assert all(map(near, found["rows"], expected["rows"]))
        for name, value in expected.items():
            assert found[name] == value or name == "rows", name
        assert len(found["rows"]) == len(expected["rows"])

    def _made(self, folder: Path, federated: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        module, callbacks = self.module(network(), **self.arguments), self.callbacks(folder)
        one = {"optimizer_state": "keep", "on_client_error": "raise", "summary": False, **self.loop}
        loops = [FederatedLoop(FedAvg(), partition=FromIndices([list(range(SAMPLES))]), **one)] if federated else []
        settings = {"logger": self.logger(folder), "log_every_n_steps": 5, **self.settings}
        run = trainer(folder, *loops, *callbacks, **settings)
        data, error = self.data(), None
        try:
            fit(run, module, data)
        except BaseException as raised:
            if self.fails is None or not isinstance(raised, self.fails):
                raise
            error = f"{type(raised).__name__}: {raised}"
        if self.after is not None:
            getattr(run, self.after)(module, data)
        for each in run.loggers:
            each.save()
        saved = {path: torch.load(path, weights_only=True) for path in sorted(folder.rglob("*.ckpt"))}
        return {
            "weights": weights(module),
            "saved weights": [each["state_dict"] for each in saved.values()],
            "saved": {str(path.relative_to(folder)): (it["epoch"], it["global_step"]) for path, it in saved.items()},
            "error": error,
            "counted": (run.global_step, run.current_epoch, run.should_stop),
            "rates": [[group["lr"] for group in each.param_groups] for each in run.optimizers],
            "figures": self._of_user({name: float(value) for name, value in run.callback_metrics.items()}),
            "rows": [each for each in map(self._of_user, rows_of(folder)) if each.keys() - {"epoch", "step"}],
            "seen": self.look(run, module, callbacks),
        }

    def _of_user(self, figures: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in figures.items() if not name.startswith((*OURS, *self.without))}


def near(found: dict[str, float], expected: dict[str, float]) -> bool:
    return bool(found == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True))


def rows_of(folder: Path) -> Iterator[dict[str, float]]:
    table = folder / "version_0" / "metrics.csv"
    if table.exists():
        with open(table, newline="") as file:
            for each in csv.DictReader(file):
                yield {name: float(value) for name, value in each.items() if value}


class BothWays(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)


def stops_soon(folder: Path) -> list[pl.Callback]:
    return [EarlyStopping("val_loss", patience=0, mode="max")]


# Arguments of the trainer


def dtype(run: pl.Trainer, module: Any, callbacks: list[Any]) -> Any:
    return module.net[0].weight.dtype


row("accelerator", "", PLAIN, Fit({"accelerator": "auto"}))
row("strategy", "one device", PLAIN, Fit({"strategy": SingleDeviceStrategy("cpu"), "accelerator": "auto"}))
row("devices", "one", PLAIN, Fit({"devices": 1}))
row("num_nodes", "one", PLAIN, Fit({"num_nodes": 1}))
row("precision", "", PLAIN, Fit({"precision": "bf16-mixed"}, look=dtype))


@row("strategy", "DDP, FSDP, DeepSpeed", REFUSED)
@row("devices", "several", REFUSED)
@row("num_nodes", "several", REFUSED)
def processes(tmp_path: Path) -> None:
    run, loop = trainer(tmp_path, devices=2, strategy="ddp"), of_clients()
    with pytest.raises(MisconfigurationException, match="DDPStrategy"):
        loop.setup(run, Module(), "fit")


class Writes(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_scalar("by_hand", batch[0].sum(), self.global_step)
        return super().training_step(batch, batch_idx)


def scalars(run: pl.Trainer, module: Any, callbacks: list[Any]) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(run.logger.log_dir)
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if not name.startswith((*OURS, "epoch"))]
    return {name: [(each.step, round(each.value, 4)) for each in events.Scalars(name)] for name in names}


row("logger", "", PLAIN, Fit(logger=lambda folder: TensorBoardLogger(folder, "", 0), look=scalars, module=Writes))


class Notes(pl.Callback):
    """A user's own callback, which notes its hooks in their order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []


def noting(hook: str) -> Callable[..., None]:
    def note(self: Notes, trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any, **keywords: Any) -> None:
        said = (trainer.global_step, trainer.current_epoch, trainer.is_last_batch)
        self.heard.append((hook, said, seen((*arguments, *keywords.values()))))

    return note


NOT_NOTED = ("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint")
for hook, _ in inspect.getmembers(pl.Callback, inspect.isfunction):
    if not hook.startswith("_") and hook not in NOT_NOTED:
        setattr(Notes, hook, noting(hook))


def heard(run: pl.Trainer, module: Any, callbacks: list[Any]) -> Any:
    return callbacks[0].heard


row("callbacks", "after FederatedLoop", PLAIN, Fit(callbacks=lambda folder: [Notes()], look=heard))


@row("callbacks", "that read weights, before it", REFUSED)
def readers_before(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="Notes comes before FederatedLoop"):
        fit(trainer(tmp_path, Notes(), of_clients()), Module(), Data())


@row("fast_dev_run", "", PLAIN)
def trial_runs(tmp_path: Path) -> None:
    for batches in (True, 3, 20):
        Fit({"fast_dev_run": batches}, lambda folder: [Notes()], heard)(tmp_path / str(batches))


row("max_epochs", "", PLAIN, Fit({"max_epochs": 2}))
row("min_epochs", "", PLAIN, Fit({"min_epochs": 4, "max_epochs": 9}, stops_soon))
row("max_steps", "", PLAIN, Fit({"max_steps": 20, "max_epochs": -1}, lambda folder: [Notes()], heard))
row("min_steps", "", PLAIN, Fit({"min_steps": 30, "max_epochs": 9}, stops_soon))
row("max_time", "", PLAIN, Fit({"max_time": "00:00:00:00", "max_epochs": -1}, lambda folder: [Notes()], heard))
row("limit_train_batches", "", PLAIN, Fit({"limit_train_batches": 0.5}))
row("limit_val_batches", "", PLAIN, Fit({"limit_val_batches": 1}))
row("limit_test_batches", "", PLAIN, Fit({"limit_test_batches": 1}, after="test"))


class Predicts(Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


class ToPredict(Data):
    def __init__(self) -> None:
        super().__init__(shuffle=False)

    predict_dataloader = Data.val_dataloader


class Predictions(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.heard: list[Any] = []

    def write_on_batch_end(self, *arguments: Any) -> None:
        self.heard.append(seen(arguments[2:]))

    def write_on_epoch_end(self, *arguments: Any) -> None:
        self.heard.append(seen(arguments[2:]))


predicted = {"look": heard, "module": Predicts, "data": ToPredict, "after": "predict"}
row("limit_predict_batches", "", PLAIN, Fit({"limit_predict_batches": 1}, lambda folder: [Predictions()], **predicted))
row("overfit_batches", "", PLAIN, Fit({"overfit_batches": 2}, lambda folder: [Notes()], heard))
row("check_val_every_n_epoch", "a number", PLAIN, Fit({"check_val_every_n_epoch": 2}))
row("num_sanity_val_steps", "", PLAIN, Fit({"num_sanity_val_steps": -1}, lambda folder: [Notes()], heard))
row("enable_checkpointing", "", PLAIN, Fit({"enable_checkpointing": True}))
row("enable_model_summary", "", PLAIN, Fit({"enable_model_summary": True}))
row("accumulate_grad_batches", "", PLAIN, Fit({"accumulate_grad_batches": 4}, lambda folder: [Notes()], heard))
row("gradient_clip_val", "", PLAIN, Fit({"gradient_clip_val": 0.1}))
row("gradient_clip_algorithm", "", PLAIN, Fit({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}))
row("use_distributed_sampler", "", PLAIN, Fit({"use_distributed_sampler": False}))
row("barebones", "", PLAIN, Fit({"barebones": True, "log_every_n_steps": None}, logger=lambda folder: None))
row("plugins", "", PLAIN, Fit({"plugins": [MixedPrecision("bf16-mixed", "cpu")]}))
row("sync_batchnorm", "", PLAIN, Fit({"sync_batchnorm": True}))
row("model_registry", "", PLAIN, Fit({"model_registry": "models/net"}))


class Asks(Module):
    """Asks torch in its steps for what a setting of the trainer turns on."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.save_hyperparameters({"width": 16})
        self.answers: set[Any] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        cudnn = torch.backends.cudnn.benchmark
        self.answers.add((torch.are_deterministic_algorithms_enabled(), cudnn, torch.is_anomaly_enabled()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.answers.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training))
        super().validation_step(batch, batch_idx)


def answers(run: pl.Trainer, module: Any, callbacks: list[Any]) -> Any:
    return module.answers


@row("deterministic", "", PLAIN)
@row("benchmark", "", PLAIN)
def modes_of_torch(tmp_path: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        for setting in ("deterministic", "benchmark"):
            Fit({setting: True}, look=answers, module=Asks)(tmp_path / setting)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


row("inference_mode", "", PLAIN, Fit({"inference_mode": False}, look=answers, module=Asks))


class Undefined(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return torch.sqrt(loss - loss) * 0 if batch_idx == 3 else loss


row("detect_anomaly", "", PLAIN, Fit({"detect_anomaly": True}, module=Undefined, fails=RuntimeError))


def lines(run: pl.Trainer, module: Any, callbacks: list[Any]) -> dict[str, int]:
    """Return how often the profiler timed each part of a local step."""
    parts = ("training_step", "backward", "optimizer_step", "run_training_batch", "train_dataloader_next")
    timed = run.profiler.recorded_durations.items()
    found = {name: len(times) for name, times in timed if name.endswith(parts) and "FederatedLoop" not in name}
    # Lightning asks for one batch more, to see that there is none.
    return {name: times // BATCHES for name, times in found.items()}


row("profiler", "", PLAIN, Fit({"profiler": "simple"}, look=lines))


class Curriculum(Data):
    """Has other samples in each epoch."""

    def __init__(self) -> None:
        super().__init__(shuffle=False)
        self.made: list[int] = []

    def train_dataloader(self) -> DataLoader:
        self.made.append(self.trainer.current_epoch)
        return DataLoader(blobs(seed=7 + self.made[-1]), **self.loader)


def made(run: pl.Trainer, module: Any, callbacks: list[Any]) -> list[int]:
    return run.datamodule.made


renewed = {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4}
row("reload_dataloaders_every_n_epochs", "", PLAIN, Fit(renewed, look=made, data=Curriculum))


def files(run: pl.Trainer, module: Any, callbacks: list[Any]) -> list[str]:
    root = Path(run.default_root_dir)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if "tfevents" not in path.name)


rooted = {"enable_checkpointing": True}
row("default_root_dir", "", PLAIN, Fit(rooted, look=files, logger=lambda folder: True))


def hyperparameters(run: pl.Trainer, module: Any, callbacks: list[Any]) -> list[Any]:
    return [path.read_text() for path in Path(run.default_root_dir).rglob("hparams.yaml")]


row("enable_autolog_hparams", "", PLAIN, Fit({"enable_autolog_hparams": False}, look=hyperparameters, module=Asks))

# Several clients


def of_clients(**arguments: Any) -> FederatedLoop:
    return FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False, **arguments)


def rounds(tmp_path: Path, *callbacks: pl.Callback, module: type[Module] = Module, **settings: Any) -> Any:
    run = trainer(tmp_path, of_clients(), *callbacks, **{"max_epochs": 2, **settings})
    return fit(run, module(), Data()), run


class Validations(pl.Callback):
    """Notes after how many clients of the round a validation is made."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self.places.append((trainer.current_epoch, ready))


@row("val_check_interval", "a share", ONCE)
def shares(tmp_path: Path) -> None:
    noted = Validations()
    rounds(tmp_path, noted, val_check_interval=0.5, num_sanity_val_steps=0)
    assert noted.places == [(number, clients) for number in range(2) for clients in (2, 4)]


@row("val_check_interval", "a number", ONCE)
@row("check_val_every_n_epoch", "None", ONCE)
def numbers(tmp_path: Path) -> None:
    settings = {"num_sanity_val_steps": 0, "max_epochs": 3}
    noted, run = Validations(), trainer(tmp_path, of_clients(), max_epochs=1, val_check_interval=3)
    with pytest.warns(UserWarning, match="val_check_interval=3 counts clients.*of each round"):
        run.fit(Module(), Data())
    rounds(tmp_path, noted, val_check_interval=3, **settings)
    assert noted.places == [(number, 3) for number in range(3)]
    noted = Validations()
    rounds(tmp_path, noted, val_check_interval=6, check_val_every_n_epoch=None, **settings)
    assert noted.places == [(1, 2), (2, 4)]
    with pytest.raises(MisconfigurationException, match=r"val_check_interval=5 counts clients.*first round has 4"):
        rounds(tmp_path, val_check_interval=5)


@row("val_check_interval", "a time", ONCE)
def times(tmp_path: Path) -> None:
    noted, now = Validations(), [0.0]

    class Slow(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 1.0
            return super().training_step(batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now[0])
        interval = timedelta(seconds=5)
        rounds(tmp_path, noted, module=Slow, val_check_interval=interval, num_sanity_val_steps=0, max_epochs=1)
    # Clients make 1, 6, 3 and 5 steps.
    assert noted.places == [(0, 2), (0, 4)]


@row("log_every_n_steps", "values of epochs", PLAIN)
def rows_of_epochs(tmp_path: Path) -> None:
    for number in (1, 5, 20):
        Fit({"log_every_n_steps": number})(tmp_path / str(number))


class OnStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(batch_idx), on_step=True)
        return super().training_step(batch, batch_idx)


@row("log_every_n_steps", "values of steps", ONCE)
@row("self.log", "on_step=True", ONCE)
def rows_of_steps(tmp_path: Path) -> None:
    settings = {"logger": CSVLogger(tmp_path, name="", version=0), "log_every_n_steps": 4, "max_epochs": 1}
    _, run = rounds(tmp_path, module=OnStep, **settings)
    run.logger.save()
    # A client's value is the mean of its steps' own. Rows are of the last multiple of four that it passed.
    expected = [(4 * (sum(STEPS[: place + 1]) // 4) - 1, (STEPS[place] - 1) / 2) for place in (1, 2, 3)]
    assert [(each["step"], each["number"]) for each in rows_of(tmp_path) if "number" in each] == expected


class Bar(ProgressBar):
    """A user's bar, which has no hook on a batch of its own but Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled, self.totals = True, []

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.totals.append(self.total_train_batches)


@row("enable_progress_bar", "", ONCE)
@row("TQDMProgressBar", "", ONCE)
def tqdm_bar(tmp_path: Path) -> None:
    bar = TQDMProgressBar()
    rounds(tmp_path, bar, enable_progress_bar=True)
    assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (len(CLIENTS), len(CLIENTS))


@row("RichProgressBar", "", ONCE)
def rich_bar(tmp_path: Path) -> None:
    bar, moved = RichProgressBar(), []
    update = bar._update
    bar._update = lambda task, current, visible=True: moved.append(current) or update(task, current, visible)
    rounds(tmp_path, bar, enable_progress_bar=True, limit_val_batches=0, max_epochs=1)
    assert moved == [1, 2, 3, 4]


@row("ProgressBar", "", ONCE)
def own_bar(tmp_path: Path) -> None:
    bar = Bar()
    rounds(tmp_path, bar, enable_progress_bar=True)
    assert bar.totals == [len(CLIENTS)] * 2


# What the trainer says


class Says(Module):
    """Notes in each of its hooks what the trainer says of the length of the fit."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.said: list[Any] = []

    def say(self, hook: str) -> None:
        run = self.trainer
        # The first asks Lightning to load its data, without which there is no loader yet.
        length = (run.estimated_stepping_batches, run.num_training_batches, len(run.train_dataloader))
        self.said.append((hook, length, (run.global_step, run.is_last_batch)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.say("training_step")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        self.say("configure_optimizers")
        return super().configure_optimizers()


def saying(hook: str) -> Callable[..., None]:
    return lambda self, *arguments: self.say(hook)


BETWEEN = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end")
for hook in (*BETWEEN, "on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step"):
    setattr(Says, hook, saying(hook))


@row("global_step", "", PLAIN)
@row("is_last_batch", "", PLAIN)
@row("estimated_stepping_batches", "", PLAIN)
@row("num_training_batches", "in a local step, configure_optimizers", PLAIN)
@row("train_dataloader", "in a local step, configure_optimizers", PLAIN)
def said(tmp_path: Path) -> None:
    def counts(run: pl.Trainer, module: Any, callbacks: list[Any]) -> list[Any]:
        return [(hook, length[0] if hook in BETWEEN else length, counted) for hook, length, counted in module.said]

    for settings in ({}, {"accumulate_grad_batches": 2}, {"max_steps": 17}):
        Fit(settings, look=counts, module=Says)(tmp_path / "-".join(settings))
    Fit({"max_epochs": 2}, look=lambda run, module, callbacks: module.length, module=AsksLate)(tmp_path / "late")


class AsksLate(Module):
    def on_train_epoch_end(self) -> None:
        self.length = self.trainer.estimated_stepping_batches if self.current_epoch == 1 else None


@row("num_training_batches", "between clients", ONCE)
@row("train_dataloader", "between clients", ONCE)
def said_between_clients(tmp_path: Path) -> None:
    module, _ = rounds(tmp_path, module=Says)
    assert {length for hook, length, _ in module.said if hook in BETWEEN} == {(2 * max(STEPS), 4, 4)}
    lengths = [length for hook, length, _ in module.said if hook == "training_step"]
    assert lengths == [(2 * max(STEPS), steps, steps) for steps in STEPS for _ in range(steps)] * 2
    with pytest.warns(UserWarning, match="on_train_start of Reads reads trainer.num_training_batches"):
        trainer(tmp_path, of_clients(), max_epochs=1).fit(Reads(), Data())


@row("total_batch_idx", "", ONCE)
def counts_clients(tmp_path: Path) -> None:
    counted: list[int] = []
    rounds(tmp_path, LambdaCallback(on_train_batch_start=lambda run, *_: counted.append(run.fit_loop.total_batch_idx)))
    assert counted == [turn for turn in range(8) for _ in range(STEPS[turn % 4])]


class Reads(Module):
    def on_train_start(self) -> None:
        self.length = self.trainer.num_training_batches


# Callbacks

row("Callback", "a user's own", PLAIN, Fit(callbacks=lambda folder: [Notes()], look=heard))
row("LambdaCallback", "", PLAIN, Fit(callbacks=lambda folder: [collecting()], look=heard))


def collecting() -> LambdaCallback:
    found: list[Any] = []
    each = {
        name: lambda trainer, module, *arguments, name=name: found.append((name, trainer.global_step, seen(arguments)))
        for name in ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_validation_end")
    }
    callback = LambdaCallback(**each)
    callback.heard = found
    return callback


class Backbone(Module):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.backbone = self.net[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=0.1)


fresh = {"loop": {"optimizer_state": "reset"}}
row("BaseFinetuning", "", PLAIN, Fit({"max_epochs": 4}, lambda folder: [Thaw()], module=Backbone, **fresh))
row(
    "BackboneFinetuning",
    "",
    PLAIN,
    Fit({"max_epochs": 4}, lambda folder: [BackboneFinetuning(1, lambda epoch: 1.5)], module=Backbone, **fresh),
)


@row("BaseFinetuning", "with optimizer_state='keep'", REFUSED)
@row("BackboneFinetuning", "with optimizer_state='keep'", REFUSED)
def thawing_with_moments(tmp_path: Path) -> None:
    for callback in (Thaw(), BackboneFinetuning(1)):
        with pytest.raises(MisconfigurationException, match=f"{type(callback).__name__}.*optimizer_state='keep'"):
            fit(trainer(tmp_path, of_clients(optimizer_state="keep"), callback), Backbone(), Data())


row("BasePredictionWriter", "", PLAIN, Fit({}, lambda folder: [Predictions()], **predicted))


class Saves(Checkpoint):
    """A user's checkpoints of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


row("Checkpoint", "", PLAIN, Fit(callbacks=lambda folder: [Saves(folder)]))

SAVED: dict[str, dict[str, Any]] = {
    "every epoch": {"save_top_k": -1},
    "the best": {"filename": "{epoch}-{val_loss:.3f}", "monitor": "val_loss", "save_top_k": 2, "save_last": True},
    "by a figure of training": {"monitor": "train_loss", "mode": "max", "save_top_k": 2},
    "every second epoch": {"every_n_epochs": 2, "save_top_k": -1},
    "at the epoch's end": {"save_on_train_epoch_end": True, "save_top_k": -1},
    "weights": {"save_weights_only": True},
}


@row("ModelCheckpoint", "by epochs and figures", PLAIN)
def checkpoints(tmp_path: Path) -> None:
    for case, settings in SAVED.items():
        saves = lambda folder, settings=settings: [ModelCheckpoint(folder, **settings)]  # noqa: E731
        Fit(callbacks=saves)(tmp_path / case)


@row("ModelCheckpoint", "by steps and time", ONCE)
def checkpoints_by_steps(tmp_path: Path) -> None:
    ends = [sum(STEPS[: place + 1]) for place in range(4)]
    by_steps = ModelCheckpoint(tmp_path / "steps", "{step}", save_top_k=-1, every_n_train_steps=4)
    rounds(tmp_path, by_steps, max_epochs=1)
    assert {path.stem for path in (tmp_path / "steps").iterdir()} == {f"step={end}" for end in ends[1:]}
    by_time = ModelCheckpoint(tmp_path / "time", "{step}", save_top_k=-1, train_time_interval=timedelta(0))
    rounds(tmp_path, by_time, max_epochs=1)
    assert {path.stem for path in (tmp_path / "time").iterdir()} == {f"step={end}" for end in ends}


class Interrupted(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.fit_loop.epoch_loop.global_step == sum(STEPS) + 3 and self.interrupts:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


@row("OnExceptionCheckpoint", "", ONCE)
def saved_on_exception(tmp_path: Path) -> None:
    def run(interrupts: bool, *callbacks: pl.Callback, **arguments: Any) -> Any:
        torch.manual_seed(0)
        module = Interrupted(network())
        module.interrupts = interrupts
        return fit(trainer(tmp_path, of_clients(), *callbacks), module, Data(), **arguments)

    whole = run(False)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(True, OnExceptionCheckpoint(tmp_path, "stopped"))
    # The client's own start, in the middle of which the fit was interrupted.
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=True)["global_step"] == sum(STEPS) + STEPS[0]
    assert_same(weights(run(False, ckpt_path=tmp_path / "stopped.ckpt")), weights(whole))


def monitored(folder: Path) -> list[pl.Callback]:
    return [LearningRateMonitor("step", log_momentum=True), LearningRateMonitor("epoch")]


by_steps = {"scheduler": decay, "interval": "step"}
row("LearningRateMonitor", "", PLAIN, Fit(callbacks=monitored, arguments=by_steps))
row("DeviceStatsMonitor", "", PLAIN, Fit(callbacks=lambda folder: [DeviceStatsMonitor(cpu_stats=False)]))
row(
    "GradientAccumulationScheduler",
    "",
    PLAIN,
    Fit(callbacks=lambda folder: [GradientAccumulationScheduler({0: 2, 1: 4})]),
)


@row("EarlyStopping", "", PLAIN)
def stopping(tmp_path: Path) -> None:
    for case, settings in {
        "validation": {"monitor": "val_loss"},
        "training": {"monitor": "train_loss", "check_on_train_epoch_end": True},
    }.items():
        stops = lambda folder, settings=settings: [EarlyStopping(**settings, mode="max", patience=1)]  # noqa: E731
        Fit({"max_epochs": 9}, stops)(tmp_path / case)


SWA: list[dict[str, Any]] = [
    {"swa_lrs": 0.05},
    {"swa_lrs": 0.05, "swa_epoch_start": 2, "annealing_epochs": 1},
    {"swa_lrs": 0.05, "swa_epoch_start": 0.3, "annealing_strategy": "linear", "annealing_epochs": 3},
]


@row("StochasticWeightAveraging", "", PLAIN)
def swa(tmp_path: Path) -> None:
    for number, settings in enumerate(SWA):
        averages = lambda folder, settings=settings: [  # noqa: E731
            StochasticWeightAveraging(**settings),
            LearningRateMonitor("epoch"),
        ]
        Fit({"max_epochs": 6}, averages, arguments={"scheduler": decay})(tmp_path / str(number))


@row("StochasticWeightAveraging", "with BatchNorm", REFUSED)
def swa_with_statistics(tmp_path: Path) -> None:
    module = Module(network(norm=nn.BatchNorm1d))
    with pytest.raises(MisconfigurationException, match=r"StochasticWeightAveraging .* BatchNorm"):
        fit(trainer(tmp_path, of_clients(), StochasticWeightAveraging(0.1)), module, Data())


class OfEpochs(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


class Late(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 70_000


ema = functools.partial(EMAWeightAveraging, decay=0.5)
by_epochs = functools.partial(ema, update_every_n_steps=0, update_starting_at_epoch=1)
row("WeightAveraging", "by epochs", PLAIN, Fit(callbacks=lambda folder: [OfEpochs()]))
row("EMAWeightAveraging", "by epochs", PLAIN, Fit(callbacks=lambda folder: [by_epochs()]))


@row("WeightAveraging", "by steps", REFUSED)
@row("EMAWeightAveraging", "by steps", REFUSED)
def averages_of_steps(tmp_path: Path) -> None:
    for callback, step in (
        (WeightAveraging(), 0),
        (Late(), 70_000),
        (ema(), 0),
        (ema(update_starting_at_step=5_001), 5_001),
    ):
        with pytest.raises(MisconfigurationException, match=f"{type(callback).__name__}.*such as step {step},"):
            fit(trainer(tmp_path, of_clients(), callback), Module(), Data())


def left(run: pl.Trainer, module: Any, callbacks: list[Any]) -> Any:
    return 0 < callbacks[0].time_remaining() < timedelta(hours=1).total_seconds()


@row("Timer", "", PLAIN)
def timed(tmp_path: Path) -> None:
    for interval in ("step", "epoch"):
        timer = lambda folder, interval=interval: [Timer(timedelta(hours=1), interval)]  # noqa: E731
        Fit(callbacks=timer, look=left)(tmp_path / interval)
    over = lambda folder: [Timer(timedelta(0), "step"), Notes()]  # noqa: E731
    Fit(callbacks=over, look=lambda run, module, callbacks: callbacks[1].heard)(tmp_path / "over")


throughput = {
    "batch_size_fn": lambda batch: len(batch[0]),
    "length_fn": lambda batch: batch[0].numel(),
    "window_size": 3,
}
of_the_clock = ("train/time", "train/device", "validate/time", "validate/device")
row(
    "ThroughputMonitor",
    "",
    PLAIN,
    Fit(callbacks=lambda folder: [ThroughputMonitor(**throughput)], without=of_the_clock),
)


def bad(run: pl.Trainer, module: Any, callbacks: list[Any]) -> Any:
    return callbacks[0].bad_batches, float(callbacks[0].running_mean.compute())


@row("SpikeDetection", "", PLAIN)
def spikes(tmp_path: Path) -> None:
    calm = lambda folder: [SpikeDetection(exclude_batches_path=folder / "bad.json")]  # noqa: E731
    Fit(callbacks=calm, look=bad)(tmp_path / "calm")
    # It doubts each loss that is not the last one.
    strict = lambda folder: [SpikeDetection(exclude_batches_path=folder / "bad.json", rtol=0.01)]  # noqa: E731
    Fit(callbacks=strict, look=bad, fails=TrainingSpikeException)(tmp_path / "spike")


def summarised(kind: type[ModelSummary]) -> Check:
    class Keeps(kind):  # type: ignore[misc,valid-type]
        heard: list[Any]

        @staticmethod
        def summarize(summary_data: Any, *arguments: Any, **keywords: Any) -> None:
            tables.append(str(summary_data))

    tables: list[str] = []

    def check(tmp_path: Path) -> None:
        Fit(callbacks=lambda folder: [Keeps(max_depth=2)])(tmp_path)
        of_rounds, plain = tables
        assert of_rounds == plain

    return check


row("ModelSummary", "", PLAIN, summarised(ModelSummary))
row("RichModelSummary", "", PLAIN, summarised(RichModelSummary))


class Tunable(Module):
    batch_size, lr = 8, 0.1


def refuses(callback: Callable[[], pl.Callback]) -> Check:
    def check(tmp_path: Path) -> None:
        made = callback()
        with pytest.raises(MisconfigurationException, match=f"^{type(made).__name__}"):
            fit(trainer(tmp_path, of_clients(), made), Tunable(), Data())

    return check


row("BatchSizeFinder", "", REFUSED, refuses(BatchSizeFinder))
row("LearningRateFinder", "", REFUSED, refuses(LearningRateFinder))
row("ModelPruning", "", REFUSED, refuses(lambda: ModelPruning("l1_unstructured")))

# Loggers that need a package of their own


def mlflow(folder: Path) -> Any:
    pytest.importorskip("mlflow")
    return MLFlowLogger("rounds", tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_location=str(folder))


def wandb(folder: Path) -> Any:
    pytest.importorskip("wandb")
    return WandbLogger("rounds", save_dir=folder, offline=True)


def comet(folder: Path) -> Any:
    pytest.importorskip("comet_ml")
    return CometLogger(online=False, offline_directory=str(folder), api_key="none")


@pytest.mark.parametrize("logger", [mlflow, wandb, comet])
def test_another_logger_gets_what_csv_gets(tmp_path, logger):
    def logged(logger: Any) -> list[Any]:
        calls: list[Any] = []
        log = logger.log_metrics

        def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
            calls.append((dict(metrics), step))
            log(metrics, step)

        logger.log_metrics = log_metrics
        torch.manual_seed(0)
        rounds(tmp_path, module=OnStep, logger=logger, log_every_n_steps=4)
        logger.finalize("success")
        return calls

    assert logged(logger(tmp_path)) == logged(CSVLogger(tmp_path, name="", version=0))


# The page


CHECKS: dict[Check, list[str]] = {}
for of, (_, check) in ROWS.items():
    CHECKS.setdefault(check, []).append(" ".join(of).strip())


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=[", ".join(names) for names in CHECKS.values()])
def test_a_row_holds(tmp_path, check):
    check(tmp_path)


def rows_of_page() -> dict[tuple[str, str], str]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    tables = [row for row in cells if len(row) == 4 and row[0].startswith("`")]
    return {(row[0].strip("`"), row[1].replace("`", "")): row[2] for row in tables}


def test_the_page_has_the_rows_that_are_checked():
    assert rows_of_page() == {of: verdict for of, (verdict, _) in ROWS.items()}


def test_each_argument_of_the_trainer_and_each_callback_has_a_row():
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    assert arguments | set(lightning_callbacks.__all__) <= {name for name, _ in ROWS}
