"""Steps of an epoch without the calls of Lightning's that do nothing.

They do what Lightning's ``_TrainingEpochLoop.advance`` and ``_AutomaticOptimization.run`` do, and are made only under
releases of Lightning that they were compared with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning
import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_lowrank.internals.lightning import missing, overrides

try:
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
    from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ImportError:
    _IMPORTED = False
else:
    _IMPORTED = True

_RELEASES = ((2, 6),)
_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
_UPDATES = ("backward", "optimizer_step", "optimizer_zero_grad")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_NEEDED = (
    "lightning_module._current_fx_name",
    "_logger_connector.update_train_step_metrics",
    "fit_loop.epoch_loop._num_ready_batches_reached",
    "fit_loop.epoch_loop._results.batch",
    "fit_loop.epoch_loop._results.batch_size",
    "fit_loop.epoch_loop.batch_idx",
    "fit_loop.epoch_loop.batch_progress.is_last_batch",
    "fit_loop.epoch_loop.restarting",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad.increment_started",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.increment_completed",
)


class DirectSteps:
    """Makes an epoch's steps by calling only the hooks that something overrides.

    Lightning makes some thirty calls in a step, each looked up, named and timed, of which nearly all do nothing. For a
    small model they take half as long as the step itself (``tests/benchmarks/overhead.py``). Here, what is called, in
    which order, what is counted and what is logged are the same. Which hooks are overridden is looked up when an epoch
    begins. Left to Lightning is an epoch in which a part of the trainer or module acts in a way of its own, one that
    goes on from a checkpoint, and each epoch under a Lightning of another release or with other parts.

    Args:
        trainer: The trainer, with its strategy and callbacks set up.
        gradients: Given a batch and its number, does at once what the training step, ``zero_grad()`` and
            ``backward()`` do, and returns the loss, or ``None`` where it has done nothing. It is called where no hook
            stands between these.
    """

    def __init__(self, trainer: Any, gradients: Callable[[Any, int], Tensor | None] = lambda *_: None) -> None:
        self._trainer = trainer
        self._gradients = gradients
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._advance_as_lightning = self._loop.advance
        self._is_known = _is_known(trainer)
        self._direct = False
        self._loop.advance = self._advance

    def restore(self) -> None:
        """Give Lightning's own method back."""
        del self._loop.advance

    def _advance(self, data_fetcher: Any) -> None:
        if self._loop.batch_progress.current.ready == 0:
            self._direct = not self._loop.restarting and self._is_usual(data_fetcher)
            self._find_hooks()
        if self._direct:
            self._step(data_fetcher)
        else:
            self._advance_as_lightning(data_fetcher)

    def _is_usual(self, data_fetcher: Any) -> bool:
        trainer, module = self._trainer, self._trainer.lightning_module
        return bool(
            self._is_known
            and type(trainer.strategy) is SingleDeviceStrategy
            and type(trainer.precision_plugin) is Precision
            and type(trainer.profiler) is PassThroughProfiler
            and type(data_fetcher) is _PrefetchDataFetcher
            and module.automatic_optimization
            and trainer.accumulate_grad_batches == 1
            and not any(overrides(module, hook) for hook in (*_UPDATES, *_TRANSFERS))
            and not any(overrides(trainer.datamodule, hook) for hook in _TRANSFERS if trainer.datamodule is not None)
        )

    def _find_hooks(self) -> None:
        module = self._trainer.lightning_module
        self._callbacks = {
            hook: [getattr(each, hook) for each in self._trainer.callbacks if overrides(each, hook)]
            for hook in _STEP_HOOKS
        }
        self._own = {hook: getattr(module, hook) for hook in _STEP_HOOKS if overrides(module, hook)}
        between = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
        self._at_once = not any(self._callbacks[hook] or hook in self._own for hook in between)
        self._clips = overrides(module, "configure_gradient_clipping") or bool(self._trainer.gradient_clip_val)
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def _tell(self, hook: str, *arguments: Any) -> Any:
        """Call what overrides a hook, and return what the module answers."""
        callbacks, own = self._callbacks[hook], self._own.get(hook)
        if not callbacks and own is None:
            return None
        module = self._trainer.lightning_module
        # By this `LightningModule.log` knows where it is called from.
        vars(module)["_current_fx_name"], before = hook, module._current_fx_name
        for callback in callbacks:
            callback(self._trainer, module, *arguments)
        answer = None if own is None else own(*arguments)
        vars(module)["_current_fx_name"] = before
        return answer

    def _step(self, data_fetcher: Any) -> None:
        loop, trainer = self._loop, self._trainer
        module, progress, results = trainer.lightning_module, loop.batch_progress, loop._results
        batch, _, _ = next(data_fetcher)
        batch_idx = loop.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        batch = module.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        output = None
        ends_epoch = self._tell("on_train_batch_start", batch, batch_idx) == -1
        if ends_epoch:
            progress.increment_by(0, is_last_batch=True)
        else:
            progress.increment_started()
            output = self._update(module, batch, batch_idx)
        progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends_epoch:
            raise StopIteration
        self._tell("on_train_batch_end", output, batch, batch_idx)
        if results:
            trainer._logger_connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        progress.increment_completed()
        if results:
            trainer._logger_connector.update_train_step_metrics()

    def _update(self, module: pl.LightningModule, batch: Any, batch_idx: int) -> dict[str, Any]:
        trainer = self._trainer
        (optimizer,) = trainer.optimizers
        counts = self._loop.automatic_optimization.optim_progress.optimizer
        arguments = (batch, batch_idx) if self._takes_index else (batch,)

        def training_step() -> ClosureResult:
            vars(module)["_current_fx_name"], before = "training_step", module._current_fx_name
            output = module.training_step(*arguments)
            vars(module)["_current_fx_name"] = before
            # What Lightning does for others, less the division by one batch.
            if isinstance(output, Tensor):
                return ClosureResult(output)
            return ClosureResult.from_training_step_output(output)

        def zero_grad() -> None:
            counts.zero_grad.increment_ready()
            self._tell("on_before_zero_grad", optimizer)
            counts.zero_grad.increment_started()
            optimizer.zero_grad()
            counts.zero_grad.increment_completed()

        def backward(loss: Tensor) -> None:
            self._tell("on_before_backward", loss)
            loss.backward()
            self._tell("on_after_backward")

        closure = Closure(training_step, backward, zero_grad)

        def at_once() -> Tensor | None:
            vars(module)["_current_fx_name"], before = "training_step", module._current_fx_name
            loss = self._gradients(batch, batch_idx)
            vars(module)["_current_fx_name"] = before
            if loss is not None:
                counts.zero_grad.increment_ready()
                counts.zero_grad.increment_started()
                counts.zero_grad.increment_completed()
                closure._result = ClosureResult(loss)
            return loss

        def gradients() -> Tensor | None:
            loss = at_once() if self._at_once else None
            if loss is None:
                loss = closure()
            self._tell("on_before_optimizer_step", optimizer)
            if self._clips:
                module.configure_gradient_clipping(
                    optimizer,
                    gradient_clip_val=trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )
            return loss

        counts.step.increment_ready()
        optimizer.step(closure=gradients)
        counts.step.increment_completed()
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()


