"""Steps that call only what is overridden, against Lightning's own: nothing may be different."""

import csv
import functools
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedAvg, FederatedLoop, FedProx, FromIndices, PFedMe
from lightning_lowrank.internals import direct_steps
from lightning_lowrank.internals.direct import Hooks
from lightning_lowrank.internals.direct_steps import DirectSteps
from tests.grids import nightly_except
from tests.helpers import Data, Module, assert_same, blobs, fit, seen, trainer, weights

CLIENTS = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 103))]
HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Listening(pl.Callback):
    """Writes down what it is told, and what the trainer has counted by then."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def on_train_epoch_end(self, trainer, pl_module):
        results = trainer.fit_loop.epoch_loop._results
        self.events.append(("held between rounds", seen(results.batch), results.batch_size))


class ListeningToStacks(pl.Callback):
    """Listens to what may be listened to where clients step together."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events


class ListeningModule(Module):
    def __init__(self, events: list[Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.events = events

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.events.append(("training_step", self._current_fx_name, self.trainer.global_step, batch_idx))
        self.log("each_step", self.loss(batch).detach(), on_step=True, on_epoch=True, prog_bar=True)
        return super().training_step(batch, batch_idx)


def _listen(hook: str) -> None:
    def of_callback(self, trainer, pl_module, *arguments):
        loop = trainer.fit_loop.epoch_loop
        counted = loop.batch_progress.state_dict(), loop.automatic_optimization.state_dict(), trainer.global_step
        self.events.append((hook, pl_module._current_fx_name, seen(arguments), counted))
        if hook in ("on_train_batch_start", "on_train_batch_end"):
            pl_module.log(f"callback/{hook}", float(trainer.global_step), batch_size=8)
        return -1

    def of_module(self, *arguments):
        self.events.append((f"module's {hook}", self._current_fx_name, seen(arguments)))

    setattr(Listening, hook, of_callback)
    setattr(ListeningModule, hook, of_module)
    if hook not in ("on_after_backward", "on_before_optimizer_step"):
        setattr(ListeningToStacks, hook, of_callback)


for _hook in HOOKS:
    _listen(_hook)


class Ending(ListeningModule):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None


class WithExtras(ListeningModule):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "inputs": batch[0]}


class LeavingOut(ListeningModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else loss


class WithoutIndex(ListeningModule):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class Clipping(ListeningModule):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.events.append(("clipping", gradient_clip_val, gradient_clip_algorithm))
        self.clip_gradients(optimizer, gradient_clip_val or 0.1, gradient_clip_algorithm or "value")


class Quiet(Module):
    """Logs nothing in its steps, and listens to nothing."""

    def __init__(self, events: list[Any], **arguments: Any) -> None:
        super().__init__(**arguments)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Logging(Quiet):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("each_step", loss, on_step=True, on_epoch=True)
        return loss


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


class Unhurried(torch.optim.SGD):
    """Calls its closure where gradients are off, and once more than it needs to."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)
        return loss


class Hooked(torch.optim.SGD):
    """Is listened to at each step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.register_step_post_hook(lambda optimizer, *_: [value.data.mul_(0.9) for value in weights_of(optimizer)])


def weights_of(optimizer):
    return [value for group in optimizer.param_groups for value in group["params"]]


class Stopping(ListeningModule):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = self.trainer.global_step == 6
        return super().training_step(batch, batch_idx)


class Plateau(ListeningModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "each_step", "strict": False}]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a module that listens to nothing": {"module": Quiet},
    "momentum and steps of the learning rate": {
        "arguments": {"scheduler": step_lr, "interval": "step", "optimizer": lambda p: torch.optim.Adam(p, lr=0.01)}
    },
    "rounds of the learning rate": {"arguments": {"scheduler": step_lr}},
    "steps of the learning rate at a plateau": {"module": Plateau},
    "several gradients a step": {"arguments": {"optimizer": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=3)}},
    "gradients that the optimizer asks for": {"arguments": {"optimizer": lambda p: Unhurried(p, lr=0.1)}},
    "a hook of the optimizer": {"arguments": {"optimizer": lambda p: Hooked(p, lr=0.1)}},
    "stopped within a round": {"module": Stopping},
    "validated after some batches": {"trainer": {"val_check_interval": 4, "check_val_every_n_epoch": None}},
    "clipped by norm": {"trainer": {"gradient_clip_val": 0.1}},
    "clipped by value": {"trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}},
    "clipped in its own way": {"module": Clipping},
    "extras": {"module": WithExtras},
    "a step left out": {"module": LeavingOut},
    "no index": {"module": WithoutIndex},
    "a round cut short": {"module": Ending},
    "validated inside rounds": {"trainer": {"val_check_interval": 0.25}},
    "stopped by steps": {"trainer": {"max_steps": 9, "max_epochs": -1}},
    "a quick look": {"trainer": {"fast_dev_run": 3}},
    "a method with a hook of its own": {"algorithm": lambda: FedProx(0.3)},
    "several updates a batch": {"algorithm": lambda: PFedMe(personal_steps=2)},
    "several updates a batch, clipped": {
        "algorithm": lambda: PFedMe(personal_steps=2),
        "trainer": {"gradient_clip_val": 0.1},
    },
    "several updates a batch, together": {
        "algorithm": lambda: PFedMe(personal_steps=2),
        "execution": "vectorized",
        "module": Logging,
    },
    "together": {"execution": "vectorized", "module": Quiet},
    "together, logging": {"execution": "vectorized", "module": Logging},
    "together, clipped": {"execution": "vectorized", "module": Quiet, "trainer": {"gradient_clip_val": 0.1}},
    "accumulated, so Lightning's": {"trainer": {"accumulate_grad_batches": 2}},
}


