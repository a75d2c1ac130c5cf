"""FedHM's rounds derived from the paper in plain PyTorch: real 1×k and k×1 convolutions, an SVD of its own."""

import math
from copy import deepcopy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import BlockKronecker, FedAvg, FederatedLoop, FedHM, FromIndices, LowRank, MatrixProduct, recover
from tests.algorithms.written_out import assert_close, images, own_model
from tests.helpers import Data, Module, assert_same, fit, trainer, weights

CLIENTS = [list(range(21)), list(range(21, 30)), list(range(30, 64)), list(range(64, 79)), list(range(79, 90))]
LEVELS = (1.0, 0.5, 0.2)
FACTORED = ("3", "7")
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
DOUBLE = {"precision": "64-true", "limit_val_batches": 0}


def convolutions(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, (3, 5), padding=(1, 2)),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 10, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(10),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(40, 4),
    ).to(dtype)


def low_rank(**arguments):
    settings = {"rank_ratio": 0.5, "train_base": True, "exclude": ["0", "11"], "summary": False}
    return LowRank(MatrixProduct(), **{**settings, **arguments})


def factorized(convolution, rank):
    """A 1×k and a k×1 convolution that come nearest to a convolution."""
    weight = convolution.weight.detach()
    c_out, c_in, height, width = weight.shape
    left, values, right = torch.linalg.svd(weight.permute(0, 2, 1, 3).reshape(c_out * height, c_in * width))
    roots = values[:rank].sqrt()
    (stride, across), (down, sideways) = convolution.stride, convolution.padding
    first = nn.Conv2d(c_in, rank, (1, width), (1, across), (0, sideways), bias=False)
    second = nn.Conv2d(rank, c_out, (height, 1), (stride, 1), (down, 0), bias=convolution.bias is not None)
    first.weight.data = (right[:rank] * roots[:, None]).reshape(rank, c_in, 1, width)
    second.weight.data = (left[:, :rank] * roots).reshape(c_out, height, rank).transpose(1, 2)[..., None].clone()
    if convolution.bias is not None:
        second.bias.data = convolution.bias.detach().clone()
    return nn.Sequential(first, second)


def recovered(pair):
    return torch.einsum("rcij,orkl->ockj", pair[0].weight, pair[1].weight).detach()


def ranks(level):
    return [max(round(level * channels), 1) for channels in (8, 10)]


def trained_by_client(net, level, batches, decay):
    net = deepcopy(net)
    if level < 1:
        for name, rank in zip(FACTORED, ranks(level), strict=True):
            setattr(net, name, factorized(net[int(name)], rank))
    optimizer = SGD(net.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        if level < 1:
            for name in FACTORED:
                product = torch.einsum("rcij,orkl->ockj", net[int(name)][0].weight, net[int(name)][1].weight)
                loss = loss + decay / 2 * product.square().sum()
        loss.backward()
        optimizer.step()
    dense = dict(net.state_dict())
    for name in FACTORED:
        if level < 1:
            for tensor in [key for key in dense if key.startswith(f"{name}.")]:
                del dense[tensor]
            dense[f"{name}.weight"] = recovered(net[int(name)])
            if net[int(name)][1].bias is not None:
                dense[f"{name}.bias"] = net[int(name)][1].bias.detach()
    return dense


def batches_of(client, size=8):
    return [images()[chunk] for chunk in torch.tensor(CLIENTS[client]).split(size)]


def reference(rounds, weight_of, decay=0.0, own_model=lambda levels: False):
    net = convolutions()
    for clients in rounds:
        models = [trained_by_client(net, level, batches_of(client), decay) for client, level in clients.items()]
        shares = [weight_of(level) for level in clients.values()]
        if own_model(list(clients.values())):
            models.append(dict(net.state_dict()))
            shares.append(weight_of(1.0))
        mean = {
            name: sum(share * model[name].double() for share, model in zip(shares, models, strict=True)) / sum(shares)
            for name in net.state_dict()
        }
        net.load_state_dict(
            {
                name: value if net.state_dict()[name].is_floating_point() else value.round()
                for name, value in mean.items()
            }
        )
    return weights(net)


def run(tmp_path, algorithm, rank=None, module=None, max_epochs=3, callbacks=(), **arguments):
    module = Module(convolutions(), optimizer=SGD) if module is None else module
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False, **arguments)
    rank = low_rank() if rank is None else rank
    fitted = trainer(tmp_path, *([rank] if rank else []), loop, *callbacks, max_epochs=max_epochs, **DOUBLE)
    fit(fitted, module, Data(images(), shuffle=False))
    return module, loop


