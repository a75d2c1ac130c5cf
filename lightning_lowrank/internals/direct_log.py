"""What is logged in a step, without Lightning's bookkeeping for calls of ``log`` that it has seen before.

It does what Lightning's ``LightningModule.log``, ``_ResultCollection.log``, ``_ResultMetric.update``,
``_LoggerConnector.on_batch_start``, ``on_batch_end`` and ``update_train_step_metrics`` do, and is made only under
releases of Lightning that it was compared with.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn

from lightning_lowrank.internals.direct import Call, calls_fit, is_compared_release
from lightning_lowrank.internals.lightning import missing, overrides, rows_of

try:
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _get_default_dtype,
        _ResultCollection,
        _ResultMetric,
    )
except ImportError:
    _IMPORTED = False
else:
    _IMPORTED = True

_NEEDED = (
    "barebones",
    "should_stop",
    "state.stage",
    "_results",
    "_accelerator_connector.is_distributed",
    "_logger_connector._current_fx",
    "_logger_connector._first_loop_iter",
    "_logger_connector._callback_metrics",
    "_logger_connector._logged_metrics",
    "_logger_connector._progress_bar_metrics",
    "lightning_module._current_fx_name",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._results.batch",
    "fit_loop.epoch_loop._results.batch_size",
    "fit_loop.epoch_loop._results.dataloader_idx",
    "fit_loop.epoch_loop._results.training",
)
_STAGES = (RunningStage.TRAINING, RunningStage.VALIDATING)
_TENSORS = (Tensor, nn.Parameter)
_NUMBERS = (float, int, bool)
_AS_THEY_ARE = (torch.float32, torch.float64)
_EXACT = 2**24
"""Integers up to this are float32 numbers."""


class DirectLog:
    """Logs what a module logs in steps of a fit, and does only what its values and its batches may change.

    Lightning's ``log`` checks and prepares at each call what it had checked and prepared in the step before, which for
    a small model takes as long as half a step (``tests/benchmarks/overhead.py``). Here, a call with arguments that
    Lightning has treated once goes straight to the reduction. What loggers, progress bars and ``callback_metrics``
    see is the same, bit for bit. Left to Lightning are `torchmetrics.Metric` objects, ``enable_graph``, several
    validation loaders, several processes, a module with a ``log`` of its own, and everything under a Lightning of
    another release or with other parts.

    Args:
        trainer: The trainer, with its module connected.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._connector: Any = trainer._logger_connector
        self._log: _Log | None = None
        if _is_known(trainer):
            self._log = vars(self._module)["log"] = _Log(trainer)
            self._connector.on_batch_start = self._on_batch_start
            self._connector.on_batch_end = self._on_batch_end
            self._connector.update_train_step_metrics = self._update_train_step_metrics

    def restore(self) -> None:
        """Give Lightning's own methods back."""
        if self._log is None:
            return
        if vars(self._module).get("log") is self._log:
            del vars(self._module)["log"]
        self._log = None
        del self._connector.on_batch_start
        del self._connector.on_batch_end
        del self._connector.update_train_step_metrics

    def _results(self) -> Any:
        # `Trainer._results` asks five properties for it.
        training = self._trainer.state.stage is RunningStage.TRAINING
        return self._trainer.fit_loop.epoch_loop._results if training else self._trainer._results

    def _on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        self._connector._first_loop_iter = self._connector._first_loop_iter is None
        results = self._results()
        results.batch, results.batch_size, results.dataloader_idx = batch, None, dataloader_idx

    def _on_batch_end(self) -> None:
        results, connector = self._results(), self._connector
        for item in results.values():
            meta = item.meta
            if results.dataloader_idx is not None or not item.is_tensor or meta.enable_graph:
                _LoggerConnector.on_batch_end(connector)
                return
            value = item._forward_cache
            if value is None or item.has_reset or not meta.on_step or meta.dataloader_idx is not None:
                continue
            name = f"{meta.name}_step" if meta.on_epoch else meta.name
            if meta.logger:
                connector._logged_metrics[name] = value
            if results.training:
                connector._callback_metrics[meta.name] = connector._callback_metrics[name] = value
            if meta.prog_bar:
                connector._progress_bar_metrics[name] = value.item()
        results.batch = results.batch_size = None

    def _update_train_step_metrics(self) -> None:
        trainer = self._trainer
        every = trainer.log_every_n_steps
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        if (every and steps % every == 0) or trainer.should_stop or trainer.fast_dev_run:
            _LoggerConnector.update_train_step_metrics(self._connector)


