"""FedBAT against its formulas, whose gradients autograd derives from a surrogate here, and its bytes."""

import math
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call

from lightning_lowrank import FedBAT, FederatedLoop, FromIndices
from lightning_lowrank.algorithms.fedbat import _binarise
from lightning_lowrank.compression import Channel
from lightning_lowrank.federated import Base, ClientContext, ClientInfo, LocalStep, Message, Server
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.models import CNN4
from lightning_lowrank.seeding import generator
from tests.algorithms import plain
from tests.helpers import Data, Module, blobs, fit, network, trainer

NORM = partial(network, norm=nn.LayerNorm)
EXACT = ("1.weight", "1.bias")


def optimizer(parameters):
    """Weights and biases have learning rates of their own, and a decay."""
    parameters = list(parameters)
    groups = [
        {"params": [value for value in parameters if value.ndim > 1], "lr": 0.1},
        {"params": [value for value in parameters if value.ndim == 1], "lr": 0.04},
    ]
    return torch.optim.SGD(groups, weight_decay=0.01)


def magnitude(first, exponent, bounds, rho):
    return torch.clamp(first * torch.exp(rho * exponent), *bounds)


def sampled(x, alpha, *draws):
    """Return plus or minus alpha, whose derivatives autograd finds in a value that passes the sign straight through."""
    uniform = torch.rand(x.shape, generator=draws[0])
    sign = torch.where(uniform < ((x / alpha + 1) / 2).clamp(0, 1), 1.0, -1.0).double()
    smooth = (x / alpha).clamp(-1, 1)
    return alpha * (smooth + (sign - smooth).detach())


def train(start, client, number, share, rho, rate, bounds, log):
    """Return what a client sends: signed magnitudes of most tensors, and the values of the norm's."""
    x = {name: torch.zeros_like(value) for name, value in start.items()}
    exponent = {name: torch.zeros((), dtype=torch.float64) for name in start}
    first = {}
    batches = torch.tensor(plain.CLIENTS[client]).split(8)
    for step, chunk in enumerate(batches):
        inputs, targets = plain.double()[chunk]
        draws = generator(0, "binarise", number, client, step)
        leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
        exponents = {name: value.clone().requires_grad_() for name, value in exponent.items()}
        used = dict(leaves)
        if step >= math.ceil(share * len(batches) - 1e-9):
            for name in start:
                if name not in EXACT:
                    first.setdefault(name, x[name].abs().mean())
                    alpha = magnitude(first[name], exponents[name], bounds, rho)
                    log.append(float(alpha.detach()))
                    used[name] = sampled(leaves[name], alpha, draws)
        weights = {name: start[name] + used[name] for name in start}
        nn.functional.cross_entropy(functional_call(NORM(), weights, (inputs,)), targets).backward()
        for name in start:
            lr = 0.1 if start[name].ndim > 1 else 0.04
            x[name] = x[name] - lr * (leaves[name].grad + 0.01 * (start[name] + x[name]))
            if exponents[name].grad is not None:
                exponent[name] = exponent[name] - (lr if rate is None else rate) * exponents[name].grad
    draws = generator(0, "binarise", number, client, "up")
    with torch.no_grad():
        return {
            name: start[name] + x[name]
            if name in EXACT
            else sampled(x[name], magnitude(first.get(name, x[name].abs().mean()), exponent[name], bounds, rho), draws)
            for name in start
        }