PARTICIPANTS = [[0, 1, 2, 4], [1, 2], [0, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "weight_of", "decay", "execution"),
    [
        ({}, lambda level: 1.0, 0.0, "sequential"),
        ({"temperature": 0.4}, lambda level: math.exp(level / 0.4), 0.05, "vectorized"),
        ({"temperature": 3.0, "score": "inverse"}, lambda level: math.exp(-1 / level / 3.0), 0.0, "sequential"),
    ],
)
def test_rounds_follow_the_paper(tmp_path, settings, weight_of, decay, execution):
    rank = low_rank(frobenius_decay=decay)
    algorithm = FedHM(LEVELS, **settings)
    module, _ = run(tmp_path, algorithm, rank, participants=PARTICIPANTS, execution=execution)
    levels = [LEVELS[client % 3] for client in range(5)]
    rounds = [{client: levels[client] for client in clients} for clients in PARTICIPANTS]
    for name in FACTORED:
        assert not any(factor.any() for factor in module.net[int(name)].factors.values())
    assert_close(weights(recover(module).net), reference(rounds, weight_of, decay))


@pytest.mark.slow
def test_levels_are_drawn_in_each_round_and_the_servers_model_stands_in(tmp_path):
    drawn = []

    class Watching(FedHM):
        def broadcast(self, server, client):
            drawn.append((server.round, client.id, self._capacities.level(client)))
            return super().broadcast(server, client)

    algorithm = Watching(LEVELS, "dynamic", shares=(1, 2, 2), temperature=5.0, server_model=True)
    module, _ = run(tmp_path, algorithm, max_epochs=6, clients_per_round=3, seed=2)
    rounds = [{client: level for number, client, level in drawn if number == wanted} for wanted in range(6)]
    with_full = [1.0 in clients.values() for clients in rounds]
    assert any(with_full)
    assert not all(with_full)
    expected = reference(rounds, lambda level: math.exp(level / 5), own_model=lambda levels: 1.0 not in levels)
    assert_close(weights(recover(module).net), expected)
    again, _ = run(tmp_path, FedHM(LEVELS, "dynamic", (1, 2, 2), 5.0), max_epochs=6, clients_per_round=3, seed=2)
    assert not torch.allclose(weights(recover(again).net)["3.weight"], expected["3.weight"])


@pytest.mark.slow
def test_full_rank_clients_are_federated_averaging_with_uniform_weights(tmp_path):
    module, _ = run(tmp_path, FedHM(LEVELS, shares=(1, 0, 0)))
    plain, _ = run(tmp_path, FedAvg(), rank=False, weighting="uniform")
    first, second = weights(recover(module)), weights(plain)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_travels_is_what_the_client_trains(tmp_path):
    sent = {"down": {}, "up": {}}

    class Watching(FedHM):
        def begin(self, client, message):
            sent["down"][client.id] = {name: tuple(value.shape) for name, value in message.tensors.items()}
            super().begin(client, message)
            low = client.id % 3 > 0
            for name in FACTORED:
                assert bool(client.model[f"net.{name}.frozen_weight"].any()) is not low
                rank = ranks(LEVELS[client.id % 3])[FACTORED.index(name)] if low else 0
                assert client.model[f"net.{name}.factors.U"][:, :rank].any() or not low
                assert not client.model[f"net.{name}.factors.U"][:, rank:].any()

        def end(self, client):
            message = super().end(client)
            sent["up"][client.id] = {name: tuple(value.shape) for name, value in message.tensors.items()}
            return message

    _, loop = run(tmp_path, Watching(LEVELS), max_epochs=1)
    assert sent["down"] == sent["up"]
    dense = {f"net.{name}": tuple(value.shape) for name, value in convolutions().state_dict().items()}
    others = {name: shape for name, shape in dense.items() if name not in ("net.3.weight", "net.7.weight")}
    full = {"net.3.frozen_weight": (8, 6, 3, 5), "net.7.frozen_weight": (10, 8, 3, 3)}
    for client, level in enumerate([1.0, 0.5, 0.2, 1.0, 0.5]):
        first, second = ranks(level)
        factors = {
            "net.3.factors.U": (24, first),
            "net.3.factors.V": (30, first),
            "net.7.factors.U": (30, second),
            "net.7.factors.V": (24, second),
        }
        assert sent["down"][client] == {**others, **(full if level == 1 else factors)}
    assert loop.ledger.total_down < loop.ledger.dense_bytes * 5


