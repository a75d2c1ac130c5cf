"""Poisson sampling, and the base class of callbacks that need it."""

from __future__ import annotations

import numpy as np
import torch

from lightning_lowrank.seeding import generator


class NeedsPoissonBatches:
    """Base of callbacks that need Poisson-sampled batches: each sample is drawn independently, at an equal rate."""

    def batch_seed(self, seed: int) -> int:
        """The seed of the draws, derived from the experiment's seed."""
        return seed


def rate_of(samples: int, batch_size: int) -> float:
    """The sampling rate at which ``samples`` samples give batches of ``batch_size`` on average."""
    return min(1.0, batch_size / samples)


def poisson_sample(samples: np.ndarray, rate: float, *parts: int | str) -> np.ndarray:
    """Poisson-sample from ``samples`` with probability ``rate`` each; ``parts`` seed the `generator`."""
    chances = torch.rand(len(samples), generator=generator(*parts), dtype=torch.float64).numpy()
    return samples[chances < rate]
