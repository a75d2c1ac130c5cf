"""Clients' ranks in each layer, for methods whose shared adapters have the largest rank.

Slots beyond a client's rank are zero in the shared module, and only the others are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.federated.capacities import Capacities, Capacity
from lightning_lowrank.federated.state import ClientInfo
from lightning_lowrank.lora.adapters import Adapter, Adapters, Name, find_adapters
from lightning_lowrank.lora.operator import Operator
from lightning_lowrank.lora.pairs import LowRankPair, padded

Ranks = Sequence[int] | Mapping[int, int] | Callable[[int], int]


class LayerRanks:
    """Ranks of clients: by levels, by explicit numbers, or as chosen by sites. The arguments are those of `FedLoRA`.

    A level is a share of each layer's rank; with ``ranks``, of the largest layer's.

    Raises:
        MisconfigurationException: If an argument is out of range, or the operator needs clients of one rank.
    """

    def __init__(
        self,
        operator: Operator,
        levels: Sequence[float],
        capacity: Capacity,
        shares: Sequence[float] | None,
        ranks: Ranks | None,
    ) -> None:
        self._operator = operator
        self._capacities = Capacities("levels", levels, capacity, shares)
        self.levels = tuple(levels)
        self.adapters = Adapters({})
        """Those of the module, at the largest rank; `Algorithm.setup` finds them."""
        if not all(0 < level <= 1 for level in levels) or max(levels) != 1:
            raise MisconfigurationException(
                f"levels must be shares of the layers' rank, above 0 and at most 1, the largest 1, got {list(levels)}."
            )
        self._given = ClientRanks(ranks)
        if self._given and (self.levels != (1.0,) or shares is not None or capacity != "fixed"):
            raise MisconfigurationException(
                f"ranks={ranks!r} gives each client its rank, and levels, shares and capacity are another way to do"
                " so: leave them out."
            )
        if self.mixed and not operator.mixed_ranks:
            given = f"ranks={ranks!r}" if self._given else f"levels={list(levels)}"
            raise MisconfigurationException(
                f"{operator!r} needs clients of one rank, and {given} gives them several: use RBLA() or ZeroPadding()"
                " for the means of factors, or SumProduct()."
            )

    @property
    def mixed(self) -> bool:
        """Whether clients may have different ranks."""
        return len(self.levels) > 1 or bool(self._given)

    @property
    def _largest(self) -> int:
        return max(adapter.rank for adapter in self.adapters.layers.values())

    def level(self, client: ClientInfo) -> float:
        """A client's level: its share of the layers' rank."""
        if not self._given:
            return self._capacities.level(client)
        return self._given.rank(client.id, self._largest) / self._largest

    @property
    def drawn(self) -> bool:
        """Whether each client's level is drawn in each round."""
        return not self._given and len(self.levels) > 1 and self._capacities.capacity == "dynamic"

    def rank(self, adapter: Adapter, level: float) -> int:
        """The rank of a layer for clients of a level."""
        if self._given:
            return min(round(level * self._largest), adapter.rank)
        return max(round(level * adapter.rank), 1)

    def scaling(self, adapter: Adapter, level: float) -> float:
        """The scaling of a layer for clients of a level, derived from their rank."""
        own = adapter.scaling_at(self.rank(adapter, level)) / adapter.scaling_at(adapter.rank)
        return self.adapters.scalings[adapter.name] * own

    def scalings(self, level: float) -> tuple[float, ...]:
        """The scalings of all layers for clients of a level."""
        return tuple(self.scaling(adapter, level) for adapter in self.adapters.layers.values())

    def smaller_levels(self, clients: int) -> dict[str, float]:
        """The levels below 1 among the first ``clients`` clients, by name."""
        if not self._given:
            return {f"{level:g}": level for level in self.levels if level < 1}
        ranks = sorted({self._given.rank(client, self._largest) for client in range(clients)}, reverse=True)
        return {f"rank_{rank}": rank / self._largest for rank in ranks if rank < self._largest}

    def cut(self, tensors: Mapping[str, Tensor], level: float) -> dict[str, Tensor]:
        """A model in which the slots beyond the ranks of a level are zero."""
        factors = {
            parameter: padded_factor(adapter, name, self.slots(adapter, name, tensors[parameter], level))
            for parameter, (adapter, name) in self.adapters.factors.items()
        }
        return {**tensors, **factors}

    def slots(self, adapter: Adapter, name: Name, value: Tensor, level: float) -> Tensor:
        """The slots of a factor that clients of a level have."""
        return adapter.slots(name, value, self.rank(adapter, level))

    def initial_pairs(
        self, known: Mapping[str, Tensor], level: float, absorbing: Collection[Name]
    ) -> dict[str, LowRankPair]:
        """The pairs from which a client of a level starts, by layer, given the full values ``known``."""
        return {
            layer: adapter.pair(known, adapter.rank, self.adapters.scalings[layer]).resized(
                self.rank(adapter, level), self.scaling(adapter, level), absorbing
            )
            for layer, adapter in self.adapters.layers.items()
        }

    def check(self, clients: int) -> None:
        """Raise if a rank is too large or belongs to an unknown client.

        Raises:
            MisconfigurationException: If there are any.
        """
        if self._given:
            self._given.check(clients, self._largest)

    def limit(self, module: nn.Module, adapter: str | None) -> int:
        """The largest rank that a site may choose; 0 if sites may not choose."""
        if not self._operator.mixed_ranks or len(self.levels) > 1:
            return 0
        try:
            found = find_adapters(module, adapter)
        except ValueError:
            # `Algorithm.setup` raises the error with an explanation.
            return 0
        return max((each.rank for each in found.values()), default=0)

    def set_rank(self, client: int, rank: int) -> None:
        """Set the rank that a client's site chose.

        Raises:
            MisconfigurationException: If clients cannot have ranks of their own.
        """
        if not self._operator.mixed_ranks or len(self.levels) > 1:
            reason = f"levels={list(self.levels)}" if self._operator.mixed_ranks else f"{self._operator!r}"
            raise MisconfigurationException(
                f"rank={rank} was stated for client {client}, and with {reason} it cannot have a rank of its own: an"
                " operator for clients of different rank is needed, such as SumProduct(), and no levels."
            )
        self._given.stated[client] = rank


