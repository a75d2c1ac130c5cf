"""A site's audit log: one line of JSON for each message that it was sent and has sent, chained by hashes.

The site's app writes it, and ``lightning-lowrank audit FILE`` reads it, without Flower. Each line holds the hash of the
line before it, and its own. A line that was torn, changed, removed or put in between therefore shows. Lines cut off at
the end show only against a hash that was noted elsewhere: the command prints the last one, and takes it as ``--after``.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

FIRST = "0" * 64
"""What the first line has as the hash of the line before it."""

_COLUMNS = ("number", "time", "direction", "kind", "round", "bytes", "epsilon", "digest", "reason")
_LONGEST_LINE = 65536
_LONGEST_TEXT = 2000


class AuditLog:
    """Appends lines to a site's audit log, each on the disk before the call returns.

    Args:
        file: The log. Processes of this machine may append to it at the same time.

    Example:
        >>> import tempfile
        >>> log = AuditLog(Path(tempfile.mkdtemp()) / "audit.jsonl")
        >>> log.append(direction="received", kind="train.round", round=0, bytes=1024)
        0
        >>> log.append(direction="sent", kind="train.round", round=0, bytes=512)
        1
        >>> audit = read_audit(log.file)
        >>> [entry["direction"] for entry in audit.entries], audit.faults
        (['received', 'sent'], [])
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, **entry: Any) -> int:
        """Append a line of plain values, and return its number; time, number and hashes are added.

        Raises:
            OSError: If the file cannot be written, or is a link.
        """
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(f"{self.file}.lock", mode=0o600), open(self.file, "a+b", opener=_open_no_link) as file:
            last, whole = _last(file)
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
            content = {
                "number": last["number"] + 1 if last else 0,
                "time": now,
                **{name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in entry.items()},
                "previous": last["hash"] if last else FIRST,
            }
            line = json.dumps({**content, "hash": _hash(content)}).encode() + b"\n"
            # A line that a kill has torn stays, and shows; this one begins a line of its own.
            file.write(line if whole else b"\n" + line)
            file.flush()
            os.fsync(file.fileno())
            return int(content["number"])


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


@dataclass
class Audit:
    """What `read_audit` found.

    Args:
        entries: The lines that are whole and unchanged, in order.
        faults: What is wrong, in words, with the numbers of the lines from 1.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def last(self) -> str:
        """Hash of the last line; all that stands before it is fixed by it."""
        return self.entries[-1]["hash"] if self.entries else FIRST


def read_audit(file: Path, after: str | None = None) -> Audit:
    """Read an audit log and verify it.

    Args:
        file: The log.
        after: A hash that an earlier reading gave as the last one. That it is not there is a fault.

    Raises:
        OSError: If the file cannot be read.
    """
    audit, previous, number = Audit(), FIRST, 0
    torn = 0
    with file.open("rb") as lines:
        for place, line in enumerate(_lines(lines), start=1):
            entry = _entry(line)
            if entry is None:
                if torn:
                    audit.faults.pop()
                torn += 1
                which = f"line {place} is" if torn == 1 else f"lines {place - torn + 1} to {place} are"
                audit.faults.append(f"{which} torn or changed")
                continue
            torn = 0
            if entry["previous"] != previous or entry["number"] != number:
                audit.faults.append(
                    f"line {place} does not follow the line before it: lines were removed, changed or put in"
                )
            audit.entries.append(entry)
            previous, number = entry["hash"], entry["number"] + 1
    if after is not None and after != FIRST and all(entry["hash"] != after for entry in audit.entries):
        audit.faults.append(f"the line with the hash {after} is gone: lines were cut off, or the log is another one")
    return audit


def print_audit(file: Path, after: str | None = None, last: int | None = None) -> list[str]:
    """Print an audit log as a table, and what is wrong with it; return the latter.

    Args:
        file: The log.
        after: As for `read_audit`.
        last: Number of lines to print, from the end. ``None``: all.

    Raises:
        OSError: If the file cannot be read.
    """
    audit = read_audit(file, after)
    shown = audit.entries if last is None else audit.entries[max(0, len(audit.entries) - last) :]
    rows = [_COLUMNS, *([_shown(entry.get(name)) for name in _COLUMNS] for entry in shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for fault in audit.faults:
        print(fault)
    state = f"{len(audit.faults)} faults" if audit.faults else "whole"
    print(f"{len(audit.entries)} lines, {state}; the last one's hash is {audit.last}")
    return audit.faults


def _shown(value: Any) -> str:
    """Return a value as text that a terminal takes for nothing else, and rich for no markup."""
    if value is None:
        return ""
    text = f"{value:,}" if type(value) is int else f"{value:.4f}" if type(value) is float else str(value)
    return "".join(letter if letter.isprintable() else " " for letter in text).replace("[", "\\[")


def _lines(file: Any) -> Iterator[bytes]:
    while line := file.readline(_LONGEST_LINE):
        yield line


def _last(file: Any) -> tuple[dict[str, Any] | None, bool]:
    """Return the last whole line of a log, and whether nothing torn comes after it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4 * _LONGEST_LINE))
    tail = file.read()
    file.seek(0, os.SEEK_END)
    for line in reversed(tail.splitlines(keepends=True)):
        entry = _entry(line)
        if entry is not None:
            return entry, tail.endswith(b"\n")
    return None, not tail or tail.endswith(b"\n")


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return a line's content, or ``None`` where it is not as it was written."""
    try:
        entry = json.loads(line)
        content = {name: value for name, value in entry.items() if name != "hash"}
        whole = line.endswith(b"\n") and entry["hash"] == _hash(content)
        return entry if whole and type(entry["number"]) is int and isinstance(entry["previous"], str) else None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
