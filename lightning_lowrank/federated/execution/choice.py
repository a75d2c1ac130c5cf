"""Which execution a fit takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.rounds import RoundData
from lightning_lowrank.federated.execution.base import Execution
from lightning_lowrank.federated.execution.distributed import ClientParallelStrategy
from lightning_lowrank.federated.execution.sequential import Sequential
from lightning_lowrank.federated.execution.stack import unsupported_reason
from lightning_lowrank.federated.execution.trial import chunk_size_that_fits, time_both
from lightning_lowrank.federated.execution.vectorized import Vectorized

_KINDS: dict[str, type[Execution]] = {kind.name: kind for kind in (Sequential, Vectorized)}


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

    Raises:
        MisconfigurationException: If clients are to step together and cannot.
    """
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
        faster = not reason
        if faster:
            faster, reason = _vectorized_is_faster(trainer, coordinator, data)
        if processes is not None:
            faster, reason = processes.broadcast((faster, reason))
        wanted = Vectorized.name if faster else Sequential.name
        if trainer.is_global_zero:
            way = "clients step together" if faster else "clients train one after another"
            Console().print(f"execution='auto': {way}; {reason}", highlight=False, soft_wrap=True)
    kind = _KINDS[wanted]
    size = 1
    if kind.stacked:
        fitting = chunk_size_that_fits(trainer.lightning_module, trainer.strategy.root_device)
        fitting = min([fitting] if processes is None else processes.gather(fitting))
        known = data.chunk_size if data.chunk_size > 1 else 0 if restored is None else restored["chunk_size"]
        size = coordinator.settings.chunk_size or known or fitting
    data.use(kind.stacked, size)
    return kind(trainer, coordinator)


def _vectorized_is_faster(trainer: Any, coordinator: Coordinator, data: RoundData) -> tuple[bool, str]:
    """Return whether clients are faster together, by some steps of the first round that leave no trace, and why."""
    module = trainer.lightning_module
    size = coordinator.settings.chunk_size or chunk_size_that_fits(module, trainer.strategy.root_device)
    loader = data.loader
    plan = dataclasses.replace(data.planner, chunk_size=max(2, size), process=0, processes=1).plan(0)
    data.randomness.open()
    try:
        seconds = time_both(trainer, module, plan.chunks[0], loader)
    except MisconfigurationException as error:
        return False, str(error)
    finally:
        data.randomness.release()
    milliseconds = [f"{1000 * value:.3g} ms" for value in seconds]
    return seconds[1] < seconds[0], f"a client's step takes {milliseconds[0]} alone and {milliseconds[1]} together"
