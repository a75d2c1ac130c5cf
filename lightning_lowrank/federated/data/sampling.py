"""Poisson sampling of samples, and who asks for it."""

from __future__ import annotations

import numpy as np
import torch

from lightning_lowrank.seeding import generator


class NeedsPoissonBatches:
    """Base of callbacks that need each sample to be in a batch on its own, with one chance."""

    def batch_seed(self, seed: int) -> int:
        """Return the seed of the draws, given the experiment's."""
        return seed


def rate_of(samples: int, batch_size: int) -> float:
    """Return the chance of each of so many samples to be in a batch of ``batch_size`` on average."""
    return min(1.0, batch_size / samples)


def drawn_by_poisson(samples: np.ndarray, rate: float, *parts: int | str) -> np.ndarray:
    """Return those of ``samples`` that are drawn, each with the chance ``rate``; ``parts`` are those of `generator`."""
    chances = torch.rand(len(samples), generator=generator(*parts), dtype=torch.float64).numpy()
    return samples[chances < rate]
