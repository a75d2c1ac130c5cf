"""What a federated method is: what it does at each point of a round.

`FederatedLoop` calls these methods; a published method overrides the points where it differs from federated
averaging, in one short file under ``lightning_lowrank/algorithms``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_lowrank.federated.client import Client, Server
from lightning_lowrank.federated.payload import Payload


class Algorithm:
    """One federated method. The base class is federated averaging in its plainest reading.

    The order of calls in a round: `begin_round` once; for each client `broadcast`, `begin`, the client's own training
    steps, `end`, `receive`; then `aggregate`. Between rounds the module holds `global_state`.

    A client's live values come as ``model``: the module's trained parameters and persistent buffers by name, which
    `begin` writes in place. Frozen parameters (``requires_grad=False``) are the same on every side and never sent.
    """

    def setup(self, server: Server) -> None:
        """Check that the module suits the method, and draw what it needs. Called once, before the first round.

        Raises:
            MisconfigurationException: If the method cannot work on this module.
        """

    def begin_round(self, server: Server) -> None:
        """Prepare what all of the round's clients share."""

    def broadcast(self, server: Server, client: Client) -> Payload:
        """Return what ``client`` is sent."""
        return Payload(server.sent_down())

    def every_client_listens(self, server: Server) -> bool:
        """Return whether clients that sit this round out must hear its broadcast all the same.

        They must where it changes what every side holds. The ledger enters those bytes as ``comm/idle_down_bytes``.
        """
        return False

    def begin(self, server: Server, client: Client, payload: Payload, model: Mapping[str, Tensor]) -> None:
        """Install what ``client`` received into its live ``model``, in place."""
        install(payload.tensors, model)

    def end(self, server: Server, client: Client, model: Mapping[str, Tensor]) -> Payload:
        """Return what ``client`` sends when its training is over."""
        return Payload(server.sent_up(model))

    def receive(self, server: Server, client: Client, payload: Payload, weight: float) -> None:
        """Take in what ``client`` sent; ``weight`` is its share before normalisation."""
        server.mean.add(payload.tensors, weight)

    def aggregate(self, server: Server) -> None:
        """Fold the round's arrivals into ``server.state``. Called once a round, after at least one arrival."""
        server.state.update(server.mean.result())

    def global_state(self, server: Server) -> Mapping[str, Tensor]:
        """Return what validation, checkpoints and export see."""
        return server.state


@torch.no_grad()
def install(values: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the live tensors of the same names."""
    if values:
        torch._foreach_copy_([model[name] for name in values], list(values.values()))
