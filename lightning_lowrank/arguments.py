"""Checks of arguments: an error names the argument, the value and what would work."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any, get_args


def check_choice(name: str, value: object, choices: Any) -> None:
    """Check that a value is one of a Literal's.

    Raises:
        ValueError: If it is not.
    """
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, but is {value!r}.")


def check_integer(name: str, value: object, least: int | None = 1, hint: str = "") -> None:
    """Check that a value is an integer of at least ``least``.

    Args:
        name: The argument.
        value: Its value.
        least: The smallest integer that is allowed. ``None``: no limit.
        hint: What to use instead of a smaller integer, for the message.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If it is too small.
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
    """Check that a value is a finite number within bounds.

    Args:
        name: The argument.
        value: Its value.
        least: The smallest number that is allowed. ``None``, here and below: no limit.
        above: A number that the value must exceed.
        below: A number that the value must not reach.
        most: The largest number that is allowed.
        hint: What to use instead of a number out of bounds, for the message.

    Raises:
        TypeError: If the value is not a number.
        ValueError: If it is out of bounds or not finite.
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
