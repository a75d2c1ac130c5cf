"""FedNTD against Eqs. 3 to 5 of the paper, written out."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call

from lightning_lowrank import FedAvg, FederatedLoop, FedNTD
from tests.algorithms.written_out import (
    EXECUTIONS,
    ROUNDS,
    SIZES,
    assert_close,
    batches,
    federated,
    initial,
    mean,
    stepped,
)
from tests.helpers import Data, Module, blobs, fit, network, trainer


def not_true(logits, targets, temperature):
    """Return the softened probabilities of the other classes, sample by sample."""
    rows = []
    for row, target in zip(logits / temperature, targets.tolist(), strict=True):
        others = torch.cat([row[:target], row[target + 1 :]])
        rows.append(others.exp() / others.exp().sum())
    return torch.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_rounds_follow_the_paper(tmp_path, execution, temperature):
    algorithm = FedNTD(logits="net", beta=0.7, temperature=temperature)
    ended, _ = federated(tmp_path, algorithm, execution, local_epochs=2)
    net, values = network().double(), initial()
    for ids in ROUNDS:
        ends = []
        for client in ids:
            own = values
            for inputs, targets in 2 * batches(client):

                def loss(own, inputs=inputs, targets=targets, received=values):
                    outputs = functional_call(net, own, inputs)
                    known = not_true(functional_call(net, received, inputs), targets, temperature)
                    distilled = (known * (known / not_true(outputs, targets, temperature)).log()).sum(1).mean()
                    return nn.functional.cross_entropy(outputs, targets) + 0.7 * distilled

                own = stepped(own, loss)
            ends.append(own)
        values = mean(ends, [SIZES[client] for client in ids])
    assert_close(ended, values)


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_without_the_term_it_is_federated_averaging(tmp_path, execution):
    """What the received model sees of a batch changes no statistics of the client's."""
    ended, _ = federated(tmp_path, FedNTD("net", beta=0.0), execution, norm=nn.BatchNorm1d)
    plain, _ = federated(tmp_path, FedAvg(), execution, norm=nn.BatchNorm1d)
    assert_close(ended, plain)


class OfDictionaries(Module):
    def loss(self, batch):
        return super().loss((batch["x"], batch["y"]))

    validation_step = test_step = None


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("targets", [1, "label", "x", "y"])
def test_the_classes_of_a_batch_are_where_targets_says(tmp_path, execution, targets):
    samples = [{"x": inputs, "y": label} for inputs, label in blobs(16)]
    loop = FederatedLoop(FedNTD("net", targets=targets), clients=2, summary=False, execution=execution)
    run = trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0)
    if targets == "y":
        fit(run, OfDictionaries(), Data(samples))
        return
    with pytest.raises(MisconfigurationException, match=rf"FedNTD\(targets={targets!r}\).*\['x', 'y'\].*targets='y'"):
        fit(run, OfDictionaries(), Data(samples))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": -0.1}, r"beta.*-0\.1"),
        ({"temperature": 0.0}, r"temperature.*0\.0"),
        ({"logits": "network"}, "'network'"),
    ],
)
def test_refusals(tmp_path, arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        federated(tmp_path, FedNTD(**{"logits": "net", **arguments}))


class Calls(Module):
    """Calls its network a number of times in a step."""

    def __init__(self, *arguments, times, **keywords):
        super().__init__(*arguments, **keywords)
        self.times = times

    def loss(self, batch):
        losses = [super(Calls, self).loss(batch) for _ in range(self.times)]
        return sum(losses, self.net[0].weight.sum())


@pytest.mark.parametrize("times", [0, 2])
def test_logits_are_those_of_one_call(tmp_path, times):
    with pytest.raises(MisconfigurationException, match=rf"call 'net' once, and it called it {times} times"):
        federated(tmp_path, FedNTD("net"), make_module=partial(Calls, times=times))
