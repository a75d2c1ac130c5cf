"""FedAvg written by hand in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.rounds_contenders.experiment import Setting


def run(setting: Setting, rounds: Rounds) -> dict[str, Any]:
    images, classes = setting.mnist(train=True)
    indices, cohorts = setting.client_indices(), setting.cohorts()
    network = setting.module()["net"]
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=setting.learning_rate)
    rounds.begin()
    for cohort in cohorts:
        start = [parameter.detach().clone() for parameter in trained]
        sums = [torch.zeros_like(parameter) for parameter in start]
        for client in cohort:
            with torch.no_grad():
                for parameter, value in zip(trained, start, strict=True):
                    parameter.copy_(value)
            for batch in setting.batches(indices[client]):
                loss = nn.functional.cross_entropy(network(images[batch]), classes[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                for total, parameter in zip(sums, trained, strict=True):
                    total.add_(parameter, alpha=len(indices[client]))
        samples = sum(len(indices[client]) for client in cohort)
        with torch.no_grad():
            for parameter, total in zip(trained, sums, strict=True):
                parameter.copy_(total / samples)
        rounds.end()
    return {"accuracy": setting.accuracy(network)}


if __name__ == "__main__":
    contend(Setting, run)
