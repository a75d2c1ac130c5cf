"""`tests/benchmarks/experiments.py` runs, and the loops written by hand are the same experiments as ours."""

import importlib
import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_lowrank.federated.execution import auto
from tests.benchmarks.contending import Rounds
from tests.benchmarks.experiments_contenders import ours, plain, prepare
from tests.benchmarks.experiments_contenders.ours import run_recipe
from tests.benchmarks.experiments_contenders.trial import Plan, Trial
from tests.helpers import SHARED_DATA, needs_shared_data, weights

ROOT = Path(__file__).parents[1]
# FedSLoP's loop averages weights where ours averages coefficients.
LARGEST_DIFFERENCE = {"fedavg_m": 0.0, "fedslop": 1e-6, "fedmud": 0.0, "flute": 0.0}


class Untimed(Rounds):
    """Lets a contender run in this process."""

    def __init__(self) -> None: ...

    def begin(self) -> None: ...

    def end(self) -> None: ...


@pytest.fixture
def contending_here(monkeypatch):
    """Name recipes from the repository, and undo what a contender sets for its whole process."""
    monkeypatch.chdir(ROOT)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.nightly
@pytest.mark.slow
@needs_shared_data("MNIST")
def test_the_script_compares_its_contenders(tmp_path):
    file = tmp_path / "figures.json"
    script = ROOT / "tests" / "benchmarks" / "experiments.py"
    words = ["--quick", "--threads", "1", "--root", str(SHARED_DATA), "--only", "fedavg_m", "--json", str(file)]
    words += ["--contenders", "plain", "default"]
    subprocess.run([sys.executable, str(script), *words], check=True, cwd=ROOT)
    (found,) = json.loads(file.read_text())["experiments"]
    assert not found["left_out"]
    assert set(found["contenders"]) == {"plain", "default"}
    assert found["contenders"]["default"]["difference"] == 0


@pytest.mark.nightly
@pytest.mark.slow
@needs_shared_data("MNIST")
@needs_shared_data("FashionMNIST")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("experiment", LARGEST_DIFFERENCE)
def test_every_experiment_is_that_of_the_loop_written_by_hand(tmp_path, contending_here, experiment):
    contenders = {"plain": (plain, []), "default": (ours, []), "auto": (ours, ["--federated.execution", "auto"])}
    if experiment == "fedmud":
        # Its batch normalisation amplifies rounding to 0.03 in single precision: the next test compares it in double.
        del contenders["auto"]
    accuracies, ends = {}, {}
    for name, (script, words) in {"prepare": (prepare, []), **contenders}.items():
        folder = tmp_path / name
        folder.mkdir()
        trial = Trial(name, str(SHARED_DATA), rounds=2, experiment=experiment, folder=str(folder), quick=True)
        found = script.run(replace(trial, arguments=words), Untimed())
        if name in contenders:
            accuracies[name], ends[name] = found["accuracies"], torch.load(folder / "final.pt")
    assert len(accuracies["plain"]) == 2
    for name in contenders:
        largest = 1e-4 if name == "auto" else LARGEST_DIFFERENCE[experiment]
        torch.testing.assert_close(ends[name], ends["plain"], rtol=0, atol=largest)
    assert accuracies["default"] == pytest.approx(accuracies["plain"], abs=1e-6)


@pytest.mark.nightly
@pytest.mark.slow
@needs_shared_data("FashionMNIST")
@pytest.mark.filterwarnings("ignore")
def test_every_execution_of_fedmud_is_the_sequential_one(tmp_path, monkeypatch, contending_here):
    ends = []
    monkeypatch.setattr(auto, "_fastest", lambda *arguments: ("sequential", True, "channels last"))
    for execution in ("sequential", "vectorized", "auto"):
        trial = Trial("ours", str(SHARED_DATA), rounds=2, experiment="fedmud", folder=str(tmp_path), quick=True)
        words = ["--federated.execution", execution, "--trainer.precision", "64-true"]
        words += ["--trainer.enable_model_summary", "false", "--trainer.logger", "false", "--data.limit_samples", "300"]
        ends.append(weights(run_recipe(trial, [], words).model))
    for end in ends[1:]:
        torch.testing.assert_close(ends[0], end, rtol=1e-12, atol=1e-12)


def test_accuracies_may_differ_as_far_as_rounding_alone_makes_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    experiments = importlib.import_module("experiments")
    outcome = experiments.Outcome("fedmud", block=1)

    def reach(name: str, *accuracies: float) -> None:
        outcome.runs[name] = experiments.Run(found={"accuracy": accuracies[-1], "accuracies": list(accuracies)})

    reach("plain", 0.5, 0.74)
    reach("auto", 0.5, 0.75)
    assert not outcome.same_accuracy
    reach("perturbed", 0.52, 0.74)
    assert outcome.same_accuracy
    assert outcome.tolerance == pytest.approx(0.02)
    reach("auto", 0.5, 0.77)
    assert not outcome.same_accuracy


def test_the_perturbed_loop_begins_one_rounding_away(tmp_path):
    start = [torch.tensor([1.0, -2.0, 0.0]), torch.tensor(3)]
    torch.save(tuple(Plan(start, [], [], [], {})), tmp_path / "plan.pt")
    plan = Trial("perturbed", "", experiment="fedmud", folder=str(tmp_path / "perturbed")).plan()
    one = torch.nextafter(start[0], start[0] * 2)
    torch.testing.assert_close(plan.start, [one, start[1]], rtol=0, atol=0)
