"""Checks of arguments, whose errors name a remedy, and a record of constructor arguments, which `repr` shows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise a ``ValueError`` for a value that is not one of a Literal's choices; 8.0 is not the choice 8."""
    value = to_plain(value)
    if not any(isinstance(value, type(choice)) and value == choice for choice in get_args(choices)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, but is {value!r}.")


def check_integer(name: str, value: object, least: int | None = 1, hint: str = "") -> None:
    """Raise unless the value is an integer (``TypeError``) of at least ``least`` (``ValueError``; ``None``: no limit).

    ``hint`` names for the message what to use instead of a smaller integer.
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
    """Raise unless the value is a number (``TypeError``), finite and within the bounds (``ValueError``).

    The bounds ``least`` and ``most`` are inclusive, ``above`` and ``below`` exclusive. ``hint`` names for the message
    what to use instead of a number out of bounds.
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


def join_names(names: Sequence[str], separator: str = ", ") -> str:
    """Join the first five names for a message, and count the rest.

    Example:
        >>> join_names("abcdefg")
        'a, b, c, d, e and 2 more'
    """
    shown = separator.join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def printable(text: str) -> str:
    r"""Escape characters that a terminal would obey or could not show, as Python does; line breaks stay.

    Example:
        >>> print(printable("\x1b[31mé"))
        \x1b[31mé
    """
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )


def escape_formula(text: str) -> str:
    """A text for a CSV cell, with an apostrophe before it if a spreadsheet would run it as a formula.

    Apostrophes before such a text get one more, so that the text without its first apostrophe is the original.

    Example:
        >>> escape_formula("=1+1"), escape_formula("'=1+1"), escape_formula("-3"), escape_formula("ada")
        ("'=1+1", "''=1+1", '-3', 'ada')
    """
    # Spreadsheets read full-width characters too.
    if text.lstrip("'").startswith(tuple("=+-@＝＋－＠")):
        with contextlib.suppress(ValueError):
            float(text)
            return text
        return f"'{text}"
    return text


def first_ten(values: Sequence[Any]) -> str:
    """The first ten values as text for a message, followed by ``...`` if there are more.

    Example:
        >>> first_ten([3, 5]), first_ten(range(11))
        ('[3, 5]', '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9] ...')
    """
    return f"{[*values[:10]]}{' ...' if len(values) > 10 else ''}"


def to_plain(value: Any) -> Any:
    """A value with NumPy's numbers replaced by Python's, also within a list, tuple or dictionary.

    Checkpoints and JSON need Python's numbers.

    Example:
        >>> to_plain({"first": np.int64(4), "last": np.float32(0.5)})
        {'first': 4, 'last': 0.5}
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict) and any(isinstance(part, np.generic) for part in value.values()):
        return {name: to_plain(part) for name, part in value.items()}
    if type(value) in (list, tuple) and any(isinstance(part, np.generic) for part in value):
        return type(value)(to_plain(part) for part in value)
    return value


SAME_RESULT = {"same_result": True}
"""Metadata of a dataclass's field that changes no result of a run."""


class Configured:
    """Base of classes that record their constructor's arguments; see `recorded_arguments`.

    `repr` shows the arguments that are not defaults. NumPy's numbers become Python's.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, to_plain(value))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments_of(self).items())
        return f"{type(self).__name__}({shown})"

    def result_arguments(self) -> dict[str, Any]:
        """The arguments that change a run's result, by name; a subclass may leave some out."""
        return recorded_arguments(self)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__init__" not in vars(cls):
            return
        init = vars(cls)["__init__"]
        signature = inspect.signature(init)

        @functools.wraps(init)
        def recorded(self: Any, *arguments: Any, **named: Any) -> None:
            if "_given_arguments" not in vars(self):
                # The constructor itself refuses arguments that do not fit its signature.
                with contextlib.suppress(TypeError):
                    bound = signature.bind(self, *arguments, **named)
                    given = {name: to_plain(value) for name, value in _by_name(bound).items()}
                    object.__setattr__(self, "_given_arguments", given)
            init(self, *arguments, **named)

        cls.__init__ = recorded  # type: ignore[method-assign]


# Reading a signature takes longer than all else that is done with it, and classes are asked again in every round.
_signature = functools.cache(inspect.signature)


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Bound arguments by name, those in ``**`` included, without the first (``self``)."""
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        further = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found.update(value if further else {name: value})
    return found


def recorded_arguments(obj: Any) -> dict[str, Any]:
    """An object's constructor arguments by name, defaults included.

    An attribute of an argument's name takes precedence, so that values resolved or set later are seen. Otherwise the
    value is the constructor's, which objects of `Configured` record. For other classes, arguments without an attribute
    are left out. Fields of a dataclass are its arguments.

    Example:
        >>> from lightning_lowrank import FedAvgM
        >>> recorded_arguments(FedAvgM(momentum=0.5))
        {'momentum': 0.5, 'lr': 1.0}
    """
    if dataclasses.is_dataclass(obj):
        return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if field.init}
    attributes = getattr(obj, "__dict__", {})
    given = attributes.get("_given_arguments")
    if given is None:
        parameters = _signature(type(obj).__init__).parameters
        given = {name: attributes[name] for name in parameters if name in attributes}
    return {name: attributes.get(name, value) for name, value in given.items()}


def arguments_of(thing: object) -> dict[str, Any]:
    """The `recorded_arguments` that differ from their defaults."""
    kind: Any = type(thing)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    defaults = {name: each.default for name, each in _signature(kind).parameters.items()}
    defaults |= {each.name: each.default_factory() for each in fields if callable(each.default_factory)}
    found = {}
    for name, value in recorded_arguments(thing).items():
        default = defaults.get(name, inspect.Parameter.empty)
        # An empty list in place of a default None or empty tuple counts as the default.
        if repr(value) != repr(default) and not (isinstance(value, (list, tuple, dict)) and not value and not default):
            found[name] = value
    return found
