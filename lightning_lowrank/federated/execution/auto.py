"""The choice of execution: whether and how many clients may step together, and which execution is fastest."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from rich.console import Console

from lightning_lowrank.federated.checks import readers_after_steps
from lightning_lowrank.federated.data.planner import Chunk
from lightning_lowrank.federated.data.round_loader import RoundLoader
from lightning_lowrank.federated.data.sampling import NeedsPoissonBatches
from lightning_lowrank.federated.data.training_set import RoundData
from lightning_lowrank.federated.exchange import Exchange
from lightning_lowrank.federated.execution.base import Execution
from lightning_lowrank.federated.execution.channels_last import ChannelsLast
from lightning_lowrank.federated.execution.comparison import difference
from lightning_lowrank.federated.execution.compiled import CompiledSteps
from lightning_lowrank.federated.execution.mapped_leaks import MappedStepGuard
from lightning_lowrank.federated.execution.memory import chunk_size_that_fits
from lightning_lowrank.federated.execution.one_by_one import Sequential
from lightning_lowrank.federated.execution.processes import ClientParallelStrategy
from lightning_lowrank.federated.execution.snapshot import trial
from lightning_lowrank.federated.execution.stack import ClientStack
from lightning_lowrank.federated.execution.vectorized import Vectorized
from lightning_lowrank.federated.execution.why_not import (
    CannotMap,
    cause_of,
    hooks_around_steps,
    steps_are_observed,
    unsupported_reason,
)
from lightning_lowrank.federated.objective import loss_of
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.internals.torch import synchronize

_KINDS: dict[str, type[Execution]] = {kind.name: kind for kind in (Sequential, Vectorized)}
_TRIED_STEPS = 6
_FEWEST_TOGETHER = 2
_WORTH_CHANNELS_LAST = 0.95
"""Share of a step's time that is to be reached for it: less of a gain may be chance."""

_T = TypeVar("_T")


def choose_execution(
    trainer: Any,
    exchange: Exchange,
    data: RoundData,
    processes: ClientParallelStrategy | None,
    restored: Mapping[str, Any] | None,
    previous: Execution | None,
) -> Execution:
    """Choose the execution that the settings ask for, and configure the data for it.

    Args:
        trainer: The trainer, with its optimizers set up.
        exchange: The exchange of the clients' messages.
        data: The divided training set.
        processes: Connects the processes that share rounds, if there are several.
        restored: The loop's state in the checkpoint that the fit is resumed from, if any.
        previous: The execution of the fit that this one continues, if any.
    """
    wanted: str = exchange.settings.execution
    size = exchange.settings.chunk_size or 0
    reason = "" if wanted == "sequential" else unsupported_reason(trainer, trainer.lightning_module)
    if wanted == "vectorized" and reason:
        raise MisconfigurationException(
            f"execution='vectorized' is not possible: {reason}. Use execution='sequential'."
        )
    channels_last = validation_channels_last = False
    if wanted == "auto" and restored is not None:
        wanted, channels_last = restored["execution"], restored["channels_last"]
        validation_channels_last = restored["validation_channels_last"]
    elif wanted == "auto" and previous is not None:
        wanted, channels_last = previous.name, previous.channels_last
        validation_channels_last = previous.validation_channels_last
    elif wanted == "auto":
        listeners = (trainer.lightning_module, *trainer.callbacks)
        around = [f"{type(each).__name__}.{hook}()" for each in listeners for hook in hooks_around_steps(each)]
        every = getattr(trainer, "val_check_interval", None)
        if isinstance(every, int) and trainer.enable_validation and not reason:
            reason = f"val_check_interval={every} counts clients, and would count chunks of those that step together"
        if around and not reason:
            reason = (
                f"{around[0]} would see the global model and batches of several clients (if that will do, ask for"
                " execution='vectorized')"
            )
        if reason:
            choice = _fastest(trainer, data, _TRIED_STEPS, reason)
        else:
            reason, size = _compared(trainer, data, size)
            defers = not steps_are_observed(trainer, exchange.algorithm)
            choice = _fastest(trainer, data, size, reason, defers, exchange.settings.compile)
        wanted, channels_last, grounds = choice if processes is None else processes.broadcast(choice)
        validation_channels_last = channels_last
        if trainer.is_global_zero:
            Console().print(f"execution='auto': {grounds}", highlight=False, soft_wrap=True)
    kind = _KINDS[wanted]
    if not kind.stacked:
        size = 1
    elif not size:
        size = data.chunk_size if data.chunk_size > 1 else 0 if restored is None else restored["chunk_size"]
    if exchange.settings.execution == "vectorized":
        reason, size = _compared(trainer, data, size)
        reason = reason if processes is None else processes.broadcast(reason)
        if reason:
            raise MisconfigurationException(
                f"execution='vectorized' is not possible: {reason}. Use execution='sequential', or 'auto', which falls"
                " back to it."
            )
    # A fit that continues another one has skipped the comparison, so `size` may be 0.
    size = size or chunk_size_that_fits(trainer, data)
    if kind.stacked and not exchange.settings.chunk_size and processes is not None:
        size = min(processes.gather(size))
    data.use(kind.stacked, size)
    execution = kind(trainer, exchange)
    execution.channels_last, execution.validation_channels_last = channels_last, validation_channels_last
    if isinstance(execution, Vectorized):
        execution.compare = functools.partial(_difference, trainer, data, size, processes)
        if exchange.settings.compile:
            execution.compile(min(size, data.planner.clients_per_round), data.loader.batch_size)
    return execution


