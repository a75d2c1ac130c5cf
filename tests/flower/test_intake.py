"""A hostile site's messages before a real server: it is left out, and nothing else happens."""

import math
import random

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.compression import DecodingError, Dense
from lightning_lowrank.flower.intake import Intake, limit_claims
from lightning_lowrank.flower.members import Members
from lightning_lowrank.flower.messages import pack
from tests.algorithms.methods import METHODS, each_method
from tests.flower import hostile_sites
from tests.flower.hostile_sites import (
    OWN_CODECS,
    Tally,
    Target,
    allocated,
    answer,
    bombs,
    fuzz,
    fuzz_joins,
    named_targets,
)
from tests.grids import nightly_except


@pytest.fixture(scope="module")
def target():
    return Target("FedAvg", "dense")


def take(target, uploads, intake=None):
    """Return what an intake refuses of what clients send, and the model of those that are left."""
    intake = intake or target.intake()
    replies = {client: target.reply(client, data) for client, data in uploads.items()}
    refused = intake.accept(replies, target.expected, target.steps)
    aggregator = target.coordinator.server.aggregator
    return refused, aggregator.result() if aggregator.arrivals else {}


def poisoned(data, change):
    return Dense().encode({name: change(value) for name, value in Dense().decode(data).items()})


@pytest.mark.slow
def test_a_bomb_is_refused_before_anything_is_allocated():
    for name, bomb in bombs().items():
        # What a first call imports is no part of it.
        bomb()
        assert allocated(bomb) < 10e6, name


@pytest.mark.slow
def test_changed_messages_are_refused_or_taken_whole(target):
    tally = Tally()
    fuzz(target, 250, random.Random(1), tally, checked_each=5)
    assert tally.taken > 5
    assert sum(tally.refused.values()) > 100


@pytest.mark.slow
def test_changed_answers_of_sites_that_join_move_no_other_site():
    tally = Tally()
    fuzz_joins(400, random.Random(2), tally)
    assert tally.taken > 5
    assert sum(tally.refused.values()) > 100


@nightly_except("FedAvg", "TDPFed")
@each_method()
def test_changed_messages_of_every_method_are_refused_or_taken_whole(name):
    tally = Tally()
    for _, make in named_targets([name], every=True):
        try:
            target = make()
        except MisconfigurationException as error:
            # A codec that leaves numbers out, for a method that sends values.
            if "uplink=" not in str(error):
                raise
            continue
        fuzz(target, 150, random.Random(name), tally, checked_each=10)
    assert sum(tally.refused.values()) > tally.messages / 3 or name in OWN_CODECS


POISON = [lambda value: value * 0 + 1e30, lambda value: value * -100, lambda value: value * 1e25]


@pytest.mark.parametrize("change", POISON)
def test_finite_poison_decides_nothing(target, change):
    _, honest = take(target, {client: target.uploads[client] for client in target.clients[:-1]})
    hostile = target.clients[-1]
    refused, found = take(target, {**target.uploads, hostile: poisoned(target.uploads[hostile], change)})
    assert list(refused) == [hostile]
    assert "norm" in refused[hostile]
    for name, value in honest.items():
        assert torch.equal(found[name], value)


def test_a_mask_of_infinite_numbers_is_measured_where_it_is_finite(monkeypatch):
    """An infinite number may stay or become a finite one, and a change of the others is bounded."""

    def masked(*arguments):
        module = contract_module(*arguments)
        module.register_buffer("mask", torch.tensor([1.0, -torch.inf]))
        return module

    contract_module = hostile_sites.contract_module
    monkeypatch.setattr(hostile_sites, "contract_module", masked)
    target = Target("FedAvg", "dense")
    hostile = target.clients[-1]
    for mask, told in (
        ([1.0, -torch.inf], ""),
        ([1.0, 5.0], ""),
        ([1e6, -torch.inf], "norm"),
        ([1.0, torch.nan], "'mask' holds numbers that are not finite"),
        ([-torch.inf, -torch.inf], "'mask' holds numbers that are not finite"),
    ):
        tensors = {**Dense().decode(target.uploads[hostile]), "mask": torch.tensor(mask)}
        refused, _ = take(target, {**target.uploads, hostile: Dense().encode(tensors)})
        assert told in refused.get(hostile, "")
        assert [*refused] == ([hostile] if told else [])


