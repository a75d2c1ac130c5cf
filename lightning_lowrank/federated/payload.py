"""What crosses the wire, and the book kept of it.

Algorithms make a `Payload` for each transfer; `FederatedLoop` enters its size into the `Ledger`, which the logged
``comm/...`` metrics and ``lightning-lowrank inspect`` read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowrank.compression import Codec, DenseCodec
from lightning_lowrank.federated.client import persistent_buffers
from lightning_lowrank.layers import low_rank_layers


@dataclass
class Payload:
    """Named tensors that cross the wire in one direction.

    Args:
        tensors: What is sent. The tensors may be live ones: they are read before anything changes them.
        codec: How they are encoded.

    Example:
        >>> import torch
        >>> payload = Payload({"weight": torch.zeros(2, 3)})
        >>> payload.numbers, payload.nbytes == len(payload.encode())
        (6, True)
    """

    tensors: Mapping[str, Tensor]
    codec: Codec = field(default_factory=DenseCodec)

    @property
    def nbytes(self) -> int:
        """Length in bytes of what `encode` returns."""
        return self.codec.nbytes(self.tensors) if self.tensors else 0

    def encode(self) -> bytes:
        """Return the encoding; nothing where there is nothing to send."""
        return self.codec.encode(self.tensors) if self.tensors else b""

    def delivered(self) -> Payload:
        """Return the payload as the other side decodes it: what a codec leaves out or rounds is lost."""
        return Payload(self.codec.transmit(self.tensors), self.codec)

    @property
    def numbers(self) -> int:
        """How many numbers it carries."""
        return sum(tensor.numel() for tensor in self.tensors.values())


def dense_payload(module: nn.Module) -> Payload:
    """Return what dense FedAvg would send for ``module``: every weight that is trained or stands for a trained one.

    For a module that `LowRank` converted, these are the unconverted module's trained parameters, and its buffers.
    The tensors have sizes but no values.
    """
    recorded = getattr(module, "lowrank_conversion", None) if any(low_rank_layers(module)) else None
    parameters = (
        {name: (value.shape, value.dtype) for name, value in module.named_parameters() if value.requires_grad}
        if recorded is None
        else recorded.dense_tensors
    )
    buffers = {name: (value.shape, value.dtype) for name, value in persistent_buffers(module).items()}
    return Payload(
        {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in {**parameters, **buffers}.items()
        }
    )


class Ledger:
    """Bytes that crossed the wire, in this round and in all.

    Args:
        dense_bytes: Size of what dense FedAvg sends for this model, in one direction, to or from one client.

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
        self.transfers = 0

    def begin_round(self) -> None:
        """Start the round's figures anew."""
        self.round_up = self.round_down = self.round_idle = 0

    def down(self, nbytes: int, clients: int = 1) -> None:
        """Enter what each of so many taking-part clients was sent."""
        self.round_down += nbytes * clients
        self.total_down += nbytes * clients
        self.transfers += clients

    def up(self, nbytes: int, clients: int = 1) -> None:
        """Enter what each of so many clients sent."""
        self.round_up += nbytes * clients
        self.total_up += nbytes * clients
        self.transfers += clients

    def idle(self, nbytes: int) -> None:
        """Enter what clients that sat the round out had to hear all the same."""
        self.round_idle += nbytes
        self.total_idle += nbytes

    def metrics(self) -> dict[str, float]:
        """Return the ``comm/...`` figures: bytes of this round, cumulative bytes, and the ratio to dense FedAvg.

        ``comm/ratio`` is all bytes to and from clients that took part, over what dense FedAvg would have moved in
        as many transfers. ``comm/idle_down_bytes`` is in neither: see `Algorithm.every_client_listens`.
        """
        dense = self.dense_bytes * self.transfers
        return {
            "comm/up_bytes": self.round_up,
            "comm/down_bytes": self.round_down,
            "comm/idle_down_bytes": self.round_idle,
            "comm/total_up_bytes": self.total_up,
            "comm/total_down_bytes": self.total_down,
            "comm/total_idle_down_bytes": self.total_idle,
            "comm/total_bytes": self.total_up + self.total_down,
            "comm/ratio": (self.total_up + self.total_down) / dense if dense else 0.0,
        }

    def state_dict(self) -> dict[str, int]:
        """Return the figures as plain Python."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s result."""
        vars(self).update(state)
