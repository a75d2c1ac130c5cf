"""Split-Mix: its bases trained one after another in plain PyTorch."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import Ensemble, FedAvg, FederatedLoop, FromIndices, LowRank, MatrixProduct, SplitMix
from lightning_lowrank.models import MLP, Classifier
from tests.algorithms.written_out import assert_close, dataset, own_model
from tests.helpers import Data, Module, fit, trainer, weights

CLIENTS = [list(range(20)), list(range(20, 30)), list(range(30, 64)), list(range(64, 79)), list(range(79, 103))]
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
DOUBLE = {"precision": "64-true", "limit_val_batches": 0}
BUDGETS = (4, 2, 1)
PARTICIPANTS = [[0, 1, 3], [1, 2], [2], [1, 2, 4]]


def base():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.3), nn.ReLU(), nn.Linear(5, 4)).double()


def bases(count=4):
    torch.manual_seed(3)
    return Ensemble(base, count)


def trained(net, client):
    net = deepcopy(net)
    optimizer = SGD(net.parameters())
    for chunk in torch.tensor(CLIENTS[client]).split(8):
        inputs, targets = dataset()[chunk]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return net.state_dict()


def reference(rounds):
    ensemble = bases()
    for clients in rounds:
        for number, net in enumerate(ensemble.bases):
            holders = [client for client, own in clients.items() if number in own]
            if not holders:
                continue
            models = [trained(net, client) for client in holders]
            sizes = [len(CLIENTS[client]) for client in holders]
            for name, value in net.state_dict().items():
                pairs = zip(sizes, models, strict=True)
                mean = sum(size * model[name].double() for size, model in pairs) / sum(sizes)
                value.copy_(mean if value.is_floating_point() else mean.round())
    return weights(ensemble.double())


class Watching(SplitMix):
    """Keeps which bases each client had in each round, and what it was sent and sent."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.seen, self.sent = [], {"down": {}, "up": {}}

    def broadcast(self, server, client):
        message = super().broadcast(server, client)
        own = {int(name.split(".")[2]) for name in message.tensors}
        self.seen.append((server.round, client.id, own))
        self.sent["down"][server.round, client.id] = set(message.tensors)
        return message

    def end(self, client):
        message = super().end(client)
        self.sent["up"][client.round, client.id] = set(message.tensors)
        return message

    def rounds(self, count):
        return [{client: own for number, client, own in self.seen if number == wanted} for wanted in range(count)]


def run(tmp_path, algorithm, module=None, max_epochs=3, callbacks=(), **arguments):
    module = Module(bases(), optimizer=SGD) if module is None else module
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False, **arguments)
    fitted = trainer(tmp_path, *callbacks, loop, max_epochs=max_epochs, **DOUBLE)
    fit(fitted, module, Data(dataset(), shuffle=False))
    return module, loop


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "execution"), [("fixed", "sequential"), ("dynamic", "vectorized")])
def test_each_base_learns_on_its_own(tmp_path, capacity, execution):
    algorithm = Watching(BUDGETS, capacity)
    module, _ = run(tmp_path, algorithm, participants=PARTICIPANTS, max_epochs=4, execution=execution)
    rounds = algorithm.rounds(4)
    trainers = [sum(number in own for own in clients.values()) for clients in rounds for number in range(4)]
    assert {0, 1, 2} <= set(trainers)
    assert_close(weights(module.net), reference(rounds))
    assert module.net.active is None


@pytest.mark.nightly
def test_clients_have_the_bases_of_their_budget_drawn_in_each_round(tmp_path):
    algorithm = Watching(BUDGETS)
    run(tmp_path, algorithm, max_epochs=40)
    assert all(len(own) == BUDGETS[client % 3] for _, client, own in algorithm.seen)
    single = [own for _, client, own in algorithm.seen if client == 2]
    assert {frozenset(own) for own in single} == {frozenset([number]) for number in range(4)}
    assert all(4 <= sum(number in own for own in single) <= 18 for number in range(4))
    same_round = zip(single, [own for _, client, own in algorithm.seen if client == 1], strict=True)
    assert any(not first <= second for first, second in same_round)


@pytest.mark.slow
def test_what_travels_are_the_clients_own_bases(tmp_path):
    algorithm = Watching(BUDGETS)
    _, loop = run(tmp_path, algorithm, max_epochs=1)
    assert algorithm.sent["down"] == algorithm.sent["up"]
    for (_, _), (_, client, own) in zip(algorithm.sent["down"], algorithm.seen, strict=True):
        expected = {f"net.bases.{number}.{name}" for number in own for name in base().state_dict()}
        assert algorithm.sent["down"][0, client] == expected
    assert loop.ledger.total_down == loop.ledger.total_up < 5 * loop.ledger.dense_bytes


