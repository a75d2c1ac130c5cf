"""Clients together are the clients one by one, or are refused: a step of theirs is compared before the first round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import IID, FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.federated.execution import auto
from lightning_lowrank.models import ResNet18
from tests.federated.execution.random_modules import CLIENTS, OPTIMIZERS, Drawn, outcome, trained
from tests.federated.execution.runs import assert_close
from tests.grids import daily, in_turn
from tests.helpers import Data, Module, assert_same, fit, network, trainer, weights

DIFFERS = {
    "penalty of Parameters": r"its loss is .* for the client alone",
    "penalty by the optimizer": r"its loss is .* for the client alone",
    "is_leaf": r"its loss is .* for the client alone",
    "grad": r"its loss is .* for the client alone",
    "count": r"its loss is .* for the client alone",
    "random": "it draws from random or NumPy",
    "numpy": "it draws from random or NumPy",
    "reversal": "it registers a hook on a tensor",
    "mask": "depends on a tensor's values",
}
SAME = (
    *("penalty of all", "penalty of the trained", "penalty of the state", "anchor", "loss.requires_grad", "teacher"),
    *("batch_idx", "current_epoch", "samples", "a scale", "where", "in place", "max norm", "moving mean"),
    *("assigned mean", "logs by a size", "logs", "logs a sum", "logs a maximum"),
)


def module_of(part: str) -> Drawn:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return Drawn(net, [part], optimizer=OPTIMIZERS["SGD"])


@daily(*map("-".join, in_turn(SAME, ("even", "uneven"))))
@pytest.mark.parametrize("clients", ["even", "uneven"])
@pytest.mark.parametrize("part", SAME)
def test_what_a_step_does_is_done_for_each_client(tmp_path, part, clients):
    expected, figures, _ = trained(tmp_path, lambda: module_of(part), CLIENTS[clients], "sequential", 0)
    found, others, execution = trained(tmp_path, lambda: module_of(part), CLIENTS[clients], "vectorized", 0)
    assert execution == "vectorized"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    assert others == pytest.approx(figures, rel=1e-4)


@pytest.mark.parametrize("part", DIFFERS)
def test_what_is_another_step_together_is_refused(tmp_path, part):
    with pytest.raises(MisconfigurationException, match=DIFFERS[part]):
        trained(tmp_path, lambda: module_of(part), CLIENTS["uneven"], "vectorized", 0)


@daily()
@pytest.mark.parametrize("part", DIFFERS)
def test_auto_trains_it_one_by_one(tmp_path, part):
    expected, figures, _ = trained(tmp_path, lambda: module_of(part), CLIENTS["uneven"], "sequential", 0)
    found, others, execution = trained(tmp_path, lambda: module_of(part), CLIENTS["uneven"], "auto", 0)
    assert execution == "sequential"
    assert_same(found, expected)
    assert others == pytest.approx(figures, rel=1e-5)


class Dropping(Module):
    def __init__(self) -> None:
        super().__init__(network(dropout=0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss([batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]])


class Permuting(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = torch.rand(())
        order = torch.randperm(len(batch[0]))
        return self.loss([share * batch[0] + (1 - share) * batch[0][order], batch[1]])


class Attending(Module):
    """Has fused attention, whose draws are a part of a larger operation."""

    dropout = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # A position for each feature.
        values = batch[0].unsqueeze(-1).expand(-1, -1, 4).unsqueeze(1)
        mixed = nn.functional.scaled_dot_product_attention(values, values, values, dropout_p=self.dropout)
        return self.loss([mixed.mean((1, 3)), batch[1]])


class AttendingAlone(Attending):
    dropout = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (2 if self.net[0].weight.is_leaf else 1)


class OwnDraws(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        draws = torch.Generator().manual_seed(batch_idx)
        return self.loss([batch[0] + torch.randn(batch[0].shape, generator=draws), batch[1]])


class ThawsLater(Module):
    """Trains a layer from the second round on, and reads then what is another thing for clients together."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.net[0].weight
        return self.loss(batch) * (1 if weight.requires_grad and not weight.is_leaf else 2)


@pytest.mark.parametrize("execution", ["vectorized", "auto"])
def test_a_step_is_compared_again_where_the_module_has_changed(tmp_path, monkeypatch, execution):
    """The fit goes on from its last checkpoint with the execution and the argument that the error names."""

    def run(execution, ckpt_path=None, **arguments):
        partition, module = FromIndices(CLIENTS["even"]), ThawsLater()
        loop = FederatedLoop(FedAvg(), partition=partition, execution=execution, summary=False, **arguments)
        checkpoints = ModelCheckpoint(tmp_path / execution, save_last=True)
        return fit(trainer(tmp_path, loop, checkpoints, max_epochs=3), module, Data(), ckpt_path=ckpt_path)

    monkeypatch.setattr(auto, "time_both", lambda *given: (2.0, 1.0))
    message = r"from round 1 on: .*its loss is .* for the client alone.*sequential.*allow_changes=\['execution'\]"
    with pytest.raises(MisconfigurationException, match=message):
        run(execution)
    resumed = run("sequential", tmp_path / execution / "last.ckpt", allow_changes=["execution"])
    assert_close(weights(resumed), weights(run("sequential")), 1e-5)


