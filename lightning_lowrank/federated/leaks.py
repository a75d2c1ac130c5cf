"""Leaks between clients: values that a client's steps leave in the live module or optimizers without sending them.

`Rounds` calls `Isolation` at a client's ends, so that clients that train one after another start alike. The executions
share its walk over reachable objects and its comparison of tensors.
"""

from __future__ import annotations

import enum
import functools
import math
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from lightning_lowrank.arguments import join_names
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.internals.peft import is_base_change
from lightning_lowrank.internals.torch import (
    is_persistent,
    is_transformed,
    memory_fingerprint,
    own_buffers,
    quantised_to_4_bits,
)
from lightning_lowrank.layers.layer import caches

_MANY = 10_000
"""Largest number of entries with which a container is looked into."""
_FOREIGN = (
    *(type, types.ModuleType, enum.Enum, str, bytes, int, float, complex, type(None)),
    *(pl.Trainer, pl.Callback, pl.LightningDataModule, Logger, Dataset, DataLoader),
    # Such as the strategy in what self.optimizers() returns.
    *weakref.ProxyTypes,
)
_IS_FOREIGN: MutableMapping[type, bool] = weakref.WeakKeyDictionary()
"""Answers of `is_foreign`. A class of a fit refers to its trainer, which a strong key would keep."""
_LIBRARIES = ("builtins.", "torch.", "torchmetrics.", "lightning.", "pytorch_lightning.", "lightning_lowrank.")
_CONTAINERS = (list, dict, set, deque)
_CONTAINERS_OF: MutableMapping[type, list[str]] = weakref.WeakKeyDictionary()
"""Names that `containers_of_class` has found."""
_PROGRAMS = ("argparse.", "jsonargparse.", "logging.", "lightning.pytorch.cli.")
_TABLES = ("_modules.", "_parameters.", "_buffers.")
_PLAIN = (int, float, str)
_PART = 2**14
_COMPARED_AT_MOST = 2**24
_WATCHED_CLIENTS = 2
"""A value that a step stores once, such as a size, is new in the first client alone."""


# Walk over reachable objects


class OfTheRun:
    """Base of classes whose objects belong to the run rather than to the user's module."""


def walk(
    name: str,
    root: Any,
    is_left_out: Callable[[Any], bool] = lambda item: False,
    is_whole: Callable[[Any], bool] = lambda item: False,
) -> Iterator[tuple[str, Any]]:
    """Iterate over an object and all objects reachable from it, each once, with names.

    Attributes, entries of containers, and the objects to which functions and methods are bound can be reached.

    Args:
        name: The root's name.
        root: Where to begin.
        is_left_out: Whether an object is neither yielded nor looked into.
        is_whole: Whether an object is yielded and not looked into.
    """
    seen: dict[int, Any] = {}
    queue: list[tuple[str, Any]] = [(name, root)]
    while queue:
        name, item = queue.pop()
        if id(item) in seen or is_left_out(item):
            continue
        seen[id(item)] = item
        yield name, item
        if not is_whole(item):
            queue += _contents(name, item)


def _contents(name: str, item: Any) -> list[tuple[str, Any]]:
    """The objects directly inside an object, with names."""
    if isinstance(item, (Tensor, np.ndarray)):
        return []
    if isinstance(item, types.MethodType):
        return [(name, item.__self__)]
    if isinstance(item, functools.partial):
        return [(name, each) for each in (item.func, item.args, item.keywords)]
    if isinstance(item, types.FunctionType):
        return [(name, each) for each in (*map(_content, item.__closure__ or ()), item.__defaults__)]
    inside: list[tuple[str, Any]] = []
    if isinstance(item, (dict, list, tuple, set, frozenset, deque)) and len(item) <= _MANY:
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        # Not the tensor itself as part of the name, because its text lists its numbers.
        inside += [(f"{name}.{n if isinstance(key, Tensor) else key}", value) for n, (key, value) in enumerate(pairs)]
    if hasattr(item, "__dict__"):
        inside.append((name, vars(item)))
    if isinstance(item, nn.Module):
        inside += [(f"{name}.{key}", value) for key, value in containers_of_class(item).items()]
    return inside


def is_of_library(definition: Any) -> bool:
    """Whether a class or function is Python's own, of torch or Lightning, or of this package."""
    return f"{definition.__module__}.".startswith(_LIBRARIES)


