"""Selection of the rank slots that a client uploads, for operators that select (LoRA-A²)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.federated.algorithm import detached
from lightning_lowrank.federated.state import ClientContext
from lightning_lowrank.lora.adapters import Adapter, Name
from lightning_lowrank.lora.operator import Operator
from lightning_lowrank.lora.ranks import LayerRanks


class UploadSlots:
    """Selects and checks the rank slots that clients upload.

    Args:
        operator: The operator, whose ``select_ranks`` chooses the slots.
        upload_ranks: How many slots, over all layers, a client uploads; several numbers are assigned in turns.
            ``None``: all slots.
        ranks: The clients' ranks.

    Raises:
        MisconfigurationException: If a number is below 1, or the operator does not choose.
    """

    def __init__(self, operator: Operator, upload_ranks: int | Sequence[int] | None, ranks: LayerRanks) -> None:
        self._operator, self._ranks = operator, ranks
        self.budgets = [upload_ranks] if isinstance(upload_ranks, (int, Integral)) else list(upload_ranks or ())
        if upload_ranks is not None and (
            not operator.selects or not self.budgets or not all(budget >= 1 for budget in self.budgets)
        ):
            raise MisconfigurationException(
                f"upload_ranks must be one number of at least 1, or several, and needs the operator LoRAA2(), but is"
                f" {upload_ranks!r} with {operator!r}."
            )

    def begin(self, client: ClientContext) -> None:
        """Save the factors with which a client starts, for comparison with the trained ones."""
        if self.budgets:
            factors = self._ranks.adapters.factors
            client.round_state["received"] = detached({name: client.model[name] for name in factors})

    def selected(self, client: ClientContext) -> dict[str, Tensor]:
        """The slots that a client uploads, by layer; empty if it uploads all."""
        if not self.budgets:
            return {}
        level = self._ranks.level(client)
        trained, received = (
            {
                layer: adapter.pair(tensors, self._ranks.rank(adapter, level), adapter.scaling)
                for layer, adapter in self._ranks.adapters.layers.items()
            }
            for tensors in (client.model, client.round_state["received"])
        )
        budget = self.budgets[client.id % len(self.budgets)]
        return self._operator.select_ranks(trained, received, budget, client.round)

    @staticmethod
    def sent(adapter: Adapter, name: Name, value: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """The selected slots of a factor, and their numbers, as in a client's message."""
        matrix = adapter.matrix(name, value).index_select(1 if name == "B" else 0, slots)
        return {
            f"{adapter.name}.slots": slots.to(torch.int32),
            adapter.parameters[name]: adapter.value(name, matrix),
        }

    def limits(self, adapter: Adapter, name: Name, value: Tensor) -> dict[str, tuple[int, ...]]:
        """The largest allowed shapes of the tensors of `sent`; empty if clients upload all slots."""
        if not self.budgets:
            return {}
        rank = adapter.matrix(name, value).shape[1 if name == "B" else 0]
        return {f"{adapter.name}.slots": (rank,), adapter.parameters[name]: tuple(value.shape)}

    def check(self, client: int, level: float, factors: Mapping[str, Tensor]) -> None:
        """Raise if a client's selected slots are invalid.

        Raises:
            ValueError: If they are out of range, or not in ascending order.
        """
        for parameter, (adapter, name) in self._ranks.adapters.factors.items():
            slots = factors.get(f"{adapter.name}.slots")
            if slots is None or parameter not in factors:
                continue
            rank = self._ranks.rank(adapter, level)
            chosen = [-1, *slots.tolist(), rank]
            columns = adapter.matrix(name, factors[parameter]).shape[1 if name == "B" else 0]
            if columns != len(slots) or any(slot >= after for slot, after in pairwise(chosen)):
                raise ValueError(
                    f"client {client} sent {columns} slots of {parameter} as {slots.tolist()}: they must be"
                    f" ascending numbers from 0 to {rank - 1}."
                )
