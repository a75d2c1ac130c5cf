"""How a round's arrivals become one value: by the rule that the user gives, in every method that averages."""

from collections import Counter
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import TensorDataset

from lightning_lowrank import (
    SCAFFOLD,
    ClientPrivacy,
    CoordinateMedian,
    FedAvg,
    FedAvgM,
    FedDyn,
    FederatedLoop,
    FedProx,
    FromIndices,
    Half,
    RoundStage,
    TopK,
)
from lightning_lowrank.aggregation import KeepsArrivals, WeightedMean
from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.algorithm import Algorithm
from lightning_lowrank.federated.broadcasts import Broadcasts
from lightning_lowrank.federated.wire import Wire
from tests.algorithms.written_out import (
    CLIENTS,
    EXECUTIONS,
    ROUNDS,
    assert_close,
    batches,
    federated,
    initial,
    resumed_ends,
    sgd,
)
from tests.helpers import Data, Module, assert_same, blobs, fit, trainer, weights


class Median(KeepsArrivals):
    """The coordinate-wise median; of an even number of arrivals, the lower one."""

    def result(self):
        return {name: torch.stack(values).median(dim=0).values for name, values in self.values().items()}


class Clipped(WeightedMean):
    """Takes no arrival whose weight is more than ``most`` for more than that."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def add(self, tensors, weight):
        super().add(tensors, min(weight, self.most))

    def add_stacks(self, stacks, weights):
        super().add_stacks(stacks, [min(weight, self.most) for weight in weights])


class ReadsUpdates(RoundStage):
    """Reads the change of each message."""

    def arrived(self, arrival):
        self.norm = sum(float(value.norm()) for value in arrival.update().values())
        return arrival


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    "settings",
    [
        {"aggregator": CoordinateMedian(), "stages": [ReadsUpdates()]},
        {"stages": [ReadsUpdates()]},
        {"privacy": ClientPrivacy(sampling="fixed", noise_multiplier=1.0), "weighting": "uniform"},
    ],
    ids=["robust", "stage", "private"],
)
def test_a_broadcast_is_encoded_once_for_each_client(tmp_path, monkeypatch, execution, settings):
    found, encoded, own = [], Counter(), Wire._down

    def counting(self, base, message, client):
        encoded[client.round, client.id] += 1
        return own(self, base, message, client)

    monkeypatch.setattr(Wire, "_down", counting)
    for remembers in (True, False):
        monkeypatch.setattr(Broadcasts, "keep", Broadcasts.keep if remembers else lambda *arguments: None)
        encoded.clear()
        module = Module()
        loop = FederatedLoop(
            FedAvg(), clients=4, downlink=[Half()], execution=execution, seed=0, summary=False, **settings
        )
        fit(trainer(tmp_path, loop, limit_val_batches=0, max_epochs=2), module, Data())
        found.append((weights(module), loop.ledger.state_dict(), [encoded[0, client] for client in range(1, 4)]))
    (ended, bytes_of, once), (expected, bytes_of_expected, more) = found
    assert_same(ended, expected)
    assert bytes_of == bytes_of_expected
    assert once == [1, 1, 1]
    assert min(more) > 1


@pytest.mark.parametrize("downlink", [[], [TopK(0.5, error_feedback=True)]], ids=["exact", "lossy"])
@pytest.mark.parametrize("rule", [WeightedMean(), Median(), Clipped(15.0)])
def test_clients_together_are_averaged_as_changes_of_one_start(tmp_path, monkeypatch, rule, downlink):
    settings = {"aggregator": rule, "uplink": [TopK(0.3, error_feedback=True)], "downlink": downlink}
    expected, twin = federated(tmp_path, FedAvg(), "sequential", **settings)
    begun, begin, received = [], Algorithm.begin, Packet.received.func
    monkeypatch.setattr(Algorithm, "begin", lambda *arguments: (begun.append(1), begin(*arguments))[1])
    # Their values are not computed.
    monkeypatch.setattr(Packet, "received", property(lambda packet: received(packet) if not packet.together else None))
    ended, loop = federated(tmp_path, FedAvg(), "vectorized", **settings)
    assert_close(ended, expected)
    assert loop.ledger.state_dict() == twin.ledger.state_dict()
    assert bool(begun) != bool(downlink)


@pytest.mark.parametrize(("dtype", "changes"), [(torch.float32, 3), (torch.bfloat16, 0)])
def test_values_of_sixteen_bits_are_averaged_as_they_are_rounded(tmp_path, monkeypatch, dtype, changes):
    added, add_change = [], WeightedMean.add_change
    monkeypatch.setattr(WeightedMean, "add_change", lambda *arguments: (added.append(1), add_change(*arguments))[1])
    inputs, targets = blobs(48).tensors
    loop = FederatedLoop(
        FedAvg(), clients=3, uplink=[TopK(0.3, error_feedback=True)], execution="vectorized", summary=False
    )
    data = Data(TensorDataset(inputs.to(dtype), targets))
    fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), Module().to(dtype), data)
    assert len(added) == changes


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD])
def test_clients_together_hold_one_copy_of_what_all_were_sent(tmp_path, method):
    held = []

    class Looks(Module):
        def training_step(self, batch, batch_idx):
            received = loop.coordinator._received
            held.append((len(received), len({id(value) for each in received.values() for value in each.values()})))
            return super().training_step(batch, batch_idx)

    loop = FederatedLoop(method(), clients=4, uplink=[Half()], execution="vectorized", summary=False)
    module = fit(trainer(tmp_path, loop, limit_val_batches=0, max_epochs=2), Looks(), Data())
    names = len(loop.coordinator.broadcasts.message(loop.coordinator.info(0)).tensors)
    assert set(held) == {(4, names)}
    assert all(value.isfinite().all() for value in weights(module).values())


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_rule_of_the_users_own(tmp_path, execution, chunk_size):
    if execution == "sequential" and chunk_size:
        pytest.skip("clients step together")
    rule = Median()
    ended, loop = federated(tmp_path, FedAvg(), execution, aggregator=rule, chunk_size=chunk_size)
    values = initial()
    for ids in ROUNDS:
        ends = [sgd(values, batches(client)) for client in ids]
        values = {name: torch.stack([end[name] for end in ends]).median(dim=0).values for name in values}
    assert_close(ended, values)
    # The user's own object is left alone, and the server's holds no arrivals between rounds.
    assert rule.arrivals == loop.server.aggregator.arrivals == 0
    assert loop.server.aggregator is not rule


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_its_arguments_come_with_it(tmp_path, execution):
    ended, _ = federated(tmp_path, FedAvg(), execution, aggregator=Clipped(15.0))
    expected, _ = federated(tmp_path, FedAvg(), execution, weighting=lambda client: min(client.samples, 15))
    assert_close(ended, expected)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", [FedAvg, partial(FedAvgM, momentum=0.5), partial(FedProx, 0.1)])
@pytest.mark.nightly
def test_a_round_is_resumed_with_what_has_arrived(tmp_path, execution, method):
    resumed_ends(tmp_path, method, execution, aggregator=Median())


@pytest.mark.slow
def test_a_channel_and_a_rule_go_together(tmp_path):
    channels = {"uplink": [TopK(0.3, error_feedback=True)], "downlink": [TopK(0.5, error_feedback=True)]}
    ends = [federated(tmp_path, FedAvg(), name, aggregator=Median(), **channels)[0] for name in EXECUTIONS]
    assert_close(*ends)
    plain, _ = federated(tmp_path, FedAvg(), aggregator=Median())
    assert not torch.allclose(plain["0.weight"], ends[0]["0.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", [SCAFFOLD, FedDyn])
@pytest.mark.nightly
def test_clients_that_are_never_drawn_do_not_count(tmp_path, execution, method):
    own = [list(range(first, 40, 4)) for first in range(4)]
    ends = []
    for indices, settings in (
        (own, {}),
        ([*own, [], []], {}),
        ([*own, [40, 41]], {"sampling_weights": [1, 1, 1, 1, 0]}),
        ([*own, [40, 41]], {"availability": [1, 1, 1, 1, 0]}),
    ):
        loop = FederatedLoop(
            method(), partition=FromIndices(indices), execution=execution, summary=False, seed=0, **settings
        )
        ends.append(weights(fit(trainer(tmp_path, loop), Module(), Data(blobs(42)))))
    for end in ends[1:]:
        assert_close(end, ends[0])


def test_a_rule_must_be_one():
    with pytest.raises(MisconfigurationException, match=r"aggregator.*'median'"):
        FederatedLoop(FedAvg(), clients=len(CLIENTS), aggregator="median")