def containers_of_class(module: nn.Module) -> dict[str, Any]:
    """The containers that a user's class has as its own attributes, such as ``outputs = []``, by name."""
    kind = type(module)
    names = _CONTAINERS_OF.get(kind)
    if names is None:
        pairs = (pair for each in kind.__mro__ if not is_of_library(each) for pair in vars(each).items())
        names = [name for name, value in pairs if isinstance(value, _CONTAINERS) and not name.startswith("__")]
        _CONTAINERS_OF[kind] = names
    return {name: getattr(kind, name) for name in names}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The cell is empty while its function is still being defined.
        return None


def reachable(
    name: str, root: Any, is_left_out: Callable[[Any], bool] = lambda item: False
) -> Iterator[tuple[str, Any]]:
    """`walk` within the user's module, without trainers, callbacks, loggers, datasets, and the run's own objects."""
    return walk(name, root, lambda item: is_foreign(type(item)) or is_left_out(item))


def schedulers_of(trainer: Any) -> list[Any]:
    """Lightning's learning rate schedulers, and those of its optimizers that the module or a callback holds itself."""
    found = {id(config.scheduler): config.scheduler for config in trainer.lr_scheduler_configs}
    for part in (*trainer.lightning_module.modules(), *trainer.callbacks):
        for value in vars(part).values():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            for each in (value, *(inside if len(inside) <= _MANY else ())):
                if isinstance(each, LRScheduler) and any(each.optimizer is own for own in trainer.optimizers):
                    found[id(each)] = each
    return list(found.values())


def set_for_clients(trainer: Any) -> list[Any]:
    """The objects that the loop sets at each client's start: tensors of the module, optimizers and schedulers."""
    module = trainer.lightning_module
    return [*module.parameters(), *module.buffers(), *trainer.optimizers, *schedulers_of(trainer)]


def is_foreign(kind: type) -> bool:
    """Whether objects of a class belong to a trainer, to data or to the run, and not to the user's module."""
    known = _IS_FOREIGN.get(kind)
    if known is None:
        # A Namespace is an exception, because a model may keep its settings in one.
        modules = (f"{base.__module__}." for base in kind.__mro__ if kind.__name__ != "Namespace")
        known = issubclass(kind, (*_FOREIGN, OfTheRun)) or any(each.startswith(_PROGRAMS) for each in modules)
        _IS_FOREIGN[kind] = known
    return known


