"""Snapshots of a module and its optimizers, and trial training steps that leave no trace.

`choose_execution` times steps in trials, compares them, and measures their memory.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lightning_lowrank.federated.leaks import (
    ChangedTensors,
    as_code,
    frozen_parameters,
    reachable,
    refuse_frozen,
)
from lightning_lowrank.federated.randomness import restore_of_generator
from lightning_lowrank.internals.lightning import batch_transfer
from lightning_lowrank.internals.replaced import replaced


class Snapshot:
    """A snapshot of the tensors, containers and generators reachable from a module and its optimizers.

    Args:
        module: The module. Its frozen parameters, which may be as large as the device, are not copied: a trial and
            rounds refuse a step that changes them.
        optimizers: Its optimizers.
        dataset: A data set that is read meanwhile. Its tensors and arrays are not copied.

    Raises:
        MisconfigurationException: If there is an iterator or an open file, which cannot be restored.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer] = (), dataset: Dataset | None = None) -> None:
        self._frozen = {id(tensor) for tensor in frozen_parameters(module).values()}
        items = [each for root in (module, *optimizers) for each in reachable("self", root)]
        # The loop ends at an object without attributes, such as a list of samples.
        while hasattr(dataset, "__dict__"):
            around = reachable("dataset", vars(dataset), lambda item: isinstance(item, (Tensor, np.ndarray)))
            items += [each for each in around if not hasattr(type(each[1]), "__next__")]
            dataset = vars(dataset).get("dataset")
        found = [self._restore_of(name, item) for name, item in items]
        self._restores = [restore for restore in found if restore is not None]

    def _restore_of(self, name: str, item: Any) -> Callable[[], Any] | None:
        if isinstance(item, Tensor):
            return _restore_of_tensor(item, copied=id(item) not in self._frozen)
        if isinstance(item, np.ndarray):
            return None if isinstance(item, np.memmap) else functools.partial(np.copyto, item, item.copy())
        if isinstance(item, (dict, list, set, deque)):
            return functools.partial(_restore_container, item, item.copy())
        if hasattr(type(item), "__next__"):
            raise MisconfigurationException(
                f"{as_code(name)} is of {type(item).__name__}, which cannot be restored after a trial of the training"
                " step"
            )
        return restore_of_generator(item)

    def restore(self) -> None:
        """Restore the state of the snapshot."""
        for restore in self._restores:
            restore()


def _restore_of_tensor(tensor: Tensor, copied: bool) -> Callable[[], None]:
    data, required = tensor.data, tensor.requires_grad
    copy = data.clone() if copied else None

    def restore() -> None:
        if copy is not None and not torch.equal(data, copy):
            data.copy_(copy)
        is_moved = tensor.layout is torch.strided and tensor.data_ptr() != data.data_ptr()
        if is_moved or tensor.shape != data.shape:
            tensor.data = data
        if tensor.is_leaf:
            tensor.requires_grad_(required)

    return restore


def _restore_container(container: Any, before: Any) -> None:
    one, two = ([*each, *each.values()] if isinstance(each, dict) else each for each in (before, container))
    # Compared by identity: equal values may differ in type, such as 1 and True.
    if len(one) != len(two) or any(old is not new for old, new in zip(one, two, strict=True)):
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)


@contextmanager
def trial(
    trainer: Any, loader: Any, chunk: Any, steps: int, stacked: bool = True
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Read clients' first batches for trial steps, and undo all changes that these steps make.

    Args:
        trainer: The trainer, with its optimizers set up.
        loader: The `RoundLoader`.
        chunk: The clients.
        steps: Number of batches of each.
        stacked: Whether batches together are needed. The user's hooks that move batches may not accept them.

    Yields:
        The clients' batches together step by step, and their first ones alone; see `RoundLoader.read`.

    Raises:
        MisconfigurationException: If an object cannot be restored, or a step changes a frozen parameter.
    """
    frozen = frozen_parameters(trainer.lightning_module)
    guard = ChangedTensors(frozen, frozen)
    snapshot = Snapshot(trainer.lightning_module, trainer.optimizers, loader.batches)
    silent = replaced(trainer, loggers=[DummyLogger() for _ in trainer.loggers])
    unlogged = replaced(trainer.lightning_module, log=lambda *arguments, **keywords: None)
    try:
        with silent, unlogged:
            together, alone = loader.read(chunk, 0, steps)
            transfer = batch_transfer(trainer)
            yield [transfer(batch) for batch in (together if stacked else [])], [transfer(batch) for batch in alone]
    finally:
        snapshot.restore()
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        refuse_frozen(guard.changed())
