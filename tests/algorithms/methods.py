"""The methods that the shared contract is checked for, each with what the contract needs to know of it.

A method takes part by its entry here; one that is exported from ``lightning_lowrank.algorithms`` without an entry fails
a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_lowrank import (
    BlockKronecker,
    Ensemble,
    FromIndices,
    LowRank,
    MatrixProduct,
    ProjectedSGD,
    aggregation,
    algorithms,
)
from lightning_lowrank.federated import Algorithm
from tests.helpers import network

LOW_RANK: dict[str, Callable[[], LowRank] | None] = {
    "dense": None,
    "weight": partial(LowRank, MatrixProduct(), rank=2, role="weight", summary=False),
    "update": partial(LowRank, MatrixProduct(), rank=2, summary=False),
    "decoupled blocks": partial(LowRank, BlockKronecker(), ratio=0.4, decouple=True, skip=["last"], summary=False),
    "half-frozen": partial(LowRank, MatrixProduct(), rank=2, half_frozen=True, summary=False),
}
# Forms that one method asks for; the others need not say whether they work with them.
FORMS = tuple(LOW_RANK)
LOW_RANK["lora"] = partial(LowRank, MatrixProduct(), rank=2, alpha=2, init="lora", summary=False)
LOW_RANK["trained base"] = partial(LowRank, MatrixProduct(), rank_ratio=0.25, train_base=True, summary=False)
PLAIN = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.03, momentum=0.7)
UPDATES = ("update", "decoupled blocks", "half-frozen")
GROUPS = partial(nn.GroupNorm, 4)


@dataclass(frozen=True)
class Method:
    """What the contract needs to know of a method.

    Args:
        make: Makes the algorithm.
        forms: The forms of layers it works with; the others it must refuse.
        refusal: What it says of the others, a regular expression.
        plain: Tolerance within which one client that takes part in one round is plain training. ``None``: it is not.
        identical: Tolerance within which identical clients are one client. ``None``: they are not.
        not_so: Why, where ``plain`` or ``identical`` is ``None``.
        optimizer: Makes the module's optimizer.
        learns: Settings with which it learns the blobs: ``max_epochs``, and arguments of `FederatedLoop`.
        settings: Arguments of `FederatedLoop` that it needs always.
        traffic: Whether its bytes are those of FedAvg in the same form.
        vectorizes: Whether its clients can step together.
        trains_global: Whether there is a global model that learns.
        averages_buffers: Whether the global model has the clients' statistics; by default, if it learns.
        network: Makes the module's network.
        norm: Makes a layer of normalisation of its features that clients with one sample train with; ``None``: the
            method works with none such.
    """

    make: Callable[[], Algorithm]
    forms: tuple[str, ...] = FORMS
    refusal: str = ""
    plain: float | None = 1e-5
    identical: float | None = 1e-5
    not_so: str = ""
    optimizer: Callable[[Any], torch.optim.Optimizer] = PLAIN
    learns: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    traffic: bool = True
    vectorizes: bool = True
    trains_global: bool = True
    averages_buffers: bool | None = None
    network: Callable[..., nn.Module] = network
    norm: Callable[[int], nn.Module] | None = GROUPS


METHODS: dict[str, Method] = {
    "Ditto": Method(algorithms.Ditto, optimizer=MOMENTUM),
    "EF21P": Method(
        partial(algorithms.EF21P, 0.5, 0.5),
        plain=None,
        not_so="its clients send random coordinates",
        identical=None,
        traffic=False,
    ),
    "FedAdam": Method(algorithms.FedAdam, plain=None, not_so="its server steps by about lr", learns={"max_epochs": 30}),
    "FedAvg": Method(algorithms.FedAvg),
    "FedAvgM": Method(partial(algorithms.FedAvgM, momentum=0.5)),
    "FedBAT": Method(
        partial(algorithms.FedBAT, magnitudes=(5e-4, 1.0)),
        plain=None,
        not_so="its clients send one bit per weight",
        identical=None,
        traffic=False,
    ),
    "FedBN": Method(algorithms.FedBN, traffic=False, trains_global=False),
    "FedHM": Method(
        partial(algorithms.FedHM, levels=(1.0, 0.25, 0.125)),
        forms=("trained base",),
        refusal="train_base=True",
        plain=None,
        identical=None,
        not_so="a client of level 1 trains the weights alone; clients have different levels",
    ),
    "FedMUD": Method(algorithms.FedMUD, forms=UPDATES, refusal="role 'update'"),
    "FedNova": Method(algorithms.FedNova, optimizer=MOMENTUM, traffic=False),
    "FedPer": Method(
        partial(algorithms.FedPer, ["net.0.bias"]),
        plain=None,
        not_so="a bias stays with the client",
        traffic=False,
    ),
    "FedProx": Method(
        partial(algorithms.FedProx, mu=0.1), plain=None, not_so="it is held near to the model that it was sent"
    ),
    "FedSLoP": Method(
        algorithms.FedSLoP,
        plain=None,
        not_so="its subspaces are of the server's seed",
        optimizer=partial(ProjectedSGD, lr=0.1, momentum=0.5, rank=1, refresh_interval=None),
        traffic=False,
    ),
    "FedYogi": Method(algorithms.FedYogi, plain=None, not_so="its server steps by about lr", learns={"max_epochs": 30}),
    "GradientMask": Method(
        partial(algorithms.GradientMask, 0.5),
        plain=None,
        not_so="its clients send half of the coordinates",
        traffic=False,
    ),
    "HeteroFL": Method(
        partial(algorithms.HeteroFL, rates=(1.0, 0.5)),
        forms=("dense",),
        refusal="HeteroFL cannot slice",
        identical=None,
        not_so="clients have different widths",
        traffic=False,
        norm=None,
    ),
    "LocalTraining": Method(
        algorithms.LocalTraining,
        plain=None,
        not_so="the global model stays as it began",
        traffic=False,
        trains_global=False,
    ),
    "PFedMe": Method(
        partial(algorithms.PFedMe, regularization=5.0, personal_steps=3, learning_rate=0.1),
        plain=None,
        not_so="its global model follows the personal ones",
    ),
    "RandomCoordinates": Method(
        partial(algorithms.RandomCoordinates, 0.7, 0.7),
        plain=None,
        not_so="its clients send some of the coordinates",
        identical=None,
        traffic=False,
    ),
    "RandomMask": Method(
        partial(algorithms.RandomMask, 0.5),
        plain=None,
        not_so="its clients send half of the coordinates",
        traffic=False,
    ),
    "SCAFFOLD": Method(
        algorithms.SCAFFOLD,
        # On factors, its corrections diverge where one client makes one step and another twenty.
        learns={"partition": FromIndices([range(first, 103, 5) for first in range(5)])},
        traffic=False,
    ),
    "SlidingWindowMask": Method(
        partial(algorithms.SlidingWindowMask, 0.5),
        plain=None,
        not_so="its clients send half of the coordinates",
        traffic=False,
    ),
    "SplitMix": Method(
        partial(algorithms.SplitMix, budgets=(3, 1)),
        plain=None,
        identical=None,
        not_so="it trains each network of an ensemble on its own, and clients have different numbers of them",
        traffic=False,
        network=lambda **settings: Ensemble(partial(network, **settings), bases=3),
    ),
    "TDPFed": Method(
        partial(
            algorithms.TDPFed,
            compression=1.2,
            regularization=2.0,
            personal_steps=3,
            factor_steps=5,
            factor_learning_rate=2e-3,
        ),
        forms=("dense",),
        refusal="leave LowRank out",
        plain=None,
        not_so="its global model is made of factors",
        traffic=False,
    ),
}


def fedlora(operator: Callable[[], aggregation.Operator], **differences: Any) -> Method:
    """Return the entry of `FedLoRA` with an operator."""
    return Method(
        **{
            "make": lambda: algorithms.FedLoRA(operator()),
            "forms": ("lora", "update"),
            "refusal": "LoRA",
            "traffic": False,
            **differences,
        }
    )


FROM_ZERO = {"forms": ("lora",), "refusal": "LoRA|nothing would ever change"}
METHODS |= {
    "FedLoRA-ProductSum": fedlora(aggregation.ProductSum, traffic=True),
    "FedLoRA-RBLA": fedlora(
        aggregation.RBLA,
        make=lambda: algorithms.FedLoRA(aggregation.RBLA(), levels=(1.0, 0.5)),
        plain=1e-5,
        identical=None,
        not_so="clients have different ranks",
    ),
    "FedLoRA-ZeroPadding": fedlora(aggregation.ZeroPadding, traffic=True),
    "FedLoRA-SumProduct": fedlora(
        aggregation.SumProduct,
        make=lambda: algorithms.FedLoRA(aggregation.SumProduct(), levels=(1.0, 0.5)),
        identical=None,
        not_so="clients have different ranks",
    ),
    "FedLoRA-FLoRA": fedlora(
        aggregation.FLoRA, plain=None, not_so="rounds begin with factors drawn by the server's seed"
    ),
    "FedLoRA-FFA": fedlora(aggregation.FFA, **FROM_ZERO, plain=None, not_so="A is not trained"),
    "FedLoRA-RoLoRA": fedlora(
        aggregation.RoLoRA, **FROM_ZERO, plain=None, not_so="A is not trained in the first round"
    ),
    "FedLoRA-FedSA": fedlora(
        aggregation.FedSA,
        plain=None,
        not_so="B stays with the client",
        trains_global=False,
        averages_buffers=True,
    ),
    "FedLoRA-FedEx": fedlora(aggregation.FedEx),
    "FedLoRA-LoRAFair": fedlora(aggregation.LoRAFair),
    "FedLoRA-CoLR": fedlora(aggregation.CoLR, plain=None, not_so="one factor is drawn", learns={"max_epochs": 20}),
    "FedLoRA-LoRAA2": fedlora(
        aggregation.LoRAA2, **FROM_ZERO, plain=None, not_so="A is not trained in the first round"
    ),
    "FedLoRA-FedInc": fedlora(aggregation.FedInc),
}
