"""SCAFFOLD against its Algorithm 1 (option II), written out."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import SCAFFOLD, FedAvg
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientInfo, Server
from tests.algorithms.written_out import (
    CLIENTS,
    EXECUTIONS,
    ROUNDS,
    SIZES,
    Partly,
    assert_close,
    bare,
    batches,
    federated,
    gradient,
    initial,
    mean,
)
from tests.grids import in_turn
from tests.helpers import Module, assert_same, weights

SGD = torch.optim.SGD


def two_groups(parameters):
    first, *rest = parameters
    return SGD([{"params": [first], "lr": 0.04}, {"params": rest}], lr=0.1, weight_decay=0.01)


def reference(rate, lr_server=1.0, rounds=ROUNDS, decay=0.0, weighting="samples", net=None):
    """Return model and control variates; ``rate(name, step)`` counts a round's steps from where it began."""
    model = initial() if net is None else weights(net)
    zeros = {name: torch.zeros_like(value) for name, value in model.items()}
    control, own, done = zeros, [zeros for _ in CLIENTS], 0
    for ids in rounds:
        ends, changes = [], []
        for client in ids:
            values = model
            for number, batch in enumerate(batches(client)):
                slope = gradient(values, batch, net)
                values = {
                    name: value
                    - rate(name, done + number) * (slope[name] + decay * value - own[client][name] + control[name])
                    for name, value in values.items()
                }
            rates = {name: sum(rate(name, done + number) for number in range(len(batches(client)))) for name in model}
            renewed = {
                name: own[client][name] - control[name] + (model[name] - values[name]) / rates[name] for name in model
            }
            changes.append({name: renewed[name] - own[client][name] for name in model})
            own[client] = renewed
            ends.append(values)
        average = mean(ends, [SIZES[client] if weighting == "samples" else 1 for client in ids])
        model = {name: value + lr_server * (average[name] - value) for name, value in model.items()}
        control = {name: control[name] + sum(each[name] for each in changes) / len(CLIENTS) for name in model}
        done += max(len(batches(client)) for client in ids)
    return model, control, own


def kept(loop):
    """Return the server's control variate, and those of the clients that have one."""
    own = [bare(state["control"]) for _, state in loop.coordinator.states.items()]
    return bare(loop.server.state["control"]), own


@pytest.mark.slow
@pytest.mark.parametrize(("weighting", "execution"), in_turn(["samples", "uniform"], EXECUTIONS))
def test_rounds_follow_the_paper(tmp_path, execution, weighting):
    ended, loop = federated(tmp_path, SCAFFOLD(lr_server=0.7), execution, weighting=weighting)
    model, control, own = reference(lambda name, step: 0.1, lr_server=0.7, weighting=weighting)
    assert_close(ended, model)
    found = kept(loop)
    assert_close(found[0], control)
    for first, second in zip(found[1], own, strict=True):
        assert_close(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_learning_rates_of_groups_and_steps(tmp_path, execution):
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.8)
    ended, loop = federated(
        tmp_path, SCAFFOLD(), execution, optimizer=two_groups, module={"scheduler": schedule, "interval": "step"}
    )
    model, control, _ = reference(
        lambda name, step: (0.04 if name == "0.weight" else 0.1) * 0.8 ** (step // 2), decay=0.01
    )
    assert_close(ended, model)
    assert_close(kept(loop)[0], control)


@pytest.mark.slow
def test_steps_without_a_learning_rate_tell_nothing(tmp_path):
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda number: float(number > 0))
    ended, loop = federated(tmp_path, SCAFFOLD(), rounds=ROUNDS[:1], module={"scheduler": schedule})
    assert_same(ended, initial())
    assert all(not value.any() for value in loop.server.state["control"].values())
    ended, _ = federated(tmp_path, SCAFFOLD(), rounds=[ROUNDS[0], *ROUNDS], module={"scheduler": schedule})
    assert_close(ended, reference(lambda name, step: 0.1)[0])


def test_control_variates_are_mean_gradients(tmp_path):
    """Without drift, that is in the first round, a client's control variate is the mean of its gradients."""
    _, loop = federated(tmp_path, SCAFFOLD(), rounds=[[3]])
    slope = gradient(initial(), batches(3)[0])
    control, (own,) = kept(loop)
    assert_close(own, slope)
    assert_close(control, {name: value / len(CLIENTS) for name, value in slope.items()})


def test_accumulated_batches_are_one_step(tmp_path):
    _, loop = federated(tmp_path, SCAFFOLD(), rounds=[[1]], trainer_settings={"accumulate_grad_batches": 2})
    first, second, third = batches(1)
    start = initial()
    slopes = [gradient(start, batch) for batch in (first, second)]
    slope = {name: (slopes[0][name] + slopes[1][name]) / 2 for name in start}
    stepped = {name: value - 0.1 * slope[name] for name, value in start.items()}
    last = gradient(stepped, third)
    assert_close(kept(loop)[1][0], {name: (slope[name] + last[name] / 2) / 2 for name in start})


