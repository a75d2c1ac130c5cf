"""Runs that are killed at random moments and resumed are those that were not: `tests/benchmarks/kills.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "benchmarks" / "kills.py"


@pytest.mark.nightly
def test_no_killed_run_differs(tmp_path):
    command = [sys.executable, str(SCRIPT), "--kills", "200", "--json", str(tmp_path / "kills.json")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
