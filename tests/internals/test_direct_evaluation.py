"""Evaluations that call only what is overridden, against Lightning's own: nothing may be different."""

import csv
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.data.images import TensorImages, collate_images
from lightning_lowrank.internals import direct_evaluation
from lightning_lowrank.internals.direct_evaluation import DirectEvaluation
from tests.grids import nightly_except
from tests.helpers import Data, Module, assert_same, blobs, fit, seen, trainer, weights

CLIENTS = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 103))]
MOMENTS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")


class Listening(pl.Callback):
    """Writes down what it is told, and what the trainer has counted and logged by then."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events


class Evaluated(Module):
    """Logs values and metric objects in the ways that modules do."""

    def __init__(self, events: list[Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.events = events
        self.val_accuracy = MulticlassAccuracy(4, average="micro")
        self.val_scores = MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)], prefix="score/")
        self.val_mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        inputs, targets = batch
        outputs = self.net(inputs)
        self.events.append(("step", self._current_fx_name, seen(batch), inputs.is_inference(), batch_idx))
        self.log("val_loss", torch.nn.functional.cross_entropy(outputs, targets), prog_bar=True)
        self.val_accuracy.update(outputs, targets)
        self.log("val_acc", self.val_accuracy, prog_bar=True, on_epoch=True)
        self.val_scores.update(outputs, targets)
        self.log_dict(self.val_scores, on_step=False, on_epoch=True)
        self.log("val_mean", self.val_mean(outputs.mean()), on_step=True, on_epoch=True)
        # A step may do with its batch what it likes.
        inputs.zero_()
        return outputs.sum()

    test_step = validation_step


class LoggingForward(Evaluated):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.val_accuracy(self.net(batch[0]), batch[1])
        self.log("val_acc", self.val_accuracy, on_step=True, on_epoch=True)
        self.log("val_loss", self.val_accuracy, batch_size=len(batch[1]))


class LoggingAtTheEnd(Evaluated):
    def validation_step(self, batch, batch_idx):
        self.val_accuracy.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log("val_loss", self.val_accuracy.compute())
        self.val_accuracy.reset()


class WithoutIndex(Evaluated):
    def validation_step(self, batch):
        return super().validation_step(batch, 0)


class Quiet(Evaluated):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def _listen(hook: str) -> None:
    def of_callback(self, trainer, pl_module, *arguments):
        loop = trainer.validate_loop if trainer.validating else trainer.fit_loop.epoch_loop.val_loop
        loop = trainer.test_loop if trainer.testing else loop
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        counted = loop.batch_progress.state_dict(), loop._has_run, dict(loop._seen_batches_per_dataloader)
        self.events.append((hook, pl_module._current_fx_name, seen(arguments), counted, logged))
        if hook.endswith("batch_end"):
            pl_module.log("callback", float(len(self.events)), batch_size=4)

    def of_module(self, *arguments):
        self.events.append((f"module's {hook}", self._current_fx_name, seen(arguments)))

    setattr(Listening, hook, of_callback)
    if not (hook.startswith("on_test") or hook.endswith("epoch_end")):
        setattr(Evaluated, hook, of_module)


for _moment in MOMENTS:
    _listen(f"on_validation_{_moment}")
    _listen(f"on_test_{_moment}")


class EvaluationData(Data):
    def __init__(self, *loaders: Any) -> None:
        super().__init__()
        self.loaders = loaders

    def val_dataloader(self):
        made = [make() for make in self.loaders]
        return made if len(made) > 1 else made[0]

    test_dataloader = val_dataloader


def images() -> TensorImages:
    draws = torch.Generator().manual_seed(3)
    pixels = torch.randint(256, (30, 1, 2, 3), generator=draws, dtype=torch.uint8)
    return TensorImages(pixels, torch.randint(4, (30,), generator=draws), mean=[0.4], std=[0.3])


def of_images() -> DataLoader:
    return DataLoader(images(), batch_size=8, collate_fn=collate_images)


class Flat(Evaluated):
    """Takes images."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return super().validation_step([batch[0].flatten(1), batch[1]], batch_idx, dataloader_idx)


