"""What objects hold: the entries of containers, attributes, and what functions are bound to.

What a trial of a training step puts back, what a graph of it can read, and the generators of a data set are found so.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from typing import Any

import numpy as np
from torch import Tensor

MANY = 10_000
"""Entries above which the entries of a container are left alone."""


def held(name: str, item: Any) -> list[tuple[str, Any]]:
    """Return by name what an object holds itself."""
    if isinstance(item, (Tensor, np.ndarray)):
        return []
    if isinstance(item, types.MethodType):
        return [(name, item.__self__)]
    if isinstance(item, functools.partial):
        return [(name, each) for each in (item.func, item.args, item.keywords)]
    if isinstance(item, types.FunctionType):
        return [(name, each) for each in (*map(_content, item.__closure__ or ()), item.__defaults__)]
    inside: list[tuple[str, Any]] = []
    if isinstance(item, (dict, list, tuple, set, frozenset, deque)) and len(item) <= MANY:
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        # The text of a tensor has its numbers.
        inside += [
            (f"{name}.{place if isinstance(key, Tensor) else key}", value) for place, (key, value) in enumerate(pairs)
        ]
    if hasattr(item, "__dict__"):
        inside.append((name, vars(item)))
    return inside


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # A function that is still being defined.
        return None
