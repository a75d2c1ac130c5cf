"""Counts the device's calls of a step of clients that step together, and what of a round the host waits for.

    python -m tests.strict_device.calls [--clients 10] [--json FILE]

Steps are mapped as they are, and not compiled. A call is about one kernel of a GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.federated.local import LocalTraining
from lightning_lowrank.models import CNN4, ResNet18
from tests.helpers import Data, Module, fit, trainer
from tests.strict_device import device

ROUNDS, STEPS, BATCH = 3, 2, 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


NETWORKS = {"MLP": (mlp, (1, 28, 28)), "CNN4": (CNN4, (1, 28, 28)), "ResNet-18": (ResNet18, (3, 32, 32))}


class OfRounds(pl.Callback):
    """Counts the calls of each round, after the last of the round before."""

    def __init__(self) -> None:
        self.found: list[Counter[str]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.counting = device.calls()
        self.found.append(self.counting.__enter__())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.counting.__exit__(None, None, None)


def count(name: str, clients: int) -> dict[str, Any]:
    """Return the calls of a network's step, and of the whole last round those that the host waits for."""
    make, shape = NETWORKS[name]
    samples = STEPS * BATCH
    partition = FromIndices([list(range(start * samples, (start + 1) * samples)) for start in range(clients)])
    total = samples * clients
    draws = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(total, *shape, generator=draws), torch.randint(10, (total,), generator=draws))
    loop = FederatedLoop(FedAvg(), partition=partition, execution="vectorized", chunk_size=clients, summary=False)
    steps: list[Counter[str]] = []
    update = LocalTraining._plain_step

    def counting(self: Any, *arguments: Any) -> Any:
        with device.calls() as calls:
            output = update(self, *arguments)
        steps.append(calls)
        return output

    LocalTraining._plain_step = counting  # type: ignore[method-assign]
    rounds = OfRounds()
    on_device = {
        "accelerator": device.StrictAccelerator(),
        "strategy": SingleDeviceStrategy(torch.device(device.NAME, 0)),
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"max_epochs": ROUNDS, "limit_val_batches": 0, **on_device}
        fit(trainer(Path(folder), loop, rounds, **arguments), Module(make()), Data(data, batch_size=BATCH))
    LocalTraining._plain_step = update  # type: ignore[method-assign]
    waits = {call: times for call, times in rounds.found[-1].items() if call.startswith(device.SYNC)}
    calls = dict(steps[-1].most_common())
    return {"calls": sum(calls.values()), "by name": calls, "round waits": waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device.install()
    found = {name: count(name, arguments.clients) for name in NETWORKS}
    for name, each in found.items():
        print(f"{name:10} {each['calls']:4} calls a step")
        print("  ", ", ".join(f"{call.removeprefix('aten::')} {times}" for call, times in each["by name"].items()))
        print("   a round waits for:", each["round waits"])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
