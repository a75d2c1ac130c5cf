"""FedMUD: clients learn a low-rank *change* to a frozen weight; server and clients fold it into the weight."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.configuration import check_integer
from lightning_lowrank.federated.algorithm import Claims, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import ChangesBase
from lightning_lowrank.federated.state import Base, ClientContext, Server, copy_into
from lightning_lowrank.layers import LowRankLayer, low_rank_layers
from lightning_lowrank.seeding import derive_seed


class FedMUD(ChangesBase):
    r"""Federated learning with model update decomposition (Li et al., ICML 2025, Section 3.1, Eqs. 3-4).

    Put ``LowRank(..., role="update")`` before the loop. Its choices give the paper's variants: ``BlockKronecker`` is
    +BKD, ``decouple=True`` is +AAD, ``half_frozen=True`` is +F.

    Between two resets the factors are trained and averaged like any parameter. Every ``reset_interval`` rounds,
    :math:`W \leftarrow W + f(\bar U, \bar V)` at server and clients, and the factors are drawn again. The weights
    accumulate low-rank changes, so their own rank is not limited. Of weights of 16 bits, a copy is kept in single
    precision, which takes 4 more bytes for each number. In the round after a reset the server sends the averaged
    factors, from which a client computes that change, and the seed. Clients outside the cohort need that broadcast
    too. As in the paper, ``comm/down_bytes`` counts the cohort only; the bytes for the other clients are logged as
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
        check_integer("reset_interval", reset_interval)
        self.reset_interval = reset_interval
        self.claims = Claims(trained_set_may_change=True, averages_over_rounds=bool(reset_interval == 1))
        self._layers: dict[str, LowRankLayer] = {}
        self._factors: dict[str, None] = {}

    def setup(self, base: Base) -> None:
        self._layers = {
            name: layer for name, layer in low_rank_layers(base.module, tied=False) if layer.role == "update"
        }
        if not self._layers:
            raise MisconfigurationException(
                "FedMUD trains low-rank changes to frozen weights, and the module has no low-rank layer of role"
                " 'update': put LowRank(..., role='update') before FederatedLoop in `callbacks`, or give a recipe the"
                " section lowrank."
            )
        self._factors = dict.fromkeys(
            f"{name}.factors.{factor}" for name, layer in self._layers.items() for factor in layer.factors
        )

    @torch.no_grad()
    def update_base(self, base: Base, message: Mapping[str, Tensor]) -> None:
        """At a reset, fold the averaged change into the frozen weights, and draw the factors again."""
        if "seed" not in message:
            return
        drawn: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            names = {factor: f"{name}.factors.{factor}" for factor in layer.factors}
            if not message.keys() >= {*names.values()}:
                # The layer's factors are not trained in this round.
                continue
            averaged = {factor: message[key] for factor, key in names.items()}
            layer.fold(averaged, partial(base.fold, name))
            layer.reset_factors(derive_seed(int(message["seed"]), name))
            drawn |= {f"{name}.factors.{factor}": value for factor, value in layer.factors.items()}
        base.state["factors"] = detached(drawn)

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The values that training starts from: the received tensors, and after a reset the redrawn factors."""
        return {**received, **base.state["factors"]} if "seed" in received else received

    def drawn_in(self, name: str, round_number: int) -> int:
        """For factors, the first round after their last reset; 0 for all other tensors."""
        return round_number - round_number % self.reset_interval if name in self._factors else 0

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Average the clients' models; at a reset, announce the averaged factors and the seed of the new ones."""
        super().aggregate(server)
        if (server.round + 1) % self.reset_interval:
            return
        names = [name for name in self._factors if name in server.model]
        seed = torch.tensor(derive_seed(server.seed, "factors", server.round + 1))
        self.announce(server, {"seed": seed, **{name: server.model[name] for name in names}})
        server.model.update(server.base.state["factors"])

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the received tensors, and after a reset the redrawn factors."""
        start = dict(self.reference(client.base, message.tensors))
        copy_into(client.model, {name: value for name, value in start.items() if name in client.model})
