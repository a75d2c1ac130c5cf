"""Lookup of a base class's subclasses by name."""

from __future__ import annotations

import inspect
from typing import Any


def subclasses_by_name(base: type[Any]) -> dict[str, type[Any]]:
    """All subclasses of ``base`` that are not abstract, at any depth, by class name.

    If classes share a name, the deepest one counts, and of several at one depth the one that was defined last, as when
    a notebook cell is run twice.

    Args:
        base: The class whose subclasses are wanted. It is not among them.

    Example:
        >>> from lightning_lowrank.layers import Factorization
        >>> subclasses_by_name(Factorization)["CP"]
        <class 'lightning_lowrank.layers.factorization.cp.CP'>
    """
    found: dict[str, type[Any]] = {}
    pending = base.__subclasses__()
    while pending:
        kind = pending.pop(0)
        pending.extend(kind.__subclasses__())
        if not inspect.isabstract(kind):
            found[kind.__name__] = kind
    return found
