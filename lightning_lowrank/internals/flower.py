"""What the bridge needs of Flower beyond ``flwr.app`` and its sisters."""

from __future__ import annotations

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
