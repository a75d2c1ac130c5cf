"""Attributes of other people's objects that a fit replaces, and the way to put them back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
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
    before = {name: _own(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is not _MISSING:
                setattr(owner, name, value)
            else:
                # A caller may have deleted it.
                vars(owner).pop(name, None)


def _own(owner: Any, name: str) -> Any:
    """Return what an object itself has under a name, or what a property of its class keeps there."""
    kept_by = inspect.getattr_static(type(owner), name, None)
    if hasattr(type(kept_by), "__set__"):
        return getattr(owner, name)
    return vars(owner).get(name, _MISSING)
