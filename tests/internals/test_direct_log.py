"""What is logged without Lightning's bookkeeping, against Lightning's own: nobody may see a difference."""

import copy
import csv
import pickle
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.federated.execution.traces import reachable
from lightning_lowrank.internals import direct_log
from lightning_lowrank.internals.direct_log import DirectLog, _Log
from tests.grids import nightly_except
from tests.helpers import Data, Module, assert_same, blobs, fit, trainer, weights

CLIENTS = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 103))]
REDUCTIONS = ("mean", "sum", "max", "min", torch.mean, max, "avg")


def exact(value: Any) -> Any:
    """Return a value with all that can be compared of it."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), str(value.device), value.requires_grad, value.tolist()
    if isinstance(value, dict):
        return [(name, exact(entry)) for name, entry in value.items()]
    return value


class Recording(pl.Callback):
    """Writes down what is kept of what was logged, then what the trainer shows of it."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def record(self, trainer: Any, moment: str) -> None:
        connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
        for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"):
            self.events.append((moment, name, exact(dict(getattr(connector, name)))))
        self.events.append((connector._current_fx, connector._first_loop_iter, results.batch_size))
        for key, item in results.items():
            kept = ("value", "cumulated_batch_size", "_forward_cache", "_update_count", "_computed", "has_reset")
            self.events.append((key, [exact(vars(item).get(name)) for name in kept]))
        if trainer.global_step % 2:
            for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
                self.events.append((name, exact(getattr(trainer, name))))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.record(trainer, "start")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.record(trainer, "end")

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.record(trainer, "validation")

    def on_train_epoch_end(self, trainer, pl_module):
        self.record(trainer, "epoch")


class Logging(Module):
    """Logs the loss in some steps."""

    def keywords(self, batch_idx: int) -> dict[str, Any]:
        return {}

    def values(self, loss: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"loss": loss}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for name, value in self.values(loss, batch_idx).items():
            self.log(name, value, **self.keywords(batch_idx))
        return loss


class OnEpoch(Logging):
    def keywords(self, batch_idx):
        return {"on_epoch": True, "prog_bar": True}


class Sized(Logging):
    def keywords(self, batch_idx):
        return {"on_step": False, "on_epoch": True, "batch_size": 3 + batch_idx}


class OtherSizes(Logging):
    def keywords(self, batch_idx):
        return {"on_epoch": True, "batch_size": [torch.tensor(3), 2.5, 2**24 + 1, True][batch_idx % 4]}


class Kinds(Logging):
    """Logs values of all kinds under one name each, and under one name for all."""

    def values(self, loss, batch_idx):
        kinds = (loss.double(), loss.bfloat16(), loss.half(), torch.tensor(batch_idx), loss.unsqueeze(0))
        kinds += (0.1 * batch_idx, batch_idx, batch_idx == 1, torch.tensor([[True]]), self.net[0].bias[:1])
        kinds += (torch.nn.Parameter(torch.tensor(0.3)), float("nan"), float("inf"), 1e300, loss)
        return {**{str(number): value for number, value in enumerate(kinds)}, "all": kinds[batch_idx]}

    def keywords(self, batch_idx):
        return {"on_epoch": True, "prog_bar": True}


class KindsInTurn(Kinds):
    def values(self, loss, batch_idx):
        found = list(super().values(loss, batch_idx).values())
        return {"value": found[(batch_idx + self.trainer.global_step) % 11]}


