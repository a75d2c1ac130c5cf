"""`check_stage`: the contract that every stage of a round must keep."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_lowrank.algorithms import FedAvg
from lightning_lowrank.callbacks.lowrank import LowRank
from lightning_lowrank.federated.algorithm import Algorithm
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.stages import Arrival, RoundStage
from lightning_lowrank.federated.state import ClientInfo
from lightning_lowrank.layers import MatrixProduct
from lightning_lowrank.testing.experiment import Experiment, Outcome, quiet
from lightning_lowrank.testing.require import generator_states, require, seed_generators

__all__ = ["check_stage"]

_RESERVED = ("comm/", "federated/", "privacy/", "system/")
_ROUNDS = 2


def check_stage(make: Callable[[], RoundStage], *, changes: bool = False) -> None:
    """Check that a stage keeps the contract of `RoundStage`.

    It leaves the global generators and the arrivals' tensors alone, its figures are finite numbers under names of its
    own, and they are equal for clients one by one and together, and in a run that is resumed inside a round.
    `RoundStage.checkpoint` takes later arrivals back. Without ``changes`` a run ends with the weights and bytes of one
    without the stage.

    Args:
        make: Makes the stage.
        changes: Whether the stage changes messages, holds some back for good or refuses them. Default False.

    Raises:
        AssertionError: If the contract is broken. The message names the stage and what it did.

    Example:
        >>> check_stage(RoundStage)
    """
    check = _Check(make, changes)
    try:
        check.arrivals()
        check.taking_back()
        check.saving()
        with quiet():
            check.runs()
    except AssertionError as error:
        raise AssertionError(f"{make()!r} {error}.") from error


class _Way:
    """A stand-in for the server's half of a round in which all clients start from zeros."""

    algorithm: Algorithm = FedAvg()
    server: Any = None
    any_client = ClientInfo(0, 3, 0, 0)

    def origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        return {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}

    exact_origin_of = origin_of

    def form_of(self, client: ClientInfo) -> Message:
        return Message(self.origin_of(client))


class _Server:
    round, seed, cohort = 0, 0, (0, 1, 2, 3)


class _Check:
    def __init__(self, make: Callable[[], RoundStage], changes: bool) -> None:
        self._make, self._changes = make, changes
        self._way = _Way()

    def _begun(self) -> RoundStage:
        stage = self._make()
        stage.setup(self._way)
        server: Any = _Server()
        stage.begin_round(server)
        return stage

    def _arrival(self, client: int) -> Arrival:
        draws = torch.Generator().manual_seed(client)
        tensors = {"weight": torch.randn(3, 2, generator=draws), "bias": torch.randn(3, generator=draws)}
        info = ClientInfo(client, 3 + client, 0, 0)
        return Arrival(info, Message(tensors), 3.0 + client, self._way.origin_of)

    def _passed(self, stage: RoundStage, *clients: int) -> list[Arrival]:
        """The arrivals of these clients that the stage passes on before the round's end."""
        found = []
        for client in clients:
            info = ClientInfo(client, 3 + client, 0, 0)
            stage.down(info, 100)
            if stage.answered(info, 2, 100) is None:
                passed = stage.arrived(self._arrival(client))
                found += [] if passed is None else [passed]
        return found

    def _ended(self, stage: RoundStage) -> tuple[dict[str, float], list[Arrival]]:
        stage.end_round()
        released = list(stage.release())
        return dict(stage.figures()), released

    def arrivals(self) -> None:
        """Check that generators and tensors are left alone, and that figures are finite numbers."""
        with isolate_rng():
            before = seed_generators(5)
            stage, arrival = self._begun(), self._arrival(0)
            given = {name: value.clone() for name, value in arrival.message.tensors.items()}
            first = stage.arrived(arrival)
            same = all(torch.equal(value, given[name]) for name, value in arrival.message.tensors.items())
            require(same or first is None, "changes an arrival's tensors in place; return another Arrival")
            rest = self._passed(stage, 1, 2)
            figures, released = self._ended(stage)
            require(generator_states() == before, "draws from the global generators; use lightning_lowrank.seeding")
        for name, value in figures.items():
            require(not name.startswith(_RESERVED), f"logs {name!r}, and {', '.join(_RESERVED)} are the package's own")
            require(isinstance(value, (int, float)) and math.isfinite(value), f"logs {name!r} as {value!r}")
        count = (first is not None) + len(rest) + len(released)
        require(self._changes or count == 3, f"passes {count} of 3 arrivals on in a round")

    def taking_back(self) -> None:
        """Check that `RoundStage.checkpoint` can take back later arrivals."""
        stage, other = self._begun(), self._begun()
        self._passed(stage, 1), self._passed(other, 1)
        undo = stage.checkpoint()
        self._passed(stage, 2)
        undo()
        one, two = self._ended(stage), self._ended(other)
        require(len(one[1]) == len(two[1]), "keeps an arrival that RoundStage.checkpoint's result takes back")

    def saving(self) -> None:
        """Check that a stage that is saved and restored inside a round ends the round as any other."""
        stage, saved = self._begun(), self._begun()
        self._passed(stage, 1, 2), self._passed(saved, 1, 2)
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        file.seek(0)
        try:
            state = torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            raise AssertionError(f"keeps more than tensors and plain Python in its state: {error}") from error
        restored = self._make()
        restored.setup(self._way)
        restored.load_state_dict(state)
        self._passed(stage, 3), self._passed(restored, 3)
        one, two = self._ended(stage), self._ended(restored)
        require(one[0] == two[0], f"logs {one[0]}, and {two[0]} in a run that is saved and resumed inside the round")
        require(_same(one[1], two[1]), "releases other arrivals in a run that is saved and resumed inside the round")

    def runs(self) -> None:
        """Check that executions log equal figures, and that without ``changes`` weights and bytes stay the same."""
        plain = self._run([])
        one = self._run([self._make()])
        together = self._run([self._make()], execution="vectorized")
        for name in sorted(one.trainer.callback_metrics.keys() - plain.trainer.callback_metrics.keys()):
            values = [float(each.trainer.callback_metrics[name]) for each in (one, together)]
            require(
                math.isclose(*values, rel_tol=1e-4, abs_tol=1e-6), f"logs {name!r} as {values[0]}, {values[1]} together"
            )
        if not self._changes:
            weights = plain.weights
            same = all(torch.equal(value, weights[name]) for name, value in one.weights.items())
            require(same, "changes the weights of a run, but changes=True was not given")
            require(one.traffic == plain.traffic, "changes the bytes of a run")

    def _run(self, stages: list[RoundStage], **settings: Any) -> Outcome:
        lowrank = partial(LowRank, MatrixProduct(), rank=2, role="weight", skip=["last"], summary=False)
        experiment = Experiment(FedAvg, lowrank=lowrank, settings={"stages": stages, **settings})
        return experiment.run(experiment.loop(), max_epochs=_ROUNDS)


def _same(first: list[Arrival], second: list[Arrival]) -> bool:
    def plain(arrivals: list[Arrival]) -> list[tuple[int, float, list[str]]]:
        return [(each.client.id, each.weight, list(each.message.tensors)) for each in arrivals]

    return plain(first) == plain(second) and all(
        torch.equal(value, two.message.tensors[name])
        for one, two in zip(first, second, strict=True)
        for name, value in one.message.tensors.items()
    )
