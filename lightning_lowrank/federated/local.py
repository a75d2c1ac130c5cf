"""A client's local training: its batches, its steps, and the hooks around them.

`Rounds.turn` calls `LocalTraining.train` for each client, or chunk of clients that step together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from lightning_lowrank.federated.data.planner import Chunk
from lightning_lowrank.federated.data.training_set import RoundData
from lightning_lowrank.federated.execution.base import Execution
from lightning_lowrank.federated.leaks import OfTheRun
from lightning_lowrank.federated.logbook import Logbook
from lightning_lowrank.federated.protocols import OwnSteps, inherits
from lightning_lowrank.internals.advance import ClientTurns, loss_of
from lightning_lowrank.internals.lightning import HOOK, batch_transfer, overridden_transfer, overrides
from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.internals.torch import bare_step, drop_gradients, has_observers, is_on, run_backward

_UNSEEN = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
_OWN_UPDATES = (*_UNSEEN, "backward", "optimizer_zero_grad")
_BEFORE_UPDATE = "on_before_optimizer_step"
_PRECISIONS = (Precision, MixedPrecision, DoublePrecision, HalfPrecision)
_OPTIMIZERS = ("torch.optim.", "lightning_lowrank.optim.")


class LocalTraining(OfTheRun):
    """Trains the open client in the live module, or the open clients that step together.

    A local step is Lightning's own, with all of its hooks, closures, scalers, clipping and accumulation; or the plain
    one (``training_step``, ``zero_grad``, ``backward``, ``step``), if nothing that the module, a callback, the
    precision or the optimizer overrides could see the difference. Which of the two is looked up as each round begins.

    Args:
        trainer: The trainer, with its optimizers set up.
        turns: Makes steps as Lightning does, and calls hooks.
        execution: Lets the method have its part in each step.
        data: Reads the batches.
    """

    def __init__(self, trainer: Any, turns: ClientTurns, execution: Execution, data: RoundData) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self._turns, self._execution, self._data = turns, execution, data
        self.logbook = Logbook(trainer)
        self._steps_in_its_own_way = False
        steps = OwnSteps.of(execution.algorithm)
        self._own_update = None if inherits(steps, "local_update") else steps.local_update
        self._batches: Iterator[Any] | None = None
        self.look: Callable[[Any], None] | None = None
        """Called with a client's first batch before its first step."""
        self.made = 0
        """Number of steps that have been made in the present turn."""
        self._chunk: Chunk
        self.stopped = False
        """Whether the fit stopped before the present client's last batch."""
        self.in_step = False
        """Whether a batch is being read, or a step being made, so that an error is the client's."""

    def start(self) -> Callable[[], None]:
        """Install the logbook, and the loop's part in Lightning's steps; return a function that removes both."""
        ends = ExitStack()
        ends.callback(self._release)
        ends.enter_context(self.logbook.installed())
        strategy, module = self._trainer.strategy, self._module
        own = strategy.training_step
        step = self._execution.step_of(own)
        if step is not own:
            ends.enter_context(replaced(strategy, training_step=self._in_precision(own, step)))
        if self._own_update is not None:
            update, step = self._own_update, module.optimizer_step
            self._steps_in_its_own_way = overrides(module, "optimizer_step")

            def optimizer_step(*arguments: Any, **keywords: Any) -> None:
                update(self._execution.step(), functools.partial(step, *arguments, **keywords))

            ends.enter_context(replaced(module, optimizer_step=optimizer_step))
        return ends.close

    def _in_precision(self, own: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
        def in_precision(*arguments: Any) -> Any:
            if self._execution.substituted:
                return own(*arguments)
            with self._trainer.precision_plugin.train_step_context():
                return step(*arguments)

        return in_precision

    @property
    def client_steps(self) -> int:
        """Number of batches trained in the present turn, summed over its clients."""
        return sum(map(self._chunk.active, range(self.made)))

    def begin_round(self) -> None:
        """Look up how steps are made in this round."""
        trainer, module = self._trainer, self._module
        self._batches = None
        for callback in trainer.callbacks:
            # Lightning does not call its on_train_epoch_start in a round in which a fit is resumed after a step.
            if isinstance(callback, GradientAccumulationScheduler):
                trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        self._group = trainer.accumulate_grad_batches
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        own = module.training_step
        step = own if self._execution.substituted else self._execution.step_of(own)
        # With clients that step together, the execution replaces the module's step itself.
        self._step = None if step is own else step
        self._transfer = batch_transfer(trainer)
        plain_input = type(trainer.precision_plugin) in (Precision, MixedPrecision)
        self._moves_none = plain_input and overridden_transfer(trainer) is None
        self._plain = self._is_plain()
        self._clips = overrides(module, "configure_gradient_clipping") or bool(trainer.gradient_clip_val)
        # Single precision needs no context.
        single = type(trainer.precision_plugin) is Precision
        self._context = nullcontext if single else trainer.precision_plugin.train_step_context
        self._before_update = [each for each in trainer.callbacks if overrides(each, _BEFORE_UPDATE)]
        self._module_hears_update = overrides(module, _BEFORE_UPDATE)

    def _is_plain(self) -> bool:
        """Whether no hook, plugin or optimizer could distinguish the plain step from Lightning's."""
        trainer, module = self._trainer, self._module
        strategy, precision = trainer.strategy, trainer.precision_plugin
        return (
            module.automatic_optimization
            and self._group == 1
            and type(precision) in _PRECISIONS
            and getattr(precision, "scaler", None) is None
            and (type(strategy) is SingleDeviceStrategy or getattr(strategy, "steps_alone", False))
            and strategy.model is module
            and type(trainer.profiler) is PassThroughProfiler
            and _steps_plainly(trainer.optimizers[0])
            and not any(overrides(module, hook) for hook in _OWN_UPDATES)
            and not (overrides(module, "optimizer_step") if self._own_update is None else self._steps_in_its_own_way)
            and not any(overrides(each, hook) for each in trainer.callbacks for hook in _UNSEEN)
        )

    def train(self, chunk: Chunk) -> bool:
        """Train the open client on its batches, until the fit stops; return whether the module ended the round.

        If the fit `stopped` before the client's last batch, the client stays open.
        """
        turns, self._chunk = self._turns, chunk
        last, ends_round, look, stacked = chunk.steps - 1, False, self.look, self._execution.stacked
        self.made, self.stopped = 0, False
        turns.begin_client(chunk.steps)
        self.logbook.begin_client()
        for number in range(chunk.steps):
            self.in_step = True
            turns.begin_step(number, number == last, self._group)
            batch = self._next_batch()
            # DifferentialPrivacy refuses None: the step's noise would be missing.
            skips = batch is None and self._execution.substituted is None
            if look is not None and not skips:
                look(batch)
                look = None
            self._execution.before_batch(number)
            size = sum(len(places.numbers) * places.samples for places, _ in batch) if stacked else None
            turns.show_batch(batch, number, size)
            self.logbook.begin_step(batch, size)
            if skips:
                turns.warn_of_none()
            elif turns.starts_are_heard and turns.tell_start(batch, number):
                ends_round = True
                break
            outputs = None
            if not skips:
                outputs = self._plain_step(batch, number) if self._plain else turns.step(batch, number)
            self.in_step = False
            self.made += 1
            turns.end_step()
            if turns.ends_are_heard:
                turns.tell_end(outputs, batch, number)
            turns.count_batch()
            if turns.stops():
                self.stopped = number < last
                break
        self.in_step = False
        self._execution.number = max(0, self.made - 1)
        if self.made < chunk.steps:
            self._batches = None
        self.logbook.end_client()
        return ends_round

    def end(self) -> None:
        """End the open client's training."""
        self._turns.end_client()

    def drop(self) -> bool:
        """Drop the open client after a failure; return whether it failed during training."""
        trained, self.in_step = self._turns.in_client, False
        self._batches = None
        self.logbook.drop_client()
        self._turns.end_client()
        return trained

    def forget_batches(self) -> None:
        """Start again at the open chunk's first batch, because the chunk has changed."""
        self._batches = None

    def _release(self) -> None:
        self._batches = None
        self._data.release()

    def _next_batch(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._data.loader)
        with self._turns.reading():
            batch = next(self._batches)
        if self._moves_none and is_on(self._trainer.strategy.root_device, batch):
            return batch
        return self._transfer(batch)

    def _plain_step(self, batch: Any, number: int) -> dict[str, Any]:
        arguments = (batch, number) if self._takes_index else (batch,)
        step = functools.partial(self._step or self._module.training_step, *arguments)
        outputs: dict[str, Any] = {}
        if self._own_update is None:
            self._update(batch, step, outputs)
        else:
            self._own_update(self._execution.step(), functools.partial(self._update, batch, step, outputs))
        self._turns.count_step()
        return outputs

    def _update(self, batch: Any, training_step: Callable[[], Any], outputs: dict[str, Any]) -> None:
        trainer, module, (optimizer,) = self._trainer, self._module, self._trainer.optimizers
        # Writing to __dict__ is faster than nn.Module.__setattr__.
        attributes = vars(module)
        attributes[HOOK] = "training_step"
        with self._context():
            output = loss = self._execution.gradients(batch)
            if loss is None:
                output = training_step()
        if loss is None:
            loss = loss_of(output)
            drop_gradients(optimizer)
            if loss is not None:
                run_backward(loss)
        attributes[HOOK] = _BEFORE_UPDATE
        for callback in self._before_update:
            callback.on_before_optimizer_step(trainer, module, optimizer)
        if self._module_hears_update:
            module.on_before_optimizer_step(optimizer)
        if self._clips:
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )
        attributes[HOOK] = None
        bare_step(optimizer)()
        if self._turns.ends_are_heard and loss is not None:
            outputs.update(output if isinstance(output, dict) else {}, loss=loss.detach())


def _steps_plainly(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step with a closure equals a step after the backward pass."""
    known = f"{type(optimizer).__module__}.".startswith(_OPTIMIZERS) and not isinstance(optimizer, torch.optim.LBFGS)
    return known and not has_observers(optimizer)