class Reduced(Logging):
    def values(self, loss, batch_idx):
        return {str(number): loss.double() if number % 2 else loss for number in range(2 * len(REDUCTIONS))}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for name, value in self.values(loss, batch_idx).items():
            for epoch, step in ((True, True), (True, False), (False, True)):
                reduction = REDUCTIONS[int(name) // 2]
                self.log(f"{name} {epoch} {step}", value, on_epoch=epoch, on_step=step, reduce_fx=reduction)
        return loss


class Sometimes(Logging):
    def values(self, loss, batch_idx):
        found = {"each": loss}
        if batch_idx == 1 or self.trainer.current_epoch == 1:
            found["first"] = loss
        return {"sometimes": loss, **found} if batch_idx > 1 else found

    def keywords(self, batch_idx):
        return {"on_epoch": True}


class InPlace(Logging):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            shown = loss.detach().clone()
            self.log("shown", shown, on_epoch=True)
            shown.zero_()
        return loss


class FromHooks(Logging):
    def _say(self, value: Any = 1.0) -> None:
        for epoch in (True, False):
            self.log(f"{self._current_fx_name} {epoch}", value, on_epoch=epoch, on_step=True)

    def on_train_epoch_start(self):
        self.log("epoch", float(self.trainer.current_epoch))

    def on_train_epoch_end(self):
        self.log("epoch_end", float(self.trainer.current_epoch))

    def on_train_batch_start(self, batch, batch_idx):
        self._say(batch_idx)

    def on_before_zero_grad(self, optimizer):
        self._say(0.1)

    def on_after_backward(self):
        self._say(self.net[0].bias.grad.norm())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._say(outputs["loss"])


class InDictionaries(Logging):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log_dict({"one": loss, "two": 2 * loss}, on_epoch=True, prog_bar=batch_idx < 0)
        self.log("positional", loss, True, False, False, True, "sum", False)
        return loss


class WithMetrics(Logging):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.log("metric", self.mean, on_epoch=True, on_step=True)
        self.log("graph", loss, enable_graph=True, on_epoch=True)
        return loss


class Several(Data):
    def val_dataloader(self):
        return [DataLoader(blobs(40, seed=seed), batch_size=15) for seed in (8, 9)]


class ValidatedTwice(OnEpoch):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


class OtherBatches(OnEpoch):
    """Takes batches whose size Lightning has to look for."""

    def loss(self, batch):
        return super().loss((batch["inputs"], batch["targets"]))

    def validation_step(self, batch, batch_idx):
        super().validation_step((batch["inputs"], batch["targets"]), batch_idx)


def in_dictionary(samples):
    inputs, targets = torch.utils.data.default_collate(samples)
    return {"inputs": inputs, "targets": targets}


class Dictionaries(Data):
    def __init__(self) -> None:
        super().__init__(collate_fn=in_dictionary)

    def val_dataloader(self):
        return DataLoader(blobs(40, seed=8), batch_size=20, collate_fn=in_dictionary)


class Uneven(Data):
    """Its batches hold tensors of other lengths too."""

    def __init__(self) -> None:
        super().__init__(collate_fn=lambda samples: (*torch.utils.data.default_collate(samples), torch.zeros(1)))


class OfUneven(OnEpoch):
    def loss(self, batch):
        return super().loss(batch[:2])


class Missing(OnEpoch):
    """Logs without a batch."""

    def on_train_start(self):
        self.log("start", 1.0)


CASES: dict[str, dict[str, Any]] = {
    "for each step": {},
    "for each epoch": {"module": OnEpoch},
    "with its own size": {"module": Sized},
    "sizes that are no usual numbers": {"module": OtherSizes},
    "values of all kinds": {"module": Kinds},
    "kinds in turn": {"module": KindsInTurn},
    "reduced in all ways": {"module": Reduced},
    "in some steps": {"module": Sometimes},
    "changed in place": {"module": InPlace},
    "from several hooks": {"module": FromHooks},
    "dictionaries": {"module": InDictionaries},
    "metrics too": {"module": WithMetrics},
    "before training": {"module": Missing},
    "batches in dictionaries": {"module": OtherBatches, "data": Dictionaries},
    "batches of no one size": {"module": OfUneven, "data": Uneven},
    "two validation loaders": {"module": ValidatedTwice, "data": Several},
    "validated inside rounds": {"module": Sometimes, "trainer": {"val_check_interval": 0.25}},
    "every step to the loggers": {"module": OnEpoch, "trainer": {"log_every_n_steps": 1}},
    "nothing to the loggers": {"module": OnEpoch, "trainer": {"log_every_n_steps": 0}},
    "no logger": {"module": OnEpoch, "trainer": {"logger": False}},
    "a quick look": {"module": OnEpoch, "trainer": {"fast_dev_run": 3}},
    "accumulated": {"module": OnEpoch, "trainer": {"accumulate_grad_batches": 2}},
    "together": {"module": OnEpoch, "execution": "vectorized"},
    "together, with its own size": {"module": Sized, "execution": "vectorized"},
    "in double precision": {"module": Kinds, "trainer": {"precision": "64-true"}},
    "in mixed precision": {"module": Kinds, "trainer": {"precision": "bf16-mixed"}},
}


def run(folder, module=Logging, data=Data, execution="sequential", fast=True, **settings):
    events: list[Any] = []
    torch.manual_seed(0)
    made = module()
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), execution=execution, fast_steps=fast, summary=False)
    given = settings.get("trainer", {})
    keep: dict[str, Any] = {"log_every_n_steps": 2, "logger": CSVLogger(folder, name="", version=0)}
    callbacks = [loop, Recording(events)]
    if "fast_dev_run" in given:
        keep = {}
    else:
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3))
    fitted = trainer(folder, *callbacks, **{**keep, **given})
    fit(fitted, made, data(), ckpt_path=settings.get("ckpt_path"))
    file = folder / "version_0" / "metrics.csv"
    rows = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
    return made, fitted, events, rows


