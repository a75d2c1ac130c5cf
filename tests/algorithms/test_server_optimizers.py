"""Server optimizers against the papers' updates, written out."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FedAdam, FedAvg, FedAvgM, FedYogi
from lightning_lowrank.federated.state import Base, Server
from tests.algorithms.written_out import EXECUTIONS, ROUNDS, SIZES, assert_close, batches, federated, initial, mean, sgd
from tests.grids import in_turn
from tests.helpers import assert_same


def fedavgm(delta, state, lr=0.5, momentum=0.8):
    velocity = momentum * state.get("v", 0) + delta
    state["v"] = velocity
    return lr * velocity


def adaptive(second):
    def update(delta, state, lr=0.02, beta1=0.8, beta2=0.95, tau=0.01):
        first = beta1 * state.get("m", 0) + (1 - beta1) * delta
        state["m"], state["v"] = first, second(state.get("v", torch.tensor(tau**2).double()), delta**2, beta2)
        return lr * first / (state["v"].sqrt() + tau)

    return update


METHODS = {
    "FedAvgM": (lambda: FedAvgM(momentum=0.8, lr=0.5), fedavgm),
    "FedAdam": (lambda: FedAdam(0.02, (0.8, 0.95), 0.01), adaptive(lambda v, d, b: b * v + (1 - b) * d)),
    "FedYogi": (
        lambda: FedYogi(0.02, (0.8, 0.95), 0.01),
        adaptive(lambda v, d, b: torch.where(v > d, v - (1 - b) * d, v + (1 - b) * d)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "execution"), in_turn(METHODS, EXECUTIONS))
def test_rounds_follow_the_paper(tmp_path, name, execution):
    make, update = METHODS[name]
    ended, _ = federated(tmp_path, make(), execution)
    values, states = initial(), {key: {} for key in initial()}
    for ids in ROUNDS:
        average = mean([sgd(values, batches(client)) for client in ids], [SIZES[client] for client in ids])
        values = {key: value - update(value - average[key], states[key]) for key, value in values.items()}
    assert_close(ended, values)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d])
def test_no_momentum_is_federated_averaging_to_the_last_bit(tmp_path, norm):
    ended, _ = federated(tmp_path, FedAvgM(momentum=0.0, lr=1.0), norm=norm)
    plain, _ = federated(tmp_path, FedAvg(), norm=norm)
    assert_same(ended, plain)
    other, _ = federated(tmp_path, FedAvgM(momentum=0.5, lr=1.0), norm=norm)
    assert not torch.equal(other["0.weight"], plain["0.weight"])


@pytest.mark.parametrize("make", [make for make, _ in METHODS.values()], ids=METHODS)
def test_buffers_are_averaged_plainly(tmp_path, make):
    one_round = {"norm": nn.BatchNorm1d, "rounds": ROUNDS[1:2]}
    ended, loop = federated(tmp_path, make(), **one_round)
    plain, _ = federated(tmp_path, FedAvg(), **one_round)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(ended[name], plain[name])
    assert not torch.equal(ended["1.weight"], plain["1.weight"])
    assert set(loop.server.state["moments"]) == {f"net.{name}" for name in ended if "running" not in name} - {
        "net.1.num_batches_tracked"
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_of_short_numbers_are_long(dtype):
    algorithm, server = FedAvgM(momentum=0.9), Server(Base(nn.Linear(1, 1), seed=0))
    start = torch.full((3,), 1.0, dtype=dtype)
    server.model["w"] = start
    server.aggregator.add({"w": start + torch.finfo(dtype).eps}, 1)
    algorithm.aggregate(server)
    (moments,) = server.state["moments"].values()
    assert moments["momentum"].dtype == torch.float32
    assert server.model["w"].dtype == dtype
    assert torch.equal(server.model["w"], start + torch.finfo(dtype).eps)


def test_arguments_out_of_range():
    for make, message in (
        (lambda: FedAvgM(momentum=1.0), r"momentum.*1\.0"),
        (lambda: FedAvgM(lr=0.0), "lr must be above 0 and finite, but is 0.0"),
        (lambda: FedAdam(lr=float("nan")), "lr must be .* but is nan"),
        (lambda: FedAdam(betas=(0.9, 1.0)), r"betas\[1\].*1\.0"),
        (lambda: FedYogi(betas=(0.9,)), r"betas.*0\.9"),
        (lambda: FedYogi(tau=0.0), r"tau.*0\.0"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            make()
