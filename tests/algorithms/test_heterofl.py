"""HeteroFL against networks that really are narrower, in plain PyTorch."""

import math
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, HeteroFL, LowRank, MatrixProduct
from lightning_lowrank.federated.state import Base, ClientInfo, trained_tensors
from lightning_lowrank.models import MLP, ResNet18
from tests.algorithms.written_out import assert_close, images, own_model
from tests.helpers import Data, Module, blobs, fit, trainer, weights

CLIENTS = [list(range(21)), list(range(21, 31)), list(range(31, 65)), list(range(65, 80)), list(range(80, 90))]
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
DOUBLE = {"precision": "64-true", "limit_val_batches": 0}
LAST = "16."
PARTICIPANTS = [[0, 1, 2, 4], [1, 2], [0, 2, 3]]


class Divide(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, inputs):
        return inputs / self.rate if self.training else inputs


def convolutions(rate=1.0, scaled=False):
    """A network with sigmoids, whose zero inputs have outputs, and with a bias before a norm."""
    torch.manual_seed(3)
    divide = (lambda: Divide(rate)) if scaled else nn.Identity
    a, b, c = (math.ceil(rate * channels - 1e-9) for channels in (7, 10, 9))
    return nn.Sequential(
        nn.Conv2d(2, a, 3, padding=1),
        divide(),
        nn.BatchNorm2d(a),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, padding=1),
        divide(),
        nn.Sigmoid(),
        nn.Conv2d(b, b, 3, padding=1, groups=b, bias=False),
        divide(),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(9 * b, c),
        divide(),
        nn.BatchNorm1d(c),
        nn.Sigmoid(),
        nn.Linear(c, 4),
    ).double()


def sliced(state, like):
    """The leading blocks that have the shapes of a narrower network; 9·b columns are b channels of 3×3 pixels."""
    return {name: value[tuple(slice(size) for size in like[name].shape)].clone() for name, value in state.items()}


def batches_of(client, size=8):
    return [images()[chunk] for chunk in torch.tensor(CLIENTS[client]).split(size)]


def train(net, batches, optimizer=SGD):
    optimizer = optimizer(net.parameters())
    net.train()
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return net


def reference(rounds, scaled=True, counts=lambda client: 1.0, holders=False):
    state = weights(convolutions())
    for clients in rounds:
        sums = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in state.items()}
        total = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in state.items()}
        for client, rate in clients.items():
            net = convolutions(rate, scaled)
            net.load_state_dict(sliced(state, net.state_dict()))
            for name, value in train(net, batches_of(client)).state_dict().items():
                block = tuple(slice(size) for size in value.shape)
                share = torch.full(value.shape, counts(client), dtype=torch.float64)
                if holders and name.startswith(LAST):
                    labels = images().tensors[1][CLIENTS[client]].tolist()
                    share[[row for row in range(4) if row not in labels]] = 0
                sums[name][block] += share * value.double()
                total[name][block] += share
        for name, value in state.items():
            mean = torch.where(total[name] > 0, sums[name] / total[name], value.double())
            state[name] = (mean if value.is_floating_point() else mean.round()).to(value.dtype)
    return state


def run(tmp_path, algorithm, module=None, max_epochs=3, weighting="uniform", callbacks=(), ckpt_path=None, **arguments):
    module = Module(convolutions(), optimizer=SGD) if module is None else module
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False, weighting=weighting, **arguments)
    fitted = trainer(tmp_path, loop, *callbacks, max_epochs=max_epochs, **DOUBLE)
    fit(fitted, module, Data(images(), shuffle=False), ckpt_path=ckpt_path)
    return module, loop


RATES = (1.0, 0.6, 0.25)