@pytest.mark.slow
def test_variants_are_smaller_ensembles(tmp_path):
    module, loop = run(tmp_path, SplitMix(BUDGETS), max_epochs=1)
    inputs = dataset().tensors[0]
    variants = loop.algorithm.variants(loop.server)
    assert list(variants) == ["2", "1"]
    module.net.eval()
    each = torch.stack([net(inputs) for net in module.net.bases])
    for place, budget in enumerate(BUDGETS):
        personal = own_model(loop, place)
        module.load_state_dict(personal, strict=False)
        torch.testing.assert_close(module.net(inputs), each[:budget].mean(0))
        if budget < 4:
            assert personal.keys() == variants[str(budget)].keys()
            assert all(torch.equal(personal[name], value) for name, value in variants[str(budget)].items())


@pytest.mark.slow
def test_a_budgets_ensemble_has_its_clients_statistics_where_these_are_local(tmp_path):
    _, loop = run(tmp_path, SplitMix(BUDGETS), max_epochs=1, buffers="local")
    for client in range(len(CLIENTS)):
        personal, kept = own_model(loop, client), loop.coordinator.states[client]["buffers"]
        assert personal["net.members"].tolist() == [float(number < BUDGETS[client % 3]) for number in range(4)]
        assert all(personal[name] is value for name, value in kept.items() if name != "net.members")


def test_what_is_outside_of_the_ensemble_is_trained_by_all(tmp_path):
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(6, 6, dtype=torch.float64)
            self.heads = bases()

        def forward(self, inputs):
            # Without a function between them, the normalisation in the heads would remove the stem's bias.
            return self.heads(self.stem(inputs).tanh())

    module = Module(Stem(), optimizer=SGD)
    before = weights(module)
    algorithm = SplitMix(BUDGETS, shares=(0, 0, 1))
    run(tmp_path, algorithm, module, max_epochs=1, participants=[[0]])
    changed = {
        name.rsplit(".", 2)[0] if "heads" in name else name
        for name, value in weights(module).items()
        if not torch.equal(value, before[name])
    }
    assert {name for name in changed if "stem" in name} == {"net.stem.weight", "net.stem.bias"}
    assert len({name for name in changed if "heads" in name}) == 1


@pytest.mark.slow
def test_all_bases_in_one_is_federated_averaging(tmp_path):
    single = Module(bases(1), optimizer=SGD)
    first, _ = run(tmp_path, SplitMix([1]), single)
    second, _ = run(tmp_path, FedAvg(), Module(bases(1), optimizer=SGD))
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())


@pytest.mark.slow
def test_low_rank_bases(tmp_path):
    module = Module(bases(), optimizer=SGD)
    rank = LowRank(MatrixProduct(), rank=1, role="weight", summary=False)
    run(tmp_path, SplitMix(BUDGETS), module, callbacks=[rank])
    assert module.net.bases[3][0].factors["U"].isfinite().all()


def test_an_ensemble_on_its_own():
    ensemble = Ensemble(partial(MLP, 6, hidden=(3,), out_features=4), bases=3)
    assert Classifier(ensemble).num_classes == ensemble.num_classes == 4
    assert ensemble.example_input_shape == (6,)
    first, second, third = ensemble.bases
    assert not torch.equal(first.classifier.weight, second.classifier.weight)
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ensemble(inputs), (first(inputs) + second(inputs) + third(inputs)) / 3)
    ensemble.active = 1
    assert torch.equal(ensemble(inputs), second(inputs))
    ensemble.active = None
    with torch.autocast("cpu", torch.bfloat16):
        assert ensemble(inputs).dtype == torch.bfloat16
    with pytest.raises(MisconfigurationException, match=r"bases.*0"):
        Ensemble(base, 0)


@pytest.mark.slow
def test_refuses(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"lightning_lowrank\.Ensemble"):
        run(tmp_path, SplitMix(), Module())
    with pytest.raises(MisconfigurationException, match="module holds 2"):
        run(tmp_path, SplitMix(), Module(nn.Sequential(bases(), bases())))
    with pytest.raises(MisconfigurationException, match=r"SplitMix.*9.*4"):
        run(tmp_path, SplitMix())
    with pytest.raises(MisconfigurationException, match="optimizer_state='keep'"):
        run(tmp_path, SplitMix(BUDGETS), optimizer_state="keep")
    for budgets in ([0, 1], [1.5]):
        with pytest.raises(MisconfigurationException, match=r"budgets\[0\] must be"):
            SplitMix(budgets)
