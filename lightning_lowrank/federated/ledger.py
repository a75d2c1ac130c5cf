"""The ledger of a run's bytes: transfers of messages, compared with dense federated averaging."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_lowrank.buffers import persistent_buffers
from lightning_lowrank.compression import Dense
from lightning_lowrank.federated.stages import RoundStage
from lightning_lowrank.federated.state import ClientInfo, Server
from lightning_lowrank.internals.peft import peft_parameters
from lightning_lowrank.layers import low_rank_layers
from lightning_lowrank.layers.precision import types_before

# Prefixes that PEFT adds to the names of a wrapped model's parameters.
_PEFT_NAMES = re.compile(r"\bbase_model\.model\.|\bbase_layer\.|\boriginal_module\.")


def dense_bytes(module: nn.Module) -> int:
    """The size of a message of dense FedAvg for ``module``, in the present types of its tensors.

    Tensors that a conversion changed from 16 bits to float32 count in 16 bits, as in the dense model.
    Such a message has the buffers, the trained parameters, and the parameters that factors replace: the weights of
    low-rank layers, the parameters that ``freeze_rest`` froze, and all of a model that PEFT wrapped. So the same
    adapters have the same size of the dense model, whichever library made them.

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
            tensors[f"{name}.weight"] = torch.empty(layer.weight_shape, dtype=layer.weight_dtype, device="meta")
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
    tensors.update(persistent_buffers(module))
    before = types_before(module)
    for name, tensor in tensors.items():
        if tensor in before:
            tensors[name] = torch.empty(tensor.shape, dtype=before[tensor], device="meta")
    return Dense().nbytes(tensors)


class Ledger(RoundStage):
    """Counts the bytes that cross the wire, per round and in total.

    Args:
        dense_bytes: Size of dense FedAvg's message for this model, in one direction, to or from one client. If other
            parameters are trained from some round on, it changes with that round.

    Example:
        >>> ledger = Ledger(dense_bytes=100)
        >>> ledger.add_down(10), ledger.add_up(30)
        (None, None)
        >>> ledger.figures()["comm/ratio"]
        0.2
    """

    key: ClassVar[str] = "ledger"

    def __init__(self, dense_bytes: int) -> None:
        self.dense_bytes = dense_bytes
        self.round_up = self.round_down = self.round_idle = 0
        self.total_up = self.total_down = self.total_idle = 0
        self.total_dense = 0

    @override
    def begin_round(self, server: Server | None = None) -> None:
        self.round_up = self.round_down = self.round_idle = 0

    @override
    def down(self, client: ClientInfo, nbytes: int) -> None:
        self.add_down(nbytes)

    @override
    def answered(self, client: ClientInfo, steps: int, nbytes: int) -> None:
        self.add_up(nbytes)

    def add_down(self, nbytes: int, clients: int = 1) -> None:
        """Count a broadcast of ``nbytes`` to each of ``clients`` clients of the cohort."""
        self.round_down += nbytes * clients
        self.total_down += nbytes * clients
        self.total_dense += self.dense_bytes * clients

    def add_up(self, nbytes: int, clients: int = 1) -> None:
        """Count a message of ``nbytes`` from each of ``clients`` clients."""
        self.round_up += nbytes * clients
        self.total_up += nbytes * clients
        self.total_dense += self.dense_bytes * clients

    def add_idle(self, nbytes: int) -> None:
        """Count the broadcasts to clients outside the cohort."""
        self.round_idle += nbytes
        self.total_idle += nbytes

    @override
    def figures(self) -> dict[str, float]:
        """The ``comm/...`` figures: bytes of this round, cumulative bytes, and the ratio to dense FedAvg.

        ``comm/ratio`` is all bytes to and from clients that took part, over what dense FedAvg would have moved in
        the same transfers (`dense_bytes`, of each round's module). ``comm/idle_down_bytes`` is in neither: see
        `ChangesBase.announce`.
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

    @override
    def counted(self) -> dict[str, int]:
        return self.state_dict()

    @override
    def pool(self, start: dict[str, int], counts: Sequence[dict[str, int]]) -> None:
        more = {name: sum(each[name] - value for each in counts) for name, value in start.items()}
        self.load_state_dict({name: value + more[name] for name, value in start.items()})

    @override
    def state_dict(self) -> dict[str, int]:
        names = ("round_up", "round_down", "round_idle", "total_up", "total_down", "total_idle", "total_dense")
        return {"dense_bytes": self.dense_bytes, **{name: getattr(self, name) for name in names}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