def padded_factor(adapter: Adapter, name: Name, value: Tensor, ratio: float = 1.0) -> Tensor:
    """A factor times ``ratio``, padded with zeros to the adapter's rank."""
    matrix = adapter.matrix(name, value)
    if ratio != 1:
        matrix = matrix * ratio
    return adapter.value(name, padded(matrix, adapter.rank, 1 if name == "B" else 0))


def with_further_slots(adapter: Adapter, name: Name, value: Tensor, other: Tensor) -> Tensor:
    """A factor with the slots of ``value``, followed by the slots of ``other`` that ``value`` lacks."""
    dim = 1 if name == "B" else 0
    matrix, rest = adapter.matrix(name, value), adapter.matrix(name, other).to(value)
    first = min(matrix.shape[dim], rest.shape[dim])
    return adapter.value(name, torch.cat([matrix, rest.narrow(dim, first, rest.shape[dim] - first)], dim=dim))


class ClientRanks:
    """The rank of each client: from a list in turns, a dictionary by id, or a function of the id.

    Clients that a dictionary does not name have the largest rank, that of the layers. The ranks that sites state for
    their clients, in ``stated``, take precedence.

    Example:
        >>> ranks = ClientRanks([8, 4, 4])
        >>> [ranks.rank(client, largest=8) for client in range(4)]
        [8, 4, 4, 8]
        >>> ranks.stated[3] = 2
        >>> ranks.rank(3, largest=8), ClientRanks({5: 2}).rank(0, largest=8)
        (2, 8)
    """

    def __init__(self, ranks: Ranks | None) -> None:
        is_list = isinstance(ranks, Sequence) and not isinstance(ranks, str)
        given = list(ranks.values()) if isinstance(ranks, Mapping) else list(ranks) if is_list else [1]  # type: ignore[arg-type]
        ids = list(ranks) if isinstance(ranks, Mapping) else []
        known = ranks is None or is_list or isinstance(ranks, Mapping) or callable(ranks)
        if not known or not given or not all(map(_is_rank, given)) or not all(_is_rank(each + 1) for each in ids):
            raise MisconfigurationException(
                "ranks must be a list of whole numbers of at least 1, such a number for each client id, or a function"
                f" of the id that returns one, but is {ranks!r}."
            )
        self.given = ranks
        self.stated: dict[int, int] = {}

    def __bool__(self) -> bool:
        return self.given is not None or bool(self.stated)

    def rank(self, client: int, largest: int) -> int:
        """A client's rank, at most ``largest``.

        Raises:
            MisconfigurationException: If it is no integer from 1 to ``largest``.
        """
        given = self.given
        if client in self.stated:
            found: object = self.stated[client]
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
        """Raise if a rank is too large or belongs to an unknown client.

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
