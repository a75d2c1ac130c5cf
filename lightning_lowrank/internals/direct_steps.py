"""Steps of an epoch without the calls of Lightning's that do nothing.

They do what Lightning's ``_TrainingEpochLoop.advance`` and ``_AutomaticOptimization.run`` do, and are made only under
releases of Lightning that they were compared with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowrank.internals.direct import Call, Hooks, calls_fit, has_usual_parts, in_context, is_compared_release
from lightning_lowrank.internals.lightning import missing, overrides
from lightning_lowrank.internals.torch import bare_step, drop_gradients, is_on, run_backward

try:
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
    from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ImportError:
    _IMPORTED = False
else:
    _IMPORTED = True

_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
_UPDATES = ("backward", "optimizer_zero_grad")
_TRANSFER = pl.LightningModule.transfer_batch_to_device
_END = object()
_NEEDED = (
    "lightning_module._current_fx_name",
    "received_sigterm",
    "_logger_connector.update_train_step_metrics",
    "_val_check_time_interval",
    "val_check_batch",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._broadcast_sigterm_tensor",
    "fit_loop.epoch_loop._num_ready_batches_reached",
    "fit_loop.epoch_loop._results.batch",
    "fit_loop.epoch_loop._results.batch_size",
    "fit_loop.epoch_loop._skip_next_val",
    "fit_loop.epoch_loop.batch_idx",
    "fit_loop.epoch_loop.batch_progress.is_last_batch",
    "fit_loop.epoch_loop.done",
    "fit_loop.epoch_loop.restarting",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad.increment_started",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.increment_completed",
)


class AroundUpdates:
    """Stands in the place of a module's ``optimizer_step``, and lets somebody make the step as often as it likes.

    Args:
        module: The module.
        around: Called in each step with a function that makes one step of the optimizer.
    """

    def __init__(self, module: pl.LightningModule, around: Callable[[Callable[[], Any]], None]) -> None:
        self.around = around
        self.replaces = overrides(module, "optimizer_step")
        self._own = module.optimizer_step

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        """Do what Lightning calls the module's ``optimizer_step`` for."""
        self.around(functools.partial(self._own, *arguments, **keywords))


