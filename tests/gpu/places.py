"""Where the tests of this folder run, and the small runs that they compare.

Each test runs on every accelerator that is there: a CUDA GPU, Apple's. The environment variable ``LOWRANK_TEST_DEVICE``
names another place, on which the same bodies run: ``cpu``, or ``strict`` for the pretend device of
``tests/strict_device``, which is as strict as CUDA about devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_lowrank.testing.experiment import Experiment, Outcome, quiet
from tests.algorithms.methods import LOW_RANK, METHODS, Method
from tests.helpers import Module

CHOSEN = os.environ.get("LOWRANK_TEST_DEVICE", "")
KNOWN = ("cuda", "mps", "cpu", "strict")

if CHOSEN == "strict":
    # Before any backward pass, which sets up autograd for the devices there are.
    from tests.strict_device import device as strict_device

    strict_device.install()


def places() -> list[str]:
    """Return where the tests run; nowhere without an accelerator."""
    if CHOSEN:
        if CHOSEN not in KNOWN:
            raise ValueError(f"LOWRANK_TEST_DEVICE={CHOSEN!r} is none of {', '.join(KNOWN)}")
        return [CHOSEN]
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [place for place, available in there.items() if available]


def on(place: str) -> dict[str, Any]:
    """Return the trainer's arguments for a place."""
    if place == "strict":
        device = torch.device(f"{torch._C._get_privateuse1_backend_name()}:0")
        return {"accelerator": strict_device.StrictAccelerator(), "strategy": SingleDeviceStrategy(device=device)}
    return {"accelerator": {"cuda": "gpu"}.get(place, place), "devices": 1}


def device_of(place: str) -> torch.device:
    """Return a place's device."""
    return on(place)["strategy"].root_device if place == "strict" else torch.device(place, 0)


def precise(place: str) -> torch.dtype:
    """Return the type in which results can be compared closely: Apple's GPUs have no float64."""
    return torch.float32 if place == "mps" else torch.float64


def tolerance(dtype: torch.dtype) -> float:
    """Return what rounding may make of a few steps, relative to a tensor's largest number."""
    return 1e-8 if dtype == torch.float64 else 2e-3


class Quiet(Module):
    """Logs nothing, and has the ``forward`` that some methods call."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def experiment(name: str) -> Experiment:
    """Return the runs of a method of ``tests/algorithms/methods.py`` in its first form."""
    method: Method = METHODS[name]

    def module(norm: Any) -> Quiet:
        return Quiet(method.network(norm=method.norm), optimizer=method.optimizer)

    return Experiment(method.make, module, LOW_RANK[method.forms[0]], method.settings)


def convolutions() -> nn.Module:
    """Return a network that uses what is random or in no fixed order on a GPU: dropout, and cuDNN's convolutions."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 8, 2, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(96, 4),
    )


MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def of_network(make: Any, optimizer: Any = MOMENTUM) -> Experiment:
    """Return the runs of FedAvg with a network."""
    return Experiment(METHODS["FedAvg"].make, lambda norm: Quiet(make(), optimizer=optimizer))


def run(
    place: str, of: Experiment, *callbacks: Any, trainer: Mapping[str, Any] | None = None, **settings: Any
) -> Outcome:
    """Train on a place.

    ``data``, ``checkpoint``, ``batch_size`` and ``shuffle`` are those of `Experiment.run`, the rest the loop's.
    """
    given = {name: settings.pop(name) for name in ("data", "checkpoint", "batch_size", "shuffle") if name in settings}
    with quiet():
        torch.manual_seed(0)
        return of.run(of.loop(**settings), *callbacks, **given, **{"max_epochs": 2, **on(place), **(trainer or {})})


def apart(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Return the largest difference of tensors, relative to each one's largest number."""
    assert one.keys() == two.keys()
    worst = 0.0
    for name, tensor in one.items():
        first, second = tensor.detach().cpu().double(), two[name].detach().cpu().double()
        assert first.shape == second.shape, name
        if first.numel():
            difference = float((first - second).abs().max() / (1e-6 + second.abs().max()))
            # A number that is not one is no small difference.
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def astray(one: Outcome, two: Outcome, of: Experiment) -> float:
    """Return how far one run ended from another, relative to how far that came from the beginning."""
    start = of.module(dtype=next(two.module.parameters()).dtype).state_dict()

    def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
        return sum(float((first[name].cpu().double() - second[name].cpu().double()).square().sum()) for name in start)

    return (distance(one.weights, two.weights) / distance(two.weights, start)) ** 0.5
