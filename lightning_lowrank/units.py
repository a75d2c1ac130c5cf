"""Bytes and shares as text, rounded so that only zero becomes 0 and only a whole becomes 100%."""

from __future__ import annotations

import math
from collections.abc import Collection


def format_decimals(number: float, digits: int = 2, exact: Collection[float] = (0,)) -> str:
    """A number with ``digits`` decimals, or with more if it would round to a number of ``exact`` that it is not.

    Example:
        >>> format_decimals(12.3456), format_decimals(0.0004), format_decimals(0.0)
        ('12.35', '0.0004', '0.00')
    """
    text = f"{number:.{digits}f}"
    while math.isfinite(number) and number not in exact and float(text) in exact and digits < 12:
        digits += 1
        text = f"{number:.{digits}f}"
    return text


def percent(share: float) -> str:
    """A share of 1 in percent.

    Example:
        >>> percent(1 / 16), percent(0.99998), percent(1.0), percent(0.00001)
        ('6.25%', '99.998%', '100.00%', '0.001%')
    """
    return f"{format_decimals(100 * share, 2, (0, 100))}%"


def bytes_text(number: float, form: str = ".4g") -> str:
    """A number of bytes in a suitable unit; a million bytes are one MB.

    Args:
        number: The number of bytes, 0 or more.
        form: How a number of kB and more is written.

    Example:
        >>> bytes_text(512), bytes_text(4810), bytes_text(999_960_000), bytes_text(12_170_000, ".2f")
        ('512 B', '4.81 kB', '1 GB', '12.17 MB')
    """
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while power < len(units) - 1 and float(format(number / 1000**power, form if power else ".0f")) >= 1000:
        power += 1
    return f"{format(number / 1000**power, form if power else '.0f')} {units[power]}"
