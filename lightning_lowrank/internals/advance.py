"""A replacement of ``advance`` in Lightning's training loop, which gives each client a turn.

`FederatedLoop` installs `ClientTurns`. It calls `Rounds.turn` once for each client, keeps Lightning's counters, and
calls the hooks that Lightning would call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, Timer, WeightAveraging
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.call import _call_lightning_module_hook, _call_strategy_hook
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_lowrank.internals.lightning import TrainLoaderSource, accumulates, overrides, stops_now
from lightning_lowrank.internals.replaced import replaced

_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
_ONCE_PER_TURN = (Checkpoint, ProgressBar, WeightAveraging)
_COUNTERS = (
    ("automatic_optimization.optim_progress", "optimizer", "step"),
    ("automatic_optimization.optim_progress", "optimizer", "zero_grad"),
    ("manual_optimization.optim_step_progress",),
    ("scheduler_progress",),
)


class TurnLoader:
    """The training loader that Lightning gets in a federated fit: it yields a round's turn numbers, not batches.

    Lightning shows it as ``trainer.train_dataloader``. Its length is the number of turns or, while a client trains,
    that client's number of batches. All other attributes, such as ``dataset`` and ``batch_size``, are those of the
    user's loader.

    Args:
        trainer: The trainer.
        turns: Returns the number of turns of the round that the trainer is in.
        loader: Returns the user's loader.
        begin_epoch: Called as an epoch begins, before any hook.
    """

    def __init__(
        self, trainer: Any, turns: Callable[[], int], loader: Callable[[], Any], begin_epoch: Callable[[], None]
    ) -> None:
        self._trainer, self._turns, self._loader, self._begin_epoch = trainer, turns, loader, begin_epoch
        self.batches: int | None = None
        """Number of batches of the client that trains, if any does."""

    def __len__(self) -> int:
        return self.batches or self._turns()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._turns()))

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the user's loader."""
        # With overfit_batches, Lightning would rebuild a loader that has a dataset.
        if name.startswith("_") or (name == "dataset" and self._trainer.overfit_batches):
            raise AttributeError(name)
        return getattr(self._loader(), name)

    @property
    def sampler(self) -> TurnLoader:
        """The loader itself: Lightning announces each epoch to a loader's sampler by set_epoch()."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, whose round may have another number of turns."""
        self._begin_epoch()

    def state_dict(self) -> dict[str, Any]:
        """An empty state, which marks the loader as resumable; Lightning's loop saves the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is empty."""


