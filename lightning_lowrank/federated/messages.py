"""A message between the server and a client: the two halves of an `Algorithm` make one for each transfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_lowrank.compression import Codec


@dataclass
class Message:
    """Named tensors that cross the wire in one direction.

    Args:
        tensors: What is sent. The tensors may be live ones: they are read before anything changes them.
        codec: How the method itself has them encoded. ``None``: as they are.

    Example:
        >>> import torch
        >>> Message({"weight": torch.zeros(2, 3)}).elements
        6
    """

    tensors: Mapping[str, Tensor]
    codec: Codec | None = None

    @property
    def elements(self) -> int:
        """How many numbers it carries."""
        return sum(tensor.numel() for tensor in self.tensors.values())
