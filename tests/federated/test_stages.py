"""Stages: parts of a round beside the method."""

import copy
import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import ClientPrivacy, FedAvg, FederatedLoop, FromIndices, Half, SignFlip, SystemModel
from lightning_lowrank.federated import Arrival, ClientInfo, Ledger, Message, RoundStage
from lightning_lowrank.testing import check_algorithm, check_stage
from tests.federated.test_failures import PARTS, Figures, run
from tests.helpers import Data, Module, assert_same, fit, trainer, weights

TEMPLATE = Path(__file__).parents[2] / "docs" / "templates" / "stage.py"


def update_norms():
    spec = importlib.util.spec_from_file_location("template_stage", TEMPLATE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.UpdateNorms()


class Held(RoundStage):
    """Holds all arrivals back to the round's end."""

    def __init__(self):
        self._held = []

    def arrived(self, arrival):
        self._held.append(arrival.copy())

    def release(self):
        held, self._held = sorted(self._held, key=lambda arrival: arrival.client.id), []
        return held

    def checkpoint(self):
        held = list(self._held)

        def undo():
            self._held = held

        return undo

    def state_dict(self):
        return {"held": [(vars(each.client), dict(each.message.tensors), each.weight) for each in self._held]}

    def setup(self, way):
        self.way = way

    def load_state_dict(self, state):
        self._held = [
            Arrival(ClientInfo(**client), Message(tensors), weight, self.way.origin_of)
            for client, tensors, weight in state["held"]
        ]


class ForgetsState(Held):
    def state_dict(self):
        return {"held": []}


class HoldsLiveTensors(Held):
    def arrived(self, arrival):
        self._held.append(arrival)


class KeepsObjects(Held):
    def state_dict(self):
        return {"held": list(self._held)}


class TakesNothingBack(Held):
    def checkpoint(self):
        return lambda: None


class InPlace(RoundStage):
    def arrived(self, arrival):
        arrival.message.tensors["bias"].zero_()
        return arrival


class Draws(RoundStage):
    def arrived(self, arrival):
        torch.rand(1)
        return arrival


class Doubles(RoundStage):
    def arrived(self, arrival):
        tensors = {name: 2 * value for name, value in arrival.message.tensors.items()}
        return Arrival(arrival.client, Message(tensors), arrival.weight, arrival.find_origin)


class Loses(RoundStage):
    def arrived(self, arrival):
        return arrival if arrival.client.id else None


class Figure(RoundStage):
    def __init__(self, name="one", value=1.0):
        self.name, self.value = name, value

    def figures(self):
        return {self.name: self.value}


STAGES = {"RoundStage": RoundStage, "Held": Held, "Figure": Figure, "Doubles": Doubles}


@pytest.mark.parametrize("name", STAGES)
def test_contract(name):
    check_stage(STAGES[name], changes=name == "Doubles")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (ForgetsState, "saved and resumed"),
        (HoldsLiveTensors, "weights"),
        (KeepsObjects, "plain Python"),
        (TakesNothingBack, "checkpoint"),
        (InPlace, "in place"),
        (Draws, "generators"),
        (Doubles, "weights"),
        (Loses, "2 of 3"),
        (partial(Figure, "comm/bytes"), "'comm/bytes'"),
        (partial(Figure, value=float("nan")), "nan"),
    ],
)
def test_the_check_finds_a_broken_stage(make, found):
    with pytest.raises(AssertionError, match=found):
        check_stage(make)


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_a_stage_sees_each_clients_update(tmp_path, execution):
    """Whatever the codecs: the norm is that of what the server adds up."""
    _, _, rounds, _ = run(tmp_path, execution=execution, stages=[update_norms()], participants=[[0], [1, 2], [3]])
    assert {name for name in rounds[1] if name.startswith("norm/")} >= {"norm/1", "norm/2"}
    first = weights(Module())
    torch.manual_seed(0)
    module = Module()
    module.load_state_dict(first)
    loop = FederatedLoop(FedAvg(), partition=FromIndices(PARTS), seed=0, summary=False, participants=[[0]])
    fit(trainer(tmp_path, loop, limit_val_batches=0, max_epochs=1), module, Data())
    # With one client the new global model is the client's.
    change = torch.cat([(value - first[name]).flatten() for name, value in weights(module).items()])
    assert rounds[0]["norm/0"] == pytest.approx(float(change.double().norm()), rel=1e-5)


def test_an_infinite_number_that_stays_has_no_change():
    client, mask = ClientInfo(0, 4, 0, 0), torch.tensor([1.0, -torch.inf])
    arrival = Arrival(client, Message({"mask": mask + 1}), 1.0, lambda client: {"mask": mask})
    assert arrival.update()["mask"].tolist() == [1.0, 0.0]