def run(
    folder, module=ListeningModule, arguments=None, algorithm=FedAvg, execution="sequential", fast=True, **settings
):
    events: list[Any] = []
    made = module(events, **(arguments or {}))
    loop = FederatedLoop(
        algorithm(), partition=FromIndices(CLIENTS), execution=execution, fast_steps=fast, summary=False
    )
    checkpoint = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
    quick = "fast_dev_run" in settings.get("trainer", {})
    logger = CSVLogger(folder, name="", version=0)
    keep = {} if quick else {"logger": logger, "log_every_n_steps": 2}
    listener = (Listening if execution == "sequential" else ListeningToStacks)(events)
    callbacks = [loop, listener] if quick else [loop, listener, checkpoint]
    fitted = trainer(folder, *callbacks, **{**keep, **settings.get("trainer", {})})
    fit(fitted, made, Data(), ckpt_path=settings.get("ckpt_path"))
    rows = []
    if not quick:
        logger.save()
        with open(folder / "version_0" / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    return made, fitted, events, rows


@pytest.mark.slow
@nightly_except("plain", "together")
@pytest.mark.parametrize("case", CASES)
def test_nobody_sees_a_difference(tmp_path, case):
    module, fitted, events, rows = run(tmp_path / "direct", **CASES[case])
    expected, reference, told, expected_rows = run(tmp_path / "lightning", **CASES[case], fast=False)
    assert_same(weights(module), weights(expected))
    assert events == told
    assert module._current_fx_name == expected._current_fx_name
    assert rows == expected_rows
    assert fitted.fit_loop.state_dict() == reference.fit_loop.state_dict()
    assert {name: value.item() for name, value in fitted.callback_metrics.items()} == {
        name: value.item() for name, value in reference.callback_metrics.items()
    }
    names = sorted(path.name for path in (tmp_path / "lightning").glob("*.ckpt"))
    assert names == sorted(path.name for path in (tmp_path / "direct").glob("*.ckpt"))
    for name in names:
        ours, theirs = (
            torch.load(tmp_path / folder / name, weights_only=False)["loops"] for folder in ("direct", "lightning")
        )
        assert ours == theirs


@pytest.mark.nightly
def test_a_round_is_resumed_from_each_of_its_steps(tmp_path):
    whole, fitted, _, _ = run(tmp_path / "whole")
    # One is saved after every third step; the fifteenth ends a round.
    files = {step: next((tmp_path / "whole").glob(f"step={step}.ckpt")) for step in range(3, fitted.global_step, 3)}
    resumed = {step: run(tmp_path / f"direct {step}", ckpt_path=file) for step, file in files.items()}
    for step, file in files.items():
        module, again, events, _ = resumed[step]
        expected, reference, told, _ = run(tmp_path / f"Lightning {step}", ckpt_path=file, fast=False)
        assert_same(weights(module), weights(whole))
        assert_same(weights(expected), weights(whole))
        assert events == told
        assert again.fit_loop.state_dict() == reference.fit_loop.state_dict()


class OwnBackward(Quiet):
    def backward(self, loss):
        super().backward(2 * loss)


class OwnUpdate(Quiet):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class OwnZero(Quiet):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()


class OwnTransfer(Quiet):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [2 * batch[0], batch[1]]


class Manual(Quiet):
    def __init__(self, events: list[Any]) -> None:
        super().__init__(events)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class OtherStrategy(SingleDeviceStrategy):
    def backward(self, closure_loss, optimizer, *arguments, **keywords):
        return super().backward(2 * closure_loss, optimizer, *arguments, **keywords)


LEFT_TO_LIGHTNING: dict[str, dict[str, Any]] = {
    "manual optimization": {"module": Manual},
    "backward": {"module": OwnBackward},
    "optimizer_step": {"module": OwnUpdate},
    "optimizer_zero_grad": {"module": OwnZero},
    "on_after_batch_transfer": {"module": OwnTransfer},
    "strategy": {"trainer": {"strategy": OtherStrategy("cpu")}},
    "bf16": {"trainer": {"precision": "bf16-true"}},
    "64-true": {"trainer": {"precision": "64-true"}},
    "profiler": {"trainer": {"profiler": "simple"}},
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
}


@nightly_except("64-true", "bf16", "optimizer_step", "strategy")
@pytest.mark.slow
@pytest.mark.parametrize("own", LEFT_TO_LIGHTNING)
@pytest.mark.nightly
def test_ways_of_their_own_are_left_to_lightning(tmp_path, monkeypatch, own):
    monkeypatch.setattr(DirectSteps, "_step", lambda *arguments: pytest.fail("a direct step"))
    settings = LEFT_TO_LIGHTNING[own]
    _, fitted, _, _ = run(tmp_path, **{**settings, "trainer": {"max_epochs": 1, **settings.get("trainer", {})}})
    assert fitted.global_step > 0


@pytest.mark.slow
def test_a_datamodules_own_transfer_is_left_to_lightning(tmp_path, monkeypatch):
    class Doubling(Data):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [2 * batch[0], batch[1]]

    monkeypatch.setattr(DirectSteps, "_step", lambda *arguments: pytest.fail("a direct step"))
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    fit(trainer(tmp_path, loop), Module(), Doubling())


def test_a_methods_updates_of_a_modules_own_kind_are_left_to_lightning(tmp_path, monkeypatch):
    monkeypatch.setattr(DirectSteps, "_step", lambda *arguments: pytest.fail("a direct step"))
    run(tmp_path, module=OwnUpdate, algorithm=lambda: PFedMe(personal_steps=2), trainer={"max_epochs": 1})


@nightly_except("FedAvg")
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedAvg, PFedMe])
def test_usual_steps_are_direct_and_lightnings_own_after_the_fit(tmp_path, monkeypatch, algorithm):
    steps = []
    direct = DirectSteps._step
    monkeypatch.setattr(DirectSteps, "_step", lambda self, fetcher: steps.append(1) or direct(self, fetcher))
    _, fitted, _, _ = run(tmp_path, algorithm=algorithm)
    assert len(steps) == fitted.global_step == 45
    assert not {"advance", "run"} & vars(fitted.fit_loop.epoch_loop).keys()


