"""The templates for contributors keep the contract of what they are templates for."""

import importlib.util
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FederatedLoop, testing
from tests.helpers import Data, Module, fit, trainer, warmed_up

FOLDER = Path(__file__).parents[1] / "docs" / "templates"
CHECKS = {
    "aggregator": lambda module: testing.check_aggregator(module.MeanAroundMedian(), byzantine=3),
    "method": lambda module: testing.check_algorithm(module.FedCM, testing.Expected(plain=None, same_bytes=False)),
    "codec": lambda module: testing.check_codec(module.Linear8()),
    "factorization": lambda module: testing.check_factorization(module.Diagonal()),
    "stage": lambda module: testing.check_stage(module.UpdateNorms),
    "partition": lambda module: testing.check_partition(module.PowerLaw(1.5)),
}


def test_every_template_is_checked():
    assert {path.stem for path in FOLDER.glob("*.py")} == CHECKS.keys()


def template(name):
    path = FOLDER / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"template_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.slow
def test_template(name):
    CHECKS[name](template(name))


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_the_method_takes_unused_parameters_and_a_warm_up_from_zero(tmp_path, execution):
    end, loop = warmed_up(tmp_path, template("method").FedCM(), execution)
    assert all(value.isfinite().all() for value in loop.server.state["direction"].values())
    assert torch.equal(end["unused.weight"], torch.ones(3))
    assert loop.server.state["direction"]["net.0.weight"].any()


def test_the_method_refuses_several_groups(tmp_path):
    def groups(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1)

    loop = FederatedLoop(template("method").FedCM(), clients=3, summary=False)
    with pytest.raises(MisconfigurationException, match="2 groups"):
        fit(trainer(tmp_path, loop), Module(optimizer=groups), Data())