def _is_known(trainer: Any) -> bool:
    """Return whether this Lightning's steps are those that `DirectSteps` makes."""
    release = tuple(int(part) for part in lightning.__version__.split(".")[:2])
    return _IMPORTED and release in _RELEASES and not missing(trainer, *_NEEDED) and _calls_fit(trainer)


def _calls_fit(trainer: Any) -> bool:
    """Return whether the methods that a step calls still take what it gives them."""
    loop = trainer.fit_loop.epoch_loop
    connector, progress = trainer._logger_connector, loop.batch_progress
    calls: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = (
        (type(loop).advance, (loop, None), {}),
        (loop.update_lr_schedulers, ("step",), {"update_plateau_schedulers": False}),
        (loop._num_ready_batches_reached, (), {}),
        (connector.on_batch_start, (None,), {}),
        (connector.on_batch_end, (), {}),
        (connector.update_train_step_metrics, (), {}),
        (progress.increment_by, (0,), {"is_last_batch": True}),
        (progress.increment_ready, (), {}),
        (Closure, (None, None, None), {}),
        (ClosureResult, (None,), {}),
        (ClosureResult.from_training_step_output, (None,), {}),
    )
    try:
        for function, arguments, keywords in calls:
            inspect.signature(function).bind(*arguments, **keywords)
    except TypeError:
        return False
    return True
