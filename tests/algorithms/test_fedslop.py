"""FedSLoP's rounds from Algorithm 1 in plain PyTorch, with projectors of full size."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    FedAvg,
    FederatedLoop,
    FedSLoP,
    FromIndices,
    LowRank,
    MatrixProduct,
    ProjectedAdamW,
    ProjectedSGD,
)
from lightning_lowrank.federated import Base, ClientContext, ClientInfo, Server
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.models import MLP
from lightning_lowrank.optim import projected_parameter_groups
from lightning_lowrank.seeding import derive_seed
from tests.algorithms.written_out import in_order
from tests.grids import all_pairs
from tests.helpers import Module, assert_same, fit, network, trainer, weights

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103))]
PARTICIPANTS = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]
SGD = partial(ProjectedSGD, lr=0.05, momentum=0.8, rank=4, refresh_interval=None)


def run(tmp_path, algorithm=None, optimizer=SGD, net=None, low_rank=None, data=None, rounds=4, **arguments):
    module = Module(net, optimizer=optimizer).double()
    settings = {"partition": FromIndices(CLIENTS), "weighting": "uniform", "summary": False, "seed": 3, **arguments}
    loop = FederatedLoop(FedSLoP() if algorithm is None else algorithm, **settings)
    callbacks = [loop] if low_rank is None else [low_rank, loop]
    fitted = trainer(tmp_path, *callbacks, max_epochs=rounds, limit_val_batches=0)
    fit(fitted, module, in_order() if data is None else data)
    return module, loop, fitted


def projectors(seed, module):
    """P Pᵀ of each weight with more columns than the rank, drawn as a client does that is sent nothing but a seed."""
    optimizer = SGD(module.parameters(), seed=seed)
    found = {name: optimizer.projection(value) for name, value in module.named_parameters()}
    return {name: None if basis is None else basis @ basis.T for name, basis in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "execution"), [("reset", "sequential"), ("keep", "vectorized")])
def test_rounds_follow_algorithm_1(tmp_path, kept, execution):
    module, _, _ = run(tmp_path, participants=PARTICIPANTS, optimizer_state=kept, execution=execution)
    inputs, targets = in_order().train.tensors
    theirs = Module().double()
    state = {name: value.detach().clone() for name, value in theirs.named_parameters()}
    carried = [{name: torch.zeros_like(value) for name, value in state.items()} for _ in CLIENTS]
    for number, participants in enumerate(PARTICIPANTS):
        ends = []
        onto = projectors(derive_seed(3, "subspace", number), theirs)
        assert [name for name, projector in onto.items() if projector is not None] == [
            "net.0.weight",
            "net.2.weight",
            "net.4.weight",
        ]
        for client in participants:
            with torch.no_grad():
                for name, value in theirs.named_parameters():
                    value.copy_(state[name])
            momentum = carried[client]
            for name, projector in onto.items():
                if kept == "reset":
                    momentum[name].zero_()
                elif projector is not None:
                    momentum[name] = momentum[name] @ projector
            for chunk in torch.tensor(CLIENTS[client]).split(8):
                loss = nn.functional.cross_entropy(theirs.net(inputs[chunk]), targets[chunk])
                gradients = torch.autograd.grad(loss, list(theirs.parameters()))
                with torch.no_grad():
                    for (name, value), gradient in zip(theirs.named_parameters(), gradients, strict=True):
                        change = gradient if onto[name] is None else gradient @ onto[name]
                        momentum[name] = 0.8 * momentum[name] + change
                        value -= 0.05 * momentum[name]
            ends.append(weights(theirs))
        for name, value in state.items():
            value += sum(end[name] - value for end in ends) / len(ends)
    for name, value in state.items():
        torch.testing.assert_close(weights(module)[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_at_full_rank_is_fedavg_with_client_momentum_bit_for_bit(tmp_path):
    full, _, _ = run(tmp_path, optimizer=partial(SGD, rank=16))
    plain, _, _ = run(tmp_path, FedAvg(), partial(torch.optim.SGD, lr=0.05, momentum=0.8))
    assert_same(weights(full), weights(plain))
    narrow, _, _ = run(tmp_path, optimizer=partial(SGD, rank=15))
    assert any(not torch.equal(value, weights(plain)[name]) for name, value in weights(narrow).items())


class Dense(FedAvg):
    """Sends whole weights where FedSLoP sends coefficients."""

    def begin_round(self, server):
        server.base.optimizers[0].refresh(derive_seed(server.seed, "subspace", server.round))


def convolutions():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, (2, 3), padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 4 * 4, 4),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("execution", "options", "factorized"),
    all_pairs(["sequential", "vectorized"], [{"weight_decay": 0.1}, {"nesterov": True}], [False, True]),
)
def test_the_coefficients_say_all_of_the_change(tmp_path, execution, options, factorized):
    settings = {"optimizer": partial(SGD, **options), "execution": execution, "weighting": "samples"}
    for net in (convolutions, network):
        if factorized and net is convolutions:
            continue
        low_rank = LowRank(MatrixProduct(), rank=6, allow_larger=True, summary=False) if factorized else None
        ends = [
            weights(run(tmp_path, algorithm, net=net(), low_rank=low_rank, **settings)[0])
            for algorithm in (FedSLoP(), Dense())
        ]
        for name, value in ends[0].items():
            torch.testing.assert_close(value, ends[1][name], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("rank", "numbers"), [(16, 23_460), (32, 45_540), (64, 89_700), (112, 155_940), (192, 259_940)]
)
def test_uplink_of_table_4(rank, numbers):
    """Ten clients' uplink of a round."""
    module = MLP(hidden=[128])
    base = Base(module, seed=0, optimizers=[SGD(module.parameters(), rank=rank)])
    server, live, algorithm = Server(base), trained_tensors(module), FedSLoP()
    algorithm.setup(base)
    server.sync_with_module(live, shown={})
    algorithm.begin_round(server)
    message = algorithm.broadcast(server, ClientInfo(0, 1, 0, 0))
    assert message.elements == 784 * 128 + 128 + 1280 + 10 + 1
    client = ClientContext(0, 1, 0, 0, base=base, model=live, state={}, steps=1)
    algorithm.begin(client, message)
    assert 10 * algorithm.end(client).elements == numbers


