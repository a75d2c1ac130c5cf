"""MOON against Eqs. 3 and 4 of the paper, written out."""

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call

from lightning_lowrank import MOON, FedAvg
from tests.algorithms.written_out import (
    CLIENTS,
    EXECUTIONS,
    ROUNDS,
    SIZES,
    assert_close,
    bare,
    batches,
    federated,
    initial,
    kept_by,
    mean,
    stepped,
)
from tests.helpers import network


def features(values, inputs):
    """Return the third layer's outputs; of the layers, the last is the fifth."""
    net = network().double()[:3]
    return functional_call(net, {name: value for name, value in values.items() if not name.startswith("4.")}, inputs)


def similarity(first, second):
    return (first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1))


def contrastive(own, received, last, inputs, temperature):
    z, z_global, z_last = (features(values, inputs) for values in (own, received, last))
    near, far = (similarity(z, other) / temperature for other in (z_global, z_last))
    return -(near.exp() / (near.exp() + far.exp())).log().mean()


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rounds_follow_the_paper(tmp_path, execution):
    ended, loop = federated(tmp_path, MOON("net.2", mu=2.0, temperature=0.4), execution, local_epochs=2)
    values, last = initial(), {}
    for ids in ROUNDS:
        ends = []
        for client in ids:
            own, before = values, last.get(client, values)
            for inputs, targets in 2 * batches(client):

                def loss(own, inputs=inputs, targets=targets, received=values, before=before):
                    outputs = functional_call(network().double(), own, inputs)
                    near = contrastive(own, received, before, inputs, 0.4)
                    return nn.functional.cross_entropy(outputs, targets) + 2.0 * near

                own = stepped(own, loss)
            last[client] = own
            ends.append(own)
        values = mean(ends, [SIZES[client] for client in ids])
    assert_close(ended, values)
    for client in range(len(CLIENTS)):
        assert_close(bare(kept_by(loop, client)["last"]), last[client])


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_without_the_term_it_is_federated_averaging(tmp_path, execution):
    """What its two models see of a batch changes no statistics of the client's."""
    ended, _ = federated(tmp_path, MOON("net.3", mu=0.0), execution, norm=nn.BatchNorm1d)
    plain, _ = federated(tmp_path, FedAvg(), execution, norm=nn.BatchNorm1d)
    assert_close(ended, plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mu": -0.1}, "mu must be at least 0 and finite, but is -0.1"),
        ({"temperature": 0.0}, r"temperature.*0\.0"),
        ({"features": "net.hidden"}, r"'net\.hidden'"),
    ],
)
def test_refusals(tmp_path, arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        federated(tmp_path, MOON(**{"features": "net.2", **arguments}))


class Listed(nn.Module):
    """Calls the layers of a list one by one, and another module never."""

    def __init__(self):
        super().__init__()
        self.layers, self.unused = nn.ModuleList(network().double()), nn.Identity()

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


@pytest.mark.parametrize(
    ("features", "message"), [("net.layers", r"ModuleList.*'net\.layers\.0'"), ("net.unused", r"training_step.*1.*0")]
)
def test_parts_that_no_step_calls_are_refused(tmp_path, features, message):
    with pytest.raises(MisconfigurationException, match=message):
        federated(tmp_path, MOON(features), net=Listed())