def test_hooks_of_one_object_are_heard(tmp_path):
    heard = []
    module, callback = Module(), pl.Callback()
    module.on_before_zero_grad = lambda optimizer: heard.append("module")
    callback.on_train_batch_start = lambda *arguments: heard.append("callback")
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    fit(trainer(tmp_path, loop, callback, max_epochs=1), module, Data())
    assert heard == 15 * ["callback", "module"]


def test_a_wrapped_hook_is_heard(tmp_path):
    heard = []

    class Counted(pl.Callback):
        @functools.wraps(pl.Callback.on_before_backward)
        def on_before_backward(self, *arguments):
            heard.append(len(arguments))

    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    fit(trainer(tmp_path, loop, Counted(), max_epochs=1), Module(), Data())
    assert heard == 15 * [3]


def test_a_mock_in_a_callbacks_place_is_heard(tmp_path):
    callback = Mock(spec=pl.Callback, state_key="mock")
    callback.state_dict.return_value = {}
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    fit(trainer(tmp_path, loop, callback, max_epochs=1), Module(), Data())
    assert callback.on_before_backward.call_count == callback.on_train_batch_end.call_count == 15


def test_batches_are_brought_to_the_device(tmp_path, monkeypatch):
    brought = []

    def bring(self, batch, device, dataloader_idx):
        brought.append((device, dataloader_idx))
        return batch

    monkeypatch.setattr(pl.LightningModule, "transfer_batch_to_device", bring)
    run(tmp_path, trainer={"max_epochs": 1, "limit_val_batches": 0})
    assert brought == 15 * [(torch.device("cpu"), 0)]


def test_nothing_is_held_and_no_hook_is_named_between_steps(tmp_path):
    class Naming(torch.utils.data.Dataset):
        def __len__(self):
            return 103

        def __getitem__(self, index):
            seen_between.append((module._current_fx_name, run.fit_loop.epoch_loop._results.batch))
            return blobs()[index]

    seen_between: list[Any] = []
    module = Quiet([])
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    run = trainer(tmp_path, loop, max_epochs=2)
    fit(run, module, Data(Naming(), num_workers=0))
    assert seen_between == 2 * 103 * [(None, None)]


