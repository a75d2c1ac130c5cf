"""What a training step reads beside its tensors: attributes and numbers that its graph has taken as constants.

`StepGraphs` watches a step while it is traced. Before each replay `Reads.changed` tells whether the step would read the
same again.
"""

from __future__ import annotations

import enum
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_lowrank.federated.execution.traces import MANY, Untraced, held, is_of_the_program
from lightning_lowrank.internals.torch import own_buffers, own_children, own_parameters

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.device, torch.dtype, torch.Size, enum.Enum, range)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_OF_LIGHTNING = frozenset({"_trainer", "_fabric", "_current_fx_name", "log", "training_step", "__dict__", "__class__"})
# What `LowRankLayer` remembers of shapes that it has seen.
_MEMORIES = frozenset({"_contracted"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MISSING = object()
_GLOBALS = 200


class Untraceable(Exception):
    """A step does what its graph would not: the message says what."""


class Observed(int):
    """A number of the step that a graph has no place for. Whatever uses it raises `Untraceable`."""

    what = "the number of the step"

    def _refuse(self, *arguments: Any, **keywords: Any) -> Any:
        raise Untraceable(f"it uses {self.what}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _refuse
    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __float__ = _refuse
    __hash__ = __str__ = __repr__ = __format__ = __divmod__ = __rdivmod__ = __and__ = __rand__ = _refuse


class _ObservedTrainer(Untraced):
    """Stands for the trainer: plain values that are read of it are noted, anything else is refused."""

    _own: Any
    _note: Callable[[str, Any], None]

    def __init__(self, trainer: Any, note: Callable[[str, Any], None]) -> None:
        self.__dict__.update(_own=trainer, _note=note)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        if not isinstance(value, _PLAIN):
            raise Untraceable(f"it reads trainer.{name}")
        self._note(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        raise Untraceable(f"it sets trainer.{name}")


class Reads(Untraced):
    """Watches what a step reads.

    Args:
        module: The user's module.
        roots: Other objects whose attributes the step may read, such as the method.
    """

    def __init__(self, module: nn.Module, roots: Sequence[Any] = ()) -> None:
        self._module = module
        self._roots = roots
        self._read: dict[tuple[int, str], tuple[Any, str]] = {}
        self._of_trainer: dict[str, Any] = {}
        self._entries: list[tuple[Mapping[str, Any], str, Any, bool]] = []
        self._containers: list[tuple[Any, Any, str]] = []
        self.tensors: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is read inside.

        Raises:
            Untraceable: At the end, if a replay could not do what was done inside, or not notice that it would now do
                something else.
        """
        others = [part for part in self._module.modules() if type(part).__getattribute__ is not object.__getattribute__]
        if others:
            raise Untraceable(f"{type(others[0]).__name__} has a __getattribute__ of its own")
        generators = _states()
        attributes = vars(self._module)
        trainer = attributes.get("_trainer")
        before = {id(part): dict(vars(part)) for part in self._module.modules()}

        def noted(part: nn.Module, name: str) -> Any:
            self._read[id(part), name] = part, name
            return object.__getattribute__(part, name)

        nn.Module.__getattribute__ = noted  # type: ignore[method-assign, assignment]
        if trainer is not None:
            attributes["_trainer"] = _ObservedTrainer(trainer, self._of_trainer.__setitem__)
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            if trainer is not None:
                attributes["_trainer"] = trainer
        self._trainer = trainer
        if generators != _states():
            raise Untraceable("it draws from random or numpy")
        for part in self._module.modules():
            for name, value in vars(part).items():
                found = before.get(id(part), {}).get(name, _MISSING)
                if found is not value and isinstance(value, _PLAIN) and name not in _OF_LIGHTNING and found != value:
                    raise Untraceable(f"it sets {type(part).__name__}.{name}")
        for part, name in self._read.values():
            self._add_read(part, name)
        for root in self._roots:
            self._add(type(root).__name__, root)
        del self._read

    def _add_read(self, part: nn.Module, name: str) -> None:
        traced = isinstance(part, torch.fx.GraphModule)
        if traced or name in _OF_LIGHTNING or name in _MEMORIES or name == "trainer":
            return
        where = f"{type(part).__name__}.{name}"
        for table in (vars(part), own_parameters(part), own_buffers(part), own_children(part)):
            if name in table:
                if name in _HOOKS:
                    if table[name]:
                        raise Untraceable(f"{type(part).__name__} has hooks, which may do more than compute")
                    self._containers.append((table[name], {}, where))
                    return
                self._entry(table, name)
                self._add(where, table[name])
                return
        found = getattr(type(part), name, None)
        if isinstance(found, _PLAIN) and found is not None:
            self._entry(vars(next(kind for kind in type(part).__mro__ if name in vars(kind))), name)
        elif isinstance(found, types.FunctionType) and not _is_of_a_library(found):
            self._add(where, found)

    def _entry(self, table: Mapping[str, Any], name: str) -> None:
        value = table[name]
        self._entries.append((table, name, value, isinstance(value, _PLAIN)))

    def _add(self, name: str, root: Any) -> None:
        """Note what an object holds."""
        seen: set[int] = set()
        queue = [(name, root)]
        while queue:
            name, item = queue.pop()
            if id(item) in seen or isinstance(item, (*_PLAIN, type, types.ModuleType, nn.Module)):
                continue
            if is_of_the_program(item):
                continue
            seen.add(id(item))
            if isinstance(item, Tensor):
                self.tensors.add(id(item))
                continue
            if isinstance(item, (np.ndarray, np.random.Generator, np.random.RandomState, random.Random)):
                raise Untraceable(f"it can read {name}, a {type(item).__name__}")
            if isinstance(item, torch.Generator) or hasattr(type(item), "__next__"):
                raise Untraceable(f"it can draw from {name}, a {type(item).__name__}")
            if isinstance(item, (dict, list, set, deque)) and len(item) <= MANY:
                self._containers.append((item, item.copy(), name))
            if isinstance(item, types.FunctionType):
                if _is_of_a_library(item):
                    continue
                queue += self._globals(item)
            queue += held(name, item)

    def _globals(self, function: types.FunctionType) -> list[tuple[str, Any]]:
        """Note the plain globals that a function names, and return those that are functions and objects."""
        found = []
        for name in _names(function.__code__):
            if name not in function.__globals__ or len(self._entries) > 20 * _GLOBALS:
                continue
            value = function.__globals__[name]
            if isinstance(value, _PLAIN):
                self._entry(function.__globals__, name)
            elif isinstance(value, (types.FunctionType, dict, list, Tensor)):
                self._entry(function.__globals__, name)
                found.append((name, value))
        return found

    def changed(self) -> str:
        """Name something that the step would read otherwise now; an empty string if all is as it was."""
        for table, name, value, plain in self._entries:
            found = table.get(name, _MISSING)
            if found is not value and not (plain and type(found) is type(value) and found == value):
                return name
        for container, copy, name in self._containers:
            try:
                if container != copy:
                    return name
            except (RuntimeError, ValueError):
                # Tensors, for one, have no single answer.
                return name
        for name, value in self._of_trainer.items():
            if getattr(self._trainer, name) != value:
                return f"trainer.{name}"
        return ""


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_of_a_library(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "lightning", "torchmetrics", "lightning_lowrank")


def _states() -> tuple[Any, ...]:
    kind, keys, position, *_ = np.random.get_state()
    return random.getstate(), kind, bytes(keys), position  # type: ignore[arg-type]
