"""Every pair of the settings that change a round: codecs, privacy, attackers, clock, failures, stages, frozen layers.

A new setting is a line of `PARTS`.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_lowrank import (
    ALIE,
    MOON,
    SCAFFOLD,
    BlockKronecker,
    ClientPrivacy,
    DifferentialPrivacy,
    FedAvg,
    FederatedLoop,
    FedMUD,
    FromIndices,
    GaussianNoise,
    GeometricMedian,
    Half,
    Krum,
    LabelFlip,
    LowRank,
    Quantize,
    SignFlip,
    SystemModel,
    TopK,
    TrimmedMean,
)
from lightning_lowrank.internals.lightning import NewFigures
from tests.federated.test_failures import Figures
from tests.federated.test_stages import Clips, Held, Refuses, update_norms
from tests.helpers import Data, Module, assert_same, blobs, fit, network, trainer, weights

SIZES = [5, 26, 22, 22, 0]
PARTITION = FromIndices([list(range(sum(SIZES[:i]), sum(SIZES[: i + 1]))) for i in range(len(SIZES))])
LOST = 2
# Each client's bandwidth: one is late.
SLOW = [1e9 if client != LOST else 1.0 for client in range(len(SIZES))]


@dataclass(frozen=True)
class Part:
    """A setting of a round.

    Args:
        make: Returns arguments of `FederatedLoop`, and what makes another module and data.
        neutral: Whether weights and bytes are those of a run without it, bit for bit.
        loses: Whether client ``LOST`` never answers, as if it were refused.
    """

    make: Callable[[], dict[str, Any]]
    neutral: bool = False
    loses: bool = False


def samples() -> Data:
    return Data(TensorDataset(*(values[: sum(SIZES)] for values in blobs().tensors)))


def without_numbers() -> Data:
    data = samples()
    data.train.tensors[0][sum(SIZES[:LOST]) : sum(SIZES[: LOST + 1])] = torch.nan
    return data


def batch_norm(**settings: Any) -> dict[str, Any]:
    return {"module": lambda: Module(network(norm=nn.BatchNorm1d)), **settings}


def private(**settings: Any) -> dict[str, Any]:
    return {"privacy": ClientPrivacy(noise_multiplier=0.5, **settings), "weighting": "uniform"}


def low_rank() -> LowRank:
    return LowRank(BlockKronecker(), ratio=0.4, decouple=True, skip=["last"], summary=False)


class Freezes(Callback):
    """Freezes the first layer in the second round."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(trainer.current_epoch == 0)


