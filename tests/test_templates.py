"""The templates for contributors keep the contract of what they are templates for."""

import importlib.util
from pathlib import Path

import pytest

from lightning_lowrank import testing

FOLDER = Path(__file__).parents[1] / "docs" / "templates"
CHECKS = {
    "aggregator": lambda module: testing.check_aggregator(module.MeanAroundMedian(), byzantine=3),
    "method": lambda module: testing.check_algorithm(module.FedCM, testing.Claims(plain=None, same_bytes=False)),
    "codec": lambda module: testing.check_codec(module.Linear8()),
    "factorization": lambda module: testing.check_factorization(module.Diagonal()),
    "stage": lambda module: testing.check_stage(module.UpdateNorms),
    "partition": lambda module: testing.check_partition(module.PowerLaw(1.5)),
}


def test_every_template_is_checked():
    assert {path.stem for path in FOLDER.glob("*.py")} == CHECKS.keys()


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.slow
def test_template(name):
    path = FOLDER / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"template_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    CHECKS[name](module)