def test_one_client_needs_no_correction_and_buffers_are_averaged(tmp_path):
    rounds = [[0], [0]]
    ended, _ = federated(tmp_path, SCAFFOLD(), norm=nn.BatchNorm1d, rounds=rounds[:1])
    plain, _ = federated(tmp_path, FedAvg(), norm=nn.BatchNorm1d, rounds=rounds[:1])
    assert_same(ended, plain)


@pytest.mark.slow
def test_traffic_is_twice_that_of_federated_averaging(tmp_path):
    _, loop = federated(tmp_path, SCAFFOLD())
    _, plain = federated(tmp_path, FedAvg())
    numbers = sum(value.numel() for value in initial().values())
    transfers = sum(map(len, ROUNDS))
    for total in ("total_up", "total_down"):
        more = getattr(loop.ledger, total) - getattr(plain.ledger, total)
        assert 8 * numbers <= more / transfers <= 8 * numbers + 1000


class OneStep(Module):
    """Leaves out all batches of a client but the first."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx else super().training_step(batch, batch_idx)


def test_steps_that_are_left_out_tell_nothing(tmp_path):
    _, loop = federated(tmp_path, SCAFFOLD(), rounds=[[1]], make_module=OneStep)
    assert_close(kept(loop)[1][0], gradient(initial(), batches(1)[0]))


@pytest.mark.slow
def test_what_a_batch_does_not_depend_on_is_corrected(tmp_path):
    ended, loop = federated(tmp_path, SCAFFOLD(), net=Partly().double())
    model, control, _ = reference(lambda name, step: 0.1, net=Partly().double())
    assert_close(ended, model)
    assert_close(kept(loop)[0], control)
    assert control["shift"].any()


def test_refusals(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"lr_server.*0"):
        SCAFFOLD(lr_server=0)
    for optimizer, message in (
        (partial(torch.optim.AdamW, lr=0.1), r"SCAFFOLD.*torch\.optim\.SGD.*AdamW"),
        (partial(SGD, lr=0.1, momentum=0.9), r"momentum=0\.9"),
        (partial(SGD, lr=0.1, maximize=True), "maximize=True"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            federated(tmp_path, SCAFFOLD(), optimizer=optimizer)

    class Freezing(Module):
        def on_train_batch_start(self, batch, batch_idx):
            self.net[0].requires_grad_(batch_idx == 0)

    with pytest.raises(MisconfigurationException, match=r"SCAFFOLD.*requires_grad=False for net\.0\.weight"):
        federated(tmp_path, SCAFFOLD(), make_module=Freezing)
    with pytest.raises(MisconfigurationException, match=r"momentum=0\.5"):
        federated(tmp_path, SCAFFOLD(), client_settings={1: {"momentum": 0.5}})


def test_a_client_that_lost_its_variate_changes_no_sum():
    """What it sends is a change from 0, while the server's mean holds the variate that it had."""
    algorithm = SCAFFOLD()
    server = Server(Base(nn.Linear(1, 1), seed=0), clients=2, model={"w": torch.zeros(1)})
    server.state["control"] = {"w": torch.tensor([3.0])}

    def make_round(number, changes):
        server.round = number
        for client, change in changes.items():
            message = Message({"w": torch.ones(1), "scaf.own.w": torch.tensor([change])})
            algorithm.receive(server, ClientInfo(client, 1, number, 0), message, 1.0)
        algorithm.aggregate(server)
        server.aggregator = server.aggregator.fresh()
        return server.state["control"]["w"].item()

    algorithm.forget(server, ClientInfo(1, 1, 0, 0))
    assert make_round(0, {0: 2.0, 1: 50.0}) == 4.0
    assert make_round(1, {0: 0.0, 1: 2.0}) == 5.0


def test_a_lost_variate_goes_with_sixteen_bits():
    """What rounding took from the weights is kept in the server's state too, and stays as it is."""
    algorithm = SCAFFOLD()
    server = Server(Base(nn.Linear(1, 1), seed=0), clients=1, model={"w": torch.ones(1, dtype=torch.bfloat16)})
    spacing = torch.finfo(torch.bfloat16).eps
    for number in range(8):
        algorithm.begin_round(server)
        # A quarter of the spacing in each round, as it is in the mean's single precision.
        server.aggregator.add({"w": server.model["w"].float() + spacing / 4}, 1.0)
        server.state["changes"] = {"w": torch.zeros(1)}
        algorithm.aggregate(server)
        server.aggregator = server.aggregator.fresh()
        algorithm.forget(server, ClientInfo(0, 1, number, 0))
    assert server.model["w"].item() == 1 + 2 * spacing
