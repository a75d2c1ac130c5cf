"""What steps leave on a module: found, refused or put back.

A step of clients that step together may leave nothing of theirs behind, for it would be one value for all of them, and
a tensor inside `torch.func.vmap` means nothing outside. The trial that ``execution="auto"`` makes may leave nothing.
"""

from __future__ import annotations

import enum
import functools
import math
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_lowrank.arguments import listed
from lightning_lowrank.federated.execution.why_not import CannotMap, updates
from lightning_lowrank.federated.objects import walk
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.internals.lightning import batch_transfer
from lightning_lowrank.internals.torch import (
    TorchDispatchMode,
    has_float64,
    is_mapped,
    is_transformed,
    own_buffers,
    quantised_to_4_bits,
    writes,
    written,
)

_LEFT_ALONE = (
    *(type, types.ModuleType, enum.Enum, str, bytes, int, float, complex, type(None)),
    *(pl.Trainer, pl.Callback, pl.LightningDataModule, Logger, Dataset, DataLoader),
)
_OF_PROGRAMS = ("argparse.", "jsonargparse.", "logging.", "lightning.pytorch.cli.")
_DATA = (Tensor, np.ndarray)
_SUMMED_AT_ONCE = 2**14
_SUMMED_AT_MOST = 2**24
_TABLES = ("_modules.", "_parameters.", "_buffers.")


class Untraced:
    """A class whose objects are no part of what the user's module holds."""


def reachable(name: str, root: Any, is_left: Callable[[Any], bool] = lambda item: False) -> Iterator[tuple[str, Any]]:
    """Yield by name what an object holds: containers, tensors, and the tables of other objects' attributes.

    Trainers, callbacks and data sets are left alone, and so are the entries of containers with very many, and what
    ``is_left`` says.
    """
    return walk(name, root, _is_left_alone, is_left)


@functools.lru_cache(maxsize=2**12)
def _is_left_alone(kind: type) -> bool:
    return issubclass(kind, _LEFT_ALONE) or is_of_the_program(kind)


def is_of_the_program(kind: type) -> bool:
    """Return whether objects of a class are of this package's runs, or of the command line that has made the module."""
    if kind.__name__ == "Namespace":
        # A model's settings, as argparse and jsonargparse hand them over.
        return False
    modules = {f"{base.__module__}." for base in kind.__mro__}
    return issubclass(kind, Untraced) or any(each.startswith(_OF_PROGRAMS) for each in modules)


def as_code(name: str) -> str:
    """Return a name as code has it, without the tables of modules."""
    return functools.reduce(lambda text, table: text.replace(table, ""), _TABLES, name)


