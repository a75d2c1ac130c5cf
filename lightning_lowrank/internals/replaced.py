"""Temporary replacement of attributes on other libraries' objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_MISSING = object()


def replaced(owner: Any, **attributes: Any) -> AbstractContextManager[None]:
    """A context in which attributes of an object are replaced; restores them exactly, also after an error.

    An attribute that the object has from its class is deleted from the object again. A copy or pickle of a module has
    the module's own methods, and none of the functions that replace them.

    Example:
        >>> from types import SimpleNamespace
        >>> owner = SimpleNamespace(step=1)
        >>> with replaced(owner, step=2, log=print):
        ...     sorted(vars(owner).items())[1]
        ('step', 2)
        >>> vars(owner)
        {'step': 1}
    """
    return _Replaced(owner, attributes)


class _Replaced(AbstractContextManager[None]):
    # A class, because a generator-based context would restore the attributes when it is garbage-collected.

    def __init__(self, owner: Any, attributes: dict[str, Any]) -> None:
        self._owner, self._attributes = owner, attributes

    def __enter__(self) -> None:
        self._before = {name: _own(self._owner, name) for name in self._attributes}
        for name, value in self._attributes.items():
            if isinstance(self._owner, nn.Module) and isinstance(value, (FunctionType, MethodType)):
                value = StandIn(self._owner, name, value)
            setattr(self._owner, name, value)

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            if value is not _MISSING:
                setattr(self._owner, name, value)
            else:
                # The caller may have deleted the attribute.
                vars(self._owner).pop(name, None)


class StandIn:
    """A function in the place of a module's method. Copies and pickles of the module have the method that it replaces.

    It has no table of attributes, so that a walk over a module's attributes does not reach the trainer through it.
    """

    __slots__ = ("__wrapped__", "_before", "_function", "_module", "_name")

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._module, self._name, self._function = module, name, function
        self._before = vars(module).get(name, _MISSING)
        # Lightning reads signatures there.
        self.__wrapped__ = getattr(function, "__wrapped__", function)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function."""
        return self._function(*arguments, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as the method of the copy."""
        return (getattr, (self._module, self._name)) if self._before is _MISSING else (_same, (self._before,))


def _same(value: Any) -> Any:
    return value


def _own(owner: Any, name: str) -> Any:
    """The value in an object's own ``__dict__``, or behind a property of its class; a marker if neither exists."""
    # inspect.getattr_static is several times slower, and this runs in each step of stacked clients.
    for kind in type(owner).__mro__:
        if name in kind.__dict__:
            if hasattr(type(kind.__dict__[name]), "__set__"):
                return getattr(owner, name)
            break
    return vars(owner).get(name, _MISSING)