def plain_entries(items: Iterable[tuple[str, Any]], kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Entries of `reachable` dictionaries (including attributes) whose values are instances of ``kinds``."""
    for name, item in items:
        if isinstance(item, dict):
            yield from ((f"{name}.{key}", value) for key, value in item.items() if isinstance(value, kinds))


def as_code(name: str) -> str:
    """A name as written in Python code, without torch's internal tables such as ``_parameters``."""
    return functools.reduce(lambda text, table: text.replace(table, ""), _TABLES, name)


# Comparison of tensors


class ChangedTensors:
    """Detects tensors that changed after the object was made.

    A version counter tells of writes in place. Copies of numbers also tell of writes through ``tensor.data``, and
    whether a write left the same numbers.

    Args:
        tensors: The tensors by name. Quantised ones of 4 bits or of a class of their own, which no step writes to, are
            left out.
        compared: Names of the tensors whose numbers are compared. Of more than 16.8 million numbers in ``tensors``,
            about so many are, in evenly spaced parts of each tensor: a moving average writes whole tensors.

    Attributes:
        rewritten: Names of tensors that were written with the same numbers, as by a parametrization put on and off.
    """

    def __init__(self, tensors: Mapping[str, Tensor], compared: Collection[str] = ()) -> None:
        plain = {name: each for name, each in tensors.items() if type(each.data) is Tensor}
        plain = {name: each for name, each in plain.items() if not quantised_to_4_bits(each)}
        self._given, self._tensors = dict(tensors), plain
        self._versions = {name: memory_fingerprint(value) for name, value in plain.items()}
        self._every = max(1, math.ceil(sum(value.numel() for value in plain.values()) / _COMPARED_AT_MOST))
        self._numbers = {name: self._numbers_of(value) for name, value in plain.items() if name in compared}
        self.rewritten: set[str] = set()

    def _numbers_of(self, tensor: Tensor) -> Tensor:
        """A sample of a tensor's numbers: every n-th piece, concatenated."""
        return torch.cat(tensor.detach().flatten().split(_PART)[:: self._every])

    def changed(self, present: Mapping[str, Tensor] | None = None) -> list[str]:
        """Names of changed tensors; with ``present`` tensors given, new and replaced ones are included."""
        changed = []
        for name, value in self._tensors.items():
            is_changed = is_written = memory_fingerprint(value) != self._versions[name]
            before = self._numbers.get(name)
            # Equal samples do not prove that a write left all numbers the same.
            if before is not None and (self._every == 1 or not is_written):
                is_changed = not torch.equal(self._numbers_of(value), before)
            if is_changed:
                changed.append(name)
            elif is_written:
                self.rewritten.add(name)
        if present is not None:
            changed += [n for n, each in present.items() if each is not self._given.get(n) and n not in changed]
        return changed


def frozen_parameters(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters, by name, that no client sends."""
    sent = {id(value) for value in trained_tensors(module).values()}
    return {name: value for name, value in module.named_parameters() if id(value) not in sent}


def refuse_frozen(changed: Sequence[str]) -> None:
    """Raise if a training step has changed frozen parameters."""
    if changed:
        raise MisconfigurationException(
            f"training changes {len(changed)} frozen parameters, as an exponential moving average does:"
            f" {join_names(changed)}. A client would start from the previous client's values. Set"
            " FederatedLoop(ema_parameters=[...]) with patterns of their names, such as"
            f" {changed[0].split('.')[0] + '*'!r}, so that they are sent and averaged like buffers."
        )


def refuse_resized(name: str, before: Sequence[int], now: Sequence[int] | None) -> NoReturn:
    """Raise because training steps have changed the shape of a buffer, or set it to None."""
    raise MisconfigurationException(
        f"training changes the buffer {name} from {list(before)} to {None if now is None else list(now)}, and clients"
        " are averaged: keep its shape, or register it with persistent=False. If its first step sizes it, as that of a"
        " quantisation observer does, call module(example) once before the fit."
    )


# Clients that train one after another


class TrainedFlags:
    """The parameters' ``requires_grad`` as a round begins, which decides what is sent.

    Each client begins with it, whatever the steps of another one have set.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._flags = [(name, value, value.requires_grad) for name, value in module.named_parameters()]
        self._frozen = [(name, value) for name, value, flag in self._flags if not flag]

    def changed(self) -> dict[str, Tensor]:
        """The parameters whose ``requires_grad`` differs from the round's, by name."""
        return {name: value for name, value, flag in self._flags if value.requires_grad != flag}

    def thawed(self) -> dict[str, Tensor]:
        """The parameters among these that were frozen, by name."""
        # Called in each step, where most models have nothing frozen.
        return {name: value for name, value in self._frozen if value.requires_grad}

    def restore(self) -> None:
        """Set ``requires_grad`` of all parameters as the round began."""
        for value in self.changed().values():
            value.requires_grad_(not value.requires_grad)


class Isolation:
    """Keeps the changes that one client's steps make to the module away from the next client.

    - Buffers outside of the state dict get their values at the start of the round back.
    - Buffers of the state dict that get their first value in a step of the first two clients are refused. Others count
      as attributes.
    - A buffer that is replaced by assignment is filled in place instead, so that sending and loading reach it.
    - Frozen parameters that change are refused, unless ``FederatedLoop(ema_parameters=...)`` has them averaged.
    - Attributes that the first two clients change are `suspects`, which may reach later clients.
    - Gradients that a module left in manual optimization are dropped.

    Args:
        trainer: The trainer, with its optimizers set up.
        stacked: Whether clients step together. Their steps reach neither buffers nor attributes of the module, but
            attributes of the optimizers.

    Attributes:
        suspects: Names of the module's attributes that clients have changed.
        shadows: The names among them of tensors that have a trained parameter's shape, as moving averages do.
        watched: Number of clients that have ended of those whose attributes are compared.
    """

    def __init__(self, trainer: Any, stacked: bool) -> None:
        self._trainer, self._stacked = trainer, stacked
        self._module: pl.LightningModule = trainer.lightning_module
        self._sent: list[_Buffer] = []
        self._not_sent: list[tuple[_Buffer, Tensor]] = []
        self._rewritten: set[str] = set()
        self._named: set[str] = set()
        self.suspects: list[str] = []
        self.shadows: list[str] = []
        self.watched = 0
        self._to_watch = _WATCHED_CLIENTS

    def begin_round(self) -> None:
        """Look up the frozen parameters and the buffers, which hooks before the round may have registered or set."""
        self._frozen = frozen_parameters(self._module)
        sent = {id(value) for value in trained_tensors(self._module).values()}
        buffers = list(_buffers(self._module))
        self._sent = [] if self._stacked else [each for each in buffers if id(each.tensor) in sent]
        self._not_sent = [(each, each.tensor.detach().clone()) for each in buffers if id(each.tensor) not in sent]

    def begin_client(self) -> None:
        """Restore shared state before a client's first step, and start watching for changes."""
        self.put_back()
        self.abandon_client()
        if not self._module.automatic_optimization:
            self._module.zero_grad()
        is_first = self._to_watch == _WATCHED_CLIENTS
        self._guard = ChangedTensors(self._frozen, self._frozen if is_first else self._rewritten)
        self._attributes = _Attributes(self._trainer, self._stacked) if self._to_watch else None
        self._had = {each.name for each in _buffers(self._module)} if self._to_watch else set()

    def end_client(self) -> None:
        """Copy assigned buffers in place, and refuse or record the client's other changes."""
        for buffer in self._sent:
            buffer.fill()
        refuse_frozen(self._guard.changed())
        self._rewritten |= self._guard.rewritten
        if self._attributes is not None:
            names = [*self._attributes.changed(), *([] if self._stacked else self._new_buffers())]
            names = [each for each in names if each not in self._named]
            self._named.update(names)
            if names and self._stacked:
                rank_zero_warn(
                    f"steps change attributes of an optimizer outside of its state: {join_names(names)}. Their values"
                    " pass"
                    " from"
                    " one client to the next, whatever optimizer_state is: keep them in the optimizer's state or"
                    " param_groups."
                )
            self.suspects += names
            # One number of that shape is rather a mean loss.
            shapes = {each.shape for each in self._module.parameters() if each.requires_grad and each.numel() > 1}
            self.shadows += [name for name, shape in self._attributes.averages() if shape in shapes]
            self._to_watch -= 1
            self.watched += 1

    def abandon_client(self) -> None:
        """Give the module its buffers of the state dict back, which a failed client may have replaced or resized."""
        for buffer in self._sent:
            buffer.put_back()

    def _new_buffers(self) -> list[str]:
        """Names of the buffers outside of the state dict that got their first value in a client's steps.

        Raises:
            MisconfigurationException: If the steps have given a buffer of the state dict its first value.
        """
        new = [each for each in _buffers(self._module) if each.name not in self._had]
        saved = [each.name for each in new if each.persistent]
        if saved:
            raise MisconfigurationException(
                f"training gives the module's buffers {join_names(saved)} their first value, and clients are averaged:"
                " register each in __init__ with a tensor of its shape, or with persistent=False."
            )
        return [each.name for each in new]

    @property
    def is_over(self) -> bool:
        """Whether enough clients have been watched, so that attributes are compared no longer."""
        return self._to_watch == 0

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the values at the start of the round of buffers outside of the state dict."""
        for buffer, value in self._not_sent:
            if not buffer.is_in_place or memory_fingerprint(buffer.tensor) != buffer.version:
                buffer.put_back()
                buffer.tensor.copy_(value)
                buffer.version = memory_fingerprint(buffer.tensor)


@dataclass
class _Buffer:
    """A buffer with its shape and version counter, and the table in which its module keeps it."""

    name: str
    table: MutableMapping[str, Any]
    key: str
    tensor: Tensor
    shape: torch.Size
    version: tuple[int, int]
    persistent: bool

    @property
    def is_in_place(self) -> bool:
        """Whether the module has the original tensor, in its original shape."""
        return self.table.get(self.key) is self.tensor and self.tensor.shape == self.shape

    def put_back(self) -> None:
        """Give the module the original tensor back; if a step has resized it, with undefined numbers."""
        self.table[self.key] = self.tensor
        if self.tensor.shape != self.shape:
            self.tensor.data = self.tensor.data.new_empty(self.shape)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy a tensor that a step assigned into the original buffer, and refuse another shape."""
        if self.is_in_place:
            return
        assigned = self.table.get(self.key)
        shape = assigned.shape if isinstance(assigned, Tensor) else None
        self.put_back()
        if assigned is None or shape != self.shape:
            refuse_resized(self.name, self.shape, shape)
        self.tensor.copy_(assigned)


def _buffers(module: nn.Module) -> Iterator[_Buffer]:
    """A module's buffers, except those of metrics and changes of quantised base weights."""
    metrics = tuple(name + "." for name, part in module.named_modules() if isinstance(part, Metric))
    for prefix, part in module.named_modules():
        table = own_buffers(part)
        for key, tensor in table.items():
            if tensor is not None and not is_base_change(key) and not f"{prefix}.".startswith(metrics):
                name, version = f"{prefix}.{key}".lstrip("."), memory_fingerprint(tensor)
                yield _Buffer(name, table, key, tensor, tensor.shape, version, is_persistent(part, key))


class _Attributes:
    """A snapshot of numbers, strings, containers and tensors in attributes of a module or optimizers, for comparison.

    NumPy's arrays are compared by identity. Left out are metrics, which are totals of an epoch, attributes of
    Lightning's own, and tensors with a graph, which are of one step. Optimizers count only if clients step together:
    `ClientOptimizers` puts them back for a client alone.
    """

    def __init__(self, trainer: Any, of_optimizers: bool) -> None:
        self._trainer, self._of_optimizers = trainer, of_optimizers
        self._values = self._present()
        tensors = {name: value for (name, kind), value in self._values.items() if kind is Tensor}
        self._tensors = ChangedTensors(tensors, tensors)

    def changed(self) -> list[str]:
        """Names of changed attributes, and of the module's that exist in one of both snapshots."""
        present, rewritten = self._present(), set(self._tensors.changed())
        common = ((key, value) for key, value in self._values.items() if key in present)
        found = {key[0] for key, before in common if _differs(before, present[key], key[0] in rewritten)}
        if not self._of_optimizers:
            # Schedulers add attributes to optimizers.
            found |= {name for name, _ in self._values.keys() ^ present.keys()}
        # Report the container rather than its entries.
        outer = (name for name in found if not any(name.startswith(f"{other}.") for other in found))
        return [as_code(name).split(".", 1)[1] for name in sorted(outer)]

    def averages(self) -> Iterator[tuple[str, torch.Size]]:
        """Names and shapes of floating-point tensors that were changed in place, or replaced by others of the shape."""
        rewritten, present = {*self._tensors.changed()}, self._present()
        tensors: dict[str, Any] = {name: value for (name, kind), value in self._values.items() if kind is Tensor}
        for name, value in sorted(tensors.items()):
            now = present.get((name, Tensor))
            same = isinstance(now, Tensor) and now.shape == value.shape and value.is_floating_point()
            if same and _differs(value, now, name in rewritten):
                yield as_code(name).split(".", 1)[1], value.shape

    def _present(self) -> dict[tuple[str, type], Any]:
        """The present values of all watched attributes, by name and kind."""
        trainer, module = self._trainer, self._trainer.lightning_module
        # Left out: schedulers and these optimizers, whose state is set at each client's start, and caches.
        apart = {id(each) for each in (*set_for_clients(trainer), *caches(module))}
        totals = (Metric, MetricCollection, Optimizer)
        items = list(reachable("root", self._root(), lambda item: id(item) in apart or isinstance(item, totals)))
        values: dict[tuple[str, type], Any] = {(name, object): each for name, each in plain_entries(items, _PLAIN)}
        for name, optimizer in plain_entries(items, (Optimizer,)):
            if id(optimizer) not in apart and not isinstance(optimizer, LightningOptimizer):
                values[f"{name}.state", object] = len(optimizer.state)
        for name, item in items:
            if isinstance(item, (list, tuple, set, deque)):
                values[name, list] = [each for each in item if getattr(each, "grad_fn", None) is None]
            elif isinstance(item, (np.ndarray, np.generic)):
                values[name, np.ndarray] = item
            # A tensor that a failed mapped step left has no values outside of vmap.
            elif type(item) in (Tensor, nn.Parameter) and not is_transformed(item):
                values |= {(name, Tensor): item} if item.layout is torch.strided and item.grad_fn is None else {}
        return values

    def _root(self) -> dict[str, Any]:
        def without(each: Any, names: Collection[str]) -> dict[str, Any]:
            return {name: value for name, value in vars(each).items() if name not in names}

        if not self._of_optimizers:
            module = self._trainer.lightning_module
            return {**containers_of_class(module), **without(module, names_of_lightning())}
        others = [
            each for each in self._trainer.optimizers if not type(each).__module__.startswith("lightning_lowrank.")
        ]
        return {type(each).__name__: without(each, ("state", "param_groups", "defaults")) for each in others}


@functools.cache
def names_of_lightning() -> frozenset[str]:
    """Names of the attributes that Lightning itself sets on each module."""
    return frozenset({*vars(pl.LightningModule()), *dir(pl.LightningModule)} - {"_modules"})


def _differs(before: Any, now: Any, is_written: bool) -> bool:
    if isinstance(before, list):
        pairs = zip(before, now, strict=False)
        same = (one is two or (isinstance(one, _PLAIN) and one == two) for one, two in pairs)
        return len(before) != len(now) or not all(same)
    if isinstance(before, (np.ndarray, np.generic)):
        return now is not before
    if not isinstance(before, Tensor):
        return type(before) is not type(now) or before != now
    if now is before:
        return is_written
    alike = (before.shape, before.dtype, before.device) == (now.shape, now.dtype, now.device)
    return not (alike and torch.equal(before, now))
