"""The methods that the shared contract is checked for, each with what the contract needs to know of it.

A method takes part by its entry here; one that is exported from ``lightning_lowrank.algorithms`` without an entry fails
a test. What the loop does around any method, such as leaving out a client that fails, is tested on `ARCHETYPES`: see
`each_method`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lightning_lowrank
from lightning_lowrank import BlockKronecker, CoreProduct, Ensemble, LowRank, MatrixProduct, ProjectedSGD, algorithms
from lightning_lowrank.federated import Algorithm
from lightning_lowrank.testing import Expected
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
LOW_RANK["core"] = partial(LowRank, CoreProduct(), rank=3, summary=False)
LOW_RANK["heads"] = partial(LowRank, CoreProduct(heads=2), rank=2, summary=False)
LOW_RANK["trained base"] = partial(LowRank, MatrixProduct(), rank_ratio=0.25, train_base=True, summary=False)
PLAIN = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.03, momentum=0.7)
UPDATES = ("update", "decoupled blocks", "half-frozen")
GROUPS = partial(nn.GroupNorm, 4)


@dataclass(frozen=True)
class Method:
    """A method, how it is used, and what is expected of it.

    Args:
        make: Makes the algorithm.
        expected: What is expected of it.
        forms: The forms of layers it works with; the others it must refuse.
        refusal: What it says of the others, a regular expression.
        optimizer: Makes the module's optimizer.
        settings: Arguments of `FederatedLoop` that it needs always.
        network: Makes the module's network.
        norm: Makes a layer of normalization of its features that clients with one sample train with; ``None``: the
            method works with none such.
    """

    make: Callable[[], Algorithm]
    expected: Expected = field(default_factory=Expected)
    forms: tuple[str, ...] = FORMS
    refusal: str = ""
    optimizer: Callable[[Any], torch.optim.Optimizer] = PLAIN
    settings: dict[str, Any] = field(default_factory=dict)
    network: Callable[..., nn.Module] = network
    norm: Callable[[int], nn.Module] | None = GROUPS


# Its clients send less than their models, or something else.
COMPRESSED = Expected(plain=None, identical=None, same_bytes=False)
# Its server steps by about lr, whatever the mean change.
ADAPTIVE = Expected(plain=None, learning={"rounds": 16})
# Its clients send half of the coordinates.
HALVES = Expected(plain=None, same_bytes=False)
# Its factors begin at zero beside weights that nobody trained.
SLOWLY = {"rounds": 5, "local_epochs": 4, "execution": "vectorized"}

# Its clients train cores between factors that the method draws or finds.
CORES = Expected(plain=None, same_bytes=False, learning=SLOWLY)

TDPFED = Method(
    partial(
        algorithms.TDPFed,
        compression=1.2,
        regularization=2.0,
        personal_steps=3,
        factor_steps=5,
        factor_learning_rate=2e-3,
    ),
    # Its global model is made of factors.
    Expected(plain=None, same_bytes=False, learning={"rounds": 5, "execution": "vectorized"}),
    forms=("dense",),
    refusal="LowRank from `callbacks`",
)

METHODS: dict[str, Method] = {
    "Ditto": Method(algorithms.Ditto, optimizer=MOMENTUM),
    "EF21P": Method(partial(algorithms.EF21P, 0.5, 0.5), COMPRESSED),
    "FedAdam": Method(algorithms.FedAdam, ADAPTIVE),
    "FedAvg": Method(algorithms.FedAvg),
    "FedAvgM": Method(partial(algorithms.FedAvgM, momentum=0.5)),
    "FedBAT": Method(partial(algorithms.FedBAT, magnitudes=(5e-4, 1.0)), COMPRESSED),
    "FedBN": Method(algorithms.FedBN, Expected(same_bytes=False, trains_global=False)),
    # It is held near to the model that it was sent, and the server's own step follows.
    "FedDyn": Method(algorithms.FedDyn, Expected(plain=None)),
    "FedHM": Method(
        partial(algorithms.FedHM, levels=(1.0, 0.25, 0.125)),
        # A client of level 1 trains the weights alone, and clients have different levels.
        Expected(plain=None, identical=None, same_bytes=False, accuracy=0.4, learning={**SLOWLY, "rounds": 8}),
        forms=("trained base",),
        refusal="train_base=True",
    ),
    "FedMUD": Method(algorithms.FedMUD, Expected(same_bytes=False), forms=UPDATES, refusal="role 'update'"),
    # The module's network is its submodule "net".
    "FedNTD": Method(partial(algorithms.FedNTD, "net"), Expected(plain=None)),
    "FedNova": Method(algorithms.FedNova, Expected(same_bytes=False), optimizer=MOMENTUM),
    # A bias stays with the client.
    "FedPer": Method(partial(algorithms.FedPer, ["net.0.bias"]), Expected(plain=None, same_bytes=False)),
    # It is held near to the model that it was sent.
    "FedProx": Method(partial(algorithms.FedProx, mu=0.1), Expected(plain=None)),
    # Two of its rounds find the factors beside the cores.
    "FedSB": Method(
        partial(algorithms.FedSB, 2),
        CORES,
        forms=("core",),
        refusal="LowRank",
        optimizer=partial(torch.optim.SGD, lr=0.3),
    ),
    "FedSLoP": Method(
        algorithms.FedSLoP,
        # Its subspaces are of the server's seed.
        Expected(plain=None, same_bytes=False),
        optimizer=partial(ProjectedSGD, lr=0.1, momentum=0.5, rank=1, refresh_interval=None),
    ),
    "FedYogi": Method(algorithms.FedYogi, ADAPTIVE),
    # In the first round it sends all.
    "GradientMask": Method(partial(algorithms.GradientMask, 0.5), Expected(same_bytes=False)),
    "HeteroFL": Method(
        partial(algorithms.HeteroFL, rates=(1.0, 0.5)),
        # Clients have different widths.
        Expected(identical=None, same_bytes=False),
        forms=("dense",),
        refusal="HeteroFL cannot slice",
        norm=None,
    ),
    "HeteroFL-holders": Method(
        partial(algorithms.HeteroFL, rates=(1.0, 0.5), last_layer="holders"),
        Expected(identical=None, same_bytes=False),
        forms=("dense",),
        refusal="HeteroFL cannot slice",
        norm=None,
    ),
    "LocalTraining": Method(
        algorithms.LocalTraining,
        # The global model stays as it began.
        Expected(plain=None, same_bytes=False, trains_global=False),
    ),
    # In the first round its two contrasts are one.
    "MOON": Method(partial(algorithms.MOON, "net")),
    "PFedMe": Method(
        partial(algorithms.PFedMe, regularization=5.0, personal_steps=3, learning_rate=0.1),
        # Its global model follows the personal ones.
        Expected(plain=None, learning={"execution": "vectorized"}),
    ),
    "RandomCoordinates": Method(partial(algorithms.RandomCoordinates, 0.7, 0.7), COMPRESSED),
    "RandomMask": Method(partial(algorithms.RandomMask, 0.5), HALVES),
    "Ravan": Method(
        algorithms.Ravan, CORES, forms=("heads",), refusal="LowRank", optimizer=partial(torch.optim.SGD, lr=0.3)
    ),
    "SCAFFOLD": Method(
        algorithms.SCAFFOLD,
        # On factors, its corrections diverge where one client makes one step and another twenty.
        Expected(same_bytes=False, learning={"parts": [range(first, 103, 5) for first in range(5)]}),
    ),
    "SlidingWindowMask": Method(partial(algorithms.SlidingWindowMask, 0.5), HALVES),
    "SplitMix": Method(
        partial(algorithms.SplitMix, budgets=(3, 1)),
        # It trains each network of an ensemble on its own, and clients have different numbers of them.
        Expected(plain=None, identical=None, same_bytes=False),
        network=lambda **settings: Ensemble(partial(network, **settings), bases=3),
    ),
    # Its clients keep Adam's moments, and how many steps they took.
    "TDPFed": TDPFED,
    "TDPFed-round": replace(TDPFED, make=partial(TDPFED.make, adam_reset="round")),
}


def fedlora(operator: Callable[[], Any], expected: Expected, **differences: Any) -> Method:
    """Return the entry of `FedLoRA` with an operator."""
    return Method(
        **{
            "make": lambda: algorithms.FedLoRA(operator()),
            "expected": expected,
            "forms": ("lora", "update"),
            "refusal": "LoRA",
            "optimizer": partial(torch.optim.SGD, lr=0.3),
            **differences,
        }
    )


def ranks(operator: Callable[[], Any]) -> Callable[[], Algorithm]:
    """Return what makes a `FedLoRA` whose clients have different ranks."""
    return lambda: algorithms.FedLoRA(operator(), levels=(1.0, 0.5))


FROM_ZERO = {"forms": ("lora",), "refusal": "LoRA|nothing would change"}
METHODS |= {
    "FedLoRA-ProductSum": fedlora(lightning_lowrank.ProductSum, Expected(learning=SLOWLY)),
    "FedLoRA-RBLA": fedlora(
        lightning_lowrank.RBLA,
        Expected(identical=None, same_bytes=False, learning={**SLOWLY, "rounds": 10}),
        make=ranks(lightning_lowrank.RBLA),
        optimizer=PLAIN,
    ),
    "FedLoRA-ZeroPadding": fedlora(lightning_lowrank.ZeroPadding, Expected(learning=SLOWLY)),
    "FedLoRA-SumProduct": fedlora(
        lightning_lowrank.SumProduct,
        Expected(identical=None, same_bytes=False, learning={**SLOWLY, "rounds": 10}),
        make=ranks(lightning_lowrank.SumProduct),
        optimizer=PLAIN,
    ),
    "FedLoRA-RaFLoRA": fedlora(
        lightning_lowrank.RaFLoRA,
        Expected(identical=None, same_bytes=False, learning={**SLOWLY, "rounds": 10}),
        make=ranks(lightning_lowrank.RaFLoRA),
        optimizer=PLAIN,
    ),
    # Rounds begin with factors drawn by the server's seed.
    "FedLoRA-FLoRA": fedlora(lightning_lowrank.FLoRA, Expected(plain=None, same_bytes=False, learning=SLOWLY)),
    "FedLoRA-FLoRIST": fedlora(lightning_lowrank.FLoRIST, Expected(plain=None, same_bytes=False, learning=SLOWLY)),
    # A is not trained, or not in the first round.
    "FedLoRA-FFA": fedlora(lightning_lowrank.FFA, Expected(plain=None, same_bytes=False, learning=SLOWLY), **FROM_ZERO),
    "FedLoRA-FedSVD": fedlora(
        lightning_lowrank.FedSVD, Expected(plain=None, same_bytes=False, learning=SLOWLY), **FROM_ZERO
    ),
    "FedLoRA-RoLoRA": fedlora(
        lightning_lowrank.RoLoRA, Expected(plain=None, same_bytes=False, learning=SLOWLY), **FROM_ZERO
    ),
    "FedLoRA-LoRAA2": fedlora(
        lightning_lowrank.LoRAA2, Expected(plain=None, same_bytes=False, learning=SLOWLY), **FROM_ZERO
    ),
    # B stays with the client.
    "FedLoRA-FedSA": fedlora(
        lightning_lowrank.FedSA,
        Expected(plain=None, same_bytes=False, trains_global=False, averages_buffers=True, learning=SLOWLY),
    ),
    "FedLoRA-FedEx": fedlora(lightning_lowrank.FedEx, Expected(same_bytes=False, learning=SLOWLY)),
    # Of one client or several equal ones, too, it amplifies single numbers.
    "FedLoRA-FedRPCA": fedlora(
        partial(lightning_lowrank.FedRPCA, iterations=60), Expected(plain=None, identical=None, learning=SLOWLY)
    ),
    "FedLoRA-LoRAFair": fedlora(lightning_lowrank.LoRAFair, Expected(same_bytes=False, learning=SLOWLY)),
    # One factor is drawn.
    "FedLoRA-CoLR": fedlora(lightning_lowrank.CoLR, Expected(plain=None, same_bytes=False, learning=SLOWLY)),
    "FedLoRA-FedInc": fedlora(lightning_lowrank.FedInc, Expected(same_bytes=False, learning=SLOWLY)),
}


def hooks(algorithm: Algorithm) -> frozenset[str]:
    """The hooks that a method overrides; of `FedLoRA`, whose own are always the same, those of its operator."""
    if isinstance(algorithm, algorithms.FedLoRA):
        from lightning_lowrank.lora import Operator

        operator = algorithm.operator
        # Which factor absorbs a difference of scalings is arithmetic, without upload_ranks no slots are selected, and
        # new_basis is for a warning.
        apart = {"absorbing", "selects", "select_ranks", "new_basis"}
        own = {name for name in vars(Operator) if name[0] != "_"} - apart
        found = {name for name in own if getattr(type(operator), name) is not getattr(Operator, name)}
        return frozenset(f"operator.{name}" for name in found) | ({"levels"} if len(algorithm.levels) > 1 else set())
    # Commits without protocols are compared with by this table too.
    from lightning_lowrank.federated.protocols import PROTOCOLS

    kinds = [kind for kind in (Algorithm, *PROTOCOLS) if isinstance(algorithm, kind)]
    functions = [(kind, name) for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)]
    return frozenset(
        name for kind, name in functions if name[0] != "_" and getattr(type(algorithm), name) is not vars(kind)[name]
    )


# Whatever hooks a method overrides, one of these overrides them all; without FedAvg and FedMUD, no fewer do.
ARCHETYPES = (
    "FedAvg",
    "FedMUD",
    "FedBAT",
    "FedDyn",
    "FedHM",
    "FedSB",
    "FedSLoP",
    "GradientMask",
    "MOON",
    "RandomCoordinates",
    "SCAFFOLD",
    "SplitMix",
    "TDPFed",
    "FedLoRA-ProductSum",
    "FedLoRA-RBLA",
    "FedLoRA-FedSA",
    "FedLoRA-CoLR",
)


def each_method(*daily: str, among: Iterable[str] = tuple(METHODS), but: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by ``name``, that of a method, where the test is of the loop and not of the method.

    Args:
        daily: The methods that it is run with every day. Other `ARCHETYPES` are slow, and all others nightly.
        among: The methods that it can be run with.
        but: Archetypes that are nightly too, as another test of the same loop is run with them.
    """

    def marks(name: str) -> list[pytest.MarkDecorator]:
        if name in daily:
            return []
        return [pytest.mark.slow if name in ARCHETYPES and name not in but else pytest.mark.nightly]

    return pytest.mark.parametrize("name", [pytest.param(name, id=name, marks=marks(name)) for name in among])
