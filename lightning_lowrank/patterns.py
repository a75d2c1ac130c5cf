"""Patterns that select parts of a model by name, for arguments such as ``include`` and ``exclude``.

A pattern with the wildcards of :mod:`fnmatch` is matched, case-sensitively, against a whole name and every run of its
parts between dots.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name.

    Args:
        pattern: A name, a run of its parts, or either with wildcards.
        name: A dotted name.

    Example:
        >>> matches("encoder", "encoder.0.fc1"), matches("fc*", "encoder.0.fc1"), matches("fc", "encoder.0.fc1")
        (True, True, False)
    """
    parts = name.split(".")
    return any(
        fnmatchcase(".".join(parts[start:stop]), pattern)
        for start in range(len(parts))
        for stop in range(start + 1, len(parts) + 1)
    )


def check_patterns(
    argument: str, patterns: Iterable[str], names: Sequence[str], what: str, also: Sequence[str] = ()
) -> None:
    """Raise a ``ValueError`` for a pattern that matches none of the names, and propose similar names.

    ``what`` describes a thing that has such a name, as in ``"layer that can be converted"``. ``also`` are further names
    to propose.
    """
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            parts = dict.fromkeys(part for name in (*names, *also) for part in (name, *name.split(".")) if part)
            close = difflib.get_close_matches(pattern, list(parts), n=5, cutoff=0.5) or names[:5]
            raise ValueError(
                f"{argument} has {pattern!r}, which matches no {what}; close to it "
                f"{'is' if len(close) == 1 else 'are'} {', '.join(close) or 'none'}."
            )
