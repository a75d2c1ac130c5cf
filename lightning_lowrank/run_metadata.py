"""Metadata of a run that is neither metric nor configuration: wall time, clients' samples, ranks, versions.

`FederatedLoop` writes a file next to a `CSVLogger`'s metrics, and ``lightning-lowrank report`` reads it. The metadata
is not logged, because a run's metrics are the same each time it is repeated, and its wall time is not.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

NAME = "run_metadata.json"
_LARGEST = 2**16
_PACKAGE = "lightning_lowrank"
_SOFTWARE = ("python", "torch", "lightning", _PACKAGE, "commit")
_VERSION = re.compile(r"[\w.+-]{1,64}( with changes)?")
_SECONDS_OF_GIT = 10


@contextmanager
def replaces(part: Path, target: Path) -> Iterator[Path]:
    """A context in which ``part`` is written; it replaces ``target`` at the end, and is deleted after an error."""
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write_metadata(folder: Path, values: Mapping[str, float | list[float] | Mapping[str, str]]) -> None:
    """Write numbers, lists of numbers and, as ``software``, versions; an existing file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    with replaces(folder / f".{NAME}.{os.getpid()}.part", folder / NAME) as part:
        part.write_text(json.dumps(values, indent=1) + "\n")


def read_metadata(folder: Path) -> dict[str, list[float]]:
    """The numbers that `write_metadata` wrote, each as a list; anything but finite numbers is left out.

    The file is not trusted, because a folder may come from anyone.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_metadata(folder, {"seconds": 1.5, "ranks": [2, 4]})
        >>> read_metadata(folder)
        {'seconds': [1.5], 'ranks': [2, 4]}
    """
    found = {}
    for name, value in _read(folder).items():
        numbers = value if isinstance(value, list) else [value]
        if numbers and all(type(each) in (int, float) and abs(each) < 1e300 for each in numbers):
            found[name] = numbers
    return found


def read_software(folder: Path) -> dict[str, str]:
    """The versions that `write_metadata` wrote as ``software``; anything but versions is left out."""
    stored = _read(folder).get("software")
    found = {name: stored.get(name) for name in _SOFTWARE} if isinstance(stored, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, str) and _VERSION.fullmatch(value)}


def _read(folder: Path) -> dict[str, Any]:
    file = folder / NAME
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return {}
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@cache
def software() -> dict[str, str]:
    """The versions of Python, torch, Lightning and this package in this process, by name.

    ``commit`` is the commit of this package's code, if it runs from a git checkout or was installed from one by its
    address. ``with changes`` is added if files of the package have been changed or added since.
    """
    found = {"python": platform.python_version()}
    for name in ("torch", "lightning", _PACKAGE):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = _commit_of_checkout(Path(__file__).parent) or _commit_of_installation()
    if commit:
        found["commit"] = commit
    return found


def _commit_of_checkout(folder: Path) -> str | None:
    """The commit of a folder's code; ``None`` if git does not track the folder, as in a virtual environment."""
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    status = _git(folder, "status", "--porcelain=v2", "--branch", "--", ".")
    if status is None:
        return None
    commit = re.search(r"^# branch\.oid (\w+)$", status, re.MULTILINE)
    if commit is None:
        return None
    changed = any(not line.startswith("#") for line in status.splitlines())
    return f"{commit[1]} with changes" if changed else commit[1]


def _git(folder: Path, *words: str) -> str | None:
    # Within a git hook, these variables name the hook's repository and override the folder.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Without this option, git status locks the index, and a concurrent commit would fail.
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS_OF_GIT, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _commit_of_installation() -> str | None:
    try:
        origin = json.loads(metadata.distribution(_PACKAGE).read_text("direct_url.json") or "{}")
        return str(origin["vcs_info"]["commit_id"])
    except (metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        return None
