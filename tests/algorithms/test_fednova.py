"""FedNova against its normalized averaging, written out."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import CenteredClipping, FedAvg, FedNova, Quantize, RandomK, TopK
from tests.algorithms.written_out import EXECUTIONS, ROUNDS, SIZES, assert_close, batches, federated, initial
from tests.grids import in_turn
from tests.helpers import network, weights

SGD = torch.optim.SGD
OPTIMIZERS = {
    "plain": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.8, weight_decay=0.01),
    "Nesterov": partial(SGD, lr=0.05, momentum=0.8, nesterov=True),
    "dampening": partial(SGD, lr=0.05, momentum=0.8, dampening=0.4),
    "dampening alone": partial(SGD, lr=0.05, dampening=0.4),
}


def work(make, steps):
    """Return the 1-norm of a client's vector a: how far SGD moves a number whose gradient is always 1."""
    number = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = make([number])
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for _ in range(steps):
        number.grad = torch.ones_like(number)
        optimizer.step()
    return -number.item() / optimizer.param_groups[0]["lr"]


def reference(make, rounds=ROUNDS, epochs=1):
    model = initial()
    for ids in rounds:
        shares = torch.tensor([SIZES[client] for client in ids]).double()
        shares /= shares.sum()
        norms = [work(make, epochs * len(batches(client))) for client in ids]
        effective = sum(share * norm for share, norm in zip(shares, norms, strict=True))
        ends = []
        for client in ids:
            net = network().double()
            net.load_state_dict(model)
            optimizer = make(net.parameters())
            for inputs, targets in epochs * batches(client):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
            ends.append(weights(net))
        model = {
            name: value
            - effective
            * sum(share * (value - end[name]) / norm for share, end, norm in zip(shares, ends, norms, strict=True))
            for name, value in model.items()
        }
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("name", "execution"), in_turn(OPTIMIZERS, EXECUTIONS))
def test_rounds_follow_the_paper(tmp_path, name, execution):
    ended, _ = federated(tmp_path, FedNova(), execution, optimizer=OPTIMIZERS[name], local_epochs=2)
    assert_close(ended, reference(OPTIMIZERS[name], epochs=2))


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_amount_of_work_is_the_papers(momentum, steps):
    formula = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert work(partial(SGD, lr=0.1, momentum=momentum), steps) == pytest.approx(formula)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["plain", "momentum"])
def test_equal_steps_are_federated_averaging(tmp_path, optimizer):
    settings = {"optimizer": OPTIMIZERS[optimizer], "norm": nn.LayerNorm}
    for even in (True, False):
        steps = {"local_steps": 3} if even else {}
        ended, _ = federated(tmp_path, FedNova(), **settings, **steps)
        plain, _ = federated(tmp_path, FedAvg(), **settings, **steps)
        gap = max((ended[name] - value).abs().max() for name, value in plain.items())
        assert gap < 1e-12 if even else gap > 1e-4


