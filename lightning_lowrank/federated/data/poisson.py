"""Poisson-sampled batches: each sample is in a batch independently, with equal probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_lowrank.federated.data.batches import BatchReader, Request
from lightning_lowrank.federated.data.loader_checks import batches_of
from lightning_lowrank.federated.data.sampling import poisson_sample, rate_of
from lightning_lowrank.federated.randomness import StepRandomness, step_seed
from lightning_lowrank.seeding import derive_seed


class PoissonLoader:
    """A training loader of Poisson-sampled batches, which can start at any batch.

    It keeps the dataset, collate function and workers of another loader, and the number of its batches. A batch has the
    loader's batch size on average. If no sample is drawn, the batch has the first sample in its place; see `drawn`.

    Args:
        loader: The user's loader, checked by `check_loader`.
        seed: Seed of the draws while samples are read.
        poisson: Returns the seed by which samples are drawn.
        steps: Returns how many batches were drawn before, in all fits. Each has draws of its own.
        epoch: Returns the number of the epoch.
        position: Returns the number of the epoch's batches that are done.
        device: The device that trains, whose generator is seeded as well.
    """

    def __init__(
        self,
        loader: DataLoader,
        seed: int,
        poisson: Callable[[], int],
        steps: Callable[[], int],
        epoch: Callable[[], int],
        position: Callable[[], int],
        device: torch.device,
    ) -> None:
        self.samples = np.arange(len(loader.dataset))  # type: ignore[arg-type]
        self.batch_size = cast(int, loader.batch_size)
        self._length = int(batches_of(np.array([len(self.samples)]), loader)[0])
        self._seed, self._poisson, self._steps = seed, poisson, steps
        self._epoch, self._position = epoch, position
        self._randomness = StepRandomness(device)
        self._reader = BatchReader(loader, self.requests)

    def __len__(self) -> int:
        return self._length

    def drawn(self, number: int) -> np.ndarray:
        """The drawn samples of batch ``number``, counted over all fits; there may be none."""
        rate = rate_of(len(self.samples), self.batch_size)
        return poisson_sample(self.samples, rate, self._poisson(), "poisson", number)

    def requests(self) -> Iterator[Request]:
        """Iterate over the requests of the epoch's remaining batches."""
        epoch = self._epoch()
        seed, position = derive_seed(self._seed, "data", epoch), self._position()
        before = self._steps() - position
        for step in range(position, self._length):
            drawn = self.drawn(before + step)
            yield Request(drawn if len(drawn) else self.samples[:1], step_seed(seed, step))

    def __iter__(self) -> Iterator[Any]:
        batches = self._reader.read()
        seed, first = derive_seed(self._seed, "training", self._epoch()), self._position()
        for step in range(first, self._length):
            self.close()
            self._randomness.open()
            batch = next(batches)
            if batch is None:
                raise MisconfigurationException(
                    f"DifferentialPrivacy adds noise in each step, but batch {step} of epoch {self._epoch()} is None,"
                    " and Lightning skips it: remove the samples that the collate function leaves out from the"
                    " dataset."
                )
            self._randomness.seed(step_seed(seed, step))
            yield batch
        self.close()

    def close(self) -> None:
        """Restore the process's random number generators, which steps had seeded."""
        self._randomness.release()

    def release(self) -> None:
        """Stop persistent workers, as does `BatchReader.release`."""
        self._reader.release()

    def state_dict(self) -> dict[str, Any]:
        """An empty state, which marks the loader as resumable; Lightning's loop saves the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is empty."""
