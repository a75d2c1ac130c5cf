"""What neither the metrics nor the configuration of a run say: wall time, clients' samples, ranks.

`FederatedLoop` writes them into a file beside a `CSVLogger`'s metrics, and ``lightning-lowrank report`` reads it. They
are no logged metrics, because a run's metrics are the same each time it is repeated, and its wall time is not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

NAME = "facts.json"
_LARGEST = 2**16


def write_facts(folder: Path, facts: dict[str, float | list[float]]) -> None:
    """Write numbers, or lists of them, by name; a file that is there is replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{NAME}.{os.getpid()}.part"
    part.write_text(json.dumps(facts, indent=1) + "\n")
    part.replace(folder / NAME)


def read_facts(folder: Path) -> dict[str, list[float]]:
    """Return what `write_facts` wrote, each as a list; nothing of what is no finite number.

    A folder may come from anyone.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_facts(folder, {"seconds": 1.5, "ranks": [2, 4]})
        >>> read_facts(folder)
        {'seconds': [1.5], 'ranks': [2, 4]}
    """
    file = folder / NAME
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return {}
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    facts = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        numbers = value if isinstance(value, list) else [value]
        if numbers and all(type(each) in (int, float) and abs(each) < 1e300 for each in numbers):
            facts[name] = numbers
    return facts
