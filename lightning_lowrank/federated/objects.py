"""What objects hold: the entries of containers, attributes, and what functions are bound to.

What a trial of a training step puts back, what a graph of it can read, and the generators of a data set are found so.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

MANY = 10_000
"""Entries above which the entries of a container are left alone."""


def walk(
    name: str,
    root: Any,
    is_left_alone: Callable[[type], bool],
    is_left: Callable[[Any], bool] = lambda item: False,
    is_whole: Callable[[Any], bool] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield by name an object and what it holds, each once.

    Args:
        name: The root's name.
        root: Where to begin.
        is_left_alone: Says of a class that its objects are neither yielded nor looked into.
        is_left: The same, of an object.
        is_whole: Says of an object that it is yielded, and not looked into.
    """
    seen: dict[int, Any] = {}
    queue: list[tuple[str, Any]] = [(name, root)]
    while queue:
        name, item = queue.pop()
        # Any, for mypy takes type[Any] for a type that has no hash.
        kind: Any = type(item)
        if is_left_alone(kind) or id(item) in seen or is_left(item):
            continue
        seen[id(item)] = item
        yield name, item
        if is_whole is None or not is_whole(item):
            queue += held(name, item)


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
