"""Compares the ε that private fits claim with a lower bound from many fits on two neighbouring data sets.

    python tests/benchmarks/audit.py --fits 600

In each setting a linear loss is trained on a data set with a canary, whose update or gradient is as large as the
clipping norm, and on one in which the canary is zero. The weight that only the canary moves is the best statistic. A
threshold on it, chosen on half of the fits, tells the two data sets apart on the other half, and by Clopper and
Pearson's bounds on both error rates gives a lower bound on ε at 95 % (Jagielski et al., NeurIPS 2020). With
``--noise 0.5`` all noise is half of what is accounted, and the audit must fail.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

if str(Path(__file__).parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_lowrank import ClientPrivacy, DifferentialPrivacy, FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.callbacks import differential_privacy
from lightning_lowrank.federated.privacy import mean, noise

DELTA, CLIENTS, SAMPLES = 1e-2, 8, 16
Callbacks = Callable[[int], list[pl.Callback]]


class Linear(pl.LightningModule):
    """A loss whose gradient is the mean of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return -(batch[0] @ self.weight).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def clients(seed: int, rounds: int = 4, per_round: int = CLIENTS // 2, **privacy: Any) -> list[pl.Callback]:
    settings = {"noise_multiplier": 1.5, "delta": DELTA, **privacy}
    at_clients = settings.get("noise_at") == "clients"
    loop = FederatedLoop(
        FedAvg(),
        partition=FromIndices([[2 * client, 2 * client + 1] for client in range(CLIENTS)]),
        clients_per_round=per_round,
        min_clients=per_round if at_clients else 1,
        weighting="uniform",
        privacy=ClientPrivacy(**settings),
        seed=seed,
        summary=False,
    )
    return [loop]


def samples(seed: int, federated: bool = False) -> list[pl.Callback]:
    private = DifferentialPrivacy(clip=1.0, noise_multiplier=1.5, delta=DELTA, seed=seed)
    if not federated:
        return [private]
    halves = FromIndices([list(range(SAMPLES // 2)), list(range(SAMPLES // 2, SAMPLES))])
    return [FederatedLoop(FedAvg(), partition=halves, seed=seed, summary=False), private]


SETTINGS: dict[str, Callbacks] = {
    "clients, Poisson": clients,
    "clients, fixed": lambda seed: clients(seed, sampling="fixed"),
    "clients, noise at clients": lambda seed: clients(
        seed, per_round=CLIENTS, sampling="fixed", noise_at="clients", noise_multiplier=2.5
    ),
    "clients, quantile": lambda seed: clients(seed, quantile=0.5, noise_multiplier=1.0, count_noise=1.5),
    "samples": samples,
    "samples, federated": lambda seed: samples(seed, federated=True),
}

REPLACED = ("clients, fixed", "clients, noise at clients")


def fitted(callbacks: list[pl.Callback], canary: float) -> tuple[float, float]:
    """The weight that only the canary moves after a fit, and the ε that the fit claims."""
    rows = torch.zeros(SAMPLES, 2)
    rows[:, 1] = torch.linspace(-2, 2, SAMPLES)
    rows[:2, 0] = canary
    rows[:2, 1] = 0
    if not any(isinstance(each, FederatedLoop) and each.privacy is not None for each in callbacks):
        # A single sample is the canary.
        rows[1, 0] = 0
    module = Linear()
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=8, shuffle=True))
    return module.weight[0].item(), float(trainer.callback_metrics["privacy/epsilon"])


def bound(present: Tensor, absent: Tensor, delta: float) -> float:
    """A lower bound on ε at 95 %, from a statistic on two neighbouring data sets; see the module."""
    half = len(present) // 2
    thresholds = torch.cat([present[:half], absent[:half]]).sort().values

    def epsilon(first: Tensor, second: Tensor, threshold: Tensor, exact: bool) -> float:
        count = len(first)
        hits, false = int((first > threshold).sum()), int((second > threshold).sum())
        if not exact:
            return math.log(max(hits / count - delta, 1e-9)) - math.log((false + 0.5) / count)
        least = stats.beta.ppf(0.025, hits, count - hits + 1) if hits else 0.0
        most = stats.beta.ppf(0.975, false + 1, count - false) if false < count else 1.0
        return math.log(max(least - delta, 1e-9)) - math.log(most)

    found = []
    for first, second in ((present, absent), (-absent, -present)):
        sign = 1 if first is present else -1
        best = max(thresholds, key=lambda each: epsilon(first[:half], second[:half], sign * each, exact=False))
        found.append(epsilon(first[half:], second[half:], sign * best, exact=True))
    return max(0.0, *found)


def main() -> int:
    """Run the audit; the exit status is 1 if a lower bound is above the claimed ε."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=600, help="fits on each of the two data sets")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--noise", type=float, default=1.0, help="what all noise is multiplied by")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    gaussian = noise.gaussian

    def scaled(like: Any, std: float, *arguments: Any, **keywords: Any) -> Any:
        return gaussian(like, options.noise * std, *arguments, **keywords)

    mean.gaussian = differential_privacy.gaussian = scaled  # type: ignore[attr-defined]
    failed = False
    print(f"{options.fits} fits on each data set, noise × {options.noise:g}")
    print(f"{'':28s}{'claimed ε':>12s}{'found ε ≥':>12s}")
    for name in options.only:
        values = {True: [], False: []}  # type: dict[bool, list[float]]
        for number in range(options.fits):
            for canary, found in values.items():
                seed = 2 * number + canary
                # Where neighbours differ by a client that is replaced, its update may be the opposite.
                absent = -100.0 if name in REPLACED else 0.0
                value, claimed = fitted(SETTINGS[name](seed), 100.0 if canary else absent)
                found.append(value)
        least = bound(torch.tensor(values[True]), torch.tensor(values[False]), DELTA)
        failed |= least > claimed
        print(f"{name:28s}{claimed:12.3f}{least:12.3f}{'  ABOVE' if least > claimed else ''}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
