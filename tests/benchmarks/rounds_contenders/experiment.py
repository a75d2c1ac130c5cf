"""What the contenders of `rounds.py` share: the data, its partition and the model.

Nothing here imports a federated library or Lightning, which would count into every contender's start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.contending import ProcessSetting, images_of

MEAN, STD = 0.1307, 0.3081


@dataclass(frozen=True)
class Setting(ProcessSetting):
    """One contender's run of an experiment.

    Attributes:
        model: ``"dense"``, ``"factors"`` (weights of rank 8) or ``"update"`` (of rank 4, to a frozen base).
        clients: Number of clients.
        samples: Samples of each.
        cohort: Clients in a round.
        planned: Rounds that the run is to have, of which it makes ``rounds``; 0: no others. What is traced and compiled
            has to repay itself in what is left of a run.
    """

    model: str = "dense"
    clients: int = 1
    samples: int = 1
    cohort: int = 1
    planned: int = 0
    batch_size: int = 32
    learning_rate: float = 0.1
    seed: int = 0

    @property
    def steps_per_client(self) -> int:
        return -(-self.samples // self.batch_size)

    @property
    def steps_per_round(self) -> int:
        return self.cohort * self.steps_per_client

    def client_indices(self) -> list[Tensor]:
        """Sample indices of each client; the order in them is the one in which every contender trains."""
        order = torch.randperm(60_000, generator=torch.Generator().manual_seed(self.seed))
        return list(order[: self.clients * self.samples].split(self.samples))

    def cohorts(self) -> list[list[int]]:
        """Clients of each round, ascending."""
        draws = torch.Generator().manual_seed(self.seed + 1)
        return [
            sorted(torch.randperm(self.clients, generator=draws)[: self.cohort].tolist()) for _ in range(self.rounds)
        ]

    def batches(self, indices: Tensor) -> Iterator[Tensor]:
        yield from indices.split(self.batch_size)

    def mnist(self, train: bool) -> tuple[Tensor, Tensor]:
        """Normalised images, flat, and classes."""
        return images_of(Path(self.root) / "MNIST", train, MEAN, STD)

    def network(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def low_rank(self) -> list[Any]:
        """The `LowRank` that makes the model, if it is not the dense one."""
        if self.model == "dense":
            return []
        from lightning_lowrank import LowRank, MatrixProduct

        form: dict[str, Any] = {"factors": {"role": "weight", "rank": 8}, "update": {"role": "update", "rank": 4}}
        return [LowRank(MatrixProduct(), **form[self.model], seed=self.seed, summary=False)]

    def module(self) -> nn.ModuleDict:
        """The model with the parameter names of the Lightning module, of which the factors' draws depend."""
        module = nn.ModuleDict({"net": self.network()})
        for low_rank in self.low_rank():
            low_rank.convert(module)
        return module

    @torch.no_grad()
    def accuracy(self, network: Callable[[Tensor], Tensor]) -> float:
        images, classes = self.mnist(train=False)
        return (network(images).argmax(1) == classes).float().mean().item()