def coded(difference, draws):
    """Return a difference in one bit per number and its mean magnitude."""
    if not difference.any():
        torch.rand(difference.shape, generator=draws)
        return difference
    return sampled(difference, difference.abs().mean(), draws)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "rho", "rate", "bounds", "down", "execution"),
    [
        (0.5, 6.0, None, (5e-4, 5e-2), False, "sequential"),
        (0.4, 6.0, 0.3, (1e-9, 9.0), False, "vectorized"),
        (0.5, 2.0, None, (0.01, 0.012), True, "sequential"),
        (1.0, 6.0, None, (1e-9, 9.0), True, "vectorized"),
        (0.7, 0.0, None, (1e-9, 9.0), False, "sequential"),
    ],
)
def test_rounds_follow_the_paper(tmp_path, share, rho, rate, bounds, down, execution):
    algorithm = FedBAT(share, rho, rate, bounds, compress_down=down)
    module, _ = plain.fitted(
        tmp_path, algorithm, module=lambda: Module(NORM(), optimizer=optimizer), execution=execution
    )
    model = {name: value.detach().double() for name, value in NORM().named_parameters()}
    held, log = dict(model), []
    for number, clients in enumerate(plain.PARTICIPANTS):
        draws = generator(0, "binarise", number, "down")
        for name in model:
            exact = not down or name in EXACT
            held[name] = model[name] if exact else held[name] + coded(model[name] - held[name], draws)
        sent = {client: train(held, client, number, share, rho, rate, bounds, log) for client in clients}
        for name in model:
            mean = plain.mean({client: values[name] for client, values in sent.items()})
            model[name] = mean if name in EXACT else model[name] + mean
    for name, value in module.net.named_parameters():
        torch.testing.assert_close(value.detach(), model[name], rtol=1e-9, atol=1e-9)
    if share < 1 and rho:
        assert len(set(log)) > 50 or bounds == (0.01, 0.012)
    if bounds == (0.01, 0.012):
        assert {0.01, 0.012} < set(log)


@pytest.mark.slow
def test_a_draw_has_the_clipped_update_as_its_mean():
    x = torch.tensor([-3.0, -1.0, -0.4, 0.0, 0.7, 1.0, 1.5]).double()
    draws = generator(0)
    total = sum(_binarise(x, torch.tensor(0.8), torch.rand(7, generator=draws)) for _ in range(5000)) / 5000
    assert (total - x.clamp(-0.8, 0.8)).abs().max() < 5 * 0.8 / math.sqrt(5000)


