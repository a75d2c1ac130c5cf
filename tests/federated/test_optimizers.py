"""Which optimizers clients may step together with, and the states in which these start."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FedAvg, FederatedLoop
from lightning_lowrank.federated import optimizers, register_elementwise
from lightning_lowrank.federated.optimizers import acts_elementwise, fresh_state
from tests.federated.execution.runs import OPTIMIZERS, assert_close, both, run
from tests.helpers import Module, weights


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a mixture of momentum and gradient."""

    def __init__(self, parameters, lr=0.01, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(parameter)
                state["step"] += 1
                parameter.sub_(group["lr"] * state["momentum"].lerp(parameter.grad, 1 - first).sign())
                state["momentum"].lerp_(parameter.grad, 1 - second)
        return loss


class Doubled(torch.optim.SGD):
    """A user's own variant of one of torch's."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(0.99)
        return loss


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(optimizers, "_ELEMENTWISE", list(optimizers._ELEMENTWISE))


@pytest.mark.medium
def test_a_registered_optimizer_steps_clients_together(tmp_path, registry):
    with pytest.raises(MisconfigurationException, match=r"Lion is not known .*register_elementwise"):
        run(tmp_path, "vectorized", module=partial(Module, optimizer=Lion))
    assert register_elementwise(Lion) is Lion
    ends = both(tmp_path, module=partial(Module, optimizer=Lion), optimizer_state="keep")
    assert ends[1][1].execution == "vectorized"


@pytest.mark.medium
@pytest.mark.parametrize("kept", ["reset", "keep"])
def test_subclasses_of_known_optimizers_step_clients_together(tmp_path, kept):
    both(tmp_path, module=partial(Module, optimizer=partial(Doubled, lr=0.05, momentum=0.9)), optimizer_state=kept)


def test_an_unknown_optimizer_makes_auto_train_one_after_another(tmp_path, capsys):
    _, loop, _ = run(tmp_path, "auto", module=partial(Module, optimizer=Lion))
    assert loop.rounds.execution.name == "sequential"
    assert "Lion is not known to act on each number alone" in " ".join(capsys.readouterr().out.split())


def test_what_is_registered_must_be_a_class_of_optimizers(registry):
    for wrong in (Lion([nn.Parameter(torch.zeros(1))]), nn.Linear, "Lion"):
        with pytest.raises(TypeError, match="kind must be a class"):
            register_elementwise(wrong)


def test_what_acts_on_each_number_alone():
    parameters = [nn.Parameter(torch.ones(2, 3))]
    assert all(acts_elementwise(make(parameters)) for make in OPTIMIZERS.values())
    assert acts_elementwise(Doubled(parameters, lr=0.1))
    assert not acts_elementwise(torch.optim.LBFGS(parameters))
    assert not acts_elementwise(torch.optim.Adafactor(parameters))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fresh_state_is_that_of_a_new_optimizer(optimizer):
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    new, used = (OPTIMIZERS[optimizer](parameters) for _ in range(2))
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    used.step()
    fresh = fresh_state(used)
    assert fresh.keys() == new.state.keys()
    for parameter, state in new.state.items():
        assert_close(state, fresh[parameter], tolerance=0)


def test_an_option_that_no_optimizer_has_is_named(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"client 1: the optimizer has no option 'rate', but \['betas'"):
        run(
            tmp_path,
            "sequential",
            module=partial(Module, optimizer=Lion),
            client_settings={1: {"rate": 0.1}},
            participants=[[0]],
        )
    assert FederatedLoop(FedAvg(), clients=2, client_settings={1: {"rate": 0.1}}).options_of(1) == {"rate": 0.1}


@pytest.mark.medium
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_yaml_lists_are_the_tuples_that_optimizers_have(tmp_path, execution):
    adam = partial(Module, optimizer=partial(torch.optim.AdamW, lr=0.01))
    as_list, as_tuple = (
        run(tmp_path, execution, module=adam, client_settings={1: {"betas": betas}})[0]
        for betas in ([0.5, 0.9], (0.5, 0.9))
    )
    assert_close(weights(as_list), weights(as_tuple), tolerance=0)
