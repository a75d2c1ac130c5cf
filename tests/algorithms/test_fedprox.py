"""FedProx against its proximal steps, written out."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FedAvg, FedProx
from tests.algorithms.written_out import (
    EXECUTIONS,
    ROUNDS,
    SIZES,
    Partly,
    assert_close,
    batches,
    federated,
    gradient,
    initial,
    mean,
)
from tests.helpers import Module, assert_same, weights


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rounds_follow_the_paper(tmp_path, execution):
    ended, _ = federated(tmp_path, FedProx(mu=0.7), execution, local_epochs=2)
    values = initial()
    for ids in ROUNDS:
        clients = []
        for client in ids:
            own = values
            for batch in 2 * batches(client):
                slope = gradient(own, batch)
                own = {name: own[name] - 0.1 * (slope[name] + 0.7 * (own[name] - values[name])) for name in own}
            clients.append(own)
        values = mean(clients, [SIZES[client] for client in ids])
    assert_close(ended, values)


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_without_the_term_it_is_federated_averaging(tmp_path, execution):
    ended, _ = federated(tmp_path, FedProx(mu=0.0), execution, norm=nn.BatchNorm1d)
    plain, _ = federated(tmp_path, FedAvg(), execution, norm=nn.BatchNorm1d)
    assert_same(ended, plain)


@pytest.mark.slow
def test_a_strong_term_holds_clients_at_the_global_model(tmp_path):
    distances = []
    for mu in (0.0, 1.0, 9.0):
        ended, _ = federated(tmp_path, FedProx(mu), rounds=[[0, 2]], local_epochs=5)
        distances.append(sum((ended[name] - value).square().sum() for name, value in initial().items()))
    assert distances[0] > 2 * distances[1] > 4 * distances[2]


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_what_a_batch_does_not_depend_on_is_pulled(tmp_path, execution):
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.01)
    # Clients that step together must use the same parameters.
    clients = [0] if execution == "vectorized" else [0, 1]
    settings = {"net": Partly().double(), "optimizer": make, "rounds": [clients], "local_epochs": 2}
    ended, _ = federated(tmp_path, FedProx(0.7), execution, **settings)
    ends = []
    for client in clients:
        net = Partly().double()
        start, optimizer = weights(net), make(net.parameters())
        for inputs, targets in 2 * batches(client):
            optimizer.zero_grad()
            distance = sum((value - start[name]).square().sum() for name, value in net.named_parameters())
            (nn.functional.cross_entropy(net(inputs), targets) + 0.7 / 2 * distance).backward()
            optimizer.step()
        ends.append(weights(net))
    assert_close(ended, mean(ends, SIZES[: len(clients)]))


def test_what_a_step_freezes_is_not_pulled(tmp_path):
    class Freezing(Module):
        def on_train_batch_start(self, batch, batch_idx):
            self.net[0].requires_grad_(batch_idx == 0)
            self.before = self.net[0].weight.detach().clone()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert torch.equal(self.before, self.net[0].weight) == (batch_idx > 0)

    federated(tmp_path, FedProx(0.7), rounds=[[0, 1]], make_module=Freezing)


def test_refusals(tmp_path):
    for mu in (-0.1, float("inf"), float("nan")):
        with pytest.raises(MisconfigurationException, match=f"mu must be at least 0 and finite, but is {mu}"):
            FedProx(mu)

    class Two(Module):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[:2], self.net[2:])]

    with pytest.raises(MisconfigurationException, match=r"2.*configure_optimizers\(\)"):
        federated(tmp_path, FedProx(0.1), make_module=Two)
