"""Attributes of other people's objects that a fit replaces, and the way to put them back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

_MISSING = object()


def replaced(owner: Any, **attributes: Any) -> AbstractContextManager[None]:
    """Replace attributes of an object for a while, and put back exactly what was there, also after an error.

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
    # A class, because a generator would put them back when nobody holds it any more.

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
                # A caller may have deleted it.
                vars(self._owner).pop(name, None)


def _own(owner: Any, name: str) -> Any:
    """Return what an object itself has under a name, or what a property of its class keeps there."""
    # inspect.getattr_static takes several times as long, and logs are replaced in each step of clients together.
    for kind in type(owner).__mro__:
        if name in kind.__dict__:
            if hasattr(type(kind.__dict__[name]), "__set__"):
                return getattr(owner, name)
            break
    return vars(owner).get(name, _MISSING)