class DirectSteps:
    """Makes an epoch's steps by calling only the hooks that something overrides.

    Lightning makes some thirty calls in a step, each looked up, named and timed, of which nearly all do nothing. For a
    small model they take as long as the step itself (``tests/benchmarks/steps.py``). Here, what is called, in which
    order, what is counted and what is logged are the same. Which hooks are overridden is looked up when an epoch
    begins. Left to Lightning is an epoch in which a part of the trainer or module acts in a way of its own, one that
    goes on from a checkpoint, and each epoch under a Lightning of another release or with other parts.

    Args:
        trainer: The trainer, with its strategy and callbacks set up.
        gradients: Given a batch, does at once what the training step, ``zero_grad()`` and ``backward()`` do, and
            returns the loss; or ``None``, and has done nothing. It is called where no hook stands between these.
    """

    def __init__(self, trainer: Any, gradients: Callable[[Any], Tensor | None] = lambda batch: None) -> None:
        self._trainer = trainer
        self._gradients = gradients
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._advance_as_lightning = self._loop.advance
        self._is_known = _is_known(trainer)
        self._direct = False
        self._loop.advance = self._advance
        if self._is_known:
            self._loop.run = self._run

    def restore(self) -> None:
        """Give Lightning's own methods back."""
        del self._loop.advance
        vars(self._loop).pop("run", None)

    def _run(self, data_fetcher: Any) -> None:
        loop = self._loop
        loop.reset()
        loop.on_run_start(data_fetcher)
        self._direct = False
        while not self._is_done():
            try:
                loop.advance(data_fetcher)
                self._end_advance(data_fetcher)
            except StopIteration:
                break
            finally:
                loop.on_iteration_done()

    def _is_done(self) -> bool:
        trainer, loop = self._trainer, self._loop
        if self._direct and trainer.max_steps == -1 and not trainer.should_stop:
            progress = loop.batch_progress
            if progress.current.ready != trainer.num_training_batches and not progress.is_last_batch:
                return False
        return bool(loop.done)

    def _end_advance(self, data_fetcher: Any) -> None:
        """Do what follows a step: nothing but counting it, where no validation, schedule or end is due."""
        trainer, loop = self._trainer, self._loop
        every = trainer.val_check_batch
        if (
            self._direct
            # Several processes meet there.
            and trainer.world_size == 1
            and not trainer.should_stop
            and not trainer.received_sigterm
            and not trainer.lr_scheduler_configs
            and trainer.check_val_every_n_epoch is not None
            and trainer._val_check_time_interval is None
            and not loop.batch_progress.is_last_batch
            and not loop._skip_next_val
            and every not in (None, 0, float("inf"))
            and loop.batch_progress.current.ready % every != 0
        ):
            loop._batches_that_stepped += 1
        else:
            loop.on_advance_end(data_fetcher)

    def _advance(self, data_fetcher: Any) -> None:
        if self._loop.batch_progress.current.ready == 0:
            self._direct = not self._loop.restarting and self._is_usual(data_fetcher)
            self._find_hooks()
            self._batches = _batches_of(data_fetcher) if self._direct else None
        if self._direct:
            self._step(data_fetcher)
        else:
            self._advance_as_lightning(data_fetcher)

    def _is_usual(self, data_fetcher: Any) -> bool:
        trainer, module = self._trainer, self._trainer.lightning_module
        return bool(
            self._is_known
            and has_usual_parts(trainer)
            and type(data_fetcher) is _PrefetchDataFetcher
            and module.automatic_optimization
            and trainer.accumulate_grad_batches == 1
            and not any(overrides(module, hook) for hook in _UPDATES)
            and not self._has_own_update()
            and (getattr(trainer.precision_plugin, "scaler", None) is None or _may_be_scaled(*trainer.optimizers))
        )

    def _around_updates(self) -> AroundUpdates | None:
        found = vars(self._trainer.lightning_module).get("optimizer_step")
        return found if isinstance(found, AroundUpdates) else None

    def _has_own_update(self) -> bool:
        around = self._around_updates()
        return overrides(self._trainer.lightning_module, "optimizer_step") if around is None else around.replaces

    def _find_hooks(self) -> None:
        module = self._trainer.lightning_module
        self._around = self._around_updates()
        self._hooks = Hooks(self._trainer, _STEP_HOOKS)
        self._at_once = not self._hooks.heard & {"on_before_zero_grad", "on_before_backward", "on_after_backward"}
        self._clips = overrides(module, "configure_gradient_clipping") or bool(self._trainer.gradient_clip_val)
        precision = self._trainer.precision_plugin
        self._context = in_context(precision, "train")
        self._scaler: Any = getattr(precision, "scaler", None)
        # A graph's gradients are those of a loss that is not scaled.
        self._at_once = self._at_once and self._scaler is None
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def _next_batch(self, data_fetcher: Any) -> Any:
        batch = _END if self._batches is None or data_fetcher.done else next(self._batches, _END)
        if batch is _END:
            batch, _, _ = next(data_fetcher)
            return batch
        data_fetcher.iterator._iterator._idx += 1
        data_fetcher.fetched += 1
        data_fetcher.done = data_fetcher.fetched >= data_fetcher.length
        return batch

    def _on_device(self, module: pl.LightningModule, batch: Any) -> Any:
        device = self._trainer.strategy.root_device
        if type(module).transfer_batch_to_device is _TRANSFER and is_on(device, batch):
            return batch
        return module.transfer_batch_to_device(batch, device, 0)

    def _step(self, data_fetcher: Any) -> None:
        loop, trainer = self._loop, self._trainer
        module, progress, results = trainer.lightning_module, loop.batch_progress, loop._results
        if trainer.world_size > 1:
            loop._broadcast_sigterm_tensor()
        batch = self._next_batch(data_fetcher)
        batch_idx = loop.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        batch = self._on_device(module, batch)
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        output = None
        ends_epoch = self._hooks.tell("on_train_batch_start", batch, batch_idx) == -1
        if ends_epoch:
            progress.increment_by(0, is_last_batch=True)
        else:
            progress.increment_started()
            output = self._update(module, batch, batch_idx)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends_epoch:
            raise StopIteration
        self._hooks.tell("on_train_batch_end", output, batch, batch_idx)
        if results:
            trainer._logger_connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        progress.increment_completed()
        if results:
            trainer._logger_connector.update_train_step_metrics()

    def _update(self, module: pl.LightningModule, batch: Any, batch_idx: int) -> dict[str, Any]:
        trainer, attributes = self._trainer, vars(module)
        (optimizer,) = trainer.optimizers
        counts = self._loop.automatic_optimization.optim_progress.optimizer
        arguments = (batch, batch_idx) if self._takes_index else (batch,)
        outputs: list[dict[str, Any]] = []

        def zero_grad() -> None:
            counts.zero_grad.increment_ready()
            self._hooks.tell("on_before_zero_grad", optimizer)
            counts.zero_grad.increment_started()
            drop_gradients(optimizer)
            counts.zero_grad.increment_completed()

        def closure() -> Tensor | None:
            before, attributes["_current_fx_name"] = attributes["_current_fx_name"], "training_step"
            with self._context():
                at_once = self._gradients(batch) if self._at_once else None
                output = module.training_step(*arguments) if at_once is None else None
            attributes["_current_fx_name"] = before
            if at_once is not None:
                outputs[:] = [{"loss": at_once}]
                counts.zero_grad.increment_ready()
                counts.zero_grad.increment_started()
                counts.zero_grad.increment_completed()
                return at_once
            # What Lightning makes of it, less the division by one batch.
            if isinstance(output, Tensor):
                loss, kept = output, output.detach().clone()
                outputs[:] = [{"loss": kept}]
            else:
                result = ClosureResult.from_training_step_output(output)
                outputs[:] = [{} if result.loss is None else result.asdict()]
                if result.closure_loss is None or result.loss is None:
                    # It warns of that.
                    Closure(lambda: result, None, zero_grad)()
                    return None
                loss, kept = result.closure_loss, result.loss
            zero_grad()
            loss = loss if self._scaler is None else self._scaler.scale(loss)
            self._hooks.tell("on_before_backward", loss)
            run_backward(loss)
            self._hooks.tell("on_after_backward")
            return kept

        def gradients() -> Tensor | None:
            # An optimizer may call it where gradients are off.
            loss = closure() if torch.is_grad_enabled() else torch.enable_grad()(closure)()
            after_closure()
            return loss

        def after_closure() -> None:
            self._hooks.tell("on_before_optimizer_step", optimizer)
            if self._clips:
                module.configure_gradient_clipping(
                    optimizer,
                    gradient_clip_val=trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )

        def scaled() -> None:
            """Do what ``MixedPrecision.optimizer_step`` does."""
            if closure() is not None:
                self._scaler.unscale_(optimizer)
                after_closure()
                self._scaler.step(optimizer)
                self._scaler.update()
            else:
                after_closure()

        counts.step.increment_ready()
        step = functools.partial(bare_step(optimizer), closure=gradients) if self._scaler is None else scaled
        if self._around is None:
            step()
        else:
            vars(module)["_current_fx_name"], before = "optimizer_step", module._current_fx_name
            self._around.around(step)
            vars(module)["_current_fx_name"] = before
        counts.step.increment_completed()
        if not outputs:
            # It refuses that.
            Closure(lambda: ClosureResult(None)).consume_result()
        return outputs[0]