class Memory:
    """What objects hold, to be put back.

    Args:
        roots: The objects.
        dataset: A dataset that is read meanwhile. Its tensors and arrays are taken to stay as they are.
        tensors: Whether tensors are put back.
        frozen: Tensors that are taken to stay as they are, and not copied.

    Raises:
        MisconfigurationException: If a root holds an iterator or an open file, which cannot be put back.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        dataset: Dataset | None = None,
        tensors: bool = True,
        frozen: Collection[Tensor] = (),
    ) -> None:
        self._frozen = {id(tensor) for tensor in frozen}
        held = [each for root in roots for each in reachable("self", root)]
        while dataset is not None:
            around = [each for each in reachable("dataset", vars(dataset)) if not isinstance(each[1], _DATA)]
            held += [each for each in around if not hasattr(type(each[1]), "__next__")]
            dataset = vars(dataset).get("dataset")
        found = (self._back(name, item) for name, item in held if tensors or not isinstance(item, Tensor))
        self._restore = [back for back in found if back is not None]

    def _back(self, name: str, item: Any) -> Callable[[], None] | None:
        if isinstance(item, Tensor):
            return _tensor_back(item, copied=id(item) not in self._frozen)
        if isinstance(item, np.ndarray):
            return None if isinstance(item, np.memmap) else functools.partial(np.copyto, item, item.copy())
        if isinstance(item, (dict, list, set, deque)):
            return functools.partial(_container_back, item, item.copy())
        if isinstance(item, (torch.Generator, np.random.RandomState)):
            set_state: Callable[[Any], Any] = item.set_state
            return functools.partial(set_state, item.get_state())
        if isinstance(item, random.Random):
            return functools.partial(item.setstate, item.getstate())
        if isinstance(item, np.random.Generator):
            return functools.partial(setattr, item.bit_generator, "state", item.bit_generator.state)
        if hasattr(type(item), "__next__"):
            raise MisconfigurationException(
                f"{as_code(name)} is of {type(item).__name__}, which a trial of the training step could not put back"
            )
        return None

    def restore(self) -> None:
        """Put everything back."""
        for back in self._restore:
            back()


class Unwritten:
    """Tells whether tensors are still what they were, without copies of them.

    Args:
        tensors: Tensors by name.
        sums: Whether the first look also sees what is written through ``tensor.data``. Of more than 16.8
            million numbers it reads about so many, evenly spaced parts of each tensor: what writes there, such as a
            moving average, writes whole tensors, and a large base would take seconds.
        rewritten: Names of tensors that are known to be written with the values that they had, as by a parametrization
            that is put on and off; what was found of them so far is `rewritten`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], sums: bool = False, rewritten: Collection[str] = ()) -> None:
        self._tensors = tensors = {name: value for name, value in tensors.items() if not quantised_to_4_bits(value)}
        self._marks = {name: written(value) for name, value in tensors.items()}
        self._every = max(1, math.ceil(sum(value.numel() for value in tensors.values()) / _SUMMED_AT_MOST))
        summed = tensors if sums else {name: value for name, value in tensors.items() if name in rewritten}
        self._sums = {name: _sums(value, self._every) for name, value in summed.items()}
        # Sums of all numbers tell a tensor that was written from one that was written with what it held.
        self._known = dict(self._sums) if self._every == 1 else {}
        self.rewritten: set[str] = set()

    @property
    def has_sums(self) -> bool:
        """Whether the next `check` looks at sums."""
        return bool(self._sums)

    def changed(self) -> list[str]:
        """Return the names of the tensors that have been written."""
        sums, self._sums = self._sums, {}
        changed = []
        for name, value in self._tensors.items():
            mark = written(value)
            is_written = mark != self._marks[name]
            before = (self._known if is_written else sums).get(name)
            if is_written if before is None else not torch.equal(_sums(value, self._every), before):
                changed.append(name)
            elif is_written:
                self._marks[name] = mark
                self.rewritten.add(name)
        return changed

    def check(self) -> None:
        """Refuse what has been written.

        Raises:
            MisconfigurationException: If a tensor has changed.
        """
        changed = self.changed()
        if changed:
            raise MisconfigurationException(
                f"training changes {len(changed)} frozen parameters, as an exponential moving average does:"
                f" {listed(changed)}. A client would start from what the"
                " last one left. Set FederatedLoop(ema_parameters=[...]) with patterns of their names, such as"
                f" {changed[0].split('.')[0] + '*'!r}, so that they are sent and averaged like buffers."
            )


def _sums(tensor: Tensor, every: int) -> Tensor:
    """Return sums of parts of a tensor, which unlike `written` see what is written through ``tensor.data``.

    Where all parts are summed, each number counts by its place in its part, so that an exchange of two is seen too.
    """
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    if not has_float64(tensor.device.type):
        wide = tensor.dtype
    # A sum in another type makes a copy in that type. One such copy after another takes the same memory.
    parts = tensor.detach().flatten().split(_SUMMED_AT_ONCE)[::every]
    sums = torch.empty(len(parts), dtype=wide, device=tensor.device)
    for part, own in zip(parts, sums, strict=True):
        if every == 1:
            exact = torch.float64 if has_float64(part.device.type) else torch.float32
            part = part * torch.arange(1, len(part) + 1, dtype=exact, device=part.device)
        torch.sum(part, 0, dtype=wide, out=own)
    return sums


