"""FedLoRA: federated fine-tuning with LoRA, by any aggregation-broadcast operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.aggregation import DistanceRule
from lightning_lowrank.arguments import join_names
from lightning_lowrank.buffers import names_that_match
from lightning_lowrank.federated.algorithm import Claims, LocalStep, detached
from lightning_lowrank.federated.capacities import Capacity, refuse_kept_moments
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import ChangesBase, Personal, UnequalClients
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, State, copy_into
from lightning_lowrank.lora.base_changes import BaseChanges
from lightning_lowrank.lora.exchange import FactorExchange
from lightning_lowrank.lora.inputs import BOTH, AggregatedRound
from lightning_lowrank.lora.operator import Operator
from lightning_lowrank.lora.ranks import LayerRanks, Ranks, padded_factor, with_further_slots
from lightning_lowrank.lora.requirements import adapters_of
from lightning_lowrank.lora.slots import UploadSlots
from lightning_lowrank.seeding import derive_seed


class FedLoRA(ChangesBase, UnequalClients, Personal):
    r"""Federated LoRA with a given aggregation-broadcast operator (Chen et al., ABO, Algorithms 1 and 2).

    Put ``LowRank(MatrixProduct(), rank=8, alpha=16, init="lora", freeze_rest=True)`` before the loop, or give the
    trainer a module that contains a model wrapped by PEFT. Other trained parameters, such as a classification head and
    biases, are averaged as in `FedAvg`, or stay with each client (``keep``).

    Clients send the factors that the operator uses: both for most, the trained one for ``FFA``, ``FedSVD``,
    ``RoLoRA``, ``LoRAA2`` and ``CoLR``, :math:`A` alone for ``FedSA``, whose clients keep their :math:`B`. The server
    sends the factors that have changed since the client last received them. Operators that change the base weight
    (``FLoRA``, ``FLoRIST``, ``FedEx``, ``CoLR``) send the factors of that change, or its matrix if that takes fewer
    bytes, to every client, also outside the cohort, which is logged as ``comm/idle_down_bytes``. Changes of base
    weights of 16 bits are also summed in single precision, which takes 4 more bytes for each of their numbers. If PEFT
    wrapped a layer that is quantised, by bitsandbytes or torchao, its weight does not change, and the layer stores the
    change separately: as concatenated factors in single precision, or as their matrix once that has fewer numbers.
    Redrawn factors are not sent.

    With PEFT's DoRA, the operator combines the factors, so that its result for the product holds for the direction
    :math:`W + s B A`; the magnitudes are averaged.

    With ``levels`` clients have different ranks: the same share of each layer's rank, at least 1. A client's scaling is
    that of its own rank, :math:`\alpha / r_i`. The global model is that of the largest rank; the models of the other
    levels are evaluated too. ``ranks`` gives each client its rank; a site can state it, ``--node-config 'rank=4'``.

    With a robust rule as the loop's ``aggregator``, the rule gives the clients' weights in the operator, in place of
    their numbers of samples. An arrival is then one vector of the changes of all layers' products, :math:`s B A`, and
    of the parameters trained outside the adapters; its inner products come from the factors, and no product is built.
    Rules of single numbers are refused, as are operators whose clients keep a pair or a factor of their own.

    Codecs of the loop's ``uplink`` get changes of factors, in the scaling of each client's own rank. If clients send
    factors that the broadcast leaves out (``RoLoRA``, ``LoRAA2``), they get values. Then ``Half`` and ``Quantize`` can
    be used; ``Sign`` and codecs that leave numbers out are refused. So is ``error_feedback=True`` with
    ``upload_ranks``.

    Args:
        operator: How factors are combined, such as ``ProductSum()`` or ``SumProduct()``.
        levels: Shares of each layer's rank, in (0, 1], the largest 1.
        capacity: ``"fixed"``: a client always has the same level; levels are assigned in turns, in the order of ids.
            ``"dynamic"``: each client's level is drawn in each round. With ``FedSA`` and ``FedInc`` a client's own
            factors keep their values in slots beyond the rank drawn.
        shares: Relative number of clients of each level, or its chance to be drawn; equal by default.
        keep: Patterns of names of trained parameters outside the adapters that stay with each client.
        upload_ranks: For ``LoRAA2``: how many rank slots, over all layers, a client uploads: those that training
            changed most. Several numbers are assigned to clients in turns, in the order of ids. ``None``: all slots.
        adapter: Which of PEFT's adapters is trained; by default the active one.
        ranks: The clients' ranks, in place of ``levels``: a list, assigned in turns in the order of ids; a dictionary
            by id, in which clients not named have the layers' rank; or a function of the id, in YAML its import path. A
            layer of smaller rank keeps its own.

    Raises:
        MisconfigurationException: If an argument is out of range, the module has no LoRA adapters, or the operator
            does not suit them: clients of different rank although it needs equal ones, or a frozen factor that is zero;
            or, in the dynamic setting, if a client kept an optimizer's state, which is of other slots.
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
        if isinstance(keep, str):
            raise MisconfigurationException(f"keep must be a list of patterns, got {keep!r}.")
        self._ranks = LayerRanks(operator, levels, capacity, shares, ranks)
        self._slots = UploadSlots(operator, upload_ranks, self._ranks)
        self._exchange = FactorExchange(operator, self._ranks)
        self._changes = BaseChanges(operator)
        self.operator, self.levels, self.upload_ranks = operator, self._ranks.levels, self._slots.budgets
        self.capacity, self.shares, self.ranks = capacity, shares, ranks
        self.keep, self.adapter = list(keep), adapter
        self.observers: list[Callable[[AggregatedRound], None]] = []
        self._kept: set[str] = set()
        of_own = f"with {operator!r} each client has a pair or a factor of its own"
        moving = f"with upload_ranks={', '.join(map(str, self.upload_ranks))} sends other rank slots in other rounds"
        self.claims = Claims(
            needs_only_mean=operator.linear and not self._ranks.mixed and not self.upload_ranks,
            unprotected=of_own if operator.broadcasts == "personal" else "",
            not_single_numbers="the rule works on single numbers, of which products of factors have no list",
            moving_numbers=moving if self.upload_ranks else "",
            new_basis=f"factors, by {operator!r}," if operator.new_basis else "",
            handles_shared_memory=True,
        )

    def setup(self, base: Base) -> None:
        """Find the adapters and the parameters that stay with clients; save or draw the initial values."""
        found = adapters_of(base.module, self.adapter, self.operator)
        self._ranks.adapters = self._changes.adapters = found
        self._ranks.check(base.clients)
        trained = {name: value for name, value in base.module.named_parameters() if value.requires_grad}
        others = [name for name in trained if name not in found.factors]
        what = "trained parameter outside the adapters"
        self._kept = set(names_that_match(base.module, "keep", self.keep, others, what))
        local = [f"the factor {name} of each adapter" for name in self.operator.trained(0) - self.operator.sent_up(0)]
        local += [join_names(sorted(self._kept))] if self._kept else []
        left_out = f"with {self.operator!r} sends values of factors that the round's broadcast leaves out"
        without = left_out if self._exchange.sends_values else ""
        self.claims = replace(self.claims, local_part=" and ".join(local), without_reference=without)
        if "initial" not in base.state:
            self._exchange.remember(base, trained, self._kept)
            self._changes.begin(base, trained)

    # Hooks on the server

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        """The factors that the client lacks, cut to its rank, and the rest of the model."""
        level, factors = self._ranks.level(client), self._ranks.adapters.factors
        known, due = self._exchange.global_values(server, client.id), self._exchange.due(server, client.id, level)
        down = {name: value for name, value in server.sent_down().items() if name not in factors.keys() | self._kept}
        for parameter, (adapter, name) in factors.items():
            if name in due:
                down[parameter] = self._ranks.slots(adapter, name, known[parameter], level)
        return Message(down)

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        """Store the factors until all clients have answered; add the other tensors to the mean.

        Raises:
            ValueError: If a factor is not finite, or its slots are out of range.
        """
        level, (factors, rest) = self._ranks.level(client), self._exchange.parts(client, message.tensors)
        self._slots.check(client.id, level, factors)
        if rest or isinstance(server.aggregator, DistanceRule):
            server.aggregator.add(rest, weight)
        arrival = {"weight": float(weight), "level": level, "factors": detached(factors)}
        server.state.setdefault("arrivals", {})[client.id] = arrival

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Combine the factors by the operator, announce changes of base weights, and average the other tensors."""
        adapters, absorbing = self._ranks.adapters, self.operator.absorbing(server.round)
        weights = self._exchange.weights(server)
        # Clients of weight 0, as a robust rule may choose, are left out.
        arrivals = {id: arrival for id, arrival in sorted(server.state["arrivals"].items()) if weights[id]}
        pairs = {
            client: self._exchange.completed_pairs(server, client, arrival) for client, arrival in arrivals.items()
        }
        previous = {layer: each.pair(server.model, each.rank, scaling) for layer, each, scaling in adapters}
        given, shares = list(pairs.values()), [weights[client] for client in pairs]
        if isinstance(server.aggregator, DistanceRule) and sum(shares) < 1 - 1e-12:
            given, shares = [*given, previous], [*shares, 1 - sum(shares)]
        seed = derive_seed(server.seed, "adapters")
        found = self.operator.aggregate_model(given, shares, round=server.round, seed=seed, previous=previous)
        for observer in self.observers:
            observer(AggregatedRound(server.round, given, shares, found))
        del server.state["arrivals"]
        if server.aggregator.arrivals:
            server.update_model(server.aggregated())
        personal = self.operator.broadcasts == "personal" and self.operator.sent_up(server.round) == BOTH
        for layer, adapter, scaling in adapters:
            server.model.update(adapter.tensors(found[layer].server, scaling, absorbing))
            for client, pair in zip(pairs, found[layer].clients, strict=True) if personal else ():
                self._exchange.store_pair(server, client, adapter, pair)
        if announced := self._changes.announcement(found, server.round):
            self.announce(server, announced)
        server.model.update(server.base.state.get("factors", {}))
        self._exchange.changed(server)

    # Hooks on clients

    def begin(self, client: ClientContext, message: Message) -> None:
        """Load the message and the client's own values; slots beyond the client's rank are zero."""
        if self._ranks.drawn:
            refuse_kept_moments(client, "with capacity='dynamic' a client trains other slots in each round")
        factors, level = self._ranks.adapters.factors, self._ranks.level(client)
        values = {name: value for name, value in message.tensors.items() if name in client.model}
        came = {parameter: values[parameter] for parameter in factors if parameter in values}
        known = self._exchange.client_values(client)
        for parameter, (adapter, name) in factors.items():
            # The server's values and those in the client's state use the scaling of the full rank.
            value = came[parameter] if parameter in came else known[parameter]
            own = self._exchange.own_factor(adapter, name, value, level, client.round)
            values[parameter] = padded_factor(adapter, name, own)
        copy_into(client.model, {**values, **{name: known[name] for name in self._kept}})
        self._exchange.received(client, came)
        self._slots.begin(client)
        if self._ranks.mixed:
            ones = {parameter: torch.ones_like(client.model[parameter]) for parameter in factors}
            client.round_state["own_slots"] = self._ranks.cut(ones, level)

    def before_step(self, step: LocalStep) -> None:
        """Drop the gradients of factors that are not trained, and the noise in slots beyond a client's rank."""
        for parameter in self.fixed_in_round(step.round):
            step.parameters[parameter].grad = None
        for parameter, own in step.round_state.get("own_slots", {}).items():
            gradient = step.parameters[parameter].grad
            # It is zero in the other slots already, unless DifferentialPrivacy has added noise.
            if gradient is not None:
                gradient.mul_(own)

    def end(self, client: ClientContext) -> Message:
        """The factors that the operator uses, and the other tensors; the client's own factors stay in its state."""
        level, factors = self._ranks.level(client), self._ranks.adapters.factors
        sent = {name: value for name, value in client.base.sent_up(client.model).items() if name not in factors}
        personal = {name: sent.pop(name).detach().clone() for name in sorted(self._kept)}
        selected, limits = self._slots.selected(client), dict[str, tuple[int, ...]]()
        for parameter, (adapter, name) in factors.items():
            if name in self.operator.sent_up(client.round):
                value = self._ranks.slots(adapter, name, client.model[parameter], level)
                slots = selected.get(adapter.name)
                sent |= {parameter: value} if slots is None else self._slots.sent(adapter, name, value, slots)
                limits |= self._slots.limits(adapter, name, value)
            elif name in self.operator.trained(client.round):
                ratio = self._exchange.from_own(adapter, name, client.round)
                own = padded_factor(adapter, name, client.model[parameter], ratio)
                if self._ranks.drawn:
                    known = self._exchange.client_values(client)[parameter]
                    own = with_further_slots(adapter, name, self._ranks.slots(adapter, name, own, level), known)
                personal[parameter] = own.clone()
        if personal:
            client.state["personal"] = personal
        return Message(sent, limits=limits)

    # Changes of base weights

    @property
    def announces(self) -> bool:
        return self.operator.changes_base or self.operator.redraws

    def update_base(self, base: Base, message: Mapping[str, Tensor]) -> None:
        self._changes.apply(base, message)

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**received, **base.state.get("factors", {})}

    def drawn_in(self, name: str, round_number: int) -> int:
        return round_number if self.operator.redraws and name in self._ranks.adapters.factors else 0

    def fixed_in_round(self, round_number: int) -> frozenset[str]:
        trained = self.operator.trained(round_number)
        return frozenset(each for each, (_, name) in self._ranks.adapters.factors.items() if name not in trained)

    # Clients of unequal rank

    def group_key(self, client: ClientInfo) -> Hashable:
        """A key of the adapters' scalings: clients with equal scalings may step together, whatever their ranks."""
        return self._ranks.scalings(self._ranks.level(client)) if self._ranks.mixed else None

    def configure(self, base: Base, client: ClientInfo | None) -> None:
        level = 1.0 if client is None else self._ranks.level(client)
        for _, adapter, _ in self._ranks.adapters:
            adapter.scaling = self._ranks.scaling(adapter, level)
        self._changes.configure(base)

    def in_own_form(self, client: ClientInfo, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self._ranks.mixed:
            return values
        level = self._ranks.level(client)
        own = {
            parameter: self._exchange.own_factor(adapter, name, values[parameter], level, client.round)
            for parameter, (adapter, name) in self._ranks.adapters.factors.items()
            if parameter in values
        }
        return {**values, **own}

    def model_for(self, server: Server, client: ClientInfo) -> Mapping[str, Tensor]:
        return self._ranks.cut(self._exchange.global_values(server, client.id), self._ranks.level(client))

    def has_full_model(self, server: Server, client: ClientInfo, state: State) -> bool:
        # A client's own factor is zero beyond a fixed rank, which also cuts the shared factor in the product.
        own = server.state.get("pairs", {}).get(client.id, {}).keys() | state.get("personal", {}).keys()
        cut = self._ranks.level(client) == 1 or not own.isdisjoint(self._ranks.adapters.factors)
        return cut and not self._ranks.drawn

    def variants(self, server: Server) -> dict[str, Mapping[str, Tensor]]:
        smaller = self._ranks.smaller_levels(server.base.clients)
        return {name: self._ranks.cut(server.parameters(), level) for name, level in smaller.items()}

    def computed(self, base: Base, client: ClientInfo) -> Mapping[str, float]:
        level = self._ranks.level(client)
        found = self._ranks.adapters.factors
        return {name: self._ranks.rank(adapter, level) / adapter.rank for name, (adapter, _) in found.items()}

    def rank_limit(self, module: nn.Module) -> int:
        return self._ranks.limit(module, self.adapter)

    def set_rank(self, client: int, rank: int) -> None:
        self._ranks.set_rank(client, rank)
        self.claims = replace(self.claims, needs_only_mean=False)

    # Factors that stay with clients

    def personal_model(self, client: ClientContext, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._ranks.cut(super().personal_model(client, model), self._ranks.level(client))

    def state_template(self, server: Server, client: ClientInfo) -> State:
        """The factors, which a broadcast leaves out if the client has them already."""
        received = {name: server.model[name] for name in self._ranks.adapters.factors}
        return {"received": received} if self._exchange.alternates else {}

    def note_answer(self, server: Server, client: ClientInfo) -> None:
        self._exchange.answered(server, client.id, self._ranks.level(client))

    def forget(self, server: Server, client: ClientInfo) -> None:
        self._exchange.forget(server, client.id)
