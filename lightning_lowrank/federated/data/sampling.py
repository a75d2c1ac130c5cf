"""Poisson sampling, and the base of callbacks that need it."""

from __future__ import annotations

import numpy as np
import torch

from lightning_lowrank.seeding import generator


class NeedsPoissonBatches:
    """Base of callbacks that need batches by Poisson sampling: each sample is drawn independently, at one rate."""

    def batch_seed(self, seed: int) -> int:
        """Return the seed of the draws, given the experiment's."""
        return seed


def rate_of(samples: int, batch_size: int) -> float:
    """The rate at which batches of so many samples have ``batch_size`` on average."""
    return min(1.0, batch_size / samples)


def drawn_by_poisson(samples: np.ndarray, rate: float, *parts: int | str) -> np.ndarray:
    """Return those of ``samples`` that are drawn, each with the chance ``rate``; ``parts`` are those of `generator`."""
    chances = torch.rand(len(samples), generator=generator(*parts), dtype=torch.float64).numpy()
    return samples[chances < rate]