class OfDictionaries(Evaluated):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return super().validation_step([batch["inputs"], batch["targets"]], batch_idx, dataloader_idx)


class Dictionaries(torch.utils.data.Dataset):
    deterministic = True

    def __len__(self):
        return 40

    def __getitem__(self, index):
        inputs, target = blobs(40, seed=8)[index]
        return {"inputs": inputs, "targets": target}


def plain(**arguments: Any) -> Any:
    return lambda: DataLoader(blobs(42, seed=8), **{"batch_size": 8, **arguments})


PLAIN = plain()
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a module that listens to nothing": {"module": Quiet},
    "a value for each batch": {"module": LoggingForward},
    "logged at the end": {"module": LoggingAtTheEnd},
    "no index": {"module": WithoutIndex},
    "dropped": {"loaders": [plain(drop_last=True)]},
    "shuffled": {"loaders": [plain(shuffle=True)]},
    "several loaders": {"loaders": [plain(), of_images], "module": Flat},
    "several loaders, a few batches of each": {"loaders": [plain(), plain()], "trainer": {"limit_val_batches": 2}},
    "a subset": {"loaders": [lambda: DataLoader(Subset(Subset(blobs(), range(3, 90)), [5, 2, 7, 80, 41]), 2)]},
    "images": {"loaders": [of_images], "module": Flat},
    "dictionaries": {"loaders": [lambda: DataLoader(Dictionaries(), 7)], "module": OfDictionaries},
    "sanity": {"trainer": {"num_sanity_val_steps": 2}},
    "a share": {"trainer": {"limit_val_batches": 0.5}},
    "inside rounds": {"trainer": {"val_check_interval": 0.25}},
    "every second round": {"trainer": {"check_val_every_n_epoch": 2}},
    "loaded again": {"trainer": {"reload_dataloaders_every_n_epochs": 1}},
    "with gradients": {"trainer": {"inference_mode": False}},
    "stopped early": {"callbacks": [lambda: EarlyStopping("val_loss", patience=1, min_delta=10.0)]},
    "a progress bar": {"callbacks": [TQDMProgressBar], "trainer": {"enable_progress_bar": True}},
    "clients' own": {"loop": {"personal_test": "matched_labels"}},
    "together": {"loop": {"execution": "vectorized"}},
    "a quick look": {"trainer": {"fast_dev_run": 2}},
}


def run(folder, module=Evaluated, loaders=(PLAIN,), loop=None, callbacks=(), fast=True, **settings):
    events: list[Any] = []
    arguments = {"num_sanity_val_steps": 0, **settings.get("trainer", {})}
    quick = "fast_dev_run" in arguments
    federated = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), fast_steps=fast, summary=False, **(loop or {}))
    monitor = "val_loss/dataloader_idx_0" if len(loaders) > 1 else "val_loss"
    checkpoint = [] if quick else [ModelCheckpoint(folder, "{epoch}", monitor=monitor)]
    logger = {} if quick else {"logger": CSVLogger(folder, name="", version=0), "log_every_n_steps": 2}
    made = module(events)
    torch.manual_seed(5)
    others = [make() for make in callbacks]
    fitted = trainer(folder, federated, Listening(events), *others, *checkpoint, **{**logger, **arguments})
    data = EvaluationData(*loaders)
    fit(fitted, made, data)
    events.append(torch.rand(()).item())
    return made, fitted, data, events


def rows(folder) -> list[dict[str, str]]:
    file = folder / "version_0" / "metrics.csv"
    if not file.exists():
        return []
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def values(fitted: pl.Trainer) -> list[dict[str, float]]:
    seen_by = (fitted.callback_metrics, fitted.logged_metrics, fitted.progress_bar_metrics)
    return [{name: float(value) for name, value in metrics.items()} for metrics in seen_by]


