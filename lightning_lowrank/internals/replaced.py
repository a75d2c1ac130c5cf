"""Temporary replacement of attributes on other libraries' objects."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

_MISSING = object()


def replaced(owner: Any, **attributes: Any) -> AbstractContextManager[None]:
    """A context in which attributes of an object are replaced; restores them exactly, also after an error.

    An attribute that the object has from its class is deleted from the object again.

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
            setattr(self._owner, name, value)

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            if value is not _MISSING:
                setattr(self._owner, name, value)
            else:
                # The caller may have deleted the attribute.
                vars(self._owner).pop(name, None)


def _own(owner: Any, name: str) -> Any:
    """The value in an object's own ``__dict__``, or behind a property of its class; a marker if neither exists."""
    # inspect.getattr_static is several times slower, and this runs in each step of stacked clients.
    for kind in type(owner).__mro__:
        if name in kind.__dict__:
            if hasattr(type(kind.__dict__[name]), "__set__"):
                return getattr(owner, name)
            break
    return vars(owner).get(name, _MISSING)
