"""A pytest plugin: trainers that would use the CPU use the strict device.

    python -m pytest -p tests.strict_device.plugin tests/federated/test_loop.py

``torch.testing.assert_close`` compares tensors of two devices. A trainer that names a strategy, plugins or several devices stays as it is. Tests that the marker ``cpu_only`` says
cannot run on another device are skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.strict_device import device


def pytest_configure(config: pytest.Config) -> None:
    if device.unsupported_reason():
        raise pytest.UsageError(device.unsupported_reason())
    device.install()
    original = pl.Trainer.__init__

    @functools.wraps(original)
    def on_device(self: pl.Trainer, *arguments: Any, **keywords: Any) -> None:
        alone = keywords.get("strategy", "auto") == "auto" and keywords.get("devices", "auto") in ("auto", 1)
        usual = keywords.get("accelerator", "auto") in ("cpu", "auto") and keywords.get("plugins") is None
        if not arguments and alone and usual:
            keywords["accelerator"] = device.StrictAccelerator()
            keywords["strategy"] = SingleDeviceStrategy(device=torch.device(device.NAME, 0))
        original(self, *arguments, **keywords)

    pl.Trainer.__init__ = on_device  # type: ignore[method-assign]
    torch.testing.assert_close = functools.partial(torch.testing.assert_close, check_device=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("cpu_only")
    if marker is not None:
        pytest.skip(f"on the CPU only: {marker.args[0]}")
