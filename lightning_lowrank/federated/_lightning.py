"""The private corners of Lightning that `FederatedLoop` needs, all in one place.

Everything else in the package uses public hooks. `tests/federated/test_lightning.py` fails when one of these changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar, Timer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_lowrank.federated.client import Peers

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
_ONCE_AN_EPOCH = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")


def overrides(listener: pl.Callback | pl.LightningModule | pl.LightningDataModule, hook: str) -> bool:
    """Return whether Lightning would find another hook there than the one that does nothing.

    Unlike Lightning's own ``is_overridden`` it takes a wrapped hook for one of its own, and any callable will do.
    """
    kinds: tuple[type, ...] = (Callback, pl.LightningModule, pl.LightningDataModule)
    base = next(kind for kind in kinds if isinstance(listener, kind))
    # A LambdaCallback has its hooks on the instance.
    return hook in vars(listener) or getattr(type(listener), hook, None) is not getattr(base, hook)


class TrainLoaderSource:
    """Where the trainer takes its training loader from, and the way to put another one there.

    ``trainer.fit(model, loader)`` never asks the module or datamodule, so overriding their ``train_dataloader`` would
    not reach it.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer: Any = trainer
        self._loop: Any = trainer.fit_loop
        self._source = self._loop._data_source
        self._original = self._source.instance

    def is_defined(self) -> bool:
        """Whether the user gave a training loader by any road."""
        with self._as_the_user_left_it():
            return self._original is not None and self._source.is_defined()

    def user_loader(self) -> Any:
        """Return what the user's own source gives."""
        with self._as_the_user_left_it():
            return self._source.dataloader()

    def replace(self, loader: Any) -> None:
        """Make the trainer take ``loader``, and its length anew in each epoch."""
        self._source.instance = loader
        setup_data = self._loop.setup_data

        def setup_data_of_this_length() -> None:
            # Lightning reads the length only when it loads the loader, which takes a good part of a small round.
            if self._loop._combined_loader is None or len(loader) == self._loop.max_batches:
                setup_data()
                return
            self._loop._combined_loader = None
            last_validation = getattr(self._trainer, "_last_val_time", None)
            setup_data()
            # Loading also starts the clock of a val_check_interval that is a time.
            if last_validation is not None:
                self._trainer._last_val_time = last_validation

        self._loop.setup_data = setup_data_of_this_length

    def restore(self) -> None:
        """Put the user's source back."""
        self._source.instance = self._original
        del self._loop.setup_data

    @contextmanager
    def _as_the_user_left_it(self) -> Iterator[None]:
        replaced, self._source.instance = self._source.instance, self._original
        try:
            yield
        finally:
            self._source.instance = replaced


