"""`Message`: named tensors sent between server and client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_lowrank.compression import Codec


@dataclass
class Message:
    """Named tensors that cross the wire in one direction.

    Args:
        tensors: The tensors to send, by name. The tensors may be live ones: they are read before anything changes them.
        codec: How the method itself has them encoded. ``None``: as they are.
        limits: Largest shapes of tensors that a client sends in shapes of its own choice, by name. A server of sites
            refuses a tensor of another shape than it expects; of these, no dimension may be larger, and
            `Algorithm.receive` checks the rest and raises `ValueError` for unusable tensors.
        units: Numbers by which a client has divided tensors, by name, if they may differ between its messages. The
            residual of error feedback is kept in the units of the product.

    Example:
        >>> import torch
        >>> Message({"weight": torch.zeros(2, 3)}).elements
        6
    """

    tensors: Mapping[str, Tensor]
    codec: Codec | None = None
    limits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    units: Mapping[str, float] = field(default_factory=dict)

    def split(self, prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Split the tensors by a name prefix: first those without it, then those with it, the prefix removed.

        Example:
            >>> import torch
            >>> model, control = Message({"weight": torch.zeros(1), "c.weight": torch.ones(1)}).split("c.")
            >>> model, control
            ({'weight': tensor([0.])}, {'weight': tensor([1.])})
        """
        rest: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        for name, value in self.tensors.items():
            (found if name.startswith(prefix) else rest)[name.removeprefix(prefix)] = value
        return rest, found

    @property
    def elements(self) -> int:
        """The total number of elements in the tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())
