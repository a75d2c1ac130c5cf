"""What federated rounds add to a plain `Trainer.fit` over the same batches.

    python tests/benchmarks/overhead.py [--threads N] [--json FILE]

An MLP of 784-128-10 trains on batches of 32: in a bare PyTorch loop, in a plain Lightning fit, and under
`FederatedLoop` with ten clients a round. The last two run again with one ``self.log(..., on_epoch=True)`` a step, which
is kept for the step and for the epoch. Each repetition runs all in turn, and the table gives the medians of time per
step. The limits are 15 % over the plain fit, and 10 % for what is logged over the same without; the exit status is 1 if
one is not met.
"""

from __future__ import annotations

import argparse
import functools
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

LIMIT, LOG_LIMIT = 1.15, 1.10
BATCH = 32
CLIENTS, BATCHES_PER_CLIENT = 10, 30
SAMPLES = CLIENTS * BATCHES_PER_CLIENT * BATCH


class Module(pl.LightningModule):
    def __init__(self, logs: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        self.logs = logs

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("train_loss", loss, on_epoch=True)
        return loss

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


def lightning(loader: DataLoader, epochs: int, *callbacks: pl.Callback, logs: bool = False) -> None:
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(Module(logs), loader)


def federated(loader: DataLoader, epochs: int, logs: bool = False) -> None:
    lightning(loader, epochs, FederatedLoop(FedAvg(), clients=CLIENTS, partition=IID(), summary=False), logs=logs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    draws = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 784, generator=draws), torch.randint(10, (SAMPLES,), generator=draws))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    ways: dict[str, Callable[[DataLoader, int], None]] = {
        "bare PyTorch": bare,
        "Trainer.fit": lightning,
        "Trainer.fit + FederatedLoop": federated,
        "Trainer.fit, logging": functools.partial(lightning, logs=True),
        "Trainer.fit + FederatedLoop, logging": functools.partial(federated, logs=True),
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
    print(f"{'way':<40}{'ms per step':>12}{'over Trainer.fit':>18}")
    for name, median in medians.items():
        print(f"{name:<40}{1000 * median:>12.3f}{median / medians['Trainer.fit']:>18.3f}")
    ours = "Trainer.fit + FederatedLoop"
    figures: dict[str, object] = {"ms_per_step": {name: 1000 * median for name, median in medians.items()}}
    all_met = True
    for kind, new, old, limit in (
        ("", ours, "Trainer.fit", LIMIT),
        ("log_", f"{ours}, logging", ours, LOG_LIMIT),
    ):
        ratio = statistics.median(one / other for one, other in zip(times[new], times[old], strict=True))
        met = ratio <= limit
        all_met &= met
        verdict = "met" if met else "NOT met"
        print(f"{new} / {old}, median of {options.repetitions} paired ratios: {ratio:.3f} (limit {limit}): {verdict}")
        figures |= {f"{kind}ratio": ratio, f"{kind}limit": limit, f"{kind}met": met}
    write_json(options.json, figures)
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