class _Call:
    """What is known of a call of ``log`` whose value and batch size alone may be others than before."""

    def __init__(self, results: Any, stage: RunningStage, fx: str, name: str, kind: Any) -> None:
        self.results = results
        self.stage = stage
        self.fx = fx
        self.key = f"{fx}.{name}"
        self.of_number = kind in _NUMBERS
        self.converts = not self.of_number and kind not in _AS_THEY_ARE
        self.metric = results[self.key]
        # Setting an object's attributes takes longer than writing to their table.
        self.attributes: dict[str, Any] = vars(self.metric)
        meta = self.metric.meta
        self.on_step, self.on_epoch = meta.on_step, meta.on_epoch
        self.is_mean = meta.on_epoch and meta.is_mean_reduction
        self._adds = self.is_mean or meta.is_sum_reduction
        self._reduce = meta.reduce_fx
        # Where the sum lies, the samples, and a number that is rounded to the type of the sum.
        self._sum: Any = None
        self._samples: Any = None
        self._product: Any = None
        self._total: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def batch_size(self) -> Any:
        """Return the size of the batch where the call gives none."""
        if self.results.batch_size is None:
            self.results.batch_size = rows_of(self.results.batch)
        return self.results._extract_batch_size(self.metric, None, self.metric.meta)

    def reduce(self, value: Tensor, batch_size: Any) -> None:
        """Reduce a value with those before it, by the operations that Lightning reduces it by."""
        attributes = self.attributes
        if self._add_in_place(value, batch_size):
            return
        value = value.detach().squeeze()
        if self.is_mean:
            attributes["value"] = attributes["value"] + value * batch_size
            attributes["cumulated_batch_size"] = attributes["cumulated_batch_size"] + batch_size
        elif self._adds:
            attributes["value"] = attributes["value"] + value
        else:
            attributes["value"] = self._reduce(attributes["value"], value)

    def _add_in_place(self, value: Tensor, batch_size: Any) -> bool:
        """Add a value to its sum where the sum lies: three operations of torch take longer than all else in a call.

        The same numbers come out: a product or a sum of two float32 numbers that is made in float64, as Python's are,
        and then rounded is what it would be if made in float32, and of float64 numbers it is Python's own.
        """
        if self.attributes["value"] is not self._total:
            self._find()
        if value.dtype is not self._dtype:
            return False
        number = value.item()
        if self.is_mean:
            if type(batch_size) is not int or not 0 <= batch_size <= _EXACT:
                return False
            self._product[()] = number * batch_size
            number = self._product[()]
            self._samples[()] += batch_size
        self._sum[()] += number
        return True

    def _find(self) -> None:
        """Find where the sum lies, a new one in each epoch."""
        self._total, self._dtype = self.attributes["value"], None
        lies = [self._total, *([self.attributes["cumulated_batch_size"]] if self.is_mean else [])]
        if not self._adds or self._total.dtype not in _AS_THEY_ARE or any(each.device.type != "cpu" for each in lies):
            return
        self._dtype = self._total.dtype
        self._sum, *samples = map(_view, lies)
        if self.is_mean:
            (self._samples,) = samples
            self._product = _view(torch.zeros((), dtype=self._dtype, device="cpu"))


def _view(number: Tensor) -> Any:
    """Return where a number lies in memory, as Python reads and writes it."""
    array: Any = number.numpy()
    return memoryview(array)


