"""What federated rounds add to a plain `Trainer.fit` over the same batches.

    python tests/benchmarks/overhead.py [--json FILE]

An MLP of 784-128-10 trains on batches of 32: in a bare PyTorch loop, in a plain Lightning fit, and under
`FederatedLoop` with ten clients a round. Each repetition runs all three in turn, one thread, and the table gives the
medians of time per step. The limit is 15 % over the plain fit; the exit status is 1 if that is not met.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from json_option import add_json_option, write_json
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowrank import IID, FedAvg, FederatedLoop

LIMIT = 1.15
BATCH = 32
CLIENTS, BATCHES_PER_CLIENT = 10, 30
SAMPLES = CLIENTS * BATCHES_PER_CLIENT * BATCH


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def bare(loader: DataLoader, epochs: int) -> None:
    module = Module()
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            loss = module.training_step(batch, number)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def lightning(loader: DataLoader, epochs: int, *callbacks: pl.Callback) -> None:
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(Module(), loader)


def federated(loader: DataLoader, epochs: int) -> None:
    lightning(loader, epochs, FederatedLoop(FedAvg(), clients=CLIENTS, partition=IID(), summary=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=6)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    draws = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 784, generator=draws), torch.randint(10, (SAMPLES,), generator=draws))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    ways: dict[str, Callable[[DataLoader, int], None]] = {
        "bare PyTorch": bare,
        "Trainer.fit": lightning,
        "Trainer.fit + FederatedLoop": federated,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(options.repetitions + 1):
        for name, run in ways.items():
            begin = time.perf_counter()
            run(loader, options.epochs)
            if repetition:
                steps = options.epochs * CLIENTS * BATCHES_PER_CLIENT
                times[name].append((time.perf_counter() - begin) / steps)

    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [new / old for new, old in zip(times["Trainer.fit + FederatedLoop"], times["Trainer.fit"], strict=True)]
    ratio = statistics.median(ratios)
    print(f"{'way':<30}{'ms per step':>12}{'over Trainer.fit':>18}")
    for name, median in medians.items():
        print(f"{name:<30}{1000 * median:>12.3f}{median / medians['Trainer.fit']:>18.3f}")
    met = ratio <= LIMIT
    verdict = "met" if met else "NOT met"
    print(f"median of paired ratios: {ratio:.3f} (limit {LIMIT}, {len(ratios)} repetitions): {verdict}")
    milliseconds = {name: 1000 * median for name, median in medians.items()}
    write_json(options.json, {"ms_per_step": milliseconds, "ratio": ratio, "limit": LIMIT, "met": met})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