@nightly_except("images")
@pytest.mark.slow
@nightly_except("plain", "several loaders", "images", "sanity")
@pytest.mark.parametrize("case", CASES)
def test_nobody_sees_a_difference(tmp_path, case, capsys):
    module, fitted, _, events = run(tmp_path / "direct", **CASES[case])
    expected, reference, _, told = run(tmp_path / "lightning", **CASES[case], fast=False)
    assert events == told
    assert_same(weights(module), weights(expected))
    assert module._current_fx_name == expected._current_fx_name
    assert rows(tmp_path / "direct") == rows(tmp_path / "lightning")
    assert values(fitted) == values(reference)
    assert fitted.fit_loop.state_dict() == reference.fit_loop.state_dict()
    names = sorted(path.name for path in (tmp_path / "lightning").glob("*.ckpt"))
    assert names == sorted(path.name for path in (tmp_path / "direct").glob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.nightly
def test_evaluations_after_the_fit(tmp_path, stage):
    results, logs = [], []
    for fast in (True, False):
        module, fitted, data, events = run(tmp_path / str(fast), fast=fast, trainer={"max_epochs": 1})
        results.append(getattr(fitted, stage)(module, data, verbose=False))
        logs.append((events, values(fitted), rows(tmp_path / str(fast))))
    assert results[0] == results[1]
    assert logs[0] == logs[1]


def count_steps(monkeypatch) -> list[int]:
    steps: list[int] = []
    direct = direct_evaluation._Calls.step
    monkeypatch.setattr(
        direct_evaluation._Calls, "step", lambda self, *arguments: steps.append(1) or direct(self, *arguments)
    )
    return steps


@pytest.mark.slow
def test_usual_evaluations_are_direct_and_lightnings_own_after_the_fit(tmp_path, monkeypatch):
    steps = count_steps(monkeypatch)
    module, fitted, data, _ = run(tmp_path)
    assert len(steps) == 3 * 6, (
        "direct_evaluation does not know this Lightning: all evaluations are left to it. Compare its _EvaluationLoop"
        " with direct_evaluation.py and add the release"
    )
    loop = fitted.fit_loop.epoch_loop.val_loop
    assert not {"run", "reset", "_evaluation_step"} & vars(loop).keys()
    assert "log" not in vars(loop._results)
    assert "_get_iterator" not in vars(fitted.val_dataloaders)
    fitted.validate(module, data, verbose=False)
    fitted.test(module, data, verbose=False)
    assert len(steps) == 5 * 6
    for loop in (fitted.validate_loop, fitted.test_loop):
        assert not {"run", "reset", "_evaluation_step"} & vars(loop).keys()


@pytest.mark.slow
def test_what_is_logged_passes_lightnings_checks_once_in_an_evaluation(tmp_path, monkeypatch):
    checked = []
    kind = type(trainer(tmp_path).validate_loop._results)
    log = kind.log

    def counted(self, fx, name, *arguments, **settings):
        checked.append(name)
        return log(self, fx, name, *arguments, **settings)

    monkeypatch.setattr(kind, "log", counted)
    run(tmp_path)
    assert checked.count("val_acc") == checked.count("score/MulticlassF1Score") == 3
    # `DirectLog` knows a number from one evaluation to the next.
    assert checked.count("val_loss") == 1


def test_a_metric_logged_twice_in_different_ways_is_refused(tmp_path):
    class Twice(Evaluated):
        def validation_step(self, batch, batch_idx):
            self.val_accuracy.update(self.net(batch[0]), batch[1])
            self.log("val_loss", self.val_accuracy, prog_bar=batch_idx > 2)

    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="twice in `validation_step`"):
        run(tmp_path, module=Twice)


def test_an_error_in_a_step_gives_the_loaders_back(tmp_path):
    class Failing(Evaluated):
        def validation_step(self, batch, batch_idx):
            raise ValueError("a step that fails")

    kept = []

    def loader():
        kept.append(plain()())
        return kept[-1]

    with pytest.raises(ValueError, match="a step that fails"):
        run(tmp_path, module=Failing, loaders=[loader])
    assert "_get_iterator" not in vars(kept[0])


class OwnTransfer(Evaluated):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [2 * batch[0], batch[1]]


class ReadingItself(Evaluated):
    def validation_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]))


class OtherStrategy(SingleDeviceStrategy):
    def validation_step(self, *arguments):
        return super().validation_step(*arguments)


