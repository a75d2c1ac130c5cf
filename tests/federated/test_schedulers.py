"""Schedulers that step once an epoch step per round, whatever else counts steps within a client."""

from functools import partial

import pytest
import torch

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, ProjectedSGD
from tests.helpers import Data, Module, fit, trainer


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(ProjectedSGD, rank=1)])
def test_a_decay_each_round_is_kept_where_the_last_client_is_not_the_longest(tmp_path, optimizer):
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    module = Module(optimizer=partial(optimizer, lr=0.1), scheduler=decay)
    loop = FederatedLoop(FedAvg(), partition=FromIndices([range(80), range(80, 103)]), summary=False)
    run = trainer(tmp_path, loop)
    fit(run, module, Data())
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.1 * 0.5**3]