@pytest.mark.slow
@pytest.mark.parametrize(("scaled", "execution"), [(True, "sequential"), (True, "vectorized"), (False, "sequential")])
def test_clients_train_narrower_networks(tmp_path, scaled, execution):
    algorithm = HeteroFL(RATES, scaler=scaled)
    module, _ = run(tmp_path, algorithm, participants=PARTICIPANTS, execution=execution)
    rounds = [{client: RATES[client % 3] for client in clients} for clients in PARTICIPANTS]
    assert_close(weights(module.net), reference(rounds, scaled))
    assert not any(layer._forward_hooks for layer in module.modules())


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_local_statistics_of_absent_channels_stay(tmp_path, execution):
    kept, compared = {}, 0

    class Compare(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            nonlocal compared
            for client in range(len(CLIENTS)):
                now = loop.coordinator.states[client]["buffers"]["net.2.running_var"]
                channels = math.ceil(algorithm._capacities.level(loop.coordinator.info(client)) * 7)
                before = kept.get(client, torch.ones(7).double())
                assert torch.equal(now[channels:], before[channels:])
                assert not torch.isclose(now[:channels], before[:channels]).any()
                kept[client], compared = now, compared + (channels < 7 and client in kept)

    algorithm = HeteroFL(RATES, "dynamic")
    module, arguments = Module(convolutions(), optimizer=SGD), {"buffers": "local", "execution": execution}
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False, **arguments)
    fit(trainer(tmp_path, loop, Compare(), max_epochs=3, **DOUBLE), module, Data(images(), shuffle=False))
    assert compared > 0


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_rows_of_the_last_layer_may_be_their_holders_mean(tmp_path, execution, monkeypatch):
    labels = images().tensors[1]
    # The first client has one class, the second all but one, and nobody of the last round has the last.
    of = [torch.where(labels == label)[0] for label in range(4)]
    parts = [
        of[0][:10],
        torch.cat([of[0][10:14], of[1][:4], of[3][:4]]),
        torch.cat([of[0][14:18], of[1][4:8], of[2][:4]]),
    ]
    monkeypatch.setattr("tests.algorithms.test_heterofl.CLIENTS", [part.tolist() for part in parts])
    rounds = [[0, 1, 2], [0, 2]]
    algorithm = HeteroFL(RATES, last_layer="holders")
    module, loop = run(tmp_path, algorithm, participants=rounds, execution=execution, max_epochs=2)
    expected = reference([{client: RATES[client] for client in clients} for clients in rounds], holders=True)
    assert_close(weights(module.net), expected)
    whole = reference([{client: RATES[client] for client in clients} for clients in rounds])
    assert not torch.allclose(whole[f"{LAST}bias"], expected[f"{LAST}bias"])
    assert "heterofl.held" not in loop.server.model


def test_holders_need_labels_of_the_last_layers_rows(tmp_path):
    class Regression(Module):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

    def fails(dataset, match):
        loop = FederatedLoop(HeteroFL([1.0], last_layer="holders"), partition=FromIndices([range(8)]), summary=False)
        with pytest.raises(MisconfigurationException, match=match):
            fit(trainer(tmp_path, loop), Regression(), Data(dataset))

    inputs = blobs(8).tensors[0]
    fails(torch.utils.data.TensorDataset(inputs), "last_layer='holders'")
    fails(torch.utils.data.TensorDataset(inputs, torch.arange(8)), r"last_layer='holders'.*0")


@pytest.mark.slow
def test_rates_are_drawn_in_each_round_and_data_sizes_may_count(tmp_path):
    drawn = []

    class Watching(HeteroFL):
        def broadcast(self, server, client):
            drawn.append((server.round, client.id, self._capacities.level(client)))
            return super().broadcast(server, client)

    module, _ = run(
        tmp_path, Watching(RATES, "dynamic"), max_epochs=4, clients_per_round=2, seed=3, weighting="samples"
    )
    rounds = [{client: rate for number, client, rate in drawn if number == wanted} for wanted in range(4)]
    assert any(1.0 not in clients.values() for clients in rounds)
    assert {rate for clients in rounds for rate in clients.values()} == set(RATES)
    assert_close(weights(module.net), reference(rounds, counts=lambda client: len(CLIENTS[client])))


