"""The optional dependency on transformers."""

from __future__ import annotations

from types import ModuleType

from lightning.pytorch.utilities.exceptions import MisconfigurationException


def import_transformers(user: str) -> ModuleType:
    """Import transformers, or say that ``user`` needs it and which extra installs it."""
    try:
        import transformers
    except ImportError as error:
        raise MisconfigurationException(
            f'{user} needs transformers: pip install "lightning_lowrank[transformers]" ({error})'
        ) from error
    return transformers
