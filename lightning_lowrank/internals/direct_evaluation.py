"""Validation and test batches without the calls of Lightning's that do nothing.

They do what Lightning's ``_EvaluationLoop._evaluation_step`` and ``_ResultCollection.log`` do, and are made only under
releases of Lightning that they were compared with.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_lowrank.internals.direct import Call, Hooks, calls_fit, has_usual_parts, in_context, is_compared_release
from lightning_lowrank.internals.lightning import missing

try:
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ImportError:
    _IMPORTED = False
else:
    _IMPORTED = True

_KINDS = {"fit": "validation", "validate": "validation", "test": "test"}
_LOOPS = {"fit": "fit_loop.epoch_loop.val_loop", "validate": "validate_loop", "test": "test_loop"}
_NEEDED = ("lightning_module._current_fx_name", "received_sigterm", "strategy.model")
_NEEDED_OF_LOOP = (
    "_combined_loader",
    "_data_fetcher",
    "_has_run",
    "_results.dataloader_idx",
    "_seen_batches_per_dataloader",
    "batch_progress.is_last_batch",
    "batch_progress.increment_started",
    "batch_progress.increment_processed",
    "batch_progress.increment_completed",
)


class DirectEvaluation:
    """Makes the batches of an evaluation by calling only the hooks that something overrides.

    What is called, in which order, what is counted and what is logged are the same as in Lightning. What is logged
    again with the same arguments goes past their checks. Which hooks are overridden is looked up at an
    evaluation's first batch. Left to Lightning is an evaluation in which a part of the trainer or module acts in a way
    of its own, and each under a Lightning of another release or with other parts.

    Args:
        trainer: The trainer, with its strategy and callbacks set up.
        stage: What the trainer does: ``"fit"`` (its validation), ``"validate"`` or ``"test"``.
        begin_loader: Called with each loader when an evaluation begins; what it returns is called at its end.
    """

    def __init__(self, trainer: Any, stage: str, begin_loader: Callable[[Any], Callable[[], None]]) -> None:
        self._trainer = trainer
        self._kind = _KINDS[stage]
        self._begin_loader = begin_loader
        self._ends = ExitStack()
        self._calls: _Calls | None = None
        self._logged: dict[tuple[Any, ...], tuple[dict[str, Any], Any, str]] = {}
        self._is_known = not missing(trainer, _LOOPS[stage]) and _is_known(trainer, _loop(trainer, stage))
        if not self._is_known:
            return
        self._loop = loop = _loop(trainer, stage)
        self._run_as_lightning, self._reset_as_lightning = loop.run, loop.reset
        self._step_as_lightning, self._log_as_lightning = loop._evaluation_step, loop._results.log
        loop.run, loop.reset, loop._evaluation_step = self._run, self._reset, self._step
        loop._results.log = self._log

    def restore(self) -> None:
        """Give Lightning's own methods back."""
        if self._is_known:
            self._ends.close()
            loop = self._loop
            del loop.run, loop.reset, loop._evaluation_step, loop._results.log

    def _run(self) -> Any:
        with self._ends:
            return self._run_as_lightning()

    def _reset(self) -> None:
        self._calls = None
        self._logged.clear()
        self._ends.close()
        for loader in self._loop._combined_loader.flattened:
            self._ends.callback(self._begin_loader(loader))
        self._reset_as_lightning()

    def _is_usual(self) -> bool:
        trainer = self._trainer
        return bool(
            has_usual_parts(trainer)
            and trainer.strategy.model is trainer.lightning_module
            and type(self._loop._data_fetcher) is _PrefetchDataFetcher
        )

    def _step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if self._calls is None:
            self._calls = _Calls(self._trainer, self._kind, self._is_usual())
        if not self._calls.direct:
            self._step_as_lightning(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        trainer, loop, calls = self._trainer, self._loop, self._calls
        progress, connector = loop.batch_progress, trainer._logger_connector
        batch = calls.module.transfer_batch_to_device(batch, trainer.strategy.root_device, dataloader_idx)
        several = loop._is_sequential and loop.num_dataloaders > 1
        indices = (batch_idx, dataloader_idx) if several else (batch_idx,)
        progress.increment_ready()
        connector.on_batch_start(batch, dataloader_idx if several else None)
        calls.tell("batch_start", batch, *indices)
        progress.increment_started()
        output = calls.step(batch, *indices)
        progress.increment_processed()
        calls.tell("batch_end", output, batch, *indices)
        connector.on_batch_end()
        progress.increment_completed()
        if not trainer.sanity_checking:
            loop._has_run = True
            connector.update_eval_step_metrics(loop._seen_batches_per_dataloader[dataloader_idx])
            loop._seen_batches_per_dataloader[dataloader_idx] += 1
        if not progress.is_last_batch and trainer.received_sigterm:
            raise SIGTERMException

    def _log(self, fx: str, name: str, value: Any, *more: Any, **settings: Any) -> None:
        results = self._loop._results
        batch_size = settings.pop("batch_size", None)
        place = fx, name, results.dataloader_idx
        if more or not self._is_known_call(place, value, settings):
            self._log_as_lightning(fx, name, value, *more, batch_size=batch_size, **settings)
            with_loader = settings.get("add_dataloader_idx", True) and results.dataloader_idx is not None
            key = f"{fx}.{name}.{results.dataloader_idx}" if with_loader else f"{fx}.{name}"
            self._logged[place] = settings, getattr(value, "device", None), key
            return
        *_, key = self._logged[place]
        if isinstance(value, Tensor) and not settings["enable_graph"]:
            value = value.detach()
        item = results[key]
        results.update_metrics(key, value, results._extract_batch_size(item, batch_size, item.meta))

    def _is_known_call(self, place: tuple[Any, ...], value: Any, settings: dict[str, Any]) -> bool:
        """Return whether Lightning has treated such a call in this evaluation."""
        if place not in self._logged:
            return False
        known, device, key = self._logged[place]
        if known != settings:
            return False
        item = self._loop._results[key]
        # Metric objects are compared by what they are: `==` makes a new one of two.
        return item.value is value if isinstance(value, Metric) else item.is_tensor and value.device == device


class _Calls:
    """What an evaluation calls of the module and of callbacks."""

    def __init__(self, trainer: Any, kind: str, direct: bool) -> None:
        self.direct = direct
        self.module: Any = trainer.lightning_module
        self._step_name = f"{kind}_step"
        self._own_step = getattr(self.module, self._step_name)
        self._takes_index = is_param_in_hook_signature(self._own_step, "batch_idx", min_args=2)
        self._hooks = {moment: f"on_{kind}_{moment}" for moment in ("batch_start", "batch_end")}
        self._context = in_context(trainer.precision_plugin, "val" if kind == "validation" else kind)
        self._tell = Hooks(trainer, self._hooks.values()).tell

    def tell(self, moment: str, *arguments: Any) -> None:
        """Call what overrides a hook."""
        self._tell(self._hooks[moment], *arguments)

    def step(self, batch: Any, batch_idx: int, *dataloader_idx: int) -> Any:
        """Make the module's step."""
        arguments = (batch_idx, *dataloader_idx) if self._takes_index else dataloader_idx
        vars(self.module)["_current_fx_name"], before = self._step_name, self.module._current_fx_name
        with self._context():
            output = self._own_step(batch, *arguments)
        vars(self.module)["_current_fx_name"] = before
        return output


def _loop(trainer: Any, stage: str) -> Any:
    return operator.attrgetter(_LOOPS[stage])(trainer)


def _is_known(trainer: Any, loop: Any) -> bool:
    """Return whether this Lightning evaluates in the way of which `DirectEvaluation` makes the steps."""
    return (
        _IMPORTED
        and is_compared_release()
        and type(loop) is _EvaluationLoop
        and not missing(trainer, *_NEEDED)
        and not missing(_EvaluationLoop, "_is_sequential", "num_dataloaders")
        and not missing(loop, *_NEEDED_OF_LOOP)
        and not missing(type(loop._results), "log", "update_metrics", "_extract_batch_size")
        and _calls_fit(trainer, loop)
    )


def _calls_fit(trainer: Any, loop: Any) -> bool:
    """Return whether the methods that a step calls still take what it gives them."""
    connector = trainer._logger_connector
    calls: tuple[Call, ...] = (
        (loop._evaluation_step, (None, 0, 0, None), {}),
        (loop._results.log, ("", "", None), {"batch_size": None, "enable_graph": False, "add_dataloader_idx": True}),
        (loop._results.update_metrics, ("", None, None), {}),
        (loop._results._extract_batch_size, (None, None, None), {}),
        (loop.reset, (), {}),
        (loop.run, (), {}),
        (loop.batch_progress.increment_ready, (), {}),
        (connector.on_batch_start, (None, None), {}),
        (connector.on_batch_end, (), {}),
        (connector.update_eval_step_metrics, (0,), {}),
    )
    return calls_fit(calls)
