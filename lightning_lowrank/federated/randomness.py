"""The process's random number generators: seeded for each step, and restored."""

from __future__ import annotations

import functools
import inspect
import random
import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_lowrank.federated.leaks import walk
from lightning_lowrank.internals.torch import device_module
from lightning_lowrank.seeding import derive_seed

_LEFT_OUT = (
    *(type, types.ModuleType, Enum, str, bytes, int, float, complex, type(None)),
    *(pl.Trainer, pl.Callback, pl.LightningModule, pl.LightningDataModule),
)
_OF_THE_PROCESS = (
    getattr(random.seed, "__self__", None),
    getattr(np.random.mtrand, "_rand", None),
    torch.default_generator,
)
# The names of such methods in albumentations and MONAI.
_SEEDERS = ("set_random_seed", "set_random_state")
_SAMPLES = 1_000
"""Number of entries above which a container counts as one of samples, not of transforms."""


class StepRandomness:
    """Saves the process's random number generators, seeds them for steps, and restores them.

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
        """Whether a device other than the CPU has a generator."""
        return self._device is not None

    def open(self, seed: int | None = None) -> None:
        """Save the generators' state, unless it is already saved.

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
        """Restore torch's generators to the state that `open` saved; does nothing without `open`."""
        if self._torch is not None:
            cpu, of_device = self._torch
            torch.default_generator.set_state(cpu)
            if self._device is not None:
                self._device.set_rng_state(of_device)
            self._torch = None

    def seed(self, seed: int) -> None:
        """Seed all generators; call it after `open`."""
        seed_process(seed)
        if self._device is not None:
            self._device.manual_seed(seed)

    def release(self) -> None:
        """Restore all generators."""
        self.close()
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
            self._others = None


class OwnGenerators:
    """Random generators inside a dataset and its transforms, which `seed_process` does not reach.

    These are NumPy's, torch's and ``random.Random`` in attributes, containers and closures, such as ``self.rng``, and
    objects with a method ``set_random_seed(seed)`` or ``set_random_state(seed)``, such as transforms of albumentations
    and MONAI.

    Args:
        *roots: A data set, and other objects that are called when it is read.

    Example:
        >>> transform = {"noise": np.random.default_rng(3)}
        >>> OwnGenerators(transform).seed(0)
        >>> first = transform["noise"].normal()
        >>> OwnGenerators(transform).seed(0)
        >>> transform["noise"].normal() == first
        True
    """

    def __init__(self, *roots: Any) -> None:
        self._seeders = [seeder for root in roots for seeder in _seeders(root)]

    def seed(self, seed: int) -> None:
        """Seed all generators, each with a different seed."""
        for number, seeder in enumerate(self._seeders):
            seeder(derive_seed(seed, "own generator", number) & 0xFFFFFFFF)


def _seeders(root: Any) -> Iterator[Callable[[int], Any]]:
    for _, item in walk("", root, _is_left_out, is_whole=lambda item: _seeder_of(item) is not None):
        seeder = _seeder_of(item)
        if seeder is not None:
            yield seeder


def _is_left_out(item: Any) -> bool:
    holds_samples = isinstance(item, (dict, list, tuple, set, frozenset)) and len(item) > _SAMPLES
    return isinstance(item, _LEFT_OUT) or holds_samples or any(item is each for each in _OF_THE_PROCESS)


def _seeder_of(item: Any) -> Callable[[int], Any] | None:
    if isinstance(item, (np.random.RandomState, random.Random)):
        return item.seed
    if isinstance(item, np.random.Generator):
        return functools.partial(_seed_numpy, item)
    if isinstance(item, torch.Generator):
        return item.manual_seed
    # A dataset's own method may seed something else; its transforms are found by the walk.
    names = () if isinstance(item, Dataset) else _SEEDERS
    return next((functools.partial(_call, item, name) for name in names if _takes_seed(type(item), name)), None)


def _takes_seed(kind: type, name: str) -> bool:
    method = getattr(kind, name, None)
    return inspect.isfunction(method) and "seed" in inspect.signature(method).parameters


def _seed_numpy(generator: np.random.Generator, seed: int) -> None:
    generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _call(item: Any, name: str, seed: int) -> None:
    getattr(item, name)(seed=seed)


def seed_process(seed: int) -> None:
    """Seed torch's CPU generator, ``random``, and NumPy's global generator."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed formats a stack trace for each unused device, which costs more than a small step.
    torch.default_generator.manual_seed(seed)


def step_seed(client_seed: int, step: int) -> int:
    """The seed of a client's step, below 2**63."""
    return (client_seed + step) & 0x7FFFFFFFFFFFFFFF
