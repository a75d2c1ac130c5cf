"""FedMUD's rounds derived from the paper's equations in plain PyTorch, without the package's layers."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import BlockKronecker, FedAvg, FederatedLoop, FedMUD, FromIndices, LowRank, MatrixProduct
from lightning_lowrank.federated import Base, ClientContext
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.seeding import generator
from tests.helpers import Data, Module, assert_same, blobs, fit, trainer, weights

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103))]
SIZES = [len(indices) for indices in CLIENTS]


class Rounds(pl.Callback):
    """Keeps the global model at the start of each round, and each client's at its end."""

    def __init__(self):
        self.started, self.finished = [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.started.append(weights(pl_module.net))


def product(factors, shape):
    return factors["U"] @ factors["V"].T


def blocks(factors, shape):
    flat = torch.cat([torch.kron(u, v).flatten() for u, v in zip(factors["U"], factors["V"], strict=True)])
    return flat[: shape.numel()].reshape(shape)


def effective(state, prefix, compose, decouple, half_frozen):
    """W + f(U, V), W + f(U, V~) + f(U~, V), or W + f(U~, V)."""
    frozen = state[f"{prefix}.frozen_weight"]
    trained = {name: state[f"{prefix}.factors.{name}"] for name in ("U", "V") if f"{prefix}.factors.{name}" in state}
    fixed = {name: state[f"{prefix}.fixed.{name}"] for name in ("U", "V") if f"{prefix}.fixed.{name}" in state}
    if decouple:
        first = compose({"U": trained["U"], "V": fixed["V"]}, frozen.shape)
        return frozen + first + compose({"U": fixed["U"], "V": trained["V"]}, frozen.shape)
    return frozen + compose({**trained, **fixed}, frozen.shape)


def train_client(state, client, round_number, form):
    trained = [name for name in state if "frozen" not in name and "fixed" not in name]
    state = {name: value.clone().requires_grad_(name in trained) for name, value in state.items()}
    indices = torch.tensor(CLIENTS[client])
    order = indices[torch.randperm(len(indices), generator=generator(0, "order", round_number, client))]
    for inputs, targets in (blobs()[chunk] for chunk in order.split(8)):
        hidden = inputs
        for prefix in ("0", "2", "4"):
            hidden = nn.functional.linear(hidden, effective(state, prefix, *form), state[f"{prefix}.bias"])
            hidden = hidden if prefix == "4" else hidden.relu()
        gradients = torch.autograd.grad(nn.functional.cross_entropy(hidden, targets), [state[name] for name in trained])
        with torch.no_grad():
            for name, gradient in zip(trained, gradients, strict=True):
                state[name] -= 0.1 * gradient
    return {name: value.detach() for name, value in state.items()}


FORMS = [
    (MatrixProduct(), product, False, False),
    (MatrixProduct(), product, True, False),
    (MatrixProduct(), product, False, True),
    (BlockKronecker(), blocks, False, False),
    (BlockKronecker(), blocks, True, False),
    (BlockKronecker(), blocks, False, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("factorization", "compose", "decouple", "half_frozen"), FORMS)
def test_rounds_follow_the_paper(tmp_path, factorization, compose, decouple, half_frozen):
    low_rank = LowRank(factorization, rank=2, decouple=decouple, half_frozen=half_frozen, summary=False)
    rounds, module = Rounds(), Module()
    loop = FederatedLoop(FedMUD(), partition=FromIndices(CLIENTS), summary=False)
    fit(trainer(tmp_path, low_rank, loop, rounds, max_epochs=4), module, Data())
    ends = [*rounds.started[1:], weights(module.net)]
    form = (compose, decouple, half_frozen)
    for number, (start, end) in enumerate(zip(rounds.started, ends, strict=True)):
        clients = [train_client(start, client, number, form) for client in range(3)]
        mean = {
            name: sum(size * state[name].double() for size, state in zip(SIZES, clients, strict=True)) / sum(SIZES)
            for name in start
        }
        recovered = [
            {prefix: effective(state, prefix, *form) for prefix in ("0", "2", "4")} for state in (*clients, mean)
        ]
        for prefix in ("0", "2", "4"):
            # Every side adds the averaged change to its weight, and the new factors change nothing.
            torch.testing.assert_close(
                end[f"{prefix}.frozen_weight"], recovered[-1][prefix].float(), atol=2e-6, rtol=1e-5
            )
            torch.testing.assert_close(effective(end, prefix, *form), end[f"{prefix}.frozen_weight"])
            torch.testing.assert_close(end[f"{prefix}.bias"], mean[f"{prefix}.bias"].float(), atol=2e-6, rtol=1e-5)
            mean_recovered = sum(
                size * client[prefix].double() for size, client in zip(SIZES, recovered, strict=False)
            ) / sum(SIZES)
            gap = (mean_recovered - recovered[-1][prefix]).abs().max()
            if decouple or half_frozen:
                assert gap < 1e-6
        if not (decouple or half_frozen):
            assert gap > 1e-6
        drawn = [name for name in start if "U" in name and not (decouple and "factors" in name)]
        assert all(not torch.equal(start[name], end[name]) for name in drawn)


@pytest.mark.slow
def test_reset_interval(tmp_path):
    rounds, module = Rounds(), Module()
    loop = FederatedLoop(FedMUD(reset_interval=3), partition=FromIndices(CLIENTS), summary=False)
    fit(trainer(tmp_path, LowRank(MatrixProduct(), rank=2, summary=False), loop, rounds, max_epochs=7), module, Data())
    frozen = [start["2.frozen_weight"] for start in rounds.started]
    changed = [not torch.equal(*pair) for pair in itertools.pairwise(frozen)]
    assert changed == [False, False, True, False, False, True]
    assert rounds.started[1]["2.factors.V"].abs().sum() > 0
    assert rounds.started[3]["2.factors.V"].abs().sum() == 0


@pytest.mark.slow
def test_never_resetting_is_fedavg_of_the_factors(tmp_path):
    ends = []
    for algorithm in (FedMUD(reset_interval=99), FedAvg()):
        module = Module()
        low_rank = LowRank(MatrixProduct(), rank=2, summary=False)
        loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False)
        fit(trainer(tmp_path, low_rank, loop), module, Data())
        ends.append(weights(module))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.slow
def test_a_site_of_its_own_follows_the_server(tmp_path):
    """Another copy of the module, which hears every broadcast, has the server's frozen weights and the new factors."""
    site = Module()
    low_rank = LowRank(MatrixProduct(), rank=2, decouple=True, summary=False)
    low_rank.convert(site)
    base, follower, live = Base(site, seed=0), FedMUD(), trained_tensors(site)
    follower.setup(base)

    class Watching(FedMUD):
        def begin(self, client, message):
            follower.update_base(base, message.tensors)
            context = ClientContext(**{**vars(client), "base": base, "model": live})
            follower.begin(context, message)
            super().begin(client, message)
            theirs = weights(client.base.module)
            assert_same(weights(site), theirs)
            start = follower.reference(base, message.tensors)
            assert all(torch.equal(start[name], theirs[name]) for name in live)

    module = Module()
    loop = FederatedLoop(Watching(), partition=FromIndices(CLIENTS), participants=[[0], [1], [2]], summary=False)
    fit(trainer(tmp_path, LowRank(MatrixProduct(), rank=2, decouple=True, summary=False), loop), module, Data())
    assert base.state["factors"]


@pytest.mark.slow
def test_idle_clients_hear_what_follows_a_reset(tmp_path):
    heard = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            heard.append(loop.ledger.round_idle / loop.ledger.round_down)

    loop = FederatedLoop(FedMUD(reset_interval=2), clients=10, clients_per_round=2, summary=False)
    low_rank = LowRank(MatrixProduct(), rank=2, summary=False)
    fit(trainer(tmp_path, low_rank, loop, Watch(), max_epochs=5), Module(), Data())
    assert heard == [0, 0, 4, 0, 4]


def test_refuses_what_it_cannot_train(tmp_path):
    with pytest.raises(MisconfigurationException, match="reset_interval"):
        FedMUD(reset_interval=0)
    for callbacks in ([], [LowRank(MatrixProduct(), rank=2, role="weight", summary=False)]):
        with pytest.raises(MisconfigurationException, match="role='update'"):
            fit(trainer(tmp_path, *callbacks, FederatedLoop(FedMUD(), clients=2, summary=False)), Module(), Data())
