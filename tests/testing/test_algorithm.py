"""The contract of federated methods: a method written here passes it, broken ones do not, each for its own reason."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedAvg, LowRank, MatrixProduct
from lightning_lowrank.compression import Codec, Dense, Half, Quantize, TopK
from lightning_lowrank.federated import Algorithm, Message
from lightning_lowrank.federated.state import copy_into
from lightning_lowrank.testing import PARTS, Expected, check_algorithm, small_module
from tests.grids import nightly_except

UPDATE = partial(LowRank, MatrixProduct(), rank=2, summary=False)


class Momentum(Algorithm):
    """A user's own: the server keeps a momentum of the mean change, and each client counts its rounds."""

    def aggregate(self, server):
        mean = server.aggregator.result()
        kept = server.state.setdefault("momentum", {})
        for name, value in server.parameters().items():
            kept[name] = mean[name] - value + 0.3 * kept.get(name, 0)
            mean[name] = value + kept[name]
        server.model.update(mean)

    def begin(self, client, message):
        super().begin(client, message)
        client.state["rounds"] = client.state.get("rounds", 0) + 1


@pytest.mark.slow
def test_a_method_of_ones_own_keeps_the_contract():
    check_algorithm(Momentum)


@nightly_except("held copy")
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"uplink": [TopK(0.3, error_feedback=True), Half()]},
        {"uplink": [Quantize(8)], "downlink": [Half()]},
        {"downlink": [TopK(0.5, error_feedback=True)]},
        {"buffers": "local", "optimizer_state": "keep"},
    ],
    ids=["top-k", "quantized", "held copy", "kept"],
)
def test_parties_alone_with_channels(settings):
    adam = partial(small_module, optimizer=partial(torch.optim.Adam, lr=0.01))
    check_algorithm(Momentum, module=adam, settings=settings, parts=["sites", "resume", "vectorized"])


class ReadsTheServer(Algorithm):
    """Its client half uses what its server half left in the object."""

    def begin_round(self, server):
        self.shift = server.round

    def begin(self, client, message):
        copy_into(client.model, {name: value + self.shift for name, value in message.tensors.items()})


class ReadsItsLastRound(Algorithm):
    """Its client half uses what it left in the object, not in the client's state."""

    def __init__(self):
        self.rounds = {}

    def end(self, client):
        self.rounds[client.id] = self.rounds.get(client.id, 0) + 1
        return Message({name: value * self.rounds[client.id] for name, value in client.model.items()})


class ReadsTheClient(Algorithm):
    """Its server half uses what a client left in the object."""

    steps = 1

    def end(self, client):
        self.steps = client.steps
        return super().end(client)

    def receive(self, server, client, message, weight):
        super().receive(server, client, message, weight * self.steps)


class TellsNobody(Algorithm):
    """Its server changes what every side holds, and does not announce it."""

    def setup(self, base):
        base.state.setdefault("scale", torch.ones(()))

    def begin_round(self, server):
        server.base.state["scale"] = server.base.state["scale"] / 2

    def begin(self, client, message):
        scale = client.base.state["scale"].to(torch.float64)
        copy_into(client.model, {name: value * scale for name, value in message.tensors.items()})


class ChangesFrozenWeights(Algorithm):
    """Its server changes the frozen weights, and does not announce it."""

    @torch.no_grad()
    def begin_round(self, server):
        for value in server.base.module.parameters():
            if not value.requires_grad:
                value.add_(1)


class DrawsFromTheProcess(Algorithm):
    """It draws from a generator that no seed decides."""

    draws = torch.Generator().manual_seed(0)

    def begin(self, client, message):
        super().begin(client, message)
        for value in client.base.parameters(client.model).values():
            value.data.add_(torch.randn(value.shape, generator=self.draws))


class IgnoresTheSeed(Algorithm):
    """No client trains."""

    def before_step(self, step):
        for value in step.parameters.values():
            value.grad.zero_()


class ForgetsItsRounds(Algorithm):
    """Its server keeps something in the object, which no checkpoint has."""

    rounds = 0

    def begin_round(self, server):
        self.rounds += 1

    def aggregate(self, server):
        mean = server.aggregator.result()
        server.model.update({name: value * self.rounds for name, value in mean.items()})


class MixesClients(Algorithm):
    """Its step takes a mean over all that it sees, clients that step together included."""

    def before_step(self, step):
        for value in step.parameters.values():
            value.grad.sub_(value.grad.mean())


class LongerThanItSays(Dense):
    def nbytes(self, tensors):
        return super().nbytes(tensors) - 1


class Loses(Codec):
    """Decodes something else than it transmits."""

    def encode(self, tensors):
        return Dense().encode(tensors)

    def decode(self, data, schema=None):
        return {name: value + 1 for name, value in Dense().decode(data, schema).items()}

    def nbytes(self, tensors):
        return Dense().nbytes(tensors)

    def transmit(self, tensors):
        return dict(tensors)


class Encodes(Algorithm):
    def __init__(self, codec):
        self.codec = codec

    def end(self, client):
        return Message(super().end(client).tensors, self.codec)


