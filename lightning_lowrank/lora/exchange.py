"""The factors that `FedLoRA` exchanges in each round, and the stored values of factors that it does not send.

An operator may send different factors in different rounds. Then a client that missed rounds may lack changes of several
factors. So the server numbers the versions of each factor, and records which version each client was sent.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.aggregation import DistanceRule
from lightning_lowrank.federated.algorithm import detached
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, State
from lightning_lowrank.lora.adapters import FACTORS, Adapter, Name
from lightning_lowrank.lora.inputs import BOTH
from lightning_lowrank.lora.operator import Operator
from lightning_lowrank.lora.pairs import LowRankPair
from lightning_lowrank.lora.ranks import LayerRanks, with_further_slots
from lightning_lowrank.lora.robust import robust_weights

_LONGEST_PERIOD = 256


class FactorExchange:
    """Decides which factors cross the wire, and tracks which versions each client has.

    Args:
        operator: The operator, which defines the factors that are trained and sent in a round.
        ranks: The clients' ranks.
    """

    def __init__(self, operator: Operator, ranks: LayerRanks) -> None:
        self._operator, self._ranks = operator, ranks

    @functools.cached_property
    def alternates(self) -> bool:
        """Whether the sent factors differ between rounds, so that a client may lack the changes of several."""
        first = self._operator.sent_down(0)
        return any(self._operator.sent_down(number) != first for number in range(1, _LONGEST_PERIOD))

    @property
    def sends_values(self) -> bool:
        """Whether a client may send a factor that the round's broadcast leaves out."""
        up, down = self._operator.sent_up, self._operator.sent_down
        rounds = range(_LONGEST_PERIOD)
        return self.alternates and any(up(number) - down(max(number - 1, 0)) for number in rounds)

    # On the server

    def due(self, server: Server, client: int, level: float) -> set[str]:
        """The factors that a client must be sent in this round."""
        if not self.alternates:
            return set(self._operator.sent_down(server.round))
        sent = server.state.get("sent_versions", {}).get(client, {})
        due = set()
        for name, version in self._versions(server).items():
            # A client whose level has risen needs more slots than it was sent before.
            last, slots = sent.get(name, (-1, 1.0))
            if version > last or level > slots:
                due.add(name)
        return due

    def parts(self, client: ClientInfo, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Split a client's message into factors (with their slots) and other tensors.

        Raises:
            ValueError: If a factor is not finite.
        """
        adapters = self._ranks.adapters
        factors: dict[str, Tensor] = {}
        rest: dict[str, Tensor] = {}
        for name, value in tensors.items():
            is_factor = name in adapters.factors
            if is_factor and not value.isfinite().all():
                raise ValueError(
                    f"client {client.id} sent {name} with numbers that are not finite in round {client.round}: its"
                    " training diverged; lower the learning rate or clip gradients."
                )
            (factors if is_factor or name.removesuffix(".slots") in adapters.layers else rest)[name] = value
        return factors, rest

    def answered(self, server: Server, client: int, level: float) -> None:
        """Record the versions of the factors that a client was sent."""
        if self.alternates:
            versions = self._versions(server)
            sent = server.state.setdefault("sent_versions", {}).setdefault(client, {})
            sent.update({name: (versions[name], level) for name in self.due(server, client, level)})

    def forget(self, server: Server, client: int) -> None:
        """Forget the versions that a client has, so that it is sent all factors again."""
        server.state.get("sent_versions", {}).pop(client, None)

    def changed(self, server: Server) -> None:
        """Update the versions of the factors that a round changed.

        Raises:
            MisconfigurationException: If the operator never sent these in its first rounds.
        """
        down = self._operator.sent_down(server.round)
        if self.alternates:
            changed = dict.fromkeys(down, server.round + 1)
            server.state["versions"] = {**self._versions(server), **changed}
        elif down != self._operator.sent_down(0):
            raise MisconfigurationException(
                f"{self._operator!r} sends {sorted(down)} after round {server.round}, and after each of the first"
                f" {_LONGEST_PERIOD} rounds {sorted(self._operator.sent_down(0))}: let it change in one of those too."
            )

    def _versions(self, server: Server) -> dict[str, int]:
        """For each factor, the number of the round after its last change; -1 if all clients have it from the start."""
        down = self._operator.sent_down(0)
        first = {name: 0 if name in down else -1 for name in FACTORS}
        return server.state.get("versions", first)

    def global_values(self, server: Server, client: int) -> dict[str, Tensor]:
        """The global values, with the factors or slots that the server stores for this client."""
        own = server.state.get("pairs", {}).get(client, {})
        if self._ranks.drawn:
            factors = self._ranks.adapters.factors
            own = {name: with_further_slots(*factors[name], value, server.model[name]) for name, value in own.items()}
        return {**server.model, **own}

    def store_pair(self, server: Server, client: int, adapter: Adapter, pair: LowRankPair) -> None:
        """Store a client's own pair; if its rank was drawn, without slots that the client has never had."""
        own = server.state.setdefault("pairs", {}).setdefault(client, {})
        scaling, absorbing = self._ranks.adapters.scalings[adapter.name], self._operator.absorbing(server.round)
        tensors = adapter.tensors(pair, scaling, absorbing)
        for name, parameter in adapter.parameters.items() if self._ranks.drawn else ():
            slots = adapter.slots(name, tensors[parameter], pair.rank)
            tensors[parameter] = with_further_slots(adapter, name, slots, own.get(parameter, slots))
        own.update(tensors)

    def completed_pairs(self, server: Server, client: int, arrival: State) -> dict[str, LowRankPair]:
        """A client's pairs by layer: the factors that it sent, completed by those from which it started."""
        pairs = {}
        started = self._ranks.initial_pairs(
            self.global_values(server, client), arrival["level"], self._operator.absorbing(server.round)
        )
        for layer, adapter in self._ranks.adapters.layers.items():
            before = started[layer]
            factors = {"B": before.B, "A": before.A}
            slots = arrival["factors"].get(f"{layer}.slots")
            for name in FACTORS:
                parameter = adapter.parameters[name]
                if parameter not in arrival["factors"]:
                    continue
                matrix = adapter.matrix(name, arrival["factors"][parameter])
                if slots is None:
                    factors[name] = matrix
                else:
                    factors[name].index_copy_(1 if name == "B" else 0, slots.long(), matrix)
            pairs[layer] = LowRankPair(factors["B"], factors["A"], before.scaling)
        return pairs

    def weights(self, server: Server) -> dict[int, float]:
        """The clients' weights: their own, or those that a robust rule derives from their products."""
        arrivals, rule = server.state["arrivals"], server.aggregator
        if not isinstance(rule, DistanceRule):
            return {client: arrival["weight"] for client, arrival in arrivals.items()}
        # In the order in which the rule received the rest of the messages.
        pairs = [self.completed_pairs(server, client, arrival) for client, arrival in arrivals.items()]
        levels, absorbing = [each["level"] for each in arrivals.values()], self._operator.absorbing(server.round)
        starts = {each: self._ranks.initial_pairs(server.model, each, absorbing) for each in dict.fromkeys(levels)}
        return dict(zip(arrivals, robust_weights(rule, pairs, levels, starts), strict=True))

    # On a client

    def remember(self, base: Base, trained: Mapping[str, Tensor], kept: Collection[str]) -> None:
        """Save initial values that clients are never sent: of factors, and of the parameters that stay with clients."""
        down = BOTH if self._operator.redraws else self._operator.sent_down(0)
        known = {parameter for parameter, (_, name) in self._ranks.adapters.factors.items() if name not in down}
        base.state["initial"] = detached({name: trained[name] for name in known | {*kept}})

    def received(self, client: ClientContext, came: Mapping[str, Tensor]) -> None:
        """Save the received factors, because later rounds may leave them out."""
        if self.alternates:
            client.state.setdefault("received", {}).update(detached(came))

    @staticmethod
    def client_values(client: ClientContext) -> dict[str, Tensor]:
        """A client's values before the message: initial or drawn ones, overridden by received ones and its own."""
        shared, own = client.base.state, client.state
        drawn, received, personal = shared.get("factors", {}), own.get("received", {}), own.get("personal", {})
        return {**shared["initial"], **drawn, **received, **personal}

    def own_factor(self, adapter: Adapter, name: Name, value: Tensor, level: float, round_number: int) -> Tensor:
        """A factor with which a client of a level starts: its slots of ``value``, in the scaling of its own rank.

        ``value`` has the scaling of the full rank.
        """
        value, absorbing = self._ranks.slots(adapter, name, value, level), self._operator.absorbing(round_number)
        ratio = self._ranks.adapters.scalings[adapter.name] / self._ranks.scaling(adapter, level)
        return value * ratio ** (1 / len(absorbing)) if name in absorbing and ratio != 1 else value

    def from_own(self, adapter: Adapter, name: Name, round_number: int) -> float:
        """The factor that converts a LoRA factor from the client's own scaling to that of the full rank."""
        absorbing = self._operator.absorbing(round_number)
        ratio = adapter.scaling / self._ranks.adapters.scalings[adapter.name]
        return ratio ** (1 / len(absorbing)) if name in absorbing else 1.0