PARTS = {
    "top-k up": Part(lambda: {"uplink": [TopK(0.3, error_feedback=True)]}),
    "quantized up": Part(lambda: {"uplink": [Quantize(8)]}),
    "half down": Part(lambda: {"downlink": [Half()]}),
    "copies down": Part(lambda: {"downlink": [TopK(0.5, error_feedback=True)]}),
    "privacy": Part(partial(private, sampling="fixed")),
    "privacy of drawn": Part(lambda: {**private(quantile=0.5), "clients_per_round": 3}),
    "noise of clients": Part(partial(private, sampling="fixed", noise_at="clients")),
    "sign flip": Part(lambda: {"attackers": SignFlip([1])}),
    "noise sent": Part(lambda: {"attackers": GaussianNoise(1)}),
    "a little": Part(lambda: {"attackers": ALIE([0], 1.0)}),
    "label flip": Part(lambda: {"attackers": LabelFlip([0, 3])}),
    "no attack": Part(lambda: {"attackers": SignFlip([4])}, neutral=True),
    "clock": Part(lambda: {"system": SystemModel(1e5, latency=0.1, speed=1e8)}, neutral=True),
    "deadline": Part(lambda: {"system": SystemModel(1e5, deadline=1e9)}, neutral=True),
    "late": Part(lambda: {"system": SystemModel(SLOW, deadline=9.0)}, loses=True),
    "refused": Part(lambda: {"stages": [Refuses()]}, loses=True),
    "not finite": Part(lambda: {"data": without_numbers}, loses=True),
    "dropout": Part(lambda: {"client_dropout": 0.15}),
    "all there": Part(lambda: {"availability": [1.0] * 5}, neutral=True),
    # With noise_at="clients", it says how many clients' noise is a round's.
    "three of four": Part(lambda: {"min_clients": 3}),
    "named": Part(lambda: {"participants": [[0, 1, 2, 3]] * 3}, neutral=True),
    "trimmed mean": Part(lambda: {"aggregator": TrimmedMean(1)}),
    "krum": Part(lambda: {"aggregator": Krum(0)}),
    "median": Part(lambda: {"aggregator": GeometricMedian()}),
    "norms": Part(lambda: {"stages": [update_norms()]}, neutral=True),
    "held": Part(lambda: {"stages": [Held()]}, neutral=True),
    "halved": Part(lambda: {"stages": [Clips()]}),
    "on disk": Part(lambda: {"client_memory_limit": 0}, neutral=True),
    "averaged buffers": Part(batch_norm),
    "own buffers": Part(partial(batch_norm, buffers="local")),
    "kept moments": Part(
        lambda: {"module": partial(Module, optimizer=partial(torch.optim.Adam, lr=0.01)), "optimizer_state": "keep"}
    ),
    "own models": Part(lambda: {"personal_test": "matched_labels", "trainer": {"limit_val_batches": 1}}, neutral=True),
    "private samples": Part(lambda: {"after": [DifferentialPrivacy(noise_multiplier=1.0)]}),
    "frozen": Part(lambda: {"after": [Freezes()]}),
    "contrastive": Part(lambda: {"algorithm": MOON("net")}),
    "control variates": Part(lambda: {"algorithm": SCAFFOLD()}),
    "announced": Part(lambda: {"algorithm": FedMUD(), "before": [low_rank()]}),
}
LISTS = ("uplink", "downlink", "stages", "before", "after")
"""Arguments of which two settings make one list."""
FOR_TRAINER = {"before": list, "after": list, "trainer": dict}
"""Callbacks before and after the loop, and arguments of the trainer."""


def settings_of(*names: str) -> dict[str, Any] | None:
    """The arguments that several parts make together; ``None`` if they give an argument two values."""
    found: dict[str, Any] = {}
    for name in names:
        for argument, value in PARTS[name].make().items():
            if argument in LISTS:
                value = found.get(argument, []) + value
            elif argument in found and argument != "weighting":
                return None
            found[argument] = value
    return found


def pairs(firsts: Sequence[str], seconds: Sequence[str], argument: str) -> dict[frozenset[str], str]:
    return {frozenset(pair): argument for pair in itertools.product(firsts, seconds)}


PRIVATE = ("privacy", "privacy of drawn", "noise of clients")
ROBUST = ("trimmed mean", "krum", "median")
REFUSED = {
    **pairs(["noise of clients"], ["top-k up", "quantized up"], "uplink="),
    **pairs(["half down"], ["copies down"], "error_feedback"),
    **pairs(["copies down"], ["announced"], "downlink="),
    **pairs(PRIVATE, ["all there"], "availability"),
    **pairs(PRIVATE, ["named"], "participants"),
    **pairs(PRIVATE, ROBUST, "aggregator="),
    **pairs(PRIVATE, ["norms", "held", "halved"], "stages="),
    **pairs(PRIVATE, ["averaged buffers"], "BatchNorm"),
    **pairs(["privacy of drawn"], ["three of four"], "min_clients=3"),
    **pairs(["all there"], ["named"], "availability"),
    **pairs(["control variates"], ROBUST, "aggregator="),
    **pairs(["control variates"], ["kept moments"], "Adam"),
    **pairs(["private samples"], ["averaged buffers", "own buffers"], "BatchNorm"),
    **pairs(
        ["frozen"],
        ["top-k up", "copies down", "kept moments", "control variates", "contrastive"],
        "from round 1 on other parameters are trained",
    ),
}
"""Pairs that no run can have, and what the error names."""
CASES = [
    *((name,) for name in PARTS),
    *(pair for pair in itertools.combinations(PARTS, 2) if settings_of(*pair) is not None),
]
POSSIBLE = [names for names in CASES if frozenset(names) not in REFUSED]
IMPOSSIBLE = [names for names in CASES if frozenset(names) in REFUSED]
FIGURES = ("comm/", "federated/", "norm/", "personal/", "privacy/", "system/")


