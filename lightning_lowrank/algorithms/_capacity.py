"""Clients of different capacity: their levels, the parts of the model that they train, and the mean of these parts.

A client of less capacity trains fewer tensors, or a *leading block* of each: the first columns of a factor, the first
channels of a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import to_float64
from lightning_lowrank.configuration import check_choice
from lightning_lowrank.federated.algorithm import Claims
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import UnequalClients
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, State, copy_into, trained_tensors
from lightning_lowrank.seeding import generator

Capacity = Literal["fixed", "dynamic"]
Ranks = Sequence[int] | Mapping[int, int] | Callable[[int], int]


class Capacities:
    """The level of each client: fixed, or drawn in each round. Error messages call the levels ``name``.

    Fixed levels are assigned in turns, in the order of the clients' ids. Every level has its share among any first
    clients, and a client's level does not depend on the number of clients.

    Example:
        >>> capacities = Capacities("levels", (1.0, 0.5, 0.25), "fixed", (2, 1, 1))
        >>> [capacities.fixed_level(client) for client in range(8)]
        [1.0, 0.5, 0.25, 1.0, 1.0, 0.5, 0.25, 1.0]
    """

    def __init__(
        self, name: str, levels: Sequence[float], capacity: Capacity, shares: Sequence[float] | None = None
    ) -> None:
        if not levels or len(set(levels)) != len(levels):
            raise MisconfigurationException(
                f"{name} must be different numbers, at least one, but is {list(levels)}; give shares for how many"
                " clients each has."
            )
        check_choice("capacity", capacity, Capacity)
        shares = [1.0] * len(levels) if shares is None else list(shares)
        if len(shares) != len(levels) or not all(0 <= share < float("inf") for share in shares) or not any(shares):
            raise MisconfigurationException(
                f"shares must be {len(levels)} finite numbers, one for each of {name}, none below 0 and not all 0, but"
                f" is {shares}."
            )
        self.levels = tuple(levels)
        self.capacity = capacity
        self.shares = tuple(share / sum(shares) for share in shares)
        self._turns: list[int] = []
        self._credit = [0.0] * len(levels)

    def level(self, client: ClientInfo) -> float:
        """Return a client's level in its round: the same on the server and on the client."""
        if self.capacity == "fixed":
            return self.fixed_level(client.id)
        draws = generator(client.seed, "capacity", client.round, client.id)
        return self.levels[int(torch.multinomial(torch.tensor(self.shares), 1, generator=draws))]

    def always(self, client: ClientInfo, level: float) -> bool:
        """Return whether a client has this level in every round."""
        return (self.capacity == "fixed" or len(self.levels) == 1) and self.level(client) == level

    def fixed_level(self, client: int) -> float:
        """Return the level of a client by its id where levels are fixed."""
        while len(self._turns) <= client:
            self._credit = [credit + share for credit, share in zip(self._credit, self.shares, strict=True)]
            # Rounding noise must not decide between levels whose turn it is equally.
            turn = max(range(len(self.levels)), key=lambda index: (round(self._credit[index], 9), -index))
            self._credit[turn] -= 1
            self._turns.append(turn)
        return self.levels[self._turns[client]]


