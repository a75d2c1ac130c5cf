"""What the bridge needs of Flower, and of what it meets in Flower's processes, beyond ``flwr.app`` and its sisters."""

from __future__ import annotations

import typing

import lightning.pytorch as pl
from flwr.app import Error

try:
    from flwr.common import constant as _constant
except ImportError:
    _constant = None  # type: ignore[assignment]

_RAISED_BY_SITE = ("CLIENT_APP_RAISED_EXCEPTION", "LOAD_CLIENT_APP_EXCEPTION", "INVALID_FAB")


def is_passing(error: Error) -> bool:
    """Return whether a node may answer if it is asked again: what a site's own code raised, it would raise again.

    The names of the codes are not public. Where Flower has them elsewhere, every error counts as one that passes, and a
    site is asked again until the server's ``start_timeout``.
    """
    codes = getattr(_constant, "ErrorCode", None)
    return error.code not in [getattr(codes, name, None) for name in _RAISED_BY_SITE]


def read_counts_as_counts() -> None:
    """Let a recipe's ``limit_train_batches: 1`` be a count here too, and not the share 1.0.

    For the caches of `typing`, ``int | float | None`` and ``float | int | None`` are one, and jsonargparse, which tries
    types in order, is given whichever was made first. Where Flower was imported before Lightning, as in its processes,
    that is the second.

    `typing` has no public way to forget. Where it forgets in another way, counts in recipes are read as shares there.
    """
    hints = pl.Trainer.__init__.__annotations__
    for name, hint in hints.items():
        if set(typing.get_args(hint)) == {int, float, type(None)}:
            hints[name] = int | float | None
    for forget in getattr(typing, "_cleanups", ()):
        forget()
