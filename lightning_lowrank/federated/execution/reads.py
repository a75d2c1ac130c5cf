"""What a training step reads beside its tensors: attributes and numbers that its graph has taken as constants.

`StepGraphs` watches a step while it is traced. Before each replay `Reads.changed` tells whether the step would read the
same again.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import io
import operator
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.federated.execution.traces import Memory, Untraced, is_of_the_program, reachable
from lightning_lowrank.federated.objects import MANY, held
from lightning_lowrank.internals.torch import own_buffers, own_children, own_parameters
from lightning_lowrank.internals.tracing import Untraceable

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.device, torch.dtype, torch.Size, enum.Enum, range)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_OF_LIGHTNING = frozenset({"_trainer", "_fabric", "_current_fx_name", "log", "training_step", "__dict__", "__class__"})
# What `LowRankLayer` remembers of shapes that it has seen.
_MEMORIES = frozenset({"_contracted"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
# Those whose truth is whether they hold anything.
_BUILTIN = frozenset({dict, list, set, deque, OrderedDict})
_IMPORTS = frozenset({"IMPORT_NAME"})
_OF_ALL_ATTRIBUTES = frozenset({"__dict__", "vars", "globals", "locals"})
_LIBRARIES = frozenset({"torch", "lightning", "torchmetrics", "lightning_utilities", "lightning_lowrank", "numpy"})
_MISSING = object()
_MOST_ENTRIES = 20_000


class Observed:
    """Stands for a number of the step that a graph has no place for. Whatever uses it raises `Untraceable`.

    It passes for an ``int`` but is none, for torch and Python take an ``int``'s value unseen.
    """

    what = "the number of the step"

    def __init__(self, number: int) -> None:
        self.own = number

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def _refuse(self, *arguments: Any, **keywords: Any) -> Any:
        raise Untraceable(f"it uses {self.what}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _refuse
    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __float__ = __complex__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __lshift__ = __rlshift__ = _refuse
    __rshift__ = __rrshift__ = __round__ = __trunc__ = __floor__ = __ceil__ = __divmod__ = __rdivmod__ = _refuse
    __eq__ = __ne__ = __hash__ = __str__ = __repr__ = __format__ = _refuse
    __getattr__ = _refuse

    @classmethod
    def __torch_function__(cls, *arguments: Any) -> Any:
        """Refuse operations of torch's."""
        raise Untraceable(f"it uses {cls.what}")


def unobserved(number: int | Observed) -> int:
    """Return a number of the step for a use that a graph has no part in."""
    return number.own if type(number) is Observed else number  # type: ignore[return-value]


