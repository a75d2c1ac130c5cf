"""FedBN and FedPer against their rounds in plain PyTorch."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FedAvg, FedBN, FedPer, LocalTraining
from lightning_lowrank.federated.state import Base
from tests.algorithms.written_out import (
    CLIENTS,
    EXECUTIONS,
    ROUNDS,
    SIZES,
    assert_close,
    batches,
    federated,
    initial,
    kept_by,
    mean,
    own_state,
)
from tests.grids import all_pairs
from tests.helpers import assert_same, network, weights

NORM = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}


def reference(own_names, norm=nn.BatchNorm1d, rounds=ROUNDS):
    """Return the global model and each client's own part."""
    model = initial(norm)
    own = [{name: model[name] for name in own_names} for _ in CLIENTS]
    for ids in rounds:
        ends = []
        for client in ids:
            net = network(norm=norm).double()
            net.load_state_dict({**model, **own[client]})
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for inputs, targets in batches(client):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
            end = weights(net)
            own[client] = {name: end.pop(name) for name in own_names}
            ends.append(end)
        model = {**model, **mean(ends, [SIZES[client] for client in ids])}
    return model, own


# The names that stay with the client; in the first two rounds some clients never take part.
METHODS = {
    "FedBN": (FedBN, NORM),
    "FedPer": (partial(FedPer, ["net.5", "0.b*"]), {"5.weight", "5.bias", "0.bias"}),
    "FedPer of a norm": (partial(FedPer, ["1"]), NORM),
    "FedPer of statistics": (partial(FedPer, ["running_*"]), {"1.running_mean", "1.running_var"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "execution", "rounds"), all_pairs(METHODS, EXECUTIONS, [ROUNDS, ROUNDS[:2]]), ids=str
)
def test_rounds_follow_the_papers(tmp_path, method, execution, rounds):
    make, own_names = METHODS[method]
    ended, loop = federated(tmp_path, make(), execution, norm=nn.BatchNorm1d, rounds=rounds)
    model, own = reference(own_names, rounds=rounds)
    assert_close(ended, model)
    assert_close({name: ended[name] for name in own_names}, {name: initial(nn.BatchNorm1d)[name] for name in own_names})
    for client in range(len(CLIENTS)):
        assert_close(own_state(loop, client), {**model, **own[client]})
    taking_part = {client for ids in rounds for client in ids}
    assert {client for client, _ in loop.coordinator.states.items()} == taking_part


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_buffers_that_are_local_anyway(tmp_path, execution):
    ended, loop = federated(tmp_path, FedBN(), execution, norm=nn.BatchNorm1d, buffers="local")
    plain, twin = federated(tmp_path, FedBN(), execution, norm=nn.BatchNorm1d)
    assert_same(ended, plain)
    for client in range(len(CLIENTS)):
        assert_same(own_state(loop, client), own_state(twin, client))


@pytest.mark.slow
def test_which_layers_are_normalization(tmp_path):
    kinds = {
        nn.BatchNorm1d: ("batch", "all"),
        partial(nn.GroupNorm, 4): ("all",),
        nn.LayerNorm: ("all",),
        nn.RMSNorm: ("all",),
    }
    for norm, found_by in kinds.items():
        for layers in ("batch", "all"):
            _, loop = federated(tmp_path, FedBN(layers), norm=norm, rounds=[[0]])
            own = kept_by(loop, 0).get("personal", {})
            assert bool(own) is (layers in found_by)
            assert {name.split(".")[1] for name in own} <= {"1"}


def test_nothing_of_the_own_part_crosses_the_wire(tmp_path):
    sent = []

    class Watching(FedBN):
        def broadcast(self, server, client):
            sent.append(super().broadcast(server, client))
            return sent[-1]

        def end(self, client):
            sent.append(super().end(client))
            return sent[-1]

    federated(tmp_path, Watching(), norm=nn.BatchNorm1d)
    assert len(sent) == 2 * sum(map(len, ROUNDS))
    others = {f"net.{name}" for name in initial(nn.BatchNorm1d)} - {f"net.{name}" for name in NORM}
    assert all(message.tensors.keys() == others for message in sent)


@pytest.mark.parametrize("make", [FedBN, LocalTraining])
def test_a_resumed_client_starts_from_the_first_model(make):
    base = Base(network(norm=nn.BatchNorm1d), seed=0)
    make().setup(base)
    first = {name: value.clone() for name, value in base.state["initial"].items()}
    assert_same(first, {name: value for name, value in weights(base.module).items() if name in first})
    with torch.no_grad():
        base.module[1].weight.add_(1.0)
    make().setup(base)
    assert_same(first, base.state["initial"])


@pytest.mark.slow
def test_without_normalization_it_is_federated_averaging_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match=r"FedBN\(layers='batch'\) found no such normalization layer"):
        FedBN().setup(Base(network(norm=nn.LayerNorm), seed=0))
    ended, _ = federated(tmp_path, FedBN())
    plain, _ = federated(tmp_path, FedAvg())
    assert_same(ended, plain)


def test_refusals(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"layers.*'all'.*'layer'"):
        FedBN("layer")
    for patterns in ("net", []):
        with pytest.raises(MisconfigurationException, match="patterns must be a list of at least one name"):
            FedPer(patterns)
    with pytest.raises(MisconfigurationException, match=r"FedPer.*patterns.*'net\.7'"):
        federated(tmp_path, FedPer(["net.0", "net.7"]))
    with pytest.raises(MisconfigurationException, match="FedPer would keep all trained parameters with the clients"):
        federated(tmp_path, FedPer(["net"]))
    for algorithm in (FedBN(), FedPer(["net.1"])):
        with pytest.raises(MisconfigurationException, match=r"net\.1.*num_batches_tracked.*buffers='reset'"):
            federated(tmp_path, algorithm, norm=nn.BatchNorm1d, buffers="reset")
    federated(tmp_path, FedPer(["net.0"]), norm=nn.BatchNorm1d, buffers="reset", rounds=[[0]])