@pytest.mark.slow
def test_the_whole_width_alone_is_federated_averaging(tmp_path):
    module, loop = run(tmp_path, HeteroFL([1.0]))
    plain, twin = run(tmp_path, FedAvg())
    first, second = weights(module), weights(plain)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert loop.ledger.state_dict() == twin.ledger.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5, 0.25])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda width: ResNet18(width=int(8 * width)), (3, 8, 8)),
        (lambda width: MLP(12, hidden=(int(8 * width), int(16 * width)), out_features=3), (12,)),
    ],
)
def test_slices_are_the_same_networks_made_narrower(tmp_path, make, shape, rate):
    torch.manual_seed(0)
    wide, slim = make(1).double(), make(rate).double()
    draws = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(24, *shape, generator=draws, dtype=torch.float64), torch.randint(3, (24,), generator=draws)
    )
    slim.load_state_dict(sliced(wide.state_dict(), slim.state_dict()))
    module = Module(wide, optimizer=SGD)
    loop = FederatedLoop(HeteroFL([1.0, rate], shares=[0, 1], scaler=False), clients=1, summary=False)
    fit(trainer(tmp_path, loop, max_epochs=1, **DOUBLE), module, Data(data, shuffle=False))
    train(slim, [data[start : start + 8] for start in (0, 8, 16)])
    assert_close(sliced(weights(wide), slim.state_dict()), weights(slim))


@pytest.mark.slow
def test_what_travels_is_the_slice(tmp_path):
    sent = {"down": {}, "up": {}}

    class Watching(HeteroFL):
        def begin(self, client, message):
            sent["down"][client.id] = {name: tuple(value.shape) for name, value in message.tensors.items()}
            super().begin(client, message)

        def end(self, client):
            for name, value in self._slice(client.base.parameters(client.model), self.rates[client.id % 3]).items():
                rest = client.model[name].clone()
                rest[tuple(slice(size) for size in value.shape)] = 0
                assert not rest.any()
            message = super().end(client)
            sent["up"][client.id] = {name: tuple(value.shape) for name, value in message.tensors.items()}
            return message

    _, loop = run(tmp_path, Watching(RATES), max_epochs=1)
    for client in range(5):
        slim = convolutions(RATES[client % 3]).state_dict()
        assert sent["down"][client] == {f"net.{name}": tuple(value.shape) for name, value in slim.items()}
    assert sent["down"] == sent["up"]
    assert loop.ledger.total_down == loop.ledger.total_up < 5 * loop.ledger.dense_bytes


def test_statistics_that_a_state_dict_leaves_out_are_sliced():
    net = convolutions()
    net[2].register_state_dict_post_hook(lambda module, state, prefix, _: state.pop(f"{prefix}running_mean"))
    method = HeteroFL(RATES)
    method.setup(Base(net, seed=0))
    assert method._slice(trained_tensors(net), 0.25)["2.running_mean"].shape == (2,)


@pytest.mark.slow
def test_variants_are_the_narrower_networks(tmp_path):
    module, loop = run(tmp_path, HeteroFL(RATES), max_epochs=1)
    inputs = images().tensors[0]
    variants = loop.algorithm.variants(loop.server)
    assert list(variants) == ["0.6", "0.25"]
    state = weights(module.net)
    for place, rate in enumerate(RATES):
        slim = convolutions(rate)
        slim.load_state_dict(sliced(state, slim.state_dict()))
        personal = own_model(loop, place)
        assert personal.keys() == dict(module.named_parameters()).keys()
        module.load_state_dict(personal, strict=False)
        torch.testing.assert_close(module.net.eval()(inputs), slim.eval()(inputs))
        if rate < 1:
            variant = variants[f"{rate:g}"]
            assert personal.keys() == variant.keys()
            assert all(torch.equal(personal[name], value) for name, value in variant.items())


@pytest.mark.slow
def test_scalers_are_for_training(tmp_path):
    module, loop = run(tmp_path, HeteroFL(RATES), max_epochs=1)
    inputs = images().tensors[0]
    whole = module.net.eval()(inputs)
    loop.algorithm.configure(loop.server.base, ClientInfo(1, 1, round=0, seed=0))
    assert torch.equal(whole, module.net(inputs))
    scaled = module.net.train()(inputs)
    loop.algorithm.configure(loop.server.base, None)
    assert not torch.allclose(scaled, module.net(inputs))