@contextmanager
def trial(
    trainer: Any, loader: Any, chunk: Any, steps: int, sums: bool = True, stacked: bool = True
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Read the first batches of clients to try steps on them, and put everything back that these change.

    Args:
        trainer: The trainer, with its optimizers set up.
        loader: The `RoundLoader`.
        chunk: The clients.
        steps: Number of batches of each.
        sums: As for `Unwritten`.
        stacked: Whether batches together are needed. The user's hooks that move batches may not accept them.

    Yields:
        The clients' batches together step by step, and their first ones alone; see `RoundLoader.read`.

    Raises:
        MisconfigurationException: If the module holds what cannot be put back, or a step changes a frozen parameter.
    """
    module, loggers = trainer.lightning_module, trainer.loggers
    sent = {id(value) for value in trained_tensors(module).values()}
    # A frozen model may be as large as the device. Rounds refuse a step that changes it.
    frozen = {name: value for name, value in module.named_parameters() if id(value) not in sent}
    unwritten = Unwritten(frozen, sums)
    memory = Memory([module, *trainer.optimizers], loader.batches, frozen=frozen.values())
    try:
        trainer.loggers = [DummyLogger() for _ in loggers]
        vars(module)["log"] = lambda *arguments, **keywords: None
        together, alone = loader.read(chunk, 0, steps)
        transfer = batch_transfer(trainer)
        yield [transfer(batch) for batch in (together if stacked else [])], [transfer(batch) for batch in alone]
    finally:
        trainer.loggers = loggers
        memory.restore()
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        unwritten.check()


def _tensor_back(tensor: Tensor, copied: bool) -> Callable[[], None]:
    data, required = tensor.data, tensor.requires_grad
    copy = data.clone() if copied else None

    def back() -> None:
        if copy is not None and not torch.equal(data, copy):
            data.copy_(copy)
        if tensor.layout is torch.strided and tensor.data_ptr() != data.data_ptr():
            tensor.data = data
        if tensor.is_leaf:
            tensor.requires_grad_(required)

    return back


def _container_back(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        same = len(container) == len(before) and all(
            key in container and container[key] is value for key, value in before.items()
        )
    else:
        same = len(container) == len(before) and all(one is two for one, two in zip(container, before, strict=True))
    if not same:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)


class Unmapped:
    """Takes the tensors of a mapped step that failed off a module: nothing could move or read them any more.

    Args:
        module: The module, before the step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = [(table, dict(table)) for table in map(own_buffers, module.modules())]

    def restore(self) -> None:
        """Put back the buffers that hold such a tensor, and reset the metrics."""
        for table, before in self._buffers:
            table.update({key: value for key, value in before.items() if _is_transformed(table.get(key))})
        for part in self._module.modules():
            if isinstance(part, Metric) and any(map(_is_transformed, vars(part).values())):
                part.reset()


def _is_transformed(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_transformed, value))
    return isinstance(value, Tensor) and is_transformed(value)


