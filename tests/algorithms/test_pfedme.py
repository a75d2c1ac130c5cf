"""pFedMe's rounds from its Algorithm 1 in plain PyTorch."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import FederatedLoop, FromIndices, PFedMe
from tests.algorithms.written_out import in_order, kept_by, own_model
from tests.helpers import Data, Module, blobs, fit, network, trainer, weights

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103)), []]
PARTICIPANTS = [[0, 1], [1, 2], [0, 1]]
SIZES = [len(indices) for indices in CLIENTS]


def run(tmp_path, algorithm, net=None, optimizer=None, rounds=3, **arguments):
    module = Module(net, optimizer=optimizer or partial(torch.optim.SGD, lr=0.05, weight_decay=0.001)).double()
    settings = {"participants": PARTICIPANTS, "summary": False, **arguments}
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), **settings)
    fit(trainer(tmp_path, loop, max_epochs=rounds, limit_val_batches=0), module, in_order())
    return module, loop


@pytest.mark.slow
@pytest.mark.parametrize(("execution", "mixing"), [("sequential", 1.0), ("vectorized", 1.4)])
def test_rounds_follow_the_paper(tmp_path, execution, mixing):
    algorithm = PFedMe(regularization=6.0, personal_steps=3, learning_rate=0.02, mixing=mixing)
    module, loop = run(tmp_path, algorithm, execution=execution)
    inputs, targets = in_order().train.tensors
    theirs = Module().double()
    parameters = list(theirs.parameters())
    state = [value.detach().clone() for value in parameters]
    personal = {}
    for participants in PARTICIPANTS:
        copies = {}
        for client in participants:
            local = [value.clone() for value in state]
            with torch.no_grad():
                for value, start in zip(parameters, state, strict=True):
                    value.copy_(start)
            for chunk in torch.tensor(CLIENTS[client]).split(8):
                for _ in range(3):
                    envelope = sum(((value - own) ** 2).sum() for value, own in zip(parameters, local, strict=True))
                    loss = nn.functional.cross_entropy(theirs.net(inputs[chunk]), targets[chunk]) + 6.0 / 2 * envelope
                    gradients = torch.autograd.grad(loss, parameters)
                    with torch.no_grad():
                        for value, gradient in zip(parameters, gradients, strict=True):
                            value -= 0.05 * (gradient + 0.001 * value)
                local = [
                    own - 0.02 * 6.0 * (own - value.detach()) for value, own in zip(parameters, local, strict=True)
                ]
            copies[client] = local
            personal[client] = [value.detach().clone() for value in parameters]
        total = sum(SIZES[client] for client in participants)
        means = [sum(SIZES[c] / total * copies[c][index] for c in participants) for index in range(len(state))]
        state = [(1 - mixing) * value + mixing * mean for value, mean in zip(state, means, strict=True)]
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    names = [name for name, _ in theirs.named_parameters()]
    for index, name in enumerate(names):
        close(weights(module)[name], state[index])
        for client in (0, 1, 2):
            close(own_model(loop, client)[name], personal[client][index])
    assert own_model(loop, 3) is loop.server.model
    assert len(names) == len(kept_by(loop, 0)["personal"])


def test_a_copy_that_follows_at_once_is_the_personal_model(tmp_path):
    """η λ = 1: what is averaged are the personal models."""
    module, loop = run(tmp_path, PFedMe(regularization=4.0, learning_rate=0.25), participants=[[1]], rounds=1)
    for name, value in own_model(loop, 1).items():
        torch.testing.assert_close(weights(module)[name], value, rtol=1e-12, atol=1e-14)


def test_a_personal_model_has_its_clients_statistics(tmp_path):
    module, loop = run(tmp_path, PFedMe(), net=network(norm=nn.BatchNorm1d), participants=[[0, 2]], rounds=1)
    own = [kept_by(loop, client)["personal"]["net.1.running_mean"] for client in (0, 2)]
    assert not torch.equal(*own)
    mean = (SIZES[0] * own[0] + SIZES[2] * own[1]) / (SIZES[0] + SIZES[2])
    torch.testing.assert_close(module.net[1].running_mean, mean)
    sizes = {name: value.numel() for name, value in kept_by(loop, 0)["personal"].items()}
    assert sizes == {name: value.numel() for name, value in module.state_dict().items()}


@pytest.mark.slow
def test_parameters_that_no_loss_reaches_stay(tmp_path):
    """Their one gradient is that of the pull, which is 0 where they begin."""
    net = network()
    net.unused = nn.Parameter(torch.ones(3))
    net.forward = nn.Sequential(*net).forward
    module, _ = run(tmp_path, PFedMe(), net=net, optimizer=partial(torch.optim.SGD, lr=0.05))
    assert torch.equal(module.net.unused.detach(), torch.ones(3, dtype=torch.float64))


@pytest.mark.slow
def test_low_precision_crosses_the_wire_and_moves(tmp_path):
    """The copy moves on a batch by less than bfloat16 resolves."""
    sent = []

    class Watching(PFedMe):
        def end(self, client):
            message = super().end(client)
            sent.extend(value.dtype for value in message.tensors.values())
            return message

    ends = {}
    inputs, targets = blobs().tensors
    for kind in (torch.float32, torch.bfloat16):
        module = Module(optimizer=partial(torch.optim.SGD, lr=0.05)).to(kind)
        start = module.net[4].weight.detach().float().clone()
        loop = FederatedLoop(Watching(learning_rate=2e-3), partition=FromIndices(CLIENTS), summary=False)
        data = Data(TensorDataset(inputs.to(kind), targets), shuffle=False)
        fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), module, data)
        ends[kind] = module.net[4].weight.detach().float() - start
        assert set(sent) == {kind}
        sent.clear()
    assert (ends[torch.bfloat16] - ends[torch.float32]).norm() < 0.5 * ends[torch.float32].norm()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"regularization": 0.0}, r"regularization.*0\.0"),
        ({"learning_rate": -1.0}, r"learning_rate.*-1\.0"),
        ({"mixing": float("nan")}, "mixing must be"),
        ({"mixing": float("inf")}, "mixing must be"),
        ({"personal_steps": 0}, r"personal_steps.*0"),
        ({"personal_steps": 2.0}, "personal_steps"),
        ({"personal_steps": True}, "personal_steps"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        PFedMe(**arguments)


def test_batches_cannot_be_accumulated(tmp_path):
    loop = FederatedLoop(PFedMe(), clients=2, summary=False)
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches=1"):
        fit(trainer(tmp_path, loop, accumulate_grad_batches=2), Module(), Data())
