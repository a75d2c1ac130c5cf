"""Rounds in plain PyTorch, with which methods' own rounds are compared: batches in order, double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_lowrank import FederatedLoop, FromIndices
from lightning_lowrank.federated import Algorithm
from lightning_lowrank.federated.client_states import flatten_state
from lightning_lowrank.federated.protocols import Personal, UnequalClients
from tests.helpers import Data, Module, blobs, fit, network, trainer, weights

CLIENTS = [range(40), range(40, 60), range(60, 97), range(97, 103)]
SIZES = [len(indices) for indices in CLIENTS]
ROUNDS = [[0, 1], [1, 2, 3], [0, 2], [0, 1, 2, 3]]
EXECUTIONS = ["sequential", "vectorized"]

PLAIN = partial(torch.optim.SGD, lr=0.1)

State = dict[str, Tensor]


class Partly(nn.Module):
    """Uses one of its parameters on small batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.shift = nn.Parameter(torch.ones(6))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs + self.shift if len(inputs) < 8 else inputs)


def dataset() -> TensorDataset:
    inputs, targets = blobs().tensors
    return TensorDataset(inputs.double(), targets)


def in_order() -> Data:
    """The data set in double precision, not shuffled."""
    return Data(dataset(), shuffle=False)


def images() -> TensorDataset:
    labels = blobs(90).tensors[1]
    draws = torch.Generator().manual_seed(5)
    centres = torch.randn(4, 2, 6, 6, generator=draws, dtype=torch.float64)
    return TensorDataset(centres[labels] + torch.randn(90, 2, 6, 6, generator=draws, dtype=torch.float64), labels)


def batches(client: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = dataset()[list(CLIENTS[client])]
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def initial(norm: Any = None) -> State:
    return weights(network(norm=norm).double())


def gradient(values: State, batch: tuple[Tensor, Tensor], net: nn.Module | None = None) -> State:
    net = network().double() if net is None else net
    net.load_state_dict(values)
    net.zero_grad()
    nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in net.named_parameters()
    }


def stepped(values: State, loss: Callable[[State], Tensor]) -> State:
    """Return the values after a step of gradient descent."""
    own = {name: value.detach().requires_grad_() for name, value in values.items()}
    slopes = torch.autograd.grad(loss(own), list(own.values()))
    return {name: own[name].detach() - 0.1 * slope for name, slope in zip(own, slopes, strict=True)}


def mean(states: Sequence[State], numbers: Sequence[float]) -> State:
    shares = [number / sum(numbers) for number in numbers]
    means = {
        name: sum(share * state[name].double() for share, state in zip(shares, states, strict=True))
        for name in states[0]
    }
    return {
        name: value if states[0][name].is_floating_point() else value.round().to(states[0][name].dtype)
        for name, value in means.items()
    }


def sgd(values: State, data: Sequence[tuple[Tensor, Tensor]], lr: float = 0.1) -> State:
    for batch in data:
        slope = gradient(values, batch)
        values = {name: value - lr * slope[name] for name, value in values.items()}
    return values


def federated(
    tmp_path: Any,
    algorithm: Algorithm,
    execution: str = "sequential",
    norm: Any = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = PLAIN,
    rounds: Sequence[Sequence[int]] = ROUNDS,
    module: dict[str, Any] | None = None,
    make_module: Callable[..., Module] = Module,
    net: nn.Module | None = None,
    trainer_settings: dict[str, Any] | None = None,
    callbacks: Sequence[pl.Callback] = (),
    ckpt_path: Path | None = None,
    **arguments: Any,
) -> tuple[State, FederatedLoop]:
    """Run rounds of a method, and return the global model and the loop."""
    loop = FederatedLoop(
        algorithm,
        partition=FromIndices([list(indices) for indices in CLIENTS]),
        participants=[list(ids) for ids in rounds],
        execution=execution,
        summary=False,
        **arguments,
    )
    fitted = make_module(network(norm=norm).double() if net is None else net, optimizer=optimizer, **(module or {}))
    settings = {"max_epochs": len(rounds), "limit_val_batches": 0, **(trainer_settings or {})}
    fit(trainer(tmp_path, loop, *callbacks, **settings), fitted, Data(dataset(), shuffle=False), ckpt_path=ckpt_path)
    return weights(fitted.net), loop


def resumed_ends(tmp_path: Path, make: Callable[[], Algorithm], execution: str, **arguments: Any) -> None:
    """Check that runs which go on from checkpoints, most of them inside rounds, end bit for bit as the whole run."""
    settings: dict[str, Any] = {"execution": execution, "rounds": [[0, 1], [1, 2, 3], [0, 2]], **arguments}
    if execution == "vectorized":
        settings["chunk_size"] = 2
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=2)
    whole, loop = federated(tmp_path, make(), callbacks=[every], **settings)
    files = sorted((tmp_path / "every").glob("*.ckpt"))
    # A checkpoint is written at the end of a turn, which is a chunk of clients.
    assert len(files) > (2 if execution == "vectorized" else 5)
    for file in files:
        again, resumed = federated(tmp_path, make(), ckpt_path=file, **settings)
        assert_close(whole, again, tolerance=0)
        assert resumed.ledger.state_dict() == loop.ledger.state_dict()
        for client in range(len(CLIENTS)):
            assert flatten_state(kept_by(resumed, client))[0] == flatten_state(kept_by(loop, client))[0]
            tensors = (flatten_state(kept_by(each, client))[1] for each in (resumed, loop))
            assert all(torch.equal(*pair) for pair in zip(*tensors, strict=True))


def assert_close(first: State, second: State, tolerance: float = 1e-9) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=tolerance, atol=tolerance, msg=name)


def bare(state: State) -> State:
    """Return a module's tensors by the names that they have in its network."""
    return {name.removeprefix("net."): value for name, value in state.items()}


def kept_by(loop: FederatedLoop, client: int) -> dict[str, Any]:
    """Return what a client keeps between rounds."""
    return loop.coordinator.states[client]


def own_model(loop: FederatedLoop, client: int) -> Mapping[str, Tensor]:
    """Return the model that a client would use."""
    coordinator = loop.coordinator
    given = UnequalClients.of(loop.algorithm).model_for(loop.server, coordinator.info(client))
    return Personal.of(loop.algorithm).personal_model(coordinator.context(client, {}), given)


def own_state(loop: FederatedLoop, client: int) -> State:
    """Return a client's own model, by the names of the network's tensors."""
    return bare(dict(own_model(loop, client)))