def test_losses_are_fed_back_in_the_units_of_the_model(tmp_path):
    """With equal steps and a schedule, the result is that of federated averaging."""
    schedule = {"scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.3)}
    uplink, settings = [TopK(0.1, error_feedback=True)], {"module": schedule, "local_steps": 3}
    ended, _ = federated(tmp_path, FedNova(), uplink=uplink, **settings)
    plain, _ = federated(tmp_path, FedAvg(), uplink=uplink, **settings)
    assert_close(ended, plain)


@pytest.mark.slow
def test_learning_rates_count(tmp_path):
    """A client with a tenth of the learning rate has done a tenth of the work."""
    slow = {client: {"lr": 0.01} for client in (1, 3)}
    ended, _ = federated(tmp_path, FedNova(), rounds=[[1, 3]], client_settings=slow)
    fast, _ = federated(tmp_path, FedNova(), rounds=[[1, 3]], optimizer=partial(SGD, lr=0.01))
    assert_close(ended, fast, 1e-12)
    start, mixed = initial(), federated(tmp_path, FedNova(), rounds=[[1, 3]], client_settings={3: {"lr": 0.01}})[0]
    ends = [federated(tmp_path, FedAvg(), rounds=[[1]])[0]]
    ends.append(federated(tmp_path, FedAvg(), rounds=[[3]], optimizer=partial(SGD, lr=0.01))[0])
    norms, shares = [0.1 * len(batches(1)), 0.01 * len(batches(3))], [SIZES[1] / 26, SIZES[3] / 26]
    effective = shares[0] * norms[0] + shares[1] * norms[1]
    for name, value in start.items():
        changes = [share * (value - end[name]) / norm for share, end, norm in zip(shares, ends, norms, strict=True)]
        torch.testing.assert_close(mixed[name], value - effective * sum(changes))


@pytest.mark.slow
def test_groups_have_work_of_their_own(tmp_path):
    def grouped(parameters):
        first, *rest = parameters
        return SGD([{"params": [first], "momentum": 0.0}, {"params": rest, "momentum": 0.8}], lr=0.05)

    ended, loop = federated(tmp_path, FedNova(), rounds=[[0, 1]], optimizer=grouped)
    ends = [federated(tmp_path, FedAvg(), rounds=[[client]], optimizer=grouped)[0] for client in (0, 1)]
    for name, value in initial().items():
        momentum = 0.0 if name == "0.weight" else 0.8
        norms = [work(partial(SGD, lr=0.05, momentum=momentum), len(batches(client))) for client in (0, 1)]
        changes = [(value - end[name]) / norm for end, norm in zip(ends, norms, strict=True)]
        effective = (2 * norms[0] + norms[1]) / 3
        torch.testing.assert_close(ended[name], value - effective * (2 * changes[0] + changes[1]) / 3)
    _, plain = federated(tmp_path, FedAvg(), rounds=[[0, 1]], optimizer=grouped)
    assert 2 * 16 <= loop.ledger.total_up - plain.ledger.total_up <= 2 * (16 + 100)
    assert loop.ledger.total_down == plain.ledger.total_down


@pytest.mark.slow
def test_a_round_cut_short_counts_the_steps_that_were_made(tmp_path):
    """Client 1 makes all of its 3 steps, client 0 two of its 5."""
    ended, _ = federated(tmp_path, FedNova(), rounds=[[1, 2]], trainer_settings={"max_steps": 5, "max_epochs": -1})
    cut = {2: 2, 1: 3}
    ends = [federated(tmp_path, FedAvg(), rounds=[[client]], local_steps=steps)[0] for client, steps in cut.items()]
    total = SIZES[1] + SIZES[2]
    effective = (2 * SIZES[2] + 3 * SIZES[1]) / total
    for name, value in initial().items():
        change = SIZES[2] * (value - ends[0][name]) / 2 + SIZES[1] * (value - ends[1][name]) / 3
        torch.testing.assert_close(ended[name], value - effective * change / total)


@pytest.mark.slow
def test_buffers_are_averaged(tmp_path):
    ended, _ = federated(tmp_path, FedNova(), norm=nn.BatchNorm1d, rounds=ROUNDS[1:2])
    plain, _ = federated(tmp_path, FedAvg(), norm=nn.BatchNorm1d, rounds=ROUNDS[1:2])
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(ended[name], plain[name])
    assert not torch.allclose(ended["1.weight"], plain["1.weight"])


def test_without_a_learning_rate_nothing_changes(tmp_path):
    ended, _ = federated(tmp_path, FedNova(), optimizer=partial(SGD, lr=0.0))
    assert_close(ended, initial(), 0.0)


@pytest.mark.parametrize("uplink", [[Quantize(4)], [RandomK(0.3, unbiased=True)], [TopK(0.1, error_feedback=True)]])
def test_codecs_leave_the_amount_of_work_alone(tmp_path, uplink):
    algorithm, seen = FedNova(), []
    receive = algorithm.receive

    def received(server, client, message, weight):
        seen.append((client.id, message.tensors["fednova.norms"].item()))
        receive(server, client, message, weight)

    algorithm.receive = received
    federated(tmp_path, algorithm, rounds=ROUNDS[:2], uplink=uplink)
    assert seen == [(client, pytest.approx(0.1 * len(batches(client)))) for ids in ROUNDS[:2] for client in ids]


@pytest.mark.slow
def test_refusals(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"FedNova.*aggregator=CenteredClipping\(\)"):
        federated(tmp_path, FedNova(), aggregator=CenteredClipping())
    with pytest.raises(MisconfigurationException, match=r"FedNova.*torch\.optim\.SGD"):
        federated(tmp_path, FedNova(), optimizer=torch.optim.Adam)
    with pytest.raises(MisconfigurationException, match=r"1.*optimizer_state='reset'"):
        federated(tmp_path, FedNova(), optimizer=OPTIMIZERS["momentum"], optimizer_state="keep")
    ended, _ = federated(tmp_path, FedNova(), optimizer_state="keep")
    assert_close(ended, reference(OPTIMIZERS["plain"]))