class _ObservedTrainer(Untraced):
    """Stands for the trainer: plain values that are read of it are noted, anything else is refused."""

    _own: Any
    _note: Callable[[str, Any], None]

    def __init__(self, trainer: Any, note: Callable[[str, Any], None]) -> None:
        self.__dict__.update(_own=trainer, _note=note)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        # The last batch is the client's own within its step alone.
        if not isinstance(value, _PLAIN) or name == "is_last_batch":
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
        self._others: list[tuple[Callable[[], Any], Any, str]] = []
        self._containers: list[tuple[Any, Any, str]] = []
        self._empty: list[tuple[Any, str]] = []
        self._all_empty: list[Any] = []
        self._seen: dict[int, Any] = {}

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
        attributes = vars(self._module)
        trainer = attributes.get("_trainer")
        before = _Before([self._module, *self._roots])

        def noted(part: nn.Module, name: str) -> Any:
            self._read[id(part), name] = part, name
            return object.__getattribute__(part, name)

        nn.Module.__getattribute__ = noted  # type: ignore[method-assign, assignment]
        if trainer is not None:
            attributes["_trainer"] = _ObservedTrainer(trainer, self._of_trainer.__setitem__)
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                yield
        finally:
            del nn.Module.__getattribute__
            if trainer is not None:
                attributes["_trainer"] = trainer
            done = before.restore()
        self._trainer = trainer
        if done:
            raise Untraceable(f"it {done}")
        if printed.getvalue():
            raise Untraceable("it prints")
        self._add_definitions(type(self._module), "training_step")
        for part, name in self._read.values():
            self._add_read(part, name)
        for root in self._roots:
            self._add(type(root).__name__, root)
        del self._read
        if len(self._entries) > _MOST_ENTRIES:
            raise Untraceable(f"it can read {len(self._entries)} names, too many to compare in each step")

    def _add_read(self, part: nn.Module, name: str) -> None:
        traced = isinstance(part, torch.fx.GraphModule)
        if traced or name in _OF_LIGHTNING or name in _MEMORIES or name == "trainer":
            return
        where = f"{type(part).__name__}.{name}"
        tables = (vars(part), own_parameters(part), own_buffers(part), own_children(part))
        for table in tables:
            if name in table:
                if name in _HOOKS:
                    if table[name]:
                        raise Untraceable(f"{type(part).__name__} has hooks, which may do more than compute")
                    self._contains(table[name], where)
                    return
                self._entry(table, name)
                self._add(where, table[name])
                return
        if self._add_definitions(type(part), name):
            # An attribute of the object would come first.
            self._entries.append((vars(part), name, _MISSING, False))
        elif not hasattr(type(part), name):
            self._entries += [(table, name, _MISSING, False) for table in tables]

    def _add_definitions(self, kind: type, name: str) -> bool:
        """Note what classes define by a name; return whether that, or another one, may be put before it."""
        own = name == "forward"
        for each in kind.__mro__:
            if name not in vars(each):
                continue
            value = vars(each)[name]
            if not _is_of_a_library(each) or (isinstance(value, _PLAIN) and not name.startswith("__")):
                own = True
                self._entry(vars(each), name)
                self._add(f"{kind.__name__}.{name}", _behind(value))
        return own

    def _entry(self, table: Mapping[str, Any], name: str) -> None:
        value = table[name]
        self._entries.append((table, name, value, isinstance(value, _PLAIN)))

    def _add(self, name: str, root: Any) -> None:
        """Note what an object holds."""
        queue = [(name, root)]
        while queue:
            name, item = queue.pop()
            if id(item) in self._seen or isinstance(item, (*_PLAIN, type, types.ModuleType, nn.Module, Tensor)):
                continue
            if is_of_the_program(type(item)):
                continue
            self._seen[id(item)] = item
            if isinstance(item, (np.ndarray, *_GENERATORS)):
                raise Untraceable(f"it can read {name}, a {type(item).__name__}")
            if isinstance(item, torch.Generator) or hasattr(type(item), "__next__"):
                raise Untraceable(f"it can draw from {name}, a {type(item).__name__}")
            if isinstance(item, (dict, list, set, deque)):
                if len(item) > MANY:
                    raise Untraceable(f"it can read {name}, which has more than {MANY} entries")
                self._contains(item, name)
            elif type(item).__hash__ is None and not hasattr(item, "__dict__") and not _slots(item):
                raise Untraceable(f"it can read {name}, a {type(item).__name__}")
            if isinstance(item, types.FunctionType):
                if _is_of_a_library(item):
                    continue
                queue += self._globals(item)
                for cell in item.__closure__ or ():
                    self._others.append((functools.partial(getattr, cell, "cell_contents"), cell.cell_contents, name))
            elif not isinstance(item, types.MethodType):
                queue += self._attributes(name, item)
            queue += held(name, item)
            if isinstance(item, types.MethodType):
                queue.append((name, item.__func__))

    def _contains(self, container: Any, name: str) -> None:
        """Note what a container holds. Most hold nothing, and are soon compared."""
        if container or type(container) not in _BUILTIN:
            self._containers.append((container, _copy(container), name))
        else:
            self._empty.append((container, name))
            self._all_empty.append(container)

    def _attributes(self, name: str, item: Any) -> list[tuple[str, Any]]:
        """Note what stands in an object's slots and classes, and return it."""
        found = []
        for slot in _slots(item):
            value = getattr(item, slot, _MISSING)
            self._others.append((functools.partial(getattr, item, slot, _MISSING), value, f"{name}.{slot}"))
            found.append((f"{name}.{slot}", value))
        for kind in type(item).__mro__:
            if not _is_of_a_library(kind) and id(kind) not in self._seen:
                self._seen[id(kind)] = kind
                found += self._table(vars(kind), [each for each in vars(kind) if not each.startswith("__")])
                found += [(f"{name}()", vars(kind)["__call__"])] if "__call__" in vars(kind) else []
        return found

    def _globals(self, function: types.FunctionType) -> list[tuple[str, Any]]:
        """Note what a function names of its module, and of modules and classes in it; return what these hold."""
        code = function.__code__
        names = _names(code)
        if names & _OF_ALL_ATTRIBUTES:
            raise Untraceable(f"{function.__name__}() can read attributes unseen, by vars() or __dict__")
        found: list[tuple[str, Any]] = []
        imported = [sys.modules[name] for name in _names(code, _IMPORTS) if name in sys.modules]
        tables = [function.__globals__, *(vars(module) for module in imported if not _is_of_a_library(module))]
        for table in tables:
            # A global may have the name of an attribute that the function reads of something else.
            read = _names(code, _OF_GLOBALS) if table is function.__globals__ else names
            known = [name for name in sorted(read) if name in table]
            found += self._table(table, known)
            for name in known:
                value = table[name]
                inner = vars(value) if isinstance(value, (type, types.ModuleType)) else None
                if inner is not None and not _is_of_a_library(value) and all(inner is not each for each in tables):
                    tables.append(inner)
        return found

    def _table(self, table: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
        found = []
        for name in names:
            value = _behind(table[name])
            if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) or _is_of_a_library(value):
                continue
            if not isinstance(value, types.MemberDescriptorType):
                self._entry(table, name)
                found.append((name, value))
        return found

    def changed(self) -> str:
        """Name something that the step would read otherwise now; an empty string if all is as it was."""
        for table, name, value, plain in self._entries:
            found = table.get(name, _MISSING)
            if found is not value and not (plain and type(found) is type(value) and found == value):
                return name
        if any(self._all_empty):
            return next(name for container, name in self._empty if container)
        for container, copy, name in self._containers:
            if _differs(container, copy):
                return name
        for read, value, name in self._others:
            found = read()
            if found is not value and not _are_equal(found, value):
                return name
        for name, value in self._of_trainer.items():
            if getattr(self._trainer, name) != value:
                return f"trainer.{name}"
        return ""


