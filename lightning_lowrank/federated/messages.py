"""What crosses the wire, and the book kept of it.

The two halves of an `Algorithm` make a `Message` for each transfer. Its size is entered into the `Ledger`, which the
logged ``comm/...`` metrics read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowrank.aggregation.adapters import peft_parameters
from lightning_lowrank.buffers import persistent_buffers
from lightning_lowrank.compression import Codec, Dense
from lightning_lowrank.layers import low_rank_layers

# What PEFT puts into the names of the model that it wraps.
_PEFT_NAMES = re.compile(r"\bbase_model\.model\.|\bbase_layer\.|\boriginal_module\.")


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


def dense_bytes(module: nn.Module) -> int:
    """Return what dense FedAvg would send for ``module``, in the types that its tensors have now.

    These are the buffers, the parameters that are trained, and those in whose place factors are trained: the weights of
    low-rank layers and what ``freeze_rest`` froze, and a model that PEFT wrapped, all of which PEFT freezes. So the
    same adapters have the same size of the dense model, whoever made them.

    Returns:
        Bytes in one direction, to or from one client.
    """
    tensors: dict[str, Tensor] = {}
    factors: set[Tensor] = set()
    for name, layer in low_rank_layers(module):
        *own, first = (value for part, value in layer.named_parameters() if part != "bias")
        tied = first in factors
        factors.update((*own, first))
        if not tied and any(value.requires_grad for value in (*own, first)):
            tensors[f"{name}.weight"] = torch.empty(layer.weight_shape, dtype=first.dtype, device="meta")
    replaced = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, part in module.named_modules()
        for name in getattr(part, "frozen_for_factors", ())
    }
    wrapped, adapters = peft_parameters(module)
    for name, value in module.named_parameters():
        if value not in factors and value not in adapters:
            if value in wrapped:
                name = _PEFT_NAMES.sub("", name)
            elif not value.requires_grad and name not in replaced:
                continue
            tensors[name] = value
    return Dense().nbytes({**tensors, **persistent_buffers(module)})


class Ledger:
    """Bytes that crossed the wire, in this round and in all.

    Args:
        dense_bytes: Size of what dense FedAvg sends for this model, in one direction, to or from one client. Where
            other parameters are trained from some round on, it is another from then on.

    Example:
        >>> ledger = Ledger(dense_bytes=100)
        >>> ledger.down(10), ledger.up(30)
        (None, None)
        >>> ledger.metrics()["comm/ratio"]
        0.2
    """

    def __init__(self, dense_bytes: int) -> None:
        self.dense_bytes = dense_bytes
        self.round_up = self.round_down = self.round_idle = 0
        self.total_up = self.total_down = self.total_idle = 0
        self.total_dense = 0

    def begin_round(self) -> None:
        """Set the round's figures to zero."""
        self.round_up = self.round_down = self.round_idle = 0

    def down(self, nbytes: int, clients: int = 1) -> None:
        """Enter what each of so many taking-part clients was sent."""
        self.round_down += nbytes * clients
        self.total_down += nbytes * clients
        self.total_dense += self.dense_bytes * clients

    def up(self, nbytes: int, clients: int = 1) -> None:
        """Enter what each of so many clients sent."""
        self.round_up += nbytes * clients
        self.total_up += nbytes * clients
        self.total_dense += self.dense_bytes * clients

    def idle(self, nbytes: int) -> None:
        """Enter what clients that sat the round out had to hear all the same."""
        self.round_idle += nbytes
        self.total_idle += nbytes

    def metrics(self) -> dict[str, float]:
        """Return the ``comm/...`` figures: bytes of this round, cumulative bytes, and the ratio to dense FedAvg.

        ``comm/ratio`` is all bytes to and from clients that took part, over what dense FedAvg would have moved in
        the same transfers (`dense_bytes`, of each round's module). ``comm/idle_down_bytes`` is in neither: see
        `Algorithm.announce`.
        """
        return {
            "comm/up_bytes": self.round_up,
            "comm/down_bytes": self.round_down,
            "comm/idle_down_bytes": self.round_idle,
            "comm/total_up_bytes": self.total_up,
            "comm/total_down_bytes": self.total_down,
            "comm/total_idle_down_bytes": self.total_idle,
            "comm/total_bytes": self.total_up + self.total_down,
            "comm/ratio": (self.total_up + self.total_down) / max(self.total_dense, 1),
        }

    def state_dict(self) -> dict[str, int]:
        """Return the figures as plain Python."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s result."""
        vars(self).update(state)