def assert_seen(found, expected):
    module, fitted, events, rows = found
    reference_module, reference, told, expected_rows = expected
    assert_same(weights(module), weights(reference_module))
    # As text, for NaN is not NaN.
    assert list(map(str, events)) == list(map(str, told))
    assert rows == expected_rows
    assert str(exact(fitted.callback_metrics)) == str(exact(reference.callback_metrics))
    assert str(exact(fitted.logged_metrics)) == str(exact(reference.logged_metrics))
    assert fitted.fit_loop.state_dict() == reference.fit_loop.state_dict()


@nightly_except("for each epoch")
@pytest.mark.slow
@nightly_except("for each epoch", "from several hooks", "together")
@pytest.mark.parametrize("case", CASES)
def test_nobody_sees_a_difference(tmp_path, case):
    found = run(tmp_path / "direct", **CASES[case])
    assert_seen(found, run(tmp_path / "lightning", **CASES[case], fast=False))
    names = sorted(path.name for path in (tmp_path / "lightning").glob("*.ckpt"))
    assert names == sorted(path.name for path in (tmp_path / "direct").glob("*.ckpt"))
    for name in names:
        ours, theirs = (torch.load(tmp_path / folder / name, weights_only=False) for folder in ("direct", "lightning"))
        assert ours["loops"] == theirs["loops"]


@pytest.mark.nightly
def test_a_round_is_resumed_from_each_of_its_steps(tmp_path):
    _, fitted, _, _ = run(tmp_path / "whole", module=Sometimes)
    for step in range(3, fitted.global_step, 3):
        (file,) = (tmp_path / "whole").glob(f"step={step}.ckpt")
        found = run(tmp_path / f"direct {step}", module=Sometimes, ckpt_path=file)
        assert_seen(found, run(tmp_path / f"lightning {step}", module=Sometimes, ckpt_path=file, fast=False))


def count_lightnings(monkeypatch, kind=pl.LightningModule):
    calls: list[str] = []
    lightnings = kind.log

    def log(self, name, *arguments, **keywords):
        calls.append(name)
        lightnings(self, name, *arguments, **keywords)

    monkeypatch.setattr(direct_log, "_calls_fit", lambda: True)
    monkeypatch.setattr(kind, "log", log)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_lightning_treats_each_call_once(tmp_path, monkeypatch, execution):
    calls = count_lightnings(monkeypatch)
    run(tmp_path, module=OnEpoch, execution=execution)
    assert sorted({*calls}) == ["loss", "val_acc", "val_loss"]
    assert calls.count("loss") == 1


@pytest.mark.slow
def test_what_is_not_known_is_left_to_lightning(tmp_path, monkeypatch):
    calls = count_lightnings(monkeypatch)
    _, fitted, _, _ = run(tmp_path, module=WithMetrics)
    assert calls.count("metric") == calls.count("graph") == fitted.global_step == 45


@pytest.mark.slow
def test_one_process_means_no_synchronization(tmp_path, monkeypatch):
    class Synchronized(OnEpoch):
        def keywords(self, batch_idx):
            return {"on_epoch": True, "sync_dist": True, "rank_zero_only": True}

    calls = count_lightnings(monkeypatch)
    run(tmp_path, module=Synchronized)
    assert calls.count("loss") == 1


class Overriding(OnEpoch):
    def log(self, name, value, **keywords):
        super().log(f"own {name}", value, **keywords)


@pytest.mark.slow
def test_a_modules_own_log_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(_Log, "__call__", lambda *arguments, **keywords: pytest.fail("a direct call"))
    monkeypatch.setattr(direct_log, "_calls_fit", lambda: True)
    _, fitted, _, _ = run(tmp_path, module=Overriding)
    assert "own loss" in fitted.callback_metrics


class Wrong(Logging):
    wrong: ClassVar[dict[str, Any]] = {}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", **({"value": loss, "on_epoch": True} | (self.wrong if batch_idx == 2 else {})))
        return loss


WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "two elements": ({"value": torch.zeros(2)}, ValueError),
    "text": ({"value": "loss"}, ValueError),
    "other settings": ({"prog_bar": True}, MisconfigurationException),
    "another reduction": ({"reduce_fx": "sum"}, MisconfigurationException),
    "an unknown reduction": ({"reduce_fx": sorted}, MisconfigurationException),
    "a reduction without a hash": ({"reduce_fx": []}, Exception),
    "neither": ({"on_step": False, "on_epoch": False}, MisconfigurationException),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.nightly
