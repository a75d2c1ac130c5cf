"""Names of classes that a user gives, so that all sites number them alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_class_names(argument: str, given: Sequence[Any] | None) -> list[str] | None:
    """The given names of classes as strings; ``None`` if none are given.

    Raises:
        MisconfigurationException: If there are fewer than two, or one is given twice.
    """
    names = None if given is None else list(map(str, given))
    if names is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise MisconfigurationException(
            f"{argument} must list two or more different names, or be None for those of the training data, got"
            f" {names!r}"
        )
    return names


def is_number(name: str) -> bool:
    """Whether a class's name is a finite number."""
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False