def _may_be_scaled(optimizer: Optimizer) -> bool:
    """Return whether gradients are unscaled before an optimizer's step, which calls no closure."""
    own = getattr(optimizer, "_step_supports_amp_scaling", False)
    return not own and not isinstance(optimizer, torch.optim.LBFGS)


def _batches_of(data_fetcher: Any) -> Iterator[Any] | None:
    """Return where a fetcher finds its batches, if all that it does besides is to count them."""
    loader = data_fetcher.iterator
    if type(loader) is not CombinedLoader or loader.iterables is not loader.flattened[0]:
        return None
    cycle: Any = loader._iterator
    plain = type(cycle) is _MaxSizeCycle and len(cycle.iterators) == 1 and not data_fetcher.batches
    return cycle.iterators[0] if plain and data_fetcher.length is not None else None


def _is_known(trainer: Any) -> bool:
    """Return whether this Lightning's steps are those that `DirectSteps` makes."""
    if not _IMPORTED or not is_compared_release() or missing(trainer, *_NEEDED):
        return False
    return type(trainer.fit_loop.epoch_loop) is _TrainingEpochLoop and _calls_fit(trainer)


def _calls_fit(trainer: Any) -> bool:
    """Return whether the methods that a step calls still take what it gives them."""
    loop = trainer.fit_loop.epoch_loop
    connector, progress = trainer._logger_connector, loop.batch_progress
    calls: tuple[Call, ...] = (
        (type(loop).advance, (loop, None), {}),
        (type(loop).run, (loop, None), {}),
        (type(loop).on_advance_end, (loop, None), {}),
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
    return calls_fit(calls)
