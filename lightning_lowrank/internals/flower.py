"""What the bridge needs of Flower beyond ``flwr.app`` and its sisters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Error

try:
    from flwr.common import constant as _constant
except ImportError:
    _constant = None  # type: ignore[assignment]

_RAISED_BY_SITE = ("CLIENT_APP_RAISED_EXCEPTION", "LOAD_CLIENT_APP_EXCEPTION", "INVALID_FAB")


def state_folder(config: Mapping[str, Any]) -> Path:
    """Return where a party keeps its state: ``state-dir`` of its configuration, by default below Flower's own home."""
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    return Path(str(config.get("state-dir", home / "lightning_lowrank")))


def is_passing(error: Error) -> bool:
    """Return whether a node may answer if it is asked again: what a site's own code raised, it would raise again.

    The names of the codes are not public. Where Flower has them elsewhere, every error counts as one that passes, and a
    site is asked again until the server's ``start_timeout``.
    """
    codes = getattr(_constant, "ErrorCode", None)
    return error.code not in [getattr(codes, name, None) for name in _RAISED_BY_SITE]