LEFT_TO_LIGHTNING: dict[str, dict[str, Any]] = {
    "on_after_batch_transfer": {"module": OwnTransfer},
    "dataloader_iter": {"module": ReadingItself},
    "strategy": {"trainer": {"strategy": OtherStrategy("cpu")}},
    "bf16": {"trainer": {"precision": "bf16-true"}},
    "64-true": {"trainer": {"precision": "64-true"}},
    "profiler": {"trainer": {"profiler": "simple"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("own", LEFT_TO_LIGHTNING)
@pytest.mark.nightly
def test_ways_of_their_own_are_left_to_lightning(tmp_path, monkeypatch, own):
    steps = count_steps(monkeypatch)
    settings = LEFT_TO_LIGHTNING[own]
    run(tmp_path, **{**settings, "trainer": {"max_epochs": 1, **settings.get("trainer", {})}})
    assert not steps


@pytest.mark.slow
def test_a_datamodules_own_transfer_is_left_to_lightning(tmp_path, monkeypatch):
    class Doubling(Data):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [2 * batch[0], batch[1]]

    steps = count_steps(monkeypatch)
    fit(trainer(tmp_path, FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)), Module(), Doubling())
    assert not steps


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
def test_without_fast_steps_all_is_left_to_lightning(tmp_path, monkeypatch, fast):
    made = []
    monkeypatch.setattr(DirectEvaluation, "_reset", lambda self: made.append(1) or self._reset_as_lightning())
    run(tmp_path, fast=fast, trainer={"max_epochs": 1})
    assert bool(made) == fast


@pytest.mark.parametrize("change", ["release", "a part", "an argument"])
def test_an_unknown_lightning_is_left_alone(tmp_path, monkeypatch, change):
    if change == "release":
        monkeypatch.setattr("lightning.__version__", "2.5.0")
    elif change == "a part":
        monkeypatch.setattr(direct_evaluation, "_NEEDED_OF_LOOP", ("_no_such_part",))
    else:
        monkeypatch.setattr(direct_evaluation._EvaluationLoop, "reset", lambda self, more=None: None, raising=True)
        monkeypatch.setattr(direct_evaluation._EvaluationLoop, "run", lambda self, more: None)
    made = trainer(tmp_path)
    direct = DirectEvaluation(made, "fit", lambda loader: lambda: None)
    assert "_evaluation_step" not in vars(made.fit_loop.epoch_loop.val_loop)
    direct.restore()


def test_hooks_of_one_object_are_heard(tmp_path):
    heard = []
    module, callback = Module(), pl.Callback()
    module.on_validation_batch_start = lambda *arguments: heard.append("module")
    callback.on_validation_batch_end = lambda *arguments: heard.append("callback")
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    fit(trainer(tmp_path, loop, callback, max_epochs=1, num_sanity_val_steps=0), module, Data())
    assert heard == 2 * ["module", "callback"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_dataset_that_changes_between_rounds_is_read_again(tmp_path):
    class Changing(pl.Callback):
        def __init__(self, dataset):
            self.dataset = dataset

        def on_train_epoch_start(self, trainer, pl_module):
            if isinstance(self.dataset, TensorDataset):
                self.dataset.tensors = (self.dataset.tensors[0] + 1, self.dataset.tensors[1])
            elif trainer.current_epoch == 1:
                self.dataset.images += 1
            else:
                self.dataset.targets = (self.dataset.targets + 1) % 4

    for make, collate in ((lambda: blobs(42, seed=8), None), (images, collate_images)):
        seen_by = []
        for fast in (True, False):
            dataset = make()
            loader = [lambda dataset=dataset, collate=collate: DataLoader(dataset, 8, collate_fn=collate)]
            callbacks = [lambda dataset=dataset: Changing(dataset)]
            *_, events = run(tmp_path, loaders=loader, callbacks=callbacks, module=Flat, fast=fast)
            seen_by.append([tuple(event[2]) for event in events[:-1] if event[0] == "step"])
        assert seen_by[0] == seen_by[1]
        assert len(set(seen_by[0])) > 10
