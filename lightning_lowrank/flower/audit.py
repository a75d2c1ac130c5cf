"""A site's audit log: a line of JSON for each message that the site receives, sends or refuses.

The lines are records of the logger ``lightning_lowrank.audit`` too, so that a handler of `logging` can send them to
another machine.
"""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

_LOGGER = logging.getLogger("lightning_lowrank.audit")
_LOGGER.setLevel(logging.INFO)
# Without this, the lines would also appear on the SuperNode's terminal.
_LOGGER.propagate = False
_LONGEST_TEXT = 2000


class AuditLog:
    """Appends lines to a site's audit log, each on the disk before the call returns.

    Args:
        file: The log. Processes of this machine may append to it at the same time.

    Example:
        >>> import tempfile
        >>> log = AuditLog(Path(tempfile.mkdtemp()) / "audit.jsonl")
        >>> number = log.append(direction="received", kind="train.round", round=0, bytes=1024)
        >>> [json.loads(line)["direction"] for line in log.file.read_text().splitlines()]
        ['received']
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, **entry: Any) -> str:
        """Append a line of plain values with its time, and return its identifier.

        Raises:
            OSError: If the file cannot be written, or is a link.
        """
        identifier = uuid.uuid4().hex[:12]
        cut = {name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in entry.items()}
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"entry": identifier, "time": now, **cut})
        record = _LOGGER.makeRecord(_LOGGER.name, logging.INFO, __file__, 0, line, (), None)
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _OnDisk(self.file).emit(record)
        _LOGGER.handle(record)
        return identifier


class _OnDisk(logging.Handler):
    """Appends a record as a whole and syncs it to the disk, or raises an `OSError`."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line."""
        line = self.format(record).encode() + b"\n"
        with open(self.file, "a+b", buffering=0, opener=_open_no_link) as file:
            # Another process's line grows by pages: without the lock, half of it would look like one cut off.
            _lock(file.fileno())
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                # Begin a new line after one that a full disk has cut off.
                line = line if file.read(1) == b"\n" else b"\n" + line
            if (file.write(line) or 0) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.file))
            os.fsync(file.fileno())


def _lock(descriptor: int) -> None:
    """Wait for other processes, until the descriptor is closed."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