def test_the_base_has_no_gradient_where_factors_train(tmp_path):
    """Nor where a model reads the weight of a layer instead of calling it."""
    seen = []

    class Reading(nn.Linear):
        def __init__(self):
            super().__init__(40, 12, dtype=torch.float64)
            self.inner = nn.Linear(12, 4, dtype=torch.float64)

        def forward(self, inputs):
            return nn.functional.linear(super().forward(inputs), self.inner.weight, self.inner.bias)

    class Watch(pl.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            parameters = dict(pl_module.named_parameters())
            for prefix in ("net.3", "net.11.inner"):
                base, factor = (parameters[f"{prefix}.{name}"].grad for name in ("frozen_weight", "factors.V"))
                seen.append((base is None, factor is None))

    net = convolutions()
    net[11] = Reading()
    module = Module(net, optimizer=partial(torch.optim.AdamW, lr=0.01))
    rank = low_rank(exclude=["0"], include=["3", "7", "inner"], rank_ratio=0.25)
    algorithm = FedHM((1.0, 0.25))
    run(tmp_path, algorithm, rank, module, max_epochs=1, callbacks=[Watch()], participants=[[0, 1]])
    # Before a client's first step the gradients of the last one are there, or none.
    assert {(True, False), (False, True)} <= set(seen) <= {(True, False), (False, True), (True, True)}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "momentum"])
