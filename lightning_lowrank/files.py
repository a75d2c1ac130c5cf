"""Atomic and private file writing: complete files or none, protected from other users."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.run_metadata import replaces

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context that yields a temporary path, whose file replaces ``path`` at the end and is deleted after an error.

    Raises:
        MisconfigurationException: If ``path`` exists and is not a file, or cannot be written.
    """
    # If ``path`` is a link, replace the file that it points to.
    target = path.resolve()
    part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "no regular file"
            raise misconfigured(f"{path} cannot be written, because it is {kind}: give the path of a file.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaces(part, target):
            yield part
    except (OSError, SafetensorError) as error:
        # safetensors reports a system error as text only.
        full = any(isinstance(error, OSError) and error.errno == number for number in _FULL) or any(
            f"os error {number}" in str(error) for number in _FULL
        )
        remedy = f" Free space on the disk of {target.parent}, or give a path on another one." if full else ""
        raise misconfigured(f"{path} cannot be written, and an existing file is unchanged: {error}.{remedy}") from error


def private_folder(folder: Path) -> Path:
    """A folder that only this user can write to; created with mode 0700 if needed.

    Raises:
        MisconfigurationException: If there is a link in its place, another user's folder, or one that others may write.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    others = hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022)
    if folder.is_symlink() or others:
        raise misconfigured(
            f"{folder} is a link, another user's, or writable by others: a party's state must be in a folder of its"
            " own, such as a new one"
        )
    return folder


def not_shared(folder: Path) -> Path:
    """Check that only its owner may write to a folder, and return it.

    Raises:
        MisconfigurationException: If its group or all users may. Windows has no such rights.
    """
    if hasattr(os, "getuid") and folder.stat().st_mode & 0o022:
        raise misconfigured(f"{folder} is writable by others, who could put files there: chmod go-w {folder}")
    return folder


def without_link(file: Path) -> Path:
    """Check that a site's file is no symbolic link, and return it.

    Raises:
        MisconfigurationException: If there is a link in its place.
    """
    if file.is_symlink():
        raise misconfigured(f"{file} is a link, which a site does not follow: put the file itself there")
    return file


@contextmanager
def private_files() -> Iterator[None]:
    """A context in which this process creates files and folders for their owner only (umask 077)."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
