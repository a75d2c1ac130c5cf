"""FedAvg of clients that step together, written by hand in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.rounds_contenders.experiment import Setting
from tests.benchmarks.stacked_by_hand import Dense, LowRank, step


def stacked(layer: nn.Module, clients: int, rate: float) -> Dense | LowRank:
    values = dict(layer.named_parameters())
    if "weight" in values:
        return Dense(values["weight"], values["bias"], clients, rate)
    U, V = values["factors.U"], values["factors.V"]
    frozen = values.get("frozen_weight")
    return LowRank(U, V, values["bias"], clients, rate, None if frozen is None else frozen.detach())


def trained(layer: nn.Module) -> list[Tensor]:
    """Return the values in the order of those of the stacked layer."""
    return [value for value in layer.parameters() if value.requires_grad]


def run(setting: Setting, rounds: Rounds) -> dict[str, Any]:
    images, classes = setting.mnist(train=True)
    indices, cohorts = setting.client_indices(), setting.cohorts()
    network = setting.module()["net"]
    layers = [layer for layer in network if trained(layer)]
    rounds.begin()
    for cohort in cohorts:
        together = [stacked(layer, len(cohort), setting.learning_rate) for layer in layers]
        # All clients have as many samples.
        for batch in torch.stack([indices[client] for client in cohort]).split(setting.batch_size, dim=1):
            weights = torch.full((*batch.shape, 1), 1 / batch.shape[1])
            step(together, images[batch], classes[batch], weights)
        with torch.no_grad():
            for layer, stacks in zip(layers, together, strict=True):
                for live, stack in zip(trained(layer), stacks.values(), strict=True):
                    live.copy_(stack.mean(0))
        rounds.end()
    return {"accuracy": setting.accuracy(network)}


if __name__ == "__main__":
    contend(Setting, run)