def figures(logged: Mapping[str, float], *prefixes: str) -> dict[str, float]:
    return {name: value for name, value in logged.items() if name.startswith(prefixes)}


class NewOfRounds(Figures):
    """Keeps the figures that each round logs, without those of earlier rounds, which a resumed run does not have."""

    def __init__(self):
        super().__init__()
        self.new = NewFigures()

    def on_train_epoch_end(self, trainer, pl_module):
        self.rounds.append({name: float(value) for name, value in self.new.find(trainer.callback_metrics).items()})


@dataclass(frozen=True)
class Result:
    """The result of a run: weights, figures by round, ids of clients with a state, and checkpoints of turns."""

    weights: dict[str, Tensor]
    logged: list[dict[str, float]]
    keeping: list[int]
    checkpoints: list[Path]

    @property
    def traffic(self) -> list[dict[str, float]]:
        return [figures(logged, "comm/") for logged in self.logged]


def make(names: tuple[str, ...], folder: Path, resume: Path | None = None, save: bool = False, **more: Any) -> Result:
    """Make a run of two rounds."""
    settings = {"algorithm": FedAvg(), "partition": PARTITION, "seed": 0, "summary": False, **more}
    settings |= settings_of(*names) or {}
    module, data = settings.pop("module", Module)(), settings.pop("data", samples)()
    before, after, arguments = (settings.pop(name, kind()) for name, kind in FOR_TRAINER.items())
    loop, rounds = FederatedLoop(**settings), NewOfRounds()
    saved = [ModelCheckpoint(folder, "{step:04d}", save_top_k=-1, every_n_train_steps=1)] if save else []
    arguments = {"limit_val_batches": 0, "num_sanity_val_steps": 0, "max_epochs": 2, **arguments}
    fitted = trainer(folder, *before, loop, *after, rounds, *saved, **arguments)
    fit(fitted, module, data, ckpt_path=resume, weights_only=False if resume else None)
    return Result(
        weights(module),
        rounds.rounds,
        [client for client, _ in loop.coordinator.states.items()],
        sorted(folder.glob("*.ckpt")),
    )


@functools.cache
def run(names: tuple[str, ...], **more: Any) -> Result:
    """A run of two rounds, made once."""
    with tempfile.TemporaryDirectory() as folder:
        return make(names, Path(folder), **more)


def executions_of(names: tuple[str, ...]) -> list[str]:
    """The executions that parts work with; `DifferentialPrivacy` maps its steps itself."""
    return ["sequential"] if "private samples" in names else ["sequential", "vectorized"]


def without(names: tuple[str, ...], name: str, *others: str) -> tuple[str, ...]:
    """The parts without one, and with others, in the order of `PARTS`."""
    return tuple(part for part in PARTS if part in others or (part in names and part != name))


def few(cases: Sequence[tuple[str, ...]], daily: int, slow: int) -> list[Any]:
    """Cases of a test: each part alone and every ``daily``-th pair; every ``slow``-th pair is slow, others nightly."""

    def marks(number: int, names: tuple[str, ...]) -> list[pytest.MarkDecorator]:
        often = len(names) == 1 or number % daily == 0
        return [] if often else [pytest.mark.slow if number % slow == 0 else pytest.mark.nightly]

    return [
        pytest.param(names, id=" and ".join(names), marks=marks(number, names)) for number, names in enumerate(cases)
    ]