class _Log:
    """Stands in for a module's ``log``.

    It has no table of attributes, so that nobody who looks what a module holds finds the trainer's metrics in it.
    """

    __slots__ = ("_as_lightning", "_calls", "_connector", "_module", "_trainer")

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._connector = trainer._logger_connector
        self._as_lightning = types.MethodType(type(self._module).log, self._module)
        self._calls: dict[tuple[Any, ...], _Call] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Have a copy of the module, or a pickle, log as its class does."""
        return getattr, (self._module, "log")

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        settings = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group)
        others = (metric_attribute, rank_zero_only)
        kind = value.dtype if type(value) in _TENSORS else type(value)
        key = (self._module._current_fx_name, name, kind, settings, add_dataloader_idx, batch_size is None, others)
        try:
            call = self._calls.get(key)
        except TypeError:
            # It holds a function without a hash.
            call, kind = None, None
        if call is not None and self._is_usual(call, value, logger):
            self._add(call, value, batch_size)
            return
        self._as_lightning(name, value, *settings, add_dataloader_idx, batch_size, *others)
        if kind in _NUMBERS or isinstance(kind, torch.dtype):
            self._remember(key)

    def _remember(self, key: tuple[Any, ...]) -> None:
        fx, name, kind, *_ = key
        results, stage = self._trainer._results, self._trainer.state.stage
        if stage not in _STAGES or type(results) is not _ResultCollection or results.dataloader_idx is not None:
            return
        metric = results.get(f"{fx}.{name}")
        if type(metric) is _ResultMetric and not (metric.meta.enable_graph or metric.meta.sync.should):
            self._calls[key] = _Call(results, stage, fx, name, kind)

    def _is_usual(self, call: _Call, value: Any, logger: bool | None) -> bool:
        """Return whether Lightning would find nothing in a call that it had not found in one like it."""
        results, metric = call.results, call.metric
        return (
            (self._module if call.of_number else value).device == metric.value.device
            and (call.of_number or value.numel() == 1)
            and self._trainer.state.stage is call.stage
            and results.dataloader_idx is None
            and results.get(call.key) is metric
            and not (logger and self._trainer.logger is None)
            and not torch.compiler.is_compiling()
        )

    def _add(self, call: _Call, value: Any, batch_size: int | None) -> None:
        attributes, connector = call.attributes, self._connector
        if connector._first_loop_iter is not False and connector._current_fx != call.fx:
            # The hook's first call in this epoch.
            call.results.reset(metrics=False, fx=call.fx)
        if call.is_mean and batch_size is None:
            batch_size = call.batch_size()
        if call.of_number:
            value = torch.tensor(value, device=self._module.device, dtype=_get_default_dtype())
        elif call.converts:
            value = value.detach().to(_get_default_dtype())
        attributes["_computed"] = None
        attributes["_update_count"] += 1
        if call.on_step:
            # A copy, for the value may be changed in place after it has been logged.
            value = value.detach().clone()
            value = attributes["_forward_cache"] = value.squeeze() if value.dim() else value
        if call.on_epoch:
            call.reduce(value, batch_size)
        else:
            attributes["value"] = value
        attributes["has_reset"] = False
        connector._current_fx = call.fx


def _is_known(trainer: Any) -> bool:
    """Return whether what this Lightning does with what is logged is what `DirectLog` does."""
    return bool(
        _IMPORTED
        and is_compared_release()
        and not missing(trainer, *_NEEDED)
        and _calls_fit()
        and type(trainer._logger_connector) is _LoggerConnector
        and not trainer.barebones
        and not trainer._accelerator_connector.is_distributed
        and not overrides(trainer.lightning_module, "log")
    )


def _calls_fit() -> bool:
    """Return whether the methods that are replaced or called still take what they took."""
    taken = list(inspect.signature(pl.LightningModule.log).parameters.values())[1:]
    ours = list(inspect.signature(_Log.__call__).parameters.values())[1:]
    if [(each.name, each.default) for each in taken] != [(each.name, each.default) for each in ours]:
        return False
    calls: tuple[Call, ...] = (
        (_LoggerConnector.on_batch_start, (None, None, None), {}),
        (_LoggerConnector.on_batch_end, (None,), {}),
        (_LoggerConnector.update_train_step_metrics, (None,), {}),
        (_ResultCollection._extract_batch_size, (None, None, None, None), {}),
        (_get_default_dtype, (), {}),
    )
    return calls_fit(calls)
