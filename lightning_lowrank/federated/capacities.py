"""The capacity level of each client, for methods whose clients differ in capacity: fixed, or drawn in each round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.configuration import check_choice
from lightning_lowrank.federated.state import ClientContext, ClientInfo
from lightning_lowrank.seeding import generator

Capacity = Literal["fixed", "dynamic"]


class Capacities:
    """The capacity level of each client: fixed, or drawn in each round. Error messages call the levels ``name``.

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
        """A client's level in the round ``client.round``; server and client compute the same."""
        if self.capacity == "fixed":
            return self.fixed_level(client.id)
        draws = generator(client.seed, "capacity", client.round, client.id)
        return self.levels[int(torch.multinomial(torch.tensor(self.shares), 1, generator=draws))]

    def always(self, client: ClientInfo, level: float) -> bool:
        """Whether a client has this level in every round."""
        return (self.capacity == "fixed" or len(self.levels) == 1) and self.level(client) == level

    def fixed_level(self, client: int) -> float:
        """A client's level by its id, if levels are fixed."""
        while len(self._turns) <= client:
            self._credit = [credit + share for credit, share in zip(self._credit, self.shares, strict=True)]
            # Rounding, so that floating-point noise does not decide between levels with equal credit.
            turn = max(range(len(self.levels)), key=lambda index: (round(self._credit[index], 9), -index))
            self._credit[turn] -= 1
            self._turns.append(turn)
        return self.levels[self._turns[client]]


def refuse_kept_moments(client: ClientContext, reason: str) -> None:
    """Raise if a client kept optimizer state from an earlier round, in which it trained another part of the model."""
    if "optimizers" in client.state:
        raise MisconfigurationException(f"optimizer_state='keep' is not possible: {reason}. Use 'reset'.")