def sampled(cases: Sequence[tuple[tuple[str, ...], str]]) -> list[Any]:
    """Cases of a part within others: every fifth is slow, others nightly."""
    return [
        pytest.param(
            names, name, id=f"{name} in {' and '.join(names)}", marks=[pytest.mark.nightly] if number % 5 else []
        )
        for number, (names, name) in enumerate(cases)
    ]


@pytest.mark.parametrize("names", few([names for names in POSSIBLE if "vectorized" in executions_of(names)], 61, 8))
@pytest.mark.slow
def test_executions_agree(names):
    """Clients that step together have the figures of clients one by one, and the weights to rounding."""
    one, together = run(names), run(names, execution="vectorized")
    assert one.traffic == together.traffic
    for name, value in one.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-5, atol=2e-6)
    for first, second in zip(one.logged, together.logged, strict=True):
        assert second == pytest.approx(first, rel=1e-4, abs=1e-6, nan_ok=True)


NEUTRAL = [(names, name) for names in POSSIBLE for name in names if PARTS[name].neutral]


@pytest.mark.parametrize(("names", "neutral"), sampled(NEUTRAL))
@pytest.mark.slow
def test_neutral_parts_change_nothing(names, neutral):
    expected = run(without(names, neutral))
    assert_same(run(names).weights, expected.weights)
    assert run(names).traffic == expected.traffic


# DifferentialPrivacy leaves out samples whose gradients are not finite, and not the client.
LOSING = [
    (names, name)
    for names in POSSIBLE
    for name in names
    if PARTS[name].loses and "refused" not in names and set(names) != {"private samples", "not finite"}
]


@pytest.mark.parametrize(("names", "losing"), sampled(LOSING))
@pytest.mark.slow
def test_whatever_loses_a_client_is_the_same(names, losing):
    """Of a late, a refused and a not finite answer nothing is kept but the cost of its private steps."""
    expected = run(without(names, losing, "refused"))
    assert_same(run(names).weights, expected.weights)
    assert run(names).traffic == expected.traffic
    for execution in executions_of(names):
        keeping = run(names, **{} if execution == "sequential" else {"execution": execution}).keeping
        assert (LOST in keeping) == ("private samples" in names)


@pytest.mark.parametrize("losing", ["late", "refused"])
@pytest.mark.slow
def test_answers_without_effect_cost_privacy(losing):
    """The server has the message of a late or refused answer."""
    names = (losing, "private samples")
    private = [figures(logged, "privacy/") for logged in run(without(names, losing)).logged]
    assert private[1][f"privacy/epsilon/{LOST}"] > private[0][f"privacy/epsilon/{LOST}"] > 0
    assert [figures(logged, "privacy/") for logged in run(names).logged] == private


@pytest.mark.parametrize("names", few(POSSIBLE, 37, 37))
@pytest.mark.slow
def test_runs_are_repeated_and_resumed(tmp_path, names):
    """A second run, and runs that are resumed inside a round, end with the same bits."""
    whole, again = run(names), make(names, tmp_path / "again", save=True)
    assert_same(again.weights, whole.weights)
    for first, second in zip(again.logged, whole.logged, strict=True):
        assert figures(first, *FIGURES) == figures(second, *FIGURES)
    for checkpoint in (again.checkpoints[1], again.checkpoints[-2]):
        resumed = make(names, tmp_path / "resumed", checkpoint)
        assert_same(resumed.weights, whole.weights)
        for first, second in zip(reversed(resumed.logged), reversed(whole.logged), strict=False):
            assert figures(first, *FIGURES) == figures(second, *FIGURES)


@pytest.mark.parametrize("names", few(IMPOSSIBLE, 5, 1))
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_refused(tmp_path, names, execution):
    with pytest.raises(MisconfigurationException, match=REFUSED[frozenset(names)]):
        make(names, tmp_path, execution=execution)
