"""TDPFed's rounds from the paper's equations in plain PyTorch, with autograd and torch's own Adam."""

from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import CP, FederatedLoop, FromIndices, LowRank, TDPFed
from lightning_lowrank.algorithms.tdpfed import factor_gradients, refit
from lightning_lowrank.federated.state import Base, ClientInfo, Server, trained_tensors
from lightning_lowrank.models import MLP, VGG8
from tests.algorithms.written_out import in_order, kept_by, own_model
from tests.grids import nightly_except
from tests.helpers import Data, Module, blobs, fit, network, trainer, weights

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103)), []]
PARTICIPANTS = [[0, 1], [1, 2], [0, 1]]
SIZES = [len(indices) for indices in CLIENTS]
NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
SMALL = {"compression": 1.2, "regularization": 2.0, "personal_steps": 2, "factor_steps": 3}


def run(tmp_path, algorithm, net=None, rounds=3, callbacks=(), **arguments):
    module = Module(net, optimizer=NESTEROV).double()
    settings = {"participants": PARTICIPANTS, "summary": False, **arguments}
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), **settings)
    fit(trainer(tmp_path, loop, *callbacks, max_epochs=rounds, limit_val_batches=0), module, in_order())
    return module, loop


def random_factors(shape, rank, seed=0, clients=()):
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(*clients, size, rank, dtype=torch.float64, generator=draws) for size in shape]


def composed(factors):
    letters = "abcdef"[: len(factors)]
    return torch.einsum(",".join(f"{letter}r" for letter in letters) + "->" + letters, *factors)


# Factors


@pytest.mark.parametrize("shape", [(5, 4), (1, 6), (4, 3, 3, 2), (2, 3, 4), (3, 2, 2, 3, 2)])
def test_gradients_are_those_of_autograd(shape):
    """Of one factor after another, each changed before the next; and of three stacked clients."""
    weight = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    stacked = random_factors(shape, 3, clients=(3,))
    expected = [torch.zeros_like(factor) for factor in stacked]
    for client in range(3):
        factors = [factor[client].clone().requires_grad_() for factor in stacked]
        for place, factor in enumerate(factors):
            error = ((weight[client] - composed(factors)) ** 2).sum() / 2
            (gradient,) = torch.autograd.grad(error, factor)
            expected[place][client] = gradient
            with torch.no_grad():
                factor -= 0.1 * gradient
    single = [factor[1].clone() for factor in stacked]
    for factors, own, theirs in ((stacked, weight, expected), (single, weight[1], [each[1] for each in expected])):
        gradients = factor_gradients(own, factors)
        for factor, their in zip(factors, theirs, strict=True):
            gradient = next(gradients)
            torch.testing.assert_close(gradient, their, rtol=1e-11, atol=1e-11)
            factor -= 0.1 * gradient
        # The second sweep sees what the first has changed.
        torch.testing.assert_close(next(gradients), next(factor_gradients(own, factors)), rtol=0, atol=0)


def test_a_tensor_that_is_its_own_factor():
    weight, factor = torch.arange(3.0), torch.ones(3)
    gradient = next(factor_gradients(weight, [factor]))
    assert gradient.tolist() == [1, 0, -1]


TABLE_1 = {
    "DNN": (MLP(hidden=[100]), {"hidden.0": (59, 44), "classifier": (6, 5)}),
    "VGG8": (
        VGG8(),
        {
            "convolutions.0": (14, 11),
            "convolutions.1": (120, 90),
            "convolutions.2": (248, 186),
            "convolutions.3": (504, 378),
            "convolutions.4": (759, 569),
            "hidden.0": (85, 64),
            "hidden.1": (85, 64),
            "classifier": (6, 5),
        },
    ),
}


@pytest.mark.parametrize("model", TABLE_1)
@pytest.mark.parametrize("column", [0, 1])
def test_ranks_of_table_1(model, column):
    network, ranks = TABLE_1[model]
    algorithm = TDPFed(compression=(1.5, 2)[column])
    server = Server(Base(network, seed=0))
    algorithm.setup(server.base)
    server.sync_with_module(trained_tensors(network), shown={})
    if model == "VGG8":
        # Decomposing its weights takes long, and is not what is looked at.
        server.state["factors"] = {
            f"{name}.weight": {
                key: torch.zeros(shape)
                for key, shape in CP().factor_shapes(server.model[f"{name}.weight"].shape, rank[column]).items()
            }
            for name, rank in ranks.items()
        }
    else:
        algorithm.begin_round(server)
    found = algorithm._ranks
    assert found == {f"{name}.weight": rank[column] for name, rank in ranks.items()}
    dimensions = {name: sum(value.shape) for name, value in server.model.items() if name in found}
    whole = sum(value.numel() for name, value in server.model.items() if name not in found)
    expected = sum(rank * dimensions[name] for name, rank in found.items()) + whole
    assert algorithm.broadcast(server, ClientInfo(0, 1, round=0, seed=0)).elements == expected
    dense = sum(value.numel() for value in server.model.values())
    assert dense / expected == pytest.approx((1.5, 2)[column], rel=0.01)


