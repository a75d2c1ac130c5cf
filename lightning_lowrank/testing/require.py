"""Shared parts of the checks: the error for a broken contract, and the states of the global generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def require(kept: bool, message: str) -> None:
    """Raise an `AssertionError` with this message unless the contract is kept."""
    if not kept:
        raise AssertionError(message)


def seed_generators(seed: int) -> list[Any]:
    """Seed the global generators, draw once, and return their states.

    After the draw, a second seeding with any small number changes the states, so that it is noticed.
    """
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    torch.rand((), device="cpu"), np.random.rand(), random.random()
    return generator_states()


def generator_states() -> list[Any]:
    """The states of the global generators of torch, NumPy and Python."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return [torch.get_rng_state().tolist(), name, list(keys), rest, random.getstate()]
