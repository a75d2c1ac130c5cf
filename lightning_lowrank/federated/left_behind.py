"""Files and folders that carry the name of their process, so that a later run can clear those of killed ones."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

_DAY = 24 * 60 * 60
_IN_USE: set[Path] = set()


def place() -> str:
    """Return where this process's number means something: its host, and there its container."""
    try:
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        namespace = "0"
    return f"{socket.gethostname()}-{namespace}".replace("@", "-")


def mark() -> str:
    """Return a name for what belongs to this process: ``host-container@process``."""
    return f"{place()}@{os.getpid()}"


def claim(path: Path) -> Path:
    """Keep a file or folder of this process from being cleared by it."""
    _IN_USE.add(path)
    return path


def clear_left_behind(marked: Iterable[tuple[Path, str]]) -> None:
    """Delete what processes that have ended left behind, and name what is old and of another host or container.

    Args:
        marked: Files or folders, each with the mark in its name.
    """
    strange = []
    for path, text in marked:
        where, _, number = text.rpartition("@")
        if path in _IN_USE or not number.isdecimal():
            continue
        if where == place():
            if int(number) == os.getpid() or not _runs(int(number)):
                _delete(path)
        elif _is_old(path):
            strange.append(str(path))
    if strange:
        rank_zero_warn(
            f"{', '.join(sorted(strange))}: left by runs on other hosts or in other containers and unchanged for a day."
            " Delete them if these runs have ended."
        )


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # It is another user's.
        return True
    return True


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _DAY
    except OSError:
        return False