class Watch:
    """Looks what the first steps of clients that step together leave on their module.

    Refused are metrics that are updated, values that are appended, buffers that are not the module's state, and
    numbers that every step changes. Where a step leaves a value of its clients in an attribute, reading it after the
    step is refused.

    Args:
        module: The user's module, before the first step.
        silent: Whether nothing is said of batches that differ.

    Attributes:
        mapped: Whether steps can be mapped over clients, as far as has been seen.
        reads_of_each: Whether steps read what is no tensor and differs between clients.
        told_of_batches: Whether the user has been told of batches that cannot be stacked.
    """

    def __init__(self, module: nn.Module, silent: bool = False) -> None:
        self.silent, self.mapped, self.told_of_batches = silent, True, silent
        self.reads_of_each = False
        self._module = module
        self._steps, self._compared = 0, 0
        self._left: list[tuple[dict[str, Any], str, str]] = []
        self._updates = {id(item): item.update_count for _, item in self._metrics()}
        self._numbers = self._present_numbers()

    @property
    def settled(self) -> bool:
        """Whether as many steps have been made as are looked at."""
        return self._steps > 1

    def updated_metric(self) -> str:
        """Name a metric that steps have updated, if there is one."""
        updated = [pair for pair in self._metrics() if pair[1].update_count != self._updates.get(id(pair[1]), 0)]
        return "".join(f"{as_code(name)} ({type(metric).__name__})" for name, metric in updated[:1])

    def _metrics(self) -> list[tuple[str, Metric]]:
        return [(name, item) for name, item in reachable("self", self._module) if isinstance(item, Metric)]

    def before_step(self) -> None:
        """Look at the numbers anew, some of which the method may have set for this step."""
        self._numbers = self._present_numbers() if self._compared < 2 else {}

    def after_part(self) -> None:
        """Refuse what the steps of clients whose batches have one form have left, or would leave unseen.

        Raises:
            MisconfigurationException: If they change what all clients share.
        """
        if self._steps < 2:
            self._look()
        for table, key, name in self._left:
            if isinstance(table.get(key), Tensor) and is_mapped(table[key]):
                table[key] = _left(name)

    def after_step(self, mapped: bool = True) -> None:
        """Refuse numbers that each step changes.

        Args:
            mapped: Whether batches of several clients had one form, so that they were mapped.

        Raises:
            MisconfigurationException: If there is one.
        """
        if self._compared < 2:
            self._compare_numbers()
            self._compared += 1
        self._steps += mapped

    def _look(self) -> None:
        metric = self.updated_metric()
        if metric:
            raise CannotMap(updates(metric))
        for name, item in reachable("self", self._module):
            if isinstance(item, (list, set, deque)) and any(_is_of_clients(value) for value in item):
                raise CannotMap(
                    f"it leaves values of its clients in {as_code(name)}, where they mean nothing after the step; log"
                    " them, or clear it at the end of the step"
                )
            if isinstance(item, dict):
                found = [key for key, value in item.items() if _is_of_clients(value)]
                if found and name.endswith("._buffers"):
                    raise CannotMap(
                        f"it replaces the buffer {as_code(f'{name}.{found[0]}')}, which is not persistent and therefore"
                        " one for all clients; register it with persistent=True"
                    )
                self._left += [(item, key, as_code(f"{name}.{key}")) for key in found]

    def changed_number(self) -> str:
        """Say which number of the module has changed since `before_step`, or return an empty string."""
        numbers = self._present_numbers()
        changed = [name for name, value in numbers.items() if value != self._numbers.get(name, value)]
        self._numbers = numbers
        if not changed:
            return ""
        return (
            f"it changes the number {as_code(changed[0])}, which is one for all clients and would count their steps"
            " together"
        )

    def _compare_numbers(self) -> None:
        changed = self.changed_number()
        # What a step stores once, such as a size, changes in the first one at most.
        if changed and self._compared:
            raise CannotMap(changed)

    def _present_numbers(self) -> dict[str, float]:
        return {
            f"{name}.{key}": value
            for name, item in reachable("self", self._module)
            if isinstance(item, dict)
            for key, value in item.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }


def _is_of_clients(value: Any) -> bool:
    return isinstance(value, Tensor) and is_mapped(value)


class _Left(Tensor):
    """Stands in an attribute for what a step has left there."""

    place: str

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        values = [*arguments, *(keywords or {}).values()]
        values += [each for value in values if isinstance(value, (list, tuple)) for each in value]
        name = next((value.place for value in values if isinstance(value, _Left)), "an attribute")
        raise CannotMap(f"{name} is read after the step that has set it, and is one for all clients")


def _left(name: str) -> Tensor:
    tensor = torch.empty(0).as_subclass(_Left)
    tensor.place = name
    return tensor


@contextmanager
def without_writing(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Refuse a module's hook where it changes or replaces one of the module's tensors."""
    original, attributes = getattr(module, hook), vars(module)
    own = hook in attributes

    @functools.wraps(original)
    def guarded(*arguments: Any, **keywords: Any) -> Any:
        before = _storages(module)
        with _Writes() as writes:
            result = original(*arguments, **keywords)
        after = _storages(module)
        changed = [before[storage] for storage in writes.storages if storage in before]
        changed += [name for storage, name in after.items() if storage not in before]
        if changed:
            raise MisconfigurationException(
                f"execution='vectorized' is not possible: {type(module).__name__}.{hook}() changes {changed[0]} in the"
                " module, which holds the global model there, not a client's. Use execution='sequential'."
            )
        return result

    attributes[hook] = guarded
    try:
        yield
    finally:
        if own:
            attributes[hook] = original
        else:
            del attributes[hook]


def _storages(module: nn.Module) -> dict[int, str]:
    held = (*module.named_parameters(), *module.named_buffers())
    return {storage: name for name, value in held for storage in _storage(value)}


def _storage(value: Any) -> list[int]:
    """Return where a tensor lies, in a list that is empty for what lies nowhere."""
    lies = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0
    return [value.untyped_storage().data_ptr()] if lies else []


class _Writes(TorchDispatchMode):
    """Notes where operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if writes(function):
            targets = arguments[0] if isinstance(arguments[0], (list, tuple)) else arguments[:1]
            self.storages += [storage for each in targets for storage in _storage(each)]
        return function(*arguments, **(keywords or {}))