class SendsMoreLater(Algorithm):
    """Its first message is shorter than those after training."""

    def end(self, client):
        steps = torch.zeros(int(next(iter(client.model.values())).ne(0).sum()) % 7 + client.steps)
        return Message({**super().end(client).tensors, "extra": steps})

    def receive(self, server, client, message, weight):
        model = {name: value for name, value in message.tensors.items() if name != "extra"}
        super().receive(server, client, Message(model), weight)


class KeepsTheModel(Algorithm):
    def aggregate(self, server):
        server.aggregator.result()


class Sums(Algorithm):
    """It adds up changes where it should average them."""

    def aggregate(self, server):
        arrivals = len(server.cohort)
        mean = server.aggregator.result()
        server.model.update({name: value + arrivals * (mean[name] - value) for name, value in server.model.items()})


class HalfSteps(Algorithm):
    def before_step(self, step):
        for value in step.parameters.values():
            value.grad.mul_(0.5)


class ExpectsAll(Algorithm):
    """It divides by those that answered less than those that were asked."""

    asked = 0

    def broadcast(self, server, client):
        self.asked += 1
        return super().broadcast(server, client)

    def aggregate(self, server):
        mean, missing = server.aggregator.result(), self.asked - len(server.cohort)
        self.asked = 0
        server.model.update({name: value + (float("nan") if missing else 0) for name, value in mean.items()})


class KeepsStatistics(Algorithm):
    def aggregate(self, server):
        server.model.update(server.base.parameters(server.aggregator.result()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "part", "message"),
    [
        (ReadsTheServer, "sites", "no attribute 'shift'"),
        (ReadsItsLastRound, "sites", "client 0, run on its own with nothing but its messages, sends in round 2"),
        (ReadsTheClient, "sites", "the server, run on its own with nothing but clients' messages"),
        pytest.param(
            *(TellsNobody, "sites", "client 0, run on its own with nothing but its messages, sends in round 0"),
            marks=pytest.mark.slow,
        ),
        (DrawsFromTheProcess, "seed", "a run of the same seed, .* ends with other weights: network.0.weight"),
        (IgnoresTheSeed, "seed", "another seed gives the same weights"),
        (ForgetsItsRounds, "resume", r"resumed after \d+ batches with execution='sequential'"),
        (MixesClients, "vectorized", r"network.\d.\w+ is another where clients step together"),
        (partial(Encodes, LongerThanItSays()), "bytes", "the ledger counts .* bytes up, and the encodings have"),
        (partial(Encodes, Loses()), "sites", "the server decodes of client 0 in round 0 'network"),
        (SendsMoreLater, "bytes", "inspect_run tells .* bytes up for client 0's first round"),
        (KeepsTheModel, "learns", r"after 8 rounds the accuracy is 0.\d\d, and 0.7 is expected"),
        (Sums, "identical", "two clients of the same samples network.0.weight ends where it does not"),
        (HalfSteps, "plain", "the module's outputs differ by .* from those of plain training"),
        (ExpectsAll, "dropout", "non-finite numbers in .* although all . answers are finite: they arose in ExpectsAll"),
        (KeepsStatistics, "precision", "the global model has none of the clients' statistics"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_broken_methods_do_not(make, part, message):
    with pytest.raises((AssertionError, AttributeError, MisconfigurationException), match=message):
        check_algorithm(make, parts=[part])


@pytest.mark.slow
def test_frozen_weights_are_the_same_on_every_side():
    with pytest.raises(AssertionError, match="client 0, run on its own"):
        check_algorithm(ChangesFrozenWeights, lowrank=UPDATE, parts=["sites"])
    check_algorithm(FedAvg, lowrank=UPDATE, parts=["sites", "bytes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expected", "part", "message"),
    [
        (Expected(plain=None), "plain", "one client is plain training, and that is not expected"),
        (Expected(vectorizes=False), "vectorized", "execution='vectorized' is not refused"),
        (Expected(averages_buffers=False), "precision", "the global model has the clients' statistics"),
        (Expected(accuracy=1.0), "learns", "1.0 is expected"),
    ],
    ids=["plain", "vectorizes", "averages_buffers", "accuracy"],
)
def test_expected_too_little_or_too_much(expected, part, message):
    with pytest.raises(AssertionError, match=f"FedAvg breaks the part '{part}': .*{message}"):
        check_algorithm(FedAvg, expected, parts=[part])


@pytest.mark.slow
def test_bytes_that_are_not_those_of_federated_averaging():
    with pytest.raises(AssertionError, match=r"Expected\(same_bytes=False\) if that is meant"):
        check_algorithm(partial(Encodes, Half()), parts=["bytes"])
    check_algorithm(partial(Encodes, Half()), Expected(same_bytes=False), parts=["bytes"])


def test_parts_by_name():
    assert PARTS[0] == "learns"
    with pytest.raises(ValueError, match=r"parts must be of learns, plain, .* got \['speed'\]"):
        check_algorithm(FedAvg, parts=["speed"])


def test_what_the_method_refuses_is_raised():
    class Refuses(Algorithm):
        def setup(self, base):
            raise MisconfigurationException("not this module")

    with pytest.raises(MisconfigurationException, match="not this module"):
        check_algorithm(Refuses, parts=["plain"])


def test_nothing_global_changes():
    state = torch.get_rng_state()
    check_algorithm(FedAvg, parts=["plain"])
    assert torch.equal(state, torch.get_rng_state())
