"""Processor time of tests by family: ``pytest -p tests.benchmarks.core_seconds``.

A pytest plugin, also under pytest-xdist. A test's time is that of its process and of the processes that it started and
waited for, fixtures included. A table by family (a folder of ``tests``, or a file that lies in none) closes the report;
``--core-seconds-file FILE`` writes each test's seconds as JSON too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = pytest.StashKey[dict[str, float]]()
_LAST = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core-seconds-file", type=Path, help="JSON file for the processor seconds of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SECONDS] = {}


def _spent() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_LAST] = _spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    now = _spent()
    # An attribute of a report reaches the process that collects reports; user_properties would come with each phase.
    report.core_seconds = now - item.stash.get(_LAST, now)
    item.stash[_LAST] = now
    return report


class _Sums:
    """Sums the phases of each test in the process that receives reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.seconds = config.stash[SECONDS]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + getattr(report, "core_seconds", 0.0)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Sums(session.config))


def family(nodeid: str) -> str:
    """The folder below ``tests`` that a test lies in, or its file.

    Example:
        >>> family("tests/federated/data/test_rows.py::test_a[b/c]"), family("tests/test_zoo.py::test_b")
        ('federated', 'test_zoo.py')
        >>> family("lightning_lowrank/seeding.py::lightning_lowrank.seeding.generator")
        'doctests'
    """
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if parts[0] == "tests" else "doctests"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    seconds = config.stash[SECONDS]
    sums: dict[str, list[float]] = {}
    for nodeid, spent in seconds.items():
        sums.setdefault(family(nodeid), []).append(spent)
    terminalreporter.section("processor seconds by family")
    for name, spent in sorted(sums.items(), key=lambda entry: -sum(entry[1])):
        terminalreporter.write_line(f"{name:32} {len(spent):6} cases {sum(spent):9.1f} s")
    terminalreporter.write_line(f"{'all':32} {len(seconds):6} cases {sum(seconds.values()):9.1f} s")
    file = config.getoption("--core-seconds-file")
    if file is not None and not hasattr(config, "workerinput"):
        file.write_text(json.dumps(seconds, indent=0, sort_keys=True))
