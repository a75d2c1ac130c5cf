"""The package's daily tests on the strict device, in processes of their own: it stays for the life of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.strict_device.device import unsupported_reason

ROOT = Path(__file__).parents[1]
# A session takes as long to start as many of these tests.
PIECES = {
    "rounds": ["tests/strict_device", "tests/federated"],
    "parts": [f"tests/{name}" for name in ("algorithms", "layers", "callbacks", "optim", "aggregation", "compression")],
}


@pytest.mark.slow
@pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
@pytest.mark.parametrize("piece", PIECES)
def test_it_runs_on_the_strict_device(tmp_path, piece):
    plugins = ["-p", "tests.strict_device.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-m", "not slow and not medium"]
    # With folders of its own a session would delete those of earlier sessions, which takes longer than some of these.
    command += ["--basetemp", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # It would take this process for a worker of the outer run.
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([*command, *PIECES[piece]], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"
