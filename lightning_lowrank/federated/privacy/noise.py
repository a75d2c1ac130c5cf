"""Gaussian noise, seeded or from the operating system's entropy."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import float64_device
from lightning_lowrank.seeding import generator

_AT_ONCE = 2**20


def gaussian(like: Mapping[str, Tensor], std: float, *parts: int | str, secure: bool = False) -> dict[str, Tensor]:
    """Noise with the shapes and devices of some tensors, in float64; on the CPU if the device lacks float64.

    Args:
        like: The tensors by name. They draw in their order.
        std: Standard deviation.
        *parts: The purpose of the noise, as for `generator`: the same parts give the same noise.
        secure: Draw from the operating system's entropy instead, where nothing gives the same noise again.

    Raises:
        TypeError: If one of them is complex.

    Example:
        >>> first, again = (gaussian({"w": torch.zeros(3)}, 2.0, 0, "noise")["w"] for _ in range(2))
        >>> torch.equal(first, again)
        True
    """
    draws = None if secure else generator(*parts)
    found = {}
    for name, value in like.items():
        if value.is_complex():
            raise TypeError(f"noise must be of real numbers, but {name!r} is of {value.dtype}; use torch.view_as_real.")
        if draws is None:
            noise = _from_system_entropy(value.numel()).view(value.shape)
        else:
            noise = torch.randn(value.shape, generator=draws, dtype=torch.float64)
        found[name] = (std * noise).to(float64_device(value.device))
    return found


def _from_system_entropy(count: int) -> Tensor:
    """Standard normal numbers from the operating system's entropy, by the Box-Muller method.

    Each is half the sum of four, so that the gaps between a single draw's possible values do not show which sum was
    added to it (Holohan and Braghin, 2021, arXiv:2107.10138).
    """
    found = np.empty(count)
    for start in range(0, count, _AT_ONCE):
        size = min(_AT_ONCE, count - start)
        bits = np.frombuffer(secrets.token_bytes(8 * 4 * size), dtype=np.uint64).reshape(2, 2, size) >> np.uint64(11)
        uniform = (bits + np.uint64(1)).astype(np.float64) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
        found[start : start + size] = (radius * np.cos(angle) + radius * np.sin(angle)).sum(0) / 2
    return torch.from_numpy(found)
