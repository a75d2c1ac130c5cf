"""Clients of different capacity: their levels, the parts of the model that they train, and the mean of these parts.

A client of less capacity trains fewer tensors, or a *leading block* of each: the first columns of a factor, the first
channels of a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import to_float64
from lightning_lowrank.federated.algorithm import Claims
from lightning_lowrank.federated.capacities import Capacities
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import UnequalClients
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, State, copy_into, trained_tensors


def leading(shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of the leading block of this shape in a larger tensor."""
    return tuple(slice(size) for size in shape)


@torch.no_grad()
def copy_blocks_into(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy leading blocks into the live tensors of the same names, and set the rest of these tensors to zero."""
    copy_into(live, {name: value for name, value in values.items() if value.shape == live[name].shape})
    for name, value in values.items():
        whole = live[name]
        if value.shape != whole.shape:
            whole.zero_()
            whole[leading(value.shape)].copy_(value)


_BY_COUNTS = "numbers are averaged over the clients that sent them, by counts in the messages"


class PartAveraging(UnequalClients, ABC):
    """Base class of methods in which a client trains and sends the part of the model that its capacity allows.

    A number of the global model becomes the mean over the clients that sent it, or keeps its value if no client did.
    """

    claims = Claims(unprotected=_BY_COUNTS)
    _capacities: Capacities

    @abstractmethod
    def part(self, model: Mapping[str, Tensor], client: ClientInfo) -> dict[str, Tensor]:
        """The part of a model that a client trains: leading blocks of some or all tensors, by name."""

    @abstractmethod
    def variant(self, server: Server, level: float) -> Mapping[str, Tensor]:
        """The global model of a level."""

    @property
    @abstractmethod
    def whole(self) -> float:
        """The level at which clients train the whole global model."""

    def computed(self, base: Base, client: ClientInfo) -> Mapping[str, float]:
        model = trained_tensors(base.module)
        return {name: value.numel() / model[name].numel() for name, value in self.part(model, client).items()}

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        return Message(self.part(server.sent_down(), client))

    def end(self, client: ClientContext) -> Message:
        return Message(self.part(client.base.sent_up(client.model), client))

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        self._add(server, message.tensors, weight)

    def _add(
        self, server: Server, tensors: Mapping[str, Tensor], weight: float, rows: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add a client's blocks to the means; for tensors in ``rows``, only the rows whose entry is true."""
        values: dict[str, Tensor] = {}
        for name, whole in server.base.sent_up(server.model).items():
            values[name] = torch.zeros_like(to_float64(whole))
            values[f"count.{name}"] = torch.zeros_like(values[name])
            if name in tensors:
                block = leading(tensors[name].shape)
                values[name][block] = to_float64(tensors[name])
                values[f"count.{name}"][block] = 1
            if rows and name in rows:
                absent = ~rows[name].to(values[name].device)
                values[name][absent] = 0
                values[f"count.{name}"][absent] = 0
        server.aggregator.add(values, weight)

    def aggregate(self, server: Server) -> None:
        means = server.aggregator.result()
        for name in server.base.sent_up(server.model):
            old, count = server.model[name], means[f"count.{name}"]
            average = torch.where(count > 0, means[name] / count, to_float64(old))
            server.update_model({name: average if old.is_floating_point() else average.round()})
            server.model[name] = server.model[name].to(old.device)

    def model_for(self, server: Server, client: ClientInfo) -> Mapping[str, Tensor]:
        return self.variant(server, self._capacities.level(client))

    def has_full_model(self, server: Server, client: ClientInfo, state: State) -> bool:
        return self._capacities.always(client, self.whole)
