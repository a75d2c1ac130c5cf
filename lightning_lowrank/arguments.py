"""Arguments: checks that name the argument, the value and what would work; NumPy's numbers; what `repr` shows."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is not one of a Literal's, with a ``ValueError``."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, but is {value!r}.")


def check_integer(name: str, value: object, least: int | None = 1, hint: str = "") -> None:
    """Refuse what is not an integer (``TypeError``) of at least ``least`` (``ValueError``; ``None``: no limit).

    ``hint`` is what to use instead of a smaller integer, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, but is {value!r} of type {type(value).__name__}.")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}{hint and '; use '}{hint}.")


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
    hint: str = "",
) -> None:
    """Refuse what is not a number (``TypeError``), or is not finite or out of bounds (``ValueError``).

    ``least`` and ``most`` are allowed themselves, ``above`` and ``below`` are not. ``hint`` is what to use instead of
    a number out of bounds, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, but is {value!r} of type {type(value).__name__}.")
    bounds = [
        ("at least", operator.ge, least),
        ("above", operator.gt, above),
        ("below", operator.lt, below),
        ("at most", operator.le, most),
    ]
    given = [(words, holds, bound) for words, holds, bound in bounds if bound is not None]
    if not math.isfinite(value) or not all(holds(value, bound) for _, holds, bound in given):
        wanted = [f"{words} {bound:g}" for words, _, bound in given]
        if below is None and most is None:
            wanted.append("finite")
        raise ValueError(f"{name} must be {' and '.join(wanted)}, but is {value!r}{hint and '; use '}{hint}.")


def plain(value: Any) -> Any:
    """Return a value with numbers of Python's in place of NumPy's, also those in a list, tuple or dictionary.

    Checkpoints and JSON hold Python's alone.

    Example:
        >>> plain({"first": np.int64(4), "last": np.float32(0.5)})
        {'first': 4, 'last': 0.5}
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict) and any(isinstance(part, np.generic) for part in value.values()):
        return {name: plain(part) for name, part in value.items()}
    if type(value) in (list, tuple) and any(isinstance(part, np.generic) for part in value):
        return type(value)(plain(part) for part in value)
    return value


def arguments_of(thing: object) -> dict[str, Any]:
    """Return those arguments of the constructor that an object keeps under their names and that are not defaults."""
    fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    factories = {each.name: each.default_factory for each in fields if callable(each.default_factory)}
    found = {}
    for name, parameter in inspect.signature(type(thing)).parameters.items():
        default = factories[name]() if name in factories else parameter.default
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        value = getattr(thing, name, default)
        # Where an empty list is kept in the place of None or of an empty tuple, it is the default as well.
        if repr(value) != repr(default) and not (value in ([], (), {}) and not default):
            found[name] = value
    return found


class Configured:
    """An object that is configured by arguments, which it keeps under their names: `repr` shows them.

    NumPy's numbers become Python's where they are kept.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, plain(value))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments_of(self).items())
        return f"{type(self).__name__}({shown})"