@pytest.mark.slow
def test_the_rounding_of_a_deep_network_is_no_difference(tmp_path):
    images = TensorDataset(torch.randn(32, 3, 32, 32), torch.randint(4, (32,)))
    torch.manual_seed(1)
    module = Module(ResNet18(num_classes=4))
    loop = FederatedLoop(FedAvg(), clients=4, partition=IID(), execution="vectorized", summary=False)
    fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), module, Data(images))


class Amplifies(Module):
    """Its gradients have the rounding errors of its outputs, ``times`` as large, and are ``apart`` together."""

    times, apart = 4e5, 1.03

    def loss(self, batch):
        share = 1 if self.net[0].weight.is_leaf else self.apart
        return 1 + share * torch.sin(self.times * self.net(batch[0])).mean() / self.times


@pytest.mark.parametrize(("times", "apart"), [(1e3, 1.03), (1e8, 1.5)])
def test_what_rounding_changes_may_differ_by_more(tmp_path, monkeypatch, times, apart):
    together(tmp_path, Amplifies())
    monkeypatch.setattr(Amplifies, "times", times)
    monkeypatch.setattr(Amplifies, "apart", apart)
    with pytest.raises(MisconfigurationException, match=r"the gradient of net.* for the client alone"):
        together(tmp_path, Amplifies())


def together(tmp_path: Any, module: Module, **settings: Any) -> Module:
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS["even"]), execution="vectorized", summary=False)
    return fit(trainer(tmp_path, loop, max_epochs=1, **settings), module, Data())


@pytest.mark.parametrize("module", [Dropping, Permuting, Attending])
def test_both_ways_are_given_the_same_draws(tmp_path, module):
    start = weights(module().net)
    end = weights(together(tmp_path, module()).net)
    assert not torch.equal(end["0.weight"], start["0.weight"])


class HeldDraws(Module):
    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.draws.random()


def test_draws_of_a_generator_of_the_module_are_named(tmp_path):
    with pytest.raises(MisconfigurationException, match="it draws from a generator that the module holds"):
        together(tmp_path, HeldDraws())


@pytest.mark.parametrize("module", [OwnDraws, AttendingAlone])
def test_other_steps_are_told_beside_draws(tmp_path, module):
    with pytest.raises(MisconfigurationException, match=r"its loss is .* for the client alone"):
        together(tmp_path, module())


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d, None])
def test_mixed_precision_is_that_of_a_client_alone(tmp_path, norm):
    types: dict[str, set[torch.dtype]] = {}

    class Looks(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.net[:2](batch[0])
            types.setdefault(way, set()).update((self.net[0](batch[0]).dtype, hidden.dtype, self.net[2:](hidden).dtype))
            return self.loss(batch)

    ends = []
    for way in ("sequential", "vectorized"):
        loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS["even"]), execution=way, summary=False)
        module = Looks(network(norm=norm))
        ends.append(
            weights(fit(trainer(tmp_path, loop, max_epochs=1, precision="bf16-mixed"), module, Data(shuffle=False)))
        )
    assert types["vectorized"] == types["sequential"] == {torch.bfloat16}
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-2, atol=5e-3)


def test_hooks_that_come_later_are_refused(tmp_path):
    class Late(Module):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].weight.register_hook(lambda gradient: 0 * gradient)

    loop = FederatedLoop(FedAvg(), clients=3, execution="vectorized", summary=False)
    with pytest.raises(MisconfigurationException, match=r"net\.0\.weight has a hook"):
        fit(trainer(tmp_path, loop), Late(), Data())
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        with pytest.raises(MisconfigurationException, match="a hook of all modules"):
            together(tmp_path, Module())
    finally:
        handle.remove()


def test_the_comparison_leaves_no_trace(tmp_path, monkeypatch):
    ends = []
    for compares in (True, False):
        if not compares:
            monkeypatch.setattr(auto, "difference", lambda *given: "")
        module = Module(network(norm=nn.BatchNorm1d, dropout=0.3), optimizer=OPTIMIZERS["AdamW"])
        together(tmp_path, module)
        ends.append(weights(module))
    assert_same(*ends)


def test_parameters_that_are_no_part_of_the_module_are_refused(tmp_path):
    class Listed(Module):
        def configure_optimizers(self) -> Any:
            self.losses = [nn.Linear(4, 3)]
            return torch.optim.SGD([*self.parameters(), *self.losses[0].parameters()], lr=0.1)

    loop = FederatedLoop(FedAvg(), clients=3, summary=False)
    with pytest.raises(MisconfigurationException, match=r"2 parameters, such as one of shape \[3, 4\].*Listed"):
        fit(trainer(tmp_path, loop), Listed(), Data())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_modules_drawn_at_random_are_the_same_or_refused(tmp_path, seed):
    verdict, description = outcome(tmp_path, 1_000 + seed)
    assert verdict in ("same", "refused", "none"), description


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_compiled_modules_drawn_at_random_are_the_same_or_refused(tmp_path, seed):
    verdict, description = outcome(tmp_path, 2_000 + seed, "compiled")
    assert verdict != "wrong", description
