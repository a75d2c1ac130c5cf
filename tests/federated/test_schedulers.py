"""Schedulers that step once an epoch step per round, whatever else counts steps within a client."""

from functools import partial

import pytest
import torch

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, ProjectedSGD
from lightning_lowrank.federated import optimizers
from tests.helpers import Data, Module, fit, trainer


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(ProjectedSGD, rank=1)])
def test_a_decay_each_round_is_kept_where_the_last_client_is_not_the_longest(tmp_path, optimizer):
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    module = Module(optimizer=partial(optimizer, lr=0.1), scheduler=decay)
    loop = FederatedLoop(FedAvg(), partition=FromIndices([range(80), range(80, 103)]), summary=False)
    run = trainer(tmp_path, loop)
    fit(run, module, Data())
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.1 * 0.5**3]


class Counted(torch.optim.SGD):
    """Counts steps in its groups, as schedule-free optimizers and Prodigy do, and says what it found."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.seen = []
        for group in self.param_groups:
            group["k"], group["in_place"] = 0, torch.zeros(())

    def step(self, closure=None):
        loss = super().step(closure)
        group = self.param_groups[0]
        self.seen.append([group["k"], int(group["in_place"]), "late" in group])
        for group in self.param_groups:
            group["k"] += 1
            group["in_place"] += 1
            group["late"] = True
        return loss


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_what_an_optimizer_counts_in_its_groups_is_the_clients_own(tmp_path, monkeypatch, policy, scheduled):
    monkeypatch.setattr(optimizers, "_ELEMENTWISE", [])
    each_step = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    module = Module(optimizer=partial(Counted, lr=0.1), scheduler=each_step if scheduled else None, interval="step")
    loop = FederatedLoop(
        FedAvg(), clients=2, local_steps=2, optimizer_state=policy, summary=False, execution="sequential"
    )
    run = trainer(tmp_path, loop)
    fit(run, module, Data())
    first = [[0, 0, False], [1, 1, True]]
    later = first if policy == "reset" else [[2, 2, True], [3, 3, True]]
    assert run.optimizers[0].seen[:8] == [*first, *first, *later, *later]
    rate = 0.1 * 0.5 ** (2 * run.current_epoch) if scheduled else 0.1
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)