@pytest.mark.slow
def test_gradients_outside_of_the_slice_are_dropped_even_where_they_are_no_numbers(tmp_path):
    class Spoiled(HeteroFL):
        def before_step(self, step):
            for name, parameter in step.parameters.items():
                own = self._slice({name: parameter.grad}, self._rate)[name].clone()
                parameter.grad.fill_(torch.nan)
                parameter.grad[tuple(slice(size) for size in own.shape)] = own
            super().before_step(step)

    module, _ = run(tmp_path, Spoiled([0.6]), max_epochs=1)
    assert_close(weights(module), weights(run(tmp_path, HeteroFL([0.6]), max_epochs=1)[0]), tolerance=0)


def sequential(*layers):
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 4))


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, inputs):
        return self.scale * inputs + self.shift


class Weighing(Module):
    def __init__(self):
        super().__init__()
        self.weighs = nn.Parameter(torch.zeros(2))


def test_a_parameter_of_the_module_itself_is_named(tmp_path):
    loop = FederatedLoop(HeteroFL(), clients=2, summary=False)
    with pytest.raises(MisconfigurationException, match="BatchNorm"):
        fit(trainer(tmp_path, loop), Weighing(), Data())


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (sequential(nn.GroupNorm(4, 8)), r"'net\.1'.*GroupNorm"),
        (sequential(nn.LayerNorm(8, elementwise_affine=False)), r"'net\.1'.*LayerNorm"),
        (sequential(nn.RMSNorm(8, elementwise_affine=False)), r"'net\.1'.*RMSNorm"),
        (sequential(nn.LocalResponseNorm(2)), r"'net\.1'.*LocalResponseNorm"),
        (sequential(nn.PReLU(8)), r"'net\.1'.*PReLU"),
        (sequential(Frozen()), r"HeteroFL.*'net\.1'"),
        (sequential(nn.BatchNorm1d(16)), r"'net\.1'.*BatchNorm1d.*16"),
        (nn.Sequential(nn.Linear(6, 4), nn.Linear(8, 4)), r"HeteroFL.*'net\.1'.*8"),
        (nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(8, 4, 1)), r"HeteroFL.*'net\.1'.*8"),
        (nn.Sequential(nn.Conv2d(2, 4, 1), nn.Linear(18, 4)), r"HeteroFL.*'net\.1'.*18"),
        (nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Linear(4, 4)), "has groups=2"),
        (sequential(Shifted()), r"'net\.1'.*BatchNorm"),
        (nn.Sequential(nn.Linear(6, 4)), r"HeteroFL.*1"),
        (sequential(nn.Linear(8, 8).requires_grad_(False)), r"HeteroFL.*'net\.1'"),
    ],
)
def test_refuses_modules(tmp_path, net, message):
    loop = FederatedLoop(HeteroFL(), clients=2, summary=False)
    with pytest.raises(MisconfigurationException, match=message):
        fit(trainer(tmp_path, loop), Module(net), Data())


def test_refuses_low_rank_layers(tmp_path):
    low_rank = LowRank(MatrixProduct(), rank=1, summary=False)
    with pytest.raises(MisconfigurationException, match="LowRankLinear"):
        fit(trainer(tmp_path, low_rank, FederatedLoop(HeteroFL(), clients=2, summary=False)), Module(), Data())


def test_norms_before_the_first_layer_and_after_the_last_are_whole(tmp_path):
    net = nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4)
    )
    loop = FederatedLoop(HeteroFL([0.5]), clients=2, summary=False)
    fit(trainer(tmp_path, loop, max_epochs=1), Module(net), Data(drop_last=True))
    assert net[0].weight.all()
    assert net[5].weight.all()
    assert net[2].weight[:4].all()
    assert not net[2].weight[4:].any()


@pytest.mark.parametrize("rates", [[0.0, 1.0], [1.5]])
def test_refuses_rates(rates):
    with pytest.raises(MisconfigurationException, match=r"rates\[0\]"):
        HeteroFL(rates)


@pytest.mark.slow
def test_refuses_kept_moments_of_other_channels(tmp_path):
    with pytest.raises(MisconfigurationException, match="optimizer_state='keep'"):
        run(tmp_path, HeteroFL(RATES, "dynamic"), optimizer_state="keep")
    run(tmp_path, HeteroFL(RATES), optimizer_state="keep")