def test_what_a_client_lacks_stays_zero_when_clients_step_together(tmp_path, optimizer):
    optimizers = {
        "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    }
    gradients = []

    class Watching(FedHM):
        def before_step(self, step):
            super().before_step(step)
            base, factor = (step.parameters[f"net.3.{name}"].grad for name in ("frozen_weight", "factors.U"))
            gradients.append((step.stacked, base is None, factor is None))

        def end(self, client):
            rank = ranks(LEVELS[client.id % 3])[0] if client.id % 3 else 0
            assert bool(client.model["net.3.frozen_weight"].any()) is (rank == 0)
            for factor in ("U", "V"):
                assert not client.model[f"net.3.factors.{factor}"][:, rank:].any()
                assert rank == 0 or client.model[f"net.3.factors.{factor}"][:, :rank].any()
            return super().end(client)

    module = Module(convolutions(), optimizer=optimizers[optimizer])
    run(tmp_path, Watching(LEVELS), low_rank(frobenius_decay=0.1), module, execution="vectorized")
    assert set(gradients) == {(True, True, False), (True, False, True)}


def test_variants_are_the_best_approximations_of_each_level(tmp_path):
    module, loop = run(tmp_path, FedHM(LEVELS), max_epochs=1)
    algorithm, server = loop.algorithm, loop.server
    variants = algorithm.variants(server)
    parameters = {name for name, _ in module.named_parameters()}
    assert list(variants) == ["0.5", "0.2"]
    personal = own_model(loop, 0)
    assert personal.keys() == parameters
    assert all(value is server.model[name] for name, value in personal.items())
    for level in (0.5, 0.2):
        assert variants[f"{level:g}"].keys() == parameters
        for name, rank in zip(FACTORED, ranks(level), strict=True):
            whole = nn.Conv2d(1, 1, 1)
            key = f"net.{name}.frozen_weight"
            whole.weight.data = server.model[key]
            best = recovered(factorized(whole, rank))
            torch.testing.assert_close(variants[f"{level:g}"][key], best, rtol=1e-9, atol=1e-12)
        personal = own_model(loop, LEVELS.index(level))
        assert all(torch.equal(personal[name], value) for name, value in variants[f"{level:g}"].items())
    changed = server.model["net.3.frozen_weight"] = 2 * server.model["net.3.frozen_weight"]
    doubled = algorithm.variants(server)["0.5"]["net.3.frozen_weight"]
    torch.testing.assert_close(doubled, 2 * variants["0.5"]["net.3.frozen_weight"])
    assert not torch.allclose(doubled, changed)
    assert {layer.active for layer in (module.net[3], module.net[7])} == {"base"}


@pytest.mark.slow
def test_weights_are_decomposed_once_a_round(tmp_path, monkeypatch):
    calls = []
    decompose = MatrixProduct.decompose
    monkeypatch.setattr(
        MatrixProduct, "decompose", lambda self, weight, rank: calls.append(rank) or decompose(self, weight, rank)
    )
    run(tmp_path, FedHM(LEVELS), max_epochs=3)
    assert calls == ranks(0.5) * 3


def test_columns_of_rounding_noise_are_zero(tmp_path):
    sent = {}

    class Recording(FedHM):
        def broadcast(self, server, client):
            message = super().broadcast(server, client)
            sent.update({name: value.clone() for name, value in message.tensors.items() if "net.3.factors" in name})
            return message

    module = Module(convolutions(), optimizer=SGD)
    matrix = MatrixProduct().as_matrix(module.net[3].weight)
    left, values, right = torch.linalg.svd(matrix.detach(), full_matrices=False)
    with torch.no_grad():
        module.net[3].weight.copy_(MatrixProduct().as_weight((left[:, :2] * values[:2]) @ right[:2], (8, 6, 3, 5)))
    run(tmp_path, Recording(LEVELS), module=module, max_epochs=1, participants=[[1]])
    assert {name: value.any(dim=0).tolist() for name, value in sent.items()} == {
        f"net.3.factors.{factor}": [True, True, False, False] for factor in "UV"
    }


def test_what_the_factors_held_before_becomes_part_of_the_weights(tmp_path):
    module = Module(convolutions(), optimizer=SGD)
    rank = low_rank()
    rank.convert(module)
    with torch.no_grad():
        module.net[3].factors["V"].normal_(generator=torch.Generator().manual_seed(0))
    before = module.net[3].weight.detach()
    loop = FederatedLoop(FedHM(LEVELS), partition=FromIndices(CLIENTS), summary=False)
    fit(trainer(tmp_path, rank, loop, max_epochs=1, max_steps=0, **DOUBLE), module, Data(images(), shuffle=False))
    torch.testing.assert_close(module.net[3].frozen_weight.detach(), before)
    assert not module.net[3].factors["V"].any()
    ready = weights(module)
    FedHM(LEVELS).setup(loop.server.base)
    assert_same(ready, weights(module))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_layers_of_other_kinds(tmp_path, tied):
    """An embedding, and an attention, whose layers' weights are read and not called; layers that share a weight."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(12, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            if tied:
                self.second.weight = self.first.weight
            self.classifier = nn.Linear(8, 4)

        def forward(self, inputs):
            features = self.embedding(inputs)
            features = features + self.attention(features, features, features, need_weights=False)[0]
            return self.classifier(self.second(self.first(features).relu()).relu().mean(1))

    zeros = []

    class Watching(FedHM):
        def end(self, client):
            low = client.id % 2 == 1
            for name, value in client.model.items():
                if name.endswith("frozen_weight"):
                    zeros.append(not value.any() if low else bool(value.any()))
                if ".factors." in name:
                    rank = 2 if low else 0
                    zeros.append(not value[:, rank:].any() and bool(value[:, :rank].any()) == low)
            return super().end(client)

    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(12, (90, 5), generator=draws)
    data = torch.utils.data.TensorDataset(tokens, tokens.sum(1) % 4)
    states = []
    for execution in ("sequential", "vectorized"):
        module = Module(Net(), optimizer=partial(torch.optim.Adam, lr=0.01))
        loop = FederatedLoop(Watching((1.0, 0.25)), partition=FromIndices(CLIENTS), summary=False, execution=execution)
        rank = LowRank(MatrixProduct(), rank_ratio=0.25, train_base=True, exclude=["classifier"], summary=False)
        fit(trainer(tmp_path, rank, loop, max_epochs=2, **DOUBLE), module, Data(data, shuffle=False))
        assert (module.net.first.factors is module.net.second.factors) is tied
        assert ("net.second.frozen_weight" in loop.server.model) is not tied
        states.append(weights(module))
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[-1][name], rtol=1e-8, atol=1e-8)
    assert zeros
    assert all(zeros)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": (1.0,)}, r"levels.*\[1\.0\]"),
        ({"levels": (1.5, 0.5)}, "above 0 and at most 1"),
        ({"levels": (0.0, 0.5)}, "above 0 and at most 1"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": 1e-4}, "use at least 0.00175"),
        ({"temperature": 0.01, "score": "inverse"}, "use at least 0.014"),
        ({"score": "rank"}, r"score.*'inverse'.*'rank'"),
        ({"server_model": True}, "capacity='dynamic'"),
    ],
)
def test_refuses_arguments(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        FedHM(**arguments)
    assert FedHM(temperature=0.00176).temperature == 0.00176


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (False, r"LowRank.*MatrixProduct\(\).*rank_ratio=0\.5"),
        (low_rank(train_base=False), r"FedHM.*'net\.3'"),
        (low_rank(role="weight", train_base=False), r"FedHM.*'net\.3'"),
        (low_rank(decouple=True), r"FedHM.*'net\.3'"),
        (low_rank(half_frozen=True), r"FedHM.*'net\.3'"),
        (low_rank(rank_ratio=0.25), r"'net\.3'.*rank.*2"),
        (LowRank(BlockKronecker(), ratio=0.25, train_base=True, summary=False), "is not one of them"),
    ],
)
def test_refuses_modules(tmp_path, rank, message):
    with pytest.raises(MisconfigurationException, match=message):
        run(tmp_path, FedHM(LEVELS), rank)


@pytest.mark.slow
def test_refuses_kept_moments(tmp_path):
    with pytest.raises(MisconfigurationException, match="optimizer_state='keep'"):
        run(tmp_path, FedHM(LEVELS), optimizer_state="keep")
