"""Clients whose numbers of samples follow a power law (template).

A partition is a class in ``lightning_lowrank/federated/data/partitions.py``. It says which samples each client has. The
base class finds labels and keys, and refuses numbers of clients for which there are not enough samples.
"""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.federated import ClientIndices, Partition
from lightning_lowrank.seeding import generator


class PowerLaw(Partition):
    r"""Give client :math:`k`, from 1, a share of the samples in proportion to :math:`k^{-e}`, drawn at random.

    A partition that reads labels sets ``needs_labels = True``. It is then given them, found in the dataset once.

    Args:
        exponent: :math:`e`, 0 or more. Default 1. At 0 it is `IID`.

    Raises:
        MisconfigurationException: If ``exponent`` is out of range.
    """

    def __init__(self, exponent: float = 1.0) -> None:
        if not 0 <= exponent < float("inf"):
            raise MisconfigurationException(f"exponent must be a finite number, 0 or more, got {exponent}")
        self.exponent = exponent

    def assign(self, size: int, clients: int, seed: int, labels: Tensor | None, keys: Tensor | None) -> ClientIndices:
        shares = torch.arange(1, clients + 1, dtype=torch.float64) ** -self.exponent
        ends = (shares.cumsum(0) / shares.sum() * size).round().long()
        # A generator of its own, by the seed and a purpose: the process's generators are neither read nor changed.
        order = torch.randperm(size, generator=generator(seed, "power law"))
        parts = order.tensor_split(ends[:-1])
        return ClientIndices([part.sort().values for part in parts], size)
