import functools
import gc
import importlib.metadata
import random
import zlib

import numpy as np
import pytest

from tests.seeding import seed_torch

# Each Trainer asks for the callbacks that installed packages register, and reads the metadata of all of them for that.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report):
    """Fail for a test file that cannot be imported: it is skipped as a doctest, and its tests are not found then."""
    if report.skipped and report.nodeid.startswith("tests/") and "unable to import" in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} cannot be imported, so that none of its tests would run"


def pytest_collection():
    """Import without garbage collections, each of which walks through all that is there by then."""
    gc.disable()


FIRST = ("tests/flower/test_network.py", "tests/test_strict_device.py", "tests/docs/test_pages.py")
"""Files of the longest tests: begun last, one of them would run on while other processes have nothing left to do."""


def pytest_collection_modifyitems(items):
    """Begin with the longest tests."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish():
    """Keep what was imported out of later garbage collections, which would walk through all of it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_seeds(monkeypatch, request):
    """Seed the global generators by the test's name, so that it does the same alone and after any other.

    seed_everything leaves its seed in the environment as well, where the next test's callbacks would find it.
    """
    seed = zlib.crc32(request.node.nodeid.encode())
    seed_torch(seed), np.random.seed(seed), random.seed(seed)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.delenv("PL_GLOBAL_SEED")