def test_a_callback_that_comes_later_is_heard_from_the_next_round_on(tmp_path):
    events: list[Any] = []

    class Bringing(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.callbacks.append(Listening(events))

    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    fit(trainer(tmp_path, loop, Bringing()), Module(), Data())
    assert sum(event[0] == "on_train_batch_start" for event in events) == 2 * 15


class Idle(torch.optim.SGD):
    def step(self, closure=None):
        pass


@pytest.mark.parametrize("fast", [True, False])
def test_an_optimizer_that_asks_for_no_gradients_is_refused(tmp_path, fast):
    with pytest.raises(MisconfigurationException, match=r"HINT.*`optimizer_closure\(\)`"):
        run(tmp_path, module=Quiet, arguments={"optimizer": lambda p: Idle(p, lr=0.1)}, fast=fast)


def known(tmp_path):
    plain, module = trainer(tmp_path), Module()
    plain.strategy.connect(module)
    return direct_steps._is_known(plain)


def test_this_lightning_is_known(tmp_path):
    assert known(tmp_path), (
        "this Lightning's steps are not those that DirectSteps makes: compare advance() of its _TrainingEpochLoop with"
        " DirectSteps._step, then mend direct._RELEASES, _NEEDED and _calls_fit"
    )


def another_release(monkeypatch):
    monkeypatch.setattr("lightning.__version__", "2.7.0.dev0")


def another_fetcher(monkeypatch):
    monkeypatch.setattr(direct_steps, "_IMPORTED", False)


def another_part(monkeypatch):
    monkeypatch.setattr(direct_steps, "_NEEDED", (*direct_steps._NEEDED, "fit_loop.epoch_loop.no_such_part"))


def another_call(monkeypatch):
    monkeypatch.setattr(direct_steps, "Closure", lambda step_fn, backward_fn: None)


@pytest.mark.parametrize("change", [another_release, another_fetcher, another_part, another_call])
def test_another_lightning_is_not_known(tmp_path, monkeypatch, change):
    change(monkeypatch)
    assert not known(tmp_path)


@pytest.mark.slow
@nightly_except("another_part")
@pytest.mark.parametrize("change", [another_release, another_fetcher, another_part, another_call])
@pytest.mark.nightly
def test_steps_of_another_lightning_are_left_to_it(tmp_path, monkeypatch, change):
    expected, _, _, _ = run(tmp_path / "known", module=Quiet)
    monkeypatch.setattr(DirectSteps, "_step", lambda *arguments: pytest.fail("a direct step"))
    change(monkeypatch)
    module, _, _, _ = run(tmp_path / "other", module=Quiet)
    assert_same(weights(module), weights(expected))


@pytest.mark.slow
def test_without_fast_steps_every_step_is_left_to_lightning(tmp_path, monkeypatch):
    found = []
    for fast_steps in (True, False):
        if not fast_steps:
            monkeypatch.setattr(DirectSteps, "__init__", lambda *arguments: pytest.fail("direct steps"))
        loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False, fast_steps=fast_steps)
        module = Module()
        fit(trainer(tmp_path, loop), module, Data())
        found.append(weights(module))
    assert_same(*found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", [{"precision": "bf16-mixed"}, {"precision": "16-mixed"}, {"strategy": "client_parallel"}], ids=str
)
@pytest.mark.nightly
def test_mixed_precision_and_processes_of_their_own_devices(tmp_path, monkeypatch, own):
    made, step = [], DirectSteps._step
    monkeypatch.setattr(DirectSteps, "_step", lambda *arguments: made.append(step(*arguments)))
    ends = []
    for fast in (True, False):
        loop = FederatedLoop(FedAvg(), clients=3, fast_steps=fast, summary=False)
        module = Module()
        fit(trainer(tmp_path, loop, max_epochs=1, devices=1, gradient_clip_val=0.5, **own), module, Data())
        ends.append(weights(module))
        assert bool(made) == fast
        made.clear()
    assert_same(*ends)


def test_a_checkpoint_by_epochs_is_not_asked_after_each_step(tmp_path):
    heard = {}
    settings_of = {"epochs": {}, "steps": {"every_n_train_steps": 3}, "time": {"train_time_interval": timedelta(0)}}
    for name, settings in settings_of.items():
        made = trainer(tmp_path, ModelCheckpoint(tmp_path / name, **settings))
        made.strategy.connect(Quiet([]))
        heard[name] = "on_train_batch_end" in Hooks(made, ["on_train_batch_end"]).heard
    assert heard == {"epochs": False, "steps": True, "time": True}
