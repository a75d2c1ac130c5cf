r"""FedLoRA: federated fine-tuning with LoRA, by any aggregation-broadcast operator.

Clients train the adapters :math:`B_i, A_i` of a frozen model, and the server combines them. How it does that, and what
each client receives, is the operator's choice (`lightning_lowrank.aggregation`); this file has what is common: which
factors are trained and cross the wire in which round, clients of different rank, what stays with a client, and the
base weight where an operator changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.aggregation import Broadcast, LoRAA2, LowRankPair, Operator, ZeroPadding
from lightning_lowrank.aggregation.adapters import Adapter, find_adapters
from lightning_lowrank.aggregation.pairs import padded
from lightning_lowrank.algorithms._capacity import Capacities, Capacity
from lightning_lowrank.federated.algorithm import Algorithm, LocalStep, install
from lightning_lowrank.federated.client import Client, Server
from lightning_lowrank.federated.payload import Payload
from lightning_lowrank.patterns import check_patterns, matches
from lightning_lowrank.seeding import derive_seed

__all__ = ["AggregatedRound", "FedLoRA"]

Name = Literal["B", "A"]
_NAMES: tuple[Name, Name] = ("B", "A")


@dataclass(frozen=True)
class AggregatedRound:
    """What went into one round's aggregation and what came out, for those who measure it.

    Args:
        round: Number of the round, from 0.
        pairs: For each client its pairs by layer, after its training.
        weights: The clients' weights.
        broadcasts: What the operator made of them, by layer.
    """

    round: int
    pairs: Sequence[Mapping[str, LowRankPair]]
    weights: Sequence[float]
    broadcasts: Mapping[str, Broadcast]


class FedLoRA(Algorithm):
    r"""Federated LoRA with a given aggregation-broadcast operator (Chen et al., ABO, Algorithms 1 and 2).

    Put ``LowRank(MatrixProduct(), rank=8, alpha=16, init="lora", freeze_rest=True)`` before the loop, or give the
    trainer a module that holds a model which PEFT wrapped. Whatever else is trained, such as a classification head and
    biases, is averaged as `FedAvg` does, or stays with each client (``keep``).

    Up go the factors that the operator asks for: both for most, the trained one for ``FFA``, ``RoLoRA`` and ``CoLR``,
    :math:`A` alone for ``FedSA``, whose :math:`B` stays with its client. Down go those that have changed since the
    client last heard from the server. Operators that change the base weight (``FLoRA``, ``FedEx``, ``CoLR``) send the
    factors of that change to every client, also to those that sit the round out, whose share is logged as
    ``comm/idle_down_bytes``; factors that are drawn anew cost nothing, for both sides have the seed.

    With ``levels`` clients have different ranks: the same share of each layer's rank, at least 1. A client's scaling is
    that of its own rank, :math:`\alpha / r_i`. The global model is that of the largest rank; those that clients of the
    other levels have are evaluated beside it.

    Args:
        operator: How factors are combined, such as ``ProductSum()`` or ``SumProduct()``.
        levels: Shares of each layer's rank, in (0, 1], the largest 1.
        capacity: ``"fixed"``: a client has one level for good, clients taking turns in the order of their ids.
            ``"dynamic"``: each client's level is drawn in each round.
        shares: Relative number of clients of each level, or its chance to be drawn; equal by default.
        keep: Patterns of names of trained parameters outside the adapters that stay with each client.
        upload_ranks: For ``LoRAA2``: how many rank slots, over all layers, a client uploads, those that its training
            has changed most. Several numbers are for clients in turn, in the order of their ids. ``None``: all slots.
        adapter: Which of PEFT's adapters is trained; by default the active one.

    Raises:
        MisconfigurationException: If an argument is out of range, the module has no LoRA adapters, or the operator
            does not suit them: clients of different rank where it needs equal ones, or a frozen factor that is zero.
        ValueError: In a round, if a client sends factors that are not finite; the server's state stays as it was.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, FedLoRA, LowRank, MatrixProduct, SumProduct
        >>> callbacks = [
        ...     LowRank(MatrixProduct(), rank=8, alpha=16, init="lora", freeze_rest=True),
        ...     FederatedLoop(FedLoRA(SumProduct()), clients=10, partition=Dirichlet(0.5), local_steps=10),
        ... ]
    """

    def __init__(
        self,
        operator: Operator,
        levels: Sequence[float] = (1.0,),
        capacity: Capacity = "fixed",
        shares: Sequence[float] | None = None,
        keep: Sequence[str] = (),
        upload_ranks: int | Sequence[int] | None = None,
        adapter: str | None = None,
    ) -> None:
        if not isinstance(operator, Operator):
            raise MisconfigurationException(
                f"operator must be an aggregation-broadcast operator such as ProductSum(), got {operator!r}."
            )
        self._capacities = Capacities("levels", levels, capacity, shares)
        if not all(0 < level <= 1 for level in levels) or max(levels) != 1:
            raise MisconfigurationException(
                f"levels must be shares of the layers' rank, above 0 and at most 1, the largest 1, got {list(levels)}."
            )
        if len(levels) > 1 and not operator.mixed_ranks:
            raise MisconfigurationException(
                f"{operator!r} needs clients of one rank, and levels={list(levels)} gives them several: use RBLA() or"
                " ZeroPadding() for the means of factors, or SumProduct()."
            )
        if isinstance(operator, ZeroPadding) and operator.pruning is not None:
            raise MisconfigurationException(
                f"FedLoRA does not cut ranks during a run, and the operator is {operator!r}: use ZeroPadding()."
            )
        if isinstance(keep, str):
            raise MisconfigurationException(f"keep must be a list of patterns, got {keep!r}.")
        budgets = [upload_ranks] if isinstance(upload_ranks, int) else list(upload_ranks or ())
        if upload_ranks is not None and (
            not isinstance(operator, LoRAA2) or not budgets or not all(budget >= 1 for budget in budgets)
        ):
            raise MisconfigurationException(
                f"upload_ranks is one number of at least 1, or several, and for the operator LoRAA2() alone, got"
                f" {upload_ranks!r} with {operator!r}."
            )
        self.operator = operator
        self.upload_ranks = budgets
        self.levels = tuple(levels)
        self.keep = list(keep)
        self.adapter = adapter
        self.observers: list[Callable[[AggregatedRound], None]] = []
        self._adapters: dict[str, Adapter] = {}
        self._scalings: dict[str, float] = {}
        self._factors: dict[str, tuple[Adapter, Name]] = {}
        self._kept: set[str] = set()

    def setup(self, server: Server) -> None:
        """Find the adapters, and what stays with the clients."""
        try:
            self._adapters = find_adapters(server.module, self.adapter)
        except ValueError as error:
            raise MisconfigurationException(f"FedLoRA: {error}") from error
        if not self._adapters:
            raise MisconfigurationException(
                "FedLoRA trains LoRA adapters, and the module has none: put LowRank(MatrixProduct(), rank=8,"
                " init='lora') before FederatedLoop in `callbacks`, or wrap its model with PEFT."
            )
        self._scalings = {layer: adapter.scaling for layer, adapter in self._adapters.items()}
        self._factors = {
            adapter.parameters[name]: (adapter, name) for adapter in self._adapters.values() for name in _NAMES
        }
        trained = {name: value for name, value in server.module.named_parameters() if value.requires_grad}
        frozen = sorted(self._factors.keys() - trained.keys())
        if frozen:
            raise MisconfigurationException(
                f"FedLoRA: {frozen[0]} does not require a gradient: leave both factors trainable, and let the operator"
                " say which are trained."
            )
        others = [name for name in trained if name not in self._factors]
        try:
            check_patterns("keep", self.keep, others, "trained parameter outside the adapters")
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error
        self._kept = {name for name in others if any(matches(pattern, name) for pattern in self.keep)}
        for adapter in self._adapters.values():
            if self.operator.changes_base and adapter.unfoldable:
                raise MisconfigurationException(
                    f"{self.operator!r} changes base weights, and layer {adapter.name!r} cannot take such a change:"
                    f" {adapter.unfoldable}. Leave the layer out, or use an operator such as SumProduct()."
                )
            for name in _NAMES:
                still = name not in self.operator.trained(0) and not self.operator.redraws
                if still and not trained[adapter.parameters[name]].any():
                    raise MisconfigurationException(
                        f"{self.operator!r} trains only one factor in the first round, and the other one of layer"
                        f" {adapter.name!r}, {name}, is zero, so that nothing would ever change: LowRank(init='lora')"
                        " starts B at zero and A at random."
                    )

    @torch.no_grad()
    def begin_round(self, server: Server) -> None:
        """Where rounds begin with drawn factors, draw those of the first one."""
        if not self.operator.redraws or "change" in server.memory:
            return
        server.memory["change"] = {}
        for layer, adapter in self._adapters.items():
            own = self._server_pair(server, adapter)
            if own.product().any():
                adapter.fold(own)
            drawn = self.operator.fresh(
                adapter.shape,
                adapter.rank,
                scaling=own.scaling,
                seed=derive_seed(self._seed(server), layer),
                dtype=own.B.dtype,
                device=own.B.device,
            )
            server.state.update(adapter.tensors(drawn, own.scaling))

    def kind(self, server: Server, client: Client, round_number: int) -> Hashable:
        """Clients step together whose adapters have the same scalings, of whatever rank."""
        if len(self.levels) == 1:
            return None
        level = self._capacities.level(server, client, round_number)
        return tuple(self._scaling(adapter, level) for adapter in self._adapters.values())

    def configure(self, server: Server, client: Client | None) -> None:
        """Set the scalings to those of the client's ranks."""
        level = 1.0 if client is None else self._capacities.level(server, client)
        for adapter in self._adapters.values():
            adapter.scaling = self._scaling(adapter, level)

    def broadcast(self, server: Server, client: Client) -> Payload:
        """Return what the client lacks of the global model: factors of its own rank, and the rest of the model."""
        level = self._capacities.level(server, client)
        known = self._known_of(server, client.id)
        down, due = server.sent_down(), self._due(server, client)
        sent = {name: down[name] for name in down if name not in self._factors and name not in self._kept}
        for parameter, (adapter, name) in self._factors.items():
            if name in due:
                sent[parameter] = adapter.slots(name, known[parameter], self._rank(adapter, level))
        return Payload({**sent, **server.memory.get("change", {})})

    def every_client_listens(self, server: Server) -> bool:
        """A change of the base weight is every client's."""
        return bool(server.memory.get("change"))

    def begin(self, server: Server, client: Client, payload: Payload, model: Mapping[str, Tensor]) -> None:
        """Install what came, and what the client has: slots beyond its rank are zero."""
        change = server.memory.get("change", {})
        values = {name: value for name, value in payload.tensors.items() if name not in change}
        level = self._capacities.level(server, client)
        known = {**server.state, **client.memory.get("personal", {})}
        for parameter, (adapter, name) in self._factors.items():
            rank = self._rank(adapter, level)
            value = values[parameter] if parameter in values else adapter.slots(name, known[parameter], rank)
            # What the server and the client itself hold is for the scaling of the full rank.
            values[parameter] = self._padded(adapter, name, value, self._scalings[adapter.name] / adapter.scaling)
        values.update({name: known[name] for name in self._kept})
        install(values, model)
        if self._alternates:
            client.memory["heard"] = server.round
        if self.upload_ranks:
            client.workspace = {
                "received": {parameter: model[parameter].detach().clone() for parameter in self._factors}
            }

    def before_step(self, server: Server, step: LocalStep) -> None:
        """Drop the gradients of factors that this round does not train."""
        trained = self.operator.trained(server.round)
        for parameter, (_, name) in self._factors.items():
            if name not in trained:
                step.parameters[parameter].grad = None

    def end(self, server: Server, client: Client, model: Mapping[str, Tensor]) -> Payload:
        """Return the factors that the operator asks for and the rest; keep what stays with the client."""
        level = self._capacities.level(server, client)
        sent = {name: value for name, value in server.sent_up(model).items() if name not in self._factors}
        personal = {name: sent.pop(name).detach().clone() for name in sorted(self._kept)}
        up = self.operator.sent_up(server.round)
        selected = self._selected(server, client, model)
        for parameter, (adapter, name) in self._factors.items():
            if name in up:
                value = adapter.slots(name, model[parameter], self._rank(adapter, level))
                if adapter.name in selected:
                    matrix, slots = adapter.matrix(name, value), selected[adapter.name]
                    value = adapter.value(name, matrix.index_select(1 if name == "B" else 0, slots))
                    sent[f"{adapter.name}.slots"] = slots.to(torch.int32)
                sent[parameter] = value
            elif name in self.operator.trained(server.round):
                ratio = adapter.scaling / self._scalings[adapter.name]
                personal[parameter] = self._padded(adapter, name, model[parameter], ratio).clone()
        if personal:
            client.memory["personal"] = personal
        return Payload(sent)

    def receive(self, server: Server, client: Client, payload: Payload, weight: float) -> None:
        """Hold the factors until all are there; take the rest into the mean.

        Raises:
            ValueError: If a factor is not finite.
        """
        factors: dict[str, Tensor] = {}
        rest: dict[str, Tensor] = {}
        for name, value in payload.tensors.items():
            is_factor = name in self._factors
            if is_factor and not value.isfinite().all():
                raise ValueError(
                    f"client {client.id} sent {name} with numbers that are not finite in round {server.round}: its"
                    " training diverged; lower the learning rate or clip gradients."
                )
            (factors if is_factor or name.removesuffix(".slots") in self._adapters else rest)[name] = value
        if rest:
            server.mean.add(rest, weight)
        arrival: dict[str, Any] = {"weight": float(weight), "level": self._capacities.level(server, client)}
        arrival["factors"] = {name: value.detach().clone() for name, value in factors.items()}
        if self.observers:
            arrival["personal"] = dict(client.memory.get("personal", {}))
        server.memory.setdefault("arrivals", {})[client.id] = arrival

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Let the operator combine the factors; average the rest."""
        arrivals = [each for _, each in sorted(server.memory["arrivals"].items())]
        clients = sorted(server.memory["arrivals"])
        weights = [arrival["weight"] for arrival in arrivals]
        previous = {name: self._server_pair(server, adapter) for name, adapter in self._adapters.items()}
        pairs = [self._pairs_of(server, client, arrival) for client, arrival in zip(clients, arrivals, strict=True)]
        found = self.operator.aggregate_model(
            pairs, weights, round=server.round, seed=self._seed(server), previous=previous
        )
        if self.observers:
            own = [
                self._pairs_of(server, client, arrival, arrival.get("personal", {}))
                for client, arrival in zip(clients, arrivals, strict=True)
            ]
            measured = found
            if self.operator.sent_up(server.round) != self.operator.trained(server.round):
                measured = self.operator.aggregate_model(
                    own, weights, round=server.round, seed=self._seed(server), previous=previous
                )
            for observer in self.observers:
                observer(AggregatedRound(server.round, own, weights, measured))
        del server.memory["arrivals"]
        if server.mean.arrivals:
            server.state.update(server.mean.result())
        self._take(server, clients, found)

    def _take(self, server: Server, clients: Sequence[int], found: Mapping[str, Broadcast]) -> None:
        change: dict[str, Tensor] = {}
        for layer, result in found.items():
            adapter = self._adapters[layer]
            server.state.update(adapter.tensors(result.server, self._scalings[layer]))
            if result.change is not None:
                adapter.fold(result.change)
                for name in sorted(self.operator.sent_down_of_change(server.round)):
                    change[f"{layer}.change.{name}"] = getattr(result.change, name)
            if self.operator.broadcasts == "personal" and self.operator.sent_up(server.round) == set(_NAMES):
                pairs = server.memory.setdefault("pairs", {})
                for client, pair in zip(clients, result.clients, strict=True):
                    pairs.setdefault(client, {}).update(adapter.tensors(pair, self._scalings[layer]))
        server.memory["change"] = change
        if self._alternates:
            versions = server.memory.setdefault("versions", self._first_versions())
            for name in self.operator.sent_up(server.round):
                versions[name] = server.round + 1

    def personal_state(self, server: Server, client: Client) -> Mapping[str, Tensor]:
        """Return the global model at the client's ranks, with what is the client's own."""
        own = {**super().personal_state(server, client), **server.memory.get("pairs", {}).get(client.id, {})}
        own.update(client.memory.get("personal", {}))
        return self._at_level(own, self._capacities.level(server, client))

    def variants(self, server: Server) -> dict[str, Mapping[str, Tensor]]:
        """Return the global model at each level below 1, by the level."""
        parameters = server.parameters(server.state)
        return {f"{level:g}": self._at_level(parameters, level) for level in self.levels if level < 1}

    @property
    def _alternates(self) -> bool:
        """Whether rounds train different factors, so that a client may lack the news of several rounds."""
        return self.operator.trained(0) != self.operator.trained(1)

    def _first_versions(self) -> dict[str, int]:
        down = self.operator.sent_down(0)
        return {name: 0 if name in down else -1 for name in _NAMES}

    def _due(self, server: Server, client: Client) -> set[str]:
        """Return the factors that a client must be sent."""
        if not self._alternates:
            return set(self.operator.sent_down(server.round))
        versions = server.memory.get("versions") or self._first_versions()
        return {name for name in _NAMES if versions[name] > client.memory.get("heard", -1)}

    @staticmethod
    def _known_of(server: Server, client: int) -> dict[str, Tensor]:
        """Return the global values, with the factors that the server holds for the client alone."""
        return {**server.state, **server.memory.get("pairs", {}).get(client, {})}

    def _at_level(self, state: Mapping[str, Tensor], level: float) -> dict[str, Tensor]:
        cut = {
            parameter: self._padded(adapter, name, adapter.slots(name, state[parameter], self._rank(adapter, level)))
            for parameter, (adapter, name) in self._factors.items()
        }
        return {**state, **cut}

    def _padded(self, adapter: Adapter, name: Name, value: Tensor, ratio: float = 1.0) -> Tensor:
        """Return a factor filled with zeros to the full rank; ``B`` times the ratio."""
        matrix = adapter.matrix(name, value)
        if ratio != 1 and name == "B":
            matrix = matrix * ratio
        return adapter.value(name, padded(matrix, adapter.rank, 1 if name == "B" else 0))

    def _pairs_of(
        self, server: Server, client: int, arrival: Mapping[str, Any], personal: Mapping[str, Tensor] | None = None
    ) -> dict[str, LowRankPair]:
        """Return one client's pairs as the server knows them; with what it keeps for itself, as they are."""
        pairs = {}
        received = {**self._known_of(server, client), **(personal or {})}
        for layer, adapter in self._adapters.items():
            rank, scaling = self._rank(adapter, arrival["level"]), self._scaling(adapter, arrival["level"])
            before = adapter.pair(received, adapter.rank, self._scalings[layer]).resized(rank, scaling)
            factors = {"B": before.B, "A": before.A}
            slots = arrival["factors"].get(f"{layer}.slots")
            for name in _NAMES:
                parameter = adapter.parameters[name]
                if parameter not in arrival["factors"]:
                    continue
                matrix = adapter.matrix(name, arrival["factors"][parameter])
                if slots is None:
                    factors[name] = matrix
                else:
                    factors[name].index_copy_(1 if name == "B" else 0, slots.long(), matrix)
            pairs[layer] = LowRankPair(factors["B"], factors["A"], scaling)
        return pairs

    def _selected(self, server: Server, client: Client, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the slots that a client of `LoRAA2` with a budget uploads, by layer; nothing where it sends all."""
        if not isinstance(self.operator, LoRAA2) or not self.upload_ranks:
            return {}
        budget = self.upload_ranks[client.id % len(self.upload_ranks)]
        level = self._capacities.level(server, client)
        trained, received = (
            {
                layer: adapter.pair(tensors, self._rank(adapter, level), adapter.scaling)
                for layer, adapter in self._adapters.items()
            }
            for tensors in (model, client.workspace["received"])
        )
        return self.operator.select_ranks(trained, received, budget, server.round)

    def _server_pair(self, server: Server, adapter: Adapter) -> LowRankPair:
        return adapter.pair(server.state, adapter.rank, self._scalings[adapter.name])

    def _scaling(self, adapter: Adapter, level: float) -> float:
        return self._scalings[adapter.name] * (
            adapter.scaling_at(self._rank(adapter, level)) / adapter.scaling_at(adapter.rank)
        )

    @staticmethod
    def _rank(adapter: Adapter, level: float) -> int:
        return max(round(level * adapter.rank), 1)

    @staticmethod
    def _seed(server: Server) -> int:
        return derive_seed(server.seed, "adapters")
