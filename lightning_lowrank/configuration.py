"""The checks of `arguments` and `patterns` for what Lightning configures: they raise MisconfigurationException."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import arguments, patterns

P = ParamSpec("P")


def _configured(check: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(check)
    def configured(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise MisconfigurationException(str(error)) from error

    return configured


check_choice = _configured(arguments.check_choice)
check_integer = _configured(arguments.check_integer)
check_number = _configured(arguments.check_number)
check_patterns = _configured(patterns.check_patterns)
