"""What few methods need: the protocols that the loop looks for, and the claims of a method."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FedAvg, FederatedLoop, FedMUD, FedNova
from lightning_lowrank.federated import Algorithm, Base, Claims, OwnCodec, OwnSteps, Personal, UnequalClients
from lightning_lowrank.federated.protocols import ChangesBase, inherits, needs_only_mean, reference, state_rank


class Looped(Algorithm):
    def local_update(self, step, update):
        update()


class Referred(UnequalClients):
    def reference(self, base, received):
        return {}


class Exact(FedAvg):
    exact = frozenset({"count"})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Looped, r"Looped\.local_update.*class Looped\(OwnSteps"),
        (Referred, r"Referred\.reference.*ChangesBase or OwnCodec"),
        (Exact, r"Exact\.exact.*Claims\(exact"),
    ],
)
def test_hooks_that_the_loop_would_never_call_are_refused(method, message):
    with pytest.raises(MisconfigurationException, match=message):
        FederatedLoop(method(), clients=2)


def test_a_method_of_no_protocol_has_its_defaults():
    method = FedAvg()
    assert ChangesBase.of(method).drawn_in("weight", 3) == 0
    assert not ChangesBase.of(method).announces
    assert OwnSteps.of(method).passes(None) == (1, 1)
    assert Personal.of(method).state_template(None, None) == {}
    assert not OwnCodec.of(method).encodes_values
    assert inherits(method, "receive", "local_update", "personal_model")


def test_a_method_of_a_protocol_is_itself():
    method = FedMUD()
    assert ChangesBase.of(method) is method
    assert method.announces
    assert not inherits(method, "update_base")


class Weighs(Algorithm):
    def receive(self, server, client, message, weight):
        server.aggregator.add(message.tensors, 1.0)


class WeighsAlike(Weighs):
    claims = Claims(needs_only_mean=True)


def test_the_mean_is_enough_where_receive_is_inherited_or_a_method_claims_so():
    assert [needs_only_mean(method()) for method in (FedAvg, Weighs, WeighsAlike)] == [True, False, True]


def test_changes_of_parameters_have_no_reference():
    base = Base(nn.BatchNorm1d(1), seed=0)
    base.remember_buffers()
    received = {"weight": torch.ones(1), "running_mean": torch.zeros(1)}
    assert reference(FedAvg(), base, None, received) is received
    assert reference(FedNova(), base, None, received).keys() == {"running_mean"}


@pytest.mark.parametrize("method", [FedAvg(), UnequalClients()])
def test_a_rank_is_refused_by_a_method_without_ranks(method):
    with pytest.raises(MisconfigurationException, match=r"rank=4.*client 1"):
        state_rank(method, 1, 4)
