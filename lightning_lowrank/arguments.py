"""Checks of arguments: an error names the argument, the value and what would work."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any, get_args


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is not one of a Literal's, with a ``ValueError``."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, but is {value!r}.")


def check_integer(name: str, value: object, least: int | None = 1, hint: str = "") -> None:
    """Refuse what is not an integer (``TypeError``) of at least ``least`` (``ValueError``; ``None``: no limit).

    ``hint`` is what to use instead of a smaller integer, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, int):
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
