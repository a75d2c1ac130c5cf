"""Ditto against two models for each client, trained in plain PyTorch."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import Ditto, FedAvg, FederatedLoop, FromIndices, ProjectedAdamW, ProjectedSGD
from tests.algorithms.written_out import (
    CLIENTS,
    EXECUTIONS,
    ROUNDS,
    SIZES,
    Partly,
    assert_close,
    batches,
    dataset,
    federated,
    initial,
    mean,
    own_state,
)
from tests.grids import all_pairs, in_turn, nightly_except
from tests.helpers import Data, Module, assert_same, fit, network, trainer, weights

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01, eps=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
}
PROJECTED = {
    "ProjectedSGD": partial(ProjectedSGD, lr=0.1, rank=3, momentum=0.8, refresh_interval=2),
    "ProjectedAdamW": partial(
        ProjectedAdamW, lr=0.01, rank=3, subspace="gradient", refresh_interval=2, moments="rotate"
    ),
}
STRENGTH = 0.6


def reference(make, norm=None, rounds=ROUNDS, keep=False):
    """Return the global model and the clients' own."""
    model, personal, states = initial(norm), {}, {}
    for ids in rounds:
        ends = []
        for client in ids:
            copy, own = network(norm=norm).double(), network(norm=norm).double()
            copy.load_state_dict(model)
            own.load_state_dict(personal.get(client, model))
            optimizers = [make(net.parameters()) for net in (copy, own)]
            if keep and client in states:
                for optimizer, state in zip(optimizers, states[client], strict=True):
                    optimizer.load_state_dict(state)
            for inputs, targets in batches(client):
                for net, optimizer, strength in zip((copy, own), optimizers, (0.0, STRENGTH), strict=True):
                    optimizer.zero_grad()
                    distance = sum((value - model[name]).square().sum() for name, value in net.named_parameters())
                    (nn.functional.cross_entropy(net(inputs), targets) + strength / 2 * distance).backward()
                    optimizer.step()
            personal[client] = weights(own)
            states[client] = [optimizer.state_dict() for optimizer in optimizers]
            ends.append(weights(copy))
        model = mean(ends, [SIZES[client] for client in ids])
    return model, personal


def check(tmp_path, execution, make, norm=None, rounds=ROUNDS, keep=False):
    state = "keep" if keep else "reset"
    settings = {"norm": norm, "optimizer": make, "rounds": rounds, "optimizer_state": state}
    ended, loop = federated(tmp_path, Ditto(STRENGTH), execution, **settings)
    model, personal = reference(make, norm, rounds, keep)
    assert_close(ended, model)
    for client in range(len(CLIENTS)):
        assert_close(own_state(loop, client), personal.get(client, model))
    return ended, loop, settings


@nightly_except("Adagrad-False-sequential", "AdamW-True-vectorized", "SGD-False-sequential", "momentum-True-sequential")
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "keep", "execution"), all_pairs(OPTIMIZERS, [False, True], EXECUTIONS))
def test_rounds_follow_the_paper(tmp_path, optimizer, keep, execution):
    check(tmp_path, execution, OPTIMIZERS[optimizer], keep=keep)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "execution"), in_turn(PROJECTED, EXECUTIONS))
def test_subspaces_of_the_two_models(tmp_path, optimizer, execution):
    for client in range(3):
        check(tmp_path, execution, PROJECTED[optimizer], rounds=[[client]])


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_statistics_of_the_two_models(tmp_path, execution):
    ended, loop, _ = check(tmp_path, execution, OPTIMIZERS["momentum"], norm=nn.BatchNorm1d)
    steps = sum(len(batches(0)) for ids in ROUNDS if 0 in ids)
    assert own_state(loop, 0)["1.num_batches_tracked"] == steps
    assert not torch.allclose(own_state(loop, 0)["1.running_mean"], ended["1.running_mean"])


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_global_model_is_that_of_federated_averaging(tmp_path, execution):
    settings = {"norm": nn.BatchNorm1d, "optimizer": OPTIMIZERS["AdamW"]}
    ended, loop = federated(tmp_path, Ditto(3.0), execution, **settings)
    plain, twin = federated(tmp_path, FedAvg(), execution, **settings)
    # Vectorised, plain averaging adds up a cohort as stacks, Ditto client by client: the same to rounding.
    (assert_same if execution == "sequential" else assert_close)(ended, plain)
    assert loop.ledger.state_dict() == twin.ledger.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("buffers", "execution"), in_turn(["local", "reset"], EXECUTIONS))
def test_personal_statistics_are_their_own_whatever_the_global_ones_do(tmp_path, buffers, execution):
    _, loop = federated(tmp_path, Ditto(STRENGTH), execution, norm=nn.BatchNorm1d, buffers=buffers)
    for client in range(len(CLIENTS)):
        steps = sum(len(batches(client)) for ids in ROUNDS if client in ids)
        assert own_state(loop, client)["1.num_batches_tracked"] == steps


@nightly_except("Adagrad-vectorized")
@pytest.mark.parametrize(("optimizer", "execution"), in_turn(["momentum", "AdamW", "Adagrad"], EXECUTIONS))
@pytest.mark.slow
def test_personal_models_and_their_moments_are_resumed(tmp_path, optimizer, execution):
    def run(callbacks=(), ckpt_path=None):
        loop = FederatedLoop(
            Ditto(STRENGTH),
            partition=FromIndices([list(indices) for indices in CLIENTS]),
            participants=ROUNDS[:2],
            execution=execution,
            summary=False,
            **({"chunk_size": 2} if execution == "vectorized" else {}),
        )
        module = Module(network(norm=nn.BatchNorm1d).double(), optimizer=OPTIMIZERS[optimizer])
        settings = {"max_epochs": 2, "limit_val_batches": 0}
        fit(
            trainer(tmp_path, loop, *callbacks, **settings), module, Data(dataset(), shuffle=False), ckpt_path=ckpt_path
        )
        return weights(module), loop

    kept = ModelCheckpoint(tmp_path / "all", "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, loop = run([kept])
    files = sorted((tmp_path / "all").glob("*.ckpt"))
    assert len(files) > 2
    for file in files:
        again, twin = run(ckpt_path=file)
        assert_same(whole, again)
        for client in range(len(CLIENTS)):
            assert_same(own_state(loop, client), own_state(twin, client))


def test_models_that_are_not_pulled_are_trained_alone(tmp_path):
    """An optimizer leaves a parameter without a gradient as it is, whatever its weight decay."""
    make = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    _, loop = federated(tmp_path, Ditto(0), net=Partly().double(), optimizer=make, rounds=[[0]])
    assert_same({"shift": own_state(loop, 0)["shift"]}, {"shift": torch.ones(6).double()})


def test_refusals():
    for strength in (-1.0, float("nan"), float("inf")):
        with pytest.raises(MisconfigurationException, match="regularization must be at least 0 and finite"):
            Ditto(strength)