class ClientRanks:
    """The rank of each client: a list that is given out in turns, a dictionary by id, or a function of the id.

    Clients that a dictionary does not name have the largest rank, that of the layers. `own` has what clients say of
    themselves, which comes first.

    Example:
        >>> ranks = ClientRanks([8, 4, 4])
        >>> [ranks.rank(client, largest=8) for client in range(4)]
        [8, 4, 4, 8]
        >>> ranks.own[3] = 2
        >>> ranks.rank(3, largest=8), ClientRanks({5: 2}).rank(0, largest=8)
        (2, 8)
    """

    def __init__(self, ranks: Ranks | None) -> None:
        listed = isinstance(ranks, Sequence) and not isinstance(ranks, str)
        given = list(ranks.values()) if isinstance(ranks, Mapping) else list(ranks) if listed else [1]  # type: ignore[arg-type]
        ids = list(ranks) if isinstance(ranks, Mapping) else []
        known = ranks is None or listed or isinstance(ranks, Mapping) or callable(ranks)
        if not known or not given or not all(map(_is_rank, given)) or not all(_is_rank(each + 1) for each in ids):
            raise MisconfigurationException(
                "ranks must be a list of whole numbers of at least 1, such a number for each client id, or a function"
                f" of the id that returns one, but is {ranks!r}."
            )
        self.given = ranks
        self.own: dict[int, int] = {}

    def __bool__(self) -> bool:
        return self.given is not None or bool(self.own)

    def rank(self, client: int, largest: int) -> int:
        """Return a client's rank, at most ``largest``.

        Raises:
            MisconfigurationException: If it is none or too large.
        """
        given = self.given
        if client in self.own:
            found: object = self.own[client]
        elif isinstance(given, Mapping):
            found = given.get(client, largest)
        elif callable(given):
            found = given(client)
        else:
            found = largest if given is None else given[client % len(given)]
        if not _is_rank(found) or int(found) > largest:  # type: ignore[call-overload]
            raise MisconfigurationException(
                f"ranks gives client {client} the rank {found!r}: it must be a whole number from 1 to {largest}, the"
                " largest rank of the layers."
            )
        return int(found)  # type: ignore[call-overload]

    def check(self, clients: int, largest: int) -> None:
        """Refuse ranks that are too large, or of clients that there are not.

        Raises:
            MisconfigurationException: If there are any.
        """
        for client in range(clients):
            self.rank(client, largest)
        unknown = [client for client in self.given if client >= clients] if isinstance(self.given, Mapping) else []
        if unknown:
            raise MisconfigurationException(
                f"ranks names client {unknown[0]}, and the {clients} clients are numbered from 0."
            )


def _is_rank(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def leading(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a tensor's leading block of this shape."""
    return tuple(slice(size) for size in shape)


@torch.no_grad()
def copy_blocks_into(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy leading blocks into the live tensors of the same names, whose other numbers become zero."""
    copy_into(live, {name: value for name, value in values.items() if value.shape == live[name].shape})
    for name, value in values.items():
        whole = live[name]
        if value.shape != whole.shape:
            whole.zero_()
            whole[leading(value.shape)].copy_(value)


_BY_COUNTS = "numbers are averaged over the clients that sent them, by counts beside the values"


class PartAveraging(UnequalClients, ABC):
    """Base class of methods in which a client trains and sends the part of the model that its capacity allows.

    A number of the global model becomes the mean over the clients that sent it, or keeps its value if no client did.
    """

    claims = Claims(unprotected=_BY_COUNTS)
    _capacities: Capacities

    @abstractmethod
    def part(self, model: Mapping[str, Tensor], client: ClientInfo) -> dict[str, Tensor]:
        """Return the leading blocks of those of a model's tensors that a client trains."""

    @abstractmethod
    def variant(self, server: Server, level: float) -> Mapping[str, Tensor]:
        """Return the global model of a level."""

    @property
    @abstractmethod
    def whole(self) -> float:
        """The level of which the whole global model is."""

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
        """Add a client's blocks to the means; of the tensors named in ``rows`` those rows alone that are true there."""
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
            server.take({name: average if old.is_floating_point() else average.round()})
            server.model[name] = server.model[name].to(old.device)

    def model_for(self, server: Server, client: ClientInfo) -> Mapping[str, Tensor]:
        return self.variant(server, self._capacities.level(client))

    def has_whole_model(self, server: Server, client: ClientInfo, state: State) -> bool:
        return self._capacities.always(client, self.whole)


def refuse_kept_moments(client: ClientContext, reason: str) -> None:
    """Refuse optimizer states that a client kept from an earlier round, when it trained other numbers."""
    if "optimizers" in client.state:
        raise MisconfigurationException(f"optimizer_state='keep' is not possible: {reason}. Use 'reset'.")
