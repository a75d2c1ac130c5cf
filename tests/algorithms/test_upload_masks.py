"""Methods that upload a few coordinates: which ones, what the server does with them, and their bytes."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, GradientMask, RandomMask, SlidingWindowMask
from lightning_lowrank.compression.wire import pack_bits, unpack_bits
from lightning_lowrank.federated import Base, ClientContext, ClientInfo, LocalStep, Message, Server
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.seeding import derive_seed, generator
from tests.algorithms import plain
from tests.grids import all_pairs
from tests.helpers import Data, Module, fit, network, trainer

METHODS = [GradientMask, SlidingWindowMask, RandomMask]


def positions(method, net, number, count):
    total = plain.flat(net).numel()
    if method is SlidingWindowMask:
        return [(number * count + offset) % total for offset in range(count)]
    seed = derive_seed(0, "upload", number)
    return torch.randperm(total, generator=generator(seed, "positions"))[:count]


def largest_gradients(net, clients, count):
    """Return the coordinates that the client of lowest id chooses at its first step."""
    gradients = torch.autograd.grad(next(plain.losses(net, min(clients))), list(net.parameters()))
    return torch.cat([gradient.reshape(-1) for gradient in gradients]).abs().argsort(descending=True)[:count]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "share", "settings"),
    all_pairs(METHODS, [0.15, 0.4], [{}, {"execution": "vectorized"}, {"execution": "vectorized", "chunk_size": 2}]),
)
def test_rounds_in_plain_pytorch(tmp_path, method, share, settings):
    module, _ = plain.fitted(tmp_path, method(share), **settings)
    net = plain.initial()
    model = plain.flat(net)
    count = round(share * model.numel())
    # Some window goes on at the first coordinate, and not only in the last round.
    assert share == 0.15 or model.numel() < 3 * count < 4 * count
    chosen = torch.arange(model.numel())
    for number, clients in enumerate(plain.PARTICIPANTS):
        plain.load(net, model)
        if method is not GradientMask:
            chosen = positions(method, net, number, count)
        trained = {}
        for client in clients:
            plain.load(net, model)
            trained[client] = plain.train(net, client)
        plain.load(net, model)
        model = model.clone()
        model[chosen] = plain.mean(trained)[chosen]
        # A gradient chooses the coordinates of the next round.
        chosen = largest_gradients(net, clients, count)
    torch.testing.assert_close(plain.flat(module), model, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d])
def test_whole_it_is_fedavg(tmp_path, method, norm):
    ends = [
        plain.fitted(tmp_path, algorithm, module=lambda: Module(network(norm=norm)))[0]
        for algorithm in (method(1.0), FedAvg())
    ]
    plain.close(*ends, tolerance=0)


def server_of(net, **settings):
    base = Base(net, seed=0, **settings)
    base.remember_buffers()
    server = Server(base, cohort=(3, 5))
    server.sync_with_module(trained_tensors(net), shown={})
    return server


def test_a_window_visits_every_coordinate_once():
    server = server_of(network())
    total = plain.flat(server.base.module).numel()
    visits = torch.zeros(total)
    rounds = total // 8
    method = SlidingWindowMask(8 / total)
    for server.round in range(rounds):
        visits[method.positions(method.describe(server), 8, total)] += 1
    assert visits.sum() == rounds * 8
    assert visits.max() == 1


def test_each_round_draws_other_coordinates():
    server, method = server_of(network()), RandomMask()
    drawn = []
    for server.round in (0, 1):
        drawn.append(set(method.positions(method.describe(server), 60, 452).tolist()))
    assert len(drawn[0]) == 60
    assert drawn[0] != drawn[1]


def test_a_round_draws_its_coordinates_once(tmp_path, monkeypatch):
    drawn, randperm = [], torch.randperm

    def counting(count, *arguments, **settings):
        drawn.append(count)
        return randperm(count, *arguments, **settings)

    monkeypatch.setattr(torch, "randperm", counting)
    module, _ = plain.fitted(tmp_path, RandomMask())
    total = plain.flat(module).numel()
    assert drawn.count(total) == len(plain.PARTICIPANTS)


@pytest.mark.parametrize("method", METHODS)
def test_masks_follow_the_description_and_the_parameters(method):
    server, kept, masks = server_of(network()), method(0.2), []
    total = plain.flat(server.base.module).numel()
    parameters = server.parameters()
    wider = {**parameters, "more": torch.zeros(7)}
    for number, tensors in ((0, parameters), (1, parameters), (1, wider), (0, parameters)):
        server.round = number
        server.state["mask.bits"] = pack_bits(torch.arange(total + 7) % (number + 3) == 0)
        description = kept.describe(server)
        masks.append(kept._masks(description, tensors))
        expected = method(0.2)._masks(description, tensors)
        assert masks[-1].keys() == expected.keys()
        assert all(torch.equal(masks[-1][name], mask) for name, mask in expected.items())
    assert any(not torch.equal(masks[0][name], mask) for name, mask in masks[1].items())


def begun(method, server, client):
    """Return the context of a client that has begun the round, and what the server sent it."""
    live = trained_tensors(server.base.module)
    context = ClientContext(client, 10, server.round, 0, base=server.base, model=live, state={}, steps=1)
    message = method.broadcast(server, ClientInfo(client, 10, server.round, 0))
    method.begin(context, message)
    return context, message


def test_of_equal_gradients_the_first_are_chosen():
    net = nn.Linear(3, 2)
    server, method = server_of(net), GradientMask(0.5)
    context, _ = begun(method, server, 3)

    def choice():
        return unpack_bits(method.end(context).tensors["mask.choice"], 8).nonzero().flatten().tolist()

    assert choice() == [0, 1, 2, 3]
    step = LocalStep(server.base, 0, (3,), context.model, {}, context.round_state, 0, torch.tensor(2.0), stacked=False)
    for gradient in ([0.0, -3.0], [9.0, 0.0]):
        net.bias.grad = torch.tensor(gradient)
        method.before_step(step)
        # The first step alone chooses.
        assert choice() == [0, 1, 2, 7]
    assert "mask.choice" not in method.end(begun(method, server, 5)[0]).tensors


def test_without_the_choosing_client_the_last_choice_stays():
    server, method = server_of(network()), GradientMask(0.2)
    for client, round_number in ((3, 0), (5, 1)):
        server.round = round_number
        context, _ = begun(method, server, client)
        message = method.end(context)
        received = Message(message.codec.transmit(message.tensors))
        method.receive(server, ClientInfo(client, 10, round_number, 0), received, 1.0)
        method.aggregate(server)
        server.aggregator = server.aggregator.fresh()
        assert server.state.keys() == {"mask.bits"}
    _, message = begun(method, server, 5)
    assert torch.equal(message.tensors["mask.bits"], server.state["mask.bits"])
    count = round(0.2 * plain.flat(server.base.module).numel())
    assert int(unpack_bits(server.state["mask.bits"], 452).sum()) == count


@pytest.mark.slow
def test_bytes(tmp_path):
    numbers, rounds = plain.flat(network()).numel(), plain.PARTICIPANTS
    transfers = sum(map(len, rounds))
    later = sum(map(len, rounds[1:]))
    count, header = round(0.15 * numbers), 360
    _, dense = plain.fitted(tmp_path, FedAvg())
    uploads = []
    for method, down in ((SlidingWindowMask, 16), (RandomMask, 8)):
        _, loop = plain.fitted(tmp_path, method())
        assert down < (loop.ledger.total_down - dense.ledger.total_down) / transfers < down + 80
        assert 8 * count < loop.ledger.total_up / transfers < 8 * count + header
        assert loop.ledger.total_idle == 0
        uploads.append(loop.ledger.total_up)
    assert uploads[0] == uploads[1]
    # A choice comes up once a round and goes down to every client; before the first one, everything comes up.
    _, loop = plain.fitted(tmp_path, GradientMask())
    more = loop.ledger.total_down - dense.ledger.total_down - 8 * transfers
    assert later * numbers / 8 < more < later * numbers / 8 + 160 * transfers
    more = loop.ledger.total_up - uploads[0] - 8 * (numbers - count) * len(rounds[0])
    assert len(rounds) * numbers / 8 < more < len(rounds) * (numbers / 8 + 100)
    assert loop.ledger.total_idle == 0


class TwoOptimizers(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2:])]


def test_refusals(tmp_path):
    for method in METHODS:
        for share in (0.0, 1.1):
            with pytest.raises(MisconfigurationException, match=f"share must be .* but is {share}"):
                method(share)
    with pytest.raises(MisconfigurationException, match="2 optimizers"):
        plain.fitted(tmp_path, GradientMask(), module=TwoOptimizers)


@pytest.mark.parametrize("method", METHODS)
def test_the_client_knows_what_to_send_from_what_it_got(method):
    """Buffers and descriptions of masks are no parameters, and do not reach the model."""
    net = network(norm=nn.BatchNorm1d)
    server, algorithm = server_of(net), method(0.1)
    total = sum(value.numel() for value in net.parameters())
    if method is GradientMask:
        server.state["mask.bits"] = pack_bits(torch.arange(total) % 11 == 0)
    message = algorithm.end(begun(algorithm, server, 3)[0])
    sent = message.codec.transmit(message.tensors)
    kept = sum(int((sent[name] != 0).sum()) for name, _ in net.named_parameters())
    assert 0 < kept <= round(0.1 * total)
    assert all(torch.equal(sent[name], value) for name, value in net.named_buffers())


@pytest.mark.slow
def test_accumulated_gradients_choose_too(tmp_path):
    loop = FederatedLoop(GradientMask(0.3), partition=FromIndices(plain.CLIENTS), summary=False)
    module, ends = Module(), []

    class Keep(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            ends.append(plain.flat(pl_module))

    fit(trainer(tmp_path, loop, Keep(), accumulate_grad_batches=4, max_epochs=2), module, Data(shuffle=False))
    changed = int((ends[1] != ends[0]).sum())
    assert 0.25 * ends[0].numel() < changed <= round(0.3 * ends[0].numel())
