"""The optional dependency on transformers."""

from __future__ import annotations

from types import ModuleType

from lightning.pytorch.utilities.exceptions import MisconfigurationException


def import_transformers(user: str) -> ModuleType:
    """Import transformers, which is an optional dependency.

    Args:
        user: Name of the class that needs it, for the message.

    Raises:
        MisconfigurationException: If it is not installed; the message names the extra.
    """
    try:
        import transformers
    except ImportError as error:
        raise MisconfigurationException(
            f'{user} needs transformers: pip install "lightning_lowrank[transformers]" ({error})'
        ) from error
    return transformers
