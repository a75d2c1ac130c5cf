"""Which execution a fit takes: how many clients may step together, and which way is faster."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from rich.console import Console

from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.loader import RoundLoader
from lightning_lowrank.federated.data.planner import Chunk
from lightning_lowrank.federated.data.rounds import RoundData
from lightning_lowrank.federated.execution.base import Execution
from lightning_lowrank.federated.execution.causes import cause_of, steps_are_seen, unsupported_reason
from lightning_lowrank.federated.execution.distributed import ClientParallelStrategy
from lightning_lowrank.federated.execution.graphs import WORTH_COMPILING, StepGraphs, steps_left
from lightning_lowrank.federated.execution.memory import chunk_size_that_fits
from lightning_lowrank.federated.execution.sequential import Sequential
from lightning_lowrank.federated.execution.stack import ClientStack
from lightning_lowrank.federated.execution.traces import hooks_around_steps, trial
from lightning_lowrank.federated.execution.vectorized import Vectorized
from lightning_lowrank.federated.objective import loss_of
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.internals import tracing
from lightning_lowrank.internals.torch import synchronize

_KINDS: dict[str, type[Execution]] = {kind.name: kind for kind in (Sequential, Vectorized)}
_TRIED_STEPS = 5


def choose_execution(
    trainer: Any,
    coordinator: Coordinator,
    data: RoundData,
    processes: ClientParallelStrategy | None,
    restored: Mapping[str, Any] | None,
    previous: Execution | None,
) -> Execution:
    """Return the execution that the settings ask for, and have batches read as it needs them.

    Args:
        trainer: The trainer, with its optimizers set up.
        coordinator: The server's half.
        data: The divided training set.
        processes: Connects the processes that share rounds, if there are several.
        restored: The loop's state in the checkpoint that the fit is resumed from, if any.
        previous: The execution of the fit that this one goes on from, if any.
    """
    # It tries a step, and `auto` asks for it as well.
    fitting = functools.cache(lambda: chunk_size_that_fits(trainer, data))
    wanted: str = coordinator.settings.execution
    reason = "" if wanted == "sequential" else unsupported_reason(trainer, trainer.lightning_module)
    if wanted == "vectorized" and reason:
        raise MisconfigurationException(
            f"execution='vectorized' is not possible: {reason}. Use execution='sequential'."
        )
    if wanted == "auto" and restored is not None:
        wanted = restored["execution"]
    elif wanted == "auto" and isinstance(previous, Vectorized):
        wanted = previous.name
    elif wanted == "auto":
        around = hooks_around_steps(trainer.lightning_module)
        if around and not reason:
            name = type(trainer.lightning_module).__name__
            reason = (
                f"{name}.{around[0]}() would see the global model (if that will do, ask for execution='vectorized')"
            )
        faster = not reason
        if faster:
            size = coordinator.settings.chunk_size or fitting()
            defers = not steps_are_seen(trainer, coordinator.algorithm)
            compiles = _compiles(trainer, data, coordinator.settings.compile, restored, previous)
            faster, reason = _vectorized_is_faster(trainer, data, size, defers, compiles)
        if processes is not None:
            faster, reason = processes.broadcast((faster, reason))
        wanted = Vectorized.name if faster else Sequential.name
        if trainer.is_global_zero:
            way = "clients step together" if faster else "clients train one after another"
            Console().print(f"execution='auto': {way}; {reason}", highlight=False, soft_wrap=True)
    kind = _KINDS[wanted]
    size = 1
    if kind.stacked:
        known = data.chunk_size if data.chunk_size > 1 else 0 if restored is None else restored["chunk_size"]
        size = coordinator.settings.chunk_size or known
        if not size:
            size = fitting() if processes is None else min(processes.gather(fitting()))
    data.use(kind.stacked, size)
    execution = kind(trainer, coordinator)
    if kind.stacked:
        execution.compiled = _compiles(trainer, data, coordinator.settings.compile, restored, previous)
    return execution


def _compiles(
    trainer: Any, data: RoundData, wanted: bool | str, restored: Mapping[str, Any] | None, previous: Execution | None
) -> bool:
    """Return whether steps are compiled.

    Raises:
        MisconfigurationException: If they are to be, and cannot.
    """
    if not wanted:
        return False
    reason = tracing.can_compile(trainer.strategy.root_device)
    if reason and wanted != "auto":
        raise MisconfigurationException(f"compile=True is not possible: {reason}. Use compile='auto' or False.")
    if wanted != "auto" or reason:
        return not reason
    if restored is not None:
        return bool(restored["compiled"])
    if previous is not None:
        return previous.compiled
    return steps_left(trainer, data.planner.plan(trainer.current_epoch).trained) >= WORTH_COMPILING


def _vectorized_is_faster(trainer: Any, data: RoundData, size: int, defers: bool, compiles: bool) -> tuple[bool, str]:
    """Return whether clients are faster together, by some steps of the first round that leave no trace, and why."""
    module = trainer.lightning_module
    loader = data.loader
    plan = dataclasses.replace(data.planner, chunk_size=max(2, size), process=0, processes=1).plan(0)
    data.randomness.open()
    try:
        seconds = time_both(trainer, module, plan.chunks[0], loader, defers)
        if compiles and seconds[1] >= seconds[0]:
            # Compiling takes long, and is tried only where it may turn the scale.
            seconds = time_both(trainer, module, plan.chunks[0], loader, defers, compiles)
    except MisconfigurationException as error:
        return False, str(error)
    except Exception as error:
        # Whatever the trial meets, clients can train one after another, or meet it again there.
        return False, f"the trial ended with {cause_of(error)}"
    finally:
        data.randomness.release()
    milliseconds = [f"{1000 * value:.3g} ms" for value in seconds]
    return seconds[1] < seconds[0], f"a client's step takes {milliseconds[0]} alone and {milliseconds[1]} together"


def time_both(
    trainer: Any, module: pl.LightningModule, chunk: Chunk, loader: RoundLoader, defers: bool, compiles: bool = False
) -> tuple[float, float]:
    """Time a client's step alone and in a chunk; values, optimizer states and logs are as they were afterwards.

    Args:
        trainer: The trainer, with its optimizers set up.
        module: Its module.
        chunk: The clients.
        loader: Reads their batches.
        defers: Whether a projected optimizer may defer its steps while clients step together.
        compiles: Whether steps of clients together are compiled.

    Returns:
        Seconds of a client's step: where clients train one after another, and where they step together.

    Raises:
        MisconfigurationException: If the training step cannot be mapped over clients, or the module holds what cannot
            be put back.
    """
    with trial(trainer, loader, chunk, _TRIED_STEPS) as (together, alone):
        left = steps_left(trainer, chunk.steps)
        # The graphs of the fit itself are traced again, where more is known of its steps.
        graphs = StepGraphs(module, (), lambda: left)
        graphs.begin_round(compiles)
        stack = ClientStack(trainer, module, trained_tensors(module), len(chunk.clients), graphs=graphs, defers=defers)
        try:
            in_chunk = _seconds(
                trainer, module, together, lambda step: stack.narrow(chunk.active(step)), stack.gradients
            )
        finally:
            stack.close()
        one_by_one = _seconds(trainer, module, alone, lambda step: None)
    clients = [chunk.active(step) for step in range(len(in_chunk))]
    return statistics.median(one_by_one), min(seconds / count for seconds, count in zip(in_chunk, clients, strict=True))


def _seconds(
    trainer: Any,
    module: pl.LightningModule,
    batches: Sequence[Any],
    before: Callable[[int], None],
    gradients: Callable[[Any, int], Any] = lambda *arguments: None,
) -> list[float]:
    times = []
    device = trainer.strategy.root_device
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    # The first batch is run twice, for whatever is set up at first use.
    for index, batch in enumerate([batches[0], *batches]):
        number = max(0, index - 1)
        before(number)
        # A device only takes note of what it is asked for.
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
        times.append(time.perf_counter() - begin)
    return times[1:]
