"""EF21-P against its two lines in plain PyTorch, its error feedback, and its bytes."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import EF21P, FedAvg
from lightning_lowrank.federated import Base, ClientInfo, Server
from lightning_lowrank.seeding import derive_seed, generator
from tests.algorithms import plain
from tests.helpers import Module, network


@pytest.mark.slow
@pytest.mark.parametrize(
    ("down", "up", "execution"), [(0.1, 0.3, "sequential"), (1.0, 0.3, "vectorized"), (0.05, 1.0, "sequential")]
)
def test_rounds_follow_the_paper(tmp_path, down, up, execution):
    module, loop = plain.fitted(tmp_path, EF21P(down, up), execution=execution)
    net = plain.initial()
    model = plain.flat(net)
    copy, count = model.clone(), model.numel()
    for number, clients in enumerate(plain.PARTICIPANTS):
        difference = model - copy
        largest = difference.abs().argsort(descending=True, stable=True)[: round(down * count)]
        copy[largest] += difference[largest]
        changes = {}
        for client in clients:
            plain.load(net, copy)
            change = plain.train(net, client) - copy
            seed = derive_seed(0, "random-k", number, client)
            kept = torch.randperm(count, generator=generator(seed, "random-k"))[: round(up * count)]
            changes[client] = torch.zeros_like(change)
            changes[client][kept] = change[kept] * count / len(kept)
        model = model + plain.mean(changes)
    torch.testing.assert_close(plain.flat(module), model, rtol=1e-10, atol=1e-10)
    held = torch.cat([value.reshape(-1) for value in loop.server.base.state["shared"].values()])
    torch.testing.assert_close(held, copy, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d])
def test_whole_it_is_fedavg(tmp_path, norm):
    module = partial(Module, network(norm=norm))
    ends = []
    for algorithm in (EF21P(1.0, 1.0), FedAvg()):
        ends.append(plain.fitted(tmp_path, algorithm, module=lambda: Module(network(norm=norm)))[0])
    plain.close(*ends)
    assert not torch.equal(plain.flat(ends[0]), plain.flat(module()).double())


def test_what_the_server_left_out_comes_later():
    module = network()
    server = Server(Base(module, seed=0))
    algorithm = EF21P(share_down=0.25, share_up=1.0)
    algorithm.setup(server.base)
    following = {name: value.detach().clone() for name, value in module.named_parameters()}
    server.model = {name: torch.randn_like(value) for name, value in following.items()}
    gaps = []
    for server.round in range(1, 6):
        algorithm.begin_round(server)
        # A client that hears every broadcast holds what the server thinks it does.
        message = algorithm.broadcast(server, ClientInfo(0, 1, server.round, 0))
        for name, value in message.codec.transmit({**message.tensors, **server.announcement}).items():
            following[name] += value
            assert torch.equal(following[name], server.base.state["shared"][name])
        gaps.append(max(float((server.model[name] - value).abs().max()) for name, value in following.items()))
    assert gaps[0] > gaps[1] > gaps[2] > 1e-3
    assert gaps[4] < 1e-6


def test_bytes(tmp_path):
    algorithm = EF21P(0.1, 0.2)
    _, loop = plain.fitted(tmp_path, algorithm)
    numbers = plain.flat(network()).numel()
    transfers, header = sum(map(len, plain.PARTICIPANTS)), 400
    up, down = loop.ledger.total_up / transfers, loop.ledger.total_down / transfers
    assert 8 * 0.2 * numbers < up < 8 * 0.2 * numbers + header
    # Positions of a tenth take log2(10) + 2 bits or fewer.
    assert 8 * 0.1 * numbers < down < (8 + 5.4 / 8) * 0.1 * numbers + header
    assert loop.ledger.total_idle == (4 * len(plain.PARTICIPANTS) - transfers) * down


@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.5, 0.0), (1.5, 0.5), (0.5, float("nan"))])
def test_refuses_what_is_no_share(shares):
    with pytest.raises(MisconfigurationException, match=r"share_(down|up) must be above 0 and at most 1, but is"):
        EF21P(*shares)