def test_changes_of_floats_of_one_byte_are_measured(target):
    bias = target.coordinator.server.model["net.0.bias"]
    sent = {"net.0.bias": torch.full_like(bias, 2.0).to(torch.float8_e4m3fn)}
    client, intake = target.clients[0], target.intake()
    change = intake._changes(intake.coordinator.info(client), sent, target.expected[client])["parameters"]
    assert change.norm == pytest.approx(float((2 - bias).norm()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"), [("FedNova", 0.33), ("EF21P", 0.33), ("FedBAT", 0.33), ("RandomCoordinates", 0.65)]
)
def test_changes_are_measured_as_changes(name, share):
    """Whether clients send them or values: in both cases they are smaller than the weights."""
    target = Target(name, METHODS[name].forms[0])
    weights = torch.cat([value.flatten() for value in target.coordinator.server.model.values()]).norm()
    intake, replies = target.intake(), {client: target.reply(client, data) for client, data in target.uploads.items()}
    assert intake.accept(replies, target.expected, target.steps) == {}
    norms = [each["parameters"].norm for each in intake._changed.values()]
    assert max(norms) < share * weights


def test_no_honest_site_is_left_out_for_what_others_send(target):
    assert take(target, target.uploads)[0] == {}
    first, second, *_ = target.clients
    for change in (lambda value: value * 1e8, lambda value: value * 0):
        refused, _ = take(target, {**target.uploads, first: poisoned(target.uploads[first], change)})
        assert refused.keys() <= {first}
    # Two answers are not enough to tell which is odd: nothing but what cannot be computed with is left out.
    two = {first: target.uploads[first], second: poisoned(target.uploads[second], lambda value: value * 50)}
    assert take(target, two)[0] == {}
    assert list(take(target, {first: poisoned(target.uploads[first], lambda value: value + 1e30)})[0]) == [first]


def test_medians_of_earlier_rounds_stand_in_for_too_few_answers(target):
    intake = target.intake()
    take(target, target.uploads, intake)
    intake._remember()
    later = Intake(target.coordinator)
    later.load_state_dict(intake.state_dict())
    target.intake()
    later.begin_round()
    first, second, *_ = target.clients
    uploads = {first: target.uploads[first], second: poisoned(target.uploads[second], lambda value: value * 500)}
    assert list(take(target, uploads, later)[0]) == [second]


def test_what_the_method_raises_leaves_one_site_out(target, monkeypatch):
    algorithm, hostile = target.coordinator.algorithm, target.clients[0]
    own = type(algorithm).receive

    def receive(self, server, client, message, weight):
        own(self, server, client, message, weight)
        server.state.setdefault("seen", []).append(client.id)
        if client.id == hostile:
            raise torch.linalg.LinAlgError("the factors break an SVD")

    monkeypatch.setattr(type(algorithm), "receive", receive)
    refused, _ = take(target, target.uploads)
    assert list(refused) == [hostile]
    assert "break an SVD" in refused[hostile]
    assert target.coordinator.server.state["seen"] == list(target.clients[1:])


def test_a_method_that_cannot_aggregate_leaves_out_who_makes_it_fail(target, monkeypatch):
    algorithm, hostile = target.coordinator.algorithm, target.clients[1]
    own = type(algorithm).aggregate
    intake = target.intake()
    assert take(target, target.uploads, intake)[0] == {}
    odd = target.coordinator.samples[hostile]
    total = sum(target.coordinator.samples[client] for client in target.clients)

    def aggregate(self, server):
        server.model = {name: value * 0 for name, value in server.model.items()}
        if server.aggregator.weight in (total, *(total - n for n in target.coordinator.samples if n != odd)):
            raise ValueError("the products overflow")
        own(self, server)

    monkeypatch.setattr(type(algorithm), "aggregate", aggregate)
    left_out = intake.aggregate()
    assert list(left_out) == [hostile]
    assert "overflow" in left_out[hostile]
    monkeypatch.setattr(type(algorithm), "aggregate", own)
    found = dict(target.coordinator.server.model)
    target.intake()
    _, honest = take(target, {client: data for client, data in target.uploads.items() if client != hostile})
    for name, value in honest.items():
        assert torch.equal(found[name], value)


def test_an_error_that_nobody_causes_is_raised(target, monkeypatch):
    intake = target.intake()
    take(target, target.uploads, intake)

    def aggregate(self, server):
        raise ZeroDivisionError("always")

    monkeypatch.setattr(type(target.coordinator.algorithm), "aggregate", aggregate)
    with pytest.raises(ZeroDivisionError, match="always"):
        intake.aggregate()


def test_answers_for_other_rounds_are_dropped(target):
    client = target.clients[0]
    for content in (
        pack({"round": 1}, {0: target.uploads[client]}),
        pack({"round": 0}, {1: target.uploads[client]}),
        pack({"round": 0}, {0: target.uploads[client], 1: b"x"}),
        pack({"round": "0"}, {0: target.uploads[client]}),
    ):
        refused = target.intake().accept({client: answer(content)}, target.expected, target.steps)
        assert list(refused) == [client]


def test_norms_need_not_be_compared(target):
    target.intake()
    intake = Intake(target.coordinator, norm_bound=math.inf)
    intake.begin_round()
    first = target.clients[0]
    assert take(target, {**target.uploads, first: poisoned(target.uploads[first], lambda v: v * -100)}, intake)[0] == {}


def test_claimed_counts_decide_nothing():
    assert limit_claims([50, 40, 30], 10) == [50, 40, 30]
    assert limit_claims([2**62, 40, 30], 10) == [40, 40, 30]
    assert limit_claims([0, 40, 30, 299], 10) == [0, 40, 30, 299]
    assert limit_claims([0, 0, 5], 10) == [0, 0, 5]
    assert limit_claims([], 10) == []
    # One of two may be either; a larger one is not believed more than the bound.
    assert limit_claims([1, 1, 1, 2**62, 2**62], 10) == [1, 1, 1, 1, 1]


MINE = {"recipe": "r", "layout": "l", "frozen": [1.0]}


def says(client, **more):
    return {
        "client": client,
        "clients": 3,
        "samples": 5,
        "batches": 1,
        "last_broadcast": -1,
        "rank": 0,
        "secret": f"secret {client}",
        "classes": "",
        "features": "",
        **MINE,
        **more,
    }


def begun(**settings):
    members = Members(MINE, 3, **settings)
    for client in range(3):
        members.admit(100 + client, says(client))
    members.begin(3)
    return members


def test_a_client_belongs_to_the_node_that_joined_first():
    members = begun()
    for fields in (says(1, secret="guess"), says(1, secret="")):
        with pytest.raises(DecodingError, match=r"node.*101"):
            members.admit(200, fields)
    with pytest.raises(DecodingError, match=r"node.*2"):
        members.admit(102, says(1))
    assert members.connected == {0: 100, 1: 101, 2: 102}
    # Its site may be back before Flower knows that it has gone, or as the same node without its file.
    members.admit(200, says(1))
    assert members.connected[1] == 200
    members.leave({100, 102})
    with pytest.raises(DecodingError, match=r"node.*200"):
        members.admit(201, says(1, secret="guess"))
    members.admit(200, says(1, secret="another"))
    again = Members(MINE, 3)
    again.load_state_dict(members.state_dict())
    with pytest.raises(DecodingError, match=r"node.*200"):
        again.admit(201, says(1))
    again.admit(201, says(1, secret="another"))
    assert (again.samples, again.connected) == ([5, 5, 5], {1: 201})


def test_before_the_run_a_number_belongs_to_one_node():
    members = Members(MINE, 3)
    members.admit(1, says(0))
    with pytest.raises(DecodingError, match="another site has joined as client 0"):
        members.admit(2, says(0, secret="other"))
    # The first one was started with the wrong number.
    members.admit(1, says(2))
    members.admit(2, says(0, secret="other"))
    assert not members.complete()
    members.admit(3, says(1))
    assert members.complete()


@pytest.mark.parametrize(("name", "told"), [("classes", "classes="), ("features", "features=")])
def test_sites_that_number_their_classes_or_columns_differently_do_not_begin(name, told):
    members = Members(MINE, 3)
    for client, digest in enumerate(("a", "b", "b")):
        members.admit(100 + client, says(client, **{name: digest}))
    with pytest.raises(MisconfigurationException, match=rf"\[0\].*\[1, 2\].*{told}"):
        members.check_numbering()
    members.admit(100, says(0, **{name: "b"}))
    members.check_numbering()
    members.begin(3)
    with pytest.raises(DecodingError, match=rf"client 1.*changed.*{told}"):
        members.admit(101, says(1, **{name: "a"}))
    again = Members(MINE, 3)
    again.load_state_dict(members.state_dict())
    again.admit(101, says(1, **{name: "b"}))
    # A server that reads data refuses a site at once.
    with pytest.raises(DecodingError, match=rf"client 0.*server's.*{told}"):
        Members({**MINE, name: "b"}, 3).admit(100, says(0, **{name: "a"}))


def test_nodes_may_be_given():
    members = Members(MINE, 3, nodes=[7, 8, 9])
    with pytest.raises(DecodingError, match="nodes"):
        members.admit(9, says(1))
    members.admit(8, says(1))


def test_without_a_number_in_the_recipe_most_sites_say_it():
    members = Members(MINE)
    members.admit(1, says(0, clients=2**20))
    assert not members.complete()
    members.admit(2, says(1, clients=2))
    assert not members.complete()
    honest = Members(MINE)
    for client in range(3):
        honest.admit(client, says(client))
    assert (honest.complete(), honest.expected) == (True, 3)


def test_a_site_that_has_lost_its_file_is_not_a_fresh_one():
    members = begun()
    assert members.admit(101, says(1)) is None
    members.last_broadcast[1] = 4
    assert members.admit(101, says(1, last_broadcast=4)) is None
    assert members.admit(101, says(1, last_broadcast=-1)) == 1
    # It is told once.
    assert members.admit(101, says(1, last_broadcast=-1)) is None
