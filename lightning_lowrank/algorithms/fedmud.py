"""FedMUD: clients learn a low-rank *change* to a frozen weight, which every side folds into the weight.

Between two resets the factors are trained and averaged like any parameter. At a reset the averaged change is added to
the frozen weight, on the server and on every client, and the factors start anew from draws of a seed that the server
sends: the weights accumulate one low-rank change after another, and their own rank is not limited.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.federated.algorithm import Algorithm, install
from lightning_lowrank.federated.client import Client, Server
from lightning_lowrank.federated.payload import Payload
from lightning_lowrank.layers import LowRankLayer, low_rank_layers
from lightning_lowrank.seeding import derive_seed


class FedMUD(Algorithm):
    r"""Federated learning with model update decomposition (Li et al., ICML 2025, Section 3.1, Eqs. 3-4).

    Put ``LowRank(..., role="update")`` before the loop. Its choices give the paper's variants: ``BlockKronecker`` is
    +BKD, ``decouple=True`` is +AAD, ``half_frozen=True`` is +F.

    Every ``reset_interval`` rounds, :math:`W \leftarrow W + f(\bar U, \bar V)` on every side and the factors are drawn
    again. What a client is sent in the round after a reset is the averaged factors, from which it computes that change
    itself, and the seed. A client that sits a round out needs that broadcast too, or its :math:`W` falls behind:
    the paper counts only the clients that take part, and so does ``comm/down_bytes``; the others' share is logged as
    ``comm/idle_down_bytes``.

    Args:
        reset_interval: Rounds between resets (the paper's :math:`s`), 1 or more. 1, the paper's default, folds the
            change in after every round.

    Raises:
        MisconfigurationException: If ``reset_interval`` is below 1, or the module has no low-rank layer of role
            ``update``.

    Example:
        >>> from lightning_lowrank import BlockKronecker, Dirichlet, FederatedLoop, FedMUD, LowRank
        >>> callbacks = [
        ...     LowRank(BlockKronecker(), budget=1 / 32, role="update", decouple=True, skip=["first", "last"]),
        ...     FederatedLoop(FedMUD(), clients=100, clients_per_round=10, partition=Dirichlet(0.3)),
        ... ]
    """

    def __init__(self, reset_interval: int = 1) -> None:
        if reset_interval < 1:
            raise MisconfigurationException(f"reset_interval must be 1 or more, got {reset_interval}")
        self.reset_interval = reset_interval
        self._layers: dict[str, LowRankLayer] = {}

    def setup(self, server: Server) -> None:
        """Find the low-rank layers whose factors are a change to a frozen weight."""
        self._layers = {
            name: layer for name, layer in low_rank_layers(server.module, tied=False) if layer.role == "update"
        }
        if not self._layers:
            raise MisconfigurationException(
                "FedMUD trains low-rank changes to frozen weights, and the module has no low-rank layer of role"
                " 'update': put LowRank(..., role='update') before FederatedLoop in `callbacks`."
            )

    def broadcast(self, server: Server, client: Client) -> Payload:
        """Return the trained values; after a reset, the factors as they were averaged, and the seed of the new ones."""
        return Payload({**server.sent_down(), **server.memory.get("reset", {})})

    def every_client_listens(self, server: Server) -> bool:
        """After a reset, every side folds the change into its frozen weights."""
        return "reset" in server.memory

    def begin(self, server: Server, client: Client, payload: Payload, model: Mapping[str, Tensor]) -> None:
        """Install the received values, and the redrawn factors where a reset came before this round."""
        reset = server.memory.get("reset", {})
        install({name: value for name, value in payload.tensors.items() if name not in reset}, model)
        install({name: server.state[name] for name in reset if name != "seed"}, model)

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Average what came up; at a reset, fold the change into the frozen weights and draw the factors again."""
        super().aggregate(server)
        server.memory.pop("reset", None)
        if (server.round + 1) % self.reset_interval:
            return
        seed = torch.tensor(derive_seed(server.seed, "factors", server.round + 1))
        self.reset(server, {"seed": seed, **server.state})

    @torch.no_grad()
    def reset(self, server: Server, sent: Mapping[str, Tensor]) -> None:
        """Fold the change into the frozen weights and draw the factors again: what every side does at a reset.

        Args:
            server: What this side holds of the server.
            sent: The factors as they were averaged, by name, and ``seed``, from which the new ones are drawn.
        """
        seed = int(sent["seed"])
        reset = {"seed": sent["seed"]}
        for name, layer in self._layers.items():
            averaged = {factor: sent[f"{name}.factors.{factor}"] for factor in layer.factors}
            layer.fold(averaged)
            layer.reset_factors(derive_seed(seed, name))
            for factor, value in averaged.items():
                reset[f"{name}.factors.{factor}"] = value
                server.state[f"{name}.factors.{factor}"] = layer.factors[factor].detach().clone()
        server.memory["reset"] = reset
