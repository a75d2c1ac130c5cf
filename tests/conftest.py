import functools
import gc
import importlib.metadata

import pytest

# Each Trainer asks for the callbacks that installed packages register, and reads the metadata of all of them for that.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Fail where a test file cannot be imported, which --doctest-ignore-import-errors lets pass without its tests."""
    report = yield
    if report.skipped and "unable to import module" in str(report.longrepr):
        report.outcome = "failed"
    return report


def pytest_collection_finish():
    """Keep what was imported out of later garbage collections, which would walk through all of it."""
    gc.freeze()


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch):
    """seed_everything leaves its seed in the environment, where the next test's callbacks would find it."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.delenv("PL_GLOBAL_SEED")