class ClientTurns:
    """Replaces ``advance`` of Lightning's training loop: a turn is a client instead of a batch.

    Lightning's counters keep their meaning: ``global_step``, ``max_steps``, the loggers' steps and ``is_last_batch``
    are those of local steps. In a client's turn ``trainer.num_training_batches`` is the client's number of batches,
    between turns the round's number of turns. Clients that step together share a turn.

    The hooks ``on_train_batch_start`` and ``on_train_batch_end`` of the module and of callbacks are called on each
    local batch, with its number among the client's. Those of Lightning's checkpoints, progress bars and averages are
    called once a turn, between clients, where the module is the global model; so are those of this package's callbacks
    with an attribute ``once_per_turn``. ``ModelCheckpoint(every_n_train_steps=n)`` saves at the end of the first turn
    past a multiple of n.

    Args:
        trainer: The trainer.
        own: The callback that installs it, whose batch hooks are not called.
        count: Returns the number of turns of the round that the trainer is in.
        done: Returns how many of them are done.
        loader: Returns the user's training loader.
        turn: Trains the client of the next turn. Returns whether the module ended the round.
        resumes_inside: Returns whether the fit resumes from a checkpoint that was saved inside a client.
    """

    def __init__(
        self,
        trainer: Any,
        own: pl.Callback,
        count: Callable[[], int],
        done: Callable[[], int],
        loader: Callable[[], Any],
        turn: Callable[[], bool],
        resumes_inside: Callable[[], bool],
    ) -> None:
        self._trainer, self._loop, self._own = trainer, trainer.fit_loop.epoch_loop, own
        self._count, self._done, self._turn, self._resumes_inside = count, done, turn, resumes_inside
        self._loader = TurnLoader(trainer, count, loader, lambda: self._begin_epoch(count()))
        self._source = TrainLoaderSource(trainer)
        self._accumulates = False
        self._at_start: _Counts | None = None
        self._once: dict[str, list[Any]] = {}
        self._each: dict[str, list[Any]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which Lightning's training loop runs turns."""
        own: dict[str, Callable[..., Any]] = {"advance": self._advance}
        if accumulates(self._trainer):
            own["_should_accumulate"] = lambda: self._accumulates
        with self._source.replaced_by(self._loader), replaced(self._loop, **own):
            yield

    @property
    def in_client(self) -> bool:
        """Whether a client's turn is open: begun, and neither ended nor failed.

        A turn in which the fit stops stays open until the round ends.
        """
        return self._at_start is not None

    def _begin_epoch(self, turns: int) -> None:
        """Set the epoch's number of turns, and look up the overridden hooks."""
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        if fit_loop._combined_loader is not None and fit_loop.max_batches != turns:
            fit_loop._combined_loader.limits, fit_loop.max_batches = [turns], turns
            # A run resumed between rounds has an iterator of the finished round, so start a new one.
            iter(fit_loop._data_fetcher)
            # As Lightning's `setup_data`, except that an interval longer than this round is cut to its length.
            if trainer.check_val_every_n_epoch is not None and trainer.val_check_batch is not None:
                every = trainer.val_check_interval
                trainer.val_check_batch = min(every, turns) if type(every) is int else max(1, int(turns * every))
        # With a profiler, call hooks that do nothing as well, because it reports them.
        self._profiles = type(trainer.profiler) is not PassThroughProfiler
        for hook in _BATCH_HOOKS:
            others = [each for each in trainer.callbacks if each is not self._own]
            heard = [each for each in others if self._profiles or overrides(each, hook)]
            shares = trainer.world_size > 1
            self._once[hook] = [each for each in heard if _is_once_per_turn(each, hook, shares)]
            self._each[hook] = [each for each in heard if each not in self._once[hook]]
        module = trainer.lightning_module
        self.module_hears = {hook for hook in _BATCH_HOOKS if self._profiles or overrides(module, hook)}
        strategy = type(trainer.strategy)
        self._strategy_hears = self._profiles or strategy.on_train_batch_start is not Strategy.on_train_batch_start
        self.starts_are_heard = bool(
            self._each["on_train_batch_start"] or "on_train_batch_start" in self.module_hears or self._strategy_hears
        )
        self.ends_are_heard = bool(self._each["on_train_batch_end"] or "on_train_batch_end" in self.module_hears)

    def end_restored_epoch(self) -> None:
        """Mark all turns as complete, if the checkpoint was saved at the end of a round.

        The process that saved it may have completed fewer: it shared the round with others, or the module ended the
        round early.
        """
        progress = self._loop.batch_progress
        if progress.is_last_batch and self._loop.restarted_on_last:
            progress.current.completed = self._count()

    # Turns

    def _advance(self, data_fetcher: Any) -> None:
        trainer, loop = self._trainer, self._loop
        progress, connector = loop.batch_progress, trainer._logger_connector
        if self._validates_first(data_fetcher):
            return
        turn, turns = self._done(), self._count()
        if trainer.world_size > 1:
            loop._broadcast_sigterm_tensor()
        if turn >= turns:
            # The checkpoint was saved at the end of a round.
            progress.is_last_batch = True
            raise StopIteration
        # After a second resume in one round, Lightning may restart its counters.
        vars(progress.current).update(dict.fromkeys(vars(progress.current), turn))
        last = progress.is_last_batch = turn + 1 == turns
        progress.increment_ready()
        connector.on_batch_start(None)
        self._tell_callbacks(self._once, "on_train_batch_start", turn, turn)
        progress.increment_started()
        stepped, ready = loop._batches_that_stepped, progress.current.ready
        global_step = trainer.global_step
        try:
            ends_round = self._turn()
        finally:
            self._accumulates, self._loader.batches = False, None
            progress.current.ready, trainer.fit_loop.max_batches = ready, turns
        if self.in_client:
            self._cut_turn()
        else:
            progress.is_last_batch = last or ends_round
            progress.increment_processed()
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if not ends_round and self._once["on_train_batch_end"]:
            with ExitStack() as due:
                for callback in self._once["on_train_batch_end"]:
                    due.enter_context(self._saving_past(callback, global_step))
                self._tell_callbacks(self._once, "on_train_batch_end", None, turn, turn)
        if loop._results:
            connector.on_batch_end()
        if not self.in_client:
            progress.increment_completed()
        self._log(stepped)
        if ends_round:
            raise StopIteration
        # Lightning itself counts the turn's last step after this method.
        loop._batches_that_stepped -= 1

    def _cut_turn(self) -> None:
        """Do not count a turn that the fit stops inside, as Lightning does not count a cut epoch."""
        progress = self._loop.batch_progress
        progress.is_last_batch = False
        for counts in (progress.total, progress.current):
            counts.ready -= 1
            counts.started -= 1
        self._loop._skip_next_val = not self._trainer.should_stop

    def _validates_first(self, data_fetcher: Any) -> bool:
        """Whether a validation is due before any training, after a resume."""
        loop = self._loop
        # Before an epoch's first step, Lightning also considers a validation due.
        due = loop.restarting and loop._should_check_val_fx(data_fetcher)
        if due and not self._resumes_inside():
            if loop.val_loop.restarted_mid_evaluation:
                return True
            if loop.restarted_on_last:
                loop._skip_next_val = True
                return True
        if due:
            loop.val_loop.increment_progress_to_evaluation_end()
        loop.val_loop.restarting = False
        return False

    def _saving_past(self, callback: pl.Callback, before: int) -> AbstractContextManager[None]:
        """A context in which a `ModelCheckpoint` saves if the turn has passed a multiple of its number of steps."""
        every = getattr(callback, "_every_n_train_steps", 0)
        now = self._trainer.global_step
        if every < 2 or now // every == before // every:
            return nullcontext()
        return replaced(callback, _every_n_train_steps=_Passed(every))

    def _log(self, stepped: int) -> None:
        """Let loggers write if the number of steps has passed a multiple of ``log_every_n_steps``."""
        loop, every = self._loop, self._trainer.log_every_n_steps
        now = loop._batches_that_stepped
        passed = every and now // every > stepped // every
        # Loggers write the number of the last step before the multiple.
        loop._batches_that_stepped = now // every * every - 1 if passed else now - 1
        try:
            if passed or self._trainer.should_stop or self._trainer.fast_dev_run:
                self._trainer._logger_connector.update_train_step_metrics()
        finally:
            loop._batches_that_stepped = now

    # Local steps

    def begin_step(self, number: int, is_last: bool, group: int) -> None:
        """Begin a client's step ``number``; gradients are accumulated over ``group`` steps."""
        progress = self._loop.batch_progress
        progress.current.ready, progress.is_last_batch = number + 1, is_last
        self._accumulates = (number + 1) % group != 0 and not is_last

    def show_batch(self, batch: Any, number: int, size: int | None) -> None:
        """Show Lightning the batch of step ``number``, whose size weights values that it collects itself.

        ``size`` is ``None`` if Lightning is to infer it.
        """
        results = self._loop._results
        results.batch, results.batch_size = batch, size
        if number:
            # While it is set, Lightning forgets a hook's values when another hook logs.
            self._trainer._logger_connector._first_loop_iter = False

    def begin_client(self, steps: int) -> None:
        """Begin a client's turn with ``steps`` batches."""
        self._at_start = _Counts(self._trainer)
        self._trainer.fit_loop.max_batches = self._loader.batches = steps

    def end_client(self) -> None:
        """End a client's turn: checkpoints save the present counters again."""
        self._at_start = None

    def tell_start(self, batch: Any, number: int) -> bool:
        """Call the hooks before a local batch, and return whether the module ends the epoch."""
        self._tell_callbacks(self._each, "on_train_batch_start", batch, number)
        answer = None
        if "on_train_batch_start" in self.module_hears:
            answer = _call_lightning_module_hook(self._trainer, "on_train_batch_start", batch, number)
        if self._strategy_hears:
            _call_strategy_hook(self._trainer, "on_train_batch_start", batch, number)
        return bool(answer == -1)

    def tell_end(self, outputs: Any, batch: Any, number: int) -> None:
        """Call the hooks after a local batch."""
        self._tell_callbacks(self._each, "on_train_batch_end", outputs, batch, number)
        if "on_train_batch_end" in self.module_hears:
            _call_lightning_module_hook(self._trainer, "on_train_batch_end", outputs, batch, number)

    def warn_of_none(self) -> None:
        """Warn, as Lightning does once, of a batch that is ``None`` and is skipped."""
        self._loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")

    def step(self, batch: Any, number: int) -> Any:
        """Run a local step as Lightning does, and return the outputs for ``on_train_batch_end``."""
        trainer, loop = self._trainer, self._loop
        arguments = loop._build_kwargs(OrderedDict(), batch, number)
        with trainer.profiler.profile("run_training_batch"):
            if trainer.lightning_module.automatic_optimization:
                return loop.automatic_optimization.run(trainer.optimizers[0], number, arguments)
            return loop.manual_optimization.run(arguments)

    def count_step(self) -> None:
        """Count an optimizer step that was made without Lightning."""
        counts = self._loop.automatic_optimization.optim_progress.optimizer
        for each in (counts.zero_grad, counts.step):
            each.increment_by(1)

    def end_step(self) -> None:
        """Step the learning rate schedulers with interval "step"."""
        if self._trainer.lr_scheduler_configs:
            self._loop.update_lr_schedulers("step", update_plateau_schedulers=False)

    def count_batch(self) -> None:
        """Count a batch for loggers, after its hooks."""
        if not self._accumulates:
            self._loop._batches_that_stepped += 1

    def stops(self) -> bool:
        """Whether the fit ends after the present step.

        Raises:
            SIGTERMException: If the process is to end.
        """
        trainer = self._trainer
        if trainer.received_sigterm:
            raise SIGTERMException
        return (trainer.should_stop or trainer.max_steps != -1) and stops_now(trainer)

    def reading(self) -> AbstractContextManager[Any]:
        """The profiler's context for reading a batch."""
        if not self._profiles:
            return nullcontext()
        return self._trainer.profiler.profile("[_TrainingEpochLoop].train_dataloader_next")

    def _tell_callbacks(self, listeners: Mapping[str, list[Any]], hook: str, *arguments: Any) -> None:
        if not listeners[hook]:
            return
        trainer, module = self._trainer, self._trainer.lightning_module
        # LightningModule.log() reads this attribute to know the hook that calls it.
        before, module._current_fx_name = module._current_fx_name, hook
        for callback in listeners[hook]:
            with trainer.profiler.profile(f"[Callback]{callback.state_key}.{hook}"):
                getattr(callback, hook)(trainer, module, *arguments)
        module._current_fx_name = before

    # Checkpoints

    def wind_back(self, checkpoint: dict[str, Any]) -> None:
        """Reset a checkpoint's counters to the client's start, if it is saved inside a client's turn."""
        if self._at_start is not None:
            self._at_start.write(checkpoint)


class _Passed(int):
    """An integer by which every number is divisible."""

    def __rmod__(self, other: int) -> int:
        return 0


class _Counts:
    """Lightning's counters at a client's start."""

    def __init__(self, trainer: Any) -> None:
        loop = self._loop = trainer.fit_loop.epoch_loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer
        manual = loop.manual_optimization.optim_step_progress
        self._global_step = trainer.global_step
        self._stepped = loop._batches_that_stepped
        self._turns: int = loop.batch_progress.current.completed
        self._counted = [
            (dict(vars(each.total)), dict(vars(each.current)))
            for each in (optimizer.step, optimizer.zero_grad, manual, loop.scheduler_progress)
        ]
        self._precision = trainer.precision_plugin
        scaler = getattr(self._precision, "scaler", None)
        self._scaler = None if scaler is None else self._precision.state_dict()

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Write the counters into a checkpoint."""
        checkpoint["global_step"] = self._global_step
        loops = checkpoint["loops"]["fit_loop"]
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = self._stepped
        batches = loops["epoch_loop.batch_progress"]
        batches["is_last_batch"] = False
        for counts, done in ((batches["total"], batches["total"]["completed"]), (batches["current"], self._turns)):
            counts.update(dict.fromkeys(("ready", "started", "processed", "completed"), done))
        for path, (total, current) in zip(_COUNTERS, self._counted, strict=True):
            saved = loops[f"epoch_loop.{path[0]}"]
            for part in path[1:]:
                saved = saved[part]
            saved["total"].update(total)
            saved["current"].update(current)
        if self._scaler is not None:
            checkpoint[type(self._precision).__qualname__] = self._scaler


def loss_of(output: Any) -> Tensor | None:
    """The loss in a training step's output, found as by Lightning; warns if there is none.

    Raises:
        MisconfigurationException: If it is neither a tensor nor a dictionary with a loss.
    """
    if isinstance(output, Tensor):
        return output
    loss = ClosureResult.from_training_step_output(output).closure_loss
    if loss is None:
        Closure.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
    return loss


def _is_once_per_turn(callback: pl.Callback, hook: str, shares: bool) -> bool:
    """Whether a hook runs once per turn: it reads the global model and no batch, or synchronises processes."""
    # A LambdaCallback has hooks as instance attributes; a mock has no real ones.
    defined = None if hook in vars(callback) else getattr(type(callback), hook, None)
    if defined is None:
        return False
    ours = getattr(callback, "once_per_turn", False) and defined.__module__.startswith("lightning_lowrank.")
    kinds = (*_ONCE_PER_TURN, Timer) if shares else _ONCE_PER_TURN
    return ours or (isinstance(callback, kinds) and defined.__module__.startswith("lightning."))