def _difference(trainer: Any, data: RoundData, size: int, processes: ClientParallelStrategy | None) -> str:
    """The reason why ``size`` clients together step differently from a single client; empty if they don't."""
    reason, _ = _compared(trainer, data, size)
    return reason if processes is None else processes.broadcast(reason)


def _compared(trainer: Any, data: RoundData, size: int) -> tuple[str, int]:
    """Compare a step of the first round's clients together with the same step of single clients.

    Args:
        trainer: The trainer, with its optimizers set up.
        data: The divided training set.
        size: How many clients are to step together; 0: as many as memory has room for, and half of these if a step
            needs more than there is.

    Returns:
        Why the steps are not the same, if they are not, and how many clients may step together.
    """
    given, size = size, size or chunk_size_that_fits(trainer, data)
    needed: list[tuple[int, str]] = []

    def compare(chunk: Chunk) -> str:
        try:
            return difference(trainer, trainer.lightning_module, chunk, data.loader)
        except Exception as error:
            needed.append((len(chunk.clients), str(error)))
            return ""

    while True:
        needed.clear()
        found, _ = _tried(data, size, compare)
        if not needed:
            return found or "", size
        clients, grounds = needed[0]
        if given or clients <= _FEWEST_TOGETHER:
            return f"a step of {clients} clients together needs more memory than is free ({grounds})", size
        size = max(_FEWEST_TOGETHER, clients // 2)


def _fastest(
    trainer: Any, data: RoundData, size: int, reason: str, defers: bool = False, compiles: bool = False
) -> tuple[str, bool, str]:
    """Find the fastest execution by trial steps of the first round, which are undone.

    Args:
        trainer: The trainer, with its optimizers set up.
        data: The divided training set.
        size: How many clients may step together.
        reason: Why none can, if so.
        defers: As for `time_both`.
        compiles: Whether steps of clients together may be compiled.

    Returns:
        The execution's name, whether images of single clients and of validation are in channels-last format, and a
        sentence on the choice.
    """
    module, loader = trainer.lightning_module, data.loader
    tried = functools.partial(_tried, data, size)
    alone = last = together = None
    failed = ""
    if not reason:
        both, reason = tried(lambda chunk: time_both(trainer, module, chunk, loader, defers))
        alone, together = both or (None, None)
    if _may_have_channels_last(trainer):
        last, failed = tried(lambda chunk: time_alone(trainer, module, chunk, loader, channels_last=True))
        if last is not None and alone is None:
            alone, _ = tried(lambda chunk: time_alone(trainer, module, chunk, loader))
            last = None if alone is None else last
    if compiles and together is not None and together >= _best_alone(alone, last):
        # Compilation is slow, so it is tried only if it may change the choice.
        both, reason = tried(lambda chunk: time_both(trainer, module, chunk, loader, defers, compiles))
        alone, together = both or (alone, None)
    name, way = Sequential.name, "clients train one after another"
    channels_last = _prefers_channels_last(alone, last)
    if together is not None and together < _best_alone(alone, last):
        name, way = Vectorized.name, "clients step together"
        way += ", and validation has the channels of images last in memory" if channels_last else ""
    elif channels_last:
        way += ", with the channels of images last in memory"
    times = {"alone": alone, "alone with channels last": last, "together": together}
    texts = [f"{1000 * value:.3g} ms {how}" for how, value in times.items() if value is not None]
    grounds = [way, *([reason] if reason else [])]
    if len(texts) > 1:
        grounds.append(f"a client's step takes {', '.join(texts[:-1])} and {texts[-1]}")
    if failed and failed != reason:
        grounds.append(f"with channels last, {failed}")
    return name, channels_last, "; ".join(grounds)


def _prefers_channels_last(alone: float | None, last: float | None) -> bool:
    """Whether a single client's step is faster with channels last, given the seconds of both."""
    return alone is not None and last is not None and last < _WORTH_CHANNELS_LAST * alone


def _best_alone(alone: float | None, last: float | None) -> float:
    """The seconds of a single client's step, in the faster memory format."""
    best = last if _prefers_channels_last(alone, last) else alone
    return math.inf if best is None else best


def _may_have_channels_last(trainer: Any) -> bool:
    """Whether to try steps with images in channels-last format."""
    module = trainer.lightning_module
    # With Poisson-sampled batches, the steps see single samples.
    mapped = any(isinstance(callback, NeedsPoissonBatches) for callback in trainer.callbacks)
    return bool(module.automatic_optimization and not mapped and ChannelsLast(module).applies)


def _tried(data: RoundData, size: int, time_steps: Callable[[Chunk], _T]) -> tuple[_T | None, str]:
    """Call ``time_steps`` with the first round's largest chunk; if that fails, return ``None`` and the reason."""
    chunks = data.planner.trial_chunks(max(_FEWEST_TOGETHER, size))
    data.randomness.open()
    try:
        # The largest chunk, because clients that may not step together are in separate chunks.
        return time_steps(max(chunks, key=lambda chunk: len(chunk.clients))), ""
    except MisconfigurationException as error:
        return None, error.reason if isinstance(error, CannotMap) else str(error)
    except Exception as error:
        # An error in a trial only rules out this execution; a real error will occur again when clients train one after
        # another.
        return None, f"the trial ended with {cause_of(error)}"
    finally:
        data.randomness.release()


def time_alone(
    trainer: Any, module: pl.LightningModule, chunk: Chunk, loader: RoundLoader, channels_last: bool = False
) -> float | None:
    """Time a single client's step, on the batches that `time_both` uses; everything is restored.

    Args:
        trainer: The trainer, with its optimizers set up.
        module: Its module.
        chunk: The clients.
        loader: Reads their batches.
        channels_last: Whether the step sees images with their channels last in memory.

    Returns:
        Seconds of a step; ``None`` if ``channels_last`` changes no batch.

    Raises:
        MisconfigurationException: If the module holds an object that cannot be restored.
    """
    # The first batch of each client.
    clients = chunk.clients[:_TRIED_STEPS]
    with trial(trainer, loader, Chunk(clients, (1,) * len(clients)), _TRIED_STEPS, stacked=False) as (_, alone):
        if not channels_last:
            return statistics.fmean(_seconds(trainer, module, alone, lambda step: None))
        layout = ChannelsLast(module)
        if not any(map(layout.changes, alone)):
            return None
        step = functools.wraps(module.training_step)(layout.step(module.training_step))
        with replaced(module, training_step=step):
            return statistics.fmean(_seconds(trainer, module, alone, lambda step: None))


def time_both(
    trainer: Any, module: pl.LightningModule, chunk: Chunk, loader: RoundLoader, defers: bool, compiles: bool = False
) -> tuple[float, float]:
    """Time a client's step alone and in a chunk; values, optimizer states and logs are restored.

    Args:
        trainer: The trainer, with its optimizers set up.
        module: Its module.
        chunk: The clients.
        loader: Reads their batches.
        defers: Whether a projected optimizer may defer its steps while clients step together.
        compiles: Whether steps of clients together are compiled.

    Returns:
        Seconds of a client's step, with clients one after another and with clients together.

    Raises:
        MisconfigurationException: If the training step cannot be mapped over clients or leaves values that code outside
            of it may read, or the module holds an object that cannot be restored.
    """
    # Of a long chunk, as many clients are active in each part of the trial as in the same part of the chunk.
    steps = min(chunk.steps, _TRIED_STEPS)
    chunk = Chunk(chunk.clients, tuple(-(-batches * steps // chunk.steps) for batches in chunk.batches))
    with trial(trainer, loader, chunk, steps) as (together, alone):
        count = len(chunk.clients)
        # These steps are compiled for the trial only: the fit compiles again, with the method's objective.
        compiled = CompiledSteps(module, count, loader.batch_size, None, silent=True) if compiles else None
        guard = MappedStepGuard(module)
        stack = ClientStack(
            trainer, module, trained_tensors(module), count, None, guard, compiled=compiled, defers=defers
        )
        try:
            in_chunk = _seconds(
                trainer, module, together, lambda step: stack.narrow(chunk.active(step)), stack.gradients
            )
        finally:
            stack.close()
        for name in guard.left:
            readers = readers_after_steps(trainer, name.rpartition(".")[2])
            if readers:
                raise CannotMap(
                    f"it leaves clients' values in {name}, which {readers[0]}() may read (if it does not, ask for"
                    " execution='vectorized')"
                )
        one_by_one = _seconds(trainer, module, alone, lambda step: None)
    return statistics.fmean(one_by_one), sum(in_chunk) / sum(chunk.batches)


def _seconds(
    trainer: Any,
    module: pl.LightningModule,
    batches: Sequence[Any],
    before: Callable[[int], None],
    gradients: Callable[[Any, int], Any] = lambda *arguments: None,
) -> list[float]:
    """The seconds of the step of each batch, the faster of two runs."""
    times = [math.inf] * len(batches)
    device = trainer.strategy.root_device
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    # Each batch is run twice: the first run may include setup, such as the compilation of a step of fewer clients.
    for number, batch in [(number, batch) for number, batch in enumerate(batches) for _ in range(2)]:
        before(number)
        # Operations on a device are asynchronous.
        synchronize(device)
        begin = time.perf_counter()
        (optimizer,) = trainer.optimizers
        with trainer.precision_plugin.train_step_context():
            if gradients(batch, number) is None:
                output = module.training_step(batch, number) if takes_index else module.training_step(batch)
                optimizer.zero_grad()
                loss_of(output).backward()
        optimizer.step()
        synchronize(device)
        times[number] = min(times[number], time.perf_counter() - begin)
    return times