def test_stages_see_what_attackers_send(tmp_path):
    honest = run(tmp_path, stages=[update_norms()])[2][0]
    forged = run(tmp_path, stages=[update_norms()], attackers=SignFlip([1], scale=4.0))[2][0]
    assert forged["norm/1"] == pytest.approx(4 * honest["norm/1"], rel=1e-5)
    assert forged["norm/0"] == pytest.approx(honest["norm/0"], rel=1e-6)


class Refuses(RoundStage):
    def answered(self, client, steps, nbytes):
        return ValueError(f"{nbytes} bytes") if client.id == 2 else None


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_a_stage_refuses_a_message(tmp_path, execution):
    refused = run(tmp_path, stages=[Refuses()], execution=execution)
    expected = run(tmp_path, participants=[[0, 1, 3]] * 3, execution=execution)
    tolerance = 0.0 if execution == "sequential" else 1e-5
    for name, value in weights(refused[0]).items():
        torch.testing.assert_close(value, weights(expected[0])[name], rtol=tolerance, atol=tolerance)
    # Its bytes are not received.
    assert refused[1].ledger.total_up == expected[1].ledger.total_up
    assert refused[2][0]["federated/failed"] == 1
    assert "client 2" in refused[3][0]


class Clips(RoundStage):
    """Halves a client's change before it is encoded."""

    def began(self, client):
        client.round_state["began"] = {name: value.detach().clone() for name, value in client.model.items()}

    def up(self, client, message):
        began = client.round_state.pop("began")
        tensors = {
            name: began[name] + (value - began[name]) / 2 if name in began else value
            for name, value in message.tensors.items()
        }
        return Message(tensors, message.codec)


def test_the_clients_end_of_a_stage(tmp_path):
    plain, halved = (run(tmp_path, stages=stages, participants=[[1]] * 3) for stages in ([], [Clips()]))
    together = run(tmp_path, stages=[Clips()], participants=[[1]] * 3, execution="vectorized")
    assert any(not torch.equal(value, weights(plain[0])[name]) for name, value in weights(halved[0]).items())
    for name, value in weights(together[0]).items():
        torch.testing.assert_close(value, weights(halved[0])[name], rtol=1e-5, atol=1e-6)


def test_holding_back_changes_nothing(tmp_path):
    settings = {"uplink": [Half()], "system": SystemModel(bandwidth=1e6), "buffers": "local"}
    plain, held = (run(tmp_path, stages=stages, **settings) for stages in ([], [Held()]))
    assert_same(weights(plain[0]), weights(held[0]))
    assert plain[1].ledger.state_dict() == held[1].ledger.state_dict()
    assert [each["system/seconds"] for each in plain[2]] == [each["system/seconds"] for each in held[2]]


def test_resuming_inside_a_round(tmp_path):
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=1)
    whole = run(tmp_path, stages=[update_norms(), Held()], callbacks=[every])
    files = sorted((tmp_path / "every").glob("*.ckpt"))
    assert len(files) > 4
    for file in files:
        again = run(tmp_path, stages=[update_norms(), Held()], fit={"ckpt_path": file, "weights_only": False})
        assert_same(weights(again[0]), weights(whole[0]))
        for resumed, expected in zip(reversed(again[2]), reversed(whole[2]), strict=False):
            norms = {name: value for name, value in expected.items() if name.startswith("norm/")}
            assert {name: resumed[name] for name in norms} == norms


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"stages": RoundStage()}, "stages"),
        ({"stages": [Half()]}, "Half"),
        ({"stages": [RoundStage(), RoundStage()]}, "RoundStage"),
        ({"stages": [Ledger(0)]}, "ledger"),
        ({"stages": [Doubles()], "privacy": ClientPrivacy(noise_multiplier=1.0), "weighting": "uniform"}, "privacy"),
    ],
)
def test_refused(settings, found):
    with pytest.raises(MisconfigurationException, match=found):
        FederatedLoop(FedAvg(), clients=2, **settings)


def test_figures_alone_go_with_privacy():
    FederatedLoop(
        FedAvg(), clients=2, stages=[Figure()], privacy=ClientPrivacy(noise_multiplier=1.0), weighting="uniform"
    )


def test_a_stage_can_be_copied():
    loop = copy.deepcopy(FederatedLoop(FedAvg(), clients=2, stages=[Figure("two", 2.0)]))
    assert loop.stages[0].figures() == {"two": 2.0}
    assert "Figure(name='two', value=2.0)" in repr(loop)
    assert Figures


class OfTheServer(RoundStage):
    """Has what it counts from a round's start on the server to the end of that round, and halves clients' changes."""

    def begin_round(self, server):
        self.answers = 0

    def answered(self, client, steps, nbytes):
        self.answers += 1

    def figures(self):
        return {"answers": vars(self).pop("answers")}

    def state_dict(self):
        return {"answers": self.answers}

    began, up = Clips.began, Clips.up


def test_at_a_site_a_stage_has_the_clients_end_alone():
    check_algorithm(FedAvg, settings={"stages": [OfTheServer()]}, parts=["sites"])
