"""The package's daily tests on the strict device, in processes of their own: it stays for the life of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.strict_device.device import unsupported_reason

ROOT = Path(__file__).parents[1]
FOLDERS = ("algorithms", "layers", "callbacks", "optim", "aggregation", "lora", "compression")
# What moves tensors between devices, draws there, or keeps something from one round to the next.
CHOSEN = (
    "algorithms/test_contract.py",
    "callbacks/test_convergence_monitor.py",
    "federated/data/test_device.py",
    "federated/execution/test_memory.py",
    "federated/execution/test_vectorized.py",
    "federated/test_coordinator.py",
    "federated/test_copies.py",
    "federated/test_personal.py",
    "federated/test_randomness.py",
    "federated/test_resume.py",
    "federated/test_state.py",
    "strict_device",
)
# A session takes as long to start as many of these tests.
PIECES = {"chosen": CHOSEN, "own": ["strict_device"], "rounds": ["federated"], "parts": FOLDERS}


@pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
@pytest.mark.parametrize(
    "piece",
    [pytest.param(name, marks=pytest.mark.slow if name == "chosen" else pytest.mark.nightly) for name in PIECES],
)
def test_it_runs_on_the_strict_device(tmp_path, piece):
    plugins = ["-p", "tests.strict_device.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins]
    if piece == "own":
        command += ["-m", "slow or nightly"]
    # With folders of its own a session would delete those of earlier sessions, which takes longer than some of these.
    command += ["--basetemp", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # It would take this process for a worker of the outer run, and a port that a test before it has left open.
    environment = {name: value for name, value in environment.items() if not name.startswith(("PYTEST_", "MASTER_"))}
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in PIECES[piece])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"