def test_what_crosses_the_wire(tmp_path):
    crossed = []

    class Watching(TDPFed):
        def begin(self, client, message):
            crossed.append({name: tuple(value.shape) for name, value in message.tensors.items()})
            super().begin(client, message)

        def end(self, client):
            message = super().end(client)
            crossed.append({name: tuple(value.shape) for name, value in message.tensors.items()})
            return message

    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2, bias=False), nn.Linear(2, 1))
    net.append(nn.Linear(1, 4))
    run(tmp_path, Watching(**SMALL), net=net, participants=[[0]], rounds=1)
    down, up = crossed
    assert down == up
    # round(96 / (1.2 * 22)), round(32 / (1.2 * 18)); the last two have fewer numbers than factors of rank 1.
    assert {name: shape for name, shape in down.items() if "weight" in name} == {
        "net.0.weight.U": (16, 4),
        "net.0.weight.V": (6, 4),
        "net.2.weight.U": (2, 1),
        "net.2.weight.V": (16, 1),
        "net.1.weight": (16,),
        "net.3.weight": (1, 2),
        "net.4.weight": (4, 1),
    }
    buffers = {f"net.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert {name for name in down if "weight" not in name} == {
        *(f"net.{layer}.bias" for layer in (0, 1, 3, 4)),
        *buffers,
    }


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
def test_the_fit_is_that_of_autograd_and_torchs_adam(joint):
    """Over two batches, in double, where rounding is too small for Adam to make steps of it."""
    draws = torch.Generator().manual_seed(3)
    shapes = {"matrix": (9, 14), "kernel": (5, 4, 3, 3), "bias": (7,)}
    algorithm = TDPFed(regularization=12.0, factor_steps=17, factor_learning_rate=3e-4, adam_reset="round", joint=joint)
    start = {
        name: random_factors(shape, 4) if len(shape) > 1 else [torch.zeros(shape).double()]
        for name, shape in shapes.items()
    }
    own = {name: {str(place): value.clone() for place, value in enumerate(each)} for name, each in start.items()}
    kinds = {
        kind: {name: {key: torch.zeros_like(value) for key, value in each.items()} for name, each in own.items()}
        for kind in ("first", "second")
    }
    theirs = {name: [value.clone().requires_grad_() for value in each] for name, each in start.items()}
    adams = {name: [torch.optim.Adam([factor], lr=3e-4) for factor in each] for name, each in theirs.items()}
    for number in range(2):
        # The second batch begins at the factors' own product but for rounding, as a round does.
        weights_of = {
            name: composed(each).detach() if len(each) > 1 and number else torch.randn(shape, generator=draws).double()
            for (name, each), shape in zip(theirs.items(), shapes.values(), strict=True)
        }
        step = SimpleNamespace(round_state={"factors": own, "adam": kinds}, parameters=weights_of, number=number)
        with torch.no_grad():
            algorithm._fit(step)
        for name, factors in theirs.items():
            for _ in range(17):
                for turn in [adams[name]] if joint else [[adam] for adam in adams[name]]:
                    for factor in factors:
                        factor.grad = None
                    product = composed(factors) if len(factors) > 1 else factors[0]
                    (12.0 / 2 * (weights_of[name] - product).square().sum()).backward()
                    for adam in turn:
                        adam.step()
    for name, factors in theirs.items():
        torch.testing.assert_close(list(own[name].values()), [each.detach() for each in factors], rtol=0, atol=1e-9)


# Rounds


