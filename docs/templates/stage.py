"""The norm of each client's update (template).

A stage is one file in ``lightning_lowrank/federated``. It sees what the server sends and receives in each round, beside
the method. Its hooks are those of `RoundStage`, and it needs only the ones that it overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_lowrank.federated import Arrival, RoundStage, Server


class UpdateNorms(RoundStage):
    """Log the Euclidean norm of each client's update, as ``norm/<client>``."""

    def begin_round(self, server: Server) -> None:
        """Forget the last round's norms."""
        self._norms: dict[int, float] = {}

    def arrived(self, arrival: Arrival) -> Arrival:
        """Take note of the norm, and pass the arrival on as it is."""
        norms = [torch.linalg.vector_norm(value.double()) for value in arrival.update().values()]
        self._norms[arrival.client.id] = torch.stack(norms).norm().item()
        return arrival

    def figures(self) -> dict[str, float]:
        """The round's norms."""
        return {f"norm/{client}": norm for client, norm in sorted(self._norms.items())}

    # For runs that are resumed inside a round.

    def state_dict(self) -> dict[str, Any]:
        """The norms so far."""
        return {"norms": dict(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with these norms."""
        self._norms = dict(state["norms"])