def test_what_is_not_finite_is_not_hidden():
    x = torch.tensor([1.0, math.nan, math.inf])
    drawn = _binarise(x, torch.tensor(0.5), torch.rand(3))
    assert drawn[0] == 0.5
    assert drawn[1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_draw_is_one_magnitude_in_the_updates_own_type(dtype):
    drawn = _binarise(torch.linspace(-1, 1, 50).to(dtype), torch.tensor(1 / 3), torch.rand(50))
    assert drawn.dtype == dtype
    assert len(drawn.abs().unique()) == 1


def begun(algorithm, module, buffers="average", optimizers=()):
    base = Base(module, 0, buffers, optimizers)
    base.remember_buffers()
    server, model = Server(base), trained_tensors(module)
    algorithm.setup(base)
    server.sync_with_module(model, shown={})
    algorithm.begin_round(server)
    client = ClientContext(0, 1, 0, 0, base=base, model=model, state={}, steps=25)
    sent = broadcast(algorithm, server)
    algorithm.begin(client, Message(Channel().send(sent.tensors, message_codec=sent.codec, seed=0).received))
    return server, client


def broadcast(algorithm, server):
    message = algorithm.broadcast(server, ClientInfo(0, 1, server.round, 0))
    return Message({**message.tensors, **server.announcement}, message.codec)


def step_of(client, number, steps):
    return LocalStep(
        client.base, 0, (0,), client.model, {}, client.round_state, number, torch.tensor(steps).double(), stacked=False
    )


def test_bytes_of_the_papers_network():
    module = CNN4()
    algorithm = FedBAT(compress_down=True)
    for buffers, statistics in (("local", 0), ("average", 4 * 960 + 8 * 4)):
        server, client = begun(algorithm, module, buffers)
        for message in (algorithm.end(client), broadcast(algorithm, server)):
            # A bit for each of 389,920 weights, five magnitudes, and 960 numbers of the norms' affine maps.
            assert 389_920 // 8 + 5 * 4 + 960 * 4 == 52_600
            nbytes = message.codec.nbytes(message.tensors)
            assert 52_600 + statistics < nbytes < (52_600 + statistics) * 1.03 + bool(statistics) * 1000
            assert nbytes == len(message.codec.encode(message.tensors))
    assert round(52_600 / (4 * 390_880), 3) == 0.034


def test_a_follower_of_the_broadcasts_holds_what_clients_start_from():
    module = network()
    algorithm = FedBAT(compress_down=True)
    server, _ = begun(algorithm, module)
    following = {name: value.clone() for name, value in server.model.items()}
    server.model = {name: value + 0.01 * torch.randn_like(value) for name, value in server.model.items()}
    gaps = []
    for server.round in range(1, 30):
        algorithm.begin_round(server)
        message = broadcast(algorithm, server)
        for name, value in message.codec.transmit(message.tensors).items():
            following[name] += value
        gaps.append(sum(float((server.model[name] - value).abs().sum()) for name, value in following.items()))
    for name, value in server.base.state["shared"].items():
        assert torch.equal(value, following[name])
    assert gaps[-1] < 0.05 * gaps[0]


@pytest.mark.slow
@pytest.mark.parametrize("down", [False, True])
def test_idle_clients_hear_differences(tmp_path, down):
    _, loop = plain.fitted(tmp_path, FedBAT(compress_down=down))
    taking_part = sum(map(len, plain.PARTICIPANTS))
    idle = 4 * len(plain.PARTICIPANTS) - taking_part
    assert loop.ledger.total_idle * taking_part == (idle * loop.ledger.total_down if down else 0)


def test_a_share_that_is_whole_steps_is_taken_as_such():
    assert 0.28 * 25 > 7
    algorithm = FedBAT(full_precision_share=0.28)
    _, client = begun(algorithm, nn.Linear(3, 2))
    for number, begins in ((6, False), (7, True)):
        algorithm.local_update(step_of(client, number, 25), lambda: None)
        assert (client.round_state["first_magnitude"]["weight"] >= 0) == begins


def test_a_step_that_16_bit_scaling_skips_leaves_the_magnitude():
    algorithm = FedBAT(full_precision_share=0.1)
    module = nn.Linear(3, 2)
    _, client = begun(algorithm, module, optimizers=[torch.optim.SGD(module.parameters(), lr=0.1)])
    with torch.no_grad():
        for value in module.parameters():
            value += 0.01
    step = step_of(client, 1, 2)
    before = {name: value.detach().clone() for name, value in client.model.items()}

    def update(gradient):
        for value in module.parameters():
            value.grad = torch.full_like(value, gradient)
        algorithm.before_step(step)

    algorithm.local_update(step, lambda: None)
    for name, value in client.model.items():
        assert torch.equal(value, before[name])
    algorithm.local_update(step, partial(update, math.inf))
    assert all(float(value) == 0 for value in client.round_state["exponent"].values())
    for name, value in client.model.items():
        assert torch.equal(value, before[name])
    algorithm.local_update(step, partial(update, 1.0))
    assert any(float(value) != 0 for value in client.round_state["exponent"].values())


@pytest.mark.nightly
def test_learns_with_adam_and_a_parameter_that_is_not_used(tmp_path):
    class Unused(Module):
        def __init__(self):
            super().__init__(NORM(), optimizer=partial(torch.optim.Adam, lr=0.01))
            self.unused = nn.Parameter(torch.zeros(3))

    loop = FederatedLoop(FedBAT(), partition=FromIndices(plain.CLIENTS), local_epochs=4, summary=False)
    run = trainer(tmp_path, loop, max_epochs=12)
    fit(run, Unused(), Data(blobs()))
    assert run.callback_metrics["val_acc"] > 0.7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"full_precision_share": 0.0}, r"full_precision_share.*0\.0"),
        ({"rho": -1.0}, r"rho.*-1\.0"),
        ({"rho": math.inf}, "rho must be .* but is inf"),
        ({"learning_rate": -0.1}, r"learning_rate.*-0\.1"),
        ({"magnitudes": (0.0, 1.0)}, r"magnitudes\[0\].*0\.0"),
        ({"magnitudes": (1.0, 0.5)}, r"magnitudes\[1\].*0\.5"),
    ],
)
def test_refuses_arguments_out_of_range(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        FedBAT(**arguments)
