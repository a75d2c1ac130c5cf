"""Free memory of a device, within the limits of the process's container.

`DeviceData` decides by it where samples are kept, and `chunk_size_that_fits` how many clients step together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_GUESSED_MEMORY = 4 * 2**30
_CONTROL_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory(device: torch.device) -> int:
    """Free bytes on a device; a modest guess if the system does not report them."""
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    module: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(module, "mem_get_info"):
        free = module.mem_get_info(device)[0]
        if hasattr(module, "memory_reserved"):
            # Memory that torch has reserved and does not use is free as well.
            free += module.memory_reserved(device) - module.memory_allocated(device)
        return free
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):
        free = _GUESSED_MEMORY
    return min([free, *_free_in_containers(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _free_in_containers(root: Path, groups: Path) -> Iterator[int]:
    """Free bytes in each control group (cgroup) with a limit that this process belongs to, such as its container."""
    try:
        paths = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in paths:
        # cgroup version 2 lists no controllers. Inside a container, its own group often appears as the root.
        if controllers in ("", "memory"):
            base, names = root / controllers, _CONTROL_FILES[controllers]
            own = Path(path.lstrip("/"))
            for folder in dict.fromkeys(base / each for each in (own, *own.parents)):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    limit, used = (int((folder / name).read_text()) for name in names[:2])
                    stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    # The cache of inactive files is reclaimed when memory is short.
                    yield max(0, limit - used + int(stats[names[2]]))
