"""Attacks, robust rules and privacy measure messages by what clients began with, whatever form these have."""

import pytest
import torch
from torch import nn

from lightning_lowrank import (
    EF21P,
    CenteredClipping,
    ClientPrivacy,
    CoordinateMedian,
    FedAvg,
    FederatedLoop,
    Krum,
    NormBound,
    Quantize,
    RandomCoordinates,
    RandomMask,
    SignFlip,
    SlidingWindowMask,
)
from lightning_lowrank.federated.attacks import Attack
from tests.grids import nightly_except
from tests.helpers import Data, Module, fit, network, trainer, weights

# Of no effect: changes are smaller, the model and its buffer are larger, and the noise is below rounding.
NO_EFFECT = [
    {"aggregator": NormBound(bound=1.0)},
    {"aggregator": CenteredClipping(radius=1.0, iterations=1)},
    {"privacy": ClientPrivacy(clip=1.0, noise_multiplier=1e-9, sampling="fixed")},
]


class Shifted(nn.Module):
    """A network with a buffer that is larger than all its changes together, and stays as it is."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.register_buffer("scale", torch.full((100,), 5.0))

    def forward(self, inputs):
        return self.network(inputs / self.scale[0])


def started(net=Shifted, lr=0.1):
    torch.manual_seed(0)
    return Module(net(), lambda parameters: torch.optim.SGD(parameters, lr=lr))


def trained(tmp_path, algorithm, net=Shifted, rounds=1, lr=0.1, **settings):
    module = started(net, lr)
    loop = FederatedLoop(algorithm, clients=4, weighting="uniform", seed=1, summary=False, **settings)
    fit(trainer(tmp_path, loop, max_epochs=rounds, limit_val_batches=0), module, Data())
    return module


@nightly_except(
    "EF21P, reset-CenteredClipping",
    "EF21P-ClientPrivacy",
    "FedAvg, reset-ClientPrivacy",
    "RandomMask-ClientPrivacy",
    "SlidingWindowMask, reset-NormBound",
)
@pytest.mark.slow
@pytest.mark.parametrize("settings", NO_EFFECT, ids=["NormBound", "CenteredClipping", "ClientPrivacy"])
@pytest.mark.parametrize(
    ("make", "buffers"),
    [
        (FedAvg, "reset"),
        (lambda: EF21P(0.5, 0.5), "average"),
        (lambda: EF21P(0.5, 0.5), "reset"),
        (lambda: RandomMask(0.5), "average"),
        (lambda: SlidingWindowMask(0.5), "reset"),
    ],
    ids=["FedAvg, reset", "EF21P", "EF21P, reset", "RandomMask", "SlidingWindowMask, reset"],
)
def test_bounds_above_all_changes_do_nothing(tmp_path, make, buffers, settings):
    plain = trained(tmp_path, make(), buffers=buffers)
    bounded = trained(tmp_path, make(), buffers=buffers, **settings)
    assert torch.equal(bounded.net.scale, plain.net.scale)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(bounded)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("share_down", [1.0, 0.5])
def test_an_attacker_turns_its_own_change_alone(tmp_path, share_down):
    attackers = SignFlip([0])
    one = trained(tmp_path, FedAvg(), attackers=attackers)
    other = trained(tmp_path, RandomCoordinates(share_down, 1.0), attackers=attackers)
    # In the first round clients have the initial model, whatever they are sent of it.
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(other)[name], value, rtol=1e-5, atol=1e-6)


class Seen(Attack):
    """Keeps the attackers' own changes."""

    def __init__(self):
        super().__init__([0, 2])
        self.changes = []

    def forge(self, attempt):
        self.changes.append(attempt.original.abs().max().item())
        return attempt.original


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (FedAvg(), {"downlink": [Quantize(bits=4)]}),
        (FedAvg(), {"buffers": "reset"}),
        (RandomCoordinates(0.5, 0.5), {}),
        (RandomMask(0.5), {}),
        (EF21P(0.5, 0.5), {}),
    ],
    ids=["lossy downlink", "reset", "RandomCoordinates", "RandomMask", "EF21P"],
)
def test_clients_that_train_nothing_change_nothing(tmp_path, algorithm, settings):
    seen = Seen()
    loop = FederatedLoop(algorithm, clients=4, seed=1, summary=False, attackers=seen, **settings)
    fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), started(lr=0.0), Data())
    assert seen.changes
    assert max(seen.changes) < 1e-6


@nightly_except(
    "Krum-FedAvg-sequential",
    "NormBound-FedAvg-sequential",
    "NormBound-RandomMask-vectorized",
    "median-RandomMask-vectorized",
)
@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize("algorithm", [FedAvg(), RandomMask(0.5)], ids=["FedAvg", "RandomMask"])
@pytest.mark.parametrize("rule", [NormBound(), CoordinateMedian(), Krum(0)], ids=["NormBound", "median", "Krum"])
def test_what_a_downlink_loses_is_no_change_of_the_clients(tmp_path, rule, algorithm, execution):
    settings = {"aggregator": rule, "downlink": [Quantize(bits=4)], "execution": execution}
    start = weights(started())
    for name, value in weights(trained(tmp_path, algorithm, lr=0.0, rounds=2, **settings)).items():
        torch.testing.assert_close(value, start[name], rtol=1e-6, atol=1e-6)
    moved = weights(trained(tmp_path, algorithm, rounds=2, **settings))
    assert any(not torch.allclose(value, start[name], atol=1e-3) for name, value in moved.items())
