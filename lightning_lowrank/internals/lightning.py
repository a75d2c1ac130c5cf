"""Private parts of Lightning and torchmetrics that rounds use.

If no public way is named, there is none.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_lowrank.internals.replaced import replaced

_SETTINGS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_ONCE_AN_EPOCH = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")


def check_namespace(trainer: Any, module: Any) -> None:
    """Refuse classes of the package ``pytorch_lightning``, which ``isinstance`` with Lightning's would not match.

    Lightning and this package look for classes by ``isinstance``, and would silently ignore these.
    """
    for part in (trainer, module, trainer.datamodule, *trainer.callbacks):
        if any(kind.__module__.partition(".")[0] == "pytorch_lightning" for kind in type(part).__mro__):
            raise MisconfigurationException(
                f"{type(part).__name__} is a class of the package pytorch_lightning, and lightning_lowrank works with"
                " lightning.pytorch, which has the same classes again: import from lightning.pytorch in place of"
                " pytorch_lightning everywhere (`import lightning.pytorch as pl`). If a library imports it, call"
                " lightning_lowrank.alias_pytorch_lightning() before that library's import."
            )


def overrides(listener: pl.Callback | pl.LightningModule | pl.LightningDataModule, hook: str) -> bool:
    """Whether a callback, module or datamodule overrides one of Lightning's hooks.

    Unlike Lightning's own ``is_overridden`` it counts a wrapped hook, and any other callable, as an override.
    """
    kinds: tuple[type, ...] = (Callback, pl.LightningModule, pl.LightningDataModule)
    base = next(kind for kind in kinds if isinstance(listener, kind))
    # A LambdaCallback has hooks as instance attributes, and a copy that was made inside a fit its own methods.
    own = vars(listener).get(hook, getattr(type(listener), hook, None))
    return getattr(own, "__func__", own) is not getattr(base, hook)


def overridden_transfer(
    trainer: Any,
    hooks: Sequence[str] = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
) -> tuple[Any, str] | None:
    """The module or datamodule that overrides a hook for moving batches, and that hook; ``None`` if neither does."""
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    return next(((owner, hook) for owner in owners for hook in hooks if overrides(owner, hook)), None)


def is_training(trainer: Any) -> bool:
    """The same as ``trainer.training``, without its slow comparison of strings."""
    return trainer.state.stage is RunningStage.TRAINING


def batch_transfer(trainer: Any) -> Callable[[Any], Any]:
    """A function that moves a batch to the device as Lightning's loops do, with precision conversion and hooks."""
    hook, datamodule = "on_before_batch_transfer", getattr(trainer, "datamodule", None)
    from_data = datamodule is not None and is_overridden(hook, datamodule)
    before = getattr(datamodule if from_data else trainer.lightning_module, hook)

    def transfer(batch: Any) -> Any:
        batch = before(trainer.precision_plugin.convert_input(batch), 0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    return transfer


HOOK = "_current_fx_name"
"""Where a module keeps the name of the hook that is running, by which `LightningModule.log` knows who calls it."""


class TrainLoaderSource:
    """The trainer's source of its training loader, which can be replaced.

    ``trainer.fit(model, loader)`` never asks the module or datamodule, so overriding their ``train_dataloader`` has no
    effect on it.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._source: Any = trainer.fit_loop._data_source
        self._users = copy.copy(self._source)

    def is_defined(self) -> bool:
        """Whether there is a training loader, passed to ``fit`` or defined by the module or datamodule."""
        return self._users.instance is not None and self._users.is_defined()

    def user_loader(self) -> Any:
        """The user's training loader."""
        return self._users.dataloader()

    def replaced_by(self, loader: Any) -> AbstractContextManager[None]:
        """A context in which ``loader`` is the trainer's training loader."""
        return replaced(self._source, instance=loader)


class FitLength:
    """Overrides the trainer's properties that describe the length of a fit.

    ``trainer.estimated_stepping_batches`` is ``steps()`` for the whole fit. ``trainer.train_dataloader`` is ``loader``,
    and ``trainer.num_training_batches`` its length, until Lightning loads its data after `settle`.

    Args:
        trainer: The trainer, whose training loader has been replaced.
        loader: Replaces the training loader in ``configure_optimizers``.
        steps: Returns the number of steps of a schedule in the whole fit.
    """

    def __init__(self, trainer: Any, loader: Any, steps: Callable[[], float]) -> None:
        self._trainer, self._loader, self._steps = trainer, loader, steps
        self._settled = False

    def install(self) -> Callable[[], None]:
        """Override the properties; return a function that restores them."""
        trainer, loop, kind = self._trainer, self._trainer.fit_loop, type(self._trainer)

        def until_settled(name: str, answer: Callable[[], Any]) -> property:
            own = inspect.getattr_static(kind, name).fget

            def answered(trainer: Any) -> Any:
                return own(trainer) if self._settled and loop._combined_loader is not None else answer()

            return property(answered)

        # Properties can only be replaced in a subclass. All three are, because Lightning's estimated_stepping_batches
        # loads the data, and the other two then describe Lightning's own loader.
        answers = {
            "estimated_stepping_batches": property(lambda trainer: self._steps()),
            "num_training_batches": until_settled("num_training_batches", lambda: len(self._loader)),
            "train_dataloader": until_settled("train_dataloader", lambda: self._loader),
            "__module__": kind.__module__,
        }
        loop._combined_loader = None
        end = ExitStack()
        end.callback(self.settle)
        end.enter_context(replaced(trainer, __class__=type(kind.__name__, (kind,), answers)))
        return end.close

    def settle(self) -> None:
        """Have Lightning load its data again, and use Lightning's loader and its length from then on."""
        if not self._settled:
            self._settled = True
            # Discard the loader of the first request, because the fit may begin with another epoch.
            self._trainer.fit_loop._combined_loader = None


def accumulates(trainer: Any) -> bool:
    """Whether gradients are accumulated over several batches, in any epoch."""
    schedules = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
    return schedules or trainer.accumulate_grad_batches != 1


def leave_step(trainer: Any) -> None:
    """Clear the trainer's traces of a failed step."""
    trainer.lightning_module._current_fx_name = None
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        # Without an update, the scaler refuses to unscale the next step's gradients. It raises an AssertionError if it
        # has made no step yet.
        with suppress(AssertionError):
            scaler.update(scaler.get_scale())


def makes_step(trainer: Any, optimizer: Optimizer) -> bool:
    """Whether an optimizer is about to make a step, as seen from ``on_before_optimizer_step``.

    It makes none if no parameter has a gradient, as after a ``training_step`` that returned ``None``, or if the scaler
    of 16-bit precision has found gradients that are not finite. Only the scaler's private state tells the latter: other
    callbacks may have changed the gradients since.
    """
    if all(value.grad is None for group in optimizer.param_groups for value in group["params"]):
        return False
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled() or _unscales_itself(optimizer):
        return True
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return bool(found) and not any(map(bool, found.values()))


def _unscales_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer divides its gradients by the scaler's factor in its own step, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def modes_in_steps(trainer: Any) -> Mapping[str, bool]:
    """Whether each submodule is in training mode in a fit's steps, by name: as the last of them left it.

    Lightning notes the modes before it evaluates.
    """
    if trainer.training:
        return {name: part.training for name, part in trainer.lightning_module.named_modules()}
    modes: dict[str, bool] = trainer.fit_loop.epoch_loop.val_loop._module_mode.mode
    return modes


class StepCounts:
    """Lightning's step counters in a round, which are set to the total of several processes.

    Args:
        trainer: The trainer, at the beginning of a round.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._optimizer_steps: int = trainer.global_step
        self._logged_steps: int = trainer.fit_loop.epoch_loop._batches_that_stepped

    def optimizer_steps(self) -> int:
        """The number of optimizer steps in the round."""
        return self._trainer.global_step - self._optimizer_steps

    def logged_steps(self) -> int:
        """The number of steps that loggers counted in the round."""
        return self._trainer.fit_loop.epoch_loop._batches_that_stepped - self._logged_steps

    def set(self, optimizer_steps: int, logged_steps: int) -> None:
        """Set the round's numbers of optimizer steps and of logged steps."""
        counted = _counted_steps(self._trainer)
        counted.ready = counted.completed = self._optimizer_steps + optimizer_steps
        self._trainer.fit_loop.epoch_loop._batches_that_stepped = self._logged_steps + logged_steps


def _counted_steps(trainer: Any) -> Any:
    """The counter behind ``global_step``."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step.total
    return loop.manual_optimization.optim_step_progress.total


def refuse_unseen_steps(trainer: Any, acting: str) -> Callable[[], None]:
    """Refuse steps whose gradients are not seen in ``on_before_optimizer_step``; return a function that ends this.

    A fused optimizer sees gradients that are still scaled there, if the precision scales losses. In manual
    optimization, Lightning calls that hook from the ``step()`` of what ``self.optimizers()`` returns, not from the
    optimizer's own. There is no public sign of being inside the former, but steps are counted around it.

    Args:
        trainer: The trainer, with its optimizers set up.
        acting: The party that acts in the hook, for the message.

    Raises:
        MisconfigurationException: If losses are scaled and an optimizer unscales its gradients itself.
    """
    ends = ExitStack()
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    fused = [each for each in trainer.optimizers if _unscales_itself(each)]
    if fused and scaler is not None and scaler.is_enabled():
        raise MisconfigurationException(
            f"{type(fused[0]).__name__}(fused=True) unscales its gradients inside its step with"
            f" precision='16-mixed', and {acting} would act on gradients that are still scaled: leave out fused=True,"
            " or use precision='bf16-mixed'."
        )
    if trainer.lightning_module.automatic_optimization:
        return ends.close

    def refuse(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        counted = _counted_steps(trainer)
        if is_training(trainer) and counted.ready == counted.completed:
            raise MisconfigurationException(
                f"training_step calls step() of {type(optimizer).__name__} itself, as by"
                f" self.optimizers(use_pl_optimizer=False), and {acting} would be left out of that step: call step()"
                " of the optimizers that self.optimizers() returns."
            )

    for optimizer in trainer.optimizers:
        # A wrapper may not have called Optimizer.__init__, and then runs no hooks.
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            ends.callback(optimizer.register_step_pre_hook(refuse).remove)
    return ends.close


def evaluating_everything(trainer: Any) -> AbstractContextManager[None]:
    """A context in which every process evaluates all samples of validation, test and prediction loaders.

    The public way is ``Trainer(use_distributed_sampler=False)``, which a strategy cannot set.
    """
    return replaced(trainer._accelerator_connector, use_distributed_sampler=False)


def empty_results(trainer: Any) -> Any:
    """A new collection of logged values, such as Lightning keeps for an epoch."""
    return type(trainer.fit_loop.epoch_loop._results)(training=True)


@contextmanager
def logging_as(trainer: Any, hook: str) -> Iterator[None]:
    """A context in which logged values count as logged by ``hook``."""
    module, connector = trainer.lightning_module, trainer._logger_connector
    before, module._current_fx_name = module._current_fx_name, hook
    # Otherwise Lightning resets a hook's values in an epoch's first turn, if another hook has logged in between.
    connector._current_fx = hook
    try:
        yield
    finally:
        module._current_fx_name = before


@contextmanager
def logging_into(trainer: Any, results: Any, batch: Any) -> Iterator[None]:
    """A context in which logged values go to the collection ``results``, weighted by the size of ``batch``."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    loop = loop if is_training(trainer) else trainer._evaluation_loop
    results.batch, hook = batch, connector._current_fx
    try:
        with replaced(loop, _results=results):
            yield
    finally:
        results.batch, connector._current_fx = None, hook


def lightnings_log(module: pl.LightningModule) -> Callable[..., None]:
    """The log of a module beneath one of its own, which may add a prefix or defaults."""
    original = pl.LightningModule.log
    return module.log if type(module).log is original else partial(original, module)


def logging_by(module: pl.LightningModule, log: Callable[..., None]) -> AbstractContextManager[None]:
    """A context in which ``log`` takes the place of ``LightningModule.log`` for a module.

    A module's own ``log()`` is called as before, and ``log`` with what it passes on to ``super().log()``.
    """
    original = pl.LightningModule.log
    if type(module).log is original:
        return replaced(module, log=log)

    def of_module(owner: pl.LightningModule, *arguments: Any, **keywords: Any) -> None:
        if owner is module:
            log(*arguments, **keywords)
        else:
            original(owner, *arguments, **keywords)

    return replaced(pl.LightningModule, log=of_module)


def rows_of(batch: Any) -> int | None:
    """The size of a batch as Lightning infers it, for simple batches; else ``None``."""
    if type(batch) not in (list, tuple):
        return None
    sizes = {each.size(0) if type(each) is Tensor and each.dim() else None for each in batch}
    return sizes.pop() if len(sizes) == 1 else None


def pool_training_results(trainer: Any, gather: Callable[[Any], Sequence[Any]]) -> None:
    """Combine the logged values of all processes' steps in an epoch, in every process.

    Args:
        trainer: The trainer.
        gather: Returns what every process gives, in the order of their ranks.
    """
    results = trainer.fit_loop.epoch_loop._results
    mine = {
        key: (
            {
                **{name: getattr(item.meta, name) for name in _SETTINGS},
                "reduce_fx": item.meta.reduce_fx.__name__,
                "sync": (item.meta.sync.should, item.meta.sync.rank_zero_only),
            },
            (item.value.cpu(), int(getattr(item, "cumulated_batch_size", 0))) if item.is_tensor else None,
        )
        for key, item in results.items()
        if item.meta.on_epoch and not item.has_reset and not item.meta.fx.startswith(_ONCE_AN_EPOCH)
    }
    gathered = gather(mine)
    settings = {key: settings for part in gathered for key, (settings, _) in part.items()}
    pooled: set[Metric] = set()
    for key, given in settings.items():
        values = [part[key][1] for part in gathered if key in part]
        sync, rank_zero_only = given.pop("sync")
        if key not in results:
            meta = _Metadata(**given)
            # As Lightning sets it: it compares it with that of a later round in which this process has clients.
            meta.sync = _Sync(_should=sync, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
            results[key] = _ResultMetric(meta, values[0] is not None)
        item = results[key]
        item.has_reset, item._computed, item._update_count = False, None, 1
        if values[0] is None:
            item.value = trainer.lightning_module.get_submodule(given["metric_attribute"])
            if item.value not in pooled:
                pooled.add(item.value)
                _pool_metric(item.value, gather)
            continue
        numbers = torch.stack([value for value, _ in values]).to(trainer.strategy.root_device)
        reduction = given["reduce_fx"]
        item.value = getattr(numbers, f"a{reduction}")(0) if reduction in ("min", "max") else numbers.sum(0)
        if reduction == "mean":
            item.cumulated_batch_size = torch.tensor(sum(size for _, size in values), device=numbers.device)


def _pool_metric(metric: Metric, gather: Callable[[Any], Sequence[Any]]) -> None:
    # sync() makes tensors of states that are lists, which reset() refuses, and cannot gather an empty list with others.
    lists = {name: getattr(metric, name) for name, default in metric._defaults.items() if isinstance(default, list)}
    gathered = gather(apply_to_collection(lists, Tensor, lambda state: state.detach().cpu()))
    with replaced(metric, _reductions={name: each for name, each in metric._reductions.items() if name not in lists}):
        metric.sync()
    device = torch.device("cpu") if metric.compute_on_cpu else metric.device
    for name in lists:
        entries = [entry for states in gathered for entry in states[name]]
        setattr(metric, name, apply_to_collection(entries, Tensor, lambda state: state.to(device)))
    # Mark the synchronised state as the metric's own, so that it stays until reset() and is not gathered again.
    metric._is_synced, metric._cache, metric._computed, metric._to_sync = False, None, None, False
    metric._update_count = max(1, metric._update_count)


class NewFigures:
    """Detects figures that were logged since the last call of `find`.

    Lightning keeps the tensors of all others in ``callback_metrics``, such as those of a validation some rounds ago.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Tensor] = {}

    def find(self, logged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries of ``callback_metrics`` that are new since the last call."""
        new = {name: value for name, value in logged.items() if value is not self._seen.get(name)}
        self._seen = dict(logged)
        return new


class ValidationFigures:
    """Tells whether a figure is one that the last validation has logged.

    Figures are compared by value: in a validation Lightning makes new tensors whenever ``callback_metrics`` is read, as
    `ModelCheckpoint` does at its end.
    """

    def __init__(self) -> None:
        self._new, self._logged = NewFigures(), dict[str, Tensor]()

    def begin(self, logged: Mapping[str, Tensor]) -> None:
        """Record ``callback_metrics`` at the beginning of a validation."""
        self._new.find(logged)

    def end(self, logged: Mapping[str, Tensor]) -> None:
        """Record ``callback_metrics`` at its end."""
        self._logged = self._new.find(logged)

    def has(self, name: str, value: Tensor) -> bool:
        """Whether the last validation has logged this value under this name."""
        found = float(self._logged[name]) if name in self._logged else None
        return found is not None and (found == float(value) or (math.isnan(found) and math.isnan(float(value))))


def show_figures(trainer: pl.Trainer, figures: dict[str, float]) -> dict[str, Tensor]:
    """Show numbers to callbacks in ``trainer.callback_metrics``; return them as tensors."""
    # Lightning stores numbers in the default type, and float32 would round byte counts above 16 MiB.
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
    trainer.callback_metrics.update(tensors)
    return tensors


def log_figures(trainer: pl.Trainer, figures: dict[str, float]) -> None:
    """Log an epoch's numbers; faster than `LightningModule.log`, which takes longer per value than a small step."""
    trainer._logger_connector.log_metrics(show_figures(trainer, figures))


def validation_logged_for(trainer: Any, epoch: int) -> AbstractContextManager[None]:
    """A context in which loggers write an evaluation's figures under another epoch number than the current one."""
    connector = trainer._logger_connector
    log, missing = connector.log_eval_end_metrics, "epoch" not in connector._logged_metrics

    def logged(metrics: dict[str, Any]) -> None:
        log({"epoch": epoch, **metrics} if metrics else metrics)
        if missing:
            connector._logged_metrics.pop("epoch", None)

    return replaced(connector, log_eval_end_metrics=logged)


@contextmanager
def with_counter(trainer: Any, name: str) -> Iterator[tuple[int, Callable[[int], None]]]:
    """A context that yields the value of a counter and a function to set it, and restores it.

    Args:
        trainer: The trainer.
        name: ``"global_step"`` or ``"total_batch_idx"``.
    """
    loop = trainer.fit_loop.epoch_loop
    if name == "total_batch_idx":
        # It is the number of ready batches, less one.
        counts, key, added = loop.batch_progress.total, "ready", 1
    else:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
        if not trainer.lightning_module.automatic_optimization:
            progress = loop.manual_optimization.optim_step_progress
        counts, key, added = progress.total, "completed", 0
    before = getattr(counts, key)
    try:
        yield before - added, lambda number: setattr(counts, key, number + added)
    finally:
        setattr(counts, key, before)


def stops_now(trainer: pl.Trainer) -> bool:
    """Whether the fit ends after this batch, possibly in the middle of an epoch."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    enough_epochs = not trainer.min_epochs or trainer.current_epoch >= trainer.min_epochs
    enough_steps = not trainer.min_steps or trainer.global_step >= trainer.min_steps
    return bool(trainer.should_stop and enough_epochs and enough_steps)


def trainer_of(module: nn.Module) -> pl.Trainer | None:
    """The trainer that a module is attached to, if any."""
    if not isinstance(module, pl.LightningModule):
        return None
    try:
        found = module.trainer
    except RuntimeError:
        return None
    return found if isinstance(found, pl.Trainer) else None


def checkpoint_schedule(callback: ModelCheckpoint) -> tuple[int, timedelta | None, bool | None]:
    """A checkpoint callback's number of steps, time interval, and whether it saves at an epoch's end."""
    return callback._every_n_train_steps, callback._train_time_interval, callback._save_on_train_epoch_end


def validation_seconds(trainer: Any) -> float | None:
    """The seconds between validations; ``None`` if validation depends on batches."""
    return trainer._val_check_time_interval


def synchronizes_layers(strategy: Any) -> bool:
    """Whether a strategy uses synchronised BatchNorm, as ``Trainer(sync_batchnorm=True)`` asks."""
    return bool(strategy._layer_sync)


def make_one_epoch(trainer: Any, number: int) -> None:
    """Have the next fit run epoch ``number`` only; -1: begin a fit without an epoch."""
    loop = trainer.fit_loop
    done = loop.epoch_progress.current
    done.ready = done.started = done.processed = done.completed = max(number, 0)
    loop.max_epochs = number + 1
    # Otherwise Lightning keeps the previous loader if the epoch's number has not grown.
    loop._combined_loader = None


def count_steps(trainer: Any, steps: int) -> None:
    """Add steps made elsewhere to ``global_step``: checkpoint callbacks save only if it has grown."""
    _counted_steps(trainer).completed += steps