def test_what_lightning_refuses_is_refused(tmp_path, monkeypatch, case):
    given, error = WRONG[case]
    monkeypatch.setattr(Wrong, "wrong", given)
    messages = []
    for fast in (True, False):
        loop = FederatedLoop(
            FedAvg(), partition=FromIndices(CLIENTS), fast_steps=fast, on_client_error="raise", summary=False
        )
        module = Wrong()
        with pytest.raises(error) as raised:
            fit(trainer(tmp_path, loop), module, Data())
        messages.append((type(raised.value), str(raised.value)))
        assert "log" not in vars(module)
    assert messages[0] == messages[1]


class Logged(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_the_module_logs_as_its_class_does(tmp_path, copied):
    run, module = trainer(tmp_path), Logged()
    run.strategy.connect(module)
    module.trainer = run
    direct = DirectLog(run)
    assert type(vars(module)["log"]) is _Log
    other = copied(module)
    assert other is not module
    assert (other.log.__self__, other.log.__func__) == (other, pl.LightningModule.log)
    direct.restore()
    assert module.log.__func__ is pl.LightningModule.log


def test_who_looks_what_a_module_holds_finds_no_metric_of_the_trainer(tmp_path):
    run, module = trainer(tmp_path), Logged()
    run.strategy.connect(module)
    run.fit_loop.epoch_loop._results["a"] = MeanMetric()
    before = {id(item) for _, item in reachable("self", module)}
    DirectLog(run)
    (added,) = (item for _, item in reachable("self", module) if id(item) not in before)
    assert added is vars(module)["log"]


@pytest.mark.slow
def test_lightnings_own_is_given_back(tmp_path):
    module, fitted, _, _ = run(tmp_path, module=OnEpoch)
    assert "log" not in vars(module)
    assert not vars(fitted._logger_connector).keys() & {"on_batch_start", "on_batch_end", "update_train_step_metrics"}


@pytest.mark.slow
@pytest.mark.nightly
def test_without_fast_steps_nothing_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(DirectLog, "__init__", lambda *arguments: pytest.fail("a direct log"))
    run(tmp_path, fast=False)


def known(tmp_path, module=None, **arguments):
    plain = trainer(tmp_path, **arguments)
    plain.strategy.connect(Module() if module is None else module)
    return direct_log._is_known(plain)


def test_this_lightning_is_known(tmp_path):
    assert known(tmp_path), (
        "this Lightning does not log as DirectLog does: compare LightningModule.log, _ResultCollection.log,"
        " _ResultMetric.update and _LoggerConnector with it, then mend direct._RELEASES, _NEEDED and _calls_fit"
    )


def test_a_metric_keeps_what_is_written_to_it(tmp_path):
    _, fitted, _, _ = run(tmp_path, module=OnEpoch, trainer={"max_epochs": 1})
    (item,) = fitted.fit_loop.epoch_loop._results.values()
    kept = {"value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset", "meta"}
    assert kept <= vars(item).keys()
    assert item.meta.forked_name(on_step=True) == "loss_step"
    assert not item.meta.sync.should


def another_release(monkeypatch):
    monkeypatch.setattr("lightning.__version__", "2.7.0.dev0")


def another_import(monkeypatch):
    monkeypatch.setattr(direct_log, "_IMPORTED", False)


def another_part(monkeypatch):
    monkeypatch.setattr(direct_log, "_NEEDED", (*direct_log._NEEDED, "fit_loop.epoch_loop.no_such_part"))


def another_argument(monkeypatch):
    monkeypatch.setattr(pl.LightningModule, "log", lambda self, name, value, new=None: None)


def another_call(monkeypatch):
    monkeypatch.setattr(direct_log._LoggerConnector, "on_batch_end", lambda self, new: None)


@pytest.mark.parametrize("change", [another_release, another_import, another_part, another_argument, another_call])
def test_another_lightning_is_not_known(tmp_path, monkeypatch, change):
    change(monkeypatch)
    assert not known(tmp_path)


def test_what_logs_otherwise_is_not_known(tmp_path):
    assert not known(tmp_path, Overriding())
    assert not known(tmp_path, barebones=True, enable_checkpointing=False)


@pytest.mark.slow
@pytest.mark.nightly
def test_another_lightning_logs_itself(tmp_path, monkeypatch):
    expected = run(tmp_path / "known", module=OnEpoch)
    monkeypatch.setattr(_Log, "__call__", lambda *arguments, **keywords: pytest.fail("a direct call"))
    another_part(monkeypatch)
    assert_seen(run(tmp_path / "other", module=OnEpoch), expected)