def train_client(theirs, start, client, joint, reset, kept):
    """Return a client's local factors and its personal model; ``kept`` has what clients' Adams know."""
    inputs, targets = in_order().train.tensors
    factors = {name: [value.clone().requires_grad_() for value in each] for name, each in start.items()}

    def local(name):
        return composed(factors[name]) if len(factors[name]) > 1 else factors[name][0]

    with torch.no_grad():
        for name, value in theirs.named_parameters():
            value.copy_(local(name))
    nesterov = NESTEROV(theirs.parameters())
    # A factor of its own optimizer is stepped alone; Adam of several is the same for each.
    adams = {name: [torch.optim.Adam([factor], lr=0.01) for factor in each] for name, each in factors.items()}
    if reset == "never" and client in kept:
        for name, each in adams.items():
            for adam, state in zip(each, kept[client][name], strict=True):
                adam.load_state_dict(state)
    for chunk in torch.tensor(CLIENTS[client]).split(8):
        if reset == "batch":
            adams = {name: [torch.optim.Adam([factor], lr=0.01) for factor in each] for name, each in factors.items()}
        for _ in range(2):
            nesterov.zero_grad()
            loss = nn.functional.cross_entropy(theirs.net(inputs[chunk]), targets[chunk])
            for name, value in theirs.named_parameters():
                loss = loss + 2.0 / 2 * ((value - local(name).detach()) ** 2).sum()
            loss.backward()
            nesterov.step()
        for name, value in theirs.named_parameters():
            for _ in range(3):
                for turn in [adams[name]] if joint else [[adam] for adam in adams[name]]:
                    for adam in adams[name]:
                        adam.zero_grad()
                    (2.0 / 2 * ((value.detach() - local(name)) ** 2).sum()).backward()
                    for adam in turn:
                        adam.step()
    kept[client] = {name: [adam.state_dict() for adam in each] for name, each in adams.items()}
    personal = {name: value.detach().clone() for name, value in theirs.named_parameters()}
    return {name: [value.detach() for value in each] for name, each in factors.items()}, personal


@nightly_except("sequential-False-1.0-round", "vectorized-True-1.8-round")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("execution", "joint", "mixing", "reset"),
    [
        ("sequential", False, 1.0, "round"),
        ("vectorized", True, 1.8, "round"),
        ("sequential", True, 1.8, "round"),
        ("vectorized", False, 1.0, "batch"),
        ("sequential", True, 1.0, "never"),
        ("vectorized", False, 1.0, "never"),
    ],
)
def test_rounds_with_averaged_factors_follow_the_paper(tmp_path, execution, joint, mixing, reset):
    algorithm = TDPFed(**SMALL, factor_learning_rate=0.01, adam_reset=reset, joint=joint, mixing=mixing)
    module, loop = run(tmp_path, algorithm, execution=execution)
    theirs = Module().double()
    state = {}
    for name, value in theirs.named_parameters():
        if value.ndim == 1:
            state[name] = [value.detach().clone()]
        else:
            # The truncated singular value decomposition, split evenly.
            left, values, right = torch.linalg.svd(value.detach(), full_matrices=False)
            rank = round(value.numel() / (1.2 * sum(value.shape)))
            roots = values[:rank].sqrt()
            state[name] = [left[:, :rank] * roots, right[:rank].mT * roots]
    personal, kept = {}, {}
    for participants in PARTICIPANTS:
        ends = []
        for client in participants:
            factors, personal[client] = train_client(theirs, state, client, joint, reset, kept)
            ends.append(factors)
        for name, each in state.items():
            means = [sum(end[name][place] for end in ends) / len(ends) for place in range(len(each))]
            state[name] = [(1 - mixing) * old + mixing * mean for old, mean in zip(each, means, strict=True)]
    close = partial(torch.testing.assert_close, rtol=1e-7, atol=1e-7)
    for name, each in state.items():
        close(weights(module)[name], composed(each) if len(each) > 1 else each[0])
        for client in (0, 1, 2):
            close(own_model(loop, client)[name], personal[client][name])
    assert own_model(loop, 3) is loop.server.model