class AccumulationPerClient:
    """Counts ``accumulate_grad_batches`` within a client, where Lightning counts within the epoch.

    Args:
        trainer: The trainer.
        group_begins: Whether the current batch is the first of a group of accumulated ones.
        group_ends: Whether the optimizer steps after the current batch.
    """

    def __init__(self, trainer: Any, group_begins: Callable[[], bool], group_ends: Callable[[], bool]) -> None:
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        automatic = self._epoch_loop.automatic_optimization

        def make_zero_grad(batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
            if automatic._skip_backward or not group_begins():
                return None

            def zero_grad() -> None:
                automatic._on_before_zero_grad(optimizer)
                automatic._optimizer_zero_grad(batch_idx, optimizer)

            return zero_grad

        self._epoch_loop._accumulated_batches_reached = group_ends
        automatic._make_zero_grad_fn = make_zero_grad

    def restore(self) -> None:
        """Give Lightning's own methods back."""
        del self._epoch_loop._accumulated_batches_reached
        del self._epoch_loop.automatic_optimization._make_zero_grad_fn


class DirectSteps:
    """Makes an epoch's steps by calling only those who listen.

    Lightning makes some thirty calls in a step, each looked up, named and timed, of which nearly all do nothing. For a
    small model they take half as long as the step itself (``tests/benchmarks/overhead.py``). Here, what is called, in
    which order, what is counted and what is logged are the same. Who listens is looked up when an epoch begins. An
    epoch in which a part of the trainer or module acts in a way of its own is left to Lightning, and so is one that
    goes on from a checkpoint.

    Args:
        trainer: The trainer, with its strategy and callbacks set up.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._advance_as_lightning = self._loop.advance
        self._direct = False
        self._callbacks: dict[str, list[Callable[..., Any]]] = {}
        self._own: dict[str, Callable[..., Any]] = {}
        self._takes_index = self._clips = False
        self._loop.advance = self._advance

    def restore(self) -> None:
        """Give Lightning's own method back."""
        del self._loop.advance

    def _advance(self, data_fetcher: Any) -> None:
        if self._loop.batch_progress.current.ready == 0:
            self._direct = not self._loop.restarting and self._is_usual(data_fetcher)
            self._look_who_listens()
        if self._direct:
            self._step(data_fetcher)
        else:
            self._advance_as_lightning(data_fetcher)

    def _is_usual(self, data_fetcher: Any) -> bool:
        trainer, module = self._trainer, self._trainer.lightning_module
        return bool(
            type(trainer.strategy) is SingleDeviceStrategy
            and type(trainer.precision_plugin) is Precision
            and type(trainer.profiler) is PassThroughProfiler
            and type(data_fetcher) is _PrefetchDataFetcher
            and module.automatic_optimization
            and trainer.accumulate_grad_batches == 1
            and not any(overrides(module, hook) for hook in (*_UPDATES, *_TRANSFERS))
            and not any(overrides(trainer.datamodule, hook) for hook in _TRANSFERS if trainer.datamodule is not None)
        )

    def _look_who_listens(self) -> None:
        module = self._trainer.lightning_module
        self._callbacks = {
            hook: [getattr(each, hook) for each in self._trainer.callbacks if overrides(each, hook)]
            for hook in _STEP_HOOKS
        }
        self._own = {hook: getattr(module, hook) for hook in _STEP_HOOKS if overrides(module, hook)}
        self._clips = overrides(module, "configure_gradient_clipping") or bool(self._trainer.gradient_clip_val)
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def _tell(self, hook: str, *arguments: Any) -> Any:
        """Call those who listen to a hook, and return what the module answers."""
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

        def gradients() -> Tensor | None:
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


class PaddedEpochs:
    """Lets a process take part in a step of the epoch in which it trains nothing.

    Processes that share an epoch make equally many steps, for Lightning and some of its callbacks have all of them meet
    once a step. In a step without a batch no hook of the module, datamodule or the user's callbacks runs, nothing is
    logged, and no step of an optimizer is counted.

    Args:
        trainer: The trainer.
        without_batch: Whether the step that begins is one without a batch.
        end_step: Called in place of all that happens in a step.
    """

    def __init__(self, trainer: Any, without_batch: Callable[[], bool], end_step: Callable[[], None]) -> None:
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        advance = self._epoch_loop.advance

        def advance_padded(data_fetcher: Any) -> None:
            loop = self._epoch_loop
            validates_first = loop.restarting and loop._should_check_val_fx(data_fetcher)
            if validates_first or not without_batch():
                advance(data_fetcher)
                return
            loop.val_loop.restarting = False
            loop._broadcast_sigterm_tensor()
            next(data_fetcher)
            progress = loop.batch_progress
            progress.is_last_batch = data_fetcher.done
            progress.increment_ready()
            progress.increment_started()
            progress.increment_processed()
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            end_step()
            for callback in trainer.callbacks:
                if isinstance(callback, (ProgressBar, Timer)):
                    callback.on_train_batch_end(trainer, trainer.lightning_module, None, None, loop.batch_idx)
            progress.increment_completed()

        self._epoch_loop.advance = advance_padded

    def restore(self) -> None:
        """Give Lightning's own method back."""
        del self._epoch_loop.advance


class StepCounts:
    """What Lightning counts of a round's steps, to be brought to what one process would have counted.

    Args:
        trainer: The trainer, at the beginning of a round.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._optimizer_steps: int = trainer.global_step
        self._logged_steps: int = trainer.fit_loop.epoch_loop._batches_that_stepped

    def optimizer_steps(self) -> int:
        """Return how many steps the optimizers have made in the round."""
        return self._trainer.global_step - self._optimizer_steps

    def set(self, optimizer_steps: int, logged_steps: int, between_steps: bool) -> None:
        """Count so many steps in the round.

        Args:
            optimizer_steps: By which ``global_step`` has grown.
            logged_steps: By which the number has grown that loggers see.
            between_steps: Whether Lightning has already counted the last step for its loggers.
        """
        loop = self._trainer.fit_loop.epoch_loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer.step
        automatic = self._trainer.lightning_module.automatic_optimization
        counted = (optimizer if automatic else loop.manual_optimization.optim_step_progress).total
        counted.ready = counted.completed = self._optimizer_steps + optimizer_steps
        pending = not between_steps and not loop._should_accumulate()
        loop._batches_that_stepped = self._logged_steps + logged_steps - pending


def evaluate_everything(trainer: Any) -> None:
    """Leave all samples of validation, test and prediction loaders to every process."""
    trainer._accelerator_connector.use_distributed_sampler = False


def stop_gathering(module: nn.Module) -> list[tuple[Metric, Any]]:
    """Keep a module's metrics from gathering what other processes hold.

    Returns:
        The metrics with their ``distributed_available_fn``, to be put back.
    """
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    found = [(metric, metric.distributed_available_fn) for metric in metrics]
    for metric in metrics:
        metric.distributed_available_fn = _never
    return found


def _never() -> bool:
    return False


def pool_training_results(trainer: Any, peers: Peers) -> None:
    """Bring together, in every process, what all of them logged in the steps of an epoch, to be reduced over it."""
    results = trainer.fit_loop.epoch_loop._results
    mine = {
        key: (
            {**{name: getattr(item.meta, name) for name in _SETTINGS}, "reduce_fx": item.meta.reduce_fx.__name__},
            (item.value.cpu(), int(getattr(item, "cumulated_batch_size", 0))) if item.is_tensor else None,
        )
        for key, item in results.items()
        if item.meta.on_epoch and not item.has_reset and not item.meta.fx.startswith(_ONCE_AN_EPOCH)
    }
    gathered = peers.gather(mine)
    settings = {key: settings for part in gathered for key, (settings, _) in part.items()}
    pooled: set[Metric] = set()
    for key, given in settings.items():
        values = [part[key][1] for part in gathered if key in part]
        if key not in results:
            meta = _Metadata(**given)
            meta.sync = _Sync()
            results[key] = _ResultMetric(meta, values[0] is not None)
        item = results[key]
        item.has_reset, item._computed, item._update_count = False, None, 1
        if values[0] is None:
            item.value = trainer.lightning_module.get_submodule(given["metric_attribute"])
            if item.value not in pooled:
                pooled.add(item.value)
                _pool_metric(item.value)
            continue
        numbers = torch.stack([value for value, _ in values]).to(trainer.strategy.root_device)
        reduction = given["reduce_fx"]
        item.value = getattr(numbers, f"a{reduction}")(0) if reduction in ("min", "max") else numbers.sum(0)
        if reduction == "mean":
            item.cumulated_batch_size = torch.tensor(sum(size for _, size in values), device=numbers.device)


def _pool_metric(metric: Metric) -> None:
    metric.sync()
    # What is synchronised stays until the metric is reset, which also has it gather again when it computes.
    metric._is_synced, metric._cache, metric._computed, metric._to_sync = False, None, None, False
    metric._update_count = max(1, metric._update_count)


def log_figures(trainer: pl.Trainer, figures: dict[str, float]) -> None:
    """Log numbers of an epoch; `LightningModule.log` takes longer for each than a small client's step does."""
    # Lightning keeps numbers in the default type, and float32 would round bytes from 16 MiB on.
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
    trainer.callback_metrics.update(tensors)
    trainer._logger_connector.log_metrics(tensors)


def stops_now(trainer: pl.Trainer) -> bool:
    """Return whether the fit ends after this batch, in mid-epoch or not."""
    loop = trainer.fit_loop
    steps_done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    return steps_done or (trainer.should_stop and loop._can_stop_early)


def forget_batches(trainer: pl.Trainer) -> None:
    """Let a run that is resumed from the last batch of a round start the next round with its first batch.

    Lightning recognises such a checkpoint by comparing the batches that were done with the length of the loader, which
    by then is the next round's, and goes on in mid-epoch if that is longer.
    """
    if trainer.fit_loop.epoch_loop.restarted_on_train_batch_end:
        trainer.fit_loop.epoch_loop.batch_progress.current.completed = sys.maxsize - 1
