"""FedLoRA: federated fine-tuning with LoRA, by any aggregation-broadcast operator.

The operator combines the factors. This file has the common part: which factors are trained and sent in which round,
clients of different rank, what a client keeps, and changes of the base weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.aggregation import (
    Broadcast,
    DistanceRule,
    LoRAA2,
    LowRankPair,
    Operator,
)
from lightning_lowrank.aggregation.adapters import Adapter, find_adapters
from lightning_lowrank.aggregation.aggregator import working_dtype
from lightning_lowrank.aggregation.pairs import inner_products, padded
from lightning_lowrank.algorithms._capacity import Capacities, Capacity, ClientRanks, Ranks
from lightning_lowrank.arguments import listed
from lightning_lowrank.configuration import check_patterns
from lightning_lowrank.federated.algorithm import Claims, LocalStep, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import ChangesBase, Personal, UnequalClients
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, State, copy_into
from lightning_lowrank.internals.torch import sharing_memory
from lightning_lowrank.patterns import matches
from lightning_lowrank.seeding import derive_seed

__all__ = ["AggregatedRound", "FedLoRA"]

Name = Literal["B", "A"]
_NAMES: tuple[Name, Name] = ("B", "A")
# Stands for both factors of a change in messages where the matrix takes fewer bytes than they.
_LONGEST_PERIOD = 256
_PRODUCT = "product"


@dataclass(frozen=True)
class AggregatedRound:
    """Inputs and results of one round's aggregation, for observers that measure it.

    Args:
        round: Number of the round, from 0.
        pairs: For each client its pairs by layer, as the server knows them: what a client does not send is what the
            server has.
        weights: The clients' weights.
        broadcasts: The operator's results, by layer.
    """

    round: int
    pairs: Sequence[Mapping[str, LowRankPair]]
    weights: Sequence[float]
    broadcasts: Mapping[str, Broadcast]


class FedLoRA(ChangesBase, UnequalClients, Personal):
    r"""Federated LoRA with a given aggregation-broadcast operator (Chen et al., ABO, Algorithms 1 and 2).

    Put ``LowRank(MatrixProduct(), rank=8, alpha=16, init="lora", freeze_rest=True)`` before the loop, or give the
    trainer a module that contains a model wrapped by PEFT. Other trained parameters, such as a classification head and
    biases, are averaged as in `FedAvg`, or stay with each client (``keep``).

    Clients send the factors that the operator uses: both for most, the trained one for ``FFA``, ``FedSVD``, ``RoLoRA``
    and ``CoLR``, :math:`A` alone for ``FedSA``, whose clients keep their :math:`B`. The server sends those that have
    changed since the client last received them. Operators that change the base weight (``FLoRA``, ``FLoRIST``,
    ``FedEx``, ``CoLR``) send the factors of that change, or its matrix where that takes fewer bytes, to every client,
    also outside the cohort, which is logged as ``comm/idle_down_bytes``. Changes of base weights of 16 bits are summed
    in single precision beside them, which takes 4 more bytes for each of their numbers. Where PEFT wrapped a layer that
    is quantised, by bitsandbytes or torchao, the weight stays and the layer adds what has changed: factors in single
    precision side by side, or their matrix once that has fewer numbers. Redrawn factors are not sent, since both sides
    have the seed.

    With PEFT's DoRA, the operator combines the factors, so that what it says of the product holds for the direction
    :math:`W + s B A`; the magnitudes are averaged.

    With ``levels`` clients have different ranks: the same share of each layer's rank, at least 1. A client's scaling is
    that of its own rank, :math:`\alpha / r_i`. The global model is that of the largest rank; the models of the other
    levels are evaluated too. ``ranks`` gives each client the rank itself. Between real sites, a site can state its own:
    ``--node-config 'rank=4'``.

    With a robust rule as the loop's ``aggregator``, the rule gives the clients' weights in the operator, in place of
    their numbers of samples. An arrival is then one vector of the changes of all layers' products, :math:`s B A`, and
    of what is trained outside the adapters; its inner products come from the factors, and no product is built. Rules of
    single numbers are refused, as are operators whose clients keep a pair or a factor of their own.

    Args:
        operator: How factors are combined, such as ``ProductSum()`` or ``SumProduct()``.
        levels: Shares of each layer's rank, in (0, 1], the largest 1.
        capacity: ``"fixed"``: a client always has the same level; levels are assigned in turns, in the order of ids.
            ``"dynamic"``: each client's level is drawn in each round.
        shares: Relative number of clients of each level, or its chance to be drawn; equal by default.
        keep: Patterns of names of trained parameters outside the adapters that stay with each client.
        upload_ranks: For ``LoRAA2``: how many rank slots, over all layers, a client uploads: those that training
            changed most. Several numbers are assigned to clients in turns, in the order of ids. ``None``: all slots.
        adapter: Which of PEFT's adapters is trained; by default the active one.
        ranks: The clients' ranks, in place of ``levels``: a list, given out in turns in the order of ids; a dictionary
            by id, where the others have the layers' rank; or a function of the id, in YAML its import path. A layer of
            smaller rank keeps its own.

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
        ranks: Ranks | None = None,
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
        self._ranks = ClientRanks(ranks)
        if self._ranks and (tuple(levels) != (1.0,) or shares is not None or capacity != "fixed"):
            raise MisconfigurationException(
                f"ranks={ranks!r} gives each client its rank, and levels, shares and capacity are another way to do"
                " so: leave them out."
            )
        if (len(levels) > 1 or self._ranks) and not operator.mixed_ranks:
            given = f"ranks={ranks!r}" if self._ranks else f"levels={list(levels)}"
            raise MisconfigurationException(
                f"{operator!r} needs clients of one rank, and {given} gives them several: use RBLA() or ZeroPadding()"
                " for the means of factors, or SumProduct()."
            )
        if isinstance(keep, str):
            raise MisconfigurationException(f"keep must be a list of patterns, got {keep!r}.")
        budgets = [upload_ranks] if isinstance(upload_ranks, (int, Integral)) else list(upload_ranks or ())
        if upload_ranks is not None and (
            not isinstance(operator, LoRAA2) or not budgets or not all(budget >= 1 for budget in budgets)
        ):
            raise MisconfigurationException(
                f"upload_ranks must be one number of at least 1, or several, and needs the operator LoRAA2(), but is"
                f" {upload_ranks!r} with {operator!r}."
            )
        self.operator = operator
        self.upload_ranks = budgets
        self.levels, self.capacity, self.shares = tuple(levels), capacity, shares
        self.keep = list(keep)
        self.adapter = adapter
        self.ranks = ranks
        self.observers: list[Callable[[AggregatedRound], None]] = []
        self._adapters: dict[str, Adapter] = {}
        self._scalings: dict[str, float] = {}
        self._factors: dict[str, tuple[Adapter, Name]] = {}
        self._clients = 0
        self._kept: set[str] = set()
        own = operator.broadcasts == "personal"
        self.claims = Claims(
            needs_only_mean=operator.linear and not self._mixed and not budgets,
            unprotected=f"with {operator!r} each client has a pair or a factor of its own" if own else "",
            not_single_numbers="the rule works on single numbers, of which products of factors have no list",
            handles_shared_memory=True,
        )

    def setup(self, base: Base) -> None:
        """Find the adapters, and what clients keep; store or draw the initial values."""
        try:
            self._adapters = find_adapters(base.module, self.adapter)
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
        trained = {name: value for name, value in base.module.named_parameters() if value.requires_grad}
        frozen = sorted(self._factors.keys() - trained.keys())
        if frozen:
            raise MisconfigurationException(
                f"FedLoRA: {frozen[0]} does not require a gradient: leave both factors trainable; the operator chooses"
                " which are trained."
            )
        shared = sharing_memory((name, trained[name]) for name in self._factors)
        operator = self.operator
        both = (
            len(way(number)) for way in (operator.trained, operator.sent_up, operator.sent_down) for number in (0, 1)
        )
        if shared and min(both) < 2:
            one, other = shared[0]
            raise MisconfigurationException(
                f"{operator!r} does not treat A and B alike, and {one} and {other} lie in the same memory, the one an A"
                " and the other a B: use ProductSum() or SumProduct(), or leave one of the layers out."
            )
        others = [name for name in trained if name not in self._factors]
        check_patterns("keep", self.keep, others, "trained parameter outside the adapters")
        self._kept = {name for name in others if any(matches(pattern, name) for pattern in self.keep)}
        local = [f"the factor {name} of each adapter" for name in self.operator.trained(0) - self.operator.sent_up(0)]
        local += [listed(sorted(self._kept))] if self._kept else []
        self.claims = replace(self.claims, local_part=" and ".join(local))
        for adapter in self._adapters.values():
            if adapter.rank > min(adapter.shape):
                raise MisconfigurationException(
                    f"FedLoRA: the adapter of layer {adapter.name!r} has rank {adapter.rank}, above the smaller side of"
                    f" its {adapter.shape[0]}×{adapter.shape[1]} weight: train the layer whole, with PEFT's"
                    " modules_to_save, leave it out (exclude_modules), or give it a rank of its own (rank_pattern)."
                )
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
                        f" {adapter.name!r}, {name}, is zero, so that nothing would change: LowRank(init='lora')"
                        " starts B at zero and A at random."
                    )
        self._clients = base.clients
        if self._ranks:
            self._ranks.check(base.clients, self._largest)
        if "initial" in base.state:
            return
        earlier = {layer: adapter.beside for layer, adapter in self._adapters.items() if adapter.beside}
        if earlier:
            base.state["beside"] = earlier
        known = {
            parameter
            for parameter, (_, name) in self._factors.items()
            if name not in self.operator.sent_down(0) and not self.operator.redraws
        }
        base.state["initial"] = detached({name: trained[name] for name in known | self._kept})
        if self.operator.redraws:
            for layer, adapter in self._adapters.items():
                own = adapter.pair(detached(trained), adapter.rank, self._scalings[layer])
                if own.product().any():
                    self._change(base, layer, own)
            self._draw(base, 0)
            copy_into(trained, base.state["factors"])

    def rank_limit(self, module: nn.Module) -> int:
        if not self.operator.mixed_ranks or len(self.levels) > 1:
            return 0
        try:
            found = find_adapters(module, self.adapter)
        except ValueError:
            # `setup` says what is wrong.
            return 0
        return max((adapter.rank for adapter in found.values()), default=0)

    def set_rank(self, client: int, rank: int) -> None:
        if not self.operator.mixed_ranks or len(self.levels) > 1:
            reason = f"levels={list(self.levels)}" if self.operator.mixed_ranks else f"{self.operator!r}"
            raise MisconfigurationException(
                f"rank={rank} was stated for client {client}, and with {reason} it cannot have a rank of its own: an"
                " operator for clients of different rank is needed, such as SumProduct(), and no levels."
            )
        self._ranks.own[client] = rank
        self.claims = replace(self.claims, needs_only_mean=False)

    def group_key(self, client: ClientInfo) -> Hashable:
        """Clients whose adapters have the same scalings, of any rank, step together."""
        if not self._mixed:
            return None
        level = self._level(client)
        return tuple(self._scaling(adapter, level) for adapter in self._adapters.values())

    def computed(self, base: Base, client: ClientInfo) -> Mapping[str, float]:
        level = self._level(client)
        return {
            parameter: self._rank(adapter, level) / adapter.rank for parameter, (adapter, _) in self._factors.items()
        }

    def configure(self, base: Base, client: ClientInfo | None) -> None:
        """Set the scalings to those of the client's ranks."""
        level = 1.0 if client is None else self._level(client)
        beside = base.state.get("beside", {})
        for layer, adapter in self._adapters.items():
            adapter.scaling = self._scaling(adapter, level)
            if adapter.quantised:
                adapter.beside = beside.get(layer, {})

    def unstepped(self, round_number: int) -> frozenset[str]:
        trained = self.operator.trained(round_number)
        return frozenset(parameter for parameter, (_, name) in self._factors.items() if name not in trained)

    @property
    def announces(self) -> bool:
        return self.operator.changes_base or self.operator.redraws

    def update_base(self, base: Base, message: Mapping[str, Tensor]) -> None:
        """Fold a change into the base weights, and draw the next round's factors where factors are drawn."""
        changes = {
            layer: {name: message[key] for name in (*_NAMES, _PRODUCT) if (key := f"{layer}.change.{name}") in message}
            for layer in self._adapters
        }
        if not any(changes.values()):
            return
        for layer, factors in changes.items():
            adapter, scaling = self._adapters[layer], self._scalings[layer]
            if _PRODUCT in factors:
                self._change(base, layer, factors[_PRODUCT])
                continue
            if len(factors) < 2:
                # The other factor is the round's, which every side has drawn.
                ((name, value),) = factors.items()
                rank = value.shape[1 if name == "B" else 0]
                drawn = adapter.pair(base.state["factors"], rank, scaling)
                factors = {"B": drawn.B, "A": drawn.A, **factors}
            self._change(base, layer, LowRankPair(factors["B"], factors["A"], scaling))
        if self.operator.redraws:
            self._draw(base, base.state["draw"] + 1)

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what training starts from: what was received, and the drawn factors."""
        return {**received, **base.state.get("factors", {})}

    def drawn_in(self, name: str, round_number: int) -> int:
        """Return the round itself, for factors that the operator draws anew after each round."""
        return round_number if self.operator.redraws and name in self._factors else 0

    # The server's half

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        """Return what the client lacks of the global model: factors of its own rank, and the rest of the model."""
        level = self._level(client)
        known = self._known_of(server, client.id)
        down, due = server.sent_down(), self._due(server, client)
        sent = {name: down[name] for name in down if name not in self._factors and name not in self._kept}
        for parameter, (adapter, name) in self._factors.items():
            if name in due:
                sent[parameter] = adapter.slots(name, known[parameter], self._rank(adapter, level))
        return Message(sent)

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        """Keep the factors until all clients have sent theirs; add the rest to the mean.

        Raises:
            ValueError: If a factor is not finite, or its slots are out of range.
        """
        factors: dict[str, Tensor] = {}
        rest: dict[str, Tensor] = {}
        for name, value in message.tensors.items():
            is_factor = name in self._factors
            if is_factor and not value.isfinite().all():
                raise ValueError(
                    f"client {client.id} sent {name} with numbers that are not finite in round {server.round}: its"
                    " training diverged; lower the learning rate or clip gradients."
                )
            (factors if is_factor or name.removesuffix(".slots") in self._adapters else rest)[name] = value
        level = self._level(client)
        self._check_slots(client, level, factors)
        if rest or isinstance(server.aggregator, DistanceRule):
            server.aggregator.add(rest, weight)
        arrival = {"weight": float(weight), "level": level, "factors": detached(factors)}
        server.state.setdefault("arrivals", {})[client.id] = arrival
        if self._alternates:
            versions = self._versions(server)
            heard = server.state.setdefault("heard", {}).setdefault(client.id, {})
            heard.update({name: (versions[name], level) for name in self._due(server, client)})

    def _check_slots(self, client: ClientInfo, level: float, factors: Mapping[str, Tensor]) -> None:
        for parameter, (adapter, name) in self._factors.items():
            slots = factors.get(f"{adapter.name}.slots")
            if slots is None or parameter not in factors:
                continue
            rank = self._rank(adapter, level)
            chosen = [-1, *slots.tolist(), rank]
            columns = adapter.matrix(name, factors[parameter]).shape[1 if name == "B" else 0]
            if columns != len(slots) or any(slot >= after for slot, after in pairwise(chosen)):
                raise ValueError(
                    f"client {client.id} sent {columns} slots of {parameter} as {slots.tolist()}: they must be"
                    f" ascending numbers from 0 to {rank - 1}."
                )

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Let the operator combine the factors; average the rest."""
        # Those of another rule's choice have no weight, and no part.
        chosen = self._chosen(server)
        arrivals = {client: arrival for client, arrival in sorted(server.state["arrivals"].items()) if chosen[client]}
        weights = [chosen[client] for client in arrivals]
        previous = {
            name: adapter.pair(server.model, adapter.rank, self._scalings[name])
            for name, adapter in self._adapters.items()
        }
        pairs = [self._pairs_of(server, client, arrival) for client, arrival in arrivals.items()]
        if isinstance(server.aggregator, DistanceRule) and sum(weights) < 1 - 1e-12:
            pairs.append(previous)
            weights.append(1 - sum(weights))
        found = self.operator.aggregate_model(
            pairs, weights, round=server.round, seed=self._seed(server.base), previous=previous
        )
        for observer in self.observers:
            observer(AggregatedRound(server.round, pairs, weights, found))
        del server.state["arrivals"]
        if server.aggregator.arrivals:
            server.take(server.aggregated())
        self._take(server, list(arrivals), found)

    def _chosen(self, server: Server) -> dict[int, float]:
        """Return the clients' weights: their own, or what a robust rule gives them by their products."""
        arrivals, rule = server.state["arrivals"], server.aggregator
        if not isinstance(rule, DistanceRule):
            return {client: arrival["weight"] for client, arrival in arrivals.items()}
        # In the order in which the rule has been given the rest of their messages.
        pairs = [self._pairs_of(server, client, arrival) for client, arrival in arrivals.items()]
        starts = {
            arrival["level"]: self._started_from(server.round, server.model, arrival["level"])
            for arrival in arrivals.values()
        }
        levels = [list(starts).index(arrival["level"]) for arrival in arrivals.values()]
        total = torch.zeros(len(pairs), len(pairs), dtype=torch.float64)
        for layer in self._adapters:
            all = [*(each[layer] for each in pairs), *(start[layer] for start in starts.values())]
            inner = inner_products(all).cpu()
            end, start = slice(len(pairs)), [len(pairs) + level for level in levels]
            crossed = inner[end][:, start]
            total += inner[end, end] - crossed - crossed.T + inner[start][:, start]
        rule.extend(total)
        return dict(zip(arrivals, rule.client_weights().tolist(), strict=True))

    def _started_from(self, round_number: int, known: Mapping[str, Tensor], level: float) -> dict[str, LowRankPair]:
        """Return the pairs with which a client of a level starts a round from these values."""
        return {
            layer: adapter.pair(known, adapter.rank, self._scalings[layer]).resized(
                self._rank(adapter, level), self._scaling(adapter, level), self.operator.absorbing(round_number)
            )
            for layer, adapter in self._adapters.items()
        }

    def _take(self, server: Server, clients: Sequence[int], found: Mapping[str, Broadcast]) -> None:
        change: dict[str, Tensor] = {}
        absorbing = self.operator.absorbing(server.round)
        for layer, result in found.items():
            adapter, scaling = self._adapters[layer], self._scalings[layer]
            server.model.update(adapter.tensors(result.server, scaling, absorbing))
            if result.change is not None:
                of_layer = result.change.resized(result.change.rank, scaling, absorbing)
                names = self.operator.sent_down_of_change(server.round)
                # The factors of many clients side by side can take more bytes than the matrix, which is in single
                # precision as the product of factors of 16 bits is.
                wide = working_dtype(of_layer.B.dtype)
                dense = math.prod(of_layer.shape) * wide.itemsize
                if len(names) == 2 and of_layer.rank * sum(of_layer.shape) * of_layer.B.dtype.itemsize > dense:
                    change[f"{layer}.change.{_PRODUCT}"] = of_layer.in_working_dtype().product()
                    continue
                for name in sorted(names):
                    change[f"{layer}.change.{name}"] = getattr(of_layer, name)
            if self.operator.broadcasts == "personal" and self.operator.sent_up(server.round) == set(_NAMES):
                pairs = server.state.setdefault("pairs", {})
                for client, pair in zip(clients, result.clients, strict=True):
                    pairs.setdefault(client, {}).update(adapter.tensors(pair, scaling, absorbing))
        if change:
            self.announce(server, change)
        server.model.update(server.base.state.get("factors", {}))
        down = self.operator.sent_down(server.round)
        if not self._alternates and down != self.operator.sent_down(0):
            raise MisconfigurationException(
                f"{self.operator!r} sends {sorted(down)} after round {server.round}, and after each of the first"
                f" {_LONGEST_PERIOD} rounds {sorted(self.operator.sent_down(0))}: let it change in one of those too."
            )
        if self._alternates:
            changed = dict.fromkeys(down, server.round + 1)
            server.state["versions"] = {**self._versions(server), **changed}

    def model_for(self, server: Server, client: ClientInfo) -> Mapping[str, Tensor]:
        """Return the global model at the client's ranks, with the factors that the server holds for it alone."""
        return self._at_level(self._known_of(server, client.id), self._level(client))

    def has_whole_model(self, server: Server, client: ClientInfo, state: State) -> bool:
        level = self._level(client)
        # A client's own factors are zero beyond its rank, and cut the others with them.
        own = server.state.get("pairs", {}).get(client.id, {}).keys() | state.get("personal", {}).keys()
        cut = level == 1 or not own.isdisjoint(self._factors)
        return cut and (bool(self._ranks) or self._capacities.always(client, level))

    def variants(self, server: Server) -> dict[str, Mapping[str, Tensor]]:
        shared = server.parameters()
        if self._ranks:
            ranks = sorted({self._ranks.rank(client, self._largest) for client in range(self._clients)}, reverse=True)
            levels = {f"rank_{rank}": rank / self._largest for rank in ranks}
        else:
            levels = {f"{level:g}": level for level in self.levels}
        return {name: self._at_level(shared, level) for name, level in levels.items() if level < 1}

    def stand_in(self, server: Server, client: ClientInfo) -> State:
        """Return the factors; a broadcast omits those that the client has."""
        return {"received": {name: server.model[name] for name in self._factors}} if self._alternates else {}

    def forget(self, server: Server, client: ClientInfo) -> None:
        """Send the client all factors again."""
        server.state.get("heard", {}).pop(client.id, None)

    # The client's half

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the message and the client's own values; slots beyond its rank are zero."""
        values = {name: value for name, value in message.tensors.items() if name in client.model}
        came = {parameter: values[parameter] for parameter in self._factors if parameter in values}
        level = self._level(client)
        known = self._known_by(client)
        absorbing = self.operator.absorbing(client.round)
        for parameter, (adapter, name) in self._factors.items():
            rank = self._rank(adapter, level)
            value = came[parameter] if parameter in came else adapter.slots(name, known[parameter], rank)
            # Values from the server and from the client's state are for the scaling of the full rank.
            ratio = self._scalings[adapter.name] / adapter.scaling
            ratio = ratio ** (1 / len(absorbing)) if name in absorbing else 1.0
            values[parameter] = self._padded(adapter, name, value, ratio)
        values.update({name: known[name] for name in self._kept})
        copy_into(client.model, values)
        if self._alternates:
            client.state.setdefault("received", {}).update(detached(came))
        if self.upload_ranks:
            client.round_state["received"] = detached({name: client.model[name] for name in self._factors})

    def before_step(self, step: LocalStep) -> None:
        for parameter in self.unstepped(step.round):
            step.parameters[parameter].grad = None

    def end(self, client: ClientContext) -> Message:
        """Return the factors that the operator uses and the rest; keep the client's own."""
        model = client.model
        level = self._level(client)
        sent = {name: value for name, value in client.base.sent_up(model).items() if name not in self._factors}
        personal = {name: sent.pop(name).detach().clone() for name in sorted(self._kept)}
        up, absorbing = self.operator.sent_up(client.round), self.operator.absorbing(client.round)
        selected, limits = self._selected(client), dict[str, tuple[int, ...]]()
        for parameter, (adapter, name) in self._factors.items():
            if name in up:
                value = adapter.slots(name, model[parameter], self._rank(adapter, level))
                if self.upload_ranks:
                    # Training chooses how many of them are sent.
                    limits |= {parameter: tuple(value.shape), f"{adapter.name}.slots": (self._rank(adapter, level),)}
                if adapter.name in selected:
                    matrix, slots = adapter.matrix(name, value), selected[adapter.name]
                    value = adapter.value(name, matrix.index_select(1 if name == "B" else 0, slots))
                    sent[f"{adapter.name}.slots"] = slots.to(torch.int32)
                sent[parameter] = value
            elif name in self.operator.trained(client.round):
                ratio = adapter.scaling / self._scalings[adapter.name]
                ratio = ratio ** (1 / len(absorbing)) if name in absorbing else 1.0
                personal[parameter] = self._padded(adapter, name, model[parameter], ratio).clone()
        if personal:
            client.state["personal"] = personal
        return Message(sent, limits=limits)

    def personal_model(self, client: ClientContext, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._at_level(super().personal_model(client, model), self._level(client))

    # Both halves

    def _change(self, base: Base, layer: str, change: LowRankPair | Tensor) -> None:
        """Change a base weight; where it is quantised, what is kept beside it."""
        adapter = self._adapters[layer]
        if not adapter.quantised:
            adapter.fold(change, partial(base.fold, layer))
            return
        beside = base.state.setdefault("beside", {})
        beside[layer] = adapter.beside = adapter.added_beside(beside.get(layer, {}), change)

    def _draw(self, base: Base, number: int) -> None:
        """Draw the initial factors of the next round, the same on every side."""
        drawn: dict[str, Tensor] = {}
        parameters = dict(base.module.named_parameters())
        for layer, adapter in self._adapters.items():
            like, scaling = parameters[adapter.parameters["B"]], self._scalings[layer]
            pair = self.operator.fresh(
                adapter.shape,
                adapter.rank,
                scaling=scaling,
                round=number,
                seed=derive_seed(self._seed(base), layer),
                dtype=like.dtype,
                device=like.device,
            )
            drawn |= adapter.tensors(pair, scaling, self.operator.absorbing(number))
        base.state.update({"factors": drawn, "draw": number})

    @functools.cached_property
    def _alternates(self) -> bool:
        """Whether rounds send different factors, so that a client may lack the changes of several rounds."""
        first = self.operator.sent_down(0)
        return any(self.operator.sent_down(number) != first for number in range(1, _LONGEST_PERIOD))

    def _versions(self, server: Server) -> dict[str, int]:
        """Return the round before which each factor changed last; -1 if every side has it from the start."""
        down = self.operator.sent_down(0)
        first = {name: 0 if name in down else -1 for name in _NAMES}
        return server.state.get("versions", first)

    def _due(self, server: Server, client: ClientInfo) -> set[str]:
        """Return the factors that a client must be sent."""
        if not self._alternates:
            return set(self.operator.sent_down(server.round))
        heard = server.state.get("heard", {}).get(client.id, {})
        level = self._level(client)
        due = set()
        for name, version in self._versions(server).items():
            # A client may need more slots than it was sent when its level was lower.
            last, slots = heard.get(name, (-1, 1.0))
            if version > last or level > slots:
                due.add(name)
        return due

    @staticmethod
    def _known_of(server: Server, client: int) -> dict[str, Tensor]:
        """Return the global values, with the factors that the server holds for the client alone."""
        return {**server.model, **server.state.get("pairs", {}).get(client, {})}

    @staticmethod
    def _known_by(client: ClientContext) -> dict[str, Tensor]:
        """Return a client's values before the message: initial or drawn ones, the last received, and its own."""
        shared, own = client.base.state, client.state
        drawn, received, personal = shared.get("factors", {}), own.get("received", {}), own.get("personal", {})
        return {**shared["initial"], **drawn, **received, **personal}

    def _at_level(self, state: Mapping[str, Tensor], level: float) -> dict[str, Tensor]:
        cut = {
            parameter: self._padded(adapter, name, adapter.slots(name, state[parameter], self._rank(adapter, level)))
            for parameter, (adapter, name) in self._factors.items()
        }
        return {**state, **cut}

    def _padded(self, adapter: Adapter, name: Name, value: Tensor, ratio: float = 1.0) -> Tensor:
        """Return a factor times the ratio, filled with zeros to the full rank."""
        matrix = adapter.matrix(name, value)
        if ratio != 1:
            matrix = matrix * ratio
        return adapter.value(name, padded(matrix, adapter.rank, 1 if name == "B" else 0))

    def _pairs_of(self, server: Server, client: int, arrival: State) -> dict[str, LowRankPair]:
        """Return one client's pairs."""
        pairs = {}
        started = self._started_from(server.round, self._known_of(server, client), arrival["level"])
        for layer, adapter in self._adapters.items():
            before = started[layer]
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
            pairs[layer] = LowRankPair(factors["B"], factors["A"], before.scaling)
        return pairs

    def _selected(self, client: ClientContext) -> dict[str, Tensor]:
        """Return the slots that a client of `LoRAA2` with a budget uploads, by layer; empty if it sends all."""
        if not isinstance(self.operator, LoRAA2) or not self.upload_ranks:
            return {}
        budget = self.upload_ranks[client.id % len(self.upload_ranks)]
        level = self._level(client)
        trained, received = (
            {
                layer: adapter.pair(tensors, self._rank(adapter, level), adapter.scaling)
                for layer, adapter in self._adapters.items()
            }
            for tensors in (client.model, client.round_state["received"])
        )
        return self.operator.select_ranks(trained, received, budget, client.round)

    def _scaling(self, adapter: Adapter, level: float) -> float:
        return self._scalings[adapter.name] * (
            adapter.scaling_at(self._rank(adapter, level)) / adapter.scaling_at(adapter.rank)
        )

    @property
    def _mixed(self) -> bool:
        """Whether clients may have different ranks."""
        return len(self.levels) > 1 or bool(self._ranks)

    @property
    def _largest(self) -> int:
        """The largest rank of the layers."""
        return max(adapter.rank for adapter in self._adapters.values())

    def _level(self, client: ClientInfo) -> float:
        """Return a client's share of the layers' rank; with ``ranks`` of the largest one."""
        if not self._ranks:
            return self._capacities.level(client)
        return self._ranks.rank(client.id, self._largest) / self._largest

    def _rank(self, adapter: Adapter, level: float) -> int:
        if self._ranks:
            return min(round(level * self._largest), adapter.rank)
        return max(round(level * adapter.rank), 1)

    @staticmethod
    def _seed(base: Base) -> int:
        return derive_seed(base.seed, "adapters")