@pytest.mark.parametrize("mixing", [1.0, 0.5])
def test_averaged_composed_tensors(tmp_path, mixing):
    """The global weights are the best of their rank for the weighted mean of the clients' composed weights."""
    sent = []

    class Watching(TDPFed):
        def begin_round(self, server):
            super().begin_round(server)
            sent.append({name: value.clone() for name, value in server.model.items()})

        def end(self, client):
            message = super().end(client)
            sent.append({name: value.clone() for name, value in message.tensors.items()})
            return message

    algorithm = Watching(**SMALL, factor_learning_rate=0.01, aggregation="ACT", mixing=mixing)
    module, _ = run(tmp_path, algorithm, participants=[[0, 1]], rounds=1)
    before, *ends = sent
    share = SIZES[0] / (SIZES[0] + SIZES[1])
    for name, value in module.named_parameters():
        if value.ndim == 1:
            mean = share * ends[0][name] + (1 - share) * ends[1][name]
            torch.testing.assert_close(value.detach(), (1 - mixing) * before[name] + mixing * mean)
            continue
        first, second = (end[f"{name}.U"] @ end[f"{name}.V"].mT for end in ends)
        target = (1 - mixing) * before[name] + mixing * (share * first + (1 - share) * second)
        rank = ends[0][f"{name}.U"].shape[1]
        smallest = torch.linalg.svdvals(target)[rank:].square().sum().sqrt()
        assert torch.linalg.matrix_rank(value.detach(), atol=1e-9) == rank
        assert (value.detach() - target).norm() < 1.001 * smallest + 1e-9
        assert (before[name] - target).norm() > 2 * smallest


@pytest.mark.slow
def test_clients_have_equal_weights_for_factors_and_their_own_for_composed_tensors(tmp_path):
    ends = {}
    for aggregation in ("AFM", "ACT"):
        for weighting in ("samples", "uniform"):
            algorithm = TDPFed(**SMALL, aggregation=aggregation)
            module, _ = run(tmp_path, algorithm, participants=[[0, 1]], rounds=1, weighting=weighting)
            ends[aggregation, weighting] = weights(module)["net.0.bias"]
    assert torch.equal(ends["AFM", "samples"], ends["AFM", "uniform"])
    assert not torch.equal(ends["ACT", "samples"], ends["ACT", "uniform"])


# From a weight back to factors


@pytest.mark.parametrize("shape", [(6, 5), (5, 4, 3, 3)])
def test_refit_finds_a_weight_of_its_rank_again(shape):
    exact = random_factors(shape, 3)
    start = [factor + 0.05 * noise for factor, noise in zip(exact, random_factors(shape, 3, seed=1), strict=True)]
    names = CP().factor_names(shape)
    found = refit(composed(exact), dict(zip(names, start, strict=True)))
    error = (composed(list(found.values())) - composed(exact)).norm()
    assert error < 2e-2 * (composed(start) - composed(exact)).norm()
    lengths = torch.stack([factor.norm(dim=0) for factor in found.values()])
    torch.testing.assert_close(lengths, lengths[:1].expand_as(lengths))
    assert tuple(found) == names


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refit_comes_near_to_a_weight_of_higher_rank(dtype):
    weight = composed(random_factors((8, 6, 3, 3), 9)).to(dtype)
    start = CP().decompose(composed(random_factors((8, 6, 3, 3), 9, seed=5)).to(dtype), 4)
    found = refit(weight, start)
    assert {factor.dtype for factor in found.values()} == {dtype}
    errors = [(CP().compose(each, weight.shape) - weight).float().norm() for each in (start, found)]
    best = (CP().compose(CP().decompose(weight, 4), weight.shape) - weight).float().norm()
    assert errors[1] < 0.7 * errors[0]
    assert errors[1] < 1.15 * best


def test_refit_of_zero_and_from_factors_that_are_not_independent():
    factors = {"U": torch.ones(4, 2), "V": torch.ones(3, 2)}
    zero = refit(torch.zeros(4, 3), factors)
    torch.testing.assert_close(zero["U"] @ zero["V"].mT, torch.zeros(4, 3))
    flat = refit(torch.full((4, 3), 5.0), factors)
    torch.testing.assert_close(flat["U"] @ flat["V"].mT, torch.full((4, 3), 5.0), rtol=1e-4, atol=1e-4)
    left = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    revived = refit(left @ torch.ones(2, 3), {"U": left, "V": torch.zeros(3, 2)})
    torch.testing.assert_close(revived["U"] @ revived["V"].mT, left @ torch.ones(2, 3), rtol=1e-4, atol=1e-4)


# The module around it


