"""Writing files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lightning_lowrank.configuration import misconfigured


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside ``path`` to write a file to, which takes its place at the end; after an error it is deleted.

    Raises:
        MisconfigurationException: If ``path`` is something else than a file, or cannot be written.
    """
    # The file that a link points to is replaced, not the link.
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "no regular file"
            raise misconfigured(f"{path} cannot be written, because it is {kind}: give the path of a file.")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise misconfigured(f"{path} cannot be written, and what was there is left as it was: {error}.") from error