class _Before:
    """What objects hold, and Python's random numbers, before a step; tensors aside."""

    def __init__(self, roots: Sequence[Any]) -> None:
        try:
            self._memory = Memory(roots, tensors=False)
        except MisconfigurationException as error:
            raise Untraceable(f"torch could not trace it unnoticed: {error}") from None
        kinds = (dict, list, set, deque)
        found = [each for root in roots for each in reachable("self", root)]
        self._held = [
            (name, item, _copy(item))
            for name, item in found
            if isinstance(item, kinds) and name.rpartition(".")[2] not in _MEMORIES
        ]
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def restore(self) -> str:
        """Put everything back, and say what was done."""
        done = ""
        for name, item, copy in self._held:
            if _differs(item, copy):
                table = item if isinstance(item, dict) else {}
                keys = [str(key) for key, value in table.items() if copy.get(key, _MISSING) is not value]
                done = f"changes {'.'.join((name, *keys[:1]))}"
        self._memory.restore()
        _, words, position, *_ = np.random.get_state()
        if random.getstate() != self._python or position != self._numpy[2] or (words != self._numpy[1]).any():
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            done = "draws from random or numpy"
        return done


def _copy(container: Any) -> Any:
    kind: Any = next(each for each in (dict, list, set, deque) if isinstance(container, each))
    return kind(container)


def _differs(container: Any, copy: Any) -> bool:
    """Return whether a container holds other objects, or other values of plain ones, than its copy."""
    if len(container) != len(copy):
        return True
    kind = type(copy)
    if kind is set:
        return bool(container != copy)
    if kind is dict:
        if any(map(operator.ne, container, copy)):
            return True
        container, copy = container.values(), copy.values()
    if not any(map(operator.is_not, container, copy)):
        return False
    return not all(one is two or _are_equal(one, two) for one, two in zip(container, copy, strict=True))


def _are_equal(one: Any, two: Any) -> bool:
    return type(one) is type(two) and isinstance(one, _PLAIN) and bool(one == two)


def _behind(value: Any) -> Any:
    """Return the function that a method or property of a class calls."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _slots(item: Any) -> list[str]:
    tables = [vars(kind) for kind in type(item).__mro__ if not _is_of_a_library(kind)]
    return [name for table in tables for name in table if isinstance(table[name], types.MemberDescriptorType)]


def _names(code: types.CodeType, operations: frozenset[str] | None = None) -> set[str]:
    """Return the names in a function and the functions within it, or those that certain operations look up."""
    own = set(code.co_names)
    if operations is not None:
        own = {each.argval for each in dis.get_instructions(code) if each.opname in operations}
    return own.union(*(_names(each, operations) for each in code.co_consts if isinstance(each, types.CodeType)))


def _is_of_a_library(item: Any) -> bool:
    """Return whether a function, class or module is of a package that does not change while it runs."""
    if isinstance(item, types.ModuleType):
        return _is_library(item.__name__)
    return isinstance(item, (type, types.FunctionType)) and _is_library(item.__module__ or "")


@cache
def _is_library(name: str) -> bool:
    top = name.partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return top in _LIBRARIES or top in sys.stdlib_module_names - {"__main__"} or "site-packages" in file