def convolutions():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        # A bias here would have no gradient but rounding, which Adam makes steps of.
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(30, 4),
    )


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["AFM", "ACT"])
@pytest.mark.nightly
def test_convolutions_one_after_another_and_together(tmp_path, aggregation):
    ends = []
    for execution in ("sequential", "vectorized"):
        algorithm = TDPFed(**SMALL, aggregation=aggregation)
        module, loop = run(tmp_path, algorithm, net=convolutions(), execution=execution, local_epochs=2)
        ends.append((weights(module), kept_by(loop, 1)["personal"], loop.ledger.state_dict()))
        shapes = {key: tuple(value.shape) for key, value in loop.server.state["factors"]["net.4.weight"].items()}
        last = [kept_by(loop, client)["personal"] for client in PARTICIPANTS[-1]]
        share = 0.5 if aggregation == "AFM" else SIZES[0] / (SIZES[0] + SIZES[1])
        mean = share * last[0]["net.2.running_mean"] + (1 - share) * last[1]["net.2.running_mean"]
        torch.testing.assert_close(module.net[2].running_mean, mean)
        assert shapes == {"U": (5, 13), "V": (6, 13), "K0": (3, 13), "K1": (3, 13)}
    for first, second in zip(ends[0][:2], ends[1][:2], strict=True):
        for name, value in first.items():
            torch.testing.assert_close(value, second[name], rtol=1e-6, atol=1e-7)
    assert ends[0][2] == ends[1][2]


def test_weights_changed_from_outside_get_new_factors(tmp_path):
    begun = []

    class Watching(TDPFed):
        def begin_round(self, server):
            super().begin_round(server)
            factors = server.state["factors"]
            begun.append({name: factors[name]["U"] @ factors[name]["V"].mT for name in factors})

    class Change(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                with torch.no_grad():
                    pl_module.net[2].weight.copy_(replacement)

    replacement = composed(random_factors((16, 16), 2))
    run(tmp_path, Watching(**SMALL), rounds=2, callbacks=[Change()])
    torch.testing.assert_close(begun[1]["net.2.weight"], replacement)
    assert (begun[0]["net.2.weight"] - replacement).norm() > 1


def test_refuses_what_it_cannot_train(tmp_path):
    low_rank = LowRank(CP(), rank=2, role="weight", summary=False)
    loop = FederatedLoop(TDPFed(), clients=2, summary=False)
    with pytest.raises(MisconfigurationException, match=r"LowRank.*`callbacks`"):
        fit(trainer(tmp_path, low_rank, loop), Module(), Data())
    frozen = network()
    for value in frozen.parameters():
        value.requires_grad_(value.ndim == 1)
    with pytest.raises(MisconfigurationException, match=r"compression=1\.2"):
        run(tmp_path, TDPFed(**SMALL), net=frozen)
    for value in (0.0, float("inf")):
        unsuitable = network()
        nn.init.constant_(unsuitable[4].weight, value)
        with pytest.raises(MisconfigurationException, match=r"net\.4\.weight is zero or not finite"):
            run(tmp_path, TDPFed(**SMALL), net=unsuitable)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["AFM", "ACT"])
def test_a_run_that_diverges_ends_with_the_cause(tmp_path, aggregation):
    algorithm = TDPFed(**{**SMALL, "regularization": 1e6}, aggregation=aggregation)
    with pytest.raises(MisconfigurationException, match=r"weight\.U"):
        run(tmp_path, algorithm, local_epochs=8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_follows_single_precision(tmp_path, dtype):
    """Each of Adam's steps is less than what these types resolve, and its eps is zero in half precision."""
    ends = {}
    for kind in (torch.float32, dtype):
        inputs, targets = blobs().tensors
        data = Data(TensorDataset(inputs.to(kind), targets), shuffle=False)
        module = Module(optimizer=NESTEROV).to(kind)
        start = module.net[4].weight.detach().float().clone()
        algorithm = TDPFed(compression=1.0, factor_learning_rate=1e-4)
        loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False)
        fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), module, data)
        ends[kind] = module.net[4].weight.detach().float() - start
        assert module.net[4].weight.dtype == loop.server.state["factors"]["net.4.weight"]["U"].dtype == kind
    assert (ends[dtype] - ends[torch.float32]).norm() < 0.3 * ends[torch.float32].norm()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": 0.5}, r"compression.*0\.5"),
        ({"compression": float("nan")}, "compression must be at least 1 and finite"),
        ({"regularization": 0}, r"regularization.*0"),
        ({"factor_learning_rate": 0.0}, r"factor_learning_rate.*0\.0"),
        ({"mixing": 0.0}, r"mixing.*0\.0"),
        ({"personal_steps": 0}, r"personal_steps.*0"),
        ({"factor_steps": 1.5}, r"factor_steps.*1\.5"),
        ({"adam_reset": "epoch"}, r"adam_reset.*'round'.*'never'"),
        ({"aggregation": "FM"}, r"aggregation.*'ACT'.*'FM'"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        TDPFed(**arguments)
