"""Optional dependencies, and the package's own requirement by path or URL, because it is not on PyPI."""

from __future__ import annotations

import json
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from lightning_lowrank.configuration import misconfigured

_PACKAGE = "lightning_lowrank"


def how_to_install(extra: str) -> str:
    """The command that installs an extra, for messages."""
    return f'pip install ".[{extra}]" in the checkout of {_PACKAGE}'


def import_extra(library: str, user: str, extra: str | None = None) -> ModuleType:
    """Import a library, or raise an error with the command to install its extra (default: of the library's name)."""
    try:
        return import_module(library)
    except ImportError as error:
        extra = extra or library.partition(".")[0]
        raise misconfigured(f"{user} needs {library}: {how_to_install(extra)} ({error})") from error


def requirements(extra: str) -> list[str]:
    """The package's requirement with an extra, by the path or URL from which it was installed.

    Example:
        >>> all(each.startswith("lightning_lowrank[flower] @ ") for each in requirements("flower"))
        True

    Returns:
        The requirement; empty if its source is unknown, so that nothing is fetched by name from an index.
    """
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return [f"{_PACKAGE}[{extra}] @ {checkout.as_uri()}"]
    try:
        origin = json.loads(metadata.distribution(_PACKAGE).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return []
    source, vcs = origin.get("url"), origin.get("vcs_info")
    if not source:
        return []
    return [f"{_PACKAGE}[{extra}] @ " + (f"{vcs['vcs']}+{source}@{vcs['commit_id']}" if vcs else source)]
