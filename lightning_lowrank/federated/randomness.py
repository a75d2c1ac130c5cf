"""The process's random number generators: seeded for each step, and restored."""

from __future__ import annotations

import functools
import inspect
import random
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_lowrank.federated.leaks import is_foreign, is_of_library, walk
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
_TABLES = (dict, OrderedDict, Tensor, nn.Parameter)
"""Types of most objects in a module, which are no generators."""
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

    Attributes:
        own: Generators that `open` saves, `seed` seeds and `release` restores as well, if there are any.
    """

    own: OwnGenerators | None = None

    def __init__(self, device: torch.device) -> None:
        found = device_module(device)
        self._device: Any = found if hasattr(found, "get_rng_state") else None
        self._torch: tuple[Tensor, Tensor | None] | None = None
        self._others: tuple[Any, Any] | None = None
        self._of_own: list[functools.partial[Any]] | None = None

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
        if self._of_own is None and self.own is not None:
            self._of_own = self.own.save()
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
        if self.own is not None:
            self.own.seed(seed)

    def release(self) -> None:
        """Restore all generators."""
        self.close()
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
            self._others = None
        for restore in self._of_own or ():
            restore()
        self._of_own = None


class OwnGenerators:
    """Random generators inside of objects, such as a dataset and its transforms, which `seed_process` does not reach.

    These are NumPy's, torch's and ``random.Random`` in attributes, containers and closures, such as ``self.rng``, and
    objects with a method ``set_random_seed(seed)`` or ``set_random_state(seed)``, such as transforms of albumentations
    and MONAI.

    Args:
        *roots: A data set, and other objects that are called when it is read.
        is_left_out: Whether an object is not looked into.

    Example:
        >>> transform = {"noise": np.random.default_rng(3)}
        >>> OwnGenerators(transform).seed(0)
        >>> first = transform["noise"].normal()
        >>> OwnGenerators(transform).seed(0)
        >>> transform["noise"].normal() == first
        True
    """

    def __init__(self, *roots: Any, is_left_out: Callable[[Any], bool] | None = None) -> None:
        found = [pair for root in roots for pair in _generators(root, is_left_out or _is_left_out)]
        self._items, self._seeders = [item for item, _ in found], [seeder for _, seeder in found]

    @classmethod
    def of_fit(cls, trainer: Any) -> OwnGenerators:
        """The generators of a fit's module, datamodule and users' callbacks, without those of data sets."""
        users = (each for each in trainer.callbacks if not is_of_library(type(each)))
        holders = (trainer.lightning_module, getattr(trainer, "datamodule", None), *users)
        roots = (vars(each) for each in holders if each is not None)
        return cls(*roots, is_left_out=lambda item: is_foreign(type(item)) or _is_of_process(item))

    def save(self) -> list[functools.partial[Any]]:
        """Functions that restore the generators' present states; objects that are seeded by a method have none."""
        restores = map(restore_of_generator, self._items)
        return [restore for restore in restores if restore is not None]

    def describe(self) -> str:
        """A text that differs once a generator has drawn."""
        states = [argument for restore in self.save() for argument in restore.args]
        return repr([state.tolist() if isinstance(state, Tensor) else state for state in states])

    def seed(self, seed: int) -> None:
        """Seed all generators, each with a different seed."""
        for number, seeder in enumerate(self._seeders):
            seeder(derive_seed(seed, "own generator", number) & 0xFFFFFFFF)


def _generators(root: Any, is_left_out: Callable[[Any], bool]) -> Iterator[tuple[Any, Callable[[int], Any]]]:
    for _, item in walk("", root, is_left_out, is_whole=lambda item: _seeder_of(item) is not None):
        seeder = _seeder_of(item)
        if seeder is not None:
            yield item, seeder


def _is_left_out(item: Any) -> bool:
    return isinstance(item, _LEFT_OUT) or _is_of_process(item)


def _is_of_process(item: Any) -> bool:
    """Whether an object is a generator of the process, or a container of samples."""
    holds_samples = isinstance(item, (dict, list, tuple, set, frozenset)) and len(item) > _SAMPLES
    return holds_samples or any(item is each for each in _OF_THE_PROCESS)


def restore_of_generator(item: Any) -> functools.partial[Any] | None:
    """A function that restores a generator's present state; ``None`` for other objects."""
    if isinstance(item, (torch.Generator, np.random.RandomState)):
        set_state: Callable[[Any], Any] = item.set_state
        return functools.partial(set_state, item.get_state())
    if isinstance(item, random.Random) and not isinstance(item, random.SystemRandom):
        return functools.partial(item.setstate, item.getstate())
    if isinstance(item, np.random.Generator):
        return functools.partial(setattr, item.bit_generator, "state", item.bit_generator.state)
    return None


def _seeder_of(item: Any) -> Callable[[int], Any] | None:
    if type(item) in _TABLES:
        return None
    if isinstance(item, (np.random.RandomState, random.Random)):
        return item.seed
    if isinstance(item, np.random.Generator):
        return functools.partial(_seed_numpy, item)
    if isinstance(item, torch.Generator):
        return item.manual_seed
    # Such a method of a dataset or a module may seed something else; its transforms are found by the walk.
    names = () if isinstance(item, (Dataset, nn.Module)) else _SEEDERS
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
