from pathlib import Path

import torch

from tests.strict_device.device import NAME


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    # These tests need the device; `tests/test_strict_device.py` runs them. The plugin installs it after this is read.
    return (collection_path.name.startswith("test_") and not hasattr(torch, NAME)) or None
