"""The process's random number generators, seeded for each step and given back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_lowrank.internals.torch import device_module


class StepRandomness:
    """Gives the process's random number generators back after steps that seed them.

    PyTorch's dropout and most augmentations draw from the global generators. Between `open` and `close` those (torch's
    of the CPU and of the device in use, ``random``, NumPy) are a function of (seed, round, client, step) alone. torch's
    are given back after every step; reading NumPy's state costs as much as a small step, so ``random``'s and NumPy's
    are given back when the round pauses or ends, by `release`.

    Args:
        device: The device in use. It is the current one of its kind, as Lightning makes it.
    """

    def __init__(self, device: torch.device) -> None:
        found = device_module(device)
        self._device: Any = found if hasattr(found, "get_rng_state") else None
        self._torch: tuple[Tensor, Tensor | None] | None = None
        self._others: tuple[Any, Any] | None = None

    @property
    def has_device(self) -> bool:
        """Whether a device beside the CPU has a generator."""
        return self._device is not None

    def open(self, seed: int | None = None) -> None:
        """Keep the generators' state, unless that has been done already.

        Args:
            seed: Seeds the device's generator, from which a dataset may draw. `SeededBatches` seeds the others.
        """
        if self._torch is None:
            of_device = None if self._device is None else self._device.get_rng_state()
            self._torch = torch.default_generator.get_state(), of_device
        if self._others is None:
            self._others = random.getstate(), np.random.get_state()
        if seed is not None and self._device is not None:
            self._device.manual_seed(seed)

    def close(self) -> None:
        """Give torch's generators back as `open` found them; does nothing where it was not called."""
        if self._torch is not None:
            cpu, of_device = self._torch
            torch.default_generator.set_state(cpu)
            if self._device is not None:
                self._device.set_rng_state(of_device)
            self._torch = None

    def seed(self, seed: int) -> None:
        """Seed all generators; to be called after `open`."""
        seed_process(seed)
        if self._device is not None:
            self._device.manual_seed(seed)

    def release(self) -> None:
        """Give all generators back."""
        self.close()
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
            self._others = None


def seed_process(seed: int) -> None:
    """Seed torch's generator on the CPU, ``random`` and NumPy's global one."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed formats a stack trace for every device that is not in use, which costs more than a small step.
    torch.default_generator.manual_seed(seed)


def step_seed(client_seed: int, step: int) -> int:
    """Return the seed of one of a client's steps, below 2**63."""
    return (client_seed + step) & 0x7FFFFFFFFFFFFFFF
