"""FedAvg of random coordinates against plain PyTorch, and what becomes of those that are not sent."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FedAvg, RandomCoordinates
from lightning_lowrank.seeding import derive_seed, generator
from tests.algorithms import plain
from tests.helpers import Module, network


def drawn(direction, number, client, share, count):
    seed = derive_seed(0, "coordinates", direction, number, client)
    mask = torch.zeros(count, dtype=torch.bool)
    mask[torch.randperm(count, generator=generator(seed, "random-k"))[: round(share * count)]] = True
    return mask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("down", "up", "execution"), [(0.5, 0.1, "sequential"), (1.0, 0.3, "vectorized"), (0.7, 1.0, "sequential")]
)
def test_rounds_in_plain_pytorch(tmp_path, down, up, execution):
    module, _ = plain.fitted(tmp_path, RandomCoordinates(down, up), execution=execution)
    net = plain.initial()
    model = plain.flat(net)
    own, count = dict.fromkeys(range(4), model), model.numel()
    unsent = 0
    for number, clients in enumerate(plain.PARTICIPANTS):
        sums, weight = torch.zeros_like(model), torch.zeros_like(model)
        for client in clients:
            plain.load(net, torch.where(drawn("down", number, client, down, count), model, own[client]))
            own[client] = plain.train(net, client)
            sent = drawn("up", number, client, up, count)
            sums[sent] += plain.SIZES[client] * own[client][sent]
            weight[sent] += plain.SIZES[client]
        unsent += int((weight == 0).sum())
        model = torch.where(weight > 0, sums / weight, model)
    assert unsent > 0 or up == 1
    torch.testing.assert_close(plain.flat(module), model, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d])
def test_whole_it_is_fedavg(tmp_path, norm):
    ends = [
        plain.fitted(tmp_path, algorithm, module=lambda: Module(network(norm=norm)))[0]
        for algorithm in (RandomCoordinates(1.0, 1.0), FedAvg())
    ]
    plain.close(*ends)


def test_bytes(tmp_path):
    _, loop = plain.fitted(tmp_path, RandomCoordinates(0.5, 0.1))
    numbers = plain.flat(network()).numel()
    transfers, header = sum(map(len, plain.PARTICIPANTS)), 400
    assert 8 * 0.1 * numbers < loop.ledger.total_up / transfers < 8 * 0.1 * numbers + header
    assert 8 * 0.5 * numbers < loop.ledger.total_down / transfers < 8 * 0.5 * numbers + header
    assert loop.ledger.total_idle == 0


@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.5, -1.0), (1.5, 0.5)])
def test_refuses_what_is_no_share(shares):
    with pytest.raises(MisconfigurationException, match=r"share_(down|up) must be above 0 and at most 1, but is"):
        RandomCoordinates(*shares)
