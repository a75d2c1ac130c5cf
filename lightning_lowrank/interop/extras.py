"""Optional dependencies that an extra of their own name installs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from lightning_lowrank.configuration import misconfigured


def import_extra(library: str, user: str) -> ModuleType:
    """Import a library, or say that ``user`` needs it and which extra installs it."""
    try:
        return import_module(library)
    except ImportError as error:
        extra = library.partition(".")[0]
        raise misconfigured(f'{user} needs {library}: pip install "lightning_lowrank[{extra}]" ({error})') from error
