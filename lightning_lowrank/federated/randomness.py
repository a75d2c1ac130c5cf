"""The process's random number generators, seeded for each step and given back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


class StepRandomness:
    """Gives the process's random number generators back after steps that seed them.

    PyTorch's dropout and most augmentations draw from the global generators. Between `open` and `close` those (torch
    on every device in use, ``random``, NumPy) are a function of (seed, round, client, step) alone. torch's are given
    back after every step; reading NumPy's state costs as much as a small step, so ``random``'s and NumPy's are given
    back when the round pauses or ends, by `release`.
    """

    def __init__(self) -> None:
        self._torch: tuple[Tensor, list[Tensor]] | None = None
        self._others: tuple[Any, Any] | None = None

    def open(self) -> None:
        """Keep the generators' state, unless that has been done already."""
        if self._torch is None:
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            self._torch = torch.default_generator.get_state(), cuda
        if self._others is None:
            self._others = random.getstate(), np.random.get_state()

    def close(self) -> None:
        """Give torch's generators back as `open` found them; does nothing where it was not called."""
        if self._torch is not None:
            cpu, cuda = self._torch
            torch.default_generator.set_state(cpu)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)
            self._torch = None

    def release(self) -> None:
        """Give all generators back."""
        self.close()
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
            self._others = None


def seed_process(seed: int) -> None:
    """Seed torch's generators on the devices in use, ``random`` and NumPy's global one."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed formats a stack trace for every device that is not in use, which costs more than a small step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def step_seed(client_seed: int, step: int) -> int:
    """Return the seed of one of a client's steps, below 2**63."""
    return (client_seed + step) & 0x7FFFFFFFFFFFFFFF