def test_a_client_of_another_process_needs_the_seed_alone():
    """Its optimizer is its own, and has been in other subspaces; so has the server's meanwhile."""
    ours, theirs = Module().double(), Module().double()
    server = Server(Base(ours, seed=0, optimizers=[SGD(ours.parameters())]))
    base = Base(theirs, seed=0, optimizers=[SGD(theirs.parameters(), seed=9)])
    halves = FedSLoP(), FedSLoP()
    halves[0].setup(server.base)
    halves[1].setup(base)
    server.sync_with_module(trained_tensors(ours), shown={})
    halves[0].begin_round(server)
    client = ClientContext(0, 1, 0, 0, base=base, model=trained_tensors(theirs), state={}, steps=1)
    halves[1].begin(client, halves[0].broadcast(server, ClientInfo(0, 1, 0, 0)))
    onto = projectors(derive_seed(0, "subspace", 0), ours)["net.2.weight"]
    with torch.no_grad():
        theirs.net[2].weight += torch.randn(16, 16).double() @ onto
    halves[0].receive(server, ClientInfo(0, 1, 0, 0), halves[1].end(client), 1.0)
    halves[0].aggregate(server)
    torch.testing.assert_close(server.model["net.2.weight"], theirs.net[2].weight.detach())


def test_groups_without_rank_send_whole_tensors(tmp_path):
    def optimizer(parameters):
        module = nn.Module()
        module.weights = nn.ParameterList(parameters)
        groups = projected_parameter_groups(module, 4, exclude=["weights.0"])
        # The dense group needs no interval: it has no subspaces.
        return ProjectedSGD([{**groups[0], "refresh_interval": None}, *groups[1:]], lr=0.05, rank=None)

    sent = []

    class Watching(FedSLoP):
        def end(self, client):
            message = super().end(client)
            sent.append({name: tuple(value.shape) for name, value in message.tensors.items()})
            return message

    run(tmp_path, Watching(), optimizer, rounds=1)
    assert sent[0] == {
        "net.0.weight": (16, 6),
        "net.0.bias": (16,),
        "coefficients.net.2.weight": (16, 4),
        "net.2.bias": (16,),
        "coefficients.net.4.weight": (4, 4),
        "net.4.bias": (4,),
    }


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (partial(torch.optim.SGD, lr=0.1), r"SGD.*ProjectedSGD.*refresh_interval=None"),
        (partial(ProjectedAdamW, rank=4, refresh_interval=None), "ProjectedAdamW"),
        (partial(ProjectedSGD, rank=4), "refresh_interval=200.*set refresh_interval=None"),
        (partial(SGD, subspace="gradient"), "subspace='gradient'.*set subspace='random'"),
    ],
)
def test_refuses_optimizers_whose_changes_the_server_could_not_compose(tmp_path, optimizer, message):
    with pytest.raises(MisconfigurationException, match=message):
        run(tmp_path, optimizer=optimizer)
